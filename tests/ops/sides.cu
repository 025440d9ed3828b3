/* Backends for comparing whole models (sides.h). */
#include "tests/ops/sides.h"

#include <string.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "tests/ops/cpu_blocks.h"
#include "tests/ops/gpu.h"

/* ---- routers ---- */

static std::vector<float> numbers(const mm_packed *w) {
  std::vector<float> v((size_t)w->lead * w->n * w->k);
  for (uint32_t e = 0; e < w->lead; e++) mm_unpack(w, e, 0, w->n, &v[(size_t)e * w->n * w->k]);
  return v;
}

router_numbers::router_numbers(const mm_packed *weight, const mm_packed *b, bool is_sigmoid)
    : w(numbers(weight)), experts(weight->n), hidden(weight->k), sigmoid(is_sigmoid) {
  if (b) bias.resize(experts), mm_unpack(b, 0, 0, experts, bias.data());
}
std::vector<double> router_numbers::scores(const float *x) const {
  std::vector<double> score(experts);
  for (uint32_t e = 0; e < experts; e++) {
    double z = 0;
    for (uint32_t i = 0; i < hidden; i++) z += (double)w[(size_t)e * hidden + i] * x[i];
    score[e] = sigmoid ? 1 / (1 + exp(-z)) : z;
  }
  return score;
}
std::vector<double> router_numbers::keys(const float *x) const {
  std::vector<double> key = scores(x);
  for (uint32_t e = 0; e < bias.size(); e++) key[e] += bias[e];
  return key;
}
std::vector<uint32_t> best_first(const std::vector<double> &key) {
  std::vector<uint32_t> order(key.size());
  for (uint32_t e = 0; e < order.size(); e++) order[e] = e;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key[a] > key[b]; });
  return order;
}

/* ---- the CPU backend in bf16 ---- */

static uint32_t g_narrow_rows; /* of the step under way */

static void narrow(mm_act a) {
  float *x = static_cast<float *>(a.data);
  for (size_t i = 0; i < (size_t)g_narrow_rows * a.width; i++) {
    uint32_t bits;
    memcpy(&bits, &x[i], 4);
    bits = (bits + ((uint32_t)g_rng.next() & 0xffff)) & 0xffff0000u; /* up as often as the number lies near the upper one */
    memcpy(&x[i], &bits, 4);
  }
}

static mm_ops narrow_ops() {
  mm_ops o = mm_ops_cpu;
  o.begin = [](mm_backend *b, const mm_batch *batch, mm_err *err) {
    g_narrow_rows = batch->tokens;
    return mm_ops_cpu.begin(b, batch, err);
  };
  o.embed = [](mm_backend *b, mm_act x, const mm_packed *t) { mm_ops_cpu.embed(b, x, t), narrow(x); };
  o.norm = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) { mm_ops_cpu.norm(b, y, x, w, eps), narrow(y); };
  o.linear = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *w) { mm_ops_cpu.linear(b, y, x, w), narrow(y); };
  o.gqa = [](mm_backend *b, uint32_t layer, mm_act y, mm_act qkv, const mm_packed *q, const mm_packed *k) {
    mm_ops_cpu.gqa(b, layer, y, qkv, q, k), narrow(y);
  };
  o.lightning = [](mm_backend *b, uint32_t layer, mm_act y, mm_act qkv) { mm_ops_cpu.lightning(b, layer, y, qkv), narrow(y); };
  o.gated_norm = [](mm_backend *b, mm_act y, mm_act x, mm_act gate, const mm_packed *w, double eps) {
    mm_ops_cpu.gated_norm(b, y, x, gate, w, eps), narrow(y);
  };
  o.experts = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
    mm_ops_cpu.experts(b, y, x, w13, w2), narrow(y);
  };
  o.mlp = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add) {
    mm_ops_cpu.mlp(b, y, x, up, down, add), narrow(y);
  };
  o.combine = [](mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps) {
    mm_ops_cpu.combine(b, h, n, residual, branch, scale, w, eps), narrow(h), narrow(n);
  };
  return o;
}
const mm_ops kNarrowOps = narrow_ops();

/* ---- CUDA and the CPU, op by op ---- */

