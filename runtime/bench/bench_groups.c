/* Steps of groups of attention (--attn-tp): each group of ranks has sequences of its own, and as many rows. */
#include <stdlib.h>

#include "runtime/bench/bench_steps.h"

/* The rows of all groups, one group's after another's. */
typedef struct mm_bench_groups {
  mm_group_rows rows;
  uint32_t first[MM_BENCH_RANKS + 1];
  char *bytes; /* of the arrays of rows.all */
  size_t cap;
} mm_bench_groups;

bool mm_bench_plan(mm_bench *b, const mm_batch *own, mm_err *err) {
  const uint32_t n = mm_bench_groups_of(b);
  if (n == 1) return true;
  if (!b->groups && !(b->groups = mm_calloc(1, sizeof *b->groups, err))) return false;
  mm_bench_groups *g = b->groups;
  const size_t spans = (size_t)n * own->span_count, outs = (size_t)n * own->out_count, draws = own->sampling ? outs : 0;
  if (!MM_GROW(g->bytes, &g->cap, draws * sizeof *own->sampling + spans * sizeof *own->span + outs * sizeof *own->out + 1, err))
    return false;
  mm_sampling *sampling = (mm_sampling *)(void *)g->bytes;
  mm_span *span = (mm_span *)(void *)(sampling + draws);
  uint32_t *out = (uint32_t *)(void *)(span + spans);
  g->rows = (mm_group_rows){.all = {.tokens = n * own->tokens,
                                    .span_count = (uint32_t)spans,
                                    .span = span,
                                    .out_count = (uint32_t)outs,
                                    .out = out,
                                    .sampling = own->sampling ? sampling : NULL},
                            .first = g->first};
  for (uint32_t k = 0; k < n; k++) {
    g->first[k + 1] = (k + 1) * own->tokens;
    for (uint32_t i = 0; i < own->span_count; i++, span++) *span = own->span[i], span->first += g->first[k];
    for (uint32_t i = 0; i < own->out_count; i++) *out++ = own->out[i] + g->first[k];
    for (uint32_t i = 0; own->sampling && i < own->out_count; i++) *sampling++ = own->sampling[i];
  }
  b->forward.rows = &g->rows;
  if (b->ops->ranks.plan) b->ops->ranks.plan(b->forward.backend, &g->rows);
  return true;
}

void mm_bench_close_groups(mm_bench *b) {
  if (b->groups) free(b->groups->bytes);
  free(b->groups);
  b->groups = NULL;
}
