/* The experts of a prefill step whose weights are codes (sm_90a): two grouped products over the sorted pairs (token, choice), by the tiles
 * of prefill_tile.cuh.
 *
 * First the rows are copied into the sorted order, each piece's columns where the product wants them (lay_places.h). Then 2-CTA clusters
 * take tiles: up to 256 places of one expert and, each block, twice 64 weight rows: w1's and w3's of the same columns, or 128 of w2. Each
 * block loads half of the rows by TMA multicast into both blocks' shared memory. One warp asks for rows and for weights (lines of 128
 * bytes), as far ahead as there is room. Two groups of 128 threads multiply, half of both boxes' weight rows each: a thread has a row of
 * either box, and so gate and up of one column.
 *
 * A row's bits depend on that row alone: its sums go through the columns in their order. */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/swiglu.cuh"
#include "runtime/cuda/core/tensor_map.h"
#include "runtime/cuda/gemm/prefill_tile.cuh"
#include "runtime/cuda/moe/lay_places.h"

namespace {

enum phase { UP, DOWN };

struct many_maps {
  CUtensorMap rows[kSizes], codes; /* boxes of half a tile's rows; of kHigh weight rows */
};

struct many_job {
  mm_cu_weight w;
  mm_cu_route r;
  __nv_bfloat16 *to;  /* UP: middle[place, I]; DOWN: pair_out[pair, H] */
  uint32_t wide, gap; /* tiles across; from the first box's rows to the second's */
  uint32_t piece;     /* UP: the columns of a piece of w2, as whose rows of x middle is laid; 0: it is not */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The group's place in a tile: the result's column that the warp's weight rows begin with; slot and line of the rings where the tile
 * begins; leads: this group's products come first. */
struct tile_place {
  uint32_t at, slot, line;
  bool leads;
};

/* A tile from its first step to its end. Between its products and its results next(). */
template <phase kPhase, mm_cu_code C, mm_cu_scale S, uint32_t N, class Next>
__device__ __forceinline__ void make_tile(const many_job &job, many_shared &sh, const many_note &note, many_rows<C, S> &rows,
                                          const tile_place &place, const Next &next) {
  const mm_cu_weight &w = job.w;
  const uint32_t lane = threadIdx.x % 32, at = place.at;
  float acc[N / 2];
  multiply_tile<C, S, N>(acc, sh, w, rows, place.slot, place.line, place.leads);
  next();
#pragma unroll
  for (uint32_t n = 0; n < N / 8; n += 4) {
    if (kPhase == UP) {
      const uint32_t token = (n + lane % 4) * 8 + lane / 4; /* whose results the lane writes */
      const float f = w.global ? w.global[note.t.expert] : 1.0f;
      uint32_t v[4] = {};
#pragma unroll
      for (uint32_t i = 0; i < 4 && n + i < N / 8; i++) {
        const float *d = &acc[(n + i) * 4];
        v[i] = pack2(activated(job.r.act, d[0] * f, d[2] * f), activated(job.r.act, d[1] * f, d[3] * f));
      }
      const uint4 q = rows_of_tokens(v);
      if (token < note.t.rows && at < w.n / 2) *reinterpret_cast<uint4 *>(job.to + (size_t)(note.t.first + token) * (w.n / 2) + at) = q;
    } else {
      uint4 q[2];
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        uint32_t v[4] = {};
#pragma unroll
        for (uint32_t i = 0; i < 4 && n + i < N / 8; i++) {
          const float2 f = *reinterpret_cast<const float2 *>(&note.factor[(n + i) * 8 + lane % 4 * 2]);
          v[i] = pack2(acc[(n + i) * 4 + h * 2] * f.x, acc[(n + i) * 4 + h * 2 + 1] * f.y);
        }
        q[h] = rows_of_tokens(v);
      }
      /* Two lanes write 16 columns of one token side by side, 32 bytes, then of the other's. */
      const bool odd = lane % 2;
      const uint4 give = odd ? q[0] : q[1], keep = odd ? q[1] : q[0];
      const uint4 got = make_uint4(__shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1),
                                   __shfl_xor_sync(0xffffffffu, give.z, 1), __shfl_xor_sync(0xffffffffu, give.w, 1));
      const uint32_t column = at + odd * 8;
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        const uint32_t of = (n + lane % 4 / 2 * 2 + i) * 8 + lane / 4;
        if (of < note.t.rows && column < w.n)
          *reinterpret_cast<uint4 *>(job.to + (size_t)note.pair[of] * w.n + column) = (i == 0) == odd ? got : keep;
      }
    }
  }
}

