/* Between the qkv projection and attention, one pass over qkv: the optional RMS norm of q over all heads and of k over all kv heads,
 * RoPE on the first rotary_dim columns of each head (halves rotated against each other), q back in place, k and v to their pages, as bf16
 * or as e4m3 under one scale per token and head. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr uint32_t kMaxThreads = 1024, kMaxHalf = 64;

/* A block per row, a thread per pair of 16-byte pieces of a head: in the rotary part those that turn into each other, else neighbours. */
__global__ void __launch_bounds__(kMaxThreads) rope(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r,
                                                    const __grid_constant__ mm_cu_kv kv, const __grid_constant__ mm_cu_qkv a) {
  __shared__ float part[2][kMaxThreads / 32], cosine[kMaxHalf], sine[kMaxHalf];
  const uint32_t row = blockIdx.x, d = h.head_dim, half = h.rotary_dim / 2, per_head = d / 16, warp = threadIdx.x / 32;
  const uint32_t head = threadIdx.x / per_head, p = threadIdx.x % per_head; /* heads of q, k, v in turn */
  const bool turns = p < half / 8, is_q = head < h.heads, is_k = !is_q && head < h.heads + h.kv_heads;
  const bool active = head < h.heads + 2 * h.kv_heads;
  const uint32_t c0 = turns ? p * 8 : p * 16, c1 = turns ? c0 + half : c0 + 8; /* columns of the two pieces */
  float w[2][8];
  if (a.q_norm && (is_q || is_k)) {
    const float *from = is_q ? a.q_norm + head * d : a.k_norm + (head - h.heads) * d;
    load8(w[0], from + c0);
    load8(w[1], from + c1);
  }
  const float freq = threadIdx.x < half ? a.inv_freq[threadIdx.x] : 0.0f;
  grid_wait_and_launch_next();
  const int32_t slot = r.slot[row];
  const uint32_t pos = r.pos[row];
  bf16 *from = a.qkv + ((size_t)row * (h.heads + 2 * h.kv_heads) + head) * d;
  uint4 raw[2] = {};
  if (active) raw[0] = *reinterpret_cast<const uint4 *>(from + c0), raw[1] = *reinterpret_cast<const uint4 *>(from + c1);
  if (slot < 0) return;
  const uint32_t page = kv.table[(size_t)slot * kv.pages_per_slot + pos / MM_CU_PAGE];
  if (threadIdx.x < half) sincosf((float)pos * freq, &sine[threadIdx.x], &cosine[threadIdx.x]);
  float x[2][8];
  widen8(x[0], raw[0]), widen8(x[1], raw[1]);
  if (a.q_norm) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x[0][i] * x[0][i] + x[1][i] * x[1][i];
    const float q_sum = warp_sum(is_q ? sum : 0.0f), k_sum = warp_sum(is_k ? sum : 0.0f);
    if (threadIdx.x % 32 == 0) part[0][warp] = q_sum, part[1][warp] = k_sum;
  }
  __syncthreads();
  if (a.q_norm && (is_q || is_k)) {
    float sum = 0;
    for (uint32_t i = 0; i < blockDim.x / 32; i++) sum += part[is_k][i];
    const float scale = rsqrtf(sum / (float)((is_q ? h.heads : h.kv_heads) * d) + a.eps);
#pragma unroll
    for (int i = 0; i < 8; i++) x[0][i] *= scale * w[0][i], x[1][i] *= scale * w[1][i];
  }
  if (turns && (is_q || is_k)) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float c = cosine[c0 + i], s = sine[c0 + i], y = x[0][i] * c - x[1][i] * s;
      x[1][i] = x[1][i] * c + x[0][i] * s, x[0][i] = y;
    }
  }
  float top = 0; /* the largest magnitude of the head */
  if (kv.k_scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fmaxf(fabsf(x[0][i]), fabsf(x[1][i])));
    for (uint32_t m = per_head / 2; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  }
  if (!active) return;
  const uint32_t kv_head = head - h.heads - (is_k ? 0 : h.kv_heads);
  const size_t cell = ((size_t)page * h.kv_heads + kv_head) * MM_CU_PAGE + pos % MM_CU_PAGE;
  if (is_q || !kv.k_scale) {
    bf16 *to = is_q ? from : static_cast<bf16 *>(is_k ? kv.k : kv.v) + cell * d;
    *reinterpret_cast<uint4 *>(to + c0) = narrow8(x[0]), *reinterpret_cast<uint4 *>(to + c1) = narrow8(x[1]);
    return;
  }
  uint8_t *to = static_cast<uint8_t *>(is_k ? kv.k : kv.v) + cell * d;
  top = fmaxf(top, kLeastTop);
  const float inverse = 448.0f / top;
  *reinterpret_cast<uint2 *>(to + c0) = narrow8_e4m3(x[0], inverse), *reinterpret_cast<uint2 *>(to + c1) = narrow8_e4m3(x[1], inverse);
  if (p == 0) (is_k ? kv.k_scale : kv.v_scale)[cell] = top / 448.0f;
}

}  // namespace

cudaError_t mm_cu_rope(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &a, cudaStream_t s) {
  const uint32_t threads = ceil_div((h.heads + 2 * h.kv_heads) * h.head_dim / 16, 32) * 32;
  if (h.rotary_dim > 2 * kMaxHalf || h.rotary_dim > h.head_dim || h.rotary_dim % 16 != 0 || h.head_dim % 16 != 0 || threads > kMaxThreads)
    return cudaErrorNotSupported;
  return launch(rope, a.tokens, threads < kMaxHalf ? kMaxHalf : threads, 0, s, h, r, kv, a);
}
