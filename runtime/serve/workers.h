/* Threads for what would hold the loop up: reading and tokenising long requests. */
#ifndef MM_RUNTIME_SERVE_WORKERS_H
#define MM_RUNTIME_SERVE_WORKERS_H

#include "runtime/serve/http.h"

typedef struct mm_workers mm_workers;

/* Something to do: fn in one of the threads, then done in the loop. It must live until then. */
typedef struct mm_job {
  void (*fn)(void *user);
  mm_task done; /* its fn and user are the caller's */
  struct mm_job *next;
} mm_job;

/* threads: two or more. */
mm_workers *mm_workers_open(mm_http *http, unsigned threads, mm_err *err);
/* fn gets job->done.user. Brief jobs do not wait for lengthy ones. */
void mm_workers_do(mm_workers *w, mm_job *job, bool lengthy);
/* All jobs are done when it returns, but for what the loop does with them. Accepts NULL. */
void mm_workers_close(mm_workers *w);

#endif
