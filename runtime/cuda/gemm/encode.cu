/* Inputs of products, rounded as quant/activation.c does: to codes, or to the numbers that codes stand for. A warp takes 128 columns, four
 * a lane. */
#include "runtime/cuda/comm/peers.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/round.cuh"

namespace {

constexpr unsigned kWarps = 8;

/* The row behind row blockIdx.x of the result. */
__device__ __forceinline__ const bf16 *input_row(const mm_cu_inputs &in) {
  return in.x + (size_t)(in.rows ? in.rows[blockIdx.x] : blockIdx.x) * in.k;
}
/* The index at which ranks publish it; ~0 if there is no such row. */
__device__ __forceinline__ uint32_t published_row(const mm_cu_placed &of) {
  return !of.pair ? blockIdx.x : blockIdx.x < *of.places ? of.pair[blockIdx.x] : ~0u;
}

/* Half a warp takes 128 columns, eight a lane; kAtOnce such groups are on their way. */
constexpr uint32_t kAtOnce = 4;
__global__ void __launch_bounds__(kWarps * 32) encode(mm_cu_codes to, mm_cu_inputs in) {
  const uint32_t groups = to.pitch / MM_CU_GROUP, lane = threadIdx.x % 16, first = blockIdx.x * (kAtOnce * kWarps * 2) + threadIdx.x / 16;
  grid_wait_and_launch_next();
  uint4 q[kAtOnce];
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; i++) {
    const uint32_t at = first + i * kWarps * 2, r = at / groups, column = (at - r * groups) * MM_CU_GROUP + lane * 8;
    const bool valid = r < to.rows && column < in.k;
    q[i] = valid ? *reinterpret_cast<const uint4 *>(in.x + (size_t)(in.rows ? in.rows[r] : r) * in.k + column) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; i++) {
    const uint32_t at = first + i * kWarps * 2, r = at / groups, g = at - r * groups;
    encode8(to, r, g * MM_CU_GROUP + lane * 8, q[i], r < to.rows);
  }
}

/* As encode, under powers of two (fp8.h). */
constexpr int kRaised = 4;
__global__ void __launch_bounds__(kWarps * 32) encode_mx(mm_cu_codes to, mm_cu_inputs in) {
  const uint32_t groups = to.pitch / MM_CU_GROUP, lane = threadIdx.x % 16, lanes = 0xffffu << (threadIdx.x & 16);
  const uint32_t first = blockIdx.x * (kAtOnce * kWarps * 2) + threadIdx.x / 16;
  grid_wait_and_launch_next();
  uint4 q[kAtOnce];
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; i++) {
    const uint32_t at = first + i * kWarps * 2, r = at / groups, column = (at - r * groups) * MM_CU_GROUP + lane * 8;
    q[i] =
        r < to.rows ? *reinterpret_cast<const uint4 *>(in.x + (size_t)(in.rows ? in.rows[r] : r) * in.k + column) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; i++) {
    const uint32_t at = first + i * kWarps * 2, r = at / groups, g = at - r * groups;
    uint32_t pair = max2(max2(q[i].x & 0x7fff7fffu, q[i].y & 0x7fff7fffu), max2(q[i].z & 0x7fff7fffu, q[i].w & 0x7fff7fffu));
#pragma unroll
    for (int m = 1; m < 4; m *= 2) pair = max2(pair, __shfl_xor_sync(lanes, pair, m));
    const float most = fmaxf(low(pair), high(pair));
    const int own = (int)(__float_as_uint(rounder::power_scale(most, true)) >> 23);
    int largest = own;
#pragma unroll
    for (int m = 4; m < 16; m *= 2) largest = max(largest, __shfl_xor_sync(lanes, largest, m));
    const int e = most == 0 || largest - own <= kRaised ? largest : own;
    uint32_t word = (uint32_t)e << lane / 4 * 8;
#pragma unroll
    for (int m = 4; m < 16; m *= 2) word |= __shfl_xor_sync(lanes, word, m);
    if (r >= to.rows) continue;
    float v[8];
    widen8(v, q[i]);
    *reinterpret_cast<uint2 *>(to.code + (size_t)r * to.pitch + g * MM_CU_GROUP + lane * 8) =
        narrow8_e4m3(v, __uint_as_float((uint32_t)(254 - e) << 23));
    if (lane == 0) reinterpret_cast<uint32_t *>(to.scale)[(size_t)g * to.scale_pitch + r] = word;
  }
}