/* ---- roles ---- */

/* A warp. */
__device__ __forceinline__ void count_tiles(many_shared &sh, const many_job &job) {
  count_before(sh.before, job.r.experts, [&](uint32_t e) { return (job.r.offset[e + 1] - job.r.offset[e] + kRows - 1) / kRows; });
  __syncwarp();
}

/* Tiles of an expert follow one another, those of the same weight rows first; its rows are divided evenly. */
__device__ __forceinline__ many_tile find_tile(const many_shared &sh, const many_job &job, uint32_t index) {
  if (index >= sh.before[job.r.experts] * job.wide) return {};
  uint32_t e = 0;
  for (uint32_t end = job.r.experts; end - e > 1;) {
    const uint32_t middle = (e + end) / 2;
    (sh.before[middle] * job.wide <= index ? e : end) = middle;
  }
  const uint32_t high = sh.before[e + 1] - sh.before[e], in = index - sh.before[e] * job.wide;
  const uint32_t from = job.r.offset[e], end = job.r.offset[e + 1], each = (end - from + high - 1) / high, first = from + in % high * each;
  return {e, first, min(end - first, each), in / high, true};
}

/* First weight row of the block's boxes. */
template <phase kPhase>
__device__ __forceinline__ uint32_t first_row(const many_tile &t, uint32_t rank) {
  return (t.across * kPair + rank) * (kPhase == UP ? kHigh : 2 * kHigh);
}

/* A warp posts tile `index`, the n-th of the block. */
template <phase kPhase>
__device__ __forceinline__ void post_tile(many_shared &sh, const many_job &job, uint32_t n, uint32_t index) {
  const uint32_t lane = threadIdx.x;
  many_note &to = sh.note[n % kNotes];
  if (n >= kNotes) mbarrier_wait(shared_address(&sh.read[n % kNotes]), (n / kNotes - 1) % 2);
  const many_tile t = find_tile(sh, job, index);
  if (lane == 0) to.t = t;
  if (kPhase == DOWN && t.more) {
    const float global = job.w.global ? job.w.global[t.expert] : 1.0f;
    for (uint32_t i = lane; i < kRows; i += 32) {
      const uint32_t pair = i < t.rows ? job.r.pair[t.first + i] : 0;
      to.pair[i] = pair, to.factor[i] = i < t.rows ? job.r.weight[pair] * global : 0.0f;
    }
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared_address(&sh.published[n % kNotes]));
}

/* A tile of so many rows: its size, and the rows of its products. */
struct tile_rows {
  uint32_t size = 0, taken = tile_size(0);
  __device__ __forceinline__ explicit tile_rows(uint32_t rows) {
#pragma unroll
    for (uint32_t i = 1; i < kSizes; i++) {
      if (rows > tile_size(i - 1)) size = i, taken = tile_size(i);
    }
  }
};

/* A warp. One lane asks for each step's half of the rows, and for a line of both boxes' weights before its first step. */
template <phase kPhase, mm_cu_code C>
__device__ __forceinline__ void produce(many_shared &sh, const many_job &job, const many_maps &maps, uint32_t rank) {
  const uint32_t steps = steps_of(job.w.k), pair = blockIdx.x / kPair, pairs = gridDim.x / kPair;
  count_tiles(sh, job);
  post_tile<kPhase>(sh, job, 0, pair);
  for (uint32_t n = 0, slot = 0, line = 0, slot_phase = 1, line_phase = 1;; n++) {
    const many_tile t = sh.note[n % kNotes].t;
    if (!t.more) return;
    const tile_rows rows(t.rows);
    const uint32_t taken = rows.taken, each = slot_steps(taken), half = taken / kPair * rank;
    const uint32_t weight = t.expert * job.w.n + first_row<kPhase>(t, rank);
    for (uint32_t s = 0; s < steps; s++) {
      if (s % kStepsOf<C> == 0) {
        const uint32_t full = shared_address(&sh.codes_full[line]);
        mbarrier_wait(shared_address(&sh.codes_empty[line]), line_phase);
        if (one_lane()) {
          mbarrier_arrive_expect_tx(full, sizeof sh.codes[line]);
#pragma unroll
          for (uint32_t box = 0; box < 2; box++)
            tma_load(shared_address(sh.codes[line][box]), &maps.codes, s / kStepsOf<C> * kLine, weight + box * job.gap, full);
        }
        if (++line == kLines) line = 0, line_phase ^= 1;
      }
      const uint32_t full = shared_address(&sh.x_full[slot]), first = s % each;
      if (first == 0) mbarrier_wait(shared_address(&sh.x_empty[slot]), slot_phase);
      if (one_lane()) {
        if (first == 0) mbarrier_arrive_expect_tx(full, each * taken * kLine);
        tma_load_multicast(shared_address(sh.x[slot]) + (first * taken + half) * kLine, &maps.rows[rows.size], s * kLine, t.first + half,
                           full);
      }
      __syncwarp();
      if (first == each - 1 && ++slot == kSlots) slot = 0, slot_phase ^= 1;
      if (s == steps / 2) post_tile<kPhase>(sh, job, n + 1, pair + (n + 1) * pairs);
    }
  }
}

