/* The inputs of a product, added up on the device. */
#ifndef MM_CUDA_COLLECT_H
#define MM_CUDA_COLLECT_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

/* Sums of one weight's inputs, in device memory. */
struct mm_cu_sums {
  double *square;           /* [lead, k] sums of squares, in the order of rows */
  float *amax;              /* [lead, k] largest magnitudes */
  unsigned long long *rows; /* [lead] */
  uint32_t lead, k;
};

/* Rows of k numbers that a product is given. */
struct mm_cu_given {
  const __nv_bfloat16 *x;
  const uint32_t *pick;   /* row i is x[pick[i] / each], or x[i] when NULL */
  uint32_t each;          /* 1, or choices of a token */
  const int32_t *slot;    /* unless NULL, rows of slot -1 are left out: by row of x */
  const uint32_t *offset; /* [lead + 1]: rows [offset[e], offset[e + 1]) are expert e's; NULL: all are matrix 0's, */
  uint32_t rows;          /* so many */
};
cudaError_t mm_cu_add_inputs(const mm_cu_sums &to, const mm_cu_given &in, cudaStream_t s);

#endif
