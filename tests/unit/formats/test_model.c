/* The manifest's model object: every field survives, every rule refuses. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/odd_model.h"
#include "tests/unit/unit.h"

TEST(test_round_trip) {
  mm_err err = {0};
  mm_model m = odd_model(), back;
  mm_json *j = mm_model_to_json(&m);
  char *text = mm_json_dump(j, false);
  mm_json_free(j);
  j = mm_json_parse(text, strlen(text), "manifest.json", &err);
  assert_true(mm_model_from_json(&back, j, "manifest.json", &err));
  assert_string_equal(back.architecture, m.architecture);
#define SAME(field) assert_true(back.field == m.field)
  SAME(family), SAME(router), SAME(postnorm), SAME(qk_norm), SAME(hidden), SAME(layers), SAME(heads), SAME(kv_heads), SAME(head_dim);
  SAME(rotary_dim), SAME(experts), SAME(top_k), SAME(intermediate), SAME(vocab), SAME(max_positions), SAME(rope_theta), SAME(norm_eps);
  SAME(lightning_norm_eps), SAME(deepnorm_lightning.alpha), SAME(deepnorm_lightning.beta), SAME(deepnorm_full.alpha);
  SAME(deepnorm_full.beta), SAME(deepnorm_mlp.alpha), SAME(deepnorm_mlp.beta);
  assert_memory_equal(back.attn, m.attn, sizeof m.attn);
  mm_json_free(j);
  free(text);
}

/* The words and keys of the page, not only of ourselves. */
TEST(test_text) {
  mm_model m = odd_model();
  m.layers = 2;
  mm_json *j = mm_model_to_json(&m);
  char *text = mm_json_dump(j, false);
  assert_string_equal(text,
                      "{\"architecture\":\"MiniMaxM1ForCausalLM\",\"family\":\"m2\",\"router\":\"sigmoid_bias\",\"postnorm\":true,"
                      "\"qk_norm\":false,\"hidden\":96,\"layers\":2,\"heads\":12,\"kv_heads\":4,\"head_dim\":20,\"rotary_dim\":10,"
                      "\"experts\":7,\"top_k\":3,\"intermediate\":48,\"vocab\":300,\"max_positions\":9007199254740993,"
                      "\"rope_theta\":10000000.0,\"norm_eps\":1.0000000000000001e-5,\"lightning_norm_eps\":9.9999999999999995e-7,"
                      "\"deepnorm_lightning\":{\"alpha\":3.5565588200778455,\"beta\":1.25},\"deepnorm_full\":{\"alpha\":2.5,\"beta\":0.75},"
                      "\"deepnorm_mlp\":{\"alpha\":1.5,\"beta\":0.10000000000000001},\"attn\":[0,1]}");
  free(text);
  mm_json_free(j);
}

TEST(test_extended_round_trip) {
  mm_err err = {0};
  const mm_model plain = odd_model(), m = odd_extended_model();
  mm_model back;
  const char *key;
  assert_true(!mm_model_extended(&plain) && mm_model_extended(&m));
  mm_json *j = mm_model_to_json(&m);
  char *text = mm_json_dump(j, false);
  assert_non_null(strstr(text,
                         "\"norm_offset\":true,\"qk_norm_per_head\":true,\"index_heads\":2,\"index_dim\":14,\"index_block\":33,"
                         "\"index_top_k\":6,\"index_local\":5,\"dense_intermediate\":72,\"shared_intermediate\":24,"
                         "\"routed_scale\":2.25,\"activation\":\"swigluoai\",\"act_alpha\":1.702,\"act_limit\":7.5,\"act_beta\":-0.5,"
                         "\"attn\":[0,1,2,0,2],\"ffn\":[0,1,0,1,0]}"));
  if (!mm_model_from_json(&back, j, "manifest.json", &err)) fail_msg("%s", err.text);
  assert_true(mm_model_same(&m, &back, &key));
  SAME(norm_offset), SAME(qk_norm_per_head), SAME(index_heads), SAME(index_dim), SAME(index_block), SAME(index_top_k), SAME(index_local);
  SAME(dense_intermediate), SAME(shared_intermediate), SAME(routed_scale), SAME(activation), SAME(act_alpha), SAME(act_limit);
  SAME(act_beta);
  assert_memory_equal(back.attn, m.attn, sizeof m.attn);
  assert_memory_equal(back.ffn, m.ffn, sizeof m.ffn);
  mm_json_free(j);
  free(text);
}

