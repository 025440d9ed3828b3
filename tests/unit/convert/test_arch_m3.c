/* MiniMax-M3's config.json in its published forms: the release's, the one that transformers writes back, and text-only ones. A value that
 * is not M3's, or would be computed otherwise, is refused by the name of its key. */
#include "tests/unit/convert/config_text.h"
#include "tests/unit/unit.h"

/* The release's form, with the word for M2 that stands in it. All values differ. */
static const char m3[] =
    "{\"architectures\":[\"MiniMaxM3SparseForConditionalGeneration\"],\"model_type\":\"minimax_m3_vl\",\"image_token_index\":517,"
    "\"tie_word_embeddings\":false,\"vision_config\":{\"hidden_size\":48,\"hidden_act\":\"gelu\"},\"text_config\":{"
    "\"model_type\":\"minimax_m2\",\"hidden_act\":\"swigluoai\",\"hidden_size\":96,\"num_hidden_layers\":4,\"num_attention_heads\":24,"
    "\"num_key_value_heads\":8,\"head_dim\":20,\"rotary_dim\":10,\"partial_rotary_factor\":0.5,\"intermediate_size\":48,"
    "\"dense_intermediate_size\":192,\"shared_intermediate_size\":64,\"n_shared_experts\":1,\"num_local_experts\":9,"
    "\"num_experts_per_tok\":5,\"scoring_func\":\"sigmoid\",\"use_routing_bias\":true,\"routed_scaling_factor\":2.5,"
    "\"moe_layer_freq\":[0,1,0,1],\"swiglu_alpha\":1.75,\"swiglu_limit\":6.5,\"swiglu_beta\":1.25,\"rms_norm_eps\":3e-06,"
    "\"use_gemma_norm\":true,\"use_qk_norm\":true,\"qk_norm_type\":\"per_head\",\"attention_output_gate\":false,\"rope_theta\":6000000,"
    "\"max_position_embeddings\":4096,\"vocab_size\":300,\"tie_word_embeddings\":false,\"num_mtp_modules\":7,"
    "\"sparse_attention_config\":{\"use_sparse_attention\":true,\"sparse_attention_freq\":[0,0,1,1],\"sparse_num_index_heads\":4,"
    "\"sparse_index_dim\":28,\"sparse_block_size\":32,\"sparse_topk_blocks\":11,\"sparse_local_block\":2,\"sparse_init_block\":0,"
    "\"sparse_score_type\":\"max\",\"sparse_disable_index_value\":[0,0,1,1]}}}";

/* The config as transformers writes it back: no sparse_attention_config, and "silu" where swigluoai is meant. */
static const char saved[] =
    "{\"architectures\":[\"MiniMaxM3SparseForConditionalGeneration\"],\"model_type\":\"minimax_m3_vl\",\"text_config\":{"
    "\"model_type\":\"minimax_m3_vl_text\",\"hidden_act\":\"silu\",\"hidden_size\":96,\"num_hidden_layers\":4,\"num_attention_heads\":24,"
    "\"num_key_value_heads\":8,\"head_dim\":20,\"intermediate_size\":48,\"dense_intermediate_size\":192,\"shared_intermediate_size\":64,"
    "\"num_local_experts\":9,\"num_experts_per_tok\":5,\"routed_scaling_factor\":2.5,\"swiglu_alpha\":1.75,\"swiglu_limit\":6.5,"
    "\"rms_norm_eps\":3e-06,\"max_position_embeddings\":4096,\"vocab_size\":300,"
    "\"rope_parameters\":{\"rope_theta\":6000000,\"partial_rotary_factor\":0.5,\"rope_type\":\"default\"},"
    "\"layer_types\":[\"full_attention\",\"full_attention\",\"minimax_m3_sparse\",\"minimax_m3_sparse\"],"
    "\"mlp_layer_types\":[\"dense\",\"sparse\",\"dense\",\"sparse\"],\"index_n_heads\":4,\"index_head_dim\":28,\"index_block_size\":32,"
    "\"index_topk_blocks\":11,\"index_local_blocks\":2}}";

static void assert_same(const mm_model *a, const mm_model *b) {
  const char *key = "";
  if (!mm_model_same(a, b, &key)) fail_msg("models differ in %s", key);
}

