/* Asking the built code (built.h). */
#include "runtime/cuda/core/built.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>
#include <string>

namespace {

/* A kernel's attributes are those of the code that the device loads: of this one, the most threads of a block say which code that is. */
enum { kPlain = 32, kDependent = 64, kHopper = 96, kCodes = 128 };
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BUILT_THREADS kHopper
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BUILT_THREADS kDependent
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define BUILT_THREADS kCodes
#else
#define BUILT_THREADS kPlain
#endif
__global__ void __launch_bounds__(BUILT_THREADS) built_for(int *threads) { *threads = BUILT_THREADS; }

constexpr int kDevices = 16; /* that are remembered */

mm_cu_built query() {
  cudaFuncAttributes a = {};
  if (cudaFuncGetAttributes(&a, built_for) != cudaSuccess) {
    cudaGetLastError(); /* there is no such code */
    return MM_CU_BUILT_NONE;
  }
  return a.maxThreadsPerBlock == kHopper      ? MM_CU_BUILT_HOPPER
         : a.maxThreadsPerBlock == kDependent ? MM_CU_BUILT_DEPENDENT
         : a.maxThreadsPerBlock == kCodes     ? MM_CU_BUILT_CODES
                                              : MM_CU_BUILT_PLAIN;
}

thread_local char lack[160];

cudaError_t refuse(const char *what, unsigned long long needs, unsigned long long has) {
  snprintf(lack, sizeof lack, "needs %llu %s, found %llu", needs, what, has);
  return cudaErrorInvalidConfiguration;
}

/* $MM_TEST_SMEM in bytes. */
size_t limit_of_tests() {
  const char *const kib = getenv("MM_TEST_SMEM");
  return kib ? strtoul(kib, NULL, 10) * 1024 : 0;
}

}  // namespace

thread_local bool mm_cu_dry_run = false;
size_t mm_cu_shared_limit = limit_of_tests();

size_t mm_cu_shared_most() {
  int device = 0, most = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return 0;
  return mm_cu_shared_limit && mm_cu_shared_limit < (size_t)most ? mm_cu_shared_limit : (size_t)most;
}

mm_cu_built mm_cu_built_here() {
  static std::atomic<int> known[kDevices]; /* + 1 */
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return MM_CU_BUILT_NONE;
  if (device < kDevices && known[device] > 0) return (mm_cu_built)(known[device] - 1);
  const mm_cu_built built = query();
  if (device < kDevices) known[device] = built + 1;
  return built;
}

/* What the driver translated for this device has the device's own number, and that of the PTX it came from. */
void mm_cu_say_code(char *to, size_t size) {
  int device = 0, major = 0, minor = 0;
  cudaFuncAttributes a = {};
  to[0] = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaFuncGetAttributes(&a, built_for) != cudaSuccess) return;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const int here = 10 * major + minor;
  if (mm_cu_built_here() == MM_CU_BUILT_HOPPER)
    snprintf(to, size, "kernels of sm_90a");
  else if (a.binaryVersion == here && a.ptxVersion != here)
    snprintf(to, size, "portable kernels (PTX of compute_%d on sm_%d)", a.ptxVersion, here);
  else
    snprintf(to, size, "portable kernels (sm_%d on sm_%d)", a.binaryVersion, here);
  const size_t used = strlen(to);
  if (mm_cu_shared_limit)
    snprintf(to + used, size - used, ", %zu KB of shared memory for a block (MM_TEST_SMEM)", mm_cu_shared_most() / 1024);
}

static char noted[240];

void mm_cu_note_code() {
  static std::once_flag once;
  std::call_once(once, [] { mm_cu_say_code(noted, sizeof noted); });
}
void mm_cu_note_hosted() {
  static std::once_flag once;
  std::call_once(once, [] { snprintf(noted + strlen(noted), sizeof noted - strlen(noted), ", sums over ranks through host memory"); });
}
const char *mm_cu_noted_code() { return noted; }

bool mm_cu_check_device(mm_err *err) {
  if (mm_cu_built_here() != MM_CU_BUILT_NONE) return true;
  int device = 0;
  cudaDeviceProp p = {};
  cudaGetDevice(&device);
  cudaGetDeviceProperties(&p, device);
  const int built[] = {__CUDA_ARCH_LIST__};
  std::string archs;
  for (int a : built) archs += (archs.empty() ? "sm_" : ", sm_") + std::to_string(a / 10);
  char forced[MM_VARIABLE_TEXT];
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "found device %d, %s, sm_%d%d, and code for %s; build with CUDA_ARCH=%d%d or compute_80 to have code for it%s", device,
                 p.name, p.major, p.minor, archs.c_str(), p.major, p.minor, mm_variable_text(forced, "CUDA_FORCE_PTX_JIT"));
}

cudaError_t mm_cu_judge(const void *kernel, const cudaLaunchConfig_t &c) {
  cudaFuncAttributes a = {};
  const cudaError_t e = cudaFuncGetAttributes(&a, kernel);
  if (e != cudaSuccess) return e;
  const size_t bytes = a.sharedSizeBytes + c.dynamicSmemBytes, most = mm_cu_shared_most();
  if (bytes > most) return refuse("bytes of shared memory for a block", bytes, most);
  const unsigned threads = c.blockDim.x * c.blockDim.y * c.blockDim.z;
  if (threads > (unsigned)a.maxThreadsPerBlock) return refuse("threads in a block", threads, (unsigned)a.maxThreadsPerBlock);
  if (c.gridDim.y > 65535 || c.gridDim.z > 65535)
    return refuse("blocks side by side", c.gridDim.y > c.gridDim.z ? c.gridDim.y : c.gridDim.z, 65535);
  return cudaSuccess;
}

const char *mm_cu_lack() { return lack; }
void mm_cu_forget_lack() { lack[0] = 0; }
