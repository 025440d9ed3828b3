/* The core of every decode product: at most 16 activation rows against weight rows streamed once from memory.
 *
 * A block takes its rows in groups of up to four tiles; a tile is 16 weight rows, the M side of mma.m16n8k16, and tokens are its N side.
 * The warps share a group along k: a warp's step is 64 bytes of every row of the group, lane (g, t) fetching bytes 16t … 16t+15 of rows
 * g and g+8 of each tile through the warp's own ring in shared memory (cp.async; no barrier, each lane reads back its own codes), and
 * the ring runs on across groups. What a lane fetched is its fragment: which k an mma slot means is free as long as both sides agree.
 * Activations are read once per step and held in registers for all tiles. The warps' sums meet in shared memory in a fixed order, which
 * depends neither on the other tokens nor on where a row lies, so a token's result has the same bits in every batch.
 *
 * A job says what the rows are:
 *   kPerTile                  16, or 8: then a tile's rows 8-15 belong to rows 0-7 and lie `apart` rows behind them
 *   first(), end()            the block's rows; group(first) is the next group of them, never across matrices
 *   segments()                a row's k axis is so many stretches of w.k
 *   matrix(group, segment)    in which the group's rows lie for that stretch
 *   x(segment, token)         the activations of that stretch, NULL for zeros
 *   emit(row, token, sum)     sum(i) is the product of row i of the group's tiles */
#ifndef MM_CUDA_STREAM_CUH
#define MM_CUDA_STREAM_CUH

#include "runtime/cuda/weight.cuh"

/* Twelve divides the steps of a row in all real shapes; six stages are 72 KB in flight, and two blocks fit a multiprocessor, so that the
 * next kernel's weights arrive while this one ends. */
constexpr int kStreamWarps = 12, kStreamThreads = kStreamWarps * 32, kStages = 6, kStep = kStreamWarps * 64;
constexpr int kTiles = 4, kSumPitch = kTiles * 16 + 4; /* floats from token to token: no bank conflicts */

/* Rows [row, row + count) of a matrix, count ≤ kTiles · kPerTile. */
struct row_group {
  uint32_t row, count;
};

/* A warp's share of one tile in shared memory: the codes of rows 0-7 and 8-15 by lane, and the scales that travel with them (COARSE and
 * MX one word per row, NV two). */
struct stream_stage {
  uint4 codes[2][32];
  uint32_t scale[32];
};

/* kHalves: 1 for up to 8 tokens, 2 for up to 16. */
template <int kHalves>
struct stream_shared {
  stream_stage ring[kStreamWarps][kStages];
  float sum[kStreamWarps][kHalves * 8 * kSumPitch];
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

/* Place of a warp along k: a stretch, and bytes into the row. */
struct stream_place {
  uint32_t segment, at;
  /* To the warp's next step; false, and back to the first, at the end. */
  __device__ __forceinline__ bool next(uint32_t pitch, uint32_t segments) {
    at += kStep;
    if (at < pitch) return true;
    at = threadIdx.x / 32 * 64;
    if (++segment < segments) return true;
    segment = 0;
    return false;
  }
};

template <mm_cu_code C, mm_cu_scale S, class Job>
struct stream_loader {
  static constexpr bool kScales = S == MM_CU_COARSE || S == MM_CU_NV || S == MM_CU_MX;
  static constexpr int kWords = S == MM_CU_NV ? 2 : 1;
  const mm_cu_weight &w;
  const Job &job;
  const uint32_t pitch, g, t;
  const uint32_t scale_of; /* row of the tile whose scale the lane fetches; beyond 15: none */
  const size_t apart;      /* bytes from a row of a tile's first half to its fellow in the second */
  uint32_t first, tile, tiles;
  row_group group;
  stream_place place;
  const uint8_t *from; /* of the lane's first row of the tile */

