/* Scores of blocks for rows of prefill chunks on sm_90a (block_select.cu): products of a tile's rows, whose index
 * heads are rows of their own, with all index keys before them, the largest of each block of 128 keys.
 *
 * Shapes: grid (tiles, parts of the blocks, fours of index heads), 384 threads: a warp that fetches and two groups
 * of 128 that multiply. A group has 64 or 128 rows of queries (row of the tile, index head) in shared memory for
 * good; blocks of keys come by TMA through a ring of four. One wgmma of 64 by 128 is reduced while the next one
 * multiplies. Shared memory: 64 KB of queries, 128 KB of keys. A score depends on its query and its block alone. */
#include "runtime/cuda/attention/block_split.cuh"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"

namespace {

constexpr uint32_t kThreads = 384, kKeys = 128, kDim = 128, kStages = 4, kStrip = 128, kHeads = 4;
constexpr uint32_t kHalves = kDim * sizeof(bf16) / kStrip;

/* Rows in strips of 64 columns, swizzled. */
struct score_shared {
  uint8_t q[kHeads][kHalves][MM_CU_TILE * kStrip], k[kStages][kHalves][kKeys * kStrip];
  uint64_t full[kStages], empty[kStages];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr uint32_t kGroups = 2, kPages = kKeys / MM_CU_PAGE;

/* Blocks of the tile that this block of the grid scores: first, first + step, … below end. */
struct block_range {
  uint32_t first, step, end;
};

/* A warp. */
__device__ __forceinline__ void fetch_keys(score_shared &sh, const CUtensorMap &map, const uint32_t *table, const block_range &r) {
  constexpr uint32_t kAhead = 32 / kPages;
  const uint32_t lane = threadIdx.x;
  uint32_t id = 0, n = 0;
  for (uint32_t b = r.first; b < r.end; b += r.step, n++) {
    if (n % kAhead == 0) {
      const uint32_t block = b + lane / kPages * r.step;
      id = block < r.end ? table[block * kPages + lane % kPages] : 0;
    }
    const uint32_t stage = n % kStages, full = shared_address(&sh.full[stage]);
    mbarrier_wait(shared_address(&sh.empty[stage]), n / kStages % 2 ^ 1);
    if (lane == 0) mbarrier_arrive_expect_tx(full, sizeof sh.k[0]);
#pragma unroll
    for (uint32_t p = 0; p < kPages; p++) {
      const uint32_t page = __shfl_sync(0xffffffffu, id, n % kAhead * kPages + p);
      if (lane != 0) continue;
      for (uint32_t c = 0; c < kHalves; c++)
        tma_load(shared_address(sh.k[stage][c]) + p * MM_CU_PAGE * kStrip, &map, c * kStrip, page * MM_CU_PAGE, full);
    }
  }
}

/* The largest product of each of a thread's two rows; one that is no number counts as none. */
__device__ __forceinline__ void row_maxima(float (&most)[2], const float (&s)[kKeys / 2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float m[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (uint32_t n = 0; n < kKeys / 8; n++) m[n % 4] = fmaxf(m[n % 4], fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    float v = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    most[half] = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
  }
}

/* A group, of whose 64 · kM queries the first `columns` are there; score: that of the first for block 0. */
template <uint32_t kM>
__device__ __forceinline__ void score_keys(score_shared &sh, uint32_t group, const block_range &r, float *score, uint32_t columns,
                                           uint32_t most) {
  const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = warp * 16 + lane / 4;
  uint32_t n = 0;
  for (uint32_t b = r.first; b < r.end; b += r.step, n++) {
    const uint32_t stage = n % kStages, k = shared_address(sh.k[stage]);
    float s[kM][kKeys / 2];
    mbarrier_wait(shared_address(&sh.full[stage]), n / kStages % 2);
#pragma unroll
    for (uint32_t m = 0; m < kM; m++) {
      const uint32_t q = shared_address(sh.q[group * kM + m]);
      wgmma_begin();
#pragma unroll
      for (uint32_t i = 0; i < kDim / 16; i++)
        wgmma128(s[m], operand(q + i / 4 * MM_CU_TILE * kStrip + i % 4 * 32), operand(k + i / 4 * kKeys * kStrip + i % 4 * 32), i);
      wgmma_commit();
    }
#pragma unroll
    for (uint32_t m = 0; m < kM; m++) {
      if (m + 1 < kM) {
        wgmma_wait<1>(s[m]);
      } else {
        wgmma_wait<0>(s[m]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&sh.empty[stage]));
      }
      float top[2];
      row_maxima(top, s[m]);
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        const uint32_t c = m * MM_CU_TILE + column + half * 8;
        if (lane % 4 == half && c < columns) score[(size_t)c * most + b] = top[half];
      }
    }
  }
}

/* Both groups: their queries, zeros behind the last. */
__device__ __forceinline__ void fetch_queries(score_shared &sh, const bf16 *q, uint32_t columns, uint32_t count) {
  for (uint32_t i = threadIdx.x - 128; i < count * (kDim / 8); i += kGroups * 128) {
    const uint32_t row = i / (kDim / 8), piece = i % (kDim / 8);
    uint8_t *const to = sh.q[row / MM_CU_TILE][piece / 8];
    copy16_to(shared_address(to) + swizzled(row % MM_CU_TILE, piece % 8), q + (size_t)(row < columns ? row : 0) * kDim + piece * 8,
              row < columns);
  }
  copy_commit();
  copy_wait<0>();
  stores_before_wgmma();
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

#endif

/* kM: of 64 queries for each group. */
template <uint32_t kM>
__global__ void __launch_bounds__(kThreads, 1) tile_scores(const __grid_constant__ CUtensorMap keys, const __grid_constant__ mm_cu_select a,
                                                           const __grid_constant__ mm_cu_tiles tiles, uint32_t first) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  score_shared &sh = *reinterpret_cast<score_shared *>(raw);
  grid_wait_and_launch_next();
  const uint2 tile = tiles.tile[first + blockIdx.x];
  const mm_cu_span span = tiles.span[tile.x];
  const uint32_t rows = min(span.count - tile.y, (uint32_t)MM_CU_TILE);
  const block_split last(a, span.pos + tile.y + rows - 1); /* of the rows the one with the most blocks */
  const block_range range = {blockIdx.y, gridDim.y, last.count == last.forced ? 0 : last.others};
  if (span.slot < 0 || range.first >= range.end) return;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++)
      mbarrier_init(shared_address(&sh.full[i]), 1), mbarrier_init(shared_address(&sh.empty[i]), kGroups * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) fetch_keys(sh, keys, a.table + (size_t)span.slot * a.pages_per_slot, range);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    constexpr uint32_t kQueries = kGroups * kM * MM_CU_TILE;
    const uint32_t from = blockIdx.z * kQueries, all = rows * a.heads, there = min(max(all, from) - from, kQueries);
    const uint32_t own = (group - 1) * kM * MM_CU_TILE;
    fetch_queries(sh, a.q + ((size_t)(span.first + tile.y) * a.heads + from) * kDim, there, kQueries);
    float *const score = a.score + ((size_t)blockIdx.x * MM_CU_TILE * a.heads + from + own) * a.most;
    score_keys<kM>(sh, group - 1, range, score, max(there, own) - own, a.most);
  }
#else
  no_such_code();
#endif
}

}  // namespace

bool mm_cu_takes_tile_scores(const mm_cu_select &a) { return hopper() && !a.key_scale && a.dim == kDim && a.size == kKeys; }

cudaError_t mm_cu_tile_scores(const mm_cu_select &a, const mm_cu_tiles &t, uint32_t first, uint32_t count, cudaStream_t s) {
  if (!mm_cu_takes_tile_scores(a)) return cudaErrorNotSupported;
  CUtensorMap keys;
  /* The largest row number, which the page table bounds. */
  const cudaError_t e = mm_cu_map_boxes(&keys, a.keys, kDim * sizeof(bf16), INT32_MAX, kStrip, MM_CU_PAGE, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  const bool wide = a.heads > 2;
  const uint32_t fours = ceil_div(a.heads, wide ? kHeads : 2), parts = max(1u, min(a.most, multiprocessors() / (count * fours)));
  return launch(wide ? tile_scores<2> : tile_scores<1>, dim3(count, parts, fours), kThreads, sizeof(score_shared), s, keys, a, t, first);
}
