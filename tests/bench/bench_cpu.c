/* The CPU backend on layers of M2's and M1's real widths: tokens a second of one sequence and of a prompt, for each scheme, against the
 * rate at which all threads together read memory in the same run. The floor is that rate over the bytes of weights that a token needs.
 * bench_cpu [m2|m1] [LAYERS] [EXPERTS] [SCHEME…]; random codes, no checkpoint is read. SCHEME+act rounds the inputs of linears as the
 * scheme says, SCHEME+bf16 to BF16. With "-" after one scheme it obeys lines instead, so that others can be measured in turn
 * (scripts/peers_cpu.py): "read", "token" and "prompt N" answer with bytes or tokens a second, then tokens a second of user time; the first
 * line has the bytes of a token. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "formats/system/pool.h"
#include "runtime/engine/engine.h"
#include "tests/bench/read_probe.h"

enum { VOCAB = 512, PROMPT = 512, MOST = 2048, REPEATS = 7, CONTEXT = 64, LAYERS = 8, STEPS = 8 };

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

static void *capacity(bench *b, size_t n) {
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
    void *plane = capacity(b, count * mm_dtype_size(p->dtype));
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
                  MM_MODEL_NORMS(1e-6)};
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
  const uint8_t *from;
  size_t bytes, pieces;
  uint64_t sum[64];
} reading;
static bool read_piece(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  reading *r = ctx;
  const size_t each = r->bytes / r->pieces;
  r->sum[worker] += read_all(r->from + item * each, each);
  return true;
}
/* Bytes a second that all threads read of the largest block. */
static double read_rate(const bench *b, mm_team *team) {
  mm_err err = {0};
  unsigned big = 0;
  for (unsigned i = 1; i < b->blocks; i++) big = b->bytes[i] > b->bytes[big] ? i : big;
  reading r = {.from = b->block[big], .pieces = 64};
  r.bytes = b->bytes[big] / (256 * r.pieces) * (256 * r.pieces);
  const double begin = mm_now();
  must(mm_team_run(team, r.pieces, read_piece, &r, &err), &err);
  return (double)r.bytes / (mm_now() - begin);
}

/* ---- steps ---- */

typedef struct session {
  bench b;
  mm_backend_config c;
  mm_forward f;
  mm_team *team;
} session;

/* Logits of all tokens are computed, as llama-bench does where it is asked for whole layers (scripts/peers_cpu.py). */
static void step(mm_forward *f, uint32_t tokens, uint32_t pos) {
  static int32_t id[MOST];
  static uint32_t out[MOST];
  static float logits[MOST * VOCAB];
  mm_err err = {0};
  for (uint32_t t = 0; t < tokens; t++) id[t] = (int32_t)(draw() >> 40) % VOCAB, out[t] = t;
  const mm_span span = {0, 0, tokens, pos};
  const mm_batch batch = {.tokens = tokens, .id = id, .span_count = 1, .span = &span, .out_count = tokens, .out = out};
  must(mm_forward_step(f, &batch, logits, &err), &err);
}

static double user_time(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return (double)u.ru_utime.tv_sec + 1e-6 * (double)u.ru_utime.tv_usec;
}

/* Tokens a second: of STEPS single steps after CONTEXT tokens that the slot holds, or of one step with all. */
static double rate_of(session *s, uint32_t prompt) {
  const double begin = mm_now();
  if (prompt) step(&s->f, prompt, 0);
  for (uint32_t t = 0; !prompt && t < STEPS; t++) step(&s->f, 1, CONTEXT + t);
  return (prompt ? prompt : STEPS) / (mm_now() - begin);
}

