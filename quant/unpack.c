/* From packed bytes back to f32, for every scheme: codes to their values, then the scales over them, on whatever grid the shard
 * stores them. */
#include "quant/tile.h"

#define SCALE_BITS 0xffffe000u

float mm_scale_value(mm_dtype t, const void *plane, size_t i) {
  switch (t) {
    case MM_F32: return ((const float *)plane)[i];
    case MM_BF16: return mm_bf16_to_f32(((const uint16_t *)plane)[i]);
    case MM_F16: return mm_f16_to_f32(((const uint16_t *)plane)[i]);
    case MM_U32: return mm_f32_from_bits(((const uint32_t *)plane)[i] & SCALE_BITS);
    case MM_F8_E4M3: return mm_e4m3_value[((const uint8_t *)plane)[i]];
    default: return mm_e8m0_to_f32(((const uint8_t *)plane)[i]);
  }
}

uint32_t mm_scale_word(float scale, int8_t zero) { return (mm_f32_bits(scale) & SCALE_BITS) | (uint8_t)zero; }
int8_t mm_zero_value(const void *plane, size_t i) { return (int8_t)(uint8_t)((const uint32_t *)plane)[i]; }

bool mm_scale_allowed(const mm_scheme *s, float v) {
  float most = s->signed_scale && v < 0 ? -v : v;
  return most > 0 && most <= 0x1.fffffep127f;
}

bool mm_zero_allowed(const mm_scheme *s, const void *plane, size_t i) {
  if (!mm_has_zeros(s)) return true;
  const int8_t zero = mm_zero_value(plane, i), most = s->code == MM_CODE_INT8 ? 127 : 7;
  return (((const uint32_t *)plane)[i] & ~SCALE_BITS) == (uint8_t)zero && zero <= most && zero >= -most - 1;
}

enum { LONG = 64, SHORT = 16 }; /* columns under one scale; fewer only on finer or odd grids */

/* t[i] = the value of code i times s[i / LONG]. */
#define DECODE(value)                     \
  for (int g = 0; g < MM_TILE; g += LONG) \
    for (int i = g; i < g + LONG; i++) t[i] = (value)*s[g / LONG];
MM_INLINE void decode(float *restrict t, const uint8_t *restrict c, mm_code code, const float *restrict s) {
  uint8_t nibble[MM_TILE];
  if (code >= MM_CODE_E2M1) mm_tile_split_nibbles(nibble, c);
  switch (code) {
    case MM_CODE_PLAIN: break; /* mm_widen's */
    case MM_CODE_E4M3: DECODE(mm_e4m3_to_f32(c[i])) break;
    case MM_CODE_INT8: DECODE((float)(int8_t)c[i]) break;
    case MM_CODE_E2M1: DECODE(mm_e2m1_to_f32(nibble[i])) break;
    case MM_CODE_INT4: DECODE((float)((nibble[i] ^ 8) - 8)) break;
    case MM_CODE_INT4_OFFSET: DECODE((float)(nibble[i] - 8)) break;
  }
}

/* s[c] is the product of the scales over columns k + c · step of a row; step divides every cell. */
static void tile_scales(float *s, const mm_packed *m, uint32_t lead, uint32_t row, uint32_t k, uint32_t step, uint32_t count) {
  for (uint32_t c = 0; c < count; c++) s[c] = 1;
  for (unsigned i = 1; i < m->scheme->plane_count; i++) {
    mm_cell cell = m->cell[i];
    size_t line = (size_t)lead * mm_cells(m->n, cell.n) + (cell.n ? row / cell.n : 0);
    size_t at = line * mm_cells(m->k, cell.k) + (cell.k ? k / cell.k : 0);
    uint32_t end = cell.k ? (cell.k - k % cell.k) / step : count; /* of the cell at `at` */
    for (uint32_t c = 0; c < count; end += cell.k / step) {
      float v = mm_scale_value(m->scheme->plane[i].dtype, m->plane[i], at++);
      for (; c < end && c < count; c++) s[c] *= v;
    }
  }
}

