/* The engine of several processes. The first one's is asked; before each task it sends the others what their ranks need to know of it
 * (mm_engine_announce), all do it, and they report and give what theirs made (mm_engine_hear). Slots, pages and sampling are the first
 * one's alone: a backend knows pages by the table that comes with a step. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/memory.h"
#include "runtime/engine/engine_inside.h"

enum { TAG = 0, BUILD_TEXT = 80 };

/* Header of a task's message, sent before its arrays. */
typedef struct order {
  uint32_t kind, tokens, spans, outs, copies, tap, rows, to, from;
  uint64_t bytes; /* of those */
} order;

typedef struct shared_config {
  char device[16];
  mm_limits limits;
  mm_run_options options; /* but for threads, which each process has its own of */
  bool verify;
  uint32_t taps, tap[MM_TAPS];
  bool fits; /* of mm_engine_memory */
  double share;
  uint32_t outs, least;
} shared_config;

typedef struct process_report {
  mm_digest checkpoint;
  mm_boot machine; /* of this boot */
  cpu_set_t cpus;  /* that threads are pinned to; none where they are not */
  mm_err err;
} process_report;

static void send_to(mm_process_group *w, uint32_t process, const void *data, size_t n) {
  if (n) w->exchange(w, TAG, &(mm_transfer){process, (void *)(uintptr_t)data, n}, 1, NULL, 0, 0);
}
static void receive_within(mm_process_group *w, uint32_t process, void *data, size_t n, double limit_s) {
  if (n) w->exchange(w, TAG, NULL, 0, &(mm_transfer){process, data, n}, 1, limit_s);
}
static void receive_from(mm_process_group *w, uint32_t process, void *data, size_t n) { receive_within(w, process, data, n, 0); }
static void send_to_all(mm_process_group *w, const void *data, size_t n) {
  for (uint32_t p = 1; p < w->processes; p++) send_to(w, p, data, n);
}

/* ---- opening ---- */

/* Checkpoints of other weights may have the same plan. */
static mm_digest digest_of(const mm_shards *shards) {
  const mm_pack *p = &shards->pack;
  const mm_digest cut = mm_shards_digest(shards);
  mm_sha256_state s;
  mm_sha256_begin(&s);
  mm_sha256_add(&s, &p->plan, sizeof p->plan);
  if (shards->regrouped) mm_sha256_add(&s, &cut, sizeof cut);
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (size_t i = 0; i < p->rank[r].part_count; i++) mm_sha256_add(&s, &p->rank[r].part[i].root, sizeof p->rank[r].part[i].root);
  return mm_sha256_end(&s);
}

/* Where a process pins its threads. A machine that has no name takes part as one that all such processes share. */
static void say_cpus(process_report *m) {
  CPU_ZERO(&m->cpus);
  if (sched_getaffinity(0, sizeof m->cpus, &m->cpus) != 0) CPU_ZERO(&m->cpus); /* opening the ranks says why */
  m->machine = mm_boot_name();
}

/* Processes of one machine that may run on the same CPUs would pin threads to the same ones. */
static void check_cpus(process_report *all, uint32_t n) {
  for (uint32_t p = 1; p < n; p++)
    for (uint32_t q = 0; q < p; q++) {
      cpu_set_t both;
      CPU_AND(&both, &all[p].cpus, &all[q].cpus);
      if (CPU_COUNT(&both) == 0 || memcmp(&all[p].machine, &all[q].machine, sizeof all[p].machine) != 0) continue;
      mm_fail(&all[p].err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL),
              "processes %u and %u: found %d CPUs that both may run on; to pin threads each needs its own (mpirun --bind-to, --map-by)", q,
              p, CPU_COUNT(&both));
    }
}

/* To every other process mine[bytes], and from each as many: its part of all[], by processes. scratch: [2 · processes]. */
static void exchange_with_all(mm_process_group *w, void *mine, void *all, size_t bytes, mm_transfer *scratch) {
  mm_transfer *const in = scratch + w->processes;
  uint32_t others = 0;
  for (uint32_t p = 0; p < w->processes; p++) {
    if (p == w->process) continue;
    scratch[others] = (mm_transfer){p, mine, bytes};
    in[others++] = (mm_transfer){p, (char *)all + p * bytes, bytes};
  }
  w->exchange(w, TAG, scratch, others, in, others, 0);
}

