/* The CPU backend's chosen blocks in tests (cpu_blocks.h). */
#include "tests/ops/cpu_blocks.h"

#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_backend.h"

uint32_t mm_test_index_heads(const mm_backend *cpu) { return cpu->index_heads; }

static const mm_span *span_of(const mm_batch *batch, uint32_t row) {
  const mm_span *s = batch->span;
  while (row >= s->first + s->count) s++;
  return s;
}

/* Number i of an index key: f32, or an f32 scale and then e4m3. */
static double key_number(const mm_backend *cpu, const char *key, uint32_t i) {
  float x;
  if (!cpu->c.options.index_fp8) return memcpy(&x, key + i * sizeof x, sizeof x), (double)x;
  memcpy(&x, key, sizeof x);
  return (double)x * (double)mm_e4m3_to_f32((uint8_t)key[sizeof x + i]);
}

mm_test_score mm_test_score_of(const mm_backend *cpu, uint32_t layer, mm_act act, uint32_t row, uint32_t head, uint32_t block) {
  const mm_model *m = cpu->c.model;
  const mm_span *s = span_of(cpu->batch, row);
  const float *q = mm_cpu_row(act, row) + (size_t)head * m->index_dim;
  mm_test_score best = {-INFINITY, 0};
  for (uint32_t at = block * m->index_block; at < (block + 1) * m->index_block; at++) {
    const uint32_t page = mm_cpu_page(cpu, (uint32_t)s->slot, at / MM_PAGE);
    const char *k = mm_cpu_index_key(cpu, &cpu->cache[layer], page, at % MM_PAGE);
    double sum = 0, squares = 0;
    for (uint32_t i = 0; i < m->index_dim; i++) {
      const double term = (double)q[i] * key_number(cpu, k, i);
      sum += term, squares += term * term;
    }
    if (sum > best.score) best = (mm_test_score){sum, sqrt(squares)};
  }
  return best;
}

size_t mm_test_set_blocks(mm_backend *cpu, const uint32_t *block, const uint32_t *count, uint32_t rows) {
  const uint32_t top_k = cpu->c.model->index_top_k;
  size_t others = 0;
  for (size_t i = 0; i < (size_t)rows * cpu->index_heads; i++) {
    uint32_t *own = cpu->block + i * top_k;
    const uint32_t *list = block + i * top_k;
    others += cpu->blocks[i] != count[i] || memcmp(own, list, count[i] * sizeof *own) != 0;
    memcpy(own, list, count[i] * sizeof *own);
    cpu->blocks[i] = count[i];
  }
  return others;
}
