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

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  uint32_t across = mm_cells(a->k, BLOCK);
  for (uint32_t row = 0; row < a->n; row++)
    for (uint32_t k = 0; k < a->k; k += MM_TILE) {
      float room[MM_TILE], s[BLOCKS];
      uint8_t scale[BLOCKS], code[MM_TILE];
      const float *t = mm_tile_load(room, a, row, k);
      for (int b = 0; b < BLOCKS; b++) {
        scale[b] = block_scale(t + b * BLOCK);
        s[b] = mm_e8m0_to_f32(scale[b]);
      }
      mm_tile_e4m3(code, t, s, BLOCK);
      mm_tile_store(a, plane[0], row, k, code);
      memcpy((uint8_t *)plane[1] + (size_t)row * across + k / BLOCK, scale, mm_cells(mm_tile_count(a, k), BLOCK));
    }
}
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_mxfp8 = {.name = "mxfp8",
                                   .purpose = "FP8 with powers of two as scales, for GPUs that multiply them (Blackwell)",
                                   .sqnr = 31.5f,
                                   .code = MM_CODE_E4M3,
                                   .act = MM_ACT_MXFP8,
                                   .plane_count = 2,
                                   .plane = {{"", MM_F8_E4M3, {1, 1}, false}, {"_scale", MM_U8, {1, BLOCK}, true}},
                                   .pack = pack};
