/* Rules of a quantised KV cache's scales (names: convert/model/kv_scales.h): which the source has, and what each becomes. */
#ifndef MM_CONVERT_KV_RULES_H
#define MM_CONVERT_KV_RULES_H

#include "convert/model/rule.h"

#define MM_KV_RULES 5 /* of one layer at most */

/* The tensors of a source, by their canonical names: whether there is one, and how many numbers it has. */
typedef struct mm_kv_source {
  bool (*find)(const void *ctx, const char *name, uint64_t *count);
  const void *ctx;
} mm_kv_source;

/* Rules for the scales that the source has for this layer, into rule[]; returns how many. A scale that k and v share becomes one for
 * each if `doubled`. Where k or v has one of its own, it is the other's; next to both it has no rule. */
unsigned mm_kv_rules(const mm_kv_source *s, const mm_model *m, uint32_t layer, bool doubled, const mm_rule *rule[MM_KV_RULES]);

/* True if `ours` may be made from `theirs`, both with {l}; *known: `ours` is such a scale at all. */
bool mm_kv_pair(const char *ours, const char *theirs, bool *known);

#endif
