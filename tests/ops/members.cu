/* Ranks of a test on devices (members.h). */
#include "tests/ops/members.h"

#include <string.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "runtime/cuda/comm/peers.cuh"
#include "tests/ops/whole.h"

bool g_across;

namespace {

/* Processes that are threads: what crosses goes through queues. */
struct post {
  std::mutex lock;
  std::condition_variable came;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::deque<std::vector<char>>> queue; /* from, to, tag */
} g_post;

void exchange(mm_process_group *w, uint32_t tag, const mm_transfer *out, uint32_t outs, const mm_transfer *in, uint32_t ins, double) {
  std::unique_lock<std::mutex> l(g_post.lock);
  for (uint32_t i = 0; i < outs; i++) {
    const char *data = static_cast<const char *>(out[i].data);
    g_post.queue[{w->process, out[i].process, tag}].emplace_back(data, data + out[i].n);
  }
  g_post.came.notify_all();
  for (uint32_t i = 0; i < ins; i++) {
    auto &from = g_post.queue[{in[i].process, w->process, tag}];
    if (!g_post.came.wait_for(l, std::chrono::seconds(60), [&] { return !from.empty(); })) abort();
    memcpy(in[i].data, from.front().data(), in[i].n);
    from.pop_front();
  }
}

/* With $MM_WATCH=SECONDS: where each rank is, each time that the row has taken so long again: on the host, on its stream, and by the
 * counters of its sums. The first line needs nothing of the driver, which a waiting call may hold. */
struct watch {
  const std::vector<member> &m;
  double every;
  std::mutex lock;
  std::condition_variable ended;
  bool over = false;
  std::thread thread;

  explicit watch(const std::vector<member> &members) : m(members), every(getenv("MM_WATCH") ? atof(getenv("MM_WATCH")) : 0) {
    if (every > 0) thread = std::thread([this] { look(); });
  }
  ~watch() {
    {
      const std::lock_guard<std::mutex> one(lock);
      over = true;
    }
    ended.notify_all();
    if (thread.joinable()) thread.join();
  }
  void look() {
    std::unique_lock<std::mutex> l(lock);
    while (!ended.wait_for(l, std::chrono::duration<double>(every), [this] { return over; })) {
      for (const member &x : m) printf("     watch: rank %u of %u is at %s\n", x.rank, x.ranks, x.at);
      for (const member &x : m) printf("     watch: rank %u's stream: %s\n", x.rank, x.s ? cudaGetErrorName(cudaStreamQuery(x.s)) : "-");
      counters();
    }
  }
  void counters() const {
    cudaStream_t s;
    CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (const member &x : m) {
      peer_counters c = {};
      if (!x.peers) continue;
      CUDA_OK(cudaMemcpyAsync(&c, mm_cu_peers_view(x.peers).counters, sizeof c, cudaMemcpyDefault, s));
      CUDA_OK(cudaStreamSynchronize(s));
      printf("     watch: rank %u: epoch %u, ticket %u, turn %u\n", x.rank, c.epoch, c.ticket, c.turn);
    }
    CUDA_OK(cudaStreamDestroy(s));
  }
};

}  // namespace

bool on_ranks(uint32_t ranks, double limit_s, const std::function<void(member *)> &f, size_t most) {
  mm_err err = {};
  std::vector<mm_comm *> comm;
  std::vector<mm_process_group> fixture(ranks);
  for (uint32_t r = 0; r < (g_across ? ranks : 1); r++) {
    fixture[r] = {r, ranks, exchange};
    comm.push_back(g_across ? mm_comm_open_across(ranks, &fixture[r], 0, 1, &err) : mm_comm_open(ranks, &err));
    must(comm[r] != nullptr, err);
  }
  int devices = 1;
  CUDA_OK(cudaGetDeviceCount(&devices));
  std::vector<member> m(ranks);
  std::vector<std::thread> threads;
  const watch seen(m);
  for (uint32_t r = 0; r < ranks; r++) {
    m[r].comm = comm[g_across ? r : 0], m[r].rank = r, m[r].ranks = ranks;
    threads.emplace_back([&, r] {
      member *x = &m[r];
      mm_err e = {};
      CUDA_OK(cudaSetDevice((int)r % devices));
      CUDA_OK(cudaStreamCreateWithFlags(&x->s, cudaStreamNonBlocking));
      CUDA_OK(cudaMalloc(&x->x, most));
      CUDA_OK(cudaMalloc(&x->source, most));
      CUDA_OK(cudaMallocHost(&x->host, most));
      must((x->peers = mm_cu_peers_open(x->comm, r, ranks, false, 8192 * 6144 * 2, limit_s, &e)) != nullptr, e);
      must(mm_cu_peers_settle(x->peers, x->s, &e), e);
      f(x);
      CUDA_OK(cudaStreamSynchronize(x->s));
      x->together();
      mm_cu_peers_close(x->peers);
      CUDA_OK(cudaFree(x->x));
      CUDA_OK(cudaFree(x->source));
      CUDA_OK(cudaFreeHost(x->host));
      CUDA_OK(cudaStreamDestroy(x->s));
    });
  }
  bool ok = true;
  for (auto &t : threads) t.join();
  for (const member &x : m) ok = ok && x.ok;
  for (mm_comm *c : comm) mm_comm_close(c);
  return ok;
}

