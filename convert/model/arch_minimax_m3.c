/* MiniMax-M3 and M3.1-Flash: GQA with a norm of each head, in most layers over the blocks that an index branch chooses; norms that multiply
 * by 1 + weight; dense layers first, then sigmoid top-4 of 128 experts and a shared one, all with a clamped SwiGLU. Released with a
 * vision tower, which is left out: text only. */
#include <math.h>
#include <stdio.h>

#include "convert/model/decoder_rules.h"

#define MLP    L "mlp."
#define SHARED MOE "shared_experts."

static const mm_rule rules[] = {
    MM_RULES_FIRST,
    MM_RULES_QKV(MM_ANY_LAYER),
    SAME(ATTN "q_norm.weight", MM_DIM_HEAD, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_ANY_LAYER),
    SAME(ATTN "k_norm.weight", MM_DIM_HEAD, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_ANY_LAYER),
    SAME(ATTN "index_q_proj.weight", MM_DIM_INDEX_Q, MM_DIM_HIDDEN, MM_INDEX_ROWS, MM_KIND_INDEX, MM_SPARSE_LAYER),
    SAME(ATTN "index_k_proj.weight", MM_DIM_INDEX, MM_DIM_HIDDEN, MM_WHOLE, MM_KIND_INDEX, MM_SPARSE_LAYER),
    SAME(ATTN "index_q_norm.weight", MM_DIM_INDEX, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_SPARSE_LAYER),
    SAME(ATTN "index_k_norm.weight", MM_DIM_INDEX, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_SPARSE_LAYER),
    MM_RULES_OUT(MM_ANY_LAYER),
    SAME(MOE "e_score_correction_bias", MM_DIM_EXPERTS, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_EXPERTS_LAYER),
    RULE(MLP "gate_proj.weight", MLP "gate_up_proj.weight", MM_DIM_DENSE, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_DENSE_LAYER),
    RULE(MLP "up_proj.weight", MLP "gate_up_proj.weight", MM_DIM_DENSE, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_DENSE_LAYER),
    SAME(MLP "down_proj.weight", MM_DIM_HIDDEN, MM_DIM_DENSE, MM_COLS, MM_KIND_LINEAR, MM_DENSE_LAYER),
    RULE(SHARED "gate_proj.weight", SHARED "gate_up_proj.weight", MM_DIM_SHARED, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_SHARED_LAYER),
    RULE(SHARED "up_proj.weight", SHARED "gate_up_proj.weight", MM_DIM_SHARED, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, MM_SHARED_LAYER),
    SAME(SHARED "down_proj.weight", MM_DIM_HIDDEN, MM_DIM_SHARED, MM_COLS, MM_KIND_LINEAR, MM_SHARED_LAYER),
    MM_RULES_LAST,
};

/* The names of the release, of the text model alone, and of transformers. */
static const mm_alias naming[] = {
    {"language_model.model.", "model."},
    {"language_model.lm_head.", "lm_head."},
    {"language_model.mtp.", "mtp."},
    {"model.language_model.", "model."},
    {".self_attn.indexer.", ".self_attn.index_"},
    {".mlp.gate.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias"},
    {NULL, NULL},
};
static const char *const left_out[] = {"model.dspark.", "model.mtp.", "multi_modal_projector.", "patch_merge_mlp.", "vision_tower.", NULL};

#define KEYS(...) \
  (const char *const[]) { __VA_ARGS__, NULL }
#define FEATURE(...) mm_fail(err, MM_UNSUPPORTED, "E_CFG_FEATURE", mm_at(c.file, NULL), __VA_ARGS__)

/* Absent or 0. */
static bool must_be_zero(mm_config c, const char *key, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, key);
  if (mm_json_type_of(v) == MM_JSON_NULL || (mm_json_type_of(v) == MM_JSON_INT && mm_json_int(v) == 0)) return true;
  return FEATURE("key \"%s\": found %s, only 0 is supported", key, MM_SHOWN_JSON(v));
}

/* transformers writes "silu" into its own form of the config and means swigluoai. */
static bool activation(mm_config c, mm_model *m, mm_err *err) {
  const mm_json *act = mm_json_get(c.obj, "hidden_act"), *type = mm_json_get(c.obj, "model_type");
  const bool own_form = mm_json_is(type, "minimax_m3_vl_text");
  if (mm_json_type_of(act) == MM_JSON_NULL)
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL), "key \"hidden_act\": found nothing, expected \"swigluoai\"");
  if (!mm_json_is(act, "swigluoai") && !(own_form && mm_json_is(act, "silu")))
    return FEATURE("key \"hidden_act\": found %s, only \"swigluoai\" is supported", MM_SHOWN_JSON(act));
  m->activation = MM_ACTIVATION_SWIGLUOAI;
  m->act_alpha = 1.702, m->act_limit = 7, m->act_beta = 1;
  return mm_config_number_or(c, KEYS("swiglu_alpha"), &m->act_alpha, err) &&
         mm_config_number_or(c, KEYS("swiglu_limit"), &m->act_limit, err) && mm_config_number_or(c, KEYS("swiglu_beta"), &m->act_beta, err);
}

