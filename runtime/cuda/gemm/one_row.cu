/* Products of a single row in fewer launches (gemv.cuh): one x with two weights, or with those and a third of
 * another code, and the first product of a dense MLP with its activation. A row's sums are those of mm_cu_one, added in an order that the
 * shape of the launch decides. */
#include "runtime/cuda/core/joined.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/swiglu.cuh"
#include "runtime/cuda/gemm/gemv.cuh"

namespace {

/* Fours of the first weight, then of the second. */
struct two_job {
  const mm_cu_two &a;

  __device__ uint32_t of_first() const { return (a.w[0].n + 3) / 4; }
  __device__ uint32_t fours() const { return of_first() + (a.w[1].n + 3) / 4; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t gap() const { return 1; }
  __device__ uint32_t behind() const { return 2; }
  __device__ gemv_source source(uint32_t four, uint32_t) const { return gemv_source(a.w[four >= of_first()]); }
  __device__ four_place at(uint32_t four, uint32_t) const {
    const bool second = four >= of_first();
    const uint32_t first = 4 * (second ? four - of_first() : four);
    return {0, first, a.w[second].n - first};
  }
  __device__ const bf16 *x(uint32_t) const { return a.x; }
  __device__ float times(uint32_t) const { return 1; }
  __device__ bool rounds() const { return a.w[0].rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float factor(uint32_t) const { return 1; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
    const four_place to = at(four, 0);
    const bool second = four >= of_first();
    const float *const global = a.w[second].global;
    bf16 *const y = a.y[second] + to.first;
#pragma unroll
    for (uint32_t i = 0; i < kFour; i++) {
      if (i < to.rows) y[i] = __float2bfloat16_rn(sum[i] * (global ? global[0] : 1.0f));
    }
  }
};

struct row_job {
  const mm_cu_three &a;

  __device__ uint32_t fours() const { return (a.w.n + 3) / 4; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t gap() const { return 1; }
  __device__ uint32_t behind() const { return 2; }
  __device__ gemv_source source(uint32_t, uint32_t) const { return gemv_source(a.w); }
  __device__ four_place at(uint32_t four, uint32_t) const { return {0, 4 * four, a.w.n - 4 * four}; }
  __device__ const bf16 *x(uint32_t) const { return a.two.x; }
  __device__ float times(uint32_t) const { return 1; }
  __device__ bool rounds() const { return a.w.rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float factor(uint32_t) const { return 1; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
    const float global = a.w.global ? a.w.global[0] : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < kFour; i++) {
      if (4 * four + i < a.w.n) a.y[4 * four + i] = __float2bfloat16_rn(sum[i] * global);
    }
  }
};

/* Fours of two columns of the middle, a gate's and an up value's row each. */
struct gated_job {
  const mm_cu_weight &w;
  const mm_cu_gated_row &a;

  __device__ uint32_t inter() const { return w.n / 2; }
  __device__ uint32_t fours() const { return (inter() + 1) / 2; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t gap() const { return inter(); }
  __device__ uint32_t behind() const { return 1; }
  __device__ gemv_source source(uint32_t, uint32_t) const { return gemv_source(w); }
  __device__ four_place at(uint32_t four, uint32_t) const { return {0, 2 * four, 2 * (inter() - 2 * four)}; }
  __device__ const bf16 *x(uint32_t) const { return a.x; }
  __device__ float times(uint32_t) const { return 1; }
  __device__ bool rounds() const { return w.rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float factor(uint32_t) const { return 1; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
    const float global = w.global ? w.global[0] : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      if (2 * four + i < inter())
        a.middle[2 * four + i] = __float2bfloat16_rn(activated(a.act, sum[2 * i] * global, sum[2 * i + 1] * global));
    }
  }
};

/* kRound: inputs in another way than gemv_convert rounds them. */
template <mm_cu_code C, mm_cu_scale S, bool kRound, class Ring>
__global__ void __maxnreg__(kGemvRegisters) one_two(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_two a) {
  grid_launch_next_early();
  const two_job job{a};
  gemv_rows<C, S, Ring>(a.w[0], p, job, [&] {
    grid_wait();
    gemv_fill<C, S, kRound>(a.w[0], p, job, 0);
    __syncthreads();
  });
}

template <mm_cu_code C, mm_cu_scale S, bool kRound, class Ring>
__global__ void __maxnreg__(kGemvRegisters)
    one_gated(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_gated_row a) {
  grid_launch_next_early();
  const gated_job job{w, a};
  gemv_rows<C, S, Ring>(w, p, job, [&] {
    grid_wait();
    gemv_fill<C, S, kRound>(w, p, job, 0);
    __syncthreads();
  });
}

/* The first v.blocks blocks have the two's rows, the others the third's. */
template <mm_cu_code C, mm_cu_scale S, mm_cu_code D, mm_cu_scale T>
__global__ void __maxnreg__(kGemvRegisters)
    one_three(const __grid_constant__ gemv_plan p, const __grid_constant__ gemv_plan v, const __grid_constant__ mm_cu_three a) {
  grid_launch_next_early();
  if (blockIdx.x < v.blocks) {
    const two_job job{a.two};
    gemv_rows<D, T, gemv_wide<D, T>>(a.two.w[0], v, job, [&] {
      grid_wait();
      gemv_fill<D, T, kJoinedRounds<T>>(a.two.w[0], v, job, 0);
      __syncthreads();
    });
    return;
  }
  const row_job job{a};
  gemv_rows<C, S, gemv_wide<C, S>>(a.w, p, job, [&] {
    grid_wait();
    gemv_fill<C, S, kJoinedRounds<S>>(a.w, p, job, 0);
    __syncthreads();
  });
}

struct two_launch {
  const mm_cu_two &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, class Ring>
  cudaError_t in() const {
    const gemv_plan p = plan_gemv<C, S, Ring>(a.w[0], ceil_div(a.w[0].n, 4) + ceil_div(a.w[1].n, 4), 1);
    const auto kernel = gemv_rounds<C, S>(a.w[0], MM_CU_ONE) ? one_two<C, S, C != MM_CU_BF16, Ring> : one_two<C, S, false, Ring>;
    return launch(kernel, p.blocks, 32 * p.warps, p.shared, s, p, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (S == MM_CU_FINE) {
      return cudaErrorNotSupported;
    } else {
      return gemv_wide_here() ? in<C, S, gemv_wide<C, S>>() : in<C, S, gemv_least<C, S>>();
    }
  }
};

struct three_launch {
  const mm_cu_three &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, mm_cu_code D, mm_cu_scale T>
  cudaError_t in() const {
    const uint32_t all = multiprocessors(), fours = ceil_div(a.two.w[0].n, 4) + ceil_div(a.two.w[1].n, 4);
    if (all < 2) return cudaErrorNotSupported;
    const uint64_t mine = fours * 4 * a.two.w[0].pitch, others = (uint64_t)a.w.n * a.w.pitch, sum = mine + others;
    const uint32_t part = (uint32_t)mm_max(1, mm_min((all * mine + sum / 2) / sum, all - 1));
    const gemv_plan v = plan_gemv<D, T, gemv_wide<D, T>>(a.two.w[0], fours, 1, part);
    gemv_plan p = plan_gemv<C, S, gemv_wide<C, S>>(a.w, ceil_div(a.w.n, 4), 1, all - v.blocks);
    p.start = v.blocks;
    return launch(one_three<C, S, D, T>, p.start + p.blocks, 32 * p.warps, max(p.shared, v.shared), s, p, v, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (S == MM_CU_FINE || (C == MM_CU_E2M1 && S == MM_CU_MX)) {
      return cudaErrorNotSupported;
    } else {
      if (a.two.w[0].code == MM_CU_BF16) return in<C, S, MM_CU_BF16, MM_CU_PLAIN>();
      return a.two.w[0].code == C && a.two.w[0].scale_kind == S ? in<C, S, C, S>() : cudaErrorNotSupported;
    }
  }
};

struct gated_launch {
  const mm_cu_weight &w;
  const mm_cu_gated_row &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, class Ring>
  cudaError_t in() const {
    const gemv_plan p = plan_gemv<C, S, Ring>(w, ceil_div(w.n / 2, 2), 1);
    const auto kernel = gemv_rounds<C, S>(w, MM_CU_ONE) ? one_gated<C, S, C != MM_CU_BF16, Ring> : one_gated<C, S, false, Ring>;
    return launch(kernel, p.blocks, 32 * p.warps, p.shared, s, p, w, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    return gemv_wide_here() ? in<C, S, gemv_wide<C, S>>() : in<C, S, gemv_least<C, S>>();
  }
};

}  // namespace

bool mm_cu_are_alike(const mm_cu_weight &a, const mm_cu_weight &b) {
  const mm_cu_rounding &of_a = *mm_cu_rounding_of(&a), &of_b = *mm_cu_rounding_of(&b);
  return a.code == b.code && a.scale_kind == b.scale_kind && a.scale_kind != MM_CU_FINE && a.k == b.k && a.pitch == b.pitch &&
         a.scale_pitch == b.scale_pitch && a.cell_n_log2 == b.cell_n_log2 && a.cell_k_log2 == b.cell_k_log2 && of_a.kind == of_b.kind &&
         of_a.fixed == of_b.fixed && of_a.whole_k == of_b.whole_k;
}

cudaError_t mm_cu_one_two(const mm_cu_two &a, cudaStream_t s) {
  cudaError_t e = mm_cu_refuse(MM_CU_ONE, {&a.w[0], nullptr, 1});
  if (e == cudaSuccess && !mm_cu_are_alike(a.w[0], a.w[1])) e = cudaErrorNotSupported;
  return e != cudaSuccess ? e : for_scheme(a.w[0], two_launch{a, s});
}

cudaError_t mm_cu_one_gated(const mm_cu_weight &w, const mm_cu_gated_row &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_ONE, {&w, nullptr, 1});
  return e != cudaSuccess ? e : for_scheme(w, gated_launch{w, a, s});
}

bool mm_cu_rounds_joined(const mm_cu_weight &w) {
  const bool bytes = w.scale_kind == MM_CU_NV || w.scale_kind == MM_CU_MX, group = w.rounding.kind == MM_ACT_FP8_GROUP;
  if (w.whole.kind != MM_ACT_KEPT) return false;
  return w.rounding.kind == MM_ACT_KEPT || (mm_cu_rounds_inside(MM_CU_ONE, &w) && group != bytes);
}

bool mm_cu_joins_three(const mm_cu_three &a) {
  const mm_cu_weight &v = a.two.w[0];
  const bool known = a.w.scale_kind != MM_CU_FINE && !(a.w.code == MM_CU_E2M1 && a.w.scale_kind == MM_CU_MX);
  const bool pair = v.code == MM_CU_BF16 || (v.code == a.w.code && v.scale_kind == a.w.scale_kind);
  return known && pair && gemv_wide_here() && mm_cu_are_alike(v, a.two.w[1]) && mm_cu_rounds_joined(a.w) && mm_cu_rounds_joined(v) &&
         mm_cu_rounds_joined(a.two.w[1]) && mm_cu_refuse(MM_CU_ONE, {&a.w, nullptr, 1}) == cudaSuccess &&
         mm_cu_refuse(MM_CU_ONE, {&v, nullptr, 1}) == cudaSuccess;
}

cudaError_t mm_cu_one_three(const mm_cu_three &a, cudaStream_t s) {
  return mm_cu_joins_three(a) ? for_scheme(a.w, three_launch{a, s}) : cudaErrorNotSupported;
}
