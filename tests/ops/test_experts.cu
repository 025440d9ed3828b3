/* Routing and experts against doubles. */
#include <string.h>

#include <algorithm>
#include <atomic>

#include "runtime/cuda/core/upload.h"
#include "tests/ops/gpu.h"
#include "tests/ops/routing.h"

struct routed {
  std::vector<uint32_t> id;
  std::vector<double> weight;
};

/* By how much the GPU's scores, sums in f32, may be off: of two that are nearer to each other either may come first. */
#define SCORE_OFF 2e-6

/* given: the GPU's choices [tokens, top_k], taken where scores are that near. */
static routed reference_route(const std::vector<float> &w, const std::vector<float> &bias, bool sigmoid,
                              const std::vector<__nv_bfloat16> &x, const std::vector<uint32_t> &given, uint32_t tokens, uint32_t experts,
                              uint32_t k, uint32_t top_k) {
  routed out;
  for (uint32_t t = 0; t < tokens; t++) {
    std::vector<double> z(experts), score(experts);
    std::vector<uint32_t> order(experts);
    for (uint32_t e = 0; e < experts; e++) {
      double sum = 0;
      for (uint32_t j = 0; j < k; j++) sum += (double)w[(size_t)e * k + j] * to_float(x[(size_t)t * k + j]);
      z[e] = sigmoid ? 1 / (1 + exp(-sum)) : sum;
      score[e] = z[e] + (sigmoid ? bias[e] : 0);
      order[e] = e;
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return score[a] > score[b]; });
    for (uint32_t j = 0; j < top_k; j++) {
      const auto at = std::find(order.begin() + j, order.end(), given[(size_t)t * top_k + j]);
      if (at != order.end() && score[order[j]] - score[*at] <= SCORE_OFF) std::swap(order[j], *at);
    }
    double total = 0;
    for (uint32_t j = 0; j < top_k; j++) total += sigmoid ? z[order[j]] : exp(z[order[j]] - z[order[0]]);
    for (uint32_t j = 0; j < top_k; j++) {
      out.id.push_back(order[j]);
      out.weight.push_back((sigmoid ? z[order[j]] : exp(z[order[j]] - z[order[0]])) / total);
    }
  }
  return out;
}

/* Largest error of a product of codes on tensor cores, relative to the root of the sum of its squared terms. */
#define SHORT_SUM 2e-3
/* The same of weights under FINE scales, each rounded to bf16: seven times a sum's error. */
#define FINE_SUM 8e-3

struct expert_case {
  const char *name;
  mm_cu_code code;
  mm_cu_scale kind;
  uint32_t cell_n, cell_k;
  bool rounded = false; /* inputs of both products as codes */
  bool few = false;     /* by the kernels for a few rows an expert */
  mm_cu_rounding how = {MM_ACT_FP8_GROUP, 0};
  mm_cu_activation act = {};
  float scale = 1; /* of the routed sum */
  bool groups() const { return how.kind == MM_ACT_FP8_GROUP; }
};

/* The codes that w2 gets, by sorted place, and the place of each pair. */
struct middle_codes {
  std::vector<uint8_t> code;
  std::vector<float> scale;
  std::vector<uint32_t> place;
  mm_cu_codes d;
  std::vector<__nv_bfloat16> single;  /* numbers instead: a single token's, of slots of these experts (place), or by place (few) */
  std::vector<__nv_bfloat16> decoded; /* y by the grouped products of a decode step, where they are another kernel */
  double at(uint32_t pair, uint32_t i) const { return e4m3(code[(size_t)place[pair] * d.pitch + i]) * scale_of(pair, i); }
  double scale_of(uint32_t pair, uint32_t i) const { return scale[(size_t)(i / 128) * d.scale_pitch + place[pair]]; }
};

/* True if codes and scales of a pair are those of numbers that are each off `by` at most from m, none more than a tie away. */
static bool codes_of(const middle_codes &c, uint32_t pair, const std::vector<double> &m, const std::vector<double> &by,
                     const mm_cu_rounding &how) {
  const uint32_t group = how.kind == MM_ACT_FP8_GROUP ? 128 : (uint32_t)m.size();
  bool ok = true;
  for (uint32_t from = 0; from < m.size(); from += group) {
    double largest = 0, least = 0;
    const uint32_t to = std::min(from + group, (uint32_t)m.size());
    const float scale = (float)c.scale_of(pair, from);
    for (uint32_t i = from; i < to; i++) largest = std::max(largest, fabs(m[i]) + by[i]), least = std::max(least, fabs(m[i]) - by[i]);
    ok &= how.fixed > 0 ? scale == how.fixed
                        : scale >= std::max(least, 1e-10) / 448 * (1 - 1e-6) && scale <= std::max(largest, 1e-10) / 448 * (1 + 1e-6);
    for (uint32_t i = from; i < to; i += 128) ok &= (float)c.scale_of(pair, i) == scale;
    if (!ok) printf("     pair %u, column %u: scale %.4e of %.4e to %.4e\n", pair, from, scale * 448, least, largest);
    for (uint32_t i = from; i < to && ok; i++) {
      const auto code = [&](double v) { return e4m3(nearest_e4m3((float)(v / scale))); };
      const double got = c.at(pair, i) / scale;
      ok &= got >= code(m[i] - by[i]) - 1e-9 && got <= code(m[i] + by[i]) + 1e-9;
      if (!ok) printf("     pair %u, column %u: code %g under %.4e, from %.4e, off %.1e at most\n", pair, i, got, scale, m[i], by[i]);
    }
  }
  return ok;
}

