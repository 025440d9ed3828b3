/* Sixteen lanes of AVX-512 for cpu_rows_body.h and cpu_vectors_body.h. The file that includes this defines TARGET, and MM_VBMI where the
 * target has it. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_codes.h"

#define LEVEL TARGET MM_INLINE
enum { TILE_KEEPS = true, SCORE_QUERIES = 6, SCORE_POSITIONS = 4, MIX_QUERIES = 3 };
#define TILES(of) of(6, 2) of(4, 2) of(2, 4) of(1, 8)

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
/* v16_sum of sixteen vectors at a stride of `stride` floats: transposed between the additions. */
#define SUMS_TOGETHER
LEVEL v16 sum_of_four(const float *p, size_t stride) {
  const v16 a = v16_load(p), b = v16_load(p + 4 * stride), c = v16_load(p + 8 * stride), d = v16_load(p + 12 * stride);
  const v16 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const v16 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); /* in lane 4i + j: of vector 4i */
}
LEVEL v16 v16_sums(const float *p, size_t stride) {
  const v16 a = sum_of_four(p, stride), b = sum_of_four(p + stride, stride);
  const v16 c = sum_of_four(p + 2 * stride, stride), d = sum_of_four(p + 3 * stride, stride);
  const v16 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const v16 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
  return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
}
/* The same, in a register: a compiler that sees where it comes from reads it from there at every use. */
LEVEL v16 v16_held(v16 a) {
  __asm__("" : "+v"(a));
  return a;
}
LEVEL v16 v16_halves(float a, float b) { return _mm512_insertf32x8(_mm512_set1_ps(a), _mm256_set1_ps(b), 1); }
LEVEL v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
LEVEL v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
LEVEL v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
LEVEL v16 v16_scale2(v16 p, v16 t) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
/* E4M3 as f16 of a 256th: sign, exponent and mantissa lie as they should once the bits are separated; 0x7f and 0xff are no numbers. */
LEVEL __m256i e4m3_f16(__m128i c) {
  const __m256i f16 = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7), _mm256_set1_epi16((short)0xbf80));
  const __m256i most = _mm256_set1_epi16(0x3f80), none = _mm256_cmpeq_epi16(_mm256_and_si256(f16, most), most);
  return _mm256_or_si256(f16, _mm256_and_si256(none, _mm256_set1_epi16(0x4000)));
}
/* Sixteen codes, a 256th of each. */
LEVEL v16 v16_e4m3(const uint8_t *p) { return _mm512_cvtph_ps(e4m3_f16(_mm_loadu_si128((const __m128i *)(const void *)p))); }
LEVEL v16 e8m0_f32(__m128i c) {
  const __m512i e = _mm512_cvtepu8_epi32(c), bits = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x00400000));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255)),
                                                   _mm512_set1_epi32(0x7fc00000))); /* 2^-127 has no exponent */
}
/* Scales of nibbles, whose lane i has columns 8i … 8i + 7; cell < MM_CHUNK. */
LEVEL v16 v16_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i which = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(cell == 16 ? 1 : cell == 32 ? 2 : 3));
  __m128i raw = _mm_setzero_si128();
  if (cell == 16) memcpy(&raw, p, mm_cpu_kinds[kind].scale_bytes * 8);
  if (cell == 32) memcpy(&raw, p, mm_cpu_kinds[kind].scale_bytes * 4);
  if (cell == 64) memcpy(&raw, p, mm_cpu_kinds[kind].scale_bytes * 2);
  __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_castsi128_si256(raw)), 16);
  if (kind == MM_KIND_NVFP4) return _mm512_permutexvar_ps(which, _mm512_cvtph_ps(e4m3_f16(raw)));
  if (kind == MM_KIND_MXFP4) bits = _mm512_castps_si512(e8m0_f32(raw));
  return _mm512_permutexvar_ps(which, _mm512_castsi512_ps(bits));
}
/* Scales of four consecutive chunks, converted at once. */
#define SCALES_TOGETHER
LEVEL bool scales_together(mm_cpu_kind kind, uint32_t cell) {
  return (kind == MM_KIND_NVFP4 && cell == 16) || (kind == MM_KIND_MXFP4 && cell == 32);
}
LEVEL void v16_scales_of_four(v16 scale[4], mm_cpu_kind kind, const uint8_t *p) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i which = _mm512_srli_epi32(lane, kind == MM_KIND_NVFP4 ? 1 : 2);
  const __m128i *const raw = (const __m128i *)(const void *)p;
  const bool nvfp4 = kind == MM_KIND_NVFP4;
  const v16 low = nvfp4 ? _mm512_cvtph_ps(e4m3_f16(_mm_loadu_si128(raw))) : e8m0_f32(_mm_loadu_si128(raw));
  const v16 high = nvfp4 ? _mm512_cvtph_ps(e4m3_f16(_mm_loadu_si128(raw + 1))) : low;
  MM_UNROLL
  for (int c = 0; c < 4; c++) {
    const __m512i first = _mm512_set1_epi32(nvfp4 ? 8 * (c % 2) : 4 * c);
    scale[c] = _mm512_permutexvar_ps(_mm512_add_epi32(which, first), c < 2 ? low : high);
  }
}

