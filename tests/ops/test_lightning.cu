/* Lightning attention against the recurrence in doubles, token by token. */
#include "tests/ops/gpu.h"

struct lightning_case {
  uint32_t heads, d, slots;
  std::vector<float> slope, state;
  std::vector<__nv_bfloat16> qkv;
};

/* Runs sequence rows [first, first + count) of c.qkv in doubles from `state` of the slot. */
static void recurrence(const lightning_case &c, uint32_t first, uint32_t count, uint32_t slot, bool fresh, std::vector<double> *out,
                       std::vector<double> *state) {
  const uint32_t d = c.d;
  parallel(c.heads, [&](uint32_t h) {
    std::vector<double> s((size_t)d * d), z(3 * d);
    for (size_t i = 0; i < s.size(); i++) s[i] = fresh ? 0 : c.state[((size_t)slot * c.heads + h) * d * d + i];
    const double decay = exp(-(double)c.slope[h]);
    for (uint32_t t = 0; t < count; t++) {
      const __nv_bfloat16 *x = &c.qkv[((size_t)(first + t) * c.heads + h) * 3 * d];
      for (uint32_t i = 0; i < 3 * d; i++) z[i] = silu_ref(to_float(x[i]));
      for (uint32_t b = 0; b < d; b++) {
        double o = 0;
        for (uint32_t a = 0; a < d; a++) {
          double &cell = s[(size_t)a * d + b];
          cell = decay * cell + z[d + a] * z[2 * d + b];
          o += z[a] * cell;
        }
        (*out)[((size_t)(first + t) * c.heads + h) * d + b] = o;
      }
    }
    for (size_t i = 0; i < s.size(); i++) (*state)[((size_t)slot * c.heads + h) * d * d + i] = s[i];
  });
}

static lightning_case make_case(uint32_t heads, uint32_t d, uint32_t slots, uint32_t tokens, double factor) {
  lightning_case c = {heads, d, slots, {}, random_float((size_t)slots * heads * d * d, 0, 1), random_bf16((size_t)tokens * heads * 3 * d)};
  for (uint32_t h = 0; h < heads; h++) c.slope.push_back((float)(exp2(-8.0 * (h + 1) / heads) * factor));
  return c;
}

static std::vector<double> doubles(const std::vector<__nv_bfloat16> &v) {
  std::vector<double> r;
  for (auto x : v) r.push_back(to_float(x));
  return r;
}

static void check_decode(uint32_t heads, uint32_t d, double factor) {
  if (left_out(4.0 * heads * d * d)) return;
  const std::vector<int32_t> slot = {3, -1, 0, 4};
  const std::vector<uint32_t> pos = {9, 0, 0, 100};
  auto c = make_case(heads, d, 5, (uint32_t)slot.size(), factor);
  buffer<__nv_bfloat16> qkv, o(slot.size() * heads * d);
  buffer<float> state, slope;
  buffer<int32_t> dslot;
  buffer<uint32_t> dpos;
  qkv.put(c.qkv), slope.put(c.slope), dslot.put(slot), dpos.put(pos);
  auto with_nan = c.state; /* slot 0 starts afresh: what it held must not matter */
  for (size_t i = 0; i < (size_t)heads * d * d; i++) with_nan[i] = NAN;
  state.put(with_nan);
  CUDA_OK(
      mm_cu_lightning_decode({qkv.p, o.p, state.p, slope.p, heads, d, (size_t)heads * d * d}, {dslot.p, dpos.p}, (uint32_t)slot.size(), 0));
  std::vector<double> out(slot.size() * heads * d, 0.0), after(c.state.begin(), c.state.end()), got_state;
  for (uint32_t i = 0; i < slot.size(); i++) {
    if (slot[i] >= 0) recurrence(c, i, 1, (uint32_t)slot[i], pos[i] == 0, &out, &after);
  }
  for (auto x : state.get()) got_state.push_back(x);
  auto got = doubles(o.get());
  bool zero = true;
  for (size_t i = 0; i < (size_t)heads * d; i++) zero &= got[(size_t)heads * d + i] == 0;
  char what[120];
  snprintf(what, sizeof what, "lightning decode %u heads x %u, slope x %g", heads, d, factor);
  report(what, relative_error(out, got), 3e-3);
  report(std::string(what) + ": state", relative_error(after, got_state), 1e-5);
  report_true(std::string(what) + ": slot -1 writes zeros", zero);
}

