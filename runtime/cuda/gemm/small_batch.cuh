/* The core of dense products of at most 64 rows on sm_90a (small_batch_fp8.cu, small_batch_widened.cu): the weights are read once, at the
 * memory's rate.
 *
 * A cluster of 2, 4 or 8 blocks takes tiles of 64 weight rows, each block its share of the columns, so that its part of all rows of x stays
 * in shared memory. One warp loads 128 bytes of a tile's rows at a time by TMA, as far ahead as there are free stages, long before the
 * rows of x are known. Two or three groups multiply such stages in turn. Three more warps add the groups' sums of a tile and send them to
 * the blocks of the cluster, each of which has a share of the tile's rows and adds those of all blocks, in order, while the groups go on
 * with the next tile. A row's bits therefore depend on the shape, the number of rows up to 8, 16, 32 or 64, and the device alone.
 *
 * A Kind says what is multiplied:
 *   kKind                    as dispatch.h says it
 *   kRows, kTurns            8, 16, 32 or 64, the most there may be; groups
 *   kLineX, kLineBack        bytes of the rows for a line, and of their factors
 *   kScaleBytes              of a stage's scales
 *   kFull, kRowsReady        arrivals that complete a stage, and the rows
 *   kLeast                   ns, about, that a block's stage takes where the memory does not bound it
 *   fetch_scales(b, maps, tile, line, to, full)   a warp: their part of kFull, but for the one that expects kFetched bytes
 *   kFetched                 bytes that come by tensor copies: codes, and such scales
 *   copy_rows(b, maps)       warp 1, after grid_wait: rows by copies, or nothing; its arrivals at b.bar->x
 *   make_rows(b, thread)     the groups' threads, likewise
 *   multiply(out, b, s)      a group: out += stage times rows; s.done() when the stage is read */
#ifndef MM_CUDA_SMALL_BATCH_CUH
#define MM_CUDA_SMALL_BATCH_CUH

#include <atomic>

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"
#include "runtime/cuda/gemm/small_batch_rows.cuh"

constexpr uint32_t kStage = kBox * kLine, kMostBlocks = 8, kMostStages = 20, kCapacity = MM_CU_CLUSTER_CAPACITY;
[[maybe_unused]] constexpr uint32_t kAdders = 3; /* warps */
template <class Kind>
constexpr uint32_t cluster_threads() {
  return 128 * (1 + Kind::kTurns);
}

/* Shared memory by offset; the rows of x lie first. */
struct cluster_plan {
  uint32_t tiles, all_lines, stages;
  uint32_t ring, scales, sums, sent, back, barriers;
};
/* Sums of a tile: [turn][weight row][row of x] of the block, and sent to it [block][weight row of the share][row of x]; read free of bank
 * conflicts. */
__host__ __device__ constexpr uint32_t sums_pitch(uint32_t rows) { return (rows + 4) * 4; }
__host__ __device__ constexpr uint32_t sums_bytes(uint32_t rows) { return kBox * sums_pitch(rows); }
/* Tiles whose sums there is room for. */
__host__ __device__ constexpr uint32_t sums_sets(uint32_t rows) { return rows == 64 ? 1 : 2; }
static_assert(kBox == MM_CU_BOX && kLine == MM_CU_LINE && sums_bytes(8) == mm_cu_sums_bytes(8) && sums_sets(64) == mm_cu_sums_sets(64) &&
              sums_sets(32) == mm_cu_sums_sets(32));

struct cluster_barriers {
  uint64_t x, full[kMostStages], empty[kMostStages];
  uint64_t summed[2], taken[2]; /* the groups' sums of a tile: there, and read */
  uint64_t sent[2], read[2];    /* all blocks' */
};
static_assert(sizeof(cluster_barriers) == MM_CU_CLUSTER_BARRIERS);

