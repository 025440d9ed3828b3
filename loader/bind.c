/* Names to a struct. The names are the fused per-rank ones of the packed checkpoint. The part of each tensor that a rank holds follows
 * from the model and the rank; this file alone says how, and the cuts of the manifest must say the same. Only how much padding there is,
 * of the vocabulary and of the experts' intermediate columns, is the manifest's choice. */
#include "loader/bind.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The part of an extent that one rank holds: rows (or columns) own.from … of `whole` at own.at … of its `local` ones, the rest padding. */
typedef struct share {
  uint64_t whole, local;
  mm_range own;
} share;

/* A tensor by its pieces, side by side along rows. */
typedef struct form {
  uint32_t lead, whole_lead; /* experts on a rank and in all; 0: one matrix */
  bool vector;
  unsigned pieces;
  share rows[MM_PACK_PIECES], cols;
} form;

typedef struct binding {
  const mm_shards *s;
  const mm_model *m;
  uint32_t rank, stage;          /* tensor-parallel, within a stage */
  bool fill;                     /* else only checked */
  const mm_pack_tensor **sorted; /* [tensor_count] by name */
  share hidden, heads, kv, index, inter, vocab;
  uint32_t layer_stage; /* of the layer that is bound */
  mm_err *err;
} binding;

static share uncut(uint64_t whole) { return (share){whole, whole, {0, 0, (uint32_t)whole}}; }
static share run_of(uint64_t whole, uint64_t from, uint64_t count) { return (share){whole, count, {0, (uint32_t)from, (uint32_t)count}}; }

static int by_name(const void *a, const void *b) {
  return strcmp((*(const mm_pack_tensor *const *)a)->name, (*(const mm_pack_tensor *const *)b)->name);
}

static const mm_pack_tensor *find(const binding *b, const char *name) {
  mm_pack_tensor key = {.name = name};
  const mm_pack_tensor *at = &key, **hit = bsearch(&at, b->sorted, b->s->pack.tensor_count, sizeof *b->sorted, by_name);
  return hit ? *hit : NULL;
}

/* True if the rank's part under cut c is x: the cut's range where c is along `axis`, else the whole extent. */
static bool same_share(const binding *b, const mm_cut *c, mm_axis axis, const share *x, share *found) {
  *found = uncut(x->whole);
  if (c->axis == axis) *found = (share){c->whole, c->local, c->rank[b->rank]};
  const mm_range *f = &found->own, *e = &x->own;
  return found->whole == x->whole && found->local == x->local && f->count == e->count &&
         (e->count == 0 || (f->at == e->at && f->from == e->from));
}

static bool check_cut(const binding *b, const mm_pack_tensor *t, unsigned piece, mm_axis axis, const share *x) {
  share f;
  if (same_share(b, &b->s->pack.cut[t->piece[piece].cut], axis, x, &f)) return true;
  return mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", mm_at(b->s->pack.dir, t->name),
                 "piece %u: found %s [%u, %u, %u] of %llu in %llu on rank %u, expected [%u, %u, %u] of %llu in %llu from the model", piece,
                 axis == MM_AXIS_ROWS ? "rows" : "columns", f.own.at, f.own.from, f.own.count, (unsigned long long)f.whole,
                 (unsigned long long)f.local, b->rank, x->own.at, x->own.from, x->own.count, (unsigned long long)x->whole,
                 (unsigned long long)x->local);
}

