/* Draws by the rule of sample.h, to the bit, that one block cannot have at once (sample_rows.cu), and logprobs: a cluster of blocks a row.
 *
 * The blocks read the row once and hold its logits in shared memory as keys. Chunks of ids go round the blocks, so that logits that fall
 * with the id are spread too. A standing is (key << 32 | ~id): larger is likelier, equal logits by lower id. Sums of masses are whole
 * numbers and the race has one winner, so nothing depends on the order in which blocks and threads come.
 *
 * - No cut: each thread's ids race, then the blocks' first.
 * - Top-p, or top-k of many: masses and ids are counted in 64 bins by the six highest bits of the ids' rank in the order of the row, the
 *   first bin from above that reaches the cut by the next six, and so on, until the first block can sort what is left of it. The rank:
 *   mm_draw_depth, which is even where logits are not, then key and id.
 * - The largest few, in order: the k-th largest of the largest keys of groups of threads bounds them (sample_rows.cu); ids that are not
 * below it go to the first block, which sorts them. When they are too many (equal logits), the cut is found as above, and its ids sorted.
 */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/sampling/sampling.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>
#define MM_ROW_BLOCKS 8
#else
#define MM_ROW_BLOCKS 1 /* there are no clusters */
#endif

namespace {

constexpr uint32_t kBlocks = MM_ROW_BLOCKS, kThreads = kSampleThreads, kWarps = kSampleWarps;
constexpr uint32_t kChunk = 128, kAhead = 4; /* ids that a warp reads at a time; such reads under way */
constexpr uint32_t kGroups = kThreads / 8;
constexpr uint32_t kDigit = 6, kBins = 1u << kDigit, kColumns = 8;
constexpr uint32_t kQueue = 64;                                      /* ids that a warp has collected, at most */
constexpr uint32_t kSegment = 4000 * kColumns / kThreads * kThreads; /* ids that a block counts at a time: a column's sums fit 32 bits */

/* Shared memory of a block, before its keys. */
struct alignas(16) row_shared {
  union {
    uint32_t bins[3][kBins][kColumns]; /* this block's ids; the lowest 20 bits of their masses; the rest */
    struct {
      sorted_shared sorted;                            /* its list: of the first block */
      alignas(16) uint32_t largest[kGroups * kBlocks]; /* each group's largest key */
    } few;
  };
  uint32_t queue[kWarps][kQueue]; /* of each warp: places of keys */
  u64 bin_mass[2][kBins];         /* of all blocks; two digits in turn */
  uint32_t bin_count[2][kBins];
  u64 best[kBlocks], winner[kBlocks]; /* of each block: its best standing; the first in its race */
  double sum[kBlocks];
  uint32_t sent_by[kBlocks]; /* how many ids each block sent to the list */
  uint32_t sent, listed;     /* by this block; in the first block, by all */
  u64 cut, cut_mass;
  uint32_t time; /* of the block's first in the race, as bits */
};

/* All blocks of a row wait for each other, and see what each wrote before it arrived. */
__device__ __forceinline__ void row_arrive() {
#if MM_ROW_BLOCKS > 1
  cooperative_groups::this_cluster().barrier_arrive();
#endif
}
__device__ __forceinline__ void row_wait() {
#if MM_ROW_BLOCKS > 1
  cooperative_groups::this_cluster().barrier_wait();
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void row_sync() { row_arrive(), row_wait(); }
__device__ __forceinline__ uint32_t row_rank() {
#if MM_ROW_BLOCKS > 1
  return cooperative_groups::this_cluster().block_rank();
#else
  return 0;
#endif
}
/* The same place of another block of the row, which must have begun and not have ended. */
template <class T>
__device__ __forceinline__ T *in_block(T *mine, uint32_t rank) {
#if MM_ROW_BLOCKS > 1
  return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
#else
  return mine;
#endif
}

/* The part of a row that is sampled from: ids with a key of at least `cut` (0: all), and their `mass`. */
struct row_cut {
  u64 cut, mass;
};

/* A block's part of a row under its settings. */
template <bool kHolds>
struct row_part : row_masses {
  row_shared &m;
  uint32_t *const held; /* its keys, where kHolds */
  const logits_row row;
  const uint32_t rank, slots; /* places of keys in each block */
  int set;                    /* of the counters of all blocks: the one that is zero and next */
  u64 lowest;                 /* lowest standing whose mass may be sampled; 1 where masses do not matter */

  /* The id of a place. */
  __device__ uint32_t id(uint32_t slot) const { return (slot / kChunk * kBlocks + rank) * kChunk + slot % kChunk; }
  __device__ u64 load();
  template <class Take>
  __device__ void scan(u64 from, u64 to, uint32_t begin, uint32_t end, Take take) const;
  template <class Wanted>
  __device__ uint32_t lowest_key(Wanted wanted) const;
  __device__ uint32_t gather(u64 from, u64 to) const;
  __device__ __forceinline__ void count_bins(u64 from, u64 to, int shift, bool by_depth);
  __device__ __forceinline__ void sort_cut(uint32_t listed, uint32_t count, u64 wanted, u64 mass_above) const;
  __device__ row_cut find_cut(uint32_t count, double part, u64 all);
  __device__ u64 largest(uint32_t count, uint32_t *n);
  __device__ u64 race(const row_cut &kept, u64 draw, const int32_t *map) const;
  __device__ row_part(row_shared &m, const float *logits, const mm_cu_sample &a, uint32_t slots)
      : row_masses{0, 1},
        m(m),
        held(reinterpret_cast<uint32_t *>(&m + 1)),
        row(logits, a),
        rank(row_rank()),
        slots(slots),
        set(0),
        lowest(1) {}
};

/* Reads the row; its best standing. */
template <bool kHolds>
__device__ u64 row_part<kHolds>::load() {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = slots / kChunk;
  if (threadIdx.x < kBins) {
    for (int set = 0; set < 2; set++) m.bin_mass[set][threadIdx.x] = 0, m.bin_count[set][threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) m.sent = m.listed = 0;
  row_arrive();
  u64 best = 0;
  for (uint32_t c = warp; c < chunks; c += kAhead * kWarps) {
    uint4 keys[kAhead];
    uint32_t first[kAhead];
#pragma unroll
    for (uint32_t n = 0; n < kAhead; n++) {
      const uint32_t at = c + n * kWarps;
      first[n] = at < chunks ? id(at * kChunk + 4 * lane) : row.vocab;
    }
    row.keys_ahead(first, keys);
#pragma unroll
    for (uint32_t n = 0; n < kAhead; n++) {
      const uint32_t slot = (c + n * kWarps) * kChunk + 4 * lane;
      if (kHolds && slot < slots) *reinterpret_cast<uint4 *>(held + slot) = keys[n];
      best = max(best, best_of(keys[n], id(slot)));
    }
  }
#pragma unroll
  for (int d = 4; d > 0; d /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, d));
  row_wait(); /* all blocks have begun */
  if (lane % 8 < kBlocks) in_block(&m, lane % 8)->few.largest[rank * kGroups + threadIdx.x / 8] = key_of(best);
  best = join_block<kThreads>(best, larger());
  if (threadIdx.x < kBlocks) in_block(&m, threadIdx.x)->best[rank] = best;
  row_sync();
  for (uint32_t b = 0; b < kBlocks; b++) best = max(best, m.best[b]);
  return best;
}

/* take(standing), for the ids at places begin … end - 1 that stand between `from` and `to`, these included; from is above 0. Where a warp
 * has not one for each lane it collects them until it has. */
template <bool kHolds>
template <class Take>
__device__ void row_part<kHolds>::scan(u64 from, u64 to, uint32_t begin, uint32_t end, Take take) const {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, lowest = key_of(from), span = key_of(to) - lowest;
  uint32_t *const queue = m.queue[warp];
  uint32_t head = 0, tail = 0;
  const auto key = [&](uint32_t slot) { return kHolds ? held[slot] : row.key(id(slot)); };
  bool ended = false;
#pragma unroll 1
  for (uint32_t four = begin + threadIdx.x; !ended; four += kAhead * kThreads) {
    ended = four >= end; /* for all lanes at once */
    uint32_t wanted = 0; /* bits: of the thread's four */
#pragma unroll
    for (uint32_t n = 0; n < kAhead; n++) {
      const uint32_t slot = four + n * kThreads, k = slot < end ? key(slot) : 0;
      const u64 at = standing(k, id(slot));
      wanted |= (uint32_t)(k - lowest <= span && at >= from && at <= to) << n;
    }
    if (!ended && !__any_sync(0xffffffffu, wanted)) continue;
#pragma unroll 1
    for (uint32_t n = 0; n < (ended ? 1 : kAhead); n++) {
      const uint32_t all = __ballot_sync(0xffffffffu, wanted >> n & 1);
      uint32_t slot = four + n * kThreads;
      bool mine = true;
      if (all != 0xffffffffu) {
        if (wanted >> n & 1) queue[(tail + __popc(all & ((1u << lane) - 1))) % kQueue] = slot;
        tail += __popc(all);
        if (tail - head < 32 && !ended) continue;
        __syncwarp();
        mine = lane < tail - head, slot = queue[(head + lane) % kQueue];
        __syncwarp();
        head += 32;
      }
      if (mine) take(standing(key(slot), id(slot)));
    }
  }
}

/* The lowest key, not above the largest logit's, that is as wanted, where all from some key on are: every warp tries 32 keys at a time. */
template <bool kHolds>
template <class Wanted>
__device__ uint32_t row_part<kHolds>::lowest_key(Wanted wanted) const {
  const uint32_t lane = threadIdx.x % 32, most = ordered(top);
  uint32_t without = 0; /* the highest key that is known not to be */
#pragma unroll 1
  for (int shift = 27; shift >= -3; shift -= 5) {
    const uint32_t step = shift > 0 ? 1u << shift : 1, tried = without + lane * step;
    const bool lies = (shift > 0 || lane < 4) && tried < most && (tried == 0 || !wanted(depth(tried)));
    without += (__popc(__ballot_sync(0xffffffffu, lies)) - 1) * step;
  }
  return without + 1;
}

/* Sends the ids that stand between two places to the first block's list, as far as it has room; how many there are. */
template <bool kHolds>
__device__ uint32_t row_part<kHolds>::gather(u64 from, u64 to) const {
  row_shared *const first = in_block(&m, 0);
  scan(from, to, 0, slots, [&](u64 at) {
    atomicAdd(&m.sent, 1u);
    const uint32_t place = atomicAdd(&first->listed, 1u);
    if (place < kSorted) first->few.sorted.list[place] = at;
  });
  __syncthreads();
  if (threadIdx.x < kBlocks) in_block(&m, threadIdx.x)->sent_by[rank] = m.sent;
  row_sync();
  uint32_t n = 0;
  for (uint32_t b = 0; b < kBlocks; b++) n += m.sent_by[b];
  if (threadIdx.x == 0) m.sent = m.listed = 0; /* nobody sends again before the next row_sync */
  return n;
}

/* Adds this block's ids from standing `from` to `to`, and their masses, to all blocks' bins of one digit: of ~depth >> 2, or of the
 * standing. */
template <bool kHolds>
__device__ __forceinline__ void row_part<kHolds>::count_bins(u64 from, u64 to, int shift, bool by_depth) {
  const uint32_t t = threadIdx.x;
  for (uint32_t begin = 0; begin < slots; begin += kSegment) {
    __syncthreads(); /* what shares the bins' memory has been read */
    for (uint32_t i = t; i < 3 * kBins * kColumns; i += kThreads) (&m.bins[0][0][0])[i] = 0;
    __syncthreads();
    scan(from, to, begin, min(begin + kSegment, slots), [&](u64 at) {
      const uint32_t d = depth(key_of(at));
      const u64 mass = mm_draw_mass(d);
      const uint32_t bin = (by_depth ? ~d >> 2 >> shift : (uint32_t)(at >> shift)) & (kBins - 1), column = t % kColumns;
      atomicAdd(&m.bins[0][bin][column], 1u);
      atomicAdd(&m.bins[1][bin][column], (uint32_t)mass & 0xfffff), atomicAdd(&m.bins[2][bin][column], (uint32_t)(mass >> 20));
    });
    __syncthreads();
    static_assert(kThreads == kBins * kColumns && kColumns == 8, "a thread for each column of a bin");
    const uint32_t bin = t / 8, column = t % 8;
    uint32_t n = m.bins[0][bin][column];
    u64 mass = m.bins[1][bin][column] + ((u64)m.bins[2][bin][column] << 20);
#pragma unroll
    for (int b = 4; b > 0; b /= 2) n += __shfl_xor_sync(0xffffffffu, n, b), mass += __shfl_xor_sync(0xffffffffu, mass, b);
    if (n && t % 8 < kBlocks) {
      row_shared *const other = in_block(&m, t % 8);
      atomicAdd(&other->bin_count[set][bin], n), atomicAdd(&other->bin_mass[set][bin], mass);
    }
  }
}

/* In the first block: sorts the listed ids, and gives all blocks the cut at the first that makes `count` of them, or with the mass above
 * them `wanted`; else at the last. */
template <bool kHolds>
__device__ __forceinline__ void row_part<kHolds>::sort_cut(uint32_t listed, uint32_t count, u64 wanted, u64 mass_above) const {
  const uint32_t t = threadIdx.x;
  const u64 mine = sort_ids(&m.few.sorted, listed);
  u64 all_listed;
  const u64 mass = mass_above + sum_through(t < listed ? mm_draw_mass(depth(key_of(mine))) : 0, &all_listed, &m.few.sorted);
  const bool enough = t < listed && (t + 1 >= count || mass >= wanted);
  const uint32_t before = join_block<kThreads>(enough ? t : kThreads, smaller());
  if (t == before || (t + 1 == listed && before == kThreads)) {
    for (uint32_t b = 0; b < kBlocks; b++) in_block(&m, b)->cut = mine, in_block(&m, b)->cut_mass = mass;
  }
}

/* The fewest from the top that are `count` or hold the share `part` of `all`, 0 standing for the mass of the row; everything when they
 * never do. */
template <bool kHolds>
__device__ row_cut row_part<kHolds>::find_cut(uint32_t count, double part, u64 all) {
  const uint32_t t = threadIdx.x, lane = t % 32;
  u64 wanted = part < 1 && all ? mm_draw_share(part, all) : ~UINT64_C(0);
  u64 mass_above = 0, found = 0, from = lowest, to = ~UINT64_C(0); /* the digits found; where the search goes on */
  uint32_t count_above = 0;
  bool by_depth = true;
  int shift = 24;
  for (;;) {
    count_bins(from, to, shift, by_depth);
    const uint32_t *const bin_count = m.bin_count[set];
    const u64 *const bin_mass = m.bin_mass[set];
    set ^= 1;
    if (t < kBins) m.bin_count[set][t] = 0, m.bin_mass[set][t] = 0;
    row_sync();
    /* Every warp: lane l has the bins 63 - 2l and 62 - 2l. */
    const uint32_t high = kBins - 1 - 2 * lane, count_high = bin_count[high], count_both = count_high + bin_count[high - 1];
    const u64 mass_high = bin_mass[high], mass_both = mass_high + bin_mass[high - 1];
    uint32_t n = count_both;
    u64 mass = mass_both;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, n, d);
      const u64 mass_left = __shfl_up_sync(0xffffffffu, mass, d);
      if (lane >= d) n += left, mass += mass_left;
    }
    const u64 total = __shfl_sync(0xffffffffu, mass, 31);
    if (part < 1 && !all) wanted = mm_draw_share(part, all = total);
    n += count_above - count_both, mass += mass_above - mass_both; /* above the lane's bins */
    const bool in_high = n + count_high >= count || mass + mass_high >= wanted;
    const uint32_t reached = __ballot_sync(0xffffffffu, in_high || n + count_both >= count || mass + mass_both >= wanted);
    if (!reached) return {0, mass_above + total};
    if (!in_high) n += count_high, mass += mass_high;
    const uint32_t lane_of = __ffs(reached) - 1, bin = __shfl_sync(0xffffffffu, in_high ? high : high - 1, lane_of);
    count_above = __shfl_sync(0xffffffffu, n, lane_of), mass_above = __shfl_sync(0xffffffffu, mass, lane_of);
    found |= (u64)bin << shift;
    if (by_depth) { /* the digits are the highest of ~depth >> 2 */
      const uint32_t first = (uint32_t)found << 2, after = first + (4u << shift);
      from = max(from, (u64)lowest_key([&](uint32_t d) { return d <= ~first; }) << 32);
      if (after) to = ((u64)lowest_key([&](uint32_t d) { return d <= ~after; }) << 32) - 1;
    } else {
      from = max(from, found), to = min(to, found | ((UINT64_C(1) << shift) - 1));
    }
    if (bin_count[bin] <= kSorted) break; /* the last digit of a standing leaves one id */
    if (by_depth && shift == 0) {
      by_depth = false, found = 0, shift = 60;
    } else {
      shift -= kDigit;
    }
  }
  const uint32_t listed = gather(from, to);
  if (rank == 0) sort_cut(listed, count_above < count ? count - count_above : 0, wanted, mass_above);
  row_sync();
  return {m.cut, m.cut_mass};
}

