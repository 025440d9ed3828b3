/* Pages of the prefix cache in host memory, through the scheduler: random requests get what they get alone while pages leave and come back,
 * on a device whose copies end late, or fail; and what comes back is counted. */
#include "tests/unit/runtime/random_draft.h"
#include "tests/unit/runtime/random_requests.h"

/* A device whose moves are made when `moved` is called, some of them: by then pages that were given away too early hold something else. */
enum { CALLS = 4096, RANKS = 4 };
static struct {
  struct late {
    uint64_t number;
    uint32_t count;
    mm_page_move *move;
  } call[RANKS][CALLS];
  uint32_t first[RANKS], calls[RANKS];
  uint32_t fail_every; /* about so many calls go well between two that fail; 0: all go well */
  bool fail_fetches;   /* every other call that copies to the device fails, and no other */
  uint32_t state[RANKS];
} late;

static uint32_t late_below(uint32_t rank, uint32_t n) { return (late.state[rank] = late.state[rank] * 1664525 + 1013904223) / 65536 % n; }

static uint32_t late_rank(const mm_backend *b) {
  const uint32_t rank = b->c.place.rank;
  assert_true(rank < RANKS);
  return rank;
}

static bool late_fails(uint32_t rank, mm_err *err) {
  if (!late.fail_every || late_below(rank, late.fail_every)) return true;
  return mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL), "a copy that fails");
}

/* Some copy out of the page has not been made. */
static bool late_leaves(uint32_t rank, uint32_t page) {
  for (uint32_t i = late.first[rank]; i < late.calls[rank]; i++)
    for (uint32_t k = 0; k < late.call[rank][i].count; k++)
      if (late.call[rank][i].move[k].page == page && !late.call[rank][i].move[k].in) return true;
  return false;
}

static bool late_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err) {
  const uint32_t rank = late_rank(b), calls = late.calls[rank];
  bool well = late_fails(rank, err);
  for (uint32_t i = 0; i < count && late.fail_fetches && well; i++)
    if (move[i].in) well = late_below(rank, 2) || mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL), "a fetch that fails"), i = count;
  assert_true(calls < CALLS);
  struct late *c = &late.call[rank][calls];
  *c = (struct late){number, well ? count : late_below(rank, count), malloc(count * sizeof *move)};
  memcpy(c->move, move, count * sizeof *move);
  late.calls[rank]++;
  /* Nobody reads a page before its copy has ended, nor, of another group, a place. */
  const uint64_t place = mm_cpu_page_bytes(b);
  for (uint32_t i = 0; serving_attn_tp && i < count; i++)
    if (!move[i].in) memset(b->mapped.pool + move[i].place * place, 0xff, place);
  for (uint32_t i = 0; i < count; i++)
    for (uint32_t l = 0; move[i].in && l < b->c.model->layers; l++) {
      const size_t bytes = (size_t)b->kv_heads * MM_PAGE * b->d * b->kv_size;
      if (b->cache[l].k && !late_leaves(rank, move[i].page)) memset(b->cache[l].k + move[i].page * bytes, 0xff, bytes);
    }
  return well;
}

static bool late_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err) {
  const uint32_t rank = late_rank(b);
  if (!late_fails(rank, err)) return false;
  while (late.first[rank] < late.calls[rank] && (wait || late_below(rank, 3))) {
    struct late *c = &late.call[rank][late.first[rank]++];
    assert_true(mm_cpu_move(b, c->number, c->move, c->count, err));
    free(c->move);
  }
  *oldest = late.first[rank] < late.calls[rank] ? late.call[rank][late.first[rank]].number : UINT64_MAX;
  if (*oldest == UINT64_MAX) late.first[rank] = late.calls[rank] = 0;
  return true;
}

static uint64_t fetched; /* requests, of all schedulers that have ended */

static mm_model any_kind(uint32_t k) { return k < 2 ? kind(k) : ref_dims(MM_FAMILY_M3, false); }

/* A scheduler with so many places in host memory and blocks on disk. */
static void open_offload(serving *w, mm_model m, uint32_t tp, const mm_ops *ops, mm_limits l, uint32_t places, uint32_t blocks,
                         mm_scheduler_config c) {
  mm_err err = {0};
  serving_open_ops(w, m, tp, ops, l, c); /* the size of a page is known when there is an engine */
  mm_scheduler_close(w->scheduler, true);
  c.disk_dir = blocks ? getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp" : NULL;
  c.disk_bytes = blocks * mm_engine_page_bytes(w->engine);
  c.offload_bytes = places * mm_engine_page_bytes(w->engine) + mm_engine_page_bytes(w->engine) - 1;
  if (!(w->scheduler = mm_scheduler_open(w->engine, &c, &err))) fail_msg("%s", err.text);
}

static void run_random(uint32_t k, uint32_t tp, mm_limits l, uint32_t places, uint32_t blocks, mm_scheduler_config c,
                       const mm_dflash *draft) {
  serving w;
  mm_scheduler_stats t;
  mm_ops ops = mm_ops_cpu;
  ops.begin = poisoning_begin, ops.cache.move = late_move, ops.cache.moved = late_moved;
  serving_draft = draft;
  open_offload(&w, any_kind(k), tp, &ops, l, places, blocks, c);
  serving_draft = NULL;
  random_requests(&w, UINT32_MAX, 1);
  serving_settled(&w, &t);
  print_message("%u groups: %llu requests fetched %llu pages of %llu that left, %u of %u places used; %llu written, %llu read\n",
                mm_engine_groups(w.engine), (unsigned long long)t.fetched, (unsigned long long)t.pages_in, (unsigned long long)t.pages_out,
                t.places_used, t.places, (unsigned long long)t.pages_written, (unsigned long long)t.pages_read);
  assert_int_equal(t.places, places);
  assert_true(t.places_used <= t.places && t.pages_in <= t.pages_out && t.blocks == blocks && !t.disk_failed);
  assert_true(t.fetched || late.fail_every || k == 0 || places < 20 || serving_attn_tp || SANITIZED);
  fetched += t.fetched;
  serving_close(&w, true);
}

