/* Inputs in codes as the loops of cpu_codes.h read them. */
#include "runtime/cpu/cpu_codes.h"

#include <math.h>
#include <string.h>

#include "quant/numbers.h"

mm_cpu_kind mm_cpu_codes_kind(const mm_cpu_view *v, mm_code of_inputs) {
  if (of_inputs == MM_CODE_INT8 && v->kind == MM_KIND_INT4 && !v->plane && v->w->k <= MM_CPU_MOST_INTEGERS) return MM_KIND_INT4_CODES;
  if (of_inputs != MM_CODE_E2M1 || (v->cell != MM_LANE && v->cell != 2 * MM_LANE)) return MM_KINDS;
  return v->kind == MM_KIND_NVFP4 ? MM_KIND_NVFP4_CODES : v->kind == MM_KIND_MXFP4 ? MM_KIND_MXFP4_CODES : MM_KINDS;
}

mm_cpu_kind mm_cpu_limbs_kind(const mm_cpu_view *v) {
  const bool whole = !v->plane || v->cell % MM_SPAN == 0 || (MM_SPAN % v->cell == 0 && v->cell >= MM_LANE);
  switch (v->kind) {
    case MM_KIND_NVFP4: return v->cell == MM_LANE || v->cell == 2 * MM_LANE ? MM_KIND_NVFP4_LIMBS : MM_KINDS;
    case MM_KIND_MXFP4: return v->cell == MM_LANE || v->cell == 2 * MM_LANE ? MM_KIND_MXFP4_LIMBS : MM_KINDS;
    case MM_KIND_INT4: return whole ? MM_KIND_INT4_LIMBS : MM_KINDS;
    case MM_KIND_INT4_OFFSET: return whole ? MM_KIND_INT4_OFFSET_LIMBS : MM_KINDS;
    default: return MM_KINDS;
  }
}

/* The even bytes of eight, in order, then the odd ones. */
static uint64_t parted(uint64_t x) {
  uint64_t moved = (x ^ x >> 8) & UINT64_C(0x0000ff000000ff00);
  x ^= moved ^ moved << 8;
  moved = (x ^ x >> 16) & UINT64_C(0x00000000ffff0000);
  return x ^ moved ^ moved << 16;
}

/* The columns of a lane, of which x[n] are given; its scale is none where one of them is none, or under its scale beyond all numbers. */
static bool set_lane(mm_cpu_span *to, uint32_t i, const float *x, uint32_t n, mm_cpu_kind kind, float scale) {
  int8_t code[MM_LANE] = {0};
  int32_t sum = 0;
  bool all = true;
  for (uint32_t c = 0; c < n; c++) {
    all &= fabsf(x[c] * scale) < INFINITY;
    code[c] = (int8_t)(x[c] == x[c] ? mm_cpu_kinds[kind].e2m1 ? 2 * x[c] : x[c] : 0);
    sum += code[c];
  }
  for (uint32_t h = 0; h < 2; h++) {
    uint64_t eight;
    memcpy(&eight, code + 8 * h, sizeof eight);
    eight = parted(eight);
    for (uint32_t j = 0; j < 2; j++) {
      const uint32_t four = (uint32_t)(eight >> 32 * j);
      memcpy(to->code + 64 * (2 * h + j) + 4 * i, &four, sizeof four);
    }
  }
  to->start[i] = -mm_cpu_codes_zero(kind) * sum;
  to->scale[i] = all ? scale : NAN;
  return all;
}

bool mm_cpu_codes(mm_cpu_span *to, const float *x, uint32_t k, mm_cpu_kind kind, const float *scale, uint32_t scales, uint32_t group,
                  uint32_t before) {
  bool all = true;
  for (uint32_t begin = 0; begin < k; begin += MM_SPAN, to++)
    for (uint32_t i = 0; i < 16; i++) {
      const uint32_t at = begin + MM_LANE * mm_cpu_lane_of(i), n = at >= k ? 0 : k - at < MM_LANE ? k - at : MM_LANE;
      const uint32_t g = group ? (before + at) / group : 0;
      all &= set_lane(to, i, x + (n ? at : 0), n, kind, !group ? 1 : n && g < scales ? scale[g] : 0);
    }
  return all;
}

/* The scale of a lane, of which the largest magnitude has these bits: a power of two that the three signed bytes of a limb hold
 * multiples of, up to 0x7f7f7f. */
static uint32_t scale_bits(uint32_t largest) {
  const uint32_t exponent = (largest >> 23) + ((largest & 0x7fffff) > 0x7e0000);
  return (exponent < 23 ? 1 : exponent - 22) << 23;
}

MM_INLINE int32_t signed_byte(int32_t x) { return ((x & 0xff) ^ 0x80) - 0x80; }
/* Sixteen lanes of numbers, in order; `half` where the weights are doubled. */
MM_INLINE void limbs_body(mm_cpu_span *to, const float *x, int32_t zero, float half) {
  for (uint32_t i = 0; i < 16; i++) {
    const float *const own = x + (size_t)MM_LANE * mm_cpu_lane_of(i);
    uint32_t largest = 0;
    int32_t number[MM_LANE], sum = 0;
    for (uint32_t c = 0; c < MM_LANE; c++) {
      const uint32_t size = mm_f32_bits(own[c]) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    const uint32_t scale = scale_bits(largest);
    const bool all = largest < 0x7f800000;
    const float by = mm_f32_from_bits((UINT32_C(254) << 23) - scale); /* 1 / scale */
    for (uint32_t c = 0; c < MM_LANE; c++) {
      const float v = (all ? own[c] : 0) * by;
      number[c] = (int32_t)(v + (v < 0 ? -0.5f : 0.5f));
      sum += number[c];
    }
    for (uint32_t c = 0; c < MM_LANE; c++) {
      const uint32_t at = 64 * (c / 8 * 2 + c % 2) + 4 * i + c % 8 / 2;
      const int32_t low = signed_byte(number[c]), high = (number[c] - low) / 256, middle = signed_byte(high);
      to[2].code[at] = (int8_t)low, to[1].code[at] = (int8_t)middle, to[0].code[at] = (int8_t)((high - middle) / 256);
    }
    to[2].start[i] = -zero * sum;
    to[2].scale[i] = all ? half * mm_f32_from_bits(scale) : NAN;
  }
}
MM_VERSIONS(limbs, (mm_cpu_span * to, const float *x, int32_t zero, float half), (to, x, zero, half))

void mm_cpu_limbs_of(mm_cpu_span *to, const float *x, uint32_t k, mm_cpu_kind kind) {
  const int32_t zero = mm_cpu_codes_zero(kind);
  const float half = mm_cpu_kinds[kind].e2m1 ? 0.5f : 1;
  for (; k >= MM_SPAN; k -= MM_SPAN, x += MM_SPAN, to += 3) limbs(to, x, zero, half);
  if (k == 0) return;
  float scratch[MM_SPAN] = {0};
  memcpy(scratch, x, k * sizeof *x);
  limbs(to, scratch, zero, half);
}
