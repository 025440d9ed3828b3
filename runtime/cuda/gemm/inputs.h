/* Products as a step asks for them: inputs rounded as the weight says, the kernel by the number of rows. */
#ifndef MM_CUDA_INPUTS_H
#define MM_CUDA_INPUTS_H

#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/joined.h"
#include "runtime/cuda/core/upload.h"

/* Room for the rounded inputs of one product, kept for the next ones that read the same. */
struct mm_cu_rounded {
  mm_cu_codes codes = {}; /* [max_tokens, widest input]; rows, pitch and scale_pitch are of what it holds */
  __nv_bfloat16 *rows = nullptr;

  const __nv_bfloat16 *coded = nullptr, *rounded = nullptr; /* what codes and rows were made of */
  mm_cu_rounding coded_how = {}, how = {};                  /* and how */
  mm_cu_device device = {};                                 /* the current one */
  bool all_codes = false;                                   /* every dense product of more rows than one multiplies codes, in blocks */
  mm_cu_push push = {};                                     /* where the next product's y goes besides, if its kernel can */
  bool pushed = false;                                      /* whether the last one's did */
  mm_cu_spans spans = {};
  bool decode = false; /* the step under way is one; a prefill's rows keep their bits in chunks of more than 16 */

  bool open(mm_cu_memory *memory, uint32_t tokens, uint32_t widest, mm_err *err);
  /* Room for spans, where the current device runs kernels that have them. */
  bool open_spans(mm_cu_memory *memory, mm_err *err);
  /* These rows are others now. */
  void wrote(const void *x) {
    if (coded == x) coded = nullptr;
    if (rounded == x) rounded = nullptr;
  }

  /* For the kernel that writes x[tokens, k] next: the codes that it is to write too. Nothing where no product would read them. */
  mm_cu_codes codes_too(const __nv_bfloat16 *x, uint32_t tokens, uint32_t k);

  /* Room for such codes that a kernel writes in place of x[tokens, k], which products then read; k % 128 == 0. */
  mm_cu_codes codes_of(const __nv_bfloat16 *x, uint32_t tokens, uint32_t k);

  /* y = x·Wᵀ for any T. */
  cudaError_t linear(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);
  /* The same with two weights of one x[tokens, k], in one launch for a single row of weights that are alike. */
  cudaError_t linear_two(const mm_cu_two &a, uint32_t tokens, cudaStream_t s);
  /* Three of a step of one row for which mm_cu_joins_three holds. */
  cudaError_t linear_three(const mm_cu_three &a, cudaStream_t s);
  /* A step of so many rows takes the kernel of a single one for w. */
  bool is_one(const mm_cu_weight &w, uint32_t tokens) const;
  /* a.middle of a step for which is_one(w) holds. */
  cudaError_t gated(const mm_cu_weight &w, const mm_cu_gated_row &a, cudaStream_t s);
  /* r's lists are those of the step. a.middle and a.pair_out have room for each kernel that the step may take, and for max_tokens. */
  cudaError_t experts(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s);
  /* A step of so many rows takes the kernels that a shared expert joins. */
  bool joins(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_shared &a, uint32_t top_k, uint32_t tokens) const;
  /* Routed experts and the shared one of a step for which joins() holds. */
  cudaError_t experts_shared(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                             const mm_cu_shared &shared, cudaStream_t s);
  /* a.middle[T · top_k, I], in the order of sorted pairs and not rounded, of a step of T > 1; a.pair_out is written too. */
  cudaError_t middle(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s);

 private:
  cudaError_t encode(const __nv_bfloat16 *x, const uint32_t *pick, uint32_t tokens, uint32_t k, const mm_cu_rounding &by, cudaStream_t s);
  cudaError_t round(const __nv_bfloat16 **x, const uint32_t *pick, uint32_t tokens, uint32_t k, const mm_cu_rounding &by, cudaStream_t s);
  /* x as the choice wants it: codes, or rows. */
  cudaError_t prepare(const mm_cu_dispatch &c, const __nv_bfloat16 **x, const uint32_t *pick, uint32_t tokens, const mm_cu_weight &w,
                      cudaStream_t s);
};

#endif
