/* Sampler: exact cuts, and frequencies of draws against the probabilities (chi-square). Seeds are fixed, so the outcome is too. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/random_draw.h"
#include "runtime/engine/sample.h"
#include "tests/unit/unit.h"

/* One sequence of draws. */
typedef struct draws {
  mm_sampling set;
  mm_sampler *capacity;
  uint64_t n;
} draws;

static draws open_ok(double temperature, double top_p, uint32_t top_k, uint64_t seed, uint32_t vocab) {
  mm_err err = {0};
  draws d = {{.temperature = temperature, .top_p = top_p, .top_k = top_k, .seed = seed}, mm_sampler_open(vocab, &err), 0};
  if (!d.capacity || !mm_sampling_check(&d.set, vocab, &err)) fail_msg("%s", err.text);
  return d;
}

static int32_t next(draws *d, const float *logits) { return mm_sample(d->capacity, &d->set, ++d->n, logits); }

static int32_t once(double temperature, double top_p, uint32_t top_k, const float *logits, uint32_t vocab) {
  draws s = open_ok(temperature, top_p, top_k, 11, vocab);
  int32_t id = next(&s, logits);
  mm_sampler_close(s.capacity);
  return id;
}

#define DRAWS 200000
#define RULE  0xd02725561db63148 /* of test_rule */

static void count_draws(draws s, const float *logits, uint32_t vocab, unsigned *seen) {
  memset(seen, 0, vocab * sizeof *seen);
  for (unsigned i = 0; i < DRAWS; i++) {
    int32_t id = next(&s, logits);
    assert_in_range(id, 0, vocab - 1);
    seen[id]++;
  }
  mm_sampler_close(s.capacity);
}

/* Draws follow p[vocab] (which sums to 1): chi-square below the mean of its distribution plus five standard deviations. */
static void check_draws(const unsigned *seen, const double *p, uint32_t vocab) {
  double chi2 = 0, freedom = -1;
  for (uint32_t i = 0; i < vocab; i++) {
    if (p[i] == 0) {
      assert_int_equal(seen[i], 0);
      continue;
    }
    double want = p[i] * DRAWS;
    chi2 += (seen[i] - want) * (seen[i] - want) / want;
    freedom++;
  }
  if (chi2 > freedom + 5 * sqrt(2 * freedom)) fail_msg("chi-square %.1f with %.0f degrees of freedom", chi2, freedom);
}

#define VOCAB 40

/* Distinct weights in a shuffled order; probabilities at temperature T are w^(1/T) over their sum. */
static void make_logits(float *logits, double *weight) {
  for (unsigned i = 0; i < VOCAB; i++) {
    weight[i] = 1 + (i * 17 + 5) % VOCAB;
    logits[i] = (float)log(weight[i]) + 3;
  }
}

TEST(test_temperatures) {
  static const double temperatures[] = {0.5, 1, 2, 1e308};
  float logits[VOCAB];
  double weight[VOCAB], p[VOCAB];
  unsigned seen[VOCAB];
  make_logits(logits, weight);
  for (size_t t = 0; t < sizeof temperatures / sizeof *temperatures; t++) {
    double sum = 0;
    for (unsigned i = 0; i < VOCAB; i++) sum += pow(weight[i], 1 / temperatures[t]);
    for (unsigned i = 0; i < VOCAB; i++) p[i] = pow(weight[i], 1 / temperatures[t]) / sum;
    count_draws(open_ok(temperatures[t], 1, 0, 7 + t, VOCAB), logits, VOCAB, seen);
    check_draws(seen, p, VOCAB);
  }
}

