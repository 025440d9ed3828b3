/* The line of progress: times in words, and every line fits every width, shows its share, and loses the least first. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "formats/system/bar.h"
#include "formats/system/pool.h"
#include "tests/unit/unit.h"

TEST(durations) {
  static const struct {
    double s;
    const char *text;
  } of[] = {{0, "0 s"},           {59.4, "59 s"},          {59.6, "1 min 00 s"},           {125, "2 min 05 s"}, {3599.4, "59 min 59 s"},
            {4560, "1 h 16 min"}, {172799, "47 h 59 min"}, {172800 + 4 * 3600, "2 d 4 h"}, {-1, "0 s"},         {(double)INFINITY, "0 s"}};
  char out[32];
  for (size_t i = 0; i < sizeof of / sizeof *of; i++) assert_string_equal(mm_duration(out, of[i].s), of[i].text);
}

TEST(whole) {
  char out[MM_BAR_MAX];
  const mm_bar_line a = {"hashing", 0.5, "50 %", 4560, "model-rank-00000.safetensors"};
  assert_string_equal(mm_bar_text(out, 0, &a),
                      "hashing [###############---------------] 50 %, 1 h 16 min left, model-rank-00000.safetensors");
  assert_string_equal(mm_bar_text(out, 70, &a), "hashing [####----] 50 %, 1 h 16 min left, model-rank-00000.safetensors");
  assert_string_equal(mm_bar_text(out, 60, &a), "hashing [####----] 50 %, 1 h 16 min left, model-ra..etensors");
  const mm_bar_line b = {"", 2, "", (double)NAN, "a\033[31m"};
  assert_string_equal(mm_bar_text(out, 0, &b), "[##############################] a\\x1b[31m");
}

TEST(fits) {
  static const char *const verb[] = {"", "checking numbers"}, *const facts[] = {"3 %", "12.00 of 460.00 GB (3 %), 1.20 GB/s, RSS 120 MiB"},
                           *const name[] = {"", "x", "model.layers.61.block_sparse_moe.experts.255.w1.weight_scale_inv"};
  char out[MM_BAR_MAX], whole[MM_BAR_MAX];
  for (unsigned i = 0; i < 12; i++) {
    const mm_bar_line l = {verb[i % 2], i / 12.0, facts[i / 2 % 2], i % 3 ? 100.0 * i : (double)NAN, name[i % 3]};
    mm_bar_text(whole, 0, &l);
    assert_true(strstr(whole, l.name) && strstr(whole, l.facts));
    for (unsigned width = 1; width < MM_BAR_MAX; width++) {
      mm_bar_text(out, width, &l);
      assert_true(strlen(out) <= width);
      assert_true(width < strlen(whole) || strcmp(out, whole) == 0);
    }
  }
}

static bool inner(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)ctx, (void)item, (void)worker, (void)err;
  return true;
}

/* Each item sees itself named, what was done before it, and runs of its own, which do not count. */
static bool outer(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_pool_watch *w = ctx;
  char name[32];
  (void)worker;
  snprintf(name, sizeof name, "item %zu", item);
  mm_pool_at(name);
  const bool ok = mm_pool_run(1, 5, inner, NULL, err) && w->done == item && w->count == 7 && strcmp(w->name, name) == 0;
  return ok || mm_fail(err, MM_BUG, "E_BUG", mm_at(name, NULL), "done %zu of %zu, at %s", w->done, w->count, w->name);
}

static bool counted(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)ctx, (void)worker, (void)err;
  mm_pool_at(item % 2 ? "odd" : "even");
  return true;
}

TEST(watched) {
  mm_err err = {0};
  mm_pool_watch w = {.lock = PTHREAD_MUTEX_INITIALIZER};
  mm_pool_watched(&w);
  assert_true(mm_pool_run(1, 7, outer, &w, &err));
  assert_true(mm_pool_run(4, 1000, counted, NULL, &err));
  assert_true(w.done == 0 && w.count == 0 && !*w.name); /* between runs */
  mm_pool_watched(NULL);
  assert_true(mm_pool_run(2, 7, inner, NULL, &err) && w.count == 0);
  mm_bar *b = mm_bar_open(false);
  mm_bar_verb(b, "counting");
  assert_true(mm_pool_run(2, 7, counted, NULL, &err));
  mm_bar_close(b);
  mm_bar_close(mm_bar_open(true));
}

int main(void) { return run_unit_tests(NULL, NULL); }
