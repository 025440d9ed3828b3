/* minimax-bench: how fast layers of real size run on a GPU, compared with the limit by the device's own copy rate. Random weights of the
 * released shapes are made on the device: no checkpoint is read. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/option.h"
#include "runtime/bench/bench_cases.h"
#include "runtime/bench/bench_dispatch.h"
#include "runtime/bench/bench_result.h"
#include "runtime/bench/bench_shapes.h"
#include "runtime/bench/load_test.h"
#include "runtime/engine/engine.h"

#define CHUNK   1024 /* tokens of a context per step */
#define WARMUP  0.25 /* seconds of steps before those that count: clocks rise from idle meanwhile */
#define REPEATS 5    /* prefill steps that count, after one that does not */
#define ROUNDS  4    /* over the layers, in a step of one op */
#define RANKS   8    /* at most */
#define COUNTED 8    /* decode steps whose experts are counted */

#define SUBJECTS "kernels|layers|decode|prefill|mixed|choices"
#define SCHEMES  "bf16|block_fp8|channel_fp8|tensor_wise_fp8|w4a16|w4afp8|w4a8|nvfp4|nvfp4a16|mxfp4|mxfp8"

/* Rates that bound arithmetic, operations a second: constants, what an H200 reached in large products. Each prefill's line prints them. */
#define FP8_RATE       1.5e15
#define BF16_RATE      7.5e14
#define ATTENTION_RATE 6.5e14

typedef struct bench {
  const mm_bench_case *c;
  const mm_ops *ops;
  uint32_t rank, ranks; /* a thread and a GPU each; the first prints */
  uint32_t ep;          /* experts are whole on so many groups of them */
  mm_comm *comm;
  uint32_t steps;
  bool kv_fp8, act_quant;
  mm_model model;
  mm_rank_weights weights;
  mm_forward forward;
  int32_t *id;           /* [max_tokens] */
  mm_span *span;         /* [slots] */
  uint32_t *out;         /* [slots] 0, 1, … */
  mm_sampling *sampling; /* [slots] greedy */
  float *logits;         /* [vocab] */
  double *time;          /* [steps] */
  double copy_rate;      /* bytes read plus written a second */
  uint64_t drawn;        /* tokens so far */
  double reached;        /* experts of a layer that a decode step's rows chose, on average */
  bool json;             /* a line of JSON for each result */
} bench;

/* ---- Floors ---- */

/* All floors are one rank's. A lightning layer's states in and out, another's keys and values. */
static double layer_cache_bytes(const bench *b, uint32_t l, uint32_t rows, double context) {
  const mm_model *m = &b->model;
  if (m->attn[l] == MM_ATTN_LIGHTNING) return 8.0 * rows * m->heads / b->ranks * m->head_dim * m->head_dim;
  return 2.0 * rows * context * m->kv_heads / b->ranks * (b->kv_fp8 ? m->head_dim + 4 : 2 * m->head_dim);
}

/* Bytes that a decode step must move: weights once, states in and out, caches. */
static double decode_bytes(const bench *b, uint32_t rows, double context) {
  const mm_model *m = &b->model;
  double sum = mm_bench_bytes(&b->weights.head);
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_layer_weights *y = &b->weights.layer[l];
    sum += mm_bench_bytes(&y->qkv) + mm_bench_bytes(&y->out) + mm_bench_bytes(&y->output_gate) + mm_bench_bytes(&y->router);
    sum += b->reached * (mm_bench_bytes(&y->w13) + mm_bench_bytes(&y->w2));
    sum += layer_cache_bytes(b, l, rows, context);
  }
  return sum;
}

