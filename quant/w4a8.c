/* w4a8: signed nibbles in [-7, 7] with one f32 scale per output row, for int8 activations: W[n, k] = code[n, k] · scale[n]. Two
 * codes to a byte, two's complement, even column in the low nibble. -8 is left out because the engines' sign-magnitude nibbles
 * cannot hold it, and the scale is positive (they store 7 · scale, an absolute maximum). absmax: amax/7 of the row, 1 for a zero
 * row; mse: that scale shrunk to the least squared error. Codes are w/s with a true division, to nearest even. */
#include "quant/search.h"

MM_PACK_AS(pack, mm_row_int_pack(a, plane, 7))

MM_SCHEME(w4a8, 19.0f, MM_CODE_INT4, MM_ACT_INT8_TOKEN, "4-bit integers with 8-bit inputs and a scale a row",
          MM_PLANES({"", MM_U8, {1, 2}, false}, {"_scale", MM_F32, {1, 0}, true}), .synonym = {"w4a8_int8"},
          .searches = 1u << MM_SEARCH_MSE);
