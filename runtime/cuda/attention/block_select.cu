/* The blocks that each row of a sparse layer reads: scores of blocks, then the largest of them.
 *
 * block_scores. Shapes: columns are pairs of a row and an index head, 8 for a single token, 32 for rows of a
 * tile; keys are tiles of 16 of D = 32, 64 or 128 numbers, size / 16 tiles to a block of positions. Grid
 * (lots of rows, parts of the blocks), 128 threads; a warp scores whole blocks, of every lot's blocks the
 * ones that its number says. No shared memory: the 16 rows of mma.m16n8k16 are keys, its 8 columns queries,
 * and both are read straight from memory in one and the same order of columns, sixteen bytes to a lane (an
 * exact reordering of the products of a dot product's sum). The next tile is on its way while one is
 * multiplied. Keys in e4m3 are widened to f16 and multiplied with queries in f16; the products times the key's scale. score = max over the
 * block's keys; a product that is no number counts as none. Blocks that every row takes anyway are not scored, and so no row's own block is
 * ever scored in part: a score does not depend on which rows are in the step, or how they are cut.
 *
 * share_queries, select_split. The same for a scan that is split over ranks (mm_cu_index_split), by words in each other's memory
 * (peers.cuh): a rank scores every n-th block for the heads of all ranks, whose queries share_queries brings; select_split sends each
 * head's best to the ranks that have it, and they merge them. A score is the same whoever computes it, and the largest keys of all blocks
 * are among the largest of each rank's, so that the lists are those of select_blocks. Which rows are split depends on their positions,
 * which the device knows: a recorded step has both.
 *
 * select_blocks. Grid (rows, index heads), 256 threads, 1,024 where there may be many blocks. The top_k - local blocks with the largest
 * keys (score, lower block first) are those not below the least of them, whose bits are found from the highest on by counting; up to 46
 * turns. The result is put in ascending order, the row's last blocks behind. Shared memory: the blocks found. The order in which blocks
 * are found does not matter: deterministic.
 *
 * Scratch: scores of MM_CU_SCORE_ROWS rows, so that a step of more rows takes more launches; their number
 * follows from the batch's shape.
 *
 * Maths: runtime/cpu/cpu_select.c (block_score, offer, choose_blocks). */
#include "formats/model.h"
#include "runtime/cuda/attention/block_split.cuh"
#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kWarps = 4, kThreads = kWarps * 32, kKeys = 16;
constexpr unsigned long long kNone = 0;                         /* no key */
constexpr uint32_t kFew = 256, kMany = 1024, kFewBlocks = 2048; /* threads that select, and blocks up to which the first do */
constexpr uint32_t kWide = 4;                                   /* times eight columns, of rows of tiles */

/* Rows [first, first + count) of the step, of one sequence; the first at position pos, and at `place` of
 * the scores. */
struct lot {
  int32_t slot;
  uint32_t first, count, pos, place;
};
/* The blocks first, first + step, … that a lot is scored for, of so many heads. */
struct scan {
  uint32_t heads, first, step;
};
/* All blocks, for this rank's heads: queries [rows of the step, heads, dim], scores [place, heads, most]. */
struct whole_scan {
  __device__ __forceinline__ scan scan_of(const mm_cu_select &a, const lot &) const { return {a.heads, 0, 1}; }
  __device__ __forceinline__ const bf16 *queries(const mm_cu_select &a, const lot &l) const {
    return a.q + (size_t)l.first * a.heads * a.dim;
  }
  __device__ __forceinline__ float *scores(const mm_cu_select &a, const lot &l, uint32_t row, uint32_t head) const {
    return a.score + ((size_t)(l.place + row) * a.heads + head) * a.most;
  }
};

