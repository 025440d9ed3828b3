/* How the rows of a decode step are split for attention (gqa_decode.cu): on the host, which knows every row's position. */
#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"
#include "runtime/cuda/core/launch.h"

namespace {

constexpr uint32_t kMaxSplits = 32, kChunk = 256; /* tiles */
constexpr uint64_t kMostItems = 2048;             /* of rows in chunks: bounds the room for their partial results */
static_assert(kChunk % MM_CU_GQA_WARPS == 0, "a chunk is whole turns of a block's warps");

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

mm_cu_far_plan mm_cu_plan_far(const mm_cu_heads &h, uint32_t slots, uint32_t max_positions, uint32_t chunk) {
  const uint64_t tiles = mm_ceil_div(max_positions, MM_CU_GQA_KEYS), at_once = multiprocessors() / h.kv_heads,
                 fair = mm_round_up(mm_ceil_div(slots * tiles, kMostItems), MM_CU_GQA_WARPS);
  mm_cu_far_plan plan;
  plan.chunk = chunk ? chunk : (uint32_t)mm_max(kChunk, fair);
  if (tiles <= plan.chunk) return {};
  /* The second: what rounding to multiples of the blocks adds, of no more rows than there are blocks at once. */
  plan.items = (uint32_t)(slots * mm_ceil_div(tiles, plan.chunk) + mm_min(slots, at_once) * at_once);
  return plan;
}

/* A row in chunks is longer than one, so that it has at most twice as many of them as it has chunks' lengths: of twice the chunk for each
 * row of a slot all rows have no more than the slots' had. */
mm_cu_far_plan mm_cu_plan_far_rows(const mm_cu_far_plan &plan, uint32_t slots, uint32_t rows) {
  mm_cu_far_plan larger = plan;
  if (rows > slots) larger.chunk *= 2 * ceil_div(rows, slots), larger.even = false;
  return larger;
}

mm_cu_gqa_cut mm_cu_cut_rows(const mm_cu_heads &h, uint32_t rows, const mm_cu_far_plan &plan) {
  const uint32_t splits = mm_cu_gqa_splits(h, rows), blocks = rows * splits;
  const bool at_once = blocks * h.kv_heads <= multiprocessors();
  return {splits, plan.items ? plan.chunk : UINT32_MAX, at_once && plan.even ? blocks : 1};
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
  const mm_cu_gqa_cut cut = mm_cu_cut_rows(h, rows, plan);
  const uint32_t blocks = rows * cut.splits;
  const auto tiles_of = [&](uint32_t row) { return slot[row] < 0 ? 0 : pos[row] / MM_CU_GQA_KEYS + 1; };
  const auto parts_of = [&](uint32_t row) { return ceil_div(tiles_of(row), cut.part(tiles_of(row))); };
  const auto cost_of = [&](uint32_t row, uint32_t part) {
    const uint32_t tiles = tiles_of(row), from = part * cut.part(tiles);
    return from < tiles ? min(cut.part(tiles), tiles - from) + MM_CU_GQA_COST : 0;
  };
  uint32_t places = 0;
  for (uint32_t i = 0; i < rows; i++) {
    first[i] = places;
    if (parts_of(i) > cut.splits) places += parts_of(i);
  }
  for (uint32_t b = 0; b < blocks; b++) item[b] = make_uint2(blocks, 0);
  if (!places) return blocks;

  using load = std::pair<uint32_t, uint32_t>; /* tiles, block */
  std::vector<load> least(blocks);            /* a heap, the least loaded block first */
  std::vector<std::pair<uint32_t, uint2>> dealt;
  for (uint32_t b = 0; b < blocks; b++) least[b] = {cost_of(b % rows, b / rows), b};
  std::make_heap(least.begin(), least.end(), std::greater<load>());
  for (uint32_t i = 0; i < rows; i++) {
    for (uint32_t s = cut.splits; s < parts_of(i); s++) {
      std::pop_heap(least.begin(), least.end(), std::greater<load>());
      load &to = least.back();
      dealt.push_back({to.second, make_uint2(i, s)});
      item[to.second].y++;
      to.first += cost_of(i, s);
      std::push_heap(least.begin(), least.end(), std::greater<load>());
    }
  }
  for (uint32_t b = 1; b < blocks; b++) item[b].x = item[b - 1].x + item[b - 1].y;
  std::vector<uint32_t> at(blocks);
  for (const auto &[block, what] : dealt) item[item[block].x + at[block]++] = what;
  return blocks + dealt.size();
}
