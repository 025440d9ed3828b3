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
  return plan.items + 2 * blocks;
}

/* A step's rows and how they are cut. */
struct cut_rows {
  const int32_t *slot;
  const uint32_t *pos;
  mm_cu_gqa_cut cut;

  uint32_t tiles(uint32_t row) const { return slot[row] < 0 ? 0 : pos[row] / MM_CU_GQA_KEYS + 1; }
  uint32_t part(uint32_t row) const { return cut.part(tiles(row)); }
  uint32_t parts(uint32_t row) const { return ceil_div(tiles(row), part(row)); }
  uint32_t tiles_of(uint32_t row, uint32_t split) const {
    const uint32_t from = split * part(row);
    return from < tiles(row) ? min(part(row), tiles(row) - from) : 0;
  }
  /* first[rows], and the partial results of all rows in chunks. */
  uint32_t place(uint32_t rows, uint32_t *first) const {
    uint32_t places = 0;
    for (uint32_t i = 0; i < rows; i++) {
      first[i] = places;
      if (parts(i) > cut.splits) places += parts(i);
    }
    return places;
  }
};

/* Items that go one by one to the block that has least to do. */
struct dealer {
  using load = std::pair<uint32_t, uint32_t>; /* cost, block */
  std::vector<load> least;                    /* a heap, the least loaded block first */
  std::vector<std::pair<uint32_t, uint2>> dealt;

  explicit dealer(uint32_t blocks) : least(blocks) {
    for (uint32_t b = 0; b < blocks; b++) least[b] = {0, b};
  }
  void start() { std::make_heap(least.begin(), least.end(), std::greater<load>()); }
  void deal(uint2 item, uint32_t cost) {
    std::pop_heap(least.begin(), least.end(), std::greater<load>());
    dealt.push_back({least.back().second, item});
    least.back().first += cost;
    std::push_heap(least.begin(), least.end(), std::greater<load>());
  }
  /* Of each block where its items are and how many, then the items. */
  size_t write(uint2 *item) const {
    const uint32_t blocks = (uint32_t)least.size();
    for (uint32_t b = 0; b < blocks; b++) item[b] = make_uint2(blocks, 0);
    for (const auto &d : dealt) item[d.first].y++;
    for (uint32_t b = 1; b < blocks; b++) item[b].x = item[b - 1].x + item[b - 1].y;
    std::vector<uint32_t> at(blocks);
    for (const auto &[block, what] : dealt) item[item[block].x + at[block]++] = what;
    return blocks + dealt.size();
  }
};

size_t mm_cu_gqa_list(const mm_cu_heads &h, uint32_t rows, const int32_t *slot, const uint32_t *pos, const mm_cu_far_plan &plan,
                      uint32_t *first, uint2 *item) {
  if (!plan.items || !rows) return 0;
  const cut_rows c = {slot, pos, mm_cu_cut_rows(h, rows, plan)};
  const uint32_t blocks = rows * c.cut.splits;
  const auto cost_of = [&](uint32_t row, uint32_t part) {
    const uint32_t tiles = c.tiles_of(row, part);
    return tiles ? tiles + MM_CU_GQA_COST : 0;
  };
  dealer d(blocks);
  if (!c.place(rows, first)) return d.write(item);
  for (uint32_t b = 0; b < blocks; b++) d.least[b].first = cost_of(b % rows, b / rows);
  d.start();
  for (uint32_t i = 0; i < rows; i++)
    for (uint32_t s = c.cut.splits; s < c.parts(i); s++) d.deal(make_uint2(i, s), cost_of(i, s));
  return d.write(item);
}

/* Items of up to `most` rows of one sequence that are cut alike. */
static std::vector<uint2> together(const cut_rows &c, uint32_t rows, uint32_t most) {
  std::vector<uint2> items;
  for (uint32_t i = 0, n; i < rows; i += n) {
    for (n = 1; n < most && i + n < rows && c.slot[i] >= 0 && c.slot[i + n] == c.slot[i] && c.part(i + n) == c.part(i);) n++;
    const uint32_t last = i + n - 1;
    for (uint32_t s = 0, from = i; s < mm_max(1, c.parts(last)); s++) {
      while (from < last && c.parts(from) <= s) from++; /* later rows are longer */
      items.push_back(make_uint2(from | (last - from + 1) << 16, s));
    }
  }
  return items;
}

size_t mm_cu_gqa_verify_list(const mm_cu_heads &h, uint32_t rows, const int32_t *slot, const uint32_t *pos, const mm_cu_far_plan &plan,
                             uint32_t *first, uint2 *item) {
  if (!plan.items || !rows) return 0;
  const cut_rows c = {slot, pos, mm_cu_cut_rows(h, rows, plan)};
  c.place(rows, first);
  std::vector<uint2> items;
  for (uint32_t most = MM_CU_TOGETHER; most > 0; most /= 2) { /* as many as leave two fifths of the multiprocessors an item */
    items = together(c, rows, most);
    if (items.size() * h.kv_heads * 5 >= 2 * multiprocessors()) break;
  }
  /* Sequences go through their parts side by side: what rows in several items read comes from memory once. */
  std::stable_sort(items.begin(), items.end(), [](const uint2 &x, const uint2 &y) { return x.y < y.y; });
  dealer d(rows * c.cut.splits);
  d.start();
  for (const uint2 &i : items) {
    const uint32_t count = i.x >> 16, tiles = c.tiles_of((i.x & 0xffff) + count - 1, i.y);
    d.deal(i, tiles ? tiles * (3 + count) / 4 + MM_CU_GQA_COST : 0);
  }
  return d.write(item);
}
