/* Attention of the backward pass, full and lightning, forwards and backwards. Both are o_i = Σ_j a_ij v_j over j ≤ i, with a_ij the softmax
 * of q_i·k_j/√d, or q_i·k_j times the decay exp(-s)^(i - j). Of a head some queries are taken at once. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_gradient_inside.h"
#include "runtime/engine/position.h"

enum { Q = MM_GRADIENT_QUERIES };

/* The matrices of one head in a thread's scratch. */
typedef struct head {
  float *q, *k, *v, *o, *dq, *dk, *dv, *d_o; /* [T, d] */
  float *kt, *vt;                            /* [d, T]: k and v, turned */
  float *a, *da;                             /* [Q, T]: of the queries at work; their gradients, then those of q·k */
  float *turned;                             /* [T, Q] */
} head;

uint64_t mm_gradient_scratch(const mm_cpu_gradient *g) { return (uint64_t)g->tokens * (10 * (uint64_t)g->m->head_dim + 3 * Q); }

static head head_in(const mm_cpu_gradient *g, unsigned worker) {
  const size_t n = (size_t)g->tokens * g->m->head_dim;
  float *at = g->scratch + worker * g->scratch_floats;
  head x;
  float **const part[] = {&x.q, &x.k, &x.v, &x.o, &x.dq, &x.dk, &x.dv, &x.d_o, &x.kt, &x.vt};
  for (size_t i = 0; i < sizeof part / sizeof *part; i++, at += n) *part[i] = at;
  x.a = at, x.da = at + (size_t)Q * g->tokens, x.turned = x.da + (size_t)Q * g->tokens;
  return x;
}

/* A layer's attention. */
typedef struct attention {
  mm_cpu_gradient *g;
  uint32_t layer;
  bool lightning, back;
} attention;

/* Numbers [t, d] of a head, between a matrix of `width` columns and the scratch. */
static void load_head(const attention *j, float *to, const float *from, uint32_t width) {
  const uint32_t d = j->g->m->head_dim;
  for (size_t t = 0; t < j->g->T; t++) memcpy(to + t * d, from + t * width, d * sizeof *to);
}
static void store_head(const attention *j, float *to, const float *from, uint32_t width) {
  const uint32_t d = j->g->m->head_dim;
  for (size_t t = 0; t < j->g->T; t++) memcpy(to + t * width, from + t * d, d * sizeof *to);
}

/* a of queries [first, first + n), 0 beyond each one's own position. */
static void find_weights(const attention *j, const head *x, uint32_t first, uint32_t n, double slope) {
  const uint32_t d = j->g->m->head_dim, seen = first + n;
  const float scale = 1.0f / sqrtf((float)d);
  memset(x->a, 0, (size_t)n * seen * sizeof *x->a);
  mm_product_add(x->a, seen, (mm_dense){x->q + (size_t)first * d, d}, (mm_dense){x->kt, j->g->T}, n, d, seen);
  for (uint32_t i = 0; i < n; i++) {
    float *a = x->a + (size_t)i * seen, most = -INFINITY;
    double sum = 0;
    const uint32_t own = first + i + 1;
    for (uint32_t c = 0; j->lightning && c < own; c++) a[c] *= (float)exp(-slope * (double)(own - 1 - c));
    for (uint32_t c = 0; !j->lightning && c < own; c++) most = fmaxf(most, a[c] *= scale);
    for (uint32_t c = 0; !j->lightning && c < own; c++) sum += (double)(a[c] = expf(a[c] - most));
    for (uint32_t c = 0; !j->lightning && c < own; c++) a[c] = (float)((double)a[c] / sum);
    for (uint32_t c = own; c < seen; c++) a[c] = 0;
  }
}

/* The gradients of q·k from those of a, in their place. */
static void find_gradients(const attention *j, const head *x, uint32_t first, uint32_t n, double slope) {
  const uint32_t d = j->g->m->head_dim, seen = first + n;
  const float scale = 1.0f / sqrtf((float)d);
  memset(x->da, 0, (size_t)n * seen * sizeof *x->da);
  mm_product_add(x->da, seen, (mm_dense){x->d_o + (size_t)first * d, d}, (mm_dense){x->vt, j->g->T}, n, d, seen);
  for (uint32_t i = 0; i < n; i++) {
    float *da = x->da + (size_t)i * seen;
    const float *a = x->a + (size_t)i * seen;
    double mean = 0;
    const uint32_t own = first + i + 1;
    for (uint32_t c = 0; !j->lightning && c < own; c++) mean += (double)a[c] * (double)da[c];
    for (uint32_t c = 0; c < own; c++)
      da[c] = j->lightning ? da[c] * (float)exp(-slope * (double)(own - 1 - c)) : a[c] * (da[c] - (float)mean) * scale;
    for (uint32_t c = own; c < seen; c++) da[c] = 0;
  }
}

