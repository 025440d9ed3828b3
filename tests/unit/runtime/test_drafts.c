/* Prompt lookup through the scheduler: replies are those without it; it goes on where it pays, and stops where it does not. */
#include "tests/unit/runtime/random_requests.h"

/* Verified proposals are what the model chooses alone, whatever it draws with; lookup is for models whose slots can go back. */
static void test_random(void **state) {
  (void)state;
  for (uint32_t k = 0; k < 2; k++)
    for (uint32_t few = 0; few < 2; few++) {
      serving w;
      mm_scheduler_stats t;
      const mm_scheduler_config c = {
          .step_tokens = 40, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 16, .drafts = MM_DRAFTS};
      serving_open(&w, kind(k), 1, (mm_limits){.max_tokens = 64, .slots = few ? 2 : 6, .pages = few ? 7 : 0}, c);
      random_requests(&w, UINT32_MAX, 3);
      serving_settled(&w, &t);
      print_message("%llu proposed, %llu right\n", (unsigned long long)t.drafted, (unsigned long long)t.accepted);
      assert_true(k ? t.drafted > t.accepted && t.accepted > 0 : !t.drafted);
      serving_close(&w, true);
    }
}

/* ---- when ---- */

static uint32_t row_us, step_us; /* what a step takes at least, by its rows and at all */

static bool slow_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const struct timespec t = {0, 1000L * (step_us + row_us * (long)batch->tokens)};
  nanosleep(&t, NULL);
  return mm_ops_cpu.begin(b, batch, err);
}

/* A reply of one token again and again, or a draw of two; how many tokens were proposed, and the steps that it took. */
static uint64_t proposed(bool easy, uint32_t per_row, uint32_t per_step, uint64_t *steps) {
  static mm_ops ops;
  serving w;
  mm_scheduler_stats t;
  ops = mm_ops_cpu;
  ops.begin = slow_begin;
  row_us = step_us = 0; /* not for the oracle, nor when it opens */
  serving_open_ops(&w, kind(1), 1, &ops, (mm_limits){.max_tokens = 64, .slots = 2},
                   (mm_scheduler_config){.step_tokens = 64, .queue_max = 1, .drafts = MM_DRAFTS});
  client c = {.r = {.max_tokens = 90, .sampling = {.temperature = easy ? 0 : 99, .top_k = 2, .top_p = 1, .bias_count = 1}},
              .bias = {7, 50}};
  fill(&c, 1, 200);
  client_ready(&w, &c);
  row_us = per_row, step_us = per_step;
  client_submit(&w, &c);
  client_check(&c);
  serving_settled(&w, &t);
  serving_close(&w, true);
  print_message("%s, %u us a row and %u a step: %llu steps for 90 tokens, %llu proposed, %llu right\n", easy ? "easy" : "hard", per_row,
                per_step, (unsigned long long)t.steps, (unsigned long long)t.drafted, (unsigned long long)t.accepted);
  *steps = t.steps;
  return t.drafted;
}

/* Right proposals for nothing save most steps; where rows are all that costs, wrong ones are hardly made. */
static void test_when(void **state) {
  (void)state;
  uint64_t steps;
  assert_true(proposed(true, 0, 1000, &steps) > 50 && steps < 40);
  assert_true(proposed(false, 1000, 0, &steps) < 60);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_random), cmocka_unit_test(test_when)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
