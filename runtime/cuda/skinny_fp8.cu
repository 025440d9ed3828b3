/* y = x·Wᵀ of at most 64 rounded rows with block FP8 weights on sm_90a (fp8.h): the weights are read once, at the memory's rate.
 *
 * A cluster of 2, 4 or 8 blocks takes tiles of 64 weight rows, each block its share of the columns, so that its part of all rows' codes
 * stays in shared memory. One warp asks the copy engine for 128 columns of a tile at a time, as far ahead as there is room, long before the
 * codes of the rows are known. Two groups multiply such stages in turn (wgmma, E4M3, weight rows its M side, the rows of x its N side);
 * what the tensor cores sum of 128 columns is scaled and added in f32. Each block of the cluster has a share of a tile's rows, for which
 * all groups of all blocks write their sums into its shared memory; three more warps add those, in that order, while the groups go on with
 * the next tile. So a row's bits depend on the shape and the device alone. */
#include <atomic>

#include "runtime/cuda/fp8.cuh"
#include "runtime/cuda/hopper.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/tensor_map.h"

namespace {

constexpr uint32_t kThreads = 384, kTile = 64, kLine = 128, kStage = kTile * kLine, kGroups = 2;
[[maybe_unused]] constexpr uint32_t kAdders = 3; /* warps */
constexpr uint32_t kMostBlocks = 8, kLeastStages = 4, kMostStages = 20, kRoom = 226 * 1024;

/* Columns of a block are `lines` times 128; shared memory by offset. */
struct few_plan {
  uint32_t tiles, lines, all_lines, stages;
  uint32_t ring, sums, x_scale, w_scale, barriers; /* codes of x lie first */
};
/* Sums of a tile: [block][group][weight row of the share][row of x], free of bank conflicts. */
__host__ __device__ constexpr uint32_t sums_pitch(uint32_t rows) { return (rows + 4) * 4; }
__host__ __device__ constexpr uint32_t sums_bytes(uint32_t rows) { return kGroups * kTile * sums_pitch(rows); }

struct few_barriers {
  uint64_t x, full[kMostStages], empty[kMostStages], summed[2], read[2];
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
__device__ __forceinline__ void store_counted(uint32_t to, float a, float b, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to), "f"(a), "f"(b),
               "r"(barrier)
               : "memory");
}

/* What a thread works with: its block's tiles are cluster, cluster + clusters, …, its lines rank, rank + blocks, …: those of a
 * cluster read side by side. */
struct few_block {
  const few_plan &p;
  const mm_cu_weight &w;
  const mm_cu_product &a;
  uint32_t shared, rank, blocks, cluster, clusters, count;
  few_barriers *bar;

  __device__ uint32_t at(const uint64_t &barrier) const { return shared_address(&barrier); }
};

/* One warp. */
__device__ __forceinline__ void fetch_weights(const few_block &b, const CUtensorMap *map) {
  if (threadIdx.x % 32 != 0) return;
  uint32_t at = 0, phase = 1;
  for (uint32_t tile = b.cluster; tile < b.p.tiles; tile += b.clusters) {
    const float *scale = static_cast<const float *>(b.w.scale) + (tile * kTile >> b.w.cell_n_log2) * b.w.scale_pitch;
    for (uint32_t line = b.rank; line < b.p.all_lines; line += b.blocks) {
      const uint32_t full = b.at(b.bar->full[at]);
      barrier_wait(b.at(b.bar->empty[at]), phase);
      copy4_to(b.shared + b.p.w_scale + at * 4, scale + (line * kLine >> b.w.cell_k_log2));
      barrier_arrive_copied(full);
      barrier_arrive_expecting(full, kStage);
      tensor_copy_once(b.shared + b.p.ring + at * kStage, map, line * kLine, tile * kTile, full);
      if (++at == b.p.stages) at = 0, phase ^= 1;
    }
  }
}

