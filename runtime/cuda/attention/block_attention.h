/* Attention over blocks of positions, and its index branch: launch functions of heads.cu, block_select.cu,
 * gqa_blocks.cu. As in kernels.h none allocates, waits or reads device memory. The maths is that of
 * runtime/cpu: cpu_gqa.c and cpu_select.c. */
#ifndef MM_CUDA_BLOCK_ATTENTION_H
#define MM_CUDA_BLOCK_ATTENTION_H

#include "runtime/cuda/core/kernels.h"

#define MM_CU_BLOCK_GROUP 16    /* query heads of a kv head at most */
#define MM_CU_INDEX_HEADS 8     /* index heads of a rank at most */
#define MM_CU_BLOCK_PAIRS 16384 /* of a row and a block that are attended to at a time in prompts; ≥ MM_MAX_BLOCKS · MM_CU_TILE */
#define MM_CU_SCORE_ROWS  512   /* rows whose scores there is room for; a multiple of MM_CU_TILE */

/* ---- heads.cu ---- */

/* Heads of a step's rows before they are used: the RMS norm of each head by itself (weights [dim], f32;
 * NULL: none), then RoPE of its first rotary_dim columns; values have neither. Queries go back in place,
 * keys and values to their cells [page][heads][64][dim], bf16, or e4m3 under a scale for each cell (largest magnitude / 448). Rows of
 * slot -1 are passed over. keys NULL: keys go back in place too, and v_heads is 0. */
struct mm_cu_head_work {
  __nv_bfloat16 *q; /* the first row's, as k and v */
  const __nv_bfloat16 *k, *v;
  uint32_t q_pitch, kv_pitch; /* numbers from a row to the next */
  uint32_t q_heads, k_heads, v_heads;
  uint32_t dim, rotary_dim; /* dim 32, 64 or 128; rotary_dim even, ≤ dim */
  const float *q_norm, *k_norm, *inv_freq;
  float eps;
  void *keys, *values;
  const uint32_t *table;
  uint32_t pages_per_slot, tokens;
  float *k_scale, *v_scale; /* [page][heads][64], or NULL: bf16 */
};
cudaError_t mm_cu_place_heads(const mm_cu_head_work &a, const mm_cu_rows &r, cudaStream_t s);

/* ---- block_select.cu ---- */

struct mm_cu_peers;

/* The scan of single rows' index keys, split over the ranks of a stage by blocks: of rows at positions from `from` on, rank r of n scores
 * blocks r, r + n, … for the heads of all ranks, and whoever has a head merges the best of each. The lists are those of the whole scan, bit
 * for bit. All ranks of the stage launch it for rows at the same positions. */
struct mm_cu_index_split {
  const mm_cu_peers *peers; /* NULL: each rank scores all blocks for its own heads */
  uint32_t heads, from;     /* index heads of all ranks; a rank has mm_cu_select.heads of them, or several ranks have the same one */
};

/* The blocks that each row and index head reads. Block b is positions [b·size, (b + 1)·size). A row at
 * position p reads its own block and the local - 1 before it, and of those before them the ones with the
 * largest max q·k, the lower block first, until there are top_k or no more. */
