/* Schemas that are made while others are merged: objects and lists of members that are copied. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/constrain/decimal.h"
#include "runtime/constrain/schema_inside.h"

const mm_value mm_schema_true = {.type = MM_VALUE_BOOL, .truth = true, .text = "", .raw = "true", .raw_n = 4};
const mm_value mm_schema_false = {.type = MM_VALUE_BOOL, .text = "", .raw = "false", .raw_n = 5};

bool mm_schema_is_true(const mm_value *v) { return v && v->type == MM_VALUE_BOOL && v->truth; }
bool mm_schema_is_false(const mm_value *v) { return v && v->type == MM_VALUE_BOOL && !v->truth; }

bool mm_schema_begin(mm_schema_compiler *p, mm_value_type type, mm_schema_made *out) {
  *out = (mm_schema_made){.value = mm_arena_alloc(p->arena, sizeof *out->value, p->err)};
  if (!out->value) return false;
  *out->value = (mm_value){.type = type, .text = "", .raw = ""};
  return true;
}

mm_value *mm_schema_put(mm_schema_compiler *p, mm_schema_made *m, const mm_value *member, const char *key) {
  mm_value *copy = mm_arena_alloc(p->arena, sizeof *copy, p->err);
  if (!copy) return NULL;
  *copy = *member;
  copy->next = NULL;
  if (key) copy->key = key, copy->key_n = strlen(key);
  if (m->last)
    m->last->next = copy;
  else
    m->value->first = copy;
  m->last = copy;
  m->value->count++;
  return copy;
}

bool mm_schema_spend(mm_schema_compiler *p, uint64_t members) {
  p->merging += members + 1;
  return p->merging <= MM_SCHEMA_MERGED ||
         mm_schema_too_many(p, "keywords and properties of schemas that hold together", p->merging, MM_SCHEMA_MERGED);
}

const mm_value *mm_schema_of(mm_schema_compiler *p, const char *key, const mm_value *value) {
  mm_schema_made object;
  return value && mm_schema_spend(p, 1) && mm_schema_begin(p, MM_VALUE_OBJECT, &object) && mm_schema_put(p, &object, value, key)
             ? object.value
             : NULL;
}

const mm_value *mm_schema_list_of(mm_schema_compiler *p, const char *key, const mm_value *a, const mm_value *b) {
  mm_schema_made list;
  if (!a || !mm_schema_begin(p, MM_VALUE_ARRAY, &list) || !mm_schema_put(p, &list, a, "")) return NULL;
  return !b || mm_schema_put(p, &list, b, "") ? mm_schema_of(p, key, list.value) : NULL;
}

const mm_value *mm_schema_all_of(mm_schema_compiler *p, const mm_value *a, const mm_value *b) {
  if (!a || !b) return NULL;
  if (mm_schema_is_true(a) || mm_schema_is_false(b)) return b;
  if (mm_schema_is_true(b) || mm_schema_is_false(a)) return a;
  return mm_schema_list_of(p, "allOf", a, b);
}

mm_value *mm_schema_find(const mm_value *object, const mm_value *like) {
  for (const mm_value *m = object ? object->first : NULL; m; m = m->next)
    if (m->key_n == like->key_n && memcmp(m->key, like->key, m->key_n) == 0) return (mm_value *)(uintptr_t)m; /* made here */
  return NULL;
}

const mm_value *mm_schema_without(mm_schema_compiler *p, const mm_value *schema, const mm_value *member) {
  mm_schema_made out;
  if (!mm_schema_spend(p, schema->count) || !mm_schema_begin(p, MM_VALUE_OBJECT, &out)) return NULL;
  for (const mm_value *m = schema->first; m; m = m->next)
    if (m != member && !mm_value_key_is(m, "$id") && !mm_schema_put(p, &out, m, NULL)) return NULL;
  return out.value;
}

int mm_schema_compare_exact(const mm_value *a, const mm_value *b) { return mm_decimal_compare(a->text, a->n, b->text, b->n); }

/* The number is written as a whole one. */
static bool is_whole(const mm_value *v) {
  for (size_t i = 0; i < v->n; i++)
    if (strchr(".eE", v->text[i])) return false;
  return true;
}

