/* Tensor-parallel ranks of a process group: barriers in shared memory, aborts, timeouts, and what is known of failed ranks. */
#include <errno.h>
#include <stdlib.h>

#include "runtime/engine/comm_inside.h"

void mm_comm_ranks(const mm_comm *c, uint32_t process, uint32_t *first, uint32_t *count) {
  const uint64_t begin = (uint64_t)c->stage * c->ranks, end = begin + c->ranks;
  const uint64_t from = mm_max(begin, (uint64_t)process * c->per), to = mm_min(end, (process + UINT64_C(1)) * c->per);
  *first = from < to ? (uint32_t)(from - begin) : 0, *count = from < to ? (uint32_t)(to - from) : 0;
}

mm_comm *mm_comm_open_across(uint32_t ranks, mm_process_group *w, uint32_t stage, uint32_t per, mm_err *err) {
  mm_comm *c = mm_calloc(1, sizeof *c + ranks * (3 * sizeof c->x[0] + sizeof *c->arrived_at + 2 * sizeof *c->sent), err);
  if (!c) return NULL;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->turn, NULL);
  c->ranks = c->here = ranks;
  c->process_group = w, c->stage = stage, c->per = per;
  c->mailbox = c->x + ranks;
  c->gathered = (const void **)(c->mailbox + ranks);
  c->arrived_at = (uint64_t *)(void *)(c->gathered + ranks);
  c->sent = (bool *)(c->arrived_at + ranks);
  c->received = c->sent + ranks;
  if (w) mm_comm_ranks(c, w->process, &c->first, &c->here);
  return c;
}

mm_comm *mm_comm_open(uint32_t ranks, mm_err *err) { return mm_comm_open_across(ranks, NULL, 0, ranks, err); }

bool mm_comm_split(mm_comm *c, uint32_t count, mm_err *err) {
  if (!(c->part = mm_calloc(count, sizeof *c->part, err))) return false;
  for (; c->parts < count; c->parts++) {
    if (!(c->part[c->parts] = mm_comm_open(c->ranks / count, err))) return false;
    c->part[c->parts]->whole = c;
  }
  return true;
}

mm_comm *mm_comm_part(mm_comm *c, uint32_t i) { return c->parts ? c->part[i] : c; }

void mm_comm_close(mm_comm *c) {
  if (!c) return;
  for (uint32_t i = 0; i < c->parts; i++) mm_comm_close(c->part[i]);
  free(c->part);
  pthread_cond_destroy(&c->turn);
  pthread_mutex_destroy(&c->lock);
  free(c->message);
  free(c);
}

static mm_comm *first_of(mm_comm *c) {
  if (c->whole) c = c->whole;
  while (c->before) c = c->before;
  return c;
}

/* Under the lock. */
static void abort_one(mm_comm *c) {
  c->aborted = true;
  if (c->word && *c->word == MM_COMM_GOES_ON) *c->word = MM_COMM_ABORTED;
  pthread_cond_broadcast(&c->turn);
}

static void lock_and_abort(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  abort_one(c);
  pthread_mutex_unlock(&c->lock);
}

void mm_comm_abort(mm_comm *c) {
  for (c = first_of(c); c; c = c->next) {
    lock_and_abort(c);
    for (uint32_t i = 0; i < c->parts; i++) lock_and_abort(c->part[i]);
  }
}

void mm_comm_fail(mm_comm *c, const mm_err *reason) {
  mm_comm *const first = first_of(c);
  pthread_mutex_lock(&first->lock);
  if (first->reason.status == MM_OK) first->reason = *reason;
  pthread_mutex_unlock(&first->lock);
  mm_comm_abort(c);
}

bool mm_comm_fail_reason(mm_comm *c, mm_err *cause) {
  mm_comm *const first = first_of(c);
  pthread_mutex_lock(&first->lock);
  const bool known = first->reason.status != MM_OK;
  if (known) *cause = first->reason;
  pthread_mutex_unlock(&first->lock);
  return known;
}

