/* Writing integers in words (words.h). */
#include <string.h>

#include "convert/decode/words.h"
#include "quant/numbers.h"

static const uint8_t awq_order[8] = {0, 4, 1, 5, 2, 6, 3, 7}; /* the nibble of each of a word's rows */

static unsigned bits_of(const mm_scheme *s) { return s->code == MM_CODE_INT8 ? 8 : 4; }
static uint32_t group_of(const mm_words_matrix *m) { return m->group ? m->group : m->cols; }
static uint32_t groups_of(const mm_words_matrix *m) { return mm_cells(m->cols, m->group); }

mm_shape mm_words_shape(const mm_words_matrix *m, mm_words_role role) {
  const uint32_t per = 32 / bits_of(m->scheme), groups = groups_of(m);
  const bool turned = m->form != MM_WORDS_CT;
  switch (role) {
    case MM_WORDS_CODES:
      if (m->form == MM_WORDS_CT) return mm_shape2(m->rows, mm_cells(m->cols, per));
      return m->form == MM_WORDS_GPTQ ? mm_shape2(m->cols / per, m->rows) : mm_shape2(m->cols, m->rows / per);
    case MM_WORDS_SCALES: return turned ? mm_shape2(groups, m->rows) : mm_shape2(m->rows, groups);
    case MM_WORDS_ZEROS: return turned ? mm_shape2(groups, m->rows / per) : mm_shape2(mm_cells(m->rows, per), groups);
    case MM_WORDS_ORDER: return mm_shape1(m->cols);
    case MM_WORDS_SHAPE: break;
  }
  return mm_shape1(2);
}

static uint32_t code_at(const mm_words_matrix *m, uint32_t row, uint32_t col) {
  const uint8_t *codes = m->codes;
  if (m->scheme->code == MM_CODE_INT8) return codes[(size_t)row * m->cols + col] ^ 0x80u;
  return codes[(size_t)row * mm_cells(m->cols, 2) + col / 2] >> (col % 2 ? 4 : 0) & 15;
}

static void put_codes(const mm_words_matrix *m, uint32_t *out) {
  const unsigned bits = bits_of(m->scheme);
  const uint32_t per = 32 / bits, line = mm_cells(m->cols, per);
  for (uint32_t r = 0; r < m->rows; r++)
    for (uint32_t k = 0; k < m->cols; k++) {
      const uint32_t c = code_at(m, r, k);
      switch (m->form) {
        case MM_WORDS_GPTQ: out[(size_t)(k / per) * m->rows + r] |= c << bits * (k % per); break;
        case MM_WORDS_AWQ: out[(size_t)k * (m->rows / per) + r / per] |= c << bits * awq_order[r % per]; break;
        default: out[(size_t)r * line + k / per] |= c << bits * (k % per);
      }
    }
}

static void put_scales(const mm_words_matrix *m, uint16_t *out) {
  const uint32_t groups = groups_of(m);
  for (uint32_t r = 0; r < m->rows; r++)
    for (uint32_t g = 0; g < groups; g++) {
      const float v = mm_scale_value(m->scheme->plane[1].dtype, m->scales, (size_t)r * groups + g);
      out[m->form == MM_WORDS_CT ? (size_t)r * groups + g : (size_t)g * m->rows + r] =
          m->scheme->scale_of == MM_F16 ? mm_f32_to_f16(v) : mm_f32_to_bf16(v);
    }
}

/* GPTQ takes zero_less from every zero point of a word at once. */
static void put_zeros(const mm_words_matrix *m, uint32_t *out, size_t words) {
  const unsigned bits = bits_of(m->scheme);
  const uint32_t per = 32 / bits, groups = groups_of(m), mask = (1u << bits) - 1, middle = 1u << (bits - 1);
  for (uint32_t r = 0; r < m->rows; r++)
    for (uint32_t g = 0; g < groups; g++) {
      const int zero = mm_has_zeros(m->scheme) ? mm_zero_value(m->scales, (size_t)r * groups + g) : 0;
      const uint32_t z = (uint32_t)(zero + (int)middle) & mask, at = m->form == MM_WORDS_AWQ ? awq_order[r % per] : r % per;
      out[m->form == MM_WORDS_CT ? (size_t)(r / per) * groups + g : (size_t)g * (m->rows / per) + r / per] |= z << bits * at;
    }
  for (size_t i = 0; m->form == MM_WORDS_GPTQ && i < words; i++) out[i] -= m->zero_less * (UINT32_MAX / mask);
}

void mm_words_put(const mm_words_matrix *m, mm_words_role role, void *out) {
  const mm_shape shape = mm_words_shape(m, role);
  uint64_t count = 0;
  if (!mm_shape_count(&shape, &count)) return; /* sizes were refused with the plan */
  uint32_t *order = out;
  switch (role) {
    case MM_WORDS_CODES:
      memset(out, 0, count * sizeof(uint32_t));
      put_codes(m, out);
      break;
    case MM_WORDS_SCALES: put_scales(m, out); break;
    case MM_WORDS_ZEROS:
      memset(out, 0, count * sizeof(uint32_t));
      put_zeros(m, out, count);
      break;
    case MM_WORDS_ORDER:
      for (uint32_t k = 0; k < m->cols; k++) order[k] = k / group_of(m);
      break;
    case MM_WORDS_SHAPE: memcpy(out, (int64_t[2]){m->rows, m->cols}, 2 * sizeof(int64_t)); break;
  }
}
