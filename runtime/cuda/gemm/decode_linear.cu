/* y = x·Wᵀ for at most 16 rows of x: the weights are read once, at the memory's rate (gemv.cuh for one row, stream.cuh for more). */
#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/gemm/gemv.cuh"
#include "runtime/cuda/gemm/stream.cuh"

namespace {

template <int kMost>
struct linear_job {
  static constexpr int kTokens = kMost;
  static constexpr uint32_t kWarps = kStreamWarps;
  static constexpr uint32_t kBoxes = 1;
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  const stream_plan &p;

  __device__ uint32_t tokens() const { return a.tokens; }
  __device__ uint32_t groups() const { return p.part_groups; }
  __device__ row_group rows(uint32_t group) const { return stream_share(p, group); }
  __device__ uint32_t gap() const { return 0; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t matrix(uint32_t, uint32_t) const { return 0; }
  __device__ const bf16 *x(uint32_t, uint32_t token) const {
    if (token >= a.tokens) return nullptr;
    return a.x + (size_t)(a.rows ? a.rows[token] : token) * w.k;
  }
  template <class Sum>
  __device__ void emit(uint32_t, uint32_t row, uint32_t token, const Sum &sum) const {
    float y = sum(0);
    if (w.global) y *= w.global[0];
    const size_t at = (size_t)token * w.n + row;
    if (a.y32) {
      a.y32[at] = y;
    } else {
      a.y[at] = __float2bfloat16_rn(y);
    }
  }
};

template <mm_cu_code C, mm_cu_scale S, int kTokens>
__global__ void __launch_bounds__(32 * kStreamWarps, stream_blocks(kTokens, kStreamWarps))
    decode_linear(const __grid_constant__ stream_source from, const __grid_constant__ stream_plan p, const __grid_constant__ mm_cu_weight w,
                  const __grid_constant__ mm_cu_linear a) {
  grid_launch_next_early();
  stream_rows<C, S>(w, from, p, linear_job<kTokens>{w, a, p});
}

/* ---- a single token ---- */

struct one_job {
  const mm_cu_weight &w;
  const mm_cu_linear &a;

  __device__ uint32_t fours() const { return (w.n + 3) / 4; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t gap() const { return 1; }
  __device__ uint32_t behind() const { return 2; }
  __device__ gemv_source source(uint32_t, uint32_t) const { return gemv_source(w); }
  __device__ four_place at(uint32_t four, uint32_t) const { return {0, 4 * four, w.n - 4 * four}; }
  __device__ const bf16 *x(uint32_t) const { return a.x + (size_t)(a.rows ? a.rows[0] : 0) * w.k; }
  __device__ float times(uint32_t) const { return 1; }
  __device__ bool rounds() const { return w.rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float factor(uint32_t) const { return 1; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
    const float global = w.global ? w.global[0] : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < kFour; i++) {
      if (4 * four + i >= w.n) break;
      const float v = sum[i] * global;
      if (a.y32) {
        a.y32[4 * four + i] = v;
      } else {
        bf16 &y = a.y[4 * four + i];
        y = __float2bfloat16_rn(a.add ? __bfloat162float(y) + v : v);
      }
    }
  }
};

/* kRound: inputs in another way than gemv_convert rounds them. */
template <mm_cu_code C, mm_cu_scale S, bool kRound, class Ring>
__global__ void __maxnreg__(kGemvRegisters)
    one(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
  grid_launch_next_early();
  const one_job job{w, a};
  gemv_rows<C, S, Ring>(w, p, job, [&] {
    grid_wait();
    gemv_fill<C, S, kRound>(w, p, job, 0);
    __syncthreads();
  });
}

struct one_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, class Ring>
  cudaError_t in() const {
    const gemv_plan p = plan_gemv<C, S, Ring>(w, ceil_div(w.n, 4), 1);
    const auto kernel = gemv_rounds<C, S>(w, MM_CU_ONE) ? one<C, S, C != MM_CU_BF16, Ring> : one<C, S, false, Ring>;
    return launch(kernel, p.blocks, 32 * p.warps, p.shared, s, p, w, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    return gemv_wide_here() ? in<C, S, gemv_wide<C, S>>() : in<C, S, gemv_least<C, S>>();
  }
};

struct decode_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const stream_plan p = mm_cu_plan_stream(w, 1, w.n, 1, 1, max(a.tokens, 2), 0, kStreamWarps);
    stream_source from = {};
    const cudaError_t e = mm_cu_open_source(w, p, &from);
    if (e != cudaSuccess) return e;
    const unsigned grid = min(p.part_groups, multiprocessors());
    return launch(p.tokens == 8 ? decode_linear<C, S, 8> : decode_linear<C, S, 16>, grid, 32 * p.warps, p.shared, s, from, p, w, a);
  }
};

}  // namespace

cudaError_t mm_cu_one(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_ONE, {&w, nullptr, a.tokens});
  return e != cudaSuccess ? e : for_scheme(w, one_launch{w, a, s});
}

cudaError_t mm_cu_decode_linear(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_DECODE_LINEAR, {&w, nullptr, a.tokens});
  return e != cudaSuccess || a.tokens == 0 ? e : for_scheme(w, decode_launch{w, a, s});
}
