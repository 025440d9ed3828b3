/* Attention of verify rows: up to MM_CU_VERIFY consecutive rows of a sequence, each of which sees the ones before it. Two kernels.
 *
 * gqa_place, grid (kv head, row): norm and RoPE as a single token's attention has them; queries go to o, keys and values to the cache.
 * gqa_together, blocks as in gqa_decode.cu: an item is up to kTogether rows of a sequence whose parts are equally long
 * (mm_cu_gqa_cut.part), so that their keys are read once. mm_cu_gqa_verify_list picks the number of rows; rows of short contexts are items
 * of their own, which fills all multiprocessors, and their repeated reads hit L2.
 *
 * Each row's sums are those of a single token in a step of as many rows, in the same order: the same bits. Only tiles before the sequence's
 * first row are fetched before gqa_place is waited for. A block holds running sums of all its rows, 36 registers each for D = 128; queries
 * lie in shared memory, rows (D + 8) · 2 bytes from one another. */
#include "runtime/cuda/attention/gqa.h"
#include "runtime/cuda/attention/gqa_tiles.cuh"

using namespace gqa_tiles;

namespace {

constexpr int kTogether = MM_CU_TOGETHER;

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

/* Rows [row, row + count) of one sequence, and which split of their keys. */
struct verify_item {
  uint32_t row, count, split;
};

/* Its rows: the first stands at pos; heads of a kv head. */
struct rows_seen {
  uint32_t pos, count, group;
};

template <int D>
using query_rows = uint16_t[kTogether][kGroup][D + 8];

/* Scores of a tile for the rows that see some of it, as score() gives them for one. */
template <int D, bool kFp8>
__device__ __forceinline__ void score_rows(float (&e)[kTogether][4], warp_stage<D, kFp8> &stage, uint32_t at, rows_seen rows, float scale,
                                           const query_rows<D> &q) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto multiply = kFp8 ? mma_half : mma;
  auto &k = ready_half<D>(stage, stage.k);
  float s[kTogether][2][4] = {};
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    uint32_t a[4];
    ldmatrix4(a, piece<D>(k, lane % 16, 2 * j + lane / 16));
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (i >= rows.count) continue;
      const uint16_t *const from = &q[i][g][j * 16 + 2 * t];
      const uint32_t low = g < rows.group ? *reinterpret_cast<const uint32_t *>(from) : 0,
                     high = g < rows.group ? *reinterpret_cast<const uint32_t *>(from + 8) : 0;
      multiply(s[i][j % 2], a, low, high);
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether; i++) {
    if (i >= rows.count) continue;
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const uint32_t key = g + x / 2 * 8;
      e[i][x] = at + key <= rows.pos + i ? (s[i][0][x] + s[i][1][x]) * (scale * scale_of(stage.k, key)) : -INFINITY;
    }
  }
}

/* And their values, as add_values() adds them for one. */
template <int D, bool kFp8>
__device__ __forceinline__ void add_rows(running<D> (&sum)[kTogether], warp_stage<D, kFp8> &stage, uint32_t at, rows_seen rows,
                                         const float (&e)[kTogether][4]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  const auto multiply = kFp8 ? mma_half : mma;
  const auto pack = kFp8 ? pack2_half : pack2;
  uint32_t p[kTogether][2];
#pragma unroll
  for (int i = 0; i < kTogether; i++) {
    if (i >= rows.count) continue;
    float f[2] = {1, 1};
    if (kFp8) {
      f[0] = at + g <= rows.pos + i ? scale_of(stage.v, g) * kValueUp : 0.0f;
      f[1] = at + g + 8 <= rows.pos + i ? scale_of(stage.v, g + 8) * kValueUp : 0.0f;
    }
    p[i][0] = turn(pack(e[i][0] * f[0], e[i][1] * f[0])), p[i][1] = turn(pack(e[i][2] * f[1], e[i][3] * f[1]));
  }
  auto &v = ready_half<D>(stage, stage.v);
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    uint32_t a[4];
    ldmatrix4_trans(a, piece<D>(v, lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (i < rows.count && at <= rows.pos + i) multiply(sum[i].o[j], a, p[i][0], p[i][1]);
    }
  }
}

/* What all parts of the launch read. */
struct verify_step {
  const mm_cu_heads &h;
  const mm_cu_rows &r;
  const mm_cu_kv &kv;
  const mm_cu_gqa &a;
  const work_space &ws;
};

