/* Finding second moments, and factoring them for one matrix after another. */
#include "convert/calibration/second_moments.h"

#include <stdlib.h>
#include <string.h>

#define PRIOR 64.0 /* tokens */

static uint64_t triangle(uint32_t block) { return (uint64_t)block * (block + 1) / 2; }

/* The offset of row i of block b of a matrix. */
static uint64_t row_offset(const mm_importance_entry *e, uint32_t matrix, uint32_t b, uint32_t i) {
  return e->moment + (((uint64_t)matrix * e->blocks + b) * triangle(e->block) + (uint64_t)i * (i + 1) / 2) * sizeof(float);
}

/* ---- the matrices of a tensor ---- */

static double rows_of(const mm_importance *m, const mm_importance_entry *e, uint32_t matrix) {
  int64_t rows;
  memcpy(&rows, m->data + e->count + matrix * sizeof rows, sizeof rows);
  return (double)rows;
}

bool mm_second_moments_find(mm_second_moments *out, const mm_importance *m, const mm_rule *rule, uint32_t layer, uint32_t first,
                            uint32_t experts, uint32_t k, mm_err *err) {
  char name[256];
  const mm_importance_entry *e = mm_importance_entry_of(m, mm_rule_name(name, sizeof name, rule->ours, layer, 0));
  const bool stacks = mm_rule_stacks(rule);
  const uint32_t matrices = stacks ? experts : 1;
  *out = (mm_second_moments){.file = m, .shared = rule->divide != MM_INTER_COLS, .k = k, .first = stacks ? first : 0};
  if (!e || !e->moment) return true;
  if (e->matrices != matrices || e->values != (uint64_t)matrices * k)
    return mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(m->path, e->name, e->moment),
                   "found second moments of %u x %llu columns, expected %u x %u from the model", e->matrices,
                   (unsigned long long)(e->values / e->matrices), matrices, k);
  for (uint32_t i = 0; i < matrices; i++)
    if (rows_of(m, e, i) > 0) out->entry = e;
  return true;
}

/* ---- factors ---- */

/* Adds times the triangles of a matrix to to[]. */
static void add_matrix(double *to, const mm_importance *m, const mm_importance_entry *e, uint32_t matrix, double times) {
  const uint64_t n = e->blocks * triangle(e->block), at = row_offset(e, matrix, 0, 0);
  for (uint64_t i = 0; i < n; i++) {
    float v;
    memcpy(&v, m->data + at + i * sizeof v, sizeof v);
    to[i] += times * (double)v;
  }
}

/* The mean over all matrices of an entry, each as often as it saw tokens. */
static bool find_pool(mm_moment_factors *w, const mm_second_moments *of, mm_err *err) {
  const mm_importance_entry *e = of->entry;
  const uint64_t T = triangle(e->block), n = e->blocks * T;
  double all = 0;
  w->entry = NULL;
  if (!MM_GROW(w->pool, &w->pool_cap, n, err)) return false;
  memset(w->pool, 0, n * sizeof *w->pool);
  for (uint32_t i = 0; i < e->matrices; i++) all += rows_of(of->file, e, i);
  for (uint32_t i = 0; i < e->matrices; i++)
    if (rows_of(of->file, e, i) > 0) add_matrix(w->pool, of->file, e, i, rows_of(of->file, e, i) / all);
  w->mean = 0;
  for (uint32_t b = 0; b < e->blocks; b++)
    for (uint32_t i = 0; i < e->block; i++) w->mean += w->pool[b * T + (uint64_t)i * (i + 1) / 2 + i] / of->k;
  w->entry = e;
  w->matrix = UINT32_MAX;
  return true;
}

/* Room for the factors of one matrix. */
static bool grow_factors(mm_moment_factors *w, const mm_second_moments *of, mm_err *err) {
  const uint32_t block = of->entry->block;
  const uint64_t floats = mm_feedback_floats(of->entry->blocks, block);
  w->f.k = of->k;
  w->f.block = block;
  return MM_GROW(w->f.upper, &w->upper_cap, floats, err) && MM_GROW(w->f.moment, &w->moment_cap, floats, err) &&
         MM_GROW(w->f.order, &w->order_cap, of->k, err) && MM_GROW(w->h, &w->h_cap, (uint64_t)block * block, err) &&
         MM_GROW(w->work, &w->work_cap, (uint64_t)block * block, err) &&
         MM_GROW(w->scratch, &w->scratch_cap, mm_feedback_scratch(of->k), err);
}

/* Block b of a matrix, mixed with the layer's, into h[n, n]: the lower triangle. */
static void mix_block(mm_moment_factors *w, const mm_second_moments *of, uint32_t matrix, uint32_t b, uint32_t n) {
  const mm_importance_entry *e = of->entry;
  const double rows = rows_of(of->file, e, matrix), scale = w->mean > 0 ? 1 / w->mean : 1;
  const double own = rows / (rows + PRIOR), others = PRIOR / (rows + PRIOR);
  const double *pool = w->pool + b * triangle(e->block);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t j = 0; j <= i; j++) {
      float v;
      memcpy(&v, of->file->data + row_offset(e, matrix, b, i) + j * sizeof v, sizeof v);
      const double layer = of->shared ? pool[(uint64_t)i * (i + 1) / 2 + j] : i == j ? w->mean : 0;
      w->h[(size_t)i * n + j] = (own * (double)v + others * layer) * scale;
    }
}

bool mm_moment_factors_find(mm_moment_factors *w, const mm_second_moments *of, uint32_t lead, mm_err *err) {
  const mm_importance_entry *e = of->entry;
  const uint32_t matrix = of->first + lead;
  if (w->entry != e && !find_pool(w, of, err)) return false;
  if (w->matrix == matrix) return true;
  w->matrix = UINT32_MAX;
  if (!grow_factors(w, of, err)) return false;
  for (uint32_t b = 0; b < e->blocks; b++) {
    const uint32_t n = (uint32_t)mm_min(e->block, of->k - b * e->block);
    uint32_t column;
    mix_block(w, of, matrix, b, n);
    if (mm_feedback_factor(&w->f, b, w->h, w->work, &column)) continue;
    return mm_fail(
        err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(of->file->path, e->name, row_offset(e, matrix, b, column - b * e->block)),
        "found numbers that are no second moments at column %u of matrix %u: they give some direction a negative square", column, matrix);
  }
  w->matrix = matrix;
  return true;
}

uint64_t mm_moment_factors_bytes(const mm_second_moments *of) {
  const uint32_t k = of->k, blocks = of->entry->blocks, block = of->entry->block;
  const uint64_t squares = (uint64_t)block * block * sizeof(double);
  return mm_feedback_floats(blocks, block) * 2 * sizeof(float) + k * sizeof(uint32_t) + squares * 2 +
         blocks * triangle(block) * sizeof(double) + mm_feedback_scratch(k) * sizeof(float);
}

void mm_moment_factors_close(mm_moment_factors *w) {
  MM_FREE(w->f.upper, w->f.moment, w->f.order, w->pool, w->h, w->work, w->scratch);
  *w = (mm_moment_factors){0};
}
