/* Prefill and decode in two schedulers (runtime/schedule/transfer.h): random requests get what they get alone while a proxy between the two
 * cuts connections, flips bits and stalls, and while the side that computes prompts ends and begins again; peers that do not keep to the
 * protocol are refused, and what is refused costs no request its reply. */
#include "runtime/schedule/scheduler_inside.h"
#include "runtime/schedule/transfer_inside.h"
#include "tests/unit/runtime/transfer_pair.h"

enum { CLIENTS = 24 };

/* Whole and damaged connections, much host memory and little. */
TEST(test_random) {
  const mm_ops ops = poisoning();
  pair p;
  mm_scheduler_stats t;
  for (uint32_t k = 0; k < 3; k++) {
    pair_open(&p, k, 1 + k % 2, 600, 1, &ops);
    random_requests(&p.w, UINT32_MAX, 1);
    serving_settled(&p.w, &t);
    assert_true(t.transfer.fetched > 0 && t.transfer.pages_in >= t.transfer.fetched);
    assert_int_equal(t.transfer.fallbacks, 0);
    atomic_store(&proxy.faults, 2);
    random_requests(&p.w, UINT32_MAX, 1);
    atomic_store(&proxy.faults, 0);
    pair_close(&p);
    pair_open(&p, k, 1, 7, 60, &ops);
    random_requests(&p.w, UINT32_MAX, 1);
    pair_close(&p);
  }
  assert_true(atomic_load(&proxy.damaged) > 0 && atomic_load(&reported) > 0);
}

/* Both sides have two groups of attention: a page that one of them computed is sent, and becomes the other side's of any group. */
TEST(test_groups) {
  const mm_ops ops = poisoning();
  pair p;
  mm_scheduler_stats t;
  serving_attn_tp = 1;
  for (uint32_t k = 0; k < 3; k++) {
    pair_open(&p, k, 2, 600, 1, &ops);
    random_requests(&p.w, UINT32_MAX, 1);
    serving_settled(&p.w, &t);
    assert_true(t.transfer.fetched > 0 && t.transfer.pages_in >= t.transfer.fetched);
    assert_int_equal(t.transfer.fallbacks, 0);
    pair_close(&p);
  }
  pair_open(&p, 1, 2, 9, 60, &ops);
  atomic_store(&proxy.faults, 2);
  random_requests(&p.w, UINT32_MAX, 1);
  atomic_store(&proxy.faults, 0);
  pair_close(&p);
  serving_attn_tp = 0;
}

/* ---- peers that do not keep to the protocol ---- */

static atomic_bool never;

/* Says hello to the sender, as the decoding side does, or with another profile. */
static mm_wire greet(const pair *p, mm_wire_profile *profile) {
  mm_err err = {0};
  mm_wire w = {.fd = -1, .timeout = 5, .name = "test", .stop = &never};
  char address[32];
  snprintf(address, sizeof address, "127.0.0.1:%u", mm_scheduler_port(p->sender));
  if (!mm_wire_connect(&w, address, &err) || !mm_wire_send(&w, MM_WIRE_HELLO, &(mm_wire_part){profile, sizeof *profile}, 1, &err) ||
      !mm_wire_expect(&w, MM_WIRE_HELLO, profile, sizeof *profile, &err))
    fail_msg("%s", err.text);
  return w;
}

/* The sender closes the connection, with a text that has this word. */
static void refused(mm_wire *w, const char *word) {
  mm_err err = {0};
  mm_wire_head head;
  for (head = (mm_wire_head){.kind = MM_WIRE_BEAT}; head.kind == MM_WIRE_BEAT || head.kind == MM_WIRE_PAGE;) {
    char body[1 << 16];
    if (!mm_wire_head_read(w, &head, &err)) fail_msg("%s: %s", word, err.text);
    if (head.kind != MM_WIRE_ERROR && !mm_wire_body_read(w, &head, &(mm_wire_part){body, head.bytes}, 1, &err)) fail_msg("%s", err.text);
  }
  assert_int_equal(head.kind, MM_WIRE_ERROR);
  assert_false(mm_wire_refused(w, &head, &err));
  if (!strstr(err.text, word)) fail_msg("found %s, expected %s", err.text, word);
  mm_wire_close(w);
}

