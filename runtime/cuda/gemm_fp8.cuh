/* Products of rounded rows with block FP8 weights on sm_90a (fp8.h). A pair of blocks multiplies up to 256 rows with the same two runs of
 * 128 weight rows, 128 columns at a time, and goes on with other tiles while there are any: each block asks the copy engine for one run and
 * has it put into both blocks' memory, so the level-2 cache is asked for 32 KB a step, not 48.
 *
 * One warp asks the copy engine for codes, four steps ahead, and notes what a tile is before its turn comes. Two groups multiply 64 rows
 * each by a run at a time (wgmma, E4M3): products of 128 columns are summed by the tensor cores, which keep few bits, then scaled and added
 * in f32. The groups take turns, so that one adds while the other's products are under way. Of a block's tile of at most 64 rows each group
 * takes all, and half the columns of both runs.
 *
 * A job says what the tiles are:
 *   kHeld                      whether rows go to the tensor cores from registers, not from shared memory
 *   w, codes()                 weights, rounded rows
 *   prepare(shared)            a warp, once, before the first find
 *   find(index, rank, shared, &tile)   what tile `index` is for this block of the pair; false beyond the last (both blocks alike)
 *   name(tile, i)             what emit wants to know of row i < tile.rows
 *   emit<N>(tile, r, name, out, half, column, most)
 *                              one row of a tile, of each run the columns [column, column + 8N): out[run][4n + 2·half] and the next are
 *                              8n + 2·(lane % 4) and the next, from the four lanes that hold them; most(v): the largest v ≥ 0 of the
 *                              lanes that hold the row */
#ifndef MM_CUDA_GEMM_FP8_CUH
#define MM_CUDA_GEMM_FP8_CUH

#include "runtime/cuda/fp8.cuh"
#include "runtime/cuda/hopper.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/tensor_map.h"

