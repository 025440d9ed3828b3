/* Factors of second moments, and the rounding of rows under them. Sixteen rows are rounded side by side, one in each lane of a vector: a
 * number of the factors is loaded once for all of them, and sums stay in registers. Every lane adds up the products of its own row in the
 * order of the block's columns, so that a row's bytes do not depend on the rows of the other lanes or on the width of the CPU's vectors. */
#include "quant/feedback.h"

#include <math.h>
#include <string.h>

#include "quant/rounding.h"

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
  for (uint32_t j = 0; j < n; j++)
    for (uint32_t i = 0; i < j; i++) upper[(size_t)j * stride + i] = (float)work[(size_t)j * n + i];
  return true;
}

/* ---- rounding ---- */

enum { ROWS = MM_ROUND_LANES, PANEL = 8 }; /* rows side by side; columns whose sums are found at once */

/* One number of each row. */
typedef mm_round_lanes lanes;
typedef mm_round_lanes_int lanes_int;

/* Rows at work. w to d hold k numbers of each row, every block from b · block on in its own order. A row that stays as it is has weights of
 * 0 under scales of 1, which nothing changes. */
typedef struct row_state {
  const mm_feedback *f;
  lanes *w, *s;      /* weights and scales, times a power of two that brings the largest weight of the row into [1, 2) */
  lanes *q;          /* values of the codes */
  lanes *g;          /* w - q s, times H */
  lanes *t;          /* a group's codes times H */
  lanes *d;          /* changes of w - q s */
  float *line;       /* of one row in column order */
  uint32_t *members; /* the columns of each group by their place in the block, from the group's first column of the block on */
  bool kept[ROWS];   /* rows that stay as they are */
  float unit[ROWS];
  mm_rounding to;
} row_state;

static uint32_t block_columns(const mm_feedback *f, uint32_t b) { return (uint32_t)mm_min(f->block, f->k - b * f->block); }

/* Rows of `upper` or `moment` of a block of n columns, for vectors of so many bytes. */
typedef struct square {
  const float *row;
  uint32_t n, stride, vector;
} square;

MM_INLINE square square_of(const mm_feedback *f, const float *all, uint32_t b, uint32_t vector) {
  const uint32_t stride = mm_feedback_stride(f->block);
  return (square){all + (size_t)b * f->block * stride, block_columns(f, b), stride, vector};
}

/* sum[c] += Σ e[i] m[c][i] over i = list[from] … list[to - 1], or over from … to - 1 where list is NULL, for one column c. */
MM_INLINE void add_column(lanes *sum, const lanes *e, const float *m, const uint32_t *list, uint32_t from, uint32_t to) {
  lanes a = *sum;
  for (uint32_t l = from; l < to; l++) a += e[list ? list[l] : l] * m[list ? list[l] : l];
  *sum = a;
}

/* The same for PANEL columns. Their sums are variables of the CPU's own vectors, since a compiler leaves arrays and wider vectors in
 * memory: the rows are taken in parts of so many bytes. */