/* The `count` ≤ kMostListed largest in falling order, one a thread of the first block, 0 after the last. */
template <bool kHolds>
__device__ u64 row_part<kHolds>::largest(uint32_t count, uint32_t *n) {
  const uint32_t from = bound_of(m.few.largest, kGroups * kBlocks, count, &m.few.sorted);
  uint32_t found = gather((u64)from << 32, ~UINT64_C(0));
  if (found > kSorted) found = gather(find_cut(count, 1, 0).cut, ~UINT64_C(0));
  *n = min(found, count);
  if (rank) return 0;
  const u64 mine = sort_ids(&m.few.sorted, found);
  return threadIdx.x < count ? mine : 0;
}

/* The first of the race between the thread's ids that are kept; MM_DRAW_NOBODY: none ran, or others were before them. */
template <bool kHolds>
__device__ u64 row_part<kHolds>::race(const row_cut &kept, u64 draw, const int32_t *map) const {
  u64 first = MM_DRAW_NOBODY;
  if (threadIdx.x == 0) m.time = __float_as_uint(INFINITY);
  __syncthreads();
  scan(max(kept.cut, lowest), ~UINT64_C(0), 0, slots, [&](u64 at) {
    const uint32_t v = (uint32_t)id_of(at), d = depth(key_of(at));
    const u64 bits = race_bits(map, draw, v);
    const float time = __uint_as_float(*(volatile uint32_t *)&m.time);
    if (mm_draw_late(bits, __uint_as_float((127 + 40 - (d >> 26)) << 23), time)) return;
    const u64 mass = mm_draw_mass(d), mine = mass ? mm_draw_key(bits, mass, v) : first;
    if (mine < first) first = mine, atomicMin(&m.time, __float_as_uint(mm_draw_time(mine)));
  });
  return first;
}

