/* The loops of cpu_rows.h over one level's vectors. The file that includes this defines, for sixteen lanes of f32: v16, LEVEL (the
 * functions' target), v16_zero, v16_load, v16_store, v16_add, v16_fma(a, b, c) = a·b + c, v16_set1, v16_halves, v16_held, v16_sum by the
 * rule's tree, v16_scales, widen_half and bad; TILES(of), which is of(tokens, rows) for each tile that registers hold, the most tokens
 * first and one token last, and TILE_KEEPS. With SCALES_TOGETHER four chunks' scales are converted at once where scales_together(kind,
 * cell): v16_scales_of_four. With MM_PAIRS tiles multiply pairs of BF16: store_pairs and v16_pairs(a, b, c), which are c plus the high
 * halves' products, then plus the low ones'. */

#include "runtime/cpu/cpu_out_body.h"

/* A scale as f32; E4M3 a 256th of it. */
LEVEL float scale_at(mm_cpu_kind kind, const uint8_t *p) {
  uint32_t bits = 0;
  memcpy(&bits, p, mm_cpu_kinds[kind].scale_bytes);
  if (mm_cpu_kinds[kind].scale == MM_BF16) return mm_bf16_to_f32((uint16_t)bits);
  return mm_cpu_kinds[kind].scale == MM_U8 ? mm_e8m0_to_f32((uint8_t)bits) : mm_f32_from_bits(bits);
}

/* Parts of a chunk that have scales of their own: halves where scales cover 32 or 64 columns of E4M3. */
LEVEL uint32_t pieces_of(mm_cpu_kind kind) { return kind == MM_KIND_E4M3_32 || kind == MM_KIND_MXFP8 ? 2 : 1; }

/* The scales of part g of a chunk. */
LEVEL v16 scales_of(mm_cpu_kind kind, const uint8_t *scale, uint32_t cell, uint32_t g) {
  const uint32_t bytes = mm_cpu_kinds[kind].scale_bytes;
  if (mm_cpu_nibbles(kind) && cell < MM_CHUNK) return v16_scales(kind, scale, cell);
  if (pieces_of(kind) == 1) return v16_set1(scale_at(kind, scale));
  if (cell == 64) return v16_set1(scale_at(kind, scale + g * bytes));
  return v16_halves(scale_at(kind, scale + 2 * g * bytes), scale_at(kind, scale + (2 * g + 1) * bytes));
}
/* of_x: the scale of x over the chunk, where the kind has one. */
LEVEL v16 sum_of(v16 sum, v16 part, mm_cpu_kind kind, const uint8_t *scale, uint32_t cell, uint32_t g, const float *of_x) {
  if (kind == MM_KIND_E4M3_GROUPS)
    return v16_fma(part, v16_mul(scale ? scales_of(kind, scale, cell, g) : v16_set1(1), v16_set1(*of_x)), sum);
  return scale ? v16_fma(part, scales_of(kind, scale, cell, g), sum) : v16_add(sum, part);
}

LEVEL void widen_chunk(v16 w[8], mm_cpu_kind kind, const uint8_t *codes) {
  widen_half(w, kind, codes, 0), widen_half(w + 4, kind, codes, 1);
}

/* One chunk of one row, against `tokens` tokens whose columns begin at x[t] + at. scale: NULL where none lies along the row. */
LEVEL void chunk_step(v16 *sum, const mm_cpu_view *v, mm_cpu_kind kind, uint32_t tokens, const uint8_t *codes, const uint8_t *scale,
                      const float *const *x, size_t at) {
  const uint32_t pieces = pieces_of(kind), lines = 8 / pieces;
  v16 w[8];
  widen_chunk(w, kind, codes);
  MM_UNROLL
  for (uint32_t g = 0; g < pieces; g++) {
    MM_UNROLL
    for (uint32_t t = 0; t < tokens; t++) {
      const float *const from = x[t] + at + (size_t)16 * lines * g;
      v16 part = v16_mul(w[lines * g], v16_load(from));
      MM_UNROLL
      for (uint32_t j = 1; j < lines; j++) part = v16_fma(w[lines * g + j], v16_load(from + 16 * j), part);
      sum[t] = sum_of(sum[t], part, kind, scale, v->cell, g, mm_cpu_scales(x[t], v->w->k) + at / MM_CHUNK);
    }
  }
}

