/* Sums over ranks on devices (peers.h), by each other's memory or (subject across) by NCCL as ranks of several processes, against the
 * host's, number by number, for sizes of every kind; replayed steps; ranks that do not come, or fail. Two ranks on two devices where there
 * are two, else on one, and four on those. And how long sums take. */
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/nccl.h"
#include "runtime/cuda/comm/peers.h"
#include "runtime/cuda/core/launch.h"
#include "tests/ops/gpu.h"
#include "tests/ops/members.h"
#include "tests/ops/whole.h"

namespace {

enum kind { SUM_BF16, SUM_F32, MAX_F32 };

/* One reduction of n numbers; whether every bit is the host's. */
bool trial(member *m, uint32_t t, kind k, size_t n) {
  const bool narrow = k == SUM_BF16;
  const auto given = [&](uint32_t r, size_t i) { return narrow ? to_float(__float2bfloat16(number(t, r, i))) : number(t, r, i); };
  __nv_bfloat16 *half = reinterpret_cast<__nv_bfloat16 *>(m->host);
  float *wide = reinterpret_cast<float *>(m->host);
  for (size_t i = 0; i < n; i++) narrow ? (void)(half[i] = __float2bfloat16(given(m->rank, i))) : (void)(wide[i] = given(m->rank, i));
  const size_t bytes = n * (narrow ? 2 : 4);
  CUDA_OK(cudaMemcpyAsync(m->x, m->host, bytes, cudaMemcpyHostToDevice, m->s));
  const cudaError_t e = k == SUM_BF16  ? mm_cu_peers_sum(m->peers, reinterpret_cast<__nv_bfloat16 *>(m->x), n, m->s)
                        : k == SUM_F32 ? mm_cu_peers_sum_f32(m->peers, reinterpret_cast<float *>(m->x), n, m->s)
                                       : mm_cu_peers_max_f32(m->peers, reinterpret_cast<float *>(m->x), n, m->s);
  CUDA_OK(e);
  CUDA_OK(cudaMemcpyAsync(m->host, m->x, bytes, cudaMemcpyDeviceToHost, m->s));
  CUDA_OK(cudaStreamSynchronize(m->s));
  mm_err err = {};
  must(mm_cu_peers_check(m->peers, &err), err);
  bool same = true;
  for (size_t i = 0; i < n; i++) {
    float want = given(0, i);
    for (uint32_t r = 1; r < m->ranks; r++) {
      const float v = given(r, i);
      want = k == MAX_F32 ? (want > v ? want : v) : want + v;
    }
    same = same && (narrow ? to_float(half[i]) == to_float(__float2bfloat16(want)) : wide[i] == want);
  }
  return same;
}

void check_sums(uint32_t ranks) {
  const uint64_t seed = g_rng.next();
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    rng g = {seed}; /* the same on all */
    for (uint32_t t = 0; t < 150; t++) {
      const kind k = (kind)g.below(3);
      const size_t n = 8 * (1 + (g.below(3) ? g.below(900) : g.below(20000)));
      m->ok = trial(m, t, k, n) && m->ok;
    }
    for (const size_t n : {(size_t)65536, (size_t)65544, (size_t)4 << 20, ((size_t)34 << 20) + 8})
      m->ok = trial(m, 1000, SUM_BF16, n) && m->ok;
  });
  report_true("peers: sums and maxima over " + std::to_string(ranks) + " ranks = the host's in rank order, bit for bit", ok);
}

