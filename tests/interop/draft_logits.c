/* draft_logits DIR DRAFTS CUT... <IDS >NUMBERS: what the draft of a packed checkpoint computes on a CPU, all in f32. stdin has
 * little-endian int32 token ids, more than the last CUT. For each CUT, in ascending order, the ids below it that the slot does not hold yet
 * are given to the model in one step, and the draft proposes DRAFTS tokens behind the id at CUT. stdout has for each CUT, in little-endian
 * numbers:
 *
 *   f32 [taps, rows, H]     outputs of the tapped layers for the rows of the step
 *   f32 [DRAFTS, vocab]     logits of the proposals
 *   int32 [DRAFTS]          the proposals, which are the likeliest ids */
#include <stdio.h>
#include <stdlib.h>

#include "loader/dflash.h"
#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"

enum { IDS = 1024 };

static void die(const mm_err *err) {
  fprintf(stderr, "draft_logits: %s\n", err->text);
  exit(1);
}

static void put(const void *data, size_t size, size_t count) {
  if (fwrite(data, size, count, stdout) == count) return;
  perror("draft_logits: stdout");
  exit(1);
}

/* Gives ids `from` to `to` - 1 to slot 0 and writes the tapped outputs of these rows. */
static void step(mm_engine *e, const mm_dflash_config *c, const int32_t *id, uint32_t from, uint32_t to, float *logits) {
  mm_err err = {0};
  const uint32_t rows = to - from, out = rows - 1;
  const mm_span span = {0, 0, rows, from};
  const size_t count = (size_t)rows * c->hidden;
  float *hidden = malloc(count * sizeof *hidden);
  if (!hidden || !mm_engine_step(e, &(mm_batch){rows, id + from, 1, &span, 1, &out, NULL, NULL}, logits, &err)) die(&err);
  for (uint32_t i = 0; i < c->taps; i++) {
    if (!mm_engine_hidden(e, i, hidden, &err)) die(&err);
    put(hidden, sizeof *hidden, count);
  }
  free(hidden);
}

int main(int argc, char **argv) {
  static int32_t id[IDS];
  const uint32_t ids = (uint32_t)fread(id, sizeof *id, IDS, stdin), each = argc > 3 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
  if (argc < 4) {
    fprintf(stderr, "usage: draft_logits DIR DRAFTS CUT... <IDS >NUMBERS\n");
    return 2;
  }
  mm_err err = {0};
  mm_shards shards;
  mm_dflash draft;
  if (!mm_shards_open(&shards, argv[1], &err) || !mm_dflash_open(&draft, argv[1], &shards.pack.model, &err)) die(&err);
  const mm_engine_config c = {.ops = &mm_ops_cpu,
                              .limits = {.max_tokens = IDS, .slots = 1, .max_positions = IDS},
                              .options.threads = mm_engine_threads(0, 1),
                              .draft = &draft};
  mm_engine *e = mm_engine_open(&shards, &c, &err);
  if (!e) die(&err);
  const size_t vocab = mm_engine_model(e)->vocab;
  float *logits = calloc((size_t)each + 1, vocab * sizeof *logits);
  int32_t *proposal = calloc((size_t)each + 1, sizeof *proposal);
  uint32_t held = 0;
  for (int i = 3; logits && proposal && i < argc; i++) {
    const uint32_t cut = (uint32_t)strtoul(argv[i], NULL, 10);
    if (cut <= held || cut >= ids) {
      fprintf(stderr, "draft_logits: found CUT %u, expected more than %u and fewer than the %u ids\n", cut, held, ids);
      return 2;
    }
    step(e, &draft.c, id, held, cut, logits);
    held = cut;
    if (!mm_engine_draft(e, &(mm_draft_request){0, cut, id[cut], NULL}, 1, each, proposal, logits, &err)) die(&err);
    put(logits, sizeof *logits, each * vocab);
    put(proposal, sizeof *proposal, each);
  }
  free(proposal);
  free(logits);
  mm_engine_close(e);
  mm_dflash_close(&draft);
  mm_shards_close(&shards);
  return fflush(stdout) != 0;
}
