/* Both sides of a transfer (transfer.h) within a scheduler: transfer_send.c and transfer_receive.c are the scheduler's thread, and
 * transfer_serve.c and transfer_fetch.c the threads that hold connections. They share what a `lock` guards, and places of the pool, each
 * of which is one side's at a time. */
#ifndef MM_RUNTIME_TRANSFER_INSIDE_H
#define MM_RUNTIME_TRANSFER_INSIDE_H

#include "runtime/schedule/scheduler_inside.h"
#include "runtime/schedule/transfer_wire.h"

enum { MM_SEND_PLACES = 512, MM_SEND_THREADS = 16, MM_FETCH_THREADS = 8 };
_Static_assert(1 + MM_SEND_THREADS <= MM_TRANSFER_DESCRIPTORS && 2 * MM_FETCH_THREADS <= MM_TRANSFER_DESCRIPTORS,
               "a socket that listens and one a thread; one a thread and one of the resolver");

/* The parts of a place, for a message: part[mm_engine_pool_parts]. */
void mm_transfer_place(const mm_scheduler *s, uint32_t place, mm_wire_part *part);
void mm_transfer_profile(const mm_scheduler *s, mm_wire_profile *p);
/* The scheduler's thread is to look at once. */
void mm_transfer_wake(mm_scheduler *s);

/* ---- the side that computes prompts ---- */

typedef struct ready_page {
  uint32_t place, index;
} ready_page;

/* A prompt for another server. All but the first part is under the lock. */
struct mm_sending {
  mm_sending *next;
  uint32_t from, pages, tokens;     /* pages [from, pages) of the prompt's tokens are wanted */
  uint32_t *page;                   /* [pages]: references to [next_page, pages) once the job has left its slot */
  uint32_t next_page, on_way;       /* the first that no move was made for; moves that have not ended */
  bool kept, saved;                 /* page holds references; the state was saved, or that failed */
  ready_page ready[MM_SEND_PLACES]; /* [ready_count] oldest first: pages in places, to be sent */
  uint32_t ready_count, computed;
  void *state;
  bool over, failed, aborted, released; /* the job has ended; not well; the connection has; the scheduler's thread is done with it */
  mm_err err;
};

/* A page on its way to a place. */
typedef struct sent_page {
  mm_sending *sending;
  uint32_t place, index;
} sent_page;

struct mm_sender {
  mm_scheduler *s;
  int fd;
  uint16_t port;
  pthread_t thread[MM_SEND_THREADS];
  uint32_t threads;
  atomic_bool stop, draining;
  mm_wire_profile profile;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  mm_sending *first;
  uint32_t place[MM_SEND_PLACES], free_count, places; /* free ones */
  sent_page way[MM_SEND_PLACES];
  uint32_t ways;
  double reported;
  mm_transfer_stats stats;
};

MM_MUST_USE bool mm_serve_start(mm_sender *t, mm_err *err);
void mm_serve_join(mm_sender *t);

/* ---- the side that decodes ---- */

struct mm_fetch {
  mm_fetch *next;
  job *job; /* the scheduler's thread's; NULL: it has ended */
  mm_wire_request request;
  int32_t *token; /* [request.count] */
  uint32_t boundary[MM_WIRE_BOUNDARIES];
  uint32_t *place; /* [pages], UINT32_MAX below request.from */
  uint32_t pages;
  void *state;
  atomic_bool stop;
  double began;
  /* The thread's until `ended`, which is under the lock. */
  uint64_t got, bytes;
  bool begun, ended, ok, lost; /* lost: the other side gave no hello, or nothing new for the time limit */
  double silent;               /* seconds for which it had given nothing new when it was lost */
  mm_err err;
};

struct mm_receiver {
  mm_scheduler *s;
  pthread_t thread[MM_FETCH_THREADS];
  uint32_t threads;
  mm_wire_profile profile;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  mm_fetch *first; /* all, oldest first */
  bool closing;
  uint32_t held;     /* the scheduler's thread's, as are all up to stats: places of fetches */
  uint64_t ends;     /* fetches that have ended */
  uint64_t looks;    /* how often a prompt was compared with the cache and with these; for tests */
  bool full;         /* in this round a prompt waits for places: none that comes after it has any */
  double down_until; /* the other side was lost: no connection is tried for as long as that took */
  mm_err down;
  mm_transfer_stats stats;
};

/* Of the fetches that have not begun, the oldest of the highest priority; NULL: all have. Under the lock. */
mm_fetch *mm_fetch_next(const mm_receiver *r);
MM_MUST_USE bool mm_fetch_start(mm_receiver *r, mm_err *err);
void mm_fetch_join(mm_receiver *r);
/* Says hello to the other side. MM_USAGE E_PREFILL: it runs something else. */
MM_MUST_USE bool mm_fetch_probe(mm_receiver *r, mm_err *err);

#endif
