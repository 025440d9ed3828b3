/* Experts of many tokens whose weights are codes (experts_prefill.cu), of chosen counts of rows, against doubles. */
#include <string.h>

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/moe/lay_places.h"
#include "tests/ops/gpu.h"
#include "tests/ops/routing.h"

namespace {

struct scheme_case {
  const char *name;
  mm_cu_code code;
  mm_cu_scale kind;
  uint32_t cell_n, cell_k;
};

/* Each expert has so many tokens, which choose it alone: expert and weight of each token, and the sorted pairs. */
struct chosen_rows {
  std::vector<uint32_t> expert, place; /* of a token */
  std::vector<float> weight;
  route_buffers b;

  explicit chosen_rows(const std::vector<uint32_t> &counts) : b((uint32_t)counts.size(), 1, total(counts), true, nullptr) {
    std::vector<uint32_t> order(total(counts)), offset(1, 0), pair;
    for (uint32_t i = 0; i < order.size(); i++) order[i] = i;
    for (uint32_t i = (uint32_t)order.size() - 1; i > 0; i--) std::swap(order[i], order[g_rng.below(i + 1)]);
    expert.resize(order.size());
    for (uint32_t e = 0; e < counts.size(); e++) {
      std::vector<uint32_t> tokens(order.begin() + offset[e], order.begin() + offset[e] + counts[e]);
      std::sort(tokens.begin(), tokens.end());
      for (uint32_t t : tokens) expert[t] = e, pair.push_back(t);
      offset.push_back((uint32_t)pair.size());
    }
    for (uint32_t t = 0; t < order.size(); t++) weight.push_back((float)(0.5 + g_rng.uniform()));
    b.id.put(expert), b.offset.put(offset), b.pair.put(pair), b.weight.put(weight);
  }
  static uint32_t total(const std::vector<uint32_t> &counts) {
    uint32_t n = 0;
    for (uint32_t c : counts) n += c;
    return n;
  }
};

std::vector<__nv_bfloat16> run_rows(const test_weight &w13, const test_weight &w2, const mm_cu_route &r, const __nv_bfloat16 *x,
                                    uint32_t tokens, bool grouped) {
  buffer<__nv_bfloat16> y((size_t)tokens * w13.d.k), middle((size_t)tokens * w2.d.k);
  buffer<float> pair_out((size_t)tokens * w2.d.n);
  CUDA_OK(
      (grouped ? mm_cu_experts_gemm : plain_experts(w13.d, w2.d, tokens, 1))(w13.d, w2.d, r, {x, y.p, middle.p, pair_out.p, tokens}, 0));
  return y.get();
}

void check_counts(const scheme_case &c, const std::vector<uint32_t> &counts, uint32_t hidden, uint32_t inter) {
  if (left_out(3.0 * chosen_rows::total(counts) * hidden * inter)) return;
  const uint32_t experts = (uint32_t)counts.size(), tokens = chosen_rows::total(counts);
  chosen_rows rows(counts);
  const auto x = random_bf16((size_t)tokens * hidden);
  buffer<__nv_bfloat16> dx;
  dx.put(x);
  test_weight w13, w2;
  random_weight(&w13, c.code, c.kind, experts, 2 * inter, hidden, c.cell_n, c.cell_k);
  random_weight(&w2, c.code, c.kind, experts, hidden, inter, c.cell_n, c.cell_k);
  const auto out = run_rows(w13, w2, rows.b.r, dx.p, tokens, false), before = run_rows(w13, w2, rows.b.r, dx.p, tokens, true);
  std::vector<double> want((size_t)tokens * hidden), got, old;
  parallel(tokens, [&](uint32_t t) {
    const uint32_t e = rows.expert[t];
    std::vector<double> mid(inter);
    for (uint32_t i = 0; i < inter; i++) {
      double gate = 0, up = 0;
      for (uint32_t q = 0; q < hidden; q++) {
        const double v = to_float(x[(size_t)t * hidden + q]);
        gate += v * w13.w[((size_t)e * 2 * inter + i) * hidden + q], up += v * w13.w[((size_t)e * 2 * inter + inter + i) * hidden + q];
      }
      mid[i] = silu_ref(gate) * up;
    }
    for (uint32_t n = 0; n < hidden; n++) {
      double sum = 0;
      for (uint32_t i = 0; i < inter; i++) sum += mid[i] * w2.w[((size_t)e * hidden + n) * inter + i];
      want[(size_t)t * hidden + n] = sum * rows.weight[t];
    }
  });
  for (size_t i = 0; i < out.size(); i++) got.push_back(to_float(out[i])), old.push_back(to_float(before[i]));
  char what[160];
  snprintf(what, sizeof what, "experts of many rows %-14s E=%u T=%u H=%u I=%u", c.name, experts, tokens, hidden, inter);
  report(what, relative_error(want, got), 8e-3);
  report(std::string(what) + ", grouped", relative_error(want, old), 8e-3);
  for (uint32_t e = 0; e < experts; e++) { /* each expert for itself: a few wrong rows are lost among many */
    std::vector<double> w, g;
    for (uint32_t t = 0; t < tokens; t++) {
      if (rows.expert[t] != e) continue;
      w.insert(w.end(), want.begin() + (size_t)t * hidden, want.begin() + (size_t)(t + 1) * hidden);
      g.insert(g.end(), got.begin() + (size_t)t * hidden, got.begin() + (size_t)(t + 1) * hidden);
    }
    if (w.empty()) continue;
    snprintf(what, sizeof what, "experts of many rows %-14s E=%u H=%u I=%u, expert of %u", c.name, experts, hidden, inter, counts[e]);
    report(what, relative_error(w, g), 1.2e-2);
  }
}

/* Where column c of a row stands in what is laid for pieces of so many columns (place_of_four in small_batch_rows.cuh). */
uint32_t laid_at(uint32_t c, uint32_t piece) {
  const uint32_t four = c / 4, place = piece == 32 ? four / 8 * 32 + four % 2 * 16 + four % 8 / 2 * 2 : four / 4 * 16 + four % 4 * 2;
  return place + c % 4 / 2 * 8 + c % 2;
}

/* Rows in the order of the places, and rounded ones in place against mm_cu_round, bit for bit. Every third pair has no place, as where
 * other ranks have the expert. */
void check_laid(uint32_t tokens, uint32_t top_k, uint32_t k, uint32_t piece, mm_act_quant kind, float fixed) {
  if (left_out((double)tokens * top_k * k * 4)) return;
  const uint32_t pairs = tokens * top_k;
  std::vector<uint32_t> pair;
  for (uint32_t p = 0; p < pairs; p++) {
    if (p % 3 != 1) pair.push_back(p);
  }
  for (uint32_t i = (uint32_t)pair.size() - 1; i > 0; i--) std::swap(pair[i], pair[g_rng.below(i + 1)]);
  const uint32_t places = (uint32_t)pair.size();
  route_buffers b(1, top_k, tokens, true, nullptr);
  b.offset.put({0, places}), pair.resize(pairs, 0), b.pair.put(pair);
  auto x = random_bf16((size_t)tokens * k), rows = random_bf16((size_t)pairs * k);
  for (size_t i = 0; i < rows.size(); i++) rows[i] = __float2bfloat16(to_float(rows[i]) * (float)exp2((double)(i / 16 % 11) - 8));
  buffer<__nv_bfloat16> dx, to((size_t)pairs * k), laid, plain;
  buffer<uint32_t> capacity(pairs);
  std::vector<uint32_t> anything(pairs);
  for (uint32_t &v : anything) v = g_rng.below(places + 2);
  dx.put(x), laid.put(rows), plain.put(rows), capacity.put(anything);
  CUDA_OK(mm_cu_lay_tokens(to.p, dx.p, capacity.p, b.r, tokens, k, piece, 0));
  CUDA_OK(mm_cu_lay_rounded(laid.p, {kind, fixed}, b.r, tokens, k, piece, 0));
  CUDA_OK(mm_cu_round(plain.p, pairs, {plain.p, k, nullptr}, {kind, fixed}, 0));
  const auto got = to.get(), rounded = laid.get(), want = plain.get();
  uint64_t wrong = 0, off = 0;
  for (uint32_t i = 0; i < places; i++) {
    for (uint32_t c = 0; c < k; c++) {
      const size_t at = (size_t)i * k + laid_at(c, piece);
      wrong += to_float(got[at]) != to_float(x[(size_t)(pair[i] / top_k) * k + c]);
      off += to_float(rounded[at]) != to_float(want[(size_t)i * k + c]);
    }
  }
  for (size_t i = (size_t)places * k; i < rows.size(); i++) off += to_float(rounded[i]) != to_float(rows[i]); /* no place: as it was */
  char what[140];
  snprintf(what, sizeof what, "rows laid, T=%u, %u choices, k=%u, pieces of %u: %llu numbers wrong; rounded, kind %d: %llu", tokens, top_k,
           k, piece, (unsigned long long)wrong, (int)kind, (unsigned long long)off);
  report_true(what, wrong + off == 0);
}

}  // namespace

