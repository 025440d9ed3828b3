/* Running one step: decode or copy a strip, pack it, give every rank its rows and columns. */
#include "convert/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void mm_worker_open(mm_worker *w, const mm_hf *hf) {
  *w = (mm_worker){0};
  mm_decoder_open(&w->source, hf);
}

void mm_worker_close(mm_worker *w) {
  mm_decoder_close(&w->source);
  free(w->slice);
  free(w->log.put);
  free(w->dead);
  for (int i = 0; i < MM_MAX_PLANES; i++) free(w->plane[i]);
}

/* A strip on its way: rows [row, row + rows) of one piece. */
typedef struct mm_strip {
  const mm_plan *plan;
  const mm_pack_tensor *t;
  const mm_plan_tensor *pt;
  const mm_matrix *x;
  uint32_t tensor, lead, piece, row, rows;
} mm_strip;

/* The planes of the strip on the scheme's own cells, in w's buffers: copied from the source or packed. */
static bool pack_strip(mm_worker *w, const mm_strip *s, float amax, const void *plane[MM_MAX_PLANES], mm_err *err) {
  const mm_scheme *sc = s->pt->scheme;
  if (mm_plan_copies(sc, s->x, s->plan->hf)) {
    if (!mm_decode_codes(&w->source, s->x, s->row, s->rows, err)) return false;
    if (s->x->scale && !mm_decode_scales(&w->source, s->x, s->row, s->rows, err)) return false;
    plane[0] = w->source.raw;
    plane[1] = w->source.scale;
    return true;
  }
  bool bf16 = !s->x->scale && s->x->weight->dtype == MM_BF16; /* packed as it is: the same bytes as through f32, sooner */
  if (!(bf16 ? mm_decode_codes(&w->source, s->x, s->row, s->rows, err) : mm_decode_f32(&w->source, s->x, s->row, s->rows, err)))
    return false;
  for (unsigned i = 0; i < sc->plane_count; i++) {
    uint64_t bytes = mm_plane_elements(s->rows, s->x->cols, sc->plane[i].cell) * mm_dtype_size(sc->plane[i].dtype);
    if (!mm_grow(&w->plane[i], &w->plane_cap[i], bytes, 1, err)) return false;
    plane[i] = w->plane[i];
  }
  mm_pack_args args = {.w = bf16 ? NULL : w->source.wide,
                       .bf16 = bf16 ? w->source.raw : NULL,
                       .n = s->rows,
                       .k = s->x->cols,
                       .amax = amax,
                       .search = s->pt->search};
  sc->pack(&args, w->plane);
  return true;
}

/* Stored cells along one axis that a rank takes from a strip. Stored cell `to + i` is the scheme's cell `from(i)` of the strip. */
typedef struct mm_run {
  uint32_t to, count;   /* local stored cells */
  uint32_t first, step; /* element of the strip under the first one, elements per stored cell */
  uint32_t cell;        /* elements per cell of the strip's plane; 0 = one for all */
} mm_run;

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

static uint32_t strip_cell(const mm_run *r, uint32_t i) { return r->cell == 0 ? 0 : (r->first + i * r->step) / r->cell; }

/* One rank's share of a plane into slice[rows.count][stored_cols]: whole stored rows, padding columns zero. Consecutive equal cells go as
 * one memcpy. */
static void gather(const mm_run *rows, const mm_run *cols, const uint8_t *plane, uint32_t plane_cols, uint32_t stored_cols, size_t size,
                   uint8_t *slice) {
  bool dense = cols->step == cols->cell;
  if (cols->count < stored_cols) memset(slice, 0, (size_t)rows->count * stored_cols * size);
  for (uint32_t i = 0; i < rows->count; i++) {
    const uint8_t *from = plane + (size_t)strip_cell(rows, i) * plane_cols * size;
    uint8_t *to = slice + ((size_t)i * stored_cols + cols->to) * size;
    if (dense) {
      memcpy(to, from + (size_t)strip_cell(cols, 0) * size, cols->count * size);
      continue;
    }
    for (uint32_t j = 0; j < cols->count; j++) memcpy(to + j * size, from + (size_t)strip_cell(cols, j) * size, size);
  }
}