/* A block for each row, which shared memory holds while its codes take its place. */
__global__ void __launch_bounds__(kWarps * 32) encode_placed(bf16 *rows, uint32_t k, mm_cu_placed of) {
  extern __shared__ uint4 held[];
  grid_wait_and_launch_next();
  if (blockIdx.x >= *of.places) return;
  uint4 *const row = reinterpret_cast<uint4 *>(rows + (size_t)blockIdx.x * k);
  for (uint32_t i = threadIdx.x; i < k / 8; i += kWarps * 32) held[i] = row[i];
  __syncthreads();
  const mm_cu_codes to = {reinterpret_cast<uint8_t *>(row), reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(row) + k), 1, k, 1};
  for (uint32_t c0 = threadIdx.x / 16 * MM_CU_GROUP; c0 < (k + 2 * MM_CU_GROUP - 1) / (2 * MM_CU_GROUP) * 2 * MM_CU_GROUP;
       c0 += kWarps * 2 * MM_CU_GROUP) {
    const uint32_t column = c0 + threadIdx.x % 16 * 8;
    const bool inside = column < k;
    encode8(to, 0, inside ? column : 0, inside ? held[column / 8] : make_uint4(0, 0, 0, 0), inside);
  }
}

/* A block for each row, which has one scale. published: the largest magnitude of each, or NULL. */
__global__ void __launch_bounds__(kWarps * 32) encode_rows(mm_cu_codes to, mm_cu_inputs in, rounder how, const float *published) {
  grid_wait_and_launch_next();
  const bf16 *const row = input_row(in);
  const uint32_t pair = published_row(in.of);
  if (pair == ~0u) return;
  const float scale = how.row_scale(published         ? published[pair]
                                    : how.needs_row() ? largest_of_row<kWarps>(row, in.k)
                                                      : 0.0f),
              inverse = __frcp_rn(scale);
  const bool quick = scale > 0x1p-80f; /* divided_bf16 holds for it */
  for (uint32_t c = threadIdx.x * 4; c < to.pitch; c += kWarps * 128) {
    float v[4];
    load_columns(v, row, c, in.k);
#pragma unroll
    for (float &x : v) x = quick ? divided_bf16(x, scale, inverse) : __fdiv_rn(x, scale);
    const uint32_t codes = codes2_e4m3(v[0], v[1]) | codes2_e4m3(v[2], v[3]) << 16;
    *reinterpret_cast<uint32_t *>(to.code + (size_t)blockIdx.x * to.pitch + c) = codes;
  }
  for (uint32_t g = threadIdx.x; g < to.pitch / MM_CU_GROUP; g += kWarps * 32) to.scale[(size_t)g * to.scale_pitch + blockIdx.x] = scale;
}

/* ---- any kind of codes, as numbers ---- */

/* Rows of several ranks' columns; row 0's column 0 is first_k. Each has `each` largest magnitudes, of the row or of its groups. */
struct whole_rows {
  float *largest;
  uint32_t first_k, each;
};
/* The largest of this rank's columns, 0 of groups that it has none of. */
__device__ void find_largest(float *to, const bf16 *row, uint32_t k, const rounder &how, const whole_rows &whole) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float v[4];
  if (how.whole_row()) {
    const float most = largest_of_row<kWarps>(row, k);
    if (threadIdx.x == 0) *to = most;
    return;
  }
  for (uint32_t g = warp; g < whole.each; g += kWarps) {
    const uint32_t from = max(g * how.format.group, whole.first_k), end = min((g + 1) * how.format.group, whole.first_k + k);
    float most = 0;
    for (uint32_t c = from + lane * 4; c < end; c += 128) {
      load_columns(v, row, c - whole.first_k, k);
      most = fmaxf(most, largest(v, 1));
    }
#pragma unroll
    for (int m = 16; m > 0; m /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
    if (lane == 0) to[g] = most;
  }
}
/* For a pair that another rank holds. */
__device__ void publish_none(float *to, const whole_rows &whole) {
  for (uint32_t g = threadIdx.x; g < whole.each; g += kWarps * 32) to[g] = 0;
}

