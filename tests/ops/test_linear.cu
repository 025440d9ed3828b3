/* Dense products against a double product of the same numbers, every scheme, odd shapes among them. */
#include "runtime/cuda/core/joined.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/weight.cuh"
#include "tests/ops/gpu.h"

struct scheme_case {
  const char *name;
  mm_cu_code code;
  mm_cu_scale kind;
  uint32_t cell_n, cell_k;
  double limit; /* of the result before its own rounding to bf16 */
};

/* bf16 results carry 2^-9 each, about 1.7e-3 in norm; FINE rounds every scaled weight to bf16 too. */
static const scheme_case kSchemes[] = {
    {"bf16", MM_CU_BF16, MM_CU_PLAIN, 0, 0, 3e-3},
    {"block_fp8 128x128", MM_CU_E4M3, MM_CU_COARSE, 128, 128, 3e-3},
    {"block_fp8 64x64", MM_CU_E4M3, MM_CU_COARSE, 64, 64, 3e-3},
    {"block_fp8 8x128", MM_CU_E4M3, MM_CU_COARSE, 8, 128, 3e-3},
    {"block_fp8 64x32", MM_CU_E4M3, MM_CU_FINE, 64, 32, 4e-3},
    {"block_fp8 8x8", MM_CU_E4M3, MM_CU_FINE, 8, 8, 4e-3},
    {"channel_fp8", MM_CU_E4M3, MM_CU_COARSE, 1, 0, 3e-3},
    {"tensor_wise_fp8", MM_CU_E4M3, MM_CU_COARSE, 0, 0, 3e-3},
    {"int4 g128", MM_CU_INT4, MM_CU_COARSE, 1, 128, 3e-3},
    {"int4 channel", MM_CU_INT4, MM_CU_COARSE, 1, 0, 3e-3},
    {"int4 g32", MM_CU_INT4, MM_CU_FINE, 1, 32, 4e-3},
    {"nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16, 3e-3},
    {"mxfp4", MM_CU_E2M1, MM_CU_MX, 1, 32, 3e-3},
    {"mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32, 3e-3},
};

/* Error of products of weights times their scales in bf16, relative to the root of the squares of their terms: numbers of one scale
 * have eight significands, of whose roundings that depends. One in 80 scales between 0.01 and 0.03 takes results in bf16 beyond 3e-3. */
static double off_as_bf16(const test_weight &w, bool wide) {
  double off = 0, all = 0;
  for (float v : w.w) off += pow(to_float(__float2bfloat16(v)) - (double)v, 2), all += (double)v * v;
  return sqrt(off / all + (wide ? 0 : 1.7e-3 * 1.7e-3));
}

static void check_linear(const scheme_case &c, uint32_t tokens, uint32_t n, uint32_t k, bool wide, bool gather, bool few = false) {
  if (left_out((double)tokens * n * k)) return;
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k);
  if (few && !few_linear(w.d, tokens)) return; /* not of this device */
  const uint32_t rows = gather ? tokens * 3 : tokens;
  auto x = random_bf16((size_t)rows * k);
  std::vector<uint32_t> pick(tokens);
  for (uint32_t t = 0; t < tokens; t++) pick[t] = gather ? t * 3 + g_rng.below(3) : t;
  buffer<__nv_bfloat16> dx, y((size_t)tokens * n);
  buffer<float> y32((size_t)tokens * n);
  buffer<uint32_t> dpick;
  dx.put(x), dpick.put(pick);
  mm_cu_linear a = {dx.p, gather ? dpick.p : nullptr, wide ? nullptr : y.p, wide ? y32.p : nullptr, tokens};
  CUDA_OK((few ? few_linear(w.d, tokens) : plain_linear(w.d, tokens))(w.d, a, 0));
  std::vector<double> want((size_t)tokens * n), size((size_t)tokens * n), got;
  parallel(tokens, [&](uint32_t t) {
    for (uint32_t i = 0; i < n; i++) {
      double sum = 0, squares = 0;
      const float *row = &w.w[(size_t)i * k];
      for (uint32_t j = 0; j < k; j++) {
        const double term = (double)to_float(x[(size_t)pick[t] * k + j]) * row[j];
        sum += term, squares += term * term;
      }
      want[(size_t)t * n + i] = sum, size[(size_t)t * n + i] = sqrt(squares);
    }
  });
  if (wide) {
    for (auto v : y32.get()) got.push_back(v);
  } else {
    for (auto v : y.get()) got.push_back(to_float(v));
  }
  char what[160];
  snprintf(what, sizeof what, "linear %-18s T=%-3u n=%-5u k=%-5u%s%s%s", c.name, tokens, n, k, few ? " few" : "", wide ? " f32" : "",
           gather ? " gather" : "");
  const bool widened = !few && tokens > MM_CU_DECODE_ROWS && c.kind == MM_CU_COARSE;
  const double limit = widened ? std::max(c.limit, 1.1 * off_as_bf16(w, wide)) : c.limit;
  report(what, relative_error(want, got, &size), wide && (few || tokens <= MM_CU_DECODE_ROWS) && c.kind != MM_CU_FINE ? 1e-5 : limit);
}

/* Codes and scales bit for bit, and the numbers they stand for in bf16. Rows hold groups of zeros, of tiny and of large numbers. */
static void check_encode(uint32_t rows, uint32_t k, const mm_cu_rounding &how) {
  auto x = random_bf16((size_t)rows * 2 * k);
  for (size_t i = 0; i < x.size(); i++) {
    const size_t kind = i / 128 % 5;
    x[i] = __float2bfloat16(to_float(x[i]) * (kind == 1 ? 0.0f : kind == 2 ? 1e-14f : kind == 3 ? 3e4f : 1.0f));
  }
  std::vector<uint32_t> pick(rows);
  std::vector<float> picked, scale;
  for (uint32_t r = 0; r < rows; r++) {
    pick[r] = 2 * r + g_rng.below(2);
    if (how.fixed > 0)
      x[(size_t)pick[r] * k + g_rng.below(k)] = __float2bfloat16(r % 3 == 0 ? INFINITY : r % 3 == 1 ? -INFINITY : -3.3e38f);
    for (uint32_t j = 0; j < k; j++) picked.push_back(to_float(x[(size_t)pick[r] * k + j]));
  }
  auto want = picked;
  for (uint32_t r = 0; r < rows; r++) {
    std::vector<float> of_row;
    round_row_to(how, &want[(size_t)r * k], k, &of_row);
    for (uint32_t g = 0; g < (k + 127) / 128; g++) scale.push_back(of_row[of_row.size() > 1 ? g : 0]);
  }
  buffer<__nv_bfloat16> dx, y((size_t)rows * k);
  buffer<uint32_t> dpick;
  dx.put(x), dpick.put(pick);
  code_buffers to(rows, k);
  const mm_cu_inputs in = {dx.p, k, dpick.p};
  CUDA_OK(mm_cu_encode(to.d, in, how, 0));
  CUDA_OK(mm_cu_round(y.p, rows, in, how, 0));
  const auto code = to.code.get();
  const auto got_scale = to.scale.get();
  const auto got = y.get();
  bool codes = true, scales = true, numbers = true;
  for (uint32_t r = 0; r < rows; r++) {
    for (uint32_t j = 0; j < to.d.pitch; j++) {
      const float s = got_scale[(size_t)(j / 128) * to.d.scale_pitch + r];
      scales &= s == scale[(size_t)r * (to.d.pitch / 128) + j / 128];
      codes &= (float)e4m3(code[(size_t)r * to.d.pitch + j]) * s == (j < k ? want[(size_t)r * k + j] : 0.0f);
      if (j < k) numbers &= to_float(got[(size_t)r * k + j]) == to_float(__float2bfloat16(want[(size_t)r * k + j]));
    }
  }
  char what[100];
  snprintf(what, sizeof what, "rounded inputs of kind %d, %u rows of %u: scales, codes, as bf16", (int)how.kind, rows, k);
  report_true(what, scales && codes && numbers);
}

static bool same_or_none(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/* Every kind of rounding against quant/activation.c, bit for bit in bf16; in place, as experts do it, and of rows from anywhere. Every
 * other row has one number that is infinite, almost so, or none. */
static void check_round(mm_act_quant kind, float fixed, uint32_t rows, uint32_t k) {
  auto x = random_bf16((size_t)rows * k);
  for (size_t i = 0; i < x.size(); i++) x[i] = __float2bfloat16(to_float(x[i]) * (float)exp2((double)(i / 16 % 11) - 8));
  const float strange[] = {INFINITY, -INFINITY, 3.3e38f, -3.3e38f, NAN};
  for (uint32_t r = 1; r < rows; r += 2) x[(size_t)r * k + g_rng.below(k)] = __float2bfloat16(strange[r / 2 % 5]);
  std::vector<float> want;
  for (uint32_t r = 0; r < rows; r++) {
    std::vector<float> row;
    for (uint32_t j = 0; j < k; j++) row.push_back(to_float(x[(size_t)(rows - 1 - r) * k + j]));
    round_row_as({kind, fixed}, row.data(), k);
    want.insert(want.end(), row.begin(), row.end());
  }
  std::vector<uint32_t> turned;
  for (uint32_t r = 0; r < rows; r++) turned.push_back(rows - 1 - r);
  buffer<__nv_bfloat16> dx, y((size_t)rows * k);
  buffer<uint32_t> pick;
  dx.put(x), pick.put(turned);
  CUDA_OK(mm_cu_round(y.p, rows, {dx.p, k, pick.p}, {kind, fixed}, 0));
  CUDA_OK(mm_cu_round(dx.p, rows, {dx.p, k, nullptr}, {kind, fixed}, 0));
  const auto got = y.get(), in_place = dx.get();
  bool same = true;
  for (uint32_t r = 0; r < rows; r++) {
    for (uint32_t j = 0; j < k; j++)
      same &= same_or_none(to_float(got[(size_t)r * k + j]), want[(size_t)r * k + j]) &&
              same_or_none(to_float(in_place[(size_t)(rows - 1 - r) * k + j]), want[(size_t)r * k + j]);
  }
  char what[100];
  snprintf(what, sizeof what, "inputs of kind %d rounded, scale %g, %u rows of %u", (int)kind, (double)fixed, rows, k);
  report_true(what, same);
}

/* Products of rounded rows: f32 results carry the tensor cores' short sums of 128 columns. */
static void check_rounded(uint32_t tokens, uint32_t n, uint32_t k, uint32_t cell_n, uint32_t cell_k, bool wide, bool decode_linear = false,
                          const mm_cu_rounding &how = {MM_ACT_FP8_GROUP, 0}) {
  if (left_out((double)tokens * n * k)) return;
  test_weight w;
  random_weight(&w, MM_CU_E4M3, MM_CU_COARSE, 1, n, k, cell_n, cell_k);
  w.d.rounding = how;
  const bool by_mma = takes_here(MM_CU_GEMM_CODES, w.d) && !decode_linear;
  if (!takes_here(MM_CU_GEMM_FP8, w.d) && !by_mma) return; /* not of this device */
  auto x = random_bf16((size_t)tokens * k);
  std::vector<float> rounded;
  for (auto v : x) rounded.push_back(to_float(v));
  parallel(tokens, [&](uint32_t t) { round_row_to(how, &rounded[(size_t)t * k], k); });
  buffer<__nv_bfloat16> dx, y((size_t)tokens * n);
  buffer<float> y32((size_t)tokens * n);
  dx.put(x);
  code_buffers codes(tokens, k);
  CUDA_OK(mm_cu_encode(codes.d, {dx.p, k, nullptr}, how, 0));
  const auto product = decode_linear ? mm_cu_small_batch_fp8 : by_mma ? mm_cu_gemm_codes : mm_cu_gemm_fp8;
  CUDA_OK(product(w.d, {codes.d, wide ? nullptr : y.p, wide ? y32.p : nullptr}, 0));
  std::vector<double> want((size_t)tokens * n), got;
  parallel(tokens, [&](uint32_t t) {
    for (uint32_t i = 0; i < n; i++) {
      double sum = 0;
      for (uint32_t j = 0; j < k; j++) sum += (double)rounded[(size_t)t * k + j] * w.w[(size_t)i * k + j];
      want[(size_t)t * n + i] = sum;
    }
  });
  if (wide) {
    for (auto v : y32.get()) got.push_back(v);
  } else {
    for (auto v : y.get()) got.push_back(to_float(v));
  }
  char what[160];
  snprintf(what, sizeof what, "linear rounded %ux%u, kind %d, T=%-4u n=%-5u k=%-5u%s%s", cell_n, cell_k, (int)how.kind, tokens, n, k,
           decode_linear ? " decode_linear"
           : by_mma      ? " mma.sync"
                         : "",
           wide ? " f32" : "");
  report(what, relative_error(want, got), wide ? 1e-3 : 3e-3);
}

/* No cluster of blocks holds such rows: nothing is launched. */
static void check_too_long(const scheme_case &c, uint32_t tokens, uint32_t k) {
  if (left_out(8.0 * k * 100)) return;
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, 8, k, c.cell_n, c.cell_k);
  buffer<__nv_bfloat16> x((size_t)tokens * k), y((size_t)tokens * 8);
  report_true(std::string("linear ") + c.name + ", rows too long for the kernel of a few: refused",
              mm_cu_small_batch_widened(w.d, {x.p, nullptr, y.p, nullptr, tokens}, 0) == cudaErrorNotSupported);
}

static void check_rounded_too_long(uint32_t tokens, uint32_t k) {
  if (left_out(8.0 * k * 100)) return;
  test_weight w;
  random_weight(&w, MM_CU_E4M3, MM_CU_COARSE, 1, 8, k, 128, 128);
  w.d.rounding.kind = MM_ACT_FP8_GROUP;
  code_buffers codes(tokens, k);
  buffer<__nv_bfloat16> y((size_t)tokens * 8);
  report_true("linear rounded, rows too long for the kernel of a few: refused",
              mm_cu_small_batch_fp8(w.d, {codes.d, y.p, nullptr}, 0) == cudaErrorNotSupported);
}

/* A single token's kernel rounds its own inputs. */
static void check_one_rounded(const scheme_case &c, uint32_t n, uint32_t k) {
  if (left_out((double)n * k)) return;
  if (!hopper()) return; /* elsewhere inputs come rounded already */
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k);
  w.d.rounding.kind = MM_ACT_FP8_GROUP;
  auto x = random_bf16(k);
  std::vector<float> plain;
  for (uint32_t j = 0; j < k; j++) {
    x[j] = __float2bfloat16(to_float(x[j]) * (float)exp2((double)(j / 128 % 7) * 4 - 12));
    plain.push_back(to_float(x[j]));
  }
  auto rounded = plain;
  round_row_to(w.d.rounding, rounded.data(), k);
  buffer<__nv_bfloat16> dx;
  buffer<float> y(n);
  dx.put(x);
  CUDA_OK(mm_cu_one(w.d, {dx.p, nullptr, nullptr, y.p, 1}, 0));
  std::vector<double> want(n), got;
  for (uint32_t i = 0; i < n; i++) {
    for (uint32_t j = 0; j < k; j++) want[i] += (double)rounded[j] * w.w[(size_t)i * k + j];
  }
  for (auto v : y.get()) got.push_back(v);
  char what[120];
  snprintf(what, sizeof what, "linear %-18s T=1   n=%-5u k=%-5u inputs rounded in the kernel", c.name, n, k);
  report(what, mm_cu_rounds_inside(MM_CU_ONE, &w.d) ? relative_error(want, got) : INFINITY, 1e-5);
}