/* Seconds of a prefill of T tokens from an empty cache: of each part the longer of its bytes and its operations. */
static double prefill_floor(const bench *b, double tokens) {
  const mm_model *m = &b->model;
  const double q = (double)m->heads * m->head_dim / b->ranks;
  double sum = 0;
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_layer_weights *y = &b->weights.layer[l];
    const double rate = y->qkv.scheme->code == MM_CODE_E4M3 ? FP8_RATE : BF16_RATE;
    const double expert_rate = y->w13.scheme->code == MM_CODE_E4M3 ? FP8_RATE : BF16_RATE;
    const double dense = mm_bench_parameters(&y->qkv) + mm_bench_parameters(&y->out) + mm_bench_parameters(&y->output_gate);
    sum += 2 * tokens * dense / rate;
    sum += fmax(2 * tokens * m->top_k / b->ep * (mm_bench_parameters(&y->w13) + mm_bench_parameters(&y->w2)) / expert_rate,
                y->w13.lead * (mm_bench_bytes(&y->w13) + mm_bench_bytes(&y->w2)) / b->copy_rate);
    sum += m->attn[l] == MM_ATTN_LIGHTNING ? 8 * tokens * q / b->copy_rate : 2 * q * tokens * tokens / ATTENTION_RATE;
  }
  return sum;
}

/* ---- Steps ---- */

/* The next `count` tokens of `slots` sequences; of a single one's last token the logits, if `outs` is 1. */
static bool feed(bench *b, uint32_t slot, uint32_t slots, uint32_t pos, uint32_t count, uint32_t outs, mm_err *err) {
  const uint32_t last = count - 1;
  for (uint32_t s = 0; s < slots; s++) {
    b->span[s] = (mm_span){(int32_t)(slot + s), s * count, count, pos};
    for (uint32_t i = 0; i < count; i++) b->id[s * count + i] = (int32_t)(mm_draw(slot + s, pos + i + UINT64_C(1)) * b->model.vocab);
  }
  const mm_batch batch = {.tokens = slots * count, .id = b->id, .span_count = slots, .span = b->span, .out_count = outs, .out = &last};
  return mm_forward_step(&b->forward, &batch, b->logits, err);
}

/* Gives the first rank's answer on all ranks. *ok is false if another rank failed; that rank reports the error. */
static bool agree(const bench *b, bool mine, bool *ok) {
  const void *all[RANKS];
  if (b->ranks == 1) return mine;
  *ok = mm_comm_gather(b->comm, b->rank, mine ? b : NULL, all);
  return *ok && all[0];
}

static bool collect(bench *b, double *at, mm_err *err) {
  if (!b->forward.ops->sampler.collect(b->forward.backend, b->id, err)) return false;
  *at = mm_now();
  if (b->id[0] >= 0) return true;
  return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(NULL, NULL), "no logit is a number");
}

/* ---- Decode steps, whole and of one op ---- */

typedef struct op {
  const char *name;
  bool (*in)(const bench *b, uint32_t layer); /* whether the layer has it */
  void (*run)(bench *b, uint32_t layer);
  double (*bytes)(const bench *b, uint32_t layer, uint32_t rows); /* that it must move */
  uint32_t times;                                                 /* that a layer's step has it; 0: a part of another op, or no layer's */
} op;

/* Rows of their own for each token: what the first layer is given. */
static void run_rows(bench *b) {
  const mm_forward *f = &b->forward;
  f->ops->embed(f->backend, f->h, &b->weights.embed);
  f->ops->norm(f->backend, f->n, f->h, &b->weights.layer[0].input_norm, b->model.norm_eps);
}

/* Queues a step: the forward pass, or the rows and ROUNDS times the op in all layers that have it. */
static bool queue_step(bench *b, const op *o, const mm_batch *batch, mm_err *err) {
  const mm_ops *ops = b->forward.ops;
  if (!o) return mm_forward_step(&b->forward, batch, NULL, err);
  if (!ops->begin(b->forward.backend, batch, err)) return false;
  run_rows(b);
  for (uint32_t l = 0; l < ROUNDS * b->model.layers; l++)
    if (o->in(b, l % b->model.layers)) o->run(b, l % b->model.layers);
  return ops->sampler.choose(b->forward.backend, err);
}

