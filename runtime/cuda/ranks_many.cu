/* A residual and norm whose branch is a sum over ranks (backend.h), of steps of many rows: one kernel, with the bits of the sum (peers.cu)
 * and then of combine_rows (rows.cu).
 *
 * Rows have owners, who add them up. Of two ranks each owns all rows, since it is sent as much as the other's sums would be; of more each
 * owns a share and sends its sums to the others. Rows go in units of some kilobytes, each with a flag. A block of the kernel has one of two
 * jobs:
 *
 * - senders copy units into other ranks' memory: what this rank has of rows that others own, then the sums of its own. A flag may follow a
 *   unit once all that the block has written is there. One warp waits for that and does nothing else, while the others copy on.
 * - the others take units by ticket, own ones first, wait until their parts or sums are there, and combine them row by row. One warp takes
 *   the next ticket and waits for its unit meanwhile. Tickets, since a multiprocessor with a sender has less to give to its other blocks:
 *   stores to a link that is busy hold up all that come behind them.
 *
 * Nothing waits in a circle. Parts are copied without waiting, by the first blocks of the grid, and there is room for all blocks at once.
 * Sums of own rows are copied when blocks of this rank have added them, which wait for parts alone, since own units come first. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/peers.cuh"
#include "runtime/cuda/row.cuh"

namespace {

constexpr uint32_t kMaxWarps = 12; /* that have a row's columns, in one turn or two; one more waits and tells */
static_assert(kMaxWarps * 2 * 256 >= MM_CU_MAX_HIDDEN);

/* In an epoch of even number; in one of odd number so many pieces of sixteen bytes, or flags, behind it. */
struct many_places {
  uint4 *give[MM_CU_PEERS];      /* in rank r's memory: what this rank has of rows that r owns */
  const uint4 *got[MM_CU_PEERS]; /* what rank r has of rows that this one owns */
  uint4 *sum[MM_CU_PEERS];       /* in rank r's memory: rows of others, by their number */
  /* In rank r's memory, of what this rank has sent; at this rank itself: its sums are in the branch. In this one's, of rank r's. */
  uint32_t *part_flag[MM_CU_PEERS], *sum_flag[MM_CU_PEERS];
  const uint32_t *part_flag_of[MM_CU_PEERS], *sum_flag_of[MM_CU_PEERS];
  uint32_t part_step, sum_step, flag_step;
};

struct many_rows {
  mm_cu_combine a;
  bf16 *branch;
  uint32_t rows, width;
  uint32_t unit, units;                          /* rows of a unit; units of an owner, at most */
  uint32_t senders;                              /* the first blocks */
  bool whole;                                    /* each of two ranks owns all rows */
  uint32_t first[MM_CU_PEERS], end[MM_CU_PEERS]; /* what rank r owns */
  many_places at;
};

/* Rows [row, row + n): unit i of what a rank owns. */
struct rows_unit {
  uint32_t row, n, owner, i;
};
__device__ __forceinline__ rows_unit unit_of(const many_rows &m, uint32_t owner, uint32_t i) {
  const uint32_t row = m.first[owner] + i * m.unit, end = m.end[owner];
  return {row, row < end ? min(m.unit, end - row) : 0, owner, i};
}

/* ---- senders ---- */

/* A unit for rank `to`: as this rank has it, or once it is a sum. Each sender has every m.senders-th, first parts and then sums: unit by
 * unit, and each for the next rank first. */
struct delivery {
  uint32_t i, k; /* unit, of parts and then of sums; rank, behind this one */
};
__device__ __forceinline__ delivery first_delivery(const peer_view &c) {
  const uint32_t others = c.ranks - 1;
  return {blockIdx.x / others, blockIdx.x % others};
}
__device__ __forceinline__ delivery next_delivery(const peer_view &c, const many_rows &m, delivery d) {
  for (d.k += m.senders; d.k >= c.ranks - 1; d.k -= c.ranks - 1) d.i++;
  return d;
}
__device__ __forceinline__ bool is_delivery(const many_rows &m, delivery d) { return d.i < (m.whole ? m.units : 2 * m.units); }

struct parcel {
  rows_unit u;
  uint32_t to;
  bool sum;
};
__device__ __forceinline__ parcel parcel_of(const peer_view &c, const many_rows &m, delivery d) {
  const uint32_t behind = c.rank + 1 + d.k, to = behind < c.ranks ? behind : behind - c.ranks;
  if (d.i < m.units) return {unit_of(m, to, d.i), to, false};
  return {unit_of(m, c.rank, d.i - m.units), to, true};
}

