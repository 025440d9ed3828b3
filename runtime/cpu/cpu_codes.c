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
    code[c] = (int8_t)(x[c] == x[c] ? kind == MM_KIND_INT4_CODES ? x[c] : 2 * x[c] : 0);
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
