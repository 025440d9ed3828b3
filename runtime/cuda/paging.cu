/* Before a step: the tables of slots as the host has them, and the parts of pages that slots go on from in pages of their own. The kernels
 * run before the batch's upload, which no kernel overtakes: those that read tables and caches before their wait see what is written here.
 */
#include <string.h>

#include <algorithm>

#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"

static_assert(MM_CU_PAGE == MM_PAGE, "a page holds as many tokens on the host as in the kernels");

namespace {

constexpr uint32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads) edit_table(const __grid_constant__ mm_cu_page_work w) {
  grid_wait_and_launch_next();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < w.edits) w.table[w.edit[i].at] = w.edit[i].page;
}

/* A block is a layer and a page: of each kv head the first tokens' keys, then values; their scales; index keys. */
__global__ void __launch_bounds__(kThreads) copy_pages(const __grid_constant__ mm_cu_page_work w) {
  grid_wait_and_launch_next();
  const mm_page_copy c = w.copy[blockIdx.y];
  const mm_cu_kv kv = w.kv[blockIdx.x];
  const uint32_t pieces = c.tokens * w.token_bytes / 16, all = 2 * w.kv_heads * pieces;
  for (uint32_t i = threadIdx.x; i < all; i += kThreads) {
    const uint32_t half = i / pieces, head = half % w.kv_heads, at = i % pieces;
    char *const data = static_cast<char *>(half < w.kv_heads ? kv.k : kv.v);
    const uint4 *from = reinterpret_cast<const uint4 *>(data + mm_cu_cell(c.from, w.kv_heads, head) * w.token_bytes);
    uint4 *to = reinterpret_cast<uint4 *>(data + mm_cu_cell(c.to, w.kv_heads, head) * w.token_bytes);
    to[at] = from[at];
  }
  const size_t index_page = MM_CU_PAGE * w.index_bytes / 16; /* pieces of 16 bytes */
  uint4 *const index = reinterpret_cast<uint4 *>(kv.index);
  for (uint32_t i = threadIdx.x; index && i < c.tokens * w.index_bytes / 16; i += kThreads)
    index[c.to * index_page + i] = index[c.from * index_page + i];
  for (uint32_t i = threadIdx.x; kv.index_scale && i < c.tokens; i += kThreads)
    kv.index_scale[(size_t)c.to * MM_CU_PAGE + i] = kv.index_scale[(size_t)c.from * MM_CU_PAGE + i];
  if (!kv.k_scale) return;
  for (uint32_t i = threadIdx.x; i < 2 * w.kv_heads * c.tokens; i += kThreads) {
    const uint32_t half = i / c.tokens, head = half % w.kv_heads, at = i % c.tokens;
    float *const scale = half < w.kv_heads ? kv.k_scale : kv.v_scale;
    scale[mm_cu_cell(c.to, w.kv_heads, head) + at] = scale[mm_cu_cell(c.from, w.kv_heads, head) + at];
  }
}

}  // namespace

cudaError_t mm_cu_prepare_pages(const mm_cu_page_work &w, cudaStream_t s) {
  if (w.token_bytes % 16 != 0 || w.index_bytes % 16 != 0) return cudaErrorInvalidValue;
  cudaError_t e = w.edits ? launch(edit_table, ceil_div(w.edits, kThreads), kThreads, 0, s, w) : cudaSuccess;
  if (e == cudaSuccess && w.copies && w.layers) e = launch(copy_pages, dim3(w.layers, w.copies), kThreads, 0, s, w);
  return e;
}

/* ---- the host's side ---- */

/* Where the batch's slots read from other pages than the device's table says, up to the last token that each holds after the step. */
static void find_edits(mm_backend *b, const mm_batch *batch) {
  b->pages.edits.clear();
  const mm_paging *p = batch->paging;
  if (!p && b->pages.own) return;
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot < 0) continue;
    const uint32_t first = (uint32_t)s->slot * b->pages.per_slot;
    /* Rows of a draft may have positions behind the slot's last page. */
    const uint32_t held = (uint32_t)mm_min(mm_ceil_div((uint64_t)s->pos + s->count, MM_PAGE), b->pages.per_slot);
    const uint32_t *wanted = p ? p->table + (size_t)s->slot * p->per_slot : nullptr;
    if (wanted && !p->first && memcmp(wanted, &b->pages.host_table[first], held * sizeof *wanted) == 0) continue;
    for (uint32_t at = 0; at < held; at++) {
      const uint32_t page = wanted ? wanted[at] - p->first : first + at;
      if (b->pages.host_table[first + at] != page) b->pages.edits.push_back({first + at, page});
    }
  }
}

bool mm_cu_upload_pages(mm_backend *b, const mm_batch *batch, mm_err *err) {
  find_edits(b, batch);
  const uint32_t copies = batch->paging && b->pages.work.layers ? batch->paging->copies : 0;
  if (b->pages.edits.empty() && copies == 0) return true;
  const step_memory *m = b->step.memory;
  const bool whole = b->pages.edits.size() > kEdits;
  for (const mm_cu_edit &e : b->pages.edits) b->pages.host_table[e.at] = e.page, b->pages.own = false;
  if (!whole) std::copy(b->pages.edits.begin(), b->pages.edits.end(), m->edit);
  for (uint32_t i = 0; i < copies; i++)
    m->copy[i] = batch->paging->copy[i], m->copy[i].from -= batch->paging->first, m->copy[i].to -= batch->paging->first;
  mm_cu_page_work w = b->pages.work;
  w.edit = m->edit, w.edits = whole ? 0 : (uint32_t)b->pages.edits.size(), w.copy = m->copy, w.copies = copies;
  mm_cu_page_work of_draft = b->draft.copies;
  of_draft.copy = m->copy, of_draft.copies = copies;
  /* The table is not pinned: it is read before the call returns. */
  const bool done =
      (!whole || mm_cu_check(cudaMemcpyAsync(b->pages.device_table, b->pages.host_table.data(),
                                             b->pages.host_table.size() * sizeof b->pages.host_table[0], cudaMemcpyHostToDevice, b->stream),
                             "copy pages", err)) &&
      mm_cu_check(mm_cu_prepare_pages(w, b->stream), "pages", err) && mm_cu_check(mm_cu_prepare_pages(of_draft, b->stream), "pages", err);
  /* The device's table is unknown then: each slot's next step uploads its own again. */
  if (!done) std::fill(b->pages.host_table.begin(), b->pages.host_table.end(), UINT32_MAX), b->pages.own = false;
  return done;
}
