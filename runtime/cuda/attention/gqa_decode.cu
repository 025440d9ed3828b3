/* Attention of single tokens over their caches, split along the keys, in one launch with all that comes between it and the projection: QK
 * norm, RoPE and the token's own key and value, which the block of the last split writes to the cache.
 *
 * A block is (kv head, row, split); its warps take tiles of 16 keys in turn, and fetch the first two before they wait for the projection:
 * what the cache held before the step, no kernel of the step writes. The token's own key and value are laid into their tile by hand. Each
 * warp has room for two tiles, or for one where a block has less shared memory (with the same bits), under its own asynchronous copies, and
 * waits for nobody: once it has a tile's scores it fetches later keys in the place of these, once it has the values' sum, later values.
 * Both products have the keys or the value columns on the 16-row side of mma.m16n8k16 and the query heads of the group on its eight
 * columns: sᵀ = K qᵀ, oᵀ = Vᵀ pᵀ. Warps merge in shared memory; the last block of a (row, kv head) merges the splits. An e4m3 cache is
 * widened to f16 in shared memory, exactly; its scales go to the scores and the probabilities. How a row is split depends on its own length
 * and the number of rows alone (mm_cu_gqa_cut): parts beyond those that every row has blocks for are dealt out to blocks, which take them
 * after their own.
 *
 * Of several ranks, the first block of each row sends the sums of squares of its rank's q and k to the others, and every block of the row
 * waits for theirs: blocks start in the order of their index, in which a row's first one comes before those that wait for it.
 *
 * The kernel after may start only once the projection is there: sooner its weights would come between attention and what that waits for. */
#include "runtime/cuda/attention/own_token.cuh"

namespace {

constexpr int kWarps = kGqaWarps, kThreads = kGqaThreads, kGroup = kGqaGroup, kKeys = MM_CU_GQA_KEYS;
constexpr int kMostRooms = 2; /* of a warp */

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
  const uint2 *item;     /* splits that no block of the grid has (mm_cu_far), or NULL */
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
struct warp_room {
  wide_half<D> k, v;
};
template <int D>
struct warp_room<D, true> {
  narrow_half<D> k, v;
  wide_half<D> wide; /* of the one that is being multiplied */
};
template <int D, bool kFp8, int kRooms>
union decode_shared {
  warp_room<D, kFp8> room[kWarps][kRooms];
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
__device__ __forceinline__ wide_half<D> &ready_half(warp_room<D, false> &, wide_half<D> &from) {
  return from;
}
template <int D>
__device__ __forceinline__ wide_half<D> &ready_half(warp_room<D, true> &room, narrow_half<D> &from) {
#pragma unroll
  for (int i = 0; i < kKeys * D / 16 / 32; i++) {
    const uint32_t at = (i * 32 + threadIdx.x % 32) * 16, row = at / D, c = at % D / 8;
    uint4 wide[2];
    widen16_half(wide, *reinterpret_cast<const uint4 *>(&from.at[0][0] + at));
    *reinterpret_cast<uint4 *>(piece<D>(room.wide, row, c)) = wide[0];
    *reinterpret_cast<uint4 *>(piece<D>(room.wide, row, c + 1)) = wide[1];
  }
  __syncwarp();
  return room.wide;
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

/* The scores of 16 keys, those at or past valid -inf, times `scale`: lane (g, t) has keys g (0, 1) and g + 8 of heads 2t and 2t+1. */
template <int D, bool kFp8>
__device__ __forceinline__ void score(float (&e)[4], warp_room<D, kFp8> &room, uint32_t valid, float scale,
                                      const uint32_t (&q)[D / 16][2]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const auto multiply = kFp8 ? mma_half : mma;
  auto &k = ready_half<D>(room, room.k);
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
    e[i] = key < valid ? (s[0][i] + s[1][i]) * (scale * scale_of(room.k, key)) : -INFINITY;
  }
}

/* Scores relative to the largest so far (online softmax); earlier sums are scaled down. */
template <int D>
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
#pragma unroll
    for (int j = 0; j < D / 16; j++) r.o[j][h] *= shrink, r.o[j][h + 2] *= shrink;
  }
}