/* The same holds for every other way that a scheme of such weights has: the bits are those of inputs that a launch rounded. Groups of
 * zeros, of tiny and of large numbers among them. */
static void check_one_rounded_as(const scheme_case &c, mm_cu_rounding how, uint32_t n, uint32_t k) {
  if (left_out((double)n * k)) return;
  if (!hopper()) return;
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k);
  auto x = random_bf16(k);
  std::vector<float> rounded;
  for (uint32_t j = 0; j < k; j++) {
    const uint32_t kind = j / 16 % 13;
    x[j] = __float2bfloat16(to_float(x[j]) * (kind == 5 ? 0.0f : kind == 9 ? 1e-14f : (float)exp2((double)kind - 8)));
    rounded.push_back(to_float(x[j]));
  }
  round_row_as(how, rounded.data(), k);
  buffer<__nv_bfloat16> dx, before(k);
  buffer<float> y(n), y_before(n);
  dx.put(x);
  CUDA_OK(mm_cu_round(before.p, 1, {dx.p, k, nullptr}, how, 0));
  CUDA_OK(mm_cu_one(w.d, {before.p, nullptr, nullptr, y_before.p, 1}, 0));
  w.d.rounding = how;
  CUDA_OK(mm_cu_one(w.d, {dx.p, nullptr, nullptr, y.p, 1}, 0));
  /* int4 is multiplied as code + 8, and 8 times the activations taken off a group's sum: what that is off grows with their sum */
  std::vector<double> want(n), size(n), got;
  const auto scale = w.scale.get();
  const bool offset = c.code == MM_CU_INT4 && c.kind == MM_CU_COARSE;
  for (uint32_t i = 0; i < n; i++) {
    double squares = 0;
    for (uint32_t first = 0; first < k; first += 128) {
      double sum = 0;
      for (uint32_t j = first; j < std::min(first + 128, k); j++) {
        const double term = (double)rounded[j] * w.w[(size_t)i * k + j];
        want[i] += term, squares += term * term, sum += rounded[j];
      }
      if (offset) squares += pow(8 * sum * scale[i * w.d.scale_pitch + (first >> w.d.cell_k_log2)], 2);
    }
    size[i] = offset ? sqrt(squares) : want[i];
  }
  const auto numbers = y.get(), launched = y_before.get();
  for (auto v : numbers) got.push_back(v);
  char what[160];
  snprintf(what, sizeof what, "linear %-18s T=1   n=%-5u k=%-5u inputs of kind %d, scale %g, rounded in the kernel", c.name, n, k,
           (int)how.kind, (double)how.fixed);
  report(what, mm_cu_rounds_inside(MM_CU_ONE, &w.d) ? relative_error(want, got, &size) : INFINITY, c.kind == MM_CU_FINE ? c.limit : 1e-5);
  report_true(std::string(what) + ": a launch's bits", !memcmp(numbers.data(), launched.data(), n * sizeof numbers[0]));
}