namespace {

enum op { EMBED, NORM, LINEAR, GQA, LIGHTNING, GATED_NORM, EXPERTS, COMBINE_H, COMBINE_N, LOGITS, INDEX, MLP, OPS };
/* Relative error of a row. A result in bf16 is off by 1.1e-3 to 1.7e-3 for its rounding alone, 2^-8 at most; products of rounded inputs by
 * as much again for those numbers in bf16, or for the tensor cores' short sums. For attention and experts: the error on top of the inner
 * roundings, whose effect is measured. */
struct {
  const char *name;
  double limit;
} constexpr kOps[OPS] = {{"embed", 0},         {"norm", 4e-3},       {"linear", 6e-3},        {"gqa", 6e-3},
                         {"lightning", 6e-3},  {"gated norm", 4e-3}, {"experts", 8e-3},       {"combine: h", 4e-3},
                         {"combine: n", 4e-3}, {"logits", 6e-3},     {"index queries", 4e-3}, {"mlp", 8e-3}};
/* One standard deviation of rounding to bf16, a little more than there is. */
constexpr float kRounding = 0x1p-9f;

struct {
  uint64_t rows = 0, beyond = 0, ties = 0; /* compared; off by more than they may be; at a tie of the router */
  uint64_t lists = 0, others = 0;          /* of blocks; that are not the CPU's, at a near tie */
  double worst[OPS] = {};
  struct {
    double error = 0, moved = 0, size = 0; /* sums of squares: off, moved by roundings within the op, and what they are relative to */
    void add(double e, double m, double s) { error += e, moved += m, size += s; }
  } sums[OPS];
} g_found;

constexpr uint32_t kTries = 12; /* of roundings by chance: of fewer, some row's are all small by chance, in a million rows */

struct pair_act {
  mm_act cpu, gpu, rough[kTries];
};

struct pair_backend {
  mm_backend *cpu = nullptr, *gpu = nullptr;
  mm_backend *rough[kTries] = {}; /* the CPU's again, its attention given numbers that are off as by rounding to bf16 */
  mm_backend_config c;
  std::deque<pair_act> acts;
  std::map<const mm_packed *, std::vector<float>> weight;
  std::map<const mm_packed *, router_numbers> routers;
  const router_numbers *router = nullptr; /* of the layer under way */
  const mm_batch *batch = nullptr;
  std::vector<float> logits;

