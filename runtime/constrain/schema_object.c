/* Objects of a schema: those whose keys are declared, and those with keys of a pattern or any. */
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"
#include "runtime/constrain/schema_inside.h"

static bool is_required(const mm_value *required, const mm_value *property) {
  for (const mm_value *v = required ? required->first : NULL; v; v = v->next)
    if (v->type == MM_VALUE_STRING && v->n == property->key_n && memcmp(v->text, property->key, v->n) == 0) return true;
  return false;
}

bool mm_schema_quote_key(mm_schema_compiler *p, const char *key, size_t n, mm_literal *out) {
  mm_text t = {0};
  mm_text_quote(&t, key, n);
  if (!t.failed && t.n <= UINT16_MAX) {
    out->p = mm_arena_strndup(p->arena, t.p, t.n, p->err);
    out->n = t.n;
  }
  free(t.p);
  return out->p ? mm_schema_escape_tags(p, out) : mm_schema_unserved(p, "properties", " with keys so long");
}

/* ---- Any keys ---- */

/* Keys that match this pattern and none of the others. Each object has keys of one pattern. */
static bool add_pattern(mm_schema_compiler *p, const mm_value *patterns, const mm_value *one, mm_form *map) {
  const mm_value key = {.type = MM_VALUE_STRING, .text = one->key, .n = one->key_n};
  mm_schema_made conditions;
  mm_form *form = mm_arena_alloc(p->arena, sizeof *form, p->err);
  if (!form || !mm_schema_begin(p, MM_VALUE_OBJECT, &conditions) || !mm_schema_put(p, &conditions, &key, "pattern")) return false;
  for (const mm_value *m = patterns->first; m; m = m->next) {
    const mm_value other = {.type = MM_VALUE_STRING, .text = m->key, .n = m->key_n};
    if (m != one && !mm_schema_put(p, &conditions, &other, mm_schema_no_match)) return false;
  }
  map->key = form;
  return mm_schema_string(p, conditions.value, form) && mm_schema_compile_value(p, one, &map->item);
}

/* Adds a map, if it may have members. */
static bool add_map(mm_schema_compiler *p, mm_schema_choice *b, const mm_form *like, const mm_value *patterns, const mm_value *one,
                    const mm_value *more) {
  mm_form *map = mm_arena_alloc(p->arena, sizeof *map, p->err);
  const mm_form none = {0};
  if (!map) return false;
  *map = *like;
  const bool ok = one ? add_pattern(p, patterns, one, map)
                      : (map->key = mm_schema_other_keys(p, &none, patterns, NULL)) && mm_schema_compile_value(p, more, &map->item);
  if (!ok) return mm_schema_leave_out(p);
  return mm_schema_add(p, b, map);
}

/* Keys of one of the patterns, or of none, each with values of its own. */
static bool compile_patterns(mm_schema_compiler *p, const mm_value *patterns, const mm_value *more, const mm_form *like, mm_form *out) {
  mm_schema_choice b = {.form = out};
  *out = (mm_form){.kind = MM_FORM_CHOICE};
  if (!mm_schema_spend(p, (uint64_t)patterns->count * patterns->count)) return false;
  p->keyword = "patternProperties";
  for (const mm_value *m = patterns->first; m; m = m->next)
    if (!add_map(p, &b, like, patterns, m, NULL)) return false;
  if (more && more->type == MM_VALUE_OBJECT && !add_map(p, &b, like, patterns, NULL, more)) return false;
  mm_schema_end_choice(&b);
  const mm_form *map = out->by_first[MM_FIRST_OBJECT];
  if (map) return map->kind != MM_FORM_MAP || (*out = *map, true);
  *out = *like;
  out->most = 0;
  return !out->least || mm_schema_unserved(p, "minProperties", " where keys match no pattern that is left");
}

/* The schema of the keys, where it says more than that they are strings, as Zod's records do; else NULL. */
static const mm_value *names_of(const mm_value *schema) {
  const mm_value *names = mm_value_get(schema, "propertyNames");
  if (!names || names->type != MM_VALUE_OBJECT) return mm_schema_is_true(names) ? NULL : names;
  for (const mm_value *m = names->first; m; m = m->next)
    if (!mm_schema_is_annotation(m) && !(mm_value_key_is(m, "type") && mm_value_is(m, "string"))) return names;
  return NULL;
}

