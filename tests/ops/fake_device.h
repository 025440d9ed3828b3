/* A CUDA runtime without a device, for tests of the host's side: memory is the host's, copies are done at once, kernels do nothing. It
 * watches what calls the backend makes and when. A kernel of a sum (reduce_…) and the one that shares logits wait for those of the other
 * ranks: who synchronises with a stream waits until each rank has launched as many of them, or for fake.timeout_ms, and then says so in
 * the ranks' control word as the kernel would. Included once, by a program that links nothing of the real runtime. */
#ifndef MM_TESTS_FAKE_DEVICE_H
#define MM_TESTS_FAKE_DEVICE_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TIMEOUT_MS 30000 /* nobody waits so long: all come, or one fails and says so; where one hangs, a test takes less */
#define BLOCKS     8192
#define STREAMS    256
#define KERNELS    2048
#define SHARED_AT  72 /* of `shared` in a peer_view, as peers.cuh says */

static struct fake {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct {
    char *at;
    size_t bytes;
    bool device;
  } block[BLOCKS]; /* device and pinned memory that is there */
  uint32_t blocks;
  struct CUstream_st {
    bool open, captures;
    pthread_t owner;
    uint32_t sums, captured; /* sums launched since the ranks were last reset */
    bool ranks;              /* some were, ever */
    bool launched, ran;      /* a kernel; to its end */
    bool uploads;            /* a graph */
    int device;
    volatile uint32_t *word; /* of the ranks that wait for each other, of a stage: what they share; 0: all is well */
  } stream[STREAMS];
  struct CUgraphExec_st {
    uint32_t sums;
  } graph[BLOCKS];
  uint32_t graphs;
  struct {
    const void *host;
    const char *name;
  } kernel[KERNELS];
  uint32_t kernels;
  volatile uint32_t *control;                       /* the word of ranks that NCCL joins */
  uint32_t ranks, registered, registers, borrowed;  /* ranks: of a stage; registers: ever */
  uint32_t fail_malloc_of;                          /* the next cudaMalloc of so many bytes or more fails; 0: none */
  uint32_t copy_us;                                 /* that a large copy takes its thread */
  int slow_device;                                  /* those to this one take ten times as long where copy_us is not 0 */
  uint32_t timeout_ms;                              /* of a kernel, for those of other ranks */
  uint64_t copied;                                  /* bytes, by large copies, ever */
  bool no_streams, twice;                           /* no stream can be made; one was destroyed twice */
  bool no_driver;                                   /* the machine has none */
  bool no_peers;                                    /* devices cannot write to each other's memory */
  const char *fail_launch_of;                       /* the next launch of a kernel whose name has this in it fails; or NULL */
  void (*on_launch)(const char *name, void **args); /* by what stands for the kernel; or NULL */
  void (*on_wait)(bool done);                       /* before and after a stream's kernels wait for other ranks', by its thread; or NULL */
  char wrong[256];                                  /* the first call that should not have been made */
} fake = {.timeout_ms = TIMEOUT_MS, .slow_device = -1, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static _Thread_local int fake_device;
static _Thread_local cudaStream_t fake_capturing;

static void fake_wrong(const char *call, const char *reason) {
  if (!fake.wrong[0]) snprintf(fake.wrong, sizeof fake.wrong, "%s %s", call, reason);
}

/* Under the lock. */
static bool fake_failed(cudaStream_t s) { return s->word && *s->word; }
static uint32_t fake_least(cudaStream_t of) { /* of the stream's stage */
  uint32_t ranks = 0, least = UINT32_MAX;
  for (uint32_t i = 0; i < STREAMS; i++) {
    const struct CUstream_st *s = &fake.stream[i];
    if (s->open && s->ranks && s->word == of->word) ranks++, least = s->sums < least ? s->sums : least;
  }
  return ranks < fake.ranks ? 0 : least;
}
static bool fake_stuck(cudaStream_t s) { return s && s->open && s->ranks && !fake_failed(s) && s->sums > fake_least(s); }
static bool fake_waits(void) { /* some kernel for another rank's */
  for (uint32_t i = 0; i < STREAMS; i++)
    if (fake_stuck(&fake.stream[i])) return true;
  return false;
}

/* At a call that may wait until devices are idle. */
static void fake_idle(const char *call) {
  pthread_mutex_lock(&fake.lock);
  if (fake_waits()) fake_wrong(call, "while a rank's kernel waits for another rank");
  if (fake_capturing) fake_wrong(call, "while a step is recorded");
  pthread_mutex_unlock(&fake.lock);
}

static cudaError_t fake_add(void **p, size_t bytes, bool device) {
  pthread_mutex_lock(&fake.lock);
  const bool fails = device && fake.fail_malloc_of && bytes >= fake.fail_malloc_of;
  if (fails) fake.fail_malloc_of = 0;
  *p = fails || fake.blocks == BLOCKS ? NULL : calloc(1, bytes + 1);
  if (*p) {
    fake.block[fake.blocks].at = *p, fake.block[fake.blocks].bytes = bytes;
    fake.block[fake.blocks++].device = device;
  }
  pthread_mutex_unlock(&fake.lock);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
static cudaError_t fake_remove(const char *call, void *p) {
  if (!p) return cudaSuccess;
  pthread_mutex_lock(&fake.lock);
  uint32_t i = 0;
  while (i < fake.blocks && fake.block[i].at != p) i++;
  if (i == fake.blocks) fake_wrong(call, "of memory that is not there");
  if (i < fake.blocks) free(p), fake.block[i] = fake.block[--fake.blocks];
  pthread_mutex_unlock(&fake.lock);
  return cudaSuccess;
}
/* Checks that [p, p + bytes) lies in a block, or in no device's memory at all. */
static void fake_range(const char *call, const void *p, size_t bytes, bool device) {
  bool there = !device;
  pthread_mutex_lock(&fake.lock);
  for (uint32_t i = 0; i < fake.blocks; i++) {
    const char *at = fake.block[i].at, *end = at + fake.block[i].bytes;
    if ((const char *)p >= at && (const char *)p < end) there = (const char *)p + bytes <= end;
  }
  if (!there) fake_wrong(call, "outside of memory");
  pthread_mutex_unlock(&fake.lock);
}

/* A rank sets its epoch to what all others set theirs to. */
static void fake_reset(void) {
  pthread_mutex_lock(&fake.lock);
  for (uint32_t i = 0; i < STREAMS; i++)
    if (fake.stream[i].ranks && pthread_equal(fake.stream[i].owner, pthread_self())) fake.stream[i].sums = 0;
  pthread_mutex_unlock(&fake.lock);
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **p, size_t bytes) {
  fake_idle("cudaMalloc");
  return fake_add(p, bytes, true);
}
/* Sum over all ranks' devices, which have 64 GiB. */
static uint64_t fake_used(void) {
  uint64_t used = 0;
  pthread_mutex_lock(&fake.lock);
  for (uint32_t i = 0; i < fake.blocks; i++) used += fake.block[i].device ? fake.block[i].bytes : 0;
  pthread_mutex_unlock(&fake.lock);
  return used;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = (size_t)64 << 30;
  *free = *total - fake_used();
  return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
  if (p) fake_idle("cudaFree");
  return fake_remove("cudaFree", p);
}
/* Only within this process: the handle is the address. */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
  memset(h, 0, sizeof *h);
  memcpy(h, &p, sizeof p);
  fake_range("cudaIpcGetMemHandle", p, 1, true);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags) {
  fake_idle("cudaIpcOpenMemHandle");
  memcpy(p, &h, sizeof *p);
  fake_range("cudaIpcOpenMemHandle", *p, 1, true);
  __atomic_add_fetch(&fake.borrowed, 1, __ATOMIC_SEQ_CST);
  return (void)flags, cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *p) {
  fake_range("cudaIpcCloseMemHandle", p, 1, true);
  __atomic_sub_fetch(&fake.borrowed, 1, __ATOMIC_SEQ_CST);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **p, size_t bytes) {
  fake_idle("cudaMallocHost");
  return fake_add(p, bytes, false);
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  fake_idle("cudaHostAlloc");
  (void)flags;
  return fake_add(p, bytes, false);
}
cudaError_t cudaFreeHost(void *p) {
  pthread_mutex_lock(&fake.lock);
  for (uint32_t i = 0; p && i < STREAMS; i++)
    if (p == (void *)(uintptr_t)fake.stream[i].word) fake.stream[i].word = NULL, fake.stream[i].ranks = false;
  pthread_mutex_unlock(&fake.lock);
  if (p) fake_idle("cudaFreeHost");
  return fake_remove("cudaFreeHost", p);
}
cudaError_t cudaHostGetDevicePointer(void **to, void *p, unsigned flags) { return (void)flags, *to = p, cudaSuccess; }
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
  (void)p, (void)bytes, (void)flags;
  fake_idle("cudaHostRegister");
  __atomic_add_fetch(&fake.registered, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&fake.registers, 1, __ATOMIC_SEQ_CST);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) {
  (void)p;
  fake_idle("cudaHostUnregister");
  __atomic_sub_fetch(&fake.registered, 1, __ATOMIC_SEQ_CST);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  if (bytes) fake_range("cudaMemcpy", kind == cudaMemcpyHostToDevice ? to : from, bytes, true);
  if (bytes) memcpy(to, from, bytes);
  if (bytes == sizeof(uint32_t) && kind == cudaMemcpyHostToDevice) fake_reset();
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
  const uint32_t us = fake.copy_us * (fake_device == fake.slow_device ? 10 : 1);
  const struct timespec pause = {us / 1000000, us % 1000000 * 1000};
  (void)s;
  if (bytes && kind != cudaMemcpyDeviceToHost) fake_range("cudaMemcpyAsync", to, bytes, true);
  if (bytes && kind != cudaMemcpyHostToDevice) fake_range("cudaMemcpyAsync", from, bytes, true);
  if (kind == cudaMemcpyHostToDevice && bytes > 65536 && fake.copy_us) nanosleep(&pause, NULL);
  if (bytes) memmove(to, from, bytes);
  if (kind == cudaMemcpyHostToDevice && bytes > 65536) __atomic_add_fetch(&fake.copied, bytes, __ATOMIC_SEQ_CST);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t rows, enum cudaMemcpyKind kind) {
  for (size_t i = 0; i < rows; i++) cudaMemcpy((char *)to + i * to_pitch, (const char *)from + i * pitch, width, kind);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t rows,
                              enum cudaMemcpyKind kind, cudaStream_t s) {
  for (size_t i = 0; i < rows; i++) cudaMemcpyAsync((char *)to + i * to_pitch, (const char *)from + i * pitch, width, kind, s);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int v, size_t bytes) {
  fake_idle("cudaMemset");
  fake_range("cudaMemset", p, bytes, true);
  return memset(p, v, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t bytes, cudaStream_t s) {
  (void)s;
  if (bytes) fake_range("cudaMemsetAsync", p, bytes, true);
  return memset(p, v, bytes), cudaSuccess;
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
  (void)flags;
  if (fake.no_streams) return cudaErrorMemoryAllocation;
  pthread_mutex_lock(&fake.lock);
  uint32_t i = 0;
  while (fake.stream[i].open) i++;
  fake.stream[i] = (struct CUstream_st){.open = true, .owner = pthread_self(), .device = fake_device};
  *s = &fake.stream[i];
  pthread_mutex_unlock(&fake.lock);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  pthread_mutex_lock(&fake.lock);
  if (fake.ranks > 0) fake.ranks -= s->ranks; /* nobody waits for one that has gone */
  fake.twice = fake.twice || !s->open;
  s->open = false;
  pthread_mutex_unlock(&fake.lock);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += fake.timeout_ms / 1000, until.tv_nsec += fake.timeout_ms % 1000 * 1000000L;
  if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
  pthread_mutex_lock(&fake.lock);
  if (fake_capturing) fake_wrong("cudaStreamSynchronize", "while a step is recorded");
  const bool waits = fake.on_wait && fake_stuck(s);
  if (waits) fake.on_wait(false);
  while (fake_stuck(s)) {
    struct timespec until_tick;
    clock_gettime(CLOCK_REALTIME, &until_tick);
    if (until_tick.tv_sec > until.tv_sec || (until_tick.tv_sec == until.tv_sec && until_tick.tv_nsec > until.tv_nsec)) {
      if (s->word) *s->word = 2 | (uint32_t)fake_device << 8 | 1u << 16; /* as the kernel does */
      break;
    }
    until_tick.tv_nsec += 5000000L;
    if (until_tick.tv_nsec >= 1000000000L) until_tick.tv_sec++, until_tick.tv_nsec -= 1000000000L;
    pthread_cond_timedwait(&fake.changed, &fake.lock, &until_tick);
  }
  if (waits && !fake_failed(s)) fake.on_wait(true);
  if (s) s->ran = s->launched, s->uploads = false;
  if (s && fake_failed(s)) s->sums = 0; /* its kernels have given up, also once the word is no more */
  pthread_mutex_unlock(&fake.lock);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return (void)s, (void)e, (void)flags, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return (void)flags, *e = malloc(1), cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return free(e), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return (void)e, (void)s, cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return (void)e, cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return (void)e, cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { return (void)a, (void)b, *ms = 1, cudaSuccess; }

/* ---- kernels and recorded steps ---- */

static const char *fake_name(const void *host) {
  for (uint32_t i = 0; i < fake.kernels; i++)
    if (fake.kernel[i].host == host) return fake.kernel[i].name;
  return "";
}
/* Under the lock, of kernels that wait for other ranks'. */
static void fake_first(cudaStream_t s) {
  for (uint32_t i = 0; i < STREAMS; i++) {
    const struct CUstream_st *other = &fake.stream[i];
    if (other == s || !other->open || !other->ranks || other->device != s->device) continue;
    if (!s->ran) fake_wrong("a stream's first kernel", "on a device where another rank's may wait");
    if (s->uploads) fake_wrong("a graph's upload", "on a device where another rank's kernels may wait");
  }
}
/* args: begin with a peer_view where the kernel waits itself. */
static void fake_launch(const void *host, void **args, cudaStream_t s) {
  static const char *const waits[] = {"reduce_", "meet_ranks", "share_rows", "add_parts",
                                      "lay_parts"}; /* the last two for NCCL's, before them */
  size_t i = 0;
  while (i < sizeof waits / sizeof *waits && !strstr(fake_name(host), waits[i])) i++;
  if (s && !s->captures) s->launched = true;
  if (i == sizeof waits / sizeof *waits) return;
  pthread_mutex_lock(&fake.lock);
  if (!s->captures) fake_first(s);
  s->word = i < 3 ? *(volatile uint32_t **)((char *)args[0] + SHARED_AT) : fake.control;
  if (s->captures) {
    s->captured++;
  } else {
    s->sums++;
  }
  s->ranks = true;
  pthread_cond_broadcast(&fake.changed);
  pthread_mutex_unlock(&fake.lock);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
  const char *name = fake_name(f);
  if (fake.fail_launch_of && strstr(name, fake.fail_launch_of)) return fake.fail_launch_of = NULL, cudaErrorUnknown;
  if (fake.on_launch) fake.on_launch(name, args);
  fake_launch(f, args, c->stream);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode how) {
  (void)how;
  return s->captures = true, s->captured = 0, fake_capturing = s, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  return s->captures = false, fake_capturing = NULL, *g = (cudaGraph_t)(void *)s, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags) {
  (void)flags;
  fake_idle("cudaGraphInstantiate");
  pthread_mutex_lock(&fake.lock);
  fake.graph[fake.graphs].sums = ((cudaStream_t)(void *)g)->captured;
  *exec = &fake.graph[fake.graphs++];
  pthread_mutex_unlock(&fake.lock);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t s) { return (void)exec, s->uploads = true, cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  pthread_mutex_lock(&fake.lock);
  if (exec->sums) fake_first(s);
  s->launched = true;
  s->sums += exec->sums, s->ranks |= exec->sums > 0;
  pthread_cond_broadcast(&fake.changed);
  pthread_mutex_unlock(&fake.lock);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return (void)g, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return (void)exec, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *f, const cudaLaunchConfig_t *c) {
  return (void)f, (void)c, *n = 8, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = strstr(fake_name(f), "built_for") ? 32 : 1024; /* code of sm_80 */
  a->maxDynamicSharedSizeBytes = 200 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return (void)f, (void)a, (void)v, cudaSuccess; }

/* Functions that nvcc's own code calls. */
struct dim3;
typedef struct CUkern_st fake_kernel;
void **__cudaRegisterFatBinary(void *binary) { return (void)binary, calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return (void)handle, 1; }
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d,
                            int *size) {
  (void)handle, (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)size;
  if (fake.kernels < KERNELS) fake.kernel[fake.kernels].host = host, fake.kernel[fake.kernels++].name = name;
}
cudaError_t __cudaGetKernel(const void **kernel, const void *host) { return *kernel = host, cudaSuccess; }
cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
  (void)grid, (void)block, (void)shared;
  return fake_launch(kernel, args, s), cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *s) {
  return (void)grid, (void)block, (void)shared, (void)s, 0u;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s) {
  *grid = *block = (dim3){1, 1, 1}, *shared = 0, *(void **)s = NULL;
  return cudaSuccess;
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *n) { return *n = 2, fake.no_driver ? cudaErrorInsufficientDriver : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { return *v = fake.no_driver ? 0 : CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { return *d = fake_device, cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return d < 2 ? fake_device = d, cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  p->uuid.bytes[0] = (char)d;
  return snprintf(p->name, sizeof p->name, "no device"), p->major = 8, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  (void)d;
  *v = a == cudaDevAttrMultiProcessorCount ? 100 : 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *able, int d, int other) { return (void)d, (void)other, *able = !fake.no_peers, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned flags) { return (void)d, (void)flags, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : "failed"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **fn, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  return (void)name, (void)version, (void)flags, (void)found, *fn = NULL, cudaSuccess;
}

#endif
