/* Products of packed rows on one thread, against what the core and its memory can do: for each scheme, weights a second of one token with
 * the codes in the cache and from memory, and GFLOP/s of many tokens, their
 * inputs as f32 and rounded to BF16. bench_rows [SCHEME…]; figures are of the thread's own time (other
 * load changes it little), the best of several turns. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "runtime/cpu/cpu_codes.h"
#include "tests/bench/read_probe.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { K = 3072, NEAR_ROWS = 64, STRIP = 64, TURNS = 6 };
enum { FAR_BYTES = 384 << 20, LOOPS = 20000000 };

static double own_time(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *capacity(size_t n) {
  void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "bench_rows: no memory for %zu bytes\n", n);
    exit(1);
  }
  madvise(p, n, MADV_HUGEPAGE);
  return p;
}

/* ---- what the core can do ---- */

#ifdef __x86_64__
/* Ten chains that do not wait for one another. */
#define CHAINS(type, zero, step)                                                                                               \
  type a0 = zero, a1 = zero, a2 = zero, a3 = zero, a4 = zero, a5 = zero, a6 = zero, a7 = zero, a8 = zero, a9 = zero;           \
  for (long i = 0; i < LOOPS; i++) {                                                                                           \
    a0 = step(a0), a1 = step(a1), a2 = step(a2), a3 = step(a3), a4 = step(a4), a5 = step(a5), a6 = step(a6);                   \
    a7 = step(a7), a8 = step(a8), a9 = step(a9);                                                                               \
    __asm__ volatile("" : "+v"(a0), "+v"(a1), "+v"(a2), "+v"(a3), "+v"(a4), "+v"(a5), "+v"(a6), "+v"(a7), "+v"(a8), "+v"(a9)); \
  }

__attribute__((target("avx512f"))) static void loop_f32(void) {
  const __m512 x = _mm512_set1_ps(0.5f);
#define STEP(a) _mm512_fmadd_ps(x, x, a)
  CHAINS(__m512, _mm512_setzero_ps(), STEP)
#undef STEP
}
__attribute__((target("avx512f,avx512bw,avx512bf16"))) static void loop_bf16(void) {
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f00);
#define STEP(a) _mm512_dpbf16_ps(a, x, x)
  CHAINS(__m512, _mm512_setzero_ps(), STEP)
#undef STEP
}
__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void loop_int8(void) {
  const __m512i x = _mm512_set1_epi8(3);
#define STEP(a) _mm512_dpbusd_epi32(a, x, x)
  CHAINS(__m512i, _mm512_setzero_si512(), STEP)
#undef STEP
}

