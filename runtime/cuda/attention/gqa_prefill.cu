/* Causal attention of prefill chunks over the paged cache, which holds their own keys already: on sm_80, and over e4m3 caches
 * everywhere; sm_90a has gqa_hopper.cu.
 *
 * A block is 64 query rows of one head, a warp 16 of them; it walks the pages of 64 keys, two of them in shared memory at a time. The
 * score tile stays in registers: its accumulators are the left operand of p·v. Running maximum and sum in base 2. A page of an e4m3 cache
 * is widened to f16 in shared memory, exactly; its scales go to the scores and the probabilities. */
#include "runtime/cuda/attention/gqa.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr int kThreads = 128, kKeys = MM_CU_PAGE, kPad = 8;

template <int D>
struct page {
  uint16_t k[kKeys][D + kPad], v[kKeys][D + kPad]; /* bf16 or f16 */
};
template <int D>
struct narrow_page {
  uint8_t k[kKeys][D], v[kKeys][D];
  float k_scale[kKeys], v_scale[kKeys];
};
template <int D, bool kFp8>
struct page_shared {
  page<D> fetched[2];
};
template <int D>
struct page_shared<D, true> {
  narrow_page<D> fetched[2];
  page<D> wide;
};
static_assert(sizeof(page_shared<128, false>) <= MM_CU_SHARED_LEAST && sizeof(page_shared<128, true>) + 2048 <= MM_CU_SHARED_LEAST,
              "they fit everywhere");
constexpr float kValueUp = 256; /* keeps probabilities times value scales in the range of f16, as in gqa_decode.cu */

/* Copies a page's keys and values, `cell` (token and head) first; rows at or past valid become zeros. */
template <int D>
__device__ __forceinline__ void fetch_page(page<D> &to, const mm_cu_kv &kv, size_t cell, uint32_t valid) {
  const bf16 *k = static_cast<const bf16 *>(kv.k) + cell * D, *v = static_cast<const bf16 *>(kv.v) + cell * D;
#pragma unroll
  for (int i = 0; i < kKeys * D / 8 / kThreads; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / (D / 8), c = at % (D / 8) * 8;
    copy16_or_zero(&to.k[row][c], k + row * D + c, row < valid);
    copy16_or_zero(&to.v[row][c], v + row * D + c, row < valid);
  }
  copy_commit();
}
template <int D>
__device__ __forceinline__ void fetch_page(narrow_page<D> &to, const mm_cu_kv &kv, size_t cell, uint32_t valid) {
  const uint8_t *k = static_cast<const uint8_t *>(kv.k) + cell * D, *v = static_cast<const uint8_t *>(kv.v) + cell * D;
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / kThreads; i++) {
    const uint32_t at = (i * kThreads + threadIdx.x) * 16, row = at / D;
    copy16_or_zero(&to.k[0][0] + at, k + at, row < valid);
    copy16_or_zero(&to.v[0][0] + at, v + at, row < valid);
  }
  const uint32_t c = threadIdx.x % 16 * 4;
  if (threadIdx.x < 16) copy16(&to.k_scale[c], kv.k_scale + cell + c);
  if (threadIdx.x >= 32 && threadIdx.x < 48) copy16(&to.v_scale[c], kv.v_scale + cell + c);
  copy_commit();
}

/* The page to multiply with, once it has been fetched and every thread is here. */
template <int D>
__device__ __forceinline__ page<D> &ready_page(page_shared<D, false> &sh, int b) {
  return sh.fetched[b];
}
template <int D>
__device__ __forceinline__ page<D> &ready_page(page_shared<D, true> &sh, int b) {
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / kThreads; i++) {
    const uint32_t at = (i * kThreads + threadIdx.x) * 16, row = at / D, c = at % D;
    uint4 *k = reinterpret_cast<uint4 *>(&sh.wide.k[row][c]), *v = reinterpret_cast<uint4 *>(&sh.wide.v[row][c]);
    uint4 wide[2];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&sh.fetched[b].k[0][0] + at));
    k[0] = wide[0], k[1] = wide[1];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&sh.fetched[b].v[0][0] + at));
    v[0] = wide[0], v[1] = wide[1];
  }
  __syncthreads();
  return sh.wide;
}

/* Multiplies scores and probabilities of keys n·8 + 2t and the next by their scales. */
template <int D>
__device__ __forceinline__ void scale_scores(const page_shared<D, false> &, int, float (&)[kKeys / 8][4]) {}
template <int D>
__device__ __forceinline__ void scale_scores(const page_shared<D, true> &sh, int b, float (&s)[kKeys / 8][4]) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; n++) {
    const float2 f = *reinterpret_cast<const float2 *>(&sh.fetched[b].k_scale[n * 8 + threadIdx.x % 4 * 2]);
    s[n][0] *= f.x, s[n][1] *= f.y, s[n][2] *= f.x, s[n][3] *= f.y;
  }
}
template <int D>
__device__ __forceinline__ void scale_probabilities(const page_shared<D, false> &, int, uint32_t, float (&)[kKeys / 8][4]) {}
template <int D>
__device__ __forceinline__ void scale_probabilities(const page_shared<D, true> &sh, int b, uint32_t valid, float (&p)[kKeys / 8][4]) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; n++) {
    const uint32_t key = n * 8 + threadIdx.x % 4 * 2;
    float2 f = *reinterpret_cast<const float2 *>(&sh.fetched[b].v_scale[key]);
    f.x = key < valid ? f.x * kValueUp : 0.0f, f.y = key + 1 < valid ? f.y * kValueUp : 0.0f; /* unused cells may hold anything */
    p[n][0] *= f.x, p[n][1] *= f.y, p[n][2] *= f.x, p[n][3] *= f.y;
  }
}

