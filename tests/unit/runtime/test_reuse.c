/* Requests that begin alike, through the scheduler: how much of a prompt the prefix cache has, at page borders and next to them, at
 * boundaries where states were kept, across turns, tenants and requests of one moment; what comes of a hit is what comes of a miss, to the
 * bit of its logprobs. */
#include "runtime/schedule/scheduler_inside.h"
#include "tests/unit/runtime/serving.h"

static void fill(client *c, uint32_t text, uint32_t from, uint32_t to) {
  for (uint32_t t = from; t < to; t++) c->prompt[t] = (int32_t)((t * t * 3 + t * 7 + text * 11) % 50);
  c->r.prompt_count = to;
}

static mm_model kind(uint32_t i) { return ref_dims(i == 0 ? MM_FAMILY_M1 : i == 1 ? MM_FAMILY_M2 : MM_FAMILY_M3, !i); }

static void open_cached(serving *w, uint32_t k, uint32_t pages, uint64_t cache_bytes) {
  const mm_scheduler_config c = {
      .step_tokens = 48, .queue_max = 100, .prefix_cache = true, .batch_invariant = true, .cache_bytes = cache_bytes};
  serving_open(w, kind(k), 1 + k % 2, (mm_limits){.max_tokens = 48, .slots = 4, .pages = pages}, c);
}

/* A request of the first `count` tokens of a text; how many the cache had. */
static client start(uint32_t text, uint32_t count) {
  client c = {.r = {.max_tokens = 4, .sampling = {.temperature = 1, .seed = 7, .top_logprobs = 2}}};
  fill(&c, text, 0, count);
  return c;
}

static uint32_t run(serving *w, client *c) {
  client_ready(w, c);
  client_submit(w, c);
  client_check(c);
  return c->cached;
}

static uint32_t run_text(serving *w, uint32_t text, uint32_t count) {
  client c = start(text, count);
  return run(w, &c);
}

/* The same prompt again, and longer and shorter ones. */
TEST(test_borders) {
  static const uint32_t count[] = {2, MM_PAGE - 1, MM_PAGE, MM_PAGE + 1, 2 * MM_PAGE, 2 * MM_PAGE + 1, 150};
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    for (uint32_t i = 0; i < sizeof count / sizeof *count; i++) {
      const uint32_t n = count[i];
      assert_int_equal(run_text(&w, i, n), 0);
      assert_int_equal(run_text(&w, i, n), n - 1);
      assert_int_equal(run_text(&w, i, n + 90), k ? n : n - 1); /* without lightning layers the prompt's last token too */
      assert_int_equal(run_text(&w, i, n + 90), n + 89);
      assert_int_equal(run_text(&w, i, n + 45), k ? n + 44 : n - 1); /* with them only where states are */
    }
    serving_close(&w, true);
  }
}

/* States are kept where the caller says, and nowhere else of the prompt; and where the reply ended. */
TEST(test_boundaries) {
  serving w;
  open_cached(&w, 0, 0, 1 << 20);
  client c = start(0, 200);
  c.r.boundary_count = 3, c.boundary[0] = 5, c.boundary[1] = 64, c.boundary[2] = 130;
  assert_int_equal(run(&w, &c), 0);
  assert_int_equal(run_text(&w, 0, 5), 0);
  assert_int_equal(run_text(&w, 0, 6), 5);
  assert_int_equal(run_text(&w, 0, 130), 64);
  assert_int_equal(run_text(&w, 0, 131), 130);
  client again = start(0, 200);
  assert_int_equal(run(&w, &again), 130);
  serving_close(&w, true);
}

/* The next turn's prompt is the last one's, its reply, and more. */
TEST(test_turns) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    client c = start(3, 60);
    uint32_t before = 0;
    for (uint32_t turn = 0; turn < 6; turn++) {
      assert_int_equal(run(&w, &c), before);
      const uint32_t n = c.r.prompt_count;
      client next = start(3, n);
      memcpy(next.prompt, c.prompt, sizeof c.prompt);
      memcpy(next.prompt + n, c.got, c.got_count * sizeof *c.got);
      fill(&next, turn, n + c.got_count, n + c.got_count + 30);
      before = n + c.got_count - 1; /* the reply's last token was never given to a slot */
      c = next;
    }
    serving_close(&w, true);
  }
}

