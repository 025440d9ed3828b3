/* When prompt lookup is done: by rates of steps whose times and tokens the test sets, noise among them; and what is proposed. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"
#include "tests/unit/unit.h"

enum { SLOTS = 4, STEPS = 1000, CROWD = 64, MANY = 10000 };

/* A step takes step + row · rows seconds, and now and then ten times as long; each proposal is right with probability acceptance. */
typedef struct machine {
  double step, row, acceptance;
  uint32_t drafts;
  double copied, right; /* of the steps: those in which requests copy; chance of a proposal then */
} machine;

static uint64_t seed = 1;
static double uniform(void) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (double)(seed >> 33) * 0x1p-31;
}

/* Share of the steps that had proposals. */
static double share(const machine *m, uint32_t decoders) {
  static mm_scheduler s; /* large */
  mm_err err = {0};
  job each[SLOTS] = {0}, *slot[SLOTS] = {0};
  memset(&s, 0, sizeof s);
  s.slots = SLOTS, s.slot = slot, s.c.drafts = MM_DRAFTS;
  for (uint32_t i = 0; i < decoders; i++) each[i].count = 9, each[i].fed = 8, each[i].r.drafts = MM_DRAFTS, slot[i] = &each[i];
  assert_true(mm_drafts_open(&s, &err));
  uint32_t drafted = 0;
  double now = 100;
  for (uint32_t i = 0; i < STEPS; i++, s.own.steps++) {
    const bool copies = i % 100 < 100 * m->copied;
    for (uint32_t d = 0; d < decoders; d++) each[d].lookup.long_match = copies;
    step t = {.began = now, .decoders = decoders, .drafted = mm_drafts_wanted(&s)};
    t.copies = t.drafted && copies;
    uint32_t rows = decoders, tokens = decoders;
    for (uint32_t d = 0; t.drafted && (copies || !s.draft.copies_only) && d < decoders; d++) {
      rows += m->drafts;
      for (uint32_t k = 0; k < m->drafts && uniform() < (copies ? m->right : m->acceptance); k++) tokens++;
    }
    now += (m->step + m->row * rows) * (0.9 + 0.2 * uniform()) * (uniform() < 0.03 ? 10 : 1);
    mm_drafts_measure(&s, &t, tokens, now);
    drafted += t.drafted;
  }
  mm_drafts_close(&s);
  return (double)drafted / (double)STEPS;
}

TEST(test_rates) {
  static const machine pays[] = {{1e-3, 0, 0.9, 7, 0, 0}, {1e-3, 0, 0.3, 7, 0, 0}, {1e-3, 1e-4, 0.9, 4, 0, 0}, {0, 1e-3, 1, 0, 0, 0}},
                       costs[] = {{0, 1e-3, 0.6, 2, 0, 0}, {0, 1e-3, 0, 1, 0, 0}, {1e-3, 1e-3, 0.3, 5, 0, 0}, {1e-3, 2e-4, 0, 7, 0, 0}};
  for (uint32_t decoders = 1; decoders <= SLOTS; decoders++)
    for (size_t i = 0; i < sizeof costs / sizeof *costs; i++) {
      if (pays[i].drafts) assert_true(share(&pays[i], decoders) > 0.9);
      assert_true(share(&costs[i], decoders) < 0.1);
    }
}

/* Requests that copy in two steps of five: these have proposals where the others' cost, and none where every row does. */
TEST(test_copies) {
  const machine pays = {1e-3, 1e-4, 0, 7, 0.4, 1}, costs = {0, 1e-3, 0, 7, 0.4, 0.7};
  for (uint32_t decoders = 1; decoders <= SLOTS; decoders++) {
    const double some = share(&pays, decoders);
    if (some < 0.35 || some > 0.45) fail_msg("%u decoders: %.2f of the steps", decoders, some);
    assert_true(share(&costs, decoders) < 0.1);
  }
}

/* A scheduler of requests that decode. */
typedef struct clocked {
  mm_scheduler s; /* large */
  job each[CROWD], *slot[CROWD];
  double now, took, alone; /* seconds: the clock, those of its steps, and of as many tokens in steps without proposals */
  uint32_t drafted;        /* steps with proposals */
} clocked;

