/* The loops of cpu_rows.h over one level's vectors. The file that includes this defines, for sixteen lanes of f32: v16, LEVEL (the
 * functions' target), v16_zero, v16_load, v16_store, v16_add, v16_fma(a, b, c) = a·b + c, v16_set1, v16_sum by the rule's tree, v16_scales,
 * widen and bad. */

/* A scale as f32; E4M3 a 256th of it. */
LEVEL float scale_at(mm_cpu_kind kind, const uint8_t *p) {
  uint32_t bits = 0;
  memcpy(&bits, p, mm_cpu_scale_bytes(kind));
  if (kind >= MM_KIND_INT4) return mm_bf16_to_f32((uint16_t)bits);
  return kind == MM_KIND_MXFP8 || kind == MM_KIND_MXFP4 ? mm_e8m0_to_f32((uint8_t)bits) : mm_f32_from_bits(bits);
}

/* One chunk of one row, against `tokens` tokens whose columns begin at x[t] + at. scale: NULL where none lies along the row. */
LEVEL void chunk_step(v16 *sum, mm_cpu_kind kind, uint32_t tokens, const uint8_t *codes, const uint8_t *scale, uint32_t cell,
                      const float *const *x, size_t at) {
  v16 w[8], s = v16_set1(1);
  widen(w, kind, codes);
  if (kind == MM_KIND_E4M3_32 || kind == MM_KIND_MXFP8) {
    MM_UNROLL
    for (uint32_t g = 0; g < 4; g++) {
      const v16 own = v16_set1(scale_at(kind, scale + (cell == 64 ? g / 2 : g) * mm_cpu_scale_bytes(kind)));
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) {
        const float *const from = x[t] + at + 32 * g;
        const v16 part = v16_fma(w[2 * g + 1], v16_load(from + 16), v16_mul(w[2 * g], v16_load(from)));
        sum[t] = v16_fma(part, own, sum[t]);
      }
    }
    return;
  }
  if (scale) s = mm_cpu_turned(kind) && cell < MM_CHUNK ? v16_scales(kind, scale, cell) : v16_set1(scale_at(kind, scale));
  MM_UNROLL
  for (uint32_t t = 0; t < tokens; t++) {
    const float *const from = x[t] + at;
    v16 part = v16_mul(w[0], v16_load(from));
    MM_UNROLL
    for (int j = 1; j < 8; j++) part = v16_fma(w[j], v16_load(from + 16 * j), part);
    sum[t] = scale ? v16_fma(part, s, sum[t]) : v16_add(sum[t], part);
  }
}

/* What covers whole rows. */
LEVEL float row_factor(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row) {
  const mm_packed *w = v->w;
  float f = mm_cpu_e4m3(kind) || kind == MM_KIND_NVFP4 ? 256 : 1;
  for (unsigned i = 1; kind != MM_KIND_F32 && i < w->scheme->plane_count; i++) {
    if (i == v->plane) continue;
    const uint32_t n = w->cell[i].n;
    f *= mm_scale_value(w->scheme->plane[i].dtype, w->plane[i], (size_t)v->lead * mm_cells(w->n, n) + (n ? row / n : 0));
  }
  return f;
}

/* The scales along a row. */
LEVEL const uint8_t *row_scales(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t row) {
  const mm_cell cell = v->w->cell[v->plane];
  const size_t line = (size_t)v->lead * mm_cells(v->w->n, cell.n) + (cell.n ? row / cell.n : 0);
  return v->plane ? (const uint8_t *)v->w->plane[v->plane] + line * mm_cells(v->w->k, cell.k) * mm_cpu_scale_bytes(kind) : NULL;
}

enum { BLOCK = 4 }; /* chunks whose x, for MM_CPU_TOKENS tokens, stays in the first cache while all rows pass */

