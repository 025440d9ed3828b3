/* Choosing the next token from logits. */
#ifndef MM_RUNTIME_SAMPLE_H
#define MM_RUNTIME_SAMPLE_H

#include "formats/base.h"

typedef struct mm_sampling {
  double temperature; /* 0: greedy */
  double top_p;       /* (0, 1]; 1 keeps all */
  uint32_t top_k;     /* 0 keeps all */
  uint64_t seed;
} mm_sampling;

typedef struct mm_sampler mm_sampler;
/* MM_USAGE E_SAMPLING for settings out of range. */
mm_sampler *mm_sampler_open(const mm_sampling *s, uint32_t vocab, mm_err *err);
void mm_sampler_close(mm_sampler *s); /* accepts NULL */
/* Greedy: the lowest id of the largest logit. Otherwise softmax(logits/temperature), then the top_k largest (of equal ones the
 * lowest ids), then the fewest of those that reach top_p of their sum, then one draw from a counter-based generator (same seed,
 * same draws, on every machine). -INFINITY and NaN are never chosen; -1 when there is nothing else. logits[vocab]. */
int32_t mm_sample(mm_sampler *s, const float *logits);

#endif
