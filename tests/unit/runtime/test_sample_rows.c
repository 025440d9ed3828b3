/* Sampling settings of a row beyond temperature and cuts: bias, masks, penalties, min_p, logprobs. Distributions of samples against a plain
 * reference (chi-square), adjusted logits and logprobs against double precision, and the engine: the same tokens at every tp, what its
 * slots remember, masks that come after the pass, and devices that lack something. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

#define VOCAB 50
#define DRAWS 50000

static uint64_t seed = 7;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}
static double unit(void) { return below(1 << 30) * 0x1p-30; }

/* ---- the reference: what the words say, in double precision ---- */

static void ref_adjust(const mm_sampling *set, const int32_t *held, uint32_t count, double *x) {
  for (int i = 0; i < VOCAB; i++) {
    if (set->allowed && !(set->allowed[i / 32] & UINT32_C(1) << i % 32)) x[i] = -INFINITY;
    for (uint32_t j = 0; j < set->bias_count; j++)
      if (set->bias[j].id == i) x[i] += (double)set->bias[j].add;
    uint32_t all = 0, reply = 0;
    for (uint32_t t = 0; t < count; t++) all += held[t] == i, reply += held[t] == i && t >= set->prompt;
    if (all && set->repetition != 0) x[i] = x[i] > 0 ? x[i] / set->repetition : x[i] * set->repetition;
    x[i] -= set->frequency * reply + (reply ? set->presence : 0);
  }
}

static const double *sorted_by;
static int by_size(const void *a, const void *b) {
  const double x = sorted_by[*(const int *)a], y = sorted_by[*(const int *)b];
  return x != y ? (x < y) - (x > y) : *(const int *)a - *(const int *)b;
}

/* p[VOCAB] of drawing each id. */
static void ref_shares(const mm_sampling *set, const double *x, double *p) {
  int order[VOCAB];
  double sum = 0, mass = 0;
  for (int i = 0; i < VOCAB; i++) order[i] = i, p[i] = 0;
  sorted_by = x;
  qsort(order, VOCAB, sizeof *order, by_size);
  const double top = x[order[0]];
  uint32_t kept = 0;
  for (; kept < VOCAB && x[order[kept]] > -INFINITY && exp((x[order[kept]] - top) / set->temperature) >= set->min_p; kept++) continue;
  if (set->top_k && kept > set->top_k) kept = set->top_k;
  for (uint32_t i = 0; i < kept; i++) sum += exp((x[order[i]] - top) / set->temperature);
  for (uint32_t i = 0; i < kept && mass < set->top_p * sum; i++) mass += p[order[i]] = exp((x[order[i]] - top) / set->temperature);
  for (int i = 0; i < VOCAB; i++) p[i] /= mass;
}

typedef struct wanted {
  mm_sampling set;
  mm_bias bias[3];
  uint32_t allowed[2];
  int32_t held[40];
  uint32_t count;
} wanted;

/* Everything in use, at random. */
static void randomize(wanted *a) {
  *a = (wanted){.set = {.temperature = 0.5 + unit(), .top_p = 0.7 + 0.3 * unit(), .top_k = 20 + below(20), .seed = below(1u << 30)}};
  a->set.min_p = 0.02 * unit();
  a->set.repetition = 0.8 + unit(), a->set.presence = 2 * unit() - 0.5, a->set.frequency = unit() - 0.25;
  for (uint32_t i = 0; i < 3; i++) a->bias[i] = (mm_bias){(int32_t)(below(16) * 3 + i), i == 2 ? -INFINITY : (float)(4 * unit() - 2)};
  for (int i = 0; i < 2; i++) a->allowed[i] = below(1 << 30) * UINT32_C(4) | below(1 << 30);
  a->count = below(40), a->set.prompt = below(20);
  for (uint32_t i = 0; i < a->count; i++) a->held[i] = (int32_t)below(VOCAB);
  a->set.bias_count = 3, a->set.bias = a->bias, a->set.allowed = a->allowed;
}

