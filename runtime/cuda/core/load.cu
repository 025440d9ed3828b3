/* Loading (load.h). Three streams of work run at once: threads of the reader fill the ring; a DMA stream empties it in order;
 * kernels that convert the copied bytes follow on another stream. A buffer is filled again when both are done with its last content.
 *
 * A step that needs a group waits on the host until the group's copies are queued, and then lets its own stream wait for the event behind
 * the last of them. A flag in memory that the stream polls would spare the first wait; but a step is longer than a device's queue, and a
 * queue that is full behind a flag keeps out the copies that would set it. */
#include "runtime/cuda/core/load.h"

#include <string.h>
#include <time.h>

#include <algorithm>

#include "formats/system/pool.h"

namespace {

constexpr uint32_t kHashing = 24; /* buffers, where threads keep them to hash them */
constexpr unsigned kMostThreads = 16, kMostHashing = 64;
constexpr uint64_t kNotYet = UINT64_MAX;

bool check(cudaError_t e, const char *what, mm_err *err) { return mm_cu_check(e, what, err); }

}  // namespace

/* ---- the plan ---- */

bool mm_cu_load::matrix(const mm_packed *w, const char *name, mm_landing_groups group, mm_cu_weight *out, mm_err *err) {
  if (!mm_cu_describe(w, name, out, err)) return false;
  groups = (uint32_t)mm_max(groups, mm_max(group.group + 1, group.by_matrix ? group.each + w->lead : 0));
  mm_landing_layout y;
  if (!mm_landing_layout_of(w, &y)) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, name), "found a scheme without a layout");
  mm_landing_places at;
  if (!mm_landing_matrix(&plan, w, name, &y, group, &at, err)) return false;
  const auto places = [=](char *base) {
    return mm_cu_places{reinterpret_cast<uint8_t *>(base + at.data), y.scales ? base + at.scale : nullptr,
                        y.global ? reinterpret_cast<float *>(base + at.global) : nullptr};
  };
  settle.push_back([=](char *base) {
    const mm_cu_places to = places(base);
    out->data = to.data, out->scale = to.scale, out->global = to.global;
  });
  if (!w->plane[0]) by_host.push_back([=](char *base, mm_err *e) { return mm_cu_randomise(w, out, places(base), e); });
  return true;
}

bool mm_cu_load::values(const mm_packed *w, const char *name, uint32_t group, const float **out, mm_err *err) {
  uint64_t at;
  bool lands;
  groups = (uint32_t)mm_max(groups, group + 1);
  if (!mm_landing_values(&plan, w, name, group, &at, &lands, err)) return false;
  settle.push_back([=](char *base) { *out = reinterpret_cast<float *>(base + at); });
  if (!lands)
    by_host.push_back([=](char *base, mm_err *e) {
      float *to = reinterpret_cast<float *>(base + at);
      return w->plane[0] ? mm_cu_unpack(w, to, e) : mm_cu_randomise_f32(w, to, e);
    });
  return true;
}

bool mm_cu_load::reserve(uint64_t count, const __nv_bfloat16 **out, mm_err *err) {
  uint64_t at;
  if (!mm_landing_place(&plan, count * sizeof(__nv_bfloat16), false, &at, err)) return false;
  settle.push_back([=](char *base) { *out = reinterpret_cast<const __nv_bfloat16 *>(base + at); });
  return true;
}

void mm_cu_load::after(uint32_t group, std::function<cudaError_t(cudaStream_t)> queue) {
  groups = (uint32_t)mm_max(groups, group + 1);
  queue_after.push_back({group, std::move(queue)});
}

/* ---- reading ---- */

