/* Engines of several processes: here each is a thread, and what crosses goes through queues in place of MPI. Random calls give the bits
 * that one process gives, whatever is cut between processes; a rank that fails in any of them is reported, and all go on. */
#include <pthread.h>
#include <stdatomic.h>

#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/runtime/threads_fixture.h"
#include "tests/unit/unit.h"

enum { MOST = 8, LENGTH = 40, SLOTS = 3 };

/* ---- processes ---- */

/* The next begin of the rank of this number fails; rank 0 misses rank 1, which stays away. */
static atomic_int fail_rank = -1;
static atomic_bool misses, leaves;
static mm_backend *backend_of[16];
static double timeout;
static mm_backend *open_rank(const mm_backend_config *c, mm_err *err) {
  if (timeout > 0) mm_comm_set_timeout(c->comm, timeout);
  return backend_of[c->place.rank] = mm_ops_cpu.open(c, err);
}
static bool begin_rank(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const int fails = fail_rank;
  if (b == backend_of[0] && misses) return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "rank 0 waited for rank 1: timeout");
  while (b == backend_of[1] && leaves) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  if (fails >= 0 && b == backend_of[fails]) {
    fail_rank = -1;
    return mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails");
  }
  return mm_ops_cpu.begin(b, batch, err);
}
static mm_ops ops; /* written before any process starts */

typedef struct process {
  pthread_t thread;
  mm_process_group process_group;
  const mm_shards *shards;
  bool ok;
  mm_err err;
} process;

static void *follow(void *arg) {
  process *p = arg;
  const mm_engine_config c = {.ops = &ops, .options.threads = 1, .process_group = &p->process_group};
  p->ok = mm_engine_follow(p->shards, &c, &p->err);
  return NULL;
}

static const uint32_t taps[] = {0, 2};
static const mm_limits limits = {.max_tokens = LENGTH, .slots = SLOTS, .max_positions = LENGTH + 60};

static mm_engine *open_engine(const mm_shards *shards, mm_process_group *w, mm_err *err) {
  return mm_engine_open(
      shards, &(mm_engine_config){.ops = &ops, .limits = limits, .options.threads = 1, .tap = taps, .taps = 2, .process_group = w}, err);
}

static void start(process *p, uint32_t n, const mm_shards *shards) {
  for (uint32_t i = 0; i < n; i++) {
    p[i] = (process){.process_group = {i, n, exchange}, .shards = shards};
    if (i) assert_int_equal(pthread_create(&p[i].thread, NULL, follow, &p[i]), 0);
  }
}

static void stop(process *p, uint32_t n) {
  for (uint32_t i = 1; i < n; i++) {
    pthread_join(p[i].thread, NULL);
    if (!p[i].ok) fail_msg("process %u: %s", i, p[i].err.text);
  }
  assert_null(post.first);
}

/* ---- calls ---- */

typedef struct side {
  mm_engine *e;
  float logits[LENGTH * 64], hidden[LENGTH * 24];
  uint64_t load[4 * 5];
  char *state;
  mm_err err;
} side;

/* Both engines do the same; what they say and hold is the same to the bit. */
static void both_step(side *s, const mm_batch *b, uint32_t vocab, bool good) {
  for (int i = 0; i < 2; i++) s[i].err = (mm_err){0}, memset(s[i].logits, 0, sizeof s[i].logits);
  for (int i = 0; i < 2; i++)
    if (mm_engine_step(s[i].e, b, s[i].logits, &s[i].err) != good) fail_msg("engine %d: %s", i, s[i].err.text);
  if (!good) assert_string_equal(s[1].err.code, s[0].err.code);
  if (good) assert_memory_equal(s[0].logits, s[1].logits, b->out_count * vocab * sizeof(float));
}

static uint32_t below(uint32_t n) { return n ? (uint32_t)((ref_random() + 1) / 2 * (float)n) % n : 0; }

