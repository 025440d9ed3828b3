/* The arguments of a call that was cut off, closed. */
#include "runtime/chat/cut_arguments.h"

#include <string.h>

#include "formats/scan.h"

typedef enum expected { FIRST, KEY, COLON, VALUE, NEXT } expected;

typedef struct walk {
  const char *p;
  size_t n, at;
  char open[MM_SCAN_DEPTH_PYTHON]; /* [depth] '{' or '[' */
  size_t depth;
  size_t keep, keep_depth; /* bytes that stay, and values that are open behind them */
  bool in_string;          /* and a string is */
} walk;

static void keep(walk *w, size_t end) {
  w->keep = end;
  w->keep_depth = w->depth;
}

static bool is_high_surrogate(const char *escape) {
  return escape[1] == 'u' && (escape[2] | 0x20) == 'd' && escape[3] && strchr("89abAB", escape[3]);
}

/* Goes behind a string. False where it has no end: *whole is the end of its last whole character. */
static bool pass_string(walk *w, size_t *whole) {
  size_t at = w->at + 1, high = 0;
  while (at < w->n && w->p[at] != '"') {
    const size_t left = w->n - at, more = w->p[at] != '\\' ? 1 : left > 1 && w->p[at + 1] == 'u' ? 6 : 2;
    if (more > left) break;
    high = more == 6 && is_high_surrogate(w->p + at) ? at : 0;
    at += more;
  }
  if (at < w->n && w->p[at] == '"') return w->at = at + 1, true;
  *whole = high ? high : at;
  return false;
}

/* Goes behind a number or a word. False where the text ends with it; *ok: it may be the beginning of one. */
static bool pass_word(walk *w, bool *ok) {
  static const char *const words[] = {"true", "false", "null"};
  const char *p = w->p + w->at;
  size_t n = 0, digits = 0;
  for (; n < w->n - w->at && p[n]; n++) {
    const bool digit = strchr("+-.eE0123456789", p[n]);
    if (!digit && ((p[n] | 0x20) < 'a' || (p[n] | 0x20) > 'z')) break;
    digits += digit;
  }
  *ok = n && digits == n;
  for (size_t i = 0; n && i < sizeof words / sizeof *words; i++) *ok |= n <= strlen(words[i]) && memcmp(p, words[i], n) == 0;
  w->at += n;
  return *ok && w->at < w->n;
}

static bool enter(walk *w) {
  if (w->depth == MM_SCAN_DEPTH_PYTHON) return false;
  w->open[w->depth++] = w->p[w->at++];
  keep(w, w->at);
  return true;
}

/* Reads the text. True where it is the beginning of an object and ends within it. */
static bool read_beginning(walk *w) {
  expected place = VALUE;
  for (bool ok = true;;) {
    while (w->at < w->n && w->p[w->at] && strchr(" \n\r\t", w->p[w->at])) w->at++;
    if (w->at == w->n) return w->depth > 0;
    const char c = w->p[w->at];
    const bool within = w->depth > 0, object = within && w->open[w->depth - 1] == '{';
    if (!within && (c != '{' || place == NEXT)) return false;
    if (within && (place == NEXT || place == FIRST) && c == (object ? '}' : ']')) {
      w->depth--;
      keep(w, ++w->at);
      place = NEXT;
    } else if (place == NEXT || place == COLON) {
      if (c != (place == NEXT ? ',' : ':')) return false;
      w->at++;
      place = place == NEXT && object ? KEY : VALUE;
    } else if (object && (place == FIRST || place == KEY)) {
      size_t whole;
      if (c != '"') return false;
      if (!pass_string(w, &whole)) return true;
      place = COLON;
    } else if (c == '{' || c == '[') {
      if (!enter(w)) return false;
      place = FIRST;
    } else if (c == '"') {
      size_t whole;
      w->in_string = !pass_string(w, &whole);
      keep(w, w->in_string ? whole : w->at);
      if (w->in_string) return true;
      place = NEXT;
    } else {
      if (!pass_word(w, &ok)) return ok;
      keep(w, w->at);
      place = NEXT;
    }
  }
}

bool mm_arguments_close(mm_arena *a, mm_str text, mm_str *out, mm_err *err) {
  walk w = {.p = text.p, .n = text.n};
  if (!text.n || !read_beginning(&w)) return false;
  char *closed = mm_arena_alloc(a, w.keep + w.keep_depth + 2, err), *to = closed;
  if (!closed) return false;
  to = mempcpy(to, text.p, w.keep);
  if (w.in_string) *to++ = '"';
  for (size_t i = w.keep_depth; i-- > 0;) *to++ = w.open[i] == '{' ? '}' : ']';
  *to = 0;
  *out = (mm_str){closed, (size_t)(to - closed)};
  return true;
}
