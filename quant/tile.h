/* Tiles: 256 consecutive weights of one row, in f32, zeros past the end of the row. Every pack loop runs over whole tiles, so
 * that its trip counts are constants and the compiler makes straight SIMD of it. Groups of 16, 32 and 128 divide a tile; the
 * padding zeros change neither a group's maximum nor its error, and their codes are cut off when a tile is stored. */
#ifndef MM_QUANT_TILE_H
#define MM_QUANT_TILE_H

#include "quant/cpu.h"
#include "quant/numbers.h"
#include "quant/quant.h"

enum { MM_TILE = 256, MM_LANES = 8 };

/* Eight numbers side by side, for the loops that compilers cannot be trusted to vectorise; read and written at any float. */
typedef float mm_lanes __attribute__((vector_size(4 * MM_LANES)));
typedef int32_t mm_lanes_int __attribute__((vector_size(4 * MM_LANES)));
typedef float mm_lanes_stored __attribute__((vector_size(4 * MM_LANES), aligned(4), may_alias));
#define MM_LANES_AT(x)   (*(mm_lanes_stored *)(x))
#define MM_LANES_FROM(x) (*(const mm_lanes_stored *)(x))
MM_INLINE void mm_lanes_max(mm_lanes_int *x, int32_t lo) {
  for (int i = 0; i < MM_LANES; i++) (*x)[i] = (*x)[i] > lo ? (*x)[i] : lo;
}
MM_INLINE void mm_lanes_min(mm_lanes_int *x, int32_t hi) {
  for (int i = 0; i < MM_LANES; i++) (*x)[i] = (*x)[i] < hi ? (*x)[i] : hi;
}

MM_INLINE uint32_t mm_tile_count(const mm_pack_args *a, uint32_t k) { return (uint32_t)mm_min(MM_TILE, a->k - k); }

/* Columns [k, k + 256) of a row: in place where they are there as f32, or in `room`. */
MM_INLINE const float *mm_tile_load(float capacity[MM_TILE], const mm_pack_args *a, uint32_t row, uint32_t k) {
  size_t first = (size_t)row * a->k + k, count = mm_tile_count(a, k);
  if (count < MM_TILE) memset(capacity, 0, MM_TILE * sizeof *capacity);
  if (count == MM_TILE && !a->bf16) return a->w + first;
  if (count == MM_TILE)
    for (int i = 0; i < MM_TILE; i++) capacity[i] = mm_bf16_to_f32(a->bf16[first + (size_t)i]);
  else if (a->bf16)
    mm_widen(capacity, a->bf16 + first, MM_BF16, count);
  else
    memcpy(capacity, a->w + first, count * sizeof *capacity);
  return capacity;
}

