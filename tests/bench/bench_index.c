/* The blocks that sparse attention reads with index keys in e4m3, compared with f32: of each sparse layer the share of the chosen blocks
 * and of the lists (of a row and an index head) that are others, where both are given the same rows. Windows of a text are fed one by one;
 * rows below position FIRST, and lists of all their blocks, do not count. bench_index PACKED IDS.json [WINDOW [WINDOWS]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "formats/json.h"
#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"

enum { FIRST = 200 };
#define TEXT_MAX (UINT64_C(1) << 26)

typedef struct counts {
  uint64_t lists, lists_other, blocks, blocks_other;
} counts;

static counts of[MM_MAX_LAYERS];
static char *shadow[MM_MAX_LAYERS]; /* index keys in e4m3 */

static void die(const mm_err *err) {
  fprintf(stderr, "bench_index: %s\n", err->text);
  exit(1);
}

static void *must(void *p) {
  if (!p) exit(1);
  return p;
}

static void compare(const mm_backend *b, uint32_t layer, const uint32_t *block, const uint32_t *blocks) {
  const mm_model *m = b->c.model;
  counts *c = &of[layer];
  const mm_span *s = &b->batch->span[0];
  for (uint32_t i = 0; i < b->batch->tokens * b->index_heads; i++) {
    const uint32_t pos = s->pos + i / b->index_heads, *mine = block + (size_t)i * m->index_top_k, *const end = mine + blocks[i];
    const uint32_t *exact = b->block + (size_t)i * m->index_top_k;
    if (pos < FIRST || pos / m->index_block + 1 <= m->index_top_k) continue;
    uint32_t other = 0;
    for (uint32_t k = 0; k < b->blocks[i]; k++) {
      const uint32_t *at = mine;
      while (at < end && *at != exact[k]) at++;
      other += at == end;
    }
    c->lists++, c->lists_other += other > 0, c->blocks += b->blocks[i], c->blocks_other += other;
  }
}

/* The op twice over the same rows: with keys in e4m3, then as it is. */
static void select_twice(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm) {
  const mm_model *m = b->c.model;
  const size_t T = b->batch->tokens, lists = T * b->index_heads;
  const size_t bytes[] = {T * q.width * sizeof(float), T * k.width * sizeof(float)};
  float *const rows[] = {must(malloc(bytes[0])), must(malloc(bytes[1]))};
  uint32_t *const block = must(malloc(lists * m->index_top_k * sizeof *block)), *const blocks = must(malloc(lists * sizeof *blocks));
  memcpy(rows[0], q.data, bytes[0]), memcpy(rows[1], k.data, bytes[1]);
  mm_cpu_cache *const c = &b->cache[layer], own = *c;
  const size_t key = b->mapped.index_key;
  if (!shadow[layer]) shadow[layer] = must(mm_cpu_map(b->mapped.index_bytes, MM_IGNORED));
  c->index = shadow[layer], b->mapped.index_key = sizeof(float) + m->index_dim, b->c.options.index_fp8 = true;
  mm_cpu_select(b, layer, q, k, q_norm, k_norm);
  memcpy(block, b->block, lists * m->index_top_k * sizeof *block), memcpy(blocks, b->blocks, lists * sizeof *blocks);
  *c = own, b->mapped.index_key = key, b->c.options.index_fp8 = false;
  memcpy(q.data, rows[0], bytes[0]), memcpy(k.data, rows[1], bytes[1]);
  mm_cpu_select(b, layer, q, k, q_norm, k_norm);
  compare(b, layer, block, blocks);
  free(rows[0]), free(rows[1]), free(block), free(blocks);
}

static void print(const mm_model *m, uint64_t rows) {
  printf("%llu rows at position %d and later, top %u of blocks of %u\n", (unsigned long long)rows, FIRST, m->index_top_k, m->index_block);
  for (uint32_t l = 0; l < m->layers; l++)
    if (of[l].lists)
      printf("layer %u: %.2f %% of %llu chosen blocks are others, in %.1f %% of %llu lists\n", l,
             100.0 * (double)of[l].blocks_other / (double)of[l].blocks, (unsigned long long)of[l].blocks,
             100.0 * (double)of[l].lists_other / (double)of[l].lists, (unsigned long long)of[l].lists);
}

int main(int argc, char **argv) {
  mm_err err = {0};
  mm_shards shards = {0};
  const uint32_t window = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 1536;
  const size_t windows = argc > 4 ? strtoul(argv[4], NULL, 10) : 4;
  if (argc < 3 || argc > 5 || !window || !windows) return fputs("usage: bench_index PACKED IDS.json [WINDOW [WINDOWS]]\n", stderr), 2;
  mm_json *const ids = mm_json_load(argv[2], TEXT_MAX, &err);
  if (!ids || !mm_shards_open(&shards, argv[1], &err)) die(&err);
  mm_ops ops = mm_ops_cpu;
  ops.select = select_twice;
  const mm_engine_config c = {.ops = &ops, .limits = {.max_tokens = window, .slots = 1, .max_positions = window}, .options.threads = 1};
  mm_engine *const e = mm_engine_open(&shards, &c, &err);
  if (!e) die(&err);
  int32_t *const id = must(malloc(window * sizeof *id));
  float *const logits = must(malloc(shards.pack.model.vocab * sizeof *logits));
  const mm_span span = {0, 0, window, 0};
  const uint32_t out = window - 1;
  uint64_t rows = 0;
  for (size_t w = 0; w < windows && (w + 1) * window <= mm_json_size(ids); w++) {
    for (size_t i = 0; i < window; i++) id[i] = (int32_t)mm_json_int(mm_json_at(ids, w * window + i));
    if (!mm_engine_step(e, &(mm_batch){window, id, 1, &span, 1, &out, NULL, NULL}, logits, &err)) die(&err);
    mm_engine_drop(e, 0);
    rows += window > FIRST ? window - FIRST : 0;
  }
  print(&shards.pack.model, rows);
  mm_engine_close(e);
  mm_json_free(ids);
  mm_shards_close(&shards);
  free(id), free(logits);
  return 0;
}
