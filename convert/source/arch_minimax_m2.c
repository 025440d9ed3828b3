/* MiniMax-M2, M2.1, M2.5, M2.7: GQA with QK norm in every layer, plain pre-norm residual, sigmoid top-8 of 256 experts chosen with
 * a correction bias; released as block FP8. */
#include "convert/source/rule.h"

#define L    "model.layers.{l}."
#define ATTN L "self_attn."
#define MOE  L "block_sparse_moe."

static const mm_rule rules[] = {
    /* theirs                       ours                                rows            cols           divide         kind layers */
    {"model.embed_tokens.weight", "model.embed_tokens.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER},
    {L "input_layernorm.weight", L "input_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {ATTN "q_proj.weight", ATTN "qkv_proj.weight", MM_DIM_Q, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_ANY_LAYER},
    {ATTN "k_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, MM_ANY_LAYER},
    {ATTN "v_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, MM_ANY_LAYER},
    {ATTN "q_norm.weight", ATTN "q_norm.weight", MM_DIM_Q, MM_DIM_NONE, MM_ROWS, MM_KIND_KEEP, MM_ANY_LAYER},
    {ATTN "k_norm.weight", ATTN "k_norm.weight", MM_DIM_KV, MM_DIM_NONE, MM_KV_ROWS, MM_KIND_KEEP, MM_ANY_LAYER},
    {ATTN "o_proj.weight", ATTN "o_proj.weight", MM_DIM_HIDDEN, MM_DIM_Q, MM_COLS, MM_KIND_LINEAR, MM_ANY_LAYER},
    {L "post_attention_layernorm.weight", L "post_attention_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP,
     MM_ANY_LAYER},
    {MOE "gate.weight", MOE "gate.weight", MM_DIM_EXPERTS, MM_DIM_HIDDEN, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {MOE "e_score_correction_bias", MOE "e_score_correction_bias", MM_DIM_EXPERTS, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {MOE "experts.{e}.w1.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT, MM_ANY_LAYER},
    {MOE "experts.{e}.w3.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT, MM_ANY_LAYER},
    {MOE "experts.{e}.w2.weight", MOE "experts.w2_weight", MM_DIM_HIDDEN, MM_DIM_INTER, MM_INTER_COLS, MM_KIND_EXPERT, MM_ANY_LAYER},
    {"model.norm.weight", "model.norm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER},
    {"lm_head.weight", "lm_head.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER},
};

static bool must_be_true(mm_config c, const char *key, mm_err *err) {
  bool v = true;
  if (!mm_config_bool_or(c, key, &v, err)) return false;
  return v || mm_fail(err, MM_UNSUPPORTED, "E_CFG_FEATURE", mm_at(c.file, NULL), "key \"%s\": only true is supported", key);
}

static bool read_config(const mm_json *config, const char *file, mm_model *m, mm_err *err) {
  mm_config c = {config, file};
  *m = (mm_model){.architecture = "MiniMaxM2ForCausalLM",
                  .family = MM_FAMILY_M2,
                  .router = MM_ROUTER_SIGMOID_BIAS,
                  .qk_norm = true,
                  .head_dim = 128,
                  .max_positions = 196608,
                  .rope_theta = 5e6,
                  .norm_eps = 1e-6,
                  .lightning_norm_eps = 1e-6,
                  .deepnorm_lightning = {1, 1},
                  .deepnorm_full = {1, 1},
                  .deepnorm_mlp = {1, 1}};
  if (!mm_config_common(c, m, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++) m->attn[l] = MM_ATTN_FULL;
  if (!mm_config_attn_types(c, m, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++)
    if (m->attn[l] != MM_ATTN_FULL)
      return mm_fail(err, MM_UNSUPPORTED, "E_CFG_FEATURE", mm_at(file, NULL),
                     "layer %u is lightning attention, expected full attention in %s", l, m->architecture);
  return mm_config_only(c, "scoring_func", "sigmoid", err) && mm_config_only(c, "qk_norm_type", "per_layer", err) &&
         must_be_true(c, "use_qk_norm", err) && must_be_true(c, "use_routing_bias", err) &&
         mm_model_check(m, file, MM_BAD_INPUT, "E_CFG_RANGE", err);
}

const mm_arch mm_arch_minimax_m2 = {
    .names = {"MiniMaxM2ForCausalLM"},
    .model_types = {"minimaxm2"},
    .read_config = read_config,
    .rule = rules,
    .rule_count = sizeof rules / sizeof *rules,
};
