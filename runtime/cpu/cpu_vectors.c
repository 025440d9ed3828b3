/* Loops of this machine's level: those of cpu_vectors.h, and the rows and products of cpu_rows.h. */
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

static mm_cpu_rows_fn *rows_here(const mm_cpu_view *v) {
  const mm_cpu_vectors *here = mm_cpu_vectors_here();
  const bool limbs = mm_cpu_kinds[v->kind].limbs;
#ifdef __x86_64__
  const mm_cpu level = mm_cpu_level();
  if (level == MM_CPU_BF16 && v->pairs && !limbs) return mm_cpu_rows_bf16[v->kind];
  if (level >= MM_CPU_VBMI && limbs) return mm_cpu_codes_vnni;
  if (level >= MM_CPU_VBMI && v->kind == MM_KIND_INT8_CODES) return mm_cpu_rows_vnni;
  if (level >= MM_CPU_VBMI && mm_cpu_e4m3(v->kind)) return mm_cpu_rows_vbmi[v->kind];
#endif
  return limbs ? here->codes : here->rows[v->kind];
}

void mm_cpu_rows(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, size_t stride,
                 float *sums) {
  rows_here(v)(v, first, rows, x, tokens, y, stride, sums);
}

float mm_cpu_dot(const float *a, const float *b, uint32_t n) { return mm_cpu_vectors_here()->dot(a, b, n); }
