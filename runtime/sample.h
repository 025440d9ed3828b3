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

/* Room to choose in; draws leave nothing behind in it. MM_UNSUPPORTED E_SAMPLING for a vocab above 2^24, MM_LIMIT. */
typedef struct mm_sampler mm_sampler;
mm_sampler *mm_sampler_open(uint32_t vocab, mm_err *err);
void mm_sampler_close(mm_sampler *s); /* accepts NULL */
/* Greedy: the lowest id of the largest logit. Otherwise one draw, by the rule that every backend keeps to the bit (draw.h):
 * 1. an id's mass is exp((logit - largest)/temperature) in 2^40ths, rounded down to a whole number; 0 is never drawn;
 * 2. the top_k largest logits stay, of equal ones the lowest ids;
 * 3. under top_p < 1 the fewest of those stay, the largest first, whose masses reach top_p of their sum;
 * 4. of what stays an id is drawn with the probability mass / Σ mass: the first of a race in which each id has a clock of its own,
 *    which (seed, n, id) alone sets. So the same logits, settings, seed and n give the same id on the CPU and on CUDA, at every tp.
 * -INFINITY and NaN are never chosen; -1 when there is nothing else. logits[vocab]; set has been checked; n from 1. */
int32_t mm_sample(mm_sampler *s, const mm_sampling *set, uint64_t n, const float *logits);

#ifdef __cplusplus
}
#endif
#endif
