/* Rounding of inputs on the device, as quant/activation.c does it for groups of 128 columns. */
#ifndef MM_CUDA_FP8_CUH
#define MM_CUDA_FP8_CUH

#include "runtime/cuda/device.cuh"
#include "runtime/cuda/fp8.h"

__device__ __forceinline__ float act_scale(float amax) { return __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f); }

/* The codes of two numbers, the first in the low byte. */
__device__ __forceinline__ uint16_t act_codes(float a, float b, float scale) {
  return __nv_cvt_float2_to_fp8x2(make_float2(__fdiv_rn(a, scale), __fdiv_rn(b, scale)), __NV_SATFINITE, __NV_E4M3);
}

#endif