/* Pieces of 32 codes by each way of widening them. */
template <mm_cu_code C>
__global__ static void widen_pieces(uint32_t *half, uint32_t *wide, const uint4 *piece) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, w[4] = {piece[i].x, piece[i].y, piece[i].z, piece[i].w};
  for (int j = 0; j < 4; j++) codec<C>::halves(half + i * 16 + j * 4, w[j]);
  uint32_t all[16];
  codec<C>::widen(all, piece[i]);
  for (int j = 0; j < 16; j++) wide[i * 16 + j] = all[j];
}
/* Every code at every place, bit for bit. */
template <mm_cu_code C>
static void check_widening(const char *name) {
  constexpr bool kE2m1Codes = C == MM_CU_E2M1;
  const uint32_t pieces = 2048;
  std::vector<uint8_t> bytes(pieces * 16, 0), code(pieces * 32);
  for (uint32_t i = 0; i < pieces * 32; i++) {
    code[i] = (uint8_t)((i / 32 + i) % 16);
    put_nibble(bytes.data() + i / 32 * 16, i % 32, code[i], kE2m1Codes);
  }
  buffer<uint8_t> in;
  buffer<uint32_t> half(pieces * 16), wide(pieces * 16);
  in.put(bytes);
  widen_pieces<C><<<pieces / 128, 128>>>(half.p, wide.p, reinterpret_cast<const uint4 *>(in.p));
  CUDA_OK(cudaGetLastError());
  const auto h = half.get(), b = wide.get();
  bool same = true;
  for (uint32_t i = 0; i < pieces * 32; i++) {
    const uint32_t shift = i % 2 * 16, bits = b[i / 2] >> shift << 16;
    const double value = kE2m1Codes ? (code[i] & 8 ? -1 : 1) * kE2m1[code[i] & 7] : (double)code[i] - 8;
    float widened;
    memcpy(&widened, &bits, 4);
    auto f16 = [&](uint32_t v) { return (double)__half2float(__ushort_as_half((unsigned short)(v >> shift))); };
    same &= f16(h[i / 2]) == ldexp(value, kE2m1Codes ? -14 : 0) && widened == (float)ldexp(value, kE2m1Codes ? -126 : 0);
  }
  report_true(std::string("codes widened exactly: ") + name, same);
}

