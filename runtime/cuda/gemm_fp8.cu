/* Products of rounded rows with block FP8 weights on sm_90a (fp8.h): a block multiplies 128 rows with two runs of 128 weight rows, 128
 * columns at a time, and goes on with other tiles while there are any.
 *
 * One warp asks the copy engine for codes, four steps ahead. Two groups of 128 threads multiply 64 rows each by one run and then the other
 * (wgmma, E4M3): products of 128 columns are summed by the tensor cores, which keep few bits, then scaled and added in f32. While one group
 * does that the other multiplies. */
#include "runtime/cuda/fp8.cuh"
#include "runtime/cuda/hopper.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/tensor_map.h"

namespace {

constexpr uint32_t kThreads = 384, kRows = 128, kRun = 128, kStages = 4;

struct step_shared {
  uint8_t x[kRows * 128], w[2][kRun * 128];
};
struct shared {
  step_shared step[kStages];
  uint64_t full[kStages], empty[kStages];
};

struct tile {
  uint32_t matrix, first, rows; /* rows [first, first + rows) of the codes, ≤ 128 */
  uint32_t run[2];              /* first weight row of each */
  uint32_t column;              /* of the result, of the first run */
};

/* ---- jobs: find, by a whole warp, says what tile `index` is, false beyond the last; emit takes one row of a tile,
 * out[run][4n + 2·half] and the next being columns 8n + 2·(lane % 4) and the next of a run, from the four lanes that hold the row ---- */

struct dense_job {
  mm_cu_weight w;
  mm_cu_product a;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ const mm_cu_codes &codes() const { return a.x; }
  __device__ bool find(uint32_t index, tile *t) const {
    /* sixteen tiles of rows meet all weights before the next sixteen: what runs at a time shares both */
    const uint32_t high = (a.x.rows + kRows - 1) / kRows, wide = (w.n + 2 * kRun - 1) / (2 * kRun), strip = index / (16 * wide);
    if (index >= high * wide) return false;
    const uint32_t in = index % (16 * wide), tall = min(16u, high - strip * 16);
    t->matrix = 0, t->first = (strip * 16 + in % tall) * kRows, t->rows = min(kRows, a.x.rows - t->first);
    t->column = in / tall * 2 * kRun, t->run[0] = t->column, t->run[1] = t->column + kRun;
    return true;
  }
  __device__ __forceinline__ void emit(const tile &t, uint32_t r, float (&out)[2][64], int half) const {
    const uint32_t lane = threadIdx.x % 4, row = t.first + r;
    const bool mine = r < t.rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t column = t.column + h * kRun;
      if (!a.y32 && w.n % 8 == 0) {
#pragma unroll
        for (int n = 0; n < 16; n += 4) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = pack2(out[h][(n + i) * 4 + 2 * half], out[h][(n + i) * 4 + 2 * half + 1]);
          turn_words(v);
          const uint32_t at = column + (n + lane) * 8;
          if (mine && at < w.n) *reinterpret_cast<uint4 *>(a.y + (size_t)row * w.n + at) = make_uint4(v[0], v[1], v[2], v[3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const uint32_t at = column + i / 2 * 8 + lane * 2 + i % 2;
          const float v = out[h][i / 2 * 4 + 2 * half + i % 2];
          if (!mine || at >= w.n) continue;
          if (a.y32) {
            a.y32[(size_t)row * w.n + at] = v;
          } else {
            a.y[(size_t)row * w.n + at] = __float2bfloat16_rn(v);
          }
        }
      }
    }
  }
#endif
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Job>
__device__ __forceinline__ void produce(const CUtensorMap *x, const CUtensorMap *w, const Job &job, shared &sh) {
  const uint32_t steps = job.codes().pitch / 128;
  tile t;
  for (uint32_t index = blockIdx.x, at = 0; job.find(index, &t); index += gridDim.x) {
    for (uint32_t s = 0; s < steps && threadIdx.x == 0; s++, at++) {
      step_shared &step = sh.step[at % kStages];
      const uint32_t full = shared_address(&sh.full[at % kStages]);
      if (at >= kStages) barrier_wait(shared_address(&sh.empty[at % kStages]), (at / kStages - 1) % 2);
      barrier_arrive_expecting(full, sizeof(step_shared));
      tensor_copy(shared_address(step.x), x, s * 128, t.first, full);
      for (int h = 0; h < 2; h++) tensor_copy(shared_address(step.w[h]), w, s * 128, t.matrix * job.w.n + t.run[h], full);
    }
    __syncwarp();
  }
}

template <class Job>
__device__ __forceinline__ void consume(const Job &job, shared &sh, uint32_t group) {
  const mm_cu_weight &w = job.w;
  const mm_cu_codes &codes = job.codes();
  const uint32_t steps = codes.pitch / 128, row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  tile t;
  for (uint32_t index = blockIdx.x, at = 0; job.find(index, &t); index += gridDim.x) {
    const float *x_scale[2], *w_scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      x_scale[i] = codes.scale + min(t.first + row + i * 8, codes.rows - 1);
      w_scale[i] = static_cast<const float *>(w.scale) +
                   ((size_t)t.matrix * w.scale_rows + (min(t.run[i], w.n - 1) >> w.cell_n_log2)) * w.scale_pitch;
    }
    float out[2][64] = {}, next[4];
    auto load_scales = [&](uint32_t s) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        next[i] = x_scale[i][(size_t)s * codes.scale_pitch];
        next[2 + i] = w_scale[i][s * 128 >> w.cell_k_log2];
      }
    };
    load_scales(0);
    for (uint32_t s = 0; s < steps; s++, at++) {
      const uint32_t stage = at % kStages, x = shared_address(sh.step[stage].x) + group * 64 * 128;
      const float f[2][2] = {{next[0] * next[2], next[1] * next[2]}, {next[0] * next[3], next[1] * next[3]}};
      load_scales(min(s + 1, steps - 1));
      barrier_wait(shared_address(&sh.full[stage]), at / kStages % 2);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t run = shared_address(sh.step[stage].w[h]);
        float part[64];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma128_e4m3(part, operand(x + k * 32), operand(run + k * 32), k > 0);
        wgmma_commit();
        wgmma_wait<0>(part);
        if (h == 1 && threadIdx.x % 32 == 0) barrier_arrive(shared_address(&sh.empty[stage]));
#pragma unroll
        for (int i = 0; i < 64; i++) out[h][i] = fmaf(part[i], f[h][i / 2 % 2], out[h][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) job.emit(t, row + half * 8, out, half);
  }
}

#endif

template <class Job>
__global__ void __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const __grid_constant__ Job job) {
  grid_wait();
  grid_launch_next();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  shared &sh = *reinterpret_cast<shared *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++)
      barrier_open(shared_address(&sh.full[i]), 1), barrier_open(shared_address(&sh.empty[i]), kThreads / 32 - 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce(&x, &w, job, sh);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(job, sh, group - 1);
  }
