/* Kernel launches with programmatic dependent launch, on the host side. */
#ifndef MM_CUDA_LAUNCH_H
#define MM_CUDA_LAUNCH_H

#include <cuda_runtime.h>

/* Launches kernel(args…), in clusters of so many blocks; it may start while the kernel before it on the stream runs (device.cuh,
 * grid_wait). */
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, unsigned cluster, unsigned threads, size_t shared, cudaStream_t stream,
                            Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (shared > 48 * 1024) {
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (e != cudaSuccess) return e;
  }
  cudaLaunchConfig_t c = {};
  c.gridDim = grid, c.blockDim = dim3(threads), c.dynamicSmemBytes = shared, c.stream = stream;
  cudaLaunchAttribute how[2] = {};
  how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, how[0].val.programmaticStreamSerializationAllowed = 1;
  how[1].id = cudaLaunchAttributeClusterDimension, how[1].val.clusterDim = {cluster, 1, 1};
  c.attrs = how, c.numAttrs = cluster ? 2 : 1;
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

/* The device runs code for sm_90a. */
inline bool hopper() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major == 9;
}

inline unsigned ceil_div(unsigned a, unsigned b) { return (a + b - 1) / b; }

#endif
