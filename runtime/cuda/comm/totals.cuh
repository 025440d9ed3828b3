/* Sums and maxima over the numbers of all ranks, and words in host memory: for kernels that receive them through peer memory (peers.cu)
 * and by NCCL (nccl_sums.cu). */
#ifndef MM_CUDA_TOTALS_CUH
#define MM_CUDA_TOTALS_CUH

#include "runtime/cuda/core/device.cuh"

/* Host memory that both sides write. */
__device__ __forceinline__ uint32_t get_shared(const uint32_t *from) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
/* Two words in one read; from: a multiple of 8. */
__device__ __forceinline__ uint2 get_shared_pair(const uint32_t *from) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return make_uint2((uint32_t)v, (uint32_t)(v >> 32));
}
__device__ __forceinline__ void put_shared(uint32_t *to, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

enum reduction { SUM, MAX };

/* Two numbers of bf16 in four bytes, or one of f32. */
template <class T>
struct numbers;
template <>
struct numbers<bf16> {
  static constexpr int n = 2;
  static __device__ void open(uint32_t w, float *v) { v[0] = __uint_as_float(w << 16), v[1] = __uint_as_float(w & 0xffff0000u); }
  static __device__ uint32_t close(const float *v) {
    const bf162 p = __floats2bfloat162_rn(v[0], v[1]);
    return *reinterpret_cast<const uint32_t *>(&p);
  }
};
template <>
struct numbers<float> {
  static constexpr int n = 1;
  static __device__ void open(uint32_t w, float *v) { v[0] = __uint_as_float(w); }
  static __device__ uint32_t close(const float *v) { return __float_as_uint(v[0]); }
};

/* The reduction of W words of four bytes over all ranks, first to last. */
template <class T, reduction R, int W>
struct total {
  float v[W * numbers<T>::n];
  __device__ void add(const uint32_t *w, bool first) {
#pragma unroll
    for (int i = 0; i < W; i++) {
      float x[numbers<T>::n];
      numbers<T>::open(w[i], x);
#pragma unroll
      for (int k = 0; k < numbers<T>::n; k++) {
        float &t = v[i * numbers<T>::n + k];
        t = first ? x[k] : R == SUM ? t + x[k] : t > x[k] ? t : x[k];
      }
    }
  }
  __device__ uint32_t word(int i) const { return numbers<T>::close(v + i * numbers<T>::n); }
};

#endif
