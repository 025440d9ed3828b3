/* The core of every prefill product: a block multiplies 128 activation rows with 128 weight rows, 64 columns at a time (on sm_90a with
 * 256 weight rows: gemm_hopper.cuh, and gemm_widened.cuh where weights are codes), or of few rows 32 with 64.
 *
 * Activations go to shared memory as they are (cp.async); weights are fetched as codes into registers one step ahead, widened there,
 * scaled, rounded to bf16 and stored, so device memory never holds them wide. Four warps, 64 x 64 results each, or of 32 x 16,
 * mma.m16n8k16.
 *
 * A job says which rows, as in stream.cuh:
 *   rows()                       activation rows of this block, ≤ Form::kRows
 *   x(r)                         activation row r < rows()
 *   weight(r)                    {matrix, row} of the block's weight row r; may repeat the last row beyond the end
 *   emit(row, column, v[N][2])   results of one row: columns column + 8n and the next, n < N (8 or 2) */
#ifndef MM_CUDA_GEMM_CUH
#define MM_CUDA_GEMM_CUH

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/weight.cuh"
#include "runtime/cuda/gemm/gemm_hopper.cuh"
#include "runtime/cuda/gemm/gemm_widened.cuh"

constexpr int kGemmK = 64, kGemmPad = 8;
/* The forms of a block: activation rows, weight rows, threads, and blocks whose registers a multiprocessor holds. Each result has the same
 * bits in all: its products are added in the order of k, sixteen at a time. */
struct gemm_large {
  static constexpr int kRows = 128;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr int kThreads = hopper_gemm::kThreads, kColumns = hopper_gemm::kColumns, kBlocks = 1;
#else
  static constexpr int kThreads = 128, kColumns = 128, kBlocks = 2;
#endif
  static constexpr int kHalves = 4; /* sixteens of a warp's rows */
  static constexpr int kAhead = 1;  /* steps whose weights are on their way */
  static constexpr int kStages = 2; /* of activations: those of a step, and of the steps whose copies are under way */
};
/* Where tiles of 128 rows would be nearly empty: a few rows for each expert, or a step of at most 64. Not on sm_90a. */
struct gemm_small {
  static constexpr int kRows = 32, kThreads = 128, kColumns = 64, kBlocks = 4, kHalves = 2, kAhead = 4, kStages = 4;
};
constexpr uint32_t kGemmSmallStep = 64; /* rows of a dense product up to which it is taken */
constexpr uint32_t kGemmSmallEach = 16; /* rows for each expert, likewise */

template <class Form>
struct gemm_shared {
  bf16 x[Form::kStages][Form::kRows][kGemmK + kGemmPad], w[2][Form::kColumns][kGemmK + kGemmPad];
};
static_assert(2 * sizeof(gemm_shared<gemm_small>) <= MM_CU_SHARED_LEAST, "two blocks fit everywhere");

/* Data for the host of the block that the current device runs. */
struct gemm_block {
  unsigned rows, columns, threads;
  size_t shared;
};
template <class Form>
gemm_block gemm_block_here() {
  if (hopper()) return {Form::kRows, hopper_gemm::kColumns, hopper_gemm::kThreads, sizeof(hopper_gemm::shared)};
  return {Form::kRows, Form::kColumns, Form::kThreads, sizeof(gemm_shared<Form>)};
}
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <mm_cu_code C, mm_cu_scale S, class Form, class Job>
__device__ __forceinline__ void gemm_tile(const mm_cu_weight &w, const Job &job) {
  if constexpr (Form::kRows == gemm_large::kRows) {
    hopper_gemm::tile<C, S>(w, job);
  } else {
    no_such_code();
  }
}

#else

