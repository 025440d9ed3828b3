/* Reading strips of source matrices. */
#include "convert/decode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quant/numbers.h"

void mm_decoder_open(mm_decoder *d, const mm_hf *hf) {
  *d = (mm_decoder){0};
  mm_hf_reader_open(&d->reader, hf);
}

void mm_decoder_close(mm_decoder *d) {
  mm_hf_reader_close(&d->reader);
  free(d->buffer);
  free(d->scale_raw);
  free(d->scale);
  free(d->wide);
}

/* Bits that are all set in exactly the values that are not finite. */
static uint32_t nonfinite_mask(mm_dtype t) {
  return t == MM_F32 ? 0x7f800000u : t == MM_BF16 ? 0x7f80u : t == MM_F16 ? 0x7c00u : 0x7fu /* E4M3: NaN only */;
}

static uint32_t bits_at(const void *data, size_t size, size_t i) {
  return size == 4 ? ((const uint32_t *)data)[i] : size == 2 ? ((const uint16_t *)data)[i] : ((const uint8_t *)data)[i];
}

/* Index of the first value that is not finite, or n. Blocks are tested whole (a loop that vectorises), then searched. */
static size_t first_not_finite(const void *data, mm_dtype t, size_t n) {
  const size_t block = 4096, size = mm_dtype_size(t);
  const uint32_t mask = nonfinite_mask(t);
  for (size_t i = 0; i < n; i += block) {
    size_t end = i + block < n ? i + block : n;
    unsigned any = 0;
    if (size == 4)
      for (size_t j = i; j < end; j++) any |= (((const uint32_t *)data)[j] & mask) == mask;
    else if (size == 2)
      for (size_t j = i; j < end; j++) any |= (((const uint16_t *)data)[j] & mask) == mask;
    else
      for (size_t j = i; j < end; j++) any |= (((const uint8_t *)data)[j] & mask) == mask;
    for (size_t j = i; any && j < end; j++)
      if ((bits_at(data, size, j) & mask) == mask) return j;
  }
  return n;
}

/* Fails if any of the n values of rows from `row` is not finite. */
static bool all_finite(const mm_decoder *d, const mm_matrix *x, uint32_t row, const void *data, mm_dtype t, size_t n, mm_err *err) {
  size_t i = first_not_finite(data, t, n);
  if (i == n) return true;
  const mm_hf_tensor *w = x->weight;
  uint64_t at = w->offset + x->at + ((uint64_t)row * x->cols + i) * mm_dtype_size(w->dtype);
  return mm_fail(err, MM_BAD_INPUT, "E_NONFINITE", mm_at_offset(d->reader.hf->file[w->file].path, w->original, at),
                 "found NaN or infinity at row %zu, column %zu, expected finite values", row + i / x->cols, i % x->cols);
}

#define STREAM_MIN ((size_t)256 << 10) /* smaller reads go through the page cache */

/* Room for n bytes wherever they start inside an aligned window. The old contents are not kept. */
static bool window(mm_decoder *d, size_t n, mm_err *err) {
  size_t want = n + 2 * MM_DIRECT;
  if (want <= d->buffer_cap) return true;
  void *fresh = NULL;
  free(d->buffer);
  d->buffer = NULL;
  d->buffer_cap = 0;
  if (posix_memalign(&fresh, MM_DIRECT, want) != 0) return mm_fail_memory(err, want);
  d->buffer = fresh;
  d->buffer_cap = want;
  return true;
}

bool mm_decode_codes(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  const mm_hf_tensor *t = x->weight;
  size_t size = mm_dtype_size(t->dtype), n = (size_t)rows * x->cols, bytes = n * size, skew = 0;
  uint64_t at = x->at + (uint64_t)row * x->cols * size;
  if (!window(d, bytes, err)) return false;
  if (!(bytes < STREAM_MIN ? mm_hf_read(&d->reader, t, at, d->buffer, bytes, err)
                           : mm_hf_stream(&d->reader, t, at, d->buffer, bytes, &skew, err)))
    return false;
  if (skew % size != 0) { /* a file whose tensors do not start on their own size */
    memmove(d->buffer, d->buffer + skew, bytes);
    skew = 0;
  }
  d->raw = d->buffer + skew;
  return all_finite(d, x, row, d->raw, t->dtype, n, err);
}

static float scale_value(const void *p, mm_dtype t, size_t i) {
  if (t == MM_F32) return ((const float *)p)[i];
  if (t == MM_BF16) return mm_bf16_to_f32(((const uint16_t *)p)[i]);
  return mm_e8m0_to_f32(((const uint8_t *)p)[i]);
}

bool mm_decode_scales(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  const mm_hf_tensor *t = x->scale;
  mm_cell block = d->reader.hf->block;
  size_t cols = mm_cells(x->cols, block.k), n = mm_cells(rows, block.n) * cols, size = mm_dtype_size(t->dtype);
  uint64_t at = x->scale_at + row / block.n * cols * size;
  if (!mm_grow(&d->scale_raw, &d->scale_raw_cap, n * size, 1, err) || !mm_grow((void **)&d->scale, &d->scale_cap, n, sizeof(float), err) ||
      !mm_hf_read(&d->reader, t, at, d->scale_raw, n * size, err))
    return false;
  for (size_t i = 0; i < n; i++) {
    d->scale[i] = scale_value(d->scale_raw, t->dtype, i);
    if (!(d->scale[i] > 0) || !isfinite(d->scale[i]))
      return mm_fail(err, MM_BAD_INPUT, "E_Q_SCALE", mm_at_offset(d->reader.hf->file[t->file].path, t->original, t->offset + at + i * size),
                     "found scale %g of block row %zu, column %zu, expected a positive finite number", (double)d->scale[i],
                     row / block.n + i / cols, i % cols);
  }
  return true;
}

bool mm_decode_f32(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  size_t n = (size_t)rows * x->cols;
  if (!mm_decode_codes(d, x, row, rows, err) || !mm_grow((void **)&d->wide, &d->wide_cap, n, sizeof(float), err)) return false;
  if (!x->scale)
    return mm_widen(d->wide, d->raw, x->weight->dtype, n) ||
           mm_fail(err, MM_BUG, "E_DTYPE", mm_at(NULL, x->weight->name), "found no decoder");
  if (!mm_decode_scales(d, x, row, rows, err)) return false;
  const mm_scheme *fp8 = mm_scheme_find("block_fp8");
  mm_packed view = {.scheme = fp8, .lead = 1, .n = rows, .k = x->cols, .plane = {d->raw, d->scale}, .cell = {{1, 1}, d->reader.hf->block}};
  fp8->unpack(&view, 0, 0, rows, d->wide);
  return all_finite(d, x, row, d->wide, MM_F32, n, err);
}
