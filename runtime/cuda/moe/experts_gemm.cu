/* The experts of a prefill step: two grouped products over the sorted pairs (token, choice) and a sum per token.
 *
 * Up: half of a block's weight rows are of w1 and half the matching ones of w3, in alternate groups of eight, so that a thread holds gate
 * and up of the same column; middle[place in the sorted order, I]. Down: pair_out[pair, H] = weight · w2·middle, f32. The sum over a
 * token's choices, which other kernels end with too, is taken in their order: the same bits every time. Tiles of 128 pairs, or of 32 where
 * experts have few, never mix experts; a block finds its expert by counting. */
#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/swiglu.cuh"
#include "runtime/cuda/gemm/decode_tile.cuh"
#include "runtime/cuda/gemm/gemm.cuh"
#include "runtime/cuda/gemm/gemm_codes.cuh"

namespace {

struct expert_tile {
  uint32_t expert, first, rows; /* sorted places [first, first + rows); rows 0: nothing to do */
};

/* Tile `index` of the list "ceil(count / kRows) tiles of each expert, in order"; every thread gets the answer. */
template <uint32_t kRows>
__device__ expert_tile find_tile(const mm_cu_route &r, uint32_t index) {
  __shared__ expert_tile found;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) found.rows = 0;
    __syncwarp();
    uint32_t before = 0;
#pragma unroll 8
    for (uint32_t e0 = 0; e0 < r.experts; e0 += 32) {
      const uint32_t e = e0 + threadIdx.x, from = e < r.experts ? r.offset[e] : 0, to = e < r.experts ? r.offset[e + 1] : 0;
      const uint32_t tiles = (to - from + kRows - 1) / kRows;
      const uint32_t end = warp_sum_through(tiles);
      const uint32_t start = before + end - tiles;
      if (index >= start && index < start + tiles) {
        const uint32_t first = from + (index - start) * kRows;
        found = {e, first, min(to - first, kRows)};
      }
      before += __shfl_sync(0xffffffffu, end, 31);
    }
  }
  __syncthreads();
  return found;
}

/* Where the tiles of each expert begin in the list of find_tile, and the end of the last, for all threads. */
template <uint32_t kRows>
__device__ const uint32_t *list_tiles(const mm_cu_route &r) {
  __shared__ uint32_t start[MM_CU_MAX_EXPERTS + 1], sums[kTileThreads / 32];
  static_assert(kTileThreads == MM_CU_MAX_EXPERTS, "a thread for each expert");
  const uint32_t e = threadIdx.x, warp = e / 32;
  const uint32_t tiles = e < r.experts ? (r.offset[e + 1] - r.offset[e] + kRows - 1) / kRows : 0, through = warp_sum_through(tiles);
  if (e % 32 == 31) sums[warp] = through;
  __syncthreads();
  uint32_t before = 0;
  for (uint32_t i = 0; i < warp; i++) before += sums[i];
  start[e + 1] = before + through;
  if (e == 0) start[0] = 0;
  __syncthreads();
  return start;
}

/* A block's part of all tiles of pairs and weight rows, side by side those of one tile of pairs. */
template <class Form, class Maker>
struct expert_walk {
  const uint32_t *start, *offset;
  uint32_t wide, tile, column, expert;
  Maker maker;

  __device__ __forceinline__ expert_walk(const uint32_t *starts, const uint32_t *offsets, uint32_t columns, uint32_t unit, const Maker &m)
      : start(starts), offset(offsets), wide(columns), tile(unit / columns), column(unit % columns), expert(0), maker(m) {
#pragma unroll
    for (uint32_t step = MM_CU_MAX_EXPERTS / 2; step > 0; step /= 2)
      if (start[expert + step] <= tile) expert += step; /* the last that begins at or before it: those before it are empty */
  }
  __device__ __forceinline__ void next() {
    if (++column < wide) return;
    column = 0, tile++;
    while (expert + 1 < MM_CU_MAX_EXPERTS && start[expert + 1] <= tile) expert++;
  }
  __device__ __forceinline__ uint32_t x_of() const { return tile; }
  __device__ __forceinline__ auto job() const {
    const uint32_t first = offset[expert] + (tile - start[expert]) * Form::kRows;
    return maker(expert_tile{expert, first, min(offset[expert + 1] - first, Form::kRows)}, column);
  }
};

/* All tiles of a launch, shared out evenly. */
template <mm_cu_code C, mm_cu_scale S, class Form, class Maker>
__device__ __forceinline__ void decode_experts(const mm_cu_weight &w, const tile_plan &p, const mm_cu_route &r, const Maker &maker) {
  const uint32_t *const start = list_tiles<Form::kRows>(r);
  const uint32_t wide = (w.n + Form::kColumns - 1) / Form::kColumns, all = start[MM_CU_MAX_EXPERTS] * wide;
  const uint32_t first = (uint32_t)((uint64_t)all * blockIdx.x / gridDim.x), end = (uint32_t)((uint64_t)all * (blockIdx.x + 1) / gridDim.x);
  if (first < end) decode_tiles<C, S, Form>(w, p, expert_walk<Form, Maker>(start, r.offset, wide, first, maker), end - first);
}

