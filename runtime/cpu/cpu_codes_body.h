/* The loops of cpu_codes.h over one level's vectors. Besides the definitions that cpu_rows_body.h needs, the file that includes this
 * defines v64, 64 bytes or 16 words, v64_load, v64_store, v64_held; span_widen and span_scales; for each limb, of which `at` says whether
 * it is the first and the last, words_first(total, at, start), words_step(sum, w, x) of unsigned w and signed x, and words_total(total,
 * sum, at, start), a total of those before times 256, plus start in the end; words_join(high, low), 256 high + low; words_f32 of a total;
 * and WORD_TILES(of), as TILES is. */

#include "runtime/cpu/cpu_out_body.h"

/* Whose x, for the tokens of a tile, stays in the first cache while all rows pass. */
enum { SPANS = 6 };
LEVEL uint32_t spans_of(mm_cpu_kind kind) { return SPANS / mm_cpu_kinds[kind].limbs; }

/* A span of a row as the tiles read it. */
typedef struct wide_span {
  uint8_t code[MM_SPAN];
  float scale[16];
} wide_span;

/* Codes of span s and its scales: where they are, or copies with zeros after the row's end. */
typedef struct span_scratch {
  uint8_t codes[MM_SPAN / 2], scales[2 * MM_SPAN / MM_LANE];
} span_scratch;
LEVEL const uint8_t *whole_span(const mm_cpu_view *v, mm_cpu_kind kind, const uint8_t *codes, uint32_t s, const uint8_t **scale,
                                span_scratch *scratch) {
  const uint32_t begin = s * MM_SPAN, bytes = mm_cpu_kinds[kind].scale_bytes;
  if (*scale) *scale += begin / v->cell * bytes;
  if (begin + MM_SPAN <= v->w->k) return codes + begin / 2;
  memset(scratch, 0, sizeof *scratch);
  memcpy(scratch->codes, codes + begin / 2, v->row_bytes - begin / 2);
  if (!*scale) return scratch->codes;
  memcpy(scratch->scales, *scale, mm_cells(v->w->k - begin, v->cell) * bytes);
  *scale = scratch->scales;
  return scratch->codes;
}
LEVEL const uint8_t *span_scales_of(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row) {
  const mm_cell cell = v->w->cell[v->plane];
  const size_t line = (size_t)v->lead * mm_cells(v->w->n, cell.n) + (cell.n ? row / cell.n : 0);
  return v->plane ? (const uint8_t *)v->w->plane[v->plane] + line * mm_cells(v->w->k, v->cell) * mm_cpu_kinds[kind].scale_bytes : NULL;
}

/* The lanes of one span, S added to sum. */
LEVEL v16 sum_words(v16 sum, v16 s, mm_cpu_kind kind, v16 own, const mm_cpu_span *x) {
  return kind == MM_KIND_INT4_CODES ? v16_add(sum, s) : v16_fma(v16_mul(s, v16_load(x->scale)), own, sum);
}

/* Limb l of a kind's. */
typedef struct limb_at {
  bool first, last;
} limb_at;
LEVEL limb_at limb_of(mm_cpu_kind kind, uint32_t l) { return (limb_at){l == 0, l + 1 == mm_cpu_kinds[kind].limbs}; }

/* One span against one token, added to sum; scale: NULL where none lies along the row. */
LEVEL v16 one_span(v16 sum, mm_cpu_kind kind, uint32_t cell, const uint8_t *codes, const uint8_t *scale, const mm_cpu_span *x) {
  const uint32_t limbs = mm_cpu_kinds[kind].limbs;
  const int32_t *const start = x[limbs - 1].start;
  v64 w[4], total = {0};
  span_widen(w, kind, codes);
  MM_UNROLL
  for (uint32_t l = 0; l < limbs; l++) { /* limbs do not wait for one another */
    const limb_at alone = {true, l + 1 == limbs};
    v64 words = words_first(total, alone, start);
    MM_UNROLL
    for (int j = 0; j < 4; j++) words = words_step(words, w[j], v64_load(x[l].code + 64 * j));
    words = words_total(total, words, alone, start);
    total = l ? words_join(total, words) : words;
  }
  return sum_words(sum, words_f32(total), kind, scale ? span_scales(kind, scale, cell) : v16_set1(1), &x[limbs - 1]);
}