/* Another warp, once the rows are known: their codes, [line][row][128], and scales, [line][row]. */
template <int kRows>
__device__ __forceinline__ void fetch_rows(const few_block &b, const CUtensorMap *map) {
  const uint32_t lane = threadIdx.x % 32, full = b.at(b.bar->x);
  if (lane == 0) {
    barrier_arrive_expecting(full, b.count * kRows * kLine);
    for (uint32_t i = 0; i < b.count; i++) tensor_copy(b.shared + i * kRows * kLine, map, (b.rank + i * b.blocks) * kLine, 0, full);
  }
  for (uint32_t i = lane; i < b.count * kRows; i += 32) {
    const uint32_t row = i % kRows;
    const float s = row < b.a.x.rows ? b.a.x.scale[(size_t)(b.rank + i / kRows * b.blocks) * b.a.x.scale_pitch + row] : 0.0f;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(b.shared + b.p.x_scale + i * 4), "f"(s) : "memory");
  }
  barrier_arrive(full);
}

/* d[64, R] (+)= a[64, 32] · b[R, 32]ᵀ, both e4m3, in blocks of 128 columns. */
__device__ __forceinline__ void multiply_few(float (&d)[4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_few(float (&d)[8], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;\n}"
      : MM_F8(d, 0)
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_few(float (&d)[16], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1;\n}"
      : MM_F8(d, 0), MM_F8(d, 8)
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_few(float (&d)[32], uint64_t a, uint64_t b, int add) { wgmma_e4m3(d, a, b, add); }

/* A group of 128 threads. */
template <int kRows>
__device__ __forceinline__ void multiply_stages(const few_block &b, uint32_t group) {
  constexpr int kSums = kRows / 2;
  const uint32_t share = kTile / b.blocks, lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  barrier_wait(b.at(b.bar->x), 0);
  uint32_t at = 0, phase = 0, turn = 0, n = 0;
  for (uint32_t tile = b.cluster; tile < b.p.tiles; tile += b.clusters, n++) {
    float out[kSums] = {};
    for (uint32_t line = 0; line < b.count; line++, turn ^= 1) {
      if (turn == group) {
        float part[kSums];
        const uint32_t codes = b.shared + b.p.ring + at * kStage, x = b.shared + line * kRows * kLine;
        barrier_wait(b.at(b.bar->full[at]), phase);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_few(part, operand(codes + k * 32), operand(x + k * 32), k > 0);
        wgmma_commit();
        const float scale = shared_float(b.shared + b.p.w_scale + at * 4);
        float2 of[kRows / 8];
#pragma unroll
        for (int i = 0; i < kRows / 8; i++)
          asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                       : "=f"(of[i].x), "=f"(of[i].y)
                       : "r"(b.shared + b.p.x_scale + (line * kRows + i * 8 + lane % 4 * 2) * 4)
                       : "memory");
        wgmma_wait<0>(part);
        __syncwarp(); /* the scales are read */
        if (lane == 0) barrier_arrive(b.at(b.bar->empty[at]));
#pragma unroll
        for (int i = 0; i < kSums; i++) out[i] = fmaf(part[i], scale * (i % 2 ? of[i / 4].y : of[i / 4].x), out[i]);
      }
      if (++at == b.p.stages) at = 0, phase ^= 1;
    }
    barrier_wait(b.at(b.bar->read[n % 2]), n / 2 % 2 ^ 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t in = row + h * 8, owner = in / share, from = b.rank * kGroups + group;
      const uint32_t to = block_address(
          b.shared + b.p.sums + n % 2 * sums_bytes(kRows) + (from * share + in % share) * sums_pitch(kRows) + lane % 4 * 8, owner);
      const uint32_t barrier = block_address(b.at(b.bar->summed[n % 2]), owner);
#pragma unroll
      for (int i = 0; i < kRows / 8; i++) store_counted(to + i * 32, out[i * 4 + 2 * h], out[i * 4 + 2 * h + 1], barrier);
    }
  }
}

/* kAdders warps: this block's share of each tile's rows, four rows of x a thread. */
template <int kRows>
__device__ __forceinline__ void add_sums(const few_block &b) {
  constexpr uint32_t kBytes = kGroups * kTile * kRows * 4;
  const uint32_t share = kTile / b.blocks, wide = b.w.n, thread = threadIdx.x - 32, lane = threadIdx.x % 32;
  uint32_t n = 0;
  for (uint32_t tile = b.cluster; tile < b.p.tiles; tile += b.clusters, n++) {
    const uint32_t summed = b.at(b.bar->summed[n % 2]);
    if (thread == 0) barrier_arrive_expecting(summed, kBytes);
    barrier_wait(summed, n / 2 % 2);
    for (uint32_t i = thread; i < (b.a.x.rows + 3) / 4 * share; i += kAdders * 32) {
      const uint32_t t = i / share * 4, row = i % share, column = tile * kTile + b.rank * share + row;
      uint32_t from = b.shared + b.p.sums + n % 2 * sums_bytes(kRows) + row * sums_pitch(kRows) + t * 4;
      float sum[4] = {};
#pragma unroll 4
      for (uint32_t j = 0; j < b.blocks * kGroups; j++, from += share * sums_pitch(kRows)) {
        float v[4];
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k] += v[k];
      }
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        if (t + k >= b.a.x.rows || column >= wide) continue;
        const size_t to = (size_t)(t + k) * wide + column;
        if (b.a.y32) {
          b.a.y32[to] = sum[k];
        } else {
          b.a.y[to] = __float2bfloat16_rn(sum[k]);
        }
      }
    }
    __syncwarp();
    if (tile + 2 * b.clusters >= b.p.tiles) continue; /* nobody waits for that: a block that ends is told nothing more */
    if (lane < b.blocks) barrier_arrive_pair(block_address(b.at(b.bar->read[n % 2]), lane));
  }
}

