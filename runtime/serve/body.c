/* The reader of clients' JSON: one pass, recursion bounded by MM_BODY_DEPTH. */
#include "runtime/serve/body.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
  mm_arena *arena;
  const char *text;
  size_t n, at;
  uint32_t values;
  mm_err *err;
} reader;

static bool wrong(reader *r, const char *expected) {
  char found[64];
  const size_t left = r->n - r->at;
  mm_escape(found, sizeof found, r->text + r->at, left < 12 ? left : 12);
  return mm_fail(r->err, MM_BAD_INPUT, "E_JSON", mm_at_offset("body", NULL, r->at), "found %s%s%s, expected %s", left ? "\"" : "",
                 left ? found : "the end", left ? "\"" : "", expected);
}

static char peek(const reader *r) { return r->at < r->n ? r->text[r->at] : 0; }

static void skip_space(reader *r) {
  while (r->at < r->n && (r->text[r->at] == ' ' || r->text[r->at] == '\n' || r->text[r->at] == '\r' || r->text[r->at] == '\t')) r->at++;
}

/* ---- Strings ---- */

static bool hex4(const reader *r, size_t at, uint32_t *out) {
  *out = 0;
  if (at + 4 > r->n) return false;
  for (size_t i = at; i < at + 4; i++) {
    const char c = r->text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return false;
    *out = *out << 4 | (uint32_t)digit;
  }
  return true;
}

static size_t put_utf8(char *out, uint32_t c) {
  if (c < 0x80) {
    out[0] = (char)c;
    return 1;
  }
  const size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
  for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
  out[0] = (char)(lead[n] | c);
  return n;
}

/* After "\u": the character, its second half too. */
static bool read_unicode(reader *r, uint32_t *c) {
  uint32_t low;
  if (!hex4(r, r->at, c)) return wrong(r, "four hexadecimal digits");
  r->at += 4;
  const bool high = *c >= 0xd800 && *c < 0xdc00;
  if (high && r->at + 6 <= r->n && memcmp(r->text + r->at, "\\u", 2) == 0 && hex4(r, r->at + 2, &low) && low >= 0xdc00 && low < 0xe000) {
    *c = 0x10000 + ((*c - 0xd800) << 10) + (low - 0xdc00);
    r->at += 6;
  } else if (*c >= 0xd800 && *c < 0xe000) {
    *c = 0xfffd;
  }
  return true;
}

static bool read_escape(reader *r, char *out, size_t *n) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  const char c = peek(r);
  const char *p = c ? strchr(from, c) : NULL;
  uint32_t code;
  if (p) {
    r->at++;
    out[(*n)++] = to[p - from];
    return true;
  }
  if (c != 'u') return wrong(r, "an escape that JSON has");
  r->at++;
  if (!read_unicode(r, &code)) return false;
  *n += put_utf8(out + *n, code);
  return true;
}

/* The length between the quotes, escapes included. */
static bool string_length(reader *r, size_t *n) {
  for (*n = 0; r->at + *n < r->n; (*n)++) {
    const char c = r->text[r->at + *n];
    if (c == '"') return true;
    if (c == '\\') ++*n;
  }
  r->at = r->n;
  return wrong(r, "the end of a string");
}

static bool read_string(reader *r, const char **text, size_t *n) {
  size_t most;
  if (peek(r) != '"') return wrong(r, "a string");
  r->at++;
  if (!string_length(r, &most)) return false;
  char *out = mm_arena_alloc(r->arena, most + 1, r->err);
  if (!out) return false;
  *n = 0;
  while (peek(r) != '"') {
    const char c = peek(r);
    size_t len = 1;
    if (c == '\\') {
      r->at++;
      if (!read_escape(r, out, n)) return false;
      continue;
    }
    if ((uint8_t)c < 0x20) return wrong(r, "no control character in a string");
    if ((uint8_t)c >= 0x80 && !(len = mm_utf8_len(r->text + r->at, r->n - r->at))) return wrong(r, "UTF-8");
    memcpy(out + *n, r->text + r->at, len);
    *n += len;
    r->at += len;
  }
  r->at++;
  out[*n] = 0;
  *text = out;
  return true;
}

/* ---- Numbers and words ---- */

static size_t digits(reader *r) {
  const size_t from = r->at;
  while (peek(r) >= '0' && peek(r) <= '9') r->at++;
  return r->at - from;
}

