/* The engine: whole random models against the double-precision reference in every way of feeding, what it refuses, and ranks that
 * fail. */
#include <math.h>
#include <stdatomic.h>

#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

#define LENGTH 40

typedef struct running {
  ref_model ref;
  ref_shards *shards;
  mm_engine *engine;
  float *logits;
} running;

static const mm_limits limits = {.max_tokens = LENGTH, .slots = 3, .max_positions = LENGTH};

static void start_built(running *r, uint32_t tp, const mm_ops *ops) {
  mm_err err = {0};
  r->shards = ref_cut(&r->ref, tp);
  r->engine = mm_engine_open(&r->shards->s, &(mm_engine_config){.ops = ops, .limits = limits, .options.threads = 1}, &err);
  if (!r->engine) fail_msg("%s", err.text);
  r->logits = malloc(LENGTH * r->ref.m.vocab * sizeof(float));
}

static void start(running *r, mm_model m, uint32_t tp, const mm_ops *ops) {
  r->ref = ref_build(m);
  start_built(r, tp, ops);
}

static void stop(running *r) {
  mm_engine_close(r->engine);
  ref_uncut(r->shards);
  ref_free(&r->ref);
  free(r->logits);
}

/* Not in steps of 7 everywhere: every id of the vocabulary's two ends and middle occurs. */
static int32_t id_at(uint32_t sequence, uint32_t t) { return (int32_t)((t * t * 3 + t * 7 + sequence * 11) % 50); }

/* Expected logits of a sequence's every position. */
static double *expect(const ref_model *ref, uint32_t sequence, uint32_t n) {
  double *out = malloc(n * ref->m.vocab * sizeof *out);
  ref_state s = ref_start(&ref->m, n);
  for (uint32_t t = 0; t < n; t++) ref_step(ref, &s, id_at(sequence, t), out + t * ref->m.vocab);
  ref_stop(&s);
  return out;
}

/* Runs the spans; ids follow the sequence that each slot holds (slot s holds sequence s). All logits wanted. */
static bool step(running *r, const mm_span *span, uint32_t spans, mm_err *err) {
  int32_t id[LENGTH];
  uint32_t out[LENGTH], rows = 0;
  for (uint32_t i = 0; i < spans; i++)
    for (uint32_t t = 0; t < span[i].count; t++, rows++) {
      id[rows] = span[i].slot < 0 ? 0 : id_at((uint32_t)span[i].slot, span[i].pos + t);
      out[rows] = rows;
    }
  return mm_engine_step(r->engine, &(mm_batch){rows, id, spans, span, rows, out, NULL, NULL}, r->logits, err);
}

static void check_rows(const running *r, uint32_t row, uint32_t count, const double *expected) {
  for (uint32_t i = 0; i < count * r->ref.m.vocab; i++) {
    double found = r->logits[row * r->ref.m.vocab + i];
    if (!(fabs(found - expected[i]) <= 2e-4)) fail_msg("logit %u of row %u: found %.8g, expected %.8g", i, row, found, expected[i]);
  }
}

/* Hidden states of layers in any order, and the load of experts, against the reference's: in one step of two sequences and padding, and
 * token by token; every rank count. */
