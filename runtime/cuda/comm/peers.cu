/* Sums over ranks (peers.h). Every sum has a number, the epoch, which each rank counts in its own memory, so that recorded steps go on
 * counting.
 *
 * Few numbers: each rank writes its own into every other's memory at once, eight bytes of data with the epoch after each four, and adds
 * what comes to it. Many: slabs, of which each rank owns a part: it is sent that part by all, adds it up, and sends the sum to all; a flag
 * for each block of the kernel follows the data. Both add in rank order, so it does not matter which way was taken.
 *
 * Places alternate with the epoch. A rank that has ended epoch e + 1 has had something of every other rank's e + 1, which that one sent
 * after its epoch e had ended: nobody reads what e left any more when e + 2 overwrites it.
 *
 * Kernels of small steps that do more than a sum send words likewise, and have an epoch each as sums have (ranks.cu); those that sum a
 * branch have turns of their own (peers.cuh).
 *
 * A waiting thread polls the clock, and seldom a word in host memory: a rank that fails sets the word, a rank that times out sets it and
 * names the rank it waited for. Kernels then end, with their epoch counted. */
#include "runtime/cuda/comm/peers.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <vector>

#include "runtime/cuda/comm/nccl_sums.h"
#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/upload.h"

namespace {

constexpr uint32_t kThreads = 256;
/* Where ranks share a device: blocks that wait take multiprocessors from kernels that need whole ones, and those of another rank may be
 * what they wait for. */
constexpr uint32_t kSharedBlocks = 2, kSharedRows = 16; /* of a sum; of all ranks' kernels whose blocks have a row each */
constexpr uint32_t kFewBlocks = 128;                    /* of a sum of few numbers, whose words carry their own flags */
constexpr uint32_t kLoading_ms = 600000, kTry_ms = 100;

/* ---- kernels ---- */

/* n words of eight bytes. */
template <class T, reduction R>
__global__ void __launch_bounds__(kThreads) reduce_few(const __grid_constant__ peer_view c, uint2 *x, uint32_t n) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, first = blockIdx.x * kThreads + threadIdx.x;
  for (uint32_t i = first; i < n; i += gridDim.x * kThreads) {
    const uint2 v = x[i];
    for (uint32_t k = 1; k < c.ranks; k++) {
      const uint32_t to = (c.rank + k) % c.ranks;
      put_word(c.word(to, parity, c.rank) + i, make_uint4(v.x, flag, v.y, flag));
    }
  }
  peer_timeout p(c);
  for (uint32_t i = first; i < n; i += gridDim.x * kThreads) {
    total<T, R, 2> t;
    for (uint32_t r = 0; r < c.ranks; r++) {
      const uint2 v = r == c.rank ? x[i] : p.word(c.word(c.rank, parity, r) + i, flag, r);
      const uint32_t w[2] = {v.x, v.y};
      t.add(w, r == 0);
    }
    x[i] = make_uint2(t.word(0), t.word(1));
  }
  peer_end(c, epoch);
}

/* n units of sixteen bytes, of which rank r owns [r · share, (r + 1) · share). One pass: each barrier costs the time in which all
 * writes of a block arrive; in overlapping pieces that took twice as long. */