/* Nibbles as BF16, twice: a permutation of words reads five bits of its index, the fifth being another nibble's. */
#define TWICE(...) \
  { __VA_ARGS__, __VA_ARGS__ }
static const uint16_t nibbles_e2m1[32] =
    TWICE(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0);
static const uint16_t nibbles_int4[32] =
    TWICE(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80);
static const uint16_t nibbles_offset[32] =
    TWICE(0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0);

/* The low and the high halves of words, BF16 each: products of BF16 pairs take the high ones first, and so do all levels. */
LEVEL v16 low_half(__m512i c) { return _mm512_castsi512_ps(_mm512_slli_epi32(c, 16)); }
LEVEL v16 high_half(__m512i c) { return _mm512_castsi512_ps(_mm512_and_si512(c, _mm512_set1_epi32((int)0xffff0000u))); }

#ifdef MM_VBMI
/* E4M3 as BF16 of a 256th, by its seven lower bits. */
#define BITS(m, high) ((high) ? (m) >> 8 : (m)&255)
#define LINE(e, high)                                                                                                     \
  NORMAL(e, 0, high), NORMAL(e, 1, high), NORMAL(e, 2, high), NORMAL(e, 3, high), NORMAL(e, 4, high), NORMAL(e, 5, high), \
      NORMAL(e, 6, high), NORMAL(e, 7, high)
#define NORMAL(e, m, high) BITS(((e) + 112) << 7 | (m) << 4, high)
#define SMALL(e, m, high)  BITS((e) << 7 | (m), high)
#define TABLE(high)                                                                                                                        \
  {                                                                                                                                        \
    0, SMALL(110, 0, high), SMALL(111, 0, high), SMALL(111, 64, high), SMALL(112, 0, high), SMALL(112, 32, high), SMALL(112, 64, high),    \
        SMALL(112, 96, high), LINE(1, high), LINE(2, high), LINE(3, high), LINE(4, high), LINE(5, high), LINE(6, high), LINE(7, high),     \
        LINE(8, high), LINE(9, high), LINE(10, high), LINE(11, high), LINE(12, high), LINE(13, high), LINE(14, high), NORMAL(15, 0, high), \
        NORMAL(15, 1, high), NORMAL(15, 2, high), NORMAL(15, 3, high), NORMAL(15, 4, high), NORMAL(15, 5, high), NORMAL(15, 6, high),      \
        BITS(0x7fc0, high)                                                                                                                 \
  }
static const uint8_t e4m3_low[128] = TABLE(0), e4m3_high[128] = TABLE(1);
/* 64 codes: words whose halves are columns (mm_cpu_column). */
LEVEL void e4m3_words(__m512i c, __m512i *first, __m512i *second) {
  const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(e4m3_low), c, _mm512_loadu_si512(e4m3_low + 64));
  const __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(e4m3_high), c, _mm512_loadu_si512(e4m3_high + 64));
  const __m512i top = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8((char)0x80), 0xf8); /* high | (c & sign) */
  *first = _mm512_unpacklo_epi8(low, top), *second = _mm512_unpackhi_epi8(low, top);
}
LEVEL bool bad(const uint8_t *p) {
  (void)p; /* the table has no number for a code that is none */
  return false;
}
#else
/* The high bytes of words: the even words' numbers, and the odd ones'. */
LEVEL void e4m3_words(__m512i c, v16 *even, v16 *odd) {
  const __m512i f16 = _mm512_and_si512(_mm512_srai_epi16(c, 1), _mm512_set1_epi16((short)0xbf80));
  *even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(f16)), *odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(f16, 16)));
}
LEVEL void widen_e4m3(v16 w[4], __m512i c) {
  e4m3_words(_mm512_unpacklo_epi8(_mm512_setzero_si512(), c), &w[1], &w[0]);
  e4m3_words(_mm512_unpackhi_epi8(_mm512_setzero_si512(), c), &w[3], &w[2]);
}
/* Returns true if a code of a chunk of E4M3 is NaN. */
LEVEL bool bad(const uint8_t *p) {
  const __m512i nan = _mm512_set1_epi8(0x7f);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(p), nan), b = _mm512_and_si512(_mm512_loadu_si512(p + 64), nan);
  return (_mm512_cmpeq_epi8_mask(a, nan) | _mm512_cmpeq_epi8_mask(b, nan)) != 0;
}

