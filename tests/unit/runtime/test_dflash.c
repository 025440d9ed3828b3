/* Drafts on the CPU: logits of DFlash's blocks and of EAGLE-3's chains against the numbers in double of random_draft.h, however their cells
 * came to be; what a file may not say. */
#include <math.h>
#include <stdio.h>

#include "runtime/engine/engine.h"
#include "tests/unit/runtime/random_draft.h"

enum { LENGTH = 200, ROWS = 48, SLOTS = 3 };

static int32_t id_at(uint32_t text, uint32_t t) { return (int32_t)((t * t * 3 + t * 7 + text * 11 + t / 50) % 50); }

typedef struct running {
  ref_model ref;
  ref_shards *shards;
  random_draft random;
  mm_dflash draft;
  mm_engine *engine, *taps;
  uint32_t requests, turned; /* under rounded inputs: all, and those in which one fell on another code than in double */
} running;

/* Of a logit. An input that lies within f32's rounding of the middle between two codes may fall on the other one, a step of 2^-4 away: that
 * happens in one pass of several, and moves logits, which are about 1, by a part of that. */
#define EXACT  2e-4
#define TURNED 0.5

typedef enum draft_of { DFLASH, EAGLE, EAGLE_LATER } draft_of;

/* quant: of the draft's matrices, or NULL; rounds: their inputs are rounded. */
static void start(running *r, uint32_t tp, draft_of of, const char *quant, bool rounds) {
  mm_err err = {0};
  r->ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  r->shards = ref_cut(&r->ref, tp);
  const mm_dflash_config dims = of == DFLASH ? draft_dims(&r->ref.m) : eagle_dims(&r->ref.m, of == EAGLE_LATER);
  r->random = draft_build_as(quant ? quantised_dims(dims, quant) : dims);
  r->random.rounds = rounds, r->requests = r->turned = 0;
  if (!mm_dflash_open(&r->draft, r->random.dir, &r->ref.m, &err)) fail_msg("%s", err.text);
  mm_engine_config c = {.ops = &mm_ops_cpu,
                        .limits = {.max_tokens = ROWS, .slots = SLOTS, .max_positions = LENGTH + 8},
                        .options = {.threads = 2, .act_quant = rounds},
                        .draft = &r->draft};
  if (!(r->engine = mm_engine_open(&r->shards->s, &c, &err))) fail_msg("%s", err.text);
  c.draft = NULL, c.tap = r->random.c.tap, c.taps = r->random.c.taps;
  c.limits.max_tokens = LENGTH;
  if (!(r->taps = mm_engine_open(&r->shards->s, &c, &err))) fail_msg("%s", err.text);
}

static void stop(running *r) {
  mm_engine_close(r->engine);
  mm_engine_close(r->taps);
  mm_dflash_close(&r->draft);
  draft_free(&r->random);
  ref_uncut(r->shards);
  ref_free(&r->ref);
}

static void step(mm_engine *e, uint32_t slot, uint32_t text, uint32_t pos, uint32_t count) {
  mm_err err = {0};
  int32_t id[LENGTH];
  for (uint32_t t = 0; t < count; t++) id[t] = id_at(text, pos + t);
  const mm_span span = {(int32_t)slot, 0, count, pos};
  if (!mm_engine_step(e, &(mm_batch){count, id, 1, &span, 0, NULL, NULL, NULL}, NULL, &err)) fail_msg("%s", err.text);
}

/* tap[LENGTH, taps · H] of a text, all of it in one step of an engine without a draft. */
static float *taps_of(running *r, uint32_t text) {
  mm_err err = {0};
  const uint32_t H = r->ref.m.hidden, taps = r->random.c.taps;
  float *one = malloc(LENGTH * H * sizeof *one), *all = malloc(LENGTH * taps * H * sizeof *all);
  step(r->taps, 0, text, 0, LENGTH);
  for (uint32_t i = 0; i < taps; i++) {
    assert_true(mm_engine_hidden(r->taps, i, one, &err));
    for (uint32_t t = 0; t < LENGTH; t++) memcpy(all + (t * taps + i) * H, one + t * H, H * sizeof *one);
  }
  mm_engine_drop(r->taps, 0);
  free(one);
  return all;
}