/* Up to MM_CPU_TOKENS tokens. */
LEVEL void some_tokens(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t tokens, uint32_t first, uint32_t rows, const float *const *x,
                       float *y, size_t stride, float *sums) {
  const uint32_t k = v->w->k, chunks = mm_cells(k, MM_CHUNK), size = mm_cpu_chunk_bytes(kind), block = tokens == 1 ? chunks : BLOCK;
  const uint32_t wide = v->cell > MM_CHUNK ? v->cell / MM_CHUNK : 1; /* chunks under one scale */
  const uint32_t step = v->plane ? mm_cpu_scale_bytes(kind) * (v->cell < MM_CHUNK ? MM_CHUNK / v->cell : 1) : 0;
  for (uint32_t from = 0; from < chunks; from += block) {
    const uint32_t end = from + block < chunks ? from + block : chunks;
    for (uint32_t r = 0; r < rows; r++) {
      const uint8_t *codes = v->codes + (first + r) * v->row_bytes, *scales = row_scales(v, kind, first + r);
      float *row_sums = sums + (size_t)r * tokens * 16;
      bool nan = false;
      v16 sum[MM_CPU_TOKENS];
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) sum[t] = from ? v16_load(row_sums + 16 * t) : v16_zero();
      for (uint32_t c = from; c < end; c++) {
        const uint8_t *at = codes + (size_t)c * size, *scale = scales ? scales + (size_t)(wide > 1 ? c / wide : c) * step : NULL;
        uint8_t room[4 * MM_CHUNK], scale_room[32];
        if ((c + 1) * MM_CHUNK > k) {
          memset(room, 0, sizeof room), memset(scale_room, 0, sizeof scale_room);
          memcpy(room, at, v->row_bytes - (size_t)c * size), at = room;
          if (scale) memcpy(scale_room, scale, mm_cells(k - c * MM_CHUNK, v->cell) * mm_cpu_scale_bytes(kind)), scale = scale_room;
        }
        if (tokens == 1) __builtin_prefetch(at + 1024), __builtin_prefetch(at + 1024 + 64);
        nan |= mm_cpu_e4m3(kind) && bad(at);
        chunk_step(sum, kind, tokens, at, scale, v->cell, x, (size_t)c * MM_CHUNK);
      }
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) sum[t] = nan ? v16_set1(NAN) : sum[t];
      if (end < chunks) {
        MM_UNROLL
        for (uint32_t t = 0; t < tokens; t++) v16_store(row_sums + 16 * t, sum[t]);
        continue;
      }
      const float factor = row_factor(v, kind, first + r);
      MM_UNROLL
      for (uint32_t t = 0; t < tokens; t++) y[t * stride + r] = v16_sum(sum[t]) * factor;
    }
  }
}

LEVEL void all_tokens(const mm_cpu_view *v, mm_cpu_kind kind, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens,
                      float *y, size_t stride, float *sums) {
  uint32_t t = 0;
  if (!MM_SANITIZED) {
    for (; t + 8 <= tokens; t += 8) some_tokens(v, kind, 8, first, rows, x + t, y + t * stride, stride, sums);
    if (t + 4 <= tokens) some_tokens(v, kind, 4, first, rows, x + t, y + t * stride, stride, sums), t += 4;
  }
  for (; t + 2 <= tokens; t += 2) some_tokens(v, kind, 2, first, rows, x + t, y + t * stride, stride, sums);
  if (t < tokens) some_tokens(v, kind, 1, first, rows, x + t, y + t * stride, stride, sums);
}

#define KIND(name)                                                                                                                      \
  TARGET static void rows_##name(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, \
                                 size_t stride, float *sums) {                                                                          \
    all_tokens(v, MM_KIND_##name, first, rows, x, tokens, y, stride, sums);                                                             \
  }
KIND(F32)
KIND(BF16)
KIND(F16)
KIND(E4M3)
KIND(E4M3_32)
KIND(MXFP8)
KIND(INT8)
KIND(NVFP4)
KIND(MXFP4)
KIND(INT4)
KIND(INT4_OFFSET)
#undef KIND

static mm_cpu_rows_fn *const rows_of[MM_KINDS] = {[MM_KIND_F32] = rows_F32,
                                                  [MM_KIND_BF16] = rows_BF16,
                                                  [MM_KIND_F16] = rows_F16,
                                                  [MM_KIND_E4M3] = rows_E4M3,
                                                  [MM_KIND_E4M3_32] = rows_E4M3_32,
                                                  [MM_KIND_MXFP8] = rows_MXFP8,
                                                  [MM_KIND_INT8] = rows_INT8,
                                                  [MM_KIND_NVFP4] = rows_NVFP4,
                                                  [MM_KIND_MXFP4] = rows_MXFP4,
                                                  [MM_KIND_INT4] = rows_INT4,
                                                  [MM_KIND_INT4_OFFSET] = rows_INT4_OFFSET};

TARGET static float dot(const float *a, const float *b, uint32_t n) {
  v16 sum = v16_zero();
  uint32_t i = 0;
  for (; i + MM_CHUNK <= n; i += MM_CHUNK) {
    v16 part = v16_mul(v16_load(a + i), v16_load(b + i));
    for (uint32_t j = 16; j < MM_CHUNK; j += 16) part = v16_fma(v16_load(a + i + j), v16_load(b + i + j), part);
    sum = v16_add(sum, part);
  }
  if (i < n) {
    float room[2][MM_CHUNK] = {{0}, {0}};
    memcpy(room[0], a + i, (n - i) * sizeof *a), memcpy(room[1], b + i, (n - i) * sizeof *b);
    v16 part = v16_mul(v16_load(room[0]), v16_load(room[1]));
    for (uint32_t j = 16; j < MM_CHUNK; j += 16) part = v16_fma(v16_load(room[0] + j), v16_load(room[1] + j), part);
    sum = v16_add(sum, part);
  }
  return v16_sum(sum);
}
