/* golden DIR GOLDEN.safetensors: holds a packed tiny checkpoint against the reference results that came with it. Prints each
 * figure next to its limit; exit status 1 if one is exceeded. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "formats/system/pool.h"
#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"

#define LOGIT_LIMIT 2e-4 /* against the reference */
#define SELF_LIMIT  0    /* against ourselves, the same tokens fed differently */
#define LONGEST     700
#define CHUNKED     300 /* tokens fed in chunks */
/* By ones: as many, then one piece up to where blocks of 256 end soon, then the rest. */
enum { FIRST_ONES = 8, LAST_ONES = 250 };
#define KV_HEADS 8 /* of a rank, at most */

/* The blocks that sparse layers chose for the last prompt, of each rank, layer, kv head of the rank and position: at most four of them;
 * UINT32_MAX for none. */
enum { CHOSEN = 4 };
static uint32_t (*g_block)[LONGEST][CHOSEN]; /* [ranks, layers, KV_HEADS] */
static size_t block_place(uint32_t rank, uint32_t layer, uint32_t kv_head) {
  return ((size_t)rank * MM_MAX_LAYERS + layer) * KV_HEADS + kv_head;
}

static void select_and_record(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm) {
  mm_ops_cpu.select(b, layer, q, k, q_norm, k_norm);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t t = 0; s->slot == 0 && t < s->count; t++)
      for (uint32_t h = 0; h < b->kv_heads; h++) {
        uint32_t count, *to = g_block[block_place(b->c.weights->rank, layer, h)][s->pos + t];
        const uint32_t *from = mm_cpu_blocks(b, s->first + t, h, &count);
        for (uint32_t j = 0; j < CHOSEN; j++) to[j] = j < count ? from[j] : UINT32_MAX;
      }
  }
}

typedef struct golden {
  mm_st st;
  mm_map map;
  mm_shards shards;
  mm_engine *engine;
  uint32_t vocab;
  unsigned failures;
} golden;

/* A sequence fed so far. */
typedef struct feed {
  int32_t slot;
  const int32_t *id;
  uint32_t count, pos;
} feed;

static void die(const mm_err *err) {
  fprintf(stderr, "golden: %s\n", err->text);
  exit(1);
}

static void report(golden *g, const char *what, double found, double limit) {
  bool ok = found <= limit;
  printf("%-44s %10.3g <= %-8.3g %s\n", what, found, limit, ok ? "ok" : "FAILED");
  g->failures += !ok;
}

static const void *tensor(const golden *g, const char *kind, const char *which, uint64_t *rows) {
  char name[64];
  snprintf(name, sizeof name, "%s.%s", kind, which);
  const mm_st_tensor *t = mm_st_find(&g->st, name);
  if (!t) {
    fprintf(stderr, "golden: no tensor %s\n", name);
    exit(1);
  }
  *rows = t->shape.dim[0];
  return g->map.data + t->offset;
}

/* One step that feeds `count` more tokens of each sequence; logits of all rows. */
static void step(golden *g, feed *seq, uint32_t sequences, const uint32_t *count, float *logits) {
  int32_t id[LONGEST] = {0};
  uint32_t out[LONGEST], rows = 0;
  mm_span span[8];
  for (uint32_t i = 0; i < sequences; i++) {
    span[i] = (mm_span){seq[i].slot, rows, count[i], seq[i].pos};
    for (uint32_t t = 0; t < count[i]; t++, rows++) {
      id[rows] = seq[i].id ? seq[i].id[seq[i].pos + t] : 0;
      out[rows] = rows;
    }
    if (seq[i].slot >= 0) seq[i].pos += count[i];
  }
  mm_batch b = {rows, id, sequences, span, rows, out, NULL, NULL};
  mm_err err = {0};
  if (!mm_engine_step(g->engine, &b, logits, &err)) die(&err);
}

/* The longest prompt, of CHUNKED + 40 tokens or more. */
static const int32_t *longest(const golden *g, uint64_t *n) {
  const mm_st_tensor *most = NULL;
  for (size_t i = 0; i < g->st.count; i++)
    if (strncmp(g->st.tensor[i].name, "ids.", 4) == 0 && (!most || g->st.tensor[i].shape.dim[0] > most->shape.dim[0]))
      most = &g->st.tensor[i];
  if (!most || most->shape.dim[0] < CHUNKED + 40) exit(1);
  return tensor(g, "ids", most->name + 4, n);
}

