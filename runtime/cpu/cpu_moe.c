/* The CPU backend's router and experts. Rows are sorted by expert, so that each chosen expert is read once a step.
 *
 * Placed experts (mm_expert_order) are summed in the order in which ranks would have added them unplaced: each rank computes the terms of
 * the experts that it has, all exchange them, and rank group g then adds those of the experts g·E/ep to (g + 1)·E/ep - 1, ascending. The
 * bits of a step therefore do not depend on the placement. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"

/* The next best of E keys not yet taken, the lower id first; some id in any case. */
static uint32_t take_best(const float *key, const uint32_t *taken, uint32_t taken_count, uint32_t E) {
  uint32_t best = E;
  for (uint32_t e = 0; e < E; e++) {
    bool free = true;
    for (uint32_t i = 0; i < taken_count; i++) free &= taken[i] != e;
    if (free && (best == E || key[e] > key[best])) best = e;
  }
  return best;
}

void mm_cpu_choose(const mm_model *m, float *z, const float *bias, uint32_t *pick, float *weight, float *key) {
  uint32_t E = m->experts;
  if (m->router == MM_ROUTER_SIGMOID_BIAS) {
    for (uint32_t e = 0; e < E; e++) z[e] = 1.0f / (1.0f + expf(-z[e]));
    for (uint32_t e = 0; e < E; e++) key[e] = z[e] + (bias ? bias[e] : 0.0f);
  } else {
    memcpy(key, z, E * sizeof *z); /* softmax keeps the order */
  }
  for (uint32_t i = 0; i < m->top_k; i++) pick[i] = take_best(key, pick, i, E);
  float sum = 0.0f;
  for (uint32_t i = 0; i < m->top_k; i++) {
    /* Renormalised over the chosen, the softmax's own denominator cancels. pick[0] holds the largest. */
    weight[i] = m->router == MM_ROUTER_SOFTMAX ? expf(z[pick[i]] - z[pick[0]]) : z[pick[i]];
    sum += weight[i];
  }
  for (uint32_t i = 0; i < m->top_k; i++) weight[i] = weight[i] / sum * (m->routed_scale > 0 ? (float)m->routed_scale : 1);
}

static void sort_by_expert(mm_backend *b) {
  uint32_t E = b->c.model->experts, k = b->c.model->top_k, *first = b->moe.first_pair;
  const uint32_t *const index = b->moe.index;
  size_t pairs = (size_t)b->batch->tokens * k;
  memset(first, 0, (E + (size_t)1) * sizeof *first);
  for (size_t p = 0; p < pairs; p++) first[(index ? index[b->moe.pick[p]] : b->moe.pick[p]) + 1]++;
  for (uint32_t e = 0; e < E; e++) first[e + 1] += first[e];
  for (size_t p = 0; p < pairs; p++) {
    uint32_t at = first[index ? index[b->moe.pick[p]] : b->moe.pick[p]]++;
    b->moe.pair_row[at] = (uint32_t)(p / k);
    b->moe.pair_weight[at] = b->moe.weight[p];
  }
  memmove(first + 1, first, E * sizeof *first); /* filling moved every start to the next one's */
  first[0] = 0;
}

void mm_cpu_choose_rows(mm_backend *b, mm_act x, const mm_packed *router, const mm_packed *bias) {
  const mm_model *m = b->c.model;
  uint32_t T = b->batch->tokens;
  mm_cpu_matmul(b, b->moe.score, x.data, NULL, T, router, MM_FORM_F32);
  const float *bias_values = bias ? mm_cpu_vector(b, bias) : NULL;
  for (uint32_t t = 0; t < T; t++) {
    size_t at = (size_t)t * m->top_k;
    mm_cpu_choose(m, b->moe.score + (size_t)t * m->experts, bias_values, b->moe.pick + at, b->moe.weight + at, b->scratch[0]);
  }
}

void mm_cpu_take_choices(mm_backend *b, uint32_t layer) {
  const mm_model *m = b->c.model;
  b->moe.index = b->c.weights->layer[layer].expert_index;
  sort_by_expert(b);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (size_t p = (size_t)s->first * m->top_k; s->slot >= 0 && p < ((size_t)s->first + s->count) * m->top_k; p++)
      b->moe.load[(size_t)layer * m->experts + b->moe.pick[p]]++;
  }
}

