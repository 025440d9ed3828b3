/* Kernel launches with programmatic dependent launch, on the host side. */
#ifndef MM_CUDA_LAUNCH_H
#define MM_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include <mutex>

#include "runtime/cuda/core/built.h"

inline std::mutex mm_cu_raising; /* ranks that share a device raise the same kernel's limit */

/* A block of the kernel may have so much dynamic shared memory. Never less than before: recorded steps hold launches with more, and another
 * rank on this device may be about to launch one. */
template <class... Params>
cudaError_t allow_shared(void (*kernel)(Params...), size_t shared) {
  if (shared <= 48 * 1024) return cudaSuccess;
  cudaFuncAttributes a = {};
  cudaError_t e = cudaFuncGetAttributes(&a, kernel);
  if (e != cudaSuccess || a.maxDynamicSharedSizeBytes >= (int)shared) return e;
  const std::lock_guard<std::mutex> lock(mm_cu_raising);
  e = cudaFuncGetAttributes(&a, kernel);
  if (e != cudaSuccess || a.maxDynamicSharedSizeBytes >= (int)shared) return e;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
}

/* Launches kernel(args…), in clusters of so many blocks; it may start while the kernel before it on the stream runs (device.cuh), where
 * the code is built for that. */
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, unsigned cluster, unsigned threads, size_t shared, cudaStream_t stream,
                            Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  cudaLaunchConfig_t c = {};
  c.gridDim = grid, c.blockDim = dim3(threads), c.dynamicSmemBytes = shared, c.stream = stream;
  if (mm_cu_dry_run) return mm_cu_judge(reinterpret_cast<const void *>(kernel), c);
  cudaError_t e = mm_cu_shared_limit ? mm_cu_judge(reinterpret_cast<const void *>(kernel), c) : cudaSuccess;
  if (e == cudaSuccess) e = allow_shared(kernel, shared);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute how[2] = {};
  if (mm_cu_built_here() >= MM_CU_BUILT_DEPENDENT) {
    how[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[c.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster) how[c.numAttrs].id = cudaLaunchAttributeClusterDimension, how[c.numAttrs++].val.clusterDim = {cluster, 1, 1};
  c.attrs = how;
  return cudaLaunchKernelEx(&c, kernel, static_cast<Params>(args)...);
}
/* In the clusters that the kernel itself names, if any. */
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared, cudaStream_t stream, Args... args) {
  return launch_clusters(kernel, grid, 0, threads, shared, stream, args...);
}

/* Multiprocessors of the current device. */
inline unsigned multiprocessors() {
  int device = 0, n = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
  return (unsigned)n;
}

/* The code that runs here has the kernels of sm_90a. */
inline bool hopper() { return mm_cu_built_here() == MM_CU_BUILT_HOPPER; }

/* It has products of E4M3 codes by mma.sync. Code for sm_90 would make f16 of them for each product. */
inline bool codes_by_mma() { return mm_cu_built_here() == MM_CU_BUILT_CODES; }

inline unsigned ceil_div(unsigned a, unsigned b) { return (a + b - 1) / b; }

#endif
