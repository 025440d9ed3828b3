/* Tensor maps of TMA for matrices (hopper.cuh, tma_load), made on the host for each launch. */
#ifndef MM_CUDA_TENSOR_MAP_H
#define MM_CUDA_TENSOR_MAP_H

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

/* Boxes of `box_rows` rows of `width` bytes of a byte matrix; pitch a multiple of 16. Elements outside the matrix are read as zeros.
 * cudaErrorNotSupported where the driver makes no such maps. */
cudaError_t mm_cu_map_boxes(CUtensorMap *to, const void *data, uint64_t pitch, uint64_t rows, uint32_t width, uint32_t box_rows,
                            CUtensorMapSwizzle swizzle);

#endif
