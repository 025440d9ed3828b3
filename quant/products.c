/* Dense products in tiles of four rows: each sum of a tile has a register of 16 lanes. */
#include "quant/products.h"

#include "quant/cpu.h"

enum { LANES = 16, TILE = 4, WIDE = 2 }; /* rows of a tile, and vectors of columns */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Before a loop over registers, which gcc would leave in memory; clang unrolls those by itself. */
#ifdef __clang__
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* WIDE vectors of columns of `rows` rows, at most TILE. */
MM_INLINE void add_tile(float *const y[TILE], const float *const a[TILE], uint32_t rows, mm_dense w, uint32_t n) {
  lanes sum[TILE][WIDE];
  UNROLL
  for (int t = 0; t < TILE; t++) {
    UNROLL
    for (int v = 0; v < WIDE; v++) sum[t][v] = *(const lanes *)(y[t] + v * LANES);
  }
  for (uint32_t i = 0; i < n; i++, w.at += w.stride) {
    const lanes first = *(const lanes *)w.at, second = *(const lanes *)(w.at + LANES);
    UNROLL
    for (int t = 0; t < TILE; t++) {
      sum[t][0] += a[t][i] * first;
      sum[t][1] += a[t][i] * second;
    }
  }
  UNROLL
  for (uint32_t t = 0; t < TILE; t++) {
    UNROLL
    for (int v = 0; t < rows && v < WIDE; v++) *(lanes *)(y[t] + v * LANES) = sum[t][v];
  }
}

MM_INLINE void product_add_body(float *y, size_t stride, mm_dense a, mm_dense w, uint32_t rows, uint32_t n, uint32_t k) {
  for (uint32_t t = 0; t < rows; t += TILE) {
    const uint32_t count = rows - t < TILE ? rows - t : TILE;
    uint32_t c = 0;
    for (; c + WIDE * LANES <= k; c += WIDE * LANES) {
      float *to[TILE];
      const float *from[TILE];
      for (uint32_t i = 0; i < TILE; i++) {
        const size_t row = t + (i < count ? i : 0); /* rows past the last are the first again, and not stored */
        to[i] = y + row * stride + c;
        from[i] = a.at + row * a.stride;
      }
      add_tile(to, from, count, (mm_dense){w.at + c, w.stride}, n);
    }
    for (; c < k; c++)
      for (uint32_t i = t; i < t + count; i++) {
        float s = y[i * stride + c];
        for (uint32_t j = 0; j < n; j++) s += a.at[i * a.stride + j] * w.at[j * w.stride + c];
        y[i * stride + c] = s;
      }
  }
}
MM_VERSIONS(product_add, (float *y, size_t stride, mm_dense a, mm_dense w, uint32_t rows, uint32_t n, uint32_t k),
            (y, stride, a, w, rows, n, k))

void mm_product_add(float *y, size_t stride, mm_dense a, mm_dense w, uint32_t rows, uint32_t n, uint32_t k) {
  product_add(y, stride, a, w, rows, n, k);
}

void mm_product_turn(float *to, size_t stride, mm_dense from, uint32_t rows, uint32_t columns) {
  for (uint32_t c = 0; c < columns; c++)
    for (uint32_t r = 0; r < rows; r++) to[c * stride + r] = from.at[r * from.stride + c];
}
