/* Schemas that hold together: those of allOf, and what stands next to a $ref, as one. */
#include <string.h>

#include "runtime/constrain/schema_inside.h"

/* ---- Objects of schemas ---- */

static mm_value *copy_member(mm_schema_compiler *p, const mm_value *m) {
  mm_value *copy = mm_arena_alloc(p->arena, sizeof *copy, p->err);
  if (!copy) return NULL;
  *copy = *m;
  copy->next = NULL;
  return copy;
}

/* An object or list that is made here. Its text is not at hand: raw_n is 0. */
typedef struct made {
  mm_value *value, *last;
} made;

static bool begin(mm_schema_compiler *p, mm_value_type type, made *out) {
  *out = (made){.value = mm_arena_alloc(p->arena, sizeof *out->value, p->err)};
  if (!out->value) return false;
  *out->value = (mm_value){.type = type, .text = "", .raw = ""};
  return true;
}

/* A copy of the member, under another key if one is given; NULL after an error. */
static mm_value *put(mm_schema_compiler *p, made *m, const mm_value *member, const char *key) {
  mm_value *copy = copy_member(p, member);
  if (!copy) return NULL;
  if (key) copy->key = key, copy->key_n = strlen(key);
  if (m->last)
    m->last->next = copy;
  else
    m->value->first = copy;
  m->last = copy;
  m->value->count++;
  return copy;
}

static bool spend(mm_schema_compiler *p, uint64_t members) {
  p->merging += members + 1;
  return p->merging <= MM_SCHEMA_MERGED ||
         mm_schema_too_many(p, "keywords and properties of schemas that hold together", p->merging, MM_SCHEMA_MERGED);
}

static bool equal_text(const mm_value *a, const mm_value *b) {
  return a->raw_n && a->raw_n == b->raw_n && memcmp(a->raw, b->raw, a->raw_n) == 0;
}

static bool key_is(const mm_value *m, const char *key) { return strcmp(m->key, key) == 0; }

/* {"allOf": [a, b]} */
static mm_value *all_of(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  made list, object;
  if (!begin(p, MM_VALUE_ARRAY, &list) || !put(p, &list, a, "") || !put(p, &list, b, "")) return NULL;
  return begin(p, MM_VALUE_OBJECT, &object) && put(p, &object, list.value, "allOf") ? object.value : NULL;
}

const mm_value *mm_schema_all_of(mm_schema_compiler *p, const mm_value *a, const mm_value *b) { return all_of(p, a, b); }

/* Both in place of `to`. */
static bool set_both(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  if (equal_text(to, b) || (to->type == MM_VALUE_BOOL && !to->truth)) return true;
  const bool none = b->type == MM_VALUE_BOOL && !b->truth;
  mm_value *object = none ? copy_member(p, b) : all_of(p, to, b);
  if (!object) return false;
  object->key = to->key;
  object->key_n = to->key_n;
  object->next = to->next;
  *to = *object;
  return true;
}

/* ---- Two of a keyword ---- */

/* The types that both allow: those of one list that the other has; an integer is a number. */
static bool both_types(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  const mm_value *lists[2] = {to, b};
  made out;
  if (!begin(p, MM_VALUE_ARRAY, &out)) return false;
  for (int side = 0; side < 2; side++) {
    const mm_value *mine = lists[side], *others = lists[!side];
    for (const mm_value *v = mine->type == MM_VALUE_ARRAY ? mine->first : mine; v; v = mine->type == MM_VALUE_ARRAY ? v->next : NULL) {
      bool found = false;
      for (const mm_value *w = others->type == MM_VALUE_ARRAY ? others->first : others; w;
           w = others->type == MM_VALUE_ARRAY ? w->next : NULL)
        found |= v->type == MM_VALUE_STRING && w->type == MM_VALUE_STRING &&
                 (side ? mm_value_is(v, "integer") && mm_value_is(w, "number")
                       : mm_value_is(v, w->text) || (mm_value_is(v, "integer") && mm_value_is(w, "number")));
      if (found && !put(p, &out, v, "")) return false;
    }
  }
  if (!out.value->count) return mm_schema_wrong(p, "allOf: its schemas have no type in common");
  out.value->key = to->key;
  out.value->key_n = to->key_n;
  out.value->next = to->next;
  *to = *out.value;
  return true;
}

