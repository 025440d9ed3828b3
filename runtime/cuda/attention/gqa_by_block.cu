/* Attention over chosen blocks for rows of prefill chunks on sm_90a, block by block: a block's keys and values are
 * read once for all rows that chose it, whichever rows those are, and each row's results are joined afterwards.
 *
 * Neighbours may choose alike (of a trained model) or not at all (random queries: eight rows, eight lists); a block
 * of 128 keys is 64 KB of reads for 16 heads of a row, which alone would take longer than multiplying them. Launches,
 * for so many tiles at a time as there is room for results (16,384 pairs of a row and a block for each index head;
 * many rows for one of the heads after the other, so that more of them share a block):
 * - list: grid (tiles, index heads), 512 threads, for the rounds of all heads. Of each sequence the first tile counts its rows' choices of
 * each block, and cuts the rows of a block into jobs of up to 16 times 64 queries. Shared memory: a counter a block.
 * - multiply: a block a multiprocessor, 512 threads, jobs as they come: a warp fetches keys and values (TMA, a ring
 *   of two jobs), one the queries (64 at a time, row by row, a ring of two for each group); three groups of 128
 *   multiply, each 64 queries at once: q·kᵀ (wgmma), probabilities in registers, p·v. Shared memory: 225 KB.
 * - join: grid (rows, kv heads), a thread for eight columns of a head. In the order of the row's list.
 *
 * Neither jobs nor the order of rows in them are always the same, but a result is its row's and its block's alone,
 * and so a row's bits are. Maths: runtime/cpu/cpu_gqa.c (attend_blocks). */
#include "formats/model.h"
#include "loader/stream/capacity.h"
#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"

namespace {

constexpr uint32_t kDim = 128, kKeys = 128, kStrip = 128, kHalves = kDim * sizeof(bf16) / kStrip;
constexpr uint32_t kListThreads = 512, kThreads = 512, kGroups = 3, kStages = 2, kTile = 64 /* queries */, kJobTiles = 16;
constexpr uint32_t kLeastRows = 1024, kMostTiles = 64;      /* of a round of all heads, at most; of a round */
constexpr uint32_t kLeastGroup = 8, kMostBlocks = 48 << 10; /* of a sequence: counters in shared memory */

/* Rows that read a block: entries [first, first + count). A row's position is its number + shift. */
struct job {
  uint32_t slot, block, keys; /* keys: that the step's end leaves of the block */
  uint32_t head, shift, first, count, unused;
};
static_assert(sizeof(job) == 32, "read as two words of sixteen bytes");
/* A row of the step, and the place of its result: place · top_k + number in its list. */
typedef uint2 entry;
static_assert(kLeastRows == MM_DEVICE_BLOCK_ROWS && kMostTiles * MM_CU_TILE == MM_DEVICE_BLOCK_ROWS_HEAD &&
                  sizeof(job) + sizeof(entry) == MM_DEVICE_BLOCK_JOB && MM_CU_TILE == 64 && kDim == 128,
              "as capacity.h counts");

struct scratch {
  uint32_t *counter; /* jobs, entries, jobs taken; zero between launches */
  job *jobs;
  entry *entries;
  float2 *tops; /* [place, heads]: largest score, base 2, and sum */
  bf16 *part;   /* [place, heads, kDim] */

