/* Scales of a quantised KV cache, which calibrating tools store among the weights under many names. All become the names that vLLM's
 * layers have, "self_attn.attn.k_scale" and so on; a scale for each KV head is cut as the heads are. Values are multipliers, never
 * changed. */
#ifndef MM_CONVERT_KV_SCALES_H
#define MM_CONVERT_KV_SCALES_H

/* The part of such a tensor's name behind "self_attn.", in its one canonical form; NULL for other tensors. */
const char *mm_kv_suffix_of(const char *rest);

#endif
