/* The engine: one thread per tensor-parallel rank, each with its own weights view and backend; every step is handed to all of
 * them and ends when all have finished. */
#include "runtime/engine.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef enum work { OPEN, STEP, COLLECT, HIDDEN, LOAD, STATE_COPY, STATE_SAVE, STATE_LOAD } work;

typedef struct slot_state {
  uint32_t held;       /* tokens that its caches hold */
  uint64_t last_batch; /* number of the last batch that named it */
  bool chose;          /* some step chose a token after its last row */
  int32_t chosen;      /* that token, where the engine chooses */
} slot_state;

/* The choices of a step that the engine itself made, until they are collected. */
typedef struct choices {
  int32_t *id;
  size_t cap;
} choices;

typedef struct rank {
  mm_engine *engine;
  uint32_t index;
  pthread_t thread;
  mm_rank_weights weights;
  mm_forward forward;
  float *logits; /* [out_count, vocab_rows] of the current step */
  size_t logits_cap;
  uint64_t state_at, state_bytes; /* its part of a slot's lightning states */
  mm_err err;
} rank;

struct mm_engine {
  const mm_shards *shards;
  const mm_model *model;
  mm_engine_config config;
  mm_comm *comm;
  bool lightning;   /* some layer keeps a state that cannot go back */
  bool *never;      /* [vocab] ids that are not to be chosen */
  slot_state *slot; /* [slots] */
  uint64_t batches;
  mm_pages *pages; /* NULL where the backend gives each slot its own */
  mm_paging paging;
  mm_page_want *want; /* [slots] of a step */
  mm_page_copy *copy; /* the same */

  bool device_chooses;
  uint64_t queued, collected;     /* batches with sampling, ever */
  uint32_t outstanding[MM_QUEUE]; /* out_count of queued batch i at i % MM_QUEUE */
  choices choices[MM_QUEUE];      /* the same; unused where the device chooses, like the rest: */
  mm_sampler *sampler;
  float *choice_logits; /* [out_count, vocab] */
  int32_t *choice_id;   /* [T] of the step, none MM_ID_CHOSEN */
  size_t choice_logits_cap, choice_id_cap;

  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t task; /* counts what was handed to the ranks */
  work work;     /* what it was */
  uint32_t busy; /* ranks that have not finished it */
  bool stop;
  const mm_batch *batch;
  float *logits;
  int32_t *id;   /* where choices are collected */
  bool stepped;  /* the last step was done, */
  uint32_t rows; /* of so many rows */
  uint32_t tap;  /* whose rows are wanted */
  float *hidden; /* where they go */
  uint64_t *load;
  uint32_t state_to, state_from; /* slots */
  void *state;                   /* saved to */
  const void *saved;             /* loaded from */

  uint32_t started; /* threads */
  rank rank[];      /* [tp] */
};

static bool open_rank(rank *r, mm_err *err) {
  mm_engine *e = r->engine;
  if (!mm_bind(&r->weights, e->shards, r->index, err)) return false;
  mm_backend_config c = {.model = e->model,
                         .weights = &r->weights,
                         .limits = e->config.limits,
                         .comm = e->comm,
                         .place = {r->index, r->index, e->shards->pack.tp, e->config.device ? e->config.device[r->index] : r->index},
                         .threads = e->config.threads,
                         .act_quant = e->config.act_quant,
                         .calibration = e->config.calibration,
                         .never = e->never,
                         .eager = e->config.eager,
                         .kv_fp8 = e->config.kv_fp8,
                         .kv_bf16 = e->config.kv_bf16,
                         .tap = e->config.tap,
                         .taps = e->config.taps};
  if (!mm_forward_open(&r->forward, e->config.ops, &c, err)) return false;
  r->state_bytes = e->config.ops->state_bytes ? e->config.ops->state_bytes(r->forward.backend) : 0;
  return true;
}

/* One batch on one rank; its columns of the logits go to their place in the caller's matrix. */
static bool step_rank(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const mm_rank_weights *w = &r->weights;
  if (e->batch->sampling) return mm_forward_step(&r->forward, e->batch, NULL, err);
  size_t rows = e->batch->out_count, vocab = e->model->vocab;
  if (!mm_grow((void **)&r->logits, &r->logits_cap, rows * w->vocab_rows, sizeof *r->logits, err)) return false;
  if (!mm_forward_step(&r->forward, e->batch, r->logits, err)) return false;
  if (w->vocab_first >= vocab) return true;
  size_t columns = mm_min(w->vocab_rows, vocab - w->vocab_first);
  for (size_t i = 0; i < rows; i++)
    memcpy(e->logits + i * vocab + w->vocab_first, r->logits + i * w->vocab_rows, columns * sizeof *r->logits);
  return true;
}