__device__ __forceinline__ void copy_parcel(const many_rows &m, const parcel &x, uint32_t parity, uint32_t threads) {
  const uint32_t pieces = m.width / 8;
  const uint4 *const from = reinterpret_cast<const uint4 *>(m.branch) + (size_t)x.u.row * pieces;
  uint4 *const to = x.sum ? m.at.sum[x.to] + parity * m.at.sum_step + (size_t)x.u.row * pieces
                          : m.at.give[x.to] + parity * m.at.part_step + (size_t)(x.u.row - m.first[x.to]) * pieces;
  each_of<uint4>(
      threadIdx.x, x.u.n * pieces, threads, [&](uint32_t i) { return get_word(from + i); }, [&](uint32_t i, uint4 v) { to[i] = v; });
}

__device__ __forceinline__ void put_count(uint32_t *shared, uint32_t v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t get_count(const uint32_t *shared) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"((uint32_t)__cvta_generic_to_shared(shared)) : "memory");
  return v;
}

/* By all warps but the last: copied[warp] counts what the warp has done its part of. */
__device__ void copy_units(const peer_view &c, const many_rows &m, uint32_t epoch, uint32_t *copied) {
  const uint32_t parity = epoch & 1, lane = threadIdx.x % 32;
  peer_patience p(c);
  uint32_t done = 0;
  for (delivery d = first_delivery(c); is_delivery(m, d); d = next_delivery(c, m, d)) {
    const parcel x = parcel_of(c, m, d);
    bool there = true;
    if (x.sum && x.u.n && lane == 0) {
      while (there && get_flag(m.at.sum_flag[c.rank] + parity * m.at.flag_step + x.u.i) != epoch + 1) there = !p.lost();
    }
    if (!__all_sync(0xffffffffu, there)) return;
    copy_parcel(m, x, parity, blockDim.x - 32);
    __syncwarp();
    if (lane == 0) put_count(&copied[threadIdx.x / 32], ++done);
  }
}

/* By the last warp: the flags of what all others have copied. */
__device__ void tell_units(const peer_view &c, const many_rows &m, uint32_t epoch, const uint32_t *copied) {
  const uint32_t warps = blockDim.x / 32 - 1, lane = threadIdx.x % 32, parity = epoch & 1;
  peer_patience p(c);
  uint32_t told = 0;
  for (delivery d = first_delivery(c); is_delivery(m, d);) {
    const uint32_t least = __reduce_min_sync(0xffffffffu, lane < warps ? get_count(&copied[lane]) : ~0u);
    if (__any_sync(0xffffffffu, p.lost())) return;
    if (least == told) {
      __nanosleep(64);
      continue;
    }
    __syncwarp();
    if (lane == 0) fence_all();
    for (; told < least; told++, d = next_delivery(c, m, d)) {
      const parcel x = parcel_of(c, m, d);
      if (lane == 0 && x.u.n) put_fenced_flag((x.sum ? m.at.sum_flag : m.at.part_flag)[x.to] + parity * m.at.flag_step + x.u.i, epoch + 1);
    }
  }
}

__device__ void send_units(const peer_view &c, const many_rows &m, uint32_t epoch) {
  __shared__ uint32_t copied[kMaxWarps];
  if (threadIdx.x < kMaxWarps) copied[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < blockDim.x - 32)
    copy_units(c, m, epoch, copied);
  else
    tell_units(c, m, epoch, copied);
}

/* ---- those that combine ---- */