/* y[rows, n] = x·Wᵀ: x as codes, or as bf16 rows, of which row i is row pick[i]. Exactly one of y and y32 is given. */
struct cluster_job {
  mm_cu_codes codes;
  const __nv_bfloat16 *x;
  const uint32_t *pick; /* or NULL */
  __nv_bfloat16 *y;
  float *y32;
  uint32_t rows;
};
struct cluster_maps {
  CUtensorMap weights, other; /* rows, or scales */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(r));
  return r;
}
/* Warps of all blocks of a cluster. No fence: what is written across blocks is counted at mbarriers. */
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
/* To shared memory of some block of the cluster, counted at its barrier there. */
__device__ __forceinline__ void store_counted(uint32_t to, const float (&v)[4], uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void add_shared(float (&sum)[4], uint32_t from) {
  float v[4];
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
#pragma unroll
  for (int k = 0; k < 4; k++) sum[k] += v[k];
}

/* State of a thread: its block's tiles are cluster, cluster + clusters, …, its lines rank, rank + blocks, …: those of a
 * cluster read side by side. */
struct cluster_block {
  const cluster_plan &p;
  const mm_cu_weight &w;
  const cluster_job &a;
  uint8_t *memory;
  uint32_t shared, rank, blocks, cluster, clusters, count;
  cluster_barriers *bar;

  __device__ uint32_t at(const uint64_t &barrier) const { return shared_address(&barrier); }
};

/* One warp. */
template <class Kind>
__device__ __forceinline__ void fetch_weights(const cluster_block &b, const cluster_maps &maps) {
  uint32_t at = 0, phase = 1;
  for (uint32_t tile = b.cluster; tile < b.p.tiles; tile += b.clusters) {
    for (uint32_t line = b.rank; line < b.p.all_lines; line += b.blocks) {
      const uint32_t full = b.at(b.bar->full[at]);
      mbarrier_wait(b.at(b.bar->empty[at]), phase);
      Kind::fetch_scales(b, maps, tile, line, b.p.scales + at * Kind::kScaleBytes, full);
      if (threadIdx.x % 32 == 0) {
        mbarrier_arrive_expect_tx(full, Kind::kFetched);
        tma_load_once(b.shared + b.p.ring + at * kStage, &maps.weights, line * kLine, tile * kBox, full);
      }
      __syncwarp(); /* no lane is two phases behind */
      if (++at == b.p.stages) at = 0, phase ^= 1;
    }
  }
}

/* A stage, and the block's line that goes with it; codes and x in shared memory, the same numbers in all lanes (uniform). */
struct cluster_stage {
  uint32_t codes, x, scales, back, step, empty; /* step: the line's number */
  __device__ __forceinline__ void done() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }
};

