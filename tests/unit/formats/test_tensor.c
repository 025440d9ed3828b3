/* formats/tensor: the type table and checked shape arithmetic. */
#include "formats/tensor.h"

#include <stdlib.h>
#include <string.h>

#include "tests/unit/unit.h"

/* Names and sizes as the format's own description lists them. */
static const struct {
  mm_dtype type;
  const char *name;
  unsigned bits;
} known[] = {
    {MM_BOOL, "BOOL", 8},
    {MM_F4, "F4", 4},
    {MM_F6_E2M3, "F6_E2M3", 6},
    {MM_F6_E3M2, "F6_E3M2", 6},
    {MM_U8, "U8", 8},
    {MM_I8, "I8", 8},
    {MM_F8_E5M2, "F8_E5M2", 8},
    {MM_F8_E4M3, "F8_E4M3", 8},
    {MM_F8_E8M0, "F8_E8M0", 8},
    {MM_I16, "I16", 16},
    {MM_U16, "U16", 16},
    {MM_F16, "F16", 16},
    {MM_BF16, "BF16", 16},
    {MM_I32, "I32", 32},
    {MM_U32, "U32", 32},
    {MM_F32, "F32", 32},
    {MM_C64, "C64", 64},
    {MM_F64, "F64", 64},
    {MM_I64, "I64", 64},
    {MM_U64, "U64", 64},
    {MM_F8_E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {MM_F8_E5M2FNUZ, "F8_E5M2FNUZ", 8},
};

TEST(test_types) {
  assert_int_equal(sizeof known / sizeof known[0], MM_DTYPE_COUNT);
  for (size_t i = 0; i < MM_DTYPE_COUNT; i++) {
    mm_dtype t = MM_DTYPE_COUNT;
    assert_string_equal(mm_dtype_name(known[i].type), known[i].name);
    assert_int_equal(mm_dtype_bits(known[i].type), known[i].bits);
    assert_true(mm_dtype_parse(known[i].name, strlen(known[i].name), &t));
    assert_int_equal(t, known[i].type);
    assert_false(mm_dtype_parse(known[i].name, strlen(known[i].name) - 1, &t) && t == known[i].type);
  }
  assert_int_equal(mm_dtype_size(MM_BF16), 2);
  assert_int_equal(mm_dtype_size(MM_C64), 8);
}

TEST(test_unknown_types) {
  static const struct {
    const char *name;
    size_t n;
  } unknown[] = {{"", 0},   {"f32", 3},  {"F32\0", 4},   {"F32 ", 4}, {"torch.float32", 13},
                 {"F3", 2}, {"F32x", 4}, {"BF16\0x", 6}, {"F128", 4}};
  for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
    mm_dtype t = MM_I16;
    assert_false(mm_dtype_parse(unknown[i].name, unknown[i].n, &t));
    assert_int_equal(t, MM_I16);
  }
}

#define G UINT64_C(0x100000000) /* 2^32 */

TEST(test_sizes) {
  static const struct {
    mm_shape shape;
    mm_dtype type;
    bool counts, measures;
    uint64_t count, bytes;
  } cases[] = {
      {{0, {0}}, MM_F32, true, true, 1, 4}, /* scalar */
      {{1, {0}}, MM_F32, true, true, 0, 0},
      {{2, {3, 5}}, MM_BF16, true, true, 15, 30},
      {{8, {2, 3, 1, 5, 1, 7, 1, 11}}, MM_I64, true, true, 2310, 18480},
      {{1, {3}}, MM_F4, true, false, 3, 0}, /* half a byte left */
      {{1, {4}}, MM_F4, true, true, 4, 2},
      {{1, {4}}, MM_F6_E2M3, true, true, 4, 3},
      {{1, {2}}, MM_F6_E3M2, true, false, 2, 0},
      {{2, {G, G}}, MM_U8, false, false, 0, 0},    /* wraps to 0 */
      {{3, {G, G, 0}}, MM_U8, false, false, 0, 0}, /* a later zero does not undo it */
      {{3, {0, G, G}}, MM_U8, true, true, 0, 0},
      {{2, {G, G / 2}}, MM_U8, true, false, G * (G / 2), 0},                  /* fits in elements, not in bits */
      {{2, {G, G / 16}}, MM_U8, true, true, G * (G / 16), G * (G / 16)},      /* 2^60 bytes = 2^63 bits */
      {{2, {G, G / 8}}, MM_U8, true, false, G * (G / 8), 0},                  /* 2^64 bits */
      {{3, {UINT64_C(0x5555555555555556), 3, 1}}, MM_U8, false, false, 0, 0}, /* wraps to 2 */
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    uint64_t v;
    assert_int_equal(mm_shape_count(&cases[i].shape, &v), cases[i].counts);
    if (cases[i].counts) assert_true(v == cases[i].count);
    assert_int_equal(mm_shape_bytes(&cases[i].shape, cases[i].type, &v), cases[i].measures);
    if (cases[i].measures) assert_true(v == cases[i].bytes);
  }
}

TEST(test_equal) {
  mm_shape a = mm_shape3(4, 5, 6), b = mm_shape3(4, 5, 6), c = mm_shape3(4, 5, 7), d = mm_shape2(4, 5), e = mm_shape1(4);
  b.dim[3] = 99; /* beyond the rank: no part of the shape */
  assert_true(mm_shape_equal(&a, &b));
  assert_false(mm_shape_equal(&a, &c));
  assert_false(mm_shape_equal(&a, &d));
  assert_false(mm_shape_equal(&d, &e));
}

TEST(test_text) {
  static const struct {
    mm_shape shape;
    size_t cap;
    const char *text;
  } cases[] = {
      {{0, {0}}, 8, "[]"},
      {{2, {2048, 256}}, 64, "[2048, 256]"},
      {{2, {UINT64_MAX, 0}}, 64, "[18446744073709551615, 0]"},
      {{3, {12, 345, 6789}}, 13, "[12, 345…]"},
      {{1, {123456789}}, 8, "[…]"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char *out = malloc(cases[i].cap);
    assert_ptr_equal(mm_shape_text(&cases[i].shape, out, cases[i].cap), out);
    assert_string_equal(out, cases[i].text);
    free(out);
  }
  mm_shape longest = {MM_MAX_RANK, {0}};
  for (size_t i = 0; i < MM_MAX_RANK; i++) longest.dim[i] = UINT64_MAX - i;
  char out[256];
  assert_non_null(strstr(mm_shape_text(&longest, out, sizeof out), "18446744073709551608]"));
}

int main(void) { return run_unit_tests(NULL, NULL); }
