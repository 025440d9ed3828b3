/* What follows from a token's logits: its experts, and of a step's single token the slots that the experts' kernels walk, which each block
 * finds for itself: sooner than one block would have told the others. */
#ifndef MM_CUDA_ROUTE_CUH
#define MM_CUDA_ROUTE_CUH

#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"

/* Bits that order as the floats do. */
__device__ __forceinline__ uint32_t route_key(float f) {
  const uint32_t u = __float_as_uint(f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* What lane j < top_k holds after a choice. */
struct route_choice {
  uint32_t id;
  float weight;
};

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
  mine.weight /= total;
  return mine;
}

/* What a lane of one warp holds of a single token's slots: of `used`, ascending by expert, slot `at`, if it is one of them. */
struct single_slot {
  uint32_t used, at;
  bool some;
  route_choice c;
};
/* A single token's slots, from its logits; `keep`: written down, as the lists of several tokens are. */
__device__ __forceinline__ single_slot choose_single(const mm_cu_route &r, bool keep) {
  const uint32_t lane = threadIdx.x % 32;
  single_slot s;
  s.c = choose_experts(r, 0), s.at = 0, s.some = lane < r.top_k && s.c.id < r.experts;
  for (uint32_t j = 0; j < r.top_k; j++) {
    const uint32_t other = __shfl_sync(0xffffffffu, s.c.id, (int)j);
    s.at += other < s.c.id || (other == s.c.id && j < lane);
  }
  s.used = (uint32_t)__popc(__ballot_sync(0xffffffffu, s.some));
  if (!keep) return s;
  if (lane < r.top_k) r.id[lane] = s.c.id, r.weight[lane] = s.c.weight;
  if (s.some) r.slot_expert[s.at] = s.c.id, r.slot_tokens[s.at] = 1, r.slot_weight[s.at * MM_CU_SKINNY] = s.c.weight;
  if (lane == 0) *r.used = s.used;
  return s;
}

constexpr int kMaxSlots = MM_CU_SKINNY * MM_CU_MAX_TOP_K;

#endif
