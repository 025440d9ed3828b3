/* Shapes of the released models, with weights that nobody stored (bench_shapes.h). */
#include "runtime/bench/bench_shapes.h"

#include <string.h>

#include "loader/random_weights.h"

static mm_model shape_of_m1(uint32_t layers) {
  const double alpha = 3.5565588200778455;
  mm_model m = {.family = MM_FAMILY_M1,
                .router = MM_ROUTER_SOFTMAX,
                .postnorm = true,
                .hidden = 6144,
                .heads = 64,
                .kv_heads = 8,
                .experts = 32,
                .top_k = 2,
                .intermediate = 9216,
                .rope_theta = 1e7,
                MM_MODEL_NORMS(1e-5)};
  m.deepnorm_lightning = m.deepnorm_full = m.deepnorm_mlp = (mm_deepnorm){alpha, 1};
  for (uint32_t l = 0; l < layers; l++) m.attn[l] = l % 8 != 7 ? MM_ATTN_LIGHTNING : MM_ATTN_FULL;
  return m;
}

static mm_model shape_of_m2(uint32_t layers) {
  mm_model m = {.family = MM_FAMILY_M2,
                .router = MM_ROUTER_SIGMOID_BIAS,
                .qk_norm = true,
                .hidden = 3072,
                .heads = 48,
                .kv_heads = 8,
                .experts = 256,
                .top_k = 8,
                .intermediate = 1536,
                .rope_theta = 5e6,
                MM_MODEL_NORMS(1e-6)};
  memset(m.attn, MM_ATTN_FULL, layers);
  return m;
}

static mm_model shape_of_m3(uint32_t layers, uint32_t dense) {
  mm_model m = {.architecture = "MiniMaxM3SparseForConditionalGeneration",
                .family = MM_FAMILY_M3,
                .router = MM_ROUTER_SIGMOID_BIAS,
                .qk_norm = true,
                .hidden = 6144,
                .heads = 64,
                .kv_heads = 4,
                .experts = 128,
                .top_k = 4,
                .intermediate = 3072,
                .rope_theta = 5e6,
                MM_MODEL_NORMS(1e-6),
                .norm_offset = true,
                .qk_norm_per_head = true,
                .index_heads = 4,
                .index_dim = 128,
                .index_block = 128,
                .index_top_k = 16,
                .index_local = 1,
                .dense_intermediate = 12288,
                .shared_intermediate = 3072,
                .routed_scale = 2,
                .activation = MM_ACTIVATION_SWIGLUOAI,
                .act_alpha = 1.702,
                .act_limit = 7,
                .act_beta = 1};
  for (uint32_t l = 0; l < layers; l++) {
    m.attn[l] = l < dense ? MM_ATTN_FULL : MM_ATTN_SPARSE;
    m.ffn[l] = l < dense ? MM_FFN_DENSE : MM_FFN_EXPERTS;
  }
  return m;
}

/* Narrower and of fewer experts, with heads of the same size in the same groups. */
static void shrink(mm_model *m, uint32_t by) {
  const uint32_t group = m->heads / m->kv_heads;
  m->hidden /= by, m->intermediate /= by, m->dense_intermediate /= by, m->shared_intermediate /= by;
  m->experts = (uint32_t)mm_max(m->experts / by, m->top_k);
  m->kv_heads = (uint32_t)mm_max(m->kv_heads / by, 1), m->heads = m->kv_heads * group;
  if (m->index_heads) m->index_heads = m->kv_heads;
}

mm_model mm_bench_model(const mm_bench_shape *s) {
  mm_model m = strcmp(s->model, "m1") == 0   ? shape_of_m1(s->layers)
               : strcmp(s->model, "m2") == 0 ? shape_of_m2(s->layers)
                                             : shape_of_m3(s->layers, s->dense);
  m.layers = s->layers, m.vocab = s->vocab;
  m.head_dim = 128, m.rotary_dim = 64, m.max_positions = 1 << 20;
  if (s->shrink > 1) shrink(&m, s->shrink);
  return m;
}

bool mm_bench_draft(const mm_model *m, uint32_t by, mm_draft_kind kind, mm_dflash_config *c, mm_err *err) {
  const uint32_t kv_heads = (uint32_t)mm_max(8 / by, 1), most = kind == MM_DRAFT_EAGLE3 ? 3 : 6;
  *c = (mm_dflash_config){.layers = 5,
                          .hidden = m->hidden,
                          .heads = 3 * kv_heads,
                          .kv_heads = kv_heads,
                          .head_dim = 128,
                          .intermediate = 8192 / by,
                          .taps = (uint32_t)mm_min(most, m->layers - 1),
                          .block = 8,
                          .mask_id = m->vocab - 1,
                          .norm_eps = 1e-6,
                          .rope_theta = m->rope_theta,
                          .window = {2048, 2048, 2048, 2048, 0},
                          .causal = {true, true, true, true, false}};
  if (kind == MM_DRAFT_EAGLE3) {
    c->kind = kind, c->layers = 1, c->block = 1 + MM_EAGLE_CHAIN, c->mask_id = c->window[0] = 0;
    c->vocab = m->vocab, c->draft_vocab = (uint32_t)mm_min(32000, m->vocab), c->mapped = c->draft_vocab < c->vocab;
  }
  if (!c->taps)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found %u layers, expected 2 or more: a draft reads one before the last",
                   m->layers);
  for (uint32_t i = 0; i < c->taps; i++) c->tap[i] = m->layers < 10 ? i : 1 + i * (m->layers - 4) / (most - 1);
  return mm_dflash_fits(c, "", m, MM_USAGE, err);
}

bool mm_bench_weights(const mm_bench_shape *s, const mm_model *m, mm_rank_weights *w, mm_err *err) {
  const mm_random_model r = {.linear = mm_scheme_find(s->quant),
                             .experts = mm_scheme_find(s->experts),
                             .head = mm_scheme_find(s->head),
                             .tp = s->tp,
                             .ep = s->ep,
                             .pp = 1,
                             .attn_tp = s->attn_tp};
  return mm_random_weights(&r, m, s->rank, w, err);
}

double mm_bench_bytes(const mm_packed *w) {
  double bytes = 0;
  for (unsigned i = 0; w->scheme && i < w->scheme->plane_count; i++)
    bytes += (double)mm_plane_elements(w->n, w->k, w->cell[i]) * (double)mm_dtype_size(w->scheme->plane[i].dtype);
  return bytes;
}
double mm_bench_parameters(const mm_packed *w) { return w->scheme ? (double)w->n * w->k : 0; }
