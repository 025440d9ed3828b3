/* The CPU backend on layers of M2's and M1's real widths: tokens a second of one sequence and of a prompt, for each scheme, beside the rate
 * at which all threads together read memory in the same run. The floor is that rate over the bytes of weights that a token needs. bench_cpu
 * [m2|m1] [LAYERS] [EXPERTS] [SCHEME…]; random codes, no checkpoint is read. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "formats/pool.h"
#include "runtime/engine.h"

enum { VOCAB = 2048, PROMPT = 512, REPEATS = 7, CONTEXT = 64, LAYERS = 8 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static int by_value(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}
static double median(double *x, int n) {
  qsort(x, (size_t)n, sizeof *x, by_value);
  return x[n / 2];
}

static void must(bool ok, const mm_err *err) {
  if (ok) return;
  fprintf(stderr, "bench_cpu: %s\n", err->text);
  exit(1);
}

/* ---- weights ---- */

typedef struct bench {
  mm_model m;
  mm_rank_weights w;
  mm_layer_weights layer[LAYERS];
  void *block[256];
  size_t bytes[256];
  unsigned blocks;
  double per_token; /* bytes of weights that one token's step reads */
} bench;

static void *room(bench *b, size_t n) {
  void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || b->blocks == sizeof b->block / sizeof *b->block) {
    fprintf(stderr, "bench_cpu: no memory for %zu bytes of weights\n", n);
    exit(1);
  }
  madvise(p, n, MADV_HUGEPAGE);
  b->block[b->blocks] = p;
  b->bytes[b->blocks++] = n;
  return p;
}

static uint64_t seed = 1;
static uint64_t draw(void) { return seed = seed * 6364136223846793005u + 1442695040888963407u; }

/* Codes at random but for what is no number; scales near one hundredth. */
static void fill(void *plane, mm_dtype t, size_t n, bool scale) {
  uint8_t *p = plane;
  const float near = 0.01f;
  uint32_t bits;
  memcpy(&bits, &near, sizeof bits);
  for (size_t i = 0; i < n; i++) {
    const uint64_t r = draw() >> 32;
    switch (t) {
      case MM_F32: bits = (bits & 0xff800000u) | (uint32_t)(r & 0x7fffff), memcpy(p + 4 * i, &bits, 4); break;
      case MM_BF16: ((uint16_t *)plane)[i] = (uint16_t)(0x3c00 | (r & 0x807f)); break;
      case MM_F8_E4M3: p[i] = scale ? (uint8_t)(0x20 + (r & 15)) : (uint8_t)((r & 0x80) | (r >> 8 & 0x7f) % 0x7f); break;
      case MM_U8: p[i] = scale ? (uint8_t)(118 + (r & 3)) : (uint8_t)r; break;
      default: p[i] = (uint8_t)r; break;
    }
  }
}

static mm_packed matrix(bench *b, const char *scheme, uint32_t lead, uint32_t n, uint32_t k, double share) {
  mm_packed w = {.scheme = mm_scheme_find(scheme), .lead = lead, .n = n, .k = k};
  for (unsigned i = 0; i < w.scheme->plane_count; i++) {
    const mm_plane *p = &w.scheme->plane[i];
    const uint64_t count = lead * mm_plane_elements(n, k, p->cell);
    void *plane = room(b, count * mm_dtype_size(p->dtype));
    fill(plane, p->dtype, count, i > 0);
    w.cell[i] = p->cell, w.plane[i] = plane;
    b->per_token += share * (double)(count * mm_dtype_size(p->dtype));
  }
  return w;
}
static mm_packed vector_of(bench *b, uint32_t n) { return matrix(b, "f32", 1, n, 1, 1); }

static void build(bench *b, bool m1, uint32_t layers, uint32_t experts, const char *dense, const char *scheme) {
  *b = (bench){.blocks = 0};
  mm_model *m = &b->m;
  *m = (mm_model){.family = m1 ? MM_FAMILY_M1 : MM_FAMILY_M2,
                  .router = m1 ? MM_ROUTER_SOFTMAX : MM_ROUTER_SIGMOID_BIAS,
                  .postnorm = m1,
                  .qk_norm = !m1,
                  .hidden = m1 ? 6144 : 3072,
                  .layers = layers,
                  .heads = m1 ? 64 : 48,
                  .kv_heads = 8,
                  .head_dim = 128,
                  .rotary_dim = 64,
                  .experts = experts,
                  .top_k = m1 ? 2 : 8,
                  .intermediate = m1 ? 9216 : 1536,
                  .vocab = VOCAB,
                  .max_positions = 1 << 20,
                  .rope_theta = 5e6,
                  .norm_eps = 1e-6,
                  .lightning_norm_eps = 1e-6,
                  .deepnorm_lightning = {1, 1},
                  .deepnorm_full = {1, 1},
                  .deepnorm_mlp = {1, 1}};
  const uint32_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
  b->w = (mm_rank_weights){.tp = 1, .layer_end = layers, .vocab_rows = VOCAB, .layer = b->layer};
  b->w.embed = matrix(b, "bf16", 1, VOCAB, m->hidden, 0);
  b->w.head = matrix(b, "bf16", 1, VOCAB, m->hidden, 1);
  b->w.final_norm = vector_of(b, m->hidden);
  for (uint32_t l = 0; l < layers; l++) {
    mm_layer_weights *y = &b->layer[l];
    const bool lightning = m1 && l % 8 != 7;
    m->attn[l] = lightning ? MM_ATTN_LIGHTNING : MM_ATTN_FULL;
    y->input_norm = vector_of(b, m->hidden), y->post_norm = vector_of(b, m->hidden);
    y->qkv = matrix(b, dense, 1, lightning ? 3 * q : q + 2 * kv, m->hidden, 1), y->out = matrix(b, dense, 1, m->hidden, q, 1);
    if (lightning) y->output_gate = matrix(b, dense, 1, q, m->hidden, 1), y->attn_norm = vector_of(b, q);
    if (m->qk_norm) y->q_norm = vector_of(b, q), y->k_norm = vector_of(b, kv);
    y->router = matrix(b, "f32", 1, experts, m->hidden, 1);
    if (!m1) y->router_bias = vector_of(b, experts);
    const double share = (double)m->top_k / experts;
    y->w13 = matrix(b, scheme, experts, 2 * m->intermediate, m->hidden, share);
    y->w2 = matrix(b, scheme, experts, m->hidden, m->intermediate, share);
  }
}

