/* A second opinion for tests: random small models, their forward pass in double written token by token from the model
 * documentation, and the same weights cut for tp ranks as packed shards in memory. Shares no arithmetic with the runtime. */
#ifndef MM_TESTS_REFERENCE_H
#define MM_TESTS_REFERENCE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/shards.h"

#define REF_LAYERS 4

static uint64_t ref_seed = 1;

/* Uniform in [-1, 1), another value at every call (splitmix64). */
static inline float ref_random(void) {
  uint64_t z = ref_seed += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
}

static inline float *ref_fill(size_t n, float scale, float shift) {
  float *w = calloc(n ? n : 1, sizeof *w);
  for (size_t i = 0; i < n; i++) w[i] = shift + scale * ref_random();
  return w;
}

typedef struct ref_layer {
  float *input_norm, *post_norm;
  float *qkv, *gate, *attn_norm;                          /* lightning */
  float *q, *k, *v, *q_norm, *k_norm;                     /* full */
  float *index_q, *index_k, *index_q_norm, *index_k_norm; /* sparse */
  float *mlp_gate, *mlp_up, *mlp_down;                    /* of a dense layer, or the shared expert */
  float *o, *router, *bias, *w1, *w3, *w2;
} ref_layer;

typedef struct ref_model {
  mm_model m;
  float *embed, *head, *norm;
  ref_layer layer[REF_LAYERS];
} ref_model;

/* hidden 24, 3 or 4 layers, 8 heads of 6 on 2 kv heads, rotary 4, 5 experts of 40, vocab 50. In M3, whose blocks end where no page does, a
 * query reads 4 blocks of 5 positions: its own, the one before it, and two that it chooses. */
static inline mm_model ref_dims(mm_family family, bool postnorm) {
  mm_model m = {.architecture = "Test", .family = family, .postnorm = postnorm, .hidden = 24, .heads = 8, .kv_heads = 2, .head_dim = 6};
  m.layers = family == MM_FAMILY_M1 ? 4 : 3;
  m.rotary_dim = 4;
  m.experts = 5;
  m.top_k = family == MM_FAMILY_M1 ? 2 : 3;
  m.intermediate = 40;
  m.vocab = 50;
  m.max_positions = 4096;
  m.rope_theta = 1e4;
  m.norm_eps = 1e-5;
  m.lightning_norm_eps = 1e-3; /* far enough from norm_eps to be seen */
  m.router = family == MM_FAMILY_M1 ? MM_ROUTER_SOFTMAX : MM_ROUTER_SIGMOID_BIAS;
  m.qk_norm = family != MM_FAMILY_M1;
  m.deepnorm_lightning = m.deepnorm_full = m.deepnorm_mlp = (mm_deepnorm){1, 1};
  for (uint32_t l = 0; l < m.layers; l++) m.attn[l] = MM_ATTN_FULL;
  if (family == MM_FAMILY_M1) {
    m.deepnorm_lightning = (mm_deepnorm){1.7, 0.9};
    m.deepnorm_full = (mm_deepnorm){1.3, 1.1};
    m.deepnorm_mlp = (mm_deepnorm){0.8, 1.2};
    m.attn[0] = m.attn[1] = m.attn[3] = MM_ATTN_LIGHTNING;
  }
  if (family == MM_FAMILY_M3) {
    m.norm_offset = m.qk_norm_per_head = true;
    m.index_heads = 2, m.index_dim = 7, m.index_block = 5, m.index_top_k = 4, m.index_local = 2;
    m.dense_intermediate = 48, m.shared_intermediate = 16, m.routed_scale = 1.5;
    m.activation = MM_ACTIVATION_SWIGLUOAI, m.act_alpha = 1.3, m.act_limit = 0.8, m.act_beta = 0.9;
    m.attn[1] = m.attn[2] = MM_ATTN_SPARSE, m.ffn[0] = MM_FFN_DENSE;
  }
  return m;
}

/* Columns between up and down of the layer's MLP: dense, shared, or 0. */
static inline uint32_t ref_mlp_width(const mm_model *m, uint32_t l) {
  return m->ffn[l] == MM_FFN_DENSE ? m->dense_intermediate : m->shared_intermediate;
}

