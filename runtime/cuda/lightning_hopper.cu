/* Lightning attention over stretches of tokens on sm_90a, heads of 128: one pass as in lightning_prefill.cu, on warpgroup products.
 *
 * A pair of blocks owns a head of a span, each block 64 of the value columns. Both need all of q and k after SiLU, so each converts half
 * of the rows and stores them into both blocks' shared memory. Four groups of 128 threads work at once on tiles of C = 64 tokens
 * (lambda = e^{-slope}; m valid rows; Sᵀ is [value][key]):
 *   two convert: raw rows to shared memory two tiles ahead; SiLU, and stored again: q, k, v and lambda^(m-1-j) v
 *   state:   publishes Sᵀ in bf16, then Sᵀ ← lambda^m Sᵀ + (lambda^(m-1-j) V)ᵀ K, fp32 in registers
 *   output:  P = (Q Kᵀ) ⊙ lambda^(i-j), j ≤ i;  O = lambda^(i+1) Q S + P V
 * Tiles start at multiples of 64 from the span's first row, so a prompt cut at such a row gives the same bits. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/hopper.cuh"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/lightning.h"

namespace {

constexpr int kThreads = 512, C = 64, V = 64, kStages = 3, kRaw = 2, kConverters = 256,
              kBlock = C * 128 /* bytes of 64 rows of 64 columns */;

struct tile_shared {
  uint8_t q[2][kBlock], k[2][kBlock], v[kBlock], v_decayed[kBlock];
};
struct pair_shared {
  tile_shared tile[kStages];
  uint8_t s[2][kBlock]; /* Sᵀ, keys in halves */
  bf16 o[C][V + 8];
  uint4 raw[kRaw][6][kConverters]; /* each thread's own pieces on their way */
  uint64_t tile_full[kStages], tile_empty[kStages], s_full, s_empty;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int D = 128;

struct span_job {
  const bf16 *in; /* row 0: q, k, v of the head */
  bf16 *out;      /* row 0 of this block's columns */
  float *state;   /* [key][D], this block's columns */
  float rate;     /* log2 lambda */
  uint32_t stride, o_stride, count, tiles, rank;
  bool fresh;
};

/* x·sigmoid(x) of eight. The special function unit and nothing else: __expf and __fdividef scale around subnormals that vanish here. */
__device__ __forceinline__ void silu8(float (&v)[8], uint4 q) {
  widen8(v, q);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v[i] * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    v[i] *= r;
  }
}

/* Pieces 0 and 1 are of q, 2 and 3 of k, rows [32·rank, 32·rank + 32); 4 and 5 of v, this block's columns. */
__device__ __forceinline__ void convert(const span_job &j, pair_shared &sh, uint32_t thread) {
  const uint32_t row = j.rank * 32 + thread / 16, c = thread % 16, v_row = thread / 8; /* and 16, 32 more */
  const bf16 *qk = j.in + (size_t)row * j.stride + c * 8, *v = j.in + (size_t)v_row * j.stride + 2 * D + j.rank * V + thread % 8 * 8;
  const size_t step = (size_t)C * j.stride;
  uint32_t fetched = 0; /* tiles */
  auto fetch = [&]() {
    const uint32_t first = fetched * C;
    uint4(*to)[kConverters] = sh.raw[fetched % kRaw];
#pragma unroll
    for (int i = 0; i < 6; i++) {
      const bf16 *from = i < 4 ? qk + i % 2 * 16 * j.stride + i / 2 * D : v + i % 2 * 32 * j.stride;
      const bool valid = first + (i < 4 ? row + i % 2 * 16 : v_row + i % 2 * 32) < j.count;
      copy16_or_zero(&to[i][thread], valid ? from : j.in, valid);
    }
    copy_commit();
    fetched++, qk += step, v += step;
  };
  const uint32_t other = block_address(shared_address(&sh), j.rank ^ 1) - shared_address(&sh);
  const uint32_t at = c / 8 * kBlock + swizzled(row, c % 8), v_at = swizzled(v_row, thread % 8);
  for (int i = 0; i < kRaw; i++) fetch();
  for (uint32_t t = 0; t < j.tiles; t++) {
    const uint32_t stage = t % kStages, full = shared_address(&sh.tile_full[stage]);
    const float last = (float)min(j.count - t * C, (uint32_t)C) - 1.0f;
    tile_shared &tile = sh.tile[stage];
    uint4 raw[6];
    copy_wait<kRaw - 1>();
#pragma unroll
    for (int i = 0; i < 6; i++) raw[i] = sh.raw[t % kRaw][i][thread];
    fetch(); /* to where these came from */
    if (t >= kStages) barrier_wait(shared_address(&sh.tile_empty[stage]), (t / kStages - 1) % 2);
#pragma unroll
    for (int i = 0; i < 6; i++) {
      float x[8];
      silu8(x, raw[i]);
      const uint4 packed = narrow8(x);
      if (i < 4) { /* 16 and 32 rows on the swizzle is the same */
        uint8_t *to = (i < 2 ? tile.q : tile.k)[0] + at + i % 2 * 16 * 128;
        *reinterpret_cast<uint4 *>(to) = packed;
        store_pair(shared_address(to) + other, packed, full + other);
      } else {
        *reinterpret_cast<uint4 *>(tile.v + v_at + i % 2 * 32 * 128) = packed;
        /* Rows at or past the end hold zeros; the cap only keeps the factor finite. */
        const float f = exp2f(j.rate * fmaxf(last - (float)(v_row + i % 2 * 32), 0.0f));
#pragma unroll
        for (int n = 0; n < 8; n++) x[n] *= f;
        *reinterpret_cast<uint4 *>(tile.v_decayed + v_at + i % 2 * 32 * 128) = narrow8(x);
      }
    }
    stores_before_wgmma();
    __syncwarp();
    if (thread == 0) {
      barrier_arrive_expecting(full, 2 * 32 * D * sizeof(bf16)); /* the other block's half of q and k */
    } else if (thread % 32 == 0) {
      barrier_arrive(full);
    }
  }
  copy_wait<0>();
}

