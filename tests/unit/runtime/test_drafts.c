/* Prompt lookup through the scheduler: replies are those without it, and steps are saved. */
#include "tests/unit/runtime/random_draft.h"
#include "tests/unit/runtime/random_requests.h"

/* Verified proposals are what the model chooses alone, whatever it draws with; lookup is for models whose slots can go back. M2 on two
 * ranks, and M3, whose index keys of earlier rows are seen by later ones of the same step. */
TEST(test_random) {
  static const struct {
    uint32_t kind, tp, slots, pages, rounds;
  } on[] = {{0, 1, 2, 7, 1}, {0, 1, 6, 0, 1}, {1, 1, 2, 7, 3}, {1, 1, 6, 0, 2}, {1, 2, 6, 9, 1}, {2, 1, 2, 7, 1}, {2, 2, 6, 0, 1}};
  for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
    serving w;
    mm_scheduler_stats t;
    const mm_scheduler_config c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 16, .drafts = MM_DRAFTS};
    serving_open(&w, kind(on[i].kind), on[i].tp, (mm_limits){.max_tokens = 64, .slots = on[i].slots, .pages = on[i].pages}, c);
    random_requests(&w, UINT32_MAX, on[i].rounds);
    serving_settled(&w, &t);
    print_message("model %u, tp %u: %llu proposed, %llu right\n", on[i].kind, on[i].tp, (unsigned long long)t.drafted,
                  (unsigned long long)t.accepted);
    assert_true(on[i].kind ? t.drafted > 0 : !t.drafted);
    serving_close(&w, true);
  }
}

/* A reply of one token again and again: most of its steps are saved. */
TEST(test_easy) {
  serving w;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 64, .slots = 2},
               (mm_scheduler_config){.step_tokens = 64, .queue_max = 1, .drafts = MM_DRAFTS});
  const mm_scheduler_stats t = easy_request(&w);
  assert_true(t.drafted > 10 && t.accepted == t.drafted);
  assert_int_equal(t.steps, 4 + 89 - t.accepted);
  serving_close(&w, true);
}

/* The same with learned drafts of random weights: DFlash, EAGLE-3 and 3.1 on one, two and four ranks, with many pages and with few.
 * Replies are those of the oracle, which has none, and proposals are made. */
TEST(test_learned) {
  static const struct {
    uint32_t tp;
    bool few, eagle, later;
  } on[] = {{1, false, false, false}, {1, true, false, false}, {2, false, false, false}, {4, true, false, false}, {1, false, true, false},
            {1, true, true, false},   {1, true, true, true},   {2, false, true, false},  {4, true, true, true}};
  mm_err err = {0};
  const mm_model m = kind(1);
  for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
    serving w;
    mm_scheduler_stats t;
    random_draft random = on[i].eagle ? draft_build_as(eagle_dims(&m, on[i].later)) : draft_build(&m);
    mm_dflash draft;
    if (!mm_dflash_open(&draft, random.dir, &m, &err)) fail_msg("%s", err.text);
    const mm_scheduler_config c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .drafts = MM_DRAFTS};
    serving_draft = &draft;
    serving_open(&w, m, on[i].tp, (mm_limits){.max_tokens = 64, .slots = on[i].few ? 2 : 6, .pages = on[i].few ? 7 : 0}, c);
    serving_draft = NULL;
    random_requests(&w, UINT32_MAX, 1);
    serving_settled(&w, &t);
    print_message("%llu proposed, %llu right\n", (unsigned long long)t.drafted, (unsigned long long)t.accepted);
    assert_true(t.learned > 0);
    serving_close(&w, true);
    mm_dflash_close(&draft);
    draft_free(&random);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