static void send_request(const pair *p, mm_wire_request q, const void *numbers, size_t bytes, const char *word) {
  mm_err err = {0};
  mm_wire_profile profile = {.fact = {0}};
  mm_wire w = greet(p, &profile);
  mm_wire_close(&w);
  w = greet(p, &profile);
  const mm_wire_part part[] = {{&q, sizeof q}, {(void *)numbers, bytes}};
  if (!mm_wire_send(&w, MM_WIRE_REQUEST, part, 2, &err)) fail_msg("%s", err.text);
  refused(&w, word);
}

/* Requests that the side which computes prompts refuses. */
TEST(test_bad_requests) {
  const mm_ops ops = poisoning();
  static int32_t id[POSITIONS + MM_WIRE_BOUNDARIES + 1];
  mm_wire_profile other = {.fact = {0}};
  pair p;
  pair_open(&p, 1, 1, 100, 1, &ops);
  mm_wire w = greet(&p, &other); /* of a peer with another version, whose profile becomes the sender's */
  refused(&w, "version of the protocol: found 0 there, expected 2");
  const char *const odd = "does not belong there";
  send_request(&p, (mm_wire_request){.count = 10}, id, 9 * sizeof *id, odd);
  send_request(&p, (mm_wire_request){.count = 0}, id, 4, odd);
  send_request(&p, (mm_wire_request){.count = 10, .from = 1}, id, 10 * sizeof *id, odd);
  send_request(&p, (mm_wire_request){.count = 10, .priority = INT64_MAX}, id, 10 * sizeof *id, odd);
  send_request(&p, (mm_wire_request){.count = UINT64_MAX - 9, .boundaries = 20}, id, 10 * sizeof *id, odd);
  send_request(&p, (mm_wire_request){.count = 10, .boundaries = 257}, id, 267 * sizeof *id, odd);
  send_request(&p, (mm_wire_request){.count = POSITIONS + 1}, id, (POSITIONS + 1) * sizeof *id, odd);
  send_request(&p, (mm_wire_request){.count = POSITIONS}, id, POSITIONS * sizeof *id, "E_BATCH");
  send_request(&p, (mm_wire_request){.count = 10, .boundaries = 2}, id, 12 * sizeof *id, "E_BATCH");
  id[3] = -1;
  send_request(&p, (mm_wire_request){.count = 10}, id, 10 * sizeof *id, "E_BATCH");
  id[3] = 0;
  w = greet(&p, &other);
  assert_int_equal(send(w.fd, "GET / HTTP/1.1\r\nHost: example.org of more than 48 bytes\r\n\r\n", 60, MSG_NOSIGNAL), 60);
  refused(&w, "begin no message");
  pair_close(&p);
}

/* What the side that computes prompts sends in place of its pages. */
typedef enum bad_reply {
  WRONG_PROFILE,
  SILENCE,
  CLOSES,
  GARBAGE,
  OTHER_INDEX,
  SHORT_PAGE,
  LONG_PAGE,
  DIGEST,
  NO_PAGES,
  MORE_PAGES,
  A_STATE,
  BEAT,
  HELLO_AGAIN,
  TEXT,
  LONG_TEXT,
  BAD_REPLIES
} bad_reply;

typedef struct impostor {
  pthread_t thread;
  int fd;
  uint16_t port;
  uint64_t page_bytes;
  mm_wire_profile profile;
  atomic_int reply;
  atomic_bool stop, waits; /* waits: no connection is taken */
} impostor;

