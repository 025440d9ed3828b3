/* Huge pages that are touched and pinned (huge.h). */
#include "runtime/cuda/core/huge.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "formats/system/pool.h"
#include "runtime/cuda/core/upload.h"

namespace {

constexpr size_t kHuge = (size_t)2 << 20, kItem = (size_t)64 << 20; /* touched by one thread at a time */

bool touch_item(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const mm_cu_huge *m = static_cast<const mm_cu_huge *>(ctx);
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), end = std::min(m->bytes, (item + 1) * kItem);
  for (size_t at = item * kItem; at < end; at += page) *const_cast<volatile uint8_t *>(m->data + at) = 0;
  return true;
}

}  // namespace

bool mm_cu_huge::map(size_t wanted, mm_err *err) {
  bytes = mm_round_up(wanted, kHuge);
  void *m = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return mm_fail_memory(err, bytes + kHuge);
  whole = m;
  data = reinterpret_cast<uint8_t *>(mm_round_up(reinterpret_cast<uintptr_t>(m), kHuge));
  madvise(data, bytes, MADV_HUGEPAGE); /* without them it is slower, and nothing else */
  return true;
}

bool mm_cu_huge::touch(unsigned threads, mm_err *err) { return mm_pool_run(threads, mm_ceil_div(bytes, kItem), touch_item, this, err); }

bool mm_cu_huge::pin(mm_err *err) {
  pinned = mm_cu_check(cudaHostRegister(data, bytes, cudaHostRegisterPortable), "pin host memory", err);
  return pinned;
}

void mm_cu_huge::unmap() {
  if (pinned) cudaHostUnregister(data);
  if (whole) munmap(whole, bytes + kHuge);
  *this = {};
}