/* All ranks have the same hidden states and choices: the first one tells. */
static bool do_work(rank *r, work w, mm_err *err) {
  const mm_forward *f = &r->forward;
  const mm_engine *e = r->engine;
  switch (w) {
    case OPEN: return open_rank(r, err);
    case STEP: return step_rank(r, err);
    case COLLECT: return f->ops->collect(f->backend, e->id, err);
    case HIDDEN: return r->index > 0 || f->ops->read(f->backend, f->tap[e->tap], e->rows, e->hidden, err);
    case LOAD: return r->index > 0 || f->ops->expert_load(f->backend, e->load, err);
    case STATE_COPY: return f->ops->state_copy(f->backend, e->state_to, e->state_from, err);
    case STATE_SAVE: return f->ops->state_save(f->backend, e->state_from, (char *)e->state + r->state_at, err);
    case STATE_LOAD: return f->ops->state_load(f->backend, e->state_to, (const char *)e->saved + r->state_at, err);
  }
  return false;
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
    work w = e->work;
    pthread_mutex_unlock(&e->lock);
    bool done = do_work(r, w, &r->err);
    if (!done) mm_comm_break(e->comm);
    pthread_mutex_lock(&e->lock);
    if (--e->busy == 0) pthread_cond_broadcast(&e->changed);
  }
  pthread_mutex_unlock(&e->lock);
  mm_forward_close(&r->forward);
  return NULL;
}

/* Hands the next task to every rank and waits for all; the lowest failing rank's error is the task's. */
static bool run_task(mm_engine *e, work w, mm_err *err) {
  pthread_mutex_lock(&e->lock);
  for (uint32_t r = 0; r < e->started; r++) e->rank[r].err.status = MM_OK;
  mm_comm_mend(e->comm);
  e->task++;
  e->work = w;
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
  if (c->calibration && !c->ops->calibration)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found device %s, which does not collect inputs of linears",
                   c->ops->name);
  if (c->taps > MM_TAPS)
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u layers to tap, expected at most %u", c->taps, MM_TAPS);
  for (uint32_t i = 0; i < c->taps; i++)
    if (c->tap[i] >= m->layers)
      return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found layer %u to tap, expected less than %u", c->tap[i], m->layers);
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
  return run_task(e, OPEN, err);
}

/* A backend that does not read tables has all pages that its slots can fill: fewer would be a promise that it cannot keep. */
static bool open_pages(mm_engine *e, mm_err *err) {
  const mm_limits *l = &e->config.limits;
  uint32_t pages;
  if (!mm_limits_pages(l, &pages, err)) return false;
  if (!e->config.ops->pages && l->pages)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found a limit of %u pages; device %s gives each slot its own",
                   l->pages, e->config.ops->name);
  if (!e->config.ops->pages) return true;
  if (!(e->pages = mm_pages_open(pages, l->slots, l->max_positions, err))) return false;
  e->paging = (mm_paging){.table = mm_pages_table(e->pages), .per_slot = mm_pages_per_slot(e->pages)};
  e->want = mm_calloc(l->slots, sizeof *e->want, err);
  e->paging.copy = e->copy = mm_calloc(l->slots, sizeof *e->copy, err);
  return e->want && e->copy;
}

static void place_states(mm_engine *e) {
  uint64_t at = 0;
  for (uint32_t r = 0; r < e->started; at += e->rank[r++].state_bytes) e->rank[r].state_at = at;
}

static bool open_choices(mm_engine *e, mm_err *err) {
  uint32_t vocab = e->model->vocab;
  const mm_pack *pack = &e->shards->pack;
  e->device_chooses = e->config.ops->choose && pack->tp == 1;
  if (!(e->never = mm_calloc(vocab, sizeof *e->never, err))) return false;
  if (e->config.never) memcpy(e->never, e->config.never, vocab * sizeof *e->never);
  for (size_t i = 0; i < pack->dead_rows; i++) e->never[pack->dead_row[i]] = true;
  return e->device_chooses || (e->sampler = mm_sampler_open(vocab, err));
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
  e->slot = mm_calloc(c->limits.slots, sizeof *e->slot, err);
  if (e->comm && e->slot && open_pages(e, err) && open_choices(e, err) && start_ranks(e, err)) {
    place_states(e);
    return e;
  }
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
  for (uint32_t i = 0; i < MM_QUEUE; i++) free(e->choices[i].id);
  mm_sampler_close(e->sampler);
  free(e->choice_logits);
  free(e->choice_id);
  free(e->never);
  free(e->slot);
  mm_pages_close(e->pages);
  free(e->want);
  free(e->copy);
  free(e);
}

