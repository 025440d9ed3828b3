/* What was compiled for the current device, asked of the code itself: a device may run code that was built for less than it is. */
#ifndef MM_CUDA_BUILT_H
#define MM_CUDA_BUILT_H

#include <cuda_runtime.h>

#include "formats/system/base.h"

enum mm_cu_built {
  MM_CU_BUILT_NONE,      /* nothing runs here */
  MM_CU_BUILT_PLAIN,     /* code for sm_80 and above; no programmatic dependent launch */
  MM_CU_BUILT_DEPENDENT, /* the same kernels, for sm_90 and above: with it */
  MM_CU_BUILT_HOPPER     /* sm_90a: the kernels of its tensor cores and copy engine too */
};
mm_cu_built mm_cu_built_here();

/* MM_UNSUPPORTED E_DEVICE, naming the device, what was built and what to do, where no code serves the current device. */
MM_MUST_USE bool mm_cu_check_device(mm_err *err);

/* While set, launches of this thread (launch.h) are judged and not done. */
extern thread_local bool mm_cu_rehearsing;
/* Whether the current device would take the launch: cudaSuccess, or an error and what is lacking in mm_cu_lack(). */
cudaError_t mm_cu_judge(const void *kernel, const cudaLaunchConfig_t &c);
/* Of the last launch of this thread that was refused while rehearsing; "" where that was for another cause. */
const char *mm_cu_lack();
void mm_cu_forget_lack();

#endif
