/* Loaded bytes in the form of their file, brought into the kernels' form on the device (load.h). */
#include "runtime/cuda/core/load.h"

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

/* A block or several of them to a hole. */
__global__ void zero_holes(char *base, const mm_hole *hole) {
  const mm_hole h = hole[blockIdx.x];
  char *const at = base + h.at;
  const uint64_t ragged = -reinterpret_cast<uintptr_t>(at) & 15, head = ragged < h.bytes ? ragged : h.bytes, words = (h.bytes - head) / 16;
  uint4 *const word = reinterpret_cast<uint4 *>(at + head);
  for (uint64_t i = blockIdx.y * (uint64_t)blockDim.x + threadIdx.x; i < words; i += (uint64_t)gridDim.y * blockDim.x)
    word[i] = make_uint4(0, 0, 0, 0);
  if (blockIdx.y > 0) return;
  for (uint64_t i = threadIdx.x; i < head; i += blockDim.x) at[i] = 0;
  for (uint64_t i = head + 16 * words + threadIdx.x; i < h.bytes; i += blockDim.x) at[i] = 0;
}

template <class T>
cudaError_t spread(char *to, const mm_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s) {
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
cudaError_t widen(char *to, const mm_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s) {
  widen_numbers<<<kBlocks, kThreads, 0, s>>>(reinterpret_cast<float *>(to) + first / sizeof(T), static_cast<const T *>(from), n / sizeof(T),
                                             l.factor);
  return cudaGetLastError();
}

}  // namespace

cudaError_t mm_cu_land(char *base, const mm_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s) {
  char *const to = base + l.at;
  if (l.how == MM_LAND_SPREAD) {
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

cudaError_t mm_cu_zero_holes(char *base, const mm_hole *hole, uint64_t holes, cudaStream_t s) {
  if (holes == 0) return cudaSuccess;
  zero_holes<<<dim3((unsigned)holes, 16), kThreads, 0, s>>>(base, hole);
  return cudaGetLastError();
}