#define ADD_PANEL(name, bytes)                                                                                                             \
  typedef float name##_rows __attribute__((vector_size(bytes), may_alias));                                                                \
  MM_INLINE void name(lanes *sum, const lanes *e, const float *m, uint32_t stride, const uint32_t *list, uint32_t from, uint32_t to) {     \
    enum { PARTS = sizeof(lanes) / (bytes) };                                                                                              \
    const float *m0 = m, *m1 = m0 + stride, *m2 = m1 + stride, *m3 = m2 + stride, *m4 = m3 + stride, *m5 = m4 + stride, *m6 = m5 + stride, \
                *m7 = m6 + stride;                                                                                                         \
    for (size_t part = 0; part < PARTS; part++) {                                                                                          \
      const name##_rows *x = (const name##_rows *)e + part;                                                                                \
      name##_rows *y = (name##_rows *)sum + part;                                                                                          \
      name##_rows a0 = y[0], a1 = y[PARTS], a2 = y[2 * PARTS], a3 = y[3 * PARTS], a4 = y[4 * PARTS], a5 = y[5 * PARTS], a6 = y[6 * PARTS], \
                  a7 = y[7 * PARTS];                                                                                                       \
      for (uint32_t l = from; l < to; l++) {                                                                                               \
        const uint32_t i = list ? list[l] : l;                                                                                             \
        const name##_rows v = x[(size_t)i * PARTS];                                                                                        \
        a0 += v * m0[i], a1 += v * m1[i], a2 += v * m2[i], a3 += v * m3[i];                                                                \
        a4 += v * m4[i], a5 += v * m5[i], a6 += v * m6[i], a7 += v * m7[i];                                                                \
      }                                                                                                                                    \
      y[0] = a0, y[PARTS] = a1, y[2 * PARTS] = a2, y[3 * PARTS] = a3, y[4 * PARTS] = a4, y[5 * PARTS] = a5, y[6 * PARTS] = a6,             \
      y[7 * PARTS] = a7;                                                                                                                   \
    }                                                                                                                                      \
  }
ADD_PANEL(add_panel_16, 16)
ADD_PANEL(add_panel_32, 32)
ADD_PANEL(add_panel_64, 64)

/* Panels are of PANEL columns, and those that are left over of one. */
static uint32_t panel_columns(uint32_t left) { return left < PANEL ? 1 : PANEL; }
#define FOR_PANELS(j, n) for (uint32_t j = 0; j < (n); j += panel_columns((n)-j))

/* Adds the products with rows of m to the sums of the panel of column j. */
MM_INLINE void add_products(lanes *sum, uint32_t j, const square *m, const lanes *e, const uint32_t *list, uint32_t from, uint32_t to) {
  const float *row = m->row + (size_t)j * m->stride;
  if (panel_columns(m->n - j) != PANEL)
    add_column(sum + j, e, row, list, from, to);
  else if (m->vector == 64)
    add_panel_64(sum + j, e, row, m->stride, list, from, to);
  else if (m->vector == 32)
    add_panel_32(sum + j, e, row, m->stride, list, from, to);
  else
    add_panel_16(sum + j, e, row, m->stride, list, from, to);
}

/* The codes of a block, each with the errors before it. */
MM_INLINE void round_block(const row_state *z, uint32_t b, uint32_t vector) {
  const square upper = square_of(z->f, z->f->upper, b, vector), moment = square_of(z->f, z->f->moment, b, vector);
  const size_t at = (size_t)b * z->f->block;
  const lanes *w = z->w + at, *s = z->s + at;
  lanes *q = z->q + at, *g = z->g + at, *d = z->d + at, *x = g; /* x: weights with the errors of others added */
  memcpy(x, w, upper.n * sizeof *x);
  FOR_PANELS(j, upper.n) {
    const uint32_t end = j + panel_columns(upper.n - j);
    add_products(x, j, &upper, d, NULL, 0, j);
    for (uint32_t i = j; i < end; i++) {
      lanes y = x[i] / s[i];
      mm_round_values(&z->to, &y);
      q[i] = y;
      d[i] = w[i] - y * s[i];
      for (uint32_t c = i + 1; c < end; c++) x[c] += d[i] * upper.row[(size_t)c * upper.stride + i];
    }
  }
  memset(g, 0, moment.n * sizeof *g);
  FOR_PANELS(j, moment.n) add_products(g, j, &moment, d, NULL, 0, moment.n);
}

/* The best values of the codes of column i under all others, and the changes of w - q s that they bring. False where there are none. */
MM_INLINE bool improve_column(const row_state *z, size_t i, float own) {
  const lanes s = z->s[i], w = z->w[i], q = z->q[i];
  lanes best = q + z->g[i] / (own * s), d = {0};
  uint64_t half[sizeof(lanes) / sizeof(uint64_t)], changed = 0;
  mm_round_values(&z->to, &best);
  const lanes_int differ = best != q, same = ~differ;
  const lanes change = (w - best * s) - (w - q * s);
  memcpy(half, &differ, sizeof half);
  for (size_t r = 0; r < sizeof half / sizeof *half; r++) changed |= half[r];
  mm_select_lanes(&d, &differ, &change);
  mm_select_lanes(&best, &same, &q);
  if (!changed) return false;
  z->q[i] = best;
  z->d[i] = d;
  return true;
}