/* Each field alone makes a model an extended one, and another than it was. */
TEST(test_each_field_extends) {
#define EXTENDS(change, name)                                                 \
  do {                                                                        \
    const mm_model plain_ = odd_model();                                      \
    mm_model m = plain_;                                                      \
    const char *key_ = "";                                                    \
    change;                                                                   \
    assert_true(mm_model_extended(&m) && !mm_model_same(&plain_, &m, &key_)); \
    assert_string_equal(key_, name);                                          \
  } while (0)
  EXTENDS(m.norm_offset = true, "norm_offset");
  EXTENDS(m.qk_norm_per_head = true, "qk_norm_per_head");
  EXTENDS(m.index_heads = 1, "index_heads");
  EXTENDS(m.index_dim = 1, "index_dim");
  EXTENDS(m.index_block = 256, "index_block");
  EXTENDS(m.index_top_k = 1, "index_top_k");
  EXTENDS(m.index_local = 1, "index_local");
  EXTENDS(m.dense_intermediate = 65536, "dense_intermediate");
  EXTENDS(m.shared_intermediate = 1, "shared_intermediate");
  EXTENDS(m.routed_scale = 1, "routed_scale");
  EXTENDS(m.activation = MM_ACTIVATION_SWIGLUOAI, "activation");
  EXTENDS(m.act_alpha = 1, "act_alpha");
  EXTENDS(m.act_limit = 1, "act_limit");
  EXTENDS(m.act_beta = 1, "act_beta");
  EXTENDS(m.attn[4] = MM_ATTN_SPARSE, "attn");
  EXTENDS(m.ffn[4] = MM_FFN_DENSE, "ffn");
}

/* The sample's text with `old` replaced must be refused with a line that says `what`. */
static mm_model g_sample;
static void refuses(const char *old, const char *new, const char *what) {
  mm_err err = {0};
  mm_model m = g_sample.layers ? g_sample : odd_model();
  mm_json *j = mm_model_to_json(&m);
  char *text = mm_json_dump(j, false), changed[2048];
  mm_json_free(j);
  char *at = strstr(text, old);
  if (!at) fail_msg("\"%s\" is not in the text", old);
  int n = snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
  free(text);
  j = mm_json_parse(changed, (size_t)n, "manifest.json", &err);
  assert_non_null(j);
  if (mm_model_from_json(&m, j, "manifest.json", &err)) fail_msg("accepted \"%s\"", new);
  mm_json_free(j);
  assert_int_equal(err.status, MM_INTEGRITY);
  assert_string_equal(err.code, "E_MANIFEST");
  if (!strstr(err.text, what)) fail_msg("\"%s\" does not say \"%s\"", err.text, what);
}

TEST(test_refused_text) {
  refuses("\"hidden\":96,", "", "key \"hidden\": found nothing");
  refuses("\"hidden\":96", "\"hidden\":96,\"hiden\":1", "unknown key \"hiden\"");
  refuses("\"hidden\":96", "\"hidden\":96.5", "key \"hidden\": found a real number");
  refuses("\"hidden\":96", "\"hidden\":-1", "key \"hidden\": found -1");
  refuses("\"vocab\":300", "\"vocab\":4294967296", "key \"vocab\": found 4294967296");
  refuses("\"max_positions\":9007199254740993", "\"max_positions\":-5", "key \"max_positions\": found -5");
  refuses("MiniMaxM1ForCausalLM", "", "key \"architecture\": found 0 bytes, expected 1 to 63");
  refuses("MiniMaxM1ForCausalLM", "0123456789012345678901234567890123456789012345678901234567890123",
          "key \"architecture\": found 64 bytes, expected 1 to 63");
  refuses("\"m2\"", "\"m9\"", "key \"family\": found unknown word \"m9\"");
  refuses("\"sigmoid_bias\"", "\"sigmoid\"", "key \"router\": found unknown word \"sigmoid\"");
  refuses("\"postnorm\":true", "\"postnorm\":1", "key \"postnorm\": found an integer");
  refuses("\"norm_eps\":1.0000000000000001e-5", "\"norm_eps\":\"1e-5\"", "key \"norm_eps\": found a string");
  refuses("\"beta\":1.25", "\"gamma\":1.25", "unknown key \"gamma\"");
  refuses("{\"alpha\":1.5,", "{", "key \"alpha\": found nothing");
  refuses("{\"alpha\":3.5565588200778455,\"beta\":1.25}", "[1,2]", "key \"deepnorm_lightning\": found an array");
  refuses("[0,1,1,0,1]", "[0,1,1,0]", "key \"attn\": found 4 entries, expected one for each of 5 layers");
  refuses("[0,1,1,0,1]", "[0,1,1,0,1,1]", "key \"attn\": found 6 entries, expected one for each of 5 layers");
  refuses("[0,1,1,0,1]", "[0,1,2,0,1]", "key \"attn\": layer 2");
  refuses("[0,1,1,0,1]", "[0,1,1,true,1]", "key \"attn\": layer 3");
  refuses("\"layers\":5", "\"layers\":1025", "found 5 entries, expected one for each of 1025 layers");
  refuses("\"heads\":12,", "\"heads\":13,", "heads: found 13, expected a multiple of kv_heads 4");
}