template <int D, bool kFp8>
__global__ void __launch_bounds__(kThreads) gqa_tile(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_tiles tiles,
                                                     const __grid_constant__ mm_cu_kv kv, const __grid_constant__ mm_cu_gqa a) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<page_shared<D, kFp8> *>(shared_raw);
  const auto multiply = kFp8 ? mma_half : mma;
  const auto pack = kFp8 ? pack2_half : pack2;
  const uint32_t head = blockIdx.x, kv_head = head / (h.heads / h.kv_heads);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  grid_wait_and_launch_next();
  const uint2 tile = tiles.tile[blockIdx.y];
  const mm_cu_span span = tiles.span[tile.x];
  if (span.slot < 0) return;
  const uint32_t rows = min(span.count - tile.y, (uint32_t)MM_CU_TILE), row = warp * 16 + g; /* and row + 8 */
  const uint32_t pos0 = span.pos + tile.y, keys = pos0 + rows;
  const uint32_t *table = kv.table + (size_t)span.slot * kv.pages_per_slot;
  auto base = [&](uint32_t page) { return ((size_t)table[page] * h.kv_heads + kv_head) * kKeys; };

  const size_t q_stride = (size_t)(h.heads + 2 * h.kv_heads) * D;
  const bf16 *q = a.qkv + (span.first + tile.y) * q_stride + head * D;
  uint32_t qa[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const bf16 *at = q + row * q_stride + k * 16 + 2 * t;
    qa[k][0] = row < rows ? *reinterpret_cast<const uint32_t *>(at) : 0;
    qa[k][2] = row < rows ? *reinterpret_cast<const uint32_t *>(at + 8) : 0;
    qa[k][1] = row + 8 < rows ? *reinterpret_cast<const uint32_t *>(at + 8 * q_stride) : 0;
    qa[k][3] = row + 8 < rows ? *reinterpret_cast<const uint32_t *>(at + 8 * q_stride + 8) : 0;
#pragma unroll
    for (int i = 0; kFp8 && i < 4; i++) qa[k][i] = pack2_half(low(qa[k][i]), high(qa[k][i]));
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  float o[D / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

  const uint32_t pages = (keys + kKeys - 1) / kKeys;
  fetch_page<D>(sh.fetched[0], kv, base(0), keys);
  for (uint32_t i = 0; i < pages; i++) {
    const int b = i % 2;
    if (i + 1 < pages) {
      fetch_page<D>(sh.fetched[b ^ 1], kv, base(i + 1), keys - (i + 1) * kKeys);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    auto &now = ready_page<D>(sh, b);
    float s[kKeys / 8][4] = {};
    uint32_t f[4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        ldmatrix4(f, &now.k[n * 8 + lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
        multiply(s[n], qa[k], f[0], f[1]);
        multiply(s[n + 1], qa[k], f[2], f[3]);
      }
    }
    scale_scores<D>(sh, b, s);
    const bool edge = (i + 1) * kKeys > pos0 + 1;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t key = i * kKeys + n * 8 + 2 * t + j % 2;
        s[n][j] = edge && key > pos0 + row + j / 2 * 8 ? -INFINITY : s[n][j] * scale;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = m[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float shrink = exp2f(m[half] - top); /* key 0 is every row's: top is finite from the first page on */
      m[half] = top, l[half] *= shrink;
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) s[n][2 * half + j] = exp2f(s[n][2 * half + j] - top), l[half] += s[n][2 * half + j];
      }
#pragma unroll
      for (int n = 0; n < D / 8; n++) o[n][2 * half] *= shrink, o[n][2 * half + 1] *= shrink;
    }
    scale_probabilities<D>(sh, b, keys - i * kKeys, s);
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
      const uint32_t pa[4] = {pack(s[2 * k][0], s[2 * k][1]), pack(s[2 * k][2], s[2 * k][3]), pack(s[2 * k + 1][0], s[2 * k + 1][1]),
                              pack(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        ldmatrix4_trans(f, &now.v[k * 16 + lane % 16][n * 8 + lane / 16 * 8]);
        multiply(o[n], pa, f[0], f[1]);
        multiply(o[n + 1], pa, f[2], f[3]);
      }
    }
    __syncthreads();
  }
  const size_t o_stride = (size_t)h.heads * D;
  bf16 *out = a.o + (span.first + tile.y) * o_stride + head * D + 2 * t;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    l[half] += __shfl_xor_sync(0xffffffffu, l[half], 1);
    l[half] += __shfl_xor_sync(0xffffffffu, l[half], 2);
    const float inverse = 1.0f / (kFp8 ? kValueUp * l[half] : l[half]);
    if (row + half * 8 >= rows) continue;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t *>(out + (row + half * 8) * o_stride + n * 8) =
          pack2(o[n][2 * half] * inverse, o[n][2 * half + 1] * inverse);
  }
}

template <int D, bool kFp8>
cudaError_t run(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s) {
  return launch(gqa_tile<D, kFp8>, dim3(h.heads, t.count), kThreads, sizeof(page_shared<D, kFp8>), s, h, t, kv, a);
}

}  // namespace

cudaError_t mm_cu_gqa_prefill(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s) {
  if (h.heads % h.kv_heads != 0 || (h.head_dim != 64 && h.head_dim != 128)) return cudaErrorNotSupported;
  if (t.count == 0) return cudaSuccess;
  if (!kv.k_scale && hopper()) return mm_cu_gqa_hopper(h, t, kv, a, s);
  if (h.head_dim == 128) return kv.k_scale ? run<128, true>(h, t, kv, a, s) : run<128, false>(h, t, kv, a, s);
  return kv.k_scale ? run<64, true>(h, t, kv, a, s) : run<64, false>(h, t, kv, a, s);
}