/* A chunk of one slot, or single tokens of all that hold some. */
static void random_step(side *s, const mm_model *m, bool good) {
  int32_t id[LENGTH];
  uint32_t out[LENGTH], outs = 0, rows = 0, spans = 0;
  mm_span span[SLOTS];
  const bool single = below(2) == 0;
  for (uint32_t slot = 0; slot < SLOTS; slot++) {
    const uint32_t held = mm_engine_held(s[0].e, slot);
    assert_int_equal(held, mm_engine_held(s[1].e, slot));
    if (!single && below(2)) continue;
    const uint32_t count = single ? 1 : 1 + below(9), pos = held + count > limits.max_positions ? 0 : held;
    span[spans++] = (mm_span){(int32_t)slot, rows, count, pos};
    for (uint32_t i = 0; i < count; i++, rows++) id[rows] = (int32_t)below(m->vocab);
  }
  for (uint32_t i = 0; i < rows; i++)
    if (below(3)) out[outs++] = i;
  if (!rows) return;
  both_step(s, &(mm_batch){rows, id, spans, span, outs, out, NULL, NULL}, m->vocab, good);
  for (uint32_t t = 0; good && t < 2; t++) {
    for (int i = 0; i < 2; i++) assert_true(mm_engine_hidden(s[i].e, t, s[i].hidden, &s[i].err));
    assert_memory_equal(s[0].hidden, s[1].hidden, rows * m->hidden * sizeof(float));
  }
}

/* A choice of each engine's own, and what a slot then holds saved, forked, and restored. */
static void random_slots(side *s, const mm_model *m) {
  const uint32_t from = below(SLOTS), to = (from + 1) % SLOTS, held = mm_engine_held(s[0].e, from);
  const size_t bytes = mm_engine_state_bytes(s[0].e);
  int32_t chosen[2] = {0};
  assert_int_equal(bytes, mm_engine_state_bytes(s[1].e));
  if (held && held < limits.max_positions)
    for (int i = 0; i < 2; i++) {
      const mm_sampling set = {.temperature = 1, .top_p = 0.9, .seed = held};
      const mm_batch b = {1, &(int32_t){3}, 1, &(mm_span){(int32_t)from, 0, 1, held}, 1, &(uint32_t){0}, &set, NULL};
      assert_true(mm_engine_queue(s[i].e, &b, &s[i].err) && mm_engine_collect(s[i].e, &chosen[i], &s[i].err));
      if (i) assert_int_equal(chosen[0], chosen[1]);
    }
  for (int i = 0; i < 2; i++) {
    assert_true(mm_engine_fork(s[i].e, from, &to, 1, &s[i].err));
    if (!mm_engine_held(s[i].e, from)) continue;
    memset(s[i].state, 0, bytes);
    assert_true(mm_engine_save(s[i].e, from, s[i].state, &s[i].err));
    const uint32_t tokens = mm_engine_held(s[i].e, from),
                   page = mm_pages_table(mm_engine_pages(s[i].e))[from * mm_pages_per_slot(mm_engine_pages(s[i].e))];
    if (tokens <= MM_PAGE) assert_true(mm_engine_resume(s[i].e, (from + 2) % SLOTS, &page, NULL, tokens, s[i].state, &s[i].err));
  }
  assert_memory_equal(s[0].state, s[1].state, bytes);
  for (int i = 0; i < 2; i++) assert_true(mm_engine_expert_load(s[i].e, s[i].load, &s[i].err));
  assert_memory_equal(s[0].load, s[1].load, m->layers * m->experts * sizeof(uint64_t));
}

static void cut_stages(ref_shards *shards, uint32_t stages) {
  if (stages == 2) ref_cut_stages(shards, 2);
  if (stages == 3) ref_cut_at(shards, (const uint32_t[]){1, 2}, 2);
}

