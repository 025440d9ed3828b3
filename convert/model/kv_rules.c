/* Rules of KV-cache scales. */
#include "convert/model/kv_rules.h"

#include <string.h>

#define ATTN "model.layers.{l}.self_attn."

/* One number for the layer, or one for each head. */
#define ONE(theirs, ours) \
  { ATTN theirs, ATTN "attn." ours, MM_DIM_NONE, MM_DIM_NONE, MM_WHOLE, MM_KIND_KV_SCALE, MM_FULL_LAYER }
#define HEADS(theirs, ours, heads, divide) \
  { ATTN theirs, ATTN "attn." ours, heads, MM_DIM_NONE, divide, MM_KIND_KV_SCALE, MM_FULL_LAYER }
#define BOTH(theirs, ours) \
  { ONE(theirs, ours), HEADS(theirs, ours, MM_DIM_KV_HEADS, MM_KV_ROWS) }

static const mm_rule own[][2] = {
    BOTH("k_scale", "k_scale"),
    BOTH("v_scale", "v_scale"),
    BOTH("k_zero_point", "k_zero_point"),
    BOTH("v_zero_point", "v_zero_point"),
    {ONE("q_scale", "q_scale"), HEADS("q_scale", "q_scale", MM_DIM_HEADS, MM_ROWS)},
};
static const mm_rule shared[][2] = {BOTH("kv_scale", "k_scale"), BOTH("kv_scale", "v_scale")};
_Static_assert(sizeof own / sizeof *own == MM_KV_RULES, "k and v of `shared` take the places of two");

/* The rule that fits the tensor's numbers, if there is such a tensor. */
static const mm_rule *choose(const mm_kv_source *s, uint32_t layer, const mm_rule pair[2]) {
  char name[256];
  uint64_t n = 0;
  return s->find(s->ctx, mm_rule_name(name, sizeof name, pair[0].theirs, layer, 0), &n) ? &pair[n != 1] : NULL;
}

unsigned mm_kv_rules(const mm_kv_source *s, const mm_model *m, uint32_t layer, bool doubled, const mm_rule *rule[MM_KV_RULES]) {
  unsigned n = 0;
  bool has[2] = {false, false};
  if (!mm_rule_applies(&own[0][0], m, layer)) return 0;
  for (size_t i = 0; i < MM_KV_RULES; i++)
    if ((rule[n] = choose(s, layer, own[i]))) n++, has[i != 0] = has[i != 0] || i < 2;
  for (size_t i = 0; i < 2; i++) /* next to one of these kv_scale is the other's */
    if (!has[i] && (doubled || i == 0 || has[0]) && n < MM_KV_RULES && (rule[n] = choose(s, layer, shared[i]))) n++;
  return n;
}

bool mm_kv_pair(const char *ours, const char *theirs, bool *known) {
  bool fits = false;
  *known = false;
  for (size_t i = 0; i < MM_KV_RULES + 2; i++) {
    const mm_rule *r = i < MM_KV_RULES ? own[i] : shared[i - MM_KV_RULES];
    if (strcmp(r->ours, ours) != 0) continue;
    *known = true;
    fits = fits || strcmp(r->theirs, theirs) == 0;
  }
  return fits;
}
