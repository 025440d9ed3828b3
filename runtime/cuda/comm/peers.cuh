/* Device code shared by kernels that exchange numbers with other ranks: words and flags in the memory of other devices, their addresses,
 * and timeouts (peers.cu says why it is safe). */
#ifndef MM_CUDA_PEERS_CUH
#define MM_CUDA_PEERS_CUH

#include <stddef.h>

#include "runtime/cuda/comm/peers.h"
#include "runtime/cuda/comm/totals.cuh"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"

/* Sixteen bytes go and come as two halves of eight at least: a flag in each half publishes its data. */
__device__ __forceinline__ void put_word(uint4 *to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
/* Past the L1 cache, which other devices' writes do not reach. */
__device__ __forceinline__ uint4 get_word(const uint4 *from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
/* Whatever this thread wrote before, and saw of others' writes at a barrier, is seen by whoever sees the flag. */
__device__ __forceinline__ void put_flag(uint32_t *to, uint32_t v) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t get_flag(const uint32_t *from) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
/* ---- what all ranks share ---- */

constexpr uint32_t kPeerBlocks = 64;               /* blocks of a kernel that synchronises by flags */
constexpr uint64_t kPeerWords = 131072;            /* small sums: 16-byte words (8 bytes of data, the epoch twice): 1 MiB of data */
constexpr uint32_t kPeerRows = 256;                /* rows of a branch at most, if devices are distinct */
constexpr uint64_t kPeerNumbers = 196608;          /* a branch at most, in units of 8 bytes: 256 rows of 3,072 bf16 */
constexpr uint64_t kPeerSent = 3 * kPeerNumbers;   /* 8-byte units that one rank sends; above, a reduce-scatter sends less */
constexpr uint32_t kPeerBranch = kPeerNumbers / 2; /* a branch in 16-byte words, all data: no flags */
constexpr uint32_t kPeerTurns = 3;                 /* branch buffers in rotation: written, read, being emptied */
constexpr uint64_t kPeerSlab =
    (uint64_t)64 << 20; /* bytes of one step of a large sum; a rank's memory has four, or two and twice sum_bytes */
constexpr uint64_t kPeerMost = (uint64_t)256 << 20; /* largest sum_bytes, of two ranks whose rows are sent as they are made */
constexpr uint32_t kPeerLook = 256;                 /* polls between two looks at the clock */
constexpr uint64_t kPeerRead_ns = 4000000;          /* of waiting between two looks at host memory */

/* In host memory, seen by all; read as one number. */
struct alignas(8) peer_control {
  uint32_t state; /* MM_COMM_GOES_ON … (comm.h) */
  uint32_t limit_ms;
  /* Of mm_cu_peers_try_streams: the last try of which each rank's kernel has begun, and the last that some gave up. */
  uint32_t begun[MM_CU_PEERS], given_up;
  uint32_t late[MM_CU_PEERS]; /* the rank's kernel began after that */
};

/* In a rank's own memory. `turn` and `filled`: which place a branch takes next, and how many words the one before filled. */
struct alignas(16) peer_counters {
  uint32_t epoch, ticket, turn, filled;
};

/* The memory of every rank as mapped on this rank's device. */
struct peer_view {
  char *at[MM_CU_PEERS];
  peer_counters *counters; /* this rank's */
  peer_control *shared;
  uint32_t rank, ranks;
  /* No two ranks of the process have one device, of whatever groups and stages: kernels of each may wait, and a next kernel that is
   * launched early may fill the device on which another rank is yet to send what the first waits for. */
  bool distinct_devices;
  uint64_t sum_bytes; /* kPeerSlab, or more */
  uint32_t base;      /* number of the first rank in the stage: not 0 in a group of some of its ranks */

  /* Offsets: words [2][ranks][kPeerWords]; branches [kPeerTurns][ranks][kPeerBranch]; parts [2][ranks][kPeerSlab / ranks]; sums
   * [2][sum_bytes]; flags [2 rounds][2][ranks][kPeerBlocks]. */
  __host__ __device__ uint64_t part_bytes() const { return (kPeerSlab / ranks + 15) / 16 * 16 + 16; }
  __host__ __device__ uint64_t branches_at() const { return 2 * ranks * kPeerWords * 16; }
  __host__ __device__ uint64_t branches_bytes() const { return (uint64_t)kPeerTurns * ranks * kPeerBranch * 16; }
  __host__ __device__ uint64_t parts_at() const { return branches_at() + branches_bytes(); }
  __host__ __device__ uint64_t sums_at() const { return parts_at() + 2 * ranks * part_bytes(); }
  __host__ __device__ uint64_t flags_at() const { return sums_at() + 2 * sum_bytes; }
  __host__ __device__ uint64_t counters_at() const { return flags_at() + 4 * ranks * kPeerBlocks * sizeof(uint32_t); }
  __host__ __device__ uint64_t bytes() const { return counters_at() + 256; }

  __device__ uint4 *word(uint32_t of, uint32_t parity, uint32_t from) const {
    return reinterpret_cast<uint4 *>(at[of]) + (parity * ranks + from) * kPeerWords;
  }
  __device__ uint4 *branch(uint32_t of, uint32_t turn, uint32_t from) const {
    return reinterpret_cast<uint4 *>(at[of] + branches_at()) + (turn * ranks + from) * kPeerBranch;
  }
  __device__ uint4 *part(uint32_t of, uint32_t parity, uint32_t from) const {
    return reinterpret_cast<uint4 *>(at[of] + parts_at() + (parity * ranks + from) * part_bytes());
  }
  __host__ __device__ uint4 *sum(uint32_t of, uint32_t parity) const {
    return reinterpret_cast<uint4 *>(at[of] + sums_at() + parity * sum_bytes);
  }
  __device__ uint32_t *flag(uint32_t of, uint32_t round, uint32_t parity, uint32_t from, uint32_t block) const {
    return reinterpret_cast<uint32_t *>(at[of] + flags_at()) + ((round * 2 + parity) * ranks + from) * kPeerBlocks + block;
  }
};

static_assert(offsetof(peer_view, shared) == 72, "tests/ops/fake_device.h finds it there");

/* ---- waiting ---- */

/* The timeout of one thread. Host memory is read seldom: all warps of a kernel that wait read the same word, and none of them sees its data
 * before its read has returned. If such reads took longer than the wait after which they begin, two ranks that were late for each other
 * once would stay late, by turns, in every exchange. */
struct peer_timeout {
  const peer_view &c;
  uint64_t from = 0;
  uint32_t tries = 0, reads = 0;

  __device__ explicit peer_timeout(const peer_view &v) : c(v) {}
  /* True when the wait for rank r has timed out or another rank has failed. Where ranks share a device, a long wait leaves it to them. */
  __device__ bool over(uint32_t r) {
    if (++tries > kPeerLook && !c.distinct_devices) __nanosleep(100);
    if (tries % kPeerLook) return false;
    const uint64_t now = now_ns();
    if (!from) from = now;
    if (now - from < (reads + 1) * kPeerRead_ns) return false;
    reads++;
    const uint2 control = get_shared_pair(&c.shared->state);
    if (control.x != MM_COMM_GOES_ON) return true;
    if (now - from < (uint64_t)control.y * 1000000) return false;
    put_shared(&c.shared->state, MM_COMM_TIMED_OUT | (c.base + c.rank) << 8 | (c.base + r) << 16);
    return true;
  }
  /* The data of a word once both its flags are there. */
  __device__ uint2 word(const uint4 *w, uint32_t flag, uint32_t r) {
    for (;;) {
      const uint4 v = get_word(w);
      if ((v.y == flag && v.w == flag) || over(r)) return make_uint2(v.x, v.z);
    }
  }
  __device__ bool flag(const uint32_t *f, uint32_t value, uint32_t r) {
    while (get_flag(f) != value) {
      if (over(r)) return false;
    }
    return true;
  }
};

/* Publishes this block's data of the round to all ranks and waits for theirs. False for all threads when a rank timed out. */
__device__ __forceinline__ bool peer_barrier(const peer_view &c, peer_timeout *p, uint32_t round, uint32_t parity, uint32_t flag) {
  __threadfence_system();
  __syncthreads();
  const uint32_t r = threadIdx.x;
  bool here = true;
  if (r < c.ranks && r != c.rank) {
    put_flag(c.flag(r, round, parity, c.rank, blockIdx.x), flag);
    here = p->flag(c.flag(c.rank, round, parity, r, blockIdx.x), flag, r);
  }
  return __syncthreads_and(here);
}

/* f(i, g(i)) of every i from `first` on below n: four values are asked for before the first is used. */
template <class T, class G, class F>
__device__ __forceinline__ void each_of(uint32_t first, uint32_t n, uint32_t step, const G &g, const F &f) {
  constexpr uint32_t kAtOnce = 4;
  for (; first < n; first += kAtOnce * step) {
    T v[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; k++) {
      if (first + k * step < n) v[k] = g(first + k * step);
    }
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; k++) {
      if (first + k * step < n) f(first + k * step, v[k]);
    }
  }
}

/* ---- branches ---- */

/* A branch: this rank's partial sum of an attention or MLP block. Small ones are exchanged without flags. An empty 16-byte word holds
 * four times kPeerNothing, a NaN that senders never send (not_empty). The kernel of turn t uses buffer t % kPeerTurns and empties buffer
 * t - 1. Peers write that buffer again at t + 2 at the earliest, after they have received this rank's words of t + 1: it is empty by then.
 */
constexpr uint32_t kPeerNothing = 0xffffffffu;

struct peer_turn {
  uint32_t turn, filled; /* by the turn before */
};
__device__ __forceinline__ peer_turn turn_of(const peer_view &c) {
  const uint2 v = *reinterpret_cast<const uint2 *>(&c.counters->turn);
  return {v.x, v.y};
}

__device__ __forceinline__ uint32_t not_empty(uint32_t v) { return v - (v == kPeerNothing); }
__device__ __forceinline__ bool has_arrived(uint4 v) {
  return v.x != kPeerNothing && v.y != kPeerNothing && v.z != kPeerNothing && v.w != kPeerNothing;
}

/* Eight columns of this rank's, to all others, as word `word`. */
__device__ __forceinline__ void send_branch(const peer_view &c, peer_turn t, uint4 own, uint32_t word) {
  const uint4 v = make_uint4(not_empty(own.x), not_empty(own.y), not_empty(own.z), not_empty(own.w));
  for (uint32_t k = 1; k < c.ranks; k++) put_word(c.branch((c.rank + k) % c.ranks, t.turn, c.rank) + word, v);
}

/* By all threads of the kernel: what came in the turn before is gone. */
__device__ __forceinline__ void empty_branches(const peer_view &c, peer_turn t) {
  const uint32_t before = t.turn ? t.turn - 1 : kPeerTurns - 1;
  for (uint32_t k = 1; k < c.ranks; k++) {
    uint4 *const at = c.branch(c.rank, before, (c.rank + k) % c.ranks);
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < t.filled; i += gridDim.x * blockDim.x)
      at[i] = make_uint4(kPeerNothing, kPeerNothing, kPeerNothing, kPeerNothing);
  }
}

