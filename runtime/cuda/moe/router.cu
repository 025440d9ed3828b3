/* The router: logits in fp32, the top k experts of each token, and the lists that the expert kernels read.
 *
 * T ≤ 16: one launch. A block has a few experts and tokens, a thread eight columns of all of them; the experts' rows are loaded before
 * it waits for the tokens. A single token may bring its residual and norm along, and the sum of its branch over ranks: each block makes the
 * row for itself. And its choice is left to the kernels that need it (route.cuh). Else the last block to finish chooses, one warp per
 * token, and makes the lists. For more tokens logits (router_prefill.cu), choice and a counting sort are launches of their own.
 * Ties go to the lower id. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/norm.cuh"
#include "runtime/cuda/moe/route.cuh"

namespace {

constexpr uint32_t kMaxThreads = MM_CU_MAX_HIDDEN / 8, kMaxWarps = kMaxThreads / 32;

/* Eight weights of a row. */
template <class W>
struct piece_of;
template <>
struct piece_of<bf16> {
  uint4 raw;
  __device__ __forceinline__ void load(const bf16 *from) { raw = *reinterpret_cast<const uint4 *>(from); }
  __device__ __forceinline__ void zero() { raw = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ void widen(float out[8]) const { widen8(out, raw); }
};
template <>
struct piece_of<float> {
  float v[8];
  __device__ __forceinline__ void load(const float *from) { load8(v, from); }
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0;
  }
  __device__ __forceinline__ void widen(float out[8]) const {
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = v[i];
  }
};

/* Lane i gets v[i % N], summed over the N lanes that i / N names; N is a power of two. */
template <int N>
__device__ __forceinline__ float spread_sums(const float (&v)[N]) {
  const bool upper = threadIdx.x & N / 2;
  if constexpr (N == 1) {
    return v[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float a = v[i], b = v[i + N / 2];
      half[i] = (upper ? b : a) + __shfl_xor_sync(0xffffffffu, upper ? a : b, N / 2);
    }
    return spread_sums<N / 2>(half);
  }
}

/* Where a single token's row comes from: it is there; a residual and a branch; the same with the branch summed over ranks. */
enum row_source { THERE, MIXED, SUMMED };

/* Eight columns of the block's experts; zeros behind the last expert and column. */
template <class W, int kExperts>
__device__ __forceinline__ void load_experts(piece_of<W> (&w)[kExperts], const mm_cu_router &m, uint32_t experts, uint32_t column) {
#pragma unroll
  for (int e = 0; e < kExperts; e++) {
    const uint32_t expert = blockIdx.x * kExperts + e;
    w[e].zero();
    if (column < m.k && expert < experts) w[e].load(static_cast<const W *>(m.w) + (size_t)expert * m.k + column);
  }
}

/* Products of the loaded experts and rows, summed over the block's columns; logits of the first n tokens are written. */
template <class W, int kExperts, int kTokens>
__device__ __forceinline__ void put_logits(const piece_of<W> (&w)[kExperts], const uint4 (&raw)[kTokens], const mm_cu_route &r,
                                           uint32_t n) {
  __shared__ float part[kExperts * kTokens][kMaxWarps];
  float acc[kExperts * kTokens];
#pragma unroll
  for (int e = 0; e < kExperts; e++) {
    float f[8];
    w[e].widen(f);
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      float v[8], sum = 0;
      widen8(v, raw[t]);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += f[i] * v[i];
      acc[e * kTokens + t] = sum;
    }
  }
  float sum = spread_sums<kExperts * kTokens>(acc);
#pragma unroll
  for (int i = kExperts * kTokens; i < 32; i *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (threadIdx.x % 32 < kExperts * kTokens) part[threadIdx.x % 32][threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < kExperts * kTokens) {
    const uint32_t expert = blockIdx.x * kExperts + threadIdx.x / kTokens, t = threadIdx.x % kTokens;
    float logit = 0;
    for (uint32_t i = 0; i < blockDim.x / 32; i++) logit += part[threadIdx.x][i];
    if (expert < r.experts && t < n) r.logits[(size_t)(blockIdx.y * kTokens + t) * r.experts + expert] = logit;
  }
}

/* logits[token, expert] of kExperts experts and kTokens tokens; x, or a.n, which it makes and some block writes down. SUMMED: each block
 * sends a warp's part of the rank's branch, and all wait for the others'; the turn is left in *turn. */
