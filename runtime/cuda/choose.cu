/* The next token from logits, by the rule of sample.h.
 *
 * Greedy: many blocks a row, each offers its best to one 64-bit maximum (the logit above, the id's complement below: of equal logits the
 * lowest id); the last block of the row writes it down. A draw: one block a row. Probabilities are 2^40ths of the largest, whole numbers,
 * so that their sums do not depend on the order. The cut of top-k and top-p is found from the largest logit down, eight bits of the ordered
 * logit at a time; ids ascend as the draw walks over what is left, where the reference walks in falling order: the same probabilities. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

typedef unsigned long long u64;
constexpr int kBestThreads = 256, kDrawThreads = 1024, kBins = 256;

/* Bits that order as the floats do; 0 for none of them. */
__device__ uint32_t ordered(float f) {
  const uint32_t u = __float_as_uint(f + 0.0f); /* -0 equals 0 */
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ float from_ordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

/* The key of id v of a row; 0 where it is not to be chosen. */
__device__ uint32_t key_of(const mm_cu_choose &a, const float *logits, uint32_t v) {
  const float x = logits[v];
  return x > -INFINITY && !a.never[v] ? ordered(x) : 0;
}

__device__ void keep(const mm_cu_choose &a, uint32_t i, int32_t id) {
  const uint32_t row = a.out[i];
  const int32_t slot = a.slot[row];
  a.id[i] = id;
  if (slot >= 0 && (row + 1 == a.tokens || a.slot[row + 1] != slot)) a.chosen[slot] = max(id, 0);
}

__global__ void __launch_bounds__(kBestThreads) best_of_row(const __grid_constant__ mm_cu_choose a) {
  __shared__ u64 part[kBestThreads / 32];
  const uint32_t i = blockIdx.y;
  const float *logits = a.logits + (size_t)i * a.vocab_rows;
  grid_wait();
  grid_launch_next();
  u64 best = 0;
  for (uint32_t v = blockIdx.x * kBestThreads + threadIdx.x; v < a.vocab; v += gridDim.x * kBestThreads) {
    const uint32_t key = key_of(a, logits, v);
    best = max(best, key ? (u64)key << 32 | ~v : 0);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int w = 1; w < kBestThreads / 32; w++) best = max(best, part[w]);
  atomicMax(&a.best[i], best);
  __threadfence();
  if (atomicAdd(&a.ticket[i], 1) != gridDim.x - 1) return;
  __threadfence();
  best = atomicExch(&a.best[i], 0);
  a.ticket[i] = 0;
  keep(a, i, best ? (int32_t) ~(uint32_t)best : -1);
}

/* Σ over the threads before this one; *total: over all. */
template <class T>
__device__ T sum_before(T v, T *total) {
  __shared__ T warp_total[kDrawThreads / 32];
  T sum = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T left = __shfl_up_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 >= d) sum += left;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) warp_total[threadIdx.x / 32] = sum;
  __syncthreads();
  T before = 0;
  *total = 0;
  for (int w = 0; w < kDrawThreads / 32; w++) {
    if (w == threadIdx.x / 32) before = *total;
    *total += warp_total[w];
  }
  return before + sum - v;
}

/* A row under its settings. */
struct draw_row {
  const mm_cu_choose &a;
  const float *logits;
  float top, scale; /* the largest logit; log2(e)/temperature */

  __device__ u64 mass(uint32_t key) const {
    const float x = from_ordered(key);
    return x == top ? UINT64_C(1) << 40 : (u64)(exp2f((x - top) * scale) * 0x1p40f);
  }
};

/* What is kept of a row: every key above `key`, and the first `ties` ids of that key. */
struct cut {
  uint32_t key, ties;
  u64 mass; /* of all kept */
};

