/* The cases of minimax-bench (bench_cases.h). */
#include "runtime/bench/bench_cases.h"

#include <stdlib.h>
#include <string.h>

static const mm_bench_case cases[] = {
    {"kernels", "m1", 8, 200064, "block_fp8", "block_fp8", "bf16", {1, 16, 64, 256}, 1024, 0},
    {"kernels", "m2", 8, 200064, "block_fp8", "block_fp8", "bf16", {1, 16, 64, 256}, 1024, 0},
    {"layers", "m1", 8, 2048, "block_fp8", "block_fp8", "bf16", {1, 4, 16, 64, 256}, 1024, 0},
    {"layers", "m2", 8, 2048, "block_fp8", "block_fp8", "bf16", {1, 4, 16, 64, 256}, 1024, 0},
    {"decode", "m2", 62, 200064, "block_fp8", "w4a16", "bf16", {1}, 1024, 0},
    {"decode", "m2", 62, 200064, "block_fp8", "nvfp4", "bf16", {1}, 1024, 0},
    {"prefill", "m1", 8, 2048, "block_fp8", "block_fp8", "bf16", {0}, 0, 8192},
    {"prefill", "m2", 8, 2048, "block_fp8", "block_fp8", "bf16", {0}, 0, 8192},
    {"mixed", "m1", 8, 2048, "block_fp8", "block_fp8", "bf16", {63}, 1024, 512},
    {"mixed", "m2", 8, 2048, "block_fp8", "block_fp8", "bf16", {63}, 1024, 512},
};

bool mm_bench_is_subject(const char *word) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (strcmp(cases[i].subject, word) == 0) return true;
  return false;
}

static mm_bench_case adjusted(mm_bench_case c, const mm_bench_args *a) {
  if (a->layers) c.layers = (uint32_t)a->layers;
  if (a->quant) c.quant = a->quant;
  if (a->experts) c.experts = a->experts;
  if (a->head) c.head = a->head;
  if (a->vocab) c.vocab = (uint32_t)strtoul(a->vocab, NULL, 10);
  if (a->batch && c.batch[0]) c.batch[0] = (uint32_t)a->batch, c.batch[1] = 0;
  if (a->context && c.context) c.context = (uint32_t)a->context;
  if (a->tokens && c.tokens) c.tokens = (uint32_t)a->tokens;
  return c;
}

bool mm_bench_case_at(const mm_bench_args *a, size_t i, mm_bench_case *c) {
  for (size_t j = 0; j < sizeof cases / sizeof *cases; j++) {
    if (strcmp(cases[j].subject, a->subject) != 0 || (a->model && strcmp(cases[j].model, a->model) != 0)) continue;
    if (i-- == 0) return *c = adjusted(cases[j], a), true;
  }
  return false;
}

bool mm_bench_check_ranks(const mm_bench_args *a, mm_err *err) {
  if (a->tp & (a->tp - 1))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --tp %u, expected 1, 2, 4 or 8", (unsigned)a->tp);
  if (a->tp % a->ep)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --ep %u, expected a divisor of --tp %u", (unsigned)a->ep,
                   (unsigned)a->tp);
  return true;
}