/* Short contexts of several sequences a step. */
static bool fill_contexts(bench *b, uint32_t rows, mm_err *err) {
  const uint32_t context = b->c->context, together = (uint32_t)mm_max(CHUNK / context, 1);
  for (uint32_t s = 0, some; s < rows; s += some) {
    some = (uint32_t)mm_min(together, rows - s);
    for (uint32_t pos = 0, n; pos < context; pos += n)
      if (!feed(b, s, some, pos, n = (uint32_t)mm_min(CHUNK, context - pos), 0, err)) return false;
  }
  return true;
}

/* The next step's tokens, another one for each sequence: random weights would soon choose the same token for all. */
static void draw_ids(bench *b, uint32_t rows) {
  for (uint32_t s = 0; s < rows; s++) b->id[s] = (int32_t)(mm_draw(s, ++b->drawn) * b->model.vocab);
}

/* b->reached, over COUNTED more such steps and the layers that choose in them: of the experts that this rank holds. */
static bool count_experts(bench *b, const op *o, const mm_batch *batch, mm_err *err) {
  const size_t experts = b->model.experts, n = b->model.layers * experts, first = b->weights.expert_first;
  uint64_t *load = mm_calloc(2 * n, sizeof *load, err), chosen = 0, layers = 0;
  double at;
  bool ok = load && b->forward.ops->expert_load(b->forward.backend, load, err);
  for (size_t i = 0; ok && i < COUNTED; i++) {
    const uint64_t *before = load + i % 2 * n, *after = load + (i + 1) % 2 * n;
    draw_ids(b, batch->tokens);
    ok = queue_step(b, o, batch, err) && collect(b, &at, err) &&
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

/* Greedy steps of `rows` sequences, each queued before the one before it is collected, all at the position behind the context; *step_s: the
 * median time from one to the next. */
static bool decode(bench *b, const op *o, uint32_t rows, double *step_s, mm_err *err) {
  for (uint32_t s = 0; s < rows; s++) b->span[s] = (mm_span){(int32_t)s, s, 1, b->c->context};
  draw_ids(b, rows);
  const mm_batch batch = {rows, b->id, rows, b->span, rows, b->out, b->sampling, NULL};
  if (!queue_step(b, o, &batch, err)) return false;
  const double start = mm_now();
  double before = start, at = start;
  bool warm = false, ok = true;
  for (uint32_t counted = 0; counted < b->steps;) {
    draw_ids(b, rows);
    if (!queue_step(b, o, &batch, err) || !collect(b, &at, err)) return false; /* collects the step before the one just queued */
    if (warm) b->time[counted++] = at - before;
    before = at;
    if (!warm) warm = agree(b, before - start > WARMUP, &ok);
    if (!ok) return false;
  }
  *step_s = mm_bench_median(b->time, b->steps);
  return collect(b, &at, err) && count_experts(b, o, &batch, err);
}

static bool prefill(bench *b, double *step_s, mm_err *err) {
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
static bool step_alone(bench *b, const mm_span *span, uint32_t spans, const uint32_t *out, double *step_s, mm_err *err) {
  uint32_t rows = 0;
  double at;
  for (uint32_t i = 0; i < spans; i++) rows += span[i].count;
  const double from = mm_now();
  const mm_batch batch = {rows, b->id, spans, span, spans, out, b->sampling, NULL};
  if (!mm_forward_step(&b->forward, &batch, NULL, err) || !collect(b, &at, err)) return false;
  *step_s = at - from;
  return true;
}

/* Single tokens of `rows` sequences and the first `tokens` tokens of another one: as two steps and as one. step_s[3]: the single tokens,
 * the prefill chunk, both. */
static bool mixed(bench *b, uint32_t rows, double step_s[3], mm_err *err) {
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

/* ---- Ops ---- */

static bool in_all(const bench *b, uint32_t l) {
  (void)b, (void)l;
  return true;
}
static bool in_none(const bench *b, uint32_t l) {
  (void)b, (void)l;
  return false;
}
static bool in_last(const bench *b, uint32_t l) { return l + 1 == b->model.layers; }
static bool in_lightning(const bench *b, uint32_t l) { return b->model.attn[l] == MM_ATTN_LIGHTNING; }
static bool in_full(const bench *b, uint32_t l) { return b->model.attn[l] == MM_ATTN_FULL; }
static bool in_normed(const bench *b, uint32_t l) { return b->model.qk_norm && in_full(b, l); }
static bool in_cut(const bench *b, uint32_t l) { return (void)l, b->ranks > 1; }

static mm_act qkv_of(const bench *b, uint32_t l) { return (mm_act){b->forward.qkv.data, b->weights.layer[l].qkv.n}; }
static void run_qkv(bench *b, uint32_t l) {
  b->forward.ops->linear(b->forward.backend, qkv_of(b, l), b->forward.n, &b->weights.layer[l].qkv);
}
static void run_out(bench *b, uint32_t l) {
  b->forward.ops->linear(b->forward.backend, b->forward.branch, b->forward.o, &b->weights.layer[l].out);
}
static void run_gate(bench *b, uint32_t l) {
  b->forward.ops->linear(b->forward.backend, b->forward.gate, b->forward.n, &b->weights.layer[l].output_gate);
}
static void run_gqa(bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  const bool norms = b->model.qk_norm;
  b->forward.ops->gqa(b->forward.backend, l, b->forward.o, qkv_of(b, l), norms ? &w->q_norm : NULL, norms ? &w->k_norm : NULL);
}
static void run_plain_gqa(bench *b, uint32_t l) { b->forward.ops->gqa(b->forward.backend, l, b->forward.o, qkv_of(b, l), NULL, NULL); }
static void run_lightning(bench *b, uint32_t l) { b->forward.ops->lightning(b->forward.backend, l, b->forward.o, qkv_of(b, l)); }
static void run_gated_norm(bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  f->ops->gated_norm(f->backend, f->o, f->o, f->gate, &b->weights.layer[l].attn_norm, b->model.lightning_norm_eps);
}
static void run_combine(bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  f->ops->combine(f->backend, f->h, f->n, f->spare, f->branch, b->model.deepnorm_mlp, &b->weights.layer[l].post_norm, b->model.norm_eps);
}
static void run_norm(bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  f->ops->norm(f->backend, f->n, f->h, &b->weights.layer[l].post_norm, b->model.norm_eps);
}
static void run_embed(bench *b, uint32_t l) {
  (void)l;
  b->forward.ops->embed(b->forward.backend, b->forward.h, &b->weights.embed);
}
static void run_route(bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  b->forward.ops->route(b->forward.backend, l, b->forward.n, &w->router, w->router_bias.scheme ? &w->router_bias : NULL);
}
static void run_experts(bench *b, uint32_t l) {
  if (l == 0) run_route(b, l);
  b->forward.ops->experts(b->forward.backend, b->forward.branch, b->forward.n, &b->weights.layer[l].w13, &b->weights.layer[l].w2);
}

static void run_head(bench *b, uint32_t l) {
  (void)l;
  b->forward.ops->logits(b->forward.backend, b->forward.n, &b->weights.head);
}

static double qkv_bytes(const bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].qkv); }
static double out_bytes(const bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].out); }
static double gate_bytes(const bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].output_gate); }
static double route_bytes(const bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].router); }
static double cache_bytes(const bench *b, uint32_t l, uint32_t rows) { return layer_cache_bytes(b, l, rows, b->c->context); }
static double experts_bytes(const bench *b, uint32_t l, uint32_t rows) {
  const mm_layer_weights *w = &b->weights.layer[l];
  return (void)rows, b->reached * (mm_bench_bytes(&w->w13) + mm_bench_bytes(&w->w2));
}
static double head_bytes(const bench *b, uint32_t l, uint32_t rows) { return (void)l, (void)rows, mm_bench_bytes(&b->weights.head); }
static double no_bytes(const bench *b, uint32_t l, uint32_t rows) { return (void)b, (void)l, (void)rows, 0; }

