/* The weights of a rank from their files to one arena of the device. Every address follows from the weights' shapes; no weight byte passes
 * the host's processor but on its way into a ring of pinned buffers, from where DMA copies take it to its place, or to a landing
 * place if kernels are to convert it (unpack_loaded.cu). Steps may begin before all is loaded: each waits for a group of weights where it
 * first needs one. Weights that all rows need come first, then the experts' codes, a group for each expert: experts that a step waits for
 * come before the others. */
#ifndef MM_CUDA_LOAD_H
#define MM_CUDA_LOAD_H

#include <pthread.h>

#include <functional>
#include <vector>

#include "loader/stream/landing.h"
#include "runtime/cuda/core/huge.h"
#include "runtime/cuda/core/upload.h"
#include "runtime/engine/comm.h"

/* How a load is done; the defaults are what measures best (`gpu bench load`). */
struct mm_cu_load_config {
  uint32_t buffers = 8;           /* of the ring, more than in_flight; more where they are hashed */
  size_t chunk = (size_t)8 << 20; /* bytes of a buffer */
  size_t piece = (size_t)1 << 20; /* bytes of one read */
  unsigned threads = 0;           /* that read; 0: as many as there are CPUs, 16 at most unless they hash too */
  uint32_t in_flight = 3;         /* chunks whose copies are queued */
  mm_read_path path = MM_READ_PROBE;
  const mm_shards *verify = nullptr; /* the digests of this checkpoint's rank `rank` are checked on the way, or NULL */
  uint32_t rank = 0;
  mm_read_log *log = nullptr; /* or NULL; until the load is closed */
  mm_comm *comm = nullptr;    /* broken by a load that fails; who waits for one waits no longer then; or NULL */
  /* The ring stays pinned until the load is closed. Pinning and unpinning may wait for every device, and hold up launches: not while
   * kernels there wait for another rank's. */
  bool keep_ring = false;
};

/* Converts bytes [first, first + n) of a plane, at `from` (device memory) as in its file, to base + at. The landing is SPREAD or WIDEN. */
cudaError_t mm_cu_land(char *base, const mm_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s);
/* Zeros where the holes are; hole[holes] in device memory. */
cudaError_t mm_cu_zero_holes(char *base, const mm_hole *hole, uint64_t holes, cudaStream_t s);

/* In this order: the plan; start; open; then wait, ready and finish. All from one thread. */
struct mm_cu_load {
  ~mm_cu_load(); /* ends a load that is under way */
  mm_cu_load() = default;
  mm_cu_load(const mm_cu_load &) = delete;
  mm_cu_load &operator=(const mm_cu_load &) = delete;

  /* The plan, which needs no device: w becomes *out, whose pointers are set by open. w and out stay where they are until then. Errors as
   * mm_cu_describe. */
  bool matrix(const mm_packed *w, const char *name, mm_landing_groups group, mm_cu_weight *out, mm_err *err);
  /* w's values as f32, [lead, n, k]. */
  bool values(const mm_packed *w, const char *name, uint32_t group, const float **out, mm_err *err);
  /* Room for `count` numbers. */
  bool reserve(uint64_t count, const __nv_bfloat16 **out, mm_err *err);
  /* To be queued once the group is there, before anyone who waits for it goes on. */
  void after(uint32_t group, std::function<cudaError_t(cudaStream_t)> queue);

  /* Reading begins: no device is needed yet. */
  bool start(const mm_cu_load_config &config, mm_err *err);
  /* The arena is made on the current device and all pointers are set; a thread pins the ring meanwhile, and puts down what arrives. */
  bool open(mm_cu_memory *memory, mm_err *err);
  /* In place of start and open: all lies at base, which a load of the same layout filled (mm_cu_load::layout, before start). */
  MM_MUST_USE bool attach(char *base, mm_err *err);
  /* A digest of what lies where, and of how the files' bytes became it. */
  MM_MUST_USE mm_digest layout() const;
  char *base() const; /* of the arena, after open */
  /* Work queued on the stream from here on finds the group loaded. The calling thread waits until the group's copies and kernels are
   * queued: no stream waits for work that is not yet queued on its device. False with the load's error when it failed; without an error
   * where another rank has aborted (mm_cu_load_config.comm), here and in finish. */
  bool wait(uint32_t group, cudaStream_t s, mm_err *err);
  /* The same of the groups first + i, i < n, with bit i of wanted[ceil(n / 32)]: those that are on their way still come before others. */
  bool wait_for(uint32_t first, uint32_t n, const uint32_t *wanted, cudaStream_t s, mm_err *err);
  /* True if a wait for the groups [first, first + n) would be short: their copies are queued. */
  bool is_near(uint32_t first, uint32_t n);
  /* Waits until the ring is pinned. False after a failure, with its error. */
  bool pinned(mm_err *err);
  /* Sets *ready to whether all is loaded. False after a failure, with its error. */
  bool poll(bool *ready, mm_err *err);
  /* Waits until all is there, and all digests and files were found good. */
  bool finish(mm_err *err);
  /* The same of what was waited for so far, which may be less. */
  bool is_sound(mm_err *err);

  mm_landing_plan plan = {};
  mm_read_stats stats = {}; /* what was read, until all of it was on the device: after finish */

 private:
  struct pipe;
  enum state { RUNNING, LANDED, FAILED };

  void close_ring();
  bool make_arena(mm_cu_memory *memory, mm_err *err);
  bool fill_by_host(mm_err *err);
  bool open_groups(mm_err *err);
  bool follow(uint32_t group, mm_err *err);
  bool take(const mm_chunk &c, uint64_t number, mm_err *err);
  bool await_oldest(uint64_t number, mm_err *err);
  bool stream(mm_err *err);
  bool go_on();
  void end(const mm_err &err);
  void run();
  bool failed(mm_err *err);
  bool wait_a_while();
  void prefetch(uint32_t first, uint32_t n, const uint32_t *wanted);

  mm_cu_load_config config;
  uint32_t groups = 0;
  std::vector<std::function<void(char *)>> settle;            /* sets pointers into the arena at its address */
  std::vector<std::function<bool(char *, mm_err *)>> by_host; /* what no file has: random numbers, values that are unpacked */
  std::vector<std::pair<uint32_t, std::function<cudaError_t(cudaStream_t)>>> queue_after;
  mm_cu_huge ring;
  mm_reader *reader = nullptr;
  pipe *p = nullptr;
  pthread_t thread = {};
  bool started = false;

  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
  state now = RUNNING; /* under the lock, as are: */
  /* [groups] how many chunks had been queued when all that brings the group was, the last of them included; NOT_YET */
  std::vector<uint64_t> after_chunk;
  uint64_t chunks_done = 0; /* that are on the device, as far as the host knows */
  mm_err error = {};
  bool stop = false, ring_pinned = false, opened = false;
};

#endif