/* Chunks of one row against one token, whose parts do not wait for one another: by the same operations as above. */
enum { ABREAST = MM_ROLLED ? 1 : 4 };
typedef struct chunk_at {
  const uint8_t *codes, *scale;
  const float *of_x;
} chunk_at;
LEVEL v16 chunks_abreast(v16 sum, mm_cpu_kind kind, const chunk_at at[ABREAST], uint32_t cell, const float *x) {
  const uint32_t pieces = pieces_of(kind);
  v16 part[2][ABREAST];
  MM_UNROLL
  for (int h = 0; h < 2; h++) {
    MM_UNROLL
    for (int c = 0; c < ABREAST; c++) {
      const float *const from = x + MM_CHUNK * c + 64 * h;
      v16 w[4];
      widen_half(w, kind, at[c].codes, h);
      v16 p = h && pieces == 1 ? v16_fma(w[0], v16_load(from), part[0][c]) : v16_mul(w[0], v16_load(from));
      p = v16_fma(w[1], v16_load(from + 16), p);
      p = v16_fma(w[2], v16_load(from + 32), p);
      part[pieces == 1 ? 0 : h][c] = v16_fma(w[3], v16_load(from + 48), p);
    }
  }
#ifdef SCALES_TOGETHER
  if (ABREAST == 4 && scales_together(kind, cell)) {
    v16 scale[4];
    v16_scales_of_four(scale, kind, at[0].scale);
    MM_UNROLL
    for (int c = 0; c < 4; c++) sum = v16_fma(part[0][c % ABREAST], scale[c], sum);
    return sum;
  }
#endif
  MM_UNROLL
  for (uint32_t i = 0; i < ABREAST * pieces; i++)
    sum = sum_of(sum, part[i % pieces][i / pieces], kind, at[i / pieces].scale, cell, i % pieces, at[i / pieces].of_x);
  return sum;
}

/* The scales along a row. */
LEVEL const uint8_t *row_scales(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row) {
  const mm_cell cell = v->w->cell[v->plane];
  const size_t line = (size_t)v->lead * mm_cells(v->w->n, cell.n) + (cell.n ? row / cell.n : 0);
  return v->plane ? (const uint8_t *)v->w->plane[v->plane] + line * mm_cells(v->w->k, cell.k) * mm_cpu_kinds[kind].scale_bytes : NULL;
}

/* Chunk c of a row's codes and its scales: where they are, or copies with zeros after the row's end. */
typedef struct chunk_scratch {
  uint8_t codes[4 * MM_CHUNK], scales[32];
} chunk_scratch;
LEVEL const uint8_t *whole_chunk(const mm_cpu_view *v, mm_cpu_kind kind, const uint8_t *codes, uint32_t c, const uint8_t **scale,
                                 chunk_scratch *scratch) {
  const uint32_t k = v->w->k;
  const size_t begin = (size_t)c * mm_cpu_kinds[kind].chunk_bytes;
  if ((c + 1) * MM_CHUNK <= k) return codes + begin;
  memset(scratch, 0, sizeof *scratch);
  memcpy(scratch->codes, codes + begin, v->row_bytes - begin);
  if (!*scale) return scratch->codes;
  memcpy(scratch->scales, *scale, mm_cells(k - c * MM_CHUNK, v->cell) * mm_cpu_kinds[kind].scale_bytes);
  *scale = scratch->scales;
  return scratch->codes;
}

/* True if the hardware prefetcher keeps up with consecutive reads. It does not for kinds with fewer bytes per operation; for BF16 software
 * prefetch costs more than it gains. */
