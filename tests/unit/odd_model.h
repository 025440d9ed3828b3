/* A model for tests. All values differ, so that a swapped field shows. */
#ifndef MM_TESTS_ODD_MODEL_H
#define MM_TESTS_ODD_MODEL_H

#include "formats/model.h"

static inline mm_model odd_model(void) {
  mm_model m = {.architecture = "MiniMaxM1ForCausalLM",
                .family = MM_FAMILY_M2,
                .router = MM_ROUTER_SIGMOID_BIAS,
                .postnorm = true,
                .qk_norm = false,
                .hidden = 96,
                .layers = 5,
                .heads = 12,
                .kv_heads = 4,
                .head_dim = 20,
                .rotary_dim = 10,
                .experts = 7,
                .top_k = 3,
                .intermediate = 48,
                .vocab = 300,
                .max_positions = UINT64_C(9007199254740993),
                .rope_theta = 1e7,
                .norm_eps = 1e-5,
                .lightning_norm_eps = 1e-6,
                .deepnorm_lightning = {3.5565588200778455, 1.25},
                .deepnorm_full = {2.5, 0.75},
                .deepnorm_mlp = {1.5, 0.1},
                .attn = {0, 1, 1, 0, 1}};
  return m;
}

/* One with every field that extended models alone have. */
static inline mm_model odd_extended_model(void) {
  mm_model m = odd_model();
  m.qk_norm = m.norm_offset = m.qk_norm_per_head = true;
  m.index_heads = 2, m.index_dim = 14, m.index_block = 33, m.index_top_k = 6, m.index_local = 5;
  m.dense_intermediate = 72, m.shared_intermediate = 24, m.routed_scale = 2.25, m.activation = MM_ACTIVATION_SWIGLUOAI;
  m.act_alpha = 1.702, m.act_limit = 7.5, m.act_beta = -0.5;
  m.attn[2] = m.attn[4] = MM_ATTN_SPARSE, m.ffn[1] = m.ffn[3] = MM_FFN_DENSE;
  return m;
}

#endif
