/* Attention of a draft's blocks and chains, the columns of its taps side by side, and what an EAGLE-3 draft's cells have besides keys and
 * values: launch functions of draft_attention.cu. As in kernels.h none allocates, waits or reads device memory. The maths is that of
 * runtime/cpu/cpu_draft.c. */
#ifndef MM_CUDA_DRAFT_ATTENTION_H
#define MM_CUDA_DRAFT_ATTENTION_H

#include "runtime/cuda/core/kernels.h"

/* o[row, heads·d] = softmax(q·k / √d)·v for `spans` spans of `rows` rows each, qkv[row, (heads + 2·kv_heads)·d] after norm and RoPE. A row
 * reads the cells before its span's first position, and the span's own rows from qkv: all of them, or the ones up to itself (causal). A row
 * at position p reads no position before p + 1 - window (0: all). d is 32, 64 or 128. Spans of slot -1 are passed over.
 *
 * Pass `pass` of a chain: spans of one row, `pass` positions behind the chain's first, whose own rows before it are chain[slot, pass,
 * 2·kv_heads·d]; its keys and values are added there. Position 0 is not read. */
#define MM_CU_CHAIN 7 /* passes of a chain at most */
struct mm_cu_draft_block {
  const __nv_bfloat16 *qkv;
  __nv_bfloat16 *o;
  uint32_t heads, kv_heads, dim, rows, spans, window;
  bool causal;
  mm_cu_kv cells;
  void *work;           /* mm_cu_draft_work bytes, zero at first, as it is left */
  __nv_bfloat16 *chain; /* [slots, MM_CU_CHAIN, 2, kv_heads, d]; NULL: blocks */
  uint32_t pass;
  mm_cu_codes codes; /* of o, too (mm_cu_combine), where d is 128; or {} */
};
size_t mm_cu_draft_work(void);
/* r: of the step; pos of a span's first row, less `pass`, is the number of cells before its own rows. */
cudaError_t mm_cu_attend_block(const mm_cu_draft_block &a, const mm_cu_rows &r, cudaStream_t s);

/* y[row, count·width] = the columns of x[0], x[1], …; width a multiple of 8. */
#define MM_CU_CONCAT 8
struct mm_cu_columns {
  const __nv_bfloat16 *x[MM_CU_CONCAT];
  uint32_t count, width;
};
cudaError_t mm_cu_concat(__nv_bfloat16 *y, const mm_cu_columns &x, uint32_t rows, cudaStream_t s);

/* Rows of `width` numbers, a multiple of 8, in cells[page][64][width] of an EAGLE-3 draft: x[row] goes to the cell of the row's position,
 * but of slot -1; y[row] comes from the cell of the position before, zeros at position 0 and of slot -1. */
struct mm_cu_hidden {
  __nv_bfloat16 *cells;
  const uint32_t *table;
  uint32_t pages_per_slot, width;
};
cudaError_t mm_cu_hidden_keep(const mm_cu_hidden &c, const __nv_bfloat16 *x, const mm_cu_rows &r, uint32_t rows, cudaStream_t s);
cudaError_t mm_cu_hidden_before(const mm_cu_hidden &c, __nv_bfloat16 *y, const mm_cu_rows &r, uint32_t rows, cudaStream_t s);

#endif
