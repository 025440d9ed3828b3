/* Scales of a quantised KV cache, which calibrating tools leave beside the weights under many names. All become those that vLLM's layers
 * have, "self_attn.attn.k_scale" and so on; a scale for each KV head is cut as the heads are. Values are multipliers, never changed. */
#ifndef MM_CONVERT_KV_SCALES_H
#define MM_CONVERT_KV_SCALES_H

#include "convert/source/hf.h"

#define MM_KV_RULES 5 /* of one layer at most */

/* What follows "self_attn." of such a tensor, in one spelling; NULL for other tensors. */
const char *mm_kv_spelling(const char *rest);
/* Rules of what the source has for this layer, into rule[]; returns how many. One scale for k and v together becomes two, or, with
 * `apart` (where names are the source's own), stays one. */
unsigned mm_kv_rules(const mm_hf *hf, const mm_model *m, uint32_t layer, bool apart, const mm_rule *rule[MM_KV_RULES]);

/* Whether `ours` may be made from `theirs`, both with {l}; *known: `ours` is such a scale at all. */
bool mm_kv_pair(const char *ours, const char *theirs, bool *known);

#endif
