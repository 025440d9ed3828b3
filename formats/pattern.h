/* Patterns for names, as recipes hold them: globs, and regular expressions behind "re:". Recipes come from files and manifests, so a match
 * takes time in proportion to pattern and name, whatever they are: all alternatives are followed side by side (K. Thompson, CACM 11(6),
 * 1968), nothing is tried twice, and nothing refers back.
 *
 *   glob        *  any bytes   ?  any byte   [a-z] [!a-z]  one of, none of   \c  c itself; it matches whole names
 *   expression  POSIX extended: . [a-z] [^a-z] [[:digit:]] ( ) | * + ? {m,n} ^ $ \c, and \w \W \s \S; it matches anywhere in a name */
#ifndef MM_FORMATS_PATTERN_H
#define MM_FORMATS_PATTERN_H

#include "formats/system/base.h"

#define MM_PATTERN_BYTES  512  /* of its text */
#define MM_PATTERN_NEST   32   /* groups inside each other */
#define MM_PATTERN_REPEAT 255  /* in {m,n} */
#define MM_PATTERN_STATES 2048 /* repetitions written out */

typedef struct mm_pattern {
  struct mm_pattern_op *op;
  uint32_t count;
} mm_pattern;

/* Compiles text into *a. MM_USAGE E_RECIPE says what is wrong and where. */
MM_MUST_USE bool mm_pattern_compile(mm_pattern *p, const char *text, mm_arena *a, mm_err *err);
bool mm_pattern_match(const mm_pattern *p, const char *name);

#endif
