/* Groups of attention: each group of a stage's ranks has all of attention, embedding and head. A slot belongs to a group for life, with its
 * pages and states; the rows of a step are sorted by group, so that each group's are a batch of its own, and all of them together the batch
 * of the experts. A group without rows has an empty batch, and takes part in every sum. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/engine_inside.h"

uint32_t mm_engine_groups(const mm_engine *e) { return e->groups.count; }

mm_row_exchange mm_engine_exchange(const mm_engine *e) {
  const mm_forward *f = &e->rank[0].forward;
  const mm_rank_ops *ranks = &f->ops->ranks;
  return e->groups.count > 1 && ranks->gather_routed ? ranks->exchange(f->backend) : (mm_row_exchange){.codes = MM_ACT_KEPT};
}

void mm_exchange_text(mm_row_exchange x, char *to, size_t size) {
  const mm_act_format *f = &mm_act_formats[x.codes];
  char scale[40] = "row", from[60] = "";
  if (f->code == MM_CODE_PLAIN) {
    snprintf(to, size, "unrounded rows between them");
    return;
  }
  if (f->group) snprintf(scale, sizeof scale, "%u numbers", f->group);
  if (x.from > 1) snprintf(from, sizeof from, "; unrounded in decode steps of fewer than %u rows", x.from);
  snprintf(to, size, "rows between them as %s codes with a scale for each %s, %u bytes a row%s", f->code == MM_CODE_E2M1 ? "E2M1" : "E4M3",
           scale, x.row_bytes, from);
}

bool mm_engine_check_groups(const mm_pack *p, const mm_engine_config *c, mm_err *err) {
  if (mm_pack_groups(p) == 1) return true;
  if (!mm_ops_run_groups(c->ops, p, err)) return false;
  const char *other = c->process_group ? "a run of several processes"
                      : c->calibration ? "collecting inputs"
                      : c->draft       ? "a draft"
                      : c->taps        ? "reading hidden states"
                                       : NULL;
  return !other || mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL),
                           "found --attn-tp %u of --tp %u; %s needs --dp 1, or a conversion without --attn-tp", p->attn_tp, p->tp, other);
}

bool mm_engine_open_groups(mm_engine *e, mm_err *err) {
  engine_groups *g = &e->groups;
  if (g->count == 1) return true;
  const uint32_t per_slot = e->paging.per_slot;
  if (!(g->rows.first = g->first = mm_calloc(g->count + (size_t)1, sizeof *g->first, err)) ||
      !(g->out = mm_calloc(g->count + (size_t)1, sizeof *g->out, err)) ||
      !(g->moves = mm_calloc(g->count + (size_t)1, sizeof *g->moves, err)) || !(g->own = mm_calloc(g->count, sizeof *g->own, err)) ||
      !(g->paging = mm_calloc(g->count, sizeof *g->paging, err)) || !(g->copy = mm_calloc(e->config.limits.slots, sizeof *g->copy, err)))
    return false;
  for (uint32_t i = 0; i < MM_QUEUE; i++)
    if (!(g->queued[i].first = mm_calloc(g->count + (size_t)1, sizeof *g->out, err))) return false;
  for (uint32_t k = 0; e->pages && k < g->count; k++)
    g->paging[k] = (mm_paging){.table = e->paging.table + (size_t)k * per_slot, /* every count-th slot is the group's */
                               .per_slot = per_slot * g->count,
                               .first = k * mm_pages_each(e->pages)};
  return true;
}

void mm_engine_close_groups(mm_engine *e) {
  engine_groups *g = &e->groups;
  for (uint32_t i = 0; i < MM_QUEUE; i++) MM_FREE(g->queued[i].first, g->queued[i].place, g->queued[i].id);
  MM_FREE(g->first, g->out, g->own, g->paging, g->copy, g->move, g->moves, g->bytes, g->sampling);
}

/* Padding is the first group's. */
static uint32_t group_of(const mm_engine *e, const mm_span *s) { return s->slot < 0 ? 0 : (uint32_t)s->slot % e->groups.count; }

/* Copies of the step's page copies, by group. */
static void group_copies(mm_engine *e) {
  engine_groups *g = &e->groups;
  for (uint32_t k = 0, n = 0; k < g->count; k++) {
    mm_paging *p = &g->paging[k];
    p->copy = g->copy + n;
    for (uint32_t i = 0; i < e->paging.copies; i++)
      if (mm_pages_group_of(e->pages, e->paging.copy[i].to) == k) g->copy[n++] = e->paging.copy[i];
    p->copies = (uint32_t)(g->copy + n - p->copy);
  }
}

bool mm_engine_group_moves(mm_engine *e, const mm_page_move *move, uint32_t count, mm_err *err) {
  engine_groups *g = &e->groups;
  if (g->count == 1) return true;
  if (!MM_GROW(g->move, &g->move_cap, count, err)) return false;
  uint32_t n = 0;
  for (uint32_t k = 0; k < g->count; k++) {
    g->moves[k] = n;
    for (uint32_t i = 0; i < count; i++)
      if (mm_pages_group_of(e->pages, move[i].page) == k)
        g->move[n++] = (mm_page_move){move[i].page - k * mm_pages_each(e->pages), move[i].place, move[i].in};
  }
  g->moves[g->count] = n;
  return true;
}

