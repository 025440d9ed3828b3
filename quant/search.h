/* Scale selection by least squared error. Eight trials run at once, one per SIMD lane; each lane sums (w - ŵ)² over its group in
 * order, times the column's importance where one is given, with the decoder's own arithmetic: ŵ = value(code) · s in f32 (int4.h has
 * another way without importance). Trial codes come from w · (1/s) instead of w / s; the two differ only where both neighbours are equally
 * far. Groups are first scaled by a power of two, so that neither tiny nor huge weights underflow or overflow when squared. */
#ifndef MM_QUANT_SEARCH_H
#define MM_QUANT_SEARCH_H

#include "quant/tile.h"

MM_INLINE int mm_max_int(int a, int b) { return a > b ? a : b; }
MM_INLINE int mm_min_int(int a, int b) { return a < b ? a : b; }

/* The power of two that brings a normal amax into [1, 2); exact for every weight of the group and its scales. For exponent 254 it is the
 * subnormal 2^-127. */
MM_INLINE float mm_unit(float amax) {
  int e = (int)(mm_f32_bits(amax) >> 23);
  return mm_f32_from_bits((uint32_t)mm_max_int((254 - mm_max_int(1, e)) * (1 << 23), 1 << 22));
}

/* Rows 0 and 4, 1 and 5, 2 and 6, 3 and 7, element by element in turn. */
MM_INLINE void mm_interleave(mm_lanes out[MM_LANES], const mm_lanes row[MM_LANES]) {
  for (int l = 0; l < MM_LANES / 2; l++) {
    out[2 * l] = __builtin_shufflevector(row[l], row[l + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    out[2 * l + 1] = __builtin_shufflevector(row[l], row[l + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
}

/* A tile of groups turned so that groups lie side by side, each times its unit: x[i * groups + g] = t[g * group + i] · unit[g]. */
MM_INLINE void mm_tile_across(float x[MM_TILE], const float t[MM_TILE], const float *unit, int group) {
  int groups = MM_TILE / group;
  for (int g = 0; g < groups; g += MM_LANES)
    for (int i = 0; i < group; i += MM_LANES) {
      mm_lanes row[MM_LANES], turned[MM_LANES];
      for (int l = 0; l < MM_LANES; l++) row[l] = MM_LANES_FROM(t + (g + l) * group + i);
      mm_interleave(turned, row); /* three times: all eight rows are turned into columns */
      mm_interleave(row, turned);
      mm_interleave(turned, row);
      for (int l = 0; l < MM_LANES; l++) MM_LANES_AT(x + (i + l) * groups + g) = turned[l] * MM_LANES_FROM(unit + g);
    }
}

/* Importances of the columns [k, k + 256), anything past the end of the row; NULL where none are given. */
MM_INLINE const float *mm_tile_importance(float capacity[MM_TILE], const mm_pack_args *a, uint32_t k) {
  if (!a->importance || mm_tile_count(a, k) == MM_TILE) return a->importance ? a->importance + k : NULL;
  memset(capacity, 0, MM_TILE * sizeof *capacity);
  return memcpy(capacity, a->importance + k, mm_tile_count(a, k) * sizeof *capacity);
}

/* Adds the squared errors of eight magnitudes in E2M1, times their importance if given. Rounds as mm_small_float does. */
MM_INLINE void mm_add_error_e2m1(mm_lanes *sum, const mm_lanes *w, const mm_lanes *inverse, const mm_lanes *scale,
                                 const float *importance) {
  mm_lanes_int u = (mm_lanes_int)(*w * *inverse), binade;
  mm_lanes_min(&u, 0x40c00000);
  binade = u;
  mm_lanes_max(&binade, 0x3f800000);
  mm_lanes magic = (mm_lanes)((binade & 0x7f800000) + (22 << 23));
  mm_lanes d = *w - ((mm_lanes)u + magic - magic) * *scale;
  *sum += importance ? d * d * MM_LANES_FROM(importance) : d * d;
}

/* Eight of the groups side by side in x (mm_tile_across), each under two scales of its own, s[g] and s[groups + g]. `importance`, if
 * not NULL, lies as x does. */
MM_INLINE void mm_error_e2m1(float *error, const float *x, int group, int groups, const float *s, const float *importance) {
  mm_lanes scale0 = MM_LANES_FROM(s), inverse0 = 1.0f / scale0, sum0 = {0};
  mm_lanes scale1 = MM_LANES_FROM(s + groups), inverse1 = 1.0f / scale1, sum1 = {0};
  for (int i = 0; i < group; i++) {
    mm_lanes w = (mm_lanes)((mm_lanes_int)MM_LANES_FROM(x + i * groups) & 0x7fffffff);
    const float *p = importance ? importance + i * groups : NULL;
    mm_add_error_e2m1(&sum0, &w, &inverse0, &scale0, p);
    mm_add_error_e2m1(&sum1, &w, &inverse1, &scale1, p);
  }
  MM_LANES_AT(error) = sum0;
  MM_LANES_AT(error + groups) = sum1;
}

/* Adds the squared errors of one weight under eight scales, in integer codes [lo, hi], times its importance if given; y is w / s.
 * Rounds as mm_round_clamp does. */
MM_INLINE void mm_add_error_int(mm_lanes *sum, float w, const mm_lanes *y, const mm_lanes *scale, int32_t lo, int32_t hi,
                                const float *importance) {
  mm_lanes_int b = (mm_lanes_int)(*y + MM_INT_MAGIC);
  mm_lanes_max(&b, 0x4b400000 + lo);
  mm_lanes_min(&b, 0x4b400000 + hi);
  mm_lanes d = w - ((mm_lanes)b - MM_INT_MAGIC) * *scale;
  *sum += importance ? d * d * *importance : d * d;
}

/* One group under sixteen scales; adds to error[]. */
MM_INLINE void mm_error_int(float error[2 * MM_LANES], const float *x, int n, const float s[2 * MM_LANES], int32_t lo, int32_t hi,
                            const float *importance) {
  mm_lanes scale0 = MM_LANES_FROM(s), inverse0 = 1.0f / scale0, sum0 = MM_LANES_FROM(error);
  mm_lanes scale1 = MM_LANES_FROM(s + MM_LANES), inverse1 = 1.0f / scale1, sum1 = MM_LANES_FROM(error + MM_LANES);
  for (int i = 0; i < n; i++) {
    mm_lanes y0 = x[i] * inverse0, y1 = x[i] * inverse1;
    const float *p = importance ? importance + i : NULL;
    mm_add_error_int(&sum0, x[i], &y0, &scale0, lo, hi, p);
    mm_add_error_int(&sum1, x[i], &y1, &scale1, lo, hi, p);
  }
  MM_LANES_AT(error) = sum0;
  MM_LANES_AT(error + MM_LANES) = sum1;
}

/* The first of n with the least error. */
MM_INLINE int mm_least(const float *error, int n) {
  int best = 0;
  float least = error[0];
  for (int c = 1; c < n; c++) { /* without branches: which it is cannot be foretold */
    bool better = error[c] < least;
    best = better ? c : best;
    least = better ? error[c] : least;
  }
  return best;
}

/* Where a trial's error is less than the least so far, the trial becomes the choice. */
MM_INLINE void mm_keep_least(int *choice, float *least, const int *trial, const float *error, int n) {
  for (int g = 0; g < n; g++) {
    bool better = error[g] < least[g];
    choice[g] = better ? trial[g] : choice[g];
    least[g] = better ? error[g] : least[g];
  }
}

/* One scale for a whole row of integers in [-top, top]: amax/top, or that times 1 - u/160 with the u of least error among
 * 0, 8 … 120 and then all within 8 of it. */
MM_INLINE float mm_row_int_scale(const mm_pack_args *a, uint32_t row, int32_t top) {
  enum { TRIED = 2 * MM_LANES };
  float amax = mm_row_amax(a, row), s = mm_scale_below(amax / (float)top, (float)top), unit = mm_unit(amax);
  if (s == 0) return 1;
  if (a->search == MM_SEARCH_ABSMAX) return s;
  int shrink = 0;
  for (int step = 8; step; step /= 8) {
    int first = step == 8 ? 0 : shrink - 8;
    float scale[TRIED], error[TRIED] = {0}, capacity[MM_TILE], x[MM_TILE], p[MM_TILE];
    for (int c = 0; c < TRIED; c++) scale[c] = s * unit * (1.0f - (float)mm_max_int(first + c * step, 0) / 160.0f);
    for (uint32_t k = 0; k < a->k; k += MM_TILE) {
      const float *t = mm_tile_load(capacity, a, row, k);
      for (int i = 0; i < MM_TILE; i++) x[i] = t[i] * unit;
      mm_error_int(error, x, MM_TILE, scale, -top, top, mm_tile_importance(p, a, k));
    }
    shrink = mm_max_int(first + mm_least(error, TRIED) * step, 0);
  }
  float chosen = s * (1.0f - (float)shrink / 160.0f);
  return chosen == 0 ? s : chosen;
}

/* Pack of schemes with one scale a row and codes in [-top, top]: bytes, or nibbles where they fit one. */
MM_INLINE void mm_row_int_pack(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], int32_t top) {
  for (uint32_t row = 0; row < a->n; row++) {
    float s = mm_row_int_scale(a, row, top);
    ((float *)plane[1])[row] = s;
    for (uint32_t k = 0; k < a->k; k += MM_TILE) {
      float capacity[MM_TILE];
      uint8_t code[MM_TILE];
      mm_tile_int(code, mm_tile_load(capacity, a, row, k), &s, MM_TILE, -top, top);
      if (top > 7)
        mm_tile_store(a, plane[0], row, k, code);
      else
        mm_tile_store_nibbles(a, plane[0], row, k, code);
    }
  }
}

#endif
