/* The experts of a prefill step with rounded inputs: two grouped products over the sorted pairs (token, choice) and a sum per token
 * (gemm_fp8.cuh).
 *
 * Up: the two runs of a tile are of w1 and w3, so that a thread holds gate and up of the same columns; a tile's 128 columns of
 * SiLU(gate) · up are a group, which is rounded on the spot: middle holds codes, rows in the sorted order. Down: pair_out[pair, H] =
 * weight · w2·middle in bf16. The sum over a token's choices is taken in their order: the same bits every time. A pair of blocks has up
 * to 256 rows of one expert, which lie side by side: a first kernel copies codes to the sorted order. */
#include "runtime/cuda/gemm_fp8.cuh"

namespace {

using namespace fp8_gemm;

/* Tiles of 256 sorted places that never mix experts, each with `wide` columns of tiles: those of an expert follow one another. */
struct expert_tiles {
  mm_cu_route r;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ void prepare(shared &sh) const {
    const uint32_t lane = threadIdx.x % 32, each = (r.experts + 31) / 32, from = lane * each;
    uint32_t mine = 0;
    for (uint32_t e = from; e < min(from + each, r.experts); e++) mine += tiles(r.offset[e], r.offset[e + 1]);
    uint32_t end = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, end, d);
      if (lane >= d) end += left;
    }
    uint32_t before = end - mine;
    for (uint32_t e = from; e < min(from + each, r.experts); e++) {
      sh.before[e] = before;
      before += tiles(r.offset[e], r.offset[e + 1]);
    }
    if (lane == 31) sh.before[r.experts] = end;
  }
  __device__ static uint32_t tiles(uint32_t from, uint32_t to) { return (to - from + kPair * kRows - 1) / (kPair * kRows); }
  /* Fills matrix, first and rows; *column: which column of tiles. */
  __device__ bool find(uint32_t index, uint32_t wide, uint32_t rank, const shared &sh, tile *t, uint32_t *column) const {
    if (index >= sh.before[r.experts] * wide) return false;
    uint32_t e = 0;
    for (uint32_t end = r.experts; end - e > 1;) {
      const uint32_t middle = (e + end) / 2;
      (sh.before[middle] * wide <= index ? e : end) = middle;
    }
    const uint32_t high = sh.before[e + 1] - sh.before[e], in = index - sh.before[e] * wide;
    const uint32_t first = r.offset[e] + in % high * kPair * kRows, left = min(r.offset[e + 1] - first, kPair * kRows);
    const uint32_t each = left <= kRows ? kRows / 2 : kRows; /* up to 128 rows: half for each block */
    *column = in / high;
    t->matrix = e, t->first = first + rank * each, t->rows = left > rank * each ? min(left - rank * each, each) : 0;
    return true;
  }
#endif
};

/* Codes and scales of each sorted place's token; rows without an expert have no place. */
__global__ void spread(mm_cu_codes to, mm_cu_codes x, const uint32_t *pair, const uint32_t *places, uint32_t top_k) {
  grid_wait();
  grid_launch_next();
  const uint32_t place = blockIdx.x;
  if (place >= *places) return;
  const uint32_t token = pair[place] / top_k;
  const uint4 *from = reinterpret_cast<const uint4 *>(x.code + (size_t)token * x.pitch);
  for (uint32_t i = threadIdx.x; i < x.pitch / 16; i += blockDim.x)
    reinterpret_cast<uint4 *>(to.code + (size_t)place * to.pitch)[i] = from[i];
  for (uint32_t i = threadIdx.x; i < x.pitch / MM_CU_GROUP; i += blockDim.x)
    to.scale[(size_t)i * to.scale_pitch + place] = x.scale[(size_t)i * x.scale_pitch + token];
}

