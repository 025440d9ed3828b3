/* Rounding with error feedback: factors that multiply back to the moments, errors of outputs compared with those of GPTQ as published (with
 * the inverse's Cholesky factor, in doubles) and of each weight's nearest code, the same bytes for every split and CPU, and moments of
 * every kind of defect. */
#include "quant/cpu.h"
#include "quant/feedback.h"
#include "tests/unit/quant/weights.h"

typedef struct moments {
  uint32_t k, block;
  double *h; /* [k, k], zero between blocks; mean diagonal 1 */
  mm_feedback f;
} moments;

/* Of `rows` correlated inputs with columns of very different size; every seventh column is dead where asked. */
static moments moments_drawn(uint32_t k, uint32_t block, uint32_t rows, bool dead) {
  moments m = {.k = k, .block = block, .h = calloc((size_t)k * k, sizeof(double))};
  double *x = calloc(k, sizeof *x), mean = 0;
  for (uint32_t t = 0; t < rows; t++) {
    const double common = gaussian();
    for (uint32_t i = 0; i < k; i++)
      x[i] = (dead && i % 7 == 3) ? 0 : (gaussian() + common) * (0.2 + (double)(i * 37 % 11)) + (i ? 0.4 * x[i - 1] : 0);
    for (uint32_t i = 0; i < k; i++)
      for (uint32_t j = i / block * block; j < k && j < (i / block + 1) * block; j++) m.h[(size_t)i * k + j] += x[i] * x[j];
  }
  for (uint32_t i = 0; i < k; i++) mean += m.h[(size_t)i * k + i] / k;
  for (size_t i = 0; i < (size_t)k * k; i++) m.h[i] /= mean > 0 ? mean : 1;
  free(x);
  m.f = (mm_feedback){.k = k, .block = block};
  m.f.upper = calloc(mm_feedback_floats(mm_cells(k, block), block), sizeof(float));
  m.f.moment = calloc(mm_feedback_floats(mm_cells(k, block), block), sizeof(float));
  m.f.order = calloc(k, sizeof(uint32_t));
  return m;
}

static void moments_close(moments *m) {
  free(m->h);
  free(m->f.upper);
  free(m->f.moment);
  free(m->f.order);
}

/* Blocks of h as the function takes them; the upper triangle is NaN, which must not be read. */
static bool factor(moments *m, uint32_t *column) {
  double *h = calloc((size_t)m->block * m->block, sizeof *h), *work = calloc((size_t)m->block * m->block, sizeof *work);
  bool ok = true;
  for (uint32_t b = 0; ok && b * m->block < m->k; b++) {
    const uint32_t first = b * m->block, n = m->k - first < m->block ? m->k - first : m->block;
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t j = 0; j < n; j++) h[(size_t)i * n + j] = j <= i ? m->h[(size_t)(first + i) * m->k + first + j] : (double)NAN;
    ok = mm_feedback_factor(&m->f, b, h, work, column);
  }
  free(h);
  free(work);
  return ok;
}

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

/* The nearest value of the scheme's codes to y. */
static double nearest(const mm_scheme *s, double y) {
  if (s->code == MM_CODE_E2M1) return (double)mm_e2m1_value[mm_f32_to_e2m1((float)y)];
  if (s->code == MM_CODE_E4M3) return (double)mm_e4m3_value[mm_f32_to_e4m3((float)y)];
  const double hi = s->code == MM_CODE_INT8 ? 127 : 7, lo = s->code != MM_CODE_INT8 && s->signed_scale ? -8 : -hi;
  return fmax(lo, fmin(hi, rint(y)));
}

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

/* ---- rounding ---- */

static void feed_back(packed *p, const moments *m, const matrix *w, uint32_t rows, bool bf16) {
  const mm_scheme *s = p->view.scheme;
  float *scratch = malloc(mm_feedback_scratch(w->k) * sizeof *scratch);
  for (uint32_t r = 0; r < w->n; r += rows) {
    const uint32_t n = w->n - r < rows ? w->n - r : rows;
    const mm_pack_args a = {.w = bf16 ? NULL : w->w + (size_t)r * w->k, .bf16 = w->bf16 + (size_t)r * w->k, .n = n, .k = w->k};
    const mm_pack_args plain = {.w = a.w, .n = n, .k = w->k};
    void *plane[MM_MAX_PLANES];
    for (unsigned i = 0; i < s->plane_count; i++) {
      const size_t at = s->plane[i].cell.n ? mm_plane_elements(r, w->k, s->plane[i].cell) : 0;
      plane[i] = (char *)p->plane[i] + (r ? at : 0) * mm_dtype_size(s->plane[i].dtype);
    }
    mm_feedback_round(&m->f, s, bf16 ? &a : &plain, plane, scratch);
  }
  free(scratch);
}

static float *values(const packed *p) {
  float *out = malloc((size_t)p->view.n * p->view.k * sizeof *out);
  mm_unpack(&p->view, 0, 0, p->view.n, out);
  return out;
}

static float *scales(const packed *p) {
  float *out = malloc((size_t)p->view.n * p->view.k * sizeof *out);
  for (uint32_t r = 0; r < p->view.n; r++) mm_row_scales(&p->view, 0, r, out + (size_t)r * p->view.k);
  return out;
}

static bool same_planes(const packed *a, const packed *b) {
  for (unsigned i = 0; i < a->view.scheme->plane_count; i++)
    if (memcmp(a->plane[i], b->plane[i], a->bytes[i]) != 0) return false;
  return true;
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
