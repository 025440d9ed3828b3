/* Fields of the content: one table of their names and kinds. Any of them in a body holds the reply (mm_field_holds). */
#include "runtime/serve/content_fields.h"

#include "runtime/serve/fields.h"

typedef enum content_kind { SCHEMA, ANY_OBJECT, REGEX, GRAMMAR, CHOICE, SEVERAL } content_kind;

typedef struct content_field {
  const char *name;
  content_kind kind;
} content_field;

static const content_field of_body[] = {
    {"guided_json", SCHEMA}, {"json_schema", SCHEMA},     {"guided_regex", REGEX},
    {"regex", REGEX},        {"guided_grammar", GRAMMAR}, {"grammar", GRAMMAR},
    {"ebnf", GRAMMAR},       {"guided_choice", CHOICE},   {"structured_outputs", SEVERAL},
};
static const content_field of_structured[] = {
    {"json", SCHEMA}, {"json_object", ANY_OBJECT}, {"regex", REGEX}, {"grammar", GRAMMAR}, {"choice", CHOICE},
};

static bool wrong(mm_call *c, const mm_value *v, const char *field, const char *expected) {
  return mm_refuse(c, 400, field, "%s: found %s, expected %s", field, mm_value_word(v), expected);
}

/* It asks for nothing. False is a schema, which nothing fits, and no texts are no choice. */
static bool is_nothing(const mm_value *v, content_kind kind) {
  return v->type == MM_VALUE_NULL || (v->type == MM_VALUE_STRING && !v->n) || (v->type == MM_VALUE_BOOL && !v->truth && kind == ANY_OBJECT);
}

/* A setting that is not known here asks for nothing. */
static bool is_empty(const mm_value *v) { return is_nothing(v, ANY_OBJECT) || (v->type == MM_VALUE_ARRAY && !v->count); }

static bool read_choices(mm_call *c, const mm_value *list, const char *field, mm_content_rule *rule, mm_err *err) {
  if (list->type != MM_VALUE_ARRAY) return wrong(c, list, field, "an array");
  if (!list->count) return mm_refuse(c, 400, field, "%s: found no text, expected one or more", field);
  if (list->count > UINT16_MAX) return mm_refuse(c, 400, field, "%s: so many texts", field);
  mm_str *choice = mm_arena_alloc(&c->arena, list->count * sizeof *choice, err);
  if (!choice) return false;
  for (const mm_value *v = list->first; v; v = v->next) {
    if (v->type != MM_VALUE_STRING || !v->n || v->n > UINT16_MAX) return mm_refuse(c, 400, field, "%s: expected texts", field);
    choice[rule->choices++] = mm_str_of(v);
  }
  rule->choice = choice;
  rule->as_written = rule->choices > 1;
  return true;
}

/* A schema, or the text of one. */
static bool read_schema(mm_call *c, const mm_value *v, const char *field, mm_content_rule *rule, mm_err *err) {
  mm_err reason = {0};
  if (v->type == MM_VALUE_STRING) v = mm_body_parse(&c->arena, v->text, v->n, &reason);
  if (!v && reason.status != MM_BAD_INPUT) return *err = reason, false;
  if (!v) return mm_refuse(c, 400, field, "%s: found a text that is no JSON, expected a schema or the text of one", field);
  if (v->type != MM_VALUE_OBJECT && v->type != MM_VALUE_BOOL) return wrong(c, v, field, "a schema");
  rule->form = mm_forms_schema(&c->forms, v, field, err);
  return rule->form;
}

static bool read_several(mm_call *c, const mm_value *object, mm_content_rule *rule, mm_err *err);

static bool read_one(mm_call *c, const mm_value *v, content_kind kind, const char *field, mm_content_rule *rule, mm_err *err) {
  if (rule->field) return mm_refuse(c, 400, field, "%s: not together with %s", field, rule->field);
  if (kind == SEVERAL) return v->type == MM_VALUE_OBJECT ? read_several(c, v, rule, err) : wrong(c, v, field, "an object");
  rule->field = c->blamed = field;
  switch (kind) {
    case SCHEMA: return read_schema(c, v, field, rule, err);
    case CHOICE: return read_choices(c, v, field, rule, err);
    case ANY_OBJECT:
      if (v->type != MM_VALUE_BOOL) return wrong(c, v, field, "a boolean");
      rule->form = mm_form_any_object();
      return true;
    default: break;
  }
  if (v->type != MM_VALUE_STRING) return wrong(c, v, field, "a string");
  rule->as_written = true;
  rule->form = kind == REGEX ? mm_forms_regex(&c->forms, mm_str_of(v), field, err) : mm_forms_grammar(&c->forms, mm_str_of(v), field, err);
  return rule->form;
}

/* vLLM's structured_outputs, an object of these and of settings. */
static bool read_several(mm_call *c, const mm_value *object, mm_content_rule *rule, mm_err *err) {
  static const char *const names[] = {"structured_outputs.json", "structured_outputs.json_object", "structured_outputs.regex",
                                      "structured_outputs.grammar", "structured_outputs.choice"};
  for (const mm_value *v = object->first; v; v = v->next) {
    size_t i = 0;
    while (i < sizeof of_structured / sizeof *of_structured && !mm_value_key_is(v, of_structured[i].name)) i++;
    const bool known = i < sizeof of_structured / sizeof *of_structured;
    const bool empty_grammar = known && of_structured[i].kind == GRAMMAR && v->type == MM_VALUE_STRING; /* has no root: refused */
    if (known ? is_nothing(v, of_structured[i].kind) && !empty_grammar : is_empty(v)) continue;
    char key[96];
    if (!known) return mm_refuse(c, 400, "structured_outputs", "structured_outputs: %s is not served", mm_value_key_shown(v, key));
    if (!read_one(c, v, of_structured[i].kind, names[i], rule, err)) return false;
  }
  return true;
}

const char *mm_content_field(size_t i) { return i < sizeof of_body / sizeof *of_body ? of_body[i].name : NULL; }

bool mm_content_read(mm_call *c, mm_content_rule *rule, mm_err *err) {
  for (size_t i = 0; i < sizeof of_body / sizeof *of_body; i++) {
    const mm_value *v = mm_value_get(c->body, of_body[i].name);
    if (v && !is_nothing(v, of_body[i].kind) && !read_one(c, v, of_body[i].kind, of_body[i].name, rule, err)) return false;
  }
  return true;
}

bool mm_content_section(mm_call *c, const mm_content_rule *rule, mm_turn_sections *out, mm_err *err) {
  if (!rule->form && !rule->choices) return true;
  if (!mm_lexicon_ready(c->server, err)) return false;
  mm_soften_bias(c);
  if (rule->choices) return mm_turn_add_texts(c, out, rule->choice, rule->choices, err);
  out->section[out->count++] = (mm_section){.kind = MM_SECTION_FORM, .form = rule->form};
  return true;
}