  __device__ stream_loader(const mm_cu_weight &weight, const Job &j)
      : w(weight),
        job(j),
        pitch((uint32_t)weight.pitch),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4),
        scale_of(g + 8 * (t / kWords)),
        apart((size_t)j.apart() * weight.pitch),
        first(j.first()),
        tile(0) {
    place = {0, threadIdx.x / 32 * 64};
    if (place.at >= pitch) first = job.end(); /* rows too short for this warp */
    if (first < job.end()) open_group();
  }
  __device__ __forceinline__ void open_group() {
    group = job.group(first);
    tiles = (group.count + Job::kPerTile - 1) / Job::kPerTile;
    locate();
  }
  __device__ __forceinline__ void locate() {
    from = w.data + ((size_t)job.matrix(first, place.segment) * w.n + group.row + g) * pitch + place.at + 16 * t;
  }
  __device__ __forceinline__ void fetch_scale(uint32_t stage) const {
    const uint32_t row = min(tile * Job::kPerTile + scale_of % Job::kPerTile, group.count - 1) + scale_of / Job::kPerTile * job.apart();
    const size_t line = (size_t)job.matrix(first, place.segment) * w.scale_rows + ((group.row + row) >> w.cell_n_log2);
    const uint32_t word = t % kWords, to = stage + 1024 + (scale_of * kWords + word) * 4;
    if (S == MM_CU_COARSE) {
      const uint32_t cell = (place.at * (codec<C>::kPiece / 4) / 4) >> w.cell_k_log2;
      fetch4(to, static_cast<const float *>(w.scale) + line * w.scale_pitch + cell, true);
    } else {
      const uint32_t byte = place.at / 16 * kWords + word * 4;
      fetch4(to, static_cast<const uint8_t *>(w.scale) + line * w.scale_pitch + byte, byte < w.scale_pitch);
    }
  }
  /* Fetches the warp's part of the next tile into a stage, or nothing at the end. */
  __device__ __forceinline__ void next(uint32_t stage) {
    if (first < job.end()) {
      const bool inside = place.at + 16 * t < pitch;
      const uint32_t row = tile * Job::kPerTile + g;
      fetch16(stage + threadIdx.x % 32 * 16, from, inside && row < group.count);
      fetch16(stage + threadIdx.x % 32 * 16 + 512, from + apart, inside && row + (16 - Job::kPerTile == 0 ? 8 : 0) < group.count);
      if (kScales && scale_of < 16) fetch_scale(stage);
      from += (size_t)pitch * Job::kPerTile;
      if (++tile == tiles) {
        tile = 0;
        if (place.next(pitch, job.segments())) {
          locate();
        } else if ((first += group.count) < job.end()) {
          open_group();
        }
      }
    }
    copy_commit();
  }
};

/* The activations that go with a lane's pieces, as they lie in memory. */
template <int kPiece>
struct stream_x {
  uint32_t q[kPiece / 2];
  /* columns [k0, k0 + kPiece) of a row of `width`, zeros beyond */
  __device__ __forceinline__ void load(const bf16 *row, uint32_t k0, uint32_t width) {
#pragma unroll
    for (int i = 0; i < kPiece / 8; i++) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row && k0 + 8 * i < width) v = *reinterpret_cast<const uint4 *>(row + k0 + 8 * i);
      q[4 * i] = v.x, q[4 * i + 1] = v.y, q[4 * i + 2] = v.z, q[4 * i + 3] = v.w;
    }
  }
  /* To f16, times a power of two that brings the token's largest of this step to 2^14 … 2^15: exact but for numbers 2^-29 of that and
   * less. back: the inverse powers of tokens 2t and 2t+1, as the product's columns need them. */
  __device__ __forceinline__ void to_half(float back[2]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPiece / 2; i++) largest = max2(largest, q[i] & 0x7fff7fffu);
    largest = max(largest & 0xffffu, largest >> 16);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const uint32_t power = min(268 - (largest >> 7), 253u), factor = power << 23 | power << 7;
#pragma unroll
    for (int i = 0; i < kPiece / 2; i++) {
      const uint32_t v = mul2(q[i], factor);
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(q[i]) : "f"(high(v)), "f"(low(v)));
    }
    const float inverse = __uint_as_float((254 - power) << 23);
    back[0] = __shfl_sync(0xffffffffu, inverse, threadIdx.x % 4 * 8);
    back[1] = __shfl_sync(0xffffffffu, inverse, threadIdx.x % 4 * 8 + 4);
  }
};

/* acc[16 rows, 8 tokens] += a · x over one step of a tile; v: the widened pieces of rows g and g+8. */
template <bool kHalf, int kPiece>
__device__ __forceinline__ void multiply_tile(float acc[4], const uint32_t (&v)[2][kPiece / 2], const stream_x<kPiece> &x) {
#pragma unroll
  for (int i = 0; i < kPiece / 2; i += 2) {
    const uint32_t a[4] = {v[0][i], v[1][i], v[0][i + 1], v[1][i + 1]};
    if constexpr (kHalf) {
      mma_half(acc, a, x.q[i], x.q[i + 1]);
    } else {
      mma(acc, a, x.q[i], x.q[i + 1]);
    }
  }
}

/* Products of the lane's two pieces in a stage with the activations of the step. fine: FINE scales' rows. */
template <mm_cu_code C, mm_cu_scale S, int kHalves>
__device__ __forceinline__ void stream_tile(float (&acc)[kHalves][4], const mm_cu_weight &w, uint32_t stage, const uint4 (&q)[2],
                                            const uint32_t (&scale)[2], const float *const (&fine)[2], uint32_t k0,
                                            const stream_x<codec<C>::kPiece> (&x)[kHalves], const float (&back)[kHalves][2]) {
  constexpr int kPiece = codec<C>::kPiece;
  constexpr bool kHalf = C == MM_CU_E4M3 && S == MM_CU_COARSE;
  uint32_t v[2][kPiece / 2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if constexpr (kHalf) {
      codec<C>::widen_half(v[h], q[h]);
    } else {
      piece_scale<C, S> ps;
      ps.bits = scale[h];
      if (S == MM_CU_FINE) ps.load(w, fine[h], k0);
      codec<C>::widen(v[h], q[h]);
      ps.apply(v[h]);
    }
  }
#pragma unroll
  for (int n = 0; n < kHalves; n++) {
    if (S == MM_CU_COARSE) {
      float part[4] = {0, 0, 0, 0};
      multiply_tile<kHalf, kPiece>(part, v, x[n]);
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] += part[i] * (__uint_as_float(scale[i / 2]) * (kHalf ? back[n][i % 2] : 1.0f));
    } else {
      multiply_tile<kHalf, kPiece>(acc[n], v, x[n]);
    }
  }
}

