/* Forms of calls from the forms of their tools' schemas. M2's parameters are text, of which the reply's parser makes values by their types
 * (arguments.h): a text is allowed where the value that is made of it is. */
#include "runtime/constrain/call_form_inside.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/constrain/schema.h"

static const mm_form any_string = {.kind = MM_FORM_STRING, .most = UINT32_MAX};
/* The value of a parameter that is held to nothing. */
static const mm_form any_text = {
    .kind = MM_FORM_VALUE, .by_first[MM_FIRST_STRING] = &any_string, .most = UINT32_MAX, .types = MM_TYPE_STRING};

bool mm_call_unserved(const maker *m, const char *reason) {
  return mm_fail(m->err, MM_UNSUPPORTED, "E_SCHEMA", mm_at("tools", NULL), "the tool \"%.*s\": %s%s%.*s%s", (int)m->tool.n, m->tool.p,
                 reason, m->parameter.p ? ": the parameter \"" : "", (int)m->parameter.n, m->parameter.p ? m->parameter.p : "",
                 m->parameter.p ? "\"" : "");
}

mm_form *mm_call_new(const maker *m, mm_form_kind kind) {
  mm_form *f = mm_arena_alloc(m->arena, sizeof *f, m->err);
  if (f) *f = (mm_form){.kind = kind, .most = UINT32_MAX};
  return f;
}

bool mm_call_join(const maker *m, mm_str before, mm_str name, mm_str after, mm_literal *out) {
  const size_t n = before.n + name.n + after.n;
  if (n > UINT16_MAX) return mm_call_unserved(m, "has a text that is too long");
  char *p = mm_arena_alloc(m->arena, n + 1, m->err);
  if (!p) return false;
  memcpy(p, before.p, before.n);
  memcpy(p + before.n, name.p, name.n);
  memcpy(p + before.n + name.n, after.p, after.n);
  *out = (mm_literal){.p = p, .n = n};
  return true;
}

static bool has(mm_str text, const char *word) { return memmem(text.p, text.n, word, strlen(word)); }

/* ---- M2: values ---- */

static bool marked(const maker *m) { return m->rules->family == MM_CHAT_M3; }

/* A literal of JSON as the text of a parameter, with M2's tag that ends it: *fits where the reader makes the same value of it. */
static bool add_text(const maker *m, const mm_literal *json, unsigned types, mm_form *texts, bool *fits) {
  const mm_value *v = mm_body_parse(m->arena, json->p, json->n, m->err);
  if (!v) return false;
  const bool string = v->type == MM_VALUE_STRING;
  const mm_str text = string ? (mm_str){v->text, v->n} : (mm_str){json->p, json->n};
  mm_text made = {0}, wanted = {0};
  if (marked(m))
    mm_arguments_put_element(&made, types, text);
  else
    mm_arguments_put(&made, types, text);
  if (string)
    mm_text_quote(&wanted, text.p, text.n);
  else
    mm_text_add(&wanted, text.p, text.n);
  *fits = made.n == wanted.n && memcmp(made.p, wanted.p, made.n) == 0 && (marked(m) ? text.n > 0 : !mm_spells_tag(text.p, text.n));
  const bool failed = made.failed || wanted.failed;
  free(made.p);
  free(wanted.p);
  if (failed) return mm_fail_memory(m->err, text.n);
  if (!*fits || !texts) return true;
  return mm_call_join(m, TEXT(""), text, marked(m) ? TEXT("") : TEXT("</parameter>"), &texts->literal[texts->count++]);
}

static const unsigned type_of_first[MM_FIRSTS] = {
    [MM_FIRST_OBJECT] = MM_TYPE_OBJECT, [MM_FIRST_ARRAY] = MM_TYPE_ARRAY,  [MM_FIRST_STRING] = MM_TYPE_STRING,
    [MM_FIRST_NUMBER] = MM_TYPE_NUMBER, [MM_FIRST_TRUE] = MM_TYPE_BOOLEAN, [MM_FIRST_FALSE] = MM_TYPE_BOOLEAN,
    [MM_FIRST_NULL] = MM_TYPE_NULL};

static bool is_literals(const mm_form *s) { return s && s->kind == MM_FORM_LITERALS; }

