/* Second moments of the inputs of linears, for rounding with error feedback (quant/feedback.h): NAME.moments of a file of minimax-eval
 * --collect --moments, F32 [blocks, T] or [E, blocks, T] with T = b (b + 1) / 2: the lower triangle, row after row, of each block of b
 * columns along the diagonal of E[x xᵀ]. NAME is the packed name.
 *
 * An expert that saw few tokens says little about its inputs. Its moments are mixed with those of its layer as if PRIOR more tokens had
 * been seen: where all experts have the same inputs (w1, w3) with the mean over all experts and tokens; where each has its own (w2) with
 * that mean's diagonal, averaged over the columns. */
#ifndef MM_CONVERT_SECOND_MOMENTS_H
#define MM_CONVERT_SECOND_MOMENTS_H

#include "convert/calibration/importance.h"
#include "quant/feedback.h"

/* The moments that the matrices of one packed tensor are rounded under. */
typedef struct mm_second_moments {
  const mm_importance *file;
  const mm_importance_entry *entry; /* NULL: none, or no token was seen */
  bool shared;                      /* experts have the same inputs */
  uint32_t k, first;                /* columns; the expert of the tensor's first matrix */
} mm_second_moments;

/* Those of the tensor that rule gives for this layer; its first matrix is of expert `first`. Another number of columns or experts than the
 * model has is an error. */
MM_MUST_USE bool mm_second_moments_find(mm_second_moments *out, const mm_importance *m, const mm_rule *rule, uint32_t layer, uint32_t first,
                                        uint32_t experts, uint32_t k, mm_err *err);

/* Factored moments, of one matrix at a time: what one thread holds. */
typedef struct mm_moment_factors {
  const mm_importance_entry *entry; /* of the matrix that is there; NULL: none */
  uint32_t matrix;
  mm_feedback f;
  double *pool; /* [blocks, T] mean over the entry's matrices */
  double mean;  /* of its diagonal */
  double *h, *work;
  float *scratch;
  size_t upper_cap, moment_cap, order_cap, pool_cap, h_cap, work_cap, scratch_cap;
} mm_moment_factors;

/* Bytes of a thread that rounds the matrices of a tensor, whose entry is not NULL. */
uint64_t mm_moment_factors_bytes(const mm_second_moments *of);
/* Factors the moments of the tensor's matrix `lead` unless they are there. MM_BAD_INPUT E_IMPORTANCE names file, entry and offset of a
 * diagonal that makes them no second moments. */
MM_MUST_USE bool mm_moment_factors_find(mm_moment_factors *w, const mm_second_moments *of, uint32_t lead, mm_err *err);
void mm_moment_factors_close(mm_moment_factors *w); /* accepts a zeroed one */

#endif
