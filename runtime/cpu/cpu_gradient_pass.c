/* The backward pass: its memory, the layers and the head. */
#include "runtime/cpu/cpu_gradient.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/memory.h"
#include "runtime/cpu/cpu_gradient_inside.h"
#include "runtime/engine/position.h"

/* ---- memory ---- */

/* Places n numbers behind those so far; before there is memory it counts alone. */
static void place(const mm_cpu_gradient *g, float **p, uint64_t n, uint64_t *used) {
  if (g->memory) *p = g->memory + *used;
  *used += mm_round_up(n, 16);
}

static uint64_t place_all(mm_cpu_gradient *g) {
  const mm_model *m = g->m;
  const uint64_t T = g->tokens, H = m->hidden, I = m->intermediate, pairs = T * m->top_k, widest = mm_max(H, mm_max(g->inner, g->qkv));
  uint64_t used = 0;
  float *pick = NULL, *pair = NULL;
  place(g, &g->h, (m->layers + 1) * T * H, &used);
  float **const hidden[] = {&g->n1,  &g->mid,      &g->n2,         &g->dh,         &g->dn,
                            &g->add, &g->expert.x, &g->expert.d_x, &g->expert.out, &g->expert.d_out};
  for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) place(g, hidden[i], T * H, &used);
  float **const wide[] = {&g->raw, &g->act, &g->d_act};
  for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) place(g, wide[i], T * g->qkv, &used);
  float **const inner[] = {&g->o, &g->y, &g->gate, &g->d_o, &g->d_gate};
  for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) place(g, inner[i], T * g->inner, &used);
  place(g, &g->turn, T * m->rotary_dim, &used);
  place(g, &g->vector, mm_max(widest, m->experts), &used);
  place(g, &g->strip, MM_GRADIENT_STRIP * mm_max(widest, I), &used);
  place(g, &g->turned, MM_GRADIENT_STRIP * mm_max(widest, I), &used);
  place(g, &g->logits, MM_GRADIENT_LOGITS * (uint64_t)g->w.head.n, &used);
  place(g, &g->score, T * m->experts, &used);
  place(g, &g->weight, pairs, &used);
  place(g, &g->d_weight, pairs, &used);
  place(g, &pick, pairs, &used);
  place(g, &pair, pairs, &used);
  g->pick = (uint32_t *)(void *)pick, g->expert.pair = (uint32_t *)(void *)pair;
  place(g, &g->expert.up, T * 2 * I, &used);
  place(g, &g->expert.d_up, T * 2 * I, &used);
  place(g, &g->expert.mid, T * I, &used);
  place(g, &g->expert.d_mid, T * I, &used);
  place(g, &g->scratch, g->threads * g->scratch_floats, &used);
  return used * sizeof(float);
}

static bool check(const mm_shards *s, mm_err *err) {
  const mm_pack *p = &s->pack;
  if (mm_pack_ranks(p) > 1)
    return mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL), "found %u ranks; the backward pass needs a checkpoint of one",
                   mm_pack_ranks(p));
  if (mm_model_extended(&p->model) || p->model.activation != MM_ACTIVATION_SILU)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(p->dir, NULL), "found %s, whose ops the backward pass does not have",
                   p->model.architecture);
  return true;
}

mm_cpu_gradient *mm_cpu_gradient_open(const mm_shards *s, uint32_t tokens, unsigned threads, uint64_t *bytes, mm_err *err) {
  mm_cpu_gradient *g = check(s, err) ? mm_calloc(1, sizeof *g, err) : NULL;
  if (!g) return NULL;
  const mm_model *m = g->m = &s->pack.model;
  g->s = s, g->tokens = tokens, g->threads = threads;
  g->inner = m->heads * m->head_dim;
  bool ok = mm_bind(&g->w, s, 0, err);
  for (uint32_t l = 0; ok && l < m->layers; l++) g->qkv = (uint32_t)mm_max(g->qkv, g->w.layer[l].qkv.n);
  g->scratch_floats = mm_gradient_scratch(g);
  *bytes = ok ? place_all(g) : 0;
  const uint64_t limit = mm_memory_limit();
  if (ok && *bytes > limit)
    ok = mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(s->pack.dir, NULL),
                 "found %llu bytes of memory, expected at least %llu for the backward pass", (unsigned long long)limit,
                 (unsigned long long)*bytes);
  ok = ok && (g->memory = mm_calloc(*bytes, 1, err)) && (g->team = mm_team_open(threads, err)) &&
       (g->sampler = mm_sampler_open(m->vocab, err));
  if (!ok) return mm_cpu_gradient_close(g), NULL;
  place_all(g);
  for (size_t t = 0; t < tokens; t++)
    for (uint32_t i = 0, half = m->rotary_dim / 2; i < half; i++) {
      const float angle = (float)t * mm_rope_inv_freq(m, i);
      g->turn[t * 2 * half + i] = cosf(angle), g->turn[t * 2 * half + half + i] = sinf(angle);
    }
  return g;
}

