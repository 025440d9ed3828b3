/* The compiler of schemas: every subschema is compiled once, so that a $ref may lead back to what holds it. */
#include "runtime/constrain/schema.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"

#define SCHEMAS_MAX 4096
#define DEPTH_MAX   24
#define COPIES_MAX  ((size_t)4 * MM_LITERALS) /* values of enum that alternatives copy from each other */

typedef struct compiled {
  const mm_value *schema;
  mm_form *form;
  bool open; /* what it holds is being compiled */
} compiled;

typedef struct compiler {
  mm_arena *arena;
  const mm_value *root;
  compiled *done; /* [count] */
  size_t count, cap;
  size_t values; /* of enum and const */
  size_t copied; /* of them, to unite alternatives */
  unsigned depth;
  const char *where, *keyword; /* of the schema, for messages; the one whose values or alternatives are compiled */
  mm_err *err;
} compiler;

static const mm_form any_value; /* below */
static const mm_form any_string = {.kind = MM_FORM_STRING, .most = UINT32_MAX}, any_number = {.kind = MM_FORM_NUMBER},
                     any_integer = {.kind = MM_FORM_INTEGER}, any_array = {.kind = MM_FORM_ARRAY, .item = &any_value, .most = UINT32_MAX},
                     any_object = {.kind = MM_FORM_MAP, .item = &any_value, .most = UINT32_MAX};
static mm_literal true_text = {.p = "true", .n = 4}, false_text = {.p = "false", .n = 5}, null_text = {.p = "null", .n = 4};
static const mm_form just_true = {.kind = MM_FORM_LITERALS, .literal = &true_text, .count = 1},
                     just_false = {.kind = MM_FORM_LITERALS, .literal = &false_text, .count = 1},
                     just_null = {.kind = MM_FORM_LITERALS, .literal = &null_text, .count = 1};
static const mm_form any_value = {.kind = MM_FORM_CHOICE,
                                  .by_first = {&any_object, &any_array, &any_string, &any_number, &just_true, &just_false, &just_null}};

const mm_form *mm_schema_any_object(void) { return &any_object; }

static bool wrong(compiler *p, const char *what) { return mm_fail(p->err, MM_BAD_INPUT, "E_SCHEMA", mm_at(p->where, NULL), "%s", what); }

static bool unserved(compiler *p, const char *keyword, const char *why) {
  return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "\"%.80s\" is not served%s", keyword, why);
}

/* ---- Choices ---- */

int mm_schema_first(char c) {
  static const char first[] = "{[\"-tfn";
  const char *p = c >= '0' && c <= '9' ? first + MM_FIRST_NUMBER : strchr(first, c);
  return (int)(p - first);
}

/* A choice while alternatives are added to it. */
typedef struct builder {
  mm_form *choice;
  mm_form *own[MM_FIRSTS]; /* literals that are this choice's alone, or NULL */
  uint32_t room[MM_FIRSTS];
} builder;

static bool too_many(compiler *p, const char *what, size_t found, size_t most) {
  return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "found %zu %s, expected at most %zu", found, what, most);
}

/* Literals of this choice alone that begin so, with room for `more`. Room grows twofold, so that all literals are copied once or twice. */
static mm_form *own_literals(compiler *p, builder *b, int first, uint32_t more) {
  const mm_form *now = b->choice->by_first[first];
  const uint32_t count = now ? now->count : 0;
  mm_form *s = b->own[first];
  if (count + more > MM_LITERALS) return too_many(p, "values in one choice", count + more, MM_LITERALS), NULL;
  if (!s) p->copied += count;
  if (now && (p->copied += more) > COPIES_MAX)
    return too_many(p, "values of enum in alternatives of alternatives", p->copied, COPIES_MAX), NULL;
  if (s && b->room[first] - count >= more) return s;
  const uint32_t room = now ? 2 * (count + more) : more;
  mm_literal *l = mm_arena_alloc(p->arena, room * sizeof *l, p->err);
  if (!s) s = mm_arena_alloc(p->arena, sizeof *s, p->err);
  if (!s || !l) return NULL;
  if (now) memcpy(l, now->literal, count * sizeof *l);
  *s = (mm_form){.kind = MM_FORM_LITERALS, .literal = l, .count = count};
  b->room[first] = room;
  b->choice->by_first[first] = s;
  return b->own[first] = s;
}