static float *run(golden *g, const int32_t *id, uint32_t n, uint32_t chunk) {
  float *logits = calloc((size_t)n * g->vocab, sizeof *logits);
  feed seq = {0, id, n, 0};
  while (logits && seq.pos < n) {
    const bool middle = chunk == 1 && seq.pos == FIRST_ONES;
    uint32_t m = (uint32_t)mm_min(middle ? LAST_ONES - FIRST_ONES : chunk, n - seq.pos);
    step(g, &seq, 1, &m, logits + (size_t)seq.pos * g->vocab);
  }
  return logits;
}

static double max_diff(const float *a, const float *b, size_t n) {
  double most = 0;
  for (size_t i = 0; i < n; i++) {
    double d = fabs((double)a[i] - b[i]);
    if (!(d <= most)) most = isnan(d) ? INFINITY : d;
  }
  return most;
}

static int32_t argmax(const float *x, uint32_t n) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return (int32_t)best;
}

/* Rows of `count` ids in any order, -1 for none, against what the ranks chose for the last positions of a prompt of n tokens; how many
 * differ. */
static double blocks_differ(const golden *g, const mm_st_tensor *t, uint64_t n) {
  const mm_model *m = mm_engine_model(g->engine);
  const int32_t *expected = (const int32_t *)(const void *)(g->map.data + t->offset);
  const uint64_t kept = t->shape.dim[2], count = t->shape.dim[3];
  const uint32_t tp = mm_pack_attn_tp(&g->shards.pack), each = (uint32_t)mm_max(1, m->kv_heads / tp);
  double differ = 0;
  for (uint32_t l = 0, i = 0; l < m->layers; l++) {
    if (m->attn[l] != MM_ATTN_SPARSE) continue;
    for (uint32_t r = 0; r < tp; r++)
      for (uint32_t h = 0; h < each; h++)
        for (uint64_t p = 0; p < kept; p++) {
          const uint32_t *found = g_block[block_place(r, l, h)][n - kept + p];
          const int32_t *row = expected + ((i * m->kv_heads + r * m->kv_heads / tp + h) * kept + p) * count;
          uint32_t same = 0, wanted = 0, chosen = 0;
          for (uint32_t a = 0; a < CHOSEN; a++) chosen += found[a] != UINT32_MAX;
          for (uint64_t e = 0; e < count; e++) {
            wanted += row[e] >= 0;
            for (uint32_t a = 0; a < CHOSEN; a++) same += row[e] >= 0 && found[a] == (uint32_t)row[e];
          }
          differ += same != wanted || chosen != wanted;
        }
    i++;
  }
  return differ;
}

static void check_prompts(golden *g) {
  double most = 0, wrong = 0, blocks = 0;
  bool sparse = false;
  for (size_t i = 0; i < g->st.count; i++) {
    if (strncmp(g->st.tensor[i].name, "ids.", 4) != 0) continue;
    const char *which = g->st.tensor[i].name + 4;
    uint64_t n, kept, m;
    const int32_t *id = tensor(g, "ids", which, &n), *best = tensor(g, "argmax", which, &m);
    const float *expected = tensor(g, "logits", which, &kept);
    float *found = run(g, id, (uint32_t)n, (uint32_t)n);
    most = fmax(most, max_diff(found + (n - kept) * g->vocab, expected, kept * g->vocab));
    for (uint64_t t = 0; t < m; t++) wrong += argmax(found + t * g->vocab, g->vocab) != best[t];
    free(found);
    char name[64];
    snprintf(name, sizeof name, "blocks.%s", which);
    const mm_st_tensor *chosen = mm_st_find(&g->st, name);
    if (chosen) blocks += blocks_differ(g, chosen, n), sparse = true;
  }
  report(g, "logits, largest difference", most, LOGIT_LIMIT);
  report(g, "argmax, positions that differ", wrong, 0);
  if (sparse) report(g, "sets of blocks that differ", blocks, 0);
}

static void check_greedy(golden *g) {
  uint64_t n, m;
  const int32_t *prompt = tensor(g, "greedy", "prompt", &n), *expected = tensor(g, "greedy", "out", &m);
  float *logits = run(g, prompt, (uint32_t)n, (uint32_t)n);
  int32_t next = argmax(logits + (n - 1) * g->vocab, g->vocab);
  double wrong = 0;
  for (uint64_t i = 0; i < m; i++) {
    wrong += next != expected[i];
    mm_span span = {0, 0, 1, (uint32_t)(n + i)};
    uint32_t out = 0;
    mm_batch b = {1, &next, 1, &span, 1, &out, NULL, NULL};
    mm_err err = {0};
    if (!mm_engine_step(g->engine, &b, logits, &err)) die(&err);
    next = argmax(logits, g->vocab);
  }
  free(logits);
  report(g, "greedy text, tokens that differ", wrong, 0);
}

