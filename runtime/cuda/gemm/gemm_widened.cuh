/* gemm.cuh's product on sm_90a for weights that must be widened: as gemm_hopper.cuh's, with two groups of 128 threads that produce.
 *
 * A step is 128 activation rows, 256 weight rows, 64 columns. Its products take the tensor cores 1,024 clocks (4,096 operations a clock).
 * Widening it is 16,384 weights: at 8 instructions a pair (a scale in f32, rounding) one group's warp on each of the four schedulers
 * issues 64 · 8 and waits for most of them, which came to 2,400 clocks. Here a pair takes 5 to 7, all on two numbers at once, and two warps
 * of each scheduler share it: 32 · 6 each, 400 issued of 1,024, and one's waits are the other's turns. Memory shared by the block: products
 * read 80 KB a step, widening moves 48 KB, rows come with 16 KB: 144 bytes a clock at the tensor cores' full rate where 128 are had, but
 * bf16 weights that need no widening reach 0.68 of that rate, at which it is 98.
 *
 * With at most 64 rows each multiplying group takes all rows, and half the columns.
 */
#ifndef MM_CUDA_GEMM_WIDENED_CUH
#define MM_CUDA_GEMM_WIDENED_CUH

#include "runtime/cuda/gemm/gemm_pieces.cuh"

namespace widened_gemm {

constexpr int kThreads = 512, kRows = 128, kColumns = 256, kDepth = 64, kProducers = 256, kRaw = 3, kFew = 64;

template <mm_cu_code C>
constexpr int stages = C == MM_CU_E4M3 ? 3 : 4;

struct step_shared {
  uint8_t x[kRows * 128], w[kColumns * 128];
};
/* raw: codes on their way, each producer's own pieces. */
template <mm_cu_code C>
struct shared {
  step_shared step[stages<C>];
  uint4 raw[kRaw][kColumns * kDepth / codec<C>::kPiece];
  uint64_t full[stages<C>], empty[stages<C>];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* As codec's, without what only f16 needs: shifts to where a bf16 has them, from where weight.cuh says they lie. */
template <mm_cu_code C>
__device__ __forceinline__ void widen_codes(uint32_t (&v)[codec<C>::kPiece / 2], uint4 q) {
  if constexpr (C == MM_CU_E2M1) {
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[4 * i] = and_or(w[i] >> 3, 0x01c001c0u, w[i] & 0x80008000u);
      v[4 * i + 1] = and_or(w[i] << 5, 0x01c001c0u, w[i] << 8 & 0x80008000u);
      v[4 * i + 2] = and_or(w[i] >> 6, 0x01c001c0u, w[i] << 7 & 0x80008000u);
      v[4 * i + 3] = and_or(w[i] << 2, 0x01c001c0u, w[i] << 15 & 0x80008000u);
    }
  } else {
    codec<C>::widen(v, q);
  }
}

/* The scales of a piece, and codes to scaled bf16. */
template <mm_cu_code C, mm_cu_scale S>
struct step_scale : loaded_scale<C, S> {
  __device__ __forceinline__ void widen(uint32_t (&v)[codec<C>::kPiece / 2], uint4 q) const {
    widen_codes<C>(v, q);
    this->scale.apply(v);
  }
};
/* One f32 for the piece: as the sum of two bf16, the second of which is zero for scales that are stored as bf16. */
template <mm_cu_code C>
struct step_scale<C, MM_CU_COARSE> : loaded_scale<C, MM_CU_COARSE> {
  __device__ __forceinline__ void widen(uint32_t (&v)[codec<C>::kPiece / 2], uint4 q) const {
    const float f = this->f;
    const uint32_t first = pack2(f, f);
    const float rest = f - low(first);
    const uint32_t second = pack2(rest, rest);
    widen_codes<C>(v, q);
#pragma unroll
    for (int i = 0; i < codec<C>::kPiece / 2; i++) v[i] = fma2(v[i], first, mul2(v[i], second));
  }
};

/* A producer's pieces of every step's weights. */
template <mm_cu_code C, mm_cu_scale S, class Job>
struct weight_pieces : gemm_pieces<C, step_scale<C, S>, kColumns, kDepth, kProducers> {
  using pieces = gemm_pieces<C, step_scale<C, S>, kColumns, kDepth, kProducers>;
  using pieces::kPieces;
  using pieces::thread;
  shared<C> &sh;

