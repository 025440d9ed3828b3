/* The work of a step besides its layers: sampling of the next token, and padding rows that reach no expert. */
#include <algorithm>
#include <numeric>

#include "runtime/cuda/sampling/sampling.h"
#include "runtime/engine/random_draw.h"
#include "runtime/engine/sample.h"
#include "tests/ops/gpu.h"
#include "tests/ops/routing.h"

struct choice_settings {
  double temperature;
  uint32_t top_k;
  double top_p;
  double min_p = 0;
};

/* The token that the CPU's sampler draws. */
struct cpu_sampler {
  mm_sampler *capacity;
  std::vector<float> x;
  explicit cpu_sampler(uint32_t vocab) : x(vocab) {
    mm_err err = {};
    if (!(capacity = mm_sampler_open(vocab, &err))) fprintf(stderr, "%s\n", err.text), exit(1);
  }
  ~cpu_sampler() { mm_sampler_close(capacity); }
  int32_t choose(const mm_sampling &set, uint64_t n, const float *logits, const std::vector<uint8_t> &never) {
    for (size_t v = 0; v < x.size(); v++) x[v] = never[v] ? -INFINITY : logits[v];
    return mm_sample(capacity, &set, n, x.data());
  }
};

/* Rows of logits: equal ones among them, with a sigma of 0 nothing else, so that cuts fall among the largest; and such as are none. */
static std::vector<float> random_logits(size_t n, double sigma) {
  std::vector<float> x = random_float(n, 0, sigma);
  for (size_t i = 0; i<x.size(); i += sigma> 0 ? 1 + g_rng.below(5) : 1) x[i] = sigma > 0 ? (float)(int)x[i] : (float)g_rng.below(4);
  for (size_t i = 0; i < x.size(); i += 1 + g_rng.below(50)) x[i] = i % 2 ? NAN : -INFINITY;
  if (g_rng.below(4) == 0) { /* falling with the id, or rising */
    std::sort(x.begin(), x.end(), [](float a, float b) { return isnan(b) ? false : isnan(a) || a < b; });
    if (g_rng.below(2)) std::reverse(x.begin(), x.end());
  }
  return x;
}
static std::vector<uint8_t> random_never(uint32_t vocab) {
  std::vector<uint8_t> never(vocab);
  for (auto &n : never) n = g_rng.below(10) == 0;
  return never;
}
static std::vector<uint32_t> words_of(const std::vector<uint8_t> &never) {
  std::vector<uint32_t> w(MM_CU_WORDS(never.size()));
  for (size_t v = 0; v < never.size(); v++) w[v / 32] |= (uint32_t)never[v] << v % 32;
  return w;
}
/* Rows that start at multiples of 16 bytes, or do not. */
static uint32_t random_pitch(uint32_t vocab) { return g_rng.below(2) ? vocab + 5 : (vocab + 7) / 4 * 4; }

/* Rows of one step under different settings, each against the CPU's sample; ties and banned ids among the logits. */
static void check_choice(uint32_t vocab, const std::vector<choice_settings> &set, double sigma = 3) {
  if (left_out(100.0 * vocab * (double)set.size())) return;
  const uint32_t rows = (uint32_t)set.size(), pitch = random_pitch(vocab), slots = rows + 3;
  const std::vector<float> x = random_logits((size_t)rows * pitch, sigma);
  const std::vector<uint8_t> never = random_never(vocab);
  std::vector<mm_sampling> sampling;
  std::vector<mm_cu_row_sampling> draw;
  std::vector<uint32_t> out;
  std::vector<int32_t> slot;
  for (uint32_t i = 0; i < rows; i++) {
    sampling.push_back({set[i].temperature, set[i].top_p, set[i].top_k, g_rng.next(), set[i].min_p});
    draw.push_back(mm_cu_row_sampling_of(&sampling[i], i + 1));
    slot.push_back((int32_t)(slots - 1 - i)), slot.push_back((int32_t)(slots - 1 - i)); /* two rows of each sequence, the later wanted */
    out.push_back(2 * i + 1);
  }
  slot[1] = -1; /* padding: chosen for nobody */
  buffer<float> dx;
  buffer<mm_cu_row_sampling> ddraw;
  buffer<uint32_t> dnever, dout, ticket(rows), largest((size_t)rows * MM_CU_SAMPLE_GROUPS(vocab));
  buffer<int32_t> dslot, id(rows), chosen(slots);
  buffer<unsigned long long> best(rows);
  dx.put(x), dnever.put(words_of(never)), ddraw.put(draw), dout.put(out), dslot.put(slot), best.zero(), ticket.zero();
  const mm_cu_sample a = {dx.p, dnever.p, vocab, pitch, 2 * rows, dout.p, dslot.p, ddraw.p, id.p, chosen.p, best.p, ticket.p, largest.p};
  mm_cu_sampling draws = MM_CU_GREEDY;
  for (const mm_sampling &s : sampling) draws = std::max(draws, mm_cu_sampling_of(&s, vocab));
  for (int i = 0; i < 2; i++) CUDA_OK(mm_cu_sample_tokens(a, rows, draws, 0)); /* twice: the counters come back to zero */
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
    if (g_rng.below(2)) s.top_k = 1 + g_rng.below(g_rng.below(4) ? g_rng.below(2) ? 64 : 300 : 2 * vocab);
    if (g_rng.below(6) == 0) s.min_p = g_rng.below(4) ? pow(g_rng.uniform(), 4) : pow(10, -14 * g_rng.uniform());
    if (g_rng.below(2)) s.top_p = g_rng.below(8) ? 1 - pow(g_rng.uniform(), 3) : pow(10, -8 * g_rng.uniform());
    set.push_back(s);
  }
  return set;
}

