/* Schemas that hold together: those of allOf, and what stands next to a $ref, as one. */
#include <string.h>

#include "runtime/constrain/schema_inside.h"

/* The same text. Where the document has several parts, one of a $ref may mean different schemas. */
static bool equal_text(const mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  if (!a->raw_n || a->raw_n != b->raw_n || memcmp(a->raw, b->raw, a->raw_n) != 0) return false;
  return p->places < 2 || !memmem(a->raw, a->raw_n, "$ref", 4);
}

/* Puts another value in the place of `to`, a member that is made here. */
static bool set(mm_value *to, const mm_value *value) {
  if (!value) return false;
  const mm_value old = *to;
  *to = *value;
  to->key = old.key;
  to->key_n = old.key_n;
  to->next = old.next;
  return true;
}

/* Both in place of `to`. */
static bool set_both(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  return equal_text(p, to, b) || set(to, mm_schema_all_of(p, to, b));
}

/* ---- Two of a keyword ---- */

/* The types that both allow: those of one list that the other has; an integer is a number. */
static bool both_types(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  const mm_value *lists[2] = {to, b};
  mm_schema_made out;
  if (!mm_schema_begin(p, MM_VALUE_ARRAY, &out)) return false;
  for (int side = 0; side < 2; side++) {
    const mm_value *mine = lists[side], *others = lists[!side];
    for (const mm_value *v = mine->type == MM_VALUE_ARRAY ? mine->first : mine; v; v = mine->type == MM_VALUE_ARRAY ? v->next : NULL) {
      bool found = false;
      for (const mm_value *w = others->type == MM_VALUE_ARRAY ? others->first : others; w;
           w = others->type == MM_VALUE_ARRAY ? w->next : NULL)
        found |= v->type == MM_VALUE_STRING && w->type == MM_VALUE_STRING &&
                 (side ? mm_value_is(v, "integer") && mm_value_is(w, "number")
                       : mm_value_is(v, w->text) || (mm_value_is(v, "integer") && mm_value_is(w, "number")));
      if (found && !mm_schema_put(p, &out, v, "")) return false;
    }
  }
  if (!out.value->count) return mm_schema_none(p, "schemas that hold together have no type in common");
  return set(to, out.value);
}

/* The values of both lists. */
static bool both_lists(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  mm_schema_made out;
  if (to->type != MM_VALUE_ARRAY || b->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "required: expected a list of keys");
  if (!mm_schema_spend(p, to->count + b->count) || !mm_schema_begin(p, MM_VALUE_ARRAY, &out)) return false;
  for (const mm_value *v = to->first; v; v = v->next)
    if (!mm_schema_put(p, &out, v, NULL)) return false;
  for (const mm_value *v = b->first; v; v = v->next)
    if (!mm_schema_put(p, &out, v, NULL)) return false;
  to->first = out.value->first;
  to->count = out.value->count;
  to->raw_n = 0;
  return true;
}

/* The properties of both; one that both have holds to both schemas. */
static bool both_properties(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  mm_schema_made out;
  if (to->type != MM_VALUE_OBJECT || b->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "properties: expected an object");
  if (!mm_schema_spend(p, to->count + b->count + (uint64_t)to->count * b->count / 64) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out))
    return false;
  for (const mm_value *v = to->first; v; v = v->next)
    if (!mm_schema_put(p, &out, v, NULL)) return false;
  for (const mm_value *v = b->first; v; v = v->next) {
    mm_value *there = mm_schema_find(out.value, v);
    if (there ? !set_both(p, there, v) : !mm_schema_put(p, &out, v, NULL)) return false;
  }
  to->first = out.value->first;
  to->count = out.value->count;
  to->raw_n = 0;
  return true;
}

