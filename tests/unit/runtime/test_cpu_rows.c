/* Products of packed rows (cpu_rows.h): every scheme on every grid that the loops know, at every level, against doubles over what unpack
 * gives; the same bits at each level, in any company of tokens and rows; codes that are no number. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_codes.h"
#include "tests/unit/unit.h"

enum { ROWS = 20, TOKENS = MM_CPU_MANY_TOKENS + 13, MOST_K = 700, LEAD = 2 };

static uint32_t seed = 7;
static uint32_t draw(void) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
static uint32_t any(uint32_t below) { return draw() % below; }

/* How inputs are given. */
typedef enum way { AS_F32, AS_PAIRS, SCALED, WAYS } way;

typedef struct sample {
  mm_packed w;
  uint8_t *plane[MM_MAX_PLANES];
  float *x[TOKENS], *ready[TOKENS];
} sample;

static void fill(uint8_t *p, mm_dtype t, size_t n, bool scale) {
  for (size_t i = 0; i < n; i++) {
    const float v = ((float)any(2000) - 1000) / 700;
    const uint16_t half = t == MM_F16 ? mm_f32_to_f16(v) : mm_f32_to_bf16(scale ? fabsf(v) + 0.01f : v);
    const float single = scale ? fabsf(v) + 0.01f : v;
    switch (t) {
      case MM_F32: memcpy(p + 4 * i, &single, 4); break;
      case MM_F16:
      case MM_BF16: memcpy(p + 2 * i, &half, 2); break;
      case MM_F8_E4M3: p[i] = scale ? (uint8_t)(1 + any(0x7e)) : (uint8_t)(any(0x7f) | any(2) << 7); break;
      default: p[i] = scale ? (uint8_t)(100 + any(40)) : (uint8_t)any(256); break;
    }
  }
}

/* k is a whole number of bytes of codes or not; cells along k are divided by `finer`. */
static sample make(const mm_scheme *s, uint32_t k, uint32_t finer) {
  sample a = {.w = {.scheme = s, .lead = LEAD, .n = ROWS, .k = k}};
  for (unsigned i = 0; i < s->plane_count; i++) {
    a.w.cell[i] = s->plane[i].cell;
    if (i && a.w.cell[i].k) a.w.cell[i].k /= finer;
    const size_t n = LEAD * mm_plane_elements(ROWS, k, a.w.cell[i]);
    a.w.plane[i] = a.plane[i] = malloc(n * mm_dtype_size(s->plane[i].dtype)); /* not a byte more: the sanitizer sees reads past it */
    fill(a.plane[i], s->plane[i].dtype, n, i > 0);
  }
  for (uint32_t t = 0; t < TOKENS; t++) {
    a.x[t] = malloc(k * sizeof(float)), a.ready[t] = malloc(MM_CPU_INPUT(mm_cpu_padded(k)) * sizeof(float));
    for (uint32_t i = 0; i < k; i++) a.x[t][i] = ((float)any(20001) - 10000) / 7777;
  }
  return a;
}
static void drop(sample *a) {
  for (unsigned i = 0; i < a->w.scheme->plane_count; i++) free(a->plane[i]);
  for (uint32_t t = 0; t < TOKENS; t++) free(a->x[t]), free(a->ready[t]);
}

/* The factor of the inputs of a chunk in the third way. */
static double of_chunk(uint32_t t, uint32_t c) { return 0.5 + 0.37 * t + 0.11 * c; }

static const float *const *ready(const sample *a, const mm_cpu_view *v) {
  for (uint32_t t = 0; t < TOKENS; t++) {
    mm_cpu_turn(a->ready[t], a->x[t], a->w.k, v->kind);
    if (v->pairs) mm_cpu_pair(a->ready[t], a->w.k);
    float *const scale = v->kind == MM_KIND_E4M3_GROUPS ? (float *)(uintptr_t)mm_cpu_scales(a->ready[t], a->w.k) : NULL;
    for (uint32_t c = 0; scale && c * MM_CHUNK < a->w.k; c++) scale[c] = (float)of_chunk(t, c);
  }
  return (const float *const *)a->ready;
}

