/* Keywords that hold under a condition, as alternatives: if, dependentRequired, dependentSchemas, and oneOf where a value may fit several;
 * and unevaluatedProperties, unevaluatedItems, which depend on the alternative. */
#include <string.h>

#include "runtime/constrain/schema_inside.h"

/* ---- if ---- */

/* {"anyOf": [if and then, not if and else]} with what else the schema says. */
static const mm_value *resolve_if(mm_schema_compiler *p, const mm_value *schema, const mm_value *condition) {
  const mm_value *then = mm_value_get(schema, "then"), *other = mm_value_get(schema, "else");
  mm_schema_made out, without, list;
  if (!mm_schema_spend(p, schema->count + 4) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out) ||
      !mm_schema_begin(p, MM_VALUE_OBJECT, &without) || !mm_schema_begin(p, MM_VALUE_ARRAY, &list))
    return NULL;
  for (const mm_value *m = schema->first; m; m = m->next)
    if (m != condition && m != then && m != other && !mm_schema_put(p, &out, m, NULL)) return NULL;
  const mm_value *with = then ? mm_schema_all_of(p, condition, then) : condition;
  if (!with || !mm_schema_put(p, &list, with, "") || !mm_schema_put(p, &without, condition, "not")) return NULL;
  const mm_value *all = other ? mm_schema_list_of(p, "allOf", other, NULL) : NULL;
  if (other && (!all || !mm_schema_put(p, &without, all->first, "allOf"))) return NULL;
  return mm_schema_put(p, &list, without.value, "") && mm_schema_put(p, &out, list.value, "anyOf") ? out.value : NULL;
}

/* ---- dependentRequired and dependentSchemas ---- */

/* The schema of an object that has the key. The entry says nothing about other values, not even which items are evaluated. */
static const mm_value *with_key(mm_schema_compiler *p, const mm_value *entry, bool schemas, bool there) {
  const mm_value key = {.type = MM_VALUE_STRING, .text = entry->key, .n = entry->key_n, .raw = ""};
  const mm_value object = {.type = MM_VALUE_STRING, .text = "object", .n = 6, .raw = ""};
  const mm_value *required = mm_schema_list_of(p, "required", &key, NULL);
  if (required && schemas && !there) required = mm_schema_all_of(p, mm_schema_of(p, "type", &object), required);
  if (!required || schemas) return mm_schema_all_of(p, required, entry);
  if (entry->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "dependentRequired: expected lists of keys"), NULL;
  return mm_schema_all_of(p, required, mm_schema_of(p, "required", entry));
}

static const mm_value *without_key(mm_schema_compiler *p, const mm_value *entry) {
  mm_schema_made properties;
  if (!mm_schema_begin(p, MM_VALUE_OBJECT, &properties)) return NULL;
  mm_value *key = mm_schema_put(p, &properties, &mm_schema_false, entry->key);
  if (!key) return NULL;
  key->key_n = entry->key_n;
  return mm_schema_of(p, "properties", properties.value);
}

static bool requires_key(const mm_value *schema, const mm_value *entry) {
  const mm_value *list = mm_value_get(schema, "required");
  for (const mm_value *v = list ? list->first : NULL; v; v = v->next)
    if (v->type == MM_VALUE_STRING && v->n == entry->key_n && memcmp(v->text, entry->key, v->n) == 0) return true;
  return false;
}

/* Alternatives in place of the first entry: without its key, and with it. */
static const mm_value *resolve_entry(mm_schema_compiler *p, const mm_value *schema, const mm_value *member) {
  const mm_value *entry = member->first, *out = mm_schema_without(p, schema, member);
  mm_schema_made rest, choice;
  if (!out || (member->type == MM_VALUE_OBJECT && !entry)) return out;
  if (member->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "dependentRequired, dependentSchemas: expected an object"), NULL;
  if (!mm_schema_spend(p, member->count + out->count) || !mm_schema_begin(p, MM_VALUE_OBJECT, &rest)) return NULL;
  for (const mm_value *v = entry->next; v; v = v->next)
    if (!mm_schema_put(p, &rest, v, NULL)) return NULL;
  const bool there = requires_key(out, entry);
  const mm_value *without = there ? &mm_schema_false : without_key(p, entry),
                 *with = mm_schema_is_false(entry) ? entry : with_key(p, entry, mm_value_key_is(member, "dependentSchemas"), there),
                 *list = without && with ? mm_schema_list_of(p, "anyOf", without, with) : NULL;
  if (!list || !mm_schema_begin(p, MM_VALUE_OBJECT, &choice)) return NULL;
  for (const mm_value *v = out->first; v; v = v->next)
    if (!mm_schema_put(p, &choice, v, NULL)) return NULL;
  if (rest.value->count && !mm_schema_put(p, &choice, rest.value, member->key)) return NULL;
  return mm_schema_put(p, &choice, list->first, "anyOf") ? choice.value : NULL;
}

const mm_value *mm_schema_resolve(mm_schema_compiler *p, const mm_value *schema) {
  const mm_value *m = schema->first;
  while (schema && m) {
    const bool conditional = mm_value_key_is(m, "if") && (mm_value_get(schema, "then") || mm_value_get(schema, "else"));
    const bool dependent = mm_value_key_is(m, "dependentRequired") || mm_value_key_is(m, "dependentSchemas");
    if (conditional || dependent) {
      schema = conditional ? resolve_if(p, schema, m) : resolve_entry(p, schema, m);
      m = schema ? schema->first : NULL;
    } else {
      m = m->next;
    }
  }
  return schema;
}