LEVEL void one_token_cells(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t cell, uint32_t first, uint32_t rows, const mm_cpu_span *x,
                           float *y) {
  const uint32_t spans = mm_cells(v->w->k, MM_SPAN), whole = v->w->k / MM_SPAN, limbs = mm_cpu_kinds[kind].limbs;
  const uint32_t step = MM_SPAN / cell * mm_cpu_kinds[kind].scale_bytes; /* 0 where a scale is over several spans */
  const uint8_t *const end = v->codes + (size_t)(first + rows) * v->row_bytes;
  const ptrdiff_t jump = v->next ? v->next - end : 0;
  _Alignas(64) float lanes[16 * 16];
  for (uint32_t r = 0; r < rows; r++) {
    const uint8_t *const codes = v->codes + (size_t)(first + r) * v->row_bytes, *const scales = span_scales_of(v, kind, first + r);
    const uint8_t *at = codes, *own = scales;
    const mm_cpu_span *in = x;
    v16 sum = v16_zero();
    for (uint32_t s = 0; s < whole; s++, at += MM_SPAN / 2, in += limbs, own += scales ? step : 0) {
      const uint8_t *prefetch = at + AHEAD;
      prefetch += prefetch < end ? 0 : jump;
      prefetch_line(prefetch), prefetch_line(prefetch + 64);
      if (scales && !step) own = scales + (size_t)s * MM_SPAN / cell * mm_cpu_kinds[kind].scale_bytes;
      sum = one_span(sum, kind, cell, at, own, in);
    }
    if (whole < spans) {
      span_scratch scratch;
      const uint8_t *scale = scales, *last = whole_span(v, kind, codes, whole, &scale, &scratch);
      sum = one_span(sum, kind, cell, last, scale, in);
    }
    v16_store(lanes + 16 * (r % 16), sum);
    row_out(v, first, rows, r, lanes, y);
  }
}
/* The cells that schemes have, which the compiler then knows, or others. */
LEVEL void one_token_words(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const mm_cpu_span *x, float *y) {
  const uint32_t usual = !mm_cpu_kinds[kind].e2m1 ? MM_CHUNK : mm_cpu_kinds[kind].scale == MM_F8_E4M3 ? 16 : 32;
  if (v->cell == usual)
    one_token_cells(v, kind, usual, first, rows, x, y);
  else
    one_token_cells(v, kind, v->plane ? v->cell : MM_SPAN, first, rows, x, y);
}

/* Widened spans of rows, [rows, SPANS], of which `spans` are in use. */
typedef struct wide_rows {
  const wide_span *w;
  uint32_t rows, spans;
  bool from; /* these are not the rows' first spans: products are added to sums */
} wide_rows;

/* sums[rows, MM_CPU_MANY_TOKENS, 16] of a tile: the first `rows` of `wide`. */
LEVEL void tile_words(uint32_t rows, uint32_t tokens, mm_cpu_kind kind, wide_rows wide, const mm_cpu_span *const *x, float *sums) {
  const wide_span *const w = wide.w;
  const uint32_t limbs = mm_cpu_kinds[kind].limbs;
  v16 sum[4][8];
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) sum[r][t] = wide.from ? v16_load(sums + (r * MM_CPU_MANY_TOKENS + t) * 16) : v16_zero();
  MM_ROLL
  for (uint32_t s = 0; s < wide.spans; s++) {
    v64 total[4][8];
    MM_UNROLL
    for (uint32_t l = 0; l < limbs; l++) {
      v64 words[4][8];
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) {
        MM_UNROLL
        for (uint32_t r = 0; r < rows; r++) words[r][t] = words_first(total[r][t], limb_of(kind, l), x[t][(s + 1) * limbs - 1].start);
      }
      MM_UNROLL
      for (int j = 0; j < 4; j++) {
        v64 line[4];
        MM_UNROLL
        for (uint32_t r = 0; r < rows; r++) line[r] = v64_load(w[(size_t)r * SPANS + s].code + 64 * j);
        MM_UNROLL
        for (uint32_t t = 0; t < tokens; t++) {
          const v64 in = v64_held(v64_load(x[t][s * limbs + l].code + 64 * j));
          MM_UNROLL
          for (uint32_t r = 0; r < rows; r++) words[r][t] = words_step(words[r][t], line[r], in);
        }
      }
      MM_UNROLL
      for (uint32_t r = 0; r < rows; r++) MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++)
        total[r][t] = words_total(total[r][t], words[r][t], limb_of(kind, l), x[t][(s + 1) * limbs - 1].start);
    }
    MM_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
      const v16 own = v16_load(w[(size_t)r * SPANS + s].scale);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) sum[r][t] = sum_words(sum[r][t], words_f32(total[r][t]), kind, own, &x[t][(s + 1) * limbs - 1]);
    }
  }
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) v16_store(sums + (r * MM_CPU_MANY_TOKENS + t) * 16, sum[r][t]);
}

/* A tile's tokens under all rows, by `high` of them and what is left by ones. */
LEVEL void words_column(uint32_t tokens, uint32_t high, mm_cpu_kind kind, wide_rows wide, const mm_cpu_span *const *x, float *sums) {
  uint32_t r = 0;
  for (; r + high <= wide.rows; r += high, wide.w += (size_t)high * SPANS)
    tile_words(high, tokens, kind, wide, x, sums + (size_t)r * MM_CPU_MANY_TOKENS * 16);
  for (; r < wide.rows; r++, wide.w += SPANS) tile_words(1, tokens, kind, wide, x, sums + (size_t)r * MM_CPU_MANY_TOKENS * 16);
}
#define WORDS(tokens, high)                                                                                                            \
  TARGET static __attribute__((noinline)) void words_of_##tokens(mm_cpu_kind kind, const wide_rows *wide, const mm_cpu_span *const *x, \
                                                                 float *sums) {                                                        \
    if (kind == MM_KIND_INT4_CODES)                                                                                                    \
      words_column(tokens, high, MM_KIND_INT4_CODES, *wide, x, sums);                                                                  \
    else if (mm_cpu_kinds[kind].limbs == 1) /* scales are f32 by then */                                                               \
      words_column(tokens, high, MM_KIND_NVFP4_CODES, *wide, x, sums);                                                                 \
    else                                                                                                                               \
      words_column(tokens, high, MM_KIND_NVFP4_LIMBS, *wide, x, sums);                                                                 \
  }
