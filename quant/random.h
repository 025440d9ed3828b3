/* Random numbers of weights that no file holds: functions of a seed and of the place in the uncut weight alone, so that ranks hold parts of
 * the same model however it is cut, on the host and on a GPU. */
#ifndef MM_QUANT_RANDOM_H
#define MM_QUANT_RANDOM_H

#include <stdint.h>

#ifdef __CUDACC__
#define MM_RANDOM_FUNCTION static inline __host__ __device__
#else
#define MM_RANDOM_FUNCTION static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Row i of a weight is row from[s] + i - at[s] of the uncut matrix, s the last with at[s] <= i; its column 0 is mm_packed.first_k. Its
 * matrix 0 is matrix `first`. Vectors are within 0.01 of `centre`. `skew`, below 1: rows of bf16 and f32 matrices are 1 - skew to
 * 1 + skew times as large as without, so that a router prefers some experts. */
typedef struct mm_random {
  uint32_t seed; /* 0: any numbers */
  uint32_t first;
  uint32_t at[3], from[3];
  float centre, skew;
  float gain; /* that rows of matrices are multiplied with; 0: 1 */
} mm_random;

/* The uncut matrix's row of row i. */
MM_RANDOM_FUNCTION uint32_t mm_random_row(const mm_random *r, uint32_t i) {
  const uint32_t s = r->at[2] && i >= r->at[2] ? 2 : r->at[1] && i >= r->at[1] ? 1 : 0;
  return r->from[s] + i - r->at[s];
}

/* The seed of a plane's numbers: place 0 for codes, 1 for scales, 2 for the scale of a matrix. */
MM_RANDOM_FUNCTION uint32_t mm_random_seed(uint32_t seed, uint32_t place) { return seed << 2 | place; }

/* 32 bits of a place below [2^16, 2^24, 2^24]: splitmix64 (Steele, Lea, Flood 2014). */
MM_RANDOM_FUNCTION uint32_t mm_random_bits(uint32_t seed, uint32_t matrix, uint32_t row, uint32_t column) {
  uint64_t x = ((uint64_t)matrix << 48) + ((uint64_t)row << 24) + column;
  x += seed * UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
  return (uint32_t)(x >> 32);
}

/* The same as a number in [0, 1). */
MM_RANDOM_FUNCTION float mm_random_share(uint32_t bits) { return (float)(bits >> 8) * 0x1p-24f; }

/* What a row of the uncut matrix is multiplied with for `skew` and `gain`, by the seed of its codes. */
MM_RANDOM_FUNCTION float mm_random_factor(const mm_random *r, uint32_t seed, uint32_t matrix, uint32_t row) {
  const float factor = r->skew == 0 ? 1 : 1 + r->skew * (2 * mm_random_share(mm_random_bits(seed | 3, matrix, row, 0)) - 1);
  return r->gain == 0 ? factor : r->gain * factor;
}

/* Four bytes of codes from random bits. Of 8-bit codes none is a NaN of E4M3. Of int4 codes, stored as value + 8, none is -8: their mean is
 * zero as that of weights is, and rows do not come to prefer the same experts. */
MM_RANDOM_FUNCTION uint32_t mm_random_bytes(uint32_t bits) { return bits & ~((((bits & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) >> 7); }
MM_RANDOM_FUNCTION uint32_t mm_random_int4(uint32_t bits) {
  const uint32_t least = ~(bits | bits >> 1 | bits >> 2 | bits >> 3) & 0x11111111u; /* nibbles of value + 8 = 0 */
  return bits | least << 3;
}

#ifdef __cplusplus
}
#endif
#endif
