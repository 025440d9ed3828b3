/* w4a16: 4-bit integers in groups of 128 for bf16 activations (int4.h). A nibble is the value + 8, even column low: read as
 * little-endian 32-bit words along k, the bytes are compressed-tensors' weight_packed. */
#include "quant/int4.h"

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) { mm_int4_pack(a, plane, 8); }
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_w4a16 = {.name = "w4a16",
                                   .purpose = "4-bit integers, inputs kept: the smallest for GPUs before Blackwell",
                                   .sqnr = 20.3f,
                                   .synonym = {"int4", "w4a16_int4", "w4a16g128"},
                                   .code = MM_CODE_INT4_OFFSET,
                                   .act = MM_ACT_KEPT,
                                   .plane_count = 2,
                                   .plane = {{"", MM_U8, {1, 2}, false}, {"_scale", MM_BF16, {1, MM_INT4_GROUP}, true}},
                                   .signed_scale = true,
                                   .searches = 1u << MM_SEARCH_MSE,
                                   .pack = pack};
