/* The experts of a step that gives each a few rows (sm_90a): two passes over the weights of the experts in use, which are read once for
 * every eight or 16 rows of an expert.
 *
 * A first kernel copies the rows into the sorted order, as small_batch_rows.cuh wants them, and rounds them on the way. Then blocks take
 * units: eight places of one expert, or 16 where there are many rows, and twice 64 weight rows, w1's and w3's of the same columns, or 128
 * of w2. A stage is 128 bytes of all those rows with their scales, and the same columns of the eight places. One warp loads weights by TMA,
 * as far ahead as there are free stages and before the rows are known, another one for the rows. Three groups multiply stages in turn, so
 * that some widen codes while another's products are under way. All groups' sums go through shared memory to two more warps, which make
 * results of them while the groups go on.
 *
 * A row's bits depend on that row alone: not on the number of tokens, nor on its place. */
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/round.cuh"
#include "runtime/cuda/core/swiglu.cuh"
#include "runtime/cuda/core/tensor_map.h"
#include "runtime/cuda/gemm/small_batch_rows.cuh"

namespace {

constexpr uint32_t kTurns = 3, kThreads = 128 * (1 + kTurns); /* kTurns: groups */
constexpr uint32_t kStages = 2 * kTurns;                      /* a place in the ring belongs to one group */
[[maybe_unused]] constexpr uint32_t kAdders = 64;             /* threads */

enum phase { UP, DOWN };

/* P: places of a unit, 8 or 16. */
template <mm_cu_code C, mm_cu_scale S, uint32_t P>
struct few_stage {
  using kind = few_kind<C, S>;
  static constexpr uint32_t kOther = 2 * kBox * kind::kScaleBytes + kind::kGroups * P * 8;
  uint8_t code[2][kBox * kLine];
  uint8_t x[kind::kColumns / kPart][P * kLine];
  uint8_t scale[2][kBox * kind::kScaleBytes]; /* COARSE: f32 [half][row] of each box */
  float2 back[kind::kGroups][P];
  uint8_t pad[(1024 - kOther % 1024) % 1024];
};
template <mm_cu_code C, mm_cu_scale S, uint32_t P>
struct few_shared {
  enum : uint32_t { kPlaces = P };
  few_stage<C, S, P> stage[kStages];
  float sum[2][kTurns][2][kBox][P + 4]; /* of a unit, by a step's place in the turns, and box */
  uint64_t full[kStages], empty[kStages], summed[2], read[2];
  uint32_t before[MM_CU_MAX_EXPERTS + 1]; /* units of lower experts */
  uint32_t offset[MM_CU_MAX_EXPERTS + 1]; /* the route's */
};

/* Places [first, first + rows) of the sorted order, of one expert; which of the `wide` tiles of its weight rows. */
struct few_unit {
  uint32_t expert, first, rows, across;
};

/* Rows in the sorted order: number[place, k] f16, back[k / 128, pitch]. */
struct few_rows {
  __half *number;
  float2 *back;
  uint32_t k, pitch;
};

struct few_job {
  mm_cu_weight w;
  mm_cu_route r;
  few_rows x;
  __nv_bfloat16 *middle;    /* UP: [place, I] */
  float *pair_out;          /* DOWN: [pair, H] */
  uint32_t wide, each, gap; /* units across, rows of each, and from the first box's rows to the second's */
};

/* ---- rows ---- */

/* How inputs are rounded: to codes of groups of 128 columns (convert_columns), or to numbers that other codes stand for. early: the next
 * kernel, which reads the lists at once, may start before this one has waited, since they are complete. */
struct lay_how {
  bool codes, numbers, early;
  rounder by;
};
/* Half a warp takes 128 columns of a place. pair NULL: row `place` of x, else that of the pair's token. */
constexpr uint32_t kLayers = 8; /* warps */
template <uint32_t kPiece, bool kOffset>
__global__ void __launch_bounds__(kLayers * 32) lay_rows(const few_rows to, const __nv_bfloat16 *x, const uint32_t *pair,
                                                         const uint32_t *places, uint32_t top_k, uint32_t groups, lay_how how) {
  const uint32_t place = blockIdx.x, lane = threadIdx.x % 16, lanes = 0xffffu << (threadIdx.x & 16);
  if (how.early) grid_launch_next_early();
  grid_wait();
  if (!how.early) grid_launch_next_early();
  if (place >= __ldcg(places)) return;
  const __nv_bfloat16 *from = x + (size_t)(pair ? pair[place] / top_k : place) * to.k;
  const float row_scale = how.numbers && how.by.whole_row() ? how.by.row_scale(largest_of_row<kLayers>(from, to.k)) : 1.0f;
  for (uint32_t group = threadIdx.x / 16; group < groups; group += kLayers * 2) {
    const uint32_t column = group * kGroup + lane * 8;
    uint4 v = column < to.k ? *reinterpret_cast<const uint4 *>(from + column) : make_uint4(0, 0, 0, 0);
    if (how.numbers) v = rounded8(how.by, v, row_scale, lanes);
    const few_columns c = convert_columns<kOffset>(v, how.codes);
    if (column < to.k) {
      uint32_t *row = reinterpret_cast<uint32_t *>(to.number + (size_t)place * to.k + column / kPart * kPart);
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        const uint32_t at = place_of_four<kPiece>(lane % 8 * 2 + i) / 2;
        row[at] = c.h[2 * i], row[at + 4] = c.h[2 * i + 1];
      }
    }
    if (lane == 0) to.back[(size_t)group * to.pitch + place] = c.back;
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- units ---- */

/* A warp; the lists were written before the kernel before this one began. */
template <class Shared>
__device__ __forceinline__ void count_units(Shared &sh, const few_job &job) {
  count_before(sh.before, job.r.experts, [&](uint32_t e) {
    const uint32_t from = __ldcg(&job.r.offset[e]), end = __ldcg(&job.r.offset[e + 1]);
    sh.offset[e] = from;
    if (e + 1 == job.r.experts) sh.offset[e + 1] = end;
    return (end - from + Shared::kPlaces - 1) / Shared::kPlaces * job.wide;
  });
}

/* A warp. *expert: that of a unit before this one, or 0; becomes this one's. Shared memory alone is read: a unit of a narrow cut takes
 * little longer than a load from device memory. */
template <class Shared>
__device__ __forceinline__ few_unit find_unit(const Shared &sh, const few_job &job, uint32_t index, uint32_t *expert) {
  constexpr uint32_t kPlaces = Shared::kPlaces;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t e = *expert;
  for (uint32_t passed = 32; passed == 32; e += passed) /* before[] never falls, and its last number is above the index */
    passed = __popc(__ballot_sync(0xffffffffu, sh.before[min(e + 1 + lane, job.r.experts)] <= index));
  *expert = e;
  const uint32_t from = sh.offset[e], rows = sh.offset[e + 1] - from;
  const uint32_t high = (rows + kPlaces - 1) / kPlaces, in = index - sh.before[e], first = in % high * kPlaces;
  return {e, from + first, min(rows - first, kPlaces), in / high};
}

/* ---- roles ---- */

/* f(unit, step, stage) for all stages of the block in turn, once their place is free. */
template <class Shared, class F>
__device__ __forceinline__ void fill_stages(const Shared &sh, const few_job &job, uint32_t steps, const F &f) {
  const uint32_t units = sh.before[job.r.experts];
  uint32_t at = 0, phase = 1, expert = 0;
  for (uint32_t index = blockIdx.x; index < units; index += gridDim.x) {
    const few_unit unit = find_unit(sh, job, index, &expert);
    for (uint32_t step = 0; step < steps; step++) {
      mbarrier_wait(shared_address(&sh.empty[at]), phase);
      f(unit, step, at);
      __syncwarp(); /* no lane is two phases behind */
      if (++at == kStages) at = 0, phase ^= 1;
    }
  }
}

template <mm_cu_code C, mm_cu_scale S, uint32_t P>
__device__ __forceinline__ void fetch_weights(few_shared<C, S, P> &sh, const few_job &job, const CUtensorMap *codes,
                                              const CUtensorMap *scales, uint32_t steps) {
  using kind = few_kind<C, S>;
  const mm_cu_weight &w = job.w;
  const uint32_t lane = threadIdx.x % 32, last = (w.k - 1) >> w.cell_k_log2;
  fill_stages(sh, job, steps, [&](const few_unit &unit, uint32_t step, uint32_t at) {
    few_stage<C, S, P> &to = sh.stage[at];
    const uint32_t full = shared_address(&sh.full[at]), first = unit.across * job.each;
    if (S == MM_CU_COARSE) {
      const float *base = static_cast<const float *>(w.scale) + (size_t)unit.expert * (w.scale_rows * w.scale_pitch);
      const uint32_t half = kind::kColumns / 2;
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) { /* box, half, 32 rows */
        const uint32_t row = i % 2 * 32 + lane, n = min(first + i / 4 * job.gap + row, w.n - 1);
        const uint32_t cell = min((step * 2 + i / 2 % 2) * half >> w.cell_k_log2, last);
        copy4_to(shared_address(to.scale[i / 4]) + (i / 2 % 2 * kBox + row) * 4, base + (n >> w.cell_n_log2) * w.scale_pitch + cell);
      }
      mbarrier_arrive_copied(full);
    }
    if (!one_lane()) return;
    mbarrier_arrive_expect_tx(full, 2 * kBox * (kLine + (S == MM_CU_COARSE ? 0 : 16)));
#pragma unroll
    for (uint32_t box = 0; box < 2; box++) {
      const uint32_t n = unit.expert * w.n + first + box * job.gap;
      tma_load_once(shared_address(to.code[box]), codes, step * kLine, n, full);
      if (S != MM_CU_COARSE) tma_load(shared_address(to.scale[box]), scales, step / kByteSteps<C, S> * 16, n, full);
    }
  });
}

template <mm_cu_code C, mm_cu_scale S, uint32_t P>
__device__ __forceinline__ void fetch_rows(few_shared<C, S, P> &sh, const few_job &job, const CUtensorMap *rows, uint32_t steps) {
  using kind = few_kind<C, S>;
  constexpr uint32_t kParts = kind::kColumns / kPart, kGroups = kind::kGroups;
  const uint32_t lane = threadIdx.x % 32;
  fill_stages(sh, job, steps, [&](const few_unit &unit, uint32_t step, uint32_t at) {
    few_stage<C, S, P> &to = sh.stage[at];
    const uint32_t full = shared_address(&sh.full[at]), group = lane / P, place = min(unit.first + lane % P, job.x.pitch - 1);
    if (group < kGroups) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(&to.back[group][lane % P])),
                   "l"(&job.x.back[(size_t)(step * kGroups + group) * job.x.pitch + place])
                   : "memory");
    }
    mbarrier_arrive_copied(full);
    if (!one_lane()) return;
    mbarrier_arrive_expect_tx(full, sizeof to.x);
#pragma unroll
    for (uint32_t i = 0; i < kParts; i++) tma_load(shared_address(to.x[i]), rows, (step * kParts + i) * kLine, unit.first, full);
  });
}