  /* Of a round with jobs of its own, number `round` of those that are listed together, of so many pairs each. */
  __host__ __device__ scratch of(uint32_t round, uint32_t pairs) const {
    return {counter + 3 * round, jobs + (size_t)round * pairs, entries + (size_t)round * pairs, tops, part};
  }
};
/* Tiles of a round. whole: all of the step in one round of all index heads, and a row's place is its number; else a
 * round for each index head, and place: 64 · tile + row. */
struct round_tiles {
  mm_cu_tiles t;
  bool whole;
  uint32_t pairs; /* of a round */
  __device__ __forceinline__ uint32_t place(uint32_t tile, const mm_cu_span &span, uint32_t from, uint32_t row) const {
    return whole ? span.first + from + row : tile * MM_CU_TILE + row;
  }
};

struct attend_shared {
  uint8_t q[kGroups][kStages][kHalves][kTile * kStrip], k[kStages][kHalves][kKeys * kStrip], v[kStages][kHalves][kKeys * kStrip];
  job next[kStages]; /* count 0: none */
  entry rows[kGroups][kStages][kTile / kLeastGroup];
  uint64_t job_full[kStages], k_full[kStages], v_full[kStages], empty[kStages], q_full[kGroups][kStages], q_empty[kGroups][kStages], v_here;
};
struct attend_maps {
  CUtensorMap q, k, v;
};
struct shape {
  mm_cu_heads h;
  uint32_t group, each;   /* query heads of a kv head; kv heads of an index head */
  uint32_t first, stride; /* query heads of the round: the first, and how many */
};

__device__ __forceinline__ uint32_t blocks_of(const mm_cu_block_lists &l, uint32_t pos) { return min(l.top_k, pos / l.size + 1); }

/* ---- list ---- */

/* The round's tiles of a sequence: their first rows in the span, and their numbers. */
struct own_tiles {
  uint32_t count, from[kMostTiles], tile[kMostTiles];
};

/* False unless this tile is the first of its sequence. The whole block. */
__device__ __forceinline__ bool find_tiles(own_tiles &own, const round_tiles &r, const mm_cu_span &span, uint2 tile) {
  if (r.whole) {
    if (tile.y != 0) return false;
    for (uint32_t i = threadIdx.x; i * MM_CU_TILE < span.count; i += blockDim.x) own.from[i] = i * MM_CU_TILE, own.tile[i] = 0;
    if (threadIdx.x == 0) own.count = (span.count + MM_CU_TILE - 1) / MM_CU_TILE;
  } else {
    bool earlier = false;
    for (uint32_t i = threadIdx.x; i < blockIdx.x; i += blockDim.x) earlier |= r.t.tile[i].x == tile.x;
    if (__syncthreads_or(earlier)) return false;
    for (uint32_t base = 0, found = 0; threadIdx.x < 32 && base < r.t.count; base += 32) { /* a warp */
      const uint32_t i = base + threadIdx.x;
      const uint2 other = i < r.t.count ? r.t.tile[i] : make_uint2(0xffffffffu, 0);
      const uint32_t all = __ballot_sync(0xffffffffu, other.x == tile.x), at = found + __popc(all & ((1u << threadIdx.x) - 1));
      if (other.x == tile.x) own.from[at] = other.y, own.tile[at] = i;
      found += __popc(all), own.count = found;
    }
  }
  __syncthreads();
  return true;
}

/* Sum of v over the threads before, and over all in `total`. */
__device__ __forceinline__ uint32_t sum_before(uint32_t v, uint32_t &total) {
  __shared__ uint32_t of_warp[kListThreads / 32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = v;
#pragma unroll
  for (uint32_t m = 1; m < 32; m *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, m);
    if (lane >= m) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
  for (uint32_t w = 0; w < kListThreads / 32; w++) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  return before + sum - v;
}

/* Counters of blocks become the first entry of each, and jobs for them. The whole block. */
__device__ __forceinline__ void put_jobs(uint32_t *counter, uint32_t blocks, const scratch &s, const mm_cu_span &span, uint32_t head,
                                         uint32_t each_job) {
  __shared__ uint32_t first_entry, first_job;
  const uint32_t share = (blocks + kListThreads - 1) / kListThreads;
  const uint32_t begin = min(blocks, threadIdx.x * share), end = min(blocks, begin + share);
  uint32_t entries = 0, jobs = 0, all_entries, all_jobs;
  for (uint32_t b = begin; b < end; b++) entries += counter[b], jobs += (counter[b] + each_job - 1) / each_job;
  uint32_t entry_at = sum_before(entries, all_entries), job_at = sum_before(jobs, all_jobs);
  if (threadIdx.x == 0) first_job = atomicAdd(s.counter, all_jobs), first_entry = atomicAdd(s.counter + 1, all_entries);
  __syncthreads();
  entry_at += first_entry, job_at += first_job;
  for (uint32_t b = begin; b < end; b++) {
    const uint32_t count = counter[b], keys = min(kKeys, span.pos + span.count - b * kKeys);
    for (uint32_t i = 0; i < count; i += each_job)
      s.jobs[job_at++] = {(uint32_t)span.slot, b, keys, head, span.pos - span.first, entry_at + i, min(each_job, count - i), 0};
    counter[b] = entry_at, entry_at += count;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kListThreads)
    list_rows(const __grid_constant__ round_tiles r, const __grid_constant__ mm_cu_block_lists l, const __grid_constant__ scratch all,
              uint32_t each_job) {
  extern __shared__ uint32_t counter[];
  __shared__ own_tiles own;
  const uint2 tile = r.t.tile[blockIdx.x];
  const mm_cu_span span = r.t.span[tile.x];
  grid_wait_and_launch_next();
  if (span.slot < 0 || !find_tiles(own, r, span, tile)) return;
  const uint32_t blocks = (span.pos + span.count - 1) / kKeys + 1, head = blockIdx.y;
  const scratch s = r.whole ? all : all.of(head, r.pairs);
  for (uint32_t b = threadIdx.x; b < blocks; b += kListThreads) counter[b] = 0;
  __syncthreads();
  const auto for_choices = [&](const auto &f) { /* f(row of the step, place, number in the list, block) */
                                                for (uint32_t e = threadIdx.x; e < own.count * MM_CU_TILE * l.top_k; e += kListThreads) {
                                                  const uint32_t i = e % l.top_k, at = e / l.top_k / MM_CU_TILE,
                                                                 row = e / l.top_k % MM_CU_TILE, in_span = own.from[at] + row;
                                                  if (in_span >= span.count || i >= blocks_of(l, span.pos + in_span)) continue;
                                                  const bool all =
                                                      (span.pos + in_span) / kKeys < l.top_k; /* a list of all blocks need not be read */
                                                  const uint32_t of_step = span.first + in_span;
                                                  f(of_step, r.place(own.tile[at], span, own.from[at], row), i,
                                                    all ? i : l.block[((size_t)of_step * l.heads + head) * l.top_k + i]);
                                                }
  };
  for_choices([&](uint32_t, uint32_t, uint32_t, uint32_t block) { atomicAdd(counter + block, 1); });
  __syncthreads();
  put_jobs(counter, blocks, s, span, head, each_job);
  for_choices([&](uint32_t row, uint32_t place, uint32_t i, uint32_t block) {
    s.entries[atomicAdd(counter + block, 1)] = make_uint2(row, place * l.top_k + i);
  });
}

/* ---- multiply ---- */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr uint32_t kPages = kKeys / MM_CU_PAGE;

__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Values behind the step's last become zeros: they meet probabilities of zero, and must be finite. A warp. */
__device__ __forceinline__ void clear_values(uint8_t (*v)[kKeys * kStrip], uint32_t keys) {
  for (uint32_t at = keys * 8 + threadIdx.x % 32; at < kKeys * 8; at += 32) {
    for (uint32_t c = 0; c < kHalves; c++) reinterpret_cast<uint4 *>(v[c])[at] = make_uint4(0, 0, 0, 0);
  }
  stores_before_wgmma();
  __syncwarp();
}

/* The warp that takes jobs, and fetches their keys and values. */
__device__ __forceinline__ void fetch_blocks(attend_shared &sh, const attend_maps &maps, const shape &x, const mm_cu_kv &kv,
                                             const scratch &s) {
  const uint32_t lane = threadIdx.x % 32, items = s.counter[0] * x.each;
  uint32_t next = 0, here_parity = 0;
  const auto take = [&]() { next = lane == 0 ? atomicAdd(s.counter + 2, 1) : 0; };
  take();
  for (uint32_t n = 0;; n++) {
    const uint32_t item = __shfl_sync(0xffffffffu, next, 0), stage = n % kStages, parity = n / kStages % 2;
    job now = {};
    uint32_t id = 0;
    if (item < items) {
      take();
      const uint4 *const from = reinterpret_cast<const uint4 *>(s.jobs + item / x.each);
      const uint4 a = from[0], b = from[1];
      now = {a.x, a.y, a.z, a.w * x.each + item % x.each, b.x, b.y, b.z, 0};
      if (lane * MM_CU_PAGE < now.keys) id = kv.table[(size_t)now.slot * kv.pages_per_slot + now.block * kPages + lane];
    }
    mbarrier_wait(shared_address(&sh.empty[stage]), parity ^ 1);
    if (lane == 0) {
      sh.next[stage] = now;
      mbarrier_arrive(shared_address(&sh.job_full[stage]));
    }
    if (item >= items) return;
    const uint32_t pages = (now.keys + MM_CU_PAGE - 1) / MM_CU_PAGE, bytes = pages * MM_CU_PAGE * kDim * (uint32_t)sizeof(bf16);
    const auto copy = [&](const CUtensorMap &map, uint8_t(*to)[kKeys * kStrip], uint32_t barrier) {
      if (lane == 0) mbarrier_arrive_expect_tx(barrier, bytes);
#pragma unroll
      for (uint32_t p = 0; p < kPages; p++) {
        const uint32_t page = __shfl_sync(0xffffffffu, id, p);
        if (lane != 0 || p >= pages) continue;
        for (uint32_t c = 0; c < kHalves; c++)
          tma_load(shared_address(to[c]) + p * MM_CU_PAGE * kStrip, &map, c * kStrip, (page * x.h.kv_heads + now.head) * MM_CU_PAGE,
                   barrier);
      }
    };
    copy(maps.k, sh.k[stage], shared_address(&sh.k_full[stage]));
    if (now.keys == kKeys) {
      copy(maps.v, sh.v[stage], shared_address(&sh.v_full[stage]));
      continue;
    }
    copy(maps.v, sh.v[stage], shared_address(&sh.v_here));
    mbarrier_wait(shared_address(&sh.v_here), here_parity), here_parity ^= 1;
    clear_values(sh.v[stage], now.keys);
    if (lane == 0) mbarrier_arrive(shared_address(&sh.v_full[stage]));
  }
}

/* The warp that fetches queries: tiles go to the groups in turn. */
__device__ __forceinline__ void fetch_queries(attend_shared &sh, const CUtensorMap &map, const shape &x, const scratch &s) {
  const uint32_t lane = threadIdx.x % 32, rows = kTile / x.group, pitch = x.h.heads + 2 * x.h.kv_heads;
  uint32_t turn = 0;
  for (uint32_t n = 0;; n++) {
    const uint32_t stage = n % kStages;
    mbarrier_wait(shared_address(&sh.job_full[stage]), n / kStages % 2);
    const job now = sh.next[stage];
    if (now.count == 0) return;
    const auto read = [&](uint32_t from) { return from + lane < now.count ? s.entries[now.first + from + lane] : make_uint2(0, 0); };
    entry e = {}, after = read(0); /* 32 at a time */
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.empty[stage]));
    for (uint32_t at = 0; at < now.count; at += rows, turn++) {
      const uint32_t group = turn % kGroups, q_stage = turn / kGroups % kStages, here = min(rows, now.count - at);
      const uint32_t full = shared_address(&sh.q_full[group][q_stage]), from = (at + lane) % 32;
      if (at % 32 == 0) e = after, after = read(at + 32);
      const entry own = make_uint2(__shfl_sync(0xffffffffu, e.x, from), __shfl_sync(0xffffffffu, e.y, from));
      mbarrier_wait(shared_address(&sh.q_empty[group][q_stage]), (turn / (kGroups * kStages) % 2) ^ 1);
      if (lane < here) sh.rows[group][q_stage][lane] = own;
      __syncwarp();
      if (lane == 0) mbarrier_arrive_expect_tx(full, here * x.group * kDim * (uint32_t)sizeof(bf16));
      __syncwarp();
      if (lane >= here) continue;
      for (uint32_t c = 0; c < kHalves; c++)
        tma_load(shared_address(sh.q[group][q_stage][c]) + lane * x.group * kStrip, &map, c * kStrip, own.x * pitch + now.head * x.group,
                 full);
    }
  }
}

/* Scores to probabilities; the rows' largest score and sum in base 2. */
__device__ __forceinline__ void soften(float (&s)[kKeys / 2], float (&top)[2], float (&sum)[2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float m[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, l[4] = {0, 0, 0, 0};
#pragma unroll
    for (uint32_t n = 0; n < kKeys / 8; n++) m[n % 4] = fmaxf(m[n % 4], fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    float most = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    top[half] = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * scale; /* the block's first key is every row's: finite */
#pragma unroll
    for (uint32_t n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        float &x = s[4 * n + 2 * half + i];
        x = exp2_flushed(fmaf(x, scale, -top[half]));
        l[(2 * n + i) % 4] += x;
      }
    }
    float all = (l[0] + l[1]) + (l[2] + l[3]);
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    sum[half] = all + __shfl_xor_sync(0xffffffffu, all, 2);
  }
}

/* A row of 64 queries whose results a thread has a part of, and where they go. */
struct row_result {
  bool there;
  uint32_t place, head, last; /* last: the last key of the block that counts */
};

/* Keys behind the rows' own. */
__device__ __forceinline__ void hide_keys(float (&s)[kKeys / 2], const row_result (&r)[2]) {
#pragma unroll
  for (uint32_t half = 0; half < 2; half++) {
    if (r[half].last >= kKeys - 1) continue;
#pragma unroll
    for (uint32_t n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        float &x = s[4 * n + 2 * half + i];
        x = n * 8 + threadIdx.x % 4 * 2 + i > r[half].last ? -INFINITY : x;
      }
    }
  }
}

/* Unnormalised results of row `half` of a thread's two. */
__device__ __forceinline__ void put_part(const scratch &s, const shape &x, const row_result &r, uint32_t half, const float (&o)[kDim / 2],
                                         float2 top_and_sum) {
  const uint32_t t = threadIdx.x % 4;
  const size_t at = (size_t)r.place * x.stride + r.head - x.first;
  if (r.there && t == 0) s.tops[at] = top_and_sum;
#pragma unroll
  for (uint32_t n = 0; n < kDim / 8; n += 4) {
    uint32_t w[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) w[i] = pack2(o[(n + i) * 4 + 2 * half], o[(n + i) * 4 + 2 * half + 1]);
    turn_words(w);
    if (r.there) __stcs(reinterpret_cast<uint4 *>(s.part + at * kDim + n * 8 + t * 8), make_uint4(w[0], w[1], w[2], w[3]));
  }
}

/* A group's next 64 queries: in which room, how many rows of them there are, and in which stage the job's block is. */
struct tile_turn {
  uint32_t group, q_stage, here, stage, parity;
};

__device__ __forceinline__ void multiply_tile(attend_shared &sh, const shape &x, const scratch &s, const job &now, const tile_turn &y,
                                              float scale) {
  const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t q = shared_address(sh.q[y.group][y.q_stage]), k = shared_address(sh.k[y.stage]), v = shared_address(sh.v[y.stage]);
  uint32_t p[kKeys / 16][4];
  row_result r[2];
  float top[2], sum[2];
  {
    float score[kKeys / 2];
    wgmma_begin();
#pragma unroll
    for (uint32_t i = 0; i < kDim / 16; i++)
      wgmma128(score, operand(q + i / 4 * kTile * kStrip + i % 4 * 32), operand(k + i / 4 * kKeys * kStrip + i % 4 * 32), i);
    wgmma_commit();
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t row = warp * 16 + half * 8, of = row / x.group;
      const entry e = sh.rows[y.group][y.q_stage][of];
      r[half] = {of < y.here, e.y, now.head * x.group + row % x.group + lane / 4, e.x + now.shift - now.block * kKeys};
      if (!r[half].there) r[half].last = kKeys;
    }
    wgmma_wait<0>(score);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.q_empty[y.group][y.q_stage]));
    hide_keys(score, r);
    soften(score, top, sum, scale);
