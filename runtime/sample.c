/* Choosing the next token from logits: greedy, or one draw from what top-k and top-p leave of the softmax. */
#include "runtime/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/draw.h"

typedef struct candidate {
  uint64_t mass; /* draw.h */
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

double mm_draw(uint64_t seed, uint64_t n) { return (double)(mm_draw_mix(seed, n) >> 11) * 0x1p-53; }

mm_sampler *mm_sampler_open(uint32_t vocab, mm_err *err) {
  if (vocab > MM_DRAW_IDS) {
    mm_fail(err, MM_UNSUPPORTED, "E_SAMPLING", mm_at(NULL, NULL), "found a vocabulary of %u ids, expected at most %u", vocab, MM_DRAW_IDS);
    return NULL;
  }
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

static uint64_t total(const candidate *c, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; i++) sum += c[i].mass;
  return sum;
}

/* Moves the best candidates to the front, up to `most` of them and no more than it takes to reach `mass`; returns how many. */
static size_t keep_best(candidate *c, size_t count, size_t most, uint64_t mass) {
  for (size_t i = count / 2; i-- > 0;) sift_down(c, count, i);
  size_t left = count;
  for (uint64_t sum = 0; left > 0 && count - left < most && sum < mass;) {
    const candidate best = c[0];
    c[0] = c[--left];
    c[left] = best;
    sift_down(c, left, 0);
    sum += best.mass;
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

/* Who arrives first; the largest logit has a mass, so someone does. */
static int32_t first_of_race(const candidate *c, size_t count, uint64_t race) {
  uint64_t first = MM_DRAW_NOBODY;
  float time = INFINITY;
  for (size_t i = 0; i < count; i++) {
    uint64_t bits = mm_draw_mix(race, (uint64_t)c[i].id + 1);
    if (c[i].mass == 0 || mm_draw_late(bits, (float)c[i].mass, time)) continue;
    uint64_t key = mm_draw_key(bits, c[i].mass, (uint32_t)c[i].id);
    if (key >= first) continue;
    first = key;
    time = mm_draw_time(key);
  }
  return (int32_t)(first & (MM_DRAW_IDS - 1));
}

int32_t mm_sample(mm_sampler *s, const mm_sampling *set, uint64_t n, const float *logits) {
  int32_t best = greedy(logits, s->vocab);
  if (set->temperature == 0 || best < 0) return best;
  candidate *c = s->candidate;
  size_t count = 0;
  const float scale = mm_draw_scale(set->temperature);
  for (uint32_t i = 0; i < s->vocab; i++) {
    if (!(logits[i] > -INFINITY)) continue;
    c[count++] = (candidate){mm_draw_mass(mm_draw_depth(logits[i], logits[best], scale)), logits[i], (int32_t)i};
  }
  if (set->top_k && set->top_k < count) count = keep_best(c, count, set->top_k, UINT64_MAX);
  if (set->top_p < 1) count = keep_best(c, count, count, mm_draw_share(set->top_p, total(c, count)));
  return first_of_race(c, count, mm_draw_mix(set->seed, n));
}
