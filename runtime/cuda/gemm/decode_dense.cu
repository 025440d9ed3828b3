/* y = x·Wᵀ for at most 64 rows of x by the tile that reads weights into registers (decode_tile.cuh), in code that is not of sm_90a.
 *
 * Where the weight rows are too few blocks for the device, several blocks share the columns of each, in spans: each writes its sums, and
 * the last of them to end adds all in the order of the columns. */
#include "runtime/cuda/gemm/decode_wide.cuh"
#include "runtime/cuda/gemm/dense_job.cuh"

namespace {

/* The sums of one span, in f32: to[kRows][kColumns]. */
template <class Form, class Job>
struct span_job {
  const Job &job;
  float *to;

  __device__ uint32_t rows() const { return job.rows(); }
  __device__ const bf16 *x(uint32_t r) const { return job.x(r); }
  __device__ weight_row weight(uint32_t r) const { return job.weight(r); }
  template <int N>
  __device__ void emit(uint32_t r, uint32_t c, const float (&v)[N][2]) const {
#pragma unroll
    for (int n = 0; n < N; n++) *reinterpret_cast<float2 *>(to + r * Form::kColumns + c + n * 8) = make_float2(v[n][0], v[n][1]);
  }
};

/* The sums of so many spans, one behind the other, to the job. */
template <class Form, class Job>
__device__ void add_spans(const Job &job, const float *from, uint32_t spans) {
  const uint32_t rows = job.rows();
  for (uint32_t i = threadIdx.x; i < rows * (Form::kColumns / 4); i += kTileThreads) {
    const uint32_t row = i / (Form::kColumns / 4), in = i % (Form::kColumns / 4), column = in / 4 * 16 + in % 4 * 2;
    float v[2][2] = {};
#pragma unroll 4
    for (uint32_t s = 0; s < spans; s++) {
      const float *const at = from + (s * Form::kRows + row) * Form::kColumns + column;
      const float2 a = __ldcg(reinterpret_cast<const float2 *>(at)), b = __ldcg(reinterpret_cast<const float2 *>(at + 8));
      v[0][0] += a.x, v[0][1] += a.y, v[1][0] += b.x, v[1][1] += b.y;
    }
    job.emit(row, column, v);
  }
}

/* blockIdx.x: tiles of rows, which read the same weights, side by side; y: tiles of weight rows; z: spans. */
template <mm_cu_code C, mm_cu_scale S, class Form>
__global__ void __launch_bounds__(kTileThreads, Form::kBlocks)
    decode_dense(const __grid_constant__ tile_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  using job = dense_job<Form>;
  grid_wait_and_launch_next();
  const job whole{w, a, blockIdx.x * Form::kRows, blockIdx.y * Form::kColumns};
  if (gridDim.z == 1) {
    decode_tile<C, S, Form>(w, p, whole);
    return;
  }
  const uint32_t tile = blockIdx.y * gridDim.x + blockIdx.x;
  float *const sums = a.spans.sums + (size_t)tile * gridDim.z * (Form::kRows * Form::kColumns);
  decode_tile<C, S, Form>(w, p, span_job<Form, job>{whole, sums + blockIdx.z * (Form::kRows * Form::kColumns)}, blockIdx.z * p.span);
  if (last_of(a.spans.counters + tile, gridDim.z)) add_spans<Form>(whole, sums, gridDim.z);
#else
  no_such_code();
#endif
}

/* The same by wide_tile. */
template <mm_cu_code C, mm_cu_scale S>
__global__ void __launch_bounds__(kTileThreads, 1)
    decode_wide(const __grid_constant__ tile_plan p, const __grid_constant__ mm_cu_weight w, const __grid_constant__ mm_cu_linear a) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  using Form = wide_form<C>;
  using job = dense_job<Form>;
  grid_wait_and_launch_next();
  const job whole{w, a, 0, blockIdx.y * Form::kColumns};
  if (gridDim.z == 1) {
    wide_tile<C, S>(w, p, whole, 0);
    return;
  }
  float *const sums = a.spans.sums + (size_t)blockIdx.y * gridDim.z * (Form::kRows * Form::kColumns);
  wide_tile<C, S>(w, p, span_job<Form, job>{whole, sums + blockIdx.z * (Form::kRows * Form::kColumns)}, blockIdx.z * p.span);
  if (last_of(a.spans.counters + blockIdx.y, gridDim.z)) add_spans<Form>(whole, sums, gridDim.z);
#else
  no_such_code();
#endif
}