static void check_taps(mm_model m, uint32_t tp) {
  static const uint32_t tap[] = {2, 0, 1};
  enum { TAPS = 3, ROWS = 7 };
  running r = {.ref = ref_build(m)};
  mm_err err = {0};
  const uint32_t H = m.hidden;
  r.shards = ref_cut(&r.ref, tp);
  mm_engine_config c = {.ops = &mm_ops_cpu, .limits = limits, .options.threads = 1, .tap = tap, .taps = TAPS};
  if (!(r.engine = mm_engine_open(&r.shards->s, &c, &err))) fail_msg("%s", err.text);
  r.logits = malloc(LENGTH * m.vocab * sizeof(float));
  float *hidden = malloc((size_t)LENGTH * H * sizeof *hidden);
  double *logits = malloc(m.vocab * sizeof *logits), (*want)[TAPS][64] = malloc(2 * ROWS * sizeof *want);
  uint64_t load[REF_LAYERS * 64] = {0}, expected[REF_LAYERS * 64] = {0};
  for (uint32_t s = 0; s < 2; s++) {
    ref_state state = ref_start(&m, ROWS);
    for (uint32_t t = 0; t < ROWS; t++) {
      ref_step(&r.ref, &state, id_at(s, t), logits);
      for (uint32_t i = 0; i < TAPS; i++) memcpy(want[s * ROWS + t][i], state.hidden[tap[i]], sizeof want[0][0]);
    }
    for (uint32_t l = 0; l < m.layers; l++)
      for (uint32_t e = 0; e < m.experts; e++) expected[l * m.experts + e] += state.load[l][e];
    ref_stop(&state);
  }
  assert_false(mm_engine_hidden(r.engine, 0, hidden, &err)); /* no step yet */
  assert_string_equal(err.code, "E_BATCH");
  assert_non_null(strstr(err.text, "found 0, expected steps done, at least 1"));
  err.status = MM_OK;
  assert_true(step(&r, (mm_span[]){{0, 0, ROWS, 0}, {-1, ROWS, 3, 0}, {1, ROWS + 3, ROWS, 0}}, 3, &err));
  for (uint32_t i = 0; i < TAPS; i++) {
    assert_true(mm_engine_hidden(r.engine, i, hidden, &err));
    for (uint32_t row = 0; row < 2 * ROWS; row++)
      for (uint32_t j = 0; j < H; j++) {
        double found = hidden[(row < ROWS ? row : row + 3) * H + j];
        if (!(fabs(found - want[row][i][j]) <= 2e-4))
          fail_msg("layer %u, row %u: found %.8g, expected %.8g", tap[i], row, found, want[row][i][j]);
      }
  }
  assert_true(mm_engine_expert_load(r.engine, load, &err));
  for (uint32_t i = 0; i < m.layers * m.experts; i++) assert_int_equal(load[i], expected[i]); /* padding takes none */
  for (uint32_t t = 0; t < ROWS; t++) {
    assert_true(step(&r, (mm_span[]){{0, 0, 1, t}, {1, 1, 1, t}}, 2, &err));
    assert_true(mm_engine_hidden(r.engine, 1, hidden, &err));
    for (uint32_t row = 0; row < 2; row++)
      for (uint32_t j = 0; j < H; j++) assert_true(fabs(hidden[row * H + j] - want[row * ROWS + t][1][j]) <= 2e-4);
  }
  assert_true(mm_engine_expert_load(r.engine, load, &err));
  for (uint32_t i = 0; i < m.layers * m.experts; i++) assert_int_equal(load[i], 2 * expected[i]);
  assert_false(mm_engine_hidden(r.engine, TAPS, hidden, &err));
  assert_string_equal(err.code, "E_BATCH");
  assert_non_null(strstr(err.text, "expected a tap less than"));
  err.status = MM_OK;
  const mm_sampling greedy = {.top_p = 1};
  const mm_batch queued = {1, (int32_t[]){3}, 1, &(mm_span){0, 0, 1, 0}, 1, (uint32_t[]){0}, &greedy, NULL};
  int32_t chosen;
  assert_true(mm_engine_queue(r.engine, &queued, &err));
  assert_false(mm_engine_hidden(r.engine, 0, hidden, &err)); /* not collected */
  assert_non_null(strstr(err.text, "found 1, expected batches left to collect, at most 0"));
  err.status = MM_OK;
  assert_true(mm_engine_collect(r.engine, &chosen, &err) && mm_engine_hidden(r.engine, 0, hidden, &err));
  free(want);
  free(logits);
  free(hidden);
  stop(&r);
}

TEST(test_taps) {
  for (uint32_t tp = 1; tp <= 2; tp++) {
    check_taps(ref_dims(MM_FAMILY_M2, false), tp);
    check_taps(ref_dims(MM_FAMILY_M1, false), tp);
    check_taps(ref_dims(MM_FAMILY_M1, true), tp);
  }
  running r;
  start(&r, ref_dims(MM_FAMILY_M2, false), 1, &mm_ops_cpu);
  static const uint32_t none[] = {3}, many[MM_TAPS + 1];
  for (uint32_t i = 0; i < 2; i++) {
    mm_err err = {0};
    mm_engine_config c = {.ops = &mm_ops_cpu, .limits = limits, .options.threads = 1, .tap = i ? many : none, .taps = i ? MM_TAPS + 1 : 1};
    assert_null(mm_engine_open(&r.shards->s, &c, &err));
    assert_string_equal(err.code, "E_LIMITS");
  }
  stop(&r);
}

