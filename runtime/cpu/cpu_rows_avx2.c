/* cpu_rows.h with AVX2, FMA and F16C: sixteen lanes are two registers. */
#include "runtime/cpu/cpu_codes.h"
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant/numbers.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LEVEL  TARGET MM_INLINE
enum { TILE_KEEPS = false, SCORE_QUERIES = 2, SCORE_POSITIONS = 2, MIX_QUERIES = 1 };
#define TILES(of) of(3, 2) of(2, 2) of(1, 4)

typedef struct v16 {
  __m256 lo, hi;
} v16;
LEVEL v16 v16_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LEVEL v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LEVEL void v16_store(float *p, v16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
LEVEL v16 v16_add(v16 a, v16 b) { return (v16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
LEVEL v16 v16_mul(v16 a, v16 b) { return (v16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
LEVEL v16 v16_fma(v16 a, v16 b, v16 c) { return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
LEVEL v16 v16_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LEVEL float v16_sum(v16 a) {
  const __m256 b = _mm256_add_ps(a.lo, a.hi);
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)), d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
LEVEL v16 v16_held(v16 a) { return a; }
LEVEL v16 v16_halves(float a, float b) { return (v16){_mm256_set1_ps(a), _mm256_set1_ps(b)}; }
LEVEL v16 v16_div(v16 a, v16 b) { return (v16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
LEVEL v16 v16_max(v16 a, v16 b) { return (v16){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
LEVEL v16 v16_min(v16 a, v16 b) { return (v16){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
LEVEL __m256 scale2_8(__m256 p, __m256 t) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
LEVEL v16 v16_scale2(v16 p, v16 t) { return (v16){scale2_8(p.lo, t.lo), scale2_8(p.hi, t.hi)}; }
/* E4M3 as f16 of a 256th: sign, exponent and mantissa lie as they should once the bits are separated; 0x7f and 0xff are no numbers. */
LEVEL __m128i e4m3_f16(__m128i c) {
  const __m128i f16 = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(c), 7), _mm_set1_epi16((short)0xbf80)), most = _mm_set1_epi16(0x3f80);
  const __m128i none = _mm_cmpeq_epi16(_mm_and_si128(f16, most), most);
  return _mm_or_si128(f16, _mm_and_si128(none, _mm_set1_epi16(0x4000)));
}
/* Sixteen codes, a 256th of each. */
LEVEL v16 v16_e4m3(const uint8_t *p) {
  const __m128i c = _mm_loadu_si128((const __m128i *)(const void *)p);
  return (v16){_mm256_cvtph_ps(e4m3_f16(c)), _mm256_cvtph_ps(e4m3_f16(_mm_srli_si128(c, 8)))};
}
/* Numbers of the high bytes of words: the even words' numbers, and the odd ones'. */
LEVEL void e4m3_words(__m256i c, __m256 *even, __m256 *odd) {
  const __m256i f16 = _mm256_and_si256(_mm256_srai_epi16(c, 1), _mm256_set1_epi16((short)0xbf80));
  const __m256i unpacked = _mm256_packus_epi32(_mm256_and_si256(f16, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(f16, 16));
  const __m256i sorted = _mm256_permute4x64_epi64(unpacked, 0xd8);
  *even = _mm256_cvtph_ps(_mm256_castsi256_si128(sorted)), *odd = _mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1));
}
LEVEL __m256 e8m0_f32(__m256i e) {
  const __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x00400000)); /* 2^-127 has no exponent */
  return _mm256_blendv_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(NAN),
                          _mm256_castsi256_ps(_mm256_cmpeq_epi32(e, _mm256_set1_epi32(255))));
}
/* Scales of nibbles, whose lane i has columns 8i … 8i + 7; cell < MM_CHUNK. */
LEVEL v16 v16_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  const int shift = cell == 16 ? 1 : cell == 32 ? 2 : 3;
  const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), above = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  __m128i raw = _mm_setzero_si128();
  if (cell == 16) memcpy(&raw, p, mm_cpu_kinds[kind].scale_bytes * 8);
  if (cell == 32) memcpy(&raw, p, mm_cpu_kinds[kind].scale_bytes * 4);
  if (cell == 64) memcpy(&raw, p, mm_cpu_kinds[kind].scale_bytes * 2);
  __m256 all = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  if (kind == MM_KIND_NVFP4) all = _mm256_cvtph_ps(e4m3_f16(raw));
  if (kind == MM_KIND_MXFP4) all = e8m0_f32(_mm256_cvtepu8_epi32(raw));
  return (v16){_mm256_permutevar8x32_ps(all, _mm256_srli_epi32(lane, shift)),
               _mm256_permutevar8x32_ps(all, _mm256_srli_epi32(above, shift))};
}

LEVEL __m256 widen_8(mm_cpu_kind kind, const uint8_t *p, int i) {
  switch (kind) {
    case MM_KIND_F32: return _mm256_loadu_ps((const float *)(const void *)p + i);
    case MM_KIND_F16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 2 * i)));
    default: { /* byte i / 16 % 4 of eight words */
      const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)(p + i / 64 * 64 + 4 * (i % 16)));
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sll_epi32(words, _mm_cvtsi32_si128(24 - 8 * (i / 16 % 4))), 24));
    }
  }
}