/* Single tokens from row `first` on, and verify rows. */
struct single_rows : whole_scan {
  mm_cu_rows r;
  uint32_t first;
  /* Positions of its sequence that are of earlier steps. */
  __device__ __forceinline__ uint32_t earlier(const lot &l) const { return l.slot < 0 ? 0 : l.pos - mm_cu_rows_before(r, l.first); }
  __device__ __forceinline__ lot of(uint32_t i, uint32_t) const { return {r.slot[first + i], first + i, 1, r.pos[first + i], i}; }
  __device__ __forceinline__ lot row(uint32_t i) const { return of(i, 1); }
};
/* Single tokens of a scan that is split over ranks: `tokens` rows from the step's first on. */
struct split_rows {
  single_rows rows;
  peer_view c;
  uint2 *q;               /* [row, rank, words]: queries of all heads, eight bytes each */
  uint32_t tokens, words; /* words of a row that a rank sends */
  uint32_t owners;        /* ranks that have the same head */
  uint32_t pitch, stride; /* scores of a head and of a row */
  __device__ __forceinline__ uint32_t earlier(const lot &l) const { return rows.earlier(l); }
  __device__ __forceinline__ lot of(uint32_t i, uint32_t each) const { return rows.of(i, each); }
  __device__ __forceinline__ lot row(uint32_t i) const { return rows.row(i); }
  /* The same on all ranks. */
  __device__ __forceinline__ bool splits(const mm_cu_select &a, const lot &l) const {
    if (l.slot < 0 || l.pos < a.split.from) return false;
    const block_split s(a, l.pos);
    return s.count > s.forced;
  }
  /* By all threads of a kernel's block: some row is split, so that ranks exchange something. */
  __device__ __forceinline__ bool any(const mm_cu_select &a) const {
    bool some = false;
    for (uint32_t i = threadIdx.x; i < tokens; i += blockDim.x) some |= splits(a, row(i));
    return __syncthreads_or(some);
  }
  __device__ __forceinline__ scan scan_of(const mm_cu_select &a, const lot &l) const {
    return splits(a, l) ? scan{a.split.heads, c.rank, c.ranks} : scan{a.heads, 0, 1};
  }
  __device__ __forceinline__ const bf16 *queries(const mm_cu_select &a, const lot &l) const {
    return splits(a, l) ? reinterpret_cast<const bf16 *>(q + (size_t)l.place * c.ranks * words) : rows.queries(a, l);
  }
  __device__ __forceinline__ float *scores(const mm_cu_select &a, const lot &l, uint32_t row, uint32_t head) const {
    return a.score + (size_t)(l.place + row) * stride + (size_t)head * (splits(a, l) ? pitch : a.most);
  }
};
/* Tiles from number `first` on, each in lots of so many rows. */
struct tile_rows : whole_scan {
  mm_cu_tiles t;
  uint32_t first;
  __device__ __forceinline__ uint32_t earlier(const lot &) const { return 0; }
  __device__ __forceinline__ lot of(uint32_t i, uint32_t each) const {
    const uint32_t lots = (MM_CU_TILE + each - 1) / each, at = i % lots * each;
    const uint2 tile = t.tile[first + i / lots];
    const mm_cu_span span = t.span[tile.x];
    const uint32_t rows = min(span.count - tile.y, (uint32_t)MM_CU_TILE), here = at < rows ? min(each, rows - at) : 0;
    const uint32_t from = tile.y + at;
    return {here ? span.slot : -1, span.first + from, here, span.pos + from, i / lots * MM_CU_TILE + at};
  }
  __device__ __forceinline__ lot row(uint32_t i) const { return of(i, 1); }
};

/* Eight numbers of the keys g and g + 8 of a tile in every 32 columns. */
template <int D, bool kFp8>
struct key_tile {
  uint4 low[D / 32], high[D / 32];
  __device__ __forceinline__ void load(const mm_cu_select &a, size_t first) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bf16 *const tile = a.keys + first * D;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      low[j] = *reinterpret_cast<const uint4 *>(tile + g * D + j * 32 + t * 8);
      high[j] = *reinterpret_cast<const uint4 *>(tile + (g + 8) * D + j * 32 + t * 8);
    }
  }
};
/* The same in e4m3, with both keys' scales. */
template <int D>
struct key_tile<D, true> {
  uint2 low[D / 32], high[D / 32];
  float scale[2];
  __device__ __forceinline__ void load(const mm_cu_select &a, size_t first) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint8_t *const tile = reinterpret_cast<const uint8_t *>(a.keys) + first * D;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      low[j] = *reinterpret_cast<const uint2 *>(tile + g * D + j * 32 + t * 8);
      high[j] = *reinterpret_cast<const uint2 *>(tile + (g + 8) * D + j * 32 + t * 8);
    }
    scale[0] = a.key_scale[first + g], scale[1] = a.key_scale[first + g + 8];
  }
};
/* Eight codes as an operand of f16. */
__device__ __forceinline__ uint4 operand(const uint2 &codes) {
  return make_uint4(widen2_half((uint16_t)codes.x), widen2_half((uint16_t)(codes.x >> 16)), widen2_half((uint16_t)codes.y),
                    widen2_half((uint16_t)(codes.y >> 16)));
}

