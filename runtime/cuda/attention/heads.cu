/* Heads between their projection and attention: the norm of each head by itself, RoPE, keys and values into
 * their pages. Used for q, k and v of layers whose norms are per head, and for the index queries and keys of
 * sparse layers.
 *
 * Shapes: a row has q_heads + k_heads + v_heads heads of D = 32, 64 or 128 columns. Grid (row, sixteen
 * heads), 512 threads, a warp for each head, D / 32 columns to a lane at a distance of 32. Shared memory: the
 * row's cosines and sines, and D floats for each warp, through which its lanes exchange the columns of a rotation (9 KB
 * at most, static).
 *
 * Maths: runtime/cpu/cpu_gqa.c (norm_each, store_row) and cpu_select.c (norm_and_turn): x·rsqrt(mean(x²) +
 * eps)·w in f32, w = 1 + weight where the model says so (added as weights arrive), then columns i and i +
 * rotary/2 turned by pos·inv_freq[i]; one rounding to bf16, or to e4m3 under the head's own scale. */
#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kWarps = 16, kThreads = kWarps * 32, kMostHalf = 64;

/* A head's place among the row's, and where it goes. */
struct head_place {
  const bf16 *from;
  void *to;
  const float *norm; /* NULL: none */
  bool turns;
  float *scale; /* of e4m3; NULL: bf16 */
};

template <int D>
__device__ __forceinline__ head_place place_of(const mm_cu_head_work &a, uint32_t row, uint32_t head, uint32_t slot, uint32_t pos) {
  if (head < a.q_heads) {
    bf16 *const q = a.q + (size_t)row * a.q_pitch + head * D;
    return {q, q, a.q_norm, true, nullptr};
  }
  const bool key = head < a.q_heads + a.k_heads;
  if (!a.keys) {
    bf16 *const k = const_cast<bf16 *>(a.k) + (size_t)row * a.kv_pitch + (head - a.q_heads) * D;
    return {k, k, a.k_norm, true, nullptr};
  }
  const uint32_t heads = key ? a.k_heads : a.v_heads, at = head - a.q_heads - (key ? 0 : a.k_heads);
  const uint32_t page = a.table[(size_t)slot * a.pages_per_slot + pos / MM_CU_PAGE];
  const size_t cell = mm_cu_cell(page, heads, at) + pos % MM_CU_PAGE;
  const bf16 *const from = (key ? a.k : a.v) + (size_t)row * a.kv_pitch + at * D;
  char *const to = static_cast<char *>(key ? a.keys : a.values);
  const float *const norm = key ? a.k_norm : nullptr;
  if (!a.k_scale) return {from, to + cell * D * sizeof(bf16), norm, key, nullptr};
  return {from, to + cell * D, norm, key, (key ? a.k_scale : a.v_scale) + cell};
}

template <int D>
__global__ void __launch_bounds__(kThreads) place_heads(const __grid_constant__ mm_cu_head_work a, const __grid_constant__ mm_cu_rows r) {
  constexpr int kEach = D / 32;
  __shared__ float cosine[kMostHalf], sine[kMostHalf], columns[kWarps][D];
  const uint32_t row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = a.rotary_dim / 2;
  const uint32_t head = blockIdx.y * kWarps + warp;
  const float freq = threadIdx.x < half ? a.inv_freq[threadIdx.x] : 0.0f;
  grid_wait_and_launch_next();
  const int32_t slot = r.slot[row];
  if (slot < 0) return;
  const uint32_t pos = r.pos[row];
  if (threadIdx.x < half) sincosf((float)pos * freq, &sine[threadIdx.x], &cosine[threadIdx.x]);
  __syncthreads();
  if (head >= a.q_heads + a.k_heads + a.v_heads) return;
  const head_place p = place_of<D>(a, row, head, (uint32_t)slot, pos);
  float x[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) x[i] = __bfloat162float(p.from[i * 32 + lane]), sum += x[i] * x[i];
  if (p.norm) {
    const float scale = rsqrtf(warp_sum(sum) / (float)D + a.eps);
#pragma unroll
    for (int i = 0; i < kEach; i++) x[i] *= scale * p.norm[i * 32 + lane];
  }
  if (p.turns) {
    float *const all = columns[warp];
#pragma unroll
    for (int i = 0; i < kEach; i++) all[i * 32 + lane] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t c = i * 32 + lane;
      if (c < half) {
        x[i] = all[c] * cosine[c] - all[c + half] * sine[c];
      } else if (c < 2 * half) {
        x[i] = all[c] * cosine[c - half] + all[c - half] * sine[c - half];
      }
    }
  }
  if (!p.scale) {
    bf16 *const to = static_cast<bf16 *>(p.to);
#pragma unroll
    for (int i = 0; i < kEach; i++) to[i * 32 + lane] = __float2bfloat16_rn(x[i]);
    return;
  }
  float top = kLeastTop;
#pragma unroll
  for (int i = 0; i < kEach; i++) top = fmaxf(top, fabsf(x[i]));
#pragma unroll
  for (int m = 16; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  const float inverse = 448.0f / top;
  uint8_t *const to = static_cast<uint8_t *>(p.to);
#pragma unroll
  for (int i = 0; i < kEach; i++) to[i * 32 + lane] = __nv_cvt_float_to_fp8(x[i] * inverse, __NV_SATFINITE, __NV_E4M3);
  if (lane == 0) *p.scale = top / 448.0f;
}

}  // namespace

cudaError_t mm_cu_place_heads(const mm_cu_head_work &a, const mm_cu_rows &r, cudaStream_t s) {
  if (a.rotary_dim > 2 * kMostHalf || a.rotary_dim > a.dim || a.rotary_dim % 2 != 0) return cudaErrorNotSupported;
  const dim3 grid(a.tokens, ceil_div(a.q_heads + a.k_heads + a.v_heads, kWarps));
  switch (a.dim) {
    case 32: return launch(place_heads<32>, grid, kThreads, 0, s, a, r);
    case 64: return launch(place_heads<64>, grid, kThreads, 0, s, a, r);
    case 128: return launch(place_heads<128>, grid, kThreads, 0, s, a, r);
    default: return cudaErrorNotSupported;
  }
}