TEST(test_released_form) {
  const mm_model m = accepted(m3);
  assert_string_equal(m.architecture, "MiniMaxM3SparseForConditionalGeneration");
  assert_true(m.family == MM_FAMILY_M3 && m.router == MM_ROUTER_SIGMOID_BIAS && m.activation == MM_ACTIVATION_SWIGLUOAI);
  assert_true(m.qk_norm && m.qk_norm_per_head && m.norm_offset && !m.postnorm);
  const uint64_t found[] = {m.hidden,    m.layers,      m.heads,       m.kv_heads,     m.head_dim,           m.rotary_dim,
                            m.experts,   m.top_k,       m.vocab,       m.intermediate, m.dense_intermediate, m.shared_intermediate,
                            m.index_dim, m.index_block, m.index_top_k, m.index_heads,  m.index_local,        m.max_positions};
  const uint64_t expected[] = {96, 4, 24, 8, 20, 10, 9, 5, 300, 48, 192, 64, 28, 32, 11, 4, 2, 4096};
  assert_memory_equal(found, expected, sizeof expected);
  assert_true(m.routed_scale == 2.5 && m.act_alpha == 1.75 && m.act_limit == 6.5 && m.act_beta == 1.25);
  assert_true(m.rope_theta == 6e6 && m.norm_eps == 3e-6);
  const uint8_t attn[] = {1, 1, 2, 2}, ffn[] = {1, 0, 1, 0};
  assert_memory_equal(m.attn, attn, sizeof attn);
  assert_memory_equal(m.ffn, ffn, sizeof ffn);
}

TEST(test_saved_form) {
  char *beta = edited(m3, "\"swiglu_beta\":1.25,", ""); /* absent: 1 */
  const mm_model a = accepted(beta), b = accepted(saved);
  free(beta);
  assert_true(b.act_beta == 1);
  assert_same(&a, &b);
  /* Both forms of a key may stand, with the same value. */
  static const char any[] = "\"num_mtp_modules\":7", full[] = "\"full_attention\",\"full_attention\",", sparse[] = "\"minimax_m3_sparse\"";
  char types[256];
  READS(m3, any, "\"index_block_size\":32,\"index_n_heads\":4,\"index_topk_blocks\":11,\"index_local_blocks\":2", index_block, 32);
  READS(m3, any, "\"mlp_layer_types\":[\"dense\",\"sparse\",\"dense\",\"sparse\"]", ffn[0], MM_FFN_DENSE);
  snprintf(types, sizeof types, "\"layer_types\":[%s%s,%s]", full, sparse, sparse);
  READS(m3, any, types, attn[2], MM_ATTN_SPARSE);
  refused(m3, any, "\"index_block_size\":99", MM_BAD_INPUT, "E_CFG_RANGE",
          "key \"index_block_size\": found 99, expected 32 as in key \"sparse_block_size\"");
  refused(m3, any, "\"index_local_blocks\":1", MM_BAD_INPUT, "E_CFG_RANGE", "found 1, expected 2 as in key \"sparse_local_block\"");
  refused(m3, any, "\"mlp_layer_types\":[\"dense\",\"sparse\",\"sparse\",\"sparse\"]", MM_BAD_INPUT, "E_CFG_RANGE",
          "key \"mlp_layer_types\": found \"sparse\" in entry 2, expected \"dense\" as in key \"moe_layer_freq\"");
  snprintf(types, sizeof types, "\"layer_types\":[%s%s,\"full_attention\"]", full, sparse);
  refused(m3, any, types, MM_BAD_INPUT, "E_CFG_RANGE",
          "key \"layer_types\": found \"full_attention\" in entry 3, expected \"minimax_m3_sparse\" as in key \"sparse_attention_freq\"");
  refused(saved, "\"index_n_heads\":4", "\"index_n_heads\":4,\"sparse_attention_config\":{\"use_sparse_attention\":false}", MM_BAD_INPUT,
          "E_CFG_RANGE", "found \"minimax_m3_sparse\" in entry 2, expected \"full_attention\" as in key \"use_sparse_attention\"");
  refused(saved, "\"model_type\":\"minimax_m3_vl_text\"", "\"model_type\":\"minimax_m2\"", MM_UNSUPPORTED, "E_CFG_FEATURE",
          "key \"hidden_act\": found \"silu\", only \"swigluoai\" is supported");
}