#pragma unroll
    for (uint32_t i = 0; i < kKeys / 4; i++) p[i / 4][i % 4] = pack2(score[2 * i], score[2 * i + 1]);
  }
  float o[kDim / 2] = {};
  mbarrier_wait(shared_address(&sh.v_full[y.stage]), y.parity);
  wgmma_begin();
#pragma unroll
  for (uint32_t i = 0; i < kKeys / 16; i++) wgmma128_turned(o, p[i], operand(v + i * 16 * kStrip, kKeys * kStrip));
  wgmma_commit();
  wgmma_wait<0>(o);
#pragma unroll
  for (uint32_t half = 0; half < 2; half++) put_part(s, x, r[half], half, o, make_float2(top[half], sum[half]));
}

__device__ __forceinline__ void multiply_jobs(attend_shared &sh, const shape &x, const scratch &s, uint32_t group) {
  const float scale = rsqrtf((float)kDim) * 1.4426950408889634f;
  const uint32_t rows = kTile / x.group;
  uint32_t turn = 0; /* of the job's first tile */
  for (uint32_t n = 0;; n++) {
    const uint32_t stage = n % kStages, parity = n / kStages % 2;
    mbarrier_wait(shared_address(&sh.job_full[stage]), parity);
    const job now = sh.next[stage];
    if (now.count == 0) return;
    const uint32_t tiles = (now.count + rows - 1) / rows;
    for (uint32_t i = (group + kGroups - turn % kGroups) % kGroups; i < tiles; i += kGroups) {
      const uint32_t mine = (turn + i) / kGroups, q_stage = mine % kStages;
      mbarrier_wait(shared_address(&sh.q_full[group][q_stage]), mine / kStages % 2);
      mbarrier_wait(shared_address(&sh.k_full[stage]), parity);
      multiply_tile(sh, x, s, now, {group, q_stage, now.count - i * rows, stage, parity}, scale);
    }
    turn += tiles;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&sh.empty[stage]));
  }
}

