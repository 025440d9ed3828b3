/* The reference backend's full attention: QK norm over all ranks' heads, partial RoPE, KV caches, causal softmax. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"

static void scale_row(float *x, float r, const float *w, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) x[i] = x[i] * r * w[i];
}

/* q and k of every row are normalised over all heads of all ranks, each with its own mean square. */
static void qk_norm(mm_backend *b, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  const mm_model *m = b->c.model;
  uint32_t tp = b->c.weights->tp, T = b->batch->tokens, q = b->heads * b->d, k = b->kv_heads * b->d;
  for (uint32_t t = 0; t < T; t++) {
    const float *row = mm_cpu_row(qkv, t);
    b->sums[2 * t] = mm_cpu_dot(row, row, q);
    b->sums[2 * t + 1] = mm_cpu_dot(row + q, row + q, k);
  }
  mm_comm_sum(b->c.comm, b->c.weights->rank, b->sums, 2 * (size_t)T);
  /* With more ranks than kv heads every kv head was counted once by each rank that holds it: k·tp counts it as often. */
  float whole_q = (float)q * (float)tp, whole_k = (float)k * (float)tp, eps = (float)m->norm_eps;
  const float *weight = mm_cpu_vector(b, q_norm);
  for (uint32_t t = 0; t < T; t++) scale_row(mm_cpu_row(qkv, t), 1.0f / sqrtf(b->sums[2 * t] / whole_q + eps), weight, q);
  weight = mm_cpu_vector(b, k_norm);
  for (uint32_t t = 0; t < T; t++) scale_row(mm_cpu_row(qkv, t) + q, 1.0f / sqrtf(b->sums[2 * t + 1] / whole_k + eps), weight, k);
}

/* Half-split RoPE in the first 2·half elements of one head. */
static void turn_head(float *x, const float *turn, uint32_t half) {
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
static const float *load(const mm_backend *b, const char *cell, uint32_t n, float *room) {
  if (b->kv_size == sizeof *room) return (const float *)(const void *)cell;
  for (size_t i = 0; i < (size_t)n * b->d; i++) {
    uint16_t y;
    memcpy(&y, cell + i * sizeof y, sizeof y);
    const uint32_t u = (uint32_t)y << 16;
    memcpy(&room[i], &u, sizeof u);
  }
  return room;
}

/* Turns q and k of one row and puts k and v into the caches. */
static void store_row(mm_backend *b, const mm_cpu_cache *cache, float *row, uint32_t t, uint32_t slot, uint32_t pos) {
  uint32_t half = b->c.model->rotary_dim / 2, d = b->d, page = mm_cpu_page(b, slot, pos / MM_PAGE);
  const float *turn = b->rope + (size_t)t * 2 * half;
  for (uint32_t h = 0; h < b->heads + b->kv_heads; h++) turn_head(row + (size_t)h * d, turn, half);
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
} gqa;

/* o[d] = Σ softmax(q·k/√d)·v over the first `seen` positions of a slot, of one kv head. room: a page's rows and `seen` scores. */
static void attend(const gqa *j, float *o, const float *q, uint32_t slot, uint32_t kv_head, uint32_t seen, float *room) {
  const mm_backend *b = j->b;
  const uint32_t d = b->d;
  float scale = 1.0f / sqrtf((float)d), top = -INFINITY, sum = 0.0f, *score = room + (size_t)MM_PAGE * d;
  for (uint32_t at = 0; at < seen; at += MM_PAGE) {
    const uint32_t n = (uint32_t)mm_min(MM_PAGE, seen - at);
    const float *k = load(b, j->cache->k + mm_cpu_cell(b, mm_cpu_page(b, slot, at / MM_PAGE), kv_head, 0), n, room);
    for (uint32_t i = 0; i < n; i++) {
      score[at + i] = scale * mm_cpu_dot(q, k + (size_t)i * d, d);
      top = fmaxf(top, score[at + i]);
    }
  }
  for (uint32_t i = 0; i < seen; i++) sum += score[i] = expf(score[i] - top);
  memset(o, 0, d * sizeof *o);
  for (uint32_t at = 0; at < seen; at += MM_PAGE) {
    const uint32_t n = (uint32_t)mm_min(MM_PAGE, seen - at);
    const float *v = load(b, j->cache->v + mm_cpu_cell(b, mm_cpu_page(b, slot, at / MM_PAGE), kv_head, 0), n, room);
    for (uint32_t i = 0; i < n; i++) mm_cpu_axpy(o, score[at + i] / sum, v + (size_t)i * d, d);
  }
}

static const mm_span *span_of(const mm_batch *batch, size_t row) {
  const mm_span *s = batch->span;
  while (row - s->first >= s->count) s++;
  return s;
}

static bool attend_row(void *ctx, size_t t, unsigned worker, mm_err *err) {
  (void)err;
  const gqa *j = ctx;
  const mm_backend *b = j->b;
  uint32_t d = b->d, group = b->heads / b->kv_heads;
  const mm_span *s = span_of(b->batch, t);
  const float *q = mm_cpu_row(j->qkv, t);
  float *o = mm_cpu_row(j->o, t);
  if (s->slot < 0) {
    memset(o, 0, j->o.width * sizeof *o);
    return true;
  }
  uint32_t seen = s->pos + (uint32_t)(t - s->first) + 1;
  for (uint32_t h = 0; h < b->heads; h++)
    attend(j, o + (size_t)h * d, q + (size_t)h * d, (uint32_t)s->slot, h / group, seen, b->scratch[worker]);
  return true;
}

void mm_cpu_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  gqa j = {b, &b->cache[layer], o, qkv};
  if (q_norm) qk_norm(b, qkv, q_norm, k_norm);
  uint64_t seen = 0;
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    if (s->slot < 0) continue;
    for (uint32_t t = 0; t < s->count; t++)
      store_row(b, j.cache, mm_cpu_row(qkv, s->first + t), s->first + t, (uint32_t)s->slot, s->pos + t);
    seen += (uint64_t)s->count * (s->pos + s->count);
  }
  mm_cpu_each(b, b->batch->tokens, seen * b->heads * b->d * 2, attend_row, &j);
}