  const float *of(const mm_packed *w) {
    auto &v = weight[w];
    if (v.empty()) v = numbers(w);
    return v.data();
  }
};

pair_backend *pair_of(mm_backend *b) { return reinterpret_cast<pair_backend *>(b); }
mm_act on_cpu(mm_act a) { return {static_cast<pair_act *>(a.data)->cpu.data, a.width}; }
mm_act on_rough(mm_act a, uint32_t i) { return {static_cast<pair_act *>(a.data)->rough[i].data, a.width}; }
mm_act on_gpu(mm_act a) { return {static_cast<pair_act *>(a.data)->gpu.data, a.width}; }

/* f(0) … f(n-1), on threads where that pays. */
void each(uint32_t n, const std::function<void(uint32_t)> &f) {
  if (n > 4) return parallel(n, f);
  for (uint32_t t = 0; t < n; t++) f(t);
}

/* The CPU's op will be given what the GPU's is. */
void share(const pair_backend *b, mm_act a) {
  const auto v = paired_rows(a, b->batch->tokens);
  memcpy(on_cpu(a).data, v.data(), v.size() * sizeof v[0]);
}
void roughen(const pair_backend *b, mm_act a, uint32_t i) {
  const float *from = static_cast<const float *>(on_cpu(a).data);
  float *to = static_cast<float *>(on_rough(a, i).data);
  const uint64_t seed = g_rng.next();
  each(b->batch->tokens, [&](uint32_t t) {
    rng random = {seed + t};
    for (size_t at = (size_t)t * a.width; at < (size_t)(t + 1) * a.width; at++)
      to[at] = from[at] * (1 + kRounding * (float)random.normal());
  });
}

void judge(op kind, uint32_t row, double error, double limit) {
  g_found.rows++;
  g_found.worst[kind] = std::max(g_found.worst[kind], error);
  if (error <= limit) return;
  if (g_found.beyond++ < 8 && g_plant == PLANT_NOTHING)
    printf("     %s, row %u: off by %.1e, limit %.1e\n", kOps[kind].name, row, error, limit);
}

double distance(const float *a, const float *b, uint32_t n) {
  double d = 0;
  for (uint32_t i = 0; i < n; i++) d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
  return std::isfinite(d) ? sqrt(d) : INFINITY;
}
double length(const float *a, uint32_t n) { return distance(a, std::vector<float>(n).data(), n); }

void compare(op kind, const float *want, const float *got, uint32_t rows, uint32_t width) {
  for (uint32_t r = 0; r < rows; r++, want += width, got += width) {
    const double d = distance(want, got, width);
    judge(kind, r, d == 0 ? 0 : d / length(want, width), kOps[kind].limit);
  }
}
void compare(op kind, const pair_backend *b, mm_act y) {
  compare(kind, static_cast<const float *>(on_cpu(y).data), paired_rows(y, b->batch->tokens).data(), b->batch->tokens, y.width);
}
/* Attention: queries and keys after their turn, probabilities, decayed keys and the like are bf16 on the GPU. The effect on a row depends
 * on the scores and on cancellation: a multiple of the effect on the CPU's row, in the root mean square of tries, is allowed. */
void compare_attention(op kind, const pair_backend *b, mm_act y) {
  const auto got = paired_rows(y, b->batch->tokens);
  const float *want = static_cast<const float *>(on_cpu(y).data);
  double error = 0, moved = 0;
  for (size_t at = 0; at < got.size(); at += y.width) {
    const double size = length(want + at, y.width), d = distance(want + at, &got[at], y.width) / size;
    double squares = 0;
    for (uint32_t i = 0; i < kTries; i++)
      squares += pow(distance(want + at, static_cast<const float *>(on_rough(y, i).data) + at, y.width) / size, 2) / kTries;
    judge(kind, (uint32_t)(at / y.width), d, hypot(kOps[kind].limit, 6 * sqrt(squares)));
    error += d * d, moved += squares;
  }
  g_found.sums[kind].add(error, moved, (double)b->batch->tokens);
}

/* The largest code becomes the next one: of e4m3 an eighth more at most, of e2m1 a third. */
void plant_code(std::vector<float> *row) {
  if (g_plant != PLANT_CODE) return;
  auto largest = std::max_element(row->begin(), row->end(), [](float a, float b) { return fabsf(a) < fabsf(b); });
  *largest *= 1.125f;
}
void plant_rows(std::vector<float> *y, uint32_t width) {
  if (g_plant == PLANT_ROWS && y->size() >= 2 * (size_t)width) std::swap_ranges(y->begin(), y->begin() + width, y->begin() + width);
}

/* ---- experts of one row ---- */

float dot(const float *a, const float *b, uint32_t n) { /* n % 8 == 0 */
  float s[8] = {};
  for (uint32_t i = 0; i < n; i += 8) {
    for (int j = 0; j < 8; j++) s[j] += a[i + j] * b[i + j];
  }
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}
double square(const std::vector<float> &v) { return pow(length(v.data(), (uint32_t)v.size()), 2); }

/* x as products by w see it, under scales for the magnitudes of a row and of its groups. */
std::vector<float> rounded(const pair_backend *b, const mm_packed *w, std::vector<float> x, const std::vector<float> &row,
                           const std::vector<float> &groups) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (!b->c.options.act_quant || f->code == MM_CODE_PLAIN) return x;
  std::vector<float> whole(mm_act_amaxes(f, w->k)), amax = whole;
  mm_act_amax(f, row.data(), w->k, 0, whole.data()), mm_act_amax(f, groups.data(), w->k, 0, amax.data());
  amax[0] = whole[0];
  mm_act_round(f, x.data(), w->k, 0, amax.data(), w->input_scale);
  return x;
}

/* y; by how much it may be off squared, for codes of the inputs of w2 that lie at a tie within the error of the products before; and by how
 * much squared it is off after a random error of that size. */
struct expert_row {
  std::vector<float> y, moved;
  double smooth = 0, ties = 0;
};