/* Each code of a block becomes the best one under the others. True if one changes. */
MM_INLINE bool improve_block(const row_state *z, uint32_t b, uint32_t vector) {
  const square moment = square_of(z->f, z->f->moment, b, vector);
  const size_t at = (size_t)b * z->f->block;
  lanes *g = z->g + at, *d = z->d + at;
  uint32_t list[MM_FEEDBACK_BLOCK], count = 0, first = 0; /* columns that changed */
  FOR_PANELS(j, moment.n) {
    const uint32_t end = j + panel_columns(moment.n - j);
    add_products(g, j, &moment, d, list, 0, count);
    for (uint32_t i = j; i < end; i++) {
      if (!improve_column(z, at + i, moment.row[(size_t)i * moment.stride + i])) continue;
      list[count++] = i;
      for (uint32_t c = j; c < end; c++) g[c] += d[i] * moment.row[(size_t)c * moment.stride + i];
    }
  }
  FOR_PANELS(j, moment.n) { /* what columns behind a panel's changed */
    while (first < count && list[first] < j + panel_columns(moment.n - j)) first++;
    add_products(g, j, &moment, d, list, first, count);
  }
  return count > 0;
}

/* Stores the scales s[] + num / den of group i where they have less error than s, which becomes them; the changes. False if none changes.
 */
static bool change_scales(const row_state *z, const mm_refined_scales *c, uint32_t i, lanes *s, const lanes *num, const lanes *den,
                          lanes *change) {
  bool changed = false;
  for (int r = 0; r < ROWS; r++) {
    uint32_t bits = 0;
    (*change)[r] = 0;
    if (!((*den)[r] > 0)) continue;
    const float best = mm_nearest_scale(c, z->unit[r], (*s)[r] + (*num)[r] / (*den)[r], &bits), d = best - (*s)[r];
    if (best == 0 || (best < 0) != ((*s)[r] < 0) || !(d * (*den)[r] * d < 2 * d * (*num)[r])) continue;
    mm_store_scale(c, (uint32_t)r, i, bits);
    (*s)[r] = best;
    (*change)[r] = d;
    changed = true;
  }
  return changed;
}

/* The places of the columns [from, to) in block b, in the block's order, and how many. */
MM_INLINE const uint32_t *members_of(const row_state *z, uint32_t b, uint32_t from, uint32_t to, uint32_t *count) {
  const uint32_t first = (uint32_t)mm_max(from, b * z->f->block), end = (uint32_t)mm_min(to, (b + 1) * z->f->block);
  *count = end - first;
  return z->members + first;
}

/* The scale of group i, columns [from, to), under its codes: the change of least error, if a stored scale has less error than the one
 * there. True if one changes. */
MM_INLINE bool refine_group(const row_state *z, const mm_refined_scales *c, uint32_t i, uint32_t from, uint32_t to, uint32_t vector) {
  const uint32_t block = z->f->block;
  lanes num = {0}, den = {0}, s = {0}, change;
  uint32_t count;
  for (uint32_t b = from / block; b * block < to; b++) {
    const square moment = square_of(z->f, z->f->moment, b, vector);
    const uint32_t *list = members_of(z, b, from, to, &count);
    const size_t at = (size_t)b * block;
    memset(z->t + at, 0, moment.n * sizeof *z->t);
    FOR_PANELS(j, moment.n) add_products(z->t + at, j, &moment, z->q + at, list, 0, count);
    for (uint32_t l = 0; l < count; l++) {
      num += z->q[at + list[l]] * z->g[at + list[l]];
      den += z->q[at + list[l]] * z->t[at + list[l]];
    }
    s = z->s[at + list[0]];
  }
  if (!change_scales(z, c, i, &s, &num, &den, &change)) return false;
  for (uint32_t b = from / block; b * block < to; b++) {
    const uint32_t n = block_columns(z->f, b), *list = members_of(z, b, from, to, &count);
    const size_t at = (size_t)b * block;
    for (uint32_t j = 0; j < n; j++) z->g[at + j] -= change * z->t[at + j];
    for (uint32_t l = 0; l < count; l++) z->s[at + list[l]] = s;
  }
  return true;
}

