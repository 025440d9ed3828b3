/* The experts of a prefill step: two grouped products over the sorted pairs (token, choice) and a sum per token.
 *
 * Up: half of a block's weight rows are of w1 and half the matching ones of w3, in alternate groups of eight, so that a thread holds gate
 * and up of the same column; middle[place in the sorted order, I]. Down: pair_out[pair, H] = weight · w2·middle, f32 (gemm_widened.cuh:
 * bf16). The sum over a token's choices, which other kernels end with too, is taken in their order: the same bits every time. Tiles of 128
 * pairs never mix experts; a block finds its expert by counting. */
#include "runtime/cuda/fp8.h"
#include "runtime/cuda/gemm.cuh"
#include "runtime/cuda/launch.h"

namespace {

struct expert_tile {
  uint32_t expert, first, rows; /* sorted places [first, first + rows); rows 0: nothing to do */
};

/* Tile `index` of the list "ceil(count / 128) tiles of each expert, in order"; every thread gets the answer. */
__device__ expert_tile find_tile(const mm_cu_route &r, uint32_t index) {
  __shared__ expert_tile found;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) found.rows = 0;
    __syncwarp();
    uint32_t before = 0;
    for (uint32_t e0 = 0; e0 < r.experts; e0 += 32) {
      const uint32_t e = e0 + threadIdx.x, from = e < r.experts ? r.offset[e] : 0, to = e < r.experts ? r.offset[e + 1] : 0;
      const uint32_t tiles = (to - from + kGemmRows - 1) / kGemmRows;
      uint32_t end = tiles;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const uint32_t left = __shfl_up_sync(0xffffffffu, end, d);
        if (threadIdx.x >= d) end += left;
      }
      const uint32_t start = before + end - tiles;
      if (index >= start && index < start + tiles) {
        const uint32_t first = from + (index - start) * kGemmRows;
        found = {e, first, min(to - first, (uint32_t)kGemmRows)};
      }
      before += __shfl_sync(0xffffffffu, end, 31);
    }
  }
  __syncthreads();
  return found;
}

struct up_job {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  expert_tile tile;
  uint32_t column, inter;

  __device__ uint32_t rows() const { return tile.rows; }
  __device__ const bf16 *x(uint32_t i) const { return a.x + (size_t)(r.pair[tile.first + i] / r.top_k) * w.k; }
  __device__ weight_row weight(uint32_t i) const {
    const uint32_t c = min(column + i / 16 * 8 + i % 8, inter - 1);
    return {tile.expert, i / 8 % 2 == 0 ? c : inter + c};
  }
  __device__ void emit(uint32_t i, uint32_t c, const float (&v)[8][2]) const {
    const float f = w.global ? w.global[tile.expert] : 1.0f;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const uint32_t at = column + (c + n * 8) / 16 * 8 + c % 8; /* even, and so is inter */
      if (at >= inter) continue;
      *reinterpret_cast<uint32_t *>(a.middle + (size_t)(tile.first + i) * inter + at) =
          pack2(silu(v[n][0] * f) * (v[n + 1][0] * f), silu(v[n][1] * f) * (v[n + 1][1] * f));
    }
  }
};

struct down_job {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  expert_tile tile;
  uint32_t column;

  __device__ uint32_t rows() const { return tile.rows; }
  __device__ const bf16 *x(uint32_t i) const { return a.middle + (size_t)(tile.first + i) * w.k; }
  __device__ weight_row weight(uint32_t i) const { return {tile.expert, min(column + i, w.n - 1)}; }
  __device__ void emit(uint32_t i, uint32_t c, const float (&v)[8][2]) const {
    const uint32_t pair = r.pair[tile.first + i];
    const float f = r.weight[pair] * (w.global ? w.global[tile.expert] : 1.0f);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const uint32_t at = column + c + n * 8; /* even, and so is w.n */
      if (at < w.n) *reinterpret_cast<float2 *>(a.pair_out + (size_t)pair * w.n + at) = make_float2(v[n][0] * f, v[n][1] * f);
    }
  }
};

