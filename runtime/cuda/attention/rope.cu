/* Between the qkv projection and attention, one pass over qkv: the optional RMS norm of q over all heads and of k over all kv heads,
 * RoPE on the first rotary_dim columns of each head (halves rotated against each other), q back in place, k and v to their pages, as bf16
 * or as e4m3 under one scale per token and head. */
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kMaxThreads = 1024, kMaxHalf = 64;

/* A block for kRows rows, a thread per pair of 16-byte pieces of a head: in the rotary part those that turn into each other, else two at
 * a distance of the number of pairs. Each load and store of a warp covers whole sectors of 32 bytes: half ones cost the L2 cache as much.
 */
template <int D, bool kNorm, bool kFp8, int kRows>
__global__ void __launch_bounds__(kMaxThreads) rope(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r,
                                                    const __grid_constant__ mm_cu_kv kv, const __grid_constant__ mm_cu_qkv a) {
  constexpr uint32_t kPieces = D / 16, kEvery = 0xffffffffu; /* threads of a head */
  alignas(16) __shared__ float part[kRows][2][kMaxThreads / 32], cosine[kRows][kMaxHalf], sine[kRows][kMaxHalf];
  const uint32_t first = blockIdx.x * kRows, heads = h.heads + 2 * h.kv_heads, half = h.rotary_dim / 2, warp = threadIdx.x / 32;
  const uint32_t head = threadIdx.x / kPieces, p = threadIdx.x % kPieces; /* heads of q, k, v in turn */
  const bool turns = p < half / 8, is_q = head < h.heads, is_k = !is_q && head < h.heads + h.kv_heads, active = head < heads;
  const uint32_t still = kPieces - half / 8; /* pieces of a head outside the rotary part */
  const uint32_t c0 = turns ? p * 8 : half * 2 + (p - half / 8) * 8, c1 = c0 + (turns ? half : still * 8); /* columns of the two pieces */
  const float freq = threadIdx.x < kRows * half ? a.inv_freq[threadIdx.x % half] : 0.0f;
  grid_wait_and_launch_next();
  bf16 *const own = a.qkv + ((size_t)first * heads + head) * D;
  int32_t slot[kRows];
  uint4 raw[kRows][2] = {};
#pragma unroll
  for (int k = 0; k < kRows; k++) {
    const bool there = first + k < a.tokens;
    slot[k] = there ? r.slot[first + k] : -1;
    if (there && active) {
      const bf16 *const from = own + (size_t)k * heads * D;
      raw[k][0] = *reinterpret_cast<const uint4 *>(from + c0), raw[k][1] = *reinterpret_cast<const uint4 *>(from + c1);
    }
  }
  if (threadIdx.x < kRows * half) {
    const uint32_t k = threadIdx.x / half, i = threadIdx.x % half;
    sincosf((float)r.pos[min(first + k, a.tokens - 1)] * freq, &sine[k][i], &cosine[k][i]);
  }
  float w[2][8];
  if (kNorm) {
    const uint32_t of_q = __ballot_sync(kEvery, is_q);
    if (is_q || is_k) {
      const float *from = is_q ? a.q_norm + head * D : a.k_norm + (head - h.heads) * D;
      load8(w[0], from + c0), load8(w[1], from + c1);
    }
#pragma unroll
    for (int k = 0; k < kRows; k++) {
      float sum = 0, x[2][8];
      widen8(x[0], raw[k][0]), widen8(x[1], raw[k][1]);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += x[0][i] * x[0][i] + x[1][i] * x[1][i];
      float all[2] = {0, 0}; /* most warps have q's columns alone, or none of them */
      if (of_q != 0) all[0] = warp_sum(is_q ? sum : 0.0f);
      if (of_q != kEvery) all[1] = warp_sum(is_k ? sum : 0.0f);
      if (threadIdx.x % 32 == 0) part[k][0][warp] = all[0], part[k][1][warp] = all[1];
      if (threadIdx.x < 4 && blockDim.x / 32 % 4 != 0) { /* the last four are read together */
        const uint32_t at = blockDim.x / 32 / 4 * 4 + threadIdx.x;
        if (at >= blockDim.x / 32) part[k][0][at] = part[k][1][at] = 0;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kRows; k++) {
    if (slot[k] < 0) continue;
    float x[2][8];
    widen8(x[0], raw[k][0]), widen8(x[1], raw[k][1]);
    if (kNorm && (is_q || is_k)) {
      float sum = 0;
      for (uint32_t i = 0; i < blockDim.x / 32; i += 4) {
        const float4 v = *reinterpret_cast<const float4 *>(&part[k][is_k][i]);
        sum = (((sum + v.x) + v.y) + v.z) + v.w;
      }
      const float scale = rsqrtf(sum / (float)((is_q ? h.heads : h.kv_heads) * D) + a.eps);
#pragma unroll
      for (int i = 0; i < 8; i++) x[0][i] *= scale * w[0][i], x[1][i] *= scale * w[1][i];
    }
    if (turns && (is_q || is_k)) {
      float c[8], s[8];
      load8(c, &cosine[k][c0]), load8(s, &sine[k][c0]);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float y = x[0][i] * c[i] - x[1][i] * s[i];
        x[1][i] = x[1][i] * c[i] + x[0][i] * s[i], x[0][i] = y;
      }
    }
    float top = 0; /* the largest magnitude of the head */
    if (kFp8) {
#pragma unroll
      for (int i = 0; i < 8; i++) top = fmaxf(top, fmaxf(fabsf(x[0][i]), fabsf(x[1][i])));
#pragma unroll
      for (uint32_t m = kPieces / 2; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(kEvery, top, m));
    }
    if (!active) continue;
    bf16 *to = own + (size_t)k * heads * D;
    size_t cell = 0;
    if (!is_q) {
      const uint32_t pos = r.pos[first + k], page = kv.table[(size_t)slot[k] * kv.pages_per_slot + pos / MM_CU_PAGE];
      cell = ((size_t)page * h.kv_heads + (head - h.heads - (is_k ? 0 : h.kv_heads))) * MM_CU_PAGE + pos % MM_CU_PAGE;
      to = static_cast<bf16 *>(is_k ? kv.k : kv.v) + cell * D;
    }
    if (is_q || !kFp8) {
      *reinterpret_cast<uint4 *>(to + c0) = narrow8(x[0]), *reinterpret_cast<uint4 *>(to + c1) = narrow8(x[1]);
      continue;
    }
    uint8_t *codes = static_cast<uint8_t *>(is_k ? kv.k : kv.v) + cell * D;
    top = fmaxf(top, kLeastTop);
    const float inverse = 448.0f / top;
    *reinterpret_cast<uint2 *>(codes + c0) = narrow8_e4m3(x[0], inverse),
                                       *reinterpret_cast<uint2 *>(codes + c1) = narrow8_e4m3(x[1], inverse);
    if (p == 0) (is_k ? kv.k_scale : kv.v_scale)[cell] = top / 448.0f;
  }
}

/* Two rows a block where there are more than two blocks of one row for each multiprocessor. */
template <int D, bool kNorm, bool kFp8>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &a, uint32_t threads, cudaStream_t s) {
  if (a.tokens > 2 * multiprocessors()) return launch(rope<D, kNorm, kFp8, 2>, ceil_div(a.tokens, 2), threads, 0, s, h, r, kv, a);
  return launch(rope<D, kNorm, kFp8, 1>, a.tokens, threads, 0, s, h, r, kv, a);
}
template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &a, uint32_t threads, cudaStream_t s) {
  if (a.q_norm) return kv.k_scale ? run<D, true, true>(h, r, kv, a, threads, s) : run<D, true, false>(h, r, kv, a, threads, s);
  return kv.k_scale ? run<D, false, true>(h, r, kv, a, threads, s) : run<D, false, false>(h, r, kv, a, threads, s);
}

}  // namespace

cudaError_t mm_cu_rope(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &a, cudaStream_t s) {
  const uint32_t least = (uint32_t)mm_max((h.heads + 2 * h.kv_heads) * h.head_dim / 16, h.rotary_dim), threads = ceil_div(least, 32) * 32;
  if (h.rotary_dim > 2 * kMaxHalf || h.rotary_dim > h.head_dim || h.rotary_dim % 16 != 0 || threads > kMaxThreads)
    return cudaErrorNotSupported;
  if (h.head_dim == 128) return run<128>(h, r, kv, a, threads, s);
  return h.head_dim == 64 ? run<64>(h, r, kv, a, threads, s) : cudaErrorNotSupported;
}
