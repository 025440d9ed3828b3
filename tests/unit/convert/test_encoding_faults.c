/* convert/encoding, encoding_config: every way in which the tensors and the configuration of a quantised source can be wrong, refused with
 * the status, code and line that say so. */
#include "tests/unit/convert/encoded.h"

#define W1 SRC_MOE "experts.1.w1." /* [24, 40] */

static void refused(const char *form, const char *tensor, void (*spoil)(source *, src_tensor *), mm_status status, const char *code,
                    const char *says) {
  source *s = encoded(form_of(form));
  char row[200], name[128];
  snprintf(row, sizeof row, "%s, %s, %s", form, tensor, code);
  snprintf(name, sizeof name, W1 "%s", tensor);
  spoil(s, src_find(s, name));
  src_write(s);
  src_refused(s, (src_options){.depth = SRC_READ, .quant = "f32"}, row, status, code, says);
  src_close(s);
}
#define REFUSED(form, tensor, spoil, code, says) refused(form, tensor, spoil, MM_BAD_INPUT, code, says)

static void without(source *s, src_tensor *t) { src_remove(s, t->name); }
static void reshape(src_tensor *t, uint64_t a, uint64_t b) {
  char dtype[16];
  memcpy(dtype, t->dtype, sizeof dtype);
  src_shape(t, dtype, 2, a, b, 0);
}
static void turned(source *s, src_tensor *t) {
  (void)s;
  reshape(t, t->dim[1], t->dim[0]);
}
static void wider(source *s, src_tensor *t) {
  (void)s;
  reshape(t, t->dim[0], t->dim[1] + 1);
}
static void retyped(source *s, src_tensor *t) { /* as wide as before, and never right */
  (void)s;
  snprintf(t->dtype, sizeof t->dtype, "%s", src_size(t->dtype) == 4 ? "U32" : src_size(t->dtype) == 2 ? "I16" : "F8_E5M2");
}
static void fewer_groups(source *s, src_tensor *t) {
  (void)s;
  reshape(t, t->dim[0], 1);
}

/* Gives element 1 (or the only one) the bits. */
static void set(src_tensor *t, uint32_t bits) {
  size_t size = src_size(t->dtype);
  memcpy(t->data + (t->bytes > size ? size : 0), &bits, size);
}
static void nan_value(source *s, src_tensor *t) {
  (void)s;
  set(t, src_size(t->dtype) == 4            ? 0x7fc00000u
         : strcmp(t->dtype, "BF16") == 0    ? 0x7fc0
         : strcmp(t->dtype, "F16") == 0     ? 0x7e00
         : strcmp(t->dtype, "F8_E4M3") == 0 ? 0x7f
                                            : 0xff);
}
static void zero_value(source *s, src_tensor *t) {
  (void)s;
  set(t, 0);
}
static void negative_value(source *s, src_tensor *t) {
  (void)s;
  set(t, src_size(t->dtype) == 4 ? 0xbf800000u : src_size(t->dtype) == 2 ? 0xbf80 : 0xb8);
}
/* Times 448 finite, times 6 more not. */
static void huge_value(source *s, src_tensor *t) {
  (void)s;
  set(t, 0x7ac097ce); /* 5e35 */
}
static void tiny_value(source *s, src_tensor *t) {
  (void)s;
  set(t, 0x042a2425); /* 2e-36 */
}
static void one_row_more(source *s, src_tensor *t) { /* of 24 x 40 */
  (void)s;
  memcpy(t->data, (int64_t[2]){25, 40}, 2 * sizeof(int64_t));
}
static void sides_turned(source *s, src_tensor *t) {
  (void)s;
  memcpy(t->data, (int64_t[2]){40, 24}, 2 * sizeof(int64_t));
}
static void group_five(source *s, src_tensor *t) { /* of 0 to 4 */
  (void)s;
  set(t, 5);
}
static void group_minus_one(source *s, src_tensor *t) {
  (void)s;
  set(t, UINT32_MAX);
}

