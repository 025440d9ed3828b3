/* Finding second moments, and factoring them for one matrix after another. */
#include "convert/calibration/second_moments.h"

#include <stdlib.h>
#include <string.h>

#define PRIOR 64.0 /* tokens */
#define MEAN  0.4  /* of the gradients' moments */

static uint64_t triangle(uint32_t block) { return (uint64_t)block * (block + 1) / 2; }

/* The offset of row i of block b of a matrix. */
static uint64_t row_offset(const mm_moment_blocks *x, uint32_t matrix, uint32_t b, uint32_t i) {
  return x->offset + (((uint64_t)matrix * x->blocks + b) * triangle(x->block) + (uint64_t)i * (i + 1) / 2) * sizeof(float);
}

/* ---- the matrices of a tensor ---- */

static double rows_of(const mm_importance *m, const mm_moment_blocks *x, uint32_t matrix) {
  int64_t rows;
  memcpy(&rows, m->data + x->rows + matrix * sizeof rows, sizeof rows);
  return (double)rows;
}

static bool any_rows(const mm_importance *m, const mm_moment_blocks *x) {
  for (uint32_t i = 0; i < x->matrices; i++)
    if (rows_of(m, x, i) > 0) return true;
  return false;
}

bool mm_second_moments_find(mm_second_moments *out, const mm_importance *m, const mm_rule *rule, uint32_t layer, uint32_t first,
                            uint32_t experts, uint32_t k, mm_err *err) {
  char name[256];
  const mm_importance_entry *e = mm_importance_entry_of(m, mm_rule_name(name, sizeof name, rule->ours, layer, 0));
  const bool stacks = mm_rule_stacks(rule);
  const uint32_t matrices = stacks ? experts : 1;
  *out = (mm_second_moments){.file = m, .shared = rule->divide != MM_INTER_COLS, .k = k, .first = stacks ? first : 0};
  if (!e || !e->inputs.offset) return true;
  if (e->inputs.matrices != matrices || e->values != (uint64_t)matrices * k)
    return mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(m->path, e->name, e->inputs.offset),
                   "found second moments of %u x %llu columns, expected %u x %u from the model", e->inputs.matrices,
                   (unsigned long long)(e->values / e->inputs.matrices), matrices, k);
  out->set = &e->inputs, out->blocks = e->inputs.blocks;
  if (any_rows(m, out->set)) out->entry = e;
  return true;
}

bool mm_output_moments_find(mm_second_moments *out, const mm_second_moments *inputs, const mm_rule *rule, const uint32_t *rows,
                            uint32_t pieces, uint32_t piece, mm_err *err) {
  const mm_importance_entry *e = inputs->entry;
  const mm_moment_blocks *x = e ? &e->outputs : NULL;
  *out = (mm_second_moments){.file = inputs->file,
                             .shared = rule->divide == MM_INTER_COLS,
                             .spread = MEAN / (1 - MEAN),
                             .k = rows[piece],
                             .first = inputs->first,
                             .set = x};
  if (!e || !x->offset) return true;
  uint64_t blocks = 0, most = 0;
  for (uint32_t i = 0; i < pieces; i++) {
    if (i == piece) out->block = (uint32_t)blocks, out->blocks = (uint32_t)mm_ceil_div(rows[i], x->block);
    blocks += mm_ceil_div(rows[i], x->block);
    most = mm_max(most, rows[i]);
  }
  if (x->matrices != e->inputs.matrices || x->blocks != blocks || x->block > most || (x->block < most && x->block % 128))
    return mm_fail(
        err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(inputs->file->path, e->name, x->offset),
        "found moments of gradients of %u x %u blocks of %u rows, expected %u matrices with blocks of a multiple of 128 rows or of "
        "all %llu",
        x->matrices, x->blocks, x->block, e->inputs.matrices, (unsigned long long)most);
  if (any_rows(inputs->file, x)) out->entry = e;
  return true;
}

bool mm_tensor_moments_find(mm_tensor_moments *out, const mm_importance *m, const mm_rule *const *rule, const mm_pack_tensor *t,
                            uint32_t layer, uint32_t first, uint32_t experts, mm_err *err) {
  uint32_t rows[MM_PACK_PIECES];
  if (!mm_second_moments_find(&out->inputs, m, rule[0], layer, first, experts, t->whole_cols, err)) return false;
  for (unsigned i = 0; i < t->piece_count; i++) rows[i] = t->piece[i].rows;
  for (unsigned i = 0; i < t->piece_count; i++)
    if (!mm_output_moments_find(&out->outputs[i], &out->inputs, rule[i], rows, t->piece_count, i, err)) return false;
  return true;
}

