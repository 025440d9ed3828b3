/* Causal attention of stretches of tokens over the paged cache, which holds their own keys already.
 *
 * A block is 64 query rows of one head, a warp 16 of them; it walks the pages of 64 keys, two of them in shared memory at a time. The
 * score tile stays in registers: its accumulators are the left operand of p·v. Running maximum and sum in base 2. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr int kThreads = 128, kKeys = MM_CU_PAGE, kPad = 8;

template <int D>
struct page_shared {
  bf16 k[2][kKeys][D + kPad], v[2][kKeys][D + kPad];
};

/* Copies a page's keys and values; rows at or past valid become zeros. */
template <int D>
__device__ __forceinline__ void fetch_page(page_shared<D> &sh, int buffer, const bf16 *k, const bf16 *v, uint32_t valid) {
#pragma unroll
  for (int i = 0; i < kKeys * D / 8 / kThreads; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / (D / 8), c = at % (D / 8) * 8;
    copy16_or_zero(&sh.k[buffer][row][c], k + row * D + c, row < valid);
    copy16_or_zero(&sh.v[buffer][row][c], v + row * D + c, row < valid);
  }
  copy_commit();
}

template <int D>
__global__ void __launch_bounds__(kThreads) gqa_tile(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_tiles tiles,
                                                     const __grid_constant__ mm_cu_kv kv, const __grid_constant__ mm_cu_gqa a) {
  extern __shared__ uint4 shared_raw[];
  auto &sh = *reinterpret_cast<page_shared<D> *>(shared_raw);
  const uint32_t head = blockIdx.x, kv_head = head / (h.heads / h.kv_heads);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  grid_wait();
  grid_launch_next();
  const uint2 tile = tiles.tile[blockIdx.y];
  const mm_cu_span span = tiles.span[tile.x];
  if (span.slot < 0) return;
  const uint32_t rows = min(span.count - tile.y, (uint32_t)MM_CU_TILE), row = warp * 16 + g; /* and row + 8 */
  const uint32_t pos0 = span.pos + tile.y, keys = pos0 + rows;
  const uint32_t *table = kv.table + (size_t)span.slot * kv.pages_per_slot;
  auto base = [&](uint32_t page) { return ((size_t)table[page] * h.kv_heads + kv_head) * kKeys * D; };

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
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  float o[D / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

  const uint32_t pages = (keys + kKeys - 1) / kKeys;
  fetch_page<D>(sh, 0, kv.k + base(0), kv.v + base(0), keys);
  for (uint32_t page = 0; page < pages; page++) {
    const int b = page % 2;
    if (page + 1 < pages) {
      fetch_page<D>(sh, b ^ 1, kv.k + base(page + 1), kv.v + base(page + 1), keys - (page + 1) * kKeys);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    float s[kKeys / 8][4] = {};
    uint32_t f[4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        ldmatrix4(f, &sh.k[b][n * 8 + lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
        mma(s[n], qa[k], f[0], f[1]);
        mma(s[n + 1], qa[k], f[2], f[3]);
      }
    }
    const bool edge = (page + 1) * kKeys > pos0 + 1;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t key = page * kKeys + n * 8 + 2 * t + i % 2;
        s[n][i] = edge && key > pos0 + row + i / 2 * 8 ? -INFINITY : s[n][i] * scale;
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
        for (int i = 0; i < 2; i++) s[n][2 * half + i] = exp2f(s[n][2 * half + i] - top), l[half] += s[n][2 * half + i];
      }
#pragma unroll
      for (int n = 0; n < D / 8; n++) o[n][2 * half] *= shrink, o[n][2 * half + 1] *= shrink;
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
      const uint32_t pa[4] = {pack2(s[2 * k][0], s[2 * k][1]), pack2(s[2 * k][2], s[2 * k][3]), pack2(s[2 * k + 1][0], s[2 * k + 1][1]),
                              pack2(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        ldmatrix4_trans(f, &sh.v[b][k * 16 + lane % 16][n * 8 + lane / 16 * 8]);
        mma(o[n], pa, f[0], f[1]);
        mma(o[n + 1], pa, f[2], f[3]);
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
    const float inverse = 1.0f / l[half];
    if (row + half * 8 >= rows) continue;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t *>(out + (row + half * 8) * o_stride + n * 8) =
          pack2(o[n][2 * half] * inverse, o[n][2 * half + 1] * inverse);
  }
}

}  // namespace

cudaError_t mm_cu_gqa_prefill(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s) {
  if (h.heads % h.kv_heads != 0) return cudaErrorNotSupported;
  const dim3 grid(h.heads, t.count);
  if (h.head_dim == 128) return launch(gqa_tile<128>, grid, kThreads, sizeof(page_shared<128>), s, h, t, kv, a);
  if (h.head_dim == 64) return launch(gqa_tile<64>, grid, kThreads, sizeof(page_shared<64>), s, h, t, kv, a);
  return cudaErrorNotSupported;
}
