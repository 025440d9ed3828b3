/* Attention of single tokens over their caches, split along the keys, in one launch.
 *
 * A block is (split, kv head, row); its warps take tiles of 16 keys in turn, straight from the pages to fragments: the query heads of the
 * group are the 16 rows of mma.m16n8k16 (8 used). For q·kᵀ lane (g, t) holds 8 columns of key g as 16 bytes; for p·v it holds columns of
 * four keys and pairs neighbours with byte permutes. Which column an mma slot means is free as long as both sides agree. Warps merge in
 * shared memory; the last block of a (row, kv head) merges the splits. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr int kWarps = 4, kGroup = 8, kMaxSplits = 64;

/* An unnormalised result: o = Σ exp2(s - m)·v, l = Σ exp2(s - m), per head of the group. */
template <int D>
struct partial {
  float o[kGroup][D], m[kGroup], l[kGroup];
};

struct work_space {
  uint32_t *counter; /* [rows, kv_heads], zero between launches */
  float *part;       /* [rows, kv_heads, splits] of partial<D> */
  uint32_t splits;
};

/* Folds the 16 keys [key, key + 16) of a page into the warp's running result. acc[j]: columns of j/8·64 + lane-column·8 + j%8. */
template <int D>
__device__ __forceinline__ void fold_tile(const bf16 *k_page, const bf16 *v_page, uint32_t key, uint32_t valid, float scale,
                                          const uint32_t (&q)[D / 16][2], float (&acc)[D / 8][4], float &m, float &l) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4 kq[2][D / 32], vq[4][D / 64];
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int j = 0; j < D / 32; j++) kq[n][j] = *reinterpret_cast<const uint4 *>(k_page + (key + n * 8 + g) * D + j * 32 + t * 8);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t at = key + i / 2 * 8 + 2 * t + i % 2;
#pragma unroll
    for (int j = 0; j < D / 64; j++) vq[i][j] = *reinterpret_cast<const uint4 *>(v_page + at * D + j * 64 + g * 8);
  }
  float s[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const uint32_t a0[4] = {q[2 * j][0], 0, q[2 * j][1], 0}, a1[4] = {q[2 * j + 1][0], 0, q[2 * j + 1][1], 0};
      mma(s[n], a0, kq[n][j].x, kq[n][j].y);
      mma(s[n], a1, kq[n][j].z, kq[n][j].w);
    }
  }
  float p[2][2], top = m;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      p[n][i] = n * 8 + 2 * t + i < valid ? s[n][i] * scale : -INFINITY;
      top = fmaxf(top, p[n][i]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const float shrink = exp2f(m - top);
  m = top;
  l *= shrink;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++) p[n][i] = exp2f(p[n][i] - top), l += p[n][i];
  }
  const uint32_t pa[4] = {pack2(p[0][0], p[0][1]), 0, pack2(p[1][0], p[1][1]), 0};
#pragma unroll
  for (int j = 0; j < D / 8; j++) {
    acc[j][0] *= shrink, acc[j][1] *= shrink;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 v = vq[i][j / 8];
      w[i] = j % 8 / 2 == 0 ? v.x : j % 8 / 2 == 1 ? v.y : j % 8 / 2 == 2 ? v.z : v.w;
      /* Keys past the end: whatever the page holds must not reach the sum, not even as 0 · NaN. */
      if (i / 2 * 8 + 2 * t + i % 2 >= valid) w[i] = 0;
    }
    const uint32_t pick = j % 2 == 0 ? 0x5410 : 0x7632;
    mma(acc[j], pa, __byte_perm(w[0], w[1], pick), __byte_perm(w[2], w[3], pick));
  }
}

/* factor[i][head] = what part i's o counts in the normalised sum; a warp per head. */
template <int D>
__device__ __forceinline__ void weigh(const partial<D> *p, uint32_t n, uint32_t group, bool normalise, float (*factor)[kGroup],
                                      float *m_out, float *l_out) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t head = threadIdx.x / 32; head < group; head += kWarps) {
    float m[2], l[2], top = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint32_t i = j * 32 + lane;
      m[j] = i < n ? p[i].m[head] : -INFINITY, l[j] = i < n ? p[i].l[head] : 0.0f;
      top = fmaxf(top, m[j]);
    }
#pragma unroll
    for (int j = 16; j > 0; j >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, j));
#pragma unroll
    for (int j = 0; j < 2; j++) m[j] = l[j] > 0 ? exp2f(m[j] - top) : 0.0f, sum += m[j] * l[j];
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (j * 32 + lane < n) factor[j * 32 + lane][head] = normalise ? m[j] / sum : m[j];
    }
    if (lane == 0 && !normalise) m_out[head] = top, l_out[head] = sum;
  }
  __syncthreads();
}

