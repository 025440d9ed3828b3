/* w4a8: signed nibbles in [-7, 7] with one f32 scale per output row, for int8 activations: W[n, k] = code[n, k] · scale[n]. Two
 * codes to a byte, two's complement, even column in the low nibble. -8 is left out because the engines' sign-magnitude nibbles
 * cannot hold it, and the scale is positive (they store 7 · scale, an absolute maximum). absmax: amax/7 of the row, 1 for a zero
 * row; mse: that scale shrunk to the least squared error. Codes are w/s with a true division, to nearest even. */
#include "quant/search.h"

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) { mm_row_int_pack(a, plane, 7); }
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_w4a8 = {.name = "w4a8",
                                  .purpose = "4-bit integers with 8-bit inputs and a scale a row",
                                  .sqnr = 19.0f,
                                  .synonym = {"w4a8_int8"},
                                  .code = MM_CODE_INT4,
                                  .act = MM_ACT_INT8_TOKEN,
                                  .plane_count = 2,
                                  .plane = {{"", MM_U8, {1, 2}, false}, {"_scale", MM_F32, {1, 0}, true}},
                                  .searches = 1u << MM_SEARCH_MSE,
                                  .pack = pack};
