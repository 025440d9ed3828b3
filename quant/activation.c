/* Activations as a scheme's engines see them: rounded to a code format under scales taken from the numbers themselves, or under a static
 * scale from calibration. One row of the table for each mm_act_quant; after compressed-tensors, vLLM and ModelOpt:
 *
 *   row scale     amax/448 (E4M3), amax/127 (INT8), amax/2688 (NVFP4: 6 · 448); or the static one
 *   group scale   F32: amax/448; E8M0: the smallest power of two that is at least amax over the largest code, so that nothing
 *                 saturates; E4M3: e4m3(amax/6 / row scale), times the row scale
 *   code          to nearest even of x / scale by true division; beyond the largest code, which only a static scale allows, that code
 *
 * An amax below 1e-10 counts as 1e-10 (vLLM's floor), so that zeros give zeros. */
#include <math.h>

#include "quant/cpu.h"
#include "quant/numbers.h"
#include "quant/quant.h"

#define LEAST_AMAX 1e-10f

const mm_act_format mm_act_formats[] = {
    [MM_ACT_KEPT] = {.code = MM_CODE_PLAIN},
    [MM_ACT_FP8_TENSOR] = {MM_CODE_E4M3, 0, MM_F32, true},
    [MM_ACT_FP8_TOKEN] = {MM_CODE_E4M3, 0, MM_F32, false},
    [MM_ACT_FP8_GROUP] = {MM_CODE_E4M3, 128, MM_F32, false},
    [MM_ACT_INT8_TOKEN] = {MM_CODE_INT8, 0, MM_F32, false},
    [MM_ACT_NVFP4] = {MM_CODE_E2M1, 16, MM_F8_E4M3, true},
    [MM_ACT_MXFP4] = {MM_CODE_E2M1, 32, MM_F8_E8M0, false},
    [MM_ACT_MXFP8] = {MM_CODE_E4M3, 32, MM_F8_E8M0, false},
};

static float largest_code(mm_code c) { return c == MM_CODE_E4M3 ? 448.0f : c == MM_CODE_INT8 ? 127.0f : 6.0f; }

enum { LANES = 16 }; /* numbers that a loop takes at once */

/* The number that the code of x / scale stands for, times `by`. NaN stays as it is. */
MM_INLINE float round_to(mm_code c, float x, float scale, float by) {
  const float y = x / scale;
  const uint32_t b = mm_f32_bits(y), sign = b & 0x80000000u;
  float z;
  if (c == MM_CODE_INT8) {
    const float low = y < -127.0f ? -127.0f : y, most = low > 127.0f ? 127.0f : low;
    z = (most + 0x1.8p23f) - 0x1.8p23f; /* the adder's last place is 1 */
  } else if (c == MM_CODE_E4M3) {
    z = mm_f32_from_bits((mm_magnitude_to_e4m3(b & 0x7fffffffu) & 0x7f) << 20) * 0x1p120f;
  } else {
    const uint32_t u = b & 0x7fffffffu;
    z = mm_f32_from_bits((mm_small_float(u < 0x40c00000u ? u : 0x40c00000u, 0x3f800000u, 1) & 7) << 22) * 0x1p126f;
  }
  z = (c == MM_CODE_INT8 ? z : mm_f32_from_bits(mm_f32_bits(z) | sign)) * by;
  const uint32_t none = 0u - ((b & 0x7fffffffu) > 0x7f800000u);
  return mm_f32_from_bits((b & none) | (mm_f32_bits(z) & ~none));
}

MM_INLINE void round_lanes(mm_code c, float *x, uint32_t n, float scale, float by) {
  for (; n >= LANES; n -= LANES, x += LANES)
    for (int j = 0; j < LANES; j++) x[j] = round_to(c, x[j], scale, by);
  for (uint32_t i = 0; i < n; i++) x[i] = round_to(c, x[i], scale, by);
}
/* A zero scale, which E4M3 gives a group of small numbers, makes them zero. */
MM_INLINE void round_run_body(mm_code c, float *x, uint32_t n, float scale, float by) {
  if (scale == 0) {
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] != x[i] ? x[i] : 0;
    return;
  }
  switch (c) {
    case MM_CODE_E4M3: round_lanes(MM_CODE_E4M3, x, n, scale, by); break;
    case MM_CODE_INT8: round_lanes(MM_CODE_INT8, x, n, scale, by); break;
    default: round_lanes(MM_CODE_E2M1, x, n, scale, by); break;
  }
}
MM_VERSIONS(round_run, (mm_code c, float *x, uint32_t n, float scale, float by), (c, x, n, scale, by))