static void same_as_one(mm_model m, uint32_t tp, uint32_t stages, uint32_t processes) {
  ref_model ref = ref_build(m);
  ref_shards *shards = ref_cut(&ref, tp);
  cut_stages(shards, stages);
  static process p[MOST];
  static side s[2];
  start(p, processes, &shards->s);
  for (int i = 0; i < 2; i++) {
    s[i] = (side){0};
    if (!(s[i].e = open_engine(&shards->s, i ? &p[0].process_group : NULL, &s[i].err))) fail_msg("%s", s[i].err.text);
    s[i].state = calloc(1, mm_engine_state_bytes(s[i].e) + 1);
  }
  for (uint32_t n = 0; n < 60; n++) {
    random_step(s, &m, true);
    if (n % 5 == 4) random_slots(s, &m);
    if (n % 7 != 6) continue;
    mm_batch none = {0}; /* nothing crosses a border */
    both_step(s, &none, m.vocab, true);
  }
  for (int i = 0; i < 2; i++) mm_engine_close(s[i].e), free(s[i].state);
  stop(p, processes);
  ref_uncut(shards);
  ref_free(&ref);
}

TEST(every_cut) {
  for (int m1 = 0; m1 < 2; m1++) {
    const mm_model m = ref_dims(m1 ? MM_FAMILY_M1 : MM_FAMILY_M2, m1);
    same_as_one(m, 2, 1, 2);
    same_as_one(m, 4, 1, 2);
    same_as_one(m, 4, 1, 4);
    same_as_one(m, 1, 2, 2);
    same_as_one(m, 2, 2, 2);
    same_as_one(m, 2, 2, 4);
    same_as_one(m, 4, 2, 4);
    same_as_one(m, 2, 3, 2); /* a process has part of a stage and the next one */
    same_as_one(m, 4, 3, 4);
  }
}

/* The first step has no rows, nor what is read after it. */
TEST(nothing) {
  for (uint32_t processes = 2; processes <= 4; processes += 2) {
    const mm_model m = ref_dims(MM_FAMILY_M1, true);
    ref_model ref = ref_build(m);
    ref_shards *shards = ref_cut(&ref, 2);
    ref_cut_stages(shards, 2);
    static process p[MOST];
    mm_err err = {0};
    float none[1];
    start(p, processes, &shards->s);
    mm_engine *e = open_engine(&shards->s, &p[0].process_group, &err);
    if (!e) fail_msg("%s", err.text);
    assert_true(mm_engine_step(e, &(mm_batch){0}, none, &err));
    for (uint32_t t = 0; t < 2; t++) assert_true(mm_engine_hidden(e, t, none, &err));
    mm_engine_close(e);
    stop(p, processes);
    ref_uncut(shards);
    ref_free(&ref);
  }
}

/* Every rank fails once, between steps that do not; a fresh engine gives what comes after. */
TEST(failing) {
  const struct {
    uint32_t tp, processes;
    bool stages;
  } cut[] = {{2, 2, false}, {4, 2, false}, {1, 2, true}, {2, 2, true}, {2, 4, true}};
  for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
    const mm_model m = ref_dims(MM_FAMILY_M1, true);
    ref_model ref = ref_build(m);
    ref_shards *shards = ref_cut(&ref, cut[i].tp);
    if (cut[i].stages) ref_cut_stages(shards, 2);
    static process p[MOST];
    mm_err err = {0};
    float want[3 * 64], got[3 * 64];
    const mm_batch b = {3, (const int32_t[]){5, 6, 7}, 1, &(mm_span){0, 0, 3, 0}, 3, (const uint32_t[]){0, 1, 2}, NULL, NULL};
    start(p, cut[i].processes, &shards->s);
    mm_engine *e = open_engine(&shards->s, &p[0].process_group, &err);
    if (!e) fail_msg("%s", err.text);
    assert_true(mm_engine_step(e, &b, want, &err));
    for (uint32_t r = 0; r < 3 * mm_pack_ranks(&shards->s.pack); r++) {
      fail_rank = (int)(r % mm_pack_ranks(&shards->s.pack));
      err = (mm_err){0};
      assert_false(mm_engine_step(e, &b, got, &err));
      assert_string_equal(err.code, "E_TEST");
      assert_int_equal(mm_engine_held(e, 0), 0);
      err = (mm_err){0};
      if (r % 2) continue; /* once more without a step between */
      assert_true(mm_engine_step(e, &b, got, &err));
      assert_memory_equal(want, got, 3 * m.vocab * sizeof *got);
    }
    mm_engine_close(e);
    stop(p, cut[i].processes);
    ref_uncut(shards);
    ref_free(&ref);
  }
}

