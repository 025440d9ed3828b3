/* The scheduler: whatever else runs, each request gets the tokens that it gets alone. Ends of every kind, a full queue, priorities, want of
 * pages and of slots; random requests, cancelled and late ones among them, on few pages; and nothing is left behind. */
#include "runtime/schedule/scheduler_inside.h"
#include "tests/unit/runtime/random_requests.h"

static const mm_limits limits = {.max_tokens = 64, .slots = 4};
static const mm_scheduler_config config = {.step_tokens = 32, .queue_max = 100};

static void submit_held(serving *w, client *c, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) client_ready(w, &c[i]);
  clients_submit_held(w, c, n);
}

/* ---- ends ---- */

TEST(test_alone) {
  for (uint32_t k = 0; k < 2; k++) {
    serving w;
    serving_open(&w, kind(k), 1 + k, limits, config);
    static const uint32_t count[] = {1, 2, 31, 32, 33, MM_PAGE - 1, MM_PAGE, MM_PAGE + 1, 200};
    for (uint32_t i = 0; i < sizeof count / sizeof *count; i++) {
      client c = {.r = {.max_tokens = 1 + i * 5}};
      fill(&c, i, count[i]);
      client_ready(&w, &c);
      client_submit(&w, &c);
      client_check(&c);
      assert_int_equal(c.finish, MM_FINISH_LENGTH);
    }
    serving_close(&w, false);
  }
}

TEST(test_ends) {
  serving w;
  serving_open(&w, kind(1), 1, limits, config);
  client c[5] = {
      {.r.max_tokens = 0}, {.r.max_tokens = 20}, {.r.max_tokens = 20, .leave_at = 3}, {.r.max_tokens = 20}, {.r.max_tokens = 20}};
  for (uint32_t i = 0; i < 5; i++) fill(&c[i], 0, 40);
  client_ready(&w, &c[1]); /* the third token of the reply stops it, unless it came before */
  c[1].stop[0] = 49, c[1].stop[1] = c[1].want[2], c[1].r.stop_count = 2;
  c[3].r.deadline = 1e-9;
  c[4].r.deadline = 1e300;
  static const mm_finish finish[] = {MM_FINISH_LENGTH, MM_FINISH_STOP, MM_FINISH_STOP, MM_FINISH_DEADLINE, MM_FINISH_LENGTH};
  for (uint32_t i = 0; i < 5; i++) {
    client_ready(&w, &c[i]);
    client_submit(&w, &c[i]);
  }
  for (uint32_t i = 0; i < 5; i++) {
    client_check(&c[i]);
    assert_int_equal(c[i].finish, finish[i]);
  }
  assert_int_equal(c[0].got_count, 0);
  assert_int_equal(c[3].got_count, 0);
  mm_scheduler_cancel(w.scheduler, c[1].ticket); /* has ended */
  mm_scheduler_cancel(w.scheduler, 12345);       /* never was */
  serving_close(&w, false);
}

/* A prompt that is being read, a reply that is being written, one that waits. */
TEST(test_cancel) {
  serving w;
  serving_open(&w, kind(0), 1, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 1, .queue_max = 9});
  client c[3] = {{.r.max_tokens = 99}, {.r.max_tokens = 99}, {.r.max_tokens = 3}};
  fill(&c[0], 0, 4), fill(&c[1], 1, 300), fill(&c[2], 2, 5);
  submit_held(&w, c, 3);
  mm_scheduler_cancel(w.scheduler, c[1].ticket);
  atomic_store(&serving_closed, false);
  client_check(&c[1]);
  for (uint32_t got = 0; got < 2;) {
    pthread_mutex_lock(&w.lock);
    got = c[0].got_count;
    pthread_mutex_unlock(&w.lock);
  }
  mm_scheduler_cancel(w.scheduler, c[0].ticket);
  for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
  assert_int_equal(c[1].finish, MM_FINISH_CANCELLED);
  assert_int_equal(c[2].finish, MM_FINISH_LENGTH);
  serving_close(&w, false);
}

/* A client that leaves during its fifth step, and one whose steps take too long for its deadline. */
static struct {
  serving *w;
  client *c;
  uint32_t steps;
} leaving;

static bool leaving_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const struct timespec pause = {0, 2000000};
  if (leaving.c && leaving.c->r.deadline > 0) nanosleep(&pause, NULL);
  if (leaving.c && leaving.c->r.deadline == 0 && ++leaving.steps == 5) mm_scheduler_cancel(leaving.w->scheduler, leaving.c->ticket);
  return mm_ops_cpu.begin(b, batch, err);
}

