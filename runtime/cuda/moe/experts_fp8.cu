/* The experts of a prefill step with rounded inputs: two grouped products over the sorted pairs (token, choice) and a sum per token
 * (gemm_fp8.cuh).
 *
 * Up: the two runs of a tile are of w1 and w3, so that a thread holds gate and up of the same columns; a tile's 128 columns of
 * SiLU(gate) · up are a group, which is rounded on the spot: middle holds codes, rows in the sorted order. Under a scale of the whole row
 * it is rounded by a launch of its own. Down: pair_out[pair, H] = weight · w2·middle in bf16. The sum over a token's choices is taken in
 * their order: the same bits every time. A pair of blocks has up to 256 rows of one expert, which lie side by side: a first kernel copies
 * codes to the sorted order. */
#include "runtime/cuda/core/swiglu.cuh"
#include "runtime/cuda/gemm/gemm_fp8.cuh"

namespace {

using namespace fp8_gemm;

/* Tiles of 256 sorted places that never mix experts, `wide` adjacent tiles of two runs: those of an expert follow one another,
 * first all of the same runs, so that what runs at a time shares weights. Where up to 64 places are left over, each block of a 2-CTA
 * cluster takes them with runs of its own. */
struct expert_tiles {
  mm_cu_route r;
  uint32_t wide;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ void prepare(shared &sh) const {
    const uint32_t lane = threadIdx.x % 32, each = (r.experts + 31) / 32, from = lane * each;
    uint32_t mine = 0;
    for (uint32_t e = from; e < min(from + each, r.experts); e++) mine += tiles(e);
    const uint32_t end = warp_sum_through(mine);
    uint32_t before = end - mine;
    for (uint32_t e = from; e < min(from + each, r.experts); e++) {
      sh.before[e] = before;
      before += tiles(e);
    }
    if (lane == 31) sh.before[r.experts] = end;
  }
  __device__ bool split(uint32_t left) const { return left > 0 && left <= kFew && wide % 2 == 0; }
  __device__ uint32_t tiles(uint32_t e) const {
    const uint32_t places = r.offset[e + 1] - r.offset[e], left = places % (kPair * kRows);
    return places / (kPair * kRows) * wide + (split(left) ? wide / 2 : left > 0 ? wide : 0);
  }
  /* Fills all but runs and column; *across: which of `wide`. */
  __device__ bool find(uint32_t index, uint32_t rank, const shared &sh, tile *t, uint32_t *across) const {
    if (index >= sh.before[r.experts]) return false;
    uint32_t e = 0;
    for (uint32_t end = r.experts; end - e > 1;) {
      const uint32_t middle = (e + end) / 2;
      (sh.before[middle] <= index ? e : end) = middle;
    }
    const uint32_t from = r.offset[e], end = r.offset[e + 1], in = index - sh.before[e];
    const uint32_t whole = (end - from) / (kPair * kRows), left = (end - from) % (kPair * kRows);
    t->matrix = e;
    if (split(left)) { /* of each two across: whole tiles of one and of the other, and one tile of both */
      const uint32_t two = in / (2 * whole + 1), i = in % (2 * whole + 1);
      t->split = i == 2 * whole;
      *across = 2 * two + (t->split ? rank : i / whole);
      split_rows(from + (t->split ? whole : i % whole) * kPair * kRows, end, t->split ? 0 : rank, t);
    } else {
      const uint32_t high = whole + (left > 0);
      *across = in / high;
      split_rows(from + in % high * kPair * kRows, end, rank, t);
    }
    return true;
  }
#endif
};

/* Codes and scales of each sorted place's token, 32 places a block; rows without an expert have no place. */
constexpr uint32_t kPlaces = 32, kSpreaders = 8, kAtOnce = 6; /* kSpreaders: warps; kAtOnce: loads of 512 codes in flight */
__global__ void __launch_bounds__(kSpreaders * 32)
    spread(mm_cu_codes to, mm_cu_codes x, const uint32_t *pair, const uint32_t *places, uint32_t top_k) {
  grid_wait_and_launch_next();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x * kPlaces, end = min(*places, block + kPlaces);
  for (uint32_t place = block + warp; place < end; place += kSpreaders) {
    const uint4 *from = reinterpret_cast<const uint4 *>(x.code + (size_t)(pair[place] / top_k) * x.pitch);
    uint4 *row = reinterpret_cast<uint4 *>(to.code + (size_t)place * to.pitch);
    for (uint32_t first = lane; first < x.pitch / 16; first += kAtOnce * 32) {
      uint4 q[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        if (first + i * 32 < x.pitch / 16) q[i] = from[first + i * 32];
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        if (first + i * 32 < x.pitch / 16) row[first + i * 32] = q[i];
      }
    }
  }
  if (block + lane >= end) return;
  const uint32_t token = pair[block + lane] / top_k;
  for (uint32_t g = warp; g < x.pitch / MM_CU_GROUP; g += kSpreaders)
    to.scale[(size_t)g * to.scale_pitch + block + lane] = x.scale[(size_t)g * x.scale_pitch + token];
}

template <bool kInBlocks>
struct up_job {
  static constexpr bool kBlocks = kInBlocks; /* and its results are rounded in groups */
  mm_cu_weight w;
  expert_tiles tiles;
  mm_cu_codes x, middle;
  __nv_bfloat16 *rows; /* instead of middle, or NULL */
  uint32_t inter;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ const mm_cu_codes &codes() const { return x; }
  __device__ void prepare(shared &sh) const { tiles.prepare(sh); }
  __device__ bool find(uint32_t index, uint32_t rank, const shared &sh, tile *t) const {
    uint32_t across;
    if (!tiles.find(index, rank, sh, t, &across)) return false;
    t->column = across * kRun, t->run[0] = t->column, t->run[1] = inter + t->column;
    return true;
  }
  __device__ uint32_t name(const tile &t, uint32_t i) const { return t.first + i; }
  template <int N, class Most>
  __device__ __forceinline__ void emit(const tile &t, uint32_t r, uint32_t place, float (&out)[2][4 * N], int half, uint32_t column,
                                       const Most &most_of) const {
    constexpr int kPieces = N / 8; /* of 16 columns a lane */
    float most = 0;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
      const int at = i / 2 * 4 + 2 * half + i % 2;
      out[0][at] = activated(tiles.r.act, out[0][at], out[1][at]);
      most = fmaxf(most, fabsf(out[0][at]));
    }
    if (!kBlocks && rows) {
      store_run<N>(rows + (size_t)place * inter, t.column + column, inter, out[0], half, 1.0f, r < t.rows);
      return;
    }
    const act_scale scale(most_of(most));
    uint32_t v[kPieces][4]; /* words: of columns 8n … 8n + 15 the lane's two and two, n even */
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const int at = n * 4 + 2 * half;
      v[n / 2 % kPieces][n / 2 / kPieces] = scale.codes(out[0][at], out[0][at + 1]) | (uint32_t)scale.codes(out[0][at + 4], out[0][at + 5])
                                                                                          << 16;
    }
#pragma unroll
    for (int i = 0; i < kPieces; i++) turn_words(v[i]); /* now the words of all four lanes, of columns 16·kPieces·lane … */
    const uint32_t lane = threadIdx.x % 4;
    if (r >= t.rows) return;
    uint8_t *to = middle.code + (size_t)place * middle.pitch + t.column + column + lane * 16 * kPieces;
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      *reinterpret_cast<uint4 *>(to + i * 16) = make_uint4(__byte_perm(v[i][0], v[i][1], 0x5410), __byte_perm(v[i][2], v[i][3], 0x5410),
                                                           __byte_perm(v[i][0], v[i][1], 0x7632), __byte_perm(v[i][2], v[i][3], 0x7632));
    if (column > 0) return; /* the other group writes the scale */
    if (lane == 0) middle.scale[(size_t)(t.column / kRun) * middle.scale_pitch + place] = scale.value;
  }