/* The scales of a piece, fetched with its codes. at: the first of its row. */
template <mm_cu_code C, mm_cu_scale S>
struct tile_scale {
  piece_scale<C, S> scale;
  __device__ __forceinline__ void load(const mm_cu_weight &w, size_t at, uint32_t k) {
    scale.load(w, static_cast<const uint8_t *>(w.scale) + at * (S == MM_CU_FINE ? sizeof(float) : 1), k);
  }
  __device__ __forceinline__ void apply(uint32_t v[]) const { scale.apply(v); }
};
template <mm_cu_code C>
struct tile_scale<C, MM_CU_COARSE> {
  float f;
  __device__ __forceinline__ void load(const mm_cu_weight &w, size_t at, uint32_t k) {
    f = k < w.k ? static_cast<const float *>(w.scale)[at + (k >> w.cell_k_log2)] : 0.0f;
  }
  /* The scale as a sum of two bf16: codes times it, off by 2^-16 before they are rounded. */
  __device__ __forceinline__ void apply(uint32_t v[]) const {
    const uint32_t most = pack2(f, f), rest = pack2(f - low(most), f - low(most));
#pragma unroll
    for (int j = 0; j < codec<C>::kPiece / 2; j++) v[j] = fma2(v[j], most, mul2(v[j], rest));
  }
};

/* This thread's pieces of weight tiles, on their way through registers. */
template <mm_cu_code C, mm_cu_scale S, class Form, class Job>
struct weight_tile {
  static constexpr int kPiece = codec<C>::kPiece, kPerRow = kGemmK / kPiece, kPieces = Form::kColumns * kPerRow / Form::kThreads;
  struct step {
    uint4 q[kPieces];
    tile_scale<C, S> f[kPieces];
  };
  const mm_cu_weight &w;
  const uint8_t *row[kPieces];
  size_t scale[kPieces];

  __device__ weight_tile(const mm_cu_weight &weight, const Job &job) : w(weight) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      weight_row at = job.weight((i * Form::kThreads + threadIdx.x) / kPerRow);
      row[i] = w.data + ((size_t)at.matrix * w.n + at.row) * w.pitch;
      scale[i] = ((size_t)at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
    }
  }
  __device__ __forceinline__ uint32_t column(uint32_t k0) const { return k0 + threadIdx.x % kPerRow * kPiece; }
  __device__ __forceinline__ void fetch(step &to, uint32_t k0) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const size_t at = (size_t)column(k0) / kPiece * 16;
      to.q[i] = at < w.pitch ? *reinterpret_cast<const uint4 *>(row[i] + at) : make_uint4(0, 0, 0, 0);
      to.f[i].load(w, scale[i], column(k0));
    }
  }
  __device__ __forceinline__ void store(bf16 (*to)[kGemmK + kGemmPad], const step &from, uint32_t k0) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      uint32_t v[kPiece / 2];
      codec<C>::widen(v, from.q[i]);
      from.f[i].apply(v);
      if (column(k0) >= w.k) {
#pragma unroll
        for (int j = 0; j < kPiece / 2; j++) v[j] = 0;
      }
      bf16 *at = &to[(i * Form::kThreads + threadIdx.x) / kPerRow][threadIdx.x % kPerRow * kPiece];
#pragma unroll
      for (int j = 0; j < kPiece / 8; j++)
        *reinterpret_cast<uint4 *>(at + 8 * j) = make_uint4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
  }
};

/* The addresses of this thread's pieces of the activations. Rows that the tile does not have are not copied: their results are not written.
 */
template <class Form, class Job>
struct activation_tile {
  static constexpr int kPieces = Form::kRows * kGemmK / 8 / Form::kThreads;
  const bf16 *x[kPieces];
  uint32_t rows, k;

  __device__ activation_tile(const Job &job, uint32_t columns) : rows(job.rows()), k(columns) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) x[i] = job.x(min((i * Form::kThreads + threadIdx.x) / (kGemmK / 8), rows - 1));
  }
  /* Starts the copy of columns [k0, k0 + kGemmK), a group of its own; columns past k become zeros. */
  __device__ __forceinline__ void fetch(bf16 (*to)[kGemmK + kGemmPad], uint32_t k0) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const uint32_t at = i * Form::kThreads + threadIdx.x, r = at / (kGemmK / 8), c = at % (kGemmK / 8) * 8;
      if (r >= rows) continue;
      const bool valid = k0 + c < k;
      copy16_or_zero(&to[r][c], valid ? x[i] + k0 + c : x[i], valid);
    }
    copy_commit();
  }
};

/* A warp has kHigh rows of x and kWide of the columns. */
template <class Form>
struct gemm_warps {
  static constexpr uint32_t kHigh = 16 * Form::kHalves, kTall = Form::kRows / kHigh, kWide = Form::kColumns / (Form::kThreads / 32 / kTall),
                            kTiles = kWide / 8;
  static_assert(kTiles % 2 == 0, "ldmatrix brings two");
};
/* acc += the products of the activations in `stage` and the weights in b. Sixteens of a warp's rows that the tile does not have are not
 * multiplied; kWhole: it has all. */