TEST(test_missing) {
  REFUSED("tensor-wise FP8", "weight_scale", without, "E_Q_MISSING",
          "w1.weight\": found F8_E4M3 without a scale, expected model.layers.0.block_sparse_moe.experts.1.w1.weight_scale_inv or "
          "model.layers.0.block_sparse_moe.experts.1.w1.weight_scale");
  REFUSED("per-channel FP8", "weight_scale", without, "E_Q_MISSING", "w1.weight_scale");
  REFUSED("MXFP8", "weight_scale", without, "E_Q_MISSING", "w1.weight_scale");
  REFUSED("NVFP4", "weight_scale", without, "E_Q_MISSING", "found U8 without a scale");
  REFUSED("NVFP4", "weight_scale_2", without, "E_Q_MISSING",
          "w1.weight\": found ModelOpt NVFP4 without \"model.layers.0.block_sparse_moe.experts.1.w1.weight_scale_2\"");
  REFUSED("compressed-tensors NVFP4", "weight_global_scale", without, "E_Q_MISSING", "experts.1.w1.weight_global_scale\"");
  REFUSED("int4", "weight_scale", without, "E_Q_MISSING", "w1.weight_packed\": found I32 without a scale");
  REFUSED("int4, asymmetric, reordered", "weight_zero_point", without, "E_Q_MISSING", "w1.weight_zero_point\"");
  REFUSED("int4, asymmetric, reordered", "weight_g_idx", without, "E_Q_MISSING", "w1.weight_g_idx\"");
  REFUSED("int8", "weight_scale", without, "E_Q_MISSING", "found I8 without a scale");
  REFUSED("SGLang W4AFP8", "weight_scale_inv", without, "E_Q_MISSING", "found I8 without a scale");
  REFUSED("AWQ", "scales", without, "E_Q_MISSING", "w1.scales");
  REFUSED("AWQ", "qzeros", without, "E_Q_MISSING", "found AWQ without \"model.layers.0.block_sparse_moe.experts.1.w1.qzeros\"");
  REFUSED("GPTQ", "g_idx", without, "E_Q_MISSING", "w1.g_idx\"");
  REFUSED("GPTQ v2", "qzeros", without, "E_Q_MISSING", "w1.qzeros\"");
  REFUSED("AWQ", "qweight", without, "E_MISSING", "w1.weight");
}

TEST(test_shapes) {
  REFUSED("per-channel FP8", "weight", turned, "E_SHAPE", "found shape [40, 24], expected [24, 40]");
  REFUSED("per-channel FP8", "weight_scale", turned, "E_Q_SHAPE", "found shape [1, 24], expected [], [1], [1, 1], [24] or [24, 1]");
  REFUSED("MXFP8", "weight_scale", wider, "E_Q_SHAPE", "found shape [24, 3], expected [24, 2]");
  REFUSED("NVFP4", "weight", turned, "E_SHAPE", "found shape [20, 24], expected [24, 20] or [12, 40]");
  REFUSED("NVFP4", "weight_scale", turned, "E_Q_SHAPE", "found shape [3, 24], expected [24, 3]");
  REFUSED("MXFP4", "weight_scale", wider, "E_Q_SHAPE", "found shape [24, 3], expected [24, 2]");
  REFUSED("int4", "weight_packed", turned, "E_SHAPE", "found shape [5, 24], expected [24, 5] or [24, 10]");
  REFUSED("int4", "weight_scale", wider, "E_Q_SHAPE", "found shape [24, 6], expected [24, 40/g]");
  REFUSED("int4", "weight_scale", fewer_groups, "E_Q_SHAPE", "found a scale for every 40 columns, expected one for every");
  REFUSED("int4", "weight_shape", wider, "E_Q_SHAPE", "found shape [2, 1], expected [2]");
  REFUSED("int4", "weight_shape", one_row_more, "E_Q_SHAPE", "w1.weight_shape\": offset ");
  REFUSED("int4", "weight_shape", sides_turned, "E_Q_SHAPE", "found [40, 24] rows and columns, expected [24, 40] of \"");
  REFUSED("int4, asymmetric, reordered", "weight_zero_point", wider, "E_Q_SHAPE", "found shape [3, 6], expected [3, 5]");
  REFUSED("int4, asymmetric, reordered", "weight_g_idx", turned, "E_Q_SHAPE", "expected [40]");
  REFUSED("ModelOpt int4", "weight_scale", turned, "E_Q_SHAPE", "found shape [5, 24], expected [24, 40/g]");
  REFUSED("AWQ", "qweight", turned, "E_SHAPE", "found shape [3, 40], expected [40, 3], [5, 24] or [10, 24]");
  REFUSED("AWQ", "qzeros", turned, "E_Q_SHAPE", "found shape [3, 5], expected [5, 3]");
  REFUSED("AWQ", "scales", turned, "E_Q_SHAPE", "found shape [24, 5], expected [40/g, 24]");
  REFUSED("GPTQ", "qzeros", wider, "E_Q_SHAPE", "found shape [5, 4], expected [5, 3]");
  REFUSED("int8", "pre_quant_scale", wider, "E_Q_SHAPE", "expected [40]");
  REFUSED("NVFP4", "pre_quant_scale", turned, "E_Q_SHAPE", "expected [40]");
}

