/* One thread reads memory as fast as it can: the ceiling that benches print. */
#ifndef MM_TESTS_BENCH_READ_PROBE_H
#define MM_TESTS_BENCH_READ_PROBE_H

#include <stddef.h>
#include <stdint.h>

#include "quant/cpu.h"

#ifdef __x86_64__
#include <immintrin.h>

__attribute__((target("avx512f"))) static inline uint64_t read_wide(const uint8_t *p, size_t n) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i < n; i += 256) {
    _mm_prefetch((const char *)p + i + 4096, _MM_HINT_T0), _mm_prefetch((const char *)p + i + 4160, _MM_HINT_T0);
    _mm_prefetch((const char *)p + i + 4224, _MM_HINT_T0), _mm_prefetch((const char *)p + i + 4288, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i)), b = _mm512_xor_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(p + i + 128)), d = _mm512_xor_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  return (uint64_t)_mm512_reduce_add_epi64(a);
}
#endif

/* Every word of p[n], n a multiple of 256; what comes of them, to be looked at, or nothing would be read. */
static inline uint64_t read_all(const uint8_t *p, size_t n) {
#ifdef __x86_64__
  if (mm_cpu_level() >= MM_CPU_AVX512) return read_wide(p, n);
#endif
  uint64_t s[8] = {0};
  for (size_t i = 0; i < n; i += 64) {
    __builtin_prefetch(p + i + 8192); /* the processor alone does not ask for enough */
    for (int k = 0; k < 8; k++) s[k] += ((const uint64_t *)(const void *)(p + i))[k];
  }
  return s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

#endif