/* most = the larger of it and the products of a tile's keys with the queries. */
template <int D, uint32_t kColumns>
__device__ __forceinline__ void multiply(float (&most)[kColumns][2], const key_tile<D, false> &k, const uint4 (&q)[kColumns][D / 32]) {
#pragma unroll
  for (uint32_t n = 0; n < kColumns; n++) {
    float d[4] = {};
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const uint32_t front[4] = {k.low[j].x, k.high[j].x, k.low[j].y, k.high[j].y};
      const uint32_t back[4] = {k.low[j].z, k.high[j].z, k.low[j].w, k.high[j].w};
      mma(d, front, q[n][j].x, q[n][j].y);
      mma(d, back, q[n][j].z, q[n][j].w);
    }
    most[n][0] = fmaxf(most[n][0], fmaxf(d[0], d[2])), most[n][1] = fmaxf(most[n][1], fmaxf(d[1], d[3]));
  }
}
template <int D, uint32_t kColumns>
__device__ __forceinline__ void multiply(float (&most)[kColumns][2], const key_tile<D, true> &k, const uint4 (&q)[kColumns][D / 32]) {
  float d[kColumns][4] = {};
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    const uint4 low = operand(k.low[j]), high = operand(k.high[j]);
    const uint32_t front[4] = {low.x, high.x, low.y, high.y}, back[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (uint32_t n = 0; n < kColumns; n++) {
      mma_half(d[n], front, q[n][j].x, q[n][j].y);
      mma_half(d[n], back, q[n][j].z, q[n][j].w);
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < kColumns; n++) {
    most[n][0] = fmaxf(most[n][0], fmaxf(d[n][0] * k.scale[0], d[n][2] * k.scale[1]));
    most[n][1] = fmaxf(most[n][1], fmaxf(d[n][1] * k.scale[0], d[n][3] * k.scale[1]));
  }
}

__device__ __forceinline__ uint32_t half_of(uint32_t pair) { return pack2_half(low(pair), high(pair)); }

/* The queries of a lot as operands: pairs of a row and an index head, eight to an n; zeros behind the last. For keys in e4m3 as f16. */
template <int D, bool kFp8, uint32_t kColumns>
__device__ __forceinline__ void load_queries(uint4 (&q)[kColumns][D / 32], const bf16 *queries, uint32_t columns) {
#pragma unroll
  for (uint32_t n = 0; n < kColumns; n++) {
    const uint32_t column = n * 8 + threadIdx.x % 32 / 4;
    const bf16 *const from = queries + (size_t)column * D;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const bool inside = column < columns;
      q[n][j] = inside ? *reinterpret_cast<const uint4 *>(from + j * 32 + threadIdx.x % 4 * 8) : make_uint4(0, 0, 0, 0);
      if (kFp8) q[n][j] = make_uint4(half_of(q[n][j].x), half_of(q[n][j].y), half_of(q[n][j].z), half_of(q[n][j].w));
    }
  }
}

/* Writes the scores of a scan's block number `at`, the largest product of each column over the warp, and begins the next block's. */
template <uint32_t kColumns, class Lots>
__device__ __forceinline__ void put_scores(const mm_cu_select &a, const Lots &lots, const lot &rows, uint32_t at,
                                           float (&most)[kColumns][2]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, heads = lots.scan_of(a, rows).heads;
#pragma unroll
  for (uint32_t n = 0; n < kColumns; n++) {
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      float v = most[n][i];
#pragma unroll
      for (int m = 4; m < 32; m *= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, m));
      const uint32_t column = n * 8 + 2 * t + i, row = column / heads, head = column % heads;
      if (g == 0 && row < rows.count) lots.scores(a, rows, row, head)[at] = v;
      most[n][i] = -INFINITY;
    }
  }
}

