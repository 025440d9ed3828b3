/* How fast weights are packed and unpacked, against what the same machine copies in the same run.
 *
 *   bench_quant [--rounds N] [--rows N] [--cols K] [--only SCHEME]
 *
 * One core: CPU time of the thread, so that other load on the machine takes no part of it (what it does to shared caches and memory
 * stays). Every round measures memcpy and then each level of SIMD (A B C A B C); figures are medians, ratios are medians of the
 * rounds' ratios. Two cores: wall time, for which the machine must be idle: the load is printed. All rates in GB/s (1e9 bytes) of
 * bf16: read by pack, written by unpack. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/option.h"
#include "formats/system/pool.h"
#include "quant/cpu.h"
#include "quant/numbers.h"
#include "quant/quant.h"

enum { ROUNDS_MAX = 101, LEVELS = MM_CPU_AVX512 + 1, WORKERS = 2 };
static const char *const level_word[LEVELS] = {"plain", "avx2", "avx512"};
static const char *const search_word[] = {[MM_SEARCH_ABSMAX] = "absmax", [MM_SEARCH_MSE] = "mse", [MM_SEARCH_FOUR_SIX] = "four_six"};

/* VBMI changes nothing of what is measured here. */
static mm_cpu level_here(void) { return mm_cpu_level() < MM_CPU_AVX512 ? mm_cpu_level() : MM_CPU_AVX512; }

/* A matrix in memory and room for what comes of it. */
typedef struct field {
  uint32_t n, k;
  uint16_t *w;   /* [n, k] bf16 */
  uint16_t *out; /* [n, k] */
  void *plane[MM_MAX_PLANES];
  float *row; /* [k] */
  float amax;
} field;

static void *need(size_t bytes) {
  void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!p) exit(8);
  memset(p, 1, bytes); /* pages exist before the clock runs */
  return p;
}

static double uniform(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return ((double)(*state >> 11) + 0.5) * 0x1p-53;
}

static field field_open(uint32_t n, uint32_t k) {
  field f = {.n = n, .k = k, .w = need((size_t)n * k * 2), .out = need((size_t)n * k * 2), .row = need(k * sizeof(float))};
  uint64_t state = 7;
  for (size_t i = 0; i < (size_t)n * k; i += 2) { /* Gaussian, two at a time */
    double r = 0.02 * sqrt(-2 * log(uniform(&state))), a = 6.283185307179586 * uniform(&state);
    f.w[i] = mm_f32_to_bf16((float)(r * cos(a)));
    f.w[i + 1] = mm_f32_to_bf16((float)(r * sin(a)));
  }
  for (size_t i = 0; i < (size_t)n * k; i++) f.amax = fmaxf(f.amax, fabsf(mm_bf16_to_f32(f.w[i])));
  for (int i = 0; i < MM_MAX_PLANES; i++) f.plane[i] = need((size_t)n * k * 2);
  return f;
}

static void field_close(field *f) {
  for (int i = 0; i < MM_MAX_PLANES; i++) free(f->plane[i]);
  free(f->w);
  free(f->out);
  free(f->row);
}

/* The timed work: one pass over a field. */
typedef struct work {
  void (*run)(const struct work *, const field *);
  const mm_scheme *scheme;
  mm_search search;
} work;

static void copy(const work *x, const field *f) {
  (void)x;
  memcpy(f->out, f->w, (size_t)f->n * f->k * 2);
}

/* In strips of 128 rows, as the converter calls it. */
static void pack(const work *x, const field *f) {
  const mm_scheme *s = x->scheme;
  for (uint32_t row = 0; row < f->n; row += 128) {
    mm_pack_args a = {
        .bf16 = f->w + (size_t)row * f->k, .n = (uint32_t)mm_min(128, f->n - row), .k = f->k, .amax = f->amax, .search = x->search};
    void *at[MM_MAX_PLANES];
    for (unsigned i = 0; i < s->plane_count; i++)
      at[i] = (char *)f->plane[i] +
              (s->plane[i].cell.n ? mm_plane_elements(row, f->k, s->plane[i].cell) * mm_dtype_size(s->plane[i].dtype) : 0);
    s->pack(&a, at);
  }
}

