/* Inputs that a server may get: rows of NaN among rows of numbers, numbers of any size, odd shapes, one expert for all, steps of
 * padding alone. */
#include <string.h>

#include <algorithm>
#include <array>

#include "tests/ops/gpu.h"
#include "tests/ops/routing.h"

struct edge_scheme {
  const char *name;
  mm_cu_code code;
  mm_cu_scale kind;
  uint32_t cell_n, cell_k;
  bool rounded = false; /* inputs as codes */
  bool few = false;     /* by the kernels for a few rows */
  mm_cu_rounding how = {MM_ACT_FP8_GROUP, 0};
};
static const edge_scheme kEdge[] = {
    {"bf16", MM_CU_BF16, MM_CU_PLAIN, 0, 0},
    {"block_fp8", MM_CU_E4M3, MM_CU_COARSE, 128, 128},
    {"fp8 8x8", MM_CU_E4M3, MM_CU_FINE, 8, 8},
    {"int4", MM_CU_INT4, MM_CU_COARSE, 1, 128},
    {"nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16},
    {"mxfp4", MM_CU_E2M1, MM_CU_MX, 1, 32},
    {"mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32},
    {"rounded", MM_CU_E4M3, MM_CU_COARSE, 128, 128, true},
    {"channels rounded by tokens", MM_CU_E4M3, MM_CU_COARSE, 1, 0, true, false, {MM_ACT_FP8_TOKEN, 0}},
    {"few bf16", MM_CU_BF16, MM_CU_PLAIN, 0, 0, false, true},
    {"few block_fp8", MM_CU_E4M3, MM_CU_COARSE, 128, 128, false, true},
    {"few int4", MM_CU_INT4, MM_CU_COARSE, 1, 128, false, true},
    {"few nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16, false, true},
    {"few mxfp4", MM_CU_E2M1, MM_CU_MX, 1, 32, false, true},
    {"few mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32, false, true},
};

/* y[tokens, n] in f32 by the kernel that takes such a step. */
static std::vector<float> product(const edge_scheme &c, const test_weight &w, const std::vector<__nv_bfloat16> &x, uint32_t tokens) {
  buffer<__nv_bfloat16> dx;
  buffer<float> y((size_t)tokens * w.d.n);
  dx.put(x);
  if (c.rounded) {
    code_buffers codes(tokens, w.d.k);
    CUDA_OK(mm_cu_encode(codes.d, {dx.p, w.d.k, nullptr}, c.how, 0));
    const bool decode_linear = takes_here(MM_CU_SMALL_BATCH_FP8, w.d, tokens);
    CUDA_OK((decode_linear ? mm_cu_small_batch_fp8 : mm_cu_gemm_fp8)(w.d, {codes.d, nullptr, y.p}, 0));
    return y.get();
  }
  CUDA_OK((c.few ? few_linear(w.d, tokens) : plain_linear(w.d, tokens))(w.d, {dx.p, nullptr, nullptr, y.p, tokens}, 0));
  return y.get();
}

static bool same_bits(const float *a, const float *b, size_t n) { return memcmp(a, b, n * sizeof *a) == 0; }
static __nv_bfloat16 to_bf16(double v) { return __float2bfloat16((float)v); }

/* A row of NaN, of infinities or with one of them leaves every other row's bits alone, and has no number where its sum has none. */
static void check_strange_rows(const edge_scheme &c, uint32_t tokens, uint32_t n, uint32_t k) {
  if (left_out(7.0 * tokens * n * k)) return;
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k);
  if (c.rounded) w.d.rounding = c.how;
  if ((c.rounded && !takes_here(MM_CU_GEMM_FP8, w.d)) || (c.few && !few_linear(w.d, tokens))) return; /* not of this device */
  auto x = random_bf16((size_t)tokens * k);
  const auto plain = product(c, w, x, tokens);
  const double kinds[] = {NAN, INFINITY, -INFINITY, 3.3e38};
  bool others = true, own = true;
  for (uint32_t kind = 0; kind < 6; kind++) {
    auto y = x;
    const uint32_t at = g_rng.below(tokens);
    for (uint32_t i = 0; i < k; i++) {
      if (kind < 4 || i == k / 2) y[(size_t)at * k + i] = to_bf16(kinds[kind % 4]);
    }
    const auto got = product(c, w, y, tokens);
    others &= same_bits(got.data(), plain.data(), (size_t)at * n);
    others &= same_bits(&got[(size_t)(at + 1) * n], &plain[(size_t)(at + 1) * n], (size_t)(tokens - at - 1) * n);
    for (uint32_t i = 0; i < n && kind == 0; i++) own &= std::isnan(got[(size_t)at * n + i]);
  }
  char what[120];
  snprintf(what, sizeof what, "linear %s T=%u n=%u k=%u: a row that is no number: others' bits the same", c.name, tokens, n, k);
  report_true(what, others);
  snprintf(what, sizeof what, "linear %s T=%u n=%u k=%u: NaN stays one", c.name, tokens, n, k);
  report_true(what, own);
}

/* Rows of numbers of any size, each as exact relative to the terms that its sums have; outputs of a wide range among them. The kernels for
 * a few rows sum x · (code + 8) of int4 and take 8 · x off (small_batch_rows.cuh): where the row's largest x meets a weight of zero, a term
 * is left out of the product that is not left out of the sum. */
static void check_sizes(const edge_scheme &c, uint32_t tokens, uint32_t n, uint32_t k) {
  if (left_out((double)tokens * n * k)) return;
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k);
  if (c.rounded) w.d.rounding = c.how;
  if ((c.rounded && !takes_here(MM_CU_GEMM_FP8, w.d)) || (c.few && !few_linear(w.d, tokens))) return;
  const double sizes[] = {1, 3e4, 1e-30, 0x1p-125, 1e30, 1e-6};
  auto x = random_bf16((size_t)tokens * k);
  std::vector<float> plain;
  for (uint32_t t = 0; t < tokens; t++) {
    for (uint32_t i = 0; i < k; i++) {
      auto &v = x[(size_t)t * k + i];
      v = to_bf16(to_float(v) * sizes[t % 6] * (t % 12 >= 6 && i == 3 ? 1e4 : 1));
      plain.push_back(to_float(v));
    }
  }
  auto seen = plain;
  for (uint32_t t = 0; c.rounded && t < tokens; t++) round_row_to(c.how, &seen[(size_t)t * k], k);
  const auto got = product(c, w, x, tokens);
  const auto scale = w.scale.get();
  const bool offset = c.few && c.code == MM_CU_INT4;
  double worst = 0;
  for (uint32_t t = 0; t < tokens; t++) {
    double off = 0, size = 0; /* of the sums' terms: sums may cancel out */
    for (uint32_t i = 0; i < n; i++) {
      double want = 0;
      for (uint32_t j = 0; j < k; j++) {
        const double in = seen[(size_t)t * k + j], v = in * w.w[(size_t)i * k + j];
        const double term = offset ? v + 8 * in * scale[i * w.d.scale_pitch + j / 128] : v;
        want += v, size += term * term;
      }
      off += pow(got[(size_t)t * n + i] - want, 2);
    }
    worst = std::max(worst, off == 0 ? 0 : std::isfinite(off) ? sqrt(off / size) : INFINITY);
  }
  char what[120];
  snprintf(what, sizeof what, "linear %s T=%u n=%u k=%u: numbers from 1e-38 to 1e30, worst row", c.name, tokens, n, k);
  /* Weights times scales in bf16 are off by a root mean square of 1.7e-3 of each term, so is a row of many sums; one sum is normally
   * distributed, and six of its deviations are not met by chance. */
  const double limit = c.rounded || (tokens > MM_CU_DECODE_ROWS && !c.few) ? 6e-3 : 1e-3;
  report(what, worst, c.kind == MM_CU_FINE ? std::max(6e-3, 1.7e-3 * (1 + 5 / sqrt((double)n))) : limit);
}

/* Experts: chosen by r, y of x. */
static std::vector<float> mixture(const edge_scheme &c, const test_weight &w13, const test_weight &w2, const mm_cu_route &r,
                                  const __nv_bfloat16 *x, uint32_t tokens) {
  const uint32_t hidden = w13.d.k, inter = w2.d.k, pairs = tokens * r.top_k, slots = std::min(r.experts, MM_CU_DECODE_ROWS * r.top_k);
  buffer<__nv_bfloat16> y((size_t)tokens * hidden), middle((size_t)std::max(slots * MM_CU_DECODE_ROWS, 3 * pairs) * inter);
  if (c.rounded) {
    code_buffers codes(tokens, hidden), between(pairs, inter);
    buffer<__nv_bfloat16> out((size_t)pairs * hidden);
    CUDA_OK(mm_cu_encode(codes.d, {x, hidden, nullptr}, c.how, 0));
    CUDA_OK(mm_cu_experts_fp8(w13.d, w2.d, r, {codes.d, between.d, middle.p, out.p, y.p}, 0));
  } else {
    buffer<float> out((size_t)pairs * hidden);
    const auto run = c.few ? mm_cu_experts_few : plain_experts(w13.d, w2.d, tokens, r.top_k);
    CUDA_OK(run(w13.d, w2.d, r, {x, y.p, middle.p, out.p, tokens}, 0));
    CUDA_OK(cudaDeviceSynchronize());
  }
  std::vector<float> v;
  for (auto f : y.get()) v.push_back(to_float(f));
  return v;
}

/* All tokens to the same experts, most experts never; a row that is no number among them; then padding rows; then nothing but those. */
static void check_one_expert(const edge_scheme &c, uint32_t tokens, uint32_t top_k) {
  if (left_out(4e5 * tokens * top_k)) return;
  const uint32_t experts = 24, hidden = 256, inter = 128;
  test_weight w13, w2;
  random_weight(&w13, c.code, c.kind, experts, 2 * inter, hidden, c.cell_n, c.cell_k);
  random_weight(&w2, c.code, c.kind, experts, hidden, inter, c.cell_n, c.cell_k);
  if (c.rounded) w13.d.rounding = w2.d.rounding = c.how;
  if (c.rounded && (tokens == 1 || !takes_here(MM_CU_EXPERTS_FP8, w13.d, w2.d))) return;
  if (c.few && (tokens == 1 || !takes_here(MM_CU_EXPERTS_FEW, w13.d, w2.d))) return;
  const router_weight rw(experts, hidden, tokens);
  const auto row = random_bf16(hidden);
  std::vector<__nv_bfloat16> x;
  for (uint32_t t = 0; t < tokens; t++) x.insert(x.end(), row.begin(), row.end());
  buffer<__nv_bfloat16> dx;
  buffer<int32_t> slot;
  dx.put(x);
  const auto run = [&](const std::vector<int32_t> &slots) {
    route_buffers rb(experts, top_k, tokens, true, nullptr);
    if (!slots.empty()) slot.put(slots), rb.r.slot = slot.p;
    CUDA_OK(mm_cu_route_tokens(rw.d, rb.r, dx.p, tokens, 0));
    return mixture(c, w13, w2, rb.r, dx.p, tokens);
  };
  const auto all = run({});
  bool same = true, finite = true;
  for (uint32_t t = 0; t < tokens; t++) same &= same_bits(all.data(), &all[(size_t)t * hidden], hidden);
  for (float v : all) finite &= std::isfinite(v);
  const uint32_t odd = g_rng.below(tokens);
  auto strange = x;
  for (uint32_t i = 0; i < hidden; i++) strange[(size_t)odd * hidden + i] = to_bf16(NAN);
  dx.put(strange);
  const auto with_nan = run({});
  bool others = true;
  for (uint32_t t = 0; t < tokens; t++) others &= t == odd || same_bits(all.data(), &with_nan[(size_t)t * hidden], hidden);
  dx.put(x);
  std::vector<int32_t> slots(tokens);
  for (uint32_t t = 0; t < tokens; t++) slots[t] = t % 2 ? (int32_t)t : -1;
  const auto padded = run(slots);
  bool mixed = true;
  for (uint32_t t = 1; t < tokens; t += 2) mixed &= same_bits(all.data(), &padded[(size_t)t * hidden], hidden);
  const auto alone = run(std::vector<int32_t>(tokens, -1));
  const bool zeros = std::all_of(alone.begin(), alone.end(), [](float v) { return v == 0; });
  char what[160];
  snprintf(what, sizeof what, "experts %s T=%u top %u, one choice for all: ", c.name, tokens, top_k);
  report_true(what + std::string("rows the same, numbers"), same && finite);
  report_true(what + std::string("a row of NaN leaves the others alone"), others);
  report_true(what + std::string("padding rows do too; padding alone ends in zeros"), mixed && zeros);
}

void test_edges() {
  for (const auto &c : kEdge) {
    for (const auto &s : {std::array<uint32_t, 3>{1, 40, 256}, {7, 65, 640}, {16, 1, 384}, {17, 1, 384}, {40, 65, 384}, {150, 65, 384}})
      if (!c.few || s[0] <= MM_CU_FEW) check_strange_rows(c, s[0], s[1], s[2]);
    check_sizes(c, 1, 40, 256), check_sizes(c, 8, 1, 128), check_sizes(c, 13, 9, 1280);
    check_sizes(c, 24, 130, 384), check_sizes(c, 40, 65, 640);
    for (uint32_t tokens : {1u, 3u, 16u, 17u, 140u, 600u}) {
      check_one_expert(c, tokens, 1);
      check_one_expert(c, tokens, 8);
    }
  }
}