/* An object without properties: any keys, or those of propertyNames or patternProperties. */
static bool compile_map(mm_schema_compiler *p, const mm_value *schema, const mm_value *more, mm_form *out) {
  const mm_value *names = names_of(schema), *patterns = mm_value_get(schema, "patternProperties");
  *out = (mm_form){.kind = MM_FORM_MAP, .item = &mm_schema_any_value, .most = UINT32_MAX};
  uint32_t most = UINT32_MAX, least = 0;
  if (!mm_schema_count(p, schema, "minProperties", &least) || !mm_schema_count(p, schema, "maxProperties", &most)) return false;
  /* Two equal keys are one property. */
  if (least > 1) return mm_schema_unserved(p, "minProperties", " above 1 without properties");
  if (patterns && patterns->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "patternProperties: expected an object");
  if (patterns && patterns->count) {
    if (names) return mm_schema_unserved(p, "patternProperties", " with propertyNames");
    const mm_form like = {.kind = MM_FORM_MAP, .item = &mm_schema_any_value, .least = least, .most = most};
    return (least <= most || mm_schema_none(p, "minProperties: more than maxProperties")) &&
           compile_patterns(p, patterns, more, &like, out);
  }
  if (more && !mm_schema_compile_value(p, more, &out->item)) {
    if (!mm_schema_leave_out(p)) return false;
    out->most = 0;
  }
  if (names && !mm_schema_compile_value(p, names, &out->key)) {
    if (!mm_schema_leave_out(p)) return false;
    out->most = 0;
    out->key = NULL;
  }
  if (out->key && out->key->kind == MM_FORM_CHOICE) out->key = out->key->by_first[MM_FIRST_STRING];
  if (names && out->most && (!out->key || mm_schema_first_of(out->key) != MM_FIRST_STRING))
    return mm_schema_wrong(p, "propertyNames: expected a schema of strings");
  out->least = least;
  out->most = (uint32_t)mm_min(out->most, most);
  return out->least <= out->most || mm_schema_none(p, "minProperties: more than there may be");
}

/* ---- Declared keys ---- */

/* A declared key, and the schema of its value. */
typedef struct declared {
  const mm_value *schema;
  bool required;
  mm_str key;
} declared;

/* What patternProperties say of the key, and the schema. NULL after an error. */
static const mm_value *with_patterns(mm_schema_compiler *p, const mm_value *patterns, const char *key, size_t n, const mm_value *schema) {
  for (const mm_value *m = patterns ? patterns->first : NULL; m && schema; m = m->next) {
    bool matches;
    if (!mm_schema_key_matches(p, m, key, n, &matches)) return NULL;
    if (matches) schema = mm_schema_all_of(p, schema, m);
  }
  return schema;
}

/* Adds a key that is required and not declared: it holds to the patterns that it matches, or else to additionalProperties. */
static bool add_required(mm_schema_compiler *p, const mm_value *key, const mm_value *patterns, const mm_value *more, declared *d,
                         mm_form *out) {
  mm_literal l = {.required = true};
  if (key->type != MM_VALUE_STRING) return mm_schema_wrong(p, "required: expected a list of keys");
  if (!mm_schema_quote_key(p, key->text, key->n, &l)) return false;
  for (uint32_t i = 0; i < out->count; i++)
    if (mm_literal_compare(&out->literal[i], &l) == 0) return true;
  const mm_value *schema = with_patterns(p, patterns, key->text, key->n, &mm_schema_true);
  if (!schema) return false;
  if (mm_schema_is_true(schema) && more) schema = more;
  if (mm_schema_is_false(schema)) return mm_schema_none(p, "required: a key that additionalProperties refuses");
  d[out->count] = (declared){schema, true, {key->text, key->n}};
  out->literal[out->count++] = l;
  return true;
}

