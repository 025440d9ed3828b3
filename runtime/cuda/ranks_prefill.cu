/* A residual and norm whose branch is a sum over two ranks (backend.h), of steps of many rows: one kernel, with the bits of the sum
 * (peers.cu) and then of combine_rows (rows.cu). Each rank sends all its rows and adds all rows up: as many bytes cross the link as when
 * each adds half of them and sends the sums back, in one exchange and not two. A block sends its rows, meets the other rank's block of the
 * same rows, and combines them. There is one block on a multiprocessor, since a meeting waits for all that the multiprocessor has written,
 * and room for those of another stage, which may wait on the same devices, while blocks wait.
 *
 * Where the product before it has sent the rows as it made them (mm_cu_push), the ranks meet in a kernel of one block, and the next one
 * combines them on all multiprocessors and waits for nobody. It reads what came in the epoch that has just been counted: the other rank
 * writes there again two epochs later, when it has had this rank's word of the one between, which follows this kernel. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/row.cuh"

namespace {

constexpr uint32_t kMaxWarps = 12, kGroups = 2; /* that have a row's columns, in one turn or two; rows at a time */
static_assert(kMaxWarps * 2 * 256 >= MM_CU_MAX_HIDDEN);

struct many_rows {
  mm_cu_combine a;
  uint32_t rows, width, each, threads; /* rows of a block, threads of a row */
};

/* Barrier of the ranks after their rows are sent. The next kernel takes whole multiprocessors, which the other rank's product may need to
 * get here, so it does not start before the end. */
__global__ void __launch_bounds__(32) meet_ranks(const __grid_constant__ peer_view c) {
  grid_wait();
  const uint32_t epoch = c.counters->epoch;
  peer_timeout p(c);
  peer_barrier(c, &p, 0, epoch & 1, epoch + 1);
  peer_end(c, epoch);
}

/* kSent: meet_ranks came before. */
template <int kTurns, bool kSent>
__global__ void __launch_bounds__(kGroups *kMaxWarps * 32, 1)
    combine_two_ranks(const __grid_constant__ peer_view c, const __grid_constant__ many_rows m) {
  __shared__ float part[kGroups][2][kMaxWarps * kTurns]; /* a group's rows take turns: who writes one again has met all that read it */
  const mm_cu_combine &a = m.a;
  const uint32_t group = threadIdx.x / m.threads, thread = threadIdx.x % m.threads, pieces = m.width / 8;
  const row_columns own_columns = {thread, m.threads, m.width};
  float w[kTurns][8];
  each_turn<kTurns>(own_columns, [&](int i, uint32_t column) { load8(w[i], a.w + column); });
  uint32_t epoch;
  if constexpr (kSent) {
    grid_wait_and_launch_next();
    epoch = c.counters->epoch - 1;
  } else {
    peer_begin(c);
    epoch = c.counters->epoch;
  }
  const uint32_t parity = epoch & 1, first = min(blockIdx.x * m.each, m.rows), n = min(m.each, m.rows - first);
  const uint4 *const branch = reinterpret_cast<const uint4 *>(a.branch);
  bool here = true;
  if constexpr (!kSent) {
    const size_t begin = (size_t)first * pieces;
    uint4 *const to = c.sum(1 - c.rank, parity) + begin;
    each_of<uint4>(
        threadIdx.x, n * pieces, blockDim.x, [&](uint32_t i) { return branch[begin + i]; },
        [&](uint32_t i, uint4 v) { put_word(to + i, v); });
    peer_timeout p(c);
    here = peer_barrier(c, &p, 0, parity, epoch + 1);
  }
  for (uint32_t k = group; here && k < n; k += kGroups) {
    const uint32_t row = first + k;
    const size_t at = (size_t)row * m.width;
    normalise_row<kTurns>(
        own_columns, a.eps, part[group][k / kGroups % 2],
        [&](int, uint32_t column, float v[8]) {
          const size_t piece = (at + column) / 8;
          const uint4 own = branch[piece], other = get_word(c.sum(c.rank, parity) + piece);
          const uint4 residual = *reinterpret_cast<const uint4 *>(a.residual + at + column);
          total<bf16, SUM, 4> t;
          for (uint32_t r = 0; r < 2; r++) {
            const uint4 x = r == c.rank ? own : other;
            const uint32_t words[4] = {x.x, x.y, x.z, x.w};
            t.add(words, r == 0);
          }
          mix8(v, a, residual, make_uint4(t.word(0), t.word(1), t.word(2), t.word(3)));
          store8(a.h + at + column, v);
        },
        [&](int i, uint32_t, float v[8]) {
#pragma unroll
          for (int j = 0; j < 8; j++) v[j] = w[i][j];
        },
        [&](int, uint32_t column, float v[8]) { finish8(a.n, at + column, row, column, v, a.codes); },
        [&] { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(m.threads)
                           : "memory"); });
  }
  if constexpr (!kSent) peer_end(c, epoch);
}

}  // namespace

