/* The CPU backend's pool of pages in host memory. A place holds, after one another, the parts of a page: keys, values and index keys of
 * each layer, then cells of the draft. Copies are done when the call returns. */
#include <string.h>
#include <sys/mman.h>

#include "runtime/cpu/cpu_backend.h"

/* Copies a part of a page between the cache and a place, or neither with NULL; where the next part lies in the place. */
static uint64_t copy_part(char *cache, uint32_t page, uint64_t bytes, char *place, uint64_t at, bool in) {
  char *const part = cache + page * bytes;
  if (place) memcpy(in ? part : place + at, in ? place + at : part, bytes);
  return at + bytes;
}

/* Copies a page; its bytes. */
static uint64_t copy_page(mm_backend *b, uint32_t page, char *place, bool in) {
  const uint64_t kv = (uint64_t)b->kv_heads * MM_PAGE * b->d * b->kv_size;
  const uint64_t index = MM_PAGE * b->mapped.index_key;
  uint64_t at = 0;
  for (uint32_t l = 0; l < b->c.model->layers; l++) {
    const mm_cpu_cache *c = &b->cache[l];
    if (c->k) at = copy_part(c->k, page, kv, place, at, in), at = copy_part(c->v, page, kv, place, at, in);
    if (c->index) at = copy_part(c->index, page, index, place, at, in);
  }
  const mm_dflash_config *d = b->c.draft ? &b->c.draft->c : NULL;
  const uint64_t cells = d ? (uint64_t)d->kv_heads * MM_PAGE * d->head_dim * sizeof(float) : 0;
  for (uint32_t l = 0; d && l < d->layers; l++) {
    at = copy_part((char *)b->draft.k[l], page, cells, place, at, in);
    at = copy_part((char *)b->draft.v[l], page, cells, place, at, in);
  }
  if (d && b->draft.hidden) at = copy_part((char *)b->draft.hidden, page, (uint64_t)MM_PAGE * d->hidden * sizeof(float), place, at, in);
  return at;
}

uint64_t mm_cpu_page_bytes(mm_backend *b) { return copy_page(b, 0, NULL, false); }

char *mm_cpu_pool(mm_backend *b, uint32_t places, char *memory, mm_err *err) {
  uint64_t bytes;
  if (memory) return b->mapped.pool = memory;
  if (!mm_mul(places, mm_cpu_page_bytes(b), &bytes) || bytes > SIZE_MAX) return mm_fail_memory(err, UINT64_MAX), NULL;
  bytes = mm_max(bytes, 1); /* a stage may have lightning layers alone */
  void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return mm_fail_memory(err, bytes), NULL;
  b->mapped.pool = p, b->mapped.pool_bytes = (size_t)bytes;
  return p;
}

void mm_cpu_pool_close(mm_backend *b) {
  if (b->mapped.pool_bytes) munmap(b->mapped.pool, b->mapped.pool_bytes);
}

bool mm_cpu_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err) {
  (void)number, (void)err;
  const uint64_t bytes = mm_cpu_page_bytes(b);
  for (uint32_t i = 0; i < count; i++) copy_page(b, move[i].page, b->mapped.pool + move[i].place * bytes, move[i].in);
  return true;
}

bool mm_cpu_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err) {
  (void)b, (void)wait, (void)err;
  *oldest = UINT64_MAX;
  return true;
}