/* The weights are 1 … 40: the k largest sum to k·(81 - k)/2. */
TEST(test_cuts) {
  float logits[VOCAB];
  double weight[VOCAB], p[VOCAB];
  unsigned seen[VOCAB];
  make_logits(logits, weight);
  const struct {
    double top_p;
    uint32_t top_k;
    unsigned kept;
  } cuts[] = {
      {1, 1, 1},           {1, 7, 7},           {1, 39, 39},          {1, 40, 40},
      {1, 4000, 40},       {39.9 / 820, 0, 1},  {40.1 / 820, 0, 2}, /* 40, 79, 117 … of 820 */
      {116.9 / 820, 0, 3}, {117.1 / 820, 0, 4}, {818.9 / 820, 0, 39}, {819.1 / 820, 0, 40},
      {1e-300, 0, 1},      {116.9 / 259, 7, 3}, {117.1 / 259, 7, 4}, /* of what top-k leaves, 259 */
  };
  for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c += SANITIZED ? 4 : 1) {
    double sum = 0;
    for (unsigned i = 0; i < VOCAB; i++) sum += p[i] = weight[i] > VOCAB - cuts[c].kept ? weight[i] : 0;
    for (unsigned i = 0; i < VOCAB; i++) p[i] /= sum;
    count_draws(open_ok(1, cuts[c].top_p, cuts[c].top_k, 100 + c, VOCAB), logits, VOCAB, seen);
    check_draws(seen, p, VOCAB);
  }
}

/* Among equal logits top-k and top-p keep the lowest ids. */
TEST(test_ties) {
  const float logits[] = {1, 2, 2, 0, 2, 2};
  unsigned seen[6];
  count_draws(open_ok(1, 1, 3, 5, 6), logits, 6, seen);
  check_draws(seen, (double[]){0, 1 / 3.0, 1 / 3.0, 0, 1 / 3.0, 0}, 6);
  count_draws(open_ok(1, 0.3, 0, 5, 6), logits, 6, seen);
  check_draws(seen, (double[]){0, 0.5, 0.5, 0, 0, 0}, 6);
  assert_int_equal(once(0, 1, 0, logits, 6), 1);
}

TEST(test_greedy) {
  const float logits[] = {-3, -INFINITY, -1, -1, NAN, -2}, zeros[] = {-0.0f, 0.0f};
  assert_int_equal(once(0, 1, 0, logits, 6), 2);
  assert_int_equal(once(0, 0.5, 3, logits, 6), 2);
  assert_int_equal(once(0, 1, 0, zeros, 2), 0);
}

/* Whatever the other settings, only numbers are drawn. */
TEST(test_odd_logits) {
  static const struct {
    double temperature, top_p;
    uint32_t top_k;
  } sets[] = {{0, 1, 0}, {1, 1, 0}, {1e308, 1, 0}, {5e-324, 1, 0}, {1, 0.999, 0}, {1e308, 0.999, 5}, {1, 1, 8}};
  const float some[] = {NAN, -INFINITY, 0, -INFINITY, NAN, 0, -80, -INFINITY}, none[] = {NAN, -INFINITY, -NAN};
  const float infinite[] = {3, INFINITY, NAN, INFINITY, -INFINITY};
  for (size_t c = 0; c < sizeof sets / sizeof *sets; c++) {
    draws s = open_ok(sets[c].temperature, sets[c].top_p, sets[c].top_k, c, 8);
    for (unsigned i = 0; i < ROUNDS(20000u); i++) {
      int32_t id = next(&s, some);
      assert_true(id == 2 || id == 5 || id == 6);
    }
    mm_sampler_close(s.capacity);
    assert_int_equal(once(sets[c].temperature, sets[c].top_p, sets[c].top_k, none, 3), -1);
    int32_t id = once(sets[c].temperature, sets[c].top_p, sets[c].top_k, infinite, 5);
    assert_true(id == 1 || (id == 3 && sets[c].temperature > 0));
  }
}

/* A temperature near 0 is greedy but for ties, which stay even. */
TEST(test_cold) {
  const float logits[] = {4.9999995f, 5, 5, 1};
  unsigned seen[4];
  count_draws(open_ok(5e-324, 1, 0, 3, 4), logits, 4, seen);
  check_draws(seen, (double[]){0, 0.5, 0.5, 0}, 4);
}