/* Whether the columns' warps, and no others, have come. */
__device__ __forceinline__ void meet_columns(uint32_t threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

struct taken_unit {
  rows_unit u;
  const uint4 *from[MM_CU_PEERS]; /* its first row as rank r has it; of another owner its sum */
};

/* The next unit, by the warp that waits: n 0 when there is none, or none comes. */
__device__ rows_unit take_unit(const peer_view &c, const many_rows &m, uint32_t epoch, peer_patience *p) {
  const uint32_t lane = threadIdx.x % 32, others = c.ranks - 1, flags = (epoch & 1) * m.at.flag_step;
  for (;;) {
    uint32_t t = 0;
    if (lane == 0) t = atomicAdd(c.next(), 1u);
    t = __shfl_sync(0xffffffffu, t, 0);
    if (t >= m.units * (m.whole ? 1 : c.ranks)) return {0, 0, 0, 0};
    rows_unit u = unit_of(m, c.rank, t);
    if (t >= m.units) u = unit_of(m, (c.rank + 1 + (t - m.units) % others) % c.ranks, (t - m.units) / others);
    if (u.n == 0) continue; /* the share is one shorter than others */
    bool here = true;
    if (u.owner != c.rank) {
      if (lane == 0) here = p->flag(m.at.sum_flag_of[u.owner] + flags + u.i, epoch + 1, u.owner);
    } else if (lane < c.ranks && lane != c.rank) {
      here = p->flag(m.at.part_flag_of[lane] + flags + u.i, epoch + 1, lane);
    }
    if (!__all_sync(0xffffffffu, here)) u.n = 0;
    return u;
  }
}
__device__ void note_unit(taken_unit *to, const peer_view &c, const many_rows &m, const rows_unit &u, uint32_t parity) {
  const uint32_t lane = threadIdx.x % 32, pieces = m.width / 8;
  if (lane == 0) to->u = u;
  if (lane >= c.ranks) return;
  if (u.owner != c.rank)
    to->from[lane] = m.at.sum[c.rank] + parity * m.at.sum_step + (size_t)u.row * pieces;
  else if (lane == c.rank)
    to->from[lane] = reinterpret_cast<const uint4 *>(m.branch) + (size_t)u.row * pieces;
  else
    to->from[lane] = m.at.got[lane] + parity * m.at.part_step + (size_t)(u.row - m.first[c.rank]) * pieces;
}

/* A piece of sixteen bytes of an own row, over all ranks: in rank order in f32, rounded once. Two are asked for at a time. */
__device__ __forceinline__ uint4 sum_parts(const peer_view &c, const uint4 *const *from, uint32_t piece) {
  total<bf16, SUM, 4> t;
  for (uint32_t r = 0; r < c.ranks; r += 2) {
    uint4 v[2];
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
      if (r + k < c.ranks) v[k] = get_word(from[r + k] + piece);
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
      const uint32_t w[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
      if (r + k < c.ranks) t.add(w, r + k == 0);
    }
  }
  return make_uint4(t.word(0), t.word(1), t.word(2), t.word(3));
}

extern __shared__ __align__(16) float norm_weights[]; /* [width] */

template <int kTurns>
__device__ __forceinline__ void combine_unit(const peer_view &c, const many_rows &m, const taken_unit &x,
                                             float (*part)[kMaxWarps * kTurns]) {
  const uint32_t threads = blockDim.x - 32, width = m.width;
  const mm_cu_combine &a = m.a;
  const bool own = x.u.owner == c.rank;
  for (uint32_t k = 0; k < x.u.n; k++) {
    const uint32_t row = x.u.row + k;
    const size_t at = (size_t)row * width;
    normalise_row<kTurns>(
        threads, width, a.eps, part[k & 1],
        [&](int, uint32_t column, float v[8]) {
          const uint4 residual = *reinterpret_cast<const uint4 *>(a.residual + at + column);
          const uint32_t piece = (k * width + column) / 8;
          uint4 sum;
          if (own) {
            sum = sum_parts(c, x.from, piece);
            if (!m.whole) *reinterpret_cast<uint4 *>(m.branch + at + column) = sum;
          } else {
            sum = get_word(x.from[0] + piece);
          }
          mix8(v, a, residual, sum);
          store8(a.h + at + column, v);
        },
        [&](int, uint32_t column, float w[8]) { load8(w, norm_weights + column); },
        [&](int, uint32_t column, float v[8]) { finish8(a.n, at + column, row, column, v, a.codes); }, [&] { meet_columns(threads); });
  }
}

template <int kTurns>
__device__ void combine_units(const peer_view &c, const many_rows &m, uint32_t epoch) {
  __shared__ float part[2][kMaxWarps * kTurns]; /* rows take turns: who writes one again has met all that read it since */
  __shared__ taken_unit taken[2];
  const bool waits = threadIdx.x >= blockDim.x - 32;
  peer_patience p(c);
  for (uint32_t n = 0;; n++) {
    if (waits) note_unit(&taken[n & 1], c, m, take_unit(c, m, epoch, &p), epoch & 1);
    __syncthreads();
    const taken_unit &x = taken[n & 1];
    if (x.u.n == 0) return;
    if (waits) continue;
    combine_unit<kTurns>(c, m, x, part);
    if (x.u.owner != c.rank || m.whole) continue;
    meet_columns(blockDim.x - 32);
    if (threadIdx.x == 0) put_flag_here(m.at.sum_flag[c.rank] + (epoch & 1) * m.at.flag_step + x.u.i, epoch + 1);
  }
}

template <int kTurns>
constexpr int kPerSm = kTurns == 1 ? 3 : 2; /* blocks */

template <int kTurns>
__global__ void __launch_bounds__(kMaxWarps * 32 + 32, kPerSm<kTurns>)
    reduce_combine_many(const __grid_constant__ peer_view c, const __grid_constant__ many_rows m) {
  const bool sends = blockIdx.x < m.senders;
  for (uint32_t i = threadIdx.x; !sends && i < m.width; i += blockDim.x) norm_weights[i] = m.a.w[i]; /* seen from the first unit on */
  peer_begin(c);
  const uint32_t epoch = *c.epoch;
  if (sends)
    send_units(c, m, epoch);
  else
    combine_units<kTurns>(c, m, epoch);
  peer_end(c, epoch);
}

/* Where rows of the owners lie; of ranks that each own all rows, parts take the place of the sums that nobody sends. */
many_places places_of(const peer_view &c, bool whole) {
  many_places a = {};
  for (uint32_t r = 0; r < c.ranks; r++) {
    a.give[r] = whole ? c.sum(r, 0) : c.part(r, 0, c.rank), a.got[r] = whole ? c.sum(c.rank, 0) : c.part(c.rank, 0, r);
    a.sum[r] = c.sum(r, 0);
    a.part_flag[r] = c.flag(r, 0, 0, c.rank, 0), a.sum_flag[r] = c.flag(r, 1, 0, c.rank, 0);
    a.part_flag_of[r] = c.flag(c.rank, 0, 0, r, 0), a.sum_flag_of[r] = c.flag(c.rank, 1, 0, r, 0);
  }
  a.sum_step = (uint32_t)(c.sum(0, 1) - c.sum(0, 0)), a.flag_step = (uint32_t)(c.flag(0, 0, 1, 0, 0) - c.flag(0, 0, 0, 0, 0));
  a.part_step = whole ? a.sum_step : (uint32_t)(c.part(0, 1, 0) - c.part(0, 0, 0));
  return a;
}

cudaError_t launch_many(const peer_view &c, many_rows m, const mm_cu_many &how, cudaStream_t s) {
  const unsigned warps = ceil_div(m.width, 256), turns = warps > kMaxWarps ? 2 : 1;
  const unsigned blocks = c.apart ? multiprocessors() * (turns == 2 ? kPerSm<2> : kPerSm<1>) : 2;
  uint32_t most = 0;
  for (uint32_t r = 0; r < c.ranks; r++) {
    m.first[r] = m.whole ? 0 : m.rows * r / c.ranks, m.end[r] = m.whole ? m.rows : m.rows * (r + 1) / c.ranks;
    most = (uint32_t)mm_max(most, m.end[r] - m.first[r]);
  }
  /* some hundred units at least, so that blocks end together, and no more than there are flags */
  m.unit = (uint32_t)mm_max(mm_max(1, mm_min(how.unit_bytes / (2 * m.width), most / 256)), ceil_div(most, kPeerFlags));
  m.units = ceil_div(most, m.unit), m.senders = (uint32_t)mm_min(how.senders, blocks / 2);
  m.at = places_of(c, m.whole);
  return launch(turns == 2 ? reduce_combine_many<2> : reduce_combine_many<1>, blocks, ceil_div(warps, turns) * 32 + 32,
                m.width * sizeof(float), s, c, m);
}

}  // namespace