LEVEL bool prefetched_by_hardware(mm_cpu_kind kind) { return kind == MM_KIND_BF16; }
/* Prefetches the chunks from `codes` on; past `end`, the next ones lie `jump` bytes farther. */
LEVEL void prefetch_range(mm_cpu_kind kind, const uint8_t *codes, const uint8_t *end, ptrdiff_t jump) {
  const uint8_t *at = codes + AHEAD;
  at += at < end ? 0 : jump;
  MM_UNROLL
  for (uint32_t i = 0; i < ABREAST * mm_cpu_kinds[kind].chunk_bytes; i += 64) {
    prefetch_line(at + i);
    if (mm_cpu_e4m3(kind)) __builtin_prefetch(codes + NEAR + i);
  }
}

/* One token. */
LEVEL void one_token(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const float *x, float *y) {
  const uint32_t chunks = mm_cells(v->w->k, MM_CHUNK), whole = v->w->k / MM_CHUNK / ABREAST * ABREAST;
  const uint32_t wide = v->cell > MM_CHUNK ? v->cell / MM_CHUNK : 1; /* chunks under one scale */
  const uint32_t step = v->plane ? mm_cpu_kinds[kind].scale_bytes * (v->cell < MM_CHUNK ? MM_CHUNK / v->cell : 1) : 0;
  const uint8_t *const end = v->codes + (size_t)(first + rows) * v->row_bytes;
  const ptrdiff_t jump = v->next ? v->next - end : 0;
  const float *const of_x = mm_cpu_scales(x, v->w->k);
  _Alignas(64) float lanes[16 * 16];
  for (uint32_t r = 0; r < rows; r++) {
    const uint8_t *codes = v->codes + (size_t)(first + r) * v->row_bytes, *scales = row_scales(v, kind, first + r);
    bool nan = false;
    v16 sum = v16_zero();
    uint32_t c = 0;
    if (prefetched_by_hardware(kind) && jump && r + 1 == rows) prefetch_next(end + jump);
    for (; c < whole; c += ABREAST) {
      chunk_at at[ABREAST];
      if (!prefetched_by_hardware(kind)) prefetch_range(kind, codes + (size_t)c * mm_cpu_kinds[kind].chunk_bytes, end, jump);
      MM_UNROLL
      for (uint32_t i = 0; i < ABREAST; i++) {
        at[i].codes = codes + (size_t)(c + i) * mm_cpu_kinds[kind].chunk_bytes;
        at[i].scale = scales ? scales + (size_t)(wide > 1 ? (c + i) / wide : c + i) * step : NULL;
        at[i].of_x = of_x + c + i;
        nan |= mm_cpu_e4m3(kind) && bad(at[i].codes);
      }
      sum = chunks_abreast(sum, kind, at, v->cell, x + (size_t)c * MM_CHUNK);
    }
    for (; c < chunks; c++) {
      const uint8_t *scale = scales ? scales + (size_t)(wide > 1 ? c / wide : c) * step : NULL;
      chunk_scratch scratch;
      const uint8_t *at = whole_chunk(v, kind, codes, c, &scale, &scratch);
      nan |= mm_cpu_e4m3(kind) && bad(at);
      chunk_step(&sum, v, kind, 1, at, scale, &x, (size_t)c * MM_CHUNK);
    }
    v16_store(lanes + 16 * (r % 16), nan ? v16_set1(NAN) : sum);
    row_out(v, first, rows, r, lanes, y);
  }
}

enum { BLOCK = 4 }; /* chunks whose x, for MM_CPU_TOKENS tokens, stays in the first cache while all rows pass */