template <int D, bool kFp8, uint32_t kColumns, class Lots>
__global__ void __launch_bounds__(kThreads) block_scores(const __grid_constant__ mm_cu_select a, const __grid_constant__ Lots lots) {
  const uint32_t warp = threadIdx.x / 32, tiles = a.size / kKeys;
  const lot rows = lots.of(blockIdx.x, kColumns * 8 / a.heads);
  const block_split last(a, rows.pos + rows.count - 1); /* of the rows the one with the most blocks */
  const scan v = lots.scan_of(a, rows);
  const uint32_t step = gridDim.y * kWarps;
  uint32_t at = blockIdx.y * kWarps + warp, tile = 0; /* numbers of the scan's blocks and of a block's tiles */
  const auto block_at = [&](uint32_t i) { return i * v.step + v.first; };
  const uint32_t block = block_at(at);
  const bool idle = rows.slot < 0 || last.count == last.forced || block >= last.others;
  const uint32_t *const table = a.table + (size_t)max(rows.slot, 0) * a.pages_per_slot;
  const auto tile_at = [&](uint32_t of, uint32_t number) {
    const uint32_t pos = of * a.size + number * kKeys;
    return (size_t)table[pos / MM_CU_PAGE] * MM_CU_PAGE + pos % MM_CU_PAGE;
  };
  key_tile<D, kFp8> next;
  const bool early = !idle && block * a.size + kKeys <= lots.earlier(rows);
  if (early) next.load(a, tile_at(block, 0));
  grid_wait_and_launch_next();
  if (idle) return;
  if (!early) next.load(a, tile_at(block, 0));
  uint4 q[kColumns][D / 32];
  load_queries<D, kFp8>(q, lots.queries(a, rows), rows.count * v.heads);
  float most[kColumns][2];
#pragma unroll
  for (uint32_t n = 0; n < kColumns; n++) most[n][0] = most[n][1] = -INFINITY;
#pragma unroll 1
  for (;;) {
    const key_tile<D, kFp8> now = next;
    const bool ends = tile + 1 == tiles;
    const uint32_t after = ends ? at + step : at, tile_after = ends ? 0 : tile + 1;
    if (block_at(after) < last.others) next.load(a, tile_at(block_at(after), tile_after));
    multiply<D>(most, now, q);
    if (ends) {
      put_scores(a, lots, rows, at, most);
      if (block_at(after) >= last.others) return;
    }
    at = after, tile = tile_after;
  }
}

/* Greater for a larger score, of equal ones for the lower block; never kNone. */
__device__ __forceinline__ unsigned long long key_of(float score, uint32_t block) {
  const uint32_t u = __float_as_uint(score + 0.0f); /* -0 is 0 */
  const uint32_t ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
  return (unsigned long long)ordered << 32 | (0xffffffffu - block);
}

__device__ __forceinline__ uint32_t block_of(unsigned long long key) { return 0xffffffffu - (uint32_t)key; }

/* By all of kT threads: found[wanted], the largest keys of the blocks first, first + step, … below others, of which each has a score, in no
 * order; kNone for those that there are too few blocks for. The least of them is found bit by bit: a bit is set if so many keys, or more,
 * are as large. Keys are all different, and their numbers of blocks differ in few bits. */
template <uint32_t kT>
__device__ __forceinline__ void find_best(unsigned long long *found, const float *score, uint32_t first, uint32_t step, uint32_t others,
                                          uint32_t wanted) {
  constexpr uint32_t kEach = 8; /* keys of a thread in registers; others are made again in each turn */
  __shared__ uint32_t larger[2][kT / 32], placed;
  const uint32_t me = threadIdx.x, n = first < others ? (others - first + step - 1) / step : 0;
  const auto key_at = [&](uint32_t i) { return i < n ? key_of(score[i], i * step + first) : kNone; };
  unsigned long long mine[kEach];
#pragma unroll
  for (uint32_t k = 0; k < kEach; k++) mine[k] = key_at(me + k * kT);
  if (me == 0) placed = 0;
  unsigned long long least = 1;
  const int low = 32 - __clz((int)others);
  int bit = n > wanted ? 63 : -1;
  if (bit == 63) least = 0;
  for (uint32_t turn = 0; bit >= 0; turn ^= 1) {
    const unsigned long long next = least | 1ull << bit;
    uint32_t count = 0;
#pragma unroll
    for (uint32_t k = 0; k < kEach; k++) count += mine[k] >= next;
    for (uint32_t i = me + kEach * kT; i < n; i += kT) count += key_at(i) >= next;
    count = __reduce_add_sync(0xffffffffu, count);
    if (me % 32 == 0) larger[turn][me / 32] = count;
    __syncthreads();
    count = 0;
#pragma unroll
    for (uint32_t w = 0; w < kT / 32; w++) count += larger[turn][w];
    if (count >= wanted) least = next;
    if (count == wanted) break;
    if (bit == 32) least |= 0xffffffffu >> low << low, bit = low;
    bit--;
  }
  __syncthreads();
  const auto take = [&](unsigned long long key) {
    if (key >= least) found[atomicAdd(&placed, 1)] = key;
  };
#pragma unroll
  for (uint32_t k = 0; k < kEach; k++) take(mine[k]);
  for (uint32_t i = me + kEach * kT; i < n; i += kT) take(key_at(i));
  __syncthreads();
  for (uint32_t i = placed + me; i < wanted; i += kT) found[i] = kNone;
  __syncthreads();
}