struct mm_cu_select {
  const __nv_bfloat16 *q;    /* [rows of the step, heads·dim] after norm and RoPE */
  const __nv_bfloat16 *keys; /* the layer's [page][64][dim], those of the step's rows among them; or e4m3, see key_scale */
  const uint32_t *table;
  uint32_t pages_per_slot;
  uint32_t heads, dim, size, top_k, local; /* heads ≤ MM_CU_INDEX_HEADS; dim 32, 64 or 128; size a multiple of 16; top_k ≤ MM_MAX_BLOCKS */
  float *score;                            /* mm_cu_score_floats: scratch */
  uint32_t most;                           /* blocks of the longest sequence */
  uint32_t *block;                         /* [rows of the step, heads, top_k] ascending */
  uint32_t *count;                         /* [rows of the step, heads]; 0 for slot -1 */
  const float *key_scale = nullptr;        /* [page][64]: keys are e4m3 under these; NULL: bf16 */
  mm_cu_index_split split = {};            /* of mm_cu_select_rows, for as many rows as there is room for */
};
inline size_t mm_cu_score_floats(uint32_t heads, uint32_t most) { return (size_t)MM_CU_SCORE_ROWS * heads * most; }
/* Rows [0, tokens) of the step, each a sequence's only one, or one of up to MM_CU_VERIFY side by side. */
cudaError_t mm_cu_select_rows(const mm_cu_select &a, const mm_cu_rows &r, uint32_t tokens, cudaStream_t s);
/* The rows of the tiles. A row's scores do not depend on its tile. They are those of mm_cu_select_rows but, where mm_cu_takes_tile_scores,
 * for the last bit of sums; its blocks are the same but where two scores are that near. */
cudaError_t mm_cu_select_tiles(const mm_cu_select &a, const mm_cu_tiles &t, cudaStream_t s);

/* ---- gqa_blocks.cu ---- */

/* What mm_cu_gqa_blocks reads of a row's positions: the blocks of mm_cu_select, each index head's for
 * kv_heads / heads kv heads in a row; or every position up to the row's own, where block is NULL. */
struct mm_cu_block_lists {
  const uint32_t *block, *count; /* [rows of the step, heads, top_k], [rows of the step, heads] */
  uint32_t heads, top_k, size;
};
/* o[row, heads·d] = softmax(q·k / √d)·v for rows [first, first + count) of the step, whose q (in qkv[row,
 * (heads + 2·kv_heads)·d]) has its norm and RoPE, and whose k and v are in the cache already; zeros for
 * slot -1. The lists hold min(top_k, all) blocks and were written before the launch before this one. split: rows, as
 * mm_cu_select_rows takes them, are cut along their positions into parts for more blocks; how depends on count and
 * the row alone. work: mm_cu_block_work bytes, zero at first, as it is left. */
struct mm_cu_block_job {
  const __nv_bfloat16 *qkv;
  __nv_bfloat16 *o;
  void *work;
  uint32_t first, count, max_tokens;
  bool split;
};
size_t mm_cu_block_work(const mm_cu_heads &h, uint32_t max_tokens);
cudaError_t mm_cu_gqa_blocks(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                             const mm_cu_block_job &a, cudaStream_t s);

/* ---- gqa_block_tiles.cu ---- */

/* The same for the rows of tiles, eight at a time, where the kernel takes such heads, lists and caches: sm_90a, heads of 64 or 128,
 * blocks of a multiple of 32 positions, bf16. A row's bits depend on its sequence alone. */
bool mm_cu_takes_block_tiles(const mm_cu_heads &h, const mm_cu_kv &kv, const mm_cu_block_lists &l);
cudaError_t mm_cu_gqa_block_tiles(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                                  const mm_cu_gqa &a, cudaStream_t s);

/* ---- gqa_by_block.cu ---- */

/* The same, each block for all rows that read it: sm_90a, heads of 128, 8 or 16 of them for a kv head, blocks of 128 positions, bf16. A
 * row's bits depend on its sequence alone. a.work: mm_cu_by_block_work bytes, the first 256 zero at first, as they are left; a.tokens: rows
 * of the step. */
bool mm_cu_wants_by_block(const mm_cu_heads &h, uint32_t index_heads, uint32_t size, uint32_t top_k); /* by shapes alone */
bool mm_cu_takes_by_block(const mm_cu_heads &h, const mm_cu_kv &kv, const mm_cu_block_lists &l);
size_t mm_cu_by_block_work(const mm_cu_heads &h, uint32_t index_heads, uint32_t top_k, uint32_t max_tokens);
cudaError_t mm_cu_gqa_by_block(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_block_lists &l,
                               const mm_cu_gqa &a, cudaStream_t s);

#endif
