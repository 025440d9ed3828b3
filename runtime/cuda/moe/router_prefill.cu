/* The router's logits of a prefill step as one product of bf16: a row of f32 weights is the sum of three bf16 exactly, which are three rows
 * of the product's weights; their results are added, the smallest first. bf16 weights are one piece. Up to 1,024 rows, and any number of
 * which the bits must not depend on it, have one kernel, more the kernels of products. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kThreads = 256, kPieces = 3;

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

/* ---- up to 1,024 rows ---- */

/* A block has 16 rows and 8·kTiles columns of kParts matrices, an eighth of k for each of its warps, which has a ring of its own: steps of
 * 64 columns of the block's rows and of the weights'. */
constexpr uint32_t kSliceRows = 16, kSlices = 8;
template <int kTiles, int kParts>
struct slice_ring {
  static constexpr uint32_t kColumns = 8 * kTiles, kWeights = kColumns * kParts, kStep = (kSliceRows + kWeights) * 128;
  static constexpr uint32_t kSteps = 96 * 1024 / (kSlices * kStep), kBytes = kSlices * kSteps * kStep;
  static_assert(kSteps >= 2 && kSlices * kSliceRows * kWeights * sizeof(float) <= kBytes && kBytes <= MM_CU_SHARED_LEAST);
};

/* Writes a block's results from its warps' sums, by way of `part`, [slice, row, part and column]. */
template <int kTiles, int kParts>
__device__ __forceinline__ void add_slices(float *to, float *part, const float (&sum)[kParts * kTiles][4], uint32_t n, uint32_t tokens) {
  using ring = slice_ring<kTiles, kParts>;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * kSliceRows, column = blockIdx.y * ring::kColumns;
#pragma unroll
  for (uint32_t i = 0; i < kParts * kTiles * 4; i++) {
    const uint32_t r = lane / 4 + i % 4 / 2 * 8, at = i / 4 * 8 + lane % 4 * 2 + i % 2;
    part[(warp * kSliceRows + r) * ring::kWeights + at] = sum[i / 4][i % 4];
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kSliceRows * ring::kColumns; i += kSlices * 32) {
    const uint32_t r = i / ring::kColumns, c = i % ring::kColumns;
    float total = 0;
#pragma unroll
    for (uint32_t p = kParts; p-- > 0;) {
      float own = 0;
#pragma unroll
      for (uint32_t slice = 0; slice < kSlices; slice++) own += part[(slice * kSliceRows + r) * ring::kWeights + p * ring::kColumns + c];
      total += own;
    }
    if (first + r < tokens && column + c < n) to[(size_t)(first + r) * n + column + c] = total;
  }
}

