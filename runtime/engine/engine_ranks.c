/* The engine: one thread per tensor-parallel rank, each with its own weights view and backend; every step is handed to all of
 * them and ends when all have finished. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/pool.h"
#include "loader/random_weights.h"
#include "loader/verify.h"
#include "runtime/engine/engine_inside.h"

/* Of a rank: slots and pages of its group. */
static mm_limits own_limits(const mm_engine *e) {
  mm_limits l = e->config.limits;
  l.slots = mm_engine_own_slots(e), l.pages = l.pages / e->groups.count;
  return l;
}

/* Digests are checked as files are read to a device, which copies of theirs (mm_shards_regroup) are not. */
static bool verifies_loads(const mm_engine *e) { return e->config.verify && e->config.ops->weights.loads && !e->shards->regrouped; }

static mm_backend_config config_of(const rank *r) {
  const mm_engine *const e = r->engine;
  return (mm_backend_config){
      .model = e->model,
      .weights = &r->weights,
      .limits = own_limits(e),
      .comm = e->comm[r->index / e->shards->pack.tp],
      .group = mm_comm_part(e->comm[r->index / e->shards->pack.tp], mm_engine_rank_group(e, r->index)),
      .place = {r->index, r->index - e->first, e->here, e->config.device ? e->config.device[r->index - e->first] : r->index - e->first,
                mm_devices_shared(e->config.device, e->here)},
      .options = e->config.options,
      .calibration = e->config.calibration,
      .never = e->never,
      .tap = e->config.tap,
      .taps = e->config.taps,
      .draft = e->config.draft,
      .verify = verifies_loads(e) ? e->shards : NULL,
      .log = e->config.log,
      .checkpoint = mm_shards_digest(e->shards),
      .attach = e->config.attach};
}

/* Once, whichever task comes first. */
static bool bind_rank(rank *r, mm_err *err) { return r->weights.layer || mm_bind_any(&r->weights, r->engine->shards, r->index, err); }

/* Random weights, where the device does not make them itself. */
static bool fill_rank(rank *r, mm_err *err) {
  const bool random = r->engine->shards->random.linear && !r->engine->config.ops->own_memory;
  return !random || r->weights.made || mm_random_fill(&r->weights, err);
}

static bool measure_rank(rank *r, mm_err *err) {
  if (!bind_rank(r, err)) return false;
  const mm_backend_config c = config_of(r);
  return mm_engine_measure(r, &c, err);
}

static bool open_rank(rank *r, mm_err *err) {
  mm_engine *const e = r->engine;
  if (!bind_rank(r, err) || !fill_rank(r, err)) return false;
  const mm_backend_config c = config_of(r);
  if (!mm_forward_open(&r->forward, e->config.ops, &c, err)) return false;
  const mm_rank_weights *w = &r->weights;
  rank_facts *f = &e->facts[r->index];
  f->layer_first = w->layer_first, f->layer_end = w->layer_end, f->vocab_first = w->vocab_first, f->vocab_rows = w->vocab_rows;
  f->state_bytes = e->config.ops->cache.bytes ? e->config.ops->cache.bytes(r->forward.backend) : 0;
  f->page_bytes = e->config.ops->cache.page_bytes ? e->config.ops->cache.page_bytes(r->forward.backend) : 0;
  return true;
}

/* A rank that comes back after the call has returned may not write to what it was given. */
static bool begin_copy(mm_engine *e) {
  pthread_mutex_lock(&e->lock);
  const bool wanted = !e->returned;
  e->copying += wanted;
  pthread_mutex_unlock(&e->lock);
  return wanted;
}
static void end_copy(mm_engine *e) {
  pthread_mutex_lock(&e->lock);
  if (--e->copying == 0) pthread_cond_broadcast(&e->changed);
  pthread_mutex_unlock(&e->lock);
}

