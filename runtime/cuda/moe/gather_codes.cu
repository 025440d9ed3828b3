/* Rows between groups of attention as E4M3 codes with a scale for 128 columns, with the experts that each row chose: to the rows that
 * mm_cu_peers_gather_rows brings, what encode.cu would make of them, and of a router that ran on their owners the lists of all. A rank
 * sends its part of the group's rows to the ranks of other groups, into the places of sums, and a barrier follows. A warp has 1,024 columns
 * of a row, the row's first one its experts too; the same warp of the other rank unpacks them, since a barrier is one of blocks. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/fp8.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/moe/route.cuh"
#include "runtime/cuda/ranks_groups.cuh"

namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kSharedBlocks = 2;                    /* as peers.cu's sums have */
constexpr uint32_t kPiece = 1024, kTurns = kPiece / 256; /* columns of a warp; eight of a lane in each turn */

/* Where the parts of a row begin in a place, and its bytes: codes, scales, ids, weights. Ids are indices of all experts (mm_cu_route), ~0
 * of padding. */
struct packed_row {
  uint32_t scale, id, weight, bytes;
  __host__ __device__ packed_row(uint32_t width, uint32_t top_k)
      : scale(width), id(scale + width / MM_CU_GROUP * 4), weight(id + top_k * 4), bytes((weight + top_k * 4 + 15) / 16 * 16) {}
};

struct code_job {
  row_job rows; /* comes first: tests/ops/host_groups.h reads it there */
  mm_cu_codes to;
  mm_cu_route r;
  const bf16 *mine; /* the group's rows */

  __device__ uint32_t pieces() const { return (rows.g.width + kPiece - 1) / kPiece; }
  /* Number of a row of group k among those of all. */
  __device__ uint32_t row_of(uint32_t k, uint32_t row) const { return rows.g.first[k] + rows.from + row; }
};

__device__ __forceinline__ void put_half(char *to, uint2 v) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void put_four(char *to, uint32_t v) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t get_four(const char *from) {
  uint32_t v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

/* Calls f(place) with the row's place on each rank of another group. */
template <class F>
__device__ __forceinline__ void each_place(const peer_view &c, const code_job &j, uint32_t parity, uint32_t row, const F &f) {
  const packed_row packed(j.rows.g.width, j.r.top_k);
  const uint32_t group = c.rank / j.rows.each;
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t to = (c.rank + k) % c.ranks;
    if (to / j.rows.each != group) f(reinterpret_cast<char *>(c.sum(to, parity)) + (size_t)(group * j.rows.most + row) * packed.bytes);
  }
}

/* A lane: choice `lane` of row `row` of all. */
__device__ __forceinline__ void take_choice(const code_job &j, uint32_t row, uint32_t id, float weight) {
  const size_t pair = (size_t)row * j.r.top_k + threadIdx.x % 32;
  if (j.r.load && id < j.r.experts) atomicAdd(&j.r.load[id], 1ull);
  j.r.id[pair] = own_expert(j.r, id), j.r.weight[pair] = weight;
}

/* A warp: a piece of a row of the group, to the codes of all rows, and where `sends` to the other groups. */
__device__ __forceinline__ void encode_piece(const peer_view &c, const code_job &j, uint32_t parity, uint32_t row, uint32_t piece,
                                             bool sends) {
  const packed_row packed(j.rows.g.width, j.r.top_k);
  const uint32_t lane = threadIdx.x % 32, width = j.rows.g.width, column = piece * kPiece + lane * 8;
  const uint32_t at = j.row_of(c.rank / j.rows.each, row);
  const bf16 *const from = j.mine + (size_t)(j.rows.from + row) * width;
  uint4 q[kTurns];
#pragma unroll
  for (uint32_t i = 0; i < kTurns; i++)
    q[i] = column + i * 256 < width ? *reinterpret_cast<const uint4 *>(from + column + i * 256) : make_uint4(0, 0, 0, 0);
  float scale = 0; /* of the lane's group: there are eight */
#pragma unroll
  for (uint32_t i = 0; i < kTurns; i++) {
    const codes8 e = encoded8(q[i]);
    const float of = __shfl_sync(0xffffffffu, e.scale, (int)(lane % 2 * 16));
    if (lane / 2 == i) scale = of;
    if (column + i * 256 >= width) continue;
    *reinterpret_cast<uint2 *>(j.to.code + (size_t)at * j.to.pitch + column + i * 256) = e.code;
    if (sends) each_place(c, j, parity, row, [&](char *to) { put_half(to + column + i * 256, e.code); });
  }
  const uint32_t group = piece * (kPiece / MM_CU_GROUP) + lane;
  if (lane < kPiece / MM_CU_GROUP && group < width / MM_CU_GROUP) {
    j.to.scale[(size_t)group * j.to.scale_pitch + at] = scale;
    if (sends) each_place(c, j, parity, row, [&](char *to) { put_four(to + packed.scale + group * 4, __float_as_uint(scale)); });
  }
  if (piece > 0 || lane >= j.r.top_k) return;
  const uint32_t id = j.r.id[(size_t)at * j.r.top_k + lane];
  const float weight = j.r.weight[(size_t)at * j.r.top_k + lane];
  if (sends)
    each_place(c, j, parity, row, [&](char *to) {
      put_four(to + packed.id + lane * 4, id), put_four(to + packed.weight + lane * 4, __float_as_uint(weight));
    });
  take_choice(j, at, id, weight);
}

