/* Proposals of a learned draft (engine.h). */
#include <math.h>
#include <string.h>

#include "runtime/engine/draft_forward.h"
#include "runtime/engine/engine_inside.h"

bool mm_engine_check_draft(const mm_pack *p, mm_engine_config *c, mm_err *err) {
  if (!c->draft) return true;
  if (!c->ops->draft.attend)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(p->dir, NULL),
                   "found a draft; device %s runs none (minimax-serve --drafts 0 leaves it out)", c->ops->name);
  if (p->pp != 1 || c->process_group || c->calibration)
    return mm_fail(
        err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL),
        "found --pp %u in %u processes; a draft runs with 1 of each, and not while inputs are collected (minimax-serve --drafts 0 "
        "leaves it out)",
        p->pp, c->process_group ? c->process_group->processes : 1);
  if (c->taps) return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u layers to tap next to a draft's", c->taps);
  c->tap = c->draft->c.tap;
  c->taps = c->draft->c.taps;
  return true;
}

void mm_engine_add_draft_memory(const mm_engine_config *c, mm_rank_memory *need) {
  if (!c->draft) return;
  const mm_dflash_config *d = &c->draft->c;
  const uint64_t q = (uint64_t)d->heads * d->head_dim, kv = UINT64_C(2) * d->kv_heads * d->head_dim, H = d->hidden, I = d->intermediate;
  need->page += (d->layers * kv + (d->kind == MM_DRAFT_EAGLE3 ? H : 0)) * MM_PAGE * c->ops->draft.cell_bytes;
  if (!c->ops->own_memory) return;
  need->weights += c->draft->map.size;
  need->buffers += c->limits.max_tokens * (2 * ((d->taps + 2) * H + 2 * q + 2 * kv + I) + 4 * mm_max(2 * I, H));
  need->buffers += UINT64_C(4) << 20;                                                        /* parts of attention */
  const uint64_t rounded = c->options.act_quant ? mm_round_up(mm_dflash_widest(d), 128) : 0; /* codes, their scales; or rows */
  need->buffers += c->limits.max_tokens * (rounded + rounded / 32 + 2 * rounded);
  if (d->kind != MM_DRAFT_EAGLE3) return;
  need->buffers += c->limits.max_tokens * 2 * (3 + (d->tap_norms ? d->taps : 0)) * H;
  need->buffers += c->limits.slots * (2 * MM_EAGLE_CHAIN * kv + UINT64_C(8) * d->draft_vocab); /* chains; logits of twice as many rows */
}

uint32_t mm_engine_drafts(const mm_engine *e) { return e->config.draft ? e->config.draft->c.block - 1 : 0; }

static bool chain_rank(rank *r, mm_err *err) {
  const task *t = &r->engine->task;
  const size_t width = r->engine->config.draft->c.draft_vocab;
  mm_draft_step step = t->draft.step;
  if (!step.best)
    return MM_GROW(r->logits, &r->logits_cap, t->draft.batch->out_count * width, err) &&
           mm_draft_chain(&r->forward.draft, &r->forward, t->draft.batch, step, r->logits, NULL, err);
  int32_t *id = r->weights.rank == 0 ? t->draft.id : NULL;
  for (step.pass = 0; step.pass < step.passes; step.pass++)
    if (!mm_draft_chain(&r->forward.draft, &r->forward, &t->draft.batch[step.pass], step, NULL, id, err)) return false;
  return true;
}

/* All ranks propose the same; the first one reports it. */
bool mm_engine_draft_rank(rank *r, mm_err *err) {
  const task *t = &r->engine->task;
  const size_t rows = t->draft.batch->out_count;
  if (r->engine->config.draft->c.kind == MM_DRAFT_EAGLE3) return chain_rank(r, err);
  if (!t->draft.logits)
    return mm_draft_block(&r->forward.draft, &r->forward, t->draft.batch, NULL, r->weights.rank == 0 ? t->draft.id : NULL, err);
  if (!MM_GROW(r->logits, &r->logits_cap, rows * r->weights.vocab_rows, err) ||
      !mm_draft_block(&r->forward.draft, &r->forward, t->draft.batch, r->logits, NULL, err))
    return false;
  mm_engine_place_logits(r, rows, t->draft.logits);
  return true;
}

/* Proposals are drawn as the tokens will be, but for penalties, biases and masks, which depend on more than the logits. */
static mm_sampling sampling_of(const mm_draft_request *r) {
  const mm_sampling *s = r->sampling;
  if (!s || s->temperature == 0) return (mm_sampling){.top_p = 1};
  return (mm_sampling){.temperature = s->temperature, .top_p = s->top_p, .top_k = s->top_k, .seed = s->seed, .min_p = s->min_p};
}

