/* Products whose inputs are rounded too (quant/activation.c): as codes, E4M3 under f32 scales for 128 columns of a row or for all of it,
 * times weights of E4M3; or as the numbers that codes of any kind stand for. Host launch functions, as in kernels.h. */
#ifndef MM_CUDA_FP8_H
#define MM_CUDA_FP8_H

#include "runtime/cuda/core/kernels.h"

/* Rows in the order of a route (mm_cu_route): row i < *places belongs to pair[i]; pairs of other ranks' experts have an id of ~0. */
struct mm_cu_placed {
  const uint32_t *pair, *places, *id;
};
inline mm_cu_placed mm_cu_placed_of(const mm_cu_route &r) { return {r.pair, r.offset + r.experts, r.id}; }

/* The rows that are rounded: row i is row i of x[…, k], or row rows[i]. */
struct mm_cu_inputs {
  const __nv_bfloat16 *x;
  uint32_t k;
  const uint32_t *rows; /* or NULL */
  mm_cu_placed of;      /* as many rows as pairs, of which those from *places on stand for nothing; or {}: rows of no route */
};
/* A scale of the whole row stands at each of its groups; where it is of other ranks' columns too, all of them call this, of the same rows
 * or of as many pairs. MM_ACT_MXFP8, of rows of no route and k % 128 == 0: scale holds words of four exponents for 128 columns, the first
 * 32 columns' in the low byte. 32 columns whose scale is at most 2^4 below the largest of their 128 take that one: numbers below 2^-6 of it
 * are rounded to steps of 2^-9 of it, so that they are off by 7e-5 of the largest of the 32 at most. */
cudaError_t mm_cu_encode(const mm_cu_codes &to, const mm_cu_inputs &in, const mm_cu_rounding &how, cudaStream_t s);
/* Largest magnitudes that ranks exchange for rows whose columns are split over them: largest[capacity]. Rows of a route are indexed by
 * pair, since ranks with different experts have different row orders; rows that a rank does not hold have 0. */
struct mm_cu_whole_rows {
  struct mm_cu_peers *peers;
  float *largest;
  uint64_t capacity;
};
/* y[i] = the numbers that row i's codes stand for, in bf16: within 2^-9 of them. For products that read bf16. y may be in.x. Where the
 * rounding has ranks, all of them call this, of the same rows or of as many pairs. */
cudaError_t mm_cu_round(__nv_bfloat16 *y, uint32_t count, const mm_cu_inputs &in, const mm_cu_rounding &how, cudaStream_t s);
/* how.ranks->largest[rows or pairs, mm_cu_published_largest] becomes that of all ranks' columns, where the rounding has ranks. */
cudaError_t mm_cu_publish_largest(const mm_cu_rounding &how, uint32_t rows, const mm_cu_inputs &in, cudaStream_t s);
/* The same for the rows of middle[slots, 16, k] that r's slots name, of so many tokens, in place, times r.slot_weight and, unless NULL,
 * global[expert]. */
cudaError_t mm_cu_round_slots(__nv_bfloat16 *middle, uint32_t tokens, uint32_t k, const mm_cu_route &r, const float *global,
                              const mm_cu_rounding &how, cudaStream_t s);

/* y[T, n] = x·Wᵀ; exactly one of y and y32 is given. */
struct mm_cu_product {
  mm_cu_codes x; /* rows: T */
  __nv_bfloat16 *y;
  float *y32;
  mm_cu_push push; /* y's rows, by mm_cu_gemm_fp8 with n % 8 == 0 */
};
cudaError_t mm_cu_gemm_fp8(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s);
/* The same of rows and weights in MXFP8. */
cudaError_t mm_cu_gemm_mx(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s);
/* The same for T ≤ MM_CU_FEW, at the memory's rate, where a cluster of blocks holds the rows. */
cudaError_t mm_cu_small_batch_fp8(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s);

/* The same for any T by mma.sync, in code for sm_89. Not pushed. */
cudaError_t mm_cu_gemm_codes(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s);
/* rows[count, k], of which those from *of.places on stand for nothing, become codes in place: k codes and k / 128 scales at the beginning
 * of each. k: a multiple of 128. */
cudaError_t mm_cu_encode_placed(__nv_bfloat16 *rows, uint32_t count, uint32_t k, const mm_cu_placed &of, cudaStream_t s);
/* mm_cu_experts_gemm of x's codes by the same products: a.x is not read, a.middle holds the codes of w2's inputs afterwards. */
cudaError_t mm_cu_experts_codes(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_codes &x,
                                const mm_cu_experts &a, cudaStream_t s);

/* y[T, H] as mm_cu_experts_gemm's, with r's sorted pairs; the products of gate and up are rounded too. */
struct mm_cu_rounded_experts {
  mm_cu_codes x;           /* rows: T */
  mm_cu_codes middle;      /* rows: T · top_k, pitch: I */
  __nv_bfloat16 *rows;     /* [T · top_k, I], of w2 whose inputs have no scale for 128 columns; else not used */
  __nv_bfloat16 *pair_out; /* [T · top_k, H] */
  __nv_bfloat16 *y;
  mm_cu_push push; /* y's rows */
};
cudaError_t mm_cu_experts_fp8(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_rounded_experts &a,
                              cudaStream_t s);
/* y[T, width] = Σ pair_out[T · top_k, width] of a row's choices, in their order; zeros where it has none. width % 8 == 0. */
cudaError_t mm_cu_sum_choices(__nv_bfloat16 *y, const mm_cu_push &push, const __nv_bfloat16 *pair_out, const mm_cu_route &r,
                              uint32_t tokens, uint32_t width, cudaStream_t s);

#endif
