/* y = x·Wᵀ of rounded rows (gemm_fp8.cuh). */
#include "runtime/cuda/gemm/gemm_fp8.cuh"

namespace {

using namespace fp8_gemm;

template <bool kInBlocks>
struct dense_job {
  enum : bool { kBlocks = kInBlocks };
  mm_cu_weight w;
  mm_cu_product a;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ const mm_cu_codes &codes() const { return a.x; }
  __device__ void prepare(shared &) const {}
  __device__ bool find(uint32_t index, uint32_t rank, shared &, tile *t) const {
    /* eight tiles of 256 rows meet all weights before the next eight: what runs at a time shares both */
    const uint32_t high = (a.x.rows + kPair * kRows - 1) / (kPair * kRows), wide = (w.n + 2 * kRun - 1) / (2 * kRun);
    if (index >= high * wide) return false;
    const uint32_t strip = index / (8 * wide), in = index % (8 * wide), tall = min(8u, high - strip * 8);
    split_rows((strip * 8 + in % tall) * kPair * kRows, a.x.rows, rank, t);
    t->column = in / tall * 2 * kRun, t->run[0] = t->column, t->run[1] = t->column + kRun;
    return true;
  }
  __device__ uint32_t name(const tile &t, uint32_t i) const { return t.first + i; }
  template <int N, class Most>
  __device__ __forceinline__ void emit(const tile &t, uint32_t r, uint32_t row, float (&out)[2][4 * N], int half, uint32_t column,
                                       const Most &) const {
    const bool mine = r < t.rows;
    if (!a.y32 && w.n % 8 == 0) {
      __nv_bfloat16 *to = a.y;
#pragma unroll 1
      for (int i = 0; i < (a.push.epoch ? 2 : 1); i++) {
        store_runs<N>(to + (size_t)row * w.n, t.column + column, w.n, out, half, 1.0f, mine);
        if (a.push.epoch) to = a.push.to[*a.push.epoch & 1];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
      const uint32_t at = t.column + i / (2 * N) * kRun + column + i % (2 * N) / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      const float v = out[i / (2 * N)][i % (2 * N) / 2 * 4 + 2 * half + i % 2];
      if (!mine || at >= w.n) continue;
      if (a.y32) {
        a.y32[(size_t)row * w.n + at] = v;
      } else {
        a.y[(size_t)row * w.n + at] = __float2bfloat16_rn(v);
      }
    }
  }
#endif
};

}  // namespace

cudaError_t mm_cu_gemm_fp8(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_GEMM_FP8, {&w, nullptr, a.x.rows});
  if (e != cudaSuccess) return e;
  const uint32_t tiles = ceil_div(a.x.rows, kPair * kRows) * ceil_div(w.n, 2 * kRun);
  return w.cell_n_log2 >= 7 ? launch_product(dense_job<true>{w, a}, a.x, tiles, s) : launch_product(dense_job<false>{w, a}, a.x, tiles, s);
}