/* Keeps the larger or the smaller bound. */
static bool both_bounds(mm_schema_compiler *p, mm_value *to, const mm_value *b, bool larger) {
  if (to->type != MM_VALUE_NUMBER || b->type != MM_VALUE_NUMBER) return mm_schema_unserved(p, to->key, " twice in allOf");
  const double x = mm_value_real(to), y = mm_value_real(b);
  if (x == y) return equal_text(p, to, b) || mm_schema_unserved(p, to->key, " twice in allOf, almost equal");
  if ((y > x) != larger) return true;
  return set(to, b);
}

/* The values that both have, of enum or const. */
static bool both_values(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  const bool mine = mm_value_key_is(to, "enum"), theirs = mm_value_key_is(b, "enum");
  mm_schema_made out;
  if ((mine && to->type != MM_VALUE_ARRAY) || (theirs && b->type != MM_VALUE_ARRAY))
    return mm_schema_wrong(p, "enum: expected a list of values");
  if (!mm_schema_spend(p, (mine ? to->count : 1) * (uint64_t)(theirs ? b->count : 1) / 64) || !mm_schema_begin(p, MM_VALUE_ARRAY, &out))
    return false;
  for (const mm_value *v = mine ? to->first : to; v; v = mine ? v->next : NULL) {
    const bool found = mm_schema_in_list(p, v, b, theirs);
    if (found && !mm_schema_put(p, &out, v, "")) return false;
  }
  if (p->err->status != MM_OK) return false;
  if (!out.value->count) return mm_schema_none(p, "enum: no value is in both lists");
  return !mine || set(to, out.value);
}

/* The least number that is a multiple of both. */
static bool both_multiples(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  int64_t x, y;
  if (!mm_value_int(to, &x) || !mm_value_int(b, &y) || x <= 0 || y <= 0) return mm_schema_unserved(p, to->key, " twice in allOf");
  int64_t r = x, q = y, both;
  while (q) {
    const int64_t rest = r % q;
    r = q;
    q = rest;
  }
  if (__builtin_mul_overflow(x / r, y, &both)) return mm_schema_unserved(p, to->key, " twice in allOf");
  return set(to, mm_schema_whole(p, both));
}

/* Keywords that may stand in a schema several times here, each of them followed. */
static bool may_repeat(const mm_value *m) {
  static const char *const keys[] = {"pattern", "format", "anyOf", "oneOf", "not", "contains", mm_schema_no_match, mm_schema_no_text};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (mm_value_key_is(m, keys[i])) return true;
  return false;
}

/* `to`, a member that is made here, holds to what b says too. */
static bool both_of(mm_schema_compiler *p, mm_schema_made *out, mm_value *to, const mm_value *b) {
  static const char *const larger[] = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"},
                           *const smaller[] = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"};
  for (size_t i = 0; i < sizeof larger / sizeof *larger; i++) {
    if (mm_value_key_is(to, larger[i])) return both_bounds(p, to, b, true);
    if (mm_value_key_is(to, smaller[i])) return both_bounds(p, to, b, false);
  }
  if (mm_value_key_is(to, "properties")) return both_properties(p, to, b);
  if (mm_value_key_is(to, "required")) return both_lists(p, to, b);
  if (mm_value_key_is(to, "type")) return both_types(p, to, b);
  if (mm_value_key_is(to, "enum") || mm_value_key_is(to, "const")) return both_values(p, to, b);
  if (equal_text(p, to, b)) return true;
  if (may_repeat(to)) return mm_schema_put(p, out, b, NULL);
  if (mm_value_key_is(to, "multipleOf")) return both_multiples(p, to, b);
  if (mm_value_key_is(to, "patternProperties")) return both_properties(p, to, b);
  if (mm_value_key_is(to, "additionalProperties") || mm_value_key_is(to, "propertyNames")) return set_both(p, to, b);
  if (mm_value_key_is(to, "uniqueItems") && to->type == MM_VALUE_BOOL && b->type == MM_VALUE_BOOL) return to->truth |= b->truth, true;
  return mm_schema_unserved(p, to->key, " in two schemas that hold together");
}

