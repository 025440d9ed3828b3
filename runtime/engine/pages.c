/* The allocator of KV pages (pages.h). A group's free pages are a stack, so that a page given up last is used first; pages that were never
 * used follow in order. */
#include "runtime/engine/pages.h"

#include <stdlib.h>
#include <string.h>

#define REPLACED (UINT32_C(1) << 31) /* in a table while a reservation is made: the page stays with the others */

/* The pages of a group of slots: [first, end). */
typedef struct page_group {
  uint32_t first, end;
  uint32_t fresh;        /* pages [fresh, end) were never used */
  uint32_t free_count;   /* of the stack */
  uint64_t ready, taken; /* of a reservation: pages that it may take, and will */
} page_group;

struct mm_pages {
  uint32_t pages, slots, per_slot;
  uint32_t groups, each; /* pages of each group */
  page_group *group;     /* [groups] */
  uint32_t *stack;       /* [pages]: each group's from its first page on */
  uint32_t *refs;        /* [pages] */
  uint32_t *table;       /* [slots, per_slot] */
  uint32_t *held;        /* [slots] */
};

mm_pages *mm_pages_open(uint32_t pages, uint32_t slots, uint32_t positions, mm_err *err) {
  return mm_pages_open_groups(1, pages, slots, positions, err);
}

mm_pages *mm_pages_open_groups(uint32_t groups, uint32_t pages, uint32_t slots, uint32_t positions, mm_err *err) {
  if (pages >= REPLACED) {
    mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u pages, expected fewer than 2^31", pages);
    return NULL;
  }
  mm_pages *p = mm_calloc(1, sizeof *p, err);
  if (!p) return NULL;
  p->pages = pages;
  p->slots = slots;
  p->groups = groups;
  p->each = pages / (uint32_t)mm_max(groups, 1);
  p->per_slot = (uint32_t)mm_ceil_div(positions, MM_PAGE);
  p->stack = mm_calloc(pages, sizeof *p->stack, err);
  p->refs = mm_calloc(pages, sizeof *p->refs, err);
  p->table = mm_calloc((size_t)slots * p->per_slot, sizeof *p->table, err);
  p->held = mm_calloc(slots, sizeof *p->held, err);
  p->group = mm_calloc(groups, sizeof *p->group, err);
  for (uint32_t g = 0; p->group && g < groups; g++)
    p->group[g] = (page_group){.first = g * p->each, .end = (g + 1) * p->each, .fresh = g * p->each};
  if (p->stack && p->refs && p->table && p->held && p->group) return p;
  mm_pages_close(p);
  return NULL;
}

void mm_pages_close(mm_pages *p) {
  if (!p) return;
  MM_FREE(p->stack, p->refs, p->table, p->held, p->group, p);
}

uint32_t mm_pages_per_slot(const mm_pages *p) { return p->per_slot; }
const uint32_t *mm_pages_table(const mm_pages *p) { return p->table; }
uint32_t mm_pages_held(const mm_pages *p, uint32_t slot) { return p->held[slot]; }
static uint32_t free_of(const page_group *g) { return g->free_count + (g->end - g->fresh); }
uint32_t mm_pages_free(const mm_pages *p) {
  uint32_t n = 0;
  for (uint32_t g = 0; g < p->groups; g++) n += free_of(&p->group[g]);
  return n;
}
uint32_t mm_pages_free_in(const mm_pages *p, uint32_t group) { return free_of(&p->group[group]); }
uint32_t mm_pages_groups(const mm_pages *p) { return p->groups; }
uint32_t mm_pages_each(const mm_pages *p) { return p->each; }
uint32_t mm_pages_count(const mm_pages *p) { return p->pages; }
uint32_t mm_pages_references(const mm_pages *p, uint32_t page) { return page < p->pages ? p->refs[page] : 0; }

static uint32_t *table_of(const mm_pages *p, uint32_t slot) { return p->table + (size_t)slot * p->per_slot; }

/* There is a free page. */
static uint32_t take(mm_pages *p, page_group *g) {
  const uint32_t page = g->free_count ? p->stack[g->first + --g->free_count] : g->fresh++;
  p->refs[page] = 1;
  return page;
}

bool mm_pages_take(mm_pages *p, uint32_t group, uint32_t *page) {
  if (!mm_pages_free_in(p, group)) return false;
  *page = take(p, &p->group[group]);
  return true;
}

void mm_pages_hold(mm_pages *p, uint32_t page) { p->refs[page]++; }
void mm_pages_release(mm_pages *p, uint32_t page) {
  if (--p->refs[page] != 0) return;
  page_group *const g = &p->group[mm_pages_group_of(p, page)];
  p->stack[g->first + g->free_count++] = page;
}

/* The pages that a want writes, by their place in the table. */
static uint32_t first_of(const mm_page_want *w) { return w->pos / MM_PAGE; }
static uint32_t end_of(const mm_page_want *w) { return (uint32_t)mm_ceil_div((uint64_t)w->pos + w->count, MM_PAGE); }

static page_group *group_of(mm_pages *p, uint32_t slot) { return &p->group[slot % p->groups]; }

/* Gives up the references that the wants end, without freeing; pages that this leaves alone are ready to be taken in their group. */
static void drop_ends(mm_pages *p, const mm_page_want *want, uint32_t wants) {
  uint32_t g = 0;
  do p->group[g].ready = free_of(&p->group[g]), p->group[g].taken = 0;
  while (++g < p->groups);
  for (uint32_t i = 0; i < wants; i++)
    for (uint32_t at = end_of(&want[i]); at < p->held[want[i].slot]; at++)
      group_of(p, want[i].slot)->ready += --p->refs[table_of(p, want[i].slot)[at]] == 0;
}