static const op timed_ops[] = {
    {"qkv projection, lightning", in_lightning, run_qkv, qkv_bytes, 1},
    {"qkv projection, full", in_full, run_qkv, qkv_bytes, 1},
    {"norm, RoPE, cache write, attention", in_full, run_gqa, cache_bytes, 1},
    {"the same without QK norm", in_normed, run_plain_gqa, cache_bytes, 0},
    {"lightning attention", in_lightning, run_lightning, cache_bytes, 1},
    {"output gate", in_lightning, run_gate, gate_bytes, 1},
    {"gated norm", in_lightning, run_gated_norm, no_bytes, 1},
    {"output projection", in_all, run_out, out_bytes, 1},
    {"residual and norm, with the sum over ranks", in_all, run_combine, no_bytes, 2},
    {"norm alone", in_all, run_norm, no_bytes, 0},
    {"embedding and its sum over ranks", in_cut, run_embed, no_bytes, 0},
    {"router", in_all, run_route, route_bytes, 1},
    {"experts, and a router for all layers", in_all, run_experts, experts_bytes, 1},
    {"head", in_last, run_head, head_bytes, 0},
};

static bool open_case(bench *b, mm_err *err);
static void close_case(bench *b);

/* The median step of one op; the backend is opened anew, since it records one step for each number of rows. */
static bool time_op(bench *b, const op *o, uint32_t rows, double *step_s, mm_err *err) {
  close_case(b);
  return open_case(b, err) && fill_contexts(b, rows, err) && decode(b, o, rows, step_s, err);
}