uint32_t mm_tensor_moments_rows(const mm_tensor_moments *of, uint32_t rows) {
  const mm_second_moments *x = &of->outputs[0];
  return x->entry ? rows / (uint32_t)mm_gcd(rows, x->set->block) * x->set->block : rows;
}

/* ---- factors ---- */

/* Adds times the triangles of a matrix to to[]. */
static void add_matrix(double *to, const mm_importance *m, const mm_moment_blocks *x, uint32_t matrix, double times) {
  const uint64_t n = x->blocks * triangle(x->block), at = row_offset(x, matrix, 0, 0);
  for (uint64_t i = 0; i < n; i++) {
    float v;
    memcpy(&v, m->data + at + i * sizeof v, sizeof v);
    to[i] += times * (double)v;
  }
}

/* The mean over all matrices of a set, each as often as it saw tokens. */
static bool find_pool(mm_moment_factors *w, const mm_second_moments *of, mm_err *err) {
  const mm_moment_blocks *x = of->set;
  const uint64_t n = x->blocks * triangle(x->block);
  double all = 0;
  w->set = NULL;
  if (!MM_GROW(w->pool, &w->pool_cap, n, err)) return false;
  memset(w->pool, 0, n * sizeof *w->pool);
  for (uint32_t i = 0; i < x->matrices; i++) all += rows_of(of->file, x, i);
  for (uint32_t i = 0; i < x->matrices; i++)
    if (rows_of(of->file, x, i) > 0) add_matrix(w->pool, of->file, x, i, rows_of(of->file, x, i) / all);
  w->set = x;
  w->matrix = UINT32_MAX;
  return true;
}

/* Room for the factors of one matrix. */
static bool grow_factors(mm_moment_factors *w, const mm_second_moments *of, mm_err *err) {
  const uint32_t block = of->set->block;
  const uint64_t floats = mm_feedback_floats(of->blocks, block);
  w->f.k = of->k;
  w->f.block = block;
  return MM_GROW(w->f.upper, &w->upper_cap, floats, err) && MM_GROW(w->f.moment, &w->moment_cap, floats, err) &&
         MM_GROW(w->f.order, &w->order_cap, of->k, err) && MM_GROW(w->h, &w->h_cap, (uint64_t)block * block, err) &&
         MM_GROW(w->work, &w->work_cap, (uint64_t)block * block, err) &&
         MM_GROW(w->scratch, &w->scratch_cap, mm_feedback_scratch(of->k), err);
}

/* The mean of the diagonal of all blocks that `of` has, of the pool. */
static double pool_mean(const mm_moment_factors *w, const mm_second_moments *of) {
  double mean = 0;
  for (uint32_t b = of->block; b < of->block + of->blocks; b++)
    for (uint32_t i = 0; i < of->set->block; i++) mean += w->pool[b * triangle(of->set->block) + (uint64_t)i * (i + 1) / 2 + i] / of->k;
  return mean;
}

/* The same of a matrix of the file. */
static double own_mean(const mm_second_moments *of, uint32_t matrix) {
  double mean = 0;
  for (uint32_t b = of->block; b < of->block + of->blocks; b++)
    for (uint32_t i = 0; i < of->set->block; i++) {
      float v;
      memcpy(&v, of->file->data + row_offset(of->set, matrix, b, i) + i * sizeof v, sizeof v);
      mean += (double)v / of->k;
    }
  return mean;
}

/* How a matrix's moments are mixed: own · its + others · the pool's, all times `scale`, and `diagonal` where the pool's are of other
 * inputs or outputs; then `spread`. */
typedef struct mixture {
  double own, others, scale, diagonal, spread;
} mixture;

static mixture mixture_of(const mm_moment_factors *w, const mm_second_moments *of, uint32_t matrix) {
  const double rows = rows_of(of->file, of->set, matrix), mean = pool_mean(w, of);
  mixture x = {.own = rows / (rows + PRIOR), .others = PRIOR / (rows + PRIOR), .diagonal = mean, .spread = of->spread};
  const double all = of->spread > 0 ? x.own * own_mean(of, matrix) + x.others * mean : mean;
  x.scale = all > 0 ? 1 / all : 1;
  return x;
}

