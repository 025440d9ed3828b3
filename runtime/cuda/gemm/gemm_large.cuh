/* The large form of gemm.cuh's block, for code that is not of sm_90a: warps of 64 x 64 results, whose products of one step and the widening
 * of the next step's weights are one run of instructions, so that neither the tensor cores nor the other units wait for a phase to end.
 * Shared memory has two stages; steps come in pairs, so that all its addresses are one of a lane's and a constant. */
#ifndef MM_CUDA_GEMM_LARGE_CUH
#define MM_CUDA_GEMM_LARGE_CUH

#ifndef __CUDA_ARCH_FEAT_SM90_ALL

/* COARSE E4M3 is widened without 2^120, of which its scale has 2^60 and the results the other 2^60. */
template <mm_cu_code C, mm_cu_scale S>
constexpr bool kSplitPower = C == MM_CU_E4M3 &&S == MM_CU_COARSE;

/* A piece of a step's weights to the shared address `to`. */
template <mm_cu_code C, mm_cu_scale S>
__device__ __forceinline__ void store_widened(uint32_t to, uint4 q, const tile_scale<C, S> &scale) {
  uint32_t v[codec<C>::kPiece / 2];
  if constexpr (kSplitPower<C, S>) {
    const float f = scale.f * 0x1p60f;
    const uint32_t most = pack2(f, f), rest = pack2(f - low(most), f - low(most)), w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t spread = __byte_perm(w[i / 2], 0, i % 2 ? 0x3424 : 0x1404),
                     code = and_or(spread, 0x80008000u, spread >> 4 & 0x07f007f0u);
      v[i] = fma2(code, most, mul2(code, rest));
    }
  } else {
    codec<C>::widen(v, q);
    scale.apply(v);
  }
#pragma unroll
  for (int j = 0; j < codec<C>::kPiece / 8; j++)
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + 16 * j), "r"(v[4 * j]), "r"(v[4 * j + 1]), "r"(v[4 * j + 2]),
                 "r"(v[4 * j + 3])
                 : "memory");
}

template <mm_cu_code C, mm_cu_scale S, class Form, class Job>
struct large_tile {
  static constexpr uint32_t kPitch = 2 * (kGemmK + kGemmPad), kXStage = Form::kRows * kPitch, kWStage = Form::kColumns * kPitch;
  static constexpr uint32_t kTall = Form::kRows / 64, kPiece = codec<C>::kPiece, kPerRow = kGemmK / kPiece;
  static constexpr uint32_t kPieces = Form::kColumns * kPerRow / Form::kThreads, kXPieces = Form::kRows * kGemmK / 8 / Form::kThreads;
  static constexpr uint32_t kHeld = C == MM_CU_BF16 ? 1 : kPieces; /* BF16 is copied as it is */
  static_assert(Form::kColumns / (Form::kThreads / 32 / kTall) == 64, "a warp has 64 columns");
  const mm_cu_weight &w;
  uint32_t x_to, w_to, x_from, w_from; /* shared addresses of the lane: of copies and stores, and of fragments */
  uint32_t rows, x_pieces;             /* those of the thread's pieces of x that are of rows which the tile has */
  uint32_t x[kXPieces];                /* places of their rows, of 16 bytes */
  uint32_t row[kPieces];               /* of those of weights, likewise */
  uint32_t scale[kPieces];             /* the first scale of each */
  const bf16 *x_base;                  /* the thread's first column of row 0 */
  const uint8_t *w_base;
  uint4 q[kHeld];
  tile_scale<C, S> f[kHeld];
  float acc[4][8][4];