/* A warp: the same piece of a row of another group, from its place here. */
__device__ __forceinline__ void take_piece(const code_job &j, const char *from, uint32_t at, uint32_t piece) {
  const packed_row packed(j.rows.g.width, j.r.top_k);
  const uint32_t lane = threadIdx.x % 32, width = j.rows.g.width, column = piece * kPiece + lane * 16;
  uint4 q[kPiece / 512];
#pragma unroll
  for (uint32_t i = 0; i < kPiece / 512; i++)
    if (column + i * 512 < width) q[i] = get_word(reinterpret_cast<const uint4 *>(from + column + i * 512));
#pragma unroll
  for (uint32_t i = 0; i < kPiece / 512; i++)
    if (column + i * 512 < width) *reinterpret_cast<uint4 *>(j.to.code + (size_t)at * j.to.pitch + column + i * 512) = q[i];
  const uint32_t group = piece * (kPiece / MM_CU_GROUP) + lane;
  if (lane < kPiece / MM_CU_GROUP && group < width / MM_CU_GROUP)
    j.to.scale[(size_t)group * j.to.scale_pitch + at] = __uint_as_float(get_four(from + packed.scale + group * 4));
  if (piece == 0 && lane < j.r.top_k)
    take_choice(j, at, get_four(from + packed.id + lane * 4), __uint_as_float(get_four(from + packed.weight + lane * 4)));
}

/* The rank's part of its group's rows is sent, the rest encoded; then, behind a barrier, the parts of other groups' ranks are taken. */
__global__ void __launch_bounds__(kThreads) share_rows_codes(const __grid_constant__ peer_view c, const __grid_constant__ code_job j) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, parity = epoch & 1, group = c.rank / j.rows.each, rows = j.rows.rows(group);
  const uint32_t first = blockIdx.x * kWarps + threadIdx.x / 32, step = gridDim.x * kWarps, pieces = j.pieces();
  const part_of own(rows, j.rows.each, c.rank % j.rows.each);
  for (uint32_t u = first; u < own.n * pieces; u += step) encode_piece(c, j, parity, own.first + u / pieces, u % pieces, true);
  for (uint32_t u = first; u < (rows - own.n) * pieces; u += step) {
    const uint32_t row = u / pieces;
    encode_piece(c, j, parity, row < own.first ? row : row + own.n, u % pieces, false);
  }
  peer_timeout p(c);
  const bool here = peer_barrier(c, &p, 0, parity, epoch + 1);
  const packed_row packed(j.rows.g.width, j.r.top_k);
  for (uint32_t r = 0; here && r < c.ranks; r++) {
    const uint32_t of = r / j.rows.each;
    if (of == group) continue;
    const part_of part(j.rows.rows(of), j.rows.each, r % j.rows.each);
    const char *const place = reinterpret_cast<const char *>(c.sum(c.rank, parity)) + (size_t)of * j.rows.most * packed.bytes;
    for (uint32_t u = first; u < part.n * pieces; u += step) {
      const uint32_t row = part.first + u / pieces;
      take_piece(j, place + (size_t)row * packed.bytes, j.row_of(of, row), u % pieces);
    }
  }
  peer_end(c, epoch);
}

}  // namespace

const void *mm_cu_codes_kernel() { return reinterpret_cast<const void *>(share_rows_codes); }

cudaError_t mm_cu_peers_gather_codes(const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_codes &to, const mm_cu_route &r,
                                     const bf16 *mine, cudaStream_t s) {
  const peer_view &c = mm_cu_peers_view(p);
  const uint32_t rows = most_rows(g), all = g.first[g.groups];
  if (!group_rows_fit(c, g) || g.width % MM_CU_GROUP != 0 || to.pitch != g.width || to.rows != all || to.scale_pitch < all ||
      r.top_k > MM_CU_MAX_TOP_K)
    return cudaErrorInvalidValue;
  const uint32_t most = (uint32_t)(kPeerSlab / g.groups / packed_row(g.width, r.top_k).bytes);
  cudaError_t e = cudaSuccess;
  code_job j = {{g, c.ranks / g.groups, 0, min(most, rows)}, to, r, mine};
  for (; j.rows.from < rows && e == cudaSuccess; j.rows.from += j.rows.most)
    e = launch(share_rows_codes, c.distinct_devices ? kPeerBlocks : kSharedBlocks, kThreads, 0, s, c, j);
  return e;
}

uint32_t mm_cu_code_row_bytes(uint32_t width, uint32_t top_k) {
  const packed_row packed(width, top_k);
  return packed.weight + top_k * 4;
}
