/* Lightning attention over prefill chunks on sm_90a, heads of 128: one pass as in lightning_prefill.cu, on warpgroup products.
 *
 * A 2-CTA cluster owns a head of a span, each block 64 of the value columns. Both need all of q and k after SiLU, so each converts half
 * of the rows, and TMA copies them to the other block too. Four groups of 128 threads work at once on tiles of C = 64 tokens
 * (lambda = e^{-slope}; m valid rows; Sᵀ is [value][key]):
 *   two convert: raw rows in registers a tile ahead; SiLU, and stored: q, k, v and lambda^(m-1-j) v
 *   state:   publishes Sᵀ in bf16, then Sᵀ ← lambda^m Sᵀ + (lambda^(m-1-j) V)ᵀ K, fp32 in registers
 *   output:  P = (Q Kᵀ) ⊙ lambda^(i-j), j ≤ i;  O = lambda^(i+1) Q S + P V
 * Tiles start at multiples of 64 from the span's first row, so a prompt cut at such a row gives the same bits. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/lightning/lightning.h"

namespace {

constexpr int kThreads = 512, C = 64, kStages = 3, kBlock = C * 128 /* bytes of 64 rows of 64 columns */;

struct tile_shared {
  uint8_t q[2][kBlock], k[2][kBlock], v[kBlock], v_decayed[kBlock];
};
struct pair_shared {
  tile_shared tile[kStages];
  uint8_t s[2][kBlock]; /* Sᵀ, keys in halves */
  uint64_t tile_full[kStages], tile_empty[kStages], s_full, s_empty;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int D = 128, V = 64, kConverters = 256;

struct span_job {
  const bf16 *in; /* row 0: q, k, v of the head */
  bf16 *out;      /* row 0 of this block's columns */
  float *state;   /* [key][D], this block's columns */
  float rate;     /* log2 lambda */
  uint32_t stride, o_stride, count, tiles, rank;
  bool fresh;
};

/* Sixteen bytes that nobody reads again. */
__device__ __forceinline__ uint4 load_once(const bf16 *from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

/* Halves of eight bf16. */
__device__ __forceinline__ void halve(uint4 &q) {
  const uint32_t half = 0x3f003f00;
  asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(q.x) : "r"(half));
  asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(q.y) : "r"(half));
  asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(q.z) : "r"(half));
  asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(q.w) : "r"(half));
}

/* x·sigmoid(x) of eight, from their halves h: h + h·tanh(h). One call of the special function unit, off by 2^-12 of x at most. */
__device__ __forceinline__ void silu8(float (&v)[8], uint4 halves) {
  widen8(v, halves);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(v[i]));
    v[i] = fmaf(v[i], t, v[i]);
  }
}

/* A thread's raw pieces of a tile: 0 and 1 of q, 2 and 3 of k, rows [32·rank, 32·rank + 32); 4 and 5 of v, this block's columns. */
struct raw_pieces {
  uint4 piece[6];
};

/* A warp's part of the tile in a stage: rows [first, first + 4) of q and k also go to the other block, `other` bytes from this one. */
__device__ __forceinline__ void publish_rows(pair_shared &sh, uint32_t stage, uint32_t first, uint32_t other, bool first_warp) {
  stores_before_wgmma();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const uint32_t full = shared_address(&sh.tile_full[stage]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t from = shared_address(i < 2 ? sh.tile[stage].q[i] : sh.tile[stage].k[i - 2]) + first * 128;
      tma_copy_to_peer(from + other, from, 4 * 128, full + other);
    }
    if (first_warp) {
      mbarrier_arrive_expect_tx(full, 2 * 32 * D * sizeof(bf16)); /* the other block's half of q and k */
    } else {
      mbarrier_arrive(full);
    }
  }
  __syncwarp();
}

/* Each warp takes four rows of q and k and eight of v. A tile's stores are made known, and copied to the other block, while the next
 * tile is converted: fences wait for all loads and stores before them. */