/* spec: a scheme, "+act" or "+bf16" after it where inputs are rounded. */
static void open_session(session *s, bool m1, uint32_t layers, uint32_t experts, const char *spec) {
  char scheme[32];
  mm_err err = {0};
  const size_t plus = strcspn(spec, "+");
  snprintf(scheme, sizeof scheme, "%.*s", (int)plus, spec);
  if (!mm_scheme_find(scheme)) must(mm_fail(&err, MM_USAGE, "E_SCHEME", mm_at(NULL, NULL), "found scheme %s", scheme), &err);
  build(&s->b, m1, layers, experts, !strcmp(scheme, "bf16") ? "bf16" : "block_fp8", scheme);
  const unsigned threads = mm_pool_cpus();
  s->team = mm_team_open(threads, &err);
  s->c = (mm_backend_config){.model = &s->b.m,
                             .weights = &s->b.w,
                             .limits = {.max_tokens = MOST, .slots = 1, .max_positions = MOST + CONTEXT},
                             .options.threads = threads,
                             .options.act_quant = !strcmp(spec + plus, "+act"),
                             .options.input_bf16 = !strcmp(spec + plus, "+bf16")};
  must(s->team && (s->c.comm = mm_comm_open(1, &err)) && mm_forward_open(&s->f, &mm_ops_cpu, &s->c, &err), &err);
  step(&s->f, CONTEXT, 0);
}

static void close_session(session *s) {
  mm_forward_close(&s->f);
  mm_comm_close(s->c.comm);
  mm_team_close(s->team);
  for (unsigned i = 0; i < s->b.blocks; i++) munmap(s->b.block[i], s->b.bytes[i]);
}

static void run(session *s, const char *spec, uint32_t layers) {
  double token[REPEATS], prompt[3], rate[REPEATS];
  for (int i = 0; i < REPEATS; i++) rate[i] = read_rate(&s->b, s->team), token[i] = rate_of(s, 0);
  for (int i = 0; i < 3; i++) prompt[i] = rate_of(s, PROMPT);
  const double t = median(token, REPEATS), r = median(rate, REPEATS), p = median(prompt, 3), bytes = s->b.per_token;
  printf(
      "%s, %u layers, %-14s %7.1f tok/s, %5.1f MB a token, %5.1f of %5.1f GB/s read (%.2f of the floor's rate); prompt of %d: %6.0f "
      "tok/s\n",
      s->b.m.family == MM_FAMILY_M1 ? "m1" : "m2", layers, spec, t, bytes / 1e6, bytes * t / 1e9, r / 1e9, bytes * t / r, PROMPT, p);
  fflush(stdout);
}

static void obey(session *s) {
  char line[64];
  printf("%.0f\n", s->b.per_token);
  for (fflush(stdout); fgets(line, sizeof line, stdin); fflush(stdout)) {
    const long prompt = strncmp(line, "prompt ", 7) == 0 ? strtol(line + 7, NULL, 10) : 0;
    if (prompt < 0 || prompt > MOST) exit(2);
    const double rate = line[0] == 'r' ? read_rate(&s->b, s->team) : 0, before = user_time();
    const double tokens = line[0] == 'r' ? 0 : rate_of(s, (uint32_t)prompt);
    printf("%.6g %.6g\n", rate + tokens, (prompt ? (double)prompt : (double)STEPS) / (user_time() - before + 1e-9));
  }
}

int main(int argc, char **argv) {
  const bool m1 = argc > 1 && !strcmp(argv[1], "m1");
  const uint32_t layers = argc > 2 ? (uint32_t)atoi(argv[2]) : 3, experts = argc > 3 ? (uint32_t)atoi(argv[3]) : 32;
  static const char *const all[] = {"bf16", "block_fp8", "int8", "w4a16", "nvfp4", "mxfp4"};
  if (layers < 1 || layers > LAYERS) return 2;
  const bool obeys = argc == 6 && !strcmp(argv[5], "-");
  const int given = obeys ? 1 : argc - 4;
  for (int i = 0; i < (given > 0 ? given : (int)(sizeof all / sizeof *all)); i++) {
    static session s;
    const char *spec = given > 0 ? argv[4 + i] : all[i];
    open_session(&s, m1, layers, experts, spec);
    obeys ? obey(&s) : run(&s, spec, layers);
    close_session(&s);
  }
  return 0;
}