/* The properties, and the required keys that properties lacks. */
static bool add_keys(mm_schema_compiler *p, const mm_value *schema, const mm_value *more, declared **d, mm_form *out) {
  const mm_value *properties = mm_value_get(schema, "properties"), *required = mm_value_get(schema, "required"),
                 *patterns = mm_value_get(schema, "patternProperties");
  const size_t most = (properties ? properties->count : 0) + (required ? required->count : 0);
  if (patterns && patterns->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "patternProperties: expected an object");
  if (most > 2 * (size_t)MM_SCHEMAS_MAX) return mm_schema_unserved(p, "properties", ", so many of them");
  out->literal = mm_arena_alloc(p->arena, most * sizeof *out->literal, p->err);
  *d = mm_arena_alloc(p->arena, most * sizeof **d, p->err);
  if (!out->literal || !*d) return false;
  for (const mm_value *v = properties ? properties->first : NULL; v; v = v->next) {
    mm_literal *l = &out->literal[out->count];
    if (!mm_schema_quote_key(p, v->key, v->key_n, l)) return false;
    l->required = is_required(required, v);
    const mm_value *value = with_patterns(p, patterns, v->key, v->key_n, v);
    if (!value) return false;
    (*d)[out->count++] = (declared){value, l->required, {v->key, v->key_n}};
  }
  for (const mm_value *v = required ? required->first : NULL; v; v = v->next)
    if (!add_required(p, v, patterns, more, *d, out)) return false;
  return true;
}

static bool property_bounds(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  if (!mm_schema_count(p, schema, "minProperties", &out->least) || !mm_schema_count(p, schema, "maxProperties", &out->most)) return false;
  if (!out->least && out->most == UINT32_MAX) return true;
  const char *which = out->least ? "minProperties" : "maxProperties";
  if (out->item) return mm_schema_unserved(p, which, " with properties and additionalProperties");
  if (out->count > UINT8_MAX - 1) return mm_schema_unserved(p, which, " with so many properties");
  if (out->least > out->count && !out->closed) return mm_schema_unserved(p, which, " above the number of properties");
  if (out->least > out->count || out->least > out->most) return mm_schema_none(p, "minProperties: more than there may be");
  return !out->count || out->literal[0].needed <= out->most || mm_schema_none(p, "maxProperties: fewer than are required");
}

/* The values of the keys. A key whose schema no value fits is left out. */
static bool compile_members(mm_schema_compiler *p, const declared *d, mm_form *out) {
  for (uint32_t i = 0; d && i < out->count; i++) {
    mm_literal *l = &out->literal[i];
    if (mm_schema_compile_value(p, d[i].schema, &l->value)) continue;
    l->value = NULL;
    if (!d[i].required && mm_schema_leave_out(p)) continue;
    if (!p->fault.property.p) p->fault.property = d[i].key;
    return false;
  }
  return true;
}

static bool end_keys(mm_schema_compiler *p, mm_form *out) {
  uint16_t *order = mm_arena_alloc(p->arena, (out->count + 1) * sizeof *order, p->err);
  uint32_t n = 0;
  if (!order) return false;
  for (uint32_t i = 0; i < out->count; i++)
    if (out->literal[i].value) out->literal[n++] = out->literal[i];
  out->count = n;
  mm_literals_order(out, order);
  return true;
}

bool mm_schema_compile_object(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *properties = mm_value_get(schema, "properties"), *more = mm_value_get(schema, "additionalProperties"),
                 *required = mm_value_get(schema, "required"), *patterns = mm_value_get(schema, "patternProperties");
  declared *d = NULL;
  if (!more) more = mm_value_get(schema, "unevaluatedProperties"); /* the schema is one: alternatives are chosen before */
  if (properties && properties->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "properties: expected an object");
  if ((!properties || !properties->count) && (!required || !required->count)) return compile_map(p, schema, more, out);
  /* The keys are there while their values are compiled, which may hold the object itself. */
  *out = (mm_form){.kind = MM_FORM_OBJECT, .most = UINT32_MAX, .closed = mm_schema_is_false(more) && !patterns};
  if (names_of(schema)) return mm_schema_unserved(p, "propertyNames", " with properties");
  if (!add_keys(p, schema, more, &d, out) || !compile_members(p, d, out)) return false;
  const mm_form *other = NULL, *key = NULL;
  const mm_value *match = patterns ? patterns->first : NULL, *of = more && more->type == MM_VALUE_OBJECT ? more : match;
  const bool counted = mm_value_get(schema, "minProperties") || mm_value_get(schema, "maxProperties");
  if (of && (of == more || !counted)) {
    const bool ok = mm_schema_compile_value(p, of, &other) && (key = mm_schema_other_keys(p, out, patterns, of == more ? NULL : match));
    if (!ok && !mm_schema_leave_out(p)) return false;
  }
  if (key) {
    out->item = other;
    out->key = key;
  }
  return end_keys(p, out) && property_bounds(p, schema, out);
}
