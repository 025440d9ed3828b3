/* convert/arch*: every form and default of a config.json that the families publish is read as documented; every config that is
 * not one of theirs is refused with a line that names file and key; the rules name every tensor of the released models once. The
 * marks C02 … are those of the fault catalogue. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/model/rule.h"
#include "convert/plan/plan.h"
#include "formats/system/file.h"
#include "tests/unit/convert/config_text.h"
#include "tests/unit/unit.h"

/* All values differ, so that a swapped key shows. */
static const char m1[] =
    "{\"architectures\":[\"MiniMaxM1ForCausalLM\"],\"model_type\":\"minimax_m1\",\"attn_type_list\":[0,1,0,0,1],\"hidden_size\":96,"
    "\"num_hidden_layers\":5,\"num_attention_heads\":12,\"num_key_value_heads\":4,\"head_dim\":20,\"intermediate_size\":48,"
    "\"num_local_experts\":7,\"num_experts_per_tok\":3,\"rotary_dim\":10,\"rope_theta\":10000000,\"max_position_embeddings\":4096,"
    "\"rms_norm_eps\":2e-05,\"postnorm\":true,\"layernorm_full_attention_alpha\":2.5,\"layernorm_full_attention_beta\":0.75,"
    "\"layernorm_linear_attention_alpha\":3.5565588200778455,\"layernorm_linear_attention_beta\":1.25,\"layernorm_mlp_alpha\":1.5,"
    "\"layernorm_mlp_beta\":0.5,\"shared_intermediate_size\":0,\"shared_moe_mode\":\"sigmoid\",\"sliding_window\":null,"
    "\"hidden_act\":\"silu\",\"tie_word_embeddings\":false,\"vocab_size\":300,\"auto_map\":{\"AutoModel\":\"evil.Class\"}}";
static const char m2[] =
    "{\"architectures\":[\"MiniMaxM2ForCausalLM\"],\"model_type\":\"minimax_m2\",\"attn_type_list\":[1,1,1],\"hidden_size\":80,"
    "\"num_hidden_layers\":3,\"num_attention_heads\":12,\"num_key_value_heads\":4,\"head_dim\":20,\"intermediate_size\":48,"
    "\"num_local_experts\":9,\"num_experts_per_tok\":5,\"rotary_dim\":6,\"rope_theta\":6000000,\"max_position_embeddings\":204800,"
    "\"rms_norm_eps\":3e-06,\"scoring_func\":\"sigmoid\",\"use_routing_bias\":true,\"use_qk_norm\":true,\"qk_norm_type\":\"per_layer\","
    "\"shared_intermediate_size\":0,\"mlp_intermediate_size\":8192,\"use_mtp\":true,\"num_mtp_modules\":3,\"mtp_transformer_layers\":1,"
    "\"sliding_window\":null,\"attn_window_size\":null,\"swa_rope_theta\":-1.0,\"tie_word_embeddings\":false,\"vocab_size\":300}";

static void assert_deepnorm(mm_deepnorm d, double alpha, double beta) {
  assert_true(d.alpha == alpha);
  assert_true(d.beta == beta);
}

TEST(test_m1) {
  mm_model m = accepted(m1);
  assert_string_equal(m.architecture, "MiniMaxM1ForCausalLM");
  assert_int_equal(m.family, MM_FAMILY_M1);
  assert_int_equal(m.router, MM_ROUTER_SOFTMAX);
  assert_true(m.postnorm && !m.qk_norm);
  const uint64_t found[] = {m.hidden,  m.layers, m.heads,        m.kv_heads, m.head_dim,     m.rotary_dim,
                            m.experts, m.top_k,  m.intermediate, m.vocab,    m.max_positions};
  const uint64_t expected[] = {96, 5, 12, 4, 20, 10, 7, 3, 48, 300, 4096};
  assert_memory_equal(found, expected, sizeof expected);
  assert_true(m.rope_theta == 1e7 && m.norm_eps == 2e-5 && m.lightning_norm_eps == 1e-6);
  assert_deepnorm(m.deepnorm_lightning, 3.5565588200778455, 1.25);
  assert_deepnorm(m.deepnorm_full, 2.5, 0.75);
  assert_deepnorm(m.deepnorm_mlp, 1.5, 0.5);
  const uint8_t attn[] = {0, 1, 0, 0, 1};
  assert_memory_equal(m.attn, attn, sizeof attn);
}

TEST(test_m2) {
  mm_model m = accepted(m2);
  assert_string_equal(m.architecture, "MiniMaxM2ForCausalLM");
  assert_int_equal(m.family, MM_FAMILY_M2);
  assert_int_equal(m.router, MM_ROUTER_SIGMOID_BIAS);
  assert_true(m.qk_norm && !m.postnorm);
  const uint64_t found[] = {m.hidden,  m.layers, m.heads,        m.kv_heads, m.head_dim,     m.rotary_dim,
                            m.experts, m.top_k,  m.intermediate, m.vocab,    m.max_positions};
  const uint64_t expected[] = {80, 3, 12, 4, 20, 6, 9, 5, 48, 300, 204800};
  assert_memory_equal(found, expected, sizeof expected);
  assert_true(m.rope_theta == 6e6 && m.norm_eps == 3e-6);
  assert_deepnorm(m.deepnorm_full, 1, 1);
  assert_deepnorm(m.deepnorm_mlp, 1, 1);
  for (int l = 0; l < 3; l++) assert_int_equal(m.attn[l], MM_ATTN_FULL);
}

/* The files as they are published, or lie in tests/data. */
static mm_model loaded(const char *path) {
  mm_model m = {0};
  mm_err err = {0};
  mm_json *j = mm_json_load(path, 1 << 20, &err);
  if (!j) fail_msg("%s", err.text);
  const mm_arch *arch = mm_arch_find(j, path, &err);
  if (!arch || !arch->read_config(j, path, &m, &err)) fail_msg("%s", err.text);
  mm_json_free(j);
  return m;
}