TEST(test_adjusted) {
  mm_err err = {0};
  mm_sampler *s = mm_sampler_open(VOCAB, &err);
  for (int round = 0; round < ROUNDS(2000); round++) {
    wanted a;
    float x[VOCAB];
    double want[VOCAB];
    randomize(&a);
    for (int i = 0; i < VOCAB; i++) want[i] = x[i] = (float)(8 * unit() - 4);
    assert_true(mm_sampling_check(&a.set, VOCAB, &err));
    ref_adjust(&a.set, a.held, a.count, want);
    mm_sample_adjust(s, &a.set, a.held, a.count, x);
    for (int i = 0; i < VOCAB; i++)
      if (!(x[i] == want[i] || fabs(x[i] - want[i]) < 1e-5)) fail_msg("round %d, id %d: found %g, expected %g", round, i, x[i], want[i]);
  }
  mm_sampler_close(s);
}

TEST(test_distributions) {
  mm_err err = {0};
  mm_sampler *s = mm_sampler_open(VOCAB, &err);
  double worst = 0;
  for (int round = 0; round < 12; round++) {
    wanted a;
    float x[VOCAB];
    double want[VOCAB], p[VOCAB], chi2 = 0, freedom = -1;
    uint32_t seen[VOCAB] = {0};
    randomize(&a);
    for (int i = 0; i < VOCAB; i++) want[i] = x[i] = (float)(6 * unit() - 3);
    ref_adjust(&a.set, a.held, a.count, want);
    ref_shares(&a.set, want, p);
    mm_sample_adjust(s, &a.set, a.held, a.count, x);
    for (uint64_t n = 1; n <= DRAWS; n++) seen[mm_sample(s, &a.set, n, x)]++;
    for (int i = 0; i < VOCAB; i++) {
      if (p[i] == 0) assert_int_equal(seen[i], 0);
      if (p[i] == 0) continue;
      chi2 += (seen[i] - p[i] * DRAWS) * (seen[i] - p[i] * DRAWS) / (p[i] * DRAWS);
      freedom++;
    }
    assert_true(freedom >= 3);
    worst = fmax(worst, (chi2 - freedom) / sqrt(2 * freedom));
    if (chi2 > freedom + 5 * sqrt(2 * freedom)) fail_msg("round %d: chi-square %g of %g degrees of freedom", round, chi2, freedom);
  }
  print_message("12 sets of %d draws: chi-square at most %.1f standard deviations above its mean\n", DRAWS, worst);
  mm_sampler_close(s);
}

