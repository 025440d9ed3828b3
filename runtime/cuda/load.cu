/* Loading (load.h). Three streams of work run beside each other: threads of the reader fill the ring; the copy engine empties it, in order,
 * on one stream; kernels that change what landed follow on another. A buffer is filled again when both are done with what was in it.
 *
 * Who waits for a group waits on the host until what brings it is queued, and then lets its own stream wait for the event behind it. A flag
 * in memory that a stream polls would spare the first wait; but a step is longer than a device's queue, and whoever fills that queue behind
 * a flag keeps out the copies that would set it. */
#include "runtime/cuda/load.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "formats/pool.h"

namespace {

constexpr uint32_t kHashing = 24; /* buffers, where threads keep them to hash them */
constexpr size_t kHuge = (size_t)2 << 20;
constexpr unsigned kMostThreads = 12, kMostHashing = 64;

bool check(cudaError_t e, const char *what, mm_err *err) { return mm_cu_check(e, what, err); }

mm_landing_layout layout_of(const mm_cu_weight &d) {
  const bool bytes = d.scale_kind == MM_CU_NV || d.scale_kind == MM_CU_MX;
  mm_landing_layout y = {};
  y.bits = mm_cu_bits(d.code), y.pitch = d.pitch;
  y.scales = mm_cu_scales(&d), y.byte_scales = bytes, y.scale_pitch = d.scale_pitch;
  y.global = d.scale_kind == MM_CU_NV, y.global_factor = 256; /* the 2^8 that the kernels leave to it */
  return y;
}

}  // namespace

/* ---- the plan ---- */