/* Fields common to the results of a case. */
static mm_bench_result result_of(const bench *b, uint32_t rows) {
  return (mm_bench_result){
      .c = b->c, .layers = b->c->layers, .batch = rows, .ranks = b->ranks, .ep = b->ep, .kv_fp8 = b->kv_fp8, .copy_rate = b->copy_rate};
}

static void print_op(const bench *b, uint32_t rows, const char *name, double seconds, double bytes) {
  mm_bench_result r = result_of(b, rows);
  r.layers = 1, r.seconds = seconds, r.bytes = bytes, r.reached = b->reached;
  if (b->rank == 0) mm_bench_print_op(&r, name, b->json);
}

/* Every op of the model's layers for itself: what it adds to a step that embeds rows and chooses tokens. Then a layer in its step, and how
 * much that is more than its ops, each after others of its kind, take together: gaps, less what overlaps. Ranks wait for each other where
 * they choose, so one rank's steps are as long as the slowest one's. */
static bool measure_ops(bench *b, uint32_t rows, mm_err *err) {
  static const op nothing = {"", in_none, NULL, no_bytes, 0};
  double empty, step, head = 0, all = 0;
  if (!time_op(b, &nothing, rows, &empty, err)) return false;
  for (size_t i = 0; i < sizeof timed_ops / sizeof *timed_ops; i++) {
    const op *o = &timed_ops[i];
    double bytes = 0;
    uint32_t layers = 0;
    for (uint32_t l = 0; l < b->model.layers; l++) layers += o->in(b, l);
    if (layers == 0) continue;
    if (!time_op(b, o, rows, &step, err)) return false;
    for (uint32_t l = 0; l < b->model.layers; l++)
      if (o->in(b, l)) bytes += o->bytes(b, l, rows);
    const double each = (step - empty) / (ROUNDS * layers);
    if (o->run == run_head) head = each;
    all += each * layers * o->times;
    print_op(b, rows, o->name, each, bytes / layers);
  }
  if (!time_op(b, NULL, rows, &step, err)) return false;
  const double layer = (step - empty - head) / b->model.layers;
  print_op(b, rows, "a layer in its step", layer,
           (decode_bytes(b, rows, b->c->context) - mm_bench_bytes(&b->weights.head)) / b->model.layers);
  print_op(b, rows, "of it, more than its ops", layer - all / b->model.layers, 0);
  return true;
}