/* Each rule alone: 10,000 samples against the exact probabilities, which some rule at least changes. */
TEST(test_each_rule) {
  enum { N = 10000 };
  static const uint32_t allowed[2] = {0x0f0f35a6, 0x00021234};
  static const mm_bias bias[] = {{3, 2.5f}, {7, -1.5f}, {11, -INFINITY}};
  static const int32_t held[] = {1, 5, 5, 9, 2, 5, 1, 44, 44, 44, 3};
  const struct {
    const char *name;
    mm_sampling set;
  } rule[] = {
      {"temperature 1", {.temperature = 1, .top_p = 1}},
      {"temperature 0.4", {.temperature = 0.4, .top_p = 1}},
      {"temperature 3", {.temperature = 3, .top_p = 1}},
      {"top_k", {.temperature = 1, .top_p = 1, .top_k = 6}},
      {"top_p", {.temperature = 1, .top_p = 0.6}},
      {"min_p", {.temperature = 1, .top_p = 1, .min_p = 0.3}},
      {"repetition", {.temperature = 1, .top_p = 1, .repetition = 1.7}},
      {"presence", {.temperature = 1, .top_p = 1, .presence = 1.5, .prompt = 4}},
      {"frequency", {.temperature = 1, .top_p = 1, .frequency = 0.8, .prompt = 2}},
      {"bias", {.temperature = 1, .top_p = 1, .bias_count = 3, .bias = bias}},
      {"mask", {.temperature = 1, .top_p = 1, .allowed = allowed}},
  };
  mm_err err = {0};
  mm_sampler *s = mm_sampler_open(VOCAB, &err);
  double plain[VOCAB], worst = 0;
  for (size_t k = 0; k < sizeof rule / sizeof *rule; k++) {
    float x[VOCAB];
    double want[VOCAB], p[VOCAB], chi2 = 0, freedom = -1, distance = 0;
    uint32_t seen[VOCAB] = {0};
    for (int i = 0; i < VOCAB; i++) want[i] = x[i] = (float)((i * 37 % VOCAB) * 0.06 - 1.5);
    mm_sampling set = rule[k].set;
    set.seed = 1000 + k;
    ref_adjust(&set, held, sizeof held / sizeof *held, want);
    ref_shares(&set, want, p);
    mm_sample_adjust(s, &set, held, sizeof held / sizeof *held, x);
    for (uint64_t n = 1; n <= N; n++) seen[mm_sample(s, &set, n, x)]++;
    for (int i = 0; i < VOCAB; i++) {
      distance += k ? fabs(p[i] - plain[i]) : 1;
      if (k == 0) plain[i] = p[i];
      if (p[i] == 0) assert_int_equal(seen[i], 0);
      if (p[i] == 0) continue;
      chi2 += (seen[i] - p[i] * (double)N) * (seen[i] - p[i] * (double)N) / (p[i] * (double)N);
      freedom++;
    }
    assert_true(freedom >= 3 && distance > 0.02);
    worst = fmax(worst, (chi2 - freedom) / sqrt(2 * freedom));
    if (chi2 > freedom + 5 * sqrt(2 * freedom)) fail_msg("%s: chi-square %g of %g degrees of freedom", rule[k].name, chi2, freedom);
  }
  print_message("11 rules of %d draws: chi-square at most %.1f standard deviations above its mean\n", N, worst);
  mm_sampler_close(s);
}

TEST(test_logprobs) {
  mm_err err = {0};
  mm_sampler *s = mm_sampler_open(VOCAB, &err);
  for (uint32_t round = 0; round < ROUNDS(500); round++) {
    mm_logprob got[1 + MM_LOGPROBS];
    const mm_sampling set = {.top_p = 1, .top_logprobs = round % (MM_LOGPROBS + 1), .logprobs = got};
    float x[VOCAB];
    double v[VOCAB], sum = 0;
    int order[VOCAB];
    const uint32_t live = round % 3 ? VOCAB : 1 + below(9); /* the others have none */
    for (uint32_t i = 0; i < VOCAB; i++) {
      v[i] = x[i] = i < live ? (float)(below(30) * 0.25 - 4) : i % 2 ? NAN : -INFINITY; /* many alike */
      if (!(v[i] > -INFINITY)) v[i] = -INFINITY;
      sum += exp(v[i]), order[i] = (int)i;
    }
    sorted_by = v;
    qsort(order, VOCAB, sizeof *order, by_size);
    const int32_t chosen = (int32_t)below(live);
    mm_sample_logprobs(s, &set, chosen, x);
    assert_int_equal(got[0].id, chosen);
    assert_true(fabs(got[0].logprob - (v[chosen] - log(sum))) < 1e-5);
    for (uint32_t i = 0; i < set.top_logprobs; i++) {
      assert_int_equal(got[1 + i].id, i < live ? order[i] : -1);
      if (i < live) assert_true(fabs(got[1 + i].logprob - (v[order[i]] - log(sum))) < 1e-5);
      if (i >= live) assert_true(got[1 + i].logprob == -INFINITY);
    }
  }
  mm_sampler_close(s);
}

/* ---- the engine ---- */