/* A group of 128 threads: every stage in turn. */
template <mm_cu_code C, mm_cu_scale S, uint32_t P>
__device__ __forceinline__ void multiply_stages(few_shared<C, S, P> &sh, const few_job &job, uint32_t group, uint32_t steps) {
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, units = sh.before[job.r.experts];
  uint32_t at = group, phase = 0, step = group, n = 0;
  for (uint32_t index = blockIdx.x; index < units; index += gridDim.x, n++) {
    const uint32_t first = step; /* not the group's number says which sums are added first, so that a unit's place changes no bits */
    float out[2][P / 2] = {};
    for (; step < steps; step += kTurns) {
      const few_stage<C, S, P> &from = sh.stage[at];
      const uint32_t codes = uniform(shared_address(from.code[0])), x = uniform(shared_address(from.x));
      mbarrier_wait(shared_address(&sh.full[at]), phase);
#pragma unroll
      for (uint32_t box = 0; box < 2; box++) {
        multiply_box<C, S, P>(out[box], {codes + box * (kBox * kLine), from.scale[box], x, &from.back[0][0]}, step, [&] {
          __syncwarp();
          if (box == 1 && lane == 0) mbarrier_arrive(shared_address(&sh.empty[at]));
        });
      }
      at += kTurns;
      if (at >= kStages) at = group, phase ^= 1;
    }
    step -= steps;
    mbarrier_wait(shared_address(&sh.read[n % 2]), n / 2 % 2 ^ 1);
#pragma unroll
    for (uint32_t box = 0; box < 2; box++) {
#pragma unroll
      for (uint32_t i = 0; i < P / 4; i++) /* eight places, half of the rows */
        *reinterpret_cast<float2 *>(&sh.sum[n % 2][first][box][row + i % 2 * 8][i / 2 * 8 + lane % 4 * 2]) =
            make_float2(out[box][i * 2], out[box][i * 2 + 1]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.summed[n % 2]));
  }
}