const void *mm_cu_large_sum_kernel(int i) {
  return i == 2   ? reinterpret_cast<const void *>(meet_ranks)
         : i == 1 ? reinterpret_cast<const void *>(combine_two_ranks<2, false>)
                  : reinterpret_cast<const void *>(combine_two_ranks<1, false>);
}

mm_cu_push mm_cu_push_rows(const mm_cu_peers *p, uint32_t rows, uint32_t width) {
  if (!mm_cu_peers_many(p, (uint64_t)rows * width / 4)) return {};
  const peer_view &c = mm_cu_peers_view(p);
  if ((uint64_t)rows * width * sizeof(bf16) > c.sum_bytes) return {};
  mm_cu_push push = {{}, &c.counters->epoch};
  for (uint32_t parity = 0; parity < 2; parity++) push.to[parity] = reinterpret_cast<bf16 *>(c.sum(1 - c.rank, parity));
  return push;
}

cudaError_t mm_cu_combine_many(const mm_cu_peers *p, const mm_cu_combine &a, uint32_t rows, uint32_t width, bool sent, cudaStream_t s) {
  const peer_view &c = mm_cu_peers_view(p);
  if (c.ranks != 2 || width == 0 || width % 8 != 0 || width > MM_CU_MAX_HIDDEN || !codes_fit(a.codes, rows, width))
    return cudaErrorInvalidValue;
  const unsigned warps = ceil_div(width, 256), turns = warps > kMaxWarps ? 2 : 1, threads = ceil_div(warps, turns) * 32;
  const auto run = [&](uint32_t from, uint32_t count, unsigned blocks) {
    const size_t at = (size_t)from * width;
    many_rows m = {a, count, width, ceil_div(count, blocks), threads};
    m.a.h += at, m.a.n += at, m.a.residual += at, m.a.branch += at;
    if (a.codes.code) m.a.codes.code += (size_t)from * a.codes.pitch, m.a.codes.scale += from;
    const auto kernel = turns == 2 ? (sent ? combine_two_ranks<2, true> : combine_two_ranks<2, false>)
                                   : (sent ? combine_two_ranks<1, true> : combine_two_ranks<1, false>);
    return launch(kernel, blocks, kGroups * threads, 0, s, c, m);
  };
  cudaError_t e = cudaSuccess;
  if (sent) {
    e = launch(meet_ranks, 1, 32, 0, s, c);
    return e != cudaSuccess ? e : run(0, rows, min(ceil_div(rows, kGroups), multiprocessors()));
  }
  const uint32_t launches = ceil_div(rows, (uint32_t)(c.sum_bytes / 2 / width));
  for (uint32_t i = 0; i < launches && e == cudaSuccess; i++) {
    const uint32_t from = (uint32_t)((uint64_t)rows * i / launches), count = (uint32_t)((uint64_t)rows * (i + 1) / launches) - from;
    e = run(from, count, c.distinct_devices ? kPeerBlocks : 2);
  }
  return e;
}