/* Arrays of the batches: of all rows, and by each group's own numbers. */
typedef struct sorted {
  mm_span *span, *own_span; /* [span_count] each */
  mm_sampling *sampling;    /* [out_count]; not NULL where the batch samples */
  int32_t *id;              /* [tokens] */
  uint32_t *out, *own_out;  /* [out_count] each */
  uint32_t tokens, spans, outs;
} sorted;

/* Adds a span of group k, and its outputs: out[from], … of the batch. */
static void add_span(mm_engine *e, sorted *to, const mm_batch *b, const mm_span *s, uint32_t from) {
  engine_groups *g = &e->groups;
  const uint32_t before = g->first[group_of(e, s)];
  to->span[to->spans] = (mm_span){s->slot, to->tokens, s->count, s->pos};
  to->own_span[to->spans++] =
      (mm_span){s->slot < 0 ? -1 : (int32_t)mm_engine_own_slot(e, (uint32_t)s->slot), to->tokens - before, s->count, s->pos};
  memcpy(to->id + to->tokens, b->id + s->first, s->count * sizeof *b->id);
  for (; from < b->out_count && b->out[from] < s->first + s->count; from++) {
    to->out[to->outs] = to->tokens + (b->out[from] - s->first);
    to->own_out[to->outs] = to->out[to->outs] - before;
    if (b->sampling) to->sampling[to->outs] = b->sampling[from];
    g->place[to->outs++] = from;
  }
  to->tokens += s->count;
}

/* Room for the arrays of a batch in the engine's memory. */
static bool open_sorted(mm_engine *e, const mm_batch *b, sorted *to, mm_err *err) {
  engine_groups *g = &e->groups;
  const size_t spans = b->span_count, outs = b->out_count, draws = b->sampling ? outs : 0;
  const size_t bytes =
      draws * sizeof *to->sampling + 2 * spans * sizeof *to->span + b->tokens * sizeof *to->id + 3 * outs * sizeof *to->out + 1;
  if (!MM_GROW(g->bytes, &g->bytes_cap, bytes, err)) return false;
  *to = (sorted){.sampling = (mm_sampling *)(void *)g->bytes};
  to->span = (mm_span *)(void *)(to->sampling + draws);
  to->own_span = to->span + spans;
  to->id = (int32_t *)(void *)(to->own_span + spans);
  to->out = (uint32_t *)(void *)(to->id + b->tokens);
  to->own_out = to->out + outs;
  g->place = to->own_out + outs;
  return true;
}

bool mm_engine_group_rows(mm_engine *e, const mm_batch *b, mm_err *err) {
  engine_groups *g = &e->groups;
  sorted to;
  if (!open_sorted(e, b, &to, err)) return false;
  for (uint32_t k = 0; k < g->count; k++) {
    const uint32_t spans = to.spans, outs = g->out[k] = to.outs;
    g->first[k] = to.tokens;
    for (uint32_t i = 0, out = 0; i < b->span_count; i++) {
      const mm_span *s = &b->span[i];
      while (out < b->out_count && b->out[out] < s->first) out++;
      if (group_of(e, s) == k) add_span(e, &to, b, s, out);
    }
    g->own[k] = (mm_batch){.tokens = to.tokens - g->first[k],
                           .id = to.id + g->first[k],
                           .span_count = to.spans - spans,
                           .span = to.own_span + spans,
                           .out_count = to.outs - outs,
                           .out = to.own_out + outs,
                           .sampling = b->sampling ? to.sampling + outs : NULL,
                           .paging = e->pages ? &g->paging[k] : NULL};
  }
  g->first[g->count] = to.tokens, g->out[g->count] = to.outs;
  g->rows.all = (mm_batch){.tokens = to.tokens,
                           .id = to.id,
                           .span_count = to.spans,
                           .span = to.span,
                           .out_count = to.outs,
                           .out = to.out,
                           .sampling = b->sampling ? to.sampling : NULL};
  if (e->pages) group_copies(e);
  return true;
}

bool mm_engine_reserve_queued(mm_engine *e, uint32_t at, uint32_t outs, mm_err *err) {
  queued_rows *q = &e->groups.queued[at];
  return e->groups.count == 1 ||
         (MM_GROW(q->place, &q->place_cap, outs + (size_t)1, err) && MM_GROW(q->id, &q->id_cap, outs + (size_t)1, err));
}

void mm_engine_note_queued(mm_engine *e, uint32_t at, uint32_t outs) {
  const engine_groups *g = &e->groups;
  queued_rows *q = &e->groups.queued[at];
  if (g->count == 1) return;
  q->count = outs;
  for (uint32_t k = 0; k <= g->count; k++) q->first[k] = outs ? g->out[k] : 0;
  if (outs) memcpy(q->place, g->place, outs * sizeof *g->place);
}

void mm_engine_place_ids(const mm_engine *e, uint32_t at, int32_t *id) {
  const queued_rows *q = &e->groups.queued[at];
  for (uint32_t i = 0; i < q->count; i++) id[q->place[i]] = q->id[i];
}

const mm_sampling *mm_engine_sort_sampling(mm_engine *e, const mm_sampling *sampling, uint32_t count, mm_err *err) {
  engine_groups *g = &e->groups;
  if (g->count == 1) return sampling;
  if (!MM_GROW(g->sampling, &g->sampling_cap, count + (size_t)1, err)) return NULL;
  for (uint32_t i = 0; i < count; i++) g->sampling[i] = sampling[g->place[i]];
  return g->sampling;
}