/* ---- Alternatives ---- */

/* The alternative, and none of the others. */
static const mm_value *alone(mm_schema_compiler *p, const mm_value *any, const mm_value *one) {
  mm_schema_made others, out;
  if (!mm_schema_spend(p, any->count + 2) || !mm_schema_begin(p, MM_VALUE_ARRAY, &others) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out))
    return NULL;
  for (const mm_value *v = any->first; v; v = v->next)
    if (v != one && !mm_schema_put(p, &others, v, "")) return NULL;
  const mm_value *all = mm_schema_list_of(p, "allOf", one, NULL),
                 *fits = others.value->count ? mm_schema_of(p, "anyOf", others.value) : NULL;
  if (!all || (others.value->count && !fits) || !mm_schema_put(p, &out, all->first, "allOf")) return NULL;
  return !fits || mm_schema_put(p, &out, fits, "not") ? out.value : NULL;
}

const mm_value *mm_schema_with(mm_schema_compiler *p, const mm_value *rest, const mm_value *one) {
  const mm_value *plain = mm_schema_plain(p, one);
  if (!plain && p->err->status == MM_OK) mm_schema_wrong(p, "$ref: leads to no schema of this document");
  if (!plain) return NULL;
  if (plain->type == MM_VALUE_BOOL) return plain->truth ? rest : (mm_schema_none(p, "found the schema false"), NULL);
  if (plain->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "found something else than an object as a schema"), NULL;
  plain = mm_schema_finish(p, plain);
  return plain ? mm_schema_both(p, rest, plain) : NULL;
}

const mm_value **mm_schema_alternatives(mm_schema_compiler *p, const mm_value *schema, const mm_value *any, bool exclusive, size_t *count) {
  const mm_value *rest = mm_schema_without(p, schema, any), **list = mm_arena_alloc(p->arena, any->count * sizeof *list, p->err);
  const bool one_alone = !exclusive && any->key[0] == 'o';
  *count = 0;
  if (!rest || !list) return NULL;
  for (const mm_value *v = any->first; v; v = v->next) {
    const mm_value *one = exclusive ? alone(p, any, v) : v, *both = one ? mm_schema_with(p, rest, one) : NULL;
    if (both)
      list[(*count)++] = both;
    else if (one_alone ? !mm_schema_leave_out_one(p) : !mm_schema_forget_none(p))
      return NULL;
  }
  return *count ? list : (mm_schema_none(p, "anyOf, oneOf, if: no alternative is left"), NULL);
}

/* ---- unevaluatedProperties and unevaluatedItems ---- */

/* The keywords of a schema without alternatives, by the names that do not depend on other keywords. */
static const mm_value *finish_one(mm_schema_compiler *p, const mm_value *schema) {
  const mm_value *items = mm_value_get(schema, "items");
  mm_schema_made out;
  if (!mm_schema_spend(p, schema->count) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out)) return NULL;
  for (const mm_value *m = schema->first; m; m = m->next) {
    const char *key = NULL;
    if (mm_value_key_is(m, "unevaluatedProperties")) {
      if (mm_value_get(schema, "additionalProperties")) continue;
      key = "additionalProperties";
    }
    if (mm_value_key_is(m, "unevaluatedItems")) {
      const bool first = items && items->type == MM_VALUE_ARRAY;
      if (items && (!first || mm_value_get(schema, "additionalItems"))) continue;
      if (!mm_schema_is_true(m) && mm_value_get(schema, "contains"))
        return mm_schema_unserved(p, m->key, " with contains in a schema that holds together with others"), NULL;
      key = first ? "additionalItems" : "items";
    }
    if (!mm_schema_put(p, &out, m, key)) return NULL;
  }
  return out.value;
}

const mm_value *mm_schema_finish(mm_schema_compiler *p, const mm_value *schema) {
  mm_schema_made list;
  size_t count;
  if (!mm_value_get(schema, "unevaluatedProperties") && !mm_value_get(schema, "unevaluatedItems")) return schema;
  if (p->merge_depth == MM_SCHEMA_DEPTH)
    return mm_schema_too_many(p, "schemas within each other", MM_SCHEMA_DEPTH + 1, MM_SCHEMA_DEPTH), NULL;
  if (!(schema = mm_schema_resolve(p, schema))) return NULL;
  const mm_value *any = mm_value_get(schema, "anyOf");
  if (!any) any = mm_value_get(schema, "oneOf");
  if (!any) return finish_one(p, schema);
  p->merge_depth++;
  const mm_value **all = mm_schema_alternatives(p, schema, any, any->key[0] == 'o', &count);
  bool ok = all && mm_schema_begin(p, MM_VALUE_ARRAY, &list);
  for (size_t i = 0; ok && i < count; i++) {
    const mm_value *one = mm_schema_finish(p, all[i]);
    ok = one ? mm_schema_put(p, &list, one, "") != NULL : mm_schema_forget_none(p);
  }
  p->merge_depth--;
  return ok ? mm_schema_of(p, "anyOf", list.value) : NULL;
}
