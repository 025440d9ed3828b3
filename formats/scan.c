/* A pull scanner for large untrusted JSON (RFC 8259). One pass, no allocation; the caller's calls are the grammar. */
#include "formats/scan.h"

#include <stdio.h>
#include <string.h>

#include "formats/system/file.h"

#define FOUND_BYTES 24

char *mm_scan_found(const mm_scan *s, char out[MM_SCAN_FOUND]) {
  if (s->pos >= s->len) {
    memcpy(out, "the end", sizeof "the end");
    return out;
  }
  const char *p = s->text + s->pos;
  size_t n = 1, max = (size_t)mm_min(s->len - s->pos, FOUND_BYTES);
  while (n < max && !memchr(" \t\r\n,:]}", p[n], 8)) n++;
  snprintf(out, MM_SCAN_FOUND, "\"%s\"", MM_ESCAPED_BYTES(MM_SCAN_FOUND - 2, p, n));
  return out;
}

static bool fail(const mm_scan *s, const char *code, const char *expected, mm_err *err) {
  return mm_fail(err, s->status, code, mm_at_offset(s->file, s->tensor, s->base + s->pos), "found %s, expected %s", MM_FOUND(s), expected);
}

char mm_scan_space(mm_scan *s) {
  for (; s->pos < s->len; s->pos++) {
    char c = s->text[s->pos];
    if (c != ' ' && c != '\n' && c != '\t' && c != '\r') return c;
  }
  return 0;
}

/* The whole text is what Git LFS keeps in a file's place. */
static bool is_pointer(const mm_scan *s) {
  const size_t n = sizeof MM_LFS_POINTER - 1;
  return s->depth == 0 && s->base == 0 && s->len - s->pos >= n && memcmp(s->text + s->pos, MM_LFS_POINTER, n) == 0;
}

bool mm_scan_open(mm_scan *s, char bracket, mm_err *err) {
  if (mm_scan_peek(s) != bracket && is_pointer(s))
    return mm_fail(err, s->status, "E_JSON", mm_at_offset(s->file, s->tensor, s->pos),
                   "found a Git LFS pointer, the text is not here: run `git lfs pull`; expected %s",
                   bracket == '{' ? "an object" : "an array");
  if (mm_scan_peek(s) != bracket) return fail(s, "E_JSON", bracket == '{' ? "an object" : "an array", err);
  const unsigned depth = s->python ? MM_SCAN_DEPTH_PYTHON : MM_SCAN_DEPTH;
  if (s->depth == depth) {
    return fail(s, "E_JSON", MM_FORMATTED(48, "at most %u levels of nesting", depth), err);
  }
  s->depth++;
  s->pos++;
  return true;
}

bool mm_scan_more(mm_scan *s, char close, bool first, bool *more, mm_err *err) {
  char c = mm_scan_peek(s);
  *more = true;
  if (c == close) {
    *more = false;
    s->depth--;
  } else if (first) {
    return true;
  } else if (c != ',') {
    return fail(s, "E_JSON", close == '}' ? "a comma or \"}\"" : "a comma or \"]\"", err);
  }
  s->pos++;
  return true;
}

/* Value of the four hex digits at p, or -1. */
static int hex4(const char *p, size_t n) {
  int v = 0;
  if (n < 4) return -1;
  for (int i = 0; i < 4; i++) {
    const int digit = mm_hex_digit(p[i]);
    if (digit < 0) return -1;
    v = v * 16 + digit;
  }
  return v;
}

