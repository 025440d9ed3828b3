/* The backends of this build by name, the numbers of devices, and what limits come to. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/ops.h"

static const mm_ops *const devices[] = {
    &mm_ops_cpu,
#ifdef MM_CUDA
    &mm_ops_cuda,
#endif
};

bool mm_ops_run(const mm_ops *ops, const mm_model *m, mm_err *err) {
  if (!mm_model_extended(m) || (ops->select && ops->mlp)) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "found device %s and a model %s, whose sparse attention, norms and MLPs it does not compute; expected --device cpu",
                 ops->name, m->architecture);
}

bool mm_ops_keep_index(const mm_ops *ops, const mm_model *m, const mm_run_options *o, mm_err *err) {
  if (o->index_split && !m->index_heads)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, NULL),
                   "found --index-split %u; the model has no index keys, expected MiniMax-M3", o->index_split);
  if (!o->index_fp8 || (m->index_heads && ops->cache.index_fp8)) return true;
  if (!m->index_heads)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, NULL),
                   "found --index-cache-dtype fp8; the model has no index keys, expected MiniMax-M3");
  return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, NULL),
                 "found --index-cache-dtype fp8; device %s keeps index keys in its own type alone, expected --device cpu", ops->name);
}

bool mm_ops_run_groups(const mm_ops *ops, const mm_pack *p, mm_err *err) {
  if (mm_pack_groups(p) == 1 || ops->ranks.gather) return true;
  return mm_fail(
      err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL),
      "found --attn-tp %u of --tp %u; device %s runs attention cut for all ranks alone; expected --device cpu, --dp 1, or a conversion "
      "without --attn-tp",
      p->attn_tp, p->tp, ops->name);
}

const mm_ops *mm_ops_find(const char *name, mm_err *err) {
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
    if (strcmp(devices[i]->name, name) == 0) return devices[i];
  if (strcmp(name, "cuda") == 0)
    mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
            "found device \"cuda\", but this build has no CUDA backend; expected cpu, or a build with nvcc (make CUDA=1)");
  mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found device \"%s\", expected one of %s", name, MM_DEVICES);
  return NULL;
}

bool mm_devices_shared(const uint32_t *device, uint32_t ranks) {
  for (uint32_t i = 0; device && i < ranks; i++)
    for (uint32_t k = 0; k < i; k++)
      if (device[i] == device[k]) return true;
  return false;
}

bool mm_devices_read(const char *name, const char *list, uint32_t ranks, uint32_t **device, mm_err *err) {
  const char *at = list;
  *device = NULL;
  if (!at) return true;
  if (strcmp(name, "cpu") == 0)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                   "--devices: found numbers of GPUs with --device cpu, expected --device cuda");
  if (!(*device = mm_calloc(ranks, sizeof **device, err))) return false;
  uint32_t n = 0;
  for (bool more = true; more; n++) {
    char *end;
    errno = 0;
    const unsigned long v = strtoul(at, &end, 10);
    if (n == ranks || end == at || *at < '0' || *at > '9' || errno || v > 1023 || (*end && *end != ',')) break;
    (*device)[n] = (uint32_t)v;
    more = *end == ',';
    at = end + more;
    if (more || n + 1 < ranks) continue;
    /* Ranks wait for each other in kernels. On one device each rank's stream needs a hardware queue of its own, or the kernel that a rank
     * waits for is queued behind the waiting one. CUDA's default is 8 queues; it reads this variable when it starts. */
    if (mm_devices_shared(*device, ranks)) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    return true;
  }
  free(*device);
  *device = NULL;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                 "--devices: found \"%s\", expected %u numbers with commas between them, one for each rank", list, ranks);
}

bool mm_limits_pages(const mm_limits *l, uint32_t *pages, mm_err *err) {
  const uint64_t all = l->slots * mm_ceil_div(l->max_positions, MM_PAGE);
  const uint64_t n = l->pages ? l->pages : all;
  if (n > INT32_MAX)
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %llu pages, expected fewer than 2^31", (unsigned long long)n);
  *pages = (uint32_t)n;
  return true;
}
