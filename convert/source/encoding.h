/* How source checkpoints store weights. An encoding is a row of one table: what the tensors of a linear are called, how they are typed
 * and shaped, and what their numbers stand for. Recognising, refusing, decoding and keeping follow from the rows.
 *
 * Every encoding means, in f32, W[n, k] = (code - zero) · scale · smooth[k], a scale being e4m3 · global where there is a global one.
 * Tensors decide which encoding a matrix has; the configuration settles only what they leave open (block sizes, GPTQ's zero points). */
#ifndef MM_CONVERT_ENCODING_H
#define MM_CONVERT_ENCODING_H

#include "convert/source/hf.h"

/* The shape of a tensor that covers a matrix [N, K] by cells. Rows of matrices that lie side by side add up; a stack of experts has
 * one more axis in front. */
typedef enum mm_scale_span {
  MM_SPAN_GRID,   /* [rows, columns] of cells */
  MM_SPAN_TURNED, /* [columns, rows] of cells */
  MM_SPAN_SPREAD, /* [rows, 1, columns, 1] of cells */
  MM_SPAN_ROWS,   /* [N] or [N, 1] */
  MM_SPAN_COLS,   /* [K] */
  MM_SPAN_ONE,    /* [], [1] or [1, 1]; of a stack [E], [E, 1] or [E, pieces] */
  MM_SPAN_SIDES   /* [2] */
} mm_scale_span;

#define MM_CELL_BLOCK UINT32_MAX       /* a side of the configuration's block */
#define MM_CELL_GROUP (UINT32_MAX - 1) /* K over the tensor's own extent */

typedef struct mm_stored_form {
  const char *suffix; /* in place of "weight" at the end of the weight's name; NULL: the encoding has no such tensor */
  uint32_t dtypes;    /* bits 1u << mm_dtype; F4 has cells of one column where U8 has two */
  mm_scale_span span;
  mm_cell cell; /* weights under one element */
  bool optional;
} mm_stored_form;

typedef struct mm_encoding {
  const char *name;
  mm_stored_form codes, part[MM_COMPANIONS];
  mm_code code;          /* of the codes as read, after `flip` */
  uint8_t flip;          /* exclusive-or of each byte of codes */
  bool reciprocal;       /* global and input divide */
  bool signed_scale;     /* scales may be negative */
  bool less;             /* zero points are stored less mm_quantization.zero_less */
  const uint8_t *order;  /* [8] nibble of each of a word's columns; NULL: in order */
  const char *unread[3]; /* says nothing about the weights */
  const char *scheme;    /* the packed scheme that keeps it; NULL: none does */
  bool packed;           /* it is that scheme, of a packed source */
  bool whole;            /* only where mm_quantization.whole */
} mm_encoding;

/* The table, ended by a row without a name. Row 0 is the plain one: BF16, F16, F32. */
extern const mm_encoding mm_encodings[];

/* Suffixes of what is refused by name. */
typedef struct mm_refused_suffix {
  const char *suffix, *code, *what;
} mm_refused_suffix;
extern const mm_refused_suffix mm_refused_suffixes[];

/* Where a matrix lies: alone, or among others in a fused tensor. */
typedef struct mm_site {
  const char *name; /* canonical, of the plain tensor: "…w1.weight", "…experts.w13_weight" */
  bool vector;      /* [rows] */
  uint32_t rows, cols;
  uint32_t entry, entries; /* of a stack of experts; entries 0: no stack */
  unsigned piece, pieces;  /* along rows; alone: piece 0 of 1 */
  uint32_t piece_rows[3];
  mm_dtype assumed; /* its type where only names are known */
} mm_site;

/* The tensor that holds its codes in some encoding, or NULL. */
const mm_hf_tensor *mm_encoding_codes(const mm_hf *hf, const mm_site *p, bool plain_only);
/* Finds the matrix in whatever encoding its tensors have (with plain_only: unquantised) and marks them as used. Absent: none of the
 * tensors that could hold its codes exists. */
mm_found mm_encoding_find(mm_hf *hf, const mm_site *p, bool plain_only, mm_matrix *out, mm_err *err);
/* Describes an unused tensor: returns the code of the refusal, and in `what` the words. */
const char *mm_encoding_leftover(const mm_hf *hf, const mm_hf_tensor *t, char what[512]);

/* Bits of one weight's code. */
static inline unsigned mm_code_bits(const mm_matrix *x) {
  mm_code c = x->encoding->code;
  return c == MM_CODE_PLAIN ? mm_dtype_bits(x->weight->dtype) : c == MM_CODE_E4M3 || c == MM_CODE_INT8 ? 8 : 4;
}
static inline bool mm_is_plain(const mm_matrix *x) { return x->encoding->code == MM_CODE_PLAIN; }
/* True when each row's codes lie together, in bytes, and their scales alone say what they stand for. */
bool mm_encoding_is_grid(const mm_matrix *x);
/* True of integers in words of I32 that lie on their side or have zero points, in the order of their groups: mm_decode_planes makes a
 * scheme's planes of them. */
bool mm_encoding_is_words(const mm_matrix *x);
/* The target format that writes x's words as they are, "awq" or "gptq"; NULL: x has none, or those of compressed-tensors. */
const char *mm_encoding_words_form(const mm_matrix *x);
/* True when scheme s holds x bit for bit, scales (plane 1) stored on this grid: the same codes under the same scales on it or a coarser
 * one. */
bool mm_encoding_keeps(const mm_matrix *x, const mm_scheme *s, mm_cell grid);
/* The scheme's own grid of scales, or a finer one that divides it where the matrices of a packed tensor come on that. */
mm_cell mm_encoding_grid(const mm_matrix *x, size_t matrices, const mm_scheme *s);
/* Why no packed scheme holds x bit for bit, and what else there is to choose, in words. */
const char *mm_encoding_unkept(const mm_matrix *x, char out[640]);
/* True if one of the matrices has zero points that are read in GPTQ's second format. */
bool mm_encoding_second_gptq(const mm_hf *hf, const mm_matrix *x, size_t matrices);
/* The scheme that `--quant none` means for the matrices of a packed tensor, `pieces` to each of its entries; NULL: none would do. */
const mm_scheme *mm_encoding_scheme(const mm_matrix *x, size_t matrices, unsigned pieces);

/* Reads config.json's quantization_config, or what stands for it (encoding_config.c). MM_UNSUPPORTED E_Q_METHOD and E_Q_TRANSFORM name
 * what is not read; `fallback` is the method of a file that does not say. */
MM_MUST_USE bool mm_quantization_parse(mm_hf *hf, const mm_json *j, const char *path, const char *fallback, mm_err *err);

/* Takes blocks of 128 x 128 where the checkpoint declares FP8 and no size, its headers are known and no other power of two explains all
 * block scales, on either side (encoding_block.c). */
void mm_quantization_block(mm_hf *hf);

/* The kind of numbers that codes stand for. */
mm_numbers mm_numbers_of(mm_code c);

#endif
