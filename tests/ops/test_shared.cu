/* The experts of a single token with a shared one in their launches (experts_shared.cu), against doubles. Where
 * inputs of w2 are rounded, from the device's own rows between the products on, which are checked too. */
#include <string.h>

#include <algorithm>

#include "runtime/cuda/core/joined.h"
#include "tests/ops/gpu.h"
#include "tests/ops/routing.h"

namespace {

struct form {
  const char *name;
  mm_cu_code code;
  mm_cu_scale kind;
  uint32_t cell_n, cell_k;
  mm_cu_rounding how;
};

struct shape {
  uint32_t experts, top_k, hidden, inter, shared;
};

const mm_cu_activation kAct = {true, 1.702f, 7, 1};

double activated(double gate, double up) {
  const double g = std::min(gate, (double)kAct.limit), u = std::max(-(double)kAct.limit, std::min(up, (double)kAct.limit));
  return (u + kAct.beta) * g / (1 + exp(-kAct.alpha * g));
}

std::vector<float> rounded_by(const mm_cu_rounding &how, std::vector<float> x) {
  if (how.kind == MM_ACT_FP8_GROUP) round_row_to(how, x.data(), (uint32_t)x.size());
  if (how.kind != MM_ACT_FP8_GROUP && how.kind != MM_ACT_KEPT) round_row_as(how, x.data(), (uint32_t)x.size());
  return x;
}

/* Row n of matrix e times x. */
double product(const test_weight &w, uint32_t e, uint32_t n, const std::vector<float> &x) {
  double sum = 0;
  for (uint32_t i = 0; i < w.d.k; i++) sum += (double)x[i] * w.w[((size_t)e * w.d.n + n) * w.d.k + i];
  return sum;
}

std::vector<float> middle_of(const test_weight &up, uint32_t e, const std::vector<float> &x) {
  const uint32_t inter = up.d.n / 2;
  std::vector<float> m(inter);
  for (uint32_t i = 0; i < inter; i++) m[i] = (float)activated(product(up, e, i, x), product(up, e, inter + i, x));
  return m;
}

test_weight *make(test_weight *w, const form &f, uint32_t lead, uint32_t n, uint32_t k) {
  random_weight(w, f.code, f.kind, lead, n, k, f.cell_n, f.cell_k);
  w->d.rounding = f.how;
  return w;
}

double off(const std::vector<float> &want, const __nv_bfloat16 *got) {
  std::vector<double> a(want.begin(), want.end()), b;
  for (size_t i = 0; i < want.size(); i++) b.push_back(to_float(got[i]));
  return relative_error(a, b);
}

/* joins: as one of the kernels' pairs. down: in one launch with w2. padding: a row of slot -1 has the shared expert alone. */
void check(const form &routed, const form &shared, const shape &s, bool joins, bool padding = false) {
  if (left_out(3.0 * (s.top_k * s.inter + s.shared) * s.hidden)) return;
  test_weight w13, w2, up, down;
  make(&w13, routed, s.experts, 2 * s.inter, s.hidden), make(&w2, routed, s.experts, s.hidden, s.inter);
  make(&up, shared, 1, 2 * s.shared, s.hidden), make(&down, shared, 1, s.hidden, s.shared);
  const auto x = random_bf16(s.hidden);
  router_weight router(s.experts, s.hidden, 1);
  buffer<float> bias;
  bias.put(random_float(s.experts, 0.2, 0.1));
  buffer<__nv_bfloat16> dx, y(s.hidden), middle((size_t)s.experts * MM_CU_DECODE_ROWS * s.inter), own(s.shared);
  dx.put(x);
  buffer<int32_t> slot;
  slot.put(std::vector<int32_t>(1, padding ? -1 : 3));
  buffer<unsigned long long> load;
  load.put(std::vector<unsigned long long>(s.experts, 5));
  route_buffers rb(s.experts, s.top_k, 1, true, bias.p);
  rb.r.act = kAct, rb.r.scale = 2, rb.r.slot = slot.p, rb.r.load = load.p;
  CUDA_OK(mm_cu_route_tokens(router.d, rb.r, dx.p, 1, 0));
  const mm_cu_experts a = {dx.p, y.p, middle.p, nullptr, 1};
  const mm_cu_shared of = {up.d, down.d, own.p};
  const bool same = mm_cu_joins_down(w2.d, of);
  char what[200];
  snprintf(what, sizeof what, "experts %s with a shared one %s E=%u top %u H=%u I=%u, %u%s%s", routed.name, shared.name, s.experts, s.top_k,
           s.hidden, s.inter, s.shared, padding ? ", padding" : "", same ? "" : ", two launches of w2");
  const cudaError_t e = mm_cu_experts_joined(w13.d, w2.d, rb.r, a, of, 0);
  const bool takes = mm_cu_joins_shared(w13.d, w2.d, of, s.top_k);
  if (!takes || !joins) { /* other code than sm_90a takes none where blocks have less shared memory */
    report_true(std::string(what) + ": refused", !takes && e == cudaErrorNotSupported && !(joins && hopper()));
    return;
  }
  CUDA_OK(e);
  if (!same) CUDA_OK(mm_cu_one(down.d, {own.p, nullptr, y.p, nullptr, 1, true}, 0));
  const auto id = rb.id.get(), used = rb.used.get();
  const auto weight = rb.weight.get();
  auto counts = load.get();
  bool listed = used[0] == (padding ? 0 : s.top_k);
  for (uint32_t i = 0; !padding && i < s.top_k; i++) counts[id[i]]--;
  report_true(std::string(what) + ": choices", listed && counts == std::vector<unsigned long long>(s.experts, 5));
  std::vector<float> row;
  for (auto v : x) row.push_back(to_float(v));
  std::vector<double> want(s.hidden, 0.0), got;
  double worst = 0;
  /* All middles are compared as they would be without w2's factors; those of inputs that are kept hold them. */
  const auto add = [&](const test_weight &first, const test_weight &second, uint32_t expert, double factor, const __nv_bfloat16 *there) {
    const bool rounds = second.d.rounding.kind != MM_ACT_KEPT;
    auto m = middle_of(first, expert, rounded_by(first.d.rounding, row));
    if (rounds) {
      worst = std::max(worst, off(m, there));
      for (size_t i = 0; i < m.size(); i++) m[i] = to_float(there[i]);
    }
    m = rounded_by(second.d.rounding, m);
    for (uint32_t n = 0; n < s.hidden; n++) want[n] += factor * product(second, expert, n, m);
  };
  const auto between = middle.get(), alone = own.get();
  const auto places = rb.slot_expert.get();
  for (uint32_t i = 0; !padding && i < s.top_k; i++) {
    const size_t at = (size_t)(std::find(places.begin(), places.end(), id[i]) - places.begin());
    add(w13, w2, id[i], weight[i], between.data() + at * MM_CU_DECODE_ROWS * s.inter);
  }
  add(up, down, 0, 1, alone.data());
  for (auto v : y.get()) got.push_back(to_float(v));
  report(std::string(what) + ": rows between the products", worst, 8e-3);
  report(what, relative_error(want, got), routed.how.kind == MM_ACT_KEPT ? 8e-3 : 5e-3);
}

}  // namespace

