/* The small source of source.h with every linear quantised, in each encoding of convert/source/encoding_table.c: its tensors with arbitrary
 * contents, and by the encoding's definition what element [n, k] is. Sizes are no multiples of blocks, groups or words of four rows. */
#ifndef MM_TESTS_CONVERT_ENCODED_H
#define MM_TESTS_CONVERT_ENCODED_H

#include <math.h>

#include "tests/unit/convert/source.h"

static const src_dims dims = {40, 2, 1, 8, 2, 24, 12, true};
enum { GROUP = 8 }; /* divides 40, 24 and 16 */

/* A linear on its way to being quantised. */
typedef struct linear {
  source *s;
  char stem[96]; /* "…w1." */
  uint64_t n, k;
} linear;

static const char *tensor_name(const linear *l, const char *suffix) {
  static char text[2][160];
  static unsigned turn;
  char *out = text[turn++ % 2];
  snprintf(out, sizeof text[0], "%s%s", l->stem, suffix);
  return out;
}

static uint32_t hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

typedef enum contents { CODES, SCALES } contents;

/* Adds a tensor: any codes but NaN; scales are positive and of sizes that multiply without underflow. */
static src_tensor *put(const linear *l, contents what, const char *suffix, const char *dtype, unsigned rank, uint64_t a, uint64_t b) {
  src_tensor *t = src_add(l->s, tensor_name(l, suffix), dtype, rank, a, b);
  bool e4m3 = strcmp(dtype, "F8_E4M3") == 0;
  for (size_t i = 0; i < t->bytes; i++) {
    uint32_t x = hash((uint32_t)(i + 977 * l->s->count + 31 * l->n));
    uint8_t any = (uint8_t)x, code = e4m3 && (any & 0x7f) == 0x7f ? (uint8_t)(any ^ 1) : any;
    if (what == CODES) t->data[i] = code;
    if (what == SCALES && src_size(dtype) == 1) t->data[i] = (uint8_t)(e4m3 ? 1 + x % 0x7e : 110 + x % 30);
  }
  return t;
}