/* The values of both lists. */
static bool both_lists(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  made out;
  if (to->type != MM_VALUE_ARRAY || b->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "required: expected a list of keys");
  if (!spend(p, to->count + b->count) || !begin(p, MM_VALUE_ARRAY, &out)) return false;
  for (const mm_value *v = to->first; v; v = v->next)
    if (!put(p, &out, v, NULL)) return false;
  for (const mm_value *v = b->first; v; v = v->next)
    if (!put(p, &out, v, NULL)) return false;
  to->first = out.value->first;
  to->count = out.value->count;
  to->raw_n = 0;
  return true;
}

static mm_value *find(const mm_value *object, const mm_value *like) {
  for (const mm_value *m = object->first; m; m = m->next)
    if (m->key_n == like->key_n && memcmp(m->key, like->key, m->key_n) == 0) return (mm_value *)(uintptr_t)m; /* made here */
  return NULL;
}

/* The properties of both; one that both have holds to both schemas. */
static bool both_properties(mm_schema_compiler *p, mm_value *to, const mm_value *b) {
  made out;
  if (to->type != MM_VALUE_OBJECT || b->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "properties: expected an object");
  if (!spend(p, to->count + b->count + (uint64_t)to->count * b->count / 64) || !begin(p, MM_VALUE_OBJECT, &out)) return false;
  for (const mm_value *v = to->first; v; v = v->next)
    if (!put(p, &out, v, NULL)) return false;
  for (const mm_value *v = b->first; v; v = v->next) {
    mm_value *there = find(out.value, v);
    if (there ? !set_both(p, there, v) : !put(p, &out, v, NULL)) return false;
  }
  to->first = out.value->first;
  to->count = out.value->count;
  to->raw_n = 0;
  return true;
}

/* Keeps the larger or the smaller bound. */
static bool both_bounds(mm_schema_compiler *p, mm_value *to, const mm_value *b, bool larger) {
  if (to->type != MM_VALUE_NUMBER || b->type != MM_VALUE_NUMBER) return mm_schema_unserved(p, to->key, " twice in allOf");
  const double x = mm_value_real(to), y = mm_value_real(b);
  if (x == y) return equal_text(to, b) || mm_schema_unserved(p, to->key, " twice in allOf, almost equal");
  if ((y > x) != larger) return true;
  const mm_value old = *to;
  *to = *b;
  to->next = old.next;
  return true;
}

/* `to`, a member that is made here, holds to what b says too. */
static bool both_of(mm_schema_compiler *p, made *out, mm_value *to, const mm_value *b) {
  static const char *const larger[] = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"},
                           *const smaller[] = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"};
  for (size_t i = 0; i < sizeof larger / sizeof *larger; i++) {
    if (key_is(to, larger[i])) return both_bounds(p, to, b, true);
    if (key_is(to, smaller[i])) return both_bounds(p, to, b, false);
  }
  if (key_is(to, "properties")) return both_properties(p, to, b);
  if (key_is(to, "required")) return both_lists(p, to, b);
  if (key_is(to, "type")) return both_types(p, to, b);
  if (equal_text(to, b)) return true;
  if (key_is(to, "pattern") || key_is(to, "format")) return put(p, out, b, NULL); /* the compiler follows each of them */
  if (key_is(to, "items")) return set_both(p, to, b);
  if (key_is(to, "additionalProperties") || key_is(to, "unevaluatedProperties")) {
    if (to->type == MM_VALUE_BOOL && b->type == MM_VALUE_BOOL) return to->truth = to->truth && b->truth, true;
    if (to->type == MM_VALUE_OBJECT && b->type == MM_VALUE_OBJECT) return set_both(p, to, b);
  }
  return mm_schema_unserved(p, to->key, " in two schemas that hold together");
}

/* Keys of `b` that the additionalProperties of `a` would refuse, or hold to a schema of their own. */
static bool keys_agree(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  const mm_value *more = mm_value_get(a, "additionalProperties"), *mine = mm_value_get(a, "properties"),
                 *theirs = mm_value_get(b, "properties");
  if (!more || (more->type == MM_VALUE_BOOL && more->truth) || !theirs || theirs->type != MM_VALUE_OBJECT) return true;
  if (!spend(p, (mine ? mine->count : 0) * (uint64_t)theirs->count / 64)) return false;
  for (const mm_value *v = theirs->first; v; v = v->next)
    if (!mine || !find(mine, v))
      return mm_schema_unserved(p, "additionalProperties", " in a schema of allOf where another one has further properties");
  return true;
}