template <mm_cu_code C, mm_cu_scale S>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_up(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  grid_wait_and_launch_next();
  const expert_tile tile = find_tile(r, blockIdx.y);
  if (tile.rows > 0) gemm_tile<C, S>(w, up_job{w, r, a, tile, blockIdx.x * (kGemmColumns / 2), w.n / 2});
}

template <mm_cu_code C, mm_cu_scale S>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_down(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  grid_wait_and_launch_next();
  const expert_tile tile = find_tile(r, blockIdx.y);
  if (tile.rows > 0) gemm_tile<C, S>(w, down_job{w, r, a, tile, blockIdx.x * kGemmColumns});
}

/* The same tiles found by blocks that do many: `wide` beside one another, those of an expert follow one another. */
struct tile_list {
  uint32_t offset[MM_CU_MAX_EXPERTS + 1], before[MM_CU_MAX_EXPERTS + 1]; /* before: tiles of lower experts, one across */

  /* All threads of a block. */
  __device__ void fill(const mm_cu_route &r) {
    for (uint32_t e = threadIdx.x; e <= r.experts; e += blockDim.x) offset[e] = r.offset[e];
    __syncthreads();
    if (threadIdx.x < 32) {
      uint32_t below = 0;
      for (uint32_t e0 = 0; e0 < r.experts; e0 += 32) {
        const uint32_t e = e0 + threadIdx.x, mine = e < r.experts ? (offset[e + 1] - offset[e] + kGemmRows - 1) / kGemmRows : 0;
        uint32_t end = mine;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
          const uint32_t left = __shfl_up_sync(0xffffffffu, end, d);
          if (threadIdx.x >= d) end += left;
        }
        if (e < r.experts) before[e] = below + end - mine;
        below += __shfl_sync(0xffffffffu, end, 31);
      }
      if (threadIdx.x == 0) before[r.experts] = below;
    }
    __syncthreads();
  }
  __device__ expert_tile find(uint32_t experts, uint32_t index, uint32_t wide, uint32_t *across) const {
    uint32_t e = 0;
    for (uint32_t end = experts; end - e > 1;) {
      const uint32_t middle = (e + end) / 2;
      (before[middle] * wide <= index ? e : end) = middle;
    }
    const uint32_t high = before[e + 1] - before[e], in = index - before[e] * wide, first = offset[e] + in % high * kGemmRows;
    *across = in / high;
    return {e, first, min(offset[e + 1] - first, (uint32_t)kGemmRows)};
  }
};

/* up_job and down_job with results of 16 bytes a lane; pair_out is bf16. I and H are multiples of 8. */
struct wide_up_job : up_job {
  __device__ void put(uint32_t i, uint32_t c, const float (&v)[8][2], bool mine) const {
    const float f = w.global ? w.global[tile.expert] : 1.0f;
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 8; n += 2) words[n / 2] = pack2(silu(v[n][0] * f) * (v[n + 1][0] * f), silu(v[n][1] * f) * (v[n + 1][1] * f));
    turn_words(words);
    const uint32_t at = column + c / 64 * 32 + threadIdx.x % 4 * 8;
    if (mine && at < inter)
      *reinterpret_cast<uint4 *>(a.middle + (size_t)(tile.first + i) * inter + at) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};