/* A rank of the first process stays away from a step and comes back: the others, which wait meanwhile, go on with it. idles: nothing is
 * asked for then, for longer than processes wait for each other; they know that they are to be heard later. */
static void stay_away(uint32_t tp, uint32_t stages, bool idles) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M1, true));
  ref_shards *shards = ref_cut(&ref, tp);
  if (stages > 1) ref_cut_stages(shards, stages);
  static process p[2];
  mm_err err = {0};
  float want[64], got[64];
  const mm_batch b = {2, (const int32_t[]){5, 6}, 1, &(mm_span){0, 0, 2, 0}, 1, (const uint32_t[]){1}, NULL, NULL};
  timeout = idles;
  start(p, 2, &shards->s);
  mm_engine *e = open_engine(&shards->s, &p[0].process_group, &err);
  if (!e) fail_msg("%s", err.text);
  for (int last = 0; last < 2; last++) { /* then there is a step, or the end */
    assert_true(mm_engine_step(e, &b, want, &err));
    misses = leaves = true;
    assert_false(mm_engine_step(e, &b, got, &err));
    assert_string_equal(err.code, "E_RANK");
    misses = leaves = false;
    bool back = false; /* a slot that is to hold nothing needs no rank, but that none is away */
    for (int i = 0; i < 5000 && !back; i++) {
      nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
      back = mm_engine_resume(e, 1, &(uint32_t){0}, NULL, 0, NULL, MM_IGNORED);
    }
    assert_true(back);
    err = (mm_err){0};
    if (last || idles) break;
    assert_true(mm_engine_step(e, &b, got, &err));
    assert_memory_equal(want, got, ref.m.vocab * sizeof *got);
  }
  if (idles) nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
  mm_engine_close(e);
  stop(p, 2);
  assert_int_equal(overdue, 0);
  timeout = 0;
  ref_uncut(shards);
  ref_free(&ref);
}
TEST(away) { stay_away(2, 2, false); }
TEST(away_and_idle) { stay_away(4, 1, true); }

/* Processes that do not fit the ranks, a device that needs whole stages, another checkpoint elsewhere, and threads pinned to the CPUs of
 * another process. */
TEST(refused) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 2), *other = ref_cut(&ref, 2), *more = ref_cut(&ref, 4);
  mm_process_group w = {0, 3, exchange};
  mm_err err = {0};
  assert_null(open_engine(&shards->s, &w, &err));
  assert_string_equal(err.code, "E_PARALLEL");
  mm_ops whole = mm_ops_cpu;
  whole.across = false, err = (mm_err){0}, w.processes = 2;
  assert_null(
      mm_engine_open(&shards->s, &(mm_engine_config){.ops = &whole, .limits = limits, .options.threads = 1, .process_group = &w}, &err));
  assert_string_equal(err.code, "E_PARALLEL");
  for (int i = 0; i < 3; i++) { /* of another plan, of other weights of rank 1, or of more ranks */
    other->s.pack.plan.byte[3] = i == 0;
    other->s.pack.rank[1].part[0].root.byte[3] = i == 1;
    process p[2];
    start(p, 2, &shards->s);
    err = (mm_err){0};
    assert_null(open_engine(i < 2 ? &other->s : &more->s, &p[0].process_group, &err));
    assert_string_equal(err.code, "E_MPI");
    pthread_join(p[1].thread, NULL);
    assert_string_equal(p[1].err.code, "E_MPI");
    assert_null(post.first);
  }
  process p[2]; /* of one machine, with the same CPUs */
  start(p, 2, &shards->s);
  err = (mm_err){0};
  assert_null(mm_engine_open(
      &shards->s,
      &(mm_engine_config){.ops = &ops, .limits = limits, .options.threads = 1, .options.pin = true, .process_group = &p[0].process_group},
      &err));
  assert_string_equal(err.code, "E_LIMITS");
  assert_non_null(strstr(err.text, "processes 0 and 1: found "));
  pthread_join(p[1].thread, NULL);
  assert_string_equal(p[1].err.code, "E_LIMITS");
  assert_null(post.first);
  ref_uncut(shards), ref_uncut(other), ref_uncut(more);
  ref_free(&ref);
}