/* ---- Cases ---- */

static bool measure_layers(bench *b, uint32_t rows, mm_err *err) {
  mm_bench_result r = result_of(b, rows);
  if (!fill_contexts(b, rows, err) || !decode(b, NULL, rows, &r.seconds, err)) return false;
  r.bytes = decode_bytes(b, rows, b->c->context + 1);
  r.floor_s = r.bytes / b->copy_rate;
  r.reached = b->reached;
  if (b->rank == 0) mm_bench_print_decode(&r, b->json);
  return true;
}

static bool measure_prefill(bench *b, mm_err *err) {
  mm_bench_result r = result_of(b, 0);
  if (!prefill(b, &r.seconds, err)) return false;
  r.floor_s = prefill_floor(b, b->c->tokens);
  r.rate[0] = FP8_RATE, r.rate[1] = BF16_RATE, r.rate[2] = ATTENTION_RATE;
  if (b->rank == 0) mm_bench_print_prefill(&r, b->json);
  return true;
}

static bool measure_mixed(bench *b, mm_err *err) {
  const mm_bench_result r = result_of(b, b->c->batch[0]);
  double s[3];
  if (!fill_contexts(b, r.batch, err) || !mixed(b, r.batch, s, err)) return false;
  if (b->rank == 0) mm_bench_print_mixed(&r, s, b->json);
  return true;
}

static bool measure(bench *b, mm_err *err) {
  const mm_bench_case *c = b->c;
  if (strcmp(c->subject, "mixed") == 0) return measure_mixed(b, err);
  const bool kernels = strcmp(c->subject, "kernels") == 0;
  for (int i = 0; i < 8 && c->batch[i]; i++)
    if (!(kernels ? measure_ops : measure_layers)(b, c->batch[i], err)) return false;
  return !c->tokens || measure_prefill(b, err);
}

static uint32_t most_rows(const mm_bench_case *c) {
  uint32_t most = 1;
  for (int i = 0; i < 8 && c->batch[i]; i++) most = (uint32_t)mm_max(most, c->batch[i]);
  return most;
}

static bool open_case(bench *b, mm_err *err) {
  const mm_bench_case *c = b->c;
  const bool with_prefill = strcmp(c->subject, "mixed") == 0;
  const uint32_t slots = most_rows(c) + with_prefill, chunk = (uint32_t)mm_min(CHUNK, (uint64_t)c->context * slots);
  const mm_limits limits = {.max_tokens = (uint32_t)mm_max(mm_max(slots, chunk), c->tokens + (with_prefill ? slots : 0)),
                            .slots = slots,
                            .max_positions = (uint32_t)mm_max(c->context + 1, c->tokens)};
  const mm_bench_shape shape = {c->model, c->layers, c->vocab, c->quant, c->experts, c->head, b->rank, b->ranks, b->ep};
  b->model = mm_bench_model(&shape);
  b->id = mm_calloc(limits.max_tokens, sizeof *b->id, err);
  b->span = mm_calloc(slots, sizeof *b->span, err);
  b->out = mm_calloc(slots, sizeof *b->out, err);
  b->sampling = mm_calloc(slots, sizeof *b->sampling, err);
  b->logits = mm_calloc(b->model.vocab, sizeof *b->logits, err);
  b->time = mm_calloc(mm_max(b->steps, REPEATS), sizeof *b->time, err);
  if (!b->id || !b->span || !b->out || !b->sampling || !b->logits || !b->time) return false;
  for (uint32_t i = 0; i < slots; i++) b->out[i] = i, b->sampling[i].top_p = 1;
  const mm_backend_config config = {.model = &b->model,
                                    .weights = &b->weights,
                                    .limits = limits,
                                    .comm = b->comm,
                                    .place = {b->rank, b->rank, b->ranks, b->rank},
                                    .options.threads = 1,
                                    .options.kv_fp8 = b->kv_fp8,
                                    .options.act_quant = b->act_quant};
  return mm_bench_weights(&shape, &b->model, &b->weights, err) && mm_forward_open(&b->forward, b->ops, &config, err);
}

