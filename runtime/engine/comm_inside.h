/* The inside of a process group: barrier.c (barriers, aborts, timeouts), allreduce.c (all-reduce and all-gather) and pipeline.c (send and
 * receive between stages). */
#ifndef MM_RUNTIME_COMM_INSIDE_H
#define MM_RUNTIME_COMM_INSIDE_H

#include <pthread.h>

#include "runtime/engine/comm.h"

struct mm_comm {
  pthread_mutex_t lock;
  pthread_cond_t turn;
  mm_process_group *process_group; /* NULL: all ranks are of this process */
  uint32_t stage, per;             /* per: ranks of a process, numbered stage · ranks + rank */
  uint32_t first, here;            /* ranks [first, first + here) are of this process */
  uint32_t ranks, arrived, inside; /* inside: ranks that passed the barrier and still use each other's buffers */
  uint64_t generation;             /* barriers completed */
  bool aborted;
  double timeout;              /* of a gathering; 0: without end */
  uint32_t timed_out, awaited; /* the rank that timed out, + 1, and the rank that it waited for */
  uint64_t *arrived_at;        /* [ranks] the generation of the last barrier that each rank came to, + 1 */
  volatile uint32_t *word;     /* set by an abort, or NULL */
  mm_comm *before, *next;      /* stages */
  mm_comm **part, *whole;      /* [parts], and of a part the group that it is of; NULL without parts */
  uint32_t parts;
  float **mailbox;       /* [ranks]: rows that the stage before sends and nobody has taken */
  const void **gathered; /* [ranks]: each rank's part of the current gathering */
  bool *sent, *received; /* [ranks]: rows across a border between processes */
  bool failure_known;    /* this process or another has said that it failed, */
  bool failed_before;    /* and mm_comm_recover has not reset that; or the word reported a failure */
  uint32_t last_word;    /* the word when it was not MM_COMM_GOES_ON last */
  bool no_memory;
  mm_err reason; /* of the first stage: given to mm_comm_fail */
  uint32_t left; /* ranks of this process that are back from the step */
  char *message; /* [ranks, n] of the all-reduce or all-gather under way, each rank's part in its place */
  size_t message_cap;
  float *x[]; /* [ranks]: each rank's part of the current all-reduce */
};

/* The process of a rank, and if that is this one. */
static inline uint32_t mm_comm_process(const mm_comm *c, uint32_t rank) { return (c->stage * c->ranks + rank) / c->per; }
static inline bool mm_comm_is_here(const mm_comm *c, uint32_t rank) {
  return !c->process_group || mm_comm_process(c, rank) == c->process_group->process;
}
/* Ranks of the stage in a process. */
void mm_comm_ranks(const mm_comm *c, uint32_t process, uint32_t *first, uint32_t *count);

/* Waits until every rank is here, for so many seconds if that is not 0; false if the group is aborted before. */
bool mm_comm_barrier(mm_comm *c, uint32_t rank, double timeout);
/* Waits until all ranks that passed the barrier are done with each other's buffers, also if the group was aborted since: none of them waits
 * for anything else. */
void mm_comm_barrier_end(mm_comm *c);
/* The limit of a gathering in seconds, as set; 0: without end. */
double mm_comm_gather_timeout(mm_comm *c);
/* Returns true if no process of the stage has failed. */
bool mm_comm_agree(mm_comm *c, double limit_s);

#endif