/* Rounds the columns [from, to), whole blocks and groups. */
MM_INLINE void round_columns(const row_state *z, const mm_refined_scales *c, uint32_t from, uint32_t to, uint32_t vector) {
  const uint32_t block = z->f->block;
  for (uint32_t b = from / block; b * block < to; b++) round_block(z, b, vector);
  for (int turn = 0; turn < REPEATS; turn++) {
    bool changed = false;
    for (uint32_t i = c ? from / c->group : 0; c && i * c->group < to; i++)
      changed |= refine_group(z, c, i, i * c->group, (uint32_t)mm_min(to, (i + 1) * c->group), vector);
    for (uint32_t b = from / block; b * block < to; b++) changed |= improve_block(z, b, vector);
    if (!changed) break;
  }
}

MM_INLINE void round_rows_body(const row_state *z, const mm_refined_scales *c, uint32_t vector) {
  const uint32_t span = c && z->f->block % c->group ? z->f->k : z->f->block;
  for (uint32_t from = 0; from < z->f->k; from += span) round_columns(z, c, from, (uint32_t)mm_min(z->f->k, from + span), vector);
}
MM_VERSIONS_BY_LEVEL(round_rows, (const row_state *z, const mm_refined_scales *c), (z, c), (z, c, 16), (z, c, 32), (z, c, 64))

/* ---- rows in and out ---- */

/* Codes that moved further than a third of the scheme's decibels allows, sqnr, say more about the moments than about the weights, as where
 * one weight dwarfs all others of its row and its error is spread over them: such a row takes the nearest code of each weight instead. */
static void limit_rows(const row_state *z, float sqnr) {
  const double share = pow(10, -(double)sqnr / 30);
  double signal[ROWS] = {0}, noise[ROWS] = {0};
  for (uint32_t c = 0; c < z->f->k; c++)
    for (int r = 0; r < ROWS; r++) {
      const double w = (double)z->w[c][r], d = w - (double)z->q[c][r] * (double)z->s[c][r];
      signal[r] += w * w;
      noise[r] += d * d;
    }
  for (int r = 0; r < ROWS; r++)
    for (uint32_t c = 0; noise[r] > signal[r] * share && c < z->f->k; c++) {
      lanes y = z->w[c] / z->s[c];
      mm_round_values(&z->to, &y);
      z->q[c][r] = y[r];
    }
}

static void store_codes(const row_state *z, int r, uint8_t *to) {
  for (uint32_t b = 0; b * z->f->block < z->f->k; b++) {
    const size_t at = (size_t)b * z->f->block;
    for (uint32_t i = 0; i < block_columns(z->f, b); i++) z->line[at + z->f->order[at + i]] = z->q[at + i][r];
  }
  mm_store_values(z->to.code, z->line, z->f->k, to);
}

/* Sets every column of row r to its number of from[], times unit. */
static void spread(const row_state *z, lanes *to, int r, const float *from, float unit) {
  for (uint32_t b = 0; b * z->f->block < z->f->k; b++) {
    const size_t at = (size_t)b * z->f->block;
    for (uint32_t i = 0; i < block_columns(z->f, b); i++) to[at + i][r] = from[at + z->f->order[at + i]] * unit;
  }
}

/* The weights and scales of a row into z, in the blocks' order. False for a row that stays as it is: of zeros, or with scales that its unit
 * makes too small to divide by. */
