/* For tests of the scheduler: a small random model served by it, and the oracle: the same model in an engine of its own, to which each
 * prompt is given alone. Callbacks come from the scheduler's thread: they note what is wrong, and the test's thread fails. */
#ifndef MM_TESTS_SERVING_H
#define MM_TESTS_SERVING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"
#include "runtime/schedule/scheduler.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

#define POSITIONS 400
#define REPLY_MAX 100

typedef struct serving {
  ref_model ref;
  ref_shards *shards;
  mm_engine *engine, *alone;
  mm_scheduler *scheduler;
  uint32_t vocab;
  pthread_mutex_t lock; /* of every client's results */
  pthread_cond_t changed;
  uint32_t ends; /* requests that have ended */
} serving;

/* A request and what came of it. */
typedef struct client {
  serving *serving;
  mm_request r;
  int32_t prompt[POSITIONS];
  int32_t stop[2];
  uint32_t boundary[4];
  mm_bias bias;
  uint32_t leave_at; /* `token` returns false at this token of the reply, from 1; 0: never */
  uint32_t fewer;    /* proposals than MM_DRAFTS */
  bool masked;       /* only ids that are, like the number of tokens so far, odd or even */
  uint32_t mask[16]; /* for up to 512 ids */
  uint64_t ticket;

  /* The oracle's reply. */
  int32_t want[REPLY_MAX];
  mm_logprob want_logprob[REPLY_MAX][3];
  uint32_t want_count;
  mm_finish want_finish;
  /* Under the lock. */
  int32_t got[REPLY_MAX];
  uint32_t got_count, cached;
  mm_finish finish;
  mm_err err;
  bool done;
  uint32_t order;               /* as which of all it ended, from 1 */
  const struct client *watched; /* another one, or NULL */
  uint32_t watched_got;         /* that one's tokens when this one's first came */
  char wrong[200];              /* what a callback found, or empty */
} client;

/* ---- poison: no number that nobody holds is ever read ---- */

static mm_engine *serving_poisoned; /* it alone has a backend that begins so */
static uint32_t serving_slots;

/* A step that begins while the gate is closed waits at it. */
static atomic_bool serving_closed, serving_waits;

static void serving_pause(void) {
  const struct timespec t = {0, 100000};
  nanosleep(&t, NULL);
}

/* Pages without a reference and states of slots that hold nothing become NaN before each step. */
static bool poisoning_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  while (atomic_load(&serving_closed)) {
    atomic_store(&serving_waits, true);
    serving_pause();
  }
  const mm_engine *e = serving_poisoned;
  const mm_pages *p = e ? mm_engine_pages(serving_poisoned) : NULL;
  const uint32_t groups = e ? mm_engine_groups(e) : 1, group = mm_attn_group(b->c.weights); /* whose pages and slots the backend has */
  for (uint32_t l = 0; p && l < b->c.model->layers; l++) {
    const mm_cpu_cache *c = &b->cache[l];
    const size_t bytes = (size_t)b->kv_heads * MM_PAGE * b->d * b->kv_size;
    for (uint32_t i = 0; c->k && i < mm_pages_each(p); i++)
      if (!mm_pages_references(p, group * mm_pages_each(p) + i))
        memset(c->k + i * bytes, 0xff, bytes), memset(c->v + i * bytes, 0xff, bytes);
  }
  for (uint32_t slot = group; e && slot < serving_slots; slot += groups)
    if (!mm_engine_held(e, slot)) memset(b->state + slot / groups * b->state_floats, 0xff, b->state_floats * sizeof *b->state);
  return mm_ops_cpu.begin(b, batch, err);
}

/* ---- opening ---- */

static const mm_dflash *serving_draft; /* of the next engine that is served, or NULL */
static bool serving_index_fp8;         /* of the next engines */
static uint32_t serving_attn_tp;       /* ranks that its attention is cut for, 0: all */

static mm_engine *serving_engine(const ref_shards *shards, const mm_ops *ops, mm_limits limits, const mm_dflash *draft) {
  mm_err err = {0};
  const mm_engine_config c = {.ops = ops, .limits = limits, .options = {.threads = 1, .index_fp8 = serving_index_fp8}, .draft = draft};
  mm_engine *e = mm_engine_open(&shards->s, &c, &err);
  if (!e) fail_msg("%s", err.text);
  return e;
}

