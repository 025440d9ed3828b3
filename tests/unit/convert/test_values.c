/* convert/matrix, decode: every source encoding gives exactly the numbers it stands for; scales and values that are not what they
 * should be are refused with tensor, block or element, and file offset. The rows' marks (D01 …) are those of the fault catalogue. */
#include <math.h>

#include "tests/unit/convert/source.h"

#define REFUSED(depth_, row, code, says) src_refused(s, (src_options){.depth = (depth_)}, row, MM_BAD_INPUT, code, says)
#define REFUSED_AS_BF16(row, code, says) src_refused(s, (src_options){.depth = SRC_READ, .quant = "bf16"}, row, MM_BAD_INPUT, code, says)
#define ACCEPTED(row)                    src_accepted(s, (src_options){.depth = SRC_READ}, row)
#define ACCEPTED_AS_BF16(row)            src_accepted(s, (src_options){.depth = SRC_READ, .quant = "bf16"}, row)

/* A source whose blocks are 4 x 3: several in each matrix, and narrow ones at the edges. */
static void small_blocks(source *s) {
  src_config(s, "[128,128]", "[4,3]");
  for (size_t i = 0; i + 1 < s->count; i++) {
    src_tensor *t = &s->t[i];
    if (strcmp(t->dtype, "F8_E4M3") == 0) src_shape(t + 1, "F32", 2, (t->dim[0] + 3) / 4, (t->dim[1] + 2) / 3, 0);
  }
}

/* D01: an FP8 weight without its scale, gone altogether or only from one of index and shard. */
TEST(test_scale_missing) {
  static const char *const scale[] = {"q_proj.weight_scale_inv", "experts.2.w2.weight_scale_inv"};
  static const char *const says[] = {"self_attn.q_proj.weight\": found F8_E4M3 without a scale",
                                     "experts.2.w2.weight\": found F8_E4M3 without"};
  for (size_t i = 0; i < 2; i++) {
    FRESH(s) {
      src_remove(s, scale[i]);
      src_write(s);
      REFUSED(SRC_PLAN, "D01", "E_Q_MISSING", says[i]);
      REFUSED(SRC_PLAN, "D01", "E_Q_MISSING", scale[i]);
      REFUSED_AS_BF16("D01", "E_Q_MISSING", says[i]);
    }
    FRESH(s) {
      src_find(s, scale[i])->shard = -1;
      src_write(s);
      REFUSED(SRC_OPEN, "D01", "E_IDX_TENSOR", scale[i]);
    }
    FRESH(s) {
      src_find(s, scale[i])->file = NULL;
      src_write(s);
      REFUSED(SRC_OPEN, "D01", "E_IDX_TENSOR", scale[i]);
    }
  }
}

/* D02 */
TEST(test_scale_orphan) {
  FRESH(s) {
    src_tensor *t = src_find(s, "o_proj.weight");
    src_shape(t, "BF16", 2, t->dim[0], t->dim[1], 0);
    src_write(s);
    REFUSED(SRC_PLAN, "D02", "E_Q_ORPHAN", "o_proj.weight_scale_inv");
    REFUSED(SRC_PLAN, "D02", "E_Q_ORPHAN",
            "found a tensor of a quantised weight, but \"" SRC_ATTN "o_proj.weight\" is BF16 and is read without it");
  }
  static const char *const orphan[] = {"lm_head.weight_scale_inv", "model.layers.0.self_attn.q_proj.input_scale",
                                       SRC_MOE "gate.weight_scale_inv", "model.x.weight_scale_inv",
                                       SRC_MOE "experts.7.w1.weight_scale_inv"};
  for (size_t i = 0; i < sizeof orphan / sizeof *orphan; i++) {
    FRESH(s) {
      src_add(s, orphan[i], "F32", 2, 1, 1);
      src_write(s);
      REFUSED(SRC_PLAN, "D02", "E_Q_ORPHAN", orphan[i]);
    }
  }
}