/* DOWN: lane i has the pair of a unit's place i, and its weight. The pair of a unit is loaded while the sums of the one before it are on
 * their way, and the weight while those are used. */
struct few_pair {
  uint32_t pair = 0;
  float weight = 0;
  __device__ __forceinline__ void load_pair(const few_job &job, const few_unit &unit) {
    pair = __ldcg(&job.r.pair[unit.first + min(threadIdx.x % 32, unit.rows - 1)]);
  }
  __device__ __forceinline__ void load_weight(const few_job &job) { weight = __ldcg(&job.r.weight[pair]); }
};

/* kAdders threads: a row of both boxes each. */
template <phase kPhase, class Shared>
__device__ __forceinline__ void use_sums(Shared &sh, const few_job &job) {
  constexpr uint32_t kPlaces = Shared::kPlaces;
  const uint32_t units = sh.before[job.r.experts], row = threadIdx.x % kAdders;
  const mm_cu_weight &w = job.w;
  uint32_t n = 0, expert = 0;
  few_unit next = {};
  few_pair of_next;
  if (blockIdx.x < units) next = find_unit(sh, job, blockIdx.x, &expert);
  if (kPhase == DOWN && blockIdx.x < units) of_next.load_pair(job, next), of_next.load_weight(job);
  for (uint32_t index = blockIdx.x; index < units; index += gridDim.x, n++) {
    const few_unit unit = next;
    const few_pair of = of_next;
    const bool more = index + gridDim.x < units;
    if (more) next = find_unit(sh, job, index + gridDim.x, &expert);
    if (kPhase == DOWN && more) of_next.load_pair(job, next);
    const float global = w.global ? w.global[unit.expert] : 1.0f;
    mbarrier_wait(shared_address(&sh.summed[n % 2]), n / 2 % 2);
    float v[2][kPlaces];
#pragma unroll
    for (uint32_t i = 0; i < 2 * kPlaces; i += 4) {
      float4 &to = *reinterpret_cast<float4 *>(&v[i / kPlaces][i % kPlaces]);
#pragma unroll
      for (uint32_t j = 0; j < kTurns; j++) {
        const float4 a = *reinterpret_cast<const float4 *>(&sh.sum[n % 2][j][i / kPlaces][row][i % kPlaces]);
        to = j == 0 ? a : make_float4(to.x + a.x, to.y + a.y, to.z + a.z, to.w + a.w);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&sh.read[n % 2]));
    if (kPhase == DOWN && more) of_next.load_weight(job);
    const uint32_t column = unit.across * job.each + row;
#pragma unroll
    for (uint32_t i = 0; i < kPlaces; i++) {
      if (i >= unit.rows) break;
      if (kPhase == UP) {
        if (column < w.n / 2)
          job.middle[(size_t)(unit.first + i) * (w.n / 2) + column] =
              __float2bfloat16_rn(activated(job.r.act, v[0][i] * global, v[1][i] * global));
      } else {
        const uint32_t pair = __shfl_sync(0xffffffffu, of.pair, i);
        const float f = __shfl_sync(0xffffffffu, of.weight, i) * global;
#pragma unroll
        for (uint32_t g = 0; g < 2; g++)
          if (column + g * kBox < w.n) job.pair_out[(size_t)pair * w.n + column + g * kBox] = v[g][i] * f;
      }
    }
  }
}