typedef struct fixture {
  ref_model ref;
  ref_shards *shards;
  mm_engine *engine;
} fixture;

/* Leaves one column of each row of [rows, k], as large as the row's sum: of row i in the (i % 4)-th quarter. */
static void leave_one(float *w, size_t rows, size_t k) {
  for (size_t i = 0; i < rows; i++) {
    const size_t at = i % 4 * (k / 4) + below((uint32_t)k / 4);
    for (size_t j = 0; j < k; j++) w[i * k + j] = j == at ? w[i * k + j] * sqrtf((float)k) : 0;
  }
}

/* A model whose sums over up to four ranks have one term that is not zero, so that they are the same bits at every tp: no norm over heads
 * of several ranks, and of the matrices that are cut along their columns one column for each row, of all experts on the same rank. */
static ref_model exact_model(void) {
  mm_model m = ref_dims(MM_FAMILY_M1, false);
  for (uint32_t l = 0; l < m.layers; l++) m.attn[l] = MM_ATTN_FULL;
  ref_model r = ref_build(m);
  for (uint32_t l = 0; l < m.layers; l++) {
    leave_one(r.layer[l].o, m.hidden, (size_t)m.heads * m.head_dim);
    leave_one(r.layer[l].w2, (size_t)m.experts * m.hidden, m.intermediate);
  }
  return r;
}

static void open_fixture_of(fixture *w, ref_model ref, uint32_t tp, const mm_ops *ops) {
  mm_err err = {0};
  w->ref = ref;
  w->shards = ref_cut(&w->ref, tp);
  const mm_engine_config c = {.ops = ops, .limits = {.max_tokens = 40, .slots = 3, .max_positions = 100}, .options.threads = 1};
  if (!(w->engine = mm_engine_open(&w->shards->s, &c, &err))) fail_msg("%s", err.text);
}

static void open_group(fixture *w, uint32_t tp, const mm_ops *ops) {
  open_fixture_of(w, ref_build(ref_dims(MM_FAMILY_M2, false)), tp, ops);
}

static void close_group(fixture *w) {
  mm_engine_close(w->engine);
  ref_uncut(w->shards);
  ref_free(&w->ref);
}

/* The draw of the last of `count` tokens that a slot is fed from pos on. */
static mm_batch last_of(const int32_t *id, mm_span *span, uint32_t *out, int32_t slot, uint32_t pos, uint32_t count) {
  *span = (mm_span){slot, 0, count, pos}, *out = count - 1;
  return (mm_batch){.tokens = count, .id = id, .span_count = 1, .span = span, .out_count = 1, .out = out};
}

/* n draws, of every row of a sequence of ROWS tokens that is fed again and again. */
#define ROWS 40
static void draw_many(uint32_t tp, bool exact, int32_t *drawn, uint32_t n) {
  fixture w;
  mm_err err = {0};
  int32_t id[ROWS];
  uint32_t out[ROWS];
  wanted a[ROWS];
  mm_sampling set[ROWS];
  const uint64_t before = seed, weights = ref_seed;
  seed = 98;
  open_fixture_of(&w, exact ? exact_model() : ref_build(ref_dims(MM_FAMILY_M2, false)), tp, &mm_ops_cpu);
  ref_seed = weights; /* the next world's are the same */
  seed = 99;
  for (uint32_t i = 0; i < n; i += ROWS) {
    for (uint32_t t = 0; t < ROWS; t++) {
      randomize(&a[t]);
      id[t] = (int32_t)below(VOCAB), out[t] = t, set[t] = a[t].set;
      set[t].temperature += 1;
    }
    const mm_span span = {1, 0, ROWS, 0};
    const mm_batch batch = {.tokens = ROWS, .id = id, .span_count = 1, .span = &span, .out_count = ROWS, .out = out, .sampling = set};
    if (!mm_engine_queue(w.engine, &batch, &err) || !mm_engine_collect(w.engine, drawn + i, &err)) fail_msg("%s", err.text);
  }
  close_group(&w);
  seed = before;
}

