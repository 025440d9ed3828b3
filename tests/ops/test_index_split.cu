/* The scan of index keys that is split over ranks (mm_cu_index_split): the lists of each rank are those of the scan that is not split, bit
 * for bit, and those of ranks that have the same head are equal. Launched, recorded, and replayed at other positions, where other rows are
 * split; ties, idle rows, contexts shorter than a block for each rank, ranks that share heads, keys in e4m3. The counters of the ranks say
 * that candidates were exchanged where some row is split, and nothing where none is. */
#include <string.h>

#include <algorithm>
#include <mutex>

#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/comm/peers.cuh"
#include "tests/ops/members.h"
#include "tests/ops/whole.h"

namespace {

struct split_case {
  uint32_t heads, d, size, top_k, local, from; /* heads of all ranks */
  bool ties, fp8;
  std::vector<uint32_t> pos; /* of each row's sequence; UINT32_MAX: an idle row */
};

/* What all ranks have alike: queries of all heads, keys in scattered pages, positions. */
struct split_data {
  uint32_t per_slot, most;
  std::vector<bf16> q, keys;
  std::vector<uint8_t> code;
  std::vector<float> scale;
  std::vector<uint32_t> table, pos, near; /* near: other positions, at most as far */
  std::vector<int32_t> slot;

