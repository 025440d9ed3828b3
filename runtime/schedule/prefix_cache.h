/* Prompts that begin alike: which pages hold the keys and values of which tokens, as a radix tree over token ids, and snapshots of
 * lightning states at some places of it. With groups of attention (mm_pages_groups) an entry may have a page in each; places of the host
 * pool, blocks of the disk and snapshots belong to no group. Host only; one owner at a time, the thread that steps the engine. */
#ifndef MM_RUNTIME_SCHEDULE_PREFIX_CACHE_H
#define MM_RUNTIME_SCHEDULE_PREFIX_CACHE_H

#include "runtime/engine/pages.h"
#include "runtime/schedule/disk_store.h"

typedef struct mm_prefix_cache mm_prefix_cache;

/* Holds pages of `pages`, and up to budget / state_bytes snapshots of state_bytes each. state_bytes 0: a model without lightning layers,
 * where a sequence goes on at any token; else it goes on where a snapshot is, and nowhere else. */
mm_prefix_cache *mm_prefix_cache_open(mm_pages *pages, uint64_t state_bytes, uint64_t budget, mm_err *err);
void mm_prefix_cache_close(mm_prefix_cache *c); /* accepts NULL; releases its pages */

/* How many of token[most] are on the group's device under this salt, from the first on, 0 for none: in page[ceil(n / MM_PAGE)], with the
 * states after the last of them in *state (NULL without lightning layers). Both are valid until the next call that changes the cache. */
uint32_t mm_prefix_cache_find(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most, uint32_t *page,
                              const void **state);
/* Whether states that were found are still there: what makes place for a request may drop the entry that they belong to. */
bool mm_prefix_cache_has_state(const mm_prefix_cache *c, const void *state);
/* The same number, without a use of them. */
uint32_t mm_prefix_cache_ready(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most);
/* token[count] lie in page[ceil(count / MM_PAGE)] of one group, which somebody refers to; what the cache does not have of that group yet it
 * holds. Out of memory it keeps less. For models without lightning layers. */
void mm_prefix_cache_put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page);
/* The same with room for the states after the last token, to be filled by the caller before the next call; NULL when they are there
 * already, when the budget has no room for any, or out of memory. Snapshots that were not used for longest make room. */
void *mm_prefix_cache_put_state(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page);
/* Gives up the page of the group that was not used for longest of those that nobody else refers to; false when there is none. Where another
 * group has the entry, or without a host pool, it is released, and in the second case what cannot be reached without it; with a pool it is
 * moved there, and free when that move has ended. */
bool mm_prefix_cache_evict(mm_prefix_cache *c, uint32_t group);
/* The entry with this page gives it up as an evicted one does, although slots refer to it; false where no entry has it, or one needs it:
 * with a page behind it, or a move. */
bool mm_prefix_cache_leave(mm_prefix_cache *c, uint32_t page);
/* Drops every entry; moves that have not ended hold their pages until then. */
void mm_prefix_cache_clear(mm_prefix_cache *c);
/* Gives up every page of the group, and drops entries that are nowhere then. */
void mm_prefix_cache_clear_group(mm_prefix_cache *c, uint32_t group);

/* ---- A pool of places in host memory (mm_engine_pool). An entry has pages of devices or a place of the pool. Entries that were not used
 * for longest leave the pool first. Snapshots of states stay where they are. ---- */

MM_MUST_USE bool mm_prefix_cache_offload(mm_prefix_cache *c, uint32_t places, mm_err *err);
/* Moves to be made now, in this order: list[returned], valid until the next call. Until they have ended their pages are not free. */
uint32_t mm_prefix_cache_moves(mm_prefix_cache *c, const mm_page_move **list);
/* All of those were given to the engine, under this number. */
void mm_prefix_cache_issued(mm_prefix_cache *c, uint64_t number);
/* All moves with numbers below `oldest` have ended. Pages of other groups are relayed: moves to a place that have ended list others. */
void mm_prefix_cache_moved(mm_prefix_cache *c, uint64_t oldest);
bool mm_prefix_cache_moving(const mm_prefix_cache *c);                      /* some move has not ended */
uint32_t mm_prefix_cache_leaving(const mm_prefix_cache *c, uint32_t group); /* pages of the group on their way out */
/* Pages of a prefix, of which those that are on the device, or on their way there, and those that are on their way: to the device; and
 * nearer, after which a fetch begins again: from disk to the pool, or from another group. All 0 where the device has the prefix. */
