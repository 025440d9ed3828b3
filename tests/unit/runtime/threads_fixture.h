/* Processes as threads of one: what crosses goes through queues in place of MPI. */
#ifndef MM_TESTS_THREADS_FIXTURE_H
#define MM_TESTS_THREADS_FIXTURE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/engine/processes.h"

enum { WAIT_S = 60 }; /* nobody waits so long */

typedef struct message {
  struct message *next;
  uint32_t from, to, tag;
  size_t n;
  char data[];
} message;

static struct {
  pthread_mutex_t lock;
  pthread_cond_t came;
  message *first, **last;
} post = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, &post.first};

static void push(uint32_t from, uint32_t tag, const mm_transfer *p) {
  message *m = malloc(sizeof *m + p->n);
  *m = (message){.from = from, .to = p->process, .tag = tag, .n = p->n};
  if (p->n) memcpy(m->data, p->data, p->n);
  pthread_mutex_lock(&post.lock);
  *post.last = m, post.last = &m->next;
  pthread_cond_broadcast(&post.came);
  pthread_mutex_unlock(&post.lock);
}

static _Atomic uint32_t overdue; /* messages that came after their receiver's limit, where MPI would have ended all */

static void pull(uint32_t to, uint32_t tag, const mm_transfer *p, double limit_s) {
  const double from = mm_now();
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += WAIT_S;
  pthread_mutex_lock(&post.lock);
  message **at = &post.first;
  for (;;) {
    for (at = &post.first; *at && ((*at)->from != p->process || (*at)->to != to || (*at)->tag != tag);) at = &(*at)->next;
    if (*at) break;
    if (pthread_cond_timedwait(&post.came, &post.lock, &until)) {
      fprintf(stderr, "process %u waits for process %u: timeout, tag %u\n", to, p->process, tag);
      abort();
    }
  }
  message *m = *at;
  *at = m->next;
  if (!*at) post.last = at;
  pthread_mutex_unlock(&post.lock);
  if (m->n != p->n) fprintf(stderr, "process %u: %zu bytes from %u, %zu expected, tag %u\n", to, m->n, p->process, p->n, tag), abort();
  if (p->n) memcpy(p->data, m->data, p->n);
  if (limit_s > 0 && mm_now() - from > limit_s) overdue++;
  free(m);
}

static void exchange(mm_process_group *w, uint32_t tag, const mm_transfer *out, uint32_t outs, const mm_transfer *in, uint32_t ins,
                     double limit_s) {
  for (uint32_t i = 0; i < outs; i++) push(w->process, tag, &out[i]);
  for (uint32_t i = 0; i < ins; i++) pull(w->process, tag, &in[i], limit_s);
}

#endif
