/* Rules of an architecture, found by tests. */
#ifndef MM_TESTS_CONVERT_RULES_H
#define MM_TESTS_CONVERT_RULES_H

#include <string.h>

#include "convert/model/rule.h"
#include "tests/unit/unit.h"

/* A rule of M2 by the end of its name. */
static inline const mm_rule *rule(const char *end) {
  const mm_arch *a = &mm_arch_minimax_m2;
  for (size_t i = 0; i < a->rule_count; i++) {
    size_t n = strlen(a->rule[i].theirs), k = strlen(end);
    if (n >= k && strcmp(a->rule[i].theirs + n - k, end) == 0) return &a->rule[i];
  }
  fail_msg("no rule %s", end);
  return NULL;
}

#endif