#endif

__global__ void __launch_bounds__(kThreads, 1) multiply_blocks(const __grid_constant__ attend_maps maps, const __grid_constant__ shape x,
                                                               const __grid_constant__ mm_cu_kv kv, const __grid_constant__ scratch s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  attend_shared &sh = *reinterpret_cast<attend_shared *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&sh.job_full[i]), 1), mbarrier_init(shared_address(&sh.empty[i]), kGroups * 4 + 1);
      mbarrier_init(shared_address(&sh.k_full[i]), 1), mbarrier_init(shared_address(&sh.v_full[i]), 1);
      for (uint32_t g = 0; g < kGroups; g++)
        mbarrier_init(shared_address(&sh.q_full[g][i]), 1), mbarrier_init(shared_address(&sh.q_empty[g][i]), 4);
    }
    mbarrier_init(shared_address(&sh.v_here), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  grid_wait_and_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x < 32)
      fetch_blocks(sh, maps, x, kv, s);
    else if (threadIdx.x < 64)
      fetch_queries(sh, maps.q, x, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    multiply_jobs(sh, x, s, group - 1);
  }
#else
  no_such_code();
#endif
}

/* ---- join ---- */

__global__ void __launch_bounds__(256)
    join_blocks(const __grid_constant__ round_tiles r, const __grid_constant__ shape x, const __grid_constant__ mm_cu_block_lists l,
                const __grid_constant__ scratch s, bf16 *o) {
  const uint32_t tile_number = blockIdx.x / MM_CU_TILE, row = blockIdx.x % MM_CU_TILE;
  const uint32_t head = x.first + blockIdx.y * x.group + threadIdx.x / (kDim / 8), c = threadIdx.x % (kDim / 8) * 8;
  const uint2 tile = r.t.tile[tile_number];
  const mm_cu_span span = r.t.span[tile.x];
  grid_wait_and_launch_next();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 3) s.counter[threadIdx.x] = 0;
  if (tile.y + row >= span.count) return;
  uint4 *const to = reinterpret_cast<uint4 *>(o + ((size_t)(span.first + tile.y + row) * x.h.heads + head) * kDim + c);
  if (span.slot < 0) {
    *to = make_uint4(0, 0, 0, 0);
    return;
  }
  const uint32_t blocks = blocks_of(l, span.pos + tile.y + row);
  const size_t at = (size_t)r.place(tile_number, span, tile.y, row) * l.top_k * x.stride + head - x.first;
  float most = -INFINITY, total = 0, sum[8] = {};
  for (uint32_t i = 0; i < blocks; i++) most = fmaxf(most, s.tops[at + i * x.stride].x);