/* A row's result must not depend on the step's other rows, nor on their number as long as the same kernel takes them. */
static void check_rows_independent(const scheme_case &c) {
  if (left_out(1e9)) return;
  const uint32_t n = 520, k = 3072;
  const struct {
    uint32_t least, most;
    bool few;
  } buckets[] = {{1, 1, false}, {2, 8, false},  {9, MM_CU_DECODE_ROWS, false}, {1, 8, true},
                 {9, 16, true}, {17, 32, true}, {33, MM_CU_FEW, true},         {MM_CU_DECODE_ROWS + 1, 700, false}};
  test_weight w;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k);
  for (auto &b : buckets) {
    if (b.few && !few_linear(w.d, b.most)) continue;
    const bool same = same_among_others(b.least, b.most, k, [&](const __nv_bfloat16 *x, uint32_t tokens) {
      buffer<float> y((size_t)tokens * n);
      CUDA_OK((b.few ? few_linear(w.d, b.most) : plain_linear(w.d, b.most))(w.d, {x, nullptr, nullptr, y.p, tokens}, 0));
      return y.get();
    });
    char what[120];
    snprintf(what, sizeof what, "linear %-18s T=%u-%u%s: a row's bits whatever lies beside it", c.name, b.least, b.most,
             b.few ? ", few" : "");
    report_true(what, same);
  }
}

