/* The core of every prefill product: a block multiplies 128 activation rows with 128 weight rows, 64 columns at a time (on sm_90a with
 * 256 weight rows: gemm_hopper.cuh, and gemm_widened.cuh where weights are codes).
 *
 * Activations go to shared memory as they are (cp.async); weights are fetched as codes into registers one step ahead, widened there,
 * scaled, rounded to bf16 and stored, so device memory never holds them wide. Eight warps, 32 x 64 results each, mma.m16n8k16.
 *
 * A job says which rows, as in stream.cuh:
 *   rows()                       activation rows of this block, ≤ 128
 *   x(r)                         activation row r < rows()
 *   weight(r)                    {matrix, row} of the block's weight row r; may repeat the last row beyond the end
 *   emit(row, column, v[8][2])   results of one row: columns column + 8n and the next, n = 0 … 7 */
#ifndef MM_CUDA_GEMM_CUH
#define MM_CUDA_GEMM_CUH

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/weight.cuh"
#include "runtime/cuda/gemm/gemm_hopper.cuh"
#include "runtime/cuda/gemm/gemm_widened.cuh"

constexpr int kGemmRows = 128, kGemmK = 64, kGemmPad = 8;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kGemmThreads = hopper_gemm::kThreads, kGemmColumns = hopper_gemm::kColumns;
#else
constexpr int kGemmThreads = 256, kGemmColumns = 128;
#endif

struct gemm_shared {
  bf16 x[2][kGemmRows][kGemmK + kGemmPad], w[2][kGemmColumns][kGemmK + kGemmPad];
};

/* Data for the host of the block that the current device runs. */
struct gemm_block {
  unsigned columns, threads;
  size_t shared;
};
inline gemm_block gemm_block_here() {
  if (hopper()) return {hopper_gemm::kColumns, hopper_gemm::kThreads, sizeof(hopper_gemm::shared)};
  return {128, 256, sizeof(gemm_shared)};
}
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void gemm_tile(const mm_cu_weight &w, const Job &job) {
  hopper_gemm::tile<C, S>(w, job);
}

#else

/* This thread's pieces of a weight tile, on their way through registers. */
template <mm_cu_code C, mm_cu_scale S, class Job>
struct weight_tile {
  static constexpr int kPiece = codec<C>::kPiece, kPerRow = kGemmK / kPiece, kPieces = kGemmColumns * kPerRow / kGemmThreads;
  const mm_cu_weight &w;
  const uint8_t *row[kPieces];
  size_t scale[kPieces];
  uint4 q[kPieces];

  __device__ weight_tile(const mm_cu_weight &weight, const Job &job) : w(weight) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      weight_row at = job.weight((i * kGemmThreads + threadIdx.x) / kPerRow);
      row[i] = w.data + ((size_t)at.matrix * w.n + at.row) * w.pitch;
      scale[i] = ((size_t)at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
    }
  }
  __device__ __forceinline__ uint32_t column(uint32_t k0) const { return k0 + threadIdx.x % kPerRow * kPiece; }
  __device__ __forceinline__ void fetch(uint32_t k0) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const size_t at = (size_t)column(k0) / kPiece * 16;
      q[i] = at < w.pitch ? *reinterpret_cast<const uint4 *>(row[i] + at) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void store(bf16 (*to)[kGemmK + kGemmPad], uint32_t k0) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      uint32_t v[kPiece / 2];
      codec<C>::widen(v, q[i]);
      const uint32_t k = column(k0);
      if constexpr (S == MM_CU_COARSE) {
        const float f = k < w.k ? static_cast<const float *>(w.scale)[scale[i] + (k >> w.cell_k_log2)] : 0.0f;
#pragma unroll
        for (int j = 0; j < kPiece / 2; j++) v[j] = pack2(low(v[j]) * f, high(v[j]) * f);
      } else {
        piece_scale<C, S> ps;
        ps.load(w,
                S == MM_CU_FINE ? (const void *)(static_cast<const float *>(w.scale) + scale[i])
                                : (const void *)(static_cast<const uint8_t *>(w.scale) + scale[i]),
                k);
        ps.apply(v);
      }
      if (k >= w.k) {
#pragma unroll
        for (int j = 0; j < kPiece / 2; j++) v[j] = 0;
      }
      bf16 *at = &to[(i * kGemmThreads + threadIdx.x) / kPerRow][threadIdx.x % kPerRow * kPiece];
#pragma unroll
      for (int j = 0; j < kPiece / 8; j++)
        *reinterpret_cast<uint4 *>(at + 8 * j) = make_uint4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
  }
};

template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void gemm_tile(const mm_cu_weight &w, const Job &job) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<gemm_shared *>(shared_raw);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row0 = warp % 4 * 32, col0 = warp / 4 * 64, rows = job.rows();

  constexpr int kXPieces = kGemmRows * kGemmK / 8 / kGemmThreads;
  const bf16 *x[kXPieces];
#pragma unroll
  for (int i = 0; i < kXPieces; i++) {
    const uint32_t r = (i * kGemmThreads + threadIdx.x) / (kGemmK / 8);
    x[i] = job.x(min(r, rows - 1));
  }
  auto fetch_x = [&](int b, uint32_t k0) {
#pragma unroll
    for (int i = 0; i < kXPieces; i++) {
      const uint32_t at = i * kGemmThreads + threadIdx.x, r = at / (kGemmK / 8), c = at % (kGemmK / 8) * 8;
      const bool valid = r < rows && k0 + c < w.k;
      copy16_or_zero(&sh.x[b][r][c], valid ? x[i] + k0 + c : x[i], valid);
    }
    copy_commit();
  };
  weight_tile<C, S, Job> wt(w, job);
  float acc[2][8][4] = {};
  fetch_x(0, 0);
  wt.fetch(0);
  wt.store(sh.w[0], 0);
  int b = 0;
  for (uint32_t k0 = 0; k0 < w.k; k0 += kGemmK, b ^= 1) {
    const bool more = k0 + kGemmK < w.k;
    copy_wait<0>();
    __syncthreads();
    if (more) {
      fetch_x(b ^ 1, k0 + kGemmK);
      wt.fetch(k0 + kGemmK);
    }
#pragma unroll
    for (int k = 0; k < kGemmK; k += 16) {
      uint32_t xa[2][4], f[4];
#pragma unroll
      for (int i = 0; i < 2; i++) ldmatrix4(xa[i], &sh.x[b][row0 + i * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        ldmatrix4(f, &sh.w[b][col0 + n * 8 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
#pragma unroll
        for (int i = 0; i < 2; i++) mma(acc[i][n], xa[i], f[0], f[1]), mma(acc[i][n + 1], xa[i], f[2], f[3]);
      }
    }
    if (more) wt.store(sh.w[b ^ 1], k0 + kGemmK);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t r = row0 + i * 8 + g;
    if (r >= rows) continue;
    float v[8][2];
#pragma unroll
    for (int n = 0; n < 8; n++) v[n][0] = acc[i / 2][n][i % 2 * 2], v[n][1] = acc[i / 2][n][i % 2 * 2 + 1];
    job.emit(r, col0 + 2 * t, v);
  }
}

#endif

#endif