/* ---- Other keys and items ---- */

/* True if the key of a property matches one of the patterns. */
static bool key_matches(mm_schema_compiler *p, const mm_value *patterns, const mm_value *property, bool *out) {
  for (const mm_value *m = patterns ? patterns->first : NULL; m; m = m->next) {
    if (!mm_schema_key_matches(p, m, property->key, property->key_n, out)) return false;
    if (*out) return true;
  }
  return *out = false, true;
}

/* The properties or patterns of a schema, held to the additionalProperties of another one that does not name them. */
static const mm_value *close_members(mm_schema_compiler *p, const mm_value *members, const mm_value *by, bool patterns) {
  const mm_value *more = mm_value_get(by, "additionalProperties"), *own = mm_value_get(by, "properties"),
                 *matched = mm_value_get(by, "patternProperties"), *named = patterns ? matched : own;
  mm_schema_made out;
  if (members->type != MM_VALUE_OBJECT) return members;
  if (!mm_schema_spend(p, members->count + (named ? named->count : 0) * (uint64_t)members->count / 64) ||
      !mm_schema_begin(p, MM_VALUE_OBJECT, &out))
    return NULL;
  for (const mm_value *v = members->first; v; v = v->next) {
    bool open = mm_schema_find(named, v);
    mm_value *m = mm_schema_put(p, &out, v, NULL);
    if (!m || (!open && !patterns && !key_matches(p, matched, v, &open))) return NULL;
    p->narrowed |= patterns && !open;
    if (!open && !set(m, mm_schema_all_of(p, v, more))) return NULL;
  }
  return out.value;
}

/* The schema, with what the additionalProperties of another one say of its properties and patterns. A key that matches a pattern of both is
 * held to more than it must be. */
static const mm_value *closed(mm_schema_compiler *p, const mm_value *schema, const mm_value *by) {
  static const char *const keys[] = {"properties", "patternProperties"};
  const mm_value *more = mm_value_get(by, "additionalProperties");
  mm_schema_made out;
  if (!more || mm_schema_is_true(more) || (!mm_value_get(schema, keys[0]) && !mm_value_get(schema, keys[1]))) return schema;
  if (!mm_schema_spend(p, schema->count) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out)) return NULL;
  for (const mm_value *m = schema->first; m; m = m->next) {
    mm_value *copy = mm_schema_put(p, &out, m, NULL);
    if (!copy) return NULL;
    for (int i = 0; i < 2; i++)
      if (mm_value_key_is(m, keys[i]) && !set(copy, close_members(p, m, by, i == 1))) return NULL;
  }
  return out.value;
}

static bool is_about_items(const mm_value *m) {
  return mm_value_key_is(m, "prefixItems") || mm_value_key_is(m, "items") || mm_value_key_is(m, "additionalItems");
}

static const mm_value *first_items(const mm_value *schema) {
  const mm_value *items = mm_value_get(schema, "items"), *first = mm_value_get(schema, "prefixItems");
  return !first && items && items->type == MM_VALUE_ARRAY ? items : first;
}

static const mm_value *other_items(const mm_value *schema) {
  const mm_value *items = mm_value_get(schema, "items");
  return items && items->type == MM_VALUE_ARRAY ? mm_value_get(schema, "additionalItems") : items;
}

