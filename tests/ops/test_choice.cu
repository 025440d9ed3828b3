/* What a step does besides its layers: the choice of the next token, and padding rows that reach no expert. */
#include <algorithm>
#include <numeric>

#include "runtime/cuda/choose.h"
#include "runtime/draw.h"
#include "runtime/sample.h"
#include "tests/ops/gpu.h"
#include "tests/ops/routing.h"

struct choice_settings {
  double temperature;
  uint32_t top_k;
  double top_p;
};

/* What the CPU's sampler chooses. */
struct cpu_sampler {
  mm_sampler *room;
  std::vector<float> x;
  explicit cpu_sampler(uint32_t vocab) : x(vocab) {
    mm_err err = {};
    if (!(room = mm_sampler_open(vocab, &err))) fprintf(stderr, "%s\n", err.text), exit(1);
  }
  ~cpu_sampler() { mm_sampler_close(room); }
  int32_t choose(const mm_sampling &set, uint64_t n, const float *logits, const std::vector<uint8_t> &never) {
    for (size_t v = 0; v < x.size(); v++) x[v] = never[v] ? -INFINITY : logits[v];
    return mm_sample(room, &set, n, x.data());
  }
};

static mm_cu_draw draw_of(const mm_sampling &set, uint64_t n) {
  if (set.temperature == 0) return {};
  return {mm_draw_scale(set.temperature), set.top_k, set.top_p, mm_draw_mix(set.seed, n)};
}

/* Rows of one step under different settings, each beside the CPU's choice; ties and ids that are never to be chosen among the logits. */
static void check_choice(uint32_t vocab, const std::vector<choice_settings> &set, double sigma = 3) {
  const uint32_t rows = (uint32_t)set.size(), pitch = vocab + 5, slots = rows + 3;
  std::vector<float> x = random_float((size_t)rows * pitch, 0, sigma);
  std::vector<uint8_t> never(vocab);
  for (auto &n : never) n = g_rng.below(10) == 0;
  /* equal ones; with a sigma of 0 nothing else, so that cuts fall among the largest */
  for (size_t i = 0; i<x.size(); i += sigma> 0 ? 1 + g_rng.below(5) : 1) x[i] = sigma > 0 ? (float)(int)x[i] : (float)g_rng.below(4);
  for (size_t i = 0; i < x.size(); i += 1 + g_rng.below(50)) x[i] = i % 2 ? NAN : -INFINITY;
  std::vector<mm_sampling> sampling;
  std::vector<mm_cu_draw> draw;
  std::vector<uint32_t> out;
  std::vector<int32_t> slot;
  for (uint32_t i = 0; i < rows; i++) {
    sampling.push_back({set[i].temperature, set[i].top_p, set[i].top_k, g_rng.next()});
    draw.push_back(draw_of(sampling[i], i + 1));
    slot.push_back((int32_t)(slots - 1 - i)), slot.push_back((int32_t)(slots - 1 - i)); /* two rows of each sequence, the later wanted */
    out.push_back(2 * i + 1);
  }
  slot[1] = -1; /* padding: chosen for nobody */
  buffer<float> dx;
  buffer<uint8_t> dnever;
  buffer<mm_cu_draw> ddraw;
  buffer<uint32_t> dout, ticket(rows);
  buffer<int32_t> dslot, id(rows), chosen(slots);
  buffer<unsigned long long> best(rows);
  dx.put(x), dnever.put(never), ddraw.put(draw), dout.put(out), dslot.put(slot), best.zero(), ticket.zero();
  const mm_cu_choose a = {dx.p, dnever.p, vocab, pitch, 2 * rows, dout.p, dslot.p, ddraw.p, id.p, chosen.p, best.p, ticket.p};
  for (int i = 0; i < 2; i++) CUDA_OK(mm_cu_choose_tokens(a, rows, true, 0)); /* twice: the counters come back to zero */
  const auto got = id.get(), kept = chosen.get();
  std::vector<uint8_t> differs(rows);
  parallel(rows, [&](uint32_t i) {
    cpu_sampler cpu(vocab);
    differs[i] = got[i] != cpu.choose(sampling[i], i + 1, &x[(size_t)i * pitch], never);
  });
  const uint32_t wrong = (uint32_t)std::count(differs.begin(), differs.end(), 1);
  uint32_t lost = 0;
  for (uint32_t i = 1; i < rows; i++) lost += kept[slots - 1 - i] != std::max(got[i], 0); /* of none, id 0 */
  lost += kept[slots - 1] != -1 || kept[0] != -1;                                         /* poison */
  char what[120];
  snprintf(what, sizeof what, "choice from %u logits: %u of %u rows other than the CPU's, %u not kept", vocab, wrong, rows, lost);
  report_true(what, wrong == 0 && lost == 0);
}

/* Random settings, every parameter in use, extremes among them. */
static std::vector<choice_settings> random_settings(uint32_t rows, uint32_t vocab) {
  const double strange[] = {1e-300, 1e300, 5e-324, 1e-4, 100};
  std::vector<choice_settings> set;
  for (uint32_t i = 0; i < rows; i++) {
    choice_settings s = {0.1 + 2 * g_rng.uniform(), 0, 1};
    if (g_rng.below(12) == 0) s.temperature = strange[g_rng.below(5)];
    if (g_rng.below(12) == 0) s.temperature = 0;
    if (g_rng.below(2)) s.top_k = 1 + g_rng.below(g_rng.below(4) ? 64 : 2 * vocab);
    if (g_rng.below(2)) s.top_p = g_rng.below(8) ? 1 - pow(g_rng.uniform(), 3) : pow(10, -8 * g_rng.uniform());
    set.push_back(s);
  }
  return set;
}

