/* Device code shared by sample_rows.cu and large_sampling.cu: logits as sortable keys, sampling from a sorted few, and the output of a
 * sample. */
#ifndef MM_CUDA_SAMPLING_CUH
#define MM_CUDA_SAMPLING_CUH

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/sampling/sampling.h"
#include "runtime/engine/random_draw.h"

typedef unsigned long long u64;

/* Bits that order as the floats do, above 0. */
__device__ __forceinline__ uint32_t ordered(float f) {
  const uint32_t u = __float_as_uint(f + 0.0f); /* -0 equals 0 */
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

/* A row of logits[vocab] and the ids that are never sampled. */
struct logits_row {
  const float *logits;
  const uint32_t *never;
  uint32_t vocab;
  bool in_fours; /* it starts at a multiple of 16 bytes */

  __device__ logits_row(const float *from, const mm_cu_sample &a)
      : logits(from), never(a.never), vocab(a.vocab), in_fours(((uintptr_t)from & 15) == 0) {}
  __device__ bool barred(uint32_t id) const { return never[id / 32] >> id % 32 & 1; }
  /* The key of an id; 0 where it is never sampled. */
  __device__ uint32_t key(uint32_t id) const {
    if (id >= vocab || barred(id)) return 0;
    const float x = logits[id];
    return x > -INFINITY ? ordered(x) : 0;
  }
  /* Keys of ids first … first + 3, first a multiple of 4. */
  __device__ uint4 keys(uint32_t first) const {
    if (!in_fours || first + 4 > vocab) return make_uint4(key(first), key(first + 1), key(first + 2), key(first + 3));
    const float4 x = *reinterpret_cast<const float4 *>(logits + first);
    return keys_of(x, never[first / 32] >> first % 32);
  }
  /* Keys of several such quads, all loaded before the first is used; 0 beyond the row. */
  template <uint32_t N>
  __device__ void keys_ahead(const uint32_t (&first)[N], uint4 (&keys)[N]) const {
    float4 x[N];
    uint32_t not_these[N];
    bool plain = in_fours;
#pragma unroll
    for (uint32_t n = 0; n < N; n++) plain = plain && (first[n] + 4 <= vocab || first[n] >= vocab);
    if (!plain) {
#pragma unroll
      for (uint32_t n = 0; n < N; n++) keys[n] = this->keys(first[n]);
      return;
    }
#pragma unroll
    for (uint32_t n = 0; n < N; n++) {
      const uint32_t at = first[n] < vocab ? first[n] : 0;
      x[n] = *reinterpret_cast<const float4 *>(logits + at);
      not_these[n] = first[n] < vocab ? never[at / 32] >> at % 32 : 15;
    }
#pragma unroll
    for (uint32_t n = 0; n < N; n++) keys[n] = keys_of(x[n], not_these[n]);
  }
  __device__ static uint4 keys_of(float4 x, uint32_t not_these) {
    const auto key_of = [&](float f, uint32_t i) { return f > -INFINITY && !(not_these >> i & 1) ? ordered(f) : 0; };
    return make_uint4(key_of(x.x, 0), key_of(x.y, 1), key_of(x.z, 2), key_of(x.w, 3));
  }
};

/* A key and its id as one number: the largest is the largest logit's, of equal ones the lowest id's; 0 for none. */
__device__ __forceinline__ u64 standing(uint32_t key, uint32_t id) { return key ? (u64)key << 32 | ~id : 0; }
__device__ __forceinline__ uint32_t key_of(u64 standing) { return (uint32_t)(standing >> 32); }
__device__ __forceinline__ int32_t id_of(u64 standing) { return standing ? (int32_t) ~(uint32_t)standing : -1; }
/* The largest of four. */
__device__ __forceinline__ u64 best_of(uint4 keys, uint32_t first) {
  const uint32_t most = max(max(keys.x, keys.y), max(keys.z, keys.w));
  return standing(most, first + (keys.x == most ? 0 : keys.y == most ? 1 : keys.z == most ? 2 : 3));
}

/* A block's values as one, in the order of its warps; for every thread. */
template <int Threads, class T, class Join>
__device__ T join_block(T v, Join join) {
  __shared__ T part[Threads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = join(v, __shfl_xor_sync(0xffffffffu, v, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = part[0];
#pragma unroll
  for (int w = 1; w < Threads / 32; w++) v = join(v, part[w]);
  __syncthreads();
  return v;
}
struct larger {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x > y ? x : y;
  }
};
struct smaller {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x < y ? x : y;
  }
};
struct plus {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x + y;
  }
};

/* The slot whose last row is output row i, or -1. */
__device__ __forceinline__ int32_t slot_of(const mm_cu_sample &a, uint32_t i) {
  const uint32_t row = a.out[i];
  const int32_t slot = a.slot[row];
  return row + 1 == a.tokens || a.slot[row + 1] != slot ? slot : -1;
}
/* Stores the id sampled for output row i, -1 for none. */
__device__ __forceinline__ void store_id(const mm_cu_sample &a, uint32_t i, int32_t slot, int32_t id) {
  if (a.map && id >= 0) id = a.map[id];
  a.id[i] = id;
  if (slot >= 0) a.last_id[slot] = max(id, 0);
}

/* ---- sampling from at most kSorted ids, one of each thread of a block ---- */

constexpr uint32_t kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;
constexpr uint32_t kSorted = kSampleThreads; /* ids that are sorted */
constexpr uint32_t kMostListed = MM_CU_SMALL_TOP_K_MOST;

/* Shared memory of a block. */
struct sorted_shared {
  u64 list[kSorted]; /* standings */
  u64 part[kSampleWarps];
  bool enough[kSampleWarps];
};

/* The largest key, to a precision of 16 bits, that `count` of keys[n] are not below; 1 where there are not so many. n: a multiple of 128.
 */
__device__ __forceinline__ uint32_t bound_of(const uint32_t *keys, uint32_t n, uint32_t count, sorted_shared *m) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  static_assert(kSampleWarps == 16, "each warp tries a digit of four bits");
  uint32_t bound = 0;
#pragma unroll 1
  for (int shift = 28; shift >= 16; shift -= 4) {
    const uint32_t tried = bound | warp << shift;
    uint32_t reach = 0;
#pragma unroll 4
    for (uint32_t i = 4 * lane; i < n; i += 128) {
      const uint4 k = *reinterpret_cast<const uint4 *>(keys + i);
      reach += (uint32_t)(k.x >= tried) + (k.y >= tried) + (k.z >= tried) + (k.w >= tried);
    }
    reach = __reduce_add_sync(0xffffffffu, reach);
    if (lane == 0) m->enough[warp] = reach >= count;
    __syncthreads();
    const uint32_t digits = __ballot_sync(0xffffffffu, lane < kSampleWarps && m->enough[lane]);
    bound |= (digits ? 31 - __clz(digits) : 0) << shift;
    __syncthreads();
  }
  return max(bound, 1u);
}