/* to[tokens, n] = x·(Σ w[part])ᵀ, the last part first. A result's bits depend on k alone: slices are added in their order. */
template <int kTiles, int kParts>
__global__ void __launch_bounds__(kSlices * 32)
    slice_logits(float *to, const bf16 *x, const bf16 *w, uint32_t n, uint32_t k, uint32_t tokens) {
  using ring = slice_ring<kTiles, kParts>;
  extern __shared__ __align__(128) uint8_t slice_raw[];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (k + 63) / 64;
  const uint32_t first = blockIdx.x * kSliceRows, column = blockIdx.y * ring::kColumns;
  const uint32_t begin = steps * warp / kSlices, count = steps * (warp + 1) / kSlices - begin;
  const uint32_t base = shared_address(slice_raw) + warp * ring::kSteps * ring::kStep;
  grid_launch_next_early();
  /* Rows r, four at a time, of step s: `row_of` says which of `all`, or none. */
  const auto fetch = [&](uint32_t s, uint32_t from, uint32_t rows, const bf16 *all, const auto &row_of) {
    const uint32_t at = (begin + s) * 64 + lane % 8 * 8;
#pragma unroll
    for (uint32_t i = 0; i < rows / 4; i++) {
      const uint32_t r = i * 4 + lane / 8;
      const int64_t row = row_of(r);
      const bool valid = s < count && at < k && row >= 0;
      copy16_to(base + s % ring::kSteps * ring::kStep + swizzled(from + r, lane % 8), all + (valid ? (size_t)row * k + at : 0), valid);
    }
  };
  const auto fetch_weights = [&](uint32_t s) {
    fetch(s, kSliceRows, ring::kWeights, w, [&](uint32_t r) {
      const uint32_t c = column + r % ring::kColumns;
      return c < n ? (int64_t)(r / ring::kColumns) * n + c : -1;
    });
  };
  const auto fetch_rows = [&](uint32_t s) {
    fetch(s, 0, kSliceRows, x, [&](uint32_t r) { return first + r < tokens ? (int64_t)(first + r) : -1; });
    copy_commit();
  };
  for (uint32_t s = 0; s < ring::kSteps; s++) fetch_weights(s);
  grid_wait();
  for (uint32_t s = 0; s < ring::kSteps; s++) fetch_rows(s);
  float sum[kParts * kTiles][4] = {};
#pragma unroll 1
  for (uint32_t s = 0; s < count; s++) {
    copy_wait<ring::kSteps - 1>();
    __syncwarp();
    const uint32_t step = base + s % ring::kSteps * ring::kStep;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      uint32_t a[2][4];
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) ldmatrix4_at(a[h], step + swizzled(lane % 16, i * 4 + h * 2 + lane / 16));
#pragma unroll
      for (uint32_t j = 0; j < kParts * kTiles; j++) {
        uint32_t b[4];
        ldmatrix4_at(b, step + swizzled(kSliceRows + j * 8 + lane % 8, i * 4 + lane / 8));
        mma(sum[j], a[0], b[0], b[1]), mma(sum[j], a[1], b[2], b[3]);
      }
    }
    __syncwarp();
    fetch_weights(s + ring::kSteps), fetch_rows(s + ring::kSteps);
  }
  copy_wait<0>();
  __syncthreads();
  add_slices<kTiles, kParts>(to, reinterpret_cast<float *>(slice_raw), sum, n, tokens);
}

template <int kTiles, int kParts>
cudaError_t multiply_slices(float *to, const bf16 *x, const void *w, uint32_t n, uint32_t k, uint32_t tokens, cudaStream_t s) {
  using ring = slice_ring<kTiles, kParts>;
  return launch(slice_logits<kTiles, kParts>, dim3(ceil_div(tokens, kSliceRows), ceil_div(n, ring::kColumns)), kSlices * 32, ring::kBytes,
                s, to, x, static_cast<const bf16 *>(w), n, k, tokens);
}

/* ---- more ---- */

/* to[tokens, n] = x·wᵀ where there are too few columns to fill the device with large tiles: a block takes 64 rows and 8·kTiles columns, a
 * warp 16 rows, and goes through k by 64, five steps ahead. */
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

cudaError_t multiply(float *to, const bf16 *x, const void *w, uint32_t n, uint32_t k, uint32_t tokens, cudaStream_t s) {
  if (n <= 32) return multiply_few<4>(to, x, w, n, k, tokens, s);
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

cudaError_t mm_cu_route_logits(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, uint32_t all,
                               cudaStream_t s) {
  constexpr uint32_t kMost = 1024;
  if (all <= kMost || m.batch_invariant) {
    const uint32_t rows = ceil_div(tokens, kSliceRows), most = multiprocessors();
    const auto logits = m.wide                                   ? multiply_slices<1, kPieces>
                        : rows * ceil_div(r.experts, 8) <= most  ? multiply_slices<1, 1>
                        : rows * ceil_div(r.experts, 16) <= most ? multiply_slices<2, 1>
                                                                 : multiply_slices<4, 1>;
    return logits(r.logits, x, m.wide ? m.piece : m.w, r.experts, m.k, tokens, s);
  }
  float *to = m.wide ? m.product : r.logits;
  cudaError_t e = multiply(to, x, m.wide ? m.piece : m.w, (m.wide ? kPieces : 1) * r.experts, m.k, tokens, s);
  if (e == cudaSuccess && m.wide)
    e = launch(sum_pieces, ceil_div(tokens * r.experts, kThreads), kThreads, 0, s, r.logits, to, r.experts, tokens * r.experts);
  return e;
}
