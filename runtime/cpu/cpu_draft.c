/* The CPU backend's part of a draft: its cells, which depend on the tokens before them alone, attention of a DFlash draft's blocks, whose
 * rows see one another, and of an EAGLE-3 draft's chains, whose rows come one a pass. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/cpu/cpu_backend.h"

/* Bytes of k, or of v, of one layer. */
static size_t cache_bytes(const mm_backend *b, uint32_t pages) {
  const mm_dflash_config *c = &b->c.draft->c;
  return (size_t)pages * c->kv_heads * MM_PAGE * c->head_dim * sizeof(float);
}

static size_t hidden_bytes(const mm_backend *b) { return (size_t)b->draft.pages * MM_PAGE * b->c.draft->c.hidden * sizeof(float); }

/* What EAGLE-3 alone has. */
static bool open_eagle(mm_backend *b, mm_err *err) {
  const mm_dflash_config *c = &b->c.draft->c;
  if (c->kind != MM_DRAFT_EAGLE3) return true;
  return (b->draft.hidden = mm_cpu_map(hidden_bytes(b), err)) &&
         (b->draft.chain = mm_calloc((size_t)b->c.limits.slots * MM_EAGLE_CHAIN * 2 * c->kv_heads * c->head_dim, sizeof(float), err));
}

bool mm_cpu_draft_open(mm_backend *b, mm_err *err) {
  if (!b->c.draft) return true;
  const mm_dflash_config *c = &b->c.draft->c;
  mm_cpu_draft *d = &b->draft;
  if (!mm_limits_pages(&b->c.limits, &d->pages, err)) return false;
  for (uint32_t l = 0; l < c->layers; l++)
    if (!(d->k[l] = mm_cpu_map(cache_bytes(b, d->pages), err)) || !(d->v[l] = mm_cpu_map(cache_bytes(b, d->pages), err))) return false;
  d->score_floats = (size_t)b->c.limits.max_positions + MM_DFLASH_BLOCK;
  return (d->turn = mm_calloc((size_t)b->c.limits.max_tokens * c->head_dim, sizeof *d->turn, err)) &&
         (d->score = mm_calloc(b->c.options.threads * d->score_floats, sizeof *d->score, err)) && open_eagle(b, err);
}

void mm_cpu_draft_close(mm_backend *b) {
  mm_cpu_draft *d = &b->draft;
  for (uint32_t l = 0; l < MM_DFLASH_LAYERS; l++) {
    if (d->k[l]) munmap(d->k[l], cache_bytes(b, d->pages));
    if (d->v[l]) munmap(d->v[l], cache_bytes(b, d->pages));
  }
  if (d->hidden) munmap(d->hidden, hidden_bytes(b));
  MM_FREE(d->turn, d->score, d->chain);
}

/* Token `at` of a page under one kv head. */
static size_t cell_of(const mm_dflash_config *c, uint32_t page, uint32_t head, uint32_t at) {
  return (((size_t)page * c->kv_heads + head) * MM_PAGE + at) * c->head_dim;
}

static float *hidden_of(const mm_backend *b, uint32_t page, uint32_t at) {
  return b->draft.hidden + ((size_t)page * MM_PAGE + at) * b->c.draft->c.hidden;
}

void mm_cpu_draft_copy(const mm_backend *b, const mm_paging *p) {
  if (!b->c.draft) return;
  const mm_dflash_config *c = &b->c.draft->c;
  for (uint32_t i = 0; i < p->copies; i++)
    for (uint32_t l = 0; l < c->layers; l++)
      for (uint32_t h = 0; h < c->kv_heads; h++) {
        const size_t from = cell_of(c, p->copy[i].from, h, 0), to = cell_of(c, p->copy[i].to, h, 0);
        const size_t bytes = (size_t)p->copy[i].tokens * c->head_dim * sizeof(float);
        memcpy(b->draft.k[l] + to, b->draft.k[l] + from, bytes);
        memcpy(b->draft.v[l] + to, b->draft.v[l] + from, bytes);
      }
  for (uint32_t i = 0; b->draft.hidden && i < p->copies; i++)
    memcpy(hidden_of(b, p->copy[i].to, 0), hidden_of(b, p->copy[i].from, 0), (size_t)p->copy[i].tokens * c->hidden * sizeof(float));
}

void mm_cpu_concat(mm_backend *b, mm_act y, const mm_act *x, uint32_t count) {
  for (uint32_t t = 0; t < b->batch->tokens; t++) {
    float *to = mm_cpu_row(y, t);
    for (uint32_t i = 0; i < count; to += x[i++].width) memcpy(to, mm_cpu_row(x[i], t), x[i].width * sizeof *to);
  }
}