/* The same tokens at tp 1, 2 and 4 where the logits are the same bits; of a model whose sums over ranks round, logits differ in their last
 * bits, which turn a draw where two ids come out alike: less than one in 10,000, on one machine another than on the next. */
TEST(test_same_at_every_tp) {
  enum { N = 10000 };
  static int32_t drawn[3][N];
  for (int exact = 0; exact < 2; exact++) {
    uint32_t kinds = 0, others[3] = {0};
    for (uint32_t i = 0; i < 3; i++) draw_many(1u << i, exact, drawn[i], N);
    for (uint32_t i = 0; i < 3 * N; i++) others[i / N] += drawn[i / N][i % N] != drawn[0][i % N];
    print_message("%d draws with every setting, sums %s: %u are others at tp 2, %u at tp 4\n", N, exact ? "exact" : "rounded", others[1],
                  others[2]);
    assert_true(others[1] <= !exact && others[2] <= !exact);
    for (int32_t id = 0; id < VOCAB; id++)
      for (uint32_t i = 0; i < N; i++)
        if (drawn[0][i] == id) {
          kinds++;
          break;
        }
    assert_true(kinds > 10);
  }
}

/* Penalties see what the slot holds: fed in chunks, gone back, forked, restored with its ids. */
TEST(test_history) {
  fixture w;
  mm_err err = {0};
  mm_span span;
  uint32_t out;
  int32_t id[40], got;
  float logits[VOCAB], own[VOCAB];
  open_group(&w, 2, &mm_ops_cpu);
  mm_sampler *s = mm_sampler_open(VOCAB, &err);
  mm_engine *e = w.engine;
  for (int round = 0; round < ROUNDS(200); round++) {
    mm_logprob logprob[4];
    wanted a;
    randomize(&a);
    a.set.top_logprobs = 3, a.set.logprobs = logprob;
    for (int i = 0; i < 40; i++) id[i] = (int32_t)below(VOCAB);
    const uint32_t first = 1 + below(20), back = below(first + 1), n = back + 1 + below(39 - back);
    int32_t slot = 0;
    mm_batch batch = last_of(id, &span, &out, 0, 0, first);
    assert_true(mm_engine_step(e, &batch, logits, &err));
    for (uint32_t i = back; i < 40; i++) id[i] = (int32_t)below(VOCAB); /* gone back: other tokens from here on */
    if (round % 3 == 1) assert_true(mm_engine_fork(e, 0, (const uint32_t[]){2}, 1, &err));
    if (round % 3 == 2) assert_true(mm_engine_resume(e, 2, mm_pages_table(mm_engine_pages(e)), id, back, NULL, &err));
    if (round % 3) slot = 2;
    batch = last_of(id + back, &span, &out, slot, back, n - back);
    assert_true(mm_engine_step(e, &batch, logits, &err));
    memcpy(own, logits, sizeof own);
    mm_sample_adjust(s, &a.set, id, n, own);
    batch.sampling = &a.set;
    assert_true(mm_engine_queue(e, &batch, &err) && mm_engine_collect(e, &got, &err));
    assert_int_equal(got, mm_sample(s, &a.set, n, own));
    assert_int_equal(logprob[0].id, got);
    float top = -INFINITY;
    for (int i = 0; i < VOCAB; i++) top = fmaxf(top, logits[i]);
    assert_true(logits[logprob[1].id] == top && logprob[1].logprob >= logprob[0].logprob);
  }
  mm_sampler_close(s);
  close_group(&w);
}

/* The pass and deferred sampling: a mask that depends on the token before; the same tokens as at once; a step between drops the
 * logits. */
