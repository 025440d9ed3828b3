/* The CPU backend's full attention: QK norm over all ranks' heads, partial RoPE, KV caches, causal softmax. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"

static void scale_row(float *x, float r, const float *w, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) x[i] = x[i] * r * w[i];
}

/* Every head of q and k by itself. */
static void norm_each(mm_backend *b, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  const float *weight = mm_cpu_norm_vector(b, q_norm);
  for (uint32_t t = 0; t < b->batch->tokens; t++) mm_cpu_norm_heads(mm_cpu_row(qkv, t), b->heads, b->d, weight, b->c.model->norm_eps);
  weight = mm_cpu_norm_vector(b, k_norm);
  for (uint32_t t = 0; t < b->batch->tokens; t++)
    mm_cpu_norm_heads(mm_cpu_row(qkv, t) + (size_t)b->heads * b->d, b->kv_heads, b->d, weight, b->c.model->norm_eps);
}

/* q and k of every row are normalised over all heads of all ranks, each with its own mean square. */
static void norm_all(mm_backend *b, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  const mm_model *m = b->c.model;
  uint32_t tp = b->ranks.count, T = b->batch->tokens, q = b->heads * b->d, k = b->kv_heads * b->d;
  for (uint32_t t = 0; t < T; t++) {
    const float *row = mm_cpu_row(qkv, t);
    b->sums[2 * t] = mm_cpu_dot(row, row, q);
    b->sums[2 * t + 1] = mm_cpu_dot(row + q, row + q, k);
  }
  mm_comm_all_reduce_sum(b->ranks.comm, b->ranks.rank, b->sums, 2 * (size_t)T);
  /* With more ranks than kv heads every kv head was counted once by each rank that holds it: k·tp counts it as often. */
  float whole_q = (float)q * (float)tp, whole_k = (float)k * (float)tp, eps = (float)m->norm_eps;
  const float *weight = mm_cpu_norm_vector(b, q_norm);
  for (uint32_t t = 0; t < T; t++) scale_row(mm_cpu_row(qkv, t), 1.0f / sqrtf(b->sums[2 * t] / whole_q + eps), weight, q);
  weight = mm_cpu_norm_vector(b, k_norm);
  for (uint32_t t = 0; t < T; t++) scale_row(mm_cpu_row(qkv, t) + q, 1.0f / sqrtf(b->sums[2 * t + 1] / whole_k + eps), weight, k);
}

void mm_cpu_turn_head(float *x, const float *turn, uint32_t half) {
  for (uint32_t i = 0; i < half; i++) {
    float c = turn[i], s = turn[half + i], lo = x[i], hi = x[half + i];
    x[i] = lo * c - hi * s;
    x[half + i] = hi * c + lo * s;
  }
}

/* Rounds to the nearest, ties to even; what is not a number stays none. */
static uint16_t bf16_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  if (x != x) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static void store(const mm_backend *b, char *cell, const float *x) {
  if (b->kv_size == sizeof *x) {
    memcpy(cell, x, b->d * sizeof *x);
    return;
  }
  for (uint32_t i = 0; i < b->d; i++) {
    const uint16_t y = bf16_of(x[i]);
    memcpy(cell + i * sizeof y, &y, sizeof y);
  }
}

/* The first n rows [n, d] of one kv head in a page: there, or as f32 in room. */
static const float *load(const mm_backend *b, const char *cell, uint32_t n, float *own) {
  if (b->kv_size == sizeof *own) return (const float *)(const void *)cell;
  for (size_t i = 0; i < (size_t)n * b->d; i++) {
    uint16_t y;
    memcpy(&y, cell + i * sizeof y, sizeof y);
    const uint32_t u = (uint32_t)y << 16;
    memcpy(&own[i], &u, sizeof u);
  }
  return own;
}