/* Two forms that begin alike as one. */
static bool unite(compiler *p, builder *b, int first, const mm_form *more) {
  const mm_form *now = b->choice->by_first[first];
  if (now == more) return true;
  const bool whole = now->kind == MM_FORM_INTEGER || more->kind == MM_FORM_INTEGER;
  if (whole && (now->kind == MM_FORM_NUMBER || more->kind == MM_FORM_NUMBER)) return b->choice->by_first[first] = &any_number, true;
  if (now->kind != MM_FORM_LITERALS || more->kind != MM_FORM_LITERALS) return unserved(p, p->keyword, ": two alternatives begin alike");
  mm_form *s = own_literals(p, b, first, more->count);
  if (!s) return false;
  memcpy(s->literal + s->count, more->literal, more->count * sizeof *s->literal);
  s->count += more->count;
  return true;
}

static bool add_first(compiler *p, builder *b, int first, const mm_form *s) {
  if (b->choice->by_first[first]) return unite(p, b, first, s);
  b->choice->by_first[first] = s;
  return true;
}

static bool add_to_choice(compiler *p, builder *b, const mm_form *s) {
  bool ok = true;
  switch (s->kind) {
    case MM_FORM_CHOICE:
      for (int i = 0; i < MM_FIRSTS; i++) ok = ok && (!s->by_first[i] || add_first(p, b, i, s->by_first[i]));
      return ok;
    case MM_FORM_OBJECT:
    case MM_FORM_MAP: return add_first(p, b, MM_FIRST_OBJECT, s);
    case MM_FORM_ARRAY: return add_first(p, b, MM_FIRST_ARRAY, s);
    case MM_FORM_STRING: return add_first(p, b, MM_FIRST_STRING, s);
    case MM_FORM_NUMBER:
    case MM_FORM_INTEGER: return add_first(p, b, MM_FIRST_NUMBER, s);
    case MM_FORM_LITERALS: return add_first(p, b, mm_schema_first(s->literal[0].p[0]), s);
    default: return false;
  }
  return false;
}

/* The choice is complete. */
static void end_choice(builder *b) {
  for (int i = 0; i < MM_FIRSTS; i++)
    if (b->own[i]) mm_literals_sort(b->own[i]);
}

/* ---- Keywords ---- */

static bool compile(compiler *p, const mm_value *schema, const mm_form **out);
static const mm_value *follow(compiler *p, const mm_value *schema);

/* A string of JSON that spells a tag of M2's calls, which a parameter of these could not hold: with each "<" as an escape. */
static bool escape_tags(compiler *p, mm_literal *l) {
  if (!mm_spells_tag(l->p, l->n)) return true;
  mm_text t = {0};
  for (size_t i = 0; i < l->n; i++) mm_text_add(&t, l->p[i] == '<' ? "\\u003c" : &l->p[i], l->p[i] == '<' ? 6 : 1);
  l->p = t.failed ? NULL : mm_arena_strndup(p->arena, t.p, t.n, p->err);
  l->n = t.n;
  free(t.p);
  return l->p && (l->n <= UINT16_MAX || too_many(p, "bytes of a value or key", l->n, UINT16_MAX));
}

/* A literal for the value, where own_literals has made room. */
static bool add_literal(compiler *p, builder *b, const mm_value *v) {
  if (v->raw_n > UINT16_MAX)
    return mm_fail(p->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(p->where, NULL), "found a value of enum with %zu bytes, expected at most %d",
                   v->raw_n, UINT16_MAX);
  mm_form *s = b->own[mm_schema_first(v->raw[0])];
  s->literal[s->count] = (mm_literal){.p = v->raw, .n = v->raw_n};
  return escape_tags(p, &s->literal[s->count++]);
}

static bool is_open(const compiler *p, const mm_form *s) {
  for (size_t i = 0; i < p->count; i++)
    if (p->done[i].form == s) return p->done[i].open;
  return false;
}

/* ---- Alternatives of which one alone may hold ---- */

/* How values of a form begin, a bit for each. */
static unsigned beginnings(const mm_form *s) {
  unsigned all = 0;
  switch (s->kind) {
    case MM_FORM_CHOICE:
      for (int i = 0; i < MM_FIRSTS; i++) all |= s->by_first[i] ? 1u << i : 0;
      return all;
    case MM_FORM_OBJECT:
    case MM_FORM_MAP: return 1u << MM_FIRST_OBJECT;
    case MM_FORM_ARRAY: return 1u << MM_FIRST_ARRAY;
    case MM_FORM_STRING: return 1u << MM_FIRST_STRING;
    case MM_FORM_LITERALS: return 1u << mm_schema_first(s->literal[0].p[0]);
    default: return 1u << MM_FIRST_NUMBER;
  }
}

