/* minimax-bench choices: which kernels the CUDA backend takes for the released models' products. No GPU is asked. */
#ifndef MM_RUNTIME_BENCH_CHOICES_H
#define MM_RUNTIME_BENCH_CHOICES_H

#include "formats/system/base.h"
#include "runtime/bench/bench_cases.h"

/* Every scheme, or those that the options name, on sm_90a and elsewhere: lines of text, or of JSON. MM_LIMIT. */
MM_MUST_USE bool mm_bench_print_choices(const mm_bench_args *a, mm_err *err);

#endif
