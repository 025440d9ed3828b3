/* Which loops a packed matrix takes, and its inputs in their order (cpu_rows.h). */
#include "runtime/cpu/cpu_rows.h"

#include <string.h>

#include "quant/numbers.h"

static mm_cpu_kind kind_of(const mm_packed *w, uint32_t cell, mm_dtype scale) {
  switch (w->scheme->code) {
    case MM_CODE_PLAIN:
      return w->scheme->plane[0].dtype == MM_F32 ? MM_KIND_F32 : w->scheme->plane[0].dtype == MM_BF16 ? MM_KIND_BF16 : MM_KIND_F16;
    case MM_CODE_E4M3: return scale == MM_U8 ? MM_KIND_MXFP8 : cell % MM_CHUNK ? MM_KIND_E4M3_32 : MM_KIND_E4M3;
    case MM_CODE_INT8: return MM_KIND_INT8;
    case MM_CODE_E2M1: return scale == MM_U8 ? MM_KIND_MXFP4 : MM_KIND_NVFP4;
    case MM_CODE_INT4: return MM_KIND_INT4;
    default: return MM_KIND_INT4_OFFSET;
  }
}

static size_t row_bytes(const mm_packed *w) {
  const mm_plane *codes = &w->scheme->plane[0];
  return w->scheme->code == MM_CODE_PLAIN ? w->k * mm_dtype_size(codes->dtype) : mm_cells(w->k, codes->cell.k);
}

const uint8_t *mm_cpu_row_at(const mm_packed *w, uint32_t lead, uint32_t row) {
  return (const uint8_t *)w->plane[0] + ((size_t)lead * w->n + row) * row_bytes(w);
}

bool mm_cpu_view_of(mm_cpu_view *v, const mm_packed *w, uint32_t lead) {
  *v = (mm_cpu_view){.w = w, .lead = lead};
  if (mm_has_zeros(w->scheme)) return false;
  for (unsigned i = 1; i < w->scheme->plane_count; i++) {
    if (w->cell[i].k == 0) continue;
    if (v->plane) return false;
    v->plane = i, v->cell = w->cell[i].k;
  }
  const mm_dtype scale = v->plane ? w->scheme->plane[v->plane].dtype : MM_F32;
  v->kind = kind_of(w, v->cell, scale);
  v->row_bytes = row_bytes(w);
  v->codes = mm_cpu_row_at(w, lead, 0);
  if (!v->plane) return v->kind != MM_KIND_MXFP8;
  if (!mm_cpu_kinds[v->kind].scale_bytes || scale != mm_cpu_kinds[v->kind].scale) return false;
  const bool fine = v->cell == 32 || v->cell == 64;
  if (v->kind == MM_KIND_MXFP8 || v->kind == MM_KIND_E4M3_32) return fine;
  return v->cell % MM_CHUNK == 0 || (mm_cpu_nibbles(v->kind) && (fine || v->cell == 16));
}

void mm_cpu_view_f32(mm_cpu_view *v, const mm_packed *w, const float *rows, uint32_t stride) {
  *v = (mm_cpu_view){.w = w, .kind = MM_KIND_F32, .codes = (const uint8_t *)rows, .row_bytes = stride * sizeof *rows};
}

void mm_cpu_turn(float *out, const float *x, uint32_t k, mm_cpu_kind kind) {
  const uint32_t whole = k / MM_CHUNK * MM_CHUNK, end = mm_cpu_padded(k);
  if (!mm_cpu_turned(kind)) {
    memcpy(out, x, k * sizeof *x);
    memset(out + k, 0, (end - k) * sizeof *x);
    return;
  }
  for (uint32_t j = 0; j < 8; j++)
    for (uint32_t i = 0; i < 16; i++) {
      const uint32_t column = mm_cpu_column(kind, j, i);
      for (uint32_t c = 0; c < whole; c += MM_CHUNK) out[c + 16 * j + i] = x[c + column];
      if (whole < end) out[whole + 16 * j + i] = whole + column < k ? x[whole + column] : 0;
    }
}

static uint32_t bf16_bits(float x) {
  const uint32_t u = mm_f32_bits(x), size = u & 0x7fffffff;
  if (size > 0x7f800000) return u | 0x400000;
  return size < 0x00800000 ? u & 0x80000000 : u + 0x7fff + (u >> 16 & 1);
}
float mm_cpu_bf16(float x) { return mm_f32_from_bits(bf16_bits(x) & 0xffff0000); }

void mm_cpu_pair(float *row, uint32_t k) {
  const uint32_t padded = mm_cpu_padded(k);
  uint32_t word[16];
  for (uint32_t i = 0; i < padded; i += 32) {
    for (uint32_t j = 0; j < 16; j++) {
      row[i + j] = mm_cpu_bf16(row[i + j]), row[i + 16 + j] = mm_cpu_bf16(row[i + 16 + j]);
      word[j] = mm_f32_bits(row[i + j]) | mm_f32_bits(row[i + 16 + j]) >> 16;
    }
    memcpy(row + padded + i / 2, word, sizeof word);
  }
}

bool mm_cpu_integers(float *row, uint32_t k) {
  const uint32_t padded = mm_cpu_padded(k);
  int32_t start[16] = {0};
  bool all = true;
  for (uint32_t c = 0; c < padded; c += 64) {
    uint32_t word[16] = {0};
    for (uint32_t j = 0; j < 4; j++)
      for (uint32_t i = 0; i < 16; i++) {
        const float x = row[c + 16 * j + i];
        const int32_t code = x >= -127 && x <= 127 ? (int32_t)x : 0;
        all &= (float)code == x;
        word[i] |= ((uint32_t)code & 255) << 8 * j;
        start[i] -= 128 * code;
      }
    memcpy((uint8_t *)(row + padded) + c, word, sizeof word);
  }
  memcpy(row + padded + padded / 4, start, sizeof start);
  return all;
}

float mm_cpu_row_factor(const mm_cpu_view *v, uint32_t row) {
  const mm_packed *w = v->w;
  float f = mm_cpu_kinds[v->kind].factor;
  for (unsigned i = 1; v->kind != MM_KIND_F32 && i < w->scheme->plane_count; i++) {
    if (i == v->plane) continue;
    const uint32_t n = w->cell[i].n;
    f *= mm_scale_value(w->scheme->plane[i].dtype, w->plane[i], (size_t)v->lead * mm_cells(w->n, n) + (n ? row / n : 0));
  }
  return f;
}

void mm_cpu_row_factors(const mm_cpu_view *v, uint32_t first, uint32_t rows, float *factor) {
  bool same = true;
  for (unsigned i = 1; i < v->w->scheme->plane_count; i++) same &= i == v->plane || v->w->cell[i].n == 0;
  for (uint32_t r = 0; r < rows; r++) factor[r] = same && r ? factor[0] : mm_cpu_row_factor(v, first + r);
}
