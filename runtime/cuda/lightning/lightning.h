/* The sm_90a kernel of lightning attention over prefill chunks, head_dim 128 (lightning_hopper.cu); mm_cu_lightning_prefill chooses it. */
#ifndef MM_CUDA_LIGHTNING_H
#define MM_CUDA_LIGHTNING_H

#include "runtime/cuda/core/kernels.h"

cudaError_t mm_cu_lightning_hopper(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s);

#endif