/* unevaluatedProperties and unevaluatedItems see the keywords of their own schema alone. */
static bool sees_all(mm_schema_compiler *p, const mm_value *schema) {
  static const char *const key[] = {"unevaluatedProperties", "unevaluatedItems"};
  for (int i = 0; i < 2; i++) {
    const mm_value *more = mm_value_get(schema, key[i]);
    if (more && !(more->type == MM_VALUE_BOOL && more->truth))
      return mm_schema_unserved(p, key[i], " in a schema that holds together with others");
  }
  return true;
}

/* A keyword that says nothing without another one of its own schema, which it lacks: that of another schema is not meant. */
static bool says_nothing(const mm_value *schema, const mm_value *m) {
  if (key_is(m, "then") || key_is(m, "else")) return !mm_value_get(schema, "if");
  if (key_is(m, "if")) return !mm_value_get(schema, "then") && !mm_value_get(schema, "else");
  return (key_is(m, "minContains") || key_is(m, "maxContains")) && !mm_value_get(schema, "contains");
}

/* `items` and additionalProperties of `a` are about what its own prefixItems and patternProperties leave: those of `b` would leave less. */
static bool rests_agree(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  const mm_value *items = mm_value_get(a, "items"), *more = mm_value_get(a, "additionalProperties");
  if (items && mm_value_get(b, "prefixItems") && !mm_value_get(a, "prefixItems"))
    return mm_schema_unserved(p, "items", " in a schema of allOf where another one has prefixItems");
  const bool any = !more || (more->type == MM_VALUE_BOOL && more->truth);
  return any || !mm_value_get(b, "patternProperties") || mm_value_get(a, "patternProperties") ||
         mm_schema_unserved(p, "additionalProperties", " in a schema of allOf where another one has patternProperties");
}

const mm_value *mm_schema_both(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  made out;
  if (!sees_all(p, b) || !keys_agree(p, a, b) || !keys_agree(p, b, a) || !rests_agree(p, a, b) || !rests_agree(p, b, a)) return NULL;
  if (!spend(p, a->count + b->count + (uint64_t)a->count * b->count / 64) || !begin(p, MM_VALUE_OBJECT, &out)) return NULL;
  for (const mm_value *m = a->first; m; m = m->next)
    if (!says_nothing(a, m) && !put(p, &out, m, NULL)) return NULL;
  for (const mm_value *m = b->first; m; m = m->next) {
    if (says_nothing(b, m)) continue;
    mm_value *there = find(out.value, m);
    if (there && mm_schema_is_annotation(m->key)) continue;
    if (there ? !both_of(p, &out, there, m) : !put(p, &out, m, NULL)) return NULL;
  }
  return out.value;
}

const mm_value *mm_schema_without(mm_schema_compiler *p, const mm_value *schema, const char *keyword) {
  made out;
  if (!spend(p, schema->count) || !begin(p, MM_VALUE_OBJECT, &out)) return NULL;
  for (const mm_value *m = schema->first; m; m = m->next)
    if (!key_is(m, keyword) && !key_is(m, "$id") && !put(p, &out, m, NULL)) return NULL;
  return out.value;
}

/* ---- not ---- */

/* The other types than these. An integer is a number: without one of them both go. */
static const mm_value *other_types(mm_schema_compiler *p, const mm_value *types) {
  static const char *const all[] = {"object", "array", "string", "number", "integer", "boolean", "null"};
  made list, object;
  if (!begin(p, MM_VALUE_ARRAY, &list)) return NULL;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    bool found = false;
    const mm_value word = {.type = MM_VALUE_STRING, .text = all[i], .n = strlen(all[i]), .raw = ""};
    for (const mm_value *v = types->type == MM_VALUE_ARRAY ? types->first : types; v; v = types->type == MM_VALUE_ARRAY ? v->next : NULL)
      found |= mm_value_is(v, all[i]) || ((i == 3 || i == 4) && (mm_value_is(v, "number") || mm_value_is(v, "integer")));
    if (!found && i != 4 && !put(p, &list, &word, "")) return NULL;
  }
  if (!list.value->count) return mm_schema_wrong(p, "not: no type is left"), NULL;
  return begin(p, MM_VALUE_OBJECT, &object) && put(p, &object, list.value, "type") ? object.value : NULL;
}

