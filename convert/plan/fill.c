/* From a step to byte ranges of output files. */
#include "convert/plan/fill.h"

#include <string.h>

#include "convert/plan/target_format.h"

static void set_piece(mm_strip *s, uint32_t piece) {
  s->piece = piece;
  s->x = &s->pt->matrix[s->lead * s->t->piece_count + piece];
}

/* Rows [row, …) as many as one strip has. */
static void set_rows(mm_strip *s, uint32_t row) {
  uint32_t unit = mm_plan_strip_rows(s->plan, s->tensor);
  s->row = row;
  s->rows = (uint32_t)mm_min(unit, s->x->rows - row);
}

mm_strip mm_strip_first(const mm_plan *p, const mm_step *step) {
  mm_strip s = {.plan = p, .t = &p->pack.tensor[step->tensor], .pt = &p->tensor[step->tensor], .tensor = step->tensor, .lead = step->lead};
  set_piece(&s, step->piece == MM_ALL_PIECES ? 0 : step->piece);
  set_rows(&s, step->row);
  if (step->piece != MM_ALL_PIECES) s.rows = step->rows;
  return s;
}

bool mm_strip_next(mm_strip *s) {
  if (s->row + s->rows < s->x->rows) {
    set_rows(s, s->row + s->rows);
    return true;
  }
  if (s->piece + 1 == s->t->piece_count) return false;
  set_piece(s, s->piece + 1);
  set_rows(s, 0);
  return true;
}

/* Elements [begin, end) of the whole axis ∩ the range, in stored cells. `begin` is where the strip starts, `base` the local start of the
 * piece. */
static mm_run run_of(mm_range g, uint32_t begin, uint32_t end, uint32_t base, uint32_t stored, uint32_t cell) {
  uint32_t lo = g.from > begin ? g.from : begin, hi = g.from + g.count < end ? g.from + g.count : end;
  mm_run r = {.step = stored, .cell = cell};
  if (lo >= hi) return r;
  r.first = lo - begin;
  if (stored == 0) {
    r.count = 1;
    return r;
  }
  uint32_t local = base + g.at + (lo - g.from);
  r.to = local / stored;
  r.count = (local + (hi - lo) - 1) / stored - r.to + 1;
  return r;
}

bool mm_share_of(const mm_strip *s, unsigned plane, uint32_t rank, mm_share *out) {
  const mm_piece *x = &s->t->piece[s->piece];
  const mm_cut *cut = &s->plan->pack.cut[x->cut];
  const mm_pack_plane *stored = &s->t->plane[plane];
  const mm_place *place = mm_plan_place(s->plan, s->pt, s->piece, plane);
  mm_cell cell = mm_plan_cell(s->pt, plane);
  if (!mm_plan_wants(s->plan, s->pt->part, rank)) return false;
  const uint32_t first = mm_pack_first_lead(&s->plan->pack, s->t, rank), index = mm_pack_index(s->t, s->lead);
  if (s->t->lead && (index < first || index >= first + s->t->lead)) return false; /* another rank's expert */
  mm_range all_rows = {0, 0, x->rows}, all_cols = {0, 0, s->x->cols};
  if (cut->axis == MM_AXIS_ROWS) all_rows = cut->rank[rank];
  if (cut->axis == MM_AXIS_COLS) all_cols = cut->rank[rank];
  *out = (mm_share){.rows = run_of(all_rows, s->row, s->row + s->rows, x->local_at, stored->cell_n, cell.n),
                    .cols = run_of(all_cols, 0, s->x->cols, 0, stored->cell_k, cell.k),
                    .stored_cols = mm_cells(s->t->cols, stored->cell_k)};
  if (out->rows.count == 0 || out->cols.count == 0) return false;
  out->row_bytes = (uint64_t)out->stored_cols * mm_dtype_size(s->pt->scheme->plane[plane].dtype);
  out->at = place->offset + (index - first) * (place->bytes / (s->t->lead ? s->t->lead : 1)) + out->rows.to * out->row_bytes;
  out->bytes = out->rows.count * out->row_bytes;
  return true;
}

uint32_t mm_run_cell(const mm_run *r, uint32_t i) { return r->cell == 0 ? 0 : (r->first + i * r->step) / r->cell; }

/* Consecutive equal cells go as one memcpy. */
void mm_share_gather(const mm_share *x, const uint8_t *plane, uint32_t plane_cols, size_t size, uint8_t *slice) {
  const mm_run *rows = &x->rows, *cols = &x->cols;
  bool dense = cols->step == cols->cell;
  if (cols->count < x->stored_cols) memset(slice, 0, (size_t)rows->count * x->stored_cols * size);
  for (uint32_t i = 0; i < rows->count; i++) {
    const uint8_t *from = plane + (size_t)mm_run_cell(rows, i) * plane_cols * size;
    uint8_t *to = slice + ((size_t)i * x->stored_cols + cols->to) * size;
    if (dense) {
      memcpy(to, from + (size_t)mm_run_cell(cols, 0) * size, cols->count * size);
      continue;
    }
    for (uint32_t j = 0; j < cols->count; j++) memcpy(to + j * size, from + (size_t)mm_run_cell(cols, j) * size, size);
  }
}

bool mm_share_companions(const mm_strip *s, mm_share *out) {
  const mm_target_naming *spelt = s->pt->naming;
  if (!spelt || s->row > 0 || !(spelt->shape || spelt->input)) return false;
  *out = (mm_share){.at = s->pt->place[s->piece][s->pt->scheme->plane_count].offset, .bytes = spelt->shape ? 16 : sizeof(float)};
  return true;
}

bool mm_share_words(const mm_strip *s, unsigned plane, mm_share *out) {
  if (plane >= s->t->plane_count) return false;
  const mm_place *at = &s->pt->place[s->piece][plane];
  *out = (mm_share){.at = at->offset, .bytes = at->bytes};
  return true;
}

static bool strip_fills(const mm_strip *s, mm_fill_fn *fn, void *ctx) {
  mm_share x;
  const bool words = s->pt->naming && s->pt->naming->form;
  for (unsigned i = 0; words && mm_share_words(s, i, &x); i++)
    if (!fn(ctx, 0, x.at, x.bytes)) return false;
  if (words) return true;
  for (unsigned i = 0; i < s->pt->scheme->plane_count; i++)
    for (uint32_t r = 0; r < s->plan->pack.tp; r++)
      if (mm_share_of(s, i, r, &x) && !fn(ctx, r, x.at, x.bytes)) return false;
  return !mm_share_companions(s, &x) || fn(ctx, 0, x.at, x.bytes);
}

static bool fills_any(void *ctx, uint32_t rank, uint64_t offset, uint64_t bytes) {
  (void)ctx, (void)rank, (void)offset, (void)bytes;
  return false;
}

bool mm_step_idle(const mm_plan *p, const mm_step *step) { return mm_step_fills(p, step, fills_any, NULL); }

bool mm_step_fills(const mm_plan *p, const mm_step *step, mm_fill_fn *fn, void *ctx) {
  mm_strip s = mm_strip_first(p, step);
  do
    if (!strip_fills(&s, fn, ctx)) return false;
  while (step->piece == MM_ALL_PIECES && mm_strip_next(&s));
  return true;
}
