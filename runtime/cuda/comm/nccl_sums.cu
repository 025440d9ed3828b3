/* Ranks of several processes (nccl_sums.h). A sum is three launches: a word that this rank has arrived, NCCL's all-gather into a slab, and
 * a kernel that adds what came, in rank order, and says that it is done. All three are recorded like any other. No sum begins before the
 * one before has been added up, so one slab does.
 *
 * A thread looks at the two words: a rank that has arrived and is not done in time waits for one that does not come. It has NCCL abort,
 * which ends the kernel on the device; from then on nothing more is given to NCCL, sums are unspecified, and the step fails. Aborting
 * waits until recorded steps are gone, so it is done without the lock that guards calls. */
#include "runtime/cuda/comm/nccl_sums.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/cuda/comm/nccl.h"
#include "runtime/cuda/comm/totals.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/upload.h"

namespace {

using steady = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kThreads = 256, kBlocks = 264;
constexpr size_t kSlab = (size_t)64 << 20;
constexpr milliseconds kTick(10);     /* between looks at the words */
constexpr milliseconds kStart(60000); /* for NCCL to join all ranks, their first exchanges included */
constexpr milliseconds kLock(500);    /* in which a call of NCCL's returns, unless it waits for others too */

/* In host memory: how many sums this rank has arrived at, and how many are done. */
struct signs {
  uint32_t arrived, done;
};

__global__ void arrive(signs *to, const uint32_t *count) {
  grid_wait_and_launch_next();
  put_shared(&to->arrived, *count + 1);
}

/* By one thread of a kernel that runs when all numbers have come. */
__device__ __forceinline__ void count_sum(signs *to, uint32_t *count) {
  if (blockIdx.x == 0 && threadIdx.x == 0) put_shared(&to->done, ++*count);
}

/* x[n] becomes what part[ranks][n] come to; units of sixteen bytes. */
template <class T, reduction R>
__global__ void __launch_bounds__(kThreads) add_parts(uint4 *x, const uint4 *part, uint32_t n, uint32_t ranks, signs *to, uint32_t *count) {
  grid_wait_and_launch_next();
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads) {
    total<T, R, 4> t;
    for (uint32_t r = 0; r < ranks; r++) {
      const uint4 v = part[(size_t)r * n + i];
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
      t.add(w, r == 0);
    }
    x[i] = make_uint4(t.word(0), t.word(1), t.word(2), t.word(3));
  }
  count_sum(to, count);
}

/* part[ranks][rows, n] side by side. */
__global__ void __launch_bounds__(kThreads)
    lay_parts(float *all, const float *part, uint32_t rows, uint32_t n, uint32_t ranks, signs *to, uint32_t *count) {
  grid_wait_and_launch_next();
  const uint64_t each = (uint64_t)rows * n;
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < each * ranks; i += (uint64_t)gridDim.x * kThreads) {
    const uint64_t r = i / each, row = i % each / n;
    all[(row * ranks + r) * n + i % n] = part[i];
  }
  count_sum(to, count);
}

enum broken { WELL, WAITED, FAILED };

}  // namespace

struct mm_cu_across {
  mm_comm *comm = nullptr;
  uint32_t rank = 0, ranks = 0;
  int device = 0;
  mm_nccl lib = {};
  void *nccl = nullptr;
  char *slab = nullptr;                 /* [ranks][part] */
  uint32_t *count = nullptr;            /* device memory: sums that are done */
  signs *seen = nullptr, *to = nullptr; /* pinned, mapped; as the device sees it */
  std::timed_mutex lock;                /* around calls with `nccl` */
  std::atomic<int> broken{WELL};
  int failure = 0; /* NCCL's, where broken is FAILED */
  std::atomic<uint32_t> limit_ms{0};
  std::thread watcher;
  std::mutex watch_lock;
  std::condition_variable changed;
  std::atomic<bool> handing{false};   /* a gathering was announced and NCCL has not been asked yet */
  bool over = false, aborted = false; /* nobody is watched any more; the watcher has NCCL's communicator taken down */

  size_t part() const { return kSlab / ranks / 16 * 16; }
};

