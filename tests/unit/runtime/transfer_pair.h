/* For tests of prefill and decode in two schedulers: both over one model, with a proxy between them, and a device whose copies come late.
 */
#ifndef MM_TESTS_TRANSFER_PAIR_H
#define MM_TESTS_TRANSFER_PAIR_H

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/schedule/transfer_wire.h"
#include "tests/unit/runtime/random_requests.h"

/* ---- a proxy, each connection of it in a thread of its own ---- */

static struct {
  int fd;
  uint16_t port;
  _Atomic uint16_t to;
  atomic_uint faults; /* of so many connections one is damaged; 0: none */
  atomic_uint damaged, live;
  atomic_bool stop;
  pthread_t thread;
} proxy;

static uint64_t proxy_random(void) {
  static _Atomic uint64_t state = 1;
  return mm_scatter(state++);
}

static bool pass_on(int from, int to, long *until) {
  char bytes[4096];
  const ssize_t n = read(from, bytes, sizeof bytes);
  if (n <= 0) return false;
  if (*until >= 0 && *until < n) {
    atomic_fetch_add(&proxy.damaged, 1);
    if (proxy_random() % 2) return false;
    bytes[*until] = (char)(bytes[*until] ^ 1 << proxy_random() % 8);
    *until = -1;
  } else if (*until >= 0) {
    *until -= n;
  }
  for (ssize_t at = 0; at < n && !atomic_load(&proxy.stop);) {
    struct pollfd p = {.fd = to, .events = POLLOUT};
    const ssize_t done = poll(&p, 1, 50) > 0 ? send(to, bytes + at, (size_t)(n - at), MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
    if (done < 0) return false;
    at += done;
  }
  return true;
}

static void *pass_both(void *arg) {
  const int in = (int)(intptr_t)arg;
  mm_err err = {0};
  atomic_bool never = false;
  mm_wire out = {.fd = -1, .timeout = 5, .name = "proxy", .stop = &never};
  char address[32];
  snprintf(address, sizeof address, "127.0.0.1:%u", proxy.to);
  const unsigned every = atomic_load(&proxy.faults);
  long until = every && proxy_random() % every == 0 ? (long)(proxy_random() % 20000) : -1;
  const bool back = proxy_random() % 4;
  if (mm_wire_connect(&out, address, &err)) {
    long whole = -1;
    for (bool ok = true; ok && !atomic_load(&proxy.stop);) {
      struct pollfd p[2] = {{.fd = in, .events = POLLIN}, {.fd = out.fd, .events = POLLIN}};
      if (poll(p, 2, 50) <= 0) continue;
      if (p[0].revents) ok = pass_on(in, out.fd, back ? &whole : &until);
      if (ok && p[1].revents) ok = pass_on(out.fd, in, back ? &until : &whole);
    }
  }
  mm_wire_close(&out);
  close(in);
  atomic_fetch_sub(&proxy.live, 1);
  return NULL;
}

static void *run_proxy(void *arg) {
  while (!atomic_load(&proxy.stop)) {
    struct pollfd p = {.fd = proxy.fd, .events = POLLIN};
    pthread_t t;
    if (poll(&p, 1, 20) <= 0) continue;
    const int fd = accept(proxy.fd, NULL, NULL);
    if (fd < 0) continue;
    atomic_fetch_add(&proxy.live, 1);
    if (pthread_create(&t, NULL, pass_both, (void *)(intptr_t)fd) != 0) abort();
    pthread_detach(t);
  }
  return arg;
}

static void proxy_open(void) {
  mm_err err = {0};
  atomic_store(&proxy.stop, false);
  if ((proxy.fd = mm_wire_listen("127.0.0.1:0", &proxy.port, &err)) < 0) fail_msg("%s", err.text);
  if (pthread_create(&proxy.thread, NULL, run_proxy, NULL) != 0) fail_msg("no thread");
}

static void proxy_close(void) {
  atomic_store(&proxy.stop, true);
  pthread_join(proxy.thread, NULL);
  while (atomic_load(&proxy.live)) serving_pause();
  close(proxy.fd);
}

/* ---- a device whose copies are made when `moved` is called, some of them: what is sent before holds something else ---- */

enum { LATE_BACKENDS = 4, LATE_MOVES = 8192 };
static struct late {
  const mm_backend *b;
  uint32_t first, count, state;
  uint64_t number[LATE_MOVES];
  mm_page_move move[LATE_MOVES];
} late[LATE_BACKENDS];
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;

static struct late *late_of(const mm_backend *b) {
  pthread_mutex_lock(&late_lock);
  uint32_t i = 0;
  while (i < LATE_BACKENDS - 1 && late[i].b && late[i].b != b) i++;
  late[i].b = b;
  pthread_mutex_unlock(&late_lock);
  return &late[i];
}

static bool late_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err) {
  struct late *l = late_of(b);
  if (l->count + count > LATE_MOVES) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "more moves than the test has room for");
  for (uint32_t i = 0; i < count; i++) l->number[l->count] = number, l->move[l->count++] = move[i];
  return true;
}