#define CONTRADICT(key, found, l, expected, other)               \
  mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(c.file, NULL), \
          "key \"%s\": found \"%s\" in entry %u, expected \"%s\" as in key \"%s\", which means the same", key, found, l, expected, other)

/* The types of layers from the release's key in `in` and transformers' in c, which must agree where both are there. */
static bool layer_list(mm_config in, mm_config c, const mm_config_list list[2], uint32_t layers, uint8_t *out, bool *found, mm_err *err) {
  uint8_t again[MM_MAX_LAYERS] = {0};
  bool both;
  if (!mm_config_layers(in, &list[0], layers, out, found, err) || !mm_config_layers(c, &list[1], layers, again, &both, err)) return false;
  for (uint32_t l = 0; both && l < layers; l++) {
    if (*found && again[l] != out[l])
      return CONTRADICT(list[1].key, list[1].word[again[l] == list[1].value[1]], l, list[1].word[out[l] == list[1].value[1]], list[0].key);
    out[l] = again[l];
  }
  *found = *found || both;
  return true;
}

static bool feed_forward(mm_config c, mm_model *m, mm_err *err) {
  static const mm_config_list list[] = {{"moe_layer_freq", {"dense", "sparse"}, {MM_FFN_DENSE, MM_FFN_EXPERTS}},
                                        {"mlp_layer_types", {"dense", "sparse"}, {MM_FFN_DENSE, MM_FFN_EXPERTS}}};
  bool found, dense = false;
  uint32_t shared = 1;
  double scale = NAN;
  if (!layer_list(c, c, list, m->layers, m->ffn, &found, err)) return false;
  for (uint32_t l = 0; l < m->layers; l++) dense |= m->ffn[l] == MM_FFN_DENSE;
  if ((dense && !mm_config_u32(c, KEYS("dense_intermediate_size"), &m->dense_intermediate, err)) ||
      !mm_config_u32(c, KEYS("shared_intermediate_size"), &m->shared_intermediate, err) ||
      !mm_config_u32_or(c, KEYS("n_shared_experts"), &shared, err) || !mm_config_number_or(c, KEYS("routed_scaling_factor"), &scale, err))
    return false;
  if (shared != 1) return FEATURE("key \"n_shared_experts\": found %u, only 1 is supported", shared);
  if (isnan(scale)) /* those who read it without the key take different ones */
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL),
                   "key \"routed_scaling_factor\": found nothing, expected a number");
  if (!(scale > 0))
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(c.file, NULL),
                   "key \"routed_scaling_factor\": found %g, expected a positive number", scale);
  m->routed_scale = scale;
  return mm_config_only(c, "scoring_func", "sigmoid", err) && mm_config_must_be(c, "use_routing_bias", true, err);
}

/* A sparse layer with an index value would have projections that these rules do not. */
static bool no_index_value(mm_config c, const mm_model *m, mm_err *err) {
  static const mm_config_list list = {"sparse_disable_index_value", {"no", "yes"}, {0, 1}};
  uint8_t off[MM_MAX_LAYERS];
  bool found;
  if (!mm_config_layers(c, &list, m->layers, off, &found, err)) return false;
  for (uint32_t l = 0; found && l < m->layers; l++)
    if (m->attn[l] == MM_ATTN_SPARSE && !off[l])
      return FEATURE("key \"sparse_disable_index_value\": found 0 in entry %u, only 1 is supported of a sparse layer", l);
  return true;
}

/* One number of the index branch: the release's key in `in`, transformers' in c, or both, which agree. */
static bool index_number(mm_config in, const char *key, mm_config c, const char *alias, uint32_t *out, mm_err *err) {
  uint32_t own = 0, theirs = 0;
  if (!mm_config_u32_or(in, KEYS(key), &own, err) || !mm_config_u32_or(c, KEYS(alias), &theirs, err)) return false;
  if (own && theirs && own != theirs)
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(c.file, NULL),
                   "key \"%s\": found %u, expected %u as in key \"%s\", which means the same", alias, theirs, own, key);
  if (own || theirs) *out = own ? own : theirs;
  return true;
}