static float sums[MM_CPU_SUMS(ROWS)];

/* To the nearest of eight bits of mantissa, by arithmetic of doubles. */
static double nearest_bf16(double x) {
  int e;
  const double m = frexp(x, &e);
  return ldexp(nearbyint(ldexp(m, 8)), e - 8);
}

static void check_near(const sample *a, const float *y, way with) {
  static float w[ROWS][MOST_K];
  mm_unpack(&a->w, 1, 0, ROWS, &w[0][0]);
  const float *row = &w[0][0];
  for (uint32_t r = 0; r < ROWS; r++, row += a->w.k)
    for (uint32_t t = 0; t < TOKENS; t++) {
      double sum = 0, size = 0;
      for (uint32_t i = 0; i < a->w.k; i++) {
        const double own = with == AS_F32 ? (double)a->x[t][i] : nearest_bf16(a->x[t][i]);
        const double x = with == SCALED ? own * (double)(float)of_chunk(t, i / MM_CHUNK) : own;
        sum += (double)row[i] * x, size += fabs((double)row[i] * x);
      }
      if (!(fabs(sum - y[t * ROWS + r]) <= 1e-6 * size))
        fail_msg("%s, k %u, cell %u: row %u, token %u: %.9g, expected %.9g", a->w.scheme->name, a->w.k, a->w.cell[1].k, r, t,
                 (double)y[t * ROWS + r], sum);
    }
}

static bool check_one(const mm_scheme *s, uint32_t k, uint32_t finer, way with) {
  sample a = make(s, k, finer);
  mm_cpu_view v;
  const bool known = mm_cpu_view_of(&v, &a.w, 1);
  if (with == AS_PAIRS && (v.kind == MM_KIND_F32 || v.kind == MM_KIND_F16)) with = AS_F32;
  if (with == SCALED && v.kind != MM_KIND_E4M3) with = AS_F32;
  if (with == SCALED) v.kind = MM_KIND_E4M3_GROUPS;
  v.pairs = with != AS_F32;
  static float y[TOKENS * ROWS], other[TOKENS * ROWS];
  for (mm_cpu level = MM_CPU_PLAIN; known && level <= mm_cpu_best(); level++) {
    const float *const *x = ready(&a, &v);
    mm_cpu_limit(level);
    mm_cpu_rows(&v, 0, ROWS, x, TOKENS, level ? other : y, ROWS, sums);
    if (level == MM_CPU_PLAIN) check_near(&a, y, with);
    if (level && memcmp(y, other, sizeof y) != 0)
      fail_msg("%s, k %u, cell %u, way %d: level %d has other bits", s->name, k, v.cell, (int)with, (int)level);
    for (int i = 0; i < 6; i++) { /* some rows, some tokens */
      const uint32_t first = any(ROWS), rows = 1 + any(ROWS - first), t = any(TOKENS), tokens = 1 + any(TOKENS - t);
      mm_cpu_rows(&v, first, rows, x + t, tokens, other, rows, sums);
      for (uint32_t j = 0; j < tokens * rows; j++) assert_memory_equal(&other[j], &y[(t + j / rows) * ROWS + first + j % rows], sizeof *y);
    }
  }
  drop(&a);
  return known;
}

TEST(every_scheme) {
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    unsigned known = 0;
    for (int j = 0; j < 12; j++) known += check_one(s, j < 6 ? 128u << j / 3 : 1 + any(MOST_K), 1, (way)(j % 3));
    assert_int_equal(known, mm_has_zeros(s) ? 0 : 12); /* the scheme's own grid; rows with zero points are unpacked first */
    for (uint32_t finer = 2; finer <= 8; finer *= 2)
      for (int with = 0; with < WAYS; with++) (void)check_one(s, 64 + any(MOST_K - 64), finer, (way)with);
  }
  mm_cpu_limit(MM_CPU_BEST);
}