#endif

template <phase kPhase, mm_cu_code C, mm_cu_scale S, uint32_t P>
__global__ void __launch_bounds__(kThreads, 1)
    experts_few(const __grid_constant__ CUtensorMap codes, const __grid_constant__ CUtensorMap scales,
                const __grid_constant__ CUtensorMap rows, const __grid_constant__ few_job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  few_shared<C, S, P> &sh = *reinterpret_cast<few_shared<C, S, P> *>(raw);
  const uint32_t warp = threadIdx.x / 32, steps = (uint32_t)((job.w.pitch + kLine - 1) / kLine);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&sh.full[i]), S == MM_CU_COARSE ? 66 : 34); /* two expect bytes; lanes that copy */
      mbarrier_init(shared_address(&sh.empty[i]), 4);
    }
    for (uint32_t i = 0; i < 2; i++)
      mbarrier_init(shared_address(&sh.summed[i]), kTurns * 4), mbarrier_init(shared_address(&sh.read[i]), 2);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 1) count_units(sh, job);
  __syncthreads();
  grid_launch_next_early();
  if (warp == 0) {
    fetch_weights(sh, job, &codes, &scales, steps);
  } else if (warp == 1) {
    grid_wait();
    fetch_rows(sh, job, &rows, steps);
  } else if (warp < 4) {
    grid_wait();
    use_sums<kPhase>(sh, job);
  } else {
    multiply_stages(sh, job, warp / 4 - 1, steps);
  }