TEST(test_dtypes) {
  REFUSED("tensor-wise FP8", "weight", retyped, "E_DTYPE", "found F8_E5M2, expected F32, BF16, F16, F8_E4M3");
  REFUSED("per-channel FP8", "weight_scale", retyped, "E_Q_DTYPE", "found a scale of I16, expected F32, BF16, F16 or F8_E8M0");
  REFUSED("NVFP4", "weight_scale", retyped, "E_Q_DTYPE", "found a scale of F8_E5M2, expected F8_E4M3");
  REFUSED("NVFP4", "weight_scale_2", retyped, "E_Q_DTYPE", "found U32, expected F32");
  REFUSED("int4", "weight_packed", retyped, "E_DTYPE", "found U32, expected U8, F4 or I32");
  REFUSED("AWQ", "qzeros", retyped, "E_Q_DTYPE", "found U32, expected I32");
  REFUSED("GPTQ", "g_idx", retyped, "E_Q_DTYPE", "found U32, expected I32");
  REFUSED("GPTQ", "scales", retyped, "E_Q_DTYPE", "found a scale of I16, expected F32, BF16 or F16");
  REFUSED("int8", "pre_quant_scale", retyped, "E_Q_DTYPE", "found U32, expected F32, BF16 or F16");
}

TEST(test_scale_values) {
  static const char *const form[][2] = {{"tensor-wise FP8", "weight_scale"},
                                        {"per-channel FP8", "weight_scale"},
                                        {"MXFP8", "weight_scale"},
                                        {"NVFP4", "weight_scale"},
                                        {"NVFP4", "weight_scale_2"},
                                        {"compressed-tensors NVFP4", "weight_global_scale"},
                                        {"MXFP4", "weight_scale"},
                                        {"int4", "weight_scale"},
                                        {"ModelOpt int4", "weight_scale"},
                                        {"int8", "weight_scale"},
                                        {"SGLang W4AFP8", "weight_scale_inv"},
                                        {"AWQ", "scales"},
                                        {"GPTQ", "scales"},
                                        {"int8", "pre_quant_scale"},
                                        {"NVFP4", "pre_quant_scale"}};
  for (size_t i = 0; i < sizeof form / sizeof *form; i++) {
    bool exponent = strncmp(form[i][0], "MX", 2) == 0;
    bool may_be_negative = strstr(form[i][0], "W4AFP8") || strcmp(form[i][0], "int4") == 0 || form[i][1][0] == 's' ||
                           (strcmp(form[i][0], "int8") == 0 && form[i][1][0] == 'w');
    REFUSED(form[i][0], form[i][1], nan_value, "E_Q_SCALE", "found scale ");
    REFUSED(form[i][0], form[i][1], nan_value, "E_Q_SCALE", form[i][1]);
    if (!exponent) REFUSED(form[i][0], form[i][1], zero_value, "E_Q_SCALE", "found scale 0 of block row ");
    if (!exponent && !may_be_negative) REFUSED(form[i][0], form[i][1], negative_value, "E_Q_SCALE", "expected a positive number");
  }
  REFUSED("NVFP4", "weight_scale_2", huge_value, "E_Q_SCALE",
          "found scale 5e+35 of block row 0, column 0, expected a positive number, at most ");
  REFUSED("compressed-tensors NVFP4", "weight_global_scale", tiny_value, "E_Q_SCALE", "found scale 2e-36 of block row 0, column 0");
  static const char *const negative[][2] = {
      {"int4", "weight_scale"}, {"int8", "weight_scale"}, {"AWQ", "scales"}, {"GPTQ", "scales"}, {"SGLang W4AFP8", "weight_scale_inv"}};
  for (size_t i = 0; i < sizeof negative / sizeof *negative; i++) {
    source *s = encoded(form_of(negative[i][0]));
    char name[128];
    snprintf(name, sizeof name, W1 "%s", negative[i][1]);
    negative_value(s, src_find(s, name));
    src_write(s);
    src_accepted(s, (src_options){.depth = SRC_READ, .quant = "f32"}, negative[i][0]);
    src_close(s);
  }
}

