/* The memory that a process may use, by files that stand for the kernel's. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/memory.h"
#include "tests/unit/unit.h"

#define GIB (UINT64_C(1) << 30)

static char root[128];

static void put(const char *name, const char *text) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", root, name);
  FILE *f = fopen(path, "w");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

static uint64_t limit(const char *groups) {
  char path[256];
  put("groups", groups);
  snprintf(path, sizeof path, "%s/groups", root);
  return mm_memory_limit_of(64 * GIB, path, root);
}

static void make(const char *name) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", root, name);
  assert_int_equal(mkdir(path, 0700), 0);
}

static int begin(void **state) {
  (void)state;
  const char *where = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/memory-XXXXXX", where ? where : "/tmp");
  if (!mkdtemp(root)) return -1;
  make("a"), make("a/b"), make("memory"), make("memory/c"), make("unified"), make("unified/d");
  put("a/memory.max", "17179869184\n"); /* 16 GiB */
  put("a/b/memory.max", "max\n");       /* none of its own */
  put("memory/memory.limit_in_bytes", "9223372036854771712\n");
  put("memory/c/memory.limit_in_bytes", "3221225472\n"); /* 3 GiB */
  put("unified/d/memory.max", "5368709120\n");           /* 5 GiB */
  return 0;
}

static int end(void **state) {
  (void)state;
  char command[160];
  snprintf(command, sizeof command, "rm -r %s", root);
  return system(command);
}

TEST(limits) {
  assert_int_equal(limit(""), 64 * GIB);
  assert_int_equal(limit("0::/\n"), 64 * GIB);
  assert_int_equal(limit("0::/a\n"), 16 * GIB);
  assert_int_equal(limit("0::/a/b\n"), 16 * GIB); /* that of the group above */
  assert_int_equal(limit("0::/host/path\n"), 64 * GIB);
  assert_int_equal(limit("9:cpu:/c\n4:memory:/\n"), 64 * GIB);
  assert_int_equal(limit("9:cpu:/c\n4:memory:/c\n0::/"), 3 * GIB);
  assert_int_equal(limit("9:cpu:/c\n4:memory:/c/gone\n"), 3 * GIB);
  assert_int_equal(limit("4:memory:/c\n0::/d\n"), 3 * GIB);
  assert_int_equal(limit("0::/d\n"), 5 * GIB);
  assert_int_equal(limit("odd line\n4:memory\n0::/d\n"), 5 * GIB);
  put("memory.max", "2147483648"); /* a container sees its own group as the root */
  assert_int_equal(limit("0::/host/path\n"), 2 * GIB);
  assert_int_equal(mm_memory_limit_of(GIB, "/none", root), GIB);
}

static uint64_t left(const char *groups) {
  char path[256];
  put("groups", groups);
  snprintf(path, sizeof path, "%s/groups", root);
  return mm_memory_left_of(40 * GIB, path, root);
}

/* What processes use is not left; page cache is, and memory of files without a place on a disk is no such. */
TEST(left_of_limits) {
  put("memory.max", "max\n");
  assert_int_equal(left("0::/a\n"), 16 * GIB); /* nothing says what is used */
  put("a/memory.current", "9663676416\n");     /* 9 GiB */
  assert_int_equal(left("0::/a\n"), 7 * GIB);
  put("a/memory.stat", "anon 5\nfile 7516192768\nshmem 5368709120\ninactive_file 1073741824\nactive_file 1073741824\n");
  assert_int_equal(left("0::/a\n"), 9 * GIB);
  put("a/b/memory.current", "1\n");
  assert_int_equal(left("0::/a/b\n"), 9 * GIB); /* of the group above, with all that is in it */
  put("a/memory.current", "19327352832\n");     /* 18 GiB: the limit was lowered */
  assert_int_equal(left("0::/a\n"), 0);
  put("memory/c/memory.usage_in_bytes", "2147483648\n");
  put("memory/c/memory.stat", "inactive_file 7\ntotal_inactive_file 536870912\ntotal_active_file 536870912\n");
  assert_int_equal(left("4:memory:/c\n"), 2 * GIB);
  assert_int_equal(left("0::/none\n"), 40 * GIB);
}

TEST(of_this_machine) {
  const uint64_t n = mm_memory_limit();
  assert_true(n > UINT64_C(16) << 20 && n <= (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
  assert_true(mm_memory_left() > UINT64_C(16) << 20 && mm_memory_left() <= n);
}

int main(void) { return run_unit_tests(begin, end); }
