/* Second moments and rounding under them, for the tests of both kinds of error feedback. */
#ifndef MM_TESTS_MOMENTS_DRAWN_H
#define MM_TESTS_MOMENTS_DRAWN_H

#include "quant/coupling.h"
#include "quant/cpu.h"
#include "tests/unit/quant/weights.h"

typedef struct moments {
  uint32_t k, block;
  double *h; /* [k, k], zero between blocks; mean diagonal 1 */
  mm_feedback f;
} moments;

/* Of `rows` correlated inputs with columns of very different size; every seventh column is dead where asked. */
static inline moments moments_drawn(uint32_t k, uint32_t block, uint32_t rows, bool dead) {
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

static inline void moments_close(moments *m) {
  free(m->h);
  free(m->f.upper);
  free(m->f.moment);
  free(m->f.order);
}

/* Blocks of h as the function takes them; the upper triangle is NaN, which must not be read. */
static inline bool factor(moments *m, uint32_t *column) {
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

/* The nearest value of the scheme's codes to y. */
static inline double nearest(const mm_scheme *s, double y) {
  if (s->code == MM_CODE_E2M1) return (double)mm_e2m1_value[mm_f32_to_e2m1((float)y)];
  if (s->code == MM_CODE_E4M3) return (double)mm_e4m3_value[mm_f32_to_e4m3((float)y)];
  const double hi = s->code == MM_CODE_INT8 ? 127 : 7, lo = s->code != MM_CODE_INT8 && s->signed_scale ? -8 : -hi;
  return fmax(lo, fmin(hi, rint(y)));
}

static inline void feed_back(packed *p, const moments *m, const matrix *w, uint32_t rows, bool bf16) {
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

static inline float *values(const packed *p) {
  float *out = malloc((size_t)p->view.n * p->view.k * sizeof *out);
  mm_unpack(&p->view, 0, 0, p->view.n, out);
  return out;
}

static inline float *scales(const packed *p) {
  float *out = malloc((size_t)p->view.n * p->view.k * sizeof *out);
  for (uint32_t r = 0; r < p->view.n; r++) mm_row_scales(&p->view, 0, r, out + (size_t)r * p->view.k);
  return out;
}

static inline bool same_planes(const packed *a, const packed *b) {
  for (unsigned i = 0; i < a->view.scheme->plane_count; i++)
    if (memcmp(a->plane[i], b->plane[i], a->bytes[i]) != 0) return false;
  return true;
}

#endif
