/* A file of given bytes, for tests. */
#ifndef MM_TESTS_PUT_FILE_H
#define MM_TESTS_PUT_FILE_H

#include <stdio.h>

#include "tests/unit/unit.h"

static inline void put_file(const char *path, const void *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  if (!f) fail_msg("cannot make %s", path);
  assert_int_equal(fwrite(bytes, 1, n, f), n);
  assert_int_equal(fclose(f), 0);
}

static inline void put_file_in(const char *dir, const char *name, const void *bytes, size_t n) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  put_file(path, bytes, n);
}

#endif
