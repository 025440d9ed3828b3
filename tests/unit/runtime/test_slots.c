/* Contents of slots: bit for bit the same however they came there. Sequences cut into any steps, forked, saved and restored, on shared
 * pages and on own ones, at a page's border and next to it; short of pages; and a memory that grows with the pages in use alone. Random
 * schedules: test_schedules.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/runtime/fixture.h"
#include "tests/unit/unit.h"

static void each_fixture(void (*test)(fixture *w), uint32_t pages) {
  static const struct {
    mm_family family;
    bool postnorm;
    caches cache;
    uint32_t tp;
  } kind[] = {{MM_FAMILY_M1, true, IN_F32, 1},   {MM_FAMILY_M1, true, IN_BF16, 2}, {MM_FAMILY_M2, false, IN_F32, 2},
              {MM_FAMILY_M2, false, IN_BF16, 1}, {MM_FAMILY_M3, false, IN_F32, 1}, {MM_FAMILY_M3, false, INDEX_FP8, 2}};
  for (size_t i = 0; i < sizeof kind / sizeof *kind; i++) {
    fixture w;
    open_group(&w, ref_dims(kind[i].family, kind[i].postnorm), kind[i].tp, 0, pages, kind[i].cache);
    test(&w);
    close_group(&w);
  }
}

/* ---- equalities ---- */

static void any_split(fixture *w) {
  static const uint32_t size[] = {1, 7, MM_PAGE - 1, MM_PAGE, MM_PAGE + 1, 128, 129};
  for (size_t i = 0; i < sizeof size / sizeof *size + ROUNDS(23); i++) {
    const bool random = i >= sizeof size / sizeof *size;
    for (uint32_t pos = 0, n; pos < LENGTH; pos += n) {
      n = (uint32_t)mm_min(random ? 1 + below(90) : size[i], LENGTH - pos);
      feed_ok(w, (int32_t)(i % SLOTS), i % TEXTS, pos, n);
    }
    same(w, i % TEXTS, 0, LENGTH);
  }
  free_again(w);
}

TEST(test_any_split) { each_fixture(any_split, 0); }

static const uint32_t border[] = {1, MM_PAGE - 1, MM_PAGE, MM_PAGE + 1, COMMON};

/* Three slots go on from one's tokens, the first of them with another text; each as if it had run alone. */
static void forked(fixture *w) {
  mm_err err = {0};
  for (size_t i = 0; i < sizeof border / sizeof *border; i += SANITIZED ? 2 : 1) {
    const uint32_t n = border[i], to[] = {3, 1, 5};
    feed_ok(w, 2, 0, 0, n);
    const uint32_t used = mm_pages_count(mm_engine_pages(w->engine)) - mm_pages_free(mm_engine_pages(w->engine));
    assert_true(mm_engine_fork(w->engine, 2, to, 3, &err));
    assert_int_equal(mm_pages_count(mm_engine_pages(w->engine)) - mm_pages_free(mm_engine_pages(w->engine)), used);
    for (uint32_t k = 0; k < 4; k++) { /* all in turns, a token and then many */
      const int32_t slot[] = {3, 2, 1, 5};
      assert_int_equal(mm_engine_held(w->engine, (uint32_t)slot[k]), n);
      feed_ok(w, slot[k], k == 0, n, 1);
      same(w, k == 0, n, n + 1);
    }
    for (uint32_t k = 0; k < 4; k++) {
      const int32_t slot[] = {1, 3, 5, 2};
      feed_ok(w, slot[k], slot[k] == 3, n + 1, LENGTH - n - 1);
      same(w, slot[k] == 3, n + 1, LENGTH);
    }
    free_again(w);
  }
}

TEST(test_forked) { each_fixture(forked, 0); }

