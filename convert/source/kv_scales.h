/* Scales of a quantised KV cache, which calibrating tools leave beside the weights under many names. All become those that vLLM's layers
 * have, "self_attn.attn.k_scale" and so on; a scale for each KV head is cut as the heads are. Values are multipliers, never changed. */
#ifndef MM_CONVERT_KV_SCALES_H
#define MM_CONVERT_KV_SCALES_H

/* What follows "self_attn." of such a tensor, in one spelling; NULL for other tensors. */
const char *mm_kv_spelling(const char *rest);

#endif