/* A group of 128 threads. */
template <class Kind>
__device__ __forceinline__ void multiply_stages(const cluster_block &b, uint32_t group) {
  constexpr uint32_t kRows = Kind::kRows, kSets = sums_sets(kRows), kTurns = Kind::kTurns;
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  Kind::make_rows(b, threadIdx.x - 128);
  mbarrier_wait(b.at(b.bar->x), 0);
  uint32_t at = group, phase = 0, line = group, n = 0;
  for (uint32_t tile = b.cluster; tile < b.p.tiles; tile += b.clusters, n++) {
    const uint32_t first = line; /* not the group's number says which sums are added first, so that a tile's place changes no bits */
    float out[kRows / 2] = {};
    for (; line < b.count; line += kTurns) {
      const cluster_stage s = {uniform(b.shared + b.p.ring + at * kStage),
                               uniform(b.shared + line * Kind::kLineX),
                               b.p.scales + at * Kind::kScaleBytes,
                               b.p.back + line * Kind::kLineBack,
                               b.rank + line * b.blocks,
                               b.at(b.bar->empty[at])};
      mbarrier_wait(b.at(b.bar->full[at]), phase);
      Kind::multiply(out, b, s);
      at += kTurns;
      if (at >= b.p.stages) at = group, phase ^= 1;
    }
    line -= b.count;
    mbarrier_wait(b.at(b.bar->taken[n % kSets]), n / kSets % 2 ^ 1);
    uint8_t *const to = b.memory + b.p.sums + (n % kSets * kTurns + first) * sums_bytes(kRows) + row * sums_pitch(kRows) + lane % 4 * 8;
#pragma unroll
    for (uint32_t i = 0; i < kRows / 4; i++) {
      const uint32_t h = i % 2, at8 = i / 2;
      *reinterpret_cast<float2 *>(to + h * 8 * sums_pitch(kRows) + at8 * 32) = make_float2(out[at8 * 4 + 2 * h], out[at8 * 4 + 2 * h + 1]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(b.at(b.bar->summed[n % kSets]));
  }
}

/* kAdders warps: four rows of x a thread, of each of the tile's rows, then of this block's share of them. */
template <class Kind>
__device__ __forceinline__ void add_sums(const cluster_block &b) {
  constexpr uint32_t kPitch = sums_pitch(Kind::kRows), kBytes = sums_bytes(Kind::kRows), kSets = sums_sets(Kind::kRows);
  constexpr uint32_t kAtOnce = 4;                                        /* fours of a thread */
  const uint32_t log2 = 31 - __clz(kBox / b.blocks), share = 1u << log2; /* of the tile's rows */
  const uint32_t wide = b.w.n, thread = threadIdx.x - 32, lane = threadIdx.x % 32, fours = (b.a.rows + 3) / 4;
  const float global = b.w.global ? b.w.global[0] : 1.0f;
  uint32_t n = 0;
  for (uint32_t tile = b.cluster; tile < b.p.tiles; tile += b.clusters, n++) {
    const uint32_t set = n % kSets, phase = n / kSets % 2, sent = b.p.sent + set * kBytes;
    const uint32_t all = b.at(b.bar->sent[set]);
    if (thread == 0) mbarrier_arrive_expect_tx(all, fours * kBox * 16);
    mbarrier_wait(b.at(b.bar->summed[set]), phase);
    mbarrier_wait(b.at(b.bar->read[set]), phase ^ 1);
    for (uint32_t first = thread; first < fours * kBox; first += kAtOnce * kAdders * 32) {
      float sum[kAtOnce][4] = {};
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; k++) {
        const uint32_t i = first + k * kAdders * 32;
#pragma unroll
        for (uint32_t j = 0; j < Kind::kTurns && i < fours * kBox; j++)
          add_shared(sum[k], b.shared + b.p.sums + (set * Kind::kTurns + j) * kBytes + i % kBox * kPitch + i / kBox * 16);
      }
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; k++) {
        const uint32_t i = first + k * kAdders * 32, row = i % kBox, owner = row >> log2;
        if (i < fours * kBox)
          store_counted(block_address(b.shared + sent + ((b.rank << log2) + (row & (share - 1))) * kPitch + i / kBox * 16, owner), sum[k],
                        block_address(all, owner));
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(b.at(b.bar->taken[set]));
    mbarrier_wait(all, phase);
    for (uint32_t i = thread; i < fours * share; i += kAdders * 32) {
      const uint32_t row = i & (share - 1), t = (i >> log2) * 4, column = tile * kBox + b.rank * share + row;
      float sum[4] = {};
#pragma unroll 4
      for (uint32_t j = 0; j < b.blocks; j++) add_shared(sum, b.shared + sent + (j * share + row) * kPitch + t * 4);
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        if (t + k >= b.a.rows || column >= wide) continue;
        const size_t to = (size_t)(t + k) * wide + column;
        if (b.a.y32) {
          b.a.y32[to] = sum[k] * global;
        } else {
          b.a.y[to] = __float2bfloat16_rn(sum[k] * global);
        }
      }
    }
    __syncwarp();
    if (tile + kSets * b.clusters >= b.p.tiles) continue; /* nobody waits for that: a block that ends is published nothing more */
    if (lane < b.blocks) mbarrier_arrive_cluster(block_address(b.at(b.bar->read[set]), lane));
  }
}

#endif

template <class Kind>
__global__ void __launch_bounds__(cluster_threads<Kind>(), 1)
    small_batch_clusters(const __grid_constant__ cluster_maps maps, const __grid_constant__ cluster_plan p,
                         const __grid_constant__ mm_cu_weight w, const __grid_constant__ cluster_job a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t cluster_memory[];
  cluster_block b = {p, w, a, cluster_memory, shared_address(cluster_memory), cluster_rank(), cluster_blocks(), 0, 0, 0, nullptr};
  b.cluster = blockIdx.x / b.blocks, b.clusters = gridDim.x / b.blocks;
  b.count = (p.all_lines + b.blocks - 1 - b.rank) / b.blocks;
  b.bar = reinterpret_cast<cluster_barriers *>(cluster_memory + p.barriers);
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(b.at(b.bar->x), Kind::kRowsReady);
    for (uint32_t i = 0; i < p.stages; i++) mbarrier_init(b.at(b.bar->full[i]), Kind::kFull), mbarrier_init(b.at(b.bar->empty[i]), 4);
    for (uint32_t i = 0; i < 2; i++) {
      mbarrier_init(b.at(b.bar->summed[i]), Kind::kTurns * 4), mbarrier_init(b.at(b.bar->taken[i]), kAdders);
      mbarrier_init(b.at(b.bar->sent[i]), 1), mbarrier_init(b.at(b.bar->read[i]), b.blocks * kAdders);
    }
  }
  if (warp == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  cluster_arrive();
  grid_launch_next_early();
  if (warp == 0) {
    fetch_weights<Kind>(b, maps); /* its own block's barriers are open already */
    __syncwarp();
    cluster_wait();
    return;
  }
  cluster_wait();
  grid_wait();
  if (warp == 1) Kind::copy_rows(b, maps);
  if (warp < 4) {
    add_sums<Kind>(b);
  } else {
    multiply_stages<Kind>(b, warp / 4 - 1);
  }
#else
  no_such_code();
#endif
}

/* *most: clusters of so many blocks that the current device runs at once, the same for any plan, as a block fills a multiprocessor. */
template <class Kind>
cudaError_t most_clusters(uint32_t blocks, uint32_t *most) {
  constexpr int kDevices = 16; /* that are remembered */
  static std::atomic<int> known[kDevices][kMostBlocks + 1];
  int device = 0, n = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess && device < kDevices && (*most = (uint32_t)known[device][blocks]) > 0) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute size = {};
  size.id = cudaLaunchAttributeClusterDimension, size.val.clusterDim = {blocks, 1, 1};
  c.gridDim = dim3(blocks), c.blockDim = dim3(cluster_threads<Kind>()), c.dynamicSmemBytes = kCapacity, c.attrs = &size, c.numAttrs = 1;
  if (e == cudaSuccess) e = allow_shared(small_batch_clusters<Kind>, kCapacity);
  if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&n, small_batch_clusters<Kind>, &c);
  if (e == cudaSuccess && device < kDevices) known[device][blocks] = n;
  *most = (uint32_t)n;
  return e;
}