static bool attention(mm_config c, mm_model *m, mm_err *err) {
  static const mm_config_list list[] = {{"sparse_attention_freq", {"full_attention", "minimax_m3_sparse"}, {MM_ATTN_FULL, MM_ATTN_SPARSE}},
                                        {"layer_types", {"full_attention", "minimax_m3_sparse"}, {MM_ATTN_FULL, MM_ATTN_SPARSE}}};
  const mm_json *obj = mm_json_get(c.obj, "sparse_attention_config");
  const mm_config in = {mm_json_type_of(obj) == MM_JSON_OBJ ? obj : NULL, c.file};
  bool found, use = true, sparse = false;
  if (obj && !in.obj && mm_json_type_of(obj) != MM_JSON_NULL)
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(c.file, NULL), "key \"sparse_attention_config\": found %s, expected an object",
                   MM_SHOWN_JSON(obj));
  for (uint32_t l = 0; l < m->layers; l++) m->attn[l] = MM_ATTN_FULL;
  if (!mm_config_bool_or(in, "use_sparse_attention", &use, err) || !layer_list(in, c, list, m->layers, m->attn, &found, err)) return false;
  const bool both = mm_json_type_of(mm_json_get(c.obj, list[1].key)) != MM_JSON_NULL;
  for (uint32_t l = 0; l < m->layers; l++)
    if (!use && both && m->attn[l] == MM_ATTN_SPARSE)
      return CONTRADICT(list[1].key, list[1].word[1], l, list[1].word[0], "use_sparse_attention");
  for (uint32_t l = 0; l < m->layers; l++) {
    if (!use) m->attn[l] = MM_ATTN_FULL;
    sparse |= m->attn[l] == MM_ATTN_SPARSE;
  }
  if (!sparse) return true;
  m->index_heads = 4, m->index_dim = 128, m->index_block = 128, m->index_top_k = 16, m->index_local = 1;
  return index_number(in, "sparse_num_index_heads", c, "index_n_heads", &m->index_heads, err) &&
         index_number(in, "sparse_index_dim", c, "index_head_dim", &m->index_dim, err) &&
         index_number(in, "sparse_block_size", c, "index_block_size", &m->index_block, err) &&
         index_number(in, "sparse_topk_blocks", c, "index_topk_blocks", &m->index_top_k, err) &&
         index_number(in, "sparse_local_block", c, "index_local_blocks", &m->index_local, err) &&
         must_be_zero(in, "sparse_init_block", err) && must_be_zero(in, "sparse_init_tokens", err) &&
         must_be_zero(in, "sparse_local_tokens", err) && mm_config_only(in, "sparse_score_type", "max", err) && no_index_value(in, m, err);
}

/* rotary_dim and partial_rotary_factor, where both are there. */
static bool rotary_agrees(mm_config c, const mm_model *m, mm_err *err) {
  double factor = 0;
  const mm_json *nested = mm_json_get(c.obj, "rope_parameters");
  const mm_config in = {mm_json_type_of(nested) == MM_JSON_OBJ ? nested : NULL, c.file};
  if (!mm_config_number_or(in, KEYS("partial_rotary_factor"), &factor, err) ||
      !mm_config_number_or(c, KEYS("partial_rotary_factor"), &factor, err))
    return false;
  return factor == 0 || factor * m->head_dim == m->rotary_dim ||
         mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(c.file, NULL),
                 "found rotary_dim %u and partial_rotary_factor %g of head_dim %u, expected the same", m->rotary_dim, factor, m->head_dim);
}

static bool read_config(const mm_json *config, const char *file, mm_model *m, mm_err *err) {
  const mm_json *text = mm_json_get(config, "text_config");
  const mm_config outer = {config, file}, c = {mm_json_type_of(text) == MM_JSON_OBJ ? text : config, file};
  *m = (mm_model){.family = MM_FAMILY_M3,
                  .router = MM_ROUTER_SIGMOID_BIAS,
                  .qk_norm = true,
                  .qk_norm_per_head = true,
                  .norm_offset = true,
                  .head_dim = 128,
                  .max_positions = 524288,
                  .rope_theta = 5e6,
                  MM_MODEL_NORMS(1e-6)};
  snprintf(m->architecture, sizeof m->architecture, "%s", mm_arch_name(&mm_arch_minimax_m3, config));
  return mm_config_common(c, m, err) && mm_config_must_be(outer, "tie_word_embeddings", false, err) && rotary_agrees(c, m, err) &&
         mm_config_must_be(c, "use_gemma_norm", true, err) && mm_config_must_be(c, "use_qk_norm", true, err) &&
         mm_config_only(c, "qk_norm_type", "per_head", err) && mm_config_must_be(c, "attention_output_gate", false, err) &&
         activation(c, m, err) && feed_forward(c, m, err) && attention(c, m, err) &&
         mm_model_check(m, file, MM_BAD_INPUT, "E_CFG_RANGE", err);
}

const mm_arch mm_arch_minimax_m3 = {
    .names = {"MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForConditionalGeneration",
              "MiniMaxM3VLForCausalLM"},
    .model_types = {"minimaxm3vl", "minimaxm3", "minimaxm3vl", "minimaxm3vltext", "minimaxm3text"},
    .read_config = read_config,
    .rule = rules,
    .rule_count = sizeof rules / sizeof *rules,
    .naming = naming,
    .left_out = left_out,
};
