/* Rounding of coupled rows. The rows of a block follow each other, in panels; the columns lie side by side in vectors. Every sum is taken
 * in the order of rows and columns, whatever the width of the CPU's vectors. */
#include "quant/coupling.h"

#include <math.h>
#include <string.h>

#include "quant/products.h"
#include "quant/rounding.h"

enum { REPEATS = 3, ATTEMPTS = 3, PANEL = 16, LANES = MM_ROUND_LANES }; /* PANEL: rows whose sums over the rows before are found at once */
typedef mm_round_lanes lanes;

/* A block of rows and the block of columns at work; both in their orders of rounding. */
typedef struct block {
  const mm_feedback *columns, *rows;
  mm_rounding to;
  uint32_t row_block, n; /* which one of the rows, and its rows */
  uint32_t at, m, wide;  /* first column, columns, and those with padding: a multiple of LANES */
  float *upper, *moment; /* [m, wide] U and H of the columns: upper[j][c] = U_jc */
  float *w, *s;          /* [n, wide] weights and scales, times `unit`; 0 and 1 in columns of padding */
  float *q, *e, *eh;     /* [n, wide] values of codes, w - q s, and that times H */
  float *sum, *change;   /* [PANEL, wide], [wide] */
  float *turned;         /* [wide] codes of a group, times H */
  uint32_t *members;     /* [m] the columns by the group of their scale */
  mm_refined_scales grid;
  bool refined;           /* scales change, too */
  float *found;           /* [n, groups of k] scales found */
  float *scales;          /* [n, k] of the strip's rows in their own order */
  uint8_t *code;          /* [n, k] found */
  float *line;            /* [k] */
  double *signal, *noise; /* [n] */
  bool *kept;             /* [n] rows that keep their codes */
  float unit;             /* a power of two that brings the block's largest weight into [1, 2) */
} block;

static uint32_t padded(uint32_t m) { return (m + LANES - 1) / LANES * LANES; }

/* Places n bytes on a boundary of a vector. */
static void *place(uint8_t **at, uint64_t n) {
  void *const p = *at;
  *at += (n + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes);
  return p;
}

static uint64_t place_all(block *b, uint8_t *scratch, uint32_t k, uint32_t m, uint32_t n) {
  uint8_t *at = scratch;
  const uint64_t square = (uint64_t)m * padded(m) * sizeof(float), part = (uint64_t)n * padded(m) * sizeof(float);
  float **const squares[] = {&b->upper, &b->moment}, **const parts[] = {&b->w, &b->s, &b->q, &b->e, &b->eh};
  for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) *squares[i] = place(&at, square);
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) *parts[i] = place(&at, part);
  b->sum = place(&at, (uint64_t)PANEL * padded(m) * sizeof(float));
  b->change = place(&at, padded(m) * sizeof(float));
  b->turned = place(&at, padded(m) * sizeof(float));
  b->members = place(&at, m * sizeof(uint32_t));
  b->found = place(&at, (uint64_t)n * k * sizeof(float));
  b->scales = place(&at, (uint64_t)n * k * sizeof(float));
  b->code = place(&at, (uint64_t)n * k);
  b->line = place(&at, k * sizeof(float));
  b->signal = place(&at, n * sizeof(double));
  b->noise = place(&at, n * sizeof(double));
  b->kept = place(&at, n * sizeof(bool));
  return (uint64_t)(at - scratch);
}

uint64_t mm_feedback_couple_bytes(uint32_t k, uint32_t column_block, uint32_t row_block) {
  static uint8_t none;
  block b;
  return place_all(&b, &none, k, column_block, row_block) + sizeof(lanes);
}

/* ---- what is rounded ---- */

static uint32_t row_of(const block *b, uint32_t i) { return b->rows->order[(size_t)b->row_block * b->rows->block + i]; }
static uint32_t column_of(const block *b, uint32_t j) { return b->at + b->columns->order[b->at + j]; }
/* Row i of a matrix of the rows' factors. */
static const float *factor_row(const block *b, const float *all, uint32_t i) {
  return all + ((size_t)b->row_block * b->rows->block + i) * mm_feedback_stride(b->rows->block);
}