bool mm_cu_load::start(const mm_cu_load_config &c, mm_err *err) {
  config = c;
  if (config.verify)
    config.buffers = (uint32_t)mm_max(config.buffers, kHashing), config.in_flight = (uint32_t)mm_max(config.in_flight, kHashing / 4);
  if (!config.threads) config.threads = (unsigned)mm_min(mm_pool_cpus(), config.verify ? kMostHashing : kMostThreads);
  if (config.verify && !mm_landing_verify(&plan, config.verify, config.rank, err)) return false;
  if (plan.landings == 0) return true;
  /* A small model needs no large ring. */
  const uint64_t chunks = mm_ceil_div(plan.file_bytes, config.chunk) + plan.files + 1;
  config.buffers = (uint32_t)mm_min(config.buffers, chunks + config.in_flight);
  if (!ring.map(config.buffers * config.chunk, err)) return false; /* the reader's threads touch it first */
  const mm_reader_config r = {plan.file,    plan.files,   plan.want,      plan.landings, ring.data, config.buffers,
                              config.chunk, config.piece, config.threads, config.path,   config.log};
  reader = mm_reader_open(&r, err);
  return reader != nullptr;
}

/* ---- landing ---- */

/* The device's side. */
struct mm_cu_load::pipe {
  int device = 0;
  char *base = nullptr, *landing = nullptr; /* the arena; in_flight places of a chunk each, or NULL where nothing needs them */
  cudaStream_t copies = nullptr, kernels = nullptr;
  std::vector<cudaEvent_t> copied, done; /* [in_flight] by the number of the chunk */
  std::vector<cudaEvent_t> opened;       /* [1] what comes before all chunks is done */

  static bool make(std::vector<cudaEvent_t> *v, size_t n, unsigned how, mm_err *err) {
    v->assign(n, nullptr);
    for (cudaEvent_t &e : *v) {
      if (!check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming | how), "cudaEventCreate", err)) return false;
    }
    return true;
  }
  bool open(uint32_t in_flight, mm_err *err) {
    return check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cudaStreamCreate", err) &&
           check(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking), "cudaStreamCreate", err) && make(&copied, in_flight, 0, err) &&
           make(&done, in_flight, cudaEventBlockingSync, err) && make(&opened, 1, 0, err);
  }
  void sync() {
    if (copies) cudaStreamSynchronize(copies);
    if (kernels) cudaStreamSynchronize(kernels);
  }
  ~pipe() {
    sync();
    for (auto *v : {&copied, &done, &opened}) {
      for (cudaEvent_t e : *v) {
        if (e) cudaEventDestroy(e);
      }
    }
    if (copies) cudaStreamDestroy(copies);
    if (kernels) cudaStreamDestroy(kernels);
  }
};

/* No thread writes to the ring any more, and no copy reads it. */
void mm_cu_load::close_ring() {
  mm_reader_close(reader);
  ring.unmap();
  reader = nullptr;
}

/* Queues what follows the group's arrival. */
bool mm_cu_load::follow(uint32_t group, mm_err *err) {
  for (const auto &a : queue_after) {
    if (a.first == group && !check(a.second(p->kernels), "weights that arrived", err)) return false;
  }
  return true;
}

/* Queues the copies of a chunk, and behind them the kernels that its bytes need. */
bool mm_cu_load::take(const mm_chunk &c, uint64_t number, mm_err *err) {
  struct change {
    mm_landing_piece x;
    const char *at;
    uint64_t word, words;
  };
  const uint64_t slot = number % config.in_flight;
  const size_t full = plan.fulls;
  std::vector<change> changes;
  for (size_t i = c.first; i < c.first + c.count; i++) {
    change t = {};
    if (!mm_landing_find(&plan, &c, i, &t.x)) continue;
    const mm_landing &l = plan.landing[t.x.landing];
    mm_landing_arrive(&plan, &t.x, &t.word, &t.words);
    if (l.how == MM_LAND_NOWHERE) continue;
    const bool as_is = l.how == MM_LAND_AS_IS;
    char *const to = as_is ? p->base + l.at + t.x.first : p->landing + slot * config.chunk + t.x.from;
    t.at = to;
    if (!check(cudaMemcpyAsync(to, c.data + t.x.from, t.x.bytes, cudaMemcpyHostToDevice, p->copies), "copy weights", err)) return false;
    if (!as_is || t.words) changes.push_back(t);
  }
  if (!check(cudaEventRecord(p->copied[slot], p->copies), "record event", err) ||
      !check(cudaStreamWaitEvent(p->kernels, p->copied[slot], 0), "wait for event", err))
    return false;
  for (const change &t : changes) {
    const mm_landing &l = plan.landing[t.x.landing];
    uint8_t *const words = reinterpret_cast<uint8_t *>(p->base + l.at + 4 * t.word);
    if (l.how != MM_LAND_AS_IS && !check(mm_cu_land(p->base, l, t.at, t.x.first, t.x.bytes, p->kernels), "land", err)) return false;
    if (t.words && !check(mm_cu_reorder(words, t.words, l.nibbles, p->kernels), "reorder_nibbles", err)) return false;
  }
  for (size_t i = full; i < plan.fulls; i++) {
    if (!follow(plan.full[i], err)) return false;
  }
  if (!check(cudaEventRecord(p->done[slot], p->kernels), "record event", err)) return false;
  if (full == plan.fulls) return true;
  pthread_mutex_lock(&lock);
  for (size_t i = full; i < plan.fulls; i++) after_chunk[plan.full[i]] = number + 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return true;
}