/* Codes in t[count · step] become weights: less the zero points over columns k + c · step of a row, times the scales s[c]. */
MM_INLINE void scale_with_zeros(float *t, const mm_packed *m, uint32_t lead, uint32_t row, uint32_t k, uint32_t step, uint32_t count,
                                const float *s) {
  const mm_cell cell = m->cell[1];
  const size_t line = (size_t)lead * mm_cells(m->n, cell.n) + (cell.n ? row / cell.n : 0);
  for (uint32_t c = 0; c < count; c++) {
    const size_t at = line * mm_cells(m->k, cell.k) + (cell.k ? (k + c * step) / cell.k : 0);
    const float zero = mm_zero_value(m->plane[1], at);
    for (uint32_t i = c * step; i < (c + 1) * step; i++) t[i] = (t[i] - zero) * s[c];
  }
}

MM_INLINE void unpack_row_body(const mm_packed *m, uint32_t lead, uint32_t row, float *out) {
  uint32_t per_byte = m->scheme->plane[0].cell.k, step = LONG;
  for (unsigned i = 1; i < m->scheme->plane_count; i++)
    while (m->cell[i].k % step) step /= 2;
  const uint8_t *codes = (const uint8_t *)m->plane[0] + ((size_t)lead * m->n + row) * mm_cells(m->k, per_byte);
  for (uint32_t k = 0; k < m->k; k += MM_TILE) {
    uint32_t count = (uint32_t)mm_min(MM_TILE, m->k - k);
    bool whole = count == MM_TILE;
    uint8_t pad[MM_TILE];
    float capacity[MM_TILE], s[MM_TILE], one[MM_TILE / LONG] = {1, 1, 1, 1}, *t = whole ? out + k : capacity;
    if (!whole) {
      memset(pad, 0, sizeof pad);
      memcpy(pad, codes + k / per_byte, mm_cells(count, per_byte));
      memset(s, 0, sizeof s);
    }
    tile_scales(s, m, lead, row, k, step, mm_cells(count, step));
    for (uint32_t ahead = 8 * MM_TILE; whole && ahead < 9 * MM_TILE; ahead += 64) __builtin_prefetch(codes + (k + ahead) / per_byte);
    const bool zeros = mm_has_zeros(m->scheme);
    decode(t, whole ? codes + k / per_byte : pad, m->scheme->code, step == LONG && !zeros ? s : one);
    if (zeros) scale_with_zeros(t, m, lead, row, k, step, mm_cells(count, step), s);
    for (uint32_t i = 0; !zeros && step < LONG && step >= SHORT && i < MM_TILE; i += SHORT)
      for (uint32_t j = i; j < i + SHORT; j += MM_LANES) MM_LANES_AT(t + j) *= s[i / step];
    for (uint32_t i = 0; !zeros && step < SHORT && i < count; i++) t[i] *= s[i / step];
    if (!whole) memcpy(out + k, capacity, count * sizeof *capacity);
  }
}
MM_VERSIONS(unpack_row, (const mm_packed *m, uint32_t lead, uint32_t row, float *out), (m, lead, row, out))

void mm_row_scales(const mm_packed *m, uint32_t lead, uint32_t row, float *out) { tile_scales(out, m, lead, row, 0, 1, m->k); }

void mm_unpack(const mm_packed *m, uint32_t lead, uint32_t row, uint32_t rows, float *out) {
  if (m->scheme->code == MM_CODE_PLAIN) {
    mm_dtype t = m->scheme->plane[0].dtype;
    size_t first = ((size_t)lead * m->n + row) * m->k;
    mm_widen(out, (const char *)m->plane[0] + first * mm_dtype_size(t), t, (size_t)rows * m->k);
    return;
  }
  for (uint32_t r = 0; r < rows; r++) unpack_row(m, lead, row + r, out + (size_t)r * m->k);
}