/* Two sequences: at once, in chunks, token by token, side by side with padding, and again in used slots. */
static void feed_every_way(running *r) {
  uint32_t V = r->ref.m.vocab;
  double *first = expect(&r->ref, 0, LENGTH), *second = expect(&r->ref, 1, LENGTH);
  mm_err err = {0};
  for (uint32_t chunk = 1; chunk <= LENGTH; chunk = chunk * 3 + 1)
    for (uint32_t pos = 0; pos < LENGTH; pos += chunk) {
      mm_span s = {0, 0, (uint32_t)mm_min(chunk, LENGTH - pos), pos};
      assert_true(step(r, &s, 1, &err));
      check_rows(r, 0, s.count, first + pos * V);
    }
  assert_true(step(r, (const mm_span[]){{1, 0, 7, 0}, {-1, 7, 2, 5}, {0, 9, 4, 0}}, 3, &err));
  check_rows(r, 0, 7, second);
  check_rows(r, 9, 4, first);
  assert_true(step(r, (const mm_span[]){{0, 0, 1, 4}, {1, 1, 20, 7}, {-1, 21, 1, 0}}, 3, &err));
  check_rows(r, 0, 1, first + 4 * V);
  check_rows(r, 1, 20, second + 7 * V);
  free(first), free(second);
}

TEST(models) {
  static const struct {
    mm_family family;
    bool postnorm;
  } kind[] = {{MM_FAMILY_M1, true}, {MM_FAMILY_M1, false}, {MM_FAMILY_M2, false}, {MM_FAMILY_M3, false}};
  for (size_t i = 0; i < sizeof kind / sizeof *kind; i++)
    for (uint32_t tp = 1; tp <= 8; tp *= 2) {
      running r;
      start(&r, ref_dims(kind[i].family, kind[i].postnorm), tp, &mm_ops_cpu);
      feed_every_way(&r);
      stop(&r);
    }
}

/* Two stages, cut after any layer: logits, hidden states and load as of one; a rank that fails holds up neither stage. */
TEST(stages) {
  static const uint32_t tap[] = {0, 1, 2};
  for (uint32_t tp = 1; tp <= 2; tp++)
    for (uint32_t first = 1; first <= 3; first++) {
      running r, one;
      mm_err err = {0};
      float hidden[2][LENGTH * 64];
      uint64_t load[2][REF_LAYERS * 64] = {0};
      const mm_engine_config c = {.ops = &mm_ops_cpu, .limits = limits, .options.threads = 1, .tap = tap, .taps = 3};
      const uint64_t weights = ref_seed;
      start(&one, ref_dims(MM_FAMILY_M1, tp == 2), tp, &mm_ops_cpu);
      ref_seed = weights;
      start(&r, ref_dims(MM_FAMILY_M1, tp == 2), tp, &mm_ops_cpu);
      for (int i = 0; i < 2; i++) {
        running *w = i ? &r : &one;
        mm_engine_close(w->engine);
        if (i) ref_cut_stages(r.shards, first);
        if (!(w->engine = mm_engine_open(&w->shards->s, &c, &err))) fail_msg("%s", err.text);
        assert_true(step(w, &(mm_span){0, 0, 9, 0}, 1, &err));
      }
      assert_memory_equal(r.logits, one.logits, 9 * r.ref.m.vocab * sizeof *r.logits);
      for (uint32_t t = 0; t < 3; t++) {
        assert_true(mm_engine_hidden(r.engine, t, hidden[0], &err) && mm_engine_hidden(one.engine, t, hidden[1], &err));
        assert_memory_equal(hidden[0], hidden[1], 9 * r.ref.m.hidden * sizeof hidden[0][0]);
      }
      assert_true(mm_engine_expert_load(r.engine, load[0], &err) && mm_engine_expert_load(one.engine, load[1], &err));
      assert_memory_equal(load[0], load[1], sizeof load[0]);
      feed_every_way(&r);
      const uint32_t to = 2;
      assert_true(mm_engine_fork(r.engine, 0, &to, 1, &err));
      assert_int_equal(mm_engine_state_bytes(r.engine), mm_engine_state_bytes(one.engine));
      stop(&r);
      stop(&one);
    }
}