TEST(test_tiny_configs) {
  mm_model m = loaded("tests/data/tiny-m1/config.json");
  assert_true(m.family == MM_FAMILY_M1 && m.hidden == 256 && m.heads == 8 && m.head_dim == 64 && m.intermediate == 128 &&
              m.rotary_dim == 32);
  assert_deepnorm(m.deepnorm_lightning, 2.0, 1.0);
  assert_deepnorm(m.deepnorm_full, 1.8, 0.9);
  assert_deepnorm(m.deepnorm_mlp, 2.1, 1.1);
  m = loaded("tests/data/tiny-m2/config.json");
  assert_true(m.family == MM_FAMILY_M2 && m.experts == 8 && m.top_k == 4 && m.intermediate == 192 && m.rope_theta == 5e6);
}

TEST(test_released_config) {
  const char *shared = getenv("SHARED");
  const mm_path at = mm_path_of(shared ? shared : "../shared", "released/minimax-m1/config.json");
  const char *path = at.text;
  if (access(path, R_OK) != 0) {
    print_message("%s is not here\n", path);
    skip();
  }
  mm_model m = loaded(path);
  assert_true(m.hidden == 6144 && m.layers == 80 && m.heads == 64 && m.kv_heads == 8 && m.head_dim == 128 && m.rotary_dim == 64);
  assert_true(m.experts == 32 && m.top_k == 2 && m.intermediate == 9216 && m.vocab == 200064 && m.max_positions == 10240000);
  assert_true(m.rope_theta == 1e7 && m.norm_eps == 1e-5 && m.postnorm);
  assert_deepnorm(m.deepnorm_lightning, 3.5565588200778455, 1);
  assert_deepnorm(m.deepnorm_full, 3.5565588200778455, 1);
  assert_deepnorm(m.deepnorm_mlp, 3.5565588200778455, 1);
  for (uint32_t l = 0; l < 80; l++) assert_int_equal(m.attn[l], l % 8 == 7 ? MM_ATTN_FULL : MM_ATTN_LIGHTNING);
}

/* The transformers-native form: other names for the same facts, and post-norm without saying so. */
TEST(test_hf_form) {
  static const char hf[] =
      "{\"architectures\":[\"MiniMaxForCausalLM\"],\"model_type\":\"minimax\",\"layer_types\":[\"linear_attention\",\"full_attention\","
      "\"linear_attention\"],\"hidden_size\":96,\"num_hidden_layers\":3,\"num_attention_heads\":12,\"num_key_value_heads\":4,"
      "\"head_dim\":20,\"intermediate_size\":48,\"num_local_experts\":7,\"num_experts_per_tok\":3,\"vocab_size\":300,"
      "\"linear_attn_alpha_factor\":3.5,\"linear_attn_beta_factor\":1.25,\"full_attn_alpha_factor\":2.5,\"full_attn_beta_factor\":0.75,"
      "\"mlp_alpha_factor\":1.5,\"mlp_beta_factor\":0.5,\"block_size\":256,\"max_position_embeddings\":4096,"
      "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000000.0,\"partial_rotary_factor\":0.5}}";
  mm_model m = accepted(hf);
  assert_string_equal(m.architecture, "MiniMaxForCausalLM");
  assert_true(m.family == MM_FAMILY_M1 && m.postnorm);
  assert_true(m.rotary_dim == 10 && m.rope_theta == 1e7);
  assert_deepnorm(m.deepnorm_lightning, 3.5, 1.25);
  assert_deepnorm(m.deepnorm_full, 2.5, 0.75);
  assert_deepnorm(m.deepnorm_mlp, 1.5, 0.5);
  const uint8_t attn[] = {0, 1, 0};
  assert_memory_equal(m.attn, attn, sizeof attn);
  READS(hf, "\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\"],", "", attn[0], MM_ATTN_FULL);
  READS(hf, "\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\"],", "", attn[1], MM_ATTN_LIGHTNING);
  READS(hf, "\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\"],", "", attn[2], MM_ATTN_FULL);
  READS(hf, "\"block_size\":256", "\"postnorm\":true", postnorm, true);
  refused(hf, "\"block_size\":256", "\"postnorm\":false", MM_UNSUPPORTED, "E_CFG_FEATURE", "key \"postnorm\": found false, only true");
}

TEST(test_m1_defaults) {
  /* head_dim and rotary_dim absent: hidden / heads, and all of a head. */
  char *a = edited(m1, "\"head_dim\":20,", ""), *b = edited(a, "\"rotary_dim\":10,", "");
  mm_model m = accepted(b);
  assert_true(m.head_dim == 8 && m.rotary_dim == 8);
  free(a);
  free(b);
  READS(m1, "\"postnorm\":true", "\"x\":1", postnorm, false);
  READS(m1, "\"MiniMaxM1ForCausalLM\"", "\"MiniMaxText01ForCausalLM\"", postnorm, true);
  READS(m1, "\"rope_theta\":10000000", "\"x\":1", rope_theta, 1e6);
  READS(m1, "\"rope_theta\":10000000", "\"rope_theta\":null", rope_theta, 1e6);
  READS(m1, "\"max_position_embeddings\":4096", "\"x\":1", max_positions, 131072);
  READS(m1, "\"rms_norm_eps\":2e-05", "\"x\":1", norm_eps, 1e-5);
  READS(m1, "\"layernorm_full_attention_alpha\":2.5", "\"x\":1", deepnorm_full.alpha, 1);
  READS(m1, "\"layernorm_linear_attention_beta\":1.25", "\"x\":1", deepnorm_lightning.beta, 1);
  for (int l = 0; l < 5; l++) READS(m1, "\"attn_type_list\":[0,1,0,0,1],", "", attn[l], MM_ATTN_FULL);
  /* The default of post-norm goes by the class, which model_type names where there is no `architectures`. */
  static const struct {
    const char *type;
    bool postnorm;
  } type[] = {{"minimax_m1", false}, {"MiniMax-M1", false}, {"minimax_text_01", false}, {"MiniMaxText01", false}, {"minimax", true}};
  for (size_t i = 0; i < sizeof type / sizeof *type; i++) {
    char head[128];
    snprintf(head, sizeof head, "{\"model_type\":\"%s\",\"y\":1", type[i].type);
    a = edited(m1, "{\"architectures\":[\"MiniMaxM1ForCausalLM\"],\"model_type\":\"minimax_m1\"", head);
    READS(a, "\"postnorm\":true", "\"x\":1", postnorm, type[i].postnorm);
    b = edited(a, "\"attn_type_list\":[0,1,0,0,1],", "");
    READS(b, "\"hidden_size\":96", "\"hidden_size\":96", attn[1], type[i].postnorm ? MM_ATTN_LIGHTNING : MM_ATTN_FULL);
    free(a);
    free(b);
  }
}

