/* Products of rounded rows with block FP8 weights on sm_90a (fp8.h). A pair of blocks multiplies up to 256 rows with the same two runs of
 * 128 weight rows, 128 columns at a time, and goes on with other tiles while there are any: each block asks the copy engine for one run and
 * has it put into both blocks' memory, so the level-2 cache is asked for 32 KB a step, not 48.
 *
 * One warp asks the copy engine for codes, four steps ahead. Two groups multiply 64 rows each by quarters of 64 weight rows (wgmma, E4M3;
 * the rows in registers, or shared memory would be read too often): products of 128 columns are summed by the tensor cores, which keep few
 * bits, then scaled and added in f32 while the next quarter is multiplied. Those sums bound the rate: without them it is 1750 TFLOP/s. The
 * warp that asks also notes what a tile is before its turn comes.
 *
 * A job says what the tiles are:
 *   w, codes()                 weights, rounded rows
 *   prepare(shared)            a warp, once, before the first find
 *   find(index, rank, shared, &tile)   what tile `index` is for this block of the pair; false beyond the last (both blocks alike)
 *   name(tile, i)             what emit wants to know of row i < tile.rows
 *   emit(tile, r, name, out, half)     one row of a tile: out[run][4n + 2·half] and the next are columns 8n + 2·(lane % 4) and the
 *                                      next of a run, from the four lanes that hold the row */
#ifndef MM_CUDA_GEMM_FP8_CUH
#define MM_CUDA_GEMM_FP8_CUH

#include "runtime/cuda/fp8.cuh"
#include "runtime/cuda/hopper.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/tensor_map.h"

namespace fp8_gemm {

constexpr uint32_t kThreads = 384, kRows = 128, kRun = 128, kStages = 4, kNotes = 4, kPair = 2;

struct tile {
  uint32_t matrix, first, rows; /* rows ≤ 128; 0: the other block of the pair has the last ones */
  uint32_t run[2];              /* first weight row of each */
  uint32_t column;              /* of the result */
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
  uint64_t full[kStages], empty[kStages], told[kNotes], read[kNotes];
  uint32_t before[MM_CU_MAX_EXPERTS + 1]; /* the job's */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A row of a tile times f in bf16, to the row's first column: 16-byte pieces, w.n a multiple of 8. */
__device__ __forceinline__ void store_bf16(__nv_bfloat16 *row, const tile &t, uint32_t n, float (&out)[2][64], int half, float f,
                                           bool mine) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = pack2(out[h][(i + j) * 4 + 2 * half] * f, out[h][(i + j) * 4 + 2 * half + 1] * f);
      turn_words(v);
      const uint32_t at = t.column + h * kRun + (i + threadIdx.x % 4) * 8;
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
__device__ __forceinline__ void produce(const CUtensorMap *x, const CUtensorMap *w, const Job &job, shared &sh, uint32_t rank) {
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
        barrier_arrive_expecting(full, sizeof step);
        tensor_copy(shared_address(step.x), x, s * 128, t.first, full);
        tensor_copy_pair(shared_address(step.w[rank]), w, s * 128, t.matrix * job.w.n + (rank == 0 ? t.run[0] : t.run[1]), full);
      }
      __syncwarp();
      if (s == min(kStages, steps - 1)) tell(job, sh, n + 1, pair + (n + 1) * pairs, rank);
    }
  }
}

