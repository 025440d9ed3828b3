/* A rank that stays away from a step until another one times out: the step ends without it, and so does every call until it
 * is back; then the engine goes on. The batch that it comes back to is the one it was given, whatever the caller made of its memory. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/engine/comm.h"
#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

static mm_backend *first;
static atomic_bool leaves, away, misses, other;
static const int32_t ids[4] = {1, 2, 3, 4};

static mm_backend *open_rank(const mm_backend_config *c, mm_err *err) {
  mm_backend *b = mm_ops_cpu.open(c, err);
  if (c->place.rank == 0) first = b;
  return b;
}

/* The first rank says that it misses the other one, which does not come as long as `leaves` holds. */
static bool begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (b == first && atomic_load(&misses)) return mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "rank 0 waited for rank 1: timeout");
  for (atomic_store(&away, b != first && atomic_load(&leaves)); b != first && atomic_load(&leaves);) usleep(1000);
  if (b != first) atomic_store(&away, false);
  if (batch->tokens != 4 || memcmp(batch->id, ids, sizeof ids) != 0 || batch->span->count != 4 || *batch->out != 3)
    atomic_store(&other, true);
  return mm_ops_cpu.begin(b, batch, err);
}

/* Its batch is no more when it returns. */
static bool step(mm_engine *e, float *logits, mm_err *err) {
  int32_t id[4];
  mm_span span = {0, 0, 4, 0};
  uint32_t out = 3;
  memcpy(id, ids, sizeof id);
  mm_batch batch = {4, id, 1, &span, 1, &out, NULL, NULL};
  *err = (mm_err){0};
  const bool done = mm_engine_step(e, &batch, logits, err);
  memset(id, 0x7f, sizeof id);
  span.count = out = batch.tokens = 77;
  return done;
}

/* An engine of two ranks, and room for its logits. */
typedef struct two {
  ref_model ref;
  ref_shards *shards;
  mm_engine *e;
  float *got;
} two;
static void open_two(two *t, const mm_ops *ops) {
  mm_err err = {0};
  const mm_limits limits = {.max_tokens = 8, .slots = 1, .max_positions = 8};
  t->ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  t->shards = ref_cut(&t->ref, 2);
  t->e = mm_engine_open(&t->shards->s, &(mm_engine_config){.ops = ops, .limits = limits, .options.threads = 1}, &err);
  if (!t->e) fail_msg("%s", err.text);
  t->got = malloc(t->ref.m.vocab * sizeof *t->got);
}
static void close_two(two *t) {
  mm_engine_close(t->e);
  free(t->got);
  ref_uncut(t->shards);
  ref_free(&t->ref);
}

TEST(comes_back) {
  mm_ops ops = mm_ops_cpu;
  ops.open = open_rank, ops.begin = begin;
  mm_err err = {0};
  two t;
  open_two(&t, &ops);
  mm_engine *const e = t.e;
  float *const got = t.got, *want = malloc(t.ref.m.vocab * sizeof *want);
  assert_true(step(e, want, &err));
  atomic_store(&leaves, true), atomic_store(&misses, true);
  const double from = mm_now();
  assert_false(step(e, got, &err));
  const double took = mm_now() - from;
  assert_string_equal(err.code, "E_RANK");
  assert_non_null(strstr(err.text, "rank 1: timeout"));
  assert_true(took > MM_RETURN_S - 0.1 && took < 5);
  assert_true(atomic_load(&away));
  atomic_store(&misses, false);
  for (int i = 0; i < 3; i++) { /* at once, whatever is asked */
    const uint32_t to = 0;
    assert_false(i == 0 ? step(e, got, &err) : i == 1 ? mm_engine_expert_load(e, NULL, &err) : mm_engine_fork(e, 0, &to, 1, &err));
    assert_string_equal(err.code, "E_RANK");
    err = (mm_err){0};
  }
  assert_true(mm_now() - from - took < 0.5);
  atomic_store(&leaves, false);
  bool back = false;
  for (int i = 0; i < 5000 && !back; i++) back = step(e, got, &err), usleep(1000);
  if (!back) fail_msg("%s", err.text);
  assert_memory_equal(want, got, t.ref.m.vocab * sizeof *want);
  assert_false(atomic_load(&other));
  free(want);
  close_two(&t);
}

/* Weights that fail to come (mm_comm_fail), reported between the work of ranks and by none of them: one gives up without a word, or all
 * believe that they are done. */
static mm_comm *met;
static atomic_bool breaks, gives_up;
static mm_backend *open_met(const mm_backend_config *c, mm_err *err) {
  if (c->place.rank == 0) met = c->comm;
  return open_rank(c, err);
}
static bool end_of_broken(mm_backend *b, float *out, mm_err *err) {
  const bool done = mm_ops_cpu.end(b, out, err);
  if (b != first || !atomic_exchange(&breaks, false)) return done;
  mm_err reason = {0};
  if (!mm_fail(&reason, MM_INTEGRITY, "E_DIGEST", mm_at(NULL, NULL), "a block is damaged")) mm_comm_fail(met, &reason);
  return !atomic_load(&gives_up);
}

TEST(load_fails) {
  for (int silent = 0; silent < 2; silent++) {
    mm_ops ops = mm_ops_cpu;
    ops.open = open_met, ops.end = end_of_broken;
    mm_err err = {0};
    two t;
    open_two(&t, &ops);
    assert_true(step(t.e, t.got, &err));
    atomic_store(&gives_up, silent), atomic_store(&breaks, true);
    for (int i = 0; i < 3; i++) { /* the step, and every later one */
      assert_false(step(t.e, t.got, &err));
      assert_string_equal(err.code, "E_DIGEST");
      assert_int_equal(err.status, MM_INTEGRITY);
    }
    close_two(&t);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
