/* SIMD level of this machine, found once. */
#include "quant/cpu.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stdbool.h>

#ifdef __x86_64__
/* clang 14 does not know the name "f16c". */
static bool converts_f16(void) {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

mm_cpu mm_cpu_best(void) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) return MM_CPU_AVX512;
    return __builtin_cpu_supports("avx512bf16") ? MM_CPU_BF16 : MM_CPU_VBMI;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_f16()) return MM_CPU_AVX2;
#endif
  return MM_CPU_PLAIN;
}

static atomic_int chosen = -1; /* not looked at yet */

mm_cpu mm_cpu_level(void) {
  int level = atomic_load_explicit(&chosen, memory_order_relaxed);
  if (level < 0) atomic_store_explicit(&chosen, level = (int)mm_cpu_best(), memory_order_relaxed);
  return (mm_cpu)level;
}

void mm_cpu_limit(mm_cpu most) {
  const mm_cpu best = mm_cpu_best();
  atomic_store_explicit(&chosen, (int)(best < most ? best : most), memory_order_relaxed);
}