static void reply_badly(impostor *a, mm_wire *w) {
  mm_err none = {0};
  char *bytes = calloc(1, a->page_bytes + 64);
  uint64_t index = 0;
  mm_wire_part page[] = {{&index, sizeof index}, {bytes, a->page_bytes}};
  bool ok = true;
  switch ((bad_reply)atomic_load(&a->reply)) {
    case SILENCE:
      for (uint32_t i = 0; i < 4000 && !mm_wire_ended(w); i++) serving_pause();
      break;
    case GARBAGE: ok = send(w->fd, bytes, 64, MSG_NOSIGNAL) == 64; break;
    case OTHER_INDEX:
      for (index = 1; index < 4 && ok; index++) ok = mm_wire_send(w, MM_WIRE_PAGE, page, 2, &none);
      ok = ok && mm_wire_send(w, MM_WIRE_DONE, NULL, 0, &none);
      break;
    case SHORT_PAGE: page[1].bytes--, ok = mm_wire_send(w, MM_WIRE_PAGE, page, 2, &none); break;
    case LONG_PAGE: page[1].bytes++, ok = mm_wire_send(w, MM_WIRE_PAGE, page, 2, &none); break;
    case DIGEST: {
      const mm_wire_head head = {.magic = "mmkv", .kind = MM_WIRE_PAGE, .bytes = 8 + a->page_bytes};
      for (; index < 3 && ok; index++)
        ok = send(w->fd, &head, sizeof head, MSG_NOSIGNAL) > 0 && send(w->fd, &index, 8, MSG_NOSIGNAL) > 0 &&
             send(w->fd, bytes, a->page_bytes, MSG_NOSIGNAL) > 0;
      ok = ok && mm_wire_send(w, MM_WIRE_DONE, NULL, 0, &none);
      break;
    }
    case MORE_PAGES:
      for (; index < 5 && ok; index++) ok = mm_wire_send(w, MM_WIRE_PAGE, page, 2, &none);
      break;
    case NO_PAGES: ok = mm_wire_send(w, MM_WIRE_DONE, NULL, 0, &none); break;
    case A_STATE: ok = mm_wire_send(w, MM_WIRE_STATE, page, 1, &none); break;
    case BEAT: index = 1000, ok = mm_wire_send(w, MM_WIRE_BEAT, page, 1, &none); break;
    case HELLO_AGAIN: ok = mm_wire_send(w, MM_WIRE_HELLO, page, 1, &none); break;
    case TEXT: ok = mm_wire_send(w, MM_WIRE_ERROR, &(mm_wire_part){"\x1b[31m no", 8}, 1, &none); break;
    case LONG_TEXT: ok = mm_wire_send(w, MM_WIRE_ERROR, &(mm_wire_part){bytes, MM_WIRE_TEXT + 1}, 1, &none); break;
    case WRONG_PROFILE:
    case CLOSES:
    case BAD_REPLIES: break;
  }
  (void)ok;
  for (uint32_t i = 0; i < 4000 && a->reply != CLOSES && !mm_wire_ended(w); i++) serving_pause();
  free(bytes);
}

static void *run_impostor(void *arg) {
  impostor *a = arg;
  while (!atomic_load(&a->stop)) {
    mm_err none = {0};
    mm_wire_head head;
    mm_wire_profile peer;
    static char body[1 << 14];
    struct pollfd p = {.fd = a->fd, .events = POLLIN};
    if (poll(&p, 1, 20) <= 0) continue;
    if (atomic_load(&a->waits)) {
      serving_pause();
      continue;
    }
    mm_wire w = {.fd = accept(a->fd, NULL, NULL), .timeout = 5, .name = "test", .stop = &never};
    mm_wire_profile own = a->profile;
    own.fact[10] += a->reply == WRONG_PROFILE;
    if (mm_wire_expect(&w, MM_WIRE_HELLO, &peer, sizeof peer, &none) &&
        mm_wire_send(&w, MM_WIRE_HELLO, &(mm_wire_part){&own, sizeof own}, 1, &none) && mm_wire_head_read(&w, &head, &none) &&
        head.bytes <= sizeof body && mm_wire_body_read(&w, &head, &(mm_wire_part){body, head.bytes}, 1, &none))
      reply_badly(a, &w);
    mm_wire_close(&w);
  }
  return NULL;
}