#endif

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    skinny_fp8(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const __grid_constant__ few_plan p,
               const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_product a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t few_shared[];
  few_block b = {p, w, a, shared_address(few_shared), cluster_rank(), cluster_blocks(), 0, 0, 0, nullptr};
  b.cluster = blockIdx.x / b.blocks, b.clusters = gridDim.x / b.blocks;
  b.count = (p.all_lines + b.blocks - 1 - b.rank) / b.blocks;
  b.bar = reinterpret_cast<few_barriers *>(few_shared + p.barriers);
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    barrier_open(b.at(b.bar->x), 33);
    for (uint32_t i = 0; i < p.stages; i++) barrier_open(b.at(b.bar->full[i]), 2), barrier_open(b.at(b.bar->empty[i]), 4);
    for (uint32_t i = 0; i < 2; i++) barrier_open(b.at(b.bar->summed[i]), 1), barrier_open(b.at(b.bar->read[i]), b.blocks * kAdders);
  }
  if (warp == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  cluster_arrive();
  grid_launch_next();
  if (warp == 0) {
    fetch_weights(b, &w_map); /* its own block's barriers are open already */
    __syncwarp();
    cluster_wait();
    return;
  }
  cluster_wait();
  if (warp < 4) grid_wait();
  if (warp == 1) fetch_rows<kRows>(b, &x_map);
  if (warp < 4) {
    add_sums<kRows>(b);
  } else {
    multiply_stages<kRows>(b, warp / 4 - 1);
  }
#else
  grid_wait();
  grid_launch_next();
#endif
}

/* *most: clusters of so many blocks that the current device runs at once, the same for any plan, as a block fills a multiprocessor. */
template <int kRows>
cudaError_t most_clusters(uint32_t blocks, uint32_t *most) {
  constexpr int kDevices = 16; /* that are remembered */
  static std::atomic<int> known[kDevices][kMostBlocks + 1];
  int device = 0, n = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess && device < kDevices && (*most = (uint32_t)known[device][blocks]) > 0) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute size = {};
  size.id = cudaLaunchAttributeClusterDimension, size.val.clusterDim = {blocks, 1, 1};
  c.gridDim = dim3(blocks), c.blockDim = dim3(kThreads), c.dynamicSmemBytes = kRoom, c.attrs = &size, c.numAttrs = 1;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(skinny_fp8<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)kRoom);
  if (e == cudaSuccess) e = cudaOccupancyMaxActiveClusters(&n, skinny_fp8<kRows>, &c);
  if (e == cudaSuccess && device < kDevices) known[device][blocks] = n;
  *most = (uint32_t)n;
  return e;
}