/* The keys of extended models stand all together, or none of them does. */
TEST(test_refused_extended_text) {
  refuses("\"attn\":", "\"ffn\":[0,0,0,0,0],\"attn\":", "key \"norm_offset\": found nothing");
  refuses("\"attn\":", "\"norm_offset\":false,\"attn\":", "key \"qk_norm_per_head\": found nothing");
  refuses("\"attn\":",
          "\"norm_offset\":false,\"qk_norm_per_head\":false,\"index_heads\":0,\"index_dim\":0,\"index_block\":0,\"index_top_k\":0,"
          "\"index_local\":0,\"dense_intermediate\":0,\"shared_intermediate\":0,\"routed_scale\":0,\"activation\":\"silu\","
          "\"act_alpha\":0,\"act_limit\":0,\"act_beta\":0,\"ffn\":[0,0,0,0,0],\"attn\":",
          "found keys of an extended model, all of them 0");
  g_sample = odd_extended_model();
  refuses("\"norm_offset\":true,", "", "key \"norm_offset\": found nothing");
  refuses("\"act_beta\":-0.5,", "", "key \"act_beta\": found nothing");
  refuses(",\"ffn\":[0,1,0,1,0]", "", "key \"ffn\": found nothing");
  refuses("\"swigluoai\"", "\"gelu\"", "key \"activation\": found unknown word \"gelu\"");
  refuses("\"ffn\":[0,1,0,1,0]", "\"ffn\":[0,1,0,2,0]", "key \"ffn\": layer 3: found 2, expected 0 (experts) or 1 (dense)");
  refuses("\"ffn\":[0,1,0,1,0]", "\"ffn\":[0,1,0,1]", "key \"ffn\": found 4 entries, expected one for each of 5 layers");
  refuses("\"attn\":[0,1,2,0,2]", "\"attn\":[0,1,3,0,2]", "key \"attn\": layer 2");
  refuses("\"attn\":[0,1,2,0,2]", "\"attn\":[0,1,-1,0,2]", "key \"attn\": layer 2");
  g_sample = (mm_model){0};
}

/* attn[] takes 1,024 layers and no entry more. */
TEST(test_most_layers) {
  for (int layers = 1024; layers <= 1025; layers++) {
    mm_model m = odd_model();
    mm_err err = {0};
    mm_json *j = mm_model_to_json(&m), *attn = mm_json_new_arr();
    for (int l = 0; l < layers; l++) assert_true(mm_json_append(attn, mm_json_new_int(l % 3 == 0)));
    assert_true(mm_json_set(j, "layers", mm_json_new_int(layers)) && mm_json_set(j, "attn", attn));
    assert_int_equal(mm_model_from_json(&m, j, "manifest.json", &err), layers == 1024);
    if (layers == 1024) assert_int_equal(m.attn[1023], 1);
    if (layers == 1025) assert_non_null(strstr(err.text, "1025 layers (at most 1024)"));
    mm_json_free(j);
  }
}

static void breaks(const mm_model *m, const char *line) {
  mm_err err = {0};
  assert_false(mm_model_check(m, "manifest.json", MM_INTEGRITY, "E_MANIFEST", &err));
  assert_int_equal(err.status, MM_INTEGRITY);
  assert_string_equal(err.text, line);
}

