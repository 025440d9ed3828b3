/* SIMD level of this machine, found once. */
#include "quant/cpu.h"

#include <stdatomic.h>

static mm_cpu detect(void) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return MM_CPU_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return MM_CPU_AVX2;
#endif
  return MM_CPU_PLAIN;
}

static atomic_int chosen = -1; /* not looked at yet */

mm_cpu mm_cpu_level(void) {
  int level = atomic_load_explicit(&chosen, memory_order_relaxed);
  if (level < 0) atomic_store_explicit(&chosen, level = (int)detect(), memory_order_relaxed);
  return (mm_cpu)level;
}

void mm_cpu_limit(mm_cpu most) {
  mm_cpu best = detect();
  atomic_store_explicit(&chosen, (int)(best < most ? best : most), memory_order_relaxed);
}
