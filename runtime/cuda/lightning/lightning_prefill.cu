/* Lightning attention over prefill chunks, one pass: q, k, v are read once and the state stays on the chip.
 *
 * A block owns 64 value columns of one head of one span and walks its tokens in tiles of C = 64 (lambda = e^{-slope}, rows of a tile
 * counted from 0, m of them valid):
 *   P   = (Q Kᵀ) ⊙ lambda^(i-j), j ≤ i
 *   O   = lambda^(i+1) Q S + P V
 *   S  ← lambda^m S + Kᵀ (lambda^(m-1-j) V)
 * S is fp32 in accumulators; the products take bf16 q, k, v, P and S. Two barriers a tile: one between what reads the tile (Q Kᵀ, Q S,
 * Kᵀ V) and what reads P, one when the next tile and the next S lie in shared memory. Tiles start at multiples of 64 from the span's
 * first row, so a prompt cut at such a row gives the same bits. The next tile's raw values travel in registers meanwhile. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/lightning/lightning.h"

namespace {

constexpr int kThreads = 256, C = 64, V = 64, kPad = 8;

/* kTiles: two, of which the next is stored while others read this one; or one, for less shared memory. */
template <int D, int kTiles>
struct tile_shared {
  bf16 q[kTiles][C][D + kPad], k[kTiles][C][D + kPad], v[kTiles][C][V + kPad], v_decayed[kTiles][C][V + kPad];
  bf16 s[D][V + kPad], p[C][C + kPad];
};

/* One tile's raw 16-byte pieces: q and k take D/32 each per thread, v two. */
template <int D>
struct raw_tile {
  uint4 q[D / 32], k[D / 32], v[2];
};

template <int D>
__device__ __forceinline__ void fetch(raw_tile<D> &raw, const bf16 *head, size_t stride, uint32_t column, uint32_t valid) {
  constexpr uint32_t per_row = D / 8;
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / per_row, c = at % per_row * 8;
    raw.q[i] = raw.k[i] = make_uint4(0, 0, 0, 0);
    if (row < valid) {
      raw.q[i] = *reinterpret_cast<const uint4 *>(head + row * stride + c);
      raw.k[i] = *reinterpret_cast<const uint4 *>(head + row * stride + D + c);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / 8, c = at % 8 * 8;
    raw.v[i] = row < valid ? *reinterpret_cast<const uint4 *>(head + row * stride + 2 * D + column + c) : make_uint4(0, 0, 0, 0);
  }
}

/* x·sigmoid(x) of eight, two to a reciprocal: 1/a = b·(1/ab). The exponent is capped so that the product stays finite. */
__device__ __forceinline__ void silu8(float v[8], uint4 q) {
  widen8(v, q);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float a = 1.0f + __expf(fminf(-v[i], 40.0f)), b = 1.0f + __expf(fminf(-v[i + 1], 40.0f)), r = __fdividef(1.0f, a * b);
    v[i] *= r * b, v[i + 1] *= r * a;
  }
}

template <int D, int kTiles>
__device__ __forceinline__ void store_tile(tile_shared<D, kTiles> &sh, int buffer, const raw_tile<D> &raw, float rate, uint32_t valid) {
  constexpr uint32_t per_row = D / 8;
  float x[8];
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / per_row, c = at % per_row * 8;
    silu8(x, raw.q[i]);
    *reinterpret_cast<uint4 *>(&sh.q[buffer][row][c]) = narrow8(x);
    silu8(x, raw.k[i]);
    *reinterpret_cast<uint4 *>(&sh.k[buffer][row][c]) = narrow8(x);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / 8, c = at % 8 * 8;
    silu8(x, raw.v[i]);
    *reinterpret_cast<uint4 *>(&sh.v[buffer][row][c]) = narrow8(x);
    const float f = row < valid ? exp2f(rate * (float)(valid - 1 - row)) : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] *= f;
    *reinterpret_cast<uint4 *>(&sh.v_decayed[buffer][row][c]) = narrow8(x);
  }
}

