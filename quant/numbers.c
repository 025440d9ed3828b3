/* Number formats: value tables and the encoders that also see NaN and infinity. The only float arithmetic is one addition and
 * one exact multiplication, so the results need round-to-nearest mode and f32 subnormals, nothing else. */
#include "quant/numbers.h"

#include <math.h>

#define FROM2(V, c)             V(c), V((c) + 1)
#define FROM4(V, c)             FROM2(V, c), FROM2(V, (c) + 2)
#define FROM8(V, c)             FROM4(V, c), FROM4(V, (c) + 4)
#define FROM16(V, c)            FROM8(V, c), FROM8(V, (c) + 8)
#define FROM64(V, c)            FROM16(V, c), FROM16(V, (c) + 16), FROM16(V, (c) + 32), FROM16(V, (c) + 48)
#define FROM256(V)              FROM64(V, 0), FROM64(V, 64), FROM64(V, 128), FROM64(V, 192)
#define SIGNED(value, negative) ((negative) ? -(value) : (value))

#define E4M3_ABS(e, m) ((e) == 15 && (m) == 7 ? NAN : (e) == 0 ? (float)(m)*0x1p-9f : (float)((8 + (m)) << (e)) * 0x1p-10f)
#define E4M3(c)        SIGNED(E4M3_ABS((c) >> 3 & 15, (c)&7), (c) >> 7)
const float mm_e4m3_value[256] = {FROM256(E4M3)};

const float mm_e2m1_value[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float mm_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, u = (uint32_t)(h & 0x7fffu) << 13;
  if (u > 0x0f800000u) return mm_f32_from_bits(sign | u | 0x7fc00000u); /* NaN, quieted as the CPU's own conversion does */
  if (u == 0x0f800000u) return mm_f32_from_bits(sign | 0x7f800000u);
  return mm_f32_from_bits(sign | mm_f32_bits(mm_f32_from_bits(u) * 0x1p112f));
}

uint16_t mm_f32_to_f16(float x) {
  uint32_t b = mm_f32_bits(x), u = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (u >> 13 & 0x3ffu));
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520, the tie above 65504 */
  return (uint16_t)(sign | mm_small_float(u, 0x38800000u, 10));
}

uint8_t mm_f32_to_e4m3(float x) { return x == x ? mm_finite_to_e4m3(x) : (uint8_t)(mm_f32_bits(x) >> 24 | 0x7fu); }

uint8_t mm_f32_to_e2m1(float x) { return x == x ? mm_finite_to_e2m1(x) : 0; }

bool mm_widen(float *out, const void *in, mm_dtype t, size_t n) {
  const uint16_t *h = in;
  size_t i = 0;
  switch (t) {
    case MM_F32:
      if (n) memcpy(out, in, n * sizeof(float)); /* of no numbers `out` may be NULL */
      return true;
    case MM_BF16:
      for (; i + 32 <= n; i += 32) /* whole runs, so that they become SIMD */
        for (size_t j = i; j < i + 32; j++) out[j] = mm_bf16_to_f32(h[j]);
      for (; i < n; i++) out[i] = mm_bf16_to_f32(h[i]);
      return true;
    case MM_F16:
      for (; i < n; i++) out[i] = mm_f16_to_f32(h[i]);
      return true;
    default: return false;
  }
}
