/* Tensor-parallel ranks of one process meeting in shared memory. */
#include "runtime/comm.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct mm_comm {
  pthread_mutex_t lock;
  pthread_cond_t turn;
  uint32_t ranks, arrived, inside; /* inside: met, and not done with each other's buffers */
  uint64_t meeting;                /* meetings completed */
  bool broken;
  double patience;         /* of a gathering; 0: without end */
  uint32_t waiter, whom;   /* who lost it, + 1, and with whom */
  uint64_t *came;          /* [ranks] the meeting that each came to last, + 1 */
  volatile uint32_t *word; /* set by a break, or NULL */
  mm_comm *before, *next;  /* stages */
  float **box;             /* [ranks]: what the stage before sends and nobody took */
  const void **brought;    /* [ranks]: what each brought to the current gathering */
  float *x[];              /* [ranks]: the same to the current sum */
};

mm_comm *mm_comm_open(uint32_t ranks, mm_err *err) {
  mm_comm *c = mm_calloc(1, sizeof *c + ranks * (3 * sizeof c->x[0] + sizeof *c->came), err);
  if (!c) return NULL;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->turn, NULL);
  c->ranks = ranks;
  c->box = c->x + ranks;
  c->brought = (const void **)(c->box + ranks);
  c->came = (uint64_t *)(void *)(c->brought + ranks);
  return c;
}

void mm_comm_close(mm_comm *c) {
  if (!c) return;
  pthread_cond_destroy(&c->turn);
  pthread_mutex_destroy(&c->lock);
  free(c);
}

void mm_comm_link(mm_comm *from, mm_comm *to) {
  from->next = to;
  to->before = from;
}

void mm_comm_break(mm_comm *c) {
  while (c->before) c = c->before;
  for (; c; c = c->next) {
    pthread_mutex_lock(&c->lock);
    c->broken = true;
    if (c->word) *c->word = 1;
    pthread_cond_broadcast(&c->turn);
    pthread_mutex_unlock(&c->lock);
  }
}

void mm_comm_mend(mm_comm *c) {
  c->broken = false;
  c->arrived = c->waiter = 0;
  for (uint32_t r = 0; r < c->ranks; r++) c->box[r] = NULL, c->came[r] = 0;
}

void mm_comm_send(mm_comm *c, uint32_t rank, float *x, size_t n) {
  mm_comm *to = c->next;
  if (n == 0) return;
  pthread_mutex_lock(&to->lock);
  to->box[rank] = x;
  pthread_cond_broadcast(&to->turn);
  while (to->box[rank] && !to->broken) pthread_cond_wait(&to->turn, &to->lock);
  to->box[rank] = NULL;
  pthread_mutex_unlock(&to->lock);
}

void mm_comm_receive(mm_comm *c, uint32_t rank, float *x, size_t n) {
  if (n == 0) return;
  pthread_mutex_lock(&c->lock);
  while (!c->box[rank] && !c->broken) pthread_cond_wait(&c->turn, &c->lock);
  if (c->box[rank]) memcpy(x, c->box[rank], n * sizeof *x);
  c->box[rank] = NULL;
  pthread_cond_broadcast(&c->turn);
  pthread_mutex_unlock(&c->lock);
}

/* Seconds from now. */
static struct timespec later(double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  const double whole = floor(seconds);
  t.tv_sec += (time_t)whole, t.tv_nsec += (long)((seconds - whole) * 1e9);
  if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
  return t;
}

/* Under the lock: until something has changed. False when the time is over. */
static bool wait_until(mm_comm *c, const struct timespec *until) {
  return (until ? pthread_cond_timedwait(&c->turn, &c->lock, until) : pthread_cond_wait(&c->turn, &c->lock)) != ETIMEDOUT;
}

/* Waits until every rank is here, for so many seconds if that is not 0; false when the meeting is broken before. */
static bool meet(mm_comm *c, uint32_t rank, double patience) {
  const struct timespec until = later(patience);
  pthread_mutex_lock(&c->lock);
  const uint64_t meeting = c->meeting;
  bool lost = false;
  c->came[rank] = meeting + 1;
  if (!c->broken && ++c->arrived == c->ranks) {
    c->arrived = 0;
    c->inside = c->ranks;
    c->meeting++;
    pthread_cond_broadcast(&c->turn);
  }
  while (c->meeting == meeting && !c->broken && !lost) lost = !wait_until(c, patience > 0 ? &until : NULL);
  const bool met = c->meeting != meeting;
  lost = lost && !met && !c->broken;
  if (lost) c->waiter = rank + 1;
  for (uint32_t r = c->ranks; lost && r-- > 0;)
    if (c->came[r] != meeting + 1) c->whom = r;
  pthread_mutex_unlock(&c->lock);
  if (lost) mm_comm_break(c);
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

/* Each rank reduces its own stretch and hands the result to all: every element is reduced once, so all ranks hold the same bits. */
static void reduce(mm_comm *c, uint32_t rank, float *x, size_t n, float (*op)(float, float)) {
  if (c->ranks == 1) return;
  c->x[rank] = x;
  if (!meet(c, rank, 0)) return;
  size_t from = n * rank / c->ranks, to = n * (rank + 1) / c->ranks;
  for (size_t i = from; i < to; i++) {
    float v = c->x[0][i];
    for (uint32_t r = 1; r < c->ranks; r++) v = op(v, c->x[r][i]);
    for (uint32_t r = 0; r < c->ranks; r++) c->x[r][i] = v;
  }
  part(c);
}

bool mm_comm_gather(mm_comm *c, uint32_t rank, const void *mine, const void **all) {
  c->brought[rank] = mine;
  if (!meet(c, rank, c->patience)) return false;
  for (uint32_t r = 0; r < c->ranks; r++) all[r] = c->brought[r];
  part(c);
  return true;
}

void mm_comm_patience(mm_comm *c, double seconds) {
  pthread_mutex_lock(&c->lock);
  c->patience = seconds;
  pthread_mutex_unlock(&c->lock);
}

bool mm_comm_waited(mm_comm *c, uint32_t rank, uint32_t *whom) {
  pthread_mutex_lock(&c->lock);
  const bool mine = c->waiter == rank + 1;
  *whom = c->whom;
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
