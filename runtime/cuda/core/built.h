/* The code that was compiled for the current device, by the attributes of a kernel: a device may run code built for an older one. */
#ifndef MM_CUDA_BUILT_H
#define MM_CUDA_BUILT_H

#include <cuda_runtime.h>

#include "formats/system/base.h"

enum mm_cu_built {
  MM_CU_BUILT_NONE,      /* nothing runs here */
  MM_CU_BUILT_PLAIN,     /* code for sm_80 and above; no programmatic dependent launch */
  MM_CU_BUILT_CODES,     /* the same kernels, for sm_89: with products of E4M3 codes (gemm_codes.cuh) */
  MM_CU_BUILT_DEPENDENT, /* the same kernels, for sm_90 and above: with it */
  MM_CU_BUILT_HOPPER     /* sm_90a: the kernels of its tensor cores and TMA too */
};
mm_cu_built mm_cu_built_here();

/* Words for the code that runs on the current device: "kernels of sm_90a", "portable kernels (sm_80 on sm_86)", "portable kernels (PTX of
 * compute_80 on sm_90)". */
void mm_cu_say_code(char *to, size_t size);
/* The words for the current device are kept, if none are yet; "" before. */
void mm_cu_note_code();
/* And that sums over ranks go through host memory. */
void mm_cu_note_hosted();
const char *mm_cu_noted_code();

/* Bytes of shared memory, static and dynamic, that a block may have on the current device. */
size_t mm_cu_shared_most();
/* 0, or the most that blocks may have in tests, as if the device had no more ($MM_TEST_SMEM, in KiB): launches with more are refused. */
extern size_t mm_cu_shared_limit;
/* Every device has so many, from sm_80 on: each kernel that is no kernel of sm_90a has a form that takes no more. */
#define MM_CU_SHARED_LEAST (99 * 1024)

/* MM_UNSUPPORTED E_DEVICE, naming the device, what was built and what to do, where no code serves the current device. */
MM_MUST_USE bool mm_cu_check_device(mm_err *err);

/* While set, launches of this thread (launch.h) are judged and not done. */
extern thread_local bool mm_cu_dry_run;
/* Checks a launch against the current device: cudaSuccess, or an error, with the missing resource in mm_cu_lack(). */
cudaError_t mm_cu_judge(const void *kernel, const cudaLaunchConfig_t &c);
/* The resource that the last refused launch of this thread lacked in a dry run; "" after another error. */
const char *mm_cu_lack();
void mm_cu_forget_lack();

#endif