TEST(test_m2_defaults) {
  /* Nothing says how much of a head is turned: all of it, as in transformers 5.24 and the release's own class. */
  READS(m2, "\"rotary_dim\":6,", "", rotary_dim, 20);
  READS(m2, "\"rotary_dim\":6,\"rope_theta\":6000000,", "\"rope_parameters\":{\"rope_theta\":6000000,\"rope_type\":\"default\"},",
        rotary_dim, 20);
  READS(m2, "\"rope_theta\":6000000,", "\"rope_parameters\":{\"rope_theta\":6000000,\"rope_type\":\"default\"},", rotary_dim, 6);
  char *a = edited(m2, "\"rotary_dim\":6,", "");
  READS(a, "\"head_dim\":20,", "", head_dim, 128);
  READS(a, "\"head_dim\":20,", "", rotary_dim, 128);
  free(a);
  READS(m2, "\"rope_theta\":6000000,", "", rope_theta, 5e6);
  READS(m2, "\"max_position_embeddings\":204800,", "", max_positions, 196608);
  READS(m2, "\"rms_norm_eps\":3e-06,", "", norm_eps, 1e-6);
  READS(m2, "\"attn_type_list\":[1,1,1],", "", attn[2], MM_ATTN_FULL);
  READS(m2, "\"scoring_func\":\"sigmoid\",", "", router, MM_ROUTER_SIGMOID_BIAS);
  READS(m2, "\"use_routing_bias\":true,\"use_qk_norm\":true,\"qk_norm_type\":\"per_layer\",", "", qk_norm, true);
  READS(m2, "{\"architectures\":[\"MiniMaxM2ForCausalLM\"],\"model_type\":\"minimax_m2\"", "{\"model_type\":\"MiniMax-M2\"", family,
        MM_FAMILY_M2);
}

/* Either name; both where they agree (test_contradictions has those that do not). */
TEST(test_aliases) {
  READS(m1, "\"attn_type_list\":[0,1,0,0,1]", "\"decoder_attention_types\":[1,0,0,0,1]", attn[0], MM_ATTN_FULL);
  READS(m1, "\"attn_type_list\":[0,1,0,0,1]", "\"layer_types\":[\"full_attention\",0,0,0,\"linear_attention\"]", attn[0], MM_ATTN_FULL);
  READS(m1, "\"hidden_size\":96", "\"hidden_size\":96,\"layer_types\":[0,\"full_attention\",0,\"linear_attention\",1]", attn[0],
        MM_ATTN_LIGHTNING);
  READS(m1, "\"layernorm_linear_attention_alpha\"", "\"linear_attn_alpha_factor\"", deepnorm_lightning.alpha, 3.5565588200778455);
  READS(m1, "\"layernorm_full_attention_beta\"", "\"full_attn_beta_factor\"", deepnorm_full.beta, 0.75);
  READS(m1, "\"layernorm_mlp_beta\"", "\"mlp_beta_factor\"", deepnorm_mlp.beta, 0.5);
  READS(m1, "\"hidden_size\":96", "\"hidden_size\":96,\"mlp_alpha_factor\":1.50", deepnorm_mlp.alpha, 1.5);
  READS(m1, "\"num_local_experts\":7", "\"num_experts\":7", experts, 7);
  READS(m1, "\"num_local_experts\":7", "\"num_local_experts\":7,\"num_experts\":[7,7,7,7,7]", experts, 7);
  READS(m1, "\"num_local_experts\":7", "\"num_local_experts\":[7,7,7,7,7]", experts, 7);
  READS(m1, "\"shared_intermediate_size\":0", "\"shared_intermediate_size\":[0]", hidden, 96);
}

TEST(test_rope_aliases) {
  READS(m1, "\"rotary_dim\":10", "\"partial_rotary_factor\":0.5", rotary_dim, 10);
  READS(m1, "\"rotary_dim\":10", "\"partial_rotary_factor\":1", rotary_dim, 20);
  READS(m1, "\"rotary_dim\":10", "\"rotary_dim\":10,\"partial_rotary_factor\":0.5", rotary_dim, 10);
  READS(m1, "\"rotary_dim\":10", "\"rope_scaling\":{\"type\":\"default\",\"partial_rotary_factor\":0.2}", rotary_dim, 4);
  READS(m1, "\"rotary_dim\":10", "\"rope_parameters\":{\"partial_rotary_factor\":0.3},\"rotary_dim\":6", rotary_dim, 6);
  READS(m1, "\"rope_theta\":10000000", "\"rope_parameters\":{\"rope_theta\":1234.5}", rope_theta, 1234.5);
  READS(m1, "\"rope_theta\":10000000", "\"rope_parameters\":{\"rope_theta\":1234.5},\"rope_theta\":1234.5", rope_theta, 1234.5);
  READS(m1, "\"rope_theta\":10000000", "\"rope_scaling\":null,\"rope_parameters\":null", rope_theta, 1e6);
}