template <class Job>
__device__ __forceinline__ void consume(const Job &job, shared &sh, uint32_t group) {
  const mm_cu_weight &w = job.w;
  const mm_cu_codes &codes = job.codes();
  const uint32_t steps = codes.pitch / 128, first = group * 64 + threadIdx.x % 128 / 32 * 16;
  const uint32_t row = first + threadIdx.x % 32 / 4;
  auto release = [&](uint32_t stage) {
    if (threadIdx.x % 32 < kPair) barrier_arrive_pair(block_address(shared_address(&sh.empty[stage]), threadIdx.x % 32));
  };
  for (uint32_t n = 0, at = 0;; n++) {
    barrier_wait(shared_address(&sh.told[n % kNotes]), n / kNotes % 2);
    const note &now = sh.notes[n % kNotes];
    const tile t = now.t;
    if (!t.more) return;
    uint32_t x_scale[2], w_scale[2], name[2]; /* where scales begin */
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t r = min(row + i * 8, max(t.rows, 1u) - 1);
      x_scale[i] = min(t.first + r, codes.rows - 1), name[i] = t.rows ? now.name[r] : 0;
      w_scale[i] = (t.matrix * w.scale_rows + (min(t.run[i], w.n - 1) >> w.cell_n_log2)) * w.scale_pitch;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&sh.read[n % kNotes]));
    if (group * 64 >= t.rows) { /* nothing but to let the steps pass */
      for (uint32_t s = 0; s < steps; s++, at++) {
        barrier_wait(shared_address(&sh.full[at % kStages]), at / kStages % 2);
        release(at % kStages);
      }
      continue;
    }
    float out[2][64] = {}, part[2][32], next[4];
    auto load_scales = [&](uint32_t s) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        next[i] = codes.scale[(size_t)s * codes.scale_pitch + x_scale[i]];
        next[2 + i] = static_cast<const float *>(w.scale)[w_scale[i] + (s * 128 >> w.cell_k_log2)];
      }
    };
    /* quarter q: the products of columns 64 (q % 2) … of run q / 2 */
    auto add = [&](int q, float upper, float lower) {
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float &sum = out[q / 2][q % 2 * 32 + i];
        sum = fmaf(part[q % 2][i], i / 2 % 2 ? lower : upper, sum);
      }
    };
    load_scales(0);
    for (uint32_t s = 0; s < steps; s++, at++) {
      const uint32_t stage = at % kStages;
      const float f[2][2] = {{next[0] * next[2], next[1] * next[2]}, {next[0] * next[3], next[1] * next[3]}};
      load_scales(min(s + 1, steps - 1));
      barrier_wait(shared_address(&sh.full[stage]), at / kStages % 2);
      uint32_t a[4][4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        ldmatrix4_at(a[k], shared_address(sh.step[stage].x) + swizzled(first + threadIdx.x % 16, k * 2 + threadIdx.x % 32 / 16));
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const uint32_t run = shared_address(sh.step[stage].w[q / 2]) + q % 2 * 64 * 128;
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma64_e4m3(part[q % 2], a[k], operand(run + k * 32), k > 0);
        wgmma_commit();
        if (q == 0) continue;
        wgmma_wait<1>(part[(q + 1) % 2]);
        add(q - 1, f[(q - 1) / 2][0], f[(q - 1) / 2][1]);
      }
      wgmma_wait<0>(part[1]);
      release(stage);
      add(3, f[1][0], f[1][1]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) job.emit(t, row + half * 8, name[half], out, half);
  }
}

#endif

template <class Job>
__global__ void MM_PAIR __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const __grid_constant__ Job job) {
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
  grid_wait();
  grid_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce(&x, &w, job, sh, blockIdx.x % kPair);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(job, sh, group - 1);
  }
  __syncwarp();
  pair_sync(); /* the other block's last steps are told here too */
#else
  grid_wait();
  grid_launch_next();
#endif
}

/* pairs: as many as there are tiles at least. */
template <class Job>
cudaError_t launch_product(const Job &job, const mm_cu_codes &x, uint32_t pairs, cudaStream_t s) {
  CUtensorMap x_map, w_map;
  cudaError_t e = mm_cu_map_boxes(&x_map, x.code, x.pitch, x.rows, 128, kRows, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess)
    e = mm_cu_map_boxes(&w_map, job.w.data, job.w.pitch, (uint64_t)job.w.lead * job.w.n, 128, kRun, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  return launch(product<Job>, kPair * min(pairs, multiprocessors() / kPair), kThreads, sizeof(shared), s, x_map, w_map, job);
}

}  // namespace fp8_gemm

#endif