static bool has_another_checkpoint(const process_report *all, uint32_t p) {
  return !mm_digest_equal(&all[p].checkpoint, &all[0].checkpoint);
}

/* The lowest process that failed says why; who has another checkpoint than the first has failed. Here all say the same of all. Facts follow
 * where all have the same number of ranks. */
bool mm_engine_exchange_facts(mm_engine *e, bool ok, mm_err *err) {
  mm_process_group *const w = e->processes.group;
  if (!w) return ok;
  const uint32_t n = w->processes, each = e->here;
  process_report *all = calloc(n, sizeof *all);
  mm_transfer *scratch = calloc(2 * (size_t)n, sizeof *scratch);
  bool same = true;
  if (!all || !scratch || !e->facts) { /* a process that ends takes the others, which wait for it, along */
    MM_FREE(all, scratch);
    return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "no memory for what %u processes say", n);
  }
  process_report *const mine = &all[w->process];
  mine->checkpoint = digest_of(e->shards);
  if (e->config.options.pin) say_cpus(mine);
  if (!ok) mine->err = *err;
  exchange_with_all(w, mine, all, sizeof *all, scratch);
  for (uint32_t p = 0; p < n; p++) same = same && !has_another_checkpoint(all, p);
  if (same) exchange_with_all(w, e->facts + e->first, e->facts, each * sizeof *e->facts, scratch);
  check_cpus(all, n);
  for (uint32_t p = 0; p < n; p++) {
    if (has_another_checkpoint(all, p))
      mm_fail(&all[p].err, MM_INTEGRITY, "E_MPI", mm_at(e->shards->pack.dir, NULL),
              "process %u: found another checkpoint than process 0 has, by plan, by weights or by --dp; expected the same", p);
    if (all[p].err.status == MM_OK) continue;
    if (ok && (p == w->process || w->process == 0)) mm_fail_as(err, &all[p].err);
    ok = false;
  }
  MM_FREE(all, scratch);
  return e->processes.opened = ok;
}

/* Build text, sent first: processes of different builds detect each other before they misread a message. */
static void put_build(char to[BUILD_TEXT]) {
  memset(to, 0, BUILD_TEXT);
  strncpy(to, mm_version(), BUILD_TEXT - 1);
}

void mm_engine_share_config(const mm_engine_config *c) {
  if (!c->process_group || c->process_group->process > 0) return;
  char build[BUILD_TEXT];
  put_build(build);
  send_to_all(c->process_group, build, sizeof build);
  shared_config s = {.limits = c->limits,
                     .options = c->options,
                     .verify = c->verify,
                     .taps = c->taps,
                     .fits = c->memory.fits,
                     .share = c->memory.share,
                     .outs = c->memory.outs,
                     .least = c->memory.least};
  strncpy(s.device, c->ops->name, sizeof s.device - 1);
  for (uint32_t i = 0; i < c->taps; i++) s.tap[i] = c->tap[i];
  send_to_all(c->process_group, &s, sizeof s);
}

/* ---- what is to be done ---- */

/* Entries of the tables that a span reads. */
static size_t pages_of(const mm_span *s) { return s->slot < 0 ? 0 : mm_ceil_div((uint64_t)s->pos + s->count, MM_PAGE); }

static char *put(char *to, const void *from, size_t n) {
  if (n) memcpy(to, from, n);
  return to + n;
}

/* Writes the arrays of a step: ids, spans, rows whose logits are wanted, copies of pages, and each span's pages. */
static char *put_step(const mm_batch *b, char *at) {
  at = put(at, b->span, b->span_count * sizeof *b->span);
  at = put(at, b->id, b->tokens * sizeof *b->id);
  at = put(at, b->out, b->out_count * sizeof *b->out);
  if (!b->paging) return at;
  at = put(at, b->paging->copy, b->paging->copies * sizeof *b->paging->copy);
  for (uint32_t i = 0; i < b->span_count; i++) {
    const mm_span *s = &b->span[i];
    at = put(at, s->slot < 0 ? NULL : b->paging->table + (size_t)s->slot * b->paging->per_slot, pages_of(s) * sizeof *b->paging->table);
  }
  return at;
}