/* BF16 of every kind of number: halves of the last place, what is too small, too large, or none. */
TEST(rounds_to_bf16) {
  for (int i = 0; i < ROUNDS(100000); i++) {
    const uint32_t bits = draw() << 8 ^ draw() ^ (i % 4 ? 0 : 0x8000u);
    const float x = mm_f32_from_bits(i % 4 == 1 ? (bits & 0xffff0000) | 0x8000 : bits), y = mm_cpu_bf16(x);
    const double z = nearest_bf16(x);
    if (isnan(x)) {
      assert_true(isnan(y));
    } else {
      const double expected = fabsf(x) < 0x1p-126f ? 0 : fabs(z) > FLT_MAX ? INFINITY : fabs(z);
      assert_true((double)fabsf(y) == expected && signbit(y) == signbit(x));
    }
    assert_int_equal(mm_f32_bits(y) & 0xffff, 0);
  }
}

/* Integers under INT8 codes: their sums are exact, and so are the levels' bits; the largest codes too. */
TEST(integers) {
  static float y[TOKENS * ROWS], other[TOKENS * ROWS];
  for (int i = 0; i < 12; i++) {
    sample a = make(mm_scheme_find("int8"), i < 2 ? 128u << i : 1 + any(MOST_K), 1);
    mm_cpu_view v;
    assert_true(mm_cpu_view_of(&v, &a.w, 1));
    v.kind = MM_KIND_INT8_CODES;
    for (uint32_t j = 0; i == 3 && j < LEAD * ROWS * a.w.k; j++) a.plane[0][j] = any(2) ? 0x81 : 0x7f;
    for (uint32_t t = 0; t < TOKENS; t++)
      for (uint32_t j = 0; j < a.w.k; j++) a.x[t][j] = i == 3 ? (any(2) ? -127.0f : 127.0f) : (float)any(255) - 127;
    (void)ready(&a, &v);
    for (uint32_t t = 0; t < TOKENS; t++) assert_true(mm_cpu_integers(a.ready[t], a.w.k));
    for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
      const float *const *x = (const float *const *)a.ready;
      mm_cpu_limit(level);
      mm_cpu_rows(&v, 0, ROWS, x, TOKENS, level ? other : y, ROWS, sums);
      if (level == MM_CPU_PLAIN) check_near(&a, y, AS_F32);
      if (level && memcmp(y, other, sizeof y) != 0) fail_msg("k %u: level %d has other bits", a.w.k, (int)level);
      for (uint32_t t = 0; t < TOKENS; t++) {
        mm_cpu_rows(&v, 0, ROWS, x + t, 1, other, ROWS, sums);
        assert_memory_equal(other, y + t * ROWS, ROWS * sizeof *y);
      }
    }
    static const float none[] = {NAN, INFINITY, -INFINITY, 127.5f, -128, 0.25f, 3e9f};
    for (size_t j = 0; j < sizeof none / sizeof *none; j++) {
      a.ready[3][a.w.k / 2] = none[j];
      assert_false(mm_cpu_integers(a.ready[3], a.w.k));
    }
    drop(&a);
  }
  mm_cpu_limit(MM_CPU_BEST);
}

/* A number of the codes that inputs are rounded to. */
static float some_code(mm_code c) {
  static const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return c == MM_CODE_INT8 ? (float)any(255) - 127 : e2m1[any(8)] * (any(2) ? 1.0f : -1.0f);
}

enum { BEFORE = 48, MOST_GROUPS = (BEFORE + MOST_K) / 16 + 1 }; /* columns of the rank before; groups of a row */

/* y against doubles; x: codes, scale: of groups from BEFORE columns ahead on. */
static void check_codes(const sample *a, const float *y, float scale[TOKENS][MOST_GROUPS], uint32_t group) {
  static float w[ROWS][MOST_K];
  mm_unpack(&a->w, 1, 0, ROWS, &w[0][0]);
  for (uint32_t j = 0; j < ROWS * TOKENS; j++) {
    const uint32_t t = j / ROWS, r = j % ROWS;
    const float *row = &w[0][0] + (size_t)r * a->w.k;
    double sum = 0, size = 0;
    for (uint32_t i = 0; i < a->w.k; i++) {
      const double one = a->x[t][i] == 0 ? 0 : (double)row[i] * a->x[t][i] * (group ? (double)scale[t][(BEFORE + i) / group] : 1);
      sum += one, size += fabs(one);
    }
    if (!(fabs(sum - y[j]) <= 1e-6 * size))
      fail_msg("%s, k %u: row %u, token %u: %.9g, expected %.9g", a->w.scheme->name, a->w.k, r, t, (double)y[j], sum);
  }
}

