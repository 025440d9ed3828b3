/* Stop texts. */
#include "runtime/text/stops.h"

#include <stdlib.h>
#include <string.h>

/* The place of the stop text that ends first, of several the longest: so a text is cut where it would be byte by byte. held_count: none. */
static size_t find(const mm_stops *s) {
  size_t at = s->held_count, end = SIZE_MAX;
  for (size_t i = 0; i < s->count; i++) {
    const size_t n = strlen(s->stop[i]);
    const char *p = memmem(s->held, s->held_count, s->stop[i], n);
    const size_t from = p ? (size_t)(p - s->held) : at;
    if (!p || from + n > end || (from + n == end && from > at)) continue;
    at = from, end = from + n;
  }
  return at;
}

/* Returns true if all held text from `at` on is the beginning of a stop text. */
static bool begins(const mm_stops *s, size_t at) {
  const size_t n = s->held_count - at;
  for (size_t i = 0; i < s->count; i++)
    if (strlen(s->stop[i]) > n && memcmp(s->stop[i], s->held + at, n) == 0) return true;
  return false;
}

bool mm_stops_push(mm_stops *s, const char *bytes, size_t n, size_t *ready, bool *found, mm_err *err) {
  if (!MM_GROW(s->held, &s->cap, s->held_count + n + 1, err)) return false;
  memcpy(s->held + s->held_count, bytes, n);
  s->held_count += n;
  *ready = find(s);
  *found = *ready < s->held_count;
  size_t longest = 1;
  for (size_t i = 0; i < s->count; i++) longest = mm_max(longest, strlen(s->stop[i]));
  if (*found) return true;
  for (*ready = s->held_count - mm_min(s->held_count, longest - 1); *ready < s->held_count && !begins(s, *ready);) ++*ready;
  return true;
}

void mm_stops_take(mm_stops *s, size_t n) {
  s->held_count -= n;
  if (n) memmove(s->held, s->held + n, s->held_count);
}

void mm_stops_close(mm_stops *s) { free(s->held); }