static size_t step_bytes(const mm_batch *b) {
  size_t n = b->span_count * sizeof *b->span + b->tokens * sizeof *b->id + b->out_count * sizeof *b->out;
  if (!b->paging) return n;
  n += b->paging->copies * sizeof *b->paging->copy;
  for (uint32_t i = 0; i < b->span_count; i++) n += pages_of(&b->span[i]) * sizeof *b->paging->table;
  return n;
}

bool mm_engine_announce(mm_engine *e, const task *t, mm_err *err) {
  if (!e->processes.group || e->processes.group->process > 0) return true;
  if (e->processes.unheard && mm_engine_hear(e, t, false, MM_IGNORED)) abort(); /* of a task that failed: it does not become well */
  order o = {.kind = t->kind};
  if (t->kind == STEP) {
    const mm_batch *b = t->step.batch;
    o.tokens = b->tokens, o.spans = b->span_count, o.outs = b->out_count, o.copies = b->paging ? b->paging->copies : 0;
    o.bytes = step_bytes(b);
  } else if (t->kind == HIDDEN) {
    o.tap = t->hidden.tap, o.rows = t->hidden.rows;
  } else if (t->kind == STATE_COPY || t->kind == STATE_SAVE || t->kind == STATE_LOAD) {
    o.to = t->state.to, o.from = t->state.from;
    if (t->kind == STATE_LOAD) o.bytes = e->state_bytes;
  }
  if (!MM_GROW(e->processes.order, &e->processes.order_cap, o.bytes, err)) return false;
  if (o.bytes) t->kind == STEP ? put_step(t->step.batch, e->processes.order) : put(e->processes.order, t->state.given, e->state_bytes);
  send_to_all(e->processes.group, &o, sizeof o);
  send_to_all(e->processes.group, e->processes.order, o.bytes);
  if (t->kind == CLOSE) mm_process_group_part(e->processes.group);
  return true;
}

/* ---- what came of it ---- */

/* How long processes wait for each other at the end of a task; 0: without end. Ranks of one stage end a step together. */
static double limit_of(const mm_engine *e, const task *t) {
  return t->kind == STEP && e->shards->pack.pp == 1 ? mm_comm_timeout(e->comm[0]) : 0;
}

/* Bytes that a rank has for the first process. */
static size_t result_bytes(const mm_engine *e, const task *t, uint32_t r) {
  const rank_facts *f = &e->facts[r];
  const mm_model *m = e->model;
  const bool first = r % e->shards->pack.tp == 0;
  switch (t->kind) {
    case STEP:
      if (f->layer_end < m->layers || !t->step.logits || f->vocab_first >= m->vocab) return 0;
      return t->step.batch->out_count * sizeof *t->step.logits * mm_min(f->vocab_rows, m->vocab - f->vocab_first);
    case HIDDEN: {
      const uint32_t l = e->rank[0].forward.tap_layer[t->hidden.tap];
      return first && l >= f->layer_first && l < f->layer_end ? t->hidden.rows * sizeof *t->hidden.out * m->hidden : 0;
    }
    case LOAD: return first ? (f->layer_end - f->layer_first) * sizeof *t->load * m->experts : 0;
    case STATE_SAVE: return f->state_bytes;
    default: return 0;
  }
}

/* Where it is among all of that, and from column to column of logits. */
typedef struct chunk {
  char *at;
  size_t bytes, rows, pitch;
} chunk;

static chunk place_of(const mm_engine *e, const task *t, uint32_t r) {
  const rank_facts *f = &e->facts[r];
  const size_t bytes = result_bytes(e, t, r);
  if (t->kind == STEP) {
    const size_t rows = t->step.batch->out_count;
    return (chunk){(char *)(t->step.logits + f->vocab_first), bytes / mm_max(rows, 1), rows, e->model->vocab * sizeof *t->step.logits};
  }
  if (t->kind == HIDDEN) return (chunk){(char *)t->hidden.out, bytes, 1, 0};
  if (t->kind == LOAD) return (chunk){(char *)(t->load + (size_t)f->layer_first * e->model->experts), bytes, 1, 0};
  size_t at = 0;
  for (uint32_t i = 0; i < r; i++) at += e->facts[i].state_bytes;
  return (chunk){(char *)t->state.saved + at, bytes, 1, 0};
}

