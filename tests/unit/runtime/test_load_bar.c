/* The bar of a load: its text at every share, and a log that is watched while readers come and go. */
#include <string.h>
#include <unistd.h>

#include "runtime/engine/load_bar.h"
#include "tests/unit/unit.h"

TEST(texts) {
  char text[MM_BAR_MAX];
  mm_read_stats s = {.wanted = UINT64_C(28000000000), .seconds = 0.5};
  assert_string_equal(mm_load_bar_text(text, &s), "[------------------------------] 0.0 of 28.0 GB, 0 %, 0.0 GB/s");
  s.bytes[MM_READ_CACHE] = s.wanted / 2;
  assert_string_equal(mm_load_bar_text(text, &s), "[###############---------------] 14.0 of 28.0 GB, 50 %, 28.0 GB/s");
  s.bytes[MM_READ_DIRECT] = s.wanted; /* more than was wanted is all */
  assert_string_equal(mm_load_bar_text(text, &s), "[##############################] 42.0 of 28.0 GB, 100 %, 84.0 GB/s");
  assert_string_equal(mm_load_bar_text(text, &(mm_read_stats){0}), "[------------------------------] 0.0 of 0.0 GB, 0 %, 0.0 GB/s");
}

TEST(watched) {
  mm_err err = {0};
  mm_read_log *log = mm_read_log_open(&err);
  assert_non_null(log);
  mm_load_bar *b = mm_load_bar_open(log);
  assert_non_null(b);
  mm_read_log_begin(log, 1000, mm_now());
  mm_read_log_add(log, MM_READ_CACHE, 400, 0);
  mm_read_log_add(log, MM_READ_CACHE, 600, 0);
  mm_read_log_end(log, mm_now());
  mm_load_bar_close(b);
  mm_load_bar_close(NULL);
  mm_read_log_close(log);
}

int main(void) { return run_unit_tests(NULL, NULL); }
