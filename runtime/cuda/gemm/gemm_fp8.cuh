/* Products of rounded rows with weights of E4M3 on sm_90a (fp8.h). A 2-CTA cluster multiplies up to 256 rows with the same two runs of
 * 128 weight rows, 128 columns at a time, and goes on with other tiles while there are any: each block loads one run by TMA multicast into
 * both blocks' shared memory: 32 KB of L2 reads a step instead of 48.
 *
 * One warp loads codes by TMA, four steps ahead, and records each tile before its turn comes; another loads the scales as far ahead. Two
 * groups multiply 64 rows each, which they hold in registers, by a run at a time, 64 columns of it (wgmma, E4M3): products of 128 columns
 * of the codes are summed by the tensor cores, which keep few bits, then scaled and added in f32, while the next 64 are under way. A scale
 * of a weight row's own is taken at the end. In a block's tile of at most 64 rows each group takes all rows, and half the columns of both
 * runs.
 *
 * A job says what the tiles are:
 *   w, codes()                 weights, rounded rows
 *   kBlocks                    no weight row has a scale of its own
 *   prepare(shared)            a warp, once, before the first find
 *   find(index, rank, shared, &tile)   what tile `index` is for this block of the pair; false beyond the last (both blocks alike)
 *   name(tile, i)             what emit wants to know of row i < tile.rows
 *   emit<N>(tile, r, name, out, half, column, most)
 *                              one row of a tile, of each run the columns [column, column + 8N): out[run][4n + 2·half] and the next are
 *                              8n + 2·(lane % 4) and the next, from the four lanes that hold them; most(v): the largest v ≥ 0 of the
 *                              lanes that hold the row */
#ifndef MM_CUDA_GEMM_FP8_CUH
#define MM_CUDA_GEMM_FP8_CUH

#include "runtime/cuda/core/fp8.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"

