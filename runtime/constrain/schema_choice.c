/* Alternatives of a value (anyOf, oneOf, lists of types). Alternatives that begin with the same byte become one form where possible, else a
 * union, whose members are followed side by side. */
#include <stdlib.h>
#include <string.h>

#include "runtime/constrain/schema_inside.h"

int mm_schema_first(char c) {
  static const char first[] = "{[\"-tfn";
  const char *p = c >= '0' && c <= '9' ? first + MM_FIRST_NUMBER : strchr(first, c);
  return (int)(p - first);
}

/* Literals of this choice alone that begin so, with room for `more`. Room grows twofold, so that all literals are copied once or twice. */
mm_form *mm_schema_own_literals(mm_schema_compiler *p, mm_schema_choice *b, int first, uint32_t more) {
  const mm_form *now = b->form->by_first[first];
  const uint32_t count = now ? now->count : 0;
  mm_form *s = b->own[first];
  if (count + more > MM_LITERALS) return mm_schema_too_many(p, "values in one choice", count + more, MM_LITERALS), NULL;
  if (!s) p->copied += count;
  if (now && (p->copied += more) > MM_SCHEMA_COPIES)
    return mm_schema_too_many(p, "values of enum in alternatives of alternatives", p->copied, MM_SCHEMA_COPIES), NULL;
  if (s && b->capacity[first] - count >= more) return s;
  const uint32_t capacity = now ? 2 * (count + more) : more;
  mm_literal *l = mm_arena_alloc(p->arena, capacity * sizeof *l, p->err);
  if (!s) s = mm_arena_alloc(p->arena, sizeof *s, p->err);
  if (!s || !l) return NULL;
  if (now) memcpy(l, now->literal, count * sizeof *l);
  *s = (mm_form){.kind = MM_FORM_LITERALS, .literal = l, .count = count};
  b->capacity[first] = capacity;
  b->form->by_first[first] = s;
  return b->own[first] = s;
}

/* ---- Alternatives that begin alike ---- */

static bool is_any_string(const mm_form *s) { return s->kind == MM_FORM_STRING && !s->least && s->most == UINT32_MAX; }

static bool is_text(const mm_form *s) {
  if (s->kind == MM_FORM_LITERALS) return mm_schema_first(s->literal[0].p[0]) == MM_FIRST_STRING;
  return s->kind == MM_FORM_STRING || s->kind == MM_FORM_AUTOMATON;
}

/* Every value of `one` is one of `all`. */
static bool is_within(const mm_form *one, const mm_form *all) {
  if (one == all || (is_any_string(all) && is_text(one))) return true;
  if (all->kind == MM_FORM_NUMBER) return one->kind == MM_FORM_INTEGER || one->kind == MM_FORM_NUMBER || one->kind == MM_FORM_DECIMAL;
  if (all->kind == MM_FORM_INTEGER) return one->kind == MM_FORM_INTEGER || (one->kind == MM_FORM_DECIMAL && !one->decimal->places);
  return all == mm_schema_any_object() && (one->kind == MM_FORM_OBJECT || one->kind == MM_FORM_MAP);
}

static bool add_alternative(mm_schema_compiler *p, mm_form *all, const mm_form *s) {
  for (uint32_t i = 0; i < all->count; i++)
    if (all->literal[i].value == s) return true;
  if (all->count == MM_GRAMMAR_STACKS) return mm_schema_unserved(p, p->keyword, ": more than 32 alternatives begin alike");
  all->literal[all->count++].value = s;
  return true;
}

/* Adds the alternatives of a union, or a form as one. */
static bool add_alternatives(mm_schema_compiler *p, mm_form *all, const mm_form *s) {
  if (s->kind != MM_FORM_UNION) return add_alternative(p, all, s);
  for (uint32_t i = 0; i < s->count; i++)
    if (!add_alternative(p, all, s->literal[i].value)) return false;
  return true;
}

