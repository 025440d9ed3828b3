/* --dp: the groups that a word asks for, what auto takes by device and sequences, and digests of cuts, which differ. */
#include "runtime/engine/attention_groups.h"

#include <string.h>

#include "tests/unit/unit.h"

static mm_model model;
static bool read_model(const char *dir, mm_model *m, mm_err *err) {
  (void)dir;
  (void)err;
  *m = model;
  return true;
}

/* Random weights of M2's kind on `tp` ranks, made for `groups`. They are opened with ranks that can share 12 heads. */
static void open_made(mm_shards *s, uint32_t tp, uint32_t groups) {
  mm_err err = {0};
  mm_dummy d = MM_DUMMY_NONE(read_model);
  d.format = "dummy", d.quant = "bf16", d.tp = tp % 8 ? tp : 4;
  model = (mm_model){.architecture = "MiniMaxM2ForCausalLM",
                     .family = MM_FAMILY_M2,
                     .hidden = 64,
                     .layers = 1,
                     .heads = 12,
                     .kv_heads = 4,
                     .head_dim = 16,
                     .experts = 8,
                     .intermediate = 96,
                     .vocab = 128,
                     .max_positions = 64};
  if (!mm_shards_open_as(s, ".", &d, &err)) fail_msg("%s", err.text);
  s->pack.tp = s->random.tp = tp;
  if (!mm_shards_regroup(s, groups, &err)) fail_msg("%s", err.text);
}

static void expect(uint32_t tp, uint32_t made, mm_groups_request r, uint32_t groups, const char *says) {
  mm_shards s;
  mm_err err = {0};
  char line[MM_GROUPS_LINE];
  open_made(&s, tp, made);
  if (!mm_groups_select(&s, &r, line, &err)) fail_msg("%s", err.text);
  assert_int_equal(mm_pack_groups(&s.pack), groups);
  if (says ? !strstr(line, says) : *line) fail_msg("%s", line);
  mm_shards_close(&s);
}

TEST(chosen_by_what_is_known) {
  const char *const times =
      " sequences at a time at most; measured: groups in 1 of one's time for 16, 0.99 for 64, 1.01 for 128, 0.96 for 256, 1 for 1024";
  expect(4, 4, (mm_groups_request){NULL, "cuda", 16, NULL}, 4, NULL);
  expect(4, 4, (mm_groups_request){"2", "cuda", 16, NULL}, 2, "2 groups of 2 ranks by --dp 2");
  expect(4, 4, (mm_groups_request){"auto", "cuda", 16, NULL}, 1, MM_FORMATTED(200, "1 group of 4 ranks by --dp auto: 16%s", times));
  expect(4, 4, (mm_groups_request){"auto", "cuda", 1, NULL}, 1, "auto: 1 sequence at a time at most; measured: groups in 1 of");
  expect(4, 4, (mm_groups_request){"auto", "cuda", 255, NULL}, 1, times);
  expect(4, 4, (mm_groups_request){"auto", "cuda", 256, NULL}, 4, MM_FORMATTED(200, "4 groups of 1 rank by --dp auto: 256%s", times));
  expect(4, 2, (mm_groups_request){"auto", "cuda", 1024, NULL}, 2, times);
  expect(4, 1, (mm_groups_request){"auto", "cuda", 1024, NULL}, 1, "the checkpoint was made for one");
  expect(4, 4, (mm_groups_request){"auto", "cpu", 16, NULL}, 4, "as the checkpoint was made; there are no times of device cpu");
  expect(4, 4, (mm_groups_request){"auto", "cuda", 1024, "a draft"}, 1, "auto: a draft needs one");
  expect(8, 8, (mm_groups_request){"auto", "cuda", 16, NULL}, 2, "2 groups of 4 ranks"); /* 8 ranks cannot share 12 heads */
}

static void refused(uint32_t tp, mm_groups_request r, mm_status status, const char *code, const char *says) {
  mm_shards s;
  mm_err err = {0};
  char line[MM_GROUPS_LINE];
  open_made(&s, tp, tp);
  assert_false(mm_groups_select(&s, &r, line, &err));
  assert_int_equal(err.status, status);
  assert_string_equal(err.code, code);
  if (!strstr(err.text, says)) fail_msg("%s", err.text);
  mm_shards_close(&s);
}

TEST(refused_by_name) {
  refused(4, (mm_groups_request){"3", "cpu", 1, NULL}, MM_UNSUPPORTED, "E_PARALLEL", "found --dp 3; expected a divisor of 4");
  refused(8, (mm_groups_request){"1", "cpu", 1, NULL}, MM_UNSUPPORTED, "E_TP",
          "found --dp 1, attention for 8 ranks; expected ranks that divide 12");
  refused(4, (mm_groups_request){"auto", "cuda", 0, NULL}, MM_USAGE, "E_USAGE", "found \"auto\", expected a number from 1 to 1024");
  refused(4, (mm_groups_request){"-1", "cpu", 1, NULL}, MM_USAGE, "E_USAGE", "or auto");
  refused(4, (mm_groups_request){"", "cpu", 1, NULL}, MM_USAGE, "E_USAGE", "or auto");
}

/* Another cut has another digest, so that held weights, saved pages and other processes of another one are refused. */
TEST(digests_of_cuts) {
  mm_shards s[3];
  const uint32_t groups[] = {4, 2, 1};
  for (uint32_t i = 0; i < 3; i++) open_made(&s[i], 4, groups[i]);
  for (uint32_t i = 0; i < 3; i++)
    for (uint32_t k = 0; k < 3; k++) {
      const mm_digest a = mm_shards_digest(&s[i]), b = mm_shards_digest(&s[k]);
      assert_int_equal(mm_digest_equal(&a, &b), i == k);
    }
  const mm_digest a = mm_shards_digest(&s[2]);
  assert_true(mm_digest_equal(&a, &s[2].pack.text_digest));
  for (uint32_t i = 0; i < 3; i++) mm_shards_close(&s[i]);
}

int main(void) { return run_unit_tests(NULL, NULL); }
