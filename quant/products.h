/* Products of dense f32 matrices, for rounding and for the backward pass. Every sum is taken in an order that depends on neither the
 * threads nor the width of the CPU's vectors. */
#ifndef MM_QUANT_PRODUCTS_H
#define MM_QUANT_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>

/* Rows of f32 numbers; stride: numbers from one row to the next. */
typedef struct mm_dense {
  const float *at;
  size_t stride;
} mm_dense;

/* y[rows, k] += a[rows, n] · w[n, k]; stride: that of y. */
void mm_product_add(float *y, size_t stride, mm_dense a, mm_dense w, uint32_t rows, uint32_t n, uint32_t k);
/* to[columns, rows] = from[rows, columns]ᵀ; stride: that of `to`. */
void mm_product_turn(float *to, size_t stride, mm_dense from, uint32_t rows, uint32_t columns);

#endif