/* Settings of a device's outputs, `each` of every request; *set NULL: all are greedy. */
static bool fill_sampling(mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, mm_sampling **set, mm_err *err) {
  bool drawn = false;
  for (uint32_t i = 0; i < n; i++) drawn = drawn || sampling_of(&request[i]).temperature > 0;
  *set = NULL;
  if (!drawn) return true;
  if (!MM_GROW(e->draft.sampling, &e->draft.sampling_cap, (size_t)n * each, err)) return false;
  *set = e->draft.sampling;
  for (uint32_t i = 0; i < n * each; i++) e->draft.sampling[i] = sampling_of(&request[i / each]);
  return true;
}

/* Proposal k of a request from logits[vocab], of which those that no step samples are lost; 0 where none is a number. */
static int32_t sample_proposal(mm_engine *e, const mm_draft_request *r, uint32_t k, float *logits) {
  for (uint32_t i = 0; i < e->model->vocab; i++)
    if (e->never[i]) logits[i] = -INFINITY;
  const mm_sampling set = sampling_of(r);
  const int32_t id = mm_sample(e->draft.sampler, &set, r->pos + UINT64_C(1) + k, logits);
  return id < 0 ? 0 : id;
}

/* Room for `rows` rows of logits, and what chooses from them. */
static bool grow_logits(mm_engine *e, size_t rows, mm_err *err) {
  const uint32_t vocab = e->model->vocab;
  return MM_GROW(e->draft.logits, &e->draft.logits_cap, rows * vocab, err) &&
         (e->draft.sampler || (e->draft.sampler = mm_sampler_open(vocab, err)));
}

static bool check_requests(const mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, mm_err *err) {
  const mm_limits *l = &e->config.limits;
  if (!each || each > mm_engine_drafts(e)) return mm_engine_refuse(err, "proposals of ask", 0, each, "from 1 to", mm_engine_drafts(e));
  if (n > l->slots) return mm_engine_refuse(err, "asks", n, n, "slots at most", l->slots);
  if ((uint64_t)n * (1 + each) > l->max_tokens) return mm_engine_refuse(err, "asks", n, n, "rows at most", l->max_tokens);
  for (uint32_t i = 0; i < n; i++) {
    if (request[i].slot >= l->slots) return mm_engine_refuse(err, "slot of ask", i, request[i].slot, "less than", l->slots);
    if (!request[i].pos || e->slot[request[i].slot].held < request[i].pos)
      return mm_engine_refuse(err, "position of ask", i, request[i].pos, "from 1 to", e->slot[request[i].slot].held);
    if (request[i].id < 0 || (uint32_t)request[i].id >= e->model->vocab)
      return mm_engine_refuse(err, "id of ask", i, request[i].id, "less than", e->model->vocab);
  }
  return true;
}

/* The pages of the slots as they are. */
static const mm_paging *paging_of(mm_engine *e) {
  if (!e->pages) return NULL;
  e->draft.paging = e->paging, e->draft.paging.copies = 0;
  return &e->draft.paging;
}

/* Batches of a chain's passes, of one row for each request; *id[each, n] are their ids, *found as many more places. */
static bool fill_passes(mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, int32_t **id, int32_t **found,
                        mm_err *err) {
  const size_t rows = (size_t)n * each;
  if (!MM_GROW(e->draft.bytes, &e->draft.bytes_cap, rows * (sizeof(mm_span) + 2 * sizeof(int32_t)) + n * sizeof(uint32_t), err))
    return false;
  mm_span *span = (mm_span *)(void *)e->draft.bytes;
  *id = (int32_t *)(void *)(span + rows), *found = *id + rows;
  uint32_t *out = (uint32_t *)(void *)(*found + rows);
  const mm_paging *paging = paging_of(e);
  for (uint32_t i = 0; i < n; i++) out[i] = i;
  for (uint32_t pass = 0; pass < each; pass++) {
    const size_t first = (size_t)pass * n;
    for (uint32_t i = 0; i < n; i++) {
      span[first + i] = (mm_span){(int32_t)request[i].slot, i, 1, request[i].pos + pass};
      (*id)[first + i] = pass ? MM_ID_SAMPLED : request[i].id;
    }
    e->draft.batch[pass] =
        (mm_batch){.tokens = n, .id = *id + first, .span_count = n, .span = span + first, .out_count = n, .out = out, .paging = paging};
  }
  return true;
}