void mm_engine_place_logits(rank *r, size_t rows, float *to) {
  mm_engine *const e = r->engine;
  const mm_rank_weights *w = &r->weights;
  const size_t vocab = e->model->vocab;
  if (w->vocab_first >= vocab || !begin_copy(e)) return;
  const size_t columns = mm_min(w->vocab_rows, vocab - w->vocab_first);
  const uint32_t *const place = e->groups.count > 1 ? e->groups.place + e->groups.out[mm_engine_rank_group(e, r->index)] : NULL;
  for (size_t i = 0; i < rows; i++)
    memcpy(to + (place ? place[i] : i) * vocab + w->vocab_first, r->logits + i * w->vocab_rows, columns * sizeof *r->logits);
  end_copy(e);
}

/* One batch on one rank. */
static bool step_rank(rank *r, mm_err *err) {
  mm_engine *const e = r->engine;
  const mm_batch *batch = e->groups.count > 1 ? &e->groups.own[mm_engine_rank_group(e, r->index)] : e->task.step.batch;
  const mm_rank_weights *w = &r->weights;
  r->forward.rows = &e->groups.rows;
  if (w->layer_end < e->model->layers) return mm_forward_step(&r->forward, batch, NULL, err);
  r->forward.deferred_sampling = e->task.step.deferred_sampling;
  if (batch->sampling || r->forward.deferred_sampling) return mm_forward_step(&r->forward, batch, NULL, err);
  if (!MM_GROW(r->logits, &r->logits_cap, (size_t)batch->out_count * w->vocab_rows, err)) return false;
  if (!mm_forward_step(&r->forward, batch, r->logits, err)) return false;
  mm_engine_place_logits(r, batch->out_count, e->task.step.logits);
  return true;
}

/* All ranks of a stage have the same hidden states and tokens: the first one reports them. */
static bool reports(const rank *r, uint32_t layer) {
  return r->weights.rank == 0 && layer >= r->weights.layer_first && layer < r->weights.layer_end;
}

/* The load of a stage's layers. */
static bool load_of(rank *r, mm_err *err) {
  const mm_forward *f = &r->forward;
  const size_t experts = r->engine->model->experts, first = r->weights.layer_first, count = r->weights.layer_end - first;
  uint64_t *load = mm_calloc(r->engine->model->layers * experts, sizeof *load, err);
  const bool ok = load && f->ops->expert_load(f->backend, load, err);
  if (ok) memcpy(r->engine->task.load + first * experts, load + first * experts, count * experts * sizeof *load);
  free(load);
  return ok;
}

/* The states of a slot of the rank's group; other groups have none of it. */
static bool state_task(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const mm_forward *f = &r->forward;
  const task *t = &e->task;
  const uint32_t slot = t->kind == STATE_SAVE ? t->state.from : t->state.to, own = mm_engine_own_slot(e, slot);
  if (slot % e->groups.count != mm_engine_rank_group(e, r->index)) return true;
  if (t->kind == STATE_COPY) return f->ops->cache.copy(f->backend, own, mm_engine_own_slot(e, t->state.from), err);
  if (t->kind == STATE_SAVE) return f->ops->cache.save(f->backend, own, (char *)t->state.saved + r->state_at, err);
  return f->ops->cache.load(f->backend, own, (const char *)t->state.given + r->state_at, err);
}

/* The ids of a slot of the rank's group. */
static bool load_ids(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const task *t = &e->task;
  return t->ids.slot % e->groups.count != mm_engine_rank_group(e, r->index) ||
         e->config.ops->sampler.load_ids(r->forward.backend, mm_engine_own_slot(e, t->ids.slot), t->ids.id, t->ids.count, err);
}

/* The first rank of each group has the ids of its rows. */
static bool collect_rank(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const task *t = &e->task;
  int32_t *id = mm_attn_rank(&r->weights) == 0 ? t->collected.id : NULL;
  if (id && t->collected.first) id += t->collected.first[mm_engine_rank_group(e, r->index)];
  return e->config.ops->sampler.collect(r->forward.backend, id, err);
}