/* act(g, u) in f32, and by how much it moves with g and with u. */
struct activation {
  float value, by_gate, by_up;
  activation(const mm_model *m, float gate, float up) {
    const bool clamped = m->activation == MM_ACTIVATION_SWIGLUOAI;
    const float l = (float)m->act_limit, alpha = clamped ? (float)m->act_alpha : 1;
    const float g = clamped ? std::min(gate, l) : gate, u = clamped ? std::max(-l, std::min(up, l)) + (float)m->act_beta : up;
    const float s = 1 / (1 + expf(-alpha * g));
    value = g * s * u, by_gate = clamped && gate > l ? 0 : s * (1 + alpha * g * (1 - s)) * u;
    by_up = clamped && fabsf(up) > l ? 0 : g * s;
  }
};

void add_expert(expert_row *to, const pair_backend *b, const mm_packed *w13, const float *up_rows, const mm_packed *w2, const float *w,
                const std::vector<float> &x, float weight, rng *random) {
  const uint32_t inter = w2->k;
  std::vector<float> m(inter), high(inter), low(inter), drawn(inter), term(w13->k);
  const auto norm = [&](const float *row) {
    for (uint32_t j = 0; j < w13->k; j++) term[j] = row[j] * x[j];
    return sqrtf(dot(term.data(), term.data(), w13->k));
  };
  for (uint32_t i = 0; i < inter; i++) {
    const float *gate_row = up_rows + (size_t)i * w13->k, *up_row = gate_row + (size_t)inter * w13->k;
    const float gate = dot(gate_row, x.data(), w13->k), up = dot(up_row, x.data(), w13->k);
    const activation a(b->c.model, gate, up);
    m[i] = a.value;
    /* inputs and weights of a product may each have been rounded to bf16; then the result is, which puts what is near a tie on it */
    const float by_gate = a.by_gate * 1.42f * norm(gate_row), by_up = a.by_up * 1.42f * norm(up_row);
    const float sigma = kRounding * hypotf(by_gate, by_up), most = 3 * sigma + 0x1p-8f * fabsf(m[i]);
    high[i] = m[i] + copysignf(most, m[i]), low[i] = m[i] - copysignf(most, m[i]);
    drawn[i] = to_float(__float2bfloat16(m[i] + sigma * (float)random->normal()));
  }
  const auto q = rounded(b, w2, m, m, m), moved = rounded(b, w2, drawn, drawn, drawn);
  std::vector<float> most(inter), own(w2->n), other(w2->n);
  for (uint32_t c = 0; c < 8; c++) { /* number, row and group each as large and as small as they may be */
    const auto v = rounded(b, w2, c & 1 ? high : low, c & 2 ? high : low, c & 4 ? high : low);
    for (uint32_t i = 0; i < inter; i++) most[i] = std::max(most[i], fabsf(v[i] - q[i]));
  }
  const bool rounds = b->c.options.act_quant && w2->scheme->act != MM_ACT_KEPT;
  double at_ties = 0;
  for (uint32_t n = 0; n < w2->n; n++, w += inter) {
    own[n] = weight * dot(w, q.data(), inter), other[n] = weight * dot(w, rounds ? moved.data() : q.data(), inter);
    for (uint32_t i = 0; rounds && i < inter; i++) at_ties += (double)most[i] * most[i] * w[i] * w[i];
    to->y[n] += own[n], to->moved[n] += other[n];
  }
  to->ties += at_ties * weight * weight, to->smooth += square(own);
}

/* Products of these rows of x, as they are or rounded first. */
std::vector<float> multiply(pair_backend *b, const mm_packed *w, const std::vector<float> &x, const std::vector<uint32_t> &rows,
                            bool rounds) {
  std::vector<float> y(rows.size() * w->n);
  const float *weight = b->of(w);
  each((uint32_t)rows.size(), [&](uint32_t r) {
    std::vector<float> row(x.begin() + (size_t)rows[r] * w->k, x.begin() + (size_t)(rows[r] + 1) * w->k);
    if (rounds) row = rounded(b, w, row, row, row);
    if (rounds && r == 0 && b->c.options.act_quant && w->scheme->act != MM_ACT_KEPT) plant_code(&row);
    for (uint32_t i = 0; i < w->n; i++) y[(size_t)r * w->n + i] = dot(weight + (size_t)i * w->k, row.data(), w->k);
  });
  plant_rows(&y, w->n);
  return y;
}

