/* Choosing the next token from logits: greedy, or one draw from what top-k and top-p leave of the softmax. */
#include "runtime/engine/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"
#include "runtime/engine/random_draw.h"

typedef struct candidate {
  uint64_t mass; /* random_draw.h */
  float logit;
  int32_t id;
} candidate;

struct mm_sampler {
  uint32_t vocab;
  candidate *candidate; /* [vocab] */
  uint32_t *seen;       /* [vocab], zero between calls: HELD, and how often the reply holds the id */
};

#define HELD (UINT32_C(1) << 31)

static bool out_of_range(mm_err *err, const char *what, double found, const char *expected) {
  return mm_fail(err, MM_USAGE, "E_SAMPLING", mm_at(NULL, NULL), "%s: found %s, expected %s", what, MM_SHOWN_REAL(found), expected);
}

static bool check_bias(const mm_sampling *set, uint32_t vocab, mm_err *err) {
  for (uint32_t i = 0; i < set->bias_count; i++) {
    const mm_bias *b = &set->bias[i];
    if (b->id < 0 || (uint32_t)b->id >= vocab)
      return mm_fail(err, MM_USAGE, "E_SAMPLING", mm_at(NULL, NULL), "logit bias: found id %d, expected less than %u", b->id, vocab);
    if (!(b->add < INFINITY)) return out_of_range(err, "logit bias", b->add, "a number below infinity");
  }
  return true;
}

bool mm_sampling_check(const mm_sampling *set, uint32_t vocab, mm_err *err) {
  if (!(set->temperature >= 0 && set->temperature < INFINITY))
    return out_of_range(err, "temperature", set->temperature, "a finite number of at least 0");
  if (!(set->top_p > 0 && set->top_p <= 1)) return out_of_range(err, "top-p", set->top_p, "more than 0 and at most 1");
  if (!(set->min_p >= 0 && set->min_p <= 1)) return out_of_range(err, "min-p", set->min_p, "0 to 1");
  if (set->repetition != 0 && !(set->repetition >= 1e-3 && set->repetition <= 1e3))
    return out_of_range(err, "repetition penalty", set->repetition, "0.001 to 1000");
  if (!(fabs(set->presence) <= 1e3)) return out_of_range(err, "presence penalty", set->presence, "-1000 to 1000");
  if (!(fabs(set->frequency) <= 1e3)) return out_of_range(err, "frequency penalty", set->frequency, "-1000 to 1000");
  if (set->top_logprobs > MM_LOGPROBS) return out_of_range(err, "logprobs", set->top_logprobs, "at most 20");
  return check_bias(set, vocab, err);
}

static bool penalised(const mm_sampling *set) {
  return (set->repetition != 0 && set->repetition != 1) || set->presence != 0 || set->frequency != 0;
}

uint32_t mm_sampling_options(const mm_sampling *set) {
  return (set->min_p > 0 ? MM_SAMPLES_MIN_P : 0u) | (penalised(set) ? MM_SAMPLES_PENALTIES : 0u) |
         (set->bias_count ? MM_SAMPLES_BIAS : 0u) | (set->allowed ? MM_SAMPLES_MASK : 0u) | (set->logprobs ? MM_SAMPLES_LOGPROBS : 0u);
}

const char *mm_sampling_word(uint32_t options) {
  static const char *const word[] = {"min_p", "penalties", "logit bias", "a mask of allowed tokens", "logprobs"};
  for (size_t i = 0; i < sizeof word / sizeof *word; i++)
    if (options >> i & 1) return word[i];
  return "nothing";
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
  s->candidate = mm_calloc(vocab, sizeof *s->candidate, err);
  s->seen = mm_calloc(vocab, sizeof *s->seen, err);
  if (s->candidate && s->seen) return s;
  mm_sampler_close(s);
  return NULL;
}

void mm_sampler_close(mm_sampler *s) {
  if (!s) return;
  MM_FREE(s->candidate, s->seen, s);
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
  const uint64_t least = set->min_p > 0 ? mm_draw_share(set->min_p, MM_DRAW_ONE) : 0;
  for (uint32_t i = 0; i < s->vocab; i++) {
    if (!(logits[i] > -INFINITY)) continue;
    const uint64_t mass = mm_draw_mass(mm_draw_depth(logits[i], logits[best], scale));
    if (mass >= least) c[count++] = (candidate){mass, logits[i], (int32_t)i};
  }
  if (set->top_k && set->top_k < count) count = keep_best(c, count, set->top_k, UINT64_MAX);
  if (set->top_p < 1) count = keep_best(c, count, count, mm_draw_share(set->top_p, total(c, count)));
  return first_of_race(c, count, mm_draw_mix(set->seed, n));
}

static void penalise(mm_sampler *s, const mm_sampling *set, const int32_t *held, uint32_t count, float *logits) {
  const float repetition = set->repetition != 0 ? (float)set->repetition : 1, presence = (float)set->presence;
  for (uint32_t i = 0; i < count; i++)
    if (held[i] >= 0) s->seen[held[i]] = (s->seen[held[i]] | HELD) + (i >= set->prompt);
  for (uint32_t i = 0; i < count; i++) {
    if (held[i] < 0 || !s->seen[held[i]]) continue;
    float *logit = &logits[held[i]];
    *logit = mm_draw_penalty(*logit, repetition, presence, (float)set->frequency, s->seen[held[i]] & ~HELD);
    s->seen[held[i]] = 0;
  }
}

void mm_sample_adjust(mm_sampler *s, const mm_sampling *set, const int32_t *held, uint32_t count, float *logits) {
  for (uint32_t i = 0; set->allowed && i < s->vocab; i++)
    if (!(set->allowed[i / 32] >> i % 32 & 1)) logits[i] = -INFINITY;
  for (uint32_t i = 0; i < set->bias_count; i++) logits[set->bias[i].id] = mm_draw_add(logits[set->bias[i].id], set->bias[i].add);
  if (penalised(set)) penalise(s, set, held, count, logits);
}

void mm_sample_logprobs(const mm_sampler *s, const mm_sampling *set, int32_t id, const float *logits) {
  mm_logprob *out = set->logprobs, *top = out + 1;
  const int32_t best = greedy(logits, s->vocab);
  double sum = 0;
  uint32_t count = 0;
  for (uint32_t i = 0; best >= 0 && i < s->vocab; i++) {
    if (!(logits[i] > -INFINITY)) continue;
    sum += exp((double)logits[i] - logits[best]);
    uint32_t at = count < set->top_logprobs ? count++ : set->top_logprobs;
    if (at == set->top_logprobs && (at == 0 || !(logits[i] > logits[top[at - 1].id]))) continue;
    if (at == set->top_logprobs) at--;
    for (; at > 0 && logits[i] > logits[top[at - 1].id]; at--) top[at] = top[at - 1];
    top[at].id = (int32_t)i;
  }
  out->id = id;
  for (uint32_t i = count; i < set->top_logprobs; i++) top[i].id = -1;
  for (uint32_t i = 0; i <= set->top_logprobs; i++)
    out[i].logprob = out[i].id < 0 ? -INFINITY : (float)((double)logits[out[i].id] - logits[best] - log(sum));
}
