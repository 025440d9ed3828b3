/* Error feedback over the rows of a matrix, too. quant/feedback.h minimises the error of each output by itself, tr(E H Eᵀ) with E = W - Ŵ;
 * what the errors of all outputs together cost is tr(G E H Eᵀ), with G the second moments of the gradients of the log-likelihood with
 * respect to the outputs (arXiv 2505.22988). With H = (I + U) D (I + U)ᵀ and G = (I + V) C (I + V)ᵀ that is
 * Σ C_i D_j ((I + V)ᵀ E (I + U))_ij²: each weight is rounded after the errors of the rows and columns before it are added to it. After that
 * each code, one after another, becomes the best one under all others, some times over. Scales stay as they are.
 *
 * G is a row of blocks along the diagonal, as H is. A block of rows is rounded under one block of columns after the other. */
#ifndef MM_QUANT_COUPLING_H
#define MM_QUANT_COUPLING_H

#include "quant/feedback.h"

/* Bytes that mm_feedback_couple needs as scratch, for matrices of k columns. */
uint64_t mm_feedback_couple_bytes(uint32_t k, uint32_t column_block, uint32_t row_block);

/* Rounds the codes of a strip anew that mm_feedback_round has packed into plane[]. rows: the factors of G, in which k counts rows; the
 * strip begins with row first · rows->block of its matrix, and ends with a block or the matrix. Blocks of rows are independent of each
 * other: every split into strips gives the same bytes, and so does every CPU. Rows of zeros, rows with scales that the block's largest
 * weight makes too small or too large to compute with, and rows that this would leave with less than a third of the decibels that the
 * scheme keeps of a Gaussian matrix keep their codes, and so does a block of which there are more such rows at the third attempt. */
void mm_feedback_couple(const mm_feedback *columns, const mm_feedback *rows, uint32_t first, const mm_scheme *s, const mm_pack_args *a,
                        void *const plane[MM_MAX_PLANES], void *scratch);

#endif
