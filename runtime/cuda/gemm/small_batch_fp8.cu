/* y = x·Wᵀ of at most 64 rounded rows with block FP8 weights on sm_90a (fp8.h), codes times codes (small_batch.cuh): wgmma in E4M3,
 * weight rows its M side, the rows of x its N side; what the tensor cores sum of 128 columns is scaled and added in f32. */
#include "runtime/cuda/gemm/small_batch.cuh"

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* d[64, R] (+)= a[64, 32] · b[R, 32]ᵀ, both e4m3, in blocks of 128 columns. */
MM_NARROW(multiply_codes, "k32.f32.e4m3.e4m3", "")
__device__ __forceinline__ void multiply_codes(float (&d)[32], uint64_t a, uint64_t b, int add) { wgmma_e4m3(d, a, b, add); }

#endif

template <uint32_t kMost>
struct coded_rows {
  static constexpr mm_cu_cluster_kind kKind = mm_cu_cluster_kind_of(MM_CU_E4M3, MM_CU_COARSE, true, kMost);
  static constexpr uint32_t kRows = kMost, kTurns = kKind.turns, kLineX = kKind.x, kLineBack = kKind.back, kScaleBytes = kKind.scales;
  static constexpr uint32_t kLeast = 130;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr uint32_t kFull = 2, kRowsReady = 33, kFetched = kStage;

  static __device__ __forceinline__ void fetch_scales(const cluster_block &b, const cluster_maps &, uint32_t tile, uint32_t line,
                                                      uint32_t to, uint32_t full) {
    if (threadIdx.x % 32 != 0) return;
    const float *scale = static_cast<const float *>(b.w.scale) + (tile * kBox >> b.w.cell_n_log2) * b.w.scale_pitch;
    copy4_to(b.shared + to, scale + (line * kLine >> b.w.cell_k_log2));
    mbarrier_arrive_copied(full);
  }

  /* Their codes, [line][row][128], and scales, [line][row]. */
  static __device__ __forceinline__ void copy_rows(const cluster_block &b, const cluster_maps &maps) {
    const uint32_t lane = threadIdx.x % 32, full = b.at(b.bar->x);
    if (lane == 0) {
      mbarrier_arrive_expect_tx(full, b.count * kLineX);
      for (uint32_t i = 0; i < b.count; i++) tma_load(b.shared + i * kLineX, &maps.other, (b.rank + i * b.blocks) * kLine, 0, full);
    }
    for (uint32_t i = lane; i < b.count * kRows; i += 32) {
      const uint32_t row = i % kRows;
      const float s = row < b.a.rows ? b.a.codes.scale[(size_t)(b.rank + i / kRows * b.blocks) * b.a.codes.scale_pitch + row] : 0.0f;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(b.shared + b.p.back + i * 4), "f"(s) : "memory");
    }
    mbarrier_arrive(full);
  }
  static __device__ __forceinline__ void make_rows(const cluster_block &, uint32_t) {}

  static __device__ __forceinline__ void multiply(float (&out)[kRows / 2], const cluster_block &b, const cluster_stage &s) {
    float part[kRows / 2];
    const uint64_t codes = operand(s.codes), x = operand(s.x);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_codes(part, operand_after(codes, k * 32), operand_after(x, k * 32), k > 0);
    wgmma_commit();
    const float scale = shared_float(b.shared + s.scales);
    float2 of[kRows / 8];
#pragma unroll
    for (uint32_t i = 0; i < kRows / 8; i++)
      asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                   : "=f"(of[i].x), "=f"(of[i].y)
                   : "r"(b.shared + s.back + (i * 8 + threadIdx.x % 4 * 2) * 4)
                   : "memory");
    wgmma_wait<0>(part);
    s.done();
#pragma unroll
    for (uint32_t i = 0; i < kRows / 2; i++) out[i] = fmaf(part[i], scale * (i % 2 ? of[i / 4].y : of[i / 4].x), out[i]);
  }
#endif
};

template <uint32_t kRows>
cudaError_t launch_coded(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  CUtensorMap rows;
  const cudaError_t e = mm_cu_map_boxes(&rows, a.x.code, a.x.pitch, a.x.rows, kLine, kRows, CU_TENSOR_MAP_SWIZZLE_128B);
  return e != cudaSuccess ? e : launch_clusters_of<coded_rows<kRows>>(w, {a.x, nullptr, nullptr, a.y, a.y32, a.x.rows}, rows, s);
}

}  // namespace

cudaError_t mm_cu_small_batch_fp8(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_SMALL_BATCH_FP8, {&w, nullptr, a.x.rows});
  if (e != cudaSuccess || a.x.rows == 0) return e;
  return (a.x.rows <= 8    ? launch_coded<8>
          : a.x.rows <= 16 ? launch_coded<16>
          : a.x.rows <= 32 ? launch_coded<32>
                           : launch_coded<64>)(w, a, s);
}
