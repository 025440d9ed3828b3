/* The compiler of schemas: every subschema is compiled once, so that a $ref may lead back to what holds it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"
#include "runtime/constrain/schema_inside.h"

const mm_form mm_schema_any_string = {.kind = MM_FORM_STRING, .most = UINT32_MAX};
static const mm_form any_number = {.kind = MM_FORM_NUMBER},
                     any_array = {.kind = MM_FORM_ARRAY, .item = &mm_schema_any_value, .most = UINT32_MAX},
                     any_object = {.kind = MM_FORM_MAP, .item = &mm_schema_any_value, .most = UINT32_MAX};
static mm_literal true_text = {.p = "true", .n = 4}, false_text = {.p = "false", .n = 5}, null_text = {.p = "null", .n = 4};
static const mm_form just_true = {.kind = MM_FORM_LITERALS, .literal = &true_text, .count = 1},
                     just_false = {.kind = MM_FORM_LITERALS, .literal = &false_text, .count = 1},
                     just_null = {.kind = MM_FORM_LITERALS, .literal = &null_text, .count = 1};
const mm_form mm_schema_any_value = {
    .kind = MM_FORM_CHOICE, .by_first = {&any_object, &any_array, &mm_schema_any_string, &any_number, &just_true, &just_false, &just_null}};

const mm_form *mm_schema_any_object(void) { return &any_object; }

bool mm_schema_wrong(mm_schema_compiler *p, const char *what) {
  return mm_fail(p->err, MM_BAD_INPUT, "E_SCHEMA", mm_at(p->where, NULL), "%s", what);
}

bool mm_schema_unserved(mm_schema_compiler *p, const char *keyword, const char *why) {
  return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "\"%.80s\" is not served%s", keyword, why);
}

bool mm_schema_too_many(mm_schema_compiler *p, const char *what, size_t found, size_t most) {
  return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "found %zu %s, expected at most %zu", found, what, most);
}

bool mm_schema_count(mm_schema_compiler *p, const mm_value *schema, const char *key, uint32_t *out) {
  int64_t n;
  const mm_value *v = mm_value_get(schema, key);
  if (!v) return true;
  if (!mm_value_int(v, &n) || n < 0 || n >= UINT32_MAX)
    return mm_fail(p->err, MM_BAD_INPUT, "E_SCHEMA", mm_at(p->where, NULL), "%s: expected a whole number below %u", key, UINT32_MAX);
  *out = (uint32_t)n;
  return true;
}

bool mm_schema_is_open(const mm_schema_compiler *p, const mm_form *s) {
  for (size_t i = 0; i < p->count; i++)
    if (p->done[i].form == s) return p->done[i].open;
  return false;
}

/* ---- Keywords ---- */

