/* Stop texts: however a text comes in pieces, it ends where it would if it came byte by byte; what is given out never holds what is cut
 * later. */
#include <stdlib.h>
#include <string.h>

#include "runtime/text/stops.h"
#include "tests/unit/unit.h"

enum { MOST = 60, STOPS = 3 };

static uint32_t seed = 5;
static uint32_t below(uint32_t n) {
  seed = seed * 1664525u + 1013904223u;
  return (seed >> 8) % n;
}

/* Bytes of text before the stop text that is complete first; n where none is. */
static size_t expected(const char *text, size_t n, const char *const *stop, size_t count) {
  for (size_t end = 1; end <= n; end++) {
    size_t longest = 0;
    for (size_t i = 0; i < count; i++) {
      const size_t len = strlen(stop[i]);
      if (len <= end && memcmp(text + end - len, stop[i], len) == 0) longest = mm_max(longest, len);
    }
    if (longest) return end - longest;
  }
  return n;
}

TEST(any_pieces) {
  unsigned stopped = 0;
  for (int round = 0; round < 20000; round++) {
    char text[MOST], out[MOST + 1], stops[STOPS][8];
    const char *list[STOPS];
    const size_t n = 1 + below(MOST), count = below(STOPS + 1), letters = 2 + below(3);
    for (size_t i = 0; i < n; i++) text[i] = (char)(below(20) ? 'a' + (char)below((uint32_t)letters) : (char)below(256)); /* 0 too */
    for (size_t i = 0; i < count; i++) {
      const size_t len = 1 + below(7);
      for (size_t j = 0; j < len; j++) stops[i][j] = (char)('a' + (char)below((uint32_t)letters));
      stops[i][len] = 0, list[i] = stops[i];
    }
    mm_stops s = {.stop = list, .count = count};
    mm_err err = {0};
    size_t got = 0, ready;
    bool found = false;
    for (size_t at = 0, piece; at < n && !found; at += piece) {
      piece = mm_min(below(9), n - at); /* tokens without text too */
      assert_true(mm_stops_push(&s, text + at, piece, &ready, &found, &err));
      assert_true(ready <= s.held_count && got + ready <= n);
      if (ready) memcpy(out + got, s.held, ready);
      got += ready;
      mm_stops_take(&s, found ? s.held_count : ready);
    }
    if (s.held_count) memcpy(out + got, s.held, s.held_count);
    got += s.held_count;
    const size_t want = expected(text, n, list, count);
    assert_int_equal(got, want);
    assert_int_equal(found, want < n);
    assert_memory_equal(out, text, got);
    stopped += found;
    mm_stops_close(&s);
  }
  assert_true(stopped > 5000 && stopped < 18000);
}

int main(void) { return run_unit_tests(NULL, NULL); }
