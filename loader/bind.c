/* Names to a struct. The names are the fused per-rank ones of the packed checkpoint; the shapes follow from the model and tp. */
#include "loader/bind.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct binding {
  const mm_shards *s;
  const mm_model *m;
  uint32_t rank, tp;
  uint64_t q, kv; /* this rank's query and key rows: hpr·d and kpr·d */
  uint64_t ir;    /* columns of its experts, the same in every layer */
  mm_err *err;
} binding;

/* [lead, n, k] under `name`; k is 1 for vectors. */
static bool bind(const binding *b, const char *name, uint32_t lead, uint64_t n, uint64_t k, mm_packed *out) {
  mm_where where = mm_at(b->s->pack.dir, name);
  if (!mm_shards_find(b->s, b->rank, name, out)) return mm_fail(b->err, MM_INTEGRITY, "E_MISSING", where, "rank %u has none", b->rank);
  if (out->lead == lead && out->n == n && out->k == k) return true;
  return mm_fail(b->err, MM_INTEGRITY, "E_SHAPE", where, "found %u x [%u, %u] on a rank, expected %u x [%llu, %llu] from the model",
                 out->lead, out->n, out->k, lead, (unsigned long long)n, (unsigned long long)k);
}

/* The same inside layer l. */
static bool bind_layer(const binding *b, uint32_t l, const char *name, uint32_t lead, uint64_t n, uint64_t k, mm_packed *out) {
  char full[128];
  snprintf(full, sizeof full, "model.layers.%u.%s", l, name);
  return bind(b, full, lead, n, k, out);
}

static bool bind_attention(const binding *b, uint32_t l, mm_layer_weights *w) {
  uint32_t H = b->m->hidden;
  if (b->m->attn[l] == MM_ATTN_LIGHTNING)
    return bind_layer(b, l, "self_attn.qkv_proj.weight", 1, 3 * b->q, H, &w->qkv) &&
           bind_layer(b, l, "self_attn.out_proj.weight", 1, H, b->q, &w->out) &&
           bind_layer(b, l, "self_attn.output_gate.weight", 1, b->q, H, &w->output_gate) &&
           bind_layer(b, l, "self_attn.norm.weight", 1, b->q, 1, &w->attn_norm);
  return bind_layer(b, l, "self_attn.qkv_proj.weight", 1, b->q + 2 * b->kv, H, &w->qkv) &&
         bind_layer(b, l, "self_attn.o_proj.weight", 1, H, b->q, &w->out) &&
         (!b->m->qk_norm || (bind_layer(b, l, "self_attn.q_norm.weight", 1, b->q, 1, &w->q_norm) &&
                             bind_layer(b, l, "self_attn.k_norm.weight", 1, b->kv, 1, &w->k_norm)));
}

static bool bind_experts(const binding *b, uint32_t l, mm_layer_weights *w) {
  const mm_model *m = b->m;
  return bind_layer(b, l, "block_sparse_moe.experts.w2_weight", m->experts, m->hidden, b->ir, &w->w2) &&
         bind_layer(b, l, "block_sparse_moe.experts.w13_weight", m->experts, 2 * b->ir, m->hidden, &w->w13);
}

static bool bind_whole_layer(const binding *b, uint32_t l, mm_layer_weights *w) {
  const mm_model *m = b->m;
  return bind_layer(b, l, "input_layernorm.weight", 1, m->hidden, 1, &w->input_norm) &&
         bind_layer(b, l, "post_attention_layernorm.weight", 1, m->hidden, 1, &w->post_norm) && bind_attention(b, l, w) &&
         bind_layer(b, l, "block_sparse_moe.gate.weight", 1, m->experts, m->hidden, &w->router) &&
         (m->router != MM_ROUTER_SIGMOID_BIAS ||
          bind_layer(b, l, "block_sparse_moe.e_score_correction_bias", 1, m->experts, 1, &w->router_bias)) &&
         bind_experts(b, l, w);
}

/* This rank's share of an extent that padding may have widened: as its tensor says, but no less than divides `whole`. */
static uint64_t share(const binding *b, const char *name, bool columns, uint32_t whole) {
  mm_packed t;
  uint64_t least = mm_ceil_div(whole, b->tp);
  return mm_shards_find(b->s, b->rank, name, &t) ? mm_max(columns ? t.k : t.n, least) : least;
}

/* Every rank holds as many ids, in rank order; the last ones may be padding. */
static bool bind_vocab(const binding *b, mm_rank_weights *w) {
  uint64_t rows = share(b, "model.embed_tokens.weight", false, b->m->vocab);
  w->vocab_rows = (uint32_t)rows;
  w->vocab_first = (uint32_t)(rows * b->rank);
  return bind(b, "model.embed_tokens.weight", 1, rows, b->m->hidden, &w->embed) &&
         bind(b, "lm_head.weight", 1, rows, b->m->hidden, &w->head);
}

static bool check_tp(const binding *b) {
  const mm_model *m = b->m;
  const mm_pack *p = &b->s->pack;
  if (p->ep != 1 || p->pp != 1)
    return mm_fail(b->err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL),
                   "found --ep %u --pp %u, expected shards of tensor parallelism alone", p->ep, p->pp);
  if (m->heads % b->tp == 0 && (m->kv_heads % b->tp == 0 || b->tp % m->kv_heads == 0)) return true;
  return mm_fail(b->err, MM_INTEGRITY, "E_TP", mm_at(b->s->pack.dir, NULL), "found tp %u for %u heads and %u kv heads", b->tp, m->heads,
                 m->kv_heads);
}

bool mm_bind(mm_rank_weights *w, const mm_shards *s, uint32_t rank, mm_err *err) {
  const mm_model *m = &s->pack.model;
  binding b = {.s = s, .m = m, .rank = rank, .tp = s->pack.tp, .err = err};
  *w = (mm_rank_weights){.rank = rank, .tp = b.tp};
  if (!check_tp(&b)) return false;
  b.q = (uint64_t)m->heads / b.tp * m->head_dim;
  b.kv = mm_max(1, m->kv_heads / b.tp) * m->head_dim;
  b.ir = share(&b, "model.layers.0.block_sparse_moe.experts.w2_weight", true, m->intermediate);
  w->layer = mm_calloc(m->layers, sizeof *w->layer, err);
  bool ok = w->layer && bind_vocab(&b, w) && bind(&b, "model.norm.weight", 1, m->hidden, 1, &w->final_norm);
  for (uint32_t l = 0; ok && l < m->layers; l++) ok = bind_whole_layer(&b, l, &w->layer[l]);
  if (!ok) mm_bind_close(w);
  return ok;
}

void mm_bind_close(mm_rank_weights *w) {
  free(w->layer);
  *w = (mm_rank_weights){0};
}