static size_t results_bytes(const mm_engine *e, const task *t, uint32_t process) {
  size_t n = 0;
  for (uint32_t r = process * e->here; r < (process + 1) * e->here; r++) n += result_bytes(e, t, r);
  return n;
}

/* All that a process's ranks made, side by side in e->processes.order; taken from there, or put there. */
static void move_results(mm_engine *e, const task *t, uint32_t process, bool take) {
  char *at = e->processes.order;
  for (uint32_t r = process * e->here; r < (process + 1) * e->here; r++) {
    if (!result_bytes(e, t, r)) continue;
    const chunk s = place_of(e, t, r);
    for (size_t i = 0; i < s.rows; i++, at += s.bytes)
      take ? memcpy(s.at + i * s.pitch, at, s.bytes) : memcpy(at, s.at + i * s.pitch, s.bytes);
  }
}

/* In place of whether all did it: the first process has a rank that is away, and says that when it is back and there is a next task. */
#define LATER 2u

bool mm_engine_hear(mm_engine *e, const task *t, bool ok, mm_err *err) {
  mm_process_group *const process_group = e->processes.group;
  if (!process_group) return ok;
  e->processes.unheard = !mm_engine_all_back(e, MM_IGNORED); /* others may wait for who is away */
  if (e->processes.unheard) {
    const uint32_t later = LATER;
    send_to_all(process_group, &later, sizeof later);
    return ok;
  }
  bool waited = !ok && strcmp(err->code, "E_RANK") == 0; /* for a rank that failed, or hangs with all of its process */
  size_t most = 0;
  for (uint32_t p = 1; ok && p < process_group->processes; p++) most = mm_max(most, results_bytes(e, t, p));
  ok = ok && MM_GROW(e->processes.order, &e->processes.order_cap, most, err);
  for (uint32_t p = 1; p < process_group->processes; p++) {
    mm_err theirs;
    receive_within(process_group, p, &theirs.status, sizeof theirs.status, waited ? MM_LATE_S : limit_of(e, t));
    if (theirs.status == MM_OK) continue;
    receive_from(process_group, p, &theirs, sizeof theirs);
    if (ok || (waited && strcmp(theirs.code, "E_RANK") != 0)) *err = (mm_err){0}, mm_fail_as(err, &theirs); /* why it did not come */
    ok = false, waited = strcmp(err->code, "E_RANK") == 0;
  }
  const uint32_t all = ok;
  send_to_all(process_group, &all, sizeof all);
  for (uint32_t p = 1; ok && p < process_group->processes; p++) {
    receive_from(process_group, p, e->processes.order, results_bytes(e, t, p));
    move_results(e, t, p, true);
  }
  return ok;
}

/* ---- those that follow ---- */

/* The task of an order. Arrays that its ranks read lie in processes.order. */
typedef struct following {
  task task;
  mm_batch batch;
  mm_paging paging;
  char *out; /* they write logits, hidden states, load or states there */
  size_t out_cap;
} following;

static bool take_step(mm_engine *e, following *f, const order *o, mm_err *err) {
  const char *at = e->processes.order;
  f->batch = (mm_batch){.tokens = o->tokens, .span_count = o->spans, .out_count = o->outs};
  f->batch.span = (const mm_span *)(const void *)at, at += o->spans * sizeof *f->batch.span;
  f->batch.id = (const int32_t *)(const void *)at, at += o->tokens * sizeof *f->batch.id;
  f->batch.out = (const uint32_t *)(const void *)at, at += o->outs * sizeof *f->batch.out;
  if (e->pages) {
    const uint32_t per_slot = e->paging.per_slot;
    if (!e->processes.table &&
        !(e->processes.table = mm_calloc((size_t)e->config.limits.slots * per_slot, sizeof *e->processes.table, err)))
      return false;
    f->paging = (mm_paging){e->processes.table, per_slot, o->copies, (const mm_page_copy *)(const void *)at, 0};
    at += o->copies * sizeof *f->paging.copy;
    for (uint32_t i = 0; i < o->spans; i++) {
      const size_t n = pages_of(&f->batch.span[i]) * sizeof *e->processes.table;
      if (n) memcpy(e->processes.table + (size_t)f->batch.span[i].slot * per_slot, at, n);
      at += n;
    }
    f->batch.paging = &f->paging;
  }
  return true;
}

