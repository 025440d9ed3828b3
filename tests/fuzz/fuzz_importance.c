/* Importance files of any bytes; what is accepted must answer for every matrix of a model. */
#include <stdlib.h>
#include <string.h>

#include "convert/calibration/second_moments.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  enum { EXPERTS = 3, COLS = 4 };
  mm_importance m = {0};
  mm_err err = {0};
  const mm_arch *a = &mm_arch_minimax_m2;
  if (mm_importance_parse(&m, "file", data, size, &err)) {
    float sum = 0, w[6];
    for (size_t i = 0; i < a->rule_count; i++)
      for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t cols = COLS; cols <= 6; cols += 2) {
          const uint8_t *values = NULL;
          if (mm_importance_find(&m, &a->rule[i], e % 2, e, EXPERTS, cols, &values, MM_IGNORED) != MM_WEIGHED) continue;
          mm_importance_weights(values, cols, w);
          for (uint32_t j = 0; j < cols; j++) sum += w[j];
        }
    if (!(sum >= 0)) abort();
    static const uint32_t rows[] = {5, 3};
    mm_moment_factors f = {0}, g = {0};
    for (size_t i = 0; i < a->rule_count; i++)
      for (uint32_t cols = COLS; cols <= 6; cols += 2) {
        mm_second_moments of;
        if (!mm_second_moments_find(&of, &m, &a->rule[i], 0, 0, EXPERTS, cols, MM_IGNORED) || !of.entry) continue;
        for (uint32_t e = 0; e < of.set->matrices; e++) mm_either_way(mm_moment_factors_find(&f, &of, e, MM_IGNORED));
        for (uint32_t piece = 0; piece < 2; piece++) {
          mm_second_moments out;
          if (!mm_output_moments_find(&out, &of, &a->rule[i], rows, 2, piece, MM_IGNORED) || !out.entry) continue;
          for (uint32_t e = 0; e < out.set->matrices; e++) mm_either_way(mm_moment_factors_find(&g, &out, e, MM_IGNORED));
        }
      }
    mm_moment_factors_close(&f);
    mm_moment_factors_close(&g);
  } else if (err.status == MM_OK) {
    abort();
  }
  mm_importance_close(&m);
  return 0;
}