/* p for clusters of so many blocks; false where it does not fit. */
template <class Kind>
bool lay_out(cluster_plan *p, uint32_t blocks) {
  constexpr uint32_t kBytes = sums_sets(Kind::kRows) * sums_bytes(Kind::kRows), kEach = kStage + Kind::kScaleBytes;
  const uint32_t lines = ceil_div(p->all_lines, blocks);
  if (!mm_cu_cluster_fits(Kind::kKind, lines)) return false;
  p->ring = lines * Kind::kLineX;
  const uint32_t others = mm_cu_cluster_bytes(Kind::kKind, lines);
  /* a place belongs to one group, which may not look for its next stage before it has read the last one */
  p->stages = min((kCapacity - others) / kEach, kMostStages) / Kind::kTurns * Kind::kTurns;
  p->scales = p->ring + p->stages * kStage, p->sums = p->scales + p->stages * Kind::kScaleBytes, p->sent = p->sums + Kind::kTurns * kBytes;
  p->back = p->sent + kBytes, p->barriers = p->back + lines * Kind::kLineBack;
  return true;
}

/* Estimated time of a launch, in ns on an H200: the rows of x come first. A stage takes its block's share of the memory's rate, or what a
 * block can do alone where that is longer; the exchange of a tile's sums may take longer than its stages. */
template <class Kind>
uint32_t expected_time(const cluster_plan &p, uint32_t blocks, uint32_t clusters) {
  const uint32_t lines = ceil_div(p.all_lines, blocks);
  uint32_t time = lines * Kind::kLineX / 21 + blocks * blocks * 25;
  for (uint32_t left = p.tiles; left > 0;) {
    const uint32_t now = min(left, clusters);
    time += max(lines * max(now * blocks * 2, Kind::kLeast), Kind::kRows * 65), left -= now;
  }
  return time;
}

/* Refused where no cluster of blocks holds such long rows, or fits this device. other: the second map. */
template <class Kind>
cudaError_t launch_clusters_of(const mm_cu_weight &w, const cluster_job &a, const CUtensorMap &other, cudaStream_t s) {
  cluster_plan best = {};
  uint32_t best_blocks = 0, best_clusters = 0, best_cost = ~0u;
  for (uint32_t blocks = 2; blocks <= kMostBlocks; blocks *= 2) {
    cluster_plan p = {};
    p.tiles = ceil_div(w.n, kBox), p.all_lines = ceil_div((uint32_t)w.pitch, kLine);
    if (!lay_out<Kind>(&p, blocks)) continue;
    uint32_t most = 0;
    const cudaError_t e = most_clusters<Kind>(blocks, &most);
    if (e != cudaSuccess) return e;
    if (most == 0) continue;
    const uint32_t clusters = min(p.tiles, most);
    const uint32_t cost = expected_time<Kind>(p, blocks, clusters);
    if (cost < best_cost) best = p, best_blocks = blocks, best_clusters = clusters, best_cost = cost;
  }
  if (best_blocks == 0) return cudaErrorNotSupported;
  cluster_maps maps = {{}, other};
  const cudaError_t e = mm_cu_map_boxes(&maps.weights, w.data, w.pitch, w.n, kLine, kBox, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  return launch_clusters(small_batch_clusters<Kind>, best_blocks * best_clusters, best_blocks, cluster_threads<Kind>(), kCapacity, s, maps,
                         best, w, a);
}

#endif
