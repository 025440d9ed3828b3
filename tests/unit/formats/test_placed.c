/* A manifest with experts in another order than that of their ids. */
#include <stdlib.h>
#include <string.h>

#include "tests/unit/formats/changed_manifest.h"
#include "tests/unit/odd_model.h"
#include "tests/unit/unit.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static mm_cut cuts[] = {{.axis = MM_AXIS_NONE}};
#define STACK(of, source_of)                                                                                                             \
  {                                                                                                                                      \
    .name = of, .scheme = "bf16", .lead = 2, .whole_lead = 4, .rows = 3, .cols = 8, .whole_cols = 8, .plane_count = 1, .piece_count = 1, \
    .plane = {{"", MM_BF16, 1, 1, {0}}}, .piece = {                                                                                      \
      {source_of, 3, 0, 3, 0}                                                                                                            \
    }                                                                                                                                    \
  }
static mm_pack_tensor tensors[] = {STACK("a.w13", "a.{e}.w1"), STACK("a.w2", "a.{e}.w2")};
static mm_rank_parts ranks[2];

/* A manifest with placed experts is of version 4, of an extended model too. */
TEST(test_placed) {
  mm_pack b, a = {.tool = "t",
                  .quant = "bf16",
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
  mm_pack_tensor *t = &tensors[1];
  const uint32_t order[] = {2, 0, 3, 1};
  bool permutes;
  for (int extended = 0; extended < 2; extended++) {
    if (extended) a.model = odd_extended_model();
    assert_true(mm_pack_set_order(&a, t, order, &permutes, &err) && permutes);
    assert_int_equal(mm_pack_version(&a), 4);
    char *text = manifest_text(&a);
    assert_non_null(strstr(text, "\n\"version\":4,\n"));
    assert_non_null(strstr(text, "\"whole_cols\":8,\"experts\":[2,0,3,1],\"planes\""));
    if (!mm_pack_parse(&b, "d", text, strlen(text), &err)) fail_msg("%s", err.text);
    const mm_pack_tensor *got = &b.tensor[b.tensor_count - 1];
    for (uint32_t i = 0; i < 4; i++) assert_true(got->order.expert[i] == order[i] && mm_pack_index(got, order[i]) == i);
    assert_true(mm_pack_placed(&b) && !got[-1].order.expert && mm_pack_index(&got[-1], 3) == 3);
    static const manifest_change bad[] = {
        {"\"experts\":[2,0,3,1]", "\"experts\":[2,0,3,2]", "key \"experts\": found other numbers, expected each from 0 to 3 once"},
        {"\"experts\":[2,0,3,1]", "\"experts\":[2,0,3,4]", "key \"experts\": found other numbers, expected each from 0 to 3 once"},
        {"\"experts\":[2,0,3,1]", "\"experts\":[2,0,3,-1]", "key \"experts\": found other numbers, expected each from 0 to 3 once"},
        {"\"experts\":[2,0,3,1]", "\"experts\":[2,0,3]", "key \"experts\": found 3 entries, expected 4"},
        {"\"experts\":[2,0,3,1]", "\"experts\":7", "key \"experts\": found an integer"},
        {",\"experts\":[2,0,3,1]", "", "key \"version\": found 4, expected "}};
    refuse_changes(text, bad, COUNT(bad));
    char *again = manifest_text(&b);
    assert_string_equal(again, text);
    free(again), free(text), mm_pack_close(&b);
  }
  mm_arena_close(&a.arena);
}

/* Groups of attention are a key of version 4 too, which divides tp and is below it. */
TEST(test_attn_tp) {
  mm_rank_parts of[4] = {0};
  const mm_pack a = {.tool = "t", .quant = "bf16", .model = odd_model(), .tp = 4, .ep = 1, .pp = 1, .attn_tp = 2, .rank = of};
  mm_pack b;
  mm_err err = {0};
  assert_int_equal(mm_pack_version(&a), 4);
  char *text = manifest_text(&a);
  assert_non_null(strstr(text, "\"parallel\":{\"tp\":4,\"ep\":1,\"pp\":1,\"attn_tp\":2}"));
  if (!mm_pack_parse(&b, "d", text, strlen(text), &err)) fail_msg("%s", err.text);
  assert_true(b.attn_tp == 2 && mm_pack_groups(&b) == 2);
  char *again = manifest_text(&b);
  assert_string_equal(again, text);
  static const manifest_change bad[] = {
      {"\"attn_tp\":2", "\"attn_tp\":3", "key \"attn_tp\": found 3, expected a divisor of tp 4 below it"},
      {"\"attn_tp\":2", "\"attn_tp\":4", "found 4, expected a divisor of tp 4 below it"},
      {"\"attn_tp\":2", "\"attn_tp\":0", "key \"attn_tp\""},
      {"\"attn_tp\":2", "\"attn_tp\":\"2\"", "key \"attn_tp\""},
      {"\"version\":4", "\"version\":1", "found 1, expected 4, as attention has groups of ranks"},
      {",\"attn_tp\":2", "", "found 4, expected 1, as no experts are placed and attention has no groups"}};
  refuse_changes(text, bad, COUNT(bad));
  free(again), free(text), mm_pack_close(&b);
}

int main(void) { return run_unit_tests(NULL, NULL); }