static void check_no_choice() {
  const uint32_t vocab = 1000;
  buffer<float> x;
  buffer<uint8_t> never;
  buffer<mm_cu_draw> draw;
  buffer<uint32_t> out, ticket(2);
  buffer<int32_t> slot, id(2), chosen(2);
  buffer<unsigned long long> best(2);
  std::vector<float> v(2 * vocab, NAN);
  v[vocab + 7] = 3;
  std::vector<uint8_t> mask(vocab, 0);
  mask[7] = 1;
  x.put(v), never.put(mask), draw.put({{1, 0, 1, 5}, {}}), out.put({0, 1}), slot.put({0, 1}), best.zero(), ticket.zero();
  CUDA_OK(mm_cu_choose_tokens({x.p, never.p, vocab, vocab, 2, out.p, slot.p, draw.p, id.p, chosen.p, best.p, ticket.p}, 2, true, 0));
  report_true("choice from no number: none", id.get() == std::vector<int32_t>{-1, -1});
}

/* Padding rows among others: they choose nothing, and the lists are those of the others alone. */
static void check_padding(uint32_t tokens, uint32_t experts, uint32_t top_k) {
  const uint32_t hidden = 256, pairs = tokens * top_k;
  route_buffers to(experts, top_k, tokens, true, nullptr);
  buffer<float> w;
  buffer<__nv_bfloat16> x;
  buffer<int32_t> slot;
  std::vector<int32_t> s(tokens);
  for (uint32_t t = 0; t < tokens; t++) s[t] = t % 3 == 1 ? -1 : (int32_t)t;
  w.put(random_float((size_t)experts * hidden, 0, 0.1)), x.put(random_bf16((size_t)tokens * hidden)), slot.put(s);
  buffer<unsigned long long> load;
  load.put(std::vector<unsigned long long>(experts, 5));
  mm_cu_route r = to.r;
  r.slot = slot.p, r.load = load.p;
  buffer<__nv_bfloat16> piece((size_t)3 * experts * hidden);
  buffer<float> product((size_t)tokens * 3 * experts);
  CUDA_OK(mm_cu_split(piece.p, w.p, (size_t)experts * hidden, 0));
  CUDA_OK(mm_cu_route_tokens({w.p, true, hidden, piece.p, product.p}, r, x.p, tokens, 0));
  const auto ids = to.id.get();
  std::vector<uint32_t> want(experts, 0);
  bool ok = true;
  for (uint32_t p = 0; p < pairs; p++) {
    if (s[p / top_k] < 0) {
      ok &= ids[p] == ~0u;
    } else {
      ok &= ids[p] < experts;
      if (ids[p] < experts) want[ids[p]]++;
    }
  }
  if (tokens <= MM_CU_SKINNY) {
    const auto masks = to.slot_tokens.get(), expert = to.slot_expert.get();
    const uint32_t n = to.used.get()[0];
    ok &= n == (uint32_t)std::count_if(want.begin(), want.end(), [](uint32_t c) { return c > 0; });
    for (uint32_t i = 0; i < n; i++) {
      ok &= expert[i] < experts && want[expert[i]] == (uint32_t)__builtin_popcount(masks[i]) && (i == 0 || expert[i] > expert[i - 1]);
      for (uint32_t t = 0; t < tokens; t++) ok &= !(masks[i] >> t & 1) || s[t] >= 0;
    }
  }
  const auto order = to.pair.get(), from = to.offset.get();
  const uint32_t n = from[experts];
  for (uint32_t e = 0; e < experts; e++) {
    ok &= from[e + 1] - from[e] == want[e];
    for (uint32_t i = from[e]; i < from[e + 1] && i < pairs; i++)
      ok &= order[i] < pairs && ids[order[i]] == e && (i == from[e] || order[i] > order[i - 1]);
  }
  ok &= n == std::accumulate(want.begin(), want.end(), 0u);
  const auto counted = load.get();
  for (uint32_t e = 0; e < experts; e++) ok &= counted[e] == 5 + want[e];
  report_true("router with padding rows, load counted, T=" + std::to_string(tokens), ok);
}

void test_choice() {
  check_choice(2048, {{0, 0, 1}, {1, 0, 1}, {0.7, 20, 1}, {1, 0, 0.9}, {2, 100, 0.5}, {1e-4, 0, 1}, {0, 5, 0.3}, {1, 1, 1}});
  check_choice(200064, {{0, 0, 1}, {1, 0, 1}, {0.7, 50, 0.95}, {1.3, 0, 0.8}});
  check_choice(97, std::vector<choice_settings>(200, {1, 12, 0.8}));
  for (int i = 0; i < 4; i++) check_choice(1 + g_rng.below(300), random_settings(2000, 300), i < 2 ? 3 : 0.01);
  for (int i = 0; i < 4; i++) check_choice(1 + g_rng.below(40), random_settings(2000, 40), 0);
  for (int i = 0; i < 2; i++) check_choice(32000, random_settings(256, 32000), 1 + 2 * i);
  check_choice(200064, random_settings(64, 200064));
  check_no_choice();
  check_padding(8, 32, 4);
  check_padding(16, 256, 8);
  check_padding(100, 12, 3);
}
