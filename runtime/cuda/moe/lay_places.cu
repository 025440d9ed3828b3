/* Three kernels: find_places inverts pair[]; lay_tokens copies each token's row to the place of each of its experts; lay_rounded rounds
 * rows in place. Both permute columns to the order of mma fragments ("laid", place_of_four in gemm/small_batch_rows.cuh). A warp has a row,
 * a lane 8 columns (uint4) a load. Bound by writes: a row is read once and written top_k times. */
#include "runtime/cuda/moe/lay_places.h"

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/round.cuh"

namespace {

constexpr uint32_t kWarps = 8, kAtOnce = 4; /* kAtOnce: loads in flight */

/* A lane's eight columns as a product's fragments have them: of lane t columns 8t … of 32 (4t … of 16), two by two, side by side
 * (place_of_four). For whole warps. */
template <uint32_t kPiece>
__device__ __forceinline__ uint4 laid(uint4 q) {
  uint32_t v[4] = {q.x, q.y, q.z, q.w};
  if constexpr (kPiece == 32) {
    turn_words(v);
  } else {
    const bool odd = threadIdx.x % 2;
    const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
    if (odd) {
      v[0] = a, v[2] = v[1], v[1] = b;
    } else {
      v[1] = v[2], v[2] = a, v[3] = b;
    }
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

/* For each kAtOnce · 256 columns of a row of `quads` uint4 (eight bf16 each): use(the lane's first uint4, q[kAtOnce]), zeros after the
 * last. */
template <class Use>
__device__ __forceinline__ void for_quads(const uint4 *row, uint32_t quads, const Use &use) {
  for (uint32_t first = threadIdx.x % 32; first < (quads + 31) / 32 * 32; first += kAtOnce * 32) {
    uint4 q[kAtOnce] = {};
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; i++) {
      if (first + i * 32 < quads) q[i] = row[first + i * 32];
    }
    use(first, q);
  }
}

/* place[pair] of every pair that has one. */
__global__ void find_places(uint32_t *place, const uint32_t *pair, const uint32_t *places) {
  grid_wait_and_launch_next();
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < *places) place[pair[i]] = i;
}

template <uint32_t kPiece>
__global__ void __launch_bounds__(kWarps * 32)
    lay_tokens(__nv_bfloat16 *to, const __nv_bfloat16 *x, const uint32_t *place, const uint32_t *pair, const uint32_t *places,
               uint32_t tokens, uint32_t top_k, uint32_t k) {
  grid_wait_and_launch_next();
  const uint32_t token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, quads = k / 8;
  if (token >= tokens) return;
  /* place[] is uninitialised for pairs that this rank does not hold: an entry counts only if pair[entry] is this pair. */
  const uint32_t pair_id = token * top_k + lane, at = lane < top_k ? place[pair_id] : ~0u;
  const bool placed = at < *places && pair[at] == pair_id;
  const uint32_t found = __ballot_sync(0xffffffffu, placed);
  for_quads(reinterpret_cast<const uint4 *>(x + (size_t)token * k), quads, [&](uint32_t first, uint4(&q)[kAtOnce]) {
#pragma unroll
    for (uint4 &v : q) v = laid<kPiece>(v);
    for (uint32_t left = found; left; left &= left - 1) {
      uint4 *row = reinterpret_cast<uint4 *>(to + (size_t)__shfl_sync(0xffffffffu, at, __ffs(left) - 1) * k);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        if (first + i * 32 < quads) row[first + i * 32] = q[i];
      }
    }
  });
}

/* kE2m1: the code is E2M1 at compile time; otherwise it is read at run time. A scale group is a power of two of 8 to 256 columns, whose
 * lanes exchange by xor shuffles. */
template <uint32_t kPiece, bool kE2m1>
__global__ void __launch_bounds__(kWarps * 32)
    lay_rounded(__nv_bfloat16 *rows, mm_cu_placed of, uint32_t k, rounder how, const float *published, uint32_t each, uint32_t first_k) {
  grid_wait_and_launch_next();
  if (kE2m1) how.format.code = MM_CODE_E2M1;
  const uint32_t place = blockIdx.x * kWarps + threadIdx.x / 32, quads = k / 8, lanes = how.format.group / 8;
  if (place >= *of.places) return;
  uint4 *row = reinterpret_cast<uint4 *>(rows + (size_t)place * k);
  float row_scale = 1;
  const float *const given = published ? published + (size_t)of.pair[place] * each : nullptr; /* of all ranks' columns */
  if (how.whole_row() && given) {
    row_scale = how.row_scale(*given);
  } else if (how.whole_row()) {
    float most = 0;
    for_quads(row, quads, [&](uint32_t, uint4(&q)[kAtOnce]) {
#pragma unroll
      for (const uint4 &v : q) most = fmaxf(most, largest8(v));
    });
#pragma unroll
    for (uint32_t m = 1; m < 32; m *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
    row_scale = how.row_scale(most);
  }
  for_quads(row, quads, [&](uint32_t first, uint4(&q)[kAtOnce]) {
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; i++) {
      float most = largest8(q[i]), v[8];
      for (uint32_t m = 1; m < lanes; m *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
      if (given && !how.whole_row()) most = given[min((first_k + (first + i * 32) * 8) / how.format.group, each - 1)];
      widen8(v, q[i]);
      how.to_numbers(v, lanes ? how.group_scale(most, row_scale) : row_scale);
      const uint4 to = laid<kPiece>(make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7])));
      if (first + i * 32 < quads) row[first + i * 32] = to;
    }
  });
}

}  // namespace

cudaError_t mm_cu_lay_tokens(__nv_bfloat16 *to, const __nv_bfloat16 *x, uint32_t *place, const mm_cu_route &r, uint32_t tokens, uint32_t k,
                             uint32_t piece, cudaStream_t s) {
  const uint32_t *places = r.offset + r.experts;
  const cudaError_t e = launch(find_places, ceil_div(tokens * r.top_k, 256), 256, 0, s, place, r.pair, places);
  return e != cudaSuccess ? e
                          : launch(piece == 16 ? lay_tokens<16> : lay_tokens<32>, ceil_div(tokens, kWarps), kWarps * 32, 0, s, to, x, place,
                                   r.pair, places, tokens, r.top_k, k);
}

cudaError_t mm_cu_lay_rounded(__nv_bfloat16 *rows, const mm_cu_rounding &how, const mm_cu_route &r, uint32_t tokens, uint32_t k,
                              uint32_t piece, cudaStream_t s) {
  const rounder by = rounder_of(how);
  const bool e2m1 = by.format.code == MM_CODE_E2M1;
  const auto kernel = piece == 16 ? (e2m1 ? lay_rounded<16, true> : lay_rounded<16, false>)
                      : e2m1      ? lay_rounded<32, true>
                                  : lay_rounded<32, false>;
  const uint32_t pairs = tokens * r.top_k;
  const cudaError_t e = how.whole_k ? mm_cu_publish_largest(how, pairs, {rows, k, nullptr, mm_cu_placed_of(r)}, s) : cudaSuccess;
  return e != cudaSuccess
             ? e
             : launch(kernel, ceil_div(pairs, kWarps), kWarps * 32, 0, s, rows, mm_cu_placed_of(r), k, by,
                      how.whole_k ? how.ranks->largest : nullptr, how.whole_k ? mm_cu_published_largest(&how) : 0, how.first_k);
}