/* The list of a row and head: those found, ascending, then its last blocks. A number that no rank sent (its wait was broken off) becomes
 * that of some block. */
__device__ __forceinline__ void put_list(uint32_t *to, const unsigned long long *found, const block_split &s) {
  const uint32_t me = threadIdx.x, wanted = s.count - s.forced;
  if (me < s.forced) to[wanted + me] = s.others + me;
  if (me >= wanted) return;
  const auto number = [&](uint32_t i) { return min(block_of(found[i]), s.others - 1); };
  const uint32_t block = number(me);
  uint32_t before = 0;
  for (uint32_t i = 0; i < wanted; i++) before += number(i) < block || (number(i) == block && i < me);
  to[before] = block;
}

/* The blocks of one of this rank's heads, by scores of all blocks. */
template <uint32_t kT>
__device__ __forceinline__ void select_row(const mm_cu_select &a, const lot &row, const float *score, uint32_t head) {
  __shared__ unsigned long long found[MM_MAX_BLOCKS];
  if (row.count == 0) return;
  const size_t at = (size_t)row.first * a.heads + head;
  if (row.slot < 0) {
    if (threadIdx.x == 0) a.count[at] = 0;
    return;
  }
  const block_split s(a, row.pos);
  if (threadIdx.x == 0) a.count[at] = s.count;
  if (s.count > s.forced) find_best<kT>(found, score, 0, 1, s.others, s.count - s.forced);
  put_list(a.block + at * a.top_k, found, s);
}

template <uint32_t kT, class Lots>
__global__ void __launch_bounds__(kT) select_blocks(const __grid_constant__ mm_cu_select a, const __grid_constant__ Lots lots) {
  const lot row = lots.row(blockIdx.x);
  grid_wait_and_launch_next();
  select_row<kT>(a, row, lots.scores(a, row, 0, blockIdx.y), blockIdx.y);
}

/* ---- a scan that is split over ranks ---- */

/* Queries of all heads for all ranks. Grid (rows): each sends this rank's part of its row, and waits for the others'. Ranks that have the
 * same head send a part of it each, so that every rank has something of every other one. */
__global__ void __launch_bounds__(kThreads) share_queries(const __grid_constant__ mm_cu_select a, const __grid_constant__ split_rows rows) {
  const peer_view &c = rows.c;
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, n = rows.words;
  if (!rows.any(a)) return;
  const lot row = rows.row(blockIdx.x);
  if (rows.splits(a, row)) {
    const uint2 *const own = reinterpret_cast<const uint2 *>(a.q + (size_t)row.first * a.heads * a.dim) + c.rank % rows.owners * n;
    uint2 *const to = rows.q + (size_t)row.place * c.ranks * n;
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
      const uint2 v = own[i];
      to[c.rank * n + i] = v;
      for (uint32_t k = 1; k < c.ranks; k++)
        put_word(c.word((c.rank + k) % c.ranks, parity, c.rank) + row.place * n + i, make_uint4(v.x, flag, v.y, flag));
    }
    peer_timeout p(c);
    for (uint32_t i = threadIdx.x; i < c.ranks * n; i += kThreads) {
      const uint32_t r = i / n;
      if (r != c.rank) to[i] = p.word(c.word(c.rank, parity, r) + row.place * n + i % n, flag, r);
    }
  }
  peer_end(c, epoch);
}

