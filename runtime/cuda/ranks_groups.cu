/* Rows between groups of attention (mm_rank_ops.gather and scatter): each group of consecutive ranks of a stage has rows of its own.
 * gather gives every rank the rows of all groups; scatter gives a group's ranks the sums of its rows over all ranks of the stage, added in
 * rank order in f32 and rounded once, as sums over ranks are (peers.cu). Rows and widths are the launch's arguments, so that recorded steps
 * of as many rows repeat them.
 *
 * Of a gather a rank sends its part of the group's rows to the ranks of other groups: the group's ranks have the same rows. Few rows go as
 * words that carry their epoch; a rank sends one such word to each rank of its own group too, since places alternate with the epoch
 * (peers.cu) and every rank must have received something of every other. Many go to the places of sums, and a barrier follows. Of a
 * scatter a rank sends to each rank of a group all rows of that group: one exchange, and twice as many bytes as a reduce-scatter and a
 * gather only where groups have four ranks.
 *
 * Few rows go with the residual and norm next to them, in one kernel each: a block has whole rows, which are exchanged as branches are
 * (peers.cuh), in turns of the stage's. Bits are those of separate kernels. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/row.cuh"
#include "runtime/cuda/ranks_groups.cuh"

namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kSharedBlocks = 2, kFewBlocks = 128; /* as peers.cu's sums have */

/* units: each of 8 bytes. */
__global__ void __launch_bounds__(kThreads)
    share_rows_few(const __grid_constant__ peer_view c, const __grid_constant__ row_job j, uint2 *all, const uint2 *mine) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, first = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t step = gridDim.x * kThreads, group = c.rank / j.each, count = j.units(group, 4);
  const part_of own(count, j.each, c.rank % j.each);
  for (uint32_t i = first; i < own.n; i += step) {
    const uint2 v = mine[own.first + i];
    for (uint32_t k = 1; k < c.ranks; k++) {
      const uint32_t to = (c.rank + k) % c.ranks;
      if (i == 0 || to / j.each != group) put_word(c.word(to, parity, c.rank) + i, make_uint4(v.x, flag, v.y, flag));
    }
  }
  for (uint32_t i = first; i < count; i += step) all[j.begin(group, 4) + i] = mine[i];
  peer_timeout p(c);
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t r = (c.rank + k) % c.ranks, of = r / j.each;
    if (of == group) {
      if (first == 0) p.word(c.word(c.rank, parity, r), flag, r);
      continue;
    }
    const part_of part(j.units(of, 4), j.each, r % j.each);
    for (uint32_t i = first; i < part.n; i += step) all[j.begin(of, 4) + part.first + i] = p.word(c.word(c.rank, parity, r) + i, flag, r);
  }
  peer_end(c, epoch);
}

/* Units of 16 bytes. The rows of group k go to the place's row k · most. */
__global__ void __launch_bounds__(kThreads)
    share_rows_many(const __grid_constant__ peer_view c, const __grid_constant__ row_job j, uint4 *all, const uint4 *mine) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, parity = epoch & 1, first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const uint32_t group = c.rank / j.each, count = j.units(group, 8), most = j.most * (j.g.width / 8);
  const uint4 *const rows = mine + (size_t)j.from * (j.g.width / 8);
  const part_of own(count, j.each, c.rank % j.each);
  each_of<uint4>(
      first, own.n, step, [&](uint32_t i) { return rows[own.first + i]; },
      [&](uint32_t i, uint4 v) {
        for (uint32_t k = 1; k < c.ranks; k++) {
          const uint32_t to = (c.rank + k) % c.ranks;
          if (to / j.each != group) put_word(c.sum(to, parity) + (size_t)group * most + own.first + i, v);
        }
      });
  each_of<uint4>(
      first, count, step, [&](uint32_t i) { return rows[i]; }, [&](uint32_t i, uint4 v) { all[j.begin(group, 8) + i] = v; });
  peer_timeout p(c);
  const bool here = peer_barrier(c, &p, 0, parity, epoch + 1);
  for (uint32_t r = 0; here && r < c.ranks; r++) {
    const uint32_t of = r / j.each;
    if (of == group) continue;
    const part_of part(j.units(of, 8), j.each, r % j.each);
    const uint4 *const came = c.sum(c.rank, parity) + (size_t)of * most + part.first;
    each_of<uint4>(
        first, part.n, step, [&](uint32_t i) { return get_word(came + i); },
        [&](uint32_t i, uint4 v) { all[j.begin(of, 8) + part.first + i] = v; });
  }
  peer_end(c, epoch);
}