/* Gives every rank its share of every plane of the packed strip. */
static bool scatter(mm_worker *w, const mm_strip *s, const void *const plane[MM_MAX_PLANES], mm_blocks *out, mm_err *err) {
  const mm_piece *x = &s->t->piece[s->piece];
  const mm_cut *cut = &s->plan->pack.cut[x->cut];
  const mm_scheme *sc = s->pt->scheme;
  for (unsigned i = 0; i < sc->plane_count; i++) {
    const mm_pack_plane *stored = &s->t->plane[i];
    size_t size = mm_dtype_size(stored->dtype);
    uint32_t stored_cols = mm_cells(s->t->cols, stored->cell_k);
    for (uint32_t r = 0; r < s->plan->pack.tp; r++) {
      if (!mm_plan_wants(s->plan, s->pt->part, r)) continue;
      uint32_t first = mm_pack_first_lead(&s->plan->pack, s->t, r);
      if (s->t->lead && (s->lead < first || s->lead >= first + s->t->lead)) continue; /* another rank's expert */
      uint64_t at = s->pt->offset[i] + (s->lead - first) * s->pt->lead_bytes[i];
      mm_range all_rows = {0, 0, x->rows}, all_cols = {0, 0, s->x->cols};
      if (cut->axis == MM_AXIS_ROWS) all_rows = cut->rank[r];
      if (cut->axis == MM_AXIS_COLS) all_cols = cut->rank[r];
      mm_run rows = run_of(all_rows, s->row, s->row + s->rows, x->local_at, stored->cell_n, sc->plane[i].cell.n);
      mm_run cols = run_of(all_cols, 0, s->x->cols, 0, stored->cell_k, sc->plane[i].cell.k);
      if (rows.count == 0 || cols.count == 0) continue;
      uint64_t row_bytes = (uint64_t)stored_cols * size;
      if (!mm_grow(&w->slice, &w->slice_cap, rows.count * row_bytes, 1, err)) return false;
      gather(&rows, &cols, plane[i], mm_cells(s->x->cols, sc->plane[i].cell.k), stored_cols, size, w->slice);
      if (!mm_blocks_put(out, &w->log, r, at + rows.to * row_bytes, w->slice, rows.count * row_bytes, err)) return false;
    }
  }
  return true;
}

/* A head row of zeros gives logit 0 for an id that was never trained. */
static bool note_dead_rows(mm_worker *w, const mm_strip *s, mm_err *err) {
  size_t row_bytes = s->x->cols * mm_dtype_size(s->x->weight->dtype);
  for (uint32_t i = 0; i < s->rows; i++) {
    const uint8_t *row = (const uint8_t *)w->source.raw + i * row_bytes;
    if (row[0] != 0 || memcmp(row, row + 1, row_bytes - 1) != 0) continue;
    if (!mm_grow((void **)&w->dead, &w->dead_cap, w->dead_count + 1, sizeof *w->dead, err)) return false;
    w->dead[w->dead_count++] = s->row + i;
  }
  return true;
}

static bool run_strip(mm_worker *w, mm_strip *s, float amax, mm_blocks *out, mm_err *err) {
  const void *plane[MM_MAX_PLANES] = {0};
  if (!pack_strip(w, s, amax, plane, err)) return false;
  if (strcmp(s->t->name, "lm_head.weight") == 0 && !note_dead_rows(w, s, err)) return false;
  return scatter(w, s, plane, out, err);
}

static bool strip_amax(mm_worker *w, const mm_strip *s, float *amax, mm_err *err) {
  if (!mm_decode_f32(&w->source, s->x, s->row, s->rows, err)) return false;
  float m = *amax;
  for (size_t i = 0, n = (size_t)s->rows * s->x->cols; i < n; i++) m = fmaxf(m, fabsf(w->source.wide[i]));
  *amax = m;
  return true;
}

/* All pieces of one stack entry: first the group's amax where the scheme wants it, then the packing. */
static bool run_entry(mm_worker *w, mm_strip *s, mm_blocks *out, mm_err *err) {
  float amax = 0;
  for (int pass = s->pt->scheme->needs_amax ? 0 : 1; pass < 2; pass++)
    for (s->piece = 0; s->piece < s->t->piece_count; s->piece++) {
      s->x = &s->pt->matrix[s->lead * s->t->piece_count + s->piece];
      uint32_t unit = s->pt->scheme->strip ? mm_strip_rows(s->plan->hf, s->pt->scheme, s->x->cols) : s->x->rows;
      for (s->row = 0; s->row < s->x->rows; s->row += unit) {
        s->rows = (uint32_t)mm_min(unit, s->x->rows - s->row);
        if (!(pass == 0 ? strip_amax(w, s, &amax, err) : run_strip(w, s, amax, out, err))) return false;
      }
    }
  return true;
}

bool mm_step_run(mm_worker *w, const mm_plan *p, const mm_step *step, mm_blocks *out, mm_err *err) {
  mm_strip s = {.plan = p, .t = &p->pack.tensor[step->tensor], .pt = &p->tensor[step->tensor], .tensor = step->tensor, .lead = step->lead};
  w->log.count = w->dead_count = 0;
  if (step->piece == MM_ALL_PIECES) return run_entry(w, &s, out, err);
  s.piece = step->piece;
  s.row = step->row;
  s.rows = step->rows;
  s.x = &s.pt->matrix[s.lead * s.t->piece_count + s.piece];
  return run_strip(w, &s, 0, out, err);
}
