/* Integers of weight-only checkpoints as GPTQ, AWQ, AutoRound and compressed-tensors store them, kept bit for bit: W[n, k] = (code[n, k] -
 * zero) · scale. Their own cell of a scale is a whole row; a source's groups of 32, 64 or 128 columns are a finer grid of it.
 *
 * w4a16_f16 and w8a16_f16 are symmetric, with F16 scales. An element of a scale plane of the others is a word: the 19 upper bits are those
 * of the scale as f32, which has no lower ones where the source's type is F16 or BF16, and the low byte is the zero point in the codes'
 * own values, two's complement (quant.h). Four-bit codes are stored as the value + 8, even column low.
 *
 * Packed from numbers, every row is symmetric: s = amax/7 or amax/127 in the scale's type, 1 for a zero row, zero point 0. */
#include "quant/tile.h"

/* The nearest scale that the source's type has: not 0, and of a size that every code's product is finite. */
MM_INLINE float grouped_scale(float amax, int32_t top, mm_dtype type) {
  const float s = amax / (float)top;
  if (s == 0) return 1;
  if (type == MM_F16) {
    const float near = mm_f16_to_f32(mm_f32_to_f16(s < 65504 ? s : 65504));
    return near > 0 ? near : 0x1p-24f;
  }
  const int bits = mm_finite_to_bf16(s), most = top == 7 ? 0x7dff : 0x7bff; /* times 8, times 128 */
  return mm_bf16_to_f32((uint16_t)(bits < 1 ? 1 : bits > most ? most : bits));
}

MM_INLINE void grouped_pack(const mm_pack_args *a, void *const plane[MM_MAX_PLANES], int32_t top, mm_dtype type, bool words) {
  for (uint32_t row = 0; row < a->n; row++) {
    const float s = grouped_scale(mm_row_amax(a, row), top, type);
    if (words)
      ((uint32_t *)plane[1])[row] = mm_f32_bits(s);
    else
      ((uint16_t *)plane[1])[row] = mm_f32_to_f16(s);
    for (uint32_t k = 0; k < a->k; k += MM_TILE) {
      float tile[MM_TILE];
      uint8_t code[MM_TILE];
      mm_tile_int(code, mm_tile_load(tile, a, row, k), &s, MM_TILE, top == 7 ? -8 : -top, top);
      for (int i = 0; top == 7 && i < MM_TILE; i++) code[i] ^= 8;
      if (top == 7)
        mm_tile_store_nibbles(a, plane[0], row, k, code);
      else
        mm_tile_store(a, plane[0], row, k, code);
    }
  }
}

#define NIBBLES \
  { "", MM_U8, {1, 2}, false }
#define BYTES \
  { "", MM_I8, {1, 1}, false }
#define GROUPED(word, db, codes, kind, top, type, words, suffix, stored, what) \
  MM_PACK_AS(pack_##word, grouped_pack(a, plane, top, type, words))            \
  const mm_scheme mm_scheme_##word = {.name = #word,                           \
                                      .sqnr = db,                              \
                                      .code = codes,                           \
                                      .act = MM_ACT_KEPT,                      \
                                      .purpose = what,                         \
                                      .pack = pack_##word,                     \
                                      .signed_scale = true,                    \
                                      .scale_of = type,                        \
                                      MM_PLANES(kind, {suffix, stored, {1, 0}, true})};

GROUPED(w4a16_f16, 16.5f, MM_CODE_INT4_OFFSET, NIBBLES, 7, MM_F16, false, "_scale", MM_F16,
        "kept 4-bit integers of GPTQ and AutoRound, symmetric, F16 scales")
GROUPED(w4a16_zero, 16.5f, MM_CODE_INT4_OFFSET, NIBBLES, 7, MM_F16, true, "_scale_zero", MM_U32,
        "kept 4-bit integers of AWQ, GPTQ and AutoRound, zero points, F16 scales")
GROUPED(w4a16_zero_bf16, 16.5f, MM_CODE_INT4_OFFSET, NIBBLES, 7, MM_BF16, true, "_scale_zero", MM_U32,
        "kept 4-bit integers, zero points, BF16 scales")
GROUPED(w8a16_f16, 41.7f, MM_CODE_INT8, BYTES, 127, MM_F16, false, "_scale", MM_F16,
        "kept 8-bit integers of GPTQ and AutoRound, symmetric, F16 scales")
GROUPED(w8a16_zero, 41.7f, MM_CODE_INT8, BYTES, 127, MM_F16, true, "_scale_zero", MM_U32,
        "kept 8-bit integers of GPTQ and AutoRound, zero points, F16 scales")
GROUPED(w8a16_zero_bf16, 41.7f, MM_CODE_INT8, BYTES, 127, MM_BF16, true, "_scale_zero", MM_U32,
        "kept 8-bit integers, zero points, BF16 scales")
