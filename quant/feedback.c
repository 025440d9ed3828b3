/* Factors of second moments, and the rounding of rows under them. All arrays of a row lie in the order of its blocks' columns. */
#include "quant/feedback.h"

#include <math.h>
#include <string.h>

#include "quant/tile.h"

enum { REPEATS = 4 };
#define DAMPING 0.01 /* of the block's mean moment */
#define LEAST   1e-6 /* of the matrix's */

/* ---- factors ---- */

/* The columns by descending moment, the lower first among equals. */
static void find_order(uint32_t *order, const double *h, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const double d = h[(size_t)i * n + i];
    uint32_t at = i;
    for (; at > 0 && h[(size_t)order[at - 1] * n + order[at - 1]] < d; at--) order[at] = order[at - 1];
    order[at] = i;
  }
}

MM_INLINE void subtract_row_body(double *to, const double *row, double times, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) to[i] -= times * row[i];
}
MM_VERSIONS(subtract_row, (double *to, const double *row, double times, uint32_t n), (to, row, times, n))

/* w, of which the lower triangle is read, becomes d on the diagonal and U below it, transposed: w[j][i] = U[i][j]. */
static bool factor(double *w, uint32_t n, uint32_t *failed) {
  for (uint32_t j = n; j-- > 0;) {
    double *row = w + (size_t)j * n, d = row[j];
    *failed = j;
    if (!(d > 0)) return false;
    for (uint32_t i = 0; i < j; i++) subtract_row(w + (size_t)i * n, row, row[i] / d, i + 1);
    for (uint32_t i = 0; i < j; i++) {
      row[i] /= d;
      if (!(fabs(row[i]) < 1e6)) return false;
    }
  }
  return true;
}

bool mm_feedback_factor(mm_feedback *f, uint32_t b, const double *h, double *work, uint32_t *column) {
  const uint32_t n = (uint32_t)mm_min(f->block, f->k - b * f->block), stride = mm_feedback_stride(f->block);
  float *upper = f->upper + (size_t)b * f->block * stride, *moment = f->moment + (size_t)b * f->block * stride;
  uint32_t *order = f->order + (size_t)b * f->block;
  double mean = 0;
  for (uint32_t i = 0; i < n; i++) mean += h[(size_t)i * n + i] / n;
  find_order(order, h, n);
  const double damping = DAMPING * mean + LEAST;
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t j = 0; j <= i; j++) {
      const size_t hi = mm_max(order[i], order[j]), lo = mm_min(order[i], order[j]);
      work[(size_t)i * n + j] = h[hi * n + lo] + (i == j ? damping : 0);
    }
  memset(upper, 0, (size_t)f->block * stride * sizeof *upper);
  memset(moment, 0, (size_t)f->block * stride * sizeof *moment);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t j = 0; j <= i; j++) moment[(size_t)i * stride + j] = moment[(size_t)j * stride + i] = (float)work[(size_t)i * n + j];
  if (!factor(work, n, column)) {
    *column = b * f->block + order[*column];
    return false;
  }
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t j = i + 1; j < n; j++) upper[(size_t)i * stride + j] = (float)work[(size_t)j * n + i];
  return true;
}

/* ---- rounding ---- */

/* A row at work; arrays of k numbers, every block from b · block on in its own order, padded with zeros to whole lanes. */
typedef struct row_state {
  const mm_feedback *f;
  float *w, *s; /* weights and scales, times a power of two that brings the largest weight into [1, 2) */
  float *q;     /* values of the codes */
  float *x;     /* weights with the errors of others added, while codes are first found */
  float *r, *g; /* w - q s; its product with H */
  float *t;     /* a group's codes times H */
  float *line;  /* of the row in column order */
  float unit;
  mm_code code;
  int32_t lo, hi; /* integer codes */
} row_state;

MM_INLINE float round_value(const row_state *z, float y) {
  switch (z->code) {
    case MM_CODE_E4M3: return mm_e4m3_to_f32(mm_finite_to_e4m3(y));
    case MM_CODE_E2M1: return mm_e2m1_to_f32(mm_finite_to_e2m1(y));
    default: return (float)mm_round_clamp(y, z->lo, z->hi);
  }
}

/* y += a x over whole lanes. */
MM_INLINE void add_times(float *y, float a, const float *x, uint32_t from, uint32_t n) {
  for (uint32_t i = from / MM_LANES * MM_LANES; i < n; i += MM_LANES) MM_LANES_AT(y + i) += a * MM_LANES_FROM(x + i);
}

static uint32_t block_columns(const mm_feedback *f, uint32_t b) { return (uint32_t)mm_min(f->block, f->k - b * f->block); }

/* The codes of a block, each with the errors before it. */
MM_INLINE void round_block(const row_state *z, uint32_t b) {
  const uint32_t n = block_columns(z->f, b), stride = mm_feedback_stride(z->f->block);
  const size_t at = (size_t)b * z->f->block;
  const float *upper = z->f->upper + at * stride, *moment = z->f->moment + at * stride;
  float *x = z->x + at, *g = z->g + at;
  memset(g, 0, mm_feedback_stride(n) * sizeof *g);
  for (uint32_t i = 0; i < n; i++, upper += stride, moment += stride) {
    z->q[at + i] = round_value(z, x[i] / z->s[at + i]);
    const float e = z->r[at + i] = z->w[at + i] - z->q[at + i] * z->s[at + i];
    add_times(x, e, upper, i + 1, n); /* columns up to i are not read again */
    add_times(g, e, moment, 0, n);
  }
}