const mm_model *mm_engine_model(const mm_engine *e) { return e->model; }

static bool refuse(mm_err *err, const char *what, uint64_t index, int64_t found, const char *expected, uint64_t limit) {
  return mm_fail(err, MM_USAGE, "E_BATCH", mm_at(NULL, NULL), "%s %llu: found %lld, expected %s %llu", what, (unsigned long long)index,
                 (long long)found, expected, (unsigned long long)limit);
}

static bool check_ids(const mm_engine *e, const mm_batch *b, const mm_span *s, mm_err *err) {
  for (uint32_t i = s->first; i < s->first + s->count; i++) {
    bool known = b->id[i] == MM_ID_CHOSEN ? s->slot >= 0 && e->slot[s->slot].chose : b->id[i] >= 0 && (uint32_t)b->id[i] < e->model->vocab;
    if (!known) return refuse(err, "id of row", i, b->id[i], "one that was chosen, or less than", e->model->vocab);
  }
  return true;
}

static bool check_slot(mm_engine *e, const mm_span *s, uint32_t i, mm_err *err) {
  const mm_limits *limits = &e->config.limits;
  if (s->slot == -1) return true;
  if (s->slot < 0 || (uint32_t)s->slot >= limits->slots) return refuse(err, "slot of span", i, s->slot, "less than", limits->slots);
  if ((uint64_t)s->pos + s->count > limits->max_positions)
    return refuse(err, "last position of span", i, (int64_t)s->pos + s->count, "at most", limits->max_positions);
  slot_state *slot = &e->slot[s->slot];
  if (e->lightning ? s->pos != 0 && s->pos != slot->held : s->pos > slot->held)
    return refuse(err, "position of span", i, s->pos, e->lightning ? "0 or" : "at most", slot->held);
  if (slot->last_batch == e->batches) return refuse(err, "slot of span", i, s->slot, "one span for each slot, of", limits->slots);
  slot->last_batch = e->batches;
  return true;
}

static bool check_batch(mm_engine *e, const mm_batch *b, mm_err *err) {
  e->batches++;
  if (b->tokens > e->config.limits.max_tokens)
    return refuse(err, "rows of batch", e->batches, b->tokens, "at most", e->config.limits.max_tokens);
  uint32_t first = 0;
  for (uint32_t i = 0; i < b->span_count; i++) {
    const mm_span *s = &b->span[i];
    if (s->first != first) return refuse(err, "first row of span", i, s->first, "row", first);
    if (s->count == 0 || s->count > b->tokens - first) return refuse(err, "rows of span", i, s->count, "1 …", b->tokens - first);
    if (!check_slot(e, s, i, err) || !check_ids(e, b, s, err)) return false;
    first += s->count;
  }
  if (first != b->tokens) return refuse(err, "rows in spans of batch", e->batches, first, "all", b->tokens);
  for (uint32_t i = 0; i < b->out_count; i++)
    if (b->out[i] >= b->tokens || (i && b->out[i] <= b->out[i - 1]))
      return refuse(err, "output row", i, b->out[i], "ascending and less than", b->tokens);
  return true;
}

/* What the slots hold after a batch: all of it, or nothing where it failed. */
static void keep_slots(mm_engine *e, const mm_batch *batch, bool done) {
  for (uint32_t i = 0, out = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot < 0) continue;
    slot_state *slot = &e->slot[s->slot];
    slot->held = done ? s->pos + s->count : 0;
    if (!done && e->pages) mm_pages_cut(e->pages, (uint32_t)s->slot, 0);
    while (out < batch->out_count && batch->out[out] + 1 < s->first + s->count) out++;
    slot->chose = done && batch->sampling && out < batch->out_count && batch->out[out] + 1 == s->first + s->count;
  }
}

/* What the batch writes is the slots' own from here on; all of it, or nothing where pages are short. */
static bool reserve_pages(mm_engine *e, mm_batch *batch, mm_err *err) {
  uint32_t wants = 0;
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot >= 0) e->want[wants++] = (mm_page_want){(uint32_t)s->slot, s->pos, s->count};
  }
  batch->paging = &e->paging;
  return mm_pages_reserve(e->pages, e->want, wants, e->copy, &e->paging.copies, err);
}