/* D03: q_proj is [8, 10]; its scale in blocks of 4 x 3 is [2, 4]. */
TEST(test_scale_shape) {
  static const struct {
    unsigned rank;
    uint64_t dim[3];
    const char *found;
  } bad[] = {{2, {4, 2}, "[4, 2]"}, {1, {8}, "[8]"},       {2, {0, 4}, "[0, 4]"},       {2, {2, 5}, "[2, 5]"},
             {2, {3, 4}, "[3, 4]"}, {2, {1, 4}, "[1, 4]"}, {3, {1, 2, 4}, "[1, 2, 4]"}, {2, {2, 3}, "[2, 3]"},
             {0, {0}, "[]"},        {1, {1}, "[1]"},       {2, {8, 10}, "[8, 10]"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      char says[96];
      small_blocks(s);
      src_shape(src_find(s, "q_proj.weight_scale_inv"), "F32", bad[i].rank, bad[i].dim[0], bad[i].dim[1], bad[i].dim[2]);
      src_write(s);
      snprintf(says, sizeof says, "q_proj.weight_scale_inv\": found shape %s, expected [2, 4]", bad[i].found);
      REFUSED_AS_BF16("D03", "E_Q_SHAPE", says);
    }
  }
}

/* A block of null says that each matrix has one scale, and nothing less does. */
TEST(test_scale_of_all) {
  static const char *const said[] = {"\"weight_block_size\":null", "\"weight_block_size\":[128,128]", "\"block\":null"};
  for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
    for (uint64_t rows = 1; rows <= 2; rows++) {
      FRESH(s) {
        src_config(s, "\"weight_block_size\":[128,128]", "%s", said[i]);
        src_shape(src_find(s, "q_proj.weight_scale_inv"), "F32", 2, rows, rows, 0);
        src_write(s);
        const src_options o = {.depth = SRC_PLAN};
        if (i == 2)
          src_refused(s, o, said[i], MM_BAD_INPUT, "E_Q_CONFIG", "no weight_block_size in ");
        else if (rows == 2)
          src_refused(s, o, said[i], MM_BAD_INPUT, "E_Q_SHAPE", "q_proj.weight_scale_inv\": found shape [2, 2], expected ");
        else
          src_accepted(s, o, said[i]);
      }
    }
  }
}

/* D04, accepted types too: BF16 and E8M0 (also when it calls itself U8) are read for what they mean. */
TEST(test_scale_dtype) {
  static const char *const bad[] = {"I32", "F16", "F64", "I8", "F8_E4M3", "F8_E5M2", "I64", "U32"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      src_tensor *t = src_find(s, "experts.1.w3.weight_scale_inv");
      snprintf(t->dtype, sizeof t->dtype, "%s", bad[i]);
      t->bytes = strstr(bad[i], "64") ? 8 : strstr(bad[i], "32") ? 4 : strcmp(bad[i], "F16") == 0 ? 2 : 1;
      t->data = realloc(t->data, 16);
      memset(t->data, 1, 16);
      src_write(s);
      char says[64];
      snprintf(says, sizeof says, "found a scale of %s, expected F8_E8M0, F32 or BF16", bad[i]);
      REFUSED(SRC_PLAN, "D04", "E_Q_DTYPE", says);
      REFUSED(SRC_PLAN, "D04", "E_Q_DTYPE", "experts.1.w3.weight_scale_inv");
    }
  }
  static const char *const good[] = {"F32", "BF16", "F8_E8M0", "U8"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    FRESH(s) {
      small_blocks(s);
      src_tensor *t = src_find(s, "q_proj.weight_scale_inv");
      src_shape(t, good[i], 2, t->dim[0], t->dim[1], 0);
      src_write(s);
      ACCEPTED_AS_BF16(good[i]);
    }
  }
}

static void put_f32(src_tensor *t, size_t i, float v) { memcpy(t->data + 4 * i, &v, 4); }