/* Keys that mean the same and differ: the line has both keys and both values. */
TEST(test_contradictions) {
#define BOTH(base, old, new, says) refused(base, old, new, MM_BAD_INPUT, "E_CFG_RANGE", says)
  static const char *const deepnorm[][2] = {{"layernorm_linear_attention_alpha", "linear_attn_alpha_factor"},
                                            {"layernorm_linear_attention_beta", "linear_attn_beta_factor"},
                                            {"layernorm_full_attention_alpha", "full_attn_alpha_factor"},
                                            {"layernorm_full_attention_beta", "full_attn_beta_factor"},
                                            {"layernorm_mlp_alpha", "mlp_alpha_factor"},
                                            {"layernorm_mlp_beta", "mlp_beta_factor"}};
  for (size_t i = 0; i < sizeof deepnorm / sizeof *deepnorm; i++) {
    char key[64], new[96], says[96];
    snprintf(key, sizeof key, "\"%s\":", deepnorm[i][0]);
    snprintf(new, sizeof new, "\"%s\":9.5,%s", deepnorm[i][1], key);
    snprintf(says, sizeof says, "key \"%s\": found 9.5, expected ", deepnorm[i][1]);
    BOTH(m1, key, new, says);
    snprintf(says, sizeof says, " as in key \"%s\", which means the same", deepnorm[i][0]);
    BOTH(m1, key, new, says);
  }
  BOTH(m1, "\"num_local_experts\":7", "\"num_local_experts\":7,\"num_experts\":8",
       "key \"num_experts\": found 8, expected 7 as in key \"num_local_experts\"");
  BOTH(m1, "\"num_local_experts\":7", "\"num_local_experts\":[7,7,7,7,7],\"num_experts\":[6,6,6,6,6]", "found 6, expected 7");
  BOTH(m1, "\"hidden_size\":96", "\"hidden_size\":96,\"layer_types\":[0,1,0,1,1]",
       "key \"layer_types\": found 1/\"full_attention\" in entry 3, expected 0/\"linear_attention\" as in key \"attn_type_list\"");
  BOTH(m1, "\"hidden_size\":96", "\"hidden_size\":96,\"decoder_attention_types\":[0,1,0,0,0]", "key \"decoder_attention_types\": found 0/");
  BOTH(m1, "\"minimax_m1\"", "\"minimax_m2\"", "key \"model_type\": found \"minimax_m2\", expected the family of \"MiniMaxM1ForCausalLM\"");
  BOTH(m2, "\"minimax_m2\"", "\"MiniMax-Text-01\"", "key \"model_type\": found \"MiniMax-Text-01\"");
  BOTH(m2, "\"minimax_m2\"", "\"llama\"", "key \"model_type\": found \"llama\", expected the family of \"MiniMaxM2ForCausalLM\"");
  BOTH(m1, "\"minimax_m1\"", "\"mixtral\"", "key \"model_type\": found \"mixtral\", expected the family of \"MiniMaxM1ForCausalLM\"");
  BOTH(m1, "\"minimax_m1\"", "\"\"", "key \"model_type\": found \"\", expected the family");
  READS(m2, "\"minimax_m2\"", "null", family, MM_FAMILY_M2);
  READS(m2, "\"minimax_m2\"", "\"minimax\"", family, MM_FAMILY_M2); /* early copies of M2 */
}

/* Every set of the places that say theta, factor and rotary_dim: equal values are read, one that differs is refused. */
TEST(test_rope_places) {
  enum { TOP, PARAMETERS, SCALING, PARAMETERS_FULL, SCALING_FULL, PLACES };
  static const char *const path[PLACES] = {"", "rope_parameters.", "rope_scaling.", "rope_parameters.full_attention.",
                                           "rope_scaling.full_attention."};
  for (int factor = 0; factor < 2; factor++)
    for (unsigned set = 1; set < 1u << PLACES; set++)
      for (int odd = -1; odd < PLACES; odd++) {
        char say[PLACES][64] = {""}, new[512], says[96];
        unsigned others = set & ~(1u << (odd < 0 ? 31 : odd));
        if (odd >= 0 && (others == set || others == 0)) continue;
        for (int i = 0; i < PLACES; i++)
          if (set >> i & 1)
            snprintf(say[i], sizeof say[i], "\"%s\":%s,", factor ? "partial_rotary_factor" : "rope_theta",
                     factor ? (i == odd ? "0.2" : "0.3") : (i == odd ? "1234.5" : "7777777"));
        snprintf(new, sizeof new,
                 "%s\"rope_parameters\":{\"full_attention\":{%s\"rope_type\":\"default\"},%s\"linear_attention\":{\"rope_theta\":5}},"
                 "\"rope_scaling\":{%s\"full_attention\":{%s\"x\":null}},\"y\":1",
                 say[TOP], say[PARAMETERS_FULL], say[PARAMETERS], say[SCALING], say[SCALING_FULL]);
        const char *old = factor ? "\"rotary_dim\":10" : "\"rope_theta\":10000000";
        if (odd < 0 && factor) READS(m1, old, new, rotary_dim, 6);
        if (odd < 0 && !factor) READS(m1, old, new, rope_theta, 7777777);
        if (odd < 0) continue;
        snprintf(says, sizeof says, "%s%s\"", path[odd], factor ? "partial_rotary_factor" : "rope_theta");
        refused(m1, old, new, MM_BAD_INPUT, "E_CFG_RANGE", says);
        refused(m1, old, new, MM_BAD_INPUT, "E_CFG_RANGE", "which means the same");
      }
  for (int i = 0; i < PLACES; i++) {
    char new[256];
    static const char *const form[PLACES] = {"\"partial_rotary_factor\":0.2", "\"rope_parameters\":{\"partial_rotary_factor\":0.2}",
                                             "\"rope_scaling\":{\"partial_rotary_factor\":0.2}",
                                             "\"rope_parameters\":{\"full_attention\":{\"partial_rotary_factor\":0.2}}",
                                             "\"rope_scaling\":{\"full_attention\":{\"partial_rotary_factor\":0.2}}"};
    snprintf(new, sizeof new, "%s,\"rotary_dim\":10", form[i]);
    BOTH(m1, "\"rotary_dim\":10", new, "key \"rotary_dim\": found 10, expected 4: key \"");
  }
  READS(m1, "\"head_dim\":20,", "\"head_dim\":96,\"partial_rotary_factor\":0.10416666666666667,", rotary_dim, 10); /* 10 / 96 · 96 */
  BOTH(m1, "\"rotary_dim\":10", "\"partial_rotary_factor\":0", "found 0 of head_dim 20, expected a whole number");
  refused(m1, "\"rotary_dim\":10", "\"rope_parameters\":{\"sliding_attention\":{}}", MM_UNSUPPORTED, "E_CFG_FEATURE",
          "key \"rope_parameters\": found parameters of \"sliding_attention\"");
  refused(m1, "\"rotary_dim\":10", "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"yarn\"}}", MM_UNSUPPORTED, "E_CFG_FEATURE",
          "key \"rope_type\"");
  refused(m1, "\"rotary_dim\":10", "\"rope_parameters\":{\"full_attention\":{\"full_attention\":{}}}", MM_UNSUPPORTED, "E_CFG_FEATURE",
          "key \"rope_parameters.full_attention\": found parameters");
  refused(m1, "\"rotary_dim\":10", "\"rope_parameters\":{\"full_attention\":[1]}", MM_BAD_INPUT, "E_CFG_TYPE",
          "key \"rope_parameters.full_attention\": found [1], expected an object");
}