/* Cosines and sines of every row: all columns are turned, by the draft's own theta. */
static void turn_rows(mm_backend *b) {
  const mm_dflash_config *c = &b->c.draft->c;
  const uint32_t half = c->head_dim / 2;
  for (uint32_t i = 0; i < b->batch->span_count; i++)
    for (uint32_t t = 0; t < b->batch->span[i].count; t++) {
      float *turn = b->draft.turn + (size_t)(b->batch->span[i].first + t) * c->head_dim;
      for (uint32_t j = 0; j < half; j++) {
        const float angle = (float)(b->batch->span[i].pos + t) * (float)pow(c->rope_theta, -(double)j / half);
        turn[j] = cosf(angle), turn[half + j] = sinf(angle);
      }
    }
}

/* Heads of a row: normalised each by itself, but not with weight NULL, then turned. */
static void ready_heads(const mm_backend *b, float *x, uint32_t heads, const float *weight, uint32_t row) {
  const mm_dflash_config *c = &b->c.draft->c;
  if (weight) mm_cpu_norm_heads(x, heads, c->head_dim, weight, c->norm_eps);
  for (uint32_t h = 0; h < heads; h++)
    mm_cpu_turn_head(x + (size_t)h * c->head_dim, b->draft.turn + (size_t)row * c->head_dim, c->head_dim / 2);
}

void mm_cpu_draft_store(mm_backend *b, uint32_t layer, mm_act kv, const mm_packed *k_norm) {
  const mm_dflash_config *c = &b->c.draft->c;
  const float *weight = k_norm ? mm_cpu_vector(b, k_norm) : NULL;
  const size_t size = c->head_dim;
  if (!layer) turn_rows(b);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t t = 0; s->slot >= 0 && t < s->count; t++) {
      float *k = mm_cpu_row(kv, s->first + t), *v = k + c->kv_heads * size;
      const uint32_t pos = s->pos + t, page = mm_cpu_page(b, (uint32_t)s->slot, pos / MM_PAGE);
      if (c->kind == MM_DRAFT_EAGLE3 && pos == 0) continue;
      ready_heads(b, k, c->kv_heads, weight, s->first + t);
      for (uint32_t h = 0; h < c->kv_heads; h++) {
        const size_t at = cell_of(c, page, h, pos % MM_PAGE);
        memcpy(b->draft.k[layer] + at, k + h * size, size * sizeof *k);
        memcpy(b->draft.v[layer] + at, v + h * size, size * sizeof *v);
      }
    }
  }
}

/* Rows of a block or of a chain. */
typedef struct block block;
struct block {
  mm_backend *b;
  uint32_t layer, pass; /* pass: of a chain */
  mm_act o, qkv;
  /* Key or value p that the rows of a span read. */
  const float *(*cell)(const block *j, const mm_span *s, uint32_t p, uint32_t head, bool value);
};

/* Of the cache, or of the block. */
static const float *block_cell(const block *j, const mm_span *s, uint32_t p, uint32_t head, bool value) {
  const mm_dflash_config *c = &j->b->c.draft->c;
  if (p >= s->pos) return mm_cpu_row(j->qkv, s->first + p - s->pos) + (size_t)(c->heads + head + (value ? c->kv_heads : 0)) * c->head_dim;
  const float *cache = value ? j->b->draft.v[j->layer] : j->b->draft.k[j->layer];
  return cache + cell_of(c, mm_cpu_page(j->b, (uint32_t)s->slot, p / MM_PAGE), head, p % MM_PAGE);
}

/* One head of one row: softmax over keys [first, end). */
static void attend(const block *j, const mm_span *s, uint32_t row, uint32_t head, uint32_t first, uint32_t end, float *score) {
  const mm_dflash_config *c = &j->b->c.draft->c;
  const uint32_t kv_head = head / (c->heads / c->kv_heads);
  const float *q = mm_cpu_row(j->qkv, s->first + row) + (size_t)head * c->head_dim, scale = 1.0f / sqrtf((float)c->head_dim);
  float *o = mm_cpu_row(j->o, s->first + row) + (size_t)head * c->head_dim, top = -INFINITY, sum = 0;
  for (uint32_t p = first; p < end; p++) {
    score[p - first] = scale * mm_cpu_dot(q, j->cell(j, s, p, kv_head, false), c->head_dim);
    top = fmaxf(top, score[p - first]);
  }
  memset(o, 0, c->head_dim * sizeof *o);
  for (uint32_t p = first; p < end; p++) {
    const float e = expf(score[p - first] - top), *v = j->cell(j, s, p, kv_head, true);
    sum += e;
    for (uint32_t i = 0; i < c->head_dim; i++) o[i] += e * v[i];
  }
  for (uint32_t i = 0; i < c->head_dim; i++) o[i] /= sum;
}

