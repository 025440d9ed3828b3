/* The experts of a single token as gemv.cuh's jobs, and the slots that each kernel of few tokens walks: what
 * the kernels of routed experts alone (experts_decode.cu) and with the shared one (experts_shared.cu) have in
 * common. */
#ifndef MM_CUDA_EXPERTS_ONE_CUH
#define MM_CUDA_EXPERTS_ONE_CUH

#include "runtime/cuda/core/swiglu.cuh"
#include "runtime/cuda/gemm/gemv.cuh"
#include "runtime/cuda/moe/route.cuh"

namespace {

/* For a kernel of so many tokens: the experts in use, ascending, their tokens as bits, and the weight of token 0. */
template <int kTokens>
struct slots_of {
  static constexpr uint32_t kMost = kTokens * MM_CU_MAX_TOP_K;
  uint32_t used, expert[kMost], tokens[kMost];
  float weight[kMost];
};
/* Code that chooses for a single token, which kernels for eight take too (stream_plan.cu). */
template <int kTokens>
struct slots_and_scratch {
  slots_of<kTokens> slots;
  choice_shared scratch;
};
template <>
struct slots_and_scratch<MM_CU_DECODE_ROWS> {
  slots_of<MM_CU_DECODE_ROWS> slots;
};

/* The step's slots into shared memory, for up and down. For a single token, up selects them and its first block publishes them; down reads
 * the published list, or selects too. */
enum phase { UP, DOWN };
template <phase kPhase, int kTokens>
__device__ void read_slots(slots_and_scratch<kTokens> &to, const mm_cu_route &r, uint32_t tokens, const choice_start &start) {
  slots_of<kTokens> &s = to.slots;
  if constexpr (kTokens < MM_CU_DECODE_ROWS) {
    __shared__ bool published;
    if (tokens == 1) {
      if (kPhase == DOWN) {
        if (threadIdx.x < 32) published = published_slots(s, r);
        __syncthreads();
        if (published) return;
      }
      if (threadIdx.x < kChoiceThreads) choose_slots(s, to.scratch, r, start, kPhase == UP && blockIdx.x == 0);
      __syncthreads();
      return;
    }
  }
  const uint32_t used = __ldcg(r.used);
  for (uint32_t i = threadIdx.x; i < used; i += blockDim.x)
    s.expert[i] = __ldcg(&r.slot_expert[i]), s.tokens[i] = __ldcg(&r.slot_tokens[i]),
    s.weight[i] = __ldcg(&r.slot_weight[i * MM_CU_DECODE_ROWS]);
  if (threadIdx.x == 0) s.used = used;
  __syncthreads();
}

/* ---- a single token ---- */

/* Fours of two columns, each of w1 and w3. */
struct one_up {
  const mm_cu_weight &w;
  const mm_cu_experts &a;
  const float *global2;
  bool later; /* w2's inputs are rounded before they are weighted */
  const mm_cu_activation &act;
  const slots_of<1> &slots;
  uint32_t used, inter;

  __device__ uint32_t each() const { return (inter + 1) / 2; }
  __device__ uint32_t fours() const { return used * each(); }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t gap() const { return inter; }
  __device__ uint32_t behind() const { return 1; }
  __device__ gemv_source source(uint32_t, uint32_t) const { return gemv_source(w); }
  __device__ four_place at(uint32_t four, uint32_t) const {
    const uint32_t slot = four / each(), column = (four - slot * each()) * 2;
    return {slots.expert[slot], column, 2 * (inter - column)};
  }
  __device__ const bf16 *x(uint32_t) const { return a.x; }
  __device__ float times(uint32_t) const { return 1; }
  __device__ bool rounds() const { return w.rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float factor(uint32_t) const { return 1; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
    const uint32_t slot = four / each(), column = (four - slot * each()) * 2, expert = slots.expert[slot];
    const float global = w.global ? w.global[expert] : 1.0f;
    const float scale = later ? 1.0f : slots.weight[slot] * (global2 ? global2[expert] : 1.0f);
    bf16 *to = a.middle + (size_t)slot * MM_CU_DECODE_ROWS * inter + column;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      if (column + i < inter) to[i] = __float2bfloat16_rn(activated(act, sum[2 * i] * global, sum[2 * i + 1] * global) * scale);
    }
  }
};

struct one_down {
  const mm_cu_weight &w;
  const mm_cu_experts &a;
  const slots_of<1> &slots;
  uint32_t used;

  __device__ uint32_t fours() const { return (w.n + 3) / 4; }
  __device__ uint32_t segments() const { return used; }
  __device__ uint32_t gap() const { return 1; }
  __device__ uint32_t behind() const { return 2; }
  __device__ gemv_source source(uint32_t, uint32_t) const { return gemv_source(w); }
  __device__ four_place at(uint32_t four, uint32_t slot) const { return {slots.expert[slot], 4 * four, w.n - 4 * four}; }
  __device__ const bf16 *x(uint32_t slot) const { return a.middle + (size_t)slot * MM_CU_DECODE_ROWS * w.k; }
  __device__ bool rounds() const { return w.rounding.kind == MM_ACT_FP8_GROUP; }
  __device__ float weight(uint32_t slot) const { return slots.weight[slot] * (w.global ? w.global[slots.expert[slot]] : 1.0f); }
  __device__ float factor(uint32_t slot) const { return slots.weight[slot]; } /* which holds weight() by then */
  __device__ float times(uint32_t slot) const { return rounds() ? weight(slot) : 1.0f; }
  __device__ void emit(uint32_t four, const float (&sum)[kFour]) const {
#pragma unroll
    for (uint32_t i = 0; i < kFour; i++) {
      if (4 * four + i < w.n) a.y[4 * four + i] = __float2bfloat16_rn(sum[i]);
    }
  }
};

}  // namespace

#endif