void mm_call_spread(const mm_form *json, const mm_form **by_first) {
  if (json->kind == MM_FORM_CHOICE) {
    memcpy(by_first, json->by_first, sizeof json->by_first);
    return;
  }
  by_first[mm_schema_first_of(json)] = json;
}

/* Every value of the form is a whole number. */
static bool is_whole(const mm_form *s) {
  if (s->kind == MM_FORM_DECIMAL) return !s->decimal->places;
  for (uint32_t i = 0; s->kind == MM_FORM_UNION && i < s->count; i++)
    if (!is_whole(s->literal[i].value)) return false;
  return s->kind == MM_FORM_INTEGER || (s->kind == MM_FORM_UNION && mm_schema_first_of(s) == MM_FIRST_NUMBER);
}

/* The reader knows every type that the schema allows. */
static bool types_agree(const maker *m, const mm_form *const *by_first, unsigned types) {
  for (int i = 0; i < MM_FIRSTS; i++) {
    unsigned type = type_of_first[i];
    if (!by_first[i] || is_literals(by_first[i])) continue;
    if (is_whole(by_first[i])) type |= MM_TYPE_INTEGER;
    if (!(types & type))
      return mm_call_unserved(m, "has values whose type its schema does not name in a way that this format's calls need");
  }
  return true;
}

/* A string whose length is limited may not be one that is read as a value that the schema lacks: nothing could follow it. */
static bool text_always_ends(const maker *m, const mm_form *v) {
  const mm_form *const *f = v->by_first;
  const bool words = (v->types & MM_TYPE_BOOLEAN && (!f[MM_FIRST_TRUE] || !f[MM_FIRST_FALSE])) ||
                     (v->types & MM_TYPE_NULL && !f[MM_FIRST_NULL]) ||
                     (v->types & (MM_TYPE_INTEGER | MM_TYPE_NUMBER) && !f[MM_FIRST_NUMBER]);
  return v->most == UINT32_MAX || !words || mm_call_unserved(m, "\"maxLength\" is not served with such other types");
}

/* Texts for what are single values: strings, numbers and words, as far as no JSON begins as they do. */
static bool add_texts(const maker *m, mm_form *v, const mm_form *const *by_first) {
  static const mm_first json[] = {MM_FIRST_OBJECT, MM_FIRST_ARRAY, MM_FIRST_NUMBER};
  uint32_t most = 0;
  for (int i = 0; i < MM_FIRSTS; i++) most += is_literals(by_first[i]) ? by_first[i]->count : 0;
  mm_form *texts = mm_call_new(m, MM_FORM_LITERALS);
  if (!texts || !(texts->literal = mm_arena_alloc(m->arena, (most + 1) * sizeof *texts->literal, m->err))) return false;
  texts->exact = true;
  for (int i = 0; i < MM_FIRSTS; i++)
    for (uint32_t k = 0; is_literals(by_first[i]) && k < by_first[i]->count; k++) {
      bool fits;
      if (!add_text(m, &by_first[i]->literal[k], v->types, texts, &fits)) return false;
      if (!fits) continue;
      const int first = mm_schema_first(texts->literal[texts->count - 1].p[0]);
      for (size_t n = 0; n < sizeof json / sizeof *json; n++) texts->count -= first == (int)json[n] && v->by_first[first];
    }
  mm_literals_sort(texts);
  if (texts->count) v->item = texts;
  return true;
}

/* Keeps the numbers of an enum that the reader makes of their own text. The parameter may also be any text. */
static bool keep_numbers(const maker *m, mm_form *v, const mm_form *all) {
  mm_form *own = mm_call_new(m, MM_FORM_LITERALS);
  if (!own || !(own->literal = mm_arena_alloc(m->arena, all->count * sizeof *own->literal, m->err))) return false;
  for (uint32_t k = 0; k < all->count; k++) {
    bool fits;
    if (!add_text(m, &all->literal[k], v->types, NULL, &fits)) return false;
    if (fits) own->literal[own->count++] = all->literal[k];
  }
  v->by_first[MM_FIRST_NUMBER] = own->count ? own : NULL;
  return true;
}

