/* The engine: one thread per tensor-parallel rank, each with its own weights view and backend; every step is handed to all of
 * them and ends when all have finished. */
#include "runtime/engine.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct rank {
  mm_engine *engine;
  uint32_t index;
  pthread_t thread;
  mm_rank_weights weights;
  mm_forward forward;
  float *logits; /* [out_count, vocab_rows] of the current step */
  size_t logits_cap;
  mm_err err;
} rank;

struct mm_engine {
  const mm_shards *shards;
  const mm_model *model;
  mm_engine_config config;
  mm_comm *comm;
  bool lightning;       /* some layer keeps a state that cannot go back */
  uint32_t *held;       /* [slots] tokens each slot's caches hold */
  uint64_t *last_batch; /* [slots] number of the last batch that named the slot */
  uint64_t batches;

  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t task; /* counts what was handed to the ranks; the first task is opening */
  uint32_t busy; /* ranks that have not finished it */
  bool stop;
  const mm_batch *batch;
  float *logits;

  uint32_t started; /* threads */
  rank rank[];      /* [tp] */
};

static bool open_rank(rank *r, mm_err *err) {
  mm_engine *e = r->engine;
  if (!mm_bind(&r->weights, e->shards, r->index, err)) return false;
  mm_backend_config c = {e->model, &r->weights, e->config.limits, e->comm, e->config.threads, e->config.act_quant, e->config.calibration};
  return mm_forward_open(&r->forward, e->config.ops, &c, err);
}

/* One batch on one rank; its columns of the logits go to their place in the caller's matrix. */
static bool step_rank(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const mm_rank_weights *w = &r->weights;
  size_t rows = e->batch->out_count, vocab = e->model->vocab;
  if (!mm_grow((void **)&r->logits, &r->logits_cap, rows * w->vocab_rows, sizeof *r->logits, err)) return false;
  if (!mm_forward_step(&r->forward, e->batch, r->logits, err)) return false;
  if (w->vocab_first >= vocab) return true;
  size_t columns = mm_min(w->vocab_rows, vocab - w->vocab_first);
  for (size_t i = 0; i < rows; i++)
    memcpy(e->logits + i * vocab + w->vocab_first, r->logits + i * w->vocab_rows, columns * sizeof *r->logits);
  return true;
}

static void *rank_main(void *arg) {
  rank *r = arg;
  mm_engine *e = r->engine;
  uint64_t task = 0;
  pthread_mutex_lock(&e->lock);
  while (!e->stop) {
    if (e->task == task) {
      pthread_cond_wait(&e->changed, &e->lock);
      continue;
    }
    task = e->task;
    pthread_mutex_unlock(&e->lock);
    bool done = task == 1 ? open_rank(r, &r->err) : step_rank(r, &r->err);
    if (!done) mm_comm_break(e->comm);
    pthread_mutex_lock(&e->lock);
    if (--e->busy == 0) pthread_cond_broadcast(&e->changed);
  }
  pthread_mutex_unlock(&e->lock);
  mm_forward_close(&r->forward);
  return NULL;
}

/* Hands the next task to every rank and waits for all; the lowest failing rank's error is the task's. */
static bool run_task(mm_engine *e, mm_err *err) {
  pthread_mutex_lock(&e->lock);
  for (uint32_t r = 0; r < e->started; r++) e->rank[r].err.status = MM_OK;
  mm_comm_mend(e->comm);
  e->task++;
  e->busy = e->started;
  pthread_cond_broadcast(&e->changed);
  while (e->busy) pthread_cond_wait(&e->changed, &e->lock);
  pthread_mutex_unlock(&e->lock);
  for (uint32_t r = 0; r < e->started; r++) {
    if (e->rank[r].err.status == MM_OK) continue;
    if (err && err->status == MM_OK) *err = e->rank[r].err;
    return false;
  }
  return true;
}

static bool check_config(const mm_model *m, const mm_engine_config *c, mm_err *err) {
  const mm_limits *l = &c->limits;
  if (c->act_quant && !c->ops->act_quant)
    return mm_fail(err, MM_UNSUPPORTED, "E_ACT_QUANT", mm_at(NULL, NULL),
                   "found activation quantisation on for %s, which computes with activations as they are; expected off", c->ops->name);
  if (l->max_tokens && l->slots && l->max_positions && c->threads && l->max_positions <= m->max_positions) return true;
  return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL),
                 "found %u tokens a step, %u slots, %u positions, %u threads; expected at least 1 of each and at most %llu positions",
                 l->max_tokens, l->slots, l->max_positions, c->threads, (unsigned long long)m->max_positions);
}

static bool start_ranks(mm_engine *e, mm_err *err) {
  for (uint32_t tp = e->shards->pack.tp; e->started < tp; e->started++) {
    rank *r = &e->rank[e->started];
    *r = (rank){.engine = e, .index = e->started};
    int failed = pthread_create(&r->thread, NULL, rank_main, r);
    if (failed)
      return mm_fail(err, MM_LIMIT, "E_THREADS", mm_at(NULL, NULL), "started %u of %u rank threads: %s", e->started, tp, strerror(failed));
  }
  return run_task(e, err);
}

