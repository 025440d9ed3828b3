/* block_fp8: E4M3 codes with one f32 scale per block of 128 x 128, as DeepSeek-V3 and MiniMax-M2 publish their weights.
 * "_scale_inv" is the multiplier despite its name: W[n, k] = e4m3(code[n, k]) · scale_inv[n/128, k/128]. The scale is
 * amax/448 of the block's existing elements, 1 for a zero block; the code is e4m3(w/s) with a true division. */
#include "quant/tile.h"

enum { BLOCK = 128, BLOCKS = MM_TILE / BLOCK, PANEL = 8 * MM_TILE };

/* Codes and scales of one row of blocks, columns [k, end): long enough runs to stream, few enough to be in cache the second time. */
MM_INLINE void pack_panel(const mm_pack_args *a, uint8_t *code_plane, float *scale, uint32_t row, uint32_t rows, uint32_t k, uint32_t end) {
  float t[MM_TILE], s[BLOCKS];
  uint8_t code[MM_TILE];
  uint32_t first = k / BLOCK, last = mm_cells(end, BLOCK);
  for (uint32_t b = first; b < last; b++) scale[b] = 0; /* holds the largest magnitude until all rows are seen */
  for (uint32_t r = row; r < row + rows; r++)
    for (uint32_t c = k; c < end; c += MM_TILE) {
      mm_tile_load(t, a, r, c);
      for (uint32_t b = 0; b < BLOCKS && c / BLOCK + b < last; b++) {
        float m = mm_tile_amax(t + b * BLOCK, BLOCK), *most = &scale[c / BLOCK + b];
        *most = m > *most ? m : *most;
      }
    }
  for (uint32_t b = first; b < last; b++) {
    scale[b] /= 448.0f;
    if (scale[b] == 0) scale[b] = 1;
  }
  for (uint32_t r = row; r < row + rows; r++)
    for (uint32_t c = k; c < end; c += MM_TILE) {
      mm_tile_load(t, a, r, c);
      for (uint32_t b = 0; b < BLOCKS; b++) s[b] = c / BLOCK + b < last ? scale[c / BLOCK + b] : 1;
      mm_tile_e4m3(code, t, s, BLOCK);
      mm_tile_store(a, code_plane, r, c, code);
    }
}

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  uint32_t across = mm_cells(a->k, BLOCK);
  for (uint32_t row = 0; row < a->n; row += BLOCK)
    for (uint32_t k = 0; k < a->k; k += PANEL)
      pack_panel(a, plane[0], (float *)plane[1] + (size_t)(row / BLOCK) * across, row, (uint32_t)mm_min(BLOCK, a->n - row), k,
                 (uint32_t)mm_min(a->k, k + PANEL));
}
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_block_fp8 = {.name = "block_fp8",
                                       .synonym = {"block_wise_fp8", "fp8_block"},
                                       .code = MM_CODE_E4M3,
                                       .act = MM_ACT_FP8_GROUP,
                                       .plane_count = 2,
                                       .plane = {{"", MM_F8_E4M3, {1, 1}, false}, {"_scale_inv", MM_F32, {BLOCK, BLOCK}, true}},
                                       .strip = BLOCK,
                                       .pack = pack,
                                       .unpack = mm_unpack};
