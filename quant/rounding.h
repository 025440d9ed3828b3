/* Rounding to the values of a scheme's codes, sixteen numbers side by side, and how codes and scales are stored: for both kinds of error
 * feedback. */
#ifndef MM_QUANT_ROUNDING_H
#define MM_QUANT_ROUNDING_H

#include <math.h>
#include <string.h>

#include "quant/tile.h"

enum { MM_ROUND_LANES = 16 };
typedef float mm_round_lanes __attribute__((vector_size(4 * MM_ROUND_LANES), may_alias));
typedef int32_t mm_round_lanes_int __attribute__((vector_size(4 * MM_ROUND_LANES), may_alias));

/* The codes of a scheme; lo and hi: of integers. */
typedef struct mm_rounding {
  mm_code code;
  int32_t lo, hi;
} mm_rounding;

static inline mm_rounding mm_rounding_of(const mm_scheme *s) {
  const bool whole = s->code == MM_CODE_INT4_OFFSET || (s->code == MM_CODE_INT4 && s->signed_scale); /* -8 is a code */
  const int32_t hi = s->code == MM_CODE_INT8 ? 127 : 7;
  return (mm_rounding){s->code, whole ? -8 : -hi, hi};
}

/* y where differ has all bits, x where it has none. */
MM_INLINE void mm_select_lanes(mm_round_lanes *x, const mm_round_lanes_int *differ, const mm_round_lanes *y) {
  *x = (mm_round_lanes)(((mm_round_lanes_int)*x & ~*differ) | ((mm_round_lanes_int)*y & *differ));
}

MM_INLINE void mm_round_values(const mm_rounding *z, mm_round_lanes *y) {
  float v[MM_ROUND_LANES];
  if (z->code == MM_CODE_E4M3 || z->code == MM_CODE_E2M1) {
    memcpy(v, y, sizeof v);
    if (z->code == MM_CODE_E4M3)
      for (int i = 0; i < MM_ROUND_LANES; i++) v[i] = mm_e4m3_to_f32(mm_finite_to_e4m3(v[i]));
    else
      for (int i = 0; i < MM_ROUND_LANES; i++) v[i] = mm_e2m1_to_f32(mm_finite_to_e2m1(v[i]));
    memcpy(y, v, sizeof v);
    return;
  }
  const mm_round_lanes low = MM_INT_MAGIC + (float)z->lo + (mm_round_lanes){0}, high = MM_INT_MAGIC + (float)z->hi + (mm_round_lanes){0};
  mm_round_lanes sum = *y + MM_INT_MAGIC; /* clamped as bits, as mm_round_clamp does */
  const mm_round_lanes_int bits = (mm_round_lanes_int)sum, least = (mm_round_lanes_int)low, most = (mm_round_lanes_int)high,
                           below = bits<least, above = bits> most;
  mm_select_lanes(&sum, &below, &low);
  mm_select_lanes(&sum, &above, &high);
  *y = sum - MM_INT_MAGIC;
}

/* The same of one number. */
MM_INLINE float mm_round_value(const mm_rounding *z, float y) {
  if (z->code == MM_CODE_E4M3) return mm_e4m3_to_f32(mm_finite_to_e4m3(y));
  if (z->code == MM_CODE_E2M1) return mm_e2m1_to_f32(mm_finite_to_e2m1(y));
  return (float)mm_round_clamp(y, z->lo, z->hi);
}

/* Code bits of a value of mm_round_values. */
MM_INLINE uint8_t mm_code_of_value(mm_code code, float q) {
  switch (code) {
    case MM_CODE_E4M3: return mm_finite_to_e4m3(q);
    case MM_CODE_E2M1: return mm_finite_to_e2m1(q);
    case MM_CODE_INT4_OFFSET: return (uint8_t)((int)q + 8);
    case MM_CODE_INT4: return (uint8_t)((int)q & 15);
    default: return (uint8_t)(int8_t)q;
  }
}

/* A row of k values as codes: one byte each, or two nibbles to a byte, low first. */
static inline void mm_store_values(mm_code code, const float *q, uint32_t k, uint8_t *to) {
  if (code < MM_CODE_E2M1)
    for (uint32_t c = 0; c < k; c++) to[c] = mm_code_of_value(code, q[c]);
  else
    for (uint32_t c = 0; c < k; c += 2) {
      const uint8_t high = c + 1 < k ? mm_code_of_value(code, q[c + 1]) : mm_code_of_value(code, 0);
      to[c / 2] = (uint8_t)(mm_code_of_value(code, q[c]) | high << 4);
    }
}

/* Scales of the rows of a strip: how plane 1 stores them. */
typedef struct mm_refined_scales {
  mm_dtype type;  /* F32, BF16 or F8_E4M3 */
  uint32_t group; /* columns of a scale */
  uint8_t *stored;
  size_t row_bytes; /* between the scales of two rows */
  float times;      /* what a stored scale is multiplied with */
  float top;        /* the largest magnitude of a code */
} mm_refined_scales;

static inline mm_refined_scales mm_refined_scales_of(const mm_scheme *s, void *const plane[MM_MAX_PLANES], uint32_t k) {
  const mm_plane *p = &s->plane[1];
  const uint32_t group = p->cell.k ? p->cell.k : k;
  const float top = s->code == MM_CODE_E4M3 ? 448 : s->code == MM_CODE_E2M1 ? 6 : s->code == MM_CODE_INT8 ? 127 : 8;
  return (mm_refined_scales){
      p->dtype, group, plane[1], mm_cells(k, group) * mm_dtype_size(p->dtype), s->plane_count > 2 ? *(const float *)plane[2] : 1, top};
}

/* Scales that belong to one row and are no powers of two. */
static inline bool mm_scales_refined(const mm_scheme *s) {
  const mm_plane *p = &s->plane[1];
  return p->cell.n == 1 && (p->dtype == MM_F32 || p->dtype == MM_BF16 || p->dtype == MM_F8_E4M3);
}

/* The stored scale nearest to v, times unit, as the grid holds it; 0 where there is none near. */
static inline float mm_nearest_scale(const mm_refined_scales *c, float unit, float v, uint32_t *bits) {
  const float times = c->times * unit, y = v / times, most = fabsf(y);
  if (!(most > 0x1p-100f && most * c->top <= 0x1.fffffep126f)) return 0;
  switch (c->type) {
    case MM_F32: return *bits = mm_f32_bits(y), v;
    case MM_BF16: *bits = mm_finite_to_bf16(y); return mm_bf16_to_f32((uint16_t)*bits) * times;
    default: *bits = mm_finite_to_e4m3(y); return *bits >= 1 && *bits <= 126 ? mm_e4m3_value[*bits] * times : 0;
  }
}

static inline void mm_store_scale(const mm_refined_scales *c, uint32_t row, uint32_t i, uint32_t bits) {
  const uint16_t half = (uint16_t)bits;
  const uint8_t byte = (uint8_t)bits;
  uint8_t *stored = c->stored + (size_t)row * c->row_bytes;
  if (c->type == MM_F32)
    memcpy(stored + i * sizeof bits, &bits, sizeof bits);
  else if (c->type == MM_BF16)
    memcpy(stored + i * sizeof half, &half, sizeof half);
  else
    stored[i] = byte;
}

#endif