static bool load_row(row_state *z, const mm_pack_args *a, const mm_packed *m, uint32_t row, int r) {
  const uint32_t k = z->f->k;
  float tile[MM_TILE];
  const float amax = mm_row_amax(a, row);
  if (!(amax >= 0x1p-100f)) return false;
  const int exponent = (int)(mm_f32_bits(amax) >> 23);
  const float unit = z->unit[r] = mm_f32_from_bits((uint32_t)(exponent < 253 ? 254 - exponent : 1) << 23);
  mm_row_scales(m, 0, row, z->line);
  for (uint32_t c = 0; c < k; c++)
    if (!(fabsf(z->line[c] * unit) >= 0x1p-100f && fabsf(z->line[c] * unit) <= 0x1p100f)) return false;
  spread(z, z->s, r, z->line, unit);
  for (uint32_t c = 0; c < k; c += MM_TILE) memcpy(z->line + c, mm_tile_load(tile, a, row, c), mm_tile_count(a, c) * sizeof *tile);
  spread(z, z->w, r, z->line, unit);
  return true;
}

/* Rows [row, row + ROWS) of the strip, or those that are left, into z. */
static void load_rows(row_state *z, const mm_pack_args *a, const mm_packed *m, uint32_t row) {
  for (int r = 0; r < ROWS; r++) {
    z->kept[r] = row + (uint32_t)r >= a->n || !load_row(z, a, m, row + (uint32_t)r, r);
    if (!z->kept[r]) continue;
    z->unit[r] = 1;
    for (uint32_t c = 0; c < z->f->k; c++) z->w[c][r] = 0, z->s[c][r] = 1;
  }
}

/* The columns of each group of a block by their place in its order. */
static void find_members(const row_state *z, uint32_t group) {
  for (uint32_t b = 0, block = z->f->block; b * block < z->f->k; b++) {
    const uint32_t first = b * block, n = block_columns(z->f, b);
    uint32_t *to = z->members + first;
    for (uint32_t from = first / group * group; from < first + n; from += group)
      for (uint32_t j = 0; j < n; j++) {
        const uint32_t column = first + z->f->order[first + j];
        if (column >= from && column - from < group) *to++ = j;
      }
  }
}

void mm_feedback_round(const mm_feedback *f, const mm_scheme *s, const mm_pack_args *a, void *const plane[MM_MAX_PLANES], float *scratch) {
  const uint32_t k = f->k, per_byte = s->plane[0].cell.k;
  row_state z = {.f = f, .to = mm_rounding_of(s)};
  scratch += (0 - (uintptr_t)scratch / sizeof *scratch) % ROWS; /* to whole lanes */
  lanes **const part[] = {&z.w, &z.s, &z.q, &z.g, &z.t, &z.d};
  for (size_t i = 0; i < sizeof part / sizeof *part; i++) *part[i] = (lanes *)(void *)scratch + i * k;
  z.line = scratch + sizeof part / sizeof *part * k * ROWS;
  z.members = (uint32_t *)(void *)(z.line + k);
  mm_packed m = {.scheme = s, .lead = 1, .n = a->n, .k = k};
  for (unsigned i = 0; i < s->plane_count; i++) {
    m.plane[i] = plane[i];
    m.cell[i] = s->plane[i].cell;
  }
  mm_refined_scales c = mm_refined_scales_of(s, plane, k);
  const bool refined = mm_scales_refined(s);
  if (refined) find_members(&z, c.group);
  for (uint32_t row = 0; row < a->n; row += ROWS) {
    load_rows(&z, a, &m, row);
    c.stored = (uint8_t *)plane[1] + row * c.row_bytes;
    round_rows(&z, refined ? &c : NULL);
    limit_rows(&z, s->sqnr);
    for (uint32_t r = 0; r < ROWS; r++)
      if (!z.kept[r]) store_codes(&z, (int)r, (uint8_t *)plane[0] + (size_t)(row + r) * mm_cells(k, per_byte));
  }
}
