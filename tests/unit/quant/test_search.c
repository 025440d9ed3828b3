/* Scale selection: what it gains over absmax on Gaussian and heavy-tailed matrices, in dB, and that the scales it takes are the best
 * of their windows by an independent search in doubles. */
#include "quant/cpu.h"
#include "tests/unit/quant/weights.h"

static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static double error_e2m1(const float *w, uint32_t n, double s) {
  double sum = 0;
  for (uint32_t i = 0; i < n; i++) {
    double a = fabs((double)w[i]), least = (double)INFINITY;
    for (int c = 0; c < 8; c++) least = fmin(least, fabs(a - e2m1[c] * s));
    sum += least * least;
  }
  return sum;
}

static double error_int(const float *w, uint32_t n, double s, double lo, double hi) {
  double sum = 0;
  for (uint32_t i = 0; i < n; i++) {
    double d = (double)w[i] - s * fmax(lo, fmin(hi, rint((double)w[i] / s)));
    sum += d * d;
  }
  return sum;
}

static float group_amax(const float *w, uint32_t n) {
  float most = 0;
  for (uint32_t i = 0; i < n; i++) most = fmaxf(most, fabsf(w[i]));
  return most;
}

/* 1 + the f32 rounding that the fast search may differ by. */
#define NEAR 1.00001

/* 64 rows of Student's t, and what the search by squared error makes of them. */
static packed searched(const char *scheme, uint32_t k, matrix *m) {
  *m = matrix_drawn(64, k, student, 0.02);
  return pack_matrix(mm_scheme_find(scheme), m, MM_SEARCH_MSE);
}

TEST(test_nvfp4_window) {
  matrix m;
  packed p = searched("nvfp4", 320, &m);
  float s2 = matrix_amax(&m) / 2688.0f;
  for (uint32_t b = 0; b < 64 * 20; b++) {
    const float *w = m.w + (size_t)b * 16;
    int base = mm_f32_to_e4m3(group_amax(w, 16) / (6 * s2)), stored = ((uint8_t *)p.plane[1])[b];
    double least = (double)INFINITY;
    for (int c = base - 3; c <= base + 8; c++)
      if (c >= 1 && c <= 126) least = fmin(least, error_e2m1(w, 16, (double)mm_e4m3_value[c] * (double)s2));
    assert_in_range(stored, base - 3, base + 8);
    assert_true(error_e2m1(w, 16, (double)mm_e4m3_value[stored] * (double)s2) <= least * NEAR);
  }
  packed_close(&p);
  matrix_close(&m);
}

TEST(test_mxfp4_window) {
  matrix m;
  packed p = searched("mxfp4", 320, &m);
  for (uint32_t b = 0; b < 64 * 10; b++) {
    const float *w = m.w + (size_t)b * 32;
    int stored = ((uint8_t *)p.plane[1])[b], base = ilogbf(group_amax(w, 32)) - 2 + 127;
    double least = (double)INFINITY;
    for (int e = base - 1; e <= base + 2; e++) least = fmin(least, error_e2m1(w, 32, ldexp(1, e - 127)));
    assert_in_range(stored, base - 1, base + 2);
    assert_true(error_e2m1(w, 32, ldexp(1, stored - 127)) <= least * NEAR);
  }
  packed_close(&p);
  matrix_close(&m);
}

/* The int4 search is coarse, then fine: within 1 % of the full grid per group on average, and inside its window. */
TEST(test_int4_window) {
  matrix m;
  packed p = searched("w4a16", 512, &m);
  double found = 0, best = 0;
  int negative = 0;
  for (uint32_t g = 0; g < 64 * 4; g++) {
    const float *w = m.w + (size_t)g * 128;
    double amax = (double)group_amax(w, 128), s = (double)mm_bf16_to_f32(((uint16_t *)p.plane[1])[g]), least = (double)INFINITY;
    for (int step = 0; step <= 70; step++)
      for (int sign = -1; sign <= 1; sign += 2)
        least =
            fmin(least, error_int(w, 128, (double)mm_bf16_to_f32(mm_f32_to_bf16((float)(sign * (1.15 - 0.005 * step) * amax / 8))), -8, 7));
    negative += s < 0;
    assert_true(fabs(s) >= 0.796 * amax / 8 && fabs(s) <= 1.155 * amax / 8);
    found += error_int(w, 128, s, -8, 7);
    best += least;
  }
  assert_true(found <= 1.01 * best);
  assert_in_range(negative, 64, 192); /* of 256: both signs are used */
  packed_close(&p);
  matrix_close(&m);
}

