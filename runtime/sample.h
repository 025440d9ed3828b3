/* Choosing the next token from logits. */
#ifndef MM_RUNTIME_SAMPLE_H
#define MM_RUNTIME_SAMPLE_H

#include "formats/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_sampling {
  double temperature; /* 0: greedy */
  double top_p;       /* (0, 1]; 1 keeps all */
  uint32_t top_k;     /* 0 keeps all */
  uint64_t seed;
} mm_sampling;

/* MM_USAGE E_SAMPLING for settings out of range. */
bool mm_sampling_check(const mm_sampling *set, mm_err *err);
/* The seed's n-th number in [0, 1), n from 1: the same on every machine. */
double mm_draw(uint64_t seed, uint64_t n);

/* Room to choose in; draws leave nothing behind in it. */
typedef struct mm_sampler mm_sampler;
mm_sampler *mm_sampler_open(uint32_t vocab, mm_err *err);
void mm_sampler_close(mm_sampler *s); /* accepts NULL */
/* Greedy: the lowest id of the largest logit. Otherwise softmax(logits/temperature), then the top_k largest (of equal ones the
 * lowest ids), then the fewest of those that reach top_p of their sum, then the seed's n-th draw. -INFINITY and NaN are never
 * chosen; -1 when there is nothing else. logits[vocab]; set has been checked. */
int32_t mm_sample(mm_sampler *s, const mm_sampling *set, uint64_t n, const float *logits);

#ifdef __cplusplus
}
#endif
#endif