template <int D, bool kFp8>
__device__ __forceinline__ void add_values(running<D> &r, warp_room<D, kFp8> &room, uint32_t valid, const float (&e)[4]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const auto multiply = kFp8 ? mma_half : mma;
  const auto pack = kFp8 ? pack2_half : pack2;
  float f[2] = {1, 1};
  if (kFp8) f[0] = g < valid ? scale_of(room.v, g) * kValueUp : 0.0f, f[1] = g + 8 < valid ? scale_of(room.v, g + 8) * kValueUp : 0.0f;
  const uint32_t p[2] = {turn(pack(e[0] * f[0], e[1] * f[0])), turn(pack(e[2] * f[1], e[3] * f[1]))};
  auto &v = ready_half<D>(room, room.v);
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

/* One split of a row, by a block. kPlaced: the row's query lies in o, its key and value in the cache (gqa_place). */
template <int D, bool kFp8, int kRooms, bool kPlaced>
__device__ __forceinline__ void one_split(decode_shared<D, kFp8, kRooms> &sh, own_token<D> &own, const mm_cu_heads &h, const mm_cu_rows &r,
                                          const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a, const work_space &ws, row_sums &sums,
                                          uint32_t row, uint32_t split) {
  const uint32_t kv_head = blockIdx.x, group = h.heads / h.kv_heads;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  bf16 *o = a.o + ((size_t)row * h.heads + kv_head * group) * D;
  auto put_result = [&](uint32_t head, uint32_t c, float4 v, float, float l) {
    const float f = 1.0f / l;
    *reinterpret_cast<uint2 *>(o + head * D + c) = make_uint2(pack2(f * v.x, f * v.y), pack2(f * v.z, f * v.w));
  };
  const int32_t slot = r.slot[row];
  const uint32_t pos = r.pos[row];
  if (slot < 0) {
    sums.wait(false);
    if (split == 0) {
      for (uint32_t i = threadIdx.x; i < group * D; i += kThreads) o[i] = __float2bfloat16_rn(0.0f);
    }
    return;
  }
  const uint32_t tiles = pos / kKeys + 1; /* pos keys in the cache, and the token's own */
  const uint32_t per_split = ws.cut.part(tiles);
  const uint32_t used = (tiles + per_split - 1) / per_split, end = min(tiles, (split + 1) * per_split);
  if (split >= used) {
    sums.wait(false);
    return;
  }

  auto &rooms = sh.room[warp];
  auto cell_of = [&](uint32_t page, uint32_t at) { return ((size_t)page * h.kv_heads + kv_head) * MM_CU_PAGE + at % MM_CU_PAGE; };
  auto page_of = [&](uint32_t tile) { return tile < end ? kv.table[(size_t)slot * kv.pages_per_slot + tile / (MM_CU_PAGE / kKeys)] : 0; };
  uint32_t next = split * per_split + warp, page = page_of(next); /* the warp's next tile to fetch; its page is known a turn before */
  const uint32_t there = kPlaced ? pos + 1 : pos;                 /* keys in the cache */
  const uint32_t early = kPlaced && !sums.waited ? pos - mm_cu_rows_before(r, row) : pos; /* of them before the step */
  auto fetch_keys = [&](warp_room<D, kFp8> &room) {
    if (next < end) fetch_half<D>(room.k, kv.k, kv.k_scale, cell_of(page, next * kKeys), there - next * kKeys);
    copy_commit();
  };
  auto fetch_values = [&](warp_room<D, kFp8> &room) {
    if (next < end) fetch_half<D>(room.v, kv.v, kv.v_scale, cell_of(page, next * kKeys), there - next * kKeys);
    copy_commit();
    next += kWarps;
    page = page_of(next);
  };
#pragma unroll
  for (int i = 0; i < kRooms; i++) {
    if (kPlaced && next < end && (next + 1) * kKeys > early) sums.wait(true);
    fetch_keys(rooms[i]), fetch_values(rooms[i]);
  }
  const uint16_t *from = &own.q[g][2 * t];
  if constexpr (kPlaced) {
    sums.wait(true);
    from = reinterpret_cast<const uint16_t *>(o) + g * D + 2 * t;
  } else {
    const own_work<D, kFp8> work(h, p, kv_head);
    if (threadIdx.x < h.rotary_dim / 2) sincosf((float)pos * p.inv_freq[threadIdx.x], &own.sine[threadIdx.x], &own.cosine[threadIdx.x]);
    const size_t own_cell = cell_of(kv.table[(size_t)slot * kv.pages_per_slot + pos / MM_CU_PAGE], pos);
    __syncthreads();
    sums.wait(true);
    work.run(own, kv, sums, make_uint2(row, split), kv_head, own_cell, split == used - 1);
    __syncthreads();
  }
  uint32_t q[D / 16][2];
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) q[j][i] = g < group ? *reinterpret_cast<const uint32_t *>(from + j * 16 + i * 8) : 0;
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  running<D> sum;
  uint32_t in = 0;
#pragma unroll 1
  for (uint32_t tile = split * per_split + warp; tile < end; tile += kWarps) {
    auto &room = rooms[in];
    in = in + 1 == kRooms ? 0 : in + 1;
    const uint32_t valid = pos + 1 - tile * kKeys;
    const bool last = !kPlaced && tile == tiles - 1;
    float e[4];
    copy_wait<2 * kRooms - 1>();
    __syncwarp();
    if (last) lay_own<D>(room.k, own.k, own.k_scale, pos % kKeys);
    __syncwarp();
    score<D, kFp8>(e, room, valid, scale, q);
    __syncwarp(); /* all have read the keys */
    fetch_keys(room);
    soften<D>(e, sum);
    copy_wait<2 * kRooms - 1>();
    __syncwarp();
    if (last) lay_own<D>(room.v, own.v, own.v_scale, pos % kKeys);
    __syncwarp();
    add_values<D, kFp8>(sum, room, valid, e);
    __syncwarp();
    fetch_values(room);
  }
  copy_wait<0>();
  __syncthreads();

  partial<D> &mine_of_warp = sh.part[warp];
  constexpr float down = kFp8 ? 1 / kValueUp : 1;
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum.l[i] += __shfl_xor_sync(0xffffffffu, sum.l[i], d);
    if (g == 0) mine_of_warp.m[2 * t + i] = sum.m[i], mine_of_warp.l[2 * t + i] = sum.l[i];
#pragma unroll
    for (int j = 0; j < D / 16; j++)
      mine_of_warp.o[2 * t + i][j * 16 + g] = sum.o[j][i] * down, mine_of_warp.o[2 * t + i][j * 16 + 8 + g] = sum.o[j][i + 2] * down;
  }
  __syncthreads();
  partial<D> *const of_row = used > ws.cut.splits
                                 ? reinterpret_cast<partial<D> *>(ws.far) + ((size_t)ws.first[row] * h.kv_heads + kv_head * used)
                                 : reinterpret_cast<partial<D> *>(ws.part) + ((size_t)row * h.kv_heads + kv_head) * ws.cut.splits;
  partial<D> *const mine = of_row + split;
  if (used == 1) {
    join<D, kWarps>(sh.part, kWarps, group, here{}, put_result);
    return;
  }
  join<D, kWarps>(sh.part, kWarps, group, here{}, [&](uint32_t head, uint32_t c, float4 v, float m, float l) {
    *reinterpret_cast<float4 *>(&mine->o[head][c]) = v;
    if (c == 0) mine->m[head] = m, mine->l[head] = l;
  });
  if (!last_of(ws.counter + row * h.kv_heads + kv_head, used)) return;
  join<D, 12>(of_row, used, group, elsewhere{}, put_result);
}

