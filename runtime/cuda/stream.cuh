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

/* A warp's chunk in shared memory: the codes of rows 0-7 and 8-15 by lane, and the scales that travel with them (COARSE and MX one word
 * per row, NV two). */
struct stream_stage {
  uint4 codes[2][32];
  uint32_t scale[32];
};

/* kHalves: 1 for up to 8 tokens, 2 for up to 16. */
template <int kHalves>
struct stream_shared {
  stream_stage ring[kStreamWarps][kStages];
  float sum[2][kStreamWarps][kHalves * 8 * kSumPitch];
};

/* Shared memory by its 32-bit address: the ring's places are one sum away from a single cursor. */
__device__ __forceinline__ void fetch16(uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void fetch4(uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ uint4 ring16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ring4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ring2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ring1(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

/* The part [first, end) of `count` that is this block's. */
struct share {
  uint32_t first, end;
  __device__ explicit share(uint32_t count)
      : first((uint32_t)((uint64_t)count * blockIdx.x / gridDim.x)), end((uint32_t)((uint64_t)count * (blockIdx.x + 1) / gridDim.x)) {}
};

template <mm_cu_code C, mm_cu_scale S, class Job>
struct stream_loader {
  static constexpr bool kScales = S == MM_CU_COARSE || S == MM_CU_NV || S == MM_CU_MX;
  static constexpr int kWords = S == MM_CU_NV ? 2 : 1;
  const mm_cu_weight &w;
  const Job &job;
  const uint32_t pitch, warp, lane;
  const uint32_t scale_row;   /* of the tile; the lane fetches one of its words if below 16 */
  uint32_t tile, segment, at; /* bytes into the row */
  const uint8_t *row[2], *scale;
  uint32_t bytes[2]; /* of each row from the lane's first on; 0 if it does not exist */

  __device__ stream_loader(const mm_cu_weight &weight, const Job &j)
      : w(weight),
        job(j),
        pitch((uint32_t)weight.pitch),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        scale_row(lane / 4 + 8 * (lane % 4 / kWords)),
        tile(0),
        segment(0) {
    locate();
  }
  __device__ __forceinline__ void locate() {
    at = warp * 64;
    if (tile >= job.tiles()) return;
    const uint32_t g = lane / 4, t = lane % 4, valid = job.valid(tile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const weight_row r = job.row(tile, segment, g + 8 * h);
      row[h] = w.data + ((size_t)r.matrix * w.n + r.row) * pitch + 16 * t;
      bytes[h] = (Job::kSplit ? g : g + 8 * h) < valid ? pitch - 16 * t : 0;
      if (kScales && h == (int)(t / kWords)) {
        const size_t first = ((size_t)r.matrix * w.scale_rows + (r.row >> w.cell_n_log2)) * w.scale_pitch;
        scale = static_cast<const uint8_t *>(w.scale) + first * (S == MM_CU_COARSE ? 4 : 1) + t % kWords * 4;
      }
    }
  }
  /* Fetches the warp's next chunk into a stage, or nothing at the end. */
  __device__ __forceinline__ void next(uint32_t stage) {
    if (tile < job.tiles()) {
#pragma unroll
      for (int h = 0; h < 2; h++) fetch16(stage + lane * 16 + h * 512, row[h] + at, (int)at < (int)bytes[h]);
      if (kScales && scale_row < 16) {
        const uint32_t from = S == MM_CU_COARSE ? (at * (codec<C>::kPiece / 4) / 4 >> w.cell_k_log2) * 4 : at / 16 * kWords;
        const bool exists = S == MM_CU_COARSE || from + lane % kWords * 4 < w.scale_pitch;
        fetch4(stage + 1024 + (scale_row * kWords + lane % kWords) * 4, scale + from, exists);
      }
      at += kStreamWarps * 64;
      if (at >= pitch) {
        if (++segment == job.segments()) segment = 0, tile++;
        locate();
      }
    }
    copy_commit();
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
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pitch = (uint32_t)w.pitch;
  constexpr int kPiece = codec<C>::kPiece, kBytes = sizeof(stream_stage);
  /* E4M3 codes enter the product 2^-120 small, the activations 2^60 large. */
  constexpr bool kShrunk = C == MM_CU_E4M3 && S == MM_CU_COARSE;

  const uint32_t ring = (uint32_t)__cvta_generic_to_shared(&sh.ring[warp]), ring_end = ring + kStages * kBytes;
  stream_loader<C, S, Job> loader(w, job);
  for (uint32_t stage = ring; stage < ring_end; stage += kBytes) loader.next(stage);
  if (Job::kEarly) grid_wait();

  uint32_t stage = ring;
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
          const weight_row r = job.row(tile, segment, g + 8 * h);
          fine[h] = static_cast<const float *>(w.scale) + ((size_t)r.matrix * w.scale_rows + (r.row >> w.cell_n_log2)) * w.scale_pitch;
        }
      }
      for (uint32_t at = warp * 64; at < pitch; at += kStreamWarps * 64) {
        const uint32_t k0 = at / 16 * kPiece + t * kPiece;
        stream_x<kPiece> xs[kHalves];
#pragma unroll
        for (int n = 0; n < kHalves; n++) xs[n].load(x[n], k0, width[n]);
        copy_wait<kStages - 1>();
        const uint4 q[2] = {ring16(stage + lane * 16), ring16(stage + lane * 16 + 512)};
        piece_scale<C, S> ps[2];
        float f[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint32_t scale = stage + 1024 + h * 32 * (S == MM_CU_NV ? 2 : 1);
          if (S == MM_CU_COARSE) f[h] = __uint_as_float(ring4(scale + g * 4));
          if (S == MM_CU_NV) ps[h].bits = ring2(scale + lane * 2);
          if (S == MM_CU_MX) ps[h].bits = ring1(scale + lane);
          if (S == MM_CU_FINE) ps[h].load(w, fine[h], k0);
        }
        loader.next(stage);
        stage = stage + kBytes == ring_end ? ring : stage + kBytes;

        uint32_t v[2][kPiece / 2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (h == 1 && !upper) { /* rows that do not exist: any bits will do */
#pragma unroll
            for (int i = 0; i < kPiece / 2; i++) asm("" : "=r"(v[1][i]));
          } else if constexpr (kShrunk) {
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
    constexpr int kWarpSums = kHalves * 8 * kSumPitch;
    float *sum = sh.sum[tile % 2][0];
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