/* Logprobs of rows, from their logits or from copies, against the CPU's. */
static void check_logprobs(uint32_t vocab, uint32_t rows, double sigma) {
  if (left_out(100.0 * vocab * rows)) return;
  const uint32_t pitch = random_pitch(vocab);
  const std::vector<float> x = random_logits((size_t)rows * pitch, sigma), raw = random_logits((size_t)rows * vocab, sigma);
  const std::vector<uint8_t> never = random_never(vocab);
  std::vector<mm_cu_row_options> option(rows);
  std::vector<int32_t> chosen(rows);
  for (uint32_t i = 0; i < rows; i++) {
    option[i].logprobs = g_rng.below(MM_CU_LOGPROBS + 1), option[i].raw = g_rng.below(3) ? 0 : 1 + i;
    chosen[i] = g_rng.below(9) ? (int32_t)g_rng.below(vocab) : -1;
  }
  buffer<float> dx, draw;
  buffer<uint32_t> dnever;
  buffer<mm_cu_row_options> dask;
  buffer<int32_t> id;
  buffer<mm_logprob> logprobs((size_t)rows * MM_CU_LOGPROBS);
  dx.put(x), draw.put(raw), dnever.put(words_of(never)), dask.put(option), id.put(chosen), logprobs.zero();
  mm_cu_sample a = {};
  a.logits = dx.p, a.never = dnever.p, a.vocab = vocab, a.vocab_rows = pitch, a.id = id.p;
  mm_cu_sample_options q = {};
  q.row = dask.p, q.raw = draw.p, q.logprobs = logprobs.p, q.logprobs_wanted = true;
  CUDA_OK(mm_cu_logprobs(a, q, rows, 0));
  const auto got = logprobs.get();
  std::vector<uint8_t> differs(rows);
  parallel(rows, [&](uint32_t i) {
    cpu_sampler cpu(vocab);
    const float *const from = option[i].raw ? &raw[(size_t)i * vocab] : &x[(size_t)i * pitch];
    for (uint32_t v = 0; v < vocab; v++) cpu.x[v] = never[v] ? -INFINITY : from[v];
    mm_logprob want[MM_CU_LOGPROBS] = {};
    mm_sampling set = {};
    set.top_logprobs = option[i].logprobs ? option[i].logprobs - 1 : 0, set.logprobs = want;
    cpu.x[(size_t)std::max(chosen[i], 0)] = from[std::max(chosen[i], 0)]; /* whatever was chosen has one */
    if (never[(size_t)std::max(chosen[i], 0)] || !option[i].logprobs) return;
    mm_sample_logprobs(cpu.capacity, &set, chosen[i], cpu.x.data());
    for (uint32_t k = 0; k < option[i].logprobs; k++) {
      const mm_logprob g = got[(size_t)i * MM_CU_LOGPROBS + k], w = want[k];
      const bool none = isnan(g.logprob) && isnan(w.logprob); /* a logit that is no number was chosen */
      differs[i] |= g.id != w.id || !(none || g.logprob == w.logprob || fabsf(g.logprob - w.logprob) <= 1e-6f * (1 + fabsf(w.logprob)));
    }
  });
  char what[120];
  const uint32_t wrong = (uint32_t)std::count(differs.begin(), differs.end(), 1);
  snprintf(what, sizeof what, "logprobs from %u logits: %u of %u rows other than the CPU's", vocab, wrong, rows);
  report_true(what, wrong == 0);
}