TEST(test_salts) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    for (uint32_t i = 0; i < 2; i++)
      for (uint64_t salt = 0; salt < 3; salt++) {
        client c = start(0, 100);
        c.r.salt = salt << 40;
        assert_int_equal(run(&w, &c), i ? 99 : 0);
      }
    serving_close(&w, true);
  }
}

/* Several replies to one prompt, asked for at once: it is read once. Unlike prompts of that moment do not wait for it. */
TEST(test_twins) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    client c[6];
    for (uint32_t i = 0; i < 6; i++) {
      c[i] = start(i == 3, 300);
      c[i].r.sampling.seed = i;
      client_ready(&w, &c[i]);
    }
    for (uint32_t i = 0; i < 6; i++) client_submit(&w, &c[i]);
    uint32_t cached = 0;
    for (uint32_t i = 0; i < 6; i++) {
      client_check(&c[i]);
      cached += c[i].cached;
    }
    assert_int_equal(cached, 4 * 299);
    serving_close(&w, true);
  }
}

static mm_scheduler *looking;
static uint64_t most_looked;

static bool looking_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (looking) most_looked = mm_max(most_looked, looking->groups.looked);
  return poisoning_begin(b, batch, err);
}

/* A crowd that waits for one prompt is looked at in parts, a part before each step, and all find what it has. */
TEST(test_crowd) {
  enum { CROWD = 60 };
  static client c[CROWD];
  static mm_ops ops;
  ops = mm_ops_cpu;
  ops.begin = looking_begin;
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    serving_open_ops(&w, kind(k), 1, &ops, (mm_limits){.max_tokens = 16, .slots = 4},
                     (mm_scheduler_config){.step_tokens = 16, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 20});
    most_looked = 0, looking = w.scheduler;
    looking->groups.look_most = 5000;
    for (uint32_t i = 0; i < CROWD; i++) {
      c[i] = start(0, 300);
      c[i].r.max_tokens = 1;
      client_ready(&w, &c[i]);
    }
    clients_submit_held(&w, c, CROWD);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < CROWD; i++) {
      client_check(&c[i]);
      assert_int_equal(c[i].cached, i ? 299 : 0);
    }
    if (most_looked <= 2500 || most_looked > 6500) fail_msg("%llu tokens", (unsigned long long)most_looked);
    looking = NULL;
    serving_close(&w, true);
  }
}

/* The same of a prompt of less than a page: each of them comes while another step runs. */
TEST(test_short_twins) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    client c[4];
    for (uint32_t i = 0; i < 4; i++) c[i] = start(!i, 40), c[i].r.sampling.seed = i, client_ready(&w, &c[i]);
    clients_submit_held(&w, c, 4);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < 4; i++) client_check(&c[i]);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(c[i].cached, i > 1 ? 39 : 0);
    serving_close(&w, true);
  }
}

/* With few pages, or room for few states, what was used longest ago goes. */
TEST(test_capacity) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 7, 1 << 20);
    for (uint32_t text = 0; text < 8; text++) assert_int_equal(run_text(&w, text, 120), 0);
    assert_int_equal(run_text(&w, 7, 120), 119);
    assert_int_equal(run_text(&w, 0, 120), 0);
    assert_int_equal(run_text(&w, 2, POSITIONS - 4), 0); /* all seven */
    serving_close(&w, true);
  }
}

static atomic_bool closed_once;

/* Closes the gate at the fifth token. */
static const uint32_t *close_at_five(void *user) {
  const client *c = user; /* the scheduler's thread alone writes got_count */
  if (c->got_count == 5 && !atomic_exchange(&closed_once, true)) atomic_store(&serving_closed, true);
  return NULL;
}

