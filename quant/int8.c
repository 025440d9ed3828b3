/* int8: signed bytes in [-127, 127] with one f32 scale per output row: W[n, k] = code[n, k] · scale[n]. -128 is left out so that
 * kernels may negate codes. absmax: amax/127 of the row, 1 for a zero row; mse: that scale shrunk to the least squared error.
 * Codes are w/s with a true division, to nearest even. */
#include "quant/search.h"

MM_PACK_AS(pack, mm_row_int_pack(a, plane, 127))

MM_SCHEME(int8, 41.8f, MM_CODE_INT8, MM_ACT_INT8_TOKEN, "8-bit integers for weights and inputs, for GPUs without FP8",
          MM_PLANES({"", MM_I8, {1, 1}, false}, {"_scale", MM_F32, {1, 0}, true}), .synonym = {"w8a8", "w8a8_int8"}, .signed_scale = true,
          .searches = 1u << MM_SEARCH_MSE);