TEST(test_names) {
  static const char head[] = "\"architectures\":[\"MiniMaxM3SparseForConditionalGeneration\"],\"model_type\":\"minimax_m3_vl\"";
  static const char *const same[] = {"\"architectures\":[\"MiniMaxM3SparseForCausalLM\"],\"model_type\":\"minimax_m2\"",
                                     "\"architectures\":[\"MiniMaxM3VLForConditionalGeneration\"]",
                                     "\"architectures\":[\"MiniMaxM3VLForCausalLM\"],\"model_type\":\"minimax_m3_vl_text\"",
                                     "\"model_type\":\"minimax_m3_vl\"",
                                     "\"model_type\":\"minimax_m3_vl_text\"",
                                     "\"model_type\":\"minimax_m3_text\"",
                                     "\"model_type\":\"minimax_m3\""};
  for (size_t i = 0; i < sizeof same / sizeof *same; i++) READS(m3, head, same[i], family, MM_FAMILY_M3);
  /* The text model's own word decides nothing, whichever it is, and neither do its architectures. */
  READS(m3, "\"model_type\":\"minimax_m2\"", "\"model_type\":\"minimax_m2\",\"architectures\":[\"MiniMaxM2ForCausalLM\"]", family,
        MM_FAMILY_M3);
  refused(m3, head, "\"architectures\":[\"MiniMaxM2ForCausalLM\"]", MM_BAD_INPUT, "E_CFG_MISSING", "");
  /* Text alone: the hyperparameters at top level. */
  const char *text = strstr(m3, "\"model_type\":\"minimax_m2\"");
  char flat[sizeof m3 + 64];
  snprintf(flat, sizeof flat, "{\"architectures\":[\"MiniMaxM3SparseForConditionalGeneration\"],%.*s", (int)strlen(text) - 1, text);
  const mm_model a = accepted(m3), b = accepted(flat);
  assert_same(&a, &b);
  char *as_m2 = edited(flat, "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM2ForCausalLM");
  refused(as_m2, "\"use_qk_norm\"", "\"use_qk_norm\"", MM_UNSUPPORTED, "E_CFG_FEATURE", "\"shared_intermediate_size\"");
  free(as_m2);
}

TEST(test_defaults) {
  READS(m3, "\"rotary_dim\":10,", "", rotary_dim, 10);
  READS(m3, "\"partial_rotary_factor\":0.5,", "", rotary_dim, 10);
  READS(m3, "\"max_position_embeddings\":4096,", "", max_positions, 524288);
  READS(m3, "\"rope_theta\":6000000,", "", rope_theta, 5e6);
  READS(m3, "\"rms_norm_eps\":3e-06,", "", norm_eps, 1e-6);
  READS(m3, "\"swiglu_alpha\":1.75,", "", act_alpha, 1.702);
  READS(m3, "\"swiglu_limit\":6.5,", "", act_limit, 7);
  READS(m3, "\"sparse_block_size\":32,", "", index_block, 128);
  READS(m3, "\"sparse_index_dim\":28,", "", index_dim, 128);
  READS(m3, "\"sparse_topk_blocks\":11,", "", index_top_k, 16);
  READS(m3, "\"sparse_local_block\":2,", "", index_local, 1);
  READS(m3, "\"moe_layer_freq\":[0,1,0,1],", "", ffn[0], MM_FFN_EXPERTS);
  READS(m3, "\"use_sparse_attention\":true", "\"use_sparse_attention\":false", attn[3], MM_ATTN_FULL);
  READS(m3, "\"use_sparse_attention\":true", "\"use_sparse_attention\":false", index_heads, 0);
  READS(m3, "\"sparse_attention_freq\":[0,0,1,1],", "", attn[3], MM_ATTN_FULL);
}