void compare_experts(pair_backend *b, mm_act y, const std::vector<float> &x, const mm_packed *w13, const mm_packed *w2) {
  const uint32_t T = b->batch->tokens, hidden = y.width, k = b->c.model->top_k;
  const auto got = paired_rows(y, T);
  const float *up = b->of(w13), *down = b->of(w2);
  const uint64_t seed = g_rng.next();
  std::vector<expert_row> rows(T);
  const auto one = [&](uint32_t t) {
    rng random = {seed + t};
    std::vector<float> row(x.begin() + (size_t)t * hidden, x.begin() + (size_t)(t + 1) * hidden);
    const auto score = b->router->scores(row.data()), key = b->router->keys(row.data());
    const auto order = best_first(key);
    const double gap = key[order[k - 1]] - key[order[k]], largest = std::max(fabs(key[order[0]]), 1.0);
    if (gap <= 1e-6 * largest) return; /* y stays empty: any sum in f32 may choose either */
    row = rounded(b, w13, row, row, row);
    double total = 0;
    const double scale = b->c.model->routed_scale > 0 ? b->c.model->routed_scale : 1;
    for (uint32_t j = 0; j < k; j++) total += b->router->sigmoid ? score[order[j]] : exp(score[order[j]] - score[order[0]]);
    rows[t].y.resize(hidden), rows[t].moved.resize(hidden);
    for (uint32_t j = 0; j < k; j++) {
      const uint32_t e = g_plant == PLANT_EXPERT && j == 0 ? order[k] : order[j];
      const double weight = (b->router->sigmoid ? score[e] : exp(score[e] - score[order[0]])) / total * scale;
      add_expert(&rows[t], b, w13, up + (size_t)e * w13->n * w13->k, w2, down + (size_t)e * w2->n * w2->k, row, (float)weight, &random);
    }
  };
  each(T, one);
  for (uint32_t t = 0; t < T; t++) {
    const expert_row &r = rows[t];
    if (r.y.empty()) {
      g_found.ties++;
      continue;
    }
    const double d = distance(r.y.data(), &got[(size_t)t * hidden], hidden), s = length(r.y.data(), hidden);
    judge(EXPERTS, t, d / s, sqrt(pow(kOps[EXPERTS].limit, 2) * r.smooth + 2 * r.ties) / s);
    g_found.sums[EXPERTS].add(d * d, pow(distance(r.y.data(), r.moved.data(), hidden), 2), r.smooth);
  }
}

/* ---- the selection of blocks, and dense MLPs ---- */

/* No block of the GPU's list has a score lower than one that it leaves out by more than q and k in bf16 may make of it: six standard
 * deviations of both. Blocks that are read anyway are not scored. */
bool near_tie(const pair_backend *b, uint32_t layer, mm_act q, uint32_t row, uint32_t head, uint32_t pos, const uint32_t *list,
              uint32_t count) {
  const mm_model *m = b->c.model;
  const uint32_t all = pos / m->index_block + 1, expected = std::min(m->index_top_k, all);
  const uint32_t forced = all > expected ? m->index_local : expected, others = all - forced;
  if (count != expected || !std::is_sorted(list, list + count)) return false;
  for (uint32_t i = 0; i < forced; i++) {
    if (list[count - forced + i] != others + i) return false;
  }
  double least = INFINITY, most = -INFINITY, spread = 0;
  for (uint32_t at = 0; at < others; at++) {
    const mm_test_score s = mm_test_score_of(b->cpu, layer, on_cpu(q), row, head, at);
    spread = std::max(spread, s.spread);
    std::binary_search(list, list + count - forced, at) ? least = std::min(least, s.score) : most = std::max(most, s.score);
  }
  return least >= most - 6 * 1.42 * kRounding * spread;
}

