/* Allocation with a reserve of equal blocks. */
#include "runtime/serve/loop_memory.h"

#include <errno.h>
#include <malloc.h>
#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define BLOCKS      64
#define BLOCK_BYTES 16384 /* room for the timers and the descriptors of 2,048 connections */

static alignas(max_align_t) unsigned char reserve[BLOCKS][BLOCK_BYTES]; /* pages that were never used take no memory */
static uint64_t taken;                                                  /* bit i: block i is in use */

static size_t block_of(const void *p) {
  const uintptr_t at = (uintptr_t)p - (uintptr_t)reserve;
  return at < sizeof reserve ? at / BLOCK_BYTES : BLOCKS;
}

void *mm_loop_malloc(size_t n) {
  void *p = malloc(n);
  if (p || n > BLOCK_BYTES || taken == UINT64_MAX) return p;
  const int i = __builtin_ctzll(~taken);
  taken |= UINT64_C(1) << i;
  return reserve[i];
}

void mm_loop_free(void *p) {
  const size_t i = block_of(p);
  if (i < BLOCKS)
    taken &= ~(UINT64_C(1) << i);
  else
    free(p);
}

void *mm_loop_realloc(void *p, size_t n) {
  const size_t i = block_of(p);
  void *q = p && i < BLOCKS ? NULL : realloc(p, n);
  if (q || (i < BLOCKS && n <= BLOCK_BYTES)) return q ? q : p;
  if (!(q = mm_loop_malloc(n))) return NULL;
  const size_t had = i < BLOCKS ? BLOCK_BYTES : malloc_usable_size(p);
  if (p) memcpy(q, p, had < n ? had : n);
  mm_loop_free(p);
  return q;
}

bool mm_loop_descriptors(mm_err *err) {
  int fd[4], n = 0;
  while (n < 4 && (fd[n] = eventfd(0, EFD_CLOEXEC)) >= 0) n++;
  const bool ok = n == 4 || mm_fail_errno(err, mm_at(NULL, NULL), "eventfd", errno);
  while (n) close(fd[--n]);
  return ok;
}
