/* Coupled rows: errors of all outputs together compared with those of rows by themselves and with those of the published order of rounding
 * in doubles; the same bytes for every split into strips, kind of input and CPU; rows of zeros, tiny, huge and with one weight that dwarfs
 * the others. */
#include "tests/unit/quant/moments_drawn.h"

enum { N = 80, K = 160, ROWS = 64, COLUMNS = 128 }; /* ragged last blocks of both */

/* The strip's codes anew, in strips of `rows` rows. */
static void couple(packed *p, const moments *h, const moments *g, const matrix *w, uint32_t rows, bool bf16) {
  const mm_scheme *s = p->view.scheme;
  uint8_t *scratch = malloc(mm_feedback_couple_bytes(w->k, h->block, g->block));
  for (uint32_t r = 0; r < w->n; r += rows) {
    const uint32_t n = w->n - r < rows ? w->n - r : rows;
    const mm_pack_args a = {
        .w = bf16 ? NULL : w->w + (size_t)r * w->k, .bf16 = bf16 ? w->bf16 + (size_t)r * w->k : NULL, .n = n, .k = w->k};
    void *plane[MM_MAX_PLANES];
    for (unsigned i = 0; i < s->plane_count; i++) {
      const size_t at = r && s->plane[i].cell.n ? mm_plane_elements(r, w->k, s->plane[i].cell) : 0;
      plane[i] = (char *)p->plane[i] + at * mm_dtype_size(s->plane[i].dtype);
    }
    mm_feedback_couple(&h->f, &g->f, r / g->block, s, &a, plane, scratch + 1 + r % 3); /* no boundary is given */
  }
  free(scratch);
}

/* tr(G E H Eᵀ). */
static double coupled_error(const moments *h, const moments *g, const matrix *w, const float *other) {
  double sum = 0, *e = calloc((size_t)N * K, sizeof *e);
  for (size_t i = 0; i < (size_t)N * K; i++) e[i] = (double)w->w[i] - (double)other[i];
  for (uint32_t i = 0; i < N; i++)
    for (uint32_t c = 0; c < K; c++) {
      double eh = 0, ge = 0;
      for (uint32_t j = 0; j < K; j++) eh += e[i * K + j] * h->h[(size_t)j * K + c];
      for (uint32_t l = 0; l < N; l++) ge += g->h[(size_t)i * N + l] * e[l * K + c];
      sum += eh * ge;
    }
  free(e);
  return sum;
}

/* I + U of a = (I + U) D (I + U)ᵀ with the damping of the factors, in the order of f: upper[i][j]. */
static double *unit_upper(const moments *m) {
  const uint32_t k = m->k;
  double *a = calloc((size_t)k * k, sizeof *a);
  for (uint32_t b = 0; b < k; b += m->block) {
    const uint32_t n = k - b < m->block ? k - b : m->block, *order = m->f.order + b;
    double mean = 0;
    for (uint32_t i = 0; i < n; i++) mean += m->h[(size_t)(b + i) * k + b + i] / n;
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t j = 0; j < n; j++)
        a[(size_t)(b + i) * k + b + j] = m->h[(size_t)(b + order[i]) * k + b + order[j]] + (i == j ? 0.01 * mean + 1e-6 : 0);
    for (uint32_t j = b + n; j-- > b;) {
      double column[COLUMNS];
      for (uint32_t i = b; i < j; i++) column[i - b] = a[(size_t)i * k + j];
      for (uint32_t i = b; i < j; i++) {
        a[(size_t)i * k + j] = column[i - b] / a[(size_t)j * k + j];
        for (uint32_t l = b; l <= i; l++) a[(size_t)l * k + i] -= a[(size_t)i * k + j] * column[l - b];
      }
    }
  }
  for (uint32_t i = 0; i < k; i++)
    for (uint32_t j = 0; j <= i; j++) a[(size_t)i * k + j] = i == j;
  for (uint32_t i = 0; i < k; i++) /* what lies between blocks */
    for (uint32_t j = 0; j < k; j++)
      if (i / m->block != j / m->block) a[(size_t)i * k + j] = 0;
  return a;
}

/* Each weight after the errors of all rows and columns before it: Σ over l ≤ i, c ≤ j of V_li e_lc U_cj, but its own. */
static void published(const mm_scheme *s, const moments *h, const moments *g, const matrix *w, const float *scale, float *out) {
  double *u = unit_upper(h), *v = unit_upper(g), *e = calloc((size_t)N * K, sizeof *e), *ev = calloc((size_t)N * K, sizeof *ev);
  for (uint32_t i = 0; i < N; i++)
    for (uint32_t j = 0; j < K; j++) {
      const size_t row = i / g->block * g->block + g->f.order[i], at = row * K + j / h->block * h->block + h->f.order[j];
      double r = 0, sum = 0;
      for (uint32_t l = i / g->block * g->block; l < i; l++) r += v[(size_t)l * N + i] * e[(size_t)l * K + j];
      for (uint32_t c = j / h->block * h->block; c < j; c++) sum += ev[(size_t)i * K + c] * u[(size_t)c * K + j];
      out[at] = (float)(nearest(s, ((double)w->w[at] + r + sum) / (double)scale[at]) * (double)scale[at]);
      e[(size_t)i * K + j] = (double)w->w[at] - (double)out[at];
      ev[(size_t)i * K + j] = e[(size_t)i * K + j] + r;
    }
  free(u), free(v), free(e), free(ev);
}

