/* Bytes of a rank by kind, and the pages that fit into the rest of the memory (capacity.h). The buffers are those that runtime/cuda
 * allocates, in its order; tests/ops/host.c compares them with what it does allocate. */
#include "loader/stream/capacity.h"

#include "loader/stream/landing.h"

#define MIB (UINT64_C(1) << 20)

/* count elements of `size` bytes in an allocation of its own: with 256 bytes to spare, and as the driver rounds it. */
static void add(uint64_t *sum, uint64_t count, uint64_t size) {
  uint64_t bytes;
  if (!mm_mul(count, size, &bytes) || bytes > UINT64_MAX / 4) {
    *sum = UINT64_MAX / 2;
    return;
  }
  bytes += 256;
  *sum = mm_min(UINT64_MAX / 2, *sum + (bytes < MIB ? mm_round_up(bytes, 512) : mm_round_up(bytes, 2 * MIB)));
}

/* ---- weights ---- */

static uint64_t stored_bytes(const mm_packed *w) {
  uint64_t bytes = 0;
  for (unsigned i = 0; i < w->scheme->plane_count; i++)
    bytes += w->lead * mm_plane_elements(w->n, w->k, w->cell[i]) * mm_dtype_size(w->scheme->plane[i].dtype);
  return bytes;
}

static bool place_matrix(mm_landing_plan *p, mm_packed w, mm_err *err) {
  mm_landing_layout y;
  mm_landing_places at;
  uint64_t place;
  if (!w.scheme) return true;
  if (!mm_landing_layout_of(&w, &y)) return mm_landing_place(p, stored_bytes(&w), false, &place, err);
  for (unsigned i = 0; i < MM_MAX_PLANES; i++) w.plane[i] = NULL; /* no file is looked for */
  return mm_landing_matrix(p, &w, "", &y, (mm_landing_groups){0}, &at, err);
}

static bool place_values(mm_landing_plan *p, const mm_packed *w, mm_err *err) {
  uint64_t at;
  return !w->scheme || mm_landing_place(p, (uint64_t)w->lead * w->n * w->k * sizeof(float), false, &at, err);
}

/* A router that is not BF16 is stored as F32, and in three pieces of BF16. */
static bool place_router(mm_landing_plan *p, const mm_packed *w, mm_err *err) {
  uint64_t at;
  if (!w->scheme || (w->scheme->code == MM_CODE_PLAIN && w->scheme->plane[0].dtype == MM_BF16)) return place_matrix(p, *w, err);
  return mm_landing_place(p, 3 * (uint64_t)w->n * w->k * 2, false, &at, err) && place_values(p, w, err);
}

static bool place_weights(mm_landing_plan *p, const mm_rank_weights *w, mm_err *err) {
  bool ok = place_matrix(p, w->embed, err);
  for (uint32_t l = w->layer_first; ok && l < w->layer_end; l++) {
    const mm_layer_weights *y = &w->layer[l];
    const mm_packed *value[] = {&y->post_norm,   &y->attn_norm,  &y->q_norm,       &y->k_norm,
                                &y->router_bias, &y->input_norm, &y->index_q_norm, &y->index_k_norm};
    const mm_packed *matrix[] = {&y->qkv, &y->out, &y->output_gate, &y->w13, &y->w2, &y->index_q, &y->index_k, &y->mlp_up, &y->mlp_down};
    for (size_t i = 0; ok && i < sizeof value / sizeof *value; i++) ok = place_values(p, value[i], err);
    for (size_t i = 0; ok && i < sizeof matrix / sizeof *matrix; i++) ok = place_matrix(p, *matrix[i], err);
    ok = ok && place_router(p, &y->router, err);
  }
  return ok && place_values(p, &w->final_norm, err) && place_matrix(p, w->head, err);
}

#define LANDING_BYTES (6 * 8 * MIB) /* chunks on their way whose bytes kernels change (runtime/cuda/core/load.h) */