#else
  no_such_code();
#endif
}

/* One pass: rows copied, then multiplied. room: for the rows, as f16, and their scales. */
struct few_launch {
  const mm_cu_weight &w;
  const mm_cu_route &r;
  const mm_cu_experts &a;
  phase which;
  void *scratch;
  cudaStream_t s;

  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (C == MM_CU_BF16 || !has_few<C, S>()) {
      return cudaErrorNotSupported;
    } else {
      using kind = few_kind<C, S>;
      const uint32_t pairs = a.tokens * r.top_k, groups = ceil_div((uint32_t)w.pitch, kLine) * kind::kGroups;
      const uint32_t places = pairs < 6 * r.experts ? 8 : 16; /* sums have the same bits */
      __half *const number = static_cast<__half *>(scratch);
      const few_rows x = {number, reinterpret_cast<float2 *>(number + (size_t)pairs * w.k), w.k, pairs};
      few_job job = {w, r, x, a.middle, a.pair_out, ceil_div(w.n, 2 * kBox), 2 * kBox, kBox};
      if (which == UP) job.wide = ceil_div(w.n / 2, kBox), job.each = kBox, job.gap = w.n / 2;
      CUtensorMap codes, scales = {}, rows;
      const uint64_t all = (uint64_t)w.lead * w.n;
      cudaError_t e = mm_cu_map_boxes(&codes, w.data, w.pitch, all, kLine, kBox, CU_TENSOR_MAP_SWIZZLE_128B);
      if (e == cudaSuccess && S != MM_CU_COARSE)
        e = mm_cu_map_boxes(&scales, w.scale, w.scale_pitch, all, 16, kBox, CU_TENSOR_MAP_SWIZZLE_NONE);
      if (e == cudaSuccess) e = mm_cu_map_boxes(&rows, number, 2 * (uint64_t)w.k, pairs, kLine, places, CU_TENSOR_MAP_SWIZZLE_128B);
      const bool rounds = mm_cu_rounds_inside(MM_CU_EXPERTS_FEW, &w), codes_too = w.rounding.kind == MM_ACT_FP8_GROUP;
      const lay_how how = {rounds && codes_too, rounds && !codes_too, which == DOWN, rounder_of(w.rounding)};
      if (e == cudaSuccess)
        e = launch(lay_rows<kind::kPiece, kind::kOffset>, pairs, kLayers * 32, 0, s, x, which == UP ? a.x : a.middle,
                   which == UP ? r.pair : nullptr, r.offset + r.experts, r.top_k, groups, how);
      if (e != cudaSuccess) return e;
      if (places == 8)
        return launch(which == UP ? experts_few<UP, C, S, 8> : experts_few<DOWN, C, S, 8>, multiprocessors(), kThreads,
                      sizeof(few_shared<C, S, 8>), s, codes, scales, rows, job);
      return launch(which == UP ? experts_few<UP, C, S, 16> : experts_few<DOWN, C, S, 16>, multiprocessors(), kThreads,
                    sizeof(few_shared<C, S, 16>), s, codes, scales, rows, job);
    }
  }
};

}  // namespace

cudaError_t mm_cu_experts_few(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                              cudaStream_t s) {
  const uint32_t pairs = a.tokens * r.top_k;
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_FEW, {&w13, &w2, a.tokens, r.top_k});
  if (e == cudaSuccess) e = for_scheme(w13, few_launch{w13, r, a, UP, a.pair_out, s});
  const mm_cu_rounding *const before = mm_cu_rounds_before(MM_CU_EXPERTS_FEW, &w2);
  if (e == cudaSuccess && before) e = mm_cu_round(a.middle, pairs, {a.middle, w2.k, nullptr, mm_cu_placed_of(r)}, *before, s);
  if (e == cudaSuccess) e = for_scheme(w2, few_launch{w2, r, a, DOWN, a.middle + (size_t)pairs * w2.k, s});
  return e != cudaSuccess ? e : mm_cu_sum_pairs(r, a, w2.n, s);
}
