/* A process group of ranks: barriers, all-reduce, all-gather, send and receive; in one process by shared memory, between several by
 * messages (processes.h). */
#ifndef MM_RUNTIME_COMM_H
#define MM_RUNTIME_COMM_H

#include "formats/system/base.h"
#include "runtime/engine/processes.h"

/* Limits in seconds once a rank has timed out on another. MM_RETURN_S: within it the other ranks of the process must return. MM_LATE_S: the
 * wait for other processes, which may have a timed-out rank too. With the timeout of 4 s of a rank on a GPU, every process has reported the
 * error within 5 s. */
#define MM_RETURN_S 0.5
#define MM_LATE_S   0.7

#ifdef __cplusplus
extern "C" {
#endif

/* A rank that fails aborts the group for all: none waits for ever. */
typedef struct mm_comm mm_comm;
mm_comm *mm_comm_open(uint32_t ranks, mm_err *err);
/* Opens the group of a stage whose ranks may belong to several processes: rank r belongs to process (stage · ranks + r) / per. The
 * functions below are called by the ranks of this process; mm_comm_gather covers these ranks alone. w NULL: all ranks belong to this
 * process. */
mm_comm *mm_comm_open_across(uint32_t ranks, mm_process_group *w, uint32_t stage, uint32_t per, mm_err *err);
/* By each rank at the end of its opening and of each step, after its abort if it failed: no other process waits for this one's ranks then,
 * nor with rows for them. Waits for earlier stages alone. borders: the step's rows went from stage to stage. late: this rank timed out on a
 * rank of another process, so the others get only MM_LATE_S to come. MM_LIMIT where memory was short. */
MM_MUST_USE bool mm_comm_leave(mm_comm *c, bool borders, bool late, mm_err *err);
void mm_comm_close(mm_comm *c); /* accepts NULL */
/* Opens `count` parts of a group whose ranks are all of this process, of ranks / count consecutive ranks each: groups of their own, whose
 * ranks count from 0. An abort of the group or of a part aborts all; close, reset and timeout of the group include them. Once. */
MM_MUST_USE bool mm_comm_split(mm_comm *c, uint32_t count, mm_err *err);
mm_comm *mm_comm_part(mm_comm *c, uint32_t i); /* the group itself where it was not split */
/* By a rank that cannot go on: whoever waits or comes later returns at once, its sums unspecified, until mm_comm_reset. */
void mm_comm_abort(mm_comm *c);
bool mm_comm_aborted(mm_comm *c);
/* The same by a thread that is no rank, at any time. Ranks at work may have no error of their own then, so the reason stays for good. */
void mm_comm_fail(mm_comm *c, const mm_err *reason);
/* The first such reason; false: none. */
bool mm_comm_fail_reason(mm_comm *c, mm_err *reason);
/* Only while no rank is at work. */
void mm_comm_reset(mm_comm *c);
/* Every rank passes its x[n]; afterwards each holds the sum taken in rank order, bit-identical on all ranks. */
void mm_comm_all_reduce_sum(mm_comm *c, uint32_t rank, float *x, size_t n);
/* The same with the largest of each. */
void mm_comm_all_reduce_max(mm_comm *c, uint32_t rank, float *x, size_t n);

/* Rows of groups of consecutive ranks: those of group g are numbers first[g] to first[g + 1] - 1 of all. */
typedef struct mm_comm_rows {
  const uint32_t *first; /* [groups + 1] */
  uint32_t groups;       /* divides the ranks */
  size_t width;          /* numbers in a row */
} mm_comm_rows;
/* all[first[groups], width]: the rows of each group, which its ranks pass alike as mine. Unspecified if the group is aborted. Ranks of one
 * process alone. */
void mm_comm_gather_rows(mm_comm *c, uint32_t rank, const float *mine, float *all, const mm_comm_rows *rows);

/* all[ranks]: what each rank passes, a pointer that must hold until all have used it. False if the group is aborted. */
bool mm_comm_gather(mm_comm *c, uint32_t rank, const void *mine, const void **all);
/* Returns true if some ranks belong to other processes. */
bool mm_comm_is_across(const mm_comm *c);
/* all[ranks][n]: the n bytes that each rank passes, whatever its process. False if the group is aborted. */
bool mm_comm_all_gather(mm_comm *c, uint32_t rank, const void *mine, void *all, size_t n);
/* Returns true if, after the last mm_comm_recover and before the current task (mm_comm_reset), a rank failed whose kernels or process other
 * ranks wait for. All ranks get the same answer, whatever happens during the task. Among ranks of one process this covers the ranks that
 * share a word (mm_comm_watch). */
bool mm_comm_failed(mm_comm *c);
/* Returns true if the word reports a failure now, or mm_comm_failed is true. */
bool mm_comm_failed_now(mm_comm *c);
/* False, with MM_IO E_RANK: what the word says, or what it said last: which rank waited for which, if one did. */
bool mm_comm_root_cause(mm_comm *c, mm_err *err);
void mm_comm_recover(mm_comm *c);
/* From now on a rank that has waited so long for another one aborts a gathering; 0, as at first: never. A process that waits half a second
 * longer for another one ends all of them (processes.h). */
void mm_comm_set_timeout(mm_comm *c, double seconds);
/* How long that is; 0: without end. */
double mm_comm_timeout(mm_comm *c);
/* Returns true if this rank aborted the last gathering by its timeout; gives the rank that it waited for. */
bool mm_comm_timed_out(mm_comm *c, uint32_t rank, uint32_t *awaited);
/* From now on an abort of this group also sets *word to MM_COMM_ABORTED where it is MM_COMM_GOES_ON, for ranks that wait in kernels, where
 * an abort does not reach them. A rank that times out there sets it to MM_COMM_TIMED_OUT | waiting rank << 8 | awaited rank << 16. NULL:
 * none. Only while no rank is at work, or by one before all have gathered. */
#define MM_COMM_GOES_ON   0u
#define MM_COMM_ABORTED   1u
#define MM_COMM_TIMED_OUT 2u
void mm_comm_watch(mm_comm *c, volatile uint32_t *word);

/* The ranks of pipeline stages: what a rank of `from` sends, the same rank of `to` receives. Aborting one aborts all that are linked. */
void mm_comm_link(mm_comm *from, mm_comm *to);
/* x[n] to the next stage; returns when it was taken. */
void mm_comm_send(mm_comm *c, uint32_t rank, float *x, size_t n);
/* x[n] from the stage before; false where it does not come, since some rank failed. */
bool mm_comm_receive(mm_comm *c, uint32_t rank, float *x, size_t n);

#ifdef __cplusplus
}
#endif
#endif