/* A slot's pages are held and its states saved; the slot then runs on and is used by another; elsewhere it is restored, twice. */
static void restored(fixture *w) {
  mm_err err = {0};
  mm_pages *pages = mm_engine_pages(w->engine);
  const uint64_t bytes = mm_engine_state_bytes(w->engine);
  char *saved = malloc(bytes + 1);
  for (size_t i = 0; i < sizeof border / sizeof *border; i += SANITIZED ? 2 : 1) {
    const uint32_t n = border[i], count = (uint32_t)mm_ceil_div(n, MM_PAGE);
    uint32_t page[LENGTH / MM_PAGE + 1];
    feed_ok(w, 4, 2, 0, n);
    memcpy(page, mm_pages_table(pages) + (size_t)4 * mm_pages_per_slot(pages), count * sizeof *page);
    for (uint32_t p = 0; p < count; p++) mm_pages_hold(pages, page[p]);
    assert_true(mm_engine_save(w->engine, 4, saved, &err));
    feed_ok(w, 4, 2, n, LENGTH - n);
    same(w, 2, n, LENGTH);
    feed_ok(w, 4, 1, 0, LENGTH);
    mm_engine_drop(w->engine, 4);
    for (uint32_t k = 0; k < 2; k++) {
      assert_true(mm_engine_resume(w->engine, k ? 4 : 1, page, NULL, n, bytes ? saved : NULL, &err));
      feed_ok(w, k ? 4 : 1, k ? 3 : 2, n, LENGTH - n);
      same(w, k ? 3 : 2, n, LENGTH);
    }
    for (uint32_t p = 0; p < count; p++) mm_pages_release(pages, page[p]);
    free_again(w);
  }
  free(saved);
}

TEST(test_restored) { each_fixture(restored, 0); }

/* Without lightning layers a slot goes on from shared pages at any position that they hold. */
TEST(test_shared_pages) {
  mm_err err = {0};
  for (uint32_t k = 0; k < 3; k++) {
    fixture w;
    open_group(&w, ref_dims(k / 2 ? MM_FAMILY_M3 : MM_FAMILY_M2, false), 1, 0, 0, k % 2 ? IN_BF16 : IN_F32);
    feed_ok(&w, 0, 0, 0, LENGTH);
    const uint32_t *page = mm_pages_table(mm_engine_pages(w.engine));
    for (uint32_t n = 0; n <= COMMON; n += n < 3 || n > 60 ? 1 : 7) {
      assert_true(mm_engine_resume(w.engine, 1, page, NULL, n, NULL, &err));
      feed_ok(&w, 1, 1, n, LENGTH - n);
      same(&w, 1, n, LENGTH);
    }
    feed_ok(&w, 0, 0, LENGTH - 1, 1); /* the owner's own are as they were */
    same(&w, 0, LENGTH - 1, LENGTH);
    free_again(&w);
    close_group(&w);
  }
}

/* ---- refusals ---- */

TEST(test_refused) {
  fixture w;
  open_group(&w, ref_dims(MM_FAMILY_M1, true), 2, 0, 0, IN_F32);
  const uint32_t high = SLOTS, one = 1, beyond = mm_pages_count(mm_engine_pages(w.engine)), unused = beyond - 1;
  char *saved = malloc(mm_engine_state_bytes(w.engine));
  feed_ok(&w, 0, 0, 0, 65);
  const uint32_t *page = mm_pages_table(mm_engine_pages(w.engine));
  struct {
    bool done;
    mm_err err;
  } r[8] = {0};
  r[0].done = mm_engine_fork(w.engine, high, &one, 1, &r[0].err);
  r[1].done = mm_engine_fork(w.engine, 0, &high, 1, &r[1].err);
  r[2].done = mm_engine_save(w.engine, high, saved, &r[2].err);
  r[3].done = mm_engine_save(w.engine, 1, saved, &r[3].err); /* holds nothing */
  r[4].done = mm_engine_resume(w.engine, 1, &beyond, NULL, 1, saved, &r[4].err);
  r[5].done = mm_engine_resume(w.engine, 1, &unused, NULL, 1, saved, &r[5].err);
  r[6].done = mm_engine_resume(w.engine, 1, page, NULL, 65, NULL, &r[6].err);
  r[7].done = mm_engine_resume(w.engine, 1, page, NULL, LENGTH + 1, saved, &r[7].err);
  for (size_t i = 0; i < sizeof r / sizeof *r; i++) {
    assert_false(r[i].done);
    assert_int_equal(r[i].err.status, MM_USAGE);
    assert_string_equal(r[i].err.code, "E_BATCH");
  }
  free(saved);
  close_group(&w);
}

