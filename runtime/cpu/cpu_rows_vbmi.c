/* cpu_rows.h with AVX-512 that permutes bytes: E4M3 is looked up, all else as without. */
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma")))
#define MM_VBMI
#include "runtime/cpu/cpu_lanes_avx512.h"

#include "runtime/cpu/cpu_rows_body.h"

void mm_cpu_rows_vbmi(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, size_t stride,
                      float *sums) {
  (mm_cpu_e4m3(v->kind) ? rows_of[v->kind] : mm_cpu_rows_avx512)(v, first, rows, x, tokens, y, stride, sums);
}
#endif
