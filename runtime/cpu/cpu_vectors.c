/* Which vectors run (cpu_vectors.h). */
#include "runtime/cpu/cpu_vectors.h"

const mm_cpu_vectors *mm_cpu_vectors_here(void) {
  switch (mm_cpu_level()) {
#ifdef __x86_64__
    case MM_CPU_BF16:
    case MM_CPU_VBMI:
    case MM_CPU_AVX512: return &mm_cpu_vectors_avx512;
    case MM_CPU_AVX2: return &mm_cpu_vectors_avx2;
#endif
    default: return &mm_cpu_vectors_plain;
  }
}