/* To bf16, a row at a time. */
static void unpack(const work *x, const field *f) {
  mm_packed m = {.scheme = x->scheme, .lead = 1, .n = f->n, .k = f->k};
  for (unsigned i = 0; i < m.scheme->plane_count; i++) {
    m.plane[i] = f->plane[i];
    m.cell[i] = m.scheme->plane[i].cell;
  }
  const mm_scheme *bf16 = mm_scheme_plain(MM_BF16);
  for (uint32_t row = 0; row < f->n; row++) {
    mm_pack_args a = {.w = f->row, .n = 1, .k = f->k};
    void *to[MM_MAX_PLANES] = {f->out + (size_t)row * f->k};
    mm_unpack(&m, 0, row, 1, f->row);
    bf16->pack(&a, to);
  }
}

static double clock_of(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* GB/s of one core over passes of at least 4 ms. */
static double rate(const work *x, const field *f) {
  double start = clock_of(CLOCK_THREAD_CPUTIME_ID), took;
  int passes = 0;
  do {
    x->run(x, f);
    passes++;
    took = clock_of(CLOCK_THREAD_CPUTIME_ID) - start;
  } while (took < 4e-3);
  return (double)f->n * f->k * 2 * passes / took / 1e9;
}

typedef struct team {
  const work *x;
  const field *f; /* one each */
} team;
static bool member(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker;
  (void)err;
  const team *t = ctx;
  t->x->run(t->x, &t->f[item]);
  return true;
}

/* GB/s of `threads` cores together, by the wall. */
static double rate_of_team(const work *x, const field *f, unsigned threads) {
  team t = {x, f};
  mm_err err = {0};
  double start = clock_of(CLOCK_MONOTONIC);
  if (!mm_pool_run(threads, threads, member, &t, &err)) exit((int)err.status);
  return (double)f->n * f->k * 2 * threads / (clock_of(CLOCK_MONOTONIC) - start) / 1e9;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static double median(double *x, size_t n) {
  qsort(x, n, sizeof *x, ascending);
  return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* One row of the table. */
typedef struct figures {
  double level[LEVELS], copied, ratio; /* ratio: best level over memcpy */
} figures;

static figures measure(const work *x, const field *f, size_t rounds) {
  static double at[LEVELS][ROUNDS_MAX], copied[ROUNDS_MAX], ratio[ROUNDS_MAX];
  const work memory = {.run = copy};
  int best = (int)level_here();
  for (size_t r = 0; r < rounds; r++) {
    copied[r] = rate(&memory, f);
    for (int l = 0; l <= best; l++) {
      mm_cpu_limit((mm_cpu)l);
      at[l][r] = rate(x, f);
    }
    ratio[r] = at[best][r] / copied[r];
  }
  figures y = {.copied = median(copied, rounds), .ratio = median(ratio, rounds)};
  for (int l = 0; l <= best; l++) y.level[l] = median(at[l], rounds);
  return y;
}

/* Two cores over one: the best of the rounds of each, since other load can only slow either down. */
static double scaling(const work *x, const field *f, size_t rounds) {
  double one = 0, two = 0;
  for (size_t r = 0; r < rounds; r++) {
    one = fmax(one, rate_of_team(x, f, 1));
    two = fmax(two, rate_of_team(x, f, WORKERS));
  }
  return two / one;
}

/* The goal for one core: a fraction of memcpy's rate, or GB/s; 0: no goal. */
typedef struct goal {
  const char *scheme;
  mm_search search;
  double ratio, rate;
} goal;
static const goal goals[] = {{"block_fp8", MM_SEARCH_ABSMAX, 0.6, 0},
                             {"nvfp4", MM_SEARCH_ABSMAX, 0, 3},
                             {"nvfp4", MM_SEARCH_MSE, 0, 0.5},
                             {"w4a16", MM_SEARCH_MSE, 0, 0.5}};

static const char *goal_text(const work *x, const figures *y, char text[48]) {
  text[0] = 0;
  bool packs = x->run == pack;
  for (size_t i = 0; i < sizeof goals / sizeof *goals; i++) {
    const goal *g = &goals[i];
    if (strcmp(g->scheme, x->scheme->name) != 0 || g->search != x->search || (!packs && g->rate > 0)) continue;
    if (g->rate > 0)
      snprintf(text, 48, "%.1f GB/s: %s", g->rate, y->level[level_here()] >= g->rate ? "met" : "missed");
    else
      snprintf(text, 48, "%.2f x: %s", g->ratio, y->ratio >= g->ratio ? "met" : "missed");
  }
  return text;
}

static void print_row(const work *x, const field *large, const field *small, size_t rounds) {
  char text[48];
  figures dram = measure(x, &large[0], rounds), cache = measure(x, small, rounds);
  int best = (int)level_here();
  printf("%-6s %-15s %-8s", x->run == pack ? "pack" : "unpack", x->scheme->name, x->run == pack ? search_word[x->search] : "");
  for (int l = 0; l < LEVELS; l++) printf(l <= best ? " %7.2f" : "       -", dram.level[l]);
  printf(" %8.2f  %-18s", dram.ratio, goal_text(x, &dram, text));
  for (int l = 0; l < LEVELS; l++) printf(l <= best ? " %7.2f" : "       -", cache.level[l]);
  printf(" %8.2f\n", scaling(x, large, rounds));
  fflush(stdout);
}

static void print_load(const char *when) {
  double load[3] = {0};
  getloadavg(load, 3);
  printf("load %s: %.2f %.2f %.2f on %u CPUs\n", when, load[0], load[1], load[2], mm_pool_cpus());
}

int main(int argc, char **argv) {
  mm_program_start();
  uint64_t rounds = 7, rows = 6144, cols = 6144;
  const char *only = NULL;
  const mm_option options[] = {
      {.name = "rounds", .kind = MM_OPT_U64, .target = &rounds, .arg = "N", .help = "of each measurement (7)", .lo = 1, .hi = ROUNDS_MAX},
      {.name = "rows", .kind = MM_OPT_U64, .target = &rows, .arg = "N", .help = "of the matrix in memory (6144)", .lo = 1, .hi = 1 << 20},
      {.name = "cols", .kind = MM_OPT_U64, .target = &cols, .arg = "K", .help = "of it, even (6144)", .lo = 2, .hi = 1 << 20},
      {.name = "only", .kind = MM_OPT_STR, .target = &only, .arg = "SCHEME", .help = "one scheme"},
  };
  const mm_program program = {.name = "bench_quant",
                              .summary = "rates of packing and unpacking beside memcpy",
                              .operands = "",
                              .options = options,
                              .option_count = sizeof options / sizeof *options};
  mm_err err = {0};
  size_t operands = 0;
  bool done = false;
  if (!mm_options_parse(&program, argc, argv, NULL, &operands, &done, &err)) return mm_program_fail(&program, &err);
  if (done) return 0;
  field large[WORKERS] = {field_open((uint32_t)rows, (uint32_t)cols), field_open((uint32_t)rows, (uint32_t)cols)};
  field small = field_open(128, 512); /* with its codes, inside a core's L2 */
  const work memory = {.run = copy};
  static double copied[ROUNDS_MAX], cached[ROUNDS_MAX];
  for (size_t r = 0; r < rounds; r++) copied[r] = rate(&memory, large), cached[r] = rate(&memory, &small);
  printf("ceilings: memcpy %.2f GB/s of one core from memory (%llu x %llu bf16), %.2f in cache (128 x 512); two cores %.2f x\n",
         median(copied, rounds), (unsigned long long)rows, (unsigned long long)cols, median(cached, rounds),
         scaling(&memory, large, rounds));
  print_load("before");
  printf("\nGB/s of bf16, one core      | from memory %s %s %s, x memcpy, goal | in cache %s %s %s | two cores over one\n", level_word[0],
         level_word[1], level_word[2], level_word[0], level_word[1], level_word[2]);
  for (size_t i = 0; mm_scheme_at(i); i++) {
    work x = {.run = pack, .scheme = mm_scheme_at(i)};
    if (only ? strcmp(only, x.scheme->name) != 0 : x.scheme->code == MM_CODE_PLAIN) continue;
    for (int s = MM_SEARCH_ABSMAX; s <= MM_SEARCH_FOUR_SIX; s++) {
      x.search = (mm_search)s;
      if (s == MM_SEARCH_ABSMAX || x.scheme->searches >> s & 1) print_row(&x, large, &small, rounds);
    }
    x = (work){.run = unpack, .scheme = x.scheme};
    for (int j = 0; j < WORKERS; j++) pack(&x, &large[j]);
    pack(&x, &small);
    print_row(&x, large, &small, rounds);
  }
  print_load("after");
  for (int j = 0; j < WORKERS; j++) field_close(&large[j]);
  field_close(&small);
  return 0;
}