static bool add_to_union(mm_schema_compiler *p, mm_schema_choice *b, int first, const mm_form *more) {
  const mm_form *now = b->form->by_first[first];
  mm_form *all = b->own[first];
  if (now->kind != MM_FORM_UNION || all != now) {
    all = mm_arena_alloc(p->arena, sizeof *all, p->err);
    mm_literal *l = mm_arena_alloc(p->arena, MM_GRAMMAR_STACKS * sizeof *l, p->err);
    if (!all || !l) return false;
    if (b->own[first] && now->kind == MM_FORM_LITERALS) mm_literals_sort(b->own[first]);
    *all = (mm_form){.kind = MM_FORM_UNION, .literal = l};
    if (!add_alternatives(p, all, now)) return false;
    b->own[first] = all;
    b->form->by_first[first] = all;
  }
  return add_alternatives(p, all, more);
}

/* Two forms that begin alike as one. */
static bool unite(mm_schema_compiler *p, mm_schema_choice *b, int first, const mm_form *more) {
  const mm_form *now = b->form->by_first[first];
  if (is_within(more, now)) return true;
  if (is_within(now, more)) return b->form->by_first[first] = more, true;
  if (now->kind != MM_FORM_LITERALS || more->kind != MM_FORM_LITERALS) return add_to_union(p, b, first, more);
  mm_form *s = mm_schema_own_literals(p, b, first, more->count);
  if (!s) return false;
  memcpy(s->literal + s->count, more->literal, more->count * sizeof *s->literal);
  s->count += more->count;
  return true;
}

static bool add_first(mm_schema_compiler *p, mm_schema_choice *b, int first, const mm_form *s) {
  if (b->form->by_first[first]) return unite(p, b, first, s);
  b->form->by_first[first] = s;
  return true;
}

static int first_of(const mm_form *s) {
  switch (s->kind) {
    case MM_FORM_OBJECT:
    case MM_FORM_MAP: return MM_FIRST_OBJECT;
    case MM_FORM_ARRAY: return MM_FIRST_ARRAY;
    case MM_FORM_STRING:
    case MM_FORM_AUTOMATON: return MM_FIRST_STRING;
    case MM_FORM_LITERALS: return mm_schema_first(s->literal[0].p[0]);
    default: return MM_FIRST_NUMBER;
  }
}

int mm_schema_first_of(const mm_form *s) { return first_of(s->kind == MM_FORM_UNION ? s->literal[0].value : s); }

bool mm_schema_add(mm_schema_compiler *p, mm_schema_choice *b, const mm_form *s) {
  if (s->kind != MM_FORM_CHOICE) return add_first(p, b, mm_schema_first_of(s), s);
  for (int i = 0; i < MM_FIRSTS; i++)
    if (s->by_first[i] && !add_first(p, b, i, s->by_first[i])) return false;
  return true;
}

/* The choice is complete. */
void mm_schema_end_choice(mm_schema_choice *b) {
  for (int i = 0; i < MM_FIRSTS; i++)
    if (b->own[i] && b->own[i]->kind == MM_FORM_LITERALS) mm_literals_sort(b->own[i]);
}

/* ---- Alternatives of which one alone may hold ---- */

/* How values of a form begin, a bit for each. */
static unsigned beginnings(const mm_form *s) {
  unsigned all = 0;
  if (s->kind != MM_FORM_CHOICE) return 1u << mm_schema_first_of(s);
  for (int i = 0; i < MM_FIRSTS; i++) all |= s->by_first[i] ? 1u << i : 0;
  return all;
}

