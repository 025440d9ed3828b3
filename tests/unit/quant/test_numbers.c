/* Number formats against a reference that shares nothing with them: the value of every code from the format's definition in
 * doubles, and rounding by walking the codes in order of value. MM_EXHAUSTIVE=1 tries all 2^32 floats; otherwise a stride and every
 * rounding boundary ±2 places. */
#include <math.h>
#include <stdlib.h>

#include "quant/numbers.h"
#include "tests/unit/unit.h"

/* A binary float format by its definition. */
typedef struct format {
  int exponent_bits, mantissa_bits, bias;
  uint32_t largest;  /* code of the largest finite value */
  uint32_t overflow; /* code of what rounds beyond it */
  uint32_t sign;     /* the sign bit */
  uint32_t (*encode)(float x);
} format;

static double value_of(const format *f, uint32_t code) {
  uint32_t m = code & ((1u << f->mantissa_bits) - 1), e = code >> f->mantissa_bits;
  if (e == 0) return ldexp(m, 1 - f->bias - f->mantissa_bits);
  return ldexp(m + (1u << f->mantissa_bits), (int)e - f->bias - f->mantissa_bits);
}

static uint32_t encode_e4m3(float x) { return mm_f32_to_e4m3(x); }
static uint32_t encode_e2m1(float x) { return mm_f32_to_e2m1(x); }
static uint32_t encode_bf16(float x) { return mm_f32_to_bf16(x); }
static uint32_t encode_f16(float x) { return mm_f32_to_f16(x); }

static const format formats[] = {
    {4, 3, 7, 0x7e, 0x7e, 0x80, encode_e4m3},
    {2, 1, 1, 0x7, 0x7, 0x8, encode_e2m1},
    {8, 7, 127, 0x7f7f, 0x7f80, 0x8000, encode_bf16},
    {5, 10, 15, 0x7bff, 0x7c00, 0x8000, encode_f16},
};
enum { FORMATS = sizeof formats / sizeof *formats };

/* The nearest code to x ≥ 0, ties to even, starting from a code that is not above it. Past the largest value the format goes on
 * as if it had one more, which becomes `overflow`. */
static uint32_t nearest_from(const format *f, double x, uint32_t code) {
  while (code <= f->largest) {
    double middle = (value_of(f, code) + value_of(f, code + 1)) / 2;
    if (x < middle || (x == middle && code % 2 == 0)) return code;
    code++;
  }
  return f->overflow;
}

static void check(const format *f, uint32_t u, uint32_t expected) {
  float x = mm_f32_from_bits(u);
  uint32_t positive = f->encode(x), negative = f->encode(-x);
  if (positive != expected || negative != (expected | f->sign))
    fail_msg("format %d: %08x (%a) gave %x and %x, expected %x", (int)(f - formats), u, (double)x, positive, negative, expected);
}

TEST(test_every_boundary) {
  for (int i = 0; i < FORMATS; i++) {
    const format *f = &formats[i];
    for (uint32_t code = 0; code <= f->largest; code++) {
      double at[] = {value_of(f, code), (value_of(f, code) + value_of(f, code + 1)) / 2};
      for (int j = 0; j < 2; j++)
        for (int place = -2; place <= 2; place++) {
          uint32_t u = mm_f32_bits((float)at[j]) + (uint32_t)place;
          if (u > 0x7f800000) continue; /* below zero or beyond infinity */
          check(f, u, nearest_from(f, mm_f32_from_bits(u), code > 2 ? code - 2 : 0));
        }
    }
    check(f, 0x7f800000, f->overflow);
    check(f, 0x7f7fffff, f->overflow);
  }
}

TEST(test_all_floats) {
  const uint32_t stride = getenv("MM_EXHAUSTIVE") ? 1 : 9973;
  for (int i = 0; i < FORMATS; i++) {
    const format *f = &formats[i];
    uint32_t code = 0;
    for (uint32_t u = 0; u < 0x7f800000; u += stride) {
      uint32_t expected = nearest_from(f, mm_f32_from_bits(u), code <= f->largest ? code : f->largest);
      check(f, u, expected);
      if (expected != f->overflow) code = expected;
    }
    for (uint32_t u = 0x7f800001; u < 0x80000000; u += stride) {
      uint32_t x = f->encode(mm_f32_from_bits(u)), e = (1u << f->exponent_bits) - 1;
      if (f->encode == encode_e2m1)
        assert_int_equal(x, 0);
      else
        assert_true((x & ~f->sign) >> f->mantissa_bits == e && (x & ((1u << f->mantissa_bits) - 1)) != 0);
    }
  }
}

