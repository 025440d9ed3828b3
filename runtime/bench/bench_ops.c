/* The ops of layers by themselves (bench_steps.h). */

#include "runtime/bench/bench_shapes.h"
#include "runtime/bench/bench_steps.h"

static bool in_all(const mm_bench *b, uint32_t l) {
  (void)b, (void)l;
  return true;
}
static bool in_none(const mm_bench *b, uint32_t l) {
  (void)b, (void)l;
  return false;
}
static bool in_last(const mm_bench *b, uint32_t l) { return l + 1 == b->model.layers; }
static bool in_lightning(const mm_bench *b, uint32_t l) { return b->model.attn[l] == MM_ATTN_LIGHTNING; }
static bool in_full(const mm_bench *b, uint32_t l) { return b->model.attn[l] == MM_ATTN_FULL; }
static bool in_sparse(const mm_bench *b, uint32_t l) { return b->model.attn[l] == MM_ATTN_SPARSE; }
static bool in_normed(const mm_bench *b, uint32_t l) { return b->model.qk_norm && !b->model.qk_norm_per_head && in_full(b, l); }
static bool in_routed(const mm_bench *b, uint32_t l) { return b->model.ffn[l] == MM_FFN_EXPERTS; }
static bool in_dense(const mm_bench *b, uint32_t l) { return !in_routed(b, l); }
static bool in_shared(const mm_bench *b, uint32_t l) { return in_routed(b, l) && b->model.shared_intermediate; }
static bool in_unshared(const mm_bench *b, uint32_t l) { return in_routed(b, l) && !b->model.shared_intermediate; }
static bool in_cut(const mm_bench *b, uint32_t l) { return (void)l, b->ranks > 1; }

/* The step's first of the layers that are so. */
static bool is_first(const mm_bench *b, bool (*in)(const mm_bench *, uint32_t)) {
  for (uint32_t l = 0; l < b->turn; l++)
    if (in(b, l % b->model.layers)) return false;
  return true;
}

static mm_act qkv_of(const mm_bench *b, uint32_t l) { return (mm_act){b->forward.qkv.data, b->weights.layer[l].qkv.n}; }
static void run_qkv(mm_bench *b, uint32_t l) {
  b->forward.ops->linear(b->forward.backend, qkv_of(b, l), b->forward.n, &b->weights.layer[l].qkv);
}
static void run_out(mm_bench *b, uint32_t l) {
  b->forward.ops->linear(b->forward.backend, b->forward.branch, b->forward.o, &b->weights.layer[l].out);
}
static void run_gate(mm_bench *b, uint32_t l) {
  b->forward.ops->linear(b->forward.backend, b->forward.gate, b->forward.n, &b->weights.layer[l].output_gate);
}
static void run_gqa(mm_bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  const bool norms = b->model.qk_norm;
  b->forward.ops->gqa(b->forward.backend, l, b->forward.o, qkv_of(b, l), norms ? &w->q_norm : NULL, norms ? &w->k_norm : NULL);
}
static void run_index(mm_bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  const mm_forward *f = &b->forward;
  mm_linear_two(f->ops, f->backend, f->index_q, &w->index_q, f->index_k, &w->index_k, f->n);
}
static void run_three(mm_bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  const mm_forward *f = &b->forward;
  mm_linear_three(f->ops, f->backend, (mm_three){{qkv_of(b, l), f->index_q, f->index_k}, {&w->qkv, &w->index_q, &w->index_k}}, f->n);
}
static void run_select(mm_bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  b->forward.ops->select(b->forward.backend, l, b->forward.index_q, b->forward.index_k, &w->index_q_norm, &w->index_k_norm);
}
/* The blocks that one selection chose are read in all layers. */
static void run_sparse_gqa(mm_bench *b, uint32_t l) {
  if (is_first(b, in_sparse)) run_index(b, l), run_select(b, l);
  run_gqa(b, l);
}
static void run_mlp(mm_bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  b->forward.ops->mlp(b->forward.backend, b->forward.branch, b->forward.n, &w->mlp_up, &w->mlp_down, in_routed(b, l));
}
static void run_plain_gqa(mm_bench *b, uint32_t l) { b->forward.ops->gqa(b->forward.backend, l, b->forward.o, qkv_of(b, l), NULL, NULL); }
static void run_lightning(mm_bench *b, uint32_t l) { b->forward.ops->lightning(b->forward.backend, l, b->forward.o, qkv_of(b, l)); }
static void run_gated_norm(mm_bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  f->ops->gated_norm(f->backend, f->o, f->o, f->gate, &b->weights.layer[l].attn_norm, b->model.lightning_norm_eps);
}
static void run_combine(mm_bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  f->ops->combine(f->backend, f->h, f->n, f->spare, f->branch, b->model.deepnorm_mlp, &b->weights.layer[l].post_norm, b->model.norm_eps);
}
static void run_norm(mm_bench *b, uint32_t l) {
  const mm_forward *f = &b->forward;
  f->ops->norm(f->backend, f->n, f->h, &b->weights.layer[l].post_norm, b->model.norm_eps);
}
static void run_embed(mm_bench *b, uint32_t l) {
  (void)l;
  b->forward.ops->embed(b->forward.backend, b->forward.h, &b->weights.embed);
}
static void run_route(mm_bench *b, uint32_t l) {
  const mm_layer_weights *w = &b->weights.layer[l];
  b->forward.ops->route(b->forward.backend, l, b->forward.n, &w->router, w->router_bias.scheme ? &w->router_bias : NULL);
}
static void run_experts(mm_bench *b, uint32_t l) {
  if (is_first(b, in_routed)) run_route(b, l);
  b->forward.ops->experts(b->forward.backend, b->forward.branch, b->forward.n, &b->weights.layer[l].w13, &b->weights.layer[l].w2);
}