/* Nibbles under inputs in codes: every level against doubles, with the same bits, in any company; groups cut by ranks; the largest codes.
 */
TEST(small_integers) {
  static const struct {
    const char *scheme;
    mm_code inputs;
    uint32_t group;
  } ways[] = {{"nvfp4", MM_CODE_E2M1, 16}, {"mxfp4", MM_CODE_E2M1, 32}, {"w4a8", MM_CODE_INT8, 0}};
  static float y[TOKENS * ROWS], other[TOKENS * ROWS], scale[TOKENS][MOST_GROUPS];
  for (int i = 0; i < 24; i++) {
    const uint32_t group = ways[i % 3].group;
    sample a = make(mm_scheme_find(ways[i % 3].scheme), i < 9 ? 128u << i / 3 : 1 + any(MOST_K), i % 2 && i % 3 == 1 ? 2 : 1);
    mm_cpu_view v;
    assert_true(mm_cpu_view_of(&v, &a.w, 1));
    v.kind = mm_cpu_codes_kind(&v, ways[i % 3].inputs);
    assert_true(v.kind != MM_KINDS);
    const size_t codes = LEAD * mm_plane_elements(ROWS, a.w.k, a.w.cell[0]);
    for (size_t j = 0; i >= 21 && j < codes; j++) a.plane[0][j] = ways[i % 3].inputs == MM_CODE_INT8 ? 0x88 : 0x7f;
    const uint32_t scales = group ? (BEFORE + any(a.w.k)) / group : 0; /* padding behind them */
    for (uint32_t t = 0; t < TOKENS; t++) {
      for (uint32_t j = 0; j < a.w.k; j++)
        a.x[t][j] = group && (BEFORE + j) / group >= scales ? 0 : i < 21 ? some_code(ways[i % 3].inputs) : group ? -6 : any(2) ? 127 : -127;
      for (uint32_t g = 0; g < MOST_GROUPS; g++) scale[t][g] = g < scales ? ldexpf((float)(8 + any(8)), (int)any(9) - 6) : INFINITY;
      assert_true(mm_cpu_codes((mm_cpu_span *)(void *)a.ready[t], a.x[t], a.w.k, v.kind, scale[t], scales, group, group ? BEFORE : 0));
    }
    const float *const *x = (const float *const *)a.ready;
    for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
      mm_cpu_limit(level);
      mm_cpu_rows(&v, 0, ROWS, x, TOKENS, level ? other : y, ROWS, sums);
      if (level == MM_CPU_PLAIN) check_codes(&a, y, scale, group);
      if (level && memcmp(y, other, sizeof y) != 0) fail_msg("%s, k %u: level %d has other bits", a.w.scheme->name, a.w.k, (int)level);
      for (int j = 0; j < 6; j++) { /* some rows, some tokens */
        const uint32_t first = any(ROWS), rows = 1 + any(ROWS - first), t = any(TOKENS), tokens = j < 2 ? 1 : 1 + any(TOKENS - t);
        mm_cpu_rows(&v, first, rows, x + t, tokens, other, rows, sums);
        for (uint32_t c = 0; c < tokens * rows; c++)
          assert_memory_equal(&other[c], &y[(t + c / rows) * ROWS + first + c % rows], sizeof *y);
      }
    }
    a.x[3][a.w.k / 2] = NAN;
    assert_false(mm_cpu_codes((mm_cpu_span *)(void *)a.ready[3], a.x[3], a.w.k, v.kind, scale[3], scales, group, group ? BEFORE : 0));
    for (mm_cpu level = MM_CPU_PLAIN; group && level <= mm_cpu_best(); level++) {
      mm_cpu_limit(level);
      mm_cpu_rows(&v, 0, ROWS, x, 5, other, ROWS, sums);
      for (uint32_t j = 0; j < 5 * ROWS; j++) assert_int_equal(isnan(other[j]) != 0, j / ROWS == 3);
    }
    drop(&a);
  }
  mm_cpu_limit(MM_CPU_BEST);
}