  __device__ __forceinline__ large_tile(const mm_cu_weight &weight, const Job &job) : w(weight), rows(job.rows()) {
    extern __shared__ uint4 shared_raw[];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = (uint32_t)__cvta_generic_to_shared(shared_raw);
    x_to = base + threadIdx.x / 8 * kPitch + threadIdx.x % 8 * 16;
    w_to = base + 2 * kXStage + threadIdx.x / kPerRow * kPitch + threadIdx.x % kPerRow * (kPiece * 2);
    x_from = base + (warp % kTall * 64 + lane % 16) * kPitch + lane / 16 * 16;
    w_from = base + 2 * kXStage + (warp / kTall * 64 + lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
    x_pieces = threadIdx.x / 8 < rows ? (rows - threadIdx.x / 8 - 1) / (Form::kThreads / 8) + 1 : 0;
    x_base = job.x_base() + threadIdx.x % 8 * 8, w_base = w.data + threadIdx.x % kPerRow * 16;
#pragma unroll
    for (uint32_t i = 0; i < kXPieces; i++) x[i] = job.x_row(min((i * Form::kThreads + threadIdx.x) / 8, rows - 1)) * (w.k / 8);
#pragma unroll
    for (uint32_t i = 0; i < kPieces; i++) {
      const weight_row at = job.weight((i * Form::kThreads + threadIdx.x) / kPerRow);
      row[i] = (at.matrix * w.n + at.row) * (uint32_t)(w.pitch / 16);
      scale[i] = (at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
    }
#pragma unroll
    for (uint32_t i = 0; i < 128; i++) acc[i / 32][i / 4 % 8][i % 4] = 0;
  }
  /* Starts the copies of columns [k0, k0 + kGemmK) to a stage; columns past k become zeros. Rows that the tile does not have are not
   * copied: their results are not written. */
  template <bool kWhole>
  __device__ __forceinline__ void copy(uint32_t stage, uint32_t k0) const {
    const bool valid = k0 + threadIdx.x % 8 * 8 < w.k;
    const bf16 *const from = x_base + (valid ? k0 : 0);
#pragma unroll
    for (uint32_t i = 0; i < kXPieces; i++)
      if (kWhole || i < x_pieces) copy16_to(x_to + stage * kXStage + i * (Form::kThreads / 8) * kPitch, from + (size_t)x[i] * 8, valid);
    if constexpr (C == MM_CU_BF16) {
      const uint8_t *const weights = w_base + (valid ? k0 * 2 : 0);
#pragma unroll
      for (uint32_t i = 0; i < kPieces; i++)
        copy16_to(w_to + stage * kWStage + i * (Form::kThreads / 8) * kPitch, weights + (size_t)row[i] * 16, valid);
    }
    copy_commit();
  }
  /* Codes past k become zeros: they meet zeros of x. */
  __device__ __forceinline__ void fetch(uint32_t i, uint32_t k0) {
    if constexpr (C != MM_CU_BF16) {
      const uint32_t k = k0 + threadIdx.x % kPerRow * kPiece;
      q[i] = make_uint4(0, 0, 0, 0);
      if (k < w.k) q[i] = *reinterpret_cast<const uint4 *>(w_base + k0 / kPiece * 16 + (size_t)row[i] * 16);
      f[i].load(w, scale[i], k);
    }
  }
  __device__ __forceinline__ void store(uint32_t i, uint32_t stage) const {
    if constexpr (C != MM_CU_BF16) store_widened<C, S>(w_to + stage * kWStage + i * (Form::kThreads / kPerRow) * kPitch, q[i], f[i]);
  }
  /* A step: the products of `stage`, weights of the step behind it to the other stage, and the codes of the one behind that. kHas: the warp
   * has rows; kWhole: the tile has all. */
  template <bool kHas, bool kWhole>
  __device__ __forceinline__ void step(uint32_t stage, uint32_t k0) {
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
      if (k == 1) copy<kWhole>(stage ^ 1, k0 + kGemmK); /* behind the first products */
      if constexpr (kHas) {
        uint32_t a[4][4], b[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) ldmatrix4_at(a[i], x_from + stage * kXStage + i * 16 * kPitch + k * 32);
#pragma unroll
        for (uint32_t n = 0; n < 8; n += 2) {
          ldmatrix4_at(b, w_from + stage * kWStage + n * 8 * kPitch + k * 32);
#pragma unroll
          for (uint32_t i = 0; i < 4; i++) mma(acc[i][n], a[i], b[0], b[1]), mma(acc[i][n + 1], a[i], b[2], b[3]);
        }
      }
#pragma unroll
      for (uint32_t i = k * kPieces / 4; i < (k + 1) * kPieces / 4; i++) store(i, stage ^ 1), fetch(i, k0 + 2 * kGemmK);
    }
  }
  template <bool kHas, bool kWhole>
  __device__ __forceinline__ void steps() {
#pragma unroll 1
    for (uint32_t k0 = 0; k0 < w.k; k0 += 2 * kGemmK) {
      step<kHas, kWhole>(0, k0);
      step<kHas, kWhole>(1, k0 + kGemmK); /* products of zeros behind the last column */
    }
  }
  __device__ __forceinline__ void operator()(const Job &job) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp % kTall * 64, col0 = warp / kTall * 64;
    copy<false>(0, 0);
#pragma unroll
    for (uint32_t i = 0; i < kPieces; i++) fetch(i, 0);
#pragma unroll
    for (uint32_t i = 0; i < kPieces; i++) store(i, 0), fetch(i, kGemmK);
    if (rows == (uint32_t)Form::kRows) {
      steps<true, true>();
    } else if (row0 < rows) {
      steps<true, false>();
    } else {
      steps<false, false>();
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      const uint32_t r = row0 + i * 8 + lane / 4;
      if (r >= rows) continue;
      float v[8][2];
#pragma unroll
      for (uint32_t n = 0; n < 8; n++) {
        v[n][0] = acc[i / 2][n][i % 2 * 2] * (kSplitPower<C, S> ? 0x1p60f : 1.0f);
        v[n][1] = acc[i / 2][n][i % 2 * 2 + 1] * (kSplitPower<C, S> ? 0x1p60f : 1.0f);
      }
      job.emit(r, col0 + lane % 4 * 2, v);
    }
  }
};

#endif

#endif
