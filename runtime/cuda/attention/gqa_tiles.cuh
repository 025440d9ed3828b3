/* Tiles of keys and values, and sums over them, of attention split along the keys (gqa_decode.cu, gqa_verify.cu). */
#ifndef MM_CUDA_GQA_TILES_CUH
#define MM_CUDA_GQA_TILES_CUH

#include "runtime/cuda/attention/own_token.cuh"

namespace gqa_tiles {

constexpr int kWarps = kGqaWarps, kThreads = kGqaThreads, kGroup = kGqaGroup, kKeys = MM_CU_GQA_KEYS;
constexpr int kMostStages = 2; /* of a warp */

/* An unnormalised result: o = Σ exp2(s - m)·v, l = Σ exp2(s - m), per head of the group. */
template <int D>
struct partial {
  float o[kGroup][D], m[kGroup], l[kGroup];
};

struct work_space {
  uint32_t *counter; /* [rows, kv_heads], zero between launches */
  float *part;       /* [rows, kv_heads, splits] of partial<D> */
  mm_cu_gqa_cut cut;
  /* Rows that are cut into more chunks than that: */
  float *far;            /* [items of all of them, kv_heads] of partial<D>; a row's are [kv_heads, its splits] from first[row] items on */
  const uint32_t *first; /* [rows] */
  const uint2 *item;     /* splits that no block of the grid has, or of verify rows all (mm_cu_far); or NULL */
};

/* Keys or values of a tile, bf16 or f16; the 16-byte piece c of row r lies at piece c ^ (r % 8). */
template <int D>
struct wide_half {
  uint16_t at[kKeys][D];
};
/* The same in e4m3, as it lies in the cache. */
template <int D>
struct narrow_half {
  uint8_t at[kKeys][D];
  float scale[kKeys];
};
template <int D, bool kFp8>
struct warp_stage {
  wide_half<D> k, v;
};
template <int D>
struct warp_stage<D, true> {
  narrow_half<D> k, v;
  wide_half<D> wide; /* of the one that is being multiplied */
};
template <int D, bool kFp8, int kStages>
union decode_shared {
  warp_stage<D, kFp8> stage[kWarps][kStages];
  partial<D> part[kWarps];
};

template <int D>
__device__ __forceinline__ uint16_t *piece(wide_half<D> &m, uint32_t row, uint32_t c) {
  return &m.at[row][(c ^ row % 8) * 8];
}

/* Starts the copy of 16 keys or values from `cell` (token and head) on; those at or past valid become zeros, so that what the cache holds
 * there never reaches a sum. */
template <int D>
__device__ __forceinline__ void fetch_half(wide_half<D> &to, const void *cache, const float *, size_t cell, uint32_t valid) {
  const bf16 *from = static_cast<const bf16 *>(cache) + cell * D;
#pragma unroll
  for (int i = 0; i < kKeys * D / 8 / 32; i++) {
    const uint32_t at = i * 32 + threadIdx.x % 32, row = at / (D / 8), c = at % (D / 8);
    copy16_or_zero(piece<D>(to, row, c), from + at * 8, row < valid);
  }
}
template <int D>
__device__ __forceinline__ void fetch_half(narrow_half<D> &to, const void *cache, const float *scale, size_t cell, uint32_t valid) {
  const uint8_t *from = static_cast<const uint8_t *>(cache) + cell * D;
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + lane) * 16, row = at / D;
    copy16_or_zero(&to.at[0][0] + at, from + at, row < valid);
  }
  if (lane < kKeys / 4) copy16(&to.scale[lane * 4], scale + cell + lane * 4);
}

/* Probabilities times the value scales of an e4m3 cache are f16: a power of two, taken back at the end, keeps them in range for values of
 * 1e-4 to 1e5. */
constexpr float kValueUp = 256;

/* The 8 x 8 matrix of 16-bit values spread over the warp (lane (g, t): row g, columns 2t, 2t+1), turned. */
__device__ __forceinline__ uint32_t turn(uint32_t pair) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

/* Lays the token's own key or value into row `row` of what was fetched. */
template <int D>
__device__ __forceinline__ void lay_own(wide_half<D> &to, const uint16_t (&own)[D], float, uint32_t row) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < D / 8) *reinterpret_cast<uint4 *>(piece<D>(to, row, lane)) = *reinterpret_cast<const uint4 *>(own + lane * 8);
}
template <int D>
__device__ __forceinline__ void lay_own(narrow_half<D> &to, const uint16_t (&own)[D], float scale, uint32_t row) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < D / 16) *reinterpret_cast<uint4 *>(to.at[row] + lane * 16) = *reinterpret_cast<const uint4 *>(own + lane * 8);
  if (lane == 16) to.scale[row] = scale;
}

/* The operand: fetched keys or values, widened where they are e4m3. For whole warps. */
template <int D>
__device__ __forceinline__ wide_half<D> &ready_half(warp_stage<D, false> &, wide_half<D> &from) {
  return from;
}
template <int D>
__device__ __forceinline__ wide_half<D> &ready_half(warp_stage<D, true> &stage, narrow_half<D> &from) {
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + threadIdx.x % 32) * 16, row = at / D, c = at % D / 8;
    uint4 wide[2];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&from.at[0][0] + at));
    *reinterpret_cast<uint4 *>(piece<D>(stage.wide, row, c)) = wide[0];
    *reinterpret_cast<uint4 *>(piece<D>(stage.wide, row, c + 1)) = wide[1];
  }
  __syncwarp();
  return stage.wide;
}

/* Scales of the keys g and g + 8; those of a cell that holds none may be anything. */
template <int D>
__device__ __forceinline__ float scale_of(const wide_half<D> &, uint32_t) {
  return 1.0f;
}
template <int D>
__device__ __forceinline__ float scale_of(const narrow_half<D> &from, uint32_t key) {
  return from.scale[key];
}