/* Their sum over all ranks, in rank order in f32 and rounded once. The next rank's word is on its way while one's is looked at. */
__device__ __forceinline__ uint4 sum_branches(const peer_view &c, peer_turn t, uint4 own, uint32_t word) {
  const auto place = [&](uint32_t r) { return c.branch(c.rank, t.turn, r) + word; };
  float sum[8];
  peer_timeout p(c);
  uint4 next = get_word(place(0));
  for (uint32_t r = 0; r < c.ranks; r++) {
    uint4 now = next;
    if (r + 1 < c.ranks) next = get_word(place(r + 1));
    while (r != c.rank && !has_arrived(now) && !p.over(r)) now = get_word(place(r));
    float x[8];
    widen8(x, r == c.rank ? own : now);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = r == 0 ? x[i] : sum[i] + x[i];
  }
  return narrow8(sum);
}

/* ---- epochs ---- */

/* Where ranks share a device, the next kernel's blocks must not wait in the room that another rank's kernels need to get here. */
__device__ __forceinline__ void peer_begin(const peer_view &c) {
  if (c.distinct_devices)
    grid_wait_and_launch_next();
  else
    grid_wait();
}

/* By one thread of each block, which has read the counters: true in that of the last block, which alone may count. Writes of the blocks are
 * visible to the next kernel, not within this one. */