/* The GPU's lists, judged, and put in the place of the CPU's own: attention reads the same blocks on both. */
void force_blocks(const pair_backend *b, uint32_t layer, mm_act q) {
  const mm_model *m = b->c.model;
  const uint32_t rows = b->batch->tokens, heads = mm_test_index_heads(b->cpu);
  std::vector<uint32_t> block((size_t)rows * heads * m->index_top_k), count((size_t)rows * heads);
  read_blocks(b->gpu, &block, &count);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t j = 0; s->slot >= 0 && j < s->count * heads; j++) {
      const uint32_t row = s->first + j / heads, head = j % heads;
      const size_t at = (size_t)row * heads + head;
      judge(INDEX, row, near_tie(b, layer, q, row, head, s->pos + j / heads, &block[at * m->index_top_k], count[at]) ? 0 : INFINITY, 1);
    }
  }
  g_found.lists += count.size(), g_found.others += mm_test_set_blocks(b->cpu, block.data(), count.data(), rows);
  for (mm_backend *r : b->rough) mm_test_set_blocks(r, block.data(), count.data(), rows);
}

/* y of a dense MLP on top of what was there. */
std::vector<float> mlp_of(pair_backend *b, const std::vector<float> &x, const mm_packed *up, const mm_packed *down,
                          const std::vector<float> &before) {
  std::vector<uint32_t> all(b->batch->tokens);
  for (uint32_t t = 0; t < all.size(); t++) all[t] = t;
  const uint32_t inter = down->k;
  const auto wide = multiply(b, up, x, all, true);
  std::vector<float> middle(all.size() * inter);
  for (size_t t = 0; t < all.size(); t++) {
    for (uint32_t i = 0; i < inter; i++)
      middle[t * inter + i] =
          to_float(__float2bfloat16(activation(b->c.model, wide[t * 2 * inter + i], wide[t * 2 * inter + inter + i]).value));
  }
  auto y = multiply(b, down, middle, all, true);
  for (size_t i = 0; i < before.size(); i++) y[i] += before[i];
  return y;
}

}  // namespace

std::vector<float> paired_rows(mm_act a, uint32_t rows) {
  std::vector<__nv_bfloat16> v((size_t)rows * a.width);
  std::vector<float> f;
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemcpy(v.data(), on_gpu(a).data, v.size() * sizeof v[0], cudaMemcpyDeviceToHost));
  for (auto x : v) f.push_back(to_float(x));
  return f;
}

static void close_pair(pair_backend *b) {
  mm_ops_cpu.close(b->cpu), mm_ops_cuda.close(b->gpu);
  for (mm_backend *r : b->rough) mm_ops_cpu.close(r);
}

