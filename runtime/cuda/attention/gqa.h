/* The sm_90a kernel of causal attention over prefill chunks, a bf16 cache (gqa_hopper.cu); mm_cu_gqa_prefill dispatches to it. */
#ifndef MM_CUDA_GQA_H
#define MM_CUDA_GQA_H

#include "runtime/cuda/core/kernels.h"

cudaError_t mm_cu_gqa_hopper(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s);

#endif