__device__ __forceinline__ bool arrives_last(const peer_view &c) {
  const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
  uint32_t before = 0;
  if (blocks > 1) asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(&c.counters->ticket) : "memory");
  if (before != blocks - 1) return false;
  c.counters->ticket = 0;
  return true;
}
/* The same, called by all threads. */
__device__ __forceinline__ bool last_to_come(const peer_view &c) {
  __syncthreads();
  return threadIdx.x == 0 && arrives_last(c);
}
__device__ __forceinline__ void peer_end(const peer_view &c, uint32_t epoch) {
  if (last_to_come(c)) c.counters->epoch = epoch + 1;
}
/* words: of a rank's branch. */
__device__ __forceinline__ void branch_end(const peer_view &c, peer_turn t, uint32_t words) {
  if (last_to_come(c)) c.counters->turn = t.turn + 1 < kPeerTurns ? t.turn + 1 : 0, c.counters->filled = words;
}

/* The kernels of ranks_prefill.cu that wait, to be loaded with those of peers.cu. */
const void *mm_cu_large_sum_kernel(int i);
/* The six of ranks_groups.cu, likewise. */
const void *mm_cu_group_kernel(int i);
/* That of moe/gather_codes.cu. */
const void *mm_cu_codes_kernel();

/* This rank's, for kernels of other files. */
const peer_view &mm_cu_peers_view(const mm_cu_peers *p);

#endif
