/* The model, written once for all families, over the ops of a backend. One call runs one step of one rank. */
#include "runtime/engine/draft_forward.h"

static bool open_acts(mm_forward *f, mm_err *err) {
  const mm_model *m = f->model;
  uint32_t qkv = 0, heads = 0, index = 0;
  bool lightning = false;
  for (uint32_t l = f->weights->layer_first; l < f->weights->layer_end; l++) {
    qkv = f->weights->layer[l].qkv.n > qkv ? f->weights->layer[l].qkv.n : qkv;
    heads = f->weights->layer[l].out.k;
    lightning |= m->attn[l] == MM_ATTN_LIGHTNING;
    if (m->attn[l] == MM_ATTN_SPARSE) index = f->weights->layer[l].index_q.n;
  }
  const mm_ops *ops = f->ops;
  mm_backend *b = f->backend;
  return ops->act(b, m->hidden, &f->h, err) && ops->act(b, m->hidden, &f->n, err) && ops->act(b, m->hidden, &f->spare, err) &&
         ops->act(b, m->hidden, &f->branch, err) && ops->act(b, qkv, &f->qkv, err) && ops->act(b, heads, &f->o, err) &&
         (!lightning || ops->act(b, heads, &f->gate, err)) &&
         (mm_attn_tp(f->weights) == f->weights->tp ||
          (ops->act(b, m->hidden, &f->all_n, err) && ops->act(b, m->hidden, &f->all_branch, err))) &&
         (!index || (ops->act(b, index, &f->index_q, err) && ops->act(b, m->index_dim, &f->index_k, err)));
}

static bool open_taps(mm_forward *f, const mm_backend_config *c, mm_err *err) {
  for (uint32_t i = 0; i < c->taps; i++) {
    f->tap_layer[i] = c->tap[i];
    if (!f->ops->act(f->backend, f->model->hidden, &f->tap[i], err)) return false;
  }
  f->taps = c->taps;
  return true;
}

bool mm_forward_open(mm_forward *f, const mm_ops *ops, const mm_backend_config *c, mm_err *err) {
  *f = (mm_forward){.ops = ops, .model = c->model, .weights = c->weights};
  f->backend = ops->open(c, err);
  if (f->backend && open_acts(f, err) && open_taps(f, c, err) && mm_draft_forward_open(&f->draft, ops, f->backend, c->draft, err))
    return true;
  mm_forward_close(f);
  return false;
}

void mm_forward_close(mm_forward *f) {
  if (f->ops) f->ops->close(f->backend);
  *f = (mm_forward){0};
}

/* n[T, H] -> branch[T, H]: this rank's partial sum of the attention of layer l. */
static void attention(const mm_forward *f, mm_act n, uint32_t l) {
  const mm_ops *ops = f->ops;
  mm_backend *b = f->backend;
  const mm_layer_weights *w = &f->weights->layer[l];
  mm_act qkv = {f->qkv.data, w->qkv.n}; /* the two kinds of layer differ in width */
  const bool sparse = f->model->attn[l] == MM_ATTN_SPARSE;
  if (sparse) {
    mm_linear_three(ops, b, (mm_three){{qkv, f->index_q, f->index_k}, {&w->qkv, &w->index_q, &w->index_k}}, n);
  } else {
    ops->linear(b, qkv, n, &w->qkv);
  }
  if (f->model->attn[l] == MM_ATTN_LIGHTNING) {
    ops->lightning(b, l, f->o, qkv);
    ops->linear(b, f->gate, n, &w->output_gate);
    ops->gated_norm(b, f->o, f->o, f->gate, &w->attn_norm, f->model->lightning_norm_eps);
  } else {
    bool norms = f->model->qk_norm;
    if (sparse) ops->select(b, l, f->index_q, f->index_k, &w->index_q_norm, &w->index_k_norm);
    ops->gqa(b, l, f->o, qkv, norms ? &w->q_norm : NULL, norms ? &w->k_norm : NULL);
  }
  ops->linear(b, f->branch, f->o, &w->out);
}

static const mm_packed *bias_of(const mm_layer_weights *w) { return w->router_bias.scheme ? &w->router_bias : NULL; }

/* n[T, H] -> branch[T, H]: this rank's partial sum of the MLP of layer l, or of its experts, shared ones too. routed: the rows have their
 * experts already. */
