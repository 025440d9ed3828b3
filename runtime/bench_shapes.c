/* Shapes of the released models, with weights that nobody stored (bench_shapes.h). */
#include "runtime/bench_shapes.h"

#include <string.h>

mm_model mm_bench_model(const mm_bench_shape *s) {
  const bool m1 = strcmp(s->model, "m1") == 0;
  const double alpha = m1 ? 3.5565588200778455 : 1;
  mm_model m = {.family = m1 ? MM_FAMILY_M1 : MM_FAMILY_M2,
                .router = m1 ? MM_ROUTER_SOFTMAX : MM_ROUTER_SIGMOID_BIAS,
                .postnorm = m1,
                .qk_norm = !m1,
                .hidden = m1 ? 6144 : 3072,
                .layers = s->layers,
                .heads = m1 ? 64 : 48,
                .kv_heads = 8,
                .head_dim = 128,
                .rotary_dim = 64,
                .experts = m1 ? 32 : 256,
                .top_k = m1 ? 2 : 8,
                .intermediate = m1 ? 9216 : 1536,
                .vocab = s->vocab,
                .max_positions = 1 << 20,
                .rope_theta = m1 ? 1e7 : 5e6,
                .norm_eps = m1 ? 1e-5 : 1e-6,
                .lightning_norm_eps = 1e-6,
                .deepnorm_lightning = {alpha, 1},
                .deepnorm_full = {alpha, 1},
                .deepnorm_mlp = {alpha, 1}};
  for (uint32_t l = 0; l < s->layers; l++) m.attn[l] = m1 && l % 8 != 7 ? MM_ATTN_LIGHTNING : MM_ATTN_FULL;
  return m;
}

/* A weight without planes: the backend makes its numbers. */
static mm_packed weight(const char *scheme, uint32_t lead, uint32_t n, uint32_t k) {
  mm_packed w = {.scheme = mm_scheme_find(scheme), .lead = lead, .n = n, .k = k};
  for (unsigned i = 0; i < w.scheme->plane_count; i++) w.cell[i] = w.scheme->plane[i].cell;
  return w;
}
static mm_packed vector(uint32_t n) { return weight("bf16", 1, n, 1); }

bool mm_bench_weights(const mm_bench_shape *s, const mm_model *m, mm_rank_weights *w, mm_err *err) {
  const uint32_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
  *w = (mm_rank_weights){.tp = 1, .layer_end = m->layers, .vocab_rows = m->vocab};
  w->embed = weight("bf16", 1, m->vocab, m->hidden);
  w->head = weight(s->head, 1, m->vocab, m->hidden);
  w->final_norm = vector(m->hidden);
  if (!(w->layer = mm_calloc(m->layers, sizeof *w->layer, err))) return false;
  for (uint32_t l = 0; l < m->layers; l++) {
    mm_layer_weights *y = &w->layer[l];
    const bool lightning = m->attn[l] == MM_ATTN_LIGHTNING;
    y->input_norm = y->post_norm = vector(m->hidden);
    y->qkv = weight(s->quant, 1, lightning ? 3 * q : q + 2 * kv, m->hidden);
    y->out = weight(s->quant, 1, m->hidden, q);
    if (lightning) y->output_gate = weight(s->quant, 1, q, m->hidden), y->attn_norm = vector(q);
    if (m->qk_norm) y->q_norm = vector(q), y->k_norm = vector(kv);
    y->router = weight("bf16", 1, m->experts, m->hidden);
    if (m->router == MM_ROUTER_SIGMOID_BIAS) y->router_bias = vector(m->experts);
    y->w13 = weight(s->experts, m->experts, 2 * m->intermediate, m->hidden);
    y->w2 = weight(s->experts, m->experts, m->hidden, m->intermediate);
  }
  return true;
}