/* Where inputs are rounded: a single token's kernel does it, or several's multiply codes. */
static bool takes_rounded(const expert_case &c, const mm_cu_weight &w13, const mm_cu_weight &w2, uint32_t tokens, uint32_t top_k) {
  if (!c.rounded || c.few) return true;
  return c.groups() || tokens > 1 ? takes_here(MM_CU_EXPERTS_FP8, w13, w2) || takes_here(MM_CU_EXPERTS_CODES, w13, w2)
                                  : plain_experts(w13, w2, tokens, top_k) == mm_cu_experts_one;
}
static void round_inputs(const expert_case &c, std::vector<float> *row, uint32_t tokens) {
  if (c.groups() || tokens > 1) { /* codes are multiplied */
    round_row_to(c.how, row->data(), (uint32_t)row->size());
  } else {
    round_row_as(c.how, row->data(), (uint32_t)row->size());
  }
}

/* y of routed experts by the kernels that take such a step; with rounded inputs those of w2 too. */
static std::vector<__nv_bfloat16> run_experts(const expert_case &c, const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r,
                                              const __nv_bfloat16 *x, uint32_t tokens, middle_codes *given = nullptr) {
  const uint32_t hidden = w13.k, inter = w2.k, slots = std::min(r.experts, MM_CU_DECODE_ROWS * r.top_k), pairs = tokens * r.top_k;
  buffer<__nv_bfloat16> y((size_t)tokens * hidden);
  if (c.rounded && tokens > 1 && !c.few) {
    code_buffers codes(tokens, hidden), middle(pairs, inter);
    buffer<__nv_bfloat16> pair_out((size_t)pairs * hidden);
    buffer<__nv_bfloat16> rows((size_t)pairs * inter);
    CUDA_OK(mm_cu_encode(codes.d, {x, hidden, nullptr}, c.how, 0));
    if (takes_here(MM_CU_EXPERTS_CODES, w13, w2)) {
      buffer<float> sums((size_t)pairs * hidden);
      CUDA_OK(mm_cu_experts_codes(w13, w2, r, codes.d, {x, y.p, rows.p, sums.p, tokens}, 0));
      for (uint32_t i = 0; i < pairs; i++) { /* codes and scales lie in the rows */
        const uint8_t *const row = reinterpret_cast<const uint8_t *>(rows.p + (size_t)i * inter);
        CUDA_OK(cudaMemcpy(middle.d.code + (size_t)i * inter, row, inter, cudaMemcpyDeviceToDevice));
        CUDA_OK(cudaMemcpy2D(middle.d.scale + i, middle.d.scale_pitch * sizeof(float), row + inter, sizeof(float), sizeof(float),
                             inter / MM_CU_GROUP, cudaMemcpyDeviceToDevice));
      }
    } else {
      CUDA_OK(mm_cu_experts_fp8(w13, w2, r, {codes.d, middle.d, rows.p, pair_out.p, y.p}, 0));
    }
    *given = {middle.code.get(), middle.scale.get(), std::vector<uint32_t>(pairs), middle.d, {}};
    std::vector<uint32_t> sorted(pairs);
    CUDA_OK(cudaMemcpy(sorted.data(), r.pair, pairs * sizeof sorted[0], cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < pairs; i++)
      if (sorted[i] < pairs) given->place[sorted[i]] = i; /* none behind those that have an expert here */
    return y.get();
  }
  const bool decode_linear = tokens <= MM_CU_DECODE_ROWS && !c.few;
  buffer<__nv_bfloat16> middle((size_t)(decode_linear ? slots * MM_CU_DECODE_ROWS : 3 * pairs) * inter);
  buffer<float> pair_out(decode_linear ? 1 : (size_t)pairs * hidden);
  const auto run = c.few ? mm_cu_experts_few : plain_experts(w13, w2, tokens, r.top_k);
  CUDA_OK(run(w13, w2, r, {x, y.p, middle.p, pair_out.p, tokens}, 0));
  if (given && !hopper() && tokens > 1 && !c.few && !c.rounded) { /* a decode step's, whose sums may have another order */
    buffer<__nv_bfloat16> decoded((size_t)tokens * hidden), rows((size_t)pairs * inter);
    buffer<float> sums((size_t)pairs * hidden);
    mm_cu_experts a = {x, decoded.p, rows.p, sums.p, tokens};
    a.decode = true;
    CUDA_OK(mm_cu_experts_gemm(w13, w2, r, a, 0));
    given->decoded = decoded.get();
  }
  if (given && c.rounded && c.few) { /* before they are rounded */
    given->place.resize(pairs), given->single = middle.get();
    std::vector<uint32_t> sorted(pairs);
    CUDA_OK(cudaMemcpy(sorted.data(), r.pair, pairs * sizeof sorted[0], cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < pairs; i++)
      if (sorted[i] < pairs) given->place[sorted[i]] = i; /* none behind those that have an expert here */
  } else if (given && c.rounded) {                        /* a single token's likewise */
    given->place.resize(slots), given->single = middle.get();
    CUDA_OK(cudaMemcpy(given->place.data(), r.slot_expert, slots * sizeof(uint32_t), cudaMemcpyDeviceToHost));
  }
  return y.get();
}

static void check_experts(const expert_case &c, uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t hidden, uint32_t inter,
                          bool sigmoid) {
  if (left_out(3.0 * tokens * top_k * hidden * inter)) return;
  auto x = random_bf16((size_t)tokens * hidden);
  router_weight rw(experts, hidden, tokens);
  const auto bias = random_float(experts, 0.2, 0.1);
  buffer<float> dbias;
  buffer<__nv_bfloat16> dx;
  dbias.put(bias), dx.put(x);
  route_buffers rb(experts, top_k, tokens, sigmoid, sigmoid ? dbias.p : nullptr);
  buffer<unsigned long long> load;
  load.put(std::vector<unsigned long long>(experts, 3)), rb.r.load = load.p;
  rb.r.act = c.act, rb.r.scale = c.scale;
  for (int i = 0; i < 2; i++) CUDA_OK(mm_cu_route_tokens(rw.d, rb.r, dx.p, tokens, 0)); /* twice: the ticket must come back to zero */

  test_weight w13, w2;
  random_weight(&w13, c.code, c.kind, experts, 2 * inter, hidden, c.cell_n, c.cell_k);
  random_weight(&w2, c.code, c.kind, experts, hidden, inter, c.cell_n, c.cell_k);
  if (c.rounded) w13.d.rounding = w2.d.rounding = c.how;
  if (!takes_rounded(c, w13.d, w2.d, tokens, top_k)) return; /* not of this device */
  if (c.few && !takes_here(MM_CU_EXPERTS_FEW, w13.d, w2.d)) return;
  middle_codes given;
  const auto out = run_experts(c, w13.d, w2.d, rb.r, dx.p, tokens, &given);
  if (tokens == 1) { /* once more: down certainly reads the published list */
    const auto again = run_experts(c, w13.d, w2.d, rb.r, dx.p, tokens, &given);
    report_true(std::string("experts ") + c.name + " T=1 again: the same bits",
                !memcmp(out.data(), again.data(), out.size() * sizeof out[0]));
  }
  const auto id = rb.id.get();
  auto want_route = reference_route(rw.w, bias, sigmoid, x, id, tokens, experts, hidden, top_k);
  for (double &v : want_route.weight) v *= c.scale;
  const auto weight = rb.weight.get();
  auto loads = load.get();
  for (uint32_t e : id) loads[e] -= 2; /* chosen twice: by the router, a single token by its experts */
  std::vector<double> w_want, w_got;
  bool same = true;
  for (size_t i = 0; i < id.size(); i++) {
    same &= id[i] == want_route.id[i];
    w_want.push_back(want_route.weight[i]), w_got.push_back(weight[i]);
  }
  char what[160];
  snprintf(what, sizeof what, "route %s T=%u E=%u top %u%s: experts", sigmoid ? "sigmoid+bias" : "softmax", tokens, experts, top_k,
           rw.d.wide ? ", f32" : "");
  report_true(what, same);
  report(std::string(what) + ", weights", relative_error(w_want, w_got), 1e-5);
  report_true(std::string(what) + ", load", loads == std::vector<unsigned long long>(experts, 3));
  const uint32_t step = 1 + tokens / 24, checked = (tokens + step - 1) / step;
  std::vector<double> want((size_t)checked * hidden, 0.0), got;
  std::atomic<bool> coded(true);
  parallel(checked, [&](uint32_t row) {
    const uint32_t t = row * step;
    std::vector<float> input;
    for (uint32_t q = 0; q < hidden; q++) input.push_back(to_float(x[(size_t)t * hidden + q]));
    if (c.rounded) round_inputs(c, &input, tokens);
    for (uint32_t j = 0; j < top_k; j++) {
      uint32_t e = want_route.id[t * top_k + j];
      std::vector<double> mid(inter), by(inter);
      for (uint32_t i = 0; i < inter; i++) {
        double gate = 0, up = 0, gates = 0, ups = 0; /* and sums of squares */
        for (uint32_t q = 0; q < hidden; q++) {
          const double v = input[q], g = v * w13.w[((size_t)e * 2 * inter + i) * hidden + q],
                       u = v * w13.w[((size_t)e * 2 * inter + inter + i) * hidden + q];
          gate += g, up += u, gates += g * g, ups += u * u;
        }
        const auto product = [&](double at, double of) {
          const mm_cu_activation &a = c.act;
          if (!a.swigluoai) return at / (1 + exp(-at)) * of;
          const double l = a.limit, clamped = std::min(at, l);
          return clamped / (1 + exp(-a.alpha * clamped)) * (std::max(-l, std::min(of, l)) + a.beta);
        };
        const double turn = -1.2784645 / (c.act.swigluoai ? c.act.alpha : 1);
        mid[i] = product(gate, up);
        /* the tensor cores' short sums: what gate and up may be off, at the ends of both and where SiLU turns */
        const double off = c.kind == MM_CU_FINE ? FINE_SUM : SHORT_SUM, g = off * sqrt(gates), u = off * sqrt(ups);
        for (double at : {gate - g, gate + g, std::min(std::max(turn, gate - g), gate + g)})
          for (double of : {up - u, up + u}) by[i] = std::max(by[i], fabs(product(at, of) - mid[i]));
      }
      if (c.rounded && (tokens == 1 || c.few)) { /* from here on with the GPU's own numbers, rounded here */
        const size_t slot = (size_t)(std::find(given.place.begin(), given.place.end(), e) - given.place.begin());
        const size_t at = c.few ? given.place[t * top_k + j] : slot * MM_CU_DECODE_ROWS;
        std::vector<float> own(inter);
        for (uint32_t i = 0; i < inter; i++) {
          own[i] = to_float(given.single[at * inter + i]);
          if (!(fabs(own[i] - mid[i]) <= by[i] + fabs(mid[i]) * 0x1p-8 + 1e-30)) coded = false; /* SiLU of -87 and less is 0 there */
        }
        round_inputs(c, &own, tokens);
        for (uint32_t i = 0; i < inter; i++) mid[i] = own[i];
      } else if (c.rounded) { /* with the GPU's own codes */
        const uint32_t pair = t * top_k + j;
        const bool as_bf16 = !c.groups() || takes_here(MM_CU_EXPERTS_CODES, w13.d, w2.d);
        for (uint32_t i = 0; as_bf16 && i < inter; i++) by[i] += fabs(mid[i]) * 0x1p-8; /* by way of bf16 */
        if (!codes_of(given, pair, mid, by, c.how)) coded = false;
        for (uint32_t i = 0; i < inter; i++) mid[i] = given.at(pair, i);
      }
      for (uint32_t n = 0; n < hidden; n++) {
        double sum = 0;
        for (uint32_t i = 0; i < inter; i++) sum += mid[i] * w2.w[((size_t)e * hidden + n) * inter + i];
        want[(size_t)row * hidden + n] += sum * want_route.weight[t * top_k + j];
      }
    }
  });
  for (uint32_t row = 0; row < checked; row++) {
    for (uint32_t n = 0; n < hidden; n++) got.push_back(to_float(out[(size_t)row * step * hidden + n]));
  }
  snprintf(what, sizeof what, "experts %-18s T=%u E=%u top %u H=%u I=%u%s", c.name, tokens, experts, top_k, hidden, inter,
           c.few ? ", few rows each" : "");
  report(what, relative_error(want, got), c.rounded ? 4e-3 : 8e-3);
  if (!given.decoded.empty()) {
    for (size_t i = 0; i < got.size(); i++) got[i] = to_float(given.decoded[i / hidden * step * hidden + i % hidden]);
    report(std::string(what) + ", decode step", relative_error(want, got), 8e-3);
  }
  if (c.rounded) report_true(std::string(what) + ": codes and scales between the products", coded);
}

/* Experts [first, first + held) of w's. */
static mm_cu_weight own_experts(const mm_cu_weight &w, uint32_t first, uint32_t held) {
  mm_cu_weight own = w;
  own.lead = held, own.data += (size_t)first * w.n * w.pitch;
  const bool bytes = w.scale_kind == MM_CU_NV || w.scale_kind == MM_CU_MX;
  if (w.scale) own.scale = static_cast<const char *>(w.scale) + first * (mm_cu_scales(&w) / w.lead) * (bytes ? 1 : sizeof(float));
  if (w.global) own.global += first;
  return own;
}

/* Ranks that hold some of the experts each: their sums are those of all, and each counts all choices. */
static void check_cut_experts(const expert_case &c, uint32_t tokens) {
  if (left_out(2e5 * tokens)) return;
  constexpr uint32_t kExperts = 24, kTop = 4, kHidden = 512, kInter = 256, kFirst[] = {0, 11, 12, 24};
  router_weight router(kExperts, kHidden, tokens);
  test_weight w13, w2;
  random_weight(&w13, c.code, c.kind, kExperts, 2 * kInter, kHidden, c.cell_n, c.cell_k);
  random_weight(&w2, c.code, c.kind, kExperts, kHidden, kInter, c.cell_n, c.cell_k);
  if (c.rounded) w13.d.rounding = w2.d.rounding = c.how;
  if ((c.few && !takes_here(MM_CU_EXPERTS_FEW, w13.d, w2.d)) || !takes_rounded(c, w13.d, w2.d, tokens, kTop)) return;
  buffer<__nv_bfloat16> x;
  x.put(random_bf16((size_t)tokens * kHidden));
  std::vector<int32_t> slots(tokens, 0);
  if (tokens > 2) slots[1] = -1;
  buffer<int32_t> slot;
  slot.put(slots);
  std::vector<double> want, got((size_t)tokens * kHidden, 0.0);
  std::vector<unsigned long long> counted;
  bool same = true;
  for (uint32_t rank = 0; rank < 4; rank++) { /* first all of them */
    const uint32_t first = rank ? kFirst[rank - 1] : 0, held = rank ? kFirst[rank] - first : 0, own = rank ? held : kExperts;
    route_buffers rb(kExperts, kTop, tokens, true, nullptr);
    buffer<unsigned long long> load;
    load.put(std::vector<unsigned long long>(kExperts, 0)), rb.r.load = load.p;
    rb.r.first = first, rb.r.held = held, rb.r.slot = slot.p;
    middle_codes given;
    CUDA_OK(mm_cu_route_tokens(router.d, rb.r, x.p, tokens, 0));
    const auto y = run_experts(c, own_experts(w13.d, first, own), own_experts(w2.d, first, own), rb.r, x.p, tokens, &given);
    for (size_t i = 0; i < y.size(); i++) held ? got[i] += to_float(y[i]) : (want.push_back(to_float(y[i])), 0.0);
    if (!held) counted = load.get();
    same = same && load.get() == counted;
  }
  char what[120];
  snprintf(what, sizeof what, "experts %-18s T=%u%s, cut over ranks", c.name, tokens, c.few ? ", few rows each" : "");
  report(what, relative_error(want, got), 8e-3);
  report_true(std::string(what) + ": all count the same choices", same);
}

/* The same for router and experts together: the others' experts come between a row's own. invariant: of all steps of more than 16 rows. */
static void check_rows_independent(const expert_case &c, bool invariant = false) {
  if (left_out(1e9)) return;
  const uint32_t experts = 24, top_k = 8, hidden = 1536, inter = 384;
  /* few: the router alone has several kernels for these */
  const uint32_t few[][2] = {{2, MM_CU_DECODE_ROWS}, {MM_CU_DECODE_ROWS + 1, MM_CU_FEW}, {MM_CU_FEW + 1, 90}},
                 buckets[][2] = {{1, 1}, {2, 8}, {9, MM_CU_DECODE_ROWS}}, all[] = {MM_CU_DECODE_ROWS + 1, 600};
  router_weight router(experts, hidden, all[1]);
  if (invariant) router.d.batch_invariant = true;
  test_weight w13, w2;
  random_weight(&w13, c.code, c.kind, experts, 2 * inter, hidden, c.cell_n, c.cell_k);
  random_weight(&w2, c.code, c.kind, experts, hidden, inter, c.cell_n, c.cell_k);
  if (c.rounded) w13.d.rounding = w2.d.rounding = c.how;
  if ((c.few && !takes_here(MM_CU_EXPERTS_FEW, w13.d, w2.d)) || !takes_rounded(c, w13.d, w2.d, 2, top_k)) return; /* not of this device */
  for (uint32_t i = 0; i < (invariant ? 1 : 3); i++) {
    const uint32_t *const b = invariant ? all : c.few ? few[i] : buckets[i];
    const bool same = same_among_others(b[0], b[1], hidden, [&](const __nv_bfloat16 *x, uint32_t tokens) {
      middle_codes given;
      route_buffers rb(experts, top_k, tokens, true, nullptr);
      CUDA_OK(mm_cu_route_tokens(router.d, rb.r, x, tokens, 0));
      std::vector<float> out;
      for (auto v : run_experts(c, w13.d, w2.d, rb.r, x, tokens, &given)) out.push_back(to_float(v));
      return out;
    });
    char what[120];
    snprintf(what, sizeof what, "experts %-18s T=%u-%u: a row's bits whatever lies beside it", c.name, b[0], b[1]);
    report_true(what, same);
  }
}

/* The router's logits of as many experts as M2 has, for which more than 512 rows take another kernel unless they are batch-invariant. */
static void check_router_invariant(bool wide) {
  if (left_out(1e9)) return;
  const uint32_t experts = 256, hidden = 3072, least = MM_CU_DECODE_ROWS + 1, most = 800;
  router_weight router(experts, hidden, most);
  if (router.d.wide != wide) return check_router_invariant(wide); /* it is so by chance */
  router.d.batch_invariant = true;
  const bool same = same_among_others(least, most, hidden, [&](const __nv_bfloat16 *x, uint32_t tokens) {
    route_buffers rb(experts, 8, tokens, true, nullptr);
    CUDA_OK(mm_cu_route_logits(router.d, rb.r, x, tokens, tokens, 0));
    return rb.logits.get();
  });
  report_true(std::string("router of ") + (wide ? "f32" : "bf16") + ", T=17-800, apart: a row's bits whatever lies beside it", same);
}

/* Some of the rows, routed as some of so many: the experts and weights that they have among all, bit for bit. */
static void check_router_parts(bool wide) {
  constexpr uint32_t experts = 256, hidden = 3072, top_k = 8;
  if (left_out(4e9) || !hopper()) return;
  router_weight router(experts, hidden, 2100);
  if (router.d.wide != wide) return check_router_parts(wide); /* it is so by chance */
  bool same = true;
  for (const uint32_t all : {17u, 65u, 130u, 1024u, 1025u, 2100u}) {
    buffer<__nv_bfloat16> x;
    x.put(random_bf16((size_t)all * hidden));
    route_buffers whole(experts, top_k, all, true, nullptr);
    CUDA_OK(mm_cu_route_tokens(router.d, whole.r, x.p, all, 0));
    const auto id = whole.id.get();
    const auto weight = whole.weight.get();
    for (const uint32_t tokens : {1u, 16u, all / 2, all - 1}) {
      const uint32_t first = g_rng.below(all - tokens + 1);
      route_buffers part(experts, top_k, all, true, nullptr);
      CUDA_OK(mm_cu_choose_tokens(router.d, part.r, x.p + (size_t)first * hidden, tokens, all, 0));
      const size_t bytes = (size_t)tokens * top_k * 4;
      same = same && !memcmp(part.id.get().data(), id.data() + (size_t)first * top_k, bytes) &&
             !memcmp(part.weight.get().data(), weight.data() + (size_t)first * top_k, bytes);
    }
  }
  report_true(std::string("router of ") + (wide ? "f32" : "bf16") + ", part of 17-2100 rows: the choices of all, bit for bit", same);
}

template <class T>
static bool same_bits(const buffer<T> &a, const buffer<T> &b) {
  const auto x = a.get(), y = b.get();
  return memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

/* Inputs of both products rounded while their rows are laid for a few rows an expert = by launches before that, bit for bit. */
static void check_rounded_while_laid(const expert_case &c, uint32_t tokens) {
  if (left_out(1e9)) return;
  const uint32_t experts = 24, top_k = 4, hidden = 384, inter = 192;
  test_weight w13, w2;
  random_weight(&w13, c.code, c.kind, experts, 2 * inter, hidden, c.cell_n, c.cell_k);
  random_weight(&w2, c.code, c.kind, experts, hidden, inter, c.cell_n, c.cell_k);
  if (!takes_here(MM_CU_EXPERTS_FEW, w13.d, w2.d)) return;
  expert_case few = c;
  few.few = true;
  const router_weight router(experts, hidden, tokens);
  route_buffers rb(experts, top_k, tokens, true, nullptr);
  buffer<__nv_bfloat16> x, before((size_t)tokens * hidden);
  x.put(random_bf16((size_t)tokens * hidden));
  CUDA_OK(mm_cu_route_tokens(router.d, rb.r, x.p, tokens, 0));
  CUDA_OK(mm_cu_round(before.p, tokens, {x.p, hidden, nullptr}, c.how, 0));
  w2.d.whole = c.how;
  const auto want = run_experts(few, w13.d, w2.d, rb.r, before.p, tokens);
  w13.d.rounding = w2.d.rounding = c.how, w2.d.whole = {};
  const auto got = run_experts(few, w13.d, w2.d, rb.r, x.p, tokens);
  char what[120];
  snprintf(what, sizeof what, "experts %-18s T=%u: rounded while rows are laid = before, bit for bit", c.name, tokens);
  report_true(what, memcmp(want.data(), got.data(), want.size() * sizeof want[0]) == 0);
}

/* The residual and its norm along with the router = one after the other, bit for bit. */
static void check_combined(uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t hidden) {
  if (left_out((double)tokens * experts * hidden)) return;
  const size_t n = (size_t)tokens * hidden;
  const router_weight router(experts, hidden, tokens);
  buffer<__nv_bfloat16> residual, branch, h[2], y[2];
  buffer<float> w;
  residual.put(random_bf16(n)), branch.put(random_bf16(n, 3)), w.put(random_float(hidden, 1, 0.3));
  route_buffers one(experts, top_k, tokens, true, nullptr), two(experts, top_k, tokens, true, nullptr);
  for (int i = 0; i < 2; i++) h[i].open(n), y[i].open(n);
  const auto job = [&](int i) { return mm_cu_combine{h[i].p, y[i].p, residual.p, branch.p, w.p, 3.55f, 0.9f, 1e-6f}; };
  CUDA_OK(mm_cu_combine_rows(job(0), tokens, hidden, 0));
  CUDA_OK(mm_cu_route_tokens(router.d, one.r, y[0].p, tokens, 0));
  CUDA_OK(mm_cu_combine_route(job(1), router.d, two.r, tokens, 0));
  char what[120];
  snprintf(what, sizeof what, "residual, norm and router T=%u E=%u H=%u = one by one, bit for bit", tokens, experts, hidden);
  report_true(what, same_bits(h[0], h[1]) && same_bits(y[0], y[1]) && same_bits(one.logits, two.logits) && same_bits(one.id, two.id));
}

static const expert_case cases[] = {
    {"bf16", MM_CU_BF16, MM_CU_PLAIN, 0, 0},
    {"block_fp8", MM_CU_E4M3, MM_CU_COARSE, 128, 128},
    {"block_fp8 64", MM_CU_E4M3, MM_CU_COARSE, 64, 64},
    {"block_fp8 32", MM_CU_E4M3, MM_CU_FINE, 32, 32},
    {"int4 g128", MM_CU_INT4, MM_CU_COARSE, 1, 128},
    {"int4 g32", MM_CU_INT4, MM_CU_FINE, 1, 32},
    {"nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16},
    {"mxfp4", MM_CU_E2M1, MM_CU_MX, 1, 32},
    {"mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32},
};
static const expert_case ways[] = {
    {"channel_fp8", MM_CU_E4M3, MM_CU_COARSE, 1, 0, true, false, {MM_ACT_FP8_TOKEN, 0}},
    {"mxfp8", MM_CU_E4M3, MM_CU_MX, 1, 32, true, false, {MM_ACT_MXFP8, 0}},
    {"mxfp8 cut", MM_CU_E4M3, MM_CU_FINE, 1, 16, true, false, {MM_ACT_MXFP8, 0}},
    {"w4a8", MM_CU_INT4, MM_CU_COARSE, 1, 0, true, false, {MM_ACT_INT8_TOKEN, 0}},
    {"w4afp8", MM_CU_INT4, MM_CU_COARSE, 1, 128, true, false, {MM_ACT_FP8_TENSOR, 0.02f}},
    {"nvfp4", MM_CU_E2M1, MM_CU_NV, 1, 16, true, false, {MM_ACT_NVFP4, 0}},
    {"nvfp4 static", MM_CU_E2M1, MM_CU_NV, 1, 16, true, false, {MM_ACT_NVFP4, 0.002f}},
    {"mxfp4", MM_CU_E2M1, MM_CU_MX, 1, 32, true, false, {MM_ACT_MXFP4, 0}},
};

/* The kernels for a few rows an expert (sm_90a). */
void test_few_rows() {
  for (int i : {1, 2, 4, 6, 7, 8}) {
    expert_case c = cases[i];
    c.few = true;
    check_experts(c, 2, 8, 4, 256, 192, true);
    check_experts(c, 7, 32, 2, 256, 160, false);
    check_experts(c, 16, 24, 8, 256, 192, true);
    check_experts(c, 100, 12, 3, 256, 192, true);
    check_experts(c, 260, 32, 2, 384, 128, false);
    check_experts(c, 5, 256, 8, 256, 64, true);
    for (uint32_t hidden : {96u, 224u}) check_experts(c, 9, 8, 3, hidden, 96, true); /* the last boxes end beyond the expert */
    check_experts(c, 5, 12, 8, 1536, 1280, true);
    check_rows_independent(c);
  }
  for (const auto &c : ways)
    for (uint32_t tokens : {2u, 16u, 90u}) check_rounded_while_laid(c, tokens);
  const expert_case rounded = {"block_fp8 rounded", MM_CU_E4M3, MM_CU_COARSE, 128, 128, true, true};
  for (uint32_t tokens : {2u, 5u, 16u, 90u}) {
    check_experts(rounded, tokens, 32, 4, 384, 192, true);
    check_experts({"int4 rounded", MM_CU_INT4, MM_CU_COARSE, 1, 128, true, true}, tokens, 32, 4, 384, 192, true);
  }
  check_rows_independent(rounded);
}

void test_experts() {
  for (uint32_t tokens : {1u, 2u, 7u, 16u, 40u}) {
    check_combined(tokens, 256, 8, 3072);
    check_combined(tokens, 32, 2, 6144);
    check_combined(tokens, 10, 3, 256);
  }
  for (const auto &c : cases) {
    check_experts(c, 1, 8, 4, 256, 192, true);
    check_experts(c, 7, 32, 2, 256, 128, false);
    check_experts(c, 16, 24, 8, 256, 192, true);
    check_experts(c, 30, 12, 4, 256, 192, true); /* ten rows each */
    check_experts(c, 53, 200, 5, 256, 64, true);
    check_experts(c, 100, 12, 3, 256, 192, true);
  }
  for (int i : {1, 4, 6}) check_experts(cases[i], 3, 4, 2, 3328, 64, true); /* more columns than a decode tile holds at a time */
  check_experts(cases[1], 1, 6, 3, 1536, 1280, true);
  check_experts(cases[1], 2, 6, 3, 1536, 1280, true);
  check_experts(cases[6], 11, 6, 3, 1536, 1280, true);
  check_experts(cases[6], 1, 20, 16, 256, 1536, true);
  check_experts(cases[1], 1, 256, 8, 384, 128, true); /* choices across all warps that choose */
  check_experts(cases[1], 1, 200, 5, 384, 128, false);
  check_experts(cases[1], 1, 20, 13, 256, 2816, true); /* more columns than a single token's core takes, with whole items counted */
  check_experts(cases[1], 3, 256, 8, 384, 128, true);
  check_experts(cases[1], 260, 32, 2, 256, 128, false);
  for (int i : {0, 1, 4, 6, 7, 8}) check_rows_independent(cases[i]), check_rows_independent(cases[i], true);
  check_router_invariant(false), check_router_invariant(true);
  check_router_parts(false), check_router_parts(true);
  for (uint32_t tokens : {1u, 2u, 16u, 17u, 90u, 300u}) {
    for (int i : {0, 1, 3, 4, 6, 8}) {
      expert_case c = cases[i];
      check_cut_experts(c, tokens);
      c.few = true;
      if (i && tokens > 1) check_cut_experts(c, tokens);
    }
    check_cut_experts({"block_fp8 rounded", MM_CU_E4M3, MM_CU_COARSE, 128, 128, true}, tokens);
  }
  for (expert_case c : cases) { /* clamped, scaled, by every kernel that takes the codes */
    /* A limit near the size of gates and up values, 36 of the FP8 cases and 1.4 of others: far below it the errors of all
     * would count against what few are left. */
    c.act = {true, 1.702f, c.code == MM_CU_E4M3 ? 48.0f : 2.0f, 1}, c.scale = 2;
    for (uint32_t tokens : {1u, 2u, 16u, 17u, 100u, 300u}) {
      check_experts(c, tokens, 12, 4, 256, 192, true);
      expert_case few = c, rounded = c;
      few.few = rounded.rounded = true;
      if (tokens > 1 && c.code != MM_CU_BF16) check_experts(few, tokens, 12, 4, 256, 192, true);
      if (c.code == MM_CU_E4M3 && c.cell_n == 128) check_experts(rounded, tokens, 12, 4, 384, 256, true);
    }
  }
  const expert_case rounded = {"block_fp8 rounded", MM_CU_E4M3, MM_CU_COARSE, 128, 128, true};
  for (uint32_t top_k : {1u, 3u, 8u}) check_experts(rounded, 1, 12, top_k, 384, 256, top_k > 1);
  for (const auto &c : ways) { /* a single token's inputs, rounded in its kernels */
    for (uint32_t top_k : {1u, 3u, 8u}) check_experts(c, 1, 12, top_k, 384, 256, top_k > 1);
    check_experts(c, 1, 20, 16, 256, 1536, true);
    check_cut_experts(c, 1);
  }
  for (uint32_t tokens : {2u, 5u, 16u, 90u}) check_experts(rounded, tokens, 32, 4, 384, 256, true);
  check_rows_independent(rounded, true);
  check_experts(rounded, 9, 256, 8, 256, 128, true);
  check_experts(rounded, 17, 32, 2, 256, 128, false);
  check_experts(rounded, 100, 12, 3, 384, 256, true);
  check_experts(rounded, 260, 32, 2, 200, 128, false);
  check_experts(rounded, 700, 6, 3, 1024, 640, true); /* several tiles an expert, several a block */
  check_experts(rounded, 600, 6, 3, 512, 512, true);  /* up to 64 rows left over, of two tiles across and more */
  const expert_case rows[] = {
      {"channel_fp8 codes", MM_CU_E4M3, MM_CU_COARSE, 1, 0, true, false, {MM_ACT_FP8_TOKEN, 0}},
      {"tensor_wise_fp8 codes", MM_CU_E4M3, MM_CU_COARSE, 0, 0, true, false, {MM_ACT_FP8_TENSOR, 0.02f}},
      {"tensor_wise_fp8 codes, tokens", MM_CU_E4M3, MM_CU_COARSE, 0, 0, true, false, {MM_ACT_FP8_TENSOR, 0}},
      {"blocks, scales of tokens", MM_CU_E4M3, MM_CU_COARSE, 128, 128, true, false, {MM_ACT_FP8_TOKEN, 0}},
      {"channels, scales of groups", MM_CU_E4M3, MM_CU_COARSE, 1, 0, true, false, {MM_ACT_FP8_GROUP, 0}},
  };
  for (const auto &c : rows) { /* scales of whole rows, of both or of one */
    check_experts(c, 2, 32, 4, 384, 256, true), check_experts(c, 17, 32, 2, 256, 128, false), check_experts(c, 100, 12, 3, 384, 256, true);
    check_experts(c, 260, 32, 2, 200, 128, false), check_experts(c, 600, 6, 3, 512, 512, true);
    if (c.cell_n == 1 && !c.groups()) check_rows_independent(c, true);
    for (uint32_t tokens : {2u, 300u}) check_cut_experts(c, tokens);
  }
}