/* to[seen, d] += m[n, seen]ᵀ · rows[n, d]. */
static void add_turned(const head *x, float *to, const float *m, const float *rows, uint32_t n, uint32_t seen, uint32_t d) {
  mm_product_turn(x->turned, Q, (mm_dense){m, seen}, n, seen);
  mm_product_add(to, d, (mm_dense){x->turned, Q}, (mm_dense){rows, d}, seen, n, d);
}

/* All queries of a head. */
static void run_queries(const attention *j, const head *x, double slope) {
  const uint32_t d = j->g->m->head_dim, T = j->g->T;
  memset(j->back ? x->dq : x->o, 0, (size_t)T * d * sizeof(float));
  for (uint32_t first = 0; first < T; first += Q) {
    const uint32_t n = (uint32_t)mm_min(Q, T - first), seen = first + n;
    const size_t at = (size_t)first * d;
    find_weights(j, x, first, n, slope);
    if (!j->back) {
      mm_product_add(x->o + at, d, (mm_dense){x->a, seen}, (mm_dense){x->v, d}, n, seen, d);
      continue;
    }
    find_gradients(j, x, first, n, slope);
    mm_product_add(x->dq + at, d, (mm_dense){x->da, seen}, (mm_dense){x->k, d}, n, seen, d);
    add_turned(x, x->dk, x->da, x->q + at, n, seen, d);
    add_turned(x, x->dv, x->a, x->d_o + at, n, seen, d);
  }
}

/* One KV head with its query heads, or one lightning head. */
static bool run_head(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const attention *j = ctx;
  mm_cpu_gradient *g = j->g;
  const uint32_t d = g->m->head_dim, group = j->lightning ? 1 : g->m->heads / g->m->kv_heads, width = g->w.layer[j->layer].qkv.n;
  const head x = head_in(g, worker);
  const size_t bytes = (size_t)g->T * d * sizeof(float), lightning = item * 3 * d, kv = (g->m->heads + item) * d;
  const size_t k = j->lightning ? lightning + d : kv, v = j->lightning ? k + d : kv + (size_t)g->m->kv_heads * d;
  const double slope = j->lightning ? mm_lightning_decay(g->m, j->layer, (uint32_t)item) : 0;
  load_head(j, x.k, g->act + k, width);
  load_head(j, x.v, g->act + v, width);
  mm_product_turn(x.kt, g->T, (mm_dense){x.k, d}, g->T, d);
  mm_product_turn(x.vt, g->T, (mm_dense){x.v, d}, g->T, d);
  if (j->back) memset(x.dk, 0, bytes), memset(x.dv, 0, bytes);
  for (uint32_t i = 0; i < group; i++) {
    const size_t h = item * group + i, q = j->lightning ? lightning : h * d;
    load_head(j, x.q, g->act + q, width);
    if (j->back) load_head(j, x.d_o, g->d_o + h * d, g->inner);
    run_queries(j, &x, slope);
    if (j->back)
      store_head(j, g->d_act + q, x.dq, width);
    else
      store_head(j, g->o + h * d, x.o, g->inner);
  }
  if (j->back) store_head(j, g->d_act + k, x.dk, width), store_head(j, g->d_act + v, x.dv, width);
  return true;
}

static bool run_heads(mm_cpu_gradient *g, uint32_t layer, bool back, mm_err *err) {
  attention j = {g, layer, g->m->attn[layer] == MM_ATTN_LIGHTNING, back};
  return mm_team_run(g->team, j.lightning ? g->m->heads : g->m->kv_heads, run_head, &j, err);
}

/* Half-split RoPE of heads[count] of row t, or with turn = -1 its inverse, which is also how gradients go back. */
static void rotate(const mm_cpu_gradient *g, float *x, uint32_t count, size_t t, float turn) {
  const uint32_t half = g->m->rotary_dim / 2;
  const float *cosines = g->turn + t * 2 * half, *sines = cosines + half;
  for (uint32_t h = 0; h < count; h++, x += g->m->head_dim)
    for (uint32_t i = 0; i < half; i++) {
      const float c = cosines[i], s = turn * sines[i], lo = x[i], hi = x[half + i];
      x[i] = lo * c - hi * s;
      x[half + i] = hi * c + lo * s;
    }
}