/* True if the schema names the types of its values. Values of other types may fit a schema without types, though none is generated. */
static bool names_types(compiler *p, const mm_value *schema, unsigned depth) {
  const mm_value *v = follow(p, schema);
  if (!v || v->type != MM_VALUE_OBJECT || depth == DEPTH_MAX) return false;
  for (const mm_value *m = v->first; m; m = m->next)
    if (strcmp(m->key, "type") == 0 || strcmp(m->key, "enum") == 0 || strcmp(m->key, "const") == 0) return true;
  const mm_value *list = mm_value_get(v, "anyOf");
  if (!list) list = mm_value_get(v, "oneOf");
  if (!list) return false;
  for (const mm_value *m = list->first; m; m = m->next)
    if (!names_types(p, m, depth + 1)) return false;
  return true;
}

/* A value of enum or const, of one of the alternatives. */
typedef struct owned {
  const mm_value *value;
  double number;
  size_t owner;
} owned;

static int compare_owned(const void *a, const void *b) {
  const owned *x = a, *y = b;
  if (x->value->type == MM_VALUE_NUMBER) return (x->number > y->number) - (x->number < y->number);
  const int order = memcmp(x->value->text, y->value->text, mm_min(x->value->n, y->value->n));
  return order ? order : (x->value->n > y->value->n) - (x->value->n < y->value->n);
}

/* The literals of a form that begin so; NULL: it has others. */
static const mm_form *literals_of(const mm_form *s, int first) {
  if (s->kind == MM_FORM_CHOICE) s = s->by_first[first];
  return s && s->kind == MM_FORM_LITERALS ? s : NULL;
}

/* No value is in the literals of two alternatives. Numbers are compared as doubles: some that differ count as equal. */
static bool values_differ(compiler *p, const mm_form *const *all, size_t count, int first) {
  size_t n = 0, most = 0;
  for (size_t i = 0; i < count; i++)
    if (beginnings(all[i]) & 1u << first) most += literals_of(all[i], first)->count;
  owned *v = mm_arena_alloc(p->arena, most * sizeof *v, p->err);
  if (!v) return false;
  for (size_t i = 0; i < count; i++) {
    const mm_form *s = beginnings(all[i]) & 1u << first ? literals_of(all[i], first) : NULL;
    for (uint32_t k = 0; s && k < s->count; k++) {
      const mm_value *value = mm_body_parse(p->arena, s->literal[k].p, s->literal[k].n, p->err);
      if (!value) return false;
      v[n++] = (owned){value, value->type == MM_VALUE_NUMBER ? mm_value_real(value) : 0, i};
    }
  }
  qsort(v, n, sizeof *v, compare_owned);
  for (size_t i = 1; i < n; i++)
    if (v[i - 1].owner != v[i].owner && compare_owned(&v[i - 1], &v[i]) == 0)
      return unserved(p, "oneOf", ": two alternatives have a value in common");
  return true;
}

/* No value fits two of the alternatives, all[i] of list[i]. */
static bool distinct(compiler *p, const mm_value *list, const mm_form *const *all) {
  unsigned seen = 0, twice = 0;
  size_t i = 0;
  if (list->count == 1) return true;
  for (const mm_value *v = list->first; v; v = v->next, i++) {
    if (!names_types(p, v, 0)) return p->err->status == MM_OK && unserved(p, "oneOf", " with an alternative that names no type");
    const unsigned now = beginnings(all[i]);
    twice |= seen & now;
    seen |= now;
  }
  for (int first = 0; first < MM_FIRSTS; first++) {
    if (!(twice & 1u << first)) continue;
    const bool values = first == MM_FIRST_STRING || first == MM_FIRST_NUMBER;
    for (i = 0; i < list->count; i++)
      if (beginnings(all[i]) & 1u << first && (!values || !literals_of(all[i], first)))
        return unserved(p, "oneOf", ": two alternatives begin alike");
    if (!values_differ(p, all, list->count, first)) return false;
  }
  return true;
}

