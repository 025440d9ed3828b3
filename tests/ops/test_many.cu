/* The sum over two ranks of many rows with its residual and norm, in one kernel (runtime/cuda/ranks_prefill.cu), against the sum and then
 * the combine, bit for bit: rows of every number; replayed; and how long it takes against the rate of the link between devices. */
#include <string.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/launch.h"
#include "tests/ops/members.h"
#include "tests/ops/whole.h"

namespace {

constexpr size_t kHost = (size_t)256 << 20; /* of a member, in tests of random sizes */

/* One combine of rows that all members make alike. */
bool same_many(member *m, uint32_t t, const combine_rows_of &c) {
  c.fill(*m, t);
  m->together();
  c.by_many(*m), c.by_two(*m);
  return c.same(*m);
}

void check_sizes(uint32_t ranks) {
  const uint64_t seed = g_rng.next();
  const bool ok = on_ranks(
      ranks, 20,
      [&](member *m) {
        rng g = {seed}; /* the same on all */
        m->ok = same_many(m, 50, combine_rows_of(*m, 9001, 128, true)) && same_many(m, 51, combine_rows_of(*m, 1, 6144, true));
        for (uint32_t t = 0; t < 24; t++) {
          static const uint32_t widths[] = {3072, 6144, 256, 128, 5120};
          const uint32_t width = t % 6 < 5 ? widths[t % 6] : 8 * (1 + g.below(768));
          const uint32_t rows = t % 4 == 0 ? ranks + g.below(30) : t % 4 == 3 ? 1000 + g.below(1400) : 100 + g.below(500);
          const bool codes = width % 128 == 0 && g.below(2);
          m->ok = same_many(m, t, combine_rows_of(*m, rows, width, codes)) && m->ok;
        }
      },
      kHost);
  report_true("peers: many rows, residual and norm with the sum over " + std::to_string(ranks) + " ranks = the sum and then those", ok);
}

/* As steps have it; of more than a slab in several launches. */
void check_steps(uint32_t ranks) {
  for (const auto &[rows, width] : {std::pair<uint32_t, uint32_t>{8192, 3072}, {2047, 3072}, {5999, 6144}}) {
    const bool ok = on_ranks(
        ranks, 20,
        [&, r = rows, k = width](member *m) {
          const combine_rows_of c(*m, r, k, true);
          m->ok = mm_cu_combines_ranks(m->peers, r, k) && same_many(m, 7, c);
          c.fill(*m, 8);
          m->together();
          c.by_one(*m);
          CUDA_OK(cudaMemcpyAsync(c.branch, c.spare, c.n * 2, cudaMemcpyDeviceToDevice, m->s));
          CUDA_OK(cudaStreamSynchronize(m->s));
          m->together();
          c.by_two(*m);
          m->ok = c.same(*m) && m->ok;
        },
        combine_rows_of::most(rows, width) + (1 << 20));
    char text[160];
    snprintf(text, sizeof text, "peers: [%u, %u], residual and norm with the sum over %u ranks as steps have it, and codes", rows, width,
             ranks);
    report_true(text, ok);
  }
}

/* Rows that go to the other rank as they are made: by a sum of choices; by a product of codes. */
void check_sent(uint32_t ranks) {
  const uint64_t seed = g_rng.next();
  std::atomic<uint32_t> sent(0), products(0);
  std::mutex one;
  const bool ok = on_ranks(
      ranks, 20,
      [&](member *m) {
        rng g = {seed}; /* the same on all */
        for (uint32_t t = 0; t < 24; t++) {
          static const uint32_t widths[] = {3072, 6144, 256, 1024, 5120};
          const uint32_t width = t % 6 < 5 ? widths[t % 6] : 8 * (1 + g.below(768)),
                         rows = 131072 * 4 / width + 1 + g.below(t % 4 ? 40 : 900);
          const combine_rows_of c(*m, rows, width, width % 128 == 0 && g.below(2));
          c.fill(*m, t);
          m->together();
          sent += c.by_sent(*m);
          c.by_two(*m);
          m->ok = c.same(*m) && m->ok;
          if (t % 5 == 2) c.by_many(*m); /* another epoch between */
        }
        static const uint32_t shapes[][3] = {{200, 3072, 256}, {1030, 6144, 384}, {3000, 1032, 128}};
        for (const auto &shape : shapes) {
          const uint32_t rows = shape[0], n = shape[1], k = shape[2];
          test_weight w;
          std::vector<__nv_bfloat16> x;
          {
            const std::lock_guard<std::mutex> alone(one);
            random_weight(&w, MM_CU_E4M3, MM_CU_COARSE, 1, n, k, 128, 128);
            x = random_bf16((size_t)rows * k);
          }
          w.d.rounding.kind = MM_ACT_FP8_GROUP;
          if (!takes_here(MM_CU_GEMM_FP8, w.d)) break;
          const combine_rows_of c(*m, rows, n, false);
          c.fill(*m, rows);
          buffer<__nv_bfloat16> dx;
          dx.put(x);
          code_buffers codes(rows, k);
          CUDA_OK(cudaDeviceSynchronize());
          m->together();
          const mm_cu_push push = mm_cu_push_rows(m->peers, rows, n);
          products += push.epoch != nullptr;
          CUDA_OK(mm_cu_encode(codes.d, {dx.p, k, nullptr}, {MM_ACT_FP8_GROUP, 0}, m->s));
          CUDA_OK(mm_cu_gemm_fp8(w.d, {codes.d, c.branch, nullptr, push}, m->s));
          CUDA_OK(mm_cu_combine_ranks(m->peers, c.args(0), rows, n, true, m->s));
          c.by_two(*m);
          m->ok = c.same(*m) && m->ok;
        }
      },
      kHost);
  char text[160];
  snprintf(text, sizeof text, "peers: rows that go to the other of %u ranks as they are made, %u times, by products %u times", ranks,
           sent.load(), products.load());
  report_true(text, ok && sent == 24 * ranks && (products == 3 * ranks || !hopper()));
}

/* A recorded step of such combines, of kernels of few rows and of sums, replayed. */
void check_replays(uint32_t ranks) {
  const bool ok = on_ranks(
      ranks, 20,
      [&](member *m) {
        const combine_rows_of c(*m, 333, 3072, true);
        c.fill(*m, 9);
        float *const squares = reinterpret_cast<float *>(m->x + 2 * c.bytes);
        CUDA_OK(cudaMemsetAsync(squares, 0, 4096 * 4, m->s));
        CUDA_OK(cudaStreamSynchronize(m->s));
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA_OK(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
        for (uint32_t i = 0; i < 5; i++) {
          CUDA_OK(cudaMemcpyAsync(c.spare, c.branch, c.n * 2, cudaMemcpyDeviceToDevice, m->s));
          if (i % 2) /* the last, whose result stays, is sent as it is made */
            c.by_many(*m);
          else
            m->ok = c.by_sent(*m) && m->ok;
          if (i % 2) CUDA_OK(mm_cu_peers_sum_f32(m->peers, squares, 4096, m->s));
        }
        CUDA_OK(cudaStreamEndCapture(m->s, &graph));
        CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
        m->together();
        for (int i = 0; i < 60; i++) CUDA_OK(cudaGraphLaunch(exec, m->s));
        CUDA_OK(cudaStreamSynchronize(m->s));
        m->together();
        c.by_two(*m);
        m->ok = c.same(*m) && m->ok;
        CUDA_OK(cudaGraphExecDestroy(exec));
        CUDA_OK(cudaGraphDestroy(graph));
      },
      kHost);
  report_true("peers: a recorded step of such combines, replayed sixty times by " + std::to_string(ranks) + " ranks", ok);
}

/* ---- how long ---- */

/* GB/s that each member's copy to the next one's memory has, all at once; and alone. */
double copy_rate(member *m, size_t bytes, bool all_at_once) {
  const void *all[MM_CU_PEERS];
  mm_err err = {};
  must(mm_comm_gather(m->comm, m->rank, m->x, all), err);
  char *const to = static_cast<char *>(const_cast<void *>(all[(m->rank + 1) % m->ranks])) + bytes;
  const bool copies = all_at_once || m->rank == 0;
  std::vector<double> times;
  for (int i = 0; i < 7; i++) {
    m->together();
    const auto from = clock_type::now();
    for (int k = 0; copies && k < 10; k++) CUDA_OK(cudaMemcpyAsync(to, m->x, bytes, cudaMemcpyDefault, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
    m->together();
    times.push_back(since(from) / 10);
  }
  std::sort(times.begin(), times.end());
  return (double)bytes / times[3] * 1e-9;
}

void bench_rows(member *m, uint32_t rows, uint32_t width, double rate) {
  const combine_rows_of c(*m, rows, width, width % 128 == 0);
  const int count = rows > 1000 ? 20 : 100;
  const double two = time_in_graph(m, count, [&] { c.by_two(*m); });
  const double alone = time_in_graph(m, count, [&] { CUDA_OK(mm_cu_combine_rows(c.args(1), rows, width, m->s)); });
  const double step = time_in_graph(m, count, [&] { c.by_many(*m); });
  const double sums = time_in_graph(m, count, [&] { c.sum_only(*m); });
  double sent = 0;
  if (mm_cu_push_rows(m->peers, rows, width).epoch) sent = time_in_graph(m, count, [&] { (void)c.by_sent(*m); });
  const double crosses = (double)c.n * sizeof(__nv_bfloat16); /* each way */
  if (m->rank == 0)
    printf(
        "peers: [%u, %u] sum, residual and norm over %u ranks: %.1f us; behind rows that were sent as they were made %.1f us, of it making "
        "them %.1f us and more; sum and then combine %.1f us, of it the combine %.1f us; %.1f MB a link at its copy rate %.1f us\n",
        rows, width, m->ranks, step, sent, sums, two, alone, crosses * 1e-6, crosses / rate * 1e-3);
}

}  // namespace

void test_many() {
  check_sizes(2);
  check_sent(2);
  check_replays(2);
  check_steps(2);
}

void bench_many() {
  on_ranks(
      2, 20,
      [](member *m) {
        if (!mm_cu_peers_distinct(m->peers)) return; /* one multiprocessor would have it all */
        CUDA_OK(cudaMemsetAsync(m->x, 0, combine_rows_of::most(8192, 6144), m->s));
        CUDA_OK(cudaMemsetAsync(m->source, 0, combine_rows_of::most(8192, 6144) / 2, m->s));
        CUDA_OK(cudaStreamSynchronize(m->s));
        const double alone = copy_rate(m, (size_t)64 << 20, false), both = copy_rate(m, (size_t)64 << 20, true);
        if (m->rank == 0) printf("peers: copies to the next rank: %.1f GB/s alone, %.1f GB/s each of all at once\n", alone, both);
        for (const uint32_t width : {3072u, 6144u}) {
          for (const uint32_t rows : {8192u, 2048u, 512u, 256u, 128u, 64u}) bench_rows(m, rows, width, both);
        }
      },
      combine_rows_of::most(8192, 6144) + (1 << 20));
}