/* Unit, scales and the rows that keep their codes; rows [row, row + n) of the strip. False where all of them do. */
static bool load_scales(block *b, const mm_pack_args *a, const mm_packed *m, uint32_t row) {
  float most = 0;
  bool some = false;
  for (uint32_t i = 0; i < b->n; i++) most = fmaxf(most, mm_row_amax(a, row + i));
  if (!(most >= 0x1p-100f)) return false;
  const int exponent = (int)(mm_f32_bits(most) >> 23);
  b->unit = mm_f32_from_bits((uint32_t)(exponent < 253 ? 254 - exponent : 1) << 23);
  for (uint32_t i = 0; i < b->n; i++) {
    const uint32_t own = row_of(b, i);
    float *s = b->scales + (size_t)own * a->k;
    b->kept[i] = !(mm_row_amax(a, row + own) > 0);
    mm_row_scales(m, 0, row + own, s);
    for (uint32_t c = 0; c < a->k; c++) {
      s[c] *= b->unit;
      b->kept[i] |= !(fabsf(s[c]) >= 0x1p-60f && fabsf(s[c]) <= 0x1p20f);
    }
    some |= !b->kept[i];
  }
  return some;
}

/* The block's columns from b->at on: their factors, weights and scales. */
static void load_columns(block *b, const mm_pack_args *a, uint32_t row) {
  const uint32_t stride = mm_feedback_stride(b->columns->block);
  const float *upper = b->columns->upper + (size_t)b->at * stride, *moment = b->columns->moment + (size_t)b->at * stride;
  for (uint32_t j = 0; j < b->m; j++)
    for (uint32_t c = 0; c < b->wide; c++) {
      b->upper[(size_t)j * b->wide + c] = c < b->m ? upper[(size_t)c * stride + j] : 0;
      b->moment[(size_t)j * b->wide + c] = c < b->m ? moment[(size_t)j * stride + c] : 0;
    }
  uint32_t count = 0;
  for (uint32_t first = b->at / b->grid.group * b->grid.group; b->refined && first < b->at + b->m; first += b->grid.group)
    for (uint32_t j = 0; j < b->m; j++)
      if (column_of(b, j) >= first && column_of(b, j) - first < b->grid.group) b->members[count++] = j;
  for (uint32_t i = 0; i < b->n; i++) {
    const size_t own = row_of(b, i);
    for (uint32_t j = 0; j < b->wide; j++) {
      const size_t column = column_of(b, j < b->m ? j : 0), from = (row + own) * a->k + column;
      b->w[(size_t)i * b->wide + j] = j < b->m ? (a->bf16 ? mm_bf16_to_f32(a->bf16[from]) : a->w[from]) * b->unit : 0;
      b->s[(size_t)i * b->wide + j] = j < b->m ? b->scales[own * a->k + column] : 1;
    }
  }
}

/* ---- rounding ---- */

/* Rows of the factors from `row` on. */
static mm_dense factors_at(const block *b, const float *all, uint32_t row) {
  return (mm_dense){factor_row(b, all, row), mm_feedback_stride(b->rows->block)};
}

MM_INLINE void add_times(float *to, const float *from, float times, uint32_t wide) {
  for (uint32_t c = 0; c < wide; c += LANES) *(lanes *)(void *)(to + c) += times * *(const lanes *)(const void *)(from + c);
}

