/* gemm.cuh's product on sm_90a: a block multiplies 128 activation rows with 256 weight rows, 64 columns of k at a time.
 *
 * Warp group 0 produces: x by cp.async (two k-steps ahead for bf16 weights, one for codes); w by cp.async for bf16, else through registers,
 * where codes are widened, scaled and rounded to bf16. Groups 1 and 2 consume: 64 x 256 results each by wgmma. */
#ifndef MM_CUDA_GEMM_HOPPER_CUH
#define MM_CUDA_GEMM_HOPPER_CUH

#include <cuda_fp16.h>

#include "runtime/cuda/gemm/gemm_pieces.cuh"

namespace hopper_gemm {

/* kRows: activation rows; kColumns: weight rows, which are columns of the result; kDepth: k of a step. */
constexpr int kThreads = 384, kRows = 128, kColumns = 256, kDepth = 64, kProducers = 128, kMaxStages = 4, kRaw = 3;

struct stage_shared {
  uint8_t x[kRows * 128], w[kColumns * 128];
};
/* bf16 weights use all kMaxStages stages. Codes use three; the fourth holds kRaw steps of codes not yet widened, each producer thread its
 * own. */
struct shared {
  stage_shared stage[kMaxStages];
  uint64_t full[kMaxStages], empty[kMaxStages];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <mm_cu_code C>
constexpr int stages = C == MM_CU_BF16 ? kMaxStages : kMaxStages - 1;

/* The scales of a piece, and codes to scaled bf16. */
template <mm_cu_code C, mm_cu_scale S>
struct step_scale : loaded_scale<C, S> {
  __device__ __forceinline__ void widen(uint32_t (&v)[codec<C>::kPiece / 2], uint4 q) const {
    codec<C>::widen(v, q);
    this->scale.apply(v);
  }
};
template <mm_cu_code C>
struct step_scale<C, MM_CU_COARSE> : loaded_scale<C, MM_CU_COARSE> {
  __device__ __forceinline__ void widen(uint32_t (&v)[codec<C>::kPiece / 2], uint4 q) const {
    const float f = this->f;
    if constexpr (C == MM_CU_E4M3) {
      const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 8; i++) { /* e4m3 is exact in f16 */
        uint32_t pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)(w[i / 2] >> (i % 2 * 16))));
        const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
        v[i] = pack2(x.x * f, x.y * f);
      }
    } else {
      codec<C>::widen(v, q);
#pragma unroll
      for (int i = 0; i < codec<C>::kPiece / 2; i++) v[i] = pack2(low(v[i]) * f, high(v[i]) * f);
    }
  }
};

/* A producer's pieces of every step's weights. */
template <mm_cu_code C, mm_cu_scale S, class Job>
struct weight_pieces : gemm_pieces<C, step_scale<C, S>, kColumns, kDepth, kProducers> {
  using pieces = gemm_pieces<C, step_scale<C, S>, kColumns, kDepth, kProducers>;
  using pieces::kPieces;
  using pieces::thread;
  static_assert(C == MM_CU_BF16 || kRaw * kPieces * kProducers * 16 <= sizeof(stage_shared), "room for the codes");
  shared &sh;

  __device__ __forceinline__ weight_pieces(const mm_cu_weight &weight, const Job &job, shared &s, uint32_t t)
      : pieces(weight, job, t), sh(s) {}
  __device__ __forceinline__ uint4 *raw(uint32_t step, int i) const {
    return reinterpret_cast<uint4 *>(&sh.stage[kMaxStages - 1]) + (step % kRaw * kPieces + i) * kProducers + thread;
  }
  __device__ __forceinline__ void fetch(uint32_t step) const {
    pieces::fetch_to(step, [&](int i) {
      return C == MM_CU_BF16 ? (void *)(sh.stage[step % stages<C>].w + swizzled(this->place(i), thread % pieces::kPerRow))
                             : (void *)raw(step, i);
    });
  }
  __device__ __forceinline__ void widen(uint32_t step, step_scale<C, S> (&f)[kPieces]) const {
    pieces::widen_to(
        sh.stage[step % stages<C>].w, [&](int i) { return raw(step, i); }, step, f);
  }
};

