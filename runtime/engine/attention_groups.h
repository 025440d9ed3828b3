/* --dp: the groups of attention that a run has of those that its checkpoint was made for. */
#ifndef MM_RUNTIME_ATTENTION_GROUPS_H
#define MM_RUNTIME_ATTENTION_GROUPS_H

#include "loader/random_weights.h"

#define MM_OPTION_DP(at)                                                                                                                 \
  MM_OPTION(STR, "dp", at, "N",                                                                                                          \
            "groups of ranks with all of attention each, a divisor of those that the checkpoint was made for; auto: by the device, the " \
            "sequences at a time and measured times (as it was made)")
#define MM_OPTION_DP_NUMBER(at) \
  MM_OPTION(STR, "dp", at, "N", \
            "groups of ranks with all of attention each, as the programs that use these weights have them (as the checkpoint was made)")

typedef struct mm_groups_request {
  const char *word;    /* of --dp: a number or "auto"; NULL: as the checkpoint was made */
  const char *device;  /* of --device */
  uint64_t sequences;  /* that run at a time at most; 0: not known, and auto is refused */
  const char *needs_1; /* what needs one group, or NULL: auto gives it */
} mm_groups_request;

enum { MM_GROUPS_LINE = 400 };
/* Cuts the opened shards as --dp says (mm_shards_regroup). line: the groups and the reason, "" without --dp. MM_USAGE E_USAGE for a word
 * that is neither; the errors of mm_shards_regroup. */
MM_MUST_USE bool mm_groups_select(mm_shards *s, const mm_groups_request *r, char line[MM_GROUPS_LINE], mm_err *err);
/* mm_shards_open_as, then the same. */
MM_MUST_USE bool mm_groups_open(mm_shards *s, const char *dir, const mm_dummy *d, const mm_groups_request *r, char line[MM_GROUPS_LINE],
                                mm_err *err);

#endif
