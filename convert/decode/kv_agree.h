/* One scale of a KV cache for keys and values next to one of their own: both may stand where they are the same number. */
#ifndef MM_CONVERT_KV_AGREE_H
#define MM_CONVERT_KV_AGREE_H

#include "convert/decode/decode.h"

/* MM_BAD_INPUT E_DUP_TENSOR where a layer of the source has both and their numbers, one or one for each of the heads, differ; else the
 * shared one is marked as used. Of a source opened by its names alone no number is known; drop: none matters. */
MM_MUST_USE bool mm_kv_scales_agree(mm_decoder *d, mm_hf *hf, uint32_t layer, uint32_t heads, bool drop, mm_err *err);

#endif