static void run_experts_shared(mm_bench *b, uint32_t l) {
  if (is_first(b, in_routed)) run_route(b, l);
  mm_experts_shared(b->forward.ops, b->forward.backend, b->forward.branch, b->forward.n, &b->weights.layer[l]);
}

static void run_head(mm_bench *b, uint32_t l) {
  (void)l;
  b->forward.ops->logits(b->forward.backend, b->forward.n, &b->weights.head);
}

static double qkv_bytes(const mm_bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].qkv); }
static double out_bytes(const mm_bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].out); }
static double gate_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  return (void)rows, mm_bench_bytes(&b->weights.layer[l].output_gate);
}
static double route_bytes(const mm_bench *b, uint32_t l, uint32_t rows) { return (void)rows, mm_bench_bytes(&b->weights.layer[l].router); }
static double cache_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  return mm_bench_cache_bytes(b, l, rows / b->each, b->c->context);
}
static double experts_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  const mm_layer_weights *w = &b->weights.layer[l];
  return (void)rows, b->reached * (mm_bench_bytes(&w->w13) + mm_bench_bytes(&w->w2));
}
static double index_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  const mm_layer_weights *w = &b->weights.layer[l];
  return (void)rows, mm_bench_bytes(&w->index_q) + mm_bench_bytes(&w->index_k);
}
static double three_bytes(const mm_bench *b, uint32_t l, uint32_t rows) { return qkv_bytes(b, l, rows) + index_bytes(b, l, rows); }
static double select_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  return mm_bench_index_bytes(b, l, rows / b->each, b->c->context);
}
static double mlp_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  const mm_layer_weights *w = &b->weights.layer[l];
  return (void)rows, mm_bench_bytes(&w->mlp_up) + mm_bench_bytes(&w->mlp_down);
}
static double experts_shared_bytes(const mm_bench *b, uint32_t l, uint32_t rows) {
  return experts_bytes(b, l, rows) + mlp_bytes(b, l, rows);
}
static double head_bytes(const mm_bench *b, uint32_t l, uint32_t rows) { return (void)l, (void)rows, mm_bench_bytes(&b->weights.head); }
static double no_bytes(const mm_bench *b, uint32_t l, uint32_t rows) { return (void)b, (void)l, (void)rows, 0; }

