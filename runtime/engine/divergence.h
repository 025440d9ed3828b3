/* Divergence of the logits of a checkpoint from those of a reference at the same positions: sums, percentiles, the printed result. */
#ifndef MM_RUNTIME_DIVERGENCE_H
#define MM_RUNTIME_DIVERGENCE_H

#include "formats/pack.h"

typedef struct mm_divergence {
  double sum, *kl;        /* KL(reference | measured) in nats: of all positions, and of each, in memory of the caller */
  uint64_t tokens, agree; /* positions, and those where both have the same most likely id */
} mm_divergence;

/* Adds a position from two rows of logits [vocab]. False without an error where the divergence is no finite number. */
MM_MUST_USE bool mm_divergence_add(mm_divergence *d, const float *reference, const float *measured, uint32_t vocab);
/* A result of `count` prompts or windows, which `unit` names. */
typedef struct mm_divergence_of {
  const char *checkpoint, *reference; /* as the user named them */
  const mm_pack *pack; /* of the checkpoint, which minimax-verify --divergence knows by its manifest's SHA-256; NULL: it has none */
  const char *unit;
  uint64_t count;
} mm_divergence_of;
/* Sorts d->kl and prints the result as a line or as JSON. */
MM_MUST_USE bool mm_divergence_print(const mm_divergence *d, const mm_divergence_of *of, bool json, mm_err *err);

#endif
