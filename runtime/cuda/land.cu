/* What the device does with bytes that came from a file as they are stored (load.h). */
#include "runtime/cuda/load.h"

namespace {

constexpr unsigned kBlocks = 1024, kThreads = 256;

/* n units of a plane, from unit `first` on, to rows of `pitch` units. */
template <class T>
__global__ void spread_rows(T *to, const T *from, uint64_t first, uint64_t n, uint64_t row, uint64_t pitch) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
    const uint64_t at = first + i, r = at / row;
    to[r * pitch + (at - r * row)] = from[i];
  }
}

template <class T>
cudaError_t spread(char *to, const mm_cu_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s) {
  spread_rows<T><<<kBlocks, kThreads, 0, s>>>(reinterpret_cast<T *>(to), static_cast<const T *>(from), first / sizeof(T), n / sizeof(T),
                                              l.row / sizeof(T), l.pitch / sizeof(T));
  return cudaGetLastError();
}

struct e8m0 {
  uint8_t v;
};
__device__ float wide(float v) { return v; }
__device__ float wide(__half v) { return __half2float(v); }
__device__ float wide(__nv_bfloat16 v) { return __uint_as_float((uint32_t)__bfloat16_as_ushort(v) << 16); }
__device__ float wide(e8m0 e) { return __uint_as_float(e.v == 0 ? 0x00400000u : (uint32_t)e.v << 23); }

template <class T>
__global__ void widen_numbers(float *to, const T *from, uint64_t n, float factor) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
    to[i] = factor == 1 ? wide(from[i]) : wide(from[i]) * factor;
}

template <class T>
cudaError_t widen(char *to, const mm_cu_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s) {
  widen_numbers<<<kBlocks, kThreads, 0, s>>>(reinterpret_cast<float *>(to) + first / sizeof(T), static_cast<const T *>(from), n / sizeof(T),
                                             l.factor);
  return cudaGetLastError();
}

}  // namespace

cudaError_t mm_cu_land(char *base, const mm_cu_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s) {
  char *const to = base + l.at;
  if (l.how == mm_cu_landing::SPREAD) {
    const uint64_t all = first | n | l.row | l.pitch | reinterpret_cast<uintptr_t>(from);
    return all % 4 == 0 ? spread<uint32_t>(to, l, from, first, n, s) : spread<uint8_t>(to, l, from, first, n, s);
  }
  switch (l.from) {
    case MM_F32: return widen<float>(to, l, from, first, n, s);
    case MM_BF16: return widen<__nv_bfloat16>(to, l, from, first, n, s);
    case MM_F16: return widen<__half>(to, l, from, first, n, s);
    default: return widen<e8m0>(to, l, from, first, n, s);
  }
}

/* Words of four bytes: rows that lie close hold no others; rows that were spread are put in order with their padding, once all are there.
 */
cudaError_t mm_cu_land_nibbles(char *base, const mm_cu_landing &l, uint64_t first, uint64_t n, cudaStream_t s) {
  uint8_t *const codes = reinterpret_cast<uint8_t *>(base + l.at);
  const bool last = first + n == l.bytes;
  if (l.how == mm_cu_landing::SPREAD) return last ? mm_cu_reorder(codes, l.bytes / l.row * l.pitch / 4, l.nibbles, s) : cudaSuccess;
  const uint64_t from = first / 4, to = (first + n) / 4;
  return to > from ? mm_cu_reorder(codes + from * 4, to - from, l.nibbles, s) : cudaSuccess;
}
