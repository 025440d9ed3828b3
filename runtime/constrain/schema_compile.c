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

bool mm_schema_none(mm_schema_compiler *p, const char *what) {
  if (p->err->status == MM_OK) p->none = true;
  return mm_fail(p->err, MM_BAD_INPUT, "E_SCHEMA", mm_at(p->where, NULL), "%s: no value fits", what);
}

bool mm_schema_leave_out(mm_schema_compiler *p) { return !p->narrowed && mm_schema_forget_none(p); }

bool mm_schema_leave_out_one(mm_schema_compiler *p) {
  if (!p->none || !p->narrowed) return mm_schema_forget_none(p);
  mm_schema_forget_none(p);
  p->overlap = true;
  return mm_schema_unserved(p, "oneOf", " with an alternative whose values are not all known");
}

bool mm_schema_forget_none(mm_schema_compiler *p) {
  if (!p->none) return false;
  *p->err = (mm_err){0};
  p->fault.property = (mm_str){0};
  p->none = false;
  p->partial |= p->narrowed;
  return true;
}

bool mm_schema_unserved(mm_schema_compiler *p, const char *keyword, const char *reason) {
  return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "\"%s\" is not served%s", keyword, reason);
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

bool mm_schema_is_partial(const mm_schema_compiler *p, const mm_form *s) {
  for (size_t i = 0; i < p->count; i++)
    if (p->done[i].form == s) return p->done[i].partial;
  return false;
}

/* ---- Keywords ---- */

const mm_schema_keyword mm_schema_keywords[] = {
    {"type",
     "one type, or a list of them. Without it, values are of the type that `properties`, `items` or the first other keyword of one type is "
     "for, and of the other types where none of that type fits"},
    {"enum",
     "up to 4,096 values, up to 32 of them objects and 32 lists. Next to other keywords than `type`, the values that fit these; no objects "
     "and lists then"},
    {"const", "one of these"},
    {"properties", "generated in their order"},
    {"required", "a key that `properties` lacks holds what `additionalProperties` says, or anything"},
    {"additionalProperties",
     "a schema: next to `properties` further keys stand behind them. `true`: none do. Without `properties`: of all keys"},
    {"unevaluatedProperties", "as `additionalProperties`, behind all that other keywords of its schema declare"},
    {"patternProperties",
     "without `propertyNames`. Narrowed: all keys of an object without `properties` match the same pattern and no other one; next to "
     "`properties` further keys fit `additionalProperties`, or, where that is no schema, match the first pattern alone, without a number "
     "of properties"},
    {"propertyNames", "a schema of strings; next to `properties` one that all strings fit"},
    {"minProperties", "without `properties`: 1 at most. With `properties`: up to 254 of them, and no schema in `additionalProperties`"},
    {"maxProperties", "the same, and any number without `properties`"},
    {"items", "a schema, `false`, or a list, which is read as `prefixItems`"},
    {"prefixItems", "the first items; `items` is for those behind them"},
    {"additionalItems", "behind a list of `items`"},
    {"unevaluatedItems",
     "as `items`, behind all items that other keywords of its schema are for; with `contains` not in a schema of `allOf`"},
    {"contains", "narrowed: the items that fit stand behind those of `prefixItems`, before all others"},
    {"minContains", ""},
    {"maxContains", "narrowed: the list has no more items"},
    {"minItems", ""},
    {"maxItems", ""},
    {"uniqueItems",
     "`true`: items of `enum`, `const` and `boolean`, up to 256 values, narrowed to one order, that of their texts; first items that "
     "differ; at most one item; `false`"},
    {"minLength", "characters"},
    {"maxLength", "characters"},
    {"pattern", "see below"},
    {"format", "`date`, `date-time`, `time`, `uuid`, `email`, `ipv4`; others say nothing about the text"},
    {"minimum", "numbers that need not be whole have 15 digits then, and no exponent"},
    {"maximum", "as `minimum`"},
    {"exclusiveMinimum", "as `minimum`; a number"},
    {"exclusiveMaximum", "as `minimum`; a number"},
    {"multipleOf",
     "a whole number; for `number` also halves, quarters and so on, as 0.5 or 1.25; for `integer` 1 / n too, as 0.01; two that hold "
     "together are whole"},
    {"anyOf", "up to 32 alternatives that begin alike; keywords next to it hold for each of them"},
    {"oneOf", "as `anyOf`. Alternatives that name no types, or have values in common, are each read with `not` of the others"},
    {"not",
     "of `type`, `enum`, `const`, `properties`, `required`, `items`, `prefixItems`, `contains`, `pattern`, the bounds, the keywords of "
     "alternatives and `$ref`. Narrowed: no value breaks other keywords alone, or is a number other than several, an object or list other "
     "than given ones, or a number that is not whole because of `integer`"},
    {"dependentRequired", "alternatives with and without each key: up to 32"},
    {"dependentSchemas", "the same"},
    {"if", "an alternative with `then`, and one with `not` of it and `else`"},
    {"then", ""},
    {"else", ""},
    {"allOf",
     "schemas that can be read as one. Narrowed: a key that matches a pattern of one of them fits `additionalProperties` of the others"},
    {"$ref",
     "within the schema: a JSON pointer (RFC 6901), an `$anchor`, an `$id`; keywords next to it hold too, unless `$schema` names draft 7 "
     "or an older one"},
    {"$dynamicRef", "the same; leads to the outermost `$dynamicAnchor` of the schemas with an `$id` that lead to it. Not next to `$ref`"},
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
                                             "$vocabulary",
                                             NULL};