TEST(test_row_shrink) {
  static const struct {
    const char *name;
    double top;
  } schemes[] = {{"int8", 127}, {"w4a8", 7}};
  matrix m = matrix_drawn(16, 700, student, 0.02);
  for (int i = 0; i < 2; i++) {
    packed p = pack_matrix(mm_scheme_find(schemes[i].name), &m, MM_SEARCH_MSE);
    double top = schemes[i].top, found = 0, best = 0;
    for (uint32_t r = 0; r < 16; r++) {
      const float *w = m.w + (size_t)r * 700;
      double full = (double)group_amax(w, 700) / top, s = (double)((float *)p.plane[1])[r], least = (double)INFINITY;
      for (int u = 0; u <= 128; u++) least = fmin(least, error_int(w, 700, full * (1 - u / 160.0), -top, top));
      assert_true(s > 0 && s <= full * NEAR && s >= full * 0.19);
      found += error_int(w, 700, s, -top, top);
      best += least;
      assert_true(error_int(w, 700, s, -top, top) <= error_int(w, 700, full, -top, top) * NEAR);
    }
    assert_true(found <= 1.01 * best);
    packed_close(&p);
  }
  matrix_close(&m);
}

/* Packs with the given importances on one SIMD level. */
static packed pack_weighted(const mm_scheme *s, const matrix *m, const float *importance, mm_cpu level) {
  packed p = packed_open(s, m->n, m->k);
  mm_pack_args a = {.w = m->w, .n = m->n, .k = m->k, .amax = matrix_amax(m), .search = MM_SEARCH_MSE, .importance = importance};
  mm_cpu_limit(level);
  s->pack(&a, p.plane);
  mm_cpu_limit(MM_CPU_AVX512);
  return p;
}
static double weighted_error(const matrix *m, const packed *p, const float *importance) {
  float *out = calloc((size_t)m->n * m->k, sizeof *out);
  double sum = 0;
  assert_non_null(out);
  mm_unpack(&p->view, 0, 0, m->n, out);
  for (size_t i = 0; i < (size_t)m->n * m->k; i++) {
    double d = (double)m->w[i] - (double)out[i];
    sum += d * d * (double)importance[i % m->k];
  }
  free(out);
  return sum;
}

/* Importances move scales to where they say: the weighted error falls, for every scheme that searches; equal ones change nothing; every
 * SIMD level finds the same bytes. 700 columns: the last tile is not whole. */
TEST(test_importance) {
  enum { N = 32, K = 700 };
  matrix m = matrix_drawn(N, K, student, 0.02);
  float importance[K], equal[K];
  for (int i = 0; i < K; i++) {
    importance[i] = (float)exp(1.5 * gaussian());
    equal[i] = 4;
  }
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    if (!(s->searches >> MM_SEARCH_MSE & 1)) continue;
    packed none = pack_weighted(s, &m, NULL, MM_CPU_PLAIN), same = pack_weighted(s, &m, equal, MM_CPU_PLAIN);
    packed plain = pack_weighted(s, &m, importance, MM_CPU_PLAIN), fast = pack_weighted(s, &m, importance, MM_CPU_AVX512);
    if (!packed_equal(&none, &same)) fail_msg("%s: equal importances change the bytes", s->name);
    if (!packed_equal(&plain, &fast)) fail_msg("%s: SIMD levels differ", s->name);
    double found = weighted_error(&m, &plain, importance), before = weighted_error(&m, &none, importance);
    if (found >= 0.995 * before) fail_msg("%s: weighted error %g, %g without importances", s->name, found, before);
    packed_close(&none);
    packed_close(&same);
    packed_close(&plain);
    packed_close(&fast);
  }
  matrix_close(&m);
}

/* Under importances, too, the scale is the best of the window by an independent search. */
TEST(test_importance_window) {
  enum { N = 32, K = 320 };
  matrix m = matrix_drawn(N, K, student, 0.02);
  float importance[K], s2 = matrix_amax(&m) / 2688.0f;
  for (int i = 0; i < K; i++) importance[i] = (float)exp(2 * gaussian());
  packed p = pack_weighted(mm_scheme_find("nvfp4"), &m, importance, MM_CPU_AVX512);
  for (uint32_t b = 0; b < N * K / 16; b++) {
    const float *w = m.w + (size_t)b * 16, *weight = importance + b * 16 % K;
    int base = mm_f32_to_e4m3(group_amax(w, 16) / (6 * s2)), stored = ((uint8_t *)p.plane[1])[b];
    double least = (double)INFINITY, found = 0;
    for (int c = base - 3; c <= base + 8; c++) {
      if (c < 1 || c > 126) continue;
      double sum = 0;
      for (uint32_t i = 0; i < 16; i++) sum += (double)weight[i] * error_e2m1(w + i, 1, (double)mm_e4m3_value[c] * (double)s2);
      least = fmin(least, sum);
      if (c == stored) found = sum;
    }
    assert_in_range(stored, base - 3, base + 8);
    assert_true(found <= least * NEAR);
  }
  packed_close(&p);
  matrix_close(&m);
}