/* The outputs of the rank's group. */
static bool sample_rank(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const mm_sampling *sampling = e->task.sample.sampling;
  uint32_t count = e->task.sample.count;
  if (e->groups.count > 1) {
    const uint32_t *out = e->groups.out + mm_engine_rank_group(e, r->index);
    if (count) sampling += out[0], count = out[1] - out[0];
  }
  return e->config.ops->sampler.sample_deferred(r->forward.backend, sampling, count, err);
}

static bool run_task(rank *r, mm_err *err) {
  const mm_forward *f = &r->forward;
  const task *t = &r->engine->task;
  switch (t->kind) {
    case MEASURE: return measure_rank(r, err);
    case OPEN: return open_rank(r, err);
    case STEP: return step_rank(r, err);
    case COLLECT: return collect_rank(r, err);
    case HIDDEN:
      return !reports(r, f->tap_layer[t->hidden.tap]) ||
             f->ops->read(f->backend, f->tap[t->hidden.tap], t->hidden.rows, t->hidden.out, err);
    case LOAD: return r->weights.rank > 0 || load_of(r, err);
    case STATE_COPY:
    case STATE_SAVE:
    case STATE_LOAD: return state_task(r, err);
    case IDS_LOAD: return load_ids(r, err);
    case SCORE: return f->ops->sampler.score(f->backend, t->score.target, r->weights.rank == 0 ? t->score.score : NULL, err);
    case CALIBRATE: return f->ops->calibrate(f->backend, err);
    case DRAFT: return mm_engine_draft_rank(r, err);
    case FINISH_LOAD: return f->ops->weights.finish_load(f->backend, err);
    case SAMPLE_DEFERRED: return sample_rank(r, err);
    case POOL: return mm_engine_rank_pool(r, err);
    case MOVE: return mm_engine_rank_move(r, err);
    case MOVED: return f->ops->cache.moved(f->backend, t->wait, &r->moving, err);
    case CLOSE: break;
  }
  return false;
}

static void *rank_main(void *arg) {
  rank *r = arg;
  mm_engine *e = r->engine;
  uint64_t tasks = 0;
  pthread_mutex_lock(&e->lock);
  while (!e->stop) {
    if (e->tasks == tasks) {
      pthread_cond_wait(&e->changed, &e->lock);
      continue;
    }
    tasks = e->tasks;
    const task_kind kind = e->task.kind;
    const bool borders = kind == STEP && e->task.step.batch->tokens > 0; /* who comes back late may not look at the batch any more */
    pthread_mutex_unlock(&e->lock);
    bool done = run_task(r, &r->err);
    if (!done) mm_comm_abort(e->comm[0]);
    const bool late = !done && strcmp(r->err.code, "E_RANK") == 0, leaves = kind == STEP || kind == OPEN;
    if (leaves && !mm_comm_leave(e->comm[r->index / e->shards->pack.tp], borders, late, done ? &r->err : MM_IGNORED)) done = false;
    pthread_mutex_lock(&e->lock);
    r->back = true, r->done = done;
    if (--e->busy == 0 || !done) pthread_cond_broadcast(&e->changed);
  }
  pthread_mutex_unlock(&e->lock);
  mm_forward_close(&r->forward);
  return NULL;
}

/* Under the lock: true if a rank that has returned timed out on another one. */
static bool misses_one(const mm_engine *e) {
  bool any = false;
  for (uint32_t r = 0; r < e->started; r++) any = any || (e->rank[r].back && strcmp(e->rank[r].err.code, "E_RANK") == 0);
  return any;
}

/* Under the lock: until all ranks are back, or one that is missed is not back in time. */
static void wait_for_ranks(mm_engine *e) {
  while (e->busy && !misses_one(e)) pthread_cond_wait(&e->changed, &e->lock);
  const struct timespec until = mm_later(MM_RETURN_S);
  int no = 0;
  while (e->busy && no != ETIMEDOUT) no = pthread_cond_clockwait(&e->changed, &e->lock, CLOCK_MONOTONIC, &until);
  e->returned = true;
  while (e->copying) pthread_cond_wait(&e->changed, &e->lock);
}

