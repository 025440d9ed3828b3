/* How a decode product cuts its rows and its shared memory (stream.cuh), and the TMA descriptors: made on the host for each
 * launch. */
#ifndef MM_CUDA_STREAM_PLAN_H
#define MM_CUDA_STREAM_PLAN_H

#include <cuda.h>
#include <stdint.h>

#include "runtime/cuda/core/kernels.h"

constexpr uint32_t kStreamWarps = 12; /* of a block; experts_decode.cu has an exception */
constexpr int kStreamTiles = 3;       /* of 16 rows, in a group */
constexpr uint32_t kLine = 128;       /* bytes of a row in a stage */
constexpr uint32_t kOtherDepth = 2;   /* stream_plan.depth without tensor copies */

struct stream_plan {
  uint32_t box;                  /* rows that are fetched of each run: the most that a group has */
  uint32_t part_groups;          /* groups of a part: all rows, or one expert's */
  uint32_t rows_each, rows_over; /* rows of a group: one more in the first rows_over */
  uint32_t steps;                /* stages of a row */
  uint32_t depth;                /* stages in the ring, for each warp */
  uint32_t tokens;               /* 1, 8 or 16 */
  uint32_t one_stages;           /* tokens 1: stages of all segments of a row */
  uint32_t run;                  /* rows from one run of a stage to the next */
  uint32_t tiles;
  uint32_t code_bytes, scale_bytes;              /* of a stage */
  uint32_t fetch_bytes;                          /* by tensor copies */
  uint32_t sum_pitch;                            /* floats from token to token: no bank conflicts */
  uint32_t scales, sums, ones, barriers, shared; /* places in shared memory */
  uint32_t warps;                                /* of a block */
};

struct row_group {
  uint32_t first, count;
};

/* Group i of a part. */
__device__ __forceinline__ row_group stream_share(const stream_plan &p, uint32_t i) {
  return {i * p.rows_each + min(i, p.rows_over), p.rows_each + (i < p.rows_over)};
}

/* Blocks that must fit a multiprocessor's registers. */
__host__ __device__ constexpr int stream_blocks(int tokens, uint32_t warps) { return tokens == 1 && warps == 12 ? 2 : 1; }

struct stream_source {
  CUtensorMap codes, scales;
};

/* Cuts `parts` equal runs of `rows` rows (each twice, `boxes` = 2) into groups for w's kernel. segments: of one token's k axis.
 * other_shared: shared memory that the kernel has besides. one_warps: of a block for a single token. */
stream_plan mm_cu_plan_stream(const mm_cu_weight &w, uint32_t parts, uint32_t rows, uint32_t boxes, uint32_t segments, uint32_t tokens,
                              uint32_t other_shared, uint32_t one_warps);
/* Fills `to` on a device with TMA; else leaves it alone. */
cudaError_t mm_cu_open_source(const mm_cu_weight &w, const stream_plan &p, stream_source *to);

#endif