static void close_case(bench *b) {
  mm_forward_close(&b->forward);
  MM_FREE(b->weights.layer, b->id, b->span, b->out, b->sampling, b->logits, b->time);
  b->forward = (mm_forward){0};
  b->weights.layer = NULL;
  b->id = NULL, b->span = NULL, b->out = NULL, b->sampling = NULL, b->logits = NULL, b->time = NULL;
}

/* ---- Ranks ---- */

typedef struct bench_rank {
  bench b;
  pthread_t thread;
  mm_err err;
  bool done;
} bench_rank;

static void *run_rank(void *arg) {
  bench_rank *r = arg;
  r->done = open_case(&r->b, &r->err) && measure(&r->b, &r->err);
  if (!r->done && r->b.comm) mm_comm_abort(r->b.comm);
  close_case(&r->b);
  return NULL;
}

/* The case on all ranks; the first that says why it failed does so for all. */
static bool run_ranks(const bench *one, mm_err *err) {
  bench_rank all[RANKS] = {0};
  uint32_t started = 0, done = 0;
  mm_comm *comm = mm_comm_open(one->ranks, err);
  if (!comm) return false;
  for (; started < one->ranks; started++) {
    bench_rank *r = &all[started];
    r->b = *one, r->b.rank = started, r->b.comm = comm;
    if (pthread_create(&r->thread, NULL, run_rank, r) != 0) break;
  }
  bool ok =
      started == one->ranks || mm_fail(err, MM_LIMIT, "E_THREADS", mm_at(NULL, NULL), "started %u of %u rank threads", started, one->ranks);
  if (!ok) mm_comm_abort(comm);
  for (uint32_t i = 0; i < started; i++) pthread_join(all[i].thread, NULL), done += all[i].done;
  for (uint32_t i = 0; ok && i < started; i++)
    if (all[i].err.status != MM_OK) ok = mm_fail_as(err, &all[i].err);
  mm_comm_close(comm);
  return ok && (done == started || mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "%u of %u ranks ended early", started - done, started));
}