/* A request that does not fit next to another, whatever the cache gives up, costs the cache nothing. */
TEST(test_over_capacity) {
  serving w;
  mm_scheduler_stats s;
  open_cached(&w, 1, 11, 1 << 20);
  assert_int_equal(run_text(&w, 0, 290), 0); /* five pages */
  client c[] = {start(1, 130), start(2, 390)};
  c[0].r.max_tokens = 40;
  for (uint32_t i = 0; i < 2; i++) client_ready(&w, &c[i]);
  c[0].r.allow = close_at_five;
  atomic_store(&closed_once, false);
  clients_submit_held(&w, c, 2);
  atomic_store(&serving_closed, false);
  while (!atomic_load(&closed_once)) serving_pause();
  atomic_store(&serving_waits, false);
  while (!atomic_load(&serving_waits)) serving_pause();
  mm_scheduler_stats_read(w.scheduler, &s);
  assert_true(s.running == 1 && s.waiting == 1 && s.pages_cached >= 5 + 3);
  atomic_store(&serving_closed, false);
  for (uint32_t i = 0; i < 2; i++) client_check(&c[i]);
  serving_close(&w, true);
}

static atomic_uint rows_read;
static bool counting_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  atomic_fetch_add(&rows_read, batch->tokens);
  return poisoning_begin(b, batch, err);
}

/* As open_cached for one rank; rows_read counts from 0. */
static void open_counted(serving *w, uint32_t k, uint32_t slots, uint32_t pages) {
  static mm_ops ops;
  ops = mm_ops_cpu;
  ops.begin = counting_begin;
  atomic_store(&rows_read, 0);
  serving_open_ops(w, kind(k), 1, &ops, (mm_limits){.max_tokens = 48, .slots = slots, .pages = pages},
                   (mm_scheduler_config){.step_tokens = 48, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 20});
}

/* Two requests come when the first of n has five tokens, and take all places and pages of these. */
static void give_way(client *c, uint32_t n) {
  serving *w = c[0].serving;
  client large[2];
  c[0].r.allow = close_at_five;
  for (uint32_t i = 0; i < 2; i++) {
    large[i] = start(1 + i, 390);
    large[i].r.priority = 1;
    client_ready(w, &large[i]);
  }
  atomic_store(&closed_once, false);
  for (uint32_t i = 0; i < n; i++) client_submit(w, &c[i]);
  while (!atomic_load(&closed_once)) serving_pause();
  for (uint32_t i = 0; i < 2; i++) client_submit(w, &large[i]);
  atomic_store(&serving_closed, false);
  for (uint32_t i = 0; i < n; i++) client_check(&c[i]);
  for (uint32_t i = 0; i < 2; i++) client_check(&large[i]);
  for (uint32_t i = 0; i < n; i++) assert_true(c[i].order > 2);
}

/* Replies to one prompt that gave way together: when they go on, one of them reads it again. */
TEST(test_twins_go_on) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    mm_scheduler_stats s;
    open_counted(&w, k, 2, 16);
    client c[2] = {start(0, 370), start(0, 370)};
    for (uint32_t i = 0; i < 2; i++) c[i].r.max_tokens = 20, c[i].r.sampling.seed = i, client_ready(&w, &c[i]);
    give_way(c, 2);
    serving_settled(&w, &s);
    print_message("%u rows, %llu times one gave way\n", rows_read, (unsigned long long)s.preempted);
    assert_int_equal(s.preempted, 2);
    assert_in_range(rows_read, 370 + 2 * 390 + 200, 2 * 370 + 2 * 390 + 100);
    serving_close(&w, true);
  }
}

static uint32_t scores;
static void count_score(void *user, const mm_logprob *logprobs) {
  (void)user, (void)logprobs;
  scores++;
}

/* A prompt whose tokens' logprobs are wanted is read without the cache, but once. */
TEST(test_scores_go_on) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_counted(&w, k, 1, 21);
    client c = start(0, 370);
    c.r.max_tokens = 20;
    client_ready(&w, &c);
    c.r.score = count_score;
    scores = 0;
    give_way(&c, 1);
    assert_int_equal(c.cached, 0);
    assert_int_equal(scores, 369);
    assert_in_range(rows_read, 370 + 2 * 390, 370 + 2 * 390 + 40);
    serving_close(&w, true);
  }
}

