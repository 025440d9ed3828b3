/* The DFlash draft, written once over the ops of a backend: cells of the rows that the target computes, and blocks of proposals. */
#include "runtime/engine/draft_forward.h"

bool mm_draft_forward_open(mm_draft_forward *f, const mm_ops *ops, mm_backend *b, const mm_dflash *d, mm_err *err) {
  *f = (mm_draft_forward){0};
  if (!d) return true;
  const mm_dflash_config *c = &d->c;
  const uint32_t heads = c->heads * c->head_dim, kv = 2 * c->kv_heads * c->head_dim;
  f->d = d;
  return ops->act(b, c->taps * c->hidden, &f->taps, err) && ops->act(b, c->hidden, &f->context, err) &&
         ops->act(b, c->hidden, &f->normed, err) && ops->act(b, kv, &f->kv, err) && ops->act(b, heads + kv, &f->qkv, err) &&
         ops->act(b, heads, &f->o, err);
}

void mm_draft_context(const mm_draft_forward *f, const mm_forward *target) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  if (!f->d) return;
  ops->draft.concat(b, f->taps, target->tap, f->d->c.taps);
  ops->linear(b, f->context, f->taps, &f->d->fc);
  ops->norm(b, f->normed, f->context, &f->d->context_norm, f->d->c.norm_eps);
  for (uint32_t l = 0; l < f->d->c.layers; l++) {
    ops->linear(b, f->kv, f->normed, &f->d->layer[l].kv);
    ops->draft.store(b, l, f->kv, &f->d->layer[l].k_norm);
  }
}

/* h = residual + branch, n = norm of h; the residual's buffer is free then. */
static void add_branch(const mm_forward *t, mm_act *h, mm_act *spare, mm_act n, const mm_packed *w, double eps) {
  const mm_act before = *h;
  t->ops->draft.combine(t->backend, *spare, n, before, t->branch, (mm_deepnorm){1, 1}, w, eps);
  *h = *spare, *spare = before;
}

bool mm_draft_block(const mm_draft_forward *f, const mm_forward *target, const mm_batch *batch, float *logits, int32_t *id, mm_err *err) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  const double eps = f->d->c.norm_eps;
  if (!(ops->draft.begin ? ops->draft.begin(b, batch, !logits, err) : ops->begin(b, batch, err))) return false;
  mm_act h = target->h, spare = target->spare;
  const mm_act n = target->n;
  ops->embed(b, h, &target->weights->embed);
  ops->norm(b, n, h, &f->d->layer[0].input_norm, eps);
  for (uint32_t l = 0; l < f->d->c.layers; l++) {
    const mm_dflash_layer *w = &f->d->layer[l];
    ops->linear(b, f->qkv, n, &w->qkv);
    ops->draft.attend(b, l, f->o, f->qkv, &w->q_norm, &w->k_norm);
    ops->linear(b, target->branch, f->o, &w->out);
    add_branch(target, &h, &spare, n, &w->post_norm, eps);
    ops->mlp(b, target->branch, n, &w->up, &w->down, false);
    add_branch(target, &h, &spare, n, l + 1 < f->d->c.layers ? &w[1].input_norm : &f->d->last_norm, eps);
  }
  ops->logits(b, n, &target->weights->head);
  return logits ? ops->end(b, logits, err) : ops->draft.best(b, id, err);
}