namespace fp8_gemm {

constexpr uint32_t kThreads = 384, kRows = 128, kRun = 128, kStages = 4, kNotes = 4, kPair = 2;
constexpr uint32_t kFew = 64, kBox = 16, kMeet = 1; /* rows of a group, of a box; a named barrier */

struct tile {
  uint32_t matrix, first, rows; /* of this block, rows ≤ 128; 0: the other block of the pair has the last ones */
  uint32_t run[2];              /* first weight row of each */
  uint32_t column;              /* of the result */
  bool split;                   /* the other block has other runs */
  bool more;                    /* false: there was no such tile */
};
struct note {
  tile t;
  uint32_t name[kRows];
};
struct step_shared {
  uint8_t x[kRows * 128], w[2][kRun * 128];
};
struct step_scales {
  float x[kRows], w[2]; /* w: each run's */
};
struct shared {
  step_shared step[kStages];
  step_scales scales[kStages];
  note notes[kNotes];
  float most[2][2][kFew];
  uint64_t full[kStages], empty[kStages], published[kNotes], read[kNotes];
  uint32_t before[MM_CU_MAX_EXPERTS + 1]; /* the job's */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* first and rows of this block: of the rows [from, end), 256 at most, 64 each where that is enough, else 128. */
__device__ __forceinline__ void split_rows(uint32_t from, uint32_t end, uint32_t rank, tile *t) {
  const uint32_t rows = min(end - from, kPair * kRows), each = rows <= kPair * kFew ? kFew : kRows, before = rank * each;
  t->first = from + before, t->rows = rows > before ? min(rows - before, each) : 0;
}

/* The columns of a run of a row that emit is given, times f in bf16: 16-byte pieces, n (the row's) a multiple of 8. */
template <int N>
__device__ __forceinline__ void store_run(__nv_bfloat16 *row, uint32_t column, uint32_t n, const float (&out)[4 * N], int half, float f,
                                          bool mine) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = pack2(out[(i + j) * 4 + 2 * half] * f, out[(i + j) * 4 + 2 * half + 1] * f);
    turn_words(v);
    const uint32_t at = column + (i + threadIdx.x % 4) * 8;
    if (mine && at < n) *reinterpret_cast<uint4 *>(row + at) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
/* Products of both runs, side by side. */
template <int N>
__device__ __forceinline__ void store_runs(__nv_bfloat16 *row, uint32_t column, uint32_t n, const float (&out)[2][4 * N], int half, float f,
                                           bool mine) {
  for (int h = 0; h < 2; h++) store_run<N>(row, column + h * kRun, n, out[h], half, f, mine);
}

/* A warp finds tile `index`, the n-th of the block, and notes it. */
template <class Job>
__device__ __forceinline__ void publish(const Job &job, shared &sh, uint32_t n, uint32_t index, uint32_t rank) {
  const uint32_t lane = threadIdx.x;
  note &to = sh.notes[n % kNotes];
  if (n >= kNotes) mbarrier_wait(shared_address(&sh.read[n % kNotes]), (n / kNotes - 1) % 2);
  tile t = {};
  t.more = job.find(index, rank, sh, &t);
  if (lane == 0) to.t = t;
  if (t.more) {
    for (uint32_t i = lane; i < t.rows; i += 32) to.name[i] = job.name(t, i);
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared_address(&sh.published[n % kNotes]));
}

/* One warp. */
template <class Job>
__device__ __forceinline__ void produce(const CUtensorMap *x, const CUtensorMap *few_x, const CUtensorMap *w, const Job &job, shared &sh,
                                        uint32_t rank) {
  const uint32_t steps = job.codes().pitch / 128, pair = blockIdx.x / kPair, pairs = gridDim.x / kPair;
  job.prepare(sh);
  __syncwarp();
  publish(job, sh, 0, pair, rank);
  for (uint32_t n = 0, at = 0;; n++) {
    const tile t = sh.notes[n % kNotes].t;
    if (!t.more) return;
    for (uint32_t s = 0; s < steps; s++, at++) {
      step_shared &step = sh.step[at % kStages];
      const uint32_t full = shared_address(&sh.full[at % kStages]);
      if (at >= kStages) mbarrier_wait(shared_address(&sh.empty[at % kStages]), (at / kStages - 1) % 2);
      if (threadIdx.x == 0) {
        const uint32_t high = t.rows > kFew ? kFew : kBox, boxes = (t.rows + high - 1) / high, matrix = t.matrix * job.w.n;
        mbarrier_arrive_expect_tx(full, boxes * high * 128 + sizeof step.w);
        for (uint32_t i = 0; i < boxes; i++)
          tma_load(shared_address(step.x) + i * high * 128, high == kFew ? x : few_x, s * 128, t.first + i * high, full);
        if (t.split) {
          for (uint32_t h = 0; h < 2; h++) tma_load(shared_address(step.w[h]), w, s * 128, matrix + t.run[h], full);
        } else {
          tma_load_multicast(shared_address(step.w[rank]), w, s * 128, matrix + (rank == 0 ? t.run[0] : t.run[1]), full);
        }
      }
      __syncwarp();
      if (s == min(kStages, steps - 1)) publish(job, sh, n + 1, pair + (n + 1) * pairs, rank);
    }
  }
}

/* One warp brings the scales of each step, as far ahead as codes are. */
template <class Job>
__device__ __forceinline__ void scale(const Job &job, shared &sh) {
  const mm_cu_weight &w = job.w;
  const mm_cu_codes &codes = job.codes();
  const uint32_t steps = codes.pitch / 128, lane = threadIdx.x % 32;
  for (uint32_t n = 0, at = 0;; n++) {
    mbarrier_wait(shared_address(&sh.published[n % kNotes]), n / kNotes % 2);
    const tile t = sh.notes[n % kNotes].t;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.read[n % kNotes]));
    if (!t.more) return;
    const float *x[kRows / 32], *run = static_cast<const float *>(w.scale);
#pragma unroll
    for (uint32_t i = 0; i < kRows / 32; i++) x[i] = codes.scale + min(t.first + min(lane + i * 32, max(t.rows, 1u) - 1), codes.rows - 1);
    run += (t.matrix * w.scale_rows + (min(lane == 0 ? t.run[0] : t.run[1], w.n - 1) >> w.cell_n_log2)) * w.scale_pitch;
    for (uint32_t s = 0; s < steps; s++, at++) {
      step_scales &to = sh.scales[at % kStages];
      if (at >= kStages) mbarrier_wait(shared_address(&sh.empty[at % kStages]), (at / kStages - 1) % 2);
#pragma unroll
      for (uint32_t i = 0; i < kRows / 32; i++) copy4_to(shared_address(to.x + lane + i * 32), x[i] + (size_t)s * codes.scale_pitch);
      if (lane < 2) copy4_to(shared_address(to.w + lane), run + (s * 128 >> w.cell_k_log2));
      mbarrier_arrive_copied(shared_address(&sh.full[at % kStages]));
    }
  }
}

/* A warp has read a step: it arrives at the barriers of both blocks, since both write to this one by TMA. */
__device__ __forceinline__ void release(shared &sh, uint32_t stage) {
  if (threadIdx.x % 32 < kPair) mbarrier_arrive_cluster(block_address(shared_address(&sh.empty[stage]), threadIdx.x % 32));
}

__device__ __forceinline__ void named_sync(uint32_t barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }

/* out times the scales of its weight rows, of which each has one for all of its columns. */
template <int N>
__device__ __forceinline__ void scale_rows(const mm_cu_weight &w, const tile &t, uint32_t column, float (&out)[2][4 * N]) {
  const float *const scale = static_cast<const float *>(w.scale) + (size_t)t.matrix * w.scale_rows;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t first = t.run[h] + column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float f = scale[min((first + n * 8 + i) >> w.cell_n_log2, w.scale_rows - 1)];
        out[h][4 * n + i] *= f, out[h][4 * n + 2 + i] *= f;
      }
    }
  }
}

