/* w4afp8: 4-bit integers in groups of 128 for FP8 activations (int4.h). A nibble is two's complement, even column low, as SGLang
 * stores it; "_scale_inv" is the multiplier, as there. */
#include "quant/int4.h"

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) { mm_int4_pack(a, plane, 0); }
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_w4afp8 = {.name = "w4afp8",
                                    .purpose = "4-bit integers with FP8 inputs, for GPUs that multiply FP8",
                                    .sqnr = 20.3f,
                                    .synonym = {"w4a8_fp8"},
                                    .code = MM_CODE_INT4,
                                    .act = MM_ACT_FP8_TENSOR,
                                    .plane_count = 2,
                                    .plane = {{"", MM_U8, {1, 2}, false}, {"_scale_inv", MM_BF16, {1, MM_INT4_GROUP}, true}},
                                    .signed_scale = true,
                                    .searches = 1u << MM_SEARCH_MSE,
                                    .pack = pack};