/* The tensor `name` must have this form on this rank. */
static bool check(const binding *b, const mm_pack_tensor *t, const form *f) {
  mm_where where = mm_at(b->s->pack.dir, t->name);
  uint64_t rows = 0;
  for (unsigned i = 0; i < f->pieces; i++) rows += f->rows[i].local;
  bool leads = (t->lead == f->lead && t->whole_lead == f->whole_lead) || (f->whole_lead == 1 && t->lead == 0);
  if (!leads || t->rows != rows || t->cols != f->cols.local)
    return mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", where, "found %u x [%u, %u] on a rank, expected %u x [%llu, %llu] from the model",
                   t->lead ? t->lead : 1, t->rows, t->cols, f->lead ? f->lead : 1, (unsigned long long)rows,
                   (unsigned long long)f->cols.local);
  if (t->vector != f->vector)
    return mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", where, "found a %s, expected a %s from the model", t->vector ? "vector" : "matrix",
                   f->vector ? "vector" : "matrix");
  if (t->piece_count != f->pieces || t->whole_cols != f->cols.whole)
    return mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", where, "found %u pieces of %u columns uncut, expected %u of %llu from the model",
                   t->piece_count, t->whole_cols, f->pieces, (unsigned long long)f->cols.whole);
  for (unsigned i = 0; i < f->pieces; i++) {
    const share *x = &f->rows[i];
    if (t->piece[i].rows != x->whole || t->piece[i].local_rows != x->local)
      return mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", where, "piece %u: found %u rows of %u, expected %llu of %llu from the model", i,
                     t->piece[i].local_rows, t->piece[i].rows, (unsigned long long)x->local, (unsigned long long)x->whole);
    if (!check_cut(b, t, i, MM_AXIS_ROWS, x) || !check_cut(b, t, i, MM_AXIS_COLS, &f->cols)) return false;
  }
  return true;
}

static bool bind(const binding *b, const char *name, form f, mm_packed *out) {
  const mm_pack_tensor *t = find(b, name);
  const uint32_t rank = b->stage * b->s->pack.tp + b->rank;
  const bool here = b->fill && t && t->stage == b->stage;
  if (!t || (here && !b->s->rank[rank].plane))
    return mm_fail(b->err, MM_INTEGRITY, "E_MISSING", mm_at(b->s->pack.dir, name), "found none on rank %u, expected one", rank);
  if (!check(b, t, &f)) return false;
  if (here) *out = mm_shards_tensor(b->s, rank, (size_t)(t - b->s->pack.tensor));
  return true;
}

/* The tensor belongs to this stage. */
static bool check_stage(const binding *b, const char *name, uint32_t stage) {
  const mm_pack_tensor *t = find(b, name);
  if (!t || t->stage == stage) return true; /* an absent one is reported elsewhere */
  return mm_fail(b->err, MM_INTEGRITY, "E_PARALLEL", mm_at(b->s->pack.dir, name), "found stage %u, expected %u", t->stage, stage);
}

/* The same inside layer l. */
static bool bind_layer(const binding *b, uint32_t l, const char *name, form f, mm_packed *out) {
  const char *full = MM_FORMATTED(128, "model.layers.%u.%s", l, name);
  return check_stage(b, full, b->layer_stage) && bind(b, full, f, out);
}

static form matrix(share rows, share cols) { return (form){.pieces = 1, .rows = {rows}, .cols = cols}; }
static form vector(share rows) { return (form){.vector = true, .pieces = 1, .rows = {rows}, .cols = uncut(1)}; }
static form whole_vector(uint32_t n) { return vector(uncut(n)); }

/* Query, key and value of a head lie together in lightning attention. */
static form lightning_qkv(const binding *b) {
  const share *q = &b->heads;
  return matrix(run_of(3 * q->whole, 3 * (uint64_t)q->own.from, 3 * q->local), b->hidden);
}

static form stack(const binding *b, form f) {
  f.lead = b->m->experts / b->s->pack.ep;
  f.whole_lead = b->m->experts;
  return f;
}

static bool bind_index(const binding *b, uint32_t l, mm_layer_weights *w) {
  const uint32_t dim = b->m->index_dim;
  return bind_layer(b, l, "self_attn.index_q_proj.weight", matrix(b->index, b->hidden), &w->index_q) &&
         bind_layer(b, l, "self_attn.index_k_proj.weight", matrix(uncut(dim), b->hidden), &w->index_k) &&
         bind_layer(b, l, "self_attn.index_q_norm.weight", whole_vector(dim), &w->index_q_norm) &&
         bind_layer(b, l, "self_attn.index_k_norm.weight", whole_vector(dim), &w->index_k_norm);
}

