/* The core of every decode product: at most 16 activation rows against weight rows streamed once from memory.
 *
 * A tile is 16 weight rows, the M side of mma.m16n8k16; tokens are its N side. The warps of a block share a tile along k: a warp's
 * chunk is 64 bytes of each row, lane (g, t) fetching bytes 16t … 16t+15 of rows g and g+8 through its own ring in shared memory
 * (cp.async; no barrier, each lane reads back its own codes), and the ring runs on across tiles. What a lane fetched is its fragment:
 * which k an mma slot means is free as long as both sides agree. The warps' sums meet in shared memory in a fixed order, which depends
 * neither on the other tokens nor on where a tile lies, so a token's result has the same bits in every batch.
 *
 * A job says what the rows are:
 *   tiles(), segments()       a block's tiles; a tile's k axis is `segments` stretches of w.k
 *   valid(tile)               rows of the tile that exist, at the start of its 16 or of each 8 if split()
 *   row(tile, segment, i)     {matrix, row} of row i of the tile, a readable one also past the valid
 *   x(segment, token)         the activations of that stretch, NULL for zeros
 *   emit(tile, token, i, sum) by whole warps, lane l holding i = l % 16 */
#ifndef MM_CUDA_STREAM_CUH
#define MM_CUDA_STREAM_CUH

#include "runtime/cuda/weight.cuh"

/* Twelve divides the chunks of a row in all real shapes; six stages are 72 KB in flight, and two blocks fit a multiprocessor, so that
 * the next kernel's weights arrive while this one ends. */
constexpr int kStreamWarps = 12, kStreamThreads = kStreamWarps * 32, kStages = 6;
constexpr int kSumPitch = 20; /* floats from token to token: no bank conflicts */

/* kHalves: 1 for up to 8 tokens, 2 for up to 16. */
template <int kHalves>
struct stream_shared {
  uint4 codes[kStreamWarps][kStages][2][32];
  uint32_t scale[kStreamWarps][kStages][32];
  float sum[2][kStreamWarps][kHalves * 8 * kSumPitch];
};

/* The part [first, end) of `count` that is this block's. */
struct share {
  uint32_t first, end;
  __device__ explicit share(uint32_t count)
      : first((uint32_t)((uint64_t)count * blockIdx.x / gridDim.x)), end((uint32_t)((uint64_t)count * (blockIdx.x + 1) / gridDim.x)) {}
};

/* Scales that travel with the codes: one word (COARSE, MX) or two (NV) per row and chunk. */
template <mm_cu_code C, mm_cu_scale S, class Job>
struct stream_loader {
  static constexpr bool kScales = S == MM_CU_COARSE || S == MM_CU_NV || S == MM_CU_MX;
  static constexpr int kWords = S == MM_CU_NV ? 2 : 1;
  const mm_cu_weight &w;
  const Job &job;
  uint4 *codes;    /* the lane's, stage 0 */
  uint32_t *scale; /* the lane's word, stage 0 */
  uint32_t tile = 0, segment = 0, chunk = threadIdx.x / 32, stage = 0;
  const uint8_t *row[2], *scale_row;
  uint32_t bytes[2]; /* of each row from the lane's first on; 0 if it does not exist */

  template <class Shared>
  __device__ stream_loader(const mm_cu_weight &weight, const Job &j, Shared &sh) : w(weight), job(j) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    codes = &sh.codes[warp][0][0][lane];
    scale = &sh.scale[warp][0][scale_place() * kWords + lane % kWords];
    locate();
  }
  /* Row of the tile whose scales the lane fetches; beyond 15: none. */
  static __device__ __forceinline__ uint32_t scale_place() { return threadIdx.x % 32 / 4 + 8 * (threadIdx.x % 4 / kWords); }

  __device__ __forceinline__ void locate() {
    if (tile >= job.tiles()) return;
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const weight_row at = job.row(tile, segment, g + 8 * h);
      row[h] = w.data + ((size_t)at.matrix * w.n + at.row) * w.pitch + 16 * t;
      bytes[h] = g + 8 * h < job.valid(tile) || (Job::kSplit && g < job.valid(tile)) ? (uint32_t)w.pitch - 16 * t : 0;
      if (kScales && h == (int)(t / kWords)) {
        const size_t first = ((size_t)at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
        scale_row = static_cast<const uint8_t *>(w.scale) + first * (S == MM_CU_COARSE ? 4 : 1);
      }
    }
  }
  /* Fetches the warp's next chunk into the ring, or nothing at the end. */
  __device__ __forceinline__ void next() {
    if (tile < job.tiles()) {
      const uint32_t at = chunk * 64;
#pragma unroll
      for (int h = 0; h < 2; h++) copy16_or_zero(codes + stage * 64 + h * 32, row[h] + at, (int)at < (int)bytes[h]);
      if (kScales && scale_place() < 16) {
        const uint32_t from = S == MM_CU_COARSE ? (chunk * 4 * codec<C>::kPiece >> w.cell_k_log2) * 4
                                                : chunk * 4 * kWords + threadIdx.x % kWords * 4;
        copy4_or_zero(scale + stage * 32, scale_row + from, S == MM_CU_COARSE || from < w.scale_pitch);
      }
      chunk += kStreamWarps;
      if (chunk * 64 >= w.pitch) {
        chunk = threadIdx.x / 32;
        if (++segment == job.segments()) segment = 0, tile++;
        locate();
      }
    }
    copy_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
};