static void check_no_choice() {
  const uint32_t vocab = 1000;
  buffer<float> x;
  buffer<mm_cu_row_sampling> draw;
  buffer<uint32_t> never, out, ticket(2), largest(2 * MM_CU_SAMPLE_GROUPS(vocab));
  buffer<int32_t> slot, id(2), chosen(2);
  buffer<unsigned long long> best(2);
  std::vector<float> v(2 * vocab, NAN);
  v[vocab + 7] = 3;
  std::vector<uint8_t> mask(vocab, 0);
  mask[7] = 1;
  x.put(v), never.put(words_of(mask)), draw.put({{1, 0, 1, 5}, {}}), out.put({0, 1}), slot.put({0, 1}), best.zero(), ticket.zero();
  CUDA_OK(mm_cu_sample_tokens({x.p, never.p, vocab, vocab, 2, out.p, slot.p, draw.p, id.p, chosen.p, best.p, ticket.p, largest.p}, 2,
                              MM_CU_ANY_SAMPLING, 0));
  report_true("choice from no number: none", id.get() == std::vector<int32_t>{-1, -1});
}

/* Padding rows among others: they choose nothing, and the lists are those of the others alone. */
static void check_padding(uint32_t tokens, uint32_t experts, uint32_t top_k) {
  if (left_out(1e4 * tokens)) return;
  const uint32_t hidden = 256, pairs = tokens * top_k;
  route_buffers to(experts, top_k, tokens, true, nullptr);
  buffer<float> w;
  buffer<__nv_bfloat16> x;
  buffer<int32_t> slot;
  std::vector<int32_t> s(tokens);
  for (uint32_t t = 0; t < tokens; t++) s[t] = t % 3 == 1 ? -1 : (int32_t)t;
  auto rows = random_float((size_t)experts * hidden, 0, 0.1);
  std::copy_n(rows.begin(), experts / 4 * hidden, rows.begin() + experts / 2 * hidden); /* ties */
  w.put(rows), x.put(random_bf16((size_t)tokens * hidden)), slot.put(s);
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
  if (tokens <= MM_CU_DECODE_ROWS) {
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
  std::vector<uint32_t> index(experts);
  for (uint32_t e = 0; e < experts; e++) index[e] = (5 * e + 3) % experts; /* 5 divides none of the numbers of experts */
  buffer<uint32_t> table;
  table.put(index), r.index = table.p, r.load = nullptr;
  CUDA_OK(mm_cu_route_tokens({w.p, true, hidden, piece.p, product.p}, r, x.p, tokens, 0));
  const auto moved = to.id.get();
  ok = true;
  for (uint32_t p = 0; p < pairs; p++) ok &= moved[p] == (ids[p] == ~0u ? ~0u : index[ids[p]]);
  report_true("router with placed experts: the same choice, ties too, by index, T=" + std::to_string(tokens), ok);
}

void test_choice() {
  for (uint32_t vocab : {300u, 5000u}) { /* every kind of draw, few enough for compute-sanitizer */
    check_choice(vocab, {{0, 0, 1}, {1, 7, 0.9}, {0.8, 200, 1}}), check_choice(vocab, {{1, 0, 0.9}, {1, 0, 0.2}});
    check_choice(vocab, {{1, 0, 1}, {0, 0, 1}}), check_choice(vocab, {{1, 280, 0.99}, {1, 5, 1}});
    check_logprobs(vocab, 2, 3);
  }
  check_choice(2048, {{0, 0, 1}, {1, 0, 1}, {0.7, 20, 1}, {1, 0, 0.9}, {2, 100, 0.5}, {1e-4, 0, 1}, {0, 5, 0.3}, {1, 1, 1}});
  check_choice(200064, {{0, 0, 1}, {1, 0, 1}, {0.7, 50, 0.95}, {1.3, 0, 0.8}});
  check_choice(97, std::vector<choice_settings>(200, {1, 12, 0.8}));
  for (int i = 0; i < 4; i++) check_choice(1 + g_rng.below(300), random_settings(2000, 300), i < 2 ? 3 : 0.01);
  for (int i = 0; i < 4; i++) check_choice(1 + g_rng.below(40), random_settings(2000, 40), 0);
  for (double sigma : {0.0, 0.3, 3.0, 30.0}) { /* draws under a top-k of few alone, which are launched otherwise */
    for (uint32_t vocab : {40u, 600u, 32000u, 200064u}) {
      auto set = random_settings(64, vocab);
      for (auto &s : set) s.top_k = 1 + g_rng.below(std::min(vocab - 1, g_rng.below(2) ? 64u : 256u));
      check_choice(vocab, set, sigma);
    }
  }
  for (int i = 0; i < 2; i++) check_choice(32000, random_settings(256, 32000), 1 + 2 * i);
  for (double sigma : {0.0, 0.3, 3.0, 30.0}) check_choice(200064, random_settings(64, 200064), sigma);
  check_choice(1000003, random_settings(32, 1000003)); /* more than blocks can hold */
  check_choice(1000003, random_settings(16, 1000003), 0);
  for (double sigma : {0.0, 0.3, 3.0}) check_logprobs(200064, 32, sigma), check_logprobs(1 + g_rng.below(600), 500, sigma);
  check_logprobs(1000003, 8, 3);
  check_no_choice();
  check_padding(8, 32, 4);
  check_padding(16, 256, 8);
  check_padding(100, 12, 3);
}
