/* Attention of a draft's blocks and chains (draft_attention.h).
 *
 * The queries of a span that share a kv head, rows · group of them, are taken sixteen at a time. Grid (kv head and sixteen queries, span,
 * part), four warps. A tile is sixteen positions; the tiles of a span are dealt to the warps of its parts in turn. Each warp has the
 * running largest score, mass and sum of its queries in the layout of `mma`: keys come from memory straight into its registers, values
 * through shared memory, 16 · (D + 8) · 2 bytes a warp. The columns of a head are contracted in an order in which a lane's share of a row
 * of keys is 16 bytes: lane t of four has columns 32 c + 8 t … 8 t + 7 of chunk c, for two products of sixteen columns; queries are loaded
 * alike. A chain's row takes the place of a block of one row, whose other rows come from the passes before; the first block of each kv head
 * keeps the row's key and value for the passes behind it, which is what no block of this launch reads.
 *
 * The warps' sums are added in their order. Several parts write their sums to work, and the last part to arrive joins them: it finds the
 * factors of all parts at once, then adds eight columns a thread, eight parts at a time. The number of parts depends on the shapes and the
 * device alone. Of heads of 128 columns, each a group, codes can come along. */
#include <algorithm>

#include "runtime/cuda/attention/draft_attention.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/row.cuh"

namespace {

constexpr uint32_t kWarps = 4, kThreads = kWarps * 32, kKeys = 16, kQueries = 16, kMostParts = 32, kGroups = 1024, kMostDim = 128;
constexpr uint32_t kEach = 2; /* blocks wanted for each multiprocessor */

/* Partial results of one part for its sixteen queries: unnormalised sums, largest scores, masses. */
template <int D>
struct part_sum {
  float o[kQueries][D], top[kQueries], mass[kQueries];
};

/* A span's slot and first row, and the head that a block reads. */
template <int D>
struct block_keys {
  const mm_cu_draft_block &a;
  uint32_t slot, first_row, pos, kv_head;