__device__ __forceinline__ void convert(const span_job &j, pair_shared &sh, uint32_t thread) {
  const uint32_t warp = thread / 32, lane = thread % 32, first = j.rank * 32 + warp * 4;              /* of q and k */
  const uint32_t row = first + lane / 16, c = lane % 16, v_row = warp * 8 + lane / 8, v_c = lane % 8; /* and row + 2, v_row + 4 */
  const bf16 *qk = j.in + (size_t)row * j.stride + c * 8, *v = j.in + (size_t)v_row * j.stride + 2 * D + j.rank * V + v_c * 8;
  const size_t step = (size_t)C * j.stride;
  const uint32_t other = block_address(shared_address(&sh), j.rank ^ 1) - shared_address(&sh);
  const uint32_t at[2] = {c / 8 * kBlock + swizzled(row, c % 8), c / 8 * kBlock + swizzled(row + 2, c % 8)},
                 v_at[2] = {swizzled(v_row, v_c), swizzled(v_row + 4, v_c)};
  uint32_t fetched = 0, stage = 0, parity = 1; /* fetched: rows */
  auto fetch = [&](raw_pieces &to, bool now) {
#pragma unroll
    for (int i = 0; i < 6; i++) {
      const bf16 *from = i < 4 ? qk + i % 2 * 2 * j.stride + i / 2 * D : v + i % 2 * 4 * j.stride;
      to.piece[i] = make_uint4(0, 0, 0, 0);
      if (now && fetched + (i < 4 ? row + i % 2 * 2 : v_row + i % 2 * 4) < j.count) to.piece[i] = load_once(from);
    }
    fetched += C, qk += step, v += step;
  };
  auto work = [&](raw_pieces &raw, raw_pieces &next, uint32_t t) {
    const float last = (float)min(j.count - t * C, (uint32_t)C) - 1.0f;
    tile_shared &tile = sh.tile[stage];
    uint32_t all =
        0xffffffff; /* no half of a bf16 is 0xffff, but the next loads have to wait for these: the hardware would wait for both */
#pragma unroll
    for (int i = 0; i < 6; i++) halve(raw.piece[i]), all &= raw.piece[i].x;
    fetch(next, all != 0xffffffff);
    uint4 done[6], decayed[2];
#pragma unroll
    for (int i = 0; i < 6; i++) {
      float x[8];
      silu8(x, raw.piece[i]);
      done[i] = narrow8(x);
      if (i < 4) continue;
      /* Rows at or past the end hold zeros; the cap only keeps the factor finite. */
      const float f = exp2f(j.rate * fmaxf(last - (float)(v_row + i % 2 * 4), 0.0f));
#pragma unroll
      for (int n = 0; n < 8; n++) x[n] *= f;
      decayed[i % 2] = narrow8(x);
    }
    if (t > 0) publish_rows(sh, stage == 0 ? kStages - 1 : stage - 1, first, other, warp == 0);
    mbarrier_wait(shared_address(&sh.tile_empty[stage]), parity);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      *reinterpret_cast<uint4 *>(tile.q[0] + at[i]) = done[i];
      *reinterpret_cast<uint4 *>(tile.k[0] + at[i]) = done[2 + i];
      *reinterpret_cast<uint4 *>(tile.v + v_at[i]) = done[4 + i];
      *reinterpret_cast<uint4 *>(tile.v_decayed + v_at[i]) = decayed[i];
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  };
  raw_pieces a, b; /* of one tile at hand and of the next on its way */
  fetch(a, true);
  for (uint32_t t = 0; t < j.tiles; t += 2) {
    work(a, b, t);
    if (t + 1 < j.tiles) work(b, a, t + 1);
  }
  publish_rows(sh, stage == 0 ? kStages - 1 : stage - 1, first, other, warp == 0);
}

/* A warp is done with a tile: both blocks' converters may overwrite it. */
__device__ __forceinline__ void release_tile(const span_job &j, pair_shared &sh, uint32_t stage) {
  if (threadIdx.x % 32 != 0) return;
  mbarrier_arrive(shared_address(&sh.tile_empty[stage]));
  mbarrier_arrive_cluster(block_address(shared_address(&sh.tile_empty[stage]), j.rank ^ 1));
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
    if (t >= 1) mbarrier_wait(shared_address(&sh.s_empty), (t - 1) % 2);
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      const uint32_t to = shared_address(sh.s[n / 8]) + swizzled(thread / 32 * 16 + lane % 16, n % 8 + lane / 16);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pack2(s[4 * n], s[4 * n + 1])),
                   "r"(pack2(s[4 * n + 2], s[4 * n + 3])), "r"(pack2(s[4 * n + 4], s[4 * n + 5])), "r"(pack2(s[4 * n + 6], s[4 * n + 7]))
                   : "memory");
    }
    stores_before_wgmma();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.s_full));
    const float shrink = exp2f(j.rate * (float)min(j.count - t * C, (uint32_t)C));
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] *= shrink;
    mbarrier_wait(shared_address(&sh.tile_full[stage]), t / kStages % 2);
    const uint64_t v = operand(shared_address(sh.tile[stage].v_decayed)), k = operand(shared_address(sh.tile[stage].k), kBlock);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < C / 16; i++) wgmma128_turned(s, operand_after(v, i * 2048), operand_after(k, i * 2048));
    wgmma_commit();
    wgmma_wait<0>(s);
    release_tile(j, sh, stage);
  }
#pragma unroll
  for (int i = 0; i < 64; i++) j.state[(size_t)(i / 4 * 8 + 2 * t4 + i % 2) * D + value + i % 4 / 2 * 8] = s[i];
}

/* Writes the results of a tile: the thread's rows `row` and row + 8, columns as o of wgmma64 lies. */
__device__ __forceinline__ void store_out(const span_job &j, const float (&o)[32], uint32_t first, uint32_t row) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t at = first + row + half * 8;
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = pack2(o[(n + i) * 4 + 2 * half], o[(n + i) * 4 + 2 * half + 1]);
      turn_words(w);
      bf16 *const to = j.out + (size_t)at * j.o_stride + (n + threadIdx.x % 4) * 8;
      if (at < j.count) __stcs(reinterpret_cast<uint4 *>(to), make_uint4(w[0], w[1], w[2], w[3]));
    }
  }
}