float number(uint32_t t, uint32_t r, size_t i) {
  rng g = {((uint64_t)t * 64 + r) * 0x9e3779b97f4a7c15u + i};
  const float v = (float)(g.uniform() * 2 - 1);
  return g.below(4) ? v : v * 3e4f;
}

/* ---- a residual and norm with their sum ---- */

combine_rows_of::combine_rows_of(const member &m, uint32_t r, uint32_t k, bool c) : rows(r), width(k), codes(c), n((size_t)r * k) {
  const size_t part = (n * 2 + 1023) / 1024 * 1024;
  bytes = 4 * part;
  branch = reinterpret_cast<__nv_bfloat16 *>(m.source), residual = reinterpret_cast<__nv_bfloat16 *>(m.source + part);
  w = reinterpret_cast<float *>(m.source + 2 * part), to[0] = m.x, to[1] = m.x + bytes;
  spare = reinterpret_cast<__nv_bfloat16 *>(m.source + 2 * part + 65536);
  choice = reinterpret_cast<uint32_t *>(m.source + 3 * part + 65536);
}

mm_cu_combine combine_rows_of::args(int way) const {
  const size_t part = bytes / 4;
  mm_cu_combine a = {};
  a.h = reinterpret_cast<__nv_bfloat16 *>(to[way]), a.n = reinterpret_cast<__nv_bfloat16 *>(to[way] + part);
  a.residual = residual, a.branch = branch, a.w = w, a.alpha = 0.7f, a.beta = 1.3f, a.eps = 1e-5f;
  if (codes) a.codes = {reinterpret_cast<uint8_t *>(to[way] + 2 * part), reinterpret_cast<float *>(to[way] + 3 * part), rows, width, rows};
  return a;
}

void combine_rows_of::fill(const member &m, uint32_t t) const {
  const size_t part = bytes / 4;
  __nv_bfloat16 *const own = reinterpret_cast<__nv_bfloat16 *>(m.host), *const same = reinterpret_cast<__nv_bfloat16 *>(m.host + part);
  for (size_t i = 0; i < n; i++) own[i] = __float2bfloat16(number(t, m.rank, i)), same[i] = __float2bfloat16(number(t, 40, i));
  for (uint32_t i = 0; i < width; i++) reinterpret_cast<float *>(m.host + 2 * part)[i] = number(t, 41, i);
  CUDA_OK(cudaMemcpyAsync(m.source, m.host, 2 * part + width * 4, cudaMemcpyHostToDevice, m.s));
  CUDA_OK(cudaMemcpyAsync(spare, branch, n * 2, cudaMemcpyDeviceToDevice, m.s));
  CUDA_OK(cudaMemsetAsync(choice, 0, rows * sizeof *choice, m.s));
  CUDA_OK(cudaMemsetAsync(to[0], 0xee, 2 * bytes, m.s));
  CUDA_OK(cudaStreamSynchronize(m.s));
}

void combine_rows_of::by_many(const member &m) const {
  mm_cu_combine a = args(0);
  a.branch = spare;
  CUDA_OK(mm_cu_combine_many(m.peers, a, rows, width, false, m.s));
}

static void sum_rows(const combine_rows_of &c, const mm_cu_push &push, const member &m) {
  mm_cu_route r = {};
  r.id = c.choice, r.experts = 1, r.top_k = 1;
  CUDA_OK(mm_cu_sum_choices(c.spare, push, c.branch, r, c.rows, c.width, m.s));
}
void combine_rows_of::sum_only(const member &m) const { sum_rows(*this, {}, m); }

bool combine_rows_of::by_sent(const member &m) const {
  const mm_cu_push push = mm_cu_push_rows(m.peers, rows, width);
  if (!push.epoch) return false;
  mm_cu_combine a = args(0);
  a.branch = spare;
  sum_rows(*this, push, m);
  CUDA_OK(mm_cu_combine_ranks(m.peers, a, rows, width, true, m.s));
  return true;
}

void combine_rows_of::by_two(const member &m) const {
  CUDA_OK(mm_cu_peers_sum(m.peers, branch, n, m.s));
  CUDA_OK(mm_cu_combine_rows(args(1), rows, width, m.s));
}

bool combine_rows_of::same(const member &m) const {
  CUDA_OK(cudaMemcpyAsync(m.host, to[0], 2 * bytes, cudaMemcpyDeviceToHost, m.s));
  CUDA_OK(cudaStreamSynchronize(m.s));
  mm_err err = {};
  must(mm_cu_peers_check(m.peers, &err), err);
  const void *all[MM_CU_PEERS];
  must(mm_comm_gather(m.comm, m.rank, m.host, all), err);
  const bool written = std::count(m.host, m.host + 2 * n, (char)0xee) < (long)n;
  const bool alike = memcmp(m.host, m.host + bytes, bytes) == 0 && memcmp(m.host, all[0], bytes) == 0 && written;
  m.together();
  return alike;
}

double time_in_graph(const member *m, int count, const std::function<void()> &one) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; i++) one();
  CUDA_OK(cudaStreamEndCapture(m->s, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<double> times;
  for (int i = 0; i < 11; i++) {
    m->together();
    const auto from = clock_type::now();
    CUDA_OK(cudaGraphLaunch(exec, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
    times.push_back(since(from) / count * 1e6);
  }
  m->together();
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[5];
}