#endif

/* Nibbles n of words come last. */
LEVEL __m512i nibbles_last(__m512i packed, int n) {
  switch (n) {
    case 0: return packed;
    case 1: return _mm512_srli_epi16(packed, 4);
    case 2: return _mm512_srli_epi16(packed, 8);
    default: return _mm512_srli_epi16(packed, 12);
  }
}

/* Byte j of words, signed. */
LEVEL __m512i byte_of(__m512i words, int j) {
  switch (j) {
    case 0: return _mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24);
    case 1: return _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 24);
    case 2: return _mm512_srai_epi32(_mm512_slli_epi32(words, 8), 24);
    default: return _mm512_srai_epi32(words, 24);
  }
}

/* Words 32h … 32h + 31 of a chunk whose halves are BF16: of BF16, nibbles, and E4M3 where bytes are looked up. */
LEVEL void words_of(__m512i words[2], mm_cpu_kind kind, const uint8_t *p, int h) {
  if (kind == MM_KIND_BF16) {
    words[0] = _mm512_loadu_si512(p + 128 * h), words[1] = _mm512_loadu_si512(p + 128 * h + 64);
    return;
  }
#ifdef MM_VBMI
  if (mm_cpu_e4m3(kind)) {
    e4m3_words(_mm512_loadu_si512(p + 64 * h), &words[0], &words[1]);
    return;
  }
#endif
  const uint16_t *numbers = kind == MM_KIND_INT4 ? nibbles_int4 : kind == MM_KIND_INT4_OFFSET ? nibbles_offset : nibbles_e2m1;
  const __m512i packed = _mm512_loadu_si512(p), table = _mm512_loadu_si512(numbers);
  MM_UNROLL
  for (int n = 0; n < 2; n++) words[n] = _mm512_permutexvar_epi16(nibbles_last(packed, 2 * h + n), table);
}
LEVEL bool has_words(mm_cpu_kind kind) {
#ifdef MM_VBMI
  if (mm_cpu_e4m3(kind)) return true;
#endif
  return kind == MM_KIND_BF16 || mm_cpu_nibbles(kind);
}

/* Registers 4h … 4h + 3 of a chunk, scales aside. */
LEVEL void widen_half(v16 w[4], mm_cpu_kind kind, const uint8_t *p, int h) {
  if (has_words(kind)) {
    __m512i words[2];
    words_of(words, kind, p, h);
    w[0] = high_half(words[0]), w[1] = low_half(words[0]), w[2] = high_half(words[1]), w[3] = low_half(words[1]);
    return;
  }
#ifndef MM_VBMI
  if (mm_cpu_e4m3(kind)) {
    widen_e4m3(w, _mm512_loadu_si512(p + 64 * h));
    return;
  }
#endif
  MM_UNROLL
  for (int j = 0; j < 4; j++) {
    const int i = 4 * h + j;
    switch (kind) {
      case MM_KIND_F32: w[j] = _mm512_loadu_ps((const float *)(const void *)p + 16 * i); break;
      case MM_KIND_F16: w[j] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p + 32 * i))); break;
      default: w[j] = _mm512_cvtepi32_ps(byte_of(_mm512_loadu_si512(p + 64 * h), j)); break;
    }
  }
}