namespace fp8_gemm {

constexpr uint32_t kThreads = 384, kRows = 128, kRun = 128, kStages = 4, kNotes = 4, kPair = 2;
constexpr uint32_t kFew = 64, kBox = 16, kTurns = 1, kMeet = 3; /* rows of a group, of a box; named barriers, a turn of each group's */

struct tile {
  uint32_t matrix, first, rows; /* of this block, rows ≤ 128; 0: the other block of the pair has the last ones */
  uint32_t run[2];              /* first weight row of each */
  uint32_t column;              /* of the result */
  bool apart;                   /* the other block has other runs */
  bool more;                    /* false: there was no such tile */
};
struct note {
  tile t;
  uint32_t name[kRows];
};
struct step_shared {
  uint8_t x[kRows * 128], w[2][kRun * 128];
};
struct shared {
  step_shared step[kStages];
  note notes[kNotes];
  float most[2][2][kFew];
  uint64_t full[kStages], empty[kStages], told[kNotes], read[kNotes];
  uint32_t before[MM_CU_MAX_EXPERTS + 1]; /* the job's */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* first and rows of this block: of the rows [from, end), 256 at most, 64 each where that is enough, else 128. */
__device__ __forceinline__ void split_rows(uint32_t from, uint32_t end, uint32_t rank, tile *t) {
  const uint32_t rows = min(end - from, kPair * kRows), each = rows <= kPair * kFew ? kFew : kRows, before = rank * each;
  t->first = from + before, t->rows = rows > before ? min(rows - before, each) : 0;
}

/* The columns of a row of a tile that emit is given, times f in bf16: 16-byte pieces, n (the row's) a multiple of 8. */
template <int N>
__device__ __forceinline__ void store_bf16(__nv_bfloat16 *row, uint32_t column, uint32_t n, float (&out)[2][4 * N], int half, float f,
                                           bool mine) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = pack2(out[h][(i + j) * 4 + 2 * half] * f, out[h][(i + j) * 4 + 2 * half + 1] * f);
      turn_words(v);
      const uint32_t at = column + h * kRun + (i + threadIdx.x % 4) * 8;
      if (mine && at < n) *reinterpret_cast<uint4 *>(row + at) = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

/* A warp finds tile `index`, the n-th of the block, and notes it. */
template <class Job>
__device__ __forceinline__ void tell(const Job &job, shared &sh, uint32_t n, uint32_t index, uint32_t rank) {
  const uint32_t lane = threadIdx.x;
  note &to = sh.notes[n % kNotes];
  if (n >= kNotes) barrier_wait(shared_address(&sh.read[n % kNotes]), (n / kNotes - 1) % 2);
  tile t = {};
  t.more = job.find(index, rank, sh, &t);
  if (lane == 0) to.t = t;
  if (t.more) {
    for (uint32_t i = lane; i < t.rows; i += 32) to.name[i] = job.name(t, i);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&sh.told[n % kNotes]));
}

/* One warp. */
template <class Job>
__device__ __forceinline__ void produce(const CUtensorMap *x, const CUtensorMap *few_x, const CUtensorMap *w, const Job &job, shared &sh,
                                        uint32_t rank) {
  const uint32_t steps = job.codes().pitch / 128, pair = blockIdx.x / kPair, pairs = gridDim.x / kPair;
  job.prepare(sh);
  __syncwarp();
  tell(job, sh, 0, pair, rank);
  for (uint32_t n = 0, at = 0;; n++) {
    const tile t = sh.notes[n % kNotes].t;
    if (!t.more) return;
    for (uint32_t s = 0; s < steps; s++, at++) {
      step_shared &step = sh.step[at % kStages];
      const uint32_t full = shared_address(&sh.full[at % kStages]);
      if (at >= kStages) barrier_wait(shared_address(&sh.empty[at % kStages]), (at / kStages - 1) % 2);
      if (threadIdx.x == 0) {
        const uint32_t high = t.rows > kFew ? kFew : kBox, boxes = (t.rows + high - 1) / high, matrix = t.matrix * job.w.n;
        barrier_arrive_expecting(full, boxes * high * 128 + sizeof step.w);
        for (uint32_t i = 0; i < boxes; i++)
          tensor_copy(shared_address(step.x) + i * high * 128, high == kFew ? x : few_x, s * 128, t.first + i * high, full);
        if (t.apart) {
          for (uint32_t h = 0; h < 2; h++) tensor_copy(shared_address(step.w[h]), w, s * 128, matrix + t.run[h], full);
        } else {
          tensor_copy_pair(shared_address(step.w[rank]), w, s * 128, matrix + (rank == 0 ? t.run[0] : t.run[1]), full);
        }
      }
      __syncwarp();
      if (s == min(kStages, steps - 1)) tell(job, sh, n + 1, pair + (n + 1) * pairs, rank);
    }
  }
}

/* A warp has read a step: both blocks are told, whose copy engines write to this one. */
__device__ __forceinline__ void release(shared &sh, uint32_t stage) {
  if (threadIdx.x % 32 < kPair) barrier_arrive_pair(block_address(shared_address(&sh.empty[stage]), threadIdx.x % 32));
}

/* What a thread knows of its two rows: eight apart. */
struct thread_rows {
  uint32_t x_scale[2], w_scale[2], name[2]; /* where scales begin */
};

__device__ __forceinline__ void named_sync(uint32_t barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void named_arrive(uint32_t barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }

/* A tile from its first step to its end: 64 rows, of each run the columns [column, column + 8N). N = 16: the groups take turns; the last
 * of four products is asked for after the other group's turn has begun. */
template <int N, class Job>
__device__ __forceinline__ void multiply(const Job &job, shared &sh, const tile &t, const thread_rows &rows, uint32_t group, uint32_t at) {
  const mm_cu_weight &w = job.w;
  const mm_cu_codes &codes = job.codes();
  const uint32_t steps = codes.pitch / 128, first = N == 16 ? group * kFew : 0, column = N == 16 ? 0 : group * kFew;
  float out[2][4 * N] = {}, next[4];
  uint32_t held[4][4];
  auto load_scales = [&](uint32_t s) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      next[i] = codes.scale[(size_t)s * codes.scale_pitch + rows.x_scale[i]];
      next[2 + i] = static_cast<const float *>(w.scale)[rows.w_scale[i] + (s * 128 >> w.cell_k_log2)];
    }
  };
  auto wait_full = [&](uint32_t at) {
    barrier_wait(shared_address(&sh.full[at % kStages]), at / kStages % 2);
    if constexpr (Job::kHeld) {
      const uint32_t row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
#pragma unroll
      for (int k = 0; k < 4; k++)
        ldmatrix4_at(held[k], shared_address(sh.step[at % kStages].x) + swizzled(row, k * 2 + threadIdx.x % 32 / 16));
    }
  };
  load_scales(0);
  for (uint32_t s = 0; s < steps; s++, at++) {
    const float f[2][2] = {{next[0] * next[2], next[1] * next[2]}, {next[0] * next[3], next[1] * next[3]}};
    load_scales(min(s + 1, steps - 1));
    if (!Job::kHeld || s == 0) wait_full(at);
    step_shared &step = sh.step[at % kStages];
    auto ask = [&](float(&part)[4 * N], int h) {
      const uint32_t x = shared_address(step.x) + first * 128, run = shared_address(step.w[h]) + column * 128;
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (N == 16 && k == 3) named_arrive(kTurns + 1 - group);
        if constexpr (Job::kHeld) {
          wgmma_e4m3(part, held[k], operand(run + k * 32), k > 0);
        } else {
          wgmma_e4m3(part, operand(x + k * 32), operand(run + k * 32), k > 0);
        }
      }
      wgmma_commit();
    };
    auto add = [&](const float(&part)[4 * N], int h) {
#pragma unroll
      for (int i = 0; i < 4 * N; i++) out[h][i] = fmaf(part[i], f[h][i / 2 % 2], out[h][i]);
      hold(out[h]);
    };
    auto leave = [&]() {
      release(sh, at % kStages);
      if (Job::kHeld && s + 1 < steps) wait_full(at + 1);
    };
    if constexpr (N == 16) {
      float part[4 * N];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        named_sync(kTurns + group);
        ask(part, h);
        wgmma_wait<0>(part);
        if (h == 1) leave();
        add(part, h);
      }
    } else {
      float part[2][4 * N];
      ask(part[0], 0), ask(part[1], 1);
      wgmma_wait<1>(part[0]);
      add(part[0], 0);
      wgmma_wait<0>(part[1]);
      leave();
      add(part[1], 1);
    }
  }
  const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    auto most = [&](float v) {
#pragma unroll
      for (int m = 1; m < 4; m *= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, m));
      if (N == 16) return v;
      sh.most[half][group][row + half * 8] = v;
      named_sync(kMeet);
      return fmaxf(v, sh.most[half][1 - group][row + half * 8]);
    };
    job.template emit<N>(t, first + row + half * 8, rows.name[half], out, half, column, most);
  }
}

