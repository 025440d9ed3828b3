/* The memory that the ranks of a plan need on a device: weights by kind, KV cache, lightning state; and the verdict on a device of a given
 * size. */
#ifndef MM_CONVERT_FOOTPRINT_H
#define MM_CONVERT_FOOTPRINT_H

#include "convert/plan/plan.h"
#include "loader/stream/capacity.h"
#include "loader/stream/cards.h"

/* The footprint of one rank, in bytes. */
typedef struct mm_footprint {
  uint64_t bytes;                    /* of its files, headers included */
  uint64_t experts, attention, rest; /* of its tensors: rest is embedding, head, norms, routers */
  uint64_t kv_token;                 /* keys and values of a token, BF16, in the layers of its stage with full attention */
  uint64_t state;                    /* of a sequence in the layers with lightning attention, F32 */
} mm_footprint;
mm_footprint mm_footprint_of(const mm_plan *p, uint32_t rank);

/* The GPUs that a plan is judged for, and what minimax-serve would be given for them. */
typedef struct mm_gpu_demand {
  mm_gpu_card card;
  bool kv_fp8, index_fp8; /* --kv-cache-dtype and --index-cache-dtype fp8; else bf16 */
} mm_gpu_demand;

typedef struct mm_verdict {
  uint64_t memory;        /* of a device, as asked; 0: nothing was asked */
  bool kv_fp8, index_fp8; /* of the cache; else bf16 */
  mm_gpu_card card;       /* that was asked for by name; else {NULL} */
  bool fits;         /* every rank, with a sequence of the model's full length, into MM_GPU_SHARE of it; and the cuda backend takes it */
  uint64_t tokens;   /* of KV cache that minimax-serve makes on such devices, at most as many as its requests can fill; 0 if refused */
  uint32_t tp;       /* the smallest that fits, ep and pp as asked; 0: none does */
  char refused[384]; /* why the cuda backend does not take the plan, or the card; "" where it does */
} mm_verdict;
/* Judges a plan, and others of its source with another tp, which are built from the same options. MM_UNSUPPORTED E_SCHEME for an FP8 index
 * cache of a model without index keys. */
MM_MUST_USE bool mm_verdict_make(mm_verdict *v, const mm_plan *p, mm_hf *hf, const mm_plan_options *o, const mm_gpu_demand *d, mm_err *err);

#endif