/* Doubles against y, where an input may be off by 2^-23 of the largest of its sixteen. */
static void check_limbs(const sample *a, const float *y) {
  static float w[ROWS][MOST_K];
  mm_unpack(&a->w, 1, 0, ROWS, &w[0][0]);
  for (uint32_t j = 0; j < ROWS * TOKENS; j++) {
    const float *row = &w[0][0] + (size_t)(j % ROWS) * a->w.k, *x = a->x[j / ROWS];
    double sum = 0, size = 0;
    for (uint32_t i = 0; i < a->w.k; i++) {
      float largest = 0;
      for (uint32_t c = i / MM_LANE * MM_LANE; c < a->w.k && c < i / MM_LANE * MM_LANE + MM_LANE; c++)
        largest = fmaxf(largest, fabsf(x[c]));
      sum += (double)row[i] * x[i], size += fabs((double)row[i]) * (1e-6 * fabs((double)x[i]) + 0x1p-23 * (double)largest);
    }
    if (!(fabs(sum - y[j]) <= size))
      fail_msg("%s, k %u: row %u, token %u: %.9g, expected %.9g", a->w.scheme->name, a->w.k, j % ROWS, j / ROWS, (double)y[j], sum);
  }
}

/* Inputs of f32 under nibbles, as limbs: every level against doubles, with the same bits, in any company; the largest limbs and codes,
 * outliers, and what is no number. */
static bool check_limbs_of(const mm_scheme *s, uint32_t k, uint32_t finer, int what) {
  static float y[TOKENS * ROWS], other[TOKENS * ROWS];
  sample a = make(s, k, finer);
  mm_cpu_view v;
  const mm_cpu_kind kind = mm_cpu_view_of(&v, &a.w, 1) ? mm_cpu_limbs_kind(&v) : MM_KINDS;
  v.kind = kind;
  for (uint32_t t = 0; kind != MM_KINDS && t < TOKENS; t++) {
    for (uint32_t i = 0; i < k; i++) {
      if (what == 1 && any(8) == 0) a.x[t][i] *= ldexpf(1, (int)any(60) - 30);
      if (what == 2) a.x[t][i] = nextafterf(any(9) ? -2 : 2, 0); /* no limb is larger: the next number is 2^23 of half the scale */
    }
    free(a.ready[t]);
    a.ready[t] = malloc(mm_cpu_limbs_floats(k) * sizeof(float));
    mm_cpu_limbs_of((mm_cpu_span *)(void *)a.ready[t], a.x[t], k, kind);
  }
  for (size_t j = 0; what == 2 && kind != MM_KINDS && j < LEAD * mm_plane_elements(ROWS, k, a.w.cell[0]); j++)
    a.plane[0][j] = mm_cpu_kinds[kind].e2m1 ? 0xff : 0x88;
  const float *const *x = (const float *const *)a.ready;
  for (mm_cpu level = MM_CPU_PLAIN; kind != MM_KINDS && level <= mm_cpu_best(); level++) {
    mm_cpu_limit(level);
    mm_cpu_rows(&v, 0, ROWS, x, TOKENS, level ? other : y, ROWS, sums);
    if (level == MM_CPU_PLAIN) (what ? check_limbs(&a, y) : check_near(&a, y, AS_F32));
    if (level && memcmp(y, other, sizeof y) != 0) fail_msg("%s, k %u, cell %u: level %d has other bits", s->name, k, v.cell, (int)level);
    for (int j = 0; j < 6; j++) { /* some rows, some tokens */
      const uint32_t first = any(ROWS), rows = 1 + any(ROWS - first), t = any(TOKENS), tokens = j < 2 ? 1 : 1 + any(TOKENS - t);
      mm_cpu_rows(&v, first, rows, x + t, tokens, other, rows, sums);
      for (uint32_t c = 0; c < tokens * rows; c++) assert_memory_equal(&other[c], &y[(t + c / rows) * ROWS + first + c % rows], sizeof *y);
    }
  }
  if (kind != MM_KINDS) {
    a.x[3][any(k)] = what ? INFINITY : NAN;
    mm_cpu_limit((mm_cpu)any(MM_CPU_BEST + 1));
    mm_cpu_limbs_of((mm_cpu_span *)(void *)a.ready[3], a.x[3], k, kind);
    mm_cpu_rows(&v, 0, ROWS, x, 5, other, ROWS, sums);
    for (uint32_t j = 0; j < 5 * ROWS; j++) assert_int_equal(isnan(other[j]) != 0, j / ROWS == 3);
  }
  drop(&a);
  return kind != MM_KINDS;
}

