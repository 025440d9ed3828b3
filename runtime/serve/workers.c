/* A queue and its threads. */
#include "runtime/serve/workers.h"

#include <pthread.h>
#include <stdlib.h>

#include "formats/system/pool.h"

#define THREADS_MAX 16

struct mm_workers {
  mm_http *http;
  pthread_mutex_t lock;
  pthread_cond_t more;
  mm_job *first, **last;
  bool closing;
  pthread_t thread[THREADS_MAX];
  unsigned threads;
};

static void *work(void *user) {
  mm_workers *w = user;
  for (;;) {
    pthread_mutex_lock(&w->lock);
    while (!w->first && !w->closing) pthread_cond_wait(&w->more, &w->lock);
    mm_job *job = w->first;
    if (job && !(w->first = job->next)) w->last = &w->first;
    pthread_mutex_unlock(&w->lock);
    if (!job) return NULL;
    job->fn(job->done.user);
    mm_http_post(w->http, &job->done);
  }
}

mm_workers *mm_workers_open(mm_http *http, unsigned threads, mm_err *err) {
  mm_workers *w = mm_calloc(1, sizeof *w, err);
  if (!w) return NULL;
  w->http = http;
  w->last = &w->first;
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->more, NULL);
  for (; w->threads < threads && w->threads < THREADS_MAX; w->threads++) {
    const int r = pthread_create(&w->thread[w->threads], NULL, work, w);
    if (!r) continue;
    mm_fail_errno(err, mm_at(NULL, NULL), "pthread_create", r);
    mm_workers_close(w);
    return NULL;
  }
  return w;
}

void mm_workers_do(mm_workers *w, mm_job *job) {
  pthread_mutex_lock(&w->lock);
  job->next = NULL;
  *w->last = job;
  w->last = &job->next;
  pthread_cond_signal(&w->more);
  pthread_mutex_unlock(&w->lock);
}

void mm_workers_close(mm_workers *w) {
  if (!w) return;
  mm_raise(&w->closing, &w->lock, &w->more);
  for (unsigned i = 0; i < w->threads; i++) pthread_join(w->thread[i], NULL);
  pthread_cond_destroy(&w->more);
  pthread_mutex_destroy(&w->lock);
  free(w);
}