  __device__ __forceinline__ weight_pieces(const mm_cu_weight &weight, const Job &job, shared<C> &s, uint32_t t)
      : pieces(weight, job, t), sh(s) {}
  __device__ __forceinline__ uint4 *raw(uint32_t step, int i) const { return &sh.raw[step % kRaw][i * kProducers + thread]; }
  __device__ __forceinline__ void fetch(uint32_t step) const {
    pieces::fetch_to(step, [&](int i) { return raw(step, i); });
  }
  __device__ __forceinline__ void widen(uint32_t step, uint32_t stage, step_scale<C, S> (&f)[kPieces]) const {
    pieces::widen_to(
        sh.step[stage].w, [&](int i) { return raw(step, i); }, step, f);
  }
};

/* at: the block's steps before this tile. */
template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void produce(const mm_cu_weight &w, const Job &job, shared<C> &sh, uint32_t thread, uint32_t at) {
  constexpr int kXPieces = kRows * 8 / kProducers, kStages = stages<C>;
  const uint32_t rows = job.rows(), steps = (w.k + kDepth - 1) / kDepth, c = thread % 8;
  const bf16 *x[kXPieces];
#pragma unroll
  for (int i = 0; i < kXPieces; i++) x[i] = job.x(min(i * (kProducers / 8) + thread / 8, rows - 1)) + c * 8;
  const weight_pieces<C, S, Job> pieces(w, job, sh, thread);
  auto fetch_x = [&](uint32_t s) {
    if (s >= steps) return;
    const uint32_t now = at + s;
    if (now >= kStages) mbarrier_wait(shared_address(&sh.empty[now % kStages]), (now / kStages - 1) % 2);
#pragma unroll
    for (int i = 0; i < kXPieces; i++) {
      if (i * (kProducers / 8) >= kFew && rows <= kFew) continue; /* nobody reads them */
      const uint32_t r = i * (kProducers / 8) + thread / 8;
      const bool valid = r < rows && s * kDepth + c * 8 < w.k;
      copy16_or_zero(sh.step[now % kStages].x + swizzled(r, c), valid ? x[i] + s * kDepth : x[i], valid);
    }
  };
  auto fetch_w = [&](uint32_t s) {
    if (s < steps) pieces.fetch(s);
  };
  /* Group s + 2: weights of step s + 2 and x of step s + 1. */
  fetch_w(0);
  copy_commit();
  fetch_w(1), fetch_x(0);
  copy_commit();
  step_scale<C, S> scale[pieces.kPieces];
  pieces.fetch_scales(scale, 0);
  for (uint32_t s = 0; s < steps; s++) {
    copy_wait<1>();
    fetch_x(s + 1), fetch_w(s + 2);
    copy_commit();
    pieces.widen(s, (at + s) % kStages, scale);
    copy_wait<1>();
    stores_before_wgmma();
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(shared_address(&sh.full[(at + s) % kStages]));
  }
  copy_wait<0>(); /* nothing of this tile is counted among the next one's */
}

/* 64 rows from `first` on, N times 128 weight rows from `column` on: 256 at a time take more registers than four groups can begin with. */
template <int N, int kStages, class Job, class Shared>
__device__ __forceinline__ void consume(const mm_cu_weight &w, const Job &job, Shared &sh, uint32_t first, uint32_t column, uint32_t at) {
  const uint32_t steps = (w.k + kDepth - 1) / kDepth, rows = job.rows(), thread = threadIdx.x % 128;
  float acc[N][64] = {}; /* else registers are kept for what the last tile left */
  auto release = [&](uint32_t now) {
    if (thread % 32 == 0) mbarrier_arrive(shared_address(&sh.empty[now % kStages]));
  };
  for (uint32_t s = 0; s < steps; s++) {
    const uint32_t stage = (at + s) % kStages;
    const uint32_t x = uniform(shared_address(sh.step[stage].x) + first * 128),
                   wt = uniform(shared_address(sh.step[stage].w) + column * 128);
    mbarrier_wait(shared_address(&sh.full[stage]), (at + s) / kStages % 2);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) {
#pragma unroll
      for (int n = 0; n < N; n++) wgmma128(acc[n], operand(x + k * 32), operand(wt + n * 128 * 128 + k * 32), 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (s > 0) release(at + s - 1);
  }
  wgmma_wait<0>();
  release(at + steps - 1);
  const uint32_t row = first + thread / 32 * 16 + thread % 32 / 4, place = column + 2 * (thread % 4);
#pragma unroll
  for (int j = 0; j < N; j++) {
    hold(acc[j]);
#pragma unroll
    for (int i = 0; i < 4; i++) { /* halves of the rows, then groups of 64 columns */
      const uint32_t r = row + i % 2 * 8;
      float v[8][2];
#pragma unroll
      for (int n = 0; n < 8; n++) v[n][0] = acc[j][(i / 2 * 8 + n) * 4 + i % 2 * 2], v[n][1] = acc[j][(i / 2 * 8 + n) * 4 + i % 2 * 2 + 1];
      if (r < rows) job.emit(r, j * 128 + i / 2 * 64 + place, v);
    }
  }
}

/* Tiles blockIdx.x, blockIdx.x + gridDim.x … below `count`, of which job_of(index) is the job: the next one is fetched and widened while
 * results of the last are written. */
template <mm_cu_code C, mm_cu_scale S, class Jobs>
__device__ __forceinline__ void tiles(const mm_cu_weight &w, uint32_t count, const Jobs &job_of) {
  extern __shared__ __align__(1024) uint8_t gemm_raw[];
  shared<C> &sh = *reinterpret_cast<shared<C> *>(gemm_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages<C>; i++)
      mbarrier_init(shared_address(&sh.full[i]), kProducers / 32),
          mbarrier_init(shared_address(&sh.empty[i]), (kThreads - kProducers) / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), steps = (w.k + kDepth - 1) / kDepth;
  if (group < kProducers / 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    for (uint32_t index = blockIdx.x, at = 0; index < count; index += gridDim.x, at += steps)
      produce<C, S>(w, job_of(index), sh, threadIdx.x, at);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
    const uint32_t mine = group - kProducers / 128;
    for (uint32_t index = blockIdx.x, at = 0; index < count; index += gridDim.x, at += steps) {
      const auto job = job_of(index);
      if (job.rows() > kFew) {
        consume<2, stages<C>>(w, job, sh, mine * kFew, 0, at);
      } else {
        consume<1, stages<C>>(w, job, sh, 0, mine * (kColumns / 2), at);
      }
    }
  }
}

#endif

}  // namespace widened_gemm

#endif
