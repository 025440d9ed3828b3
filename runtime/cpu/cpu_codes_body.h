/* The loops of cpu_codes.h over one level's vectors. Beside what cpu_rows_body.h asks for, the file that includes this defines v64, 64
 * bytes or 16 words, v64_load, v64_store, v64_held; span_widen and span_scales; words_first(start), words_step(sum, w, x) of unsigned w and
 * signed x, and words_last(sum, start), the sum as f32; and WORD_TILES(of), as TILES is. */

#include "runtime/cpu/cpu_out_body.h"

enum { SPANS = 6 }; /* whose x, for the tokens of a tile, stays in the first cache while all rows pass */

/* A span of a row as the tiles read it. */
typedef struct wide_span {
  uint8_t code[MM_SPAN];
  float scale[16];
} wide_span;

/* Codes of span s and its scales: where they are, or copies with zeros after the row's end. */
typedef struct span_room {
  uint8_t codes[MM_SPAN / 2], scales[MM_SPAN / MM_LANE];
} span_room;
LEVEL const uint8_t *whole_span(const mm_cpu_view *v, const uint8_t *codes, uint32_t s, const uint8_t **scale, span_room *room) {
  const uint32_t begin = s * MM_SPAN;
  if (*scale) *scale += begin / v->cell;
  if (begin + MM_SPAN <= v->w->k) return codes + begin / 2;
  memset(room, 0, sizeof *room);
  memcpy(room->codes, codes + begin / 2, v->row_bytes - begin / 2);
  if (!*scale) return room->codes;
  memcpy(room->scales, *scale, mm_cells(v->w->k - begin, v->cell));
  *scale = room->scales;
  return room->codes;
}
LEVEL const uint8_t *span_scales_of(const mm_cpu_view *v, uint32_t row) {
  const size_t line = (size_t)v->lead * v->w->n + row; /* the planes of these kinds have a line for each row */
  return v->plane ? (const uint8_t *)v->w->plane[v->plane] + line * mm_cells(v->w->k, v->cell) : NULL;
}

/* The lanes of one span, S added to sum. */
LEVEL v16 sum_words(v16 sum, v16 s, mm_cpu_kind kind, v16 own, const mm_cpu_span *x) {
  return kind == MM_KIND_INT4_CODES ? v16_add(sum, s) : v16_fma(v16_mul(s, v16_load(x->scale)), own, sum);
}

LEVEL void one_token_words(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const mm_cpu_span *x, float *y) {
  const uint32_t spans = mm_cells(v->w->k, MM_SPAN);
  const uint8_t *const end = v->codes + (size_t)(first + rows) * v->row_bytes;
  const ptrdiff_t jump = v->next ? v->next - end : 0;
  for (uint32_t r = 0; r < rows; r++) {
    const uint8_t *const codes = v->codes + (size_t)(first + r) * v->row_bytes, *const scales = span_scales_of(v, first + r);
    v16 sum = v16_zero();
    for (uint32_t s = 0; s < spans; s++) {
      span_room room;
      const uint8_t *scale = scales, *at = whole_span(v, codes, s, &scale, &room), *soon = codes + s * (MM_SPAN / 2) + AHEAD;
      soon += soon < end ? 0 : jump;
      ask(soon), ask(soon + 64);
      v64 w[4];
      span_widen(w, kind, at);
      v64 words = words_first(x[s].start);
      MM_UNROLL
      for (int j = 0; j < 4; j++) words = words_step(words, w[j], v64_load(x[s].code + 64 * j));
      sum = sum_words(sum, words_last(words, x[s].start), kind, scales ? span_scales(kind, scale, v->cell) : v16_zero(), &x[s]);
    }
    y[r] = v16_sum(sum) * mm_cpu_row_factor(v, first + r);
  }
}

/* sums[rows, MM_CPU_MANY_TOKENS, 16] of a tile over spans of widened rows, SPANS of each; `from`: whether these are not the first. */
LEVEL void tile_words(uint32_t rows, uint32_t tokens, mm_cpu_kind kind, uint32_t spans, bool from, const wide_span *w,
                      const mm_cpu_span *const *x, float *sums) {
  v16 sum[4][8];
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) sum[r][t] = from ? v16_load(sums + (r * MM_CPU_MANY_TOKENS + t) * 16) : v16_zero();
  MM_ROLL
  for (uint32_t s = 0; s < spans; s++) {
    v64 words[4][8];
    MM_UNROLL
    for (uint32_t t = 0; t < tokens; t++) {
      MM_UNROLL
      for (uint32_t r = 0; r < rows; r++) words[r][t] = words_first(x[t][s].start);
    }
    MM_UNROLL
    for (int j = 0; j < 4; j++) {
      v64 line[4];
      MM_UNROLL
      for (uint32_t r = 0; r < rows; r++) line[r] = v64_load(w[(size_t)r * SPANS + s].code + 64 * j);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) {
        const v64 in = v64_held(v64_load(x[t][s].code + 64 * j));
        MM_UNROLL
        for (uint32_t r = 0; r < rows; r++) words[r][t] = words_step(words[r][t], line[r], in);
      }
    }
    MM_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
      const v16 own = v16_load(w[(size_t)r * SPANS + s].scale);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) sum[r][t] = sum_words(sum[r][t], words_last(words[r][t], x[t][s].start), kind, own, &x[t][s]);
    }
  }
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) v16_store(sums + (r * MM_CPU_MANY_TOKENS + t) * 16, sum[r][t]);
}