static bool bind_attention(const binding *b, uint32_t l, mm_layer_weights *w) {
  if (b->m->attn[l] == MM_ATTN_LIGHTNING)
    return bind_layer(b, l, "self_attn.qkv_proj.weight", lightning_qkv(b), &w->qkv) &&
           bind_layer(b, l, "self_attn.out_proj.weight", matrix(b->hidden, b->heads), &w->out) &&
           bind_layer(b, l, "self_attn.output_gate.weight", matrix(b->heads, b->hidden), &w->output_gate) &&
           bind_layer(b, l, "self_attn.norm.weight", vector(b->heads), &w->attn_norm);
  const form head = whole_vector(b->m->head_dim), q = b->m->qk_norm_per_head ? head : vector(b->heads),
             k = b->m->qk_norm_per_head ? head : vector(b->kv);
  return bind_layer(b, l, "self_attn.qkv_proj.weight", (form){.pieces = 3, .rows = {b->heads, b->kv, b->kv}, .cols = b->hidden}, &w->qkv) &&
         bind_layer(b, l, "self_attn.o_proj.weight", matrix(b->hidden, b->heads), &w->out) &&
         (!b->m->qk_norm ||
          (bind_layer(b, l, "self_attn.q_norm.weight", q, &w->q_norm) && bind_layer(b, l, "self_attn.k_norm.weight", k, &w->k_norm))) &&
         (b->m->attn[l] != MM_ATTN_SPARSE || bind_index(b, l, w));
}

/* `width` columns between up and down, cut by tp whatever ep is. */
static bool bind_mlp(const binding *b, uint32_t l, const char *of, uint32_t width, mm_layer_weights *w) {
  const uint64_t each = width / b->s->pack.tp;
  const share cut = run_of(width, b->rank * each, each);
  return bind_layer(b, l, MM_FORMATTED(64, "%s.gate_up_proj.weight", of), (form){.pieces = 2, .rows = {cut, cut}, .cols = b->hidden},
                    &w->mlp_up) &&
         bind_layer(b, l, MM_FORMATTED(64, "%s.down_proj.weight", of), matrix(b->hidden, cut), &w->mlp_down);
}

/* Both stacks have their experts in one order. */
static bool bind_order(const binding *b, uint32_t l, mm_layer_weights *w) {
  const char *up = MM_FORMATTED(64, "model.layers.%u.block_sparse_moe.experts.w13_weight", l);
  const uint32_t *x = find(b, up)->order.index,
                 *y = find(b, MM_FORMATTED(64, "model.layers.%u.block_sparse_moe.experts.w2_weight", l))->order.index;
  w->expert_index = y;
  return x == y || (x && y && memcmp(x, y, b->m->experts * sizeof *x) == 0) ||
         mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", mm_at(b->s->pack.dir, up), "found experts in another order, expected that of w2_weight");
}

static bool bind_experts(const binding *b, uint32_t l, mm_layer_weights *w) {
  form up = {.pieces = 2, .rows = {b->inter, b->inter}, .cols = b->hidden};
  return bind_layer(b, l, "block_sparse_moe.experts.w2_weight", stack(b, matrix(b->hidden, b->inter)), &w->w2) &&
         bind_layer(b, l, "block_sparse_moe.experts.w13_weight", stack(b, up), &w->w13) && bind_order(b, l, w);
}

static bool bind_ffn(const binding *b, uint32_t l, mm_layer_weights *w) {
  const mm_model *m = b->m;
  if (m->ffn[l] == MM_FFN_DENSE) return bind_mlp(b, l, "mlp", m->dense_intermediate, w);
  return bind_layer(b, l, "block_sparse_moe.gate.weight", matrix(uncut(m->experts), b->hidden), &w->router) &&
         (m->router != MM_ROUTER_SIGMOID_BIAS ||
          bind_layer(b, l, "block_sparse_moe.e_score_correction_bias", whole_vector(m->experts), &w->router_bias)) &&
         (m->shared_intermediate == 0 || bind_mlp(b, l, "block_sparse_moe.shared_experts", m->shared_intermediate, w)) &&
         bind_experts(b, l, w);
}

static bool bind_whole_layer(const binding *b, uint32_t l, mm_layer_weights *w) {
  const uint32_t hidden = b->m->hidden;
  return bind_layer(b, l, "input_layernorm.weight", whole_vector(hidden), &w->input_norm) &&
         bind_layer(b, l, "post_attention_layernorm.weight", whole_vector(hidden), &w->post_norm) && bind_attention(b, l, w) &&
         bind_ffn(b, l, w);
}

