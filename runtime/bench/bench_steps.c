/* Decode and prefill steps of random tokens (bench_steps.h). */
#include "runtime/bench/bench_steps.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/pool.h"
#include "loader/random_weights.h"
#include "loader/stream/capacity.h"
#include "runtime/bench/bench_shapes.h"

#define CHUNK   1024 /* tokens of a context per step */
#define WARMUP  0.25 /* seconds of steps before those that count: a GPU's clocks rise from idle meanwhile */
#define LONG    2048 /* tokens of a context that is filled in pieces */
#define REPEATS 5    /* prefill steps that count, after one that does not */
#define COUNTED 8    /* decode steps whose experts are counted */

/* Number of the first sequence of the rank's group among those of all. */
static uint32_t first_of(const mm_bench *b) { return b->rank / b->attn_tp * b->limits.slots; }

/* The next `count` tokens of `slots` sequences; of a single one's last token the logits, if `outs` is 1. */
static bool feed(mm_bench *b, uint32_t slot, uint32_t slots, uint32_t pos, uint32_t count, uint32_t outs, mm_err *err) {
  const uint32_t last = count - 1, number = slot + first_of(b);
  for (uint32_t s = 0; s < slots; s++) {
    b->span[s] = (mm_span){(int32_t)(slot + s), s * count, count, pos};
    for (uint32_t i = 0; i < count; i++) b->id[s * count + i] = (int32_t)(mm_draw(number + s, pos + i + UINT64_C(1)) * b->model.vocab);
  }
  const mm_batch batch = {.tokens = slots * count, .id = b->id, .span_count = slots, .span = b->span, .out_count = outs, .out = &last};
  return mm_bench_plan(b, &batch, err) && mm_forward_step(&b->forward, &batch, b->logits, err);
}

/* Gives the first rank's answer on all ranks. *ok is false if another rank failed; that rank reports the error. */
static bool agree(const mm_bench *b, bool mine, bool *ok) {
  const void *all[MM_BENCH_RANKS];
  if (b->ranks == 1) return mine;
  *ok = mm_comm_gather(b->comm, b->rank, mine ? b : NULL, all);
  return *ok && all[0];
}

/* Backends without sampling of their own end a step by logits for the host. */
static bool samples(const mm_bench *b) { return b->ops->sampler.sample && b->ops->sampler.collect; }

/* Waits for the oldest step queued. Of a pass the first row's logits must be numbers. */
static bool collect(mm_bench *b, bool pass, double *at, mm_err *err) {
  if (samples(b) && !b->ops->sampler.collect(b->forward.backend, b->id, err)) return false;
  *at = mm_now();
  if (samples(b) ? b->id[0] >= 0 : !pass || isfinite(b->logits[0])) return true;
  return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(NULL, NULL), "no logit is a number");
}

/* Rows of their own for each token: what the first layer is given. */
static void run_rows(mm_bench *b) {
  const mm_forward *f = &b->forward;
  f->ops->embed(f->backend, f->h, &b->weights.embed);
  f->ops->norm(f->backend, f->n, f->h, &b->weights.layer[0].input_norm, b->model.norm_eps);
}

/* Queues a step: the forward pass, or the rows and ROUNDS times the op in all layers that have it. */
static bool queue_step(mm_bench *b, const mm_bench_op *o, const mm_batch *batch, mm_err *err) {
  const mm_ops *ops = b->ops;
  if (!mm_bench_plan(b, batch, err)) return false;
  if (!o) return mm_forward_step(&b->forward, batch, b->logits, err);
  if (!ops->begin(b->forward.backend, batch, err)) return false;
  run_rows(b);
  for (b->turn = 0; b->turn < MM_BENCH_ROUNDS * b->model.layers; b->turn++) {
    const uint32_t l = b->turn % b->model.layers;
    if (ops->weights.layer) ops->weights.layer(b->forward.backend, l);
    if (o->in(b, l)) o->run(b, l);
  }
  return samples(b) ? ops->sampler.sample(b->forward.backend, err) : ops->end(b->forward.backend, b->logits, err);
}

