/* A step's attention, routing and choices against doubles (witness.h). */
#include "tests/ops/witness.h"

#include <string.h>

#include <algorithm>

#include "runtime/engine/sample.h"

namespace {

template <class T>
std::vector<T> fetch(const T *from, size_t n) {
  std::vector<T> v(n);
  CUDA_OK(cudaMemcpy(v.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}
const __nv_bfloat16 *numbers_of(mm_act a) { return static_cast<const __nv_bfloat16 *>(a.data); }
std::vector<double> wide(const std::vector<__nv_bfloat16> &v) {
  std::vector<double> out;
  for (auto x : v) out.push_back(to_float(x));
  return out;
}
double dot(const double *a, const double *b, size_t n) {
  double s = 0;
  for (size_t i = 0; i < n; i++) s += a[i] * b[i];
  return s;
}

/* Keys or values of a slot's first n tokens, one kv head; `n` tokens of d numbers. */
std::vector<double> cached(const mm_backend *b, const void *data, const float *scale, uint32_t slot, uint32_t head, uint32_t n) {
  const uint32_t d = b->heads.head_dim, pages = (n + MM_CU_PAGE - 1) / MM_CU_PAGE;
  const size_t bytes = (size_t)MM_CU_PAGE * d * (scale ? 1 : 2), first = (size_t)slot * b->pages.per_slot * b->heads.kv_heads + head;
  std::vector<uint8_t> raw(pages * bytes);
  std::vector<float> scales(scale ? pages * MM_CU_PAGE : 0);
  CUDA_OK(cudaMemcpy2D(raw.data(), bytes, static_cast<const uint8_t *>(data) + first * bytes, b->heads.kv_heads * bytes, bytes, pages,
                       cudaMemcpyDeviceToHost));
  if (scale)
    CUDA_OK(cudaMemcpy2D(scales.data(), MM_CU_PAGE * 4, scale + first * MM_CU_PAGE, b->heads.kv_heads * MM_CU_PAGE * 4, MM_CU_PAGE * 4,
                         pages, cudaMemcpyDeviceToHost));
  std::vector<double> v((size_t)n * d);
  for (size_t i = 0; i < v.size(); i++) {
    __nv_bfloat16 x;
    if (!scale) memcpy(&x, &raw[2 * i], 2);
    v[i] = scale ? e4m3(raw[i]) * scales[i / d] : to_float(x);
  }
  return v;
}

std::vector<double> attend(const std::vector<double> &q, const std::vector<double> &k, const std::vector<double> &v) {
  const size_t d = q.size(), n = k.size() / d;
  std::vector<double> s(n), o(d, 0.0);
  double top = -INFINITY, total = 0;
  for (size_t p = 0; p < n; p++) s[p] = dot(q.data(), &k[p * d], d) / sqrt((double)d), top = std::max(top, s[p]);
  for (size_t p = 0; p < n; p++) {
    const double e = exp(s[p] - top);
    total += e;
    for (size_t i = 0; i < d; i++) o[i] += e * v[p * d + i];
  }
  for (double &x : o) x /= total;
  return o;
}

}  // namespace

witness::witness(const mm_forward *forward) : f(forward) {
  mm_err err = {};
  sampler = mm_sampler_open(f->model->vocab, &err);
  if (!sampler) fprintf(stderr, "%s\n", err.text), exit(1);
}
witness::~witness() { mm_sampler_close(sampler); }

void witness::found(bool ok, const char *what, const place &at, double error) {
  if (ok || wrong++ > 0) return;
  char text[160];
  snprintf(text, sizeof text, ", first %s of row %u, slot %u, position %u: %.1e of what is allowed", what, at.row, at.slot, at.pos, error);
  first = text;
}

bool witness::find_row(const mm_batch &batch, place *at) const {
  for (int tries = 0; tries < 20; tries++) {
    const mm_span &s = batch.span[g_rng.below(batch.span_count)];
    const uint32_t i = g_rng.below(s.count);
    *at = {s.first + i, (uint32_t)s.slot, s.pos + i, s.first, s.pos};
    if (s.slot >= 0) return true;
  }
  return false;
}

/* True if attention took the row as a decode step does. */
bool witness::single(const place &at) const { return f->backend->step.decode || at.row < f->backend->step.singles; }

/* A row's query as scores take it. Prefill chunks leave it in place; single tokens leave the projection, which is normed and turned here.
 */
std::vector<double> witness::turned_query(const place &at, uint32_t head) const {
  const mm_backend *b = f->backend;
  const mm_layer_weights *y = &f->weights->layer[f->model->layers - 1];
  const uint32_t d = b->heads.head_dim, all = b->heads.heads * d, half = b->heads.rotary_dim / 2;
  const auto row = wide(fetch(numbers_of(f->qkv) + (size_t)at.row * y->qkv.n, all));
  std::vector<double> q(row.begin() + head * d, row.begin() + (head + 1) * d);
  if (!single(at)) return q;
  if (f->model->qk_norm) {
    const double scale = 1 / sqrt(dot(row.data(), row.data(), all) / all + f->model->norm_eps);
    const auto w = fetch(b->weights.values.at(&y->q_norm) + head * d, d);
    for (uint32_t i = 0; i < d; i++) q[i] *= scale * w[i];
  }
  const auto freq = fetch(b->attention.inv_freq, half);
  for (uint32_t i = 0; i < half; i++) {
    const double angle = (double)((float)at.pos * freq[i]), x = q[i], z = q[i + half];
    q[i] = x * cos(angle) - z * sin(angle), q[i + half] = z * cos(angle) + x * sin(angle);
  }
  return q;
}

/* Queries of single tokens are rounded within the kernel: six times what such rounding does to the doubles is allowed. */
void witness::look_attention(const place &at) {
  const mm_backend *b = f->backend;
  const uint32_t d = b->heads.head_dim, head = g_rng.below(b->heads.heads), kv = head / (b->heads.heads / b->heads.kv_heads);
  const mm_cu_kv &cache = b->cache[f->model->layers - 1].kv;
  const auto k = cached(b, cache.k, cache.k_scale, at.slot, kv, at.pos + 1), v = cached(b, cache.v, cache.v_scale, at.slot, kv, at.pos + 1);
  const auto q = turned_query(at, head), want = attend(q, k, v);
  const uint32_t from = plant == WITNESS_ROW ? (head + b->heads.heads / 2) % b->heads.heads : head;
  const auto got = wide(fetch(numbers_of(f->o) + ((size_t)at.row * b->heads.heads + from) * d, d));
  double moved = 0;
  for (int i = 0; single(at) && i < 4; i++) {
    auto rough = q;
    for (double &x : rough) x *= 1 + 0x1p-9 * g_rng.normal();
    moved += pow(relative_error(want, attend(rough, k, v)), 2) / 4;
  }
  const double limit = hypot(1e-2, 6 * sqrt(moved)), error = relative_error(want, got) / limit;
  rows++, judged += limit < 0.3;
  worst_attention = std::max(worst_attention, error);
  found(error <= 1, "attention", at, error);
}

/* The recurrence from the span's first row on. o is normed in place: it is compared but for the norm's one factor of a row. */
void witness::look_lightning(const place &at, const float *state) {
  const mm_backend *b = f->backend;
  const mm_layer_weights *y = &f->weights->layer[f->model->layers - 1];
  const layer_cache &cache = b->cache[f->model->layers - 1];
  const uint32_t d = b->heads.head_dim, heads = b->heads.heads, head = g_rng.below(heads), width = heads * 3 * d;
  const size_t cell = ((size_t)at.slot * heads + head) * d * d;
  const auto before = fetch(state + cell, (size_t)d * d), after = fetch(cache.state + cell, (size_t)d * d);
  std::vector<double> s(before.begin(), before.end()), o(d), got_state(after.begin(), after.end());
  if (at.start == 0) std::fill(s.begin(), s.end(), 0.0);
  const double decay = exp(-(double)fetch(cache.slope + head, 1)[0]);
  for (uint32_t row = at.first; row <= at.row; row++) {
    auto z = wide(fetch(numbers_of(f->qkv) + (size_t)row * width + (size_t)head * 3 * d, 3 * d));
    for (double &x : z) x = silu_ref(x);
    std::fill(o.begin(), o.end(), 0.0);
    for (uint32_t i = 0; i < d * d; i++) s[i] = decay * s[i] + z[d + i / d] * z[2 * d + i % d], o[i % d] += z[i / d] * s[i];
  }
  const size_t column = (size_t)at.row * heads * d + head * d;
  const auto gate = wide(fetch(numbers_of(f->gate) + column, d)), got = wide(fetch(numbers_of(f->o) + column, d));
  const auto w = fetch(b->weights.values.at(&y->attn_norm) + head * d, d);
  for (uint32_t i = 0; i < d; i++) o[i] *= w[i] / (1 + exp(-gate[i]));
  const double factor = dot(o.data(), got.data(), d) / dot(o.data(), o.data(), d);
  for (double &x : o) x *= factor;
  if (plant == WITNESS_ROW) std::swap(s[0], s[1]), std::reverse(o.begin(), o.end());
  const double error = factor > 0 ? relative_error(o, got) / 2e-2 : INFINITY,
               off = relative_error(s, got_state) / (single(at) ? 1e-5 : 5e-3);
  rows++, judged++;
  worst_attention = std::max(worst_attention, error), worst_state = std::max(worst_state, off);
  found(error <= 1, "lightning", at, error), found(off <= 1, "lightning's state", at, off);
}

/* Experts and weights from the router's logits; none where two lie closer than sums in f32 resolve. */
void witness::look_routing(const place &at) {
  const mm_cu_route &r = f->backend->experts.route;
  const auto z = fetch(r.logits + (size_t)at.row * r.experts, r.experts);
  const auto bias = r.bias ? fetch(r.bias, r.experts) : std::vector<float>(r.experts);
  const auto id = fetch(r.id + (size_t)at.row * r.top_k, r.top_k);
  const auto weight = fetch(r.weight + (size_t)at.row * r.top_k, r.top_k);
  std::vector<double> score(r.experts), key(r.experts);
  std::vector<uint32_t> order(r.experts);
  for (uint32_t e = 0; e < r.experts; e++)
    score[e] = r.sigmoid ? 1 / (1 + exp(-(double)z[e])) : z[e], key[e] = score[e] + (r.sigmoid ? bias[e] : 0), order[e] = e;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t c) { return key[a] > key[c]; });
  for (uint32_t j = 0; j < r.top_k; j++) {
    if (key[order[j]] - key[order[j + 1]] <= 3e-6 * std::max(1.0, fabs(key[order[j]]))) return;
  }
  double total = 0, error = 0;
  for (uint32_t j = 0; j < r.top_k; j++) total += r.sigmoid ? score[order[j]] : exp(score[order[j]] - score[order[0]]);
  if (plant == WITNESS_EXPERT) std::swap(order[0], order[r.top_k]);
  for (uint32_t j = 0; j < r.top_k; j++) {
    const double want = (r.sigmoid ? score[order[j]] : exp(score[order[j]] - score[order[0]])) / total;
    error = id[j] == order[j] ? std::max(error, fabs(weight[j] - want) / 1e-5) : INFINITY;
    if (std::isinf(error)) break;
  }
  routed++;
  found(error <= 1, "routing", at, error);
}