template <class T, reduction R>
__global__ void __launch_bounds__(kThreads) reduce_many(const __grid_constant__ peer_view c, uint4 *x, uint32_t n) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, share = (n + c.ranks - 1) / c.ranks;
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const auto count = [&](uint32_t r) { return r * share >= n ? 0 : n - r * share < share ? n - r * share : share; };
  peer_timeout p(c);
  for (uint32_t k = 1; k < c.ranks; k++) {
    const uint32_t to = (c.rank + k) % c.ranks;
    uint4 *const part = c.part(to, parity, c.rank);
    each_of<uint4>(
        first, count(to), step, [&](uint32_t i) { return x[to * share + i]; }, [&](uint32_t i, uint4 v) { put_word(part + i, v); });
  }
  bool here = peer_barrier(c, &p, 0, parity, flag);
  const auto add = [&](uint32_t i) {
    total<T, R, 4> t;
    for (uint32_t r = 0; r < c.ranks; r++) {
      const uint4 v = r == c.rank ? x[c.rank * share + i] : get_word(c.part(c.rank, parity, r) + i);
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
      t.add(w, r == 0);
    }
    return make_uint4(t.word(0), t.word(1), t.word(2), t.word(3));
  };
  each_of<uint4>(first, here ? count(c.rank) : 0, step, add, [&](uint32_t i, uint4 v) {
    x[c.rank * share + i] = v;
    for (uint32_t k = 1; k < c.ranks; k++) put_word(c.sum((c.rank + k) % c.ranks, parity) + c.rank * share + i, v);
  });
  here = here && peer_barrier(c, &p, 1, parity, flag);
  for (uint32_t r = 0; here && r < c.ranks; r++) {
    if (r == c.rank) continue;
    each_of<uint4>(
        first, count(r), step, [&](uint32_t i) { return get_word(c.sum(c.rank, parity) + r * share + i); },
        [&](uint32_t i, uint4 v) { x[r * share + i] = v; });
  }
  peer_end(c, epoch);
}

/* Every rank's part of each row, to all. The first meeting says that a rank's own rows may be written: whoever read them has ended. */
struct shared_rows {
  float *all[MM_CU_PEERS];
  const float *own;
  uint32_t rows, n; /* columns of a part */
};
template <class T>
__global__ void __launch_bounds__(kThreads) share_rows(const __grid_constant__ peer_view c, const __grid_constant__ shared_rows a) {
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch, flag = epoch + 1, parity = epoch & 1, each = a.n / (uint32_t)(sizeof(T) / sizeof(float));
  const uint64_t count = (uint64_t)a.rows * each, step = (uint64_t)gridDim.x * kThreads;
  peer_timeout p(c);
  const bool here = peer_barrier(c, &p, 0, parity, flag);
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; here && i < count; i += step) {
    const uint64_t to = i / each * c.ranks * each + c.rank * each + i % each;
    const T v = reinterpret_cast<const T *>(a.own)[i];
    for (uint32_t k = 0; k < c.ranks; k++) reinterpret_cast<T *>(a.all[(c.rank + k) % c.ranks])[to] = v;
  }
  if (here) peer_barrier(c, &p, 1, parity, flag);
  peer_end(c, epoch);
}

__global__ void run_nothing() {}

/* One thread, which waits until every rank's has begun, or for kTry_ms. */
__global__ void await_streams(volatile peer_control *c, uint32_t rank, uint32_t ranks, uint32_t number) {
  c->late[rank] = c->given_up == number;
  c->begun[rank] = number;
  __threadfence_system();
  const uint64_t from = now_ns();
  for (uint32_t r = 0; r < ranks;) {
    if (c->begun[r] == number) {
      r++;
    } else if (now_ns() - from > kTry_ms * UINT64_C(1000000)) {
      c->given_up = number;
      return;
    }
  }
}

}  // namespace

/* ---- the host's side ---- */

/* State shared by all ranks; the last to close frees it. */
struct mm_cu_peers_group {
  std::atomic<uint32_t> open, loading{0};
  uint32_t limit_ms = 0;
  peer_control *shared = nullptr; /* pinned, mapped; of a group of some of a stage's ranks the stage's */
  char *memory[MM_CU_PEERS] = {};
  void *counters[MM_CU_PEERS] = {}; /* of the device, where `memory` is not */
  int device[MM_CU_PEERS] = {};
};

struct mm_cu_peers {
  mm_comm *comm = nullptr;
  mm_cu_peers_group *group = nullptr; /* NULL where `across` is not */
  const mm_cu_peers *stage = nullptr; /* that these are some ranks of, or NULL */
  peer_view c = {};
  mm_cu_across *across = nullptr; /* where some ranks are of other processes; of c only rank, ranks and distinct_devices are used then */
  bool hosted = false;            /* what the ranks write to is pinned host memory */
  double limit_s = 0;
  uint32_t tries = 0; /* of streams, the same number on all ranks */
};