#define RULE(change, line)                          \
  do {                                              \
    mm_model m = odd_model();                       \
    change;                                         \
    breaks(&m, "E_MANIFEST: manifest.json: " line); \
  } while (0)

/* Keys of a config.json, not of the manifest. */
TEST(test_config_keys) {
  static const char *const lines[] = {
      "num_experts_per_tok: found 8, expected 1 to 7",
      "num_attention_heads: found 12, expected a multiple of num_key_value_heads 5",
      "rms_norm_eps: found 0, expected a positive number",
  };
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    mm_model m = odd_model();
    if (i == 0) m.top_k = 8;
    if (i == 1) m.kv_heads = 5;
    if (i == 2) m.norm_eps = 0;
    mm_err err = {0};
    assert_false(mm_model_check(&m, "config.json", MM_BAD_INPUT, "E_CFG_RANGE", &err));
    assert_string_equal(err.text + strlen("E_CFG_RANGE: config.json: "), lines[i]);
  }
}

TEST(test_rules) {
  mm_err err = {0};
  mm_model good = odd_model();
  assert_true(mm_model_check(&good, "config.json", MM_BAD_INPUT, "E_CFG_RANGE", &err));
  /* The bounds themselves are good. */
  mm_model edge = good;
  edge.top_k = edge.experts;
  edge.rotary_dim = edge.head_dim;
  edge.kv_heads = edge.heads;
  edge.layers = MM_MAX_LAYERS;
  assert_true(mm_model_check(&edge, "config.json", MM_BAD_INPUT, "E_CFG_RANGE", &err));
  RULE(m.hidden = 0, "hidden: found 0, expected 1 to 2147483647");
  RULE(m.layers = 0, "layers: found 0, expected 1 to 1024");
  RULE(m.layers = 1025, "layers: found 1025, expected 1 to 1024");
  RULE(m.heads = 0, "heads: found 0, expected 1 to 2147483647");
  RULE(m.kv_heads = 0, "kv_heads: found 0, expected 1 to 12");
  RULE(m.kv_heads = 24, "kv_heads: found 24, expected 1 to 12");
  RULE(m.kv_heads = 5, "heads: found 12, expected a multiple of kv_heads 5");
  RULE(m.head_dim = 0, "head_dim: found 0, expected 1 to 1024");
  RULE(m.head_dim = 1025, "head_dim: found 1025, expected 1 to 1024");
  RULE(m.rotary_dim = 0, "rotary_dim: found 0, expected 2 to 20");
  RULE(m.rotary_dim = 22, "rotary_dim: found 22, expected 2 to 20");
  RULE(m.rotary_dim = 9, "rotary_dim: found 9, expected an even number");
  RULE(m.experts = 0, "experts: found 0, expected 1 to 1024");
  RULE((m.experts = 2048, m.top_k = 2048), "experts: found 2048, expected 1 to 1024");
  RULE((m.experts = 1024, m.top_k = 65), "top_k: found 65, expected 1 to 64");
  RULE(m.top_k = 0, "top_k: found 0, expected 1 to 7");
  RULE(m.top_k = 8, "top_k: found 8, expected 1 to 7");
  RULE(m.intermediate = 0, "intermediate: found 0, expected 1 to 1073741823");
  RULE(m.intermediate = 1073741824, "intermediate: found 1073741824, expected 1 to 1073741823");
  RULE(m.vocab = 0, "vocab: found 0, expected 1 to 2147483647");
  RULE(m.vocab = 2147483648, "vocab: found 2147483648, expected 1 to 2147483647");
  RULE(m.max_positions = 0, "max_positions: found 0, expected 1 to 9223372036854775807");
  RULE(m.max_positions = UINT64_C(1) << 63, "max_positions: found 9223372036854775808, expected 1 to 9223372036854775807");
  RULE((m.heads = 1048576, m.head_dim = 1024), "3 x heads x head_dim: found 3221225472, expected 1 to 2147483647");
  RULE(m.rope_theta = 0, "rope_theta: found 0, expected a positive number");
  RULE(m.norm_eps = -1e-5, "norm_eps: found -1e-05, expected a positive number");
  RULE(m.norm_eps = INFINITY, "norm_eps: found inf, expected a positive number");
  RULE(m.lightning_norm_eps = 0, "lightning_norm_eps: found 0, expected a positive number");
  RULE(m.deepnorm_lightning.alpha = INFINITY, "deepnorm_lightning.alpha: found inf, expected a finite number");
  RULE(m.deepnorm_lightning.beta = INFINITY, "deepnorm_lightning.beta: found inf, expected a finite number");
  RULE(m.deepnorm_full.alpha = INFINITY, "deepnorm_full.alpha: found inf, expected a finite number");
  RULE(m.deepnorm_full.beta = INFINITY, "deepnorm_full.beta: found inf, expected a finite number");
  RULE(m.deepnorm_mlp.alpha = INFINITY, "deepnorm_mlp.alpha: found inf, expected a finite number");
  RULE(m.deepnorm_mlp.beta = INFINITY, "deepnorm_mlp.beta: found inf, expected a finite number");
  RULE(m.attn[4] = 3, "attn: layer 4: found 3, expected 0, 1 or 2");
}