/* The same of rounded rows: alone, then up to 8, 16, 32 and 64, and of all of more than 16 by the kernel of many. */
static void check_rounded_independent() {
  if (left_out(1e9)) return;
  const uint32_t n = 520, k = 3072, buckets[][2] = {{1, 8}, {9, 16}, {17, 32}, {33, MM_CU_FEW}, {MM_CU_DECODE_ROWS + 1, 700}};
  test_weight w;
  random_weight(&w, MM_CU_E4M3, MM_CU_COARSE, 1, n, k, 128, 128);
  w.d.rounding.kind = MM_ACT_FP8_GROUP;
  const bool by_mma = takes_here(MM_CU_GEMM_CODES, w.d);
  if (!takes_here(MM_CU_GEMM_FP8, w.d) && !by_mma) return;
  for (auto &b : buckets) {
    if (by_mma && b[1] <= MM_CU_FEW) continue; /* widened there */
    const auto product = by_mma ? mm_cu_gemm_codes : b[1] > MM_CU_FEW ? mm_cu_gemm_fp8 : mm_cu_small_batch_fp8;
    const bool same = same_among_others(b[0], b[1], k, [&](const __nv_bfloat16 *x, uint32_t tokens) {
      code_buffers codes(tokens, k);
      buffer<float> y((size_t)tokens * n);
      CUDA_OK(mm_cu_encode(codes.d, {x, k, nullptr}, {MM_ACT_FP8_GROUP, 0}, 0));
      CUDA_OK(product(w.d, {codes.d, nullptr, y.p}, 0));
      return y.get();
    });
    char what[120];
    snprintf(what, sizeof what, "linear rounded, T=%u-%u: a row's bits whatever lies beside it", b[0], b[1]);
    report_true(what, same);
  }
}

