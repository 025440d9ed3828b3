/* Which kernel multiplies rows with weights that are codes on sm_90a, in mm_cu_gemm and mm_cu_experts_gemm. */
#ifndef MM_CUDA_GEMM_WIDENED_H
#define MM_CUDA_GEMM_WIDENED_H

/* Weights are widened by one group of threads (gemm_hopper.cuh), and not by two (gemm_widened.cuh) or in registers (experts_many.cu), to
 * compare them; at first whether MM_ONE_PRODUCER is set. */
extern bool mm_cu_one_producer;

#endif