static const src_tensor *get(const linear *l, const char *suffix) { return src_find(l->s, tensor_name(l, suffix)); }
static uint32_t byte_of(const linear *l, const char *suffix, uint64_t i) { return get(l, suffix)->data[i]; }
static uint32_t word_of(const linear *l, const char *suffix, uint64_t i) {
  uint32_t v;
  memcpy(&v, get(l, suffix)->data + 4 * i, 4);
  return v;
}
static float e4m3(uint32_t c) {
  int e = c >> 3 & 15, m = c & 7;
  float v = e ? ldexpf(1 + (float)m / 8, e - 7) : ldexpf((float)m, -9);
  return c & 0x80 ? -v : v;
}
static float e2m1(uint32_t c) {
  static const float value[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return c & 8 ? -value[c & 7] : value[c & 7];
}
static float number(const linear *l, const char *suffix, uint64_t i) {
  const src_tensor *t = get(l, suffix);
  uint32_t bits = 0;
  uint16_t h = 0;
  float f;
  if (strcmp(t->dtype, "F8_E4M3") == 0) return e4m3(t->data[i]);
  if (src_size(t->dtype) == 1) return ldexpf(1, t->data[i] - 127);
  if (src_size(t->dtype) == 2) memcpy(&h, t->data + 2 * i, 2);
  if (strcmp(t->dtype, "F16") == 0) return (h & 0x8000 ? -1.0f : 1.0f) * ldexpf((float)((h & 0x3ff) + 1024), (h >> 10 & 31) - 25);
  bits = (uint32_t)h << 16;
  if (src_size(t->dtype) == 4) memcpy(&bits, t->data + 4 * i, 4);
  memcpy(&f, &bits, 4);
  return f;
}
static uint32_t nibble(uint32_t v, uint64_t i) { return v >> (4 * i) & 15; }
static uint64_t up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/* ---- the encodings: their tensors, and what element [n, k] is ---- */

#define ADD(name)  static void add_##name(const linear *l)
#define WANT(name) static float want_##name(const linear *l, uint64_t n, uint64_t k)

ADD(block_fp8) {
  put(l, CODES, "weight", "F8_E4M3", 2, l->n, l->k);
  put(l, SCALES, "weight_scale_inv", "BF16", 2, up(l->n, 4), up(l->k, 3));
}
WANT(block_fp8) { return e4m3(byte_of(l, "weight", n * l->k + k)) * number(l, "weight_scale_inv", n / 4 * up(l->k, 3) + k / 3); }

ADD(ct_block) {
  put(l, CODES, "weight", "F8_E4M3", 2, l->n, l->k);
  put(l, SCALES, "weight_scale", "F32", 2, up(l->n, 4), up(l->k, 3));
}
WANT(ct_block) { return e4m3(byte_of(l, "weight", n * l->k + k)) * number(l, "weight_scale", n / 4 * up(l->k, 3) + k / 3); }

ADD(pb_wo) {
  put(l, CODES, "weight", "F8_E4M3", 2, l->n, l->k);
  src_tensor *t = put(l, SCALES, "weight_scale", "F32", 2, up(l->n, 128), up(l->k, 128));
  t->rank = 4;
  t->dim[2] = t->dim[1];
  t->dim[1] = t->dim[3] = 1;
}
ADD(tensor_fp8) {
  put(l, CODES, "weight", "F8_E4M3", 2, l->n, l->k);
  put(l, SCALES, "weight_scale", "F32", l->n == 40 ? 0 : l->n == 24 ? 1 : 2, 1, 1);
  put(l, SCALES, "input_scale", "F32", 0, 0, 0);
}
WANT(tensor_fp8) { return e4m3(byte_of(l, "weight", n * l->k + k)) * number(l, "weight_scale", 0); }

ADD(channel_fp8) {
  put(l, CODES, "weight", "F8_E4M3", 2, l->n, l->k);
  put(l, SCALES, "weight_scale", l->n == 24 ? "BF16" : "F32", l->n == 40 ? 1 : 2, l->n, 1);
}
WANT(channel_fp8) { return e4m3(byte_of(l, "weight", n * l->k + k)) * number(l, "weight_scale", n); }

ADD(mxfp8) {
  put(l, CODES, "weight", "F8_E4M3", 2, l->n, l->k);
  put(l, SCALES, "weight_scale", l->n == 24 ? "U8" : "F8_E8M0", 2, l->n, up(l->k, 32));
}
WANT(mxfp8) { return e4m3(byte_of(l, "weight", n * l->k + k)) * number(l, "weight_scale", n * up(l->k, 32) + k / 32); }

ADD(nvfp4) {
  put(l, CODES, "weight", "U8", 2, l->n, l->k / 2);
  put(l, SCALES, "weight_scale", "F8_E4M3", 2, l->n, up(l->k, 16));
  put(l, SCALES, "weight_scale_2", "F32", 0, 0, 0);
  put(l, SCALES, "pre_quant_scale", "BF16", 1, l->k, 0);
}
WANT(nvfp4) {
  float scale = number(l, "weight_scale", n * up(l->k, 16) + k / 16) * number(l, "weight_scale_2", 0);
  return e2m1(nibble(byte_of(l, "weight", (n * l->k + k) / 2), k % 2)) * scale * number(l, "pre_quant_scale", k);
}

ADD(nvfp4_ct) {
  put(l, CODES, "weight_packed", "U8", 2, l->n, l->k / 2);
  put(l, SCALES, "weight_scale", "F8_E4M3", 2, l->n, up(l->k, 16));
  put(l, SCALES, "weight_global_scale", "F32", 1, 1, 0);
}
WANT(nvfp4_ct) {
  float scale = number(l, "weight_scale", n * up(l->k, 16) + k / 16) / number(l, "weight_global_scale", 0);
  return e2m1(nibble(byte_of(l, "weight_packed", (n * l->k + k) / 2), k % 2)) * scale;
}

ADD(mxfp4) {
  put(l, CODES, "weight", "U8", 2, l->n, l->k / 2);
  put(l, SCALES, "weight_scale", "U8", 2, l->n, up(l->k, 32));
}
WANT(mxfp4) { return e2m1(nibble(byte_of(l, "weight", (n * l->k + k) / 2), k % 2)) * number(l, "weight_scale", n * up(l->k, 32) + k / 32); }

ADD(ct_int4) {
  put(l, CODES, "weight_packed", "I32", 2, l->n, l->k / 8);
  put(l, SCALES, "weight_scale", "F16", 2, l->n, l->k / GROUP);
  src_tensor *t = put(l, CODES, "weight_shape", "I64", 1, 2, 0);
  memcpy(t->data, (int64_t[2]){(int64_t)l->n, (int64_t)l->k}, 2 * sizeof(int64_t));
}
WANT(ct_int4) {
  float code = (float)nibble(word_of(l, "weight_packed", (n * l->k + k) / 8), k % 8) - 8;
  return code * number(l, "weight_scale", n * (l->k / GROUP) + k / GROUP);
}

/* A group for every column, in no order. */
static void put_order(const linear *l, const char *suffix) {
  src_tensor *t = put(l, CODES, suffix, "I32", 1, l->k, 0);
  for (uint32_t k = 0; k < l->k; k++) memcpy(t->data + 4 * k, &(uint32_t){hash(k) % (uint32_t)(l->k / GROUP)}, 4);
}

ADD(ct_asym) {
  add_ct_int4(l);
  put(l, CODES, "weight_zero_point", "I32", 2, up(l->n, 8), l->k / GROUP);
  put_order(l, "weight_g_idx");
}
WANT(ct_asym) {
  uint64_t groups = l->k / GROUP, g = word_of(l, "weight_g_idx", k);
  int zero = (int)nibble(word_of(l, "weight_zero_point", n / 8 * groups + g), n % 8);
  return (float)((int)nibble(word_of(l, "weight_packed", (n * l->k + k) / 8), k % 8) - zero) * number(l, "weight_scale", n * groups + g);
}

ADD(ct_int8) {
  put(l, CODES, "weight_packed", "I32", 2, l->n, l->k / 4);
  put(l, SCALES, "weight_scale", "BF16", 2, l->n, 1);
  if (l->n == 24) put(l, CODES, "weight_zero_point", "I32", 2, l->n / 4, 1);
}
WANT(ct_int8) {
  int zero = l->n == 24 ? (int)byte_of(l, "weight_zero_point", n / 4 * 4 + n % 4) : 128;
  return (float)((int)byte_of(l, "weight_packed", n * l->k + k) - zero) * number(l, "weight_scale", n);
}

ADD(modelopt_int4) {
  put(l, CODES, "weight", "U8", 2, l->n / 2, l->k);
  put(l, SCALES, "weight_scale", "F32", 2, l->n, l->k / GROUP);
}
WANT(modelopt_int4) {
  int v = (int)nibble(byte_of(l, "weight", n / 2 * l->k + k), n % 2);
  return (float)(v < 8 ? v : v - 16) * number(l, "weight_scale", n * (l->k / GROUP) + k / GROUP);
}

ADD(int8) {
  put(l, CODES, "weight", "I8", 2, l->n, l->k);
  put(l, SCALES, "weight_scale", "F16", 2, l->n, 1);
  put(l, SCALES, "pre_quant_scale", "F32", 1, l->k, 0);
}
WANT(int8) { return (float)(int8_t)byte_of(l, "weight", n * l->k + k) * number(l, "weight_scale", n) * number(l, "pre_quant_scale", k); }

ADD(w4afp8) {
  put(l, CODES, "weight", "I8", 2, l->n, l->k / 2);
  put(l, SCALES, "weight_scale_inv", "F32", 2, l->n, 1);
}
WANT(w4afp8) {
  int v = (int)nibble(byte_of(l, "weight", (n * l->k + k) / 2), k % 2);
  return (float)(v < 8 ? v : v - 16) * number(l, "weight_scale_inv", n);
}

ADD(awq) {
  put(l, CODES, "qweight", "I32", 2, l->k, l->n / 8);
  put(l, CODES, "qzeros", "I32", 2, l->k / GROUP, l->n / 8);
  put(l, SCALES, "scales", "F16", 2, l->k / GROUP, l->n);
}
WANT(awq) {
  static const uint64_t at[] = {0, 4, 1, 5, 2, 6, 3, 7}; /* of column c */
  uint64_t g = k / GROUP;
  int zero = (int)nibble(word_of(l, "qzeros", g * (l->n / 8) + n / 8), at[n % 8]);
  return (float)((int)nibble(word_of(l, "qweight", k * (l->n / 8) + n / 8), at[n % 8]) - zero) * number(l, "scales", g * l->n + n);
}

ADD(gptq) {
  put(l, CODES, "qweight", "I32", 2, l->k / 8, l->n);
  put(l, CODES, "qzeros", "I32", 2, l->k / GROUP, l->n / 8);
  put(l, SCALES, "scales", "F16", 2, l->k / GROUP, l->n);
  put_order(l, "g_idx");
}
static float gptq(const linear *l, uint64_t n, uint64_t k, uint32_t less) {
  uint64_t g = word_of(l, "g_idx", k);
  int zero = (int)nibble(word_of(l, "qzeros", g * (l->n / 8) + n / 8) + less, n % 8); /* carries go on */
  return (float)((int)nibble(word_of(l, "qweight", k / 8 * l->n + n), k % 8) - zero) * number(l, "scales", g * l->n + n);
}
WANT(gptq_v1) { return gptq(l, n, k, 0x11111111); }
WANT(gptq_v2) { return gptq(l, n, k, 0); }

ADD(gptq8) {
  put(l, CODES, "qweight", "I32", 2, l->k / 4, l->n);
  put(l, CODES, "qzeros", "I32", 2, l->k / GROUP, l->n / 4);
  put(l, SCALES, "scales", "F32", 2, l->k / GROUP, l->n);
}
WANT(gptq8) {
  uint64_t g = k / GROUP;
  int zero = (int)((word_of(l, "qzeros", g * (l->n / 4) + n / 4) + 0x01010101) >> (n % 4 * 8) & 255);
  return (float)((int)(word_of(l, "qweight", k / 4 * l->n + n) >> (k % 4 * 8) & 255) - zero) * number(l, "scales", g * l->n + n);
}

#define CT(weights) \
  "{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\",\"config_groups\":{\"a\":{\"weights\":" weights "}}}"
#define CT_INT(more) CT("{\"type\":\"int\",\"group_size\":8" more "}")

static const struct form {
  const char *name, *config;
  void (*add)(const linear *);
  float (*want)(const linear *, uint64_t, uint64_t);
} forms[] = {
    {"block FP8", "{\"quant_method\":\"fp8\",\"weight_block_size\":[4,3]}", add_block_fp8, want_block_fp8},
    {"compressed-tensors block FP8", CT("{\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":[4,3]}"), add_ct_block,
     want_ct_block},
    {"FP8_PB_WO", "{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP8_PB_WO\"}", add_pb_wo, want_tensor_fp8},
    {"tensor-wise FP8", "{\"quant_method\":\"fp8\"}", add_tensor_fp8, want_tensor_fp8},
    {"per-channel FP8", "{\"quant_method\":\"fbgemm_fp8\"}", add_channel_fp8, want_channel_fp8},
    {"MXFP8", "{\"quant_method\":\"mxfp8\"}", add_mxfp8, want_mxfp8},
    {"NVFP4", "{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4_AWQ\",\"group_size\":16}", add_nvfp4, want_nvfp4},
    {"compressed-tensors NVFP4", CT("{\"type\":\"float\",\"strategy\":\"tensor_group\"}"), add_nvfp4_ct, want_nvfp4_ct},
    {"MXFP4", "{\"quant_method\":\"mxfp4\"}", add_mxfp4, want_mxfp4},
    {"int4", CT_INT(""), add_ct_int4, want_ct_int4},
    {"int4, asymmetric, reordered", CT_INT(",\"symmetric\":false,\"actorder\":\"group\""), add_ct_asym, want_ct_asym},
    {"packed int8", /* some of them with zero points */
     CT("{\"type\":\"int\",\"group_size\":null},\"targets\":[\"Linear\"]},\"b\":{\"targets\":[\"re:.*[.](w1|w3)$\"],\"weights\":{"
        "\"type\":\"int\","
        "\"group_size\":null,\"symmetric\":false}"),
     add_ct_int8, want_ct_int8},
    {"ModelOpt int4", "{\"quant_method\":\"modelopt\",\"quant_algo\":\"W4A16_AWQ\",\"group_size\":8}", add_modelopt_int4,
     want_modelopt_int4},
    {"int8", "{\"quant_method\":\"quark\"}", add_int8, want_int8},
    {"SGLang W4AFP8", "{\"quant_method\":\"w4afp8\"}", add_w4afp8, want_w4afp8},
    {"AWQ", "{\"quant_method\":\"awq\",\"group_size\":8,\"version\":\"gemm\"}", add_awq, want_awq},
    {"GPTQ", "{\"quant_method\":\"gptq\",\"group_size\":8,\"desc_act\":true}", add_gptq, want_gptq_v1},
    {"GPTQ v2", "{\"quant_method\":\"gptq\",\"group_size\":8,\"checkpoint_format\":\"gptq_v2\"}", add_gptq, want_gptq_v2},
    {"GPTQ int8", "{\"quant_method\":\"gptq\",\"group_size\":8}", add_gptq8, want_gptq8},
};

static inline const struct form *form_of(const char *name) {
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
    if (strcmp(forms[i].name, name) == 0) return &forms[i];
  fail_msg("no encoding %s", name);
  return NULL;
}

/* Every linear of the source in one encoding. */
static inline source *encoded(const struct form *f) {
  source *s = src_open_as(dims);
  src_config(s, "\"quantization_config\":null", "\"quantization_config\":%s", f->config);
  char names[16][128];
  size_t count = 0;
  for (size_t i = 0; i < s->count; i++)
    if (strstr(s->t[i].name, "_proj.weight") || strstr(s->t[i].name, ".experts."))
      snprintf(names[count++], sizeof *names, "%s", s->t[i].name);
  for (size_t i = 0; i < count; i++) {
    const src_tensor *t = src_find(s, names[i]);
    linear l = {.s = s, .n = t->dim[0], .k = t->dim[1]};
    snprintf(l.stem, sizeof l.stem, "%.*s", (int)(strlen(names[i]) - strlen("weight")), names[i]);
    src_remove(s, names[i]);
    f->add(&l);
  }
  return s;
}

#endif