/* In the middle of a prompt and of a reply: the place is free after the step under way. */
TEST(test_middle) {
  static mm_ops ops;
  ops = mm_ops_cpu;
  ops.begin = leaving_begin;
  serving w;
  mm_scheduler_stats s;
  serving_open_ops(&w, kind(1), 1, &ops, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 1, .queue_max = 9});
  for (uint32_t i = 0; i < 4; i++) {
    const bool reply = i % 2, late = i / 2;
    client c = {.r.max_tokens = 99};
    fill(&c, 0, reply ? 1 : 300);
    client_ready(&w, &c);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (late) c.r.deadline = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec + 0.05;
    leaving.w = &w, leaving.c = &c, leaving.steps = 0;
    client_submit(&w, &c);
    client_check(&c);
    serving_settled(&w, &s);
    leaving.c = NULL;
    assert_int_equal(c.finish, late ? MM_FINISH_DEADLINE : MM_FINISH_CANCELLED);
    if (late)
      assert_true(c.got_count < (reply ? 50 : 1));
    else {
      assert_int_equal(leaving.steps, 5);
      assert_int_equal(c.got_count, reply ? 5 : 0);
    }
  }
  serving_close(&w, true);
}

/* Opens the gate once the scheduler is being closed; until then it cannot be, so it lives. */
static void *open_when_closing(void *user) {
  mm_scheduler *s = user;
  for (bool closing = false; !closing;) {
    pthread_mutex_lock(&s->lock);
    closing = s->closing;
    pthread_mutex_unlock(&s->lock);
    serving_pause();
  }
  atomic_store(&serving_closed, false);
  return NULL;
}

TEST(test_drain) {
  for (uint32_t drain = 0; drain < 2; drain++) {
    serving w;
    serving_open(&w, kind(1), 1, limits, config);
    client c[9];
    for (uint32_t i = 0; i < 9; i++) {
      c[i] = (client){.r.max_tokens = 80};
      fill(&c[i], i, 100 + i);
    }
    submit_held(&w, c, 9);
    pthread_t opener;
    assert_int_equal(pthread_create(&opener, NULL, open_when_closing, w.scheduler), 0);
    serving_close(&w, drain);
    pthread_join(opener, NULL);
    for (uint32_t i = 0; i < 9; i++) {
      assert_true(c[i].done);
      client_verdict(&c[i]);
      assert_int_equal(c[i].finish, drain ? MM_FINISH_LENGTH : MM_FINISH_CANCELLED);
    }
  }
}

/* ---- refusals ---- */

static void refused(serving *w, const mm_request *r, mm_status status, const char *code) {
  mm_err err = {0};
  uint64_t ticket;
  assert_false(mm_scheduler_submit(w->scheduler, r, &ticket, &err));
  assert_int_equal(err.status, status);
  assert_string_equal(err.code, code);
}

TEST(test_refused) {
  serving w;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 8, .slots = 1, .pages = 3},
               (mm_scheduler_config){.step_tokens = 1, .queue_max = 2});
  client c[3];
  for (uint32_t i = 0; i < 3; i++) {
    c[i] = (client){.r.max_tokens = 50};
    fill(&c[i], i, 140);
    client_ready(&w, &c[i]);
  }
  mm_request bad[6];
  for (uint32_t i = 0; i < 6; i++) bad[i] = c[0].r;
  const int32_t ids[] = {3, 50, 4};
  bad[0].prompt_count = 0;
  bad[1].max_tokens = 3 * MM_PAGE - 139;
  bad[2].prompt = ids, bad[2].prompt_count = 3;
  bad[3].boundary = (const uint32_t[]){5, 5}, bad[3].boundary_count = 2;
  bad[4].boundary = (const uint32_t[]){141}, bad[4].boundary_count = 1;
  bad[5].sampling.top_p = 2;
  for (uint32_t i = 0; i < 6; i++) refused(&w, &bad[i], MM_USAGE, i == 5 ? "E_SAMPLING" : "E_BATCH");
  submit_held(&w, c, 3);
  refused(&w, &c[0].r, MM_LIMIT, "E_QUEUE");
  mm_scheduler_stats s;
  mm_scheduler_stats_read(w.scheduler, &s);
  assert_int_equal(s.refused, 1);
  assert_int_equal(s.requests, 3);
  assert_int_equal(s.waiting + s.running, 3);
  assert_int_equal(s.pages, 3);
  atomic_store(&serving_closed, false);
  for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
  serving_close(&w, true);

  mm_err err = {0};
  mm_scheduler_config none = {.step_tokens = 0}, many = {.step_tokens = 9}, drafts = {.step_tokens = 8, .drafts = MM_DRAFTS + 1};
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 1, .batch_invariant = true});
  assert_null(mm_scheduler_open(w.engine, &none, &err));
  assert_string_equal(err.code, "E_LIMITS");
  assert_null(mm_scheduler_open(w.engine, &many, &err));
  assert_null(mm_scheduler_open(w.engine, &drafts, &err));
  serving_close(&w, false);
}