bool mm_engine_all_back(mm_engine *e, mm_err *err) {
  pthread_mutex_lock(&e->lock);
  const bool all = e->busy == 0;
  pthread_mutex_unlock(&e->lock);
  return all || mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "a rank has not come back from a step that failed");
}

/* Returns true if the task builds on passes that are not proven; COLLECT makes its own check at each batch. */
static bool doubts(const mm_engine *e, task_kind kind) { return e->queue.proven < e->queue.passes && kind != COLLECT && kind != CLOSE; }

/* By what stood before the task, or stands now. */
static bool sound(const mm_engine *e, bool (*failed_before)(mm_comm *), mm_err *err) {
  for (uint32_t s = 0; s < e->shards->pack.pp; s++)
    if (failed_before(e->comm[s])) return mm_comm_root_cause(e->comm[s], err);
  return true;
}

bool mm_engine_run_task(mm_engine *e, const task *t, mm_err *err) {
  if (!mm_engine_all_back(e, err)) return false;
  const bool doubted = doubts(e, t->kind);
  const bool reads = t->kind == HIDDEN || t->kind == STATE_SAVE || t->kind == LOAD; /* and has waited for all that was queued */
  const bool done = mm_engine_announce(e, t, err) && mm_engine_hear(e, t, mm_engine_run_here(e, t, err), err) &&
                    (!doubted || !reads || sound(e, mm_comm_failed_now, err));
  if (!done && doubted) mm_engine_lose(e, err);
  return done;
}

/* Under the lock: true if all ranks have completed the task; else fails with the error. A rank that stopped because another one failed sets
 * no error. If a thread that is no rank aborted the group (mm_comm_fail), possibly no rank has an error, and a rank may have finished
 * without the data of others. */
static bool all_done(mm_engine *e, mm_err *err) {
  const mm_err *reason = NULL;
  mm_err aborted = {0};
  bool ok = true;
  for (uint32_t i = 0; i < e->started; i++) {
    const rank *r = &e->rank[i];
    ok = ok && r->done;
    if (!reason && r->back && r->err.status != MM_OK) reason = &r->err;
  }
  if ((!reason || strcmp(reason->code, "E_RANK") == 0) && mm_comm_fail_reason(e->comm[0], &aborted)) reason = &aborted, ok = false;
  if (ok) return true;
  if (reason) return mm_fail_as(err, reason);
  return e->processes.group || /* another process says it */
         mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "a rank has failed, and none says why");
}

bool mm_engine_run_here(mm_engine *e, const task *t, mm_err *err) {
  pthread_mutex_lock(&e->lock);
  for (uint32_t r = 0; r < e->started; r++) e->rank[r].err = (mm_err){0}, e->rank[r].back = e->rank[r].done = false;
  for (uint32_t s = 0; s < e->shards->pack.pp; s++) mm_comm_reset(e->comm[s]);
  if (doubts(e, t->kind) && !sound(e, mm_comm_failed, err)) {
    pthread_mutex_unlock(&e->lock);
    return false;
  }
  e->tasks++;
  e->returned = false;
  e->task = *t;
  e->busy = e->started;
  pthread_cond_broadcast(&e->changed);
  wait_for_ranks(e);
  const bool ok = all_done(e, err);
  pthread_mutex_unlock(&e->lock);
  return ok;
}

