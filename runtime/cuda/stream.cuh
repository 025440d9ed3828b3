/* The core of every decode product: at most 16 activation rows against weight rows streamed once from memory.
 *
 * An item is eight weight rows. The 16 warps of a block share an item along k: a warp's load takes 64 bytes of each row, lane (g, t)
 * 16 bytes of row g, through its own ring in shared memory (cp.async; no barrier, each lane reads back what it fetched), and the ring
 * runs on across items. The piece of a lane is its fragment of mma.m16n8k16 with the activations as the 16 rows: which k an mma
 * slot means is free as long as both sides agree. The warps' sums meet in shared memory in a fixed order.
 *
 * A job says what the rows are:
 *   items(), segments()          an item's k axis is `segments` stretches of w.k
 *   row(item, segment, g)        {matrix, row} of the item's row g
 *   x(segment, token)            the activations of that stretch, NULL for zeros
 *   emit(item, token, c, sum)    by all 32 lanes of a warp: eight consecutive lanes hold c = 0 … 7 of one token */
#ifndef MM_CUDA_STREAM_CUH
#define MM_CUDA_STREAM_CUH

#include "runtime/cuda/weight.cuh"

constexpr int kWarps = 16, kStages = 8;

struct weight_row {
  uint32_t matrix, row;
};

/* kHalves: 1 for up to 8 tokens, 2 for up to 16. */
template <int kHalves>
struct stream_shared {
  uint4 ring[kWarps][kStages][32];
  float sum[2][kWarps][kHalves * 64];
};

/* Activation columns [k0, k0 + 8) of one token. */
__device__ __forceinline__ uint4 load_x(const bf16 *x, uint32_t k0, uint32_t k) {
  return x && k0 < k ? *reinterpret_cast<const uint4 *>(x + k0) : make_uint4(0, 0, 0, 0);
}

/* acc += x[16, piece] · piece: one chunk of a warp. scale: row g's scales (FINE, NV, MX). */
template <mm_cu_code C, mm_cu_scale S, int kHalves>
__device__ __forceinline__ void multiply_piece(float acc[4], uint4 q, const mm_cu_weight &w, const void *scale, const bf16 *x0,
                                               const bf16 *x1, uint32_t k0) {
  constexpr int kPiece = codec<C>::kPiece;
  piece_scale<C, S> ps;
  ps.load(w, scale, k0);
  uint32_t v[kPiece / 2];
  codec<C>::widen(v, q);
  ps.apply(v);
#pragma unroll
  for (int h = 0; h < kPiece / 8; h++) {
    uint4 lo = load_x(x0, k0 + 8 * h, w.k), hi = make_uint4(0, 0, 0, 0);
    if (kHalves == 2) hi = load_x(x1, k0 + 8 * h, w.k);
    const uint32_t even[4] = {lo.x, hi.x, lo.y, hi.y}, odd[4] = {lo.z, hi.z, lo.w, hi.w};
    mma(acc, even, v[4 * h], v[4 * h + 1]);
    mma(acc, odd, v[4 * h + 2], v[4 * h + 3]);
  }
}

template <mm_cu_code C, int kHalves, class Job>
struct stream_loader {
  const mm_cu_weight &w;
  const Job &job;
  uint4 (*ring)[32];
  uint32_t item, segment, chunk, stage;
  const uint8_t *row;

  __device__ stream_loader(const mm_cu_weight &weight, const Job &j, uint4 (*r)[32])
      : w(weight), job(j), ring(r), item(blockIdx.x), segment(0), chunk(threadIdx.x / 32), stage(0) {
    locate();
  }
  __device__ __forceinline__ void locate() {
    if (item >= job.items()) return;
    weight_row at = job.row(item, segment, threadIdx.x % 32 / 4);
    row = w.data + ((size_t)at.matrix * w.n + at.row) * w.pitch;
  }
  /* Fetches the warp's next piece into the ring, or nothing at the end. */
  __device__ __forceinline__ void next(uint32_t pieces) {
    if (item < job.items() && chunk * 4 < pieces) {
      uint32_t piece = chunk * 4 + threadIdx.x % 4;
      copy16_or_zero(&ring[stage][threadIdx.x % 32], row + (piece < pieces ? piece * 16 : 0), piece < pieces);
      stage = (stage + 1) % kStages;
      chunk += kWarps;
      if (chunk * 4 >= pieces) {
        chunk = threadIdx.x / 32;
        if (++segment == job.segments()) segment = 0, item += gridDim.x;
        locate();
      }
    }
    copy_commit();
  }
};