/* The chunk is on the device, and its buffer free. */
bool mm_cu_load::await_oldest(uint64_t number, mm_err *err) {
  if (!check(cudaEventSynchronize(p->done[number % config.in_flight]), "copy weights", err)) return false;
  mm_reader_release(reader);
  pthread_mutex_lock(&lock);
  chunks_done = number + 1;
  pthread_mutex_unlock(&lock);
  return true;
}

/* Waits for the arena. False when the load is being ended. */
bool mm_cu_load::go_on() {
  pthread_mutex_lock(&lock);
  while (!stop && !opened) pthread_cond_wait(&changed, &lock);
  const bool on = !stop;
  pthread_mutex_unlock(&lock);
  return on;
}

/* From the ring to the arena, until all is there. */
bool mm_cu_load::stream(mm_err *err) {
  uint64_t given = 0, done = 0;
  double reads = 0, copies = 0;
  for (mm_chunk c;; given++) {
    if (!go_on()) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "the load was ended early");
    const double start = mm_now();
    if (given - done == config.in_flight && !await_oldest(done++, err)) return false;
    const double between = mm_now();
    if (!mm_reader_next(reader, &c, err)) return false;
    copies += between - start, reads += mm_now() - between;
    if (!c.data) break;
    if (!take(c, given, err)) return false;
    if (given == 0) mm_read_log_mark(config.log, "first copy");
  }
  mm_read_log_mark(config.log, "all read");
  const bool ok =
      check(cudaStreamSynchronize(p->copies), "copy weights", err) && check(cudaStreamSynchronize(p->kernels), "copy weights", err);
  mm_read_log_mark(config.log, "all copied");
  mm_read_log_note(config.log, "waited for reads", reads);
  mm_read_log_note(config.log, "waited for copies", copies);
  return ok;
}

void mm_cu_load::end(const mm_err &err) {
  pthread_mutex_lock(&lock);
  error = err;
  now = err.status == MM_OK ? LANDED : FAILED;
  const bool reports = now == FAILED && !stop;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  if (!reports) return;
  mm_read_log_fail(config.log, &err);
  if (config.comm) mm_comm_fail(config.comm, &err); /* a rank may wait on its device for one whose weights have not come */
}

/* The thread. */
void mm_cu_load::run() {
  mm_err err = {};
  if (check(cudaSetDevice(p->device), "cudaSetDevice", &err) && ring.pin(&err)) {
    pthread_mutex_lock(&lock);
    ring_pinned = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    mm_read_log_mark(config.log, "ring pinned");
    stream(&err);
    p->sync();
  }
  stats = mm_reader_stats(reader);
  end(err);
  if (!config.keep_ring) close_ring(); /* nobody waits for it */
}

/* ---- opening ---- */