TEST(test_deferred) {
  fixture w;
  mm_err err = {0};
  open_group(&w, 1, &mm_ops_cpu);
  int32_t id[5] = {3, 1, 4, 1, 5}, got = -1, at_once = -2;
  mm_span span;
  uint32_t out;
  mm_batch batch = last_of(id, &span, &out, 0, 0, 5);
  const int32_t chosen = MM_ID_SAMPLED;
  for (uint32_t n = 0; n < 20; n++) {
    uint32_t allowed[2] = {UINT32_MAX, UINT32_MAX};
    if (got >= 0) allowed[0] = got % 2 ? 0x55555555 : 0xaaaaaaaa, allowed[1] = allowed[0]; /* even after odd, odd after even */
    const mm_sampling set = {.temperature = 1, .top_p = 1, .seed = 5, .allowed = allowed};
    assert_true(mm_engine_forward(w.engine, &batch, &err));
    const int32_t before = got;
    assert_true(mm_engine_sample(w.engine, &set, &err) && mm_engine_collect(w.engine, &got, &err));
    if (before >= 0) assert_int_equal((before + got) % 2, 1);
    if (n == 0) {
      mm_span other;
      uint32_t row;
      mm_batch same = last_of(id, &other, &row, 1, 0, 5);
      same.sampling = &set;
      assert_true(mm_engine_queue(w.engine, &same, &err) && mm_engine_collect(w.engine, &at_once, &err));
      assert_int_equal(at_once, got);
    }
    batch = last_of(&chosen, &span, &out, 0, 5 + n, 1);
  }
  float of_chosen[VOCAB], of_id[VOCAB]; /* a step without sampling takes the chosen token too */
  const uint32_t to = 2;
  assert_true(mm_engine_fork(w.engine, 0, &to, 1, &err));
  assert_true(mm_engine_step(w.engine, &batch, of_chosen, &err));
  batch = last_of(&got, &span, &out, 2, batch.span->pos, 1);
  assert_true(mm_engine_step(w.engine, &batch, of_id, &err));
  assert_memory_equal(of_chosen, of_id, sizeof of_id);
  batch = last_of(id, &span, &out, 0, 0, 5);
  assert_true(mm_engine_forward(w.engine, &batch, &err));
  batch = last_of(id, &span, &out, 2, 0, 5);
  assert_true(mm_engine_step(w.engine, &batch, (float[VOCAB]){0}, &err));
  const mm_sampling greedy = {.top_p = 1};
  int32_t none = 77;
  assert_true(mm_engine_sample(w.engine, &greedy, &err) && mm_engine_collect(w.engine, &none, &err));
  assert_int_equal(none, 77); /* no row was waiting */
  close_group(&w);
}

/* -ln of what the softmax gives: of rows in the middle of a chunk too, and targets out of range are refused with nothing changed. */
TEST(test_score) {
  enum { N = 12 };
  const uint32_t out[] = {1, 2, 7, 11};
  int32_t id[N], target[4];
  float logits[4 * VOCAB];
  double score[4];
  fixture w;
  mm_err err = {0};
  open_group(&w, 2, &mm_ops_cpu);
  for (int i = 0; i < N; i++) id[i] = (int32_t)below(VOCAB);
  for (int i = 0; i < 4; i++) target[i] = (int32_t)below(VOCAB);
  const mm_span span = {1, 0, N, 0};
  const mm_batch batch = {.tokens = N, .id = id, .span_count = 1, .span = &span, .out_count = 4, .out = out};
  assert_true(mm_engine_step(w.engine, &batch, logits, &err));
  assert_true(mm_engine_score(w.engine, &batch, target, score, &err));
  for (int i = 0; i < 4; i++) {
    double sum = 0;
    for (int v = 0; v < VOCAB; v++) sum += exp((double)logits[i * VOCAB + v]);
    assert_true(fabs(score[i] - (log(sum) - (double)logits[i * VOCAB + target[i]])) < 1e-12);
  }
  target[3] = VOCAB;
  assert_false(mm_engine_score(w.engine, &batch, target, score, &err));
  assert_string_equal(err.code, "E_BATCH");
  assert_true(mm_engine_warm(w.engine, (const uint32_t[]){1, 40}, 2, &err)); /* nothing to record here */
  assert_false(mm_engine_warm(w.engine, (const uint32_t[]){41}, 1, &err));
  assert_int_equal(mm_engine_held(w.engine, 1), N);
  close_group(&w);
}

