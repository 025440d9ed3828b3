/* Rules of a quantised KV cache's scales (names: convert/source/kv_scales.h): which the source has, and what each becomes. */
#ifndef MM_CONVERT_KV_RULES_H
#define MM_CONVERT_KV_RULES_H

#include "convert/source/hf.h"

#define MM_KV_RULES 5 /* of one layer at most */

/* Rules of what the source has for this layer, into rule[]; returns how many. One scale for k and v together becomes two, or, with
 * `apart` (where names are the source's own), stays one. */
unsigned mm_kv_rules(const mm_hf *hf, const mm_model *m, uint32_t layer, bool apart, const mm_rule *rule[MM_KV_RULES]);

/* Whether `ours` may be made from `theirs`, both with {l}; *known: `ours` is such a scale at all. */
bool mm_kv_pair(const char *ours, const char *theirs, bool *known);

#endif