/* The keys and values of a prefill chunk in all layers, without the rest of them. */
static bool feed_caches(mm_bench *b, const mm_batch *batch, mm_err *err) {
  const mm_ops *ops = b->ops;
  mm_backend *const at = b->forward.backend;
  const mm_forward *f = &b->forward;
  if (!mm_bench_plan(b, batch, err) || !ops->begin(at, batch, err)) return false;
  run_rows(b);
  mm_draft_context(&f->draft, f);
  for (uint32_t l = 0; l < b->model.layers; l++) {
    const mm_layer_weights *w = &b->weights.layer[l];
    const mm_act qkv = {f->qkv.data, w->qkv.n};
    if (ops->weights.layer) ops->weights.layer(at, l);
    ops->linear(at, qkv, f->n, &w->qkv);
    if (b->model.attn[l] == MM_ATTN_SPARSE) {
      mm_linear_two(ops, at, f->index_q, &w->index_q, f->index_k, &w->index_k, f->n);
      ops->select(at, l, f->index_q, f->index_k, &w->index_q_norm, &w->index_k_norm);
    }
    ops->gqa(at, l, f->o, qkv, b->model.qk_norm ? &w->q_norm : NULL, b->model.qk_norm ? &w->k_norm : NULL);
  }
  return ops->end(at, b->logits, err);
}

/* Long contexts in chunks, each computed as the first tokens of a sequence and written to the pages of its own positions: a chunk that
 * attended to all tokens before it would take longer and longer. The caches then hold random keys and values in either case. */
static bool fill_pages(mm_bench *b, uint32_t rows, mm_err *err) {
  const uint32_t per_slot = (uint32_t)mm_ceil_div(b->limits.max_positions, MM_PAGE);
  const uint32_t piece = b->ops->own_memory ? CHUNK : MM_PAGE; /* a GPU fills itself with the rows, a CPU counts their pairs */
  const mm_paging paging = {.table = b->table, .per_slot = per_slot};
  for (uint32_t s = 0; s < rows; s++) {
    for (uint32_t pos = 0, n; pos < b->c->context; pos += n) {
      n = (uint32_t)mm_min(piece, b->c->context - pos);
      for (uint32_t i = 0; i < mm_ceil_div(n, MM_PAGE); i++) b->table[s * per_slot + i] = s * per_slot + pos / MM_PAGE + i;
      b->span[0] = (mm_span){(int32_t)s, 0, n, 0};
      for (uint32_t i = 0; i < n; i++) b->id[i] = (int32_t)(mm_draw(first_of(b) + s, pos + i + UINT64_C(1)) * b->model.vocab);
      const mm_batch batch = {.tokens = n, .id = b->id, .span_count = 1, .span = b->span, .paging = &paging};
      if (n > 1 && !feed_caches(b, &batch, err)) return false; /* a single token's step is recorded as a decode step */
    }
  }
  return true;
}

/* Short contexts of several sequences a step. */
bool mm_bench_fill(mm_bench *b, uint32_t rows, mm_err *err) {
  const uint32_t context = b->c->context, together = (uint32_t)mm_max(CHUNK / context, 1);
  if (b->table) return fill_pages(b, rows, err);
  for (uint32_t s = 0, some; s < rows; s += some) {
    some = (uint32_t)mm_min(together, rows - s);
    for (uint32_t pos = 0, n; pos < context; pos += n)
      if (!feed(b, s, some, pos, n = (uint32_t)mm_min(CHUNK, context - pos), 0, err)) return false;
  }
  return true;
}

/* Experts that 1 to 8 consecutive tokens of text choose together, of 256, as was seen in M2.5 (a public measurement; 4 to 7 interpolated).
 * As many independent tokens choose 8 to 57. */
