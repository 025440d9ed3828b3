/* Random planes on the host (random.h), the numbers that a GPU makes of the same seeds but for the order of 4-bit codes. */
#include "quant/random.h"

#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "quant/quant.h"

enum { E4M3_256 = 0x78 };

float mm_random_scale(mm_code code, uint32_t k) {
  static const float rms[] = {[MM_CODE_PLAIN] = 1,     [MM_CODE_E4M3] = 107.24f, [MM_CODE_INT8] = 73.9f,
                              [MM_CODE_E2M1] = 2.926f, [MM_CODE_INT4] = 4.18f,   [MM_CODE_INT4_OFFSET] = 4.18f};
  return 1 / (rms[code] * sqrtf((float)k));
}
uint8_t mm_random_exponent(float scale) { return (uint8_t)(127 + lrintf(log2f(scale))); }

static uint32_t uncut_columns(const mm_packed *w) { return w->whole_k ? w->whole_k : w->k; }

static uint32_t code_word(mm_code code, uint32_t bits) {
  switch (code) {
    case MM_CODE_E4M3:
    case MM_CODE_INT8: return mm_random_bytes(bits);
    case MM_CODE_INT4: return mm_random_int4(bits) ^ 0x88888888u; /* value + 8 to two's complement */
    case MM_CODE_INT4_OFFSET: return mm_random_int4(bits);
    default: return bits;
  }
}

/* n bytes of codes of a row, from byte `first` of the uncut row on, by words of four. */
static void fill_codes(mm_code code, uint32_t seed, uint32_t matrix, uint32_t row, uint64_t first, size_t n, uint8_t *to) {
  for (size_t i = 0; i < n;) {
    const size_t skip = (first + i) % 4, some = mm_min(4 - skip, n - i);
    const uint32_t word = code_word(code, mm_random_bits(seed, matrix, row, (uint32_t)((first + i) / 4)));
    memcpy(to + i, (const char *)&word + skip, some);
    i += some;
  }
}

static void put(mm_dtype t, float x, void *to, size_t i) {
  const uint16_t half = t == MM_BF16 ? mm_f32_to_bf16(x) : mm_f32_to_f16(x);
  if (t == MM_U32) x = mm_f32_from_bits(mm_scale_word(x, 0));
  if (mm_dtype_size(t) == 4)
    memcpy((char *)to + 4 * i, &x, sizeof x);
  else
    memcpy((char *)to + 2 * i, &half, sizeof half);
}

/* A row of a plain matrix, or the number of a plain vector's row. */
static void fill_plain(const mm_packed *w, uint32_t seed, uint32_t matrix, uint32_t row, void *to) {
  const mm_dtype t = w->scheme->plane[0].dtype;
  const float most = sqrtf(3 / (float)uncut_columns(w)), factor = mm_random_factor(&w->random, seed, matrix, row);
  for (uint32_t i = 0; i < w->k; i++) {
    const uint32_t column = w->first_k + i;
    float x;
    if (t == MM_BF16 && w->k > 1) {
      const uint32_t pair = mm_random_bits(seed, matrix, row, column / 2);
      x = most * factor * 0x1p-15f * (float)(int16_t)(uint16_t)(pair >> 16 * (column % 2));
    } else {
      const float share = mm_random_share(mm_random_bits(seed, matrix, row, column));
      x = w->k == 1 ? w->random.centre + 0.01f * (2 * share - 1) : factor * most * (2 * share - 1);
    }
    put(t, x, to, i);
  }
}

static void fill_scale(const mm_packed *w, unsigned plane, uint32_t seed, uint32_t matrix, uint32_t row, uint32_t columns, void *to) {
  const mm_plane *p = &w->scheme->plane[plane];
  const float scale = mm_random_scale(w->scheme->code, uncut_columns(w));
  const bool global = plane == 2; /* over bytes of E4M3 that are all 256 */
  for (uint32_t i = 0; i < columns; i++) {
    const uint32_t column = p->cell.k ? (w->first_k + i * w->cell[plane].k) / p->cell.k : 0;
    if (p->dtype == MM_F8_E4M3)
      memset((char *)to + i, E4M3_256, 1);
    else if (mm_dtype_size(p->dtype) == 1)
      memset((char *)to + i, mm_random_exponent(scale), 1);
    else
      put(p->dtype, global ? scale / 256 : scale * (0.9f + 0.2f * mm_random_share(mm_random_bits(seed, matrix, row, column))), to, i);
  }
}

void mm_random_plane(const mm_packed *w, unsigned plane, void *to) {
  const mm_plane *p = &w->scheme->plane[plane];
  const mm_cell cell = w->cell[plane];
  const uint32_t rows = mm_cells(w->n, cell.n), columns = mm_cells(w->k, cell.k),
                 seed = mm_random_seed(w->random.seed, plane < 2 ? plane : 2);
  const size_t row_bytes = columns * mm_dtype_size(p->dtype);
  char *at = to;
  for (uint32_t i = 0; i < w->lead; i++) {
    for (uint32_t j = 0; j < rows; j++, at += row_bytes) {
      const uint32_t matrix = w->random.first + i, row = mm_random_row(&w->random, j * cell.n);
      if (p->scale)
        fill_scale(w, plane, seed, matrix, p->cell.n ? row / p->cell.n : 0, columns, at);
      else if (w->scheme->code == MM_CODE_PLAIN)
        fill_plain(w, seed, matrix, row, at);
      else
        fill_codes(w->scheme->code, seed, matrix, row, (uint64_t)w->first_k / p->cell.k, row_bytes, (uint8_t *)at);
    }
  }
}