const mm_schema_keyword mm_schema_keywords[] = {
    {"type",
     "one type, or a list of them. Without it, values are of the type that `properties`, `items` or the first other keyword of one type is "
     "for"},
    {"enum", "up to 4,096 values, up to 32 of them objects and 32 lists; `type` alone may stand next to it"},
    {"const", "one of these; `type` alone may stand next to it"},
    {"properties", "generated in their order"},
    {"required", "a key that `properties` lacks holds what `additionalProperties` says, or anything"},
    {"additionalProperties",
     "a schema: next to `properties` further keys stand behind them. `true`: none do. Without `properties`: of all keys"},
    {"unevaluatedProperties", "as `additionalProperties`, not in a schema of `allOf`"},
    {"patternProperties", "one pattern, without `properties` and `propertyNames`: all keys match it"},
    {"propertyNames", "without `properties`; a schema of strings"},
    {"minProperties", "without `properties`: 1 at most. With `properties`: up to 254 of them, and no schema in `additionalProperties`"},
    {"maxProperties", "the same, and any number without `properties`"},
    {"items", "a schema, `false`, or a list, which is read as `prefixItems`"},
    {"prefixItems", "the first items; `items` is for those behind them"},
    {"additionalItems", "behind a list of `items`"},
    {"unevaluatedItems", "as `items`, not in a schema of `allOf` and not with `contains`"},
    {"contains", "narrowed: the items that fit stand behind those of `prefixItems`, before all others"},
    {"minContains", ""},
    {"maxContains", "narrowed: the list has no more items"},
    {"minItems", ""},
    {"maxItems", ""},
    {"uniqueItems", "`false`"},
    {"minLength", "characters"},
    {"maxLength", "characters"},
    {"pattern", "see below"},
    {"format", "`date`, `date-time`, `time`, `uuid`, `email`, `ipv4`; others say nothing about the text"},
    {"minimum", "numbers that need not be whole have 15 digits then, and no exponent"},
    {"maximum", "as `minimum`"},
    {"exclusiveMinimum", "as `minimum`; a number"},
    {"exclusiveMaximum", "as `minimum`; a number"},
    {"multipleOf", "a whole number; for `number` also halves, quarters and so on, as 0.5 or 1.25"},
    {"anyOf", "up to 32 alternatives that begin alike; keywords next to it hold for each of them"},
    {"oneOf",
     "as `anyOf`, of alternatives that name their types and have no value in common: values of `enum`, or objects that differ in a "
     "required key"},
    {"not", "a schema of `type` alone; `false`"},
    {"dependentRequired", "alternatives with and without each key: up to 32"},
    {"dependentSchemas", "the same"},
    {"if", "without `then` and `else`, which say nothing without it"},
    {"then", ""},
    {"else", ""},
    {"allOf", "schemas that can be read as one"},
    {"$ref", "within the schema: a JSON pointer (RFC 6901), an `$anchor`, an `$id`; keywords next to it hold too"},
    {NULL, NULL},
};

const char *const mm_schema_annotations[] = {"$defs",
                                             "definitions",
                                             "$schema",
                                             "$id",
                                             "$comment",
                                             "title",
                                             "description",
                                             "default",
                                             "example",
                                             "examples",
                                             "deprecated",
                                             "readOnly",
                                             "writeOnly",
                                             "strict",
                                             "nullable",
                                             "discriminator",
                                             "contentMediaType",
                                             "contentEncoding",
                                             "contentSchema",
                                             "$anchor",
                                             "$dynamicAnchor",
                                             NULL};

static bool listed(const char *const *list, const char *key) {
  while (*list && strcmp(*list, key) != 0) list++;
  return *list;
}

bool mm_schema_is_annotation(const char *key) { return listed(mm_schema_annotations, key); }

bool mm_schema_alone(mm_schema_compiler *p, const mm_value *schema, const char *keyword, const char *with) {
  char why[64];
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (mm_schema_is_annotation(v->key) || strcmp(v->key, keyword) == 0 || (with && strcmp(v->key, with) == 0)) continue;
    snprintf(why, sizeof why, " with %s", keyword);
    return mm_schema_unserved(p, v->key, why);
  }
  return true;
}

static bool is_false(const mm_value *v) { return v && v->type == MM_VALUE_BOOL && !v->truth; }

static bool known_keywords(mm_schema_compiler *p, const mm_value *schema) {
  for (const mm_value *v = schema->first; v; v = v->next) {
    const mm_schema_keyword *k = mm_schema_keywords;
    while (k->name && strcmp(k->name, v->key) != 0) k++;
    if (!k->name && !mm_schema_is_annotation(v->key)) return mm_schema_unserved(p, v->key, "");
    if (strcmp(v->key, "uniqueItems") == 0 && !is_false(v)) return mm_schema_unserved(p, v->key, "");
    if (strcmp(v->key, "if") == 0 && (mm_value_get(schema, "then") || mm_value_get(schema, "else")))
      return mm_schema_unserved(p, v->key, " with then or else");
  }
  const mm_value *required = mm_value_get(schema, "required");
  return !required || required->type == MM_VALUE_ARRAY || mm_schema_wrong(p, "required: expected a list of keys");
}

/* ---- Values of enum and const ---- */

bool mm_schema_escape_tags(mm_schema_compiler *p, mm_literal *l) {
  if (!mm_spells_tag(l->p, l->n)) return true;
  mm_text t = {0};
  for (size_t i = 0; i < l->n; i++) mm_text_add(&t, l->p[i] == '<' ? "\\u003c" : &l->p[i], l->p[i] == '<' ? 6 : 1);
  l->p = t.failed ? NULL : mm_arena_strndup(p->arena, t.p, t.n, p->err);
  l->n = t.n;
  free(t.p);
  return l->p && (l->n <= UINT16_MAX || mm_schema_too_many(p, "bytes of a value or key", l->n, UINT16_MAX));
}

