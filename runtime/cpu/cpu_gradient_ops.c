/* Linears and norms of the backward pass. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"
#include "runtime/cpu/cpu_gradient_inside.h"

/* Some rows of a weight in f32, and the rows of a window that they meet. */
typedef struct product {
  mm_cpu_gradient *g;
  const mm_packed *w;
  uint32_t lead, first, count; /* rows of the weight */
  const float *from;
  float *to;
  uint32_t rows;
  bool turned; /* x·Wᵀ, not dy·W */
} product;

static bool unpack_rows(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const product *p = ctx;
  const uint32_t at = (uint32_t)item * MM_GRADIENT_PANEL, rows = (uint32_t)mm_min(MM_GRADIENT_PANEL, p->count - at), k = p->w->k;
  float *to = p->g->strip + (size_t)at * k;
  mm_unpack(p->w, p->lead, p->first + at, rows, to);
  if (p->turned) mm_product_turn(p->g->turned + at, p->count, (mm_dense){to, k}, rows, k);
  return true;
}

/* Rows of the window by the strip: outputs of the strip's rows, or gradients of inputs that these have a part in. */
static bool multiply_panel(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const product *p = ctx;
  const size_t t = item * MM_GRADIENT_PANEL, n = p->w->n, k = p->w->k;
  const uint32_t rows = (uint32_t)mm_min(MM_GRADIENT_PANEL, p->rows - t);
  if (!p->turned) {
    mm_product_add(p->to + t * k, k, (mm_dense){p->from + t * n + p->first, n}, (mm_dense){p->g->strip, k}, rows, p->count, p->w->k);
    return true;
  }
  float *y = p->to + t * n + p->first;
  for (uint32_t r = 0; r < rows; r++) memset(y + r * n, 0, p->count * sizeof *y);
  mm_product_add(y, n, (mm_dense){p->from + t * k, k}, (mm_dense){p->g->turned, p->count}, rows, p->w->k, p->count);
  return true;
}

/* Strip after strip of the weight, in order. */
static bool each_strip(product *p, mm_err *err) {
  mm_team *team = p->g->team;
  for (p->first = 0; p->rows > 0 && p->first < p->w->n; p->first += MM_GRADIENT_STRIP) {
    p->count = (uint32_t)mm_min(MM_GRADIENT_STRIP, p->w->n - p->first);
    if (!mm_team_run(team, mm_ceil_div(p->count, MM_GRADIENT_PANEL), unpack_rows, p, err) ||
        !mm_team_run(team, mm_ceil_div(p->rows, MM_GRADIENT_PANEL), multiply_panel, p, err))
      return false;
  }
  return true;
}

bool mm_gradient_linear(mm_cpu_gradient *g, float *y, const float *x, uint32_t rows, const mm_packed *w, uint32_t lead, mm_err *err) {
  return each_strip(&(product){.g = g, .w = w, .lead = lead, .from = x, .to = y, .rows = rows, .turned = true}, err);
}

bool mm_gradient_through(mm_cpu_gradient *g, float *dx, const float *dy, uint32_t rows, const mm_packed *w, uint32_t lead, mm_err *err) {
  return each_strip(&(product){.g = g, .w = w, .lead = lead, .from = dy, .to = dx, .rows = rows}, err);
}

bool mm_gradient_linear_back(mm_cpu_gradient *g, float *dx, const mm_gradient_rows *of, mm_err *err) {
  if (of->rows) g->take(g->ctx, of);
  return mm_gradient_through(g, dx, of->dy, of->rows, of->w, of->lead, err);
}

const float *mm_gradient_vector(mm_cpu_gradient *g, const mm_packed *w) {
  mm_unpack(w, 0, 0, w->n, g->vector);
  return g->vector;
}

static float inverse_rms(const float *x, const mm_gradient_norm *of) {
  return 1.0f / sqrtf(mm_cpu_dot(x, x, of->n) / (float)of->n + (float)of->eps);
}

void mm_gradient_normalise(float *y, const float *x, const mm_gradient_norm *of) {
  for (uint32_t t = 0; t < of->rows; t++, x += of->stride, y += of->stride) {
    const float r = inverse_rms(x, of);
    for (uint32_t i = 0; i < of->n; i++) y[i] = x[i] * r * of->w[i];
  }
}

/* With y = x r w and r = (mean x² + eps)^(-1/2): dx = r (w dy) - r³ x (x · w dy) / n. */
void mm_gradient_normalise_back(float *dx, const float *dy, const float *x, const mm_gradient_norm *of, bool added) {
  for (uint32_t t = 0; t < of->rows; t++, x += of->stride, dy += of->stride, dx += of->stride) {
    const float r = inverse_rms(x, of);
    double along = 0;
    for (uint32_t i = 0; i < of->n; i++) along += (double)(dy[i] * of->w[i]) * (double)x[i];
    const float pull = (float)(along * (double)r * (double)r / of->n);
    for (uint32_t i = 0; i < of->n; i++) dx[i] = r * (dy[i] * of->w[i] - pull * x[i]) + (added ? dx[i] : 0);
  }
}
