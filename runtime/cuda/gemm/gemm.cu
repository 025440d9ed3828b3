/* y = x·Wᵀ for any number of rows (gemm.cuh). */
#include "runtime/cuda/gemm/gemm.cuh"

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/gemm/dense_job.cuh"

namespace {

template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    gemm(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kTakes = C == MM_CU_BF16; /* gemm_widened takes the others */
#else
  constexpr bool kTakes = true;
#endif
  if constexpr (kTakes) {
    grid_wait_and_launch_next();
    gemm_tile<C, S, Form>(w, dense_job<Form>{w, a, blockIdx.x * Form::kRows, blockIdx.y * Form::kColumns});
  } else {
    no_such_code();
  }
}

/* Sixteen tiles of rows meet all weights before the next sixteen: what runs at a time shares both. */
template <mm_cu_code C, mm_cu_scale S>
__global__ void __launch_bounds__(widened_gemm::kThreads, 1)
    gemm_widened(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr uint32_t kRows = gemm_large::kRows, kColumns = gemm_large::kColumns;
  const uint32_t high = (a.tokens + kRows - 1) / kRows, wide = (w.n + kColumns - 1) / kColumns;
  grid_wait_and_launch_next();
  widened_gemm::tiles<C, S>(w, high * wide, [&](uint32_t index) {
    const uint32_t strip = index / (16 * wide), in = index % (16 * wide), tall = min(16u, high - strip * 16);
    return dense_job<gemm_large>{w, a, (strip * 16 + in % tall) * kRows, in / tall * kColumns};
  });
#else
  no_such_code();
#endif
}

struct gemm_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  template <class Form, class Kernel>
  cudaError_t in(Kernel kernel) const {
    const gemm_block b = gemm_block_here<Form>();
    return launch(kernel, dim3(ceil_div(a.tokens, b.rows), ceil_div(w.n, b.columns)), b.threads, b.shared, s, w, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if (!hopper() && a.tokens <= kGemmSmallStep) return in<gemm_small>(gemm<C, S, gemm_small>);
    return in<gemm_large>(gemm<C, S, gemm_large>);
  }
};

struct widened_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (C == MM_CU_BF16) {
      return cudaErrorNotSupported;
    } else {
      return launch(gemm_widened<C, S>,
                    min(ceil_div(a.tokens, gemm_large::kRows) * ceil_div(w.n, widened_gemm::kColumns), multiprocessors()),
                    widened_gemm::kThreads, sizeof(widened_gemm::shared<C>), s, w, a);
    }
  }
};

}  // namespace

cudaError_t mm_cu_gemm(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_GEMM, {&w, nullptr, a.tokens});
  return e != cudaSuccess ? e : for_scheme(w, gemm_launch{w, a, s});
}

cudaError_t mm_cu_gemm_widened(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_GEMM_WIDENED, {&w, nullptr, a.tokens});
  return e != cudaSuccess ? e : for_scheme(w, widened_launch{w, a, s});
}