#endif
};

template <bool kInBlocks>
struct down_job {
  static constexpr bool kBlocks = kInBlocks;
  mm_cu_weight w;
  expert_tiles tiles;
  mm_cu_codes middle;
  __nv_bfloat16 *pair_out;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ const mm_cu_codes &codes() const { return middle; }
  __device__ void prepare(shared &sh) const { tiles.prepare(sh); }
  __device__ bool find(uint32_t index, uint32_t rank, const shared &sh, tile *t) const {
    uint32_t across;
    if (!tiles.find(index, rank, sh, t, &across)) return false;
    t->column = across * 2 * kRun, t->run[0] = t->column, t->run[1] = t->column + kRun;
    return true;
  }
  __device__ uint32_t name(const tile &t, uint32_t i) const { return tiles.r.pair[t.first + i]; }
  template <int N, class Most>
  __device__ __forceinline__ void emit(const tile &t, uint32_t r, uint32_t pair, float (&out)[2][4 * N], int half, uint32_t column,
                                       const Most &) const {
    store_runs<N>(pair_out + (size_t)pair * w.n, t.column + column, w.n, out, half, tiles.r.weight[pair], r < t.rows);
  }
#endif
};

/* y[t] = Σ pair_out of its choices, if it has any, eight columns a thread. */
__global__ void sum_choices(__nv_bfloat16 *y, const __grid_constant__ mm_cu_push push, const __nv_bfloat16 *pair_out,
                            const __grid_constant__ mm_cu_route r, uint32_t width) {
  grid_wait_and_launch_next();
  __nv_bfloat16 *const besides = push.epoch ? push.to[*push.epoch & 1] : nullptr;
  for (uint32_t c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float sum[8] = {};
    const size_t first = (size_t)blockIdx.x * r.top_k;
    const __nv_bfloat16 *from = pair_out + first * width + c;
#pragma unroll 8
    for (uint32_t j = 0; j < r.top_k; j++) {
      if (r.id[first + j] >= r.experts) continue;
      float v[8];
      load8(v, from + (size_t)j * width);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += v[i];
    }
    const size_t at = (size_t)blockIdx.x * width + c;
    const uint4 q = narrow8(sum);
    *reinterpret_cast<uint4 *>(y + at) = q;
    if (besides) *reinterpret_cast<uint4 *>(besides + at) = q;
  }
}

}  // namespace