WORD_TILES(WORDS)
#undef WORDS

LEVEL void widen_spans(wide_span *to, const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row, uint32_t from, uint32_t end) {
  const uint8_t *const codes = v->codes + (size_t)row * v->row_bytes, *const scales = span_scales_of(v, kind, row);
  for (uint32_t s = from; s < end; s++, to++) {
    span_scratch scratch;
    const uint8_t *scale = scales, *at = whole_span(v, kind, codes, s, &scale, &scratch);
    v64 w[4];
    span_widen(w, kind, at);
    MM_UNROLL
    for (int j = 0; j < 4; j++) v64_store(to->code + 64 * j, w[j]);
    v16_store(to->scale, scales ? span_scales(kind, scale, v->cell) : v16_set1(1));
  }
}

/* Two to MM_CPU_MANY_TOKENS tokens. */
LEVEL void many_tokens_words(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t tokens, uint32_t first, uint32_t rows,
                             const mm_cpu_span *const *x, rows_out to) {
  const uint32_t spans = mm_cells(v->w->k, MM_SPAN), block = spans_of(kind);
  wide_span *const w = (wide_span *)(void *)(to.sums + (size_t)rows * MM_CPU_MANY_TOKENS * 16);
  for (uint32_t from = 0; from < spans; from += block) {
    const uint32_t n = from + block < spans ? block : spans - from;
    const wide_rows wide = {w, rows, n, from > 0};
    for (uint32_t r = 0; r < rows; r++) widen_spans(w + (size_t)r * SPANS, v, kind, first + r, from, from + n);
    const size_t bytes = (size_t)block * MM_SPAN / 2;
    const uint8_t *const codes = v->codes + (size_t)first * v->row_bytes, *const after = v->next ? v->next : codes + rows * v->row_bytes;
    const uint8_t *const next = from + block < spans ? codes + (from / block + 1) * bytes : after;
    for (uint32_t t = 0, some; t < tokens; t += some) {
      const mm_cpu_span *in[8];
      some = 0;
#define WORDS(n, high) \
  if (!some && tokens - t >= (n)) some = (n);
      WORD_TILES(WORDS)
#undef WORDS
      for (uint32_t r = rows * t / tokens; r < rows * (t + some) / tokens; r++)
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + r * v->row_bytes + i, 0, 2);
      for (uint32_t i = 0; i < some; i++) in[i] = x[t + i] + (size_t)from * mm_cpu_kinds[kind].limbs;
#define WORDS(count, high) \
  if (some == (count)) words_of_##count(kind, &wide, in, to.sums + 16 * t);
      WORD_TILES(WORDS)
#undef WORDS
    }
  }
  tokens_out(v, tokens, first, rows, to);
}

LEVEL void all_tokens_words(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens,
                            rows_out to) {
  const mm_cpu_span *in[MM_CPU_MANY_TOKENS];
  for (uint32_t t = 0, some; t < tokens; t += some) {
    some = mm_cpu_some(tokens - t);
    for (uint32_t i = 0; i < some; i++) in[i] = (const mm_cpu_span *)(const void *)x[t + i];
    if (some == 1)
      one_token_words(v, kind, first, rows, in[0], to.y + t * to.stride);
    else
      many_tokens_words(v, kind, some, first, rows, in, out_from(to, t));
  }
}

TARGET static void rows_of_codes(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                                 size_t stride, float *sums) {
  rows_out to;
  to.y = y, to.stride = stride, to.sums = sums;
  switch (v->kind) {
    case MM_KIND_NVFP4_CODES: all_tokens_words(v, MM_KIND_NVFP4_CODES, first, rows, x, tokens, to); break;
    case MM_KIND_MXFP4_CODES: all_tokens_words(v, MM_KIND_MXFP4_CODES, first, rows, x, tokens, to); break;
    case MM_KIND_INT4_CODES: all_tokens_words(v, MM_KIND_INT4_CODES, first, rows, x, tokens, to); break;
    case MM_KIND_NVFP4_LIMBS: all_tokens_words(v, MM_KIND_NVFP4_LIMBS, first, rows, x, tokens, to); break;
    case MM_KIND_MXFP4_LIMBS: all_tokens_words(v, MM_KIND_MXFP4_LIMBS, first, rows, x, tokens, to); break;
    case MM_KIND_INT4_LIMBS: all_tokens_words(v, MM_KIND_INT4_LIMBS, first, rows, x, tokens, to); break;
    default: all_tokens_words(v, MM_KIND_INT4_OFFSET_LIMBS, first, rows, x, tokens, to); break;
  }
}
