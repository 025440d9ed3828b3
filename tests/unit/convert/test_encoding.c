/* convert/encoding, decode: every encoding against its definition, element by element and from any row on; what packed schemes keep. */
#include "tests/unit/convert/encoded.h"

static void check_rows(mm_decoder *d, const linear *l, const mm_matrix *x, const struct form *f, uint32_t row, uint32_t rows) {
  mm_err err = {0};
  if (!mm_decode_f32(d, x, row, rows, &err)) fail_msg("%s: %s", f->name, err.text);
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t k = 0; k < x->cols; k++) {
      float want = f->want(l, row + r, k), found = d->wide[(size_t)r * x->cols + k];
      if (memcmp(&want, &found, 4) != 0)
        fail_msg("%s: %s[%u, %u]: found %a, expected %a", f->name, l->stem, row + r, k, (double)found, (double)want);
    }
}

TEST(test_exact) {
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
    const struct form *f = &forms[i];
    source *s = encoded(f);
    mm_hf hf = {0};
    mm_plan p = {0};
    mm_err err = {0};
    mm_decoder d;
    size_t checked = 0;
    src_write(s);
    char dir[128];
    snprintf(dir, sizeof dir, "%s", src_path(s, "src"));
    mm_plan_options o = {.quant = "f32", .tp = 1, .ep = 1, .pp = 1, .part_size = UINT64_MAX / 2};
    if (!mm_hf_open(&hf, dir, &(mm_hf_options){0}, &err) || !mm_plan_build(&p, &hf, &o, &err)) fail_msg("%s: %s", f->name, err.text);
    mm_decoder_open(&d, &hf);
    for (size_t t = 0; t < p.pack.tensor_count; t++)
      for (size_t j = 0; j < (size_t)(p.pack.tensor[t].lead ? p.pack.tensor[t].lead : 1) * p.pack.tensor[t].piece_count; j++) {
        const mm_matrix *x = &p.tensor[t].matrix[j];
        if (mm_is_plain(x)) continue;
        linear l = {.s = s, .n = x->rows, .k = x->cols};
        snprintf(l.stem, sizeof l.stem, "%.*s", (int)(strrchr(x->weight->original, '.') - x->weight->original + 1), x->weight->original);
        /* Not from the first row of a word; a block is entered at its first row. */
        const uint32_t start[] = {0, x->cell.n > 1 ? x->cell.n : 3, x->cell.n > 1 ? 2 * x->cell.n : 13};
        for (size_t k = 0; k < 3 && start[k] < x->rows; k++) {
          check_rows(&d, &l, x, f, start[k], x->rows - start[k]);
          check_rows(&d, &l, x, f, start[k], start[k] + 1 < x->rows ? 2 : 1);
        }
        checked++;
      }
    assert_int_equal(checked, 10);
    mm_decoder_close(&d);
    mm_plan_close(&p);
    mm_hf_close(&hf);
    src_close(s);
  }
}

/* Tensors that cannot pass through say so; all others do. */
TEST(test_keeping) {
  static const char *const kept[] = {"compressed-tensors block FP8",
                                     "FP8_PB_WO",
                                     "tensor-wise FP8",
                                     "per-channel FP8",
                                     "MXFP8",
                                     "compressed-tensors NVFP4",
                                     "MXFP4",
                                     "int4",
                                     "AWQ"};
  static const char *const lost[] = {"NVFP4",     "int4, asymmetric, reordered", "ModelOpt int4", "int8", "SGLang W4AFP8", "GPTQ",
                                     "GPTQ int8", "compressed-tensors block FP8" /* 4 x 3, which divides no 128 */};
  for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
    source *s = encoded(form_of(kept[i]));
    if (strstr(kept[i], "tensors block")) src_config(s, "[4,3]", "[128,128]");
    for (size_t t = 0; t < s->count; t++) /* as q, k and v, and w1 and w3, must have it */
      if (strstr(s->t[t].name, "weight_global_scale")) memcpy(s->t[t].data, &(float){1.40625f}, 4);
    for (size_t t = 0; strstr(kept[i], "tensors block") && t < s->count; t++)
      if (strstr(s->t[t].name, "weight_scale")) src_shape(&s->t[t], "F32", 2, 1, 1, 0);
    src_write(s);
    src_accepted(s, (src_options){.depth = SRC_READ, .quant = "none"}, kept[i]);
    src_close(s);
  }
  for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) {
    source *s = encoded(form_of(lost[i]));
    src_write(s);
    src_refused(s, (src_options){.depth = SRC_PLAN, .quant = "none"}, lost[i], MM_UNSUPPORTED, "E_Q_KEEP",
                "which no packed scheme holds bit for bit; expected another --quant: f32 (exact), bf16 (56 dB");
    src_accepted(s, (src_options){.depth = SRC_READ, .quant = "nvfp4a16"}, lost[i]);
    src_close(s);
  }
}

/* A refusal to keep a source says what of it no scheme has. */
TEST(test_reasons) {
  static const char *const reason[][2] = {
      {"GPTQ", "found GPTQ int4 with zero points, columns out of the order of their groups (desc_act), which no"},
      {"GPTQ int8", "found GPTQ int8 with zero points, scales of F32 for 1 x 8, which"},
      {"int4, asymmetric, reordered", "found compressed-tensors int4 with zero points, columns out of the order of their groups"},
      {"ModelOpt int4", "found ModelOpt int4 with bytes of two rows, F32 scales"},
      {"int8", "found per-channel int8 with a factor for each column, which"},
      {"compressed-tensors block FP8", "found compressed-tensors block FP8 with scales of F32 for 4 x 3, which"}};
  for (size_t i = 0; i < sizeof reason / sizeof *reason; i++) {
    source *s = encoded(form_of(reason[i][0]));
    src_write(s);
    src_refused(s, (src_options){.depth = SRC_PLAN, .quant = "none"}, reason[i][0], MM_UNSUPPORTED, "E_Q_KEEP", reason[i][1]);
    src_close(s);
  }
  source *s = encoded(form_of("GPTQ v2")); /* which does not declare desc_act */
  src_write(s);
  src_refused(s, (src_options){.depth = SRC_READ, .quant = "none"}, "GPTQ v2", MM_UNSUPPORTED, "E_Q_KEEP", "found group ");
  src_close(s);
}

int main(void) { return run_unit_tests(NULL, NULL); }
