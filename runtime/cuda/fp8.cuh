/* Rounding of inputs on the device, as quant/activation.c does it. */
#ifndef MM_CUDA_FP8_CUH
#define MM_CUDA_FP8_CUH

#include "runtime/cuda/device.cuh"
#include "runtime/cuda/fp8.h"

/* a / b to nearest, given b's inverse to nearest: two steps of Newton leave the remainder that decides. b normal, the quotient too. */
__device__ __forceinline__ float divided(float a, float b, float inverse) {
  float q = a * inverse;
  q = fmaf(fmaf(-b, q, a), inverse, q);
  return fmaf(fmaf(-b, q, a), inverse, q);
}

/* The scale of E4M3 numbers of this magnitude. */
struct act_scale {
  float value, inverse;
  __device__ __forceinline__ explicit act_scale(float amax) { value = __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f), inverse = __frcp_rn(value); }
  /* The codes of two numbers, the first in the low byte. */
  __device__ __forceinline__ uint16_t codes(float a, float b) const {
    return __nv_cvt_float2_to_fp8x2(make_float2(divided(a, value, inverse), divided(b, value, inverse)), __NV_SATFINITE, __NV_E4M3);
  }
};

#endif