static void feed_forward(const mm_forward *f, mm_act branch, mm_act n, uint32_t l, bool routed) {
  const mm_ops *ops = f->ops;
  const mm_layer_weights *w = &f->weights->layer[l];
  if (f->model->ffn[l] == MM_FFN_EXPERTS) {
    if (!routed) ops->route(f->backend, l, n, &w->router, bias_of(w));
    if (w->mlp_up.scheme) {
      mm_experts_shared(ops, f->backend, branch, n, w);
    } else {
      ops->experts(f->backend, branch, n, &w->w13, &w->w2);
    }
  } else if (w->mlp_up.scheme) {
    ops->mlp(f->backend, branch, n, &w->mlp_up, &w->mlp_down, false);
  }
}

/* The rows between two layers: h before the norm, n after it. */
typedef struct stream {
  mm_act h, n, spare;
} stream;

/* Adds the branch to the residual, whole: it is summed over ranks already. Under postnorm that is the normalised tensor itself: what was
 * before the norm is never added again. */
static void combine(const mm_forward *f, stream *s, bool whole, mm_deepnorm scale, const mm_packed *w) {
  mm_act *residual = f->model->postnorm ? &s->n : &s->h;
  const mm_act before = *residual;
  *residual = s->spare, s->spare = before;
  (whole ? f->ops->draft.combine : f->ops->combine)(f->backend, s->h, s->n, before, f->branch, scale, w, f->model->norm_eps);
}

/* The rows of all groups, for the second half of layer l. Returns true if they are routed too. */
static bool gather(const mm_forward *f, mm_act n, uint32_t l) {
  const mm_rank_ops *ranks = &f->ops->ranks;
  const mm_layer_weights *w = &f->weights->layer[l];
  const bool routed = ranks->gather_routed && f->model->ffn[l] == MM_FFN_EXPERTS && !w->mlp_up.scheme;
  if (routed)
    ranks->gather_routed(f->backend, l, f->all_n, n, f->rows, &w->router, bias_of(w));
  else
    ranks->gather(f->backend, f->all_n, n, f->rows);
  return routed;
}

/* The second half of layer l: in groups of attention with the rows of all of them. */
static void mlp_half(const mm_forward *f, stream *s, uint32_t l, const mm_packed *norm) {
  const bool groups = f->all_n.data, routed = groups && gather(f, s->n, l);
  feed_forward(f, groups ? f->all_branch : f->branch, groups ? f->all_n : s->n, l, routed);
  if (groups) f->ops->ranks.scatter(f->backend, f->branch, f->all_branch);
  combine(f, s, groups, f->model->deepnorm_mlp, norm);
}

/* Weight that layer l's output is normalised with: NULL if the next stage does it. */
static const mm_packed *norm_after(const mm_forward *f, uint32_t l) {
  const mm_rank_weights *w = f->weights;
  if (l + 1 < w->layer_end) return &w->layer[l + 1].input_norm;
  return w->layer_end == f->model->layers ? &w->final_norm : NULL;
}

bool mm_forward_step(mm_forward *f, const mm_batch *given, float *logits, mm_err *err) {
  const mm_ops *ops = f->ops;
  mm_backend *b = f->backend;
  const mm_model *m = f->model;
  const mm_rank_weights *w = f->weights;
  const bool last = w->layer_end == m->layers;
  mm_batch batch = *given;
  if (!last) batch.out_count = 0, batch.out = NULL, batch.sampling = NULL;
  if (f->all_n.data && ops->ranks.plan) ops->ranks.plan(b, f->rows);
  if (!ops->begin(b, &batch, err)) return false;
  stream s = {f->h, f->n, f->spare};
  w->layer_first == 0 ? ops->embed(b, s.h, &w->embed) : ops->ranks.receive(b, s.h);
  ops->norm(b, s.n, s.h, &w->layer[w->layer_first].input_norm, m->norm_eps);
  for (uint32_t l = w->layer_first; l < w->layer_end; l++) {
    const mm_layer_weights *layer = &w->layer[l];
    if (ops->weights.layer) ops->weights.layer(b, l);
    attention(f, s.n, l);
    combine(f, &s, false, m->attn[l] == MM_ATTN_LIGHTNING ? m->deepnorm_lightning : m->deepnorm_full, &layer->post_norm);
    mlp_half(f, &s, l, norm_after(f, l));
    for (uint32_t i = 0; i < f->taps; i++)
      if (f->tap_layer[i] == l) ops->copy(b, f->tap[i], s.h);
  }
  mm_draft_context(&f->draft, f);
  last ? ops->logits(b, s.n, &w->head) : ops->ranks.send(b, s.h);
  if (batch.sampling) return ops->sampler.sample(b, err);
  return f->deferred_sampling ? ops->sampler.defer(b, err) : ops->end(b, last ? logits : NULL, err);
}