struct wide_down_job : down_job {
  __device__ void put(uint32_t i, uint32_t c, const float (&v)[8][2], bool mine) const {
    const uint32_t pair = mine ? r.pair[tile.first + i] : 0;
    const float f = mine ? r.weight[pair] * (w.global ? w.global[tile.expert] : 1.0f) : 0.0f;
    bf16 *to = reinterpret_cast<bf16 *>(a.pair_out) + (size_t)pair * w.n;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; n++) words[n] = pack2(v[half * 4 + n][0] * f, v[half * 4 + n][1] * f);
      turn_words(words);
      const uint32_t at = column + c / 64 * 64 + half * 32 + threadIdx.x % 4 * 8;
      if (mine && at < w.n) *reinterpret_cast<uint4 *>(to + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

template <mm_cu_code C, mm_cu_scale S>
__global__ void __launch_bounds__(widened_gemm::kThreads, 1)
    widened_up(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ tile_list list;
  const uint32_t wide = (w.n + kGemmColumns - 1) / kGemmColumns;
  grid_wait_and_launch_next();
  list.fill(r);
  widened_gemm::tiles<C, S>(w, list.before[r.experts] * wide, [&](uint32_t index) {
    uint32_t across;
    const expert_tile tile = list.find(r.experts, index, wide, &across);
    return wide_up_job{{w, r, a, tile, across * (kGemmColumns / 2), w.n / 2}};
  });
#else
  no_such_code();
#endif
}

template <mm_cu_code C, mm_cu_scale S>
__global__ void __launch_bounds__(widened_gemm::kThreads, 1)
    widened_down(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ tile_list list;
  const uint32_t wide = (w.n + kGemmColumns - 1) / kGemmColumns;
  grid_wait_and_launch_next();
  list.fill(r);
  widened_gemm::tiles<C, S>(w, list.before[r.experts] * wide, [&](uint32_t index) {
    uint32_t across;
    const expert_tile tile = list.find(r.experts, index, wide, &across);
    return wide_down_job{{w, r, a, tile, across * kGemmColumns}};
  });
#else
  no_such_code();
#endif
}

__global__ void sum_pairs(bf16 *y, const float *pair_out, const __grid_constant__ mm_cu_route r, uint32_t width) {
  grid_wait_and_launch_next();
  for (uint32_t c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (uint32_t j = 0; j < r.top_k; j++) {
      const size_t pair = (size_t)blockIdx.x * r.top_k + j;
      if (r.id[pair] >= r.experts) continue;
      const float4 v = *reinterpret_cast<const float4 *>(pair_out + pair * width + c);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<uint2 *>(y + (size_t)blockIdx.x * width + c) = make_uint2(pack2(sum.x, sum.y), pack2(sum.z, sum.w));
  }
}

/* Tiles there can be at most: one partly filled per expert in use beyond the full ones. */
unsigned most_tiles(const mm_cu_route &r, uint32_t tokens) {
  const unsigned pairs = tokens * r.top_k;
  return min(pairs, pairs / kGemmRows + r.experts);
}

struct grouped_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  bool up;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const unsigned tiles = most_tiles(r, a.tokens);
    if constexpr (C != MM_CU_BF16) {
      if (gemm_widens(C))
        return launch_widened<C>(up ? widened_up<C, S> : widened_down<C, S>, tiles * ceil_div(w.n, widened_gemm::kColumns), s, w, r, a);
    }
    const gemm_block b = gemm_block_here();
    return launch(up ? grouped_up<C, S> : grouped_down<C, S>, dim3(ceil_div(w.n, b.columns), tiles), b.threads, b.shared, s, w, r, a);
  }
};

}  // namespace

cudaError_t mm_cu_sum_pairs(const mm_cu_route &r, const mm_cu_experts &a, uint32_t width, cudaStream_t s) {
  return launch(sum_pairs, a.tokens, 256, 0, s, a.y, a.pair_out, r, width);
}

cudaError_t mm_cu_experts_gemm(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                               cudaStream_t s) {
  cudaError_t e = for_scheme(w13, grouped_launch{w13, r, a, s, true});
  if (e == cudaSuccess && w2.rounding.kind != MM_ACT_KEPT)
    e = mm_cu_round(a.middle, a.tokens * r.top_k, {a.middle, w2.k, nullptr}, w2.rounding, s);
  if (e == cudaSuccess) e = for_scheme(w2, grouped_launch{w2, r, a, s, false});
  if (e == cudaSuccess && gemm_widens(w2.code))
    return mm_cu_sum_choices(a.y, reinterpret_cast<const bf16 *>(a.pair_out), r, a.tokens, w2.n, s);
  return e != cudaSuccess ? e : mm_cu_sum_pairs(r, a, w2.n, s);
}
