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

/* The number that x's code stands for, x being divided by its scale already. */
static float round_to(mm_code c, float x) {
  switch (c) {
    case MM_CODE_E4M3: return mm_e4m3_value[mm_f32_to_e4m3(x)];
    case MM_CODE_INT8: return fminf(127.0f, fmaxf(-127.0f, rintf(x)));
    default: return mm_e2m1_value[mm_f32_to_e2m1(x)];
  }
}

/* The smallest E8M0 scale under which amax is at most the largest code, which is 1.75 · 2^8 (E4M3) or 1.5 · 2^2 (E2M1). */
static float power_of_two(mm_code c, float amax) {
  uint32_t u = mm_f32_bits(amax), above = c == MM_CODE_E4M3 ? 0x600000 : 0x400000;
  int e = (int)(u >> 23) - (c == MM_CODE_E4M3 ? 8 : 2) + ((u & 0x7fffff) > above);
  return mm_e8m0_to_f32((uint8_t)(e < 0 ? 0 : e > 254 ? 254 : e));
}

float mm_act_scale(const mm_act_format *f, float amax) {
  return fmaxf(amax, LEAST_AMAX) / (f->scale == MM_F8_E4M3 ? 448.0f * largest_code(f->code) : largest_code(f->code));
}

static float group_scale(const mm_act_format *f, float amax, float row) {
  switch (f->scale) {
    case MM_F8_E8M0: return power_of_two(f->code, fmaxf(amax, LEAST_AMAX));
    case MM_F8_E4M3: return mm_e4m3_value[mm_finite_to_e4m3(amax / largest_code(f->code) / row)] * row;
    default: return fmaxf(amax, LEAST_AMAX) / largest_code(f->code);
  }
}

/* A zero scale, which E4M3 gives a group of small numbers, makes them zero. */
static void round_run(mm_code c, float *x, uint32_t n, float scale) {
  for (uint32_t i = 0; i < n; i++)
    if (!isnan(x[i])) x[i] = scale == 0 ? 0 : round_to(c, x[i] / scale) * scale;
}

/* Columns up to the end of their group, or to k. */
static uint32_t run_length(const mm_act_format *f, uint32_t at, uint32_t first, uint32_t k) {
  return f->group ? (uint32_t)mm_min(f->group - (first + at) % f->group, k - at) : k;
}

void mm_act_amax(const mm_act_format *f, const float *x, uint32_t k, uint32_t first, float *amax) {
  for (uint32_t at = 0, n; at < k; at += n) {
    float most = 0;
    n = run_length(f, at, first, k);
    for (uint32_t i = at; i < at + n; i++) most = fmaxf(most, fabsf(x[i]));
    amax[0] = fmaxf(amax[0], most);
    if (f->group) amax[1 + (first + at) / f->group] = fmaxf(amax[1 + (first + at) / f->group], most);
  }
}

void mm_act_round(const mm_act_format *f, float *x, uint32_t k, uint32_t first, const float *amax, float fixed) {
  float row = f->fixed && fixed > 0 ? fixed : mm_act_scale(f, amax[0]);
  for (uint32_t at = 0, n; at < k; at += n) {
    n = run_length(f, at, first, k);
    round_run(f->code, x + at, n, f->group ? group_scale(f, amax[1 + (first + at) / f->group], row) : row);
  }
}