void mm_cpu_gradient_close(mm_cpu_gradient *g) {
  if (!g) return;
  mm_team_close(g->team);
  mm_sampler_close(g->sampler);
  mm_bind_close(&g->w);
  free(g->memory);
  free(g);
}

uint32_t mm_cpu_gradient_linears(const mm_cpu_gradient *g, uint32_t *tensor) {
  uint32_t n = 0;
  for (uint32_t l = 0; l < g->m->layers; l++) {
    const mm_layer_weights *w = &g->w.layer[l];
    const mm_packed *const of[] = {&w->qkv, &w->out, &w->output_gate, &w->w13, &w->w2};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
      if (of[i]->scheme) tensor[n++] = of[i]->tensor;
  }
  return n;
}

/* ---- layers ---- */

static mm_gradient_norm norm_of(mm_cpu_gradient *g, const mm_packed *w) {
  return (mm_gradient_norm){g->T, g->m->hidden, g->m->hidden, g->m->norm_eps, mm_gradient_vector(g, w)};
}

/* to = alpha · residual + beta · g->add. */
static void combine(const mm_cpu_gradient *g, float *to, const float *residual, mm_deepnorm scale) {
  const float alpha = (float)scale.alpha, beta = (float)scale.beta;
  for (size_t i = 0; i < (size_t)g->T * g->m->hidden; i++) to[i] = alpha * residual[i] + beta * g->add[i];
}

/* dh is the gradient of alpha · residual + beta · branch: g->add becomes that of the branch, dh that of the residual. */
static void combine_back(const mm_cpu_gradient *g, mm_deepnorm scale) {
  const float alpha = (float)scale.alpha, beta = (float)scale.beta;
  for (size_t i = 0; i < (size_t)g->T * g->m->hidden; i++) {
    g->add[i] = beta * g->dh[i];
    g->dh[i] *= alpha;
  }
}

static mm_deepnorm attention_scale(const mm_model *m, uint32_t l) {
  return m->attn[l] == MM_ATTN_LIGHTNING ? m->deepnorm_lightning : m->deepnorm_full;
}

/* Layer l from its input h up to the experts the router gives it. */
static bool run_half(mm_cpu_gradient *g, uint32_t l, const float *h, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[l];
  mm_gradient_norm of = norm_of(g, &w->input_norm);
  mm_gradient_normalise(g->n1, h, &of);
  if (!mm_gradient_attention(g, l, err)) return false;
  combine(g, g->mid, g->m->postnorm ? g->n1 : h, attention_scale(g->m, l));
  of = norm_of(g, &w->post_norm);
  mm_gradient_normalise(g->n2, g->mid, &of);
  return mm_gradient_route(g, l, err);
}

static bool run_layer(mm_cpu_gradient *g, uint32_t l, mm_err *err) {
  const size_t n = (size_t)g->T * g->m->hidden;
  if (!run_half(g, l, g->h + l * n, err) || !mm_gradient_experts(g, l, err)) return false;
  combine(g, g->h + (l + 1) * n, g->m->postnorm ? g->n2 : g->mid, g->m->deepnorm_mlp);
  return true;
}

/* The gradient dn of a norm's outputs becomes part of dh, that of its inputs x. Under postnorm the residual is the norm's output: its
 * gradient, dh so far, goes the same way. */
static void norm_back(mm_cpu_gradient *g, const float *x, const mm_packed *w) {
  const size_t n = (size_t)g->T * g->m->hidden;
  const mm_gradient_norm of = norm_of(g, w);
  for (size_t i = 0; g->m->postnorm && i < n; i++) g->dn[i] += g->dh[i];
  mm_gradient_normalise_back(g->dh, g->dn, x, &of, !g->m->postnorm);
}

