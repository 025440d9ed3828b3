/* The rate of mma.sync alone: the ceiling of products in code that is not of sm_90a. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"
#include "tests/ops/gpu.h"

/* mma.sync on bf16 as fast as warps issue it, from registers alone. */
static __global__ void __launch_bounds__(256, 2) spin_mma(float *to, uint32_t turns) {
  uint32_t a[4][4], b[4][2];
  float d[4][4][4] = {}, sum = 0;
  for (uint32_t i = 0; i < 4; i++) {
    for (uint32_t j = 0; j < 4; j++) a[i][j] = pack2((float)(threadIdx.x * i % 7) - 3, (float)(threadIdx.x * j % 5) - 2);
    b[i][0] = pack2((float)(threadIdx.x % 11) - 5, (float)i), b[i][1] = pack2((float)(threadIdx.x % 3) - 1, (float)i);
  }
#pragma unroll 1
  for (uint32_t n = 0; n < turns; n++) {
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) mma(d[i / 4][i % 4], a[i / 4], b[i % 4][0], b[i % 4][1]);
  }
  for (uint32_t i = 0; i < 64; i++) sum += d[i / 16][i / 4 % 4][i % 4];
  to[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

double time_mma(double *flop) {
  const uint32_t blocks = 2 * multiprocessors(), turns = 8192;
  buffer<float> to((size_t)blocks * 256);
  *flop = 2.0 * 16 * 8 * 16 * 16 * turns * 8 * blocks;
  return time_graph(
      1, [&](cudaStream_t st, int) { CUDA_OK(launch(spin_mma, blocks, 256, 0, st, to.p, turns)); }, 400);
}
