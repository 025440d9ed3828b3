/* Attention over blocks for rows of prefill chunks on sm_90a: eight rows of one sequence that stand side by
 * side read the blocks of their lists together, each block once.
 *
 * Shapes: grid (eighths of tiles, kv head), 288 threads: a warp for each row, whose up to 16 query heads are
 * the rows of mma.m16n8k16, and one that fetches. Phases:
 * - union: the rows' lists, ascending, become one ascending list of the blocks that any of them reads, and
 * which rows do.
 * - fetch: 32 keys and values at a time go through a ring in shared memory, positions behind the last row's
 * as zeros.
 * - multiply: each warp takes the tiles of its own row's blocks in their order and passes over the others,
 * up to the ring's length ahead of the slowest; running maximum and sum in base 2.
 * A row's bits depend on that row alone: not on the rows next to it, nor on where its chunk begins. Shared
 * memory: 11 tiles of 32 · 2 · (D + 8) · 2 bytes (191 KB for D = 128) and 7 KB of lists.
 *
 * Unions are small where neighbours select alike: of eight rows 1.4 to 2.0 lists' length in a trained model,
 * 5.4 where queries are random. Maths: runtime/cpu/cpu_gqa.c (attend_blocks). */
#include "formats/model.h"
#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kRows = 8, kThreads = 32 * (kRows + 1), kKeys = 32, kStages = 11, kPad = 8, kSubtiles = MM_CU_TILE / kRows;
constexpr uint32_t kEntries = kRows * MM_MAX_BLOCKS;

template <int D>
struct key_tile {
  bf16 k[kKeys][D + kPad], v[kKeys][D + kPad];
};
template <int D>
struct tile_shared {
  key_tile<D> stage[kStages];
  uint32_t list[kEntries], block[kEntries];   /* of each row [top_k]; the union */
  uint8_t first[kEntries], who[kEntries + 1]; /* rows that read a block, at its first entry; of the union, 0 behind the last */
  uint64_t full[kStages], empty[kStages];
};