/* Proposals under a temperature are what mm_sample draws from the draft's logits for the position of each. */
static void check_drawn(running *r, const mm_draft_request *request, uint32_t n, uint32_t each) {
  mm_err err = {0};
  int32_t found[ROWS];
  mm_draft_request drawn[SLOTS];
  const uint32_t vocab = r->ref.m.vocab;
  float *logits = malloc(n * each * vocab * sizeof *logits);
  mm_sampler *sampler = mm_sampler_open(vocab, &err);
  const mm_sampling set[] = {{.temperature = 1, .top_p = 1, .seed = 7},
                             {.temperature = 0.8, .top_p = 0.9, .top_k = 40, .min_p = 0.01, .seed = 8, .presence = 2, .bias_count = 3}};
  for (uint32_t i = 0; i < n; i++) drawn[i] = request[i], drawn[i].sampling = &set[(request[i].pos + i) % 2];
  if (!mm_engine_draft(r->engine, drawn, n, each, found, logits, &err)) fail_msg("%s", err.text);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t k = 0; k < each; k++) {
      mm_sampling own = *drawn[i].sampling;
      own.presence = 0, own.bias_count = 0;
      assert_int_equal(found[i * each + k], mm_sample(sampler, &own, drawn[i].pos + 1 + k, logits + (i * each + k) * vocab));
    }
  mm_sampler_close(sampler);
  free(logits);
}

static void check(running *r, const mm_draft_request *request, const uint32_t *text, uint32_t n, uint32_t each, float *const *tap) {
  mm_err err = {0};
  int32_t found[ROWS];
  const uint32_t vocab = r->ref.m.vocab;
  double *want = malloc(each * vocab * sizeof *want);
  float *got = malloc(n * each * vocab * sizeof *got);
  if (!mm_engine_draft(r->engine, request, n, each, found, got, &err)) fail_msg("%s", err.text);
  for (uint32_t i = 0; i < n; i++) {
    int32_t ids[LENGTH];
    for (uint32_t t = 0; t < LENGTH; t++) ids[t] = id_at(text[i], t);
    if (r->random.c.kind == MM_DRAFT_EAGLE3)
      eagle_expect(&r->random, &r->ref, tap[text[i]], ids, request[i].pos, request[i].id, each, want);
    else
      draft_expect(&r->random, &r->ref, tap[text[i]], request[i].pos, request[i].id, each, want);
    double worst = 0;
    for (uint32_t k = 0; k < each * vocab; k++) {
      const double found_logit = (double)got[i * each * vocab + k];
      if (isinf(want[k]) != isinf(found_logit)) fail_msg("request %u, logit %u: found %g, expected %g", i, k, found_logit, want[k]);
      if (!isinf(want[k])) worst = fmax(worst, fabs(found_logit - want[k]));
    }
    if (!(worst <= (r->random.rounds ? TURNED : EXACT)))
      fail_msg("request %u at %u: found logits that are %g off", i, request[i].pos, worst);
    r->requests++, r->turned += worst > EXACT;
    for (uint32_t k = 0; k < each; k++) {
      const float *logits = got + (i * each + k) * vocab;
      uint32_t best = 0;
      for (uint32_t v = 0; v < vocab; v++)
        if (logits[v] > logits[best]) best = v;
      assert_int_equal(found[i * each + k], best);
    }
  }
  free(want), free(got);
  check_drawn(r, request, n, each);
}

/* Each page has what the other one had, by way of host memory. */
static void swap_pages(mm_engine *e, uint32_t page[2]) {
  mm_err err = {0};
  uint64_t at;
  const uint32_t first = page[0];
  const mm_page_move move[] = {{page[0], 0, false}, {page[1], 1, false}, {page[0], 1, true}, {page[1], 0, true}};
  if (!mm_engine_pool(e, 2, &err) || !mm_engine_move(e, move, 4, &at, &err) || !mm_engine_moved(e, true, &at, &err))
    fail_msg("%s", err.text);
  page[0] = page[1], page[1] = first;
}

/* On `tp` ranks: prompts in chunks, tokens one by one, proposals that were wrong and are given anew, forks, and a prefix that
 * another slot read, whose pages were in host memory meanwhile. */
