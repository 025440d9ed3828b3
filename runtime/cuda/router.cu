/* The router: logits in fp32, the top k experts of each token, and the lists that the expert kernels read.
 *
 * One launch for T ≤ 16: a block per expert and four tokens holds the expert's row before it waits for the tokens; the last block to
 * finish chooses (one warp per token) and lists the experts in use. For more tokens: logits, choice and a counting sort are three
 * launches. Ties go to the lower id. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSteps = 8, kTokens = 4; /* of a block: float4 per thread, tokens */
constexpr uint32_t kMaxWidth = kThreads * 4 * kSteps;

/* logits[token, expert] for the block's expert and its kTokens tokens. */
__device__ __forceinline__ void expert_logits(const mm_cu_router &m, const mm_cu_route &r, const bf16 *x, uint32_t tokens) {
  __shared__ float part[kWarps][kTokens];
  const uint32_t expert = blockIdx.x, first = blockIdx.y * kTokens, n = min(tokens - first, kTokens);
  const float *row = m.w + (size_t)expert * m.k;
  float4 w[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    const uint32_t k = (i * kThreads + threadIdx.x) * 4;
    w[i] = k < m.k ? *reinterpret_cast<const float4 *>(row + k) : make_float4(0, 0, 0, 0);
  }
  grid_wait();
  grid_launch_next();
  float acc[kTokens] = {};
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    if (t >= n) break;
    const bf16 *from = x + (size_t)(first + t) * m.k;
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
      const uint32_t k = (i * kThreads + threadIdx.x) * 4;
      if (k >= m.k) break;
      const uint2 q = *reinterpret_cast<const uint2 *>(from + k);
      acc[t] += w[i].x * low(q.x) + w[i].y * high(q.x) + w[i].z * low(q.y) + w[i].w * high(q.y);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    const float sum = warp_sum(acc[t]);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32][t] = sum;
  }
  __syncthreads();
  if (threadIdx.x < n) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i++) sum += part[i][threadIdx.x];
    r.logits[(size_t)(first + threadIdx.x) * r.experts + expert] = sum;
  }
}

/* Bits that order as the floats do. */
__device__ uint32_t ordered(float f) {
  uint32_t u = __float_as_uint(f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* What lane j < top_k holds after a choice. */
struct chosen {
  uint32_t id;
  float weight;
};

/* One warp chooses the experts of one token, best first; kPerLane · 32 ≥ experts. */
template <int kPerLane>
__device__ __forceinline__ chosen choose_among(const mm_cu_router &m, const mm_cu_route &r, uint32_t token) {
  const uint32_t lane = threadIdx.x % 32;
  const float *logits = r.logits + (size_t)token * r.experts;
  uint32_t key[kPerLane];
  float score[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const uint32_t e = i * 32 + lane;
    key[i] = 0, score[i] = e < r.experts ? __ldcg(&logits[e]) : 0.0f;
    if (e < r.experts) {
      if (m.sigmoid) score[i] = 1.0f / (1.0f + expf(-score[i]));
      key[i] = ordered(score[i] + (m.sigmoid && m.bias ? m.bias[e] : 0.0f));
    }
  }
  float total = 0, first = 0;
  chosen mine = {0, 0};
  for (uint32_t j = 0; j < r.top_k; j++) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) best = max(best, key[i]);
    best = __reduce_max_sync(0xffffffffu, best);
    uint32_t id = 0xffffffffu;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; i--) {
      if (key[i] == best) id = i * 32 + lane;
    }
    id = __reduce_min_sync(0xffffffffu, id);
    float value = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (i * 32 + lane == id) key[i] = 0, value = score[i];
    }
    value = __shfl_sync(0xffffffffu, value, id % 32);
    if (j == 0) first = value;
    if (!m.sigmoid) value = expf(value - first);
    total += value;
    if (lane == j) mine = {id, value};
  }
  mine.weight /= total;
  if (lane < r.top_k) {
    r.id[(size_t)token * r.top_k + lane] = mine.id;
    r.weight[(size_t)token * r.top_k + lane] = mine.weight;
  }
  return mine;
}
__device__ chosen choose(const mm_cu_router &m, const mm_cu_route &r, uint32_t token) {
  if (m.slot && m.slot[token] < 0) {
    if (threadIdx.x % 32 < r.top_k) r.id[(size_t)token * r.top_k + threadIdx.x % 32] = ~0u;
    return {~0u, 0};
  }
  if (r.experts <= 32) return choose_among<1>(m, r, token);
  if (r.experts <= 256) return choose_among<8>(m, r, token);
  return choose_among<MM_CU_MAX_EXPERTS / 32>(m, r, token);
}