void mm_comm_reset(mm_comm *c) {
  for (uint32_t i = 0; i < c->parts; i++) mm_comm_reset(c->part[i]);
  pthread_mutex_lock(&c->lock); /* who fails is no rank, and may come now */
  c->aborted = false;
  c->failure_known = c->no_memory = false;
  if (c->word && *c->word != MM_COMM_GOES_ON) c->failed_before = true, c->last_word = *c->word;
  c->arrived = c->timed_out = c->left = 0;
  for (uint32_t r = 0; r < c->ranks; r++) c->mailbox[r] = NULL, c->arrived_at[r] = 0, c->sent[r] = c->received[r] = false;
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_aborted(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  const bool aborted = c->aborted;
  pthread_mutex_unlock(&c->lock);
  return aborted;
}

double mm_comm_gather_timeout(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  const double timeout = c->timeout;
  pthread_mutex_unlock(&c->lock);
  return timeout;
}

double mm_comm_timeout(mm_comm *c) {
  const double timeout = mm_comm_gather_timeout(c);
  return timeout > 0 ? timeout + 0.5 : 0;
}

/* Under the lock: until something has changed. False when the time is over. */
static bool wait_until(mm_comm *c, const struct timespec *until) {
  return (until ? pthread_cond_clockwait(&c->turn, &c->lock, CLOCK_MONOTONIC, until) : pthread_cond_wait(&c->turn, &c->lock)) != ETIMEDOUT;
}

bool mm_comm_barrier(mm_comm *c, uint32_t rank, double timeout) {
  pthread_mutex_lock(&c->lock);
  const struct timespec until = mm_later(timeout);
  const uint64_t generation = c->generation;
  bool lost = false;
  c->arrived_at[rank] = generation + 1;
  if (!c->aborted && ++c->arrived == c->here) {
    c->arrived = 0;
    c->inside = c->here;
    c->generation++;
    pthread_cond_broadcast(&c->turn);
  }
  while (c->generation == generation && !c->aborted && !lost) lost = !wait_until(c, timeout > 0 ? &until : NULL);
  const bool passed = c->generation != generation;
  lost = lost && !passed && !c->aborted;
  if (lost) c->timed_out = rank + 1, abort_one(c); /* before a rank that comes now waits for ranks that are gone */
  for (uint32_t r = c->first + c->here; lost && r-- > c->first;)
    if (c->arrived_at[r] != generation + 1) c->awaited = r;
  pthread_mutex_unlock(&c->lock);
  if (lost) mm_comm_abort(c);
  return passed;
}

void mm_comm_barrier_end(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  if (--c->inside == 0) pthread_cond_broadcast(&c->turn);
  while (c->inside > 0) pthread_cond_wait(&c->turn, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_failed(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  const bool failed_before = c->failed_before;
  pthread_mutex_unlock(&c->lock);
  return failed_before;
}

bool mm_comm_failed_now(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  const bool failed_before = c->failed_before || (c->word && *c->word != MM_COMM_GOES_ON);
  pthread_mutex_unlock(&c->lock);
  return failed_before;
}

bool mm_comm_root_cause(mm_comm *c, mm_err *err) {
  pthread_mutex_lock(&c->lock);
  const uint32_t now = c->word ? *c->word : MM_COMM_GOES_ON, word = now != MM_COMM_GOES_ON ? now : c->last_word;
  const double timeout = c->timeout;
  pthread_mutex_unlock(&c->lock);
  if ((word & 0xff) != MM_COMM_TIMED_OUT)
    return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "some rank failed while a step was under way");
  return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "rank %u waited %.1f s for rank %u: timeout", word >> 8 & 0xff, timeout,
                 word >> 16);
}

void mm_comm_recover(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  c->failed_before = false;
  pthread_mutex_unlock(&c->lock);
}

void mm_comm_set_timeout(mm_comm *c, double seconds) {
  for (uint32_t i = 0; i < c->parts; i++) mm_comm_set_timeout(c->part[i], seconds);
  pthread_mutex_lock(&c->lock);
  c->timeout = seconds;
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_timed_out(mm_comm *c, uint32_t rank, uint32_t *awaited) {
  pthread_mutex_lock(&c->lock);
  const bool mine = c->timed_out == rank + 1;
  *awaited = c->awaited;
  pthread_mutex_unlock(&c->lock);
  return mine;
}

void mm_comm_watch(mm_comm *c, volatile uint32_t *word) {
  pthread_mutex_lock(&c->lock);
  c->word = word;
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_is_across(const mm_comm *c) { return c->here < c->ranks; }
