/* Sampler: exact cuts, and frequencies of draws against the probabilities (chi-square). Seeds are fixed, so the outcome is too. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/sample.h"

/* One sequence of draws. */
typedef struct draws {
  mm_sampling set;
  mm_sampler *room;
  uint64_t n;
} draws;

static draws open_ok(double temperature, double top_p, uint32_t top_k, uint64_t seed, uint32_t vocab) {
  mm_err err = {0};
  draws d = {{temperature, top_p, top_k, seed}, mm_sampler_open(vocab, &err), 0};
  if (!d.room || !mm_sampling_check(&d.set, &err)) fail_msg("%s", err.text);
  return d;
}

static int32_t next(draws *d, const float *logits) { return mm_sample(d->room, &d->set, ++d->n, logits); }

static int32_t once(double temperature, double top_p, uint32_t top_k, const float *logits, uint32_t vocab) {
  draws s = open_ok(temperature, top_p, top_k, 11, vocab);
  int32_t id = next(&s, logits);
  mm_sampler_close(s.room);
  return id;
}

#define DRAWS 200000

static void count_draws(draws s, const float *logits, uint32_t vocab, unsigned *seen) {
  memset(seen, 0, vocab * sizeof *seen);
  for (unsigned i = 0; i < DRAWS; i++) {
    int32_t id = next(&s, logits);
    assert_in_range(id, 0, vocab - 1);
    seen[id]++;
  }
  mm_sampler_close(s.room);
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

static void test_temperatures(void **state) {
  (void)state;
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
static void test_cuts(void **state) {
  (void)state;
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
  for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
    double sum = 0;
    for (unsigned i = 0; i < VOCAB; i++) sum += p[i] = weight[i] > VOCAB - cuts[c].kept ? weight[i] : 0;
    for (unsigned i = 0; i < VOCAB; i++) p[i] /= sum;
    count_draws(open_ok(1, cuts[c].top_p, cuts[c].top_k, 100 + c, VOCAB), logits, VOCAB, seen);
    check_draws(seen, p, VOCAB);
  }
}

/* Of equal logits top-k and top-p keep the lowest ids. */
static void test_ties(void **state) {
  (void)state;
  const float logits[] = {1, 2, 2, 0, 2, 2};
  unsigned seen[6];
  count_draws(open_ok(1, 1, 3, 5, 6), logits, 6, seen);
  check_draws(seen, (double[]){0, 1 / 3.0, 1 / 3.0, 0, 1 / 3.0, 0}, 6);
  count_draws(open_ok(1, 0.3, 0, 5, 6), logits, 6, seen);
  check_draws(seen, (double[]){0, 0.5, 0.5, 0, 0, 0}, 6);
  assert_int_equal(once(0, 1, 0, logits, 6), 1);
}

static void test_greedy(void **state) {
  (void)state;
  const float logits[] = {-3, -INFINITY, -1, -1, NAN, -2}, zeros[] = {-0.0f, 0.0f};
  assert_int_equal(once(0, 1, 0, logits, 6), 2);
  assert_int_equal(once(0, 0.5, 3, logits, 6), 2);
  assert_int_equal(once(0, 1, 0, zeros, 2), 0);
}

/* Whatever the other settings, only numbers are drawn. */
static void test_odd_logits(void **state) {
  (void)state;
  static const struct {
    double temperature, top_p;
    uint32_t top_k;
  } sets[] = {{0, 1, 0}, {1, 1, 0}, {1e308, 1, 0}, {5e-324, 1, 0}, {1, 0.999, 0}, {1e308, 0.999, 5}, {1, 1, 8}};
  const float some[] = {NAN, -INFINITY, 0, -INFINITY, NAN, 0, -80, -INFINITY}, none[] = {NAN, -INFINITY, -NAN};
  const float infinite[] = {3, INFINITY, NAN, INFINITY, -INFINITY};
  for (size_t c = 0; c < sizeof sets / sizeof *sets; c++) {
    draws s = open_ok(sets[c].temperature, sets[c].top_p, sets[c].top_k, c, 8);
    for (unsigned i = 0; i < 20000; i++) {
      int32_t id = next(&s, some);
      assert_true(id == 2 || id == 5 || id == 6);
    }
    mm_sampler_close(s.room);
    assert_int_equal(once(sets[c].temperature, sets[c].top_p, sets[c].top_k, none, 3), -1);
    int32_t id = once(sets[c].temperature, sets[c].top_p, sets[c].top_k, infinite, 5);
    assert_true(id == 1 || (id == 3 && sets[c].temperature > 0));
  }
}

/* A temperature near 0 is greedy but for ties, which stay even. */
static void test_cold(void **state) {
  (void)state;
  const float logits[] = {4.9999995f, 5, 5, 1};
  unsigned seen[4];
  count_draws(open_ok(5e-324, 1, 0, 3, 4), logits, 4, seen);
  check_draws(seen, (double[]){0, 0.5, 0.5, 0}, 4);
}

/* A whole vocabulary. */
static void test_large(void **state) {
  (void)state;
  enum { LARGE = 200064 };
  float *logits = malloc(LARGE * sizeof *logits);
  unsigned *seen = malloc(LARGE * sizeof *seen);
  assert_true(logits && seen);
  for (unsigned i = 0; i < LARGE; i++) logits[i] = (float)((i * UINT64_C(2654435761) + 12345) % LARGE) * 1e-4f;
  draws s = open_ok(1, 1, 50, 9, LARGE);
  memset(seen, 0, LARGE * sizeof *seen);
  for (unsigned i = 0; i < 200; i++) seen[next(&s, logits)]++;
  mm_sampler_close(s.room);
  unsigned kinds = 0;
  for (unsigned i = 0; i < LARGE; i++) {
    if (seen[i]) assert_true(logits[i] >= (float)(LARGE - 50) * 1e-4f);
    kinds += seen[i] > 0;
  }
  assert_in_range(kinds, 30, 50);
  free(logits);
  free(seen);
}

/* The draws are those of splitmix64: first values of seed 1234567 as published with the generator. */
static void test_generator(void **state) {
  (void)state;
  static const uint64_t want[] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u, 4593380528125082431u,
                                  16408922859458223821u};
  enum { CELLS = 1 << 16 }; /* equal weights: the id is the top 16 bits of the draw */
  float *logits = calloc(CELLS, sizeof *logits);
  assert_non_null(logits);
  draws s = open_ok(1, 1, 0, 1234567, CELLS);
  for (size_t i = 0; i < sizeof want / sizeof *want; i++) assert_int_equal(next(&s, logits), want[i] >> 48);
  mm_sampler_close(s.room);
  free(logits);
}

static void test_refused(void **state) {
  (void)state;
  static const mm_sampling sets[] = {{-1, 1, 0, 0}, {-1e-9, 1, 0, 0}, {NAN, 1, 0, 0}, {INFINITY, 1, 0, 0},
                                     {1, 0, 0, 0},  {1, -0.5, 0, 0},  {1, 1.5, 0, 0}, {1, NAN, 0, 0}};
  for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
    mm_err err = {0};
    assert_false(mm_sampling_check(&sets[i], &err));
    assert_int_equal(err.status, MM_USAGE);
    assert_string_equal(err.code, "E_SAMPLING");
  }
  mm_sampler_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_temperatures), cmocka_unit_test(test_cuts),       cmocka_unit_test(test_ties),
      cmocka_unit_test(test_greedy),       cmocka_unit_test(test_odd_logits), cmocka_unit_test(test_cold),
      cmocka_unit_test(test_large),        cmocka_unit_test(test_generator),  cmocka_unit_test(test_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