/* ---- random failures ---- */

/* The call of a rank that fails next. */
enum { BEGIN, MIDDLE, END, READ, COUNT_LOAD, COPY, SAVE, RESTORE, OPENING, PLACES };

/* Side 0 is one process, side 1 several. */
static struct {
  mm_backend *backend[16];
  mm_comm *comm[16];
  bool fails[16]; /* at the end of the step under way */
  atomic_int rank, place;
  atomic_bool misses, leaves; /* rank 0 times out waiting for rank 1, which stays away */
} faults[2];

static uint32_t rank_in(int which, const mm_backend *b) {
  uint32_t r = 0;
  while (faults[which].backend[r] != b) r++;
  return r;
}
static int side_of(const mm_backend *b) {
  for (int i = 0; i < 2; i++)
    for (uint32_t r = 0; r < 16; r++)
      if (faults[i].backend[r] == b) return i;
  abort();
}
static bool fails_here(int which, uint32_t rank, int place) {
  if (faults[which].place != place || faults[which].rank != (int)rank) return false;
  faults[which].place = -1;
  return true;
}
static bool passes(const mm_backend *b, int place, mm_err *err) {
  const int which = side_of(b);
  return !fails_here(which, rank_in(which, b), place) || mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails");
}

static mm_backend *failing_open(int which, const mm_backend_config *c, mm_err *err) {
  const uint32_t r = c->place.rank;
  if (fails_here(which, r, OPENING)) return mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails"), NULL;
  faults[which].comm[r] = c->comm;
  return faults[which].backend[r] = mm_ops_cpu.open(c, err);
}
static mm_backend *failing_open_one(const mm_backend_config *c, mm_err *err) { return failing_open(0, c, err); }
static mm_backend *failing_open_many(const mm_backend_config *c, mm_err *err) { return failing_open(1, c, err); }
static bool failing_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const int which = side_of(b);
  const uint32_t rank = rank_in(which, b);
  faults[which].fails[rank] = false;
  if (rank == 0 && faults[which].misses) return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "rank 0 waited for rank 1: timeout");
  while (rank == 1 && faults[which].leaves) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  return passes(b, BEGIN, err) && mm_ops_cpu.begin(b, batch, err);
}
static void failing_layer(mm_backend *b, uint32_t l) {
  const int which = side_of(b);
  const uint32_t r = rank_in(which, b);
  mm_ops_cpu.weights.layer(b, l);
  if (l % 2 == 0 || !fails_here(which, r, MIDDLE)) return;
  faults[which].fails[r] = true;
  mm_comm_abort(faults[which].comm[r]);
}
static bool failing_end(mm_backend *b, float *out, mm_err *err) {
  const int which = side_of(b);
  if (faults[which].fails[rank_in(which, b)]) return mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank failed");
  return mm_ops_cpu.end(b, out, err) && passes(b, END, err);
}
static bool failing_read(mm_backend *b, mm_act a, uint32_t rows, float *out, mm_err *err) {
  return passes(b, READ, err) && mm_ops_cpu.read(b, a, rows, out, err);
}
static bool failing_load(mm_backend *b, uint64_t *load, mm_err *err) {
  return passes(b, COUNT_LOAD, err) && mm_ops_cpu.expert_load(b, load, err);
}
static bool failing_copy(mm_backend *b, uint32_t to, uint32_t from, mm_err *err) {
  return passes(b, COPY, err) && mm_ops_cpu.cache.copy(b, to, from, err);
}
static bool failing_save(mm_backend *b, uint32_t slot, void *state, mm_err *err) {
  return passes(b, SAVE, err) && mm_ops_cpu.cache.save(b, slot, state, err);
}
static bool failing_restore(mm_backend *b, uint32_t slot, const void *state, mm_err *err) {
  return passes(b, RESTORE, err) && mm_ops_cpu.cache.load(b, slot, state, err);
}

