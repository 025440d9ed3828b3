/* Which SIMD level runs. A hot loop is written once, as a fixed-length plain C loop in an always-inlined body, and compiled for
 * each level by MM_VERSIONS: the levels run the same IEEE operations element by element, so their bytes are equal by
 * construction (fused multiply-add is kept out below, since it would round once where the plain code rounds twice). */
#ifndef MM_QUANT_CPU_H
#define MM_QUANT_CPU_H

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF /* gcc does not contract under -std=c11 */
#endif

#define MM_INLINE static inline __attribute__((always_inline))

/* AVX512: F, BW, DQ and VL. VBMI: with VBMI and VNNI too; loops that need neither run as at AVX512. BF16: with products of BF16 too. */
typedef enum mm_cpu { MM_CPU_PLAIN, MM_CPU_AVX2, MM_CPU_AVX512, MM_CPU_VBMI, MM_CPU_BF16, MM_CPU_BEST = MM_CPU_BF16 } mm_cpu;

/* The best level of this machine. */
mm_cpu mm_cpu_best(void);
/* The same, or the limit set below. Any thread. */
mm_cpu mm_cpu_level(void);
/* Never above `most` from now on: for tests and benchmarks that compare levels. */
void mm_cpu_limit(mm_cpu most);

/* Defines `static void NAME PARAMS`, which runs NAME_body ARGS compiled for the machine's level. */
#define MM_VERSIONS(name, params, args) MM_VERSIONS_BY_WIDTH(name, params, args, args, args)
/* The same where the body has its own arguments at levels without (NARROW) and with (WIDE) vectors of 32 bytes and more. */
#define MM_VERSIONS_BY_WIDTH(name, params, args, narrow, wide) MM_VERSIONS_BY_LEVEL(name, params, args, narrow, wide, wide)
/* The same where it has its own arguments at levels with vectors of 16, 32 and 64 bytes. */
#ifdef __x86_64__
#define MM_VERSIONS_BY_LEVEL(name, params, args, narrow, wide, widest)                                                   \
  static void name##_plain params { name##_body narrow; }                                                                \
  __attribute__((target("avx2"))) static void name##_avx2 params { name##_body wide; }                                   \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void name##_avx512 params { name##_body widest; } \
  static void name params {                                                                                              \
    switch (mm_cpu_level()) {                                                                                            \
      case MM_CPU_PLAIN: name##_plain args; return;                                                                      \
      case MM_CPU_AVX2: name##_avx2 args; return;                                                                        \
      case MM_CPU_AVX512:                                                                                                \
      case MM_CPU_VBMI:                                                                                                  \
      case MM_CPU_BF16: name##_avx512 args; return;                                                                      \
    }                                                                                                                    \
  }
#else
#define MM_VERSIONS_BY_LEVEL(name, params, args, narrow, wide, widest) \
  static void name params { name##_body narrow; }
#endif

#endif