template <class Form, bool kWhole>
__device__ __forceinline__ void gemm_step(float (&acc)[Form::kHalves][gemm_warps<Form>::kTiles][4], const gemm_shared<Form> &sh, int b,
                                          int stage, uint32_t row0, uint32_t col0, uint32_t rows) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kGemmK; k += 16) {
    uint32_t xa[Form::kHalves][4], f[4];
#pragma unroll
    for (int i = 0; i < Form::kHalves; i++)
      if (kWhole || row0 + i * 16 < rows) ldmatrix4(xa[i], &sh.x[stage][row0 + i * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < (int)gemm_warps<Form>::kTiles; n += 2) {
      ldmatrix4(f, &sh.w[b][col0 + n * 8 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < Form::kHalves; i++)
        if (kWhole || row0 + i * 16 < rows) mma(acc[i][n], xa[i], f[0], f[1]), mma(acc[i][n + 1], xa[i], f[2], f[3]);
    }
  }
}

#include "runtime/cuda/gemm/gemm_large.cuh"

template <mm_cu_code C, mm_cu_scale S, class Form, class Job>
__device__ __forceinline__ void gemm_tile(const mm_cu_weight &w, const Job &job) {
  if constexpr (Form::kHalves == 4) {
    large_tile<C, S, Form, Job>(w, job)(job);
    return;
  }
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<gemm_shared<Form> *>(shared_raw);
  constexpr uint32_t kTall = gemm_warps<Form>::kTall, kTiles = gemm_warps<Form>::kTiles;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row0 = warp % kTall * gemm_warps<Form>::kHigh, col0 = warp / kTall * gemm_warps<Form>::kWide, rows = job.rows();

  const activation_tile<Form, Job> xt(job, w.k);
  const weight_tile<C, S, Form, Job> wt(w, job);
  typename weight_tile<C, S, Form, Job>::step ahead[Form::kAhead]; /* of the next steps */
  float acc[Form::kHalves][kTiles][4] = {};
  constexpr int kStages = Form::kStages;
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) xt.fetch(sh.x[i], i * kGemmK);
  wt.fetch(ahead[0], 0);
  wt.store(sh.w[0], ahead[0], 0);
#pragma unroll
  for (int i = 0; i < Form::kAhead; i++) wt.fetch(ahead[i], (i + 1) * kGemmK);
  uint32_t k0 = 0;
  int b = 0, stage = 0;
  /* One step; `next` holds the weights of the step behind it. False after the last. */
  const auto step = [&](typename weight_tile<C, S, Form, Job>::step &next) {
    const bool more = k0 + kGemmK < w.k;
    copy_wait<kStages - 2>();
    __syncthreads();
    xt.fetch(sh.x[(stage + kStages - 1) % kStages], k0 + (kStages - 1) * kGemmK); /* into the stage of the step before this */
    if (row0 + gemm_warps<Form>::kHigh <= rows) {
      gemm_step<Form, true>(acc, sh, b, stage, row0, col0, rows);
    } else if (row0 < rows) {
      gemm_step<Form, false>(acc, sh, b, stage, row0, col0, rows);
    }
    if (more) {
      wt.store(sh.w[b ^ 1], next, k0 + kGemmK);
      wt.fetch(next, k0 + (Form::kAhead + 1) * kGemmK);
    }
    k0 += kGemmK, b ^= 1, stage = (stage + 1) % kStages;
    return more;
  };
  for (bool more = true; more;) {
#pragma unroll
    for (int i = 0; i < Form::kAhead; i++) /* each in registers of its own: a move would wait for the load */
      if (more) more = step(ahead[i]);
  }
#pragma unroll
  for (int i = 0; i < 2 * Form::kHalves; i++) {
    const uint32_t r = row0 + i * 8 + g;
    if (r >= rows) continue;
    float v[kTiles][2];
#pragma unroll
    for (uint32_t n = 0; n < kTiles; n++) {
      v[n][0] = acc[i / 2][n][i % 2 * 2], v[n][1] = acc[i / 2][n][i % 2 * 2 + 1];
    }
    job.emit(r, col0 + 2 * t, v);
  }
}

#endif

#endif