/* dh of layer l's output becomes that of its input. */
static bool layer_back(mm_cpu_gradient *g, uint32_t l, mm_err *err) {
  const size_t n = (size_t)g->T * g->m->hidden;
  const float *h = g->h + l * n;
  if (!run_half(g, l, h, err)) return false;
  memset(g->dn, 0, n * sizeof *g->dn);
  combine_back(g, g->m->deepnorm_mlp);
  if (!mm_gradient_experts_back(g, l, err)) return false;
  norm_back(g, g->mid, &g->w.layer[l].post_norm);
  memset(g->dn, 0, n * sizeof *g->dn);
  combine_back(g, attention_scale(g->m, l));
  if (!mm_gradient_attention_back(g, l, err)) return false;
  norm_back(g, h, &g->w.layer[l].input_norm);
  return true;
}

/* ---- the head ---- */

/* Logits of one row become the gradient of its id's log-likelihood with respect to them, which is returned. */
static double row_back(float *x, uint32_t vocab, int32_t id) {
  float most = x[0];
  double sum = 0;
  for (uint32_t v = 1; v < vocab; v++) most = fmaxf(most, x[v]);
  for (uint32_t v = 0; v < vocab; v++) sum += exp((double)x[v] - (double)most);
  const double log_p = (double)x[id] - (double)most - log(sum);
  for (uint32_t v = 0; v < vocab; v++) x[v] = (float)(-exp((double)x[v] - (double)most) / sum);
  x[id] += 1;
  return log_p;
}

/* dh of the last layer's output, and the log-likelihood. */
static bool head_back(mm_cpu_gradient *g, const mm_gradient_window *w, double *log_p, mm_err *err) {
  const mm_sampling own = {.temperature = 1, .top_p = 1};
  const size_t H = g->m->hidden, rows_of_head = g->w.head.n;
  const float *h = g->h + (size_t)g->m->layers * g->T * H;
  mm_gradient_norm of = norm_of(g, &g->w.final_norm);
  mm_gradient_normalise(g->n1, h, &of);
  memset(g->dn, 0, g->T * H * sizeof *g->dn);
  *log_p = 0;
  for (uint32_t first = 0; first < g->T; first += MM_GRADIENT_LOGITS) {
    const uint32_t rows = (uint32_t)mm_min(MM_GRADIENT_LOGITS, g->T - first);
    if (!mm_gradient_linear(g, g->logits, g->n1 + first * H, rows, &g->w.head, 0, err)) return false;
    for (uint32_t t = 0; t < rows; t++) {
      float *x = g->logits + t * rows_of_head;
      const int32_t id = w->target ? w->target[first + t] : mm_sample(g->sampler, &own, w->first + first + t, x);
      if (id < 0 || (uint32_t)id >= g->m->vocab)
        return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(g->s->pack.dir, NULL), "found no finite logit at position %u", first + t);
      *log_p += row_back(x, g->m->vocab, id);
      for (size_t v = g->m->vocab; v < rows_of_head; v++) x[v] = 0; /* rows of padding */
    }
    if (!mm_gradient_through(g, g->dn + first * H, g->logits, rows, &g->w.head, 0, err)) return false;
  }
  of = norm_of(g, &g->w.final_norm);
  mm_gradient_normalise_back(g->dh, g->dn, h, &of, false);
  return true;
}

bool mm_cpu_gradient_run(mm_cpu_gradient *g, const mm_gradient_window *w, mm_gradient_fn *take, void *ctx, double *log_p, mm_err *err) {
  g->T = w->count, g->take = take, g->ctx = ctx;
  for (uint32_t t = 0; t < g->T; t++) mm_unpack(&g->w.embed, 0, (uint32_t)w->id[t], 1, g->h + (size_t)t * g->m->hidden);
  for (uint32_t l = 0; l < g->m->layers; l++)
    if (!run_layer(g, l, err)) return false;
  if (!head_back(g, w, log_p, err)) return false;
  for (uint32_t l = g->m->layers; l-- > 0;)
    if (!layer_back(g, l, err)) return false;
  return true;
}
