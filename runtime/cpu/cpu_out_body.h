/* From lanes to results, for cpu_rows_body.h and cpu_codes_body.h. */
#ifndef MM_RUNTIME_CPU_CPU_OUT_BODY_H
#define MM_RUNTIME_CPU_CPU_OUT_BODY_H

#if MM_ROLLED
#undef LEVEL
#define LEVEL TARGET static inline /* what calls it is one function for all kinds */
#endif

/* Bytes ahead of the codes that memory is asked for: what it sends while it answers. The second cache is asked, which can wait for more
 * lines at once than the first. NEAR the codes of E4M3 the first one is asked for what the second has by then (RESULTS.md). */
enum { AHEAD = 16384, NEAR = 2048 };
/* In the order of the calls. */
LEVEL void prefetch_line(const uint8_t *p) {
#ifdef __x86_64__
  __asm__ volatile("prefetcht1 %0" : : "m"(*p));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

/* For what comes after rows whose codes the processor itself asks for. */
LEVEL void prefetch_next(const uint8_t *p) {
  for (uint32_t i = 0; i < AHEAD / 2; i += 64) prefetch_line(p + i);
}

/* y[rows] of one token and at most 16 rows, whose sums have a stride of `stride` floats: each times its factor. */
LEVEL void sums_of(float *y, uint32_t rows, const float *sums, size_t stride, const float *factor) {
#ifdef SUMS_TOGETHER
  if (rows == 16) {
    v16_store(y, v16_mul(v16_sums(sums, stride), v16_load(factor)));
    return;
  }
#endif
  for (uint32_t r = 0; r < rows; r++) y[r] = v16_sum(v16_load(sums + r * stride)) * factor[r];
}

/* The sums of up to 16 rows of one token, [16][16], whose last is row `last`, when there are so many or it is the last of all. */
LEVEL void row_out(const mm_cpu_view *v, uint32_t first, uint32_t rows, uint32_t last, const float *lanes, float *y) {
  float factor[16];
  const uint32_t some = last % 16 + 1, from = last + 1 - some;
  if (some < 16 && last + 1 < rows) return;
  mm_cpu_row_factors(v, first + from, some, factor);
  sums_of(y + from, some, lanes, 16, factor);
}

/* Destination of a call: row r of token t is y[t · stride + r]; sums: memory of mm_cpu_rows. */
typedef struct rows_out {
  float *y;
  size_t stride;
  float *sums;
} rows_out;
LEVEL rows_out out_from(rows_out to, uint32_t token) {
  to.y += token * to.stride;
  return to;
}

/* Writes the results of sums[rows, MM_CPU_MANY_TOKENS, 16]. */
LEVEL void tokens_out(const mm_cpu_view *v, uint32_t tokens, uint32_t first, uint32_t rows, rows_out to) {
  float factor[16];
  for (uint32_t r = 0; r < rows; r += 16) {
    const uint32_t some = rows - r < 16 ? rows - r : 16;
    mm_cpu_row_factors(v, first + r, some, factor);
    for (uint32_t t = 0; t < tokens; t++)
      sums_of(to.y + t * to.stride + r, some, to.sums + ((size_t)r * MM_CPU_MANY_TOKENS + t) * 16, (size_t)MM_CPU_MANY_TOKENS * 16, factor);
  }
}

#endif
