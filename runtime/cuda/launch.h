/* Kernel launches with programmatic dependent launch, on the host side. */
#ifndef MM_CUDA_LAUNCH_H
#define MM_CUDA_LAUNCH_H

#include <cuda_runtime.h>

/* Launches kernel(args…); it may start while the kernel before it on the stream runs (device.cuh, grid_wait). */
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared, cudaStream_t stream, Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (shared > 48 * 1024) {
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (e != cudaSuccess) return e;
  }
  cudaLaunchConfig_t c = {};
  c.gridDim = grid, c.blockDim = dim3(threads), c.dynamicSmemBytes = shared, c.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &early, c.numAttrs = 1;
  return cudaLaunchKernelEx(&c, kernel, static_cast<Params>(args)...);
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
