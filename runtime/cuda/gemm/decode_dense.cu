/* y = x·Wᵀ for at most 64 rows of x by the tile that reads weights into registers (decode_tile.cuh), in code that is not of sm_90a. */
#include "runtime/cuda/gemm/decode_tile.cuh"
#include "runtime/cuda/gemm/dense_job.cuh"

namespace {

/* blockIdx.x: tiles of rows, which read the same weights, side by side. */
template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(kTileThreads, Form::kBlocks)
    decode_dense(const __grid_constant__ tile_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  grid_wait_and_launch_next();
  decode_tile<C, S, Form>(w, p, dense_job<Form>{w, a, blockIdx.x * Form::kRows, blockIdx.y * Form::kColumns});
#else
  no_such_code();
#endif
}

struct dense_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S, class Form>
  cudaError_t in() const {
    const tile_plan p = plan_tile<C, Form>(w);
    const dim3 grid(ceil_div(a.tokens, Form::kRows), ceil_div(w.n, Form::kColumns));
    return launch(decode_dense<C, S, Form>, grid, kTileThreads, p.shared, s, p, w, a);
  }
  /* Of 64 weight rows a block, or of 32 where those are too few blocks. */
  template <mm_cu_code C, mm_cu_scale S, uint32_t kTiles>
  cudaError_t of() const {
    if constexpr (codec<C>::kPiece < 32)
      if (ceil_div(w.n, 64) * ceil_div(a.tokens, 8 * kTiles) < multiprocessors()) return in<C, S, decode_form<kTiles, 2>>();
    return in<C, S, decode_form<kTiles, 4>>();
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (kTileTakes<C, S>) {
      if constexpr (C == MM_CU_BF16) /* a head: 128 weight rows meet all rows at once */
        if (a.tokens > 32 && w.n / 256 >= multiprocessors()) return in<C, S, decode_form<8, 8>>();
      return a.tokens <= 8 ? of<C, S, 1>() : a.tokens <= 16 ? of<C, S, 2>() : of<C, S, 4>();
    } else {
      return cudaErrorNotSupported;
    }
  }
};

}  // namespace

cudaError_t mm_cu_decode_dense(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_DECODE_DENSE, {&w, nullptr, a.tokens});
  return e != cudaSuccess ? e : for_scheme(w, dense_launch{w, a, s});
}