static clocked *clocked_open(void) {
  static clocked c;
  mm_err err = {0};
  memset(&c, 0, sizeof c);
  c.s.slots = CROWD, c.s.slot = c.slot, c.s.c.drafts = MM_DRAFTS;
  for (uint32_t i = 0; i < CROWD; i++) c.each[i].count = 9, c.each[i].fed = 8, c.each[i].r.drafts = MM_DRAFTS;
  assert_true(mm_drafts_open(&c.s, &err));
  return &c;
}

/* The next steps, on that machine, of so many requests at least and at most; a step with proposals finds some, as on a device that could
 * have been given it before. */
static void clocked_run(clocked *c, const machine *m, uint32_t fewest, uint32_t most, uint32_t steps) {
  c->now += 100; /* nothing ran */
  for (uint32_t i = 0; i < steps; i++, c->s.own.steps++) {
    const uint32_t decoders = fewest + (uint32_t)(uniform() * (most - fewest + 1));
    for (uint32_t k = 0; k < CROWD; k++) c->slot[k] = k < decoders ? &c->each[k] : NULL;
    c->s.draft.wanted = mm_drafts_wanted(&c->s);
    step t = {.began = c->now, .decoders = decoders, .drafted = c->s.draft.wanted};
    uint32_t rows = decoders, tokens = decoders;
    for (uint32_t d = 0; t.drafted && d < decoders; d++) {
      rows += m->drafts;
      for (uint32_t k = 0; k < m->drafts && uniform() < m->acceptance; k++) tokens++;
    }
    const double noise = (0.9 + 0.2 * uniform()) * (uniform() < 0.03 ? 10 : 1);
    c->took += (m->step + m->row * rows) * noise;
    c->now += (m->step + m->row * rows) * noise;
    c->alone += (m->step + m->row * decoders) * noise * tokens / decoders;
    mm_drafts_measure(&c->s, &t, tokens, c->now);
    c->drafted += t.drafted;
  }
}

/* Where proposals never pay, looking costs 1 % of the time at most, however many requests there are and however their number changes. */
TEST(test_cost) {
  static const machine costs[] = {{20e-3, 0.1e-3, 0, 1, 0, 0}, {20e-3, 0.1e-3, 0.05, 7, 0, 0}, {20e-3, 0.5e-3, 0.1, 7, 0, 0}};
  static const uint32_t fewest[] = {64, 33, 1}, most[] = {64, 64, 1};
  for (size_t i = 0; i < sizeof costs / sizeof *costs; i++)
    for (size_t k = 0; k < sizeof most / sizeof *most; k++) {
      clocked *c = clocked_open();
      clocked_run(c, &costs[i], fewest[k], most[k], 2 * MANY);
      const double more = c->took / c->alone - 1;
      print_message("%u to %u requests, machine %zu: %u steps tried, %.2f %% lost\n", fewest[k], most[k], i, c->drafted, 100 * more);
      assert_true(more < 0.01);
      mm_drafts_close(&c->s);
    }
}

/* The next trial comes soon after one that won: text that begins to repeat itself is noticed after 1,024 steps or a little more, and text
 * that no longer does at once. */
TEST(test_turn) {
  static const machine never = {20e-3, 0.2e-3, 0, 7, 0, 0}, often = {20e-3, 0.2e-3, 0.95, 7, 0, 0};
  clocked *c = clocked_open();
  clocked_run(c, &never, 64, 64, MANY);
  const uint32_t before = c->drafted;
  clocked_run(c, &often, 64, 64, 2000);
  print_message("%u steps of 10,000 tried, then %u of 2,000 with proposals\n", before, c->drafted - before);
  assert_true(before < 40 && c->drafted - before > 800);
  const uint32_t during = c->drafted;
  clocked_run(c, &never, 64, 64, 2000);
  print_message("then %u\n", c->drafted - during);
  assert_true(c->drafted - during < 40);
  mm_drafts_close(&c->s);
}

