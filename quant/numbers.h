/* Number formats, exact to the bit. Decoders are exact; encoders from f32 round to nearest, ties to even, and saturate
 * where the name says so. Formulas: safetensors / OCP FP8 (E4M3FN), OCP MX v1.0 (E2M1, E8M0), IEEE 754-2019.
 * Scalars are inline and free of branches, so that loops over them vectorise. */
#ifndef MM_QUANT_NUMBERS_H
#define MM_QUANT_NUMBERS_H

#include <string.h>

#include "formats/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline uint32_t mm_f32_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
static inline float mm_f32_from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

static inline float mm_bf16_to_f32(uint16_t h) { return mm_f32_from_bits((uint32_t)h << 16); }
/* Round to nearest even; overflow gives infinity. x is not NaN. */
static inline uint16_t mm_finite_to_bf16(float x) {
  uint32_t u = mm_f32_bits(x);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
/* The same for any x: NaN stays NaN (quieted, sign and upper payload kept). */
static inline uint16_t mm_f32_to_bf16(float x) {
  uint32_t u = mm_f32_bits(x);
  return (u & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((u >> 16) | 0x40u) : mm_finite_to_bf16(x);
}
float mm_f16_to_f32(uint16_t h);
uint16_t mm_f32_to_f16(float x); /* RNE; overflow gives infinity; NaN stays NaN */

/* Tables of the value of every code (NaN codes are NaN). */
extern const float mm_e4m3_value[256];
extern const float mm_e2m1_value[16];
/* The same without a table: the code's bits lie where bf16 and f32 keep exponent and mantissa, only the bias differs. */
static inline float mm_e4m3_to_f32(uint8_t c) {
  uint16_t u = c & 0x7f, nan = u == 0x7f ? 0x7fc0 : 0;
  return mm_bf16_to_f32((uint16_t)((c & 0x80) << 8 | u << 4 | nan)) * 0x1p120f;
}
static inline float mm_e2m1_to_f32(uint8_t c) {
  return mm_f32_from_bits((uint32_t)(c & 8) << 28 | mm_f32_bits(mm_f32_from_bits((uint32_t)(c & 7) << 22) * 0x1p126f));
}
static inline float mm_e8m0_to_f32(uint8_t e) {
  return e == 255 ? mm_f32_from_bits(0x7fc00000u) : e == 0 ? mm_f32_from_bits(0x00400000u) : mm_f32_from_bits((uint32_t)e << 23);
}

/* Magnitude u (f32 bits, at most the format's largest value) to the code of a float format with `mantissa` bits whose smallest
 * normal number has the f32 bits `least`. Adding 2^(23 - mantissa) times the binade's power of two puts the format's step at the
 * adder's last place, so the adder rounds to nearest even; what was added counts the steps. Subnormals share the lowest binade.
 * Only the low 16 bits of the result count, so that the codes below `least` are taken off in the adder too (as an even number). */
static inline uint32_t mm_small_float(uint32_t u, uint32_t least, unsigned mantissa) {
  uint32_t binade = (u > least ? u : least) & 0x7f800000u, below = least >> (23 - mantissa);
  float magic = mm_f32_from_bits(binade + ((23 - mantissa) << 23) + (uint16_t)(0 - below));
  return mm_f32_bits(mm_f32_from_bits(u) + magic) + (binade >> (23 - mantissa));
}

/* Saturating encoders (±448, ±6 beyond the largest value). x is not NaN. From a magnitude's bits only the low byte counts. */
static inline uint32_t mm_magnitude_to_e4m3(uint32_t u) { return mm_small_float(u < 0x43e00000u ? u : 0x43e00000u, 0x3c800000u, 3); }
static inline uint8_t mm_finite_to_e4m3(float x) {
  uint32_t b = mm_f32_bits(x);
  return (uint8_t)((b >> 24 & 0x80u) | mm_magnitude_to_e4m3(b & 0x7fffffffu));
}
static inline uint8_t mm_finite_to_e2m1(float x) {
  uint32_t b = mm_f32_bits(x), u = b & 0x7fffffffu;
  return (uint8_t)((b >> 28 & 0x8u) | mm_small_float(u < 0x40c00000u ? u : 0x40c00000u, 0x3f800000u, 1));
}
/* The same for any x: NaN gives S|0x7F (E4M3) and +0 (E2M1, which has no NaN: callers refuse NaN first). */
uint8_t mm_f32_to_e4m3(float x);
uint8_t mm_f32_to_e2m1(float x);

/* n elements of a stored plain type (BF16, F16, F32) to f32; out may be NULL where n is 0. */
bool mm_widen(float *out, const void *in, mm_dtype t, size_t n);

#ifdef __cplusplus
}
#endif
#endif