static std::vector<double> product_of(const test_weight &w, const std::vector<__nv_bfloat16> &x) {
  std::vector<double> y(w.d.n);
  for (uint32_t i = 0; i < w.d.n; i++) {
    for (uint32_t j = 0; j < w.d.k; j++) y[i] += (double)to_float(x[j]) * w.w[(size_t)i * w.d.k + j];
  }
  return y;
}
static void report_row(const std::string &what, const scheme_case &c, const std::vector<double> &want, const buffer<__nv_bfloat16> &y,
                       double limit) {
  std::vector<double> got;
  for (auto v : y.get()) got.push_back(to_float(v));
  char shape[80];
  snprintf(shape, sizeof shape, " %-18s n=%zu", c.name, want.size());
  report("linear T=1, " + what + shape, relative_error(want, got), limit);
}

/* A single row: two weights in one launch; gates and up values with their activation; on top of what y holds. */
static void check_one_row(const scheme_case &c, uint32_t n, uint32_t m, uint32_t k) {
  if (left_out((double)(n + m) * k) || !hopper()) return;
  test_weight w, v;
  random_weight(&w, c.code, c.kind, 1, n, k, c.cell_n, c.cell_k), random_weight(&v, c.code, c.kind, 1, m, k, c.cell_n, c.cell_k);
  const auto x = random_bf16(k);
  buffer<__nv_bfloat16> dx, y(n), z(m), middle(n / 2), on;
  dx.put(x);
  const cudaError_t e = mm_cu_one_two({{w.d, v.d}, dx.p, {y.p, z.p}}, 0);
  const auto first = product_of(w, x), second = product_of(v, x);
  if (c.kind == MM_CU_FINE) {
    report_true(std::string("linear T=1, two of FINE scales: refused ") + c.name, e == cudaErrorNotSupported);
  } else {
    CUDA_OK(e);
    report_row("the first of two", c, first, y, c.limit), report_row("the second of two", c, second, z, c.limit);
  }
  for (bool narrow : {true, false}) { /* next to a pair of bf16, or of w's code */
    test_weight p, q;
    const mm_cu_code code = narrow ? MM_CU_BF16 : c.code;
    const mm_cu_scale kind = narrow ? MM_CU_PLAIN : c.kind;
    random_weight(&p, code, kind, 1, m, k, c.cell_n, c.cell_k), random_weight(&q, code, kind, 1, m / 4, k, c.cell_n, c.cell_k);
    buffer<__nv_bfloat16> a(n), b(m), d(m / 4);
    const mm_cu_three three = {w.d, a.p, {{p.d, q.d}, dx.p, {b.p, d.p}}};
    const cudaError_t joined = mm_cu_one_three(three, 0);
    if (!mm_cu_joins_three(three)) {
      const bool none = c.kind == MM_CU_FINE || (c.code == MM_CU_E2M1 && c.kind == MM_CU_MX);
      report_true(std::string("linear T=1, three: refused ") + c.name, none && joined == cudaErrorNotSupported);
      continue;
    }
    CUDA_OK(joined);
    report_row("the first of three", c, first, a, c.limit), report_row("the second of three", c, product_of(p, x), b, c.limit);
    report_row("the third of three", c, product_of(q, x), d, c.limit);
  }
  const mm_cu_activation act = {true, 1.702f, c.code == MM_CU_E4M3 ? 48.0f : 2.0f, 1};
  CUDA_OK(mm_cu_one_gated(w.d, {dx.p, middle.p, act}, 0));
  std::vector<double> gated;
  for (uint32_t i = 0; i < n / 2; i++) {
    const double l = act.limit, g = std::min(first[i], l), u = std::max(-l, std::min(first[n / 2 + i], l));
    gated.push_back((u + 1) * g / (1 + exp(-1.702 * g)));
  }
  report_row("gated", c, gated, middle, 8e-3);
  const auto before = random_bf16(m, 3);
  on.put(before);
  mm_cu_linear a = {dx.p, nullptr, on.p, nullptr, 1, true};
  CUDA_OK(mm_cu_one(v.d, a, 0));
  std::vector<double> sum = second;
  for (uint32_t i = 0; i < m; i++) sum[i] += to_float(before[i]);
  report_row("added", c, sum, on, c.limit);
}