static mm_ops paired_ops() {
  mm_ops o = mm_ops_cuda;
  o.name = "paired";
  o.open = [](const mm_backend_config *c, mm_err *err) -> mm_backend * {
    auto b = std::make_unique<pair_backend>();
    b->c = *c, b->cpu = mm_ops_cpu.open(c, err), b->gpu = b->cpu ? mm_ops_cuda.open(c, err) : nullptr;
    bool open = b->gpu;
    for (auto &r : b->rough) open = open && (r = mm_ops_cpu.open(c, err));
    if (open) return reinterpret_cast<mm_backend *>(b.release());
    close_pair(b.get());
    return nullptr;
  };
  o.close = [](mm_backend *b) {
    if (!b) return;
    close_pair(pair_of(b));
    delete pair_of(b);
  };
  o.act = [](mm_backend *b, uint32_t width, mm_act *out, mm_err *err) {
    pair_backend *p = pair_of(b);
    p->acts.emplace_back();
    *out = {&p->acts.back(), width};
    pair_act *a = &p->acts.back();
    bool open = mm_ops_cpu.act(p->cpu, width, &a->cpu, err) && mm_ops_cuda.act(p->gpu, width, &a->gpu, err);
    for (uint32_t i = 0; i < kTries; i++) open = open && mm_ops_cpu.act(p->rough[i], width, &a->rough[i], err);
    return open;
  };
  o.begin = [](mm_backend *b, const mm_batch *batch, mm_err *err) {
    pair_backend *p = pair_of(b);
    p->batch = batch;
    bool begun = mm_ops_cpu.begin(p->cpu, batch, err) && mm_ops_cuda.begin(p->gpu, batch, err);
    for (mm_backend *r : p->rough) begun = begun && mm_ops_cpu.begin(r, batch, err);
    return begun;
  };
  o.embed = [](mm_backend *b, mm_act x, const mm_packed *table) {
    const pair_backend *p = pair_of(b);
    mm_ops_cuda.embed(p->gpu, on_gpu(x), table), mm_ops_cpu.embed(p->cpu, on_cpu(x), table), compare(EMBED, p, x);
  };
  o.norm = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) {
    const pair_backend *p = pair_of(b);
    share(p, x);
    mm_ops_cuda.norm(p->gpu, on_gpu(y), on_gpu(x), w, eps), mm_ops_cpu.norm(p->cpu, on_cpu(y), on_cpu(x), w, eps), compare(NORM, p, y);
  };
  o.linear = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *w) {
    pair_backend *p = pair_of(b);
    std::vector<uint32_t> all(p->batch->tokens);
    for (uint32_t t = 0; t < all.size(); t++) all[t] = t;
    const auto want = multiply(p, w, paired_rows(x, p->batch->tokens), all, true);
    mm_ops_cuda.linear(p->gpu, on_gpu(y), on_gpu(x), w);
    compare(LINEAR, want.data(), paired_rows(y, p->batch->tokens).data(), p->batch->tokens, y.width);
  };
  o.joined = {}; /* each by itself */
  o.gqa = [](mm_backend *b, uint32_t layer, mm_act y, mm_act qkv, const mm_packed *q, const mm_packed *k) {
    const pair_backend *p = pair_of(b);
    share(p, qkv);
    for (uint32_t i = 0; i < kTries; i++) roughen(p, qkv, i), mm_ops_cpu.gqa(p->rough[i], layer, on_rough(y, i), on_rough(qkv, i), q, k);
    mm_ops_cuda.gqa(p->gpu, layer, on_gpu(y), on_gpu(qkv), q, k), mm_ops_cpu.gqa(p->cpu, layer, on_cpu(y), on_cpu(qkv), q, k);
    compare_attention(GQA, p, y);
  };
  o.select = [](mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm) {
    const pair_backend *p = pair_of(b);
    share(p, q), share(p, k);
    for (uint32_t i = 0; i < kTries; i++) {
      roughen(p, q, i), roughen(p, k, i);
      mm_ops_cpu.select(p->rough[i], layer, on_rough(q, i), on_rough(k, i), q_norm, k_norm);
    }
    mm_ops_cuda.select(p->gpu, layer, on_gpu(q), on_gpu(k), q_norm, k_norm);
    mm_ops_cpu.select(p->cpu, layer, on_cpu(q), on_cpu(k), q_norm, k_norm);
    compare(INDEX, p, q), force_blocks(p, layer, q);
  };
  o.mlp = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add) {
    pair_backend *p = pair_of(b);
    const uint32_t rows = p->batch->tokens;
    const auto want = mlp_of(p, paired_rows(x, rows), up, down, add ? paired_rows(y, rows) : std::vector<float>());
    mm_ops_cuda.mlp(p->gpu, on_gpu(y), on_gpu(x), up, down, add);
    compare(MLP, want.data(), paired_rows(y, rows).data(), rows, y.width);
  };
  o.lightning = [](mm_backend *b, uint32_t layer, mm_act y, mm_act qkv) {
    const pair_backend *p = pair_of(b);
    share(p, qkv);
    for (uint32_t i = 0; i < kTries; i++) roughen(p, qkv, i), mm_ops_cpu.lightning(p->rough[i], layer, on_rough(y, i), on_rough(qkv, i));
    mm_ops_cuda.lightning(p->gpu, layer, on_gpu(y), on_gpu(qkv)), mm_ops_cpu.lightning(p->cpu, layer, on_cpu(y), on_cpu(qkv));
    compare_attention(LIGHTNING, p, y);
  };
  o.gated_norm = [](mm_backend *b, mm_act y, mm_act x, mm_act gate, const mm_packed *w, double eps) {
    const pair_backend *p = pair_of(b);
    share(p, x), share(p, gate);
    mm_ops_cuda.gated_norm(p->gpu, on_gpu(y), on_gpu(x), on_gpu(gate), w, eps);
    mm_ops_cpu.gated_norm(p->cpu, on_cpu(y), on_cpu(x), on_cpu(gate), w, eps), compare(GATED_NORM, p, y);
  };
  o.route = [](mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias) {
    pair_backend *p = pair_of(b);
    mm_ops_cuda.route(p->gpu, layer, on_gpu(x), router, bias);
    p->router = &p->routers.try_emplace(router, router, bias, p->c.model->router == MM_ROUTER_SIGMOID_BIAS).first->second;
  };
  o.experts = [](mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
    pair_backend *p = pair_of(b);
    const auto given = paired_rows(x, p->batch->tokens);
    mm_ops_cuda.experts(p->gpu, on_gpu(y), on_gpu(x), w13, w2), compare_experts(p, y, given, w13, w2);
  };
  o.combine = [](mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps) {
    const pair_backend *p = pair_of(b);
    share(p, residual), share(p, branch);
    mm_ops_cuda.combine(p->gpu, on_gpu(h), on_gpu(n), on_gpu(residual), on_gpu(branch), scale, w, eps);
    mm_ops_cpu.combine(p->cpu, on_cpu(h), on_cpu(n), on_cpu(residual), on_cpu(branch), scale, w, eps);
    compare(COMBINE_H, p, h), compare(COMBINE_N, p, n);
  };
  o.logits = [](mm_backend *b, mm_act x, const mm_packed *head) {
    pair_backend *p = pair_of(b);
    p->logits = multiply(p, head, paired_rows(x, p->batch->tokens), {p->batch->out, p->batch->out + p->batch->out_count}, false);
    mm_ops_cuda.logits(p->gpu, on_gpu(x), head);
  };
  o.weights.layer = [](mm_backend *b, uint32_t l) { mm_ops_cuda.weights.layer(pair_of(b)->gpu, l); };
  o.end = [](mm_backend *b, float *out, mm_err *err) {
    const pair_backend *p = pair_of(b);
    if (!mm_ops_cuda.end(p->gpu, out, err)) return false;
    compare(LOGITS, p->logits.data(), out, p->batch->out_count, p->c.weights->vocab_rows);
    return true;
  };
  o.sampler.sample = nullptr, o.sampler.defer = nullptr, o.sampler.sample_deferred = nullptr, o.sampler.load_ids = nullptr,
  o.sampler.score = nullptr, o.sampler.collect = nullptr, o.copy = nullptr, o.read = nullptr, o.expert_load = nullptr,
  o.copy_rate = nullptr;
  o.cache = {mm_ops_cuda.cache.pages}; /* neither of the two can move, save or restore for both */
  return o;
}
const mm_ops kPairedOps = paired_ops();