/* Address of this lane's row for ldmatrix.x4 over a 16 x 16 block at (row, column): quadrants down, then right. */
template <int W>
__device__ __forceinline__ const bf16 *quadrant(const bf16 (*m)[W], uint32_t row, uint32_t column) {
  const uint32_t lane = threadIdx.x % 32;
  return &m[row + lane % 16][column + lane / 16 * 8];
}
/* The same with quadrants right, then down. */
template <int W>
__device__ __forceinline__ const bf16 *quadrant_turned(const bf16 (*m)[W], uint32_t row, uint32_t column) {
  const uint32_t lane = threadIdx.x % 32;
  return &m[row + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * 8];
}

template <int D, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) lightning_span(const __grid_constant__ mm_cu_lightning a, const mm_cu_span *spans) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<tile_shared<D, kTiles> *>(shared_raw);
  constexpr int kStateTiles = D / 16; /* n-tiles of the state a warp owns: 8 of 64 columns for D = 128, 4 of 32 for 64 */
  const uint32_t head = blockIdx.x / (D / V), column = blockIdx.x % (D / V) * V;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row0 = warp % 4 * 16, col0 = warp / 4 * 32;                              /* of P and O */
  const uint32_t key0 = warp % (D / 16) * 16, val0 = warp / (D / 16) * (kStateTiles * 8); /* of S */
  grid_wait_and_launch_next();
  const mm_cu_span span = spans[blockIdx.y];
  if (span.slot < 0) return;
  const float rate = -a.slope[head] * 1.4426950408889634f; /* log2 lambda */
  const size_t stride = (size_t)a.heads * 3 * D, o_stride = (size_t)a.heads * D;
  const bf16 *in = a.qkv + span.first * stride + (size_t)head * 3 * D;
  bf16 *out = a.o + span.first * o_stride + (size_t)head * D + column;
  float *state = a.state + span.slot * a.state_stride + (size_t)head * D * D + column;

  float s[kStateTiles][4];
