/* Rounding with error feedback: factors that multiply back to the moments, errors of outputs compared with those of GPTQ as published (with
 * the inverse's Cholesky factor, in doubles) and of each weight's nearest code, the same bytes for every split and CPU, and moments of
 * every kind of defect. */
#include "tests/unit/quant/moments_drawn.h"

TEST(factors_multiply_back) {
  moments m = moments_drawn(200, 128, 500, true);
  uint32_t column;
  assert_true(factor(&m, &column));
  const uint32_t stride = mm_feedback_stride(128);
  for (uint32_t b = 0; b < 2; b++) {
    const uint32_t n = b ? 72 : 128;
    const float *u = m.f.upper + b * 128 * stride, *d = m.f.moment + b * 128 * stride;
    const uint32_t *order = m.f.order + b * 128;
    double pivot[128] = {0};
    for (uint32_t j = n; j-- > 0;) {
      pivot[j] = (double)d[j * stride + j];
      for (uint32_t l = j + 1; l < n; l++) pivot[j] -= (double)u[l * stride + j] * (double)u[l * stride + j] * pivot[l];
      assert_true(pivot[j] > 0);
      for (uint32_t i = 0; i < j; i++) {
        double sum = pivot[j] * (double)u[j * stride + i];
        for (uint32_t l = j + 1; l < n; l++) sum += (double)u[l * stride + i] * (double)u[l * stride + j] * pivot[l];
        assert_true(fabs(sum - (double)d[i * stride + j]) < 1e-4);
        assert_true(fabs(m.h[(size_t)(b * 128 + order[i]) * 200 + b * 128 + order[j]] - (double)d[i * stride + j]) < 1e-5);
        assert_true(d[i * stride + i] >= d[j * stride + j]);
      }
    }
  }
  moments_close(&m);
}

static double largest(const float *x, uint32_t n) {
  double most = 0;
  for (uint32_t i = 0; i < n; i++) most = fmax(most, fabs((double)x[i]));
  return most;
}

/* Σ (w - ŵ) H (w - ŵ)ᵀ over all rows, each over the square of its largest weight. */
static double output_error(const moments *m, const matrix *w, const float *other) {
  double sum = 0;
  for (uint32_t r = 0; r < w->n; r++) {
    const float *a = w->w + (size_t)r * w->k, *b = other + (size_t)r * w->k;
    const double most = largest(a, w->k);
    for (uint32_t i = 0; i < w->k; i++)
      for (uint32_t j = 0; j < w->k; j++)
        sum += ((double)a[i] - (double)b[i]) / most * m->h[(size_t)i * w->k + j] * (((double)a[j] - (double)b[j]) / most);
  }
  return sum;
}

/* ---- GPTQ as published ---- */

/* Rows under the given scales: H damped by a hundredth, columns by descending moment, upper Cholesky factor of the inverse. */
static void gptq(const mm_scheme *s, const moments *m, const matrix *w, const float *scale, float *out) {
  const uint32_t k = w->k, *order = m->f.order;
  double *a = calloc((size_t)k * k, sizeof *a), *inv = calloc((size_t)k * k, sizeof *inv);
  for (uint32_t i = 0; i < k; i++)
    for (uint32_t j = 0; j < k; j++) a[(size_t)i * k + j] = m->h[(size_t)order[i] * k + order[j]] + (i == j ? 0.01 : 0);
  for (uint32_t i = 0; i < k; i++) inv[(size_t)i * k + i] = 1;
  for (uint32_t p = 0; p < k; p++) /* Gauss and Jordan */
    for (uint32_t i = 0; i < k; i++) {
      if (i == p) continue;
      const double f = a[(size_t)i * k + p] / a[(size_t)p * k + p];
      for (uint32_t j = 0; j < k; j++) {
        a[(size_t)i * k + j] -= f * a[(size_t)p * k + j];
        inv[(size_t)i * k + j] -= f * inv[(size_t)p * k + j];
      }
    }
  for (uint32_t i = 0; i < k; i++)
    for (uint32_t j = 0; j < k; j++) inv[(size_t)i * k + j] /= a[(size_t)i * k + i];
  for (uint32_t r = 0; r < w->n; r++)
    for (uint32_t i = 0; i < k; i++) out[(size_t)r * k + order[i]] = w->w[(size_t)r * k + order[i]];
  for (uint32_t i = 0; i < k; i++) { /* column i is rounded; its row of the inverse moves the rest, and is eliminated */
    const double d = inv[(size_t)i * k + i];
    for (uint32_t r = 0; r < w->n; r++) {
      float *row = out + (size_t)r * k;
      const float *sc = scale + (size_t)r * k;
      const double before = (double)row[order[i]];
      const double after = nearest(s, before / (double)sc[order[i]]) * (double)sc[order[i]];
      for (uint32_t j = i + 1; j < k; j++) row[order[j]] -= (float)((before - after) / d * inv[(size_t)i * k + j]);
      row[order[i]] = (float)after;
    }
    for (uint32_t l = i + 1; l < k; l++)
      for (uint32_t j = i + 1; j < k; j++) inv[(size_t)l * k + j] -= inv[(size_t)l * k + i] * inv[(size_t)i * k + j] / d;
  }
  free(a);
  free(inv);
}

