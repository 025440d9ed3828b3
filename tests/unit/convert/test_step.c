/* convert/step: how the work is cut into steps, and in which order they run, changes no byte of the output; nor does a packed checkpoint
 * in between. */
#include "tests/unit/convert/converted.h"

/* Cuts every strip into pieces of `few` times the least number of rows that the scheme and the source allow, and turns the order of the
 * steps of each part round. */
static void cut_finer(mm_plan *p, uint32_t few) {
  size_t cap = 0, count = 0;
  mm_step *finer = NULL;
  mm_err err = {0};
  for (size_t i = 0; i < p->step_count; i++) {
    mm_step s = p->step[i];
    const mm_scheme *scheme = p->tensor[s.tensor].scheme;
    uint32_t block = p->hf->quantization.block.n ? p->hf->quantization.block.n : 1, strip = mm_scheme_rows(scheme);
    uint32_t unit = few * (strip / (uint32_t)mm_gcd(strip, block) * block);
    for (uint32_t row = 0; row < s.rows || (row == 0 && s.piece == MM_ALL_PIECES); row += unit) {
      mm_step part = s;
      if (s.piece != MM_ALL_PIECES) {
        part.row += row;
        part.rows = s.rows - row < unit ? s.rows - row : unit;
      }
      assert_true(MM_GROW(finer, &cap, count + 1, &err));
      finer[count++] = part;
    }
  }
  assert_true(count >= p->step_count);
  for (size_t from = 0, to; from < count; from = to) { /* [from, to): one part */
    for (to = from + 1; to < count && p->tensor[finer[to].tensor].part == p->tensor[finer[from].tensor].part;) to++;
    for (size_t i = from, j = to - 1; i < j; i++, j--) {
      mm_step s = finer[i];
      finer[i] = finer[j];
      finer[j] = s;
    }
  }
  free(p->step);
  p->step = finer;
  p->step_count = count;
}

static size_t convert(const char *from, const char *target, const mm_plan_options *o, uint32_t few) {
  mm_hf hf = {0};
  mm_plan plan = {0};
  mm_convert_progress progress = {0};
  mm_digest manifest;
  mm_err err = {0};
  if (!mm_hf_open(&hf, from, &(mm_hf_options){0}, &err) || !mm_plan_build(&plan, &hf, o, &err)) fail_msg("%s", err.text);
  if (few) cut_finer(&plan, few);
  size_t steps = plan.step_count;
  mm_writer_options w = {.target = target, .shards = 1, .buffers = 4, .commit_bytes = 8 << 20, .threads = few ? 3 : 1};
  if (!mm_convert_run(&plan, &w, &progress, &manifest, &err)) fail_msg("%s", err.text);
  mm_plan_close(&plan);
  mm_hf_close(&hf);
  return steps;
}

TEST(test_strips) {
  static const src_dims fp8 = {260, 4, 2, 70, 3, 520, 70, false}, bf16 = {260, 4, 2, 70, 3, 520, 70, true};
  static const struct {
    const src_dims *dims;
    mm_plan_options o;
    uint32_t few;
  } run[] = {
      {&fp8, {.quant = "none", .tp = 4, .part_size = 600 << 10}, 1},
      {&fp8, {.quant = "none", .tp = 4, .align = MM_ALIGN_PAD, .part_size = 1 << 30}, 1},
      {&fp8, {.quant = "bf16", .tp = 2, .part_size = 600 << 10}, 1},
      {&bf16, {.quant = "none", .tp = 4, .part_size = 600 << 10}, 37},
      {&bf16, {.quant = "block_fp8", .tp = 2, .part_size = 1 << 30}, 1},
      {&bf16, {.quant = "int8", .tp = 1, .part_size = 1 << 30}, 19},
  };
  for (size_t i = 0; i < sizeof run / sizeof *run; i++) {
    source *s = src_open_as(*run[i].dims);
    for (unsigned row = 1; row < run[i].dims->vocab; row += 33) /* noted in the manifest, from whatever step */
      memset(src_find(s, "lm_head.weight")->data + row * run[i].dims->hidden * 2, 0, run[i].dims->hidden * 2);
    src_write(s);
    mm_plan_options o = run[i].o;
    o.ep = o.pp = 1;
    size_t whole = convert(src_path(s, "src"), src_path(s, "whole"), &o, 0),
           finer = convert(src_path(s, "src"), src_path(s, "finer"), &o, run[i].few);
    if (finer < whole + 20) fail_msg("%s: %zu and %zu steps", o.quant, whole, finer);
    assert_same(src_path(s, "whole"), src_path(s, "finer"));
    src_close(s);
  }
}

/* Extents that no block divides, by way of ranks whose cuts fall anywhere; steps of the second conversion are cut finer too. */
TEST(test_packed_between) {
  static const src_dims fp8 = {260, 4, 2, 72, 4, 520, 70, false}, bf16 = {260, 4, 2, 72, 4, 520, 70, true};
  static const struct {
    const src_dims *dims;
    const char *quant;
    uint32_t from_tp, from_ep, tp, ep;
    mm_align from_align, align;
  } run[] = {
      {&fp8, "none", 4, 1, 2, 1, MM_ALIGN_SPLIT, MM_ALIGN_SPLIT},    {&fp8, "none", 2, 1, 4, 2, MM_ALIGN_PAD, MM_ALIGN_SPLIT},
      {&fp8, "nvfp4", 4, 2, 1, 1, MM_ALIGN_SPLIT, MM_ALIGN_SPLIT},   {&bf16, "block_fp8", 4, 1, 4, 1, MM_ALIGN_SPLIT, MM_ALIGN_PAD},
      {&bf16, "w4afp8", 2, 2, 1, 1, MM_ALIGN_SPLIT, MM_ALIGN_SPLIT}, {&bf16, "none", 1, 1, 4, 4, MM_ALIGN_SPLIT, MM_ALIGN_SPLIT},
  };
  for (size_t i = 0; i < sizeof run / sizeof *run; i++) {
    source *s = src_open_as(*run[i].dims);
    src_write(s);
    mm_plan_options from = {.quant = run[i].quant,
                            .tp = run[i].from_tp,
                            .ep = run[i].from_ep,
                            .pp = 1,
                            .part_size = 600 << 10,
                            .align = run[i].from_align},
                    to = {.quant = run[i].quant, .tp = run[i].tp, .ep = run[i].ep, .pp = 1, .part_size = 1 << 30, .align = run[i].align};
    convert(src_path(s, "src"), src_path(s, "between"), &from, 0);
    convert(src_path(s, "src"), src_path(s, "direct"), &to, 0);
    to.quant = "none";
    convert(src_path(s, "between"), src_path(s, "again"), &to, 3);
    assert_same(src_path(s, "direct"), src_path(s, "again"));
    src_close(s);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
