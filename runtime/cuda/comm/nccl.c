/* NCCL's library (nccl.h). */
#include "runtime/cuda/comm/nccl.h"

#include <dlfcn.h>
#include <stdlib.h>

static bool too_old(const mm_nccl *n, int least, const char *where, mm_err *err) {
  return mm_fail(err, MM_UNSUPPORTED, "E_NCCL", mm_at(NULL, NULL),
                 "found NCCL %d.%d.%d; ranks %s need %d.%d.%d or newer ($MM_NCCL_SO names one)", n->version / 10000, n->version / 100 % 100,
                 n->version % 100, where, least / 10000, least / 100 % 100, least % 100);
}

bool mm_nccl_open(mm_nccl *n, mm_err *err) {
  const char *named = getenv("MM_NCCL_SO"), *path = named && *named ? named : "libnccl.so.2";
  void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return mm_fail(err, MM_UNSUPPORTED, "E_NCCL", mm_at(NULL, NULL),
                   "ranks of one stage are in several processes, which NCCL joins, and it was not found: %s; expected it where the dynamic "
                   "linker looks, or its path in $MM_NCCL_SO",
                   dlerror());
  *n = (mm_nccl){0};
  const struct {
    const char *name;
    void *function;
  } used[] = {
      {"ncclGetVersion", &n->get_version},     {"ncclGetUniqueId", &n->get_unique_id},          {"ncclCommInitRank", &n->comm_init_rank},
      {"ncclCommAbort", &n->comm_abort},       {"ncclCommGetAsyncError", &n->comm_async_error}, {"ncclAllGather", &n->all_gather},
      {"ncclGetErrorString", &n->error_string}};
  for (size_t i = 0; i < sizeof used / sizeof *used; i++)
    if (!(*(void **)used[i].function = dlsym(library, used[i].name)))
      return mm_fail(err, MM_UNSUPPORTED, "E_NCCL", mm_at(path, NULL), "found a library without %s, expected NCCL's", used[i].name);
  const int failed = n->get_version(&n->version);
  if (failed) return mm_fail(err, MM_UNSUPPORTED, "E_NCCL", mm_at(path, NULL), "ncclGetVersion: %s", n->error_string(failed));
  return n->version >= MM_NCCL_LEAST || too_old(n, MM_NCCL_LEAST, "of several processes", err);
}

bool mm_nccl_check_hosts(const mm_nccl *n, mm_err *err) {
  return n->version >= MM_NCCL_LEAST_HOSTS || too_old(n, MM_NCCL_LEAST_HOSTS, "on several hosts", err);
}
