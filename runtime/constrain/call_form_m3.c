/* Forms of M3's calls: objects and lists are elements, other values are text of which the reply's parser makes values by their types
 * (elements.h). */
#include <string.h>

#include "runtime/constrain/call_form_inside.h"

struct made_value {
  const mm_form *json;
  const mm_value *schema;
  const mm_form *form;
  made_value *next;
};

/* Elements that are well formed. */
static const mm_form any_element; /* below */
static const mm_form any_string = {.kind = MM_FORM_STRING, .most = UINT32_MAX},
                     any_fields = {.kind = MM_FORM_FIELDS, .item = &any_element, .any_names = true, .most = UINT32_MAX};
static const mm_form any_element = {.kind = MM_FORM_VALUE,
                                    .by_first = {[MM_FIRST_OBJECT] = &any_fields, [MM_FIRST_STRING] = &any_string},
                                    .most = UINT32_MAX,
                                    .marked = true,
                                    .empty = true};

static const mm_form *fields(maker *m, const mm_form *json, const mm_value *schema);

static bool has_literal(const mm_form *f, const char *text) {
  for (uint32_t i = 0; i < f->count; i++)
    if (f->literal[i].n == strlen(text) && memcmp(f->literal[i].p, text, f->literal[i].n) == 0) return true;
  return false;
}

/* The schema allows the value that the reader makes of an empty element. */
static bool may_be_empty(const mm_form *const *by_first, unsigned types) {
  if (types & MM_TYPE_NULL) return by_first[MM_FIRST_NULL] != NULL;
  const bool string = !types || types & MM_TYPE_STRING;
  const mm_first first = string ? MM_FIRST_STRING : types & MM_TYPE_ARRAY ? MM_FIRST_ARRAY : MM_FIRST_OBJECT;
  const mm_form *f = by_first[first];
  if (!f || (first == MM_FIRST_OBJECT && !(types & MM_TYPE_OBJECT))) return false;
  if (f->kind == MM_FORM_LITERALS) return has_literal(f, first == MM_FIRST_STRING ? "\"\"" : first == MM_FIRST_ARRAY ? "[]" : "{}");
  for (uint32_t i = 0; f->kind == MM_FORM_OBJECT && i < f->count; i++)
    if (f->literal[i].required) return false;
  return f->kind == MM_FORM_OBJECT || f->least == 0;
}

/* The elements of an object or list may have some within. */
static bool has_members(const mm_form *f) { return f->kind == MM_FORM_ITEMS || f->any_names ? f->most > 0 : f->count > 0; }

static const mm_form *items(maker *m, const mm_form *json, const mm_value *schema);

/* The content of an element whose value is of the JSON form. A schema may hold itself. */
static const mm_form *content(maker *m, const mm_form *json, const mm_value *schema) {
  for (made_value *v = m->made; v; v = v->next)
    if (v->json == json && v->schema == schema) return v->form;
  const unsigned types = mm_schema_types(m->root, schema);
  const mm_form *by_first[MM_FIRSTS] = {0};
  mm_call_spread(json, by_first);
  mm_form *f = mm_call_value(m, json, types);
  made_value *made = f ? mm_arena_alloc(m->arena, sizeof *made, m->err) : NULL;
  if (!made) return NULL;
  *made = (made_value){json, schema, f, m->made};
  m->made = made;
  f->empty = may_be_empty(by_first, types);
  for (int i = MM_FIRST_OBJECT; i <= MM_FIRST_ARRAY; i++) /* such a text would be read as JSON */
    if (f->by_first[i] && f->by_first[i]->kind == MM_FORM_LITERALS) f->by_first[i] = NULL;
  const mm_form *object = f->by_first[MM_FIRST_OBJECT], *list = f->by_first[MM_FIRST_ARRAY];
  if (object && list) return mm_call_unserved(m, "may be an object or a list, which this format's calls do not distinguish"), NULL;
  if (object && !(f->by_first[MM_FIRST_OBJECT] = fields(m, object, schema))) return NULL;
  if (list && !(f->by_first[MM_FIRST_ARRAY] = items(m, list, schema))) return NULL;
  for (int i = MM_FIRST_OBJECT; i <= MM_FIRST_ARRAY; i++) /* the reader makes another value of an empty element */
    if (f->by_first[i] && !f->empty && !has_members(f->by_first[i])) f->by_first[i] = NULL;
  bool any = f->item || f->empty;
  for (int i = 0; i < MM_FIRSTS; i++) any |= f->by_first[i] != NULL;
  return any || mm_call_unserved(m, "has no value that this format's calls can hold") ? f : NULL;
}

static const mm_form *items(maker *m, const mm_form *json, const mm_value *schema) {
  if (json->unique) return mm_call_unserved(m, "\"uniqueItems\" is not served in this format's calls"), NULL;
  if (json->kind != MM_FORM_ARRAY || json->count)
    return mm_call_unserved(m, "alternatives of lists and first items are not served in this format's calls"), NULL;
  mm_form *f = mm_call_new(m, MM_FORM_ITEMS);
  if (!f) return NULL;
  f->least = json->least;
  f->most = json->most;
  return !f->most || (f->item = content(m, json->item, mm_schema_items(m->root, schema))) ? f : NULL;
}

static bool add_field(maker *m, const mm_literal *json, const mm_value *schema, mm_form *f) {
  const mm_value *key = mm_body_parse(m->arena, json->p, json->n, m->err);
  if (!key) return false;
  const mm_str name = {key->text, key->n}, outer = m->parameter;
  mm_literal *l = &f->literal[f->count++];
  m->parameter = name;
  if (name.n > TAG_MAX || memchr(name.p, '>', name.n) || (name.n && *name.p == '/'))
    return mm_call_unserved(m, "has a name that this format's calls cannot hold");
  if (!mm_call_join(m, TEXT(""), name, TEXT(">"), l)) return false;
  l->value = content(m, json->value, mm_schema_member(m->root, schema, name));
  l->required = json->required;
  m->parameter = outer;
  return l->value;
}

static const mm_form *fields(maker *m, const mm_form *json, const mm_value *schema) {
  const bool map = json->kind == MM_FORM_MAP;
  if (!map && json->kind != MM_FORM_OBJECT)
    return mm_call_unserved(m, "alternatives of objects are not served in this format's calls"), NULL;
  if (map && json->key)
    return mm_call_unserved(m, "\"propertyNames\" or \"patternProperties\", a condition on keys, is not served in this format's calls"),
           NULL;
  if (!map && (json->least || json->most != UINT32_MAX))
    return mm_call_unserved(m, "\"minProperties\" and \"maxProperties\" are not served in this format's calls"), NULL;
  mm_form *f = mm_call_new(m, MM_FORM_FIELDS);
  if (!f) return NULL;
  if (json->kind == MM_FORM_MAP) {
    f->any_names = true;
    f->least = json->least;
    f->most = json->most;
    return !f->most || (f->item = content(m, json->item, mm_schema_member(m->root, schema, TEXT("")))) ? f : NULL;
  }
  uint16_t *order = mm_arena_alloc(m->arena, (json->count + 1) * sizeof *order, m->err);
  if (!order || !(f->literal = mm_arena_alloc(m->arena, (json->count + 1) * sizeof *f->literal, m->err))) return NULL;
  for (uint32_t i = 0; i < json->count; i++)
    if (!add_field(m, &json->literal[i], schema, f)) return NULL;
  mm_literals_order(f, order);
  return f;
}

const mm_form *mm_call_fields(maker *m, const mm_form *json) { return json ? fields(m, json, m->root) : &any_fields; }
