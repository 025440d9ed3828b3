/* Two conversions compared: every file of both directories, byte for byte. */
#ifndef MM_TESTS_CONVERTED_H
#define MM_TESTS_CONVERTED_H

#include "convert/write/convert.h"
#include "tests/unit/convert/source.h"

static inline void assert_same(const char *a, const char *b) {
  struct dirent **entry;
  int n = scandir(a, &entry, NULL, alphasort), files = 0;
  for (int i = 0; i < n; i++) {
    char path[2][512];
    snprintf(path[0], sizeof path[0], "%s/%.200s", a, entry[i]->d_name);
    snprintf(path[1], sizeof path[1], "%s/%.200s", b, entry[i]->d_name);
    if (entry[i]->d_name[0] != '.') {
      size_t n0, n1;
      mm_err err = {0};
      char *text0 = mm_file_slurp(path[0], 1 << 30, &n0, &err), *text1 = mm_file_slurp(path[1], 1 << 30, &n1, &err);
      if (!text0 || !text1)
        fail_msg("%s", err.text);
      else if (n0 != n1 || memcmp(text0, text1, n0) != 0)
        fail_msg("%s differs from %s", path[1], path[0]);
      free(text0);
      free(text1);
      files++;
    }
    free(entry[i]);
  }
  free(entry);
  assert_true(files >= 3);
}

#endif