/* Whether the batch may run; then it is ready to. */
static bool prepare(mm_engine *e, mm_batch *batch, mm_err *err) {
  batch->paging = NULL;
  return check_batch(e, batch, err) && (!e->pages || reserve_pages(e, batch, err));
}

/* Runs the batch; logits of ids whose head row is zero become -INFINITY. */
static bool run_step(mm_engine *e, const mm_batch *batch, float *logits, mm_err *err) {
  const mm_pack *pack = &e->shards->pack;
  e->batch = batch;
  e->logits = logits;
  e->stepped = run_task(e, STEP, err);
  e->rows = batch->tokens;
  if (!e->stepped) return false;
  for (size_t i = 0; logits && i < batch->out_count; i++)
    for (size_t j = 0; j < pack->dead_rows; j++) logits[i * e->model->vocab + pack->dead_row[j]] = -INFINITY;
  return true;
}

bool mm_engine_step(mm_engine *e, const mm_batch *batch, float *logits, mm_err *err) {
  mm_batch plain = *batch;
  plain.sampling = NULL;
  if (!prepare(e, &plain, err)) return false;
  bool done = run_step(e, &plain, logits, err);
  keep_slots(e, &plain, done);
  return done;
}

/* A step without sampling, and the choices from its logits. */
static bool step_and_choose(mm_engine *e, const mm_batch *batch, choices *to, mm_err *err) {
  size_t vocab = e->model->vocab;
  if (!mm_grow((void **)&e->choice_logits, &e->choice_logits_cap, batch->out_count * vocab, sizeof *e->choice_logits, err) ||
      !mm_grow((void **)&e->choice_id, &e->choice_id_cap, batch->tokens, sizeof *e->choice_id, err) ||
      !mm_grow((void **)&to->id, &to->cap, batch->out_count, sizeof *to->id, err))
    return false;
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    for (uint32_t t = s->first; t < s->first + s->count; t++)
      e->choice_id[t] = batch->id[t] == MM_ID_CHOSEN ? e->slot[s->slot].chosen : batch->id[t];
  }
  mm_batch plain = *batch;
  plain.id = e->choice_id;
  plain.sampling = NULL;
  if (!run_step(e, &plain, e->choice_logits, err)) return false;
  const mm_span *s = batch->span;
  for (uint32_t i = 0; i < batch->out_count; i++) {
    uint32_t row = batch->out[i];
    while (row >= s->first + s->count) s++;
    float *logits = e->choice_logits + i * vocab;
    for (size_t v = 0; v < vocab; v++)
      if (e->never[v]) logits[v] = -INFINITY;
    to->id[i] = mm_sample(e->sampler, &batch->sampling[i], s->pos + (row - s->first) + UINT64_C(1), logits);
    if (s->slot >= 0) e->slot[s->slot].chosen = to->id[i] < 0 ? 0 : to->id[i]; /* of rows of one slot, the last stays */
  }
  return true;
}

bool mm_engine_queues(const mm_engine *e) { return e->device_chooses; }

bool mm_engine_queue(mm_engine *e, const mm_batch *given, mm_err *err) {
  mm_batch copy = *given, *batch = &copy;
  for (uint32_t i = 0; i < batch->out_count; i++)
    if (!mm_sampling_check(&batch->sampling[i], err)) return false;
  if (e->queued - e->collected == MM_QUEUE) return refuse(err, "batches queued before batch", e->batches, MM_QUEUE, "less than", MM_QUEUE);
  if (!prepare(e, batch, err)) return false;
  uint32_t at = (uint32_t)(e->queued % MM_QUEUE);
  bool done = e->device_chooses ? run_step(e, batch, NULL, err) : step_and_choose(e, batch, &e->choices[at], err);
  keep_slots(e, batch, done);
  if (!done) return false;
  e->outstanding[at] = batch->out_count;
  e->queued++;
  return true;
}

bool mm_engine_collect(mm_engine *e, int32_t *id, mm_err *err) {
  if (e->collected == e->queued) return refuse(err, "collected after batch", e->batches, 0, "batches queued, at most", MM_QUEUE);
  uint32_t at = (uint32_t)(e->collected++ % MM_QUEUE);
  if (!e->device_chooses) {
    memcpy(id, e->choices[at].id, e->outstanding[at] * sizeof *id);
    return true;
  }
  e->id = id;
  if (run_task(e, COLLECT, err)) return true;
  e->stepped = false;
  e->collected = e->queued;
  for (uint32_t i = 0; i < e->config.limits.slots; i++) mm_engine_drop(e, i);
  return false;
}