namespace {

bool check(cudaError_t e, const char *what, mm_err *err) { return mm_cu_check(e, what, err); }

bool nccl_ok(const mm_cu_across *a, int e, const char *what, mm_err *err) {
  return e == MM_NCCL_OK || mm_fail(err, MM_IO, "E_NCCL", mm_at(NULL, NULL), "rank %u: %s: %s", a->rank, what, a->lib.error_string(e));
}

/* ---- watching ---- */

/* Only the first failure is recorded. Under the lock. */
void set_broken(mm_cu_across *a, broken how, int failure) {
  if (a->broken != WELL) return;
  a->failure = failure;
  a->broken = how;
}

/* The device waits for other ranks, and so does this rank's thread, in a call that it cannot be called back from. */
void end_process(const mm_cu_across *a) {
  fprintf(stderr, "%s: error: E_RANK: rank %u waited %.1f s for ranks of other processes: timeout\n", program_invocation_short_name,
          a->rank, a->limit_ms * 1e-3);
  exit(MM_IO);
}

/* True if NCCL reports a failure by itself. */
bool has_failed(mm_cu_across *a) {
  std::unique_lock<std::timed_mutex> l(a->lock, std::try_to_lock);
  int error = MM_NCCL_OK;
  if (!l || a->broken != WELL) return l && a->broken == FAILED;
  const int status = a->lib.comm_async_error(a->nccl, &error);
  if (status != MM_NCCL_OK || error != MM_NCCL_OK) set_broken(a, FAILED, status ? status : error);
  return a->broken == FAILED;
}

void watch(mm_cu_across *a) {
  cudaSetDevice(a->device);
  const volatile signs *seen = a->seen;
  uint32_t done = 0;
  auto since = steady::now();
  std::unique_lock<std::mutex> l(a->watch_lock);
  while (!a->changed.wait_for(l, kTick, [&] { return a->over; })) {
    const bool waits = seen->arrived != seen->done && !a->handing;
    if (!waits || seen->done != done) done = seen->done, since = steady::now();
    if (!has_failed(a)) {
      if (steady::now() - since < milliseconds(a->limit_ms)) continue;
      std::unique_lock<std::timed_mutex> calls(a->lock, kLock);
      if (!calls) end_process(a);
      set_broken(a, WAITED, 0);
    }
    a->aborted = true;
    l.unlock();
    a->lib.comm_abort(a->nccl);
    return;
  }
}

/* ---- joining ---- */

/* State of a thread that may never return from NCCL. */
struct starting {
  std::mutex lock;
  std::condition_variable changed;
  bool over = false;
  int failed = MM_NCCL_OK;
  cudaError_t cuda = cudaSuccess;
  void *nccl = nullptr;
};

/* Joins the ranks, and has them exchange little and much: connections are made when they are first used. */
void start(starting *s, const mm_nccl &lib, const mm_nccl_id &id, int device, uint32_t rank, uint32_t ranks, char *slab, size_t part) {
  void *nccl = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t e = cudaSetDevice(device);
  int failed = e == cudaSuccess ? lib.comm_init_rank(&nccl, (int)ranks, id, (int)rank) : MM_NCCL_OK;
  if (!failed && e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  for (size_t n : {(size_t)16, (size_t)1 << 20, part}) {
    if (n <= part && !failed && e == cudaSuccess) failed = lib.all_gather(slab + rank * n, slab, n, MM_NCCL_BYTES, nccl, stream);
  }
  if (!failed && e == cudaSuccess) e = cudaStreamSynchronize(stream);
  if (stream) cudaStreamDestroy(stream);
  std::lock_guard<std::mutex> l(s->lock);
  s->over = true, s->failed = failed, s->cuda = e, s->nccl = nccl;
  s->changed.notify_all();
}

bool start_in_time(mm_cu_across *a, const mm_nccl_id &id, mm_err *err) {
  const auto s = std::make_shared<starting>();
  const mm_nccl lib = a->lib;
  const int device = a->device;
  const uint32_t rank = a->rank, ranks = a->ranks;
  char *const slab = a->slab;
  const size_t part = a->part();
  std::thread([=] { start(s.get(), lib, id, device, rank, ranks, slab, part); }).detach();
  std::unique_lock<std::mutex> l(s->lock);
  if (!s->changed.wait_for(l, kStart, [&] { return s->over; }))
    return mm_fail(err, MM_IO, "E_NCCL", mm_at(NULL, NULL), "rank %u waited %lld s for NCCL to join %u ranks: timeout", rank,
                   (long long)kStart.count() / 1000, ranks);
  a->nccl = s->nccl;
  return nccl_ok(a, s->failed, "joining ranks", err) && check(s->cuda, "NCCL's first exchange", err);
}

/* A different number for each host, as NCCL distinguishes them. */
uint64_t number_of_host() {
  char name[320] = {};
  gethostname(name, 255);
  const size_t n = strlen(name);
  if (FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r")) {
    name[n + fread(name + n, 1, 60, f)] = 0;
    fclose(f);
  }
  uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
  for (const char *c = name; *c; c++) h = (h ^ (unsigned char)*c) * 0x100000001b3u;
  return h;
}

struct hello {
  mm_nccl_id id; /* the first rank's */
  uint64_t host;
};

/* Returns true once all ranks have called it; false if one has failed. */
bool rank_barrier(mm_cu_across *a) {
  std::vector<char> all(a->ranks);
  const char mine = 0;
  return mm_comm_all_gather(a->comm, a->rank, &mine, all.data(), 1);
}

/* Collective. A rank that fails says so to the others before they wait in NCCL, where it would not come. */
bool join(mm_cu_across *a, mm_err *err) {
  hello mine = {};
  std::vector<hello> all(a->ranks);
  if (a->rank == 0 && !nccl_ok(a, a->lib.get_unique_id(&mine.id), "ncclGetUniqueId", err)) return false;
  mine.host = number_of_host();
  if (!mm_comm_all_gather(a->comm, a->rank, &mine, all.data(), sizeof mine)) return false;
  for (uint32_t r = 0; r < a->ranks; r++) {
    if (all[r].host != mine.host && !mm_nccl_check_hosts(&a->lib, err)) return false;
  }
  if (!rank_barrier(a) || !start_in_time(a, all[0].id, err)) return false;
  a->seen->arrived = a->seen->done = 0;
  a->over = a->aborted = false, a->broken = WELL;
  a->watcher = std::thread(watch, a);
  return true;
}

/* With nothing on the device that waits for others. */
void part_ways(mm_cu_across *a) {
  if (a->watcher.joinable()) {
    {
      std::lock_guard<std::mutex> l(a->watch_lock);
      a->over = true;
    }
    a->changed.notify_all();
    a->watcher.join();
  }
  if (a->nccl && !a->aborted) a->lib.comm_abort(a->nccl);
  a->nccl = nullptr;
}

bool open_memory(mm_cu_across *a, mm_err *err) {
  void *to = nullptr;
  if (!check(cudaGetDevice(&a->device), "cudaGetDevice", err) ||
      !check(cudaHostAlloc(&a->seen, sizeof *a->seen, cudaHostAllocMapped), "cudaHostAlloc", err) ||
      !check(cudaHostGetDevicePointer(&to, a->seen, 0), "cudaHostGetDevicePointer", err) ||
      !mm_cu_malloc(reinterpret_cast<void **>(&a->slab), kSlab, "sums over ranks", err) ||
      !mm_cu_malloc(reinterpret_cast<void **>(&a->count), sizeof *a->count, "sums over ranks", err))
    return false;
  *a->seen = {}, a->to = static_cast<signs *>(to);
  return true;
}

bool zero_count(mm_cu_across *a, mm_err *err) {
  return check(cudaMemset(a->count, 0, sizeof *a->count), "cudaMemset", err) && check(cudaStreamSynchronize(0), "cudaMemset", err);
}

/* Libraries read these when they are opened. */
bool open_library(mm_cu_across *a, mm_err *err) {
  static std::once_flag once;
  std::call_once(once, [] {
    setenv("NCCL_NVLS_ENABLE", "0", 1);    /* NVLink multicast stays off */
    setenv("NCCL_GRAPH_REGISTER", "0", 0); /* no rank has to do with another's memory while it records a step */
  });
  return mm_nccl_open(&a->lib, err);
}

/* ---- sums ---- */

/* The device says that it waits for what gather brings, which a host that is held up has not handed over yet. Not before the launch has
 * returned: one that waits for room behind a sum that hangs is to be seen. */
cudaError_t begin(mm_cu_across *a, cudaStream_t s) {
  const cudaError_t e = launch(arrive, 1, 1, 0, s, a->to, a->count);
  a->handing = e == cudaSuccess && !mm_cu_dry_run;
  return e;
}

/* part[ranks][bytes] of the slab becomes what each rank has in `from`. */
cudaError_t gather(mm_cu_across *a, const void *from, size_t bytes, cudaStream_t s) {
  if (mm_cu_dry_run) return cudaSuccess;
  std::lock_guard<std::timed_mutex> l(a->lock);
  a->handing = false;
  if (a->broken != WELL) return cudaSuccess; /* the step fails (mm_cu_across_check) */
  const int e = a->lib.all_gather(from, a->slab, bytes, MM_NCCL_BYTES, a->nccl, s);
  if (e != MM_NCCL_OK) set_broken(a, FAILED, e);
  return cudaSuccess;
}

template <class T, reduction R>
cudaError_t reduce(mm_cu_across *a, T *x, uint64_t n, cudaStream_t s) {
  cudaError_t e = cudaSuccess;
  uint4 *at = reinterpret_cast<uint4 *>(x);
  for (uint64_t left = n * sizeof(T) / 16; left > 0 && e == cudaSuccess;) {
    const uint32_t units = (uint32_t)mm_min(left, a->part() / 16);
    e = begin(a, s);
    if (e == cudaSuccess) e = gather(a, at, (size_t)units * 16, s);
    const unsigned blocks = (unsigned)mm_min(kBlocks, mm_ceil_div(units, kThreads));
    if (e == cudaSuccess)
      e = launch(add_parts<T, R>, blocks, kThreads, 0, s, at, reinterpret_cast<const uint4 *>(a->slab), units, a->ranks, a->to, a->count);
    at += units, left -= units;
  }
  return e;
}

}  // namespace

cudaError_t mm_cu_across_sum(mm_cu_across *a, bf16 *x, uint64_t n, cudaStream_t s) { return reduce<bf16, SUM>(a, x, n, s); }
cudaError_t mm_cu_across_sum_f32(mm_cu_across *a, float *x, uint64_t n, cudaStream_t s) { return reduce<float, SUM>(a, x, n, s); }
cudaError_t mm_cu_across_max_f32(mm_cu_across *a, float *x, uint64_t n, cudaStream_t s) { return reduce<float, MAX>(a, x, n, s); }

cudaError_t mm_cu_across_share(mm_cu_across *a, float *all, const float *own, uint32_t rows, uint32_t n, cudaStream_t s) {
  const uint32_t most = (uint32_t)(a->part() / (n * sizeof *own));
  cudaError_t e = cudaSuccess;
  for (uint32_t at = 0; at < rows && e == cudaSuccess; at += most) {
    const uint32_t count = (uint32_t)mm_min(most, rows - at);
    e = begin(a, s);
    if (e == cudaSuccess) e = gather(a, own + (size_t)at * n, (size_t)count * n * sizeof *own, s);
    if (e == cudaSuccess)
      e = launch(lay_parts, kBlocks, kThreads, 0, s, all + (size_t)at * a->ranks * n, reinterpret_cast<const float *>(a->slab), count, n,
                 a->ranks, a->to, a->count);
  }
  return e;
}

/* ---- the rest ---- */

mm_cu_across *mm_cu_across_open(mm_comm *comm, uint32_t rank, uint32_t ranks, double limit_s, mm_err *err) {
  mm_cu_across *a = new mm_cu_across;
  a->comm = comm, a->rank = rank, a->ranks = ranks;
  mm_cu_across_limit(a, limit_s);
  if (open_library(a, err) && open_memory(a, err) && zero_count(a, err) && join(a, err)) return a;
  mm_cu_across_close(a);
  return nullptr;
}

void mm_cu_across_close(mm_cu_across *a) {
  if (!a) return;
  part_ways(a);
  cudaFree(a->slab), cudaFree(a->count);
  cudaFreeHost(a->seen);
  delete a;
}

bool mm_cu_across_check(const mm_cu_across *a, mm_err *err) {
  switch (a->broken.load()) {
    case WAITED:
      return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "rank %u waited %.1f s for ranks of other processes: timeout", a->rank,
                     a->limit_ms * 1e-3);
    case FAILED: return nccl_ok(a, a->failure, "ncclAllGather", err);
    default: return true;
  }
}

bool mm_cu_across_reset(mm_cu_across *a, mm_err *err) {
  if (!rank_barrier(a)) return false; /* all ranks have seen the failure */
  mm_comm_recover(a->comm);
  part_ways(a);
  return zero_count(a, err) && join(a, err);
}

void mm_cu_across_limit(mm_cu_across *a, double limit_s) { a->limit_ms = (uint32_t)(limit_s * 1e3); }