static const mm_cu_rounding kCodeRoundings[] = {
    {MM_ACT_FP8_GROUP, 0}, {MM_ACT_FP8_TOKEN, 0}, {MM_ACT_FP8_TENSOR, 0}, {MM_ACT_FP8_TENSOR, 0.003f}};

void test_linear() {
  check_widening<MM_CU_INT4>("int4"), check_widening<MM_CU_E2M1>("e2m1");
  for (const auto &c : kSchemes) {
    check_linear(c, 1, 520, 1024, false, false);
    check_linear(c, 1, 133, c.cell_k == 128 ? 640 : 192, true, true);
    check_linear(c, 1, 3, 9216, true, false);
    check_linear(c, 1, 2050, 1024, true, false);
    check_linear(c, 5, 264, 3072, true, false);
    check_linear(c, 16, 133, c.cell_k == 128 ? 640 : 192, true, true);
    check_linear(c, 77, 200, c.cell_k == 128 ? 384 : 192, true, false);
    check_linear(c, 300, 264, 512, false, true);
  }
  for (const auto &c : kSchemes) { /* T, n and k: odd ones, lines that some blocks of a cluster lack, several tiles a cluster */
    for (uint32_t tokens : {2u, 8u, 9u, 16u, 31u, 33u, 64u}) {
      check_linear(c, tokens, 133, c.cell_k == 128 ? 640 : 192, true, true, true);
      check_linear(c, tokens, 520, 3072, tokens % 2 == 0, false, true);
    }
    check_linear(c, 3, 9000, 128, true, false, true);
    check_linear(c, 13, 20000, c.cell_k == 128 ? 640 : 192, true, true, true);
    check_linear(c, 64, 2304, 8192, true, false, true);
    check_linear(c, 7, 300, 16384, true, false, true);
    check_linear(c, 5, 1, 1000, true, true, true), check_linear(c, 33, 65, 24, true, false, true);
    check_linear(c, 12, 63, 200, true, false, true);
    check_linear(c, 40, 300, 36992, false, false), check_linear(c, 13, 40, 40960, false, false);
    check_too_long(c, 40, 36992), check_too_long(c, 13, 40960);
  }
  for (int i : {0, 1, 5, 8, 11, 12, 13})
    check_linear(kSchemes[i], 1, 264, 36992, true, false);                    /* the longest rows of a single token's core */
  for (int i : {0, 8}) check_linear(kSchemes[i], 1, 40000, 256, true, false); /* more fours a block than meet at once */
  for (int i : {1, 8, 11, 12, 13}) { /* several groups a block, every place of the ring used again */
    check_linear(kSchemes[i], 1, 9000, 2048, true, true);
    check_linear(kSchemes[i], 3, 9000, 2048, true, false);
    check_linear(kSchemes[i], 13, 2100, 3072, true, false);
  }
  check_linear(kSchemes[5], 3, 40, 24, true, false),
      check_linear(kSchemes[5], 1, 40, 24, true, false); /* a rank's share of a tiny expert */
  for (const auto &c : kSchemes) check_one_row(c, 514, 131, 1024), check_one_row(c, 40, 520, 3072);
  for (const auto &how : kCodeRoundings) check_encode(3, 24, how), check_encode(70, 1000, how), check_encode(5, 3072, how);
  for (int kind = MM_ACT_FP8_TENSOR; kind <= MM_ACT_MXFP8; kind++) {
    for (uint32_t k : {24u, 1000u, 3072u}) {
      check_round((mm_act_quant)kind, 0, 11, k);
      if (mm_act_formats[kind].fixed) check_round((mm_act_quant)kind, 0.003f, 11, k);
    }
  }
  for (int i : {1, 2, 6, 8, 11, 12, 13}) check_one_rounded(kSchemes[i], 300, 3072), check_one_rounded(kSchemes[i], 133, 640);
  const struct {
    int scheme;
    mm_cu_rounding how;
  } ways[] = {{3, {MM_ACT_FP8_TENSOR, 0.003f}}, {4, {MM_ACT_MXFP8, 0}},     {5, {MM_ACT_FP8_GROUP, 0}},       {6, {MM_ACT_FP8_TOKEN, 0}},
              {7, {MM_ACT_FP8_TENSOR, 0}},      {8, {MM_ACT_FP8_TOKEN, 0}}, {8, {MM_ACT_FP8_TENSOR, 0.003f}}, {9, {MM_ACT_INT8_TOKEN, 0}},
              {10, {MM_ACT_INT8_TOKEN, 0}},     {11, {MM_ACT_NVFP4, 0}},    {11, {MM_ACT_NVFP4, 0.003f}},     {12, {MM_ACT_MXFP4, 0}},
              {13, {MM_ACT_MXFP8, 0}}};
  for (const auto &way : ways) {
    for (uint32_t k : {24u, 1000u, 3072u, 36992u}) check_one_rounded_as(kSchemes[way.scheme], way.how, 133, k);
  }
  for (int i : {0, 1, 8, 11, 12, 13}) check_rows_independent(kSchemes[i]);
}