/* As select_blocks, grid (rows, heads of all ranks): the best of this rank's blocks go to the ranks that have the head, which merge those
 * of all ranks: the wanted largest of so many from each. */
template <uint32_t kT>
__global__ void __launch_bounds__(kT) select_split(const __grid_constant__ mm_cu_select a, const __grid_constant__ split_rows rows) {
  __shared__ unsigned long long found[MM_MAX_BLOCKS], all[MM_CU_PEERS * MM_MAX_BLOCKS];
  const peer_view &c = rows.c;
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, head = blockIdx.y, me = threadIdx.x;
  const bool any = rows.any(a);
  const lot row = rows.row(blockIdx.x);
  const float *const score = rows.scores(a, row, 0, head);
  if (!rows.splits(a, row)) {
    if (head < a.heads) select_row<kT>(a, row, score, head);
    if (any) peer_end(c, epoch);
    return;
  }
  const block_split s(a, row.pos);
  const uint32_t wanted = s.count - s.forced, owner = head / a.heads * rows.owners, local = head % a.heads;
  const uint32_t place = (row.place * a.heads + local) * MM_MAX_BLOCKS;
  find_best<kT>(found, score, c.rank, c.ranks, s.others, wanted);
  for (uint32_t i = me; i < rows.owners * wanted; i += kT) {
    const uint32_t to = owner + i / wanted, k = i % wanted;
    const unsigned long long key = found[k];
    if (to != c.rank) put_word(c.word(to, parity, c.rank) + place + k, make_uint4((uint32_t)key, flag, (uint32_t)(key >> 32), flag));
  }
  if (c.rank >= owner && c.rank < owner + rows.owners) {
    peer_timeout p(c);
    for (uint32_t i = me; i < c.ranks * wanted; i += kT) {
      const uint32_t r = i / wanted, k = i % wanted;
      const uint2 w =
          r == c.rank ? make_uint2((uint32_t)found[k], (uint32_t)(found[k] >> 32)) : p.word(c.word(c.rank, parity, r) + place + k, flag, r);
      all[i] = (unsigned long long)w.y << 32 | w.x;
    }
    __syncthreads();
    for (uint32_t i = me; i < c.ranks * wanted; i += kT) {
      uint32_t larger = 0;
      for (uint32_t k = 0; k < c.ranks * wanted; k++) larger += all[k] > all[i];
      if (all[i] != kNone && larger < wanted) found[larger] = all[i];
    }
    __syncthreads();
    const size_t at = (size_t)row.first * a.heads + local;
    if (me == 0) a.count[at] = s.count;
    put_list(a.block + at * a.top_k, found, s);
  }
  peer_end(c, epoch);
}

bool fits(const mm_cu_select &a) {
  return a.heads > 0 && a.heads <= MM_CU_INDEX_HEADS && a.size > 0 && a.size % kKeys == 0 && a.top_k > 0 && a.top_k <= MM_MAX_BLOCKS &&
         a.local > 0 && a.local <= a.top_k && (a.dim == 32 || a.dim == 64 || a.dim == 128);
}

/* Blocks of four warps: as many as the device runs at once, four to a multiprocessor, for all lots
 * together. */
uint32_t parts_of(const mm_cu_select &a, uint32_t lots) {
  const uint32_t all = ceil_div(a.most, kWarps), wanted = ceil_div(4 * multiprocessors(), lots);
  return max(1u, min(all, wanted));
}

template <uint32_t kColumns, class Lots>
cudaError_t score(const mm_cu_select &a, const Lots &lots, uint32_t count, cudaStream_t s) {
  const dim3 grid(count, parts_of(a, count));
  const auto bf16_scores = a.dim == 32   ? block_scores<32, false, kColumns, Lots>
                           : a.dim == 64 ? block_scores<64, false, kColumns, Lots>
                                         : block_scores<128, false, kColumns, Lots>;
  const auto e4m3_scores = a.dim == 32   ? block_scores<32, true, kColumns, Lots>
                           : a.dim == 64 ? block_scores<64, true, kColumns, Lots>
                                         : block_scores<128, true, kColumns, Lots>;
  return launch(a.key_scale ? e4m3_scores : bf16_scores, grid, kThreads, 0, s, a, lots);
}

