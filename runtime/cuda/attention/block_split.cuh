/* Which blocks of a row are scored: shared by block_select.cu and block_scores.cu. */
#ifndef MM_CUDA_BLOCK_SPLIT_CUH
#define MM_CUDA_BLOCK_SPLIT_CUH

#include "runtime/cuda/attention/block_attention.h"

/* How many blocks of a row at this position are read whatever their scores, which stand last, and how many
 * of those before them. */
struct block_split {
  uint32_t all, count, forced, others;
  __device__ __forceinline__ block_split(const mm_cu_select &a, uint32_t pos) {
    all = pos / a.size + 1, count = min(a.top_k, all);
    forced = all > count ? a.local : count, others = all - forced;
  }
};

/* block_scores.cu: scores of the rows of tiles [first, first + count), a tile's place 64 rows after that of the
 * tile before. sm_90a, one block of 128 keys of 128 numbers. */
bool mm_cu_takes_tile_scores(const mm_cu_select &a);
cudaError_t mm_cu_tile_scores(const mm_cu_select &a, const mm_cu_tiles &t, uint32_t first, uint32_t count, cudaStream_t s);

#endif