/* A tile from its first step to its end: 64 rows, of each run the columns [column, column + 8N), 64 at a time. While the tensor cores have
 * one 64, those before are scaled and added. */
template <int N, class Job>
__device__ __forceinline__ void multiply(const Job &job, shared &sh, const tile &t, const uint32_t (&name)[2], uint32_t group,
                                         uint32_t at) {
  constexpr int kParts = N / 4; /* of 64 columns */
  const uint32_t steps = job.codes().pitch / 128, first = N == 16 ? group * kFew : 0, column = N == 16 ? 0 : group * kFew;
  const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4,
                 held_row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
  float out[2][4 * N] = {}, part[2][32] = {}, last[2] = {};
  uint32_t held[4][4];
  const bool rows_scaled = !Job::kBlocks && job.w.cell_n_log2 < 7;
  auto add = [&](int q, const float(&f)[2]) {
    float *const to = out[q * 2 / kParts] + q % (kParts / 2) * 32;
#pragma unroll
    for (int i = 0; i < 32; i++) to[i] = fmaf(part[q % 2][i], f[i / 2 % 2], to[i]);
  };
  for (uint32_t s = 0; s < steps; s++, at++) {
    step_shared &step = sh.step[at % kStages];
    const step_scales &scales = sh.scales[at % kStages];
    mbarrier_wait(shared_address(&sh.full[at % kStages]), at / kStages % 2);
    const uint64_t runs = operand(uniform(shared_address(step.w[0]) + column * 128));
#pragma unroll
    for (int k = 0; k < 4; k++) ldmatrix4_at(held[k], shared_address(step.x) + swizzled(held_row, k * 2 + threadIdx.x % 32 / 16));
    float f[2][2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float of_run = rows_scaled ? 1.0f : scales.w[h];
      f[h][0] = scales.x[first + row] * of_run, f[h][1] = scales.x[first + row + 8] * of_run;
    }
#pragma unroll
    for (int q = 0; q < kParts; q++) {
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_e4m3(part[q % 2], held[k], operand_after(runs, (q * 2 / kParts * kRun + q % (kParts / 2) * 64) * 128 + k * 32), k > 0);
      wgmma_commit();
      wgmma_wait<1>(part[(q + 1) % 2]);
      if (q == 0) {
        add(kParts - 1, last);
      } else {
        add(q - 1, f[(q - 1) * 2 / kParts]);
      }
    }
    last[0] = f[1][0], last[1] = f[1][1];
    wgmma_wait<0>(part[(kParts - 1) % 2]);
    release(sh, at % kStages);
  }
  add(kParts - 1, last);
  if (rows_scaled) scale_rows<N>(job.w, t, column, out);
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
    job.template emit<N>(t, first + row + half * 8, name[half], out, half, column, most);
  }
}

template <class Job>
__device__ __forceinline__ void consume(const Job &job, shared &sh, uint32_t group) {
  const uint32_t steps = job.codes().pitch / 128, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  for (uint32_t n = 0, at = 0;; n++, at += steps) {
    mbarrier_wait(shared_address(&sh.published[n % kNotes]), n / kNotes % 2);
    const note &now = sh.notes[n % kNotes];
    const tile t = now.t;
    if (!t.more) return;
    uint32_t name[2];
#pragma unroll
    for (int i = 0; i < 2; i++) name[i] = t.rows ? now.name[min(row + i * 8 + (t.rows > kFew ? group * kFew : 0), t.rows - 1)] : 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&sh.read[n % kNotes]));
    if (t.rows > kFew) {
      multiply<16>(job, sh, t, name, group, at);
    } else if (t.rows > 0) {
      multiply<8>(job, sh, t, name, group, at);
    } else { /* nothing but to let the steps pass */
      for (uint32_t s = 0; s < steps; s++) {
        mbarrier_wait(shared_address(&sh.full[(at + s) % kStages]), (at + s) / kStages % 2);
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
      mbarrier_init(shared_address(&sh.full[i]), 1 + 32);
      mbarrier_init(shared_address(&sh.empty[i]), kPair * (kThreads / 32 - 4));
    }
    for (uint32_t i = 0; i < kNotes; i++)
      mbarrier_init(shared_address(&sh.published[i]), 1), mbarrier_init(shared_address(&sh.read[i]), kThreads / 32 - 3);
  }
  cluster_sync();
  grid_wait_and_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce(&x, &few_x, &w, job, sh, blockIdx.x % kPair);
    if (threadIdx.x / 32 == 1) scale(job, sh);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(job, sh, group - 1);
  }
  __syncwarp();
  cluster_sync(); /* the other block's last arrivals have come by then too */
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