/* The activations that go with a lane's piece. */
template <int kPiece>
struct stream_x {
  uint4 q[kPiece / 8];
  /* columns [k0, k0 + kPiece) of a row of `width`, zeros beyond */
  __device__ __forceinline__ void load(const bf16 *row, uint32_t k0, uint32_t width) {
#pragma unroll
    for (int i = 0; i < kPiece / 8; i++)
      q[i] = k0 + 8 * i < width ? *reinterpret_cast<const uint4 *>(row + k0 + 8 * i) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void multiply(uint32_t factor) {
#pragma unroll
    for (int i = 0; i < kPiece / 8; i++)
      q[i] = make_uint4(mul2(q[i].x, factor), mul2(q[i].y, factor), mul2(q[i].z, factor), mul2(q[i].w, factor));
  }
};

/* acc[16 rows, 8 tokens] += a · x over one chunk; lo and hi are the widened pieces of rows g and g+8. */
template <int kPiece>
__device__ __forceinline__ void multiply_chunk(float acc[4], const uint32_t lo[], const uint32_t hi[], const stream_x<kPiece> &x) {
#pragma unroll
  for (int i = 0; i < kPiece / 8; i++) {
    const uint32_t even[4] = {lo[4 * i], hi[4 * i], lo[4 * i + 1], hi[4 * i + 1]};
    const uint32_t odd[4] = {lo[4 * i + 2], hi[4 * i + 2], lo[4 * i + 3], hi[4 * i + 3]};
    mma(acc, even, x.q[i].x, x.q[i].y);
    mma(acc, odd, x.q[i].z, x.q[i].w);
  }
}

template <mm_cu_code C, mm_cu_scale S, int kHalves, class Job>
__device__ __forceinline__ void stream_rows(const mm_cu_weight &w, const Job &job) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<stream_shared<kHalves> *>(shared_raw);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kPiece = codec<C>::kPiece;
  /* E4M3 codes enter the product 2^-120 small, the activations 2^60 large. */
  constexpr bool kShrunk = C == MM_CU_E4M3 && S == MM_CU_COARSE;

  stream_loader<C, S, Job> loader(w, job, sh);
  for (int i = 0; i < kStages; i++) loader.next();
  if (Job::kEarly) grid_wait();

  uint32_t stage = 0;
  for (uint32_t tile = 0; tile < job.tiles(); tile++) {
    float acc[kHalves][4] = {};
    const bool upper = Job::kSplit || job.valid(tile) > 8;
    for (uint32_t segment = 0; segment < job.segments(); segment++) {
      const bf16 *x[kHalves];
      uint32_t width[kHalves];
#pragma unroll
      for (int n = 0; n < kHalves; n++) x[n] = job.x(segment, g + 8 * n), width[n] = x[n] ? w.k : 0;
      const float *fine[2];
      if (S == MM_CU_FINE) {
        for (int h = 0; h < 2; h++) {
          const weight_row at = job.row(tile, segment, g + 8 * h);
          fine[h] = static_cast<const float *>(w.scale) +
                    ((size_t)at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
        }
      }
      for (uint32_t chunk = warp; chunk * 64 < w.pitch; chunk += kStreamWarps) {
        const uint32_t k0 = (chunk * 4 + t) * kPiece;
        stream_x<kPiece> xs[kHalves];
#pragma unroll
        for (int n = 0; n < kHalves; n++) xs[n].load(x[n], k0, width[n]);
        copy_wait<kStages - 1>();
        const uint4 q[2] = {sh.codes[warp][stage][0][lane], sh.codes[warp][stage][1][lane]};
        const uint32_t *scale = sh.scale[warp][stage];
        piece_scale<C, S> ps[2];
        float f[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (S == MM_CU_COARSE) f[h] = __uint_as_float(scale[g + 8 * h]);
          if (S == MM_CU_NV) ps[h].bits = reinterpret_cast<const uint16_t *>(scale)[(g + 8 * h) * 4 + t];
          if (S == MM_CU_MX) ps[h].bits = reinterpret_cast<const uint8_t *>(scale)[(g + 8 * h) * 4 + t];
          if (S == MM_CU_FINE) ps[h].load(w, fine[h], k0);
        }
        loader.next();
        stage = stage + 1 == kStages ? 0 : stage + 1;

        uint32_t v[2][kPiece / 2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (h == 1 && !upper) break;
          if constexpr (kShrunk) {
            codec<C>::shrunk(v[h], q[h]);
          } else {
            codec<C>::widen(v[h], q[h]);
            ps[h].apply(v[h]);
          }
        }
#pragma unroll
        for (int n = 0; n < kHalves; n++) {
          if (kShrunk) xs[n].multiply(0x5d805d80u /* 2^60 */);
          if (S == MM_CU_COARSE) {
            float part[4] = {0, 0, 0, 0};
            multiply_chunk<kPiece>(part, v[0], v[1], xs[n]);
            acc[n][0] += part[0] * f[0], acc[n][1] += part[1] * f[0], acc[n][2] += part[2] * f[1], acc[n][3] += part[3] * f[1];
          } else {
            multiply_chunk<kPiece>(acc[n], v[0], v[1], xs[n]);
          }
        }
      }
    }
    float *sum = sh.sum[tile % 2][0];
    constexpr int kWarpSums = kHalves * 8 * kSumPitch;
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        sum[warp * kWarpSums + (n * 8 + 2 * t + i % 2) * kSumPitch + g + i / 2 * 8] = acc[n][i] * (kShrunk ? 0x1p60f : 1.0f);
    }
    __syncthreads();
    const uint32_t token = threadIdx.x / 16, i = threadIdx.x % 16;
    if (token / 2 * 2 < job.tokens()) {
      float total = 0;
#pragma unroll
      for (int from = 0; from < kStreamWarps; from++) total += sum[from * kWarpSums + token * kSumPitch + i];
      job.emit(tile, token, i, total);
    }
  }
}

#endif