/* Texts of an automaton's strings, together with the texts of single values that v->item has. */
static bool add_automaton(const maker *m, mm_form *v, const mm_form *string, const mm_form *null) {
  static const char plain[] = "^(?:[^\\s{\\[0-9-][\\s\\S]*)?$";
  const mm_text_rule *rules = string->rules;
  const char *reason = NULL;
  if (v->marked) return mm_call_unserved(m, "\"pattern\" and \"format\" are not served in this format's calls");
  mm_form *text = mm_call_new(m, MM_FORM_AUTOMATON);
  if (!text) return false;
  if (v->types & MM_TYPE_BOOLEAN) return mm_call_unserved(m, "\"pattern\" is not served with booleans");
  if (v->types & MM_TYPE_NULL && !null) return mm_call_unserved(m, "\"pattern\" is not served with such other types");
  /* Where numbers, objects or lists may stand too, the text does not begin as one of these. */
  if (v->types & ~(unsigned)(MM_TYPE_STRING | MM_TYPE_NULL) &&
      !mm_text_pattern_parse(m->arena, plain, sizeof plain - 1, false, &rules, &reason, m->err))
    return false;
  text->exact = true;
  text->automaton = mm_automaton_build(m->arena, rules, MM_AUTOMATON_TEXT, m->budget, &reason, m->err);
  if (!text->automaton) return reason && mm_call_unserved(m, "\"pattern\" and \"format\": no such text can stand in this format's calls");
  if (!v->item) return v->item = text, true;
  mm_form *both = mm_call_new(m, MM_FORM_UNION);
  if (!both || !(both->literal = mm_arena_alloc(m->arena, 2 * sizeof *both->literal, m->err))) return false;
  both->exact = true;
  both->literal[both->count++].value = v->item;
  both->literal[both->count++].value = text;
  return v->item = both, true;
}

mm_form *mm_call_value(const maker *m, const mm_form *json, unsigned declared) {
  mm_form *v = mm_call_new(m, MM_FORM_VALUE);
  const mm_form *by_first[MM_FIRSTS] = {0};
  if (!v) return NULL;
  v->marked = marked(m);
  v->types = declared || v->marked ? declared : MM_TYPE_STRING;
  mm_call_spread(json, by_first);
  /* Without a type M3's reader makes a boolean or null of some texts. */
  const bool words = by_first[MM_FIRST_TRUE] && by_first[MM_FIRST_FALSE] && by_first[MM_FIRST_NULL] && by_first[MM_FIRST_STRING];
  if (!declared && v->marked && !words)
    return mm_call_unserved(m, "has values whose type its schema does not name in a way that this format's calls need"), NULL;
  if (!declared && by_first[MM_FIRST_STRING]) /* the reader takes a value without a declared type as a string */
    for (int i = 0; i < MM_FIRSTS; i++) by_first[i] = i == MM_FIRST_STRING ? by_first[i] : NULL;
  if ((declared || !v->marked) && !types_agree(m, by_first, v->types)) return NULL;
  memcpy(v->by_first, by_first, sizeof by_first);
  const mm_form *string = by_first[MM_FIRST_STRING], *null = by_first[MM_FIRST_NULL];
  if (string && string->kind == MM_FORM_UNION)
    return mm_call_unserved(m, "alternatives of strings are not served in this format's calls"), NULL;
  if (string && string->kind == MM_FORM_STRING) {
    v->least = string->least;
    v->most = string->most;
    if (is_literals(by_first[MM_FIRST_NUMBER]) && !keep_numbers(m, v, by_first[MM_FIRST_NUMBER])) return NULL;
    return text_always_ends(m, v) ? v : NULL;
  }
  for (int i = 0; i < MM_FIRSTS; i++)
    if (is_literals(by_first[i])) v->by_first[i] = NULL;
  if (string && string->kind == MM_FORM_AUTOMATON) v->by_first[MM_FIRST_STRING] = NULL;
  if (!add_texts(m, v, by_first)) return NULL;
  if (string && string->kind == MM_FORM_AUTOMATON && !add_automaton(m, v, string, null)) return NULL;
  bool any = v->item;
  for (int i = 0; i < MM_FIRSTS; i++) any |= v->by_first[i] != NULL;
  return any || v->marked || mm_call_unserved(m, "has no value that this format's calls can hold") ? v : NULL;
}

