/* A work loop over POSIX threads. Items are taken in order, so when one fails every lower-numbered item has been taken
 * already and runs to its end: the error reported, that of the lowest failing item, does not depend on timing. */
#include "formats/system/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static _Thread_local mm_pool_watch *watched; /* of the runs to come; of the run, in its threads */
static _Thread_local bool in_item;

typedef struct work {
  mm_pool_fn *fn;
  void *ctx;
  pthread_mutex_t lock; /* guards what follows */
  size_t next, count;   /* count drops to 0 on a failure: nothing more is taken */
  size_t failed;        /* lowest failing item, SIZE_MAX while there is none */
  mm_err err;
  mm_pool_watch *watch;
} work;

typedef struct worker {
  work *work;
  unsigned index;
  pthread_t thread;
} worker;

void mm_pool_watched(mm_pool_watch *w) { watched = w; }

void mm_pool_at(const char *name) {
  if (!watched) return;
  pthread_mutex_lock(&watched->lock);
  snprintf(watched->name, sizeof watched->name, "%s", name);
  pthread_mutex_unlock(&watched->lock);
}

/* A run of `count` items begins; 0: it has ended. */
static void begin_watch(mm_pool_watch *w, size_t count) {
  if (!w) return;
  pthread_mutex_lock(&w->lock);
  w->since = mm_now();
  w->done = 0;
  w->count = count;
  w->name[0] = 0;
  pthread_mutex_unlock(&w->lock);
}

static void count_item(mm_pool_watch *w) {
  if (!w) return;
  pthread_mutex_lock(&w->lock);
  w->done++;
  pthread_mutex_unlock(&w->lock);
}

static void *run_worker(void *arg) {
  worker *self = arg;
  work *w = self->work;
  mm_pool_watch *const before = watched;
  const bool nested = in_item;
  watched = nested ? before : w->watch;
  in_item = true;
  pthread_mutex_lock(&w->lock);
  while (w->next < w->count) {
    size_t item = w->next++;
    pthread_mutex_unlock(&w->lock);
    mm_err err = {0};
    bool ok = w->fn(w->ctx, item, self->index, &err);
    count_item(w->watch);
    pthread_mutex_lock(&w->lock);
    if (ok) continue;
    w->count = 0;
    if (item < w->failed) {
      w->failed = item;
      w->err = err;
    }
  }
  pthread_mutex_unlock(&w->lock);
  watched = before;
  in_item = nested;
  return NULL;
}

bool mm_pool_run(unsigned threads, size_t count, mm_pool_fn *fn, void *ctx, mm_err *err) {
  if (threads > count) threads = count ? (unsigned)count : 1;
  worker *workers = mm_calloc(threads, sizeof *workers, err);
  if (!workers) return false;
  work w = {.fn = fn, .ctx = ctx, .lock = PTHREAD_MUTEX_INITIALIZER, .count = count, .failed = SIZE_MAX, .watch = in_item ? NULL : watched};
  begin_watch(w.watch, count);
  unsigned started = 1; /* worker 0 is the caller */
  for (; started < threads; started++) {
    workers[started] = (worker){.work = &w, .index = started};
    if (pthread_create(&workers[started].thread, NULL, run_worker, &workers[started]) != 0) break;
  }
  workers[0].work = &w;
  run_worker(&workers[0]);
  for (unsigned i = 1; i < started; i++) pthread_join(workers[i].thread, NULL);
  free(workers);
  begin_watch(w.watch, 0);
  return w.failed == SIZE_MAX || mm_fail_as(err, &w.err);
}

struct mm_ticker {
  int64_t ms;
  void (*look)(void *ctx, unsigned n);
  void *ctx;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  bool stop;
};

static void *tick(void *arg) {
  mm_ticker *t = arg;
  pthread_mutex_lock(&t->lock);
  for (unsigned n = 1; !t->stop; n++) {
    const struct timespec until = mm_later((double)t->ms / 1e3);
    while (!t->stop && pthread_cond_clockwait(&t->wake, &t->lock, CLOCK_MONOTONIC, &until) == 0) continue;
    if (!t->stop) t->look(t->ctx, n);
  }
  pthread_mutex_unlock(&t->lock);
  t->look(t->ctx, 0);
  return NULL;
}

mm_ticker *mm_ticker_open(int64_t ms, void (*look)(void *ctx, unsigned n), void *ctx) {
  mm_ticker *t = calloc(1, sizeof *t);
  if (!t) return NULL;
  *t = (mm_ticker){.ms = ms, .look = look, .ctx = ctx};
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->wake, NULL);
  if (pthread_create(&t->thread, NULL, tick, t) == 0) return t;
  free(t);
  return NULL;
}

void mm_ticker_close(mm_ticker *t) {
  if (!t) return;
  mm_raise(&t->stop, &t->lock, &t->wake);
  pthread_join(t->thread, NULL);
  pthread_cond_destroy(&t->wake);
  pthread_mutex_destroy(&t->lock);
  free(t);
}

void mm_raise(bool *flag, pthread_mutex_t *lock, pthread_cond_t *wake) {
  pthread_mutex_lock(lock);
  *flag = true;
  pthread_cond_broadcast(wake);
  pthread_mutex_unlock(lock);
}

unsigned mm_pool_cpus(void) {
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (unsigned)n : 1;
}
