/* The experts of a decode step (T ≤ 16): two passes over the weights of the experts in use alone, each read once.
 *
 * Up: an item is four intermediate columns of one expert, w1 rows in fragment rows 0-3 and the matching w3 rows in 4-7, for all tokens;
 * middle[slot, token, I] = weight · SiLU(w1 x) · (w3 x), written only for the tokens of that expert.
 * Down: an item is eight rows of y; its k axis runs over all slots, so the sum over experts is the accumulator's.
 *
 * Up lets the next kernel start only after its own wait, so down may read the slot lists, which the router wrote before up, at once and
 * fetch w2 while up still runs. */
#include "runtime/cuda/launch.h"
#include "runtime/cuda/stream.cuh"

namespace {

struct up_job {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  const float *global2;
  uint32_t inter, per_expert, count;

  __device__ uint32_t items() const { return count; }
  __device__ uint32_t segments() const { return 1; }
  __device__ bool early() const { return false; }
  __device__ weight_row row(uint32_t item, uint32_t, uint32_t g) const {
    uint32_t i = min(item % per_expert * 4 + g % 4, inter - 1);
    return {__ldcg(&r.slot_expert[item / per_expert]), g < 4 ? i : inter + i};
  }
  __device__ const bf16 *x(uint32_t, uint32_t token) const { return token < a.tokens ? a.x + (size_t)token * w.k : nullptr; }
  __device__ void emit(uint32_t item, uint32_t token, uint32_t c, float sum) const {
    uint32_t slot = item / per_expert, i = item % per_expert * 4 + c;
    float up = __shfl_down_sync(0xffffffffu, sum, 4);
    if (c >= 4 || i >= inter || !(__ldcg(&r.slot_tokens[slot]) >> token & 1)) return;
    uint32_t expert = __ldcg(&r.slot_expert[slot]);
    if (w.global) sum *= w.global[expert], up *= w.global[expert];
    float scale = __ldcg(&r.slot_weight[slot * MM_CU_SKINNY + token]) * (global2 ? global2[expert] : 1.0f);
    a.middle[((size_t)slot * MM_CU_SKINNY + token) * inter + i] = __float2bfloat16_rn(silu(sum) * up * scale);
  }
};

struct down_job {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  uint32_t slots;

  __device__ uint32_t items() const { return (w.n + 7) / 8; }
  __device__ uint32_t segments() const { return slots; }
  __device__ bool early() const { return true; }
  __device__ weight_row row(uint32_t item, uint32_t slot, uint32_t g) const {
    return {__ldcg(&r.slot_expert[slot]), min(item * 8 + g, w.n - 1)};
  }
  __device__ const bf16 *x(uint32_t slot, uint32_t token) const {
    if (!(__ldcg(&r.slot_tokens[slot]) >> token & 1)) return nullptr;
    return a.middle + ((size_t)slot * MM_CU_SKINNY + token) * w.k;
  }
  __device__ void emit(uint32_t item, uint32_t token, uint32_t c, float sum) const {
    uint32_t n = item * 8 + c;
    if (token < a.tokens && n < w.n) a.y[(size_t)token * w.n + n] = __float2bfloat16_rn(sum);
  }
};

template <mm_cu_code C, mm_cu_scale S, int kHalves>
__global__ void __launch_bounds__(kWarps * 32, 2)
    experts_up(const __grid_constant__ mm_cu_weight w, const float *global2, const __grid_constant__ mm_cu_route r,
               const __grid_constant__ mm_cu_experts a) {
  grid_wait();
  grid_launch_next();
  uint32_t inter = w.n / 2, per_expert = (inter + 3) / 4;
  up_job job{w, r, a, global2, inter, per_expert, __ldcg(r.used) * per_expert};
  stream_rows<C, S, kHalves>(w, job);
}

template <mm_cu_code C, mm_cu_scale S, int kHalves>
__global__ void __launch_bounds__(kWarps * 32, 2)
    experts_down(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  grid_launch_next();
  down_job job{w, r, a, __ldcg(r.used)};
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
    unsigned grid = multiprocessors();
    if (a.tokens <= 8) return launch(experts_up<C, S, 1>, grid, kWarps * 32, sizeof(stream_shared<1>), s, w, global2, r, a);
    return launch(experts_up<C, S, 2>, grid, kWarps * 32, sizeof(stream_shared<2>), s, w, global2, r, a);
  }
};

struct down_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    unsigned grid = min(ceil_div(w.n, 8), multiprocessors());
    if (a.tokens <= 8) return launch(experts_down<C, S, 1>, grid, kWarps * 32, sizeof(stream_shared<1>), s, w, r, a);
    return launch(experts_down<C, S, 2>, grid, kWarps * 32, sizeof(stream_shared<2>), s, w, r, a);
  }
};

}  // namespace

cudaError_t mm_cu_experts_skinny(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                 cudaStream_t s) {
  if (a.tokens > MM_CU_SKINNY) return cudaErrorInvalidValue;
  cudaError_t e = for_scheme(w13, up_launch{w13, w2.global, r, a, s});
  return e != cudaSuccess ? e : for_scheme(w2, down_launch{w2, r, a, s});
}
