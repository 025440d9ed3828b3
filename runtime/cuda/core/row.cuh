/* A row that is normed, by a block of threads: what the kernels of rows.cu and those that sum over ranks (ranks_prefill.cu) share, so that
 * their bits are the same. */
#ifndef MM_CUDA_ROW_CUH
#define MM_CUDA_ROW_CUH

#include "runtime/cuda/core/fp8.cuh"
#include "runtime/cuda/core/norm.cuh"

/* The columns of a row that one of its threads works on: eight in each turn, next to those of the threads before and after it. */
struct row_columns {
  uint32_t thread, threads, width;
};

/* Calls f(turn, first column) for each of kTurns turns. */
template <int kTurns, class F>
__device__ __forceinline__ void each_turn(const row_columns &own, const F &f) {
#pragma unroll
  for (int i = 0; i < kTurns; i++) {
    const uint32_t c = (i * own.threads + own.thread) * 8;
    if (c >= own.width) break;
    f(i, c);
  }
}

/* value(i, c, v) yields columns [c, c + 8) before the norm, weights(i, c, w) its weights there; finish(i, c, v) takes them after it. The
 * row stays in registers between its sum and its use. barrier() is one of the row's threads; part[threads / 32 · kTurns] is shared memory
 * that they write before it and read behind it. Bits do not depend on the number of threads. */
template <int kTurns, class Value, class Weights, class Finish, class Barrier>
__device__ __forceinline__ void normalise_row(const row_columns &own, float eps, float *part, const Value &value, const Weights &weights,
                                              const Finish &finish, const Barrier &barrier) {
  float v[kTurns][8], sum[kTurns] = {};
  each_turn<kTurns>(own, [&](int i, uint32_t c) {
    value(i, c, v[i]);
    sum[i] = square8(v[i]);
  });
#pragma unroll
  for (int i = 0; i < kTurns; i++) {
    sum[i] = warp_sum(sum[i]);
    if (threadIdx.x % 32 == 0) part[(i * own.threads + own.thread) / 32] = sum[i];
  }
  barrier();
  const float scale = norm_scale(part, (own.width + 255) / 256, own.width, eps);
  each_turn<kTurns>(own, [&](int i, uint32_t c) {
    float w[8];
    weights(i, c, w);
    scale8(v[i], scale, w);
    finish(i, c, v[i]);
  });
}

/* Eight columns of the result, from `at` on, and of its codes if there are any. */
__device__ __forceinline__ void finish8(bf16 *y, size_t at, uint32_t row, uint32_t c, const float v[8], const mm_cu_codes &codes) {
  const uint4 q = narrow8(v);
  *reinterpret_cast<uint4 *>(y + at) = q;
  if (codes.code) encode8(codes, row, c, q);
}

/* A combine of rows takes so many columns at most with codes: whole groups, as the rows have them. */
inline bool codes_fit(const mm_cu_codes &codes, uint32_t tokens, uint32_t width) {
  return !codes.code || (width % MM_CU_GROUP == 0 && codes.pitch == width && codes.rows == tokens);
}

#endif