/* D05: [2, 4] scales of q_proj; the bad one is that of block row 1, column 2. */
TEST(test_scale_values) {
  static const struct {
    float value;
    const char *shown;
  } bad[] = {{NAN, "nan"}, {INFINITY, "inf"}, {-INFINITY, "-inf"}, {0, "0"}, {-0.0f, "-0"}, {-0.125f, "-0.125"}, {1e36f, "1e+36"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      char says[96];
      small_blocks(s);
      src_tensor *t = src_find(s, "q_proj.weight_scale_inv");
      put_f32(t, 1 * 4 + 2, bad[i].value);
      src_write(s);
      snprintf(says, sizeof says, "found scale %s of block row 1, column 2", bad[i].shown);
      /* The sign of a NaN is nobody's business. */
      REFUSED_AS_BF16("D05", "E_Q_SCALE", isnan(bad[i].value) ? "nan of block row 1, column 2" : says);
      snprintf(says, sizeof says, "q_proj.weight_scale_inv\": offset %zu: ", src_offset(s, t) + (1 * 4 + 2) * 4);
      REFUSED_AS_BF16("D05", "E_Q_SCALE", says);
    }
    FRESH(s) { /* where the bytes are copied, too */
      put_f32(src_find(s, "experts.2.w2.weight_scale_inv"), 0, bad[i].value);
      src_write(s);
      REFUSED(SRC_READ, "D05", "E_Q_SCALE", "experts.2.w2.weight_scale_inv");
      REFUSED(SRC_READ, "D05", "E_Q_SCALE", "block row 0, column 0");
    }
  }
  FRESH(s) { /* E8M0's one NaN */
    src_tensor *t = src_find(s, "v_proj.weight_scale_inv");
    src_shape(t, "F8_E8M0", 2, 1, 1, 0);
    t->data[0] = 0xff;
    src_write(s);
    REFUSED(SRC_READ, "D05", "E_Q_SCALE", "v_proj.weight_scale_inv");
  }
}

/* D06, D07: the element's row, column and offset. */
TEST(test_values) {
  static const struct {
    const char *tensor, *dtype; /* NULL: as it is */
    size_t row, column, columns;
    uint32_t bits;
  } bad[] = {{"k_proj.weight", NULL, 3, 9, HIDDEN, 0x7f},
             {"k_proj.weight", NULL, 0, 0, HIDDEN, 0xff},
             {"experts.1.w2.weight", NULL, 9, 5, INTER, 0xff},
             {"experts.2.w1.weight", "BF16", 5, 7, HIDDEN, 0x7f80},
             {"experts.2.w1.weight", "BF16", 5, 7, HIDDEN, 0xff80},
             {"experts.2.w1.weight", "BF16", 5, 7, HIDDEN, 0x7fc0},
             {"experts.2.w1.weight", "BF16", 5, 7, HIDDEN, 0xff81},
             {"o_proj.weight", "F16", 9, 7, HEADS * HEAD_DIM, 0x7c00},
             {"o_proj.weight", "F16", 9, 7, HEADS * HEAD_DIM, 0xfc01},
             {"o_proj.weight", "F32", 2, 0, HEADS * HEAD_DIM, 0x7f800000},
             {"o_proj.weight", "F32", 2, 0, HEADS * HEAD_DIM, 0x7f800001},
             {"o_proj.weight", "F32", 2, 0, HEADS * HEAD_DIM, 0xffc00000},
             {"lm_head.weight", NULL, 11, 9, HIDDEN, 0x7f80},
             {"embed_tokens.weight", NULL, 0, 1, HIDDEN, 0xffff},
             {"0.input_layernorm.weight", NULL, 8, 0, 1, 0x7f80},
             {"q_norm.weight", NULL, 7, 0, 1, 0x7fff},
             {"gate.weight", NULL, 2, 3, HIDDEN, 0xff800000},
             {"e_score_correction_bias", NULL, 1, 0, 1, 0x7fc00000}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      char says[160], scale[64];
      src_tensor *t = src_find(s, bad[i].tensor);
      if (bad[i].dtype) {
        src_shape(t, bad[i].dtype, 2, t->dim[0], t->dim[1], 0);
        snprintf(scale, sizeof scale, "%s_scale_inv", bad[i].tensor);
        src_remove(s, scale);
        t = src_find(s, bad[i].tensor);
      }
      size_t size = src_size(t->dtype), at = (bad[i].row * bad[i].columns + bad[i].column) * size;
      assert_true(at < t->bytes);
      memcpy(t->data + at, &bad[i].bits, size);
      src_write(s);
      snprintf(says, sizeof says, "%s\": offset %zu: found NaN or infinity at row %zu, column %zu", bad[i].tensor, src_offset(s, t) + at,
               bad[i].row, bad[i].column);
      /* One expert in another type than the others cannot be kept as stored, and says so before any value is read. */
      if (!bad[i].dtype || bad[i].tensor[0] == 'o') REFUSED(SRC_READ, "D06, D07", "E_NONFINITE", says);
      REFUSED_AS_BF16("D06, D07", "E_NONFINITE", says);
    }
  }
}

