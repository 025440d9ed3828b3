/* Tensor-parallel cuts: who holds which rows or columns, and the scale grid that divides every cut. */
#include <stdio.h>
#include <string.h>

#include "convert/plan/plan.h"

typedef struct refusal {
  const char *file, *option;
  uint32_t found;
  const char *expected;
} refusal;

MM_PRINTF(3, 4) static bool refuse(refusal x, mm_err *err, const char *fmt, ...) {
  char reason[128];
  va_list args;
  va_start(args, fmt);
  vsnprintf(reason, sizeof reason, fmt, args);
  va_end(args);
  return mm_fail(err, MM_UNSUPPORTED, "E_TP", mm_at(x.file, NULL), "found %s %u, but %s; expected %s", x.option, x.found, reason,
                 x.expected);
}

bool mm_cut_feasible(const mm_model *m, const mm_plan_options *o, const char *file, mm_err *err) {
  char list[256] = "one of 1";
  size_t n = strlen(list);
  for (uint32_t t = 2; t <= m->heads && n + 8 < sizeof list; t++)
    if (mm_model_cuts(m, t, t, 1)) n += (size_t)snprintf(list + n, sizeof list - n, ", %u", t);
  const uint32_t tp = o->tp, ep = o->ep, kv = m->kv_heads, index = m->index_heads;
  const uint32_t attn = o->attn_tp ? o->attn_tp : tp;
  const refusal of_tp = {file, "--tp", tp, list}, of_attn = {file, o->attn_tp ? "--attn-tp" : "--tp", attn, list},
                of_ep = {file, "--ep", ep, "a common divisor"}, of_pp = {file, "--pp", o->pp, "at most that"};
  const refusal of_groups = {file, "--attn-tp", attn, "a divisor"};
  if (tp % attn != 0) return refuse(of_groups, err, "--tp %u is not a multiple of it", tp);
  if (m->heads % attn != 0) return refuse(of_attn, err, "num_attention_heads %u is not a multiple of it", m->heads);
  if (kv % attn != 0 && attn % kv != 0) return refuse(of_attn, err, "num_key_value_heads %u neither divides it nor is divided by it", kv);
  if (index && index % attn != 0 && attn % index != 0)
    return refuse(of_attn, err, "sparse_num_index_heads %u neither divides it nor is divided by it", index);
  if (m->dense_intermediate % tp != 0 || m->shared_intermediate % tp != 0)
    return refuse(of_tp, err, "dense_intermediate_size %u and shared_intermediate_size %u are not both multiples of it",
                  m->dense_intermediate, m->shared_intermediate);
  if (tp % ep != 0 || m->experts % ep != 0)
    return refuse(of_ep, err, "--tp %u and num_local_experts %u are not both multiples of it", tp, m->experts);
  if (m->intermediate % (tp / ep) != 0)
    return refuse(of_tp, err, "intermediate_size %u is not a multiple of tp/ep %u", m->intermediate, tp / ep);
  return o->pp <= m->layers || refuse(of_pp, err, "there are %u layers", m->layers);
}

/* Enclosing whole blocks of `block` rows (or columns), the same extent on every rank, what a rank does not own left zero. */
static void pad_to_blocks(mm_cut *c, uint32_t tp, uint32_t block) {
  uint32_t widest = 0;
  for (uint32_t r = 0; r < tp; r++) {
    mm_range *g = &c->rank[r];
    uint32_t first = g->from / block * block, end = (uint32_t)mm_round_up(g->from + g->count, block);
    g->at = g->from - first;
    if (end - first > widest) widest = end - first;
  }
  c->local = widest;
}

/* Ranks that a tensor is cut for, and repeated behind: all for experts, MLPs and shared experts. */
static uint32_t ranks_of(const mm_plan *p, const mm_rule *r) {
  const bool expert = r->divide == MM_INTER_ROWS || r->divide == MM_INTER_COLS;
  const bool mlp = r->rows == MM_DIM_DENSE || r->cols == MM_DIM_DENSE || r->rows == MM_DIM_SHARED || r->cols == MM_DIM_SHARED;
  return expert || mlp ? p->pack.tp : mm_pack_attn_tp(&p->pack);
}

/* Ranks from `ranks` on hold what those before them do. */
static void repeat(mm_cut *c, uint32_t ranks, uint32_t tp) {
  for (uint32_t i = ranks; i < tp; i++) c->rank[i] = c->rank[i % ranks];
}

static bool fill(mm_plan *p, const mm_rule *r, mm_align align, mm_cut *c, mm_err *err) {
  const mm_model *m = &p->pack.model;
  const uint32_t all = p->pack.tp, tp = ranks_of(p, r);
  bool cols = r->divide == MM_COLS || r->divide == MM_INTER_COLS;
  c->axis = r->divide == MM_WHOLE ? MM_AXIS_NONE : cols ? MM_AXIS_COLS : MM_AXIS_ROWS;
  if (c->axis == MM_AXIS_NONE) return true;
  c->whole = mm_dim_extent(cols ? r->cols : r->rows, m);
  c->rank = mm_arena_alloc(&p->pack.arena, all * sizeof *c->rank, err);
  if (!c->rank) return false;
  if (r->divide == MM_KV_ROWS || r->divide == MM_INDEX_ROWS) {
    const uint32_t heads = r->divide == MM_KV_ROWS ? m->kv_heads : m->index_heads, each = c->whole / heads;
    c->local = (heads >= tp ? heads / tp : 1) * each;
    for (uint32_t i = 0; i < tp; i++) c->rank[i] = (mm_range){0, (uint32_t)((uint64_t)i * heads / tp) * each, c->local};
    repeat(c, tp, all);
    return true;
  }
  bool inter = r->divide == MM_INTER_ROWS || r->divide == MM_INTER_COLS;
  uint32_t ways = inter ? tp / p->pack.ep : tp; /* experts are cut among the ranks that share them */
  uint64_t multiple = MM_VOCAB_MULTIPLE / mm_gcd(MM_VOCAB_MULTIPLE, tp) * tp;
  c->local = (uint32_t)((r->divide == MM_VOCAB_ROWS ? mm_round_up(c->whole, multiple) : c->whole) / ways);
  for (uint32_t i = 0; i < tp; i++) {
    uint64_t from = mm_min((uint64_t)(i % ways) * c->local, c->whole);
    c->rank[i] = (mm_range){0, (uint32_t)from, (uint32_t)mm_min(c->local, c->whole - from)};
  }
  if (align == MM_ALIGN_PAD && inter) pad_to_blocks(c, tp, 128);
  repeat(c, tp, all);
  return true;
}

