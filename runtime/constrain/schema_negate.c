/* `not`: schemas of the values that do not fit. Each keyword that a value may break is an alternative; one that cannot be turned round here
 * is left out, so that the alternatives have fewer values, never others. */
#include <string.h>

#include "runtime/constrain/schema_inside.h"

const char mm_schema_no_match[] = "not pattern", mm_schema_no_text[] = "not enum";

#define NEGATIONS_MAX 4096

static mm_value text_value(const char *text) { return (mm_value){.type = MM_VALUE_STRING, .text = text, .n = strlen(text), .raw = ""}; }

/* {"type": type, key: value} */
static const mm_value *typed(mm_schema_compiler *p, const char *type, const char *key, const mm_value *value) {
  const mm_value word = text_value(type);
  mm_schema_made out;
  if (!value || !mm_schema_spend(p, 2) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out) || !mm_schema_put(p, &out, &word, "type")) return NULL;
  return mm_schema_put(p, &out, value, key) ? out.value : NULL;
}

/* The other types than these, as a schema. An integer is a number: without one of them both go. */
static const mm_value *other_types(mm_schema_compiler *p, const mm_value *types) {
  static const char *const all[] = {"object", "array", "string", "number", "integer", "boolean", "null"};
  mm_schema_made list;
  bool number = false, integer = false;
  if (!mm_schema_begin(p, MM_VALUE_ARRAY, &list)) return NULL;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    bool found = false;
    const mm_value word = text_value(all[i]);
    for (const mm_value *v = types->type == MM_VALUE_ARRAY ? types->first : types; v; v = types->type == MM_VALUE_ARRAY ? v->next : NULL) {
      found |= mm_value_is(v, all[i]) || ((i == 3 || i == 4) && (mm_value_is(v, "number") || mm_value_is(v, "integer")));
      number |= mm_value_is(v, "number");
      integer |= mm_value_is(v, "integer");
    }
    if (!found && i != 4 && !mm_schema_put(p, &list, &word, "")) return NULL;
  }
  p->narrowed |= integer && !number;
  if (!list.value->count) return mm_schema_none(p, "not: no type is left"), NULL;
  return mm_schema_of(p, "type", list.value);
}

/* ---- One keyword ---- */

/* Adds a schema whose values break the keyword; NULL: it could not be made, and the error says why. */
static bool add(mm_schema_compiler *p, mm_schema_made *list, const mm_value *schema) {
  return schema && mm_schema_put(p, list, schema, "");
}

/* Adds the alternative; one that no value fits is left out. */
static bool add_if_any(mm_schema_compiler *p, mm_schema_made *list, const mm_value *schema) {
  return schema ? add(p, list, schema) : mm_schema_forget_none(p);
}

static const char *type_name(const mm_value *v) {
  static const char *const names[] = {"null", "boolean", "number", "string", "array", "object"};
  return names[v->type];
}

/* Values other than those of the list: of other types, other texts, the other truth, numbers on both sides of one. */
static bool not_values(mm_schema_compiler *p, const mm_value *first, size_t count, mm_schema_made *list) {
  mm_schema_made types, texts;
  const mm_value *number = NULL;
  bool truth[2] = {false, false};
  size_t numbers = 0;
  if (!mm_schema_spend(p, count) || !mm_schema_begin(p, MM_VALUE_ARRAY, &types) || !mm_schema_begin(p, MM_VALUE_ARRAY, &texts))
    return false;
  const mm_value *v = first;
  for (size_t i = 0; i < count; i++, v = v->next) {
    const mm_value word = text_value(type_name(v));
    if (!mm_schema_put(p, &types, &word, "")) return false;
    if (v->type == MM_VALUE_STRING && !mm_schema_put(p, &texts, v, "")) return false;
    if (v->type == MM_VALUE_BOOL) truth[v->truth] = true;
    if (v->type == MM_VALUE_NUMBER) number = v, numbers++;
    p->narrowed |= v->type >= MM_VALUE_ARRAY;
  }
  if (types.value->count && !add_if_any(p, list, other_types(p, types.value))) return false;
  if (texts.value->count && !add(p, list, typed(p, "string", mm_schema_no_text, texts.value))) return false;
  if (truth[0] != truth[1] && !add(p, list, mm_schema_of(p, "const", truth[0] ? &mm_schema_true : &mm_schema_false))) return false;
  p->narrowed |= numbers > 1;
  return numbers != 1 ||
         (add(p, list, typed(p, "number", "exclusiveMinimum", number)) && add(p, list, typed(p, "number", "exclusiveMaximum", number)));
}

/* An object with this key, whose value is of the schema; false: without the key. */
static const mm_value *with_property(mm_schema_compiler *p, const mm_value *member, const mm_value *schema) {
  const mm_value key = {.type = MM_VALUE_STRING, .text = member->key, .n = member->key_n, .raw = ""};
  mm_schema_made properties, required, out;
  const mm_value word = text_value("object");
  if (!schema || !mm_schema_spend(p, 4) || !mm_schema_begin(p, MM_VALUE_OBJECT, &properties) ||
      !mm_schema_begin(p, MM_VALUE_ARRAY, &required) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out))
    return NULL;
  mm_value *property = mm_schema_put(p, &properties, schema, member->key);
  if (!property || !mm_schema_put(p, &required, &key, "") || !mm_schema_put(p, &out, &word, "type")) return NULL;
  property->key_n = member->key_n;
  if (!mm_schema_put(p, &out, properties.value, "properties")) return NULL;
  return mm_schema_is_false(schema) || mm_schema_put(p, &out, required.value, "required") ? out.value : NULL;
}