/* A whole vocabulary. */
TEST(test_large) {
  enum { LARGE = 200064 };
  float *logits = malloc(LARGE * sizeof *logits);
  unsigned *seen = malloc(LARGE * sizeof *seen);
  assert_true(logits && seen);
  for (unsigned i = 0; i < LARGE; i++) logits[i] = (float)((i * UINT64_C(2654435761) + 12345) % LARGE) * 1e-4f;
  draws s = open_ok(1, 1, 50, 9, LARGE);
  memset(seen, 0, LARGE * sizeof *seen);
  for (unsigned i = 0; i < 200; i++) seen[next(&s, logits)]++;
  mm_sampler_close(s.capacity);
  unsigned kinds = 0;
  for (unsigned i = 0; i < LARGE; i++) {
    if (seen[i]) assert_true(logits[i] >= (float)(LARGE - 50) * 1e-4f);
    kinds += seen[i] > 0;
  }
  assert_in_range(kinds, 30, 50);
  free(logits);
  free(seen);
}

/* The numbers are those of splitmix64: first values of seed 1234567 as published with the generator. */
TEST(test_generator) {
  static const uint64_t want[] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u, 4593380528125082431u,
                                  16408922859458223821u};
  for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
    assert_int_equal(mm_draw_mix(1234567, i + 1), want[i]);
    assert_true(mm_draw(1234567, i + 1) == (double)(want[i] >> 11) * 0x1p-53);
  }
}

/* Masses never grow with the depth: where they are largest, so that one step is more than their last bit, they fall. */
TEST(test_masses_fall) {
  for (uint64_t i = 0; i < ROUNDS(20000u); i++) {
    const uint32_t whole = i % 4 ? 0 : (uint32_t)(mm_draw_mix(5, i) % 41);
    const uint32_t part =
        i < 2000 ? (UINT32_C(1) << 26) - 50 : (uint32_t)mm_draw_mix(6, i) % (UINT32_C(1) << 26); /* the next factor of two */
    for (uint32_t d = (whole << 26) + part, n = 0; n < 100; n++, d++) {
      const uint64_t mass = mm_draw_mass(d), next = mm_draw_mass(d + 1);
      if (!(whole == 0 ? next < mass : next <= mass))
        fail_msg("mass of %u: %llu, after it %llu", d, (unsigned long long)mass, (unsigned long long)next);
    }
  }
}

/* The three numbers of random_draw.h against libm's: masses, waits, and a bound that never exceeds a wait. */
TEST(test_numbers) {
  assert_int_equal(mm_draw_mass(0), MM_DRAW_ONE);
  double worst_mass = 0, worst_wait = 0;
  for (uint64_t i = 0; i < ROUNDS(2000000u); i++) {
    const uint64_t bits = mm_draw_mix(3, i) >> i % 50;
    const uint32_t depth = (uint32_t)mm_draw_mix(4, i) % (30u << 26);
    const double mass = exp2(40 - depth * 0x1p-26), wait = mm_draw_wait(bits);
    worst_mass = fmax(worst_mass, fabs((double)mm_draw_mass(depth) - mass) / (mass * 0x1p-29 + 1));
    /* the bits as a number in (0, 1), to the last but one */
    const int zeros = bits ? __builtin_clzll(bits) : 64;
    const double q = ((double)(zeros < 63 ? bits << (zeros + 1) >> 11 : 0) + 0.5) * 0x1p-54, want = zeros - log1p(-q) / log(2);
    worst_wait = fmax(worst_wait, fabs(wait - want) / want);
    assert_true(mm_draw_wait_least(bits) <= wait);
  }
  if (!(worst_mass <= 1)) fail_msg("masses: %g of the bound", worst_mass);
  if (!(worst_wait < 1e-10)) fail_msg("waits: relative error %g", worst_wait);
  assert_int_equal(mm_draw_share(0.5, 10), 5);
  assert_int_equal(mm_draw_share(0.51, 10), 6);
  assert_int_equal(mm_draw_share(1e-300, 10), 1);
}