__device__ __forceinline__ void put_out(const span_job &j, pair_shared &sh, uint32_t thread) {
  const uint32_t warp = thread / 32, lane = thread % 32, g = lane / 4, t4 = lane % 4, row = warp * 16 + g; /* and row + 8 */
  float decay[32]; /* lambda^(i-j) where j ≤ i, else 0, as p lies */
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const uint32_t column = i / 4 * 8 + 2 * t4 + i % 2;
    decay[i] = column <= row + i % 4 / 2 * 8 ? exp2f(j.rate * (float)(row + i % 4 / 2 * 8 - column)) : 0.0f;
  }
  const float carried[2] = {exp2f(j.rate * (float)(row + 1)), exp2f(j.rate * (float)(row + 9))};
  float p[32], o[32];
  auto scores =
      [&](uint32_t t) { /* Q Kᵀ, on its way */
                        const uint32_t stage = t % kStages;
                        const uint64_t q = operand(shared_address(sh.tile[stage].q)), k = operand(shared_address(sh.tile[stage].k));
                        mbarrier_wait(shared_address(&sh.tile_full[stage]), t / kStages % 2);
                        wgmma_begin();
#pragma unroll
                        for (int i = 0; i < D / 16; i++)
                          wgmma64(p, operand_after(q, i / 4 * kBlock + i % 4 * 32), operand_after(k, i / 4 * kBlock + i % 4 * 32), i);
                        wgmma_commit();
      };
  scores(0);
  wgmma_wait<0>(p);
  for (uint32_t t = 0; t < j.tiles; t++) {
    const uint32_t stage = t % kStages;
    const uint64_t q = operand(shared_address(sh.tile[stage].q)), v = operand(shared_address(sh.tile[stage].v)),
                   s = operand(shared_address(sh.s));
    mbarrier_wait(shared_address(&sh.s_full), t % 2);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < D / 16; i++)
      wgmma64(o, operand_after(q, i / 4 * kBlock + i % 4 * 32), operand_after(s, i / 4 * kBlock + i % 4 * 32), i);
    wgmma_commit();
    uint32_t pa[C / 16][4];
#pragma unroll
    for (int i = 0; i < 16; i++) pa[i / 4][i % 4] = pack2(p[2 * i] * decay[2 * i], p[2 * i + 1] * decay[2 * i + 1]);
    wgmma_wait<0>(o);
    if (lane == 0) mbarrier_arrive(shared_address(&sh.s_empty));
#pragma unroll
    for (int i = 0; i < 32; i++) o[i] *= carried[i % 4 / 2];
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < C / 16; i++) wgmma64_turned(o, pa[i], operand_after(v, i * 2048));
    wgmma_commit();
    scores(min(t + 1, j.tiles - 1)); /* while this tile's results are stored; the last one's again, unused: a branch would serialise */
    wgmma_wait<1>(o);
    release_tile(j, sh, stage);
    store_out(j, o, t * C, row);
    wgmma_wait<0>(p);
  }
}

#endif

__global__ void MM_PAIR __launch_bounds__(kThreads, 1) lightning_pair(const __grid_constant__ mm_cu_lightning a, const mm_cu_span *spans) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<pair_shared *>(shared_raw);
  grid_wait_and_launch_next();
  const mm_cu_span span = spans[blockIdx.y];
  if (span.slot < 0) return; /* both blocks of the pair */
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++)
      mbarrier_init(shared_address(&sh.tile_full[i]), kConverters / 32), mbarrier_init(shared_address(&sh.tile_empty[i]), 16); /* warps */
    mbarrier_init(shared_address(&sh.s_full), 4), mbarrier_init(shared_address(&sh.s_empty), 4);
  }
  cluster_sync();
  const uint32_t head = blockIdx.x / 2, rank = blockIdx.x % 2, thread = threadIdx.x % 128;
  span_job j;
  j.stride = a.heads * 3 * D, j.o_stride = a.heads * D, j.count = span.count, j.tiles = (span.count + C - 1) / C, j.rank = rank;
  j.in = a.qkv + (size_t)span.first * j.stride + head * 3 * D;
  j.out = a.o + (size_t)span.first * j.o_stride + head * D + rank * V;
  j.state = a.state + span.slot * a.state_stride + (size_t)head * D * D + rank * V;
  j.rate = -a.slope[head] * 1.4426950408889634f, j.fresh = span.pos == 0;
  switch (__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)) { /* the same for a warp, as the compiler has to see */
    case 0: put_out(j, sh, thread); break;
    case 1: carry_state(j, sh, thread); break;
    default: convert(j, sh, threadIdx.x - 256);
  }
  __syncwarp();
  cluster_sync(); /* the other block may still write here */
#else
  no_such_code();
#endif
}

}  // namespace

cudaError_t mm_cu_lightning_hopper(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s) {
  return launch(lightning_pair, dim3(a.heads * 2, spans), kThreads, sizeof(pair_shared), s, a, span);
}
