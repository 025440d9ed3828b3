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

/* How many blocks a row at position pos reads: the last ones whatever their scores, and some of the others before them. */
typedef struct reach {
  uint32_t count, forced, others;
} reach;
static reach reach_of(const mm_model *m, uint32_t pos) {
  const uint32_t all = pos / m->index_block + 1, count = (uint32_t)mm_min(m->index_top_k, all);
  const uint32_t forced = all > count ? m->index_local : count;
  return (reach){count, forced, all - forced};
}

/* The best of a row's blocks first, first + step, … that have to be scored. */
static void find_best(best *x, const selection *j, const mm_span *s, const float *q, reach r, uint32_t first, uint32_t step) {
  const uint32_t size = j->b->c.model->index_block;
  *x = (best){.most = r.count - r.forced};
  for (uint32_t i = first; x->most && i < r.others; i += step) offer(x, i, block_score(j, s, q, i * size, (i + 1) * size));
}

/* The blocks of one row and one index head, ascending: the best, then the last; how many. */
static uint32_t put_blocks(uint32_t *out, const best *x, reach r) {
  for (uint32_t i = 0; i < x->count; i++) {
    uint32_t at = i;
    for (; at > 0 && out[at - 1] > x->block[i]; at--) out[at] = out[at - 1];
    out[at] = x->block[i];
  }
  for (uint32_t i = 0; i < r.forced; i++) out[x->count + i] = r.others + i;
  return x->count + r.forced;
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
  const reach r = reach_of(b->c.model, s->pos + (row - s->first));
  best x;
  b->blocks[item] = 0;
  if (s->slot < 0) return true;
  find_best(&x, j, s, q, r, 0, 1);
  b->blocks[item] = put_blocks(b->block + item * b->c.model->index_top_k, &x, r);
  return true;
}

/* ---- a scan that is split over the ranks of the group ---- */

static bool is_split(const mm_backend *b, const mm_span *s, uint32_t row) {
  return s->slot >= 0 && s->pos + (row - s->first) >= b->c.options.index_split;
}

/* A row and one of the heads of all ranks: the best of this rank's blocks. Rows that are not split have none. */
static bool scan_part(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const selection *j = ctx;
  const mm_backend *b = j->b;
  const mm_model *m = b->c.model;
  const uint32_t row = (uint32_t)(item / m->index_heads), head = (uint32_t)(item % m->index_heads), each = b->index_heads;
  const uint32_t owners = b->ranks.count * each / m->index_heads;
  const mm_span *s = span_of(b->batch, row);
  mm_cpu_candidate *to = b->groups.index_split.own + item * m->index_top_k;
  best x = {0};
  if (is_split(b, s, row)) {
    const size_t rank = (size_t)head / each * owners;
    const float *q = b->groups.index_split.q + ((rank * b->batch->tokens + row) * each + head % each) * m->index_dim;
    find_best(&x, j, s, q, reach_of(m, s->pos + (row - s->first)), b->ranks.rank, b->ranks.count);
  }
  for (uint32_t i = 0; i < m->index_top_k; i++)
    to[i] = i < x.count ? (mm_cpu_candidate){x.score[i], x.block[i]} : (mm_cpu_candidate){-INFINITY, UINT32_MAX};
  return true;
}

static bool is_better(mm_cpu_candidate a, mm_cpu_candidate b) { return a.score > b.score || (a.score == b.score && a.block < b.block); }

/* A row and one of this rank's heads: the best of all ranks' candidates, ties to the lower block; of rows that are not split, all blocks.
 */
static bool merge_parts(void *ctx, size_t item, unsigned worker, mm_err *err) {
  const selection *j = ctx;
  mm_backend *b = j->b;
  const mm_model *m = b->c.model;
  const uint32_t row = (uint32_t)(item / b->index_heads), owners = b->ranks.count * b->index_heads / m->index_heads;
  const uint32_t head = b->ranks.rank / owners * b->index_heads + (uint32_t)(item % b->index_heads);
  const mm_span *s = span_of(b->batch, row);
  if (!is_split(b, s, row)) return choose_row(ctx, item, worker, err);
  const reach r = reach_of(m, s->pos + (row - s->first));
  const uint32_t most = r.count - r.forced;
  mm_cpu_candidate list[MM_MAX_BLOCKS];
  best x = {0};
  for (size_t k = 0; k < b->ranks.count; k++) {
    const mm_cpu_candidate *from = b->groups.index_split.all + ((k * b->batch->tokens + row) * m->index_heads + head) * m->index_top_k;
    for (uint32_t i = 0; i < most && from[i].block < r.others; i++) {
      if (x.count == most && !is_better(from[i], list[most - 1])) break;
      uint32_t at = x.count < most ? x.count++ : most - 1;
      for (; at > 0 && is_better(from[i], list[at - 1]); at--) list[at] = list[at - 1];
      list[at] = from[i];
    }
  }
  for (uint32_t i = 0; i < x.count; i++) x.block[i] = list[i].block;
  b->blocks[item] = put_blocks(b->block + item * m->index_top_k, &x, r);
  return true;
}

/* By all ranks of the group, in which some rows are split: queries of all, then candidates of all. */
static void select_split(selection *j, uint64_t work) {
  mm_backend *b = j->b;
  const mm_model *m = b->c.model;
  const mm_cpu_index_split *x = &b->groups.index_split;
  const size_t tokens = b->batch->tokens, candidates = tokens * m->index_heads * m->index_top_k;
  bool here = mm_comm_all_gather(b->ranks.comm, b->ranks.rank, j->q.data, x->q, tokens * j->q.width * sizeof *x->q);
  if (here) mm_cpu_each(b, tokens * m->index_heads, work, scan_part, j);
  here = here && mm_comm_all_gather(b->ranks.comm, b->ranks.rank, x->own, x->all, candidates * sizeof *x->all);
  if (here)
    mm_cpu_each(b, tokens * b->index_heads, work, merge_parts, j);
  else
    memset(b->blocks, 0, tokens * b->index_heads * sizeof *b->blocks); /* another rank failed, and says so */
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
  bool split = false;
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
    split = split || (b->groups.index_split.q && s->count && is_split(b, s, s->first + s->count - 1));
  }
  if (split)
    select_split(&j, seen * b->index_heads * m->index_dim);
  else
    mm_cpu_each(b, (size_t)b->batch->tokens * b->index_heads, seen * b->index_heads * m->index_dim, choose_row, &j);
}