/* A literal for the value, where own_literals has made room. */
static bool add_literal(mm_schema_compiler *p, mm_schema_choice *b, const mm_value *v) {
  if (v->raw_n > UINT16_MAX)
    return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "found a value of enum with %zu bytes, expected at most %d",
                   v->raw_n, UINT16_MAX);
  mm_form *s = b->own[mm_schema_first(v->raw[0])];
  s->literal[s->count] = (mm_literal){.p = v->raw, .n = v->raw_n};
  return mm_schema_escape_tags(p, &s->literal[s->count++]);
}

/* ---- Types together with values ---- */

/* How values of the types may begin, a bit for each; 0 after an error. No types: all. */
static unsigned firsts_of(mm_schema_compiler *p, const mm_value *types) {
  static const struct {
    const char *word;
    unsigned firsts;
  } known[] = {{"object", 1u << MM_FIRST_OBJECT},
               {"array", 1u << MM_FIRST_ARRAY},
               {"string", 1u << MM_FIRST_STRING},
               {"integer", 1u << MM_FIRST_NUMBER},
               {"number", 1u << MM_FIRST_NUMBER | MM_SCHEMA_ANY_NUMBER},
               {"boolean", 1u << MM_FIRST_TRUE | 1u << MM_FIRST_FALSE},
               {"null", 1u << MM_FIRST_NULL}};
  if (!types) return ~0u;
  unsigned all = 0;
  for (const mm_value *v = types->type == MM_VALUE_ARRAY ? types->first : types; v; v = types->type == MM_VALUE_ARRAY ? v->next : NULL) {
    unsigned firsts = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
      if (mm_value_is(v, known[i].word)) firsts = known[i].firsts;
    if (!firsts) mm_schema_wrong(p, "type: found one that JSON does not have");
    if (!firsts) return 0;
    all |= firsts;
  }
  if (!all) mm_schema_wrong(p, "type: found an empty list");
  return all;
}

bool mm_schema_is_json(mm_schema_compiler *p, const mm_value *v) {
  const char last = v->raw[v->raw_n - 1];
  return v->type != MM_VALUE_NUMBER || (last >= '0' && last <= '9') ||
         mm_schema_wrong(
             p, p->keyword[0] == 'e' ? "enum: NaN and Infinity are not values of JSON" : "const: NaN and Infinity are not values of JSON");
}

/* The value, one of JSON, is of one of these types. */
static bool is_of(const mm_value *v, unsigned firsts) {
  const int first = mm_schema_first(v->raw[0]);
  if (!(firsts & 1u << first)) return false;
  return first != MM_FIRST_NUMBER || firsts & MM_SCHEMA_ANY_NUMBER || floor(mm_value_real(v)) == mm_value_real(v);
}

/* Compiles the values of the given types among the `most` values from `first` on: counts them, then stores them. */
static bool compile_values(mm_schema_compiler *p, const mm_value *first, size_t most, unsigned firsts, mm_form *out) {
  mm_schema_choice b = {.form = out};
  uint32_t count[MM_FIRSTS] = {0};
  size_t i = 0;
  if ((p->values += most) > MM_LITERALS) return mm_schema_too_many(p, "values of enum and const in the schema", p->values, MM_LITERALS);
  out->kind = MM_FORM_CHOICE;
  for (const mm_value *v = first; i < most; v = v->next, i++) {
    if (!mm_schema_is_json(p, v)) return false;
    if (!is_of(v, firsts)) continue;
    if (v->type != MM_VALUE_OBJECT && v->type != MM_VALUE_ARRAY) {
      count[mm_schema_first(v->raw[0])]++;
      continue;
    }
    const mm_form *exact = mm_schema_exact(p, v, 0);
    if (!exact || !mm_schema_add(p, &b, exact)) return false;
  }
  for (int k = 0; k < MM_FIRSTS; k++)
    if (count[k] && !mm_schema_own_literals(p, &b, k, count[k])) return false;
  i = 0;
  for (const mm_value *v = first; i < most; v = v->next, i++)
    if (is_of(v, firsts) && v->type != MM_VALUE_OBJECT && v->type != MM_VALUE_ARRAY && !add_literal(p, &b, v)) return false;
  mm_schema_end_choice(&b);
  return true;
}