template <mm_cu_code C, mm_cu_scale S, int kHalves, class Job>
__device__ __forceinline__ void stream_rows(const mm_cu_weight &w, const Job &job) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<stream_shared<kHalves> *>(shared_raw);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pieces = (uint32_t)(w.pitch / 16);
  constexpr int kPiece = codec<C>::kPiece;

  stream_loader<C, kHalves, Job> loader(w, job, sh.ring[warp]);
  for (int i = 0; i < kStages - 1; i++) loader.next(pieces);
  if (job.early()) grid_wait();

  uint32_t stage = 0, turn = 0;
  for (uint32_t item = blockIdx.x; item < job.items(); item += gridDim.x, turn ^= 1) {
    float acc[4] = {0, 0, 0, 0};
    for (uint32_t segment = 0; segment < job.segments(); segment++) {
      const bf16 *x0 = job.x(segment, g), *x1 = kHalves == 2 ? job.x(segment, g + 8) : nullptr;
      auto scale_row = [&](uint32_t column) {
        weight_row at = job.row(item, segment, column);
        return ((size_t)at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
      };
      const float *s0 = nullptr, *s1 = nullptr;
      const void *mine = nullptr;
      if (S == MM_CU_COARSE) {
        s0 = static_cast<const float *>(w.scale) + scale_row(2 * t), s1 = static_cast<const float *>(w.scale) + scale_row(2 * t + 1);
      } else if (S == MM_CU_FINE) {
        mine = static_cast<const float *>(w.scale) + scale_row(g);
      } else if (S != MM_CU_PLAIN) {
        mine = static_cast<const uint8_t *>(w.scale) + scale_row(g);
      }
      for (uint32_t chunk = warp; chunk * 4 < pieces; chunk += kWarps) {
        uint32_t k0 = (chunk * 4 + t) * kPiece;
        if (S == MM_CU_COARSE) {
          uint32_t cell = (chunk * 4 * kPiece) >> w.cell_k_log2;
          float f0 = s0[cell], f1 = s1[cell], part[4] = {0, 0, 0, 0};
          copy_wait<kStages - 2>();
          multiply_piece<C, S, kHalves>(part, sh.ring[warp][stage][lane], w, mine, x0, x1, k0);
          acc[0] += part[0] * f0, acc[1] += part[1] * f1, acc[2] += part[2] * f0, acc[3] += part[3] * f1;
        } else {
          copy_wait<kStages - 2>();
          multiply_piece<C, S, kHalves>(acc, sh.ring[warp][stage][lane], w, mine, x0, x1, k0);
        }
        stage = (stage + 1) % kStages;
        loader.next(pieces);
      }
    }
    float *out = &sh.sum[turn][warp][g * 8 + 2 * t];
    *reinterpret_cast<float2 *>(out) = make_float2(acc[0], acc[1]);
    if (kHalves == 2) *reinterpret_cast<float2 *>(out + 64) = make_float2(acc[2], acc[3]);
    __syncthreads();
    if (threadIdx.x < kHalves * 64) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; i++) sum += sh.sum[turn][i][threadIdx.x];
      job.emit(item, threadIdx.x / 8, threadIdx.x % 8, sum);
    }
  }
}

/* Calls f.template run<code, scale>() for the pair of a weight; cudaErrorNotSupported for a pair without kernels. */
template <class F>
cudaError_t for_scheme(const mm_cu_weight &w, const F &f) {
  switch (w.code) {
    case MM_CU_BF16:
      if (w.scale_kind == MM_CU_PLAIN) return f.template run<MM_CU_BF16, MM_CU_PLAIN>();
      break;
    case MM_CU_E4M3:
      if (w.scale_kind == MM_CU_COARSE) return f.template run<MM_CU_E4M3, MM_CU_COARSE>();
      if (w.scale_kind == MM_CU_FINE) return f.template run<MM_CU_E4M3, MM_CU_FINE>();
      break;
    case MM_CU_INT4:
      if (w.scale_kind == MM_CU_COARSE) return f.template run<MM_CU_INT4, MM_CU_COARSE>();
      if (w.scale_kind == MM_CU_FINE) return f.template run<MM_CU_INT4, MM_CU_FINE>();
      break;
    case MM_CU_E2M1:
      if (w.scale_kind == MM_CU_NV) return f.template run<MM_CU_E2M1, MM_CU_NV>();
      if (w.scale_kind == MM_CU_MX) return f.template run<MM_CU_E2M1, MM_CU_MX>();
      break;
  }
  return cudaErrorNotSupported;
}

#endif
