/* acceptance DIR HELD_OUT.json DRAFTS DOCUMENTS LEAST [TEMPERATURE]: tokens a step that the draft of a packed checkpoint gives on a CPU.
 * HELD_OUT.json has the token ids of documents, each begun by the first id of all. The beginnings of DOCUMENTS of them are continued
 * greedily, or at a temperature, each with a seed of its own; DRAFTS tokens are proposed for each step, which gives the model's own token
 * and the leading proposals that are the model's too. Exit status 1 where the mean is below LEAST. */
#include <stdio.h>
#include <stdlib.h>

#include "formats/json.h"
#include "loader/dflash.h"
#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"

enum { PROMPT = 64, REPLY = 64 };
#define TEXT_MAX (UINT64_C(1) << 26)

typedef struct counts {
  unsigned steps, given;
} counts;

static void die(const mm_err *err) {
  fprintf(stderr, "acceptance: %s\n", err->text);
  exit(1);
}

static mm_sampler *sampler;

/* Gives id[count] to slot 0, which holds `pos` tokens; returns the next one. */
static int32_t next_after(mm_engine *e, const int32_t *id, uint32_t count, uint32_t pos, const mm_sampling *set, float *logits) {
  mm_err err = {0};
  const mm_span span = {0, 0, count, pos};
  const uint32_t out = count - 1;
  if (!mm_engine_step(e, &(mm_batch){count, id, 1, &span, 1, &out, NULL, NULL}, logits, &err)) die(&err);
  return mm_sample(sampler, set, pos + (uint64_t)count, logits);
}

/* One document's beginning, continued by REPLY tokens after the one that the prompt's step gives. */
static counts continued(mm_engine *e, const int32_t *prompt, uint32_t drafts, const mm_sampling *set, float *logits) {
  mm_err err = {0};
  counts c = {0};
  int32_t token = next_after(e, prompt, PROMPT, 0, set, logits);
  for (uint32_t pos = PROMPT; pos < PROMPT + REPLY; c.steps++) {
    int32_t draft[MM_DFLASH_BLOCK];
    if (!mm_engine_draft(e, &(mm_draft_request){0, pos, token, set}, 1, drafts, draft, NULL, &err)) die(&err);
    for (uint32_t k = 0; k <= drafts && pos < PROMPT + REPLY; k++) {
      token = next_after(e, &token, 1, pos++, set, logits);
      c.given++;
      if (k < drafts && token != draft[k]) break;
    }
  }
  mm_engine_drop(e, 0);
  return c;
}

/* The first PROMPT ids of the next document that has as many; false: there is no other. */
static bool next_prompt(const mm_json *ids, size_t *at, int32_t *prompt) {
  const int64_t start = mm_json_int(mm_json_at(ids, 0));
  for (; *at + PROMPT <= mm_json_size(ids); ++*at) {
    if (mm_json_int(mm_json_at(ids, *at)) != start) continue;
    uint32_t n = 0;
    do prompt[n] = (int32_t)mm_json_int(mm_json_at(ids, *at + n));
    while (++n < PROMPT && mm_json_int(mm_json_at(ids, *at + n)) != start);
    if (n == PROMPT) return ++*at, true;
  }
  return false;
}

int main(int argc, char **argv) {
  if (argc != 6 && argc != 7) {
    fprintf(stderr, "usage: acceptance DIR HELD_OUT.json DRAFTS DOCUMENTS LEAST [TEMPERATURE]\n");
    return 2;
  }
  mm_err err = {0};
  mm_shards shards;
  mm_dflash draft;
  mm_json *ids = mm_json_load(argv[2], TEXT_MAX, &err);
  if (!ids || !mm_shards_open(&shards, argv[1], &err) || !mm_dflash_open(&draft, argv[1], &shards.pack.model, &err)) die(&err);
  const mm_engine_config c = {.ops = &mm_ops_cpu,
                              .limits = {.max_tokens = PROMPT, .slots = 1, .max_positions = PROMPT + REPLY},
                              .options.threads = 1,
                              .draft = &draft};
  mm_engine *e = mm_engine_open(&shards, &c, &err);
  if (!e) die(&err);
  float *logits = malloc(mm_engine_model(e)->vocab * sizeof *logits);
  mm_sampling set = {.top_p = 1, .temperature = argc == 7 ? strtod(argv[6], NULL) : 0};
  if (!(sampler = mm_sampler_open(mm_engine_model(e)->vocab, &err))) die(&err);
  int32_t prompt[PROMPT];
  counts all = {0};
  size_t at = 0;
  for (long left = strtol(argv[4], NULL, 10); logits && left && next_prompt(ids, &at, prompt); left--) {
    const counts one = continued(e, prompt, (uint32_t)strtoul(argv[3], NULL, 10), &set, logits);
    set.seed++, all.steps += one.steps, all.given += one.given;
  }
  const double mean = all.steps ? (double)all.given / all.steps : 0;
  printf("%u tokens in %u steps: %.3f tokens a step, expected %s or more\n", all.given, all.steps, mean, argv[5]);
  free(logits);
  mm_engine_close(e);
  mm_sampler_close(sampler);
  mm_dflash_close(&draft);
  mm_shards_close(&shards);
  mm_json_free(ids);
  return !(mean >= strtod(argv[5], NULL));
}