/* A warp is done with a tile: both blocks' converters may overwrite it. */
__device__ __forceinline__ void release_tile(const span_job &j, pair_shared &sh, uint32_t stage) {
  if (threadIdx.x % 32 != 0) return;
  barrier_arrive(shared_address(&sh.tile_empty[stage]));
  barrier_arrive_pair(block_address(shared_address(&sh.tile_empty[stage]), j.rank ^ 1));
}

__device__ __forceinline__ void carry_state(const span_job &j, pair_shared &sh, uint32_t thread) {
  const uint32_t lane = thread % 32, g = lane / 4, t4 = lane % 4, value = thread / 32 * 16 + g; /* and value + 8 */
  float s[64];
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const uint32_t key = i / 4 * 8 + 2 * t4 + i % 2;
    s[i] = j.fresh ? 0.0f : j.state[(size_t)key * D + value + i % 4 / 2 * 8];
  }
  for (uint32_t t = 0; t < j.tiles; t++) {
    const uint32_t stage = t % kStages;
    if (t >= 1) barrier_wait(shared_address(&sh.s_empty), (t - 1) % 2);
#pragma unroll
    for (int n = 0; n < 16; n++) {
      uint8_t *to = sh.s[n / 8] + t4 * 4;
      *reinterpret_cast<uint32_t *>(to + swizzled(value, n % 8)) = pack2(s[4 * n], s[4 * n + 1]);
      *reinterpret_cast<uint32_t *>(to + swizzled(value + 8, n % 8)) = pack2(s[4 * n + 2], s[4 * n + 3]);
    }
    stores_before_wgmma();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&sh.s_full));
    const float shrink = exp2f(j.rate * (float)min(j.count - t * C, (uint32_t)C));
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] *= shrink;
    barrier_wait(shared_address(&sh.tile_full[stage]), t / kStages % 2);
    stores_before_wgmma();
    const uint32_t v = shared_address(sh.tile[stage].v_decayed), k = shared_address(sh.tile[stage].k);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < C / 16; i++) wgmma128_turned(s, operand(v + i * 2048), operand(k + i * 2048, kBlock));
    wgmma_commit();
    wgmma_wait<0>(s);
    release_tile(j, sh, stage);
  }
#pragma unroll
  for (int i = 0; i < 64; i++) j.state[(size_t)(i / 4 * 8 + 2 * t4 + i % 2) * D + value + i % 4 / 2 * 8] = s[i];
}

