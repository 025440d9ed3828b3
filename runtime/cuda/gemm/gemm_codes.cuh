/* Products of E4M3 codes of weights and of rounded rows by mma.sync, in code for sm_89: no code is widened.
 *
 * A block multiplies 128 rows with 128 weight rows, 128 columns at a time, for which both have one scale. Eight warps of 64 x 32 results.
 * The tensor cores add up those 128 columns from zero; their sums, times both scales, are added in f32. Codes lie in shared memory as
 * rows of 128 bytes whose 16-byte piece c of row r is at piece c ^ (r % 8), in kStages stages.
 *
 * Jobs are those of gemm.cuh; of x only x_row is asked. */
#ifndef MM_CUDA_GEMM_CODES_CUH
#define MM_CUDA_GEMM_CODES_CUH

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/weight.cuh"

/* Rows of codes: row r's from code + r · pitch on, its scale of columns 128g and on at scale[r · row_step + g · group_step]. */
struct code_rows {
  const uint8_t *code;
  const float *scale;
  uint32_t pitch, row_step, group_step;
};

struct gemm_codes_form {
  static constexpr int kRows = 128, kColumns = 128, kThreads = 256, kStages = 3;
  static constexpr uint32_t kTile = 128 * 128, kStage = 2 * kTile, kShared = kStages * kStage;
};
static_assert(gemm_codes_form::kShared + 1024 <= MM_CU_SHARED_LEAST, "a block fits everywhere");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && __CUDA_ARCH__ < 900
#define MM_CU_CODES_CODE

/* d[16, 8] = a[16, 32] · b[32, 8] of E4M3: mma()'s places, with four codes in place of two numbers. */
__device__ __forceinline__ void mma_codes_first(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
/* d += likewise. */
__device__ __forceinline__ void mma_codes(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class Job>
struct codes_tile {
  using form = gemm_codes_form;
  static constexpr uint32_t kPieces = 4; /* of a thread, of the rows and of the weights in a stage */
  const mm_cu_weight &w;
  const code_rows &c;
  uint32_t base, to, x_from, w_from, turn; /* shared addresses of the lane: of its copies, and of fragments without their piece */
  uint32_t x[kPieces], row[kPieces];       /* rows of the thread's pieces; of weights of all matrices */
  uint32_t x_scale[8], w_scale[8];         /* places of the scales of the lane's rows and columns in the first 128 columns */
  float x_now[8], w_now[8];                /* the scales of the step */
  float total[4][4][4];

  __device__ __forceinline__ codes_tile(const mm_cu_weight &weight, const code_rows &codes, const Job &job) : w(weight), c(codes) {
    extern __shared__ uint4 shared_raw[];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = warp % 2 * 64, col0 = warp / 2 * 32, rows = job.rows();
    base = (uint32_t)__cvta_generic_to_shared(shared_raw);
    to = base + swizzled(threadIdx.x / 8, threadIdx.x % 8);
    x_from = base + (row0 + lane % 16) * 128, w_from = base + form::kTile + (col0 + lane % 8 + lane / 16 * 8) * 128;
    turn = lane % 8;
#pragma unroll
    for (uint32_t i = 0; i < kPieces; i++) {
      const uint32_t at = i * 32 + threadIdx.x / 8;
      const weight_row of = job.weight(at);
      x[i] = job.x_row(min(at, rows - 1)), row[i] = of.matrix * w.n + of.row;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      const weight_row of = job.weight(col0 + i / 2 * 8 + lane % 4 * 2 + i % 2);
      x_scale[i] = job.x_row(min(row0 + i * 8 + lane / 4, rows - 1)) * c.row_step;
      w_scale[i] = (of.matrix * w.scale_rows + (of.row >> w.cell_n_log2)) * w.scale_pitch;
    }
#pragma unroll
    for (uint32_t i = 0; i < 64; i++) total[i / 16][i / 4 % 4][i % 4] = 0;
  }
  /* Starts the copies of columns [k0, k0 + 128) to a stage, zeros past k. */
  __device__ __forceinline__ void copy(uint32_t stage, uint32_t k0) const {
    const uint32_t k = k0 + threadIdx.x % 8 * 16, at = to + stage * form::kStage;
    const bool valid = k < w.k;
#pragma unroll
    for (uint32_t i = 0; i < kPieces; i++) {
      copy16_to(at + i * 32 * 128, c.code + (size_t)x[i] * c.pitch + (valid ? k : 0), valid);
      copy16_to(at + form::kTile + i * 32 * 128, w.data + (size_t)row[i] * w.pitch + (valid ? k : 0), valid);
    }
    copy_commit();
  }
  __device__ __forceinline__ void load_scales(uint32_t k0) {
    const uint32_t k = min(k0, w.k - 1), group = k / 128 * c.group_step, cell = k >> w.cell_k_log2;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      x_now[i] = c.scale[(size_t)x_scale[i] + group];
      w_now[i] = static_cast<const float *>(w.scale)[(size_t)w_scale[i] + cell];
    }
  }
  /* The products of a stage. */
  __device__ __forceinline__ void multiply(uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32, xs = x_from + stage * form::kStage, ws = w_from + stage * form::kStage;
    float acc[4][4][4];
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
      uint32_t a[4][4], b[2][4];
      const uint32_t x_piece = ((2 * k + lane / 16) ^ turn) * 16, w_piece = ((2 * k + lane / 8 % 2) ^ turn) * 16;
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) ldmatrix4_at(a[i], xs + i * 16 * 128 + x_piece);
#pragma unroll
      for (uint32_t n = 0; n < 2; n++) ldmatrix4_at(b[n], ws + n * 16 * 128 + w_piece);
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
          if (k == 0) {
            mma_codes_first(acc[i][n], a[i], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          } else {
            mma_codes(acc[i][n], a[i], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
        }
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 64; i++) {
      const uint32_t tall = i / 16, n = i / 4 % 4, half = i / 2 % 2, j = i % 2;
      total[tall][n][i % 4] = fmaf(acc[tall][n][i % 4], x_now[tall * 2 + half] * w_now[n * 2 + j], total[tall][n][i % 4]);
    }
  }
  __device__ __forceinline__ void operator()(const Job &job) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp % 2 * 64, col0 = warp / 2 * 32, rows = job.rows();
    copy(0, 0), copy(1, 128);
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t k0 = 0; k0 < w.k; k0 += 128) {
      load_scales(k0);
      copy_wait<form::kStages - 2>();
      __syncthreads();
      copy((stage + 2) % form::kStages, k0 + 2 * 128); /* into the stage of the step before this */
      if (row0 < rows) multiply(stage);
      stage = (stage + 1) % form::kStages;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      const uint32_t r = row0 + i * 8 + lane / 4;
      if (r >= rows) continue;
      float v[4][2];
#pragma unroll
      for (uint32_t n = 0; n < 4; n++) v[n][0] = total[i / 2][n][i % 2 * 2], v[n][1] = total[i / 2][n][i % 2 * 2 + 1];
      job.emit(r, col0 + lane % 4 * 2, v);
    }
  }
};

#endif

#endif