/* row -> y, this block's share of it; y may be row. factor comes after rounding. given: what find_largest made, of all ranks; or NULL. */
__device__ void round_row(bf16 *y, const bf16 *row, uint32_t k, const rounder &how, float factor, const float *given,
                          const whole_rows &whole) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, lanes = how.format.group / 4;
  float row_scale = 1, v[4];
  if (how.whole_row()) row_scale = how.row_scale(given ? *given : largest_of_row<kWarps>(row, k));
  for (uint32_t c0 = (blockIdx.y * kWarps + warp) * 128; c0 < k; c0 += gridDim.y * kWarps * 128) {
    const uint32_t c = c0 + lane * 4;
    load_columns(v, row, c, k);
    const bool published = given && !how.whole_row();
    const float most = published ? given[min((whole.first_k + c) / how.format.group, whole.each - 1)] : largest(v, max(lanes, 1u));
    const float scale = lanes ? how.group_scale(most, row_scale) : row_scale;
    how.to_numbers(v, scale);
#pragma unroll
    for (float &n : v) n *= factor;
    if (c < k) *reinterpret_cast<uint2 *>(y + c) = make_uint2(pack2(v[0], v[1]), pack2(v[2], v[3]));
  }
}

__device__ __forceinline__ float *published_of(const whole_rows &whole, uint32_t row) {
  return whole.largest ? whole.largest + (size_t)row * whole.each : nullptr;
}
__global__ void largest_of_rows(mm_cu_inputs in, rounder how, whole_rows whole) {
  grid_wait_and_launch_next();
  const uint32_t row = published_row(in.of);
  if (row != ~0u) find_largest(published_of(whole, row), input_row(in), in.k, how, whole);
  if (in.of.pair && in.of.id[blockIdx.x] == ~0u) publish_none(published_of(whole, blockIdx.x), whole);
}
__global__ void round_rows(bf16 *y, mm_cu_inputs in, rounder how, whole_rows whole) {
  grid_wait_and_launch_next();
  const uint32_t row = published_row(in.of);
  if (row != ~0u) round_row(y + (size_t)blockIdx.x * in.k, input_row(in), in.k, how, 1, published_of(whole, row), whole);
}

/* A block a pair, for all its threads: the slot whose expert the pair chose; ~0 where another rank holds it. */
__device__ uint32_t slot_of_pair(const mm_cu_route &r) {
  __shared__ uint32_t slot;
  const uint32_t id = r.id[blockIdx.x], used = *r.used;
  if (id == ~0u) return ~0u;
  for (uint32_t s = threadIdx.x; s < used; s += kWarps * 32) {
    if (r.slot_expert[s] == id) slot = s;
  }
  __syncthreads();
  return slot;
}
__global__ void largest_of_slots(const bf16 *middle, uint32_t k, const __grid_constant__ mm_cu_route r, rounder how, whole_rows whole) {
  grid_wait_and_launch_next();
  const uint32_t slot = slot_of_pair(r), token = blockIdx.x / r.top_k;
  float *const to = published_of(whole, blockIdx.x);
  slot == ~0u ? publish_none(to, whole) : find_largest(to, middle + ((size_t)slot * MM_CU_DECODE_ROWS + token) * k, k, how, whole);
}
__global__ void round_slots(bf16 *middle, uint32_t k, const __grid_constant__ mm_cu_route r, const float *global, rounder how,
                            whole_rows whole) {
  grid_wait_and_launch_next();
  const uint32_t slot = slot_of_pair(r), at = slot * MM_CU_DECODE_ROWS + blockIdx.x / r.top_k;
  if (slot == ~0u) return;
  const float factor = r.slot_weight[at] * (global ? global[r.slot_expert[slot]] : 1.0f);
  bf16 *row = middle + (size_t)at * k;
  round_row(row, row, k, how, factor, published_of(whole, blockIdx.x), whole);
}