/* A recorded step of sums of both kinds, replayed: the same every time. */
void check_replays(uint32_t ranks) {
  constexpr size_t kFew = 3072, kMany = 200000;
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    float *const from = reinterpret_cast<float *>(m->source), *const few = reinterpret_cast<float *>(m->x), *const many = few + kFew;
    std::vector<float> want(kFew + kMany);
    float *const v = reinterpret_cast<float *>(m->host);
    for (size_t i = 0; i < want.size(); i++) {
      v[i] = number(7, m->rank, i), want[i] = number(7, 0, i);
      for (uint32_t r = 1; r < m->ranks; r++) want[i] += number(7, r, i);
    }
    CUDA_OK(cudaMemcpyAsync(from, v, want.size() * 4, cudaMemcpyHostToDevice, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_OK(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 5; i++) {
      CUDA_OK(cudaMemcpyAsync(few, from, want.size() * 4, cudaMemcpyDeviceToDevice, m->s));
      CUDA_OK(mm_cu_peers_sum_f32(m->peers, few, kFew, m->s));
      CUDA_OK(mm_cu_peers_sum_f32(m->peers, many, kMany, m->s));
    }
    CUDA_OK(cudaStreamEndCapture(m->s, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    m->together();
    for (int i = 0; i < 100; i++) {
      CUDA_OK(cudaGraphLaunch(exec, m->s));
      if (i % 10) continue;
      CUDA_OK(cudaMemcpyAsync(v, few, want.size() * 4, cudaMemcpyDeviceToHost, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      m->ok = m->ok && !memcmp(v, want.data(), want.size() * 4);
    }
    CUDA_OK(cudaStreamSynchronize(m->s));
    m->together();
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
  });
  report_true("peers: a recorded step of sums, replayed a hundred times by " + std::to_string(ranks) + " ranks", ok);
}

/* ---- a residual and norm with their sum ---- */

void check_combines(uint32_t ranks) {
  const uint64_t seed = g_rng.next();
  std::atomic<uint32_t> most(0);
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    rng g = {seed};
    for (uint32_t t = 0; t < 60; t++) {
      static const uint32_t widths[] = {3072, 6144, 256, 128, 5120};
      const uint32_t width = t % 6 < 5 ? widths[t % 6] : 8 * (1 + g.below(768)), rows = 1 + g.below(t % 2 ? 16 : 256);
      const bool codes = width % 128 == 0 && g.below(2);
      if (!mm_cu_combines_ranks(m->peers, rows, width)) continue;
      most = std::max<uint32_t>(most, rows);
      const combine_rows_of c(*m, rows, width, codes);
      c.fill(*m, t);
      if (t % 4 == m->rank && c.n >= 24)
        CUDA_OK(cudaMemsetAsync(c.branch + c.n - 24, 0xff, 32, m->s)); /* NaNs whose bits say that nothing came */
      m->together();
      c.by_one(*m), c.by_two(*m);
      m->ok = c.same(*m) && m->ok;
    }
    /* Turns back to back, each with another branch than those three and six turns before: nothing of an older one may be taken for its. */
    constexpr uint32_t kBranches = 4, kTurns = 8;
    const combine_rows_of c(*m, 1, 3072, false);
    const size_t given = c.bytes / 2 + c.width * sizeof(float), made = c.bytes / 2;
    char *const kept = m->source + ((size_t)8 << 20), *const results = m->x + ((size_t)8 << 20),
                *const wanted = results + ((size_t)8 << 20);
    for (uint32_t v = 0; v < kBranches; v++) {
      c.fill(*m, 99 + v);
      CUDA_OK(cudaMemcpyAsync(kept + v * given, m->source, given, cudaMemcpyDeviceToDevice, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      m->together();
      c.by_two(*m);
      CUDA_OK(cudaMemcpyAsync(wanted + v * made, c.to[1], made, cudaMemcpyDeviceToDevice, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      m->together();
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_OK(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < kTurns; i++) {
      CUDA_OK(cudaMemcpyAsync(m->source, kept + i % kBranches * given, given, cudaMemcpyDeviceToDevice, m->s));
      c.by_one(*m);
      CUDA_OK(cudaMemcpyAsync(results + i * made, c.to[0], made, cudaMemcpyDeviceToDevice, m->s));
    }
    CUDA_OK(cudaStreamEndCapture(m->s, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (uint32_t round = 0; round < 20; round++) {
      m->together();
      for (int i = 0; i < 50; i++) CUDA_OK(cudaGraphLaunch(exec, m->s));
      CUDA_OK(cudaMemcpyAsync(m->host, results, kTurns * made, cudaMemcpyDeviceToHost, m->s));
      CUDA_OK(cudaMemcpyAsync(m->host + kTurns * made, wanted, kBranches * made, cudaMemcpyDeviceToHost, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      for (uint32_t i = 0; i < kTurns; i++) m->ok = m->ok && !memcmp(m->host + i * made, m->host + (kTurns + i % kBranches) * made, made);
    }
    m->together();
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
  });
  char text[160];
  snprintf(text, sizeof text, "peers: residual and norm with the sum over %u ranks = the sum and then those, bit for bit, up to %u rows",
           ranks, most.load());
  report_true(text, ok && most * ranks >= 12);
}

/* A single token's router along with its residual, norm and sum, against the sum and then those: of two ranks, whose blocks all have room
 * where they share a device. */
void check_routes() {
  const bool ok = on_ranks(2, 20, [&](member *m) {
    for (uint32_t t = 0; t < 12; t++) {
      const uint32_t experts = t % 2 ? 256 : 32, width = t % 3 == 0 ? 3072 : t % 3 == 1 ? 6144 : 520;
      const combine_rows_of c(*m, 1, width, false);
      c.fill(*m, t);
      __nv_bfloat16 *const w = reinterpret_cast<__nv_bfloat16 *>(m->x + ((size_t)4 << 20));
      char *const end = m->x + ((size_t)12 << 20);
      const auto logits = [&](int way) { return reinterpret_cast<float *>(end) + way * MM_CU_MAX_EXPERTS; };
      __nv_bfloat16 *const host = reinterpret_cast<__nv_bfloat16 *>(m->host);
      for (size_t i = 0; i < (size_t)experts * width; i++) host[i] = __float2bfloat16(number(t, 42, i) * 1e-3f);
      CUDA_OK(cudaMemcpyAsync(w, host, (size_t)experts * width * 2, cudaMemcpyHostToDevice, m->s));
      CUDA_OK(cudaMemsetAsync(end, 0xee, 3 * MM_CU_MAX_EXPERTS * 4, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      mm_cu_router router = {};
      router.w = w, router.k = width;
      mm_cu_route r = {};
      r.experts = experts, r.top_k = 8, r.published = reinterpret_cast<unsigned long long *>(end + 2 * MM_CU_MAX_EXPERTS * 4);
      m->together();
      r.logits = logits(0);
      CUDA_OK(mm_cu_combine_route_ranks(m->peers, c.args(0), router, r, m->s));
      CUDA_OK(mm_cu_peers_sum(m->peers, c.branch, c.n, m->s));
      r.logits = logits(1);
      CUDA_OK(mm_cu_combine_route(c.args(1), router, r, 1, m->s));
      std::vector<float> got(2 * MM_CU_MAX_EXPERTS + 2 * MM_CU_MAX_TOP_K);
      CUDA_OK(cudaMemcpyAsync(m->host, end, got.size() * 4, cudaMemcpyDeviceToHost, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      memcpy(got.data(), m->host, got.size() * 4);
      m->ok = m->ok && !memcmp(&got[0], &got[MM_CU_MAX_EXPERTS], experts * 4) && got[0] != got[1];
      for (uint32_t i = 0; i < 2 * MM_CU_MAX_TOP_K; i++) m->ok = m->ok && got[2 * MM_CU_MAX_EXPERTS + i] == 0;
      m->ok = c.same(*m) && m->ok;
    }
  });
  report_true("peers: a single token's router with its residual, norm and sum over 2 ranks = the sum and then those, bit for bit", ok);
}

/* The last rank does not come to a sum, or to a combine of few rows or of many, or fails while the first one waits: that one ends, in time,
 * and says for awaited. Then all go on. */
void check_failures(uint32_t ranks) {
  for (int way = 0; way < (ranks == 2 ? 4 : 2); way++) {
    const bool fails = way % 2, many = way >= 2;
    const bool ok = on_ranks(ranks, fails ? 60 : 1, [&](member *m) {
      const combine_rows_of rows(*m, 700, 3072, true);
      rows.fill(*m, 3);
      const bool last = m->rank == m->ranks - 1;
      mm_err err = {};
      m->ok = trial(m, 1, SUM_F32, 4096);
      m->together();
      const auto from = clock_type::now();
      bool reported = false;
      if (!last) {
        if (many)
          rows.by_many(*m);
        else if (m->rank % 2 || fails)
          CUDA_OK(mm_cu_peers_sum_f32(m->peers, reinterpret_cast<float *>(m->x), m->rank % 2 ? 4096 : 400000, m->s));
        else
          combine_rows_of(*m, 1, 3072, false).by_one(*m);
        CUDA_OK(cudaStreamSynchronize(m->s));
        reported = !mm_cu_peers_check(m->peers, &err);
      } else if (fails) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        mm_comm_abort(m->comm);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      }
      const bool named = strcmp(err.code, "E_RANK") == 0 && err.status == MM_IO;
      m->ok = m->ok && since(from) < 4 && (fails ? !reported : !reported || named);
      if (!last && m->ranks == 2 && !fails) m->ok = m->ok && reported && strstr(err.text, "for rank 1: timeout");
      if (fails) { /* as the engine does between steps, with no rank at work */
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        if (last) mm_comm_reset(m->comm);
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
      }
      err = {};
      m->ok = mm_cu_peers_reset(m->peers, &err) && m->ok;
      for (uint32_t t = 2; t < 6; t++) m->ok = trial(m, t, SUM_F32, t % 2 ? 4096 : 400000) && m->ok;
      for (uint32_t t = 6; t < 10; t++) { /* one rank had a turn more of such rows than the other */
        const combine_rows_of few(*m, t % 4 + 1, 6144, true);
        few.fill(*m, t);
        m->together();
        few.by_one(*m), few.by_two(*m);
        m->ok = few.same(*m) && m->ok;
      }
      rows.fill(*m, 4);
      m->together();
      if (ranks == 2) {
        rows.by_many(*m), rows.by_two(*m);
        m->ok = rows.same(*m) && m->ok;
      }
    });
    report_true("peers: " + std::to_string(ranks) + " ranks, of which one " + (fails ? "fails" : "does not come") +
                    (many ? " to a combine of many rows" : "") + ": the others end, and all go on after it",
                ok);
  }
}

/* Rank 1 comes late to a sum, which the other launches or replays: that one ends in time, and says so; all go on once NCCL is joined anew.
 */
void check_late() {
  const bool ok = on_ranks(2, 1, [&](member *m) {
    for (int replays = 0; replays < 2; replays++) {
      float *const x = reinterpret_cast<float *>(m->x);
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      CUDA_OK(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
      CUDA_OK(mm_cu_peers_sum_f32(m->peers, x, 4096, m->s));
      CUDA_OK(cudaStreamEndCapture(m->s, &graph));
      CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
      CUDA_OK(cudaGraphDestroy(graph));
      m->ok = trial(m, 1, SUM_F32, 4096) && m->ok;
      m->together();
      const auto from = clock_type::now();
      mm_err err = {};
      if (m->rank == 0) {
        CUDA_OK(replays ? cudaGraphLaunch(exec, m->s) : mm_cu_peers_sum_f32(m->peers, x, 400000, m->s));
        CUDA_OK(cudaStreamSynchronize(m->s));
        m->ok = m->ok && !mm_cu_peers_check(m->peers, &err) && !strcmp(err.code, "E_RANK") && since(from) < 2;
        printf("     after %.2f s: %s\n", since(from), err.text);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      }
      CUDA_OK(cudaGraphExecDestroy(exec));
      err = {};
      m->ok = mm_cu_peers_reset(m->peers, &err) && m->ok;
      if (err.status != MM_OK) printf("     mending: %s\n", err.text);
      for (uint32_t t = 2; t < 6; t++) m->ok = trial(m, t, SUM_F32, t % 2 ? 4096 : 400000) && m->ok;
    }
  });
  report_true("across: a rank that comes late to a sum, launched or replayed, is told in time, and all go on", ok);
}

__global__ void pass_time(uint64_t ns) {
  uint64_t from, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - from < ns);
}

/* A kernel that begins later than the others wait is found, and which rank's it was; then those of all run at the same time. */
void check_streams() {
  int devices = 1;
  CUDA_OK(cudaGetDeviceCount(&devices));
  const uint32_t ranks = (uint32_t)devices * 2; /* each device is shared */
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    mm_err err = {};
    bool late, all;
    for (uint32_t t = 0; t < 12; t++) {
      const uint32_t behind = t % (ranks + 1); /* the rank whose stream is busy; of `ranks` none */
      must(mm_cu_peers_settle(m->peers, m->s, &err), err);
      if (m->rank == behind) pass_time<<<1, 1, 0, m->s>>>(300000000);
      must(mm_cu_peers_try_streams(m->peers, m->s, &late, &all, &err), err);
      m->ok = m->ok && late == (m->rank == behind) && all == (behind == ranks);
    }
  });
  report_true("peers: a stream whose kernels do not begin while other ranks' wait is found", ok);
}

/* Each rank's columns of rows, next to the others'. */
void check_shares() {
  const uint64_t seed = g_rng.next();
  const bool ok = on_ranks(2, 20, [&](member *m) {
    rng g = {seed};
    for (uint32_t t = 0; t < 12; t++) {
      const uint32_t rows = 1 + g.below(t == 11 ? 400 : 20), n = t == 11 ? 40000 / 2 : 1 + g.below(3000);
      float *const own = reinterpret_cast<float *>(m->source), *const v = reinterpret_cast<float *>(m->host);
      float *all[MM_CU_PEERS] = {};
      for (size_t i = 0; i < (size_t)rows * n; i++) v[i] = number(t, m->rank, i);
      all[m->rank] = reinterpret_cast<float *>(m->x);
      CUDA_OK(cudaMemcpyAsync(own, v, (size_t)rows * n * 4, cudaMemcpyHostToDevice, m->s));
      CUDA_OK(mm_cu_peers_all_gather(m->peers, all, own, rows, n, m->s));
      CUDA_OK(cudaMemcpyAsync(v, m->x, (size_t)rows * n * 8, cudaMemcpyDeviceToHost, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      for (size_t i = 0; i < (size_t)rows * n * 2; i++)
        m->ok = m->ok && v[i] == number(t, (uint32_t)(i % (2 * n) / n), i / (2 * n) * n + i % n);
    }
  });
  report_true("across: each rank's columns come to both", ok);
}

template <int N>
__global__ void takes_shared(float *) {
  extern __shared__ float some[];
  if (threadIdx.x == 0) some[N] = N;
}

/* Ranks that share a device launch the same kernels with unlike sizes of shared memory, each of which raises the kernel's limit. */
void check_limits() {
  void (*const kernels[])(float *) = {takes_shared<0>, takes_shared<1>, takes_shared<2>, takes_shared<3>,
                                      takes_shared<4>, takes_shared<5>, takes_shared<6>, takes_shared<7>};
  constexpr uint32_t kThreads = 8;
  const size_t most = mm_cu_shared_most(), least = 48 * 1024;
  std::atomic<uint32_t> refused{0};
  std::atomic<int> first{cudaSuccess};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; t++)
    threads.emplace_back([&, t] {
      cudaStream_t stream = nullptr;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      for (size_t size = least + 512; size + 512 <= most; size += 512)
        for (auto kernel : kernels) {
          const cudaError_t e = launch(kernel, dim3(1), 32, size + 16 * t, stream, static_cast<float *>(nullptr));
          if (e != cudaSuccess) refused++, first = e, cudaGetLastError();
        }
      CUDA_OK(cudaStreamSynchronize(stream));
      CUDA_OK(cudaStreamDestroy(stream));
    });
  for (std::thread &t : threads) t.join();
  report_true("peers: ranks on one device raise a kernel's shared memory; launches refused " + std::to_string(refused) + ", " +
                  cudaGetErrorString((cudaError_t)first.load()),
              refused == 0);
}

/* Two devices and the library, or a line that says what is missing. */
bool can_cross() {
  int devices = 1;
  mm_nccl n;
  mm_err err = {};
  CUDA_OK(cudaGetDeviceCount(&devices));
  if (devices > 1 && mm_nccl_open(&n, &err)) return printf("across: NCCL %d\n", n.version) > 0;
  printf("across: nothing without two devices and NCCL: %s\n", err.text);
  return false;
}

}  // namespace

void test_across() {
  if (!can_cross()) return;
  g_across = true;
  check_sums(2);
  check_replays(2);
  check_shares();
  check_late();
  g_across = false;
}

void test_peers() {
  for (uint32_t ranks : {2u, 4u}) {
    check_sums(ranks);
    check_replays(ranks);
    check_combines(ranks);
    check_failures(ranks);
  }
  check_streams();
  check_limits();
  check_routes();
  test_many();
  check_sums(3);
}

/* A sum of rows of bf16. */
static void bench_sum(member *m, uint32_t rows, uint32_t width, int count) {
  const size_t n = (size_t)rows * width;
  const double us = time_in_graph(m, count, [&] { CUDA_OK(mm_cu_peers_sum(m->peers, reinterpret_cast<__nv_bfloat16 *>(m->x), n, m->s)); });
  if (m->rank == 0)
    printf("peers: sum of bf16 [%u, %u] over %u ranks: %.2f us, %.1f GB/s of a rank's numbers\n", rows, width, m->ranks, us,
           (double)n * 2 / us * 1e-3);
}

/* A residual and norm with their sum. */
static void bench_combine(member *m, uint32_t rows, uint32_t width) {
  const combine_rows_of c(*m, rows, width, false);
  const bool able = mm_cu_combines_ranks(m->peers, rows, width);
  const double two = time_in_graph(m, 200, [&] { c.by_two(*m); }), one = able ? time_in_graph(m, 200, [&] { c.by_one(*m); }) : 0;
  const double alone = time_in_graph(m, 200, [&] { CUDA_OK(mm_cu_combine_rows(c.args(1), rows, width, m->s)); });
  if (m->rank == 0)
    printf(
        "peers: combine with its sum, [%u, %u] over %u ranks: %.2f us; the sum and then the combine %.2f us, of it the combine %.2f us\n",
        rows, width, m->ranks, one, two, alone);
}

static void bench_ranks(uint32_t ranks) {
  int devices = 1;
  CUDA_OK(cudaGetDeviceCount(&devices));
  printf("peers: %u ranks on %d device(s)\n", ranks, std::min(devices, (int)ranks));
  on_ranks(ranks, 20, [](member *m) {
    CUDA_OK(cudaMemsetAsync(m->x, 0, kMost, m->s));
    CUDA_OK(cudaMemsetAsync(m->source, 0, kMost, m->s));
    for (uint32_t width : {3072u, 6144u}) {
      for (uint32_t rows : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u, 256u}) bench_combine(m, rows, width);
      for (uint32_t rows : {1u, 2u, 4u, 8u, 16u, 64u}) bench_sum(m, rows, width, 200);
      bench_sum(m, 2048, width, 10);
    }
  });
}

void bench_across() {
  if (!can_cross()) return;
  g_across = true;
  bench_ranks(2);
  g_across = false;
}

void bench_peers() {
  bench_ranks(2);
  bench_many();
  bench_ranks(4);
}
