/* Between the qkv projection and attention, one pass over qkv: the optional RMS norm of q over all heads and of k over all kv heads,
 * RoPE on the first rotary_dim columns of each head (halves rotated against each other), q back in place, k and v to their pages. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

/* Sum of squares of n bf16, n % 8 == 0, over the block. */
__device__ float square_sum(const bf16 *x, uint32_t n, float *scratch) {
  float sum = 0;
  for (uint32_t i = threadIdx.x * 8; i < n; i += blockDim.x * 8) {
    float v[8];
    widen8(v, *reinterpret_cast<const uint4 *>(x + i));
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[j] * v[j];
  }
  return block_sum(sum, scratch);
}

/* A block per row. A thread takes one column pair (i, i + half) of the rotary part, or two neighbours of the rest. */
__global__ void rope(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
                     const __grid_constant__ mm_cu_qkv a) {
  __shared__ float scratch[33], cosine[64], sine[64];
  grid_wait();
  grid_launch_next();
  const uint32_t row = blockIdx.x, d = h.head_dim, half = h.rotary_dim / 2;
  const int32_t slot = r.slot[row];
  if (slot < 0) return;
  const uint32_t pos = r.pos[row], q_width = h.heads * d, k_width = h.kv_heads * d;
  bf16 *q = a.qkv + (size_t)row * (q_width + 2 * k_width), *k = q + q_width;
  if (threadIdx.x < half) sincosf((float)pos * a.inv_freq[threadIdx.x], &sine[threadIdx.x], &cosine[threadIdx.x]);
  float q_scale = 1, k_scale = 1;
  if (a.q_norm) {
    q_scale = rsqrtf(square_sum(q, q_width, scratch) / (float)q_width + a.eps);
    k_scale = rsqrtf(square_sum(k, k_width, scratch) / (float)k_width + a.eps);
  }
  __syncthreads();

  const uint32_t page = kv.table[(size_t)slot * kv.pages_per_slot + pos / MM_CU_PAGE], in_page = pos % MM_CU_PAGE;
  auto cell = [&](bf16 *pool, uint32_t head) { return pool + (((size_t)page * h.kv_heads + head) * MM_CU_PAGE + in_page) * d; };
  for (uint32_t i = threadIdx.x; i < (h.heads + h.kv_heads) * d / 2; i += blockDim.x) {
    const uint32_t head = i / (d / 2), p = i % (d / 2);
    const bool is_q = head < h.heads;
    const uint32_t c0 = p < half ? p : 2 * p, c1 = p < half ? p + half : 2 * p + 1;
    bf16 *from = q + head * d; /* k follows q */
    float x0 = __bfloat162float(from[c0]), x1 = __bfloat162float(from[c1]);
    if (a.q_norm) {
      const float *w = is_q ? a.q_norm + head * d : a.k_norm + (head - h.heads) * d;
      const float scale = is_q ? q_scale : k_scale;
      x0 *= scale * w[c0], x1 *= scale * w[c1];
    }
    if (p < half) {
      const float y0 = x0 * cosine[p] - x1 * sine[p];
      x1 = x1 * cosine[p] + x0 * sine[p], x0 = y0;
    }
    bf16 *to = is_q ? from : cell(kv.k, head - h.heads);
    to[c0] = __float2bfloat16_rn(x0), to[c1] = __float2bfloat16_rn(x1);
  }
  for (uint32_t i = threadIdx.x * 8; i < k_width; i += blockDim.x * 8)
    *reinterpret_cast<uint4 *>(cell(kv.v, i / d) + i % d) = *reinterpret_cast<const uint4 *>(k + k_width + i);
}

}  // namespace

cudaError_t mm_cu_rope(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &a, cudaStream_t s) {
  if (h.rotary_dim > 128 || h.rotary_dim > h.head_dim || h.rotary_dim % 2 != 0 || h.head_dim % 8 != 0) return cudaErrorNotSupported;
  return launch(rope, a.tokens, 1024, 0, s, h, r, kv, a);
}