static bool not_members(mm_schema_compiler *p, const mm_value *m, mm_schema_made *list) {
  const bool required = mm_value_key_is(m, "required");
  if (m->type != (required ? MM_VALUE_ARRAY : MM_VALUE_OBJECT)) return mm_schema_wrong(p, "not: found something else than a schema");
  for (const mm_value *v = m->first; v; v = v->next) {
    const mm_value key = {.key = v->text, .key_n = v->n};
    if (required ? !add(p, list, with_property(p, &key, &mm_schema_false))
                 : !add_if_any(p, list, with_property(p, v, mm_schema_negate(p, v))))
      return false;
  }
  return true;
}

/* A list whose item at this place does not fit the schema. */
static const mm_value *with_item(mm_schema_compiler *p, size_t place, const mm_value *schema) {
  mm_schema_made prefix, out;
  const mm_value word = text_value("array"), *least = mm_schema_whole(p, (int64_t)place + 1);
  const mm_value *item = mm_schema_negate(p, schema);
  if (!item || !least || !mm_schema_spend(p, place + 3) || !mm_schema_begin(p, MM_VALUE_ARRAY, &prefix) ||
      !mm_schema_begin(p, MM_VALUE_OBJECT, &out))
    return NULL;
  for (size_t i = 0; i <= place; i++)
    if (!mm_schema_put(p, &prefix, i < place ? &mm_schema_true : item, "")) return NULL;
  return mm_schema_put(p, &out, &word, "type") && mm_schema_put(p, &out, prefix.value, "prefixItems") &&
                 mm_schema_put(p, &out, least, "minItems")
             ? out.value
             : NULL;
}

static bool not_items(mm_schema_compiler *p, const mm_value *schema, const mm_value *m, mm_schema_made *list) {
  const mm_value *prefix = mm_value_get(schema, "prefixItems");
  size_t place = 0;
  if (m->type != MM_VALUE_ARRAY) {
    p->narrowed |= !mm_schema_is_false(m);
    return add_if_any(p, list, with_item(p, prefix ? prefix->count : 0, m));
  }
  for (const mm_value *v = m->first; v; v = v->next, place++)
    if (!add_if_any(p, list, with_item(p, place, v))) return false;
  return true;
}

/* Each of the schemas does not fit. */
static const mm_value *none_of(mm_schema_compiler *p, const mm_value *schemas) {
  const mm_value *out = &mm_schema_true;
  if (schemas->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "not: expected a list of schemas"), NULL;
  for (const mm_value *v = schemas->first; v && out; v = v->next) out = mm_schema_all_of(p, out, mm_schema_negate(p, v));
  return out;
}

static bool not_conditional(mm_schema_compiler *p, const mm_value *schema, mm_schema_made *list) {
  const mm_value *condition = mm_value_get(schema, "if");
  const mm_value *const way[2] = {mm_value_get(schema, "then"), mm_value_get(schema, "else")};
  for (int i = 0; i < 2; i++) {
    if (!way[i]) continue;
    const mm_value *fits = i ? mm_schema_negate(p, condition) : condition;
    if (!add_if_any(p, list, fits ? mm_schema_all_of(p, fits, mm_schema_negate(p, way[i])) : NULL)) return false;
  }
  return true;
}

/* A keyword whose opposite is another one: of numbers, or of counts, one more or one less. */
static bool not_bound(mm_schema_compiler *p, const mm_value *m, mm_schema_made *list, bool *known) {
  static const struct {
    const char *key, *type, *other;
    int more;
  } bounds[] = {{"minimum", "number", "exclusiveMaximum", 0},
                {"maximum", "number", "exclusiveMinimum", 0},
                {"exclusiveMinimum", "number", "maximum", 0},
                {"exclusiveMaximum", "number", "minimum", 0},
                {"minLength", "string", "maxLength", -1},
                {"maxLength", "string", "minLength", 1},
                {"minItems", "array", "maxItems", -1},
                {"maxItems", "array", "minItems", 1},
                {"minProperties", "object", "maxProperties", -1},
                {"maxProperties", "object", "minProperties", 1}};
  for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
    int64_t n = 0;
    if (!mm_value_key_is(m, bounds[i].key)) continue;
    *known = true;
    if (!bounds[i].more) return add(p, list, typed(p, bounds[i].type, bounds[i].other, m));
    if (!mm_value_int(m, &n) || n < 0 || n >= UINT32_MAX) return mm_schema_wrong(p, "not: expected a whole number");
    if (n + bounds[i].more < 0) return true;
    return add(p, list, typed(p, bounds[i].type, bounds[i].other, mm_schema_whole(p, n + bounds[i].more)));
  }
  return true;
}

