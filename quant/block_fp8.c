/* block_fp8: E4M3 codes with one f32 scale per block of 128 x 128, as DeepSeek-V3 and MiniMax-M2 publish their weights.
 * "_scale_inv" is the multiplier despite its name: W[n, k] = e4m3(code[n, k]) · scale_inv[n/128, k/128]. The scale is
 * amax/448 of the block's existing elements, 1 for a zero block; the code is e4m3(w/s) with a true division.
 *
 * Packing runs at a large share of the memory's rate, so it works on bf16 as it comes, without widening it first: every loop below
 * is over a run of 128 weights of one type, and is compiled once for bf16 and once for f32. Where vectors are wide, bf16 weights get
 * their codes by comparisons of bytes instead of division (ladder). */
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
  float s = mm_scale_below(mm_f32_from_bits(m) / 448.0f, 448);
  return s == 0 ? 1 : s;
}

MM_INLINE void encode(uint8_t code[BLOCK], const void *weights, bool bf16, float s) {
  const uint16_t *h = weights;
  const float *w = weights;
  for (int i = 0; bf16 && i < BLOCK; i++) /* sign and magnitude separately: half as many vectors to narrow */
    code[i] = (uint8_t)((h[i] >> 8 & 0x80) | mm_magnitude_to_e4m3(mm_f32_bits(mm_bf16_to_f32(h[i] & 0x7fff) / s)));
  for (int i = 0; !bf16 && i < BLOCK; i++) code[i] = mm_finite_to_e4m3(w[i] / s);
}

/* The codes of bf16 weights under one scale without arithmetic on each: those of one exponent rise with the mantissa in at most 8 steps,
 * and every exponent up adds 8, as long as codes are of normal numbers. */
enum { STEPS = 8, WIDE = 32 };
typedef uint8_t bytes __attribute__((vector_size(WIDE), may_alias));
typedef int8_t signed_bytes __attribute__((vector_size(WIDE))); /* one instruction less to compare */
typedef struct ladder {                                         /* each number once for every lane */
  bytes step[STEPS];                                            /* the largest mantissas below each step; 127 where there is none */
  bytes base;                                                   /* the code of mantissa 0 less 8 for each exponent, modulo 256 */
  bytes least;                                                  /* the smallest exponent for which it holds */
} ladder;

MM_INLINE void ladder_open(ladder *l, float s) {
  int exponent = (int)(mm_f32_bits(s) >> 23), steps = 0;
  if (exponent <= 5) { /* near the smallest numbers exponents end, and steps come closer */
    *l = (ladder){.least = (bytes){0} + (uint8_t)255};
    return;
  }
  uint16_t weight[BLOCK];
  uint8_t code[BLOCK];
  for (int m = 0; m < BLOCK; m++) weight[m] = (uint16_t)(exponent << 7 | m);
  encode(code, weight, true, s);
  for (int m = 0; m < BLOCK - 1; m++)
    if (code[m + 1] != code[m]) l->step[steps++] = (bytes){0} + (uint8_t)m;
  while (steps < STEPS) l->step[steps++] = (bytes){0} + (uint8_t)127;
  l->base = (bytes){0} + (uint8_t)(code[0] - 8 * exponent);
  l->least = (bytes){0} + (uint8_t)(exponent - 5); /* code 0x30 or more at `exponent` is 8 or more five below */
}

/* False where the ladder does not hold for all of the run; its codes are nothing then. */
MM_INLINE bool climb(uint8_t code[BLOCK], const uint16_t *h, const ladder *l) {
  _Alignas(WIDE) uint8_t low[BLOCK], high[BLOCK];
  bytes off = {0};
  for (int i = 0; i < BLOCK; i++) low[i] = (uint8_t)h[i];
  for (int i = 0; i < BLOCK; i++) high[i] = (uint8_t)(h[i] >> 8);
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK; i += WIDE) {
    bytes lo = *(bytes *)(low + i), hi = *(bytes *)(high + i), m = lo & 0x7f, e = hi + hi + (lo >> 7), c = e * 8 + l->base;
#pragma GCC unroll 8
    for (int j = 0; j < STEPS; j++) c -= (bytes)((signed_bytes)m > (signed_bytes)l->step[j]);
    *(bytes *)(code + i) = c | (hi & 0x80);
    off |= (bytes)(e < l->least);
  }
  uint64_t part[WIDE / 8], any = 0;
  memcpy(part, &off, sizeof part);
  for (int i = 0; i < WIDE / 8; i++) any |= part[i];
  return !any;
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
MM_INLINE void pack_panel(const mm_pack_args *a, bool bf16, bool climbs, void *const plane[MM_MAX_PLANES], uint32_t row, uint32_t k) {
  uint32_t rows = (uint32_t)mm_min(a->n, row + BLOCK), end = (uint32_t)mm_min(a->k, k + PANEL), first = k / BLOCK;
  uint32_t next_row = end == a->k ? BLOCK : 0, next_k = end == a->k ? 0 - k : PANEL;
  float *scale = (float *)plane[1] + (size_t)(row / BLOCK) * mm_cells(a->k, BLOCK);
  run most[PANEL / BLOCK] = {0}, pad;
  ladder up[PANEL / BLOCK];
  for (uint32_t r = row; r < rows; r++)
    for (uint32_t c = k; c < end; c += BLOCK) raise_most(&most[c / BLOCK - first], run_at(a, bf16, r, c, &pad), bf16);
  for (uint32_t b = first; b < mm_cells(end, BLOCK); b++) {
    scale[b] = scale_of(&most[b - first], bf16);
    if (climbs) ladder_open(&up[b - first], scale[b]);
  }
  for (uint32_t r = row; r < rows; r++)
    for (uint32_t c = k; c < end; c += BLOCK) {
      _Alignas(WIDE) uint8_t code[BLOCK];
      prefetch(a, bf16, r + next_row, c + next_k);
      const void *weights = run_at(a, bf16, r, c, &pad);
      if (!climbs || !climb(code, weights, &up[c / BLOCK - first])) encode(code, weights, bf16, scale[c / BLOCK]);
      uint8_t *to = (uint8_t *)plane[0] + (size_t)r * a->k + c;
      if (c + BLOCK <= a->k)
        memcpy(to, code, BLOCK);
      else
        memcpy(to, code, a->k - c);
    }
}

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], bool climbs) {
  for (uint32_t row = 0; row < a->n; row += BLOCK)
    for (uint32_t k = 0; k < a->k; k += PANEL)
      if (a->bf16)
        pack_panel(a, true, climbs, plane, row, k);
      else
        pack_panel(a, false, false, plane, row, k);
}
MM_VERSIONS_BY_WIDTH(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane), (a, plane, false), (a, plane, true))

MM_SCHEME(block_fp8, 31.5f, MM_CODE_E4M3, MM_ACT_FP8_GROUP, "the released FP8 models' own: half of BF16, near its quality, in every engine",
          MM_PLANES({"", MM_F8_E4M3, {1, 1}, false}, {"_scale_inv", MM_F32, {BLOCK, BLOCK}, true}),
          .synonym = {"block_wise_fp8", "fp8_block"});