  __device__ __forceinline__ size_t pitch() const { return (size_t)(a.heads + 2 * a.kv_heads) * D; }
  /* Keys, or values, of sixteen positions from `at` on: those of cells lie in one page. */
  __device__ __forceinline__ const bf16 *cells(uint32_t at, bool value) const {
    if (at >= pos) return nullptr;
    const uint32_t page = a.cells.table[(size_t)slot * a.cells.pages_per_slot + at / MM_CU_PAGE];
    const bf16 *const all = static_cast<const bf16 *>(value ? a.cells.v : a.cells.k);
    return all + (mm_cu_cell(page, a.kv_heads, kv_head) + at % MM_CU_PAGE) * D;
  }
  /* Position at + i, of the cells or of the span's rows. */
  __device__ __forceinline__ uint4 load(const bf16 *cells, uint32_t at, uint32_t i, uint32_t column, bool value) const {
    const uint32_t p = at + i;
    if (p < pos) return *reinterpret_cast<const uint4 *>(cells + i * D + column);
    if (p >= pos + a.pass + a.rows) return make_uint4(0, 0, 0, 0);
    if (p < pos + a.pass) return *reinterpret_cast<const uint4 *>(chained(p - pos, value) + column);
    return *reinterpret_cast<const uint4 *>(own(p - pos - a.pass, value) + column);
  }
  /* Key or value of the span's row i. */
  __device__ __forceinline__ const bf16 *own(uint32_t i, bool value) const {
    return a.qkv + (first_row + i) * pitch() + (size_t)(a.heads + kv_head + (value ? a.kv_heads : 0)) * D;
  }
  /* That of the slot's row of an earlier pass, or the place of this one's. */
  __device__ __forceinline__ bf16 *chained(uint32_t i, bool value) const {
    return a.chain + (((size_t)slot * MM_CU_CHAIN + i) * 2 * a.kv_heads + kv_head + (value ? a.kv_heads : 0)) * D;
  }
};

/* The running state of a lane's two queries, lane / 4 and that + 8: logarithms are to the base 2. */
template <int D>
struct running_sums {
  float o[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, mass[2] = {};

  /* Scores s of two times eight positions, masked; p: their masses as the first operand of the product with the values. */
  __device__ __forceinline__ void add_scores(const float (&s)[2][4], uint32_t (&p)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float next = fmaxf(top[i], most), base = next == -INFINITY ? 0.0f : next, before = exp2f(top[i] - base);
      const float e[4] = {exp2f(s[0][2 * i] - base), exp2f(s[0][2 * i + 1] - base), exp2f(s[1][2 * i] - base),
                          exp2f(s[1][2 * i + 1] - base)};
      top[i] = next, mass[i] = mass[i] * before + (e[0] + e[1]) + (e[2] + e[3]);
      p[i] = pack2(e[0], e[1]), p[2 + i] = pack2(e[2], e[3]);
#pragma unroll
      for (int n = 0; n < D / 8; n++) o[n][2 * i] *= before, o[n][2 * i + 1] *= before;
    }
  }
};

/* The positions that a query reads. */
struct seen {
  uint32_t from, to;
  __device__ __forceinline__ seen(const mm_cu_draft_block &a, uint32_t pos, uint32_t row) {
    const uint32_t own = pos + a.pass + row;
    from = a.window && own + 1 > a.window ? own + 1 - a.window : a.chain != nullptr;
    to = a.causal ? own + 1 : pos + a.rows;
  }
  __device__ __forceinline__ bool operator()(uint32_t p) const { return p >= from && p < to; }
};

/* The tiles of one warp. */
template <int D>
__device__ void run_tiles(running_sums<D> &sum, const block_keys<D> &keys, uint32_t query, uint32_t group, bf16 (&value)[kKeys][D + 8]) {
  const mm_cu_draft_block &a = keys.a;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = 1.44269504f * rsqrtf((float)D);
  uint4 q[2][D / 32];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t at = query + g + 8 * i, row = at / group, head = keys.kv_head * group + at % group;
#pragma unroll
    for (int c = 0; c < D / 32; c++)
      q[i][c] = row < a.rows
                    ? *reinterpret_cast<const uint4 *>(a.qkv + (keys.first_row + row) * keys.pitch() + (size_t)head * D + c * 32 + t * 8)
                    : make_uint4(0, 0, 0, 0);
  }
  const seen sees[2] = {seen(a, keys.pos, (query + g) / group), seen(a, keys.pos, (query + g + 8) / group)};
  const uint32_t step = gridDim.z * kWarps, end = (keys.pos + a.pass + a.rows + kKeys - 1) / kKeys;
  for (uint32_t tile = seen(a, keys.pos, 0).from / kKeys + blockIdx.z * kWarps + warp; tile < end; tile += step) {
    const uint32_t at = tile * kKeys;
    const bf16 *const k = keys.cells(at, false), *const v = keys.cells(at, true);
    float s[2][4] = {};
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const uint4 b = keys.load(k, at, n * 8 + g, c * 32 + t * 8, false);
        const uint32_t low[4] = {q[0][c].x, q[1][c].x, q[0][c].y, q[1][c].y}, high[4] = {q[0][c].z, q[1][c].z, q[0][c].w, q[1][c].w};
        mma(s[n], low, b.x, b.y);
        mma(s[n], high, b.z, b.w);
      }
    }
#pragma unroll
    for (int i = 0; i < (int)(kKeys * D / 8 / 32); i++) {
      const uint32_t piece = i * 32 + lane, key = piece / (D / 8), column = piece % (D / 8) * 8;
      *reinterpret_cast<uint4 *>(&value[key][column]) = keys.load(v, at, key, column, true);
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int x = 0; x < 4; x++) s[n][x] = sees[x / 2](at + n * 8 + 2 * t + x % 2) ? s[n][x] * scale : -INFINITY;
    }
    uint32_t p[4];
    sum.add_scores(s, p);
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      uint32_t b[4];
      ldmatrix4_trans(b, &value[lane % 16][j * 16 + lane / 16 * 8]);
      mma(sum.o[2 * j], p, b[0], b[1]);
      mma(sum.o[2 * j + 1], p, b[2], b[3]);
    }
    __syncwarp();
  }
}