static void same_float(float a, double b) { assert_true(isnan(a) ? isnan(b) : (double)a == b && !signbit(a) == !signbit(b)); }

TEST(test_values) {
  for (uint32_t c = 0; c < 256; c++) {
    uint32_t magnitude = c & 0x7f;
    double sign = c & 0x80 ? -1 : 1;
    double e4m3 = magnitude == 0x7f ? (double)NAN : sign * value_of(&formats[0], magnitude);
    same_float(mm_e4m3_value[c], e4m3);
    same_float(mm_e4m3_to_f32((uint8_t)c), e4m3);
    same_float(mm_e8m0_to_f32((uint8_t)c), c == 255 ? (double)NAN : ldexp(1, (int)c - 127));
  }
  for (uint32_t c = 0; c < 16; c++) {
    double e2m1 = (c & 8 ? -1 : 1) * value_of(&formats[1], c & 7);
    same_float(mm_e2m1_value[c], e2m1);
    same_float(mm_e2m1_to_f32((uint8_t)c), e2m1);
  }
  for (uint32_t c = 0; c < 65536; c++) {
    uint32_t magnitude = c & 0x7fff;
    double sign = c & 0x8000 ? -1 : 1;
    same_float(mm_f16_to_f32((uint16_t)c), magnitude > 0x7c00    ? (double)NAN
                                           : magnitude == 0x7c00 ? sign * (double)INFINITY
                                                                 : sign * value_of(&formats[3], magnitude));
    same_float(mm_bf16_to_f32((uint16_t)c), magnitude > 0x7f80    ? (double)NAN
                                            : magnitude == 0x7f80 ? sign * (double)INFINITY
                                                                  : sign * value_of(&formats[2], magnitude));
  }
}

/* Vectors published with the format documentation. */
TEST(test_vectors) {
  static const struct {
    uint32_t u, code;
  } e4m3[] = {{0x00000000, 0x00}, {0x80000000, 0x80}, {0x3f800000, 0x38}, {0x3dcccccd, 0x1d}, {0x43e00000, 0x7e}, {0x43e80000, 0x7e},
              {0x43e80001, 0x7e}, {0x3b000000, 0x01}, {0x3a800000, 0x00}, {0x3a800347, 0x01}, {0x3b400000, 0x02}, {0x3c800000, 0x08},
              {0x3c6d9168, 0x07}, {0x41880000, 0x58}, {0x41980000, 0x5a}, {0x40490fdb, 0x45}};
  for (size_t i = 0; i < sizeof e4m3 / sizeof *e4m3; i++) {
    assert_int_equal(mm_f32_to_e4m3(mm_f32_from_bits(e4m3[i].u)), e4m3[i].code);
  }
  static const struct {
    float x;
    uint8_t code;
  } e2m1[] = {{0.25f, 0}, {0.75f, 2}, {1.25f, 2}, {1.75f, 4}, {2.5f, 4}, {3.5f, 6}, {5.0f, 6}, {5.0000005f, 7}, {-0.0f, 8}};
  for (size_t i = 0; i < sizeof e2m1 / sizeof *e2m1; i++) assert_int_equal(mm_f32_to_e2m1(e2m1[i].x), e2m1[i].code);
}

TEST(test_widen) {
  enum { N = 77 }; /* two whole runs and a rest */
  uint16_t h[N];
  float f[N], out[N + 1];
  for (int i = 0; i < N; i++) {
    h[i] = (uint16_t)(i * 643 + 12345);
    f[i] = (float)i * 0.37f - 11;
  }
  out[N] = 123;
  assert_true(mm_widen(out, h, MM_BF16, N));
  for (int i = 0; i < N; i++) assert_int_equal(mm_f32_bits(out[i]), (uint32_t)h[i] << 16);
  assert_true(mm_widen(out, h, MM_F16, N));
  for (int i = 0; i < N; i++) assert_int_equal(mm_f32_bits(out[i]), mm_f32_bits(mm_f16_to_f32(h[i])));
  assert_true(mm_widen(out, f, MM_F32, N));
  assert_memory_equal(out, f, sizeof f);
  assert_true(out[N] == 123);
  assert_false(mm_widen(out, h, MM_I16, N));
  assert_true(mm_widen(NULL, h, MM_BF16, 0) && mm_widen(NULL, h, MM_F16, 0) && mm_widen(NULL, f, MM_F32, 0)); /* no numbers */
}

int main(void) { return run_unit_tests(NULL, NULL); }
