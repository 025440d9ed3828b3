/* gqa_prefill.cu's attention on sm_90a, a bf16 cache.
 *
 * A block takes a tile's rows of two heads that share keys, a group of 128 threads each, and goes on with further tiles while there are
 * any. One warp issues TMA loads of queries, keys and values in two stages each, blocks of 128 keys. A group multiplies q·kᵀ of one block
 * and p·v of the block before in one go (wgmma) while the other group exponentiates: scores and probabilities stay in registers. Blocks of
 * keys start at multiples of 128, so a row's bits do not depend on its tile. */
#include "runtime/cuda/attention/gqa.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"

namespace {

constexpr uint32_t kThreads = 384, kGroups = 2, kKeys = 128, kStages = 2, kStrip = 128; /* bytes of a row */

/* The next tile of the groups; blocks 0: none. */
struct job {
  uint32_t first, rows, pos, blocks; /* rows of the step; pos: of the first */
  uint32_t head, heads;              /* the first of the heads, and how many */
};
/* Rows in strips of 64 columns, swizzled. */
template <int D>
struct gqa_shared {
  uint8_t q[kStages][kGroups][D / 64][MM_CU_TILE * kStrip], k[kStages][D / 64][kKeys * kStrip], v[kStages][D / 64][kKeys * kStrip];
  job next[kStages];
  uint64_t q_full[kStages], q_empty[kStages], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], v_here;
};
struct gqa_maps {
  CUtensorMap q, k, v;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr uint32_t kPages = kKeys / MM_CU_PAGE; /* of a block */

/* Which of the ring's places is next, and the parity of its phase. */
struct place {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void go() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Between the groups: my turn to multiply, and the other's. */
__device__ __forceinline__ void turn_wait(uint32_t group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void turn_pass(uint32_t group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

/* One warp. Tiles come with the longest first: blocks take them to and fro, so that each gets as much as the others. */
template <int D>
__device__ __forceinline__ void produce(const gqa_maps &maps, const mm_cu_heads &h, const mm_cu_tiles &tiles, const mm_cu_kv &kv,
                                        gqa_shared<D> &sh) {
  const uint32_t lane = threadIdx.x, share = h.heads / h.kv_heads, parts = (share + kGroups - 1) / kGroups, each = h.kv_heads * parts,
                 jobs = tiles.count * each;
  uint32_t here_parity = 0;
  place qp, kp, vp;
  for (uint32_t round = 0; round * gridDim.x < jobs; round++) {
    const uint32_t index = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (index >= jobs) continue;
    const uint2 tile = tiles.tile[index / each];
    const mm_cu_span span = tiles.span[tile.x];
    if (span.slot < 0) continue;
    const uint32_t kv_head = index % each / parts, head = kv_head * share + index % each % parts * kGroups,
                   heads = min(kGroups, (kv_head + 1) * share - head), rows = min(span.count - tile.y, (uint32_t)MM_CU_TILE),
                   first = span.first + tile.y, pos = span.pos + tile.y, keys = pos + rows, blocks = (keys + kKeys - 1) / kKeys,
                   pages = (keys + MM_CU_PAGE - 1) / MM_CU_PAGE;
    mbarrier_wait(shared_address(&sh.q_empty[qp.stage]), qp.parity ^ 1);
    if (lane == 0) {
      const uint32_t q_full = shared_address(&sh.q_full[qp.stage]);
      sh.next[qp.stage] = {first, rows, pos, blocks, head, heads};
      mbarrier_arrive_expect_tx(q_full, heads * sizeof sh.q[0][0]);
      for (uint32_t i = 0; i < heads; i++) {
        for (uint32_t c = 0; c < D / 64; c++)
          tma_load(shared_address(sh.q[qp.stage][i][c]), &maps.q, ((head + i) * (D / 64) + c) * kStrip, first, q_full);
      }
    }
    qp.go();
    const uint32_t *table = kv.table + (size_t)span.slot * kv.pages_per_slot;
    uint32_t ids = 0; /* lane i: of page i of each 32 */
    auto copy_block = [&](const CUtensorMap &map, uint32_t block, uint8_t(*to)[kKeys * kStrip], uint32_t barrier) {
#pragma unroll
      for (uint32_t p = 0; p < kPages; p++) {
        const uint32_t page = block * kPages + p, id = __shfl_sync(0xffffffffu, ids, page % 32);
        if (lane != 0 || page >= pages) continue;
        for (uint32_t c = 0; c < D / 64; c++)
          tma_load(shared_address(to[c]) + p * MM_CU_PAGE * kStrip, &map, c * kStrip, (id * h.kv_heads + kv_head) * MM_CU_PAGE, barrier);
      }
    };
    auto bytes_of = [&](uint32_t block) { return min(kPages, pages - block * kPages) * MM_CU_PAGE * D * (uint32_t)sizeof(bf16); };
    auto fetch_keys = [&](uint32_t block) {
      mbarrier_wait(shared_address(&sh.k_empty[kp.stage]), kp.parity ^ 1);
      const uint32_t full = shared_address(&sh.k_full[kp.stage]);
      if (lane == 0) mbarrier_arrive_expect_tx(full, bytes_of(block));
      copy_block(maps.k, block, sh.k[kp.stage], full);
      kp.go();
    };
    auto fetch_values = [&](uint32_t block) {
      mbarrier_wait(shared_address(&sh.v_empty[vp.stage]), vp.parity ^ 1);
      const uint32_t valid = keys - block * kKeys;
      const bool whole = valid >= kKeys;
      const uint32_t full = shared_address(&sh.v_full[vp.stage]), here = whole ? full : shared_address(&sh.v_here);
      if (lane == 0) mbarrier_arrive_expect_tx(here, bytes_of(block));
      copy_block(maps.v, block, sh.v[vp.stage], here);
      if (!whole) { /* values past the end meet probabilities of zero: they must be finite */
        mbarrier_wait(here, here_parity), here_parity ^= 1;
        for (uint32_t at = valid * 8 + lane; at < kKeys * 8; at += 32) {
          for (uint32_t c = 0; c < D / 64; c++) reinterpret_cast<uint4 *>(sh.v[vp.stage][c])[at] = make_uint4(0, 0, 0, 0);
        }
        stores_before_wgmma();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full);
      }
      vp.go();
    };
    auto read_table = [&](uint32_t page) { ids = page + lane < pages ? table[page + lane] : 0; };
    read_table(0);
    fetch_keys(0);
    for (uint32_t j = 0; j < blocks; j++) {
      if (j + 1 < blocks) {
        const uint32_t before = ids;
        if ((j + 1) * kPages % 32 == 0) read_table((j + 1) * kPages);
        fetch_keys(j + 1);
        const uint32_t after = ids;
        ids = before;
        fetch_values(j);
        ids = after;
      } else {
        fetch_values(j);
      }
    }
  }
  mbarrier_wait(shared_address(&sh.q_empty[qp.stage]), qp.parity ^ 1);
  if (lane == 0) {
    sh.next[qp.stage].blocks = 0;
    mbarrier_arrive(shared_address(&sh.q_full[qp.stage]));
  }
}

/* Scores to probabilities, in base 2 below the rows' maxima so far; shrink: what is due to all before. */
__device__ __forceinline__ void soften(float (&s)[kKeys / 2], float (&top)[2], float (&sum)[2], float (&shrink)[2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float m[4] = {top[half], top[half], top[half], top[half]}, l[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) m[n % 4] = fmaxf(m[n % 4], fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    float now = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
    now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2)); /* key 0 is every row's: finite from the first block on */
    shrink[half] = exp2_flushed((top[half] - now) * scale);
    top[half] = now;
    const float less = now * scale;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float &x = s[4 * n + 2 * half + i];
        x = exp2_flushed(fmaf(x, scale, -less));
        l[(2 * n + i) % 4] += x;
      }
    }
    sum[half] = fmaf(sum[half], shrink[half], (l[0] + l[1]) + (l[2] + l[3]));
  }
}

