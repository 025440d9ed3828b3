/* Requests in and out: submit and cancel from any thread, the scheduler's own thread and its loop. */
#include "runtime/schedule/scheduler.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

double mm_scheduler_cpu(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a request comes ---- */

static void free_job(job *j) {
  mm_gram_index_close(&j->grams);
  MM_FREE(j->token, (void *)j->r.stop, (void *)j->r.boundary, (void *)j->r.sampling.bias, j);
}

/* *array = a copy of array[count]. */
static bool copy_array(const void **array, size_t count, size_t size, mm_err *err) {
  void *own = count ? mm_calloc(count, size, err) : NULL;
  if (own) memcpy(own, *array, count * size);
  *array = own;
  return own || !count;
}

static job *copy_request(const mm_request *r, mm_err *err) {
  job *j = mm_calloc(1, sizeof *j, err);
  if (!j) return NULL;
  j->r = *r;
  j->slot = -1;
  j->lookup.acceptance[0] = j->lookup.acceptance[1] = 1;
  j->count = r->prompt_count;
  j->r.sampling.prompt = r->prompt_count;
  const bool stop = copy_array((const void **)&j->r.stop, r->stop_count, sizeof *r->stop, err),
             boundary = copy_array((const void **)&j->r.boundary, r->boundary_count, sizeof *r->boundary, err),
             bias = copy_array((const void **)&j->r.sampling.bias, r->sampling.bias_count, sizeof *r->sampling.bias, err);
  if (stop && boundary && bias && MM_GROW(j->token, &j->token_cap, r->prompt_count + (size_t)1, err)) {
    memcpy(j->token, r->prompt, r->prompt_count * sizeof *j->token);
    j->r.prompt = NULL;
    return j;
  }
  free_job(j);
  return NULL;
}

static bool refuse(mm_err *err, const char *what, int64_t found, const char *expected, uint64_t limit) {
  return mm_fail(err, MM_USAGE, "E_BATCH", mm_at(NULL, NULL), "%s: found %lld, expected %s %llu", what, (long long)found, expected,
                 (unsigned long long)limit);
}

/* Checks that the request could run if it were alone. */
static bool check_request(const mm_scheduler *s, const mm_request *r, mm_err *err) {
  uint64_t most = mm_engine_limits(s->engine)->max_positions;
  if (s->pages) most = mm_min(most, (uint64_t)mm_pages_each(s->pages) * MM_PAGE);
  if (r->prompt_count == 0) return refuse(err, "tokens of the prompt", 0, "at least", 1);
  const uint64_t total = (uint64_t)r->prompt_count + r->max_tokens;
  if (total > most) return refuse(err, "tokens of prompt and reply", (int64_t)total, "at most", most);
  for (uint32_t i = 0; i < r->prompt_count; i++)
    if (r->prompt[i] < 0 || (uint32_t)r->prompt[i] >= s->vocab) return refuse(err, "id of the prompt", r->prompt[i], "less than", s->vocab);
  for (uint32_t i = 0; i < r->boundary_count; i++)
    if (r->boundary[i] > r->prompt_count || (i && r->boundary[i] <= r->boundary[i - 1]))
      return refuse(err, "boundary of the prompt", r->boundary[i], "rising ones, at most", r->prompt_count);
  mm_logprob logprob;
  mm_sampling set = r->sampling;
  const uint32_t all = 0;
  if (r->allow) set.allowed = &all;
  set.logprobs = set.top_logprobs || set.logprobs ? &logprob : NULL;
  if (!mm_sampling_check(&set, s->vocab, err)) return false;
  const uint32_t scores = r->score ? MM_SAMPLES_BIAS | MM_SAMPLES_LOGPROBS : 0;
  const uint32_t lacks = (mm_sampling_options(&set) | scores) & ~mm_engine_samples(s->engine);
  return !lacks ||
         mm_fail(err, MM_UNSUPPORTED, "E_SAMPLING", mm_at(NULL, NULL), "found %s; the device's sampler has none", mm_sampling_word(lacks));
}

uint64_t mm_scheduler_capacity(const mm_scheduler *s) { return (uint64_t)s->slots + s->c.queue_max; }

/* The lock is held. Counts those that are refused. */
static bool may_enter(mm_scheduler *s, uint32_t count, mm_err *err) {
  if (s->closing) return mm_fail(err, MM_LIMIT, "E_DRAINING", mm_at(NULL, NULL), "no more requests are taken: the server is about to end");
  if ((uint64_t)s->live + s->reserved + count <= mm_scheduler_capacity(s)) return true;
  s->stats.refused += count;
  if (count > 1)
    return mm_fail(err, MM_LIMIT, "E_QUEUE", mm_at(NULL, NULL), "%u requests run or wait, and the queue has no room for %u more",
                   s->live + s->reserved, count);
  return mm_fail(err, MM_LIMIT, "E_QUEUE", mm_at(NULL, NULL), "%u requests run or wait, and the queue has room for no more",
                 s->live + s->reserved);
}

bool mm_scheduler_reserve(mm_scheduler *s, uint32_t count, mm_err *err) {
  pthread_mutex_lock(&s->lock);
  const bool entered = may_enter(s, count, err);
  if (entered) s->reserved += count;
  pthread_mutex_unlock(&s->lock);
  return entered;
}

void mm_scheduler_release(mm_scheduler *s, uint32_t count) {
  pthread_mutex_lock(&s->lock);
  s->reserved -= count;
  pthread_mutex_unlock(&s->lock);
}

/* The lock is held. */
static void admit(mm_scheduler *s, job *j) {
  j->ticket = ++s->tickets;
  j->next = s->living;
  if (j->next) j->next->previous = j;
  s->living = j;
  j->next_in = s->incoming;
  s->incoming = j;
  s->live++;
  s->stats.requests++;
  pthread_cond_signal(&s->changed);
}

bool mm_scheduler_submit(mm_scheduler *s, const mm_request *r, uint64_t *ticket, mm_err *err) {
  job *j = check_request(s, r, err) ? copy_request(r, err) : NULL;
  pthread_mutex_lock(&s->lock);
  if (r->reserved) s->reserved--;
  const bool taken = j && may_enter(s, 1, err);
  if (taken) admit(s, j), *ticket = j->ticket;
  pthread_mutex_unlock(&s->lock);
  if (j && !taken) free_job(j);
  return taken;
}

void mm_scheduler_cancel(mm_scheduler *s, uint64_t ticket) {
  pthread_mutex_lock(&s->lock);
  for (job *j = s->living; j; j = j->next)
    if (j->ticket == ticket) atomic_store(&j->cancelled, true);
  pthread_mutex_unlock(&s->lock);
}

/* ---- a request goes ---- */

void mm_scheduler_forget(job *j) {
  j->rows_out--;
  if (j->ended && !j->rows_out) free_job(j);
}

mm_progress mm_scheduler_progress(const job *j) {
  return (mm_progress){j->r.prompt_count, j->cached, j->count - j->r.prompt_count, j->drafted, j->accepted, j->turn, j->began};
}

/* Brings the thread's counters up to date. */
static void count(mm_scheduler *s) {
  mm_scheduler_stats *own = &s->own;
  own->pages_free = s->pages ? mm_pages_free(s->pages) : 0;
  own->pages_cached = 0;
  for (uint32_t g = 0; g < s->groups.count; g++) {
    s->groups.tokens[g] = mm_schedule_tokens(s, g);
    own->pages_cached += s->groups.cache ? mm_prefix_cache_pages(s->groups.cache, g) : 0;
  }
  own->cache_bytes = s->groups.cache ? mm_prefix_cache_state_bytes(s->groups.cache) : 0;
  if (s->offload.on && s->groups.cache) {
    const mm_prefix_cache_counts n = mm_prefix_cache_counted(s->groups.cache);
    own->places = n.places, own->places_used = n.offloaded, own->pages_out = n.out, own->pages_in = n.in;
    own->blocks = n.blocks, own->blocks_used = n.on_disk, own->pages_written = n.written, own->pages_read = n.read;
    own->disk_failed = n.failed;
  }
  mm_receive_stats(s, &own->transfer);
}

/* The lock is held. Copies them to those that other threads read; `running` goes with the loads of experts, after the step. */
static void show(mm_scheduler *s, uint32_t running) {
  s->own.running = running;
  s->own.requests = s->stats.requests;
  s->own.refused = s->stats.refused;
  s->stats = s->own;
  memcpy(s->groups.shown, s->groups.tokens, s->groups.count * sizeof *s->groups.tokens);
}

static void publish(mm_scheduler *s) {
  count(s);
  pthread_mutex_lock(&s->lock);
  show(s, s->running);
  pthread_mutex_unlock(&s->lock);
}

void mm_scheduler_end(mm_scheduler *s, job *j, mm_finish reason, const mm_err *err) {
  const uint32_t ran = j->slot >= 0; /* perhaps for one step alone, of which nothing was shown yet */
  mm_receive_leave(j);
  mm_schedule_leave(s, j, reason != MM_FINISH_ERROR);
  mm_drafts_keep(s, j);
  const mm_progress progress = mm_scheduler_progress(j);
  count(s);
  pthread_mutex_lock(&s->lock); /* before the client knows, its place is free */
  *(j->previous ? &j->previous->next : &s->living) = j->next;
  if (j->next) j->next->previous = j->previous;
  s->live--;
  show(s, (uint32_t)mm_max(s->stats.running, ran)); /* and its tokens are counted */
  pthread_mutex_unlock(&s->lock);
  j->r.done(j->r.user, reason, &progress, reason == MM_FINISH_ERROR ? err : NULL);
  j->ended = true;
  if (!j->rows_out) free_job(j);
}

/* ---- the thread ---- */

/* Appends incoming jobs, oldest first, to the waiting jobs. */
static void take(mm_scheduler *s, job *incoming) {
  job *oldest = NULL;
  for (job *j = incoming, *next; j; j = next) {
    next = j->next_in;
    j->next_in = oldest;
    oldest = j;
  }
  for (job *j = oldest, *next; j; j = next) {
    next = j->next_in;
    mm_schedule_join(s, j);
  }
}

#define WARM_AFTER 0.5 /* seconds without a request after which one size is warmed */
#define LOOK_AFTER 0.1 /* and after which it is looked whether copies to the disk have ended, or a failed engine is to be tried */

/* A size of 1, 2, 3, 4, 6, 8, 12 … rows, up to the slots, is not warmed yet. Before the first request none is: that would make it wait for
 * weights that it does not need yet. */
static bool may_warm(const mm_scheduler *s) { return s->c.warm && s->queued && s->health.warmed < s->slots; }

/* The lock is held. Waits for a change; returns true without one, after LOOK_AFTER or WARM_AFTER, where there is something to do then. */
static bool wait_for_change(mm_scheduler *s, bool copying) {
  if (!copying && !may_warm(s)) return pthread_cond_wait(&s->changed, &s->lock), false;
  const struct timespec until = mm_later(copying ? LOOK_AFTER : WARM_AFTER);
  return pthread_cond_clockwait(&s->changed, &s->lock, CLOCK_MONOTONIC, &until) == ETIMEDOUT;
}

/* The next size. One that fails is not tried again: a request's step says what is wrong. After it nobody knows what pages hold. */
static void warm_next(mm_scheduler *s) {
  const uint32_t n = s->health.warmed, next = n < 2 ? n + 1 : n & (n - 1) ? n / 3 * 4 : n / 2 * 3;
  mm_err err = {0};
  s->health.warmed = (uint32_t)mm_min(next, s->slots);
  if (mm_engine_warm(s->engine, &s->health.warmed, 1, &err)) return;
  s->health.warmed = s->slots;
  mm_reuse_clear(s);
}

/* Waits until there is something to do; false when it is over. */
static bool wait_for_work(mm_scheduler *s) {
  pthread_mutex_lock(&s->lock);
  while (!s->live && s->queued == s->collected && !s->closing && s->health.failed <= 0) {
    const bool copying = mm_offload_copying(s) || mm_receive_busy(s);
    if (!wait_for_change(s, copying)) continue;
    pthread_mutex_unlock(&s->lock);
    if (copying) {
      mm_offload_poll(s, false);
      mm_receive_poll(s);
      publish(s); /* an idle server says what is on its disk */
    } else {
      warm_next(s);
    }
    pthread_mutex_lock(&s->lock);
  }
  const bool over = s->closing && !s->live && s->queued == s->collected;
  job *incoming = s->incoming;
  s->incoming = NULL;
  pthread_mutex_unlock(&s->lock);
  take(s, incoming);
  return !over;
}

/* Once a second at most while requests run, since the device's steps are waited for. */
static void read_load(mm_scheduler *s) {
  const double now = mm_now();
  mm_err err = {0};
  if (s->running && now - s->load.read < 1) return;
  s->load.read = now;
  if (!mm_engine_expert_load(s->engine, s->load.own, &err)) return; /* the next step fails too, and says so */
  pthread_mutex_lock(&s->lock);
  memcpy(s->load.shown, s->load.own, s->load.count * sizeof *s->load.own);
  pthread_mutex_unlock(&s->lock);
}

/* The engine has failed, and is tried again in a while. Requests that wait leave meanwhile, or end with a lost engine; what other servers
 * wait for or send goes on. */
static void rest(mm_scheduler *s) {
  mm_err error;
  mm_schedule_end_over(s);
  mm_offload_poll(s, false);
  mm_send_poll(s);
  mm_receive_poll(s);
  while (mm_scheduler_lost(s, &error) && s->waiting_count) mm_scheduler_end(s, s->waiting[s->waiting_count - 1], MM_FINISH_ERROR, &error);
  publish(s);
  pthread_mutex_lock(&s->lock);
  const struct timespec until = mm_later(LOOK_AFTER);
  if (!s->closing || s->live) pthread_cond_clockwait(&s->changed, &s->lock, CLOCK_MONOTONIC, &until);
  pthread_mutex_unlock(&s->lock);
}

static void *work(void *arg) {
  mm_scheduler *s = arg;
  while (wait_for_work(s)) {
    if (!mm_health_check(s)) {
      rest(s);
      continue;
    }
    mm_schedule(s);
    const bool queued = mm_step_queue(s);
    const uint64_t keep = queued && s->ahead;
    if (!queued && s->queued > s->collected)
      mm_step_collect(s);
    else if (!queued)
      mm_offload_wait(s), mm_transfer_idle(s);
    while (queued && s->queued - s->collected > keep) mm_step_collect(s);
    if (!s->running && !s->waiting_count) mm_offload_poll(s, true); /* the next request may be long in coming */
    s->own.own_seconds = mm_scheduler_cpu() - s->inside;
    read_load(s); /* who sees that nothing runs sees what ran */
    publish(s);
  }
  return NULL;
}

/* ---- open and close ---- */

static bool check_config(const mm_engine *e, const mm_scheduler_config *c, mm_err *err) {
  const uint32_t most = mm_engine_limits(e)->max_tokens;
  if (!c->step_tokens || c->step_tokens > most)
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found steps of %u tokens, expected 1 to %u", c->step_tokens, most);
  if (c->drafts > MM_DRAFTS)
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u tokens to draft, expected at most %u", c->drafts, MM_DRAFTS);
  return !c->batch_invariant || mm_engine_batch_invariant(e) ||
         mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "found the batch-invariant mode; on this device the bits of a row hang on what else is in its step");
}