bool mm_cu_peers_refused = getenv("MM_TEST_NO_PEER") != NULL;

namespace {

bool check(cudaError_t e, const char *what, mm_err *err) { return mm_cu_check(e, what, err); }

bool timed_out(const mm_cu_peers *p, uint32_t awaited, mm_err *err) {
  const double limit_s = p->across ? p->limit_s : const_cast<const volatile peer_control *>(p->group->shared)->limit_ms * 1e-3;
  return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "rank %u waited %.1f s for rank %u: timeout", p->c.base + p->c.rank, limit_s,
                 p->c.base + awaited);
}

/* The values of all ranks, once all have arrived. */
template <class T>
bool all_gather(const mm_cu_peers *p, const T &mine, T *all, mm_err *err) {
  uint32_t awaited;
  if (mm_comm_all_gather(p->comm, p->c.rank, &mine, all, sizeof mine)) return true;
  return mm_comm_timed_out(p->comm, p->c.rank, &awaited) && timed_out(p, awaited, err);
}

/* The same of this process's ranks, in their own memory. */
bool gather(const mm_cu_peers *p, const void *mine, const void **all, mm_err *err) {
  uint32_t awaited;
  if (mm_comm_gather(p->comm, p->c.rank, mine, all)) return true;
  return mm_comm_timed_out(p->comm, p->c.rank, &awaited) && timed_out(p, awaited, err);
}

