/* The experts of a decode step (T ≤ 16): two passes over the weights of the experts in use alone, each read once.
 *
 * Up: a tile is eight intermediate columns of the experts in use, w1 rows in its first half and the matching w3 rows in its second, for
 * all tokens; middle[slot, token, I] = weight · SiLU(w1 x) · (w3 x), written only for the tokens of that expert.
 * Down: a tile is 16 rows of y; its k axis runs over all slots, so the sum over experts is the accumulator's.
 *
 * Up lets the next kernel start only after its own wait, so down may read the slot lists, which the router wrote before up, at once and
 * fetch w2 while up still runs. */
#include "runtime/cuda/launch.h"
#include "runtime/cuda/stream.cuh"

namespace {

constexpr int kMaxSlots = MM_CU_SKINNY * MM_CU_MAX_TOP_K;

struct slot_list {
  uint32_t expert[kMaxSlots], tokens[kMaxSlots];
};
/* The step's slots into shared memory; returns how many. */
__device__ uint32_t read_slots(slot_list &to, const mm_cu_route &r) {
  const uint32_t used = __ldcg(r.used);
  for (uint32_t i = threadIdx.x; i < used; i += kStreamThreads)
    to.expert[i] = __ldcg(&r.slot_expert[i]), to.tokens[i] = __ldcg(&r.slot_tokens[i]);
  __syncthreads();
  return used;
}

struct up_job {
  static constexpr bool kEarly = false;
  static constexpr int kPerTile = 8;
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  const float *global2;
  const slot_list &slots;
  uint32_t inter;
  share columns; /* of all slots, one after the other */

  __device__ uint32_t tokens() const { return a.tokens; }
  __device__ uint32_t first() const { return columns.first; }
  __device__ uint32_t end() const { return columns.end; }
  __device__ row_group group(uint32_t first) const {
    const uint32_t c = first % inter;
    return {c, min(min(columns.end - first, kTiles * kPerTile), inter - c)};
  }
  __device__ uint32_t apart() const { return inter; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t matrix(uint32_t first, uint32_t) const { return slots.expert[first / inter]; }
  __device__ const bf16 *x(uint32_t, uint32_t token) const { return token < a.tokens ? a.x + (size_t)token * w.k : nullptr; }
  template <class Sum>
  __device__ void emit(uint32_t column, uint32_t token, const Sum &sum) const {
    const uint32_t slot = column / inter, expert = slots.expert[slot];
    if (!(slots.tokens[slot] >> token & 1)) return;
    const float global = w.global ? w.global[expert] : 1.0f;
    const float scale = __ldcg(&r.slot_weight[slot * MM_CU_SKINNY + token]) * (global2 ? global2[expert] : 1.0f);
    const float middle = silu(sum(0) * global) * (sum(1) * global) * scale;
    a.middle[((size_t)slot * MM_CU_SKINNY + token) * inter + column % inter] = __float2bfloat16_rn(middle);
  }
};

struct down_job {
  static constexpr bool kEarly = true;
  static constexpr int kPerTile = 16;
  const mm_cu_weight &w;
  const mm_cu_experts &a;
  const slot_list &slots;
  uint32_t used;
  share rows;

  __device__ uint32_t tokens() const { return a.tokens; }
  __device__ uint32_t first() const { return rows.first; }
  __device__ uint32_t end() const { return rows.end; }
  __device__ row_group group(uint32_t first) const { return {first, min(rows.end - first, kTiles * kPerTile)}; }
  __device__ uint32_t apart() const { return 8; }
  __device__ uint32_t segments() const { return used; }
  __device__ uint32_t matrix(uint32_t, uint32_t slot) const { return slots.expert[slot]; }
  __device__ const bf16 *x(uint32_t slot, uint32_t token) const {
    if (!(slots.tokens[slot] >> token & 1)) return nullptr;
    return a.middle + ((size_t)slot * MM_CU_SKINNY + token) * w.k;
  }
  template <class Sum>
  __device__ void emit(uint32_t row, uint32_t token, const Sum &sum) const {
    a.y[(size_t)token * w.n + row] = __float2bfloat16_rn(sum(0));
  }
};

template <mm_cu_code C, mm_cu_scale S, int kHalves>
__global__ void __launch_bounds__(kStreamThreads, kHalves == 1 ? 2 : 1)
    experts_up(const __grid_constant__ mm_cu_weight w, const float *global2, const __grid_constant__ mm_cu_route r,
               const __grid_constant__ mm_cu_experts a) {
  __shared__ slot_list slots;
  grid_wait();
  grid_launch_next();
  const uint32_t used = read_slots(slots, r), inter = w.n / 2;
  up_job job{w, r, a, global2, slots, inter, share(used * inter)};
  stream_rows<C, S, kHalves>(w, job);
}

template <mm_cu_code C, mm_cu_scale S, int kHalves>
__global__ void __launch_bounds__(kStreamThreads, kHalves == 1 ? 2 : 1)
    experts_down(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  __shared__ slot_list slots;
  grid_launch_next();
  const uint32_t used = read_slots(slots, r);
  down_job job{w, a, slots, used, share(w.n)};
  stream_rows<C, S, kHalves>(w, job);
}

struct up_launch {
  const mm_cu_weight &w;
  const float *global2;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const unsigned grid = multiprocessors();
    if (a.tokens <= 8) return launch(experts_up<C, S, 1>, grid, kStreamThreads, sizeof(stream_shared<1>), s, w, global2, r, a);
    return launch(experts_up<C, S, 2>, grid, kStreamThreads, sizeof(stream_shared<2>), s, w, global2, r, a);
  }
};

struct down_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const unsigned grid = min(ceil_div(w.n, 8), multiprocessors());
    if (a.tokens <= 8) return launch(experts_down<C, S, 1>, grid, kStreamThreads, sizeof(stream_shared<1>), s, w, r, a);
    return launch(experts_down<C, S, 2>, grid, kStreamThreads, sizeof(stream_shared<2>), s, w, r, a);
  }
};

}  // namespace

cudaError_t mm_cu_experts_skinny(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                 cudaStream_t s) {
  if (a.tokens > MM_CU_SKINNY) return cudaErrorInvalidValue;
  cudaError_t e = for_scheme(w13, up_launch{w13, w2.global, r, a, s});
  return e != cudaSuccess ? e : for_scheme(w2, down_launch{w2, r, a, s});
}