typedef void words_fn(uint32_t rows, mm_cpu_kind kind, uint32_t spans, bool from, const wide_span *w, const mm_cpu_span *const *x,
                      float *sums);
/* A tile's tokens under all rows, by `high` of them and what is left by ones. */
LEVEL void words_column(uint32_t tokens, uint32_t high, mm_cpu_kind kind, uint32_t rows, uint32_t spans, bool from, const wide_span *w,
                        const mm_cpu_span *const *x, float *sums) {
  uint32_t r = 0;
  for (; r + high <= rows; r += high)
    tile_words(high, tokens, kind, spans, from, w + (size_t)r * SPANS, x, sums + (size_t)r * MM_CPU_MANY_TOKENS * 16);
  for (; r < rows; r++) tile_words(1, tokens, kind, spans, from, w + (size_t)r * SPANS, x, sums + (size_t)r * MM_CPU_MANY_TOKENS * 16);
}
#define WORDS(tokens, high)                                                                                                      \
  TARGET static __attribute__((noinline)) void words_of_##tokens(uint32_t rows, mm_cpu_kind kind, uint32_t spans, bool from,     \
                                                                 const wide_span *w, const mm_cpu_span *const *x, float *sums) { \
    if (kind == MM_KIND_INT4_CODES)                                                                                              \
      words_column(tokens, high, MM_KIND_INT4_CODES, rows, spans, from, w, x, sums);                                             \
    else                                                                                                                         \
      words_column(tokens, high, MM_KIND_NVFP4_CODES, rows, spans, from, w, x, sums); /* their scales are f32 by then */         \
  }
WORD_TILES(WORDS)
#undef WORDS

LEVEL void widen_spans(wide_span *to, const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row, uint32_t from, uint32_t end) {
  const uint8_t *const codes = v->codes + (size_t)row * v->row_bytes, *const scales = span_scales_of(v, row);
  for (uint32_t s = from; s < end; s++, to++) {
    span_room room;
    const uint8_t *scale = scales, *at = whole_span(v, codes, s, &scale, &room);
    v64 w[4];
    span_widen(w, kind, at);
    MM_UNROLL
    for (int j = 0; j < 4; j++) v64_store(to->code + 64 * j, w[j]);
    if (scales) v16_store(to->scale, span_scales(kind, scale, v->cell));
  }
}

/* Two to MM_CPU_MANY_TOKENS tokens. */
LEVEL void many_tokens_words(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t tokens, uint32_t first, uint32_t rows,
                             const mm_cpu_span *const *x, float *y, size_t stride, float *sums) {
  const uint32_t spans = mm_cells(v->w->k, MM_SPAN);
  wide_span *const w = (wide_span *)(void *)(sums + (size_t)rows * MM_CPU_MANY_TOKENS * 16);
  for (uint32_t from = 0; from < spans; from += SPANS) {
    const uint32_t n = from + SPANS < spans ? SPANS : spans - from;
    for (uint32_t r = 0; r < rows; r++) widen_spans(w + (size_t)r * SPANS, v, kind, first + r, from, from + n);
    const size_t bytes = SPANS * MM_SPAN / 2;
    const uint8_t *const codes = v->codes + (size_t)first * v->row_bytes, *const after = v->next ? v->next : codes + rows * v->row_bytes;
    const uint8_t *const next = from + SPANS < spans ? codes + (from / SPANS + 1) * bytes : after;
    for (uint32_t t = 0, some; t < tokens; t += some) {
      const mm_cpu_span *in[8];
      some = 0;
#define WORDS(n, high) \
  if (!some && tokens - t >= (n)) some = (n);
      WORD_TILES(WORDS)
#undef WORDS
      for (uint32_t r = rows * t / tokens; r < rows * (t + some) / tokens; r++)
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + r * v->row_bytes + i, 0, 2);
      for (uint32_t i = 0; i < some; i++) in[i] = x[t + i] + from;
#define WORDS(count, high) \
  if (some == (count)) words_of_##count(rows, kind, n, from > 0, w, in, sums + 16 * t);
      WORD_TILES(WORDS)
#undef WORDS
    }
  }
  tokens_out(v, tokens, first, rows, y, stride, sums);
}

LEVEL void all_tokens_words(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens,
                            float *y, size_t stride, float *sums) {
  const mm_cpu_span *in[MM_CPU_MANY_TOKENS];
  for (uint32_t t = 0, some; t < tokens; t += some) {
    some = mm_cpu_some(tokens - t);
    for (uint32_t i = 0; i < some; i++) in[i] = (const mm_cpu_span *)(const void *)x[t + i];
    if (some == 1)
      one_token_words(v, kind, first, rows, in[0], y + t * stride);
    else
      many_tokens_words(v, kind, some, first, rows, in, y + t * stride, stride, sums);
  }
}

TARGET static void rows_of_codes(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                                 size_t stride, float *sums) {
  switch (v->kind) {
    case MM_KIND_NVFP4_CODES: all_tokens_words(v, MM_KIND_NVFP4_CODES, first, rows, x, tokens, y, stride, sums); break;
    case MM_KIND_MXFP4_CODES: all_tokens_words(v, MM_KIND_MXFP4_CODES, first, rows, x, tokens, y, stride, sums); break;
    default: all_tokens_words(v, MM_KIND_INT4_CODES, first, rows, x, tokens, y, stride, sums); break;
  }
}