/* D10, D11 */
TEST(test_shapes) {
  static const struct {
    const char *tensor;
    unsigned rank;
    uint64_t dim[3];
    const char *says;
  } bad[] = {{"q_proj.weight", 2, {HIDDEN, 8}, "found shape [10, 8], expected [8, 10]"},
             {"experts.0.w1.weight", 2, {HIDDEN, INTER}, "found shape [10, 6], expected [6, 10]"},
             {"experts.2.w2.weight", 2, {INTER, HIDDEN}, "found shape [6, 10], expected [10, 6]"},
             {"experts.0.w1.weight", 2, {INTER, HIDDEN / 2}, "found shape [6, 5], expected [6, 10]"}, /* packed nibbles */
             {"lm_head.weight", 2, {HIDDEN, VOCAB}, "found shape [10, 12], expected [12, 10]"},
             {"lm_head.weight", 1, {HIDDEN * VOCAB}, "found shape [120], expected [12, 10]"},
             {"lm_head.weight", 3, {1, VOCAB, HIDDEN}, "found shape [1, 12, 10], expected [12, 10]"},
             {"model.norm.weight", 2, {1, HIDDEN}, "found shape [1, 10], expected [10]"},
             {"gate.weight", 2, {HIDDEN, EXPERTS}, "found shape [10, 3], expected [3, 10]"},
             {"k_norm.weight", 1, {HEADS * HEAD_DIM}, "found shape [8], expected [4]"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      src_tensor *t = src_find(s, bad[i].tensor);
      char dtype[16];
      snprintf(dtype, sizeof dtype, "%s", t->dtype);
      src_shape(t, dtype, bad[i].rank, bad[i].dim[0], bad[i].dim[1], bad[i].dim[2]);
      src_write(s);
      REFUSED(SRC_PLAN, "D10", "E_SHAPE", bad[i].says);
      REFUSED(SRC_PLAN, "D10", "E_SHAPE", bad[i].tensor);
    }
  }
}

/* D12: numbers in names are those of the model, spelt as everyone spells them. Tensors past the last layer are skipped (C11). */
TEST(test_names) {
  static const char *const unknown[] = {"model.layers.00.input_layernorm.weight",
                                        "model.layers.-1.input_layernorm.weight",
                                        "model.layers.+1.input_layernorm.weight",
                                        "model.layers. 1.input_layernorm.weight",
                                        "model.layers.01.input_layernorm.weight",
                                        "model.layers.0x1.input_layernorm.weight",
                                        "model.layers.18446744073709551616.input_layernorm.weight",
                                        "model.layers.4294967297.input_layernorm.weight",
                                        "model.layers.",
                                        "model.layers.1",
                                        "model.layers.0.mlp.experts.3.w1.weight",
                                        "model.layers.0.mlp.experts.00.w1.weight",
                                        "model.layers.0.mlp.experts.-1.w1.weight",
                                        "model.layers.0.mlp.experts.4294967296.w1.weight",
                                        "model.layers.0.self_attn.output_gate.weight",
                                        "model.layers.0.self_attn.q_proj.bias",
                                        "lm_head.bias",
                                        "x"};
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    FRESH(s) {
      src_add(s, unknown[i], "BF16", 1, HIDDEN, 0);
      src_write(s);
      REFUSED(SRC_PLAN, "D12", "E_UNKNOWN", unknown[i]);
    }
  }
  static const char *const skipped[] = {"model.layers.1.input_layernorm.weight", "model.layers.62.mtp.x", "model.layers.999999999.x",
                                        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.slope_rate"};
  for (size_t i = 0; i < sizeof skipped / sizeof *skipped; i++) {
    FRESH(s) {
      src_add(s, skipped[i], "BF16", 1, HIDDEN, 0);
      src_write(s);
      ACCEPTED(skipped[i]);
    }
  }
}