/* The nibble in the low four bits of each lane, and what is above it. */
LEVEL __m256 nibble_8(mm_cpu_kind kind, __m256i c) {
  const __m256 magnitude = _mm256_set_ps(6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
  const __m256i high = _mm256_slli_epi32(c, 28);
  if (kind == MM_KIND_NVFP4 || kind == MM_KIND_MXFP4) /* a permutation reads three bits of its index */
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitude, c),
                         _mm256_castsi256_ps(_mm256_and_si256(high, _mm256_set1_epi32((int)0x80000000u))));
  if (kind == MM_KIND_INT4) return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 28));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(high, 28), _mm256_set1_epi32(8)));
}

LEVEL __m256i load_32(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }
/* Registers 4h … 4h + 3 of a chunk. */
LEVEL void widen_half(v16 w[4], mm_cpu_kind kind, const uint8_t *p, int h) {
  if (kind == MM_KIND_BF16) {
    MM_UNROLL
    for (int j = 0; j < 2; j++) {
      const __m256i lo = load_32(p + 128 * h + 64 * j), hi = load_32(p + 128 * h + 64 * j + 32), top = _mm256_set1_epi32((int)0xffff0000u);
      w[2 * j] = (v16){_mm256_castsi256_ps(_mm256_and_si256(lo, top)), _mm256_castsi256_ps(_mm256_and_si256(hi, top))};
      w[2 * j + 1] = (v16){_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
    }
  } else if (mm_cpu_e4m3(kind)) {
    const __m256i lo = load_32(p + 64 * h), hi = load_32(p + 64 * h + 32), none = _mm256_setzero_si256();
    e4m3_words(_mm256_unpacklo_epi8(none, lo), &w[1].lo, &w[0].lo), e4m3_words(_mm256_unpacklo_epi8(none, hi), &w[1].hi, &w[0].hi);
    e4m3_words(_mm256_unpackhi_epi8(none, lo), &w[3].lo, &w[2].lo), e4m3_words(_mm256_unpackhi_epi8(none, hi), &w[3].hi, &w[2].hi);
  } else if (mm_cpu_nibbles(kind)) {
    const __m256i lo = load_32(p), hi = load_32(p + 32);
    MM_UNROLL
    for (int j = 0; j < 4; j++) {
      const int shift = 8 * h + 16 * ((j + 1) % 2) + 4 * (j / 2);
      w[j] = (v16){nibble_8(kind, _mm256_srli_epi32(lo, shift)), nibble_8(kind, _mm256_srli_epi32(hi, shift))};
    }
  } else {
    MM_UNROLL
    for (int j = 0; j < 4; j++) w[j] = (v16){widen_8(kind, p, 64 * h + 16 * j), widen_8(kind, p, 64 * h + 16 * j + 8)};
  }
}

/* Returns true if a code of a chunk of E4M3 is NaN. */
LEVEL bool bad(const uint8_t *p) {
  const __m256i nan = _mm256_set1_epi8(0x7f);
  __m256i found = _mm256_setzero_si256();
  for (int i = 0; i < MM_CHUNK; i += 32) {
    const __m256i c = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(p + i)), nan);
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(c, nan));
  }
  return !_mm256_testz_si256(found, found);
}

