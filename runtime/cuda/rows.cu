/* Kernels that work row by row: embedding, RMS norm, gated norm, and the residual with its norm. A block per row, eight columns per
 * thread and turn; the row stays in registers between its sum and its use. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr int kMaxThreads = 1024, kMaxTurns = 2; /* rows of up to 16,384 columns */

__device__ __forceinline__ void store8(bf16 *row, uint32_t c, const float v[8]) { *reinterpret_cast<uint4 *>(row + c) = narrow8(v); }

/* value(c, v) yields a row's columns [c, c + 8) before the norm; finish(c, v) takes them normalised, weights not yet applied. */
template <class Value, class Finish>
__device__ __forceinline__ void normalise(uint32_t width, float eps, const Value &value, const Finish &finish) {
  __shared__ float scratch[33];
  float v[kMaxTurns][8], sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxTurns; i++) {
    uint32_t c = (i * blockDim.x + threadIdx.x) * 8;
    if (c >= width) break;
    value(c, v[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[i][j] * v[i][j];
  }
  float scale = rsqrtf(block_sum(sum, scratch) / (float)width + eps);
#pragma unroll
  for (int i = 0; i < kMaxTurns; i++) {
    uint32_t c = (i * blockDim.x + threadIdx.x) * 8;
    if (c >= width) break;
#pragma unroll
    for (int j = 0; j < 8; j++) v[i][j] *= scale;
    finish(c, v[i]);
  }
}

__global__ void norm_rows(bf16 *y, const bf16 *x, const float *w, float eps, uint32_t width) {
  grid_wait();
  grid_launch_next();
  const size_t row = (size_t)blockIdx.x * width;
  normalise(
      width, eps, [&](uint32_t c, float v[8]) { load8(v, x + row + c); },
      [&](uint32_t c, float v[8]) {
        float f[8];
        load8(f, w + c);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= f[j];
        store8(y + row, c, v);
      });
}

__global__ void gated_norm_rows(bf16 *y, const bf16 *o, const bf16 *gate, const float *w, float eps, uint32_t width) {
  grid_wait();
  grid_launch_next();
  const size_t row = (size_t)blockIdx.x * width;
  normalise(
      width, eps, [&](uint32_t c, float v[8]) { load8(v, o + row + c); },
      [&](uint32_t c, float v[8]) {
        float f[8], z[8];
        load8(f, w + c);
        load8(z, gate + row + c);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= f[j] * sigmoid(z[j]);
        store8(y + row, c, v);
      });
}

__global__ void combine_rows(const __grid_constant__ mm_cu_combine a, uint32_t width) {
  grid_wait();
  grid_launch_next();
  const size_t row = (size_t)blockIdx.x * width;
  normalise(
      width, a.eps,
      [&](uint32_t c, float v[8]) {
        float b[8];
        load8(v, a.residual + row + c);
        load8(b, a.branch + row + c);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = a.alpha * v[j] + a.beta * b[j];
        store8(a.h + row, c, v);
      },
      [&](uint32_t c, float v[8]) {
        float f[8];
        load8(f, a.w + c);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= f[j];
        store8(a.n + row, c, v);
      });
}

__global__ void embed_rows(bf16 *x, const bf16 *table, const __grid_constant__ mm_cu_ids ids, uint32_t width) {
  grid_wait();
  grid_launch_next();
  const int32_t slot = ids.slot[blockIdx.x];
  int32_t id = ids.id[blockIdx.x];
  if (id < 0 && slot >= 0) id = ids.chosen[slot];
  uint4 *to = reinterpret_cast<uint4 *>(x + (size_t)blockIdx.x * width);
  const uint4 *from = reinterpret_cast<const uint4 *>(table + (slot < 0 ? 0 : (size_t)id * width));
  for (uint32_t i = threadIdx.x; i < width / 8; i += blockDim.x) to[i] = slot < 0 ? make_uint4(0, 0, 0, 0) : from[i];
}

bool row_threads(uint32_t width, unsigned *threads) {
  *threads = min(ceil_div(ceil_div(width, 8), 32) * 32, (unsigned)kMaxThreads);
  return width % 8 == 0 && width <= kMaxThreads * kMaxTurns * 8;
}

}  // namespace

cudaError_t mm_cu_norm(bf16 *y, const bf16 *x, const float *w, float eps, uint32_t tokens, uint32_t width, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(width, &threads)) return cudaErrorInvalidValue;
  return launch(norm_rows, tokens, threads, 0, s, y, x, w, eps, width);
}

cudaError_t mm_cu_gated_norm(bf16 *y, const bf16 *o, const bf16 *gate, const float *w, float eps, uint32_t tokens, uint32_t width,
                             cudaStream_t s) {
  unsigned threads;
  if (!row_threads(width, &threads)) return cudaErrorInvalidValue;
  return launch(gated_norm_rows, tokens, threads, 0, s, y, o, gate, w, eps, width);
}

cudaError_t mm_cu_combine_rows(const mm_cu_combine &a, uint32_t tokens, uint32_t width, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(width, &threads)) return cudaErrorInvalidValue;
  return launch(combine_rows, tokens, threads, 0, s, a, width);
}

cudaError_t mm_cu_embed(bf16 *x, const bf16 *table, const mm_cu_ids &ids, uint32_t tokens, uint32_t width, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(width, &threads)) return cudaErrorInvalidValue;
  return launch(embed_rows, tokens, threads, 0, s, x, table, ids, width);
}
