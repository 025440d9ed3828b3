/* UTF-8 that arrives in pieces, or is not UTF-8. */
#include "runtime/text/utf8.h"

#include <string.h>

mm_utf8 mm_utf8_scan(const char *s, size_t n, unsigned *len) {
  uint8_t lead = (uint8_t)s[0], lo = 0x80, hi = 0xBF; /* range of the byte after `lead` */
  *len = 1;
  if (lead < 0x80) return MM_UTF8_WHOLE;
  if (lead < 0xC2 || lead > 0xF4) return MM_UTF8_BAD;
  if (lead == 0xE0) lo = 0xA0;
  if (lead == 0xED) hi = 0x9F;
  if (lead == 0xF0) lo = 0x90;
  if (lead == 0xF4) hi = 0x8F;
  unsigned whole = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (; *len < whole; ++*len, lo = 0x80, hi = 0xBF) {
    if (*len == n) return MM_UTF8_CUT;
    if ((uint8_t)s[*len] < lo || (uint8_t)s[*len] > hi) return MM_UTF8_BAD;
  }
  return MM_UTF8_WHOLE;
}

size_t mm_utf8_push(mm_utf8_stream *s, const char *bytes, size_t n, char *out) {
  static const char replacement[] = "\xEF\xBF\xBD"; /* U+FFFD */
  char *to = out;
  if (n == 0 && s->count > 0) {
    to = mempcpy(to, replacement, 3);
    s->count = 0;
  }
  for (size_t i = 0; i < n; i++) {
    s->held[s->count++] = bytes[i];
    mm_utf8 state;
    unsigned len;
    while (s->count > 0 && (state = mm_utf8_scan(s->held, s->count, &len)) != MM_UTF8_CUT) {
      to = state == MM_UTF8_WHOLE ? mempcpy(to, s->held, len) : mempcpy(to, replacement, 3);
      s->count -= len;
      memmove(s->held, s->held + len, s->count);
    }
  }
  *to = '\0';
  return (size_t)(to - out);
}