static bool no_choice(mm_backend *b, mm_err *err) {
  (void)b;
  return mm_fail(err, MM_BUG, "E_TEST", mm_at(NULL, NULL), "chosen");
}

/* A device that chooses itself, and lacks something, says what; nothing is chosen without it. */
TEST(test_lacking) {
  static const uint32_t all[2];
  static const mm_bias bias = {1, 1};
  mm_logprob logprobs[1];
  const struct {
    mm_sampling set;
    const char *word;
  } lack[] = {
      {{.top_p = 1, .min_p = 0.1}, "min_p"},
      {{.top_p = 1, .repetition = 1.1}, "penalties"},
      {{.top_p = 1, .presence = 1}, "penalties"},
      {{.top_p = 1, .frequency = 1}, "penalties"},
      {{.top_p = 1, .bias_count = 1, .bias = &bias}, "logit bias"},
      {{.top_p = 1, .allowed = all}, "mask"},
      {{.top_p = 1, .logprobs = logprobs}, "logprobs"},
  };
  mm_ops ops = mm_ops_cpu;
  ops.sampler.sample = no_choice;
  fixture w;
  open_group(&w, 1, &ops);
  const int32_t id = 3;
  mm_span span;
  uint32_t out;
  for (size_t i = 0; i < sizeof lack / sizeof *lack; i++) {
    mm_err err = {0};
    mm_batch batch = last_of(&id, &span, &out, 0, 0, 1);
    batch.sampling = &lack[i].set;
    assert_false(mm_engine_queue(w.engine, &batch, &err));
    assert_int_equal(err.status, MM_UNSUPPORTED);
    assert_string_equal(err.code, "E_SAMPLING");
    assert_non_null(strstr(err.text, lack[i].word));
  }
  mm_err err = {0};
  mm_batch batch = last_of(&id, &span, &out, 0, 0, 1);
  assert_false(mm_engine_forward(w.engine, &batch, &err));
  assert_string_equal(err.code, "E_DEVICE");
  close_group(&w);
}

static atomic_uint steps; /* begun, on all ranks */
static bool counting_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  steps++;
  return mm_ops_cpu.begin(b, batch, err);
}

static bool end_unseen(mm_backend *b, mm_err *err) { return mm_ops_cpu.end(b, (float[16 * VOCAB]){0}, err); }
static atomic_uint ids_wanted, ids_unwanted; /* collections whose ids are wanted, and whose are not */
static bool collect_sevens(mm_backend *b, int32_t *id, mm_err *err) {
  (void)b, (void)err;
  if (id) *id = 7;
  *(id ? &ids_wanted : &ids_unwanted) += 1;
  return true;
}

/* A device that records its steps is warmed at any tp: each way to end twice for each size on every rank; slots stay as they are. All ranks
 * sample the same ids; one hands them on. */
TEST(test_warm_ranks) {
  mm_ops ops = mm_ops_cpu;
  ops.begin = counting_begin, ops.sampler.sample = end_unseen, ops.sampler.collect = collect_sevens;
  fixture w;
  mm_err err = {0};
  const int32_t id[] = {3, 4};
  mm_span span;
  uint32_t out;
  open_group(&w, 2, &ops);
  mm_batch batch = last_of(id, &span, &out, 1, 0, 2);
  assert_true(mm_engine_step(w.engine, &batch, (float[VOCAB]){0}, &err));
  steps = 0;
  assert_true(mm_engine_warm(w.engine, (const uint32_t[]){1, 4, 16}, 3, &err));
  assert_int_equal(steps, 2 * 3 * 2 * 3);
  assert_int_equal(ids_wanted, 3 * 2 * 3);
  assert_int_equal(ids_unwanted, 3 * 2 * 3);
  assert_int_equal(mm_engine_held(w.engine, 1), 2);
  int32_t chosen = 77;
  const mm_sampling greedy = {.top_p = 1};
  batch = last_of(id, &span, &out, 1, 2, 2), batch.sampling = &greedy;
  assert_true(mm_engine_queue(w.engine, &batch, &err) && mm_engine_queues(w.engine));
  assert_true(mm_engine_collect(w.engine, &chosen, &err));
  assert_int_equal(chosen, 7);
  close_group(&w);
}