/* Adds the alternatives of values that break the keyword. *known: it is one of which that is known. */
static bool not_keyword(mm_schema_compiler *p, const mm_value *schema, const mm_value *m, mm_schema_made *list, bool *known) {
  *known = true;
  if (mm_schema_is_annotation(m) || mm_value_key_is(m, "then") || mm_value_key_is(m, "else")) return true;
  if (mm_value_key_is(m, "type")) return add_if_any(p, list, other_types(p, m));
  if (mm_value_key_is(m, "const")) return not_values(p, m, 1, list);
  if (mm_value_key_is(m, "enum")) return not_values(p, m->first, m->count, list);
  if (mm_value_key_is(m, "properties") || mm_value_key_is(m, "required")) return not_members(p, m, list);
  if (mm_value_key_is(m, "items") || mm_value_key_is(m, "prefixItems")) return not_items(p, schema, m, list);
  if (mm_value_key_is(m, "anyOf")) return add_if_any(p, list, none_of(p, m));
  if (mm_value_key_is(m, "oneOf")) return p->narrowed = true, add_if_any(p, list, none_of(p, m));
  if (mm_value_key_is(m, "not")) return add(p, list, m);
  if (mm_value_key_is(m, "if")) return not_conditional(p, schema, list);
  if (mm_value_key_is(m, "pattern")) return add(p, list, typed(p, "string", mm_schema_no_match, m));
  if (mm_value_key_is(m, "uniqueItems") && mm_schema_is_false(m)) return true;
  if (mm_value_key_is(m, "$ref")) {
    const mm_value *target = mm_schema_follow(p, m);
    return target ? add_if_any(p, list, mm_schema_negate(p, target)) : mm_schema_wrong(p, "$ref: leads to no schema of this document");
  }
  for (const mm_value *v = mm_value_key_is(m, "allOf") ? m->first : NULL; v; v = v->next)
    if (!add_if_any(p, list, mm_schema_negate(p, v))) return false;
  if (mm_value_key_is(m, "allOf")) return true;
  if (mm_value_key_is(m, "contains") && !mm_value_get(schema, "minContains") && !mm_value_get(schema, "maxContains")) {
    const mm_value *others = mm_schema_negate(p, m);
    if (!others && !mm_schema_forget_none(p)) return false;
    return add(p, list, typed(p, "array", "items", others ? others : &mm_schema_false));
  }
  *known = false;
  return not_bound(p, m, list, known);
}

/* ---- A schema ---- */

static const mm_value *negate(mm_schema_compiler *p, const mm_value *schema) {
  mm_schema_made list;
  bool left_out = false;
  if (mm_schema_is_false(schema)) return &mm_schema_true;
  if (mm_schema_is_true(schema)) return mm_schema_none(p, "not: found the schema true, which every value fits"), NULL;
  if (schema->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "not: found something else than a schema"), NULL;
  if (!mm_schema_spend(p, schema->count) || !mm_schema_begin(p, MM_VALUE_ARRAY, &list)) return NULL;
  for (const mm_value *m = schema->first; m; m = m->next) {
    bool known;
    if (p->old && !mm_value_key_is(m, "$ref") && mm_value_get(schema, "$ref")) continue;
    if (!not_keyword(p, schema, m, &list, &known)) return NULL;
    left_out |= !known;
  }
  p->narrowed |= left_out;
  if (!list.value->count && left_out) return mm_schema_unserved(p, "not", " of such keywords"), NULL;
  if (!list.value->count) return mm_schema_none(p, "not: found a schema that every value fits"), NULL;
  return list.value->count == 1 ? list.value->first : mm_schema_of(p, "anyOf", list.value);
}

/* A schema that is being turned round, and the one that it stands in. */
struct mm_schema_negated {
  const mm_value *schema;
  const mm_schema_negated *outer;
};

const mm_value *mm_schema_negate(mm_schema_compiler *p, const mm_value *schema) {
  const mm_schema_negated here = {schema, p->turned.open};
  for (const mm_schema_negated *n = p->turned.open; n; n = n->outer)
    if (n->schema == schema) return mm_schema_unserved(p, "not", " of a schema that leads to itself"), NULL;
  if (++p->turned.count > NEGATIONS_MAX) return mm_schema_too_many(p, "schemas in not, if and oneOf", p->turned.count, NEGATIONS_MAX), NULL;
  if (p->merge_depth == MM_SCHEMA_DEPTH)
    return mm_schema_too_many(p, "schemas within each other", MM_SCHEMA_DEPTH + 1, MM_SCHEMA_DEPTH), NULL;
  p->merge_depth++;
  p->turned.open = &here;
  const mm_value *out = negate(p, schema);
  p->turned.open = here.outer;
  p->merge_depth--;
  return out;
}

const mm_value *mm_schema_apply_not(mm_schema_compiler *p, const mm_value *schema, const mm_value *member) {
  const mm_value *rest = mm_schema_without(p, schema, member), *others = rest ? mm_schema_negate(p, member) : NULL;
  return others && (rest = mm_schema_finish(p, rest)) ? mm_schema_with(p, rest, others) : NULL;
}
