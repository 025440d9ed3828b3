/* Host memory in huge pages, from which copies to devices read and to which they write. */
#ifndef MM_CUDA_HUGE_H
#define MM_CUDA_HUGE_H

#include <stddef.h>
#include <stdint.h>

#include "formats/system/base.h"

/* Begins and ends at huge pages, where the system has any; nobody has touched it. */
struct mm_cu_huge {
  uint8_t *data = nullptr;
  size_t bytes = 0; /* as many as were asked for, or more */

  bool map(size_t wanted, mm_err *err); /* MM_LIMIT E_MEMORY */
  /* That many threads write zeroes, so that pin finds pages. cudaHostAlloc, which makes small pages one after another, takes some eight
   * times as long as both together (runtime/cuda/RESULTS.md). */
  bool touch(unsigned threads, mm_err *err);
  bool pin(mm_err *err); /* for all devices. MM_IO E_CUDA, MM_LIMIT E_MEMORY */
  void unmap();

  void *whole = nullptr;
  bool pinned = false;
};

#endif
