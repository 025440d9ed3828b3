/* Results of a token's logits: its experts, and of a step's single token the slots that the experts' kernels walk. Each block of
 * w13's kernel finds those for itself, sooner than one block could pass them to the others; w2's kernel starts late enough to read them. */
#ifndef MM_CUDA_ROUTE_CUH
#define MM_CUDA_ROUTE_CUH

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"

/* Bits that order as the floats do. */
__device__ __forceinline__ uint32_t route_key(float f) {
  const uint32_t u = __float_as_uint(f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Values that lane j < top_k holds after a choice. */
struct route_choice {
  uint32_t id; /* the expert's index (mm_cu_route) */
  float weight;
};

/* Number of the expert at an index among the rank's own; ~0 elsewhere. */
__device__ __forceinline__ uint32_t own_expert(const mm_cu_route &r, uint32_t id) {
  return r.held == 0 ? id : id - r.first < r.held ? id - r.first : ~0u;
}

/* A lane's best expert of those left: of equal keys the lowest id. */
struct route_best {
  uint32_t key, at;
  float score;
};
template <int kPerLane>
__device__ __forceinline__ route_best best_of(const uint32_t (&key)[kPerLane], const float (&score)[kPerLane]) {
  route_best b[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) b[i] = {key[i], (uint32_t)i, score[i]};
#pragma unroll
  for (int step = 1; step < kPerLane; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kPerLane; i += 2 * step) {
      if (b[i + step].key > b[i].key) b[i] = b[i + step];
    }
  }
  return b[0];
}

/* One warp chooses the experts of one token, best first, of equal ones the lower id; a padding row chooses none (id ~0). A lane looks at
 * kPerLane ids in a row. */
__device__ __forceinline__ route_choice choose_experts(const mm_cu_route &r, uint32_t token) {
  constexpr int kPerLane = MM_CU_MAX_EXPERTS / 32;
  const uint32_t lane = threadIdx.x % 32, first = lane * kPerLane;
  const float *logits = r.logits + (size_t)token * r.experts;
  uint32_t key[kPerLane];
  float score[kPerLane], bias[kPerLane];
  const int32_t slot = r.slot ? r.slot[token] : 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) { /* all loads before the first use */
    const bool valid = first + i < r.experts;
    score[i] = valid ? __ldcg(&logits[first + i]) : 0.0f, bias[i] = valid && r.bias ? r.bias[first + i] : 0.0f;
  }
  if (slot < 0) return {~0u, 0};
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    if (r.sigmoid) score[i] = sigmoid(score[i]);
    key[i] = first + i < r.experts ? route_key(score[i] + bias[i]) : 0;
  }
  float total = 0, best = 0;
  route_choice mine = {0, 0};
  for (uint32_t j = 0; j < r.top_k; j++) {
    const route_best b = best_of<kPerLane>(key, score);
    const uint32_t top = __reduce_max_sync(0xffffffffu, b.key), owner = __ffs((int)__ballot_sync(0xffffffffu, b.key == top)) - 1;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) key[i] = lane == owner && b.at == i ? 0 : key[i];
    const uint32_t id = __shfl_sync(0xffffffffu, first + b.at, (int)owner);
    float value = __shfl_sync(0xffffffffu, b.score, (int)owner);
    if (j == 0) best = value;
    if (!r.sigmoid) value = __expf(value - best);
    total += value;
    if (lane == j) mine = {id, value};
  }
  if (r.index && lane < r.top_k) mine.id = __ldg(&r.index[mine.id]);
  mine.weight = mine.weight / total * r.scale;
  return mine;
}

/* ---- a single token ---- */

constexpr uint32_t kChoiceThreads = MM_CU_MAX_EXPERTS; /* threads that choose together, the block's first: each has an expert */

/* In shared memory: each warp's best, ranked, and the token's. */
struct choice_shared {
  static constexpr uint32_t kWarps = kChoiceThreads / 32, kBest = MM_CU_MAX_TOP_K;
  union {
    uint32_t key[32];
    route_choice best[kBest];
  } of[kWarps];
  __align__(16) uint32_t key[kWarps][kBest];
  route_choice chosen[kBest];
};

/* Inputs that no kernel of the step writes: fetched before those are waited for. */
struct choice_start {
  float bias;
  int32_t slot;
  uint32_t index; /* of the thread's expert */
  __device__ __forceinline__ explicit choice_start(const mm_cu_route &r) {
    bias = r.bias && threadIdx.x < r.experts ? __ldg(&r.bias[threadIdx.x]) : 0.0f;
    slot = r.slot ? __ldcg(&r.slot[0]) : 0;
    index = r.index && threadIdx.x < r.experts ? __ldg(&r.index[threadIdx.x]) : threadIdx.x;
  }
};

__device__ __forceinline__ void choice_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kChoiceThreads) : "memory"); }

