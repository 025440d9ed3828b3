/* Required fields of JSON documents, with one error line each, and the words in which a line shows a value. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define ENTRIES 8 /* of a list or an object that are shown; of more their number */

const char *mm_json_shown(const mm_json *j, char out[MM_JSON_SHOWN]) {
  static const char *const name[] = {"null", "a boolean", "an integer", "a real number", "a string", "a list", "an object"};
  const mm_json_type t = mm_json_type_of(j);
  char *text = NULL;
  if (j && mm_json_size(j) <= ENTRIES && mm_json_str_len(j) < MM_JSON_SHOWN) text = mm_json_dump(j, false);
  if (text && strlen(text) < MM_JSON_SHOWN)
    snprintf(out, MM_JSON_SHOWN, "%s", text);
  else if (t == MM_JSON_ARR || t == MM_JSON_OBJ)
    snprintf(out, MM_JSON_SHOWN, "%s of %zu", name[t], mm_json_size(j));
  else
    snprintf(out, MM_JSON_SHOWN, "%s", j ? name[t] : "nothing");
  free(text);
  return out;
}

static const char *type_name(mm_json_type t) {
  static const char *const name[] = {"null", "a boolean", "an integer", "a real number", "a string", "an array", "an object"};
  return name[t];
}

static bool wrong_type(const mm_json *found, const char *key, const char *expected, const mm_json_ctx *c, mm_err *err) {
  const char *what = found ? type_name(mm_json_type_of(found)) : "nothing";
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found %s, expected %s", key, what, expected);
}

const mm_json *mm_json_need(const mm_json *obj, const char *key, mm_json_type type, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_get(obj, key);
  if (j && mm_json_type_of(j) == type) return j;
  wrong_type(j, key, type_name(type), c, err);
  return NULL;
}

bool mm_json_need_int(const mm_json *obj, const char *key, int64_t lo, int64_t hi, int64_t *out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_INT, c, err);
  if (!j) return false;
  *out = mm_json_int(j);
  if (*out >= lo && *out <= hi) return true;
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found %lld, expected %lld to %lld", key, (long long)*out,
                 (long long)lo, (long long)hi);
}

bool mm_json_need_number(const mm_json *obj, const char *key, double *out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_get(obj, key);
  if (mm_json_type_of(j) != MM_JSON_INT && mm_json_type_of(j) != MM_JSON_REAL) return wrong_type(j, key, "a number", c, err);
  *out = mm_json_number(j);
  return true;
}

bool mm_json_need_bool(const mm_json *obj, const char *key, bool *out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_BOOL, c, err);
  if (!j) return false;
  *out = mm_json_bool(j);
  return true;
}

/* The caller gets no length, so a NUL inside would cut the string unseen. */
bool mm_json_need_str(const mm_json *obj, const char *key, const char **out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_STR, c, err);
  if (!j) return false;
  *out = mm_json_str(j);
  if (strlen(*out) == mm_json_str_len(j)) return true;
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found a string with a NUL character, expected text", key);
}

bool mm_json_only_keys(const mm_json *obj, const char *const *keys, const mm_json_ctx *c, mm_err *err) {
  void *iter = NULL;
  const char *key;
  const mm_json *value;
  const char *const *next = keys; /* most objects have their keys in the order of the list */
  while (mm_json_next(obj, &iter, &key, &value)) {
    const char *const *k = *next && strcmp(*next, key) == 0 ? next : keys;
    while (*k && strcmp(*k, key) != 0) k++;
    next = *k ? k + 1 : keys;
    if (*k) continue;
    char known[1024] = "";
    size_t n = 0;
    for (k = keys; *k && n < sizeof known; k++) n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", k == keys ? "" : ", ", *k);
    return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "found unknown key \"%s\", expected none but %s", MM_ESCAPED(256, key),
                   known);
  }
  return true;
}

mm_json *mm_json_new_path(const char *path) {
  mm_json *j = mm_json_new_str(path);
  return j || !path ? j : mm_json_new_str(MM_ESCAPED(4 * 4096 + 1, path)); /* of PATH_MAX bytes, each as \xNN */
}

/* Comparing */

static size_t given(const mm_json *obj) { /* members that are no null */
  size_t n = 0;
  void *at = NULL;
  const char *key;
  for (const mm_json *value; mm_json_next(obj, &at, &key, &value);) n += mm_json_type_of(value) != MM_JSON_NULL;
  return n;
}

static bool same_members(const mm_json *a, const mm_json *b) {
  void *at = NULL;
  const char *key;
  for (const mm_json *value; mm_json_next(a, &at, &key, &value);)
    if (!mm_json_same(value, mm_json_get(b, key))) return false;
  return given(a) == given(b);
}

bool mm_json_same(const mm_json *a, const mm_json *b) {
  const mm_json_type type = mm_json_type_of(a), other = mm_json_type_of(b);
  if (type == MM_JSON_REAL || (type == MM_JSON_INT && other == MM_JSON_REAL))
    return (other == MM_JSON_INT || other == MM_JSON_REAL) && mm_json_number(a) == mm_json_number(b);
  if (type != other) return false;
  switch (type) {
    case MM_JSON_BOOL: return mm_json_bool(a) == mm_json_bool(b);
    case MM_JSON_INT: return mm_json_int(a) == mm_json_int(b);
    case MM_JSON_STR: return mm_json_str_len(a) == mm_json_str_len(b) && memcmp(mm_json_str(a), mm_json_str(b), mm_json_str_len(a)) == 0;
    case MM_JSON_OBJ: return same_members(a, b);
    default: break;
  }
  for (size_t i = 0; i < mm_json_size(a); i++)
    if (!mm_json_same(mm_json_at(a, i), mm_json_at(b, i))) return false;
  return mm_json_size(a) == mm_json_size(b);
}