template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void produce(const mm_cu_weight &w, const Job &job, shared &sh, uint32_t thread) {
  constexpr bool kDirect = C == MM_CU_BF16;
  constexpr int kXPieces = kRows * 8 / kProducers, kStages = stages<C>;
  const uint32_t rows = job.rows(), steps = (w.k + kDepth - 1) / kDepth, c = thread % 8;
  const bf16 *x[kXPieces];
#pragma unroll
  for (int i = 0; i < kXPieces; i++) x[i] = job.x(min(i * (kProducers / 8) + thread / 8, rows - 1)) + c * 8;
  const weight_pieces<C, S, Job> pieces(w, job, sh, thread);
  /* Also waits until the consumers have released the stage, for x and w: call it before the w of that stage is written (fetch_w for bf16,
   * widen for codes). */
  auto fetch_x = [&](uint32_t s) {
    if (s >= steps) return;
    if (s >= kStages) mbarrier_wait(shared_address(&sh.empty[s % kStages]), (s / kStages - 1) % 2);
#pragma unroll
    for (int i = 0; i < kXPieces; i++) {
      const uint32_t r = i * (kProducers / 8) + thread / 8;
      const bool valid = r < rows && s * kDepth + c * 8 < w.k;
      copy16_or_zero(sh.stage[s % kStages].x + swizzled(r, c), valid ? x[i] + s * kDepth : x[i], valid);
    }
  };
  auto fetch_w = [&](uint32_t s) {
    if (s < steps) pieces.fetch(s);
  };
  /* Group s + 2: weights of step s + 2 and x of step s + 1, or s + 2 where both go to their places. */
  fetch_w(0);
  if (kDirect) fetch_x(0);
  copy_commit();
  fetch_w(1), fetch_x(kDirect ? 1 : 0);
  copy_commit();
  step_scale<C, S> scale[pieces.kPieces];
  pieces.fetch_scales(scale, 0);
  for (uint32_t s = 0; s < steps; s++) {
    if (!kDirect) copy_wait<1>();
    fetch_x(s + (kDirect ? 2 : 1)), fetch_w(s + 2);
    copy_commit();
    if constexpr (kDirect) {
      copy_wait<2>();
    } else {
      pieces.widen(s, scale);
      copy_wait<1>();
    }
    stores_before_wgmma();
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(shared_address(&sh.full[s % kStages]));
  }
}

template <int kStages, class Job>
__device__ __forceinline__ void consume(const mm_cu_weight &w, const Job &job, shared &sh, uint32_t group, uint32_t thread) {
  const uint32_t steps = (w.k + kDepth - 1) / kDepth, rows = job.rows();
  float acc[128];
  for (uint32_t s = 0; s < steps; s++) {
    const uint32_t stage = s % kStages, x = shared_address(sh.stage[stage].x) + group * 64 * 128, wt = shared_address(sh.stage[stage].w);
    mbarrier_wait(shared_address(&sh.full[stage]), s / kStages % 2);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) wgmma256(acc, operand(x + k * 32), operand(wt + k * 32), s + k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (s > 0 && thread % 32 == 0) mbarrier_arrive(shared_address(&sh.empty[(s - 1) % kStages]));
  }
  wgmma_wait<0>(acc);
  const uint32_t row = group * 64 + thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);
#pragma unroll
  for (int i = 0; i < 8; i++) { /* halves of the rows, then groups of 64 columns */
    const uint32_t r = row + i % 2 * 8;
    float v[8][2];
#pragma unroll
    for (int n = 0; n < 8; n++) v[n][0] = acc[(i / 2 * 8 + n) * 4 + i % 2 * 2], v[n][1] = acc[(i / 2 * 8 + n) * 4 + i % 2 * 2 + 1];
    if (r < rows) job.emit(r, i / 2 * 64 + column, v);
  }
}

template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void tile(const mm_cu_weight &w, const Job &job) {
  extern __shared__ __align__(1024) uint8_t gemm_raw[];
  shared &sh = *reinterpret_cast<shared *>(gemm_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxStages; i++)
      mbarrier_init(shared_address(&sh.full[i]), kProducers / 32),
          mbarrier_init(shared_address(&sh.empty[i]), (kThreads - kProducers) / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    produce<C, S>(w, job, sh, threadIdx.x);
  } else {
    consume<stages<C>>(w, job, sh, group - 1, threadIdx.x % 128);
  }
}

#endif

}  // namespace hopper_gemm

#endif