void witness::look_choices(const mm_batch &batch, const std::vector<float> &id) {
  const uint32_t vocab = f->model->vocab;
  auto logits = fetch(f->backend->logits.own, (size_t)batch.out_count * vocab);
  const mm_span *s = batch.span;
  for (uint32_t i = 0; i < batch.out_count; i++) {
    while (batch.out[i] >= s->first + s->count) s++;
    const uint32_t pos = s->pos + (batch.out[i] - s->first);
    const int32_t want = mm_sample(sampler, &batch.sampling[i], pos + UINT64_C(1), &logits[(size_t)i * vocab]);
    const int32_t got = (int32_t)id[i] + (plant == WITNESS_TOKEN);
    chosen++;
    found(want == got, "choice", {batch.out[i], (uint32_t)s->slot, pos, s->first, s->pos}, want == got ? 0 : INFINITY);
  }
}

void witness::look(const mm_batch &batch, const float *state, const std::vector<float> *id) {
  place at;
  CUDA_OK(cudaDeviceSynchronize());
  if (id) look_choices(batch, *id);
  if (!find_row(batch, &at)) return;
  if (state) { /* whose state is after the span's last row */
    for (uint32_t i = 0; i < batch.span_count; i++) {
      const mm_span &s = batch.span[i];
      if (s.first == at.first) at.row = s.first + s.count - 1, at.pos = s.pos + s.count - 1;
    }
    look_lightning(at, state);
  } else {
    look_attention(at);
  }
  look_routing(at);
}
