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
#endif