/* Bytes made by the host are written before anything else; random weights fill their padding too, so holes are zeros by then. */
bool mm_cu_load::fill_by_host(mm_err *err) {
  if (by_host.empty()) return true;
  if (!check(cudaStreamSynchronize(p->kernels), "zero", err)) return false;
  for (const auto &make : by_host) {
    if (!make(p->base, err)) return false;
  }
  return check(cudaStreamSynchronize(0), "load", err);
}

/* The arena with its holes, and all pointers into it. */
bool mm_cu_load::make_arena(mm_cu_memory *memory, mm_err *err) {
  bool changes = false;
  for (size_t i = 0; i < plan.landings; i++) changes |= plan.landing[i].how == MM_LAND_SPREAD || plan.landing[i].how == MM_LAND_WIDEN;
  const uint64_t table = plan.bytes, landing = mm_round_up(table + plan.holes * sizeof(mm_hole), MM_LANDING_ALIGN);
  const uint64_t bytes = landing + (changes ? config.in_flight * config.chunk : 0);
  p->base = static_cast<char *>(memory->reserve(bytes, err));
  if (!p->base) return false;
  mm_read_log_mark(config.log, "arena");
  if (changes) p->landing = p->base + landing;
  for (const auto &set : settle) set(p->base);
  mm_hole *const holes = reinterpret_cast<mm_hole *>(p->base + table);
  return check(cudaMemcpyAsync(holes, plan.hole, plan.holes * sizeof(mm_hole), cudaMemcpyHostToDevice, p->kernels), "copy holes", err) &&
         check(mm_cu_zero_holes(p->base, holes, plan.holes, p->kernels), "zero", err) && fill_by_host(err);
}

/* Groups that nothing comes of are there. */
bool mm_cu_load::open_groups(mm_err *err) {
  after_chunk.assign(groups, kNotYet);
  for (uint32_t g = 0; g < groups; g++) {
    if (g < plan.groups && plan.left[g] > 0) continue;
    if (!follow(g, err)) return false;
    after_chunk[g] = 0;
  }
  return check(cudaEventRecord(p->opened[0], p->kernels), "record event", err);
}

bool mm_cu_load::open(mm_cu_memory *memory, mm_err *err) {
  p = new pipe;
  if (!check(cudaGetDevice(&p->device), "cudaGetDevice", err)) return false;
  const int no = !reader ? 0
                         : pthread_create(
                               &thread, nullptr,
                               [](void *load) -> void * {
                                 static_cast<mm_cu_load *>(load)->run();
                                 return nullptr;
                               },
                               this);
  if (no) return mm_fail_thread(err, "start a thread that loads", no);
  started = reader != nullptr;
  if (!p->open(config.in_flight, err)) return false;
  mm_read_log_mark(config.log, "streams");
  if (!make_arena(memory, err) || !open_groups(err)) return false;
  if (!reader && !check(cudaStreamSynchronize(p->kernels), "load", err)) return false;
  pthread_mutex_lock(&lock);
  opened = true;
  if (!reader) now = LANDED;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return true;
}

char *mm_cu_load::base() const { return p->base; }

bool mm_cu_load::attach(char *base, mm_err *err) {
  if (plan.landings == 0) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "no weights to attach to");
  for (const auto &set : settle) set(base);
  now = LANDED;
  return true;
}

mm_digest mm_cu_load::layout() const {
  std::vector<uint64_t> all = {plan.bytes, plan.landings, plan.holes, by_host.size(), queue_after.size()};
  for (size_t i = 0; i < plan.landings; i++) {
    const mm_landing &l = plan.landing[i];
    uint32_t factor;
    memcpy(&factor, &l.factor, sizeof factor);
    for (const uint64_t v :
         {(uint64_t)l.how, l.at, l.bytes, l.row, l.pitch, (uint64_t)l.from, (uint64_t)factor, (uint64_t)(l.nibbles != nullptr)})
      all.push_back(v);
  }
  for (size_t i = 0; i < plan.holes; i++) all.push_back(plan.hole[i].at), all.push_back(plan.hole[i].bytes);
  return mm_sha256(all.data(), all.size() * sizeof all[0]);
}