#endif
}

template <class Job>
cudaError_t launch_product(const Job &job, const mm_cu_codes &x, uint32_t tiles, cudaStream_t s) {
  CUtensorMap x_map, w_map;
  cudaError_t e = mm_cu_map_boxes(&x_map, x.code, x.pitch, x.rows, 128, kRows, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess)
    e = mm_cu_map_boxes(&w_map, job.w.data, job.w.pitch, (uint64_t)job.w.lead * job.w.n, 128, kRun, CU_TENSOR_MAP_SWIZZLE_128B);
  return e != cudaSuccess ? e : launch(product<Job>, min(tiles, multiprocessors()), kThreads, sizeof(shared), s, x_map, w_map, job);
}

}  // namespace

bool mm_cu_multiplies_codes(const mm_cu_weight &w) {
  return hopper() && w.code == MM_CU_E4M3 && w.scale_kind == MM_CU_COARSE && w.cell_n_log2 >= 7 && w.cell_k_log2 >= 7;
}

cudaError_t mm_cu_gemm_fp8(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  if (!mm_cu_multiplies_codes(w)) return cudaErrorNotSupported;
  return launch_product(dense_job{w, a}, a.x, ceil_div(a.x.rows, kRows) * ceil_div(w.n, 2 * kRun), s);
}
