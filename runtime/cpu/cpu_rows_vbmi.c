/* cpu_rows.h with AVX-512 that permutes bytes: E4M3 is looked up, all else as without. */
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma")))
#define MM_VBMI
#include "runtime/cpu/cpu_lanes_avx512.h"

#include "runtime/cpu/cpu_rows_body.h"

mm_cpu_rows_fn *const *const mm_cpu_rows_vbmi = rows_of;
#endif