static inline ref_model ref_build(mm_model m) {
  ref_model r = {.m = m};
  size_t H = m.hidden, q = (size_t)m.heads * m.head_dim, kv = (size_t)m.kv_heads * m.head_dim, E = m.experts, I = m.intermediate;
  float s = 1.5f / sqrtf((float)H), one = m.norm_offset ? 0 : 1;
  const size_t qn = m.qk_norm_per_head ? m.head_dim : q, kn = m.qk_norm_per_head ? m.head_dim : kv;
  r.embed = ref_fill(m.vocab * H, 1, 0);
  r.head = ref_fill(m.vocab * H, 1, 0);
  r.norm = ref_fill(H, 0.5f, one);
  for (uint32_t l = 0; l < m.layers; l++) {
    ref_layer *w = &r.layer[l];
    w->input_norm = ref_fill(H, 0.5f, one);
    w->post_norm = ref_fill(H, 0.5f, one);
    if (m.attn[l] == MM_ATTN_LIGHTNING) {
      w->qkv = ref_fill(3 * q * H, s, 0);
      w->gate = ref_fill(q * H, s, 0);
      w->attn_norm = ref_fill(q, 0.5f, 1);
    } else {
      w->q = ref_fill(q * H, 2 * s, 0);
      w->k = ref_fill(kv * H, 2 * s, 0);
      w->v = ref_fill(kv * H, s, 0);
      w->q_norm = ref_fill(qn, 0.5f, one);
      w->k_norm = ref_fill(kn, 0.5f, one);
    }
    if (m.attn[l] == MM_ATTN_SPARSE) {
      w->index_q = ref_fill((size_t)m.index_heads * m.index_dim * H, s, 0);
      w->index_k = ref_fill(m.index_dim * H, s, 0);
      w->index_q_norm = ref_fill(m.index_dim, 0.5f, one);
      w->index_k_norm = ref_fill(m.index_dim, 0.5f, one);
    }
    const uint32_t mlp = ref_mlp_width(&m, l);
    if (mlp) w->mlp_gate = ref_fill(mlp * H, s, 0), w->mlp_up = ref_fill(mlp * H, s, 0), w->mlp_down = ref_fill(mlp * H, s, 0);
    w->o = ref_fill(H * q, s, 0);
    w->router = ref_fill(E * H, s, 0);
    w->bias = ref_fill(E, 0.5f, 0);
    w->w1 = ref_fill(E * I * H, s, 0);
    w->w3 = ref_fill(E * I * H, s, 0);
    w->w2 = ref_fill(E * H * I, s, 0);
  }
  return r;
}