/* Two to MM_CPU_TOKENS tokens. */
LEVEL void some_tokens(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t tokens, uint32_t first, uint32_t rows, const float *const *x,
                       rows_out to) {
  const uint32_t chunks = mm_cells(v->w->k, MM_CHUNK), block = BLOCK;
  const uint32_t wide = v->cell > MM_CHUNK ? v->cell / MM_CHUNK : 1; /* chunks under one scale */
  const uint32_t step = v->plane ? mm_cpu_kinds[kind].scale_bytes * (v->cell < MM_CHUNK ? MM_CHUNK / v->cell : 1) : 0;
  for (uint32_t from = 0; from < chunks; from += block) {
    const uint32_t end = from + block < chunks ? from + block : chunks;
    for (uint32_t r = 0; r < rows; r++) {
      const uint8_t *codes = v->codes + (first + r) * v->row_bytes, *scales = row_scales(v, kind, first + r);
      float *row_sums = to.sums + (size_t)r * tokens * 16;
      bool nan = false;
      v16 sum[MM_CPU_TOKENS];
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) sum[t] = from ? v16_load(row_sums + 16 * t) : v16_zero();
      for (uint32_t c = from; c < end; c++) {
        const uint8_t *scale = scales ? scales + (size_t)(wide > 1 ? c / wide : c) * step : NULL;
        chunk_scratch scratch;
        const uint8_t *at = whole_chunk(v, kind, codes, c, &scale, &scratch);
        nan |= mm_cpu_e4m3(kind) && bad(at);
        chunk_step(sum, v, kind, tokens, at, scale, x, (size_t)c * MM_CHUNK);
      }
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) sum[t] = nan ? v16_set1(NAN) : sum[t];
      if (end < chunks) {
        MM_UNROLL
        for (uint32_t t = 0; t < tokens; t++) v16_store(row_sums + 16 * t, sum[t]);
        continue;
      }
      const float factor = mm_cpu_row_factor(v, first + r);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) to.y[t * to.stride + r] = v16_sum(sum[t]) * factor;
    }
  }
}

#ifdef TILES
/* Many tokens: rows are widened once for MM_CPU_MANY_TOKENS of them, TILE_BLOCK chunks at a time, and multiplied in tiles of some rows
 * and tokens whose parts stay in registers. Each number goes through the same operations as above. */
#ifdef MM_PAIRS
enum { LINES = 4, TILE_BLOCK = 12 }; /* registers of a chunk; chunks of widened rows */
#define tile_fma  v16_pairs
#define TILE_ROLL MM_UNROLL
#else
enum { LINES = 8, TILE_BLOCK = BLOCK };
#define tile_fma  v16_fma
#define TILE_ROLL MM_ROLL
#endif
/* Scales of a chunk: none, one, one for each half, or one in addition to that of x. */
typedef enum scaling { NONE, WHOLE, HALVES, GROUPS } scaling;
/* A code that is no number makes the scales of its chunk none, where no table of numbers says so. */
LEVEL scaling scaling_of(const mm_cpu_view *v, mm_cpu_kind kind) {
  if (kind == MM_KIND_E4M3_GROUPS) return GROUPS;
  if (!v->plane && (LINES == 4 || !mm_cpu_e4m3(kind))) return NONE;
  return pieces_of(kind) == 2 ? HALVES : WHOLE;
}
enum { SPAN = 16 * LINES }; /* of a chunk, in floats */
typedef struct tile_scratch {
  float *sums;   /* [rows, MM_CPU_MANY_TOKENS, 16] */
  float *w;      /* [rows, TILE_BLOCK, SPAN] */
  float *scales; /* [rows, TILE_BLOCK, pieces, 16] */
  size_t of_x;   /* floats from x[t] to the scales of its chunks; 0: it has none */
  /* Where x has scales, products of both with pairs: [lines of w's scales, MM_CPU_MANY_TOKENS, TILE_BLOCK], `high` rows under a line, of
   * which those before the first one of w are of the line before. */
  float *products;
  uint32_t before, high, rows;
} tile_scratch;

/* Chunks [from, end) of one row. A code that is no number makes the scales none. */
LEVEL void widen_row(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row, uint32_t from, uint32_t end, float *to, float *to_scales) {
  const uint32_t pieces = pieces_of(kind), wide = v->cell > MM_CHUNK ? v->cell / MM_CHUNK : 1;
  const uint32_t step = v->plane ? mm_cpu_kinds[kind].scale_bytes * (v->cell < MM_CHUNK ? MM_CHUNK / v->cell : 1) : 0;
  const uint8_t *codes = v->codes + row * v->row_bytes, *scales = row_scales(v, kind, row);
  for (uint32_t c = from; c < end; c++, to += SPAN, to_scales += 16 * pieces) {
    const uint8_t *scale = scales ? scales + (size_t)(wide > 1 ? c / wide : c) * step : NULL;
    chunk_scratch scratch;
    const uint8_t *at = whole_chunk(v, kind, codes, c, &scale, &scratch);
    const bool nan = mm_cpu_e4m3(kind) && bad(at);
#ifdef MM_PAIRS
    store_pairs(to, kind, at);
#else
    v16 w[8];
    widen_chunk(w, kind, at);
    MM_UNROLL
    for (int j = 0; j < 8; j++) v16_store(to + 16 * j, w[j]);
#endif
    for (uint32_t g = 0; g < pieces; g++) {
      const v16 s = scale ? scales_of(kind, scale, v->cell, g) : v16_set1(1);
      v16_store(to_scales + 16 * g, nan ? v16_set1(NAN) : s);
    }
  }
}