/* The warps' sums as the block's: numbers under the largest score of all, which is left in top[0]; masses in mass[0]. */
template <int D>
__device__ void join_warps(running_sums<D> &sum, float (&o)[kQueries][D], float (&top)[kWarps][kQueries], float (&mass)[kWarps][kQueries]) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum.mass[i] += __shfl_xor_sync(0xffffffffu, sum.mass[i], 1);
    sum.mass[i] += __shfl_xor_sync(0xffffffffu, sum.mass[i], 2);
    if (t == 0) top[warp][g + 8 * i] = sum.top[i], mass[warp][g + 8 * i] = sum.mass[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float most = top[0][g + 8 * i];
    for (uint32_t w = 1; w < kWarps; w++) most = fmaxf(most, top[w][g + 8 * i]);
    factor[i] = most == -INFINITY ? 0.0f : exp2f(sum.top[i] - most);
  }
  for (uint32_t w = 0; w < kWarps; w++) {
    if (warp == w) {
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
          float &to = o[g + x / 2 * 8][n * 8 + 2 * t + x % 2];
          to = (w ? to : 0.0f) + factor[x / 2] * sum.o[n][x];
        }
      }
    }
    __syncthreads();
  }
  float most = -INFINITY, all = 0;
  if (threadIdx.x < kQueries) {
    for (uint32_t w = 0; w < kWarps; w++) most = fmaxf(most, top[w][threadIdx.x]);
    for (uint32_t w = 0; w < kWarps && most != -INFINITY; w++) all += mass[w][threadIdx.x] * exp2f(top[w][threadIdx.x] - most);
    top[0][threadIdx.x] = most, mass[0][threadIdx.x] = all;
  }
  __syncthreads();
}

/* Eight columns of a query of the block, from c on: they belong to one row, as the 16 lanes of a group of codes do. */
template <int D>
__device__ __forceinline__ void finish_query(const block_keys<D> &keys, uint32_t query, uint32_t c, const float (&v)[8]) {
  const mm_cu_draft_block &a = keys.a;
  const uint32_t group = a.heads / a.kv_heads, row = query / group, column = (keys.kv_head * group + query % group) * D + c;
  if (row >= a.rows) return;
  finish8(a.o, (size_t)(keys.first_row + row) * a.heads * D + column, keys.first_row + row, column, v, a.codes);
}

/* The sums of all parts as the queries' results. factor[query][part], mass[query]: room for what each part counts. */
template <int D>
__device__ void join_parts(const part_sum<D> *parts, const block_keys<D> &keys, uint32_t query, float (&factor)[kQueries][kMostParts],
                           float (&mass)[kQueries]) {
  constexpr uint32_t kLanes = kThreads / kQueries, kOwn = kMostParts / kLanes, kAtOnce = 8;
  const uint32_t lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes, count = gridDim.z;
  float top[kOwn], most = -INFINITY, all = 0;
#pragma unroll
  for (uint32_t i = 0; i < kOwn; i++) {
    const uint32_t p = i * kLanes + lane;
    top[i] = p < count ? __ldcg(&parts[p].top[own]) : -INFINITY;
    most = fmaxf(most, top[i]);
  }
#pragma unroll
  for (uint32_t m = 1; m < kLanes; m *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
#pragma unroll
  for (uint32_t i = 0; i < kOwn; i++) {
    const uint32_t p = i * kLanes + lane;
    const float f = top[i] == -INFINITY ? 0.0f : exp2f(top[i] - most);
    factor[own][p] = f;
    if (p < count) all += f * __ldcg(&parts[p].mass[own]);
  }
#pragma unroll
  for (uint32_t m = 1; m < kLanes; m *= 2) all += __shfl_xor_sync(0xffffffffu, all, m);
  if (lane == 0) mass[own] = all;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kQueries * D / 8; i += kThreads) {
    const uint32_t q = i / (D / 8), c = i % (D / 8) * 8;
    float v[8] = {};
    for (uint32_t from = 0; from < count; from += kAtOnce) {
      float4 x[kAtOnce][2];
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; n++) {
        const float4 *const at = reinterpret_cast<const float4 *>(&parts[min(from + n, count - 1)].o[q][c]);
        x[n][0] = __ldcg(at), x[n][1] = __ldcg(at + 1);
      }
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; n++) {
        const float f = from + n < count ? factor[q][from + n] : 0.0f;
        v[0] += f * x[n][0].x, v[1] += f * x[n][0].y, v[2] += f * x[n][0].z, v[3] += f * x[n][0].w;
        v[4] += f * x[n][1].x, v[5] += f * x[n][1].y, v[6] += f * x[n][1].z, v[7] += f * x[n][1].w;
      }
    }