__device__ __forceinline__ void put_out(const span_job &j, pair_shared &sh, uint32_t thread) {
  const uint32_t warp = thread / 32, lane = thread % 32, g = lane / 4, t4 = lane % 4, row = warp * 16 + g; /* and row + 8 */
  float decay[32]; /* lambda^(i-j) where j ≤ i, else 0, as p lies */
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int behind = (int)(row + i % 4 / 2 * 8) - (int)(i / 4 * 8 + 2 * t4 + i % 2);
    decay[i] = behind >= 0 ? exp2f(j.rate * (float)behind) : 0.0f;
  }
  const float carried[2] = {exp2f(j.rate * (float)(row + 1)), exp2f(j.rate * (float)(row + 9))};
  float p[32], o[32];
  auto scores = [&](uint32_t t) { /* Q Kᵀ, on its way */
                                  const uint32_t stage = t % kStages, q = shared_address(sh.tile[stage].q),
                                                 k = shared_address(sh.tile[stage].k);
                                  barrier_wait(shared_address(&sh.tile_full[stage]), t / kStages % 2);
                                  stores_before_wgmma();
                                  wgmma_begin();
#pragma unroll
                                  for (int i = 0; i < D / 16; i++)
                                    wgmma64(p, operand(q + i / 4 * kBlock + i % 4 * 32), operand(k + i / 4 * kBlock + i % 4 * 32), i);
                                  wgmma_commit();
  };
  scores(0);
  wgmma_wait<0>(p);
  for (uint32_t t = 0; t < j.tiles; t++) {
    const uint32_t stage = t % kStages, q = shared_address(sh.tile[stage].q), v = shared_address(sh.tile[stage].v),
                   s = shared_address(sh.s);
    barrier_wait(shared_address(&sh.s_full), t % 2);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < D / 16; i++) wgmma64(o, operand(q + i / 4 * kBlock + i % 4 * 32), operand(s + i / 4 * kBlock + i % 4 * 32), i);
    wgmma_commit();
    uint32_t pa[C / 16][4];
#pragma unroll
    for (int i = 0; i < 16; i++) pa[i / 4][i % 4] = pack2(p[2 * i] * decay[2 * i], p[2 * i + 1] * decay[2 * i + 1]);
    wgmma_wait<0>(o);
    if (lane == 0) barrier_arrive(shared_address(&sh.s_empty));
#pragma unroll
    for (int i = 0; i < 32; i++) o[i] *= carried[i % 4 / 2];
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < C / 16; i++) wgmma64_turned(o, pa[i], operand(v + i * 2048));
    wgmma_commit();
    scores(min(t + 1, j.tiles - 1)); /* while this tile's results are stored; the last one's again, unused: a branch would serialise */
    wgmma_wait<1>(o);
    release_tile(j, sh, stage);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      *reinterpret_cast<uint32_t *>(&sh.o[row][n * 8 + 2 * t4]) = pack2(o[4 * n], o[4 * n + 1]);
      *reinterpret_cast<uint32_t *>(&sh.o[row + 8][n * 8 + 2 * t4]) = pack2(o[4 * n + 2], o[4 * n + 3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t r = warp * 16 + i * 4 + lane / 8, at = t * C + r, c = lane % 8 * 8;
      if (at < j.count) __stcs(reinterpret_cast<uint4 *>(j.out + (size_t)at * j.o_stride + c), *reinterpret_cast<uint4 *>(&sh.o[r][c]));
    }
    __syncwarp();
    wgmma_wait<0>(p);
  }
}

#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MM_PAIR __cluster_dims__(2, 1, 1)
#else
#define MM_PAIR
#endif

__global__ void MM_PAIR __launch_bounds__(kThreads, 1) lightning_pair(const __grid_constant__ mm_cu_lightning a, const mm_cu_span *spans) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<pair_shared *>(shared_raw);
  grid_wait();
  grid_launch_next();
  const mm_cu_span span = spans[blockIdx.y];
  if (span.slot < 0) return; /* both blocks of the pair */
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++)
      barrier_open(shared_address(&sh.tile_full[i]), kConverters / 32), barrier_open(shared_address(&sh.tile_empty[i]), 16); /* warps */
    barrier_open(shared_address(&sh.s_full), 4), barrier_open(shared_address(&sh.s_empty), 4);
  }
  pair_sync();
  const uint32_t head = blockIdx.x / 2, rank = blockIdx.x % 2, thread = threadIdx.x % 128;
  span_job j;
  j.stride = a.heads * 3 * D, j.o_stride = a.heads * D, j.count = span.count, j.tiles = (span.count + C - 1) / C, j.rank = rank;
  j.in = a.qkv + (size_t)span.first * j.stride + head * 3 * D;
  j.out = a.o + (size_t)span.first * j.o_stride + head * D + rank * V;
  j.state = a.state + ((size_t)span.slot * a.heads + head) * D * D + rank * V;
  j.rate = -a.slope[head] * 1.4426950408889634f, j.fresh = span.pos == 0;
  switch (__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)) { /* the same for a warp, as the compiler has to see */
    case 0: put_out(j, sh, thread); break;
    case 1: carry_state(j, sh, thread); break;
    default: convert(j, sh, threadIdx.x - 256);
  }
  __syncwarp();
  pair_sync(); /* the other block may still write here */
#endif
}

}  // namespace

cudaError_t mm_cu_lightning_hopper(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s) {
  return launch(lightning_pair, dim3(a.heads * 2, spans), kThreads, sizeof(pair_shared), s, a, span);
}
