/* Ranks of a test on devices: a thread each, with a stream and memory of its own, and the sums over ranks that they share (peers.h). */
#ifndef MM_TESTS_OPS_MEMBERS_H
#define MM_TESTS_OPS_MEMBERS_H

#include <chrono>

#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.h"
#include "tests/ops/gpu.h"

using clock_type = std::chrono::steady_clock;
inline double since(clock_type::time_point t) { return std::chrono::duration<double>(clock_type::now() - t).count(); }

extern bool g_across; /* each rank is a process, which is a thread of this one */

/* One rank of a test: its thread has its device, a stream and room for `most` bytes before any kernel waits for another. */
struct member {
  mm_comm *comm;
  uint32_t rank, ranks;
  mm_cu_peers *peers = nullptr;
  cudaStream_t s = nullptr;
  char *x = nullptr, *source = nullptr; /* device memory */
  char *host = nullptr;                 /* pinned: a copy of pageable memory may keep another rank of this process waiting */
  bool ok = true;
  const char *volatile at = "start"; /* what the rank does now: for $MM_WATCH */

  /* No rank goes on before all are here. */
  void together() const {
    char own = 0, all[MM_CU_PEERS];
    mm_comm_all_gather(comm, rank, &own, all, 1);
  }
};

constexpr size_t kMost = (size_t)72 << 20;

/* f on a thread for each rank; whether all are content. */
bool on_ranks(uint32_t ranks, double limit_s, const std::function<void(member *)> &f, size_t most = kMost);

/* Number i of rank r in trial t: signs and sizes that make the order of adding seen. */
float number(uint32_t t, uint32_t r, size_t i);

/* Rows of a combine whose branch is a sum, in a member's memory, twice: by one kernel and by two. */
struct combine_rows_of {
  uint32_t rows, width;
  bool codes;
  size_t n, bytes; /* numbers; of one of the results, with its codes */
  __nv_bfloat16 *branch, *residual, *spare;
  uint32_t *choice; /* [rows] zeros */
  float *w;
  char *to[2];

  combine_rows_of(const member &m, uint32_t r, uint32_t k, bool c);
  /* Bytes of a member's memory that it takes. */
  static size_t most(size_t rows, size_t width) { return 8 * ((rows * width * 2 + 1023) / 1024 * 1024); }
  mm_cu_combine args(int way) const;
  /* The branch is the rank's own, the rest the same on all. */
  void fill(const member &m, uint32_t t) const;
  void by_one(const member &m) const { CUDA_OK(mm_cu_combine_ranks(m.peers, args(0), rows, width, false, m.s)); }
  /* By the kernel of many rows, which has a branch of its own to clobber. */
  void by_many(const member &m) const;
  /* The branch, of which spare is a copy, goes to the other rank as choices are summed; whether it may. */
  bool by_sent(const member &m) const;
  /* The sum of choices alone, into spare. */
  void sum_only(const member &m) const;
  void by_two(const member &m) const;
  /* True if both ways' results are the same, and those of all ranks. */
  bool same(const member &m) const;
};

/* Median microseconds of one of `count` in a graph. */
double time_in_graph(const member *m, int count, const std::function<void()> &one);

/* Steps of many rows (test_many.cu): parts of test_peers and bench_peers. */
void test_many();
void bench_many();

#endif