/* one_by_one: by mm_cu_lightning_rows, which keeps f32 throughout. */
static void check_prefill(uint32_t heads, uint32_t d, double factor, const std::vector<mm_cu_span> &span, bool one_by_one = false) {
  if (left_out(100.0 * heads * d * d)) return;
  uint32_t tokens = 0;
  for (const auto &s : span) tokens += s.count;
  auto c = make_case(heads, d, 6, tokens, factor);
  buffer<__nv_bfloat16> qkv, o((size_t)tokens * heads * d);
  buffer<float> state, slope;
  buffer<mm_cu_span> dspan;
  auto with_nan = c.state; /* what a slot held that starts afresh must not matter */
  for (const auto &s : span) {
    for (size_t i = 0; s.pos == 0 && i < (size_t)heads * d * d; i++) with_nan[(size_t)s.slot * heads * d * d + i] = NAN;
  }
  qkv.put(c.qkv), slope.put(c.slope), dspan.put(span), state.put(with_nan);
  const auto run = one_by_one ? mm_cu_lightning_rows : mm_cu_lightning_prefill;
  CUDA_OK(run({qkv.p, o.p, state.p, slope.p, heads, d, (size_t)heads * d * d}, dspan.p, (uint32_t)span.size(), 0));
  std::vector<double> out((size_t)tokens * heads * d, 0.0), after(c.state.begin(), c.state.end()), got_state;
  for (const auto &s : span) recurrence(c, s.first, s.count, (uint32_t)s.slot, s.pos == 0, &out, &after);
  for (auto x : state.get()) got_state.push_back(x);
  char what[120];
  snprintf(what, sizeof what, "lightning %s %u heads x %u, slope x %g, %u rows in %zu spans", one_by_one ? "rows" : "prefill", heads, d,
           factor, tokens, span.size());
  report(what, relative_error(out, doubles(o.get())), one_by_one ? 3e-3 : 1e-2);
  report(std::string(what) + ": state", relative_error(after, got_state), one_by_one ? 1e-5 : 5e-3);
}

/* A prompt cut into chunks of whole tiles gives the same bits as in one go; token by token, cut anywhere. */
static void check_chunks(bool one_by_one) {
  const uint32_t heads = 4, d = 128, tokens = 300, cut = one_by_one ? 1 + g_rng.below(tokens - 1) : 128;
  const auto run = one_by_one ? mm_cu_lightning_rows : mm_cu_lightning_prefill;
  auto c = make_case(heads, d, 1, tokens, 1);
  buffer<__nv_bfloat16> qkv, one((size_t)tokens * heads * d), two((size_t)tokens * heads * d);
  buffer<float> state, slope;
  buffer<mm_cu_span> span;
  qkv.put(c.qkv), slope.put(c.slope);
  span.put({{0, 0, tokens, 0}, {0, 0, cut, 0}, {0, cut, tokens - cut, cut}});
  state.put(c.state);
  CUDA_OK(run({qkv.p, one.p, state.p, slope.p, heads, d, (size_t)heads * d * d}, span.p, 1, 0));
  auto s1 = state.get();
  state.put(c.state);
  const least_shared least; /* and the same bits in less shared memory */
  CUDA_OK(run({qkv.p, two.p, state.p, slope.p, heads, d, (size_t)heads * d * d}, span.p + 1, 1, 0));
  CUDA_OK(run({qkv.p, two.p, state.p, slope.p, heads, d, (size_t)heads * d * d}, span.p + 2, 1, 0));
  auto s2 = state.get();
  bool same = s1 == s2;
  auto a = one.get(), b = two.get();
  for (size_t i = 0; i < a.size(); i++) same &= to_float(a[i]) == to_float(b[i]);
  report_true(std::string("lightning ") + (one_by_one ? "rows" : "prefill") + ": chunked = whole, bit for bit", same);
}

void test_lightning() {
  check_decode(8, 64, 1);
  check_decode(64, 128, 1);
  check_decode(64, 128, 1e-3);
  for (double factor : {1.0, 0.3, 1e-3}) {
    check_prefill(8, 128, factor, {{2, 0, 321, 0}});
    check_prefill(8, 64, factor, {{1, 0, 70, 5}, {0, 70, 64, 0}, {5, 134, 2, 9}});
  }
  check_prefill(64, 128, 1, {{3, 0, 130, 7}, {4, 130, 63, 0}});
  for (double factor : {1.0, 1e-3}) check_prefill(8, 128, factor, {{2, 0, 321, 0}, {1, 321, 1, 40}, {4, 322, 1, 0}}, true);
  check_prefill(8, 64, 1, {{1, 0, 70, 5}, {0, 70, 64, 0}, {5, 134, 2, 9}}, true);
  check_chunks(false), check_chunks(true);
}