/* C02, C03, C04, C05: each needed key absent, null, zero, negative, huge, of another type. */
TEST(test_needed_keys) {
  static const char *const needed[] = {"hidden_size",       "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                                       "intermediate_size", "num_local_experts", "num_experts_per_tok", "vocab_size"};
  static const char *const whole_only[] = {"32.5", "4.0", "\"32\"", "true", "{}", "1000.0"};
  for (int family = 0; family < 2; family++)
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
      const char *base = family ? m2 : m1;
      char key[64], old[96], new[96], says[96];
      snprintf(key, sizeof key, "\"%s\":", needed[i]);
      const char *value = strstr(base, key) + strlen(key);
      snprintf(old, sizeof old, "%s%.*s", key, (int)strcspn(value, ",}"), value);
      snprintf(says, sizeof says, "key \"%s\": found nothing, expected an integer", needed[i]);
      refused(base, old, "\"x\":1", MM_BAD_INPUT, "E_CFG_MISSING", says);
      snprintf(new, sizeof new, "%snull", key);
      refused(base, old, new, MM_BAD_INPUT, "E_CFG_MISSING", says);
      static const char *const outside[] = {"0", "-1", "-2147483648", "2147483648", "1099511627776", "-9223372036854775808"};
      for (size_t k = 0; k < sizeof outside / sizeof *outside; k++) {
        snprintf(new, sizeof new, "%s%s", key, outside[k]);
        snprintf(says, sizeof says, "key \"%s\": found %s, expected 1 to 2147483647", needed[i], outside[k]);
        refused(base, old, new, MM_BAD_INPUT, "E_CFG_RANGE", says);
      }
      for (size_t k = 0; k < sizeof whole_only / sizeof *whole_only; k++) {
        snprintf(new, sizeof new, "%s%s", key, whole_only[k]);
        snprintf(says, sizeof says, "key \"%s\": found %s, expected an integer", needed[i], whole_only[k]);
        refused(base, old, new, MM_BAD_INPUT, "E_CFG_TYPE", says);
      }
    }
  refused(m1, "\"num_hidden_layers\":5", "\"num_hidden_layers\":2000000000", MM_BAD_INPUT, "E_CFG_RANGE",
          "key \"num_hidden_layers\": found 2000000000, expected at most 1024");
}

TEST(test_optional_keys) {
  refused(m1, "\"head_dim\":20", "\"head_dim\":0", MM_BAD_INPUT, "E_CFG_RANGE", "key \"head_dim\": found 0");
  refused(m1, "\"head_dim\":20", "\"head_dim\":-128", MM_BAD_INPUT, "E_CFG_RANGE", "key \"head_dim\": found -128");
  refused(m1, "\"head_dim\":20", "\"head_dim\":\"20\"", MM_BAD_INPUT, "E_CFG_TYPE", "key \"head_dim\"");
  refused(m1, "\"rotary_dim\":10", "\"rotary_dim\":0", MM_BAD_INPUT, "E_CFG_RANGE", "key \"rotary_dim\": found 0");
  refused(m1, "\"rotary_dim\":10", "\"rotary_dim\":10.0", MM_BAD_INPUT, "E_CFG_TYPE", "key \"rotary_dim\"");
  refused(m1, "\"max_position_embeddings\":4096", "\"max_position_embeddings\":0", MM_BAD_INPUT, "E_CFG_RANGE",
          "key \"max_position_embeddings\": found 0");
  refused(m1, "\"max_position_embeddings\":4096", "\"max_position_embeddings\":9007199254740993", MM_BAD_INPUT, "E_CFG_RANGE",
          "found 9007199254740993");
  refused(m1, "\"rms_norm_eps\":2e-05", "\"rms_norm_eps\":\"1e-5\"", MM_BAD_INPUT, "E_CFG_TYPE",
          "key \"rms_norm_eps\": found \"1e-5\", expected a number");
  refused(m1, "\"rope_theta\":10000000", "\"rope_theta\":true", MM_BAD_INPUT, "E_CFG_TYPE",
          "key \"rope_theta\": found true, expected a number");
  refused(m1, "\"layernorm_mlp_alpha\":1.5", "\"layernorm_mlp_alpha\":[1.5]", MM_BAD_INPUT, "E_CFG_TYPE", "key \"layernorm_mlp_alpha\"");
  refused(m1, "\"layernorm_mlp_alpha\":1.5", "\"mlp_alpha_factor\":\"1\"", MM_BAD_INPUT, "E_CFG_TYPE", "key \"mlp_alpha_factor\"");
  refused(m1, "\"minimax_m1\"", "3", MM_BAD_INPUT, "E_CFG_TYPE", "key \"model_type\": found 3, expected a string");
  refused(m2, "\"minimax_m2\"", "[\"minimax_m2\"]", MM_BAD_INPUT, "E_CFG_TYPE",
          "key \"model_type\": found [\"minimax_m2\"], expected a string");
  refused(m2, "\"minimax_m2\"", "\"minimax_m2\\u0000\"", MM_BAD_INPUT, "E_CFG_TYPE", "key \"model_type\": found ");
  refused(m1, "\"postnorm\":true", "\"postnorm\":1", MM_BAD_INPUT, "E_CFG_TYPE", "key \"postnorm\": found 1, expected true or false");
  refused(m1, "\"tie_word_embeddings\":false", "\"tie_word_embeddings\":\"no\"", MM_BAD_INPUT, "E_CFG_TYPE", "key \"tie_word_embeddings\"");
  refused(m1, "\"rotary_dim\":10", "\"partial_rotary_factor\":0.33", MM_BAD_INPUT, "E_CFG_RANGE",
          "found 0.33 of head_dim 20, expected a whole number");
  refused(m1, "\"rotary_dim\":10", "\"partial_rotary_factor\":1.1", MM_BAD_INPUT, "E_CFG_RANGE",
          "\"partial_rotary_factor\": found 1.1 of head_dim 20");
  refused(m1, "\"rotary_dim\":10", "\"partial_rotary_factor\":-0.5", MM_BAD_INPUT, "E_CFG_RANGE",
          "\"partial_rotary_factor\": found -0.5 of head_dim 20");
  refused(m1, "\"rotary_dim\":10", "\"rope_parameters\":[0.5]", MM_BAD_INPUT, "E_CFG_TYPE",
          "key \"rope_parameters\": found [0.5], expected an object");
}