static unsigned choices; /* asked of the device that follows, whose first fails */
static bool keep_rows(mm_backend *b, mm_err *err) { return mm_ops_cpu.end(b, (float[2 * VOCAB]){0}, err); }
static uint32_t chosen_rows;
static bool choose_late(mm_backend *b, const mm_sampling *set, uint32_t count, mm_err *err) {
  (void)b, (void)set;
  chosen_rows = count;
  return choices++ > 0 || mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "no room for the choice");
}
static bool collect_none(mm_backend *b, int32_t *id, mm_err *err) {
  (void)b, (void)err;
  if (choices == 0) *id = -1;
  return true;
}

/* A choice after the pass that fails drops the rows: wanted again, nothing waits, and nobody goes on with a choice that was not made. */
TEST(test_failed_choice) {
  mm_ops ops = mm_ops_cpu;
  ops.sampler.sample = no_choice, ops.sampler.defer = keep_rows, ops.sampler.sample_deferred = choose_late,
  ops.sampler.collect = collect_none, ops.sampler.samples = UINT32_MAX;
  fixture w;
  mm_err err = {0};
  const int32_t id[] = {3, 4}, chosen = MM_ID_SAMPLED;
  const mm_sampling greedy = {.top_p = 1};
  mm_span span;
  uint32_t out;
  open_group(&w, 1, &ops);
  mm_batch batch = last_of(id, &span, &out, 1, 0, 2);
  assert_true(mm_engine_forward(w.engine, &batch, &err));
  for (int resumes = 0; resumes < 2; resumes++) { /* the choice is not to be that of other tokens */
    err = (mm_err){0};
    assert_false(resumes ? mm_engine_resume(w.engine, 1, NULL, NULL, 0, NULL, &err) : mm_engine_fork(w.engine, 0, &(uint32_t){1}, 1, &err));
    assert_string_equal(err.code, "E_BATCH");
  }
  err = (mm_err){0};
  assert_false(mm_engine_sample(w.engine, &greedy, &err));
  assert_string_equal(err.code, "E_MEMORY");
  err.status = MM_OK;
  int32_t none = 77;
  assert_true(mm_engine_sample(w.engine, &greedy, &err) && mm_engine_collect(w.engine, &none, &err));
  assert_int_equal(none, 77);
  assert_int_equal(chosen_rows, 0);
  batch = last_of(&chosen, &span, &out, 1, 2, 1);
  assert_false(mm_engine_forward(w.engine, &batch, &err));
  assert_string_equal(err.code, "E_BATCH");
  /* A batch sees no rows of a pass that a refused one was to follow. */
  batch = last_of(id, &span, &out, 1, 2, 1);
  assert_true(mm_engine_forward(w.engine, &batch, &err));
  batch = last_of(id, &span, &out, 1, 7, 1); /* a gap */
  assert_false(mm_engine_forward(w.engine, &batch, &err));
  assert_true(mm_engine_sample(w.engine, &greedy, &err) && mm_engine_collect(w.engine, &none, &err));
  assert_int_equal(chosen_rows, 0);
  assert_int_equal(none, 77);
  close_group(&w);
}

int main(void) { return run_unit_tests(NULL, NULL); }