/* Partial sums of a warp: lane (g, t) holds heads 2t and 2t+1, columns 16j + g and + 8. l is this lane's share. */
template <int D>
struct running {
  float o[D / 16][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
};

/* Writes a warp's running sums of a row as its part: the lane's query heads 2t and 2t + 1. */
template <int D, bool kFp8>
__device__ __forceinline__ void put_warp(partial<D> &to, running<D> &sum) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr float down = kFp8 ? 1 / kValueUp : 1;
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum.l[i] += __shfl_xor_sync(0xffffffffu, sum.l[i], d);
    if (g == 0) to.m[2 * t + i] = sum.m[i], to.l[2 * t + i] = sum.l[i];
#pragma unroll
    for (int j = 0; j < D / 16; j++)
      to.o[2 * t + i][j * 16 + g] = sum.o[j][i] * down, to.o[2 * t + i][j * 16 + 8 + g] = sum.o[j][i + 2] * down;
  }
}

/* The scores of 16 keys, those at or past valid -inf, times `scale`: lane (g, t) has keys g (0, 1) and g + 8 of heads 2t and 2t+1. */
template <int D, bool kFp8>
__device__ __forceinline__ void score(float (&e)[4], warp_stage<D, kFp8> &stage, uint32_t valid, float scale,
                                      const uint32_t (&q)[D / 16][2]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const auto multiply = kFp8 ? mma_half : mma;
  auto &k = ready_half<D>(stage, stage.k);
  uint32_t a[4];
  float s[2][4] = {};
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    ldmatrix4(a, piece<D>(k, lane % 16, 2 * j + lane / 16));
    multiply(s[j % 2], a, q[j][0], q[j][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t key = g + i / 2 * 8;
    e[i] = key < valid ? (s[0][i] + s[1][i]) * (scale * scale_of(stage.k, key)) : -INFINITY;
  }
}

/* Scores relative to the largest so far (online softmax); earlier sums are scaled down. kVotes: not by 1, which is most of the time. */
template <int D, bool kVotes = false>
__device__ __forceinline__ void soften(float (&e)[4], running<D> &r) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float top = fmaxf(r.m[h], fmaxf(e[h], e[h + 2]));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    const float shrink = exp2f(r.m[h] - top);
    r.m[h] = top;
    e[h] = exp2f(e[h] - top), e[h + 2] = exp2f(e[h + 2] - top);
    r.l[h] = r.l[h] * shrink + e[h] + e[h + 2];
    if (kVotes && !__any_sync(0xffffffffu, shrink != 1.0f)) continue;
#pragma unroll
    for (int j = 0; j < D / 16; j++) r.o[j][h] *= shrink, r.o[j][h + 2] *= shrink;
  }
}

template <int D, bool kFp8>
__device__ __forceinline__ void add_values(running<D> &r, warp_stage<D, kFp8> &stage, uint32_t valid, const float (&e)[4]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const auto multiply = kFp8 ? mma_half : mma;
  const auto pack = kFp8 ? pack2_half : pack2;
  float f[2] = {1, 1};
  if (kFp8) f[0] = g < valid ? scale_of(stage.v, g) * kValueUp : 0.0f, f[1] = g + 8 < valid ? scale_of(stage.v, g + 8) * kValueUp : 0.0f;
  const uint32_t p[2] = {turn(pack(e[0] * f[0], e[1] * f[0])), turn(pack(e[2] * f[1], e[3] * f[1]))};
  auto &v = ready_half<D>(stage, stage.v);
  uint32_t a[4];
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    ldmatrix4_trans(a, piece<D>(v, lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
    multiply(r.o[j], a, p[0], p[1]);
  }
}

/* Where partial results lie: in this block's shared memory, or in memory, written by others. */
struct here {
  template <class T>
  __device__ __forceinline__ T operator()(const T *p) const {
    return *p;
  }
};
struct elsewhere {
  template <class T>
  __device__ __forceinline__ T operator()(const T *p) const {
    return __ldcg(p);
  }
};

/* Joins n partial results, kAtOnce at a time, four columns of a head to a thread: put(head, column, o, m, l), o unnormalised. */
template <int D, uint32_t kAtOnce, class Where, class Put>
__device__ __forceinline__ void join(const partial<D> *p, uint32_t n, uint32_t group, Where at, Put put) {
  static_assert(kGroup * D <= kThreads * 4);
  const uint32_t head = threadIdx.x / (D / 4), c = threadIdx.x % (D / 4) * 4;
  if (head >= group) return;
  float4 sum = make_float4(0, 0, 0, 0);
  float top = -INFINITY, total = 0;
#pragma unroll 1
  for (uint32_t j0 = 0; j0 < n; j0 += kAtOnce) {
    float4 v[kAtOnce];
    float m[kAtOnce], l[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; j++) { /* all loads before the first use */
      const partial<D> &from = p[min(j0 + j, n - 1)];
      v[j] = at(reinterpret_cast<const float4 *>(&from.o[head][c])), l[j] = at(&from.l[head]);
      m[j] = j0 + j < n ? at(&from.m[head]) : -INFINITY;
    }
    float most = top;
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; j++) most = fmaxf(most, m[j]);
    const float shrink = exp2f(top - most);
    top = most, total *= shrink;
    sum.x *= shrink, sum.y *= shrink, sum.z *= shrink, sum.w *= shrink;
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; j++) {
      const float f = exp2f(m[j] - top);
      total += f * l[j];
      sum.x += f * v[j].x, sum.y += f * v[j].y, sum.z += f * v[j].z, sum.w += f * v[j].w;
    }
  }
  put(head, c, sum, top, total);
}

}  // namespace gqa_tiles

#endif