/* Ahead of verify rows' attention: their queries to o, as the tensor cores take them, their keys and values to the cache. */
template <int D, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    gqa_place(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
              const __grid_constant__ mm_cu_qkv p, const __grid_constant__ mm_cu_gqa a, const __grid_constant__ peer_view ranks) {
  __shared__ own_token<D> own;
  __shared__ uint32_t epoch;
  row_sums sums{ranks, epoch};
  const uint32_t kv_head = blockIdx.x, row = blockIdx.y, group = h.heads / h.kv_heads;
  const int32_t slot = r.slot[row];
  if (slot < 0) {
    sums.wait(true);
    return;
  }
  const uint32_t pos = r.pos[row], page = kv.table[(size_t)slot * kv.pages_per_slot + pos / MM_CU_PAGE];
  const own_work<D, kFp8> work(h, p, kv_head);
  if (threadIdx.x < h.rotary_dim / 2) sincosf((float)pos * p.inv_freq[threadIdx.x], &own.sine[threadIdx.x], &own.cosine[threadIdx.x]);
  __syncthreads();
  sums.wait(true);
  work.run(own, kv, sums, make_uint2(row, 0), kv_head, mm_cu_cell(page, h.kv_heads, kv_head) + pos % MM_CU_PAGE, true);
  __syncthreads();
  uint4 *const to = reinterpret_cast<uint4 *>(a.o + ((size_t)row * h.heads + kv_head * group) * D);
  for (uint32_t i = threadIdx.x; i < group * D / 8; i += kThreads)
    to[i] = *reinterpret_cast<const uint4 *>(&own.q[i / (D / 8)][i % (D / 8) * 8]);
}

