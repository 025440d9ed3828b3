/* The attention of a long prompt, chunk by chunk: of a sparse layer, selection and chosen blocks, and of a layer of
 * the same heads over all positions (bench_steps.h). */
#include <math.h>

#include "runtime/bench/bench_shapes.h"
#include "runtime/bench/bench_steps.h"

#define WARM 2 /* chunks that do not count */

static void select_blocks(mm_bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  const mm_layer_weights *w = &b->weights.layer[l];
  f->ops->select(f->backend, l, f->index_q, f->index_k, &w->index_q_norm, &w->index_k_norm);
}
static void attend(mm_bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  const mm_layer_weights *w = &b->weights.layer[l];
  f->ops->gqa(f->backend, l, f->o, (mm_act){f->qkv.data, w->qkv.n}, &w->q_norm, &w->k_norm);
}

/* Ops of one chunk: the products of the layer that they read, and of its attention the first `parts`. */
static bool run_chunk(mm_bench *b, const mm_batch *batch, uint32_t l, uint32_t parts, double *seconds, mm_err *err) {
  const mm_forward *f = &b->forward;
  const mm_layer_weights *w = &b->weights.layer[l];
  const bool sparse = b->model.attn[l] == MM_ATTN_SPARSE;
  const double from = mm_now();
  if (!f->ops->begin(f->backend, batch, err)) return false;
  f->ops->embed(f->backend, f->h, &b->weights.embed);
  f->ops->norm(f->backend, f->n, f->h, &w->input_norm, b->model.norm_eps);
  f->ops->linear(f->backend, (mm_act){f->qkv.data, w->qkv.n}, f->n, &w->qkv);
  if (sparse) mm_linear_two(f->ops, f->backend, f->index_q, &w->index_q, f->index_k, &w->index_k, f->n);
  if (sparse && parts > 0) select_blocks(b, l);
  if (parts > 1) attend(b, l);
  if (!f->ops->end(f->backend, b->logits, err)) return false;
  *seconds = mm_now() - from;
  return true;
}

static uint32_t first_of(const mm_model *m, mm_attn kind) {
  uint32_t l = 0;
  while (l < m->layers && m->attn[l] != kind) l++;
  return l;
}

bool mm_bench_attention(mm_bench *b, double part_s[3], mm_err *err) {
  const mm_model *m = &b->model;
  const uint32_t layer[] = {first_of(m, MM_ATTN_SPARSE), first_of(m, MM_ATTN_FULL)}, tokens = b->c->tokens;
  if (layer[0] == m->layers || layer[1] == m->layers)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found %u dense of %u layers, expected both kinds", b->c->dense, m->layers);
  part_s[0] = part_s[1] = part_s[2] = 0;
  for (int32_t i = -WARM; i < (int32_t)mm_ceil_div(b->c->context, tokens); i++) {
    const uint32_t pos = i < 0 ? 0 : (uint32_t)i * tokens, n = (uint32_t)mm_min(tokens, b->c->context - pos);
    double sparse[3], full[3];
    b->span[0] = (mm_span){0, 0, n, pos};
    for (uint32_t t = 0; t < n; t++) b->id[t] = (int32_t)(mm_draw(0, pos + t + UINT64_C(1)) * m->vocab);
    const mm_batch batch = {.tokens = n, .id = b->id, .span_count = 1, .span = b->span};
    for (uint32_t parts = 0; parts < 3; parts++) {
      if (!run_chunk(b, &batch, layer[0], parts, &sparse[parts], err) || !run_chunk(b, &batch, layer[1], parts, &full[parts], err))
        return false;
    }
    if (i < 0) continue;
    part_s[0] += sparse[1] - sparse[0], part_s[1] += sparse[2] - sparse[1];
    part_s[2] += full[2] - fmin(full[0], full[1]);
  }
  return true;
}
