/* Products of MXFP8 rows with MXFP8 weights as codes (gemm_mx.cuh), and the rows' encoding, against doubles. Rows have scales that stay,
 * that change within 128 columns, and that fall farther than sums in their unit can follow. */
#include <string.h>

#include <algorithm>

#include "tests/ops/gpu.h"

namespace {

const mm_cu_rounding kHow = {MM_ACT_MXFP8, 0};

/* The scale of 32 columns of a row by kind: 0 one; 1 from column to column within 2^±9; 2 falls of 2^70 and more; 3 zeros; 4 rare zeros. */
float size_of(uint32_t kind, uint32_t group) {
  switch (kind) {
    case 1: return (float)exp2((double)g_rng.below(19) - 9);
    case 2: return group % 7 == 1 ? 0x1p40f : group % 7 == 4 ? 0x1p-35f : 1;
    case 3: return 0;
    case 4: return g_rng.below(5) ? 1 : 0;
    default: return 1;
  }
}

std::vector<__nv_bfloat16> rows_of_kinds(uint32_t rows, uint32_t k, uint32_t kinds) {
  auto x = random_bf16((size_t)rows * k);
  for (uint32_t r = 0; r < rows; r++) {
    const uint32_t kind = kinds ? r % 5 : 0;
    for (uint32_t g = 0; g < k / 32; g++) {
      const float f = size_of(kind, g);
      for (uint32_t i = 0; i < 32; i++) x[(size_t)r * k + g * 32 + i] = __float2bfloat16(to_float(x[(size_t)r * k + g * 32 + i]) * f);
    }
  }
  return x;
}

/* The numbers that codes and scale words on the device stand for. */
std::vector<double> decoded(const code_buffers &c, uint32_t k) {
  const auto code = c.code.get();
  const auto scale = c.scale.get();
  std::vector<double> to((size_t)c.d.rows * k);
  for (uint32_t r = 0; r < c.d.rows; r++) {
    for (uint32_t j = 0; j < k; j++) {
      uint32_t word;
      memcpy(&word, &scale[(size_t)(j / 128) * c.d.scale_pitch + r], 4);
      to[(size_t)r * k + j] = ldexp(e4m3(code[(size_t)r * c.d.pitch + j]), (int)(word >> j % 128 / 32 * 8 & 0xff) - 127);
    }
  }
  return to;
}

/* Each number is that of quant/activation.c, or half a step of 2^-9 under the scale of its 128 columns off, which is 2^4 of its own at
 * most: 2^-6 where the largest of its 32 columns is more than 224. */
void check_encode(uint32_t rows, uint32_t k) {
  const auto x = rows_of_kinds(rows * 2, k, 1);
  std::vector<uint32_t> pick;
  for (uint32_t r = 0; r < rows; r++) pick.push_back(2 * r + g_rng.below(2));
  buffer<__nv_bfloat16> dx;
  buffer<uint32_t> dpick;
  dx.put(x), dpick.put(pick);
  code_buffers to(rows, k);
  CUDA_OK(mm_cu_encode(to.d, {dx.p, k, dpick.p}, kHow, 0));
  const auto got = decoded(to, k);
  bool near = true;
  uint32_t others = 0;
  for (uint32_t r = 0; r < rows; r++) {
    std::vector<float> want;
    for (uint32_t j = 0; j < k; j++) want.push_back(to_float(x[(size_t)pick[r] * k + j]));
    std::vector<float> most(k / 32);
    for (uint32_t j = 0; j < k; j++) most[j / 32] = std::max(most[j / 32], fabsf(want[j]));
    round_row_as(kHow, want.data(), k);
    for (uint32_t j = 0; j < k; j++) {
      const double off = fabs(got[(size_t)r * k + j] - want[j]);
      near &= off <= most[j / 32] * (0x1p-6 / 224), others += off > 0;
    }
  }
  char what[120];
  snprintf(what, sizeof what, "mx encoded, %u rows of %u: within 7e-5; others %u of %u, fewer than a hundredth", rows, k, others, rows * k);
  report_true(what, near && others * 100 < rows * k);
}

/* In every fifth row each seventh 32 columns become zeros under a scale of 2^73: sums that hold nothing else must keep what comes after. */
void raise_zeros(code_buffers *c, uint32_t k) {
  auto code = c->code.get();
  auto scale = c->scale.get();
  for (uint32_t r = 2; r < c->d.rows; r += 5) {
    for (uint32_t g = 1; g < k / 32; g += 7) {
      uint8_t *word = reinterpret_cast<uint8_t *>(&scale[(size_t)(g / 4) * c->d.scale_pitch + r]);
      word[g % 4] = 200;
      memset(&code[(size_t)r * c->d.pitch + g * 32], 0, 32);
    }
  }
  c->code.put(code), c->scale.put(scale);
}

/* Row by row, relative to the root of the squares of their terms. */
void check_product(uint32_t tokens, uint32_t n, uint32_t k, bool wide, bool kinds) {
  if (left_out((double)tokens * n * k)) return;
  test_weight w;
  random_weight(&w, MM_CU_E4M3, MM_CU_MX, 1, n, k);
  w.d.rounding = kHow;
  if (!takes_here(MM_CU_GEMM_MX, w.d)) return; /* not of this device */
  buffer<__nv_bfloat16> dx, y((size_t)tokens * n);
  buffer<float> y32((size_t)tokens * n);
  dx.put(rows_of_kinds(tokens, k, kinds));
  code_buffers codes(tokens, k);
  CUDA_OK(mm_cu_encode(codes.d, {dx.p, k, nullptr}, kHow, 0));
  if (kinds) raise_zeros(&codes, k);
  CUDA_OK(mm_cu_gemm_mx(w.d, {codes.d, wide ? nullptr : y.p, wide ? y32.p : nullptr}, 0));
  const auto x = decoded(codes, k);
  std::vector<float> got;
  if (wide) {
    got = y32.get();
  } else {
    for (auto v : y.get()) got.push_back(to_float(v));
  }
  std::vector<double> off(tokens);
  parallel(tokens, [&](uint32_t t) {
    double all = 0, wrong = 0;
    for (uint32_t i = 0; i < n; i++) {
      double sum = 0, squares = 0;
      for (uint32_t j = 0; j < k; j++) {
        const double term = x[(size_t)t * k + j] * w.w[(size_t)i * k + j];
        sum += term, squares += term * term;
      }
      const double d = got[(size_t)t * n + i] - sum;
      wrong += d * d, all += std::max(squares, sum * sum); /* of few columns some are far above the root of their squares */
    }
    off[t] = wrong == 0 ? 0 : std::isfinite(wrong) ? sqrt(wrong / all) : INFINITY;
  });
  /* A single sum of codes is off by 2e-3 at most (test_experts.cu, SHORT_SUM), its bf16 by 2^-9 more; of many by half of that. */
  const double limit = n < 64 ? (wide ? 2e-3 : 4e-3) : wide ? 1e-3 : 3e-3;
  char what[160];
  snprintf(what, sizeof what, "mx product T=%-4u n=%-5u k=%-5u%s%s, its worst row", tokens, n, k, wide ? " f32" : "",
           kinds ? ", scales of all kinds" : "");
  report(what, *std::max_element(off.begin(), off.end()), limit);
}

/* A row's bits, alone with rows whose scales stay or with others. */
void check_bits(uint32_t n, uint32_t k) {
  test_weight w;
  random_weight(&w, MM_CU_E4M3, MM_CU_MX, 1, n, k);
  w.d.rounding = kHow;
  if (!takes_here(MM_CU_GEMM_MX, w.d) || left_out(900.0 * n * k)) return;
  std::vector<float> first[5];
  bool same = true;
  const auto mine = rows_of_kinds(5, k, 1);
  for (uint32_t turn = 0; turn < 10; turn++) {
    const uint32_t tokens = turn == 0 ? 5 : 17 + g_rng.below(600), at = g_rng.below(tokens - 4);
    auto x = rows_of_kinds(tokens, k, turn % 2);
    std::copy(mine.begin(), mine.end(), x.begin() + (size_t)at * k);
    buffer<__nv_bfloat16> dx;
    buffer<float> y((size_t)tokens * n);
    dx.put(x);
    code_buffers codes(tokens, k);
    CUDA_OK(mm_cu_encode(codes.d, {dx.p, k, nullptr}, kHow, 0));
    CUDA_OK(mm_cu_gemm_mx(w.d, {codes.d, nullptr, y.p}, 0));
    const auto got = y.get();
    for (uint32_t r = 0; r < 5; r++) {
      const std::vector<float> row(got.begin() + (ptrdiff_t)((size_t)(at + r) * n), got.begin() + (ptrdiff_t)((size_t)(at + r + 1) * n));
      if (turn == 0) first[r] = row;
      same &= !memcmp(row.data(), first[r].data(), n * sizeof(float));
    }
  }
  char what[120];
  snprintf(what, sizeof what, "mx product n=%u k=%u: a row's bits among 0 to 616 others", n, k);
  report_true(what, same);
}

}  // namespace

void test_mx() {
  for (uint32_t k : {128u, 640u, 6144u}) check_encode(60, k);
  for (bool kinds : {false, true}) {
    for (uint32_t tokens : {1u, 17u, 64u, 65u, 129u, 200u, 256u, 257u, 700u}) {
      check_product(tokens, 264, 1024, tokens % 2, kinds);
      check_product(tokens, 1 + g_rng.below(300), 128 * (1 + g_rng.below(12)), false, kinds);
    }
    check_product(2100, 520, 256, false, kinds), check_product(90, 1000, 6144, true, kinds);
  }
  check_bits(192, 1280);
}