/* ---- slots ---- */

uint32_t mm_engine_held(const mm_engine *e, uint32_t slot) { return e->slot[slot].held; }

void mm_engine_drop(mm_engine *e, uint32_t slot) {
  e->slot[slot] = (slot_state){.last_batch = e->slot[slot].last_batch};
  if (e->pages) mm_pages_cut(e->pages, slot, 0);
}

mm_pages *mm_engine_pages(mm_engine *e) { return e->pages; }

uint64_t mm_engine_state_bytes(const mm_engine *e) {
  const rank *last = &e->rank[e->started - 1];
  return last->state_at + last->state_bytes;
}

/* Slots below the limit, and a backend that can share what they hold. */
static bool check_slots(const mm_engine *e, const uint32_t *slot, uint32_t n, mm_err *err) {
  for (uint32_t i = 0; i < n; i++)
    if (slot[i] >= e->config.limits.slots) return refuse(err, "slot", i, slot[i], "less than", e->config.limits.slots);
  if (e->pages && (!e->lightning || e->config.ops->state_copy)) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found slots that share pages; device %s gives each slot its own",
                 e->config.ops->name);
}

bool mm_engine_fork(mm_engine *e, uint32_t from, const uint32_t *to, uint32_t n, mm_err *err) {
  if (!check_slots(e, &from, 1, err) || !check_slots(e, to, n, err)) return false;
  const slot_state *source = &e->slot[from];
  for (uint32_t i = 0; i < n; i++) {
    if (to[i] == from) continue;
    e->state_to = to[i];
    e->state_from = from;
    if (e->lightning && !run_task(e, STATE_COPY, err)) {
      mm_engine_drop(e, to[i]);
      return false;
    }
    mm_pages_map(e->pages, to[i], mm_pages_table(e->pages) + (size_t)from * e->paging.per_slot, mm_pages_held(e->pages, from));
    e->slot[to[i]] = (slot_state){.held = source->held,
                                  .last_batch = e->slot[to[i]].last_batch,
                                  .chose = source->chose && !e->device_chooses,
                                  .chosen = source->chosen};
  }
  return true;
}

bool mm_engine_save(mm_engine *e, uint32_t slot, void *state, mm_err *err) {
  if (!check_slots(e, &slot, 1, err)) return false;
  if (!e->slot[slot].held) return refuse(err, "tokens in slot", slot, 0, "at least", 1);
  e->state_from = slot;
  e->state = state;
  return !e->lightning || run_task(e, STATE_SAVE, err);
}

bool mm_engine_resume(mm_engine *e, uint32_t slot, const uint32_t *page, uint32_t tokens, const void *state, mm_err *err) {
  if (!check_slots(e, &slot, 1, err)) return false;
  const uint32_t count = (uint32_t)mm_ceil_div(tokens, MM_PAGE);
  if (tokens > e->config.limits.max_positions)
    return refuse(err, "tokens for slot", slot, tokens, "at most", e->config.limits.max_positions);
  if (e->lightning && tokens && !state) return refuse(err, "states for slot", slot, 0, "those after token", tokens);
  for (uint32_t i = 0; i < count; i++)
    if (!mm_pages_references(e->pages, page[i])) return refuse(err, "page", i, page[i], "one in use, below", mm_pages_count(e->pages));
  mm_pages_map(e->pages, slot, page, count);
  e->slot[slot] = (slot_state){.held = tokens, .last_batch = e->slot[slot].last_batch};
  e->state_to = slot;
  e->saved = state;
  if (!e->lightning || !tokens || run_task(e, STATE_LOAD, err)) return true;
  mm_engine_drop(e, slot);
  return false;
}

bool mm_engine_hidden(mm_engine *e, uint32_t i, float *out, mm_err *err) {
  if (i >= e->config.taps) return refuse(err, "hidden states after batch", e->batches, i, "a tap less than", e->config.taps);
  if (!e->stepped) return refuse(err, "hidden states after batch", e->batches, 0, "steps done, at least", 1);
  if (e->queued > e->collected)
    return refuse(err, "hidden states after batch", e->batches, (int64_t)(e->queued - e->collected), "batches left to collect, at most", 0);
  e->tap = i;
  e->hidden = out;
  return run_task(e, HIDDEN, err);
}

bool mm_engine_expert_load(mm_engine *e, uint64_t *load, mm_err *err) {
  e->load = load;
  return run_task(e, LOAD, err);
}
