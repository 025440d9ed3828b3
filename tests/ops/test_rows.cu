/* Norms, residual and embedding against doubles. */
#include <string.h>

#include <algorithm>

#include "runtime/cuda/core/collect.h"
#include "tests/ops/gpu.h"

/* True if codes are what mm_cu_encode makes of y. */
static bool same_codes(const code_buffers &got, const buffer<__nv_bfloat16> &y, uint32_t width) {
  code_buffers want(got.d.rows, width);
  CUDA_OK(mm_cu_encode(want.d, {y.p, width, nullptr}, {MM_ACT_FP8_GROUP, 0}, 0));
  const auto a = want.scale.get(), b = got.scale.get(); /* with poison behind the rows */
  return want.code.get() == got.code.get() && memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

static void check_row_kernels(uint32_t tokens, uint32_t width) {
  if (left_out(50.0 * tokens * width)) return;
  const size_t n = (size_t)tokens * width;
  auto x = random_bf16(n), b = random_bf16(n), gate = random_bf16(n, 2);
  auto w = random_float(width, 1, 0.3);
  buffer<__nv_bfloat16> dx, db, dg, y(n), h(n);
  buffer<float> dw;
  dx.put(x), db.put(b), dg.put(gate), dw.put(w);
  auto rms = [&](auto value, uint32_t t, double eps) {
    double sum = 0;
    for (uint32_t i = 0; i < width; i++) sum += value((size_t)t * width + i) * value((size_t)t * width + i);
    return 1 / sqrt(sum / width + eps);
  };
  auto compare = [&](const char *name, const buffer<__nv_bfloat16> &out, auto want_at) {
    std::vector<double> want, got;
    auto v = out.get();
    for (uint32_t t = 0; t < tokens; t++) {
      for (uint32_t i = 0; i < width; i++) want.push_back(want_at(t, i)), got.push_back(to_float(v[(size_t)t * width + i]));
    }
    char what[100];
    snprintf(what, sizeof what, "%s T=%u width %u", name, tokens, width);
    report(what, relative_error(want, got), 3e-3);
  };
  std::vector<double> scale(tokens);
  auto plain = [&](size_t i) { return (double)to_float(x[i]); };
  for (uint32_t t = 0; t < tokens; t++) scale[t] = rms(plain, t, 1e-5);
  CUDA_OK(mm_cu_norm(y.p, dx.p, dw.p, 1e-5f, tokens, width, 0));
  compare("norm", y, [&](uint32_t t, uint32_t i) { return plain((size_t)t * width + i) * scale[t] * w[i]; });
  y.poison();
  code_buffers codes(tokens, width);
  CUDA_OK(mm_cu_gated_norm({y.p, dx.p, dg.p, dw.p, 1e-5f, width}, tokens, codes.d, 0));
  report_true("gated norm: codes T=" + std::to_string(tokens), same_codes(codes, y, width));
  compare("gated norm", y, [&](uint32_t t, uint32_t i) {
    return plain((size_t)t * width + i) * scale[t] * w[i] / (1 + exp(-(double)to_float(gate[(size_t)t * width + i])));
  });
  auto sum = [&](size_t i) { return 3.5565588200778455 * to_float(x[i]) + 0.9 * to_float(b[i]); };
  for (uint32_t t = 0; t < tokens; t++) scale[t] = rms(sum, t, 1e-6);
  y.poison();
  codes.code.poison(), codes.scale.poison();
  CUDA_OK(mm_cu_combine_rows({h.p, y.p, dx.p, db.p, dw.p, 3.5565588200778455f, 0.9f, 1e-6f, codes.d}, tokens, width, 0));
  const uint32_t few = std::min(tokens, 128u);
  buffer<__nv_bfloat16> few_h((size_t)few * width), few_n(few_h.n);
  CUDA_OK(mm_cu_combine_rows({few_h.p, few_n.p, dx.p, db.p, dw.p, 3.5565588200778455f, 0.9f, 1e-6f}, few, width, 0));
  const auto all_n = y.get(), some_n = few_n.get();
  report_true("combine: a row's bits among others T=" + std::to_string(tokens),
              memcmp(all_n.data(), some_n.data(), some_n.size() * sizeof some_n[0]) == 0);
  report_true("combine: codes T=" + std::to_string(tokens), same_codes(codes, y, width));
  compare("combine: h", h, [&](uint32_t t, uint32_t i) { return sum((size_t)t * width + i); });
  compare("combine: n", y, [&](uint32_t t, uint32_t i) { return sum((size_t)t * width + i) * scale[t] * w[i]; });

  /* ids from the step, ids that a slot chose before, padding rows */
  std::vector<int32_t> id(tokens), slot(tokens), chosen(tokens);
  for (uint32_t t = 0; t < tokens; t++) {
    id[t] = g_rng.below(3) == 0 ? -1 : (int32_t)g_rng.below(tokens);
    slot[t] = g_rng.below(4) == 0 ? -1 : (int32_t)(tokens - 1 - t);
    chosen[t] = (int32_t)g_rng.below(tokens);
  }
  std::vector<uint32_t> pos(tokens);
  for (uint32_t t = 0; t < tokens; t++) pos[t] = g_rng.below(3);
  buffer<int32_t> did, dslot, dchosen, kept(3 * (size_t)tokens);
  buffer<uint32_t> dpos;
  did.put(id), dslot.put(slot), dchosen.put(chosen), dpos.put(pos);
  for (uint32_t first : {0u, tokens / 3}) { /* a table of all ids, and of some from `first` on, the first row's being that one's */
    const uint32_t count = first ? tokens / 2 : tokens;
    y.poison(), kept.poison();
    CUDA_OK(mm_cu_embed(y.p, db.p, {did.p, dslot.p, dchosen.p, first, count, dpos.p, kept.p, 3}, tokens, width, 0));
    bool same = true;
    const auto got = y.get();
    const auto ids = kept.get();
    std::vector<int32_t> want(ids.size(), -1); /* poison */
    for (uint32_t t = 0; t < tokens; t++) {
      if (slot[t] >= 0) want[3 * (size_t)slot[t] + pos[t]] = id[t] < 0 ? chosen[slot[t]] : id[t];
      const int32_t of = slot[t] < 0 ? -1 : id[t] < 0 ? chosen[slot[t]] : id[t];
      const bool there = of >= (int32_t)first && of < (int32_t)(first + count);
      for (uint32_t i = 0; i < width; i++)
        same &= to_float(got[(size_t)t * width + i]) == (there ? to_float(b[(size_t)(of - (int32_t)first) * width + i]) : 0.0f);
    }
    report_true("embed T=" + std::to_string(tokens) + ", ids from " + std::to_string(first), same && ids == want);
  }
}

/* Sums over the inputs of a product in the order of its rows, twice over: the very numbers, since squares of bf16 are doubles and are added
 * one by one. lead 1: all rows but those of slot -1, or picked ones; else experts' sorted pairs, some without any. */
static void check_sums(uint32_t lead, uint32_t rows, uint32_t k, bool picks) {
  if (left_out(10.0 * lead * rows * k)) return;
  const uint32_t each = lead > 1 && picks ? 3 : 1, count = lead > 1 ? 2 * rows : rows;
  const auto x = random_bf16((size_t)count * k, 3);
  std::vector<uint32_t> pick(count), offset(lead + 1);
  std::vector<int32_t> slot(rows);
  for (auto &p : pick) p = g_rng.below(count * each);
  for (auto &s : slot) s = g_rng.below(4) == 0 ? -1 : (int32_t)g_rng.below(9);
  for (uint32_t e = 1; e < lead; e++) offset[e] = e % 3 ? g_rng.below(count) : 0;
  std::sort(offset.begin(), offset.end());
  offset[lead] = count;
  std::vector<double> square((size_t)lead * k, 0.5);
  std::vector<float> amax(square.size());
  std::vector<unsigned long long> seen(lead, 7);
  buffer<__nv_bfloat16> dx;
  buffer<uint32_t> dpick, doffset;
  buffer<int32_t> dslot;
  buffer<double> dsquare;
  buffer<float> damax;
  buffer<unsigned long long> dseen;
  dx.put(x), dpick.put(pick), doffset.put(offset), dslot.put(slot), dsquare.put(square), damax.put(amax), dseen.put(seen);
  const bool slots = lead == 1 && !picks;
  const mm_cu_given in = {dx.p, picks ? dpick.p : nullptr, each, slots ? dslot.p : nullptr, lead > 1 ? doffset.p : nullptr, rows};
  for (int again = 0; again < 2; again++) {
    CUDA_OK(mm_cu_add_inputs({dsquare.p, damax.p, dseen.p, lead, k}, in, 0));
    for (uint32_t e = 0; e < lead; e++) {
      for (uint32_t i = lead > 1 ? offset[e] : 0; i < (lead > 1 ? offset[e + 1] : rows); i++) {
        const uint32_t row = picks ? pick[i] / each : i;
        if (slots && slot[row] < 0) continue;
        seen[e]++;
        for (uint32_t c = 0; c < k; c++) {
          const float v = to_float(x[(size_t)row * k + c]);
          square[(size_t)e * k + c] += (double)v * (double)v;
          amax[(size_t)e * k + c] = std::max(amax[(size_t)e * k + c], fabsf(v));
        }
      }
    }
  }
  report_true("sums of inputs: " + std::to_string(lead) + " matrices, " + std::to_string(rows) + " rows of " + std::to_string(k) +
                  (picks ? ", picked" : ""),
              dsquare.get() == square && damax.get() == amax && dseen.get() == seen);
}

void test_rows() {
  for (bool picks : {false, true}) {
    check_sums(1, 1, 256, picks);
    check_sums(1, 513, 3072, picks);
    check_sums(8, 37, 200, picks);
    check_sums(256, 64, 1536, picks);
  }
  check_row_kernels(1, 3072);
  check_row_kernels(3, 6144);
  check_row_kernels(5, 8192);
  check_row_kernels(17, 256);
  check_row_kernels(2, 16384);
  check_row_kernels(131, 6144); /* half the threads */
  check_row_kernels(129, 8192);
}
