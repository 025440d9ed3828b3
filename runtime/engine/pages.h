/* Which pages of the KV caches each slot reads: a free list, reference counts and a table for each slot. Host only; it knows pages by
 * number and no device. One owner at a time: the thread that steps the engine. */
#ifndef MM_RUNTIME_PAGES_H
#define MM_RUNTIME_PAGES_H

#include "loader/stream/capacity.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_pages mm_pages;

/* `pages` pages, below 2^31, for `slots` sequences of at most `positions` tokens each. Memory is touched as pages are used. */
mm_pages *mm_pages_open(uint32_t pages, uint32_t slots, uint32_t positions, mm_err *err);
/* The same in groups, `pages` a multiple of their number: group g has the pages from g · pages / groups on, as many, and the slots s with
 * s mod groups = g, which have pages of their group alone. */
mm_pages *mm_pages_open_groups(uint32_t groups, uint32_t pages, uint32_t slots, uint32_t positions, mm_err *err);
void mm_pages_close(mm_pages *p); /* accepts NULL */

/* Entries of a slot's table: enough for `positions`. */
uint32_t mm_pages_per_slot(const mm_pages *p);
/* table[slots, per_slot]: page table[slot, i] holds tokens [i·MM_PAGE, (i + 1)·MM_PAGE) of the slot, i < mm_pages_held. The same address
 * for life. */
const uint32_t *mm_pages_table(const mm_pages *p);
uint32_t mm_pages_held(const mm_pages *p, uint32_t slot);
/* Pages that nobody refers to. */
uint32_t mm_pages_free(const mm_pages *p);
uint32_t mm_pages_count(const mm_pages *p); /* in all */
uint32_t mm_pages_groups(const mm_pages *p);
uint32_t mm_pages_each(const mm_pages *p); /* of a group */
uint32_t mm_pages_free_in(const mm_pages *p, uint32_t group);
static inline uint32_t mm_pages_group_of(const mm_pages *p, uint32_t page) { return page / mm_pages_each(p); }
/* Slots and holders that refer to the page; 0 for numbers that no page has. */
uint32_t mm_pages_references(const mm_pages *p, uint32_t page);

/* The slot is about to write tokens [pos, pos + count), count ≥ 1, pos ≤ MM_PAGE · held; what it held from pos on is given up. */
typedef struct mm_page_want {
  uint32_t slot, pos, count;
} mm_page_want;

/* The first `tokens` tokens of page `from` are to be in page `to` before the step. */
typedef struct mm_page_copy {
  uint32_t from, to, tokens;
} mm_page_copy;

/* A page is copied to a place of the host pool, or from there. */
typedef struct mm_page_move {
  uint32_t page, place;
  bool in; /* to the page */
} mm_page_move;

/* Makes every page that is about to be written the slot's own. Shared ones stay as they are for the others; of one that is written from the
 * middle on the part before has to be copied: copy[*copies], at most one for each want. No copy reads a page that another one writes.
 * Each slot is wanted once. MM_LIMIT E_PAGES with nothing changed when a group has too few pages for all wants of its slots. */
MM_MUST_USE bool mm_pages_reserve(mm_pages *p, const mm_page_want *want, uint32_t wants, mm_page_copy *copy, uint32_t *copies, mm_err *err);

/* The slot's first `tokens` tokens stay mapped. */
void mm_pages_cut(mm_pages *p, uint32_t slot, uint32_t tokens);
/* The slot maps these pages, in place of all it had; each gains a reference. page[count] may be another slot's table. */
void mm_pages_map(mm_pages *p, uint32_t slot, const uint32_t *page, uint32_t count);

/* A page of the group that nobody refers to, with one reference from now on; false if there is none. */
MM_MUST_USE bool mm_pages_take(mm_pages *p, uint32_t group, uint32_t *page);
/* One more reference to a page that somebody refers to already, and one less. */
void mm_pages_hold(mm_pages *p, uint32_t page);
void mm_pages_release(mm_pages *p, uint32_t page);

/* Checks that references and free list agree with the tables, `held` references being outside them (mm_pages_hold); MM_BUG E_PAGES says
 * which page does not. Walks all pages. */
MM_MUST_USE bool mm_pages_check(const mm_pages *p, const uint32_t *held, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