/* Rows of the block: of one sequence, the first at position pos. */
struct row_tile {
  int32_t slot;
  uint32_t first, count, pos;
  __device__ __forceinline__ row_tile(const mm_cu_tiles &t, uint32_t i) {
    const uint2 tile = t.tile[i / kSubtiles];
    const mm_cu_span span = t.span[tile.x];
    const uint32_t from = tile.y + i % kSubtiles * kRows;
    slot = span.slot, first = span.first + from, pos = span.pos + from;
    count = from < span.count ? min(span.count - from, kRows) : 0;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Blocks of a row at this position. */
__device__ __forceinline__ uint32_t blocks_of(const mm_cu_block_lists &l, uint32_t pos) { return min(l.top_k, pos / l.size + 1); }

/* The whole block. */
template <int D>
__device__ __forceinline__ void unite(tile_shared<D> &sh, const mm_cu_block_lists &l, const row_tile &rows, uint32_t index_head) {
  const uint32_t entries = rows.count * l.top_k;
  const auto valid = [&](uint32_t e) { return e % l.top_k < blocks_of(l, rows.pos + e / l.top_k); };
  for (uint32_t e = threadIdx.x; e < entries; e += kThreads) {
    const uint32_t row = e / l.top_k, i = e % l.top_k;
    const bool all = (rows.pos + row) / l.size < l.top_k; /* a list of all blocks need not be read */
    if (valid(e)) sh.list[e] = all ? i : l.block[((size_t)(rows.first + row) * l.heads + index_head) * l.top_k + i];
  }
  for (uint32_t e = threadIdx.x; e <= entries; e += kThreads) sh.who[e] = 0;
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < entries; e += kThreads) {
    uint32_t who = 0;
    for (uint32_t j = 0; valid(e) && j < entries; j++) who |= (uint32_t)(valid(j) && sh.list[j] == sh.list[e]) << (j / l.top_k);
    sh.first[e] = (uint8_t)((who & ((1u << (e / l.top_k)) - 1)) == 0 ? who : 0);
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < entries; e += kThreads) {
    if (!sh.first[e]) continue;
    uint32_t before = 0;
    for (uint32_t j = 0; j < entries; j++) before += sh.first[j] && sh.list[j] < sh.list[e];
    sh.block[before] = sh.list[e], sh.who[before] = sh.first[e];
  }
  __syncthreads();
}

/* f(first position, rows that read it, stage, parity of its phase) for each tile of the union that some row's position reaches. */
template <int D, class F>
__device__ __forceinline__ void for_tiles(const tile_shared<D> &sh, const mm_cu_block_lists &l, uint32_t last, const F &f) {
  uint32_t stage = 0, parity = 0;
  for (uint32_t u = 0; sh.who[u]; u++) {
    const uint32_t begin = sh.block[u] * l.size, end = min(begin + l.size, last + 1), who = sh.who[u];
    for (uint32_t at = begin; at < end; at += kKeys) {
      f(at, who, stage, parity);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

/* A warp. */
template <int D>
__device__ __forceinline__ void fetch_tiles(tile_shared<D> &sh, const mm_cu_kv &kv, const mm_cu_block_lists &l, const row_tile &rows,
                                            uint32_t kv_heads, uint32_t kv_head) {
  const uint32_t lane = threadIdx.x % 32, last = rows.pos + rows.count - 1;
  const uint32_t *const table = kv.table + (size_t)rows.slot * kv.pages_per_slot;
  for_tiles(sh, l, last, [&](uint32_t at, uint32_t, uint32_t stage, uint32_t parity) {
    const size_t cell = mm_cu_cell(table[at / MM_CU_PAGE], kv_heads, kv_head) + at % MM_CU_PAGE;
    const bf16 *const k = static_cast<const bf16 *>(kv.k) + cell * D, *const v = static_cast<const bf16 *>(kv.v) + cell * D;
    key_tile<D> &to = sh.stage[stage];
    mbarrier_wait(shared_address(&sh.empty[stage]), parity ^ 1);
#pragma unroll
    for (uint32_t i = 0; i < kKeys * D / 8 / 32; i++) {
      const uint32_t piece = i * 32 + lane, row = piece / (D / 8), c = piece % (D / 8) * 8;
      const bool valid = at + row <= last; /* what lies behind reaches no sum */
      copy16_or_zero(&to.k[row][c], k + row * D + c, valid);
      copy16_or_zero(&to.v[row][c], v + row * D + c, valid);
    }
    mbarrier_arrive_copied(shared_address(&sh.full[stage]));
  });
}

/* A row's result so far, of heads g and g + 8. */
template <int D>
struct row_sums {
  float o[D / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

  /* A tile whose first `valid` keys count, one at least. */
  __device__ __forceinline__ void add(const key_tile<D> &tile, const uint32_t (&q)[D / 16][4], uint32_t valid, float scale) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float s[kKeys / 8][4] = {};
    uint32_t f[4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
      for (uint32_t n = 0; n < kKeys / 8; n += 2) {
        ldmatrix4(f, &tile.k[n * 8 + lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
        mma(s[n], q[k], f[0], f[1]);
        mma(s[n + 1], q[k], f[2], f[3]);
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = m[half];
#pragma unroll
      for (uint32_t n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float &v = s[n][2 * half + j];
          v = n * 8 + 2 * t + j < valid ? v * scale : -INFINITY;
          top = fmaxf(top, v);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      shrink[half] = exp2f(m[half] - top), m[half] = top, l[half] *= shrink[half];
#pragma unroll
      for (uint32_t n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float &v = s[n][2 * half + j];
          v = exp2f(v - top), l[half] += v;
        }
      }
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) { /* seldom, once the largest scores have come */
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) o[n][j] *= shrink[j / 2];
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kKeys / 16; h++) {
      const uint32_t p[4] = {pack2(s[2 * h][0], s[2 * h][1]), pack2(s[2 * h][2], s[2 * h][3]), pack2(s[2 * h + 1][0], s[2 * h + 1][1]),
                             pack2(s[2 * h + 1][2], s[2 * h + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        ldmatrix4_trans(f, &tile.v[h * 16 + lane % 16][n * 8 + lane / 16 * 8]);
        mma(o[n], p, f[0], f[1]);
        mma(o[n + 1], p, f[2], f[3]);
      }
    }
  }

  __device__ __forceinline__ void put(bf16 *to, uint32_t group) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      l[half] += __shfl_xor_sync(0xffffffffu, l[half], 1);
      l[half] += __shfl_xor_sync(0xffffffffu, l[half], 2);
      const float f = 1.0f / l[half];
      const uint32_t head = g + 8 * half;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        if (head < group) *reinterpret_cast<uint32_t *>(&to[head * D + n * 8 + 2 * t]) = pack2(o[n][2 * half] * f, o[n][2 * half + 1] * f);
      }
    }
  }
};

/* The warp of a row. */
template <int D>
__device__ __forceinline__ void multiply_tiles(tile_shared<D> &sh, const mm_cu_heads &h, const mm_cu_block_lists &l, const mm_cu_gqa &a,
                                               const row_tile &rows, uint32_t kv_head) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = h.heads / h.kv_heads;
  const uint32_t row = rows.first + warp, pos = rows.pos + warp;
  const bf16 *const from = a.qkv + ((size_t)row * (h.heads + 2 * h.kv_heads) + kv_head * group) * D;
  uint32_t q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t head = g + i % 2 * 8, c = k * 16 + 2 * t + i / 2 * 8;
      q[k][i] = head < group ? *reinterpret_cast<const uint32_t *>(from + head * D + c) : 0;
    }
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  row_sums<D> sums;
  for_tiles(sh, l, rows.pos + rows.count - 1, [&](uint32_t at, uint32_t who, uint32_t stage, uint32_t parity) {
    mbarrier_wait(shared_address(&sh.full[stage]), parity); /* passed over too: no warp is two phases ahead */
    if ((who >> warp & 1) && at <= pos) sums.add(sh.stage[stage], q, pos + 1 - at, scale);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.empty[stage]));
  });
  sums.put(a.o + ((size_t)row * h.heads + kv_head * group) * D, group);
}

#endif

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_block_tiles(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_tiles tiles, const __grid_constant__ mm_cu_kv kv,
                    const __grid_constant__ mm_cu_block_lists lists, const __grid_constant__ mm_cu_gqa a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<tile_shared<D> *>(shared_raw);
  const uint32_t kv_head = blockIdx.y, warp = threadIdx.x / 32, group = h.heads / h.kv_heads;
  const row_tile rows(tiles, blockIdx.x);
  grid_wait_and_launch_next();
  if (rows.count == 0) return;
  if (rows.slot < 0) {
    for (uint32_t i = threadIdx.x; i < rows.count * group * D; i += kThreads)
      a.o[((size_t)(rows.first + i / (group * D)) * h.heads + kv_head * group) * D + i % (group * D)] = __float2bfloat16_rn(0.0f);
    return;
  }
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++)
      mbarrier_init(shared_address(&sh.full[i]), 32), mbarrier_init(shared_address(&sh.empty[i]), rows.count);
  }
  unite(sh, lists, rows, kv_head / (h.kv_heads / lists.heads));
  if (warp == kRows) {
    fetch_tiles(sh, kv, lists, rows, h.kv_heads, kv_head);
  } else if (warp < rows.count) {
    multiply_tiles(sh, h, lists, a, rows, kv_head);
  }