/* Nibbles of E2M1 doubled, and of INT4, as unsigned numbers (mm_cpu_codes_zero). */
#define E2M1_BYTES   12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
#define INT4_BYTES   8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define OFFSET_BYTES 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
typedef __m512i v64;
LEVEL v64 v64_load(const void *p) { return _mm512_loadu_si512(p); }
LEVEL void v64_store(void *p, v64 a) { _mm512_storeu_si512(p, a); }
LEVEL v64 v64_held(v64 a) {
  __asm__("" : "+v"(a));
  return a;
}
LEVEL void span_widen(v64 w[4], mm_cpu_kind kind, const uint8_t *p) {
  const __m128i numbers = mm_cpu_kinds[kind].e2m1             ? _mm_setr_epi8(E2M1_BYTES)
                          : kind == MM_KIND_INT4_OFFSET_LIMBS ? _mm_setr_epi8(OFFSET_BYTES)
                                                              : _mm_setr_epi8(INT4_BYTES);
  const __m512i table = _mm512_broadcast_i32x4(numbers), low = _mm512_set1_epi8(15);
  const v16 a = _mm512_castsi512_ps(v64_load(p)), b = _mm512_castsi512_ps(v64_load(p + 64));
  const __m512i first = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)), second = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
  w[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(first, low));
  w[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(first, 4), low));
  w[2] = _mm512_shuffle_epi8(table, _mm512_and_si512(second, low));
  w[3] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(second, 4), low));
}
LEVEL float scale_bf16(const uint8_t *p) { return mm_bf16_to_f32((uint16_t)(p[0] | p[1] << 8)); }
/* BF16, `cell` columns each. */
LEVEL v16 span_scales_bf16(const uint8_t *p, uint32_t cell) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15); /* mm_cpu_lane_of */
  uint32_t two;
  if (cell > MM_CHUNK) return v16_set1(scale_bf16(p));
  if (cell == MM_CHUNK) { /* lanes of the first chunk and of the second one take turns by twos */
    memcpy(&two, p, sizeof two);
    const __m512i both = _mm512_set1_epi32((int)two), high = _mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u));
    return _mm512_castsi512_ps(_mm512_mask_slli_epi32(high, 0x3333, both, 16));
  }
  const __m256i raw = cell == 16   ? _mm256_loadu_si256((const __m256i *)(const void *)p)
                      : cell == 32 ? _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p))
                                   : _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(const void *)p));
  const int shift = cell == 16 ? 0 : cell == 32 ? 1 : 2;
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi32(_mm512_srl_epi32(lane, _mm_cvtsi32_si128(shift)), bits));
}
LEVEL v16 span_scales(mm_cpu_kind kind, const uint8_t *p, uint32_t cell) {
  if (!mm_cpu_kinds[kind].e2m1) return span_scales_bf16(p, cell);
  const __m128i sixteens = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15); /* mm_cpu_lane_of */
  const __m128i pairs = _mm_setr_epi8(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
  const __m128i raw = cell == MM_LANE ? _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)p), sixteens)
                                      : _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)(const void *)p), pairs);
  return mm_cpu_kinds[kind].scale == MM_F8_E4M3 ? _mm512_cvtph_ps(e4m3_f16(raw)) : e8m0_f32(raw);
}
#define WORD_TILES(of) of(6, 2) of(4, 2) of(2, 4) of(1, 4)
#ifdef MM_VNNI
#define words_first(total, at, start)      words_begin((at).first ? _mm512_setzero_si512() : (total), (at).last, start)
#define words_total(total, sum, at, start) (sum)
LEVEL v64 words_begin(v64 total, bool last, const int32_t *start) {
  const __m512i before = _mm512_slli_epi32(total, 8);
  return last ? _mm512_add_epi32(before, _mm512_loadu_si512(start)) : before;
}
LEVEL v64 words_step(v64 sum, v64 w, v64 x) { return _mm512_dpbusd_epi32(sum, w, x); }
#else
/* Sums of two products in halves of words: at most 8 · 24 · 128. */
#define words_first(total, at, start)      _mm512_setzero_si512()
#define words_total(total, sum, at, start) words_end((at).first ? _mm512_setzero_si512() : (total), sum, (at).last, start)
LEVEL v64 words_step(v64 sum, v64 w, v64 x) { return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x)); }
LEVEL v64 words_end(v64 total, v64 sum, bool last, const int32_t *start) {
  const __m512i own = _mm512_add_epi32(_mm512_slli_epi32(total, 8), _mm512_madd_epi16(sum, _mm512_set1_epi16(1)));
  return last ? _mm512_add_epi32(own, _mm512_loadu_si512(start)) : own;
}
#endif
LEVEL v64 words_join(v64 high, v64 low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
LEVEL v16 words_f32(v64 total) { return _mm512_cvtepi32_ps(total); }

#ifdef MM_PAIRS
/* A chunk, whose numbers BF16 holds, as pairs in the order of its registers. */
LEVEL void store_pairs(float *to, mm_cpu_kind kind, const uint8_t *p) {
  MM_UNROLL
  for (int h = 0; h < 2; h++) {
    __m512i words[2];
    if (has_words(kind)) {
      words_of(words, kind, p, h);
    } else {
      v16 w[4];
      widen_half(w, kind, p, h);
      MM_UNROLL
      for (int n = 0; n < 2; n++)
        words[n] = _mm512_or_si512(_mm512_castps_si512(w[2 * n]), _mm512_srli_epi32(_mm512_castps_si512(w[2 * n + 1]), 16));
    }
    _mm512_storeu_si512(to + 32 * h, words[0]), _mm512_storeu_si512(to + 32 * h + 16, words[1]);
  }
}
LEVEL v16 v16_pairs(v16 a, v16 b, v16 c) { return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b)); }
#endif