template <int D, bool kFp8, int kRooms, bool kPlaced>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_step(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
             const __grid_constant__ mm_cu_qkv p, const __grid_constant__ mm_cu_gqa a, const __grid_constant__ work_space ws,
             const __grid_constant__ peer_view ranks) {
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<decode_shared<D, kFp8, kRooms> *>(shared_raw);
  __shared__ own_token<D> own;
  uint2 more = ws.item ? ws.item[blockIdx.y + gridDim.y * blockIdx.z] : make_uint2(0, 0); /* where they are, and how many */
  uint2 now = make_uint2(blockIdx.y, blockIdx.z), next = now;                             /* the next one is known a turn before */
  __shared__ uint32_t epoch;
  row_sums sums{ranks, epoch};
#pragma unroll 1
  for (;;) {
    if (more.y) next = ws.item[more.x];
    one_split<D, kFp8, kRooms, kPlaced>(sh, own, h, r, kv, p, a, ws, sums, now.x, now.y);
    if (!more.y) return;
    now = next, more.x++, more.y--;
    __syncthreads();
  }
}

/* The work space: counters of max_tokens rows, then partial results. The counters lie at a place that depends on max_tokens, never
 * on the step, so partial results of other steps do not overlap them. */
size_t counter_bytes(const mm_cu_heads &h, uint32_t max_tokens) {
  return ((size_t)max_tokens * h.kv_heads * sizeof(uint32_t) + 255) / 256 * 256;
}

template <int D>
constexpr size_t kStatic = sizeof(own_token<D>) + 2 * kWarps * sizeof(float) + 160; /* and the last block's word, places between them */
static_assert(kStatic<128> + sizeof(decode_shared<128, true, 1>) <= MM_CU_SHARED_LEAST, "one room fits everywhere");
static_assert(kStatic<128> + sizeof(decode_shared<128, false, 1>) <= MM_CU_SHARED_LEAST, "one room fits everywhere");

