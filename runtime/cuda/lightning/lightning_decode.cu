/* Lightning attention, one token per sequence: S ← e^{-s}·S + k ⊗ v in place, o = qᵀ·S.
 *
 * A block owns 64 value columns of one head of one row: sixteen lanes cover 256 bytes of a state row, so a warp's load takes two
 * rows and the block's eight warps d rows in d/16 turns, all in flight together, and before the projection is waited for: the state is the
 * step before's. S is [d key][d value]. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr int kThreads = 256, kColumns = 64, kLanes = kColumns / 4, kRows = kThreads / kLanes;

/* A row's q and k into shared memory, all threads together, and four of its values. */
template <int D>
__device__ __forceinline__ float4 load_row(const bf16 *qkv, const bf16 *value, float (&q)[D], float (&k)[D]) {
  if (threadIdx.x < D) {
    q[threadIdx.x] = silu(__bfloat162float(qkv[threadIdx.x]));
    k[threadIdx.x] = silu(__bfloat162float(qkv[D + threadIdx.x]));
  }
  const uint2 vq = *reinterpret_cast<const uint2 *>(value);
  const float4 v = {silu(low(vq.x)), silu(high(vq.x)), silu(low(vq.y)), silu(high(vq.y))};
  __syncthreads();
  return v;
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    lightning_step(const __grid_constant__ mm_cu_lightning a, const __grid_constant__ mm_cu_rows r) {
  __shared__ float q[D], k[D], part[kThreads / 32][kColumns];
  const uint32_t head = blockIdx.x / (D / kColumns), c0 = blockIdx.x % (D / kColumns) * kColumns, row = blockIdx.y;
  const uint32_t c = threadIdx.x % kLanes * 4, a0 = threadIdx.x / kLanes;
  grid_launch_next_early();
  const int32_t slot = r.slot[row];
  bf16 *o = a.o + ((size_t)row * a.heads + head) * D + c0;
  if (slot < 0) {
    grid_wait();
    if (threadIdx.x < kColumns) o[threadIdx.x] = __float2bfloat16_rn(0.0f);
    return;
  }
  float4 *state = reinterpret_cast<float4 *>(a.state + slot * a.state_stride + ((size_t)head * D + a0) * D + c0 + c);
  float4 old[D / kRows];
  const bool fresh = r.pos[row] == 0;
#pragma unroll
  for (int i = 0; i < D / kRows; i++) old[i] = fresh ? make_float4(0, 0, 0, 0) : __ldcs(state + i * kRows * D / 4);
  const float decay = expf(-a.slope[head]);
  grid_wait();

  const bf16 *qkv = a.qkv + ((size_t)row * a.heads + head) * 3 * D;
  const float4 v = load_row<D>(qkv, qkv + 2 * D + c0 + c, q, k);

  float out[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < D / kRows; i++) {
    const float kk = k[a0 + i * kRows], qq = q[a0 + i * kRows];
    float4 n = old[i];
    n.x = decay * n.x + kk * v.x, n.y = decay * n.y + kk * v.y, n.z = decay * n.z + kk * v.z, n.w = decay * n.w + kk * v.w;
    __stcs(state + i * kRows * D / 4, n);
    out[0] += qq * n.x, out[1] += qq * n.y, out[2] += qq * n.z, out[3] += qq * n.w;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int n = kLanes; n < 32; n *= 2) out[j] += __shfl_xor_sync(0xffffffffu, out[j], n);
    if (threadIdx.x % 32 < kLanes) part[threadIdx.x / 32][c + j] = out[j];
  }
  __syncthreads();
  if (threadIdx.x < kColumns) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) sum += part[w][threadIdx.x];
    o[threadIdx.x] = __float2bfloat16_rn(sum);
  }
}

/* Chunks of tokens, one after the other as they would come in steps of their own. The roundings are spelled out: of every token the
 * same. */
template <int D>
__global__ void __launch_bounds__(kThreads) lightning_rows(const __grid_constant__ mm_cu_lightning a, const mm_cu_span *spans) {
  __shared__ float q[D], k[D], part[kThreads / 32][kColumns];
  const uint32_t head = blockIdx.x / (D / kColumns), c0 = blockIdx.x % (D / kColumns) * kColumns;
  const uint32_t c = threadIdx.x % kLanes * 4, a0 = threadIdx.x / kLanes;
  grid_wait_and_launch_next();
  const mm_cu_span span = spans[blockIdx.y];
  if (span.slot < 0) return;
  float *state = a.state + span.slot * a.state_stride + ((size_t)head * D + a0) * D + c0 + c;
  float s[D / kRows][4];
#pragma unroll
  for (int i = 0; i < D / kRows; i++) {
    const float4 old = span.pos == 0 ? make_float4(0, 0, 0, 0) : *reinterpret_cast<const float4 *>(state + i * kRows * D);
    s[i][0] = old.x, s[i][1] = old.y, s[i][2] = old.z, s[i][3] = old.w;
  }
  const float decay = expf(-a.slope[head]);
#pragma unroll 1
  for (uint32_t row = span.first; row < span.first + span.count; row++) {
    const bf16 *qkv = a.qkv + ((size_t)row * a.heads + head) * 3 * D;
    const float4 loaded = load_row<D>(qkv, qkv + 2 * D + c0 + c, q, k);
    const float v[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float out[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < D / kRows; i++) {
      const float kk = k[a0 + i * kRows], qq = q[a0 + i * kRows];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        s[i][j] = __fmaf_rn(decay, s[i][j], __fmul_rn(kk, v[j]));
        out[j] = __fmaf_rn(qq, s[i][j], out[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int n = kLanes; n < 32; n *= 2) out[j] = __fadd_rn(out[j], __shfl_xor_sync(0xffffffffu, out[j], n));
      if (threadIdx.x % 32 < kLanes) part[threadIdx.x / 32][c + j] = out[j];
    }
    __syncthreads();
    if (threadIdx.x < kColumns) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kThreads / 32; w++) sum = __fadd_rn(sum, part[w][threadIdx.x]);
      a.o[((size_t)row * a.heads + head) * D + c0 + threadIdx.x] = __float2bfloat16_rn(sum);
    }
  }
#pragma unroll
  for (int i = 0; i < D / kRows; i++) *reinterpret_cast<float4 *>(state + i * kRows * D) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
}

}  // namespace

cudaError_t mm_cu_lightning_rows(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s) {
  const dim3 grid(a.heads * (a.head_dim / kColumns), spans);
  if (a.head_dim == 128) return launch(lightning_rows<128>, grid, kThreads, 0, s, a, span);
  if (a.head_dim == 64) return launch(lightning_rows<64>, grid, kThreads, 0, s, a, span);
  return cudaErrorNotSupported;
}

cudaError_t mm_cu_lightning_decode(const mm_cu_lightning &a, const mm_cu_rows &r, uint32_t tokens, cudaStream_t s) {
  const dim3 grid(a.heads * (a.head_dim / kColumns), tokens);
  if (a.head_dim == 128) return launch(lightning_step<128>, grid, kThreads, 0, s, a, r);
  if (a.head_dim == 64) return launch(lightning_step<64>, grid, kThreads, 0, s, a, r);
  return cudaErrorNotSupported;
}
