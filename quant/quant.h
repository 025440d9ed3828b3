/* Weight schemes: how a matrix of numbers becomes packed bytes, and back. No I/O here.
 *
 * A matrix W is [n, k], row-major, k along the contracted axis (y = x·Wᵀ). A scheme stores it as one to four planes. One stored
 * element of a plane stands for a cell of W: codes have cell {1, 1} (or {1, 2} for two nibbles in a byte), scales the block
 * they cover ({128, 128}), per-row scales {1, 0}, per-matrix scales {0, 0}; 0 means the whole extent. A plane is row-major over
 * its cells: [ceil(n/cell.n), ceil(k/cell.k)].
 *
 * Cutting commutes with packing: scales are chosen on the whole matrix, then rows and columns are cut. Where a cut falls inside
 * a scale's cell, the shard stores the scale on a finer grid (the same value repeated), codes untouched; so every reader takes
 * the cell sizes from the mm_packed it is given, never from the scheme. */
#ifndef MM_QUANT_QUANT_H
#define MM_QUANT_QUANT_H

#include "formats/tensor.h"
#include "quant/random.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_MAX_PLANES 4

typedef struct mm_cell {
  uint32_t n, k; /* rows and columns of W under one stored element; 0 = all of them */
} mm_cell;

typedef struct mm_plane {
  const char *suffix; /* appended to the tensor's name: "" for codes, "_scale_inv" … */
  mm_dtype dtype;
  mm_cell cell;
  bool scale; /* may be stored on a finer grid; codes may not */
} mm_plane;

/* Element i of a scale plane as f32. U8 holds E8M0 exponents, as other tools write them. U32 holds a scale whose f32 has no bits below the
 * 19 upper ones and, in the low byte, a zero point of codes. */
float mm_scale_value(mm_dtype t, const void *plane, size_t i);
/* The word of a scale and a zero point, and the zero point of element i of a plane of such words. */
uint32_t mm_scale_word(float scale, int8_t zero);
int8_t mm_zero_value(const void *plane, size_t i);

/* How scales are chosen. ABSMAX follows the convention of the format's own tools; MSE takes, from a fixed window of scales, the
 * one with the least squared error of the group. */
typedef enum mm_search {
  MM_SEARCH_ABSMAX,
  MM_SEARCH_MSE,
  MM_SEARCH_FOUR_SIX /* NVFP4 only: the better of mapping the block's maximum to 6 and to 4 (arXiv 2512.02010) */
} mm_search;

/* Arguments of `pack`: rows [0, n) of a strip, all k columns; finite (the caller refused NaN and infinity). */
typedef struct mm_pack_args {
  const float *w;       /* [n, k] exact f32, or NULL when bf16 is given */
  const uint16_t *bf16; /* [n, k] bf16: the same bytes come out as for its values in w, sooner */
  uint32_t n, k;
  float amax;       /* over the whole fusion group (w1 and w3; q, k and v), when the scheme says needs_amax; else unspecified */
  mm_search search; /* one that the scheme has; ABSMAX always */
  /* [k], or NULL for 1 everywhere: what a squared error in each column counts when scales are searched, such as the mean square of
   * the activations it meets. Positive, of ordinary size. */
  const float *importance;
} mm_pack_args;

/* The number that one code stands for before scaling. Two nibbles share a byte, the even column in the low one. */
typedef enum mm_code {
  MM_CODE_PLAIN, /* a number of plane 0's own dtype */
  MM_CODE_E4M3,
  MM_CODE_INT8,
  MM_CODE_E2M1,       /* nibble */
  MM_CODE_INT4,       /* nibble, two's complement: -8 … 7 */
  MM_CODE_INT4_OFFSET /* nibble, value + 8 */
} mm_code;