cudaError_t mm_cu_sum_choices(__nv_bfloat16 *y, const mm_cu_push &push, const __nv_bfloat16 *pair_out, const mm_cu_route &r,
                              uint32_t tokens, uint32_t width, cudaStream_t s) {
  return launch(sum_choices, tokens, min(ceil_div(width, 8 * 32) * 32, 512u), 0, s, y, push, pair_out, r, width);
}

static_assert(kRun == MM_CU_GROUP, "whole tiles of gate and up (dispatch.c)");
cudaError_t mm_cu_experts_fp8(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_rounded_experts &a,
                              cudaStream_t s) {
  cudaError_t e = mm_cu_refuse(MM_CU_EXPERTS_FP8, {&w13, &w2, a.x.rows, r.top_k});
  if (e != cudaSuccess) return e;
  const unsigned pairs = a.x.rows * r.top_k, tiles = min(pairs, pairs / (kPair * kRows) + r.experts); /* the most there can be */
  const unsigned across = w13.n / 2 / kRun, down = ceil_div(w2.n, 2 * kRun);
  /* the rows side by side; they and their scales take less room than the bf16 of the pairs' results, which come later */
  uint8_t *code = reinterpret_cast<uint8_t *>(a.pair_out);
  const mm_cu_codes x = {code, reinterpret_cast<float *>(code + (size_t)pairs * a.x.pitch), pairs, a.x.pitch, pairs};
  e = launch(spread, ceil_div(pairs, kPlaces), kSpreaders * 32, 0, s, x, a.x, r.pair, r.offset + r.experts, r.top_k);
  const mm_cu_rounding &how = *mm_cu_rounding_of(&w2);
  __nv_bfloat16 *const rows = how.kind == MM_ACT_FP8_GROUP ? nullptr : a.rows;
  if (e == cudaSuccess) {
    const expert_tiles t = {r, across};
    e = w13.cell_n_log2 >= 7 && !rows ? launch_product(up_job<true>{w13, t, x, a.middle, nullptr, w13.n / 2}, x, tiles * across, s)
                                      : launch_product(up_job<false>{w13, t, x, a.middle, rows, w13.n / 2}, x, tiles * across, s);
  }
  if (e == cudaSuccess && rows) e = mm_cu_encode(a.middle, {rows, w2.k, nullptr, mm_cu_placed_of(r)}, how, s);
  if (e == cudaSuccess)
    e = w2.cell_n_log2 >= 7 ? launch_product(down_job<true>{w2, {r, down}, a.middle, a.pair_out}, a.middle, tiles * down, s)
                            : launch_product(down_job<false>{w2, {r, down}, a.middle, a.pair_out}, a.middle, tiles * down, s);
  return e != cudaSuccess ? e : mm_cu_sum_choices(a.y, a.push, a.pair_out, r, a.x.rows, w2.n, s);
}
