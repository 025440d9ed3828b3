/* y = x·Wᵀ as a job of gemm.cuh and decode_tile.cuh: Form::kRows rows from `first` on, with the weight rows from `column` on. */
#ifndef MM_CUDA_DENSE_JOB_CUH
#define MM_CUDA_DENSE_JOB_CUH

#include "runtime/cuda/core/weight.cuh"

template <class Form>
struct dense_job {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  uint32_t first, column;

  __device__ uint32_t rows() const { return min(a.tokens - first, (uint32_t)Form::kRows); }
  __device__ const bf16 *x_base() const { return a.x; }
  __device__ uint32_t x_row(uint32_t r) const { return a.rows ? a.rows[first + r] : first + r; }
  __device__ const bf16 *x(uint32_t r) const { return x_base() + (size_t)x_row(r) * w.k; }
  __device__ weight_row weight(uint32_t r) const { return {0, min(column + r, w.n - 1)}; }
  template <int N>
  __device__ void emit(uint32_t r, uint32_t c, const float (&v)[N][2]) const {
    const float f = w.global ? w.global[0] : 1.0f;
    const size_t to = (size_t)(first + r) * w.n + column + c; /* column + c is even */
    const uint32_t left = w.n > column + c ? w.n - column - c : 0;
    if (a.y32 || w.n % 2 != 0) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * N; i++) {
        const uint32_t at = i / 2 * 8 + i % 2;
        if (at >= left) continue;
        if (a.y32) {
          a.y32[to + at] = v[i / 2][i % 2] * f;
        } else {
          a.y[to + at] = __float2bfloat16_rn(v[i / 2][i % 2] * f);
        }
      }
    } else {
#pragma unroll
      for (uint32_t n = 0; n < N; n++) {
        if (n * 8 < left) *reinterpret_cast<uint32_t *>(a.y + to + n * 8) = pack2(v[n][0] * f, v[n][1] * f);
      }
    }
  }
};

#endif