template <class W, int kExperts, int kTokens, row_source kSource>
__device__ __forceinline__ void block_logits(const mm_cu_router &m, const mm_cu_route &r, const mm_cu_combine &a, const bf16 *x,
                                             uint32_t tokens, const peer_view *c = nullptr, peer_turn *turn = nullptr) {
  constexpr bool kMix = kSource != THERE;
  __shared__ float norm_part[kTokens][kMaxWarps];
  const uint32_t first = blockIdx.y * kTokens, n = min(tokens - first, kTokens);
  const uint32_t column = threadIdx.x * 8, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const bool inside = column < m.k;
  piece_of<W> w[kExperts];
  load_experts(w, m, r.experts, column);
  float norm[8] = {};
  if (kMix && inside) load8(norm, a.w + column);
  grid_wait();
  if (kMix) prefetch_range(m.ahead.at, m.ahead.bytes, blockIdx.x, gridDim.x);
  uint4 raw[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; t++) raw[t] = make_uint4(0, 0, 0, 0);
  if (kMix) {
    uint4 add[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      add[t] = make_uint4(0, 0, 0, 0);
      if (t >= n || !inside) continue;
      const size_t at = (size_t)(first + t) * m.k + column;
      raw[t] = *reinterpret_cast<const uint4 *>(a.residual + at), add[t] = *reinterpret_cast<const uint4 *>(a.branch + at);
    }
    if constexpr (kSource == SUMMED) {
      static_assert(kTokens == 1);
      *turn = turn_of(*c);
      if (inside && warp % gridDim.x == blockIdx.x) send_branch(*c, *turn, add[0], column / 8);
      empty_branches(*c, *turn);
      if (inside) add[0] = sum_branches(*c, *turn, add[0], column / 8);
    }
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      float v[8];
      mix8(v, a, raw[t], add[t]);
      const float sum = warp_sum(square8(v));
      if (threadIdx.x % 32 == 0) norm_part[t][warp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      const float scale = norm_scale(norm_part[t], warps, m.k, a.eps);
      float v[8];
      mix8(v, a, raw[t], add[t]);
      const bool mine = t < n && inside && threadIdx.x % gridDim.x == blockIdx.x;
      const size_t at = (size_t)(first + t) * m.k + column;
      if (mine) store8(a.h + at, v);
      scale8(v, scale, norm);
      raw[t] = narrow8(v);
      if (mine) *reinterpret_cast<uint4 *>(a.n + at) = raw[t];
    }
  } else {
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      if (t < n && inside) raw[t] = *reinterpret_cast<const uint4 *>(x + (size_t)(first + t) * m.k + column);
    }
  }
  put_logits(w, raw, r, n);
}

/* A single token's experts are published once they are chosen (mm_cu_route). */
__device__ __forceinline__ void clear_published(const mm_cu_route &r) {
  if (blockIdx.x == 0 && threadIdx.x < MM_CU_MAX_TOP_K) r.published[threadIdx.x] = 0;
}

/* The choices of a step of few tokens, and from them the experts in use, ascending, with their tokens and weights (one block). */
__device__ void list_slots(const mm_cu_route &r, uint32_t tokens) {
  constexpr uint32_t kWords = MM_CU_MAX_EXPERTS / 32;
  __shared__ route_choice choice[kMaxSlots];
  __shared__ uint32_t mask[MM_CU_MAX_EXPERTS], first[MM_CU_MAX_EXPERTS], in_use[kWords];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = tokens * r.top_k;
  for (uint32_t e = threadIdx.x; e < kWords * 32; e += blockDim.x) mask[e] = 0;
  __syncthreads();
  for (uint32_t token = warp; token < tokens; token += blockDim.x / 32) {
    route_choice c = choose_experts(r, token);
    if (lane >= r.top_k) continue;
    if (r.load && c.id < r.experts) atomicAdd(&r.load[c.id], 1ull);
    c.id = own_expert(r, c.id);
    choice[token * r.top_k + lane] = c;
    r.id[token * r.top_k + lane] = c.id, r.weight[token * r.top_k + lane] = c.weight;
    if (c.id < r.experts) atomicOr(&mask[c.id], 1u << token);
  }
  __syncthreads();
  for (uint32_t i = warp; i < kWords; i += blockDim.x / 32) {
    const uint32_t some = __ballot_sync(0xffffffffu, mask[i * 32 + lane] != 0);
    if (lane == 0) in_use[i] = some;
  }
  __syncthreads();
  auto slot_of = [&](uint32_t e) {
    uint32_t slot = __popc(in_use[e / 32] & ((1u << e % 32) - 1));
    for (uint32_t i = 0; i < e / 32; i++) slot += __popc(in_use[i]);
    return slot;
  };
  if (threadIdx.x == 0) *r.used = slot_of(kWords * 32 - 1) + (in_use[kWords - 1] >> 31);
  if (warp == blockDim.x / 32 - 1) { /* pairs of lower experts */
    uint32_t below = 0;
    for (uint32_t i = 0; i < kWords; i++) {
      const uint32_t e = i * 32 + lane;
      const uint32_t end = below + warp_sum_through(__popc(mask[e]));
      first[e] = end - __popc(mask[e]), below = __shfl_sync(0xffffffffu, end, 31);
      if (e < r.experts) r.offset[e] = first[e];
    }
    if (lane == 0) r.offset[r.experts] = below;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const route_choice c = choice[i];
    if (c.id >= r.experts) continue;
    const uint32_t slot = slot_of(c.id), before = mask[c.id] & ((1u << i / r.top_k) - 1);
    r.pair[first[c.id] + __popc(before)] = i;
    r.slot_weight[slot * MM_CU_DECODE_ROWS + i / r.top_k] = c.weight;
    r.slot_expert[slot] = c.id, r.slot_tokens[slot] = mask[c.id]; /* the same from each of the expert's tokens */
  }
}

