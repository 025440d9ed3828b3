/* NCCL's library, found when it is needed: no build needs it. The functions used are declared here. */
#ifndef MM_CUDA_NCCL_H
#define MM_CUDA_NCCL_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As NCCL 2 numbers them: major · 10000 + minor · 100 + patch. */
#define MM_NCCL_LEAST       22800 /* the oldest that was tried */
#define MM_NCCL_LEAST_HOSTS 23004 /* across hosts: in 2.28.9 recorded steps may wait for ever when they are replayed */

typedef struct mm_nccl_id {
  char byte[128];
} mm_nccl_id;

enum { MM_NCCL_OK = 0, MM_NCCL_BYTES = 0 }; /* ncclSuccess; ncclInt8 */

/* Results are ncclResult_t; comm is ncclComm_t, stream a cudaStream_t. */
typedef struct mm_nccl {
  int version;
  int (*get_version)(int *version);
  int (*get_unique_id)(mm_nccl_id *id);
  int (*comm_init_rank)(void **comm, int ranks, mm_nccl_id id, int rank);
  int (*comm_abort)(void *comm);
  int (*comm_async_error)(void *comm, int *error);
  int (*all_gather)(const void *from, void *to, size_t count, int type, void *comm, void *stream);
  const char *(*error_string)(int error);
} mm_nccl;

/* The library that $MM_NCCL_SO names, else libnccl.so.2 where the dynamic linker finds it; it is not closed again. MM_UNSUPPORTED E_NCCL
 * where it is not there, lacks one of these, or is older than MM_NCCL_LEAST. Any thread. */
MM_MUST_USE bool mm_nccl_open(mm_nccl *n, mm_err *err);
/* MM_UNSUPPORTED E_NCCL where it is too old for processes of several hosts. */
MM_MUST_USE bool mm_nccl_check_hosts(const mm_nccl *n, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
