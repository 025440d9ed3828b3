/* Threads that stay between runs (pool.h). A run is published by its number; items are taken from one counter. A thread that finds no new
 * run, or a caller that does not find the end of its own, looks again for a while, since in a forward pass the next run is microseconds
 * away, and then sleeps on a condition. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/pool.h"

enum { LOOKS = 2000 }; /* before sleeping: some tens of microseconds */

typedef struct member {
  mm_team *team;
  unsigned index;
  pthread_t thread;
} member;

struct mm_team {
  unsigned threads;
  pthread_mutex_t lock; /* guards what sleeps, and the error */
  pthread_cond_t begun, ended;
  _Atomic uint64_t run;  /* runs published */
  _Atomic size_t next;   /* item */
  _Atomic unsigned busy; /* members that have not ended the run */
  _Atomic bool closing;
  bool spins; /* there is a CPU for each */
  mm_pool_fn *fn;
  void *ctx;
  _Atomic(bool (*)(void *)) meanwhile;
  void *of_meanwhile;
  _Atomic size_t count; /* 0 after a failure */
  size_t failed;
  mm_err err;
  member member[];
};

static void relax(void) {
#ifdef __x86_64__
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

static void look_away(mm_team *t) {
  bool (*const meanwhile)(void *) = atomic_load(&t->meanwhile);
  if (!meanwhile || !meanwhile(t->of_meanwhile)) relax();
}

static void take_items(mm_team *t, unsigned worker) {
  for (size_t item; (item = atomic_fetch_add(&t->next, 1)) < atomic_load(&t->count);) {
    mm_err err = {0};
    if (t->fn(t->ctx, item, worker, &err)) continue;
    pthread_mutex_lock(&t->lock);
    atomic_store(&t->count, 0);
    if (item < t->failed) t->failed = item, t->err = err;
    pthread_mutex_unlock(&t->lock);
  }
}

static void *run_member(void *arg) {
  const member *self = arg;
  mm_team *t = self->team;
  for (uint64_t seen = 0;;) {
    for (int i = 0; t->spins && i < LOOKS && atomic_load(&t->run) == seen && !atomic_load(&t->closing); i++) look_away(t);
    pthread_mutex_lock(&t->lock);
    while (atomic_load(&t->run) == seen && !atomic_load(&t->closing)) pthread_cond_wait(&t->begun, &t->lock);
    pthread_mutex_unlock(&t->lock);
    if (atomic_load(&t->run) == seen) return NULL;
    seen++;
    take_items(t, self->index);
    if (atomic_fetch_sub(&t->busy, 1) == 1) {
      pthread_mutex_lock(&t->lock);
      pthread_cond_signal(&t->ended);
      pthread_mutex_unlock(&t->lock);
    }
  }
}

mm_team *mm_team_open(unsigned threads, mm_err *err) {
  mm_team *t = mm_calloc(1, sizeof *t + threads * sizeof t->member[0], err);
  if (!t) return NULL;
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->begun, NULL);
  pthread_cond_init(&t->ended, NULL);
  t->spins = threads <= mm_pool_cpus();
  for (t->threads = 1; t->threads < threads; t->threads++) {
    member *m = &t->member[t->threads];
    *m = (member){.team = t, .index = t->threads};
    if (pthread_create(&m->thread, NULL, run_member, m) != 0) break;
  }
  return t;
}

bool mm_team_run(mm_team *t, size_t count, mm_pool_fn *fn, void *ctx, mm_err *err) {
  t->fn = fn, t->ctx = ctx, t->failed = SIZE_MAX;
  atomic_store(&t->count, count), atomic_store(&t->next, 0), atomic_store(&t->busy, t->threads - 1);
  pthread_mutex_lock(&t->lock);
  atomic_fetch_add(&t->run, 1);
  pthread_cond_broadcast(&t->begun);
  pthread_mutex_unlock(&t->lock);
  take_items(t, 0);
  for (int i = 0; t->spins && i < LOOKS && atomic_load(&t->busy) > 0; i++) look_away(t);
  pthread_mutex_lock(&t->lock);
  while (atomic_load(&t->busy) > 0) pthread_cond_wait(&t->ended, &t->lock);
  const bool ok = t->failed == SIZE_MAX || mm_fail_as(err, &t->err);
  pthread_mutex_unlock(&t->lock);
  return ok;
}

void mm_team_meanwhile(mm_team *t, bool (*meanwhile)(void *ctx), void *ctx) {
  t->of_meanwhile = ctx;
  atomic_store(&t->meanwhile, meanwhile);
}

bool mm_team_pin(mm_team *t, unsigned first, mm_err *err) {
  cpu_set_t all, one;
  CPU_ZERO(&all);
  if (sched_getaffinity(0, sizeof all, &all) != 0) return mm_fail_errno(err, mm_at(NULL, NULL), "find the CPUs to pin threads to", errno);
  if (first + (uint64_t)t->threads > (unsigned)CPU_COUNT(&all))
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u threads to pin after %u others, %d CPUs to run on", t->threads,
                   first, CPU_COUNT(&all));
  for (unsigned cpu = 0, n = 0; n < first + t->threads; cpu++) {
    if (!CPU_ISSET(cpu, &all) || n++ < first) continue;
    const unsigned i = n - 1 - first;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    const int failed = pthread_setaffinity_np(i ? t->member[i].thread : pthread_self(), sizeof one, &one);
    if (failed) return mm_fail(err, MM_LIMIT, "E_THREADS", mm_at(NULL, NULL), "pin a thread to CPU %u: %s", cpu, strerror(failed));
  }
  return true;
}

void mm_team_close(mm_team *t) {
  if (!t) return;
  pthread_mutex_lock(&t->lock);
  atomic_store(&t->closing, true);
  pthread_cond_broadcast(&t->begun);
  pthread_mutex_unlock(&t->lock);
  for (unsigned i = 1; i < t->threads; i++) pthread_join(t->member[i].thread, NULL);
  pthread_cond_destroy(&t->begun);
  pthread_cond_destroy(&t->ended);
  pthread_mutex_destroy(&t->lock);
  free(t);
}