static void serving_open_ops(serving *w, mm_model m, uint32_t tp, const mm_ops *ops, mm_limits limits, mm_scheduler_config c) {
  mm_err err = {0};
  *w = (serving){.ref = ref_build(m), .vocab = m.vocab};
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->changed, NULL);
  w->shards = ref_cut_groups(&w->ref, tp, serving_attn_tp);
  limits.max_positions = limits.max_positions ? limits.max_positions : POSITIONS;
  w->alone = serving_engine(w->shards, &mm_ops_cpu, (mm_limits){.max_tokens = POSITIONS, .slots = 1, .max_positions = POSITIONS}, NULL);
  w->engine = serving_engine(w->shards, ops, limits, serving_draft);
  serving_poisoned = w->engine;
  serving_slots = limits.slots;
  if (!(w->scheduler = mm_scheduler_open(w->engine, &c, &err))) fail_msg("%s", err.text);
}

static inline void serving_open(serving *w, mm_model m, uint32_t tp, mm_limits limits, mm_scheduler_config c) {
  static mm_ops ops;
  ops = mm_ops_cpu;
  ops.begin = poisoning_begin;
  serving_open_ops(w, m, tp, &ops, limits, c);
}

/* After the scheduler every page is free and no slot holds anything. */
static inline void serving_close(serving *w, bool drain) {
  mm_err err = {0};
  mm_scheduler_close(w->scheduler, drain);
  mm_pages *pages = mm_engine_pages(w->engine);
  if (pages && !mm_pages_check(pages, NULL, &err)) fail_msg("%s", err.text);
  if (pages) assert_int_equal(mm_pages_free(pages), mm_pages_count(pages));
  for (uint32_t i = 0; i < serving_slots; i++) assert_int_equal(mm_engine_held(w->engine, i), 0);
  serving_poisoned = NULL;
  mm_engine_close(w->engine);
  mm_engine_close(w->alone);
  ref_uncut(w->shards);
  ref_free(&w->ref);
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->changed);
}

/* ---- callbacks ---- */

static void serving_mask(client *c, uint32_t tokens) {
  for (uint32_t i = 0; i < 16; i++) c->mask[i] = tokens % 2 ? UINT32_C(0x55555555) : UINT32_C(0xaaaaaaaa);
}

static const uint32_t *client_allow(void *user) {
  client *c = user;
  serving_mask(c, c->got_count); /* the scheduler's thread alone writes it */
  return c->mask;
}

static bool client_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *p) {
  client *c = user;
  pthread_mutex_lock(&c->serving->lock);
  const uint32_t n = c->got_count++;
  c->cached = p->cached_tokens;
  if (n == 0 && c->watched) c->watched_got = c->watched->got_count;
  if (c->done) snprintf(c->wrong, sizeof c->wrong, "a token after done");
  if (n < c->want_count && c->want[n] != id) snprintf(c->wrong, sizeof c->wrong, "token %u: found %d, expected %d", n, id, c->want[n]);
  if (n >= c->want_count) snprintf(c->wrong, sizeof c->wrong, "%u tokens, expected %u", n + 1, c->want_count);
  if (p->prompt_tokens != c->r.prompt_count || p->reply_tokens != n + 1 || p->cached_tokens >= c->r.prompt_count)
    snprintf(c->wrong, sizeof c->wrong, "progress: %u of the prompt, %u cached, %u of the reply", p->prompt_tokens, p->cached_tokens,
             p->reply_tokens);
  const uint32_t top = c->r.sampling.top_logprobs;
  if (!logprobs != !top || (top && n < c->want_count && memcmp(logprobs, c->want_logprob[n], (1 + top) * sizeof *logprobs) != 0))
    snprintf(c->wrong, sizeof c->wrong, "token %u: other logprobs", n);
  if (n < REPLY_MAX) c->got[n] = id;
  pthread_mutex_unlock(&c->serving->lock);
  return n + 1 != c->leave_at;
}

static void client_done(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  client *c = user;
  pthread_mutex_lock(&c->serving->lock);
  if (c->done) snprintf(c->wrong, sizeof c->wrong, "done twice");
  if (p->reply_tokens != c->got_count) snprintf(c->wrong, sizeof c->wrong, "done: %u tokens of %u", p->reply_tokens, c->got_count);
  if (!err != (reason != MM_FINISH_ERROR)) snprintf(c->wrong, sizeof c->wrong, "done: an error that is none");
  if (err) c->err = *err;
  c->finish = reason;
  c->done = true;
  c->order = ++c->serving->ends;
  pthread_cond_broadcast(&c->serving->changed);
  pthread_mutex_unlock(&c->serving->lock);
}