/* One arena: the weights, a table of its holes, and room for chunks. */
static bool count_weights(uint64_t *bytes, const mm_rank_weights *w, mm_err *err) {
  mm_landing_plan p = {0};
  const bool ok = place_weights(&p, w, err);
  *bytes = 0;
  add(bytes, p.bytes + (p.holes + 1) * sizeof(mm_hole) + MM_LANDING_ALIGN + LANDING_BYTES, 1);
  mm_landing_close(&p);
  return ok;
}

/* ---- buffers ---- */

/* Sizes that many buffers have in common. */
typedef struct sizes {
  const mm_model *m;
  const mm_rank_weights *w;
  const mm_demand *d;
  uint64_t rows, pairs; /* of a step; with the experts chosen for each */
  uint64_t heads, kv_heads, inter, qkv;
  uint64_t dense; /* columns between the products of an MLP */
  uint64_t logits_rows;
  uint64_t groups; /* of attention */
} sizes;

uint32_t mm_outs_of(const mm_model *m, uint64_t slots, uint32_t drafts) {
  for (uint32_t l = 0; l < m->layers; l++)
    if (m->attn[l] == MM_ATTN_LIGHTNING) drafts = 0;
  return (uint32_t)(slots * (1 + drafts));
}

static sizes sizes_of(const mm_model *m, const mm_rank_weights *w, const mm_demand *d) {
  sizes x = {.m = m, .w = w, .d = d, .rows = d->step_tokens};
  if (d->calibration) x.rows = mm_max(2, x.rows);
  if (d->batch_invariant) x.rows = mm_max(MM_DEVICE_LEAST_INVARIANT, x.rows);
  x.groups = w->tp / mm_attn_tp(w);
  if (x.groups > 1) x.rows += x.groups * (d->batch_invariant ? MM_DEVICE_LEAST_INVARIANT : 1); /* padding of groups without rows */
  x.pairs = x.rows * m->top_k;
  x.heads = m->heads / mm_attn_tp(w), x.kv_heads = mm_max(1, m->kv_heads / mm_attn_tp(w));
  for (uint32_t l = w->layer_first; l < w->layer_end; l++)
    x.inter = mm_max(x.inter, w->layer[l].w2.k), x.qkv = mm_max(x.qkv, w->layer[l].qkv.n),
    x.dense = mm_max(x.dense, w->layer[l].mlp_down.k);
  const uint64_t outs = mm_max(mm_min(d->outs ? d->outs : x.rows, x.rows), mm_min(d->slots, x.rows));
  x.logits_rows = mm_min(x.rows, outs <= MM_DEVICE_LARGEST_BUCKET ? mm_min(2 * outs, MM_DEVICE_LARGEST_BUCKET) : outs);
  if (d->batch_invariant) x.logits_rows = mm_max(x.logits_rows, MM_DEVICE_LEAST_INVARIANT);
  return x;
}

/* Rows of a step between ops, and inputs as products take them. */
static void add_rows(uint64_t *sum, const sizes *x) {
  const uint64_t H = x->m->hidden, wide = x->heads * x->m->head_dim, widest = mm_max(mm_max(H, wide), x->dense);
  const uint64_t pitch = mm_round_up(widest, 128);
  for (unsigned i = 0; i < 4 + x->d->taps + (x->groups > 1 ? 2 : 0); i++) add(sum, x->rows * H, 2);
  add(sum, x->rows * x->qkv, 2), add(sum, x->rows * wide, 2), add(sum, x->rows * wide, 2);
  if (x->d->act_quant) add(sum, x->rows * pitch, 1), add(sum, x->rows * (pitch / 128), 4), add(sum, x->rows * widest, 2);
}

/* The number of largest magnitudes of a row that the ranks exchange, since the rank's columns share the scales of the whole row. */
static uint64_t published_of(const mm_packed *w) {
  if (!w->scheme || w->cut_k == 0) return 0;
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  return f->group == 0 ? 1 : mm_cells(w->whole_k, f->group);
}