/* Places are reserved all or none, are nobody else's, and one is taken by a submit that fails too. */
TEST(test_reserved) {
  serving w;
  mm_err err = {0};
  mm_scheduler_stats s;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 8, .queue_max = 2});
  client c[3];
  for (uint32_t i = 0; i < 3; i++) {
    c[i] = (client){.r.max_tokens = 5};
    fill(&c[i], i, 10);
    client_ready(&w, &c[i]);
  }
  assert_false(mm_scheduler_reserve(w.scheduler, 4, &err));
  assert_string_equal(err.code, "E_QUEUE");
  assert_true(mm_scheduler_reserve(w.scheduler, 3, &err));
  refused(&w, &c[0].r, MM_LIMIT, "E_QUEUE");
  mm_request bad = c[0].r;
  bad.prompt_count = 0, bad.reserved = true;
  refused(&w, &bad, MM_USAGE, "E_BATCH");
  client_submit(&w, &c[0]);
  c[1].r.reserved = true;
  client_submit(&w, &c[1]);
  mm_scheduler_release(w.scheduler, 1);
  client_submit(&w, &c[2]);
  for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
  mm_scheduler_stats_read(w.scheduler, &s);
  assert_true(s.refused == 5 && s.requests == 3);
  assert_true(mm_scheduler_reserve(w.scheduler, 3, &err));
  mm_scheduler_release(w.scheduler, 3);
  serving_close(&w, true);
}

/* A client that has its reply may send the next request: there is a place for it, although the queue was full. */
static client *next_client;
static void (*done_before)(void *, mm_finish, const mm_progress *, const mm_err *);
static void submit_next(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  serving *w = ((client *)user)->serving;
  client_submit(w, next_client);
  done_before(user, reason, p, err);
}
TEST(test_place_of_an_ended_one) {
  serving w;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 8, .queue_max = 1});
  client c[3];
  for (uint32_t i = 0; i < 3; i++) {
    c[i] = (client){.r.max_tokens = 5};
    fill(&c[i], i, 10);
    client_ready(&w, &c[i]);
  }
  next_client = &c[2];
  done_before = c[0].r.done, c[0].r.done = submit_next;
  for (uint32_t i = 0; i < 2; i++) client_submit(&w, &c[i]);
  for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
  serving_close(&w, true);
}

/* Who has a reply finds its tokens counted. */
static mm_scheduler_stats stats_at_end;
static void read_stats(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  mm_scheduler_stats_read(((client *)user)->serving->scheduler, &stats_at_end);
  done_before(user, reason, p, err);
}
TEST(test_counted_when_it_ends) {
  serving w;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 8, .queue_max = 1});
  client c = {.r.max_tokens = 1};
  fill(&c, 0, 5);
  client_ready(&w, &c);
  done_before = c.r.done, c.r.done = read_stats;
  client_submit(&w, &c);
  client_check(&c);
  assert_true(stats_at_end.reply_tokens == 1 && stats_at_end.prompt_tokens == 5 && stats_at_end.requests == 1);
  serving_close(&w, true);
}

/* ---- many that wait ---- */

enum { CROWD = 3000 };
static bool take_any(void *user, int32_t id, const mm_logprob *logprob, const mm_progress *p) {
  (void)user, (void)id, (void)logprob, (void)p;
  return true;
}
static void end_any(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) { (void)user, (void)reason, (void)p, (void)err; }

