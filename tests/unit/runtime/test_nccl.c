/* The library that joins ranks of several processes: one that is not there, is another, lacks what is used or is too old is refused by
 * name. */
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/cuda/comm/nccl.h"
#include "tests/unit/unit.h"

/* tests/ops/preload/fake_nccl.so of this build, and what it says of itself. */
static char path[PATH_MAX];
static int *version;

static void refused(const char *so, const char *word) {
  mm_nccl n;
  mm_err err = {0};
  assert_int_equal(setenv("MM_NCCL_SO", so, 1), 0);
  assert_false(mm_nccl_open(&n, &err));
  assert_int_equal(err.status, MM_UNSUPPORTED);
  assert_string_equal(err.code, "E_NCCL");
  if (!strstr(err.text, word)) fail_msg("%s", err.text);
}

TEST(not_there) { refused("/no/libnccl.so.2", "/no/libnccl.so.2"); }
TEST(another) { refused("libm.so.6", "without ncclGetVersion"); }

TEST(too_old) {
  *version = 22703;
  refused(path, "found NCCL 2.27.3; ranks of several processes need 2.28.0 or newer");
}

TEST(found) {
  mm_nccl n;
  mm_err err = {0};
  assert_int_equal(setenv("MM_NCCL_SO", path, 1), 0);
  for (*version = 22809; *version <= 23004; *version += 195) {
    if (!mm_nccl_open(&n, &err)) fail_msg("%s", err.text);
    assert_int_equal(n.version, *version);
    assert_true(n.get_unique_id && n.comm_init_rank && n.comm_abort && n.comm_async_error && n.all_gather && n.error_string);
    assert_int_equal(mm_nccl_check_hosts(&n, &err), *version == 23004);
    if (*version == 23004) break;
    assert_string_equal(err.code, "E_NCCL");
    assert_non_null(strstr(err.text, "found NCCL 2.28.9; ranks on several hosts need 2.30.4 or newer"));
    err = (mm_err){0};
  }
}

int main(void) {
  char own[PATH_MAX] = {0};
  if (readlink("/proc/self/exe", own, sizeof own - 1) < 0) return 1;
  snprintf(path, sizeof path, "%.4000s/../../ops/preload/fake_nccl.so", dirname(own));
  void *so = dlopen(path, RTLD_NOW);
  if (!so || !(version = dlsym(so, "fake_nccl"))) {
    fprintf(stderr, "%s is not there\n", path);
    return 1;
  }
  return run_unit_tests(NULL, NULL);
}