static bool bench_all(void *args, mm_err *err) {
  const mm_bench_args *a = args;
  const char *subject = a->subject;
  const bool choices = strcmp(subject, "choices") == 0;
  mm_bench_case c;
#ifdef MM_CUDA
  const mm_ops *ops = &mm_ops_cuda;
#else
  const mm_ops *ops = NULL;
#endif
  double copy_rate;
  if (!choices && !mm_bench_is_subject(subject))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found subject \"%s\", expected " SUBJECTS, subject);
  if (!mm_bench_check_ranks(a, err)) return false;
  if (choices) return mm_bench_print_choices(a, err);
  if (!ops) return mm_fail(err, MM_UNSUPPORTED, "E_CUDA", mm_at(NULL, NULL), "a GPU is measured, and this build has no CUDA backend");
  if (!ops->copy_rate(&copy_rate, err)) return false;
  mm_bench_print_copy(copy_rate, a->json);
  for (size_t i = 0; mm_bench_case_at(a, i, &c); i++) {
    bench b = {.c = &c,
               .ops = ops,
               .ranks = (uint32_t)a->tp,
               .ep = (uint32_t)a->ep,
               .steps = (uint32_t)a->steps,
               .kv_fp8 = strcmp(a->kv, "fp8") == 0,
               .act_quant = strcmp(a->act_quant, "on") == 0,
               .copy_rate = copy_rate,
               .json = a->json};
    if (!run_ranks(&b, err)) return false;
  }
  return true;
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "serve") == 0) return mm_load_test_main(argc - 1, argv + 1);
  mm_bench_args a = {.kv = "auto", .act_quant = "on", .steps = 64, .tp = 1, .ep = 1};
  const mm_option options[] = {
      MM_OPTION(STR, "model", &a.model, "NAME", "only this model's shapes", .choices = "m1|m2"),
      MM_OPTION(U64, "layers", &a.layers, "N", "layers of the model (8; all of M2 for decode)", .lo = 1, .hi = MM_MAX_LAYERS),
      MM_OPTION(STR, "quant", &a.quant, "SCHEME", "of the attention's matrices (block_fp8)", .choices = SCHEMES),
      MM_OPTION(STR, "expert-quant", &a.experts, "SCHEME", "of the experts (block_fp8; w4a16 and nvfp4 for decode)", .choices = SCHEMES),
      MM_OPTION(STR, "head", &a.head, "SCHEME", "of the head (bf16)", .choices = "bf16|block_fp8"),
      MM_OPTION(STR, "vocab", &a.vocab, "N", "rows of the head and of the embeddings (200064 for kernels and decode, 2048 elsewhere)",
                .choices = "2048|200064"),
      MM_OPTION(STR, "act-quant", &a.act_quant, "WORD", "round the inputs of linears as their scheme defines, or not (on)",
                .choices = "on|off"),
      MM_OPTION(STR, "kv-cache-dtype", &a.kv, "TYPE", "of cached keys and values (auto: bf16)", .choices = "auto|fp8"),
      MM_OPTION(U64, "tp", &a.tp, "N", "ranks, a GPU each: 1, 2, 4 or 8 (1)", .lo = 1, .hi = RANKS),
      MM_OPTION(U64, "ep", &a.ep, "N", "divides tp: each rank holds 1/N of the experts, cut in tp/N (1)", .lo = 1, .hi = RANKS),
      MM_OPTION(U64, "batch", &a.batch, "N",
                "sequences of a decode step (1, 4, 16, 64 and 256; 1, 16, 64 and 256 for kernels, 1 for decode, 63 for mixed)", .lo = 1,
                .hi = 256),
      MM_OPTION(U64, "context", &a.context, "N", "tokens that each of them holds (1024)", .lo = 1, .hi = 1 << 19),
      MM_OPTION(U64, "tokens", &a.tokens, "N", "of a prefill step (8192), of the prefill chunk (512 for mixed)", .lo = 1, .hi = 1 << 19),
      MM_OPTION(U64, "steps", &a.steps, "N", "decode steps that count (64)", .lo = 5, .hi = 100000),
      MM_FLAG("json", &a.json, "every result as a line of JSON; errors as JSON"),
      MM_FLAG("quiet", &a.quiet, "nothing on stderr but errors, as always here", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-bench", "time layers of real size on a GPU beside its own copy rate", SUBJECTS, 1, 1, options),
      .examples =
          "minimax-bench kernels --model m2\n"
          "minimax-bench decode --expert-quant nvfp4 --batch 16 --context 4096\n"
          "minimax-bench choices --model m2 --quant nvfp4\n"
          "minimax-bench serve http://127.0.0.1:8000 --max-concurrency 16",
      .epilog =
          "Weights are random and made on the device; nothing is read from disk. kernels: each op of a layer, the head, a layer in its "
          "step. layers: "
          "decode\n"
          "steps of eight layers. decode: steps of the whole of M2 with 4-bit experts. prefill: one step of many tokens. mixed: single "
          "tokens\n"
          "with a prefill chunk of one sequence, in one step and in two. Medians. A floor is the least bytes over the copy "
          "rate\n"
          "of the same run; of a prefill, where that is longer, the operations over rates that are constants and stand in its line.\n"
          "choices: which kernels the CUDA backend takes for each product, by the scheme and the tokens of a step, on GPUs that run code "
          "of\n"
          "sm_90a and on others; it asks for no GPU, and takes --quant for the experts too.\n"
          "serve URL: the load test of a server; minimax-bench serve --help.\n"
          "Exit status: 0 done, 2 usage, 4 no CUDA backend, 5 the device failed, 6 no logit was a number, 8 memory.",
  };
  return mm_program_main(&program, argc, argv, &a.subject, bench_all, &a);
}