template <int D>
__device__ __forceinline__ void consume(const mm_cu_heads &h, bf16 *out, gqa_shared<D> &sh, uint32_t group) {
  const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t4 = lane % 4, row = warp * 16 + g; /* and row + 8 */
  const float scale = rsqrtf((float)D) * 1.4426950408889634f;
  place qp, kp, vp;
  if (group == 1) turn_pass(1);
  auto let_go = [&](uint64_t &barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&barrier));
  };
  for (;; qp.go()) {
    mbarrier_wait(shared_address(&sh.q_full[qp.stage]), qp.parity);
    /* racecheck sets lane 31's read against the producer's next write: it does not see that __syncwarp puts a warp's reads before its lane
     * 0 arrives at q_empty (let_go), for which the producer waits. */
    const job now = sh.next[qp.stage];
    const uint32_t q = shared_address(sh.q[qp.stage][group]);
    if (now.blocks == 0) break;
    float s[kKeys / 2], o[D / 2] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, shrink[2];
    uint32_t p[kKeys / 16][4];
    auto scores = [&]() {
      const uint32_t k = shared_address(sh.k[kp.stage]);
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < D / 16; i++)
        wgmma128(s, operand(q + i / 4 * MM_CU_TILE * kStrip + i % 4 * 32), operand(k + i / 4 * kKeys * kStrip + i % 4 * 32), i);
      wgmma_commit();
    };
    auto values = [&]() {
      const uint32_t v = shared_address(sh.v[vp.stage]);
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kKeys / 16; i++) {
        if constexpr (D == 128) {
          wgmma128_turned(o, p[i], operand(v + i * 16 * kStrip, kKeys * kStrip));
        } else {
          wgmma64_turned(o, p[i], operand(v + i * 16 * kStrip));
        }
      }
      wgmma_commit();
    };
    auto hide = [&](uint32_t block) { /* keys after a row's own */
                                      if ((block + 1) * kKeys <= now.pos + 1) return;
                                      const int last = (int)(now.pos + row) - (int)(block * kKeys + 2 * t4);
#pragma unroll
                                      for (int i = 0; i < kKeys / 2; i++)
                                        s[i] = i / 4 * 8 + i % 2 > last + i % 4 / 2 * 8 ? -INFINITY : s[i];
    };
    auto pack = [&]() {
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) p[i / 4][i % 4] = pack2(s[2 * i], s[2 * i + 1]);
    };
    mbarrier_wait(shared_address(&sh.k_full[kp.stage]), kp.parity);
    scores();
    wgmma_wait<0>(s);
    let_go(sh.k_empty[kp.stage]), kp.go();
    hide(0);
    soften(s, top, sum, shrink, scale);
    pack();
    for (uint32_t block = 1; block < now.blocks; block++) {
      mbarrier_wait(shared_address(&sh.k_full[kp.stage]), kp.parity);
      turn_wait(group);
      scores();
      mbarrier_wait(shared_address(&sh.v_full[vp.stage]), vp.parity);
      values();
      turn_pass(group);
      wgmma_wait<1>(s);
      let_go(sh.k_empty[kp.stage]), kp.go();
      hide(block);
      soften(s, top, sum, shrink, scale);
      hold(s);
      mbarrier_wait(shared_address(&sh.q_full[qp.stage]), qp.parity); /* is over: a branch that keeps all this before the next wait */
      wgmma_wait<0>(o);
      let_go(sh.v_empty[vp.stage]), vp.go();
      pack();
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[i] *= shrink[i % 4 / 2];
    }
    let_go(sh.q_empty[qp.stage]);
    mbarrier_wait(shared_address(&sh.v_full[vp.stage]), vp.parity);
    values();
    wgmma_wait<0>(o);
    let_go(sh.v_empty[vp.stage]), vp.go();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      const float inverse = 1.0f / sum[half];
      const uint32_t r = row + half * 8;
      bf16 *to = out + ((size_t)(now.first + r) * h.heads + now.head + group) * D + t4 * 8;