/* Every rank of a group holds as many ids, in rank order; the last ones may be padding. */
static bool bind_vocab(const binding *b, mm_rank_weights *w) {
  w->vocab_rows = (uint32_t)b->vocab.local;
  w->vocab_first = (uint32_t)(b->vocab.local * (b->rank % mm_pack_attn_tp(&b->s->pack)));
  return check_stage(b, "model.embed_tokens.weight", 0) && check_stage(b, "lm_head.weight", b->s->pack.pp - 1) &&
         check_stage(b, "model.norm.weight", b->s->pack.pp - 1) &&
         bind(b, "model.embed_tokens.weight", matrix(b->vocab, b->hidden), &w->embed) &&
         bind(b, "lm_head.weight", matrix(b->vocab, b->hidden), &w->head);
}

/* Finds the stage of layer l by the layer's first tensor. The first layer is in stage 0, the last one in the last stage, any other in the
 * stage of the layer before or in the next one. Every stage therefore has layers. */
static bool next_stage(binding *b, uint32_t l) {
  const char *name = MM_FORMATTED(64, "model.layers.%u.input_layernorm.weight", l);
  const mm_pack_tensor *t = find(b, name);
  const uint32_t last = b->s->pack.pp - 1, before = b->layer_stage;
  const uint32_t least = l + 1 == b->m->layers ? last : before, most = l == 0 ? 0 : (uint32_t)mm_min(before + 1, last);
  if (!t) return true; /* missing: binding the layer says so */
  b->layer_stage = t->stage;
  return (t->stage >= least && t->stage <= most) ||
         mm_fail(b->err, MM_INTEGRITY, "E_PARALLEL", mm_at(b->s->pack.dir, name),
                 "found stage %u, expected layers in every stage from 0 to %u, in this order", t->stage, last);
}

static bool bind_all(binding *b, mm_rank_weights *w) {
  const mm_model *m = b->m;
  if (!bind_vocab(b, w) || !bind(b, "model.norm.weight", whole_vector(m->hidden), &w->final_norm)) return false;
  mm_layer_weights unused;
  b->layer_stage = 0;
  w->layer_first = m->layers, w->layer_end = 0;
  for (uint32_t l = 0; l < m->layers; l++) {
    if (!next_stage(b, l) || !bind_whole_layer(b, l, b->fill ? &w->layer[l] : &unused)) return false;
    if (b->layer_stage == b->stage) w->layer_first = (uint32_t)mm_min(w->layer_first, l), w->layer_end = l + 1;
  }
  return true;
}

static bool check_tp(const binding *b) {
  const mm_model *m = b->m;
  const mm_pack *p = &b->s->pack;
  const uint32_t tp = p->tp, ep = p->ep, attn = mm_pack_attn_tp(p);
  if (m->dense_intermediate % tp != 0 || m->shared_intermediate % tp != 0)
    return mm_fail(b->err, MM_INTEGRITY, "E_TP", mm_at(p->dir, NULL),
                   "found tp %u, expected a divisor of %u and %u columns of dense layers and shared experts", tp, m->dense_intermediate,
                   m->shared_intermediate);
  if (mm_model_cuts(m, tp, attn, ep)) return true;
  return mm_fail(
      b->err, MM_INTEGRITY, "E_TP", mm_at(p->dir, NULL),
      "found tp %u of attention, %u of experts, ep %u; expected the first to divide %u heads, and %u kv heads (%u index heads) or "
      "the other way round, an ep that divides %u experts, and tp / ep their %u columns",
      attn, tp, ep, m->heads, m->kv_heads, m->index_heads, m->experts, m->intermediate);
}

/* The vocabulary's rows on a rank, padding included: those of the embedding, unless its group's ranks together had more than ids can
 * count. */
static share vocab_share(const binding *b) {
  uint32_t tp = mm_pack_attn_tp(&b->s->pack), V = b->m->vocab;
  const mm_pack_tensor *t = find(b, "model.embed_tokens.weight");
  uint64_t local = t && (uint64_t)t->rows * tp <= INT32_MAX ? t->rows : mm_ceil_div(V, tp), from = mm_min(local * (b->rank % tp), V);
  return (share){V, local, {0, (uint32_t)from, (uint32_t)mm_min(local, V - from)}};
}

