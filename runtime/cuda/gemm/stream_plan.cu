/* Plans of decode products (stream_plan.h). */
#include "runtime/cuda/gemm/stream_plan.h"

#include <algorithm>

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"

namespace {

/* Shared memory of a block, the only one of its kind on a multiprocessor; on other devices than sm_90. */
constexpr uint32_t kMost = 200 * 1024, kMostOther = 96 * 1024;
static_assert(kMostOther + 2048 <= MM_CU_SHARED_LEAST, "it is there everywhere");
constexpr uint32_t kMostDepth = 8;
constexpr uint32_t kMostOne = 40 * 1024; /* bytes of a token's activations that wait in shared memory */

/* Groups of a part so that the last round of blocks is as full as it can be, then as few as possible. */
uint32_t cut_groups(uint32_t parts, uint32_t rows, uint32_t most_rows) {
  const uint32_t blocks = multiprocessors(), least = ceil_div(rows, most_rows),
                 most = std::max(least, std::min(ceil_div(rows, 8), 4 * least + blocks));
  uint32_t best = least;
  double best_cost = 1e30;
  for (uint32_t groups = least; groups <= most; groups++) {
    const double rounds = ceil_div(parts * groups, blocks),
                 cost = rounds * (ceil_div(rows, groups) + 2); /* two rows' time to end a group */
    if (cost < best_cost) best_cost = cost, best = groups;
  }
  return best;
}

/* Bytes of f32 (half by half of the stage) or byte scales that travel with a row and stage. */
uint32_t row_scales(const mm_cu_weight &w) {
  switch (w.scale_kind) {
    case MM_CU_COARSE: return 8;
    case MM_CU_NV:
    case MM_CU_MX: return 16;
    default: return 0;
  }
}

uint32_t piece_columns(const mm_cu_weight &w) { return w.code == MM_CU_BF16 ? 8 : w.code == MM_CU_E4M3 ? 16 : 32; }

/* Lays out shared memory for a ring of p->depth stages a warp. */
void place(stream_plan *p, const mm_cu_weight &w, uint32_t boxes) {
  p->run = (p->box + 7) / 8 * 8, p->tiles = (boxes * p->run + 15) / 16, p->sum_pitch = p->tiles * 16 + 4;
  p->code_bytes = boxes * p->run * kLine, p->scale_bytes = boxes * p->run * row_scales(w);
  p->fetch_bytes = boxes * p->box * (kLine + (w.scale_kind == MM_CU_COARSE ? 0 : row_scales(w)));
  p->scales = p->warps * p->depth * p->code_bytes;
  p->sums = p->scales + p->warps * p->depth * p->scale_bytes;
  p->ones = p->sums + (p->tokens == 1 ? 2 : p->tokens / 2) * p->warps * p->sum_pitch * 4; /* two groups' sums, or half the warps' */
  p->barriers = p->ones + (p->one_stages * (piece_columns(w) * 16 + 4) + 7) / 8 * 8;
  p->shared = p->barriers + p->warps * p->depth * 8;
}

}  // namespace

stream_plan mm_cu_plan_stream(const mm_cu_weight &w, uint32_t parts, uint32_t rows, uint32_t boxes, uint32_t segments, uint32_t tokens,
                              uint32_t other_shared, uint32_t one_warps) {
  stream_plan p = {};
  p.tokens = tokens > 8 ? 16 : 8;
  p.warps = kStreamWarps;
  p.steps = (uint32_t)((w.pitch + kLine - 1) / kLine);
  if (tokens == 1 && segments * p.steps * piece_columns(w) * 16 <= kMostOne)
    p.tokens = 1, p.warps = one_warps, p.one_stages = segments * p.steps;
  const uint32_t capacity = (hopper() ? kMost : kMostOther) - other_shared;
  const uint32_t least = hopper() ? 1 : kOtherDepth;
  for (uint32_t most = kStreamTiles * 16; p.depth < least; most -= 8) { /* fewer rows until each warp has its places */
    p.part_groups = cut_groups(parts, rows, most / boxes);
    p.rows_each = rows / p.part_groups, p.rows_over = rows % p.part_groups;
    p.box = p.rows_each + (p.rows_over > 0);
    p.depth = 0;
    place(&p, w, boxes);
    const uint32_t each = p.warps * (p.code_bytes + p.scale_bytes + 8);
    p.depth = std::min((capacity - p.shared) / each, hopper() ? kMostDepth : kOtherDepth);
  }
  place(&p, w, boxes);
  return p;
}

cudaError_t mm_cu_open_source(const mm_cu_weight &w, const stream_plan &p, stream_source *to) {
  if (!hopper()) return cudaSuccess;
  const uint64_t rows = (uint64_t)w.lead * w.n;
  cudaError_t e = mm_cu_map_boxes(&to->codes, w.data, w.pitch, rows, kLine, p.box, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess && (w.scale_kind == MM_CU_NV || w.scale_kind == MM_CU_MX))
    e = mm_cu_map_boxes(&to->scales, w.scale, w.scale_pitch, rows, 16, p.box, CU_TENSOR_MAP_SWIZZLE_NONE);
  return e;
}
