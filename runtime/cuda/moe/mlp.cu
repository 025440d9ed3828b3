/* Rows between the products of a dense MLP: that of a dense layer, or the shared expert next to the routed
 * ones.
 *
 * activate_rows. Shapes: wide[T, 2·inter] f32, gates then up values, as the first product leaves its sums;
 * middle[T, inter] bf16, and their codes where the second product multiplies those. Grid (inter / 512, T),
 * 64 threads, eight columns each. add_rows: y[T, width] bf16 += add[T, width] f32, grid (width / 256, T),
 * 256 threads, a column each; routed and shared parts are one partial sum of the rank then. No shared memory.
 *
 * Maths: runtime/cpu/cpu_mlp.c, with the activation of core/swiglu.cuh before any rounding. */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/row.cuh"
#include "runtime/cuda/core/swiglu.cuh"

namespace {

constexpr uint32_t kThreads = 256, kActivating = 64, kEach = 8;

__global__ void __launch_bounds__(kActivating)
    activate_rows(bf16 *middle, const float *wide, uint32_t inter, const __grid_constant__ mm_cu_activation act, mm_cu_codes codes) {
  grid_wait_and_launch_next();
  const uint32_t c = (blockIdx.x * kActivating + threadIdx.x) * kEach;
  if (c >= inter) return;
  const float *const gate = wide + (size_t)blockIdx.y * 2 * inter + c, *const up = gate + inter;
  float v[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; i += 4) {
    const float4 g = *reinterpret_cast<const float4 *>(gate + i), u = *reinterpret_cast<const float4 *>(up + i);
    v[i] = activated(act, g.x, u.x), v[i + 1] = activated(act, g.y, u.y);
    v[i + 2] = activated(act, g.z, u.z), v[i + 3] = activated(act, g.w, u.w);
  }
  finish8(middle, (size_t)blockIdx.y * inter + c, blockIdx.y, c, v, codes);
}

__global__ void __launch_bounds__(kThreads) add_rows(bf16 *y, const float *add, uint32_t width) {
  grid_wait_and_launch_next();
  const uint32_t c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= width) return;
  const size_t at = (size_t)blockIdx.y * width + c;
  y[at] = __float2bfloat16_rn(__bfloat162float(y[at]) + add[at]);
}

}  // namespace

cudaError_t mm_cu_activate(__nv_bfloat16 *middle, const float *wide, const mm_cu_activation &act, uint32_t tokens, uint32_t inter,
                           const mm_cu_codes &codes, cudaStream_t s) {
  if (inter % kEach != 0 || !codes_fit(codes, tokens, inter)) return cudaErrorInvalidValue;
  return launch(activate_rows, dim3(ceil_div(inter, kActivating * kEach), tokens), kActivating, 0, s, middle, wide, inter, act, codes);
}

cudaError_t mm_cu_add_rows(__nv_bfloat16 *y, const float *add, uint32_t tokens, uint32_t width, cudaStream_t s) {
  return launch(add_rows, dim3(ceil_div(width, kThreads), tokens), kThreads, 0, s, y, add, width);
}
