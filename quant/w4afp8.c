/* w4afp8: 4-bit integers in groups of 128 for FP8 activations (int4.h). A nibble is two's complement, even column low, as SGLang
 * stores it; "_scale_inv" is the multiplier, as there. */
#include "quant/int4.h"

MM_PACK_AS(pack, mm_int4_pack(a, plane, 0))

MM_SCHEME(w4afp8, 20.3f, MM_CODE_INT4, MM_ACT_FP8_TENSOR, "4-bit integers with FP8 inputs, for GPUs that multiply FP8",
          MM_PLANES({"", MM_U8, {1, 2}, false}, {"_scale_inv", MM_BF16, {1, MM_INT4_GROUP}, true}), .synonym = {"w4a8_fp8"},
          .signed_scale = true, .searches = 1u << MM_SEARCH_MSE);
