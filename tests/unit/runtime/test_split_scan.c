/* The scan of index keys that is split over ranks (mm_run_options.index_split): logits are those of the scan that is not, bit for bit, for
 * ranks that share heads or not, groups of attention, index keys in f32 and e4m3, rows of several sequences and idle ones; where all scores
 * are equal, too, so that every block is a tie. */
#include "tests/unit/runtime/fixture.h"

static mm_engine *open_engine(const mm_shards *shards, caches cache, uint32_t split) {
  mm_err err = {0};
  mm_engine_config c = {
      .ops = &mm_ops_cpu, .limits = {.max_tokens = LENGTH, .slots = SLOTS, .max_positions = LENGTH}, .options = cached(cache)};
  c.options.index_split = split;
  mm_engine *e = mm_engine_open(shards, &c, &err);
  if (!e) fail_msg("%s", err.text);
  return e;
}

/* Random steps of three sequences, of one row or some, with an idle span now and then. */
static void same_steps(mm_engine *whole, mm_engine *split, uint32_t vocab, uint32_t groups) {
  static float got[2][LENGTH * 600];
  uint32_t pos[SLOTS] = {0};
  for (uint32_t step = 0; step < 40; step++) {
    int32_t id[LENGTH];
    uint32_t out[LENGTH], rows = 0, spans = 0;
    mm_span span[SLOTS];
    for (uint32_t s = 0; s < 3; s++) {
      const uint32_t slot = s * SLOTS / 3, n = (uint32_t)mm_min(below(3) ? 1 : 1 + below(50), LENGTH - pos[slot]);
      if (!n || below(5) == 0) continue;
      span[spans++] = (mm_span){(int32_t)slot, rows, n, pos[slot]};
      for (uint32_t i = 0; i < n && rows < LENGTH; i++, rows++) id[rows] = token(s, pos[slot] + i), out[rows] = rows;
      pos[slot] += n;
      if (groups > 1) break; /* rows of one group at a time */
    }
    if (!spans) continue;
    mm_err err = {0};
    const mm_batch batch = {rows, id, spans, span, rows, out, NULL, NULL};
    assert_true(rows * (size_t)vocab <= sizeof got[0] / sizeof **got);
    if (!mm_engine_step(whole, &batch, got[0], &err) || !mm_engine_step(split, &batch, got[1], &err)) fail_msg("%s", err.text);
    if (memcmp(got[0], got[1], (size_t)rows * vocab * sizeof **got) != 0) fail_msg("step %u: other bits", step);
  }
  assert_true(pos[0] > 100);
}

static void compare(uint32_t tp, uint32_t attn_tp, caches cache, uint32_t from, bool ties) {
  const mm_model m = ref_dims(MM_FAMILY_M3, false);
  ref_model ref = ref_build(m);
  for (uint32_t l = 0; ties && l < m.layers; l++)
    if (ref.layer[l].index_q) memset(ref.layer[l].index_q, 0, (size_t)m.index_heads * m.index_dim * m.hidden * sizeof(float));
  ref_shards *shards = ref_cut_groups(&ref, tp, attn_tp);
  mm_engine *whole = open_engine(&shards->s, cache, 0), *split = open_engine(&shards->s, cache, from);
  same_steps(whole, split, m.vocab, attn_tp ? tp / attn_tp : 1);
  mm_engine_close(whole), mm_engine_close(split);
  ref_uncut(shards);
  ref_free(&ref);
}

TEST(test_lists_of_the_whole_scan) {
  for (uint32_t i = 0; i < 2; i++) {
    const caches cache = i ? INDEX_FP8 : IN_F32;
    compare(2, 0, cache, 1, i == 0);
    compare(2, 0, cache, 90, i == 1);
    compare(4, 0, cache, 1, i == 1);
    compare(8, 0, cache, 30, i == 0);
  }
  compare(4, 2, IN_F32, 1, false);
}

/* A model that has no index keys. */
TEST(test_refused) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut_groups(&ref, 2, 0);
  mm_err err = {0};
  const mm_engine_config c = {
      .ops = &mm_ops_cpu, .limits = {.max_tokens = 8, .slots = 1, .max_positions = 64}, .options = {.threads = 1, .index_split = 5}};
  assert_null(mm_engine_open(&shards->s, &c, &err));
  assert_string_equal(err.code, "E_SCHEME");
  ref_uncut(shards);
  ref_free(&ref);
}

int main(void) { return run_unit_tests(NULL, NULL); }
