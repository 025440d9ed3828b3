/* Sampling of the next token from logits, and the log-likelihood of given tokens.
 *
 * Many blocks a row, each offers its best to one 64-bit maximum; the last block of the row has its id, if sampling is greedy. Under
 * a small top-k they also leave the largest key of each group of ids. k groups have one of at least the k-th largest of these, so
 * all ids of the top k have at least that key, and lie in a group that reaches it: the last block reads those groups again, a little more
 * than k, and sorts the ids that are not below it. All other rows are left for large_sampling.cu. */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/sampling/sampling.cuh"

namespace {

constexpr uint32_t kThreads = kSampleThreads, kScoreThreads = 1024;
constexpr uint32_t kAhead = 4;                                     /* loads of four logits that a thread has under way */
constexpr uint32_t kGroup = MM_CU_SAMPLE_GROUP, kRun = 2 * kGroup; /* ids that a warp reads at a time */
constexpr uint32_t kMostGroups = MM_CU_SAMPLE_GROUPS(MM_CU_SMALL_TOP_K_VOCAB);
static_assert(kRun == kAhead * 32 * 4, "two loads a group");

struct sample_shared : sorted_shared {
  alignas(16) uint32_t largest[kMostGroups]; /* of all groups */
  alignas(16) uint32_t mine[kThreads];       /* each thread's largest of those that are read again: */
  uint32_t group[kMostGroups];
  uint32_t groups, listed;
};

__device__ __forceinline__ uint32_t largest_of(uint4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }

/* Sends those of four ids that are not below the bound, above 0, to the list, as far as it has room. */
__device__ __forceinline__ void list_four(sample_shared *m, uint4 keys, uint32_t first, uint32_t bound) {
  const uint32_t of[] = {keys.x, keys.y, keys.z, keys.w};
  if (largest_of(keys) < bound) return;
#pragma unroll
  for (uint32_t j = 0; j < 4; j++) {
    if (of[j] < bound) continue;
    const uint32_t at = atomicAdd(&m->listed, 1u);
    if (at < kSorted) m->list[at] = standing(of[j], first + j);
  }
}

/* The k largest of a row, falling, one a thread, where too many are near the k-th: group after group, each with the best before it. Equal
 * keys of later groups are not among them. */
__device__ u64 largest_in_turn(sample_shared *m, const logits_row &row, uint32_t groups, uint32_t k, uint32_t bound) {
  const uint32_t t = threadIdx.x;
  static_assert(kGroup + kMostListed <= kSorted, "a group next to the best before it");
  u64 mine = 0, last = 0; /* the thread's; the k-th */
  for (uint32_t g = 0; g < groups; g++) {
    if (m->largest[g] < bound || (last && m->largest[g] <= key_of(last))) continue;
    __syncthreads();
    if (t < k) m->list[t] = mine;
    const uint32_t id = g * kGroup + t;
    if (t < kGroup) m->list[k + t] = standing(row.key(id), id);
    __syncthreads();
    mine = sort_ids(m, k + kGroup);
    __syncthreads();
    if (t == k - 1) m->list[0] = mine;
    __syncthreads();
    last = m->list[0];
  }
  return t < k ? mine : 0;
}

/* Samples a row under a small top-k, by one block. */
__device__ int32_t sample_small_top_k(const mm_cu_sample &a, const logits_row &row, const uint32_t *largest, const mm_cu_row_sampling &set,
                                      u64 best) {
  __shared__ sample_shared m;
  const uint32_t t = threadIdx.x, groups = MM_CU_SAMPLE_GROUPS(a.vocab);
  const uint32_t places = (groups + 127) / 128 * 128;
  for (uint32_t g = t; g < places; g += kThreads) m.largest[g] = g < groups ? __ldcg(largest + g) : 0;
  if (t == 0) m.groups = m.listed = 0;
  __syncthreads();
  uint32_t bound = bound_of(m.largest, places, set.top_k, &m);
  for (uint32_t g = t; g < groups; g += kThreads) {
    if (m.largest[g] >= bound) m.group[atomicAdd(&m.groups, 1u)] = g;
  }
  __syncthreads();
  const uint32_t fours = m.groups * (kGroup / 4);
  u64 mine = 0;
  for (int pass = 0; pass < 3; pass++) {
    if (pass == 2) {
      mine = largest_in_turn(&m, row, groups, set.top_k, bound);
      break;
    }
    uint32_t most = 0;
    for (uint32_t f = t; f < fours; f += kAhead * kThreads) {
      uint4 keys[kAhead];
      uint32_t first[kAhead];
#pragma unroll
      for (uint32_t n = 0; n < kAhead; n++) {
        const uint32_t at = f + n * kThreads;
        first[n] = at < fours ? m.group[at / (kGroup / 4)] * kGroup + at % (kGroup / 4) * 4 : a.vocab;
      }
      row.keys_ahead(first, keys);
#pragma unroll
      for (uint32_t n = 0; n < kAhead; n++) most = max(most, largest_of(keys[n])), list_four(&m, keys[n], first[n], bound);
    }
    m.mine[t] = most;
    __syncthreads();
    if (m.listed <= kSorted) {
      mine = sort_ids(&m, m.listed);
      if (t >= set.top_k) mine = 0;
      break;
    }
    /* A group may hold many of the largest; threads have theirs from all groups. */
    bound = max(bound_of(m.mine, kThreads, set.top_k, &m), bound);
    if (t == 0) m.listed = 0;
    __syncthreads();
  }
  return sample_of_sorted({from_ordered(key_of(best)), set.scale}, mine, set, a.map, &m);
}

template <bool kSamples>
__global__ void __launch_bounds__(kThreads, 2) best_of_row(const __grid_constant__ mm_cu_sample a) {
  const uint32_t i = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const logits_row row(a.logits + (size_t)i * a.vocab_rows, a);
  uint32_t *const largest = a.largest + (size_t)i * MM_CU_SAMPLE_GROUPS(a.vocab);
  grid_wait_and_launch_next();
  const int32_t slot = slot_of(a, i);
  mm_cu_row_sampling set;
  if (kSamples) set = a.sampling[i];
  u64 best = 0;
  for (uint32_t run = blockIdx.x * kSampleWarps + warp; run * kRun < a.vocab; run += gridDim.x * kSampleWarps) {
    const uint32_t first = run * kRun + 4 * lane;
    uint4 keys[kAhead];
    uint32_t of[kAhead];
#pragma unroll
    for (uint32_t n = 0; n < kAhead; n++) of[n] = first + n * 128;
    row.keys_ahead(of, keys);
#pragma unroll
    for (uint32_t n = 0; n < kAhead; n++) best = max(best, best_of(keys[n], first + n * 128));
    if (kSamples) {
#pragma unroll
      for (uint32_t g = 0; g < 2; g++) {
        const uint32_t most = __reduce_max_sync(0xffffffffu, max(largest_of(keys[2 * g]), largest_of(keys[2 * g + 1])));
        if (lane == 0 && run * kRun + g * kGroup < a.vocab) largest[2 * run + g] = most;
      }
    }
  }
  best = join_block<kThreads>(best, larger());
  if (threadIdx.x == 0) atomicMax(&a.best[i], best);
  if (!last_of(&a.ticket[i], gridDim.x)) return;
  best = __ldcg(&a.best[i]);
  int32_t id = id_of(best);
  if (kSamples && best && set.scale >= 0) {
    if (!mm_cu_small_top_k(set.top_k, a.vocab)) return; /* best[i] says that it is left */
    id = sample_small_top_k(a, row, largest, set, best);
  }
  __syncthreads(); /* all have read it */
  if (threadIdx.x == 0) a.best[i] = 0, store_id(a, i, slot, id);
}

/* A block a row. The largest is taken of what is a number; then one that is none makes the sum none. */
__global__ void __launch_bounds__(kScoreThreads) score_row(const __grid_constant__ mm_cu_sample a, const int32_t *target, double *score) {
  grid_wait_and_launch_next();
  const logits_row row(a.logits + (size_t)blockIdx.x * a.vocab_rows, a);
  uint32_t best = 0;
  for (uint32_t v = threadIdx.x; v < a.vocab; v += kScoreThreads) best = max(best, row.key(v));
  best = join_block<kScoreThreads>(best, larger());
  const double top = best ? from_ordered(best) : -INFINITY;
  double sum = 0;
  for (uint32_t v = threadIdx.x; v < a.vocab; v += kScoreThreads) {
    if (!row.barred(v)) sum += exp((double)row.logits[v] - top);
  }
  sum = join_block<kScoreThreads>(sum, plus());
  const int32_t id = target[blockIdx.x];
  if (threadIdx.x == 0) score[blockIdx.x] = top + log(sum) - (row.barred(id) ? -INFINITY : (double)row.logits[id]);
}

}  // namespace