static bool attend_rows(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const block *j = ctx;
  const mm_dflash_config *c = &j->b->c.draft->c;
  const mm_span *s = &j->b->batch->span[item / c->heads];
  for (uint32_t row = 0; row < s->count; row++) {
    const uint32_t pos = s->pos + row, window = c->window[j->layer];
    const uint32_t first = window && pos + 1 > window ? pos + 1 - window : 0, end = c->causal[j->layer] ? pos + 1 : s->pos + s->count;
    attend(j, s, row, (uint32_t)(item % c->heads), first, end, j->b->draft.score + worker * j->b->draft.score_floats);
  }
  return true;
}

void mm_cpu_draft_attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  const mm_dflash_config *c = &b->c.draft->c;
  block j = {.b = b, .layer = layer, .o = o, .qkv = qkv, .cell = block_cell};
  uint64_t seen = 0;
  if (!layer) turn_rows(b);
  const float *weight = mm_cpu_vector(b, q_norm);
  for (uint32_t t = 0; t < b->batch->tokens; t++) ready_heads(b, mm_cpu_row(qkv, t), c->heads, weight, t);
  weight = mm_cpu_vector(b, k_norm);
  for (uint32_t t = 0; t < b->batch->tokens; t++)
    ready_heads(b, mm_cpu_row(qkv, t) + (size_t)c->heads * c->head_dim, c->kv_heads, weight, t);
  for (uint32_t i = 0; i < b->batch->span_count; i++) seen += (uint64_t)b->batch->span[i].count * (b->batch->span[i].pos + MM_DFLASH_BLOCK);
  mm_cpu_each(b, (size_t)b->batch->span_count * c->heads, seen * c->heads * c->head_dim * 2, attend_rows, &j);
}

/* ---- EAGLE-3 ---- */

void mm_cpu_eagle_keep(mm_backend *b, mm_act x) {
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t t = 0; s->slot >= 0 && t < s->count; t++) {
      const uint32_t pos = s->pos + t, page = mm_cpu_page(b, (uint32_t)s->slot, pos / MM_PAGE);
      memcpy(hidden_of(b, page, pos % MM_PAGE), mm_cpu_row(x, s->first + t), x.width * sizeof(float));
    }
  }
}

void mm_cpu_eagle_before(mm_backend *b, mm_act y) {
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t t = 0; t < s->count; t++) {
      const uint32_t pos = s->pos + t;
      float *to = mm_cpu_row(y, s->first + t);
      if (s->slot < 0 || pos == 0)
        memset(to, 0, y.width * sizeof *to);
      else
        memcpy(to, hidden_of(b, mm_cpu_page(b, (uint32_t)s->slot, (pos - 1) / MM_PAGE), (pos - 1) % MM_PAGE), y.width * sizeof *to);
    }
  }
}

/* Keys, then values, of row `pass` of a slot's chain. */
static float *chain_row(const mm_backend *b, uint32_t slot, uint32_t pass) {
  const mm_dflash_config *c = &b->c.draft->c;
  return b->draft.chain + ((size_t)slot * MM_EAGLE_CHAIN + pass) * 2 * c->kv_heads * c->head_dim;
}

/* Cells from position 1 on, then rows of the chain. */
static const float *chain_cell(const block *j, const mm_span *s, uint32_t p, uint32_t head, bool value) {
  const mm_dflash_config *c = &j->b->c.draft->c;
  const uint32_t cells = s->pos - j->pass - 1;
  if (p >= cells) return chain_row(j->b, (uint32_t)s->slot, p - cells) + (size_t)(head + (value ? c->kv_heads : 0)) * c->head_dim;
  const float *cache = value ? j->b->draft.v[0] : j->b->draft.k[0];
  return cache + cell_of(c, mm_cpu_page(j->b, (uint32_t)s->slot, (p + 1) / MM_PAGE), head, (p + 1) % MM_PAGE);
}

static bool attend_chain(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const block *j = ctx;
  const uint32_t heads = j->b->c.draft->c.heads;
  const mm_span *s = &j->b->batch->span[item / heads];
  attend(j, s, 0, (uint32_t)(item % heads), 0, s->pos, j->b->draft.score + worker * j->b->draft.score_floats);
  return true;
}

void mm_cpu_eagle_chain(mm_backend *b, uint32_t pass, mm_act o, mm_act qkv) {
  const mm_dflash_config *c = &b->c.draft->c;
  const size_t heads = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;
  block j = {.b = b, .pass = pass, .o = o, .qkv = qkv, .cell = chain_cell};
  uint64_t seen = 0;
  turn_rows(b);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    float *row = mm_cpu_row(qkv, s->first);
    ready_heads(b, row, c->heads + c->kv_heads, NULL, s->first);
    memcpy(chain_row(b, (uint32_t)s->slot, pass), row + heads, 2 * kv * sizeof *row);
    seen += s->pos;
  }
  mm_cpu_each(b, (size_t)b->batch->span_count * c->heads, seen * c->heads * c->head_dim * 2, attend_chain, &j);
}
