/* The reader of clients' JSON: trees of what scan.h reads. */
#include "formats/body.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/scan.h"

typedef struct reader {
  mm_scan scan;
  mm_arena *arena;
  uint32_t values;
  mm_err *err;
} reader;

typedef struct member {
  mm_value *value;
  size_t place;
} member;

static int by_key(const void *a, const void *b) {
  const member *x = a, *y = b;
  const size_t n = x->value->key_n < y->value->key_n ? x->value->key_n : y->value->key_n;
  const int order = memcmp(x->value->key, y->value->key, n);
  if (order) return order;
  if (x->value->key_n != y->value->key_n) return x->value->key_n < y->value->key_n ? -1 : 1;
  return x->place < y->place ? -1 : x->place > y->place;
}

static bool same_key(const mm_value *a, const mm_value *b) { return a->key_n == b->key_n && memcmp(a->key, b->key, a->key_n) == 0; }

/* Unites members with equal keys: the first one takes the last one's value, and the others are removed. */
static bool unite_keys(reader *r, mm_value *object) {
  if (object->count < 2) return true;
  member *m = mm_calloc(object->count, sizeof *m, r->err);
  if (!m) return false;
  size_t count = 0;
  for (const mm_value *v = object->first; v; v = v->next, count++) m[count] = (member){(mm_value *)v, count};
  qsort(m, count, sizeof *m, by_key);
  bool twice = false;
  for (size_t i = 0, j; i < count; i = j) {
    for (j = i + 1; j < count && same_key(m[i].value, m[j].value); j++) m[j].value->key = NULL;
    if (j == i + 1) continue;
    mm_value *kept = m[i].value, copy = *kept;
    twice = true;
    *kept = *m[j - 1].value;
    kept->key = copy.key;
    kept->key_n = copy.key_n;
    kept->next = copy.next;
  }
  free(m);
  if (!twice) return true;
  object->repeats = true;
  const mm_value **link = &object->first;
  for (const mm_value *v = object->first; v; v = v->next) {
    if (!v->key) {
      object->count--;
      continue;
    }
    *link = v;
    link = &((mm_value *)v)->next;
  }
  *link = NULL;
  return true;
}

static bool read_value(reader *r, mm_value *v);

/* Recursion ends at the depth that mm_scan_open allows. */
static bool read_members(reader *r, mm_value *v) {
  const bool object = v->type == MM_VALUE_OBJECT;
  const mm_value **link = &v->first;
  mm_scan_str key;
  if (!mm_scan_open(&r->scan, object ? '{' : '[', r->err)) return false;
  for (bool first = true, more;; first = false) {
    if (!mm_scan_more(&r->scan, object ? '}' : ']', first, &more, r->err)) return false;
    if (!more) return !object || unite_keys(r, v);
    mm_value *m = mm_arena_alloc(r->arena, sizeof *m, r->err);
    if (!m || (object && !mm_scan_key(&r->scan, &key, r->err))) return false;
    if (object && !(m->key = mm_scan_unescape(r->arena, key, &m->key_n, r->err))) return false;
    if (!read_value(r, m)) return false;
    v->repeats |= m->repeats;
    *link = m;
    link = &m->next;
    v->count++;
  }
}

static bool read_value(reader *r, mm_value *v) {
  const char c = mm_scan_peek(&r->scan);
  const size_t from = r->scan.pos;
  mm_scan_str s = {0};
  bool ok, real;
  if (++r->values > MM_BODY_VALUES)
    return mm_fail(r->err, MM_LIMIT, "E_LIMIT", mm_at_offset("body", NULL, from), "found more than %u values", MM_BODY_VALUES);
  switch (c) {
    case '{':
    case '[':
      v->type = c == '{' ? MM_VALUE_OBJECT : MM_VALUE_ARRAY;
      ok = read_members(r, v);
      break;
    case '"':
      v->type = MM_VALUE_STRING;
      ok = mm_scan_string(&r->scan, &s, r->err) && (v->text = mm_scan_unescape(r->arena, s, &v->n, r->err));
      break;
    case 't':
    case 'f':
    case 'n':
      v->type = c == 'n' ? MM_VALUE_NULL : MM_VALUE_BOOL;
      v->truth = c == 't';
      ok = mm_scan_skip(&r->scan, r->err);
      break;
    default:
      v->type = MM_VALUE_NUMBER;
      ok = mm_scan_number(&r->scan, &s, &real, r->err);
      v->text = s.p;
      v->n = s.n;
  }
  v->raw = r->scan.text + from;
  v->raw_n = r->scan.pos - from;
  return ok;
}

const mm_value *mm_body_parse(mm_arena *a, const char *text, size_t n, mm_err *err) {
  reader r = {.scan = {.text = text, .len = n, .file = "body", .status = MM_BAD_INPUT, .python = true}, .arena = a, .err = err};
  mm_value *v = mm_arena_alloc(a, sizeof *v, err);
  if (n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) r.scan.pos = 3;
  return v && read_value(&r, v) && mm_scan_end(&r.scan, err) ? v : NULL;
}

/* ---- Looking at values ---- */

