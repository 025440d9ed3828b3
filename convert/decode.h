/* Source matrices as numbers: rows of a matrix in whatever encoding the source has, raw or as f32, checked on the way. */
#ifndef MM_CONVERT_DECODE_H
#define MM_CONVERT_DECODE_H

#include "convert/hf.h"

/* For one thread: a reader and scratch for one strip of rows. Buffers grow to the largest strip asked for. */
typedef struct mm_decoder {
  mm_hf_reader reader;
  void *raw;       /* source codes, inside buffer */
  uint8_t *buffer; /* aligned for direct reads */
  void *scale_raw;
  float *scale; /* block scales as f32 */
  float *wide;  /* numbers */
  size_t buffer_cap, scale_raw_cap, scale_cap, wide_cap;
} mm_decoder;

void mm_decoder_open(mm_decoder *d, const mm_hf *hf);
void mm_decoder_close(mm_decoder *d);

/* Rows [row, row + rows) of x; row must be a multiple of the source's block height. Values that are not finite, and scales that are not
 * positive and finite, are MM_BAD_INPUT (E_NONFINITE, E_Q_SCALE) with the tensor and the file offset. */
/* Codes as stored, into d->raw: [rows, cols] of the source dtype. */
bool mm_decode_codes(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err);
/* Block scales that cover the rows, into d->scale: [ceil(rows/bn), ceil(cols/bk)]. Only for matrices with a scale. */
bool mm_decode_scales(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err);
/* Numbers, into d->wide: [rows, cols]. */
bool mm_decode_f32(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err);

#endif
