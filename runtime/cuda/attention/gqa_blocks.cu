/* Attention of rows over the blocks of positions that were selected for them, or over all positions: single
 * tokens, cut into parts, and rows of prefill chunks, each by itself. Layers whose kv heads have up to
 * sixteen query heads, and heads of 32, 64 or 128, in a bf16 cache or an e4m3 one.
 *
 * Shapes: grid (kv head, row, part), 128 threads. A row's positions are a list of tiles of 16 keys, those of
 * its blocks one after another; a warp takes every fourth tile of the block's part, by copies of its own, two
 * tiles ahead, and waits for nobody: sᵀ is not formed, the 16 query heads are the rows of mma.m16n8k16, keys
 * and value columns its 8 columns, and the accumulators of the scores are the left operand of p·v. Running
 * maximum and sum in base 2. Warps merge in shared memory; of several parts the last block to come merges
 * all, in their order. Shared memory: two tiles of keys and values for each warp, (D + 8)·2 bytes a row (68
 * KB for D = 128), dynamic; the warps' results in their place afterwards.
 *
 * Tiles of an e4m3 cache are widened to f16 by their warp when it takes them, and multiplied in f16: scores by the keys' scales, the
 * probabilities by the values' and by 256, which is taken back at the end. Two tiles of codes and one of f16 are 67 KB.
 *
 * The token's own key and value are in the cache already: the kernel before is heads.cu's, and of single tokens the lists and the tiles
 * before their own are fetched while that runs (grid_wait). With split off a row's bits depend on
 * its sequence alone, with it on the number of rows too. A step of many rows of one sequence reads blocks
 * that neighbours share from the L2 cache.
 *
 * Maths: runtime/cpu/cpu_gqa.c (attend, attend_blocks). */
#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kKeys = 16, kGroup = MM_CU_BLOCK_GROUP, kStages = 2, kPad = 8;
constexpr uint32_t kMostParts = 32;

/* An unnormalised result: o = Σ exp2(s - m)·v, l = Σ exp2(s - m), per head of the group. */
template <int D>
struct block_part {
  float o[kGroup][D], m[kGroup], l[kGroup];
};
template <int D>
struct key_tile {
  bf16 k[kKeys][D + kPad], v[kKeys][D + kPad];
};
/* The same as it lies in an e4m3 cache. */
template <int D>
struct code_tile {
  uint8_t k[kKeys][D], v[kKeys][D];
  float k_scale[kKeys], v_scale[kKeys];
};
template <int D, bool kFp8>
struct warp_stages {
  key_tile<D> fetched[kStages];
};
template <int D>
struct warp_stages<D, true> {
  code_tile<D> fetched[kStages];
  key_tile<D> wide; /* f16 */
};
template <int D, bool kFp8>
union block_shared {
  warp_stages<D, kFp8> warp[kWarps];
  block_part<D> part[kWarps];
};
static_assert(sizeof(block_shared<128, false>) + 4096 <= MM_CU_SHARED_LEAST, "it fits everywhere");
static_assert(sizeof(block_shared<128, true>) + 4096 <= MM_CU_SHARED_LEAST, "it fits everywhere");
constexpr float kValueUp = 256; /* keeps probabilities times scales of values in the range of f16 */

struct part_space {
  uint32_t *counter; /* [max_tokens, kv_heads], zero between launches */
  void *part;        /* [rows, kv_heads, parts] of block_part<D> */
  uint32_t parts;
};

/* The tiles of a row under one kv head. */
struct tile_list {
  const uint32_t *block; /* NULL: all positions */
  uint32_t size, each;   /* of a block, in positions and in tiles */
  uint32_t tiles;
  __device__ __forceinline__ tile_list(const mm_cu_block_lists &l, uint32_t row, uint32_t kv_head, uint32_t kv_heads, uint32_t pos) {
    block = nullptr, size = l.size, each = l.size / kKeys, tiles = pos / kKeys + 1;
    if (!l.block || pos / size < l.top_k) return; /* a list of all blocks need not be read */
    block = l.block + ((size_t)row * l.heads + kv_head / (kv_heads / l.heads)) * l.top_k;
    tiles = (l.top_k - 1) * each + pos % size / kKeys + 1; /* the last block is the row's own */
  }
  __device__ __forceinline__ uint32_t position(uint32_t tile) const {
    return block ? block[tile / each] * size + tile % each * kKeys : tile * kKeys;
  }
};