template <class Lots>
cudaError_t select(const mm_cu_select &a, const Lots &lots, uint32_t rows, cudaStream_t s) {
  const dim3 grid(rows, a.heads);
  return a.most <= kFewBlocks ? launch(select_blocks<kFew, Lots>, grid, kFew, 0, s, a, lots)
                              : launch(select_blocks<kMany, Lots>, grid, kMany, 0, s, a, lots);
}

template <uint32_t kColumns, class Lots>
cudaError_t run(const mm_cu_select &a, const Lots &lots, uint32_t count, uint32_t rows, cudaStream_t s) {
  const cudaError_t e = score<kColumns>(a, lots, count, s);
  return e != cudaSuccess ? e : select(a, lots, rows, s);
}

/* Where a split scan has its numbers: scores in the first half of the scratch, queries of all heads in the second. False where they have
 * no room there or the ranks cannot exchange so much at once: the same on all ranks, by shapes alone. */
bool split_of(split_rows *to, const mm_cu_select &a, const mm_cu_rows &r, uint32_t tokens) {
  if (!a.split.peers || a.split.heads > MM_CU_INDEX_HEADS) return false;
  const peer_view &c = mm_cu_peers_view(a.split.peers);
  const uint32_t owners = c.ranks * a.heads / a.split.heads, words = a.heads * a.dim / 4 / owners, pitch = ceil_div(a.most, c.ranks);
  const uint32_t stride = max(a.heads * a.most, a.split.heads * pitch);
  const size_t half = (size_t)MM_CU_SCORE_ROWS / 2 * a.heads * a.most, queries = (size_t)tokens * c.ranks * words * sizeof(uint2);
  const uint64_t most = (uint64_t)tokens * max(words, a.heads * MM_MAX_BLOCKS);
  if (owners * a.split.heads != c.ranks * a.heads || (owners > 1 && a.heads > 1) || a.dim / 4 % owners || tokens * (size_t)stride > half ||
      queries > half * sizeof(float) || most > kPeerWords || !mm_cu_peers_small(a.split.peers, tokens, most))
    return false;
  *to = {{{}, r, 0}, c, reinterpret_cast<uint2 *>(a.score + half), tokens, words, owners, pitch, stride};
  return true;
}

}  // namespace

cudaError_t mm_cu_select_rows(const mm_cu_select &a, const mm_cu_rows &r, uint32_t tokens, cudaStream_t s) {
  if (!fits(a)) return cudaErrorNotSupported;
  split_rows split;
  if (split_of(&split, a, r, tokens)) {
    const cudaError_t shared = launch(share_queries, tokens, kThreads, 0, s, a, split);
    const cudaError_t scored = shared != cudaSuccess ? shared : score<1>(a, split, tokens, s);
    const dim3 grid(tokens, a.split.heads);
    if (scored != cudaSuccess) return scored;
    return split.pitch <= kFewBlocks ? launch(select_split<kFew>, grid, kFew, 0, s, a, split)
                                     : launch(select_split<kMany>, grid, kMany, 0, s, a, split);
  }
  cudaError_t e = cudaSuccess;
  for (uint32_t i = 0; e == cudaSuccess && i < tokens; i += MM_CU_SCORE_ROWS) {
    const uint32_t rows = min(tokens - i, (uint32_t)MM_CU_SCORE_ROWS);
    e = run<1>(a, single_rows{{}, r, i}, rows, rows, s);
  }
  return e;
}

cudaError_t mm_cu_select_tiles(const mm_cu_select &a, const mm_cu_tiles &t, cudaStream_t s) {
  if (!fits(a)) return cudaErrorNotSupported;
  const uint32_t lots = ceil_div(MM_CU_TILE, kWide * 8 / a.heads), most = MM_CU_SCORE_ROWS / MM_CU_TILE;
  cudaError_t e = cudaSuccess;
  for (uint32_t i = 0; e == cudaSuccess && i < t.count; i += most) {
    const uint32_t tiles = min(t.count - i, most);
    if (!mm_cu_takes_tile_scores(a)) {
      e = run<kWide>(a, tile_rows{{}, t, i}, tiles * lots, tiles * MM_CU_TILE, s);
      continue;
    }
    e = mm_cu_tile_scores(a, t, i, tiles, s);
    if (e == cudaSuccess) e = select(a, tile_rows{{}, t, i}, tiles * MM_CU_TILE, s);
  }
  return e;
}
