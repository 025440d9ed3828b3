/* Products of a single token that one launch makes side by side: experts with a shared one (experts_shared.cu), and
 * linears of one row with weights of different codes (one_row.cu). */
#ifndef MM_CUDA_JOINED_H
#define MM_CUDA_JOINED_H

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

/* y = x·Wᵀ of a single row, next to two linears of the same x. */
struct mm_cu_three {
  mm_cu_weight w;
  __nv_bfloat16 *y;
  mm_cu_two two;
};
/* True where mm_cu_one_three takes these weights: the two are bf16, or of w's code. */
bool mm_cu_joins_three(const mm_cu_three &a);
cudaError_t mm_cu_one_three(const mm_cu_three &a, cudaStream_t s);
/* The kernels that make several products of a single row round the inputs of w, or those are not rounded. */
bool mm_cu_rounds_joined(const mm_cu_weight &w);

#endif
