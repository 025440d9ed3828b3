/* The device's own copy rate: the ceiling printed with the times of kernels and layers. */
#include <algorithm>

#include "runtime/cuda/core/upload.h"

namespace {

constexpr size_t kBytes = (size_t)4 << 30;
constexpr unsigned kThreads = 512, kWords = 4; /* 16-byte words of a thread, all in flight */

__global__ void copy_words(uint4 *to, const uint4 *from) {
  const size_t at = blockIdx.x * (size_t)(kWords * kThreads) + threadIdx.x;
  uint4 v[kWords];
#pragma unroll
  for (unsigned i = 0; i < kWords; i++) v[i] = __ldcs(from + at + i * kThreads);
#pragma unroll
  for (unsigned i = 0; i < kWords; i++) __stcs(to + at + i * kThreads, v[i]);
}

}  // namespace

/* The best of seven, by this kernel or by cudaMemcpyAsync. */
bool mm_cu_copy_rate(double *rate, mm_err *err) {
  mm_cu_memory memory;
  char *from = memory.array<char>(kBytes, err), *to = memory.array<char>(kBytes, err);
  cudaEvent_t start = nullptr, end = nullptr;
  float best = 1e30f;
  bool ok = from && to && mm_cu_random_bits(from, kBytes, err) && mm_cu_check(cudaEventCreate(&start), "cudaEventCreate", err) &&
            mm_cu_check(cudaEventCreate(&end), "cudaEventCreate", err);
  for (int i = 0; ok && i < 14; i++) {
    float ms = 0;
    ok = mm_cu_check(cudaEventRecord(start), "record event", err);
    if (i % 2 == 0) {
      copy_words<<<(unsigned)(kBytes / (kWords * kThreads * 16)), kThreads>>>(reinterpret_cast<uint4 *>(to),
                                                                              reinterpret_cast<uint4 *>(from));
      ok = ok && mm_cu_check(cudaGetLastError(), "copy_words", err);
    } else {
      ok = ok && mm_cu_check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice), "copy", err);
    }
    ok = ok && mm_cu_check(cudaEventRecord(end), "record event", err) && mm_cu_check(cudaEventSynchronize(end), "copy", err) &&
         mm_cu_check(cudaEventElapsedTime(&ms, start, end), "elapsed", err);
    best = std::min(best, ms);
  }
  if (start) cudaEventDestroy(start);
  if (end) cudaEventDestroy(end);
  *rate = 2e3 * (double)kBytes / (double)best;
  return ok;
}
