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
#include "runtime/cuda/attention/gqa.h"
#include "runtime/cuda/attention/gqa_tiles.cuh"

using namespace gqa_tiles;

namespace {

/* The kernel's parameters. */
struct step_job {
  const mm_cu_heads &h;
  const mm_cu_rows &r;
  const mm_cu_kv &kv;
  const mm_cu_qkv &p;
  const mm_cu_gqa &a;
  const work_space &ws;
};

/* One split of a row, by a block. */
template <int D, bool kFp8, int kStages>
__device__ __forceinline__ void one_split(decode_shared<D, kFp8, kStages> &sh, own_token<D> &own, const step_job &job, row_sums &sums,
                                          uint32_t row, uint32_t split) {
  const mm_cu_heads &h = job.h;
  const mm_cu_kv &kv = job.kv;
  const work_space &ws = job.ws;
  const uint32_t kv_head = blockIdx.x, group = h.heads / h.kv_heads;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  bf16 *o = job.a.o + ((size_t)row * h.heads + kv_head * group) * D;
  auto put_result = [&](uint32_t head, uint32_t c, float4 v, float, float l) {
    const float f = 1.0f / l;
    *reinterpret_cast<uint2 *>(o + head * D + c) = make_uint2(pack2(f * v.x, f * v.y), pack2(f * v.z, f * v.w));
  };
  const int32_t slot = job.r.slot[row];
  const uint32_t pos = job.r.pos[row];
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

  auto &stages = sh.stage[warp];
  auto cell_of = [&](uint32_t page, uint32_t at) { return ((size_t)page * h.kv_heads + kv_head) * MM_CU_PAGE + at % MM_CU_PAGE; };
  auto page_of = [&](uint32_t tile) { return tile < end ? kv.table[(size_t)slot * kv.pages_per_slot + tile / (MM_CU_PAGE / kKeys)] : 0; };
  uint32_t next = split * per_split + warp, page = page_of(next); /* the warp's next tile to fetch; its page is known a turn before */
  auto fetch_keys = [&](warp_stage<D, kFp8> &stage) {
    if (next < end) fetch_half<D>(stage.k, kv.k, kv.k_scale, cell_of(page, next * kKeys), pos - next * kKeys);
    copy_commit();
  };
  auto fetch_values = [&](warp_stage<D, kFp8> &stage) {
    if (next < end) fetch_half<D>(stage.v, kv.v, kv.v_scale, cell_of(page, next * kKeys), pos - next * kKeys);
    copy_commit();
    next += kWarps;
    page = page_of(next);
  };
#pragma unroll
  for (int i = 0; i < kStages; i++) fetch_keys(stages[i]), fetch_values(stages[i]);
  const own_work<D, kFp8> work(h, job.p, kv_head);
  if (threadIdx.x < h.rotary_dim / 2) sincosf((float)pos * job.p.inv_freq[threadIdx.x], &own.sine[threadIdx.x], &own.cosine[threadIdx.x]);
  const size_t own_cell = cell_of(kv.table[(size_t)slot * kv.pages_per_slot + pos / MM_CU_PAGE], pos);
  __syncthreads();
  sums.wait(true);
  work.run(own, kv, sums, make_uint2(row, split), kv_head, own_cell, split == used - 1);
  __syncthreads();
  uint32_t q[D / 16][2];
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) q[j][i] = g < group ? *reinterpret_cast<const uint32_t *>(&own.q[g][j * 16 + i * 8 + 2 * t]) : 0;
  }
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  running<D> sum;
  uint32_t in = 0;
#pragma unroll 1
  for (uint32_t tile = split * per_split + warp; tile < end; tile += kWarps) {
    auto &stage = stages[in];
    in = in + 1 == kStages ? 0 : in + 1;
    const uint32_t valid = pos + 1 - tile * kKeys;
    const bool last = tile == tiles - 1;
    float e[4];
    copy_wait<2 * kStages - 1>();
    __syncwarp();
    if (last) lay_own<D>(stage.k, own.k, own.k_scale, pos % kKeys);
    __syncwarp();
    score<D, kFp8>(e, stage, valid, scale, q);
    __syncwarp(); /* all have read the keys */
    fetch_keys(stage);
    soften<D>(e, sum);
    copy_wait<2 * kStages - 1>();
    __syncwarp();
    if (last) lay_own<D>(stage.v, own.v, own.v_scale, pos % kKeys);
    __syncwarp();
    add_values<D, kFp8>(sum, stage, valid, e);
    __syncwarp();
    fetch_values(stage);
  }
  copy_wait<0>();
  __syncthreads();

  put_warp<D, kFp8>(sh.part[warp], sum);
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

template <int D, bool kFp8, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_step(const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_rows r, const __grid_constant__ mm_cu_kv kv,
             const __grid_constant__ mm_cu_qkv p, const __grid_constant__ mm_cu_gqa a, const __grid_constant__ work_space ws,
             const __grid_constant__ peer_view ranks) {
  extern __shared__ __align__(128) uint8_t shared_raw[];
  auto &sh = *reinterpret_cast<decode_shared<D, kFp8, kStages> *>(shared_raw);
  __shared__ own_token<D> own;
  uint2 more = ws.item ? ws.item[blockIdx.y + gridDim.y * blockIdx.z] : make_uint2(0, 0); /* where they are, and how many */
  uint2 now = make_uint2(blockIdx.y, blockIdx.z), next = now;                             /* the next one is known a turn before */
  __shared__ uint32_t epoch;
  row_sums sums{ranks, epoch};
#pragma unroll 1
  for (;;) {
    if (more.y) next = ws.item[more.x];
    one_split<D, kFp8, kStages>(sh, own, {h, r, kv, p, a, ws}, sums, now.x, now.y);
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

template <int D, bool kFp8>
cudaError_t run_step(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                     const work_space &ws, cudaStream_t s) {
  const dim3 grid(h.kv_heads, a.tokens, ws.cut.splits);
  constexpr size_t kMost = sizeof(decode_shared<D, kFp8, kMostStages>);
  const peer_view ranks = p.ranks ? mm_cu_peers_view(p.ranks) : peer_view{};
  if (hopper() || kStatic<D> + kMost <= mm_cu_shared_most())
    return launch(gqa_step<D, kFp8, kMostStages>, grid, kThreads, kMost, s, h, r, kv, p, a, ws, ranks);
  return launch(gqa_step<D, kFp8, 1>, grid, kThreads, sizeof(decode_shared<D, kFp8, 1>), s, h, r, kv, p, a, ws, ranks);
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a, const work_space &ws,
                cudaStream_t s) {
  return kv.k_scale ? run_step<D, true>(h, r, kv, p, a, ws, s) : run_step<D, false>(h, r, kv, p, a, ws, s);
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
  if (a.verifies) return mm_cu_gqa_verify(h, r, kv, p, a, {ws.counter, ws.part, ws.far, ws.cut}, s);
  if (h.head_dim == 128) return run<128>(h, r, kv, p, a, ws, s);
  if (h.head_dim == 64) return run<64>(h, r, kv, p, a, ws, s);
  return cudaErrorNotSupported;
}