/* C06, C07: rules between two numbers name both. */
TEST(test_relations) {
  refused(m1, "\"num_key_value_heads\":4", "\"num_key_value_heads\":5", MM_BAD_INPUT, "E_CFG_RANGE",
          "num_attention_heads: found 12, expected a multiple of num_key_value_heads 5");
  refused(m1, "\"num_key_value_heads\":4", "\"num_key_value_heads\":24", MM_BAD_INPUT, "E_CFG_RANGE",
          "num_key_value_heads: found 24, expected 1 to 12");
  refused(m2, "\"num_experts_per_tok\":5", "\"num_experts_per_tok\":10", MM_BAD_INPUT, "E_CFG_RANGE",
          "num_experts_per_tok: found 10, expected 1 to 9");
  refused(m1, "\"rotary_dim\":10", "\"rotary_dim\":22", MM_BAD_INPUT, "E_CFG_RANGE", "rotary_dim: found 22, expected 2 to 20");
  refused(m1, "\"rotary_dim\":10", "\"rotary_dim\":7", MM_BAD_INPUT, "E_CFG_RANGE", "rotary_dim: found 7, expected an even number");
  refused(m1, "\"rms_norm_eps\":2e-05", "\"rms_norm_eps\":0", MM_BAD_INPUT, "E_CFG_RANGE", "norm_eps: found 0, expected a positive number");
  refused(m2, "\"rms_norm_eps\":3e-06", "\"rms_norm_eps\":-1e-6", MM_BAD_INPUT, "E_CFG_RANGE", "norm_eps: found -1e-06");
  refused(m1, "\"rope_theta\":10000000", "\"rope_theta\":0", MM_BAD_INPUT, "E_CFG_RANGE", "rope_theta: found 0");
  refused(m2, "\"rope_theta\":6000000", "\"rope_theta\":-5e6", MM_BAD_INPUT, "E_CFG_RANGE", "rope_theta: found -5e+06");
  refused(m1, "\"num_attention_heads\":12", "\"num_attention_heads\":200000000", MM_BAD_INPUT, "E_CFG_RANGE",
          "3 x num_attention_heads x head_dim");
  char *a = edited(m1, "\"head_dim\":20,", ""); /* no head_dim, and more heads than channels */
  refused(a, "\"hidden_size\":96", "\"hidden_size\":11", MM_BAD_INPUT, "E_CFG_RANGE", "head_dim: found 0");
  free(a);
}

/* C12 and lists of experts. */
TEST(test_lists) {
  static const char old[] = "\"attn_type_list\":[0,1,0,0,1]";
  refused(m1, old, "\"attn_type_list\":[0,1,0,0]", MM_BAD_INPUT, "E_CFG_RANGE", "\"attn_type_list\": found 4 entries, expected 5");
  refused(m1, old, "\"attn_type_list\":[]", MM_BAD_INPUT, "E_CFG_RANGE", "found 0 entries, expected 5");
  refused(m1, old, "\"attn_type_list\":[0,1,0,2,1]", MM_BAD_INPUT, "E_CFG_RANGE", "found 2 in entry 3, expected 0/");
  refused(m1, old, "\"attn_type_list\":[0,-1,0,0,1]", MM_BAD_INPUT, "E_CFG_RANGE", "found -1 in entry 1, expected");
  refused(m1, old, "\"attn_type_list\":[0,1.0,0,0,1]", MM_BAD_INPUT, "E_CFG_RANGE", "found 1.0 in entry 1, expected");
  refused(m1, old, "\"attn_type_list\":[0,1,true,0,1]", MM_BAD_INPUT, "E_CFG_RANGE", "found true in entry 2, expected");
  refused(m1, old, "\"attn_type_list\":[0,1,0,0,\"1\"]", MM_BAD_INPUT, "E_CFG_RANGE", "found \"1\" in entry 4, expected");
  refused(m1, old, "\"attn_type_list\":1", MM_BAD_INPUT, "E_CFG_TYPE", "key \"attn_type_list\": found 1, expected a list");
  refused(m1, old, "\"layer_types\":[\"linear_attention\",\"sliding_attention\",0,0,1]", MM_BAD_INPUT, "E_CFG_RANGE",
          "\"layer_types\": found \"sliding_attention\" in entry 1, expected");
  refused(m2, "[1,1,1]", "[1,0,1]", MM_UNSUPPORTED, "E_CFG_FEATURE", "found lightning attention in layer 1");
  refused(m1, "\"num_local_experts\":7", "\"num_local_experts\":[7,7,7,7]", MM_BAD_INPUT, "E_CFG_RANGE", "found 4 entries, expected 5");
  refused(m1, "\"num_local_experts\":7", "\"num_local_experts\":[]", MM_BAD_INPUT, "E_CFG_RANGE", "\"num_local_experts\": found 0 entries");
  refused(m1, "\"num_local_experts\":7", "\"num_local_experts\":[7,7,8,7,7]", MM_UNSUPPORTED, "E_CFG_FEATURE",
          "found 8 in entry 2, expected 7 as in those before");
  refused(m1, "\"num_local_experts\":7", "\"num_local_experts\":[7,7,0,7,7]", MM_BAD_INPUT, "E_CFG_RANGE", "found 0, expected 1");
  refused(m1, "\"num_local_experts\":7", "\"num_local_experts\":[7,\"7\",7,7,7]", MM_BAD_INPUT, "E_CFG_TYPE", "\"num_local_experts\"");
}