/* The first items of both, each held to both schemas, and the items behind them. */
static bool put_items(mm_schema_compiler *p, mm_schema_made *out, const mm_value *const both[2]) {
  const mm_value *at[2], *rest[2];
  mm_schema_made list;
  for (int i = 0; i < 2; i++) {
    const mm_value *first = first_items(both[i]);
    if (first && first->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "prefixItems: expected a list of schemas");
    at[i] = first ? first->first : NULL;
    rest[i] = other_items(both[i]);
    if (!mm_schema_spend(p, first ? first->count : 0)) return false;
  }
  if (!mm_schema_begin(p, MM_VALUE_ARRAY, &list)) return false;
  while (at[0] || at[1]) {
    const mm_value *item[2];
    for (int i = 0; i < 2; i++) {
      item[i] = at[i] ? at[i] : rest[i] ? rest[i] : &mm_schema_true;
      if (at[i]) at[i] = at[i]->next;
    }
    const mm_value *one = mm_schema_all_of(p, item[0], item[1]);
    if (!one || !mm_schema_put(p, &list, one, "")) return false;
  }
  if (list.value->count && !mm_schema_put(p, out, list.value, "prefixItems")) return false;
  if (!rest[0] && !rest[1]) return true;
  const mm_value *more = rest[0] && rest[1] ? mm_schema_all_of(p, rest[0], rest[1]) : rest[0] ? rest[0] : rest[1];
  return more && mm_schema_put(p, out, more, "items");
}

/* A keyword that says nothing without another one of its own schema, which it lacks: that of another schema is not meant. */
static bool says_nothing(const mm_value *schema, const mm_value *m) {
  if (mm_value_key_is(m, "then") || mm_value_key_is(m, "else")) return !mm_value_get(schema, "if");
  if (mm_value_key_is(m, "if")) return !mm_value_get(schema, "then") && !mm_value_get(schema, "else");
  return (mm_value_key_is(m, "minContains") || mm_value_key_is(m, "maxContains")) && !mm_value_get(schema, "contains");
}

/* The member of `made` that m is to be united with. */
static mm_value *counterpart(const mm_value *made, const mm_value *m) {
  static const mm_value names[] = {{.key = "enum", .key_n = 4}, {.key = "const", .key_n = 5}};
  mm_value *there = mm_schema_find(made, m);
  for (int i = 0; i < 2 && !there && (mm_value_key_is(m, "enum") || mm_value_key_is(m, "const")); i++)
    there = mm_schema_find(made, &names[i]);
  return there;
}

const mm_value *mm_schema_both(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  const mm_value *x = mm_schema_resolve(p, a), *y = x ? mm_schema_resolve(p, b) : NULL, *both[2] = {y ? closed(p, x, y) : NULL, NULL};
  mm_schema_made out;
  if (!both[0] || !(both[1] = closed(p, y, x))) return NULL;
  const bool items = (first_items(x) || other_items(x)) && (first_items(y) || other_items(y));
  const bool counted = mm_value_get(x, "contains") && mm_value_get(y, "contains") &&
                       (mm_value_get(x, "minContains") || mm_value_get(x, "maxContains") || mm_value_get(y, "minContains") ||
                        mm_value_get(y, "maxContains"));
  if (counted) return mm_schema_unserved(p, "minContains, maxContains", " in two schemas that hold together"), NULL;
  if (!mm_schema_spend(p, a->count + b->count + (uint64_t)a->count * b->count / 64) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out))
    return NULL;
  for (int i = 0; i < 2; i++) {
    for (const mm_value *m = both[i]->first; m; m = m->next) {
      if (says_nothing(both[i], m) || (items && is_about_items(m))) continue;
      mm_value *there = i ? counterpart(out.value, m) : NULL;
      if (there && mm_schema_is_annotation(m)) continue;
      if (there ? !both_of(p, &out, there, m) : !mm_schema_put(p, &out, m, NULL)) return NULL;
    }
  }
  return !items || put_items(p, &out, both) ? out.value : NULL;
}

/* ---- $ref and allOf ---- */

static bool only_annotations(const mm_value *schema, const char *keyword) {
  for (const mm_value *m = schema->first; m; m = m->next)
    if (!mm_value_key_is(m, keyword) && !mm_schema_is_annotation(m)) return false;
  return true;
}

/* Both, where b may be true, which says nothing. */
static const mm_value *join(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  if (!b) return NULL;
  if (mm_schema_is_true(b)) return a;
  if (mm_schema_is_false(b)) return mm_schema_none(p, "found the schema false"), NULL;
  if (b->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "found something else than an object as a schema"), NULL;
  if (!(b = mm_schema_finish(p, b))) return NULL;
  return only_annotations(a, "") ? b : mm_schema_both(p, a, b);
}

