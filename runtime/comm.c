/* Tensor-parallel ranks of one process meeting in shared memory. */
#include "runtime/comm.h"

#include <pthread.h>
#include <stdlib.h>

struct mm_comm {
  pthread_mutex_t lock;
  pthread_cond_t turn;
  uint32_t ranks, arrived;
  uint64_t meeting; /* meetings completed */
  bool broken;
  float *x[]; /* [ranks]: what each brought to the current sum */
};

mm_comm *mm_comm_open(uint32_t ranks, mm_err *err) {
  mm_comm *c = mm_calloc(1, sizeof *c + ranks * sizeof c->x[0], err);
  if (!c) return NULL;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->turn, NULL);
  c->ranks = ranks;
  return c;
}

void mm_comm_close(mm_comm *c) {
  if (!c) return;
  pthread_cond_destroy(&c->turn);
  pthread_mutex_destroy(&c->lock);
  free(c);
}

void mm_comm_break(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  c->broken = true;
  pthread_cond_broadcast(&c->turn);
  pthread_mutex_unlock(&c->lock);
}

void mm_comm_mend(mm_comm *c) {
  c->broken = false;
  c->arrived = 0;
}

/* Waits until every rank is here; false when the meeting is broken. */
static bool meet(mm_comm *c) {
  pthread_mutex_lock(&c->lock);
  if (!c->broken) {
    uint64_t meeting = c->meeting;
    if (++c->arrived == c->ranks) {
      c->arrived = 0;
      c->meeting++;
      pthread_cond_broadcast(&c->turn);
    }
    while (c->meeting == meeting && !c->broken) pthread_cond_wait(&c->turn, &c->lock);
  }
  bool met = !c->broken;
  pthread_mutex_unlock(&c->lock);
  return met;
}

static float add(float a, float b) { return a + b; }
static float largest(float a, float b) { return a > b ? a : b; }

/* Each rank reduces its own stretch and hands the result to all: every element is reduced once, so all ranks hold the same bits. */
static void reduce(mm_comm *c, uint32_t rank, float *x, size_t n, float (*op)(float, float)) {
  if (c->ranks == 1) return;
  c->x[rank] = x;
  if (!meet(c)) return;
  size_t from = n * rank / c->ranks, to = n * (rank + 1) / c->ranks;
  for (size_t i = from; i < to; i++) {
    float v = c->x[0][i];
    for (uint32_t r = 1; r < c->ranks; r++) v = op(v, c->x[r][i]);
    for (uint32_t r = 0; r < c->ranks; r++) c->x[r][i] = v;
  }
  meet(c);
}

void mm_comm_sum(mm_comm *c, uint32_t rank, float *x, size_t n) { reduce(c, rank, x, n, add); }
void mm_comm_max(mm_comm *c, uint32_t rank, float *x, size_t n) { reduce(c, rank, x, n, largest); }