/* units: each of 8 bytes. */
__global__ void __launch_bounds__(kThreads)
    reduce_rows_few(const __grid_constant__ peer_view c, const __grid_constant__ row_job j, uint2 *mine, const uint2 *all) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, first = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t step = gridDim.x * kThreads, group = c.rank / j.each, count = j.units(group, 4);
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t to = (c.rank + k) % c.ranks, of = to / j.each, n = j.units(of, 4);
    const uint2 *const rows = all + j.begin(of, 4);
    for (uint32_t i = first; i < n; i += step) {
      const uint2 v = rows[i];
      put_word(c.word(to, parity, c.rank) + i, make_uint4(v.x, flag, v.y, flag));
    }
  }
  peer_timeout p(c);
  const uint2 *const own = all + j.begin(group, 4);
  for (uint32_t i = first; i < count; i += step) {
    total<bf16, SUM, 2> t;
    for (uint32_t r = 0; r < c.ranks; r++) {
      const uint2 v = r == c.rank ? own[i] : p.word(c.word(c.rank, parity, r) + i, flag, r);
      const uint32_t w[2] = {v.x, v.y};
      t.add(w, r == 0);
    }
    mine[i] = make_uint2(t.word(0), t.word(1));
  }
  peer_end(c, epoch);
}

/* units: each of 16 bytes. */
__global__ void __launch_bounds__(kThreads)
    reduce_rows_many(const __grid_constant__ peer_view c, const __grid_constant__ row_job j, uint4 *mine, const uint4 *all) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, parity = epoch & 1, first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const uint32_t group = c.rank / j.each;
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t to = (c.rank + k) % c.ranks, of = to / j.each;
    const uint4 *const rows = all + j.begin(of, 8);
    uint4 *const part = c.part(to, parity, c.rank);
    each_of<uint4>(
        first, j.units(of, 8), step, [&](uint32_t i) { return rows[i]; }, [&](uint32_t i, uint4 v) { put_word(part + i, v); });
  }
  peer_timeout p(c);
  const bool here = peer_barrier(c, &p, 0, parity, epoch + 1);
  const uint4 *const own = all + j.begin(group, 8);
  uint4 *const to = mine + (size_t)j.from * (j.g.width / 8);
  const auto add = [&](uint32_t i) {
    total<bf16, SUM, 4> t;
    for (uint32_t r = 0; r < c.ranks; r++) {
      const uint4 v = r == c.rank ? own[i] : get_word(c.part(c.rank, parity, r) + i);
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
      t.add(w, r == 0);
    }
    return make_uint4(t.word(0), t.word(1), t.word(2), t.word(3));
  };
  each_of<uint4>(first, here ? j.units(group, 8) : 0, step, add, [&](uint32_t i, uint4 v) { to[i] = v; });
  peer_end(c, epoch);
}

constexpr uint32_t kWaitingBlocks = 48; /* as ranks.cu has them: all wait at once, and leave room for others */

/* What the threads of a block have of a row: eight columns each. */
struct row_pieces {
  uint32_t column, width;
  bool inside;
  __device__ explicit row_pieces(uint32_t w) : column(threadIdx.x * 8), width(w), inside(threadIdx.x * 8 < w) {}
  __device__ size_t at(uint32_t row) const { return (size_t)row * width + column; }
  __device__ uint32_t word(uint32_t row) const { return (row * width + column) / 8; }
};

__device__ __forceinline__ uint4 piece_of(const bf16 *from) { return *reinterpret_cast<const uint4 *>(from); }

/* The norm of v, a row's residual as the block's threads have it: a.n, and its codes. part: [blockDim.x / 32], rows take turns. */
__device__ __forceinline__ uint4 norm_piece(const mm_cu_combine &a, const row_pieces &p, uint32_t row, float v[8], const float w[8],
                                            float *part) {
  const float sum = warp_sum(square8(v));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  const float scale = norm_scale(part, (p.width + 255) / 256, p.width, a.eps);
  if (!p.inside) return make_uint4(0, 0, 0, 0);
  scale8(v, scale, w);
  const uint4 q = narrow8(v);
  *reinterpret_cast<uint4 *>(a.n + p.at(row)) = q;
  if (a.codes.code) encode8(a.codes, row, p.column, q);
  return q;
}