#pragma unroll 8
  for (uint32_t i = 0; i < blocks; i++) {
    const float2 top = s.tops[at + i * x.stride];
    const uint4 v = __ldcs(reinterpret_cast<const uint4 *>(s.part + (at + i * x.stride) * kDim + c));
    const float f = exp2f(top.x - most);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    total = fmaf(f, top.y, total);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[2 * j] = fmaf(f, low(w[j]), sum[2 * j]), sum[2 * j + 1] = fmaf(f, high(w[j]), sum[2 * j + 1]);
  }
  const float inverse = 1.0f / total;
  uint32_t w[4];
#pragma unroll
  for (int j = 0; j < 4; j++) w[j] = pack2(sum[2 * j] * inverse, sum[2 * j + 1] * inverse);
  *to = make_uint4(w[0], w[1], w[2], w[3]);
}

/* ---- the host's side ---- */

size_t up(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Rows of a round of all heads: whole tiles. */
uint32_t rows_of_round(uint32_t top_k) { return min(kLeastRows, MM_CU_BLOCK_PAIRS / top_k / MM_CU_TILE * MM_CU_TILE); }

/* Rows and index heads of rounds in a step of so many rows: few in rounds of all heads; many in rounds of one head,
 * so that more of them read a block together. */
struct round_shape {
  bool whole;
  uint32_t rows, heads;
  round_shape(uint32_t tokens, uint32_t index_heads, uint32_t top_k) {
    const uint32_t most = rows_of_round(top_k);
    whole = tokens <= most;
    rows = whole ? tokens : min(kMostTiles * MM_CU_TILE, most * index_heads), heads = whole ? index_heads : 1;
  }
};

/* Jobs and results of one round. */
cudaError_t run(const round_tiles &r, const shape &x, const attend_maps &maps, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                const scratch &w, bf16 *o, cudaStream_t s) {
  const cudaError_t e = launch(multiply_blocks, dim3(multiprocessors()), kThreads, sizeof(attend_shared), s, maps, x, kv, w);
  if (e != cudaSuccess) return e;
  return launch(join_blocks, dim3(r.t.count * MM_CU_TILE, x.stride / x.group), x.group * (kDim / 8), 0, s, r, x, l, w, o);
}

}  // namespace