static mm_ops failing_ops[2];
static void *failing_follow(void *arg) {
  process *p = arg;
  const mm_engine_config c = {.ops = &failing_ops[1], .options.threads = 1, .process_group = &p->process_group};
  p->ok = mm_engine_follow(p->shards, &c, &p->err);
  return NULL;
}

static void failing_start(process *p, uint32_t n, const mm_shards *shards) {
  for (uint32_t i = 0; i < n; i++) {
    p[i] = (process){.process_group = {i, n, exchange}, .shards = shards};
    if (i) assert_int_equal(pthread_create(&p[i].thread, NULL, failing_follow, &p[i]), 0);
  }
}

/* Some rank's failure in what comes next, or none. */
static void aim(uint32_t ranks, int from, int to) {
  const int rank = (int)below(ranks), place = below(3) ? from + (int)below((uint32_t)(to - from + 1)) : -1;
  for (int i = 0; i < 2; i++) atomic_store(&faults[i].rank, rank), atomic_store(&faults[i].place, place);
}

/* Both did the same. */
static bool alike(side *s, const bool *done, const char *what) {
  if (done[0] != done[1] || strcmp(s[0].err.code, s[1].err.code) != 0)
    fail_msg("%s: one process %d %s, several %d %s", what, done[0], s[0].err.text, done[1], s[1].err.text);
  for (uint32_t slot = 0; slot < SLOTS; slot++) assert_int_equal(mm_engine_held(s[0].e, slot), mm_engine_held(s[1].e, slot));
  for (int i = 0; i < 2; i++) s[i].err = (mm_err){0}, faults[i].place = -1;
  return done[0];
}

static void failing_step(side *s, const mm_model *m, uint32_t ranks) {
  int32_t id[LENGTH];
  uint32_t out[LENGTH], outs = 0, rows = 0, spans = 0;
  mm_span span[SLOTS];
  bool done[2];
  for (uint32_t slot = 0; slot < SLOTS; slot++) {
    if (below(3) == 0) continue;
    const uint32_t held = mm_engine_held(s[0].e, slot), count = 1 + below(9), pos = held + count > limits.max_positions ? 0 : held;
    span[spans++] = (mm_span){(int32_t)slot, rows, count, pos};
    for (uint32_t i = 0; i < count; i++, rows++) id[rows] = (int32_t)below(m->vocab);
  }
  for (uint32_t i = 0; i < rows; i++)
    if (below(3)) out[outs++] = i;
  const mm_batch b = {rows, id, spans, span, outs, out, NULL, NULL};
  aim(ranks, BEGIN, END);
  for (int i = 0; i < 2; i++) {
    memset(s[i].logits, 0, sizeof s[i].logits);
    done[i] = mm_engine_step(s[i].e, &b, s[i].logits, &s[i].err);
  }
  if (alike(s, done, "step")) assert_memory_equal(s[0].logits, s[1].logits, outs * m->vocab * sizeof(float));
  for (uint32_t t = 0; t < 2; t++) {
    aim(ranks, READ, READ);
    for (int i = 0; i < 2; i++) done[i] = mm_engine_hidden(s[i].e, t, s[i].hidden, &s[i].err);
    if (alike(s, done, "hidden")) assert_memory_equal(s[0].hidden, s[1].hidden, rows * m->hidden * sizeof(float));
  }
}

