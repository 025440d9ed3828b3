/* Matrices that share a packed tensor share NVFP4's global scale (engines multiply w1|w3 and q|k|v with one), but some exporters give
 * each its own. The largest becomes common. A block whose scale has an E4M3 code under it that stands for exactly the same number keeps
 * its codes; for the others the block scale near that number with the least squared error is taken, and codes are rounded to it. */
#include <math.h>
#include <string.h>

#include "convert/decode/decode.h"
#include "quant/numbers.h"

enum { BLOCK = 16, BELOW = 4, ABOVE = 8 };

/* Squared error of n numbers under a scale, and their codes. */
static double error_of(const float w[BLOCK], uint32_t n, float scale, uint8_t code[BLOCK]) {
  double sum = 0;
  for (uint32_t i = 0; i < n; i++) {
    code[i] = mm_f32_to_e2m1(w[i] / scale);
    double e = (double)w[i] - (double)(mm_e2m1_value[code[i]] * scale);
    sum += e * e;
  }
  return sum;
}

/* The block scale of least error near `guess`, the smallest among equals, and the codes that go with it. */
static uint8_t best_scale(const float w[BLOCK], uint32_t n, int guess, float global, uint8_t best[BLOCK]) {
  double least = INFINITY;
  int found = guess;
  for (int c = guess > BELOW ? guess - BELOW : 1; c <= guess + ABOVE && c <= 0x7e; c++) {
    uint8_t code[BLOCK];
    double e = error_of(w, n, mm_e4m3_value[c] * global, code);
    if (!(e < least)) continue; /* nor where a product is not finite */
    least = e;
    found = c;
    memcpy(best, code, n);
  }
  return (uint8_t)found;
}

/* True when the block stands for the same numbers afterwards. */
static bool regrade_block(uint8_t *pairs, uint32_t n, uint8_t *scale, float from, float to) {
  float s = mm_e4m3_value[*scale] * from, w[BLOCK];
  uint8_t code[BLOCK] = {0}, guess = mm_f32_to_e4m3(s / to);
  if (guess == 0) guess = 1;
  *scale = guess;
  if (mm_e4m3_value[guess] * to == s) return true;
  for (uint32_t i = 0; i < n; i++) w[i] = mm_e2m1_value[pairs[i / 2] >> i % 2 * 4 & 15] * s;
  *scale = best_scale(w, n, guess, to, code);
  for (uint32_t i = 0; i < n; i += 2) pairs[i / 2] = (uint8_t)(code[i] | (i + 1 < n ? code[i + 1] : 0) << 4);
  bool same = true;
  for (uint32_t i = 0; i < n; i++) same = same && mm_e2m1_value[code[i]] * (mm_e4m3_value[*scale] * to) == w[i];
  return same;
}

bool mm_nvfp4_regrade(uint8_t *codes, uint8_t *scales, uint32_t rows, uint32_t k, float from, float to) {
  size_t row_bytes = mm_ceil_div(k, 2), across = mm_ceil_div(k, BLOCK);
  bool same = true;
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t b = 0; b < across; b++)
      if (!regrade_block(codes + r * row_bytes + (size_t)b * (BLOCK / 2), (uint32_t)mm_min(BLOCK, k - b * BLOCK), &scales[r * across + b],
                         from, to))
        same = false;
  return same;
}