bool mm_schema_whole_alike(const mm_value *v) {
  const double x = mm_value_real(v);
  char text[32];
  if (is_whole(v) || x < -0x1p63 || x > 0x1p63 || floor(x) != x) return true; /* the whole numbers next to it are doubles */
  return mm_decimal_compare(v->text, v->n, text, (size_t)snprintf(text, sizeof text, "%.0f", x)) == 0;
}

int mm_schema_compare_read(const mm_value *a, const mm_value *b) {
  const double x = mm_value_real(a), y = mm_value_real(b);
  const bool whole = is_whole(a), other = is_whole(b);
  if (x != y || x - y != 0 || (!whole && !other)) return (x > y) - (x < y); /* infinite ones are equal */
  if (whole && other) return mm_schema_compare_exact(a, b);
  char text[400]; /* of the one that is a double, which is a whole number too, or 0 */
  const size_t n = (size_t)snprintf(text, sizeof text, "%.0f", x);
  return whole ? mm_decimal_compare(a->text, a->n, text, n) : mm_decimal_compare(text, n, b->text, b->n);
}

/* So few digits that another number of as few is read as another one. */
static bool is_short(const mm_value *v) { return v->n <= 15 && !memchr(v->text, 'e', v->n) && !memchr(v->text, 'E', v->n); }

/* Numbers: by their digits, as ids of 64 bits differ, and as they are read, as 1e23 is another one than that whole number; if not `exact`,
 * by one of the two. */
static bool equal_numbers(mm_schema_compiler *p, const mm_value *a, const mm_value *b, bool exact) {
  const size_t digits = a->n + b->n;
  if (digits > 40 && !mm_schema_spend(p, digits / 64)) return false;
  if (mm_schema_compare_exact(a, b) == 0) return !exact || mm_schema_compare_read(a, b) == 0;
  return !exact && !(is_short(a) && is_short(b)) && mm_schema_spend(p, 0) && mm_schema_compare_read(a, b) == 0;
}

static bool equal(mm_schema_compiler *p, const mm_value *a, const mm_value *b, bool exact) {
  if (a->type != b->type) return false;
  switch (a->type) {
    case MM_VALUE_NULL: return true;
    case MM_VALUE_BOOL: return a->truth == b->truth;
    case MM_VALUE_NUMBER: return equal_numbers(p, a, b, exact);
    case MM_VALUE_STRING: return a->n == b->n && memcmp(a->text, b->text, a->n) == 0;
    default: break;
  }
  if (a->count != b->count || !mm_schema_spend(p, a->count / 64)) return false;
  const mm_value *y = b->first;
  for (const mm_value *x = a->first; x; x = x->next, y = y->next) {
    const bool here = a->type == MM_VALUE_ARRAY || (x->key_n == y->key_n && memcmp(x->key, y->key, x->key_n) == 0);
    if (!here && !mm_schema_spend(p, b->count / 64)) return false;
    const mm_value *other = here ? y : mm_schema_find(b, x);
    if (!other || !equal(p, x, other, exact)) return false;
  }
  return true;
}

bool mm_schema_same(mm_schema_compiler *p, const mm_value *a, const mm_value *b) { return equal(p, a, b, true); }
bool mm_schema_may_equal(mm_schema_compiler *p, const mm_value *a, const mm_value *b) { return equal(p, a, b, false); }

bool mm_schema_in_list(mm_schema_compiler *p, const mm_value *v, const mm_value *member, bool list) {
  bool alike = false;
  for (const mm_value *w = list ? member->first : member; w; w = list ? w->next : NULL) {
    if (!mm_schema_may_equal(p, v, w)) continue;
    if (mm_schema_same(p, v, w)) return true;
    alike = true;
  }
  if (alike) p->narrowed = p->partial = true, p->fault.beyond = member->key; /* one reader finds it there, another does not */
  return false;
}

const mm_value *mm_schema_whole(mm_schema_compiler *p, int64_t n) {
  char text[24];
  mm_value *v = mm_arena_alloc(p->arena, sizeof *v, p->err);
  const int length = snprintf(text, sizeof text, "%lld", (long long)n);
  const char *copy = v ? mm_arena_strndup(p->arena, text, (size_t)length, p->err) : NULL;
  if (!copy) return NULL;
  *v = (mm_value){.type = MM_VALUE_NUMBER, .text = copy, .n = (size_t)length, .raw = copy, .raw_n = (size_t)length};
  return v;
}