static bool compile_any(compiler *p, const mm_value *list, const char *keyword, mm_form *out) {
  const bool one = keyword[0] == 'o';
  if (list->type != MM_VALUE_ARRAY || !list->count)
    return wrong(p, one ? "oneOf: expected a list of schemas" : "anyOf: expected a list of schemas");
  const mm_form **all = mm_arena_alloc(p->arena, list->count * sizeof *all, p->err);
  builder b = {.choice = out};
  size_t count = 0;
  if (!all) return false;
  out->kind = MM_FORM_CHOICE;
  for (const mm_value *v = list->first; v; v = v->next) {
    const mm_form *s;
    if (!compile(p, v, &s)) return false;
    if (s->kind == MM_FORM_CHOICE && is_open(p, s)) return unserved(p, "$ref", " from an alternative to what holds it");
    all[count++] = s;
  }
  if (one && !distinct(p, list, all)) return false;
  for (size_t i = 0; i < count; i++) {
    p->keyword = keyword;
    if (!add_to_choice(p, &b, all[i])) return false;
  }
  end_choice(&b);
  return true;
}

/* ---- Types together with values and alternatives ---- */

#define ANY_NUMBER (1u << MM_FIRSTS) /* and not integers alone */

/* How values of the types may begin, a bit for each; 0 after an error. No types: all. */
static unsigned firsts_of(compiler *p, const mm_value *types) {
  static const struct {
    const char *word;
    unsigned firsts;
  } known[] = {{"object", 1u << MM_FIRST_OBJECT},
               {"array", 1u << MM_FIRST_ARRAY},
               {"string", 1u << MM_FIRST_STRING},
               {"integer", 1u << MM_FIRST_NUMBER},
               {"number", 1u << MM_FIRST_NUMBER | ANY_NUMBER},
               {"boolean", 1u << MM_FIRST_TRUE | 1u << MM_FIRST_FALSE},
               {"null", 1u << MM_FIRST_NULL}};
  if (!types) return ~0u;
  unsigned all = 0;
  for (const mm_value *v = types->type == MM_VALUE_ARRAY ? types->first : types; v; v = types->type == MM_VALUE_ARRAY ? v->next : NULL) {
    unsigned firsts = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
      if (mm_value_is(v, known[i].word)) firsts = known[i].firsts;
    if (!firsts) wrong(p, "type: found one that JSON does not have");
    if (!firsts) return 0;
    all |= firsts;
  }
  if (!all) wrong(p, "type: found an empty list");
  return all;
}

/* The reader of bodies takes NaN and Infinity, which an answer may not hold. */
static bool is_json(compiler *p, const mm_value *v) {
  const char last = v->raw[v->raw_n - 1];
  return v->type != MM_VALUE_NUMBER || (last >= '0' && last <= '9') ||
         wrong(p,
               p->keyword[0] == 'e' ? "enum: NaN and Infinity are not values of JSON" : "const: NaN and Infinity are not values of JSON");
}

/* The value, one of JSON, is of one of these types. */
static bool is_of(const mm_value *v, unsigned firsts) {
  const int first = mm_schema_first(v->raw[0]);
  if (!(firsts & 1u << first)) return false;
  return first != MM_FIRST_NUMBER || firsts & ANY_NUMBER || floor(mm_value_real(v)) == mm_value_real(v);
}

/* Every alternative is of one of the types. */
static bool choice_is_of(const mm_form *choice, unsigned firsts) {
  for (int i = 0; i < MM_FIRSTS; i++) {
    const mm_form *s = choice->by_first[i];
    if (s && (!(firsts & 1u << i) || (i == MM_FIRST_NUMBER && !(firsts & ANY_NUMBER) && s->kind != MM_FORM_INTEGER))) return false;
  }
  return true;
}

static bool count_of(compiler *p, const mm_value *schema, const char *key, uint32_t *out) {
  int64_t n;
  const mm_value *v = mm_value_get(schema, key);
  if (!v) return true;
  if (!mm_value_int(v, &n) || n < 0 || n >= UINT32_MAX)
    return mm_fail(p->err, MM_BAD_INPUT, "E_SCHEMA", mm_at(p->where, NULL), "%s: expected a whole number below %u", key, UINT32_MAX);
  *out = (uint32_t)n;
  return true;
}

