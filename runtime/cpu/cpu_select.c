/* The CPU backend's index branch of sparse attention: index keys into their cache, and the blocks that each row reads. */
#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_backend.h"

typedef struct selection {
  mm_backend *b;
  const mm_cpu_cache *cache;
  mm_act q;
} selection;

/* The blocks with the largest scores so far, those first; equal ones in order. */
typedef struct best {
  uint32_t count, most;
  float score[MM_MAX_BLOCKS];
  uint32_t block[MM_MAX_BLOCKS];
} best;

/* Blocks come in order, so one that is equal to the last of a full list stays out. */
static void offer(best *x, uint32_t block, float score) {
  uint32_t i = x->count;
  if (x->most == 0 || (i == x->most && !(score > x->score[i - 1]))) return;
  if (i < x->most)
    x->count++;
  else
    i--;
  for (; i > 0 && score > x->score[i - 1]; i--) x->score[i] = x->score[i - 1], x->block[i] = x->block[i - 1];
  x->score[i] = score, x->block[i] = block;
}

/* A key in e4m3: its scale, which is its largest magnitude / 448, then its numbers over the scale. One that is no number stays none. */
static void store_key(char *to, const float *x, uint32_t n) {
  float top = 1e-30f; /* as the CUDA backend's least */
  for (uint32_t i = 0; i < n; i++) top = fmaxf(top, fabsf(x[i]));
  const float scale = top / 448.0f, inverse = 448.0f / top;
  memcpy(to, &scale, sizeof scale);
  for (uint32_t i = 0; i < n; i++) to[sizeof scale + i] = (char)mm_f32_to_e4m3(x[i] * inverse);
}

/* q·k of a key in e4m3: the product with its numbers, times its scale. */
static float key_score(const mm_backend *b, const float *q, const char *key) {
  float scale;
  memcpy(&scale, key, sizeof scale);
  return b->vectors->dot_e4m3(q, (const uint8_t *)key + sizeof scale, b->c.model->index_dim) * 256 * scale;
}

/* The largest q·k of positions [from, end), all of them before the row; a score that is no number counts as none. */
static float block_score(const selection *j, const mm_span *s, const float *q, uint32_t from, uint32_t end) {
  const mm_backend *b = j->b;
  float most = -INFINITY;
  for (uint32_t at = from; at < end; at++) {
    const char *k = mm_cpu_index_key(b, j->cache, mm_cpu_page(b, (uint32_t)s->slot, at / MM_PAGE), at % MM_PAGE);
    const uint32_t n = b->c.model->index_dim;
    const float score = b->c.options.index_fp8 ? key_score(b, q, k) : mm_cpu_dot(q, (const float *)(const void *)k, n);
    if (score > most) most = score;
  }
  return most;
}

/* The blocks of one row at position pos and one index head, ascending; how many. */
static uint32_t choose_blocks(const selection *j, const mm_span *s, const float *q, uint32_t pos, uint32_t *out) {
  const mm_model *m = j->b->c.model;
  const uint32_t size = m->index_block, all = pos / size + 1, count = (uint32_t)mm_min(m->index_top_k, all);
  const uint32_t forced = all > count ? m->index_local : count, others = all - forced;
  best x = {.most = count - forced};
  for (uint32_t i = 0; x.most && i < others; i++) offer(&x, i, block_score(j, s, q, i * size, (i + 1) * size));
  for (uint32_t i = 0; i < x.count; i++) {
    uint32_t at = i;
    for (; at > 0 && out[at - 1] > x.block[i]; at--) out[at] = out[at - 1];
    out[at] = x.block[i];
  }
  for (uint32_t i = 0; i < forced; i++) out[x.count + i] = others + i;
  return count;
}

static const mm_span *span_of(const mm_batch *batch, uint32_t row) {
  const mm_span *s = batch->span;
  while (row >= s->first + s->count) s++;
  return s;
}

static bool choose_row(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const selection *j = ctx;
  mm_backend *b = j->b;
  const uint32_t row = (uint32_t)(item / b->index_heads), head = (uint32_t)(item % b->index_heads);
  const mm_span *s = span_of(b->batch, row);
  const float *q = mm_cpu_row(j->q, row) + (size_t)head * b->c.model->index_dim;
  b->blocks[item] = s->slot < 0 ? 0 : choose_blocks(j, s, q, s->pos + (row - s->first), b->block + item * b->c.model->index_top_k);
  return true;
}

static void norm_and_turn(mm_backend *b, mm_act x, uint32_t heads, const mm_packed *norm) {
  const mm_model *m = b->c.model;
  const float *weight = mm_cpu_norm_vector(b, norm);
  const uint32_t half = m->rotary_dim / 2;
  for (uint32_t t = 0; t < b->batch->tokens; t++) {
    float *row = mm_cpu_row(x, t);
    mm_cpu_norm_heads(row, heads, m->index_dim, weight, m->norm_eps);
    for (uint32_t h = 0; h < heads; h++) mm_cpu_turn_head(row + (size_t)h * m->index_dim, b->rope + (size_t)t * 2 * half, half);
  }
}

void mm_cpu_select(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm) {
  const mm_model *m = b->c.model;
  selection j = {.b = b, .cache = &b->cache[layer], .q = q};
  norm_and_turn(b, q, b->index_heads, q_norm);
  norm_and_turn(b, k, 1, k_norm);
  uint64_t seen = 0;
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t t = 0; s->slot >= 0 && t < s->count; t++) {
      const uint32_t pos = s->pos + t, page = mm_cpu_page(b, (uint32_t)s->slot, pos / MM_PAGE);
      char *const key = mm_cpu_index_key(b, j.cache, page, pos % MM_PAGE);
      const float *const x = mm_cpu_row(k, s->first + t);
      if (b->c.options.index_fp8)
        store_key(key, x, m->index_dim);
      else
        memcpy(key, x, m->index_dim * sizeof *x);
    }
    if (s->slot >= 0) seen += (uint64_t)s->count * (s->pos + s->count);
  }
  mm_cpu_each(b, (size_t)b->batch->tokens * b->index_heads, seen * b->index_heads * m->index_dim, choose_row, &j);
}
