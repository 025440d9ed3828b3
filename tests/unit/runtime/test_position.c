/* Slopes, layer factors and RoPE frequencies against the published figures. */
#include <math.h>

#include "runtime/engine/position.h"
#include "tests/unit/unit.h"

static void close_to(double found, double expected, double relative) {
  if (fabs(found - expected) > relative * fabs(expected)) fail_msg("found %.12g, expected %.12g", found, expected);
}

TEST(slopes) {
  static const double twelve[] = {0.5,       0.25,       0.125,        0.0625,       0.03125,      0.015625,
                                  0.0078125, 0.00390625, 0.7071067812, 0.3535533906, 0.1767766953, 0.0883883476};
  static const double six[] = {0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125};
  for (uint32_t h = 0; h < 12; h++) close_to(mm_lightning_slope(12, h), twelve[h], 1e-9);
  for (uint32_t h = 0; h < 6; h++) close_to(mm_lightning_slope(6, h), six[h], 1e-12);
  close_to(mm_lightning_slope(64, 0), 0.9170040432046712, 1e-15);
  close_to(mm_lightning_slope(64, 1), 0.8408964152537145, 1e-15);
  close_to(mm_lightning_slope(64, 7), 0.5, 1e-15);
  close_to(mm_lightning_slope(64, 63), 0.00390625, 1e-15);
  close_to(mm_lightning_slope(1, 0), 0.00390625, 1e-15);
}

TEST(decay) {
  mm_model m = {.heads = 64, .layers = 80};
  close_to(mm_lightning_decay(&m, 0, 0), 0.9170132132, 1e-9);
  close_to(exp(-mm_lightning_decay(&m, 0, 0)), 0.3997111118, 1e-9);
  close_to(mm_lightning_decay(&m, 78, 63), 4.948526503e-05, 1e-9);
  close_to(exp(-mm_lightning_decay(&m, 78, 63)), 0.9999505160, 1e-9);
  m.layers = 1; /* no division by L - 1 */
  close_to(mm_lightning_decay(&m, 0, 7), 0.5 * (1 + 1e-5), 1e-12);
}

TEST(frequencies) {
  static const uint32_t i[] = {0, 1, 2, 16, 30, 31};
  static const double m1[] = {1, 0.6042963902, 0.3651741273, 3.16227766e-4, 2.738419634e-7, 1.654817100e-7};
  static const double m2[] = {1, 0.6175287581, 0.3813417671, 4.472135955e-4, 5.244639251e-7, 3.238715564e-7};
  mm_model a = {.head_dim = 128, .rotary_dim = 64, .rope_theta = 1e7}, b = {.head_dim = 128, .rotary_dim = 64, .rope_theta = 5e6};
  for (size_t j = 0; j < sizeof i / sizeof *i; j++) {
    close_to(mm_rope_inv_freq(&a, i[j]), m1[j], 2e-7);
    close_to(mm_rope_inv_freq(&b, i[j]), m2[j], 2e-7);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
