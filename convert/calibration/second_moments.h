/* Second moments of the inputs of linears, for rounding with error feedback (quant/feedback.h): NAME.moments of a file of minimax-eval
 * --collect --moments, F32 [blocks, T] or [E, blocks, T] with T = b (b + 1) / 2: the lower triangle, row after row, of each block of b
 * columns along the diagonal of E[x xᵀ]. NAME is the packed name. With --fisher also those of the gradients with respect to the outputs,
 * for coupled rows (quant/coupling.h): NAME.fisher, blocks of r rows of the tensor's first source matrix, then of the others.
 *
 * An expert that saw few tokens says little about its inputs. Its moments are mixed with those of its layer as if PRIOR more tokens had
 * been seen: where all experts have the same inputs (w1, w3) with the mean over all experts and tokens; where each has its own (w2) with
 * that mean's diagonal, averaged over the columns. Of the outputs those of w2 are the same. The gradients' moments are mixed with MEAN of
 * their mean diagonal then: what one text says about them is coarse. */
#ifndef MM_CONVERT_SECOND_MOMENTS_H
#define MM_CONVERT_SECOND_MOMENTS_H

#include "convert/calibration/importance.h"
#include "formats/pack.h"
#include "quant/coupling.h"

/* The moments that the matrices of one packed tensor are rounded under: of their inputs, or of the outputs of one of its pieces. */
typedef struct mm_second_moments {
  const mm_importance *file;
  const mm_importance_entry *entry; /* NULL: none, or no token was seen */
  const mm_moment_blocks *set;      /* of the entry */
  bool shared;                      /* experts have the same inputs; outputs */
  double spread;                    /* added to the diagonal, in multiples of its mean */
  uint32_t k, first;                /* columns, or rows of the piece; the expert of the tensor's first matrix */
  uint32_t block, blocks;           /* the piece's first block in the set, and how many it has */
} mm_second_moments;

/* Those of the tensor that rule gives for this layer; its first matrix is of expert `first`. Another number of columns or experts than the
 * model has is an error. */
MM_MUST_USE bool mm_second_moments_find(mm_second_moments *out, const mm_importance *m, const mm_rule *rule, uint32_t layer, uint32_t first,
                                        uint32_t experts, uint32_t k, mm_err *err);

/* Those of the outputs of source matrix `piece` of the tensor, whose source matrices have rows[pieces] rows. */
MM_MUST_USE bool mm_output_moments_find(mm_second_moments *out, const mm_second_moments *inputs, const mm_rule *rule, const uint32_t *rows,
                                        uint32_t pieces, uint32_t piece, mm_err *err);

/* The moments of a packed tensor: of its inputs, and of the outputs of each of its pieces. */
typedef struct mm_tensor_moments {
  mm_second_moments inputs;                  /* its codes are found under them; entry NULL: each weight's nearest */
  mm_second_moments outputs[MM_PACK_PIECES]; /* rows of the piece are coupled by them; entry NULL: are not */
} mm_tensor_moments;

/* The same of all that tensor t is packed from; rule[i] gives its piece i. */
MM_MUST_USE bool mm_tensor_moments_find(mm_tensor_moments *out, const mm_importance *m, const mm_rule *const *rule, const mm_pack_tensor *t,
                                        uint32_t layer, uint32_t first, uint32_t experts, mm_err *err);
/* The least multiple of `rows` that is whole blocks of coupled rows. */
uint32_t mm_tensor_moments_rows(const mm_tensor_moments *of, uint32_t rows);

/* Factored moments, of one matrix at a time: what one thread holds. */
typedef struct mm_moment_factors {
  const mm_moment_blocks *set; /* of the matrix that is there; NULL: none */
  uint32_t matrix, block;
  mm_feedback f;
  double *pool; /* [blocks, T] mean over the set's matrices */
  double *h, *work;
  float *scratch;
  size_t upper_cap, moment_cap, order_cap, pool_cap, h_cap, work_cap, scratch_cap;
} mm_moment_factors;

/* Factors the moments of the tensor's matrix `lead` unless they are there. MM_BAD_INPUT E_IMPORTANCE names file, entry and offset of a
 * diagonal that makes them no second moments. */
MM_MUST_USE bool mm_moment_factors_find(mm_moment_factors *w, const mm_second_moments *of, uint32_t lead, mm_err *err);
void mm_moment_factors_close(mm_moment_factors *w); /* accepts a zeroed one */

/* What a thread holds to round strips under moments. */
typedef struct mm_moment_rounding {
  mm_moment_factors inputs, outputs;
  uint8_t *coupling; /* scratch of coupled rows */
  size_t coupling_cap;
} mm_moment_rounding;

/* A packed strip: rows from `row` on of a piece of the tensor's matrix `lead`. */
typedef struct mm_moment_strip {
  uint32_t lead, piece, row;
  const mm_scheme *scheme;
} mm_moment_strip;

/* The strip's codes anew, under moments that are there; errors are those of mm_moment_factors_find. */
MM_MUST_USE bool mm_moments_round(mm_moment_rounding *w, const mm_tensor_moments *of, const mm_moment_strip *s, const mm_pack_args *args,
                                  void *const plane[MM_MAX_PLANES], mm_err *err);
/* Bytes of a thread that rounds strips of at most so many rows of a tensor of `pieces` pieces; those of longer strips than usual, too. */
uint64_t mm_moments_bytes(const mm_tensor_moments *of, uint32_t pieces, uint32_t rows);
void mm_moment_rounding_close(mm_moment_rounding *w); /* accepts a zeroed one */

#endif