struct up_job {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  expert_tile tile;
  uint32_t column, inter;

  __device__ uint32_t rows() const { return tile.rows; }
  __device__ const bf16 *x_base() const { return a.x; }
  __device__ uint32_t x_row(uint32_t i) const { return r.pair[tile.first + i] / r.top_k; }
  __device__ const bf16 *x(uint32_t i) const { return x_base() + (size_t)x_row(i) * w.k; }
  __device__ weight_row weight(uint32_t i) const {
    const uint32_t c = min(column + i / 16 * 8 + i % 8, inter - 1);
    return {tile.expert, i / 8 % 2 == 0 ? c : inter + c};
  }
  template <int N>
  __device__ void emit(uint32_t i, uint32_t c, const float (&v)[N][2]) const {
    const float f = w.global ? w.global[tile.expert] : 1.0f;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const uint32_t at = column + (c + n * 8) / 16 * 8 + c % 8; /* even, and so is inter */
      if (at >= inter) continue;
      *reinterpret_cast<uint32_t *>(a.middle + (size_t)(tile.first + i) * inter + at) =
          pack2(activated(r.act, v[n][0] * f, v[n + 1][0] * f), activated(r.act, v[n][1] * f, v[n + 1][1] * f));
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
  __device__ const bf16 *x_base() const { return a.middle; }
  __device__ uint32_t x_row(uint32_t i) const { return tile.first + i; }
  __device__ const bf16 *x(uint32_t i) const { return x_base() + (size_t)x_row(i) * w.k; }
  __device__ weight_row weight(uint32_t i) const { return {tile.expert, min(column + i, w.n - 1)}; }
  template <int N>
  __device__ void emit(uint32_t i, uint32_t c, const float (&v)[N][2]) const {
    const uint32_t pair = r.pair[tile.first + i];
    const float f = r.weight[pair] * (w.global ? w.global[tile.expert] : 1.0f);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const uint32_t at = column + c + n * 8; /* even, and so is w.n */
      if (at < w.n) *reinterpret_cast<float2 *>(a.pair_out + (size_t)pair * w.n + at) = make_float2(v[n][0] * f, v[n][1] * f);
    }
  }
};

template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    grouped_up(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  grid_wait_and_launch_next();
  const expert_tile tile = find_tile<Form::kRows>(r, blockIdx.y);
  if (tile.rows > 0) gemm_tile<C, S, Form>(w, up_job{w, r, a, tile, blockIdx.x * (Form::kColumns / 2), w.n / 2});
}

template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    grouped_down(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a) {
  grid_wait_and_launch_next();
  const expert_tile tile = find_tile<Form::kRows>(r, blockIdx.y);
  if (tile.rows > 0) gemm_tile<C, S, Form>(w, down_job{w, r, a, tile, blockIdx.x * Form::kColumns});
}

template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(kTileThreads, Form::kBlocks)
    decode_up(const __grid_constant__ tile_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r,
              const __grid_constant__ mm_cu_experts a) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  grid_wait_and_launch_next();
  decode_experts<C, S, Form>(
      w, p, r, [&](const expert_tile &tile, uint32_t column) { return up_job{w, r, a, tile, column * (Form::kColumns / 2), w.n / 2}; });
#else
  no_such_code();
#endif
}

template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(kTileThreads, Form::kBlocks)
    decode_down(const __grid_constant__ tile_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r,
                const __grid_constant__ mm_cu_experts a) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  grid_wait_and_launch_next();
  decode_experts<C, S, Form>(w, p, r, [&](const expert_tile &tile, uint32_t column) {
    return down_job{w, r, a, tile, column * Form::kColumns};
  });
#else
  no_such_code();
#endif
}

/* The same of codes (gemm_codes.cuh). */
__global__ void __launch_bounds__(gemm_codes_form::kThreads, 1)
    grouped_up_codes(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r, const __grid_constant__ mm_cu_experts a,
                     const __grid_constant__ code_rows c) {
#ifdef MM_CU_CODES_CODE
  using form = gemm_codes_form;
  grid_wait_and_launch_next();
  const expert_tile tile = find_tile<form::kRows>(r, blockIdx.y);
  const up_job job{w, r, a, tile, blockIdx.x * (form::kColumns / 2), w.n / 2};
  if (tile.rows > 0) codes_tile<up_job>(w, c, job)(job);
#else
  no_such_code();
#endif
}
__global__ void __launch_bounds__(gemm_codes_form::kThreads, 1)
    grouped_down_codes(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_route r,
                       const __grid_constant__ mm_cu_experts a, const __grid_constant__ code_rows c) {
#ifdef MM_CU_CODES_CODE
  using form = gemm_codes_form;
  grid_wait_and_launch_next();
  const expert_tile tile = find_tile<form::kRows>(r, blockIdx.y);
  const down_job job{w, r, a, tile, blockIdx.x * form::kColumns};
  if (tile.rows > 0) codes_tile<down_job>(w, c, job)(job);
#else
  no_such_code();
#endif
}

