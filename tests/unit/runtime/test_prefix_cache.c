/* The prefix cache against a list of everything that was put into it: what it finds is the longest that is there, in pages that hold these
 * very tokens, with the states after the last of them; short of room it forgets what was used longest ago, and no page is lost. With groups
 * of attention each has its own pages, and what left one comes back to any. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/prefix_cache.h"
#include "tests/unit/unit.h"

enum { PAGES = 400, GROUPS = 3, LENGTH = 5 * MM_PAGE, PUTS = 300, PER_SLOT = LENGTH / MM_PAGE };

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

typedef struct text {
  uint64_t salt;
  uint32_t count, group; /* where it was put */
  int32_t token[LENGTH];
} text;

typedef struct fixture {
  mm_pages *pages;
  uint32_t groups;
  mm_prefix_cache *cache;
  int32_t content[GROUPS * PAGES][MM_PAGE]; /* what was written to a page */
  uint32_t written[GROUPS * PAGES];         /* tokens of it */
  text put[PUTS];                           /* the list */
  uint32_t puts;
} fixture;

/* Each of so many groups has `pages` pages and a slot. */
static fixture *open_groups(uint32_t groups, uint32_t pages, uint64_t state_bytes, uint64_t budget) {
  mm_err err = {0};
  fixture *w = calloc(1, sizeof *w);
  assert_non_null(w);
  w->groups = groups;
  w->pages = mm_pages_open_groups(groups, groups * pages, groups, LENGTH, &err);
  w->cache = mm_prefix_cache_open(w->pages, state_bytes, budget, &err);
  assert_true(w->pages && w->cache);
  return w;
}

static fixture *open_group(uint64_t state_bytes, uint64_t budget) { return open_groups(1, PAGES, state_bytes, budget); }

static void check_held(const fixture *w) {
  uint32_t held[GROUPS * PAGES] = {0};
  mm_err err = {0};
  mm_prefix_cache_held(w->cache, held);
  if (!mm_pages_check(w->pages, held, &err)) fail_msg("%s", err.text);
}

static void check_pages(const fixture *w) {
  check_held(w);
  for (uint32_t g = 0; g < w->groups; g++)
    assert_int_equal(mm_pages_each(w->pages) - mm_pages_free_in(w->pages, g), mm_prefix_cache_pages(w->cache, g));
}

static void close_group(fixture *w) {
  check_pages(w);
  mm_prefix_cache_close(w->cache);
  assert_int_equal(mm_pages_free(w->pages), mm_pages_count(w->pages));
  mm_pages_close(w->pages);
  free(w);
}

/* Texts branch often: each goes on from a place of an older one. */
static text random_text(const fixture *w) {
  text t = {.salt = below(2), .count = 1 + below(LENGTH), .group = w->groups > 1 ? below(w->groups) : 0};
  uint32_t from = 0;
  if (w->puts && below(5)) {
    const text *old = &w->put[below(w->puts)];
    const uint32_t border = MM_PAGE * (1 + below(3)) - 1 + below(3);
    from = (uint32_t)mm_min(mm_min(old->count, t.count), below(2) ? border : below(LENGTH));
    memcpy(t.token, old->token, from * sizeof *t.token);
  }
  for (uint32_t i = from; i < t.count; i++) t.token[i] = (int32_t)below(3);
  return t;
}

static uint64_t digest(const int32_t *token, uint32_t count) {
  uint64_t h = 0;
  for (uint32_t i = 0; i < count; i++) h = (h ^ (uint64_t)(token[i] + 1)) * UINT64_C(0x9e3779b97f4a7c15);
  return h;
}

static uint32_t alike(const text *a, const text *b) {
  uint32_t n = 0;
  while (a->salt == b->salt && n < a->count && n < b->count && a->token[n] == b->token[n]) n++;
  return n;
}