const mm_value *mm_schema_apply_not(mm_schema_compiler *p, const mm_value *schema, const mm_value *member) {
  const mm_value *what = mm_schema_plain(p, member), *type = mm_value_get(what, "type"), *rest = mm_schema_without(p, schema, "not");
  if ((!what || !rest) && p->err->status == MM_OK) mm_schema_wrong(p, "$ref: leads to no schema of this document");
  if (!what || !rest) return NULL;
  if (mm_value_get(rest, "not")) return mm_schema_wrong(p, "not: stands there twice"), NULL;
  if (what->type == MM_VALUE_BOOL && !what->truth) return rest;
  if (what->type == MM_VALUE_BOOL) return mm_schema_wrong(p, "not: found the schema true, which every value fits"), NULL;
  if (what->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "not: found something else than a schema"), NULL;
  bool number = false, integer = false;
  for (const mm_value *m = what->first; m; m = m->next)
    if (!key_is(m, "type") && !mm_schema_is_annotation(m->key)) return mm_schema_unserved(p, "not", " of other keywords than type"), NULL;
  if (!type) return mm_schema_wrong(p, "not: found a schema that every value fits"), NULL;
  for (const mm_value *v = type->type == MM_VALUE_ARRAY ? type->first : type; v; v = type->type == MM_VALUE_ARRAY ? v->next : NULL) {
    number |= mm_value_is(v, "number");
    integer |= mm_value_is(v, "integer");
  }
  const mm_value *own = mm_value_get(rest, "type");
  if (integer && !number && own && !mm_value_is(own, "integer"))
    return mm_schema_unserved(p, "not", " of the type integer next to other types"), NULL;
  const mm_value *others = other_types(p, type);
  return others ? mm_schema_both(p, rest, others) : NULL;
}

/* ---- dependentRequired and dependentSchemas ---- */

/* {name: {key: value}}, or {name: [value]} for a NULL key of no bytes. */
static const mm_value *keyword_of(mm_schema_compiler *p, const char *name, const char *key, size_t n, const mm_value *value) {
  made inner, outer;
  if (!begin(p, key ? MM_VALUE_OBJECT : MM_VALUE_ARRAY, &inner) || !put(p, &inner, value, key ? key : "")) return NULL;
  inner.last->key_n = n;
  return begin(p, MM_VALUE_OBJECT, &outer) && put(p, &outer, inner.value, name) ? outer.value : NULL;
}

/* What holds where the key is there. */
static const mm_value *with_key(mm_schema_compiler *p, const mm_value *entry, bool schemas) {
  const mm_value key = {.type = MM_VALUE_STRING, .text = entry->key, .n = entry->key_n, .raw = ""};
  const mm_value *required = keyword_of(p, "required", NULL, 0, &key);
  made more;
  if (!required || schemas) return required ? all_of(p, required, entry) : NULL;
  if (entry->type != MM_VALUE_ARRAY) return mm_schema_wrong(p, "dependentRequired: expected lists of keys"), NULL;
  return begin(p, MM_VALUE_OBJECT, &more) && put(p, &more, entry, "required") ? all_of(p, required, more.value) : NULL;
}

static bool requires_key(const mm_value *schema, const mm_value *entry) {
  const mm_value *list = mm_value_get(schema, "required");
  for (const mm_value *v = list ? list->first : NULL; v; v = v->next)
    if (v->type == MM_VALUE_STRING && v->n == entry->key_n && memcmp(v->text, entry->key, v->n) == 0) return true;
  return false;
}

const mm_value *mm_schema_apply_dependent(mm_schema_compiler *p, const mm_value *schema, const mm_value *member) {
  static const mm_value none = {.type = MM_VALUE_BOOL, .text = "", .raw = "false", .raw_n = 5};
  const mm_value *entry = member->first, *out = mm_schema_without(p, schema, member->key);
  made rest, list, choice;
  if (!out || (member->type == MM_VALUE_OBJECT && !entry)) return out;
  if (member->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "dependentRequired, dependentSchemas: expected an object"), NULL;
  if (!spend(p, member->count) || !begin(p, MM_VALUE_OBJECT, &rest)) return NULL;
  for (const mm_value *v = entry->next; v; v = v->next)
    if (!put(p, &rest, v, NULL)) return NULL;
  const bool schemas = key_is(member, "dependentSchemas"), needed = requires_key(out, entry);
  const bool never = entry->type == MM_VALUE_BOOL && !entry->truth;
  const mm_value *without = needed ? &none : keyword_of(p, "properties", entry->key, entry->key_n, &none),
                 *with = never ? &none : with_key(p, entry, schemas);
  if (!without || !with || !begin(p, MM_VALUE_ARRAY, &list) || !put(p, &list, without, "") || !put(p, &list, with, "")) return NULL;
  if (!begin(p, MM_VALUE_OBJECT, &choice)) return NULL;
  for (const mm_value *v = out->first; v; v = v->next)
    if (!put(p, &choice, v, NULL)) return NULL;
  if (rest.value->count && !put(p, &choice, rest.value, member->key)) return NULL;
  return put(p, &choice, list.value, "anyOf") ? choice.value : NULL;
}