extern __shared__ __align__(16) uint8_t row_memory[];

template <bool kHolds>
__global__ void __launch_bounds__(kThreads, 2) sample_large(const __grid_constant__ mm_cu_sample a, uint32_t slots) {
  const uint32_t i = blockIdx.x / kBlocks;
  grid_wait_and_launch_next();
  if (a.best[i] == 0) return; /* sample_rows.cu sets best for rows that it leaves to this kernel; reset below */
  row_shared &m = *reinterpret_cast<row_shared *>(row_memory);
  row_part<kHolds> p(m, a.logits + (size_t)i * a.vocab_rows, a, slots);
  const mm_cu_row_sampling set = a.sampling[i];
  p.top = from_ordered(key_of(p.load())), p.scale = set.scale;
  const u64 least = set.least ? set.least : 1; /* masses fall with the depth (random_draw.h) */
  p.lowest = (u64)p.lowest_key([&](uint32_t d) { return mm_draw_mass(d) >= least; }) << 32;
  if (p.rank == 0 && threadIdx.x == 0) a.best[i] = 0; /* all have read it */
  const bool few = set.top_k && set.top_k < a.vocab, part = set.top_p < 1;
  const uint32_t most = few ? set.top_k : a.vocab;
  row_cut kept = {0, 0};
#pragma unroll 1
  for (bool top_p = !few; !top_p || part; top_p = true) {
    kept = p.find_cut(most, top_p ? set.top_p : 1, kept.mass);
    if (top_p) break;
  }
  u64 first = join_block<kThreads>(p.race(kept, set.race, a.map), smaller());
  if (threadIdx.x == 0) in_block(&m, 0)->winner[p.rank] = first;
  row_sync();
  if (p.rank || threadIdx.x) return;
  for (uint32_t b = 0; b < kBlocks; b++) first = min(first, m.winner[b]);
  store_id(a, i, slot_of(a, i), (int32_t)(first & (MM_DRAW_IDS - 1)));
}

