/* The model, written once for both families, over the ops of a backend. One call runs one step of one rank. */
#include "runtime/ops.h"

static bool open_acts(mm_forward *f, mm_err *err) {
  const mm_model *m = f->model;
  uint32_t qkv = 0, heads = 0;
  bool lightning = false;
  for (uint32_t l = 0; l < m->layers; l++) {
    qkv = f->weights->layer[l].qkv.n > qkv ? f->weights->layer[l].qkv.n : qkv;
    heads = f->weights->layer[l].out.k;
    lightning |= m->attn[l] == MM_ATTN_LIGHTNING;
  }
  const mm_ops *ops = f->ops;
  mm_backend *b = f->backend;
  return ops->act(b, m->hidden, &f->h, err) && ops->act(b, m->hidden, &f->n, err) && ops->act(b, m->hidden, &f->branch, err) &&
         ops->act(b, qkv, &f->qkv, err) && ops->act(b, heads, &f->o, err) && (!lightning || ops->act(b, heads, &f->gate, err));
}

bool mm_forward_open(mm_forward *f, const mm_ops *ops, const mm_backend_config *c, mm_err *err) {
  *f = (mm_forward){.ops = ops, .model = c->model, .weights = c->weights};
  f->backend = ops->open(c, err);
  if (f->backend && open_acts(f, err)) return true;
  mm_forward_close(f);
  return false;
}

void mm_forward_close(mm_forward *f) {
  if (f->ops) f->ops->close(f->backend);
  *f = (mm_forward){0};
}

/* n[T, H] -> branch[T, H]: this rank's partial sum of the attention of layer l. */
static void attention(const mm_forward *f, uint32_t l) {
  const mm_ops *ops = f->ops;
  mm_backend *b = f->backend;
  const mm_layer_weights *w = &f->weights->layer[l];
  mm_act qkv = {f->qkv.data, w->qkv.n}; /* the two kinds of layer differ in width */
  ops->linear(b, qkv, f->n, &w->qkv);
  if (f->model->attn[l] == MM_ATTN_LIGHTNING) {
    ops->lightning(b, l, f->o, qkv);
    ops->linear(b, f->gate, f->n, &w->output_gate);
    ops->gated_norm(b, f->o, f->o, f->gate, &w->attn_norm, f->model->lightning_norm_eps);
  } else {
    bool norms = f->model->qk_norm;
    ops->gqa(b, l, f->o, qkv, norms ? &w->q_norm : NULL, norms ? &w->k_norm : NULL);
  }
  ops->linear(b, f->branch, f->o, &w->out);
}

bool mm_forward_step(mm_forward *f, const mm_batch *batch, float *logits, mm_err *err) {
  const mm_ops *ops = f->ops;
  mm_backend *b = f->backend;
  const mm_model *m = f->model;
  const mm_rank_weights *w = f->weights;
  if (!ops->begin(b, batch, err)) return false;
  /* Under postnorm the residual is the normalised tensor itself: what was before the norm is never added again. */
  mm_act residual = m->postnorm ? f->n : f->h;
  ops->embed(b, f->h, &w->embed);
  ops->norm(b, f->n, f->h, &w->layer[0].input_norm, m->norm_eps);
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_layer_weights *layer = &w->layer[l];
    attention(f, l);
    mm_deepnorm scale = m->attn[l] == MM_ATTN_LIGHTNING ? m->deepnorm_lightning : m->deepnorm_full;
    ops->combine(b, f->h, f->n, residual, f->branch, scale, &layer->post_norm, m->norm_eps);
    ops->route(b, f->n, &layer->router, layer->router_bias.scheme ? &layer->router_bias : NULL);
    ops->experts(b, f->branch, f->n, &layer->w13, &layer->w2);
    const mm_packed *next = l + 1 < m->layers ? &w->layer[l + 1].input_norm : &w->final_norm;
    ops->combine(b, f->h, f->n, residual, f->branch, m->deepnorm_mlp, next, m->norm_eps);
  }
  ops->logits(b, f->n, &w->head);
  return batch->sampling ? ops->choose(b, err) : ops->end(b, logits, err);
}