/* Twelve heads: slopes that are no plain geometric series, cut in the middle of both halves. */
TEST(odd_head_count) {
  mm_model m = ref_dims(MM_FAMILY_M1, true);
  m.heads = 12;
  for (uint32_t tp = 1; tp <= 4; tp += 3) {
    running r;
    start(&r, m, tp, &mm_ops_cpu);
    feed_every_way(&r);
    stop(&r);
  }
}

/* Only the rows asked for, in order; ids whose head row is zero can never win. */
TEST(outputs) {
  running r;
  start(&r, ref_dims(MM_FAMILY_M1, true), 2, &mm_ops_cpu);
  uint32_t dead[] = {3, 31, 49}, V = r.ref.m.vocab;
  r.shards->s.pack.dead_rows = 3;
  r.shards->s.pack.dead_row = dead;
  double *expected = expect(&r.ref, 0, 9);
  for (uint32_t t = 0; t < 9; t++)
    for (int i = 0; i < 3; i++) expected[t * V + dead[i]] = -INFINITY;
  int32_t id[9];
  for (uint32_t t = 0; t < 9; t++) id[t] = id_at(0, t);
  mm_span span = {2, 0, 9, 0};
  const uint32_t out[] = {0, 5, 8};
  mm_err err = {0};
  assert_true(mm_engine_step(r.engine, &(mm_batch){9, id, 1, &span, 3, out, NULL, NULL}, r.logits, &err));
  for (uint32_t i = 0; i < 3; i++)
    for (uint32_t v = 0; v < V; v++) {
      double found = r.logits[i * V + v], want = expected[out[i] * V + v];
      assert_true(want == found || fabs(found - want) <= 2e-4);
    }
  /* No row wanted, no row at all. */
  assert_true(mm_engine_step(r.engine, &(mm_batch){9, id, 1, &span, 0, NULL, NULL, NULL}, NULL, &err));
  assert_true(mm_engine_step(r.engine, &(mm_batch){0, NULL, 0, NULL, 0, NULL, NULL, NULL}, NULL, &err));
  free(expected);
  stop(&r);
}

