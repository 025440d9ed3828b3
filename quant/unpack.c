/* From packed bytes back to f32, for every scheme: codes to their values, then the scales over them, on whatever grid the shard
 * stores them. */
#include "quant/tile.h"

/* One element of a scale plane. U8 holds E8M0 exponents, as other tools write them. */
static float scale_value(mm_dtype t, const void *plane, size_t i) {
  switch (t) {
    case MM_F32: return ((const float *)plane)[i];
    case MM_BF16: return mm_bf16_to_f32(((const uint16_t *)plane)[i]);
    case MM_F8_E4M3: return mm_e4m3_value[((const uint8_t *)plane)[i]];
    default: return mm_e8m0_to_f32(((const uint8_t *)plane)[i]);
  }
}

MM_INLINE void decode(float t[MM_TILE], const uint8_t c[MM_TILE], mm_code code) {
  uint8_t nibble[MM_TILE];
  if (code >= MM_CODE_E2M1) mm_tile_split_nibbles(nibble, c);
  switch (code) {
    case MM_CODE_PLAIN: break; /* mm_widen's */
    case MM_CODE_E4M3:
      for (int i = 0; i < MM_TILE; i++) t[i] = mm_e4m3_to_f32(c[i]);
      break;
    case MM_CODE_INT8:
      for (int i = 0; i < MM_TILE; i++) t[i] = (float)(int8_t)c[i];
      break;
    case MM_CODE_E2M1:
      for (int i = 0; i < MM_TILE; i++) t[i] = mm_e2m1_to_f32(nibble[i]);
      break;
    case MM_CODE_INT4:
      for (int i = 0; i < MM_TILE; i++) t[i] = (float)((nibble[i] ^ 8) - 8);
      break;
    case MM_CODE_INT4_OFFSET:
      for (int i = 0; i < MM_TILE; i++) t[i] = (float)(nibble[i] - 8);
      break;
  }
}

/* s[c] is the product of the scales over columns k + c·step of a row. */
static void tile_scales(float *s, const mm_packed *m, uint32_t lead, uint32_t row, uint32_t k, uint32_t step, uint32_t count) {
  for (uint32_t c = 0; c < count; c++) s[c] = 1;
  for (unsigned i = 1; i < m->scheme->plane_count; i++) {
    mm_cell cell = m->cell[i];
    size_t line = (size_t)lead * mm_cells(m->n, cell.n) + (cell.n ? row / cell.n : 0), first = line * mm_cells(m->k, cell.k);
    for (uint32_t c = 0; c < count; c++)
      s[c] *= scale_value(m->scheme->plane[i].dtype, m->plane[i], first + (cell.k ? (k + c * step) / cell.k : 0));
  }
}

/* Columns that are sure to share their scales: 16, or 1 on a grid that is finer or odd. */
static uint32_t shared_columns(const mm_packed *m) {
  for (unsigned i = 1; i < m->scheme->plane_count; i++)
    if (m->cell[i].k % 16) return 1;
  return 16;
}

MM_INLINE void unpack_row_body(const mm_packed *m, uint32_t lead, uint32_t row, float *out) {
  uint32_t per_byte = m->scheme->plane[0].cell.k, share = shared_columns(m);
  const uint8_t *codes = (const uint8_t *)m->plane[0] + ((size_t)lead * m->n + row) * mm_cells(m->k, per_byte);
  for (uint32_t k = 0; k < m->k; k += MM_TILE) {
    uint32_t count = (uint32_t)mm_min(MM_TILE, m->k - k);
    uint8_t c[MM_TILE];
    float t[MM_TILE], s[MM_TILE] = {0};
    memcpy(c, codes + k / per_byte, mm_cells(count, per_byte));
    memset(c + mm_cells(count, per_byte), 0, MM_TILE - mm_cells(count, per_byte));
    decode(t, c, m->scheme->code);
    tile_scales(s, m, lead, row, k, share, mm_cells(count, share));
    if (share == 16) {
      for (int i = 0; i < MM_TILE; i += MM_LANES) MM_LANES_AT(t + i) *= s[i / 16];
    } else {
      for (uint32_t i = 0; i < count; i++) t[i] *= s[i];
    }
    memcpy(out + k, t, count * sizeof *t);
  }
}
MM_VERSIONS(unpack_row, (const mm_packed *m, uint32_t lead, uint32_t row, float *out), (m, lead, row, out))

void mm_unpack(const mm_packed *m, uint32_t lead, uint32_t row, uint32_t rows, float *out) {
  if (m->scheme->code == MM_CODE_PLAIN) {
    mm_dtype t = m->scheme->plane[0].dtype;
    size_t first = ((size_t)lead * m->n + row) * m->k;
    mm_widen(out, (const char *)m->plane[0] + first * mm_dtype_size(t), t, (size_t)rows * m->k);
    return;
  }
  for (uint32_t r = 0; r < rows; r++) unpack_row(m, lead, row + r, out + (size_t)r * m->k);
}