static bool is_required(const mm_value *required, const mm_value *property) {
  for (const mm_value *v = required && required->type == MM_VALUE_ARRAY ? required->first : NULL; v; v = v->next)
    if (v->type == MM_VALUE_STRING && v->n == property->key_n && memcmp(v->text, property->key, v->n) == 0) return true;
  return false;
}

/* The key with its quotes, in JSON. */
static bool quote_key(compiler *p, const mm_value *property, mm_literal *out) {
  mm_text t = {0};
  mm_text_quote(&t, property->key, property->key_n);
  if (!t.failed && t.n <= UINT16_MAX) {
    out->p = mm_arena_strndup(p->arena, t.p, t.n, p->err);
    out->n = t.n;
  }
  free(t.p);
  return out->p ? escape_tags(p, out) : unserved(p, "properties", " with keys so long");
}

static bool compile_object(compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *properties = mm_value_get(schema, "properties"), *more = mm_value_get(schema, "additionalProperties"),
                 *required = mm_value_get(schema, "required");
  const size_t count = properties ? properties->count : 0;
  if (properties && properties->type != MM_VALUE_OBJECT) return wrong(p, "properties: expected an object");
  *out = (mm_form){.kind = count ? MM_FORM_OBJECT : MM_FORM_MAP, .item = &any_value, .most = UINT32_MAX};
  if (!count && more && more->type == MM_VALUE_BOOL && !more->truth) out->most = 0;
  if (!count && more && more->type == MM_VALUE_OBJECT && !compile(p, more, &out->item)) return false;
  if (!count) return !required || !required->count || unserved(p, "required", " without properties");
  if (more && more->type == MM_VALUE_OBJECT) return unserved(p, "additionalProperties", " with a schema beside properties");
  if (count > SCHEMAS_MAX) return unserved(p, "properties", ", so many of them");
  if (!(out->literal = mm_arena_alloc(p->arena, count * sizeof *out->literal, p->err))) return false;
  for (const mm_value *v = properties->first; v; v = v->next) {
    mm_literal *l = &out->literal[out->count++];
    if (!quote_key(p, v, l) || !compile(p, v, &l->value)) return false;
    l->required = is_required(required, v);
  }
  uint16_t *order = mm_arena_alloc(p->arena, count * sizeof *order, p->err);
  if (!order) return false;
  mm_literals_order(out, order);
  for (const mm_value *v = required && required->type == MM_VALUE_ARRAY ? required->first : NULL; v; v = v->next)
    if (v->type == MM_VALUE_STRING && !mm_value_get(properties, v->text)) return unserved(p, "required", " of a key that properties lacks");
  return true;
}

static bool compile_array(compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *items = mm_value_get(schema, "items");
  *out = (mm_form){.kind = MM_FORM_ARRAY, .item = &any_value, .most = UINT32_MAX};
  if (items && items->type == MM_VALUE_ARRAY) return unserved(p, "items", " as a list");
  if (items && !compile(p, items, &out->item)) return false;
  return count_of(p, schema, "minItems", &out->least) && count_of(p, schema, "maxItems", &out->most) &&
         (out->least <= out->most || wrong(p, "minItems: more than maxItems"));
}

static bool compile_type(compiler *p, const mm_value *schema, const mm_value *type, mm_form *out) {
  if (mm_value_is(type, "object")) return compile_object(p, schema, out);
  if (mm_value_is(type, "array")) return compile_array(p, schema, out);
  if (mm_value_is(type, "string")) {
    *out = any_string;
    return count_of(p, schema, "minLength", &out->least) && count_of(p, schema, "maxLength", &out->most) &&
           (out->least <= out->most || wrong(p, "minLength: more than maxLength"));
  }
  if (mm_value_is(type, "number")) return *out = any_number, true;
  if (mm_value_is(type, "integer")) return *out = any_integer, true;
  if (mm_value_is(type, "null")) return *out = just_null, true;
  if (!mm_value_is(type, "boolean")) return wrong(p, "type: found one that JSON does not have");
  *out = (mm_form){.kind = MM_FORM_CHOICE, .by_first = {[MM_FIRST_TRUE] = &just_true, [MM_FIRST_FALSE] = &just_false}};
  return true;
}