/* The warps' partial results of a part become the row's, and those of the last part to come its output. */
template <int D>
__device__ __forceinline__ void end_row(const partial<D> *warps, const verify_step &s, uint32_t row, uint32_t split, uint32_t used) {
  const mm_cu_heads &h = s.h;
  const work_space &ws = s.ws;
  const uint32_t kv_head = blockIdx.x, group = h.heads / h.kv_heads;
  bf16 *const o = s.a.o + ((size_t)row * h.heads + kv_head * group) * D;
  const auto put_result = [&](uint32_t head, uint32_t c, float4 v, float, float l) {
    const float f = 1.0f / l;
    *reinterpret_cast<uint2 *>(o + head * D + c) = make_uint2(pack2(f * v.x, f * v.y), pack2(f * v.z, f * v.w));
  };
  if (used == 1) {
    join<D, kWarps>(warps, kWarps, group, here{}, put_result);
    return;
  }
  partial<D> *const of_row = used > ws.cut.splits
                                 ? reinterpret_cast<partial<D> *>(ws.far) + ((size_t)ws.first[row] * h.kv_heads + kv_head * used)
                                 : reinterpret_cast<partial<D> *>(ws.part) + ((size_t)row * h.kv_heads + kv_head) * ws.cut.splits;
  partial<D> *const mine = of_row + split;
  join<D, kWarps>(warps, kWarps, group, here{}, [&](uint32_t head, uint32_t c, float4 v, float m, float l) {
    *reinterpret_cast<float4 *>(&mine->o[head][c]) = v;
    if (c == 0) mine->m[head] = m, mine->l[head] = l;
  });
  if (last_of(ws.counter + row * h.kv_heads + kv_head, used)) join<D, 12>(of_row, used, group, elsewhere{}, put_result);
}

/* The launch's wait for gqa_place. */
struct place_wait {
  bool waited = false;
  __device__ __forceinline__ void operator()() {
    if (!waited) grid_wait_and_launch_next();
    waited = true;
  }
};

/* The tiles that a warp fetches of a part. */
template <int D, bool kFp8>
struct warp_tiles {
  const mm_cu_kv &kv;
  const uint32_t *table;        /* of the slot */
  uint32_t kv_heads, keys, end; /* keys of the sequence so far, later ones are zeros; first tile after the part */
  uint32_t next, page;          /* the next tile to fetch; its page is known a turn before */

  __device__ __forceinline__ warp_tiles(const verify_step &s, int32_t slot, uint32_t count, uint32_t from, uint32_t to)
      : kv(s.kv), table(s.kv.table + (size_t)slot * s.kv.pages_per_slot), kv_heads(s.h.kv_heads), keys(count), end(to), next(from) {
    turn_page();
  }
  __device__ __forceinline__ void turn_page() { page = next < end ? table[next / (MM_CU_PAGE / kKeys)] : 0; }
  __device__ __forceinline__ size_t cell() const { return mm_cu_cell(page, kv_heads, blockIdx.x) + next * kKeys % MM_CU_PAGE; }
  __device__ __forceinline__ void fetch_keys(warp_stage<D, kFp8> &stage) {
    if (next < end) fetch_half<D>(stage.k, kv.k, kv.k_scale, cell(), keys - next * kKeys);
    copy_commit();
  }
  __device__ __forceinline__ void fetch_values(warp_stage<D, kFp8> &stage) {
    if (next < end) fetch_half<D>(stage.v, kv.v, kv.v_scale, cell(), keys - next * kKeys);
    copy_commit();
    next += kWarps;
    turn_page();
  }
};

/* The part's queries of this kv head, from where gqa_place has put them. */
template <int D>
__device__ __forceinline__ void load_queries(query_rows<D> &q, const verify_step &s, const verify_item &part) {
  const uint32_t group = s.h.heads / s.h.kv_heads;
  const uint4 *const from = reinterpret_cast<const uint4 *>(s.a.o) + (size_t)blockIdx.x * group * (D / 8);
  for (uint32_t i = threadIdx.x; i < part.count * group * (D / 8); i += kThreads) {
    const uint32_t head = i / (D / 8), c = i % (D / 8), row = head / group;
    *reinterpret_cast<uint4 *>(&q[row][head % group][c * 8]) =
        __ldcg(from + ((size_t)(part.row + row) * s.h.heads + head % group) * (D / 8) + c);
  }
  __syncthreads();
}

/* Phases: padding; prefetch; wait for gqa_place and load queries; loop over keys; store and join. All rows of the item have the last
 * row's part length; rows that end before this split are not in the item. */
