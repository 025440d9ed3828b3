/* The blocks that the CPU backend's last select chose, for tests that put others in their place (C: the backend's own struct). */
#ifndef MM_TESTS_OPS_CPU_BLOCKS_H
#define MM_TESTS_OPS_CPU_BLOCKS_H

#include "runtime/engine/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a row of the step and an index head of this rank selects from. */
typedef struct mm_test_score {
  double score;  /* the largest q·k of the block */
  double spread; /* root of Σ (q·k)² over the columns, of that key */
} mm_test_score;
uint32_t mm_test_index_heads(const mm_backend *cpu);
/* q: an act of the backend after select. */
mm_test_score mm_test_score_of(const mm_backend *cpu, uint32_t layer, mm_act q, uint32_t row, uint32_t head, uint32_t block);
/* The lists of rows [0, rows) of the step become block[rows, heads, index_top_k] and count[rows, heads]; how many were others before. */
size_t mm_test_set_blocks(mm_backend *cpu, const uint32_t *block, const uint32_t *count, uint32_t rows);

#ifdef __cplusplus
}
#endif
#endif
