/* The experts of a single token where a shared expert stands next to the routed ones (gemv.cuh).
 *
 * joined_up. One launch makes both middles: the first `v.blocks` blocks have the fours of the shared expert's
 * two halves, the others those of the chosen experts. The shared expert's blocks read their weights while the
 * others still choose, so they are given fewer bytes less by that time; the two weights may be of different
 * codes. Grid: a block a multiprocessor; 512 threads; dynamic shared memory: the larger of the two plans.
 *
 * joined_down. y[H]: the shared expert is one more segment of each row, of weight 1, where its w2 is of the
 * same form as the routed experts'. Elsewhere the caller adds its product to y.
 *
 * Roundings, sums and launch order are those of one_experts_up and one_experts_down (experts_decode.cu). */
#include "runtime/cuda/core/joined.h"

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/moe/experts_one.cuh"

namespace {

/* Bytes that a block reads while another one chooses experts, by measurement (RESULTS.md): about 4 us of a multiprocessor's part of
 * the rate; twice that in front of NVFP4, whose routed bytes come more slowly. */
template <mm_cu_scale S>
constexpr uint64_t choice_bytes() {
  return S == MM_CU_NV ? 256 << 10 : 128 << 10;
}

/* Factors of the middles: w2's, or those come with its rounding. */
struct joined_factors {
  const float *routed, *shared;
  bool rounds;
};

/* Fours of two columns of the shared expert's middle, a gate's and an up value's row each. */
struct shared_up {
  const mm_cu_weight &w;
  const mm_cu_shared &a;
  const bf16 *from;
  const float *global2; /* w2's, or NULL */
  const mm_cu_activation &act;

  __device__ uint32_t inter() const { return w.n / 2; }
  __device__ uint32_t fours() const { return (inter() + 1) / 2; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t gap() const { return inter(); }
  __device__ uint32_t behind() const { return 1; }
  __device__ gemv_source source(uint32_t, uint32_t) const { return gemv_source(w); }
  __device__ four_place at(uint32_t four, uint32_t) const { return {0, 2 * four, 2 * (inter() - 2 * four)}; }
  __device__ const bf16 *x(uint32_t) const { return from; }
  __device__ float times(uint32_t) const { return 1; }
  __device__ bool rounds() const { return w.rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float factor(uint32_t) const { return 1; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
    const float global = w.global ? w.global[0] : 1.0f, scale = global2 ? global2[0] : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      if (2 * four + i < inter())
        a.middle[2 * four + i] = __float2bfloat16_rn(activated(act, sum[2 * i] * global, sum[2 * i + 1] * global) * scale);
    }
  }
};

/* one_down with one segment more. */
struct all_down : one_down {
  const mm_cu_shared &shared;