/* Each code of a block becomes the best one under the others. */
MM_INLINE void improve_block(const row_state *z, uint32_t b) {
  const uint32_t n = block_columns(z->f, b), stride = mm_feedback_stride(z->f->block);
  const size_t at = (size_t)b * z->f->block;
  const float *moment = z->f->moment + at * stride;
  float *g = z->g + at;
  for (uint32_t i = 0; i < n; i++, moment += stride) {
    const float s = z->s[at + i], q = z->q[at + i];
    const float best = round_value(z, q + g[i] / (moment[i] * s));
    if (best == q) continue;
    const float r = z->w[at + i] - best * s;
    add_times(g, r - z->r[at + i], moment, 0, n);
    z->q[at + i] = best;
    z->r[at + i] = r;
  }
}

/* Scales of a row: how plane 1 stores them. */
typedef struct scale_grid {
  mm_dtype type;  /* F32, BF16 or F8_E4M3 */
  uint32_t group; /* columns of a scale */
  void *stored;   /* of the row */
  float times;    /* what a stored scale is multiplied with: the matrix's, and the row's unit */
  float top;      /* the largest magnitude of a code */
} scale_grid;

/* The stored scale nearest to v, as scale_grid.stored holds it; 0 where there is none near. */
static float nearest_scale(const scale_grid *c, float v, uint32_t *bits) {
  const float y = v / c->times, most = fabsf(y);
  if (!(most > 0x1p-100f && most * c->top <= 0x1.fffffep126f)) return 0;
  switch (c->type) {
    case MM_F32: return *bits = mm_f32_bits(y), v;
    case MM_BF16: *bits = mm_finite_to_bf16(y); return mm_bf16_to_f32((uint16_t)*bits) * c->times;
    default: *bits = mm_finite_to_e4m3(y); return *bits >= 1 && *bits <= 126 ? mm_e4m3_value[*bits] * c->times : 0;
  }
}

static void store_scale(const scale_grid *c, uint32_t i, uint32_t bits) {
  const uint16_t half = (uint16_t)bits;
  const uint8_t byte = (uint8_t)bits;
  if (c->type == MM_F32)
    memcpy((float *)c->stored + i, &bits, sizeof bits);
  else if (c->type == MM_BF16)
    memcpy((uint16_t *)c->stored + i, &half, sizeof half);
  else
    memcpy((uint8_t *)c->stored + i, &byte, sizeof byte);
}

/* The scale of columns [from, to) under their codes: the change of least error, if a stored scale has less error than the one there. */
MM_INLINE void refine_group(const row_state *z, const scale_grid *c, uint32_t i, uint32_t from, uint32_t to) {
  const uint32_t block = z->f->block, stride = mm_feedback_stride(block);
  float num = 0, den = 0, s = 0;
  for (uint32_t b = from / block; b * block < to; b++) {
    const uint32_t n = block_columns(z->f, b);
    const size_t at = (size_t)b * block;
    memset(z->t + at, 0, mm_feedback_stride(n) * sizeof *z->t);
    for (uint32_t j = 0; j < n; j++) {
      const uint32_t column = b * block + z->f->order[at + j];
      if (column < from || column >= to) continue;
      s = z->s[at + j];
      num += z->q[at + j] * z->g[at + j];
      if (z->q[at + j] != 0) add_times(z->t + at, z->q[at + j], z->f->moment + (at + j) * stride, 0, n);
    }
    for (uint32_t j = 0; j < n; j++) {
      const uint32_t column = b * block + z->f->order[at + j];
      if (column >= from && column < to) den += z->q[at + j] * z->t[at + j];
    }
  }
  uint32_t bits = 0;
  if (!(den > 0)) return;
  const float best = nearest_scale(c, s + num / den, &bits), d = best - s;
  if (best == 0 || (best < 0) != (s < 0) || !(d * den * d < 2 * d * num)) return;
  store_scale(c, i, bits);
  for (uint32_t b = from / block; b * block < to; b++) {
    const uint32_t n = block_columns(z->f, b);
    const size_t at = (size_t)b * block;
    add_times(z->g + at, -d, z->t + at, 0, n);
    for (uint32_t j = 0; j < n; j++) {
      const uint32_t column = b * block + z->f->order[at + j];
      if (column < from || column >= to) continue;
      z->s[at + j] = best;
      z->r[at + j] = z->w[at + j] - z->q[at + j] * best;
    }
  }
}

/* Code bits of a value of round_value. */
MM_INLINE uint8_t code_of(mm_code code, float q) {
  switch (code) {
    case MM_CODE_E4M3: return mm_finite_to_e4m3(q);
    case MM_CODE_E2M1: return mm_finite_to_e2m1(q);
    case MM_CODE_INT4_OFFSET: return (uint8_t)((int)q + 8);
    case MM_CODE_INT4: return (uint8_t)((int)q & 15);
    default: return (uint8_t)(int8_t)q;
  }
}

