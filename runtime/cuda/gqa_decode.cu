/* Attention of single tokens over their caches, split along the keys, in one launch.
 *
 * A block is (kv head, row, split); its warps take tiles of 16 keys in turn. Each warp keeps three tiles of keys and values in shared
 * memory under its own asynchronous copies and waits for nobody. Both products have the keys or the value columns on the 16-row side of
 * mma.m16n8k16 and the query heads of the group on its eight columns: sᵀ = K qᵀ, oᵀ = Vᵀ pᵀ. Warps merge in shared memory; the last block
 * of a (row, kv head) merges the splits. A tile of an e4m3 cache is widened to f16 in shared memory, exactly; its scales go to the scores
 * and the probabilities. How a row is split depends on its own length and the number of rows alone. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32, kGroup = 8, kMaxSplits = 32, kKeys = 16, kStages = 3;

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

/* A warp's tile of bf16 or f16; the 16-byte piece c of row r lies at piece c ^ (r % 8). */
template <int D>
struct key_tile {
  uint16_t k[kKeys][D], v[kKeys][D];
};
/* The same in e4m3, as it lies in the cache. */
template <int D>
struct narrow_tile {
  uint8_t k[kKeys][D], v[kKeys][D];
  float k_scale[kKeys], v_scale[kKeys];
};
template <int D, bool kFp8>
struct tile_ring {
  key_tile<D> tile[kWarps][kStages];
};
template <int D>
struct tile_ring<D, true> {
  narrow_tile<D> tile[kWarps][kStages];
  key_tile<D> wide[kWarps];
};
template <int D, bool kFp8>
union decode_shared {
  tile_ring<D, kFp8> ring;
  partial<D> part[kWarps];
};

template <int D>
__device__ __forceinline__ uint16_t *piece(uint16_t (&m)[kKeys][D], uint32_t row, uint32_t c) {
  return &m[row][(c ^ row % 8) * 8];
}

/* Starts the copy of 16 keys from `cell` (token and head) on; those at or past valid become zeros, so that what the cache holds there
 * never reaches a sum. */
template <int D>
__device__ __forceinline__ void fetch_tile(key_tile<D> &to, const mm_cu_kv &kv, size_t cell, uint32_t valid) {
  const bf16 *k = static_cast<const bf16 *>(kv.k) + cell * D, *v = static_cast<const bf16 *>(kv.v) + cell * D;
#pragma unroll
  for (int i = 0; i < kKeys * D / 8 / 32; i++) {
    const uint32_t at = i * 32 + threadIdx.x % 32, row = at / (D / 8), c = at % (D / 8);
    copy16_or_zero(piece<D>(to.k, row, c), k + at * 8, row < valid);
    copy16_or_zero(piece<D>(to.v, row, c), v + at * 8, row < valid);
  }
}
template <int D>
__device__ __forceinline__ void fetch_tile(narrow_tile<D> &to, const mm_cu_kv &kv, size_t cell, uint32_t valid) {
  const uint8_t *k = static_cast<const uint8_t *>(kv.k) + cell * D, *v = static_cast<const uint8_t *>(kv.v) + cell * D;
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + lane) * 16, row = at / D;
    copy16_or_zero(&to.k[0][0] + at, k + at, row < valid);
    copy16_or_zero(&to.v[0][0] + at, v + at, row < valid);
  }
  if (lane < kKeys / 4) copy16(&to.k_scale[lane * 4], kv.k_scale + cell + lane * 4);
  if (lane >= 16 && lane < 16 + kKeys / 4) copy16(&to.v_scale[(lane - 16) * 4], kv.v_scale + cell + (lane - 16) * 4);
}

/* Each lane widens what it fetched. */
template <int D>
__device__ __forceinline__ void widen_tile(key_tile<D> &to, const narrow_tile<D> &from) {
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + threadIdx.x % 32) * 16, row = at / D, c = at % D / 8;
    uint4 wide[2];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&from.k[0][0] + at));
    *reinterpret_cast<uint4 *>(piece<D>(to.k, row, c)) = wide[0], *reinterpret_cast<uint4 *>(piece<D>(to.k, row, c + 1)) = wide[1];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&from.v[0][0] + at));
    *reinterpret_cast<uint4 *>(piece<D>(to.v, row, c)) = wide[0], *reinterpret_cast<uint4 *>(piece<D>(to.v, row, c + 1)) = wide[1];
  }
}