/* What a slot of one group computed goes on, to the bit, in a slot of another: its pages go there through places, whose parts both groups'
 * ranks have in common, and states lie alike in both. */
static void across_groups(mm_model m, uint32_t stage) {
  enum { AT = 130, COUNT = 3 };
  fixture w;
  mm_err err = {0};
  open_groups(&w, m, 4, 2, stage, 0, IN_F32);
  mm_engine *e = w.engine;
  mm_pages *p = mm_engine_pages(e);
  void *state = malloc(mm_engine_state_bytes(e) + 1);
  uint64_t number, oldest, bytes;
  uint32_t page[COUNT];
  mm_page_move move[COUNT];
  feed_ok(&w, 2, 0, 0, AT);
  if (!mm_engine_save(e, 2, state, &err) || !mm_engine_pool(e, 5, &err)) fail_msg("%s", err.text);
  assert_int_equal(mm_engine_pool_parts(e), stage ? 4 : 2);
  for (uint32_t i = 0; i < mm_engine_pool_parts(e); i++) assert_non_null(mm_engine_pool_part(e, i, &bytes));
  for (uint32_t i = 0; i < COUNT; i++)
    move[i] = (mm_page_move){mm_pages_table(p)[(size_t)2 * mm_pages_per_slot(p) + i], i ? 4 - i : 1, false};
  assert_true(mm_engine_move(e, move, COUNT, &number, &err) && mm_engine_moved(e, true, &oldest, &err) && oldest > number);
  mm_engine_drop(e, 2);
  for (uint32_t i = 0; i < COUNT; i++) {
    assert_true(mm_pages_take(p, 1, &page[i]));
    assert_int_equal(mm_pages_group_of(p, page[i]), 1);
    move[i] = (mm_page_move){page[i], move[i].place, true};
  }
  assert_true(mm_engine_move(e, move, COUNT, &number, &err) && mm_engine_moved(e, true, &oldest, &err));
  assert_true(mm_engine_resume(e, 3, page, NULL, AT, state, &err));
  for (uint32_t i = 0; i < COUNT; i++) mm_pages_release(p, page[i]);
  feed_ok(&w, 3, 0, AT, LENGTH - AT);
  same(&w, 0, 0, LENGTH);
  free_again(&w);
  free(state);
  close_group(&w);
}

TEST(test_across_groups) {
  across_groups(ref_dims(MM_FAMILY_M2, false), 0);
  across_groups(ref_dims(MM_FAMILY_M2, false), 1);
  across_groups(ref_dims(MM_FAMILY_M1, true), 1);
  across_groups(ref_dims(MM_FAMILY_M3, false), 0);
}