bool mm_cu_wants_by_block(const mm_cu_heads &h, uint32_t index_heads, uint32_t size, uint32_t top_k) {
  if (index_heads == 0 || h.kv_heads % index_heads != 0 || h.heads % h.kv_heads != 0) return false;
  const uint32_t group = h.heads / h.kv_heads;
  return size == kKeys && h.head_dim == kDim && (group == 8 || group == 16) && top_k > 0 && top_k <= MM_MAX_BLOCKS;
}

size_t mm_cu_by_block_work(const mm_cu_heads &h, uint32_t index_heads, uint32_t top_k, uint32_t max_tokens) {
  const size_t pairs = (size_t)min(max_tokens, rows_of_round(top_k)) * top_k;
  const size_t listed = (size_t)round_shape(max_tokens, index_heads, top_k).rows * top_k * index_heads;
  return 256 + up(listed * (sizeof(job) + sizeof(entry))) + up(pairs * h.heads * (sizeof(float2) + kDim * sizeof(bf16)));
}

bool mm_cu_takes_by_block(const mm_cu_heads &h, const mm_cu_kv &kv, const mm_cu_block_lists &l) {
  return hopper() && l.block && !kv.k_scale && mm_cu_wants_by_block(h, l.heads, l.size, l.top_k) &&
         kv.pages_per_slot / (kKeys / MM_CU_PAGE) < kMostBlocks;
}

