/* Rules of KV-cache scales. */
#include "convert/source/kv_rules.h"

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

/* The rule that fits the tensor's shape, if there is such a tensor. */
static const mm_rule *choose(const mm_hf *hf, uint32_t layer, const mm_rule pair[2]) {
  char name[256];
  uint64_t n;
  const mm_hf_tensor *t = mm_hf_find(hf, mm_rule_name(name, sizeof name, pair[0].theirs, layer, 0));
  return t ? &pair[mm_shape_count(&t->shape, &n) && n != 1] : NULL;
}

unsigned mm_kv_rules(const mm_hf *hf, const mm_model *m, uint32_t layer, bool doubled, const mm_rule *rule[MM_KV_RULES]) {
  unsigned n = 0;
  if (!mm_rule_applies(&own[0][0], m, layer)) return 0;
  for (size_t i = 0; i < MM_KV_RULES; i++)
    if ((rule[n] = choose(hf, layer, own[i]))) n++;
  for (unsigned i = 0; i < n; i++) /* a kv_scale next to one of these contradicts it and stays unused */
    if (strcmp(rule[i]->ours, shared[0][0].ours) == 0 || strcmp(rule[i]->ours, shared[1][0].ours) == 0) return n;
  for (size_t i = 0; i < (doubled ? 2 : 1) && n < MM_KV_RULES; i++)
    if ((rule[n] = choose(hf, layer, shared[i]))) n++;
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
