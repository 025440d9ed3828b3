/* Products of nibbles with inputs that are integers: sums of integers, the same in any order. Codes, which the scheme rounded to, are
 * integers of one byte. Inputs given as f32 become integers of three, called limbs: sixteen columns are multiples of one power of two,
 * which is at most 2^-22 of the largest among them and is their scale, and each is off by at most half of it.
 *
 * Columns are taken in spans of 256, of which each of sixteen lanes has sixteen, those of one scale: lane i's sum of products S, an exact
 * integer (of codes doubled, for E2M1), times the input's scale, is added to the lane's sum by a fused multiply-add under the weight's
 * scale, or 1. Where neither has scales along the row, S alone is added. At the end all is as in cpu_rows.h. Columns past the end are
 * zeros. */
#ifndef MM_RUNTIME_CPU_CPU_CODES_H
#define MM_RUNTIME_CPU_CPU_CODES_H

#include "runtime/cpu/cpu_rows.h"

/* The columns of a span, and of a lane; a lane's first columns are 16 · mm_cpu_lane_of. Byte b of lane i in the j-th of a span's four
 * registers is of the column mm_cpu_span_column: the low nibbles of a word, or the high ones. */
enum { MM_SPAN = 256, MM_LANE = 16 };
MM_INLINE uint32_t mm_cpu_lane_of(uint32_t i) { return 8 * (i % 4 / 2) + 2 * (i / 4) + i % 2; }
MM_INLINE uint32_t mm_cpu_span_column(uint32_t j, uint32_t i, uint32_t b) {
  return MM_LANE * mm_cpu_lane_of(i) + 8 * (j / 2) + 2 * b + j % 2;
}
/* The kind for inputs in codes of a scheme that rounds to E2M1 or INT8; MM_KINDS: there is none. */
mm_cpu_kind mm_cpu_codes_kind(const mm_cpu_view *v, mm_code of_inputs);
/* The same for inputs of f32. */
mm_cpu_kind mm_cpu_limbs_kind(const mm_cpu_view *v);
/* The loops multiply unsigned numbers with signed ones: a nibble's integer plus this. */
MM_INLINE int32_t mm_cpu_codes_zero(mm_cpu_kind k) { return mm_cpu_kinds[k].e2m1 ? 12 : 8; }

/* A row of inputs, for each span: bytes in the registers' order, what each lane's sum of products with unsigned numbers begins with, and
 * the lane's scale as f32. A span has three limbs, the highest first; the last one's beginnings and scales hold for all three. */
typedef struct mm_cpu_span {
  int8_t code[MM_SPAN];
  int32_t start[16];
  float scale[16];
} mm_cpu_span;
/* x[k], codes as numbers; group g of `group` columns, counted from `before` columns ahead of the first, has scale[g], or 0 from `scales`
 * on: padding. group 0: none has. A NaN or infinity in x makes its lane's scale NaN, and the result false. */
bool mm_cpu_codes(mm_cpu_span *to, const float *x, uint32_t k, mm_cpu_kind kind, const float *scale, uint32_t scales, uint32_t group,
                  uint32_t before);
/* x[k] as limbs. A lane with what is no number has a scale that is none. */
void mm_cpu_limbs_of(mm_cpu_span *to, const float *x, uint32_t k, mm_cpu_kind kind);
/* Floats of such a row. */
MM_INLINE size_t mm_cpu_limbs_floats(uint32_t k) { return mm_cells(k, MM_SPAN) * 3 * (sizeof(mm_cpu_span) / sizeof(float)); }

#endif