  explicit split_data(const split_case &c) {
    const uint32_t rows = (uint32_t)c.pos.size();
    uint32_t far = 0;
    for (const uint32_t p : c.pos) far = p == UINT32_MAX ? far : std::max(far, p);
    per_slot = far / MM_CU_PAGE + 2, most = per_slot * MM_CU_PAGE / c.size + 1;
    table.resize((size_t)per_slot * rows);
    for (uint32_t i = 0; i < table.size(); i++) table[i] = i;
    for (uint32_t i = (uint32_t)table.size() - 1; i > 0; i--) std::swap(table[i], table[g_rng.below(i + 1)]);
    const size_t cells = table.size() * MM_CU_PAGE;
    q = random_bf16((size_t)rows * c.heads * c.d), keys = random_bf16(c.fp8 ? 0 : cells * c.d);
    for (auto *v : {&q, &keys}) {
      for (size_t i = 0; c.ties && i < v->size(); i++) (*v)[i] = __float2bfloat16((float)g_rng.below(3) - 1);
    }
    for (size_t i = 0; c.fp8 && i < cells * c.d; i++)
      code.push_back((uint8_t)(c.ties ? 0x38 | g_rng.below(2) << 7 : g_rng.below(127) | g_rng.below(2) << 7));
    for (size_t i = 0; c.fp8 && i < cells; i++) scale.push_back(c.ties ? 1 : (float)(g_rng.uniform() + 0.1) / 64);
    for (uint32_t i = 0; i < rows; i++) {
      const bool idle = c.pos[i] == UINT32_MAX;
      slot.push_back(idle ? -1 : (int32_t)i), pos.push_back(idle ? 0 : c.pos[i]), near.push_back(idle ? 0 : g_rng.below(c.pos[i] + 1));
    }
  }
  /* Some row is split at these positions. */
  bool any(const split_case &c, const std::vector<uint32_t> &at) const {
    for (size_t i = 0; i < at.size(); i++) {
      if (slot[i] >= 0 && at[i] >= c.from && at[i] / c.size + 1 > c.top_k && c.local < c.top_k) return true;
    }
    return false;
  }
};

/* A rank's memory, from one place to the next. */
struct arena {
  char *at;
  template <class T>
  T *put(const std::vector<T> &v) {
    T *const to = array<T>(v.size());
    CUDA_OK(cudaMemcpy(to, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
  }
  template <class T>
  T *array(size_t n) {
    char *const to = at;
    at += (n * sizeof(T) + 511) / 512 * 512;
    return reinterpret_cast<T *>(to);
  }
};

/* One case on one rank. */
struct trial {
  const split_case &c;
  const split_data &v;
  member *m;
  uint32_t rows, heads; /* of this rank */
  size_t n;             /* numbers of its lists and their counts */
  mm_cu_select a = {};
  mm_cu_rows r;
  uint32_t *pos;

  trial(const split_case &of, const split_data &data, member *rank) : c(of), v(data), m(rank) {
    rows = (uint32_t)c.pos.size(), heads = std::max(1u, c.heads / m->ranks), n = (size_t)rows * heads * (c.top_k + 1);
    const uint32_t owners = m->ranks * heads / c.heads, first = m->rank / owners * heads;
    std::vector<bf16> own;
    for (uint32_t i = 0; i < rows; i++) {
      const bf16 *const q = &v.q[((size_t)i * c.heads + first) * c.d];
      own.insert(own.end(), q, q + heads * c.d);
    }
    arena to = {m->x};
    a.q = to.put(own), a.keys = c.fp8 ? reinterpret_cast<const bf16 *>(to.put(v.code)) : to.put(v.keys);
    if (c.fp8) a.key_scale = to.put(v.scale);
    a.table = to.put(v.table), a.pages_per_slot = v.per_slot, a.most = v.most;
    a.heads = heads, a.dim = c.d, a.size = c.size, a.top_k = c.top_k, a.local = c.local;
    a.score = to.array<float>(mm_cu_score_floats(heads, v.most));
    a.block = to.array<uint32_t>(n), a.count = a.block + (size_t)rows * heads * c.top_k;
    pos = to.put(v.pos), r = {to.put(v.slot), pos};
    if (to.at > m->x + kMost) abort();
  }
  void select() const { CUDA_OK(mm_cu_select_rows(a, r, rows, m->s)); }
  /* The lists after f, numbers behind the end of one made alike; for all ranks at once. */
  template <class F>
  std::vector<uint32_t> lists(const F &f) const {
    uint32_t *const host = reinterpret_cast<uint32_t *>(m->host);
    CUDA_OK(cudaMemsetAsync(a.block, 0xff, n * sizeof *host, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
    m->together();
    f();
    CUDA_OK(cudaMemcpyAsync(host, a.block, n * sizeof *host, cudaMemcpyDeviceToHost, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
    mm_err err = {};
    must(mm_cu_peers_check(m->peers, &err), err);
    m->together();
    return {host, host + n};
  }
  uint32_t epoch() const {
    peer_counters *const host = reinterpret_cast<peer_counters *>(m->host);
    CUDA_OK(cudaMemcpyAsync(host, mm_cu_peers_view(m->peers).counters, sizeof *host, cudaMemcpyDefault, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
    return host->epoch;
  }
  void move(const std::vector<uint32_t> &to) const {
    memcpy(m->host, to.data(), to.size() * sizeof to[0]);
    CUDA_OK(cudaMemcpyAsync(pos, m->host, to.size() * sizeof to[0], cudaMemcpyHostToDevice, m->s));
    CUDA_OK(cudaStreamSynchronize(m->s));
  }
};

/* Launched and replayed; at both kinds of positions. splits: the ranks can exchange as much as this case has. */
bool check_case(trial &t, bool splits) {
  const auto want = t.lists([&] { t.select(); });
  t.a.split = {t.m->peers, t.c.heads, t.c.from};
  const uint32_t before = t.epoch();
  bool ok = t.lists([&] { t.select(); }) == want;
  const bool any = splits && t.v.any(t.c, t.v.pos), other = splits && t.v.any(t.c, t.v.near);
  ok = ok && t.epoch() - before == (any ? 2u : 0u);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamBeginCapture(t.m->s, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 3; i++) t.select();
  CUDA_OK(cudaStreamEndCapture(t.m->s, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 4; i++) ok = t.lists([&] { CUDA_OK(cudaGraphLaunch(exec, t.m->s)); }) == want && ok;
  t.move(t.v.near);
  const uint32_t then = t.epoch();
  const auto replayed = t.lists([&] { CUDA_OK(cudaGraphLaunch(exec, t.m->s)); });
  ok = ok && t.epoch() - then == (other ? 6u : 0u);
  t.a.split = {};
  ok = t.lists([&] { t.select(); }) == replayed && ok;
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  t.m->together();
  return ok;
}

std::vector<split_case> cases_of(uint32_t ranks) {
  std::vector<split_case> all;
  const uint32_t idle = UINT32_MAX;
  for (const bool ties : {true, false}) {
    for (const bool fp8 : {false, true}) {
      const uint32_t few = std::max(2u, 16 / ranks); /* rows of ranks that share a device */
      const auto mixed = [&](uint32_t size) {
        std::vector<uint32_t> v = {40 * size + 7, idle, 17 * size + size / 2, 16 * size - 1, 16 * size, 9, 30 * size, 18 * size};
        v.resize(std::min<size_t>(v.size(), few));
        return v;
      };
      all.push_back({4, 128, 128, 16, 1, 1, ties, fp8, mixed(128)});
      all.push_back({4, 64, 32, 16, 2, 20 * 32, ties, fp8, mixed(32)});     /* some rows are */
      all.push_back({4, 128, 32, 16, 1, 1000000, ties, fp8, mixed(32)});    /* none is */
      all.push_back({4, 128, 16, 16, 1, 1, ties, fp8, {1000 * 16 + 5}});    /* many blocks */
      all.push_back({2, 32, 16, 4, 1, 1, ties, fp8, {16 * 4, 16 * 5 - 1}}); /* fewer scored blocks than candidates, or ranks */
      all.push_back({8, 64, 32, 64, 3, 1, ties, fp8, {32 * 70 + 5, 32 * 64}});
      all.push_back({2, 32, 16, 3, 3, 1, ties, fp8, {900, idle}}); /* none is scored */
    }
  }
  return all;
}

void check_ranks(uint32_t ranks) {
  const auto cases = cases_of(ranks);
  std::vector<split_data> data;
  for (const split_case &c : cases) data.emplace_back(c);
  std::vector<char> good(cases.size(), 1);
  std::mutex lock;
  on_ranks(ranks, 20, [&](member *m) {
    for (size_t i = 0; i < cases.size(); i++) {
      trial t(cases[i], data[i], m);
      m->together();
      const bool ok = check_case(t, mm_cu_peers_small(m->peers, t.rows, 1));
      const std::lock_guard<std::mutex> one(lock);
      good[i] = good[i] && ok;
    }
  });
  for (size_t i = 0; i < cases.size(); i++) {
    const split_case &c = cases[i];
    report_true("scan over " + std::to_string(ranks) + " ranks, " + std::to_string(c.heads) + " heads of " + std::to_string(c.d) + ", " +
                    std::to_string(c.pos.size()) + " rows, split from " + std::to_string(c.from) + (c.ties ? ", ties" : "") +
                    (c.fp8 ? ", e4m3" : "") + ": the lists of the whole scan, launched and replayed",
                good[i]);
  }
}

/* Many rows, of ranks with devices of their own. */
void check_many(uint32_t rows) {
  split_case c = {4, 32, 16, 4, 1, 90, false, false, {}};
  for (uint32_t i = 0; i < rows; i++) c.pos.push_back(i % 7 == 3 ? UINT32_MAX : g_rng.below(200));
  const split_data v(c);
  const bool ok = on_ranks(2, 20, [&](member *m) {
    trial t(c, v, m);
    m->together();
    m->ok = check_case(t, mm_cu_peers_small(m->peers, rows, 1));
  });
  report_true("scan over 2 ranks, " + std::to_string(rows) + " rows: the lists of the whole scan, launched and replayed", ok);
}

}  // namespace

void test_index_split() {
  for (const uint32_t ranks : {2u, 4u, 8u}) check_ranks(ranks);
  check_many(64), check_many(300); /* the second are more than ranks exchange at once */
}