/* What lane (g, t) multiplies the scores and the probabilities of keys g and g + 8 by. Probabilities times value scales are f16: a power
 * of two, taken back at the end, keeps them in range for values of 1e-4 to 1e5. */
struct key_factors {
  float k[2], v[2];
};
constexpr float kValueUp = 256;

/* The 8 x 8 matrix of 16-bit values spread over the warp (lane (g, t): row g, columns 2t, 2t+1), turned. */
__device__ __forceinline__ uint32_t turn(uint32_t pair) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

/* What a warp has summed: lane (g, t) holds heads 2t and 2t+1, columns 16j + g and + 8. l is this lane's share. */
template <int D>
struct running {
  float o[D / 16][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
};

template <int D, bool kFp8>
__device__ __forceinline__ void fold_tile(key_tile<D> &tile, const key_factors &f, uint32_t valid, float scale,
                                          const uint32_t (&q)[D / 16][2], running<D> &r) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const auto multiply = kFp8 ? mma_half : mma;
  const auto pack = kFp8 ? pack2_half : pack2;
  uint32_t a[4];
  float s[2][4] = {};
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    ldmatrix4(a, piece<D>(tile.k, lane % 16, 2 * j + lane / 16));
    multiply(s[j % 2], a, q[j][0], q[j][1]);
  }
  uint32_t p[2];
  float e[4];
#pragma unroll
  for (int i = 0; i < 4; i++) e[i] = g + i / 2 * 8 < valid ? (s[0][i] + s[1][i]) * (kFp8 ? scale * f.k[i / 2] : scale) : -INFINITY;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float top = fmaxf(r.m[h], fmaxf(e[h], e[h + 2]));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    const float shrink = exp2f(r.m[h] - top);
    r.m[h] = top;
    e[h] = exp2f(e[h] - top), e[h + 2] = exp2f(e[h + 2] - top);
    r.l[h] = r.l[h] * shrink + e[h] + e[h + 2];
#pragma unroll
    for (int j = 0; j < D / 16; j++) r.o[j][h] *= shrink, r.o[j][h + 2] *= shrink;
  }
  if (kFp8) e[0] *= f.v[0], e[1] *= f.v[0], e[2] *= f.v[1], e[3] *= f.v[1];
  p[0] = turn(pack(e[0], e[1])), p[1] = turn(pack(e[2], e[3]));
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    ldmatrix4_trans(a, piece<D>(tile.v, lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
    multiply(r.o[j], a, p[0], p[1]);
  }
}

/* Folds a fetched tile, which every lane has waited for. */
template <int D>
__device__ __forceinline__ void fold_stage(tile_ring<D, false> &ring, uint32_t stage, uint32_t valid, float scale,
                                           const uint32_t (&q)[D / 16][2], running<D> &r) {
  fold_tile<D, false>(ring.tile[threadIdx.x / 32][stage], {}, valid, scale, q, r);
}
template <int D>
__device__ __forceinline__ void fold_stage(tile_ring<D, true> &ring, uint32_t stage, uint32_t valid, float scale,
                                           const uint32_t (&q)[D / 16][2], running<D> &r) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const narrow_tile<D> &from = ring.tile[warp][stage];
  key_factors f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t key = g + 8 * i;
    f.k[i] = from.k_scale[key], f.v[i] = key < valid ? from.v_scale[key] * kValueUp : 0.0f; /* an unused cell's scale may be anything */
  }
  widen_tile<D>(ring.wide[warp], from);
  __syncwarp();
  fold_tile<D, true>(ring.wide[warp], f, valid, scale, q, r);
}