/* The choices of a single token, and from them the experts in use, ascending (one block). */
__device__ void list_one(const mm_cu_router &m, const mm_cu_route &r) {
  __shared__ uint32_t in_use[MM_CU_MAX_EXPERTS / 32];
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    if (lane < MM_CU_MAX_EXPERTS / 32) in_use[lane] = 0;
    const chosen c = choose(m, r, 0);
    __syncwarp();
    uint32_t slot = 0;
    for (uint32_t j = 0; j < r.top_k; j++) slot += __shfl_sync(0xffffffffu, c.id, j) < c.id;
    if (lane < r.top_k) {
      r.slot_expert[slot] = c.id, r.slot_tokens[slot] = 1, r.slot_weight[slot * MM_CU_SKINNY] = c.weight;
      atomicOr(&in_use[c.id / 32], 1u << c.id % 32);
    }
    if (lane == 0) *r.used = r.top_k;
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < r.experts; e += kThreads) r.count[e] = in_use[e / 32] >> e % 32 & 1;
}

/* The choices of a step of few tokens, and from them the experts in use, ascending, with their tokens and weights (one block). */
__device__ void list_slots(const mm_cu_router &m, const mm_cu_route &r, uint32_t tokens) {
  constexpr int kRounds = MM_CU_MAX_EXPERTS / kThreads;
  __shared__ chosen choice[MM_CU_SKINNY][MM_CU_MAX_TOP_K];
  __shared__ uint32_t in_use[kRounds * kWarps];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t token = warp; token < tokens; token += kWarps) {
    const chosen c = choose(m, r, token);
    if (lane < r.top_k) choice[token][lane] = c;
  }
  __syncthreads();
  uint32_t mask[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; i++) {
    for (uint32_t t = 0; t < tokens; t++) {
      for (uint32_t j = 0; j < r.top_k; j++) mask[i] |= (uint32_t)(choice[t][j].id == i * kThreads + threadIdx.x) << t;
    }
    const uint32_t some = __ballot_sync(0xffffffffu, mask[i] != 0);
    if (lane == 0) in_use[i * kWarps + warp] = some;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRounds; i++) {
    const uint32_t e = i * kThreads + threadIdx.x;
    uint32_t slot = 0, used = 0;
#pragma unroll
    for (int j = 0; j < kRounds * kWarps; j++) {
      if (j == i * kWarps + (int)warp) slot = used + __popc(in_use[j] & ((1u << lane) - 1));
      used += __popc(in_use[j]);
    }
    if (e == 0) *r.used = used;
    if (e >= r.experts) continue;
    r.count[e] = __popc(mask[i]);
    if (mask[i] == 0) continue;
    r.slot_expert[slot] = e, r.slot_tokens[slot] = mask[i];
    for (uint32_t t = 0; t < tokens; t++) {
      for (uint32_t j = 0; j < r.top_k; j++) {
        if (choice[t][j].id == e) r.slot_weight[slot * MM_CU_SKINNY + t] = choice[t][j].weight;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    route_few(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r, const bf16 *x, uint32_t tokens) {
  __shared__ bool last;
  expert_logits(m, r, x, tokens);
  if (threadIdx.x < 32) { /* the warp that wrote the logits */
    __syncwarp();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(r.ticket, 1) == gridDim.x * gridDim.y - 1;
      __threadfence();
    }
  }
  __syncthreads();
  if (!last) return;
  if (tokens == 1) {
    list_one(m, r);
  } else {
    list_slots(m, r, tokens);
  }
  if (threadIdx.x == 0) *r.ticket = 0;
}

/* logits of kTile tokens and 32 experts a block, four of each a thread: fp32 products, k ascending. */
constexpr int kTile = 64, kTileThreads = 128, kDepth = 32;
__global__ void __launch_bounds__(kTileThreads)
    logits_many(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r, const bf16 *x, uint32_t tokens) {
  __shared__ float4 xs[kDepth][kTile / 4], ws[kDepth][32 / 4];
  const uint32_t tid = threadIdx.x, token = blockIdx.x * kTile + tid % kTile, expert = blockIdx.y * 32 + tid % 32;
  uint2 next_x[4];
  float4 next_w[2];
  auto fetch = [&](uint32_t k0) { /* four k a piece; a lane for each token and each expert, so that the stores below meet no bank twice */
#pragma unroll
                                  for (int i = 0; i < 4; i++) {
                                    const uint32_t k = k0 + (tid / kTile + 2 * i) * 4;
                                    next_x[i] = token < tokens && k < m.k ? *reinterpret_cast<const uint2 *>(x + (size_t)token * m.k + k)
                                                                          : make_uint2(0, 0);
                                  }
#pragma unroll
                                  for (int i = 0; i < 2; i++) {
                                    const uint32_t k = k0 + (tid / 32 + 4 * i) * 4;
                                    next_w[i] = expert < r.experts && k < m.k
                                                    ? *reinterpret_cast<const float4 *>(m.w + (size_t)expert * m.k + k)
                                                    : float4{};
                                  }
  };
  grid_wait();
  grid_launch_next();
  fetch(0);
  float acc[4][4] = {};
  for (uint32_t k0 = 0; k0 < m.k; k0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float *to = reinterpret_cast<float *>(xs[(tid / kTile + 2 * i) * 4]) + tid % kTile;
      to[0] = low(next_x[i].x), to[kTile] = high(next_x[i].x), to[2 * kTile] = low(next_x[i].y), to[3 * kTile] = high(next_x[i].y);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float *to = reinterpret_cast<float *>(ws[(tid / 32 + 4 * i) * 4]) + tid % 32;
      to[0] = next_w[i].x, to[32] = next_w[i].y, to[64] = next_w[i].z, to[96] = next_w[i].w;
    }
    __syncthreads();
    fetch(k0 + kDepth);
#pragma unroll
    for (int k = 0; k < kDepth; k++) {
      const float4 p = xs[k][tid / 8], q = ws[k][tid % 8];
      const float a[4] = {p.x, p.y, p.z, p.w}, b[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][j] += a[i] * b[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t t = blockIdx.x * kTile + tid / 8 * 4 + i;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t e = blockIdx.y * 32 + tid % 8 * 4 + j;
      if (t < tokens && e < r.experts) r.logits[(size_t)t * r.experts + e] = acc[i][j];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    choose_many(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r, uint32_t tokens) {
  grid_wait();
  grid_launch_next();
  uint32_t token = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (token < tokens) choose(m, r, token);
}

/* pair[offset[e] …] = the pairs of expert e in token order. A warp owns an expert and scans all choices: stable, no atomics. */
constexpr int kAtOnce = 8; /* loads of 32 choices in flight */
__global__ void __launch_bounds__(1024) sort_pairs(const __grid_constant__ mm_cu_route r, uint32_t tokens) {
  __shared__ uint32_t count[MM_CU_MAX_EXPERTS], offset[MM_CU_MAX_EXPERTS + 1];
  grid_wait();
  grid_launch_next();
  const uint32_t pairs = tokens * r.top_k, lane = threadIdx.x % 32;
  for (uint32_t e = threadIdx.x; e < r.experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (uint32_t p = threadIdx.x; p < pairs; p += 1024) {
    if (r.id[p] < r.experts) atomicAdd(&count[r.id[p]], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    offset[0] = 0;
    for (uint32_t e = 0; e < r.experts; e++) offset[e + 1] = offset[e] + count[e];
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    for (uint32_t e = threadIdx.x; e <= r.experts; e += 1024) {
      r.offset[e] = offset[e];
      if (e < r.experts) r.count[e] = count[e];
    }
  }
  for (uint32_t e = blockIdx.x * 32 + threadIdx.x / 32; e < r.experts; e += gridDim.x * 32) {
    uint32_t at = offset[e];
    for (uint32_t p0 = 0; p0 < pairs && at < offset[e + 1]; p0 += 32 * kAtOnce) {
      uint32_t id[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) id[i] = p0 + i * 32 + lane < pairs ? r.id[p0 + i * 32 + lane] : ~0u;
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const uint32_t hits = __ballot_sync(0xffffffffu, id[i] == e);
        if (hits >> lane & 1) r.pair[at + __popc(hits & ((1u << lane) - 1))] = p0 + i * 32 + lane;
        at += __popc(hits);
      }
    }
  }
}

}  // namespace

cudaError_t mm_cu_route_tokens(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, cudaStream_t s) {
  if (r.experts > MM_CU_MAX_EXPERTS || r.top_k > MM_CU_MAX_TOP_K || m.k % 4 != 0 || m.k > kMaxWidth) return cudaErrorInvalidValue;
  if (tokens <= MM_CU_SKINNY) return launch(route_few, dim3(r.experts, ceil_div(tokens, kTokens)), kThreads, 0, s, m, r, x, tokens);
  const dim3 tiles(ceil_div(tokens, kTile), ceil_div(r.experts, 32));
  cudaError_t e = launch(logits_many, tiles, kTileThreads, 0, s, m, r, x, tokens);
  if (e == cudaSuccess) e = launch(choose_many, ceil_div(tokens, kThreads / 32), kThreads, 0, s, m, r, tokens);
  if (e == cudaSuccess) e = launch(sort_pairs, ceil_div(r.experts, 32), 1024, 0, s, r, tokens);
  return e;
}
