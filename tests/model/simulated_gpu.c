/* Pages that an engine gives its KV cache on GPUs of simulated sizes: simulated_gpu DIR KV INDEX BYTES ... (with MM_DP groups) prints, for
 * minimax-serve's default options and each size, the tokens of the cache, or 0 where it is refused (E_MEMORY) before anything is opened. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/engine.h"

static uint64_t bytes;
static uint64_t given; /* pages */
static mm_ops ops;

static bool fake_memory(const mm_backend_config *c, mm_memory_facts *out, mm_err *err) {
  (void)err;
  *out = (mm_memory_facts){.total = bytes, .free = bytes, .device = {{(uint8_t)c->place.rank}}};
  return true;
}

/* A rank gets the limits that were computed, with the pages of its group of attention; nothing is opened. */
static mm_backend *fake_open(const mm_backend_config *c, mm_err *err) {
  __atomic_store_n(&given, c->limits.pages, __ATOMIC_RELAXED);
  mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "sized");
  return NULL;
}

int main(int argc, char **argv) {
  mm_err err = {0};
  mm_shards shards = {0};
  const char *groups = getenv("MM_DP");
  if (argc < 5 || !mm_shards_open(&shards, argv[1], &err) ||
      (groups && !mm_shards_regroup(&shards, (uint32_t)strtoul(groups, NULL, 10), &err)))
    return fprintf(stderr, "simulated_gpu: %s\n", err.text), 2;
  ops = mm_ops_cpu, ops.open = fake_open, ops.memory = fake_memory, ops.own_memory = true;
  for (int i = 4; i < argc; i++) {
    const mm_engine_config c = {
        .ops = &ops,
        .limits = {.max_tokens = MM_DEFAULT_STEP_TOKENS,
                   .slots = MM_DEFAULT_SLOTS,
                   .max_positions = (uint32_t)shards.pack.model.max_positions},
        .options.threads = 1,
        .options.act_quant = true,
        .options.kv_fp8 = strcmp(argv[2], "fp8") == 0,
        .options.index_fp8 = strcmp(argv[3], "fp8") == 0,
        .memory = {.fits = true, .outs = mm_outs_of(&shards.pack.model, MM_DEFAULT_SLOTS, MM_DEFAULT_DRAFTS), .least = MM_DEFAULT_SLOTS}};
    bytes = strtoull(argv[i], NULL, 10), given = 0, err = (mm_err){0};
    if (mm_engine_open(&shards, &c, &err)) return 1;
    if (strcmp(err.code, given ? "E_TEST" : "E_MEMORY") != 0 || (!given && err.status != MM_LIMIT))
      return fprintf(stderr, "%s\n", err.text), 1;
    printf("%llu\n", (unsigned long long)given * mm_pack_groups(&shards.pack) * MM_PAGE);
  }
  mm_shards_close(&shards);
  return 0;
}
