/* Activation quantisation against its definitions in double, whole and in parts, and at its edges. */
#include <stdlib.h>
#include <string.h>

#include "quant/cpu.h"
#include "tests/unit/quant/rounded.h"
#include "tests/unit/unit.h"

enum { K = 417, ROWS = 200 };

static uint64_t seed = 7;
static double uniform(void) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (double)(seed >> 40) / 16777216.0;
}

/* Numbers over many binades, some rows tiny or huge, some groups all zero, some numbers half way between codes. */
static void fill(float *x, int row) {
  double size = ldexp(1, row % 7 == 0 ? -60 : row % 11 == 0 ? 40 : row % 5);
  for (int i = 0; i < K; i++) x[i] = (float)((uniform() - 0.5) * size * ldexp(1, (int)(uniform() * 6)));
  for (int i = 0; i < K; i += 9) x[i] = (float)(ldexp(1, -(i % 12)) * size * (i % 2 ? 1.25 : -1.75));
  for (int i = 160; i < 192; i++) x[i] = 0;
  for (int i = 192; i < 224; i++) x[i] = (float)((uniform() - 0.5) * size);
  x[200] = (float)(row % 2 ? 6 * size : 7 * size); /* largest codes of E2M1 and E4M3: the next power of two begins just above */
}

static void round_parts(mm_act_quant a, float *x, const uint32_t *cut, double fixed) {
  const mm_act_format *f = &mm_act_formats[a];
  float *amax = calloc(mm_act_amaxes(f, K), sizeof *amax);
  for (; *cut < K; cut++) mm_act_amax(f, x + *cut, cut[1] - *cut, *cut, amax);
  for (uint32_t i = 0, n = 29; i < K; i += n) mm_act_round(f, x + i, i + n < K ? n : K - i, i, amax, (float)fixed);
  free(amax);
}

static void as_defined_here(int step) {
  static const uint32_t cut[] = {0, 48, 192, 200, K};
  for (mm_act_quant a = MM_ACT_FP8_TENSOR; a <= MM_ACT_MXFP8; a++)
    for (int row = 0; row < ROWS; row += step) {
      float x[K], y[K];
      double want[K], fixed = row % 3 == 0 ? (double)(float)(0.003 * (row + 1)) : 0;
      fill(x, row);
      memcpy(y, x, sizeof y);
      round_parts(a, y, cut, fixed);
      ref_round(a, x, K, fixed, want);
      for (int i = 0; i < K; i++)
        if ((double)y[i] != want[i])
          fail_msg("format %d, row %d, column %d: %.9g: found %.9g, expected %.9g", a, row, i, x[i], y[i], want[i]);
    }
}

TEST(as_defined) {
  for (mm_cpu level = MM_CPU_PLAIN; level <= MM_CPU_AVX512; level++) {
    mm_cpu_limit(level);
    as_defined_here(level == MM_CPU_AVX512 ? 1 : 7);
  }
}

/* Codes are numbers of eight bits, and with their scales what rounding gives, but for the last place. */
TEST(codes_and_scales) {
  for (int way = 0; way <= 2 * MM_CPU_AVX512 + 1; way++)
    for (mm_act_quant a = MM_ACT_FP8_TENSOR; a <= MM_ACT_MXFP8; a++)
      for (int row = 0; row < ROWS; row += 9) {
        const mm_act_format *f = &mm_act_formats[a];
        static const uint32_t whole[] = {0, K};
        float x[K], y[K], amax[2 + K / 16] = {0}, fixed = way % 2 ? 0.01f : 0;
        mm_cpu_limit((mm_cpu)(way / 2));
        fill(x, row);
        x[77] = NAN;
        memcpy(y, x, sizeof y);
        mm_act_amax(f, x, K, 0, amax);
        mm_act_codes(f, x, K, 0, amax, fixed);
        round_parts(a, y, whole, (double)fixed);
        for (int i = 0; i < K; i++) {
          const float of_row = f->group && f->scale != MM_F8_E4M3 ? 1 : amax[0];
          const float scale = f->group ? of_row * amax[1 + (uint32_t)i / f->group] : of_row;
          uint32_t bits;
          memcpy(&bits, &x[i], sizeof bits);
          assert_true(i == 77 ? isnan(x[i]) : (bits & 0xffff) == 0 && fabs((double)x[i] * scale - y[i]) <= 0x1p-23 * fabs((double)y[i]));
        }
      }
}

/* An infinity makes its scale infinite: what it rounds to is no number, not the largest code of either sign. */
TEST(infinity_becomes_none) {
  for (mm_cpu level = MM_CPU_PLAIN; level <= MM_CPU_AVX512; level++)
    for (mm_act_quant a = MM_ACT_FP8_TENSOR; a <= MM_ACT_INT8_TOKEN; a++)
      for (uint32_t at = 5; at < K; at += K - 10) { /* among whole vectors, and after them */
        float x[K];
        static const uint32_t whole[] = {0, K};
        mm_cpu_limit(level);
        fill(x, 1);
        x[at] = at == 5 ? INFINITY : -INFINITY;
        round_parts(a, x, whole, 0);
        assert_true(isnan(x[at]));
      }
}

/* NaN and infinities of a model must not be rounded away. */
TEST(no_number_stays_none) {
  for (mm_act_quant a = MM_ACT_FP8_TENSOR; a <= MM_ACT_MXFP8; a++) {
    float x[K];
    static const uint32_t whole[] = {0, K};
    fill(x, 1);
    x[17] = NAN;
    round_parts(a, x, whole, 0);
    assert_true(isnan(x[17]) && !isnan(x[16]));
    memset(x, 0, sizeof x);
    round_parts(a, x, whole, 0);
    for (int i = 0; i < K; i++) assert_true(x[i] == 0);
  }
}

/* The row of each scheme. */
TEST(schemes) {
  static const struct {
    const char *name;
    mm_act_quant act;
  } row[] = {{"bf16", MM_ACT_KEPT},
             {"f16", MM_ACT_KEPT},
             {"f32", MM_ACT_KEPT},
             {"block_fp8", MM_ACT_FP8_GROUP},
             {"channel_fp8", MM_ACT_FP8_TOKEN},
             {"mxfp8", MM_ACT_MXFP8},
             {"int8", MM_ACT_INT8_TOKEN},
             {"tensor_wise_fp8", MM_ACT_FP8_TENSOR},
             {"nvfp4", MM_ACT_NVFP4},
             {"nvfp4a16", MM_ACT_KEPT},
             {"mxfp4", MM_ACT_MXFP4},
             {"w4a16", MM_ACT_KEPT},
             {"w4afp8", MM_ACT_FP8_TENSOR},
             {"w4a8", MM_ACT_INT8_TOKEN},
             {"w4a16_f16", MM_ACT_KEPT},
             {"w4a16_zero", MM_ACT_KEPT},
             {"w4a16_zero_bf16", MM_ACT_KEPT},
             {"w8a16_f16", MM_ACT_KEPT},
             {"w8a16_zero", MM_ACT_KEPT},
             {"w8a16_zero_bf16", MM_ACT_KEPT}};
  size_t n = sizeof row / sizeof *row;
  for (size_t i = 0; i < n; i++) assert_int_equal(mm_scheme_find(row[i].name)->act, row[i].act);
  assert_null(mm_scheme_at(n));
}

int main(void) { return run_unit_tests(NULL, NULL); }
