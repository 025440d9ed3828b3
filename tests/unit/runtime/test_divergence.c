/* Divergence of rows of logits: a reference or a row without a distribution is no divergence of 0. */
#include "runtime/engine/divergence.h"

#include <math.h>

#include "tests/unit/unit.h"

enum { VOCAB = 5 };

static bool add(const float *reference, const float *measured, double *kl) {
  double each[1] = {0};
  mm_divergence d = {.kl = each};
  const bool ok = mm_divergence_add(&d, reference, measured, VOCAB);
  *kl = each[0];
  assert_true(d.tokens == (ok ? 1 : 0) && (!ok || d.sum == *kl));
  return ok;
}

TEST(divergence_of_numbers) {
  const float a[VOCAB] = {0, 1, 2, -INFINITY, 0.5f}, b[VOCAB] = {2, 1, 0, -INFINITY, 0.25f};
  double kl, sum_a = 0, sum_b = 0, expected = 0;
  for (int i = 0; i < VOCAB; i++) sum_a += exp((double)a[i]), sum_b += exp((double)b[i]);
  for (int i = 0; i < VOCAB; i++)
    if (i != 3) expected += exp((double)a[i]) / sum_a * ((double)a[i] - log(sum_a) - ((double)b[i] - log(sum_b)));
  assert_true(add(a, a, &kl) && kl == 0);
  assert_true(add(a, b, &kl) && fabs(kl - expected) < 1e-12);
}

TEST(divergence_of_what_is_none) {
  const float good[VOCAB] = {0, 1, 2, 3, 0.5f}, none[] = {NAN, INFINITY};
  double kl;
  for (int i = 0; i < VOCAB; i++)
    for (int j = 0; j < 2; j++) {
      float bad[VOCAB];
      for (int k = 0; k < VOCAB; k++) bad[k] = k == i ? none[j] : good[k];
      assert_true(!add(bad, good, &kl) && !add(good, bad, &kl) && !add(bad, bad, &kl));
    }
  const float all[VOCAB] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
  assert_true(!add(all, good, &kl) && !add(good, all, &kl));
}

int main(void) { return run_unit_tests(NULL, NULL); }
