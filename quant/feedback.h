/* Rounding with error feedback (GPTQ, arXiv 2210.17323, in the equivalent form LDLQ of arXiv 2307.13304). Rounding each weight by itself
 * minimises (w - ŵ)²; the error of a linear's output is (w - ŵ) H (w - ŵ)ᵀ with H the second moments of its inputs. With
 * H = (I + U) D (I + U)ᵀ, U strictly upper triangular, that error is Σ d_j ((w - ŵ)(I + U))_j²: column j is rounded after the errors of
 * the columns before it, times U, are added to it. The columns of the largest moments come first.
 *
 * Two steps repeat after that, which both only lower the error: each group's scale becomes the one of least error under its codes, on the
 * scheme's own grid of scales; then each code, one after another, becomes the best one under all others. A row whose weights all of this
 * leaves with less than a third of the decibels that the scheme keeps of a Gaussian matrix gets their nearest codes under its scales.
 *
 * H is a row of blocks along the diagonal. Moments between blocks are taken as 0. */
#ifndef MM_QUANT_FEEDBACK_H
#define MM_QUANT_FEEDBACK_H

#include "quant/quant.h"

/* Columns of a block at most. */
#define MM_FEEDBACK_BLOCK 1024

/* The factors of one matrix's moments, block by block. In a block of n columns, column i of the order is column order[i]. */
typedef struct mm_feedback {
  uint32_t k, block; /* columns; columns of a block: k, or a multiple of 128 of which the last block may have fewer */
  float *upper;      /* [blocks, block, stride] U by its columns: row j holds U[i][j], i < j */
  float *moment;     /* [blocks, block, stride] damped H, in the same order */
  uint32_t *order;   /* [k] within the block */
} mm_feedback;

/* Floats between rows of a block. */
static inline uint32_t mm_feedback_stride(uint32_t block) { return (block + 7) / 8 * 8; }
/* Floats of `upper`, and of `moment`. */
static inline uint64_t mm_feedback_floats(uint32_t blocks, uint32_t block) { return (uint64_t)blocks * block * mm_feedback_stride(block); }
/* Floats that mm_feedback_round needs as scratch: for each column, six numbers of each of 16 rows, one of one row, and a place. */
static inline uint64_t mm_feedback_scratch(uint32_t k) { return (6 * 16 + 2) * (uint64_t)k + 16; }

/* Factors block b of f from h[n, n], its moments (only h[i][j] with j <= i is read), where those of the matrix have a mean diagonal of 1.
 * They are damped by a hundredth of the block's mean diagonal and a millionth: columns of zeros are rounded to nearest. work[n, n].
 * False where h is no matrix of second moments: *column has a variance that is not above 0, given the columns of smaller moments. */
bool mm_feedback_factor(mm_feedback *f, uint32_t b, const double *h, double *work, uint32_t *column);

/* Rounds the strip that scheme s packed into plane[] anew: codes, and scales where they belong to one row and are no powers of two. Rows
 * are independent of each other, so that every split into strips gives the same bytes; the same on every CPU. */
void mm_feedback_round(const mm_feedback *f, const mm_scheme *s, const mm_pack_args *a, void *const plane[MM_MAX_PLANES], float *scratch);

#endif
