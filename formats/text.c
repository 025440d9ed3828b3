/* Growing text. */
#include "formats/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Room for n bytes more and the NUL. */
static bool widen(mm_text *t, size_t n) {
  t->failed = t->failed || (t->cap - t->n <= n && !MM_GROW(t->p, &t->cap, t->n + n + 1, MM_IGNORED));
  return !t->failed;
}

void mm_text_add(mm_text *t, const char *bytes, size_t n) {
  if (!widen(t, n)) return;
  if (n) memcpy(t->p + t->n, bytes, n);
  t->p[t->n += n] = 0;
}

void mm_text_put(mm_text *t, const char *string) { mm_text_add(t, string, strlen(string)); }

void mm_text_printf(mm_text *t, const char *fmt, ...) {
  va_list args, again;
  if (t->failed) return;
  va_start(args, fmt);
  va_copy(again, args);
  const size_t capacity = t->cap - t->n;
  const int n = vsnprintf(capacity ? t->p + t->n : NULL, capacity, fmt, args);
  va_end(args);
  t->failed = n < 0;
  if (widen(t, (size_t)n)) {
    if ((size_t)n >= capacity) vsnprintf(t->p + t->n, (size_t)n + 1, fmt, again);
    t->n += (size_t)n;
  }
  va_end(again);
}

static void quote_control(mm_text *t, char c) {
  static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
  const char *p = strchr(from, c);
  if (c && p) {
    mm_text_add(t, "\\", 1);
    mm_text_add(t, &to[p - from], 1);
  } else {
    mm_text_printf(t, "\\u%04x", (unsigned)(uint8_t)c);
  }
}

void mm_text_quote(mm_text *t, const char *bytes, size_t n) {
  mm_text_add(t, "\"", 1);
  for (size_t i = 0, from = 0; i <= n;) {
    const uint8_t c = i < n ? (uint8_t)bytes[i] : 0;
    const size_t len = i == n ? 0 : c < 0x80 ? 1 : mm_utf8_len(bytes + i, n - i);
    if (i < n && len && c >= 0x20 && c != '"' && c != '\\') {
      i += len;
      continue;
    }
    if (i > from) mm_text_add(t, bytes + from, i - from);
    if (i == n) break;
    if (len)
      quote_control(t, (char)c);
    else
      mm_text_put(t, "\xef\xbf\xbd");
    from = ++i;
  }
  mm_text_add(t, "\"", 1);
}

void mm_text_quote_string(mm_text *t, const char *string) { mm_text_quote(t, string, strlen(string)); }

void mm_text_quote_or_null(mm_text *t, const char *string) {
  if (string)
    mm_text_quote_string(t, string);
  else
    mm_text_put(t, "null");
}

const char *mm_real_shown(double x, char to[MM_REAL_SHOWN]) {
  for (int digits = 15; digits <= 17; digits++) {
    snprintf(to, MM_REAL_SHOWN, "%.*g", digits, x);
    if (strtod(to, NULL) == x) break;
  }
  return to;
}

void mm_text_real(mm_text *t, double x) {
  char text[MM_REAL_SHOWN];
  mm_text_put(t, isfinite(x) ? mm_real_shown(x, text) : "null");
}

char *mm_text_take(mm_text *t, mm_err *err) {
  mm_text_add(t, "", 0);
  char *string = t->failed ? NULL : t->p;
  if (!string) free(t->p);
  if (!string) mm_fail_memory(err, 0);
  *t = (mm_text){0};
  return string;
}

void mm_text_clear(mm_text *t) {
  t->n = 0;
  t->failed = false;
  if (t->p) t->p[0] = 0;
}