/* The rule is fixed: what these seeds drew once they draw for ever, on every device. */
TEST(test_rule) {
  enum { IDS = 5000, CASES = 64 };
  static float logits[IDS];
  uint64_t hash = 0;
  for (uint32_t c = 0; c < CASES; c++) {
    for (uint32_t i = 0; i < IDS; i++) logits[i] = (float)(mm_draw_mix(c, i + 1) >> 40) * 0x1p-21f; /* exact numbers in [0, 8) */
    draws s = open_ok(0.25 + c % 7 * 0.25, c % 3 ? 1 : 0.9, c % 5 ? 0 : 40, c, IDS);
    hash = mm_draw_mix(hash, (uint64_t)next(&s, logits) + 1);
    mm_sampler_close(s.capacity);
  }
  if (hash != RULE) fail_msg("the draws changed: 0x%016llx", (unsigned long long)hash);
}

/* Logits that differ by rounding, as two devices' do, draw the same id but for a few: one in as many as the two distributions differ by,
 * twice. */
TEST(test_near_logits) {
  enum { IDS = 2000, DRAWN = 4000 };
  static float logits[2][IDS];
  for (uint32_t i = 0; i < IDS; i++) {
    logits[0][i] = (float)(mm_draw(1, i + 1) * 4);
    logits[1][i] = logits[0][i] + (float)(mm_draw(2, i + 1) - 0.5) * 4e-3f;
  }
  draws a = open_ok(1, 1, 0, 77, IDS), b = open_ok(1, 1, 0, 77, IDS);
  unsigned other = 0;
  for (unsigned i = 0; i < DRAWN; i++) other += next(&a, logits[0]) != next(&b, logits[1]);
  mm_sampler_close(a.capacity);
  mm_sampler_close(b.capacity);
  assert_in_range(other, 0, DRAWN / 250); /* the distributions differ by 0.0005 */
}

/* A vocabulary that keys cannot name. */
TEST(test_vocab_refused) {
  mm_err err = {0};
  assert_null(mm_sampler_open((1u << 24) + 1, &err));
  assert_int_equal(err.status, MM_UNSUPPORTED);
  assert_string_equal(err.code, "E_SAMPLING");
}

TEST(test_refused) {
  static const mm_bias high = {10, 0}, negative = {-1, 0}, nan = {1, NAN}, infinite = {1, INFINITY};
#define SET(...) \
  { .temperature = 1, .top_p = 1, __VA_ARGS__ }
  static const mm_sampling sets[] = {
      {.temperature = -1, .top_p = 1},
      {.temperature = -1e-9, .top_p = 1},
      {.temperature = NAN, .top_p = 1},
      {.temperature = INFINITY, .top_p = 1},
      {.temperature = 1, .top_p = 0},
      {.temperature = 1, .top_p = -0.5},
      {.temperature = 1, .top_p = 1.5},
      {.temperature = 1, .top_p = NAN},
      SET(.min_p = -0.1),
      SET(.min_p = 1.1),
      SET(.min_p = NAN),
      SET(.repetition = -1),
      SET(.repetition = INFINITY),
      SET(.repetition = NAN),
      SET(.presence = NAN),
      SET(.presence = INFINITY),
      SET(.frequency = NAN),
      SET(.frequency = -1e9),
      SET(.top_logprobs = MM_LOGPROBS + 1),
      SET(.bias_count = 1, .bias = &high),
      SET(.bias_count = 1, .bias = &negative),
      SET(.bias_count = 1, .bias = &nan),
      SET(.bias_count = 1, .bias = &infinite),
  };
  for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
    mm_err err = {0};
    assert_false(mm_sampling_check(&sets[i], 10, &err));
    assert_int_equal(err.status, MM_USAGE);
    assert_string_equal(err.code, "E_SAMPLING");
  }
  mm_sampler_close(NULL);
}

int main(void) { return run_unit_tests(NULL, NULL); }
