/* cpu_rows.h in plain C: what the other levels do, lane by lane. Where the machine has no fused multiply-add this is slow, and right. */
#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_vectors.h"

#define TARGET
#define LEVEL static inline

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
LEVEL v16 v16_add(v16 a, v16 b) {
  for (int i = 0; i < 16; i++) a.f[i] += b.f[i];
  return a;
}
LEVEL v16 v16_mul(v16 a, v16 b) {
  for (int i = 0; i < 16; i++) a.f[i] *= b.f[i];
  return a;
}
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
LEVEL v16 v16_div(v16 a, v16 b) {
  for (int i = 0; i < 16; i++) a.f[i] /= b.f[i];
  return a;
}
LEVEL v16 v16_max(v16 a, v16 b) {
  for (int i = 0; i < 16; i++) a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
  return a;
}
LEVEL v16 v16_min(v16 a, v16 b) {
  for (int i = 0; i < 16; i++) a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i];
  return a;
}
LEVEL v16 v16_scale2(v16 p, v16 t) {
  for (int i = 0; i < 16; i++) p.f[i] = mm_f32_from_bits(mm_f32_bits(p.f[i]) + (mm_f32_bits(t.f[i]) << 23));
  return p;
}
LEVEL v16 v16_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  v16 a;
  for (uint32_t i = 0; i < 16; i++) {
    const uint32_t at = 8 * i / cell;
    if (kind == MM_KIND_NVFP4) a.f[i] = mm_e4m3_value[p[at]] * 0x1p-8f;
    if (kind == MM_KIND_MXFP4) a.f[i] = mm_e8m0_to_f32(p[at]);
    if (kind >= MM_KIND_INT4) a.f[i] = mm_bf16_to_f32((uint16_t)(p[2 * at] | p[2 * at + 1] << 8));
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
  if (kind <= MM_KIND_F16) (void)mm_widen(f, p, kind == MM_KIND_F32 ? MM_F32 : kind == MM_KIND_BF16 ? MM_BF16 : MM_F16, MM_CHUNK);
  for (int i = 0; i < MM_CHUNK; i++) {
    if (kind > MM_KIND_F16 && kind < MM_KIND_INT8) f[i] = mm_e4m3_value[p[i]] * 0x1p-8f;
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

#include "runtime/cpu/cpu_rows_body.h"
#include "runtime/cpu/cpu_vectors_body.h"

const mm_cpu_vectors mm_cpu_vectors_plain = MM_VECTORS_HERE;

void mm_cpu_rows_plain(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, size_t stride,
                       float *sums) {
  rows_of[v->kind](v, first, rows, x, tokens, y, stride, sums);
}
float mm_cpu_dot_plain(const float *a, const float *b, uint32_t n) { return dot(a, b, n); }
