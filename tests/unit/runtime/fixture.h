/* An engine of a small random model and four texts, for tests of what its slots hold. */
#ifndef MM_TESTS_FIXTURE_H
#define MM_TESTS_FIXTURE_H

#include <stdlib.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

#define LENGTH 200 /* of a sequence: more than three pages */
#define SLOTS  6
#define TEXTS  4
#define COMMON 70 /* tokens that texts 0 and 1 begin with, and 2 and 3 */

typedef struct fixture {
  ref_model ref;
  ref_shards *shards;
  mm_engine *engine;
  uint32_t vocab;
  float *want[TEXTS]; /* [LENGTH, vocab] of each text fed at once */
  float *got;         /* [LENGTH, vocab] */
} fixture;

/* The backends of the last engine opened. */
static mm_backend *backend[16];
static inline mm_backend *capturing_open(const mm_backend_config *c, mm_err *err) {
  mm_backend *b = mm_ops_cpu.open(c, err);
  backend[c->place.rank] = b;
  return b;
}

static uint64_t seed = 1;
static inline uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

static inline int32_t token(uint32_t text, uint32_t t) {
  if (t < COMMON) text /= 2;
  return (int32_t)((t * t * 3 + t * 7 + text * 11) % 50);
}

/* `count` tokens of a text in a slot from pos on; logits of all. */
static inline bool feed(fixture *w, int32_t slot, uint32_t text, uint32_t pos, uint32_t count, float *logits, mm_err *err) {
  int32_t id[LENGTH];
  uint32_t out[LENGTH];
  for (uint32_t i = 0; i < count; i++) id[i] = token(text, pos + i), out[i] = i;
  const mm_span span = {slot, 0, count, pos};
  return mm_engine_step(w->engine, &(mm_batch){count, id, 1, &span, count, out, NULL, NULL}, logits, err);
}

static inline void feed_ok(fixture *w, int32_t slot, uint32_t text, uint32_t pos, uint32_t count) {
  mm_err err = {0};
  if (!feed(w, slot, text, pos, count, w->got + (size_t)pos * w->vocab, &err)) fail_msg("%s", err.text);
}

/* Rows [from, to) that were fed of a text, against the text fed at once. */
static inline void same(const fixture *w, uint32_t text, uint32_t from, uint32_t to) {
  const size_t at = (size_t)from * w->vocab;
  if (memcmp(w->got + at, w->want[text] + at, (to - from) * w->vocab * sizeof(float)) != 0)
    fail_msg("text %u, rows %u to %u: other bits", text, from, to);
}

/* What the engine's caches hold: f32; keys and values in bf16; index keys in e4m3. */
typedef enum caches { IN_F32, IN_BF16, INDEX_FP8 } caches;
static inline mm_run_options cached(caches c) {
  return (mm_run_options){.threads = 1, .kv_bf16 = c == IN_BF16, .index_fp8 = c == INDEX_FP8};
}

/* tp ranks; those of layers from `stage` on a second stage, or 0: one. Attention is cut for attn_tp of them, 0: for all. */
static inline void open_groups(fixture *w, mm_model m, uint32_t tp, uint32_t attn_tp, uint32_t stage, uint32_t pages, caches cache) {
  static mm_ops ops;
  ops = mm_ops_cpu;
  ops.open = capturing_open;
  mm_err err = {0};
  *w = (fixture){.ref = ref_build(m), .vocab = m.vocab};
  w->shards = ref_cut_groups(&w->ref, tp, attn_tp);
  if (stage) ref_cut_stages(w->shards, stage);
  const mm_engine_config c = {
      .ops = &ops, .limits = {.max_tokens = LENGTH, .slots = SLOTS, .max_positions = LENGTH, .pages = pages}, .options = cached(cache)};
  if (!(w->engine = mm_engine_open(&w->shards->s, &c, &err))) fail_msg("%s", err.text);
  w->got = malloc((size_t)LENGTH * m.vocab * sizeof(float));
  for (uint32_t t = 0; t < TEXTS; t++) {
    w->want[t] = malloc((size_t)LENGTH * m.vocab * sizeof(float));
    assert_true(feed(w, 0, t, 0, LENGTH, w->want[t], &err));
  }
  mm_engine_drop(w->engine, 0);
}

static inline void open_group(fixture *w, mm_model m, uint32_t tp, uint32_t stage, uint32_t pages, caches cache) {
  open_groups(w, m, tp, 0, stage, pages, cache);
}

static inline void close_group(fixture *w) {
  mm_engine_close(w->engine);
  ref_uncut(w->shards);
  ref_free(&w->ref);
  for (uint32_t t = 0; t < TEXTS; t++) free(w->want[t]);
  free(w->got);
}

static inline void free_again(fixture *w) {
  mm_err err = {0};
  for (uint32_t s = 0; s < SLOTS; s++) mm_engine_drop(w->engine, s);
  if (!mm_pages_check(mm_engine_pages(w->engine), NULL, &err)) fail_msg("%s", err.text);
  assert_int_equal(mm_pages_free(mm_engine_pages(w->engine)), mm_pages_count(mm_engine_pages(w->engine)));
}

#endif