void test_widened() {
  for (int kind = 1; kind <= MM_ACT_MXFP8; kind++) {
    for (const uint32_t piece : {16u, 32u}) check_laid(65 + (uint32_t)kind, 8, kind % 2 ? 1536 : 352, piece, (mm_act_quant)kind, 0);
  }
  check_laid(33, 2, 1504, 32, MM_ACT_NVFP4, 0.02f);
  check_laid(1, 16, 64, 16, MM_ACT_NVFP4, 0.02f);
  const scheme_case cases[] = {
      {"int4 g128", MM_CU_INT4, MM_CU_COARSE, 1, 128},  {"int4 channel", MM_CU_INT4, MM_CU_COARSE, 1, 0},
      {"int4 g32", MM_CU_INT4, MM_CU_FINE, 1, 32},      {"nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16},
      {"mxfp4", MM_CU_E2M1, MM_CU_MX, 1, 32},           {"block_fp8", MM_CU_E4M3, MM_CU_COARSE, 128, 128},
      {"block_fp8 32", MM_CU_E4M3, MM_CU_FINE, 32, 32}, {"mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32},
  };
  const std::vector<uint32_t> ragged = {0, 1, 7, 64, 65, 97, 128, 129, 145, 161, 193, 225, 256, 257, 272, 273, 288, 289, 310, 0, 577};
  for (const auto &c : cases) {
    check_counts(c, ragged, 256, 192);
    check_counts(c, ragged, 352, 224);            /* columns that end within a line and a step, rows of weights within a block */
    check_counts(c, {0, 1, 7, 130, 0}, 328, 200); /* k that the grouped kernels alone take */
    check_counts(c, {40, 0, 130}, 1024, 640);
  }
}