template <class Job>
__device__ __forceinline__ void consume(const Job &job, shared &sh, uint32_t group) {
  const mm_cu_weight &w = job.w;
  const mm_cu_codes &codes = job.codes();
  const uint32_t steps = codes.pitch / 128, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  if (group == 1) named_arrive(kTurns); /* the first turn */
  for (uint32_t n = 0, at = 0;; n++, at += steps) {
    barrier_wait(shared_address(&sh.told[n % kNotes]), n / kNotes % 2);
    const note &now = sh.notes[n % kNotes];
    const tile t = now.t;
    if (!t.more) return;
    thread_rows rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t r = min(row + i * 8 + (t.rows > kFew ? group * kFew : 0), max(t.rows, 1u) - 1);
      rows.x_scale[i] = min(t.first + r, codes.rows - 1), rows.name[i] = t.rows ? now.name[r] : 0;
      rows.w_scale[i] = (t.matrix * w.scale_rows + (min(t.run[i], w.n - 1) >> w.cell_n_log2)) * w.scale_pitch;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&sh.read[n % kNotes]));
    if (t.rows > kFew) {
      multiply<16>(job, sh, t, rows, group, at);
    } else if (t.rows > 0) {
      multiply<8>(job, sh, t, rows, group, at);
    } else { /* nothing but to let the steps pass */
      for (uint32_t s = 0; s < steps; s++) {
        barrier_wait(shared_address(&sh.full[(at + s) % kStages]), (at + s) / kStages % 2);
        release(sh, (at + s) % kStages);
      }
    }
  }
}

#endif

template <class Job>
__global__ void MM_PAIR __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap few_x, const __grid_constant__ CUtensorMap w,
            const __grid_constant__ Job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  shared &sh = *reinterpret_cast<shared *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++) {
      barrier_open(shared_address(&sh.full[i]), 1);
      barrier_open(shared_address(&sh.empty[i]), kPair * (kThreads / 32 - 4));
    }
    for (uint32_t i = 0; i < kNotes; i++)
      barrier_open(shared_address(&sh.told[i]), 1), barrier_open(shared_address(&sh.read[i]), kThreads / 32 - 4);
  }
  pair_sync();
  grid_wait_and_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce(&x, &few_x, &w, job, sh, blockIdx.x % kPair);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(job, sh, group - 1);
  }
  __syncwarp();
  pair_sync(); /* the other block's last steps are told here too */
#else
  no_such_code();
#endif
}

/* pairs: as many as there are tiles at least. */
template <class Job>
cudaError_t launch_product(const Job &job, const mm_cu_codes &x, uint32_t pairs, cudaStream_t s) {
  CUtensorMap x_map, few_x_map, w_map;
  cudaError_t e = mm_cu_map_boxes(&x_map, x.code, x.pitch, x.rows, 128, kFew, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess) e = mm_cu_map_boxes(&few_x_map, x.code, x.pitch, x.rows, 128, kBox, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess)
    e = mm_cu_map_boxes(&w_map, job.w.data, job.w.pitch, (uint64_t)job.w.lead * job.w.n, 128, kRun, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  return launch(product<Job>, kPair * min(pairs, multiprocessors() / kPair), kThreads, sizeof(shared), s, x_map, few_x_map, w_map, job);
}

}  // namespace fp8_gemm

#endif
