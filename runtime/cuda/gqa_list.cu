/* How the rows of a decode step are split for attention (gqa_decode.cu): on the host, which knows every row's position. */
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.h"

namespace {

constexpr uint32_t kMaxSplits = 32, kChunk = 256; /* tiles */
constexpr uint64_t kMostItems = 2048;             /* of rows in chunks: bounds the room for their partial results */

}  // namespace

/* Splits for a batch: the fewest rounds of blocks, `parallel` in a round, in parts of a row's work; a round costs 1/32 of a row more. */
uint32_t mm_cu_gqa_splits(const mm_cu_heads &h, uint32_t rows) {
  const uint32_t parallel = multiprocessors(), blocks = rows * h.kv_heads;
  uint32_t best = 1;
  float least = INFINITY;
  for (uint32_t n = 1; n <= kMaxSplits; n++) {
    const float cost = (float)ceil_div(blocks * n, parallel) * (1.0f / (float)n + 1.0f / 32);
    if (cost < least) best = n, least = cost;
  }
  return best;
}

mm_cu_far_plan mm_cu_plan_far(uint32_t slots, uint32_t max_positions) {
  const uint64_t tiles = mm_ceil_div(max_positions, MM_CU_GQA_KEYS),
                 fair = mm_round_up(mm_ceil_div(slots * tiles, kMostItems), MM_CU_GQA_WARPS);
  mm_cu_far_plan plan;
  plan.chunk = (uint32_t)mm_max(kChunk, fair);
  plan.items = tiles > plan.chunk ? (uint32_t)(slots * mm_ceil_div(tiles, plan.chunk)) : 0;
  if (!plan.items) plan.chunk = 0;
  return plan;
}

size_t mm_cu_gqa_items(const mm_cu_heads &h, uint32_t max_tokens, const mm_cu_far_plan &plan) {
  if (!plan.items) return 0;
  size_t blocks = 0;
  for (uint32_t rows = 1; rows <= max_tokens; rows++) blocks = max(blocks, (size_t)rows * mm_cu_gqa_splits(h, rows));
  return plan.items + blocks;
}

size_t mm_cu_gqa_list(const mm_cu_heads &h, uint32_t rows, const int32_t *slot, const uint32_t *pos, const mm_cu_far_plan &plan,
                      uint32_t *first, uint2 *item) {
  if (!plan.items || !rows) return 0;
  const uint32_t splits = mm_cu_gqa_splits(h, rows);
  size_t items = 0;
  uint32_t places = 0;
  for (uint32_t i = 0; i < rows; i++) {
    first[i] = places;
    const uint32_t tiles = pos[i] / MM_CU_GQA_KEYS + 1, used = ceil_div(tiles, plan.chunk);
    if (slot[i] < 0 || tiles <= plan.chunk || used <= splits) continue; /* parts for every block are no larger */
    places += used;
    for (uint32_t s = splits; s < used; s++) item[items++] = make_uint2(i, s);
  }
  const size_t end = items + (size_t)rows * splits;
  for (; items < end; items++) item[items] = make_uint2(MM_CU_NO_ITEM, 0);
  return end;
}
