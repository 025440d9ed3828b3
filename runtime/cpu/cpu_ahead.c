/* Weights that are asked for before they are read. Where a checkpoint is larger than memory its pages come from the disk again and again. A
 * page that is missed brings its neighbours, which are other experts' and drive out pages that are wanted; and one miss waits for the next.
 * Only the chosen experts are prefetched, all at once (RESULTS.md has the figures). */
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/system/memory.h"
#include "runtime/cpu/cpu_backend.h"

/* A call reads no more than the device's readahead window, 128 KiB unless an administrator made it larger. */
#define WINDOW ((size_t)128 << 10)
/* Bytes prefetched at once: enough to keep a disk busy, little compared with any memory that a model runs in. */
#define AT_ONCE ((uint64_t)256 << 20)

static uint64_t bytes_of(const mm_packed *w, unsigned plane) {
  return mm_plane_elements(w->n, w->k, w->cell[plane]) * mm_dtype_size(w->scheme->plane[plane].dtype);
}

uint64_t mm_cpu_ahead(const mm_packed *w, uint32_t lead) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  uint64_t bytes = 0;
  for (unsigned p = 0; w->scheme && p < w->scheme->plane_count; p++) {
    const uint64_t n = bytes_of(w, p);
    const uintptr_t first = (uintptr_t)w->plane[p] + lead * n, end = first + n;
    for (uintptr_t at = first / page * page; at < end; at += WINDOW)
      madvise((void *)at, mm_min(WINDOW, end - at), MADV_WILLNEED); /* advice: what fails is read when it is touched */
    bytes += n;
  }
  return bytes;
}

void mm_cpu_ahead_experts(const mm_backend *b, uint32_t active, const mm_packed *w13, const mm_packed *w2) {
  uint64_t bytes = 0;
  for (uint32_t a = 0; b->ahead && a < active && bytes < AT_ONCE; a++)
    bytes += mm_cpu_ahead(w13, b->moe.active[a]) + mm_cpu_ahead(w2, b->moe.active[a]);
}

/* Prefetches the weights of the next layer that every token reads. */
void mm_cpu_ahead_layer(mm_backend *b, uint32_t l) {
  if (!b->ahead || l + 1 >= b->c.weights->layer_end) return;
  const mm_layer_weights *y = &b->c.weights->layer[l + 1];
  const mm_packed *const all[] = {&y->qkv, &y->out, &y->output_gate, &y->router, &y->index_q, &y->index_k, &y->mlp_up, &y->mlp_down};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) mm_cpu_ahead(all[i], 0);
}

/* All ranks of a machine have about as much. */
bool mm_cpu_ahead_pays(const mm_backend *b) {
  uint64_t bytes = 0;
  for (uint32_t l = b->c.weights->layer_first; l < b->c.weights->layer_end; l++) {
    const mm_layer_weights *y = &b->c.weights->layer[l];
    const mm_packed *const all[] = {&y->qkv, &y->out, &y->output_gate, &y->w13, &y->w2, &y->mlp_up, &y->mlp_down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
      for (unsigned p = 0; all[i]->scheme && p < all[i]->scheme->plane_count; p++) bytes += all[i]->lead * bytes_of(all[i], p);
  }
  return bytes * mm_max(1, b->c.place.ranks) > mm_memory_limit() / 8 * 7;
}
