/* A work loop over threads: items are taken in order by whoever is free. */
#ifndef MM_FORMATS_POOL_H
#define MM_FORMATS_POOL_H

#include <pthread.h>

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Handles one item; worker is 0 … threads-1 and owns its scratch. False stops the pool. */
typedef bool mm_pool_fn(void *ctx, size_t item, unsigned worker, mm_err *err);

/* Runs fn for items 0 … count-1 on `threads` threads (≥ 1; the caller is one of them) and waits for all. The error of the
 * lowest-numbered failing worker call that was recorded first is copied to err. Fewer threads than asked (EAGAIN) is
 * not an error as long as one runs. */
MM_MUST_USE bool mm_pool_run(unsigned threads, size_t count, mm_pool_fn *fn, void *ctx, mm_err *err);
/* Runs of one thread, watched by another (formats/system/bar.h). */
typedef struct mm_pool_watch {
  pthread_mutex_t lock; /* guards all that follows */
  double since;         /* when the run began */
  size_t done, count;   /* items of the run; count is 0 between runs */
  char name[256];       /* of the file or tensor that was last begun, or "" */
} mm_pool_watch;
/* Later calls of mm_pool_run by this thread write there; NULL: nowhere. A run inside an item is not watched. */
void mm_pool_watched(mm_pool_watch *w);
/* By an item of a run: what it works at. */
void mm_pool_at(const char *name);
/* Threads that stay: runs follow each other without one being made. A thread that waits for the next run looks for it for some
 * microseconds and then sleeps. One thread at a time calls run. */
typedef struct mm_team mm_team;
/* threads ≥ 1, the caller of run being one; fewer where the system gives no more. MM_LIMIT for want of memory. */
mm_team *mm_team_open(unsigned threads, mm_err *err);
/* As mm_pool_run. Items are taken in order; fn of an item does not depend on who takes it. */
MM_MUST_USE bool mm_team_run(mm_team *t, size_t count, mm_pool_fn *fn, void *ctx, mm_err *err);
/* Sets a function that threads call again and again while they wait for the next run or for the end of one: at most a microsecond's work,
 * false if there is none. Set it once, while no run is under way. */
void mm_team_meanwhile(mm_team *t, bool (*meanwhile)(void *ctx), void *ctx);
/* From here on each thread stays on a CPU of its own: of those that the caller may run on, the caller on number `first`, the others on the
 * following ones. The caller stays there when the team is closed. MM_USAGE E_LIMITS where there are fewer. */
MM_MUST_USE bool mm_team_pin(mm_team *t, unsigned first, mm_err *err);
void mm_team_close(mm_team *t); /* accepts NULL */

/* A thread that looks at longer work every so many milliseconds, for bars and lines of progress. It calls look(ctx, n), n = 1, 2, …, and
 * look(ctx, 0) as it is closed. NULL where there is no thread to be had. */
typedef struct mm_ticker mm_ticker;
mm_ticker *mm_ticker_open(int64_t ms, void (*look)(void *ctx, unsigned n), void *ctx);
void mm_ticker_close(mm_ticker *t); /* accepts NULL */

/* Sets a flag under its lock and wakes all who wait for it. */
void mm_raise(bool *flag, pthread_mutex_t *lock, pthread_cond_t *wake);

/* Online CPUs the process may run on (affinity respected), at least 1. */
unsigned mm_pool_cpus(void);

#ifdef __cplusplus
}
#endif
#endif
