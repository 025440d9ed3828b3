/* The next token from logits, by the rule of sample.h, to the bit.
 *
 * Greedy: many blocks a row, each offers its best to one 64-bit maximum (the logit above, the id's complement below: of equal logits the
 * lowest id); the last block of the row writes it down. A draw: one block a row. Masses are whole numbers (draw.h), so that their sums do
 * not depend on the order. The cut of top-k and top-p is found from the largest logit down, eight bits of the ordered logit at a time;
 * then what is left races, each thread with every 1,024th id: most of those are known to be late before their time is computed. */
#include "runtime/cuda/choose.h"
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/draw.h"

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
  grid_wait_and_launch_next();
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
  float top, scale; /* the largest logit; as mm_draw_depth takes it */
  u64 least;        /* the mass that an id has to have, or 0 */

  __device__ u64 mass(uint32_t key) const { return mm_draw_mass(mm_draw_depth(from_ordered(key), top, scale)); }
  /* The key of id v; 0 where it is not to be drawn. */
  __device__ uint32_t key(uint32_t v) const {
    const uint32_t k = key_of(a, logits, v);
    return least && k && mass(k) < least ? 0 : k;
  }
};

/* What is kept of a row: every key above `key`, and the first `ties` ids of that key. */
struct cut {
  uint32_t key, ties;
  u64 mass; /* of all kept */
};

/* The fewest from the top that are `count` or hold `mass`; all when they never reach either. weighs: masses count, and theirs is returned.
 */
__device__ cut find_cut(const draw_row &r, uint32_t count, u64 mass, bool weighs) {
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
      const uint32_t key = r.key(v);
      if (key == 0 || (shift < 24 && (key ^ found.key) >> (shift + 8) != 0)) continue;
      atomicAdd(&bin_count[key >> shift & 255], 1);
      if (weighs) atomicAdd(&bin_mass[key >> shift & 255], r.mass(key));
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
        if (each && mass > mass_above) found.ties = (uint32_t)min((u64)found.ties, (mass - mass_above - 1) / each + 1); /* rounded up */
        found.mass = mass_above + found.ties * each;
      }
    }
    __syncthreads();
  }
  return found;
}

/* The masses of a whole row. */
__device__ u64 sum_of_row(const draw_row &r) {
  u64 sum = 0, all;
  for (uint32_t v = threadIdx.x; v < r.a.vocab; v += kDrawThreads) {
    const uint32_t key = r.key(v);
    if (key) sum += r.mass(key);
  }
  sum_before(sum, &all);
  return all;
}

/* What top-k and top-p leave of a row. */
__device__ cut cut_row(const draw_row &r, const mm_cu_draw &set) {
  const bool few = set.top_k && set.top_k < r.a.vocab, part = set.top_p < 1;
  const uint32_t most = few ? set.top_k : r.a.vocab;
  cut kept = {0, 0, 0};
  if (few) {
    kept = find_cut(r, most, ~UINT64_C(0), part);
  } else if (part) {
    kept.mass = sum_of_row(r);
  }
  if (part) kept = find_cut(r, most, mm_draw_share(set.top_p, kept.mass), true);
  return kept;
}

/* The largest id of the first `kept.ties` that have the cut's key: those after it are not kept. */
__device__ uint32_t last_tie(const draw_row &r, const cut &kept) {
  __shared__ uint32_t last;
  const uint32_t each = (r.a.vocab + kDrawThreads - 1) / kDrawThreads;
  const uint32_t first = min(threadIdx.x * each, r.a.vocab), end = min(first + each, r.a.vocab);
  uint32_t ties = 0, all;
  for (uint32_t v = first; v < end; v++) ties += r.key(v) == kept.key;
  uint32_t before = sum_before(ties, &all);
  if (threadIdx.x == 0) last = r.a.vocab;
  __syncthreads();
  if (all > kept.ties && before < kept.ties && before + ties >= kept.ties) {
    uint32_t v = first;
    for (; before < kept.ties; v++) before += r.key(v) == kept.key;
    last = v - 1;
  }
  __syncthreads();
  return last;
}