plant g_plant = PLANT_NOTHING;

size_t take_beyond() {
  const size_t beyond = g_found.beyond;
  g_found = {};
  return beyond;
}

void report_paired(const std::string &what, bool averages) {
  std::string text = what + ": every op given the GPU's own inputs, worst row:";
  for (int i = 0; i < OPS; i++) {
    char one[60];
    snprintf(one, sizeof one, "%s %s %.1e", i ? "," : "", kOps[i].name, g_found.worst[i]);
    text += one;
  }
  printf("     %s\n", text.c_str());
  char line[160];
  snprintf(line, sizeof line, "%s: %llu rows of ops off by more than rounding, of %llu; at a tie of the router %llu", what.c_str(),
           (unsigned long long)g_found.beyond, (unsigned long long)g_found.rows, (unsigned long long)g_found.ties);
  report_true(line, g_found.beyond == 0 && g_found.ties * 1000 <= g_found.rows);
  if (g_found.lists) {
    snprintf(line, sizeof line, "%s: %llu of %llu lists of blocks are others than the CPU's, each at a near tie", what.c_str(),
             (unsigned long long)g_found.others, (unsigned long long)g_found.lists);
    report_true(line, g_found.others * 20 <= g_found.lists);
  }
  for (op kind : {GQA, LIGHTNING, EXPERTS}) {
    const auto &s = g_found.sums[kind];
    if (averages && s.size)
      report(what + ": " + kOps[kind].name + ", all rows", sqrt(s.error / s.size), 1.25 * hypot(4e-3, sqrt(s.moved / s.size)));
  }
  g_found = {};
}
