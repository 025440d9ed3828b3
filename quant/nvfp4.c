/* nvfp4 and nvfp4a16 (weights only): E2M1 nibbles, even column low, with an E4M3 scale per 16 columns under one f32 scale per
 * fusion group, in ModelOpt's naming scheme: "_scale_2" is the multiplier amax/2688 (2688 = 6 · 448; compressed-tensors stores its
 * reciprocal), W = e2m1(code) · (e4m3(scale) · scale_2).
 *
 * absmax is ModelOpt's rule: scale = e4m3(amax(block) / (6 · scale_2)), at least its smallest step, 1.0 for a zero block. mse takes
 * the best of the codes from 3 below to 8 above that one, the lowest among equals. four-over-six takes the better
 * of mapping the block's maximum to 6 and to 4, under scale_2 = amax/1536 so that the larger scale fits. */
#include <math.h>

#include "quant/search.h"

enum { BLOCK = 16, BLOCKS = MM_TILE / BLOCK, BELOW = 3, ABOVE = 8 };

/* The scale that maps amax to `top`, as a code. */
MM_INLINE int scale_code(float amax, float top, float s2) {
  float s = amax / (top * s2);
  return mm_finite_to_e4m3(s > 0x1p-9f ? s : 0x1p-9f);
}

/* Replaces the codes of a tile's blocks, which are absmax's, by the candidates of least error, the first among equals. */
MM_INLINE void best_codes(int code[BLOCKS], const float t[MM_TILE], const float amax[BLOCKS], float s2, mm_search search,
                          const float *importance) {
  float x[MM_TILE], p[MM_TILE], unit[BLOCKS], one[BLOCKS], s[2][BLOCKS], error[2][BLOCKS], least[BLOCKS];
  int first[BLOCKS], other[BLOCKS], trial[2][BLOCKS], trials = search == MM_SEARCH_FOUR_SIX ? 2 : BELOW + 1 + ABOVE;
  for (int b = 0; b < BLOCKS; b++) {
    unit[b] = mm_unit(amax[b]);
    one[b] = 1;
    least[b] = INFINITY;
    first[b] = code[b];
    other[b] = scale_code(amax[b], 4, s2);
  }
  mm_tile_across(x, t, unit, BLOCK);
  if (importance) mm_tile_across(p, importance, one, BLOCK);
  for (int c = 0; c < trials; c += 2) {
    for (int j = 0; j < 2; j++)
      for (int b = 0; b < BLOCKS; b += MM_LANES) {
        const int *from = search == MM_SEARCH_FOUR_SIX && j ? other : first;
        mm_lanes_int bits = (mm_lanes_int)MM_LANES_FROM(from + b) + (search == MM_SEARCH_FOUR_SIX ? 0 : c + j - BELOW);
        mm_lanes_min(&bits, 126);
        mm_lanes_max(&bits, 1);
        MM_LANES_AT(&trial[j][b]) = (mm_lanes)bits;
        MM_LANES_AT(&s[j][b]) = (mm_lanes)(bits << 20) * 0x1p120f * (s2 * MM_LANES_FROM(unit + b)); /* a positive E4M3 code's value */
      }
    for (int b = 0; b < BLOCKS; b += MM_LANES) {
      if (importance)
        mm_error_e2m1(&error[0][b], x + b, BLOCK, BLOCKS, &s[0][b], p + b);
      else
        mm_error_e2m1(&error[0][b], x + b, BLOCK, BLOCKS, &s[0][b], NULL);
    }
    for (int j = 0; j < 2; j++) mm_keep_least(code, least, trial[j], error[j], BLOCKS);
  }
}

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  const float top = a->search == MM_SEARCH_FOUR_SIX ? 1536.0f : 2688.0f;
  float s2 = a->amax / top;
  if (s2 < 0x1p-117f) s2 = 0x1p-117f; /* keeps scale · scale_2 a normal number; such a matrix is zero for all purposes */
  s2 = mm_scale_below(s2, top);
  *(float *)plane[2] = s2;
  for (uint32_t row = 0; row < a->n; row++)
    for (uint32_t k = 0; k < a->k; k += MM_TILE) {
      float capacity[MM_TILE], weights[MM_TILE], amax[BLOCKS], s[BLOCKS];
      int scale[BLOCKS];
      uint8_t code[MM_TILE], stored[BLOCKS];
      const float *t = mm_tile_load(capacity, a, row, k);
      for (int b = 0; b < BLOCKS; b++) amax[b] = mm_tile_amax(t + b * BLOCK, BLOCK);
      for (int b = 0; b < BLOCKS; b++) scale[b] = scale_code(amax[b], 6, s2);
      if (a->search != MM_SEARCH_ABSMAX) best_codes(scale, t, amax, s2, a->search, mm_tile_importance(weights, a, k));
      for (int b = 0; b < BLOCKS; b++) {
        stored[b] = amax[b] == 0 ? 0x38 : (uint8_t)scale[b];
        s[b] = mm_e4m3_value[stored[b]] * s2;
      }
      mm_tile_e2m1(code, t, s, BLOCK);
      mm_tile_store_nibbles(a, plane[0], row, k, code);
      mm_tile_store_scales(a, plane[1], row, k, stored, BLOCK);
    }
}
MM_PACK(pack)

#define NVFP4(word, activations, what, also)                                                                                     \
  MM_SCHEME(word, 21.8f, MM_CODE_E2M1, activations, what,                                                                        \
            MM_PLANES({"", MM_U8, {1, 2}, false}, {"_scale", MM_F8_E4M3, {1, BLOCK}, true}, {"_scale_2", MM_F32, {0, 0}, true}), \
            .synonym = {also}, .needs_amax = true, .searches = 1u << MM_SEARCH_MSE | 1u << MM_SEARCH_FOUR_SIX)
NVFP4(nvfp4, MM_ACT_NVFP4, "4 bits with a scale for 16, inputs too: the best of 4 bits on Blackwell", "w4a4_nvfp4");
NVFP4(nvfp4a16, MM_ACT_KEPT, "the same weights, inputs kept: for any GPU", "w4a16_nvfp4");