/* Row i, LANES columns at a time: r holds the errors of the rows before it, times V; x becomes weights with all errors before them. */
MM_INLINE void round_row(const block *b, uint32_t i, const float *r, float *x) {
  const float *w = b->w + (size_t)i * b->wide, *s = b->s + (size_t)i * b->wide;
  float *q = b->q + (size_t)i * b->wide, *e = b->e + (size_t)i * b->wide, t[LANES];
  for (uint32_t c = 0; c < b->wide; c++) x[c] = w[c] + r[c];
  for (uint32_t j = 0; j < b->m; j += LANES) {
    const uint32_t count = (uint32_t)mm_min(LANES, b->m - j);
    for (uint32_t l = 0; l < count; l++) {
      q[j + l] = mm_round_value(&b->to, x[j + l] / s[j + l]);
      e[j + l] = w[j + l] - q[j + l] * s[j + l];
      t[l] = e[j + l] + r[j + l];
      add_times(x + j, b->upper + (size_t)(j + l) * b->wide + j, t[l], LANES);
    }
    for (uint32_t c = j + LANES; c < b->wide; c += LANES) {
      lanes sum = *(const lanes *)(const void *)(x + c);
      for (uint32_t l = 0; l < count; l++) sum += t[l] * *(const lanes *)(const void *)(b->upper + (size_t)(j + l) * b->wide + c);
      *(lanes *)(void *)(x + c) = sum;
    }
  }
}

MM_INLINE void round_all_body(const block *b) {
  const size_t bytes = (size_t)b->n * b->wide * sizeof(float);
  memset(b->q, 0, bytes), memset(b->e, 0, bytes), memset(b->eh, 0, bytes);
  for (uint32_t first = 0; first < b->n; first += PANEL) {
    const uint32_t rows = (uint32_t)mm_min(PANEL, b->n - first);
    memset(b->sum, 0, (size_t)rows * b->wide * sizeof(float));
    mm_product_add(b->sum, b->wide, factors_at(b, b->rows->upper, first), (mm_dense){b->e, b->wide}, rows, first, b->wide);
    for (uint32_t i = 0; i < rows; i++) {
      if (b->kept[first + i]) continue;
      round_row(b, first + i, b->sum + (size_t)i * b->wide, b->change);
      for (uint32_t l = i + 1; l < rows; l++)
        add_times(b->sum + (size_t)l * b->wide, b->e + (size_t)(first + i) * b->wide, factor_row(b, b->rows->upper, first + l)[first + i],
                  b->wide);
    }
  }
  mm_product_add(b->eh, b->wide, (mm_dense){b->e, b->wide}, (mm_dense){b->moment, b->wide}, b->n, b->m, b->wide);
}
MM_VERSIONS(round_all, (const block *b), (b))

/* Each scale of row i becomes the one of least error under its codes, of those that are stored, if that has less error than the one there.
 * r, own, b->change and what is returned are those of improve_row. */
MM_INLINE bool refine_row(const block *b, uint32_t i, float *r, float own) {
  float *s = b->s + (size_t)i * b->wide, *e = b->e + (size_t)i * b->wide;
  const float *q = b->q + (size_t)i * b->wide;
  bool changed = false;
  for (uint32_t first = 0, next; first < b->m; first = next) {
    const uint32_t *list = b->members + first, group = column_of(b, list[0]) / b->grid.group;
    float num = 0, den = 0;
    uint32_t bits = 0;
    for (next = first; next < b->m && column_of(b, b->members[next]) / b->grid.group == group;) next++;
    memset(b->turned, 0, b->wide * sizeof *b->turned);
    for (uint32_t l = 0; l < next - first; l++)
      if (q[list[l]] != 0) add_times(b->turned, b->moment + (size_t)list[l] * b->wide, q[list[l]], b->wide);
    for (uint32_t l = 0; l < next - first; l++) num += q[list[l]] * r[list[l]], den += q[list[l]] * b->turned[list[l]] * own;
    if (!(den > 0)) continue;
    const float old = s[list[0]], best = mm_nearest_scale(&b->grid, b->unit, old + num / den, &bits), d = best - old;
    if (best == 0 || (best < 0) != (old < 0) || !(fabsf(best) >= 0x1p-60f && fabsf(best) <= 0x1p20f) || !(d * den * d < 2 * d * num))
      continue;
    changed = true;
    for (uint32_t l = 0; l < next - first; l++) s[list[l]] = best, e[list[l]] -= d * q[list[l]];
    add_times(b->change, b->turned, -d, b->wide);
    add_times(r, b->turned, -own * d, b->wide);
  }
  return changed;
}