static bool check_config(const mm_model *m, const mm_engine_config *c, mm_err *err) {
  const mm_limits *l = &c->limits;
  if (!mm_ops_run(c->ops, m, err) || !mm_ops_keep_index(c->ops, m, &c->options, err)) return false;
  if (c->options.act_quant && !c->ops->act_quant)
    return mm_fail(err, MM_UNSUPPORTED, "E_ACT_QUANT", mm_at(NULL, NULL),
                   "found activation quantisation on for %s, which computes with activations as they are; expected off", c->ops->name);
  if (c->calibration && !c->ops->calibration)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found device %s, which does not collect inputs of linears",
                   c->ops->name);
  if (c->options.batch_invariant && !c->ops->batch_invariant && !c->ops->batch_invariant_on_request)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                   "found device %s, where a row's bits depend on the other rows of its step; expected a batch-invariant one",
                   c->ops->name);
  if (c->options.pin && !c->ops->pins)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found threads to pin; device %s does not compute with any",
                   c->ops->name);
  if (c->taps > MM_TAPS)
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u layers to tap, expected at most %u", c->taps, MM_TAPS);
  for (uint32_t i = 0; i < c->taps; i++)
    if (c->tap[i] >= m->layers)
      return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found layer %u to tap, expected less than %u", c->tap[i], m->layers);
  if (c->attach && (!c->ops->weights.hold || c->verify))
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                   c->verify ? "found weights to attach to and digests to check; minimax-hold --verify-on-load checks them"
                             : "found device %s, which holds no weights to attach to",
                   c->ops->name);
  if (l->max_tokens && l->slots && l->max_positions && c->options.threads && l->max_positions <= m->max_positions) return true;
  return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL),
                 "found %u tokens a step, %u slots, %u positions, %u threads; expected at least 1 of each and at most %llu positions",
                 l->max_tokens, l->slots, l->max_positions, c->options.threads, (unsigned long long)m->max_positions);
}

unsigned mm_engine_threads(uint64_t given, uint32_t ranks) {
  return (unsigned)(given ? given : mm_max(1, mm_pool_cpus() / mm_max(1, ranks)));
}

/* Refuses parallel layouts that the backend does not run, or cannot collect inputs from. */
static bool check_parallel(const mm_pack *p, const mm_engine_config *c, mm_err *err) {
  const uint32_t processes = c->process_group ? c->process_group->processes : 1, ranks = mm_pack_ranks(p), each = ranks / processes;
  if (ranks % processes || (each % p->tp && !c->ops->across))
    return mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL),
                   "found %u processes for %u ranks, %u of each stage; expected a number of processes that divides them%s", processes,
                   ranks, p->tp, c->ops->across ? "" : ", and stages that are whole in a process");
  if (c->process_group && (c->calibration || c->attach))
    return mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL), "found %u processes; %s needs 1", processes,
                   c->calibration ? "collecting inputs" : "attaching to held weights");
  const bool runs = (p->ep == 1 || (c->ops->experts_cut && !c->calibration)) && (p->pp == 1 || (c->ops->ranks.send && !c->calibration));
  return runs || mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL), "found --ep %u --pp %u; %s on device %s needs 1 of each",
                         p->ep, p->pp, c->calibration ? "collecting inputs" : "a run", c->ops->name);
}

/* Where weights stay in their mappings, or copies were made of them, the digests of all files are checked before the first step. */
static bool verify_files(const mm_engine *e, mm_err *err) {
  return !e->config.verify || verifies_loads(e) || mm_verify_blocks(e->shards, mm_pool_cpus(), err);
}

static bool open_comms(mm_engine *e, mm_err *err) {
  const uint32_t pp = e->shards->pack.pp;
  if (!(e->comm = mm_calloc(pp, sizeof *e->comm, err))) return false;
  for (uint32_t s = 0; s < pp; s++) {
    if (!(e->comm[s] = mm_comm_open_across(e->shards->pack.tp, e->processes.group, s, e->here, err))) return false;
    if (e->groups.count > 1 && !mm_comm_split(e->comm[s], e->groups.count, err)) return false;
    if (s) mm_comm_link(e->comm[s - 1], e->comm[s]);
  }
  return true;
}

static bool start_ranks(mm_engine *e, mm_err *err) {
  for (; e->started < e->here; e->started++) {
    rank *r = &e->rank[e->started];
    *r = (rank){.engine = e, .index = e->first + e->started};
    int failed = pthread_create(&r->thread, NULL, rank_main, r);
    if (!failed) continue;
    mm_comm_abort(e->comm[0]);
    for (uint32_t i = 0; i < e->here; i++)
      if (!mm_comm_leave(e->comm[(e->first + i) / e->shards->pack.tp], false, false, MM_IGNORED)) break;
    return mm_fail_thread(err, MM_FORMATTED(80, "start a thread for rank %u", e->first + e->started), failed);
  }
  return true;
}

