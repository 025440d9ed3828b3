/* Types of parameters from JSON schemas, and values of parameters from text. */
#include "runtime/chat/arguments.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define SCHEMA_DEPTH 16  /* of references and combinations */
#define SCHEMA_PARTS 256 /* that are looked at for one parameter */

typedef struct mm_tool_schema {
  mm_str name;
  const mm_value *parameters; /* NULL: none */
} mm_tool_schema;

static bool same(mm_str a, const char *b, size_t n) { return a.n == n && memcmp(a.p, b, n) == 0; }

/* ---- Tools ---- */

static bool read_tool(mm_tools *t, size_t place, mm_str json, mm_err *err) {
  char *text = mm_arena_strndup(&t->arena, json.p, json.n, err);
  if (!text) return false;
  const mm_value *v = mm_body_parse(&t->arena, text, json.n, err);
  if (!v) return false;
  const mm_value *function = mm_value_get(v, "function"), *parameters, *name;
  if (!function) function = v;
  name = mm_value_get(function, "name");
  parameters = mm_value_get(function, "parameters");
  if (!name || name->type != MM_VALUE_STRING || !name->n)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "tool %zu: expected a JSON object with a name", place);
  t->tool[t->count++] = (mm_tool_schema){{name->text, name->n}, parameters};
  return true;
}

bool mm_tools_open(mm_tools *t, const mm_chat_tool *tool, size_t count, mm_err *err) {
  *t = (mm_tools){0};
  if (!(t->tool = mm_arena_alloc(&t->arena, (count + 1) * sizeof *t->tool, err))) return false;
  for (size_t i = 0; i < count; i++)
    if (!read_tool(t, i, tool[i].json, err)) return false;
  return true;
}

void mm_tools_close(mm_tools *t) {
  mm_arena_close(&t->arena);
  *t = (mm_tools){0};
}

/* ---- Schemas ---- */

static unsigned type_named(const mm_value *v) {
  static const char *const name[] = {"string", "integer", "number", "boolean", "object", "array", "null"};
  for (unsigned i = 0; i < sizeof name / sizeof *name; i++)
    if (mm_value_is(v, name[i])) return 1u << i;
  return 0;
}

static unsigned type_of(const mm_value *v) {
  static const unsigned type[] = {
      [MM_VALUE_NULL] = MM_TYPE_NULL,     [MM_VALUE_BOOL] = MM_TYPE_BOOLEAN, [MM_VALUE_NUMBER] = MM_TYPE_NUMBER,
      [MM_VALUE_STRING] = MM_TYPE_STRING, [MM_VALUE_ARRAY] = MM_TYPE_ARRAY,  [MM_VALUE_OBJECT] = MM_TYPE_OBJECT};
  return type[v->type];
}

static const mm_value *member(const mm_value *object, const char *key, size_t n) {
  if (!object || object->type != MM_VALUE_OBJECT) return NULL;
  for (const mm_value *v = object->first; v; v = v->next)
    if (v->key_n == n && memcmp(v->key, key, n) == 0) return v;
  return NULL;
}

/* `left`: schemas that may still be looked at; those past it have no type. */
static unsigned types_of(const mm_value *root, const mm_value *schema, unsigned depth, unsigned *left) {
  static const char *const combined[] = {"anyOf", "oneOf", "allOf"};
  if (!schema || schema->type != MM_VALUE_OBJECT || depth == SCHEMA_DEPTH || !*left) return 0;
  --*left;
  const mm_value *type = mm_value_get(schema, "type"), *values = mm_value_get(schema, "enum"), *ref = mm_value_get(schema, "$ref");
  const mm_value *one = member(schema, "const", 5);
  unsigned types = type_named(type);
  if (type && type->type == MM_VALUE_ARRAY)
    for (const mm_value *v = type->first; v; v = v->next) types |= type_named(v);
  if (!types && values && values->type == MM_VALUE_ARRAY)
    for (const mm_value *v = values->first; v; v = v->next) types |= type_of(v);
  if (!types && one) types |= type_of(one);
  if (ref) types |= types_of(root, mm_value_follow(root, ref), depth + 1, left);
  for (size_t i = 0; i < 3; i++) {
    const mm_value *list = mm_value_get(schema, combined[i]);
    if (list && list->type == MM_VALUE_ARRAY)
      for (const mm_value *v = list->first; v; v = v->next) types |= types_of(root, v, depth + 1, left);
  }
  return types;
}

unsigned mm_schema_types(const mm_value *root, const mm_value *schema) {
  unsigned left = SCHEMA_PARTS;
  return types_of(root, schema, 0, &left);
}

