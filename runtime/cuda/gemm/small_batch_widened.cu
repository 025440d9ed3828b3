/* y = x·Wᵀ of 2 to 64 rows of x as they are with stored weights of any code on sm_90a: codes are widened in registers
 * (small_batch_rows.cuh), blocks of a cluster share the columns (small_batch.cuh). */
#include "runtime/cuda/gemm/small_batch.cuh"

namespace {

template <mm_cu_code C, mm_cu_scale S, uint32_t kMost>
struct kept_rows {
  using kind = few_kind<C, S>;
  static constexpr mm_cu_cluster_kind kKind = mm_cu_cluster_kind_of(C, S, false, kMost);
  static constexpr uint32_t kRows = kMost, kTurns = kKind.turns, kLineX = kKind.x, kLineBack = kKind.back, kScaleBytes = kKind.scales;
  static constexpr uint32_t kBlock = kRows * kLine; /* of x, a line */
  static_assert(kLineX == (kind::kPlain ? 1 : kind::kColumns / kPart) * kBlock && kLineBack == kind::kGroups * kRows * 8 &&
                    kScaleBytes == kBox * kind::kScaleBytes,
                "what small_batch_rows.cuh makes of a line");
  static constexpr uint32_t kLeast = C == MM_CU_INT4 || C == MM_CU_E2M1 ? 250 : 160;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr uint32_t kFull = S == MM_CU_COARSE ? 33 : 1, kRowsReady = kTurns * 128;
  static constexpr uint32_t kFetched = kStage + (kind::kBytes ? kScaleBytes : 0);

  static __device__ __forceinline__ void fetch_scales(const cluster_block &b, const cluster_maps &maps, uint32_t tile, uint32_t line,
                                                      uint32_t to, uint32_t full) {
    const mm_cu_weight &w = b.w;
    const uint32_t lane = threadIdx.x % 32;
    if (S == MM_CU_COARSE) {
      const uint32_t last = (w.k - 1) >> w.cell_k_log2;
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) { /* half, 32 rows */
        const uint32_t row = i % 2 * 32 + lane, n = min(tile * kBox + row, w.n - 1);
        const uint32_t cell = min((line * 2 + i / 2) * (kind::kColumns / 2) >> w.cell_k_log2, last);
        copy4_to(b.shared + to + (i / 2 * kBox + row) * 4,
                 static_cast<const float *>(w.scale) + (size_t)(n >> w.cell_n_log2) * w.scale_pitch + cell);
      }
      mbarrier_arrive_copied(full);
    }
    if (kind::kBytes && lane == 0) tma_load(b.shared + to, &maps.other, line / kByteSteps<C, S> * 16, tile * kBox, full);
  }

  static __device__ __forceinline__ void copy_rows(const cluster_block &, const cluster_maps &) {}

  /* Eight columns of row `row`, from `column` on; zeros beyond k. */
  static __device__ __forceinline__ uint4 columns(const cluster_block &b, uint32_t row, uint32_t column) {
    const uint32_t from = b.a.pick ? b.a.pick[row] : row;
    return column < b.w.k ? __ldcg(reinterpret_cast<const uint4 *>(b.a.x + (size_t)from * b.w.k + column)) : make_uint4(0, 0, 0, 0);
  }
  /* bf16: [line][row][64]; else [line][block][row][64] in f16, and [line][group][row]. Rows beyond those there are stay what they were: no
   * other row's sums read them. */
  static __device__ __forceinline__ void make_rows(const cluster_block &b, uint32_t thread) {
    constexpr uint32_t kAtOnce = 8, kEach = kind::kPlain ? 8 : 16,
                       kStep = kTurns * 128 / kEach; /* kEach: threads of a line's row, or group's */
    constexpr uint32_t kGroups = kind::kPlain ? 1 : kind::kGroups;
    const uint32_t rows = b.a.rows, all = b.count * kGroups * rows, lane = thread % kEach;
    float2 *const back = reinterpret_cast<float2 *>(b.memory + b.p.back);
#pragma unroll 1
    for (uint32_t first = thread / kEach; first < all; first += kAtOnce * kStep) {
      uint4 v[kAtOnce];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; j++) {
        const uint32_t i = first + j * kStep, row = i % rows, group = i / rows, line = b.rank + group / kGroups * b.blocks;
        if (i < all) v[j] = columns(b, row, line * kind::kColumns + group % kGroups * kGroup + lane * 8);
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; j++) {
        const uint32_t i = first + j * kStep, row = i % rows, group = i / rows;
        if (i >= all) break;
        if constexpr (kind::kPlain) {
          *reinterpret_cast<uint4 *>(b.memory + group * kBlock + swizzled(row, lane)) = v[j];
        } else {
          const few_columns c = convert_columns<kind::kOffset>(v[j], false);
          uint8_t *const to = b.memory + (group * 2 + lane / 8) * kBlock;
#pragma unroll
          for (uint32_t h = 0; h < 4; h++) {
            const uint32_t byte = place_of_four<kind::kPiece>(lane % 8 * 2 + h / 2) * 2 + h % 2 * 16;
            *reinterpret_cast<uint32_t *>(to + swizzled(row, byte / 16) + byte % 16) = c.h[h];
          }
          if (lane == 0) back[group * kRows + row] = c.back;
        }
      }
    }
    stores_before_wgmma();
    mbarrier_arrive(b.at(b.bar->x));
  }

  static __device__ __forceinline__ void multiply(float (&out)[kRows / 2], const cluster_block &b, const cluster_stage &s) {
    multiply_box<C, S, kRows>(out, {s.codes, b.memory + s.scales, s.x, reinterpret_cast<const float2 *>(b.memory + s.back)}, s.step,
                              [&] { s.done(); });
  }
#endif
};

struct kept_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;

  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (!has_few<C, S>()) {
      return cudaErrorNotSupported;
    } else {
      CUtensorMap scales = {};
      if (few_kind<C, S>::kBytes) {
        const cudaError_t e = mm_cu_map_boxes(&scales, w.scale, w.scale_pitch, w.n, 16, kBox, CU_TENSOR_MAP_SWIZZLE_NONE);
        if (e != cudaSuccess) return e;
      }
      const auto most = [&](auto kind) {
        return launch_clusters_of<decltype(kind)>(w, {{}, a.x, a.rows, a.y, a.y32, a.tokens}, scales, s);
      };
      return a.tokens <= 8    ? most(kept_rows<C, S, 8>())
             : a.tokens <= 16 ? most(kept_rows<C, S, 16>())
             : a.tokens <= 32 ? most(kept_rows<C, S, 32>())
                              : most(kept_rows<C, S, 64>());
    }
  }
};

}  // namespace

cudaError_t mm_cu_small_batch_widened(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_SMALL_BATCH_WIDENED, {&w, nullptr, a.tokens});
  return e != cudaSuccess || a.tokens == 0 ? e : for_scheme(w, kept_launch{w, a, s});
}

cudaError_t mm_cu_largest_cluster(uint32_t *blocks) {
  cudaError_t e = cudaSuccess;
  uint32_t most = 0;
  for (*blocks = 2 * kMostBlocks; e == cudaSuccess && most == 0 && *blocks > 2;)
    e = most_clusters<kept_rows<MM_CU_BF16, MM_CU_PLAIN, 8>>(*blocks /= 2, &most);
  if (most == 0) *blocks = 0;
  return e;
}
