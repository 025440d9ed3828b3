/* Packed weights on their way to the device. */
#ifndef MM_CUDA_UPLOAD_H
#define MM_CUDA_UPLOAD_H

#include <vector>

#include "quant/quant.h"
#include "runtime/cuda/kernels.h"

/* Device memory of one backend, freed together. */
struct mm_cu_memory {
  std::vector<void *> block;
  std::vector<uint64_t> bytes; /* of each, without the spare ones */
  ~mm_cu_memory();
  /* Zeroed, 256-byte aligned, with 256 bytes to spare behind; NULL and E_MEMORY when the device has no more. */
  void *alloc(uint64_t size, mm_err *err);
  template <class T>
  T *array(uint64_t count, mm_err *err) {
    return static_cast<T *>(alloc(count * sizeof(T), err));
  }
};

/* Records a CUDA failure as MM_IO E_CUDA (MM_LIMIT E_MEMORY when out of memory); true for cudaSuccess. */
bool mm_cu_check(cudaError_t e, const char *what, mm_err *err);

/* Copies w to the device in the layout of kernels.h. MM_UNSUPPORTED E_SCHEME, naming tensor and scheme, when no kernel reads it. A
 * weight without planes (NULL) becomes random numbers of variance about 1/k there: for timing shapes that no disk holds. */
bool mm_cu_upload(mm_cu_memory *memory, const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err);
/* w's values as f32, [lead, n, k]: norms, the router. NULL on failure. Without planes: vectors near 1, matrices as above. */
float *mm_cu_upload_f32(mm_cu_memory *memory, const mm_packed *w, mm_err *err);

/* From the device to the host, once the stream is done; rows[n] as f32. */
bool mm_cu_download(void *out, const void *from, size_t bytes, cudaStream_t s, mm_err *err);
bool mm_cu_download_rows(float *out, const __nv_bfloat16 *from, size_t n, cudaStream_t s, mm_err *err);

/* Random bits; bytes % 4 == 0. */
bool mm_cu_random_bits(void *p, size_t bytes, mm_err *err);
/* Bytes read plus written a second by a device-to-device copy, measured now (copy_rate.cu). */
bool mm_cu_copy_rate(double *rate, mm_err *err);

#endif
