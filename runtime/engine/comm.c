/* Tensor-parallel ranks meeting in shared memory; those of other processes by way of a world.
 *
 * Between processes there is nothing but exchanges in an order that all know, and each says first whether the sender is well. A process
 * whose ranks have failed makes the exchange that the others come to next, says so in it, and is done (mm_comm_leave); whoever hears it
 * breaks and makes no more of that meeting either. Every exchange therefore has its partner, whatever fails where. */
#include "runtime/engine/comm.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BORDER_TAG 256               /* + a rank: rows to it from the stage before. A sum's tag: 1 + the stage's number */
#define PIECE      ((size_t)1 << 22) /* of rows to another process, so that a failed one can take them in without room for all */

struct mm_comm {
  pthread_mutex_t lock;
  pthread_cond_t turn;
  mm_process_group *world;         /* NULL: all ranks are of this process */
  uint32_t stage, per;             /* per: ranks of a process, numbered stage · ranks + rank */
  uint32_t first, here;            /* ranks [first, first + here) are of this process */
  uint32_t ranks, arrived, inside; /* inside: met, and not done with each other's buffers */
  uint64_t meeting;                /* meetings completed */
  bool broken;
  double timeout;           /* of a gathering; 0: without end */
  uint32_t waiter, awaited; /* the rank that timed out, + 1, and the rank that it waited for */
  uint64_t *came;           /* [ranks] the meeting that each came to last, + 1 */
  volatile uint32_t *word;  /* set by a break, or NULL */
  mm_comm *before, *next;   /* stages */
  float **box;              /* [ranks]: what the stage before sends and nobody took */
  const void **brought;     /* [ranks]: what each brought to the current gathering */
  bool *sent, *received;    /* [ranks]: rows across a border between processes */
  bool failure_known;       /* this process or another has said that it failed, */
  bool failed_before;       /* and mm_comm_recover has not reset that; or the word reported a failure */
  uint32_t said;            /* by the word when it was not MM_COMM_GOES_ON last */
  bool lacks;               /* memory */
  mm_err why;               /* of the first stage: given to mm_comm_fail */
  uint32_t left;            /* ranks of this process that are back from the step */
  char *across;             /* [ranks, n] of the sum or meeting under way, each rank's in its place */
  size_t across_cap;
  float *x[]; /* [ranks]: the same to the current sum */
};

/* Which ranks of the stage a process has. */
static void ranks_of(const mm_comm *c, uint32_t process, uint32_t *first, uint32_t *count) {
  const uint64_t begin = (uint64_t)c->stage * c->ranks, end = begin + c->ranks;
  const uint64_t from = mm_max(begin, (uint64_t)process * c->per), to = mm_min(end, (process + UINT64_C(1)) * c->per);
  *first = from < to ? (uint32_t)(from - begin) : 0, *count = from < to ? (uint32_t)(to - from) : 0;
}

static uint32_t process_of(const mm_comm *c, uint32_t rank) { return (c->stage * c->ranks + rank) / c->per; }
static bool is_here(const mm_comm *c, uint32_t rank) { return !c->world || process_of(c, rank) == c->world->process; }

mm_comm *mm_comm_open_across(uint32_t ranks, mm_process_group *w, uint32_t stage, uint32_t per, mm_err *err) {
  mm_comm *c = mm_calloc(1, sizeof *c + ranks * (3 * sizeof c->x[0] + sizeof *c->came + 2 * sizeof *c->sent), err);
  if (!c) return NULL;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->turn, NULL);
  c->ranks = c->here = ranks;
  c->world = w, c->stage = stage, c->per = per;
  c->box = c->x + ranks;
  c->brought = (const void **)(c->box + ranks);
  c->came = (uint64_t *)(void *)(c->brought + ranks);
  c->sent = (bool *)(c->came + ranks);
  c->received = c->sent + ranks;
  if (w) ranks_of(c, w->process, &c->first, &c->here);
  return c;
}

mm_comm *mm_comm_open(uint32_t ranks, mm_err *err) { return mm_comm_open_across(ranks, NULL, 0, ranks, err); }

void mm_comm_close(mm_comm *c) {
  if (!c) return;
  pthread_cond_destroy(&c->turn);
  pthread_mutex_destroy(&c->lock);
  free(c->across);
  free(c);
}

void mm_comm_link(mm_comm *from, mm_comm *to) {
  from->next = to;
  to->before = from;
}