template <int D, bool kFp8, bool kPlaced>
cudaError_t run_step(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                     const work_space &ws, cudaStream_t s) {
  const dim3 grid(h.kv_heads, a.tokens, ws.cut.splits);
  constexpr size_t kMost = sizeof(decode_shared<D, kFp8, kMostRooms>);
  const peer_view ranks = p.ranks ? mm_cu_peers_view(p.ranks) : peer_view{};
  if (hopper() || kStatic<D> + kMost <= mm_cu_shared_most())
    return launch(gqa_step<D, kFp8, kMostRooms, kPlaced>, grid, kThreads, kMost, s, h, r, kv, p, a, ws, ranks);
  return launch(gqa_step<D, kFp8, 1, kPlaced>, grid, kThreads, sizeof(decode_shared<D, kFp8, 1>), s, h, r, kv, p, a, ws, ranks);
}

template <int D, bool kFp8>
cudaError_t run_rows(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                     const work_space &ws, cudaStream_t s) {
  if (!a.verifies) return run_step<D, kFp8, false>(h, r, kv, p, a, ws, s);
  const peer_view ranks = p.ranks ? mm_cu_peers_view(p.ranks) : peer_view{};
  const cudaError_t e = launch(gqa_place<D, kFp8>, dim3(h.kv_heads, a.tokens), kThreads, 0, s, h, r, kv, p, a, ranks);
  mm_cu_qkv placed = p;
  placed.ranks = nullptr;
  return e != cudaSuccess ? e : run_step<D, kFp8, true>(h, r, kv, placed, a, ws, s);
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a, const work_space &ws,
                cudaStream_t s) {
  return kv.k_scale ? run_rows<D, true>(h, r, kv, p, a, ws, s) : run_rows<D, false>(h, r, kv, p, a, ws, s);
}

}  // namespace

/* Rows that are not split leave no partial results, and above some number none are: those of all rows that are. Each launch asks, so the
 * last answer is kept. */
static size_t near_parts(const mm_cu_heads &h, uint32_t max_tokens) {
  thread_local struct {
    uint32_t kv_heads, max_tokens, blocks;
    size_t most;
  } last = {};
  const uint32_t blocks = multiprocessors();
  if (last.kv_heads == h.kv_heads && last.max_tokens == max_tokens && last.blocks == blocks) return last.most;
  last = {h.kv_heads, max_tokens, blocks, 0};
  for (uint32_t rows = 1; rows <= max_tokens; rows++) {
    const uint32_t splits = mm_cu_gqa_splits(h, rows);
    if (splits > 1) last.most = max(last.most, (size_t)rows * h.kv_heads * splits);
  }
  return last.most;
}

static size_t part_bytes(const mm_cu_heads &h) { return h.head_dim == 64 ? sizeof(partial<64>) : sizeof(partial<128>); }

size_t mm_cu_gqa_work(const mm_cu_heads &h, uint32_t max_tokens, const mm_cu_far_plan &plan) {
  return counter_bytes(h, max_tokens) + (near_parts(h, max_tokens) + (size_t)plan.items * h.kv_heads) * part_bytes(h);
}

cudaError_t mm_cu_gqa_decode(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                             cudaStream_t s) {
  if (h.heads % h.kv_heads != 0 || h.heads / h.kv_heads > kGroup || h.rotary_dim > h.head_dim || h.rotary_dim % 16 != 0)
    return cudaErrorNotSupported;
  if (a.tokens > a.max_tokens) return cudaErrorInvalidValue;
  work_space ws = {static_cast<uint32_t *>(a.work), nullptr, mm_cu_cut_rows(h, a.tokens, a.far.plan)};
  char *const parts = static_cast<char *>(a.work) + counter_bytes(h, a.max_tokens);
  ws.part = reinterpret_cast<float *>(parts), ws.far = reinterpret_cast<float *>(parts + near_parts(h, a.max_tokens) * part_bytes(h));
  ws.first = a.far.first, ws.item = a.far.item;
  if (h.head_dim == 128) return run<128>(h, r, kv, p, a, ws, s);
  if (h.head_dim == 64) return run<64>(h, r, kv, p, a, ws, s);
  return cudaErrorNotSupported;
}