#pragma unroll
    for (float &y : v) y /= mass[q];
    finish_query<D>(keys, query + q, c, v);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    draft_attend(const __grid_constant__ mm_cu_draft_block a, const __grid_constant__ mm_cu_rows r) {
  __shared__ __align__(16) bf16 value[kWarps][kKeys][D + 8];
  __shared__ __align__(16) float o[kQueries][D];
  __shared__ float top[kWarps][kQueries], mass[kWarps][kQueries], factor[kQueries][kMostParts];
  const uint32_t group = a.heads / a.kv_heads, tiles = (a.rows * group + kQueries - 1) / kQueries, first_row = blockIdx.y * a.rows;
  const uint32_t kv_head = blockIdx.x / tiles, query = blockIdx.x % tiles * kQueries;
  const int32_t slot = r.slot[first_row];
  grid_wait_and_launch_next();
  if (slot < 0) return;
  const block_keys<D> keys = {a, (uint32_t)slot, first_row, r.pos[first_row] - a.pass, kv_head};
  if (a.chain && query == 0 && blockIdx.z == 0 && threadIdx.x < 2 * D / 8) {
    const bool value = threadIdx.x >= D / 8;
    const uint32_t column = threadIdx.x % (D / 8) * 8;
    *reinterpret_cast<uint4 *>(keys.chained(a.pass, value) + column) = *reinterpret_cast<const uint4 *>(keys.own(0, value) + column);
  }
  running_sums<D> sum;
  run_tiles<D>(sum, keys, query, group, value[threadIdx.x / 32]);
  join_warps<D>(sum, o, top, mass);
  if (gridDim.z == 1) {
    for (uint32_t i = threadIdx.x; i < kQueries * D / 8; i += kThreads) {
      const uint32_t q = i / (D / 8), c = i % (D / 8) * 8;
      float v[8];
#pragma unroll
      for (uint32_t n = 0; n < 8; n++) v[n] = o[q][c + n] / mass[0][q];
      finish_query<D>(keys, query + q, c, v);
    }
    return;
  }
  const uint32_t place = blockIdx.y * gridDim.x + blockIdx.x;
  part_sum<D> *const parts = reinterpret_cast<part_sum<D> *>(static_cast<uint32_t *>(a.work) + kGroups) + (size_t)place * gridDim.z;
  part_sum<D> &mine = parts[blockIdx.z];
  for (uint32_t i = threadIdx.x; i < kQueries * D / 4; i += kThreads)
    reinterpret_cast<float4 *>(&mine.o[0][0])[i] = reinterpret_cast<const float4 *>(&o[0][0])[i];
  if (threadIdx.x < kQueries) mine.top[threadIdx.x] = top[0][threadIdx.x], mine.mass[threadIdx.x] = mass[0][threadIdx.x];
  if (!last_of(static_cast<uint32_t *>(a.work) + place, gridDim.z)) return;
  join_parts<D>(parts, keys, query, factor, mass[1]);
}

__global__ void __launch_bounds__(kThreads) concat_rows(bf16 *y, const __grid_constant__ mm_cu_columns x) {
  grid_wait_and_launch_next();
  const uint32_t pieces = x.width / 8;
  const uint4 *const from = reinterpret_cast<const uint4 *>(x.x[blockIdx.y]) + (size_t)blockIdx.x * pieces;
  uint4 *const to = reinterpret_cast<uint4 *>(y) + ((size_t)blockIdx.x * x.count + blockIdx.y) * pieces;
  for (uint32_t i = threadIdx.x; i < pieces; i += kThreads) to[i] = from[i];
}