/* Each refusal leaves the engine and the slots as they were. */
TEST(refusals) {
  static const int32_t good[LENGTH + 1] = {1, 2, 3}, high[] = {1, 50, 3}, negative[] = {1, -1, 3};
  static const uint32_t rows[] = {0, 2}, far[] = {0, 3}, falling[] = {1, 0}, twice[] = {1, 1};
#define SPAN(...) \
  (const mm_span[]) { __VA_ARGS__ }
  const mm_batch *const batch[] = {
      &(mm_batch){3, high, 1, SPAN({0, 0, 3, 0}), 0, NULL, NULL, NULL}, /* ids */
      &(mm_batch){3, negative, 1, SPAN({0, 0, 3, 0}), 0, NULL, NULL, NULL},
      &(mm_batch){LENGTH + 1, good, 1, SPAN({0, 0, LENGTH + 1, 0}), 0, NULL, NULL, NULL}, /* rows */
      &(mm_batch){3, good, 1, SPAN({0, 0, 2, 0}), 0, NULL, NULL, NULL},                   /* not covered */
      &(mm_batch){3, good, 0, NULL, 0, NULL, NULL, NULL},
      &(mm_batch){3, good, 1, SPAN({0, 0, 4, 0}), 0, NULL, NULL, NULL},               /* beyond the end */
      &(mm_batch){3, good, 1, SPAN({0, 1, 2, 0}), 0, NULL, NULL, NULL},               /* a gap */
      &(mm_batch){3, good, 2, SPAN({0, 0, 3, 0}, {1, 3, 0, 0}), 0, NULL, NULL, NULL}, /* an empty span */
      &(mm_batch){3, good, 2, SPAN({0, 0, 2, 0}, {1, 1, 1, 0}), 0, NULL, NULL, NULL}, /* an overlap */
      &(mm_batch){3, good, 1, SPAN({3, 0, 3, 0}), 0, NULL, NULL, NULL},               /* slots */
      &(mm_batch){3, good, 1, SPAN({-2, 0, 3, 0}), 0, NULL, NULL, NULL},
      &(mm_batch){3, good, 2, SPAN({1, 0, 2, 0}, {1, 2, 1, 0}), 0, NULL, NULL, NULL}, /* one slot twice */
      &(mm_batch){3, good, 1, SPAN({0, 0, 3, 4}), 0, NULL, NULL, NULL},               /* positions that the slot does not hold */
      &(mm_batch){3, good, 1, SPAN({0, 0, 3, 2}), 0, NULL, NULL, NULL},
      &(mm_batch){3, good, 1, SPAN({0, 0, 3, UINT32_MAX}), 0, NULL, NULL, NULL},
      &(mm_batch){3, good, 1, SPAN({0, 0, 3, 0}), 2, far, NULL, NULL}, /* outputs */
      &(mm_batch){3, good, 1, SPAN({0, 0, 3, 0}), 2, falling, NULL, NULL},
      &(mm_batch){3, good, 1, SPAN({0, 0, 3, 0}), 2, twice, NULL, NULL},
  };
  running r;
  start(&r, ref_dims(MM_FAMILY_M1, true), 2, &mm_ops_cpu);
  mm_err err = {0};
  assert_true(mm_engine_step(r.engine, &(mm_batch){3, good, 1, SPAN({0, 0, 3, 0}), 2, rows, NULL, NULL}, r.logits, &err));
  for (size_t i = 0; i < sizeof batch / sizeof *batch; i++) {
    mm_err e = {0};
    if (mm_engine_step(r.engine, batch[i], r.logits, &e)) fail_msg("batch %zu was not refused", i);
    assert_int_equal(e.status, MM_USAGE);
    assert_string_equal(e.code, "E_BATCH");
  }
  assert_true(mm_engine_step(r.engine, &(mm_batch){3, good, 1, SPAN({0, 0, 3, 3}), 2, rows, NULL, NULL}, r.logits, &err));
  stop(&r);
  /* Without lightning state a sequence may go back, but not ahead; nor beyond the limit. */
  start(&r, ref_dims(MM_FAMILY_M2, false), 2, &mm_ops_cpu);
  mm_err e = {0};
  assert_true(mm_engine_step(r.engine, &(mm_batch){3, good, 1, SPAN({0, 0, 3, 0}), 0, NULL, NULL, NULL}, NULL, &err));
  assert_true(mm_engine_step(r.engine, &(mm_batch){3, good, 1, SPAN({0, 0, 3, 2}), 0, NULL, NULL, NULL}, NULL, &err));
  assert_false(mm_engine_step(r.engine, &(mm_batch){3, good, 1, SPAN({0, 0, 3, 6}), 0, NULL, NULL, NULL}, NULL, &e));
  assert_true(mm_engine_step(r.engine, &(mm_batch){LENGTH - 5, good, 1, SPAN({0, 0, LENGTH - 5, 5}), 0, NULL, NULL, NULL}, NULL, &err));
  e = (mm_err){0};
  assert_false(mm_engine_step(r.engine, &(mm_batch){1, good, 1, SPAN({0, 0, 1, LENGTH}), 0, NULL, NULL, NULL}, NULL, &e));
  stop(&r);
}

/* ---- choices ---- */

#define NEW 7 /* tokens chosen for each of two sequences */

static int32_t best(const float *logits, uint32_t vocab, const bool *never) {
  int32_t id = -1;
  for (uint32_t i = 0; i < vocab; i++)
    if (!never[i] && (id < 0 || logits[i] > logits[id])) id = (int32_t)i;
  return id;
}

/* Greedy continuations of sequences 0 (five tokens in slot 2) and 1 (three in slot 0), a step at a time from the logits. */
static void continue_plainly(running *r, const bool *never, int32_t to[NEW][2]) {
  const uint32_t out[] = {4, 7}, vocab = r->ref.m.vocab;
  int32_t id[8];
  mm_err err = {0};
  for (uint32_t i = 0; i < 8; i++) id[i] = i < 5 ? id_at(0, i) : id_at(1, i - 5);
  const mm_span prompt[] = {{2, 0, 5, 0}, {0, 5, 3, 0}};
  assert_true(mm_engine_step(r->engine, &(mm_batch){8, id, 2, prompt, 2, out, NULL, NULL}, r->logits, &err));
  for (uint32_t n = 0;; n++) {
    for (uint32_t i = 0; i < 2; i++) to[n][i] = best(r->logits + i * vocab, vocab, never);
    if (n + 1 == NEW) return;
    const mm_span span[] = {{2, 0, 1, 5 + n}, {0, 1, 1, 3 + n}};
    assert_true(mm_engine_step(r->engine, &(mm_batch){2, to[n], 2, span, 2, (const uint32_t[]){0, 1}, NULL, NULL}, r->logits, &err));
  }
}

