/* Signed 4-bit integers with one bf16 scale per 128 columns, shared by w4a16 and w4afp8, which differ in the nibble's encoding
 * only: W[n, k] = code[n, k] · scale[n, k/128], code in [-8, 7].
 *
 * absmax is compressed-tensors' rule, s = bf16(amax/7.5). mse is the signed full-range search of quant.md §4.5: s runs through
 * the bf16 numbers from 0.8 to 1.15 times amax/8, of either sign, since only the negative end of the code reaches 8; the shrink
 * stops at 0.8 because clipping the largest weights costs more than its squared error says. A zero group has s = 1. */
#ifndef MM_QUANT_INT4_H
#define MM_QUANT_INT4_H

#include "quant/search.h"

enum { MM_INT4_GROUP = 128 };

/* Errors of a group under eight scales. */
MM_INLINE void mm_int4_error(float error[MM_LANES], const float x[MM_INT4_GROUP], const float s[MM_LANES], const float *importance) {
  mm_lanes scale = MM_LANES_FROM(s), inverse = 1.0f / scale, sum = {0};
  for (int i = 0; i < MM_INT4_GROUP; i++) {
    mm_lanes y = x[i] * inverse;
    mm_add_error_int(&sum, x[i], &y, &scale, -8, 7, importance ? importance + i : NULL);
  }
  MM_LANES_AT(error) = sum;
}

/* Errors of a group under eight scales and, in the second half, under their negatives: -s with codes [-8, 7] is s with [-7, 8]. */
MM_INLINE void mm_int4_error_both(float error[2 * MM_LANES], const float x[MM_INT4_GROUP], const float s[MM_LANES],
                                  const float *importance) {
  mm_lanes scale = MM_LANES_FROM(s), inverse = 1.0f / scale, plus = {0}, minus = {0};
  for (int i = 0; i < MM_INT4_GROUP; i++) {
    mm_lanes y = x[i] * inverse;
    const float *p = importance ? importance + i : NULL;
    mm_add_error_int(&plus, x[i], &y, &scale, -8, 7, p);
    mm_add_error_int(&minus, x[i], &y, &scale, -7, 8, p);
  }
  MM_LANES_AT(error) = plus;
  MM_LANES_AT(error + MM_LANES) = minus;
}

/* The bf16 bits of a group's scale: eight scales across the window are tried with both signs, then every second number around the
 * best, with its sign. Scales run from large to small, so that ties keep the larger. */
MM_INLINE uint16_t mm_int4_search(const float group[MM_INT4_GROUP], float amax, const float *importance) {
  float unit = mm_unit(amax), x[MM_INT4_GROUP], s[MM_LANES], error[2 * MM_LANES];
  for (int i = 0; i < MM_INT4_GROUP; i++) x[i] = group[i] * unit;
  int low = mm_f32_to_bf16(amax * unit * 0.1f), high = mm_f32_to_bf16(amax * unit * 0.14375f);
  for (int c = 0; c < MM_LANES; c++) s[c] = mm_bf16_to_f32((uint16_t)(high - c * (high - low) / (MM_LANES - 1)));
  mm_int4_error_both(error, x, s, importance);
  int coarse = mm_least(error, 2 * MM_LANES), best = mm_f32_to_bf16(s[coarse % MM_LANES]);
  float sign = coarse < MM_LANES ? 1.0f : -1.0f;
  for (int i = 0; i < MM_INT4_GROUP; i++) x[i] *= sign;
  for (int c = 0; c < MM_LANES; c++) s[c] = mm_bf16_to_f32((uint16_t)mm_max_int(low, mm_min_int(high, best + MM_LANES - 2 * c)));
  mm_int4_error(error, x, s, importance);
  return mm_f32_to_bf16(sign * s[mm_least(error, MM_LANES)] / unit);
}

MM_INLINE uint16_t mm_int4_scale(const float group[MM_INT4_GROUP], mm_search search, const float *importance) {
  float amax = mm_tile_amax(group, MM_INT4_GROUP);
  uint16_t absmax = mm_f32_to_bf16(amax / 7.5f);
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
      float room[MM_TILE], weights[MM_TILE], s[GROUPS];
      uint16_t scale[GROUPS];
      uint8_t code[MM_TILE];
      const float *t = mm_tile_load(room, a, row, k), *p = mm_tile_importance(weights, a, k);
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