static const double alike[] = {0, 8, 13.4, 18.0, 21.9, 25.2, 28.4, 31.7, 35.0};

/* The next step's tokens, another one for each sequence: random weights would soon choose the same token for all. */
static void draw_ids(mm_bench *b, uint32_t rows) {
  for (uint32_t s = 0; s < rows; s++) {
    const uint32_t row = b->draft ? s % b->each : 0;
    b->id[s] = (int32_t)(mm_draw(first_of(b) + s, ++b->drawn) * b->model.vocab);
    if (row && mm_draw(s, ++b->drawn) >= b->fresh) b->id[s] = b->id[s - 1 - (uint32_t)(mm_draw(s, ++b->drawn) * row)];
  }
}

/* b->reached, over COUNTED more such steps and the layers that choose in them: of the experts that this rank holds. */
static bool count_experts(mm_bench *b, const mm_bench_op *o, const mm_batch *batch, mm_err *err) {
  const size_t experts = b->model.experts, n = b->model.layers * experts, first = b->weights.expert_first;
  uint64_t *load = mm_calloc(2 * n, sizeof *load, err), chosen = 0, layers = 0;
  double at;
  bool ok = load && b->forward.ops->expert_load(b->forward.backend, load, err);
  for (size_t i = 0; ok && i < COUNTED; i++) {
    const uint64_t *before = load + i % 2 * n, *after = load + (i + 1) % 2 * n;
    draw_ids(b, batch->tokens);
    ok = queue_step(b, o, batch, err) && collect(b, !o, &at, err) &&
         b->forward.ops->expert_load(b->forward.backend, load + (i + 1) % 2 * n, err);
    for (size_t l = 0; ok && l < b->model.layers; l++) {
      const size_t own_first = l * experts + first, held = b->weights.layer[l].w13.lead;
      uint64_t some = 0, own = 0;
      for (size_t e = l * experts; e < (l + 1) * experts; e++)
        if (after[e] > before[e]) some++, own += e - own_first < held;
      chosen += own, layers += some > 0;
    }
  }
  free(load);
  b->reached = layers ? (double)chosen / (double)layers : 0;
  return ok;
}

bool mm_bench_decode(mm_bench *b, const mm_bench_op *o, uint32_t rows, double *step_s, mm_err *err) {
  const uint32_t each = b->each, sequences = rows / each;
  for (uint32_t s = 0; s < sequences; s++) b->span[s] = (mm_span){(int32_t)s, s * each, each, b->c->context};
  draw_ids(b, rows);
  const mm_batch batch = {rows, b->id, sequences, b->span, rows, b->out, samples(b) ? b->sampling : NULL, NULL};
  if (!queue_step(b, o, &batch, err)) return false;
  const double start = mm_now();
  double before = start, at = start;
  bool warm = false, ok = true;
  for (uint32_t counted = 0; counted < b->steps;) {
    draw_ids(b, rows);
    if (!queue_step(b, o, &batch, err) || !collect(b, !o, &at, err)) return false; /* collects the step before the one just queued */
    if (warm) b->time[counted++] = at - before;
    before = at;
    if (!warm) warm = agree(b, before - start > (b->ops->own_memory ? WARMUP : 0), &ok);
    if (!ok) return false;
  }
  *step_s = mm_bench_median(b->time, b->steps);
  return collect(b, !o, &at, err) && count_experts(b, o, &batch, err);
}

/* b->fresh, by halving: the batch has the rows of one sequence. */
static bool find_fresh(mm_bench *b, const mm_batch *batch, mm_err *err) {
  double low = 0, high = 1;
  for (int i = 0; i < 6 && b->model.experts > b->model.top_k; i++) {
    b->fresh = (low + high) / 2;
    if (!count_experts(b, NULL, batch, err)) return false;
    if (b->reached < alike[b->each] / 8 * b->model.top_k)
      low = b->fresh;
    else
      high = b->fresh;
  }
  return true;
}

