/* The router's logits of a prefill step as one product of bf16: a row of f32 weights is the sum of three bf16 exactly, which are three rows
 * of the product's weights; their results are added, the smallest first. bf16 weights are one piece. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kThreads = 256;

constexpr uint32_t kPieces = 3;

__global__ void split(bf16 *to, const float *w, size_t n) {
  grid_wait_and_launch_next();
  for (size_t i = blockIdx.x * (size_t)kThreads + threadIdx.x; i < n; i += (size_t)gridDim.x * kThreads) {
    float left = w[i];
    for (uint32_t p = 0; p < kPieces; p++) {
      to[p * n + i] = __float2bfloat16_rn(left);
      left -= __bfloat162float(to[p * n + i]);
    }
  }
}

__global__ void sum_pieces(float *logits, const float *product, uint32_t experts, uint32_t n) {
  grid_wait_and_launch_next();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x, token = i / experts;
  if (i >= n) return;
  const float *from = product + (size_t)token * kPieces * experts + (i - token * experts);
  float sum = 0;
  for (uint32_t p = kPieces; p-- > 0;) sum += from[p * experts];
  logits[i] = sum;
}

/* to[tokens, n] = x·wᵀ where there are too few rows or columns to fill the device with large tiles: a block takes 64 rows and 8·kTiles
 * columns, a warp 16 rows, and goes through k by 64, five steps ahead. A result's bits do not depend on kTiles. */
constexpr uint32_t kFewRows = 64, kFewThreads = 128, kFewStages = 6;
template <int kTiles>
constexpr uint32_t few_step = (kFewRows + 8 * kTiles) * 128; /* bytes */

template <int kTiles>
__global__ void __launch_bounds__(kFewThreads)
    few_columns(float *to, const bf16 *x, const bf16 *w, uint32_t n, uint32_t k, uint32_t tokens) {
  extern __shared__ __align__(128) uint8_t few_raw[];
  const uint32_t base = shared_address(few_raw), steps = (k + 63) / 64, first = blockIdx.x * kFewRows, column = blockIdx.y * 8 * kTiles;
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  grid_wait_and_launch_next();
  auto fetch = [&](uint32_t s) {
    if (s < steps) {
#pragma unroll
      for (uint32_t i = 0; i < (kFewRows + 8 * kTiles) * 8 / kFewThreads; i++) {
        const uint32_t r = (i * kFewThreads + threadIdx.x) / 8, c = threadIdx.x % 8, at = s * 64 + c * 8;
        const bool of_x = r < kFewRows;
        const uint32_t from = of_x ? first + r : column + r - kFewRows;
        const bool valid = at < k && from < (of_x ? tokens : n);
        copy16_to(base + s % kFewStages * few_step<kTiles> + swizzled(r, c), (of_x ? x : w) + (valid ? (size_t)from * k + at : 0), valid);
      }
    }
    copy_commit();
  };
  float sum[kTiles][4] = {};
  for (uint32_t s = 0; s < kFewStages - 1; s++) fetch(s);
  for (uint32_t s = 0; s < steps; s++) {
    copy_wait<kFewStages - 2>();
    __syncthreads();
    fetch(s + kFewStages - 1);
    const uint32_t step = base + s % kFewStages * few_step<kTiles>;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t a[4];
      ldmatrix4_at(a, step + swizzled(row + lane % 16, i * 2 + lane / 16));
#pragma unroll
      for (uint32_t j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        ldmatrix4_at(b, step + swizzled(kFewRows + j * 8 + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
        mma(sum[j], a, b[0], b[1]), mma(sum[j + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kTiles * 4; i++) {
    const uint32_t r = first + row + lane / 4 + i % 4 / 2 * 8, at = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (r < tokens && at < n) to[(size_t)r * n + at] = sum[i / 4][i % 4];
  }
}

template <int kTiles>
cudaError_t multiply_few(float *to, const bf16 *x, const void *w, uint32_t n, uint32_t k, uint32_t tokens, cudaStream_t s) {
  return launch(few_columns<kTiles>, dim3(ceil_div(tokens, kFewRows), ceil_div(n, 8 * kTiles)), kFewThreads, kFewStages * few_step<kTiles>,
                s, to, x, static_cast<const bf16 *>(w), n, k, tokens);
}

cudaError_t multiply(float *to, const bf16 *x, const void *w, uint32_t n, uint32_t k, uint32_t tokens, bool batch_invariant,
                     cudaStream_t s) {
  if (tokens <= 512 || n <= 32 || batch_invariant) return multiply_few<4>(to, x, w, n, k, tokens, s);
  if (n <= 96) return multiply_few<12>(to, x, w, n, k, tokens, s);
  mm_cu_weight m = {};
  m.code = MM_CU_BF16, m.scale_kind = MM_CU_PLAIN, m.lead = 1, m.n = n, m.k = k, m.pitch = 2 * (size_t)k;
  m.data = static_cast<const uint8_t *>(w);
  return mm_cu_gemm(m, {x, nullptr, nullptr, to, tokens}, s);
}

}  // namespace

cudaError_t mm_cu_split(__nv_bfloat16 *to, const float *w, size_t n, cudaStream_t s) {
  return launch(split, 1024, kThreads, 0, s, to, w, n);
}

cudaError_t mm_cu_route_logits(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, cudaStream_t s) {
  float *to = m.wide ? m.product : r.logits;
  cudaError_t e = multiply(to, x, m.wide ? m.piece : m.w, (m.wide ? kPieces : 1) * r.experts, m.k, tokens, m.batch_invariant, s);
  if (e == cudaSuccess && m.wide)
    e = launch(sum_pieces, ceil_div(tokens * r.experts, kThreads), kThreads, 0, s, r.logits, to, r.experts, tokens * r.experts);
  return e;
}