#else
  no_such_code();
#endif
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_block_lists &l, const mm_cu_gqa &a,
                cudaStream_t s) {
  return launch(gqa_block_tiles<D>, dim3(t.count * kSubtiles, h.kv_heads), kThreads, sizeof(tile_shared<D>), s, h, t, kv, l, a);
}

}  // namespace

bool mm_cu_takes_block_tiles(const mm_cu_heads &h, const mm_cu_kv &kv, const mm_cu_block_lists &l) {
  return hopper() && l.block && l.heads > 0 && h.kv_heads % l.heads == 0 && l.size % kKeys == 0 && l.size > 0 && !kv.k_scale &&
         l.top_k > 0 && l.top_k <= MM_MAX_BLOCKS && (h.head_dim == 64 || h.head_dim == 128) && h.heads % h.kv_heads == 0 &&
         h.heads / h.kv_heads <= MM_CU_BLOCK_GROUP;
}

cudaError_t mm_cu_gqa_block_tiles(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                                  const mm_cu_gqa &a, cudaStream_t s) {
  if (!mm_cu_takes_block_tiles(h, kv, l)) return cudaErrorNotSupported;
  return h.head_dim == 64 ? run<64>(h, t, kv, l, a, s) : run<128>(h, t, kv, l, a, s);
}