/* D13: router, bias, norms, embedding and head in a type that they cannot have. */
TEST(test_kept_dtypes) {
  static const char *const tensor[] = {"gate.weight",   "e_score_correction_bias", "model.norm.weight",
                                       "q_norm.weight", "embed_tokens.weight",     "lm_head.weight"};
  static const char *const dtype[] = {"I32", "F8_E4M3", "U8"};
  for (size_t i = 0; i < sizeof tensor / sizeof *tensor; i++) {
    for (size_t k = 0; k < sizeof dtype / sizeof *dtype; k++) {
      FRESH(s) {
        char says[96];
        src_tensor *t = src_find(s, tensor[i]);
        src_shape(t, dtype[k], t->rank, t->dim[0], t->dim[1], 0);
        src_write(s);
        const bool vector = t->rank == 1, fp8 = !vector && k == 1;
        snprintf(says, sizeof says, "%s\": found %s%s", tensor[i], !vector && k == 2 ? "shape [" : dtype[k],
                 vector   ? ", expected F32, BF16 or F16"
                 : fp8    ? " without a scale"
                 : k == 0 ? ", expected F32, BF16, F16"
                          : "");
        REFUSED(SRC_PLAN, "D13", vector || k == 0 ? "E_DTYPE" : fp8 ? "E_Q_MISSING" : "E_SHAPE", says); /* U8: two codes in a byte */
      }
    }
    FRESH(s) {
      src_tensor *t = src_find(s, tensor[i]);
      src_shape(t, "F16", t->rank, t->dim[0], t->dim[1], 0);
      src_write(s);
      ACCEPTED("F16 is a type of weights");
    }
  }
}

/* ---- exactness ---- */

static float from_e4m3(uint8_t c) {
  int e = c >> 3 & 15, m = c & 7;
  float v = e ? ldexpf(1 + (float)m / 8, e - 7) : ldexpf((float)m, -9);
  return c & 0x80 ? -v : v;
}

/* Element i of a tensor of any type used here. */
static float number(const src_tensor *t, size_t i) {
  uint32_t bits = 0;
  float f;
  if (strcmp(t->dtype, "F32") == 0) memcpy(&bits, t->data + 4 * i, 4);
  if (strcmp(t->dtype, "BF16") == 0) memcpy((uint8_t *)&bits + 2, t->data + 2 * i, 2);
  if (src_size(t->dtype) == 1) return strcmp(t->dtype, "F8_E4M3") == 0 ? from_e4m3(t->data[i]) : ldexpf(1, t->data[i] - 127);
  if (strcmp(t->dtype, "F16") == 0) {
    uint16_t h;
    memcpy(&h, t->data + 2 * i, 2);
    return (h & 0x8000 ? -1.0f : 1.0f) * ldexpf((float)(h & 0x3ff) + (h >> 10 & 31 ? 1024 : 0), (h >> 10 & 31 ? h >> 10 & 31 : 1) - 25);
  }
  memcpy(&f, &bits, 4);
  return f;
}

static uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

