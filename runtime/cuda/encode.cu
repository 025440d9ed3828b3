/* Inputs of products, rounded as quant/activation.c does: to codes, or to the numbers that codes stand for. A warp takes 128 columns, four
 * a lane. */
#include "runtime/cuda/fp8.cuh"
#include "runtime/cuda/launch.h"

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

struct rounder {
  mm_act_format format;
  float fixed;

  __device__ float largest_code() const { return format.code == MM_CODE_E4M3 ? 448.0f : format.code == MM_CODE_INT8 ? 127.0f : 6.0f; }
  __device__ static float e4m3(float x) {
    const __half_raw h = __nv_cvt_fp8_to_halfraw(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
    return __half2float(*reinterpret_cast<const __half *>(&h));
  }
  /* The number of x's code, x being divided by its scale already. */
  __device__ float code(float x) const {
    if (format.code == MM_CODE_E4M3) return e4m3(x);
    if (format.code == MM_CODE_INT8) return fminf(127.0f, fmaxf(-127.0f, rintf(x)));
    const float a = fabsf(x); /* E2M1: steps of 1/2, 1 and 2 */
    return copysignf(a < 2 ? rintf(a * 2) * 0.5f : a < 4 ? rintf(a) : fminf(rintf(a * 0.5f) * 2, 6.0f), x);
  }
  __device__ float row_scale(float amax) const {
    if (format.fixed && fixed > 0) return fixed;
    return __fdiv_rn(fmaxf(amax, 1e-10f), format.scale == MM_F8_E4M3 ? 448.0f * largest_code() : largest_code());
  }
  __device__ float group_scale(float amax, float row) const {
    if (format.scale == MM_F8_E4M3) return e4m3(__fdiv_rn(__fdiv_rn(amax, largest_code()), row)) * row;
    if (format.scale != MM_F8_E8M0) return __fdiv_rn(fmaxf(amax, 1e-10f), largest_code());
    /* the largest codes are 1.75 · 2^8 and 1.5 · 2^2 */
    const bool wide = format.code == MM_CODE_E4M3;
    const uint32_t u = __float_as_uint(fmaxf(amax, 1e-10f));
    const int e = (int)(u >> 23) - (wide ? 8 : 2) + ((u & 0x7fffff) > (wide ? 0x600000u : 0x400000u));
    return __uint_as_float((uint32_t)max(e, 1) << 23); /* e ≥ 85: amax is at least 1e-10 */
  }
  __device__ float number(float x, float scale) const { return isnan(x) ? x : scale == 0 ? 0.0f : code(__fdiv_rn(x, scale)) * scale; }
};

/* row -> y, this block's share of it; y may be row. factor comes after rounding. */
__device__ void round_row(bf16 *y, const bf16 *row, uint32_t k, const rounder &how, float factor) {
  __shared__ float part[kWarps];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, lanes = how.format.group / 4;
  float row_scale = 1, v[4];
  if (how.format.group == 0 || how.format.scale == MM_F8_E4M3) {
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
    float n[4];
#pragma unroll
    for (int i = 0; i < 4; i++) n[i] = how.number(v[i], scale) * factor;
    if (c < k) *reinterpret_cast<uint2 *>(y + c) = make_uint2(pack2(n[0], n[1]), pack2(n[2], n[3]));
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

rounder rounder_of(const mm_cu_rounding &how) { return {mm_act_formats[how.kind], how.fixed}; }

/* Blocks share a row where no scale is of the whole row, which may be rounded in place. */
dim3 row_blocks(uint32_t rows, uint32_t k, const rounder &how) {
  return dim3(rows, how.format.group == 0 || how.format.scale == MM_F8_E4M3 ? 1 : ceil_div(k, kWarps * 128));
}

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
