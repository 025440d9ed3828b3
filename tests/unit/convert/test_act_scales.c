/* Static scales of activations: every name, as JSON and as safetensors, gives the scale that it means; experts and pieces share the
 * largest; what is refused. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/calibration/act_scales.h"
#include "tests/unit/convert/rules.h"
#include "tests/unit/unit.h"

#define QKV "model.layers.0.self_attn.qkv_proj.weight"
#define W13 "model.layers.0.block_sparse_moe.experts.w13_weight"

static bool open_bytes(mm_act_scales *s, const void *data, size_t n, mm_err *err) {
  static char path[32]; /* the scales keep it */
  strcpy(path, "/tmp/act-scales-XXXXXX");
  int fd = mkstemp(path);
  assert_true(fd >= 0 && write(fd, data, n) == (ssize_t)n && close(fd) == 0);
  bool ok = mm_act_scales_open(s, path, err);
  assert_int_equal(unlink(path), 0);
  return ok;
}

/* A safetensors file: the length of the header, the header, the numbers. */
static bool open_tensors(mm_act_scales *s, const char *header, const void *data, size_t n, mm_err *err) {
  uint8_t file[1024];
  const uint64_t length = strlen(header);
  memcpy(file, &length, 8);
  memcpy(file + 8, header, length);
  memcpy(file + 8 + length, data, n);
  return open_bytes(s, file, 8 + length + n, err);
}

/* The scale of q, k and v under `scheme`, or of the three experts' w1 and w3 by name of ours; 0 where it is refused. */
static float found(const mm_act_scales *s, const char *ours, const char *scheme, uint64_t *without) {
  const bool stacked = strcmp(ours, W13) == 0;
  const mm_rule *attention[] = {rule("q_proj.weight"), rule("k_proj.weight"), rule("v_proj.weight")};
  const mm_rule *expert[] = {rule("{e}.w1.weight"), rule("{e}.w3.weight")};
  mm_pack_tensor t = {.name = ours, .piece_count = stacked ? 2 : 3, .input_scale = -1};
  mm_err err = {0};
  *without = 0;
  if (mm_act_scales_find(s, &t, stacked ? expert : attention, 0, 3, mm_scheme_find(scheme), without, &err)) return t.input_scale;
  assert_string_equal(err.code, "E_ACT_SCALES");
  return 0;
}

static float of_json(const char *text, const char *ours, const char *scheme, uint64_t *without) {
  mm_act_scales s;
  mm_err err = {0};
  if (!open_bytes(&s, text, strlen(text), &err)) fail_msg("%s: %s", text, err.text);
  float scale = found(&s, ours, scheme, without);
  mm_act_scales_close(&s);
  return scale;
}

/* FP8's largest number is 448; NVFP4's 6 under scales of up to 448. */
TEST(names) {
  static const struct {
    const char *text;
    float fp8, nvfp4;
  } all[] = {
      {"{\"" QKV ".amax\": 5.25}", 5.25F / 448, 5.25F / 2688},
      {"{\"model.layers.0.self_attn.q_proj.weight.amax\": 5.25}", 5.25F / 448, 5.25F / 2688},
      {"{\"model.layers.0.self_attn.k_proj.activation_scale\": 7}", 7.0F / 448, 7.0F / 2688},
      {"{\"model.layers.0.self_attn.v_proj.input_scale\": 0.75}", 0.75F, 0.75F},
      {"{\"model.layers.0.self_attn.v_proj.input_global_scale\": 8}", 0.125F, 0.125F},
      /* the largest of what shares the tensor, wherever it stands; a zero was never reached */
      {"{\"model.layers.0.self_attn.q_proj.input_scale\": 3, \"model.layers.0.self_attn.k_proj.input_scale\": 4,"
       " \"model.layers.0.self_attn.v_proj.input_scale\": 2}",
       4, 4},
      {"{\"model.layers.0.self_attn.q_proj.input_global_scale\": 0, \"model.layers.0.self_attn.k_proj.input_global_scale\": 4,"
       " \"model.layers.0.self_attn.v_proj.input_global_scale\": 2}",
       0.5F, 0.5F},
      /* our own name goes before theirs; other layers are others' */
      {"{\"model.layers.0.self_attn.qkv_proj.input_scale\": 2, \"model.layers.0.self_attn.q_proj.input_scale\": 9}", 2, 2},
      {"{\"model.layers.1.self_attn.q_proj.input_scale\": 9, \"model.layers.0.self_attn.q_proj.input_scale\": 2}", 2, 2},
      {"{\"model.layers.1.self_attn.q_proj.input_scale\": 9}", 0, 0},
      {"{\"model.layers.0.self_attn.q_proj.input_scale\": 0}", 0, 0},
  };
  uint64_t without;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    assert_float_equal(of_json(all[i].text, QKV, "tensor_wise_fp8", &without), all[i].fp8, all[i].fp8 * 0x1p-22F);
    assert_float_equal(of_json(all[i].text, QKV, "nvfp4", &without), all[i].nvfp4, all[i].nvfp4 * 0x1p-22F);
    assert_int_equal(without, 0);
  }
}