static void check_chunks(golden *g, const int32_t *id, const float *whole) {
  static const uint32_t chunk[] = {1, 7, 64, 255, 256, 257};
  for (size_t i = 0; i < sizeof chunk / sizeof *chunk; i++) {
    float *parts = run(g, id, CHUNKED, chunk[i]);
    char what[64];
    snprintf(what, sizeof what, "prompt in chunks of %u", chunk[i]);
    report(g, what, max_diff(parts, whole, (size_t)CHUNKED * g->vocab), SELF_LIMIT);
    free(parts);
  }
}

/* Sequences side by side, at different lengths, with padding rows, in slots used before: exactly what each gives alone. */
static void check_batches(golden *g, const int32_t *id, const float *whole) {
  float *logits = calloc((size_t)LONGEST * g->vocab, sizeof *logits);
  uint64_t n;
  const int32_t *other = tensor(g, "ids", "64", &n);
  float *other_alone = run(g, other, 64, 64);
  static const struct {
    int32_t slot[2];
    uint32_t count[3];
  } round[] = {{{0, 1}, {64, 3, 300}}, {{1, 0}, {64, 5, 17}}, {{2, 1}, {64, 1, 256}}};
  double differ = 0;
  for (size_t i = 0; i < sizeof round / sizeof *round; i++) {
    feed seq[] = {{round[i].slot[0], other, 64, 0}, {-1, NULL, 0, 99}, {round[i].slot[1], id, LONGEST, 0}};
    const uint32_t *count = round[i].count;
    float *alone = run(g, id, count[2], count[2]); /* passes through slot 0 */
    step(g, seq, 3, count, logits);
    differ += memcmp(logits, other_alone, (size_t)64 * g->vocab * sizeof *logits) != 0;
    differ += memcmp(logits + (size_t)(64 + count[1]) * g->vocab, alone, (size_t)count[2] * g->vocab * sizeof *logits) != 0;
    free(alone);
    feed more[] = {seq[2], {-1, NULL, 0, 7}}; /* then on alone, padding behind */
    step(g, more, 2, (const uint32_t[]){40, 2}, logits);
    double d = max_diff(logits, whole + (size_t)count[2] * g->vocab, (size_t)40 * g->vocab);
    report(g, "after a shared batch, alone", d, SELF_LIMIT);
  }
  report(g, "sequences that a shared batch changes", differ, 0);
  free(other_alone);
  free(logits);
}

static void open_all(golden *g, const char *dir, const char *file) {
  mm_err err = {0};
  mm_file f = MM_FILE_NONE;
  if (!mm_st_open(&g->st, file, MM_BAD_INPUT, &err) || !mm_file_open(&f, file, &err) || !mm_map_open(&g->map, &f, file, &err)) die(&err);
  mm_file_close(&f);
  if (!mm_shards_open(&g->shards, dir, &err)) die(&err);
  unsigned threads = (unsigned)mm_max(1, mm_pool_cpus() / g->shards.pack.tp);
  g_block = malloc(g->shards.pack.tp * MM_MAX_LAYERS * KV_HEADS * sizeof *g_block); /* touched where layers are sparse */
  if (!g_block || g->shards.pack.model.index_top_k > CHOSEN) exit(1);
  static mm_ops ops;
  ops = mm_ops_cpu;
  ops.select = select_and_record;
  mm_engine_config c = {.ops = &ops, .limits = {.max_tokens = LONGEST, .slots = 3, .max_positions = LONGEST}, .options.threads = threads};
  g->engine = mm_engine_open(&g->shards, &c, &err);
  if (!g->engine) die(&err);
  g->vocab = mm_engine_model(g->engine)->vocab;
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: golden DIR GOLDEN.safetensors\n");
    return 2;
  }
  golden g = {0};
  open_all(&g, argv[1], argv[2]);
  printf("%s, tp %u\n", g.shards.pack.model.architecture, g.shards.pack.tp);
  check_prompts(&g);
  check_greedy(&g);
  uint64_t n;
  const int32_t *id = longest(&g, &n);
  float *whole = run(&g, id, (uint32_t)n, (uint32_t)n);
  check_chunks(&g, id, whole);
  check_batches(&g, id, whole);
  free(whole);
  mm_engine_close(g.engine);
  free(g_block);
  mm_shards_close(&g.shards);
  mm_map_close(&g.map);
  mm_st_close(&g.st);
  return g.failures != 0;
}
