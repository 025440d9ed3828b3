/* Texts that end an answer, wherever the borders of tokens lie. */
#ifndef MM_RUNTIME_STOPS_H
#define MM_RUNTIME_STOPS_H

#include "formats/system/base.h"

/* Zero-initialise but for `stop`; mm_stops_close. */
typedef struct mm_stops {
  const char *const *stop; /* [count] not empty; borrowed */
  size_t count;
  char *held; /* what may begin one of them */
  size_t held_count, cap;
} mm_stops;

/* Adds bytes. held[0 … *ready) is text now: take it with mm_stops_take. *found: a stop text begins there, and nothing behind it is part of
 * the answer: the one that ends first, of several the longest. */
MM_MUST_USE bool mm_stops_push(mm_stops *s, const char *bytes, size_t n, size_t *ready, bool *found, mm_err *err);
/* Forgets the first n bytes that are held; all of them at an answer's end. */
void mm_stops_take(mm_stops *s, size_t n);
void mm_stops_close(mm_stops *s);

#endif