template <int D, bool kFp8, int kStages>
__device__ __forceinline__ void one_part(decode_shared<D, kFp8, kStages> &sh, query_rows<D> &q, const verify_step &s, place_wait &wait,
                                         const verify_item &part) {
  const uint32_t group = s.h.heads / s.h.kv_heads, warp = threadIdx.x / 32;
  const int32_t slot = s.r.slot[part.row];
  const uint32_t pos = s.r.pos[part.row];
  if (slot < 0) {
    wait();
    bf16 *const o = s.a.o + ((size_t)part.row * s.h.heads + blockIdx.x * group) * D;
    for (uint32_t i = threadIdx.x; part.split == 0 && i < group * D; i += kThreads) o[i] = __float2bfloat16_rn(0.0f);
    return;
  }
  const uint32_t tiles = (pos + part.count - 1) / kKeys + 1, per_split = s.ws.cut.part(tiles), first = part.split * per_split + warp;
  if (part.split * per_split >= tiles) {
    wait();
    return;
  }
  auto &stages = sh.stage[warp];
  warp_tiles<D, kFp8> to_come(s, slot, pos + part.count, first, min(tiles, (part.split + 1) * per_split));
  const uint32_t early = wait.waited ? pos + part.count : pos - mm_cu_rows_before(s.r, part.row); /* of the cache before the step */
#pragma unroll
  for (int i = 0; i < kStages; i++) {
    if (to_come.next < to_come.end && (to_come.next + 1) * kKeys > early) wait();
    to_come.fetch_keys(stages[i]), to_come.fetch_values(stages[i]);
  }
  wait();
  load_queries<D>(q, s, part);
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  running<D> sum[kTogether];
  uint32_t in = 0;
#pragma unroll 1
  for (uint32_t tile = first; tile < to_come.end; tile += kWarps) {
    auto &stage = stages[in];
    in = in + 1 == kStages ? 0 : in + 1;
    const uint32_t at = tile * kKeys;
    float e[kTogether][4];
    copy_wait<2 * kStages - 1>();
    __syncwarp();
    score_rows<D, kFp8>(e, stage, at, {pos, part.count, group}, scale, q);
    __syncwarp(); /* all have read the keys */
    to_come.fetch_keys(stage);
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (i < part.count && at <= pos + i) soften<D, true>(e[i], sum[i]);
    }
    copy_wait<2 * kStages - 1>();
    __syncwarp();
    add_rows<D, kFp8>(sum, stage, at, {pos, part.count, group}, e);
    __syncwarp();
    to_come.fetch_values(stage);
  }
  copy_wait<0>();
#pragma unroll
  for (int i = 0; i < kTogether; i++) {
    if (i >= part.count) continue;
    __syncthreads();
    put_warp<D, kFp8>(sh.part[warp], sum[i]);
    __syncthreads();
    end_row<D>(sh.part, s, part.row + i, part.split, ((pos + i) / kKeys + per_split) / per_split);
  }
}

template <int D, bool kFp8, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_together(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
                 const __grid_constant__ mm_cu_gqa a, const __grid_constant__ work_space ws) {
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<decode_shared<D, kFp8, kStages> *>(shared_raw);
  __shared__ __align__(16) query_rows<D> q;
  const verify_step step = {h, r, kv, a, ws};
  place_wait wait;
  if (!ws.item) {
    one_part<D, kFp8, kStages>(sh, q, step, wait, {blockIdx.y, 1, blockIdx.z});
    return;
  }
  uint2 more = ws.item[blockIdx.y + gridDim.y * blockIdx.z]; /* x: index of the block's first item, y: number of items */
  uint2 next = more.y ? ws.item[more.x] : make_uint2(0, 0);  /* prefetched one iteration ahead */
#pragma unroll 1
  for (; more.y; more.x++, more.y--) {
    const uint2 now = next;
    if (more.y > 1) next = ws.item[more.x + 1];
    one_part<D, kFp8, kStages>(sh, q, step, wait, {now.x & 0xffff, now.x >> 16, now.y});
    __syncthreads();
  }
  wait();
}

template <int D>
constexpr size_t kStatic = sizeof(query_rows<D>) + 160;
static_assert(kStatic<128> + sizeof(decode_shared<128, true, 1>) <= MM_CU_SHARED_LEAST, "one stage fits on every device");
static_assert(kStatic<128> + sizeof(decode_shared<128, false, 1>) <= MM_CU_SHARED_LEAST, "one stage fits on every device");

template <int D, bool kFp8>
cudaError_t run_rows(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                     const work_space &ws, cudaStream_t s) {
  const peer_view ranks = p.ranks ? mm_cu_peers_view(p.ranks) : peer_view{};
  const cudaError_t e = launch(gqa_place<D, kFp8>, dim3(h.kv_heads, a.tokens), kThreads, 0, s, h, r, kv, p, a, ranks);
  if (e != cudaSuccess) return e;
  const dim3 grid(h.kv_heads, a.tokens, ws.cut.splits);
  constexpr size_t kMost = sizeof(decode_shared<D, kFp8, kMostStages>);
  if (hopper() || kStatic<D> + kMost <= mm_cu_shared_most())
    return launch(gqa_together<D, kFp8, kMostStages>, grid, kThreads, kMost, s, h, r, kv, a, ws);
  return launch(gqa_together<D, kFp8, 1>, grid, kThreads, sizeof(decode_shared<D, kFp8, 1>), s, h, r, kv, a, ws);
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a, const work_space &ws,
                cudaStream_t s) {
  return kv.k_scale ? run_rows<D, true>(h, r, kv, p, a, ws, s) : run_rows<D, false>(h, r, kv, p, a, ws, s);
}

}  // namespace

cudaError_t mm_cu_gqa_verify(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                             const mm_cu_gqa_scratch &scratch, cudaStream_t s) {
  const work_space ws = {scratch.counter, scratch.part, scratch.cut, scratch.far, a.far.first, a.far.item};
  if (h.head_dim == 128) return run<128>(h, r, kv, p, a, ws, s);
  return h.head_dim == 64 ? run<64>(h, r, kv, p, a, ws, s) : cudaErrorNotSupported;
}
