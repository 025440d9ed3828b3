/* mxfp8: E4M3 codes with a power-of-two scale (E8M0, stored as U8) per 32 columns, after OCP MX v1.0:
 * W[n, k] = e4m3(code[n, k]) · 2^(scale[n, k/32] - 127). The scale is the smallest power of two that is at least amax/448, so that
 * nothing saturates; no other exponent has a smaller error in practice. A zero block has exponent 127. No
 * exponent is above 246, so that every code stays a finite number; weights above 1.75 · 2^127 saturate there. */
#include "quant/tile.h"

enum { BLOCK = 32, BLOCKS = MM_TILE / BLOCK };

MM_INLINE uint8_t block_scale(const float block[BLOCK]) {
  uint32_t u = mm_f32_bits(mm_tile_amax(block, BLOCK));
  int e = (int)(u >> 23) - 8 + ((u & 0x7fffff) > 0x600000); /* 448 = 1.75 · 2^8 */
  return (uint8_t)(u == 0 ? 127 : e < 0 ? 0 : e > 246 ? 246 : e);
}

MM_INLINE void pack_tile(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], uint32_t row, uint32_t k) {
  float capacity[MM_TILE], s[BLOCKS];
  uint8_t scale[BLOCKS], code[MM_TILE];
  const float *t = mm_tile_load(capacity, a, row, k);
  for (int b = 0; b < BLOCKS; b++) {
    scale[b] = block_scale(t + b * BLOCK);
    s[b] = mm_e8m0_to_f32(scale[b]);
  }
  mm_tile_e4m3(code, t, s, BLOCK);
  mm_tile_store(a, plane[0], row, k, code);
  mm_tile_store_scales(a, plane[1], row, k, scale, BLOCK);
}
MM_PACK_TILES(pack, pack_tile)

MM_SCHEME(mxfp8, 31.5f, MM_CODE_E4M3, MM_ACT_MXFP8, "FP8 with powers of two as scales, for GPUs that multiply them (Blackwell)",
          MM_PLANES({"", MM_F8_E4M3, {1, 1}, false}, {"_scale", MM_U8, {1, BLOCK}, true}));