static bool listed(const char *const *list, const mm_value *member) {
  while (*list && !mm_value_key_is(member, *list)) list++;
  return *list;
}

bool mm_schema_is_annotation(const mm_value *member) {
  const bool extension = member->key_n > 2 && memcmp(member->key, "x-", 2) == 0; /* OpenAPI's */
  return extension || listed(mm_schema_annotations, member);
}

bool mm_schema_alone(mm_schema_compiler *p, const mm_value *schema, const char *keyword, const char *with) {
  char key[96];
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (mm_schema_is_annotation(v) || mm_value_key_is(v, keyword) || (with && mm_value_key_is(v, with))) continue;
    return mm_schema_unserved(p, mm_value_key_shown(v, key), MM_FORMATTED(64, " with %s", keyword));
  }
  return true;
}

static bool known_keywords(mm_schema_compiler *p, const mm_value *schema) {
  char key[96];
  for (const mm_value *v = schema->first; v; v = v->next) {
    const mm_schema_keyword *k = mm_schema_keywords;
    while (k->name && !mm_value_key_is(v, k->name)) k++;
    if (!k->name && !mm_schema_is_annotation(v) && v->key != mm_schema_no_match && v->key != mm_schema_no_text)
      return mm_schema_unserved(p, mm_value_key_shown(v, key), "");
    if (mm_value_key_is(v, "$dynamicRef")) return mm_schema_unserved(p, v->key, " there"); /* copies have none */
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
  const double x = first == MM_FIRST_NUMBER ? mm_value_real(v) : 0;
  return firsts & MM_SCHEMA_ANY_NUMBER || (isfinite(x) && floor(x) == x);
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
  return mm_schema_none(p, "enum: found no value of the type");
}

/* Sets *out: the form lets the value, no list, object or number, through. */
static bool lets_through(mm_schema_compiler *p, const mm_form *form, const mm_value *v, bool *out) {
  mm_grammar g = {0};
  mm_text t = {0};
  if (v->type == MM_VALUE_STRING)
    mm_text_quote(&t, v->text, v->n);
  else
    mm_text_add(&t, v->raw, v->raw_n);
  if (t.failed) return mm_fail_memory(p->err, v->n);
  size_t i = 0;
  mm_grammar_start(&g, form);
  while (i < t.n && mm_grammar_step(&g, (uint8_t)t.p[i])) i++;
  *out = i == t.n && (v->type == MM_VALUE_STRING || mm_grammar_accepts(&g));
  free(t.p);
  return true;
}

/* The text may fit the pattern, which does not generate it: it has control characters, or others beyond ASCII. */
static bool is_beyond(const mm_value *v, const mm_value *pattern) {
  if (v->type != MM_VALUE_STRING || !pattern || pattern->type != MM_VALUE_STRING) return false;
  const bool escapes = mm_schema_has_escapes(pattern->text, pattern->n);
  for (size_t i = 0; i < v->n; i++)
    if ((uint8_t)v->text[i] < ' ' || (escapes && (uint8_t)v->text[i] >= 0x80)) return true;
  return false;
}

static bool is_values(const mm_value *m) { return mm_value_key_is(m, "enum") || mm_value_key_is(m, "const"); }

/* The value is of every list of the schema, and every const. */
static bool is_listed(mm_schema_compiler *p, const mm_value *schema, const mm_value *v) {
  for (const mm_value *m = schema->first; m; m = m->next) {
    const bool list = m->key[0] == 'e' && m->type == MM_VALUE_ARRAY;
    if (is_values(m) && !mm_schema_in_list(p, v, m, list)) return false;
  }
  return true;
}

/* The values of enum or const that the other keywords of the schema let through. */
static bool compile_some_values(mm_schema_compiler *p, const mm_value *schema, const mm_value *values, mm_form *out) {
  static const mm_value words[] = {{.type = MM_VALUE_STRING, .text = "null", .n = 4},
                                   {.type = MM_VALUE_STRING, .text = "boolean", .n = 7},
                                   {.type = MM_VALUE_STRING, .text = "number", .n = 6},
                                   {.type = MM_VALUE_STRING, .text = "string", .n = 6}};
  const bool list = mm_value_key_is(values, "enum");
  const mm_value *rest = mm_schema_without(p, schema, values), *first = list ? values->first : values;
  const mm_value *others = rest ? mm_value_get(rest, "enum") : NULL;
  const mm_form *form;
  mm_schema_made types, typed, some;
  if ((list && values->type != MM_VALUE_ARRAY) || (others && others->type != MM_VALUE_ARRAY))
    return mm_schema_wrong(p, "enum: expected a list of values");
  if (!rest || !mm_schema_begin(p, MM_VALUE_ARRAY, &types) || !mm_schema_begin(p, MM_VALUE_OBJECT, &typed) ||
      !mm_schema_begin(p, MM_VALUE_ARRAY, &some) ||
      !mm_schema_spend(p, (list ? values->count : 1) * (uint64_t)(others ? others->count : 1)))
    return false;
  for (const mm_value *v = first; v; v = list ? v->next : NULL) {
    if (v->type >= MM_VALUE_ARRAY) return mm_schema_alone(p, schema, values->key, "type");
    if (!mm_schema_is_json(p, v)) return false;
    if (types.value->count < 64 && !mm_schema_put(p, &types, &words[v->type], "")) return false;
  }
  for (const mm_value *m = rest->first; m; m = m->next)
    if (!is_values(m) && !mm_schema_put(p, &typed, m, NULL)) return false;
  if (!mm_value_get(rest, "type") && !mm_schema_put(p, &typed, types.value, "type")) return false;
  if (!mm_schema_compile_value(p, typed.value, &form)) return false;
  const unsigned firsts = firsts_of(p, mm_value_get(rest, "type"));
  bool known = true, beyond = false;
  for (const mm_value *v = first; v; v = list ? v->next : NULL) {
    bool fits = false;
    if (!is_listed(p, rest, v)) {
      if (p->err->status != MM_OK) return false;
      continue;
    }
    beyond |= is_beyond(v, mm_value_get(rest, "pattern"));
    const int number = v->type == MM_VALUE_NUMBER && is_of(v, firsts) ? mm_schema_number_fits(rest, v) : 0;
    fits = number > 0;
    if (v->type != MM_VALUE_NUMBER && !lets_through(p, form, v, &fits)) return false;
    if (fits && !mm_schema_put(p, &some, v, "")) return false;
    known &= number >= 0;
  }
  if (!some.value->count && !known) return mm_schema_unserved(p, values->key, " of such values next to other keywords");
  if (!some.value->count && beyond) p->narrowed = true, p->fault.beyond = values->key;
  return some.value->count ? compile_enum(p, some.value, NULL, out)
                           : mm_schema_none(p, "enum, const: found no value of what else the schema says");
}

/* ---- Types ---- */

static bool compile_type(mm_schema_compiler *p, const mm_value *schema, const mm_value *type, mm_form *out) {
  if (mm_value_is(type, "object")) return mm_schema_compile_object(p, schema, out);
  if (mm_value_is(type, "array")) return mm_schema_compile_array(p, schema, out);
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
  bool any = false;
  *out = (mm_form){.kind = MM_FORM_CHOICE};
  for (const mm_value *v = types->first; v; v = v->next) {
    mm_form *s = mm_arena_alloc(p->arena, sizeof *s, p->err);
    if (!s) return false;
    if (!compile_type(p, schema, v, s)) {
      if (!mm_schema_forget_none(p)) return false;
      continue;
    }
    p->keyword = "type";
    if (!mm_schema_add(p, &b, s)) return false;
    any = true;
  }
  mm_schema_end_choice(&b);
  if (!types->count) return mm_schema_wrong(p, "type: found an empty list");
  return any || mm_schema_none(p, "type: found no value of the types");
}

/* ---- Alternatives ---- */

/* True if a keyword that restricts values stands next to the alternatives, other than `type`. */
static bool has_others(const mm_value *schema, const mm_value *any) {
  for (const mm_value *v = schema->first; v; v = v->next)
    if (v != any && !mm_schema_is_annotation(v) && !mm_value_key_is(v, "type")) return true;
  return false;
}

/* The alternatives by themselves: the schema says nothing else but `type`. *fits: all are of the type. */
static bool compile_alone(mm_schema_compiler *p, const mm_value *any, unsigned firsts, mm_form *out, bool *fits) {
  const mm_value **list = mm_arena_alloc(p->arena, any->count * sizeof *list, p->err);
  size_t count = 0;
  if (!list) return false;
  for (const mm_value *v = any->first; v; v = v->next) list[count++] = v;
  if (!mm_schema_any_of(p, list, count, any->key, out)) return false;
  *fits = mm_schema_choice_is_of(out, firsts);
  return true;
}

/* Other keywords hold for each alternative. Of oneOf where a value may fit several, each alternative is read without the others. */
static bool compile_alternatives(mm_schema_compiler *p, const mm_value *schema, const mm_value *any, const mm_value *type, mm_form *out) {
  const bool one = any->key[0] == 'o';
  if (any->type != MM_VALUE_ARRAY || !any->count)
    return mm_schema_wrong(p, one ? "oneOf: expected a list of schemas" : "anyOf: expected a list of schemas");
  const unsigned firsts = firsts_of(p, type);
  if (!firsts) return false;
  size_t count;
  bool fits = false, ok = false;
  p->overlap = false;
  if (!has_others(schema, any)) ok = compile_alone(p, any, firsts, out, &fits);
  if (ok && fits) return true;
  if (p->err->status == MM_OK) {
    const mm_value **list = mm_schema_alternatives(p, schema, any, false, &count);
    *out = (mm_form){0};
    if (list && mm_schema_any_of(p, list, count, any->key, out)) return true;
  }
  if (!one || !p->overlap || p->err->status != MM_UNSUPPORTED) return false;
  const mm_err reason = *p->err;
  const mm_str property = p->fault.property;
  *p->err = (mm_err){0};
  p->fault.property = (mm_str){0};
  *out = (mm_form){0};
  const mm_value **list = mm_schema_alternatives(p, schema, any, true, &count);
  ok = list && mm_schema_any_of(p, list, count, "anyOf", out);
  if (!ok && (p->err->status == MM_UNSUPPORTED || (p->none && p->narrowed))) {
    *p->err = reason;
    p->fault.property = property;
    p->none = false;
  }
  return ok;
}

/* ---- A schema ---- */

/* The type that the first keyword is for which restricts values of one type alone; NULL: no keyword does. */
static const mm_value *kind_of(const mm_value *schema) {
  static const mm_value kinds[] = {{.type = MM_VALUE_STRING, .text = "object", .n = 6},
                                   {.type = MM_VALUE_STRING, .text = "array", .n = 5},
                                   {.type = MM_VALUE_STRING, .text = "string", .n = 6},
                                   {.type = MM_VALUE_STRING, .text = "number", .n = 6}};
  if (mm_value_get(schema, "properties")) return &kinds[0];
  if (mm_value_get(schema, "items") || mm_value_get(schema, "prefixItems")) return &kinds[1];
  static const char *const keywords[][9] = {
      {"required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
       NULL},
      {"additionalItems", "minItems", "maxItems", "contains", "unevaluatedItems", "uniqueItems", NULL},
      {"minLength", "maxLength", "pattern", NULL},
      {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", NULL}};
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (mm_value_key_is(v, "format") && mm_schema_follows_format(v)) return &kinds[2];
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
      if (listed(keywords[i], v)) return &kinds[i];
  }
  return NULL;
}

/* Values of the type that the keywords are for; where none fits, those of the other types. */
static bool compile_untyped(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *kind = kind_of(schema);
  if (!kind) return *out = mm_schema_any_value, true;
  if (compile_types(p, schema, kind, out)) return true;
  if (!mm_schema_leave_out(p)) return false;
  const mm_value *type = mm_schema_of(p, "type", kind), *others = type ? mm_schema_negate(p, type) : NULL;
  return others && compile_types(p, schema, mm_value_get(others, "type"), out);
}

static bool compile_keywords(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *any, *values = NULL;
  if (!(schema = mm_schema_resolve(p, schema))) return false;
  const mm_value *type = mm_value_get(schema, "type");
  if (!(any = mm_value_get(schema, "anyOf"))) any = mm_value_get(schema, "oneOf");
  if (any) return compile_alternatives(p, schema, any, type, out);
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (mm_value_key_is(v, "not")) {
      const mm_value *rest = mm_schema_apply_not(p, schema, v);
      return rest && compile_keywords(p, rest, out);
    }
    if (mm_value_key_is(v, "const") || (mm_value_key_is(v, "enum") && !values)) values = v;
  }
  if (!values) return type ? compile_types(p, schema, type, out) : compile_untyped(p, schema, out);
  p->keyword = values->key;
  if (has_others(schema, values)) return compile_some_values(p, schema, values, out);
  if (mm_value_key_is(values, "enum")) return compile_enum(p, values, type, out);
  const unsigned firsts = firsts_of(p, type);
  return firsts && mm_schema_is_json(p, values) && (is_of(values, firsts) || mm_schema_none(p, "const: not of the type")) &&
         compile_values(p, values, 1, firsts, out);
}

static bool compile_new(mm_schema_compiler *p, const mm_value *schema, const mm_form **out) {
  mm_form *s = mm_arena_alloc(p->arena, sizeof *s, p->err);
  if (!s || !MM_GROW(p->done, &p->cap, p->count + 1, p->err)) return false;
  p->done[p->count++] = (mm_schema_compiled){.schema = schema, .form = s, .open = true};
  const size_t place = p->count - 1;
  *out = s;
  if (p->count > MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", p->count, MM_SCHEMAS_MAX);
  if (++p->compiled > MM_SCHEMAS_TRIED) return mm_schema_too_many(p, "schemas in one", p->compiled, MM_SCHEMAS_TRIED);
  if (p->depth == MM_SCHEMA_DEPTH) return mm_schema_too_many(p, "schemas within each other", MM_SCHEMA_DEPTH + 1, MM_SCHEMA_DEPTH);
  const bool narrowed = p->narrowed, partial = p->partial;
  const char *beyond = p->fault.beyond;
  p->narrowed = p->partial = false;
  p->depth++;
  const bool ok = known_keywords(p, schema) && compile_keywords(p, schema, s);
  p->depth--;
  p->done[place].partial = p->partial || p->narrowed;
  p->partial = partial;
  p->narrowed = narrowed | (!ok && p->narrowed);
  if (ok) p->fault.beyond = beyond;
  p->done[place].open = false;
  p->done[place].none = !ok;
  p->done[place].narrowed = !ok && p->narrowed;
  if (!ok) p->count = place + p->none; /* others lead to this one */
  return ok;
}

bool mm_schema_compile_value(mm_schema_compiler *p, const mm_value *schema, const mm_form **out) {
  schema = mm_schema_plain(p, schema);
  if (!schema) return p->err->status == MM_OK && mm_schema_wrong(p, "$ref: leads to no schema of this document");
  if (mm_schema_is_true(schema)) return *out = &mm_schema_any_value, true;
  if (mm_schema_is_false(schema)) return mm_schema_none(p, "found the schema false");
  if (schema->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "found something else than an object as a schema");
  for (size_t i = 0; i < p->count; i++) {
    if (p->done[i].schema != schema) continue;
    p->narrowed |= p->done[i].narrowed;
    if (p->done[i].none) return mm_schema_none(p, "found a schema that contradicts itself");
    return *out = p->done[i].form, true;
  }
  return compile_new(p, schema, out);
}

const mm_form *mm_schema_compile_within(mm_arena *a, const mm_value *schema, const char *where, mm_automaton_budget *budget, mm_err *err) {
  mm_schema_compiler p = {.arena = a, .root = schema, .budget = budget, .where = where, .keyword = "anyOf", .err = err};
  const mm_form *s = NULL;
  bool ok = mm_schema_find_references(&p);
  if (ok && p.dynamic) ok = (schema = mm_schema_copy_of(&p, schema, NULL));
  ok = ok && mm_schema_compile_value(&p, schema, &s);
  if (!ok && p.none && p.narrowed) {
    *err = (mm_err){0};
    if (p.fault.beyond)
      mm_schema_unserved(&p, p.fault.beyond, " where no value is left that is served");
    else
      mm_schema_unserved(&p, "not", " where no value is left that is served; `if` and `oneOf` need it too");
  }
  if (!ok) mm_schema_own_keyword(p.root, err);
  if (!ok && p.fault.property.p) mm_schema_name_property(p.fault.property, err);
  MM_FREE(p.done, p.merged, p.place, p.reference, p.part);
  return ok ? s : NULL;
}

const mm_form *mm_schema_compile(mm_arena *a, const mm_value *schema, const char *where, mm_err *err) {
  mm_automaton_budget budget = MM_AUTOMATON_BUDGET;
  return mm_schema_compile_within(a, schema, where, &budget, err);
}
