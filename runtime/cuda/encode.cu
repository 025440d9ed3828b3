/* Inputs of products, rounded as quant/activation.c does: to codes, or to the numbers that codes stand for. A warp takes 128 columns, four
 * a lane. */
#include "runtime/cuda/launch.h"
#include "runtime/cuda/round.cuh"

namespace {

constexpr unsigned kWarps = 8;

/* A lane's four columns of a row; zeros from k on. */
__device__ __forceinline__ void load_columns(float (&v)[4], const bf16 *row, uint32_t column, uint32_t k) {
  const uint2 q = column < k ? *reinterpret_cast<const uint2 *>(row + column) : make_uint2(0, 0);
  v[0] = low(q.x), v[1] = high(q.x), v[2] = low(q.y), v[3] = high(q.y);
}
/* The row behind row blockIdx.x of the result. */
__device__ __forceinline__ const bf16 *input_row(const mm_cu_inputs &in) {
  return in.x + (size_t)(in.rows ? in.rows[blockIdx.x] : blockIdx.x) * in.k;
}

/* The largest magnitude of four columns of each of so many lanes side by side. */
__device__ __forceinline__ float largest(const float (&v)[4], uint32_t lanes) {
  float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  for (uint32_t m = 1; m < lanes; m *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
  return most;
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

/* ---- any kind of codes, as numbers ---- */

/* row -> y, this block's share of it; y may be row. factor comes after rounding. */
__device__ void round_row(bf16 *y, const bf16 *row, uint32_t k, const rounder &how, float factor) {
  __shared__ float part[kWarps];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, lanes = how.format.group / 4;
  float row_scale = 1, v[4];
  if (how.whole_row()) {
    float most = 0;
    for (uint32_t c = threadIdx.x * 4; c < k; c += kWarps * 128) {
      load_columns(v, row, c, k);
      most = fmaxf(most, largest(v, 1));
    }
#pragma unroll
    for (int m = 16; m > 0; m /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
    if (lane == 0) part[warp] = most;
    __syncthreads();
    for (uint32_t i = 0; i < kWarps; i++) most = fmaxf(most, part[i]);
    row_scale = how.row_scale(most);
  }
  for (uint32_t c0 = (blockIdx.y * kWarps + warp) * 128; c0 < k; c0 += gridDim.y * kWarps * 128) {
    const uint32_t c = c0 + lane * 4;
    load_columns(v, row, c, k);
    const float scale = lanes ? how.group_scale(largest(v, lanes), row_scale) : row_scale;
    how.to_numbers(v, scale);
#pragma unroll
    for (float &n : v) n *= factor;
    if (c < k) *reinterpret_cast<uint2 *>(y + c) = make_uint2(pack2(v[0], v[1]), pack2(v[2], v[3]));
  }
}

__global__ void round_rows(bf16 *y, mm_cu_inputs in, rounder how) {
  grid_wait_and_launch_next();
  round_row(y + (size_t)blockIdx.x * in.k, input_row(in), in.k, how, 1);
}

__global__ void round_slots(bf16 *middle, uint32_t k, const __grid_constant__ mm_cu_route r, const float *global, rounder how) {
  grid_wait_and_launch_next();
  const uint32_t slot = blockIdx.x / MM_CU_SKINNY, token = blockIdx.x % MM_CU_SKINNY;
  if (slot >= *r.used || !(r.slot_tokens[slot] >> token & 1)) return;
  const float factor = r.slot_weight[blockIdx.x] * (global ? global[r.slot_expert[slot]] : 1.0f);
  bf16 *row = middle + (size_t)blockIdx.x * k;
  round_row(row, row, k, how, factor);
}

/* Blocks share a row where no scale is of the whole row, which may be rounded in place. */
dim3 row_blocks(uint32_t rows, uint32_t k, const rounder &how) { return dim3(rows, how.whole_row() ? 1 : ceil_div(k, kWarps * 128)); }

}  // namespace

cudaError_t mm_cu_encode(const mm_cu_codes &to, const mm_cu_inputs &in, cudaStream_t s) {
  return launch(encode, ceil_div(to.rows * (to.pitch / MM_CU_GROUP), kAtOnce * kWarps * 2), kWarps * 32, 0, s, to, in);
}

cudaError_t mm_cu_round(bf16 *y, uint32_t count, const mm_cu_inputs &in, const mm_cu_rounding &how, cudaStream_t s) {
  const rounder r = rounder_of(how);
  return launch(round_rows, row_blocks(count, in.k, r), kWarps * 32, 0, s, y, in, r);
}

cudaError_t mm_cu_round_slots(bf16 *middle, uint32_t k, const mm_cu_route &r, const float *global, const mm_cu_rounding &how,
                              cudaStream_t s) {
  const rounder by = rounder_of(how);
  const uint32_t rows = min(r.experts, MM_CU_SKINNY * r.top_k) * MM_CU_SKINNY;
  return launch(round_slots, row_blocks(rows, k, by), kWarps * 32, 0, s, middle, k, r, global, by);
}