/* It takes the place of the sender, with its profile. The side that decodes is closed. */
static void open_impostor(impostor *a, pair *p) {
  mm_err err = {0};
  mm_wire w = greet(p, &a->profile);
  mm_wire_close(&w);
  w = greet(p, &a->profile);
  mm_wire_close(&w);
  a->page_bytes = mm_engine_page_bytes(p->engine);
  if ((a->fd = mm_wire_listen("127.0.0.1:0", &a->port, &err)) < 0 || pthread_create(&a->thread, NULL, run_impostor, a) != 0)
    fail_msg("%s", err.text);
  snprintf(p->from, sizeof p->from, "127.0.0.1:%u", a->port);
  mm_scheduler_close(p->w.scheduler, true);
}

/* Returns how many connections it has not taken. */
static uint32_t close_impostor(impostor *a) {
  uint32_t left = 0;
  atomic_store(&a->stop, true);
  pthread_join(a->thread, NULL);
  for (int one; (one = accept(a->fd, NULL, NULL)) >= 0; left++) close(one);
  close(a->fd);
  return left;
}

static void reopen(pair *p) {
  mm_err err = {0};
  if (!(p->w.scheduler = mm_scheduler_open(p->w.engine, &p->c, &err))) fail_msg("%s", err.text);
}

static void ready(pair *p, client *c, uint32_t text, uint32_t tokens, int priority) {
  *c = (client){.r = {.max_tokens = 2, .priority = priority}};
  fill(c, text, tokens);
  client_ready(&p->w, c);
}

TEST(test_bad_replies) {
  const mm_ops ops = poisoning();
  pair p;
  mm_err err = {0};
  static impostor a;
  pair_open(&p, 1, 1, 100, 1, &ops);
  open_impostor(&a, &p);
  p.c.transfer.timeout = 0.3;
  a.reply = WRONG_PROFILE;
  assert_null(mm_scheduler_open(p.w.engine, &p.c, &err));
  if (err.status != MM_USAGE || !strstr(err.text, "bytes of a page")) fail_msg("%s", err.text);
  for (a.reply = SILENCE; a.reply < BAD_REPLIES; a.reply++) {
    mm_scheduler_stats s;
    client c = {.r = {.max_tokens = 5}};
    err = (mm_err){0};
    fill(&c, 3, 150);
    client_ready(&p.w, &c);
    reopen(&p);
    client_submit(&p.w, &c);
    client_check(&c);
    serving_settled(&p.w, &s);
    if (s.transfer.fallbacks != 1 || s.transfer.fetched) fail_msg("reply %d was taken", (int)a.reply);
    assert_int_equal(s.places_used, 0);
    mm_scheduler_close(p.w.scheduler, true);
  }
  close_impostor(&a);
  if (!(p.w.scheduler = mm_scheduler_open(p.w.engine, &(mm_scheduler_config){.step_tokens = 4}, &err))) fail_msg("%s", err.text);
  pair_close(&p);
}

/* `running` of them are being fetched. */
static void await_fetches(pair *p, uint32_t running) {
  mm_scheduler_stats s = {.slots = 0};
  while (s.transfer.running < running) {
    serving_pause();
    mm_scheduler_stats_read(p->w.scheduler, &s);
  }
}

/* A long prompt that waits for places gets them before short ones that came after it. */
TEST(test_places_in_order) {
  const mm_ops ops = poisoning();
  static const uint32_t tokens[] = {150, 350, 100, 90};
  static client c[4];
  static impostor a;
  mm_scheduler_stats s;
  pair p;
  pair_open(&p, 1, 1, 8, 1, &ops);
  for (uint32_t i = 0; i < 4; i++) ready(&p, &c[i], 2 * i, tokens[i], 0);
  open_impostor(&a, &p);
  a.reply = CLOSES;
  reopen(&p);
  atomic_store(&a.waits, true);
  for (uint32_t i = 0; i < 4; i++) client_submit(&p.w, &c[i]);
  await_fetches(&p, 1);
  for (uint32_t i = 0; i < 1000; i++) serving_pause();
  mm_scheduler_stats_read(p.w.scheduler, &s);
  assert_int_equal(s.transfer.running, 1);
  atomic_store(&a.waits, false);
  for (uint32_t i = 0; i < 4; i++) client_check(&c[i]);
  close_impostor(&a);
  pair_close(&p);
}

