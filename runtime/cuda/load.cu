/* Loading (load.h). Three streams of work run beside each other: threads of the reader fill the ring; the copy engine empties it, in order,
 * on one stream; kernels that change what landed follow on another. A buffer is filled again when both are done with what was in it. */
#include "runtime/cuda/load.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "formats/pool.h"

namespace {

constexpr uint64_t kAlign = 256; /* of every part of a weight, and the zeros behind it at least */
constexpr size_t kHuge = (size_t)2 << 20;
constexpr unsigned kMostThreads = 16;

bool check(cudaError_t e, const char *what, mm_err *err) { return mm_cu_check(e, what, err); }

uint64_t stored_bytes(const mm_packed *w, unsigned plane) {
  return w->lead * mm_plane_elements(w->n, w->k, w->cell[plane]) * mm_dtype_size(w->scheme->plane[plane].dtype);
}

}  // namespace

/* ---- the plan ---- */

/* zero: all of it, else what is behind it. */
uint64_t mm_cu_load::place(uint64_t bytes, bool zero) {
  const uint64_t at = arena_bytes;
  arena_bytes = mm_round_up(at + bytes + kAlign, kAlign);
  const uint64_t from = zero ? at : at + bytes;
  holes.push_back({from, arena_bytes - from});
  return at;
}

/* The file that holds p; what is in no mapping is a file of its own, in memory. */
uint32_t mm_cu_load::source_of(const void *p, uint64_t bytes, uint64_t *offset) {
  mm_mapped m;
  if (!mm_map_find(p, &m)) {
    *offset = 0;
    mapping.push_back(nullptr), file.push_back({nullptr, static_cast<const uint8_t *>(p), bytes, nullptr});
    return (uint32_t)file.size() - 1;
  }
  *offset = m.offset;
  const auto known = std::find(mapping.begin(), mapping.end(), static_cast<const void *>(m.data));
  if (known != mapping.end()) return (uint32_t)(known - mapping.begin());
  mapping.push_back(m.data), file.push_back({m.path, nullptr, 0, m.id});
  return (uint32_t)file.size() - 1;
}

bool mm_cu_load::plan_plane(const mm_packed *w, unsigned plane, const char *name, const mm_cu_landing &l, mm_err *err) {
  const void *p = w->plane[plane];
  if (!p) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, name), "found no plane %u", plane);
  uint64_t offset;
  const uint32_t from = source_of(p, l.bytes, &offset);
  want.push_back({from, offset, l.bytes, landing.size()}), landing.push_back(l);
  file_bytes += l.bytes;
  return true;
}

bool mm_cu_load::matrix(const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err) {
  if (!mm_cu_describe(w, name, out, err)) return false;
  const uint32_t bits = mm_cu_bits(out->code);
  const bool random = !w->plane[0], bytes = out->scale_kind == MM_CU_NV || out->scale_kind == MM_CU_MX;
  const bool scales = out->scale_kind != MM_CU_PLAIN, nv = out->scale_kind == MM_CU_NV;
  mm_cu_landing code, scale, global;
  code.row = (size_t)w->k * bits / 8, code.pitch = out->pitch, code.bytes = (uint64_t)w->lead * w->n * code.row;
  code.how = code.row == code.pitch ? mm_cu_landing::AS_IS : mm_cu_landing::SPREAD;
  code.nibbles = bits == 4 ? w : nullptr;
  code.at = place((uint64_t)w->lead * w->n * out->pitch, code.how == mm_cu_landing::SPREAD);
  if (scales) {
    scale.bytes = stored_bytes(w, 1), scale.from = w->scheme->plane[1].dtype;
    scale.row = mm_cells(w->k, w->cell[1].k), scale.pitch = out->scale_pitch;
    scale.how = bytes                  ? scale.row == scale.pitch ? mm_cu_landing::AS_IS : mm_cu_landing::SPREAD
                : scale.from == MM_F32 ? mm_cu_landing::AS_IS
                                       : mm_cu_landing::WIDEN;
    scale.at = place(mm_cu_scales(out) * (bytes ? 1 : sizeof(float)), scale.how == mm_cu_landing::SPREAD);
  }
  if (nv) {
    global.bytes = stored_bytes(w, 2), global.how = mm_cu_landing::WIDEN, global.factor = 256;
    global.at = place(w->lead * sizeof(float), false);
  }
  const auto places = [=](char *base) {
    return mm_cu_places{reinterpret_cast<uint8_t *>(base + code.at), scales ? base + scale.at : nullptr,
                        nv ? reinterpret_cast<float *>(base + global.at) : nullptr};
  };
  settle.push_back([=](char *base) {
    const mm_cu_places to = places(base);
    out->data = to.data, out->scale = to.scale, out->global = to.global;
  });
  if (random) {
    by_host.push_back([=](char *base, mm_err *e) { return mm_cu_randomise(w, out, places(base), e); });
    return true;
  }
  return (!scales || plan_plane(w, 1, name, scale, err)) && (!nv || plan_plane(w, 2, name, global, err)) &&
         plan_plane(w, 0, name, code, err);
}