/* The fewest from the top that are `count` or hold `mass`; all when they never reach either. */
__device__ cut find_cut(const draw_row &r, uint32_t count, u64 mass) {
  __shared__ u64 bin_mass[kBins];
  __shared__ uint32_t bin_count[kBins];
  __shared__ cut found;
  __shared__ u64 mass_above;
  __shared__ uint32_t count_above;
  __syncthreads();
  if (threadIdx.x == 0) found = {0, 0, 0}, mass_above = 0, count_above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < kBins) bin_mass[threadIdx.x] = 0, bin_count[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t v = threadIdx.x; v < r.a.vocab; v += kDrawThreads) {
      const uint32_t key = key_of(r.a, r.logits, v);
      if (key == 0 || (shift < 24 && (key ^ found.key) >> (shift + 8) != 0)) continue;
      atomicAdd(&bin_count[key >> shift & 255], 1);
      atomicAdd(&bin_mass[key >> shift & 255], r.mass(key));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int b = kBins - 1;
      while (b > 0 && count_above + bin_count[b] < count && mass_above + bin_mass[b] < mass)
        count_above += bin_count[b], mass_above += bin_mass[b], b--;
      found.key |= (uint32_t)b << shift;
      if (shift == 0) {
        const u64 each = bin_count[b] ? bin_mass[b] / bin_count[b] : 0;
        found.ties = min(bin_count[b], count - count_above);
        if (each && mass > mass_above) found.ties = (uint32_t)min((u64)found.ties, (mass - mass_above + each - 1) / each);
        found.mass = mass_above + found.ties * each;
      }
    }
    __syncthreads();
  }
  return found;
}

__global__ void __launch_bounds__(kDrawThreads) draw_from_row(const __grid_constant__ mm_cu_choose a) {
  const uint32_t i = blockIdx.x;
  const float *logits = a.logits + (size_t)i * a.vocab_rows;
  grid_wait();
  grid_launch_next();
  const mm_cu_draw set = a.draw[i];
  const int32_t best = a.id[i]; /* best_of_row's */
  if (set.scale == 0 || best < 0) return;
  const draw_row r = {a, logits, logits[best], set.scale};
  cut kept = find_cut(r, set.top_k ? set.top_k : a.vocab, ~UINT64_C(0));
  if (set.top_p < 1) kept = find_cut(r, set.top_k ? set.top_k : a.vocab, max((u64)ceil(set.top_p * (double)kept.mass), (u64)1));

  const uint32_t each = (a.vocab + kDrawThreads - 1) / kDrawThreads;
  const uint32_t first = min(threadIdx.x * each, a.vocab), end = min(first + each, a.vocab);
  uint32_t ties = 0, all_ties;
  for (uint32_t v = first; v < end; v++) ties += key_of(a, logits, v) == kept.key;
  ties = sum_before(ties, &all_ties);
  auto kept_mass = [&](uint32_t v, uint32_t *tie) {
    const uint32_t key = key_of(a, logits, v);
    return key > kept.key || (key == kept.key && key != 0 && (*tie)++ < kept.ties) ? r.mass(key) : 0;
  };
  u64 mass = 0, all;
  uint32_t tie = ties;
  for (uint32_t v = first; v < end; v++) mass += kept_mass(v, &tie);
  u64 before = sum_before(mass, &all);
  const u64 target = min((u64)(set.u * (double)all), all - 1);
  if (target < before || target - before >= mass) return;
  tie = ties;
  for (uint32_t v = first; v < end; v++) {
    before += kept_mass(v, &tie);
    if (target >= before) continue;
    keep(a, i, (int32_t)v);
    return;
  }
}

}  // namespace

cudaError_t mm_cu_choose_tokens(const mm_cu_choose &a, uint32_t rows, bool draws, cudaStream_t s) {
  const unsigned blocks = min(ceil_div(a.vocab, kBestThreads * 4), max(4 * multiprocessors() / max(rows, 1u), 1u));
  cudaError_t e = launch(best_of_row, dim3(blocks, rows), kBestThreads, 0, s, a);
  if (e == cudaSuccess && draws) e = launch(draw_from_row, rows, kDrawThreads, 0, s, a);
  return e;
}
