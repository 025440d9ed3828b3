/* Element types and shapes of the safetensors format: names, sizes, checked products. */
#include "formats/tensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const struct {
  const char *name;
  unsigned bits;
} dtype[MM_DTYPE_COUNT] = {
    [MM_BOOL] = {"BOOL", 8},
    [MM_F4] = {"F4", 4},
    [MM_F6_E2M3] = {"F6_E2M3", 6},
    [MM_F6_E3M2] = {"F6_E3M2", 6},
    [MM_U8] = {"U8", 8},
    [MM_I8] = {"I8", 8},
    [MM_F8_E5M2] = {"F8_E5M2", 8},
    [MM_F8_E4M3] = {"F8_E4M3", 8},
    [MM_F8_E8M0] = {"F8_E8M0", 8},
    [MM_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [MM_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [MM_I16] = {"I16", 16},
    [MM_U16] = {"U16", 16},
    [MM_F16] = {"F16", 16},
    [MM_BF16] = {"BF16", 16},
    [MM_I32] = {"I32", 32},
    [MM_U32] = {"U32", 32},
    [MM_F32] = {"F32", 32},
    [MM_C64] = {"C64", 64},
    [MM_F64] = {"F64", 64},
    [MM_I64] = {"I64", 64},
    [MM_U64] = {"U64", 64},
};

const char *mm_dtype_name(mm_dtype t) { return dtype[t].name; }
unsigned mm_dtype_bits(mm_dtype t) { return dtype[t].bits; }

bool mm_dtype_parse(const char *name, size_t n, mm_dtype *out) {
  for (unsigned t = 0; t < MM_DTYPE_COUNT; t++) {
    if (strlen(dtype[t].name) == n && memcmp(dtype[t].name, name, n) == 0) {
      *out = (mm_dtype)t;
      return true;
    }
  }
  return false;
}

bool mm_shape_equal(const mm_shape *a, const mm_shape *b) {
  if (a->rank != b->rank) return false;
  for (uint32_t i = 0; i < a->rank; i++) {
    if (a->dim[i] != b->dim[i]) return false;
  }
  return true;
}

bool mm_shape_count(const mm_shape *s, uint64_t *out) {
  *out = 1;
  for (uint32_t i = 0; i < s->rank; i++) {
    if (!mm_mul(*out, s->dim[i], out)) return false;
  }
  return true;
}

bool mm_shape_bytes(const mm_shape *s, mm_dtype t, uint64_t *out) {
  uint64_t count, bits;
  if (!mm_shape_count(s, &count) || !mm_mul(count, mm_dtype_bits(t), &bits) || bits % 8 != 0) return false;
  *out = bits / 8;
  return true;
}

char *mm_shape_text(const mm_shape *s, char *out, size_t cap) {
  static const char cut[] = "…]";
  size_t at = 1;
  snprintf(out, cap, "[");
  for (uint32_t i = 0; i < s->rank; i++) {
    char dim[24];
    int n = snprintf(dim, sizeof dim, "%s%" PRIu64, i ? ", " : "", s->dim[i]);
    if (at + (size_t)n + sizeof cut > cap) {
      memcpy(out + at, cut, sizeof cut);
      return out;
    }
    memcpy(out + at, dim, (size_t)n);
    at += (size_t)n;
  }
  memcpy(out + at, "]", 2);
  return out;
}