template <class W, int kExperts, int kTokens, row_source kSource>
__global__ void __launch_bounds__(kMaxThreads) route_few(const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r,
                                                         const __grid_constant__ mm_cu_combine a, const bf16 *x, uint32_t tokens) {
  grid_launch_next_early();
  block_logits<W, kExperts, kTokens, kSource>(m, r, a, x, tokens);
  if (tokens == 1) {
    clear_published(r);
    return;
  }
  if (tokens <= MM_CU_DECODE_ROWS && last_of(r.ticket, gridDim.x * gridDim.y)) list_slots(r, tokens);
}

/* For a single token, with distinct devices: the blocks that send the data that all others wait for must be resident on each. */
template <class W>
__global__ void __launch_bounds__(kMaxThreads)
    reduce_route(const __grid_constant__ peer_view c, const __grid_constant__ mm_cu_router m, const __grid_constant__ mm_cu_route r,
                 const __grid_constant__ mm_cu_combine a) {
  if (c.distinct_devices) grid_launch_next_early();
  peer_turn turn;
  block_logits<W, 2, 1, SUMMED>(m, r, a, nullptr, 1, &c, &turn);
  clear_published(r);
  branch_end(c, turn, m.k / 8);
}

constexpr uint32_t kChoosers = 8; /* warps of a block, a token each */
__global__ void __launch_bounds__(kChoosers * 32) choose_many(const __grid_constant__ mm_cu_route r, uint32_t tokens) {
  grid_launch_next_early();
  grid_wait();
  const uint32_t token = blockIdx.x * kChoosers + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= tokens) return;
  const route_choice c = choose_experts(r, token);
  if (lane >= r.top_k) return;
  r.id[(size_t)token * r.top_k + lane] = own_expert(r, c.id), r.weight[(size_t)token * r.top_k + lane] = c.weight;
  if (r.load && c.id < r.experts) atomicAdd(&r.load[c.id], 1ull);
}

/* pair[offset[e] …] = the pairs of expert e in token order. A block for each expert looks at all choices twice, each of its warps at a
 * range: first how many are its own or of lower experts, then where its own go. Stable, no atomics. */
constexpr uint32_t kSorters = 32, kAtOnce = 4; /* warps; loads of 32 choices in flight */
__global__ void __launch_bounds__(kSorters * 32) sort_pairs(const __grid_constant__ mm_cu_route r, uint32_t tokens) {
  __shared__ uint32_t own[kSorters], lower[kSorters];
  grid_wait_and_launch_next();
  const uint32_t e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = tokens * r.top_k;
  const uint32_t each = (pairs + kSorters * 32 - 1) / (kSorters * 32) * 32, first = min(warp * each, pairs), end = min(first + each, pairs);
  auto look = [&](const auto &see) {
    for (uint32_t p0 = first; p0 < end; p0 += 32 * kAtOnce) {
      uint32_t id[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) id[i] = p0 + i * 32 + lane < end ? r.id[p0 + i * 32 + lane] : ~0u;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) see(p0 + i * 32 + lane, id[i]);
    }
  };
  uint32_t mine = 0, below = 0;
  look([&](uint32_t, uint32_t id) { mine += id == e, below += id < e; });
  mine = __reduce_add_sync(0xffffffffu, mine), below = __reduce_add_sync(0xffffffffu, below);
  if (lane == 0) own[warp] = mine, lower[warp] = below;
  __syncthreads();
  uint32_t at = __reduce_add_sync(0xffffffffu, lower[lane]);
  const uint32_t all = __reduce_add_sync(0xffffffffu, own[lane]);
  if (threadIdx.x == 0) {
    r.offset[e] = at;
    if (e + 1 == r.experts) r.offset[r.experts] = at + all;
  }
  at += __reduce_add_sync(0xffffffffu, lane < warp ? own[lane] : 0);
  look([&](uint32_t pair, uint32_t id) {
    const uint32_t hits = __ballot_sync(0xffffffffu, id == e);
    if (id == e) r.pair[at + __popc(hits & ((1u << lane) - 1))] = pair;
    at += __popc(hits);
  });
}

