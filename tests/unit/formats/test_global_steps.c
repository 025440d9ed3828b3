/* A manifest with steps of global scales. */
#include <stdlib.h>
#include <string.h>

#include "tests/unit/formats/changed_manifest.h"
#include "tests/unit/odd_model.h"
#include "tests/unit/unit.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static mm_cut cuts[] = {{.axis = MM_AXIS_NONE}};
static mm_global_step steps[] = {{0, 1, 1}, {3, 0, -1}, {3, 1, 1}};
static mm_pack_tensor tensors[] = {{.name = "a.w13",
                                    .scheme = "nvfp4",
                                    .lead = 2,
                                    .whole_lead = 4,
                                    .rows = 6,
                                    .cols = 16,
                                    .whole_cols = 16,
                                    .plane_count = 3,
                                    .piece_count = 2,
                                    .plane = {{"", MM_U8, 1, 2, {0}}, {"_scale", MM_F8_E4M3, 1, 16, {0}}, {"_scale_2", MM_F32, 0, 0, {0}}},
                                    .piece = {{"a.{e}.w1", 3, 0, 3, 0}, {"a.{e}.w3", 3, 3, 3, 0}},
                                    .step_count = COUNT(steps),
                                    .step = steps},
                                   {.name = "b",
                                    .scheme = "bf16",
                                    .rows = 3,
                                    .cols = 8,
                                    .whole_cols = 8,
                                    .plane_count = 1,
                                    .piece_count = 1,
                                    .plane = {{"", MM_BF16, 1, 1, {0}}},
                                    .piece = {{"b", 3, 0, 3, 0}}}};
static mm_rank_parts ranks[2];

/* Version 5 stands above the others: of an extended model, with placed experts and groups of attention, too. */
TEST(test_steps) {
  mm_pack b, a = {.tool = "t",
                  .quant = "nvfp4",
                  .model = odd_model(),
                  .tp = 2,
                  .ep = 2,
                  .pp = 1,
                  .tensor_count = COUNT(tensors),
                  .cut_count = COUNT(cuts),
                  .tensor = tensors,
                  .cut = cuts,
                  .rank = ranks};
  mm_err err = {0};
  bool permutes;
  for (int placed = 0; placed < 2; placed++) {
    if (placed) {
      a.model = odd_extended_model();
      a.attn_tp = 1;
      assert_true(mm_pack_set_order(&a, tensors, (const uint32_t[]){2, 0, 3, 1}, &permutes, &err) && permutes);
    }
    assert_int_equal(mm_pack_version(&a), 5);
    char *text = manifest_text(&a);
    assert_non_null(strstr(text, "\n\"version\":5,\n"));
    assert_non_null(strstr(text, ",\"global_steps\":[[0,1,1],[3,0,-1],[3,1,1]],\"planes\""));
    if (!mm_pack_parse(&b, "d", text, strlen(text), &err)) fail_msg("%s", err.text);
    assert_int_equal(b.attn_tp, a.attn_tp);
    assert_true(mm_pack_same_steps(&a.tensor[0], &b.tensor[0]) && !mm_pack_same_steps(&a.tensor[0], &b.tensor[1]));
    static const manifest_change bad[] = {
        {"[3,1,1]]", "[4,1,1]]", "expected entries of an expert below 4, a piece below 2, and 1 or -1"},
        {"[3,1,1]]", "[3,2,1]]", "expected entries"},
        {"[3,1,1]]", "[3,1,0]]", "expected entries"},
        {"[3,1,1]]", "[3,1,2]]", "expected entries"},
        {"[3,1,1]]", "[3,1]]", "expected entries"},
        {"[3,1,1]]", "[3,1,1.5]]", "expected entries"},
        {"[3,1,1]]", "7]", "expected entries"},
        {"[0,1,1]", "[-1,1,1]", "expected entries"},
        {"[3,1,1]]", "[3,0,1]]", "key \"global_steps\": found other entries, expected them in ascending order of experts and pieces"},
        {"[0,1,1]", "[3,1,1]", "expected them in ascending order"},
        {"[[0,1,1],[3,0,-1],[3,1,1]]", "7", "key \"global_steps\": found an integer"},
        {"[[0,1,1],[3,0,-1],[3,1,1]]", "[]", "key \"global_steps\": found 0 entries in a tensor of 3 planes, expected some in one of 3"},
        {"\"whole_cols\":8,", "\"whole_cols\":8,\"global_steps\":[[0,0,1]],", "found 1 entries in a tensor of 1 planes"},
        {"\"version\":5", "\"version\":4", "key \"version\": found 4, expected 5, as tensors have the key global_steps"},
        {",\"global_steps\":[[0,1,1],[3,0,-1],[3,1,1]]", "", "key \"version\": found 5, expected "}};
    refuse_changes(text, bad, COUNT(bad));
    char *again = manifest_text(&b);
    assert_string_equal(again, text);
    free(again), free(text), mm_pack_close(&b);
  }
  mm_arena_close(&a.arena);
}

int main(void) { return run_unit_tests(NULL, NULL); }