/* A slot computes the text in pages of its own, which are kept; false where there are too few. */
static bool put(fixture *w, const text *t, bool state) {
  mm_err err = {0};
  uint32_t copies;
  if (!mm_pages_reserve(w->pages, &(mm_page_want){t->group, 0, t->count}, 1, NULL, &copies, &err)) return false;
  const uint32_t *page = mm_pages_table(w->pages) + (size_t)t->group * mm_pages_per_slot(w->pages);
  for (uint32_t i = 0; i < t->count; i++) w->content[page[i / MM_PAGE]][i % MM_PAGE] = t->token[i];
  for (uint32_t i = 0; i < t->count; i += MM_PAGE) w->written[page[i / MM_PAGE]] = (uint32_t)mm_min(MM_PAGE, t->count - i);
  if (!state) mm_prefix_cache_put(w->cache, t->salt, t->token, t->count, page);
  uint64_t *capacity = state ? mm_prefix_cache_put_state(w->cache, t->salt, t->token, t->count, page) : NULL;
  if (capacity) *capacity = digest(t->token, t->count);
  mm_pages_cut(w->pages, t->group, 0);
  w->put[w->puts++] = *t;
  return true;
}

/* Tokens of t that others have in common with it, in whole pages: those that were put in its group. */
static uint32_t whole_pages(const fixture *w, const text *t, uint32_t most) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < w->puts; i++)
    if (w->put[i].group == t->group) n = (uint32_t)mm_max(n, mm_min(most, alike(t, &w->put[i])));
  return n / MM_PAGE * MM_PAGE;
}

/* A found prefix is true, and as long as the list says, where nothing was evicted. */
static uint32_t find(const fixture *w, const text *t, uint32_t most, bool state, bool all) {
  uint32_t page[PER_SLOT];
  const void *saved;
  const uint32_t n = mm_prefix_cache_find(w->cache, t->group, t->salt, t->token, most, page, &saved);
  uint32_t want = 0;
  for (uint32_t i = 0; i < w->puts; i++) {
    uint32_t same = (uint32_t)mm_min(most, alike(t, &w->put[i]));
    if (state && same < w->put[i].count) same = 0;
    want = (uint32_t)mm_max(want, same);
  }
  if (all) assert_int_equal(n, want);
  assert_true(n <= want);
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(mm_pages_group_of(w->pages, page[i / MM_PAGE]), t->group);
    assert_true(mm_pages_references(w->pages, page[i / MM_PAGE]) > 0 && w->written[page[i / MM_PAGE]] > i % MM_PAGE);
    assert_int_equal(w->content[page[i / MM_PAGE]][i % MM_PAGE], t->token[i]);
  }
  assert_true(!saved == !(state && n));
  if (saved) assert_true(*(const uint64_t *)saved == digest(t->token, n));
  return n;
}

static void random_texts(uint32_t groups, bool state, uint64_t budget, bool all) {
  fixture *w = open_groups(groups, PAGES, state ? sizeof(uint64_t) : 0, budget);
  uint32_t evicted = 0, found = 0;
  while (w->puts < PUTS) {
    const text t = random_text(w);
    const uint32_t n = find(w, &t, t.count, state, all && !evicted && groups == 1);
    if (all && !evicted && !state) assert_true(n >= whole_pages(w, &t, t.count));
    found += n > 0;
    found += find(w, &t, 1 + below(t.count), state, all && !evicted && groups == 1) > 0;
    for (bool done = false; !done;) {
      done = put(w, &t, state);
      if (!done) assert_true(mm_prefix_cache_evict(w->cache, t.group));
      evicted += !done;
    }
    assert_true(mm_prefix_cache_state_bytes(w->cache) <= budget);
    if (w->puts % 20 == 0) check_pages(w);
  }
  print_message("%u groups: %u found, %u evicted, %u pages, %llu bytes of states\n", groups, found, evicted,
                mm_prefix_cache_pages(w->cache, 0), (unsigned long long)mm_prefix_cache_state_bytes(w->cache));
  assert_true(found > (all ? 50 : 8));
  for (uint32_t g = 0; g < groups; g++) {
    if (g == 1) mm_prefix_cache_clear_group(w->cache, g);
    while (g != 1 && mm_prefix_cache_evict(w->cache, g)) {}
    assert_int_equal(mm_prefix_cache_pages(w->cache, g), 0);
    check_pages(w);
  }
  assert_int_equal(mm_prefix_cache_state_bytes(w->cache), 0);
  close_group(w);
}