TEST(test_random) {
  const mm_scheduler_config c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 17, .drafts = MM_DRAFTS};
  mm_scheduler_config narrow = c;
  narrow.step_tokens = 3;
  for (uint32_t k = 0; k < 4; k++) { /* the last is M3 with index keys in e4m3 */
    const bool all = getenv("ROUNDS");
    late.fail_every = 0, serving_index_fp8 = k == 3;
    if (all || k != 1) run_random(k, 2, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 9}, 40, 0, c, NULL);
    if (all || k == 1) run_random(k, 1, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 16}, 5, 40, c, NULL);
    if (all) run_random(k, 1, (mm_limits){.max_tokens = 64, .slots = 2, .pages = 8}, 1, 3, narrow, NULL);
    late.fail_every = 12;
    if (all || k == 1) run_random(k, 2, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 12}, 30, 9, c, NULL);
    late.fail_every = 0, late.fail_fetches = true;
    if (all || k == 1) run_random(k, 1, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 9}, 40, 0, c, NULL);
    late.fail_fetches = false;
  }
  serving_index_fp8 = false;
}

/* The same with groups of attention: pages that left one come back to any. */
TEST(test_groups) {
  const mm_scheduler_config c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 17, .drafts = MM_DRAFTS};
  fetched = 0;
  for (uint32_t k = 0; k < 3; k++) {
    late.fail_every = 0;
    for (uint32_t tp = 2; tp <= RANKS; tp += 2) {
      serving_attn_tp = tp / 2;
      run_random(k, tp, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 18}, 40, 0, c, NULL);
    }
    serving_attn_tp = 1;
    run_random(k, 2, (mm_limits){.max_tokens = 64, .slots = 5, .pages = 18}, 7, 40, c, NULL);
    if (k == 1) run_random(k, RANKS, (mm_limits){.max_tokens = 64, .slots = 9, .pages = 36}, 60, 0, c, NULL);
    late.fail_every = 12;
    run_random(k, 2, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 24}, 30, 9, c, NULL);
  }
  serving_attn_tp = 0, late.fail_every = 0;
  assert_true(fetched > 0);
}

/* The same with a learned draft, whose cells move with the pages. */
TEST(test_drafts) {
  mm_err err = {0};
  const mm_model m = kind(1);
  random_draft random = draft_build(&m);
  mm_dflash draft;
  if (!mm_dflash_open(&draft, random.dir, &m, &err)) fail_msg("%s", err.text);
  const mm_scheduler_config c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .drafts = MM_DRAFTS};
  late.fail_every = 0;
  run_random(1, 1, (mm_limits){.max_tokens = 64, .slots = 3, .pages = 8}, 6, 40, c, &draft);
  mm_dflash_close(&draft);
  draft_free(&random);
}

/* ---- order ---- */

static uint32_t loaded[8], loads; /* pages that each call of move brings to the device */
static bool noting_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < count; i++) n += move[i].in;
  if (n && loads < 8) loaded[loads++] = n;
  return mm_cpu_move(b, number, move, count, err);
}

static client of_text(serving *w, uint32_t text, uint32_t tokens, int priority) {
  client c = {.r = {.max_tokens = 3, .priority = priority}};
  fill(&c, text, tokens);
  client_ready(w, &c);
  return c;
}

/* Runs a prompt and forgets the client. */
static void run_alone(serving *w, uint32_t text, uint32_t tokens) {
  static client c;
  c = of_text(w, text, tokens, 0);
  client_ready(w, &c);
  client_submit(w, &c);
  client_check(&c);
}

/* Of requests that wait together, pages of the highest priority are fetched first, though it came last. */
TEST(test_order) {
  serving w;
  mm_ops ops = mm_ops_cpu;
  ops.begin = poisoning_begin, ops.cache.move = noting_move;
  open_offload(&w, kind(1), 1, &ops, (mm_limits){.max_tokens = 64, .slots = 4, .pages = 8}, 40, 0,
               (mm_scheduler_config){.step_tokens = 40, .queue_max = 9, .prefix_cache = true});
  run_alone(&w, 0, 60), run_alone(&w, 2, 200), run_alone(&w, 4, 100); /* one page, four and two; all leave the device */
  run_alone(&w, 6, 390), run_alone(&w, 8, 390);
  loads = 0;
  static client c[4];
  c[0] = of_text(&w, 10, 9, 0), c[1] = of_text(&w, 0, 60, -1), c[2] = of_text(&w, 4, 100, 0), c[3] = of_text(&w, 2, 200, 7);
  for (uint32_t i = 0; i < 4; i++) client_ready(&w, &c[i]); /* where it lies now */
  clients_submit_held(&w, c, 4);
  atomic_store(&serving_closed, false);
  for (uint32_t i = 0; i < 4; i++) client_check(&c[i]);
  assert_int_equal(loads, 3);
  assert_true(loaded[0] == 4 && loaded[1] == 2 && loaded[2] == 1);
  serving_close(&w, true);
}

int main(void) { return run_unit_tests(NULL, NULL); }