static void store_codes(const row_state *z, uint8_t *to) {
  for (uint32_t c = 0; c < z->f->k; c++) {
    const size_t at = (size_t)c / z->f->block * z->f->block;
    z->line[at + z->f->order[c]] = z->q[c];
  }
  if (z->code < MM_CODE_E2M1)
    for (uint32_t c = 0; c < z->f->k; c++) to[c] = code_of(z->code, z->line[c]);
  else
    for (uint32_t c = 0; c < z->f->k; c += 2) {
      const uint8_t high = c + 1 < z->f->k ? code_of(z->code, z->line[c + 1]) : code_of(z->code, 0);
      to[c / 2] = (uint8_t)(code_of(z->code, z->line[c]) | high << 4);
    }
}

/* The weights and scales of a row into z, in the blocks' order. False for a row that stays as it is: of zeros, or with scales that its unit
 * makes too small to divide by. */
static bool load_row(row_state *z, const mm_pack_args *a, const mm_packed *m, uint32_t row) {
  const uint32_t k = z->f->k;
  float tile[MM_TILE];
  for (uint32_t c = 0; c < k; c += MM_TILE) memcpy(z->line + c, mm_tile_load(tile, a, row, c), mm_tile_count(a, c) * sizeof *tile);
  const float amax = mm_row_amax(a, row);
  if (!(amax >= 0x1p-100f)) return false;
  const int exponent = (int)(mm_f32_bits(amax) >> 23);
  z->unit = mm_f32_from_bits((uint32_t)(exponent < 253 ? 254 - exponent : 1) << 23);
  memset(z->w, 0, 7 * mm_feedback_stride(k) * sizeof *z->w);
  mm_row_scales(m, 0, row, z->t);
  for (uint32_t c = 0; c < k; c++) {
    const size_t at = (size_t)c / z->f->block * z->f->block + z->f->order[c];
    z->w[c] = z->x[c] = z->line[at] * z->unit;
    z->s[c] = z->t[at] * z->unit;
    if (!(fabsf(z->s[c]) >= 0x1p-100f && fabsf(z->s[c]) <= 0x1p100f)) return false;
  }
  return true;
}

MM_INLINE void round_row_body(const row_state *z, const scale_grid *c) {
  const uint32_t blocks = mm_cells(z->f->k, z->f->block);
  for (uint32_t b = 0; b < blocks; b++) round_block(z, b);
  for (int turn = 0; turn < REPEATS; turn++) {
    for (uint32_t i = 0, from = 0; c && from < z->f->k; i++, from += c->group)
      refine_group(z, c, i, from, (uint32_t)mm_min(z->f->k, from + c->group));
    for (uint32_t b = 0; b < blocks; b++) improve_block(z, b);
  }
}
MM_VERSIONS(round_row, (const row_state *z, const scale_grid *c), (z, c))

void mm_feedback_round(const mm_feedback *f, const mm_scheme *s, const mm_pack_args *a, void *const plane[MM_MAX_PLANES], float *scratch) {
  const uint32_t stride = mm_feedback_stride(f->k), per_byte = s->plane[0].cell.k, group = s->plane[1].cell.k;
  const bool whole = s->code == MM_CODE_INT4_OFFSET || (s->code == MM_CODE_INT4 && s->signed_scale); /* -8 is a code */
  row_state z = {.f = f, .code = s->code, .hi = s->code == MM_CODE_INT8 ? 127 : 7};
  z.lo = whole ? -8 : -z.hi;
  float **const part[] = {&z.w, &z.s, &z.q, &z.x, &z.r, &z.g, &z.t, &z.line};
  for (size_t i = 0; i < sizeof part / sizeof *part; i++) *part[i] = scratch + i * stride;
  mm_packed m = {.scheme = s, .lead = 1, .n = a->n, .k = a->k};
  for (unsigned i = 0; i < s->plane_count; i++) {
    m.plane[i] = plane[i];
    m.cell[i] = s->plane[i].cell;
  }
  const mm_plane *p = &s->plane[1];
  const bool refined = p->cell.n == 1 && (p->dtype == MM_F32 || p->dtype == MM_BF16 || p->dtype == MM_F8_E4M3);
  const float top = s->code == MM_CODE_E4M3 ? 448 : s->code == MM_CODE_E2M1 ? 6 : s->code == MM_CODE_INT8 ? 127 : 8;
  for (uint32_t row = 0; row < a->n; row++) {
    if (!load_row(&z, a, &m, row)) continue;
    const size_t scales = (size_t)row * mm_cells(a->k, group) * mm_dtype_size(p->dtype);
    const float global = s->plane_count > 2 ? *(const float *)plane[2] : 1;
    const scale_grid c = {p->dtype, group ? group : a->k, (uint8_t *)plane[1] + scales, global * z.unit, top};
    round_row(&z, refined ? &c : NULL);
    store_codes(&z, (uint8_t *)plane[0] + (size_t)row * mm_cells(a->k, per_byte));
  }
}
