/* MiniMax-M2, M2.1, M2.5, M2.7: GQA with QK norm in every layer, plain pre-norm residual, sigmoid top-8 of 256 experts chosen with
 * a correction bias; released as block FP8. */
#include "convert/model/decoder_rules.h"

static const mm_rule rules[] = {
    MM_RULES_FIRST,
    MM_RULES_QKV(MM_ANY_LAYER),
    SAME(ATTN "q_norm.weight", MM_DIM_Q, MM_DIM_NONE, MM_ROWS, MM_KIND_PASS_THROUGH, MM_ANY_LAYER),
    SAME(ATTN "k_norm.weight", MM_DIM_KV, MM_DIM_NONE, MM_KV_ROWS, MM_KIND_PASS_THROUGH, MM_ANY_LAYER),
    MM_RULES_OUT(MM_ANY_LAYER),
    SAME(MOE "e_score_correction_bias", MM_DIM_EXPERTS, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_EXPERTS_LAYER),
    MM_RULES_LAST,
};

static bool read_config(const mm_json *config, const char *file, mm_model *m, mm_err *err) {
  mm_config c = {config, file};
  *m = (mm_model){.architecture = "MiniMaxM2ForCausalLM",
                  .family = MM_FAMILY_M2,
                  .router = MM_ROUTER_SIGMOID_BIAS,
                  .qk_norm = true,
                  .head_dim = 128,
                  .max_positions = 196608,
                  .rope_theta = 5e6,
                  MM_MODEL_NORMS(1e-6)};
  if (!mm_config_common(c, m, err) || !mm_config_plain_mlp(c, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++) m->attn[l] = MM_ATTN_FULL;
  if (!mm_config_attn_types(c, m, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++)
    if (m->attn[l] != MM_ATTN_FULL)
      return mm_fail(err, MM_UNSUPPORTED, "E_CFG_FEATURE", mm_at(file, NULL),
                     "found lightning attention in layer %u, expected full attention in %s", l, m->architecture);
  return mm_config_only(c, "scoring_func", "sigmoid", err) && mm_config_only(c, "qk_norm_type", "per_layer", err) &&
         mm_config_must_be(c, "use_qk_norm", true, err) && mm_config_must_be(c, "use_routing_bias", true, err) &&
         mm_model_check(m, file, MM_BAD_INPUT, "E_CFG_RANGE", err);
}

const mm_arch mm_arch_minimax_m2 = {
    .names = {"MiniMaxM2ForCausalLM"},
    .model_types = {"minimaxm2"},
    .read_config = read_config,
    .rule = rules,
    .rule_count = sizeof rules / sizeof *rules,
};
