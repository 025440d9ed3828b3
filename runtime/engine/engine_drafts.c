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
  const bool eagle = c->draft->c.kind == MM_DRAFT_EAGLE3;
  if (eagle && (!c->ops->draft.chain || p->tp > 1))
    return mm_fail(
        err, MM_UNSUPPORTED, c->ops->draft.chain ? "E_PARALLEL" : "E_DEVICE", mm_at(p->dir, NULL),
        "found an EAGLE-3 draft on device %s with --tp %u; it runs on a CPU with --tp 1 (minimax-serve --drafts 0 leaves it out)",
        c->ops->name, p->tp);
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
}

uint32_t mm_engine_drafts(const mm_engine *e) { return e->config.draft ? e->config.draft->c.block - 1 : 0; }

/* All ranks propose the same; the first one reports it. */
bool mm_engine_draft_rank(rank *r, mm_err *err) {
  const task *t = &r->engine->task;
  const size_t rows = t->draft.batch->out_count;
  if (r->engine->config.draft->c.kind == MM_DRAFT_EAGLE3)
    return MM_GROW(r->logits, &r->logits_cap, rows * r->weights.vocab_rows, err) &&
           mm_draft_chain(&r->forward.draft, &r->forward, t->draft.batch, t->draft.pass, r->logits, err);
  if (!t->draft.logits)
    return mm_draft_block(&r->forward.draft, &r->forward, t->draft.batch, NULL, r->weights.rank == 0 ? t->draft.id : NULL, err);
  if (!MM_GROW(r->logits, &r->logits_cap, rows * r->weights.vocab_rows, err) ||
      !mm_draft_block(&r->forward.draft, &r->forward, t->draft.batch, r->logits, NULL, err))
    return false;
  mm_engine_place_logits(r, rows, t->draft.logits);
  return true;
}

/* The best id of a row of logits that may be sampled. */
static int32_t best_of(const mm_engine *e, const float *logits) {
  int32_t best = 0;
  float top = -INFINITY;
  for (uint32_t i = 0; i < e->model->vocab; i++)
    if (!e->never[i] && logits[i] > top) top = logits[i], best = (int32_t)i;
  return best;
}

static bool check_requests(const mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, mm_err *err) {
  const mm_limits *l = &e->config.limits;
  if (!each || each > mm_engine_drafts(e)) return mm_engine_refuse(err, "proposals of ask", 0, each, "from 1 to", mm_engine_drafts(e));
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

/* A chain of passes, of one row for each ask. An id that is never sampled is not proposed. */
static bool draft_chain(mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, int32_t *draft, float *logits,
                        mm_err *err) {
  const mm_dflash *d = e->config.draft;
  const size_t vocab = e->model->vocab;
  if (!MM_GROW(e->draft.bytes, &e->draft.bytes_cap, n * (sizeof(mm_span) + sizeof(int32_t) + sizeof(uint32_t)), err)) return false;
  mm_span *span = (mm_span *)(void *)e->draft.bytes;
  int32_t *id = (int32_t *)(void *)(span + n);
  uint32_t *out = (uint32_t *)(void *)(id + n);
  e->draft.batch = (mm_batch){.tokens = n, .id = id, .span_count = n, .span = span, .out_count = n, .out = out, .paging = paging_of(e)};
  e->stepped = false; /* the rows of the last step are overwritten */
  for (size_t i = 0; logits && i < n * each * vocab; i++) logits[i] = -INFINITY;
  for (uint32_t pass = 0; pass < each; pass++) {
    for (uint32_t i = 0; i < n; i++) {
      span[i] = (mm_span){(int32_t)request[i].slot, i, 1, request[i].pos + pass};
      id[i] = pass ? draft[i * each + pass - 1] : request[i].id, out[i] = i;
    }
    if (!mm_engine_run_task(e, &(task){.kind = DRAFT, .draft = {.batch = &e->draft.batch, .pass = pass}}, err)) return false;
    for (uint32_t i = 0; i < n; i++) {
      const float *row = e->rank[0].logits + (size_t)i * d->c.draft_vocab;
      float top = -INFINITY;
      int32_t *best = &draft[i * each + pass];
      *best = 0;
      for (uint32_t k = 0; k < d->c.draft_vocab; k++) {
        const int32_t to = mm_dflash_id(d, k);
        if (logits) logits[((size_t)i * each + pass) * vocab + (uint32_t)to] = row[k];
        if (!e->never[to] && row[k] > top) top = row[k], *best = to;
      }
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
  if (!best && !MM_GROW(e->draft.logits, &e->draft.logits_cap, outs * vocab, err)) return false;
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
  e->draft.batch = (mm_batch){.tokens = rows, .id = id, .span_count = n, .span = span, .out_count = outs, .out = out};
  e->draft.batch.paging = paging_of(e);
  e->stepped = false; /* the rows of the last step are overwritten */
  if (!mm_engine_run_task(e, &(task){.kind = DRAFT, .draft = {&e->draft.batch, best ? NULL : e->draft.logits, found, 0}}, err))
    return false;
  for (uint32_t i = 0; i < outs; i++) {
    draft[i] = best ? found[i] : best_of(e, e->draft.logits + i * vocab);
    if (draft[i] < 0) draft[i] = 0;
  }
  if (logits) memcpy(logits, e->draft.logits, outs * vocab * sizeof *logits);
  return true;
}