/* Turns q and k of one row and puts k and v into the caches. */
static void store_row(mm_backend *b, const mm_cpu_cache *cache, float *row, uint32_t t, uint32_t slot, uint32_t pos) {
  uint32_t half = b->c.model->rotary_dim / 2, d = b->d, page = mm_cpu_page(b, slot, pos / MM_PAGE);
  const float *turn = b->rope + (size_t)t * 2 * half;
  for (uint32_t h = 0; h < b->heads + b->kv_heads; h++) mm_cpu_turn_head(row + (size_t)h * d, turn, half);
  const float *k = row + (size_t)b->heads * d, *v = k + (size_t)b->kv_heads * d;
  for (uint32_t h = 0; h < b->kv_heads; h++) {
    const size_t at = mm_cpu_cell(b, page, h, pos % MM_PAGE);
    store(b, cache->k + at, k + (size_t)h * d);
    store(b, cache->v + at, v + (size_t)h * d);
  }
}

typedef struct gqa {
  mm_backend *b;
  const mm_cpu_cache *cache;
  mm_act o, qkv;
  uint32_t lots; /* of rows, over all spans */
} gqa;

_Static_assert(MM_PAGE <= MM_CPU_POSITIONS, "a page is attended to at once");

/* Consecutive rows of a span that share the reading of a page. */
enum { ROWS_TOGETHER = 8 };

size_t mm_cpu_attention_floats(const mm_backend *b) {
  const size_t queries = (size_t)ROWS_TOGETHER * mm_max(1, b->heads / b->kv_heads);
  return 2 * (size_t)MM_PAGE * b->d + queries * (MM_CPU_POSITIONS + sizeof(mm_cpu_query) / sizeof(float));
}

/* Room for the queries of some rows under one kv head: mm_cpu_attention_floats. */
typedef struct heads {
  float *k, *v; /* a page as f32 */
  mm_cpu_query *query;
  uint32_t count, group;
} heads;

/* The queries of rows [first, first + rows), scaled. */
static heads open_heads(const gqa *j, uint32_t first, uint32_t rows, uint32_t kv_head, float *own) {
  const mm_backend *b = j->b;
  const uint32_t d = b->d, group = (uint32_t)mm_max(1, b->heads / b->kv_heads);
  const float scale = 1.0f / sqrtf((float)d);
  float *const v = own + (size_t)MM_PAGE * d, *const score = v + (size_t)MM_PAGE * d;
  mm_cpu_query *const query = (mm_cpu_query *)(void *)(score + (size_t)rows * group * MM_CPU_POSITIONS);
  for (uint32_t i = 0; i < rows * group; i++) {
    const size_t column = (size_t)(kv_head * group + i % group) * d;
    float *const q = mm_cpu_row(j->qkv, first + i / group) + column, *const o = mm_cpu_row(j->o, first + i / group) + column;
    for (uint32_t c = 0; c < d; c++) q[c] *= scale, o[c] = 0;
    query[i] = (mm_cpu_query){.q = q, .o = o, .score = score + (size_t)i * MM_CPU_POSITIONS, .soft = {-INFINITY, 0}};
  }
  return (heads){own, v, query, rows * group, group};
}

static void close_heads(const heads *x, uint32_t d) {
  for (uint32_t i = 0; i < x->count; i++)
    for (uint32_t c = 0; c < d; c++) x->query[i].o[c] /= x->query[i].soft.sum;
}

/* Rows [first, first + rows) of span s under one kv head: o[d] = Σ softmax(q·k/√d)·v over the positions up to each row's own. Pages are
 * taken in order, and what a head keeps between them is scaled to the largest score so far. */
static void attend(const gqa *j, const mm_span *s, uint32_t first, uint32_t rows, uint32_t kv_head, float *own) {
  const mm_backend *b = j->b;
  const uint32_t pos = s->pos + (first - s->first), end = pos + rows;
  const heads x = open_heads(j, first, rows, kv_head, own);
  for (uint32_t at = 0; at < end; at += MM_PAGE) {
    const size_t cell = mm_cpu_cell(b, mm_cpu_page(b, (uint32_t)s->slot, at / MM_PAGE), kv_head, 0);
    const uint32_t held = (uint32_t)mm_min(MM_PAGE, end - at);
    const float *k = load(b, j->cache->k + cell, held, x.k), *v = load(b, j->cache->v + cell, held, x.v);
    const uint32_t see = at > pos ? (at - pos) * x.group : 0; /* the first query that sees any of it */
    for (uint32_t i = see; i < x.count; i++) x.query[i].n = (uint32_t)mm_min(MM_PAGE, pos + i / x.group + 1 - at);
    b->vectors->attend(x.query + see, x.count - see, k, v, b->d);
  }
  close_heads(&x, b->d);
}