mm_cu_load::~mm_cu_load() {
  pthread_mutex_lock(&lock);
  stop = true;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  if (started) pthread_join(thread, nullptr);
  close_ring();
  delete p;
  mm_landing_close(&plan);
  pthread_cond_destroy(&changed);
  pthread_mutex_destroy(&lock);
}

/* ---- waiting ---- */

/* Under the lock. */
bool mm_cu_load::failed(mm_err *err) {
  if (now == FAILED && err->status == MM_OK) *err = error;
  return now == FAILED;
}

/* Under the lock. */
void mm_cu_load::prefetch(uint32_t first, uint32_t n, const uint32_t *wanted) {
  const auto missing = [&](uint32_t i) { return i < n && wanted[i / 32] >> i % 32 & 1 && after_chunk[first + i] == kNotYet; };
  for (uint32_t i = 0, end; i < n; i = end + 1) {
    for (end = i; missing(end);) end++;
    if (end > i) mm_landing_prefetch(&plan, reader, first + i, end - i);
  }
}

/* Under the lock: something may have changed. False where another rank cannot go on. */
bool mm_cu_load::wait_a_while() {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += 50000000;
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &until);
  return !config.comm || !mm_comm_aborted(config.comm);
}

/* An event of a chunk that was recorded again since is one of a later chunk: then the wait is longer than it need be, and no shorter. */
bool mm_cu_load::wait_for(uint32_t first, uint32_t n, const uint32_t *wanted, cudaStream_t s, mm_err *err) {
  uint64_t last = 0;
  bool on = true;
  pthread_mutex_lock(&lock);
  if (now == RUNNING) prefetch(first, n, wanted);
  for (uint32_t i = 0; i < n; i++) {
    if (!(wanted[i / 32] >> i % 32 & 1)) continue;
    while (on && now == RUNNING && after_chunk[first + i] == kNotYet) on = wait_a_while();
    if (now == RUNNING) last = mm_max(last, after_chunk[first + i]);
  }
  const bool bad = failed(err), there = now == LANDED || (last > 0 && last <= chunks_done);
  pthread_mutex_unlock(&lock);
  if (bad || there || !on) return !bad && on;
  return check(cudaStreamWaitEvent(s, last ? p->done[(last - 1) % config.in_flight] : p->opened[0], 0), "wait for weights", err);
}

bool mm_cu_load::wait(uint32_t group, cudaStream_t s, mm_err *err) {
  const uint32_t one = 1;
  return wait_for(group, 1, &one, s, err);
}

bool mm_cu_load::is_near(uint32_t first, uint32_t n) {
  pthread_mutex_lock(&lock);
  bool all = true;
  for (uint32_t i = 0; now == RUNNING && i < n; i++) all = all && after_chunk[first + i] != kNotYet;
  pthread_mutex_unlock(&lock);
  return all;
}

bool mm_cu_load::pinned(mm_err *err) {
  pthread_mutex_lock(&lock);
  while (now == RUNNING && !ring_pinned) pthread_cond_wait(&changed, &lock);
  const bool bad = failed(err);
  pthread_mutex_unlock(&lock);
  return !bad;
}

bool mm_cu_load::poll(bool *ready, mm_err *err) {
  pthread_mutex_lock(&lock);
  const bool bad = failed(err);
  *ready = now == LANDED;
  pthread_mutex_unlock(&lock);
  return !bad;
}

bool mm_cu_load::finish(mm_err *err) {
  bool on = true;
  pthread_mutex_lock(&lock);
  while (on && now == RUNNING) on = wait_a_while();
  const bool bad = failed(err);
  pthread_mutex_unlock(&lock);
  return !bad && on;
}

/* While the load runs its thread has the reader, and does not close it without the lock. */
bool mm_cu_load::is_sound(mm_err *err) {
  pthread_mutex_lock(&lock);
  const bool sound = now == RUNNING ? mm_reader_prove(reader, err) : !failed(err);
  pthread_mutex_unlock(&lock);
  return sound;
}
