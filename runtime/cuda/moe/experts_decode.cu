/* The experts of a decode step (T ≤ 16): two passes over the weights of the experts in use alone, each read once.
 *
 * Up: a group is intermediate columns of one expert, w1 rows and the matching w3 rows, for all tokens; middle[slot, token, I] = weight ·
 * SiLU(w1 x) · (w3 x), written only for the tokens of that expert. Down: a group is rows of y; its k axis runs over all slots, so the sum
 * over experts is the accumulator's.
 *
 * Where w2's inputs are rounded, a launch between the two does that, and gives them the weights, unless a single token's down rounds them
 * itself.
 *
 * Up lets the next kernel start only after its own wait, so down may read what the router wrote before up at once, and fetch w2 while up
 * still runs: the slot lists; of a single token the slots that up has written by then, or the logits. */
#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/joined.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/gemm/stream.cuh"
#include "runtime/cuda/moe/experts_one.cuh"

namespace {

/* Warps of a block. A single token's 4-bit codes are widened faster by sixteen with 128 registers each (int4: 30 us, with twelve and 80
 * registers 34), e4m3 by twelve (40 us, with sixteen 42). */
template <mm_cu_code C>
__host__ __device__ constexpr uint32_t expert_warps(int tokens) {
  return tokens == 1 && codec<C>::kPiece == 32 ? 16 : kStreamWarps;
}

template <mm_cu_code C, int kMost>
struct up_job {
  static constexpr int kTokens = kMost;
  static constexpr uint32_t kWarps = expert_warps<C>(kMost);
  static constexpr uint32_t kBoxes = 2;
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  const stream_plan &p;
  const float *global2;
  bool rounds;
  const slots_of<kMost> &slots;
  uint32_t used, inter;

  __device__ uint32_t tokens() const { return a.tokens; }
  __device__ uint32_t groups() const { return used * p.part_groups; }
  __device__ row_group rows(uint32_t group) const { return stream_share(p, group % p.part_groups); }
  __device__ uint32_t gap() const { return inter; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t matrix(uint32_t group, uint32_t) const { return slots.expert[group / p.part_groups]; }
  __device__ const bf16 *x(uint32_t, uint32_t token) const { return token < a.tokens ? a.x + (size_t)token * w.k : nullptr; }
  template <class Sum>
  __device__ void emit(uint32_t group, uint32_t column, uint32_t token, const Sum &sum) const {
    const uint32_t slot = group / p.part_groups, expert = slots.expert[slot];
    if (!(slots.tokens[slot] >> token & 1)) return;
    const float global = w.global ? w.global[expert] : 1.0f;
    float scale = 1; /* of w2's inputs; where those are rounded it comes after that */
    if (!rounds) {
      const float weight = token == 0 ? slots.weight[slot] : __ldcg(&r.slot_weight[slot * MM_CU_DECODE_ROWS + token]);
      scale = weight * (global2 ? global2[expert] : 1.0f);
    }
    const float middle = activated(r.act, sum(0) * global, sum(1) * global) * scale;
    a.middle[((size_t)slot * MM_CU_DECODE_ROWS + token) * inter + column] = __float2bfloat16_rn(middle);
  }
};

template <mm_cu_code C, int kMost>
struct down_job {
  static constexpr int kTokens = kMost;
  static constexpr uint32_t kWarps = expert_warps<C>(kMost);
  static constexpr uint32_t kBoxes = 1;
  const mm_cu_weight &w;
  const mm_cu_experts &a;
  const stream_plan &p;
  const slots_of<kMost> &slots;
  uint32_t used;

