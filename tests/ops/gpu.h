/* Harness of the GPU tests and benchmarks: fresh random inputs, poisoned device buffers, double references, graph timing. */
#ifndef MM_TESTS_OPS_GPU_H
#define MM_TESTS_OPS_GPU_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <functional>
#include <string>
#include <vector>

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

#define CUDA_OK(call)                                                                        \
  do {                                                                                       \
    cudaError_t e_ = (call);                                                                 \
    if (e_ != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

/* splitmix64; the seed is printed by main. */
struct rng {
  uint64_t s;
  uint64_t next();
  double uniform(); /* [0, 1) */
  double normal();
  uint32_t below(uint32_t n) { return (uint32_t)(next() % n); }
};
extern rng g_rng;

/* True if the current device takes the kernel: not every one has all. */
inline bool takes_here(mm_cu_kernel kernel, const mm_cu_weight &w, uint32_t tokens = 2) {
  return mm_cu_refuse(kernel, {&w, nullptr, tokens}) == cudaSuccess;
}
inline bool takes_here(mm_cu_kernel kernel, const mm_cu_weight &w13, const mm_cu_weight &w2, uint32_t tokens = 2) {
  return mm_cu_refuse(kernel, {&w13, &w2, tokens, 1}) == cudaSuccess;
}
/* The function that multiplies rows as they are here, but for the kernels of a few rows. */
decltype(&mm_cu_gemm) plain_linear(const mm_cu_weight &w, uint32_t tokens);
/* That of a few rows; NULL where this device has none for the weight. */
decltype(&mm_cu_gemm) few_linear(const mm_cu_weight &w, uint32_t tokens);
decltype(&mm_cu_experts_gemm) plain_experts(const mm_cu_weight &w13, const mm_cu_weight &w2, uint32_t tokens, uint32_t top_k);

inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
inline float to_float(float v) { return v; }
double e4m3(uint8_t code);
/* $MM_SMALL=N: a check of so many multiplications, more than N millions, is left out: for compute-sanitizer, which takes a hundred times as
 * long. */
bool left_out(double products);
/* While it lives, blocks of portable kernels have no more shared memory than every device has. */
struct least_shared {
  const size_t before = mm_cu_shared_limit;
  least_shared() {
    if (!hopper()) mm_cu_shared_limit = MM_CU_SHARED_LEAST;
  }
  ~least_shared() { mm_cu_shared_limit = before; }
};
/* The nearest e4m3, of two the even one; beyond the largest, the largest. By trying all. */
uint8_t nearest_e4m3(float v);
/* k numbers as products of codes see them: e4m3 under amax / 448 of 128 columns or of all, or under the scale that is given. scales: their
 * own. */
void round_row_to(const mm_cu_rounding &how, float *x, uint32_t k, std::vector<float> *scales = nullptr);
/* k numbers as quant/activation.c rounds them, in bf16. */
void round_row_as(const mm_cu_rounding &how, float *x, uint32_t k);
inline double silu_ref(double x) { return x / (1 + exp(-x)); }

/* A device array; poisoned (0xff bytes: NaN) until written. */
template <class T>
struct buffer {
  T *p = nullptr;
  size_t n = 0;
  buffer() = default;
  explicit buffer(size_t count) { open(count); }
  buffer(const buffer &) = delete;
  buffer &operator=(const buffer &) = delete;
  ~buffer() { cudaFree(p); }
  void open(size_t count) {
    cudaFree(p);
    n = count;
    CUDA_OK(cudaMalloc(&p, n * sizeof(T) + 256));
    poison();
  }
  void poison() { CUDA_OK(cudaMemset(p, 0xff, n * sizeof(T) + 256)); }
  void zero() { CUDA_OK(cudaMemset(p, 0, n * sizeof(T) + 256)); }
  void put(const std::vector<T> &v) {
    if (n != v.size()) open(v.size());
    CUDA_OK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> v(n);
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

/* Normal values, already rounded to bf16. */
std::vector<__nv_bfloat16> random_bf16(size_t n, double sigma = 1);
std::vector<float> random_float(size_t n, double mean, double sigma);

/* f(0) … f(n-1) on all processors. */
void parallel(uint32_t n, const std::function<void(uint32_t)> &f);

/* ‖got - want‖ / ‖want‖, or over ‖size‖, what each sum would be if the signs of its terms were random: so that few sums that happen to be
 * small do not make the error large. Infinite if anything is not finite. */
double relative_error(const std::vector<double> &want, const std::vector<double> &got, const std::vector<double> *size = nullptr);
/* Prints one line and counts a failure when the error is above limit or not a number. */
void report(const std::string &what, double error, double limit);
void report_true(const std::string &what, bool ok);
extern int g_failures;
/* True if run(x, tokens), which returns `tokens` rows, gives the same bits for a row of `width` numbers wherever it lies among `least` …
 * `most` rows and whatever the others hold. */
bool same_among_others(uint32_t least, uint32_t most, uint32_t width,
                       const std::function<std::vector<float>(const __nv_bfloat16 *x, uint32_t tokens)> &run);

/* A random weight of a scheme: what the device reads, and its meaning as plain numbers. */
struct test_weight {
  mm_cu_weight d = {};
  std::vector<float> w; /* [lead, n, k] */
  buffer<uint8_t> codes, micro;
  buffer<float> scale, global;
};
/* cell: of f32 scale grids (0: whole extent); ignored by NV and MX. */
void random_weight(test_weight *t, mm_cu_code code, mm_cu_scale kind, uint32_t lead, uint32_t n, uint32_t k, uint32_t cell_n = 128,
                   uint32_t cell_k = 128);

/* Puts a 4-bit code (int4 with its offset) at column k of a row of zeros, in pair order (weight.cuh). */
void put_nibble(uint8_t *row, uint32_t k, uint32_t v, bool e2m1);
/* The magnitudes of e2m1. */
extern const double kE2m1[8];

/* Room for the codes of rows of k numbers. */
struct code_buffers {
  buffer<uint8_t> code;
  buffer<float> scale;
  mm_cu_codes d;
  code_buffers(uint32_t rows, uint32_t k);
};

/* Median microseconds of one of `count` launches in a replayed graph. */
double time_graph(int count, const std::function<void(cudaStream_t, int)> &launch, int replays = 30);
/* Microseconds of a launch of so many floating-point operations by mma.sync on bf16 (bench_mma.cu). */
double time_mma(double *flop);
/* Device-to-device copy, bytes read plus written per second. */
double copy_rate();
/* Bytes with every e4m3 finite and every float scale sane, made on the device. */
void fill_random(void *p, size_t bytes, uint32_t seed);
void fill_random_bf16(__nv_bfloat16 *p, size_t n, uint32_t seed);
void fill_random_float(float *p, size_t n, float low, float high, uint32_t seed);

void test_load();
void test_peers();
void test_across();
void test_groups();
void test_linear();
void test_codes();
void test_experts();
void test_few_rows();
void test_shared();
void test_widened();
void test_mx();
void test_attention();
void test_block_attention();
void test_index_split();
void test_extended();
void test_lightning();
void test_rows();
void test_choice();
void test_edges();
void test_steps();
void test_forks();
void test_invariant();
void test_proposals();
void test_draft();
void test_sequences();
void test_models();
void test_rounded();
void test_cut_rows();
void test_ranks();
void bench_copy(); /* before the others: their ceiling */
void bench_load();
void bench_pool();
void bench_peers();
void bench_across();
void bench_groups();
void bench_linear();
void bench_experts();
void bench_widened();
void bench_mx();
void bench_products();
void bench_attention();
void bench_lightning();
void bench_rows();
void bench_choice();
void profile_kernels();

#endif