const mm_value *mm_value_get(const mm_value *object, const char *key) {
  if (!object || object->type != MM_VALUE_OBJECT) return NULL;
  for (const mm_value *v = object->first; v; v = v->next)
    if (mm_value_key_is(v, key)) return v->type == MM_VALUE_NULL ? NULL : v;
  return NULL;
}

bool mm_value_key_is(const mm_value *v, const char *key) { return v->key_n == strlen(key) && memcmp(v->key, key, v->key_n) == 0; }

char *mm_value_key_shown(const mm_value *v, char out[96]) { return mm_escape(out, 96, v->key, v->key_n); }

bool mm_value_is(const mm_value *v, const char *string) {
  return v && v->type == MM_VALUE_STRING && v->n == strlen(string) && memcmp(v->text, string, v->n) == 0;
}

double mm_value_real(const mm_value *number) {
  char text[400];
  if (number->n < sizeof text) {
    memcpy(text, number->text, number->n);
    text[number->n] = 0;
    return strtod(text, NULL);
  }
  char *long_text = strndup(number->text, number->n);
  const double x = long_text ? strtod(long_text, NULL) : NAN;
  free(long_text);
  return x;
}

bool mm_value_int(const mm_value *v, int64_t *out) {
  if (!v || v->type != MM_VALUE_NUMBER) return false;
  const size_t sign = v->text[0] == '-';
  bool plain = v->n > sign;
  uint64_t whole = 0;
  for (size_t i = sign; plain && i < v->n; i++) {
    plain = v->text[i] >= '0' && v->text[i] <= '9';
    if (plain && (!mm_mul(whole, 10, &whole) || !mm_add(whole, (uint64_t)(v->text[i] - '0'), &whole))) return false;
  }
  if (plain && whole > INT64_MAX + (uint64_t)sign) return false;
  if (plain) return *out = (int64_t)(sign ? 0 - whole : whole), true;
  const double x = mm_value_real(v);
  if (!(fabs(x) <= 9007199254740992.0) || x != floor(x)) return false;
  *out = (int64_t)x;
  return true;
}

/* ---- References ---- */

/* Text without the percent escapes of a URI; its length, SIZE_MAX: a "%" begins none. */
static size_t unescape_uri(const char *at, size_t n, char *out) {
  size_t len = 0;
  for (size_t i = 0; i < n; i++) {
    out[len++] = at[i];
    if (at[i] != '%') continue;
    if (n - i < 3 || mm_hex_digit(at[i + 1]) < 0 || mm_hex_digit(at[i + 2]) < 0) return SIZE_MAX;
    out[len - 1] = (char)(16 * mm_hex_digit(at[i + 1]) + mm_hex_digit(at[i + 2]));
    i += 2;
  }
  return len;
}

/* One step of a JSON pointer without its own escapes, in place; its length, SIZE_MAX: a "~" begins none. */
static size_t unescape_step(char *step, size_t n) {
  size_t len = 0;
  for (size_t i = 0; i < n; i++) {
    char c = step[i];
    if (c == '~') {
      if (++i == n || (step[i] != '0' && step[i] != '1')) return SIZE_MAX;
      c = step[i] == '0' ? '~' : '/';
    }
    step[len++] = c;
  }
  return len;
}

static const mm_value *step_into(const mm_value *v, const char *step, size_t n) {
  size_t place = 0;
  if (v->type == MM_VALUE_OBJECT) {
    for (const mm_value *m = v->first; m; m = m->next)
      if (m->key_n == n && memcmp(m->key, step, n) == 0) return m;
    return NULL;
  }
  if (v->type != MM_VALUE_ARRAY || !n || n > 9 || (n > 1 && *step == '0')) return NULL;
  for (size_t i = 0; i < n; i++) {
    if (step[i] < '0' || step[i] > '9') return NULL;
    place = 10 * place + (size_t)(step[i] - '0');
  }
  const mm_value *m = v->first;
  while (m && place--) m = m->next;
  return m;
}

const mm_value *mm_value_follow(const mm_value *root, const mm_value *reference) {
  char pointer[2048] = {0};
  if (!reference || reference->type != MM_VALUE_STRING || !reference->n || *reference->text != '#' || reference->n > sizeof pointer)
    return NULL;
  const size_t n = unescape_uri(reference->text + 1, reference->n - 1, pointer);
  if (n == SIZE_MAX) return NULL;
  char *at = pointer, *end = pointer + n;
  for (char *next; root && at < end; at = next) {
    if (*at++ != '/') return NULL;
    next = memchr(at, '/', (size_t)(end - at));
    if (!next) next = end;
    const size_t step = unescape_step(at, (size_t)(next - at));
    root = step == SIZE_MAX ? NULL : step_into(root, at, step);
  }
  return root;
}

const char *mm_value_word(const mm_value *v) {
  static const char *const word[] = {"null", "a boolean", "a number", "a string", "an array", "an object"};
  return v ? word[v->type] : "nothing";
}

const char *mm_value_shown(const mm_value *v, char out[128]) {
  if (!v || v->type != MM_VALUE_STRING) return mm_value_word(v);
  return strlen(v->text) == v->n ? v->text : mm_escape(out, 128, v->text, v->n);
}
