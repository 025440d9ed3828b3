/* Random matrices for the tests of quant/: every element differs, values are exact in bf16 so that both kinds of input agree. */
#ifndef MM_TESTS_WEIGHTS_H
#define MM_TESTS_WEIGHTS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quant/numbers.h"
#include "quant/quant.h"
#include "tests/unit/unit.h"

typedef struct matrix {
  uint32_t n, k;
  float *w;
  uint16_t *bf16;
} matrix;

static uint64_t random_state = 0x9e3779b97f4a7c15u;
static double uniform(void) { /* (0, 1), xorshift64 */
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return ((double)(random_state >> 11) + 0.5) * 0x1p-53;
}
static double gaussian(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }
/* Student-t with 5 degrees of freedom: heavy tails. */
static inline double student(void) {
  double x = gaussian(), s = 0;
  for (int i = 0; i < 5; i++) {
    double g = gaussian();
    s += g * g;
  }
  return x / sqrt(s / 5);
}

static inline matrix matrix_open(uint32_t n, uint32_t k) {
  matrix m = {n, k, NULL, NULL};
  m.w = calloc((size_t)n * k, sizeof *m.w);
  m.bf16 = calloc((size_t)n * k, sizeof *m.bf16);
  assert_true(m.w && m.bf16);
  return m;
}
static inline void matrix_close(matrix *m) {
  free(m->w);
  free(m->bf16);
}
static inline void matrix_set(matrix *m, uint32_t row, uint32_t col, double value) {
  size_t i = (size_t)row * m->k + col;
  m->bf16[i] = mm_f32_to_bf16((float)value);
  m->w[i] = mm_bf16_to_f32(m->bf16[i]);
}
static inline void matrix_fill(matrix *m, double (*draw)(void), double sigma) {
  for (uint32_t r = 0; r < m->n; r++)
    for (uint32_t c = 0; c < m->k; c++) matrix_set(m, r, c, draw() * sigma);
}

static inline matrix matrix_drawn(uint32_t n, uint32_t k, double (*draw)(void), double sigma) {
  matrix m = matrix_open(n, k);
  matrix_fill(&m, draw, sigma);
  return m;
}
static inline float matrix_amax(const matrix *m) {
  float most = 0;
  for (size_t i = 0; i < (size_t)m->n * m->k; i++) most = fmaxf(most, fabsf(m->w[i]));
  return most;
}

/* A packed matrix that owns its planes. */
typedef struct packed {
  mm_packed view;
  void *plane[MM_MAX_PLANES];
  size_t bytes[MM_MAX_PLANES];
} packed;

static inline packed packed_open(const mm_scheme *s, uint32_t n, uint32_t k) {
  packed p = {.view = {.scheme = s, .lead = 1, .n = n, .k = k}};
  for (unsigned i = 0; i < s->plane_count; i++) {
    p.view.cell[i] = s->plane[i].cell;
    p.bytes[i] = mm_plane_elements(n, k, s->plane[i].cell) * mm_dtype_size(s->plane[i].dtype);
    p.plane[i] = malloc(p.bytes[i]);
    assert_non_null(p.plane[i]);
    memset(p.plane[i], 0xa5, p.bytes[i]);
    p.view.plane[i] = p.plane[i];
  }
  return p;
}
static inline void packed_close(packed *p) {
  for (unsigned i = 0; i < p->view.scheme->plane_count; i++) free(p->plane[i]);
}
static inline bool packed_equal(const packed *a, const packed *b) {
  for (unsigned i = 0; i < a->view.scheme->plane_count; i++)
    if (a->bytes[i] != b->bytes[i] || memcmp(a->plane[i], b->plane[i], a->bytes[i]) != 0) return false;
  return true;
}
static inline packed pack_matrix(const mm_scheme *s, const matrix *m, mm_search search) {
  packed p = packed_open(s, m->n, m->k);
  mm_pack_args a = {.w = m->w, .n = m->n, .k = m->k, .amax = matrix_amax(m), .search = search};
  s->pack(&a, p.plane);
  return p;
}

/* Signal to quantisation noise, dB. */
static inline double sqnr(const matrix *m, const packed *p) {
  float *out = malloc((size_t)m->n * m->k * sizeof *out);
  assert_non_null(out);
  mm_unpack(&p->view, 0, 0, m->n, out);
  double signal = 0, noise = 0;
  for (size_t i = 0; i < (size_t)m->n * m->k; i++) {
    double d = (double)m->w[i] - (double)out[i];
    signal += (double)m->w[i] * (double)m->w[i];
    noise += d * d;
  }
  free(out);
  return 10 * log10(signal / noise);
}

#endif
