/* What attention of a single token does with the projection itself (gqa_decode.cu): the wait for it, QK norm with
 * the other ranks' sums, RoPE, and the token's own key and value. */
#ifndef MM_CUDA_OWN_TOKEN_CUH
#define MM_CUDA_OWN_TOKEN_CUH

#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

constexpr int kGqaWarps = MM_CU_GQA_WARPS, kGqaThreads = kGqaWarps * 32;
constexpr int kGqaGroup = 8; /* query heads of a kv head, at most */

__device__ __forceinline__ uint4 narrow8_half(const float v[8]) {
  return make_uint4(pack2_half(v[0], v[1]), pack2_half(v[2], v[3]), pack2_half(v[4], v[5]), pack2_half(v[6], v[7]));
}

/* The token's own key and value as the cache holds them, and the queries of the group; eight numbers of padding between rows of
 * queries, so that fragments have no bank conflict. */
template <int D>
struct own_token {
  uint16_t q[kGqaGroup][D + 8];
  __align__(16) uint16_t k[D], v[D]; /* of an e4m3 cache: the codes, in the first half */
  float k_scale, v_scale, cosine[D / 2], sine[D / 2];
};

/* A block's wait for the projection, and the launch's exchange with the other ranks; of a rank alone c.ranks is 0. */
struct row_sums {
  const peer_view &c;
  uint32_t &epoch; /* shared; for all threads behind the next barrier */
  bool waited = false;

  __device__ __forceinline__ void wait(bool launch_next) {
    if (waited) return;
    waited = true;
    if (launch_next) {
      grid_wait_and_launch_next();
    } else {
      grid_wait();
    }
    if (c.ranks == 0 || threadIdx.x != kGqaThreads - 1) return; /* this warp counts the block, the first one waits for ranks */
    const uint32_t now = c.counters->epoch;
    epoch = now;
    if (arrives_last(c)) c.counters->epoch = now + 1;
  }
  /* The row's two sums become those over all ranks, in the order of ranks, in all threads. sends: in the first block of the row. */
  __device__ __forceinline__ float2 over_ranks(float2 sum, uint32_t row, bool sends) const {
    __shared__ float2 total;
    if (threadIdx.x < 32) {
      const uint32_t r = threadIdx.x, flag = epoch + 1, parity = epoch & 1;
      uint2 mine = make_uint2(__float_as_uint(sum.x), __float_as_uint(sum.y));
      if (r < c.ranks && r != c.rank) {
        if (sends) put_word(c.word(r, parity, c.rank) + row, make_uint4(mine.x, flag, mine.y, flag));
        mine = peer_timeout(c).word(c.word(c.rank, parity, r) + row, flag, r);
      }
      __syncwarp();
      float2 all = make_float2(0, 0);
      for (uint32_t k = 0; k < c.ranks; k++) {
        all.x += __uint_as_float(__shfl_sync(0xffffffffu, mine.x, (int)k));
        all.y += __uint_as_float(__shfl_sync(0xffffffffu, mine.y, (int)k));
      }
      if (r == 0) total = all;
    }
    __syncthreads();
    return total;
  }
};

/* A row's queries of one kv head, its own key and value. A thread has a pair of 16-byte pieces of a head: in the rotary part those that
 * turn into each other, else neighbours (rope.cu). Weights and angles are read before the projection is waited for. */
template <int D, bool kFp8>
struct own_work {
  const mm_cu_heads &h;
  const mm_cu_qkv &p;
  uint32_t group, head, c0, c1; /* of the group's queries, then key, then value */
  bool active, turns;
  float w[2][8];

  __device__ __forceinline__ own_work(const mm_cu_heads &heads, const mm_cu_qkv &job, uint32_t kv_head) : h(heads), p(job) {
    constexpr uint32_t kPairs = D / 16;
    const uint32_t half = h.rotary_dim / 2, at = threadIdx.x % kPairs;
    group = h.heads / h.kv_heads, head = threadIdx.x / kPairs;
    active = head < group + 2, turns = at < half / 8 && head <= group;
    c0 = at < half / 8 ? at * 8 : at * 16, c1 = at < half / 8 ? c0 + half : c0 + 8;
    if (p.q_norm && head <= group) {
      const float *from = head < group ? p.q_norm + (kv_head * group + head) * D : p.k_norm + kv_head * D;
      load8(w[0], from + c0), load8(w[1], from + c1);
    }
  }