struct up_job {
  mm_cu_weight w;
  expert_tiles tiles;
  mm_cu_codes x, middle;
  uint32_t inter;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ const mm_cu_codes &codes() const { return x; }
  __device__ void prepare(shared &sh) const { tiles.prepare(sh); }
  __device__ bool find(uint32_t index, uint32_t rank, const shared &sh, tile *t) const {
    uint32_t column;
    if (!tiles.find(index, inter / kRun, rank, sh, t, &column)) return false;
    t->column = column * kRun, t->run[0] = t->column, t->run[1] = inter + t->column;
    return true;
  }
  __device__ uint32_t name(const tile &t, uint32_t i) const { return t.first + i; }
  __device__ __forceinline__ void emit(const tile &t, uint32_t r, uint32_t place, float (&out)[2][64], int half) const {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int at = i / 2 * 4 + 2 * half + i % 2;
      out[0][at] = silu(out[0][at]) * out[1][at];
      most = fmaxf(most, fabsf(out[0][at]));
    }
#pragma unroll
    for (int m = 1; m < 4; m *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
    const act_scale scale(most);
    uint32_t v[2][4]; /* words: of columns 8n … 8n + 15 the lane's two and two, n even: v[n / 2 % 2][n / 4] */
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      const int at = n * 4 + 2 * half;
      v[n / 2 % 2][n / 4] = scale.codes(out[0][at], out[0][at + 1]) | (uint32_t)scale.codes(out[0][at + 4], out[0][at + 5]) << 16;
    }
    turn_words(v[0]), turn_words(v[1]); /* now the words of all four lanes, of columns 32·lane … 32·lane + 31 */
    const uint32_t lane = threadIdx.x % 4;
    if (r >= t.rows) return;
    uint8_t *to = middle.code + (size_t)place * middle.pitch + t.column + lane * 32;
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<uint4 *>(to + i * 16) = make_uint4(__byte_perm(v[i][0], v[i][1], 0x5410), __byte_perm(v[i][2], v[i][3], 0x5410),
                                                           __byte_perm(v[i][0], v[i][1], 0x7632), __byte_perm(v[i][2], v[i][3], 0x7632));
    if (lane == 0) middle.scale[(size_t)(t.column / kRun) * middle.scale_pitch + place] = scale.value;
  }
#endif
};

struct down_job {
  mm_cu_weight w;
  expert_tiles tiles;
  mm_cu_codes middle;
  __nv_bfloat16 *pair_out;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ const mm_cu_codes &codes() const { return middle; }
  __device__ void prepare(shared &sh) const { tiles.prepare(sh); }
  __device__ bool find(uint32_t index, uint32_t rank, const shared &sh, tile *t) const {
    uint32_t column;
    if (!tiles.find(index, (w.n + 2 * kRun - 1) / (2 * kRun), rank, sh, t, &column)) return false;
    t->column = column * 2 * kRun, t->run[0] = t->column, t->run[1] = t->column + kRun;
    return true;
  }
  __device__ uint32_t name(const tile &t, uint32_t i) const { return tiles.r.pair[t.first + i]; }
  __device__ __forceinline__ void emit(const tile &t, uint32_t r, uint32_t pair, float (&out)[2][64], int half) const {
    store_bf16(pair_out + (size_t)pair * w.n, t, w.n, out, half, tiles.r.weight[pair], r < t.rows);
  }
#endif
};

/* y[t] = Σ pair_out of its choices, eight columns a thread. */
__global__ void sum_choices(__nv_bfloat16 *y, const __nv_bfloat16 *pair_out, uint32_t top_k, uint32_t width) {
  grid_wait();
  grid_launch_next();
  for (uint32_t c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float sum[8] = {};
    const __nv_bfloat16 *from = pair_out + (size_t)blockIdx.x * top_k * width + c;
#pragma unroll 8
    for (uint32_t j = 0; j < top_k; j++) {
      float v[8];
      load8(v, from + (size_t)j * width);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += v[i];
    }
    *reinterpret_cast<uint4 *>(y + (size_t)blockIdx.x * width + c) = narrow8(sum);
  }
}

}  // namespace

bool mm_cu_experts_multiply_codes(const mm_cu_weight &w13, const mm_cu_weight &w2) {
  return mm_cu_multiplies_codes(w13) && mm_cu_multiplies_codes(w2) && w13.n % (2 * kRun) == 0 && w13.k >= MM_CU_GROUP && w2.n % 8 == 0;
}

cudaError_t mm_cu_experts_fp8(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_rounded_experts &a,
                              cudaStream_t s) {
  if (!mm_cu_experts_multiply_codes(w13, w2)) return cudaErrorNotSupported;
  const unsigned pairs = a.x.rows * r.top_k, tiles = min(pairs, pairs / (kPair * kRows) + r.experts); /* the most there can be */
  /* the rows side by side; they and their scales take less room than the bf16 of the pairs' results, which come later */
  uint8_t *code = reinterpret_cast<uint8_t *>(a.pair_out);
  const mm_cu_codes x = {code, reinterpret_cast<float *>(code + (size_t)pairs * a.x.pitch), pairs, a.x.pitch, pairs};
  cudaError_t e = launch(spread, pairs, 128, 0, s, x, a.x, r.pair, r.offset + r.experts, r.top_k);
  if (e == cudaSuccess) e = launch_product(up_job{w13, {r}, x, a.middle, w13.n / 2}, x, tiles * (w13.n / 2 / kRun), s);
  if (e == cudaSuccess) e = launch_product(down_job{w2, {r}, a.middle, a.pair_out}, a.middle, tiles * ceil_div(w2.n, 2 * kRun), s);
  if (e == cudaSuccess) e = launch(sum_choices, a.x.rows, min(ceil_div(w2.n, 8 * 32) * 32, 512u), 0, s, a.y, a.pair_out, r.top_k, w2.n);
  return e;
}
