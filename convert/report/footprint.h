/* What the ranks of a plan take of a device's memory: weights by kind, KV cache, lightning state; and whether a device of a given size
 * holds them. */
#ifndef MM_CONVERT_FOOTPRINT_H
#define MM_CONVERT_FOOTPRINT_H

#include "convert/plan/plan.h"

/* The share of a device's memory that weights and cache may take; the rest is for activations and the engine itself (vLLM's
 * gpu_memory_utilization has the same default). */
#define MM_MEMORY_SHARE 0.9

/* Of one rank, in bytes. */
typedef struct mm_footprint {
  uint64_t bytes;                    /* of its files, headers included */
  uint64_t experts, attention, rest; /* of its tensors: rest is embedding, head, norms, routers */
  uint64_t kv_token;                 /* keys and values of a token, BF16, in the layers of its stage with full attention */
  uint64_t state;                    /* of a sequence in the layers with lightning attention, F32 */
} mm_footprint;
mm_footprint mm_footprint_of(const mm_plan *p, uint32_t rank);
/* Of weights, state and `tokens` of cache. */
uint64_t mm_footprint_with(const mm_footprint *f, uint64_t tokens);

typedef struct mm_verdict {
  uint64_t memory; /* of a device, as asked; 0: nothing was asked */
  bool fits;       /* every rank, with a sequence of the model's full length, into MM_MEMORY_SHARE of it */
  uint64_t tokens; /* of cache that the fullest rank has room for beside its weights */
  uint32_t tp;     /* the smallest that fits, ep and pp as asked; 0: none does */
} mm_verdict;
/* Judges a plan, and others of its source with another tp, which are built from the same options. */
MM_MUST_USE bool mm_verdict_make(mm_verdict *v, const mm_plan *p, mm_hf *hf, const mm_plan_options *o, uint64_t memory, mm_err *err);

#endif