/* Each code of row i becomes the best one under all others. r: G E H of the row, own: G's diagonal; b->change takes the change of the row's
 * E H. False if no code changes. */
MM_INLINE bool improve_row(const block *b, uint32_t i, float *r, float own) {
  const float *w = b->w + (size_t)i * b->wide, *s = b->s + (size_t)i * b->wide;
  float *q = b->q + (size_t)i * b->wide, *e = b->e + (size_t)i * b->wide;
  bool changed = false;
  for (uint32_t j = 0; j < b->m; j += LANES) {
    lanes h = {0}, best = *(const lanes *)(const void *)(q + j);
    for (uint32_t l = 0; l < LANES; l++) h[l] = j + l < b->m ? b->moment[(size_t)(j + l) * b->wide + j + l] : 1;
    best += *(const lanes *)(const void *)(r + j) / (own * h * *(const lanes *)(const void *)(s + j));
    mm_round_values(&b->to, &best);
    const mm_round_lanes_int differ = best != *(const lanes *)(const void *)(q + j);
    for (uint32_t l = 0, moved = 0; l < LANES && j + l < b->m; l++) {
      if (!moved && !differ[l]) continue; /* once one has changed, the others are not what they were */
      const uint32_t c = j + l;
      const float to = mm_round_value(&b->to, q[c] + r[c] / (own * h[l] * s[c])), d = w[c] - to * s[c] - e[c];
      if (to == q[c]) continue;
      changed = true, moved = 1;
      q[c] = to, e[c] += d;
      add_times(b->change, b->moment + (size_t)c * b->wide, d, b->wide);
      add_times(r, b->moment + (size_t)c * b->wide, own * d, b->wide);
    }
  }
  return changed;
}

/* True if a code changes. */
MM_INLINE void improve_all_body(const block *b, bool *changed) {
  *changed = false;
  for (uint32_t first = 0; first < b->n; first += PANEL) {
    const uint32_t rows = (uint32_t)mm_min(PANEL, b->n - first);
    memset(b->sum, 0, (size_t)rows * b->wide * sizeof(float));
    mm_product_add(b->sum, b->wide, factors_at(b, b->rows->moment, first), (mm_dense){b->eh, b->wide}, rows, b->n, b->wide);
    for (uint32_t i = 0; i < rows; i++) {
      const float *own = factor_row(b, b->rows->moment, first + i);
      float *r = b->sum + (size_t)i * b->wide;
      if (b->kept[first + i]) continue;
      memset(b->change, 0, b->wide * sizeof *b->change);
      const bool scales = b->refined && refine_row(b, first + i, r, own[first + i]);
      if (!improve_row(b, first + i, r, own[first + i]) && !scales) continue;
      *changed = true;
      add_times(b->eh + (size_t)(first + i) * b->wide, b->change, 1, b->wide);
      for (uint32_t l = i + 1; l < rows; l++) add_times(b->sum + (size_t)l * b->wide, b->change, own[first + l], b->wide);
    }
  }
}
MM_VERSIONS(improve_all, (const block *b, bool *changed), (b, changed))

/* ---- codes out ---- */

/* The codes of the columns at work, and what they add to each row's signal and noise. */
static void take_codes(const block *b, uint32_t k) {
  for (uint32_t i = 0; i < b->n; i++) {
    uint8_t *code = b->code + (size_t)i * k;
    for (uint32_t j = 0; j < b->m; j++) {
      const size_t at = (size_t)i * b->wide + j;
      if (b->refined) b->found[(size_t)i * k + column_of(b, j) / b->grid.group] = b->s[at];
      const double w = (double)b->w[at], e = w - (double)b->q[at] * (double)b->s[at];
      b->signal[i] += w * w, b->noise[i] += e * e;
      code[column_of(b, j)] =
          b->to.code == MM_CODE_E4M3 ? mm_finite_to_e4m3(b->q[at]) : (uint8_t)(int8_t)(b->q[at] * (b->to.code == MM_CODE_E2M1 ? 2 : 1));
    }
  }
}