/* Multiplications and additions a second, in thousands of millions; 0 where the machine has no such instruction. */
static double ceiling(bool has, void (*loop)(void), int per_step) {
  double best = 0;
  for (int i = 0; has && i < 5; i++) {
    const double begin = own_time();
    loop();
    const double rate = 10.0 * (double)LOOPS * per_step / (own_time() - begin) / 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}

#endif

static volatile uint64_t seen;
static double read_rate(const uint8_t *p, size_t n) {
  double best = 0;
  for (int i = 0; i < TURNS; i++) {
    const double begin = own_time();
    seen = read_all(p, n);
    const double rate = (double)n / (own_time() - begin) / 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}

/* ---- the rows ---- */

static uint64_t seed = 1;
static uint8_t draw(void) { return (uint8_t)((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 40); }

/* Codes that are numbers, scales near one hundredth. */
static void fill(uint8_t *p, mm_dtype t, size_t n, bool scale) {
  const float near = 0.01f;
  for (size_t i = 0; i < n; i++) {
    if (t == MM_F32)
      memcpy(p + 4 * i, &near, 4);
    else if (t == MM_BF16 || t == MM_F16)
      p[2 * i] = draw(), p[2 * i + 1] = 0x3c;
    else
      p[i] = t == MM_F8_E4M3 ? (scale ? 0x20 : draw() & 0xfe) : scale ? 118 : draw();
    if (t == MM_F8_E4M3 && (p[i] & 0x7f) == 0x7e) p[i] = 0;
  }
}

static size_t row_bytes(const mm_scheme *s) { return K / (s->plane[0].cell.k ? s->plane[0].cell.k : 1) * mm_dtype_size(s->plane[0].dtype); }

static mm_packed matrix(const mm_scheme *s, uint32_t n) {
  mm_packed w = {.scheme = s, .lead = 1, .n = n, .k = K};
  for (unsigned i = 0; i < s->plane_count; i++) {
    w.cell[i] = s->plane[i].cell;
    const size_t count = mm_plane_elements(n, K, w.cell[i]);
    uint8_t *plane = capacity(count * mm_dtype_size(s->plane[i].dtype));
    fill(plane, s->plane[i].dtype, count, i > 0);
    w.plane[i] = plane;
  }
  return w;
}
static void drop(const mm_packed *w) {
  for (unsigned i = 0; i < w->scheme->plane_count; i++)
    munmap((void *)(uintptr_t)w->plane[i], mm_plane_elements(w->n, K, w->cell[i]) * mm_dtype_size(w->scheme->plane[i].dtype));
}

/* SINGLE: f32, as limbs where the backend takes them. */
typedef enum form { SINGLE, PAIRS, INTEGERS } form;

/* Multiplications a second over the rows, again and again until there were `rows` of them, with so many tokens; in 10⁹. */
static double rate_of(const mm_packed *w, uint32_t tokens, size_t rows, form in_form) {
  static _Alignas(64) float sums[MM_CPU_SUMS(STRIP)], y[STRIP * MM_CPU_MANY_TOKENS], in[MM_CPU_MANY_TOKENS][MM_CPU_INPUT(K)];
  const float *x[MM_CPU_MANY_TOKENS];
  mm_cpu_view v;
  if (!mm_cpu_view_of(&v, w, 0)) exit(1);
  const mm_cpu_kind limbs = in_form == SINGLE ? mm_cpu_limbs_kind(&v) : MM_KINDS;
  for (uint32_t t = 0; t < tokens; t++) {
    float plain[K];
    for (uint32_t i = 0; i < K; i++) in[t][i] = plain[i] = (float)(i % 17) - 8;
    if (limbs != MM_KINDS) mm_cpu_limbs_of((mm_cpu_span *)(void *)in[t], plain, K, limbs);
    if (in_form == PAIRS) mm_cpu_pair(in[t], K);
    if (in_form == INTEGERS) (void)mm_cpu_integers(in[t], K);
    x[t] = in[t];
  }
  v.pairs = in_form == PAIRS;
  if (limbs != MM_KINDS) v.kind = limbs;
  if (in_form == INTEGERS) v.kind = MM_KIND_INT8_CODES;
  double best = 0;
  for (int turn = 0; turn < TURNS; turn++) {
    const double begin = own_time();
    for (size_t done = 0; done < rows; done += STRIP) mm_cpu_rows(&v, (uint32_t)(done % w->n), STRIP, x, tokens, y, STRIP, sums);
    const double rate = (double)rows * (double)K * tokens / (own_time() - begin) / 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}

static void row(const char *name) {
  const mm_scheme *s = mm_scheme_find(name);
  if (!s) {
    fprintf(stderr, "bench_rows: found scheme %s\n", name);
    exit(2);
  }
  const size_t bytes = row_bytes(s), far_rows = FAR_BYTES / bytes / STRIP * STRIP;
  const mm_packed near = matrix(s, NEAR_ROWS), far = matrix(s, (uint32_t)far_rows);
  const double each = (double)bytes / (double)K, cached = rate_of(&near, 1, 32768, SINGLE), streamed = rate_of(&far, 1, far_rows, SINGLE);
  const double many = 2 * rate_of(&near, MM_CPU_MANY_TOKENS, 2048, SINGLE), paired = 2 * rate_of(&near, MM_CPU_MANY_TOKENS, 2048, PAIRS);
  printf("%-12s %12.1f %12.1f %9.1f %15.0f %10.0f", name, cached, streamed, streamed * each, many, paired);
  if (s->code == MM_CODE_INT8)
    printf("; under INT8 %.1f, %.1f, %.0f", rate_of(&near, 1, 32768, INTEGERS), rate_of(&far, 1, far_rows, INTEGERS),
           2 * rate_of(&near, MM_CPU_MANY_TOKENS, 2048, INTEGERS));
  printf("\n");
  fflush(stdout);
  drop(&near), drop(&far);
}

int main(int argc, char **argv) {
  static const char *const all[] = {"bf16", "block_fp8", "mxfp8", "int8", "w4a16", "nvfp4", "mxfp4"};
  uint8_t *far = capacity(FAR_BYTES + 8192);
  memset(far, 1, FAR_BYTES);
#ifdef __x86_64__
  printf("one core: f32 multiply-add %.0f GFLOP/s, vdpbf16ps %.0f, vpdpbusd %.0f GOP/s; ",
         ceiling(__builtin_cpu_supports("avx512f"), loop_f32, 32), ceiling(__builtin_cpu_supports("avx512bf16"), loop_bf16, 64),
         ceiling(__builtin_cpu_supports("avx512vnni"), loop_int8, 128));
#endif
  printf("memory read %.1f GB/s\n", read_rate(far, FAR_BYTES));
  munmap(far, FAR_BYTES + 8192);
  printf("%-12s %12s %12s %9s %15s %10s\n", "scheme", "cached, G/s", "memory, G/s", "GB/s", "GFLOP/s of 48", "in BF16");
  for (int i = 1; i < argc; i++) row(argv[i]);
  for (size_t i = 0; argc == 1 && i < sizeof all / sizeof *all; i++) row(all[i]);
  return 0;
}