/* Returns true if the cache is sized by the available memory. */
static bool measures(const mm_engine *e) { return e->config.memory.fits && e->config.ops->memory && e->config.ops->cache.pages; }

/* A backend that does not read tables has all pages that its slots can fill: fewer would be a promise that it cannot keep. */
static bool open_pages(mm_engine *e, mm_err *err) {
  mm_limits *l = &e->config.limits, all = *l;
  uint32_t pages;
  all.slots = mm_engine_own_slots(e) * e->groups.count; /* a group's slots may fill as many pages as another's */
  if (!mm_limits_pages(&all, &pages, err)) return false;
  if (l->pages) l->pages = pages = (uint32_t)mm_ceil_div(pages, e->groups.count) * e->groups.count;
  if (!e->config.ops->cache.pages && l->pages)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found a limit of %u pages; device %s gives each slot its own",
                   l->pages, e->config.ops->name);
  if (!e->config.ops->cache.pages) return mm_engine_open_groups(e, err);
  if (!(e->pages = mm_pages_open_groups(e->groups.count, pages, l->slots, l->max_positions, err))) return false;
  e->paging = (mm_paging){.table = mm_pages_table(e->pages), .per_slot = mm_pages_per_slot(e->pages)};
  e->step_pages.want = mm_calloc(l->slots, sizeof *e->step_pages.want, err);
  e->paging.copy = e->step_pages.copy = mm_calloc(l->slots, sizeof *e->step_pages.copy, err);
  return e->step_pages.want && e->step_pages.copy && mm_engine_open_groups(e, err);
}

/* A slot's states are those of its group's ranks, which lie alike in each group. */
static void place_states(mm_engine *e) {
  for (uint32_t g = e->groups.count; g-- > 0;) {
    e->state_bytes = 0;
    for (uint32_t r = 0; r < mm_pack_ranks(&e->shards->pack); r++) {
      if (mm_engine_rank_group(e, r) != g) continue;
      if (r - e->first < e->here) e->rank[r - e->first].state_at = e->state_bytes;
      e->state_bytes += e->facts[r].state_bytes;
    }
  }
}

static bool open_sampling(mm_engine *e, mm_err *err) {
  uint32_t vocab = e->model->vocab;
  const mm_pack *pack = &e->shards->pack;
  e->device_samples = e->config.ops->sampler.sample && pack->pp == 1 && !e->processes.group;
  if (!(e->never = mm_calloc(vocab, sizeof *e->never, err))) return false;
  if (e->config.never) memcpy(e->never, e->config.never, vocab * sizeof *e->never);
  for (size_t i = 0; i < pack->dead_rows; i++) e->never[pack->dead_row[i]] = true;
  if (e->device_samples) return true;
  const mm_limits *l = &e->config.limits;
  return (e->host.sampler = mm_sampler_open(vocab, err)) &&
         (e->host.history = mm_calloc(l->slots, l->max_positions * sizeof *e->host.history, err));
}

