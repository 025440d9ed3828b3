/* Text that grows, and JSON written into it. */
#ifndef MM_RUNTIME_SERVE_TEXT_H
#define MM_RUNTIME_SERVE_TEXT_H

#include "formats/system/base.h"

/* Zero-initialise; free(p). Always terminated once something was added. After want of memory `failed` is set and nothing more is added. */
typedef struct mm_text {
  char *p;
  size_t n, cap;
  bool failed;
} mm_text;

void mm_text_add(mm_text *t, const char *bytes, size_t n);
void mm_text_put(mm_text *t, const char *string);
void mm_text_printf(mm_text *t, const char *fmt, ...) MM_PRINTF(2, 3);
/* A JSON string of n bytes, quotes included; what is not UTF-8 becomes U+FFFD. */
void mm_text_quote(mm_text *t, const char *bytes, size_t n);
void mm_text_quote_string(mm_text *t, const char *string);
/* The same, null where string is NULL. */
void mm_text_quote_or_null(mm_text *t, const char *string);
#define MM_REAL_SHOWN 32
/* A number with as many digits as distinguish it from all others, for a message on its range: %g shows 1.0000001 as 1. */
const char *mm_real_shown(double x, char to[MM_REAL_SHOWN]);
#define MM_SHOWN_REAL(x) mm_real_shown(x, (char[MM_REAL_SHOWN]){0}) /* as long as the block that names it */
/* Appends a JSON number with as many digits as distinguish it from all others, or null if it is not finite. */
void mm_text_real(mm_text *t, double x);
/* Its string, which the caller frees; NULL with MM_LIMIT E_MEMORY where it failed. */
char *mm_text_take(mm_text *t, mm_err *err);
/* Empties it and keeps its memory. */
void mm_text_clear(mm_text *t);

#endif
