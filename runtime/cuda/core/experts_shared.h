/* The experts of a single token in the launches of a shared expert next to them (experts_shared.cu). */
#ifndef MM_CUDA_EXPERTS_SHARED_H
#define MM_CUDA_EXPERTS_SHARED_H

#include "runtime/cuda/core/kernels.h"

/* The second product of mm_cu_experts_one alone: a.y from the rows of a.middle. */
cudaError_t mm_cu_experts_one_down(const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s);
/* A shared expert next to them, of weight 1: up[2 · inter, H], down[H, inter], and middle[inter] for the row between them. */
struct mm_cu_shared {
  mm_cu_weight up, down;
  __nv_bfloat16 *middle;
};
/* True where mm_cu_experts_joined takes these weights of a single token; where that makes the shared expert's second product too. */
bool mm_cu_joins_shared(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_shared &a, uint32_t top_k);
bool mm_cu_joins_down(const mm_cu_weight &w2, const mm_cu_shared &a);
/* mm_cu_experts_one, and in the same launches the shared expert: a.y is the sum of both where mm_cu_joins_down, else that of the routed
 * experts, and shared.middle is there. */
cudaError_t mm_cu_experts_joined(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                 const mm_cu_shared &shared, cudaStream_t s);

#endif