TEST(test_refused) {
  static const struct {
    const char *old, *new, *says;
  } feature[] = {
      {"\"hidden_act\":\"swigluoai\"", "\"hidden_act\":\"gelu\"", "key \"hidden_act\": found \"gelu\""},
      {"\"n_shared_experts\":1", "\"n_shared_experts\":2", "key \"n_shared_experts\": found 2"},
      {"\"scoring_func\":\"sigmoid\"", "\"scoring_func\":\"softmax\"", "key \"scoring_func\""},
      {"\"use_routing_bias\":true", "\"use_routing_bias\":false", "key \"use_routing_bias\""},
      {"\"use_gemma_norm\":true", "\"use_gemma_norm\":false", "key \"use_gemma_norm\""},
      {"\"use_qk_norm\":true", "\"use_qk_norm\":false", "key \"use_qk_norm\""},
      {"\"qk_norm_type\":\"per_head\"", "\"qk_norm_type\":\"per_layer\"", "key \"qk_norm_type\""},
      {"\"attention_output_gate\":false", "\"attention_output_gate\":true", "key \"attention_output_gate\""},
      {"\"rope_theta\":6000000", "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2}", "key \"rope_type\""},
      {"\"tie_word_embeddings\":false,\"vision", "\"tie_word_embeddings\":true,\"vision", "key \"tie_word_embeddings\""},
      {"\"tie_word_embeddings\":false,\"num_mtp", "\"tie_word_embeddings\":true,\"num_mtp", "key \"tie_word_embeddings\""},
      {"\"sparse_init_block\":0", "\"sparse_init_block\":1", "key \"sparse_init_block\": found 1"},
      {"\"sparse_init_block\":0", "\"sparse_init_tokens\":128", "key \"sparse_init_tokens\": found 128"},
      {"\"sparse_init_block\":0", "\"sparse_local_tokens\":64", "key \"sparse_local_tokens\": found 64"},
      {"\"sparse_score_type\":\"max\"", "\"sparse_score_type\":\"lse\"", "key \"sparse_score_type\""},
      {"\"sparse_disable_index_value\":[0,0,1,1]", "\"sparse_disable_index_value\":[0,0,1,0]",
       "\"sparse_disable_index_value\": found 0 in entry 3"},
  };
  for (size_t i = 0; i < sizeof feature / sizeof *feature; i++)
    refused(m3, feature[i].old, feature[i].new, MM_UNSUPPORTED, "E_CFG_FEATURE", feature[i].says);
  static const struct {
    const char *old, *new, *code, *says;
  } bad[] = {
      {"\"hidden_act\":\"swigluoai\",", "", "E_CFG_MISSING", "key \"hidden_act\""},
      {"\"rotary_dim\":10,\"partial_rotary_factor\":0.5,", "", "E_CFG_MISSING", "neither it nor partial_rotary_factor"},
      {"\"routed_scaling_factor\":2.5,", "", "E_CFG_MISSING", "key \"routed_scaling_factor\""},
      {"\"routed_scaling_factor\":2.5", "\"routed_scaling_factor\":0", "E_CFG_RANGE", "key \"routed_scaling_factor\": found 0"},
      {"\"dense_intermediate_size\":192,", "", "E_CFG_MISSING", "key \"dense_intermediate_size\""},
      {"\"shared_intermediate_size\":64,", "", "E_CFG_MISSING", "key \"shared_intermediate_size\""},
      {"\"moe_layer_freq\":[0,1,0,1]", "\"moe_layer_freq\":[0,1,0]", "E_CFG_RANGE", "\"moe_layer_freq\": found 3 entries, expected 4"},
      {"\"moe_layer_freq\":[0,1,0,1]", "\"moe_layer_freq\":[0,1,0,2]", "E_CFG_RANGE", "\"moe_layer_freq\": found 2 in entry 3"},
      {"\"moe_layer_freq\":[0,1,0,1]", "\"moe_layer_freq\":1", "E_CFG_TYPE", "\"moe_layer_freq\": found 1, expected a list"},
      {"\"sparse_attention_freq\":[0,0,1,1]", "\"sparse_attention_freq\":[0,0,1]", "E_CFG_RANGE", "\"sparse_attention_freq\": found 3"},
      {"\"sparse_disable_index_value\":[0,0,1,1]", "\"sparse_disable_index_value\":[1]", "E_CFG_RANGE", "\"sparse_disable_index_value\""},
      {"\"sparse_attention_config\":{", "\"sparse_attention_config\":7,\"x\":{", "E_CFG_TYPE", "\"sparse_attention_config\""},
      {"\"sparse_num_index_heads\":4", "\"sparse_num_index_heads\":3", "E_CFG_RANGE", "index_heads: found 3, expected a divisor of 8"},
      {"\"sparse_num_index_heads\":4", "\"sparse_num_index_heads\":16", "E_CFG_RANGE", "index_heads: found 16, expected 1 to 8"},
      {"\"sparse_index_dim\":28", "\"sparse_index_dim\":8", "E_CFG_RANGE", "index_dim: found 8, expected 10 to 1024"},
      {"\"sparse_topk_blocks\":11", "\"sparse_topk_blocks\":1", "E_CFG_RANGE", "index_local: found 2, expected 1 to 1"},
      {"\"sparse_topk_blocks\":11", "\"sparse_topk_blocks\":65", "E_CFG_RANGE", "index_top_k: found 65, expected 1 to 64"},
      {"\"sparse_local_block\":2", "\"sparse_local_block\":0", "E_CFG_RANGE", "key \"sparse_local_block\": found 0"},
      {"\"partial_rotary_factor\":0.5", "\"partial_rotary_factor\":1", "E_CFG_RANGE", "key \"rotary_dim\": found 10, expected 20"},
      {"\"rotary_dim\":10", "\"rotary_dim\":9", "E_CFG_RANGE", "key \"rotary_dim\": found 9, expected 10"},
      {"\"swiglu_limit\":6.5", "\"swiglu_limit\":0", "E_CFG_RANGE", "act_limit: found 0"},
      {"\"swiglu_alpha\":1.75", "\"swiglu_alpha\":\"1.702\"", "E_CFG_TYPE", "key \"swiglu_alpha\""},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) refused(m3, bad[i].old, bad[i].new, MM_BAD_INPUT, bad[i].code, bad[i].says);
}

int main(void) { return run_unit_tests(NULL, NULL); }
