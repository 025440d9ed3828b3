/* Reading second moments: shapes, types and every number, from hostile bytes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "convert/calibration/importance.h"
#include "quant/feedback.h"

#define SHAPE(t) mm_shape_text(&(t)->shape, (char[96]){0}, 96)

static uint64_t triangle(uint32_t block) { return (uint64_t)block * (block + 1) / 2; }

static bool bad(const mm_importance *m, const mm_importance_entry *e, uint64_t offset, mm_err *err, const char *what) {
  return mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(m->path, e->name, offset), "%s", what);
}

/* The block whose triangle has T numbers, or 0. */
static uint32_t block_of(uint64_t T) {
  for (uint32_t b = 1; b <= MM_FEEDBACK_BLOCK; b++)
    if (triangle(b) == T) return b;
  return 0;
}

static bool check_numbers(const mm_importance *m, const mm_importance_entry *e, const mm_moment_blocks *x, mm_err *err) {
  const uint64_t n = (uint64_t)x->matrices * x->blocks * triangle(x->block);
  for (uint64_t i = 0; i < n; i++) {
    float v;
    memcpy(&v, m->data + x->offset + i * sizeof v, sizeof v);
    if (!isfinite(v))
      return bad(m, e, x->offset + i * sizeof v, err, MM_FORMATTED(64, "found second moment %g, expected a finite one", (double)v));
  }
  for (uint32_t i = 0; i < x->matrices; i++) {
    int64_t rows;
    memcpy(&rows, m->data + x->rows + i * sizeof rows, sizeof rows);
    if (rows < 0)
      return bad(m, e, x->rows + i * sizeof rows, err, MM_FORMATTED(96, "found %lld tokens, expected 0 or more", (long long)rows));
  }
  return true;
}

/* A tensor of blocks; false where it has another shape or type. */
static bool read_blocks(mm_moment_blocks *x, const mm_st_tensor *t) {
  const bool stacked = t->shape.rank == 3;
  const uint64_t *dim = t->shape.dim + stacked, matrices = stacked ? t->shape.dim[0] : 1;
  x->block = t->shape.rank >= 2 && t->shape.rank <= 3 && t->dtype == MM_F32 ? block_of(dim[1]) : 0;
  if (!x->block || dim[0] > UINT32_MAX || matrices > UINT32_MAX) return false;
  x->offset = t->offset, x->matrices = (uint32_t)matrices, x->blocks = (uint32_t)dim[0];
  return true;
}

static bool read_inputs(const mm_importance *m, const mm_st *st, mm_importance_entry *e, mm_err *err) {
  const mm_st_tensor *t = mm_st_find(st, MM_FORMATTED(600, "%.512s.moments", e->name));
  mm_moment_blocks *x = &e->inputs;
  if (!t) return true;
  const bool is = read_blocks(x, t);
  const uint64_t k = is && x->matrices ? e->values / x->matrices : 0;
  if (!is || k * x->matrices != e->values || e->counts != x->matrices || k < x->block || x->blocks != (k + x->block - 1) / x->block ||
      (k > x->block && x->block % 128) || k > UINT32_MAX)
    return bad(m, e, t->offset, err,
               MM_FORMATTED(320,
                            "found %s %s, expected F32 [blocks, b (b + 1) / 2] or [experts, blocks, b (b + 1) / 2] with blocks of a "
                            "multiple of 128 columns, at most 1024, or of all columns",
                            mm_dtype_name(t->dtype), SHAPE(t)));
  x->rows = e->count;
  return check_numbers(m, e, x, err);
}

/* How many blocks there are follows from the model's rows, which mm_output_moments_find knows. */
static bool read_outputs(const mm_importance *m, const mm_st *st, mm_importance_entry *e, mm_err *err) {
  const mm_st_tensor *t = mm_st_find(st, MM_FORMATTED(600, "%.512s.fisher", e->name)),
                     *rows = mm_st_find(st, MM_FORMATTED(600, "%.512s.fisher_rows", e->name));
  mm_moment_blocks *x = &e->outputs;
  if (!t) return true;
  if (!read_blocks(x, t) || !rows || rows->dtype != MM_I64 || rows->bytes / sizeof(int64_t) != x->matrices)
    return bad(m, e, t->offset, err,
               MM_FORMATTED(320,
                            "found %s %s and %s .fisher_rows, expected F32 [blocks, r (r + 1) / 2] or [experts, blocks, r (r + 1) / 2] "
                            "with at most 1024 rows in a block, and one I64 .fisher_rows a matrix",
                            mm_dtype_name(t->dtype), SHAPE(t), rows ? mm_dtype_name(rows->dtype) : "no"));
  x->rows = rows->offset;
  return check_numbers(m, e, x, err);
}

bool mm_second_moments_read(const mm_importance *m, const mm_st *st, mm_importance_entry *e, mm_err *err) {
  return read_inputs(m, st, e, err) && read_outputs(m, st, e, err);
}