/* The same queued ahead, the tokens never seen on the way; rows in the other order half of the time, a padding row between. */
static void continue_queued(running *r, int32_t to[NEW][2]) {
  static const mm_sampling greedy[] = {{.top_p = 1}, {.top_p = 1}};
  static const int32_t chosen[] = {MM_ID_SAMPLED, 0, MM_ID_SAMPLED};
  int32_t id[8];
  mm_err err = {0};
  for (uint32_t i = 0; i < 8; i++) id[i] = i < 5 ? id_at(0, i) : id_at(1, i - 5);
  const mm_span prompt[] = {{2, 0, 5, 0}, {0, 5, 3, 0}};
  assert_true(mm_engine_queue(r->engine, &(mm_batch){8, id, 2, prompt, 2, (const uint32_t[]){4, 7}, greedy, NULL}, &err));
  uint32_t queued = 1;
  for (uint32_t n = 0; n < NEW; n++) {
    for (; queued < NEW && queued < n + MM_QUEUE; queued++) {
      const mm_span a = {2, 0, 1, 4 + queued}, b = {0, 2, 1, 2 + queued}, pad = {-1, 1, 1, 0};
      const mm_span turned[] = {{0, 0, 1, b.pos}, pad, {2, 2, 1, a.pos}};
      const mm_batch batch = {3, chosen, 3, queued % 2 ? turned : (const mm_span[]){a, pad, b}, 2, (const uint32_t[]){0, 2}, greedy, NULL};
      assert_true(mm_engine_queue(r->engine, &batch, &err));
    }
    assert_true(mm_engine_collect(r->engine, to[n], &err));
    if (n % 2) to[n][0] ^= to[n][1], to[n][1] ^= to[n][0], to[n][0] ^= to[n][1];
  }
}

TEST(queue) {
  for (uint32_t tp = 1; tp <= 2; tp++) {
    running r;
    start(&r, ref_dims(MM_FAMILY_M1, true), tp, &mm_ops_cpu);
    bool never[50] = {false};
    int32_t want[NEW][2], got[NEW][2];
    for (int round = 0; round < 2; round++) {
      continue_plainly(&r, never, want);
      mm_engine_close(r.engine);
      mm_err err = {0};
      assert_non_null(
          r.engine = mm_engine_open(&r.shards->s,
                                    &(mm_engine_config){.ops = &mm_ops_cpu, .limits = limits, .options.threads = 1, .never = never}, &err));
      continue_queued(&r, got);
      assert_memory_equal(want, got, sizeof want);
      never[want[0][0]] = never[want[3][1]] = true; /* and again without these */
    }
    stop(&r);
  }
}

/* A choice is the draw of its position: the same as from the logits of a plain step. */
TEST(queue_draws) {
  running r;
  start(&r, ref_dims(MM_FAMILY_M2, false), 1, &mm_ops_cpu);
  int32_t id[4], got;
  for (uint32_t t = 0; t < 4; t++) id[t] = id_at(0, t);
  mm_span span = {1, 0, 4, 0};
  const uint32_t last = 3;
  mm_err err = {0};
  mm_sampler *sampler = mm_sampler_open(r.ref.m.vocab, &err);
  assert_true(mm_engine_step(r.engine, &(mm_batch){4, id, 1, &span, 1, &last, NULL, NULL}, r.logits, &err));
  for (uint64_t seed = 0; seed < 20; seed++) {
    const mm_sampling set = {.temperature = 1.5, .top_p = 0.9, .top_k = 30, .seed = seed};
    assert_true(mm_engine_queue(r.engine, &(mm_batch){4, id, 1, &span, 1, &last, &set, NULL}, &err));
    assert_true(mm_engine_collect(r.engine, &got, &err));
    assert_int_equal(got, mm_sample(sampler, &set, 4, r.logits));
  }
  mm_sampler_close(sampler);
  stop(&r);
}