static bool compile_types(compiler *p, const mm_value *schema, const mm_value *types, mm_form *out) {
  if (types->type != MM_VALUE_ARRAY) return compile_type(p, schema, types, out);
  builder b = {.choice = out};
  *out = (mm_form){.kind = MM_FORM_CHOICE};
  p->keyword = "type";
  for (const mm_value *v = types->first; v; v = v->next) {
    mm_form *s = mm_arena_alloc(p->arena, sizeof *s, p->err);
    if (!s || !compile_type(p, schema, v, s)) return false;
    p->keyword = "type";
    if (!add_to_choice(p, &b, s)) return false;
  }
  end_choice(&b);
  return types->count || wrong(p, "type: found an empty list");
}

/* Compiles the values of the given types among the `most` values from `first` on: counts them, then stores them. */
static bool compile_values(compiler *p, const mm_value *first, size_t most, unsigned firsts, mm_form *out) {
  builder b = {.choice = out};
  uint32_t count[MM_FIRSTS] = {0};
  size_t i = 0;
  if ((p->values += most) > MM_LITERALS) return too_many(p, "values of enum and const in the schema", p->values, MM_LITERALS);
  out->kind = MM_FORM_CHOICE;
  for (const mm_value *v = first; i < most; v = v->next, i++) {
    if (!is_json(p, v)) return false;
    if (!is_of(v, firsts)) continue;
    if (v->type == MM_VALUE_OBJECT || v->type == MM_VALUE_ARRAY) return unserved(p, p->keyword, " with objects or lists");
    count[mm_schema_first(v->raw[0])]++;
  }
  for (int k = 0; k < MM_FIRSTS; k++)
    if (count[k] && !own_literals(p, &b, k, count[k])) return false;
  i = 0;
  for (const mm_value *v = first; i < most; v = v->next, i++)
    if (is_of(v, firsts) && !add_literal(p, &b, v)) return false;
  end_choice(&b);
  return true;
}

static bool compile_enum(compiler *p, const mm_value *list, const mm_value *types, mm_form *out) {
  const unsigned firsts = firsts_of(p, types);
  p->keyword = "enum";
  if (!firsts) return false;
  if (list->type != MM_VALUE_ARRAY || !list->count) return wrong(p, "enum: expected a list of values");
  if (list->count > SCHEMAS_MAX) return too_many(p, "values in an enum", list->count, SCHEMAS_MAX);
  if (!compile_values(p, list->first, list->count, firsts, out)) return false;
  for (int i = 0; i < MM_FIRSTS; i++)
    if (out->by_first[i]) return true;
  return wrong(p, "enum: found no value of the type");
}

/* ---- Keywords that may stand together ---- */

static bool listed(const char *const *list, const char *key) {
  while (*list && strcmp(*list, key) != 0) list++;
  return *list;
}

/* Annotations: keywords that do not restrict the values. */
static bool is_annotation(const char *key) {
  static const char *const list[] = {"$defs",       "definitions", "$schema", "$id",      "$comment", "title",
                                     "description", "default",     "example", "examples", "format",   "deprecated",
                                     "readOnly",    "writeOnly",   "strict",  "nullable", NULL};
  return listed(list, key);
}

/* $id makes a document of its own of a schema, in which $ref has another meaning. */
static bool no_document(compiler *p, const mm_value *schema) {
  return schema == p->root || !mm_value_get(schema, "$id") || unserved(p, "$id", " below the whole schema");
}

/* True if only annotations and the keywords of `with` stand next to the deciding keyword, so that no keyword is ignored. */
static bool alone(compiler *p, const mm_value *schema, const char *keyword, const char *with) {
  char why[64];
  if (!no_document(p, schema)) return false;
  for (const mm_value *v = schema->first; v; v = v->next) {
    if (is_annotation(v->key) || strcmp(v->key, keyword) == 0 || (with && strcmp(v->key, with) == 0)) continue;
    snprintf(why, sizeof why, " beside %s", keyword);
    return unserved(p, v->key, why);
  }
  return true;
}

/* ---- References ---- */

/* A schema is what a $ref leads to, as long as it is nothing but that. */
static const mm_value *follow(compiler *p, const mm_value *schema) {
  for (int i = 0; i < 32 && schema; i++) {
    const mm_value *reference = mm_value_get(schema, "$ref"), *all = mm_value_get(schema, "allOf");
    const bool one = all && all->type == MM_VALUE_ARRAY && all->count == 1;
    if (!reference && !one) return schema;
    if (!alone(p, schema, reference ? "$ref" : "allOf", NULL)) return NULL;
    schema = reference ? mm_value_follow(p->root, reference) : all->first;
  }
  return NULL;
}

