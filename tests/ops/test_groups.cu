/* Rows that go between groups of ranks (ranks_groups.cu, moe/gather_codes.cu), against the host's, number by number: groups of every size,
 * with as many rows each and with as many as chance gives, idle ones of one row; as words, by slabs and in several launches; in turns with
 * sums, and replayed. And how long both take. */
#include <string.h>

#include <algorithm>

#include "quant/numbers.h"
#include "tests/ops/members.h"
#include "tests/ops/whole.h"

namespace {

float rounded(float v) { return to_float(__float2bfloat16(v)); }

/* Row r of group k is numbers of its own, the same on the group's ranks. */
bool check_gather(member *m, const mm_cu_group_rows &g, uint32_t t) {
  const uint32_t own = m->rank / (m->ranks / g.groups), rows = g.first[g.groups];
  const size_t before = (size_t)g.first[own] * g.width, n = (size_t)(g.first[own + 1] - g.first[own]) * g.width,
               all = (size_t)rows * g.width;
  __nv_bfloat16 *const host = reinterpret_cast<__nv_bfloat16 *>(m->host);
  for (size_t i = 0; i < n; i++) host[i] = __float2bfloat16(number(t, own, before + i));
  CUDA_OK(cudaMemsetAsync(m->x, 0xff, all * 2, m->s));
  CUDA_OK(cudaMemcpyAsync(m->source, host, n * 2, cudaMemcpyHostToDevice, m->s));
  CUDA_OK(
      mm_cu_peers_gather_rows(m->peers, g, reinterpret_cast<__nv_bfloat16 *>(m->x), reinterpret_cast<__nv_bfloat16 *>(m->source), m->s));
  CUDA_OK(cudaMemcpyAsync(host, m->x, all * 2, cudaMemcpyDeviceToHost, m->s));
  CUDA_OK(cudaStreamSynchronize(m->s));
  for (uint32_t k = 0; k < g.groups; k++)
    for (size_t i = (size_t)g.first[k] * g.width; i < (size_t)g.first[k + 1] * g.width; i++)
      if (to_float(host[i]) != rounded(number(t, k, i))) return false;
  return true;
}

bool check_scatter(member *m, const mm_cu_group_rows &g, uint32_t t) {
  const uint32_t own = m->rank / (m->ranks / g.groups), rows = g.first[g.groups];
  const size_t before = (size_t)g.first[own] * g.width, n = (size_t)(g.first[own + 1] - g.first[own]) * g.width,
               all = (size_t)rows * g.width;
  __nv_bfloat16 *const host = reinterpret_cast<__nv_bfloat16 *>(m->host);
  for (size_t i = 0; i < all; i++) host[i] = __float2bfloat16(number(t, m->rank, i));
  CUDA_OK(cudaMemsetAsync(m->x, 0xff, n * 2, m->s));
  CUDA_OK(cudaMemcpyAsync(m->source, host, all * 2, cudaMemcpyHostToDevice, m->s));
  CUDA_OK(
      mm_cu_peers_scatter_rows(m->peers, g, reinterpret_cast<__nv_bfloat16 *>(m->x), reinterpret_cast<__nv_bfloat16 *>(m->source), m->s));
  CUDA_OK(cudaMemcpyAsync(host, m->x, n * 2, cudaMemcpyDeviceToHost, m->s));
  CUDA_OK(cudaStreamSynchronize(m->s));
  for (size_t i = 0; i < n; i++) {
    float want = rounded(number(t, 0, before + i));
    for (uint32_t r = 1; r < m->ranks; r++) want += rounded(number(t, r, before + i));
    if (to_float(host[i]) != rounded(want)) return false;
  }
  return true;
}

mm_cu_group_rows rows_of(uint32_t groups, uint32_t width, const std::function<uint32_t()> &rows) {
  mm_cu_group_rows g = {{}, groups, width};
  for (uint32_t k = 0; k < groups; k++) g.first[k + 1] = g.first[k] + rows();
  return g;
}

void check_groups(uint32_t ranks, uint32_t groups) {
  const uint64_t seed = g_rng.next();
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    rng g = {seed}; /* the same on all */
    for (uint32_t t = 0; t < 60; t++) {
      const uint32_t width = g.below(3) ? 64u << g.below(4) : 72, most = 1 + (g.below(4) ? g.below(30) : g.below(2000)), idle = g.below(3);
      const auto rows = rows_of(groups, width, [&] { return idle || g.below(3) ? 1 + g.below(most) : 1; });
      m->ok = check_gather(m, rows, t) && m->ok;
      if (g.below(4) == 0) CUDA_OK(mm_cu_peers_sum_f32(m->peers, reinterpret_cast<float *>(m->x), g.below(2) ? 4096 : 400000, m->s));
      m->ok = check_scatter(m, rows, t) && m->ok;
    }
    /* More rows of one group than a launch takes: rows of slabs of 64 MiB for all. */
    const uint32_t many = 5461 / groups + 20;
    const auto rows = rows_of(groups, 6144, [&, k = 0u]() mutable { return k++ ? many : many - 7; });
    if (ranks <= 4) m->ok = check_gather(m, rows, 1000) && check_scatter(m, rows, 1001) && m->ok;
    mm_err err = {};
    must(mm_cu_peers_check(m->peers, &err), err);
  });
  report_true("peers: rows between " + std::to_string(groups) + " groups of " + std::to_string(ranks) +
                  " ranks = the host's, sums in rank order, bit for bit",
              ok);
}