/* Valid configs of models that this version would compute wrongly. */
TEST(test_features) {
#define FEATURE(base, old, new, says) refused(base, old, new, MM_UNSUPPORTED, "E_CFG_FEATURE", says)
  FEATURE(m1, "\"shared_intermediate_size\":0", "\"shared_intermediate_size\":8192", "\"shared_intermediate_size\": found 8192");
  FEATURE(m1, "\"shared_intermediate_size\":0", "\"shared_intermediate_size\":[0,64]", "\"shared_intermediate_size\": found 64");
  FEATURE(m1, "\"hidden_act\":\"silu\"", "\"hidden_act\":\"gelu\"", "key \"hidden_act\": found \"gelu\", only silu");
  FEATURE(m1, "\"sliding_window\":null", "\"sliding_window\":4096", "key \"sliding_window\": found 4096, only null");
  FEATURE(m1, "\"tie_word_embeddings\":false", "\"tie_word_embeddings\":true", "key \"tie_word_embeddings\": found true, only false");
  FEATURE(m1, "\"rotary_dim\":10", "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4}", "key \"rope_type\"");
  READS(m1, "\"rope_theta\":10000000", "\"rope_theta\":2e6,\"rope_scaling\":{\"rope_type\":\"default\",\"factor\":4}", rope_theta, 2e6);
  READS(m1, "\"rope_theta\":10000000", "\"rope_theta\":2e6,\"rope_scaling\":{\"type\":\"default\",\"factor\":1.0}", rope_theta, 2e6);
  FEATURE(m1, "\"rotary_dim\":10", "\"rope_scaling\":{\"type\":\"linear\"}", "key \"type\"");
  FEATURE(m1, "\"rotary_dim\":10", "\"rope_scaling\":{\"factor\":4}", "key \"rope_scaling\": found \"factor\", only rope_theta");
  FEATURE(m1, "\"rotary_dim\":10", "\"rope_parameters\":{\"full_attention\":{\"mrope_section\":[1,2]}}",
          "key \"rope_parameters.full_attention\": found \"mrope_section\"");
  FEATURE(m2, "\"scoring_func\":\"sigmoid\"", "\"scoring_func\":\"softmax\"", "key \"scoring_func\": found \"softmax\", only sigmoid");
  FEATURE(m2, "\"qk_norm_type\":\"per_layer\"", "\"qk_norm_type\":\"per_head\"",
          "key \"qk_norm_type\": found \"per_head\", only per_layer");
  FEATURE(m2, "\"use_qk_norm\":true", "\"use_qk_norm\":false", "key \"use_qk_norm\": found false, only true");
  FEATURE(m2, "\"use_routing_bias\":true", "\"use_routing_bias\":false", "key \"use_routing_bias\": found false, only true");
  refused(m1, "\"shared_intermediate_size\":0", "\"shared_intermediate_size\":\"0\"", MM_BAD_INPUT, "E_CFG_TYPE",
          "key \"shared_intermediate_size\"");
}

/* C08, and near misses that would give garbage. */
TEST(test_architectures) {
  static const char head[] = "\"architectures\":[\"MiniMaxM1ForCausalLM\"],\"model_type\":\"minimax_m1\"";
#define ARCH(new, says) refused(m1, head, new, MM_UNSUPPORTED, "E_ARCH", says)
  ARCH("\"architectures\":[\"MiniMaxVL01ForConditionalGeneration\"]", "MiniMax-VL-01");
  ARCH("\"model_type\":\"minimax_vl_01\"", "MiniMax-VL-01");
  ARCH("\"architectures\":[\"LlamaForCausalLM\"]", "found architecture \"LlamaForCausalLM\", expected MiniMaxM1ForCausalLM");
  ARCH("\"architectures\":[\"minimaxm1forcausallm\"]", "found architecture \"minimaxm1forcausallm\"");
  ARCH("\"architectures\":[\"Evil\\u001b[2J\\n\"]", "found architecture \"Evil\\x1b[2J\\x0a\"");
  ARCH("\"architectures\":[\"MiniMaxM1ForCausalLM\\u0000Evil\"]",
       "key \"architectures\": found [\"MiniMaxM1ForCausalLM\\u0000Evil\"], expected one name");
  ARCH("\"model_type\":\"minimax_m1\\u0000evil\"", "and no \"model_type\"");
  ARCH("\"model_type\":\"llama\"", "found model_type \"llama\"");
  ARCH("\"architectures\":[],\"model_type\":\"minimax_m1\"", ", expected one name");
  ARCH("\"architectures\":[\"MiniMaxM1ForCausalLM\",\"MiniMaxM2ForCausalLM\"]", ", expected one name");
  ARCH("\"architectures\":\"MiniMaxM1ForCausalLM\"", ", expected one name");
  ARCH("\"architectures\":[7]", "key \"architectures\": found [7], expected one name");
  ARCH("\"x\":1", "is this the model's config.json?");
  static const char *const not_object[] = {"[1]", "[]"};
  for (size_t i = 0; i < 2; i++) {
    mm_model m;
    mm_err err = {0};
    const mm_arch *arch;
    assert_false(read_text(not_object[i], &m, &arch, &err));
    assert_int_equal(err.status, MM_BAD_INPUT);
    assert_string_equal(err.code, "E_CFG_TYPE");
  }
}

