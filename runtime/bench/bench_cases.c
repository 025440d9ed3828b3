/* The cases of minimax-bench (bench_cases.h). */
#include "runtime/bench/bench_cases.h"

#include <stdlib.h>
#include <string.h>

/* M3 in its release's schemes; 60 layers are the whole of it. */
#define M3(subject, layers, vocab, experts, ...) \
  { subject, "m3", layers, vocab, "mxfp8", experts, "bf16", __VA_ARGS__, 0, 0 }

static const mm_bench_case cases[] = {
    {"kernels", "m1", 8, 200064, "block_fp8", "block_fp8", "bf16", {1, 16, 64, 256}, 1024, 0, 0, 0, 0},
    {"kernels", "m2", 8, 200064, "block_fp8", "block_fp8", "bf16", {1, 16, 64, 256}, 1024, 0, 0, 0, 0},
    M3("kernels", 4, 200064, "mxfp8", {1, 16, 64, 256}, 1024, 0, 1),
    {"layers", "m1", 8, 2048, "block_fp8", "block_fp8", "bf16", {1, 4, 16, 64, 256}, 1024, 0, 0, 0, 0},
    {"layers", "m2", 8, 2048, "block_fp8", "block_fp8", "bf16", {1, 4, 16, 64, 256}, 1024, 0, 0, 0, 0},
    M3("layers", 4, 2048, "mxfp8", {1, 4, 16, 64, 256}, 1024, 0, 0),
    {"decode", "m2", 62, 200064, "block_fp8", "w4a16", "bf16", {1}, 1024, 0, 0, 0, 0},
    {"decode", "m2", 62, 200064, "block_fp8", "nvfp4", "bf16", {1}, 1024, 0, 0, 0, 0},
    M3("decode", 60, 200064, "nvfp4", {1}, 1024, 0, 3),
    {"drafts", "m2", 62, 200064, "block_fp8", "nvfp4", "bf16", {1, 16, 64}, 512, 0, 0, 0, 0},
    {"prefill", "m1", 8, 2048, "block_fp8", "block_fp8", "bf16", {0}, 0, 8192, 0, 0, 0},
    {"prefill", "m2", 8, 2048, "block_fp8", "block_fp8", "bf16", {0}, 0, 8192, 0, 0, 0},
    M3("prefill", 4, 2048, "mxfp8", {0}, 0, 8192, 0),
    M3("attention", 2, 2048, "mxfp8", {0}, 131072, 8192, 1),
    {"mixed", "m1", 8, 2048, "block_fp8", "block_fp8", "bf16", {63}, 1024, 512, 0, 0, 0},
    {"mixed", "m2", 8, 2048, "block_fp8", "block_fp8", "bf16", {63}, 1024, 512, 0, 0, 0},
    M3("mixed", 4, 2048, "mxfp8", {63}, 1024, 512, 0),
};

bool mm_bench_is_subject(const char *word) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (strcmp(cases[i].subject, word) == 0) return true;
  return false;
}

/* M3 is measured where it is named: the whole of it fits no single GPU. */
static bool is_wanted(const mm_bench_case *c, const mm_bench_args *a) {
  return strcmp(c->subject, a->subject) == 0 && strcmp(c->model, a->model ? a->model : strcmp(c->model, "m3") ? c->model : "") == 0;
}

static mm_bench_case adjusted(mm_bench_case c, const mm_bench_args *a) {
  if (a->layers) c.layers = (uint32_t)a->layers;
  if (strcmp(c.model, "m3") == 0 && a->dense != UINT64_MAX) c.dense = (uint32_t)a->dense;
  c.dense = (uint32_t)mm_min(c.dense, c.layers), c.shrink = (uint32_t)a->shrink;
  if (a->quant) c.quant = a->quant;
  if (a->experts) c.experts = a->experts;
  if (a->head) c.head = a->head;
  if (a->vocab) c.vocab = (uint32_t)strtoul(a->vocab, NULL, 10);
  if (a->batch && c.batch[0]) c.batch[0] = (uint32_t)a->batch, c.batch[1] = 0;
  const bool drafts = strcmp(c.subject, "drafts") == 0;
  if (drafts) c.verify = (uint32_t)a->verify;
  if (a->verify && !drafts && c.batch[0] && strcmp(c.subject, "mixed") != 0) {
    c.verify = (uint32_t)a->verify;
    c.batch[0] = (uint32_t)mm_max(a->batch, 1) * c.verify, c.batch[1] = 0;
  }
  if (a->context && c.context) c.context = (uint32_t)a->context;
  if (a->tokens && c.tokens) c.tokens = (uint32_t)a->tokens;
  return c;
}

bool mm_bench_case_at(const mm_bench_args *a, size_t i, mm_bench_case *c) {
  for (size_t j = 0; j < sizeof cases / sizeof *cases; j++) {
    if (!is_wanted(&cases[j], a)) continue;
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
  if (!a->attn_tp || a->attn_tp == a->tp) return true;
  if (a->tp % a->attn_tp)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --attn-tp %u, expected a divisor of --tp %u", (unsigned)a->attn_tp,
                   (unsigned)a->tp);
  const bool steps = strcmp(a->subject, "layers") == 0 || strcmp(a->subject, "decode") == 0;
  if (!steps || a->verify)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --attn-tp with %s, expected decode steps of layers or decode",
                   steps ? "--verify" : a->subject);
  if (a->batch % (a->tp / a->attn_tp))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --batch %u, expected a multiple of the %u groups of --attn-tp",
                   (unsigned)a->batch, (unsigned)(a->tp / a->attn_tp));
  return true;
}