/* True if values may fit the schema that are of none of its form's types, or of its form's literals: because of a condition. */
static bool is_conditional(mm_schema_compiler *p, const mm_value *schema, unsigned depth) {
  static const char *const conditions[] = {"not", "if", "dependentRequired", "dependentSchemas"};
  const mm_value *v = mm_schema_plain(p, schema);
  if (!v && mm_schema_forget_none(p)) return false; /* an alternative that no value fits is left out */
  if (!v || depth == MM_SCHEMA_DEPTH || !mm_schema_spend(p, v->count)) return true;
  bool values = false, others = false;
  for (const mm_value *m = v->first; m; m = m->next) {
    for (size_t i = 0; i < sizeof conditions / sizeof *conditions; i++)
      if (mm_value_key_is(m, conditions[i])) return true;
    const bool one = mm_value_key_is(m, "enum") || mm_value_key_is(m, "const"), list = m->key[0] == 'a' || m->key[0] == 'o';
    others |= (one && values) || (!one && !mm_value_key_is(m, "type") && !mm_schema_is_annotation(m));
    values |= one;
    if (!list || (!mm_value_key_is(m, "anyOf") && !mm_value_key_is(m, "oneOf"))) continue;
    for (const mm_value *a = m->first; a; a = a->next)
      if (is_conditional(p, a, depth + 1)) return true;
  }
  return values && others;
}

/* True if the schema names the types of its values. Values of other types may fit a schema without types, though none is generated. */
static bool has_types(mm_schema_compiler *p, const mm_value *schema, unsigned depth) {
  const mm_value *v = mm_schema_plain(p, schema);
  if (!v && mm_schema_forget_none(p)) return true;
  if (!v || v->type != MM_VALUE_OBJECT || depth == MM_SCHEMA_DEPTH || !mm_schema_spend(p, v->count)) return false;
  for (const mm_value *m = v->first; m; m = m->next)
    if (mm_value_key_is(m, "type") || mm_value_key_is(m, "enum") || mm_value_key_is(m, "const")) return true;
  const mm_value *list = mm_value_get(v, "anyOf");
  if (!list) list = mm_value_get(v, "oneOf");
  if (!list) return false;
  for (const mm_value *m = list->first; m; m = m->next)
    if (!has_types(p, m, depth + 1)) return false;
  return true;
}

/* True if no value fits the schema that is of other types, or other than the literals, of its form. */
static bool names_types(mm_schema_compiler *p, const mm_value *schema) { return has_types(p, schema, 0) && !is_conditional(p, schema, 0); }

/* A value of enum or const, of one of the alternatives. */
typedef struct owned {
  const mm_value *value;
  size_t owner;
} owned;

static int compare_read(const void *a, const void *b) {
  const owned *x = a, *y = b;
  return mm_schema_compare_read(x->value, y->value);
}

static int compare_exact(const void *a, const void *b) {
  const owned *x = a, *y = b;
  if (x->value->type == MM_VALUE_NUMBER) return mm_schema_compare_exact(x->value, y->value);
  const int order = memcmp(x->value->text, y->value->text, mm_min(x->value->n, y->value->n));
  return order ? order : (x->value->n > y->value->n) - (x->value->n < y->value->n);
}

/* The form of the values that begin so. */
static const mm_form *form_of(const mm_form *s, int first) { return s->kind == MM_FORM_CHOICE ? s->by_first[first] : s; }

/* The literals of a form that begin so; NULL: it has others. */
static const mm_form *literals_of(const mm_form *s, int first) {
  s = form_of(s, first);
  return s && s->kind == MM_FORM_LITERALS ? s : NULL;
}

/* Sorts the values. Returns true if none is of two owners. */
static bool have_one_owner(owned *v, size_t n, int (*order)(const void *, const void *)) {
  qsort(v, n, sizeof *v, order);
  for (size_t i = 1; i < n; i++)
    if (v[i - 1].owner != v[i].owner && order(&v[i - 1], &v[i]) == 0) return false;
  return true;
}