static mm_comm *first_of(mm_comm *c) {
  while (c->before) c = c->before;
  return c;
}

/* Under the lock. */
static void break_one(mm_comm *c) {
  c->broken = true;
  if (c->word && *c->word == MM_COMM_GOES_ON) *c->word = MM_COMM_ABORTED;
  pthread_cond_broadcast(&c->turn);
}

void mm_comm_abort(mm_comm *c) {
  for (c = first_of(c); c; c = c->next) {
    pthread_mutex_lock(&c->lock);
    break_one(c);
    pthread_mutex_unlock(&c->lock);
  }
}

void mm_comm_fail(mm_comm *c, const mm_err *why) {
  mm_comm *const first = first_of(c);
  pthread_mutex_lock(&first->lock);
  if (first->why.status == MM_OK) first->why = *why;
  pthread_mutex_unlock(&first->lock);
  mm_comm_abort(c);
}

bool mm_comm_fail_reason(mm_comm *c, mm_err *why) {
  mm_comm *const first = first_of(c);
  pthread_mutex_lock(&first->lock);
  const bool known = first->why.status != MM_OK;
  if (known) *why = first->why;
  pthread_mutex_unlock(&first->lock);
  return known;
}

void mm_comm_reset(mm_comm *c) {
  pthread_mutex_lock(&c->lock); /* who fails is no rank, and may come now */
  c->broken = false;
  c->failure_known = c->lacks = false;
  if (c->word && *c->word != MM_COMM_GOES_ON) c->failed_before = true, c->said = *c->word;
  c->arrived = c->waiter = c->left = 0;
  for (uint32_t r = 0; r < c->ranks; r++) c->box[r] = NULL, c->came[r] = 0, c->sent[r] = c->received[r] = false;
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_aborted(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  const bool broken = c->broken;
  pthread_mutex_unlock(&c->lock);
  return broken;
}

/* Rows to the rank of stage `to` in another process, their size first: 0 where there will be none. */
static void send_away(mm_comm *to, uint32_t rank, float *x, uint64_t n) {
  const uint32_t tag = BORDER_TAG + to->stage * to->ranks + rank, process = process_of(to, rank);
  to->world->exchange(to->world, tag, &(mm_transfer){process, &n, sizeof n}, 1, NULL, 0, 0);
  for (uint64_t at = 0; at < n; at += PIECE)
    to->world->exchange(to->world, tag, &(mm_transfer){process, x + at, mm_min(PIECE, n - at) * sizeof *x}, 1, NULL, 0, 0);
}

/* Receives rows from the stage before in another process; x NULL: discards them. Returns false if the sender has no rows. */
static bool receive_away(mm_comm *c, uint32_t rank, float *x) {
  static float unwanted[PIECE]; /* what several ranks take in and nobody reads */
  const uint32_t tag = BORDER_TAG + c->stage * c->ranks + rank, process = process_of(c->before, rank);
  uint64_t n = 0;
  c->received[rank] = true;
  c->world->exchange(c->world, tag, NULL, 0, &(mm_transfer){process, &n, sizeof n}, 1, 0);
  for (uint64_t at = 0; at < n; at += PIECE)
    c->world->exchange(c->world, tag, NULL, 0, &(mm_transfer){process, x ? x + at : unwanted, mm_min(PIECE, n - at) * sizeof *x}, 1, 0);
  return n > 0;
}

void mm_comm_send(mm_comm *c, uint32_t rank, float *x, size_t n) {
  mm_comm *to = c->next;
  if (n == 0) return;
  if (!is_here(to, rank)) {
    if (mm_comm_aborted(c)) return;
    c->sent[rank] = true;
    send_away(to, rank, x, n);
    return;
  }
  pthread_mutex_lock(&to->lock);
  to->box[rank] = x;
  pthread_cond_broadcast(&to->turn);
  while (to->box[rank] && !to->broken) pthread_cond_wait(&to->turn, &to->lock);
  to->box[rank] = NULL;
  pthread_mutex_unlock(&to->lock);
}

bool mm_comm_receive(mm_comm *c, uint32_t rank, float *x, size_t n) {
  if (n == 0) return true;
  if (!is_here(c->before, rank)) {
    const bool came = receive_away(c, rank, x);
    if (!came) mm_comm_abort(c);
    return came;
  }
  pthread_mutex_lock(&c->lock);
  while (!c->box[rank] && !c->broken) pthread_cond_wait(&c->turn, &c->lock);
  const bool came = c->box[rank];
  if (came) memcpy(x, c->box[rank], n * sizeof *x);
  c->box[rank] = NULL;
  pthread_cond_broadcast(&c->turn);
  pthread_mutex_unlock(&c->lock);
  return came;
}

static double timeout_of(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  const double timeout = c->timeout;
  pthread_mutex_unlock(&c->lock);
  return timeout;
}

double mm_comm_timeout(mm_comm *c) {
  const double timeout = timeout_of(c);
  return timeout > 0 ? timeout + 0.5 : 0;
}

/* mine[bytes] to the stage's other processes, and theirs: `each` bytes of a rank, by ranks; or, each 0, as many of a process, by processes.
 */
static void swap(mm_comm *c, void *mine, size_t bytes, void *theirs, size_t each, double limit_s) {
  const uint32_t first = process_of(c, 0), last = process_of(c, c->ranks - 1), most = last - first + 1;
  mm_transfer out[most], in[most];
  uint32_t n = 0;
  for (uint32_t p = first; p <= last; p++) {
    uint32_t from, count;
    ranks_of(c, p, &from, &count);
    if (p == c->world->process) continue;
    out[n] = (mm_transfer){p, mine, bytes};
    in[n++] =
        each ? (mm_transfer){p, (char *)theirs + from * each, count * each} : (mm_transfer){p, (char *)theirs + (p - first) * bytes, bytes};
  }
  c->world->exchange(c->world, 1 + c->stage, out, n, in, n, limit_s);
}

/* Returns true if no process of the stage has failed. */
static bool agree(mm_comm *c, double limit_s) {
  uint32_t mine = mm_comm_aborted(c) || c->lacks, theirs[c->ranks];
  memset(theirs, 0, sizeof theirs);
  swap(c, &mine, sizeof mine, theirs, 0, limit_s);
  for (uint32_t i = 0; i < c->ranks; i++) mine |= theirs[i];
  if (!mine) return true;
  c->failure_known = c->failed_before = true;
  mm_comm_abort(c);
  return false;
}

/* By one rank of each process, while the others wait: x[r], or what rank r brought, is what those elsewhere have; n bytes of each. */
static void fetch(mm_comm *c, bool sums, size_t n) {
  const double limit_s = mm_comm_timeout(c);
  c->lacks = !MM_GROW(c->across, &c->across_cap, mm_max(n * c->ranks, 1), MM_IGNORED);
  if (!agree(c, limit_s)) return;
  for (uint32_t r = c->first; n && r < c->first + c->here; r++) memcpy(c->across + r * n, sums ? (const void *)c->x[r] : c->brought[r], n);
  swap(c, c->across + c->first * n, c->here * n, c->across, n, limit_s);
  for (uint32_t r = 0; r < c->ranks; r++) {
    if (is_here(c, r)) continue;
    if (sums)
      c->x[r] = (float *)(void *)(c->across + r * n);
    else
      c->brought[r] = c->across + r * n;
  }
}

bool mm_comm_leave(mm_comm *c, bool borders, bool late, mm_err *err) {
  pthread_mutex_lock(&c->lock);
  const bool last = ++c->left == c->here;
  pthread_mutex_unlock(&c->lock);
  if (!c->world || !last) return true;
  for (uint32_t r = c->first; borders && r < c->first + c->here; r++) {
    if (c->next && !is_here(c->next, r) && !c->sent[r]) send_away(c->next, r, NULL, 0);
    if (c->before && !is_here(c->before, r) && !c->received[r]) receive_away(c, r, NULL);
  }
  const double limit_s = mm_comm_timeout(c);
  if (c->here < c->ranks && !c->failure_known) agree(c, late && limit_s > 0 ? MM_LATE_S : limit_s);
  return !c->lacks || mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "out of memory for numbers of other processes");
}