/* ---- what memory gives ---- */

typedef struct reading {
  const uint64_t *from;
  size_t words, pieces;
  uint64_t sum[64];
} reading;
static bool read_piece(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  reading *r = ctx;
  uint64_t s[8] = {0};
  const size_t each = r->words / r->pieces;
  for (const uint64_t *p = r->from + item * each, *end = p + each; p < end; p += 8)
    for (int i = 0; i < 8; i++) s[i] += p[i];
  for (int i = 0; i < 8; i++) r->sum[worker] += s[i];
  return true;
}
/* Bytes a second that all threads read of the largest block. */
static double read_rate(const bench *b, mm_team *team) {
  mm_err err = {0};
  unsigned big = 0;
  for (unsigned i = 1; i < b->blocks; i++) big = b->bytes[i] > b->bytes[big] ? i : big;
  reading r = {.from = b->block[big], .words = b->bytes[big] / 8 / 4096 * 4096, .pieces = 512};
  const double begin = now();
  must(mm_team_run(team, r.pieces, read_piece, &r, &err), &err);
  return (double)(r.words * 8) / (now() - begin);
}

/* ---- steps ---- */

static void step(mm_forward *f, uint32_t tokens, uint32_t pos) {
  static int32_t id[PROMPT];
  static float logits[VOCAB];
  mm_err err = {0};
  for (uint32_t t = 0; t < tokens; t++) id[t] = (int32_t)(draw() >> 40) % VOCAB;
  const mm_span span = {0, 0, tokens, pos};
  const uint32_t out = tokens - 1;
  const mm_batch batch = {.tokens = tokens, .id = id, .span_count = 1, .span = &span, .out_count = 1, .out = &out};
  must(mm_forward_step(f, &batch, logits, &err), &err);
}

static void run(bool m1, uint32_t layers, uint32_t experts, const char *dense, const char *scheme) {
  static bench b;
  mm_err err = {0};
  build(&b, m1, layers, experts, dense, scheme);
  const unsigned threads = mm_pool_cpus();
  mm_team *team = mm_team_open(threads, &err);
  mm_forward f;
  mm_backend_config c = {
      .model = &b.m, .weights = &b.w, .limits = {.max_tokens = PROMPT, .slots = 1, .max_positions = PROMPT + CONTEXT}, .threads = threads};
  must(team && (c.comm = mm_comm_open(1, &err)) && mm_forward_open(&f, &mm_ops_cpu, &c, &err), &err);
  double token[REPEATS], prompt[3], rate[REPEATS];
  step(&f, CONTEXT, 0);
  for (int i = 0; i < REPEATS; i++) {
    rate[i] = read_rate(&b, team);
    const double begin = now();
    for (uint32_t t = 0; t < 4; t++) step(&f, 1, CONTEXT + 4 * (uint32_t)i + t);
    token[i] = (now() - begin) / 4;
  }
  for (int i = 0; i < 3; i++) {
    const double begin = now();
    step(&f, PROMPT, 0);
    prompt[i] = now() - begin;
  }
  const double t = median(token, REPEATS), r = median(rate, REPEATS), p = median(prompt, 3);
  printf(
      "%s, %u layers, %s, experts %-10s %7.1f tok/s, %5.1f MB a token, %5.1f of %5.1f GB/s read (%.2f of the floor's rate); prompt of %d: "
      "%6.0f tok/s\n",
      m1 ? "m1" : "m2", layers, dense, scheme, 1 / t, b.per_token / 1e6, b.per_token / t / 1e9, r / 1e9, b.per_token / t / r, PROMPT,
      PROMPT / p);
  fflush(stdout);
  mm_forward_close(&f);
  mm_comm_close(c.comm);
  mm_team_close(team);
  for (unsigned i = 0; i < b.blocks; i++) munmap(b.block[i], b.bytes[i]);
}

int main(int argc, char **argv) {
  const bool m1 = argc > 1 && !strcmp(argv[1], "m1");
  const uint32_t layers = argc > 2 ? (uint32_t)atoi(argv[2]) : 3, experts = argc > 3 ? (uint32_t)atoi(argv[3]) : 32;
  static const char *const all[] = {"bf16", "block_fp8", "int8", "w4a16", "nvfp4", "mxfp4"};
  if (layers < 1 || layers > LAYERS) return 2;
  for (int i = 4; i < argc; i++) run(m1, layers, experts, !strcmp(argv[i], "bf16") ? "bf16" : "block_fp8", argv[i]);
  for (unsigned i = 0; argc <= 4 && i < sizeof all / sizeof *all; i++) run(m1, layers, experts, i ? "block_fp8" : "bf16", all[i]);
  return 0;
}