bool mm_cu_load::matrix(const mm_packed *w, const char *name, uint32_t group, mm_cu_weight *out, mm_err *err) {
  if (!mm_cu_describe(w, name, out, err)) return false;
  groups = (uint32_t)mm_max(groups, group + 1);
  const mm_landing_layout y = layout_of(*out);
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

bool mm_cu_load::room(uint64_t count, const __nv_bfloat16 **out, mm_err *err) {
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

/* Huge pages where there are any; nobody touches them before the reader's threads do. */
bool mm_cu_load::open_ring(mm_err *err) {
  ring_bytes = mm_round_up(config.buffers * config.chunk, kHuge);
  void *m = mmap(nullptr, ring_bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return mm_fail_memory(err, ring_bytes + kHuge);
  ring_map = static_cast<uint8_t *>(m);
  ring = reinterpret_cast<uint8_t *>(mm_round_up(reinterpret_cast<uintptr_t>(m), kHuge));
  madvise(ring, ring_bytes, MADV_HUGEPAGE); /* without them it is slower, and nothing else */
  return true;
}

bool mm_cu_load::start(const mm_cu_load_config &c, mm_err *err) {
  config = c;
  if (config.verify)
    config.buffers = (uint32_t)mm_max(config.buffers, kHashing), config.in_flight = (uint32_t)mm_max(config.in_flight, kHashing / 4);
  if (!config.threads) config.threads = (unsigned)mm_min(mm_pool_cpus(), config.verify ? kMostHashing : kMostThreads);
  if (!mm_landing_order(&plan, config.verify, config.rank, err)) return false;
  if (plan.landings == 0) return true;
  /* A small model needs no large ring. */
  const uint64_t chunks = mm_ceil_div(plan.file_bytes, config.chunk) + plan.files + 1;
  config.buffers = (uint32_t)mm_min(config.buffers, chunks + config.in_flight);
  if (!open_ring(err)) return false;
  const mm_reader_config r = {plan.file,    plan.files,   plan.want,      plan.landings, ring,      config.buffers,
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
  std::vector<cudaEvent_t> copied, done; /* [in_flight] */
  std::vector<cudaEvent_t> there;        /* [groups] */
  bool registered = false;

  static bool make(std::vector<cudaEvent_t> *v, size_t n, unsigned how, mm_err *err) {
    v->assign(n, nullptr);
    for (cudaEvent_t &e : *v) {
      if (!check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming | how), "cudaEventCreate", err)) return false;
    }
    return true;
  }
  bool open(uint32_t in_flight, uint32_t groups, mm_err *err) {
    return check(cudaGetDevice(&device), "cudaGetDevice", err) &&
           check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cudaStreamCreate", err) &&
           check(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking), "cudaStreamCreate", err) && make(&copied, in_flight, 0, err) &&
           make(&done, in_flight, cudaEventBlockingSync, err) && make(&there, groups, 0, err);
  }
  bool add_ring(uint8_t *ring, size_t bytes, mm_err *err) {
    registered = check(cudaHostRegister(ring, bytes, cudaHostRegisterDefault), "cudaHostRegister", err);
    return registered;
  }
  void sync() {
    if (copies) cudaStreamSynchronize(copies);
    if (kernels) cudaStreamSynchronize(kernels);
  }
  ~pipe() {
    sync();
    for (auto *v : {&copied, &done, &there}) {
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
  if (p && p->registered) cudaHostUnregister(ring), p->registered = false;
  if (ring_map) munmap(ring_map, ring_bytes + kHuge);
  reader = nullptr, ring_map = nullptr;
}

/* Queues the copies of a chunk, and behind them the kernels that its bytes need. */
bool mm_cu_load::take(const mm_chunk &c, uint32_t slot, mm_err *err) {
  struct change {
    mm_landing_piece x;
    const char *at;
    uint64_t word, words;
  };
  std::vector<change> changes;
  std::vector<uint32_t> full;
  for (size_t i = c.first; i < c.first + c.count; i++) {
    change t = {};
    if (!mm_landing_find(&plan, &c, i, &t.x)) continue;
    const mm_landing &l = plan.landing[t.x.landing];
    if (mm_landing_arrive(&plan, &t.x, &t.word, &t.words)) full.push_back(l.group);
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
  if (!check(cudaEventRecord(p->done[slot], p->kernels), "record event", err)) return false;
  for (uint32_t g : full) {
    if (!complete(g, err)) return false;
  }
  return true;
}

/* All that brings the group is queued. */
bool mm_cu_load::complete(uint32_t group, mm_err *err) {
  for (const auto &a : queue_after) {
    if (a.first == group && !check(a.second(p->kernels), "weights that arrived", err)) return false;
  }
  if (!check(cudaEventRecord(p->there[group], p->kernels), "record event", err)) return false;
  pthread_mutex_lock(&lock);
  queued[group] = true;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return true;
}

/* From the ring to the arena, until all is there. */
bool mm_cu_load::stream(mm_err *err) {
  uint64_t given = 0, done = 0;
  for (;;) {
    pthread_mutex_lock(&lock);
    const bool stopped = stop;
    pthread_mutex_unlock(&lock);
    if (stopped) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "the load was ended early");
    if (given - done == config.in_flight) {
      if (!check(cudaEventSynchronize(p->done[done % config.in_flight]), "copy weights", err)) return false;
      mm_reader_release(reader), done++;
    }
    mm_chunk c;
    if (!mm_reader_next(reader, &c, err)) return false;
    if (!c.data) break;
    if (!take(c, (uint32_t)(given % config.in_flight), err)) return false;
    given++;
  }
  return check(cudaStreamSynchronize(p->copies), "copy weights", err) && check(cudaStreamSynchronize(p->kernels), "copy weights", err);
}

void mm_cu_load::end(const mm_err &err) {
  pthread_mutex_lock(&lock);
  error = err;
  now = err.status == MM_OK ? LANDED : FAILED;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* The thread. */
void mm_cu_load::run() {
  mm_err err = {};
  if (check(cudaSetDevice(p->device), "cudaSetDevice", &err) && p->add_ring(ring, ring_bytes, &err)) {
    pthread_mutex_lock(&lock);
    ring_pinned = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    stream(&err);
  }
  stats = mm_reader_stats(reader);
  p->sync();
  end(err);
  if (!config.keep_ring) close_ring(); /* nobody waits for it */
}

/* ---- opening ---- */

/* What is made by the host is there before anything else; weights may be random as far as their padding, so holes are zeros by then. */
bool mm_cu_load::fill_by_host(mm_err *err) {
  if (by_host.empty()) return true;
  if (!check(cudaStreamSynchronize(p->kernels), "zero", err)) return false;
  for (const auto &make : by_host) {
    if (!make(p->base, err)) return false;
  }
  return check(cudaStreamSynchronize(0), "load", err);
}

bool mm_cu_load::open(mm_cu_memory *memory, mm_err *err) {
  bool changes = false;
  for (size_t i = 0; i < plan.landings; i++) changes |= plan.landing[i].how == MM_LAND_SPREAD || plan.landing[i].how == MM_LAND_WIDEN;
  const uint64_t table = plan.bytes, landing = mm_round_up(table + plan.holes * sizeof(mm_hole), MM_LANDING_ALIGN);
  const uint64_t bytes = landing + (changes ? config.in_flight * config.chunk : 0);
  p = new pipe;
  p->base = static_cast<char *>(memory->reserve(bytes, err));
  if (!p->base || !p->open(config.in_flight, groups, err)) return false;
  if (changes) p->landing = p->base + landing;
  for (const auto &set : settle) set(p->base);
  mm_hole *const holes = reinterpret_cast<mm_hole *>(p->base + table);
  if (!check(cudaMemcpyAsync(holes, plan.hole, plan.holes * sizeof(mm_hole), cudaMemcpyHostToDevice, p->kernels), "copy holes", err) ||
      !check(mm_cu_zero_holes(p->base, holes, plan.holes, p->kernels), "zero", err) || !fill_by_host(err))
    return false;
  queued.assign(groups, false);
  for (uint32_t g = 0; g < groups; g++) {
    if ((g >= plan.groups || plan.left[g] == 0) && !complete(g, err)) return false;
  }
  if (!reader) {
    if (!check(cudaStreamSynchronize(p->kernels), "load", err)) return false;
    now = LANDED;
    return true;
  }
  const int no = pthread_create(
      &thread, nullptr,
      [](void *load) -> void * {
        static_cast<mm_cu_load *>(load)->run();
        return nullptr;
      },
      this);
  if (no) return mm_fail(err, MM_LIMIT, "E_THREADS", mm_at(NULL, NULL), "started no thread to load with: %s", strerror(no));
  started = true;
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
  if (now == FAILED && err && err->status == MM_OK) *err = error;
  return now == FAILED;
}

bool mm_cu_load::wait(uint32_t group, cudaStream_t s, mm_err *err) {
  pthread_mutex_lock(&lock);
  while (now == RUNNING && !queued[group]) pthread_cond_wait(&changed, &lock);
  const bool bad = failed(err), there = now == LANDED;
  pthread_mutex_unlock(&lock);
  return !bad && (there || check(cudaStreamWaitEvent(s, p->there[group], 0), "wait for weights", err));
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
  pthread_mutex_lock(&lock);
  while (now == RUNNING) pthread_cond_wait(&changed, &lock);
  const bool bad = failed(err);
  pthread_mutex_unlock(&lock);
  return !bad;
}