mm_engine *mm_engine_open(const mm_shards *shards, const mm_engine_config *c, mm_err *err) {
  const mm_model *m = &shards->pack.model;
  uint32_t tp = shards->pack.tp;
  if (!check_config(m, c, err)) return NULL;
  mm_engine *e = mm_calloc(1, sizeof *e + tp * sizeof e->rank[0], err);
  if (!e) return NULL;
  e->shards = shards;
  e->model = m;
  e->config = *c;
  for (uint32_t l = 0; l < m->layers; l++) e->lightning |= m->attn[l] == MM_ATTN_LIGHTNING;
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->changed, NULL);
  e->comm = mm_comm_open(tp, err);
  e->held = mm_calloc(c->limits.slots, sizeof *e->held, err);
  e->last_batch = mm_calloc(c->limits.slots, sizeof *e->last_batch, err);
  if (e->comm && e->held && e->last_batch && start_ranks(e, err)) return e;
  mm_engine_close(e);
  return NULL;
}

void mm_engine_close(mm_engine *e) {
  if (!e) return;
  pthread_mutex_lock(&e->lock);
  e->stop = true;
  pthread_cond_broadcast(&e->changed);
  pthread_mutex_unlock(&e->lock);
  for (uint32_t r = 0; r < e->started; r++) pthread_join(e->rank[r].thread, NULL);
  for (uint32_t r = 0; r < e->started; r++) {
    mm_bind_close(&e->rank[r].weights);
    free(e->rank[r].logits);
  }
  pthread_cond_destroy(&e->changed);
  pthread_mutex_destroy(&e->lock);
  mm_comm_close(e->comm);
  free(e->held);
  free(e->last_batch);
  free(e);
}

const mm_model *mm_engine_model(const mm_engine *e) { return e->model; }

static bool refuse(mm_err *err, const char *what, uint64_t index, int64_t found, const char *expected, uint64_t limit) {
  return mm_fail(err, MM_USAGE, "E_BATCH", mm_at(NULL, NULL), "%s %llu: found %lld, expected %s %llu", what, (unsigned long long)index,
                 (long long)found, expected, (unsigned long long)limit);
}

static bool check_span(mm_engine *e, const mm_batch *b, uint32_t i, uint32_t first, mm_err *err) {
  const mm_span *s = &b->span[i];
  const mm_limits *limits = &e->config.limits;
  if (s->first != first) return refuse(err, "first row of span", i, s->first, "row", first);
  if (s->count == 0 || s->count > b->tokens - first) return refuse(err, "rows of span", i, s->count, "1 …", b->tokens - first);
  if (s->slot == -1) return true;
  if (s->slot < 0 || (uint32_t)s->slot >= limits->slots) return refuse(err, "slot of span", i, s->slot, "less than", limits->slots);
  if ((uint64_t)s->pos + s->count > limits->max_positions)
    return refuse(err, "last position of span", i, (int64_t)s->pos + s->count, "at most", limits->max_positions);
  uint32_t held = e->held[s->slot];
  if (e->lightning ? s->pos != 0 && s->pos != held : s->pos > held)
    return refuse(err, "position of span", i, s->pos, e->lightning ? "0 or" : "at most", held);
  if (e->last_batch[s->slot] == e->batches) return refuse(err, "slot of span", i, s->slot, "one span for each slot, of", limits->slots);
  e->last_batch[s->slot] = e->batches;
  return true;
}

static bool check_batch(mm_engine *e, const mm_batch *b, mm_err *err) {
  e->batches++;
  if (b->tokens > e->config.limits.max_tokens)
    return refuse(err, "rows of batch", e->batches, b->tokens, "at most", e->config.limits.max_tokens);
  uint32_t first = 0;
  for (uint32_t i = 0; i < b->span_count; i++) {
    if (!check_span(e, b, i, first, err)) return false;
    first += b->span[i].count;
  }
  if (first != b->tokens) return refuse(err, "rows in spans of batch", e->batches, first, "all", b->tokens);
  for (uint32_t i = 0; i < b->tokens; i++)
    if (b->id[i] < 0 || (uint32_t)b->id[i] >= e->model->vocab) return refuse(err, "id of row", i, b->id[i], "less than", e->model->vocab);
  for (uint32_t i = 0; i < b->out_count; i++)
    if (b->out[i] >= b->tokens || (i && b->out[i] <= b->out[i - 1]))
      return refuse(err, "output row", i, b->out[i], "ascending and less than", b->tokens);
  return true;
}

bool mm_engine_step(mm_engine *e, const mm_batch *batch, float *logits, mm_err *err) {
  if (!check_batch(e, batch, err)) return false;
  e->batch = batch;
  e->logits = logits;
  bool done = run_task(e, err);
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot >= 0) e->held[s->slot] = done ? s->pos + s->count : 0;
  }
  if (!done) return false;
  const mm_pack *pack = &e->shards->pack;
  for (size_t i = 0; i < batch->out_count; i++)
    for (size_t j = 0; j < pack->dead_rows; j++) logits[i * e->model->vocab + pack->dead_row[j]] = -INFINITY;
  return true;
}