/* A step that rank 1 stays away from, and perhaps one of another process fails in; whatever is asked until it is back is refused. */
static void away_step(side *s, uint32_t vocab, uint32_t ranks) {
  const mm_batch b = {2, (const int32_t[]){5, 6}, 1, &(mm_span){(int32_t)below(SLOTS), 0, 2, 0}, 1, (const uint32_t[]){1}, NULL, NULL};
  const uint32_t copies = below(5), to = below(SLOTS);
  bool done[2];
  aim(ranks, BEGIN, END);
  for (int i = 0; i < 2; i++) {
    if (faults[i].rank < 2) faults[i].place = -1;
    faults[i].misses = faults[i].leaves = true;
    done[i] = mm_engine_step(s[i].e, &b, s[i].logits, &s[i].err);
    faults[i].misses = false;
  }
  assert_string_equal(s[0].err.code, "E_RANK");
  for (int i = 0; i < 2; i++) done[i] = false, s[i].err.text[0] = 0;
  alike(s, done, "away");
  for (uint32_t n = 0; n < copies; n++) {
    for (int i = 0; i < 2; i++)
      done[i] = n % 2 ? mm_engine_step(s[i].e, &b, s[i].logits, &s[i].err) : mm_engine_fork(s[i].e, 0, &to, 1, &s[i].err);
    assert_string_equal(s[0].err.code, "E_RANK");
    assert_false(alike(s, done, "asked while it is away"));
  }
  for (int i = 0; i < 2; i++) {
    bool back = false;
    faults[i].leaves = false;
    for (int t = 0; t < 5000 && !back; t++) {
      nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
      back = mm_engine_resume(s[i].e, 1, &(uint32_t){0}, NULL, 0, NULL, MM_IGNORED);
    }
    assert_true(back);
    atomic_store(&faults[i].place, -1);
  }
  both_step(s, &b, vocab, true); /* before it all processes are done with that one */
}

static void failing_slots(side *s, uint32_t ranks) {
  const uint32_t from = below(SLOTS), to = below(SLOTS), at = below(SLOTS);
  const size_t bytes = mm_engine_state_bytes(s[0].e);
  bool done[2];
  aim(ranks, COPY, COPY);
  for (int i = 0; i < 2; i++) done[i] = mm_engine_fork(s[i].e, from, &to, 1, &s[i].err);
  alike(s, done, "fork");
  aim(ranks, SAVE, SAVE);
  for (int i = 0; i < 2; i++) memset(s[i].state, 0, bytes), done[i] = mm_engine_save(s[i].e, from, s[i].state, &s[i].err);
  if (alike(s, done, "save")) {
    assert_memory_equal(s[0].state, s[1].state, bytes);
    const uint32_t tokens = mm_engine_held(s[0].e, from);
    aim(ranks, RESTORE, RESTORE);
    for (int i = 0; i < 2; i++) {
      const uint32_t page = mm_pages_table(mm_engine_pages(s[i].e))[from * mm_pages_per_slot(mm_engine_pages(s[i].e))];
      done[i] = tokens > MM_PAGE || mm_engine_resume(s[i].e, at, &page, NULL, tokens, s[i].state, &s[i].err);
    }
    alike(s, done, "resume");
  }
  aim(ranks, COUNT_LOAD, COUNT_LOAD);
  for (int i = 0; i < 2; i++) memset(s[i].load, 0, sizeof s[i].load), done[i] = mm_engine_expert_load(s[i].e, s[i].load, &s[i].err);
  alike(s, done, "load"); /* what a step has counted before it failed is anybody's guess */
}