  __device__ uint32_t tokens() const { return a.tokens; }
  __device__ uint32_t groups() const { return p.part_groups; }
  __device__ row_group rows(uint32_t group) const { return stream_share(p, group); }
  __device__ uint32_t gap() const { return 0; }
  __device__ uint32_t segments() const { return used; }
  __device__ uint32_t matrix(uint32_t, uint32_t slot) const { return slots.expert[slot]; }
  __device__ const bf16 *x(uint32_t slot, uint32_t token) const {
    if (!(slots.tokens[slot] >> token & 1)) return nullptr;
    return a.middle + ((size_t)slot * MM_CU_DECODE_ROWS + token) * w.k;
  }
  template <class Sum>
  __device__ void emit(uint32_t, uint32_t row, uint32_t token, const Sum &sum) const {
    a.y[(size_t)token * w.n + row] = __float2bfloat16_rn(sum(0));
  }
};

template <mm_cu_code C, mm_cu_scale S, int kTokens>
__global__ void __launch_bounds__(32 * expert_warps<C>(kTokens), stream_blocks(kTokens, expert_warps<C>(kTokens)))
    experts_up(const __grid_constant__ stream_source from, const __grid_constant__ stream_plan p, const __grid_constant__ mm_cu_weight w,
               const float *global2, bool rounds, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  __shared__ slots_and_scratch<kTokens> shared;
  const auto &slots = shared.slots;
  const choice_start start(r);
  grid_wait_and_launch_next();
  read_slots<UP>(shared, r, a.tokens, start);
  stream_rows<C, S>(w, from, p, up_job<C, kTokens>{w, r, a, p, global2, rounds, slots, slots.used, w.n / 2});
}

template <mm_cu_code C, mm_cu_scale S, int kTokens>
__global__ void __launch_bounds__(32 * expert_warps<C>(kTokens), stream_blocks(kTokens, expert_warps<C>(kTokens)))
    experts_down(const __grid_constant__ stream_source from, const __grid_constant__ stream_plan p, const __grid_constant__ mm_cu_weight w,
                 const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  __shared__ slots_and_scratch<kTokens> shared;
  const auto &slots = shared.slots;
  grid_launch_next_early();
  read_slots<DOWN>(shared, r, a.tokens, choice_start(r));
  const uint32_t used = slots.used;
  if (used == 0) { /* padding alone */
    grid_wait();
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.tokens * w.n; i += gridDim.x * blockDim.x) a.y[i] = bf16();
    return;
  }
  stream_rows<C, S>(w, from, p, down_job<C, kTokens>{w, a, p, slots, used});
}

/* ---- a single token ---- */

/* kRound: inputs in another way than gemv_convert rounds them. */
template <mm_cu_code C, mm_cu_scale S, bool kRound, class Ring>
__global__ void __maxnreg__(kGemvRegisters)
    one_experts_up(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_weight w, const float *global2, bool rounds,
                   const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  __shared__ slots_and_scratch<1> shared;
  const choice_start start(r);
  grid_wait_and_launch_next();
  one_up job{w, a, global2, rounds, r.act, shared.slots, 0, w.n / 2};
  if (threadIdx.x < kChoiceThreads) {
    choose_slots(shared.slots, shared.scratch, r, start, blockIdx.x == 0);
  } else {
    gemv_fill<C, S, kRound>(w, p, job, kChoiceThreads);
  }
  __syncthreads();
  job.used = shared.slots.used;
  gemv_rows<C, S, Ring>(w, p, job, [] {});
}

template <mm_cu_code C, mm_cu_scale S, bool kRound, class Ring>
__global__ void __maxnreg__(kGemvRegisters)
    one_experts_down(const __grid_constant__ gemv_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r,
                     const __grid_constant__ mm_cu_experts a) {
  __shared__ slots_and_scratch<1> shared;
  grid_launch_next_early();
  read_slots<DOWN>(shared, r, 1, choice_start(r));
  const one_down job{w, a, shared.slots, shared.slots.used};
  gemv_rows<C, S, Ring>(w, p, job, [&] {
    if (kRound) {
      if (threadIdx.x < job.used) shared.slots.weight[threadIdx.x] = job.weight(threadIdx.x);
      __syncthreads();
    }
    grid_wait();
    gemv_fill<C, S, kRound>(w, p, job, 0);
    __syncthreads();
  });
}

uint32_t slots_bytes(uint32_t tokens) { return tokens > 8 ? sizeof(slots_and_scratch<MM_CU_DECODE_ROWS>) : sizeof(slots_and_scratch<8>); }

struct up_launch {
  const mm_cu_weight &w;
  const float *global2;
  bool rounds;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const stream_plan p = mm_cu_plan_stream(w, r.top_k, w.n / 2, 2, 1, a.tokens, slots_bytes(a.tokens), expert_warps<C>(1));
    stream_source from = {};
    const cudaError_t e = mm_cu_open_source(w, p, &from);
    if (e != cudaSuccess) return e;
    return launch(p.tokens == 1   ? experts_up<C, S, 1>
                  : p.tokens == 8 ? experts_up<C, S, 8>
                                  : experts_up<C, S, 16>,
                  multiprocessors(), 32 * p.warps, p.shared, s, from, p, w, global2, rounds, r, a);
  }
};