static void add_experts(uint64_t *sum, const sizes *x) {
  const mm_model *m = x->m;
  const uint64_t E = m->experts, lists = mm_min(E, MM_DEVICE_DECODE_ROWS * m->top_k);
  const uint64_t few = 3 * mm_min(x->rows, MM_DEVICE_FEW_EACH) * m->top_k;
  add(sum, x->rows * E, 4);
  for (int i = 0; i < 3; i++) add(sum, x->pairs, 4);
  for (int i = 0; i < 2; i++) add(sum, 1, 4), add(sum, lists, 4);
  add(sum, lists * MM_DEVICE_DECODE_ROWS, 4), add(sum, 16, 8), add(sum, E + 1, 4);
  add(sum, 3 * x->rows * E, 4);
  add(sum, mm_max(lists * MM_DEVICE_DECODE_ROWS, mm_max(x->pairs, few)), 2 * x->inter);
  add(sum, x->pairs, 4 * (uint64_t)m->hidden);
  add(sum, m->layers * E, 8);
  uint64_t published = 0;
  for (uint32_t l = x->w->layer_first; l < x->w->layer_end; l++) {
    const mm_layer_weights *y = &x->w->layer[l];
    published = mm_max(published,
                       mm_max(mm_max(published_of(&y->out), published_of(&y->w2)), mm_max(published_of(&y->qkv), published_of(&y->w13))));
    published = mm_max(published, published_of(&y->mlp_down));
  }
  if (x->d->act_quant && published) add(sum, x->pairs * published + 4, 4);
}

/* Jobs, and results of rows for each of their blocks, where the kernel of that takes the model (gqa_by_block.cu). */
static void add_by_block(uint64_t *sum, const sizes *x, uint64_t index_heads) {
  const mm_model *m = x->m;
  const uint64_t group = x->heads / x->kv_heads, top_k = m->index_top_k;
  const bool heads = m->head_dim == 128 && (group == 8 || group == 16) && x->heads % x->kv_heads == 0 && x->kv_heads % index_heads == 0;
  if (!heads || m->index_block != 128 || top_k == 0 || x->d->cache == MM_CACHE_FP8) return;
  const uint64_t most = mm_min(MM_DEVICE_BLOCK_ROWS, MM_DEVICE_BLOCK_PAIRS / top_k / 64 * 64), rows = mm_min(x->rows, most);
  const uint64_t listed = x->rows <= most ? x->rows : mm_min(MM_DEVICE_BLOCK_ROWS_HEAD, most * index_heads);
  add(sum,
      256 + mm_round_up(listed * top_k * index_heads * MM_DEVICE_BLOCK_JOB, 256) +
          mm_round_up(rows * top_k * x->heads * (8 + 2 * UINT64_C(128)), 256),
      1);
}

/* What extended models add: index rows, scores and lists of blocks, rows of MLPs, parts of rows that several blocks read. */
static void add_extended(uint64_t *sum, const sizes *x) {
  const mm_model *m = x->m;
  const uint64_t heads = mm_max(1, m->index_heads / mm_attn_tp(x->w)), part = MM_DEVICE_BLOCK_GROUP * (m->head_dim + UINT64_C(2)) * 4;
  bool sparse = false;
  for (uint32_t l = x->w->layer_first; l < x->w->layer_end; l++) sparse |= m->attn[l] == MM_ATTN_SPARSE;
  if (sparse) {
    add(sum, x->rows * heads * m->index_dim, 2), add(sum, x->rows * m->index_dim, 2);
    add(sum, MM_DEVICE_SCORE_ROWS * heads * mm_ceil_div(x->d->positions, m->index_block), 4);
    add(sum, x->rows * heads * m->index_top_k, 4), add(sum, x->rows * heads, 4);
    add_by_block(sum, x, heads);
  }
  if (x->dense) add(sum, x->rows * mm_max(2 * x->dense, m->hidden), 4), add(sum, x->rows * x->dense, 2);
  if (mm_model_extended(m)) add(sum, 2 * MM_DEVICE_MULTIPROCESSORS * part, 1);
}