const void *mm_cu_many_kernel(int i) {
  return i ? reinterpret_cast<const void *>(reduce_combine_many<2>) : reinterpret_cast<const void *>(reduce_combine_many<1>);
}

mm_cu_many mm_cu_how_many(const mm_cu_peers *p) { return {24 << 10, 32, mm_cu_peers_view(p).ranks == 2}; }

cudaError_t mm_cu_combine_many(const mm_cu_peers *p, const mm_cu_combine &a, uint32_t rows, uint32_t width, const mm_cu_many &how,
                               cudaStream_t s) {
  const peer_view &c = mm_cu_peers_view(p);
  if (rows < c.ranks || width == 0 || width % 8 != 0 || width > MM_CU_MAX_HIDDEN || !codes_fit(a.codes, rows, width) || how.senders == 0 ||
      (how.whole && c.ranks != 2))
    return cudaErrorInvalidValue;
  const uint32_t most = (uint32_t)(how.whole ? kPeerSlab / 2 / width : kPeerSlab / c.ranks / 2 / width * c.ranks);
  const uint32_t launches = ceil_div(rows, most);
  cudaError_t e = cudaSuccess;
  for (uint32_t i = 0; i < launches && e == cudaSuccess; i++) {
    const uint32_t from = (uint32_t)((uint64_t)rows * i / launches), end = (uint32_t)((uint64_t)rows * (i + 1) / launches);
    const size_t at = (size_t)from * width;
    many_rows m = {a, const_cast<bf16 *>(a.branch) + at, end - from, width, 0, 0, 0, how.whole, {}, {}, {}};
    m.a.h += at, m.a.n += at, m.a.residual += at;
    if (a.codes.code) m.a.codes.code += (size_t)from * a.codes.pitch, m.a.codes.scale += from;
    e = launch_many(c, m, how, s);
  }
  return e;
}
