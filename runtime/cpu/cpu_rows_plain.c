/* cpu_rows.h in plain C: what the other levels do, lane by lane. Where the machine has no fused multiply-add this is slow, and right. */
#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_codes.h"
#include "runtime/cpu/cpu_vectors.h"

#define TARGET
#define LEVEL static inline
enum { SCORE_QUERIES = 2, SCORE_POSITIONS = 2, MIX_QUERIES = 2 };

typedef struct v16 {
  float f[16];
} v16;
LEVEL v16 v16_zero(void) { return (v16){{0}}; }
LEVEL v16 v16_load(const float *p) {
  v16 a;
  memcpy(a.f, p, sizeof a.f);
  return a;
}
LEVEL void v16_store(float *p, v16 a) { memcpy(p, a.f, sizeof a.f); }
/* A function of the lanes of `a` and others. */
#define LANES(name, others, lane)               \
  LEVEL v16 name(v16 a, others) {               \
    for (int i = 0; i < 16; i++) a.f[i] = lane; \
    return a;                                   \
  }
LANES(v16_add, v16 b, a.f[i] + b.f[i])
LANES(v16_mul, v16 b, a.f[i] * b.f[i])
LANES(v16_div, v16 b, a.f[i] / b.f[i])
LANES(v16_max, v16 b, a.f[i] > b.f[i] ? a.f[i] : b.f[i])
LANES(v16_min, v16 b, a.f[i] < b.f[i] ? a.f[i] : b.f[i])
LANES(v16_scale2, v16 b, mm_f32_from_bits(mm_f32_bits(a.f[i]) + (mm_f32_bits(b.f[i]) << 23)))
LEVEL v16 v16_fma(v16 a, v16 b, v16 c) {
  for (int i = 0; i < 16; i++) a.f[i] = fmaf(a.f[i], b.f[i], c.f[i]);
  return a;
}
LEVEL v16 v16_set1(float x) {
  v16 a;
  for (int i = 0; i < 16; i++) a.f[i] = x;
  return a;
}
LEVEL float v16_sum(v16 a) {
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; i++) a.f[i] += a.f[i + n];
  return a.f[0];
}
LEVEL v16 v16_held(v16 a) { return a; }
LEVEL v16 v16_e4m3(const uint8_t *p) {
  v16 a;
  for (int i = 0; i < 16; i++) a.f[i] = mm_e4m3_value[p[i]] * 0x1p-8f;
  return a;
}
LEVEL v16 v16_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  v16 a;
  for (uint32_t i = 0; i < 16; i++) {
    const uint32_t at = 8 * i / cell;
    if (kind == MM_KIND_NVFP4) a.f[i] = mm_e4m3_value[p[at]] * 0x1p-8f;
    if (kind == MM_KIND_MXFP4) a.f[i] = mm_e8m0_to_f32(p[at]);
    if (mm_cpu_kinds[kind].scale == MM_BF16) a.f[i] = mm_bf16_to_f32((uint16_t)(p[2 * at] | p[2 * at + 1] << 8));
  }
  return a;
}

LEVEL float nibble(mm_cpu_kind kind, uint8_t c) {
  return kind == MM_KIND_INT4 ? (float)((c ^ 8) - 8) : kind == MM_KIND_INT4_OFFSET ? (float)(c - 8) : mm_e2m1_value[c];
}
LEVEL v16 v16_halves(float a, float b) {
  v16 x;
  for (int i = 0; i < 16; i++) x.f[i] = i < 8 ? a : b;
  return x;
}
LEVEL void widen(v16 w[8], mm_cpu_kind kind, const uint8_t *p) {
  float f[MM_CHUNK], turned[MM_CHUNK];
  if (kind == MM_KIND_F32) (void)mm_widen(f, p, MM_F32, MM_CHUNK);
  if (kind == MM_KIND_BF16) (void)mm_widen(f, p, MM_BF16, MM_CHUNK);
  if (kind == MM_KIND_F16) (void)mm_widen(f, p, MM_F16, MM_CHUNK);
  for (int i = 0; i < MM_CHUNK; i++) {
    if (mm_cpu_e4m3(kind)) f[i] = mm_e4m3_value[p[i]] * 0x1p-8f;
    if (kind == MM_KIND_INT8 || kind == MM_KIND_INT8_CODES) f[i] = (float)(int8_t)p[i];
    if (mm_cpu_nibbles(kind)) f[i] = nibble(kind, (uint8_t)(p[i / 2] >> i % 2 * 4 & 15));
  }
  for (uint32_t i = 0; i < MM_CHUNK; i++) turned[i] = f[mm_cpu_column(kind, i / 16, i % 16)];
  memcpy(w, turned, sizeof turned);
}
LEVEL void widen_half(v16 w[4], mm_cpu_kind kind, const uint8_t *p, int h) {
  v16 all[8];
  widen(all, kind, p);
  memcpy(w, all + 4 * h, 4 * sizeof *w);
}
LEVEL bool bad(const uint8_t *p) {
  (void)p; /* a code that is no number makes the sum none */
  return false;
}

