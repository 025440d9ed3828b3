/* The memory of the event loop. libevent drops a callback or an event without an error when it cannot allocate one, and a connection then
 * waits for ever: where malloc fails, allocations of up to 16 KiB are served from a reserve of 64. For one thread. */
#ifndef MM_RUNTIME_SERVE_LOOP_MEMORY_H
#define MM_RUNTIME_SERVE_LOOP_MEMORY_H

#include <stddef.h>

#include "formats/system/base.h"

void *mm_loop_malloc(size_t n);
void *mm_loop_realloc(void *p, size_t n);
void mm_loop_free(void *p);
/* False where there are no descriptors for libevent itself, without which it ends the program. */
MM_MUST_USE bool mm_loop_descriptors(mm_err *err);

#endif
