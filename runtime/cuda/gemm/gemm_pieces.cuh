/* Code shared by gemm_hopper.cuh and gemm_widened.cuh: the pieces of 16 bytes of every step's weights that one producing thread brings and
 * widens, and their scales. */
#ifndef MM_CUDA_GEMM_PIECES_CUH
#define MM_CUDA_GEMM_PIECES_CUH

#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/weight.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The scales of a piece: those of its groups, or one f32. at: the scale row's first element. */
template <mm_cu_code C, mm_cu_scale S>
struct loaded_scale {
  piece_scale<C, S> scale;
  __device__ __forceinline__ void load(const mm_cu_weight &w, size_t at, uint32_t k) {
    const uint8_t *row = static_cast<const uint8_t *>(w.scale) + at * (S == MM_CU_FINE ? sizeof(float) : 1);
    scale.load(w, row, k);
  }
};
template <mm_cu_code C>
struct loaded_scale<C, MM_CU_COARSE> {
  float f;
  __device__ __forceinline__ void load(const mm_cu_weight &w, size_t at, uint32_t k) {
    f = k < w.k ? static_cast<const float *>(w.scale)[at + (k >> w.cell_k_log2)] : 0.0f;
  }
};

/* Takes kColumns weight rows, kDepth columns a step, with kProducers threads. Scale: a loaded_scale that widens. */
template <mm_cu_code C, class Scale, int kColumns, int kDepth, int kProducers>
struct gemm_pieces {
  static constexpr int kPiece = codec<C>::kPiece, kPerRow = kDepth / kPiece, kPieces = kColumns * kPerRow / kProducers;
  const mm_cu_weight &w;
  const uint8_t *data;
  size_t scale_row0;
  uint32_t thread, row[kPieces];

  template <class Job>
  __device__ __forceinline__ gemm_pieces(const mm_cu_weight &weight, const Job &job, uint32_t t) : w(weight), thread(t) {
    const uint32_t matrix = job.weight(0).matrix;
    data = w.data + (size_t)matrix * w.n * w.pitch, scale_row0 = (size_t)matrix * w.scale_rows;
#pragma unroll
    for (int i = 0; i < kPieces; i++) row[i] = job.weight(place(i)).row;
  }
  __device__ __forceinline__ uint32_t place(int i) const { return (i * kProducers + thread) / kPerRow; } /* row in the block */
  __device__ __forceinline__ uint32_t column(uint32_t step) const { return step * kDepth + thread % kPerRow * kPiece; }
  /* Piece i of a step to to(i). */
  template <class To>
  __device__ __forceinline__ void fetch_to(uint32_t step, const To &to) const {
    const size_t at = (size_t)(step * kPerRow + thread % kPerRow) * 16;
#pragma unroll
    for (int i = 0; i < kPieces; i++) copy16_or_zero(to(i), at < w.pitch ? data + row[i] * w.pitch + at : data, at < w.pitch);
  }
  /* The scales of a step, one step ahead of its codes. */
  __device__ __forceinline__ void fetch_scales(Scale (&f)[kPieces], uint32_t step) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++) f[i].load(w, (scale_row0 + (row[i] >> w.cell_n_log2)) * w.scale_pitch, column(step));
  }
  /* Widens a step's codes, *raw(i), to the stage's weights. Columns past k meet zeros of x: they must only be finite. */
  template <class Raw>
  __device__ __forceinline__ void widen_to(uint8_t *to, const Raw &raw, uint32_t step, Scale (&f)[kPieces]) const {
    uint4 q[kPieces]; /* all loads before all stores */
#pragma unroll
    for (int i = 0; i < kPieces; i++) q[i] = *raw(i);
    Scale next[kPieces];
    fetch_scales(next, step + 1);
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      uint32_t v[kPiece / 2];
      f[i].widen(v, q[i]);
#pragma unroll
      for (int j = 0; j < kPiece / 8; j++)
        *reinterpret_cast<uint4 *>(to + swizzled(place(i), thread % kPerRow * (kPiece / 8) + j)) =
            make_uint4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
#pragma unroll
    for (int i = 0; i < kPieces; i++) f[i] = next[i];
  }
};

#endif

#endif