/* Seconds from now. */
static struct timespec later(double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  const double whole = floor(seconds);
  t.tv_sec += (time_t)whole, t.tv_nsec += (long)((seconds - whole) * 1e9);
  if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
  return t;
}

/* Under the lock: until something has changed. False when the time is over. */
static bool wait_until(mm_comm *c, const struct timespec *until) {
  return (until ? pthread_cond_clockwait(&c->turn, &c->lock, CLOCK_MONOTONIC, until) : pthread_cond_wait(&c->turn, &c->lock)) != ETIMEDOUT;
}

/* Waits until every rank is here, for so many seconds if that is not 0; false when the meeting is broken before. */
static bool meet(mm_comm *c, uint32_t rank, double timeout) {
  pthread_mutex_lock(&c->lock);
  const struct timespec until = later(timeout);
  const uint64_t meeting = c->meeting;
  bool lost = false;
  c->came[rank] = meeting + 1;
  if (!c->broken && ++c->arrived == c->here) {
    c->arrived = 0;
    c->inside = c->here;
    c->meeting++;
    pthread_cond_broadcast(&c->turn);
  }
  while (c->meeting == meeting && !c->broken && !lost) lost = !wait_until(c, timeout > 0 ? &until : NULL);
  const bool met = c->meeting != meeting;
  lost = lost && !met && !c->broken;
  if (lost) c->waiter = rank + 1, break_one(c); /* before anyone who comes now meets ranks that are gone */
  for (uint32_t r = c->first + c->here; lost && r-- > c->first;)
    if (c->came[r] != meeting + 1) c->awaited = r;
  pthread_mutex_unlock(&c->lock);
  if (lost) mm_comm_abort(c);
  return met;
}

