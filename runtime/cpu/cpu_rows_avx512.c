/* cpu_rows.h with AVX-512: a chunk of a row is eight registers. */
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant/numbers.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define LEVEL  TARGET MM_INLINE
enum { TILE_TOKENS = 6 };
#define TILE_ROWS 4

typedef __m512 v16;
LEVEL v16 v16_zero(void) { return _mm512_setzero_ps(); }
LEVEL v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
LEVEL void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
LEVEL v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
LEVEL v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
LEVEL v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
LEVEL v16 v16_set1(float x) { return _mm512_set1_ps(x); }
LEVEL float v16_sum(v16 a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)), d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
LEVEL v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
LEVEL v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
LEVEL v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
LEVEL v16 v16_scale2(v16 p, v16 t) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
/* E4M3 as f16 of a 256th: sign, exponent and mantissa lie as they should once the bits are apart. */
LEVEL __m256i e4m3_f16(__m128i c) {
  return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7), _mm256_set1_epi16((short)0xbf80));
}
/* Of nibbles, whose lane i has columns 8i … 8i + 7; cell < MM_CHUNK. */
LEVEL v16 v16_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i which = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(cell == 16 ? 1 : cell == 32 ? 2 : 3));
  __m128i raw = _mm_setzero_si128();
  if (cell == 16) memcpy(&raw, p, mm_cpu_scale_bytes(kind) * 8);
  if (cell == 32) memcpy(&raw, p, mm_cpu_scale_bytes(kind) * 4);
  if (cell == 64) memcpy(&raw, p, mm_cpu_scale_bytes(kind) * 2);
  __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_castsi128_si256(raw)), 16);
  if (kind == MM_KIND_NVFP4) return _mm512_permutexvar_ps(which, _mm512_cvtph_ps(e4m3_f16(raw)));
  if (kind == MM_KIND_MXFP4) {
    const __m512i e = _mm512_cvtepu8_epi32(raw);
    bits = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x00400000)); /* 2^-127 has no exponent */
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x7fc00000));
  }
  return _mm512_permutexvar_ps(which, _mm512_castsi512_ps(bits));
}

LEVEL __m512 nibbles_e2m1(void) { return _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0); }
LEVEL __m512 nibbles_int4(void) { return _mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0); }
LEVEL __m512 nibbles_offset(void) { return _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8); }

/* The codes of a chunk as numbers, scales aside. A permutation reads four bits of its index: the nibble. */
LEVEL void widen(v16 w[8], mm_cpu_kind kind, const uint8_t *p) {
  const __m512i packed = mm_cpu_turned(kind) ? _mm512_loadu_si512(p) : _mm512_setzero_si512();
  const __m512 table = kind == MM_KIND_INT4 ? nibbles_int4() : kind == MM_KIND_INT4_OFFSET ? nibbles_offset() : nibbles_e2m1();
  MM_UNROLL
  for (int j = 0; j < 8; j++) {
    switch (kind) {
      case MM_KIND_F32: w[j] = _mm512_loadu_ps((const float *)(const void *)p + 16 * j); break;
      case MM_KIND_BF16:
        w[j] = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(p + 32 * j))), 16));
        break;
      case MM_KIND_F16: w[j] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p + 32 * j))); break;
      case MM_KIND_E4M3:
      case MM_KIND_E4M3_32:
      case MM_KIND_MXFP8: w[j] = _mm512_cvtph_ps(e4m3_f16(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * j)))); break;
      case MM_KIND_INT8:
        w[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * j))));
        break;
      default: w[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, (unsigned)(4 * j)), table); break;
    }
  }
}

/* Whether a code of a chunk of E4M3 is no number. */
LEVEL bool bad(const uint8_t *p) {
  const __m512i nan = _mm512_set1_epi8(0x7f);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(p), nan), b = _mm512_and_si512(_mm512_loadu_si512(p + 64), nan);
  return (_mm512_cmpeq_epi8_mask(a, nan) | _mm512_cmpeq_epi8_mask(b, nan)) != 0;
}

#include "runtime/cpu/cpu_rows_body.h"
#include "runtime/cpu/cpu_vectors_body.h"

const mm_cpu_vectors mm_cpu_vectors_avx512 = MM_VECTORS_HERE;

void mm_cpu_rows_avx512(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                        size_t stride, float *sums) {
  rows_of[v->kind](v, first, rows, x, tokens, y, stride, sums);
}
float mm_cpu_dot_avx512(const float *a, const float *b, uint32_t n) { return dot(a, b, n); }
#endif