/* p for clusters of so many blocks; false where it does not fit. */
bool lay_out(few_plan *p, uint32_t rows, uint32_t blocks) {
  p->lines = ceil_div(p->all_lines, blocks);
  p->ring = p->lines * rows * kLine;
  const uint32_t others = p->ring + 2 * sums_bytes(rows) + p->lines * rows * 4 + kMostStages * 4 + sizeof(few_barriers);
  if (others + kLeastStages * kStage > kRoom) return false;
  /* even: a place belongs to one group, which may not look for its next stage before it has read the last one */
  p->stages = min((kRoom - others) / kStage / 2 * 2, kMostStages);
  p->sums = p->ring + p->stages * kStage, p->x_scale = p->sums + 2 * sums_bytes(rows), p->w_scale = p->x_scale + p->lines * rows * 4;
  p->barriers = p->w_scale + kMostStages * 4;
  return true;
}

/* Of a launch, about, in ns on an H200: the codes of x come first. A stage takes its block's share of the memory's rate, or what a block
 * can do alone where that is longer; the exchange of a tile's sums may take longer than its stages. */
uint32_t expected_time(const few_plan &p, uint32_t blocks, uint32_t clusters, uint32_t rows) {
  uint32_t time = p.lines * rows * 6 + blocks * blocks * 25;
  for (uint32_t left = p.tiles; left > 0;) {
    const uint32_t now = min(left, clusters);
    time += max(p.lines * max(now * blocks * 2, 130u), rows * 65), left -= now;
  }
  return time;
}

template <int kRows>
cudaError_t launch_few(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  few_plan best = {};
  uint32_t best_blocks = 0, best_clusters = 0, best_cost = ~0u;
  for (uint32_t blocks = 2; blocks <= kMostBlocks; blocks *= 2) {
    few_plan p = {};
    p.tiles = ceil_div(w.n, kTile), p.all_lines = a.x.pitch / kLine;
    if (!lay_out(&p, kRows, blocks)) continue;
    uint32_t most = 0;
    const cudaError_t e = most_clusters<kRows>(blocks, &most);
    if (e != cudaSuccess) return e;
    if (most == 0) continue;
    const uint32_t clusters = min(p.tiles, most);
    const uint32_t cost = expected_time(p, blocks, clusters, kRows);
    if (cost < best_cost) best = p, best_blocks = blocks, best_clusters = clusters, best_cost = cost;
  }
  if (best_blocks == 0) return mm_cu_gemm_fp8(w, a, s); /* no cluster holds such long rows, or fits this device */
  CUtensorMap x_map, w_map;
  cudaError_t e = mm_cu_map_boxes(&x_map, a.x.code, a.x.pitch, a.x.rows, kLine, kRows, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess) e = mm_cu_map_boxes(&w_map, w.data, w.pitch, w.n, kLine, kTile, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  return launch_clusters(skinny_fp8<kRows>, best_blocks * best_clusters, best_blocks, kThreads, kRoom, s, x_map, w_map, best, w, a);
}

}  // namespace

cudaError_t mm_cu_skinny_fp8(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  if (!mm_cu_multiplies_codes(w)) return cudaErrorNotSupported;
  if (a.x.rows > MM_CU_FEW) return cudaErrorInvalidValue;
  if (a.x.rows == 0) return cudaSuccess;
  return (a.x.rows <= 8 ? launch_few<8> : a.x.rows <= 16 ? launch_few<16> : a.x.rows <= 32 ? launch_few<32> : launch_few<64>)(w, a, s);
}