/* Experts that calibration never reached are counted; one name may have a number for each expert. */
TEST(experts) {
  uint64_t without;
#define OF(e, w, v) "\"model.layers.0.block_sparse_moe.experts." #e "." #w ".input_scale\": " #v
  assert_true(of_json("{" OF(0, w1, 2) ", " OF(0, w3, 5) ", " OF(2, w1, 3) "}", W13, "tensor_wise_fp8", &without) == 5);
  assert_int_equal(without, 1);
  assert_true(of_json("{" OF(1, w3, 2) "}", W13, "tensor_wise_fp8", &without) == 2);
  assert_int_equal(without, 2);
  assert_true(of_json("{" OF(0, w1, 2) ", " OF(1, w1, 7) ", " OF(2, w3, 3) "}", W13, "tensor_wise_fp8", &without) == 7);
  assert_int_equal(without, 0);
  assert_true(of_json("{" OF(3, w1, 2) "}", W13, "tensor_wise_fp8", &without) == 0); /* there are three */

  static const struct {
    const char *dtype;
    uint16_t number[6];
    size_t bytes;
    float most;
    uint64_t without;
  } all[] = {{"F32", {0, 0x4000, 0, 0x40a0, 0, 0x4040}, 12, 5, 0},
             {"F32", {0, 0x4000, 0, 0, 0, 0x4040}, 12, 3, 1},
             {"BF16", {0x4000, 0x4040, 0x40a0}, 6, 5, 0},
             {"F16", {0x4700, 0, 0}, 6, 7, 2}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    char header[512];
    snprintf(header, sizeof header,
             "{\"a.weight\": {\"dtype\": \"U8\", \"shape\": [2], \"data_offsets\": [0, 2]}, \"" W13
             ".amax\": {\"dtype\": \"%s\", \"shape\": [3], \"data_offsets\": [2, %zu]}}",
             all[i].dtype, 2 + all[i].bytes);
    uint8_t data[16] = {9, 9};
    memcpy(data + 2, all[i].number, all[i].bytes);
    mm_act_scales s;
    mm_err err = {0};
    if (!open_tensors(&s, header, data, 2 + all[i].bytes, &err)) fail_msg("%s", err.text);
    assert_float_equal(found(&s, W13, "tensor_wise_fp8", &without), all[i].most / 448, all[i].most * 0x1p-30F);
    assert_int_equal(without, all[i].without);
    mm_act_scales_close(&s);
  }
}

/* A stack has one number, one for each of its 3 experts, or one for each of its 6 matrices. */
TEST(other_numbers_of_experts) {
  for (unsigned n = 1; n <= 7; n++) {
    char header[256];
    const uint16_t number[7] = {0x4000, 0x4040, 0x4080, 0x4080, 0x40a0, 0x4040, 0x4000};
    snprintf(header, sizeof header, "{\"" W13 ".amax\": {\"dtype\": \"BF16\", \"shape\": [%u], \"data_offsets\": [0, %u]}}", n, 2 * n);
    mm_act_scales s;
    mm_err err = {0};
    uint64_t without;
    assert_true(open_tensors(&s, header, number, 2 * n, &err));
    assert_int_equal(found(&s, W13, "tensor_wise_fp8", &without) > 0, n == 1 || n == 3 || n == 6);
    mm_act_scales_close(&s);
  }
}

TEST(contradicting_kinds) {
  static const struct {
    const char *text;
    bool fits;
  } all[] = {{"{\"" W13 ".amax\": 448, \"model.layers.0.block_sparse_moe.experts.w13_input_scale\": 1}", true},
             {"{\"" W13 ".amax\": 448, \"model.layers.0.block_sparse_moe.experts.w13_input_scale\": 1.01}", true}, /* rounded */
             {"{\"" W13 ".amax\": 448, \"model.layers.0.block_sparse_moe.experts.w13_input_scale\": 0}", true},    /* not reached */
             {"{\"" W13 ".amax\": 448, \"model.layers.0.block_sparse_moe.experts.w13_input_scale\": 0.01}", false},
             {"{\"" W13 ".amax\": 100, \"model.layers.0.block_sparse_moe.experts.w13_input_scale\": 1}", false}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mm_act_scales s;
    mm_err err = {0};
    uint64_t without;
    assert_true(open_bytes(&s, all[i].text, strlen(all[i].text), &err));
    assert_int_equal(found(&s, W13, "tensor_wise_fp8", &without) > 0, all[i].fits);
    mm_act_scales_close(&s);
  }
}

