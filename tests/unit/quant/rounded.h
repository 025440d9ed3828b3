/* A second opinion on activation quantisation, in double from the formats' definitions: the largest magnitude of each span, the scale that
 * the scheme's tools take for it, and the nearest of all values that a code can stand for. Shares no arithmetic with activation.c. */
#ifndef MM_TESTS_ROUNDED_H
#define MM_TESTS_ROUNDED_H

#include <math.h>

#include "quant/quant.h"

/* The values of a format in ascending order, those of even codes marked; returns how many. */
static inline int ref_values(mm_code code, double *value, bool *even) {
  static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  int n = code == MM_CODE_E4M3 ? 127 : code == MM_CODE_INT8 ? 128 : 8;
  for (int c = 0; c < n; c++) {
    int e = c / 8, m = c % 8;
    value[c] = code == MM_CODE_INT8 ? c : code == MM_CODE_E2M1 ? e2m1[c] : e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10);
    even[c] = c % 2 == 0;
  }
  return n;
}

static inline double ref_nearest(mm_code code, double x) {
  double value[128], a = fabs(x);
  bool even[128];
  int n = ref_values(code, value, even), best = 0;
  for (int c = 1; c < n; c++) {
    double d = fabs(value[c] - a), least = fabs(value[best] - a);
    if (d < least || (d == least && even[c])) best = c;
  }
  return copysign(value[best], x);
}

static inline double ref_largest(const float *x, uint32_t from, uint32_t to) {
  double most = 0;
  for (uint32_t i = from; i < to; i++) most = fmax(most, fabs((double)x[i]));
  return most;
}

/* The scale of columns [from, to) of a row, as the f32 that engines compute with. */
static inline double ref_scale(mm_act_quant a, const float *x, uint32_t k, uint32_t from, uint32_t to, double fixed) {
  double row = fmax(ref_largest(x, 0, k), 1e-10f), group = ref_largest(x, from, to), power = ldexp(1, -127);
  double top = a == MM_ACT_MXFP4 ? 6 : 448;
  switch (a) {
    case MM_ACT_FP8_TENSOR: return fixed > 0 ? fixed : (float)(row / 448);
    case MM_ACT_FP8_TOKEN: return (float)(row / 448);
    case MM_ACT_FP8_GROUP: return (float)(fmax(group, 1e-10f) / 448);
    case MM_ACT_INT8_TOKEN: return (float)(row / 127);
    case MM_ACT_NVFP4: {
      double second = fixed > 0 ? fixed : (float)(row / 2688);
      return (float)(ref_nearest(MM_CODE_E4M3, (float)((float)(group / 6) / second)) * second);
    }
    case MM_ACT_MXFP4:
    case MM_ACT_MXFP8:
      while (power * top < fmax(group, 1e-10f)) power *= 2;
      return power;
    case MM_ACT_KEPT: break;
  }
  return 0;
}

/* Row x[k] as the scheme's engines see it. */
static inline void ref_round(mm_act_quant a, const float *x, uint32_t k, double fixed, double *out) {
  static const uint32_t span[] = {[MM_ACT_FP8_GROUP] = 128, [MM_ACT_NVFP4] = 16, [MM_ACT_MXFP4] = 32, [MM_ACT_MXFP8] = 32};
  static const mm_code code[] = {
      [MM_ACT_FP8_TENSOR] = MM_CODE_E4M3, [MM_ACT_FP8_TOKEN] = MM_CODE_E4M3, [MM_ACT_FP8_GROUP] = MM_CODE_E4M3,
      [MM_ACT_INT8_TOKEN] = MM_CODE_INT8, [MM_ACT_NVFP4] = MM_CODE_E2M1,     [MM_ACT_MXFP4] = MM_CODE_E2M1,
      [MM_ACT_MXFP8] = MM_CODE_E4M3,
  };
  uint32_t n = span[a] ? span[a] : k;
  for (uint32_t i = 0; i < k; i++) {
    uint32_t from = i / n * n, to = from + n < k ? from + n : k;
    double s = ref_scale(a, x, k, from, to, fixed);
    out[i] = a == MM_ACT_KEPT ? (double)x[i] : s == 0 ? 0 : (float)(ref_nearest(code[a], (float)((double)x[i] / s)) * s);
  }
}

#endif