constexpr int kFew = 4; /* tokens of a block */

template <class W>
cudaError_t few(const mm_cu_router &m, const mm_cu_route &r, const mm_cu_combine *a, const bf16 *x, uint32_t tokens, cudaStream_t s) {
  const unsigned threads = ceil_div(m.k, 256) * 32, pairs = ceil_div(r.experts, 2);
  const dim3 fours(ceil_div(r.experts, 4), ceil_div(tokens, kFew));
  if (a) return launch(route_few<W, 2, 1, MIXED>, pairs, threads, 0, s, m, r, *a, x, tokens);
  const mm_cu_combine none = {};
  if (tokens == 1) return launch(route_few<W, 2, 1, THERE>, pairs, threads, 0, s, m, r, none, x, tokens);
  if (r.experts > 64) return launch(route_few<W, 4, kFew, THERE>, fours, threads, 0, s, m, r, none, x, tokens);
  return launch(route_few<W, 2, kFew, THERE>, dim3(pairs, fours.y), threads, 0, s, m, r, none, x, tokens);
}

bool fits(const mm_cu_router &m, const mm_cu_route &r, uint32_t tokens) {
  if (m.wide && tokens > MM_CU_DECODE_ROWS && !(m.piece && m.product)) return false;
  return r.experts <= MM_CU_MAX_EXPERTS && r.top_k <= MM_CU_MAX_TOP_K && m.k % 8 == 0 && m.k <= MM_CU_MAX_HIDDEN;
}

}  // namespace

cudaError_t mm_cu_choose_tokens(const mm_cu_router &m, const mm_cu_route &r, const bf16 *x, uint32_t tokens, uint32_t all, cudaStream_t s) {
  if (!fits(m, r, all) || all <= MM_CU_DECODE_ROWS || tokens > all) return cudaErrorInvalidValue;
  const cudaError_t e = mm_cu_route_logits(m, r, x, tokens, all, s);
  return e != cudaSuccess ? e : launch(choose_many, ceil_div(tokens, kChoosers), kChoosers * 32, 0, s, r, tokens);
}

cudaError_t mm_cu_sort_pairs(const mm_cu_route &r, uint32_t tokens, cudaStream_t s) {
  return launch(sort_pairs, r.experts, kSorters * 32, 0, s, r, tokens);
}

cudaError_t mm_cu_route_tokens(const mm_cu_router &m, const mm_cu_route &r, const bf16 *x, uint32_t tokens, cudaStream_t s) {
  if (!fits(m, r, tokens)) return cudaErrorInvalidValue;
  if (tokens > MM_CU_DECODE_ROWS) {
    const cudaError_t e = mm_cu_choose_tokens(m, r, x, tokens, tokens, s);
    return e != cudaSuccess ? e : mm_cu_sort_pairs(r, tokens, s);
  }
  return (m.wide ? few<float> : few<bf16>)(m, r, nullptr, x, tokens, s);
}

cudaError_t mm_cu_combine_route(const mm_cu_combine &a, const mm_cu_router &m, const mm_cu_route &r, uint32_t tokens, cudaStream_t s) {
  if (!fits(m, r, tokens)) return cudaErrorInvalidValue;
  if (tokens == 1) return (m.wide ? few<float> : few<bf16>)(m, r, &a, nullptr, tokens, s);
  const cudaError_t e = mm_cu_combine_rows(a, tokens, m.k, s);
  return e != cudaSuccess ? e : mm_cu_route_tokens(m, r, a.n, tokens, s);
}

cudaError_t mm_cu_combine_route_ranks(const mm_cu_peers *p, const mm_cu_combine &a, const mm_cu_router &m, const mm_cu_route &r,
                                      cudaStream_t s) {
  if (!fits(m, r, 1)) return cudaErrorInvalidValue;
  const unsigned threads = ceil_div(m.k, 256) * 32;
  return launch(m.wide ? reduce_route<float> : reduce_route<bf16>, ceil_div(r.experts, 2), threads, 0, s, mm_cu_peers_view(p), m, r, a);
}
