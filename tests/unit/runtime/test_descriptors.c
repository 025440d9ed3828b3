/* Connections that a limit of descriptors leaves. */
#include <sys/resource.h>

#include "runtime/serve/descriptors.h"
#include "tests/unit/unit.h"

static bool share(mm_descriptors_use use, uint32_t *connections, mm_err *err) {
  const mm_log log = {0};
  *err = (mm_err){0};
  return mm_descriptors_share(&log, &use, connections, err);
}

static void limit(rlim_t n) {
  struct rlimit l;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &l), 0);
  l.rlim_cur = l.rlim_max = mm_min(n, l.rlim_max);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &l), 0);
}

/* Connections are among what is open, though descriptors above those that are counted may be theirs. */
TEST(served) {
  uint32_t connections = 20;
  mm_err err;
  limit(64);
  assert_true(share((mm_descriptors_use){0}, &connections, &err));
  assert_int_equal(connections, 20);
  assert_true(share((mm_descriptors_use){.served = 100000}, &connections, &err));
  assert_int_equal(connections, 20);
  assert_false(share((mm_descriptors_use){.later = 64}, &connections, &err));
  assert_string_equal(err.code, "E_IO");
}

int main(void) { return run_unit_tests(NULL, NULL); }
