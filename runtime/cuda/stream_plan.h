/* How a decode product cuts its rows and its shared memory (stream.cuh), and where the copy engine finds them: made on the host for each
 * launch. */
#ifndef MM_CUDA_STREAM_PLAN_H
#define MM_CUDA_STREAM_PLAN_H

#include <cuda.h>
#include <stdint.h>

#include "runtime/cuda/kernels.h"

constexpr uint32_t kStreamWarps = 8, kStreamThreads = 32 * kStreamWarps;
constexpr int kStreamTiles = 3;     /* of 16 rows, in a group */
constexpr uint32_t kLine = 128;     /* bytes of a row in a stage */
constexpr uint32_t kOtherDepth = 2; /* stream_plan.depth without tensor copies */

struct stream_plan {
  uint32_t boxes;                /* runs of rows in a group */
  uint32_t box;                  /* rows of each that are fetched: the most that a group has */
  uint32_t part_groups;          /* groups of a part: all rows, or one expert's */
  uint32_t rows_each, rows_over; /* rows of a group: one more in the first rows_over */
  uint32_t steps;                /* stages of a row */
  uint32_t depth;                /* stages in the ring, for each warp */
  uint32_t tokens;               /* 1, 8 or 16 */
  uint32_t one_stages;           /* tokens 1: stages of all segments of a row */
  uint32_t one_bytes;            /* of a token's activations in a stage */
  uint32_t row_scales;           /* bytes of scales that travel with a row and stage: 0 or 16 */

  __host__ __device__ uint32_t run() const { return (box + 7) / 8 * 8; } /* rows from one run to the next */
  __host__ __device__ uint32_t tiles() const { return (boxes * run() + 15) / 16; }
  __host__ __device__ uint32_t code_bytes() const { return boxes * run() * kLine; }
  __host__ __device__ uint32_t scale_bytes() const { return boxes * run() * row_scales; }
  __host__ __device__ uint32_t sum_pitch() const { return tiles() * 16 + 4; } /* floats from token to token: no bank conflicts */
  /* Shared memory: codes, then these, then the barriers. The sums come behind the scales, the scales behind the codes: half a tile beyond
   * a stage is there to be read. */
  __host__ __device__ uint32_t scales() const { return kStreamWarps * depth * code_bytes(); }
  __host__ __device__ uint32_t sums() const { return scales() + kStreamWarps * depth * scale_bytes(); }
  __host__ __device__ uint32_t ones() const { /* one token: two groups' sums; 16: those of half the warps */
    return sums() + (tokens == 1 ? 2 : 8) * kStreamWarps * sum_pitch() * 4;
  }
  __host__ __device__ uint32_t barriers() const { return ones() + (one_stages * (one_bytes + 4) + 7) / 8 * 8; }
  __host__ __device__ uint32_t shared() const { return barriers() + kStreamWarps * depth * 8; }
};

struct stream_source {
  CUtensorMap codes, scales;
};

/* Cuts `parts` equal runs of `rows` rows (each twice, `boxes` = 2) into groups for w's kernel. segments: of one token's k axis. beside:
 * shared memory that the kernel has besides. */
stream_plan mm_cu_plan_stream(const mm_cu_weight &w, uint32_t parts, uint32_t rows, uint32_t boxes, uint32_t segments, uint32_t tokens,
                              uint32_t beside);
/* Fills `to` on a device with a copy engine; else leaves it alone. */
cudaError_t mm_cu_open_source(const mm_cu_weight &w, const stream_plan &p, stream_source *to);

#endif