/* factor[i][head] = what part i's o counts in the sum, normalised or relative to the largest m; a warp per head. */
template <int D>
__device__ __forceinline__ void weigh(const partial<D> *p, uint32_t n, bool normalise, float (*factor)[kGroup], float *m_out,
                                      float *l_out) {
  const uint32_t lane = threadIdx.x % 32, head = threadIdx.x / 32;
  const float m = lane < n ? p[lane].m[head] : -INFINITY, l = lane < n ? p[lane].l[head] : 0.0f;
  float top = m;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
  const float f = l > 0 ? exp2f(m - top) : 0.0f, sum = warp_sum(f * l);
  if (lane < n) factor[lane][head] = normalise ? f / sum : f;
  if (lane == 0 && !normalise) m_out[head] = top, l_out[head] = sum;
  __syncthreads();
}
static_assert(kWarps == kGroup && kMaxSplits <= 32, "weigh");

/* Σ over the parts of factor · o, four columns of a head to a thread; results to put(head, column, sum). */
template <int D, class Put>
__device__ __forceinline__ void sum_parts(const partial<D> *p, uint32_t n, uint32_t group, const float (*factor)[kGroup], Put put) {
  for (uint32_t i = threadIdx.x * 4; i < group * D; i += kThreads * 4) {
    const uint32_t head = i / D, c = i % D;
    float4 sum = make_float4(0, 0, 0, 0);
    for (uint32_t j0 = 0; j0 < n; j0 += 8) {
      float4 v[8];
#pragma unroll
      for (uint32_t j = 0; j < 8; j++) v[j] = *reinterpret_cast<const float4 *>(&p[min(j0 + j, n - 1)].o[head][c]);
#pragma unroll
      for (uint32_t j = 0; j < 8; j++) {
        const float f = j0 + j < n ? factor[j0 + j][head] : 0.0f;
        sum.x += f * v[j].x, sum.y += f * v[j].y, sum.z += f * v[j].z, sum.w += f * v[j].w;
      }
    }
    put(head, c, sum);
  }
}