/* Waits until all that met are done with each other's buffers, also when the meeting was broken since: none of them waits for anything
 * else. */
static void part(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  if (--c->inside == 0) pthread_cond_broadcast(&c->turn);
  while (c->inside > 0) pthread_cond_wait(&c->turn, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

static float add(float a, float b) { return a + b; }
static float largest(float a, float b) { return a > b ? a : b; }

/* Each rank reduces its own range of elements and hands the result to all: every element is reduced once, so all ranks hold the same bits.
 */
static void reduce(mm_comm *c, uint32_t rank, float *x, size_t n, float (*op)(float, float)) {
  if (c->ranks == 1) return;
  c->x[rank] = x;
  if (!meet(c, rank, 0)) return;
  if (c->here < c->ranks) {
    if (rank == c->first) fetch(c, true, n * sizeof *x);
    part(c); /* not before fetch is done with x, whatever breaks meanwhile */
    if (!meet(c, rank, 0)) return;
  }
  size_t from = n * (rank - c->first) / c->here, to = n * (rank - c->first + 1) / c->here;
  for (size_t i = from; i < to; i++) {
    float v = c->x[0][i];
    for (uint32_t r = 1; r < c->ranks; r++) v = op(v, c->x[r][i]);
    for (uint32_t r = c->first; r < c->first + c->here; r++) c->x[r][i] = v;
  }
  part(c);
}

bool mm_comm_gather(mm_comm *c, uint32_t rank, const void *mine, const void **all) {
  c->brought[rank] = mine;
  if (!meet(c, rank, timeout_of(c))) return false;
  for (uint32_t r = 0; r < c->ranks; r++) all[r] = c->brought[r];
  part(c);
  return true;
}

bool mm_comm_is_across(const mm_comm *c) { return c->here < c->ranks; }

bool mm_comm_all_gather(mm_comm *c, uint32_t rank, const void *mine, void *all, size_t n) {
  c->brought[rank] = mine;
  if (!meet(c, rank, timeout_of(c))) return false;
  if (c->here < c->ranks) {
    if (rank == c->first) fetch(c, false, n);
    part(c);
    if (!meet(c, rank, 0)) return false;
  }
  for (uint32_t r = 0; r < c->ranks; r++) memcpy((char *)all + r * n, c->brought[r], n);
  part(c);
  return true;
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
  const uint32_t now = c->word ? *c->word : MM_COMM_GOES_ON, word = now != MM_COMM_GOES_ON ? now : c->said;
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
  pthread_mutex_lock(&c->lock);
  c->timeout = seconds;
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_timed_out(mm_comm *c, uint32_t rank, uint32_t *awaited) {
  pthread_mutex_lock(&c->lock);
  const bool mine = c->waiter == rank + 1;
  *awaited = c->awaited;
  pthread_mutex_unlock(&c->lock);
  return mine;
}

void mm_comm_watch(mm_comm *c, volatile uint32_t *word) {
  pthread_mutex_lock(&c->lock);
  c->word = word;
  pthread_mutex_unlock(&c->lock);
}

void mm_comm_sum(mm_comm *c, uint32_t rank, float *x, size_t n) { reduce(c, rank, x, n, add); }
void mm_comm_max(mm_comm *c, uint32_t rank, float *x, size_t n) { reduce(c, rank, x, n, largest); }