TEST(test_random) {
  for (uint32_t i = 0; i < 5; i++)
    for (uint32_t groups = 1; groups <= GROUPS; groups++) {
      random_texts(groups, false, 0, true);
      random_texts(groups, true, 1 << 20, true);
      random_texts(groups, true, 10 * sizeof(uint64_t), false);
    }
}

/* ---- a host pool, and a disk behind it ---- */

enum { PLACES = 3000, FEW = 24, MOVES = 4000 };

/* Where copies go, and those that were listed and not made yet. */
static struct host {
  int32_t content[PLACES][MM_PAGE], block[PLACES][MM_PAGE];
  uint32_t written[PLACES], on_disk[PLACES];
  mm_page_move move[MOVES];
  mm_disk_move copy[MOVES];
  uint32_t moves, copies;
  uint64_t number;
} host;

static void copy_cells(int32_t *page, uint32_t *written, int32_t *to, uint32_t *to_written, bool in) {
  memcpy(in ? page : to, in ? to : page, MM_PAGE * sizeof *page);
  *(in ? written : to_written) = in ? *to_written : *written;
}

/* Makes copies of the disk that were listed, in any order, or all; about one in `fail` fails, leaving noise. */
static void copy_blocks(fixture *w, bool all, uint32_t fail) {
  const mm_disk_move *list;
  const uint32_t count = mm_prefix_cache_copies(w->cache, &list);
  assert_true(host.copies + count <= MOVES);
  if (count) memcpy(host.copy + host.copies, list, count * sizeof *list);
  host.copies += count;
  while (host.copies && (all || below(4))) {
    mm_disk_move *at = &host.copy[below(host.copies)];
    const mm_disk_end end = {*at, !fail || below(fail)};
    const mm_disk_move *m = &end.move;
    *at = host.copy[--host.copies];
    copy_cells(host.content[m->place], &host.written[m->place], host.block[m->block], &host.on_disk[m->block], m->in);
    if (!end.ok) memset(m->in ? host.content[m->place] : host.block[m->block], 0xee, sizeof host.block[0]);
    mm_prefix_cache_copied(w->cache, &end);
  }
  if (all) assert_false(mm_prefix_cache_copying(w->cache));
}

/* The moves of a group's device are made in order; those of several do not wait for one another. */
static void make_moves(fixture *w) {
  const uint32_t first = w->groups > 1 ? below(w->groups) : 0;
  for (uint32_t g = 0; g < w->groups; g++)
    for (uint32_t i = 0; i < host.moves; i++) {
      const mm_page_move m = host.move[i];
      if (mm_pages_group_of(w->pages, m.page) != (first + g) % w->groups) continue;
      copy_cells(w->content[m.page], &w->written[m.page], host.content[m.place], &host.written[m.place], m.in);
    }
  host.moves = 0;
  mm_prefix_cache_moved(w->cache, UINT64_MAX);
}

/* Lists what the cache wants moved; the copies are made now, or later, as the pages are by then. */
static void move_pages(fixture *w, bool now, uint32_t fail) {
  do {
    const mm_page_move *move;
    const uint32_t count = mm_prefix_cache_moves(w->cache, &move);
    assert_true(host.moves + count <= MOVES);
    if (count) memcpy(host.move + host.moves, move, count * sizeof *move);
    host.moves += count;
    mm_prefix_cache_issued(w->cache, ++host.number);
    if (now) make_moves(w);
  } while (mm_prefix_cache_listed(w->cache)); /* second halves of those between groups */
  if (now) assert_false(mm_prefix_cache_moving(w->cache));
  copy_blocks(w, now, fail);
}

