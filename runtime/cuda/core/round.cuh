/* Inputs as the numbers that codes of any kind stand for. */
#ifndef MM_CUDA_ROUND_CUH
#define MM_CUDA_ROUND_CUH

#include "runtime/cuda/core/fp8.cuh"

/* Numbers rounded to the codes of a format, as quant/activation.c does it. fixed: the row's scale where the format has a given one, above
 * 0. */
struct rounder {
  mm_act_format format;
  float fixed;

  __device__ float largest_code() const { return format.code == MM_CODE_E4M3 ? 448.0f : format.code == MM_CODE_INT8 ? 127.0f : 6.0f; }
  /* The number of x's code, x being divided by its scale already. */
  __device__ float code(float x) const {
    if (format.code == MM_CODE_E4M3) return rounded_e4m3(x);
    if (format.code == MM_CODE_INT8) return fminf(127.0f, fmaxf(-127.0f, rintf(x)));
    /* E2M1: steps of 1/2 below 2, of 1 below 4, of 2 below 8, as those of 1.5 · 2^22 times the power of two at or below x are */
    const float a = fabsf(x), whole = __uint_as_float(max(__float_as_uint(a) & 0x7f800000u, 0x3f800000u) + (22 << 23) + 0x400000u);
    return copysignf(fminf(__fsub_rn(__fadd_rn(a, whole), whole), 6.0f), x);
  }
  __device__ float row_scale(float amax) const {
    if (format.fixed && fixed > 0) return fixed;
    return __fdiv_rn(fmaxf(amax, 1e-10f), format.scale == MM_F8_E4M3 ? 448.0f * largest_code() : largest_code());
  }
  __device__ float group_scale(float amax, float row) const {
    if (format.scale == MM_F8_E4M3) return rounded_e4m3(__fdiv_rn(__fdiv_rn(amax, largest_code()), row)) * row;
    if (format.scale != MM_F8_E8M0) return __fdiv_rn(fmaxf(amax, 1e-10f), largest_code());
    return power_scale(amax, format.code == MM_CODE_E4M3);
  }
  /* The power of two for numbers of this magnitude. The largest codes are 1.75 · 2^8 (wide) and 1.5 · 2^2. */
  __device__ static float power_scale(float amax, bool wide) {
    const uint32_t u = __float_as_uint(fmaxf(amax, 1e-10f));
    const int e = (int)(u >> 23) - (wide ? 8 : 2) + ((u & 0x7fffff) > (wide ? 0x600000u : 0x400000u));
    return __uint_as_float((uint32_t)max(e, 1) << 23); /* e ≥ 85: amax is at least 1e-10 */
  }
  /* A scale of the whole row takes part; it depends on the row's numbers. */
  __host__ __device__ bool whole_row() const { return format.group == 0 || format.scale == MM_F8_E4M3; }
  __device__ bool needs_row() const { return whole_row() && !(format.fixed && fixed > 0); }
  /* v, each a bf16, of one scale = the numbers that its codes stand for. */
  template <int N>
  __device__ void to_numbers(float (&v)[N], float scale) const {
    if (format.scale == MM_F8_E8M0 || scale > 0x1p-80f) { /* divided_bf16 holds for it */
      const float inverse = __frcp_rn(scale);
#pragma unroll
      for (float &x : v) {
        const float q = divided_bf16(x, scale, inverse), n = code(q) * scale;
        x = isnan(q) ? q : n;
      }
    } else {
#pragma unroll
      for (float &x : v) {
        const float q = scale == 0 && !isnan(x) ? 0.0f : __fdiv_rn(x, scale), n = code(q) * scale;
        x = isnan(q) ? q : n;
      }
    }
  }
};

/* The largest magnitude of eight columns. */
__device__ __forceinline__ float largest8(uint4 q) {
  const uint32_t most = max2(max2(q.x & 0x7fff7fffu, q.y & 0x7fff7fffu), max2(q.z & 0x7fff7fffu, q.w & 0x7fff7fffu));
  return fmaxf(low(most), high(most));
}

/* A lane's four columns of a row; zeros from k on. */
__device__ __forceinline__ void load_columns(float (&v)[4], const __nv_bfloat16 *row, uint32_t column, uint32_t k) {
  const uint2 q = column < k ? *reinterpret_cast<const uint2 *>(row + column) : make_uint2(0, 0);
  v[0] = low(q.x), v[1] = high(q.x), v[2] = low(q.y), v[3] = high(q.y);
}

/* The largest magnitude of four columns of each of so many lanes side by side. */
__device__ __forceinline__ float largest(const float (&v)[4], uint32_t lanes) {
  float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  for (uint32_t m = 1; m < lanes; m *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
  return most;
}

/* The largest magnitude of a row, for all threads of the block. */
template <unsigned kWarps>
__device__ float largest_of_row(const __nv_bfloat16 *row, uint32_t k) {
  __shared__ float part[kWarps];
  float most = 0, v[4];
  for (uint32_t c = threadIdx.x * 4; c < k; c += kWarps * 128) {
    load_columns(v, row, c, k);
    most = fmaxf(most, largest(v, 1));
  }
#pragma unroll
  for (int m = 16; m > 0; m /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
  __syncthreads();
  for (uint32_t i = 0; i < kWarps; i++) most = fmaxf(most, part[i]);
  return most;
}

/* Eight columns, which a lane has of a row: as numbers of a group's codes. lanes: those side by side that have columns of one 128. */
__device__ __forceinline__ uint4 rounded8(const rounder &how, uint4 q, float row_scale, uint32_t lanes) {
  float v[8], scale = row_scale;
  if (how.format.group) {
    float most = largest8(q);
    for (uint32_t m = 1; m < how.format.group / 8; m *= 2) most = fmaxf(most, __shfl_xor_sync(lanes, most, m));
    scale = how.group_scale(most, row_scale);
  }
  widen8(v, q);
  how.to_numbers(v, scale);
  return make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
}

inline rounder rounder_of(const mm_cu_rounding &how) { return {mm_act_formats[how.kind], how.fixed}; }

#endif