/* The first rank makes it, all have it. */
bool open_group(mm_cu_peers *p, uint32_t rank, uint32_t ranks, double limit_s, mm_err *err) {
  const void *all[MM_CU_PEERS];
  mm_cu_peers_group *g = nullptr;
  if (rank == 0) {
    g = new mm_cu_peers_group;
    g->open = ranks;
    if (p->stage) {
      g->shared = p->stage->group->shared;
    } else if (!check(cudaHostAlloc(&g->shared, sizeof(peer_control), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc", err)) {
      delete g;
      return false;
    }
    if (!p->stage) *g->shared = {};
    if (!p->stage) g->shared->limit_ms = g->limit_ms = (uint32_t)(limit_s * 1e3);
  }
  if (!mm_comm_gather(p->comm, rank, g, all)) {
    if (g && !p->stage) cudaFreeHost(g->shared);
    delete g;
    return false;
  }
  p->group = static_cast<mm_cu_peers_group *>(const_cast<void *>(all[0]));
  if (rank == 0 && !p->stage) mm_comm_watch(p->comm, &p->group->shared->state);
  return true;
}

/* In this rank's memory, with no kernel of its stage at work: no branch has come. Copied, since filling memory may wait for another stage's
 * kernels on the device, which may wait for a device of theirs. */
bool forget_branches(const mm_cu_peers *p, mm_err *err) {
  const peer_view &c = p->c;
  const std::vector<uint8_t> nothing(c.branches_bytes(), 0xff);
  const peer_counters zero = {};
  char *const branches = c.at[c.rank] + c.branches_at();
  if (p->hosted)
    memcpy(branches, nothing.data(), nothing.size());
  else if (!check(cudaMemcpy(branches, nothing.data(), nothing.size(), cudaMemcpyHostToDevice), "empty branches", err))
    return false;
  return check(cudaMemcpy(c.counters, &zero, sizeof zero, cudaMemcpyHostToDevice), "set counters", err) &&
         check(cudaStreamSynchronize(0), "set counters", err);
}

/* All devices of the ranks, whether two have one, and whether each can write to every other's memory: all find the same. */
bool find_devices(mm_cu_peers *p, mm_err *err) {
  mm_cu_peers_group *g = p->group;
  const void *all[MM_CU_PEERS];
  if (!check(cudaGetDevice(&g->device[p->c.rank]), "cudaGetDevice", err) || !gather(p, nullptr, all, err)) return false;
  p->hosted = p->stage && p->stage->hosted;
  for (uint32_t r = 0; r < p->c.ranks; r++) {
    for (uint32_t k = 0; k < p->c.ranks; k++) {
      int able = 0;
      if (k != r && g->device[k] == g->device[r]) p->c.distinct_devices = false;
      if (g->device[k] == g->device[r]) continue;
      if (!check(cudaDeviceCanAccessPeer(&able, g->device[k], g->device[r]), "cudaDeviceCanAccessPeer", err)) return false;
      p->hosted = p->hosted || !able || mm_cu_peers_refused;
    }
  }
  return true;
}

/* Own memory, zeros, where the others can write. */
bool open_memory(mm_cu_peers *p, mm_err *err) {
  peer_view *c = &p->c;
  mm_cu_peers_group *g = p->group;
  void *shared;
  char *&memory = g->memory[c->rank];
  if (!check(cudaHostGetDevicePointer(&shared, g->shared, 0), "cudaHostGetDevicePointer", err) ||
      !mm_cu_peers_malloc(p, reinterpret_cast<void **>(&memory), c->bytes(), "sums over ranks", err))
    return false;
  if (p->hosted)
    memset(memory, 0, c->bytes());
  else if (!check(cudaMemset(memory, 0, c->bytes()), "cudaMemset", err))
    return false;
  if (p->hosted && !mm_cu_malloc(&g->counters[c->rank], sizeof(peer_counters), "counters of sums", err)) return false;
  c->shared = static_cast<peer_control *>(shared);
  c->at[c->rank] = memory;
  c->counters = static_cast<peer_counters *>(p->hosted ? g->counters[c->rank] : memory + c->counters_at());
  return forget_branches(p, err);
}

/* The others' memory, once all have theirs. */
bool reach_peers(mm_cu_peers *p, mm_err *err) {
  peer_view *c = &p->c;
  const mm_cu_peers_group *g = p->group;
  const int own = g->device[c->rank];
  for (uint32_t r = 0; r < c->ranks; r++) {
    c->at[r] = g->memory[r];
    if (g->device[r] == own || p->hosted) continue;
    const cudaError_t e = cudaDeviceEnablePeerAccess(g->device[r], 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();
    else if (!check(e, "cudaDeviceEnablePeerAccess", err))
      return false;
  }
  return true;
}

/* All are here; nothing is exchanged. */
bool meet_all(const mm_cu_peers *p, mm_err *err) {
  const void *all[MM_CU_PEERS];
  return gather(p, nullptr, all, err);
}

/* A kernel that is loaded at its first launch may wait for the device to be idle, which it is not while another rank's waits for it. */
bool load_kernels(mm_err *err) {
  const void *const kernels[] = {reinterpret_cast<const void *>(reduce_few<bf16, SUM>),
                                 reinterpret_cast<const void *>(reduce_few<float, SUM>),
                                 reinterpret_cast<const void *>(reduce_few<float, MAX>),
                                 reinterpret_cast<const void *>(reduce_many<bf16, SUM>),
                                 reinterpret_cast<const void *>(reduce_many<float, SUM>),
                                 reinterpret_cast<const void *>(reduce_many<float, MAX>),
                                 reinterpret_cast<const void *>(share_rows<float4>),
                                 reinterpret_cast<const void *>(share_rows<float>),
                                 mm_cu_large_sum_kernel(0),
                                 mm_cu_large_sum_kernel(1),
                                 mm_cu_large_sum_kernel(2),
                                 mm_cu_group_kernel(0),
                                 mm_cu_group_kernel(1),
                                 mm_cu_group_kernel(2),
                                 mm_cu_group_kernel(3),
                                 mm_cu_group_kernel(4),
                                 mm_cu_group_kernel(5),
                                 mm_cu_codes_kernel(),
                                 reinterpret_cast<const void *>(run_nothing),
                                 reinterpret_cast<const void *>(await_streams)};
  cudaFuncAttributes a;
  for (const void *k : kernels) {
    if (!check(cudaFuncGetAttributes(&a, k), "load kernels", err)) return false;
  }
  return true;
}

template <class T, reduction R>
cudaError_t reduce(mm_cu_peers *p, T *x, uint64_t n, cudaStream_t s) {
  if (p->c.ranks == 1 || n == 0) return cudaSuccess;
  uint64_t left = n * sizeof(T) / 8;
  const uint32_t most = p->c.distinct_devices ? kPeerBlocks : kSharedBlocks;
  if (left * (p->c.ranks - 1) <= kPeerWords) {
    const unsigned blocks = (unsigned)mm_min(p->c.distinct_devices ? kFewBlocks : most, mm_ceil_div(left, kThreads));
    return launch(reduce_few<T, R>, blocks, kThreads, 0, s, p->c, reinterpret_cast<uint2 *>(x), (uint32_t)left);
  }
  cudaError_t e = cudaSuccess;
  uint4 *at = reinterpret_cast<uint4 *>(x);
  for (left /= 2; left > 0 && e == cudaSuccess;) {
    const uint64_t units = mm_min(left, kPeerSlab / 16);
    e = launch(reduce_many<T, R>, most, kThreads, 0, s, p->c, at, (uint32_t)units);
    at += units, left -= units;
  }
  return e;
}

}  // namespace

const peer_view &mm_cu_peers_view(const mm_cu_peers *p) { return p->c; }

static mm_cu_peers *open_peers(mm_cu_peers *p, uint64_t rows_bytes, double limit_s, mm_err *err) {
  const uint32_t rank = p->c.rank, ranks = p->c.ranks;
  p->limit_s = limit_s;
  p->c.sum_bytes = ranks == 2 ? mm_max(kPeerSlab, mm_min(mm_round_up(rows_bytes, 16), kPeerMost)) : kPeerSlab;
  if (mm_comm_is_across(p->comm)) {
    p->c.distinct_devices = true; /* NCCL takes no others */
    if ((p->across = mm_cu_across_open(p->comm, rank, ranks, limit_s, err))) return p;
    mm_comm_abort(p->comm);
    delete p;
    return nullptr;
  }
  const bool ok = open_group(p, rank, ranks, limit_s, err) && find_devices(p, err) && open_memory(p, err) && load_kernels(err) &&
                  meet_all(p, err) && reach_peers(p, err) && meet_all(p, err);
  if (ok && p->hosted && rank == 0 && !p->stage) mm_cu_note_hosted();
  if (ok) return p;
  mm_comm_abort(p->comm); /* the others do not wait */
  mm_cu_peers_close(p);
  return nullptr;
}

mm_cu_peers *mm_cu_peers_open(mm_comm *comm, uint32_t rank, uint32_t ranks, bool shared, uint64_t rows_bytes, double limit_s, mm_err *err) {
  if (ranks > MM_CU_PEERS) {
    mm_fail(err, MM_UNSUPPORTED, "E_PEER", mm_at(NULL, NULL), "found %u ranks of a stage, expected at most %d", ranks, MM_CU_PEERS);
    return nullptr;
  }
  mm_cu_peers *p = new mm_cu_peers;
  p->comm = comm, p->c.rank = rank, p->c.ranks = ranks, p->c.distinct_devices = !shared;
  return open_peers(p, rows_bytes, limit_s, err);
}

mm_cu_peers *mm_cu_peers_open_group(const mm_cu_peers *stage, mm_comm *comm, uint32_t rank, uint32_t ranks, uint64_t rows_bytes,
                                    mm_err *err) {
  mm_cu_peers *p = new mm_cu_peers;
  p->comm = comm, p->stage = stage, p->c.rank = rank, p->c.ranks = ranks, p->c.base = stage->c.rank - rank;
  p->c.distinct_devices = stage->c.distinct_devices;
  return open_peers(p, rows_bytes, stage->limit_s, err);
}

void mm_cu_peers_close(mm_cu_peers *p) {
  if (!p) return;
  mm_cu_across_close(p->across);
  mm_cu_peers_group *g = p->group;
  if (g && --g->open == 0) {
    if (!p->stage) mm_comm_watch(p->comm, nullptr);
    int own = 0;
    cudaGetDevice(&own);
    for (uint32_t r = 0; r < p->c.ranks; r++) {
      if (!g->memory[r]) continue;
      cudaSetDevice(g->device[r]);
      cudaFree(g->counters[r]);
      mm_cu_peers_free(p, g->memory[r]);
    }
    cudaSetDevice(own);
    if (!p->stage) cudaFreeHost(g->shared);
    delete g;
  }
  delete p;
}

cudaError_t mm_cu_peers_sum(mm_cu_peers *p, __nv_bfloat16 *x, uint64_t n, cudaStream_t s) {
  return p->across ? mm_cu_across_sum(p->across, x, n, s) : reduce<bf16, SUM>(p, x, n, s);
}
cudaError_t mm_cu_peers_sum_f32(mm_cu_peers *p, float *x, uint64_t n, cudaStream_t s) {
  return p->across ? mm_cu_across_sum_f32(p->across, x, n, s) : reduce<float, SUM>(p, x, n, s);
}
cudaError_t mm_cu_peers_max_f32(mm_cu_peers *p, float *x, uint64_t n, cudaStream_t s) {
  return p->across ? mm_cu_across_max_f32(p->across, x, n, s) : reduce<float, MAX>(p, x, n, s);
}

cudaError_t mm_cu_peers_all_gather(mm_cu_peers *p, float *const *all, const float *own, uint32_t rows, uint32_t n, cudaStream_t s) {
  if (p->across) return mm_cu_across_share(p->across, all[p->c.rank], own, rows, n, s);
  const uint32_t most = p->c.distinct_devices ? kPeerBlocks : kSharedBlocks;
  shared_rows a = {{}, own, rows, n};
  for (uint32_t r = 0; r < p->c.ranks; r++) a.all[r] = all[r];
  return launch(n % 4 == 0 ? share_rows<float4> : share_rows<float>, most, kThreads, 0, s, p->c, a);
}

bool mm_cu_peers_exchange_pointers(mm_cu_peers *p, void *mine, void **all, mm_err *err) { return all_gather(p, mine, all, err); }

bool mm_cu_peers_small(const mm_cu_peers *p, uint32_t rows, uint64_t words) {
  if (p->across || words > (p->c.ranks == 2 ? kPeerWords : kPeerNumbers) || words * (p->c.ranks - 1) > kPeerSent) return false;
  return rows <= (p->c.distinct_devices ? kPeerRows : kSharedRows / p->c.ranks);
}

bool mm_cu_peers_many(const mm_cu_peers *p, uint64_t words) { return !p->across && p->c.ranks == 2 && words > kPeerWords; }

bool mm_cu_peers_distinct(const mm_cu_peers *p) { return p->c.distinct_devices; }

bool mm_cu_peers_hosted(const mm_cu_peers *p) { return p->hosted; }

bool mm_cu_peers_malloc(const mm_cu_peers *p, void **to, size_t bytes, const char *what, mm_err *err) {
  return p->hosted ? check(cudaHostAlloc(to, bytes, cudaHostAllocPortable | cudaHostAllocMapped), what, err)
                   : mm_cu_malloc(to, bytes, what, err);
}
void mm_cu_peers_free(const mm_cu_peers *p, void *memory) {
  if (p->hosted)
    cudaFreeHost(memory);
  else
    cudaFree(memory);
}

bool mm_cu_peers_check(const mm_cu_peers *p, mm_err *err) {
  if (p->across) return mm_cu_across_check(p->across, err);
  const volatile peer_control *c = p->group->shared;
  const uint32_t state = c->state;
  if ((state & 0xff) != MM_COMM_TIMED_OUT || (state >> 8 & 0xff) != p->c.rank) return true;
  return timed_out(p, state >> 16, err);
}

bool mm_cu_peers_reset(mm_cu_peers *p, mm_err *err) {
  if (p->across) return mm_cu_across_reset(p->across, err);
  uint32_t epoch, most = 0;
  const void *all[MM_CU_PEERS];
  if (!check(cudaMemcpy(&epoch, &p->c.counters->epoch, sizeof epoch, cudaMemcpyDeviceToHost), "read epoch", err)) return false;
  if (!gather(p, &epoch, all, err)) return false; /* from here on no rank's kernel writes here */
  for (uint32_t r = 0; r < p->c.ranks; r++) most = (uint32_t)mm_max(most, *static_cast<const uint32_t *>(all[r]));
  if (!forget_branches(p, err) || !meet_all(p, err)) return false; /* nobody's epoch is read any more, all are empty */
  epoch = most + 2;
  if (p->c.rank == 0 && !p->stage) p->group->shared->state = MM_COMM_GOES_ON;
  /* The copy may return before the number is there, and the steps' stream does not wait for it. */
  const bool reset = check(cudaMemcpy(&p->c.counters->epoch, &epoch, sizeof epoch, cudaMemcpyHostToDevice), "set epoch", err) &&
                     check(cudaStreamSynchronize(0), "set epoch", err) && meet_all(p, err);
  if (reset && !p->stage) mm_comm_recover(p->comm);
  return reset;
}

bool mm_cu_peers_barrier(mm_cu_peers *p, bool mine, bool *all, mm_err *err) {
  bool said[MM_CU_PEERS];
  *all = false;
  if (!all_gather(p, mine, said, err)) return false;
  *all = true;
  for (uint32_t r = 0; r < p->c.ranks; r++) *all = *all && said[r];
  return true;
}

bool mm_cu_peers_settle(mm_cu_peers *p, cudaStream_t s, mm_err *err) {
  if (p->c.distinct_devices) return true;
  const bool done = check(launch(run_nothing, 1, 32, 0, s), "settle", err) && check(cudaStreamSynchronize(s), "step", err);
  bool all;
  return mm_cu_peers_barrier(p, done, &all, err) && all;
}

bool mm_cu_peers_try_streams(mm_cu_peers *p, cudaStream_t s, bool *late, bool *all, mm_err *err) {
  *late = false, *all = true;
  if (p->c.distinct_devices) return true;
  const uint32_t number = ++p->tries;
  const bool done = check(launch(await_streams, 1, 1, 0, s, p->c.shared, p->c.rank, p->c.ranks, number), "try a stream", err) &&
                    check(launch(run_nothing, 1, 32, 0, s), "try a stream", err) && check(cudaStreamSynchronize(s), "try a stream", err);
  bool ran;
  if (!mm_cu_peers_barrier(p, done, &ran, err) || !ran) return false;
  const volatile peer_control *c = p->group->shared;
  *late = c->late[p->c.rank], *all = c->given_up != number;
  return true;
}

bool mm_cu_peers_pause(mm_cu_peers *p, cudaStream_t s, mm_err *err) {
  bool all;
  return p->c.distinct_devices ? mm_cu_peers_barrier(p, true, &all, err) : mm_cu_peers_settle(p, s, err);
}

void mm_cu_peers_load(mm_cu_peers *p, bool loading) {
  if (p->across) {
    const double limit_s = loading ? kLoading_ms * 1e-3 : p->limit_s;
    mm_cu_across_limit(p->across, limit_s);
    mm_comm_set_timeout(p->comm, limit_s);
    return;
  }
  mm_cu_peers_group *g = p->group;
  volatile peer_control *c = g->shared;
  const uint32_t before = loading ? g->loading++ : g->loading--;
  if (!loading && before > 1) return;
  c->limit_ms = loading ? kLoading_ms : g->limit_ms;
  mm_comm_set_timeout(p->comm, c->limit_ms * 1e-3);
}
