/* Lists of schemas: first items, those that `contains` asks for, others, and lists whose items all differ. */
#include <string.h>

#include "runtime/constrain/schema_inside.h"

/* ---- uniqueItems ---- */

#define UNIQUE_MAX 256 /* values of items that all differ */

/* The literals of a form that has nothing else, as one form. NULL: it has others, or too many, or after an error. */
static mm_form *literals_of(mm_schema_compiler *p, const mm_form *item) {
  const mm_form *const alone[1] = {item}, *const *all = item->kind == MM_FORM_CHOICE ? item->by_first : alone;
  const size_t kinds = item->kind == MM_FORM_CHOICE ? MM_FIRSTS : 1;
  uint32_t count = 0;
  for (size_t i = 0; i < kinds; i++) {
    if (all[i] && (all[i]->kind != MM_FORM_LITERALS || all[i]->count > UNIQUE_MAX)) return NULL;
    count += all[i] ? all[i]->count : 0;
  }
  if (!count || count > UNIQUE_MAX) return NULL;
  mm_form *out = mm_arena_alloc(p->arena, sizeof *out, p->err);
  mm_literal *l = mm_arena_alloc(p->arena, count * sizeof *l, p->err);
  const mm_value **value = mm_arena_alloc(p->arena, count * sizeof *value, p->err);
  if (!out || !l || !value || !mm_schema_spend(p, (uint64_t)count * count / 64)) return NULL;
  *out = (mm_form){.kind = MM_FORM_LITERALS, .literal = l};
  for (size_t i = 0; i < kinds; i++) {
    for (uint32_t k = 0; all[i] && k < all[i]->count; k++) {
      const mm_literal *one = &all[i]->literal[k];
      bool there = false;
      if (!(value[out->count] = mm_body_parse(p->arena, one->p, one->n, p->err))) return NULL;
      for (uint32_t j = 0; j < out->count && !there; j++) there = mm_schema_may_equal(p, value[j], value[out->count]);
      if (!there) l[out->count++] = *one;
    }
  }
  mm_literals_sort(out);
  return out;
}

/* Ends the list before the first item that may equal one before it. */
static bool end_before_equal(mm_schema_compiler *p, mm_form *out) {
  uint32_t count = 1;
  for (bool differ = true; count < out->count; count++) {
    for (uint32_t i = 0; i < count && differ; i++)
      if (!mm_schema_forms_differ(p, out->literal[i].value, out->literal[count].value, &differ)) return false;
    if (!differ) break;
  }
  if (out->least > count) return mm_schema_unserved(p, "uniqueItems", " of so many first items, which may be equal");
  out->most = (uint32_t)mm_min(out->most, count);
  return true;
}

static bool keep_unique(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  if (out->most <= 1) return true;
  if (out->count) return end_before_equal(p, out);
  mm_form *item = mm_schema_is_open(p, out->item) ? NULL : literals_of(p, out->item);
  if (p->err->status != MM_OK) return false;
  if (item) {
    out->item = item;
    out->unique = true;
    out->most = (uint32_t)mm_min(out->most, item->count);
    return out->least <= out->most || mm_schema_none(p, "minItems: more than the values of uniqueItems");
  }
  /* Lists may be no longer where they are one of all types. */
  if (out->item != &mm_schema_any_value || out->least > 1 || mm_value_get(schema, "type"))
    return mm_schema_unserved(p, "uniqueItems", " of items of other types than enum, const and boolean");
  out->most = 1;
  return true;
}

/* ---- Items ---- */