static void free_scheduler(mm_scheduler *s) {
  mm_send_close(s);
  mm_receive_close(s);
  mm_reuse_close(s);
  mm_drafts_close(s);
  mm_step_close(s);
  MM_FREE(s->waiting, s->turns.job, s->slot, s->load.own, s->load.shown, s->groups.tokens, s->groups.shown, s->mark);
  pthread_mutex_destroy(&s->lock);
  pthread_cond_destroy(&s->changed);
  free(s);
}

mm_scheduler *mm_scheduler_open(mm_engine *engine, const mm_scheduler_config *c, mm_err *err) {
  if (!check_config(engine, c, err)) return NULL;
  mm_scheduler *s = mm_calloc(1, sizeof *s, err);
  if (!s) return NULL;
  const mm_model *m = mm_engine_model(engine);
  s->engine = engine;
  s->c = *c;
  s->slots = mm_engine_limits(engine)->slots;
  s->vocab = m->vocab;
  s->pages = mm_engine_pages(engine);
  s->groups.count = mm_engine_groups(engine);
  s->lightning = mm_engine_state_bytes(engine) > 0;
  s->own.slots = s->slots;
  s->own.pages = s->pages ? mm_pages_count(s->pages) : 0;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  s->load.count = (size_t)m->layers * m->experts;
  if ((s->groups.tokens = mm_calloc(s->groups.count, sizeof *s->groups.tokens, err)) &&
      (s->groups.shown = mm_calloc(s->groups.count, sizeof *s->groups.shown, err)) &&
      (s->slot = mm_calloc(s->slots, sizeof *s->slot, err)) && (s->load.own = mm_calloc(s->load.count, sizeof *s->load.own, err)) &&
      (s->load.shown = mm_calloc(s->load.count, sizeof *s->load.shown, err)) && (s->mark = mm_calloc(s->own.pages / 8 + 1, 1, err)) &&
      mm_step_open(s, err) && mm_reuse_open(s, err) && mm_send_open(s, err) && mm_receive_open(s, err) && mm_drafts_open(s, err)) {
    publish(s);
    const int failed = pthread_create(&s->thread, NULL, work, s);
    if (!failed && mm_send_start(s, err)) return s;
    if (!failed) {
      mm_scheduler_close(s, false);
      return NULL;
    }
    mm_fail_thread(err, "start the scheduler's thread", failed);
  }
  free_scheduler(s);
  return NULL;
}

