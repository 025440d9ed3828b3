/* y = x·Wᵀ for at most 16 rows of x: the weights are read once, at the memory's rate (stream.cuh). */
#include "runtime/cuda/launch.h"
#include "runtime/cuda/stream.cuh"

namespace {

struct linear_job {
  static constexpr bool kEarly = true;
  static constexpr int kPerTile = 16;
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  share rows;

  __device__ uint32_t tokens() const { return a.tokens; }
  __device__ uint32_t first() const { return rows.first; }
  __device__ uint32_t end() const { return rows.end; }
  __device__ row_group group(uint32_t first) const { return {first, min(rows.end - first, kTiles * kPerTile)}; }
  __device__ uint32_t apart() const { return 8; }
  __device__ uint32_t segments() const { return 1; }
  __device__ uint32_t matrix(uint32_t, uint32_t) const { return 0; }
  __device__ const bf16 *x(uint32_t, uint32_t token) const {
    if (token >= a.tokens) return nullptr;
    return a.x + (size_t)(a.rows ? a.rows[token] : token) * w.k;
  }
  template <class Sum>
  __device__ void emit(uint32_t row, uint32_t token, const Sum &sum) const {
    float y = sum(0);
    if (w.global) y *= w.global[0];
    const size_t at = (size_t)token * w.n + row;
    if (a.y32) {
      a.y32[at] = y;
    } else {
      a.y[at] = __float2bfloat16_rn(y);
    }
  }
};

template <mm_cu_code C, mm_cu_scale S, int kHalves>
__global__ void __launch_bounds__(kStreamThreads, kHalves == 1 ? 2 : 1)
    skinny(const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
  grid_launch_next();
  linear_job job{w, a, share(w.n)};
  stream_rows<C, S, kHalves>(w, job);
}

struct skinny_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    const unsigned grid = min(ceil_div(w.n, 8), multiprocessors());
    if (a.tokens <= 8) return launch(skinny<C, S, 1>, grid, kStreamThreads, sizeof(stream_shared<1>), s, w, a);
    return launch(skinny<C, S, 2>, grid, kStreamThreads, sizeof(stream_shared<2>), s, w, a);
  }
};

}  // namespace

cudaError_t mm_cu_skinny(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  if (a.tokens > MM_CU_SKINNY) return cudaErrorInvalidValue;
  return for_scheme(w, skinny_launch{w, a, s});
}