struct dense_launch {
  const mm_cu_weight &w;
  const mm_cu_linear &a;
  cudaStream_t s;
  /* Columns of a block's span. A block costs a step for each kFill columns, and about kStart steps to start and end. */
  template <class Form, uint32_t kFill>
  uint32_t span(uint32_t tiles) const {
    constexpr uint32_t kStart = 3, kCapacity = MM_CU_SPAN_SUMS / (Form::kRows * Form::kColumns * Form::kBlocks);
    constexpr uint32_t kWaves = kCapacity < 4 ? kCapacity : 4; /* of blocks at most, where there are spans */
    static_assert(kWaves * Form::kBlocks <= MM_CU_SPAN_TILES, "a counter each");
    const uint32_t slots = Form::kBlocks * multiprocessors(), fills = ceil_div(w.k, kFill);
    uint32_t best = fills, least = UINT32_MAX;
    for (uint32_t spans = 1; spans <= fills && (spans == 1 || tiles * spans <= kWaves * slots); spans++) {
      const uint32_t each = ceil_div(fills, spans), cost = ceil_div(tiles * ceil_div(fills, each), slots) * (each + kStart);
      if (cost < least) least = cost, best = each;
    }
    return best * kFill;
  }
  template <mm_cu_code C, mm_cu_scale S, class Form>
  cudaError_t in() const {
    const uint32_t high = ceil_div(a.tokens, Form::kRows), wide = ceil_div(w.n, Form::kColumns);
    const tile_plan p = plan_tile<C, Form>(w, a.spans.sums ? span<Form, kFillStep<C, Form>>(high * wide) : UINT32_MAX);
    return launch(decode_dense<C, S, Form>, dim3(high, wide, ceil_div(w.k, p.span)), kTileThreads, p.shared, s, p, w, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t in_wide() const {
    using Form = wide_form<C>;
    const uint32_t wide = ceil_div(w.n, Form::kColumns);
    const tile_plan p = plan_wide<C>(w, a.spans.sums ? span<Form, Form::kChunk>(wide) : UINT32_MAX);
    return launch(decode_wide<C, S>, dim3(1, wide, ceil_div(w.k, p.span)), kTileThreads, p.shared, s, p, w, a);
  }
  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (C == MM_CU_BF16) {
      /* of 64 weight rows a block; a head's 128 meet all rows at once */
      if (a.tokens > 32 && w.n / 256 >= multiprocessors()) return in<C, S, decode_form<8, 8>>();
      return a.tokens <= 8 ? in<C, S, decode_form<1, 4>>() : a.tokens <= 16 ? in<C, S, decode_form<2, 4>>() : in<C, S, decode_form<4, 4>>();
    } else if constexpr (kTileTakes<C, S>) {
      if (a.tokens > 32) return in_wide<C, S>();
      return a.tokens <= 8 ? in<C, S, decode_form<1, 8>>() : a.tokens <= 16 ? in<C, S, decode_form<2, 8>>() : in<C, S, decode_form<4, 8>>();
    } else {
      return cudaErrorNotSupported;
    }
  }
};

}  // namespace

cudaError_t mm_cu_decode_dense(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const cudaError_t e = mm_cu_refuse(MM_CU_DECODE_DENSE, {&w, nullptr, a.tokens});
  return e != cudaSuccess ? e : for_scheme(w, dense_launch{w, a, s});
}