static void place_spans(mm_bench *b, uint32_t sequences, uint32_t each, uint32_t pos) {
  for (uint32_t s = 0; s < sequences; s++) b->span[s] = (mm_span){(int32_t)s, s * each, each, pos};
}

/* The pass of a DFlash draft for all sequences. */
static bool block(mm_bench *b, uint32_t sequences, mm_err *err) {
  const uint32_t rows = sequences * b->each;
  for (uint32_t i = 0; i < rows; i++)
    if (i % b->each) b->id[i] = (int32_t)b->draft->c.mask_id;
  const mm_batch batch = {rows, b->id, sequences, b->span, rows - sequences, b->proposed, NULL, NULL};
  return mm_draft_block(&b->forward.draft, &b->forward, &batch, b->ops->draft.best ? NULL : b->logits, b->id, err);
}

/* The passes of an EAGLE-3 draft. */
static bool chain(mm_bench *b, uint32_t sequences, mm_err *err) {
  mm_draft_step step = {.best = b->ops->draft.best, .passes = b->each - 1};
  const mm_batch batch = {sequences, b->id, sequences, b->span, sequences, b->out, NULL, NULL};
  bool ok = true;
  for (; ok && step.pass < step.passes; step.pass++) {
    place_spans(b, sequences, 1, b->c->context + step.pass);
    for (uint32_t s = 0; step.best && step.pass && s < sequences; s++) b->id[s] = MM_ID_SAMPLED;
    ok = mm_draft_chain(&b->forward.draft, &b->forward, &batch, step, b->logits, b->id, err);
  }
  place_spans(b, sequences, b->each, b->c->context);
  return ok;
}

bool mm_bench_drafts(mm_bench *b, uint32_t sequences, double step_s[2], mm_err *err) {
  const uint32_t each = b->each, rows = sequences * each;
  const double start = mm_now();
  double at;
  bool warm = false, ok = true;
  place_spans(b, sequences, each, b->c->context);
  for (uint32_t i = 0, n = 0; i < rows; i++)
    if (i % each) b->proposed[n++] = i;
  const mm_batch batch = {rows, b->id, sequences, b->span, rows, b->out, samples(b) ? b->sampling : NULL, NULL};
  const mm_batch one = {each, b->id, 1, b->span, each, b->out, batch.sampling, NULL};
  if (!find_fresh(b, &one, err)) return false;
  for (uint32_t counted = 0, steps = 0; counted < b->steps;) {
    draw_ids(b, rows);
    const double from = mm_now();
    if (!(b->kind == MM_DRAFT_EAGLE3 ? chain : block)(b, sequences, err)) return false;
    const double drafted = mm_now();
    draw_ids(b, rows);
    if (!queue_step(b, NULL, &batch, err) || !collect(b, true, &at, err)) return false;
    if (warm) b->time[counted] = at - from, b->time[b->steps + counted++] = drafted - from;
    if (!warm) warm = agree(b, ++steps > 2 && (!b->ops->own_memory || from - start > WARMUP), &ok); /* the first are recorded */
    if (!ok) return false;
  }
  for (size_t i = 0; i < 2; i++) step_s[i] = mm_bench_median(b->time + i * b->steps, b->steps);
  return count_experts(b, NULL, &batch, err);
}

bool mm_bench_prefill(mm_bench *b, double *step_s, mm_err *err) {
  for (int i = -1; i < REPEATS; i++) {
    const double from = mm_now();
    if (!feed(b, 0, 1, 0, b->c->tokens, 1, err)) return false;
    if (i >= 0) b->time[i] = mm_now() - from;
  }
  *step_s = mm_bench_median(b->time, REPEATS);
  if (!isfinite(b->logits[0])) return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(NULL, NULL), "no logit is a number");
  return true;
}