/* The schema itself without the keyword, and what the keyword leads to. */
static const mm_value *merge(mm_schema_compiler *p, const mm_value *schema, const mm_value *reference, const mm_value *all) {
  const mm_value *out = mm_schema_without(p, schema, reference ? reference : all);
  if (out && reference) {
    const mm_value *target = mm_schema_follow(p, reference);
    out = target ? join(p, out, mm_schema_plain(p, target)) : NULL;
  }
  for (const mm_value *v = all && !reference ? all->first : NULL; v && out; v = v->next) out = join(p, out, mm_schema_plain(p, v));
  return out ? mm_schema_plain(p, out) : NULL;
}

#define STEPS_MAX 32 /* of references that lead to references */

/* The schema that was merged before. */
static const mm_value *merged_before(mm_schema_compiler *p, const mm_schema_merged *m, const char *keyword) {
  if (m->open) return mm_schema_unserved(p, keyword, " of a schema to itself"), NULL;
  p->narrowed |= m->narrowed;
  p->partial |= m->partial;
  if (!m->plain && m->none) return mm_schema_none(p, "allOf, $ref: schemas that contradict each other"), NULL;
  return m->plain ? m->plain : (mm_schema_unserved(p, keyword, " of such schemas"), NULL);
}

const mm_value *mm_schema_plain(mm_schema_compiler *p, const mm_value *schema) {
  const mm_value *passed[STEPS_MAX];
  for (size_t i = 0; i < STEPS_MAX; i++) {
    for (size_t k = 0; k < i; k++)
      if (passed[k] == schema) return mm_schema_wrong(p, "$ref: leads to itself"), NULL;
    passed[i] = schema;
    if (schema->type != MM_VALUE_OBJECT) return schema;
    const mm_value *reference = mm_value_get(schema, "$ref"), *all = mm_value_get(schema, "allOf");
    if (!reference && !all) return schema;
    if (all && (all->type != MM_VALUE_ARRAY || !all->count)) return mm_schema_wrong(p, "allOf: expected a list of schemas"), NULL;
    const bool one = !reference && all->count == 1 && only_annotations(schema, "allOf");
    if (one || (reference && (p->old || only_annotations(schema, "$ref")))) {
      schema = one ? all->first : mm_schema_follow(p, reference);
      if (!schema) return NULL;
      continue;
    }
    for (size_t k = 0; k < p->merged_count; k++)
      if (p->merged[k].schema == schema) return merged_before(p, &p->merged[k], reference ? "$ref" : "allOf");
    if (p->merge_depth == MM_SCHEMA_DEPTH)
      return mm_schema_too_many(p, "schemas within each other", MM_SCHEMA_DEPTH + 1, MM_SCHEMA_DEPTH), NULL;
    if (p->merged_count == MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", MM_SCHEMAS_MAX + 1, MM_SCHEMAS_MAX), NULL;
    if (!MM_GROW(p->merged, &p->merged_cap, p->merged_count + 1, p->err)) return NULL;
    const size_t place = p->merged_count++;
    p->merged[place] = (mm_schema_merged){.schema = schema, .open = true};
    const bool narrowed = p->narrowed, partial = p->partial;
    p->narrowed = p->partial = false;
    p->merge_depth++;
    const mm_value *plain = merge(p, schema, reference, all);
    p->merge_depth--;
    p->merged[place].plain = plain;
    p->merged[place].open = false;
    p->merged[place].none = p->none;
    p->merged[place].narrowed = p->narrowed;
    p->merged[place].partial = p->partial;
    p->narrowed |= narrowed;
    p->partial |= partial;
    return plain;
  }
  return mm_schema_too_many(p, "references to references", STEPS_MAX + 1, STEPS_MAX), NULL;
}