/* Attention: tables, and partial results of rows that several blocks read. */
static void add_attention(uint64_t *sum, const sizes *x) {
  const mm_model *m = x->m;
  const uint64_t d = x->d->slots, blocks = MM_DEVICE_MULTIPROCESSORS, part = 8 * (m->head_dim + UINT64_C(2)) * 4;
  const uint64_t tiles = mm_ceil_div(x->d->positions, MM_DEVICE_TILE), at_once = blocks / x->kv_heads + 1;
  const uint64_t chunk = mm_max(MM_DEVICE_CHUNK, mm_round_up(mm_ceil_div(d * tiles, MM_DEVICE_ITEMS), 8));
  const bool other = mm_model_extended(m); /* whose rows are cut in another way: add_extended */
  const uint64_t items = other || tiles <= chunk ? 0 : d * mm_ceil_div(tiles, chunk) + mm_min(d, at_once) * at_once;
  /* Splitting rows pays only while splits x rows x heads stay below 66 times the multiprocessors (gqa_list.cu). */
  const uint64_t near = other ? 0 : mm_min(66 * blocks, 32 * x->rows * x->kv_heads);
  add(sum, x->rows * x->kv_heads * 4 + 256 + (near + items * x->kv_heads) * part, 1);
  add(sum, x->rows * (x->groups > 1 ? 92 : 88) + 9 * 256 + (items + mm_max(x->rows, near)) * 8,
      1); /* what a step's kernels read of its batch */
  add(sum, mm_most_pages(x->d), 4), add(sum, m->layers, 64), add(sum, m->rotary_dim / 2, 4);
  for (uint32_t l = x->w->layer_first; l < x->w->layer_end; l++)
    if (m->attn[l] == MM_ATTN_LIGHTNING) add(sum, x->heads, 4);
}

/* Logits, and what is asked of them. */
static void add_sampling(uint64_t *sum, const sizes *x) {
  const uint64_t V = x->m->vocab, tp = mm_attn_tp(x->w), groups = mm_ceil_div(V, 256) * 4, rows = x->logits_rows;
  const uint64_t own = (uint64_t)x->w->vocab_rows * 4;
  add(sum, mm_ceil_div(V, 32), 4), add(sum, x->rows, 4), add(sum, x->rows, 8), add(sum, x->rows, 4), add(sum, x->d->slots, 4);
  add(sum, (uint64_t)x->d->slots * x->d->positions, 4);
  if (x->w->layer_end < x->m->layers) return; /* another stage has the head */
  add(sum, rows, own + groups);
  if (tp > 1) add(sum, rows, tp * own + groups);
  add(sum, MM_DEVICE_SEEN * V, 4), add(sum, rows * V, 4);
  add(sum, rows * MM_DEVICE_LOGPROBS, 8), add(sum, rows, 128 + 4096 + mm_ceil_div(V, 8)), add(sum, rows, 16);
}

/* Words, branches and slabs of sums over so many ranks (runtime/cuda/comm/peers.cuh). rows: bytes that two ranks may send as they are made.
 */
static void add_peers(uint64_t *sum, uint64_t tp, uint64_t rows) {
  const uint64_t slab = 64 * MIB, words = 131072 * 16, branch = 16 * (6144 / 8) * 16, sums = tp == 2 ? mm_max(slab, rows) : slab;
  add(sum, 2 * tp * words + 3 * tp * branch + 2 * tp * (slab / tp + 32) + 2 * sums + 4 * tp * 64 * 4 + 256, 1);
}

/* Sums over the ranks of a stage, and over those of a group; or NCCL's buffers and a slab. */
static void add_ranks(uint64_t *sum, const sizes *x) {
  const uint64_t tp = x->w->tp, rows = mm_min(mm_round_up(x->rows * x->m->hidden * 2, 16), 256 * MIB);
  if (tp == 1) return;
  add(sum, 2 * x->rows + 4, 4);
  if (x->d->across) {
    add(sum, 64 * MIB, 1), add(sum, 512 * MIB, 1);
    return;
  }
  add_peers(sum, tp, x->groups == 1 ? rows : 0);
  if (x->groups > 1 && mm_attn_tp(x->w) > 1) add_peers(sum, mm_attn_tp(x->w), rows);
}