struct down_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const stream_plan p = mm_cu_plan_stream(w, 1, w.n, 1, r.top_k, a.tokens, slots_bytes(a.tokens), expert_warps<C>(1));
    stream_source from = {};
    const cudaError_t e = mm_cu_open_source(w, p, &from);
    if (e != cudaSuccess) return e;
    return launch(p.tokens == 1   ? experts_down<C, S, 1>
                  : p.tokens == 8 ? experts_down<C, S, 8>
                                  : experts_down<C, S, 16>,
                  min(p.part_groups, multiprocessors()), 32 * p.warps, p.shared, s, from, p, w, r, a);
  }
};

struct one_up_launch {
  const mm_cu_weight &w;
  const float *global2;
  bool rounds;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, class Ring>
  cudaError_t in() const {
    const gemv_plan p = plan_gemv<C, S, Ring>(w, r.top_k * ceil_div(w.n / 2, 2), 1);
    const auto up =
        gemv_rounds<C, S>(w, MM_CU_EXPERTS_ONE) ? one_experts_up<C, S, C != MM_CU_BF16, Ring> : one_experts_up<C, S, false, Ring>;
    return launch(up, p.blocks, 32 * p.warps, p.shared, s, p, w, global2, rounds, r, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    return gemv_wide_here() ? in<C, S, gemv_wide<C, S>>() : in<C, S, gemv_least<C, S>>();
  }
};

struct one_down_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, class Ring>
  cudaError_t in() const {
    const gemv_plan p = plan_gemv<C, S, Ring>(w, ceil_div(w.n, 4), r.top_k);
    const bool rounds = gemv_rounds<C, S>(w, MM_CU_EXPERTS_ONE);
    const auto down = rounds ? one_experts_down<C, S, C != MM_CU_BF16, Ring> : one_experts_down<C, S, false, Ring>;
    return launch(down, p.blocks, 32 * p.warps, p.shared, s, p, w, r, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    return gemv_wide_here() ? in<C, S, gemv_wide<C, S>>() : in<C, S, gemv_least<C, S>>();
  }
};

}  // namespace

cudaError_t mm_cu_experts_one_down(const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s) {
  return for_scheme(w2, one_down_launch{w2, r, a, s});
}

cudaError_t mm_cu_experts_one(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                              cudaStream_t s) {
  const mm_cu_rounding *const before = mm_cu_rounds_before(MM_CU_EXPERTS_ONE, &w2);
  const bool rounds = before || w2.rounding.kind != MM_ACT_KEPT;
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_ONE, {&w13, &w2, a.tokens, r.top_k});
  if (e == cudaSuccess) e = for_scheme(w13, one_up_launch{w13, w2.global, rounds, r, a, s});
  if (e == cudaSuccess && before) e = mm_cu_round_slots(a.middle, a.tokens, w2.k, r, w2.global, *before, s);
  return e != cudaSuccess ? e : mm_cu_experts_one_down(w2, r, a, s);
}

cudaError_t mm_cu_experts_decode(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                 cudaStream_t s) {
  const mm_cu_rounding *const before = mm_cu_rounds_before(MM_CU_EXPERTS_DECODE, &w2);
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_DECODE, {&w13, &w2, a.tokens, r.top_k});
  if (e != cudaSuccess || a.tokens == 0) return e;
  e = for_scheme(w13, up_launch{w13, w2.global, before != nullptr, r, a, s});
  if (e == cudaSuccess && before) e = mm_cu_round_slots(a.middle, a.tokens, w2.k, r, w2.global, *before, s);
  return e != cudaSuccess ? e : for_scheme(w2, down_launch{w2, r, a, s});
}
