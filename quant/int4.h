/* Signed 4-bit integers with one bf16 scale per 128 columns, shared by w4a16 and w4afp8, which differ in the nibble's encoding
 * only: W[n, k] = code[n, k] · scale[n, k/128], code in [-8, 7].
 *
 * absmax is compressed-tensors' rule, s = bf16(amax/7.5). mse is a signed search of the full range: s runs through
 * the bf16 numbers from 0.8 to 1.15 times amax/8, of either sign, since only the negative end of the code reaches 8; the shrink
 * stops at 0.8 because clipping the largest weights costs more than its squared error says. A zero group has s = 1.
 * No scale is so large that code -8 would be infinite: near the largest f32 the positive end saturates instead. */
#ifndef MM_QUANT_INT4_H
#define MM_QUANT_INT4_H

#include "quant/search.h"

enum { MM_INT4_GROUP = 128, MM_INT4_MOST = 0x7dff }; /* the largest bf16 scale, of which code -8 is finite */

/* A group in 16 bits, 4096 for one: there scales of the window are whole numbers below 1200, weights stay below 8192 and the sum of 128
 * squared errors below 2^31. */
MM_INLINE void mm_int4_shorten(int16_t w[MM_INT4_GROUP], const float x[MM_INT4_GROUP]) {
  for (int i = 0; i < MM_INT4_GROUP; i++) w[i] = (int16_t)mm_round_clamp(x[i] * 4096, -8192, 8192);
}

/* Squared errors of a group under n scales of either sign, codes in [-8, 7]. Codes are rounded from quotients of four fractional bits: a
 * trial may take the neighbour where both are all but equally far. */
MM_INLINE void mm_int4_errors(float *error, const int16_t w[MM_INT4_GROUP], const float *s, int n) {
  for (int c = 0; c < n; c++) {
    int16_t step = (int16_t)(s[c] * 4096), inverse = (int16_t)(0x1p20f / (s[c] * 4096)), d[MM_INT4_GROUP];
    int32_t sum = 0;
    for (int i = 0; i < MM_INT4_GROUP; i++) {
      int16_t q = (int16_t)((int16_t)((int16_t)(w[i] * inverse >> 16) + 8) >> 4);
      q = q > -8 ? q : -8;
      q = q < 7 ? q : 7;
      d[i] = (int16_t)(w[i] - (int16_t)(q * step));
    }
    for (int i = 0; i < MM_INT4_GROUP; i++) sum += d[i] * d[i]; /* a loop of its own, so that it becomes pmaddwd */
    error[c] = (float)sum;
  }
}

/* The bf16 bits of a group's scale: eight scales across the window are tried with both signs, then every second number around the
 * best, with its sign. Scales run from large to small, so that ties keep the larger. */
MM_INLINE uint16_t mm_int4_search(const float group[MM_INT4_GROUP], float amax, const float *importance) {
  enum { COARSE = 16, FINE = 8 };
  float unit = mm_unit(amax), x[MM_INT4_GROUP], s[COARSE], error[COARSE] = {0};
  int16_t w[MM_INT4_GROUP];
  for (int i = 0; i < MM_INT4_GROUP; i++) x[i] = group[i] * unit;
  mm_int4_shorten(w, x);
  int low = mm_f32_to_bf16(amax * unit * 0.1f), most = mm_f32_to_bf16(mm_bf16_to_f32(MM_INT4_MOST) * unit),
      high = mm_min_int(most, mm_f32_to_bf16(amax * unit * 0.14375f));
  for (int c = 0; c < COARSE; c++) {
    float scale = mm_bf16_to_f32((uint16_t)(high - c / 2 * (high - low) / (COARSE / 2 - 1)));
    s[c] = c % 2 ? -scale : scale;
  }
  if (importance)
    mm_error_int(error, x, MM_INT4_GROUP, s, -8, 7, importance);
  else
    mm_int4_errors(error, w, s, COARSE);
  float coarse = s[mm_least(error, COARSE)], sign = coarse < 0 ? -1.0f : 1.0f;
  int best = mm_f32_to_bf16(coarse * sign);
  for (int c = 0; c < COARSE; c++) { /* the second half as the first */
    s[c] = sign * mm_bf16_to_f32((uint16_t)mm_max_int(low, mm_min_int(high, best + FINE - 2 * (c % FINE))));
    error[c] = 0;
  }
  if (importance)
    mm_error_int(error, x, MM_INT4_GROUP, s, -8, 7, importance);
  else
    mm_int4_errors(error, w, s, FINE);
  return mm_f32_to_bf16(s[mm_least(error, FINE)] / unit);
}

MM_INLINE uint16_t mm_int4_scale(const float group[MM_INT4_GROUP], mm_search search, const float *importance) {
  float amax = mm_tile_amax(group, MM_INT4_GROUP);
  uint16_t absmax = (uint16_t)mm_min_int(MM_INT4_MOST, mm_f32_to_bf16(amax / 7.5f));
  if (absmax == 0) return 0x3f80;
  if (search == MM_SEARCH_ABSMAX || amax < 0x1p-100f) return absmax; /* down there bf16 runs out of digits */
  return mm_int4_search(group, amax, importance);
}

/* Pack of w4a16 (flip 8: value + 8) and w4afp8 (flip 0: two's complement). */
MM_INLINE void mm_int4_pack(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], uint8_t flip) {
  enum { GROUPS = MM_TILE / MM_INT4_GROUP };
  uint32_t across = mm_cells(a->k, MM_INT4_GROUP);
  for (uint32_t row = 0; row < a->n; row++)
    for (uint32_t k = 0; k < a->k; k += MM_TILE) {
      float tile[MM_TILE], weights[MM_TILE], s[GROUPS];
      uint16_t scale[GROUPS];
      uint8_t code[MM_TILE];
      const float *t = mm_tile_load(tile, a, row, k), *p = mm_tile_importance(weights, a, k);
      for (int g = 0; g < GROUPS; g++) {
        scale[g] = mm_int4_scale(t + g * MM_INT4_GROUP, a->search, p ? p + g * MM_INT4_GROUP : NULL);
        s[g] = mm_bf16_to_f32(scale[g]);
      }
      mm_tile_int(code, t, s, MM_INT4_GROUP, -8, 7);
      for (int i = 0; i < MM_TILE; i++) code[i] ^= flip;
      mm_tile_store_nibbles(a, plane[0], row, k, code);
      memcpy((uint16_t *)plane[1] + (size_t)row * across + k / MM_INT4_GROUP, scale,
             mm_cells(mm_tile_count(a, k), MM_INT4_GROUP) * sizeof *scale);
    }
}

#endif