LEVEL float *sum_at(const tile_scratch *scratch, uint32_t r, uint32_t t) {
  return scratch->sums + ((size_t)r * MM_CPU_MANY_TOKENS + t) * 16;
}

/* Of MM_KIND_E4M3_GROUPS: the products of chunks [from, end) for all lines and tokens. */
LEVEL void multiply_scales(const tile_scratch *scratch, const mm_cpu_view *v, uint32_t first, uint32_t tokens, const float *const *x,
                           uint32_t from, uint32_t end) {
  const mm_cpu_kind kind = MM_KIND_E4M3_GROUPS;
  const uint32_t wide = v->cell > MM_CHUNK ? v->cell / MM_CHUNK : 1;
  float *to = scratch->products;
  for (uint32_t row = first - scratch->before; row < first + scratch->rows; row += scratch->high) {
    const uint8_t *const scales = row_scales(v, kind, row);
    for (uint32_t t = 0; t < MM_CPU_MANY_TOKENS; t++, to += TILE_BLOCK)
      for (uint32_t c = from; t < tokens && c < end; c++)
        to[c - from] =
            (scales ? scale_at(kind, scales + (size_t)(c / wide) * mm_cpu_kinds[kind].scale_bytes) : 1) * x[t][scratch->of_x + c];
  }
}

/* A tile over `chunks` chunks of widened rows; x[t] + at is the first one's column. TILE_KEEPS: its sums are in registers with its parts,
 * else in memory. */
LEVEL void tile_step(uint32_t rows, uint32_t tokens, scaling how, uint32_t chunks, const tile_scratch *scratch, const float *const *x,
                     size_t at) {
  const uint32_t pieces = how == HALVES ? 2 : 1;
  const uint32_t lines = LINES / pieces;
  const float *products[8];
  v16 sum[8][8];
  MM_UNROLL
  for (uint32_t r = 0; how == GROUPS && LINES == 4 && r < rows; r++)
    products[r] = scratch->products + (size_t)((scratch->before + r) / scratch->high) * MM_CPU_MANY_TOKENS * TILE_BLOCK;
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++)
    if (TILE_KEEPS) sum[r][t] = at ? v16_load(sum_at(scratch, r, t)) : v16_zero();
  MM_ROLL
  for (uint32_t p = 0; p < chunks * pieces; p++) {
    const float *const w = scratch->w + (size_t)p * lines * 16;
    const size_t column = at + (size_t)p * lines * 16;
    v16 part[8][8];
    MM_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) part[r][t] = v16_set1(-0.0f); /* a·b + -0 is a·b, whatever its sign */
    }
    TILE_ROLL
    for (uint32_t j = 0; j < lines; j++) {
      v16 line[8];
      MM_UNROLL
      for (uint32_t r = 0; r < rows; r++) line[r] = v16_load(w + (size_t)r * TILE_BLOCK * SPAN + 16 * j);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) {
        const v16 from = v16_held(v16_load(x[t] + column + 16 * j));
        MM_UNROLL
        for (uint32_t r = 0; r < rows; r++) part[r][t] = tile_fma(line[r], from, part[r][t]);
      }
    }
    MM_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
      const v16 own = how == NONE ? v16_zero() : v16_load(scratch->scales + ((size_t)r * TILE_BLOCK * pieces + p) * 16);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) {
        const v16 scale = how != GROUPS ? own
                          : LINES == 4  ? v16_set1(products[r][t * TILE_BLOCK + p])
                                        : v16_mul(own, v16_set1(x[t][scratch->of_x + at / SPAN + p]));
        const v16 before = TILE_KEEPS ? sum[r][t] : at + p ? v16_load(sum_at(scratch, r, t)) : v16_zero();
        const v16 after = how == NONE ? v16_add(before, part[r][t]) : v16_fma(part[r][t], scale, before);
        if (TILE_KEEPS)
          sum[r][t] = after;
        else
          v16_store(sum_at(scratch, r, t), after);
      }
    }
    if (!TILE_KEEPS) atomic_signal_fence(memory_order_seq_cst); /* no copies of the sums in registers */
  }
  MM_UNROLL
  for (uint32_t r = 0; r < rows; r++) MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++)
    if (TILE_KEEPS) v16_store(sum_at(scratch, r, t), sum[r][t]);
}

