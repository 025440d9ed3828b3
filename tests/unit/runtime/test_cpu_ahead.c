/* Experts that are asked for come into memory, and others do not. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "runtime/cpu/cpu_backend.h"
#include "tests/unit/unit.h"

enum { LEAD = 8, N = 1024, K = 1024, BYTES = N * K * 2, PAGE = 4096 };

static unsigned pages_in(char *map, uint32_t lead) {
  static unsigned char in[BYTES / PAGE];
  unsigned count = 0;
  assert_int_equal(mincore(map + (size_t)lead * BYTES, BYTES, in), 0);
  for (size_t i = 0; i < sizeof in; i++) count += in[i] & 1;
  return count;
}

TEST(prefetched_experts_come) {
  char path[256];
  const char *where = getenv("TMPDIR");
  snprintf(path, sizeof path, "%s/ahead-XXXXXX", where ? where : "/tmp");
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  unlink(path);
  char *const bytes = calloc(1, BYTES);
  for (int i = 0; i < LEAD; i++) assert_int_equal(write(fd, bytes, BYTES), BYTES);
  free(bytes);
  fsync(fd);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  char *map = mmap(NULL, (size_t)LEAD * BYTES, PROT_READ, MAP_SHARED, fd, 0);
  assert_true(map != MAP_FAILED && sysconf(_SC_PAGESIZE) == PAGE);
  unsigned before = 0;
  for (uint32_t i = 0; i < LEAD; i++) before += pages_in(map, i);
  const mm_packed w = {.scheme = mm_scheme_find("bf16"), .lead = LEAD, .n = N, .k = K, .plane = {map}, .cell = {{1, 1}}};
  assert_int_equal(mm_cpu_ahead(&w, 5), BYTES);
  for (int tries = 0; tries < 500 && pages_in(map, 5) < BYTES / PAGE; tries++) nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  assert_int_equal(pages_in(map, 5), BYTES / PAGE);
  for (uint32_t i = 0; i < LEAD; i++)
    if (!before && i != 5) assert_int_equal(pages_in(map, i), 0); /* a file system in memory keeps all */
  munmap(map, (size_t)LEAD * BYTES);
  close(fd);
}

TEST(nothing_of_a_weight_that_is_not_there) {
  const mm_packed none = {0};
  assert_int_equal(mm_cpu_ahead(&none, 0), 0);
}

int main(void) { return run_unit_tests(NULL, NULL); }
