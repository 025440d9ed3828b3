/* Tensor maps (tensor_map.h); the driver's encoder is found through the runtime, so that nothing links to the driver. */
#include "runtime/cuda/core/tensor_map.h"

namespace {

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);

encode_fn find_encode() {
  void *fn = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<encode_fn>(fn);
}

}  // namespace

cudaError_t mm_cu_map_boxes(CUtensorMap *to, const void *data, uint64_t pitch, uint64_t rows, uint32_t width, uint32_t box_rows,
                            CUtensorMapSwizzle swizzle) {
  static const encode_fn encode = find_encode();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t extent[2] = {pitch, rows}, stride[1] = {pitch};
  const cuuint32_t box[2] = {width, box_rows}, step[2] = {1, 1};
  const CUresult r = encode(to, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void *>(data), extent, stride, box, step,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