/* Marks what has to be replaced, gives up those references, and counts the pages that are to be taken. */
static void mark_shared(mm_pages *p, const mm_page_want *want, uint32_t wants) {
  for (uint32_t i = 0; i < wants; i++) {
    uint64_t *const taken = &group_of(p, want[i].slot)->taken;
    uint32_t *table = table_of(p, want[i].slot);
    const uint32_t end = end_of(&want[i]), held = p->held[want[i].slot];
    if (end > held) *taken += end - (uint32_t)mm_max(held, first_of(&want[i]));
    for (uint32_t at = first_of(&want[i]); at < mm_min(held, end); at++) {
      if (p->refs[table[at]] == 1) continue;
      p->refs[table[at]]--;
      table[at] |= REPLACED;
      ++*taken;
    }
  }
}

static void undo(mm_pages *p, const mm_page_want *want, uint32_t wants) {
  for (uint32_t i = 0; i < wants; i++) {
    uint32_t *table = table_of(p, want[i].slot);
    for (uint32_t at = first_of(&want[i]); at < p->held[want[i].slot]; at++) {
      const bool kept = at < end_of(&want[i]) && !(table[at] & REPLACED);
      table[at] &= ~REPLACED;
      if (!kept) p->refs[table[at]]++;
    }
  }
}

/* Ends are cut for good. Their references come back first, so that a page at which two slots end is freed once. */
static void cut_ends(mm_pages *p, const mm_page_want *want, uint32_t wants) {
  for (uint32_t i = 0; i < wants; i++)
    for (uint32_t at = end_of(&want[i]); at < p->held[want[i].slot]; at++) p->refs[table_of(p, want[i].slot)[at]]++;
  for (uint32_t i = 0; i < wants; i++) mm_pages_cut(p, want[i].slot, end_of(&want[i]) * MM_PAGE);
}

static void fill(mm_pages *p, const mm_page_want *w, mm_page_copy *copy, uint32_t *copies) {
  uint32_t *table = table_of(p, w->slot), *held = &p->held[w->slot];
  for (uint32_t at = first_of(w); at < end_of(w); at++) {
    if (at < *held && !(table[at] & REPLACED)) continue;
    const uint32_t page = take(p, group_of(p, w->slot)), before = w->pos % MM_PAGE;
    if (at < *held && at == first_of(w) && before > 0) copy[(*copies)++] = (mm_page_copy){table[at] & ~REPLACED, page, before};
    table[at] = page;
  }
  *held = end_of(w);
}

bool mm_pages_reserve(mm_pages *p, const mm_page_want *want, uint32_t wants, mm_page_copy *copy, uint32_t *copies, mm_err *err) {
  *copies = 0;
  drop_ends(p, want, wants);
  mark_shared(p, want, wants);
  for (uint32_t g = 0; g < p->groups; g++) {
    const page_group *x = &p->group[g];
    if (x->taken <= x->ready) continue;
    undo(p, want, wants);
    return mm_fail(err, MM_LIMIT, "E_PAGES", mm_at(NULL, NULL), "found %llu pages free, expected %llu for this step, of %u in all",
                   (unsigned long long)x->ready, (unsigned long long)x->taken, mm_pages_each(p));
  }
  cut_ends(p, want, wants);
  for (uint32_t i = 0; i < wants; i++) fill(p, &want[i], copy, copies);
  return true;
}

void mm_pages_cut(mm_pages *p, uint32_t slot, uint32_t tokens) {
  const uint32_t *table = table_of(p, slot);
  for (uint32_t keep = (uint32_t)mm_ceil_div(tokens, MM_PAGE); p->held[slot] > keep;) mm_pages_release(p, table[--p->held[slot]]);
}

void mm_pages_map(mm_pages *p, uint32_t slot, const uint32_t *page, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) p->refs[page[i]]++;
  mm_pages_cut(p, slot, 0);
  memmove(table_of(p, slot), page, count * sizeof *page);
  p->held[slot] = count;
}

bool mm_pages_check(const mm_pages *p, const uint32_t *held, mm_err *err) {
  uint32_t *found = mm_calloc(2 * (size_t)p->pages, sizeof *found, err);
  if (!found) return false;
  uint32_t *listed = found + p->pages;
  bool ok = true;
  for (uint32_t s = 0; s < p->slots; s++)
    for (uint32_t i = 0; i < p->held[s]; i++) found[table_of(p, s)[i]]++;
  for (uint32_t g = 0; g < p->groups; g++)
    for (uint32_t i = 0; i < p->group[g].free_count; i++) listed[p->stack[p->group[g].first + i]]++;
  for (uint32_t i = 0; ok && i < p->pages; i++) {
    const uint32_t refs = found[i] + (held ? held[i] : 0), list = i >= p->group[mm_pages_group_of(p, i)].fresh ? listed[i] + 1 : listed[i];
    ok = p->refs[i] == refs && list == (refs == 0);
    if (!ok)
      mm_fail(err, MM_BUG, "E_PAGES", mm_at(NULL, NULL), "page %u: counted %u references, on the free list %u times; found %u references",
              i, p->refs[i], list, refs);
  }
  free(found);
  return ok;
}