/* Slots of different groups share nothing; no other group's pages, and no run that needs one group alone. */
TEST(test_groups_refused) {
  fixture w;
  mm_err err = {0};
  open_groups(&w, ref_dims(MM_FAMILY_M2, false), 4, 2, 0, 0, false);
  assert_int_equal(mm_engine_groups(w.engine), 2);
  assert_int_equal(mm_pages_groups(mm_engine_pages(w.engine)), 2);
  feed_ok(&w, 2, 0, 0, 65);
  const uint32_t *page = mm_pages_table(mm_engine_pages(w.engine)) + (size_t)2 * mm_pages_per_slot(mm_engine_pages(w.engine));
  assert_false(mm_engine_fork(w.engine, 2, (uint32_t[]){4, 3}, 2, &err));
  assert_non_null(strstr(err.text, "group of slot 3: found 1, expected that of the slot to be forked, 0"));
  assert_int_equal(mm_engine_held(w.engine, 4), 0);
  err = (mm_err){0};
  assert_false(mm_engine_resume(w.engine, 1, page, NULL, 65, NULL, &err));
  assert_non_null(strstr(err.text, "expected that of the slot, 1"));
  assert_true(mm_engine_resume(w.engine, 4, page, NULL, 65, NULL, &err));
  mm_ops one = mm_ops_cpu;
  one.name = "one", one.ranks.gather = NULL;
  const uint32_t tap = 0;
  const mm_engine_config bad[] = {{.ops = &one}, {.ops = &mm_ops_cpu, .tap = &tap, .taps = 1}};
  static const char *const says[] = {"found --attn-tp 2 of --tp 4; device one", "reading hidden states needs"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    mm_engine_config c = bad[i];
    c.limits = (mm_limits){.max_tokens = 1, .slots = 1, .max_positions = 9}, c.options.threads = 1;
    err = (mm_err){0};
    assert_null(mm_engine_open(&w.shards->s, &c, &err));
    assert_string_equal(err.code, "E_PARALLEL");
    if (!strstr(err.text, says[i])) fail_msg("%s", err.text);
  }
  close_group(&w);
}

/* A backend that gives each slot its own pages neither takes a limit nor shares. */
TEST(test_own_pages) {
  mm_ops ops = mm_ops_cpu;
  ops.cache.pages = false;
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 1);
  mm_engine_config c = {.ops = &ops, .limits = {.max_tokens = 1, .slots = 2, .max_positions = 70, .pages = 4}, .options.threads = 1};
  mm_err err = {0};
  assert_null(mm_engine_open(&shards->s, &c, &err));
  assert_string_equal(err.code, "E_DEVICE");
  err = (mm_err){0};
  c.limits.pages = 0;
  mm_engine *e = mm_engine_open(&shards->s, &c, &err);
  assert_non_null(e);
  assert_null(mm_engine_pages(e));
  for (uint32_t t = 0; t < 70; t++) { /* identity tables: over the border, in pages of each slot's own */
    float logits[100];
    const mm_span span[] = {{0, 0, 1, t}};
    const int32_t id = token(0, t);
    assert_true(mm_engine_step(e, &(mm_batch){1, &id, 1, span, 1, (uint32_t[]){0}, NULL, NULL}, logits, &err));
  }
  assert_false(mm_engine_fork(e, 0, (uint32_t[]){1}, 1, &err));
  assert_int_equal(err.status, MM_UNSUPPORTED);
  assert_string_equal(err.code, "E_DEVICE");
  mm_engine_close(e);
  ref_uncut(shards);
  ref_free(&ref);
}

/* Short of pages a step is refused before it begins; the slots go on as if it had not been asked for. */
static void out_of_pages(fixture *w) {
  mm_err err = {0};
  feed_ok(w, 0, 0, 0, 130); /* three pages of five */
  feed_ok(w, 1, 1, 0, 64);
  const uint32_t both[] = {0, 1};
  int32_t id[2 * LENGTH] = {0};
  float logits[8];
  const mm_span span[] = {{0, 0, 1, 130}, {1, 1, 65, 64}};
  assert_false(mm_engine_step(w->engine, &(mm_batch){66, id, 2, span, 0, both, NULL, NULL}, logits, &err));
  assert_int_equal(err.status, MM_LIMIT);
  assert_string_equal(err.code, "E_PAGES");
  assert_int_equal(mm_engine_held(w->engine, 0), 130);
  assert_int_equal(mm_engine_held(w->engine, 1), 64);
  assert_int_equal(mm_pages_free(mm_engine_pages(w->engine)), 1);
  feed_ok(w, 0, 0, 130, 1);
  feed_ok(w, 1, 1, 64, 64);
  same(w, 0, 130, 131);
  same(w, 1, 64, 128);
  mm_engine_drop(w->engine, 0);
  feed_ok(w, 1, 1, 128, LENGTH - 128);
  same(w, 1, 128, LENGTH);
  free_again(w);
}