/* The step's slots, ascending by expert, from the single token's logits, to shared memory: what choose_experts chooses, sooner. Each warp
 * ranks its 32 experts, then all rank the warps' best. `keep`: the choice and the slots are written down too, as those of several tokens
 * are. For threads below kChoiceThreads; the block needs a barrier before it reads. */
template <class Slots>
__device__ __forceinline__ void choose_slots(Slots &to, choice_shared &shared, const mm_cu_route &r, const choice_start &start, bool keep) {
  constexpr uint32_t kBest = choice_shared::kBest, kWarps = choice_shared::kWarps;
  static_assert(kBest == 16, "two lanes for each of a warp's best");
  const uint32_t e = threadIdx.x, warp = e / 32, lane = e % 32;
  float score = e < r.experts ? __ldcg(&r.logits[e]) : 0.0f;
  if (r.sigmoid) score = sigmoid(score);
  uint32_t key = e < r.experts ? route_key(score + start.bias) : 0, above = 0;
  /* The number, of four from `at` on, that rank before it. */
  const auto count = [&](const uint32_t *from, uint32_t at, uint32_t self) {
    const uint4 v = *reinterpret_cast<const uint4 *>(from);
    above += v.x > key || (v.x == key && at < self);
    above += v.y > key || (v.y == key && at + 1 < self);
    above += v.z > key || (v.z == key && at + 2 < self);
    above += v.w > key || (v.w == key && at + 3 < self);
  };
  shared.of[warp].key[lane] = key;
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < 32; i += 4) count(&shared.of[warp].key[i], i, lane);
  __syncwarp();
  if (above < kBest) shared.key[warp][above] = key, shared.of[warp].best[above] = {start.index, score};
  choice_sync();
  const uint32_t mine = lane / 2, half = lane % 2 * (kWarps / 2); /* two lanes for each of the warp's best: half of the lists each */
  key = shared.key[warp][mine], above = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWarps / 2; w++) {
    for (uint32_t i = 0; i < r.top_k; i += 4) count(&shared.key[half + w][i], (half + w) * kBest + i, warp * kBest + mine);
  }
  above += __shfl_xor_sync(0xffffffffu, above, 1);
  if (half == 0 && above < r.top_k) shared.chosen[above] = shared.of[warp].best[mine];
  choice_sync();
  if (e >= r.top_k) return;
  const bool some = start.slot >= 0;
  route_choice c = some ? shared.chosen[e] : route_choice{~0u, 0};
  const float first = shared.chosen[0].weight;
  const auto part = [&](float v) { return r.sigmoid ? v : __expf(v - first); };
  const uint32_t own = own_expert(r, c.id);
  const bool here = own != ~0u;
  float total = 0;
  uint32_t at = 0, used = 0; /* those of other ranks stand last */
  for (uint32_t j = 0; j < r.top_k; j++) {
    const uint32_t other = own_expert(r, shared.chosen[j].id);
    total += part(shared.chosen[j].weight), at += other < own || (other == own && j < e), used += other != ~0u;
  }
  if (!some) at = e, used = 0;
  if (here) {
    c.weight = part(c.weight) / total * r.scale;
    to.expert[at] = own, to.tokens[at] = 1, to.weight[at] = c.weight;
  }
  if (e == 0) to.used = used;
  if (!keep) return;
  const unsigned long long entry = (unsigned long long)__float_as_uint(c.weight) << 32 | (own + 1);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&r.published[at]), "l"(here ? entry : ~0ull) : "memory");
  r.id[e] = own, r.weight[e] = c.weight;
  if (here) r.slot_expert[at] = own, r.slot_tokens[at] = 1, r.slot_weight[at * MM_CU_DECODE_ROWS] = c.weight;
  if (e == 0) *r.used = used;
  if (some && r.load) atomicAdd(&r.load[c.id], 1ull);
}

/* For the kernel after the one that chose and kept: its slots from there, if they have come by now. For one whole warp. */
template <class Slots>
__device__ __forceinline__ bool published_slots(Slots &to, const mm_cu_route &r) {
  const uint32_t lane = threadIdx.x % 32;
  unsigned long long v = ~0ull;
  if (lane < r.top_k) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(&r.published[lane]) : "memory");
  if (__any_sync(0xffffffffu, v == 0)) return false;
  const bool some = v != ~0ull;
  if (some) to.expert[lane] = (uint32_t)v - 1, to.tokens[lane] = 1, to.weight[lane] = __uint_as_float((uint32_t)(v >> 32));
  const uint32_t used = __popc(__ballot_sync(0xffffffffu, some));
  if (lane == 0) to.used = used;
  return true;
}

constexpr int kMaxSlots = MM_CU_DECODE_ROWS * MM_CU_MAX_TOP_K;

#endif