/* Largest magnitude of n; as bits, because unsigned integers of magnitudes compare as the floats do. */
MM_INLINE float mm_tile_amax(const float *t, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; i++) {
    uint32_t u = mm_f32_bits(t[i]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  return mm_f32_from_bits(most);
}

/* Largest magnitude of a whole row. */
MM_INLINE float mm_row_amax(const mm_pack_args *a, uint32_t row) {
  float most = 0, capacity[MM_TILE];
  for (uint32_t k = 0; k < a->k; k += MM_TILE) {
    float m = mm_tile_amax(mm_tile_load(capacity, a, row, k), MM_TILE);
    most = m > most ? m : most;
  }
  return most;
}

/* A scale whose product with the largest code, `top`, is finite: s, or the number below where s was rounded up from the largest f32. */
MM_INLINE float mm_scale_below(float s, float top) { return mm_f32_from_bits(mm_f32_bits(s) - (s * top > 0x1.fffffep127f)); }

/* y to the nearest integer, ties to even, clamped to [lo, hi] (within ±2^22): added to 1.5·2^23, a float's low bits are the
 * integer, and larger |y| only move the sum further out, so clamping the bits clamps the value. */
#define MM_INT_MAGIC 12582912.0f
MM_INLINE int32_t mm_round_clamp(float y, int32_t lo, int32_t hi) {
  const int32_t zero = 0x4b400000;
  int32_t b = (int32_t)mm_f32_bits(y + MM_INT_MAGIC);
  b = b > zero + lo ? b : zero + lo;
  b = b < zero + hi ? b : zero + hi;
  return b - zero;
}

/* Codes of a tile: t / s by true division, one scale per `group` weights. */
MM_INLINE void mm_tile_divide(float y[MM_TILE], const float t[MM_TILE], const float *s, int group) {
  for (int g = 0; g < MM_TILE; g += group)
    for (int i = g; i < g + group; i += MM_LANES) MM_LANES_AT(y + i) = MM_LANES_FROM(t + i) / s[g / group];
}
MM_INLINE void mm_tile_e4m3(uint8_t code[MM_TILE], const float t[MM_TILE], const float *s, int group) {
  float y[MM_TILE];
  mm_tile_divide(y, t, s, group);
  for (int i = 0; i < MM_TILE; i++) code[i] = mm_finite_to_e4m3(y[i]);
}
MM_INLINE void mm_tile_e2m1(uint8_t code[MM_TILE], const float t[MM_TILE], const float *s, int group) {
  float y[MM_TILE];
  mm_tile_divide(y, t, s, group);
  for (int i = 0; i < MM_TILE; i++) code[i] = mm_finite_to_e2m1(y[i]);
}
MM_INLINE void mm_tile_int(uint8_t code[MM_TILE], const float t[MM_TILE], const float *s, int group, int32_t lo, int32_t hi) {
  float y[MM_TILE];
  mm_tile_divide(y, t, s, group);
  for (int i = 0; i < MM_TILE; i++) code[i] = (uint8_t)mm_round_clamp(y[i], lo, hi);
}

/* The tile's codes at column k of a row of the code plane: one byte each, or two nibbles to a byte, low first. */
MM_INLINE void mm_tile_store(const mm_pack_args *a, void *plane, uint32_t row, uint32_t k, const uint8_t code[MM_TILE]) {
  uint8_t *to = (uint8_t *)plane + (size_t)row * a->k + k;
  if (mm_tile_count(a, k) == MM_TILE)
    memcpy(to, code, MM_TILE);
  else
    memcpy(to, code, mm_tile_count(a, k));
}
MM_INLINE void mm_tile_store_nibbles(const mm_pack_args *a, void *plane, uint32_t row, uint32_t k, const uint8_t code[MM_TILE]) {
  uint16_t two[MM_TILE / 2];
  uint8_t pair[MM_TILE / 2];
  memcpy(two, code, sizeof two);
  for (int i = 0; i < MM_TILE / 2; i++) pair[i] = (uint8_t)((two[i] & 0x0f) | (two[i] >> 4 & 0xf0));
  memcpy((uint8_t *)plane + (size_t)row * mm_cells(a->k, 2) + k / 2, pair, mm_cells(mm_tile_count(a, k), 2));
}
/* A row's E4M3 codes under one scale. */
MM_INLINE void mm_row_e4m3(const mm_pack_args *a, void *plane, uint32_t row, float s) {
  for (uint32_t k = 0; k < a->k; k += MM_TILE) {
    float capacity[MM_TILE];
    uint8_t code[MM_TILE];
    mm_tile_e4m3(code, mm_tile_load(capacity, a, row, k), &s, MM_TILE);
    mm_tile_store(a, plane, row, k, code);
  }
}
/* The scales of a tile's blocks, a byte each. */
MM_INLINE void mm_tile_store_scales(const mm_pack_args *a, void *plane, uint32_t row, uint32_t k, const uint8_t *scale, uint32_t block) {
  memcpy((uint8_t *)plane + (size_t)row * mm_cells(a->k, block) + k / block, scale, mm_cells(mm_tile_count(a, k), block));
}
/* The reverse: 128 bytes to 256 nibbles. */
MM_INLINE void mm_tile_split_nibbles(uint8_t code[MM_TILE], const uint8_t pair[MM_TILE / 2]) {
  uint16_t two[MM_TILE / 2];
  for (int i = 0; i < MM_TILE / 2; i++) two[i] = (uint16_t)((pair[i] | pair[i] << 4) & 0x0f0f);
  memcpy(code, two, sizeof two);
}

/* A file's packer: of a body(a, plane) by the name and _body; of statements; of what does one tile, tile(a, plane, row, k). */
#define MM_PACK(name) MM_VERSIONS(name, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))
#define MM_PACK_AS(name, statements)                                                                  \
  MM_INLINE void name##_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) { statements; } \
  MM_PACK(name)
#define MM_PACK_TILES(name, tile) \
  MM_PACK_AS(name, for (uint32_t row = 0; row < a->n; row++) for (uint32_t k = 0; k < a->k; k += MM_TILE) tile(a, plane, row, k))

/* The scheme of a file whose packer is pack: word, dB, codes, activations, purpose; then its planes and what else it has. */
#define MM_SCHEME(word, db, codes, inputs, what, ...) \
  const mm_scheme mm_scheme_##word = {.name = #word, .sqnr = db, .code = codes, .act = inputs, .purpose = what, .pack = pack, __VA_ARGS__}
#define MM_PLANES(...) .plane_count = sizeof((mm_plane[]){__VA_ARGS__}) / sizeof(mm_plane), .plane = {__VA_ARGS__}

#endif