/* Block b of a matrix, mixed with the layer's, into h[n, n]: the lower triangle. */
static void mix_block(mm_moment_factors *w, const mm_second_moments *of, const mixture *x, uint32_t b, uint32_t n) {
  const double *pool = w->pool + (of->block + b) * triangle(of->set->block);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t j = 0; j <= i; j++) {
      float v;
      memcpy(&v, of->file->data + row_offset(of->set, w->matrix, of->block + b, i) + j * sizeof v, sizeof v);
      const double layer = of->shared ? pool[(uint64_t)i * (i + 1) / 2 + j] : i == j ? x->diagonal : 0;
      w->h[(size_t)i * n + j] = (x->own * (double)v + x->others * layer) * x->scale + (i == j ? x->spread : 0);
    }
}

bool mm_moment_factors_find(mm_moment_factors *w, const mm_second_moments *of, uint32_t lead, mm_err *err) {
  const mm_moment_blocks *x = of->set;
  const uint32_t matrix = of->first + lead;
  if (w->set != x && !find_pool(w, of, err)) return false;
  if (w->matrix == matrix && w->block == of->block) return true;
  w->matrix = UINT32_MAX;
  if (!grow_factors(w, of, err)) return false;
  w->matrix = matrix, w->block = of->block;
  const mixture mix = mixture_of(w, of, matrix);
  for (uint32_t b = 0; b < of->blocks; b++) {
    uint32_t column;
    mix_block(w, of, &mix, b, (uint32_t)mm_min(x->block, of->k - b * x->block));
    if (mm_feedback_factor(&w->f, b, w->h, w->work, &column)) continue;
    w->matrix = UINT32_MAX;
    return mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE",
                   mm_at_offset(of->file->path, of->entry->name, row_offset(x, matrix, of->block + b, column - b * x->block)),
                   "found numbers that are no second moments at %s %u of matrix %u: they give some direction a negative square",
                   of->spread > 0 ? "row" : "column", column, matrix);
  }
  return true;
}

static uint64_t factors_bytes(const mm_second_moments *of) {
  const uint32_t k = of->k, block = of->set->block;
  const uint64_t squares = (uint64_t)block * block * sizeof(double);
  return mm_feedback_floats(of->blocks, block) * 2 * sizeof(float) + k * sizeof(uint32_t) + squares * 2 +
         of->set->blocks * triangle(block) * sizeof(double) + mm_feedback_scratch(k) * sizeof(float);
}

void mm_moment_factors_close(mm_moment_factors *w) {
  MM_FREE(w->f.upper, w->f.moment, w->f.order, w->pool, w->h, w->work, w->scratch);
  *w = (mm_moment_factors){0};
}

/* ---- strips ---- */

bool mm_moments_round(mm_moment_rounding *w, const mm_tensor_moments *of, const mm_moment_strip *s, const mm_pack_args *args,
                      void *const plane[MM_MAX_PLANES], mm_err *err) {
  const mm_second_moments *inputs = &of->inputs, *outputs = &of->outputs[s->piece];
  if (!inputs->entry) return true;
  if (!mm_moment_factors_find(&w->inputs, inputs, s->lead, err)) return false;
  mm_feedback_round(&w->inputs.f, s->scheme, args, plane, w->inputs.scratch);
  if (!outputs->entry) return true;
  const uint64_t bytes = mm_feedback_couple_bytes(inputs->k, inputs->set->block, outputs->set->block);
  if (!mm_moment_factors_find(&w->outputs, outputs, s->lead, err) || !MM_GROW(w->coupling, &w->coupling_cap, bytes, err)) return false;
  mm_feedback_couple(&w->inputs.f, &w->outputs.f, s->row / outputs->set->block, s->scheme, args, plane, w->coupling);
  return true;
}

uint64_t mm_moments_bytes(const mm_tensor_moments *of, uint32_t pieces, uint32_t rows) {
  const mm_second_moments *x = &of->inputs, *y = of->outputs;
  const uint64_t own = x->entry ? factors_bytes(x) : 0;
  uint64_t most = own;
  for (uint32_t i = 0; i < pieces && y[i].entry; i++)
    most = mm_max(most, own + factors_bytes(&y[i]) + mm_feedback_couple_bytes(x->k, x->set->block, y[i].set->block) +
                            mm_min(rows, y[i].k) * (uint64_t)x->k * 2 * sizeof(float));
  return most;
}

void mm_moment_rounding_close(mm_moment_rounding *w) {
  mm_moment_factors_close(&w->inputs);
  mm_moment_factors_close(&w->outputs);
  free(w->coupling);
  *w = (mm_moment_rounding){0};
}
