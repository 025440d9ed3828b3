/* Kernels that mm_cu_gqa_prefill and mm_cu_gqa_decode dispatch to. */
#ifndef MM_CUDA_GQA_H
#define MM_CUDA_GQA_H

#include "runtime/cuda/core/kernels.h"

/* Causal attention over prefill chunks on sm_90a, a bf16 cache (gqa_hopper.cu). */
cudaError_t mm_cu_gqa_hopper(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s);

/* mm_cu_gqa_decode of verify rows (gqa_verify.cu): its work space and cut. */
struct mm_cu_gqa_scratch {
  uint32_t *counter;
  float *part, *far;
  mm_cu_gqa_cut cut;
};
cudaError_t mm_cu_gqa_verify(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                             const mm_cu_gqa_scratch &scratch, cudaStream_t s);

#endif
