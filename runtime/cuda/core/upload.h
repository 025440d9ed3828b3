/* Memory of weights on the device. */
#ifndef MM_CUDA_UPLOAD_H
#define MM_CUDA_UPLOAD_H

#include <vector>

#include "quant/quant.h"
#include "runtime/cuda/core/kernels.h"
#include "runtime/engine/hold.h"

/* Device memory of one backend, freed together. */
struct mm_cu_memory {
  std::vector<void *> block;
  std::vector<uint64_t> bytes; /* of each, without the spare ones */
  void *borrowed = nullptr;    /* another process's, mapped here, for as long as `connection` is open */
  int connection = -1;
  const char *what = "weights"; /* is allocated next: for errors */
  ~mm_cu_memory();
  /* Zeroed, 256-byte aligned, with 256 bytes to spare behind; NULL and E_MEMORY when the device has no more. */
  void *alloc(uint64_t size, mm_err *err);
  void *reserve(uint64_t size, mm_err *err); /* the same as it comes, not zeroed */
  /* Maps the weights that a holder has under the key; at most once. Errors of mm_hold_find, MM_IO E_CUDA. */
  void *borrow(const char *socket, mm_held *held, mm_err *err);
  template <class T>
  T *array(uint64_t count, mm_err *err) {
    return static_cast<T *>(alloc(count * sizeof(T), err));
  }
};

/* cudaMalloc. MM_LIMIT E_MEMORY says what was to be allocated, how many bytes, and how many are free. */
MM_MUST_USE bool mm_cu_malloc(void **p, uint64_t bytes, const char *what, mm_err *err);
/* Records a CUDA failure as MM_IO E_CUDA (MM_LIMIT E_MEMORY when out of memory); true for cudaSuccess. */
MM_MUST_USE bool mm_cu_check(cudaError_t e, const char *what, mm_err *err);

/* ---- weights: their layout there ---- */

/* Where its parts are written; NULL where it has none. */
struct mm_cu_places {
  uint8_t *data;
  void *scale;
  float *global;
};
/* Codes as w stores them, four bits each, to what the kernels read (weight.cuh); in place. */
cudaError_t mm_cu_reorder(uint8_t *codes, size_t words, const mm_packed *w, cudaStream_t s);

/* Random numbers of variance about 1/k in place of a weight without planes (NULL): for timing shapes that no disk holds. As f32: vectors
 * near 1, matrices as above. Padding of codes is zero, padding of scales random. */
MM_MUST_USE bool mm_cu_randomise(const mm_packed *w, const mm_cu_weight *d, const mm_cu_places &to, mm_err *err);
MM_MUST_USE bool mm_cu_randomise_f32(const mm_packed *w, float *to, mm_err *err);
/* w's values as f32, [lead, n, k], unpacked on the host. */
MM_MUST_USE bool mm_cu_unpack(const mm_packed *w, float *to, mm_err *err);

/* From the device to the host, once the stream is done; rows[n] as f32. */
MM_MUST_USE bool mm_cu_download(void *out, const void *from, size_t bytes, cudaStream_t s, mm_err *err);
MM_MUST_USE bool mm_cu_download_rows(float *out, const __nv_bfloat16 *from, size_t n, cudaStream_t s, mm_err *err);

/* Random bits; bytes % 4 == 0. */
MM_MUST_USE bool mm_cu_random_bits(void *p, size_t bytes, mm_err *err);
/* Bytes read plus written a second by a device-to-device copy, measured now (copy_rate.cu). */
MM_MUST_USE bool mm_cu_copy_rate(double *rate, mm_err *err);

#endif
