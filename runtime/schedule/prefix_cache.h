/* Prompts that begin alike: which pages hold the keys and values of which tokens, as a radix tree over token ids, and snapshots of
 * lightning states at some places of it. Host only; one owner at a time, the thread that steps the engine. */
#ifndef MM_RUNTIME_SERVE_PREFIX_CACHE_H
#define MM_RUNTIME_SERVE_PREFIX_CACHE_H

#include "runtime/engine/pages.h"

typedef struct mm_prefix_cache mm_prefix_cache;

/* Holds pages of `pages`, and up to budget / state_bytes snapshots of state_bytes each. state_bytes 0: a model without lightning layers,
 * where a sequence goes on at any token; else it goes on where a snapshot is, and nowhere else. */
mm_prefix_cache *mm_prefix_cache_open(mm_pages *pages, uint64_t state_bytes, uint64_t budget, mm_err *err);
void mm_prefix_cache_close(mm_prefix_cache *c); /* accepts NULL; releases its pages */

/* How many of token[most] are there under this salt, from the first on, 0 for none: in page[ceil(n / MM_PAGE)], with the states after the
 * last of them in *state (NULL without lightning layers). Both are valid until the next call. */
uint32_t mm_prefix_cache_find(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most, uint32_t *page, const void **state);
/* token[count] lie in page[ceil(count / MM_PAGE)], which somebody refers to; what the cache does not have yet it holds. Out of memory it
 * keeps less. For models without lightning layers. */
void mm_prefix_cache_put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page);
/* The same with room for the states after the last token, to be filled by the caller before the next call; NULL when they are there
 * already, when the budget has no room for any, or out of memory. Snapshots that were not used for longest make room. */
void *mm_prefix_cache_put_state(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page);
/* Releases the page that was not used for longest of those that nobody else refers to, and what cannot be reached without it; false when
 * there is none. */
bool mm_prefix_cache_evict(mm_prefix_cache *c);
void mm_prefix_cache_clear(mm_prefix_cache *c);

uint32_t mm_prefix_cache_pages(const mm_prefix_cache *c);       /* held */
uint64_t mm_prefix_cache_state_bytes(const mm_prefix_cache *c); /* of snapshots */
/* held[pages] += 1 for each page held, as mm_pages_check takes them. */
void mm_prefix_cache_held(const mm_prefix_cache *c, uint32_t *held);

#endif