/* A gather, then a scatter of what it gave, in a graph: each replay gives ranks' rows times the number of ranks. */
void check_replays(uint32_t ranks, uint32_t groups) {
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    for (const uint32_t each : {3u, 400u}) {
      const auto g = rows_of(groups, 1024, [&] { return each; });
      const uint32_t own = m->rank / (ranks / groups);
      const size_t n = (size_t)each * g.width;
      __nv_bfloat16 *const host = reinterpret_cast<__nv_bfloat16 *>(m->host), *const all = reinterpret_cast<__nv_bfloat16 *>(m->source),
                           *const mine = reinterpret_cast<__nv_bfloat16 *>(m->x);
      for (size_t i = 0; i < n; i++) host[i] = __float2bfloat16((float)((i * 7 + own * 13) % 3) - 1);
      CUDA_OK(cudaMemcpyAsync(mine, host, n * 2, cudaMemcpyHostToDevice, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      CUDA_OK(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
      CUDA_OK(mm_cu_peers_gather_rows(m->peers, g, all, mine, m->s));
      CUDA_OK(mm_cu_peers_scatter_rows(m->peers, g, mine, all, m->s));
      CUDA_OK(cudaStreamEndCapture(m->s, &graph));
      CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
      m->together();
      for (int i = 0; i < 12; i++) CUDA_OK(cudaGraphLaunch(exec, m->s));
      CUDA_OK(cudaMemcpyAsync(host, mine, n * 2, cudaMemcpyDeviceToHost, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      const float factor = powf((float)ranks, 12); /* a power of two */
      for (size_t i = 0; i < n; i++) m->ok = m->ok && to_float(host[i]) == ((float)((i * 7 + own * 13) % 3) - 1) * factor;
      m->together();
      CUDA_OK(cudaGraphExecDestroy(exec));
      CUDA_OK(cudaGraphDestroy(graph));
    }
  });
  report_true("peers: recorded rows between " + std::to_string(groups) + " groups of " + std::to_string(ranks) + " ranks, replayed", ok);
}

/* Residual and norm with the exchange next to them, in one kernel and in two, from the same rows: the same bits, codes too. */
void check_combined(uint32_t ranks, uint32_t groups) {
  const uint64_t seed = g_rng.next();
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    rng g = {seed};
    constexpr size_t kPart = (size_t)8 << 20;
    const auto part = [&](int i) { return m->x + i * kPart; };
    const auto rows_at = [&](int i) { return reinterpret_cast<__nv_bfloat16 *>(part(i)); };
    for (uint32_t t = 0; t < 40; t++) {
      const uint32_t width = t % 2 ? 3072 : 128 << g.below(4), most = t == 7 ? 120 : 1 + g.below(30);
      const auto rows = rows_of(groups, width, [&] { return g.below(4) ? 1 + g.below(most) : 1; });
      const uint32_t own = m->rank / (ranks / groups), n = rows.first[own + 1] - rows.first[own], all = rows.first[groups];
      if (!mm_cu_combines_groups(m->peers, rows)) continue;
      __nv_bfloat16 *const host = reinterpret_cast<__nv_bfloat16 *>(m->host);
      float *const w = reinterpret_cast<float *>(m->source + kPart);
      /* The branch: each rank's own rows of all groups, or the group's own; the residual is the group's. */
      for (size_t i = 0; i < (size_t)all * width; i++) host[i] = __float2bfloat16(number(t, m->rank, i));
      for (size_t i = 0; i < (size_t)n * width; i++) host[(size_t)all * width + i] = __float2bfloat16(number(t + 50, own, i));
      CUDA_OK(cudaMemcpyAsync(m->source, host, ((size_t)all + n) * width * 2, cudaMemcpyHostToDevice, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      for (uint32_t i = 0; i < width; i++) reinterpret_cast<float *>(m->host)[i] = 1 + number(t, 9, i);
      CUDA_OK(cudaMemcpyAsync(w, m->host, width * 4, cudaMemcpyHostToDevice, m->s));
      CUDA_OK(cudaStreamSynchronize(m->s));
      __nv_bfloat16 *const branch = reinterpret_cast<__nv_bfloat16 *>(m->source), *const residual = branch + (size_t)all * width;
      const bool gathers = groups == ranks && t % 4 > 1;
      CUDA_OK(cudaMemsetAsync(m->x, 0xff, 8 * kPart, m->s));
      for (int way = 0; way < 2; way++) {
        mm_cu_combine a = {rows_at(way), rows_at(2 + way), residual, branch, w, 3.5f, 1, 1e-6f, {}};
        __nv_bfloat16 *const to = rows_at(4 + way);
        if (way == 0) {
          if (!gathers) CUDA_OK(mm_cu_peers_scatter_rows(m->peers, rows, rows_at(6), branch, m->s));
          if (!gathers) a.branch = rows_at(6);
          CUDA_OK(mm_cu_combine_rows(a, n, width, m->s));
          if (gathers) CUDA_OK(mm_cu_peers_gather_rows(m->peers, rows, to, a.n, m->s));
        } else {
          CUDA_OK(gathers ? mm_cu_combine_gather(m->peers, rows, a, to, m->s) : mm_cu_combine_scatter(m->peers, rows, a, m->s));
        }
      }
      for (int i = 0; i < 6; i += 2) {
        const size_t bytes = (size_t)(i == 4 ? all : n) * width * 2;
        if (i == 4 && !gathers) break;
        CUDA_OK(cudaMemcpyAsync(m->host, part(i), bytes, cudaMemcpyDeviceToHost, m->s));
        CUDA_OK(cudaMemcpyAsync(m->host + bytes, part(i + 1), bytes, cudaMemcpyDeviceToHost, m->s));
        CUDA_OK(cudaStreamSynchronize(m->s));
        m->ok = m->ok && !memcmp(m->host, m->host + bytes, bytes);
        for (size_t k = 0; k < bytes / 2; k++) m->ok = m->ok && isfinite(to_float(host[k]));
      }
    }
    mm_err err = {};
    must(mm_cu_peers_check(m->peers, &err), err);
  });
  report_true("peers: residual and norm with rows between " + std::to_string(groups) + " groups of " + std::to_string(ranks) +
                  " ranks in one kernel = in two, bit for bit",
              ok);
}

/* Rows as codes in a member's memory, and choices: parts of m->x, each far from the next. */
struct coded_rows {
  static constexpr size_t kCode = 0, kScale = (size_t)80 << 20, kId = (size_t)84 << 20, kWeight = (size_t)86 << 20,
                          kLoad = (size_t)88 << 20, kMost = (size_t)90 << 20;
  const mm_cu_group_rows &g;
  uint32_t rows, top_k, experts, first, held, t;
  mm_cu_codes to = {};
  mm_cu_route r = {};

  coded_rows(const member &m, const mm_cu_group_rows &of, uint32_t k, uint32_t chosen_first, uint32_t chosen_held, uint32_t trial)
      : g(of), rows(of.first[of.groups]), top_k(k), experts(32), first(chosen_first), held(chosen_held), t(trial) {
    to = {reinterpret_cast<uint8_t *>(m.x + kCode), reinterpret_cast<float *>(m.x + kScale), rows, g.width, rows};
    r.experts = experts, r.top_k = top_k, r.first = first, r.held = held;
    r.id = reinterpret_cast<uint32_t *>(m.x + kId), r.weight = reinterpret_cast<float *>(m.x + kWeight);
    r.load = reinterpret_cast<unsigned long long *>(m.x + kLoad);
  }
  /* Column c of a row of all: groups of 128 columns of very different sizes, one of zeros. */
  float value(uint32_t row, uint32_t c) const {
    const uint32_t size = (row * 7 + c / 128 * 3) % 12;
    return size == 11 ? 0 : rounded(ldexpf(number(t, 3, (size_t)row * g.width + c), (int)size * 3 - 18));
  }
  uint32_t id(uint32_t row, uint32_t i) const { return row % 9 == 5 ? ~0u : (row * 5 + i * 3 + t) % experts; } /* some are padding */
  float weight(uint32_t row, uint32_t i) const { return number(t, 4, (size_t)row * top_k + i); }
  void fill(const member &m, uint32_t own) const {
    const uint32_t begin = g.first[own], n = g.first[own + 1] - begin;
    __nv_bfloat16 *const host = reinterpret_cast<__nv_bfloat16 *>(m.host);
    CUDA_OK(cudaMemsetAsync(m.x, 0xee, kLoad, m.s));
    CUDA_OK(cudaMemsetAsync(m.x + kLoad, 0, experts * sizeof *r.load, m.s));
    for (size_t i = 0; i < (size_t)n * g.width; i++)
      host[i] = __float2bfloat16(value(begin + (uint32_t)(i / g.width), (uint32_t)(i % g.width)));
    CUDA_OK(cudaMemcpyAsync(m.source, host, (size_t)n * g.width * 2, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
    uint32_t *const ids = reinterpret_cast<uint32_t *>(m.host);
    float *const weights = reinterpret_cast<float *>(m.host) + (size_t)n * top_k;
    for (uint32_t i = 0; i < n * top_k; i++) ids[i] = id(begin + i / top_k, i % top_k), weights[i] = weight(begin + i / top_k, i % top_k);
    CUDA_OK(cudaMemcpyAsync(r.id + (size_t)begin * top_k, ids, (size_t)n * top_k * 4, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaMemcpyAsync(r.weight + (size_t)begin * top_k, weights, (size_t)n * top_k * 4, cudaMemcpyHostToDevice, m.s));
  }
  /* What the CPU makes of the rows (quant/activation.c), on this rank. */
  bool same_codes(const member &m) const {
    const mm_act_format *f = &mm_act_formats[MM_ACT_FP8_GROUP];
    const uint32_t groups = g.width / 128;
    CUDA_OK(cudaMemcpyAsync(m.host, to.scale, (size_t)rows * groups * 4, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
    const std::vector<float> scale(reinterpret_cast<float *>(m.host), reinterpret_cast<float *>(m.host) + (size_t)rows * groups);
    CUDA_OK(cudaMemcpyAsync(m.host, to.code, (size_t)rows * g.width, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
    std::vector<float> x(g.width), amax(groups + 1);
    bool same = true;
    for (uint32_t row = 0; row < rows && same; row += rows > 3000 ? 17 : 1) {
      for (uint32_t c = 0; c < g.width; c++) x[c] = value(row, c);
      std::fill(amax.begin(), amax.end(), 0);
      mm_act_amax(f, x.data(), g.width, 0, amax.data());
      mm_act_codes(f, x.data(), g.width, 0, amax.data(), 0);
      for (uint32_t c = 0; c < g.width; c++) same = same && (uint8_t)m.host[(size_t)row * g.width + c] == mm_f32_to_e4m3(x[c]);
      for (uint32_t i = 0; i < groups; i++) same = same && scale[(size_t)i * rows + row] == amax[1 + i];
    }
    return same;
  }
  /* Choices by this rank's numbers, and how many rows chose each. */
  bool same_choices(const member &m) const {
    const size_t pairs = (size_t)rows * top_k;
    std::vector<uint32_t> ids(pairs);
    std::vector<float> weights(pairs);
    std::vector<unsigned long long> load(experts), want(experts);
    CUDA_OK(cudaMemcpy(ids.data(), r.id, pairs * 4, cudaMemcpyDeviceToHost));
    CUDA_OK(cudaMemcpy(weights.data(), r.weight, pairs * 4, cudaMemcpyDeviceToHost));
    CUDA_OK(cudaMemcpy(load.data(), r.load, experts * sizeof load[0], cudaMemcpyDeviceToHost));
    bool same = true;
    for (size_t i = 0; i < pairs; i++) {
      const uint32_t of = id((uint32_t)(i / top_k), (uint32_t)(i % top_k)), own = held == 0 ? of : of - first < held ? of - first : ~0u;
      same = same && ids[i] == own && weights[i] == weight((uint32_t)(i / top_k), (uint32_t)(i % top_k));
      if (of != ~0u) want[of]++;
    }
    return same && load == want;
  }
};

/* Codes of all rows and the choices that came with them, against the CPU's. */
void check_codes(uint32_t ranks, uint32_t groups) {
  const uint64_t seed = g_rng.next();
  const bool ok = on_ranks(
      ranks, 30,
      [&](member *m) {
        rng g = {seed};
        const uint32_t own = m->rank / (ranks / groups);
        for (uint32_t t = 0; t < 24; t++) {
          const uint32_t width = g.below(4) ? 128 * (1 + g.below(24)) : 6144, idle = g.below(3), most = 1 + g.below(t % 6 ? 40 : 400);
          auto rows = rows_of(groups, width, [&] { return idle || g.below(3) ? 1 + g.below(most) : 1; });
          if (t == 11 && ranks == 2) rows = rows_of(groups, 6144, [] { return 5300u; }); /* more than a launch takes */
          const uint32_t top_k = 1u << (1 + g.below(3)), held = g.below(2) ? 8 : 0;
          const coded_rows c(*m, rows, top_k, held ? 8 * (m->rank % 4) : 0, held, t);
          c.fill(*m, own);
          if (g.below(3) == 0) CUDA_OK(mm_cu_peers_sum_f32(m->peers, reinterpret_cast<float *>(m->source + (80u << 20)), 4096, m->s));
          CUDA_OK(mm_cu_peers_gather_codes(m->peers, rows, c.to, c.r, reinterpret_cast<__nv_bfloat16 *>(m->source), m->s));
          CUDA_OK(cudaStreamSynchronize(m->s));
          m->ok = c.same_codes(*m) && c.same_choices(*m) && m->ok;
          m->together();
        }
        mm_err err = {};
        must(mm_cu_peers_check(m->peers, &err), err);
      },
      coded_rows::kMost);
  report_true("peers: rows between " + std::to_string(groups) + " groups of " + std::to_string(ranks) +
                  " ranks as codes, with choices and load = the CPU's, bit for bit",
              ok);
}

/* So many us on the device. */
__global__ void be_late(uint64_t us) {
  grid_wait();
  uint64_t from, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - from < us * 1000);
}

/* us that an exchange takes of `rows` rows of both groups when the ranks are late for it by turns, beyond the lateness. */
double late_gather(member *m, uint32_t rows, uint32_t late_us) {
  const auto g = rows_of(m->ranks, 3072, [&] { return rows / m->ranks; });
  uint32_t turn = 0;
  return time_in_graph(m, 20,
                       [&] {
                         if (turn++ % m->ranks == m->rank) CUDA_OK(launch(be_late, 1, 1, 0, m->s, late_us));
                         CUDA_OK(mm_cu_peers_gather_rows(m->peers, g, reinterpret_cast<__nv_bfloat16 *>(m->source),
                                                         reinterpret_cast<__nv_bfloat16 *>(m->x), m->s));
                       }) -
         late_us;
}

/* A rank that waited sees its rows at once: what it does while it waits must not make it late for the next exchange. */
void check_lateness() {
  double beyond = 0;
  on_ranks(2, 20, [&](member *m) {
    CUDA_OK(cudaMemsetAsync(m->x, 0, kMost, m->s));
    if (!mm_cu_peers_distinct(m->peers) || mm_cu_peers_hosted(m->peers)) return;
    const double us = late_gather(m, 256, 400);
    if (m->rank == 0) beyond = us;
  });
  report("peers: us that rows between groups take after a wait of 400 us (0: not of ranks that share a device, or write to host memory)",
         beyond, 60);
}

}  // namespace

void test_groups() {
  const struct { uint32_t ranks, groups; } cuts[] = {{2, 2}, {4, 2}, {4, 4}, {8, 2}, {8, 4}};
  for (const auto &c : cuts) check_groups(c.ranks, c.groups);
  check_replays(2, 2), check_replays(4, 2);
  check_combined(2, 2), check_combined(4, 2), check_combined(4, 4);
  check_codes(2, 2), check_codes(4, 2), check_codes(4, 4), check_codes(8, 4);
  check_lateness();
}

/* Rows of all groups; of each direction the median. */
static void bench_cut(uint32_t ranks, uint32_t groups) {
  on_ranks(
      ranks, 20,
      [&](member *m) {
        CUDA_OK(cudaMemsetAsync(m->x, 0, coded_rows::kMost, m->s));
        CUDA_OK(cudaMemsetAsync(m->source, 0, coded_rows::kMost, m->s));
        for (const uint32_t rows : {8u, 64u, 256u, 1024u, 4096u}) {
          const auto g = rows_of(groups, 3072, [&] { return rows / groups; });
          __nv_bfloat16 *const all = reinterpret_cast<__nv_bfloat16 *>(m->source), *const mine = reinterpret_cast<__nv_bfloat16 *>(m->x);
          const int count = rows > 256 ? 10 : 100;
          const double gather = time_in_graph(m, count, [&] { CUDA_OK(mm_cu_peers_gather_rows(m->peers, g, all, mine, m->s)); });
          const double scatter = time_in_graph(m, count, [&] { CUDA_OK(mm_cu_peers_scatter_rows(m->peers, g, mine, all, m->s)); });
          coded_rows coded(*m, g, 8, 0, 0, 0);
          const double codes =
              time_in_graph(m, count, [&] { CUDA_OK(mm_cu_peers_gather_codes(m->peers, g, coded.to, coded.r, mine, m->s)); });
          const double sum = time_in_graph(m, count, [&] { CUDA_OK(mm_cu_peers_sum(m->peers, all, (uint64_t)rows * g.width, m->s)); });
          if (m->rank == 0)
            printf(
                "peers: [%u, %u] between %u groups of %u ranks: gather %.2f us, as codes %.2f us, scatter %.2f us; a sum of all rows %.2f "
                "us\n",
                rows, g.width, groups, ranks, gather, codes, scatter, sum);
        }
      },
      coded_rows::kMost);
}

/* Each warp reads one word of host memory, the same one, so many times. */
__global__ void read_host(const uint32_t *word, uint32_t times, uint32_t *sum) {
  uint32_t v, all = 0;
  for (uint32_t i = 0; i < times; i++) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    all += v;
  }
  if (all) *sum = all;
}

/* Reads of a word by warps that wait (peer_timeout) follow one another. */
static void bench_host_reads() {
  uint32_t *word;
  buffer<uint32_t> sum(1);
  cudaEvent_t begin, end;
  CUDA_OK(cudaHostAlloc(&word, sizeof *word, cudaHostAllocPortable | cudaHostAllocMapped));
  CUDA_OK(cudaEventCreate(&begin));
  CUDA_OK(cudaEventCreate(&end));
  *word = 0;
  for (const uint32_t blocks : {1u, 8u, 32u, 96u, 128u}) {
    float ms[2];
    for (uint32_t times = 0; times < 3; times++) { /* the first launch loads the kernel */
      CUDA_OK(cudaEventRecord(begin));
      read_host<<<blocks, 384>>>(word, times, sum.p);
      CUDA_OK(cudaEventRecord(end));
      CUDA_OK(cudaEventSynchronize(end));
      if (times) CUDA_OK(cudaEventElapsedTime(&ms[times - 1], begin, end));
    }
    printf("host memory: %u warps read one word: %.1f us; twice %.1f us\n", blocks * 12, ms[0] * 1e3, ms[1] * 1e3);
  }
  CUDA_OK(cudaEventDestroy(begin));
  CUDA_OK(cudaEventDestroy(end));
  CUDA_OK(cudaFreeHost(word));
}

/* After a wait that the ranks have by turns. */
static void bench_late() {
  on_ranks(2, 20, [&](member *m) {
    CUDA_OK(cudaMemsetAsync(m->x, 0, kMost, m->s));
    for (const uint32_t rows : {8u, 64u, 256u})
      for (const uint32_t late_us : {50u, 200u, 400u, 800u, 3000u, 6000u}) {
        const double beyond = late_gather(m, rows, late_us);
        if (m->rank == 0)
          printf("peers: [%u, 3072] between 2 groups, by turns late by %u us: gather %.2f us more\n", rows, late_us, beyond);
      }
  });
}

void bench_groups() { bench_cut(2, 2), bench_cut(4, 2), bench_late(), bench_host_reads(); }
