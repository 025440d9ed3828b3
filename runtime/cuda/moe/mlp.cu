/* Rows between the products of a dense MLP: that of a dense layer, or the shared expert next to the routed
 * ones.
 *
 * activate_rows. Shapes: wide[T, 2·inter] f32, gates then up values, as the first product leaves its sums;
 * middle[T, inter] bf16. Grid (inter / 256, T), 256 threads, a column each. add_rows: y[T, width] bf16 +=
 * add[T, width] f32, the same grid; routed and shared parts are one partial sum of the rank then. No shared
 * memory.
 *
 * Maths: runtime/cpu/cpu_mlp.c, with the activation of core/swiglu.cuh before any rounding. */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/swiglu.cuh"

namespace {

constexpr uint32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    activate_rows(bf16 *middle, const float *wide, uint32_t inter, const __grid_constant__ mm_cu_activation act) {
  grid_wait_and_launch_next();
  const uint32_t c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= inter) return;
  const float *const row = wide + (size_t)blockIdx.y * 2 * inter;
  middle[(size_t)blockIdx.y * inter + c] = __float2bfloat16_rn(activated(act, row[c], row[inter + c]));
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
                           cudaStream_t s) {
  return launch(activate_rows, dim3(ceil_div(inter, kThreads), tokens), kThreads, 0, s, middle, wide, inter, act);
}

cudaError_t mm_cu_add_rows(__nv_bfloat16 *y, const float *add, uint32_t tokens, uint32_t width, cudaStream_t s) {
  return launch(add_rows, dim3(ceil_div(width, kThreads), tokens), kThreads, 0, s, y, add, width);
}