bool mm_cu_load::values(const mm_packed *w, const char *name, const float **out, mm_err *err) {
  mm_cu_landing l;
  l.from = w->scheme->plane[0].dtype;
  l.how = l.from == MM_F32 ? mm_cu_landing::AS_IS : mm_cu_landing::WIDEN;
  l.at = place((uint64_t)w->lead * w->n * w->k * sizeof(float), false);
  settle.push_back([=](char *base) { *out = reinterpret_cast<float *>(base + l.at); });
  const bool random = !w->plane[0];
  if (random || w->scheme->code != MM_CODE_PLAIN) {
    by_host.push_back([=](char *base, mm_err *e) {
      float *to = reinterpret_cast<float *>(base + l.at);
      return random ? mm_cu_randomise_f32(w, to, e) : mm_cu_unpack(w, to, e);
    });
    return true;
  }
  l.bytes = stored_bytes(w, 0);
  return plan_plane(w, 0, name, l, err);
}

void mm_cu_load::room(uint64_t count, const __nv_bfloat16 **out) {
  const uint64_t at = place(count * sizeof(__nv_bfloat16), false);
  settle.push_back([=](char *base) { *out = reinterpret_cast<const __nv_bfloat16 *>(base + at); });
}

/* ---- reading ---- */

/* Huge pages where there are any; nobody touches them before the reader's threads do. */
bool mm_cu_load::open_ring(mm_err *err) {
  ring_bytes = mm_round_up(config.buffers * config.chunk, kHuge);
  void *p = mmap(nullptr, ring_bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return mm_fail_memory(err, ring_bytes + kHuge);
  ring_map = static_cast<uint8_t *>(p);
  ring = reinterpret_cast<uint8_t *>(mm_round_up(reinterpret_cast<uintptr_t>(p), kHuge));
  madvise(ring, ring_bytes, MADV_HUGEPAGE); /* without them it is slower, and nothing else */
  return true;
}

bool mm_cu_load::start(const mm_cu_load_config &c, mm_err *err) {
  config = c;
  if (!config.threads) config.threads = (unsigned)mm_min(mm_pool_cpus(), kMostThreads);
  if (want.empty()) return true;
  /* A small model needs no large ring. */
  const uint64_t chunks = mm_ceil_div(file_bytes, config.chunk) + file.size() + 1;
  config.buffers = (uint32_t)mm_min(config.buffers, chunks + config.in_flight);
  if (!open_ring(err)) return false;
  const mm_reader_config r = {file.data(),    (uint32_t)file.size(), want.data(),  want.size(),    ring,
                              config.buffers, config.chunk,          config.piece, config.threads, config.path};
  reader = mm_reader_open(&r, err);
  return reader != nullptr;
}

mm_cu_load::~mm_cu_load() {
  mm_reader_close(reader);
  if (ring_map) munmap(ring_map, ring_bytes + kHuge);
}

/* ---- landing ---- */

/* The device's side while a load runs. */
struct mm_cu_load::pipe {
  char *base = nullptr, *landing = nullptr; /* the arena; in_flight places of a chunk each, or NULL where nothing needs them */
  cudaStream_t copies = nullptr, kernels = nullptr;
  std::vector<cudaEvent_t> copied, done; /* [in_flight] */
  bool registered = false;
  uint8_t *ring = nullptr;

  bool open(uint8_t *r, size_t bytes, uint32_t in_flight, size_t place, mm_err *err) {
    ring = r;
    copied.assign(in_flight, nullptr), done.assign(in_flight, nullptr);
    if (!check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cudaStreamCreate", err) ||
        !check(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking), "cudaStreamCreate", err))
      return false;
    if (!check(cudaHostRegister(ring, bytes, cudaHostRegisterDefault), "cudaHostRegister", err)) return false;
    registered = true;
    for (uint32_t i = 0; i < in_flight; i++) {
      if (!check(cudaEventCreateWithFlags(&copied[i], cudaEventDisableTiming), "cudaEventCreate", err) ||
          !check(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate", err))
        return false;
    }
    return place == 0 || check(cudaMalloc(&landing, in_flight * place), "cudaMalloc", err);
  }
  /* What was queued is done before its memory goes. */
  ~pipe() {
    if (copies) cudaStreamSynchronize(copies), cudaStreamDestroy(copies);
    if (kernels) cudaStreamSynchronize(kernels), cudaStreamDestroy(kernels);
    for (auto *v : {&copied, &done}) {
      for (cudaEvent_t e : *v) {
        if (e) cudaEventDestroy(e);
      }
    }
    if (landing) cudaFree(landing);
    if (registered) cudaHostUnregister(ring);
  }
};

/* Holes are nowhere that something is copied to as it is, so no copy waits for them. */
bool mm_cu_load::zero_holes(char *base, cudaStream_t s, mm_err *err) {
  for (const hole &h : holes) {
    if (!check(cudaMemsetAsync(base + h.at, 0, h.bytes, s), "cudaMemset", err)) return false;
  }
  return true;
}

/* Queues the copies of a chunk, and behind them the kernels that its bytes need. */
bool mm_cu_load::take(pipe *p, const mm_chunk &c, uint32_t slot, mm_err *err) {
  struct piece {
    const mm_cu_landing *l;
    const char *at;
    uint64_t first, bytes;
  };
  std::vector<piece> changed;
  for (size_t i = c.first; i < c.first + c.count; i++) {
    const mm_read_want &w = want[i];
    const mm_cu_landing &l = landing[w.tag];
    const uint64_t from = mm_max(w.offset, c.offset), to = mm_min(w.offset + w.bytes, c.offset + c.bytes);
    if (from >= to) continue;
    const uint64_t first = from - w.offset, n = to - from;
    const bool as_is = l.how == mm_cu_landing::AS_IS;
    char *const at = as_is ? p->base + l.at + first : p->landing + slot * config.chunk + (from - c.offset);
    if (!check(cudaMemcpyAsync(at, c.data + (from - c.offset), n, cudaMemcpyHostToDevice, p->copies), "copy weights", err)) return false;
    if (!as_is || l.nibbles) changed.push_back({&l, at, first, n});
  }
  if (!check(cudaEventRecord(p->copied[slot], p->copies), "record event", err) ||
      !check(cudaStreamWaitEvent(p->kernels, p->copied[slot], 0), "wait for event", err))
    return false;
  for (const piece &x : changed) {
    if (x.l->how != mm_cu_landing::AS_IS && !check(mm_cu_land(p->base, *x.l, x.at, x.first, x.bytes, p->kernels), "land", err))
      return false;
    if (x.l->nibbles && !check(mm_cu_land_nibbles(p->base, *x.l, x.first, x.bytes, p->kernels), "reorder_nibbles", err)) return false;
  }
  return check(cudaEventRecord(p->done[slot], p->kernels), "record event", err);
}

/* From the ring to the arena, until all is there. */
bool mm_cu_load::stream(pipe *p, mm_err *err) {
  uint64_t given = 0, done = 0;
  for (;;) {
    if (given - done == config.in_flight) {
      if (!check(cudaEventSynchronize(p->done[done % config.in_flight]), "copy weights", err)) return false;
      mm_reader_release(reader), done++;
    }
    mm_chunk c;
    if (!mm_reader_next(reader, &c, err)) return false;
    if (!c.data) break;
    if (!take(p, c, (uint32_t)(given % config.in_flight), err)) return false;
    given++;
  }
  return check(cudaStreamSynchronize(p->copies), "copy weights", err) && check(cudaStreamSynchronize(p->kernels), "copy weights", err);
}

bool mm_cu_load::finish(char *base, mm_err *err) {
  for (const auto &set : settle) set(base);
  for (const auto &make : by_host) {
    if (!make(base, err)) return false;
  }
  return check(cudaDeviceSynchronize(), "load", err);
}

bool mm_cu_load::run(mm_cu_memory *memory, mm_err *err) {
  char *const base = static_cast<char *>(memory->reserve(arena_bytes, err));
  if (!base) return false;
  holes.push_back({arena_bytes, kAlign});
  bool changes = false;
  for (const mm_cu_landing &l : landing) changes |= l.how != mm_cu_landing::AS_IS;
  if (!reader) return zero_holes(base, 0, err) && finish(base, err);
  bool ok;
  {
    pipe p;
    p.base = base;
    ok = p.open(ring, ring_bytes, config.in_flight, changes ? config.chunk : 0, err) && zero_holes(base, p.kernels, err) && stream(&p, err);
    if (ok) stats = mm_reader_stats(reader);
    mm_reader_close(reader); /* no thread writes to the ring when it is no longer registered */
    reader = nullptr;
  }
  munmap(ring_map, ring_bytes + kHuge);
  ring_map = nullptr;
  return ok && finish(base, err);
}
