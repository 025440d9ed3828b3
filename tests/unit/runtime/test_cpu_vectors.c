/* Exponentials, softmaxes and states (cpu_vectors.h) at every level: against doubles, the same bits at each, and what is no number. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_vectors.h"
#include "tests/unit/unit.h"

enum { MOST = 300, MOST_D = 144 };

static uint32_t seed = 11;
static uint32_t draw(void) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
static float near(float size) { return ((float)(draw() % 20001) - 10000) / 10000 * size; }

/* out of each level are equal; the last is left in `got`. */
static void same(const float *first, const float *got, size_t n, mm_cpu level) {
  if (level && memcmp(first, got, n * sizeof *got) != 0) fail_msg("level %d has other bits", (int)level);
}

/* Products with E4M3 codes are those with their numbers, bit for bit; a code that is no number gives none. */
TEST(products_with_codes) {
  static float q[MOST], number[MOST];
  static uint8_t code[MOST];
  for (int round = 0; round < 200; round++) {
    const uint32_t n = 1 + draw() % MOST;
    for (uint32_t i = 0; i < n; i++) {
      code[i] = (uint8_t)draw();
      if ((code[i] & 0x7f) == 0x7f) code[i] ^= 1;
      q[i] = near(2), number[i] = mm_e4m3_value[code[i]];
    }
    const uint32_t none = draw() % n;
    const uint8_t kept = code[none];
    for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
      mm_cpu_limit(level);
      const mm_cpu_vectors *v = mm_cpu_vectors_here();
      if (v->dot_e4m3(q, code, n) * 256 != v->dot(q, number, n)) fail_msg("level %d, %u codes: other bits", (int)level, n);
      code[none] = kept | 0x7f;
      assert_true(isnan(v->dot_e4m3(q, code, n)));
      code[none] = kept;
    }
  }
  mm_cpu_limit(MM_CPU_BEST);
}

TEST(exponentials) {
  static float x[MOST], plain[3][MOST], got[3][MOST], by[MOST], gate[MOST];
  for (int round = 0; round < 200; round++) {
    const size_t n = 1 + draw() % MOST;
    for (size_t i = 0; i < n; i++) x[i] = near(round % 2 ? 3 : 88), by[i] = near(2), gate[i] = near(9);
    for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
      mm_cpu_limit(level);
      const mm_cpu_vectors *v = mm_cpu_vectors_here();
      float(*out)[MOST] = level ? got : plain;
      v->exp(out[0], x, n), v->silu(out[1], x, by, n), v->gate(out[2], x, 0.7f, by, gate, n);
      for (int i = 0; i < 3; i++) same(plain[i], got[i], n, level);
    }
    for (size_t i = 0; i < n; i++) {
      const double e = exp(fmax(-87, fmin(88, x[i]))), silu = (double)x[i] / (1 + exp(-(double)x[i])) * by[i];
      const double gated = (double)x[i] * (double)0.7f * by[i] / (1 + exp(-(double)gate[i]));
      assert_true(fabs(plain[0][i] - e) <= 2.4e-7 * e);
      assert_true(fabs(plain[1][i] - silu) <= 6e-7 * fabs(silu) + 1e-37);
      assert_true(fabs(plain[2][i] - gated) <= 6e-7 * fabs(gated));
    }
  }
}

/* No payload of what is no number makes it one. */
TEST(no_number) {
  for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
    mm_cpu_limit(level);
    const mm_cpu_vectors *v = mm_cpu_vectors_here();
    for (uint32_t payload = 1; payload < 1 << 23; payload = payload * 3 + 1) {
      float x[17], y[17];
      for (int i = 0; i < 17; i++) x[i] = i % 2 ? mm_f32_from_bits(0x7fc00000u | payload) : 1;
      v->exp(y, x, 17);
      for (int i = 0; i < 17; i++) assert_true(isnan(y[i]) == i % 2);
      v->silu(y, x, NULL, 17);
      for (int i = 0; i < 17; i++) assert_true(isnan(y[i]) == i % 2);
    }
    float q[16], k[64 * 16], o[16] = {0};
    for (int i = 0; i < 64 * 16; i++) k[i] = near(1);
    memcpy(q, k, sizeof q);
    k[5 * 16 + 3] = NAN;
    float score[MM_CPU_POSITIONS];
    mm_cpu_query s = {.q = q, .o = o, .score = score, .soft = {-INFINITY, 0}, .n = 64};
    v->attend(&s, 1, k, k, 16);
    assert_true(isnan(s.soft.sum) && isnan(o[0] / s.soft.sum));
  }
}

/* Queries that see one position more each than the one before, in pages of MM_CPU_POSITIONS, each page met by all that see any of it.
 * Positions that nobody sees are NaN. */
