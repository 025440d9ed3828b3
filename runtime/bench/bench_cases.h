/* Arguments of minimax-bench, and the cases of each subject. */
#ifndef MM_RUNTIME_BENCH_CASES_H
#define MM_RUNTIME_BENCH_CASES_H

#include <stddef.h>

#include "formats/system/base.h"
#include "runtime/bench/bench_result.h"

typedef struct mm_bench_args {
  const char *subject, *model, *quant, *experts, *head, *vocab, *kv, *index, *act_quant, *device, *draft, *draft_quant;
  uint64_t layers, batch, context, tokens, steps; /* 0: the subject's own */
  uint64_t verify;                                /* 0: no verify rows */
  uint64_t dense;                                 /* UINT64_MAX: the subject's own */
  uint64_t shrink, threads, index_split;
  uint64_t tp, ep;  /* ranks, and among how many groups of them experts are divided */
  uint64_t attn_tp; /* ranks that attention is cut for; 0: tp */
  bool json, quiet;
} mm_bench_args;

/* The subject's case number i of the model asked for, or of all, under the options given; false where it has no more. */
bool mm_bench_case_at(const mm_bench_args *a, size_t i, mm_bench_case *c);
/* Some case is of it. */
bool mm_bench_is_subject(const char *word);
/* tp and ep are ranks that can be: else MM_USAGE. */
MM_MUST_USE bool mm_bench_check_ranks(const mm_bench_args *a, mm_err *err);

#endif