static void check_numbers(uint32_t tp, draft_of of, const char *quant, bool rounds) {
  running r;
  mm_err err = {0};
  start(&r, tp, of, quant, rounds);
  float *tap[] = {taps_of(&r, 0), taps_of(&r, 1)};
  for (uint32_t at = 0, n; at < LENGTH; at += n) n = (uint32_t)mm_min(at % 3 ? 17 : 40, LENGTH - at), step(r.engine, 1, 0, at, n);
  static const uint32_t place[] = {1, 2, 4, 5, 9, 10, MM_PAGE - 1, MM_PAGE, MM_PAGE + 1, 130, LENGTH};
  for (size_t i = 0; i < sizeof place / sizeof *place; i++) {
    const mm_draft_request request = {1, place[i], id_at(7, place[i]), NULL};
    check(&r, &request, (uint32_t[]){0}, 1, 1 + (uint32_t)(i * 3) % 7, tap);
  }
  step(r.engine, 0, 1, 0, 30);
  for (uint32_t t = 30; t < 41; t++) {
    step(r.engine, 0, 3, t, 8); /* of another text: wrong from its first token on */
    step(r.engine, 0, 1, t, 1);
    const mm_draft_request request[] = {{0, t + 1, id_at(1, t + 1), NULL}, {1, LENGTH - t, 3, NULL}};
    check(&r, request, (uint32_t[]){1, 0}, 2, 7, tap);
  }
  const uint32_t to = 2;
  assert_true(mm_engine_fork(r.engine, 0, &to, 1, &err));
  step(r.engine, 0, 3, 41, 5); /* the fork's cells stay */
  step(r.engine, 2, 1, 41, 20);
  check(&r, &(mm_draft_request){2, 61, 9, NULL}, (uint32_t[]){1}, 1, 7, tap);
  uint32_t page[MM_PAGE];
  const uint32_t *table = mm_pages_table(mm_engine_pages(r.engine)) + 1 * mm_pages_per_slot(mm_engine_pages(r.engine));
  for (uint32_t i = 0; i * MM_PAGE < 100; i++) mm_pages_hold(mm_engine_pages(r.engine), page[i] = table[i]);
  mm_engine_drop(r.engine, 1);
  mm_engine_drop(r.engine, 0);
  swap_pages(r.engine, page);
  int32_t ids[100];
  for (uint32_t t = 0; t < 100; t++) ids[t] = id_at(0, t);
  assert_true(mm_engine_resume(r.engine, 0, page, ids, 100, NULL, &err));
  check(&r, &(mm_draft_request){0, 100, 4, NULL}, (uint32_t[]){0}, 1, 7, tap);
  step(r.engine, 0, 0, 100, 3);
  check(&r, &(mm_draft_request){0, 103, 4, NULL}, (uint32_t[]){0}, 1, 7, tap);
  for (uint32_t i = 0; i * MM_PAGE < 100; i++) mm_pages_release(mm_engine_pages(r.engine), page[i]);
  int32_t out[7];
  assert_false(mm_engine_draft(r.engine, &(mm_draft_request){0, 104, 4, NULL}, 1, 7, out, NULL, &err)); /* more than the slot holds */
  assert_string_equal(err.code, "E_BATCH");
  if (4 * r.turned > r.requests) fail_msg("found %u of %u requests with other codes, expected a quarter at most", r.turned, r.requests);
  free(tap[0]), free(tap[1]);
  stop(&r);
}

TEST(test_numbers) { check_numbers(1, DFLASH, NULL, false); }
TEST(test_ranks) { check_numbers(2, DFLASH, NULL, false); }
TEST(test_eagle) { check_numbers(1, EAGLE, NULL, false); }
TEST(test_eagle_later) { check_numbers(1, EAGLE_LATER, NULL, false); }
TEST(test_eagle_ranks) { check_numbers(2, EAGLE, NULL, false), check_numbers(2, EAGLE_LATER, NULL, false); }

static void check_quantised(const char *quant, bool rounds) {
  check_numbers(1, DFLASH, quant, rounds);
  check_numbers(2, EAGLE, quant, rounds);
  check_numbers(1, EAGLE_LATER, quant, rounds);
}
TEST(test_block_fp8) { check_quantised("block_fp8", false); }
TEST(test_block_fp8_rounded) { check_quantised("block_fp8", true); }
TEST(test_channel_fp8) { check_quantised("channel_fp8", false), check_quantised("channel_fp8", true); }

/* A config that breaks a rule, and targets that have no draft. */
TEST(test_refused) {
  const ref_model ref = {.m = ref_dims(MM_FAMILY_M2, false)};
  random_draft r = draft_build(&ref.m);
  const mm_dflash_config good = r.c;
  for (uint32_t i = 0; i < 9; i++) {
    mm_err err = {0};
    mm_dflash d;
    mm_model target = ref.m;
    r.c = good;
    if (i == 0) r.c.tap[1] = 0;
    if (i == 1) r.c.tap[1] = 2; /* the last layer */
    if (i == 2) r.c.mask_id = target.vocab;
    if (i == 3) r.c.block = 1;
    if (i == 4) target.hidden = 23;
    if (i == 5) target.activation = MM_ACTIVATION_SWIGLUOAI;
    if (i == 6) target.attn[1] = MM_ATTN_LIGHTNING;
    if (i == 7) r.c.rope_theta = 0;
    draft_write(&r, r.dir);
    const bool opened = mm_dflash_open(&d, r.dir, &target, &err);
    if (i < 8) {
      assert_false(opened);
      assert_string_equal(err.code, "E_DRAFT");
      assert_int_equal(err.status, i == 5 || i == 6 ? MM_UNSUPPORTED : MM_INTEGRITY);
    } else {
      assert_true(opened);
      mm_dflash_close(&d);
    }
  }
  draft_free(&r);
}

int main(void) { return run_unit_tests(NULL, NULL); }
