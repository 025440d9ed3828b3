/* Two queues and their threads. */
#include "runtime/serve/workers.h"

#include <pthread.h>
#include <stdlib.h>

#include "formats/system/pool.h"

#define THREADS_MAX 16

typedef struct queue {
  mm_job *first, **last;
} queue;

struct mm_workers {
  mm_http *http;
  pthread_mutex_t lock;
  pthread_cond_t more;
  queue brief, lengthy;
  bool closing;
  pthread_t thread[THREADS_MAX];
  unsigned threads, started;
};

static mm_job *take(queue *q) {
  mm_job *job = q->first;
  if (job && !(q->first = job->next)) q->last = &q->first;
  return job;
}

/* The first thread does brief jobs alone, so that these never wait for lengthy ones. The others do lengthy ones
 * first, so that those are not passed over either. */
static void *work(void *user) {
  mm_workers *w = user;
  pthread_mutex_lock(&w->lock);
  const bool any = w->started++ > 0;
  for (;;) {
    mm_job *job = any ? take(&w->lengthy) : NULL;
    if (!job) job = take(&w->brief);
    if (!job && w->closing) break;
    if (!job) {
      pthread_cond_wait(&w->more, &w->lock);
      continue;
    }
    pthread_mutex_unlock(&w->lock);
    job->fn(job->done.user);
    mm_http_post(w->http, &job->done);
    pthread_mutex_lock(&w->lock);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

mm_workers *mm_workers_open(mm_http *http, unsigned threads, mm_err *err) {
  mm_workers *w = mm_calloc(1, sizeof *w, err);
  if (!w) return NULL;
  w->http = http;
  w->brief.last = &w->brief.first;
  w->lengthy.last = &w->lengthy.first;
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->more, NULL);
  for (; w->threads < threads && w->threads < THREADS_MAX; w->threads++) {
    const int r = pthread_create(&w->thread[w->threads], NULL, work, w);
    if (!r) continue;
    mm_fail_thread(err, "start a thread for requests", r);
    mm_workers_close(w);
    return NULL;
  }
  return w;
}

void mm_workers_do(mm_workers *w, mm_job *job, bool lengthy) {
  queue *q = lengthy ? &w->lengthy : &w->brief;
  pthread_mutex_lock(&w->lock);
  job->next = NULL;
  *q->last = job;
  q->last = &job->next;
  pthread_cond_broadcast(&w->more); /* not every thread takes every job */
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
