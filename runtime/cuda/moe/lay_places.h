/* Rows in the order and the layout of the products in experts_prefill.cu. Host launch functions, as in kernels.h. */
#ifndef MM_CUDA_LAY_PLACES_H
#define MM_CUDA_LAY_PLACES_H

#include "runtime/cuda/core/kernels.h"

/* Places: the sorted pairs of r, offset[experts] of them. piece: columns of a piece of the weight's codes, 16 or 32; k is whole such
 * pieces. */

/* to[place, k] = the row of x[tokens, k] that the place's pair is of, laid out. place[tokens · top_k] is room that it uses. */
cudaError_t mm_cu_lay_tokens(__nv_bfloat16 *to, const __nv_bfloat16 *x, uint32_t *place, const mm_cu_route &r, uint32_t tokens, uint32_t k,
                             uint32_t piece, cudaStream_t s);
/* rows[place, k], in place: the numbers that their codes stand for (mm_cu_round), laid out. */
cudaError_t mm_cu_lay_rounded(__nv_bfloat16 *rows, const mm_cu_rounding &how, const mm_cu_route &r, uint32_t tokens, uint32_t k,
                              uint32_t piece, cudaStream_t s);

#endif