TEST(test_out_of_pages) { each_fixture(out_of_pages, 5); }

/* ---- memory ---- */

static uint64_t resident(void) {
  unsigned long long size = 0, pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  assert_non_null(f);
  assert_int_equal(fscanf(f, "%llu %llu", &size, &pages), 2);
  fclose(f);
  return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* 64 slots of 196,608 positions take what their tokens take: as many bytes reserved would be some hundreds of GB. */
TEST(test_memory) {
  enum { MANY = 64, POSITIONS = 196608, TOKENS = 70 };
  mm_model m = ref_dims(MM_FAMILY_M2, false);
  m.max_positions = POSITIONS, m.head_dim = 64;
  ref_model ref = ref_build(m);
  ref_shards *shards = ref_cut(&ref, 1);
  mm_engine_config c = {
      .ops = &mm_ops_cpu, .limits = {.max_tokens = TOKENS, .slots = MANY, .max_positions = POSITIONS}, .options.threads = 1};
  mm_err err = {0};
  const uint64_t before = resident();
  mm_engine *e = mm_engine_open(&shards->s, &c, &err);
  if (!e) fail_msg("%s", err.text);
  const uint64_t opened = resident();
  int32_t id[TOKENS];
  for (uint32_t t = 0; t < TOKENS; t++) id[t] = token(0, t);
  for (int32_t s = 0; s < MANY; s++)
    assert_true(mm_engine_step(e, &(mm_batch){TOKENS, id, 1, &(mm_span){s, 0, TOKENS, 0}, 0, NULL, NULL, NULL}, NULL, &err));
  const uint64_t fed = resident(), page = (uint64_t)m.layers * 2 * m.kv_heads * MM_PAGE * m.head_dim * sizeof(float);
  const uint64_t reserved = mm_pages_count(mm_engine_pages(e)) * page, used = 2 * MANY * page;
  print_message("%u slots of %u positions: %.1f GB of cells, opened in %.2f MB, %.2f MB after %u tokens each, whose pages are %.2f MB\n",
                MANY, POSITIONS, (double)reserved * 1e-9, (double)(opened - before) * 1e-6, (double)(fed - before) * 1e-6, TOKENS,
                (double)used * 1e-6);
  if (fed - before > used + (8 << 20)) fail_msg("%llu bytes resident", (unsigned long long)(fed - before));
  mm_engine_close(e);
  ref_uncut(shards);
  ref_free(&ref);
}

/* Rows are batch_invariant on a device where they always are, or where they are on_request to be; another one is refused. */
TEST(test_batch_invariant) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 1);
  for (uint32_t i = 0; i < 8; i++) {
    const bool always = i & 1, on_request = i & 2, batch_invariant = i & 4;
    mm_ops ops = mm_ops_cpu;
    ops.batch_invariant = always, ops.batch_invariant_on_request = on_request;
    mm_err err = {0};
    mm_engine *e = mm_engine_open(&shards->s,
                                  &(mm_engine_config){.ops = &ops,
                                                      .limits = {.max_tokens = 8, .slots = 1, .max_positions = 64},
                                                      .options.threads = 1,
                                                      .options.batch_invariant = batch_invariant},
                                  &err);
    assert_int_equal(e != NULL, always || on_request || !batch_invariant);
    if (e) assert_int_equal(mm_engine_batch_invariant(e), always || (on_request && batch_invariant));
    if (!e) assert_string_equal(err.code, "E_DEVICE");
    mm_engine_close(e);
  }
  ref_uncut(shards);
  ref_free(&ref);
}

int main(void) { return run_unit_tests(NULL, NULL); }
