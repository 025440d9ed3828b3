/* What experts and dense MLPs make of a gate and an up value (mm_cu_activation), from the f32 accumulators
 * of the products before. The maths is that of runtime/cpu (cpu_vectors_body.h); a gate or an up value
 * that is no number stays none. */
#ifndef MM_CUDA_SWIGLU_CUH
#define MM_CUDA_SWIGLU_CUH

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"

__device__ __forceinline__ float activated(const mm_cu_activation &a, float gate, float up) {
  if (!a.swigluoai) return silu(gate) * up;
  const float g = gate > a.limit ? a.limit : gate, u = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  return (u + a.beta) * (g * sigmoid(a.alpha * g));
}

#endif
