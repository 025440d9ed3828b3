/* Refusing numbers that the type or the scales of a scheme do not reach. */
#include <math.h>

#include "convert/decode/decode.h"
#include "quant/numbers.h"

bool mm_decode_fits(const mm_decoder *d, const mm_matrix *x, const mm_scheme *s, uint32_t row, uint32_t rows, mm_err *err) {
  const bool narrow = mm_is_plain(x) && x->weight->dtype == MM_BF16; /* mm_decode_codes read them */
  const float most = 65504 * (s->code == MM_CODE_INT8 ? 127.5f : 7.5f);
  const size_t n = (size_t)rows * x->cols;
  for (size_t i = 0; s->scale_of == MM_F16 && i < n; i++) {
    const float v = narrow ? mm_bf16_to_f32(((const uint16_t *)d->raw)[i]) : d->wide[i];
    if (fabsf(v) <= most) continue;
    return mm_fail(err, MM_UNSUPPORTED, "E_Q_SCALE", mm_hf_at(d->reader.hf, x->weight),
                   "found %g at row %zu, column %zu, expected at most %g, the largest number under the F16 scales of %s; expected another "
                   "--quant",
                   (double)v, row + i / x->cols, i % x->cols, (double)most, s->name);
  }
  return true;
}

bool mm_decode_stored(const mm_decoder *d, const mm_matrix *x, uint32_t row, const void *data, mm_dtype t, size_t n, mm_err *err) {
  const bool narrow = mm_is_plain(x) && x->weight->dtype == MM_BF16;
  const size_t i = mm_first_not_finite(data, t, n);
  if (i == n) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_Q_SCALE", mm_hf_at(d->reader.hf, x->weight),
                 "found %g at row %zu, column %zu, expected at most %g, the largest number in %s; expected another --quant",
                 (double)(narrow ? mm_bf16_to_f32(((const uint16_t *)d->raw)[i]) : d->wide[i]), row + i / x->cols, i % x->cols,
                 t == MM_F16 ? 65504.0 : (double)mm_bf16_to_f32(0x7f7f), mm_dtype_name(t));
}