  /* Σ squares of the row's q and of its k, for every thread. */
  __device__ __forceinline__ float2 squares(const bf16 *row, float (*part)[kGqaWarps]) const {
    constexpr int kAtOnce = 4;
    const uint32_t q_pieces = h.heads * D / 8, pieces = q_pieces + h.kv_heads * D / 8;
    float2 sum = make_float2(0, 0);
    for (uint32_t i0 = threadIdx.x; i0 < pieces; i0 += kAtOnce * kGqaThreads) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        raw[i] = i0 + i * kGqaThreads < pieces ? reinterpret_cast<const uint4 *>(row)[i0 + i * kGqaThreads] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        float v[8], s = 0;
        widen8(v, raw[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) s += v[j] * v[j];
        if (i0 + i * kGqaThreads < q_pieces) {
          sum.x += s;
        } else {
          sum.y += s;
        }
      }
    }
    sum.x = warp_sum(sum.x), sum.y = warp_sum(sum.y);
    if (threadIdx.x % 32 == 0) part[0][threadIdx.x / 32] = sum.x, part[1][threadIdx.x / 32] = sum.y;
    __syncthreads();
    sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < kGqaWarps; i++) sum.x += part[0][i], sum.y += part[1][i];
    return sum;
  }

  /* rounded: with the bits of ranks whose norms are kernels of their own (mm_cu_qk_norm_ranks), which write bf16. */
  __device__ __forceinline__ void normalise(float x[2][8], float scale, bool rounded) const {
#pragma unroll
    for (int i = 0; i < 8; i++) x[0][i] *= scale * w[0][i], x[1][i] *= scale * w[1][i];
    if (rounded) widen8(x[0], narrow8(x[0])), widen8(x[1], narrow8(x[1]));
  }

  /* place: the row and its part; cell: where the token's own key and value stay, if this block writes them. */
  __device__ __forceinline__ void run(own_token<D> &own, const mm_cu_kv &kv, const row_sums &sums, uint2 place, uint32_t kv_head,
                                      size_t cell, bool writes) const {
    const bf16 *const row = p.qkv + (size_t)place.x * (h.heads + 2 * h.kv_heads) * D;
    __shared__ float part[2][kGqaWarps];
    uint4 raw[2] = {};
    if (active) {
      const uint32_t at = head < group ? kv_head * group + head : h.heads + (head - group) * h.kv_heads + kv_head;
      raw[0] = *reinterpret_cast<const uint4 *>(row + at * D + c0), raw[1] = *reinterpret_cast<const uint4 *>(row + at * D + c1);
    }
    float2 sum = p.q_norm ? squares(row, part) : float2{};
    const uint32_t ranks = max(sums.c.ranks, 1u);
    if (p.q_norm && ranks > 1) sum = sums.over_ranks(sum, place.x, kv_head == 0 && place.y == 0);
    float x[2][8];
    widen8(x[0], raw[0]), widen8(x[1], raw[1]);
    if (p.q_norm) {
      const float scale =
          rsqrtf(head < group ? sum.x / (float)(h.heads * D * ranks) + p.eps : sum.y / (float)(h.kv_heads * D * ranks) + p.eps);
      if (head <= group) normalise(x, scale, ranks > 1);
    }
    if (turns) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float c = own.cosine[c0 + i], d = own.sine[c0 + i], turned = x[0][i] * c - x[1][i] * d;
        x[1][i] = x[1][i] * c + x[0][i] * d, x[0][i] = turned;
      }
    }
    float top = 0; /* the largest magnitude of the head */
    if (kFp8) {
#pragma unroll
      for (int i = 0; i < 8; i++) top = fmaxf(top, fmaxf(fabsf(x[0][i]), fabsf(x[1][i])));
#pragma unroll
      for (uint32_t m = D / 32; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
    }
    if (!active) return;
    uint4 y[2] = {narrow8(x[0]), narrow8(x[1])};
    if (head < group) {
      if (kFp8) widen8(x[0], y[0]), widen8(x[1], y[1]), y[0] = narrow8_half(x[0]), y[1] = narrow8_half(x[1]);
      *reinterpret_cast<uint4 *>(&own.q[head][c0]) = y[0], *reinterpret_cast<uint4 *>(&own.q[head][c1]) = y[1];
      return;
    }
    const bool key = head == group;
    if (!kFp8) {
      uint16_t *to = key ? own.k : own.v;
      *reinterpret_cast<uint4 *>(to + c0) = y[0], *reinterpret_cast<uint4 *>(to + c1) = y[1];
      bf16 *kept = static_cast<bf16 *>(key ? kv.k : kv.v) + cell * D;
      if (writes) *reinterpret_cast<uint4 *>(kept + c0) = y[0], *reinterpret_cast<uint4 *>(kept + c1) = y[1];
      return;
    }
    top = fmaxf(top, kLeastTop);
    const float inverse = 448.0f / top;
    const uint2 code[2] = {narrow8_e4m3(x[0], inverse), narrow8_e4m3(x[1], inverse)};
    uint8_t *to = reinterpret_cast<uint8_t *>(key ? own.k : own.v), *kept = static_cast<uint8_t *>(key ? kv.k : kv.v) + cell * D;
    *reinterpret_cast<uint2 *>(to + c0) = code[0], *reinterpret_cast<uint2 *>(to + c1) = code[1];
    if (writes) *reinterpret_cast<uint2 *>(kept + c0) = code[0], *reinterpret_cast<uint2 *>(kept + c1) = code[1];
    if (threadIdx.x % (D / 16) != 0) return;
    (key ? own.k_scale : own.v_scale) = top / 448.0f;
    if (writes) (key ? kv.k_scale : kv.v_scale)[cell] = top / 448.0f;
  }
};

#endif