#pragma unroll
  for (int n = 0; n < kStateTiles; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 x = make_float2(0, 0);
      if (span.pos > 0) x = *reinterpret_cast<const float2 *>(state + (key0 + g + 8 * i) * D + val0 + n * 8 + 2 * t);
      s[n][2 * i] = x.x, s[n][2 * i + 1] = x.y;
    }
  }
  auto publish_state = [&]() {
#pragma unroll
    for (int n = 0; n < kStateTiles; n++) {
      *reinterpret_cast<uint32_t *>(&sh.s[key0 + g][val0 + n * 8 + 2 * t]) = pack2(s[n][0], s[n][1]);
      *reinterpret_cast<uint32_t *>(&sh.s[key0 + g + 8][val0 + n * 8 + 2 * t]) = pack2(s[n][2], s[n][3]);
    }
  };
  raw_tile<D> raw;
  fetch<D>(raw, in, stride, column, span.count);
  publish_state();
  store_tile<D, kTiles>(sh, 0, raw, rate, min(span.count, C));
  __syncthreads();

  int b = 0;
  for (uint32_t first = 0; first < span.count; first += C, b ^= kTiles - 1) {
    const uint32_t valid = min(span.count - first, (uint32_t)C), next = first + C;
    if (next < span.count) fetch<D>(raw, in + next * stride, stride, column, span.count - next);

    float p[4][4] = {}, o[4][4] = {};
    uint32_t qa[4], f[4];
#pragma unroll
    for (int k = 0; k < D; k += 16) {
      ldmatrix4(qa, quadrant(sh.q[b], row0, k));
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        if (col0 + n * 8 <= row0) {
          ldmatrix4(f, quadrant_turned(sh.k[b], col0 + n * 8, k));
          mma(p[n], qa, f[0], f[1]);
          mma(p[n + 1], qa, f[2], f[3]);
        }
        ldmatrix4_trans(f, quadrant(sh.s, k, col0 + n * 8));
        mma(o[n], qa, f[0], f[1]);
        mma(o[n + 1], qa, f[2], f[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = (int)(row0 + g + i / 2 * 8), c = (int)(col0 + n * 8 + 2 * t) + i % 2;
        p[n][i] = c <= row ? p[n][i] * exp2f(rate * (float)(row - c)) : 0.0f;
      }
      *reinterpret_cast<uint32_t *>(&sh.p[row0 + g][col0 + n * 8 + 2 * t]) = pack2(p[n][0], p[n][1]);
      *reinterpret_cast<uint32_t *>(&sh.p[row0 + g + 8][col0 + n * 8 + 2 * t]) = pack2(p[n][2], p[n][3]);
    }
    const float shrink = exp2f(rate * (float)valid);
#pragma unroll
    for (int n = 0; n < kStateTiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= shrink;
    }
#pragma unroll
    for (int k = 0; k < C; k += 16) {
      uint32_t ka[4];
      ldmatrix4_trans(ka, quadrant_turned(sh.k[b], k, key0));
#pragma unroll
      for (int n = 0; n < kStateTiles; n += 2) {
        ldmatrix4_trans(f, quadrant(sh.v_decayed[b], k, val0 + n * 8));
        mma(s[n], ka, f[0], f[1]);
        mma(s[n + 1], ka, f[2], f[3]);
      }
    }
    __syncthreads();

    const float up = exp2f(rate * (float)(row0 + g + 1)), down = exp2f(rate * (float)(row0 + g + 9));
#pragma unroll
    for (int n = 0; n < 4; n++) o[n][0] *= up, o[n][1] *= up, o[n][2] *= down, o[n][3] *= down;
#pragma unroll
    for (int k = 0; k < C; k += 16) {
      if (k > row0) break;
      ldmatrix4(qa, quadrant(sh.p, row0, k));
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        ldmatrix4_trans(f, quadrant(sh.v[b], k, col0 + n * 8));
        mma(o[n], qa, f[0], f[1]);
        mma(o[n + 1], qa, f[2], f[3]);
      }
    }
    bf16 *o_row = out + (first + row0 + g) * o_stride + col0 + 2 * t;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (row0 + g < valid) *reinterpret_cast<uint32_t *>(o_row + n * 8) = pack2(o[n][0], o[n][1]);
      if (row0 + g + 8 < valid) *reinterpret_cast<uint32_t *>(o_row + 8 * o_stride + n * 8) = pack2(o[n][2], o[n][3]);
    }
    if (kTiles == 1) __syncthreads(); /* all have read the values */
    if (next < span.count) {
      publish_state();
      store_tile<D, kTiles>(sh, b ^ (kTiles - 1), raw, rate, min(span.count - next, (uint32_t)C));
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < kStateTiles; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<float2 *>(state + (key0 + g + 8 * i) * D + val0 + n * 8 + 2 * t) = make_float2(s[n][2 * i], s[n][2 * i + 1]);
  }
}

static_assert(sizeof(tile_shared<128, 1>) <= MM_CU_SHARED_LEAST, "one tile fits everywhere");

template <int D>
cudaError_t run(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s) {
  const dim3 grid(a.heads * (D / V), spans);
  if (hopper() || sizeof(tile_shared<D, 2>) <= mm_cu_shared_most())
    return launch(lightning_span<D, 2>, grid, kThreads, sizeof(tile_shared<D, 2>), s, a, span);
  return launch(lightning_span<D, 1>, grid, kThreads, sizeof(tile_shared<D, 1>), s, a, span);
}

}  // namespace

cudaError_t mm_cu_lightning_prefill(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s) {
  if (a.head_dim == 128 && hopper()) return mm_cu_lightning_hopper(a, span, spans, s);
  if (a.head_dim == 128) return run<128>(a, span, spans, s);
  if (a.head_dim == 64) return run<64>(a, span, spans, s);
  return cudaErrorNotSupported;
}