/* The rounding of the activations x [t, k] before a scheme's product: an index of mm_act_formats. */
typedef enum mm_act_quant {
  MM_ACT_KEPT,
  MM_ACT_FP8_TENSOR, /* under the static scale of the checkpoint, or one for each token where it has none */
  MM_ACT_FP8_TOKEN,
  MM_ACT_FP8_GROUP, /* 1 x 128 */
  MM_ACT_INT8_TOKEN,
  MM_ACT_NVFP4, /* 1 x 16, E4M3 scales under one f32 scale: static, or one for each token */
  MM_ACT_MXFP4, /* 1 x 32, E8M0 scales */
  MM_ACT_MXFP8  /* 1 x 32, E8M0 scales */
} mm_act_quant;

/* A token's row of x is rounded to codes under one scale for all of it, or for each group of columns (counted from the first column
 * of the uncut x). Formulas: activation.c. */
typedef struct mm_act_format {
  mm_code code;   /* E4M3, INT8 or E2M1; PLAIN: x is kept */
  uint32_t group; /* columns of a group; 0: the row */
  mm_dtype scale; /* of the groups: F32, F8_E8M0, or F8_E4M3 under the row's scale */
  bool fixed;     /* a static scale may stand for the row's */
} mm_act_format;
extern const mm_act_format mm_act_formats[];

/* Amaxes of a row: of all of it, then of each group of the whole_k columns of the uncut row. */
static inline uint32_t mm_act_amaxes(const mm_act_format *f, uint32_t whole_k) {
  return 1 + (f->group ? (whole_k + f->group - 1) / f->group : 0);
}
/* Raises amax[] to the magnitudes of x[k], columns first … first + k - 1 of the uncut row; the largest over all shares of a row are the
 * row's, whatever the cut. */
void mm_act_amax(const mm_act_format *f, const float *x, uint32_t k, uint32_t first, float *amax);
/* The scale of a row with this amax; a static scale is one of the largest that calibration saw. */
float mm_act_scale(const mm_act_format *f, float amax);
/* x[k] becomes the numbers that its codes stand for: code · scale. `fixed` is the static scale, 0 for none. NaN stays NaN. */
void mm_act_round(const mm_act_format *f, float *x, uint32_t k, uint32_t first, const float *amax, float fixed);
/* The same without the scales: x[k] becomes the numbers that codes alone stand for, and amax[] the scales: of the row in amax[0], or, in
 * groups, of each from amax[1] on, which those of NVFP4 are multiplied with that of the row. BF16 holds the numbers. */
void mm_act_codes(const mm_act_format *f, float *x, uint32_t k, uint32_t first, float *amax, float fixed);

/* A weight is the value of its code, less the zero point over it where plane 1 is of U32, times the product of the scales over it, in plane
 * order, in f32. */
typedef struct mm_scheme {
  const char *name;       /* the --quant word, the file's name, the manifest's word */
  const char *synonym[4]; /* words of other tools for the same bytes, in any case; NULL when fewer */
  const char *purpose;    /* what it is for, in one line */
  float sqnr;             /* dB that a Gaussian matrix keeps under its default search (make bench-quality); 0: kept but for rounding */
  mm_code code;           /* of plane 0 */
  mm_act_quant act;
  unsigned plane_count;
  mm_plane plane[MM_MAX_PLANES];
  bool needs_amax;
  bool signed_scale; /* scales may be below 0; otherwise all are above. They are finite and never 0 */
  mm_dtype scale_of; /* plane 1 is of U32 or F16: the type of the source's scales */
  unsigned searches; /* bits 1u << mm_search, beyond ABSMAX; MSE, where present, is the default */
  /* Fills plane[i] densely for a strip of mm_scheme_rows rows or a multiple of them (the last of a matrix may be shorter): ceil(n/cell.n) x
   * ceil(k/cell.k) elements of the scheme's own cells; a {0, 0} plane is written whole by every strip, always the same. Deterministic: the
   * same bytes on every CPU and for every split into strips. */
  void (*pack)(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]);
} mm_scheme;

