/* Plans of decode products (stream_plan.h). */
#include "runtime/cuda/stream_plan.h"

#include <algorithm>

#include "runtime/cuda/launch.h"

namespace {

/* Shared memory of a block such that two fit a multiprocessor: the next kernel's weights arrive while this one ends. */
constexpr uint32_t kMostShared = 113 * 1024, kMostDepth = 8, kMostOne = 40 * 1024;

/* Groups of a part so that the last round of blocks is as full as it can be, then as few as possible. */
uint32_t cut_groups(uint32_t parts, uint32_t rows, uint32_t most_rows) {
  const uint32_t blocks = multiprocessors(), least = ceil_div(rows, most_rows), most = std::max(least, std::min(ceil_div(rows, 8), 4 * least + blocks));
  uint32_t best = least;
  double best_cost = 1e30;
  for (uint32_t groups = least; groups <= most; groups++) {
    const double rounds = ceil_div(parts * groups, blocks), cost = rounds * (ceil_div(rows, groups) + 0.5); /* half a row's time to end a group */
    if (cost < best_cost) best_cost = cost, best = groups;
  }
  return best;
}

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);

encode_fn find_encode() {
  void *fn = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<encode_fn>(fn);
}

/* Boxes of `rows` rows of `width` bytes in a byte matrix. */
cudaError_t map_boxes(CUtensorMap *to, const void *data, uint64_t pitch, uint64_t total_rows, uint32_t width, uint32_t rows,
                      CUtensorMapSwizzle swizzle) {
  static const encode_fn encode = find_encode();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t extent[2] = {pitch, total_rows}, stride[1] = {pitch};
  const cuuint32_t box[2] = {width, rows}, step[2] = {1, 1};
  const CUresult r = encode(to, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void *>(data), extent, stride, box, step,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

stream_plan mm_cu_plan_stream(const mm_cu_weight &w, uint32_t parts, uint32_t rows, uint32_t boxes, uint32_t segments, uint32_t tokens,
                              uint32_t beside) {
  stream_plan p = {};
  p.boxes = boxes, p.tokens = tokens > 8 ? 16 : 8;
  p.steps = (uint32_t)((w.pitch + kLine - 1) / kLine);
  const uint32_t one_bytes = w.code == MM_CU_BF16 ? 128 : w.code == MM_CU_E4M3 ? 256 : 512;
  if (tokens == 1 && segments * p.steps * one_bytes <= kMostOne) p.tokens = 1, p.one_stages = segments * p.steps, p.one_bytes = one_bytes;
  p.row_scales = w.scale_kind == MM_CU_NV || w.scale_kind == MM_CU_MX ? 16 : 0;
  for (uint32_t most = kStreamTiles * 16; p.depth < kOtherDepth; most -= 8) { /* fewer rows until each warp has two places */
    p.part_groups = cut_groups(parts, rows, most / boxes);
    p.rows_each = rows / p.part_groups, p.rows_over = rows % p.part_groups;
    p.box = p.rows_each + (p.rows_over > 0);
    p.depth = 0;
    const uint32_t none = beside + p.shared();
    p.depth = 1;
    const uint32_t one = beside + p.shared() - none;
    p.depth = std::min((kMostShared - none) / one, hopper() ? kMostDepth : kOtherDepth);
  }
  return p;
}

cudaError_t mm_cu_open_source(const mm_cu_weight &w, const stream_plan &p, stream_source *to) {
  if (!hopper()) return cudaSuccess;
  const uint64_t rows = (uint64_t)w.lead * w.n;
  cudaError_t e = map_boxes(&to->codes, w.data, w.pitch, rows, kLine, p.box, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e == cudaSuccess && p.row_scales)
    e = map_boxes(&to->scales, w.scale, w.scale_pitch, rows, p.row_scales, p.box, CU_TENSOR_MAP_SWIZZLE_NONE);
  return e;
}