void mm_cpu_route(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias) {
  mm_cpu_choose_rows(b, x, router, bias);
  mm_cpu_take_choices(b, layer);
}

typedef struct experts {
  mm_backend *b;
  mm_act y;
  const mm_packed *w13, *w2;
  const uint32_t *first;  /* [w13->lead + 1]: where the pairs of each expert of this rank begin */
  uint32_t active, strip; /* experts that some row chose; rows of a strip */
  size_t up_strips;       /* of one expert */
} experts;

/* Codes of the gate's rows of an item of up_strip: those that this thread reads next are of the item that is as many on as there are
 * threads, if they take turns. */
static const uint8_t *up_codes(const experts *j, size_t item) {
  if (item >= j->active * j->up_strips) return NULL;
  return mm_cpu_row_at(j->w13, j->b->moe.active[item / j->up_strips], (uint32_t)(item % j->up_strips) * j->strip);
}

/* pair_act of one expert, a strip of its Ir columns. */
static bool up_strip(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const experts *j = ctx;
  mm_backend *b = j->b;
  const mm_packed *w = j->w13;
  const uint32_t e = b->moe.active[item / j->up_strips], first = (uint32_t)(item % j->up_strips) * j->strip;
  const uint32_t ir = w->n / 2, count = (uint32_t)mm_min(j->strip, ir - first), from = j->first[e], rows = j->first[e + 1] - from;
  float *const gate = mm_cpu_out(b, worker), *const up = gate + (size_t)rows * count;
  mm_cpu_part part = {
      .w = w, .lead = e, .first = first, .count = count, .x = b->moe.pair_x + from, .tokens = rows, .y = gate, .stride = count};
  part.form = mm_cpu_form_of(b, w);
  part.next = mm_cpu_row_at(w, e, first + ir);
  mm_cpu_strip_of(b, worker, &part);
  part.first += ir, part.y = up, part.next = up_codes(j, item + b->c.options.threads);
  mm_cpu_strip_of(b, worker, &part);
  for (uint32_t p = 0; p < rows; p++) {
    float *act = b->moe.pair_act + (size_t)(from + p) * ir + first;
    mm_cpu_activate(b, act, gate + (size_t)p * count, up + (size_t)p * count, count);
  }
  return true;
}

/* A strip of the columns of y, over all experts in order. */
static bool down_strip(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const experts *j = ctx;
  mm_backend *b = j->b;
  const mm_packed *w = j->w2;
  const uint32_t first = (uint32_t)item * j->strip, count = (uint32_t)mm_min(j->strip, w->n - first);
  float *const out = mm_cpu_out(b, worker);
  for (uint32_t t = 0; t < b->batch->tokens; t++) memset(mm_cpu_row(j->y, t) + first, 0, count * sizeof(float));
  for (uint32_t a = 0; a < j->active; a++) {
    const uint32_t e = b->moe.active[a], from = j->first[e], rows = j->first[e + 1] - from;
    const uint32_t after = first + b->c.options.threads * j->strip; /* what this thread does next */
    const uint8_t *next = a + 1 < j->active ? mm_cpu_row_at(w, b->moe.active[a + 1], first) : mm_cpu_row_at(w, b->moe.active[0], after);
    mm_cpu_part part = {.w = w, .lead = e, .first = first, .count = count, .x = b->moe.pair_x + from, .tokens = rows, .y = out};
    part.stride = count, part.form = mm_cpu_form_of(b, w), part.next = a + 1 < j->active || after < w->n ? next : NULL;
    mm_cpu_strip_of(b, worker, &part);
    for (uint32_t p = 0; p < rows; p++) {
      float *row = mm_cpu_row(j->y, b->moe.pair_row[from + p]) + first;
      for (uint32_t i = 0; i < count; i++) row[i] += b->moe.pair_weight[from + p] * out[(size_t)p * count + i];
    }
  }
  return true;
}

/* Few tokens for each expert, so that memory bounds them: the experts' rows one after another, of which each thread reads a contiguous
 * share. */