/* cpu_codes.h: lanes 0 … 7 and 8 … 15. */
typedef struct v64 {
  __m256i lo, hi;
} v64;
LEVEL v64 v64_load(const void *p) { return (v64){load_32(p), load_32((const uint8_t *)p + 32)}; }
LEVEL void v64_store(void *p, v64 a) {
  _mm256_storeu_si256((__m256i *)p, a.lo), _mm256_storeu_si256((__m256i *)(void *)((uint8_t *)p + 32), a.hi);
}
LEVEL v64 v64_held(v64 a) { return a; }
/* Registers j of lanes that begin with 32 bytes from a, and as many from b. */
LEVEL __m256i span_bytes(mm_cpu_kind kind, const uint8_t *a, const uint8_t *b, int j) {
  const __m128i e2m1 = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m128i int4 = _mm_setr_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 x = _mm256_castsi256_ps(load_32(a)), y = _mm256_castsi256_ps(load_32(b));
  const __m256i words = _mm256_castps_si256(j / 2 ? _mm256_shuffle_ps(x, y, 0xdd) : _mm256_shuffle_ps(x, y, 0x88));
  const __m256i last = _mm256_and_si256(j % 2 ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
  if (kind == MM_KIND_INT4_OFFSET_LIMBS) return last;
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(mm_cpu_kinds[kind].e2m1 ? e2m1 : int4), last);
}
LEVEL void span_widen(v64 w[4], mm_cpu_kind kind, const uint8_t *p) {
  MM_UNROLL
  for (int j = 0; j < 4; j++) w[j] = (v64){span_bytes(kind, p, p + 64, j), span_bytes(kind, p + 32, p + 96, j)};
}
/* BF16, `cell` columns each. */
LEVEL v16 span_scales_bf16(const uint8_t *p, uint32_t cell) {
  uint16_t own[16];
  float f[16];
  memcpy(own, p, cell < MM_SPAN ? MM_SPAN / cell * sizeof *own : sizeof *own);
  if (cell >= MM_CHUNK) { /* lanes of the first chunk and of the second one take turns by twos */
    const float a = mm_bf16_to_f32(own[0]), b = cell == MM_CHUNK ? mm_bf16_to_f32(own[1]) : a;
    return (v16){_mm256_setr_ps(a, a, b, b, a, a, b, b), _mm256_setr_ps(a, a, b, b, a, a, b, b)};
  }
  for (uint32_t i = 0; i < 16; i++) f[i] = mm_bf16_to_f32(own[MM_LANE * mm_cpu_lane_of(i) / cell]);
  return v16_load(f);
}
LEVEL v16 span_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  if (!mm_cpu_kinds[kind].e2m1) return span_scales_bf16(p, cell);
  const __m128i sixteens = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15); /* mm_cpu_lane_of */
  const __m128i pairs = _mm_setr_epi8(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
  const __m128i raw = cell == MM_LANE ? _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)p), sixteens)
                                      : _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)(const void *)p), pairs);
  const __m128i rest = _mm_srli_si128(raw, 8);
  if (mm_cpu_kinds[kind].scale == MM_F8_E4M3) return (v16){_mm256_cvtph_ps(e4m3_f16(raw)), _mm256_cvtph_ps(e4m3_f16(rest))};
  return (v16){e8m0_f32(_mm256_cvtepu8_epi32(raw)), e8m0_f32(_mm256_cvtepu8_epi32(rest))};
}
/* Sums of two products in halves of words: at most 8 · 24 · 128. */
#define words_first(total, at, start)      ((v64){_mm256_setzero_si256(), _mm256_setzero_si256()})
#define words_total(total, sum, at, start) words_end((at).first ? words_first(0, 0, 0) : (total), sum, (at).last, start)
LEVEL v64 words_step(v64 sum, v64 w, v64 x) {
  return (v64){_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, x.lo)), _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, x.hi))};
}
LEVEL __m256i words_end_8(__m256i total, __m256i sum, __m256i start) {
  const __m256i own = _mm256_add_epi32(_mm256_slli_epi32(total, 8), _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  return _mm256_add_epi32(own, start);
}
LEVEL v64 words_end(v64 total, v64 sum, bool last, const int32_t *start) {
  const v64 begin = last ? v64_load(start) : words_first(0, 0, 0);
  return (v64){words_end_8(total.lo, sum.lo, begin.lo), words_end_8(total.hi, sum.hi, begin.hi)};
}
LEVEL v64 words_join(v64 high, v64 low) {
  return (v64){_mm256_add_epi32(_mm256_slli_epi32(high.lo, 8), low.lo), _mm256_add_epi32(_mm256_slli_epi32(high.hi, 8), low.hi)};
}
LEVEL v16 words_f32(v64 total) { return (v16){_mm256_cvtepi32_ps(total.lo), _mm256_cvtepi32_ps(total.hi)}; }
#define WORD_TILES(of) of(2, 2) of(1, 2)

#include "runtime/cpu/cpu_codes_body.h"
#include "runtime/cpu/cpu_rows_body.h"
#include "runtime/cpu/cpu_vectors_body.h"

const mm_cpu_vectors mm_cpu_vectors_avx2 = MM_VECTORS_HERE;
#endif