TEST(limbs) {
  static const char *const names[] = {"nvfp4", "mxfp4", "w4a16", "w4a8"};
  unsigned known = 0;
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (int j = 0; j < 9; j++)
      known += check_limbs_of(mm_scheme_at(i), j < 3 ? 256u << j / 2 : 1 + any(MOST_K), j < 5 ? 1 : 1u << any(4), j % 3);
  assert_true(known >= 9 * sizeof names / sizeof *names);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) assert_true(check_limbs_of(mm_scheme_find(names[i]), MOST_K, 1, 0));
  mm_cpu_limit(MM_CPU_BEST);
}

/* One code that is no number makes its row none for all tokens, and no other. */
TEST(no_number) {
  const char *const names[] = {"block_fp8", "channel_fp8", "mxfp8", "nvfp4"};
  for (size_t i = 0; i < 4; i++)
    for (int both = 0; both <= 2 * MM_CPU_BEST + 1; both++) {
      const mm_cpu level = (mm_cpu)(both / 2);
      sample a = make(mm_scheme_find(names[i]), 300, 1);
      mm_cpu_view v;
      static float y[TOKENS * ROWS];
      const uint32_t row = any(ROWS);
      const uint32_t k = a.w.plane[0] ? a.w.k : 0, scales = (k + 15) / 16;
      const bool of_scale = i == 3; /* its codes are all numbers */
      ((uint8_t *)a.plane[of_scale])[of_scale ? (size_t)(ROWS + row) * scales + any(scales) : (size_t)(ROWS + row) * k + any(k)] =
          any(2) ? 0x7f : 0xff;
      assert_true(mm_cpu_view_of(&v, &a.w, 1));
      v.pairs = both % 2;
      mm_cpu_limit(level);
      mm_cpu_rows(&v, 0, ROWS, ready(&a, &v), TOKENS, y, ROWS, sums);
      for (uint32_t j = 0; j < TOKENS * ROWS; j++) assert_int_equal(isnan(y[j]) != 0, j % ROWS == row);
      drop(&a);
    }
  mm_cpu_limit(MM_CPU_BEST);
}

TEST(dots) {
  static float a[MOST_K], b[MOST_K];
  for (int i = 0; i < ROUNDS(200); i++) {
    const uint32_t n = 1 + any(MOST_K);
    double sum = 0, size = 0;
    for (uint32_t j = 0; j < n; j++) {
      a[j] = ((float)any(2000) - 1000) / 333, b[j] = ((float)any(2000) - 1000) / 777;
      sum += (double)a[j] * b[j], size += fabs((double)a[j] * b[j]);
    }
    mm_cpu_limit(MM_CPU_PLAIN);
    const float plain = mm_cpu_dot(a, b, n);
    assert_true(fabs(plain - sum) <= 1e-6 * size);
    for (mm_cpu level = MM_CPU_AVX2; level <= mm_cpu_best(); level++) {
      mm_cpu_limit(level);
      const float y = mm_cpu_dot(a, b, n);
      assert_memory_equal(&y, &plain, sizeof y);
    }
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