/* Two scales over 40 columns are groups of 20, or of 32 and a rest; only a declared size decides. */
TEST(test_undeclared_groups) {
  for (int groups = 5; groups > 0; groups -= 3) {
    source *s = encoded(form_of("ModelOpt int4"));
    src_config(s, "\"W4A16_AWQ\",\"group_size\":8", "\"MIXED_PRECISION\"");
    src_tensor *t = src_find(s, W1 "weight_scale");
    reshape(t, t->dim[0], (uint64_t)groups);
    src_write(s);
    src_options o = {.depth = SRC_READ, .quant = "f32"};
    if (groups == 5)
      src_accepted(s, o, "groups of 8");
    else
      src_refused(s, o, "groups of 20 or 32", MM_BAD_INPUT, "E_Q_SHAPE",
                  "found 2 groups of 40 columns, which may be groups of 20 or of 32 with a shorter last one, expected one group_size in");
    src_close(s);
  }
}

TEST(test_order) {
  REFUSED("GPTQ", "g_idx", group_five, "E_Q_ORDER", "found group 5 of column 1, expected 0 to 4");
  REFUSED("GPTQ", "g_idx", group_minus_one, "E_Q_ORDER", "found group -1 of column 1, expected 0 to 4");
  REFUSED("int4, asymmetric, reordered", "weight_g_idx", group_five, "E_Q_ORDER", "w1.weight_g_idx\": offset ");
}

/* A symmetric GPTQ's zero points are all one number, and which one gives its format. */
TEST(test_zero_points) {
  static const struct {
    const char *format;
    uint8_t byte;
    bool right;
  } row[] = {{"gptq", 0x77, true},
             {"gptq", 0x88, false},
             {"gptq_v2", 0x88, true},
             {"gptq_v2", 0x77, false},
             {"gptq_v2\",\"format\":\"GPTQ_v2", 0x88, true},
             {NULL, 0x88, true},
             {NULL, 0x77, false}};
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    source *s = encoded(form_of("GPTQ v2"));
    if (row[i].format)
      src_config(s, "\"checkpoint_format\":\"gptq_v2\"", "\"sym\":true,\"checkpoint_format\":\"%s\"", row[i].format);
    else /* as GPTQModel writes it since version 6 */
      src_config(s, "\"checkpoint_format\":\"gptq_v2\"", "\"sym\":true,\"bits\":4,\"format\":\"gptq_v2\"");
    if (!row[i].format) src_config(s, "\"quant_method\"", "\"method\"");
    for (size_t t = 0; t < s->count; t++)
      if (strstr(s->t[t].name, "qzeros")) memset(s->t[t].data, row[i].byte, s->t[t].bytes);
    src_write(s);
    src_options o = {.depth = SRC_READ, .quant = "f32"};
    const char *what = row[i].format ? row[i].format : "format";
    if (row[i].right)
      src_accepted(s, o, what);
    else
      src_refused(s, o, what, MM_BAD_INPUT, "E_Q_ZERO",
                  row[i].byte == 0x88 ? "found zero point 9, expected 8" : "found zero point 7, expected 8");
    src_close(s);
  }
}