/* Starts the copy of 16 keys and values from `cell` on; those at or past valid become zeros, so that what
 * lies there reaches no sum. */
template <int D>
__device__ __forceinline__ void fetch_tile(key_tile<D> &to, const mm_cu_kv &kv, size_t cell, uint32_t valid) {
  const bf16 *const k = static_cast<const bf16 *>(kv.k) + cell * D, *const v = static_cast<const bf16 *>(kv.v) + cell * D;
#pragma unroll
  for (int i = 0; i < kKeys * D / 8 / 32; i++) {
    const uint32_t at = i * 32 + threadIdx.x % 32, row = at / (D / 8), c = at % (D / 8) * 8;
    copy16_or_zero(&to.k[row][c], k + row * D + c, row < valid);
    copy16_or_zero(&to.v[row][c], v + row * D + c, row < valid);
  }
}

template <int D>
__device__ __forceinline__ void fetch_tile(code_tile<D> &to, const mm_cu_kv &kv, size_t cell, uint32_t valid) {
  const uint8_t *const k = static_cast<const uint8_t *>(kv.k) + cell * D, *const v = static_cast<const uint8_t *>(kv.v) + cell * D;
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + lane) * 16;
    copy16_or_zero(&to.k[0][0] + at, k + at, at / D < valid);
    copy16_or_zero(&to.v[0][0] + at, v + at, at / D < valid);
  }
  const uint32_t c = lane % (kKeys / 4) * 4;
  if (lane < kKeys / 4) copy16(&to.k_scale[c], kv.k_scale + cell + c);
  if (lane >= 16 && lane < 16 + kKeys / 4) copy16(&to.v_scale[c], kv.v_scale + cell + c);
}

/* A fetched tile as it is multiplied, and the scales of its keys and values. For whole warps. */
template <int D>
struct ready_tile {
  const key_tile<D> &keys;
  const float *k_scale, *v_scale; /* NULL: none */
};
template <int D>
__device__ __forceinline__ ready_tile<D> ready(warp_stages<D, false> &w, uint32_t in) {
  return {w.fetched[in], nullptr, nullptr};
}
template <int D>
__device__ __forceinline__ ready_tile<D> ready(warp_stages<D, true> &w, uint32_t in) {
  const code_tile<D> &from = w.fetched[in];
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + threadIdx.x % 32) * 16, row = at / D, c = at % D;
    uint4 *const k = reinterpret_cast<uint4 *>(&w.wide.k[row][c]), *const v = reinterpret_cast<uint4 *>(&w.wide.v[row][c]);
    uint4 wide[2];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&from.k[0][0] + at));
    k[0] = wide[0], k[1] = wide[1];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&from.v[0][0] + at));
    v[0] = wide[0], v[1] = wide[1];
  }
  __syncwarp();
  return {w.wide, from.k_scale, from.v_scale};
}