/* The scales of rows g and g+8 of a stage. */
template <mm_cu_scale S>
__device__ __forceinline__ void ring_scales(uint32_t scale[2], uint32_t stage) {
  const uint32_t lane = threadIdx.x % 32, at = stage + 1024;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    scale[h] = 0;
    if (S == MM_CU_COARSE) scale[h] = ring4(at + lane / 4 * 4 + h * 32);
    if (S == MM_CU_NV) scale[h] = ring2(at + lane * 2 + h * 64);
    if (S == MM_CU_MX) scale[h] = ring1(at + lane + h * 32);
  }
}

template <mm_cu_code C, mm_cu_scale S, int kHalves, class Job>
__device__ __forceinline__ void stream_rows(const mm_cu_weight &w, const Job &job) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<stream_shared<kHalves> *>(shared_raw);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pitch = (uint32_t)w.pitch;
  constexpr int kPiece = codec<C>::kPiece, kBytes = sizeof(stream_stage);
  constexpr bool kHalf = C == MM_CU_E4M3 && S == MM_CU_COARSE;

  const uint32_t ring = (uint32_t)__cvta_generic_to_shared(&sh.ring[warp]), ring_end = ring + kStages * kBytes;
  stream_loader<C, S, Job> loader(w, job);
  for (uint32_t stage = ring; stage < ring_end; stage += kBytes) loader.next(stage);
  if (Job::kEarly) grid_wait();

  uint32_t stage = ring;
  stream_place place = {0, warp * 64};
  stream_x<kPiece> ahead[kHalves];
  auto load_x = [&] {
#pragma unroll
    for (int n = 0; n < kHalves; n++) ahead[n].load(job.x(place.segment, g + 8 * n), place.at / 16 * kPiece + t * kPiece, w.k);
  };
  load_x();
  for (uint32_t first = job.first(); first < job.end();) {
    const row_group group = job.group(first);
    float acc[kTiles][kHalves][4] = {};
    for (bool more = place.at < pitch; more;) {
      stream_x<kPiece> x[kHalves];
      float back[kHalves][2];
      const uint32_t k0 = place.at / 16 * kPiece + t * kPiece, segment = place.segment;
#pragma unroll
      for (int n = 0; n < kHalves; n++) {
        x[n] = ahead[n];
        if (kHalf) x[n].to_half(back[n]);
      }
      more = place.next(pitch, job.segments());
      load_x();
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        if (i * Job::kPerTile >= group.count) break;
        copy_wait<kStages - 1>();
        const uint4 q[2] = {ring16(stage + lane * 16), ring16(stage + lane * 16 + 512)};
        uint32_t scale[2];
        ring_scales<S>(scale, stage);
        loader.next(stage);
        stage = stage + kBytes == ring_end ? ring : stage + kBytes;
        const float *fine[2];
        if (S == MM_CU_FINE) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint32_t row =
                min(i * Job::kPerTile + (g + 8 * h) % Job::kPerTile, group.count - 1) + (g + 8 * h) / Job::kPerTile * job.apart();
            fine[h] = static_cast<const float *>(w.scale) +
                      ((size_t)job.matrix(first, segment) * w.scale_rows + ((group.row + row) >> w.cell_n_log2)) * w.scale_pitch;
          }
        }
        stream_tile<C, S, kHalves>(acc[i], w, stage, q, scale, fine, k0, x, back);
      }
    }
    __syncthreads(); /* the sums of the group before are read */
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int n = 0; n < kHalves; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sh.sum[warp][(n * 8 + 2 * t + j % 2) * kSumPitch + i * 16 + g + j / 2 * 8] = acc[i][n][j];
      }
    }
    __syncthreads();
    constexpr uint32_t kRows = kTiles * Job::kPerTile;
    for (uint32_t i = threadIdx.x; i < job.tokens() * kRows; i += kStreamThreads) {
      const uint32_t token = i / kRows, row = i % kRows;
      if (row >= group.count) continue;
      job.emit(first + row, token, [&](uint32_t half) {
        const uint32_t at = token * kSumPitch + row / Job::kPerTile * 16 + row % Job::kPerTile + half * 8;
        float sum = 0;
#pragma unroll
        for (int from = 0; from < kStreamWarps; from++) sum += sh.sum[from][at];
        return sum;
      });
    }
    first += group.count;
  }
}

#endif
