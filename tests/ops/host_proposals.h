/* For host.c: rows of proposals take the kernels of decode steps and are recorded, where no state goes through them in turn. */
#ifndef MM_TESTS_HOST_PROPOSALS_H
#define MM_TESTS_HOST_PROPOSALS_H

#include "tests/ops/host_drafts.h"

/* Eight rows of a slot three times, each an output, on each rank one graph; nine are a chunk. */
static void check_verify(const mm_shards *shards) {
  const mm_model *m = &shards->pack.model;
  bool decodes = true;
  for (uint32_t l = 0; l < m->layers; l++) decodes = decodes && m->attn[l] != MM_ATTN_LIGHTNING;
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  bool ok = mm_engine_warm(e, (const uint32_t[]){1}, 1, &err); /* all weights are there */
  const uint32_t before = fake.graphs;
  launched[0] = 0;
  fake.on_launch = note_kernel;
  for (uint32_t i = 0; ok && i < 3; i++) ok = step(e, 8, true, &err);
  fake.on_launch = NULL;
  const uint32_t graphs = fake.graphs - before;
  ok = ok && graphs == (decodes ? mm_pack_ranks(&shards->pack) : 0);
  if (decodes)
    ok = ok && (strstr(launched, "gqa_together") || strstr(launched, "gqa_blocks")) && !strstr(launched, "gqa_tileI") &&
         !strstr(launched, "stream_tile");
  for (uint32_t i = 0; ok && i < 3; i++) ok = step(e, 9, true, &err);
  char reason[200];
  snprintf(reason, sizeof reason, "%u graphs, then %u: %.100s", graphs, fake.graphs - before - graphs, err.text);
  report("rows of proposals", ok && fake.graphs - before == graphs, reason);
  close_engine(e, "its calls and its memory");
  check_chain(shards);
}

#endif
