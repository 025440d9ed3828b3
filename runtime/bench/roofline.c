/* The least that steps could take (bench_steps.h): bytes over the copy rate, operations over rates that are constants. */
#include <math.h>

#include "runtime/bench/bench_shapes.h"
#include "runtime/bench/bench_steps.h"

/* Heads of keys and values on a rank: one at least, whose cache several ranks hold. */
static double kv_heads_of(const mm_bench *b) { return fmax(1, (double)b->model.kv_heads / b->attn_tp); }

/* Bytes of a cached number: the CPU backend's caches are f32. */
static double number_bytes(const mm_bench *b) { return b->ops->own_memory ? 2 : 4; }

/* Positions that a query at position `context` reads in a sparse layer: whole blocks, and its own up to itself. */
static double chosen_positions(const mm_model *m, double context) {
  const double blocks = floor(context / m->index_block) + 1, own = context - (blocks - 1) * m->index_block + 1;
  return (fmin(blocks, m->index_top_k) - 1) * m->index_block + own;
}

double mm_bench_cache_bytes(const mm_bench *b, uint32_t l, uint32_t rows, double context) {
  const mm_model *m = &b->model;
  if (m->attn[l] == MM_ATTN_LIGHTNING) return 8.0 * rows * m->heads / b->attn_tp * m->head_dim * m->head_dim;
  const double positions = m->attn[l] == MM_ATTN_SPARSE ? chosen_positions(m, context) : context;
  return 2.0 * rows * positions * kv_heads_of(b) * (b->kv_fp8 ? m->head_dim + 4 : number_bytes(b) * m->head_dim);
}

double mm_bench_index_bytes(const mm_bench *b, uint32_t l, uint32_t rows, double context) {
  const mm_model *m = &b->model;
  /* Where all blocks are read, none has to be scored. */
  if (m->attn[l] != MM_ATTN_SPARSE || context < (double)m->index_top_k * m->index_block) return 0;
  if (b->index_split && context >= b->index_split) context /= b->attn_tp;
  return rows * context * (b->index_fp8 ? m->index_dim + 4 : m->index_dim * number_bytes(b));
}

/* Of each layer a sum of attention's rows and one of the MLP's, as they are added (runtime/cuda): of few rows a rank sends all of its own
 * to every other, of many each rank adds a part and sends the sums. Rows of groups go to the ranks of other groups, one rank of the group
 * sending each; back go the parts of all ranks to each rank of the group. */
void mm_bench_wire_bytes(const mm_bench *b, uint32_t rows, double *wire, double gather[3]) {
  const double row = 2.0 * b->model.hidden, others = b->ranks - 1.0, groups = mm_bench_groups_of(b), own = rows / groups;
  const double group = b->attn_tp, bits[] = {16, 8 + 32.0 / 128, 4 + 8.0 / 16};
  const double small = fmin(196608 * 8, 3 * 196608 * 8 / (group - 1)); /* bytes of a branch that is sent whole (mm_cu_peers_small) */
  const double sum = own * row * (own * row <= small ? group - 1 : 2 * (group - 1) / group);
  for (int i = 0; i < 3; i++)
    gather[i] = groups > 1 ? b->model.layers * own / group * (b->ranks - group) * b->model.hidden * bits[i] / 8 : 0;
  *wire = b->model.layers * (groups > 1 ? sum + own * row * others : 2 * sum) + gather[0];
}

double mm_bench_decode_bytes(const mm_bench *b, uint32_t rows, double context) {
  const mm_model *m = &b->model;
  double sum = mm_bench_bytes(&b->weights.head);
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_layer_weights *y = &b->weights.layer[l];
    const mm_packed *const whole[] = {&y->qkv, &y->out, &y->output_gate, &y->router, &y->index_q, &y->index_k, &y->mlp_up, &y->mlp_down};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) sum += mm_bench_bytes(whole[i]);
    sum += b->reached * (mm_bench_bytes(&y->w13) + mm_bench_bytes(&y->w2));
    sum += mm_bench_cache_bytes(b, l, rows / b->each, context) + mm_bench_index_bytes(b, l, rows / b->each, context);
  }
  return sum;
}

double mm_bench_draft_bytes(const mm_bench *b) {
  const mm_dflash *d = b->draft;
  const bool chain = b->kind == MM_DRAFT_EAGLE3;
  double sum = mm_bench_bytes(chain ? &d->head : &b->weights.head);
  for (uint32_t l = 0; l < d->c.layers; l++) {
    const mm_packed *const each[] = {&d->layer[l].qkv, &d->layer[l].out, &d->layer[l].up, &d->layer[l].down};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) sum += mm_bench_bytes(each[i]);
  }
  return chain ? (b->each - 1) * sum : sum;
}

static double product_rate(const mm_packed *w) { return w->scheme->code == MM_CODE_E4M3 ? MM_BENCH_FP8_RATE : MM_BENCH_BF16_RATE; }
static double product_s(const mm_packed *w, double tokens) { return w->scheme ? 2 * tokens * mm_bench_parameters(w) / product_rate(w) : 0; }

/* Queries of one rank and layer over their keys: all before them, or those of chosen blocks and the scores that choose. */
static double attention_s(const mm_bench *b, uint32_t l, double tokens) {
  const mm_model *m = &b->model;
  const double q = (double)m->heads * m->head_dim / b->ranks;
  if (m->attn[l] == MM_ATTN_LIGHTNING) return 8 * tokens * q / b->copy_rate;
  if (m->attn[l] == MM_ATTN_FULL) return 2 * q * tokens * tokens / MM_BENCH_ATTENTION_RATE;
  const double most = (double)m->index_top_k * m->index_block, before = fmin(tokens, most);
  const double keys = before * before / 2 + (tokens - before) * most;
  const double index = fmax(1, (double)m->index_heads / b->ranks) * m->index_dim;
  const double scored = tokens > most ? tokens * tokens / 2 : 0;
  return (4 * q * keys + 2 * index * scored) / MM_BENCH_ATTENTION_RATE;
}

void mm_bench_attention_ops(const mm_bench *b, double tokens, double ops[2]) {
  const mm_model *m = &b->model;
  const double q = (double)m->heads * m->head_dim / b->ranks, most = fmin(tokens, (double)m->index_top_k * m->index_block);
  ops[0] = 4 * q * (most * most / 2 + (tokens - most) * most), ops[1] = 2 * q * tokens * tokens;
}

double mm_bench_prefill_floor(const mm_bench *b, double tokens) {
  const mm_model *m = &b->model;
  double sum = 0;
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_layer_weights *y = &b->weights.layer[l];
    const mm_packed *const whole[] = {&y->qkv, &y->out, &y->output_gate, &y->index_q, &y->index_k, &y->mlp_up, &y->mlp_down};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) sum += product_s(whole[i], tokens);
    const double each = mm_bench_bytes(&y->w13) + mm_bench_bytes(&y->w2);
    sum += fmax(product_s(&y->w13, tokens * m->top_k / b->ep) + product_s(&y->w2, tokens * m->top_k / b->ep),
                y->w13.lead * each / b->copy_rate);
    sum += attention_s(b, l, tokens);
  }
  return sum;
}
