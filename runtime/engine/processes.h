/* Processes of one run, each with some of the ranks: one a host, or several on one. All messages between them go through
 * mm_process_group.exchange.
 */
#ifndef MM_RUNTIME_PROCESSES_H
#define MM_RUNTIME_PROCESSES_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n bytes to a process, or from one. */
typedef struct mm_transfer {
  uint32_t process;
  void *data;
  size_t n;
} mm_transfer;

#define MM_IDLE (-1.0) /* limit_s of mm_process_group.exchange */

typedef struct mm_process_group mm_process_group;
struct mm_process_group {
  uint32_t process, processes;
  /* Sends and receives all given messages; returns when the data may be used again and has arrived. Messages from one process to another
   * under one tag arrive in the order in which they were sent; each is received as one of the same size. One call per tag at a time; calls
   * with different tags may come from any threads. A process that ends without having met the others takes all of them with it; so does one
   * that waits here for limit_s seconds, and names the process that does not come (E_RANK). limit_s 0: it waits without end, and a
   * note names the other process when that takes long; MM_IDLE: without a note, as for a task that may never come. */
  void (*exchange)(mm_process_group *w, uint32_t tag, const mm_transfer *out, uint32_t outs, const mm_transfer *in, uint32_t ins,
                   double limit_s);
};

/* The processes that mpirun started together with this one; *w NULL where there are no others. leads: this program is the first of them,
 * else any other; MM_USAGE E_MPI where it is not. MM_UNSUPPORTED E_MPI in a build that cannot speak to others (make MPI=1). */
MM_MUST_USE bool mm_process_group_find(bool leads, mm_process_group **w, mm_err *err);
/* Called by a program that exits before it has looked for others (mm_program): MM_USAGE E_MPI where mpirun started some, which may wait for
 * it. mpirun ends them when one fails. */
MM_MUST_USE bool mm_process_group_none(mm_err *err);
/* How many of so many ranks a process has. */
static inline uint32_t mm_process_group_ranks(const mm_process_group *w, uint32_t ranks) { return w ? ranks / w->processes : ranks; }
/* From here on this process may end without the others. */
void mm_process_group_part(mm_process_group *w); /* accepts NULL */

#ifdef __cplusplus
}
#endif
#endif
