/* Calibration: what the linears of a model are given while a text runs through it. Mean squares of the input channels weigh errors when
 * scales are searched (minimax-convert --importance); largest magnitudes become static scales of activations (--act-scales). Second moments
 * of the inputs, and of the gradients of the log-likelihood with respect to the outputs, are what --method gptq rounds under. */
#ifndef MM_RUNTIME_CALIBRATION_H
#define MM_RUNTIME_CALIBRATION_H

#include "loader/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_calibration mm_calibration;

/* Room for every matrix of the checkpoint, 8 bytes for each input channel of each expert. Borrows the shards until close. */
mm_calibration *mm_calibration_open(const mm_shards *s, mm_err *err);
void mm_calibration_close(mm_calibration *c); /* accepts NULL */

/* Columns of a block of second moments, at least and at most. */
enum { MM_MOMENTS_LEAST = 128, MM_MOMENTS_MOST = 1024 };
/* From now on second moments are summed too: of all pairs of input channels that lie in one block of `columns` (of all pairs, where a
 * matrix has no more columns), 8 bytes each: *bytes in all. A machine without that memory is MM_LIMIT
 * E_MEMORY. Of checkpoints with --tp 1
 * (MM_UNSUPPORTED E_PARALLEL), on devices that give rows, not sums. */
MM_MUST_USE bool mm_calibration_gather_moments(mm_calibration *c, uint32_t columns, uint64_t *bytes, mm_err *err);

/* From now on second moments of gradients are summed too (mm_calibration_add_fisher): of all pairs of outputs of the matrices
 * tensor[count], indices of the manifest's tensors, that lie in one block of `rows` rows of a source matrix. Memory and refusals as above.
 */
MM_MUST_USE bool mm_calibration_gather_fisher(mm_calibration *c, uint32_t rows, const uint32_t *tensor, uint32_t count, uint64_t *bytes,
                                              mm_err *err);
/* Adds gradients dy[rows, w->n] with respect to the outputs of matrix `lead` of w. */
void mm_calibration_add_fisher(mm_calibration *c, const mm_packed *w, uint32_t lead, const float *dy, uint32_t rows);

/* Adds to the inputs of matrix `lead` of w on this rank: row i is x[pick[i]], or x[i] when pick is NULL; x[…, w->k], as the op before left
 * it, not rounded. Ranks add at the same time, each the columns that it owns; rank 0 alone those that all have. */
void mm_calibration_add(mm_calibration *c, uint32_t rank, const mm_packed *w, uint32_t lead, const float *x, const uint32_t *pick,
                        uint32_t rows);

/* Sums over `rows` inputs of one matrix on this rank, for a device that adds them up itself. */
typedef struct mm_calibration_sums {
  const double *square; /* [w->k] */
  const float *amax;    /* [w->k] */
  uint64_t rows;
} mm_calibration_sums;
/* The same as mm_calibration_add of those rows. */
void mm_calibration_add_sums(mm_calibration *c, uint32_t rank, const mm_packed *w, uint32_t lead, const mm_calibration_sums *sums);

/* Writes a safetensors file. For every matrix NAME that was given anything, k columns uncut, E experts (absent where there are none):
 *   NAME.mean_square  F32 [E, k]       of each channel over the rows; 0 for an expert without rows
 *   NAME.amax         F32 [E] or [1]   largest magnitude
 *   NAME.rows         I64 [E] or [1]   tokens seen
 * and, where second moments are gathered in blocks of b columns, b = k for matrices of fewer:
 *   NAME.moments      F32 [E, ceil(k / b), b (b + 1) / 2]   means of x_i x_j over the rows, j <= i: the lower triangle of each block, row
 *                                                           after row; 0 past the last column and for an expert without rows
 * and, where gradients are gathered in blocks of r rows, r = the rows of the tensor's largest source matrix where those are fewer:
 *   NAME.fisher       F32 [E, blocks, r (r + 1) / 2]   means of dy_i dy_j in the same form: blocks of the rows of the tensor's first
 *                                                      source matrix (q; w1), then of the others; 0 past a matrix's last row
 *   NAME.fisher_rows  I64 [E] or [1]                   tokens whose gradients were added
 * MM_INTEGRITY E_NONFINITE for a mean or magnitude that is not finite in F32. */
MM_MUST_USE bool mm_calibration_write(const mm_calibration *c, int fd, const char *path, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
