/* MiniMax-Text-01 and M1 (remote-code form) and their transformers-native "-hf" exports: lightning attention in most layers, GQA
 * in the others, DeepNorm residual, softmax top-2 experts. */
#include <stdio.h>
#include <string.h>

#include "convert/source/rule.h"

#define L    "model.layers.{l}."
#define ATTN L "self_attn."
#define MOE  L "block_sparse_moe."

static const mm_rule rules[] = {
    /* theirs                       ours                                rows            cols           divide         kind layers */
    {"model.embed_tokens.weight", "model.embed_tokens.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER},
    {L "input_layernorm.weight", L "input_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {ATTN "qkv_proj.weight", ATTN "qkv_proj.weight", MM_DIM_QKV, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_LIGHTNING_LAYER},
    {ATTN "output_gate.weight", ATTN "output_gate.weight", MM_DIM_Q, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_LIGHTNING_LAYER},
    {ATTN "norm.weight", ATTN "norm.weight", MM_DIM_Q, MM_DIM_NONE, MM_ROWS, MM_KIND_KEEP, MM_LIGHTNING_LAYER},
    {ATTN "out_proj.weight", ATTN "out_proj.weight", MM_DIM_HIDDEN, MM_DIM_Q, MM_COLS, MM_KIND_LINEAR, MM_LIGHTNING_LAYER},
    {ATTN "q_proj.weight", ATTN "qkv_proj.weight", MM_DIM_Q, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_FULL_LAYER},
    {ATTN "k_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, MM_FULL_LAYER},
    {ATTN "v_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, MM_FULL_LAYER},
    {ATTN "o_proj.weight", ATTN "o_proj.weight", MM_DIM_HIDDEN, MM_DIM_Q, MM_COLS, MM_KIND_LINEAR, MM_FULL_LAYER},
    {L "post_attention_layernorm.weight", L "post_attention_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP,
     MM_ANY_LAYER},
    {MOE "gate.weight", MOE "gate.weight", MM_DIM_EXPERTS, MM_DIM_HIDDEN, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {MOE "experts.{e}.w1.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT, MM_ANY_LAYER},
    {MOE "experts.{e}.w3.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT, MM_ANY_LAYER},
    {MOE "experts.{e}.w2.weight", MOE "experts.w2_weight", MM_DIM_HIDDEN, MM_DIM_INTER, MM_INTER_COLS, MM_KIND_EXPERT, MM_ANY_LAYER},
    {"model.norm.weight", "model.norm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {"lm_head.weight", "lm_head.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER},
};

static bool deepnorm(mm_config c, const char *remote, const char *hf, mm_deepnorm *out, mm_err *err) {
  char key[4][64];
  for (int i = 0; i < 2; i++) {
    snprintf(key[i], sizeof key[i], "layernorm_%s_%s", remote, i ? "beta" : "alpha");
    snprintf(key[2 + i], sizeof key[2 + i], "%s_%s_factor", hf, i ? "beta" : "alpha");
  }
  return mm_config_number_or(c, (const char *const[]){key[0], key[2], NULL}, &out->alpha, err) &&
         mm_config_number_or(c, (const char *const[]){key[1], key[3], NULL}, &out->beta, err);
}

static bool read_config(const mm_json *config, const char *file, mm_model *m, mm_err *err) {
  mm_config c = {config, file};
  const char *name = mm_arch_name(&mm_arch_minimax_m1, config);
  /* transformers hard-codes the post-norm path for its own class; the remote classes default to pre-norm. */
  bool native = strcmp(name, "MiniMaxForCausalLM") == 0;
  *m = (mm_model){.family = MM_FAMILY_M1,
                  .router = MM_ROUTER_SOFTMAX,
                  .postnorm = native,
                  .max_positions = 131072,
                  .rope_theta = 1e6,
                  .norm_eps = 1e-5,
                  .lightning_norm_eps = 1e-6,
                  .deepnorm_lightning = {1, 1},
                  .deepnorm_full = {1, 1},
                  .deepnorm_mlp = {1, 1}};
  snprintf(m->architecture, sizeof m->architecture, "%s", name);
  if (!mm_config_common(c, m, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++) m->attn[l] = native && l % 2 == 1 ? MM_ATTN_LIGHTNING : MM_ATTN_FULL;
  return mm_config_attn_types(c, m, err) && mm_config_bool_or(c, "postnorm", &m->postnorm, err) &&
         deepnorm(c, "linear_attention", "linear_attn", &m->deepnorm_lightning, err) &&
         deepnorm(c, "full_attention", "full_attn", &m->deepnorm_full, err) && deepnorm(c, "mlp", "mlp", &m->deepnorm_mlp, err) &&
         mm_model_check(m, file, MM_BAD_INPUT, "E_CFG_RANGE", err);
}

const mm_arch mm_arch_minimax_m1 = {
    .names = {"MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxForCausalLM"},
    .model_types = {"minimaxm1", "minimaxtext01", "minimax"},
    .read_config = read_config,
    .rule = rules,
    .rule_count = sizeof rules / sizeof *rules,
};