static bool late_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err) {
  struct late *l = late_of(b);
  while (l->first < l->count && (wait || (l->state = l->state * 1664525 + 1013904223) / 65536 % 4)) {
    if (!mm_cpu_move(b, l->number[l->first], &l->move[l->first], 1, err)) return false;
    l->first++;
  }
  *oldest = l->first < l->count ? l->number[l->first] : UINT64_MAX;
  if (l->first == l->count) l->first = l->count = 0;
  return true;
}

/* ---- two schedulers over one model ---- */

typedef struct pair {
  serving w; /* decodes */
  mm_engine *engine;
  mm_scheduler *sender;
  mm_scheduler_config c;
  mm_ops there;
  char from[32];
} pair;

static _Atomic uint64_t reported;
static void count_report(void *user, const mm_err *err) {
  (void)user;
  if (getenv("SHOW")) print_message("%s\n", err->text);
  atomic_fetch_add(&reported, 1);
}

static void open_sender(pair *p) {
  mm_err err = {0};
  mm_scheduler_config c = p->c;
  c.transfer.from = NULL, c.transfer.listen = "127.0.0.1:0";
  if (!(p->sender = mm_scheduler_open(p->engine, &c, &err))) fail_msg("%s", err.text);
  proxy.to = mm_scheduler_port(p->sender);
}

/* The engine that decodes has these ops. `from`: NULL, or another address than the proxy's. */
static void pair_open(pair *p, uint32_t k, uint32_t tp, uint32_t places, uint32_t least, const mm_ops *ops) {
  mm_err err = {0};
  const mm_limits l = {.max_tokens = 64, .slots = 6, .pages = (places < 20 ? 10 : 30) * (serving_attn_tp ? tp / serving_attn_tp : 1)};
  *p = (pair){.c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 18, .report = count_report}};
  serving_open_ops(&p->w, k < 2 ? kind(k) : ref_dims(MM_FAMILY_M3, false), tp, ops, l, p->c);
  mm_limits other = l;
  other.max_positions = POSITIONS;
  p->there = *ops;
  p->there.begin = mm_ops_cpu.begin;
  memset(late, 0, sizeof late);
  p->engine = serving_engine(p->w.shards, &p->there, other, NULL);
  p->c.offload_bytes = places * mm_engine_page_bytes(p->engine);
  p->c.transfer = (mm_transfer_config){.least = least, .timeout = 60, .from = p->from};
  proxy_open();
  open_sender(p);
  mm_scheduler_close(p->w.scheduler, true);
  snprintf(p->from, sizeof p->from, "127.0.0.1:%u", proxy.port);
  if (!(p->w.scheduler = mm_scheduler_open(p->w.engine, &p->c, &err))) fail_msg("%s", err.text);
}

static void check_pages(mm_engine *e) {
  mm_err err = {0};
  if (!mm_pages_check(mm_engine_pages(e), NULL, &err)) fail_msg("%s", err.text);
  assert_int_equal(mm_pages_free(mm_engine_pages(e)), mm_pages_count(mm_engine_pages(e)));
}

static void pair_close(pair *p) {
  mm_scheduler_stats t;
  mm_scheduler_stats_read(p->w.scheduler, &t);
  print_message("%llu prompts fetched, %llu computed here in place of that, %llu pages; %u connections damaged\n",
                (unsigned long long)t.transfer.fetched, (unsigned long long)t.transfer.fallbacks, (unsigned long long)t.transfer.pages_in,
                atomic_load(&proxy.damaged));
  mm_scheduler_close(p->sender, below(2));
  check_pages(p->engine);
  proxy_close();
  mm_engine_close(p->engine);
  serving_close(&p->w, true);
}

static mm_ops poisoning(void) {
  mm_ops ops = mm_ops_cpu;
  ops.begin = poisoning_begin, ops.cache.move = late_move, ops.cache.moved = late_moved;
  return ops;
}

#endif
