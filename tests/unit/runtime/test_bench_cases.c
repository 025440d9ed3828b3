/* minimax-bench's cases: what options change of them. */
#include "runtime/bench/bench_cases.h"
#include "tests/unit/unit.h"

static mm_bench_case first(const mm_bench_args *a) {
  mm_bench_case c;
  assert_true(mm_bench_case_at(a, 0, &c));
  return c;
}

TEST(test_vocab) {
  mm_bench_args a = {.subject = "prefill", .model = "m2"};
  assert_int_equal(first(&a).vocab, 2048);
  a.vocab = "200064";
  assert_int_equal(first(&a).vocab, 200064);
  a.subject = "decode", a.vocab = NULL;
  assert_int_equal(first(&a).vocab, 200064);
  a.vocab = "2048";
  assert_int_equal(first(&a).vocab, 2048);
}

TEST(test_options) {
  const mm_bench_args a = {
      .subject = "layers", .model = "m2", .experts = "nvfp4", .head = "block_fp8", .layers = 4, .batch = 64, .context = 512, .tokens = 32};
  mm_bench_case c = first(&a);
  assert_string_equal(c.model, "m2");
  assert_string_equal(c.quant, "block_fp8");
  assert_string_equal(c.experts, "nvfp4");
  assert_string_equal(c.head, "block_fp8");
  assert_true(c.layers == 4 && c.batch[0] == 64 && c.batch[1] == 0 && c.context == 512);
  assert_int_equal(c.tokens, 0); /* it has no prefill */
  assert_false(mm_bench_case_at(&a, 1, &c));
}

/* kernels too are measured over ranks. */
TEST(test_check_ranks) {
  static const char *const subjects[] = {"kernels", "layers", "prefill"};
  for (size_t i = 0; i < 3; i++) {
    for (uint64_t tp = 1; tp <= 8; tp++) {
      for (uint64_t ep = 1; ep <= 8; ep++) {
        const mm_bench_args a = {.subject = subjects[i], .tp = tp, .ep = ep};
        mm_err err = {0};
        const bool fits = (tp == 1 || tp == 2 || tp == 4 || tp == 8) && tp % ep == 0;
        assert_int_equal(mm_bench_check_ranks(&a, &err), fits);
        assert_int_equal(err.status, fits ? MM_OK : MM_USAGE);
      }
    }
  }
}

/* A layer's kernels are printed for one token, and for the steps that serve many. */
TEST(test_kernels) {
  for (size_t i = 0; i < 2; i++) {
    static const uint32_t batch[] = {1, 16, 64, 256, 0};
    const mm_bench_args a = {.subject = "kernels", .model = i ? "m2" : "m1"};
    const mm_bench_case c = first(&a);
    for (size_t j = 0; j < 5; j++) assert_int_equal(c.batch[j], batch[j]);
  }
}

/* M3 is measured where it is named; what options say of its dense layers. */
TEST(test_m3) {
  mm_bench_args a = {.subject = "decode", .dense = UINT64_MAX};
  mm_bench_case c;
  for (size_t i = 0; mm_bench_case_at(&a, i, &c); i++) assert_string_equal(c.model, "m2");
  a.model = "m3";
  assert_true(first(&a).layers == 60 && first(&a).dense == 3);
  a.subject = "kernels";
  assert_int_equal(first(&a).dense, 1);
  a.dense = 0;
  assert_int_equal(first(&a).dense, 0);
  a.dense = 9, a.layers = 5;
  assert_int_equal(first(&a).dense, 5);
}

int main(void) { return run_unit_tests(NULL, NULL); }
