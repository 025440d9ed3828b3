/* convert/plan/target_format: what each scheme is called in each target_format and what the configs say, after the engines' own formats;
 * what a target_format refuses; the numbers that are stored otherwise than ours. */
#include "convert/plan/target_format.h"

#include "tests/unit/convert/source.h"

typedef struct planned {
  source *s;
  mm_hf hf;
  mm_plan plan;
  mm_err err;
  bool ok;
} planned;

/* An unsharded plan of one BF16 layer whose extents are multiples of 128, but for `inter`. */
static planned *plan_of(const char *quant, const char *target_format, unsigned inter) {
  planned *p = calloc(1, sizeof *p);
  assert_non_null(p);
  p->s = src_open_as((src_dims){256, 4, 2, 64, 3, inter, 70, true});
  src_write(p->s);
  const mm_plan_options o = {
      .quant = quant, .target_format = target_format, .tp = 1, .ep = 1, .pp = 1, .part_size = 1 << 30, .layout = &mm_layout_hf};
  p->ok = mm_hf_open(&p->hf, src_path(p->s, "src"), &(mm_hf_options){0}, &p->err) && mm_plan_build(&p->plan, &p->hf, &o, &p->err);
  return p;
}

static void end(planned *p) {
  mm_plan_close(&p->plan);
  mm_hf_close(&p->hf);
  src_close(p->s);
  free(p);
}

static const mm_pack_tensor *tensor_of(const planned *p, const char *piece) {
  for (size_t i = 0; i < p->plan.pack.tensor_count; i++)
    if (strcmp(p->plan.pack.tensor[i].piece[0].source, piece) == 0) return &p->plan.pack.tensor[i];
  fail_msg("no tensor of %s", piece);
  return NULL;
}

static const char *const attention = "model.layers.0.self_attn.q_proj.weight", *const head = "lm_head.weight";

TEST(test_suffixes) {
  static const struct {
    const char *target_format, *scheme, *suffix[4];
    mm_dtype codes;
  } rows[] = {{"fp8", "block_fp8", {".weight", ".weight_scale_inv"}, MM_F8_E4M3},
              {"fp8", "tensor_wise_fp8", {".weight", ".weight_scale_inv"}, MM_F8_E4M3},
              {"ct", "block_fp8", {".weight", ".weight_scale"}, MM_F8_E4M3},
              {"ct", "channel_fp8", {".weight", ".weight_scale"}, MM_F8_E4M3},
              {"ct", "tensor_wise_fp8", {".weight", ".weight_scale"}, MM_F8_E4M3},
              {"ct", "int8", {".weight", ".weight_scale"}, MM_I8},
              {"ct", "w4a16", {".weight_packed", ".weight_scale", ".weight_shape"}, MM_I32},
              {"ct", "w4afp8", {".weight_packed", ".weight_scale", ".weight_shape"}, MM_I32},
              {"ct", "nvfp4a16", {".weight_packed", ".weight_scale", ".weight_global_scale"}, MM_U8},
              {"ct", "mxfp4", {".weight_packed", ".weight_scale"}, MM_U8},
              {"ct", "mxfp8", {".weight", ".weight_scale"}, MM_F8_E4M3},
              {"modelopt", "nvfp4a16", {".weight", ".weight_scale", ".weight_scale_2"}, MM_U8}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    planned *p = plan_of(rows[i].scheme, rows[i].target_format, 128);
    if (!p->ok) fail_msg("%s in %s: %s", rows[i].scheme, rows[i].target_format, p->err.text);
    assert_string_equal(mm_target_format_name(p->plan.target_format), rows[i].target_format);
    const mm_pack_tensor *t = tensor_of(p, attention);
    for (unsigned j = 0; j < 4; j++) {
      assert_int_equal(j < t->plane_count, rows[i].suffix[j] != NULL);
      if (rows[i].suffix[j]) assert_string_equal(t->plane[j].suffix, rows[i].suffix[j]);
    }
    assert_int_equal(t->plane[0].dtype, rows[i].codes);
    assert_string_equal(tensor_of(p, head)->plane[0].suffix, ""); /* kept: the name as it is */
    end(p);
  }
  planned *p = plan_of("none", NULL, 128);
  assert_true(p->ok && !p->plan.target_format);
  assert_string_equal(mm_target_format_name(p->plan.target_format), "none");
  end(p);
}

static mm_json *text_of(planned *p, const char *name) {
  for (int i = 0; i < MM_PLAN_TEXTS && p->plan.text[i].name; i++)
    if (strcmp(p->plan.text[i].name, name) == 0) {
      mm_json *j = mm_json_parse(p->plan.text[i].text, strlen(p->plan.text[i].text), name, &p->err);
      assert_non_null(j);
      return j;
    }
  return NULL;
}

static bool has(const mm_json *list, const char *word) {
  for (size_t i = 0; i < mm_json_size(list); i++)
    if (strcmp(mm_json_str(mm_json_at(list, i)), word) == 0) return true;
  return false;
}

