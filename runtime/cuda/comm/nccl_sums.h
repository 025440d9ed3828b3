/* Sums over the ranks of a stage that are in several processes: NCCL brings all ranks' numbers to each, and kernels add them in rank order.
 * peers.h says what its functions do, which come here where mm_comm_is_across; these are theirs. */
#ifndef MM_CUDA_ACROSS_H
#define MM_CUDA_ACROSS_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "runtime/engine/comm.h"

struct mm_cu_across;
/* Also MM_UNSUPPORTED E_NCCL (nccl.h). NCCL's own failures are MM_IO E_NCCL. A rank that waits longer than limit_s for others has its
 * kernels end, whatever its host is doing; where that cannot be, the process ends with E_RANK. */
mm_cu_across *mm_cu_across_open(mm_comm *comm, uint32_t rank, uint32_t ranks, double limit_s, mm_err *err);
void mm_cu_across_close(mm_cu_across *a); /* accepts NULL; recorded steps are gone before */

cudaError_t mm_cu_across_sum(mm_cu_across *a, __nv_bfloat16 *x, uint64_t n, cudaStream_t s);
cudaError_t mm_cu_across_sum_f32(mm_cu_across *a, float *x, uint64_t n, cudaStream_t s);
cudaError_t mm_cu_across_max_f32(mm_cu_across *a, float *x, uint64_t n, cudaStream_t s);
/* own[rows, n] of rank r becomes columns [r·n, (r + 1)·n) of all[rows, ranks·n] on every rank. */
cudaError_t mm_cu_across_share(mm_cu_across *a, float *all, const float *own, uint32_t rows, uint32_t n, cudaStream_t s);

MM_MUST_USE bool mm_cu_across_check(const mm_cu_across *a, mm_err *err);
/* NCCL is joined anew: recorded steps are gone before. */
MM_MUST_USE bool mm_cu_across_reset(mm_cu_across *a, mm_err *err);
void mm_cu_across_limit(mm_cu_across *a, double limit_s);

#endif