/* CPU time of the scheduler's thread in 30 steps. */
static double crowd_seconds(uint32_t groups) {
  static int32_t prompt[2000];
  serving w;
  mm_err err = {0};
  mm_scheduler_stats s;
  uint64_t ticket;
  serving_attn_tp = groups > 1;
  serving_open(&w, kind(1), groups, (mm_limits){.max_tokens = 64, .slots = 64, .max_positions = 2048, .pages = 320},
               (mm_scheduler_config){.step_tokens = 8, .queue_max = CROWD, .prefix_cache = true});
  for (int32_t i = 0; i < 2000; i++) prompt[i] = (i * 7 + i / 50) % 50;
  const mm_request r = {.prompt = prompt, .prompt_count = 2000, .max_tokens = 1, .sampling.top_p = 1, .token = take_any, .done = end_any};
  atomic_store(&serving_closed, true);
  for (uint32_t i = 0; i < CROWD; i++)
    if (!mm_scheduler_submit(w.scheduler, &r, &ticket, &err)) fail_msg("%s", err.text);
  atomic_store(&serving_closed, false);
  do {
    serving_pause();
    mm_scheduler_stats_read(w.scheduler, &s);
  } while (s.steps < 30);
  const double seconds = s.own_seconds * 30 / (double)s.steps;
  print_message("%u groups: %.3f s of the thread, %llu steps\n", groups, s.own_seconds, (unsigned long long)s.steps);
  assert_true(s.running == groups);
  serving_close(&w, false);
  serving_attn_tp = 0;
  return seconds;
}

/* A crowd that waits for a beginning which another one reads costs the steps little: not the square of its number each, nor, with groups
 * of attention, a look at all its tokens. */
TEST(test_crowd) {
  const double alone = crowd_seconds(1), groups = crowd_seconds(2);
  assert_true(alone < 0.6 && groups < 6 * alone);
}

/* ---- whose turn it is ---- */

static client request(uint32_t text, uint32_t count, uint32_t max_tokens) {
  client c = {.r.max_tokens = max_tokens};
  fill(&c, text, count);
  return c;
}

/* The others while the first is in its first step. */
static void submit_all(serving *w, client *c, uint32_t n) {
  submit_held(w, c, n);
  atomic_store(&serving_closed, false);
}

/* A larger priority takes the slot, and who had it goes on afterwards without loss, before those that came later. */
TEST(test_priority) {
  for (uint32_t k = 0; k < 2; k++) {
    serving w;
    mm_scheduler_stats s;
    serving_open(&w, kind(k), 1, (mm_limits){.max_tokens = 8, .slots = 1}, (mm_scheduler_config){.step_tokens = 1, .queue_max = 9});
    client c[] = {request(0, 290, 99), request(1, 9, 9), request(2, 9, 9), request(3, 9, 9)};
    c[2].r.priority = 1, c[3].r.priority = -1;
    submit_all(&w, c, 4);
    for (uint32_t i = 0; i < 4; i++) client_check(&c[i]);
    static const uint32_t order[] = {2, 3, 1, 4};
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(c[i].order, order[i]);
    serving_settled(&w, &s);
    assert_int_equal(s.preempted, 1);
    serving_close(&w, true);
  }
}

/* Requests of lower priority keep their slots where giving them up would not free enough pages: others have them. */
TEST(test_nobody_gives_way_for_nothing) {
  serving w;
  mm_scheduler_stats s;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 64, .slots = 4, .pages = 11}, config);
  client c[] = {request(0, 130, 20), request(1, 130, 90), request(2, 390, 5)};
  c[1].r.priority = 5, c[2].r.priority = 1;
  submit_all(&w, c, 3);
  for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(c[i].order, i + 1);
  serving_settled(&w, &s);
  assert_int_equal(s.preempted, 0);
  serving_close(&w, true);
}

/* One tenant's seventh request waits for another tenant's first. */
TEST(test_fair) {
  serving w;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 8, .slots = 2}, (mm_scheduler_config){.step_tokens = 4, .queue_max = 9});
  client c[8];
  for (uint32_t i = 0; i < 8; i++) c[i] = request(i, 60, 20), c[i].r.salt = i == 7 ? 2 : 1;
  submit_all(&w, c, 8);
  for (uint32_t i = 0; i < 8; i++) client_check(&c[i]);
  assert_true(c[7].order <= 4);
  for (uint32_t i = 2; i < 7; i++) assert_true(c[i].order > c[i - 1].order || c[i].order <= 4);
  serving_close(&w, true);
}

/* While a long prompt is read, a reply gets its token in every step, and a short prompt is not held up; the long one does not wait for
 * a crowd of short ones either. */