/* ---- A schema ---- */

static bool known_keywords(compiler *p, const mm_value *schema) {
  static const char *const known[] = {
      "type",  "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minLength", "maxLength", "enum", "const",
      "anyOf", "oneOf",      NULL};
  for (const mm_value *v = schema->first; v; v = v->next)
    if (!is_annotation(v->key) && !listed(known, v->key)) return unserved(p, v->key, "");
  const mm_value *required = mm_value_get(schema, "required");
  if (!no_document(p, schema)) return false;
  return !required || required->type == MM_VALUE_ARRAY || wrong(p, "required: expected a list of keys");
}

/* One of these decides what a value may be. Other keywords next to it either restrict values of other types only, or are refused. */
static bool compile_keywords(compiler *p, const mm_value *schema, mm_form *out) {
  const mm_value *any = mm_value_get(schema, "anyOf"), *type = mm_value_get(schema, "type"), *list = mm_value_get(schema, "enum"),
                 *one = NULL;
  const char *which = any ? "anyOf" : "oneOf";
  for (const mm_value *v = schema->first; v; v = v->next)
    if (strcmp(v->key, "const") == 0) one = v;
  if (!any) any = mm_value_get(schema, "oneOf");
  if (one) {
    const unsigned firsts = firsts_of(p, type);
    p->keyword = "const";
    return firsts && alone(p, schema, "const", "type") && is_json(p, one) && (is_of(one, firsts) || wrong(p, "const: not of the type")) &&
           compile_values(p, one, 1, firsts, out);
  }
  if (list) return alone(p, schema, "enum", "type") && compile_enum(p, list, type, out);
  if (any) {
    const unsigned firsts = firsts_of(p, type);
    return firsts && alone(p, schema, which, "type") && compile_any(p, any, which, out) &&
           (choice_is_of(out, firsts) || unserved(p, which, " with alternatives that are not of the type"));
  }
  if (type) return compile_types(p, schema, type, out);
  if (mm_value_get(schema, "properties")) return compile_object(p, schema, out);
  if (mm_value_get(schema, "items")) return compile_array(p, schema, out);
  *out = any_value;
  for (const mm_value *v = schema->first; v; v = v->next)
    if (!is_annotation(v->key)) return unserved(p, v->key, " without a type");
  return true;
}

static bool compile_new(compiler *p, const mm_value *schema, const mm_form **out) {
  mm_form *s = mm_arena_alloc(p->arena, sizeof *s, p->err);
  if (!s || !MM_GROW(p->done, &p->cap, p->count + 1, p->err)) return false;
  p->done[p->count++] = (compiled){schema, s, true};
  const size_t place = p->count - 1;
  *out = s;
  if (p->count > SCHEMAS_MAX) return too_many(p, "schemas in one", p->count, SCHEMAS_MAX);
  if (p->depth == DEPTH_MAX) return too_many(p, "schemas within each other", DEPTH_MAX + 1, DEPTH_MAX);
  p->depth++;
  const bool ok = known_keywords(p, schema) && compile_keywords(p, schema, s);
  p->depth--;
  p->done[place].open = false;
  return ok;
}

static bool compile(compiler *p, const mm_value *schema, const mm_form **out) {
  if (schema->type == MM_VALUE_OBJECT) schema = follow(p, schema);
  if (!schema) return p->err->status == MM_OK && wrong(p, "$ref: leads to no schema of this document");
  if (schema->type == MM_VALUE_BOOL && schema->truth) return *out = &any_value, true;
  if (schema->type == MM_VALUE_BOOL) return wrong(p, "found the schema false, which no value fits");
  if (schema->type != MM_VALUE_OBJECT) return wrong(p, "found something else than an object as a schema");
  for (size_t i = 0; i < p->count; i++)
    if (p->done[i].schema == schema) return *out = p->done[i].form, true;
  return compile_new(p, schema, out);
}

const mm_form *mm_schema_compile(mm_arena *a, const mm_value *schema, const char *where, mm_err *err) {
  compiler p = {.arena = a, .root = schema, .where = where, .keyword = "anyOf", .err = err};
  const mm_form *s = NULL;
  const bool ok = compile(&p, schema, &s);
  free(p.done);
  return ok ? s : NULL;
}
