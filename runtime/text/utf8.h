/* UTF-8 that arrives in pieces, or is not UTF-8. */
#ifndef MM_RUNTIME_UTF8_H
#define MM_RUNTIME_UTF8_H

#include "formats/system/base.h"

typedef enum mm_utf8 { MM_UTF8_WHOLE, MM_UTF8_CUT, MM_UTF8_BAD } mm_utf8;

/* Looks at the sequence that starts s[0 … n), n ≥ 1 (Unicode, table 3-7: no overlong forms, no surrogates, ≤ U+10FFFF).
 * *len: its bytes, or where it is bad or cut short by n, how many bytes (≥ 1) could begin a sequence. */
mm_utf8 mm_utf8_scan(const char *s, size_t n, unsigned *len);

/* Streaming decode: bytes of an unfinished sequence are held back. Zero-initialise. */
typedef struct mm_utf8_stream {
  char held[4];
  unsigned count;
} mm_utf8_stream;
/* Appends the printable part of `bytes` to out (cap ≥ 3n + 4, NUL-terminated) and returns its length; n = 0 flushes, writing what
 * is held as U+FFFD. The longest prefix of a sequence that goes wrong becomes one U+FFFD (Unicode's recommended practice). */
size_t mm_utf8_push(mm_utf8_stream *s, const char *bytes, size_t n, char *out);

#endif
