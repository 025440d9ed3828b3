/* Reading second moments: shapes, types and every number, from hostile bytes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "convert/calibration/importance.h"
#include "quant/feedback.h"

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

static bool check_numbers(const mm_importance *m, const mm_importance_entry *e, mm_err *err) {
  const uint64_t n = (uint64_t)e->matrices * e->blocks * triangle(e->block);
  for (uint64_t i = 0; i < n; i++) {
    float v;
    memcpy(&v, m->data + e->moment + i * sizeof v, sizeof v);
    if (!isfinite(v)) return bad(m, e, e->moment + i * sizeof v, err, "found a second moment that is not finite");
  }
  for (uint32_t i = 0; i < e->matrices; i++) {
    int64_t rows;
    memcpy(&rows, m->data + e->count + i * sizeof rows, sizeof rows);
    if (rows < 0) return bad(m, e, e->count + i * sizeof rows, err, "found a negative number of tokens");
  }
  return true;
}

bool mm_second_moments_read(const mm_importance *m, const mm_st *st, mm_importance_entry *e, mm_err *err) {
  const mm_st_tensor *t = mm_st_find(st, MM_FORMATTED(600, "%.512s.moments", e->name));
  if (!t) return true;
  const bool stacked = t->shape.rank == 3;
  const uint64_t *dim = t->shape.dim + stacked, matrices = stacked ? t->shape.dim[0] : 1;
  e->block = t->shape.rank >= 2 && t->shape.rank <= 3 && t->dtype == MM_F32 ? block_of(dim[1]) : 0;
  const uint64_t k = matrices ? e->values / matrices : 0;
  if (!e->block || k * matrices != e->values || e->counts != matrices || k < e->block || dim[0] != (k + e->block - 1) / e->block ||
      (k > e->block && e->block % 128) || k > UINT32_MAX || matrices > UINT32_MAX)
    return bad(m, e, t->offset, err,
               "found another shape or type than F32 [blocks, b (b + 1) / 2] or [experts, blocks, b (b + 1) / 2] with blocks of a multiple "
               "of 128 columns, at most 1024, or of all columns");
  e->moment = t->offset;
  e->matrices = (uint32_t)matrices;
  e->blocks = (uint32_t)dim[0];
  return check_numbers(m, e, err);
}