__global__ void sum_pairs(bf16 *y, const float *pair_out, const __grid_constant__ mm_cu_route r, uint32_t width) {
  grid_launch_next_early();
  grid_wait();
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

/* Tiles of so many rows there can be at most: one partly filled per expert in use beyond the full ones. */
unsigned most_tiles(const mm_cu_route &r, uint32_t tokens, unsigned rows) {
  const unsigned pairs = tokens * r.top_k;
  return min(pairs, pairs / rows + r.experts);
}

constexpr uint32_t kWideExperts = 1024; /* weight rows from which a block has 128 of them in place of 64: it starts half as often */

struct grouped_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  cudaStream_t s;
  bool up;
  template <class Form, class Kernel>
  cudaError_t in(Kernel up_kernel, Kernel down_kernel) const {
    const gemm_block b = gemm_block_here<Form>();
    const dim3 grid(ceil_div(w.n, b.columns), most_tiles(r, a.tokens, b.rows));
    return launch(up ? up_kernel : down_kernel, grid, b.threads, b.shared, s, w, r, a);
  }
  template <mm_cu_code C, mm_cu_scale S, class Form>
  cudaError_t decode() const {
    const tile_plan p = plan_tile<C, Form>(w);
    const unsigned grid = min(ceil_div(w.n, Form::kColumns) * most_tiles(r, a.tokens, Form::kRows), Form::kBlocks * multiprocessors());
    return launch(up ? decode_up<C, S, Form> : decode_down<C, S, Form>, grid, kTileThreads, p.shared, s, p, w, r, a);
  }
  template <mm_cu_code C, mm_cu_scale S, uint32_t kGroups>
  cudaError_t decode_few(uint32_t pairs) const {
    return pairs <= 4 * r.experts   ? decode<C, S, decode_form<1, kGroups>>()
           : pairs <= 8 * r.experts ? decode<C, S, decode_form<2, kGroups>>()
                                    : decode<C, S, decode_form<4, kGroups>>();
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const uint32_t pairs = a.tokens * r.top_k;
    const bool few = !hopper() && pairs <= kGemmSmallEach * r.experts;
    if constexpr (kTileTakes<C, S>) {
      if (few && a.decode && mm_cu_tile_takes(&w)) return w.n < kWideExperts ? decode_few<C, S, 4>(pairs) : decode_few<C, S, 8>(pairs);
    }
    if (few) return in<gemm_small>(grouped_up<C, S, gemm_small>, grouped_down<C, S, gemm_small>);
    return in<gemm_large>(grouped_up<C, S, gemm_large>, grouped_down<C, S, gemm_large>);
  }
};

}  // namespace

cudaError_t mm_cu_sum_pairs(const mm_cu_route &r, const mm_cu_experts &a, uint32_t width, cudaStream_t s) {
  return launch(sum_pairs, a.tokens, 256, 0, s, a.y, a.pair_out, r, width);
}

cudaError_t mm_cu_experts_gemm(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                               cudaStream_t s) {
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_GEMM, {&w13, &w2, a.tokens, r.top_k});
  if (e == cudaSuccess) e = for_scheme(w13, grouped_launch{w13, r, a, s, true});
  const mm_cu_rounding *const before = mm_cu_rounds_before(MM_CU_EXPERTS_GEMM, &w2);
  if (e == cudaSuccess && before) e = mm_cu_round(a.middle, a.tokens * r.top_k, {a.middle, w2.k, nullptr, mm_cu_placed_of(r)}, *before, s);
  if (e == cudaSuccess) e = for_scheme(w2, grouped_launch{w2, r, a, s, false});
  return e != cudaSuccess ? e : mm_cu_sum_pairs(r, a, w2.n, s);
}

cudaError_t mm_cu_experts_codes(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_codes &x,
                                const mm_cu_experts &a, cudaStream_t s) {
  using form = gemm_codes_form;
  const uint32_t k = w2.k, pairs = a.tokens * r.top_k;
  const unsigned high = most_tiles(r, a.tokens, form::kRows);
  const uint8_t *const middle = reinterpret_cast<const uint8_t *>(a.middle);
  const code_rows up = {x.code, x.scale, x.pitch, 1, x.scale_pitch},
                  down = {middle, reinterpret_cast<const float *>(middle + k), 2 * k, k / 2, 1};
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_CODES, {&w13, &w2, a.tokens, r.top_k});
  if (e == cudaSuccess)
    e = launch(grouped_up_codes, dim3(ceil_div(w13.n, form::kColumns), high), form::kThreads, form::kShared, s, w13, r, a, up);
  if (e == cudaSuccess) e = mm_cu_encode_placed(a.middle, pairs, k, mm_cu_placed_of(r), s);
  if (e == cudaSuccess)
    e = launch(grouped_down_codes, dim3(ceil_div(w2.n, form::kColumns), high), form::kThreads, form::kShared, s, w2, r, a, down);
  return e != cudaSuccess ? e : mm_cu_sum_pairs(r, a, w2.n, s);
}

cudaError_t mm_cu_experts_middle(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s) {
  return for_scheme(w13, grouped_launch{w13, r, a, s, true});
}
