/* w4a16: 4-bit integers in groups of 128 for bf16 activations (int4.h). A nibble is the value + 8, even column low: read as
 * little-endian 32-bit words along k, the bytes are compressed-tensors' weight_packed. */
#include "quant/int4.h"

MM_PACK_AS(pack, mm_int4_pack(a, plane, 8))

MM_SCHEME(w4a16, 20.3f, MM_CODE_INT4_OFFSET, MM_ACT_KEPT, "4-bit integers, inputs kept: the smallest for GPUs before Blackwell",
          MM_PLANES({"", MM_U8, {1, 2}, false}, {"_scale", MM_BF16, {1, MM_INT4_GROUP}, true}),
          .synonym = {"int4", "w4a16_int4", "w4a16g128"}, .signed_scale = true, .searches = 1u << MM_SEARCH_MSE);
