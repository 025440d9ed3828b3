/* exchange DIR: rows between groups of attention as codes, with experts chosen by the rows' owners (mm_rank_ops.gather_routed), compared
 * with rows as they are that every rank routes: logits and the load of experts to the bit, over random steps of one row and of many, with
 * idle groups. Exit status 1 if bits differ, 3 if the checkpoint's rows do not go as codes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/engine.h"

enum { SLOTS = 8, LONGEST = 96, STEPS = 60, ROWS = SLOTS * 24 };

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

static _Noreturn void die(const mm_err *err) {
  fprintf(stderr, "exchange: %s\n", err->text);
  exit(1);
}

static mm_engine *open_engine(const mm_shards *shards, const mm_ops *ops) {
  mm_err err = {0};
  const mm_engine_config c = {
      .ops = ops, .limits = {.max_tokens = ROWS, .slots = SLOTS, .max_positions = LONGEST}, .options = {.threads = 2, .act_quant = true}};
  mm_engine *e = mm_engine_open(shards, &c, &err);
  if (!e) die(&err);
  return e;
}

/* One row or some of some slots; all are outputs. */
static uint32_t random_batch(mm_engine *e, int32_t *id, mm_span *span, uint32_t *spans) {
  const uint32_t chunks = below(3) == 0, vocab = mm_engine_model(e)->vocab;
  uint32_t rows = 0;
  for (uint32_t s = 0; s < SLOTS; s++) {
    const uint32_t held = mm_engine_held(e, s), n = chunks ? 1 + below(24) : 1;
    if (below(3) == 0) continue;
    span[(*spans)++] = (mm_span){(int32_t)s, rows, n, held + n > LONGEST ? 0 : held};
    for (uint32_t i = 0; i < n; i++) id[rows++] = (int32_t)below(vocab);
  }
  return rows;
}

int main(int argc, char **argv) {
  mm_err err = {0};
  mm_shards shards;
  if (argc != 2 || !mm_shards_open(&shards, argv[1], &err)) die(&err);
  mm_ops plain = mm_ops_cpu;
  plain.ranks.gather_routed = NULL;
  mm_engine *const codes = open_engine(&shards, &mm_ops_cpu), *const rows = open_engine(&shards, &plain);
  const mm_model *m = mm_engine_model(codes);
  const mm_row_exchange how = mm_engine_exchange(codes);
  if (how.codes == MM_ACT_KEPT) return printf("rows do not go as codes\n"), 3;
  if (mm_engine_exchange(rows).codes != MM_ACT_KEPT) return printf("exchange: rows as they are, and codes\n"), 1;
  const size_t loads = (size_t)m->layers * m->experts;
  float *const got = malloc((size_t)ROWS * m->vocab * sizeof *got), *const want = malloc((size_t)ROWS * m->vocab * sizeof *want);
  uint64_t *const load = calloc(2 * loads, sizeof *load);
  if (!got || !want || !load) return 8;
  uint32_t total = 0;
  for (uint32_t step = 0; step < STEPS; step++) {
    int32_t id[ROWS];
    uint32_t out[ROWS], spans = 0;
    mm_span span[SLOTS];
    const uint32_t n = random_batch(codes, id, span, &spans);
    for (uint32_t i = 0; i < n; i++) out[i] = i;
    const mm_batch b = {n, id, spans, span, n, out, NULL, NULL};
    if (n == 0) continue;
    if (!mm_engine_step(codes, &b, got, &err) || !mm_engine_step(rows, &b, want, &err)) die(&err);
    if (memcmp(got, want, (size_t)n * m->vocab * sizeof *got) != 0) return printf("exchange: step %u of %u rows: other bits\n", step, n), 1;
    total += n;
  }
  if (!mm_engine_expert_load(codes, load, &err) || !mm_engine_expert_load(rows, load + loads, &err)) die(&err);
  const bool alike = memcmp(load, load + loads, loads * sizeof *load) == 0;
  printf("%s: %u rows of %u bytes, the logits of rows as they are; the load of experts %s\n", argv[1], total, how.row_bytes,
         alike ? "too" : "differs");
  mm_engine_close(codes), mm_engine_close(rows);
  mm_shards_close(&shards);
  free(got), free(want), free(load);
  return !alike;
}
