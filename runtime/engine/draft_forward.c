/* Drafts, written once over the ops of a backend: cells of the rows that the target computes, and proposals, of a DFlash draft in blocks,
 * of an EAGLE-3 draft in chains.
 *
 * Cell p of an EAGLE-3 draft has the key and the value of token t_p with g of position p - 1, and g of position p, where g is fc of the
 * taps: all of it depends on the tokens up to p alone, as cells of the target do. RoPE takes p for the position of the pair, where the
 * reference takes p - 1: scores depend on differences alone. */
#include "runtime/engine/draft_forward.h"

/* Acts that EAGLE-3 alone has. */
static bool open_eagle(mm_draft_forward *f, const mm_ops *ops, mm_backend *b, mm_err *err) {
  const mm_dflash_config *c = &f->d->c;
  if (c->kind != MM_DRAFT_EAGLE3) return true;
  for (uint32_t i = 0; c->tap_norms && i < c->taps; i++)
    if (!ops->act(b, c->hidden, &f->tap[i], err)) return false;
  return ops->act(b, c->hidden, &f->embedded, err) && ops->act(b, 2 * c->hidden, &f->joined, err);
}

bool mm_draft_forward_open(mm_draft_forward *f, const mm_ops *ops, mm_backend *b, const mm_dflash *d, mm_err *err) {
  *f = (mm_draft_forward){0};
  if (!d) return true;
  const mm_dflash_config *c = &d->c;
  const uint32_t heads = c->heads * c->head_dim, kv = 2 * c->kv_heads * c->head_dim;
  f->d = d;
  return ops->act(b, c->taps * c->hidden, &f->taps, err) && ops->act(b, c->hidden, &f->context, err) &&
         ops->act(b, c->hidden, &f->normed, err) && ops->act(b, kv, &f->kv, err) && ops->act(b, heads + kv, &f->qkv, err) &&
         ops->act(b, heads, &f->o, err) && open_eagle(f, ops, b, err);
}

/* joined = [norm of the rows' embeddings; normed], normed = the norm of g. */
static void join_inputs(const mm_draft_forward *f, const mm_forward *target, mm_act g) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  const mm_dflash *d = f->d;
  ops->embed(b, target->branch, d->c.own_embed ? &d->embed : &target->weights->embed);
  ops->norm(b, f->embedded, target->branch, &d->layer[0].input_norm, d->c.norm_eps);
  ops->norm(b, f->normed, g, &d->context_norm, d->c.norm_eps);
  ops->draft.concat(b, f->joined, (const mm_act[]){f->embedded, f->normed}, 2);
}

static void eagle_context(const mm_draft_forward *f, const mm_forward *target) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  const mm_dflash *d = f->d;
  for (uint32_t i = 0; d->c.tap_norms && i < d->c.taps; i++) ops->norm(b, f->tap[i], target->tap[i], &d->tap_norm[i], d->c.norm_eps);
  ops->draft.concat(b, f->taps, d->c.tap_norms ? f->tap : target->tap, d->c.taps);
  ops->linear(b, f->context, f->taps, &d->fc);
  ops->draft.keep(b, f->context);
  ops->draft.before(b, f->context);
  join_inputs(f, target, f->context);
  ops->linear(b, f->kv, f->joined, &d->layer[0].kv);
  ops->draft.store(b, 0, f->kv, NULL);
}

void mm_draft_context(const mm_draft_forward *f, const mm_forward *target) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  if (!f->d) return;
  if (f->d->c.kind == MM_DRAFT_EAGLE3) {
    eagle_context(f, target);
    return;
  }
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

static bool begin(const mm_forward *t, const mm_batch *batch, mm_draft_step step, mm_err *err) {
  return t->ops->draft.begin ? t->ops->draft.begin(t->backend, batch, step, err) : t->ops->begin(t->backend, batch, err);
}

bool mm_draft_block(const mm_draft_forward *f, const mm_forward *target, const mm_batch *batch, float *logits, int32_t *id, mm_err *err) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  const double eps = f->d->c.norm_eps;
  if (!begin(target, batch, (mm_draft_step){.best = !logits}, err)) return false;
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

bool mm_draft_chain(const mm_draft_forward *f, const mm_forward *target, const mm_batch *batch, mm_draft_step step, float *logits,
                    int32_t *id, mm_err *err) {
  const mm_ops *ops = target->ops;
  mm_backend *b = target->backend;
  const mm_dflash *d = f->d;
  const mm_dflash_layer *w = &d->layer[0];
  const mm_deepnorm sum = {1, 1};
  if (!begin(target, batch, step, err)) return false;
  if (step.pass == 0) ops->draft.before(b, f->context);
  join_inputs(f, target, f->context);
  ops->linear(b, f->qkv, f->joined, &w->qkv);
  ops->draft.chain(b, step.pass, f->o, f->qkv);
  ops->linear(b, target->branch, f->o, &w->out);
  const mm_act residual = d->c.norm_before_residual ? f->normed : f->context;
  ops->draft.combine(b, target->h, target->n, residual, target->branch, sum, &w->post_norm, d->c.norm_eps);
  ops->mlp(b, target->branch, target->n, &w->up, &w->down, false);
  ops->draft.combine(b, target->spare, target->n, target->h, target->branch, sum, &d->last_norm, d->c.norm_eps);
  ops->copy(b, f->context, d->c.norm_output ? target->n : target->spare);
  ops->logits(b, target->n, &d->head);
  return step.best ? ops->draft.best(b, id, err) : ops->end(b, logits, err);
}
