/* Models that minimax-bench times: layers of the released models' shapes, whose numbers the device makes itself. */
#ifndef MM_RUNTIME_BENCH_SHAPES_H
#define MM_RUNTIME_BENCH_SHAPES_H

#include "formats/model.h"
#include "loader/bind.h"
#include "loader/dflash.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_bench_shape {
  const char *model; /* "m1", "m2" or "m3" */
  uint32_t layers, vocab;
  const char *quant, *experts, *head; /* schemes of the attention, of the experts and of the head */
  uint32_t rank, tp, ep;              /* whose slices, of how many ranks: 1, 2, 4 or 8; tp / ep of them cut an expert, ep divides tp */
  uint32_t dense;                     /* first layers of M3 that have full attention and a dense MLP; the rest is sparse */
  uint32_t shrink;                    /* widths and experts are divided by it, for tests; 0: 1 */
  uint32_t attn_tp;                   /* ranks that attention, embedding and head are cut for; 0: tp */
} mm_bench_shape;

mm_model mm_bench_model(const mm_bench_shape *s);
/* Weights of one rank without planes (random_weights.h). */
MM_MUST_USE bool mm_bench_weights(const mm_bench_shape *s, const mm_model *m, mm_rank_weights *w, mm_err *err);
/* The shape of the public drafts of M2.5 and M2.7. DFlash: five layers of 24 heads, four of them with a window, six taps, blocks of eight
 * rows. EAGLE-3: one layer of 24 heads, three taps, a head of 32,000 ids. MM_USAGE E_USAGE for a model with fewer than two layers. */
MM_MUST_USE bool mm_bench_draft(const mm_model *m, uint32_t shrink, mm_draft_kind kind, mm_dflash_config *c, mm_err *err);
/* Bytes of one of the `lead` matrices, as stored; its numbers. 0: there is none. */
double mm_bench_bytes(const mm_packed *w);
double mm_bench_parameters(const mm_packed *w);

#ifdef __cplusplus
}
#endif
#endif