/* Memory prefetched while a tile's column is worked on: the lines of x, for so many tokens, that the next column begins with. */
typedef struct tile_next {
  const float *const *x;
  uint32_t tokens;
  size_t at;
} tile_next;

/* A tile's tokens under all rows, by `high` of them and what is left by ones. */
LEVEL void tile_column(uint32_t tokens, uint32_t high, scaling how, uint32_t chunks, tile_scratch scratch, const float *const *x, size_t at,
                       const tile_next *next) {
  const uint32_t pieces = how == HALVES ? 2 : 1;
  uint32_t r = 0;
  for (; r + high <= scratch.rows; r += high) {
    for (uint32_t i = 0; i < high; i += 2) /* 64 rows ask for a block of each token */
      for (uint32_t t = 0; t < next->tokens; t++) __builtin_prefetch(next->x[t] + next->at + 8 * (r + i));
    tile_step(high, tokens, how, chunks, &scratch, x, at);
    scratch.sums += (size_t)high * MM_CPU_MANY_TOKENS * 16, scratch.w += (size_t)high * TILE_BLOCK * SPAN;
    scratch.scales += (size_t)high * TILE_BLOCK * pieces * 16, scratch.before += high;
  }
  for (; r < scratch.rows; r++) {
    tile_step(1, tokens, how, chunks, &scratch, x, at);
    scratch.sums += (size_t)MM_CPU_MANY_TOKENS * 16, scratch.w += (size_t)TILE_BLOCK * SPAN,
        scratch.scales += (size_t)TILE_BLOCK * pieces * 16;
    scratch.before++;
  }
}
#define TILE(tokens, high)                                                                                                 \
  TARGET static __attribute__((noinline)) void tile_of_##tokens(scaling how, uint32_t chunks, const tile_scratch *scratch, \
                                                                const float *const *x, size_t at, const tile_next *next) { \
    if (how == NONE)                                                                                                       \
      tile_column(tokens, high, NONE, chunks, *scratch, x, at, next);                                                      \
    else if (how == GROUPS)                                                                                                \
      tile_column(tokens, high, GROUPS, chunks, *scratch, x, at, next);                                                    \
    else if (how == WHOLE)                                                                                                 \
      tile_column(tokens, high, WHOLE, chunks, *scratch, x, at, next);                                                     \
    else                                                                                                                   \
      tile_column(tokens, high, HALVES, chunks, *scratch, x, at, next);                                                    \
  }
TILES(TILE)
#undef TILE

/* Codes that are widened next: so many bytes of each row. */
typedef struct codes_next {
  const uint8_t *codes;
  size_t row_bytes, bytes;
} codes_next;