/* A row's logprobs, from the logits as the model gave them. */
template <bool kHolds>
__global__ void __launch_bounds__(kThreads, 2)
    write_logprobs(const __grid_constant__ mm_cu_sample a, const __grid_constant__ mm_cu_sample_options q, uint32_t slots) {
  grid_wait_and_launch_next();
  const uint32_t i = blockIdx.x / kBlocks;
  const mm_cu_row_options options = q.row[i];
  if (!options.logprobs) return;
  const float *const logits = options.raw ? q.raw + (size_t)(options.raw - 1) * a.vocab : a.logits + (size_t)i * a.vocab_rows;
  row_shared &m = *reinterpret_cast<row_shared *>(row_memory);
  row_part<kHolds> p(m, logits, a, slots);
  const u64 best = p.load();
  p.top = best ? from_ordered(key_of(best)) : 0;
  double sum = 0;
  p.scan(1, ~UINT64_C(0), 0, slots, [&](u64 at) { sum += exp((double)from_ordered(key_of(at)) - p.top); });
  sum = join_block<kThreads>(sum, plus());
  if (threadIdx.x == 0) in_block(&m, 0)->sum[p.rank] = sum;
  const uint32_t most = options.logprobs - 1;
  uint32_t n = 0;
  u64 mine = 0;
  if (most && best) {
    mine = p.largest(most, &n);
  } else {
    row_sync();
  }
  if (p.rank) return;
  sum = 0;
  for (uint32_t b = 0; b < kBlocks; b++) sum += m.sum[b];
  const auto logprob = [&](int32_t id) -> mm_logprob { return {id, id < 0 ? -INFINITY : (float)((double)logits[id] - p.top - log(sum))}; };
  mm_logprob *const out = q.logprobs + (size_t)i * MM_CU_LOGPROBS;
  if (threadIdx.x < most) out[1 + threadIdx.x] = logprob(threadIdx.x < n ? id_of(mine) : -1);
  if (threadIdx.x == 0) out[0] = logprob(a.id[i]);
}