/* Raises *most to the largest magnitude of x[n]; what is no number is passed over. */
MM_INLINE void most_of_body(float *most, const float *x, uint32_t n) {
  float lane[LANES] = {0};
  for (; n >= LANES; n -= LANES, x += LANES)
    for (int j = 0; j < LANES; j++) lane[j] = fabsf(x[j]) > lane[j] ? fabsf(x[j]) : lane[j];
  for (uint32_t i = 0; i < n; i++) lane[0] = fabsf(x[i]) > lane[0] ? fabsf(x[i]) : lane[0];
  for (uint32_t j = 0; j < LANES; j++) *most = lane[j] > *most ? lane[j] : *most;
}
MM_VERSIONS(most_of, (float *most, const float *x, uint32_t n), (most, x, n))

/* The smallest E8M0 scale under which amax is at most the largest code, which is 1.75 · 2^8 (E4M3) or 1.5 · 2^2 (E2M1). */
static float power_of_two(mm_code c, float amax) {
  uint32_t u = mm_f32_bits(amax), above = c == MM_CODE_E4M3 ? 0x600000 : 0x400000;
  int e = (int)(u >> 23) - (c == MM_CODE_E4M3 ? 8 : 2) + ((u & 0x7fffff) > above);
  return mm_e8m0_to_f32((uint8_t)(e < 0 ? 0 : e > 254 ? 254 : e));
}

float mm_act_scale(const mm_act_format *f, float amax) {
  return fmaxf(amax, LEAST_AMAX) / (f->scale == MM_F8_E4M3 ? 448.0f * largest_code(f->code) : largest_code(f->code));
}

/* The scale of a group under the scale of its row. */
static float e4m3_scale(const mm_act_format *f, float amax, float row) {
  return mm_e4m3_value[mm_finite_to_e4m3(amax / largest_code(f->code) / row)];
}

static float group_scale(const mm_act_format *f, float amax, float row) {
  switch (f->scale) {
    case MM_F8_E8M0: return power_of_two(f->code, fmaxf(amax, LEAST_AMAX));
    case MM_F8_E4M3: return e4m3_scale(f, amax, row) * row;
    default: return fmaxf(amax, LEAST_AMAX) / largest_code(f->code);
  }
}

/* Columns up to the end of their group, or to k. */
static uint32_t run_length(const mm_act_format *f, uint32_t at, uint32_t first, uint32_t k) {
  return f->group ? (uint32_t)mm_min(f->group - (first + at) % f->group, k - at) : k;
}

void mm_act_amax(const mm_act_format *f, const float *x, uint32_t k, uint32_t first, float *amax) {
  for (uint32_t at = 0, n; at < k; at += n) {
    float most = 0;
    n = run_length(f, at, first, k);
    most_of(&most, x + at, n);
    if (most > amax[0]) amax[0] = most;
    float *const group = &amax[1 + (f->group ? (first + at) / f->group : 0)];
    if (f->group && most > *group) *group = most;
  }
}

void mm_act_round(const mm_act_format *f, float *x, uint32_t k, uint32_t first, const float *amax, float fixed) {
  const float row = f->fixed && fixed > 0 ? fixed : mm_act_scale(f, amax[0]);
  for (uint32_t at = 0, n; at < k; at += n) {
    n = run_length(f, at, first, k);
    const float scale = f->group ? group_scale(f, amax[1 + (first + at) / f->group], row) : row;
    round_run(f->code, x + at, n, scale, scale);
  }
}

void mm_act_codes(const mm_act_format *f, float *x, uint32_t k, uint32_t first, float *amax, float fixed) {
  const float row = amax[0] = f->fixed && fixed > 0 ? fixed : mm_act_scale(f, amax[0]);
  for (uint32_t at = 0, n; at < k; at += n) {
    float *const most = amax + (f->group ? 1 + (first + at) / f->group : 0), scale = row;
    n = run_length(f, at, first, k);
    if (f->group) scale = group_scale(f, *most, row);
    *most = f->scale == MM_F8_E4M3 ? e4m3_scale(f, *most, row) : scale;
    round_run(f->code, x + at, n, scale, 1);
  }
}