/* All tokens under widened rows. */
TARGET static void all_tiles(uint32_t tokens, scaling how, uint32_t chunks, tile_scratch scratch, const float *const *x, size_t at,
                             const codes_next *codes) {
  for (uint32_t t = 0; t < tokens;) {
    const uint32_t left = tokens - t;
    uint32_t some = 0;
#define TILE(n, high) \
  if (!some && left >= (n)) some = (n);
    TILES(TILE)
#undef TILE
    for (uint32_t r = scratch.rows * t / tokens; r < scratch.rows * (t + some) / tokens; r++)
      for (size_t i = 0; i < codes->bytes; i += 64) __builtin_prefetch(codes->codes + r * codes->row_bytes + i, 0, 2);
    const bool last = left == some;
    const uint32_t after = last ? tokens : left - some;
    const tile_next next = {last ? x : x + t + some, after < some ? after : some, last ? at + (size_t)TILE_BLOCK * SPAN : at};
#define TILE(n, high) \
  if (some == (n)) tile_of_##n(how, chunks, &scratch, x + t, at, &next);
    TILES(TILE)
#undef TILE
    t += some, scratch.sums += 16 * some, scratch.products += some * TILE_BLOCK;
  }
}

/* Up to MM_CPU_MANY_TOKENS tokens. */
LEVEL void many_tokens(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t tokens, uint32_t first, uint32_t rows, const float *const *x,
                       rows_out to) {
  const uint32_t chunks = mm_cells(v->w->k, MM_CHUNK), pieces = pieces_of(kind);
  const uint32_t high = v->plane && v->w->cell[v->plane].n ? v->w->cell[v->plane].n : v->w->n;
  const tile_scratch scratch = {.sums = to.sums,
                                .w = to.sums + (size_t)rows * MM_CPU_MANY_TOKENS * 16,
                                .scales = to.sums + (size_t)rows * (MM_CPU_MANY_TOKENS * 16 + TILE_BLOCK * SPAN),
                                .products = to.sums + (size_t)rows * (MM_CPU_MANY_TOKENS * 16 + TILE_BLOCK * (SPAN + pieces * 16)),
                                .high = high,
                                .before = first % high,
                                .rows = rows,
                                .of_x = kind == MM_KIND_E4M3_GROUPS ? (size_t)chunks * (SPAN + (LINES == 8 ? MM_CHUNK / 2 : 0)) : 0};

  for (uint32_t from = 0; from < chunks; from += TILE_BLOCK) {
    const uint32_t n = from + TILE_BLOCK < chunks ? TILE_BLOCK : chunks - from;
    for (uint32_t r = 0; r < rows; r++)
      widen_row(v, kind, first + r, from, from + n, scratch.w + (size_t)r * TILE_BLOCK * SPAN,
                scratch.scales + (size_t)r * TILE_BLOCK * pieces * 16);
    if (kind == MM_KIND_E4M3_GROUPS && LINES == 4) multiply_scales(&scratch, v, first, tokens, x, from, from + n);
    const size_t bytes = (size_t)TILE_BLOCK * mm_cpu_kinds[kind].chunk_bytes;
    const uint8_t *const codes = v->codes + (size_t)first * v->row_bytes, *const after = v->next ? v->next : codes + rows * v->row_bytes;
    const codes_next next = {from + TILE_BLOCK < chunks ? codes + (from / TILE_BLOCK + 1) * bytes : after, v->row_bytes, bytes};
    all_tiles(tokens, scaling_of(v, kind), n, scratch, x, (size_t)from * SPAN, &next);
  }
  tokens_out(v, tokens, first, rows, to);
}
#endif

#ifdef MM_PAIRS
/* One token under BF16, whose words are pairs as they lie. */
LEVEL void one_in_pairs(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *x, float *y) {
  const uint32_t chunks = mm_cells(v->w->k, MM_CHUNK), whole = v->w->k / MM_CHUNK / ABREAST * ABREAST;
  const uint8_t *const end = v->codes + (size_t)(first + rows) * v->row_bytes;
  const ptrdiff_t jump = v->next ? v->next - end : 0;
  _Alignas(64) float lanes[16 * 16];
  for (uint32_t r = 0; r < rows; r++) {
    const uint8_t *const codes = v->codes + (size_t)(first + r) * v->row_bytes;
    v16 sum = v16_zero();
    if (jump && r + 1 == rows) prefetch_next(end + jump);
    for (uint32_t c = 0; c < chunks;) {
      const uint32_t some = c < whole ? ABREAST : 1;
      const uint8_t *scale = NULL;
      chunk_scratch scratch;
      const uint8_t *const at = c < whole ? codes + (size_t)c * 2 * MM_CHUNK : whole_chunk(v, MM_KIND_BF16, codes, c, &scale, &scratch);
      v16 part[ABREAST];
      MM_UNROLL
      for (uint32_t i = 0; i < ABREAST; i++) {
        part[i] = v16_set1(-0.0f); /* as in tiles */
        MM_UNROLL
        for (uint32_t j = 0; i < some && j < LINES; j++)
          part[i] = v16_pairs(_mm512_loadu_ps(at + (i * LINES + j) * 64), v16_load(x + (size_t)(c + i) * SPAN + 16 * j), part[i]);
      }
      MM_UNROLL
      for (uint32_t i = 0; i < ABREAST; i++)
        if (i < some) sum = v16_add(sum, part[i]);
      c += some;
    }
    v16_store(lanes + 16 * (r % 16), sum);
    row_out(v, first, rows, r, lanes, y);
  }
}

