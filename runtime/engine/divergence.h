/* Divergence of the logits of a checkpoint from those of a reference at the same positions: sums, percentiles, the printed result. */
#ifndef MM_RUNTIME_DIVERGENCE_H
#define MM_RUNTIME_DIVERGENCE_H

#include "formats/system/base.h"

typedef struct mm_divergence {
  double sum, *kl;        /* KL(reference | measured) in nats: of all positions, and of each, in memory of the caller */
  uint64_t tokens, agree; /* positions, and those where both have the same most likely id */
} mm_divergence;

/* Adds a position from two rows of logits [vocab]. False without an error where the divergence is no finite number. */
MM_MUST_USE bool mm_divergence_add(mm_divergence *d, const float *reference, const float *measured, uint32_t vocab);
/* Sorts d->kl and prints the result of `count` prompts or windows, which `unit` names, as a line or as JSON. */
MM_MUST_USE bool mm_divergence_print(const mm_divergence *d, const char *unit, uint64_t count, bool json, mm_err *err);

#endif