static inline void ref_free(ref_model *r) {
  free(r->embed), free(r->head), free(r->norm);
  for (int l = 0; l < REF_LAYERS; l++) {
    ref_layer *w = &r->layer[l];
    float *all[] = {
        w->input_norm, w->post_norm, w->qkv,     w->gate, w->attn_norm, w->q,  w->k,       w->v,       w->q_norm,       w->k_norm,
        w->o,          w->router,    w->bias,    w->w1,   w->w3,        w->w2, w->index_q, w->index_k, w->index_q_norm, w->index_k_norm,
        w->mlp_gate,   w->mlp_up,    w->mlp_down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  }
}

/* ---- arithmetic, one token at a time ---- */

static inline double ref_sigmoid(double x) { return 1 / (1 + exp(-x)); }

static inline void ref_matvec(double *y, const double *x, const float *w, size_t n, size_t k) {
  for (size_t i = 0; i < n; i++) {
    y[i] = 0;
    for (size_t j = 0; j < k; j++) y[i] += x[j] * w[i * k + j];
  }
}

static inline void ref_rms_offset(double *y, const double *x, const float *w, size_t n, double eps, double offset) {
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
  for (size_t i = 0; i < n; i++) y[i] = x[i] / sqrt(sum / (double)n + eps) * (offset + w[i]);
}
static inline void ref_rms(double *y, const double *x, const float *w, size_t n, double eps) { ref_rms_offset(y, x, w, n, eps, 0); }
/* By the model's kind. */
static inline void ref_norm(const mm_model *m, double *y, const double *x, const float *w, size_t n) {
  ref_rms_offset(y, x, w, n, m->norm_eps, m->norm_offset ? 1 : 0);
}
static inline void ref_norm_heads(const mm_model *m, double *x, const float *w, uint32_t heads, uint32_t n) {
  for (uint32_t h = 0; h < heads; h++) ref_norm(m, x + h * n, x + h * n, w, n);
}

/* The ALiBi recipe as published: a geometric series that starts at its own ratio. */
static inline void ref_slopes(double *out, uint32_t heads) {
  double levels = log2(heads);
  if (levels == floor(levels)) {
    double start = pow(2, -pow(2, -(levels - 3)));
    for (uint32_t h = 0; h < heads; h++) out[h] = h ? out[h - 1] * start : start;
    return;
  }
  uint32_t below = 1u << (uint32_t)floor(levels);
  double twice[256] = {0};
  ref_slopes(out, below);
  ref_slopes(twice, 2 * below);
  for (uint32_t h = below; h < heads; h++) out[h] = twice[2 * (h - below)];
}

/* S[heads, d, d] moves on by one token; qkv[heads, 3, d] is the projection before SiLU. */
static inline void ref_lightning(const mm_model *m, uint32_t layer, double *S, double *o, const double *qkv) {
  uint32_t d = m->head_dim;
  double slope[256] = {0};
  ref_slopes(slope, m->heads);
  for (uint32_t h = 0; h < m->heads; h++) {
    double s = slope[h] * (1 - layer / (m->layers - 1.0) + 1e-5);
    const double *z = qkv + h * 3 * d;
    double *state = S + h * d * d;
    for (uint32_t a = 0; a < d; a++)
      for (uint32_t c = 0; c < d; c++) {
        double k = z[d + a] * ref_sigmoid(z[d + a]), v = z[2 * d + c] * ref_sigmoid(z[2 * d + c]);
        state[a * d + c] = exp(-s) * state[a * d + c] + k * v;
      }
    for (uint32_t c = 0; c < d; c++) {
      o[h * d + c] = 0;
      for (uint32_t a = 0; a < d; a++) o[h * d + c] += z[a] * ref_sigmoid(z[a]) * state[a * d + c];
    }
  }
}

static inline void ref_rope(const mm_model *m, double *x, uint32_t heads, uint32_t pos) {
  uint32_t half = m->rotary_dim / 2;
  for (uint32_t h = 0; h < heads; h++)
    for (uint32_t i = 0; i < half; i++) {
      double angle = pos * pow(m->rope_theta, -(2.0 * i) / m->rotary_dim), *p = x + h * m->head_dim, a = p[i], b = p[i + half];
      p[i] = a * cos(angle) - b * sin(angle);
      p[i + half] = b * cos(angle) + a * sin(angle);
    }
}

/* The index branch: cache [positions, index_dim]; q[index_heads·index_dim] and k[index_dim] of one token at pos (clobbered).
 * reads[kv_heads, blocks of positions up to pos]: whether a kv head's queries read the block. Every block is ranked against every other: no
 * list is kept. */
static inline void ref_select(const mm_model *m, const ref_layer *w, double *cache, uint32_t pos, double *q, double *k, bool *reads) {
  const uint32_t n = m->index_dim, own = pos / m->index_block, blocks = own + 1;
  ref_norm_heads(m, q, w->index_q_norm, m->index_heads, n);
  ref_norm_heads(m, k, w->index_k_norm, 1, n);
  for (uint32_t h = 0; h < m->index_heads; h++) ref_rope(m, q + h * n, 1, pos);
  ref_rope(m, k, 1, pos);
  memcpy(cache + (size_t)pos * n, k, n * sizeof *k);
  double *score = calloc(blocks, sizeof *score);
  for (uint32_t g = 0; g < m->kv_heads; g++) {
    const double *own_q = q + g / (m->kv_heads / m->index_heads) * n;
    for (uint32_t i = 0; i < blocks; i++) score[i] = own - i < m->index_local ? INFINITY : -INFINITY;
    for (uint32_t t = 0; t <= pos; t++) {
      double s = 0;
      for (uint32_t c = 0; c < n; c++) s += own_q[c] * cache[(size_t)t * n + c];
      score[t / m->index_block] = fmax(score[t / m->index_block], s);
    }
    for (uint32_t i = 0; i < blocks; i++) {
      uint32_t before = 0;
      for (uint32_t j = 0; j < blocks; j++) before += score[j] > score[i] || (score[j] == score[i] && j < i);
      reads[g * blocks + i] = before < m->index_top_k;
    }
  }
  free(score);
}

/* k_cache, v_cache [positions, kv_heads·d]; qkv[(heads + 2·kv_heads)·d] of one token at pos (clobbered); reads NULL: all. */
static inline void ref_gqa(const mm_model *m, const ref_layer *w, double *k_cache, double *v_cache, uint32_t pos, double *o, double *qkv,
                           const bool *reads) {
  uint32_t d = m->head_dim, kv = m->kv_heads * d;
  double *q = qkv, *k = q + (size_t)m->heads * d, *v = k + kv;
  if (m->qk_norm) {
    const uint32_t parts = m->qk_norm_per_head ? m->heads : 1, kv_parts = m->qk_norm_per_head ? m->kv_heads : 1;
    ref_norm_heads(m, q, w->q_norm, parts, m->heads * d / parts);
    ref_norm_heads(m, k, w->k_norm, kv_parts, kv / kv_parts);
  }
  ref_rope(m, q, m->heads, pos);
  ref_rope(m, k, m->kv_heads, pos);
  memcpy(k_cache + (size_t)pos * kv, k, kv * sizeof *k);
  memcpy(v_cache + (size_t)pos * kv, v, kv * sizeof *v);
  for (uint32_t h = 0; h < m->heads; h++) {
    uint32_t kv_head = h * m->kv_heads / m->heads;
    double sum = 0;
    for (uint32_t c = 0; c < d; c++) o[h * d + c] = 0;
    for (uint32_t t = 0; t <= pos; t++) {
      if (reads && !reads[kv_head * (pos / m->index_block + 1) + t / m->index_block]) continue;
      const double *kt = k_cache + (size_t)t * kv + kv_head * d, *vt = v_cache + (size_t)t * kv + kv_head * d;
      double score = 0;
      for (uint32_t c = 0; c < d; c++) score += q[h * d + c] * kt[c];
      double e = exp(score / sqrt(d));
      sum += e;
      for (uint32_t c = 0; c < d; c++) o[h * d + c] += e * vt[c];
    }
    for (uint32_t c = 0; c < d; c++) o[h * d + c] /= sum;
  }
}

/* Experts by falling key, lower id first; weights renormalised. z[E] are the router's logits. */
static inline void ref_route(const mm_model *m, const float *bias, const double *z, uint32_t *pick, double *weight) {
  double score[64] = {0}, total = 0, sum = 0;
  bool sigmoid = m->router == MM_ROUTER_SIGMOID_BIAS, taken[64] = {false};
  for (uint32_t e = 0; e < m->experts; e++) total += exp(z[e]);
  for (uint32_t e = 0; e < m->experts; e++) score[e] = sigmoid ? ref_sigmoid(z[e]) : exp(z[e]) / total;
  for (uint32_t i = 0; i < m->top_k; i++) {
    double best = -INFINITY;
    for (uint32_t e = 0; e < m->experts; e++) {
      double key = score[e] + (sigmoid ? bias[e] : 0);
      if (taken[e] || key <= best) continue;
      best = key;
      pick[i] = e;
    }
    taken[pick[i]] = true;
    weight[i] = score[pick[i]];
    sum += weight[i];
  }
  for (uint32_t i = 0; i < m->top_k; i++) weight[i] *= (m->routed_scale > 0 ? m->routed_scale : 1) / sum;
}

static inline double ref_activate(const mm_model *m, double gate, double up) {
  if (m->activation == MM_ACTIVATION_SILU) return gate * ref_sigmoid(gate) * up;
  gate = fmin(gate, m->act_limit);
  return (fmin(fmax(up, -m->act_limit), m->act_limit) + m->act_beta) * gate * ref_sigmoid(m->act_alpha * gate);
}
/* y[H] += scale · w2 act(w1 x, w3 x) with I columns between. */
static inline void ref_mlp(const mm_model *m, double *y, const double *x, const float *w1, const float *w3, const float *w2, size_t I,
                           double scale) {
  const size_t H = m->hidden;
  double gate[64] = {0}, up[64] = {0}, down[64] = {0};
  ref_matvec(gate, x, w1, I, H);
  ref_matvec(up, x, w3, I, H);
  for (size_t i = 0; i < I; i++) gate[i] = ref_activate(m, gate[i], up[i]);
  ref_matvec(down, gate, w2, H, I);
  for (size_t i = 0; i < H; i++) y[i] += scale * down[i];
}

/* load[E]: how many tokens took each expert so far. */
static inline void ref_moe(const mm_model *m, const ref_layer *w, double *y, const double *x, uint64_t *load) {
  size_t H = m->hidden, I = m->intermediate;
  double z[64] = {0}, weight[64] = {0};
  uint32_t pick[64] = {0};
  ref_matvec(z, x, w->router, m->experts, H);
  ref_route(m, w->bias, z, pick, weight);
  for (size_t i = 0; i < H; i++) y[i] = 0;
  for (uint32_t j = 0; j < m->top_k; j++) {
    load[pick[j]]++;
    ref_mlp(m, y, x, w->w1 + pick[j] * I * H, w->w3 + pick[j] * I * H, w->w2 + pick[j] * H * I, I, weight[j]);
  }
}

/* One sequence. */
typedef struct ref_state {
  uint32_t pos;
  double *S[REF_LAYERS], *k[REF_LAYERS], *v[REF_LAYERS], *index[REF_LAYERS];
  double hidden[REF_LAYERS][64]; /* of the last step: what each layer gave the next */
  uint64_t load[REF_LAYERS][64]; /* of all steps */
} ref_state;

static inline ref_state ref_start(const mm_model *m, uint32_t positions) {
  ref_state s = {0};
  for (uint32_t l = 0; l < m->layers; l++) {
    s.S[l] = calloc((size_t)m->heads * m->head_dim * m->head_dim, sizeof(double));
    s.k[l] = calloc((size_t)positions * m->kv_heads * m->head_dim, sizeof(double));
    s.v[l] = calloc((size_t)positions * m->kv_heads * m->head_dim, sizeof(double));
    s.index[l] = calloc((size_t)positions * m->index_dim + 1, sizeof(double));
  }
  return s;
}

static inline void ref_stop(ref_state *s) {
  for (int l = 0; l < REF_LAYERS; l++) free(s->S[l]), free(s->k[l]), free(s->v[l]), free(s->index[l]);
}

/* Logits[vocab] of the next token after `id`. */
static inline void ref_step(const ref_model *r, ref_state *s, int32_t id, double *logits) {
  const mm_model *m = &r->m;
  size_t H = m->hidden, q = (size_t)m->heads * m->head_dim, kv = (size_t)m->kv_heads * m->head_dim;
  double x[64] = {0}, n[64] = {0}, res[64] = {0}, a[64] = {0}, o[128] = {0}, gate[128] = {0}, z[384] = {0};
  for (size_t i = 0; i < H; i++) x[i] = r->embed[(size_t)id * H + i];
  for (uint32_t l = 0; l < m->layers; l++) {
    const ref_layer *w = &r->layer[l];
    bool lightning = m->attn[l] == MM_ATTN_LIGHTNING;
    ref_norm(m, n, x, w->input_norm, H);
    memcpy(res, m->postnorm ? n : x, sizeof res);
    if (lightning) {
      ref_matvec(z, n, w->qkv, 3 * q, H);
      ref_lightning(m, l, s->S[l], o, z);
      ref_rms(o, o, w->attn_norm, q, m->lightning_norm_eps);
      ref_matvec(gate, n, w->gate, q, H);
      for (size_t i = 0; i < q; i++) o[i] *= ref_sigmoid(gate[i]);
    } else {
      ref_matvec(z, n, w->q, q, H);
      ref_matvec(z + q, n, w->k, kv, H);
      ref_matvec(z + q + kv, n, w->v, kv, H);
      bool *reads = NULL;
      if (m->attn[l] == MM_ATTN_SPARSE) {
        double iq[64] = {0}, ik[64] = {0};
        reads = calloc((size_t)m->kv_heads * (s->pos / m->index_block + 1), sizeof *reads);
        ref_matvec(iq, n, w->index_q, (size_t)m->index_heads * m->index_dim, H);
        ref_matvec(ik, n, w->index_k, m->index_dim, H);
        ref_select(m, w, s->index[l], s->pos, iq, ik, reads);
      }
      ref_gqa(m, w, s->k[l], s->v[l], s->pos, o, z, reads);
      free(reads);
    }
    ref_matvec(a, o, w->o, H, q);
    mm_deepnorm d = lightning ? m->deepnorm_lightning : m->deepnorm_full;
    for (size_t i = 0; i < H; i++) x[i] = d.alpha * res[i] + d.beta * a[i];
    ref_norm(m, n, x, w->post_norm, H);
    memcpy(res, m->postnorm ? n : x, sizeof res);
    memset(a, 0, sizeof a);
    if (m->ffn[l] == MM_FFN_EXPERTS) ref_moe(m, w, a, n, s->load[l]);
    if (w->mlp_gate) ref_mlp(m, a, n, w->mlp_gate, w->mlp_up, w->mlp_down, ref_mlp_width(m, l), 1);
    for (size_t i = 0; i < H; i++) s->hidden[l][i] = x[i] = m->deepnorm_mlp.alpha * res[i] + m->deepnorm_mlp.beta * a[i];
  }
  ref_norm(m, n, x, r->norm, H);
  ref_matvec(logits, n, r->head, m->vocab, H);
  s->pos++;
}

/* ---- the same weights as shards in memory ---- */

typedef struct ref_shards {
  mm_shards s;
  size_t tensor_cap, float_count[64];
  float *data[64]; /* of each rank */
} ref_shards;

/* Lays rows [at, at + rows) x columns [col, col + cols) of every lead of w[lead, n, k] into the rank's tensor `name`, after what
 * is there already (pieces come in order, per lead). */
typedef struct ref_piece {
  const float *w;
  size_t n, k, at, rows, col, cols;
} ref_piece;

/* How piece i of a tensor is cut: cut number `cut`, of its own. */
static inline void ref_put_cut(mm_pack *pack, uint32_t rank, mm_pack_tensor *t, size_t i, size_t cut, const ref_piece *p) {
  bool rows = p->rows != p->n, cols = p->cols != p->k;
  mm_cut *c = &pack->cut[cut];
  uint32_t at = 0;
  for (size_t j = 0; j < i; j++) at += t->piece[j].local_rows;
  t->piece[i] = (mm_piece){"source", (uint32_t)p->n, at, (uint32_t)p->rows, (uint32_t)cut};
  t->whole_cols = (uint32_t)p->k;
  c->axis = rows ? MM_AXIS_ROWS : cols ? MM_AXIS_COLS : MM_AXIS_NONE;
  c->whole = (uint32_t)(rows ? p->n : p->k);
  c->local = (uint32_t)(rows ? p->rows : p->cols);
  c->rank[rank] = (mm_range){0, (uint32_t)(rows ? p->at : p->col), c->local};
}

static inline void ref_put(ref_shards *out, uint32_t rank, const char *name, uint32_t lead, bool vector, const ref_piece *p,
                           size_t pieces) {
  mm_pack *pack = &out->s.pack;
  size_t rows = 0, index = 0, leads = lead ? lead : 1, cols = p[0].cols;
  for (size_t i = 0; i < pieces; i++) rows += p[i].rows;
  while (index < pack->tensor_count && strcmp(pack->tensor[index].name, name) != 0) index++;
  if (index == pack->tensor_count) {
    pack->tensor = realloc(pack->tensor, (index + 1) * sizeof *pack->tensor);
    for (uint32_t r = 0; r < pack->tp; r++)
      out->s.rank[r].plane = realloc(out->s.rank[r].plane, (index + 1) * MM_PACK_PLANES * sizeof(mm_shard_plane));
    pack->tensor[index] =
        (mm_pack_tensor){.name = strdup(name), .scheme = "f32", .vector = vector, .lead = lead, .whole_lead = lead, .rows = (uint32_t)rows};
    pack->tensor[index].cols = pack->tensor[index].whole_cols = (uint32_t)cols;
    pack->tensor[index].plane_count = 1;
    pack->tensor[index].plane[0] = (mm_pack_plane){"", MM_F32, 1, 1, {0}};
    pack->tensor[index].piece_count = (unsigned)pieces;
    pack->cut = realloc(pack->cut, (index + 1) * MM_PACK_PIECES * sizeof *pack->cut);
    for (size_t i = 0; i < MM_PACK_PIECES; i++)
      pack->cut[index * MM_PACK_PIECES + i] = (mm_cut){.rank = calloc(pack->tp + (size_t)1, sizeof(mm_range))};
    pack->tensor_count++;
  }
  for (size_t i = 0; i < pieces; i++) ref_put_cut(pack, rank, &pack->tensor[index], i, index * MM_PACK_PIECES + i, &p[i]);
  size_t start = out->float_count[rank], count = leads * rows * cols;
  out->data[rank] = realloc(out->data[rank], (start + count) * sizeof(float));
  out->float_count[rank] += count;
  out->s.rank[rank].plane[index * MM_PACK_PLANES] = (mm_shard_plane){.offset = start * sizeof(float), .bytes = count * sizeof(float)};
  float *to = out->data[rank] + start;
  for (size_t e = 0; e < leads; e++)
    for (size_t i = 0; i < pieces; i++)
      for (size_t r = 0; r < p[i].rows; r++, to += cols)
        memcpy(to, p[i].w + (e * p[i].n + p[i].at + r) * p[i].k + p[i].col, cols * sizeof(float));
}

/* One plain matrix, or a vector where k is 1. */
static inline void ref_put1(ref_shards *out, uint32_t rank, const char *name, ref_piece p) { ref_put(out, rank, name, 0, p.k == 1, &p, 1); }

static inline void ref_put_layer(ref_shards *out, const ref_model *r, uint32_t rank, uint32_t l) {
  const mm_model *m = &r->m;
  const ref_layer *w = &r->layer[l];
  const uint32_t tp = out->s.pack.tp, at = mm_pack_attn_tp(&out->s.pack), a = rank % at; /* attention is cut for `at` ranks */
  uint32_t d = m->head_dim, hpr = m->heads / at, kpr = m->kv_heads >= at ? m->kv_heads / at : 1;
  size_t H = m->hidden, q = (size_t)m->heads * d, kv = (size_t)m->kv_heads * d, qr = hpr * d, kr = kpr * d, q0 = a * qr;
  size_t kv_head = m->kv_heads >= at ? a * kpr : a / (at / m->kv_heads), k0 = kv_head * d, ir = m->intermediate / tp;
  char name[128];
#define NAME(text) (snprintf(name, sizeof name, "model.layers.%u." text, l), name)
  ref_put1(out, rank, NAME("input_layernorm.weight"), (ref_piece){w->input_norm, H, 1, 0, H, 0, 1});
  ref_put1(out, rank, NAME("post_attention_layernorm.weight"), (ref_piece){w->post_norm, H, 1, 0, H, 0, 1});
  if (m->attn[l] == MM_ATTN_LIGHTNING) {
    ref_put1(out, rank, NAME("self_attn.qkv_proj.weight"), (ref_piece){w->qkv, 3 * q, H, 3 * q0, 3 * qr, 0, H});
    ref_put1(out, rank, NAME("self_attn.output_gate.weight"), (ref_piece){w->gate, q, H, q0, qr, 0, H});
    ref_put1(out, rank, NAME("self_attn.norm.weight"), (ref_piece){w->attn_norm, q, 1, q0, qr, 0, 1});
    ref_put1(out, rank, NAME("self_attn.out_proj.weight"), (ref_piece){w->o, H, q, 0, H, q0, qr});
  } else {
    ref_piece qkv[] = {{w->q, q, H, q0, qr, 0, H}, {w->k, kv, H, k0, kr, 0, H}, {w->v, kv, H, k0, kr, 0, H}};
    ref_put(out, rank, NAME("self_attn.qkv_proj.weight"), 0, false, qkv, 3);
    ref_put1(out, rank, NAME("self_attn.o_proj.weight"), (ref_piece){w->o, H, q, 0, H, q0, qr});
    if (m->qk_norm) {
      const bool each = m->qk_norm_per_head;
      ref_put1(out, rank, NAME("self_attn.q_norm.weight"),
               each ? (ref_piece){w->q_norm, d, 1, 0, d, 0, 1} : (ref_piece){w->q_norm, q, 1, q0, qr, 0, 1});
      ref_put1(out, rank, NAME("self_attn.k_norm.weight"),
               each ? (ref_piece){w->k_norm, d, 1, 0, d, 0, 1} : (ref_piece){w->k_norm, kv, 1, k0, kr, 0, 1});
    }
  }
  if (m->attn[l] == MM_ATTN_SPARSE) {
    const size_t n = m->index_dim, heads = m->index_heads, ipr = heads >= at ? heads / at : 1,
                 first = heads >= at ? a * ipr : a / (at / heads);
    ref_put1(out, rank, NAME("self_attn.index_q_proj.weight"), (ref_piece){w->index_q, heads * n, H, first * n, ipr * n, 0, H});
    ref_put1(out, rank, NAME("self_attn.index_k_proj.weight"), (ref_piece){w->index_k, n, H, 0, n, 0, H});
    ref_put1(out, rank, NAME("self_attn.index_q_norm.weight"), (ref_piece){w->index_q_norm, n, 1, 0, n, 0, 1});
    ref_put1(out, rank, NAME("self_attn.index_k_norm.weight"), (ref_piece){w->index_k_norm, n, 1, 0, n, 0, 1});
  }
  const bool dense = m->ffn[l] == MM_FFN_DENSE;
  if (w->mlp_gate) {
    const size_t whole = ref_mlp_width(m, l), each = whole / tp;
    ref_piece up[] = {{w->mlp_gate, whole, H, rank * each, each, 0, H}, {w->mlp_up, whole, H, rank * each, each, 0, H}};
    ref_put(out, rank, dense ? NAME("mlp.gate_up_proj.weight") : NAME("block_sparse_moe.shared_experts.gate_up_proj.weight"), 0, false, up,
            2);
    ref_put1(out, rank, dense ? NAME("mlp.down_proj.weight") : NAME("block_sparse_moe.shared_experts.down_proj.weight"),
             (ref_piece){w->mlp_down, H, whole, 0, H, rank * each, each});
  }
  if (dense) return;
  ref_put1(out, rank, NAME("block_sparse_moe.gate.weight"), (ref_piece){w->router, m->experts, H, 0, m->experts, 0, H});
  if (m->router == MM_ROUTER_SIGMOID_BIAS)
    ref_put1(out, rank, NAME("block_sparse_moe.e_score_correction_bias"), (ref_piece){w->bias, m->experts, 1, 0, m->experts, 0, 1});
  size_t I = m->intermediate;
  ref_piece w13[] = {{w->w1, I, H, rank * ir, ir, 0, H}, {w->w3, I, H, rank * ir, ir, 0, H}};
  ref_put(out, rank, NAME("block_sparse_moe.experts.w13_weight"), m->experts, false, w13, 2);
  ref_piece w2 = {w->w2, H, I, 0, H, rank * ir, ir};
  ref_put(out, rank, NAME("block_sparse_moe.experts.w2_weight"), m->experts, false, &w2, 1);
#undef NAME
}

/* Vocabulary rows beyond the last id hold large numbers: nothing may ever see them. */
static inline void ref_put_vocab(ref_shards *out, const ref_model *r, uint32_t rank, const char *name, const float *w) {
  const size_t V = r->m.vocab, H = r->m.hidden, tp = mm_pack_attn_tp(&out->s.pack), rows = (V + 3) / tp + 1, of = rank % tp;
  float *padded = malloc(rows * tp * H * sizeof *padded);
  for (size_t i = 0; i < rows * tp * H; i++) padded[i] = i < V * H ? w[i] : 1000.0f;
  ref_put1(out, rank, name, (ref_piece){padded, rows * tp, H, of * rows, rows, 0, H});
  free(padded);
  mm_pack *pack = &out->s.pack; /* its padding is no part of the uncut matrix */
  size_t index = 0;
  while (strcmp(pack->tensor[index].name, name) != 0) index++;
  mm_cut *c = &pack->cut[index * MM_PACK_PIECES];
  uint32_t from = (uint32_t)mm_min(of * rows, V), count = (uint32_t)mm_min(rows, V - from);
  pack->tensor[index].piece[0].rows = (uint32_t)V;
  c->axis = MM_AXIS_ROWS, c->whole = (uint32_t)V, c->local = (uint32_t)rows, c->rank[rank] = (mm_range){0, from, count};
}

/* Attention is cut for attn_tp ranks; 0: for tp. */
static inline ref_shards *ref_cut_groups(const ref_model *r, uint32_t tp, uint32_t attn_tp) {
  ref_shards *out = calloc(1, sizeof *out);
  mm_pack *pack = &out->s.pack;
  *pack = (mm_pack){.dir = "memory", .model = r->m, .tp = tp, .ep = 1, .pp = 1, .attn_tp = attn_tp};
  pack->rank = calloc(tp, sizeof *pack->rank);
  out->s.rank = calloc(tp, sizeof *out->s.rank);
  for (uint32_t rank = 0; rank < tp; rank++) {
    pack->rank[rank] = (mm_rank_parts){1, calloc(1, sizeof(mm_part))};
    ref_put_vocab(out, r, rank, "model.embed_tokens.weight", r->embed);
    for (uint32_t l = 0; l < r->m.layers; l++) ref_put_layer(out, r, rank, l);
    ref_put1(out, rank, "model.norm.weight", (ref_piece){r->norm, r->m.hidden, 1, 0, r->m.hidden, 0, 1});
    ref_put_vocab(out, r, rank, "lm_head.weight", r->head);
  }
  for (uint32_t rank = 0; rank < tp; rank++) {
    out->s.rank[rank].map = calloc(1, sizeof(mm_map));
    out->s.rank[rank].map[0] = (mm_map){(const uint8_t *)out->data[rank], out->float_count[rank] * sizeof(float)};
  }
  return out;
}

static inline ref_shards *ref_cut(const ref_model *r, uint32_t tp) { return ref_cut_groups(r, tp, 0); }

/* The layers from first[i] on belong to stage i + 1, of n + 1; their ranks have the files of the first. */
static inline void ref_cut_at(ref_shards *shards, const uint32_t *first, uint32_t n) {
  mm_shards *s = &shards->s;
  const uint32_t tp = s->pack.tp;
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    mm_pack_tensor *t = &s->pack.tensor[i];
    uint32_t l = 0;
    const bool layer = sscanf(t->name, "model.layers.%u.", &l) == 1;
    t->stage = layer || strstr(t->name, "embed") ? 0 : n;
    for (uint32_t k = 0; layer && k < n; k++) t->stage += l >= first[k];
  }
  s->pack.pp = n + 1;
  s->rank = realloc(s->rank, (n + 1) * tp * sizeof *s->rank);
  s->pack.rank = realloc(s->pack.rank, (n + 1) * tp * sizeof *s->pack.rank);
  for (uint32_t r = tp; r < (n + 1) * tp; r++) s->rank[r] = s->rank[r % tp], s->pack.rank[r] = s->pack.rank[r % tp];
}
static inline void ref_cut_stages(ref_shards *shards, uint32_t first) { ref_cut_at(shards, &first, 1); }

static inline void ref_uncut(ref_shards *out) {
  for (size_t i = 0; i < out->s.pack.tensor_count; i++) free((char *)(uintptr_t)out->s.pack.tensor[i].name);
  for (size_t i = 0; i < MM_PACK_PIECES * out->s.pack.tensor_count; i++) free(out->s.pack.cut[i].rank);
  for (uint32_t r = 0; r < out->s.pack.tp; r++)
    free(out->data[r]), free(out->s.rank[r].map), free(out->s.rank[r].plane), free(out->s.pack.rank[r].part);
  free(out->s.pack.tensor), free(out->s.pack.cut), free(out->s.pack.rank), free(out->s.rank), free(out);
}

#endif