static bool take(mm_engine *e, following *f, const order *o, mm_err *err) {
  const mm_model *m = e->model;
  size_t out = 0;
  switch (o->kind) {
    case STEP:
      if (!take_step(e, f, o, err)) return false;
      out = o->outs * sizeof(float) * m->vocab;
      break;
    case HIDDEN: out = o->rows * sizeof(float) * m->hidden; break;
    case LOAD: out = m->layers * sizeof(uint64_t) * m->experts; break;
    case STATE_SAVE: out = e->state_bytes; break;
    default: break;
  }
  if (!MM_GROW(f->out, &f->out_cap, mm_max(out, 1), err)) return false;
  void *const to = f->out;
  f->task = (task){.kind = (task_kind)o->kind};
  switch (o->kind) {
    case STEP: f->task.step.batch = &f->batch, f->task.step.logits = to; break;
    case HIDDEN: f->task.hidden.tap = o->tap, f->task.hidden.rows = o->rows, f->task.hidden.out = to; break;
    case LOAD: f->task.load = to; break;
    case STATE_COPY:
    case STATE_SAVE:
    case STATE_LOAD:
      f->task.state.to = o->to, f->task.state.from = o->from;
      f->task.state.saved = to, f->task.state.given = e->processes.order;
      break;
    default: break;
  }
  return true;
}

static bool follow_one(mm_engine *e, following *f, const order *o, mm_err *err) {
  mm_process_group *const w = e->processes.group;
  const uint32_t me = w->process;
  if (!MM_GROW(e->processes.order, &e->processes.order_cap, mm_max(o->bytes, 1), err)) return false;
  receive_from(w, 0, e->processes.order, o->bytes);
  if (!take(e, f, o, err)) return false;
  mm_err report = {0};
  bool ok = mm_engine_run_here(e, &f->task, &report);
  if (!mm_engine_all_back(e, MM_IGNORED)) return mm_fail_as(err, &report);
  const size_t n = results_bytes(e, &f->task, me);
  ok = ok && MM_GROW(e->processes.order, &e->processes.order_cap, n, &report);
  send_to(w, 0, &report.status, sizeof report.status);
  if (!ok) send_to(w, 0, &report, sizeof report);
  uint32_t all = 0;
  receive_within(w, 0, &all, sizeof all, limit_of(e, &f->task));
  while (all == LATER) receive_from(w, 0, &all, sizeof all);
  if (!all || n == 0) return true;
  move_results(e, &f->task, me, false);
  send_to(w, 0, e->processes.order, n);
  return true;
}

bool mm_engine_follow(const mm_shards *shards, const mm_engine_config *c, mm_err *err) {
  mm_process_group *const w = c->process_group;
  char build[BUILD_TEXT], first[BUILD_TEXT] = "";
  put_build(build);
  receive_within(w, 0, first, sizeof first, MM_IDLE);
  if (memcmp(build, first, sizeof build) != 0)
    return mm_fail(err, MM_USAGE, "E_MPI", mm_at(NULL, NULL), "process %u: found a build of %s, process 0 is of %.*s; expected the same",
                   w->process, build, BUILD_TEXT - 1, first);
  shared_config s;
  receive_from(w, 0, &s, sizeof s);
  s.options.threads = c->options.threads;
  const mm_engine_config own = {.ops = c->ops ? c->ops : mm_ops_find(s.device, err),
                                .limits = s.limits,
                                .options = s.options,
                                .tap = s.tap,
                                .taps = s.taps,
                                .verify = s.verify,
                                .device = c->device,
                                .memory = {.fits = s.fits, .share = s.share, .outs = s.outs, .least = s.least},
                                .process_group = w};
  if (!own.ops) return false;
  mm_engine *e = mm_engine_open(shards, &own, err);
  if (!e) return err->status == MM_OK; /* it is another process that failed, and the first one says so */
  following f = {0};
  bool ok = true;
  for (order o = {0}; ok;) {
    receive_within(w, 0, &o, sizeof o, MM_IDLE);
    if (o.kind == CLOSE) break;
    ok = follow_one(e, &f, &o, err);
  }
  if (ok) mm_process_group_part(w);
  if (mm_engine_all_back(e, MM_IGNORED)) free(f.out); /* a rank that is away may write to it still */
  mm_engine_close(e);
  return ok;
}