/* The configuration's claims, and whether they are read, whatever the tensors. */
TEST(test_configuration) {
  static const src_case row[] = {
      {"{\"quant_method\":\"bitsandbytes\"}", MM_UNSUPPORTED, "E_Q_METHOD", "found quant_method \"bitsandbytes\", expected one of fp8 "},
      {"{\"quant_method\":\"exl3\"}", MM_UNSUPPORTED, "E_Q_METHOD", "\"exl3\""},
      {"{\"quantization\":\"mix_quant\",\"moe_quant_type\":\"w4a8\"}", MM_UNSUPPORTED, "E_Q_METHOD",
       "found FastDeploy's quantization \"mix_quant\""},
      {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4_SVD\"}", MM_UNSUPPORTED, "E_Q_TRANSFORM", "NVFP4_SVD"},
      {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP6\"}", MM_UNSUPPORTED, "E_Q_METHOD", "found quant_algo \"FP6\""},
      {"{\"quant_method\":\"modelopt\"}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"quant_algo\""},
      {"{\"quant_method\":\"awq\",\"version\":\"gemv\"}", MM_UNSUPPORTED, "E_Q_METHOD", "found AWQ version \"gemv\""},
      {"{\"quant_method\":\"awq\",\"group_size\":\"x\"}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"group_size\""},
      {"{\"quant_method\":\"gptq\",\"checkpoint_format\":\"marlin\"}", MM_UNSUPPORTED, "E_Q_METHOD",
       "found GPTQ checkpoint_format \"marlin\""},
      {"{\"quant_method\":\"gptq\",\"checkpoint_format\":2}", MM_BAD_INPUT, "E_Q_CONFIG", "found 2, expected a string"},
      {"{\"quant_method\":\"gptq\",\"format\":\"marlin\"}", MM_UNSUPPORTED, "E_Q_METHOD", "\"marlin\""},
      {"{\"quant_method\":\"gptq\",\"method\":\"awq\"}", MM_BAD_INPUT, "E_Q_CONFIG",
       "key \"method\": found \"awq\", expected \"gptq\" as in key \"quant_method\""},
      {"{\"quant_method\":\"gptq\",\"format\":\"gptq\",\"checkpoint_format\":\"gptq_v2\"}", MM_BAD_INPUT, "E_Q_CONFIG",
       "key \"checkpoint_format\": found \"gptq_v2\", expected \"gptq\" as in key \"format\""},
      {"{\"quant_method\":\"gptq\",\"is_marlin_format\":true}", MM_UNSUPPORTED, "E_CFG_FEATURE", "is_marlin_format"},
      {"{\"quant_method\":\"awq\",\"format\":\"gemv\"}", MM_UNSUPPORTED, "E_Q_METHOD", "found AWQ version \"gemv\""},
      {"{\"quant_method\":\"awq\",\"version\":1}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"version\": found 1, expected a string"},
      {"{\"quant_method\":\"auto-round\",\"packing_format\":\"auto_round:x\"}", MM_UNSUPPORTED, "E_Q_METHOD", "auto_round:x"},
      {"{\"quant_method\":\"compressed-tensors\",\"format\":\"marlin-24\",\"config_groups\":{}}", MM_UNSUPPORTED, "E_Q_METHOD",
       "marlin-24"},
      {"{\"quant_method\":\"compressed-tensors\",\"sparsity_config\":{\"format\":\"sparse-24\"},\"config_groups\":{}}", MM_UNSUPPORTED,
       "E_Q_METHOD", "sparse-24"},
      {"{\"quant_method\":\"compressed-tensors\",\"transform_config\":{\"config_groups\":{\"R1\":{}}},\"config_groups\":{}}",
       MM_UNSUPPORTED, "E_Q_TRANSFORM", "found weights rotated by \"transform_config\""},
      {"{\"quant_method\":\"quark\",\"algo_config\":[{\"name\":\"rotation\"}]}", MM_UNSUPPORTED, "E_Q_TRANSFORM", "rotation"},
      {"{\"quant_method\":\"quark\",\"algo_config\":[{\"name\":\"smooth\"},{\"name\":\"rotation\"}]}", MM_UNSUPPORTED, "E_Q_TRANSFORM",
       "rotation"},
      {"{\"quant_method\":\"auto-round\",\"hadamard_config\":{\"x\":1}}", MM_UNSUPPORTED, "E_Q_TRANSFORM", "hadamard_config"},
      {"{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"a\":{\"weights\":{\"type\":\"float\",\"strategy\":\"block\",\"block_"
       "structure\":[4,3]}},"
       "\"b\":{\"weights\":{\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":[4,4]}}}}",
       MM_BAD_INPUT, "E_Q_CONFIG", "one block size"},
      {"{\"quant_method\":\"compressed-tensors\"}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"config_groups\""},
  };
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    source *s = src_open_as(dims);
    src_refuses(s, "\"quantization_config\":null", "\"quantization_config\":", SRC_OPEN, &row[i]);
    src_close(s);
  }
  static const char *const good[] = {"\"transform_config\":{}", "\"transform_config\":{\"config_groups\":{}}", "\"transform_config\":null",
                                     "\"sparsity_config\":{\"format\":\"dense\"}", "\"sparsity_config\":{}"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    source *s = encoded(form_of("int4"));
    src_config(s, "\"format\":\"pack-quantized\"", "%s", good[i]);
    src_write(s);
    src_accepted(s, (src_options){.depth = SRC_READ, .quant = "f32"}, good[i]);
    src_close(s);
  }
}