cudaError_t mm_cu_gqa_by_block(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                               const mm_cu_gqa &a, cudaStream_t s) {
  if (!mm_cu_takes_by_block(h, kv, l)) return cudaErrorNotSupported;
  const uint32_t group = h.heads / h.kv_heads, kv_each = h.kv_heads / l.heads;
  const size_t listed = (size_t)round_shape(a.max_tokens, l.heads, l.top_k).rows * l.top_k * l.heads;
  const size_t results = (size_t)min(a.max_tokens, rows_of_round(l.top_k)) * l.top_k * h.heads;
  char *at = static_cast<char *>(a.work);
  scratch w;
  w.counter = reinterpret_cast<uint32_t *>(at), at += 256;
  w.jobs = reinterpret_cast<job *>(at), w.entries = reinterpret_cast<entry *>(w.jobs + listed),
  at += up(listed * (sizeof(job) + sizeof(entry)));
  w.part = reinterpret_cast<bf16 *>(at), w.tops = reinterpret_cast<float2 *>(w.part + results * kDim);
  attend_maps maps;
  const uint64_t row = kDim * sizeof(bf16);
  cudaError_t e =
      mm_cu_map_boxes(&maps.q, a.qkv, row, (uint64_t)a.tokens * (h.heads + 2 * h.kv_heads), kStrip, group, CU_TENSOR_MAP_SWIZZLE_128B);
  /* The largest row number, which the page table bounds. */
  if (e == cudaSuccess) e = mm_cu_map_boxes(&maps.k, kv.k, row, INT32_MAX, kStrip, MM_CU_PAGE, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess) e = mm_cu_map_boxes(&maps.v, kv.v, row, INT32_MAX, kStrip, MM_CU_PAGE, CU_TENSOR_MAP_SWIZZLE_128B);
  const round_shape rounds(a.tokens, l.heads, l.top_k);
  const uint32_t each = rounds.whole ? t.count : rounds.rows / MM_CU_TILE, blocks = kv.pages_per_slot / (kKeys / MM_CU_PAGE) + 1;
  for (uint32_t i = 0; i < t.count; i += each) {
    const round_tiles r = {{t.span, t.tile + i, min(each, t.count - i)}, rounds.whole, rounds.rows * l.top_k};
    if (e == cudaSuccess)
      e = launch(list_rows, dim3(r.t.count, l.heads), kListThreads, blocks * sizeof(uint32_t), s, r, l, w, kJobTiles * kTile / group);
    for (uint32_t head = 0; e == cudaSuccess && head < l.heads; head += rounds.heads) {
      const shape x = {h, group, kv_each, head * kv_each * group, rounds.heads * kv_each * group};
      e = run(r, x, maps, kv, l, w.of(rounds.whole ? 0 : head, r.pairs), a.o, s);
    }
  }
  return e;
}
