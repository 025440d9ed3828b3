/* The router's logits of a prefill step as one product of bf16: a row of f32 weights is the sum of three bf16 exactly, which are three rows
 * of the product's weights; their results are added, the smallest first. bf16 weights are one piece. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr uint32_t kThreads = 256;

constexpr uint32_t kPieces = 3;

__global__ void split(bf16 *to, const float *w, size_t n) {
  for (size_t i = blockIdx.x * (size_t)kThreads + threadIdx.x; i < n; i += (size_t)gridDim.x * kThreads) {
    float left = w[i];
    for (uint32_t p = 0; p < kPieces; p++) {
      to[p * n + i] = __float2bfloat16_rn(left);
      left -= __bfloat162float(to[p * n + i]);
    }
  }
}

__global__ void sum_pieces(float *logits, const float *product, uint32_t experts, uint32_t n) {
  grid_wait();
  grid_launch_next();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x, token = i / experts;
  if (i >= n) return;
  const float *from = product + (size_t)token * kPieces * experts + (i - token * experts);
  float sum = 0;
  for (uint32_t p = kPieces; p-- > 0;) sum += from[p * experts];
  logits[i] = sum;
}

}  // namespace

cudaError_t mm_cu_split(__nv_bfloat16 *to, const float *w, size_t n, cudaStream_t s) {
  return launch(split, 1024, kThreads, 0, s, to, w, n);
}

cudaError_t mm_cu_route_logits(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, cudaStream_t s) {
  mm_cu_weight w = {};
  w.code = MM_CU_BF16, w.scale_kind = MM_CU_PLAIN, w.lead = 1, w.n = (m.wide ? kPieces : 1) * r.experts, w.k = m.k,
  w.pitch = 2 * (size_t)m.k;
  w.data = static_cast<const uint8_t *>(m.wide ? m.piece : m.w);
  float *to = m.wide ? m.product : r.logits;
  cudaError_t e = mm_cu_gemm(w, {x, nullptr, nullptr, to, tokens}, s);
  if (e == cudaSuccess && m.wide)
    e = launch(sum_pieces, ceil_div(tokens * r.experts, kThreads), kThreads, 0, s, r.logits, to, r.experts, tokens * r.experts);
  return e;
}