/* Launches kernel(args…, slots), a cluster a row: held(args…, slots) where blocks have room for its keys. */
template <class Kernel, class... Args>
cudaError_t launch_rows(Kernel *kernel, Kernel *held, const mm_cu_sample &a, uint32_t rows, cudaStream_t s, Args... args) {
  const unsigned blocks = mm_cu_built_here() >= MM_CU_BUILT_DEPENDENT ? kBlocks : 1;
  const uint32_t slots = ceil_div(ceil_div(a.vocab, kChunk), blocks) * kChunk;
  const size_t fixed_bytes = sizeof(row_shared), all = fixed_bytes + slots * sizeof(uint32_t);
  const bool holds = all + 1024 <= mm_cu_shared_most(); /* in addition to the shared memory of join_block */
  return launch_clusters(holds ? held : kernel, rows * blocks, blocks > 1 ? blocks : 0, kThreads, holds ? all : fixed_bytes, s, args...,
                         slots);
}

}  // namespace

cudaError_t mm_cu_sample_rest(const mm_cu_sample &a, uint32_t rows, cudaStream_t s) {
  return launch_rows(sample_large<false>, sample_large<true>, a, rows, s, a);
}

cudaError_t mm_cu_logprobs(const mm_cu_sample &a, const mm_cu_sample_options &q, uint32_t rows, cudaStream_t s) {
  return q.logprobs_wanted ? launch_rows(write_logprobs<false>, write_logprobs<true>, a, rows, s, a, q) : cudaSuccess;
}
