/* The residual with its norm, a thread for eight columns: the steps that every kernel takes alike, so that its bits do not depend on which.
 */
#ifndef MM_CUDA_NORM_CUH
#define MM_CUDA_NORM_CUH

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"

__device__ __forceinline__ void store8(bf16 *to, const float v[8]) { *reinterpret_cast<uint4 *>(to) = narrow8(v); }

/* alpha·residual + beta·branch. */
__device__ __forceinline__ void mix8(float v[8], const mm_cu_combine &a, uint4 residual, uint4 branch) {
  float b[8];
  widen8(v, residual), widen8(b, branch);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmaf_rn(a.alpha, v[i], __fmul_rn(a.beta, b[i]));
}
__device__ __forceinline__ float square8(const float v[8], float sum = 0) {
#pragma unroll
  for (int i = 0; i < 8; i++) sum = __fmaf_rn(v[i], v[i], sum);
  return sum;
}
/* The factor of a row, from the sums of squares of each 256 columns (warp_sum of square8), 64 at most, once all are written. */
__device__ __forceinline__ float norm_scale(const float *part, uint32_t warps, uint32_t width, float eps) {
  const uint32_t lane = threadIdx.x % 32;
  const float sum = (lane < warps ? part[lane] : 0.0f) + (lane + 32 < warps ? part[lane + 32] : 0.0f);
  return rsqrtf(warp_sum(sum) / (float)width + eps);
}
/* v · scale · w, as the norm's result is rounded. */
__device__ __forceinline__ void scale8(float v[8], float scale, const float w[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmul_rn(__fmul_rn(v[i], scale), w[i]);
}

#endif
