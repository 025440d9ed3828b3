/* Patterns for names, as recipes hold them: globs, and Perl's regular expressions (PCRE2) behind "re:".
 *
 *   glob        *  any bytes   ?  any byte   [a-z] [!a-z]  one of, none of   \c  c itself; it matches whole names
 *   expression  PCRE2's syntax on bytes, without captures and back references; it matches anywhere in a name
 *
 * Recipes come from files and manifests: a match ends after MM_PATTERN_STEPS at the latest. A glob takes time in proportion to its length
 * and the name's. */
#ifndef MM_CONVERT_PATTERN_H
#define MM_CONVERT_PATTERN_H

#include "formats/system/base.h"

#define MM_PATTERN_BYTES 512    /* of its text */
#define MM_PATTERN_NEST  32     /* groups inside each other */
#define MM_PATTERN_STEPS 100000 /* PCRE2's match limit */

typedef struct mm_pattern {
  const char *text;
  struct pcre2_real_code_8 *code;
} mm_pattern;

/* Compiles text, which must outlive the pattern, into *a. MM_USAGE E_RECIPE says what is wrong and where. */
MM_MUST_USE bool mm_pattern_compile(mm_pattern *p, const char *text, mm_arena *a, mm_err *err);
/* *hit: the name matches. MM_USAGE E_RECIPE where that takes more than MM_PATTERN_STEPS. */
MM_MUST_USE bool mm_pattern_match(const mm_pattern *p, const char *name, bool *hit, mm_err *err);

#endif