/* An expert's columns on a rank. Padding is what the first layer of experts has; in front, it is never more than the columns before. */
static share inter_share(const binding *b) {
  uint32_t ways = b->s->pack.tp / b->s->pack.ep, each = b->m->intermediate / ways;
  share x = run_of(b->m->intermediate, (uint64_t)(b->rank % ways) * each, each);
  uint32_t l = 0;
  while (l + 1 < b->m->layers && b->m->ffn[l] == MM_FFN_DENSE) l++;
  const mm_pack_tensor *t = find(b, MM_FORMATTED(64, "model.layers.%u.block_sparse_moe.experts.w2_weight", l));
  const mm_cut *c = t && t->piece_count ? &b->s->pack.cut[t->piece[0].cut] : NULL;
  if (!c || c->axis != MM_AXIS_COLS) return x;
  x.own.at = (uint32_t)mm_min(c->rank[b->rank].at, x.own.from);
  x.local = mm_max(c->local, x.own.at + (uint64_t)each);
  return x;
}

/* `sorted` is to be freed even after a failure. */
static bool open_binding(binding *b, const mm_shards *s, mm_err *err) {
  size_t n = s->pack.tensor_count;
  *b = (binding){.s = s, .m = &s->pack.model, .err = err, .sorted = mm_calloc(n, sizeof *b->sorted, err)};
  for (size_t i = 0; b->sorted && i < n; i++) b->sorted[i] = &s->pack.tensor[i];
  if (b->sorted) qsort(b->sorted, n, sizeof *b->sorted, by_name);
  return b->sorted && check_tp(b);
}

static void set_rank(binding *b, uint32_t stage, uint32_t rank) {
  const mm_model *m = b->m;
  const uint64_t tp = mm_pack_attn_tp(&b->s->pack), d = m->head_dim, q = m->heads / tp * d, of = rank % tp;
  b->rank = rank;
  b->stage = stage;
  b->hidden = uncut(m->hidden);
  b->heads = run_of(m->heads * d, of * q, q);
  b->kv = run_of(m->kv_heads * d, of * m->kv_heads / tp * d, mm_max(1, m->kv_heads / tp) * d);
  const uint64_t dim = m->index_dim;
  b->index = run_of(m->index_heads * dim, of * m->index_heads / tp * dim, mm_max(1, m->index_heads / tp) * dim);
  b->inter = inter_share(b);
  b->vocab = vocab_share(b);
}

bool mm_bind(mm_rank_weights *w, const mm_shards *s, uint32_t rank, mm_err *err) {
  const mm_pack *p = &s->pack;
  *w = (mm_rank_weights){.rank = rank % p->tp, .tp = p->tp, .attn_tp = p->attn_tp};
  binding b;
  bool ok = open_binding(&b, s, err) && (w->layer = mm_calloc(p->model.layers, sizeof *w->layer, err));
  if (ok) {
    b.fill = true;
    set_rank(&b, rank / p->tp, rank % p->tp);
    ok = bind_all(&b, w);
    w->expert_first = w->rank / (p->tp / p->ep) * (p->model.experts / p->ep);
    if (ok && w->layer_first >= w->layer_end)
      ok = mm_fail(err, MM_INTEGRITY, "E_PARALLEL", mm_at(p->dir, NULL), "stage %u: found no layer, expected at least one", b.stage);
  }
  free(b.sorted);
  if (!ok) mm_bind_close(w);
  return ok;
}

bool mm_bind_planned(mm_rank_weights *w, const mm_pack *pack, uint32_t rank, mm_err *err) {
  mm_shards s = {.pack = *pack, .rank = mm_calloc(mm_pack_ranks(pack), sizeof *s.rank, err)};
  mm_shard_plane *none = s.rank ? mm_calloc(pack->tensor_count * MM_PACK_PLANES, sizeof *none, err) : NULL;
  if (none) s.rank[rank].plane = none;
  *w = (mm_rank_weights){0};
  const bool ok = none && mm_bind(w, &s, rank, err);
  MM_FREE(none, s.rank);
  return ok;
}

bool mm_bind_check(const mm_shards *s, mm_err *err) {
  binding b;
  mm_rank_weights unused;
  bool ok = open_binding(&b, s, err);
  for (uint32_t r = 0; ok && r < s->pack.tp; r++) {
    set_rank(&b, 0, r);
    ok = bind_all(&b, &unused);
  }
  free(b.sorted);
  return ok;
}

void mm_bind_close(mm_rank_weights *w) {
  if (w->made) munmap(w->made, w->made_bytes);
  free(w->layer);
  *w = (mm_rank_weights){0};
}