/* A group of 128 threads. UP, a warp has eight rows of either box: of a laid middle those whose columns lie side by side in it. DOWN, 16
 * rows that follow one another in one box. */
template <phase kPhase, mm_cu_code C, mm_cu_scale S>
__device__ __forceinline__ void consume(many_shared &sh, const many_job &job, uint32_t group, uint32_t rank) {
  const mm_cu_weight &w = job.w;
  const uint32_t steps = steps_of(w.k), lines = steps / kStepsOf<C>;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, piece = job.piece;
  const uint32_t begin = kPhase == UP ? group * 32 + warp * 8 : group * 64 + warp * 16, gap = kPhase == UP ? job.gap : 8;
  const auto row_of = [&](uint32_t i) {
    return piece ? group * 32 + warp * 8 / piece * piece + i / 2 * (piece / 4) + warp * 8 % piece / 4 + i % 2 : begin + i;
  };
  const uint32_t lent = row_of(lane % 8), mine = row_of(lane / 4);
  many_rows<C, S> rows = {(lane / 8 % 2 * (kPhase == UP ? kHigh : 8) + lent) * kLine, lent % 8, {}, {}};
  bool more = false;
  const auto begin_tile = [&](uint32_t n) {
    mbarrier_wait(shared_address(&sh.published[n % kNotes]), n / kNotes % 2);
    const many_tile &t = sh.note[n % kNotes].t;
    more = t.more;
    if (more) rows.begin(w, t.expert, first_row<kPhase>(t, rank) + mine, gap);
  };
  begin_tile(0);
  if (more && group == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
  for (uint32_t n = 0, slot = 0, line = 0; more; n++, line += lines) {
    const many_note &note = sh.note[n % kNotes];
    const uint32_t taken = tile_rows(note.t.rows).taken;
    const tile_place place = {first_row<kPhase>(note.t, rank) + begin, slot, line, n == 0 && group == 0};
    const auto next = [&] { begin_tile(n + 1); };
    switch (taken) {
      case 64: make_tile<kPhase, C, S, 64>(job, sh, note, rows, place, next); break;
      case 128: make_tile<kPhase, C, S, 128>(job, sh, note, rows, place, next); break;
      case 144: make_tile<kPhase, C, S, 144>(job, sh, note, rows, place, next); break;
      case 192: make_tile<kPhase, C, S, 192>(job, sh, note, rows, place, next); break;
      default: make_tile<kPhase, C, S, 256>(job, sh, note, rows, place, next); break;
    }
    slot += steps / slot_steps(taken);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.read[n % kNotes]));
  }
}

#endif