void mm_scheduler_close(mm_scheduler *s, bool drain) {
  if (!s) return;
  mm_send_stop(s, drain);
  pthread_mutex_lock(&s->lock);
  s->closing = true;
  for (job *j = s->living; j && !drain; j = j->next) atomic_store(&j->cancelled, true);
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, NULL);
  free_scheduler(s);
}

void mm_scheduler_stats_read(mm_scheduler *s, mm_scheduler_stats *out) {
  pthread_mutex_lock(&s->lock);
  *out = s->stats;
  out->waiting = s->live > out->running ? s->live - out->running : 0;
  pthread_mutex_unlock(&s->lock);
  mm_send_stats(s, &out->transfer);
}

bool mm_scheduler_has_cache(const mm_scheduler *s) { return s->groups.cache; }

uint32_t mm_scheduler_groups(const mm_scheduler *s) { return s->groups.count; }

void mm_scheduler_group_tokens(mm_scheduler *s, uint64_t *tokens) {
  pthread_mutex_lock(&s->lock);
  memcpy(tokens, s->groups.shown, s->groups.count * sizeof *s->groups.shown);
  pthread_mutex_unlock(&s->lock);
}

void mm_scheduler_expert_load(mm_scheduler *s, uint64_t *load) {
  pthread_mutex_lock(&s->lock);
  memcpy(load, s->load.shown, s->load.count * sizeof *load);
  pthread_mutex_unlock(&s->lock);
}