/* ---- M2: parameters and calls ---- */

static bool close_elements(const maker *m, mm_form *f) {
  f->literal[f->count++] = (mm_literal){.p = "</invoke>", .n = 9, .required = true};
  uint16_t *order = mm_arena_alloc(m->arena, f->count * sizeof *order, m->err);
  if (!order) return false;
  mm_literals_order(f, order);
  return true;
}

static const mm_form *any_elements(const maker *m, const mm_form *value) {
  mm_form *f = mm_call_new(m, MM_FORM_ELEMENTS);
  if (!f || !(f->literal = mm_arena_alloc(m->arena, 2 * sizeof *f->literal, m->err))) return NULL;
  f->any_names = value;
  if (value) f->literal[f->count++] = (mm_literal){.p = "<parameter name=\"", .n = 17, .value = value};
  return close_elements(m, f) ? f : NULL;
}

static const mm_form *value_form(const maker *m, const mm_form *json) {
  return mm_call_value(m, json, mm_tools_types(m->rules->tools, m->tool, m->parameter));
}

/* The parameters of an object's form. */
static const mm_form *elements(maker *m, const mm_form *object) {
  const bool none = object->kind == MM_FORM_MAP && !object->most;
  if (!none && (object->least || object->most != UINT32_MAX))
    return mm_call_unserved(m, "\"minProperties\" and \"maxProperties\" are not served in this format's calls"), NULL;
  if (object->kind == MM_FORM_MAP && object->key) return mm_call_unserved(m, "conditions on the names of parameters are not served"), NULL;
  if (object->kind == MM_FORM_MAP) {
    m->parameter = TEXT("");
    return any_elements(m, object->most ? value_form(m, object->item) : NULL);
  }
  mm_form *f = mm_call_new(m, MM_FORM_ELEMENTS);
  if (!f || !(f->literal = mm_arena_alloc(m->arena, ((size_t)object->count + 1) * sizeof *f->literal, m->err))) return NULL;
  for (uint32_t i = 0; i < object->count; i++) {
    const mm_value *key = mm_body_parse(m->arena, object->literal[i].p, object->literal[i].n, m->err);
    if (!key) return NULL;
    m->parameter = (mm_str){key->text, key->n};
    if (key->n > TAG_MAX || has(m->parameter, ">")) return mm_call_unserved(m, "has a name that this format's calls cannot hold"), NULL;
    mm_literal *l = &f->literal[f->count++];
    if (!mm_call_join(m, TEXT("<parameter name=\""), m->parameter, TEXT("\">"), l) || !(l->value = value_form(m, object->literal[i].value)))
      return NULL;
    l->required = object->literal[i].required;
  }
  m->parameter = (mm_str){0};
  return close_elements(m, f) ? f : NULL;
}

/* ---- Tools ---- */

/* The form of the tool's arguments: an object. */
static const mm_form *arguments_form(maker *m, bool bound) {
  const mm_value *root, *parameters = mm_tools_parameters(m->rules->tools, m->tool, &root);
  const mm_value *properties = mm_value_get(parameters, "properties"), *more = mm_value_get(parameters, "additionalProperties");
  if (!bound) return mm_schema_any_object();
  const bool none = !root || (properties && !properties->count && (!more || (more->type == MM_VALUE_BOOL && !more->truth)));
  char *where = mm_arena_printf(m->arena, m->err, "tool %.*s", (int)m->tool.n, m->tool.p);
  const mm_form *json = !where ? NULL : root ? mm_schema_compile_within(m->arena, root, where, m->budget, m->err) : mm_schema_any_object();
  if (!json) return NULL;
  if (json->kind == MM_FORM_CHOICE) json = json->by_first[MM_FIRST_OBJECT];
  const bool objects = json && json->kind == MM_FORM_UNION && m->rules->family == MM_CHAT_M1 && mm_schema_first_of(json) == MM_FIRST_OBJECT;
  if (!json || (!objects && json->kind != MM_FORM_OBJECT && json->kind != MM_FORM_MAP))
    return mm_call_unserved(m, json && json->kind == MM_FORM_UNION ? "alternatives of its parameters are not served in this format's calls"
                                                                   : "its parameters are no object"),
           NULL;
  if (!none || json->kind != MM_FORM_MAP) return json;
  mm_form *f = mm_call_new(m, MM_FORM_MAP);
  if (f) *f = *mm_schema_any_object(), f->most = 0;
  return f;
}