/* The items that `contains` asks for, behind the first ones: a list has no more items than may fit it. */
static bool add_contained(mm_schema_compiler *p, const mm_value *schema, const mm_value *contains, const mm_value *items, uint32_t *count,
                          mm_form *out) {
  uint32_t least = 1, most = UINT32_MAX;
  if (!mm_schema_count(p, schema, "minContains", &least) || !mm_schema_count(p, schema, "maxContains", &most)) return false;
  const bool said = mm_value_get(schema, "minContains");
  if (least > most) return mm_schema_none(p, said ? "minContains: more than maxContains" : "contains: more than maxContains");
  out->most = (uint32_t)mm_min(out->most, most);
  if (!least) return true;
  if (mm_schema_is_false(items)) return mm_schema_unserved(p, "contains", " where no further items may stand");
  if (*count + least > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", (size_t)*count + least, MM_SCHEMAS_MAX);
  const mm_value *both = items ? mm_schema_all_of(p, items, contains) : contains;
  const mm_form *form;
  mm_literal *l = mm_arena_alloc(p->arena, ((size_t)*count + least) * sizeof *l, p->err);
  if (!both || !l) return false;
  if (!mm_schema_compile_value(p, both, &form))
    return *count && mm_schema_forget_none(p) ? mm_schema_unserved(p, "contains", " of first items alone") : false;
  if (*count) memcpy(l, out->literal, *count * sizeof *l);
  out->literal = l;
  for (uint32_t i = 0; i < least; i++) l[(*count)++].value = form;
  out->least = *count;
  return *count <= most || mm_schema_unserved(p, "maxContains", " with so many items of prefixItems");
}

/* Items in front of the others. A schema that no value fits ends the list. */
static bool add_first_items(mm_schema_compiler *p, const mm_value *first, uint32_t *count, mm_form *out) {
  if (first && first->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "prefixItems: expected a list of schemas");
  if (first && first->count > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", first->count, MM_SCHEMAS_MAX);
  if (first && !(out->literal = mm_arena_alloc(p->arena, (first->count + 1) * sizeof *out->literal, p->err))) return false;
  for (const mm_value *v = first ? first->first : NULL; v; v = v->next) {
    if (!mm_schema_compile_value(p, v, &out->literal[*count].value)) {
      if (!mm_schema_leave_out(p)) return false;
      return out->most = *count, true;
    }
    (*count)++;
  }
  return true;
}

/* What items behind the first ones hold to: `items`, or unevaluatedItems, to which an item that `contains` asks for is none of its own. */
static const mm_value *items_of(const mm_value *schema, const mm_value *items, bool *contained) {
  const mm_value *rest = mm_value_get(schema, "unevaluatedItems"), *contains = mm_value_get(schema, "contains");
  *contained = !items && rest && contains && !mm_schema_is_true(rest);
  if (items || !rest) return items;
  return *contained && mm_schema_is_false(rest) ? contains : rest;
}

bool mm_schema_compile_array(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *items = mm_value_get(schema, "items"), *first = mm_value_get(schema, "prefixItems");
  bool contained;
  *out = (mm_form){.kind = MM_FORM_ARRAY, .item = &mm_schema_any_value, .most = UINT32_MAX};
  if (!first && items && items->type == MM_VALUE_ARRAY) {
    first = items;
    items = mm_value_get(schema, "additionalItems");
  }
  items = items_of(schema, items, &contained);
  uint32_t count = 0, least = 0, most = UINT32_MAX; /* out->count when all are there: the array may be in use before, by none of them */
  if (!add_first_items(p, first, &count, out)) return false;
  if (out->most != UINT32_MAX && mm_value_get(schema, "contains")) return mm_schema_unserved(p, "contains", " with prefixItems that end");
  for (const mm_value *v = schema->first; v; v = v->next)
    if (mm_value_key_is(v, "contains") && !add_contained(p, schema, v, contained ? NULL : items, &count, out)) return false;
  if (items && !mm_schema_compile_value(p, items, &out->item)) {
    if (!mm_schema_leave_out(p)) return false;
    out->most = (uint32_t)mm_min(out->most, count);
    out->item = &mm_schema_any_value;
  }
  if (!mm_schema_count(p, schema, "minItems", &least) || !mm_schema_count(p, schema, "maxItems", &most)) return false;
  out->count = count;
  out->least = (uint32_t)mm_max(out->least, least);
  out->most = (uint32_t)mm_min(out->most, most);
  if (out->least > out->most && least <= most && most && mm_value_get(schema, "contains")) /* one item counts once here */
    return mm_schema_unserved(p, "contains", " with so many items, or so few");
  if (out->least > out->most)
    return mm_schema_none(p, least > most ? "minItems: more than maxItems" : "found fewer items that may stand in a list than it needs");
  return !mm_schema_is_true(mm_value_get(schema, "uniqueItems")) || keep_unique(p, schema, out);
}