/* Every name that compressed-tensors has for columns out of the order of their groups, which only a g_idx places. */
TEST(test_names_of_orders) {
  static const struct {
    const char *word;
    bool order;
  } row[] = {{"\"group\"", true},   {"\"GROUP\"", true},   {"\"dynamic\"", true}, {"true", true},
             {"\"weight\"", false}, {"\"static\"", false}, {"false", false},      {"null", false}};
  const src_options o = {.depth = SRC_READ, .quant = "f32"};
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    source *s = encoded(form_of("int4"));
    src_config(s, "\"type\":\"int\"", "\"type\":\"%s\",\"actorder\":%s", row[i].order ? "INT" : "int", row[i].word);
    src_write(s);
    if (row[i].order)
      src_refused(s, o, row[i].word, MM_BAD_INPUT, "E_Q_MISSING", "weight_g_idx\", expected both");
    else
      src_accepted(s, o, row[i].word);
    src_close(s);
  }
  static const char *const bad[] = {"\"groups\"", "1", "[]"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    source *s = encoded(form_of("int4"));
    char says[64];
    snprintf(says, sizeof says, "key \"actorder\": found %s, expected group, ", bad[i]);
    src_config(s, "\"type\":\"int\"", "\"type\":\"int\",\"actorder\":%s", bad[i]);
    src_write(s);
    src_refused(s, o, bad[i], MM_BAD_INPUT, "E_Q_CONFIG", says);
    src_close(s);
  }
}

/* GPTQ's zero points by config.json and by quantize_config.json, which other programs read. */
TEST(test_two_configurations) {
  static const char *const text[] = {"{\"bits\":4,\"group_size\":8,\"format\":\"gptq_v2\"}", "{\"bits\":4,\"group_size\":8}"};
  for (size_t i = 0; i < 2; i++) {
    source *s = encoded(form_of("GPTQ v2"));
    src_write(s);
    put_file(src_path(s, "src/quantize_config.json"), text[i], strlen(text[i]));
    const src_options o = {.depth = SRC_READ, .quant = "f32"};
    if (i == 0)
      src_accepted(s, o, text[i]);
    else
      src_refused(s, o, text[i], MM_BAD_INPUT, "E_Q_CONFIG", "quantize_config.json: found format \"gptq\", expected \"gptq_v2\"");
    src_close(s);
  }
}

