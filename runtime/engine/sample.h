/* Sampling of the next token from logits. */
#ifndef MM_RUNTIME_SAMPLE_H
#define MM_RUNTIME_SAMPLE_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_LOGPROBS 20 /* likeliest ids at most, besides the sampled one */

typedef struct mm_bias {
  int32_t id;
  float add; /* to its logit; -INFINITY: never */
} mm_bias;

typedef struct mm_logprob {
  int32_t id;
  float logprob; /* ln of its share of the softmax of the model's own logits: before bias, penalties, temperature and cuts */
} mm_logprob;

/* How one token is sampled. Zeroes but for top_p = 1 are greedy. Memory behind the pointers is read until the sampling was queued, except
 * logprobs, which collect fills. */
typedef struct mm_sampling {
  double temperature; /* 0: greedy */
  double top_p;       /* (0, 1]; 1: all ids */
  uint32_t top_k;     /* 0: all ids */
  uint64_t seed;
  double min_p; /* [0, 1]: an id less likely than this share of the likeliest's probability is not drawn */
  /* Penalties of ids that the sequence holds already. repetition (0 or 1: none): logits above 0 are divided by it, others multiplied.
   * frequency is subtracted for each time that the reply holds the id, presence once; the reply is what follows the first
   * `prompt` tokens. */
  double repetition, presence, frequency;
  uint32_t prompt;
  uint32_t bias_count;
  const mm_bias *bias;     /* [bias_count], each id once */
  const uint32_t *allowed; /* [ceil(vocab/32)]: bit id % 32 of word id / 32; NULL: all are allowed */
  uint32_t top_logprobs;   /* ≤ MM_LOGPROBS */
  mm_logprob *logprobs;    /* [1 + top_logprobs]: the sampled id, then the likeliest in falling order; or NULL */
} mm_sampling;

/* Options of a row besides temperature, top_p, top_k and seed; mm_sampling_options: the bits of those that the row uses. */
enum { MM_SAMPLES_MIN_P = 1, MM_SAMPLES_PENALTIES = 2, MM_SAMPLES_BIAS = 4, MM_SAMPLES_MASK = 8, MM_SAMPLES_LOGPROBS = 16 };
uint32_t mm_sampling_options(const mm_sampling *set);
/* The lowest bit's name: "min_p", "penalties", "logit bias", "a mask of allowed tokens", "logprobs". */
const char *mm_sampling_word(uint32_t options);

/* MM_USAGE E_SAMPLING for settings out of range, and for ids to bias of vocab and above. */
MM_MUST_USE bool mm_sampling_check(const mm_sampling *set, uint32_t vocab, mm_err *err);
/* The seed's n-th number in [0, 1), n from 1: the same on every machine. */
double mm_draw(uint64_t seed, uint64_t n);

/* Scratch memory of mm_sample; a call leaves no state in it. MM_UNSUPPORTED E_SAMPLING for a vocab above 2^24, MM_LIMIT. */
typedef struct mm_sampler mm_sampler;
mm_sampler *mm_sampler_open(uint32_t vocab, mm_err *err);
void mm_sampler_close(mm_sampler *s); /* accepts NULL */
/* Greedy: the lowest id of the largest logit. Otherwise one draw, by the rule that every backend keeps to the bit (random_draw.h):
 * 1. an id's mass is exp((logit - largest)/temperature) in 2^40ths, rounded down to a whole number; 0 is never drawn, nor is what is
 *    below ceil(min_p · 2^40);
 * 2. the top_k largest logits stay, of equal ones the lowest ids;
 * 3. under top_p < 1 the fewest of those stay, the largest first, whose masses reach top_p of their sum;
 * 4. of what stays an id is drawn with the probability mass / Σ mass: the first of a race in which each id has a clock of its own,
 *    which (seed, n, id) alone sets. The same logits, settings, seed and n give the same id on the CPU and on CUDA, at every tp.
 * -INFINITY and NaN are never sampled; -1 when there is nothing else. logits[vocab]; set has been checked; n from 1. */
int32_t mm_sample(mm_sampler *s, const mm_sampling *set, uint64_t n, const float *logits);
/* Adjusts the logits before sampling, in this order: ids that are not allowed become -INFINITY, biases are added, then of each id that
 * the sequence held[count] contains (-1: one that is not known): repetition, frequency, presence. One rounding to f32 each (random_draw.h).
 */
void mm_sample_adjust(mm_sampler *s, const mm_sampling *set, const int32_t *held, uint32_t count, float *logits);
/* set->logprobs of these logits and the sampled id: -1 leaves its logprob -INFINITY. Places without an id left are id -1, -INFINITY.
 * The sum is taken in f64. */
void mm_sample_logprobs(const mm_sampler *s, const mm_sampling *set, int32_t id, const float *logits);

#ifdef __cplusplus
}
#endif
#endif