/* A rank that does not open ends all engines, and what comes after begins anew. */
static void failing_opening(const mm_shards *shards, process *p, uint32_t processes, int rank) {
  mm_err err = {0};
  atomic_store(&faults[1].rank, rank), atomic_store(&faults[1].place, OPENING);
  failing_start(p, processes, shards);
  assert_null(mm_engine_open(
      shards, &(mm_engine_config){.ops = &failing_ops[1], .limits = limits, .options.threads = 1, .process_group = &p[0].process_group},
      &err));
  assert_string_equal(err.code, "E_TEST");
  for (uint32_t i = 1; i < processes; i++) {
    pthread_join(p[i].thread, NULL);
    const bool its = i == (uint32_t)rank / (mm_pack_ranks(&shards->pack) / processes);
    assert_int_equal(p[i].ok, !its);
    assert_string_equal(p[i].err.code, its ? "E_TEST" : "");
  }
  assert_null(post.first);
}

static void fail_at_random(mm_model m, uint32_t tp, uint32_t stages, uint32_t processes) {
  ref_model ref = ref_build(m);
  ref_shards *shards = ref_cut(&ref, tp);
  cut_stages(shards, stages);
  static process p[MOST];
  static side s[2];
  const uint32_t ranks = mm_pack_ranks(&shards->s.pack);
  for (int r = 0; r < (int)ranks; r++) failing_opening(&shards->s, p, processes, r);
  for (int i = 0; i < 2; i++) memset(faults[i].backend, 0, sizeof faults[i].backend); /* those are gone */
  failing_start(p, processes, &shards->s);
  for (int i = 0; i < 2; i++) {
    s[i] = (side){0};
    mm_process_group *group = i ? &p[0].process_group : NULL;
    const mm_engine_config c = {
        .ops = &failing_ops[i], .limits = limits, .options.threads = 1, .tap = taps, .taps = 2, .process_group = group};
    if (!(s[i].e = mm_engine_open(&shards->s, &c, &s[i].err))) fail_msg("%s", s[i].err.text);
    s[i].state = calloc(1, mm_engine_state_bytes(s[i].e) + 1);
  }
  for (uint32_t n = 0; n < 60; n++) {
    below(4) ? failing_step(s, &m, ranks) : failing_slots(s, ranks);
    if (n == 29 && ranks / processes > 1) away_step(s, m.vocab, ranks);
  }
  for (int i = 0; i < 2; i++) mm_engine_close(s[i].e), free(s[i].state);
  stop(p, processes);
  ref_uncut(shards);
  ref_free(&ref);
}

TEST(random_failures) {
  for (int i = 0; i < 2; i++) {
    failing_ops[i] = mm_ops_cpu, failing_ops[i].open = i ? failing_open_many : failing_open_one, failing_ops[i].begin = failing_begin;
    failing_ops[i].weights.layer = failing_layer, failing_ops[i].end = failing_end, failing_ops[i].read = failing_read,
    failing_ops[i].expert_load = failing_load;
    failing_ops[i].cache.copy = failing_copy, failing_ops[i].cache.save = failing_save, failing_ops[i].cache.load = failing_restore;
    faults[i].place = -1;
  }
  for (int m1 = 0; m1 < 2; m1++) {
    const mm_model m = ref_dims(m1 ? MM_FAMILY_M1 : MM_FAMILY_M2, m1);
    fail_at_random(m, 2, 1, 2);
    fail_at_random(m, 4, 1, 2);
    fail_at_random(m, 1, 2, 2);
    fail_at_random(m, 2, 2, 4);
    fail_at_random(m, 4, 2, 4);
    fail_at_random(m, 4, 2, 8);
    fail_at_random(m, 2, 3, 2);
    fail_at_random(m, 4, 3, 4);
  }
}

int main(void) {
  ops = mm_ops_cpu, ops.open = open_rank, ops.begin = begin_rank;
  return run_unit_tests(NULL, NULL);
}