typedef struct few {
  const experts *of;
  const mm_packed *w;
  size_t strips; /* of one expert */
} few;
static bool few_strip(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const few *j = ctx;
  mm_backend *b = j->of->b;
  const uint32_t e = b->moe.active[item / j->strips], first = (uint32_t)(item % j->strips) * j->of->strip, pair = j->of->first[e];
  const mm_cpu_part part = {.w = j->w,
                            .lead = e,
                            .first = first,
                            .count = (uint32_t)mm_min(j->of->strip, j->w->n - first),
                            .x = b->moe.pair_x + pair,
                            .tokens = j->of->first[e + 1] - pair,
                            .y = b->moe.few + (size_t)pair * j->w->n + first,
                            .stride = j->w->n,
                            .form = mm_cpu_form_of(b, j->w)};
  mm_cpu_strip_of(b, worker, &part);
  return true;
}
static void few_products(const experts *of, const mm_packed *w, uint64_t work) {
  few j = {of, w, mm_ceil_div(w->n, of->strip)};
  mm_cpu_each_share(of->b, of->active * j.strips, work, few_strip, &j);
}
static void few_up(const experts *j, uint64_t work) {
  mm_backend *b = j->b;
  const size_t ir = j->w13->n / 2;
  few_products(j, j->w13, work);
  for (size_t p = j->first[0]; p < j->first[j->w13->lead]; p++)
    mm_cpu_activate(b, b->moe.pair_act + p * ir, b->moe.few + p * 2 * ir, b->moe.few + (p * 2 + 1) * ir, ir);
}
static void few_down(const experts *j, uint64_t work) {
  mm_backend *b = j->b;
  const size_t n = j->w2->n;
  few_products(j, j->w2, work);
  for (uint32_t t = 0; t < b->batch->tokens; t++) memset(mm_cpu_row(j->y, t), 0, n * sizeof(float));
  for (size_t p = j->first[0]; p < j->first[j->w2->lead]; p++) {
    float *const y = mm_cpu_row(j->y, b->moe.pair_row[p]);
    for (size_t i = 0; i < n; i++) y[i] += b->moe.pair_weight[p] * b->moe.few[p * n + i];
  }
}

/* Columns [from, from + width) of the terms of this rank's pairs, weight · (w2 · act) each. */
typedef struct terms {
  const experts *of;
  float *own;           /* [pairs, width] of the ranks that have this rank's columns of experts */
  uint32_t from, width; /* columns of y */
} terms;
static bool term_strip(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const terms *t = ctx;
  const experts *j = t->of;
  mm_backend *b = j->b;
  const uint32_t at = (uint32_t)item * j->strip, count = (uint32_t)mm_min(j->strip, t->width - at);
  float *const out = mm_cpu_out(b, worker);
  for (uint32_t a = 0; a < j->active; a++) {
    const uint32_t e = b->moe.active[a], from = j->first[e], rows = j->first[e + 1] - from;
    mm_cpu_part part = {.w = j->w2, .lead = e, .first = t->from + at, .count = count, .x = b->moe.pair_x + from, .tokens = rows, .y = out};
    part.stride = count, part.form = mm_cpu_form_of(b, j->w2);
    mm_cpu_strip_of(b, worker, &part);
    for (uint32_t p = 0; p < rows; p++)
      for (uint32_t i = 0; i < count; i++)
        t->own[(size_t)(from + p) * t->width + at + i] = b->moe.pair_weight[from + p] * out[(size_t)p * count + i];
  }
  return true;
}

/* Adds up the terms of the experts that the rank would have unplaced, ascending, as down_strip does. */
static void add_terms(const terms *t) {
  const experts *j = t->of;
  const mm_backend *b = j->b;
  const uint32_t begin = b->c.weights->expert_first, *const first = b->moe.first_pair;
  for (uint32_t r = 0; r < b->batch->tokens; r++) memset(mm_cpu_row(j->y, r) + t->from, 0, t->width * sizeof(float));
  for (uint32_t e = begin; e < begin + j->w2->lead; e++)
    for (uint32_t p = first[b->moe.index[e]]; p < first[b->moe.index[e] + 1]; p++) {
      float *const row = mm_cpu_row(j->y, b->moe.pair_row[p]) + t->from;
      for (uint32_t i = 0; i < t->width; i++) row[i] += t->own[(size_t)p * t->width + i];
    }
}

