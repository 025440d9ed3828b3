/* Kernels that work row by row: embedding, RMS norm, gated norm, and the residual with its norm. A block per row, eight columns per
 * thread and turn; the row stays in registers between its sum and its use. Bits do not depend on the number of threads. */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/row.cuh"

namespace {

constexpr int kMaxThreads = 1024, kMaxTurns = 2;
static_assert(kMaxThreads * kMaxTurns * 8 == MM_CU_MAX_WIDTH);

/* normalise_row by the block, its weights read before the kernels before it are done. */
template <class Value, class Finish>
__device__ __forceinline__ void normalise(uint32_t width, float eps, const float *w, const Value &value, const Finish &finish) {
  __shared__ float part[kMaxThreads / 32 * kMaxTurns];
  const row_columns own = {threadIdx.x, blockDim.x, width};
  float f[kMaxTurns][8];
  grid_launch_next_early();
  each_turn<kMaxTurns>(own, [&](int i, uint32_t c) { load8(f[i], w + c); });
  grid_wait();
  const auto weights = [&](int i, uint32_t, float v[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = f[i][j];
  };
  normalise_row<kMaxTurns>(own, eps, part, value, weights, finish, [] { __syncthreads(); });
}

__global__ void norm_rows(bf16 *y, const bf16 *x, const float *w, float eps, uint32_t width) {
  const size_t row = (size_t)blockIdx.x * width;
  normalise(
      width, eps, w, [&](int, uint32_t c, float v[8]) { load8(v, x + row + c); },
      [&](int, uint32_t c, float v[8]) { store8(y + row + c, v); });
}

__global__ void gated_norm_rows(bf16 *y, const bf16 *o, const bf16 *gate, const float *w, float eps, uint32_t width, mm_cu_codes codes) {
  const size_t row = (size_t)blockIdx.x * width;
  uint4 raw[kMaxTurns];
  normalise(
      width, eps, w,
      [&](int i, uint32_t c, float v[8]) {
        raw[i] = *reinterpret_cast<const uint4 *>(gate + row + c);
        load8(v, o + row + c);
      },
      [&](int i, uint32_t c, float v[8]) {
        float z[8];
        widen8(z, raw[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= sigmoid(z[j]);
        finish8(y, row + c, blockIdx.x, c, v, codes);
      });
}

__global__ void combine_rows(const __grid_constant__ mm_cu_combine a, uint32_t width) {
  const size_t row = (size_t)blockIdx.x * width;
  normalise(
      width, a.eps, a.w,
      [&](int, uint32_t c, float v[8]) {
        mix8(v, a, *reinterpret_cast<const uint4 *>(a.residual + row + c), *reinterpret_cast<const uint4 *>(a.branch + row + c));
        store8(a.h + row + c, v);
      },
      [&](int, uint32_t c, float v[8]) { finish8(a.n, row + c, blockIdx.x, c, v, a.codes); });
}

__global__ void embed_rows(bf16 *x, const bf16 *table, const __grid_constant__ mm_cu_ids ids, uint32_t width) {
  grid_launch_next_early();
  grid_wait();
  const int32_t slot = ids.slot[blockIdx.x];
  int32_t id = ids.id[blockIdx.x];
  if (id < 0 && slot >= 0) id = ids.last_id[slot];
  if (ids.kept && slot >= 0 && threadIdx.x == 0) ids.kept[(size_t)slot * ids.positions + ids.pos[blockIdx.x]] = id;
  uint4 *to = reinterpret_cast<uint4 *>(x + (size_t)blockIdx.x * width);
  const bool there = slot >= 0 && (uint32_t)id - ids.first < ids.count;
  const uint4 *from = reinterpret_cast<const uint4 *>(table + (there ? (size_t)((uint32_t)id - ids.first) * width : 0));
  for (uint32_t i = threadIdx.x; i < width / 8; i += blockDim.x) to[i] = there ? from[i] : make_uint4(0, 0, 0, 0);
}

__global__ void copy_pieces(uint4 *to, const uint4 *from, size_t n) {
  grid_launch_next_early();
  grid_wait();
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) to[i] = from[i];
}

__global__ void add_one(float *w, size_t n) {
  grid_wait_and_launch_next();
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) w[i] += 1.0f;
}

/* The most that are of use, or for many rows half of that, so that a multiprocessor has several. */
bool row_threads(uint32_t tokens, uint32_t width, unsigned *threads) {
  const unsigned warps = ceil_div(width, 256);
  *threads = min(tokens > 128 && warps > 16 ? ceil_div(warps, kMaxTurns) : warps, kMaxThreads / 32u) * 32;
  return width % 8 == 0 && width <= MM_CU_MAX_WIDTH;
}

}  // namespace

cudaError_t mm_cu_add_one(float *w, size_t n, cudaStream_t s) { return launch(add_one, ceil_div((unsigned)n, 256), 256, 0, s, w, n); }

cudaError_t mm_cu_norm(bf16 *y, const bf16 *x, const float *w, float eps, uint32_t tokens, uint32_t width, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(tokens, width, &threads)) return cudaErrorInvalidValue;
  return launch(norm_rows, tokens, threads, 0, s, y, x, w, eps, width);
}

cudaError_t mm_cu_gated_norm(const mm_cu_gated &a, uint32_t tokens, const mm_cu_codes &codes, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(tokens, a.width, &threads) || !codes_fit(codes, tokens, a.width)) return cudaErrorInvalidValue;
  return launch(gated_norm_rows, tokens, threads, 0, s, a.y, a.o, a.gate, a.w, a.eps, a.width, codes);
}

cudaError_t mm_cu_combine_rows(const mm_cu_combine &a, uint32_t tokens, uint32_t width, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(tokens, width, &threads) || !codes_fit(a.codes, tokens, width)) return cudaErrorInvalidValue;
  return launch(combine_rows, tokens, threads, 0, s, a, width);
}

cudaError_t mm_cu_copy(bf16 *to, const bf16 *from, size_t n, cudaStream_t s) {
  if (n % 8 != 0) return cudaErrorInvalidValue;
  const unsigned blocks = (unsigned)min((n / 8 + 255) / 256, (size_t)4 * multiprocessors());
  return launch(copy_pieces, blocks, 256, 0, s, reinterpret_cast<uint4 *>(to), reinterpret_cast<const uint4 *>(from), n / 8);
}

cudaError_t mm_cu_embed(bf16 *x, const bf16 *table, const mm_cu_ids &ids, uint32_t tokens, uint32_t width, cudaStream_t s) {
  unsigned threads;
  if (!row_threads(tokens, width, &threads)) return cudaErrorInvalidValue;
  return launch(embed_rows, tokens, threads, 0, s, x, table, ids, width);
}
