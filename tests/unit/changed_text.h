/* Texts that are wrong in one place. */
#ifndef MM_TESTS_CHANGED_TEXT_H
#define MM_TESTS_CHANGED_TEXT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/unit.h"

/* text with the first `old` after the first `anchor` replaced; free() it. */
static inline char *replaced(const char *text, const char *anchor, const char *old, const char *new) {
  const char *from = strstr(text, anchor), *at = from ? strstr(from, old) : NULL;
  if (!at) fail_msg("no \"%s\" after \"%s\"", old, anchor);
  size_t n = strlen(text) + strlen(new) + 1;
  char *out = malloc(n);
  snprintf(out, n, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
  return out;
}

#endif