template <int D>
__global__ void __launch_bounds__(kWarps * 32)
    gqa_step(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
             const __grid_constant__ mm_cu_gqa a, const __grid_constant__ work_space ws) {
  __shared__ partial<D> part[kWarps];
  __shared__ float factor[kMaxSplits][kGroup];
  __shared__ bool last;
  const uint32_t split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z, group = h.heads / h.kv_heads;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  grid_wait();
  grid_launch_next();
  bf16 *o = a.o + ((size_t)row * h.heads + kv_head * group) * D;
  const int32_t slot = r.slot[row];
  if (slot < 0) {
    if (split == 0) {
      for (uint32_t i = threadIdx.x; i < group * D; i += kWarps * 32) o[i] = __float2bfloat16_rn(0.0f);
    }
    return;
  }
  const uint32_t keys = r.pos[row] + 1, tiles = (keys + 15) / 16;
  const uint32_t per_split = (tiles + ws.splits * kWarps - 1) / (ws.splits * kWarps) * kWarps;
  const uint32_t used = (tiles + per_split - 1) / per_split, end = min(tiles, (split + 1) * per_split);
  if (split >= used) return;

  const bf16 *q_row = a.qkv + (size_t)row * (h.heads + 2 * h.kv_heads) * D + (kv_head * group + g) * D;
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  uint32_t q[D / 16][2];
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    uint4 v = g < group ? *reinterpret_cast<const uint4 *>(q_row + j * 32 + t * 8) : make_uint4(0, 0, 0, 0);
    q[2 * j][0] = v.x, q[2 * j][1] = v.y, q[2 * j + 1][0] = v.z, q[2 * j + 1][1] = v.w;
  }
  float acc[D / 8][4] = {}, m = -INFINITY, l = 0;
  for (uint32_t tile = split * per_split + warp; tile < end; tile += kWarps) {
    const uint32_t page = kv.table[(size_t)slot * kv.pages_per_slot + tile / 4];
    const size_t base = ((size_t)page * h.kv_heads + kv_head) * MM_CU_PAGE * D;
    fold_tile<D>(kv.k + base, kv.v + base, tile % 4 * 16, keys - tile * 16, scale, q, acc, m, l);
  }
  l += __shfl_xor_sync(0xffffffffu, l, 1);
  l += __shfl_xor_sync(0xffffffffu, l, 2);
  if (t == 0) part[warp].m[g] = m, part[warp].l[g] = l;
#pragma unroll
  for (int j = 0; j < D / 8; j++) {
    const uint32_t c = j / 8 * 64 + 2 * t * 8 + j % 8;
    part[warp].o[g][c] = acc[j][0], part[warp].o[g][c + 8] = acc[j][1];
  }
  __syncthreads();

  partial<D> *mine = reinterpret_cast<partial<D> *>(ws.part) + (((size_t)row * h.kv_heads + kv_head) * ws.splits + split);
  weigh<D>(part, kWarps, group, used == 1, factor, mine->m, mine->l);
  for (uint32_t i = threadIdx.x; i < group * D; i += kWarps * 32) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) v += factor[w][i / D] * part[w].o[i / D][i % D];
    if (used == 1) {
      o[i] = __float2bfloat16_rn(v);
    } else {
      mine->o[i / D][i % D] = v;
    }
  }
  if (used == 1) return;
  __threadfence();
  __syncthreads();
  uint32_t *counter = ws.counter + row * h.kv_heads + kv_head;
  if (threadIdx.x == 0) last = atomicAdd(counter, 1) == used - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  const partial<D> *all = mine - split;
  weigh<D>(all, used, group, true, factor, nullptr, nullptr);
  for (uint32_t i = threadIdx.x; i < group * D; i += kWarps * 32) {
    float v = 0;
#pragma unroll 8
    for (uint32_t j = 0; j < used; j++) v += factor[j][i / D] * all[j].o[i / D][i % D];
    o[i] = __float2bfloat16_rn(v);
  }
}

size_t counter_bytes(const mm_cu_heads &h, uint32_t rows) { return ((size_t)rows * h.kv_heads * sizeof(uint32_t) + 255) / 256 * 256; }

/* Splits for a batch: about three blocks per multiprocessor. */
uint32_t splits_for(const mm_cu_heads &h, uint32_t rows) {
  uint32_t n = 3 * multiprocessors() / (rows * h.kv_heads);
  return n < 1 ? 1 : n > kMaxSplits ? kMaxSplits : n;
}

}  // namespace

size_t mm_cu_gqa_work(const mm_cu_heads &h, uint32_t max_tokens) {
  size_t most = 0;
  for (uint32_t rows = 1; rows <= max_tokens; rows++) {
    size_t n = (size_t)rows * h.kv_heads * splits_for(h, rows);
    if (n > most) most = n;
  }
  return counter_bytes(h, max_tokens) + most * (h.head_dim == 64 ? sizeof(partial<64>) : sizeof(partial<128>));
}

cudaError_t mm_cu_gqa_decode(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s) {
  if (h.heads % h.kv_heads != 0 || h.heads / h.kv_heads > kGroup) return cudaErrorNotSupported;
  work_space ws = {static_cast<uint32_t *>(a.work), nullptr, splits_for(h, a.tokens)};
  ws.part = reinterpret_cast<float *>(static_cast<char *>(a.work) + counter_bytes(h, a.tokens));
  const dim3 grid(ws.splits, h.kv_heads, a.tokens);
  if (h.head_dim == 128) return launch(gqa_step<128>, grid, kWarps * 32, 0, s, h, r, kv, a, ws);
  if (h.head_dim == 64) return launch(gqa_step<64>, grid, kWarps * 32, 0, s, h, r, kv, a, ws);
  return cudaErrorNotSupported;
}
