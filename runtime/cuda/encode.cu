/* Inputs of products, rounded as quant/activation.c does for 128 columns of a row: scale amax / 448, code to nearest even of x / scale,
 * both by true division. A warp takes 128 columns, four a lane. */
#include "runtime/cuda/fp8.cuh"
#include "runtime/cuda/launch.h"

namespace {

constexpr unsigned kWarps = 8;

/* A lane's four columns of the row behind row blockIdx.x of the result; zeros from k on. */
__device__ __forceinline__ void load_columns(float (&v)[4], const mm_cu_inputs &in, uint32_t column) {
  const uint32_t row = in.rows ? in.rows[blockIdx.x] : blockIdx.x;
  const uint2 q = column < in.k ? *reinterpret_cast<const uint2 *>(in.x + (size_t)row * in.k + column) : make_uint2(0, 0);
  v[0] = low(q.x), v[1] = high(q.x), v[2] = low(q.y), v[3] = high(q.y);
}

__device__ __forceinline__ float group_scale(const float (&v)[4]) {
  float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, m));
  return act_scale(most);
}

__global__ void encode(mm_cu_codes to, mm_cu_inputs in) {
  grid_wait();
  grid_launch_next();
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t g = threadIdx.x / 32; g < to.pitch / MM_CU_GROUP; g += kWarps) {
    const uint32_t column = g * MM_CU_GROUP + lane * 4;
    float v[4];
    load_columns(v, in, column);
    const float scale = group_scale(v);
    *reinterpret_cast<uint32_t *>(to.code + (size_t)blockIdx.x * to.pitch + column) =
        act_codes(v[0], v[1], scale) | (uint32_t)act_codes(v[2], v[3], scale) << 16;
    if (lane == 0) to.scale[(size_t)g * to.scale_pitch + blockIdx.x] = scale;
  }
}

__global__ void round_rows(bf16 *y, mm_cu_inputs in) {
  grid_wait();
  grid_launch_next();
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t g = threadIdx.x / 32; g * MM_CU_GROUP < in.k; g += kWarps) {
    const uint32_t column = g * MM_CU_GROUP + lane * 4;
    float v[4];
    load_columns(v, in, column);
    const float scale = group_scale(v);
    uint32_t pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t halves = widen2_half(act_codes(v[2 * i], v[2 * i + 1], scale));
      const float2 code = __half22float2(*reinterpret_cast<const __half2 *>(&halves));
      pair[i] = pack2(code.x * scale, code.y * scale);
    }
    if (column < in.k) *reinterpret_cast<uint2 *>(y + (size_t)blockIdx.x * in.k + column) = make_uint2(pair[0], pair[1]);
  }
}

}  // namespace

cudaError_t mm_cu_encode(const mm_cu_codes &to, const mm_cu_inputs &in, cudaStream_t s) {
  return launch(encode, to.rows, kWarps * 32, 0, s, to, in);
}

cudaError_t mm_cu_round(bf16 *y, uint32_t count, const mm_cu_inputs &in, cudaStream_t s) {
  return launch(round_rows, count, kWarps * 32, 0, s, y, in);
}