#define MORE(change, line)                          \
  do {                                              \
    mm_model m = odd_extended_model();              \
    change;                                         \
    breaks(&m, "E_MANIFEST: manifest.json: " line); \
  } while (0)

TEST(test_extended_rules) {
  mm_err err = {0};
  mm_model edge = odd_extended_model();
  assert_true(mm_model_check(&edge, "config.json", MM_BAD_INPUT, "E_CFG_RANGE", &err));
  edge.index_heads = edge.kv_heads, edge.index_dim = edge.rotary_dim, edge.index_top_k = MM_MAX_BLOCKS, edge.index_local = MM_MAX_BLOCKS;
  edge.shared_intermediate = 0, edge.routed_scale = 0;
  assert_true(mm_model_check(&edge, "config.json", MM_BAD_INPUT, "E_CFG_RANGE", &err));
  MORE(m.index_heads = 0, "index_heads: found 0, expected 1 to 4");
  MORE(m.index_heads = 5, "index_heads: found 5, expected 1 to 4");
  MORE(m.index_heads = 3, "index_heads: found 3, expected a divisor of 4 kv heads");
  MORE(m.index_dim = 9, "index_dim: found 9, expected 10 to 1024");
  MORE(m.index_dim = 1025, "index_dim: found 1025, expected 10 to 1024");
  MORE((m.heads = m.kv_heads = m.index_heads = 1 << 22, m.index_dim = 1024),
       "index_heads x index_dim: found 4294967296, expected 0 to 2147483647");
  MORE(m.index_block = 0, "index_block: found 0, expected 1 to 2147483647");
  MORE(m.index_block = 2147483648, "index_block: found 2147483648, expected 1 to 2147483647");
  MORE(m.index_top_k = 65, "index_top_k: found 65, expected 1 to 64");
  MORE(m.index_local = 0, "index_local: found 0, expected 1 to 6");
  MORE(m.index_local = 7, "index_local: found 7, expected 1 to 6");
  MORE((m.attn[2] = m.attn[4] = 1), "index_heads: found 2, expected 0 to 0");
  MORE(m.dense_intermediate = 0, "dense_intermediate: found 0, expected 1 to 1073741823");
  MORE((m.ffn[1] = m.ffn[3] = 0), "dense_intermediate: found 72, expected 0 to 0");
  MORE(m.shared_intermediate = 1073741824, "shared_intermediate: found 1073741824, expected 0 to 1073741823");
  MORE(m.ffn[2] = 2, "ffn: layer 2: found 2, expected 0 or 1");
  MORE(m.routed_scale = -1, "routed_scale: found -1, expected a finite number from 0 on");
  MORE(m.act_alpha = 0, "act_alpha: found 0, expected a positive number");
  MORE(m.act_limit = INFINITY, "act_limit: found inf, expected a positive number");
  MORE(m.act_beta = INFINITY, "act_beta: found inf, expected a finite number");
  MORE(m.activation = MM_ACTIVATION_SILU, "act_alpha: found 1.702, expected 0 with this activation");
  MORE((m.activation = MM_ACTIVATION_SILU, m.act_alpha = m.act_limit = 0), "act_beta: found -0.5, expected 0 with this activation");
  MORE(m.qk_norm = false, "qk_norm_per_head: found true without qk_norm");
}

int main(void) { return run_unit_tests(NULL, NULL); }