/* The first spans of the rows that are there already: one step, whose choices are waited for. */
static bool step_alone(mm_bench *b, const mm_span *span, uint32_t spans, const uint32_t *out, double *step_s, mm_err *err) {
  uint32_t rows = 0;
  double at;
  for (uint32_t i = 0; i < spans; i++) rows += span[i].count;
  const double from = mm_now();
  const mm_batch batch = {rows, b->id, spans, span, spans, out, samples(b) ? b->sampling : NULL, NULL};
  if (!mm_forward_step(&b->forward, &batch, b->logits, err) || !collect(b, true, &at, err)) return false;
  *step_s = at - from;
  return true;
}

bool mm_bench_mixed(mm_bench *b, uint32_t rows, double step_s[3], mm_err *err) {
  const mm_bench_case *c = b->c;
  const uint32_t last = c->tokens - 1;
  double time[3][REPEATS];
  const mm_span alone = {(int32_t)rows, 0, c->tokens, 0};
  for (uint32_t s = 0; s <= rows; s++) b->span[s] = (mm_span){(int32_t)s, s, s < rows ? 1 : c->tokens, s < rows ? c->context : 0};
  b->out[rows] = rows + last;
  for (int i = -4; i < REPEATS; i++) { /* the first are recorded, and clocks rise */
    const int at = i < 0 ? 0 : i;
    draw_ids(b, rows + c->tokens);
    if (!step_alone(b, b->span, rows, b->out, &time[0][at], err) || !step_alone(b, &alone, 1, &last, &time[1][at], err) ||
        !step_alone(b, b->span, rows + 1, b->out, &time[2][at], err))
      return false;
  }
  for (int i = 0; i < 3; i++) step_s[i] = mm_bench_median(time[i], REPEATS);
  return true;
}

static uint32_t most_rows(const mm_bench_case *c) {
  uint32_t most = 1;
  for (int i = 0; i < 8 && c->batch[i]; i++) most = (uint32_t)mm_max(most, c->batch[i]);
  return most;
}

/* The CPU backend reads weights where they are; others make them. Weights stay until the case ends, whatever is opened and closed. */
static bool make_weights(mm_bench *b, const mm_bench_shape *shape, mm_err *err) {
  if (b->weights.layer) return true;
  return mm_bench_weights(shape, &b->model, &b->weights, err) && (b->ops->own_memory || mm_random_fill(&b->weights, err));
}

/* Rows of a decode step: of one sequence one, or as many as a draft makes of it. */
static uint32_t rows_of(const mm_bench *b) { return b->limits.slots * (b->draft ? b->draft->c.block : 1); }

static bool open_buffers(mm_bench *b, mm_err *err) {
  const mm_bench_case *c = b->c;
  const uint32_t slots = b->limits.slots, rows = rows_of(b);
  const size_t pages = (size_t)slots * mm_ceil_div(b->limits.max_positions, MM_PAGE);
  bool states = false;
  for (uint32_t l = 0; l < b->model.layers; l++) states |= b->model.attn[l] == MM_ATTN_LIGHTNING;
  if (c->context > LONG && !states && !(b->table = mm_calloc(pages, sizeof *b->table, err))) return false;
  b->id = mm_calloc(b->limits.max_tokens, sizeof *b->id, err);
  b->span = mm_calloc(slots, sizeof *b->span, err);
  b->out = mm_calloc(rows, sizeof *b->out, err);
  b->proposed = mm_calloc(rows, sizeof *b->proposed, err);
  b->sampling = mm_calloc(rows, sizeof *b->sampling, err);
  b->logits = mm_calloc((samples(b) ? 1 : (size_t)rows) * b->model.vocab, sizeof *b->logits, err);
  b->time = mm_calloc(2 * mm_max(b->steps, REPEATS), sizeof *b->time, err);
  for (uint32_t i = 0; b->out && b->sampling && i < rows; i++) b->out[i] = i, b->sampling[i].top_p = 1;
  return b->id && b->span && b->out && b->proposed && b->sampling && b->logits && b->time;
}