/* The residual and norm of the group's rows, whose branch is the sum over all ranks of the rows of all groups at a.branch. */
__global__ void __launch_bounds__(MM_CU_MAX_HIDDEN / 8)
    reduce_rows_combine(const __grid_constant__ peer_view c, const __grid_constant__ mm_cu_combine a, const __grid_constant__ row_job j) {
  __shared__ float part[2][MM_CU_MAX_HIDDEN / 256];
  const row_pieces p(j.g.width);
  const uint32_t group = c.rank / j.each, own = j.rows(group);
  float w[8] = {};
  if (c.distinct_devices) grid_launch_next_early();
  if (p.inside) load8(w, a.w + p.column);
  grid_wait();
  const peer_turn turn = turn_of(c);
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t to = (c.rank + k) % c.ranks, of = to / j.each;
    for (uint32_t row = blockIdx.x; p.inside && row < j.rows(of); row += gridDim.x) {
      const uint4 v = piece_of(a.branch + p.at(j.g.first[of] + row));
      put_word(c.branch(to, turn.turn, c.rank) + p.word(row), make_uint4(not_empty(v.x), not_empty(v.y), not_empty(v.z), not_empty(v.w)));
    }
  }
  empty_branches(c, turn);
  for (uint32_t row = blockIdx.x, i = 0; row < own; row += gridDim.x, i++) {
    float v[8] = {};
    if (p.inside) {
      const uint4 mine = piece_of(a.branch + p.at(j.g.first[group] + row)), residual = piece_of(a.residual + p.at(row));
      mix8(v, a, residual, sum_branches(c, turn, mine, p.word(row)));
      store8(a.h + p.at(row), v);
    }
    norm_piece(a, p, row, v, w, part[i % 2]);
  }
  branch_end(c, turn, own * p.width / 8);
}

/* Of groups of one rank: the residual and norm of the group's rows, and a.n of every group to all. */
__global__ void __launch_bounds__(MM_CU_MAX_HIDDEN / 8)
    share_rows_combine(const __grid_constant__ peer_view c, const __grid_constant__ mm_cu_combine a, const __grid_constant__ row_job j,
                       bf16 *all) {
  __shared__ float part[2][MM_CU_MAX_HIDDEN / 256];
  const row_pieces p(j.g.width);
  float w[8] = {};
  if (c.distinct_devices) grid_launch_next_early();
  if (p.inside) load8(w, a.w + p.column);
  grid_wait();
  const peer_turn turn = turn_of(c);
  for (uint32_t row = blockIdx.x, i = 0; row < j.rows(c.rank); row += gridDim.x, i++) {
    float v[8] = {};
    if (p.inside) {
      mix8(v, a, piece_of(a.residual + p.at(row)), piece_of(a.branch + p.at(row)));
      store8(a.h + p.at(row), v);
    }
    const uint4 q = norm_piece(a, p, row, v, w, part[i % 2]);
    if (!p.inside) continue;
    send_branch(c, turn, q, p.word(row));
    *reinterpret_cast<uint4 *>(all + p.at(j.g.first[c.rank] + row)) = q;
  }
  empty_branches(c, turn);
  peer_timeout timeout(c);
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t r = (c.rank + k) % c.ranks;
    for (uint32_t row = blockIdx.x; p.inside && row < j.rows(r); row += gridDim.x) {
      const uint4 *const from = c.branch(c.rank, turn.turn, r) + p.word(row);
      uint4 v = get_word(from);
      while (!has_arrived(v) && !timeout.over(r)) v = get_word(from);
      *reinterpret_cast<uint4 *>(all + p.at(j.g.first[r] + row)) = v;
    }
  }
  branch_end(c, turn, j.most * p.width / 8);
}

unsigned few_blocks(const peer_view &c, uint64_t words) {
  return (unsigned)mm_min(c.distinct_devices ? kFewBlocks : kSharedBlocks, mm_ceil_div(words, kThreads));
}