/* ---- the oracle ---- */

static void oracle_step(const client *c, const int32_t *id, uint32_t count, uint32_t pos, mm_sampling *set, int32_t *chosen) {
  const mm_span span = {0, 0, count, pos};
  const uint32_t out = count - 1;
  mm_err err = {0};
  const mm_batch b = {.tokens = count, .id = id, .span_count = 1, .span = &span, .out_count = 1, .out = &out, .sampling = set};
  mm_engine *e = c->serving->alone;
  if (!mm_engine_queue(e, &b, &err) || !mm_engine_collect(e, chosen, &err)) fail_msg("%s", err.text);
}

/* The request's output when it runs alone. */
static void oracle(client *c) {
  const mm_request *r = &c->r;
  mm_sampling set = r->sampling;
  set.prompt = r->prompt_count;
  set.allowed = c->masked ? c->mask : NULL;
  int32_t id = 0;
  c->want_finish = MM_FINISH_LENGTH;
  for (c->want_count = 0; c->want_count < r->max_tokens;) {
    const uint32_t n = c->want_count;
    serving_mask(c, n);
    set.logprobs = set.top_logprobs ? c->want_logprob[n] : NULL;
    oracle_step(c, n ? &id : c->prompt, n ? 1 : r->prompt_count, n ? r->prompt_count + n - 1 : 0, &set, &id);
    c->want[c->want_count++] = id;
    bool stops = c->want_count == c->leave_at;
    for (uint32_t i = 0; i < r->stop_count; i++) stops |= r->stop[i] == id;
    if (!stops) continue;
    c->want_finish = MM_FINISH_STOP;
    break;
  }
}

/* ---- clients ---- */

/* Pointers of the request, after its arrays were filled. */
static void client_ready(serving *w, client *c) {
  c->serving = w;
  c->r.prompt = c->prompt;
  c->r.stop = c->stop;
  c->r.boundary = c->boundary;
  c->r.sampling.bias = &c->bias;
  if (c->r.sampling.top_p == 0) c->r.sampling.top_p = 1;
  c->r.user = c;
  c->r.allow = c->masked ? client_allow : NULL;
  c->r.token = client_token;
  c->r.done = client_done;
  c->r.drafts = MM_DRAFTS - c->fewer;
  oracle(c);
}

static inline void client_submit(serving *w, client *c) {
  mm_err err = {0};
  if (!mm_scheduler_submit(w->scheduler, &c->r, &c->ticket, &err)) fail_msg("%s", err.text);
}
/* Submits all of them, which are ready, the others while the first is in its first step, which waits until serving_closed is false. */
static inline void clients_submit_held(serving *w, client *c, uint32_t n) {
  atomic_store(&serving_waits, false);
  atomic_store(&serving_closed, true);
  client_submit(w, &c[0]);
  while (!atomic_load(&serving_waits)) serving_pause();
  for (uint32_t i = 1; i < n; i++) client_submit(w, &c[i]);
}

static void client_wait(client *c) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 300; /* a machine may be busy */
  pthread_mutex_lock(&c->serving->lock);
  int late = 0;
  while (!c->done && !late) late = pthread_cond_timedwait(&c->serving->changed, &c->serving->lock, &until);
  pthread_mutex_unlock(&c->serving->lock);
  if (late) fail_msg("no end of a request within five minutes");
}

/* Judges a client that has ended: the output is the oracle's, all of it unless the request was cancelled. */
static inline void client_verdict(const client *c) {
  if (c->wrong[0]) fail_msg("%s", c->wrong);
  if (c->finish == MM_FINISH_ERROR) fail_msg("%s", c->err.text);
  if (c->finish == MM_FINISH_CANCELLED || c->finish == MM_FINISH_DEADLINE) return;
  assert_int_equal(c->finish, c->want_finish);
  assert_int_equal(c->got_count, c->want_count);
}

static inline void client_check(client *c) {
  client_wait(c);
  client_verdict(c);
}

/* The figures once nothing runs any more. */
static inline void serving_settled(serving *w, mm_scheduler_stats *s) {
  do mm_scheduler_stats_read(w->scheduler, s);
  while (s->running || s->waiting);
}

#endif