TEST(queue_refusals) {
  running r;
  start(&r, ref_dims(MM_FAMILY_M2, false), 1, &mm_ops_cpu);
  const mm_sampling greedy = {.top_p = 1}, cold = {.temperature = -1, .top_p = 1};
  const int32_t id[] = {3, 4}, chosen = MM_ID_SAMPLED;
  const uint32_t first = 0, second = 1;
  int32_t got[2];
  mm_err err = {0};
  assert_false(mm_engine_collect(r.engine, got, &err));
  assert_string_equal(err.code, "E_BATCH");
  err = (mm_err){0};
  assert_false(mm_engine_queue(r.engine, &(mm_batch){2, id, 1, &(mm_span){0, 0, 2, 0}, 1, &second, &cold, NULL}, &err));
  assert_string_equal(err.code, "E_SAMPLING");
  const mm_batch next = {1, &chosen, 1, &(mm_span){0, 0, 1, 2}, 1, &first, &greedy, NULL};
  for (int with_choice = 0; with_choice < 2; with_choice++) { /* nothing was chosen after row 1 */
    err = (mm_err){0};
    assert_true(
        mm_engine_queue(r.engine, &(mm_batch){2, id, 1, &(mm_span){0, 0, 2, 0}, 1, with_choice ? &second : &first, &greedy, NULL}, &err));
    assert_true(mm_engine_queue(r.engine, &next, &err) == with_choice);
  }
  mm_span span = {0, 0, 1, 3};
  assert_true(mm_engine_queue(r.engine, &(mm_batch){1, &chosen, 1, &span, 1, &first, &greedy, NULL}, &err));
  span.pos++;
  assert_false(mm_engine_queue(r.engine, &(mm_batch){1, &chosen, 1, &span, 1, &first, &greedy, NULL}, &err));
  assert_string_equal(err.code, "E_BATCH");
  for (int i = 0; i < MM_QUEUE; i++) assert_true(mm_engine_collect(r.engine, got, &(mm_err){0}));
  assert_false(mm_engine_collect(r.engine, got, &(mm_err){0}));
  stop(&r);
}

TEST(bad_limits) {
  static const mm_limits bad[] = {{0, 1, 1, 0}, {1, 0, 1, 0}, {1, 1, 0, 0}, {1, 1, 4097, 0}};
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 1);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    mm_err err = {0};
    assert_null(mm_engine_open(&shards->s, &(mm_engine_config){.ops = &mm_ops_cpu, .limits = bad[i], .options.threads = 1}, &err));
    assert_string_equal(err.code, "E_LIMITS");
  }
  ref_uncut(shards);
  ref_free(&ref);
}

/* ---- ranks that fail ---- */

static atomic_int begins, ends, opens;
static int fail_begin, fail_end, fail_open; /* the n-th call fails, from 1; 0: none */

static mm_backend *failing_open(const mm_backend_config *c, mm_err *err) {
  if (++opens == fail_open) {
    mm_fail(err, MM_LIMIT, "E_TEST", mm_at(NULL, NULL), "open");
    return NULL;
  }
  return mm_ops_cpu.open(c, err);
}

static bool failing_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (++begins == fail_begin) return mm_fail(err, MM_LIMIT, "E_TEST", mm_at(NULL, NULL), "begin");
  return mm_ops_cpu.begin(b, batch, err);
}

static bool failing_end(mm_backend *b, float *out, mm_err *err) {
  if (++ends == fail_end) return mm_fail(err, MM_LIMIT, "E_TEST", mm_at(NULL, NULL), "end");
  return mm_ops_cpu.end(b, out, err);
}

/* Whichever of the second four begins, or ends, fails. */
static void each_failure(void (*check)(const mm_ops *ops, int begin, int end)) {
  mm_ops ops = mm_ops_cpu;
  ops.begin = failing_begin;
  ops.end = failing_end;
  for (int nth = 5; nth <= 8; nth++) {
    check(&ops, nth, 0);
    check(&ops, 0, nth);
  }
}

static void fail_at(int begin, int end) {
  begins = ends = 0;
  fail_begin = begin;
  fail_end = end;
}

/* A step that works and one that fails. */
static void step_and_fail(running *r) {
  mm_err err = {0};
  assert_true(step(r, &(mm_span){0, 0, 3, 0}, 1, &err));
  assert_false(step(r, &(mm_span){0, 0, 3, 3}, 1, &err));
  assert_string_equal(err.code, "E_TEST");
}