/* A configuration in its own file, and what its absence means. */
TEST(test_configuration_files) {
  static const struct {
    const char *form, *file, *text, *code, *says;
  } row[] = {
      {"NVFP4", "hf_quant_config.json", "{\"quantization\":{\"quant_algo\":\"NVFP4_AWQ\"}}", NULL, NULL},
      {"GPTQ", "quantize_config.json", "{\"bits\":4,\"group_size\":8}", NULL, NULL},
      {"AWQ", "quant_config.json", "{\"w_bit\":4,\"q_group_size\":8,\"version\":\"GEMM\"}", NULL, NULL},
      {"AWQ", "quant_config.json", "{\"w_bit\":4,\"q_group_size\":16}", "E_Q_SHAPE", "src/quant_config.json"},
      {"AWQ", "quant_config.json", "{\"q_group_size\":null,\"group_size\":8}", NULL, NULL},
      {"AWQ", "quant_config.json", "{\"q_group_size\":-1}", "E_Q_SHAPE", "for every 8 columns, expected one for every 40, a group_size of"},
      {"GPTQ", "quant_config.json", "{\"q_group_size\":8}", "E_Q_CONFIG", "leaves open how zero points are stored"},
      {"int8", "quant_model_description.json", "{\"a.weight\":\"W8A8\"}", "E_Q_METHOD", "found quant_method \"ModelSlim\""},
      {"int8", "quant_model_description.json", "{\"quarot\":{\"R1\":1}}", "E_Q_TRANSFORM", "found weights rotated by \"quarot\""},
      {"NVFP4", "hf_quant_config.json", "[]", "E_Q_CONFIG", "hf_quant_config.json"},
      {"NVFP4", "hf_quant_config.json", "{", "E_JSON", "hf_quant_config.json"},
      {"NVFP4", "no.json", "{}", "E_Q_CONFIG", "found codes of U8, but"},
  };
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    const struct form *f = form_of(row[i].form);
    source *s = encoded(f);
    src_config(s, f->config, "null");
    src_write(s);
    char path[64];
    snprintf(path, sizeof path, "src/%s", row[i].file);
    put_file(src_path(s, path), row[i].text, strlen(row[i].text));
    src_options o = {.depth = SRC_READ, .quant = "f32"};
    if (row[i].code)
      src_refused(s, o, row[i].text, row[i].code[4] == 'M' || row[i].code[4] == 'T' ? MM_UNSUPPORTED : MM_BAD_INPUT, row[i].code,
                  row[i].says);
    else
      src_accepted(s, o, row[i].text);
    src_close(s);
  }
}

/* Tensors that belong to nothing that is read. */
TEST(test_leftovers) {
  static const struct {
    const char *form, *name;
    mm_status status;
    const char *code, *says;
  } row[] = {
      {"NVFP4", "svdquant_lora_a", MM_UNSUPPORTED, "E_Q_TRANSFORM", "SVDQuant"},
      {"int8", "weight_offset", MM_UNSUPPORTED, "E_Q_METHOD", "ModelSlim"},
      {"MXFP8", "weight_zero_point", MM_BAD_INPUT, "E_Q_ORPHAN", "weight_zero_point"},
      {"per-channel FP8", "weight_scale_2", MM_BAD_INPUT, "E_Q_ORPHAN", "weight_scale_2"},
      {"AWQ", "g_idx", MM_BAD_INPUT, "E_Q_ORPHAN", "g_idx"},
      {"AWQ", "weight", MM_BAD_INPUT, "E_UNKNOWN", "w1.weight"},
  };
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    source *s = encoded(form_of(row[i].form));
    char name[128];
    snprintf(name, sizeof name, W1 "%s", row[i].name);
    src_add(s, name, "F32", 1, 3, 0);
    src_write(s);
    src_refused(s, (src_options){.depth = SRC_PLAN, .quant = "f32"}, name, row[i].status, row[i].code, row[i].says);
    src_close(s);
  }
  source *s = encoded(form_of("int8"));
  src_tensor *t = src_find(s, W1 "weight");
  snprintf(t->name, sizeof t->name, W1 "quant_weight");
  src_write(s);
  src_refused(s, (src_options){.depth = SRC_PLAN, .quant = "f32"}, "FastDeploy", MM_UNSUPPORTED, "E_Q_METHOD",
              "found FastDeploy's quant_weight");
  src_close(s);
}

/* A missing scale of the activations is no matter; tests/interop/static_inputs.py has wrong ones. */
TEST(test_input_scales) {
  source *s = encoded(form_of("tensor-wise FP8"));
  src_remove(s, W1 "input_scale");
  src_write(s);
  src_accepted(s, (src_options){.depth = SRC_READ, .quant = "none"}, "an expert without input_scale");
  src_close(s);
}

int main(void) { return run_unit_tests(NULL, NULL); }