static bool read_number(reader *r, mm_value *v) {
  const size_t from = r->at;
  if (peek(r) == '-') r->at++;
  const bool zero = peek(r) == '0';
  size_t whole = 1;
  if (zero)
    r->at++;
  else
    whole = digits(r);
  if (!whole) return wrong(r, "a value");
  const size_t end = r->at;
  if (peek(r) == '.') {
    r->at++;
    if (!digits(r)) r->at = end;
  }
  if (peek(r) == 'e' || peek(r) == 'E') {
    const size_t before = r->at++;
    if (peek(r) == '+' || peek(r) == '-') r->at++;
    if (!digits(r)) r->at = before;
  }
  v->type = MM_VALUE_NUMBER;
  v->text = r->text + from;
  v->n = r->at - from;
  return true;
}

static bool read_word(reader *r, mm_value *v) {
  static const struct {
    const char *word;
    mm_value_type type;
    bool truth;
  } words[] = {{"null", MM_VALUE_NULL, false},  {"true", MM_VALUE_BOOL, true},        {"false", MM_VALUE_BOOL, false},
               {"NaN", MM_VALUE_NUMBER, false}, {"Infinity", MM_VALUE_NUMBER, false}, {"-Infinity", MM_VALUE_NUMBER, false}};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    const size_t n = strlen(words[i].word);
    if (r->n - r->at < n || memcmp(r->text + r->at, words[i].word, n) != 0) continue;
    v->type = words[i].type;
    v->truth = words[i].truth;
    v->text = r->text + r->at;
    v->n = n;
    r->at += n;
    return true;
  }
  return read_number(r, v);
}

/* ---- Arrays and objects ---- */

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

/* Of equal keys the first takes the last's value, and the others go. */
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

static bool read_value(reader *r, mm_value *v, unsigned depth);

/* What stands between brackets. Recursion is bounded by MM_BODY_DEPTH */
static bool read_members(reader *r, mm_value *v, unsigned depth) {
  const bool object = v->type == MM_VALUE_OBJECT;
  const char close = object ? '}' : ']';
  const mm_value **link = &v->first;
  if (depth == MM_BODY_DEPTH)
    return mm_fail(r->err, MM_BAD_INPUT, "E_JSON", mm_at_offset("body", NULL, r->at), "found nesting deeper than %d", MM_BODY_DEPTH);
  r->at++;
  skip_space(r);
  if (peek(r) == close) return r->at++, true;
  for (;;) {
    mm_value *m = mm_arena_alloc(r->arena, sizeof *m, r->err);
    if (!m) return false;
    skip_space(r);
    if (object) {
      if (!read_string(r, &m->key, &m->key_n)) return false;
      skip_space(r);
      if (peek(r) != ':') return wrong(r, "\":\"");
      r->at++;
    }
    if (!read_value(r, m, depth + 1)) return false;
    *link = m;
    link = &m->next;
    v->count++;
    if (peek(r) == close) return r->at++, !object || unite_keys(r, v);
    if (peek(r) != ',') return wrong(r, object ? "\",\" or \"}\"" : "\",\" or \"]\"");
    r->at++;
  }
}

/* A value and the space around it. */
static bool read_value(reader *r, mm_value *v, unsigned depth) {
  skip_space(r);
  if (++r->values > MM_BODY_VALUES)
    return mm_fail(r->err, MM_LIMIT, "E_LIMIT", mm_at_offset("body", NULL, r->at), "found more than %u values", MM_BODY_VALUES);
  const size_t from = r->at;
  bool ok;
  switch (peek(r)) {
    case '{':
    case '[':
      v->type = peek(r) == '{' ? MM_VALUE_OBJECT : MM_VALUE_ARRAY;
      ok = read_members(r, v, depth);
      break;
    case '"':
      v->type = MM_VALUE_STRING;
      ok = read_string(r, &v->text, &v->n);
      break;
    default: ok = read_word(r, v);
  }
  if (!ok) return false;
  v->raw = r->text + from;
  v->raw_n = r->at - from;
  skip_space(r);
  return true;
}

const mm_value *mm_body_parse(mm_arena *a, const char *text, size_t n, mm_err *err) {
  reader r = {.arena = a, .text = text, .n = n, .err = err};
  mm_value *v = mm_arena_alloc(a, sizeof *v, err);
  if (!v) return NULL;
  if (n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) r.at = 3;
  if (!read_value(&r, v, 0)) return NULL;
  if (r.at == n) return v;
  wrong(&r, "the end");
  return NULL;
}

/* ---- Looking at values ---- */

const mm_value *mm_value_get(const mm_value *object, const char *key) {
  if (!object || object->type != MM_VALUE_OBJECT) return NULL;
  const size_t n = strlen(key);
  for (const mm_value *v = object->first; v; v = v->next)
    if (v->key_n == n && memcmp(v->key, key, n) == 0) return v->type == MM_VALUE_NULL ? NULL : v;
  return NULL;
}

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

const char *mm_value_word(const mm_value *v) {
  static const char *const word[] = {"null", "a boolean", "a number", "a string", "an array", "an object"};
  return v ? word[v->type] : "nothing";
}