bool mm_bench_open(mm_bench *b, mm_err *err) {
  const mm_bench_case *c = b->c;
  const bool with_prefill = strcmp(c->subject, "mixed") == 0;
  const uint32_t slots = (uint32_t)mm_ceil_div(most_rows(c), mm_bench_groups_of(b)) + with_prefill,
                 chunk = (uint32_t)mm_min(CHUNK, (uint64_t)c->context * slots);
  b->limits = (mm_limits){.slots = slots,
                          .max_positions = (uint32_t)mm_max(c->context + mm_max(b->draft ? MM_DFLASH_BLOCK : 1, c->verify), c->tokens)};
  b->limits.max_tokens = (uint32_t)mm_max(mm_max(rows_of(b), chunk), c->tokens + (with_prefill ? slots : 0));
  b->limits.max_tokens *= mm_bench_groups_of(b); /* experts run the rows of all groups */
  const mm_bench_shape shape = {c->model, c->layers, c->vocab, c->quant, c->experts, c->head,
                                b->rank,  b->ranks,  b->ep,    c->dense, c->shrink,  b->attn_tp};
  b->model = mm_bench_model(&shape);
  const mm_backend_config config = {
      .model = &b->model,
      .weights = &b->weights,
      .limits = b->limits,
      .comm = b->comm,
      .group = mm_comm_part(b->comm, b->rank / b->attn_tp),
      .place = {b->rank, b->rank, b->ranks, b->rank, false},
      .draft = b->draft,
      .tap = b->draft ? b->draft->c.tap : NULL,
      .taps = b->draft ? b->draft->c.taps : 0,
      .options = {
          .threads = b->threads, .kv_fp8 = b->kv_fp8, .index_fp8 = b->index_fp8, .index_split = b->index_split, .act_quant = b->act_quant}};
  return mm_ops_keep_index(b->ops, &b->model, &config.options, err) && open_buffers(b, err) && make_weights(b, &shape, err) &&
         mm_forward_open(&b->forward, b->ops, &config, err);
}

void mm_bench_close(mm_bench *b) {
  mm_forward_close(&b->forward);
  mm_bench_close_groups(b);
  MM_FREE(b->id, b->span, b->out, b->proposed, b->table, b->sampling, b->logits, b->time);
  b->id = NULL, b->span = NULL, b->out = b->proposed = NULL, b->table = NULL, b->sampling = NULL, b->logits = NULL, b->time = NULL;
}

/* ---- the copy rate of a machine ---- */

enum { COPY_BYTES = 256 << 20, COPY_PIECES = 64, COPIES = 3 };
typedef struct copying {
  char *from, *to;
} copying;

static bool copy_piece(void *ctx, size_t item, unsigned worker, mm_err *err) {
  const copying *c = ctx;
  const size_t each = COPY_BYTES / COPY_PIECES;
  (void)worker, (void)err;
  memcpy(c->to + item * each, c->from + item * each, each);
  return true;
}

bool mm_bench_copy_rate(const mm_ops *ops, unsigned threads, double *rate, mm_err *err) {
  if (ops->copy_rate) return ops->copy_rate(rate, err);
  double time[COPIES];
  copying c = {.from = mm_calloc(COPY_BYTES, 1, err)};
  c.to = c.from ? mm_calloc(COPY_BYTES, 1, err) : NULL;
  bool ok = c.to;
  if (ok) memset(c.from, 1, COPY_BYTES);
  for (int i = -1; ok && i < COPIES; i++) {
    const double from = mm_now();
    ok = mm_pool_run(threads, COPY_PIECES, copy_piece, &c, err);
    if (i >= 0) time[i] = mm_now() - from;
  }
  if (ok) *rate = 2.0 * (double)COPY_BYTES / mm_bench_median(time, COPIES);
  MM_FREE(c.from, c.to);
  return ok;
}