TEST(test_long_prompt) {
  serving w;
  serving_open(&w, kind(1), 1, (mm_limits){.max_tokens = 16, .slots = 3}, (mm_scheduler_config){.step_tokens = 9, .queue_max = 40});
  client c[] = {request(0, 1, 99), request(2, 300, 1), request(4, 20, 1)};
  c[1].watched = &c[0], c[2].watched = &c[1];
  submit_all(&w, c, 3);
  for (uint32_t i = 0; i < 3; i++) client_check(&c[i]);
  assert_int_equal(c[2].watched_got, 0);
  assert_true(c[1].watched_got >= 300 / 8 - 3); /* eight rows a step are left for prompts */
  client many[31];
  many[0] = request(6, 200, 1);
  for (uint32_t i = 1; i < 31; i++) many[i] = request(8 + i, 30, 1);
  submit_all(&w, many, 31);
  for (uint32_t i = 0; i < 31; i++) client_check(&many[i]);
  assert_true(many[0].order - 3 < 25);
  serving_close(&w, true);
}

/* ---- groups of attention ---- */

static bool (*token_before)(void *, int32_t, const mm_logprob *, const mm_progress *);
static uint32_t running_seen[2]; /* requests in each group at the fifth token of the first */
static bool see_groups(void *user, int32_t id, const mm_logprob *logprob, const mm_progress *p) {
  const client *c = user;
  for (uint32_t g = 0; p->reply_tokens == 5 && g < 2; g++) running_seen[g] = mm_schedule_running(c->serving->scheduler, g);
  return token_before(user, id, logprob, p);
}

/* A request gets a slot in the group with the fewest tokens, as long as that has one, and the group that has its prompt's pages is cheaper
 * by them. */
TEST(test_groups) {
  serving w;
  mm_scheduler_stats s;
  mm_scheduler_config cached = {.step_tokens = 64, .queue_max = 100, .prefix_cache = true};
  uint64_t tokens[2];
  serving_attn_tp = 1;
  serving_open(&w, kind(1), 2, (mm_limits){.max_tokens = 64, .slots = 6}, cached);
  assert_int_equal(mm_scheduler_groups(w.scheduler), 2);
  client c[] = {request(0, 60, 30), request(2, 9, 30), request(4, 9, 30), request(6, 9, 30), request(8, 9, 30)};
  for (uint32_t i = 0; i < 5; i++) client_ready(&w, &c[i]);
  token_before = c[0].r.token, c[0].r.token = see_groups;
  clients_submit_held(&w, c, 5);
  atomic_store(&serving_closed, false);
  for (uint32_t i = 0; i < 5; i++) client_check(&c[i]);
  assert_true(running_seen[0] == 2 && running_seen[1] == 3); /* the fifth found no slot where there were fewer tokens */
  serving_settled(&w, &s);
  mm_scheduler_group_tokens(w.scheduler, tokens);
  assert_true(tokens[0] == 0 && tokens[1] == 0);
  for (uint32_t i = 0; i < 3; i++) { /* the prompt of c[2], whose pages the second group has */
    client again = request(4, 9, 2);
    client_ready(&w, &again);
    client_submit(&w, &again);
    client_check(&again);
    assert_int_equal(again.cached, 8);
  }
  serving_close(&w, true);
  serving_attn_tp = 0;
}

/* ---- random requests ---- */

static void run_random(uint32_t k, uint32_t tp, mm_limits l, mm_scheduler_config c, uint32_t rounds) {
  serving w;
  serving_open(&w, kind(k), tp, l, c);
  random_requests(&w, UINT32_MAX, rounds);
  serving_close(&w, true);
}

TEST(test_random) {
  const mm_scheduler_config plain = {.step_tokens = 40, .queue_max = 100};
  mm_scheduler_config cached = plain, narrow;
  cached.prefix_cache = true, cached.cache_bytes = 1 << 16;
  for (uint32_t k = 0; k < 2; k++) {
    narrow = plain, narrow.step_tokens = 3;
    run_random(k, 1, (mm_limits){.max_tokens = 64, .slots = 6}, plain, 2);
    run_random(k, 2, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 12}, plain, 2); /* preempted now and then */
    run_random(k, 1, (mm_limits){.max_tokens = 3, .slots = 6, .pages = 8}, narrow, 1);
    run_random(k, 1, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 100}, cached, 3);
    run_random(k, 2, (mm_limits){.max_tokens = 64, .slots = 6, .pages = 9}, cached, 3);
    narrow = cached, narrow.step_tokens = 3;
    run_random(k, 1, (mm_limits){.max_tokens = 64, .slots = 2, .pages = 8}, narrow, 1);
    serving_attn_tp = 1 + k;
    cached.drafts = MM_DRAFTS;
    run_random(k, 2 + 2 * k, (mm_limits){.max_tokens = 64, .slots = 5, .pages = 14}, cached, 2);
    serving_attn_tp = 0, cached.drafts = 0;
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