/* A rank that fails ends the step for all; the next step works, its slots start again. */
static void rank_fails(const mm_ops *ops, int begin, int end) {
  running r;
  fail_at(begin, end);
  start(&r, ref_dims(MM_FAMILY_M1, true), 4, ops);
  double *expected = expect(&r.ref, 0, 6);
  mm_err err;
  step_and_fail(&r);
  for (uint32_t pos = 3; pos <= 6; pos += 3) { /* the slot holds nothing now */
    err = (mm_err){0};
    assert_false(step(&r, &(mm_span){0, 0, 3, pos}, 1, &err));
    assert_string_equal(err.code, "E_BATCH");
  }
  err = (mm_err){0};
  assert_true(step(&r, &(mm_span){0, 0, 6, 0}, 1, &err));
  check_rows(&r, 0, 6, expected);
  free(expected);
  stop(&r);
}
TEST(failing_rank) { each_failure(rank_fails); }

static void stage_fails(const mm_ops *ops, int begin, int end) {
  running r;
  mm_err err = {0};
  start(&r, ref_dims(MM_FAMILY_M1, true), 2, &mm_ops_cpu);
  mm_engine_close(r.engine);
  ref_cut_stages(r.shards, 2);
  r.engine = mm_engine_open(&r.shards->s, &(mm_engine_config){.ops = ops, .limits = limits, .options.threads = 1}, &err);
  if (!r.engine) fail_msg("%s", err.text);
  fail_at(begin, end);
  step_and_fail(&r);
  assert_true(step(&r, &(mm_span){0, 0, 3, 0}, 1, &err));
  stop(&r);
}
TEST(failing_stage) { each_failure(stage_fails); }

/* No hidden states of a step that failed. */
TEST(failing_taps) {
  static const uint32_t tap[] = {1};
  mm_ops ops = mm_ops_cpu;
  ops.begin = failing_begin;
  fail_at(2, 0);
  running r = {.ref = ref_build(ref_dims(MM_FAMILY_M2, false))};
  mm_err err = {0};
  float hidden[LENGTH * 64], logits[LENGTH * 64];
  r.shards = ref_cut(&r.ref, 1), r.logits = logits;
  mm_engine_config c = {.ops = &ops, .limits = limits, .options.threads = 1, .tap = tap, .taps = 1};
  if (!(r.engine = mm_engine_open(&r.shards->s, &c, &err))) fail_msg("%s", err.text);
  assert_true(step(&r, &(mm_span){0, 0, 3, 0}, 1, &err) && mm_engine_hidden(r.engine, 0, hidden, &err));
  assert_false(step(&r, &(mm_span){0, 0, 3, 3}, 1, &err));
  err = (mm_err){0};
  assert_false(mm_engine_hidden(r.engine, 0, hidden, &err));
  assert_string_equal(err.code, "E_BATCH");
  err = (mm_err){0};
  assert_true(step(&r, &(mm_span){0, 0, 3, 0}, 1, &err) && mm_engine_hidden(r.engine, 0, hidden, &err));
  r.logits = NULL;
  stop(&r);
}

TEST(failing_opens) {
  mm_ops ops = mm_ops_cpu;
  ops.open = failing_open;
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 4);
  for (fail_open = 1; fail_open <= 4; fail_open++) {
    mm_err err = {0};
    opens = 0;
    assert_null(mm_engine_open(&shards->s, &(mm_engine_config){.ops = &ops, .limits = limits, .options.threads = 1}, &err));
    assert_string_equal(err.code, "E_TEST");
  }
  fail_open = 0;
  shards->s.pack.tensor[5].rows++; /* and a tensor of another shape than the model's */
  mm_err err = {0};
  assert_null(mm_engine_open(&shards->s, &(mm_engine_config){.ops = &ops, .limits = limits, .options.threads = 1}, &err));
  assert_int_equal(err.status, MM_INTEGRITY);
  assert_non_null(strstr(err.text, shards->s.pack.tensor[5].name));
  ref_uncut(shards);
  ref_free(&ref);
}

/* Where all blocks have one score, the lower ones are read. */
TEST(equal_blocks) {
  const mm_model m = ref_dims(MM_FAMILY_M3, false);
  for (uint32_t tp = 1; tp <= 4; tp *= 4) {
    running r = {.ref = ref_build(m)};
    for (uint32_t l = 0; l < m.layers; l++)
      for (size_t i = 0; r.ref.layer[l].index_k && i < (size_t)m.index_dim * m.hidden; i++) r.ref.layer[l].index_k[i] = 0;
    start_built(&r, tp, &mm_ops_cpu);
    feed_every_way(&r);
    stop(&r);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