/* Launches of at most `most` rows of each group. */
template <class K, class T, class F>
cudaError_t in_turns(K kernel, const peer_view &c, row_job j, T *to, const F *from, cudaStream_t s) {
  const uint32_t rows = most_rows(j.g);
  cudaError_t e = cudaSuccess;
  for (j.from = 0; j.from < rows && e == cudaSuccess; j.from += j.most)
    e = launch(kernel, c.distinct_devices ? kPeerBlocks : kSharedBlocks, kThreads, 0, s, c, j, reinterpret_cast<uint4 *>(to),
               reinterpret_cast<const uint4 *>(from));
  return e;
}

}  // namespace

bool mm_cu_combines_groups(const mm_cu_peers *p, const mm_cu_group_rows &g) {
  return mm_cu_peers_small(p, most_rows(g), (uint64_t)most_rows(g) * g.width / 4);
}

/* A launch of whole rows by blocks that wait. */
template <class K, class... More>
static cudaError_t combine_groups(K kernel, const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_combine &a, cudaStream_t s,
                                  More... more) {
  const peer_view &c = mm_cu_peers_view(p);
  const uint32_t rows = most_rows(g), own = c.rank / (c.ranks / g.groups);
  if (!group_rows_fit(c, g) || !mm_cu_combines_groups(p, g) || !codes_fit(a.codes, g.first[own + 1] - g.first[own], g.width))
    return cudaErrorInvalidValue;
  return launch(kernel, ceil_div(rows, ceil_div(rows, kWaitingBlocks)), ceil_div(g.width, 256) * 32, 0, s, c, a,
                row_job{g, c.ranks / g.groups, 0, rows}, more...);
}

cudaError_t mm_cu_combine_scatter(const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_combine &a, cudaStream_t s) {
  return combine_groups(reduce_rows_combine, p, g, a, s);
}
cudaError_t mm_cu_combine_gather(const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_combine &a, bf16 *all, cudaStream_t s) {
  if (mm_cu_peers_view(p).ranks != g.groups) return cudaErrorInvalidValue;
  return combine_groups(share_rows_combine, p, g, a, s, all);
}

const void *mm_cu_group_kernel(int i) {
  const void *const kernel[] = {reinterpret_cast<const void *>(share_rows_few),      reinterpret_cast<const void *>(share_rows_many),
                                reinterpret_cast<const void *>(reduce_rows_few),     reinterpret_cast<const void *>(reduce_rows_many),
                                reinterpret_cast<const void *>(reduce_rows_combine), reinterpret_cast<const void *>(share_rows_combine)};
  return kernel[i];
}

cudaError_t mm_cu_peers_gather_rows(const mm_cu_peers *p, const mm_cu_group_rows &g, bf16 *all, const bf16 *mine, cudaStream_t s) {
  const peer_view &c = mm_cu_peers_view(p);
  if (!group_rows_fit(c, g)) return cudaErrorInvalidValue;
  const uint32_t rows = most_rows(g);
  const uint64_t words = (uint64_t)rows * g.width / 4;
  if (words * (g.groups - 1) <= kPeerWords)
    return launch(share_rows_few, few_blocks(c, words), kThreads, 0, s, c, row_job{g, c.ranks / g.groups, 0, rows},
                  reinterpret_cast<uint2 *>(all), reinterpret_cast<const uint2 *>(mine));
  const uint32_t most = (uint32_t)(kPeerSlab / sizeof(bf16) / g.width / g.groups);
  return in_turns(share_rows_many, c, {g, c.ranks / g.groups, 0, min(most, rows)}, all, mine, s);
}

cudaError_t mm_cu_peers_scatter_rows(const mm_cu_peers *p, const mm_cu_group_rows &g, bf16 *mine, const bf16 *all, cudaStream_t s) {
  const peer_view &c = mm_cu_peers_view(p);
  if (!group_rows_fit(c, g)) return cudaErrorInvalidValue;
  const uint32_t rows = most_rows(g);
  const uint64_t words = (uint64_t)rows * g.width / 4;
  if (words * (c.ranks - 1) <= kPeerWords)
    return launch(reduce_rows_few, few_blocks(c, words), kThreads, 0, s, c, row_job{g, c.ranks / g.groups, 0, rows},
                  reinterpret_cast<uint2 *>(mine), reinterpret_cast<const uint2 *>(all));
  const uint32_t most = (uint32_t)(kPeerSlab / c.ranks / sizeof(bf16) / g.width);
  return in_turns(reduce_rows_many, c, {g, c.ranks / g.groups, 0, min(most, rows)}, mine, all, s);
}