/* ---- $ref and allOf ---- */

static bool only_annotations(const mm_value *schema, const char *keyword) {
  for (const mm_value *m = schema->first; m; m = m->next)
    if (!key_is(m, keyword) && !mm_schema_is_annotation(m->key)) return false;
  return true;
}

/* Both, where either may be true, which says nothing. */
static const mm_value *join(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  if (!b) return NULL;
  if (b->type == MM_VALUE_BOOL && b->truth) return a;
  if (b->type == MM_VALUE_BOOL) return mm_schema_wrong(p, "found the schema false, which no value fits"), NULL;
  if (b->type != MM_VALUE_OBJECT) return mm_schema_wrong(p, "found something else than an object as a schema"), NULL;
  if (!sees_all(p, b)) return NULL;
  return only_annotations(a, "") ? b : mm_schema_both(p, a, b);
}

/* The schema itself without the keyword, and what the keyword leads to. */
static const mm_value *merge(mm_schema_compiler *p, const mm_value *schema, const mm_value *reference, const mm_value *all) {
  const mm_value *out = mm_schema_without(p, schema, reference ? "$ref" : "allOf");
  if (out && !reference && mm_value_get(out, "allOf")) return mm_schema_wrong(p, "allOf: stands there twice"), NULL;
  if (out && reference) {
    const mm_value *target = mm_schema_follow(p, reference);
    out = target ? join(p, out, mm_schema_plain(p, target)) : NULL;
  }
  for (const mm_value *v = all && !reference ? all->first : NULL; v && out; v = v->next) out = join(p, out, mm_schema_plain(p, v));
  return out ? mm_schema_plain(p, out) : NULL;
}

const mm_value *mm_schema_plain(mm_schema_compiler *p, const mm_value *schema) {
  for (int i = 0; i < 32; i++) {
    if (schema->type != MM_VALUE_OBJECT) return schema;
    const mm_value *reference = mm_value_get(schema, "$ref"), *all = mm_value_get(schema, "allOf");
    if (!reference && !all) return schema;
    if (all && (all->type != MM_VALUE_ARRAY || !all->count)) return mm_schema_wrong(p, "allOf: expected a list of schemas"), NULL;
    const bool one = !reference && all->count == 1 && only_annotations(schema, "allOf");
    if (one || (reference && only_annotations(schema, "$ref"))) {
      schema = one ? all->first : mm_schema_follow(p, reference);
      if (!schema) return NULL;
      continue;
    }
    for (size_t k = 0; k < p->merged_count; k++) {
      if (p->merged[k].schema != schema) continue;
      return p->merged[k].open ? (mm_schema_unserved(p, reference ? "$ref" : "allOf", " of a schema to itself"), NULL) : p->merged[k].plain;
    }
    if (p->merge_depth == MM_SCHEMA_DEPTH)
      return mm_schema_too_many(p, "schemas within each other", MM_SCHEMA_DEPTH + 1, MM_SCHEMA_DEPTH), NULL;
    if (p->merged_count == MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", MM_SCHEMAS_MAX + 1, MM_SCHEMAS_MAX), NULL;
    if (!MM_GROW(p->merged, &p->merged_cap, p->merged_count + 1, p->err)) return NULL;
    const size_t place = p->merged_count++;
    p->merged[place] = (mm_schema_merged){.schema = schema, .open = true};
    p->merge_depth++;
    const mm_value *plain = merge(p, schema, reference, all);
    p->merge_depth--;
    p->merged[place].plain = plain;
    p->merged[place].open = false;
    return plain;
  }
  return NULL;
}