/* Results of a warp so far: of heads g and g + 8. */
template <int D, bool kFp8>
struct block_sums {
  float o[D / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

  /* A tile, whose first `valid` keys count. */
  __device__ __forceinline__ void add(const ready_tile<D> &tile, const uint32_t (&q)[D / 16][4], uint32_t valid, float scale) {
    const key_tile<D> &now = tile.keys;
    const auto multiply = kFp8 ? mma_half : mma;
    const auto pack = kFp8 ? pack2_half : pack2;
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float s[2][4] = {};
    uint32_t f[4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      ldmatrix4(f, &now.k[lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
      multiply(s[0], q[k], f[0], f[1]);
      multiply(s[1], q[k], f[2], f[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t key = n * 8 + 2 * t + j % 2;
        if (kFp8) s[n][j] *= tile.k_scale[key];
        s[n][j] = key < valid ? s[n][j] * scale : -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(m[half], fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)));
      const float shrink = exp2f(m[half] - top); /* a tile has a key that counts: top is finite */
      m[half] = top, l[half] *= shrink;
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) s[n][2 * half + j] = exp2f(s[n][2 * half + j] - top), l[half] += s[n][2 * half + j];
      }
#pragma unroll
      for (int n = 0; n < D / 8; n++) o[n][2 * half] *= shrink, o[n][2 * half + 1] *= shrink;
    }
#pragma unroll
    for (int n = 0; n < (kFp8 ? 2 : 0); n++) {
#pragma unroll
      for (int j = 0; j < 4; j++) { /* unused cells may hold anything */
        const uint32_t key = n * 8 + 2 * t + j % 2;
        s[n][j] *= key < valid ? tile.v_scale[key] * kValueUp : 0.0f;
      }
    }
    const uint32_t p[4] = {pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]), pack(s[1][0], s[1][1]), pack(s[1][2], s[1][3])};
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      ldmatrix4_trans(f, &now.v[lane % 16][n * 8 + lane / 16 * 8]);
      multiply(o[n], p, f[0], f[1]);
      multiply(o[n + 1], p, f[2], f[3]);
    }
  }

  __device__ __forceinline__ void put(block_part<D> &to) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      l[half] += __shfl_xor_sync(0xffffffffu, l[half], 1);
      l[half] += __shfl_xor_sync(0xffffffffu, l[half], 2);
      if (t == 0) to.m[g + 8 * half] = m[half], to.l[g + 8 * half] = l[half];
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<float2 *>(&to.o[g + 8 * half][n * 8 + 2 * t]) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
    }
  }
};

/* Joins n ≤ kMostParts results in their order, four columns of a head at a time: put(head, column, o, m, l), o
 * unnormalised. One of them at least has a key. far: they were written by other blocks. The whole block calls it, and
 * has a barrier between two calls. */
template <int D, class Put>
__device__ __forceinline__ void join_parts(const block_part<D> *p, uint32_t n, uint32_t group, bool far, const Put &put) {
  constexpr uint32_t kLanes = kThreads / kGroup;
  __shared__ float factor[kGroup][kMostParts], most[kGroup], all[kGroup];
  const auto read = [&](const float *from) { return far ? __ldcg(from) : *from; };
  const uint32_t own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes; /* the head whose factors a thread makes */
  float m[kMostParts / kLanes], top = -INFINITY, total = 0;
#pragma unroll
  for (uint32_t i = 0; i < kMostParts / kLanes; i++) {
    const uint32_t j = i * kLanes + lane;
    m[i] = j < n && own < group ? read(&p[j].m[own]) : -INFINITY;
  }
#pragma unroll
  for (uint32_t i = 0; i < kMostParts / kLanes; i++) top = fmaxf(top, m[i]);
#pragma unroll
  for (uint32_t x = 1; x < kLanes; x *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
#pragma unroll
  for (uint32_t i = 0; i < kMostParts / kLanes; i++) {
    const uint32_t j = i * kLanes + lane;
    if (j >= n || own >= group) continue;
    factor[own][j] = exp2f(m[i] - top), total += factor[own][j] * read(&p[j].l[own]);
  }
#pragma unroll
  for (uint32_t x = 1; x < kLanes; x *= 2) total += __shfl_xor_sync(0xffffffffu, total, x);
  if (lane == 0) most[own] = top, all[own] = total;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < group * D / 4; i += kThreads) {
    const uint32_t head = i / (D / 4), c = i % (D / 4) * 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (uint32_t j = 0; j < n; j++) {
      const float4 *const from = reinterpret_cast<const float4 *>(&p[j].o[head][c]);
      const float4 v = far ? __ldcg(from) : *from;
      const float f = factor[head][j];
      sum.x += f * v.x, sum.y += f * v.y, sum.z += f * v.z, sum.w += f * v.w;
    }
    put(head, c, sum, most[head], all[head]);
  }
}

/* A block's result of a row under one kv head. */
struct row_result {
  bf16 *o;
  uint32_t group, part, used; /* query heads; this part, of so many that have keys */
  size_t place;               /* of the row and kv head in the launch */
};

