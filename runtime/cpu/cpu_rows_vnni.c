/* cpu_codes.h, and cpu_rows.h where codes and inputs are INT8: products and sums of integers, four columns a lane and instruction. A lane's
 * sum is an integer below 2^24 (mm_cpu_integers), which f32 holds, so that the other levels' sums are the same; from there on all is as
 * they do it.
 *
 * The instruction multiplies unsigned numbers with signed ones: codes become w + 128, and a lane begins with -128 times its inputs' sum. */
#include "runtime/cpu/cpu_codes.h"
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma")))
#define MM_VBMI
#define MM_VNNI
#include "runtime/cpu/cpu_lanes_avx512.h"

#include "runtime/cpu/cpu_codes_body.h"

enum { HALF = 64, ALONE = 4 }; /* columns of an instruction; those of one token side by side */

LEVEL __m512i plus_128(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)); }

/* Columns c … c + 63, of which a row of codes has those in `which`. */
LEVEL void step(__m512i sum[8][8], uint32_t rows, uint32_t tokens, const uint8_t *const *codes, const uint8_t *const *in, uint32_t c,
                __mmask64 which) {
  __m512i w[8];
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++)
    w[r] = plus_128(which == ~UINT64_C(0) ? _mm512_loadu_si512(codes[r] + c) : _mm512_maskz_loadu_epi8(which, codes[r] + c));
  MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) {
    __m512i from = _mm512_loadu_si512(in[t] + c);
    __asm__("" : "+v"(from)); /* in a register: not read again at every use */
    MM_UNROLL
    for (uint32_t r = 0; r < rows; r++) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], w[r], from);
  }
}

/* The lanes of `rows` rows from `codes` on, k columns each, and of `tokens` tokens, to sums[r·stride + t][16]. */
LEVEL void tile(uint32_t rows, uint32_t tokens, const uint8_t *codes, size_t row_bytes, uint32_t k, const float *const *x, float *sums,
                size_t stride) {
  const uint8_t *in[8], *row[8];
  __m512i sum[8][8];
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) row[r] = codes + r * row_bytes;
  MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) {
    in[t] = (const uint8_t *)(x[t] + mm_cpu_padded(k));
    MM_UNROLL
    for (uint32_t r = 0; r < rows; r++) sum[r][t] = _mm512_loadu_si512(mm_cpu_starts(x[t], k));
  }
  uint32_t c = 0;
  MM_ROLL
  for (; c + HALF <= k; c += HALF) step(sum, rows, tokens, row, in, c, ~UINT64_C(0));
  if (c < k) step(sum, rows, tokens, row, in, c, ~UINT64_C(0) >> (HALF - (k - c)));
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) v16_store(sums + (r * stride + t) * 16, _mm512_cvtepi32_ps(sum[r][t]));
}

enum { HIGH = 2 };
#define TILE(tokens)                                                                                                                \
  TARGET static __attribute__((noinline)) void tile_of_##tokens(uint32_t rows, const uint8_t *codes, size_t row_bytes, uint32_t k,  \
                                                                const float *const *x, float *sums, size_t stride) {                \
    uint32_t r = 0;                                                                                                                 \
    for (; r + HIGH <= rows; r += HIGH) tile(HIGH, tokens, codes + r * row_bytes, row_bytes, k, x, sums + r * stride * 16, stride); \
    for (; r < rows; r++) tile(1, tokens, codes + r * row_bytes, row_bytes, k, x, sums + r * stride * 16, stride);                  \
  }
TILE(6)
TILE(4)
TILE(2)
TILE(1)

TARGET static void some_tokens(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                               size_t stride, float *sums) {
  const uint8_t *codes = v->codes + (size_t)first * v->row_bytes;
  const uint32_t k = v->w->k;
  for (uint32_t t = 0; t < tokens;) {
    const uint32_t left = tokens - t, some = left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    (some == 6   ? tile_of_6
     : some == 4 ? tile_of_4
     : some == 2 ? tile_of_2
                 : tile_of_1)(rows, codes, v->row_bytes, k, x + t, sums + 16 * t, MM_CPU_MANY_TOKENS);
    t += some;
  }
  tokens_out(v, tokens, first, rows, (rows_out){y, stride, sums});
}

TARGET static void one_token(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *x, float *y) {
  const uint32_t k = v->w->k, whole = k / (ALONE * HALF) * (ALONE * HALF);
  const uint8_t *const in = (const uint8_t *)(x + mm_cpu_padded(k)), *const end = v->codes + (size_t)(first + rows) * v->row_bytes;
  const ptrdiff_t jump = v->next ? v->next - end : 0;
  _Alignas(64) float lanes[16 * 16];
  for (uint32_t r = 0; r < rows; r++) {
    const uint8_t *codes = v->codes + (size_t)(first + r) * v->row_bytes;
    if (jump && r + 1 == rows) prefetch_next(end + jump);
    __m512i sum[ALONE] = {_mm512_loadu_si512(mm_cpu_starts(x, k)), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (uint32_t c = 0; c < whole; c += ALONE * HALF) {
      MM_UNROLL
      for (uint32_t i = 0; i < ALONE; i++) {
        sum[i] = _mm512_dpbusd_epi32(sum[i], plus_128(_mm512_loadu_si512(codes + c + i * HALF)), _mm512_loadu_si512(in + c + i * HALF));
      }
    }
    for (uint32_t c = whole; c < k; c += HALF) {
      const __mmask64 which = k - c < HALF ? ~UINT64_C(0) >> (HALF - (k - c)) : ~UINT64_C(0);
      sum[0] = _mm512_dpbusd_epi32(sum[0], plus_128(_mm512_maskz_loadu_epi8(which, codes + c)), _mm512_loadu_si512(in + c));
    }
    const __m512i all = _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3]));
    v16_store(lanes + 16 * (r % 16), _mm512_cvtepi32_ps(all));
    row_out(v, first, rows, r, lanes, y);
  }
}

void mm_cpu_rows_vnni(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, size_t stride,
                      float *sums) {
  if (tokens == 1) {
    one_token(v, first, rows, x[0], y);
    return;
  }
  for (uint32_t t = 0, some; t < tokens; t += some) {
    some = mm_cpu_some(tokens - t);
    some_tokens(v, first, rows, x + t, some, y + t * stride, stride, sums);
  }
}

mm_cpu_rows_fn *const mm_cpu_codes_vnni = rows_of_codes;
#endif
