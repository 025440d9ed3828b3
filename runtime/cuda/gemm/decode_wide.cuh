/* The tile of decode_tile.cuh for up to 64 rows of x, which are multiplied as they come: converting them in each block would take longer
 * than their products. Codes are widened to bf16 in registers; chunks of 256 columns of x come to shared memory by asynchronous copies, the
 * next one while one is multiplied. */
#ifndef MM_CUDA_DECODE_WIDE_CUH
#define MM_CUDA_DECODE_WIDE_CUH

#include "runtime/cuda/gemm/decode_tile.cuh"

template <mm_cu_code C>
struct wide_form {
  static constexpr uint32_t kTiles = 8, kGroups = 8, kBlocks = 1, kAhead = codec<C>::kPiece == 16 ? 4 : 2, kChunk = 256;
  static constexpr uint32_t kRows = 64, kColumns = 128, kSplit = 1, kPitch = 2 * kChunk + 16, kBuffer = kRows * kPitch;
  static constexpr uint32_t kStep = 8 * codec<C>::kPiece; /* columns */
};
template <mm_cu_code C>
tile_plan plan_wide(const mm_cu_weight &w, uint32_t span) {
  using Form = wide_form<C>;
  static_assert(2 * Form::kBuffer >= Form::kRows * (Form::kColumns + 4) * 4 && 2 * Form::kBuffer <= MM_CU_SHARED_LEAST - 3072,
                "a block fits");
  tile_plan p = {};
  p.span = min(span, ceil_div(w.k, Form::kChunk) * Form::kChunk), p.shared = 2 * Form::kBuffer;
  return p;
}

/* acc += half a step: a lane's piece of codes of both rows, x at its row and columns. */
template <mm_cu_code C, mm_cu_scale S>
__device__ __forceinline__ void wide_multiply(float (&acc)[8][4], const uint8_t *x, const uint4 (&q)[2], const uint16_t (&micro)[2]) {
  constexpr uint32_t kPiece = codec<C>::kPiece;
  uint32_t v[2][kPiece / 2];
#pragma unroll
  for (uint32_t r = 0; r < 2; r++) {
    codec<C>::widen(v[r], q[r]);
    if constexpr (S == MM_CU_NV) {
      piece_scale<C, S> scale;
      scale.bits = micro[r], scale.apply(v[r]);
    }
  }
  constexpr uint32_t kTogether = 4; /* tiles whose products take turns: one waits for the one before it of its tile */
#pragma unroll
  for (uint32_t n0 = 0; n0 < 8; n0 += kTogether) {
#pragma unroll
    for (uint32_t i = 0; i < kPiece / 8; i++) {
      uint4 b[kTogether];
#pragma unroll
      for (uint32_t n = 0; n < kTogether; n++) b[n] = *reinterpret_cast<const uint4 *>(x + (n0 + n) * 8 * wide_form<C>::kPitch + i * 16);
#pragma unroll
      for (uint32_t n = 0; n < kTogether; n++)
        mma(acc[n0 + n], (const uint32_t[]){v[0][4 * i], v[1][4 * i], v[0][4 * i + 1], v[1][4 * i + 1]}, b[n].x, b[n].y);
#pragma unroll
      for (uint32_t n = 0; n < kTogether; n++)
        mma(acc[n0 + n], (const uint32_t[]){v[0][4 * i + 2], v[1][4 * i + 2], v[0][4 * i + 3], v[1][4 * i + 3]}, b[n].z, b[n].w);
    }
  }
}

/* Copies of x to shared memory, four threads a row. */
template <mm_cu_code C>
struct wide_copies {
  using Form = wide_form<C>;
  const bf16 *row;
  uint32_t to, k;
  template <class Job>
  __device__ __forceinline__ wide_copies(const Job &job, uint32_t columns, const void *shared)
      : row(job.x(min(threadIdx.x / 4, job.rows() - 1))),
        to((uint32_t)__cvta_generic_to_shared(shared) + threadIdx.x / 4 * Form::kPitch),
        k(columns) {}
  /* Starts that of columns [k0, k0 + Form::kChunk) to a buffer, zeros past k. */
  __device__ __forceinline__ void operator()(uint32_t k0, uint32_t buffer) const {
#pragma unroll
    for (uint32_t i = 0; i < Form::kChunk / 32; i++) {
      const uint32_t column = (i * 4 + threadIdx.x % 4) * 8, at = k0 + column;
      copy16_to(to + buffer * Form::kBuffer + column * 2, at < k ? row + at : row, at < k);
    }
    copy_commit();
  }
};

/* A block's tile of columns [from, from + p.span). */
template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void wide_tile(const mm_cu_weight &w, const tile_plan &p, const Job &job, uint32_t from) {
  using Form = wide_form<C>;
  using codes = tile_codes<C, S>;
  extern __shared__ uint4 shared_raw[];
  uint8_t *const shared = reinterpret_cast<uint8_t *>(shared_raw);
  const uint32_t lane = threadIdx.x % 32, end = min(w.k, from + p.span);
  const wide_copies<C> copy(job, w.k, shared);
  copy(from, 0);
  tile_rows<C, S, Form> rows(w, from, end);
  rows.open(job);
  codes ahead[Form::kAhead] = {};
#pragma unroll
  for (uint32_t i = 0; i < Form::kAhead; i++) rows.fetch(ahead[i]);
  float total[8][4] = {};
  const uint8_t *const first = shared + lane / 4 * Form::kPitch + lane % 4 * (2 * codec<C>::kPiece);
  const auto step = [&](codes &now,
                        uint32_t k) { /* k: from the span's first column on */
                                      const uint8_t *const x = first + k / Form::kChunk % 2 * Form::kBuffer + k % Form::kChunk * 2;
                                      float acc[8][4] = {};
#pragma unroll
                                      for (uint32_t h = 0; h < 2; h++) {
                                        wide_multiply<C, S>(acc, x + h * codes::kStep, now.q[h], now.micro[h]);
                                        if (codes::kSums == 1 && h == 0) continue;
#pragma unroll
                                        for (uint32_t i = 0; i < 32; i++) {
                                          const float times = S == MM_CU_COARSE ? now.f[codes::kSums == 2 ? h : 0][i % 4 / 2] : 1.0f;
                                          total[i / 4][i % 4] = fmaf(acc[i / 4][i % 4], times, total[i / 4][i % 4]), acc[i / 4][i % 4] = 0;
                                        }
                                      }
                                      rows.fetch(now);
  };
#pragma unroll 1
  for (uint32_t k = 0; from + k < end; k += Form::kAhead * Form::kStep) {
#pragma unroll
    for (uint32_t i = 0; i < Form::kAhead; i++) {
      const uint32_t at = k + i * Form::kStep;
      if (from + at >= end) break; /* the same in all warps */
      if (at % Form::kChunk == 0) {
        copy_wait<0>();
        __syncthreads();
        copy(from + at + Form::kChunk, at / Form::kChunk % 2 ^ 1);
      }
      step(ahead[i], at);
    }
  }
  copy_wait<0>();
  tile_emit<Form>(reinterpret_cast<float *>(shared), job, total);
}

#endif