typedef struct mm_prefix_cache_coming {
  uint32_t pages, there, loading, reading;
} mm_prefix_cache_coming;
/* Of the pages of token[most] that are anywhere. `start`: first lists what brings those in the pool, and through places of it those of
 * other groups, to the device, as far as there are pages, for which others are moved out, and those on disk to the pool, as far as there
 * are places. */
mm_prefix_cache_coming mm_prefix_cache_fetch(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most,
                                             bool start);

/* ---- Places that connections read and write (transfer.h) ---- */

/* From now on some do: a place is free only when its moves have ended. */
void mm_prefix_cache_share(mm_prefix_cache *c);
/* place[count], rising, that are the caller's until given back or put; false with none taken where there are too few. Entries that were not
 * used for longest make room. */
MM_MUST_USE bool mm_prefix_cache_take_places(mm_prefix_cache *c, uint32_t *place, uint32_t count);
void mm_prefix_cache_free_place(mm_prefix_cache *c, uint32_t place);
/* Lists a move of a page, to which somebody refers, to a place of the caller's; out of memory: false. */
MM_MUST_USE bool mm_prefix_cache_copy_out(mm_prefix_cache *c, uint32_t page, uint32_t place);
bool mm_prefix_cache_place_moves(const mm_prefix_cache *c, uint32_t place); /* some move of the place has not ended */
uint32_t mm_prefix_cache_listed(const mm_prefix_cache *c);                  /* moves to be made now */
/* How many of token[most] under this salt entries begin with: without lightning layers as many as it has, with them more than states are
 * there for. */
uint32_t mm_prefix_cache_alike(const mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most);
/* Of token[most] under this salt, how many it has anywhere, from the first on. */
uint32_t mm_prefix_cache_has(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most);
/* token[count] lie in place[ceil(count / MM_PAGE)], with the states after the last of them in *state, malloc'ed, or NULL. UINT32_MAX as a
 * place: the cache has that page. Places and states that it takes become UINT32_MAX and NULL; false where it lacks a page, or has no room
 * for the states: the prefix cannot be found then. */
MM_MUST_USE bool mm_prefix_cache_put_places(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *place,
                                            void **state);

/* ---- Blocks on disk (disk_store.h), for entries that leave the pool ---- */

MM_MUST_USE bool mm_prefix_cache_disk(mm_prefix_cache *c, uint32_t blocks, mm_err *err);
/* Lists copies to disk, so that places become free before they are needed. */
void mm_prefix_cache_spill(mm_prefix_cache *c);
/* The same until so many places are free, or all; true while fewer are and copies are under way. */
bool mm_prefix_cache_spill_to(mm_prefix_cache *c, uint32_t places);
/* The same for the places that a fetch into the group takes: for pages from disk or from other groups, and for those of the device that
 * give way. True while fewer are free and copies are under way. */
bool mm_prefix_cache_spill_for(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most);
/* Copies to be made now, in any order: list[returned], valid until the next call. */
uint32_t mm_prefix_cache_copies(mm_prefix_cache *c, const mm_disk_move **list);
/* One of them has ended. An entry whose copy failed is dropped. */
void mm_prefix_cache_copied(mm_prefix_cache *c, const mm_disk_end *end);
bool mm_prefix_cache_has_place(const mm_prefix_cache *c); /* some place is free */
bool mm_prefix_cache_copying(const mm_prefix_cache *c);   /* some copy has not ended */

typedef struct mm_prefix_cache_counts {
  uint32_t places, offloaded; /* of the pool, and those in use */
  uint64_t out, in;           /* pages moved since open */
  uint32_t blocks, on_disk;   /* of the disk, and those in use */
  uint64_t written, read;     /* pages since open */
  uint64_t failed;            /* copies that did */
} mm_prefix_cache_counts;
mm_prefix_cache_counts mm_prefix_cache_counted(const mm_prefix_cache *c);

uint32_t mm_prefix_cache_pages(const mm_prefix_cache *c, uint32_t group); /* held on the group's device */
uint64_t mm_prefix_cache_state_bytes(const mm_prefix_cache *c);           /* of snapshots */
/* held[pages] += 1 for each page held, as mm_pages_check takes them. */
void mm_prefix_cache_held(const mm_prefix_cache *c, uint32_t *held);

#endif