/* cpu_codes.h */
typedef union v64 {
  uint32_t word[16]; /* signed numbers that wrap */
  uint8_t byte[64];
} v64;
LEVEL v64 v64_load(const void *p) {
  v64 a;
  memcpy(&a, p, sizeof a);
  return a;
}
LEVEL void v64_store(void *p, v64 a) { memcpy(p, &a, sizeof a); }
LEVEL v64 v64_held(v64 a) { return a; }
LEVEL void span_widen(v64 w[4], mm_cpu_kind kind, const uint8_t *p) {
  for (uint32_t i = 0; i < MM_SPAN; i++) {
    const uint32_t column = mm_cpu_span_column(i / 64, i % 64 / 4, i % 4);
    const uint8_t c = p[column / 2] >> column % 2 * 4 & 15;
    const float number = mm_cpu_kinds[kind].e2m1 ? 2 * nibble(MM_KIND_NVFP4, c)
                                                 : nibble(kind == MM_KIND_INT4_OFFSET_LIMBS ? MM_KIND_INT4_OFFSET : MM_KIND_INT4, c);
    w[i / 64].byte[i % 64] = (uint8_t)((int32_t)number + mm_cpu_codes_zero(kind));
  }
}
LEVEL v16 span_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  v16 a;
  for (uint32_t i = 0; i < 16; i++) {
    const uint32_t at = MM_LANE * mm_cpu_lane_of(i) / cell;
    if (!mm_cpu_kinds[kind].e2m1)
      a.f[i] = mm_bf16_to_f32((uint16_t)(p[2 * at] | p[2 * at + 1] << 8));
    else
      a.f[i] = mm_cpu_kinds[kind].scale == MM_F8_E4M3 ? mm_e4m3_value[p[at]] * 0x1p-8f : mm_e8m0_to_f32(p[at]);
  }
  return a;
}
#define words_first(total, at, start)      words_begin((at).first ? (v64){{0}} : (total), (at).last, start)
#define words_total(total, sum, at, start) (sum)
LEVEL v64 words_begin(v64 total, bool last, const int32_t *start) {
  for (int i = 0; i < 16; i++) total.word[i] = (total.word[i] << 8) + (last ? (uint32_t)start[i] : 0);
  return total;
}
LEVEL v64 words_step(v64 sum, v64 w, v64 x) {
  for (int i = 0; i < 64; i++) sum.word[i / 4] += (uint32_t)(w.byte[i] * (int8_t)x.byte[i]);
  return sum;
}
LEVEL v64 words_join(v64 high, v64 low) {
  for (int i = 0; i < 16; i++) low.word[i] += high.word[i] << 8;
  return low;
}
LEVEL v16 words_f32(v64 total) {
  v16 a;
  for (int i = 0; i < 16; i++) a.f[i] = (float)(int32_t)total.word[i];
  return a;
}
#define WORD_TILES(of) of(2, 1) of(1, 1)

#include "runtime/cpu/cpu_codes_body.h"
#include "runtime/cpu/cpu_rows_body.h"
#include "runtime/cpu/cpu_vectors_body.h"

const mm_cpu_vectors mm_cpu_vectors_plain = MM_VECTORS_HERE;