cudaError_t mm_cu_score(const mm_cu_sample &a, const int32_t *target, double *score, uint32_t rows, cudaStream_t s) {
  return launch(score_row, rows, kScoreThreads, 0, s, a, target, score);
}

cudaError_t mm_cu_sample_tokens(const mm_cu_sample &a, uint32_t rows, mm_cu_sampling kind, cudaStream_t s) {
  const unsigned blocks = min(ceil_div(a.vocab, kRun * kSampleWarps), max(4 * multiprocessors() / max(rows, 1u), 1u));
  const cudaError_t e = launch(kind ? best_of_row<true> : best_of_row<false>, dim3(blocks, rows), kThreads, 0, s, a);
  return kind == MM_CU_ANY_SAMPLING && e == cudaSuccess ? mm_cu_sample_rest(a, rows, s) : e;
}

mm_cu_sampling mm_cu_sampling_of(const mm_sampling *set, uint32_t vocab) {
  return set->temperature == 0 ? MM_CU_GREEDY : mm_cu_small_top_k(set->top_k, vocab) ? MM_CU_SMALL_TOP_K : MM_CU_ANY_SAMPLING;
}

mm_cu_row_sampling mm_cu_row_sampling_of(const mm_sampling *set, uint64_t n) {
  mm_cu_row_sampling d;
  if (set->temperature == 0) return d;
  d.scale = mm_draw_scale(set->temperature), d.top_k = set->top_k, d.top_p = set->top_p, d.race = mm_draw_mix(set->seed, n);
  d.least = set->min_p > 0 ? mm_draw_share(set->min_p, MM_DRAW_ONE) : 0;
  return d;
}
