/* The router: logits in fp32, the top k experts of each token, and the lists that the expert kernels read.
 *
 * One launch for T ≤ 16: a block per expert multiplies its row with all tokens; the last block to finish chooses (one warp per token)
 * and lists the experts in use. For more tokens: logits, choice and a counting sort are three launches. Ties go to the lower id. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr int kThreads = 256, kChunk = 16, kPerLane = MM_CU_MAX_EXPERTS / 32;

/* logits[token, expert] for tokens [first, first + n), n ≤ kChunk. */
__device__ void expert_logits(const mm_cu_router &m, const mm_cu_route &r, const bf16 *x, uint32_t expert, uint32_t first, uint32_t n) {
  __shared__ float part[kThreads / 32][kChunk];
  float acc[kChunk] = {};
  const float *w = m.w + (size_t)expert * m.k;
  for (uint32_t k = threadIdx.x * 4; k < m.k; k += kThreads * 4) {
    float4 v = *reinterpret_cast<const float4 *>(w + k);
    for (uint32_t i = 0; i < kChunk; i++) {
      if (i >= n) break;
      uint2 q = *reinterpret_cast<const uint2 *>(x + (size_t)(first + i) * m.k + k);
      acc[i] += v.x * low(q.x) + v.y * high(q.x) + v.z * low(q.y) + v.w * high(q.y);
    }
  }
#pragma unroll
  for (int i = 0; i < kChunk; i++) {
    float sum = warp_sum(acc[i]);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32][i] = sum;
  }
  __syncthreads();
  if (threadIdx.x < n) {
    float sum = 0;
    for (int i = 0; i < kThreads / 32; i++) sum += part[i][threadIdx.x];
    r.logits[(size_t)(first + threadIdx.x) * r.experts + expert] = sum;
  }
}

/* Bits that order as the floats do. */
__device__ uint32_t ordered(float f) {
  uint32_t u = __float_as_uint(f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* One warp chooses the experts of one token. */
__device__ void choose(const mm_cu_router &m, const mm_cu_route &r, uint32_t token) {
  const uint32_t lane = threadIdx.x % 32;
  const float *logits = r.logits + (size_t)token * r.experts;
  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    uint32_t e = i * 32 + lane;
    key[i] = 0;
    if (e < r.experts) {
      float z = __ldcg(&logits[e]);
      if (m.sigmoid) z = 1.0f / (1.0f + expf(-z)) + (m.bias ? m.bias[e] : 0.0f);
      key[i] = ordered(z);
    }
  }
  float total = 0, first = 0, mine = 0;
  uint32_t mine_id = 0;
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
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (i * 32 + lane == id) key[i] = 0;
    }
    float z = __ldcg(&logits[id]);
    if (j == 0) first = z;
    float score = m.sigmoid ? 1.0f / (1.0f + expf(-z)) : expf(z - first);
    total += score;
    if (lane == j) mine = score, mine_id = id;
  }
  if (lane < r.top_k) {
    r.id[(size_t)token * r.top_k + lane] = mine_id;
    r.weight[(size_t)token * r.top_k + lane] = mine / total;
  }
}

/* The experts in use, ascending, with their tokens and weights (one block). */
__device__ void list_slots(const mm_cu_route &r, uint32_t tokens) {
  __shared__ uint32_t mask[MM_CU_MAX_EXPERTS], before[MM_CU_MAX_EXPERTS];
  for (uint32_t e = threadIdx.x; e < r.experts; e += kThreads) mask[e] = 0;
  __syncthreads();
  for (uint32_t p = threadIdx.x; p < tokens * r.top_k; p += kThreads) atomicOr(&mask[r.id[p]], 1u << (p / r.top_k));
  __syncthreads();
  if (threadIdx.x < 32) {
    uint32_t used = 0;
    for (uint32_t e0 = 0; e0 < r.experts; e0 += 32) {
      uint32_t e = e0 + threadIdx.x, some = __ballot_sync(0xffffffffu, e < r.experts && mask[e] != 0);
      if (e < r.experts) before[e] = used + __popc(some & ((1u << threadIdx.x) - 1));
      used += __popc(some);
    }
    if (threadIdx.x == 0) *r.used = used;
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < r.experts; e += kThreads) {
    r.count[e] = __popc(mask[e]);
    if (mask[e] != 0) r.slot_expert[before[e]] = e, r.slot_tokens[before[e]] = mask[e];
  }
  for (uint32_t p = threadIdx.x; p < tokens * r.top_k; p += kThreads)
    r.slot_weight[before[r.id[p]] * MM_CU_SKINNY + p / r.top_k] = r.weight[p];
}

__global__ void __launch_bounds__(kThreads)
    route_few(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r, const bf16 *x, uint32_t tokens) {
  __shared__ bool last;
  grid_wait();
  grid_launch_next();
  expert_logits(m, r, x, blockIdx.x, 0, tokens);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(r.ticket, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (uint32_t token = threadIdx.x / 32; token < tokens; token += kThreads / 32) choose(m, r, token);
  __syncthreads();
  list_slots(r, tokens);
  if (threadIdx.x == 0) *r.ticket = 0;
}

__global__ void __launch_bounds__(kThreads)
    logits_many(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r, const bf16 *x, uint32_t tokens) {
  grid_wait();
  grid_launch_next();
  uint32_t first = blockIdx.y * kChunk;
  expert_logits(m, r, x, blockIdx.x, first, min(tokens - first, kChunk));
}

__global__ void __launch_bounds__(kThreads)
    choose_many(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r, uint32_t tokens) {
  grid_wait();
  grid_launch_next();
  uint32_t token = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (token < tokens) choose(m, r, token);
}

/* pair[offset[e] …] = the pairs of expert e in token order. A warp owns an expert and scans all choices: stable, no atomics. */
__global__ void __launch_bounds__(1024) sort_pairs(const __grid_constant__ mm_cu_route r, uint32_t tokens) {
  __shared__ uint32_t count[MM_CU_MAX_EXPERTS], offset[MM_CU_MAX_EXPERTS + 1];
  grid_wait();
  grid_launch_next();
  const uint32_t pairs = tokens * r.top_k, lane = threadIdx.x % 32;
  for (uint32_t e = threadIdx.x; e < r.experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (uint32_t p = threadIdx.x; p < pairs; p += 1024) atomicAdd(&count[r.id[p]], 1);
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
    for (uint32_t p0 = 0; p0 < pairs && at < offset[e + 1]; p0 += 32) {
      uint32_t p = p0 + lane, hits = __ballot_sync(0xffffffffu, p < pairs && r.id[p] == e);
      if (hits >> lane & 1) r.pair[at + __popc(hits & ((1u << lane) - 1))] = p;
      at += __popc(hits);
    }
  }
}

}  // namespace

cudaError_t mm_cu_route_tokens(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, cudaStream_t s) {
  if (r.experts > MM_CU_MAX_EXPERTS || r.top_k > MM_CU_MAX_TOP_K || m.k % 4 != 0) return cudaErrorInvalidValue;
  if (tokens <= MM_CU_SKINNY) return launch(route_few, r.experts, kThreads, 0, s, m, r, x, tokens);
  cudaError_t e = launch(logits_many, dim3(r.experts, ceil_div(tokens, kChunk)), kThreads, 0, s, m, r, x, tokens);
  if (e == cudaSuccess) e = launch(choose_many, ceil_div(tokens, kThreads / 32), kThreads, 0, s, m, r, tokens);
  if (e == cudaSuccess) e = launch(sort_pairs, ceil_div(r.experts, 32), 1024, 0, s, r, tokens);
  return e;
}
