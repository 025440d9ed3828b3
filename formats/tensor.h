/* Element types and shapes of the safetensors format (huggingface/safetensors, `Dtype`). */
#ifndef MM_FORMATS_TENSOR_H
#define MM_FORMATS_TENSOR_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mm_dtype {
  MM_BOOL,
  MM_F4,
  MM_F6_E2M3,
  MM_F6_E3M2,
  MM_U8,
  MM_I8,
  MM_F8_E5M2,
  MM_F8_E4M3,
  MM_F8_E8M0,
  MM_F8_E4M3FNUZ,
  MM_F8_E5M2FNUZ,
  MM_I16,
  MM_U16,
  MM_F16,
  MM_BF16,
  MM_I32,
  MM_U32,
  MM_F32,
  MM_C64,
  MM_F64,
  MM_I64,
  MM_U64,
  MM_DTYPE_COUNT
} mm_dtype;

/* The name in a safetensors header ("BF16"). */
const char *mm_dtype_name(mm_dtype t);
/* Exact, case-sensitive; false if unknown. name need not be NUL-terminated. */
bool mm_dtype_parse(const char *name, size_t n, mm_dtype *out);
unsigned mm_dtype_bits(mm_dtype t);
/* Bytes of one element; only for types of whole bytes (bits % 8 == 0). */
static inline size_t mm_dtype_size(mm_dtype t) { return mm_dtype_bits(t) / 8; }

#define MM_MAX_RANK 8
typedef struct mm_shape {
  uint32_t rank;
  uint64_t dim[MM_MAX_RANK];
} mm_shape;

static inline mm_shape mm_shape1(uint64_t a) {
  mm_shape s = {1, {a}};
  return s;
}
static inline mm_shape mm_shape2(uint64_t a, uint64_t b) {
  mm_shape s = {2, {a, b}};
  return s;
}
static inline mm_shape mm_shape3(uint64_t a, uint64_t b, uint64_t c) {
  mm_shape s = {3, {a, b, c}};
  return s;
}
bool mm_shape_equal(const mm_shape *a, const mm_shape *b);
/* Elements; false on overflow (checked at every step, also before a later zero). */
bool mm_shape_count(const mm_shape *s, uint64_t *out);
/* Bytes of a tensor; false on overflow of the bit count or if the bits do not end on a byte. */
bool mm_shape_bytes(const mm_shape *s, mm_dtype t, uint64_t *out);
/* "[2048, 256]" into out (cap ≥ 8); returns out. */
char *mm_shape_text(const mm_shape *s, char *out, size_t cap);

#ifdef __cplusplus
}
#endif
#endif