/* The value of a code of take_codes. */
static float value_of(const block *b, uint8_t code) {
  if (b->to.code == MM_CODE_E4M3) return mm_e4m3_to_f32(code);
  return (float)(int8_t)code / (b->to.code == MM_CODE_E2M1 ? 2 : 1);
}

/* Rounds a block of rows, all columns. False if rows came out too far from their weights, which then keep their codes. */
static bool round_block(block *b, const mm_scheme *s, const mm_pack_args *a, uint32_t row) {
  const double share = pow(10, -(double)s->sqnr / 30);
  bool all = true, changed;
  for (uint32_t i = 0; i < b->n; i++) b->signal[i] = b->noise[i] = 0;
  for (b->at = 0; b->at < a->k; b->at += b->columns->block) {
    b->m = (uint32_t)mm_min(b->columns->block, a->k - b->at);
    b->wide = padded(b->m);
    load_columns(b, a, row);
    round_all(b);
    for (int turn = 0; turn < REPEATS; turn++) {
      improve_all(b, &changed);
      if (!changed) break;
    }
    take_codes(b, a->k);
  }
  for (uint32_t i = 0; i < b->n; i++) {
    if (b->kept[i] || !(b->noise[i] > b->signal[i] * share)) continue;
    b->kept[i] = true;
    all = false;
  }
  return all;
}

/* Codes and scales of row i of the block that begins with row `row` of the strip. */
static void store_row(const block *b, const mm_scheme *s, const mm_pack_args *a, uint32_t row, uint32_t i, void *codes) {
  const uint32_t own = row_of(b, i);
  for (uint32_t c = 0; c < a->k; c++) b->line[c] = value_of(b, b->code[(size_t)i * a->k + c]);
  mm_store_values(s->code, b->line, a->k, (uint8_t *)codes + (row + own) * (size_t)mm_cells(a->k, s->plane[0].cell.k));
  for (uint32_t x = 0; b->refined && x * b->grid.group < a->k; x++) {
    const float now = b->found[(size_t)i * a->k + x];
    uint32_t bits = 0;
    if (now != b->scales[(size_t)own * a->k + (size_t)x * b->grid.group] && mm_nearest_scale(&b->grid, b->unit, now, &bits) == now)
      mm_store_scale(&b->grid, row + own, x, bits);
  }
}

void mm_feedback_couple(const mm_feedback *columns, const mm_feedback *rows, uint32_t first, const mm_scheme *s, const mm_pack_args *a,
                        void *const plane[MM_MAX_PLANES], void *scratch) {
  block b = {.columns = columns, .rows = rows, .to = mm_rounding_of(s), .row_block = first, .grid = mm_refined_scales_of(s, plane, a->k)};
  b.refined = mm_scales_refined(s) && (columns->block >= a->k || columns->block % b.grid.group == 0);
  mm_packed m = {.scheme = s, .lead = 1, .n = a->n, .k = a->k};
  uint8_t *at = scratch;
  at += (0 - (uintptr_t)at) % sizeof(lanes);
  place_all(&b, at, a->k, columns->block, rows->block);
  for (unsigned i = 0; i < s->plane_count; i++) {
    m.plane[i] = plane[i];
    m.cell[i] = s->plane[i].cell;
  }
  for (uint32_t row = 0; row < a->n; row += rows->block, b.row_block++) {
    b.n = (uint32_t)mm_min(rows->block, a->n - row);
    if (!load_scales(&b, a, &m, row)) continue;
    bool done = false;
    for (int attempt = 0; !done && attempt < ATTEMPTS; attempt++) done = round_block(&b, s, a, row);
    for (uint32_t i = 0; done && i < b.n; i++)
      if (!b.kept[i]) store_row(&b, s, a, row, i, plane[0]);
  }
}