/* Prompts that wait for one that is being fetched are looked at once, and not before each step of the replies that run. */
TEST(test_crowd) {
  enum { CROWD = 20 };
  const mm_ops ops = poisoning();
  static client c[CROWD], first, reply;
  static impostor a;
  mm_scheduler_stats s;
  pair p;
  pair_open(&p, 1, 1, 100, 100, &ops);
  ready(&p, &first, 0, 90, 0);
  ready(&p, &reply, 1, 50, 0);
  for (uint32_t i = 0; i < CROWD; i++) ready(&p, &c[i], 0, 250, 0);
  reply.r.max_tokens = 90;
  client_ready(&p.w, &reply);
  open_impostor(&a, &p);
  a.reply = CLOSES;
  reopen(&p);
  client_submit(&p.w, &first);
  client_check(&first);
  atomic_store(&a.waits, true);
  for (uint32_t i = 0; i < CROWD; i++) client_submit(&p.w, &c[i]);
  await_fetches(&p, 1);
  client_submit(&p.w, &reply);
  client_check(&reply);
  const uint64_t looks = p.w.scheduler->offload.receiver->looks; /* no step has begun since */
  atomic_store(&a.waits, false);
  for (uint32_t i = 0; i < CROWD; i++) client_check(&c[i]);
  serving_settled(&p.w, &s);
  if (looks > 3 * CROWD) fail_msg("%llu looks in %llu steps", (unsigned long long)looks, (unsigned long long)s.steps);
  close_impostor(&a);
  pair_close(&p);
}

/* The side that computes prompts hangs: prompts in the queue for it wait for one time limit, and not for one each eight of them. */
TEST(test_hangs) {
  const mm_ops ops = poisoning();
  static client c[CLIENTS];
  static impostor a;
  mm_scheduler_stats s;
  pair p;
  pair_open(&p, 1, 1, 100, 1, &ops);
  for (uint32_t i = 0; i < CLIENTS; i++) ready(&p, &c[i], 2 * i, 150, 0);
  open_impostor(&a, &p);
  atomic_store(&a.waits, true);
  p.c.transfer.timeout = 1;
  reopen(&p);
  for (uint32_t i = 0; i < CLIENTS; i++) client_submit(&p.w, &c[i]);
  for (uint32_t i = 0; i < CLIENTS; i++) client_check(&c[i]);
  serving_settled(&p.w, &s);
  assert_int_equal(s.transfer.fallbacks, CLIENTS);
  assert_in_range(close_impostor(&a), 2, 20); /* the start's and those of the eight that began at once; a slow machine begins some again */
  pair_close(&p);
}

/* The engine of the side that computes prompts fails for good: what it was asked for ends at once, before the engine is lost and after, and
 * the side ends. */
static atomic_bool burns;
static bool burning_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (!atomic_load(&burns)) return mm_ops_cpu.begin(b, batch, err);
  return mm_fail(err, MM_IO, "E_CUDA", mm_at(NULL, NULL), "the device is on fire");
}

/* NOLINTNEXTLINE(readability-non-const-parameter): an op's */
static bool burnt_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err) {
  (void)b, (void)wait, (void)oldest;
  return mm_fail(err, MM_IO, "E_CUDA", mm_at(NULL, NULL), "the device is on fire");
}

/* So many prompts are given up within seconds. */
static void await_dropped(const pair *p, uint32_t count) {
  mm_scheduler_stats s = {.slots = 0};
  for (uint32_t k = 0; k < 5000 && s.transfer.dropped < count; k++) {
    usleep(1000);
    mm_scheduler_stats_read(p->sender, &s);
  }
  if (s.transfer.dropped != count) fail_msg("%llu prompts were given up, expected %u", (unsigned long long)s.transfer.dropped, count);
}