/* Joins the warps' results, and in the last block of several those of all parts. */
template <int D, bool kFp8>
__device__ __forceinline__ void put_row(const row_result &r, const block_part<D> *of_warps, const part_space &space) {
  const auto put_result = [&](uint32_t head, uint32_t c, float4 v, float, float l) {
    const float f = (kFp8 ? 1.0f / kValueUp : 1.0f) / l;
    *reinterpret_cast<uint2 *>(r.o + head * D + c) = make_uint2(pack2(f * v.x, f * v.y), pack2(f * v.z, f * v.w));
  };
  if (r.used == 1) {
    join_parts<D>(of_warps, kWarps, r.group, false, put_result);
    return;
  }
  block_part<D> *const of_row = static_cast<block_part<D> *>(space.part) + r.place * space.parts;
  join_parts<D>(of_warps, kWarps, r.group, false, [&](uint32_t head, uint32_t c, float4 v, float m, float l) {
    *reinterpret_cast<float4 *>(&of_row[r.part].o[head][c]) = v;
    if (c == 0) of_row[r.part].m[head] = m, of_row[r.part].l[head] = l;
  });
  if (last_of(space.counter + r.place, r.used)) join_parts<D>(of_row, r.used, r.group, true, put_result);
}

/* Fragments of the group's queries, as f16 for an e4m3 cache; zeros for heads that it has not. */
template <int D, bool kFp8>
__device__ __forceinline__ void load_queries(uint32_t (&q)[D / 16][4], const bf16 *from, uint32_t group) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t head = g + i % 2 * 8, c = k * 16 + 2 * t + i / 2 * 8;
      q[k][i] = head < group ? *reinterpret_cast<const uint32_t *>(from + head * D + c) : 0;
      if (kFp8) q[k][i] = pack2_half(low(q[k][i]), high(q[k][i]));
    }
  }
}

/* The tiles [first, end) of a part of a row, one of `used` parts that have any. Few parts are joined sooner than many. */
struct part_tiles {
  uint32_t used, first, end;
  __device__ __forceinline__ part_tiles(uint32_t tiles, uint32_t part, uint32_t parts) {
    const uint32_t turns = (tiles + parts * kWarps - 1) / (parts * kWarps), each = max(turns, (uint32_t)kStages) * kWarps;
    used = (tiles + each - 1) / each, first = part * each, end = min(tiles, (part + 1) * each);
  }
};

template <int D, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    gqa_blocks(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
               const __grid_constant__ mm_cu_block_lists lists, const __grid_constant__ mm_cu_block_job a,
               const __grid_constant__ part_space space) {
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<block_shared<D, kFp8> *>(shared_raw);
  const uint32_t kv_head = blockIdx.x, row = a.first + blockIdx.y, part = blockIdx.z, group = h.heads / h.kv_heads;
  const uint32_t warp = threadIdx.x / 32;
  bf16 *const o = a.o + ((size_t)row * h.heads + kv_head * group) * D;
  const int32_t slot = r.slot[row];
  const uint32_t pos = r.pos[row];
  if (slot < 0) {
    grid_wait_and_launch_next();
    for (uint32_t i = threadIdx.x; part == 0 && i < group * D; i += kThreads) o[i] = __float2bfloat16_rn(0.0f);
    return;
  }
  const tile_list list(lists, row, kv_head, h.kv_heads, pos);
  const part_tiles own(list.tiles, part, space.parts);
  if (part >= own.used) {
    grid_wait_and_launch_next();
    return;
  }

  const uint32_t *const table = kv.table + (size_t)slot * kv.pages_per_slot;
  uint32_t next = own.first + warp; /* the warp's next tile to fetch */
  const auto fetch = [&](auto &to) {
    if (next < own.end) {
      const uint32_t at = list.position(next);
      fetch_tile<D>(to, kv, mm_cu_cell(table[at / MM_CU_PAGE], h.kv_heads, kv_head) + at % MM_CU_PAGE, pos + 1 - at);
    }
    copy_commit();
    next += kWarps;
  };
  /* Only the tiles from its sequence's first row on are of this step, and its list was complete before heads.cu's kernel began. */
  const uint32_t early = a.split ? pos - mm_cu_rows_before(r, row) : 0;
  bool waited = false;
#pragma unroll
  for (int i = 0; i < kStages; i++) {
    if (!waited && next < own.end && list.position(next) + kKeys > early) {
      grid_wait_and_launch_next();
      waited = true;
    }
    fetch(sh.warp[warp].fetched[i]);
  }
  if (!waited) grid_wait_and_launch_next();
  uint32_t q[D / 16][4];
  load_queries<D, kFp8>(q, a.qkv + ((size_t)row * (h.heads + 2 * h.kv_heads) + kv_head * group) * D, group);
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  block_sums<D, kFp8> sums;
#pragma unroll 1
  for (uint32_t tile = own.first + warp, in = 0; tile < own.end; tile += kWarps, in = in + 1 == kStages ? 0 : in + 1) {
    copy_wait<kStages - 1>();
    __syncwarp();
    sums.add(ready<D>(sh.warp[warp], in), q, pos + 1 - list.position(tile), scale);
    __syncwarp(); /* all have read it */
    fetch(sh.warp[warp].fetched[in]);
  }
  copy_wait<0>();
  __syncthreads();
  sums.put(sh.part[warp]);
  __syncthreads();
  put_row<D, kFp8>({o, group, part, own.used, (size_t)blockIdx.y * h.kv_heads + kv_head}, sh.part, space);
}