bool mm_cut_equal(const mm_cut *a, const mm_cut *b, uint32_t tp) {
  return a->axis == b->axis && a->whole == b->whole && a->local == b->local &&
         (a->axis == MM_AXIS_NONE || memcmp(a->rank, b->rank, tp * sizeof *a->rank) == 0);
}

bool mm_cut_find(mm_plan *p, const mm_rule *r, mm_align align, uint32_t *index, mm_err *err) {
  mm_cut c = {0};
  if (!fill(p, r, align, &c, err)) return false;
  for (size_t i = 0; i < p->pack.cut_count; i++)
    if (mm_cut_equal(&p->pack.cut[i], &c, p->pack.tp)) {
      *index = (uint32_t)i;
      return true;
    }
  size_t cap = p->pack.cut_count;
  if (!MM_GROW(p->pack.cut, &cap, p->pack.cut_count + 1, err)) return false;
  p->pack.cut[p->pack.cut_count] = c;
  *index = (uint32_t)p->pack.cut_count++;
  return true;
}

/* True if the columns of a piece are padded: a scale of theirs may span padding too, where rows have scales of their own. */
static bool pads_columns(const mm_plan *p, const mm_pack_tensor *t) {
  const mm_cut *c = &p->pack.cut[t->piece[0].cut]; /* along columns all pieces have one */
  uint32_t r = 0;
  while (c->axis == MM_AXIS_COLS && r < p->pack.tp && c->rank[r].count == c->local) r++;
  return c->axis == MM_AXIS_COLS && r < p->pack.tp;
}

/* A cell of a plane that no stored grid keeps whole. Without a cut it is the end of a matrix that falls inside it, at every --tp. */
static bool no_grid(const mm_plan *p, const mm_pack_tensor *t, const mm_scheme *s, bool scale, mm_cell cell, mm_cell fits, mm_err *err) {
  bool cut = false;
  for (unsigned j = 0; j < t->piece_count; j++) cut |= p->pack.cut[t->piece[j].cut].local < p->pack.cut[t->piece[j].cut].whole;
  return mm_fail(err, MM_UNSUPPORTED, "E_TP_ALIGN", mm_at(p->hf->dir, t->name),
                 "found %s at tp %u inside a %s cell of %u x %u (the finest grid that fits is %u x %u); expected %sanother --%s",
                 cut ? "a cut" : "the end of a matrix", p->pack.tp, s->name, cell.n, cell.k, fits.n, fits.k,
                 scale ? "--tp-align split or " : "", cut ? "tp" : "quant");
}

bool mm_cut_cells(const mm_plan *p, const mm_plan_tensor *pt, mm_pack_tensor *t, mm_align align, mm_err *err) {
  const mm_scheme *s = pt->scheme;
  uint32_t tp = p->pack.tp;
  if (align == MM_ALIGN_PAD && s->code == MM_CODE_INT4_OFFSET && pads_columns(p, t))
    return mm_fail(err, MM_UNSUPPORTED, "E_TP_ALIGN", mm_at(p->hf->dir, t->name),
                   "found --tp-align pad, but a zero byte of %s is not zero; expected split", s->name);
  static const mm_cut none = {.axis = MM_AXIS_NONE};
  for (unsigned i = 0; i < s->plane_count; i++) {
    const mm_plane *plane = &s->plane[i];
    mm_cell cell = mm_plan_cell(pt, i);
    uint32_t n = cell.n, k = cell.k;
    for (unsigned j = 0; j < t->piece_count; j++) {
      const mm_piece *x = &t->piece[j];
      const mm_cut *c = &p->pack.cut[x->cut];
      bool rows = c->axis == MM_AXIS_ROWS, cols = c->axis == MM_AXIS_COLS;
      if (n > 1) n = mm_cut_grid(rows ? c : &none, tp, x->local_at, n, !plane->scale);
      if (k > 1 && cols) k = mm_cut_grid(c, tp, 0, k, !plane->scale);
    }
    bool finer = n != cell.n || k != cell.k;
    if (finer && (!plane->scale || align == MM_ALIGN_ERROR)) return no_grid(p, t, s, plane->scale, cell, (mm_cell){n, k}, err);
    t->plane[i] = (mm_pack_plane){.suffix = plane->suffix, .dtype = plane->dtype, .cell_n = n, .cell_k = k};
    if (cell.n != plane->cell.n || cell.k != plane->cell.k) t->plane[i].grid = (mm_pack_grid){true, cell.n, cell.k};
  }
  t->plane_count = s->plane_count;
  return true;
}