/* ---- rules ---- */

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Names that the rules make for a model: how many, none twice. FP8 matrices count their scale too. */
static size_t names_of(const mm_arch *arch, const mm_model *m, bool fp8) {
  size_t cap = 200000, n = 0;
  char **name = calloc(cap, sizeof *name), text[256];
  assert_non_null(name);
  for (size_t i = 0; i < arch->rule_count; i++) {
    const mm_rule *r = &arch->rule[i];
    bool layered = strstr(r->theirs, "{l}"), stacked = strstr(r->theirs, "{e}");
    assert_true(stacked == mm_rule_stacks(r));
    for (uint32_t l = 0; l < (layered ? m->layers : 1); l++) {
      if (!mm_rule_applies(r, m, l)) continue;
      for (uint32_t e = 0; e < (stacked ? m->experts : 1); e++) {
        assert_true(n + 2 < cap);
        name[n++] = strdup(mm_rule_name(text, sizeof text, r->theirs, l, e));
        assert_null(strchr(text, '{'));
        bool scaled = fp8 && (r->kind == MM_KIND_LINEAR || r->kind == MM_KIND_EXPERT);
        if (!scaled) continue;
        snprintf(text + strlen(text), sizeof text - strlen(text), "_scale_inv");
        name[n++] = strdup(text);
      }
    }
  }
  qsort(name, n, sizeof *name, by_text);
  for (size_t i = 1; i < n; i++) assert_string_not_equal(name[i - 1], name[i]);
  for (size_t i = 0; i < n; i++) free(name[i]);
  free(name);
  return n;
}

TEST(test_rules) {
  mm_model big = {.layers = 80, .experts = 32};
  for (uint32_t l = 0; l < 80; l++) big.attn[l] = l % 8 == 7;
  assert_int_equal(names_of(&mm_arch_minimax_m1, &big, false), 8243);
  big.layers = 62;
  big.experts = 256;
  memset(big.attn, MM_ATTN_FULL, sizeof big.attn);
  assert_int_equal(names_of(&mm_arch_minimax_m2, &big, true), 96103);

  mm_model m = accepted(m1);
  assert_int_equal(mm_dim_extent(MM_DIM_NONE, &m), 1);
  assert_int_equal(mm_dim_extent(MM_DIM_HIDDEN, &m), 96);
  assert_int_equal(mm_dim_extent(MM_DIM_VOCAB, &m), 300);
  assert_int_equal(mm_dim_extent(MM_DIM_Q, &m), 240);
  assert_int_equal(mm_dim_extent(MM_DIM_QKV, &m), 720);
  assert_int_equal(mm_dim_extent(MM_DIM_KV, &m), 80);
  assert_int_equal(mm_dim_extent(MM_DIM_INTER, &m), 48);
  assert_int_equal(mm_dim_extent(MM_DIM_EXPERTS, &m), 7);

  char name[64];
  assert_string_equal(mm_rule_name(name, sizeof name, "a.{l}.b.{e}.c", 1023, 4294967295), "a.1023.b.4294967295.c");
  assert_string_equal(mm_rule_name(name, sizeof name, "plain", 1, 2), "plain");
}

/* Which tp a released model can be cut into, and what is said of the others. */
TEST(test_feasible) {
  static const struct {
    mm_model m;
    const char *fits;
  } model[] = {{{.heads = 64, .kv_heads = 8, .intermediate = 9216, .layers = 80, .experts = 32}, ", 1, 2, 4, 8, 16, 32, 64,"},
               {{.heads = 48, .kv_heads = 8, .intermediate = 1536, .layers = 62, .experts = 256}, ", 1, 2, 4, 8, 16, 24, 48,"}};
  for (size_t i = 0; i < 2; i++)
    for (uint32_t tp = 1; tp <= 1100; tp++) {
      mm_err err = {0};
      char word[16], list[64];
      snprintf(word, sizeof word, ", %u,", tp);
      snprintf(list, sizeof list, "expected one of %.*s", (int)strlen(model[i].fits) - 3, model[i].fits + 2);
      bool fits = strstr(model[i].fits, word) != NULL;
      assert_int_equal(mm_cut_feasible(&model[i].m, &(mm_plan_options){.tp = tp, .ep = 1, .pp = 1}, "config.json", &err), fits);
      if (!fits && (err.status != MM_UNSUPPORTED || strcmp(err.code, "E_TP") != 0 || !strstr(err.text, list)))
        fail_msg("tp %u: \"%s\" does not say \"%s\"", tp, err.text, list);
    }
  static const struct {
    uint32_t tp;
    const char *says;
  } reason[] = {{7, "num_attention_heads 64 is not a multiple of it"}, {3, "num_attention_heads"}, {128, "num_attention_heads"}};
  for (size_t i = 0; i < 3; i++) {
    mm_err err = {0};
    assert_false(mm_cut_feasible(&model[0].m, &(mm_plan_options){.tp = reason[i].tp, .ep = 1, .pp = 1}, "config.json", &err));
    assert_non_null(strstr(err.text, reason[i].says));
  }
  mm_err err = {0};
  assert_false(mm_cut_feasible(&model[1].m, &(mm_plan_options){.tp = 6, .ep = 1, .pp = 1}, "config.json", &err));
  assert_non_null(strstr(err.text, "num_key_value_heads 8 neither divides it nor is divided by it"));
  mm_model odd = {.heads = 8, .kv_heads = 8, .intermediate = 100};
  err = (mm_err){0};
  assert_false(mm_cut_feasible(&odd, &(mm_plan_options){.tp = 8, .ep = 1, .pp = 1}, "config.json", &err));
  assert_non_null(strstr(err.text, "intermediate_size 100 is not a multiple of tp/ep 8; expected one of 1, 2, 4"));
}

int main(void) { return run_unit_tests(NULL, NULL); }
