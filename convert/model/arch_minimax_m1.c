/* MiniMax-Text-01 and M1 (remote-code form) and their transformers-native "-hf" exports: lightning attention in most layers, GQA
 * in the others, DeepNorm residual, softmax top-2 experts. */
#include <stdio.h>
#include <string.h>

#include "convert/model/decoder_rules.h"

static const mm_rule rules[] = {
    MM_RULES_FIRST,
    SAME(ATTN "qkv_proj.weight", MM_DIM_QKV, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_LIGHTNING_LAYER),
    SAME(ATTN "output_gate.weight", MM_DIM_Q, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_LIGHTNING_LAYER),
    SAME(ATTN "norm.weight", MM_DIM_Q, MM_DIM_NONE, MM_ROWS, MM_KIND_PASS_THROUGH, MM_LIGHTNING_LAYER),
    SAME(ATTN "out_proj.weight", MM_DIM_HIDDEN, MM_DIM_Q, MM_COLS, MM_KIND_LINEAR, MM_LIGHTNING_LAYER),
    MM_RULES_QKV(MM_FULL_LAYER),
    MM_RULES_OUT(MM_FULL_LAYER),
    MM_RULES_LAST,
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
                  MM_MODEL_NORMS(1e-5)};
  snprintf(m->architecture, sizeof m->architecture, "%s", name);
  if (!mm_config_common(c, m, err) || !mm_config_plain_mlp(c, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++) m->attn[l] = native && l % 2 == 1 ? MM_ATTN_LIGHTNING : MM_ATTN_FULL;
  if (native && !mm_config_must_be(c, "postnorm", true, err)) return false;
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
