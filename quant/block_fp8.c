/* block_fp8: E4M3 codes with one f32 scale per block of 128 x 128, as DeepSeek-V3 and MiniMax-M2 publish their weights.
 * "_scale_inv" is the multiplier despite its name: W[n, k] = e4m3(code[n, k]) · scale_inv[n/128, k/128]. The scale is
 * amax/448 of the block's existing elements, 1 for a zero block; the code is e4m3(w/s) with a true division.
 *
 * Packing runs at a large share of the memory's rate, so it works on bf16 as it comes, without widening it first: every loop below
 * is over a run of 128 weights of one type, and is compiled once for bf16 and once for f32. */
#include "quant/tile.h"

enum { BLOCK = 128, PANEL = 8 * BLOCK };

typedef union run {
  uint16_t bf16[BLOCK];
  float f32[BLOCK];
  uint32_t bits[BLOCK];
} run;

/* Weights [k, k + 128) of a row: in place, or in `pad` with zeros behind where the row ends sooner. */
MM_INLINE const void *run_at(const mm_pack_args *a, bool bf16, uint32_t row, uint32_t k, run *pad) {
  size_t at = (size_t)row * a->k + k, count = a->k - k;
  const void *from = bf16 ? (const void *)(a->bf16 + at) : a->w + at;
  if (count >= BLOCK) return from;
  memset(pad, 0, sizeof *pad);
  return memcpy(pad, from, count * (bf16 ? sizeof *a->bf16 : sizeof *a->w));
}

/* Raises most[i] to the magnitude of weight i, as bits: those of magnitudes compare as the numbers do. */
MM_INLINE void raise_most(run *most, const void *weights, bool bf16) {
  const uint16_t *h = weights;
  const float *w = weights;
  for (int i = 0; bf16 && i < BLOCK; i++) {
    uint16_t u = h[i] & 0x7fff;
    most->bf16[i] = u > most->bf16[i] ? u : most->bf16[i];
  }
  for (int i = 0; !bf16 && i < BLOCK; i++) {
    uint32_t u = mm_f32_bits(w[i]) & 0x7fffffff;
    most->bits[i] = u > most->bits[i] ? u : most->bits[i];
  }
}

MM_INLINE float scale_of(const run *most, bool bf16) {
  uint32_t m = 0;
  for (int i = 0; i < BLOCK; i++) {
    uint32_t u = bf16 ? (uint32_t)most->bf16[i] << 16 : most->bits[i];
    m = u > m ? u : m;
  }
  float s = mm_f32_from_bits(m) / 448.0f;
  return s == 0 ? 1 : s;
}

MM_INLINE void encode(uint8_t code[BLOCK], const void *weights, bool bf16, float s) {
  const uint16_t *h = weights;
  const float *w = weights;
  for (int i = 0; bf16 && i < BLOCK; i++) /* sign and magnitude apart: half as many vectors to narrow */
    code[i] = (uint8_t)((h[i] >> 8 & 0x80) | mm_magnitude_to_e4m3(mm_f32_bits(mm_bf16_to_f32(h[i] & 0x7fff) / s)));
  for (int i = 0; !bf16 && i < BLOCK; i++) code[i] = mm_finite_to_e4m3(w[i] / s);
}

/* Asks for the weights [k, k + 128) of a row, which the matrix may not have. */
MM_INLINE void prefetch(const mm_pack_args *a, bool bf16, uint32_t row, uint32_t k) {
  enum { LINE = 64 };
  size_t at = (size_t)row * a->k + k, size = bf16 ? sizeof *a->bf16 : sizeof *a->w;
  if (row >= a->n || k >= a->k) return;
  const char *from = bf16 ? (const char *)(a->bf16 + at) : (const char *)(a->w + at);
  for (size_t i = 0; i < BLOCK * size; i += LINE) __builtin_prefetch(from + i);
}

/* The blocks of rows [row, row + 128) in columns [k, k + PANEL): runs long enough to stream, and all of it still in cache the second
 * time. Meanwhile the next panel is on its way. */
MM_INLINE void pack_panel(const mm_pack_args *a, bool bf16, void *const plane[MM_MAX_PLANES], uint32_t row, uint32_t k) {
  uint32_t rows = (uint32_t)mm_min(a->n, row + BLOCK), end = (uint32_t)mm_min(a->k, k + PANEL), first = k / BLOCK;
  uint32_t next_row = end == a->k ? BLOCK : 0, next_k = end == a->k ? 0 - k : PANEL;
  float *scale = (float *)plane[1] + (size_t)(row / BLOCK) * mm_cells(a->k, BLOCK);
  run most[PANEL / BLOCK] = {0}, pad;
  for (uint32_t r = row; r < rows; r++)
    for (uint32_t c = k; c < end; c += BLOCK) raise_most(&most[c / BLOCK - first], run_at(a, bf16, r, c, &pad), bf16);
  for (uint32_t b = first; b < mm_cells(end, BLOCK); b++) scale[b] = scale_of(&most[b - first], bf16);
  for (uint32_t r = row; r < rows; r++)
    for (uint32_t c = k; c < end; c += BLOCK) {
      uint8_t code[BLOCK];
      prefetch(a, bf16, r + next_row, c + next_k);
      encode(code, run_at(a, bf16, r, c, &pad), bf16, scale[c / BLOCK]);
      uint8_t *to = (uint8_t *)plane[0] + (size_t)r * a->k + c;
      if (c + BLOCK <= a->k)
        memcpy(to, code, BLOCK);
      else
        memcpy(to, code, a->k - c);
    }
}

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  for (uint32_t row = 0; row < a->n; row += BLOCK)
    for (uint32_t k = 0; k < a->k; k += PANEL)
      if (a->bf16)
        pack_panel(a, true, plane, row, k);
      else
        pack_panel(a, false, plane, row, k);
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