/* Decodes the escape at p (p[0] is the backslash): its length, or 0 if it is not one. A surrogate without the other is its own code. */
static size_t escape_len(const char *p, size_t n, uint32_t *code) {
  static const char plain[] = "\"\\/bfnrt", value[] = "\"\\/\b\f\n\r\t";
  if (n < 2) return 0;
  const char *hit = memchr(plain, p[1], 8);
  if (hit) {
    *code = (uint8_t)value[hit - plain];
    return 2;
  }
  int high = p[1] == 'u' ? hex4(p + 2, n - 2) : -1;
  if (high < 0) return 0;
  *code = (uint32_t)high;
  if (high < 0xD800 || high > 0xDBFF) return 6;
  int low = n >= 8 && p[6] == '\\' && p[7] == 'u' ? hex4(p + 8, n - 8) : -1;
  if (low < 0xDC00 || low > 0xDFFF) return 6;
  *code = 0x10000 + (((uint32_t)high - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
  return 12;
}

static bool surrogate(uint32_t code) { return code >= 0xD800 && code <= 0xDFFF; }

/* How many of eight bytes of a string are ASCII without quotes, backslashes and control characters, before the first that is not. The top
 * bit of a byte of x - 0x01… is set where that byte of x is 0; a borrow may set it in bytes behind that one, never before it. */
static size_t plain_bytes(const char *p) {
  const uint64_t each = UINT64_C(0x0101010101010101);
  uint64_t v;
  memcpy(&v, p, sizeof v);
  uint64_t other = (v | (v - each * 0x20) | ((v ^ each * '"') - each) | ((v ^ each * '\\') - each)) & each * 0x80;
  return other ? (size_t)__builtin_ctzll(other) / 8 : 8;
}

bool mm_scan_string(mm_scan *s, mm_scan_str *out, mm_err *err) {
  if (mm_scan_peek(s) != '"') return fail(s, "E_JSON", "a string", err);
  size_t start = ++s->pos;
  bool escaped = false;
  while (s->pos < s->len) {
    size_t plain = 8;
    while (plain == 8 && s->len - s->pos >= 8) s->pos += plain = plain_bytes(s->text + s->pos);
    if (s->pos == s->len) break;
    const char *p = s->text + s->pos;
    size_t left = s->len - s->pos, step = 1;
    uint8_t c = (uint8_t)*p;
    uint32_t code;
    if (c == '"') {
      *out = (mm_scan_str){s->text + start, s->pos - start, escaped};
      s->pos++;
      return true;
    }
    if (c == '\\') {
      escaped = true;
      step = escape_len(p, left, &code);
      if (!step || (!s->python && surrogate(code))) return fail(s, "E_JSON", "an escape of JSON (surrogates in pairs)", err);
    } else if (c < 0x20) {
      return fail(s, "E_JSON", "no raw control character in a string", err);
    } else if (c >= 0x80 && !(step = mm_utf8_len(p, left))) {
      return fail(s, "E_JSON", "valid UTF-8", err);
    }
    s->pos += step;
  }
  return fail(s, "E_JSON", "the closing quote of a string", err);
}

bool mm_scan_key(mm_scan *s, mm_scan_str *key, mm_err *err) {
  if (mm_scan_peek(s) != '"') return fail(s, "E_JSON", "a key in quotes", err);
  if (!mm_scan_string(s, key, err)) return false;
  if (mm_scan_peek(s) != ':') return fail(s, "E_JSON", "a colon after the key", err);
  s->pos++;
  return true;
}

static bool digit_at(const mm_scan *s, size_t pos) { return pos < s->len && s->text[pos] >= '0' && s->text[pos] <= '9'; }

bool mm_scan_u64(mm_scan *s, uint64_t *out, mm_err *err) {
  static const char expected[] = "a plain non-negative integer below 2^64";
  char first = mm_scan_peek(s);
  size_t pos = s->pos;
  uint64_t v = 0;
  for (; digit_at(s, pos); pos++) {
    if (!mm_mul(v, 10, &v) || !mm_add(v, (uint64_t)(s->text[pos] - '0'), &v)) return fail(s, "E_NUMBER", expected, err);
  }
  bool leading_zero = first == '0' && pos - s->pos > 1;
  const char after = pos < s->len ? s->text[pos] : 0;
  bool real = after == '.' || after == 'e' || after == 'E';
  if (pos == s->pos || leading_zero || real) return fail(s, "E_NUMBER", expected, err);
  s->pos = pos;
  *out = v;
  return true;
}

/* Consumes one or more digits; false if there is none. */
static bool skip_digits(mm_scan *s) {
  size_t start = s->pos;
  while (digit_at(s, s->pos)) s->pos++;
  return s->pos > start;
}

static inline bool accept(mm_scan *s, const char *any_of) {
  for (; s->pos < s->len && *any_of; any_of++)
    if (*any_of == s->text[s->pos]) return ++s->pos;
  return false;
}

static bool skip_word(mm_scan *s, const char *word, mm_err *err) {
  size_t n = strlen(word);
  if (s->len - s->pos < n || memcmp(s->text + s->pos, word, n) != 0) return fail(s, "E_JSON", "a value", err);
  s->pos += n;
  return true;
}

bool mm_scan_number(mm_scan *s, mm_scan_str *text, bool *real, mm_err *err) {
  const char c = mm_scan_peek(s);
  const size_t start = s->pos;
  bool ok;
  *real = s->python && (c == 'N' || c == 'I' || (c == '-' && s->len - start > 1 && s->text[start + 1] == 'I'));
  accept(s, "-");
  if (*real) {
    ok = skip_word(s, c == 'N' ? "NaN" : "Infinity", err);
  } else if (c != '-' && !digit_at(s, start)) {
    ok = fail(s, "E_JSON", "a value", err);
  } else {
    ok = accept(s, "0") || skip_digits(s);
    if (ok && accept(s, ".")) ok = *real = skip_digits(s);
    if (ok && accept(s, "eE")) {
      *real = true;
      accept(s, "+-");
      ok = skip_digits(s);
    }
    if (!ok) fail(s, "E_JSON", "a digit of a number", err);
  }
  *text = (mm_scan_str){s->text + start, s->pos - start, false};
  return ok;
}

/* Recursion ends at DEPTH_MAX, which mm_scan_open keeps. */
static bool skip_members(mm_scan *s, char open, mm_err *err) {
  char close = open == '{' ? '}' : ']';
  mm_scan_str key;
  if (!mm_scan_open(s, open, err)) return false;
  for (bool first = true, more;; first = false) {
    if (!mm_scan_more(s, close, first, &more, err)) return false;
    if (!more) return true;
    if (open == '{' && !mm_scan_key(s, &key, err)) return false;
    if (!mm_scan_skip(s, err)) return false;
  }
}

bool mm_scan_skip(mm_scan *s, mm_err *err) {
  mm_scan_str text;
  bool real;
  char c = mm_scan_peek(s);
  switch (c) {
    case '{':
    case '[': return skip_members(s, c, err);
    case '"': return mm_scan_string(s, &text, err);
    case 't': return skip_word(s, "true", err);
    case 'f': return skip_word(s, "false", err);
    case 'n': return skip_word(s, "null", err);
    default: return mm_scan_number(s, &text, &real, err);
  }
}

bool mm_scan_end(mm_scan *s, mm_err *err) {
  mm_scan_peek(s);
  return s->pos == s->len || fail(s, "E_JSON", "nothing but white space after the value", err);
}

size_t mm_scan_copy(mm_scan_str s, char *out) {
  size_t to = 0;
  if (!s.escaped) {
    if (s.n) memcpy(out, s.p, s.n);
    out[s.n] = 0;
    return s.n;
  }
  for (size_t from = 0; from < s.n;) {
    uint32_t code;
    size_t len = s.p[from] == '\\' ? escape_len(s.p + from, s.n - from, &code) : 0;
    if (len) {
      to += mm_utf8_put(out + to, surrogate(code) ? 0xFFFD : code);
      from += len;
    } else {
      out[to++] = s.p[from++];
    }
  }
  out[to] = 0;
  return to;
}

char *mm_scan_unescape(mm_arena *a, mm_scan_str s, size_t *n, mm_err *err) {
  char *out = mm_arena_alloc(a, s.n + 1, err);
  if (out) *n = mm_scan_copy(s, out);
  return out;
}

char *mm_scan_terminate(char *text, const mm_scan *scan, mm_arena *a, mm_scan_str s, size_t *n, mm_err *err) {
  if (s.escaped) return mm_scan_unescape(a, s, n, err);
  char *value = text + (s.p - scan->text);
  value[s.n] = 0;
  *n = s.n;
  return value;
}