/* All that the cache has of a text is on the device, as far as there is room; or it is on the way. Returns true if it is. */
static bool fetch(fixture *w, const text *t, uint32_t most, bool now, uint32_t fail) {
  mm_prefix_cache_coming n;
  for (uint32_t i = 0; i < 20; i++) {
    if (below(2) && mm_prefix_cache_spill_for(w->cache, t->group, t->salt, t->token, most)) copy_blocks(w, below(2), fail);
    n = mm_prefix_cache_fetch(w->cache, t->group, t->salt, t->token, most, true);
    move_pages(w, now, fail);
    if (!now || !(n.loading || n.reading)) return now;
  }
  return true;
}

/* What was put in any group is found in any, for ever where the pool, or the disk behind it, has room for all of it, though the devices
 * have few pages. */
static void random_pool(uint32_t groups, bool state, uint32_t places, uint32_t blocks, uint32_t fail) {
  fixture *w = open_groups(groups, FEW, state ? sizeof(uint64_t) : 0, 1 << 20);
  mm_err err = {0};
  assert_true(mm_prefix_cache_offload(w->cache, places, &err));
  assert_true(!blocks || mm_prefix_cache_disk(w->cache, blocks, &err));
  host.moves = host.copies = 0;
  const bool lasts = (places == PLACES || blocks == PLACES) && !fail;
  uint32_t found = 0;
  while (w->puts < PUTS) {
    const text t = random_text(w);
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t most = i ? 1 + below(t.count) : t.count;
      const bool there = fetch(w, &t, most, below(2), fail);
      found += find(w, &t, most, state, there && lasts) > 0;
    }
    while (!put(w, &t, state)) {
      const bool more = mm_prefix_cache_evict(w->cache, t.group);
      assert_true(more || mm_prefix_cache_moving(w->cache));
      move_pages(w, !more || blocks || !below(3), fail);
      mm_prefix_cache_spill(w->cache);
    }
    mm_prefix_cache_spill(w->cache);
    move_pages(w, blocks, fail); /* places are free before they are needed */
    if (below(40) == 0 && !lasts) mm_prefix_cache_clear_group(w->cache, below(groups));
    check_held(w);
  }
  const mm_prefix_cache_counts n = mm_prefix_cache_counted(w->cache);
  print_message(
      "%u groups: %u found; %llu pages out, %llu in, %u of %u places used; %llu written, %llu read, %llu failed, %u of %u blocks used\n",
      groups, found, (unsigned long long)n.out, (unsigned long long)n.in, n.offloaded, n.places, (unsigned long long)n.written,
      (unsigned long long)n.read, (unsigned long long)n.failed, n.on_disk, n.blocks);
  assert_true(found > 20 && n.in > (lasts ? 50 : 0) && (!blocks || n.read > (lasts ? 50 : 0)));
  move_pages(w, true, 0);
  mm_prefix_cache_clear(w->cache);
  assert_true(mm_prefix_cache_counted(w->cache).offloaded == 0 && mm_prefix_cache_counted(w->cache).on_disk == 0);
  close_group(w);
}

TEST(test_pool) {
  for (uint32_t i = 0; i < 2 * GROUPS; i++) {
    const uint32_t groups = 1 + i / 2, state = i % 2;
    random_pool(groups, state, PLACES, 0, 0);
    random_pool(groups, state, 40, 0, 0);
    random_pool(groups, state, 6, 0, 0);
    random_pool(groups, state, 40, PLACES, 0);
    random_pool(groups, state, 40, PLACES, 9);
    random_pool(groups, state, 12, 30, 0);
  }
}

static text letters(uint64_t salt, int32_t letter, uint32_t count) {
  text t = {.salt = salt, .count = count};
  for (uint32_t i = 0; i < count; i++) t.token[i] = letter;
  return t;
}