enum { QUERIES = 17 };
static float q[QUERIES][MOST_D], k[MOST * MOST_D], v[MOST * MOST_D];
static void attend(mm_cpu_query *query, float (*o)[MOST_D], uint32_t first, uint32_t count, uint32_t seen, uint32_t d) {
  static float score[QUERIES][MM_CPU_POSITIONS];
  for (uint32_t i = 0; i < count; i++) query[i] = (mm_cpu_query){.q = q[first + i], .o = o[i], .score = score[i], .soft = {-INFINITY, 0}};
  memset(o, 0, count * sizeof *o);
  for (uint32_t at = 0; at < seen + first + count - 1; at += MM_CPU_POSITIONS) {
    uint32_t from = count;
    for (uint32_t i = count; i-- > 0 && seen + first + i > at; from = i) {
      const uint32_t n = seen + first + i - at;
      query[i].n = n < MM_CPU_POSITIONS ? n : MM_CPU_POSITIONS;
    }
    mm_cpu_vectors_here()->attend(query + from, count - from, k + (size_t)at * d, v + (size_t)at * d, d);
  }
  for (uint32_t i = 0; i < count; i++)
    for (uint32_t c = 0; c < d; c++) o[i][c] /= query[i].soft.sum;
}

TEST(softmaxes) {
  static float plain[QUERIES][MOST_D], got[QUERIES][MOST_D];
  mm_cpu_query query[QUERIES];
  for (int round = 0; round < 60; round++) {
    const uint32_t d = round % 3 ? 16 * (1 + draw() % 9) : 1 + draw() % MOST_D, count = 1 + draw() % QUERIES;
    const uint32_t seen = 1 + draw() % (MOST - QUERIES), all = seen + count - 1;
    for (uint32_t i = 0; i < count * d; i++) q[i / d][i % d] = near(2);
    for (uint32_t i = 0; i < MOST * d; i++) k[i] = i < all * d ? near(2) : NAN, v[i] = i < all * d ? near(1) : NAN;
    for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
      mm_cpu_limit(level);
      attend(query, level ? got : plain, 0, count, seen, d);
      for (uint32_t i = 0; i < count; i++) same(plain[i], got[i], d, level);
      const uint32_t alone = draw() % count; /* the same in no company */
      attend(query, got, alone, 1, seen, d);
      assert_memory_equal(got[0], plain[alone], d * sizeof **got);
    }
    for (uint32_t i = 0; i < count; i++) {
      double score[MOST], top = -INFINITY, sum = 0;
      for (uint32_t p = 0; p < seen + i; p++) {
        score[p] = 0;
        for (uint32_t c = 0; c < d; c++) score[p] += (double)q[i][c] * k[p * d + c];
        top = fmax(top, score[p]);
      }
      for (uint32_t p = 0; p < seen + i; p++) sum += score[p] = exp(score[p] - top);
      for (uint32_t c = 0; c < d; c++) {
        double want = 0, size = 0;
        for (uint32_t p = 0; p < seen + i; p++) want += score[p] / sum * v[p * d + c], size += score[p] / sum * fabs((double)v[p * d + c]);
        assert_true(fabs(want - plain[i][c]) <= 1e-5 * size);
      }
    }
  }
}

TEST(states) {
  static float x[3][MOST_D], S[MM_CPU_BEST + 1][MOST_D * MOST_D], o[MM_CPU_BEST + 1][MOST_D];
  static double want[MOST_D * MOST_D];
  for (int round = 0; round < 12; round++) {
    const uint32_t d = round % 3 ? 16 * (1 + draw() % 9) : 1 + draw() % MOST_D;
    const float decay = 0.9f;
    memset(S, 0, sizeof S), memset(want, 0, sizeof want);
    for (int t = 0; t < 6; t++) {
      for (uint32_t i = 0; i < 3 * d; i++) x[i / d][i % d] = near(1);
      for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
        mm_cpu_limit(level);
        mm_cpu_vectors_here()->state(S[level], o[level], x[0], x[1], x[2], d, decay);
        same(o[0], o[level], d, level), same(S[0], S[level], (size_t)d * d, level);
      }
      for (uint32_t c = 0; c < d; c++) {
        double sum = 0, size = 0;
        for (uint32_t a = 0; a < d; a++) {
          want[a * d + c] = (double)decay * want[a * d + c] + (double)x[1][a] * x[2][c];
          sum += x[0][a] * want[a * d + c], size += fabs(x[0][a] * want[a * d + c]);
        }
        assert_true(fabs(sum - o[0][c]) <= 2e-6 * size + 1e-6);
      }
    }
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
