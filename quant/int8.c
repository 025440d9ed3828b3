/* int8: signed bytes in [-127, 127] with one f32 scale per output row: W[n, k] = code[n, k] · scale[n]. -128 is left out so that
 * kernels may negate codes. absmax: amax/127 of the row, 1 for a zero row; mse: that scale shrunk to the least squared error.
 * Codes are w/s with a true division, to nearest even. */
#include "quant/search.h"

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) { mm_row_int_pack(a, plane, 127); }
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_int8 = {.name = "int8",
                                  .purpose = "8-bit integers for weights and inputs, for GPUs without FP8",
                                  .sqnr = 41.8f,
                                  .synonym = {"w8a8", "w8a8_int8"},
                                  .code = MM_CODE_INT8,
                                  .act = MM_ACT_INT8_TOKEN,
                                  .plane_count = 2,
                                  .plane = {{"", MM_I8, {1, 1}, false}, {"_scale", MM_F32, {1, 0}, true}},
                                  .signed_scale = true,
                                  .searches = 1u << MM_SEARCH_MSE,
                                  .pack = pack};