static const char *const words[] = {"w4a16",       "w4afp8",          "w4a8",     "int8", "nvfp4", "mxfp4", "mxfp8",
                                    "channel_fp8", "tensor_wise_fp8", "block_fp8"};

TEST(less_error_than_rows_by_themselves) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    const mm_scheme *s = mm_scheme_find(words[i]);
    moments h = moments_drawn(K, COLUMNS, 500, false), g = moments_drawn(N, ROWS, 300, false);
    matrix w = matrix_drawn(N, K, gaussian, 0.02);
    packed p = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
    uint32_t at;
    for (uint32_t r = 0; r < N; r++) g.h[(size_t)r * N + r] += 0.5; /* as gradients are mixed */
    assert_true(factor(&h, &at) && factor(&g, &at));
    feed_back(&p, &h, &w, 128, false);
    float *alone = values(&p), *scale = scales(&p), *theirs = malloc(N * K * sizeof *theirs);
    published(s, &h, &g, &w, scale, theirs);
    couple(&p, &h, &g, &w, N, false);
    float *ours = values(&p);
    const double a = coupled_error(&h, &g, &w, alone), t = coupled_error(&h, &g, &w, theirs), e = coupled_error(&h, &g, &w, ours);
    print_message("%s: %.3f of the error of rows by themselves, %.3f of the published order's\n", words[i], e / a, e / t);
    assert_true(e < 0.7 * a && e < 1.01 * t);
    free(alone), free(scale), free(theirs), free(ours);
    packed_close(&p), matrix_close(&w), moments_close(&h), moments_close(&g);
  }
}

TEST(same_bytes) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    const mm_scheme *s = mm_scheme_find(words[i]);
    if (s->plane[1].cell.n > 1) continue; /* whose scales are of more rows than a strip here has */
    moments h = moments_drawn(300, 128, 350, i % 2 == 0), g = moments_drawn(75, 32, 200, i % 2 == 1);
    matrix w = matrix_drawn(75, 300, student, 0.02);
    uint32_t at;
    for (uint32_t c = 0; c < 300; c++) matrix_set(&w, 5, c, 0); /* stays as it is, whatever errors its neighbours have */
    assert_true(factor(&h, &at) && factor(&g, &at));
    packed p = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
    couple(&p, &h, &g, &w, 96, false);
    float *ours = values(&p);
    for (uint32_t c = 0; c < 300; c++) assert_true(ours[5 * 300 + c] == 0);
    free(ours);
    for (int turn = 0; turn < 4; turn++) {
      if (turn > 1) mm_cpu_limit(turn == 2 ? MM_CPU_PLAIN : MM_CPU_AVX2);
      packed q = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
      couple(&q, &h, &g, &w, turn == 0 ? 32 : 64, turn == 1);
      assert_true(same_planes(&p, &q));
      packed_close(&q);
      mm_cpu_limit(MM_CPU_BEST);
    }
    packed_close(&p), matrix_close(&w), moments_close(&h), moments_close(&g);
  }
}

/* Gradients and inputs of no token, of one and of ten, with dead rows and columns; rows of zeros, tiny, huge, of both, and with one weight
 * that dwarfs the others. Values stay finite, and each row that has a size keeps a third of its decibels. */
TEST(odd_moments_and_rows) {
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    for (uint32_t tokens = 0; tokens <= 10; tokens += tokens ? 9 : 1) {
      const mm_scheme *s = mm_scheme_find(words[i]);
      moments h = moments_drawn(K, COLUMNS, tokens, true), g = moments_drawn(N, ROWS, tokens, true);
      matrix w = matrix_drawn(N, K, gaussian, 0.02);
      uint32_t at;
      for (uint32_t c = 0; c < K; c++) {
        matrix_set(&w, 1, c, 0);
        matrix_set(&w, 2, c, gaussian() * 1e-36);
        if (i % 2) matrix_set(&w, 3, c, gaussian() * 1e37);
        matrix_set(&w, 4, c, gaussian() * (c < 100 ? 1e-30 : 1e30));
        matrix_set(&w, 5, c, c == 7 ? 30 : gaussian() * 0.001);
      }
      for (uint32_t r = 0; r < N; r++) g.h[(size_t)r * N + r] += 0.5;
      assert_true(factor(&h, &at) && factor(&g, &at));
      packed p = pack_matrix(s, &w, MM_SEARCH_ABSMAX);
      feed_back(&p, &h, &w, 128, false);
      float *alone = values(&p);
      couple(&p, &h, &g, &w, N, false);
      float *ours = values(&p);
      for (uint32_t r = 0; r < N; r++) {
        double signal = 0, noise = 0, before = 0;
        for (uint32_t c = 0; c < K; c++) {
          const double x = (double)w.w[r * K + c], e = x - (double)ours[r * K + c], b = x - (double)alone[r * K + c];
          assert_true(isfinite(ours[r * K + c]));
          signal += x * x, noise += e * e, before += b * b;
        }
        if (r == 1) assert_true(noise == 0);
        if (!(noise <= fmax(before, signal * pow(10, -(double)s->sqnr / 30) * 1.0001)))
          fail_msg("%s, %u tokens, row %u: %g of %g, before %g", words[i], tokens, r, noise, signal, before);
      }
      free(alone), free(ours);
      packed_close(&p), matrix_close(&w), moments_close(&h), moments_close(&g);
    }
}

int main(void) { return run_unit_tests(NULL, NULL); }