  __device__ all_down(const mm_cu_weight &weight, const mm_cu_experts &experts, const slots_of<1> &of, const mm_cu_shared &also)
      : one_down{weight, experts, of, of.used}, shared(also) {}
  __device__ bool routed(uint32_t slot) const { return slot < used; }
  __device__ uint32_t segments() const { return used + 1; }
  __device__ gemv_source source(uint32_t, uint32_t slot) const { return gemv_source(routed(slot) ? w : shared.down); }
  __device__ four_place at(uint32_t four, uint32_t slot) const { return {routed(slot) ? slots.expert[slot] : 0, 4 * four, w.n - 4 * four}; }
  __device__ const bf16 *x(uint32_t slot) const { return routed(slot) ? one_down::x(slot) : shared.middle; }
  __device__ float own() const { return shared.down.global ? shared.down.global[0] : 1.0f; }
  __device__ float factor(uint32_t slot) const { return routed(slot) ? one_down::factor(slot) : own(); }
  __device__ float times(uint32_t slot) const { return !rounds() ? 1.0f : routed(slot) ? weight(slot) : own(); }
};

template <mm_cu_code C, mm_cu_scale S, mm_cu_code D, mm_cu_scale T>
__global__ void __maxnreg__(kGemvRegisters)
    joined_up(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_weight w, const joined_factors after,
              const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a, const __grid_constant__ gemv_plan v,
              const __grid_constant__ mm_cu_shared shared) {
  if (blockIdx.x < v.blocks) {
    const shared_up job{shared.up, shared, a.x, after.shared, r.act};
    gemv_rows<D, T, gemv_wide<D, T>>(shared.up, v, job, [&] {
      grid_wait_and_launch_next();
      gemv_fill<D, T, kJoinedRounds<T>>(shared.up, v, job, 0);
      __syncthreads();
    });
    return;
  }
  __shared__ slots_and_scratch<1> chosen;
  const choice_start start(r);
  grid_wait_and_launch_next();
  one_up job{w, a, after.routed, after.rounds, r.act, chosen.slots, 0, w.n / 2};
  if (threadIdx.x < kChoiceThreads) {
    choose_slots(chosen.slots, chosen.scratch, r, start, p.block() == 0);
  } else {
    gemv_fill<C, S, kJoinedRounds<S>>(w, p, job, kChoiceThreads);
  }
  __syncthreads();
  job.used = chosen.slots.used;
  gemv_rows<C, S, gemv_wide<C, S>>(w, p, job, [] {});
}

template <mm_cu_code C, mm_cu_scale S>
__global__ void __maxnreg__(kGemvRegisters)
    joined_down(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r,
                const __grid_constant__ mm_cu_experts a, const __grid_constant__ mm_cu_shared shared) {
  __shared__ slots_and_scratch<1> chosen;
  grid_launch_next_early();
  read_slots<DOWN>(chosen, r, 1, choice_start(r));
  const all_down job(w, a, chosen.slots, shared);
  gemv_rows<C, S, gemv_wide<C, S>>(w, p, job, [&] {
    if (kJoinedRounds<S>) {
      if (threadIdx.x < job.used) chosen.slots.weight[threadIdx.x] = job.weight(threadIdx.x);
      __syncthreads();
    }
    grid_wait();
    gemv_fill<C, S, kJoinedRounds<S>>(w, p, job, 0);
    __syncthreads();
  });
}

/* The shared expert's blocks of so many: bytes in the proportion of all, and of those that others read too late. */
template <mm_cu_scale S>
uint32_t shared_blocks(uint32_t blocks, uint64_t shared, uint64_t routed) {
  const uint64_t all = shared + routed + blocks * choice_bytes<S>(), mine = (blocks * shared + all / 2) / all;
  return (uint32_t)mm_max(1, mm_min(mine, blocks - 1));
}

struct joined_up_launch {
  const mm_cu_weight &w, &w2;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  const mm_cu_shared &shared;
  bool down_too; /* the shared expert's w2 is a segment of joined_down */
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, mm_cu_code D, mm_cu_scale T>
  cudaError_t in() const {
    const uint32_t all = multiprocessors(), each = ceil_div(w.n / 2, 2);
    if (all < 2) return cudaErrorNotSupported;
    gemv_plan v =
        plan_gemv<D, T, gemv_wide<D, T>>(shared.up, ceil_div(shared.up.n / 2, 2), 1,
                                         shared_blocks<S>(all, (uint64_t)shared.up.n * shared.up.pitch, (uint64_t)r.top_k * w.n * w.pitch));
    gemv_plan p = plan_gemv<C, S, gemv_wide<C, S>>(w, r.top_k * each, 1, all - v.blocks);
    p.start = v.blocks;
    const bool rounds = w2.rounding.kind != MM_ACT_KEPT;
    const joined_factors after = {w2.global, down_too && !rounds ? shared.down.global : nullptr, rounds};
    return launch(joined_up<C, S, D, T>, p.start + p.blocks, 32 * p.warps, max(p.shared, v.shared), s, p, w, after, r, a, v, shared);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    constexpr bool narrow = (C == MM_CU_INT4 && S == MM_CU_COARSE) || S == MM_CU_NV, wide = C == MM_CU_E4M3 && S != MM_CU_FINE;
    if constexpr (narrow || wide) {
      if (shared.up.code == C && shared.up.scale_kind == S) return in<C, S, C, S>();
    }
    if constexpr (narrow) {
      if (shared.up.code == MM_CU_E4M3 && shared.up.scale_kind == MM_CU_COARSE) return in<C, S, MM_CU_E4M3, MM_CU_COARSE>();
      if (shared.up.code == MM_CU_E4M3 && shared.up.scale_kind == MM_CU_MX) return in<C, S, MM_CU_E4M3, MM_CU_MX>();
    }
    return cudaErrorNotSupported;
  }
};

struct joined_down_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  const mm_cu_shared &shared;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (C == MM_CU_BF16 || S == MM_CU_FINE || (C == MM_CU_E2M1 && S == MM_CU_MX)) {
      return cudaErrorNotSupported;
    } else {
      const gemv_plan p = plan_gemv<C, S, gemv_wide<C, S>>(w, ceil_div(w.n, 4), r.top_k + 1);
      return launch(joined_down<C, S>, p.blocks, 32 * p.warps, p.shared, s, p, w, r, a, shared);
    }
  }
};

bool is_coarse8(const mm_cu_weight &w) { return w.code == MM_CU_E4M3 && w.scale_kind == MM_CU_COARSE; }
bool is_mx8(const mm_cu_weight &w) { return w.code == MM_CU_E4M3 && w.scale_kind == MM_CU_MX; }
bool is_narrow(const mm_cu_weight &w) { return w.scale_kind == MM_CU_NV || (w.code == MM_CU_INT4 && w.scale_kind == MM_CU_COARSE); }

}  // namespace

bool mm_cu_joins_shared(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_shared &a, uint32_t top_k) {
  const bool same = w13.code == a.up.code && w13.scale_kind == a.up.scale_kind;
  const bool pair = is_narrow(w13) ? same || is_coarse8(a.up) || is_mx8(a.up) : same && (is_coarse8(w13) || is_mx8(w13));
  const mm_cu_task all = {&w13, &w2, 1, top_k + 1};
  mm_cu_device d;
  return pair && gemv_wide_here() && mm_cu_rounds_joined(w13) && mm_cu_rounds_joined(w2) && mm_cu_rounds_joined(a.up) &&
         mm_cu_device_here(&d) == cudaSuccess && mm_cu_takes(&d, MM_CU_EXPERTS_ONE, &all);
}

bool mm_cu_joins_down(const mm_cu_weight &w2, const mm_cu_shared &a) {
  const bool known = is_narrow(w2) || is_coarse8(w2) || is_mx8(w2);
  return known && mm_cu_rounds_joined(a.down) && w2.n == a.down.n && mm_cu_are_alike(w2, a.down);
}

cudaError_t mm_cu_experts_joined(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                 const mm_cu_shared &shared, cudaStream_t s) {
  if (a.tokens != 1 || !mm_cu_joins_shared(w13, w2, shared, r.top_k)) return cudaErrorNotSupported;
  const bool down = mm_cu_joins_down(w2, shared);
  const cudaError_t e = for_scheme(w13, joined_up_launch{w13, w2, r, a, shared, down, s});
  if (e != cudaSuccess) return e;
  return down ? for_scheme(w2, joined_down_launch{w2, r, a, shared, s}) : mm_cu_experts_one_down(w2, r, a, s);
}
