/* For host.c: passes of an EAGLE-3 draft's chain are recorded, each once, follow one another, and give the ids that each chose; the memory
 * of a draft is what the engine counts. */
#ifndef MM_TESTS_HOST_DRAFTS_H
#define MM_TESTS_HOST_DRAFTS_H

#include "loader/dflash.h"
#include "loader/stream/capacity.h"

void mm_engine_add_draft_memory(const mm_engine_config *c, mm_rank_memory *need); /* engine_inside.h */

enum { PASSES = 3, CHAINS = 3 };

/* The beginning of mm_cu_sample (sampling.h). */
typedef struct sample_args {
  const float *logits;
  const uint32_t *never;
  uint32_t vocab, vocab_rows, tokens;
  const uint32_t *out;
  const int32_t *slot;
  const void *sampling;
  int32_t *id, *last_id;
} sample_args;

static _Atomic uint32_t passes_run, cells_kept;
/* What the kernels of a chain would choose in pass p for row i: 10 p + i. */
static void choose_rows(const char *name, void **args) {
  static _Thread_local uint32_t pass;
  passes_run += strstr(name, "draft_attend") != NULL;
  cells_kept += strstr(name, "hidden_keep") != NULL;
  if (!strstr(name, "best_of_row")) return;
  sample_args a;
  memcpy(&a, args[0], sizeof a);
  for (uint32_t i = 0; i < CHAINS; i++) a.id[i] = (int32_t)(10 * pass + i);
  pass = (pass + 1) % PASSES;
}

static mm_ops drafting;
static bool fails_in_chain; /* rank 1's next second pass does */
static bool failing_pass(mm_backend *b, const mm_batch *batch, mm_draft_step now, mm_err *err) {
  if (b == second && fails_in_chain && now.pass == 1)
    return fails_in_chain = false, mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails");
  return mm_ops_cuda.draft.begin(b, batch, now, err);
}

static mm_dflash_config chain_of(const mm_model *m) {
  return (mm_dflash_config){.kind = MM_DRAFT_EAGLE3,
                            .layers = 1,
                            .hidden = m->hidden,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_dim = 32,
                            .intermediate = 96,
                            .taps = 2,
                            .tap = {0, 1},
                            .block = 1 + MM_EAGLE_CHAIN,
                            .norm_eps = 1e-6,
                            .rope_theta = 1e6,
                            .causal = {true},
                            .vocab = m->vocab,
                            .draft_vocab = m->vocab,
                            .own_embed = true,
                            .tap_norms = true};
}

/* rounds: inputs of the draft's and the model's matrices are. */
static mm_engine *open_drafting(const mm_shards *shards, const mm_dflash *draft, bool rounds, mm_rank_memory *need, mm_err *err) {
  static const uint32_t device[] = {0, 1};
  fake.wrong[0] = 0, fake.ranks = shards->pack.tp, fake.graphs = 0;
  drafting = *backend, drafting.open = open_rank, drafting.draft.begin = failing_pass, second = NULL;
  const mm_engine_config c = {.ops = &drafting,
                              .limits = {ROWS, SLOTS, POSITIONS, 7},
                              .options = {.threads = 1, .act_quant = rounds},
                              .device = device,
                              .draft = draft};
  *need = (mm_rank_memory){0};
  mm_engine_add_draft_memory(&c, need);
  mm_engine *e = mm_engine_open(shards, &c, err);
  if (e && mm_engine_warm(e, (const uint32_t[]){1}, 1, err)) return e; /* all weights are there */
  mm_engine_close(e);
  return NULL;
}

static void check_chain_in(const mm_shards *shards, const char *quant) {
  mm_err err = {0};
  mm_dflash draft;
  mm_rank_memory need, none;
  mm_dflash_config config = chain_of(&shards->pack.model);
  if (quant) config.quant = mm_dflash_scheme(quant);
  const uint32_t ranks = mm_pack_ranks(&shards->pack);
  char reason[300];
  if (!mm_dflash_fits(&config, "", &shards->pack.model, MM_USAGE, &err) || !mm_dflash_random(&draft, &config, &(mm_err){0})) return;
  err = (mm_err){0};
  mm_engine *e = open_drafting(shards, NULL, quant, &none, &err);
  const uint64_t plain = fake_used();
  mm_engine_close(e);
  bool ok = e && (e = open_drafting(shards, &draft, quant, &need, &err));
  const uint64_t counted = ranks * (need.weights + need.buffers + 7 * need.page), used = fake_used() - plain;
  snprintf(reason, sizeof reason, "%llu bytes, counted %llu: %.100s", (unsigned long long)used, (unsigned long long)counted, err.text);
  report("memory of a chain", ok && used <= counted && used > counted / 2, reason);
  int32_t id[CHAINS * PASSES];
  const mm_draft_request request[CHAINS] = {{0, 1, 1, NULL}, {3, 1, 2, NULL}, {1, 1, 3, NULL}};
  cells_kept = passes_run = 0;
  fake.on_launch = choose_rows;
  ok = ok && step(e, SLOTS, false, &err) && mm_engine_draft(e, request, CHAINS, PASSES, id, NULL, &err);
  fake.on_launch = NULL;
  bool right = ok && cells_kept == ranks && passes_run == ranks * PASSES;
  for (uint32_t i = 0; right && i < CHAINS * PASSES; i++) right = id[i] == (int32_t)(10 * (i % PASSES) + i / PASSES);
  snprintf(reason, sizeof reason, "%u cells kept, %u passes, %d, %d, %d: %.100s", (uint32_t)cells_kept, (uint32_t)passes_run, id[0], id[1],
           id[PASSES], err.text);
  report("a chain's ids are those of its passes", right, reason);
  const uint32_t before = fake.graphs;
  for (uint32_t i = 0; ok && i < 3; i++) ok = mm_engine_draft(e, request, CHAINS, PASSES, id, NULL, &err);
  snprintf(reason, sizeof reason, "%u graphs: %.100s", fake.graphs - before, err.text);
  report("each pass of a chain is recorded once", ok && fake.graphs - before == ranks * PASSES, reason);
  ok = ok && step(e, SLOTS, false, &err) && mm_engine_draft(e, request, 1, 1, id, logits, &err);
  report("a chain with its logits", ok, err.text);
  if (ok && ranks > 1) {
    fails_in_chain = true;
    const double from = now();
    const bool failed = !mm_engine_draft(e, request, CHAINS, PASSES, id, NULL, &err) && strcmp(err.code, "E_TEST") == 0;
    snprintf(reason, sizeof reason, "%.1f s, %.200s", now() - from, err.text);
    err = (mm_err){0};
    ok = step(e, SLOTS, false, &err) && mm_engine_draft(e, request, CHAINS, PASSES, id, NULL, &err);
    report("a rank that fails within a chain is named, and the next chain runs", failed && ok && now() - from < 5,
           failed ? err.text : reason);
  }
  if (e) close_engine(e, "its calls and its memory");
  mm_dflash_close(&draft);
}

static void check_chain(const mm_shards *shards) {
  check_chain_in(shards, NULL);
  check_chain_in(shards, "block_fp8");
}

#endif