static const mm_bench_op timed_ops[] = {
    {"qkv projection, lightning", in_lightning, run_qkv, qkv_bytes, 1, false},
    {"qkv projection, full", in_full, run_qkv, qkv_bytes, 1, false},
    {"qkv projection alone, sparse", in_sparse, run_qkv, qkv_bytes, 0, false},
    {"index projections", in_sparse, run_index, index_bytes, 0, false},
    {"qkv and index projections", in_sparse, run_three, three_bytes, 1, false},
    {"index norms, RoPE, key write, selection of blocks", in_sparse, run_select, select_bytes, 1, true},
    {"norm, RoPE, cache write, attention", in_full, run_gqa, cache_bytes, 1, true},
    {"norm, RoPE, cache write, attention over chosen blocks", in_sparse, run_sparse_gqa, cache_bytes, 1, true},
    {"the same without QK norm", in_normed, run_plain_gqa, cache_bytes, 0, true},
    {"lightning attention", in_lightning, run_lightning, cache_bytes, 1, true},
    {"output gate", in_lightning, run_gate, gate_bytes, 1, false},
    {"gated norm", in_lightning, run_gated_norm, no_bytes, 1, false},
    {"output projection", in_all, run_out, out_bytes, 1, false},
    {"residual and norm, with the sum over ranks", in_all, run_combine, no_bytes, 2, false},
    {"norm alone", in_all, run_norm, no_bytes, 0, false},
    {"embedding and its sum over ranks", in_cut, run_embed, no_bytes, 0, false},
    {"router", in_routed, run_route, route_bytes, 1, false},
    {"experts, and a router for all layers", in_unshared, run_experts, experts_bytes, 1, false},
    {"routed experts alone, and a router for all layers", in_shared, run_experts, experts_bytes, 0, false},
    {"shared expert", in_shared, run_mlp, mlp_bytes, 0, false},
    {"experts with the shared one, and a router for all layers", in_shared, run_experts_shared, experts_shared_bytes, 1, false},
    {"dense MLP", in_dense, run_mlp, mlp_bytes, 1, false},
    {"head", in_last, run_head, head_bytes, 0, false},
};

/* The median step of one op; the backend is opened anew, since it records one step for each number of rows. */
static bool time_op(mm_bench *b, const mm_bench_op *o, uint32_t rows, double *step_s, mm_err *err) {
  mm_bench_close(b);
  return mm_bench_open(b, err) && ((o && !o->caches) || mm_bench_fill(b, rows, err)) && mm_bench_decode(b, o, rows, step_s, err);
}

mm_bench_result mm_bench_result_of(const mm_bench *b, uint32_t rows) {
  return (mm_bench_result){.c = b->c,
                           .layers = b->c->layers,
                           .batch = rows,
                           .each = b->each,
                           .ranks = b->ranks,
                           .ep = b->ep,
                           .attn_tp = b->attn_tp,
                           .kv_fp8 = b->kv_fp8,
                           .index_fp8 = b->index_fp8,
                           .index_split = b->index_split,
                           .copy_rate = b->copy_rate};
}

static void print_op(const mm_bench *b, uint32_t rows, const char *name, double seconds, double bytes) {
  mm_bench_result r = mm_bench_result_of(b, rows);
  r.layers = 1, r.seconds = seconds, r.bytes = bytes, r.reached = b->reached;
  if (b->rank == 0) mm_bench_print_op(&r, name, b->json);
}

/* Every op of the model's layers for itself: what it adds to a step that embeds rows and chooses tokens. Then a layer in its step, and how
 * much that is more than its ops, each after others of its kind, take together: gaps, less what overlaps. Ranks wait for each other where
 * they choose, so one rank's steps are as long as the slowest one's. */
bool mm_bench_measure_ops(mm_bench *b, uint32_t rows, mm_err *err) {
  static const mm_bench_op nothing = {"", in_none, NULL, no_bytes, 0, false};
  double empty, step, head = 0, all = 0;
  if (!time_op(b, &nothing, rows, &empty, err)) return false;
  for (size_t i = 0; i < sizeof timed_ops / sizeof *timed_ops; i++) {
    const mm_bench_op *o = &timed_ops[i];
    double bytes = 0;
    uint32_t layers = 0;
    for (uint32_t l = 0; l < b->model.layers; l++) layers += o->in(b, l);
    if (layers == 0) continue;
    if (!time_op(b, o, rows, &step, err)) return false;
    for (uint32_t l = 0; l < b->model.layers; l++)
      if (o->in(b, l)) bytes += o->bytes(b, l, rows);
    const double each = (step - empty) / (MM_BENCH_ROUNDS * layers);
    if (o->run == run_head) head = each;
    all += each * layers * o->times;
    print_op(b, rows, o->name, each, bytes / layers);
  }
  if (!time_op(b, NULL, rows, &step, err)) return false;
  const double layer = (step - empty - head) / b->model.layers;
  print_op(b, rows, "a layer in its step", layer,
           (mm_bench_decode_bytes(b, rows, b->c->context) - mm_bench_bytes(&b->weights.head)) / b->model.layers);
  print_op(b, rows, "of it, more than its ops", layer - all / b->model.layers, 0);
  return true;
}
