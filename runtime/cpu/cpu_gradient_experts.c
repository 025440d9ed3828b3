/* Router and experts of the backward pass. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"
#include "runtime/cpu/cpu_gradient_inside.h"

bool mm_gradient_route(mm_cpu_gradient *g, uint32_t layer, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[layer];
  const mm_model *m = g->m;
  if (!mm_gradient_linear(g, g->score, g->n2, g->T, &w->router, 0, err)) return false;
  const float *bias = w->router_bias.scheme ? mm_gradient_vector(g, &w->router_bias) : NULL;
  float key[MM_MAX_EXPERTS];
  for (size_t t = 0; t < g->T; t++)
    mm_cpu_choose(m, g->score + t * m->experts, bias, g->pick + t * m->top_k, g->weight + t * m->top_k, key);
  return true;
}

/* The pairs of expert e into g->expert.pair, and their rows of n2 into g->expert.x. */
static uint32_t gather_rows(mm_cpu_gradient *g, uint32_t e) {
  const uint32_t k = g->m->top_k, H = g->m->hidden;
  uint32_t rows = 0;
  for (uint32_t p = 0; p < g->T * k; p++) {
    if (g->pick[p] != e) continue;
    memcpy(g->expert.x + (size_t)rows * H, g->n2 + (size_t)(p / k) * H, H * sizeof *g->expert.x);
    g->expert.pair[rows++] = p;
  }
  return rows;
}

/* out[rows, H] of expert e: w2 (silu(w1 x) · w3 x). */
static bool run_expert(mm_cpu_gradient *g, const mm_layer_weights *w, uint32_t e, uint32_t rows, mm_err *err) {
  const size_t I = w->w2.k;
  if (!mm_gradient_linear(g, g->expert.up, g->expert.x, rows, &w->w13, e, err)) return false;
  for (size_t p = 0; p < rows; p++)
    for (size_t i = 0; i < I; i++) {
      const float gate = g->expert.up[p * 2 * I + i], up = g->expert.up[p * 2 * I + I + i];
      g->expert.mid[p * I + i] = gate / (1.0f + expf(-gate)) * up;
    }
  return mm_gradient_linear(g, g->expert.out, g->expert.mid, rows, &w->w2, e, err);
}

/* The place of expert e in the stacks. */
static uint32_t index_of(const mm_layer_weights *w, uint32_t e) { return w->expert_index ? w->expert_index[e] : e; }

bool mm_gradient_experts(mm_cpu_gradient *g, uint32_t layer, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[layer];
  const uint32_t H = g->m->hidden, k = g->m->top_k;
  memset(g->add, 0, (size_t)g->T * H * sizeof *g->add);
  for (uint32_t e = 0; e < g->m->experts; e++) {
    const uint32_t rows = gather_rows(g, e);
    if (rows && !run_expert(g, w, index_of(w, e), rows, err)) return false;
    for (uint32_t p = 0; p < rows; p++) {
      const float weight = g->weight[g->expert.pair[p]];
      float *to = g->add + (size_t)(g->expert.pair[p] / k) * H;
      for (uint32_t i = 0; i < H; i++) to[i] += weight * g->expert.out[(size_t)p * H + i];
    }
  }
  return true;
}

/* Gradients of an expert's rows, from those of the branch; into dn, and those of the router's weights into d_weight. */
static bool expert_back(mm_cpu_gradient *g, const mm_layer_weights *w, uint32_t e, uint32_t rows, mm_err *err) {
  const uint32_t H = g->m->hidden, k = g->m->top_k;
  const size_t I = w->w2.k;
  for (uint32_t p = 0; p < rows; p++) {
    const float weight = g->weight[g->expert.pair[p]], *dy = g->add + (size_t)(g->expert.pair[p] / k) * H,
                *out = g->expert.out + (size_t)p * H;
    double along = 0;
    for (uint32_t i = 0; i < H; i++) {
      along += (double)dy[i] * (double)out[i];
      g->expert.d_out[(size_t)p * H + i] = weight * dy[i];
    }
    g->d_weight[g->expert.pair[p]] = (float)along;
  }
  memset(g->expert.d_mid, 0, rows * I * sizeof *g->expert.d_mid);
  if (!mm_gradient_linear_back(g, g->expert.d_mid, &(mm_gradient_rows){&w->w2, e, rows, g->expert.mid, g->expert.d_out}, err)) return false;
  for (size_t p = 0; p < rows; p++)
    for (size_t i = 0; i < I; i++) {
      const float gate = g->expert.up[p * 2 * I + i], up = g->expert.up[p * 2 * I + I + i], d = g->expert.d_mid[p * I + i],
                  s = 1.0f / (1.0f + expf(-gate));
      g->expert.d_up[p * 2 * I + i] = d * up * s * (1 + gate * (1 - s));
      g->expert.d_up[p * 2 * I + I + i] = d * gate * s;
    }
  memset(g->expert.d_x, 0, (size_t)rows * H * sizeof *g->expert.d_x);
  if (!mm_gradient_linear_back(g, g->expert.d_x, &(mm_gradient_rows){&w->w13, e, rows, g->expert.x, g->expert.d_up}, err)) return false;
  for (uint32_t p = 0; p < rows; p++)
    for (uint32_t i = 0; i < H; i++) g->dn[(size_t)(g->expert.pair[p] / k) * H + i] += g->expert.d_x[(size_t)p * H + i];
  return true;
}

/* Gradients of the router's outputs, from those of the weights p_i = s_i / Σ s over the chosen: those of s_i are (dp_i - Σ p dp) / Σ s. */
static void router_back(mm_cpu_gradient *g) {
  const mm_model *m = g->m;
  for (size_t t = 0; t < g->T; t++) {
    float *z = g->score + t * m->experts, chosen[MM_MAX_TOP_K], sum = 0;
    const uint32_t *pick = g->pick + t * m->top_k;
    const float *p = g->weight + t * m->top_k, *dp = g->d_weight + t * m->top_k;
    double mean = 0;
    for (uint32_t i = 0; i < m->top_k; i++) {
      mean += (double)p[i] * (double)dp[i];
      chosen[i] = z[pick[i]];
      sum += chosen[i];
    }
    memset(z, 0, m->experts * sizeof *z);
    for (uint32_t i = 0; i < m->top_k; i++) {
      const float d = dp[i] - (float)mean;
      z[pick[i]] = m->router == MM_ROUTER_SIGMOID_BIAS ? d / sum * chosen[i] * (1 - chosen[i]) : d * p[i];
    }
  }
}

bool mm_gradient_experts_back(mm_cpu_gradient *g, uint32_t layer, mm_err *err) {
  const mm_layer_weights *w = &g->w.layer[layer];
  for (uint32_t e = 0; e < g->m->experts; e++) {
    const uint32_t rows = gather_rows(g, e), at = index_of(w, e);
    if (rows && (!run_expert(g, w, at, rows, err) || !expert_back(g, w, at, rows, err))) return false;
  }
  router_back(g);
  return mm_gradient_through(g, g->dn, g->score, g->T, &w->router, 0, err);
}