/* The first n of the list in falling order, one a thread; 0 after them. */
__device__ __forceinline__ u64 sort_ids(sorted_shared *m, uint32_t n) {
  const uint32_t t = threadIdx.x;
  if (n <= kSampleThreads / 4) { /* four threads count how many are before one */
    const uint32_t of = t / 4;
    const u64 mine = of < n ? m->list[of] : 0;
    uint32_t before = 0;
    for (uint32_t i = t % 4; i < n; i += 4) before += m->list[i] > mine;
    before += __shfl_xor_sync(0xffffffffu, before, 1), before += __shfl_xor_sync(0xffffffffu, before, 2);
    __syncthreads();
    if (of < n && t % 4 == 0) m->list[before] = mine;
    __syncthreads();
    return t < n ? m->list[t] : 0;
  }
  const uint32_t size = 1u << (32 - __clz(n - 1));
  u64 mine = t < n ? m->list[t] : 0;
#pragma unroll 1
  for (uint32_t k = 2; k <= size; k *= 2) {
#pragma unroll 1
    for (uint32_t j = k / 2; j > 0; j /= 2) {
      u64 other = 0;
      if (j >= 32) {
        __syncthreads();
        m->list[t] = mine;
        __syncthreads();
        other = m->list[t ^ j];
      } else if (t / 32 * 32 < size) {
        other = __shfl_xor_sync(0xffffffffu, mine, j);
      }
      const bool larger_here = ((t & k) == 0) == ((t & j) == 0);
      if (t < size && (other > mine) == larger_here) mine = other;
    }
  }
  return mine;
}

/* Σ over the threads up to this one; *total: over all. */
__device__ __forceinline__ u64 sum_through(u64 v, u64 *total, sorted_shared *m) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u64 left = __shfl_up_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 >= d) v += left;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) m->part[threadIdx.x / 32] = v;
  __syncthreads();
  *total = 0;
  u64 before = 0;
#pragma unroll
  for (uint32_t w = 0; w < kSampleWarps; w++) {
    if (w == threadIdx.x / 32) before = *total;
    *total += m->part[w];
  }
  return before + v;
}

/* How masses of a row come from its keys. */
struct row_masses {
  float top, scale; /* the largest logit; as mm_draw_depth takes it */

  __device__ uint32_t depth(uint32_t key) const { return mm_draw_depth(from_ordered(key), top, scale); }
};

/* The random bits of an id in a race. */
__device__ __forceinline__ u64 race_bits(const int32_t *map, u64 race, uint32_t id) {
  return mm_draw_mix(race, (u64)(map ? (uint32_t)map[id] : id) + 1);
}

/* The sampled id among those that top-k left (in falling order, one a thread) and top-p keeps: the one that wins the race. */
__device__ __forceinline__ int32_t sample_of_sorted(const row_masses &of, u64 mine, const mm_cu_row_sampling &set, const int32_t *map,
                                                    sorted_shared *m) {
  const u64 own = mine ? mm_draw_mass(of.depth(key_of(mine))) : 0, mass = own >= set.least ? own : 0;
  bool kept = mass > 0;
  if (set.top_p < 1) {
    u64 all;
    const u64 through = sum_through(mass, &all, m);
    kept = kept && through - mass < mm_draw_share(set.top_p, all);
  }
  const uint32_t id = (uint32_t)id_of(mine);
  const u64 first = kept ? mm_draw_key(race_bits(map, set.race, id), mass, id) : MM_DRAW_NOBODY;
  return (int32_t)(join_block<kSampleThreads>(first, smaller()) & (MM_DRAW_IDS - 1));
}
/* Samples the rows that best[row] marks as left (large_sampling.cu); resets it to zero. */
cudaError_t mm_cu_sample_rest(const mm_cu_sample &a, uint32_t rows, cudaStream_t s);

#endif
