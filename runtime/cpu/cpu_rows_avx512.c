/* cpu_rows.h with AVX-512: a chunk of a row is eight registers. */
#include "runtime/cpu/cpu_codes.h"
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "runtime/cpu/cpu_lanes_avx512.h"

#include "runtime/cpu/cpu_codes_body.h"
#include "runtime/cpu/cpu_rows_body.h"
#include "runtime/cpu/cpu_vectors_body.h"

const mm_cpu_vectors mm_cpu_vectors_avx512 = MM_VECTORS_HERE;

void mm_cpu_rows_avx512(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                        size_t stride, float *sums) {
  rows_of[v->kind](v, first, rows, x, tokens, y, stride, sums);
}
void mm_cpu_codes_avx512(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                         size_t stride, float *sums) {
  rows_of_codes(v, first, rows, x, tokens, (rows_out){y, stride, sums});
}
float mm_cpu_dot_avx512(const float *a, const float *b, uint32_t n) { return dot(a, b, n); }
#endif
