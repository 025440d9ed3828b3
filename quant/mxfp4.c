/* mxfp4: E2M1 nibbles, even column low, with a power-of-two scale (E8M0, stored as U8) per 32 columns, after OCP MX v1.0:
 * W[n, k] = e2m1(code[n, k]) · 2^(scale[n, k/32] - 127).
 *
 * absmax is compressed-tensors' rule: the exponent of amax less 2, one more if amax's mantissa is at least 1.75. mse takes the best
 * of the four exponents from one below to two above amax's own less 2, the largest among equals. A zero block has exponent 127. No
 * exponent is above 252, so that every code stays a finite number; weights above 1.5 · 2^127 saturate there. */
#include <math.h>

#include "quant/search.h"

enum { BLOCK = 32, BLOCKS = MM_TILE / BLOCK };
_Static_assert((int)BLOCKS == (int)MM_LANES, "one lane per block of a tile");

/* At most 252: 6 · 2^126 is no f32. */
MM_INLINE int clamp_exponent(int e) { return mm_max_int(0, mm_min_int(252, e)); }

/* Exponent of amax less 2, the largest power of two in E2M1; not yet clamped. */
MM_INLINE int floor_exponent(float amax) { return (int)(mm_f32_bits(amax) >> 23) - 2; }

/* Replaces the exponents of a tile's blocks by those of least error. */
MM_INLINE void best_exponents(int exponent[BLOCKS], const float t[MM_TILE], const float amax[BLOCKS], const float *importance) {
  float x[MM_TILE], p[MM_TILE], unit[BLOCKS], one[BLOCKS], s[2][BLOCKS], error[2][BLOCKS], least[BLOCKS];
  int trial[2][BLOCKS];
  for (int b = 0; b < BLOCKS; b++) {
    unit[b] = mm_unit(amax[b]);
    one[b] = 1;
    least[b] = INFINITY;
  }
  mm_tile_across(x, t, unit, BLOCK);
  if (importance) mm_tile_across(p, importance, one, BLOCK);
  for (int up = 2; up >= 0; up -= 2) {
    for (int j = 0; j < 2; j++)
      for (int b = 0; b < BLOCKS; b++) {
        trial[j][b] = clamp_exponent(floor_exponent(amax[b]) + up - j);
        s[j][b] = mm_e8m0_to_f32((uint8_t)trial[j][b]) * unit[b];
      }
    mm_error_e2m1(error[0], x, BLOCK, BLOCKS, s[0], importance ? p : NULL);
    for (int j = 0; j < 2; j++) mm_keep_least(exponent, least, trial[j], error[j], BLOCKS);
  }
}

MM_INLINE void pack_tile(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], uint32_t row, uint32_t k) {
  float capacity[MM_TILE], weights[MM_TILE], amax[BLOCKS], s[BLOCKS];
  int exponent[BLOCKS];
  uint8_t code[MM_TILE], stored[BLOCKS];
  const float *t = mm_tile_load(capacity, a, row, k);
  for (int b = 0; b < BLOCKS; b++) {
    amax[b] = mm_tile_amax(t + b * BLOCK, BLOCK);
    exponent[b] = clamp_exponent(floor_exponent(amax[b]) + ((mm_f32_bits(amax[b]) & 0x7fffff) >= 0x600000));
  }
  if (a->search == MM_SEARCH_MSE) best_exponents(exponent, t, amax, mm_tile_importance(weights, a, k));
  for (int b = 0; b < BLOCKS; b++) {
    stored[b] = amax[b] == 0 ? 127 : (uint8_t)exponent[b];
    s[b] = mm_e8m0_to_f32(stored[b]);
  }
  mm_tile_e2m1(code, t, s, BLOCK);
  mm_tile_store_nibbles(a, plane[0], row, k, code);
  mm_tile_store_scales(a, plane[1], row, k, stored, BLOCK);
}
MM_PACK_TILES(pack, pack_tile)

MM_SCHEME(mxfp4, 19.1f, MM_CODE_E2M1, MM_ACT_MXFP4,
          "4 bits with powers of two as scales, inputs too, for GPUs that multiply them (Blackwell)",
          MM_PLANES({"", MM_U8, {1, 2}, false}, {"_scale", MM_U8, {1, BLOCK}, true}), .searches = 1u << MM_SEARCH_MSE);