/* While a prompt is being read nothing is tried, and requests that take no proposals are not waited for. */
TEST(test_prompts) {
  clocked *c = clocked_open();
  for (uint32_t k = 0; k < 3; k++) c->slot[k] = &c->each[k];
  for (uint32_t k = 0; k < 99; k++) assert_true(mm_drafts_wanted(&c->s)); /* until a step is queued */
  c->each[2].fed = 0;
  assert_false(mm_drafts_wanted(&c->s));
  c->each[2].fed = 9, c->each[2].in_flight = 1; /* its prompt is read by a step under way */
  assert_true(mm_drafts_wanted(&c->s));
  for (uint32_t k = 0; k < 3; k++) c->each[k].r.drafts = 0;
  assert_false(mm_drafts_wanted(&c->s));
  mm_drafts_close(&c->s);
}

/* A text is copied, a part of it edited: proposals go on behind the edited part, although other places have the same last tokens. */
TEST(test_edited) {
  enum { LINES = 40, LINE = 9, PROMPT = LINES * LINE };
  mm_scheduler s = {.c.drafts = MM_DRAFTS, .draft.wanted = true};
  int32_t token[2 * PROMPT];
  for (uint32_t i = 0; i < PROMPT; i++) token[i] = i % LINE >= LINE - 4 ? (int32_t)(i % LINE) : (int32_t)(100 + i); /* lines end alike */
  job j = {.token = token, .r = {.prompt_count = PROMPT, .max_tokens = 999, .drafts = MM_DRAFTS}, .lookup.acceptance = {1, 1}};
  for (uint32_t line = 0; line < LINES; line++) {
    const bool edited = line % 8 == 7;
    for (uint32_t i = 0; i < LINE; i++) {
      const uint32_t at = line * LINE + i;
      j.count = PROMPT + at;
      const uint32_t n = mm_drafts_find(&s, &j, 99);
      token[j.count] = edited && i < LINE - 4 ? (int32_t)(5000 + at) : token[at];
      /* The first line has its beginning to be found by, one behind an edited one the ends of lines that are all alike. */
      const bool copies = (line > 0 || i > 4) && !(edited && i < LINE - 2) && at + MM_DRAFTS < PROMPT;
      if (!copies) continue;
      if (n != MM_DRAFTS) fail_msg("line %u, token %u: %u proposals", line, i, n);
      assert_int_equal(j.draft[0], token[at]);
    }
  }
  mm_gram_index_close(&j.grams);
}

/* The tokens that followed the last three tokens before, latest first; else the last two; going on where the tokens end. */
TEST(test_found) {
  mm_scheduler s = {.c.drafts = MM_DRAFTS, .draft.wanted = true};
  int32_t three[] = {1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 9, 2, 3, 8, 1, 2, 3}, two[] = {9, 2, 3, 4, 7, 2, 3}, none[] = {1, 2, 3, 4, 5, 6};
  job j = {.token = three, .count = 17, .r = {.prompt_count = 17, .max_tokens = 99, .drafts = MM_DRAFTS}, .lookup.acceptance = {1, 1}};
  assert_int_equal(mm_drafts_find(&s, &j, 99), 7);
  assert_memory_equal(j.draft, ((int32_t[]){6, 7, 9, 2, 3, 8, 1}), sizeof j.draft);
  assert_int_equal(mm_drafts_find(&s, &j, 2), 2);
  j.r.max_tokens = 4;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 3); /* and one that is chosen after them */
  j.r.max_tokens = 1;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 0);
  mm_gram_index_close(&j.grams);
  j.token = two, j.count = j.r.prompt_count = 7, j.r.max_tokens = 99;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 7);
  assert_memory_equal(j.draft, ((int32_t[]){4, 7, 2, 3, 4, 7, 2}), sizeof j.draft);
  j.lookup.acceptance[0] = 0;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 1);
  j.lookup.acceptance[0] = 1, j.r.drafts = 2;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 2);
  j.r.drafts = 0;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 0);
  j.r.drafts = 7;
  mm_gram_index_close(&j.grams);
  j.token = none, j.count = 6;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 0);
  s.draft.wanted = false;
  mm_gram_index_close(&j.grams);
  j.token = two, j.count = 7;
  assert_int_equal(mm_drafts_find(&s, &j, 99), 0);
  mm_gram_index_close(&j.grams);
}

int main(void) { return run_unit_tests(NULL, NULL); }
