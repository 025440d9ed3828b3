/* Plain schemes: the matrix as it is, one element per weight, in bf16, f16 or f32. Narrowing rounds to nearest even. */
#include "quant/tile.h"

MM_INLINE void pack_bf16_tile(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], uint32_t row, uint32_t k) {
  float capacity[MM_TILE];
  uint16_t h[MM_TILE];
  const float *t = mm_tile_load(capacity, a, row, k);
  for (int i = 0; i < MM_TILE; i++) h[i] = mm_finite_to_bf16(t[i]);
  memcpy((uint16_t *)plane[0] + (size_t)row * a->k + k, h, mm_tile_count(a, k) * sizeof *h);
}
MM_PACK_TILES(pack_bf16, pack_bf16_tile)

static void pack_f16(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  uint16_t *out = plane[0];
  for (size_t i = 0, count = (size_t)a->n * a->k; i < count; i++) out[i] = mm_f32_to_f16(a->bf16 ? mm_bf16_to_f32(a->bf16[i]) : a->w[i]);
}

static void pack_f32(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  size_t count = (size_t)a->n * a->k;
  if (a->bf16)
    mm_widen(plane[0], a->bf16, MM_BF16, count);
  else
    memcpy(plane[0], a->w, count * sizeof(float));
}

#define PLAIN(word, type, what, ...)   \
  const mm_scheme mm_scheme_##word = { \
      .name = #word, .purpose = what, .synonym = {__VA_ARGS__}, MM_PLANES({"", type, {1, 1}, false}), .pack = pack_##word}
PLAIN(bf16, MM_BF16, "2 bytes a weight; what other schemes are compared with", "bfloat16");
PLAIN(f16, MM_F16, "2 bytes a weight, for what has no BF16", "float16", "fp16");
PLAIN(f32, MM_F32, "4 bytes a weight, for tests", "float32", "fp32");