TEST(other_models) {
  static const struct {
    const char *name;
    bool fits;
  } all[] = {{"model.layers.1.block_sparse_moe.experts.2.w1.input_scale", true},
             {"model.layers.1.block_sparse_moe.experts.3.w1.input_scale", false},
             {"model.layers.1.block_sparse_moe.experts.10.w1.activation_scale", false},
             {"model.layers.1.self_attn.qkv_proj.weight.amax", true},
             {"model.layers.2.self_attn.qkv_proj.weight.amax", false},
             {"model.layers.99999999999.self_attn.qkv_proj.weight.amax", false},
             {"model.layers.2.self_attn.o_proj.input_scale", false},
             {"lm_head.weight.amax", true}};
  const mm_model model = {.layers = 2, .experts = 3};
  const mm_rule *attention[] = {rule("q_proj.weight"), rule("k_proj.weight"), rule("v_proj.weight")};
  const mm_rule *expert[] = {rule("{e}.w1.weight"), rule("{e}.w3.weight")};
  const mm_pack_tensor qkv = {.name = "model.layers.1.self_attn.qkv_proj.weight", .piece_count = 3};
  const mm_pack_tensor w13 = {.name = "model.layers.1.block_sparse_moe.experts.w13_weight", .piece_count = 2},
                       head = {.name = "lm_head.weight"};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    char text[128];
    mm_act_scales s;
    mm_err err = {0};
    snprintf(text, sizeof text, "{\"%s\": 1}", all[i].name);
    assert_true(open_bytes(&s, text, strlen(text), &err));
    mm_act_scales_mark(&s, &qkv, attention, 1, 3), mm_act_scales_mark(&s, &w13, expert, 1, 3),
        mm_act_scales_mark(&s, &head, attention, 0, 3);
    assert_int_equal(mm_act_scales_of_model(&s, &model, &err), all[i].fits);
    if (!all[i].fits) assert_non_null(strstr(err.text, "found a scale of another model, expected 2 layers of 3 experts"));
    mm_act_scales_close(&s);
  }
}

/* A checkpoint's own file has names of tensors that are not read, and of multi-token prediction; in JSON each was meant. */
TEST(names_of_no_tensor) {
  static const char *const name[] = {"model.layers.2.self_attn.o_proj.input_scale", "model.layers.1.self_attn.x_proj.input_scale",
                                     "model.layers.0.mlp.fc1.input_scale"};
  const mm_model model = {.layers = 2, .experts = 3};
  for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
    char header[256], text[128];
    mm_act_scales s;
    mm_err err = {0};
    snprintf(header, sizeof header, "{\"%s\": {\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [0, 4]}}", name[i]);
    assert_true(open_tensors(&s, header, "\0\0\x80\x3f", 4, &err));
    assert_true(mm_act_scales_of_model(&s, &model, &err));
    mm_act_scales_close(&s);
    snprintf(text, sizeof text, "{\"%s\": 1}", name[i]);
    assert_true(open_bytes(&s, text, strlen(text), &err));
    assert_false(mm_act_scales_of_model(&s, &model, &err));
    assert_string_equal(err.code, "E_ACT_SCALES");
    assert_non_null(strstr(err.text, i == 0 ? "found a scale of another model" : "found the name of no tensor of this model"));
    mm_act_scales_close(&s);
  }
}

TEST(refused) {
  static const char *const all[][2] = {
      {"", "found 0 bytes, expected 1 to 16 GiB"},
      {"{}", "found no scale of activations"},
      {"{\"a.input_scale\": -1}", "found -1, expected a positive number"},
      {"{\"a.input_scale\": 1e300}", "found 1e+300, expected a number from 2^-126 to 2^126"}, /* F32 and its reciprocal */
      {"{\"a.input_scale\": 1e-300}", "found 1e-300, expected a number from 2^-126 to 2^126"},
      {"{\"a.input_global_scale\": 1e-44}", "found 1e-44, expected a number from 2^-126 to 2^126"},
      {"{\"a.input_scale\": \"1\"}", "expected a number under a name"},
      {"{\"a.scale\": 1}", "expected a number under a name"},
      {"{\"input_scale\": 1}", "expected a number under a name"}, /* nothing before it */
      {"{\"a.input_scale\": 1", "expected"},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mm_act_scales s;
    mm_err err = {0};
    assert_false(open_bytes(&s, all[i][0], strlen(all[i][0]), &err));
    assert_int_equal(err.status, MM_BAD_INPUT);
    if (!strstr(err.text, all[i][1])) fail_msg("%s: %s", all[i][0], err.text);
    mm_act_scales_close(&s);
  }
  static const struct {
    const char *dtype, *shape, *says;
    size_t bytes;
    uint32_t number;
  } tensors[] = {{"I32", "[1]", "found I32, expected F32, BF16 or F16", 4, 1},
                 {"F32", "[0]", "expected F32, BF16 or F16", 0, 0},
                 {"F32", "[]", "found inf, expected a positive number", 4, 0x7f800000},
                 {"F32", "[]", "expected a positive number", 4, 0x7fc00000},
                 {"F32", "[1]", "found -1, expected a positive number", 4, 0xbf800000}};
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
    char header[256];
    snprintf(header, sizeof header, "{\"a.amax\": {\"dtype\": \"%s\", \"shape\": %s, \"data_offsets\": [0, %zu]}}", tensors[i].dtype,
             tensors[i].shape, tensors[i].bytes);
    mm_act_scales s;
    mm_err err = {0};
    assert_false(open_tensors(&s, header, &tensors[i].number, tensors[i].bytes, &err));
    assert_string_equal(err.code, "E_ACT_SCALES");
    if (!strstr(err.text, tensors[i].says)) fail_msg("%s", err.text);
    mm_act_scales_close(&s);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