/* The id that arrives first of those that are kept (draw.h); for thread 0. */
__device__ int32_t first_of_race(const draw_row &r, const cut &kept, uint32_t last, u64 race) {
  __shared__ u64 part[kDrawThreads / 32];
  u64 first = MM_DRAW_NOBODY;
  float time = INFINITY;
  for (uint32_t v = threadIdx.x; v < r.a.vocab; v += kDrawThreads) {
    const uint32_t key = r.key(v);
    if (key == 0 || key < kept.key || (key == kept.key && v > last)) continue;
    const uint32_t depth = mm_draw_depth(r.logits[v], r.top, r.scale), below = depth >> 26;
    const u64 bits = mm_draw_mix(race, (u64)v + 1);
    if (below > 40 || mm_draw_late(bits, __uint_as_float((127 + 40 - below) << 23), time)) continue;
    const u64 mass = mm_draw_mass(depth), mine = mass ? mm_draw_key(bits, mass, v) : first;
    if (mine < first) first = mine, time = mm_draw_time(mine);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) first = min(first, __shfl_xor_sync(0xffffffffu, first, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = first;
  __syncthreads();
  for (int w = 1; w < kDrawThreads / 32; w++) first = min(first, part[w]);
  return (int32_t)(first & (MM_DRAW_IDS - 1));
}

__global__ void __launch_bounds__(kDrawThreads) draw_from_row(const __grid_constant__ mm_cu_choose a) {
  const uint32_t i = blockIdx.x;
  const float *logits = a.logits + (size_t)i * a.vocab_rows;
  grid_wait_and_launch_next();
  const mm_cu_draw set = a.draw[i];
  const int32_t best = a.id[i]; /* best_of_row's */
  if (set.scale < 0 || best < 0) return;
  const draw_row r = {a, logits, logits[best], set.scale, set.least};
  const cut kept = cut_row(r, set);
  const uint32_t last = kept.key ? last_tie(r, kept) : a.vocab;
  const int32_t id = first_of_race(r, kept, last, set.race);
  if (threadIdx.x == 0) keep(a, i, id);
}

/* Largest of a block's values, or their sum; for every thread. */
__device__ u64 largest_of(u64 v) {
  __shared__ u64 part[kDrawThreads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  for (int w = 0; w < kDrawThreads / 32; w++) v = max(v, part[w]);
  __syncthreads();
  return v;
}
__device__ double sum_of(double v) {
  __shared__ double part[kDrawThreads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < kDrawThreads / 32; w++) v += part[w];
  __syncthreads();
  return v;
}

/* The `most` largest logits' ids in falling order, of equal ones the lowest first, as (key, ~id); how many there are, for thread 0. */
__device__ uint32_t largest_ids(const draw_row &r, uint32_t most, u64 (&list)[MM_LOGPROBS]) {
  __shared__ uint32_t count;
  const cut kept = find_cut(r, most, ~UINT64_C(0), false);
  const uint32_t last = kept.key ? last_tie(r, kept) : r.a.vocab;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (uint32_t v = threadIdx.x; v < r.a.vocab; v += kDrawThreads) {
    const uint32_t key = r.key(v);
    if (key == 0 || key < kept.key || (key == kept.key && v > last)) continue;
    const uint32_t at = atomicAdd(&count, 1u);
    if (at < MM_LOGPROBS) list[at] = (u64)key << 32 | ~v;
  }
  __syncthreads();
  const uint32_t n = min(count, most);
  for (uint32_t i = 1; threadIdx.x == 0 && i < n; i++) {
    const u64 x = list[i];
    uint32_t at = i;
    for (; at > 0 && list[at - 1] < x; at--) list[at] = list[at - 1];
    list[at] = x;
  }
  return n;
}

/* A block a row: its logprobs, from the logits as the model gave them. */
__global__ void __launch_bounds__(kDrawThreads)
    tell_logprobs(const __grid_constant__ mm_cu_choose a, const __grid_constant__ mm_cu_asks q) {
  __shared__ u64 list[MM_LOGPROBS];
  grid_wait_and_launch_next();
  const uint32_t i = blockIdx.x;
  const mm_cu_ask ask = q.row[i];
  if (!ask.told) return;
  const float *logits = ask.raw ? q.raw + (size_t)(ask.raw - 1) * a.vocab : a.logits + (size_t)i * a.vocab_rows;
  u64 best = 0;
  for (uint32_t v = threadIdx.x; v < a.vocab; v += kDrawThreads) {
    const uint32_t key = key_of(a, logits, v);
    best = max(best, key ? (u64)key << 32 | ~v : 0);
  }
  best = largest_of(best);
  const float top = best ? logits[~(uint32_t)best] : 0.0f;
  double sum = 0;
  for (uint32_t v = threadIdx.x; v < a.vocab; v += kDrawThreads) {
    if (key_of(a, logits, v)) sum += exp((double)logits[v] - top);
  }
  sum = sum_of(sum);
  const uint32_t most = ask.told - 1, n = most && best ? largest_ids({a, logits, top, 0, 0}, most, list) : 0;
  if (threadIdx.x > 0) return;
  mm_logprob *out = q.told + (size_t)i * MM_CU_TOLD;
  const auto logprob = [&](int32_t id) { return id < 0 ? -INFINITY : (float)((double)logits[id] - top - log(sum)); };
  out[0] = {a.id[i], logprob(a.id[i])};
  for (uint32_t k = 0; k < most; k++) {
    const int32_t id = k < n ? (int32_t) ~(uint32_t)list[k] : -1;
    out[1 + k] = {id, logprob(id)};
  }
}

/* A block a row. The largest is taken of what is a number; then one that is none makes the sum none. */
__global__ void __launch_bounds__(kDrawThreads) score_row(const __grid_constant__ mm_cu_choose a, const int32_t *target, double *score) {
  grid_wait_and_launch_next();
  const float *logits = a.logits + (size_t)blockIdx.x * a.vocab_rows;
  u64 best = 0;
  for (uint32_t v = threadIdx.x; v < a.vocab; v += kDrawThreads) best = max(best, (u64)key_of(a, logits, v));
  best = largest_of(best);
  const double top = best ? from_ordered((uint32_t)best) : -INFINITY;
  double sum = 0;
  for (uint32_t v = threadIdx.x; v < a.vocab; v += kDrawThreads) {
    if (!a.never[v]) sum += exp((double)logits[v] - top);
  }
  sum = sum_of(sum);
  const int32_t id = target[blockIdx.x];
  if (threadIdx.x == 0) score[blockIdx.x] = top + log(sum) - (a.never[id] ? -INFINITY : (double)logits[id]);
}

}  // namespace

cudaError_t mm_cu_score(const mm_cu_choose &a, const int32_t *target, double *score, uint32_t rows, cudaStream_t s) {
  return launch(score_row, rows, kDrawThreads, 0, s, a, target, score);
}

cudaError_t mm_cu_choose_tokens(const mm_cu_choose &a, uint32_t rows, bool draws, cudaStream_t s) {
  const unsigned blocks = min(ceil_div(a.vocab, kBestThreads * 4), max(4 * multiprocessors() / max(rows, 1u), 1u));
  cudaError_t e = launch(best_of_row, dim3(blocks, rows), kBestThreads, 0, s, a);
  if (e == cudaSuccess && draws) e = launch(draw_from_row, rows, kDrawThreads, 0, s, a);
  return e;
}

cudaError_t mm_cu_tell(const mm_cu_choose &a, const mm_cu_asks &q, uint32_t rows, cudaStream_t s) {
  return q.tells ? launch(tell_logprobs, rows, kDrawThreads, 0, s, a, q) : cudaSuccess;
}

mm_cu_draw mm_cu_draw_of(const mm_sampling *set, uint64_t n) {
  mm_cu_draw d;
  if (set->temperature == 0) return d;
  d.scale = mm_draw_scale(set->temperature), d.top_k = set->top_k, d.top_p = set->top_p, d.race = mm_draw_mix(set->seed, n);
  d.least = set->min_p > 0 ? mm_draw_share(set->min_p, MM_DRAW_ONE) : 0;
  return d;
}