static const char *const words[] = {"w4a16", "w4afp8", "w4a8", "int8", "nvfp4", "mxfp4", "mxfp8", "channel_fp8", "tensor_wise_fp8"};

/* No scheme has more error than GPTQ under the searched scales, and each much less than the nearest codes. */
TEST(less_error_than_gptq) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    const mm_scheme *s = mm_scheme_find(words[i]);
    moments m = moments_drawn(128, 128, 400, false);
    matrix w = matrix_drawn(24, 128, student, 0.02);
    const mm_search search = s->searches & 1u << MM_SEARCH_MSE ? MM_SEARCH_MSE : MM_SEARCH_ABSMAX;
    packed p = pack_matrix(s, &w, search);
    uint32_t column;
    assert_true(factor(&m, &column));
    float *plain = values(&p), *scale = scales(&p), *theirs = malloc(24 * 128 * sizeof *theirs);
    gptq(s, &m, &w, scale, theirs);
    feed_back(&p, &m, &w, 24, false);
    float *ours = values(&p);
    const double e = output_error(&m, &w, ours), t = output_error(&m, &w, theirs), n = output_error(&m, &w, plain);
    print_message("%s: %.3f of GPTQ's error, %.3f of the nearest codes'\n", words[i], e / t, e / n);
    assert_true(e < t && e < 0.8 * n);
    free(plain), free(scale), free(theirs), free(ours);
    packed_close(&p), matrix_close(&w), moments_close(&m);
  }
}

/* Blocks of 128 with a ragged last one; more rows than are rounded side by side, strips of any size, both kinds of input, every CPU. */
TEST(same_bytes) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    const mm_scheme *s = mm_scheme_find(words[i]);
    moments m = moments_drawn(300, 128, 350, i % 2 == 0);
    matrix w = matrix_drawn(21, 300, student, 0.02);
    uint32_t column;
    assert_true(factor(&m, &column));
    packed p = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
    feed_back(&p, &m, &w, 21, false);
    for (int turn = 0; turn < 4; turn++) {
      if (turn > 1) mm_cpu_limit(turn == 2 ? MM_CPU_PLAIN : MM_CPU_AVX2);
      if (turn > 1) assert_true(factor(&m, &column));
      packed q = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
      feed_back(&q, &m, &w, turn == 0 ? 1 : 5, turn == 1);
      assert_true(same_planes(&p, &q));
      packed_close(&q);
      mm_cpu_limit(MM_CPU_BEST);
    }
    packed_close(&p), matrix_close(&w), moments_close(&m);
  }
}

/* Moments of one row, of ten, of dead columns alone; rows of zeros, tiny, huge, and of both: every value stays finite and the error no
 * larger than that of the nearest codes. */
TEST(odd_moments_and_rows) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    for (uint32_t rows = 0; rows <= 10; rows += rows ? 9 : 1) {
      const mm_scheme *s = mm_scheme_find(words[i]);
      moments m = moments_drawn(192, 192, rows, true);
      matrix w = matrix_drawn(6, 192, student, 0.02);
      uint32_t column;
      assert_true(factor(&m, &column));
      for (uint32_t c = 0; c < 192; c++) {
        matrix_set(&w, 1, c, 0);
        matrix_set(&w, 2, c, gaussian() * 1e-36);
        matrix_set(&w, 3, c, gaussian() * 1e37);
        matrix_set(&w, 4, c, gaussian() * (c < 100 ? 1e-30 : 1e30));
        if (c < 160) matrix_set(&w, 5, c, 0);
      }
      packed p = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
      float *plain = values(&p);
      feed_back(&p, &m, &w, 6, false);
      float *ours = values(&p);
      for (uint32_t c = 0; c < 6 * 192; c++) assert_true(isfinite(ours[c]));
      for (uint32_t c = 0; c < 192; c++) assert_true(ours[192 + c] == 0);
      matrix first = {1, 192, w.w, w.bf16};
      assert_true(output_error(&m, &first, ours) <= output_error(&m, &first, plain) + 1e-9);
      free(plain), free(ours);
      packed_close(&p), matrix_close(&w), moments_close(&m);
    }
}

TEST(no_moments) {
  moments m = moments_drawn(200, 128, 500, false);
  uint32_t column = 0;
  m.h[(size_t)150 * 200 + 140] = m.h[(size_t)140 * 200 + 150] = 40; /* no two columns have such a product */
  assert_false(factor(&m, &column));
  assert_in_range(column, 128, 199);
  moments_close(&m);
}

int main(void) { return run_unit_tests(NULL, NULL); }