#pragma unroll
      for (int n = 0; n < D / 8; n += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = pack2(o[(n + i) * 4 + 2 * half] * inverse, o[(n + i) * 4 + 2 * half + 1] * inverse);
        turn_words(w);
        if (r < now.rows && group < now.heads) *reinterpret_cast<uint4 *>(to + n * 8) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
  if (group == 0) turn_wait(0); /* as many waits as passes */
}

#endif

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    gqa_pair(const __grid_constant__ gqa_maps maps, const __grid_constant__ mm_cu_heads h, const __grid_constant__ mm_cu_tiles tiles,
             const __grid_constant__ mm_cu_kv kv, bf16 *out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  grid_wait_and_launch_next();
  extern __shared__ __align__(1024) uint8_t raw[];
  gqa_shared<D> &sh = *reinterpret_cast<gqa_shared<D> *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&sh.q_full[i]), 1), mbarrier_init(shared_address(&sh.q_empty[i]), kGroups * 4);
      mbarrier_init(shared_address(&sh.k_full[i]), 1), mbarrier_init(shared_address(&sh.k_empty[i]), kGroups * 4);
      mbarrier_init(shared_address(&sh.v_full[i]), 1), mbarrier_init(shared_address(&sh.v_empty[i]), kGroups * 4);
    }
    mbarrier_init(shared_address(&sh.v_here), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32) produce(maps, h, tiles, kv, sh);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(h, out, sh, group - 1);
  }
#else
  no_such_code();
#endif
}

template <int D>
cudaError_t run(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s) {
  gqa_maps maps;
  const uint64_t row = D * sizeof(bf16);
  cudaError_t e =
      mm_cu_map_boxes(&maps.q, a.qkv, (h.heads + 2 * h.kv_heads) * row, a.tokens, kStrip, MM_CU_TILE, CU_TENSOR_MAP_SWIZZLE_128B);
  /* The largest row number, which the page table bounds. */
  if (e == cudaSuccess) e = mm_cu_map_boxes(&maps.k, kv.k, row, INT32_MAX, kStrip, MM_CU_PAGE, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess) e = mm_cu_map_boxes(&maps.v, kv.v, row, INT32_MAX, kStrip, MM_CU_PAGE, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  const uint32_t share = h.heads / h.kv_heads, jobs = t.count * h.kv_heads * ceil_div(share, kGroups);
  return launch(gqa_pair<D>, dim3(min(jobs, multiprocessors())), kThreads, sizeof(gqa_shared<D>), s, maps, h, t, kv, a.o);
}

}  // namespace

cudaError_t mm_cu_gqa_hopper(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s) {
  return h.head_dim == 128 ? run<128>(h, t, kv, a, s) : run<64>(h, t, kv, a, s);
}