TEST(test_configs) {
  planned *p = plan_of("block_fp8", NULL, 128); /* fp8 is tried first */
  assert_true(p->ok);
  mm_json *j = text_of(p, "config.json");
  const mm_json *q = mm_json_get(j, "quantization_config"), *left = mm_json_get(q, "modules_to_not_convert");
  assert_string_equal(mm_json_str(mm_json_get(q, "quant_method")), "fp8");
  assert_int_equal(mm_json_int(mm_json_at(mm_json_get(q, "weight_block_size"), 1)), 128);
  assert_true(has(left, "lm_head") && has(left, "model.embed_tokens") && has(left, "model.layers.0.block_sparse_moe.gate"));
  assert_true(has(left, "model.layers.0.mlp.gate") && !has(left, "model.layers.0.self_attn.q_proj"));
  assert_null(text_of(p, "hf_quant_config.json"));
  mm_json_free(j);
  end(p);

  p = plan_of("block_fp8; *.experts.*=nvfp4a16; *.o_proj.*=bf16", NULL, 128); /* two schemes: ct alone mixes */
  assert_true(p->ok);
  j = text_of(p, "config.json");
  q = mm_json_get(j, "quantization_config");
  left = mm_json_get(q, "ignore");
  assert_string_equal(mm_json_str(mm_json_get(q, "quant_method")), "compressed-tensors");
  assert_string_equal(mm_json_str(mm_json_get(q, "format")), "mixed-precision");
  const mm_json *groups = mm_json_get(q, "config_groups"), *last = mm_json_get(groups, "group_1");
  assert_int_equal(mm_json_size(groups), 2);
  assert_string_equal(mm_json_str(mm_json_at(mm_json_get(last, "targets"), 0)), "Linear"); /* of the commonest, and last */
  assert_string_equal(mm_json_str(mm_json_get(last, "format")), "nvfp4-pack-quantized");
  const mm_json *named = mm_json_get(mm_json_get(groups, "group_0"), "targets");
  assert_true(has(named, "re:^model\\.layers\\.\\d+\\.self_attn\\.q_proj$") &&
              has(named, "re:^model\\.layers\\.\\d+\\.self_attn\\.qkv_proj$"));
  assert_true(has(left, "model.layers.0.self_attn.o_proj") && has(left, "lm_head") && mm_json_size(named) == 4);
  mm_json_free(j);
  end(p);

  p = plan_of("none; *.self_attn.*_proj*=nvfp4a16", "modelopt", 128);
  assert_true(p->ok && mm_target_format_file("hf_quant_config.json") && !mm_target_format_file("config.json"));
  j = text_of(p, "hf_quant_config.json");
  q = mm_json_get(j, "quantization");
  assert_string_equal(mm_json_str(mm_json_get(q, "quant_algo")), "W4A16_NVFP4");
  assert_true(has(mm_json_get(q, "exclude_modules"), "model.layers.0.block_sparse_moe.experts.2.w1"));
  assert_true(has(mm_json_get(q, "exclude_modules"), "model.layers.0.block_sparse_moe.experts"));
  mm_json_free(j);
  end(p);
}

TEST(test_refused) {
  static const struct {
    const char *quant, *target_format;
    unsigned inter;
    mm_status status;
    const char *says;
  } rows[] = {
      {"w4a8", NULL, 128, MM_UNSUPPORTED, "found w4a8, which dialect ct cannot represent"},
      {"nvfp4", "modelopt", 128, MM_UNSUPPORTED, "nvfp4 with static scales of the inputs, bf16 or none"},
      {"int8", "fp8", 128, MM_UNSUPPORTED, "tensor \"model.layers.0.self_attn.q_proj.weight\": found int8, which dialect fp8"},
      {"int8; lm_head*=int8", "ct", 128, MM_UNSUPPORTED, "tensor \"lm_head.weight\": found int8, but engines keep embedding and head"},
      {"w4a16", "ct", 192, MM_UNSUPPORTED, "w4a16 of 192 columns, but dialect ct holds whole groups of 128"},
      {"block_fp8; *.o_proj.*=tensor_wise_fp8", "fp8", 128, MM_UNSUPPORTED, "found tensor_wise_fp8 and block_fp8"},
      {"int8", "gguf", 128, MM_USAGE, "found dialect \"gguf\", expected fp8, ct, modelopt, gptq or awq"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    planned *p = plan_of(rows[i].quant, rows[i].target_format, rows[i].inter);
    if (p->ok || p->err.status != rows[i].status || strcmp(p->err.code, "E_DIALECT") != 0 || !strstr(p->err.text, rows[i].says))
      fail_msg("%s in %s: found %s", rows[i].quant, rows[i].target_format, p->err.text);
    end(p);
  }
  planned *p = plan_of("w4a16; *.w2.*=int8", "ct", 192); /* as --override would have it */
  assert_true(p->ok);
  end(p);
}

TEST(test_numbers) {
  const mm_scheme *nvfp4 = mm_scheme_find("nvfp4a16"), *w4afp8 = mm_scheme_find("w4afp8");
  const mm_target_naming reciprocal = {.reciprocal = true}, offset = {.offset = true}, plain = {0};
  float global = 0.25f;
  mm_target_format_scale(&plain, nvfp4, 2, 1, &global, sizeof global);
  assert_true(global == 0.25f);
  mm_target_format_scale(&reciprocal, nvfp4, 1, 1, &global, sizeof global); /* block scales stay */
  assert_true(global == 0.25f);
  mm_target_format_scale(&reciprocal, nvfp4, 2, 0, &global, sizeof global);
  assert_true(global == 4);
  mm_target_format_scale(&reciprocal, nvfp4, 2, 1, &global, sizeof global);
  assert_true(global == 0x1.000002p-2F);
  global = 4;
  mm_target_format_scale(&reciprocal, nvfp4, 2, -1, &global, sizeof global);
  assert_true(global == 0x1.fffffep-3F);
  uint8_t codes[] = {0x80, 0x7f, 0x08, 0xf1}; /* -8 and 0; -1 and 7; 0 and -8; 1 and -1 */
  mm_target_format_scale(&offset, w4afp8, 1, 0, codes, sizeof codes);
  assert_memory_equal(codes, "\x80\x7f\x08\xf1", 4);
  mm_target_format_scale(&offset, w4afp8, 0, 0, codes, sizeof codes);
  assert_memory_equal(codes, "\x08\xf7\x80\x79", 4);
}

int main(void) { return run_unit_tests(NULL, NULL); }
