/* Shapes of the released models, with weights that nobody stored (bench_shapes.h). */
#include "runtime/bench/bench_shapes.h"

#include <string.h>

mm_model mm_bench_model(const mm_bench_shape *s) {
  const bool m1 = strcmp(s->model, "m1") == 0;
  const double alpha = m1 ? 3.5565588200778455 : 1;
  mm_model m = {.family = m1 ? MM_FAMILY_M1 : MM_FAMILY_M2,
                .router = m1 ? MM_ROUTER_SOFTMAX : MM_ROUTER_SIGMOID_BIAS,
                .postnorm = m1,
                .qk_norm = !m1,
                .hidden = m1 ? 6144 : 3072,
                .layers = s->layers,
                .heads = m1 ? 64 : 48,
                .kv_heads = 8,
                .head_dim = 128,
                .rotary_dim = 64,
                .experts = m1 ? 32 : 256,
                .top_k = m1 ? 2 : 8,
                .intermediate = m1 ? 9216 : 1536,
                .vocab = s->vocab,
                .max_positions = 1 << 20,
                .rope_theta = m1 ? 1e7 : 5e6,
                .norm_eps = m1 ? 1e-5 : 1e-6,
                .lightning_norm_eps = 1e-6,
                .deepnorm_lightning = {alpha, 1},
                .deepnorm_full = {alpha, 1},
                .deepnorm_mlp = {alpha, 1}};
  for (uint32_t l = 0; l < s->layers; l++) m.attn[l] = m1 && l % 8 != 7 ? MM_ATTN_LIGHTNING : MM_ATTN_FULL;
  return m;
}

/* A weight without planes: the backend makes its numbers, of this seed. */
static mm_packed weight(const char *scheme, uint32_t seed, uint32_t lead, uint32_t n, uint32_t k) {
  mm_packed w = {.scheme = mm_scheme_find(scheme), .lead = lead, .n = n, .k = k, .random = {.seed = seed}};
  for (unsigned i = 0; i < w.scheme->plane_count; i++) w.cell[i] = w.scheme->plane[i].cell;
  return w;
}

/* As converters cut: cells of scales become finer until a slice has whole ones. */
static void fit(uint32_t *cell, uint32_t slice) {
  while (*cell && slice % *cell) *cell /= 2;
}

/* One of `ways` slices of each of some matrices: of how many, of which the first is `first`. */
typedef struct cut {
  uint32_t ways, part, first, lead;
} cut;

/* Slices of rows, from each of up to three row ranges of the whole matrix; and of k columns. */
static mm_packed rows_of(const cut *c, const char *scheme, uint32_t seed, const uint32_t chunk[3], uint32_t k) {
  mm_packed w = weight(scheme, seed, c->lead, 0, k);
  w.random.first = c->first;
  for (uint32_t i = 0, before = 0; i < 3 && chunk[i]; before += chunk[i++]) {
    const uint32_t slice = chunk[i] / c->ways;
    w.random.at[i] = w.n, w.random.from[i] = before + c->part * slice, w.n += slice;
    for (unsigned p = 0; c->ways > 1 && p < w.scheme->plane_count; p++) fit(&w.cell[p].n, slice);
  }
  return w;
}
static mm_packed columns_of(const cut *c, const char *scheme, uint32_t seed, uint32_t n, uint32_t k) {
  mm_packed w = weight(scheme, seed, c->lead, n, k / c->ways);
  w.random.first = c->first;
  for (unsigned i = 0; c->ways > 1 && i < w.scheme->plane_count; i++) fit(&w.cell[i].k, w.k);
  if (c->ways > 1) w.first_k = c->part * w.k, w.whole_k = k, w.cut_k = w.k;
  return w;
}

bool mm_bench_weights(const mm_bench_shape *s, const mm_model *m, mm_rank_weights *w, mm_err *err) {
  const uint32_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim, vocab = m->vocab / s->tp, ways = s->tp / s->ep,
                 held = m->experts / s->ep;
  const cut one = {s->tp, s->rank, 0, 1}, own = {ways, s->rank % ways, s->rank / ways * held, held};
  uint32_t seed = 0;
#define SEED      ++seed
#define ROWS(...) ((const uint32_t[3]){__VA_ARGS__})
  if (m->vocab % s->tp != 0)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found %u ids and %u ranks, expected as many ids on each", m->vocab, s->tp);
  *w = (mm_rank_weights){
      .rank = s->rank, .tp = s->tp, .layer_end = m->layers, .expert_first = own.first, .vocab_first = s->rank * vocab, .vocab_rows = vocab};
  w->embed = rows_of(&one, "bf16", SEED, ROWS(m->vocab), m->hidden);
  w->head = rows_of(&one, s->head, SEED, ROWS(m->vocab), m->hidden);
  w->final_norm = weight("bf16", SEED, 1, m->hidden, 1);
  if (!(w->layer = mm_calloc(m->layers, sizeof *w->layer, err))) return false;
  for (uint32_t l = 0; l < m->layers; l++) {
    mm_layer_weights *y = &w->layer[l];
    const bool lightning = m->attn[l] == MM_ATTN_LIGHTNING;
    y->input_norm = weight("bf16", SEED, 1, m->hidden, 1), y->post_norm = weight("bf16", SEED, 1, m->hidden, 1);
    y->qkv = rows_of(&one, s->quant, SEED, lightning ? ROWS(3 * q) : ROWS(q, kv, kv), m->hidden);
    y->out = columns_of(&one, s->quant, SEED, m->hidden, q);
    if (lightning)
      y->output_gate = rows_of(&one, s->quant, SEED, ROWS(q), m->hidden), y->attn_norm = rows_of(&one, "bf16", SEED, ROWS(q), 1);
    if (m->qk_norm) y->q_norm = rows_of(&one, "bf16", SEED, ROWS(q), 1), y->k_norm = rows_of(&one, "bf16", SEED, ROWS(kv), 1);
    y->router = weight("bf16", SEED, 1, m->experts, m->hidden);
    if (m->router == MM_ROUTER_SIGMOID_BIAS) y->router_bias = weight("bf16", SEED, 1, m->experts, 1);
    y->w13 = rows_of(&own, s->experts, SEED, ROWS(m->intermediate, m->intermediate), m->hidden);
    y->w2 = columns_of(&own, s->experts, SEED, m->hidden, m->intermediate);
  }
#undef SEED
#undef ROWS
  return true;
}

double mm_bench_bytes(const mm_packed *w) {
  double bytes = 0;
  for (unsigned i = 0; w->scheme && i < w->scheme->plane_count; i++)
    bytes += (double)mm_plane_elements(w->n, w->k, w->cell[i]) * (double)mm_dtype_size(w->scheme->plane[i].dtype);
  return bytes;
}
double mm_bench_parameters(const mm_packed *w) { return w->scheme ? (double)w->n * w->k : 0; }