/* The schema's own keyword, or `key` within the object that the keyword is. */
static const mm_value *own_part(const mm_value *schema, const char *keyword, const mm_str *key) {
  const mm_value *v = mm_value_get(schema, keyword);
  return v && key ? member(v, key->p, key->n) : v;
}

static const mm_value *find_part(const mm_value *root, const mm_value *schema, const char *keyword, const mm_str *key, unsigned depth,
                                 unsigned *left) {
  static const char *const combined[] = {"anyOf", "oneOf", "allOf"};
  if (!schema || schema->type != MM_VALUE_OBJECT || depth == SCHEMA_DEPTH || !*left) return NULL;
  --*left;
  const mm_value *found = own_part(schema, keyword, key), *ref = mm_value_get(schema, "$ref");
  if (!found && ref) found = find_part(root, mm_value_follow(root, ref), keyword, key, depth + 1, left);
  for (size_t i = 0; i < 3 && !found; i++) {
    const mm_value *list = mm_value_get(schema, combined[i]);
    if (!list || list->type != MM_VALUE_ARRAY) continue;
    for (const mm_value *v = list->first; v && !found; v = v->next) found = find_part(root, v, keyword, key, depth + 1, left);
  }
  return found;
}

const mm_value *mm_schema_member(const mm_value *root, const mm_value *schema, mm_str key) {
  unsigned left = SCHEMA_PARTS;
  const mm_value *found = find_part(root, schema, "properties", &key, 0, &left);
  left = SCHEMA_PARTS;
  return found ? found : find_part(root, schema, "additionalProperties", NULL, 0, &left);
}

const mm_value *mm_schema_items(const mm_value *root, const mm_value *schema) {
  unsigned left = SCHEMA_PARTS;
  return find_part(root, schema, "items", NULL, 0, &left);
}

const mm_value *mm_tools_schema(const mm_tools *t, mm_str tool) {
  for (size_t i = 0; i < t->count; i++)
    if (same(tool, t->tool[i].name.p, t->tool[i].name.n)) return t->tool[i].parameters;
  return NULL;
}

mm_str mm_tools_name(const mm_tools *t, size_t i) { return t->tool[i].name; }

const mm_value *mm_tools_parameters(const mm_tools *t, mm_str tool, const mm_value **root) {
  const mm_value *schema = *root = mm_tools_schema(t, tool);
  for (int i = 0; i < SCHEMA_DEPTH && schema; i++) {
    const mm_value *ref = mm_value_get(schema, "$ref"), *all = mm_value_get(schema, "allOf");
    const bool one = all && all->type == MM_VALUE_ARRAY && all->count == 1 && !mm_value_get(schema, "properties");
    if (!ref && !one) return schema;
    schema = ref ? mm_value_follow(*root, ref) : all->first;
  }
  return NULL;
}

unsigned mm_tools_types(const mm_tools *t, mm_str tool, mm_str parameter) {
  const mm_value *root, *parameters = mm_tools_parameters(t, tool, &root);
  const mm_value *schema = member(mm_value_get(parameters, "properties"), parameter.p, parameter.n);
  return mm_schema_types(root, schema ? schema : mm_value_get(parameters, "additionalProperties"));
}

bool mm_tools_may_have(const mm_tools *t, mm_str tool, mm_str parameter) {
  const mm_value *root, *properties = mm_value_get(mm_tools_parameters(t, tool, &root), "properties");
  return !properties || !properties->count || member(properties, parameter.p, parameter.n);
}

/* ---- Values ---- */

static mm_str trim(mm_str s) {
  while (s.n && strchr(" \t\r\n", *s.p) && *s.p) s.p++, s.n--;
  while (s.n && strchr(" \t\r\n", s.p[s.n - 1]) && s.p[s.n - 1]) s.n--;
  return s;
}

static bool is_finite(const mm_value *v) {
  if (v->type == MM_VALUE_NUMBER) return v->text[v->n - 1] >= '0' && v->text[v->n - 1] <= '9';
  for (const mm_value *m = v->first; m; m = m->next)
    if (!is_finite(m)) return false;
  return true;
}

const mm_value *mm_json_strict(mm_arena *a, mm_str text) {
  mm_err err = {0};
  const mm_value *v = text.n && (uint8_t)*text.p != 0xef ? mm_body_parse(a, text.p, text.n, &err) : NULL;
  return v && is_finite(v) ? v : NULL;
}

static bool is_integer(mm_str s) {
  for (size_t i = *s.p == '-'; i < s.n; i++)
    if (s.p[i] < '0' || s.p[i] > '9') return false;
  return true;
}