/* Blocks share a row where no scale is of the whole row, which may be rounded in place. */
dim3 row_blocks(uint32_t rows, uint32_t k, const rounder &how) { return dim3(rows, how.whole_row() ? 1 : ceil_div(k, kWarps * 128)); }

}  // namespace

namespace {

/* The room for so many rows; and, once each rank has found its own, the largest of all. */
bool lay_whole(const mm_cu_rounding &how, uint32_t rows, whole_rows *whole) {
  if (how.whole_k && !how.ranks) return false;
  *whole = {how.whole_k ? how.ranks->largest : nullptr, how.first_k, how.whole_k ? mm_cu_published_largest(&how) : 0};
  return !how.whole_k || mm_round_up((uint64_t)rows * whole->each, 4) <= how.ranks->capacity;
}
cudaError_t publish_largest(const mm_cu_rounding &how, uint32_t rows, const whole_rows &whole, cudaStream_t s) {
  return mm_cu_peers_max_f32(how.ranks->peers, whole.largest, mm_round_up((uint64_t)rows * whole.each, 4), s);
}

}  // namespace

cudaError_t mm_cu_publish_largest(const mm_cu_rounding &how, uint32_t rows, const mm_cu_inputs &in, cudaStream_t s) {
  whole_rows whole;
  if (!lay_whole(how, rows, &whole)) return cudaErrorInvalidValue;
  const cudaError_t e = launch(largest_of_rows, rows, kWarps * 32, 0, s, in, rounder_of(how), whole);
  return e != cudaSuccess ? e : publish_largest(how, rows, whole, s);
}

cudaError_t mm_cu_encode(const mm_cu_codes &to, const mm_cu_inputs &in, const mm_cu_rounding &how, cudaStream_t s) {
  if (how.kind == MM_ACT_FP8_GROUP || how.kind == MM_ACT_MXFP8)
    return launch(how.kind == MM_ACT_MXFP8 ? encode_mx : encode, ceil_div(to.rows * (to.pitch / MM_CU_GROUP), kAtOnce * kWarps * 2),
                  kWarps * 32, 0, s, to, in);
  whole_rows whole;
  if (!lay_whole(how, to.rows, &whole)) return cudaErrorInvalidValue;
  const cudaError_t e = how.whole_k ? mm_cu_publish_largest(how, to.rows, in, s) : cudaSuccess;
  return e != cudaSuccess ? e : launch(encode_rows, to.rows, kWarps * 32, 0, s, to, in, rounder_of(how), whole.largest);
}

cudaError_t mm_cu_encode_placed(bf16 *rows, uint32_t count, uint32_t k, const mm_cu_placed &of, cudaStream_t s) {
  return launch(encode_placed, count, kWarps * 32, 2 * k, s, rows, k, of);
}

cudaError_t mm_cu_round(bf16 *y, uint32_t count, const mm_cu_inputs &in, const mm_cu_rounding &how, cudaStream_t s) {
  const rounder r = rounder_of(how);
  whole_rows whole;
  if (!lay_whole(how, count, &whole)) return cudaErrorInvalidValue;
  const cudaError_t e = how.whole_k ? mm_cu_publish_largest(how, count, in, s) : cudaSuccess;
  return e != cudaSuccess ? e : launch(round_rows, row_blocks(count, in.k, r), kWarps * 32, 0, s, y, in, r, whole);
}

cudaError_t mm_cu_round_slots(bf16 *middle, uint32_t tokens, uint32_t k, const mm_cu_route &r, const float *global,
                              const mm_cu_rounding &how, cudaStream_t s) {
  const rounder by = rounder_of(how);
  const uint32_t rows = tokens * r.top_k;
  whole_rows whole;
  if (!lay_whole(how, rows, &whole)) return cudaErrorInvalidValue;
  cudaError_t e = how.whole_k ? launch(largest_of_slots, rows, kWarps * 32, 0, s, middle, k, r, by, whole) : cudaSuccess;
  if (e == cudaSuccess && how.whole_k) e = publish_largest(how, rows, whole, s);
  return e != cudaSuccess ? e : launch(round_slots, row_blocks(rows, k, by), kWarps * 32, 0, s, middle, k, r, global, by, whole);
}