/* Sets *differ: no value is in the literals of two alternatives. Numbers that are read as the same count as one, though they differ. */
static bool values_differ(mm_schema_compiler *p, const mm_form *const *all, size_t count, int first, bool *differ) {
  size_t n = 0, most = 0;
  for (size_t i = 0; i < count; i++)
    if (beginnings(all[i]) & 1u << first) most += literals_of(all[i], first)->count;
  if ((p->copied += most) > MM_SCHEMA_COPIES)
    return mm_schema_too_many(p, "values of enum in alternatives of alternatives", p->copied, MM_SCHEMA_COPIES);
  owned *v = mm_arena_alloc(p->arena, most * sizeof *v, p->err);
  if (!v) return false;
  for (size_t i = 0; i < count; i++) {
    const mm_form *s = beginnings(all[i]) & 1u << first ? literals_of(all[i], first) : NULL;
    for (uint32_t k = 0; s && k < s->count; k++) {
      const mm_value *value = mm_body_parse(p->arena, s->literal[k].p, s->literal[k].n, p->err);
      if (!value || (value->n > 64 && !mm_schema_spend(p, value->n / 8))) return false; /* they are compared with several */
      v[n++] = (owned){value, i};
    }
  }
  *differ = have_one_owner(v, n, compare_exact) && (first != MM_FIRST_NUMBER || have_one_owner(v, n, compare_read));
  return true;
}

bool mm_schema_forms_differ(mm_schema_compiler *p, const mm_form *x, const mm_form *y, bool *differ) {
  const mm_form *const both[2] = {x, y};
  *differ = false;
  if (!x || !y || mm_schema_is_open(p, x) || mm_schema_is_open(p, y)) return true;
  for (size_t i = 0; i < p->count; i++)
    if ((p->done[i].form == x || p->done[i].form == y) && (p->done[i].partial || !names_types(p, p->done[i].schema)))
      return p->err->status == MM_OK;
  const unsigned common = beginnings(x) & beginnings(y);
  for (int first = 0; first < MM_FIRSTS; first++) {
    if (!(common & 1u << first)) continue;
    const bool values = first == MM_FIRST_STRING || first == MM_FIRST_NUMBER;
    if (!values || !literals_of(x, first) || !literals_of(y, first)) return true;
    if (!values_differ(p, both, 2, first, differ) || !*differ) return p->err->status == MM_OK;
  }
  return *differ = true;
}

/* Sets *differ: an object of x is none of y, because of a key that x requires: y refuses it, or its values differ. An object of y is none
 * of x then. */
static bool objects_differ(mm_schema_compiler *p, const mm_form *x, const mm_form *y, bool *differ) {
  *differ = false;
  if (x->kind != MM_FORM_OBJECT || y->kind != MM_FORM_OBJECT) return true;
  if ((p->merging += (uint64_t)x->count * y->count / 64) > MM_SCHEMA_MERGED)
    return mm_schema_too_many(p, "properties of alternatives", p->merging, MM_SCHEMA_MERGED);
  for (uint32_t i = 0; i < x->count && !*differ; i++) {
    const mm_literal *mine = &x->literal[i], *theirs = NULL;
    for (uint32_t k = 0; k < y->count && mine->required && !theirs; k++)
      if (mm_literal_compare(mine, &y->literal[k]) == 0) theirs = &y->literal[k];
    if (!mine->required) continue;
    if (!theirs)
      *differ = y->closed;
    else if (!mm_schema_forms_differ(p, mine->value, theirs->value, differ))
      return false;
  }
  return true;
}

/* Every two of the objects differ. */
static bool all_objects_differ(mm_schema_compiler *p, const mm_form *const *all, size_t count) {
  const mm_form *object[MM_GRAMMAR_STACKS];
  size_t n = 0;
  for (size_t i = 0; i < count; i++) {
    if (!(beginnings(all[i]) & 1u << MM_FIRST_OBJECT)) continue;
    if (n == MM_GRAMMAR_STACKS) return mm_schema_unserved(p, "oneOf", ": more than 32 alternatives begin alike");
    object[n++] = form_of(all[i], MM_FIRST_OBJECT);
  }
  for (size_t i = 0; i < n; i++)
    for (size_t k = 0; k < i; k++) {
      bool differ = false;
      if (!objects_differ(p, object[i], object[k], &differ)) return false;
      if (!differ && !objects_differ(p, object[k], object[i], &differ)) return false;
      if (!differ) return mm_schema_unserved(p, "oneOf", ": two objects have no required key that distinguishes them");
    }
  return true;
}

