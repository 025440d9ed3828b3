/* Running one step: decode or copy a strip, pack it, give every rank its rows and columns. */
#include "convert/write/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/plan/fill.h"
#include "convert/plan/target_format.h"

void mm_worker_open(mm_worker *w, const mm_hf *hf) {
  *w = (mm_worker){0};
  mm_decoder_open(&w->source, hf);
}

void mm_worker_close(mm_worker *w) {
  mm_decoder_close(&w->source);
  mm_moment_rounding_close(&w->rounding);
  MM_FREE(w->slice, w->importance, w->log.put, w->dead, w->head);
  for (int i = 0; i < MM_MAX_PLANES; i++) free(w->plane[i]);
}

/* The planes of the strip on the plan's cells, in w's buffers: kept from the source or packed. */
static bool pack_strip(mm_worker *w, const mm_strip *s, const void *plane[MM_MAX_PLANES], mm_err *err) {
  const mm_scheme *sc = s->pt->scheme;
  const mm_stored_as as = {sc, s->pt->grid, s->group};
  if (s->keep) return mm_decode_planes(&w->source, s->x, &as, s->row, s->rows, plane, err);
  bool bf16 = mm_is_plain(s->x) && s->x->weight->dtype == MM_BF16; /* packed as it is: the same bytes as through f32, sooner */
  if (!(bf16 ? mm_decode_codes(&w->source, s->x, s->row, s->rows, err) : mm_decode_f32(&w->source, s->x, s->row, s->rows, err)))
    return false;
  if (!mm_decode_fits(&w->source, s->x, sc, s->row, s->rows, err)) return false;
  for (unsigned i = 0; i < sc->plane_count; i++) {
    uint64_t bytes = mm_plane_elements(s->rows, s->x->cols, sc->plane[i].cell) * mm_dtype_size(sc->plane[i].dtype);
    if (!mm_grow(&w->plane[i], &w->plane_cap[i], bytes, 1, err)) return false;
    plane[i] = w->plane[i];
  }
  const uint8_t *weights = s->pt->weights ? s->pt->weights[s->lead * s->t->piece_count + s->piece] : NULL;
  if (weights) {
    if (!MM_GROW(w->importance, &w->importance_cap, s->x->cols, err)) return false;
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
  if (!mm_moments_round(&w->rounding, &s->pt->moments, &(mm_moment_strip){s->lead, s->piece, s->row, sc}, &args, w->plane, err))
    return false;
  size_t n = (size_t)s->rows * s->x->cols;
  return sc->code != MM_CODE_PLAIN || mm_decode_stored(&w->source, s->x, s->row, w->plane[0], sc->plane[0].dtype, n, err);
}

/* True if a share lies in the plane as it will lie in the file: whole rows that follow each other. */
static bool is_chunk(const mm_share *x, uint32_t plane_cols) {
  return x->cols.step == x->cols.cell && x->cols.count == x->stored_cols && plane_cols == x->stored_cols &&
         (x->rows.count == 1 || x->rows.step == x->rows.cell);
}

/* Gives every rank its share of every plane of the packed strip. */
static bool scatter(mm_worker *w, const mm_strip *s, const void *const plane[MM_MAX_PLANES], const mm_taker *to, mm_err *err) {
  const mm_scheme *sc = s->pt->scheme;
  for (unsigned i = 0; i < sc->plane_count; i++) {
    size_t size = mm_dtype_size(sc->plane[i].dtype);
    uint32_t plane_cols = mm_cells(s->x->cols, mm_plan_cell(s->pt, i).k);
    for (uint32_t r = 0; r < s->plan->pack.tp; r++) {
      mm_share x;
      if (!mm_share_of(s, i, r, &x)) continue;
      const void *bytes = (const uint8_t *)plane[i] + mm_run_cell(&x.rows, 0) * x.row_bytes;
      if (s->pt->naming || !is_chunk(&x, plane_cols)) {
        if (!mm_grow(&w->slice, &w->slice_cap, x.bytes, 1, err)) return false;
        mm_share_gather(&x, plane[i], plane_cols, size, w->slice);
        if (s->pt->naming) mm_target_format_scale(s->pt->naming, sc, i, s->keep ? s->x->steps : 0, w->slice, x.bytes);
        bytes = w->slice;
      }
      const uint64_t base = mm_plan_place(s->plan, s->pt, s->piece, i)->offset;
      const mm_given g = {.strip = s, .plane = i, .rank = r, .at = x.at - base, .offset = x.at, .bytes = bytes, .n = x.bytes};
      if (!to->take(to->ctx, &g, err)) return false;
    }
  }
  return true;
}

/* Writes the tensor that a target format stores in addition to the planes: the shape of a matrix whose words do not reveal it, or the
 * static scale of its inputs. */
static bool put_companion(const mm_strip *s, const mm_taker *to, mm_err *err) {
  const mm_target_naming *spelt = s->pt->naming;
  mm_share x;
  if (!mm_share_companions(s, &x)) return true;
  int64_t shape[2] = {s->x->rows, s->x->cols};
  float input = spelt->reciprocal ? 1 / s->t->input_scale : s->t->input_scale;
  const mm_given g = {
      .strip = s, .plane = s->pt->scheme->plane_count, .offset = x.at, .bytes = spelt->shape ? (const void *)shape : &input, .n = x.bytes};
  return to->take(to->ctx, &g, err);
}

/* Gives every tensor of a matrix in words of a target format. */
static bool put_words(mm_worker *w, const mm_strip *s, const void *const plane[MM_MAX_PLANES], const mm_taker *to, mm_err *err) {
  mm_words_matrix m = mm_target_words_of(s->plan, s->tensor, s->piece);
  mm_share x;
  m.codes = plane[0], m.scales = plane[1];
  for (unsigned i = 0; mm_share_words(s, i, &x); i++) {
    if (!mm_grow(&w->slice, &w->slice_cap, x.bytes, 1, err)) return false;
    mm_words_put(&m, s->pt->naming->role[i], w->slice);
    const mm_given g = {.strip = s, .plane = i, .offset = x.at, .bytes = w->slice, .n = x.bytes};
    if (!to->take(to->ctx, &g, err)) return false;
  }
  return true;
}

static bool is_head(const mm_pack_tensor *t) { return strcmp(t->name, "lm_head.weight") == 0; }
bool mm_step_of_head(const mm_plan *p, const mm_step *s) { return is_head(&p->pack.tensor[s->tensor]); }

/* A head row of zeros gives logit 0 for an id that was never trained. The numbers that are stored decide, whatever they came from. */
static bool note_dead_rows(mm_worker *w, const mm_strip *s, const void *const plane[MM_MAX_PLANES], mm_err *err) {
  mm_packed m = {.scheme = s->pt->scheme, .lead = 1, .n = s->rows, .k = s->x->cols};
  if (!MM_GROW(w->head, &w->head_cap, m.k, err)) return false;
  for (unsigned i = 0; i < m.scheme->plane_count; i++) {
    m.plane[i] = plane[i];
    m.cell[i] = mm_plan_cell(s->pt, i);
  }
  for (uint32_t i = 0; i < s->rows; i++) {
    uint32_t k = 0;
    mm_unpack(&m, 0, i, 1, w->head);
    while (k < m.k && w->head[k] == 0) k++;
    if (k < m.k) continue;
    if (!MM_GROW(w->dead, &w->dead_cap, w->dead_count + 1, err)) return false;
    w->dead[w->dead_count++] = s->row + i;
  }
  return true;
}

static bool run_strip(mm_worker *w, mm_strip *s, const mm_taker *to, mm_err *err) {
  const void *plane[MM_MAX_PLANES] = {0};
  if (!pack_strip(w, s, plane, err)) return false;
  w->zeroed += w->source.zeroed;
  if (is_head(s->t) && !note_dead_rows(w, s, plane, err)) return false;
  if (to && s->pt->naming && s->pt->naming->form) return put_words(w, s, plane, to, err);
  return !to || (scatter(w, s, plane, to, err) && put_companion(s, to, err));
}

static bool strip_amax(mm_worker *w, mm_strip *s, const mm_taker *to, mm_err *err) {
  (void)to;
  if (!mm_decode_f32(&w->source, s->x, s->row, s->rows, err)) return false;
  float m = s->group;
  for (size_t i = 0, n = (size_t)s->rows * s->x->cols; i < n; i++) m = fmaxf(m, fabsf(w->source.wide[i]));
  s->group = m;
  return true;
}

/* Does one thing to every strip of the stack entry, from its first. */
static bool for_entry(mm_worker *w, mm_strip *s, bool (*run)(mm_worker *, mm_strip *, const mm_taker *, mm_err *), const mm_taker *to,
                      mm_err *err) {
  do
    if (!run(w, s, to, err)) return false;
  while (mm_strip_next(s));
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
  if (s->keep && s->pt->as_stored && least != most && sc->needs_amax)
    return mm_decode_common(&w->source, x, s->t->piece_count, sc, s->pt->grid, &s->group, err);
  s->group = s->keep ? most : 0;
  if (s->keep || !sc->needs_amax) return true;
  mm_strip all = *s;
  if (!for_entry(w, &all, strip_amax, NULL, err)) return false;
  s->group = all.group;
  return true;
}

bool mm_step_give(mm_worker *w, const mm_plan *p, const mm_step *step, const mm_taker *to, mm_err *err) {
  mm_strip s = mm_strip_first(p, step);
  w->log.count = w->dead_count = w->zeroed = 0;
  if (step->piece == MM_ALL_PIECES) return find_group(w, &s, err) && for_entry(w, &s, run_strip, to, err);
  s.keep = mm_encoding_keeps(s.x, s.pt->scheme, s.pt->grid);
  return run_strip(w, &s, to, err);
}

typedef struct block_taker {
  mm_blocks *blocks;
  mm_put_log *log;
} block_taker;

static bool put_in_blocks(void *ctx, const mm_given *g, mm_err *err) {
  const block_taker *b = ctx;
  return mm_blocks_put(b->blocks, b->log, g->rank, g->offset, g->bytes, g->n, err);
}

bool mm_step_run(mm_worker *w, const mm_plan *p, const mm_step *step, mm_blocks *out, mm_err *err) {
  block_taker b = {out, &w->log};
  const mm_taker to = {put_in_blocks, &b};
  return mm_step_give(w, p, step, out ? &to : NULL, err);
}