/* "true" or "false"; NULL: neither. */
static const char *boolean(mm_str s) {
  static const char *const words[] = {"true", "yes", "on", "1", "false", "no", "off", "0"};
  for (size_t i = 0; i < 8; i++)
    if (strlen(words[i]) == s.n && strncasecmp(words[i], s.p, s.n) == 0) return i < 4 ? "true" : "false";
  return NULL;
}

void mm_arguments_put_json(mm_text *out, const mm_value *v) {
  if (!v->repeats) {
    mm_text_add(out, v->raw, v->raw_n);
    return;
  }
  const bool object = v->type == MM_VALUE_OBJECT;
  mm_text_put(out, object ? "{" : "[");
  for (const mm_value *m = v->first; m; m = m->next) {
    if (m != v->first) mm_text_put(out, ", ");
    if (object) mm_text_quote(out, m->key, m->key_n);
    if (object) mm_text_put(out, ": ");
    mm_arguments_put_json(out, m);
  }
  mm_text_put(out, object ? "}" : "]");
}

/* The value by its types; v: what the text without white space around it is as JSON, NULL: it is none. */
static void put_typed(mm_text *out, unsigned types, mm_str text, const mm_value *v) {
  const mm_str s = trim(text);
  const mm_value_type type = v ? v->type : MM_VALUE_NULL;
  const bool json = v, may_string = types & MM_TYPE_STRING;
  bool take = false;
  if (json && type == MM_VALUE_NULL) take = !may_string || types & MM_TYPE_NULL;
  if (json && type == MM_VALUE_NUMBER) take = types & MM_TYPE_NUMBER || (types & MM_TYPE_INTEGER && is_integer(s));
  if (!take && types & MM_TYPE_BOOLEAN && boolean(s)) {
    mm_text_put(out, boolean(s));
    return;
  }
  if (json && type == MM_VALUE_OBJECT) take = types & MM_TYPE_OBJECT;
  if (json && type == MM_VALUE_ARRAY) take = types & MM_TYPE_ARRAY;
  if (take || (json && !may_string))
    mm_arguments_put_json(out, v);
  else
    mm_text_quote(out, text.p, text.n);
}

void mm_arguments_put(mm_text *out, unsigned types, mm_str text) {
  mm_arena arena = {0};
  put_typed(out, types, text, mm_json_strict(&arena, trim(text)));
  mm_arena_close(&arena);
}

/* A number as JSON has it: without a plus and without zeros in front. */
static mm_str plain_number(mm_str s, mm_text *scratch) {
  const bool minus = s.n && *s.p == '-', sign = minus || (s.n && *s.p == '+');
  size_t at = sign, end = s.n;
  for (size_t i = at; i < end; i++)
    if (s.p[i] < '0' || s.p[i] > '9') end = i;
  if (end == at) return s;
  while (at + 1 < end && s.p[at] == '0') at++;
  if (minus) mm_text_put(scratch, "-");
  mm_text_add(scratch, s.p + at, s.n - at);
  return (mm_str){scratch->p, scratch->n};
}

void mm_arguments_put_element(mm_text *out, unsigned types, mm_str text) {
  const mm_str s = trim(text);
  const bool string = types & MM_TYPE_STRING;
  const char *word = NULL;
  if (types & MM_TYPE_NULL && (!(string ? text.n : s.n) || (s.n == 4 && strncasecmp(s.p, "null", 4) == 0))) word = "null";
  static const char *const words[] = {"true", "false", "null"};
  for (size_t i = 0; i < 3 && !types; i++)
    if (same(text, words[i], strlen(words[i]))) word = words[i];
  if (!word && types && !string && !s.n && types & MM_TYPE_ARRAY) word = "[]";
  if (!word && types && !string && !s.n && types & MM_TYPE_OBJECT) word = "{}";
  if (word) {
    mm_text_put(out, word);
    return;
  }
  mm_text scratch = {0};
  const bool number = !string && types & (MM_TYPE_NUMBER | MM_TYPE_INTEGER);
  mm_arguments_put(out, types ? types : MM_TYPE_STRING, number ? plain_number(s, &scratch) : text);
  out->failed |= scratch.failed;
  free(scratch.p);
}

void mm_arguments_unite(mm_text *object) {
  mm_arena a = {0};
  mm_err wrong = {0};
  const mm_value *v = object->failed ? NULL : mm_body_parse(&a, object->p, object->n, &wrong);
  if (v && v->repeats) {
    mm_text once = {0};
    mm_arguments_put_json(&once, v);
    free(object->p);
    *object = once;
  }
  mm_arena_close(&a);
}
