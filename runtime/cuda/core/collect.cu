/* A thread adds the rows of one column of one matrix in their order, so that no two threads write to one place and every run gives the same
 * bits. */
#include "runtime/cuda/core/collect.h"

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kThreads = 64;

__global__ void __launch_bounds__(kThreads) add_inputs(mm_cu_sums to, mm_cu_given in) {
  const uint32_t column = blockIdx.x * kThreads + threadIdx.x, lead = blockIdx.y;
  grid_wait_and_launch_next();
  const uint32_t from = in.offset ? in.offset[lead] : 0, end = in.offset ? in.offset[lead + 1] : in.rows;
  if (column >= to.k || from >= end) return;
  const size_t at = (size_t)lead * to.k + column;
  double square = to.square[at];
  float amax = to.amax[at];
  unsigned long long rows = 0;
  for (uint32_t i = from; i < end; i++) {
    const uint32_t row = in.pick ? in.pick[i] / in.each : i;
    if (in.slot && in.slot[row] < 0) continue;
    const float v = __bfloat162float(in.x[(size_t)row * to.k + column]);
    square += (double)v * (double)v;
    amax = fmaxf(amax, fabsf(v));
    rows++;
  }
  to.square[at] = square, to.amax[at] = amax;
  if (column == 0) to.rows[lead] += rows;
}

}  // namespace

cudaError_t mm_cu_add_inputs(const mm_cu_sums &to, const mm_cu_given &in, cudaStream_t s) {
  return launch(add_inputs, dim3(ceil_div(to.k, kThreads), in.offset ? to.lead : 1), kThreads, 0, s, to, in);
}