/* A packed tensor in memory: `lead` matrices (1 for a plain linear) of [n, k], planes one after the other per lead. Borrows all. */
typedef struct mm_packed {
  const mm_scheme *scheme;
  uint32_t lead, n, k;
  const void *plane[MM_MAX_PLANES]; /* each [lead, ceil(n/cell.n), ceil(k/cell.k)], naturally aligned */
  mm_cell cell[MM_MAX_PLANES];      /* of the stored grid: scheme's, or finer for scales */
  uint32_t first_k, whole_k;        /* cut along k: column 0 is column first_k of the whole_k uncut ones; 0, 0: not cut */
  uint32_t cut_k;                   /* the most that divides every rank's first own column (padding is not its own); 0: none is cut */
  float input_scale;                /* static scale of x (mm_act_format.fixed); 0: none */
  uint32_t tensor;                  /* its number in the manifest it comes from */
  mm_random random;                 /* of a weight without planes */
} mm_packed;

/* True if plane 1 has a zero point with each scale. */
static inline bool mm_has_zeros(const mm_scheme *s) { return s->plane_count > 1 && s->plane[1].dtype == MM_U32; }

/* Rows under one element of a scheme's planes: pack takes multiples of them. */
static inline uint32_t mm_scheme_rows(const mm_scheme *s) {
  uint32_t rows = 1;
  for (unsigned i = 0; i < s->plane_count; i++) rows = s->plane[i].cell.n > rows ? s->plane[i].cell.n : rows;
  return rows;
}

/* True if a scheme's scale may be v: the rule of packers, of converters that pass scales through, and of minimax-verify. */
bool mm_scale_allowed(const mm_scheme *s, float v);

/* False if element i of plane 1 is a word with another zero point than codes have, or with bits of neither. */
bool mm_zero_allowed(const mm_scheme *s, const void *plane, size_t i);

/* Rows [row, row + rows) of matrix `lead` as f32, out[rows, k]: codes decoded by scheme->code times the scale planes on their stored grid.
 */
void mm_unpack(const mm_packed *m, uint32_t lead, uint32_t row, uint32_t rows, float *out);

/* The factors by which unpack multiplies the codes of a row: the product of the scales over each column, out[k]; 1 where a scheme has no
 * scale. */
void mm_row_scales(const mm_packed *m, uint32_t lead, uint32_t row, float *out);

static inline uint32_t mm_cells(uint32_t extent, uint32_t cell) { return cell == 0 ? 1 : extent / cell + (extent % cell != 0); }
/* Elements of plane i of one matrix [n, k] under `cell`. */
static inline uint64_t mm_plane_elements(uint32_t n, uint32_t k, mm_cell cell) {
  return (uint64_t)mm_cells(n, cell.n) * mm_cells(k, cell.k);
}

/* Random numbers in place of planes that no file holds (random.h, random_planes.c), of variance about 1/k, k the columns of the uncut
 * matrix. The scale under which codes of uniformly random bits have that variance; the E8M0 exponent nearest to a scale. */
float mm_random_scale(mm_code code, uint32_t k);
uint8_t mm_random_exponent(float scale);
/* All bytes of a plane of w, as w->random says; w's shape, cells and cut, but no planes, are there. */
void mm_random_plane(const mm_packed *w, unsigned plane, void *to);

/* Registry: NULL when unknown. Names are those of docs/quantisation.md and their synonyms ("block_wise_fp8", "FP8_BLOCK"). */
const mm_scheme *mm_scheme_find(const char *name);
const mm_scheme *mm_scheme_at(size_t i); /* NULL past the end */
/* Bits that a weight takes, scales included, in rows of 3072 of a matrix of 3072 rows. */
double mm_scheme_bits(const mm_scheme *s);
/* The plain scheme that stores a source type as it is (BF16, F16, F32); NULL for other types. */
const mm_scheme *mm_scheme_plain(mm_dtype t);

#ifdef __cplusplus
}
#endif
#endif
