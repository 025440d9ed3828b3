/* A pull scanner for large untrusted JSON in memory: no tree, no allocation per value. RFC 8259 strictly: UTF-8 must
 * be valid (no overlong forms, no surrogates), no raw control characters, no NUL, no BOM, no comments, nesting ≤ 32.
 * Used for safetensors headers (≤ 100 MB) and index weight maps, and below the trees of json.h. */
#ifndef MM_FORMATS_SCAN_H
#define MM_FORMATS_SCAN_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_SCAN_DEPTH        32
#define MM_SCAN_DEPTH_PYTHON 256

typedef struct mm_scan {
  const char *text;
  size_t len, pos;
  unsigned depth;
  const char *file;   /* for messages */
  uint64_t base;      /* file offset of text[0], added to reported offsets */
  mm_status status;   /* of failures: MM_BAD_INPUT or MM_INTEGRITY */
  const char *tensor; /* for messages, or NULL */
  bool python;        /* as Python's json reads: NaN, Infinity, half of a surrogate pair (it becomes U+FFFD); nesting ≤ 256 */
} mm_scan;

/* A string as it stands between its quotes. `escaped` false: bytes are the value itself. */
typedef struct mm_scan_str {
  const char *p;
  size_t n;
  bool escaped;
} mm_scan_str;

/* Each call consumes leading white space, then what it names; false with E_JSON, the byte position and what stood there. */
MM_MUST_USE bool mm_scan_open(mm_scan *s, char bracket, mm_err *err); /* '{' or '[' */
/* After an open or a value: true in *more when another member follows (its comma consumed), false when the closing
 * bracket was consumed. `first` is true right after the open. */
MM_MUST_USE bool mm_scan_more(mm_scan *s, char close, bool first, bool *more, mm_err *err);
MM_MUST_USE bool mm_scan_key(mm_scan *s, mm_scan_str *key, mm_err *err); /* string and ':' */
MM_MUST_USE bool mm_scan_string(mm_scan *s, mm_scan_str *out, mm_err *err);
/* A plain non-negative integer (no sign, no leading zero, no fraction or exponent) that fits u64; E_NUMBER otherwise,
 * with the text found and the position left before it. */
MM_MUST_USE bool mm_scan_u64(mm_scan *s, uint64_t *out, mm_err *err);
/* Any number as it stands; *real when it has a fraction or an exponent. */
MM_MUST_USE bool mm_scan_number(mm_scan *s, mm_scan_str *text, bool *real, mm_err *err);
MM_MUST_USE bool mm_scan_skip(mm_scan *s, mm_err *err); /* any value, validated */
MM_MUST_USE bool mm_scan_end(mm_scan *s, mm_err *err);  /* only white space is left */
char mm_scan_space(mm_scan *s);                         /* past white space: the byte there, 0 at the end */
/* The next non-space byte, 0 at the end. */
static inline char mm_scan_peek(mm_scan *s) {
  const char c = s->pos < s->len ? s->text[s->pos] : 0;
  return c > ' ' ? c : mm_scan_space(s);
}

/* Writes the text at the position, for messages: `"text"`, escaped and cut, or `the end`. Returns out. */
#define MM_SCAN_FOUND 112
char *mm_scan_found(const mm_scan *s, char out[MM_SCAN_FOUND]);
#define MM_FOUND(s) mm_scan_found(s, (char[MM_SCAN_FOUND]){0}) /* as long as the block that names it */

/* The unescaped value into out, which has room for s.n + 1 bytes; returns its length (it may hold NUL bytes from \u0000). */
size_t mm_scan_copy(mm_scan_str s, char *out);
/* The same as an arena string. */
char *mm_scan_unescape(mm_arena *a, mm_scan_str s, size_t *n, mm_err *err);
/* The same without a copy where nothing is escaped: the string where it stands in `text`, which is scan->text and writable, terminated over
 * its closing quote. It lives as long as the text. */
char *mm_scan_terminate(char *text, const mm_scan *scan, mm_arena *a, mm_scan_str s, size_t *n, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