/* The same of one row over the blocks that were chosen for it, neighbours at once: with all blocks to the bit what attend gives. */
static void attend_blocks(const gqa *j, const mm_span *s, uint32_t row, uint32_t kv_head, float *own) {
  const mm_backend *b = j->b;
  const uint32_t size = b->c.model->index_block, end = s->pos + (row - s->first) + 1;
  uint32_t count;
  const uint32_t *block = mm_cpu_blocks(b, row, kv_head, &count);
  const heads x = open_heads(j, row, 1, kv_head, own);
  for (uint32_t i = 0, next; i < count; i = next) {
    for (next = i + 1; next < count && block[next] == block[next - 1] + 1;) next++;
    const uint32_t stop = (uint32_t)mm_min((uint64_t)(block[next - 1] + 1) * size, end);
    for (uint32_t at = block[i] * size, n; at < stop; at += n) {
      n = (uint32_t)mm_min(MM_PAGE - at % MM_PAGE, stop - at);
      const size_t cell = mm_cpu_cell(b, mm_cpu_page(b, (uint32_t)s->slot, at / MM_PAGE), kv_head, at % MM_PAGE);
      const float *k = load(b, j->cache->k + cell, n, x.k), *v = load(b, j->cache->v + cell, n, x.v);
      for (uint32_t q = 0; q < x.count; q++) x.query[q].n = n;
      b->vectors->attend(x.query, x.count, k, v, b->d);
    }
  }
  close_heads(&x, b->d);
}

/* One kv head of up to ROWS_TOGETHER rows: of every span as many lots as it has. The last are taken first: they have most to read. */
static bool attend_lot(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const gqa *j = ctx;
  const mm_backend *b = j->b;
  const uint32_t kv_head = (uint32_t)(item % b->kv_heads);
  uint32_t lot = j->lots - 1 - (uint32_t)(item / b->kv_heads);
  const mm_span *s = b->batch->span;
  for (; lot >= mm_ceil_div(s->count, ROWS_TOGETHER); s++) lot -= (uint32_t)mm_ceil_div(s->count, ROWS_TOGETHER);
  const uint32_t from = lot * ROWS_TOGETHER, rows = (uint32_t)mm_min(ROWS_TOGETHER, s->count - from), width = b->heads / b->kv_heads * b->d;
  for (uint32_t r = 0; s->slot < 0 && r < rows; r++)
    memset(mm_cpu_row(j->o, s->first + from + r) + (size_t)kv_head * width, 0, width * sizeof(float));
  if (s->slot >= 0 && !j->cache->index) attend(j, s, s->first + from, rows, kv_head, b->scratch[worker]);
  for (uint32_t r = 0; s->slot >= 0 && j->cache->index && r < rows; r++)
    attend_blocks(j, s, s->first + from + r, kv_head, b->scratch[worker]);
  return true;
}

void mm_cpu_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  gqa j = {.b = b, .cache = &b->cache[layer], .o = o, .qkv = qkv};
  if (q_norm) (b->c.model->qk_norm_per_head ? norm_each : norm_all)(b, qkv, q_norm, k_norm);
  uint64_t seen = 0;
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    j.lots += (uint32_t)mm_ceil_div(s->count, ROWS_TOGETHER);
    if (s->slot < 0) continue;
    for (uint32_t t = 0; t < s->count; t++)
      store_row(b, j.cache, mm_cpu_row(qkv, s->first + t), s->first + t, (uint32_t)s->slot, s->pos + t);
    seen += (uint64_t)s->count * (s->pos + s->count);
  }
  mm_cpu_each(b, (size_t)j.lots * b->kv_heads, seen * b->heads * b->d * 2, attend_lot, &j);
}