/* Reference SQNR of a group format under a given rule for the scale. */
static double sqnr_floor_mxfp4(const matrix *m) {
  double signal = 0, noise = 0;
  for (size_t b = 0; b < (size_t)m->n * m->k / 32; b++) {
    const float *w = m->w + b * 32;
    noise += error_e2m1(w, 32, ldexp(1, ilogbf(group_amax(w, 32)) - 2));
    for (int i = 0; i < 32; i++) signal += (double)w[i] * (double)w[i];
  }
  return 10 * log10(signal / noise);
}
static double sqnr_seventh_int4(const matrix *m) {
  double signal = 0, noise = 0;
  for (size_t b = 0; b < (size_t)m->n * m->k / 128; b++) {
    const float *w = m->w + b * 128;
    noise += error_int(w, 128, (double)group_amax(w, 128) / 7, -8, 7);
    for (int i = 0; i < 128; i++) signal += (double)w[i] * (double)w[i];
  }
  return 10 * log10(signal / noise);
}
static double sqnr_of(const matrix *m, const char *name, mm_search search) {
  packed p = pack_matrix(mm_scheme_find(name), m, search);
  double x = sqnr(m, &p);
  packed_close(&p);
  return x;
}

TEST(test_gain) {
  double (*const draws[2])(void) = {gaussian, student};
  for (int d = 0; d < 2; d++) {
    matrix m = matrix_drawn(512, 2048, draws[d], 0.02);
    double nvfp4 = sqnr_of(&m, "nvfp4", MM_SEARCH_MSE), nvfp4_absmax = sqnr_of(&m, "nvfp4", MM_SEARCH_ABSMAX);
    double four_six = sqnr_of(&m, "nvfp4", MM_SEARCH_FOUR_SIX), int4 = sqnr_of(&m, "w4a16", MM_SEARCH_MSE), seventh = sqnr_seventh_int4(&m);
    double mxfp4 = sqnr_of(&m, "mxfp4", MM_SEARCH_MSE), floored = sqnr_floor_mxfp4(&m);
    print_message("%s: nvfp4 %.3f absmax %.3f four-over-six %.3f; int4 g128 %.3f absmax/7 %.3f; mxfp4 %.3f floor %.3f dB\n",
                  d ? "Student-t" : "Gaussian", nvfp4, nvfp4_absmax, four_six, int4, seventh, mxfp4, floored);
    assert_true(int4 >= seventh + 1.6);
    assert_true(nvfp4 >= nvfp4_absmax + (d ? 1.0 : 1.3));
    assert_true(nvfp4 >= four_six + (d ? 0.4 : 0.5));
    assert_true(mxfp4 >= floored + 0.19);
    for (size_t i = 0; mm_scheme_at(i); i++)
      if (mm_scheme_at(i)->searches >> MM_SEARCH_MSE & 1)
        assert_true(sqnr_of(&m, mm_scheme_at(i)->name, MM_SEARCH_MSE) > sqnr_of(&m, mm_scheme_at(i)->name, MM_SEARCH_ABSMAX));
    matrix_close(&m);
  }
}

/* The figures that --quant help states for each scheme: dB of a Gaussian matrix, bits of a weight. */
TEST(test_stated) {
  static const struct {
    const char *name;
    double bits;
  } stated[] = {{"bf16", 16},   {"block_fp8", 8.002}, {"channel_fp8", 8.0104}, {"mxfp8", 8.25}, {"int8", 8.0104},
                {"nvfp4", 4.5}, {"mxfp4", 4.25},      {"w4a16", 4.125},        {"w4a8", 4.0104}};
  for (size_t i = 0; i < sizeof stated / sizeof *stated; i++)
    assert_true(fabs(mm_scheme_bits(mm_scheme_find(stated[i].name)) - stated[i].bits) < 1e-3);
  matrix m = matrix_drawn(512, 2048, gaussian, 0.02); /* as make bench-quality takes it */
  const mm_scheme *s;
  for (size_t i = 0; (s = mm_scheme_at(i)); i++) {
    if (s->code == MM_CODE_PLAIN) {
      assert_true(s->sqnr == 0);
      continue;
    }
    double db = sqnr_of(&m, s->name, s->searches & 1u << MM_SEARCH_MSE ? MM_SEARCH_MSE : MM_SEARCH_ABSMAX);
    if (!(fabs(db - (double)s->sqnr) < 0.15)) fail_msg("%s: %.2f dB, stated %.1f", s->name, db, (double)s->sqnr);
  }
  matrix_close(&m);
}

int main(void) { return run_unit_tests(NULL, NULL); }