/* A request that shares its beginning with a long prompt that is being read waits for that beginning alone. */
TEST(test_shared_beginning) {
  for (uint32_t k = 1; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    client c[3] = {start(0, 390), start(0, 100), start(0, 200)};
    fill(&c[1], 5, 100, 130);
    fill(&c[2], 6, 200, 210);
    for (uint32_t i = 0; i < 3; i++) client_ready(&w, &c[i]);
    c[1].watched = c[2].watched = &c[0];
    atomic_store(&serving_closed, true);
    for (uint32_t i = 0; i < 3; i++) client_submit(&w, &c[i]);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
    assert_int_equal(c[1].cached, 100);
    assert_int_equal(c[2].cached, 200);
    assert_true(c[1].watched_got == 0 && c[2].watched_got == 0);
    serving_close(&w, true);
  }
}

/* A reader of low priority that one of high priority waits for is not held up by prompts of priorities between theirs. */
TEST(test_awaited_priority) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    open_cached(&w, k, 0, 1 << 20);
    client c[4] = {start(0, 390), start(1, 390), start(2, 390), start(0, 100)};
    c[1].r.priority = c[2].r.priority = 5, c[3].r.priority = 9;
    c[0].r.boundary_count = 1, c[0].boundary[0] = 99;
    for (uint32_t i = 0; i < 4; i++) c[i].r.max_tokens = 1, client_ready(&w, &c[i]);
    clients_submit_held(&w, c, 4);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < 4; i++) client_check(&c[i]);
    assert_int_equal(c[3].cached, 99);
    assert_int_equal(c[3].order, 1);
    serving_close(&w, true);
  }
}

static bool (*token_as_before)(void *, int32_t, const mm_logprob *, const mm_progress *);
static uint32_t scores_seen;
static bool see_scores(void *user, int32_t id, const mm_logprob *logprob, const mm_progress *p) {
  if (p->reply_tokens == 1) scores_seen = scores;
  return token_as_before(user, id, logprob, p);
}

/* A prompt that is scored has few rows of a step: the same prompt of another choice waits for it, that of another request does not, nor one
 * that only begins like it. */
TEST(test_scored_beginning) {
  for (uint32_t k = 0; k < 9; k++) {
    const bool waits = k % 3 == 0;
    serving w;
    open_cached(&w, k / 3, 0, 1 << 20);
    client c[2] = {start(0, 390), start(0, 390)};
    if (k % 3 == 1) fill(&c[1], 5, 120, 130);
    if (k % 3 < 2) c[0].r.together = c[1].r.together = c;
    for (uint32_t i = 0; i < 2; i++) client_ready(&w, &c[i]);
    c[0].r.score = count_score;
    token_as_before = c[1].r.token, c[1].r.token = see_scores;
    scores = 0;
    atomic_store(&serving_closed, true);
    for (uint32_t i = 0; i < 2; i++) client_submit(&w, &c[i]);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < 2; i++) client_check(&c[i]);
    print_message("%u of 389 logprobs before the other's first token\n", scores_seen);
    assert_true(waits ? scores_seen == 389 : scores_seen < (k % 3 == 1 ? 60 : 200));
    assert_int_equal(c[1].cached, waits ? 389 : 0);
    serving_close(&w, true);
  }
}

static uint32_t read_of_first, read_when_second_began;
static void see_first(void *user, uint32_t tokens, uint32_t cached) {
  (void)user, (void)cached;
  read_of_first = tokens;
}
static void see_second(void *user, uint32_t tokens, uint32_t cached) {
  (void)user, (void)cached;
  if (!tokens) read_when_second_began = read_of_first;
}

/* A request that begins like one which another group reads, and has fewer tokens to wait for in its own, does not wait for that one. */
TEST(test_reader_in_another_group) {
  const mm_scheduler_config config = {
      .step_tokens = 48, .queue_max = 100, .prefix_cache = true, .batch_invariant = true, .cache_bytes = 1 << 20};
  for (uint32_t k = 0; k < 2; k++) {
    serving w;
    mm_scheduler_stats stats;
    serving_attn_tp = 1;
    serving_open(&w, kind(k), 2, (mm_limits){.max_tokens = 48, .slots = 6}, config);
    client c[3] = {start(0, 390), start(1, 20), start(0, 150)};
    fill(&c[2], 5, 150, 300);
    c[1].r.priority = 1, c[1].r.max_tokens = 60;
    read_when_second_began = UINT32_MAX;
    for (uint32_t i = 0; i < 3; i++) client_ready(&w, &c[i]);
    c[0].r.prefill = see_first, c[2].r.prefill = see_second;
    clients_submit_held(&w, c, 3);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
    print_message("%u of the other's tokens were read when it began, %u cached\n", read_when_second_began, c[2].cached);
    assert_int_equal(c[2].cached, 0);
    assert_in_range(read_when_second_began, 0, 48);
    serving_settled(&w, &stats);
    const uint64_t state = mm_engine_state_bytes(w.engine); /* before the last token of each prompt and behind each reply, nowhere else */
    assert_int_equal(stats.cache_bytes, 6 * state);
    serving_close(&w, true);
    serving_attn_tp = 0;
  }
}