/* Parts of each row: so many that every multiprocessor has two blocks, or one part. */
uint32_t parts_of(const mm_cu_heads &h, uint32_t rows) { return min(kMostParts, max(1u, 2 * multiprocessors() / (rows * h.kv_heads))); }

size_t counter_bytes(const mm_cu_heads &h, uint32_t max_tokens) {
  return ((size_t)max_tokens * h.kv_heads * sizeof(uint32_t) + 255) / 256 * 256;
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_block_lists &l, const mm_cu_block_job &a,
                const part_space &space, cudaStream_t s) {
  const dim3 grid(h.kv_heads, a.count, space.parts);
  if (kv.k_scale) return launch(gqa_blocks<D, true>, grid, kThreads, sizeof(block_shared<D, true>), s, h, r, kv, l, a, space);
  return launch(gqa_blocks<D, false>, grid, kThreads, sizeof(block_shared<D, false>), s, h, r, kv, l, a, space);
}

}  // namespace

size_t mm_cu_block_work(const mm_cu_heads &h, uint32_t max_tokens) {
  const size_t part = h.head_dim == 32 ? sizeof(block_part<32>) : h.head_dim == 64 ? sizeof(block_part<64>) : sizeof(block_part<128>);
  size_t most = 0; /* of rows that are cut: no more than two blocks to a multiprocessor */
  for (uint32_t rows = 1; rows <= max_tokens && parts_of(h, rows) > 1; rows++)
    most = max(most, (size_t)rows * h.kv_heads * parts_of(h, rows));
  return counter_bytes(h, max_tokens) + most * part;
}

cudaError_t mm_cu_gqa_blocks(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                             const mm_cu_block_job &a, cudaStream_t s) {
  if (h.heads % h.kv_heads != 0 || h.heads / h.kv_heads > (uint32_t)kGroup) return cudaErrorNotSupported;
  if (l.block && (l.heads == 0 || h.kv_heads % l.heads != 0 || l.size == 0 || l.size % kKeys != 0)) return cudaErrorNotSupported;
  if (a.count > a.max_tokens) return cudaErrorInvalidValue;
  if (a.count == 0) return cudaSuccess;
  const part_space space = {static_cast<uint32_t *>(a.work), static_cast<char *>(a.work) + counter_bytes(h, a.max_tokens),
                            a.split ? parts_of(h, a.count) : 1};
  switch (h.head_dim) {
    case 32: return run<32>(h, r, kv, l, a, space, s);
    case 64: return run<64>(h, r, kv, l, a, space, s);
    case 128: return run<128>(h, r, kv, l, a, space, s);
    default: return cudaErrorNotSupported;
  }
}
