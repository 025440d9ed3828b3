/* Source matrices as numbers: rows of a matrix in whatever encoding the source has, as f32 or on the way into a packed scheme that
 * holds the same bits, checked on the way. */
#ifndef MM_CONVERT_DECODE_H
#define MM_CONVERT_DECODE_H

#include "convert/source/encoding.h"

/* A buffer that grows. */
typedef struct mm_buffer {
  void *data;
  size_t cap;
} mm_buffer;

/* For one thread: a reader and scratch for one strip of rows. Buffers grow to the largest strip asked for; codes that lie on their side
 * are read a whole matrix at a time and kept while its strips follow. */
typedef struct mm_decoder {
  mm_hf_reader reader;
  void *raw;       /* source codes, inside buffer */
  uint8_t *buffer; /* aligned for direct reads */
  size_t buffer_cap;
  float *scale; /* as f32 */
  float *wide;  /* numbers */
  size_t scale_cap, wide_cap;
  mm_buffer stored; /* the tensor read last, as it is stored */
  mm_buffer grid, codes, zero, order, smooth, words;
  mm_buffer whole; /* the codes of whole_of, from whole_at */
  const mm_hf_tensor *whole_of;
  uint64_t whole_at;
  float global;
  const mm_hf_tensor *unreached; /* the first static scale of activations that was 0 */
  bool reached;                  /* another was positive */
  bool regraded;                 /* the planes decoded last stand for other numbers than the source's, under another global scale */
  uint64_t zeroed;               /* values of the rows decoded last that were not finite and are 0 now, where hf allows it */
} mm_decoder;

void mm_decoder_open(mm_decoder *d, const mm_hf *hf);
void mm_decoder_close(mm_decoder *d);

/* Rows [row, row + rows) of x; row must be a multiple of the source's block height. Values that are not finite (unless hf allows them:
 * then they are taken as 0 and counted), and scales, zero points and group indices that cannot be, are MM_BAD_INPUT (E_NONFINITE,
 * E_Q_SCALE, E_Q_ZERO, E_Q_ORDER) with the tensor and the file offset. */
/* Codes as stored, into d->raw: [rows, cols], two or four columns to a byte or word where they are packed so. Not for codes that lie on
 * their side or share bytes between rows. */
MM_MUST_USE bool mm_decode_codes(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err);
/* Numbers, into d->wide: [rows, cols]. */
MM_MUST_USE bool mm_decode_f32(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err);
/* Fails where the rows that were decoded last, a strip of BF16 as codes and others as numbers, have one that no scale of s reaches:
 * MM_UNSUPPORTED E_Q_SCALE. */
MM_MUST_USE bool mm_decode_fits(const mm_decoder *d, const mm_matrix *x, const mm_scheme *s, uint32_t row, uint32_t rows, mm_err *err);
/* Fails where the same rows, stored in type t without scales (data[n]), have a number that is beyond it: the same error. */
MM_MUST_USE bool mm_decode_stored(const mm_decoder *d, const mm_matrix *x, uint32_t row, const void *data, mm_dtype t, size_t n,
                                  mm_err *err);
/* The one scale of a whole matrix: NVFP4's global one as a multiplier, or the only one. */
MM_MUST_USE bool mm_decode_global(mm_decoder *d, const mm_matrix *x, float *out, mm_err *err);
/* The same, and the steps of the global scale (mm_global_step), 0 where the source stores no reciprocal. */
MM_MUST_USE bool mm_decode_global_steps(mm_decoder *d, const mm_matrix *x, float *out, int32_t *steps, mm_err *err);
/* The global scale under which all `pieces` matrices of NVFP4 from x on keep their numbers, all of them read for it where their own
 * scales differ; MM_UNSUPPORTED E_Q_KEEP where there is none. */
MM_MUST_USE bool mm_decode_common(mm_decoder *d, const mm_matrix *x, unsigned pieces, const mm_scheme *s, mm_cell grid, float *out,
                                  mm_err *err);
/* The static scale of x's activations as a multiplier; 0: the source has none, or one that calibration never reached. */
MM_MUST_USE bool mm_decode_input(mm_decoder *d, const mm_matrix *x, float *out, mm_err *err);
/* Fails where static scales were read, and all were 0: MM_BAD_INPUT E_Q_SCALE. */
MM_MUST_USE bool mm_decode_inputs_given(const mm_decoder *d, mm_err *err);
/* A scheme that keeps a matrix on this grid (mm_encoding_keeps). `global` is the scale that the packed tensor's matrices share; only NVFP4
 * may have another one of its own, and then changes to it. */
typedef struct mm_stored_as {
  const mm_scheme *scheme;
  mm_cell grid;
  float global;
} mm_stored_as;
/* The planes of x as the scheme keeps it, for these rows. */
MM_MUST_USE bool mm_decode_planes(mm_decoder *d, const mm_matrix *x, const mm_stored_as *as, uint32_t row, uint32_t rows,
                                  const void *plane[MM_MAX_PLANES], mm_err *err);

/* --- between the files of this folder --- */
/* Index of the first of n values that is not finite, or n. */
size_t mm_first_not_finite(const void *data, mm_dtype t, size_t n);
/* Rows [row, row + rows) and columns [0, cols) of a matrix of unsigned `bits`-bit numbers that lie several to a little-endian word, one
 * byte each into out (words.c). Row 0 begins a word. */
typedef struct mm_words {
  const void *data;
  unsigned bits;
  size_t size;   /* bytes of a word */
  uint64_t line; /* words from one line to the next */
  bool turned;   /* lines run along rows */
  mm_cell cell;  /* numbers in a word; one side is 1 */
  const uint8_t *order;
} mm_words;
void mm_words_spread(const mm_words *w, uint32_t row, uint32_t rows, uint32_t cols, uint8_t *out);

/* Puts NVFP4 rows [rows, k] under another global scale (regrade.c): the block scales that stand for the same numbers where such
 * E4M3 codes exist, else the best block scale with codes of its own. True when every number is the same afterwards. */
bool mm_nvfp4_regrade(uint8_t *codes, uint8_t *scales, uint32_t rows, uint32_t k, float from, float to);

#endif