/* The least recently used page is evicted first, and none that a slot refers to. */
TEST(test_order) {
  for (uint32_t state = 0; state < 2; state++) {
    fixture *w = open_group(state ? 8 : 0, 24);
    const text t[] = {letters(0, 1, 70), letters(0, 2, 70), letters(0, 3, 64), letters(1, 1, 10)};
    for (uint32_t i = 0; i < 3; i++) assert_true(put(w, &t[i], state));
    assert_int_equal(find(w, &t[0], 70, state, true), 70);
    uint32_t page[2], used;
    const void *saved;
    assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[1].token, 70, page, &saved), 70);
    mm_pages_hold(w->pages, page[1]); /* as a slot would */
    assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[0].token, 70, page, &saved), 70);
    if (state) { /* a fourth snapshot takes the place of the oldest, whose page goes with it */
      used = mm_prefix_cache_pages(w->cache, 0);
      assert_true(put(w, &t[3], true));
      assert_int_equal(mm_prefix_cache_pages(w->cache, 0), used);
      assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[2].token, 64, page, &saved), 0);
    } else {
      assert_true(mm_prefix_cache_evict(w->cache, 0));
      assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[2].token, 64, page, &saved), 0);
    }
    assert_true(mm_prefix_cache_evict(w->cache, 0)); /* not the second page of t[1], nor with it the first */
    assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[1].token, 70, page, &saved), 70);
    assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[0].token, 70, page, &saved), state ? 0 : 64);
    assert_int_equal(mm_prefix_cache_find(w->cache, 0, 1, t[1].token, 70, page, &saved), 0);
    assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t[1].token, 70, page, &saved), 70);
    mm_pages_release(w->pages, page[1]);
    close_group(w);
  }
}

/* An entry that goes for its place takes the page above it along, the group's last: that page is given up, as the caller wants. */
TEST(test_last_page) {
  fixture *w = open_group(8, FEW);
  mm_err err = {0};
  const text t = letters(0, 1, 70);
  assert_true(mm_prefix_cache_offload(w->cache, 1, &err) && put(w, &t, true));
  for (uint32_t pages = 2; pages; pages--) {
    assert_int_equal(mm_prefix_cache_pages(w->cache, 0), pages);
    assert_true(mm_prefix_cache_evict(w->cache, 0));
    move_pages(w, true, 0);
  }
  assert_int_equal(mm_pages_free(w->pages), mm_pages_count(w->pages));
  assert_false(mm_prefix_cache_evict(w->cache, 0));
  close_group(w);
}

/* A state that was found stays while somebody refers to the page that was found with it, though other entries have its tokens too. */
TEST(test_state_page) {
  fixture *w = open_group(8, FEW);
  uint32_t page;
  const void *saved;
  for (int32_t other = 1; other <= 3; other++) {
    text t = letters(0, 1, 20 + (other > 1) * 10);
    for (uint32_t i = 20; i < t.count; i++) t.token[i] = other;
    assert_true(put(w, &t, true));
  }
  const text t = letters(0, 1, 20);
  assert_int_equal(mm_prefix_cache_find(w->cache, 0, 0, t.token, 20, &page, &saved), 20);
  mm_pages_hold(w->pages, page);
  while (mm_prefix_cache_evict(w->cache, 0)) {}
  assert_int_equal(find(w, &t, 20, true, false), 20);
  assert_true(mm_prefix_cache_has_state(w->cache, saved));
  mm_pages_release(w->pages, page);
  while (mm_prefix_cache_evict(w->cache, 0)) {}
  assert_false(mm_prefix_cache_has_state(w->cache, saved));
  close_group(w);
}

/* A snapshot that no budget holds is not taken, and nothing is kept for it. */
TEST(test_budget) {
  fixture *w = open_group(8, 7);
  const text t = letters(0, 1, 100);
  assert_true(put(w, &t, true));
  assert_int_equal(mm_prefix_cache_pages(w->cache, 0), 0);
  close_group(w);
}

int main(void) { return run_unit_tests(NULL, NULL); }