template <phase kPhase, mm_cu_code C, mm_cu_scale S>
__global__ void MM_PAIR __launch_bounds__(kThreads, 1)
    experts_many(const __grid_constant__ many_maps maps, const __grid_constant__ many_job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  many_shared &sh = *reinterpret_cast<many_shared *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSlots; i++)
      mbarrier_init(shared_address(&sh.x_full[i]), 1), mbarrier_init(shared_address(&sh.x_empty[i]), kPair * kGroups * 4);
    for (uint32_t i = 0; i < kLines; i++)
      mbarrier_init(shared_address(&sh.codes_full[i]), 1), mbarrier_init(shared_address(&sh.codes_empty[i]), kGroups * 4);
    for (uint32_t i = 0; i < kNotes; i++)
      mbarrier_init(shared_address(&sh.published[i]), 1), mbarrier_init(shared_address(&sh.read[i]), kGroups * 4);
  }
  cluster_sync();
  grid_wait_and_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), rank = blockIdx.x % kPair;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce<kPhase, C>(sh, job, maps, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<kPhase, C, S>(sh, job, group - 1, rank);
  }
  __syncwarp();
  cluster_sync(); /* the other block's last arrivals have come by then too */
#else
  no_such_code();
#endif
}

/* One pass over x[place, k] as laid. */
struct many_launch {
  const mm_cu_weight &w;
  const __nv_bfloat16 *x;
  many_job job;
  phase which;
  uint32_t pairs; /* of tokens and choices */
  cudaStream_t s;

  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (C == MM_CU_BF16) {
      return cudaErrorNotSupported;
    } else {
      constexpr mm_cu_scale kScale = S == MM_CU_FINE ? MM_CU_COARSE : S;
      many_maps maps;
      cudaError_t e = mm_cu_map_boxes(&maps.codes, w.data, w.pitch, (uint64_t)w.lead * w.n, kLine, kHigh, CU_TENSOR_MAP_SWIZZLE_128B);
      for (uint32_t i = 0; i < kSizes && e == cudaSuccess; i++)
        e = mm_cu_map_boxes(&maps.rows[i], x, 2 * (uint64_t)w.k, pairs, kLine, tile_size(i) / kPair, CU_TENSOR_MAP_SWIZZLE_128B);
      if (e != cudaSuccess) return e;
      const unsigned tiles = min(pairs, pairs / kRows + job.r.experts) * job.wide; /* the most there can be */
      return launch(which == UP ? experts_many<UP, C, kScale> : experts_many<DOWN, C, kScale>,
                    kPair * min(tiles, multiprocessors() / kPair), kThreads, sizeof(many_shared), s, maps, job);
    }
  }
};

/* Columns of a piece. */
uint32_t piece_of(const mm_cu_weight &w) { return w.code == MM_CU_E4M3 ? 16 : 32; }

/* a.middle, which has the places of pairs in it before; piece: laid for w2's pieces of so many columns, or as it is (0). a.pair_out holds
 * the rows. */
cudaError_t up_many(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, uint32_t piece, cudaStream_t s) {
  const uint32_t pairs = a.tokens * r.top_k;
  __nv_bfloat16 *const x = reinterpret_cast<__nv_bfloat16 *>(a.pair_out);
  const cudaError_t e = mm_cu_lay_tokens(x, a.x, reinterpret_cast<uint32_t *>(a.middle), r, a.tokens, w13.k, piece_of(w13), s);
  const many_job job = {w13, r, a.middle, ceil_div(w13.n / 2, kPair * kHigh), w13.n / 2, piece};
  return e != cudaSuccess ? e : for_scheme(w13, many_launch{w13, x, job, UP, pairs, s});
}

}  // namespace

cudaError_t mm_cu_experts_many(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                               cudaStream_t s) {
  const uint32_t pairs = a.tokens * r.top_k;
  const mm_cu_rounding *const before = mm_cu_rounds_before(MM_CU_EXPERTS_MANY, &w2);
  __nv_bfloat16 *const out = reinterpret_cast<__nv_bfloat16 *>(a.pair_out);
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_MANY, {&w13, &w2, a.tokens, r.top_k});
  if (e == cudaSuccess) e = up_many(w13, r, a, before ? 0 : piece_of(w2), s);
  if (e == cudaSuccess && before) e = mm_cu_lay_rounded(a.middle, *before, r, a.tokens, w2.k, piece_of(w2), s);
  const many_job job = {w2, r, out, ceil_div(w2.n, 2 * kPair * kHigh), kHigh, 0};
  if (e == cudaSuccess) e = for_scheme(w2, many_launch{w2, a.middle, job, DOWN, pairs, s});
  return e != cudaSuccess ? e : mm_cu_sum_choices(a.y, a.push, out, r, a.tokens, w2.n, s);
}

cudaError_t mm_cu_experts_many_middle(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s) {
  return up_many(w13, r, a, 0, s);
}