/* No value fits two of the alternatives, all[i] of list[i]. */
static bool one_alone_fits(mm_schema_compiler *p, const mm_value *const *list, const mm_form *const *all, size_t count) {
  unsigned seen = 0, twice = 0;
  if (count == 1) return true;
  for (size_t i = 0; i < count; i++) {
    if (p->partial) return mm_schema_unserved(p, "oneOf", " with an alternative whose values are not all known");
    if (!names_types(p, list[i]))
      return p->err->status == MM_OK && mm_schema_unserved(p, "oneOf", " with an alternative that names no type");
    const unsigned now = beginnings(all[i]);
    twice |= seen & now;
    seen |= now;
  }
  if (twice & 1u << MM_FIRST_OBJECT && !all_objects_differ(p, all, count)) return false;
  for (int first = MM_FIRST_OBJECT + 1; first < MM_FIRSTS; first++) {
    bool differ = false;
    if (!(twice & 1u << first)) continue;
    const bool values = first == MM_FIRST_STRING || first == MM_FIRST_NUMBER;
    for (size_t i = 0; i < count; i++)
      if (beginnings(all[i]) & 1u << first && (!values || !literals_of(all[i], first)))
        return mm_schema_unserved(p, "oneOf", ": two alternatives begin alike");
    if (!values_differ(p, all, count, first, &differ)) return false;
    if (!differ) return mm_schema_unserved(p, "oneOf", ": two alternatives have a value in common");
  }
  return true;
}

/* ---- anyOf and oneOf ---- */

bool mm_schema_any_of(mm_schema_compiler *p, const mm_value **list, size_t count, const char *keyword, mm_form *out) {
  const mm_form **all = mm_arena_alloc(p->arena, count * sizeof *all, p->err);
  mm_schema_choice b = {.form = out};
  size_t n = 0;
  if (!all) return false;
  out->kind = MM_FORM_CHOICE;
  for (size_t i = 0; i < count; i++) { /* one that no value fits is left out */
    list[n] = list[i];
    if (!mm_schema_compile_value(p, list[i], &all[n])) {
      if (keyword[0] == 'o' ? !mm_schema_leave_out_one(p) : !mm_schema_forget_none(p)) return false;
      continue;
    }
    if (all[n]->kind == MM_FORM_CHOICE && mm_schema_is_open(p, all[n]))
      return mm_schema_unserved(p, "$ref", " from an alternative to what holds it");
    p->partial |= mm_schema_is_partial(p, all[n]);
    n++;
  }
  if (!n) return mm_schema_none(p, "anyOf, oneOf, if: no alternative is left");
  if (keyword[0] == 'o' && !one_alone_fits(p, list, all, n)) {
    p->overlap = p->err->status == MM_UNSUPPORTED;
    return false;
  }
  for (size_t i = 0; i < n; i++) {
    p->keyword = keyword;
    if (!mm_schema_add(p, &b, all[i])) return false;
  }
  mm_schema_end_choice(&b);
  return true;
}

bool mm_schema_choice_is_of(const mm_form *choice, unsigned firsts) {
  for (int i = 0; i < MM_FIRSTS; i++) {
    const mm_form *s = choice->by_first[i];
    const bool whole = s && (s->kind == MM_FORM_INTEGER || (s->kind == MM_FORM_DECIMAL && !s->decimal->places));
    if (s && (!(firsts & 1u << i) || (i == MM_FIRST_NUMBER && !(firsts & MM_SCHEMA_ANY_NUMBER) && !whole))) return false;
  }
  return true;
}
