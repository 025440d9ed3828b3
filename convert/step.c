/* Running one step: decode or copy a strip, pack it, give every rank its rows and columns. */
#include "convert/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/dialect.h"

void mm_worker_open(mm_worker *w, const mm_hf *hf) {
  *w = (mm_worker){0};
  mm_decoder_open(&w->source, hf);
}

void mm_worker_close(mm_worker *w) {
  mm_decoder_close(&w->source);
  free(w->slice);
  free(w->importance);
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
  bool keep;   /* the source's codes are stored */
  float group; /* what the entry's pieces share: amax, or the global scale of codes that are kept */
} mm_strip;

/* The planes of the strip on the plan's cells, in w's buffers: kept from the source or packed. */
static bool pack_strip(mm_worker *w, const mm_strip *s, const void *plane[MM_MAX_PLANES], mm_err *err) {
  const mm_scheme *sc = s->pt->scheme;
  if (s->keep) return mm_decode_planes(&w->source, s->x, sc, s->pt->grid, s->row, s->rows, s->group, plane, err);
  bool bf16 = mm_is_plain(s->x) && s->x->weight->dtype == MM_BF16; /* packed as it is: the same bytes as through f32, sooner */
  if (!(bf16 ? mm_decode_codes(&w->source, s->x, s->row, s->rows, err) : mm_decode_f32(&w->source, s->x, s->row, s->rows, err)))
    return false;
  for (unsigned i = 0; i < sc->plane_count; i++) {
    uint64_t bytes = mm_plane_elements(s->rows, s->x->cols, sc->plane[i].cell) * mm_dtype_size(sc->plane[i].dtype);
    if (!mm_grow(&w->plane[i], &w->plane_cap[i], bytes, 1, err)) return false;
    plane[i] = w->plane[i];
  }
  const uint8_t *weights = s->pt->weights ? s->pt->weights[s->lead * s->t->piece_count + s->piece] : NULL;
  if (weights) {
    if (!mm_grow((void **)&w->importance, &w->importance_cap, s->x->cols, sizeof *w->importance, err)) return false;
    mm_importance_weights(weights, s->x->cols, w->importance);
  }
  mm_pack_args args = {.w = bf16 ? NULL : w->source.wide,
                       .bf16 = bf16 ? w->source.raw : NULL,
                       .n = s->rows,
                       .k = s->x->cols,
                       .amax = s->group,
                       .search = s->pt->search,
                       .importance = weights ? w->importance : NULL};
  sc->pack(&args, w->plane);
  size_t n = (size_t)s->rows * s->x->cols;
  return sc->code != MM_CODE_PLAIN || mm_decode_finite(&w->source, s->x, s->row, w->plane[0], sc->plane[0].dtype, n, err);
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

/* Whether a rank's share lies in the plane as it will lie in the file: whole rows that follow each other. */
static bool is_stretch(const mm_run *rows, const mm_run *cols, uint32_t plane_cols, uint32_t stored_cols) {
  return cols->step == cols->cell && cols->count == stored_cols && plane_cols == stored_cols &&
         (rows->count == 1 || rows->step == rows->cell);
}

/* Gives every rank its share of every plane of the packed strip. */
static bool scatter(mm_worker *w, const mm_strip *s, const void *const plane[MM_MAX_PLANES], mm_blocks *out, mm_err *err) {
  const mm_piece *x = &s->t->piece[s->piece];
  const mm_cut *cut = &s->plan->pack.cut[x->cut];
  const mm_scheme *sc = s->pt->scheme;
  for (unsigned i = 0; i < sc->plane_count; i++) {
    const mm_pack_plane *stored = &s->t->plane[i];
    const mm_place *place = &s->pt->place[s->plan->unsharded ? s->piece : 0][i];
    size_t size = mm_dtype_size(sc->plane[i].dtype);
    uint32_t stored_cols = mm_cells(s->t->cols, stored->cell_k);
    mm_cell cell = mm_plan_cell(s->pt, i);
    for (uint32_t r = 0; r < s->plan->pack.tp; r++) {
      if (!mm_plan_wants(s->plan, s->pt->part, r)) continue;
      uint32_t first = mm_pack_first_lead(&s->plan->pack, s->t, r);
      if (s->t->lead && (s->lead < first || s->lead >= first + s->t->lead)) continue; /* another rank's expert */
      uint64_t at = place->offset + (s->lead - first) * (place->bytes / (s->t->lead ? s->t->lead : 1));
      mm_range all_rows = {0, 0, x->rows}, all_cols = {0, 0, s->x->cols};
      if (cut->axis == MM_AXIS_ROWS) all_rows = cut->rank[r];
      if (cut->axis == MM_AXIS_COLS) all_cols = cut->rank[r];
      mm_run rows = run_of(all_rows, s->row, s->row + s->rows, x->local_at, stored->cell_n, cell.n);
      mm_run cols = run_of(all_cols, 0, s->x->cols, 0, stored->cell_k, cell.k);
      if (rows.count == 0 || cols.count == 0) continue;
      uint64_t row_bytes = (uint64_t)stored_cols * size;
      uint32_t plane_cols = mm_cells(s->x->cols, cell.k);
      const void *bytes = (const uint8_t *)plane[i] + strip_cell(&rows, 0) * row_bytes;
      if (s->pt->spelling || !is_stretch(&rows, &cols, plane_cols, stored_cols)) {
        if (!mm_grow(&w->slice, &w->slice_cap, rows.count * row_bytes, 1, err)) return false;
        gather(&rows, &cols, plane[i], plane_cols, stored_cols, size, w->slice);
        if (s->pt->spelling) mm_dialect_scale(s->pt->spelling, sc, i, w->slice);
        bytes = w->slice;
      }
      if (!mm_blocks_put(out, &w->log, r, at + rows.to * row_bytes, bytes, rows.count * row_bytes, err)) return false;
    }
  }
  return true;
}

/* What a dialect stores beside the planes: the shape of a matrix whose words do not tell it, or the static scale of its inputs. */
static bool put_beside(mm_worker *w, const mm_strip *s, mm_blocks *out, mm_err *err) {
  const mm_spelling *spelt = s->pt->spelling;
  if (!spelt || s->row > 0 || !(spelt->shape || spelt->input)) return true;
  int64_t shape[2] = {s->x->rows, s->x->cols};
  float input = spelt->reciprocal ? 1 / s->t->input_scale : s->t->input_scale;
  const void *data = spelt->shape ? (const void *)shape : &input;
  uint64_t at = s->pt->place[s->piece][s->pt->scheme->plane_count].offset;
  return mm_blocks_put(out, &w->log, 0, at, data, spelt->shape ? sizeof shape : sizeof input, err);
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

static bool run_strip(mm_worker *w, mm_strip *s, mm_blocks *out, mm_err *err) {
  const void *plane[MM_MAX_PLANES] = {0};
  if (!pack_strip(w, s, plane, err)) return false;
  w->zeroed += w->source.zeroed;
  if (strcmp(s->t->name, "lm_head.weight") == 0 && !note_dead_rows(w, s, err)) return false;
  return scatter(w, s, plane, out, err) && put_beside(w, s, out, err);
}

static bool strip_amax(mm_worker *w, mm_strip *s, mm_blocks *out, mm_err *err) {
  (void)out;
  if (!mm_decode_f32(&w->source, s->x, s->row, s->rows, err)) return false;
  float m = s->group;
  for (size_t i = 0, n = (size_t)s->rows * s->x->cols; i < n; i++) m = fmaxf(m, fabsf(w->source.wide[i]));
  s->group = m;
  return true;
}

/* Does one thing to every strip of a stack entry. */
static bool for_entry(mm_worker *w, mm_strip *s, bool (*run)(mm_worker *, mm_strip *, mm_blocks *, mm_err *), mm_blocks *out, mm_err *err) {
  for (s->piece = 0; s->piece < s->t->piece_count; s->piece++) {
    s->x = &s->pt->matrix[s->lead * s->t->piece_count + s->piece];
    uint32_t unit = s->pt->scheme->strip ? mm_strip_rows(s->plan->hf, s->pt->scheme, s->x->cols) : s->x->rows;
    for (s->row = 0; s->row < s->x->rows; s->row += unit) {
      s->rows = (uint32_t)mm_min(unit, s->x->rows - s->row);
      if (!run(w, s, out, err)) return false;
    }
  }
  return true;
}

/* Codes are kept when all pieces can be and their global scales agree, or can be made to (NVFP4's second level). */
static bool find_group(mm_worker *w, mm_strip *s, mm_err *err) {
  const mm_matrix *x = &s->pt->matrix[s->lead * s->t->piece_count];
  const mm_scheme *sc = s->pt->scheme;
  float least = INFINITY, most = 0;
  s->keep = true;
  for (unsigned i = 0; s->keep && i < s->t->piece_count; i++) s->keep = mm_encoding_keeps(&x[i], sc, s->pt->grid);
  for (unsigned i = 0; s->keep && sc->needs_amax && i < s->t->piece_count; i++) {
    float global;
    if (!mm_decode_global(&w->source, &x[i], &global, err)) return false;
    least = fminf(least, global);
    most = fmaxf(most, global);
  }
  if (sc->needs_amax && sc->plane_count == 2 && least != most) s->keep = false;
  s->group = s->keep ? most : 0;
  return s->keep || !sc->needs_amax || for_entry(w, s, strip_amax, NULL, err);
}

bool mm_step_run(mm_worker *w, const mm_plan *p, const mm_step *step, mm_blocks *out, mm_err *err) {
  mm_strip s = {.plan = p, .t = &p->pack.tensor[step->tensor], .pt = &p->tensor[step->tensor], .tensor = step->tensor, .lead = step->lead};
  w->log.count = w->dead_count = w->zeroed = 0;
  if (step->piece == MM_ALL_PIECES) return find_group(w, &s, err) && for_entry(w, &s, run_strip, out, err);
  s.piece = step->piece;
  s.row = step->row;
  s.rows = step->rows;
  s.x = &s.pt->matrix[s.lead * s.t->piece_count + s.piece];
  s.keep = mm_encoding_keeps(s.x, s.pt->scheme, s.pt->grid);
  return run_strip(w, &s, out, err);
}
