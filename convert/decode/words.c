/* Numbers that lie several to a word, along either axis, in matrices that lie on either side. */
#include "convert/decode/decode.h"
#include "quant/numbers.h"

static uint32_t word_at(const mm_words *w, uint64_t across, uint64_t down) {
  uint64_t i = w->turned ? across * w->line + down : down * w->line + across;
  uint32_t v;
  if (w->size == 1) return ((const uint8_t *)w->data)[i];
  memcpy(&v, (const uint8_t *)w->data + 4 * i, 4);
  return v;
}

/* Bits by which the i-th number of a word is shifted. */
static unsigned shift(const mm_words *w, uint32_t i) { return w->bits * (w->order ? w->order[i] : i); }

static void along_columns(const mm_words *w, uint32_t row, uint32_t rows, uint32_t cols, uint8_t *out) {
  uint32_t mask = (1u << w->bits) - 1;
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t k = 0; k < cols; k += w->cell.k) {
      uint32_t v = word_at(w, k / w->cell.k, row + r), n = (uint32_t)mm_min(w->cell.k, cols - k);
      for (uint32_t i = 0; i < n; i++) out[(size_t)r * cols + k + i] = (uint8_t)(v >> shift(w, i) & mask);
    }
}

static void along_rows(const mm_words *w, uint32_t row, uint32_t rows, uint32_t cols, uint8_t *out) {
  uint32_t mask = (1u << w->bits) - 1, per = w->cell.n;
  for (uint32_t first = row / per * per; first < row + rows; first += per) {
    uint32_t from = first < row ? row - first : 0, to = (uint32_t)mm_min(per, row + rows - first);
    for (uint32_t k = 0; k < cols; k++) {
      uint32_t v = word_at(w, k, first / per);
      for (uint32_t i = from; i < to; i++) out[(size_t)(first + i - row) * cols + k] = (uint8_t)(v >> shift(w, i) & mask);
    }
  }
}

void mm_words_spread(const mm_words *w, uint32_t row, uint32_t rows, uint32_t cols, uint8_t *out) {
  if (w->cell.n > 1)
    along_rows(w, row, rows, cols, out);
  else
    along_columns(w, row, rows, cols, out);
}