static void await_lost(const pair *p) {
  mm_err err = {0};
  for (uint32_t k = 0; k < 5000 && !mm_scheduler_lost(p->sender, &err); k++) usleep(1000);
  assert_true(mm_scheduler_lost(p->sender, &err));
}

/* Its sender's device burns from the start, or when the test says so, and is lost soon. */
static void open_burning(pair *p, client c[2], bool at_once, bool copies) {
  static mm_ops ops; /* the engine's, until it is closed */
  ops = poisoning();
  pair_open(p, 1, 1, 100, 1, &ops);
  for (uint32_t i = 0; i < 2; i++) ready(p, &c[i], 2 * i, 150, 0);
  mm_scheduler_close(p->sender, true);
  p->there.begin = burning_begin;
  if (copies) p->there.cache.moved = burnt_moved;
  p->c.lost_after = 0.3;
  atomic_store(&burns, at_once);
  open_sender(p);
}

TEST(test_lost) {
  static client c[2];
  pair p;
  open_burning(&p, c, true, false);
  for (uint32_t i = 0; i < 2; i++) {
    client_submit(&p.w, &c[i]);
    await_dropped(&p, i + 1);
    client_check(&c[i]);
    await_lost(&p);
  }
  pair_close(&p);
}

/* Copies that were under way when the engine was lost, and of which it says nothing any more, are not waited for. */
TEST(test_lost_with_copies) {
  static client c[2];
  pair p;
  mm_scheduler_stats s = {.slots = 0};
  open_burning(&p, c, false, true);
  client_submit(&p.w, &c[0]);
  for (uint32_t k = 0; k < 5000 && (!s.steps || s.running); k++) usleep(1000), mm_scheduler_stats_read(p.sender, &s);
  assert_true(s.steps && !s.running);
  atomic_store(&burns, true);
  client_submit(&p.w, &c[1]);
  await_lost(&p);
  await_dropped(&p, 2);
  for (uint32_t i = 0; i < 2; i++) client_check(&c[i]);
  pair_close(&p);
}

/* The side that computes prompts ends at random moments, and begins again. */
static atomic_bool killing;
static void *kill_sender(void *arg) {
  pair *p = arg;
  while (atomic_load(&killing)) {
    for (uint64_t i = proxy_random() % 1000; i-- > 0;) serving_pause();
    mm_scheduler_close(p->sender, false);
    check_pages(p->engine);
    for (uint64_t i = proxy_random() % 30; i-- > 0;) serving_pause();
    open_sender(p);
  }
  return NULL;
}

TEST(test_killed) {
  const mm_ops ops = poisoning();
  pthread_t t;
  pair p;
  uint64_t fetched = 0, fallbacks = 0;
  for (uint32_t k = 0; k < 2; k++) {
    pair_open(&p, k, 1, 200, 1, &ops);
    p.c.transfer.timeout = 5;
    atomic_store(&killing, true);
    if (pthread_create(&t, NULL, kill_sender, &p) != 0) fail_msg("no thread");
    for (uint32_t again = 0; again < 2; again++) {
      random_requests(&p.w, UINT32_MAX, 1);
      /* The side that decodes ends with what it fetches. */
      client c;
      random_client(&p.w, &c, UINT32_MAX);
      client_submit(&p.w, &c);
      mm_scheduler_stats s;
      mm_scheduler_stats_read(p.w.scheduler, &s);
      fetched += s.transfer.fetched, fallbacks += s.transfer.fallbacks;
      mm_scheduler_close(p.w.scheduler, false);
      client_check(&c);
      reopen(&p);
    }
    atomic_store(&killing, false);
    pthread_join(t, NULL);
    pair_close(&p);
  }
  print_message("%llu prompts fetched, %llu computed here in place of that\n", (unsigned long long)fetched, (unsigned long long)fallbacks);
  assert_true(fetched + fallbacks > 0);
}

int main(void) { return run_unit_tests(NULL, NULL); }