mm_engine *mm_engine_open(const mm_shards *shards, const mm_engine_config *c, mm_err *err) {
  const mm_model *m = &shards->pack.model;
  mm_engine_config own = *c;
  if (!mm_engine_check_draft(&shards->pack, &own, err)) return NULL;
  c = &own;
  if (shards->random.linear && (c->verify || c->calibration))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--load-format dummy: random weights have no %s",
                   c->verify ? "digests that are to be checked" : "tensors to calibrate"),
           NULL;
  if (!check_config(m, c, err) || !mm_engine_check_groups(&shards->pack, c, err) || !check_parallel(&shards->pack, c, err)) return NULL;
  mm_engine_share_config(c);
  const uint32_t ranks = mm_pack_ranks(&shards->pack), here = ranks / (c->process_group ? c->process_group->processes : 1);
  mm_engine *e = mm_calloc(1, sizeof *e + here * sizeof e->rank[0], err);
  if (!e) return NULL;
  e->processes.group = c->process_group;
  e->here = here, e->first = c->process_group ? c->process_group->process * here : 0;
  e->shards = shards;
  e->model = m;
  e->config = *c;
  e->groups.count = mm_pack_groups(&shards->pack);
  for (uint32_t l = 0; l < m->layers; l++) e->lightning |= m->attn[l] == MM_ATTN_LIGHTNING;
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->changed, NULL);
  e->slot = mm_calloc(c->limits.slots, sizeof *e->slot, err);
  e->facts = mm_calloc(ranks, sizeof *e->facts, err);
  const bool ready = e->facts && e->slot && open_comms(e, err) && start_ranks(e, err) && open_sampling(e, err);
  if (mm_engine_exchange_facts(e, ready && (!measures(e) || mm_engine_run_here(e, &(task){.kind = MEASURE}, err)), err)) {
    const bool sized = (!measures(e) || mm_engine_fit(e, err)) && open_pages(e, err) && verify_files(e, err);
    /* Ranks that open may wait for those of other processes, so none does before all processes are here. */
    if (mm_engine_exchange_facts(e, sized, err) && mm_engine_exchange_facts(e, mm_engine_run_here(e, &(task){.kind = OPEN}, err), err)) {
      place_states(e);
      return e;
    }
  }
  mm_engine_close(e);
  return NULL;
}

void mm_engine_close(mm_engine *e) {
  if (!e) return;
  if (!mm_engine_all_back(e, MM_IGNORED)) return; /* a rank that is away uses all this still */
  uint64_t oldest;
  if (e->groups.count > 1 && e->moves) mm_either_way(mm_engine_moved(e, true, &oldest, MM_IGNORED)); /* ranks use others' memory */
  if (e->processes.opened && !mm_engine_announce(e, &(task){.kind = CLOSE}, MM_IGNORED)) abort();    /* it needs no memory */
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
  for (uint32_t s = 0; e->comm && s < e->shards->pack.pp; s++) mm_comm_close(e->comm[s]);
  free(e->comm);
  for (uint32_t i = 0; i < MM_QUEUE; i++) free(e->host.sampled[i].id);
  mm_sampler_close(e->host.sampler);
  mm_sampler_close(e->draft.sampler);
  MM_FREE(e->host.history, e->unsampled.row, e->host.logits, e->host.id, e->never, e->slot, e->score, e->draft.logits, e->draft.sampling,
          e->draft.bytes);
  mm_pages_close(e->pages);
  mm_engine_close_groups(e);
  MM_FREE(e->step_pages.want, e->step_pages.copy, e->facts, e->processes.order, e->processes.table, e->batch_bytes, e);
}

const mm_model *mm_engine_model(const mm_engine *e) { return e->model; }
const mm_limits *mm_engine_limits(const mm_engine *e) { return &e->config.limits; }
bool mm_engine_batch_invariant(const mm_engine *e) {
  return e->config.ops->batch_invariant || (e->config.ops->batch_invariant_on_request && e->config.options.batch_invariant);
}

bool mm_engine_refuse(mm_err *err, const char *what, uint64_t index, int64_t found, const char *expected, uint64_t limit) {
  return mm_fail(err, MM_USAGE, "E_BATCH", mm_at(NULL, NULL), "%s %llu: found %lld, expected %s %llu", what, (unsigned long long)index,
                 (long long)found, expected, (unsigned long long)limit);
}

static void *hold(char **at, const void *from, size_t n) {
  char *const to = *at;
  if (n) memcpy(to, from, n);
  *at += n;
  return to;
}