/* Squares, largest magnitudes and counts of every input that is collected. */
static void add_calibration(uint64_t *sum, const sizes *x) {
  for (uint32_t l = x->w->layer_first; x->d->calibration && l < x->w->layer_end; l++) {
    const mm_layer_weights *y = &x->w->layer[l];
    const mm_packed *all[] = {&y->qkv, &y->out, &y->output_gate, &y->index_q, &y->index_k, &y->mlp_up, &y->mlp_down, &y->w13, &y->w2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
      if (all[i]->scheme)
        add(sum, (uint64_t)all[i]->lead * all[i]->k, 8), add(sum, (uint64_t)all[i]->lead * all[i]->k, 4), add(sum, all[i]->lead, 8);
  }
  if (x->d->calibration && x->w->head.scheme) add(sum, x->m->hidden, 8), add(sum, x->m->hidden, 4), add(sum, 1, 8);
}

/* ---- a rank ---- */

static uint64_t count_of(const mm_model *m, const mm_rank_weights *w, mm_attn kind) {
  uint64_t n = 0;
  for (uint32_t l = w->layer_first; l < w->layer_end; l++) n += m->attn[l] == kind;
  return n;
}

bool mm_rank_memory_of(mm_rank_memory *out, const mm_model *m, const mm_rank_weights *w, const mm_demand *d, mm_err *err) {
  const sizes x = sizes_of(m, w, d);
  const uint64_t size = d->cache == MM_CACHE_F32 ? 4 : d->cache == MM_CACHE_BF16 ? 2 : 1, scale = d->cache == MM_CACHE_FP8 ? 4 : 0;
  const uint64_t sparse = count_of(m, w, MM_ATTN_SPARSE), number = d->index_fp8 ? 1 : d->gpu ? 2 : 4; /* bytes of an index key's */
  const uint64_t index = m->index_dim * number + (d->index_fp8 ? sizeof(float) : 0);
  const uint64_t cached = count_of(m, w, MM_ATTN_FULL) + sparse;
  *out = (mm_rank_memory){.page = MM_PAGE * (cached * 2 * x.kv_heads * (m->head_dim * size + scale) + sparse * index)};
  const uint64_t states = count_of(m, w, MM_ATTN_LIGHTNING) * x.heads * m->head_dim * m->head_dim * sizeof(float);
  if (states) add(&out->states, d->slots, states);
  if (!d->gpu) return true;
  add_rows(&out->buffers, &x), add_experts(&out->buffers, &x), add_attention(&out->buffers, &x);
  add_extended(&out->buffers, &x);
  add_sampling(&out->buffers, &x), add_ranks(&out->buffers, &x), add_calibration(&out->buffers, &x);
  return count_weights(&out->weights, w, err);
}

/* ---- pages ---- */

mm_cache_capacity mm_cache_capacity_of(const mm_rank_memory *r, const mm_demand *d, const mm_device_memory *on) {
  const uint64_t ranks = mm_max(1, on->ranks), allowed = (uint64_t)((double)on->total * on->share) / ranks;
  const uint64_t overhead = d->gpu ? MM_GPU_OVERHEAD / ranks + 2 * MIB : 0; /* the second: how the allocator rounds the cache */
  const uint64_t besides = overhead + r->buffers + r->states;
  /* Memory taken by other programs is not available, except for weights that another process holds for this run. */
  const uint64_t left = d->gpu ? on->free / ranks + (d->attached ? r->weights : 0) : UINT64_MAX;
  const uint64_t most = mm_min(allowed, left), taken = mm_min(UINT64_MAX / 2, besides) + mm_min(UINT64_MAX / 2, r->weights);
  return most >= taken ? (mm_cache_capacity){.bytes = most - taken} : (mm_cache_capacity){.lack = taken - most};
}

uint64_t mm_fewer_pages(uint64_t pages, const mm_rank_memory *r, const mm_demand *d, const mm_device_memory *on) {
  const mm_cache_capacity capacity = mm_cache_capacity_of(r, d, on);
  if (capacity.lack) return 0;
  return r->page ? mm_min(pages, capacity.bytes / r->page) : pages;
}