/* Collective: all ranks of the stage exchange the terms, so many columns at a time as there is memory for. */
static void placed_down(const experts *j, uint32_t pairs, uint64_t work) {
  mm_backend *b = j->b;
  const uint32_t n = j->w2->n, ways = b->ranks.count / (b->c.model->experts / j->w2->lead), way = b->ranks.rank % ways;
  const size_t fits = b->moe.term_floats / ways / pairs / MM_CPU_MANY * MM_CPU_MANY;
  for (uint32_t from = 0; from < n; from += (uint32_t)fits) {
    terms t = {.of = j, .from = from, .width = (uint32_t)mm_min(fits, n - from)};
    const size_t each = (size_t)pairs * t.width;
    memset(b->moe.term, 0, ways * each * sizeof *b->moe.term);
    t.own = b->moe.term + way * each;
    mm_cpu_each(b, mm_ceil_div(t.width, j->strip), work * t.width / n, term_strip, &t);
    mm_comm_all_reduce_sum(b->ranks.comm, b->ranks.rank, b->moe.term, ways * each);
    add_terms(&t);
  }
}

/* Inputs of each expert: its rows of x, and what its w1 and w3 made of them. */
static void observe_up(const experts *j, const float *x) {
  const uint32_t *first = j->first;
  for (uint32_t e = 0; e < j->w13->lead; e++) mm_cpu_observe(j->b, j->w13, e, x, j->b->moe.pair_row + first[e], first[e + 1] - first[e]);
}
static void observe_down(const experts *j) {
  const uint32_t *first = j->first;
  for (uint32_t e = 0; e < j->w2->lead; e++)
    mm_cpu_observe(j->b, j->w2, e, j->b->moe.pair_act + (size_t)first[e] * j->w2->k, NULL, first[e + 1] - first[e]);
}

/* Rows of experts that other ranks hold are 0, so that the largest magnitudes, which all ranks find together, are their holders'. */
static void clear_others(const experts *j) {
  mm_backend *b = j->b;
  const size_t k = j->w2->k, end = (size_t)b->batch->tokens * b->c.model->top_k, own = j->first[0], after = j->first[j->w2->lead];
  memset(b->moe.pair_act, 0, own * k * sizeof *b->moe.pair_act);
  memset(b->moe.pair_act + after * k, 0, (end - after) * k * sizeof *b->moe.pair_act);
}

void mm_cpu_experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
  const uint32_t tokens = b->batch->tokens, *const first = b->moe.first_pair + b->c.weights->expert_first;
  const uint32_t pairs = tokens * b->c.model->top_k, own = first[0], end = first[w13->lead];
  const uint64_t down = (uint64_t)pairs * w2->n * w2->k;
  experts j = {.b = b, .y = y, .w13 = w13, .w2 = w2, .first = first};
  for (uint32_t e = 0; e < w13->lead; e++)
    if (first[e] < first[e + 1]) b->moe.active[j.active++] = e;
  mm_cpu_ahead_experts(b, j.active, w13, w2);
  const bool is_few = tokens <= MM_CPU_FEW && end - own <= 2 * j.active;
  j.strip = mm_cpu_strip(b, j.active ? (end - own) / j.active : 0);
  j.up_strips = mm_ceil_div(w2->k, j.strip);
  mm_cpu_prefetch_experts(b, j.active, w13);
  observe_up(&j, x.data);
  mm_cpu_ready(b, b->row, mm_cpu_input(b, x, w13), NULL, tokens, w13, mm_cpu_form_of(b, w13));
  for (uint32_t p = own; p < end; p++) b->moe.pair_x[p] = b->row[b->moe.pair_row[p]];
  mm_cpu_prefetch_experts(b, j.active, w2);
  if (is_few)
    few_up(&j, 2 * down);
  else
    mm_cpu_each(b, j.active * j.up_strips, 2 * down, up_strip, &j);
  observe_down(&j);
  clear_others(&j);
  mm_cpu_round(b, b->moe.pair_act, pairs, w2);
  mm_cpu_ready(b, b->moe.pair_x, b->moe.pair_act, NULL, pairs, w2, mm_cpu_form_of(b, w2));
  mm_cpu_prefetch_after(b, w2);
  if (b->moe.index)
    placed_down(&j, pairs, down);
  else if (is_few)
    few_down(&j, down);
  else
    mm_cpu_each(b, mm_ceil_div(w2->n, j.strip), down, down_strip, &j);
}
