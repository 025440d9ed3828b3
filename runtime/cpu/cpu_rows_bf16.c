/* cpu_rows.h with products of BF16 pairs, for inputs that BF16 holds: two exact products a lane and instruction, added one after the other,
 * which is what the other levels do with the same numbers as f32. Numbers below 2^-126 count as zero here. */
#include "runtime/cpu/cpu_vectors.h"

#ifdef __x86_64__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")))
#define MM_VBMI
#define MM_PAIRS
#include "runtime/cpu/cpu_lanes_avx512.h"

#include "runtime/cpu/cpu_rows_body.h"

mm_cpu_rows_fn *const *const mm_cpu_rows_bf16 = rows_of;
#endif