/* Row i of a pass's logits as logits[vocab], -INFINITY of ids that the head does not have. */
static void spread_row(const mm_engine *e, uint32_t i, float *logits) {
  const mm_dflash *d = e->config.draft;
  const float *row = e->rank[0].logits + (size_t)i * d->c.draft_vocab;
  for (uint32_t k = 0; k < e->model->vocab; k++) logits[k] = -INFINITY;
  for (uint32_t k = 0; k < d->c.draft_vocab; k++) logits[mm_dflash_id(d, k)] = row[k];
}

/* A chain of passes. An id that is never sampled is not proposed. */
static bool draft_chain(mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, int32_t *draft, float *logits,
                        mm_err *err) {
  const size_t vocab = e->model->vocab;
  int32_t *id, *found;
  mm_sampling *set;
  mm_draft_step step = {.best = !logits && e->config.ops->draft.best, .passes = each};
  if (!fill_passes(e, request, n, each, &id, &found, err) || !fill_sampling(e, request, n, 1, &set, err) ||
      (!step.best && !grow_logits(e, 1, err)))
    return false;
  e->stepped = false; /* the rows of the last step are overwritten */
  for (uint32_t pass = 0; step.best && pass < each; pass++) e->draft.batch[pass].sampling = set;
  if (step.best && !mm_engine_run_task(e, &(task){.kind = DRAFT, .draft = {e->draft.batch, NULL, found, step}}, err)) return false;
  for (size_t i = 0; step.best && i < (size_t)n * each; i++) draft[i % n * each + i / n] = found[i] < 0 ? 0 : found[i];
  for (; !step.best && step.pass < each; step.pass++) {
    for (uint32_t i = 0; step.pass && i < n; i++) id[(size_t)step.pass * n + i] = draft[i * each + step.pass - 1];
    if (!mm_engine_run_task(e, &(task){.kind = DRAFT, .draft = {&e->draft.batch[step.pass], NULL, NULL, step}}, err)) return false;
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t at = i * each + step.pass;
      spread_row(e, i, e->draft.logits);
      if (logits) memcpy(logits + at * vocab, e->draft.logits, vocab * sizeof *logits);
      draft[at] = sample_proposal(e, &request[i], step.pass, e->draft.logits);
    }
  }
  return true;
}

bool mm_engine_draft(mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, int32_t *draft, float *logits, mm_err *err) {
  if (!n) return true;
  if (!check_requests(e, request, n, each, err) || !mm_engine_all_back(e, err)) return false;
  if (e->config.draft->c.kind == MM_DRAFT_EAGLE3) return draft_chain(e, request, n, each, draft, logits, err);
  const uint32_t rows = n * (1 + each), outs = n * each;
  const size_t vocab = e->model->vocab;
  const bool best = !logits && e->config.ops->draft.best;
  mm_sampling *set;
  if (!fill_sampling(e, request, n, each, &set, err) || (!best && !grow_logits(e, outs, err))) return false;
  const size_t bytes = n * sizeof(mm_span) + rows * sizeof(int32_t) + 2 * outs * sizeof(uint32_t);
  if (!MM_GROW(e->draft.bytes, &e->draft.bytes_cap, bytes, err)) return false;
  mm_span *span = (mm_span *)(void *)e->draft.bytes;
  int32_t *id = (int32_t *)(void *)(span + n);
  uint32_t *out = (uint32_t *)(void *)(id + rows), outputs = 0;
  int32_t *found = (int32_t *)(void *)(out + outs);
  for (uint32_t i = 0, row = 0; i < n; i++) {
    span[i] = (mm_span){(int32_t)request[i].slot, row, 1 + each, request[i].pos};
    id[row++] = request[i].id;
    for (uint32_t k = 0; k < each; k++, row++) id[row] = (int32_t)e->config.draft->c.mask_id, out[outputs++] = row;
  }
  e->draft.batch[0] =
      (mm_batch){.tokens = rows, .id = id, .span_count = n, .span = span, .out_count = outs, .out = out, .paging = paging_of(e)};
  if (best) e->draft.batch[0].sampling = set;
  e->stepped = false; /* the rows of the last step are overwritten */
  if (!mm_engine_run_task(e, &(task){.kind = DRAFT, .draft = {e->draft.batch, best ? NULL : e->draft.logits, found, {0}}}, err))
    return false;
  if (logits) memcpy(logits, e->draft.logits, outs * vocab * sizeof *logits);
  for (uint32_t i = 0; best && i < outs; i++) draft[i] = found[i] < 0 ? 0 : found[i];
  for (uint32_t i = 0; !best && i < outs; i++) draft[i] = sample_proposal(e, &request[i / each], i % each, e->draft.logits + i * vocab);
  return true;
}
