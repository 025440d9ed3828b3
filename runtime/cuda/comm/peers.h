/* Sums over the ranks of one process, each on a device of its own (or several on one, in tests), by kernels that write into each other's
 * memory, or into each other's pinned host memory where a device cannot reach another's. Every rank calls the same functions in the same
 * order. */
#ifndef MM_CUDA_PEERS_H
#define MM_CUDA_PEERS_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "runtime/engine/comm.h"

#define MM_CU_PEERS 8 /* ranks at most */

struct mm_cu_peers;
/* On the current device; collective. shared: two ranks of the process have one device, be it ranks of other stages; all ranks pass the
 * same, and those of this stage are looked at anyway. rows_bytes: of the rows of a step, bf16, at most. MM_UNSUPPORTED E_PEER for
 * more than MM_CU_PEERS ranks. Where one device cannot write to another's memory, all write to pinned host memory. limit_s: seconds that a
 * kernel waits for another rank. Returns NULL with `err` unset if another rank failed (mm_comm_abort); that rank reports the error. This
 * holds for all functions below. */
mm_cu_peers *mm_cu_peers_open(mm_comm *comm, uint32_t rank, uint32_t ranks, bool shared, uint64_t rows_bytes, double limit_s, mm_err *err);
/* Of a group of consecutive ranks of the stage's, of one process: comm is the group's part (mm_comm_part), `rank` the number in it.
 * Failures are the stage's, which checks, resets and loads for both; the group is reset before the stage and closed before it. Collective
 * of the group. */
mm_cu_peers *mm_cu_peers_open_group(const mm_cu_peers *stage, mm_comm *comm, uint32_t rank, uint32_t ranks, uint64_t rows_bytes,
                                    mm_err *err);
/* Only after the rank's queued work is done. Accepts NULL. */
void mm_cu_peers_close(mm_cu_peers *p);

/* x[n] becomes the sum over all ranks, added in rank order in f32 and rounded once: the same bits on all ranks, whatever n is. x is aligned
 * to 16 bytes; n % 8 == 0. Queued kernels hold nothing of the call but pointers: they may be recorded and replayed. */
cudaError_t mm_cu_peers_sum(mm_cu_peers *p, __nv_bfloat16 *x, uint64_t n, cudaStream_t s);
/* The same of f32; n % 4 == 0. The largest: of a number and NaN the later one. */
cudaError_t mm_cu_peers_sum_f32(mm_cu_peers *p, float *x, uint64_t n, cudaStream_t s);
cudaError_t mm_cu_peers_max_f32(mm_cu_peers *p, float *x, uint64_t n, cudaStream_t s);

/* own[rows, n] of rank r becomes columns [r·n, (r + 1)·n) of all[k][rows, ranks·n] on every rank k. all[ranks]: each rank's, as
 * mm_cu_peers_exchange_pointers brought them; what the others' streams did to theirs before is done when they are written. */
cudaError_t mm_cu_peers_all_gather(mm_cu_peers *p, float *const *all, const float *own, uint32_t rows, uint32_t n, cudaStream_t s);
/* Collective: all[ranks] becomes what each rank passes, memory of its device, which every other one can write to. */
MM_MUST_USE bool mm_cu_peers_exchange_pointers(mm_cu_peers *p, void *mine, void **all, mm_err *err);

/* Rows of groups of consecutive ranks: those of group g are rows first[g] … first[g + 1] - 1 of all, the same on each of its ranks. Some
 * group has rows. */
struct mm_cu_group_rows {
  uint32_t first[MM_CU_PEERS + 1];
  uint32_t groups, width; /* groups: 2 or more, which divide the ranks; width: numbers of a row, a multiple of 8 */
};
/* all[first[groups], width] becomes the rows of every group, of which `mine` are the rank's group's. Ranks of one process
 * (ranks_groups.cu). */
cudaError_t mm_cu_peers_gather_rows(const mm_cu_peers *p, const mm_cu_group_rows &g, __nv_bfloat16 *all, const __nv_bfloat16 *mine,
                                    cudaStream_t s);