static bool compile_enum(mm_schema_compiler *p, const mm_value *list, const mm_value *types, mm_form *out) {
  const unsigned firsts = firsts_of(p, types);
  p->keyword = "enum";
  if (!firsts) return false;
  if (list->type != MM_VALUE_ARRAY || !list->count) return mm_schema_wrong(p, "enum: expected a list of values");
  if (list->count > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "values in an enum", list->count, MM_SCHEMAS_MAX);
  if (!compile_values(p, list->first, list->count, firsts, out)) return false;
  for (int i = 0; i < MM_FIRSTS; i++)
    if (out->by_first[i]) return true;
  return mm_schema_wrong(p, "enum: found no value of the type");
}

/* ---- Objects ---- */

static bool is_required(const mm_value *required, const mm_value *property) {
  for (const mm_value *v = required ? required->first : NULL; v; v = v->next)
    if (v->type == MM_VALUE_STRING && v->n == property->key_n && memcmp(v->text, property->key, v->n) == 0) return true;
  return false;
}

static bool has_property(const mm_value *properties, const mm_value *key) {
  for (const mm_value *v = properties ? properties->first : NULL; v; v = v->next)
    if (v->key_n == key->n && memcmp(v->key, key->text, key->n) == 0) return true;
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

/* An object without properties: any keys, or those of propertyNames or patternProperties. */
static bool compile_map(mm_schema_compiler *p, const mm_value *schema, const mm_value *more, mm_form *out) {
  const mm_value *names = mm_value_get(schema, "propertyNames"), *patterns = mm_value_get(schema, "patternProperties");
  mm_form *key = mm_arena_alloc(p->arena, sizeof *key, p->err);
  *out = (mm_form){.kind = MM_FORM_MAP, .item = &mm_schema_any_value, .most = UINT32_MAX};
  if (!key) return false;
  if (patterns) {
    if (patterns->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "patternProperties: expected an object");
    if (names || patterns->count != 1)
      return mm_schema_unserved(p, "patternProperties", names ? " with propertyNames" : " of another number than one");
    out->key = key;
    if (!mm_schema_pattern(p, "patternProperties", patterns->first->key, patterns->first->key_n, key)) return false;
    if (!mm_schema_compile_value(p, patterns->first, &out->item)) return false;
  } else if (is_false(more)) {
    out->most = 0;
  } else if (more && more->type == MM_VALUE_OBJECT && !mm_schema_compile_value(p, more, &out->item)) {
    return false;
  }
  if (names) {
    if (!mm_schema_compile_value(p, names, &out->key)) return false;
    if (out->key->kind == MM_FORM_CHOICE) out->key = out->key->by_first[MM_FIRST_STRING];
    if (!out->key || mm_schema_first_of(out->key) != MM_FIRST_STRING)
      return mm_schema_wrong(p, "propertyNames: expected a schema of strings");
  }
  uint32_t most = UINT32_MAX;
  if (!mm_schema_count(p, schema, "minProperties", &out->least) || !mm_schema_count(p, schema, "maxProperties", &most)) return false;
  out->most = (uint32_t)mm_min(out->most, most);
  /* Two equal keys are one property. */
  if (out->least > 1) return mm_schema_unserved(p, "minProperties", " above 1 without properties");
  return out->least <= out->most || mm_schema_wrong(p, "minProperties: more than there may be");
}

/* Room for the properties, and for the required keys that properties lacks. */
static bool add_keys(mm_schema_compiler *p, const mm_value *properties, const mm_value *required, const mm_value *more, mm_form *out) {
  const size_t most = (properties ? properties->count : 0) + (required ? required->count : 0);
  if (most > 2 * (size_t)MM_SCHEMAS_MAX) return mm_schema_unserved(p, "properties", ", so many of them");
  if (!(out->literal = mm_arena_alloc(p->arena, most * sizeof *out->literal, p->err))) return false;
  for (const mm_value *v = properties ? properties->first : NULL; v; v = v->next) {
    if (is_false(v) && is_required(required, v)) return mm_schema_wrong(p, "required: a key whose schema is false");
    if (is_false(v)) continue;
    mm_literal *l = &out->literal[out->count++];
    if (!mm_schema_quote_key(p, v->key, v->key_n, l)) return false;
    l->required = is_required(required, v);
  }
  const uint32_t declared = out->count;
  for (const mm_value *v = required ? required->first : NULL; v; v = v->next) {
    mm_literal l = {.required = true};
    bool there = false;
    if (v->type != MM_VALUE_STRING) return mm_schema_wrong(p, "required: expected a list of keys");
    if (has_property(properties, v)) continue;
    if (!mm_schema_quote_key(p, v->text, v->n, &l)) return false;
    for (uint32_t i = declared; i < out->count && !there; i++) there = mm_literal_compare(&out->literal[i], &l) == 0;
    if (there) continue;
    if (is_false(more)) return mm_schema_wrong(p, "required: a key that additionalProperties refuses");
    out->literal[out->count++] = l;
  }
  uint16_t *order = mm_arena_alloc(p->arena, (out->count + 1) * sizeof *order, p->err);
  if (!order) return false;
  mm_literals_order(out, order);
  return true;
}

static bool property_bounds(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  if (!mm_schema_count(p, schema, "minProperties", &out->least) || !mm_schema_count(p, schema, "maxProperties", &out->most)) return false;
  if (!out->least && out->most == UINT32_MAX) return true;
  const char *which = out->least ? "minProperties" : "maxProperties";
  if (out->item) return mm_schema_unserved(p, which, " with properties and additionalProperties");
  if (out->count > UINT8_MAX - 1) return mm_schema_unserved(p, which, " with so many properties");
  if (out->least > out->count || out->least > out->most) return mm_schema_wrong(p, "minProperties: more than there may be");
  return !out->count || out->literal[0].needed <= out->most || mm_schema_wrong(p, "maxProperties: fewer than are required");
}

static bool compile_object(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *properties = mm_value_get(schema, "properties"), *more = mm_value_get(schema, "additionalProperties"),
                 *required = mm_value_get(schema, "required");
  if (!more) more = mm_value_get(schema, "unevaluatedProperties"); /* the schema is one: known_keywords refuses alternatives */
  if (properties && properties->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "properties: expected an object");
  if ((!properties || !properties->count) && (!required || !required->count)) return compile_map(p, schema, more, out);
  *out = (mm_form){.kind = MM_FORM_OBJECT, .most = UINT32_MAX, .closed = is_false(more)};
  if (mm_value_get(schema, "patternProperties")) return mm_schema_unserved(p, "patternProperties", " with properties");
  if (mm_value_get(schema, "propertyNames")) return mm_schema_unserved(p, "propertyNames", " with properties");
  if (!add_keys(p, properties, required, more, out)) return false;
  const bool schema_of_more = more && more->type == MM_VALUE_OBJECT;
  uint32_t i = 0;
  for (const mm_value *v = properties ? properties->first : NULL; v; v = v->next) {
    if (is_false(v) && schema_of_more) return mm_schema_unserved(p, "properties", " with false and a schema of additionalProperties");
    if (!is_false(v) && !mm_schema_compile_value(p, v, &out->literal[i++].value)) return false;
  }
  const mm_form *other = &mm_schema_any_value;
  if (schema_of_more && !mm_schema_compile_value(p, more, &other)) return false;
  for (; i < out->count; i++) out->literal[i].value = other;
  if (schema_of_more && !(out->key = mm_schema_other_keys(p, out))) return false;
  if (schema_of_more) out->item = other;
  return property_bounds(p, schema, out);
}

/* ---- Arrays ---- */

/* The items that `contains` asks for, behind the first ones: a list has no more items than may fit it. */
static bool add_contained(mm_schema_compiler *p, const mm_value *schema, const mm_value *items, uint32_t *count, mm_form *out) {
  const mm_value *contains = mm_value_get(schema, "contains");
  uint32_t least = 1, most = UINT32_MAX;
  if (!contains) return true;
  if (!mm_schema_count(p, schema, "minContains", &least) || !mm_schema_count(p, schema, "maxContains", &most)) return false;
  if (least > most) return mm_schema_wrong(p, "minContains: more than maxContains");
  out->most = (uint32_t)mm_min(out->most, most);
  if (!least) return true;
  if (is_false(items)) return mm_schema_unserved(p, "contains", " where no further items may stand");
  if (*count + least > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", (size_t)*count + least, MM_SCHEMAS_MAX);
  const mm_value *both = items ? mm_schema_all_of(p, items, contains) : contains;
  const mm_form *form;
  mm_literal *l = mm_arena_alloc(p->arena, ((size_t)*count + least) * sizeof *l, p->err);
  if (!both || !l || !mm_schema_compile_value(p, both, &form)) return false;
  if (*count) memcpy(l, out->literal, *count * sizeof *l);
  out->literal = l;
  for (uint32_t i = 0; i < least; i++) l[(*count)++].value = form;
  out->least = *count;
  return *count <= most || mm_schema_unserved(p, "maxContains", " with so many items of prefixItems");
}

/* Items in front of the others. A schema false ends the list. */
static bool add_first_items(mm_schema_compiler *p, const mm_value *first, uint32_t *count, mm_form *out) {
  if (first && first->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "prefixItems: expected a list of schemas");
  if (first && first->count > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", first->count, MM_SCHEMAS_MAX);
  if (first && !(out->literal = mm_arena_alloc(p->arena, (first->count + 1) * sizeof *out->literal, p->err))) return false;
  for (const mm_value *v = first ? first->first : NULL; v; v = v->next) {
    if (is_false(v)) return out->most = *count, true;
    if (!mm_schema_compile_value(p, v, &out->literal[(*count)++].value)) return false;
  }
  return true;
}

static bool compile_array(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *items = mm_value_get(schema, "items"), *first = mm_value_get(schema, "prefixItems");
  *out = (mm_form){.kind = MM_FORM_ARRAY, .item = &mm_schema_any_value, .most = UINT32_MAX};
  if (!first && items && items->type == MM_VALUE_ARRAY) {
    first = items;
    items = mm_value_get(schema, "additionalItems");
  }
  const mm_value *rest = mm_value_get(schema, "unevaluatedItems");
  if (rest && !(rest->type == MM_VALUE_BOOL && rest->truth) && mm_value_get(schema, "contains"))
    return mm_schema_unserved(p, "unevaluatedItems", " with contains");
  if (!items) items = rest;
  uint32_t count = 0, least = 0, most = UINT32_MAX; /* out->count when all are there: the array may be in use before, by none of them */
  if (!add_first_items(p, first, &count, out)) return false;
  if (out->most != UINT32_MAX && mm_value_get(schema, "contains")) return mm_schema_unserved(p, "contains", " with prefixItems that end");
  if (!add_contained(p, schema, items, &count, out)) return false;
  if (items && !is_false(items) && !mm_schema_compile_value(p, items, &out->item)) return false;
  if (!mm_schema_count(p, schema, "minItems", &least) || !mm_schema_count(p, schema, "maxItems", &most)) return false;
  out->count = count;
  out->least = (uint32_t)mm_max(out->least, least);
  out->most = (uint32_t)mm_min(out->most, most);
  if (is_false(items)) out->most = (uint32_t)mm_min(out->most, count);
  return out->least <= out->most || mm_schema_wrong(p, "minItems: more than maxItems");
}

/* ---- Types ---- */

static bool compile_type(mm_schema_compiler *p, const mm_value *schema, const mm_value *type, mm_form *out) {
  if (mm_value_is(type, "object")) return compile_object(p, schema, out);
  if (mm_value_is(type, "array")) return compile_array(p, schema, out);
  if (mm_value_is(type, "string")) return mm_schema_string(p, schema, out);
  if (mm_value_is(type, "number")) return mm_schema_number(p, schema, false, out);
  if (mm_value_is(type, "integer")) return mm_schema_number(p, schema, true, out);
  if (mm_value_is(type, "null")) return *out = just_null, true;
  if (!mm_value_is(type, "boolean")) return mm_schema_wrong(p, "type: found one that JSON does not have");
  *out = (mm_form){.kind = MM_FORM_CHOICE, .by_first = {[MM_FIRST_TRUE] = &just_true, [MM_FIRST_FALSE] = &just_false}};
  return true;
}

static bool compile_types(mm_schema_compiler *p, const mm_value *schema, const mm_value *types, mm_form *out) {
  if (types->type != MM_VALUE_ARRAY) return compile_type(p, schema, types, out);
  mm_schema_choice b = {.form = out};
  *out = (mm_form){.kind = MM_FORM_CHOICE};
  for (const mm_value *v = types->first; v; v = v->next) {
    mm_form *s = mm_arena_alloc(p->arena, sizeof *s, p->err);
    if (!s || !compile_type(p, schema, v, s)) return false;
    p->keyword = "type";
    if (!mm_schema_add(p, &b, s)) return false;
  }
  mm_schema_end_choice(&b);
  return types->count || mm_schema_wrong(p, "type: found an empty list");
}

/* ---- Alternatives ---- */

/* True if a keyword that restricts values stands next to the alternatives, other than `type`. */
static bool has_others(const mm_value *schema, const char *keyword) {
  for (const mm_value *v = schema->first; v; v = v->next)
    if (!mm_schema_is_annotation(v->key) && strcmp(v->key, keyword) != 0 && strcmp(v->key, "type") != 0) return true;
  return false;
}

/* The alternatives, each with what stands next to them. */
static bool compile_alternatives(mm_schema_compiler *p, const mm_value *schema, const mm_value *any, const mm_value *type, mm_form *out) {
  const char *which = any->key;
  if (any->type != MM_VALUE_ARRAY || !any->count)
    return mm_schema_wrong(p, which[0] == 'o' ? "oneOf: expected a list of schemas" : "anyOf: expected a list of schemas");
  const unsigned firsts = firsts_of(p, type);
  const mm_value **list = mm_arena_alloc(p->arena, any->count * sizeof *list, p->err);
  size_t count = 0;
  if (!firsts || !list) return false;
  for (const mm_value *v = any->first; v; v = v->next) list[count++] = v;
  const bool others = has_others(schema, which);
  const mm_value *rest = others ? mm_schema_without(p, schema, which) : NULL;
  if (others && !rest) return false;
  for (size_t i = 0; others && i < count; i++) {
    const mm_value *plain = mm_schema_plain(p, list[i]);
    if (!plain) return p->err->status == MM_OK && mm_schema_wrong(p, "$ref: leads to no schema of this document");
    if (plain->type != MM_VALUE_OBJECT) return mm_schema_unserved(p, which, " as true or false with other keywords");
    if (!(list[i] = mm_schema_both(p, rest, plain))) return false;
  }
  return mm_schema_any_of(p, list, count, which, out) &&
         (others || mm_schema_choice_is_of(out, firsts) || mm_schema_unserved(p, which, " with alternatives that are not of the type"));
}

/* ---- A schema ---- */

/* One of these decides what a value may be. Other keywords next to it either restrict values of other types only, or are refused. */
/* The type that the first keyword is for which restricts values of one type alone; NULL: no keyword does. */
static const mm_value *kind_of(const mm_value *schema) {
  static const mm_value kinds[] = {{.type = MM_VALUE_STRING, .text = "object", .n = 6},
                                   {.type = MM_VALUE_STRING, .text = "array", .n = 5},
                                   {.type = MM_VALUE_STRING, .text = "string", .n = 6},
                                   {.type = MM_VALUE_STRING, .text = "number", .n = 6}};
  static const char *const keywords[][9] = {{"required", "additionalProperties", "unevaluatedProperties", "patternProperties",
                                             "propertyNames", "minProperties", "maxProperties", NULL},
                                            {"additionalItems", "minItems", "maxItems", "contains", "unevaluatedItems", NULL},
                                            {"minLength", "maxLength", "pattern", NULL},
                                            {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", NULL}};
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (strcmp(v->key, "format") == 0 && mm_schema_follows_format(v)) return &kinds[2];
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
      if (listed(keywords[i], v->key)) return &kinds[i];
  }
  return NULL;
}

static bool compile_keywords(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *any = mm_value_get(schema, "anyOf"), *type = mm_value_get(schema, "type"), *list = mm_value_get(schema, "enum"),
                 *one = NULL;
  if (!any) any = mm_value_get(schema, "oneOf");
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (strcmp(v->key, "const") == 0) one = v;
    const bool no = strcmp(v->key, "not") == 0;
    if (!no && (any || (strcmp(v->key, "dependentRequired") != 0 && strcmp(v->key, "dependentSchemas") != 0))) continue;
    const mm_value *rest = no ? mm_schema_apply_not(p, schema, v) : mm_schema_apply_dependent(p, schema, v);
    return rest && compile_keywords(p, rest, out);
  }
  if (any) return compile_alternatives(p, schema, any, type, out);
  if (one) {
    const unsigned firsts = firsts_of(p, type);
    p->keyword = "const";
    return firsts && mm_schema_alone(p, schema, "const", "type") && mm_schema_is_json(p, one) &&
           (is_of(one, firsts) || mm_schema_wrong(p, "const: not of the type")) && compile_values(p, one, 1, firsts, out);
  }
  if (list) return mm_schema_alone(p, schema, "enum", "type") && compile_enum(p, list, type, out);
  if (type) return compile_types(p, schema, type, out);
  if (mm_value_get(schema, "properties")) return compile_object(p, schema, out);
  if (mm_value_get(schema, "items") || mm_value_get(schema, "prefixItems")) return compile_array(p, schema, out);
  const mm_value *kind = kind_of(schema);
  if (kind) return compile_types(p, schema, kind, out);
  *out = mm_schema_any_value;
  return true;
}

static bool compile_new(mm_schema_compiler *p, const mm_value *schema, const mm_form **out) {
  mm_form *s = mm_arena_alloc(p->arena, sizeof *s, p->err);
  if (!s || !MM_GROW(p->done, &p->cap, p->count + 1, p->err)) return false;
  p->done[p->count++] = (mm_schema_compiled){schema, s, true};
  const size_t place = p->count - 1;
  *out = s;
  if (p->count > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", p->count, MM_SCHEMAS_MAX);
  if (p->depth == MM_SCHEMA_DEPTH) return mm_schema_too_many(p, "schemas within each other", MM_SCHEMA_DEPTH + 1, MM_SCHEMA_DEPTH);
  p->depth++;
  const bool ok = known_keywords(p, schema) && compile_keywords(p, schema, s);
  p->depth--;
  p->done[place].open = false;
  return ok;
}

bool mm_schema_compile_value(mm_schema_compiler *p, const mm_value *schema, const mm_form **out) {
  schema = mm_schema_plain(p, schema);
  if (!schema) return p->err->status == MM_OK && mm_schema_wrong(p, "$ref: leads to no schema of this document");
  if (schema->type == MM_VALUE_BOOL && schema->truth) return *out = &mm_schema_any_value, true;
  if (schema->type == MM_VALUE_BOOL) return mm_schema_wrong(p, "found the schema false, which no value fits");
  if (schema->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "found something else than an object as a schema");
  for (size_t i = 0; i < p->count; i++)
    if (p->done[i].schema == schema) return *out = p->done[i].form, true;
  return compile_new(p, schema, out);
}

const mm_form *mm_schema_compile_within(mm_arena *a, const mm_value *schema, const char *where, mm_automaton_budget *budget, mm_err *err) {
  mm_schema_compiler p = {.arena = a, .root = schema, .budget = budget, .where = where, .keyword = "anyOf", .err = err};
  const mm_form *s = NULL;
  const bool ok = mm_schema_find_references(&p) && mm_schema_compile_value(&p, schema, &s);
  MM_FREE(p.done, p.merged, p.place, p.reference);
  return ok ? s : NULL;
}

const mm_form *mm_schema_compile(mm_arena *a, const mm_value *schema, const char *where, mm_err *err) {
  mm_automaton_budget budget = MM_AUTOMATON_BUDGET;
  return mm_schema_compile_within(a, schema, where, &budget, err);
}