/* The cell of position `pos` of a slot. */
__device__ __forceinline__ uint4 *hidden_cell(const mm_cu_hidden &c, int32_t slot, uint32_t pos) {
  const uint32_t page = c.table[(size_t)slot * c.pages_per_slot + pos / MM_CU_PAGE];
  return reinterpret_cast<uint4 *>(c.cells + ((size_t)page * MM_CU_PAGE + pos % MM_CU_PAGE) * c.width);
}

__global__ void __launch_bounds__(kThreads)
    hidden_keep(const __grid_constant__ mm_cu_hidden c, const bf16 *x, const __grid_constant__ mm_cu_rows r) {
  grid_wait_and_launch_next();
  const int32_t slot = r.slot[blockIdx.x];
  if (slot < 0) return;
  const uint4 *const from = reinterpret_cast<const uint4 *>(x + (size_t)blockIdx.x * c.width);
  uint4 *const to = hidden_cell(c, slot, r.pos[blockIdx.x]);
  for (uint32_t i = threadIdx.x; i < c.width / 8; i += kThreads) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    hidden_before(const __grid_constant__ mm_cu_hidden c, bf16 *y, const __grid_constant__ mm_cu_rows r) {
  grid_wait_and_launch_next();
  const int32_t slot = r.slot[blockIdx.x];
  const uint32_t pos = r.pos[blockIdx.x];
  uint4 *const to = reinterpret_cast<uint4 *>(y + (size_t)blockIdx.x * c.width);
  const uint4 *const from = slot < 0 || pos == 0 ? nullptr : hidden_cell(c, slot, pos - 1);
  for (uint32_t i = threadIdx.x; i < c.width / 8; i += kThreads) to[i] = from ? from[i] : make_uint4(0, 0, 0, 0);
}

/* Most blocks of a launch of several parts. */
uint32_t most_blocks() { return std::min<uint32_t>(kEach * multiprocessors(), kGroups); }

}  // namespace

size_t mm_cu_draft_work(void) { return kGroups * sizeof(uint32_t) + (size_t)most_blocks() * sizeof(part_sum<kMostDim>); }

cudaError_t mm_cu_attend_block(const mm_cu_draft_block &a, const mm_cu_rows &r, cudaStream_t s) {
  if (a.chain ? a.rows != 1 || !a.causal || a.pass >= MM_CU_CHAIN : a.pass != 0) return cudaErrorInvalidValue;
  if (a.codes.code && a.dim != MM_CU_GROUP) return cudaErrorInvalidValue; /* a head is a group */
  const uint32_t tiles = ceil_div(a.rows * (a.heads / a.kv_heads), kQueries), blocks = a.kv_heads * tiles * a.spans;
  const dim3 grid(a.kv_heads * tiles, a.spans, std::max(1u, std::min(kMostParts, most_blocks() / std::max(1u, blocks))));
  switch (a.dim) {
    case 32: return launch(draft_attend<32>, grid, kThreads, 0, s, a, r);
    case 64: return launch(draft_attend<64>, grid, kThreads, 0, s, a, r);
    case 128: return launch(draft_attend<128>, grid, kThreads, 0, s, a, r);
    default: return cudaErrorNotSupported;
  }
}

cudaError_t mm_cu_concat(bf16 *y, const mm_cu_columns &x, uint32_t rows, cudaStream_t s) {
  if (x.count > MM_CU_CONCAT || x.width % 8 != 0) return cudaErrorInvalidValue;
  return launch(concat_rows, dim3(rows, x.count), kThreads, 0, s, y, x);
}

cudaError_t mm_cu_hidden_keep(const mm_cu_hidden &c, const bf16 *x, const mm_cu_rows &r, uint32_t rows, cudaStream_t s) {
  return c.width % 8 ? cudaErrorInvalidValue : launch(hidden_keep, rows, kThreads, 0, s, c, x, r);
}

cudaError_t mm_cu_hidden_before(const mm_cu_hidden &c, bf16 *y, const mm_cu_rows &r, uint32_t rows, cudaStream_t s) {
  return c.width % 8 ? cudaErrorInvalidValue : launch(hidden_before, rows, kThreads, 0, s, c, y, r);
}