/* mine[rows of the rank's group, width] becomes their sum over all ranks' all[first[groups], width], with the bits of mm_cu_peers_sum. */
cudaError_t mm_cu_peers_scatter_rows(const mm_cu_peers *p, const mm_cu_group_rows &g, __nv_bfloat16 *mine, const __nv_bfloat16 *all,
                                     cudaStream_t s);

/* True if a kernel with one block a row may exchange so many words of eight bytes in all; all ranks launch it in place of a sum
 * (peers.cuh). */
bool mm_cu_peers_small(const mm_cu_peers *p, uint32_t rows, uint64_t words);
/* True for two ranks and more words than a sum of few numbers has: one kernel sums and combines them (ranks_prefill.cu). */
bool mm_cu_peers_many(const mm_cu_peers *p, uint64_t words);
/* Memory of the current device that the others can write to, or host memory where they cannot; taken for `what`, given back by free. */
bool mm_cu_peers_malloc(const mm_cu_peers *p, void **to, size_t bytes, const char *what, mm_err *err);
void mm_cu_peers_free(const mm_cu_peers *p, void *memory);
bool mm_cu_peers_hosted(const mm_cu_peers *p);   /* in host memory */
extern bool mm_cu_peers_refused;                 /* for tests ($MM_TEST_NO_PEER): no device can write to another's memory */
bool mm_cu_peers_distinct(const mm_cu_peers *p); /* no two ranks of the process share a device */

/* Once the stream is done: MM_IO E_RANK, naming the rank, when this one timed out waiting for it. True when another rank failed: that rank
 * reports the error. Sums since then are unspecified. */
MM_MUST_USE bool mm_cu_peers_check(const mm_cu_peers *p, mm_err *err);
/* Collective, with no kernel of any rank under way, where sums were broken off (mm_comm_failed): all go on from here. False when a rank
 * does not come. */
MM_MUST_USE bool mm_cu_peers_reset(mm_cu_peers *p, mm_err *err);
/* Barrier of all ranks, around work that needs an idle device or blocks others. *all: whether every rank passed `mine` true. False when a
 * rank does not arrive: with E_RANK, as above, where this rank timed out waiting for it, else the timed-out rank reports it. */
MM_MUST_USE bool mm_cu_peers_barrier(mm_cu_peers *p, bool mine, bool *all, mm_err *err);
/* Where ranks share a device: returns once the stream, which has run a kernel by then, is done and all ranks are here. Ranks with devices
 * of their own do not wait. Copies of one rank may be queued behind another's, which waits for kernels that wait for the first rank: so all
 * copies to the device are done before any rank's kernels are launched, and all kernels before any copy back. And a new stream's first
 * kernel may not begin while others wait on the device (RESULTS.md, tests on devices), so it is one that nobody waits for. */
MM_MUST_USE bool mm_cu_peers_settle(mm_cu_peers *p, cudaStream_t s, mm_err *err);
/* Collective. CUDA puts a stream's work into one of a few hardware queues, two streams' into one where they begin at the same time: there
 * the second's kernels do not begin while one of the first waits and others are behind it. *all: a kernel of each rank's stream began
 * within 100 ms, in which those of the others waited; *late: this rank's did not. Ranks with devices of their own are not tried. */
MM_MUST_USE bool mm_cu_peers_try_streams(mm_cu_peers *p, cudaStream_t s, bool *late, bool *all, mm_err *err);
/* Between the kernels of a step and what follows them: returns once all ranks have launched theirs, so that a device that waits to be idle
 * becomes idle; settled as above where ranks share one. */
MM_MUST_USE bool mm_cu_peers_pause(mm_cu_peers *p, cudaStream_t s, mm_err *err);
/* While some rank has said true and not false again, kernels and meetings wait for ten minutes: its weights are on their way. Meetings
 * before the first call wait without end. */
void mm_cu_peers_load(mm_cu_peers *p, bool loading);

#endif