/* Products of codes of rounded rows. */
void test_codes() {
  for (bool wide : {false, true}) {
    for (const auto &how : kCodeRoundings) { /* scales of whole rows, of both or of one */
      for (uint32_t cell : {0u, 1u, 128u}) {
        if (how.kind == MM_ACT_FP8_GROUP && cell == 128) continue;
        const uint32_t cell_k = cell == 128 ? 128 : 0;
        check_rounded(2, 256, 128, cell, cell_k, wide, false, how), check_rounded(77, 203, 384, cell, cell_k, wide, false, how);
        check_rounded(300, 133, 1000, cell, cell_k, wide, false, how);
        if (wide == (cell == 1)) check_rounded(530, 264, 3072, cell, cell_k, wide, false, how); /* several tiles */
      }
    }
    check_rounded(1, 256, 128, 128, 128, wide);
    check_rounded(77, 200, 384, 128, 128, wide);
    check_rounded(300, 133, 192, 128, 128, wide);
    check_rounded(140, 520, 3072, 128, 128, wide);
    check_rounded(140, 520, 1000, 256, 0, wide);
    check_rounded(2500, 2304, 640, 128, 128, wide); /* several tiles a block, strips of rows */
    for (uint32_t tokens : {1u, 2u, 7u, 8u, 9u, 16u, 31u, 33u, 64u}) {
      check_rounded(tokens, 133, 192, 128, 128, wide, true);
      check_rounded(tokens, 520, 3072, 128, 128, wide, true);
    }
    check_rounded(5, 1, 1000, 256, 0, wide, true);
    check_rounded(3, 9000, 128, 128, 128, wide, true); /* tiles of one line, several a cluster */
    check_rounded(13, 20000, 640, 128, 128, wide, true);
    check_rounded(64, 2304, 8192, 128, 128, wide, true);
    check_rounded(40, 300, 16384, 128, 128, wide, true);
    check_rounded(40, 300, 20480, 128, 128, wide);
    check_rounded_too_long(40, 20480);
  }
  check_rounded_independent();
}
