/* Choosing the next token from logits: greedy, or one draw from what top-k and top-p leave of the softmax. */
#include "runtime/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
  double weight; /* exp((logit - largest)/temperature): the probability but for a common factor */
  float logit;
  int32_t id;
} candidate;

struct mm_sampler {
  uint32_t vocab;
  candidate *candidate; /* [vocab] */
};

bool mm_sampling_check(const mm_sampling *set, mm_err *err) {
  const mm_where nowhere = mm_at(NULL, NULL);
  if (!(set->temperature >= 0 && set->temperature < INFINITY))
    return mm_fail(err, MM_USAGE, "E_SAMPLING", nowhere, "temperature: found %g, expected a finite number of at least 0", set->temperature);
  if (!(set->top_p > 0 && set->top_p <= 1))
    return mm_fail(err, MM_USAGE, "E_SAMPLING", nowhere, "top-p: found %g, expected more than 0 and at most 1", set->top_p);
  return true;
}

/* 53 bits. The splitmix64 generator (Steele, Lea, Flood 2014), whose state is a counter: seed + n·golden ratio. */
double mm_draw(uint64_t seed, uint64_t n) {
  uint64_t x = seed + n * UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

mm_sampler *mm_sampler_open(uint32_t vocab, mm_err *err) {
  mm_sampler *s = mm_calloc(1, sizeof *s, err);
  if (!s) return NULL;
  s->vocab = vocab;
  if ((s->candidate = mm_calloc(vocab, sizeof *s->candidate, err))) return s;
  free(s);
  return NULL;
}

void mm_sampler_close(mm_sampler *s) {
  if (!s) return;
  free(s->candidate);
  free(s);
}

/* The larger logit first, the lower id among equals. */
static bool before(const candidate *a, const candidate *b) { return a->logit != b->logit ? a->logit > b->logit : a->id < b->id; }

static void sift_down(candidate *c, size_t count, size_t i) {
  const candidate x = c[i];
  for (size_t child; (child = 2 * i + 1) < count; i = child) {
    if (child + 1 < count && before(&c[child + 1], &c[child])) child++;
    if (!before(&c[child], &x)) break;
    c[i] = c[child];
  }
  c[i] = x;
}

static double total(const candidate *c, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++) sum += c[i].weight;
  return sum;
}

/* Moves the best candidates to the front, up to `most` of them and no more than it takes to reach `mass`; returns how many. */
static size_t keep_best(candidate *c, size_t count, size_t most, double mass) {
  for (size_t i = count / 2; i-- > 0;) sift_down(c, count, i);
  size_t left = count;
  for (double sum = 0; left > 0 && count - left < most && sum < mass;) {
    const candidate best = c[0];
    c[0] = c[--left];
    c[left] = best;
    sift_down(c, left, 0);
    sum += best.weight;
  }
  memmove(c, c + left, (count - left) * sizeof *c);
  return count - left;
}

static int32_t greedy(const float *logits, uint32_t vocab) {
  float largest = -INFINITY;
  int32_t best = -1;
  for (uint32_t i = 0; i < vocab; i++) {
    if (!(logits[i] > largest)) continue; /* NaN is never larger */
    largest = logits[i];
    best = (int32_t)i;
  }
  return best;
}

int32_t mm_sample(mm_sampler *s, const mm_sampling *set, uint64_t n, const float *logits) {
  int32_t best = greedy(logits, s->vocab);
  if (set->temperature == 0 || best < 0) return best;
  candidate *c = s->candidate;
  size_t count = 0;
  for (uint32_t i = 0; i < s->vocab; i++) {
    if (!(logits[i] > -INFINITY)) continue;
    /* Equal ones apart: infinity less infinity is no number. */
    double weight = logits[i] == logits[best] ? 1 : exp(((double)logits[i] - (double)logits[best]) / set->temperature);
    c[count++] = (candidate){weight, logits[i], (int32_t)i};
  }
  if (set->top_k && set->top_k < count) count = keep_best(c, count, set->top_k, INFINITY);
  if (set->top_p < 1) count = keep_best(c, count, count, set->top_p * total(c, count));
  double target = mm_draw(set->seed, n) * total(c, count), sum = 0;
  int32_t id = best;
  for (size_t i = 0; i < count && sum <= target; i++) {
    if (c[i].weight == 0) continue;
    sum += c[i].weight;
    id = c[i].id;
  }
  return id;
}