/* The beginning of a long prompt that a short one waits for is read as if it were short, though others are. */
TEST(test_awaited_beginning) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    const mm_scheduler_config config = {
        .step_tokens = 48, .queue_max = 100, .prefix_cache = true, .batch_invariant = true, .cache_bytes = 1 << 20};
    serving_open(&w, kind(k), 1, (mm_limits){.max_tokens = 48, .slots = 8}, config);
    client c[8] = {start(0, 390), start(1, 390)};
    for (uint32_t i = 2; i < 7; i++) c[i] = start(i, 200);
    c[7] = start(1, 100);
    for (uint32_t i = 0; i < 8; i++) c[i].r.max_tokens = 1, client_ready(&w, &c[i]);
    clients_submit_held(&w, c, 8);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < 8; i++) client_check(&c[i]);
    assert_int_equal(c[7].cached, 99);
    assert_int_equal(c[7].order, 1);
    serving_close(&w, true);
  }
}

/* An engine that has lost what its slots held (mm_engine_step): nothing of it is kept, since others may have those pages by now. */
static bool lose_at_twelve(void *user, int32_t id, const mm_logprob *logprob, const mm_progress *p) {
  const client *c = user;
  mm_engine *e = c->serving->engine;
  for (uint32_t i = 0; p->reply_tokens == 12 && i < mm_engine_limits(e)->slots; i++) mm_engine_drop(e, i);
  return token_as_before(user, id, logprob, p);
}
TEST(test_lost) {
  for (uint32_t k = 0; k < 3; k++) {
    serving w;
    mm_scheduler_stats s;
    open_cached(&w, k, 0, 1 << 20);
    client c = start(1, 120); /* its second page is full only with the reply */
    c.r.max_tokens = 40, c.leave_at = 12;
    client_ready(&w, &c);
    token_as_before = c.r.token, c.r.token = lose_at_twelve;
    client_submit(&w, &c);
    client_check(&c);
    serving_settled(&w, &s);
    const mm_pages *pages = mm_engine_pages(w.engine);
    assert_true(s.pages_cached + mm_pages_free(pages) <= mm_pages_count(pages));
    assert_int_equal(run_text(&w, 2, 100), 0);
    serving_close(&w, true);
  }
}

/* Room for some states; and for not a single one, which is refused. */
TEST(test_states) {
  serving w;
  mm_err err = {0};
  mm_scheduler_stats s;
  open_cached(&w, 0, 0, 20000);
  for (uint32_t text = 0; text < 9; text++) run_text(&w, text, 100);
  assert_int_equal(run_text(&w, 8, 100), 99);
  assert_int_equal(run_text(&w, 0, 100), 0);
  serving_settled(&w, &s);
  print_message("%llu bytes of states in %u pages\n", (unsigned long long)s.cache_bytes, s.pages_cached);
  assert_true(s.cache_bytes > 0 && s.cache_bytes <= 20000 && s.pages_cached > 0);
  assert_int_equal(s.cached_tokens, 99);
  assert_int_equal(s.prompt_tokens, 1100);
  const uint64_t one = mm_engine_state_bytes(w.engine);
  mm_scheduler_close(w.scheduler, true);
  for (uint32_t capacity = 0; capacity < 2; capacity++) {
    const mm_scheduler_config c = {.step_tokens = 1, .prefix_cache = true, .cache_bytes = one - 1 + capacity};
    w.scheduler = mm_scheduler_open(w.engine, &c, &err);
    assert_true(!w.scheduler == !capacity);
    if (!capacity) assert_string_equal(err.code, "E_LIMITS");
  }
  serving_close(&w, true);
}

int main(void) { return run_unit_tests(NULL, NULL); }