/* With no rank away. */
static bool copy_batch(mm_engine *e, const mm_batch *b, mm_err *err) {
  const size_t draws = b->sampling ? b->out_count * sizeof *b->sampling : 0, spans = b->span_count * sizeof *b->span;
  const size_t ids = b->tokens * sizeof *b->id, outs = b->out_count * sizeof *b->out;
  if (!MM_GROW(e->batch_bytes, &e->batch_cap, draws + spans + ids + outs + 1, err)) return false;
  char *at = e->batch_bytes;
  e->batch = *b;
  if (b->sampling) e->batch.sampling = (const mm_sampling *)hold(&at, b->sampling, draws);
  e->batch.span = (const mm_span *)hold(&at, b->span, spans);
  e->batch.id = (const int32_t *)hold(&at, b->id, ids);
  e->batch.out = (const uint32_t *)hold(&at, b->out, outs);
  return true;
}

/* A pass whose end nobody waits for, of ranks whose kernels wait for each other, is not proven before something behind it is. */
static void count_pass(mm_engine *e, const mm_batch *batch, bool deferred_sampling) {
  bool holds = false;
  for (uint32_t i = 0; i < batch->span_count; i++) holds = holds || batch->span[i].slot >= 0;
  e->queue.passes += holds;
  if (!e->device_samples || e->shards->pack.tp == 1 || !(deferred_sampling || batch->sampling)) e->queue.proven = e->queue.passes;
}

bool mm_engine_run_step(mm_engine *e, const mm_batch *batch, float *logits, bool deferred_sampling, mm_err *err) {
  const mm_pack *pack = &e->shards->pack;
  const task t = {.kind = STEP, .step = {&e->batch, logits, deferred_sampling}};
  e->stepped = mm_engine_all_back(e, err) && copy_batch(e, batch, err) && (e->groups.count == 1 || mm_engine_group_rows(e, batch, err)) &&
               mm_engine_run_task(e, &t, err);
  e->rows = batch->tokens;
  if (!e->stepped) return false;
  count_pass(e, batch, deferred_sampling);
  mm_engine_remember(e, batch);
  for (size_t i = 0; logits && i < batch->out_count; i++)
    for (size_t j = 0; j < pack->dead_rows; j++) logits[i * e->model->vocab + pack->dead_row[j]] = -INFINITY;
  return true;
}

bool mm_engine_step(mm_engine *e, const mm_batch *batch, float *logits, mm_err *err) {
  mm_batch plain = *batch;
  plain.sampling = NULL;
  if (!mm_engine_prepare(e, &plain, err)) return false;
  e->unsampled.count = 0;
  bool done = (e->device_samples || mm_engine_resolve(e, &plain, err)) && mm_engine_run_step(e, &plain, logits, false, err);
  mm_engine_update_slots(e, &plain, done);
  return done;
}

bool mm_engine_hidden(mm_engine *e, uint32_t i, float *out, mm_err *err) {
  if (i >= e->config.taps) return mm_engine_refuse(err, "hidden states after batch", e->batches, i, "a tap less than", e->config.taps);
  if (!e->stepped) return mm_engine_refuse(err, "hidden states after batch", e->batches, 0, "steps done, at least", 1);
  if (e->queue.queued > e->queue.collected)
    return mm_engine_refuse(err, "hidden states after batch", e->batches, (int64_t)(e->queue.queued - e->queue.collected),
                            "batches left to collect, at most", 0);
  return mm_engine_run_task(e, &(task){.kind = HIDDEN, .hidden = {i, e->rows, out}}, err);
}

bool mm_engine_expert_load(mm_engine *e, uint64_t *load, mm_err *err) {
  return mm_engine_run_task(e, &(task){.kind = LOAD, .load = load}, err);
}

bool mm_engine_finish_load(mm_engine *e, mm_err *err) {
  return !e->config.ops->weights.finish_load || mm_engine_run_task(e, &(task){.kind = FINISH_LOAD}, err);
}

bool mm_engine_calibrate(mm_engine *e, mm_err *err) {
  return !e->config.calibration || !e->config.ops->calibrate || mm_engine_run_task(e, &(task){.kind = CALIBRATE}, err);
}