/* The norms of q and k of a full layer; forwards on act, backwards on d_act. */
static void norm_queries(mm_cpu_gradient *g, uint32_t layer, bool back) {
  const mm_layer_weights *w = &g->w.layer[layer];
  const uint32_t q = g->m->heads * g->m->head_dim;
  for (int keys = 0; g->m->qk_norm && keys < 2; keys++) {
    const size_t at = keys ? q : 0;
    const mm_gradient_norm of = {.rows = g->T,
                                 .n = keys ? g->m->kv_heads * g->m->head_dim : q,
                                 .stride = w->qkv.n,
                                 .eps = g->m->norm_eps,
                                 .w = mm_gradient_vector(g, keys ? &w->k_norm : &w->q_norm)};
    if (back)
      mm_gradient_normalise_back(g->d_act + at, g->d_act + at, g->raw + at, &of, false);
    else
      mm_gradient_normalise(g->act + at, g->raw + at, &of);
  }
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static mm_gradient_norm output_norm(mm_cpu_gradient *g, uint32_t layer) {
  return (mm_gradient_norm){g->T, g->inner, g->inner, g->m->lightning_norm_eps, mm_gradient_vector(g, &g->w.layer[layer].attn_norm)};
}

bool mm_gradient_attention(mm_cpu_gradient *g, uint32_t layer, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[layer];
  const bool lightning = g->m->attn[layer] == MM_ATTN_LIGHTNING;
  const size_t width = w->qkv.n, all = g->T * width, inner = (size_t)g->T * g->inner;
  if (!mm_gradient_linear(g, g->raw, g->n1, g->T, &w->qkv, 0, err)) return false;
  memcpy(g->act, g->raw, all * sizeof *g->act);
  if (lightning) {
    for (size_t i = 0; i < all; i++) g->act[i] = g->raw[i] * sigmoid(g->raw[i]);
  } else {
    norm_queries(g, layer, false);
    for (size_t t = 0; t < g->T; t++) rotate(g, g->act + t * width, g->m->heads + g->m->kv_heads, t, 1);
  }
  if (!run_heads(g, layer, false, err)) return false;
  memcpy(g->y, g->o, inner * sizeof *g->y);
  if (lightning) {
    const mm_gradient_norm of = output_norm(g, layer);
    mm_gradient_normalise(g->y, g->o, &of);
    if (!mm_gradient_linear(g, g->gate, g->n1, g->T, &w->output_gate, 0, err)) return false;
    for (size_t i = 0; i < inner; i++) g->y[i] *= sigmoid(g->gate[i]);
  }
  return mm_gradient_linear(g, g->add, g->y, g->T, &w->out, 0, err);
}

/* d_o is the gradient of y = sigmoid(gate) · RMS(o): it becomes that of o, and that of the gate goes on to dn. */
static bool gate_back(mm_cpu_gradient *g, uint32_t layer, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[layer];
  const size_t inner = (size_t)g->T * g->inner;
  for (size_t i = 0; i < inner; i++) {
    const float s = sigmoid(g->gate[i]);
    g->d_gate[i] = g->d_o[i] * g->y[i] * (1 - s); /* y = s · RMS(o), and s' = s (1 - s) */
    g->d_o[i] *= s;
  }
  const mm_gradient_norm of = output_norm(g, layer);
  mm_gradient_normalise_back(g->d_o, g->d_o, g->o, &of, false);
  return mm_gradient_linear_back(g, g->dn, &(mm_gradient_rows){&w->output_gate, 0, g->T, g->n1, g->d_gate}, err);
}

bool mm_gradient_attention_back(mm_cpu_gradient *g, uint32_t layer, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[layer];
  const bool lightning = g->m->attn[layer] == MM_ATTN_LIGHTNING;
  const size_t width = w->qkv.n, all = g->T * width;
  memset(g->d_o, 0, (size_t)g->T * g->inner * sizeof *g->d_o);
  if (!mm_gradient_linear_back(g, g->d_o, &(mm_gradient_rows){&w->out, 0, g->T, g->y, g->add}, err) ||
      (lightning && !gate_back(g, layer, err)) || !run_heads(g, layer, true, err))
    return false;
  if (lightning) {
    for (size_t i = 0; i < all; i++) {
      const float s = sigmoid(g->raw[i]);
      g->d_act[i] *= s * (1 + g->raw[i] * (1 - s));
    }
  } else {
    for (size_t t = 0; t < g->T; t++) rotate(g, g->d_act + t * width, g->m->heads + g->m->kv_heads, t, -1);
    norm_queries(g, layer, true);
  }
  return mm_gradient_linear_back(g, g->dn, &(mm_gradient_rows){&w->qkv, 0, g->T, g->n1, g->d_act}, err);
}
