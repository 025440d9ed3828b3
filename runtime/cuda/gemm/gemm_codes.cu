/* y = x·Wᵀ of rounded rows by mma.sync of codes (gemm_codes.cuh). */
#include "runtime/cuda/gemm/gemm_codes.cuh"

#include "runtime/cuda/gemm/dense_job.cuh"

namespace {

__global__ void __launch_bounds__(gemm_codes_form::kThreads, 1)
    gemm_codes(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a, const __grid_constant__ code_rows c) {
#ifdef MM_CU_CODES_CODE
  using form = gemm_codes_form;
  using job = dense_job<form>;
  grid_wait_and_launch_next();
  const job of{w, a, blockIdx.x * form::kRows, blockIdx.y * form::kColumns};
  codes_tile<job>(w, c, of)(of);
#else
  no_such_code();
#endif
}

}  // namespace

cudaError_t mm_cu_gemm_codes(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  using form = gemm_codes_form;
  const cudaError_t e = mm_cu_refuse(MM_CU_GEMM_CODES, {&w, nullptr, a.x.rows});
  if (e != cudaSuccess) return e;
  return launch(gemm_codes, dim3(ceil_div(a.x.rows, form::kRows), ceil_div(w.n, form::kColumns)), form::kThreads, form::kShared, s, w,
                mm_cu_linear{nullptr, nullptr, a.y, a.y32, a.x.rows}, code_rows{a.x.code, a.x.scale, a.x.pitch, 1, a.x.scale_pitch});
}