/* Every matrix of the plan decodes to what its tensors in memory stand for. Block is 4 x 3. */
static void assert_exact(const source *s) {
  mm_hf hf = {0};
  mm_plan p = {0};
  mm_err err = {0};
  mm_decoder d;
  char dir[128];
  snprintf(dir, sizeof dir, "%s", src_path(s, "src"));
  mm_plan_options o = {.quant = "f32", .tp = 1, .ep = 1, .pp = 1, .part_size = UINT64_MAX / 2};
  if (!mm_hf_open(&hf, dir, &(mm_hf_options){0}, &err) || !mm_plan_build(&p, &hf, &o, &err)) fail_msg("%s", err.text);
  mm_decoder_open(&d, &hf);
  size_t compared = 0;
  for (size_t i = 0; i < p.pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p.pack.tensor[i];
    for (size_t k = 0; k < (size_t)(t->lead ? t->lead : 1) * t->piece_count; k++) {
      const mm_matrix *x = &p.tensor[i].matrix[k];
      char scale_name[300];
      const src_tensor *w = NULL, *scale = NULL;
      snprintf(scale_name, sizeof scale_name, "%s_scale_inv", x->weight->original);
      for (size_t j = 0; j < s->count; j++) {
        if (strcmp(s->t[j].name, x->weight->original) == 0) w = &s->t[j];
        if (strcmp(s->t[j].name, scale_name) == 0) scale = &s->t[j];
      }
      if (!w) {
        fail_msg("%s is not in the source", x->weight->original);
        continue;
      }
      /* From the middle too, on a multiple of the block's height. */
      for (uint32_t row = 0; row < x->rows; row += 4) {
        if (!mm_decode_f32(&d, x, row, x->rows - row, &err)) fail_msg("%s", err.text);
        for (size_t r = row; r < x->rows; r++)
          for (size_t c = 0; c < x->cols; c++, compared++) {
            float want = number(w, r * x->cols + c);
            if (scale) want *= number(scale, r / 4 * ((x->cols + 2) / 3) + c / 3);
            float found = d.wide[(r - row) * x->cols + c];
            if (bits_of(found) != bits_of(want))
              fail_msg("%s [%zu, %zu]: found %g, expected %g", w->name, r, c, (double)found, (double)want);
          }
      }
    }
  }
  assert_true(compared > 800);
  mm_decoder_close(&d);
  mm_plan_close(&p);
  mm_hf_close(&hf);
}

/* F32, BF16 and E8M0 scales over partial blocks; BF16, F16 and F32 weights; data that starts on odd offsets. */
TEST(test_exact) {
  static const char *const scale[] = {"F32", "BF16", "F8_E8M0", "U8"}, *const plain[] = {"BF16", "F16", "F32"};
  for (size_t i = 0; i < 4; i++) {
    FRESH(s) {
      small_blocks(s);
      for (size_t k = 0; k < s->count; k++)
        if (strstr(s->t[k].name, "_scale_inv")) {
          src_shape(&s->t[k], scale[i], 2, s->t[k].dim[0], s->t[k].dim[1], 0);
          for (size_t b = 0; i >= 2 && b < s->t[k].bytes; b++) s->t[k].data[b] = (uint8_t)(110 + (b * 7 + k) % 30);
        }
      src_write(s);
      assert_exact(s);
    }
  }
  for (size_t i = 0; i < 3; i++) {
    FRESH(s) {
      for (size_t k = 0; k < s->count;) {
        if (strstr(s->t[k].name, "_scale_inv")) {
          src_remove(s, s->t[k].name);
          continue;
        }
        src_shape(&s->t[k], plain[i], s->t[k].rank, s->t[k].dim[0], s->t[k].dim[1], 0);
        k++;
      }
      for (int odd = 0; odd < 4; odd++) {
        char name[32];
        snprintf(name, sizeof name, "model.layers.9.%.*s", odd + 1, "xxxx"); /* skipped, but moves what follows */
        src_tensor *t = src_add(s, name, "U8", 1, (uint64_t)odd + 1, 0);
        src_tensor first = s->t[0];
        s->t[0] = *t;
        *t = first;
      }
      src_write(s);
      assert_exact(s);
    }
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
