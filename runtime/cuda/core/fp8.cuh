/* Rounding of inputs on the device, as quant/activation.c does it. */
#ifndef MM_CUDA_FP8_CUH
#define MM_CUDA_FP8_CUH

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/fp8.h"

/* a / b rounded to nearest, given 1 / b rounded to nearest: two Newton steps. b and the quotient must be normal numbers. */
__device__ __forceinline__ float divided(float a, float b, float inverse) {
  float q = a * inverse;
  q = fmaf(fmaf(-b, q, a), inverse, q);
  return fmaf(fmaf(-b, q, a), inverse, q);
}

/* The same for a bf16 a, with one Newton step: tested for all 2^7 · 2^23 pairs of significands. Overflow gives infinity. */
__device__ __forceinline__ float divided_bf16(float a, float b, float inverse) {
  const float q = a * inverse, near = fmaf(fmaf(-b, q, a), inverse, q);
  return isinf(q) ? q : near;
}

/* The scale that maps the largest magnitude amax to E4M3's largest number, 448. */
struct act_scale {
  float value, inverse;
  __device__ __forceinline__ explicit act_scale(float amax) { value = __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f), inverse = __frcp_rn(value); }
  /* The codes of two numbers, the first in the low byte. */
  __device__ __forceinline__ uint16_t codes(float a, float b) const {
    return (uint16_t)codes2_e4m3(divided(a, value, inverse), divided(b, value, inverse));
  }
  /* Their numbers, without the scale, as f16. */
  __device__ __forceinline__ uint32_t halves(float a, float b) const {
    return halves_e4m3(divided(a, value, inverse), divided(b, value, inverse));
  }
};

/* A group of 128 columns as E4M3 codes and their scale: 16 neighbouring lanes, which call it together, each with eight columns q. */
struct codes8 {
  uint2 code;
  float scale;
};
__device__ __forceinline__ codes8 encoded8(uint4 q) {
  const uint32_t lanes = 0xffffu << (threadIdx.x & 16);
  uint32_t most = max2(max2(q.x & 0x7fff7fffu, q.y & 0x7fff7fffu), max2(q.z & 0x7fff7fffu, q.w & 0x7fff7fffu));
#pragma unroll
  for (int m = 1; m < 16; m *= 2) most = max2(most, __shfl_xor_sync(lanes, most, m));
  const act_scale scale(fmaxf(low(most), high(most)));
  float v[8];
  widen8(v, q);
  return {make_uint2(scale.codes(v[0], v[1]) | (uint32_t)scale.codes(v[2], v[3]) << 16,
                     scale.codes(v[4], v[5]) | (uint32_t)scale.codes(v[6], v[7]) << 16),
          scale.value};
}
/* The same stored, columns from `column` on; with write false nothing is stored. */
__device__ __forceinline__ void encode8(const mm_cu_codes &to, uint32_t row, uint32_t column, uint4 q, bool write = true) {
  const codes8 c = encoded8(q);
  if (!write) return;
  *reinterpret_cast<uint2 *>(to.code + (size_t)row * to.pitch + column) = c.code;
  if (threadIdx.x % 16 == 0) to.scale[(size_t)(column / MM_CU_GROUP) * to.scale_pitch + row] = c.scale;
}

#endif