/* The text that begins a call of the tool, and what follows it. */
static bool add_call(maker *m, bool bound, mm_form *calls) {
  const bool m2 = m->rules->family == MM_CHAT_M2, json_text = !m2 && !marked(m);
  mm_literal *l = &calls->literal[calls->count++];
  const mm_form *json = arguments_form(m, bound);
  if (!json) return false;
  if (!json_text && (m->tool.n > TAG_MAX || has(m->tool, ">")))
    return mm_call_unserved(m, "has a name that this format's calls cannot hold");
  if (m2) {
    return mm_call_join(m, TEXT("<invoke name=\""), m->tool, TEXT("\">\n"), l) &&
           (l->value = bound ? elements(m, json) : any_elements(m, &any_text));
  }
  if (marked(m)) {
    m->root = mm_tools_schema(m->rules->tools, m->tool);
    return mm_call_join(m, TEXT("\xff<invoke name=\""), m->tool, TEXT("\">"), l) && (l->value = mm_call_fields(m, bound ? json : NULL));
  }
  mm_text name = {0};
  mm_text_quote(&name, m->tool.p, m->tool.n);
  const bool ok = name.failed ? mm_fail_memory(m->err, m->tool.n)
                              : mm_call_join(m, TEXT("{\"name\": "), (mm_str){name.p, name.n}, TEXT(", \"arguments\": "), l);
  free(name.p);
  l->value = json;
  return ok;
}

/* If several tools have the same name, the first one is called. */
static bool is_called(const mm_call_rules *r, size_t i) {
  const mm_str name = mm_tools_name(r->tools, i);
  if (r->only.p && !mm_str_equal(r->only, name)) return false;
  for (size_t k = 0; k < i; k++)
    if (mm_str_equal(mm_tools_name(r->tools, k), name)) return false;
  return true;
}

const mm_form *mm_call_form(mm_arena *a, const mm_call_rules *r, mm_err *err) {
  const bool m2 = r->family == MM_CHAT_M2, m3 = r->family == MM_CHAT_M3;
  mm_automaton_budget budget = MM_AUTOMATON_BUDGET;
  maker m = {.arena = a, .rules = r, .budget = &budget, .err = err};
  mm_form *f = mm_call_new(&m, MM_FORM_CALLS);
  if (!f || !(f->literal = mm_arena_alloc(a, (r->tools->count + 1) * sizeof *f->literal, err))) return NULL;
  f->least = 1;
  f->most = r->one_call ? 1 : UINT32_MAX;
  f->before = m2 || (!m3 && r->begun) ? "\n" : m3 ? "<tool_call>\n" : "<tool_calls>\n";
  f->after = m2 ? "\n" : m3 ? "\xff</invoke>\n" : "}\n";
  f->ends = !m2;
  f->one_line = !m2 && !m3;
  for (size_t i = 0; i < r->tools->count; i++) {
    m.tool = mm_tools_name(r->tools, i);
    if (is_called(r, i) && !add_call(&m, r->bound[i], f)) return NULL;
  }
  if (m3) f->literal[f->count++] = (mm_literal){.p = "\xff</tool_call>", .n = 13};
  if (f->one_line) f->literal[f->count++] = (mm_literal){.p = "</tool_calls>", .n = 13};
  uint16_t *order = mm_arena_alloc(a, f->count * sizeof *order, err);
  if (!order) return NULL;
  mm_literals_order(f, order);
  return f;
}

const mm_form *mm_call_prose(mm_arena *a, const mm_form *calls, bool in_reasoning, mm_err *err) {
  mm_form *f = mm_arena_alloc(a, sizeof *f, err);
  if (f) *f = (mm_form){.kind = MM_FORM_PROSE, .item = calls, .least = in_reasoning, .most = UINT32_MAX};
  return f;
}
