/* Attention of single tokens over their caches, split along the keys, in one launch.
 *
 * A block is (kv head, row, split); its warps take tiles of 16 keys in turn. Each warp keeps three tiles of keys and values in shared
 * memory under its own asynchronous copies and waits for nobody. Both products have the keys or the value columns on the 16-row side of
 * mma.m16n8k16 and the query heads of the group on its eight columns: sᵀ = K qᵀ, oᵀ = Vᵀ pᵀ. Warps merge in shared memory; the last block
 * of a (row, kv head) merges the splits. How a row is split depends on its own length and the number of rows alone. */
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

/* A warp's tile; the 16-byte piece c of row r lies at piece c ^ (r % 8). */
template <int D>
struct key_tile {
  bf16 k[kKeys][D], v[kKeys][D];
};
template <int D>
union decode_shared {
  key_tile<D> tile[kWarps][kStages];
  partial<D> part[kWarps];
};

template <int D>
__device__ __forceinline__ bf16 *piece(bf16 (&m)[kKeys][D], uint32_t row, uint32_t c) {
  return &m[row][(c ^ row % 8) * 8];
}

/* Starts the copy of 16 keys; those at or past valid become zeros, so that what the cache holds there never reaches a sum. */
template <int D>
__device__ __forceinline__ void fetch_tile(key_tile<D> &to, const bf16 *k, const bf16 *v, uint32_t valid) {
#pragma unroll
  for (int i = 0; i < kKeys * D / 8 / 32; i++) {
    const uint32_t at = i * 32 + threadIdx.x % 32, row = at / (D / 8), c = at % (D / 8);
    copy16_or_zero(piece<D>(to.k, row, c), k + at * 8, row < valid);
    copy16_or_zero(piece<D>(to.v, row, c), v + at * 8, row < valid);
  }
}

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

template <int D>
__device__ __forceinline__ void fold_tile(key_tile<D> &tile, uint32_t valid, float scale, const uint32_t (&q)[D / 16][2], running<D> &r) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  uint32_t a[4];
  float s[2][4] = {};
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    ldmatrix4(a, piece<D>(tile.k, lane % 16, 2 * j + lane / 16));
    mma(s[j % 2], a, q[j][0], q[j][1]);
  }
  uint32_t p[2];
  float e[4];
#pragma unroll
  for (int i = 0; i < 4; i++) e[i] = g + i / 2 * 8 < valid ? (s[0][i] + s[1][i]) * scale : -INFINITY;
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
  p[0] = turn(pack2(e[0], e[1])), p[1] = turn(pack2(e[2], e[3]));
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    ldmatrix4_trans(a, piece<D>(tile.v, lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
    mma(r.o[j], a, p[0], p[1]);
  }
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

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_step(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
             const __grid_constant__ mm_cu_gqa a, const __grid_constant__ work_space ws) {
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<decode_shared<D> *>(shared_raw);
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
      const size_t at = (((size_t)page * h.kv_heads + kv_head) * MM_CU_PAGE + next % (MM_CU_PAGE / kKeys) * kKeys) * D;
      fetch_tile<D>(sh.tile[warp][stage], kv.k + at, kv.v + at, keys - next * kKeys);
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
    for (int i = 0; i < 2; i++) q[j][i] = g < group ? *reinterpret_cast<const uint32_t *>(q_row + j * 16 + i * 8 + 2 * t) : 0;
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  running<D> sum;
  uint32_t stage = 0;
  for (uint32_t tile = split * per_split + warp; tile < end; tile += kWarps) {
    __syncwarp(); /* the slot fetched now was read in the last turn */
    fetch(stage == 0 ? kStages - 1 : stage - 1);
    copy_wait<kStages - 1>();
    __syncwarp();
    fold_tile<D>(sh.tile[warp][stage], keys - tile * kKeys, scale, q, sum);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  copy_wait<0>();
  __syncthreads();

  partial<D> &own = sh.part[warp];
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum.l[i] += __shfl_xor_sync(0xffffffffu, sum.l[i], d);
    if (g == 0) own.m[2 * t + i] = sum.m[i], own.l[2 * t + i] = sum.l[i];
#pragma unroll
    for (int j = 0; j < D / 16; j++) own.o[2 * t + i][j * 16 + g] = sum.o[j][i], own.o[2 * t + i][j * 16 + 8 + g] = sum.o[j][i + 2];
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
  return launch(gqa_step<D>, dim3(h.kv_heads, a.tokens, ws.splits), kThreads, sizeof(decode_shared<D>), s, h, r, kv, a, ws);
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