/* Pairs pay in tiles, and where they lie in memory; fewer tokens take the inputs as f32, to the same bits. */
LEVEL void all_tokens(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens,
                      rows_out to) {
  const float *pairs[MM_CPU_MANY_TOKENS];
  uint32_t t = 0;
  while (tokens - t >= MM_CPU_TILED) {
    const uint32_t some = mm_cpu_some(tokens - t);
    for (uint32_t i = 0; i < some; i++) pairs[i] = x[t + i] + mm_cpu_padded(v->w->k);
    many_tokens(v, kind, some, first, rows, pairs, out_from(to, t));
    t += some;
  }
  if (kind == MM_KIND_BF16 && tokens - t == 1)
    one_in_pairs(v, first, rows, x[t] + mm_cpu_padded(v->w->k), to.y + t * to.stride);
  else if (t < tokens)
    (mm_cpu_e4m3(kind) ? mm_cpu_rows_vbmi : mm_cpu_vectors_avx512.rows)[kind](v, first, rows, x + t, tokens - t, to.y + t * to.stride,
                                                                              to.stride, to.sums);
}
#else
LEVEL void all_tokens(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens,
                      rows_out to) {
  uint32_t t = 0;
#ifdef TILES
  while (tokens - t >= MM_CPU_TILED) {
    const uint32_t some = mm_cpu_some(tokens - t);
    many_tokens(v, kind, some, first, rows, x + t, out_from(to, t));
    t += some;
  }
#endif
  if (!MM_ROLLED) {
    for (; t + 8 <= tokens; t += 8) some_tokens(v, kind, 8, first, rows, x + t, out_from(to, t));
    if (t + 4 <= tokens) some_tokens(v, kind, 4, first, rows, x + t, out_from(to, t)), t += 4;
  }
  for (; t + 2 <= tokens; t += 2) some_tokens(v, kind, 2, first, rows, x + t, out_from(to, t));
  if (t < tokens) one_token(v, kind, first, rows, x[t], to.y + t * to.stride);
}
#endif

/* The kinds of this level: functions, and where they are found. */
#define E4M3_KINDS(of)   of(E4M3) of(E4M3_32) of(E4M3_GROUPS) of(MXFP8)
#define PAIRED_KINDS(of) E4M3_KINDS(of) of(BF16) of(INT8) of(NVFP4) of(MXFP4) of(INT4) of(INT4_OFFSET)
#ifdef MM_PAIRS
#define KINDS(of) PAIRED_KINDS(of)
#elif defined MM_VBMI
#define KINDS(of) E4M3_KINDS(of)
#else
#define KINDS(of) PAIRED_KINDS(of) of(INT8_CODES) of(F32) of(F16)
#endif
#define KIND(name)                                                                                                                      \
  TARGET static void rows_##name(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, \
                                 size_t stride, float *sums) {                                                                          \
    all_tokens(v, MM_KIND_##name, first, rows, x, tokens, (rows_out){y, stride, sums});                                                 \
  }
KINDS(KIND)
#undef KIND
#define KIND(name) [MM_KIND_##name] = rows_##name,
static mm_cpu_rows_fn *const rows_of[MM_KINDS] = {KINDS(KIND)};
#undef KIND