template <int D, bool kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_step(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
             const __grid_constant__ mm_cu_gqa a, const __grid_constant__ work_space ws) {
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<decode_shared<D, kFp8> *>(shared_raw);
  __shared__ float factor[kMaxSplits][kGroup];
  __shared__ bool last;
  const uint32_t kv_head = blockIdx.x, row = blockIdx.y, split = blockIdx.z, group = h.heads / h.kv_heads;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  grid_wait();
  grid_launch_next();
  bf16 *o = a.o + ((size_t)row * h.heads + kv_head * group) * D;
  auto put_result = [&](uint32_t head, uint32_t c, float4 v) {
    *reinterpret_cast<uint2 *>(o + head * D + c) = make_uint2(pack2(v.x, v.y), pack2(v.z, v.w));
  };
  const int32_t slot = r.slot[row];
  if (slot < 0) {
    if (split == 0) {
      for (uint32_t i = threadIdx.x; i < group * D; i += kThreads) o[i] = __float2bfloat16_rn(0.0f);
    }
    return;
  }
  const uint32_t keys = r.pos[row] + 1, tiles = (keys + kKeys - 1) / kKeys;
  const uint32_t per_split = (tiles + ws.splits * kWarps - 1) / (ws.splits * kWarps) * kWarps;
  const uint32_t used = (tiles + per_split - 1) / per_split, end = min(tiles, (split + 1) * per_split);
  if (split >= used) return;

  uint32_t next = split * per_split + warp; /* the warp's next tile to fetch */
  auto page_of = [&](uint32_t tile) { return tile < end ? kv.table[(size_t)slot * kv.pages_per_slot + tile / (MM_CU_PAGE / kKeys)] : 0; };
  uint32_t page = page_of(next); /* known a turn before it is needed */
  auto fetch = [&](uint32_t stage) {
    if (next < end) {
      const size_t cell = ((size_t)page * h.kv_heads + kv_head) * MM_CU_PAGE + next % (MM_CU_PAGE / kKeys) * kKeys;
      fetch_tile<D>(sh.ring.tile[warp][stage], kv, cell, keys - next * kKeys);
    }
    copy_commit();
    next += kWarps;
    page = page_of(next);
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) fetch(i);
  const bf16 *q_row = a.qkv + (size_t)row * (h.heads + 2 * h.kv_heads) * D + (kv_head * group + g) * D;
  uint32_t q[D / 16][2];
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      q[j][i] = g < group ? *reinterpret_cast<const uint32_t *>(q_row + j * 16 + i * 8 + 2 * t) : 0;
      if (kFp8) q[j][i] = pack2_half(low(q[j][i]), high(q[j][i]));
    }
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  running<D> sum;
  uint32_t stage = 0;
  for (uint32_t tile = split * per_split + warp; tile < end; tile += kWarps) {
    __syncwarp(); /* the slot fetched now was read in the last turn */
    fetch(stage == 0 ? kStages - 1 : stage - 1);
    copy_wait<kStages - 1>();
    __syncwarp();
    fold_stage<D>(sh.ring, stage, keys - tile * kKeys, scale, q, sum);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  copy_wait<0>();
  __syncthreads();

  partial<D> &own = sh.part[warp];
  constexpr float down = kFp8 ? 1 / kValueUp : 1;
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum.l[i] += __shfl_xor_sync(0xffffffffu, sum.l[i], d);
    if (g == 0) own.m[2 * t + i] = sum.m[i], own.l[2 * t + i] = sum.l[i];
#pragma unroll
    for (int j = 0; j < D / 16; j++)
      own.o[2 * t + i][j * 16 + g] = sum.o[j][i] * down, own.o[2 * t + i][j * 16 + 8 + g] = sum.o[j][i + 2] * down;
  }
  __syncthreads();
  partial<D> *mine = reinterpret_cast<partial<D> *>(ws.part) + (((size_t)row * h.kv_heads + kv_head) * ws.splits + split);
  weigh<D>(sh.part, kWarps, used == 1, factor, mine->m, mine->l);
  if (used == 1) {
    sum_parts<D>(sh.part, kWarps, group, factor, put_result);
    return;
  }
  sum_parts<D>(sh.part, kWarps, group, factor,
               [&](uint32_t head, uint32_t c, float4 v) { *reinterpret_cast<float4 *>(&mine->o[head][c]) = v; });
  __threadfence();
  __syncthreads();
  uint32_t *counter = ws.counter + row * h.kv_heads + kv_head;
  if (threadIdx.x == 0) last = atomicAdd(counter, 1) == used - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  weigh<D>(mine - split, used, true, factor, nullptr, nullptr);
  sum_parts<D>(mine - split, used, group, factor, put_result);
}

size_t counter_bytes(const mm_cu_heads &h, uint32_t rows) { return ((size_t)rows * h.kv_heads * sizeof(uint32_t) + 255) / 256 * 256; }

/* Splits for a batch: the fewest rounds of blocks, one to a multiprocessor, in parts of a row's work; a round costs 1/32 of a row more. */
uint32_t splits_for(const mm_cu_heads &h, uint32_t rows) {
  const uint32_t blocks = rows * h.kv_heads, parallel = multiprocessors();
  uint32_t best = 1;
  float least = INFINITY;
  for (uint32_t n = 1; n <= kMaxSplits; n++) {
    const float cost = (float)ceil_div(blocks * n, parallel) * (1.0f / (float)n + 1.0f / 32);
    if (cost < least) best = n, least = cost;
  }
  return best;
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_gqa &a, const work_space &ws, cudaStream_t s) {
  const dim3 grid(h.kv_heads, a.tokens, ws.splits);
  if (kv.k_scale) return launch(gqa_step<D, true>, grid, kThreads, sizeof(decode_shared<D, true>), s, h, r, kv, a, ws);
  return launch(gqa_step<D, false>, grid, kThreads, sizeof(decode_shared<D, false>), s, h, r, kv, a, ws);
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
  if (h.head_dim == 128) return run<128>(h, r, kv, a, ws, s);
  if (h.head_dim == 64) return run<64>(h, r, kv, a, ws, s);
  return cudaErrorNotSupported;
}