void test_shared() {
  const mm_cu_rounding kept = {MM_ACT_KEPT, 0}, group = {MM_ACT_FP8_GROUP, 0}, mx = {MM_ACT_MXFP8, 0}, nv = {MM_ACT_NVFP4, 0};
  const form fp8 = {"block_fp8", MM_CU_E4M3, MM_CU_COARSE, 128, 128, group},
             fp8_kept = {"block_fp8, kept", MM_CU_E4M3, MM_CU_COARSE, 128, 128, kept};
  const form mx8 = {"mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32, mx}, mx8_kept = {"mxfp8, kept", MM_CU_E4M3, MM_CU_MX, 1, 32, kept};
  const form nv4 = {"nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16, nv}, nv4_kept = {"nvfp4, kept", MM_CU_E2M1, MM_CU_NV, 1, 16, kept};
  const form int4 = {"int4", MM_CU_INT4, MM_CU_COARSE, 1, 128, kept}, bf16 = {"bf16", MM_CU_BF16, MM_CU_PLAIN, 0, 0, kept};
  const form static4 = {"nvfp4, static", MM_CU_E2M1, MM_CU_NV, 1, 16, {MM_ACT_NVFP4, 0.002f}};
  const form pairs[][2] = {{fp8, fp8},           {fp8_kept, fp8_kept}, {mx8, mx8},      {mx8_kept, mx8_kept}, {nv4, nv4},
                           {nv4_kept, nv4_kept}, {static4, fp8},       {int4, int4},    {nv4, fp8},           {nv4, mx8},
                           {int4, fp8},          {int4, mx8},          {nv4_kept, fp8}, {int4, fp8_kept},     {nv4_kept, mx8_kept}};
  const shape shapes[] = {{12, 4, 256, 256, 256}, {8, 1, 384, 128, 384}, {20, 16, 256, 384, 256}, {128, 4, 1536, 512, 512}};
  for (const auto &p : pairs) {
    for (const auto &s : shapes) check(p[0], p[1], s, true);
    check(p[0], p[1], shapes[0], true, true);
  }
  for (int i = 0; i < 12; i++) {
    const auto &p = pairs[g_rng.below(sizeof pairs / sizeof *pairs)];
    const uint32_t top = 1 + g_rng.below(8), inter = 128 * (1 + g_rng.below(4));
    check(p[0], p[1], {top + g_rng.below(100), top, 128 * (2 + g_rng.below(8)), inter, g_rng.below(2) ? inter : 128 * (1 + g_rng.below(4))},
          true, g_rng.below(8) == 0);
  }
  for (const auto &p : {std::pair<form, form>{bf16, bf16}, {fp8, mx8}, {mx8, fp8}, {fp8, nv4}, {bf16, fp8}})
    check(p.first, p.second, shapes[0], false);
  check(fp8, fp8, {20, 16, 256, 2816, 256}, false); /* with the shared one more columns than shared memory holds */
}
