/* The page allocator against a plain model: every slot a list of numbers, written through the tables, read back after each of 100,000
 * random operations; and faults planted in its counts, which its own check has to find. */
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/pages.h"
#include "tests/unit/unit.h"

#define PAGES      40
#define SLOTS      6
#define PER_SLOT   12
#define POSITIONS  (PER_SLOT * MM_PAGE - 3)
#define HOLDERS    8
#define OPERATIONS 100000

typedef struct holder {
  uint32_t page[PER_SLOT], pages, tokens;
  uint32_t want[POSITIONS]; /* what its pages hold */
} holder;

typedef struct model {
  mm_pages *p;
  uint32_t cell[PAGES][MM_PAGE]; /* the caches */
  uint32_t token[SLOTS][POSITIONS], tokens[SLOTS];
  holder holder[HOLDERS];
  uint32_t held[PAGES]; /* references of holders */
  uint32_t next;        /* numbers written so far */
  uint32_t refused, copied;
} model;

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

static const uint32_t *table(const model *m, uint32_t slot) { return mm_pages_table(m->p) + (size_t)slot * mm_pages_per_slot(m->p); }

/* Pages that the wants leave in use: one for each that is written, and what is not written once however many share it. */
static uint32_t needed(const model *m, const mm_page_want *want, uint32_t wants) {
  bool used[PAGES] = {false};
  uint32_t n = 0;
  for (uint32_t s = 0; s < SLOTS; s++) {
    const mm_page_want *w = NULL;
    for (uint32_t i = 0; i < wants; i++)
      if (want[i].slot == s) w = &want[i];
    const uint32_t keep = w ? w->pos / MM_PAGE : mm_pages_held(m->p, s);
    for (uint32_t i = 0; i < keep; i++) used[table(m, s)[i]] = true;
    if (w) n += (w->pos + w->count + MM_PAGE - 1) / MM_PAGE - w->pos / MM_PAGE;
  }
  for (uint32_t i = 0; i < PAGES; i++) n += used[i] || m->held[i];
  return n;
}

static uint32_t random_wants(const model *m, mm_page_want *want) {
  uint32_t n = 0, first = below(SLOTS);
  for (uint32_t i = 0, most = 1 + below(4); i < most; i++) {
    const uint32_t s = (first + i) % SLOTS, most_pos = m->tokens[s] < POSITIONS ? m->tokens[s] : POSITIONS - 1;
    const uint32_t kind = below(4), border = below(PER_SLOT) * MM_PAGE + below(3);
    uint32_t pos = kind == 0 ? 0 : kind == 1 ? below(most_pos + 1) : most_pos;
    if (kind == 2 && border > 0 && border - 1 <= most_pos) pos = border - 1; /* a page's border and both sides of it */
    const uint32_t count = 1 + below(below(3) ? 3 : POSITIONS - pos);
    want[n++] = (mm_page_want){s, pos, count < POSITIONS - pos ? count : POSITIONS - pos};
  }
  return n;
}

static void reserve(model *m) {
  mm_page_want want[4];
  mm_page_copy copy[4];
  mm_err err = {0};
  uint32_t copies, before[SLOTS][PER_SLOT], free_before = mm_pages_free(m->p);
  const uint32_t wants = random_wants(m, want);
  const bool fits = needed(m, want, wants) <= PAGES;
  memcpy(before, mm_pages_table(m->p), sizeof before);
  assert_int_equal(mm_pages_reserve(m->p, want, wants, copy, &copies, &err), fits);
  if (!fits) {
    assert_int_equal(err.status, MM_LIMIT);
    assert_string_equal(err.code, "E_PAGES");
    assert_memory_equal(before, mm_pages_table(m->p), sizeof before);
    assert_int_equal(mm_pages_free(m->p), free_before);
    m->refused++;
    return;
  }
  assert_true(copies <= wants);
  m->copied += copies;
  for (uint32_t i = 0; i < copies; i++) memcpy(m->cell[copy[i].to], m->cell[copy[i].from], copy[i].tokens * sizeof m->cell[0][0]);
  for (uint32_t i = 0; i < wants; i++) {
    const mm_page_want *w = &want[i];
    for (uint32_t t = w->pos; t < w->pos + w->count; t++)
      m->cell[table(m, w->slot)[t / MM_PAGE]][t % MM_PAGE] = m->token[w->slot][t] = ++m->next;
    m->tokens[w->slot] = w->pos + w->count;
  }
}

static void cut(model *m) {
  const uint32_t s = below(SLOTS), tokens = below(2) ? 0 : below(m->tokens[s] + 1);
  mm_pages_cut(m->p, s, tokens);
  m->tokens[s] = tokens;
}

static void share(model *m) {
  const uint32_t from = below(SLOTS), to = below(SLOTS), tokens = below(m->tokens[from] + 1);
  mm_pages_map(m->p, to, table(m, from), (tokens + MM_PAGE - 1) / MM_PAGE);
  memmove(m->token[to], m->token[from], tokens * sizeof m->token[0][0]);
  m->tokens[to] = tokens;
}

/* As a prefix cache does: pages are held for as long as it likes, and mapped into a slot later. */
static void hold(model *m) {
  holder *h = &m->holder[below(HOLDERS)];
  if (!h->pages) {
    const uint32_t s = below(SLOTS);
    h->tokens = m->tokens[s], h->pages = mm_pages_held(m->p, s);
    memcpy(h->page, table(m, s), h->pages * sizeof h->page[0]);
    memcpy(h->want, m->token[s], h->tokens * sizeof h->want[0]);
    for (uint32_t i = 0; i < h->pages; i++) mm_pages_hold(m->p, h->page[i]), m->held[h->page[i]]++;
  } else if (below(2)) {
    const uint32_t s = below(SLOTS);
    mm_pages_map(m->p, s, h->page, h->pages);
    memcpy(m->token[s], h->want, h->tokens * sizeof h->want[0]);
    m->tokens[s] = h->tokens;
  } else {
    for (uint32_t i = 0; i < h->pages; i++) mm_pages_release(m->p, h->page[i]), m->held[h->page[i]]--;
    h->pages = 0;
  }
}

static void check(const model *m) {
  mm_err err = {0};
  uint32_t used = 0;
  if (!mm_pages_check(m->p, m->held, &err)) fail_msg("%s", err.text);
  for (uint32_t i = 0; i < PAGES; i++) used += mm_pages_references(m->p, i) > 0;
  assert_int_equal(mm_pages_free(m->p), PAGES - used);
  for (uint32_t s = 0; s < SLOTS; s++) {
    assert_int_equal(mm_pages_held(m->p, s), (m->tokens[s] + MM_PAGE - 1) / MM_PAGE);
    for (uint32_t t = 0; t < m->tokens[s]; t++)
      if (m->cell[table(m, s)[t / MM_PAGE]][t % MM_PAGE] != m->token[s][t]) fail_msg("slot %u, token %u is another's", s, t);
  }
}

static void run(model *m, uint32_t operations) {
  for (uint32_t i = 0; i < operations; i++) {
    const uint32_t what = below(10);
    (what < 6 ? reserve : what < 7 ? cut : what < 8 ? share : hold)(m);
    check(m);
  }
}

static model *open_model(void) {
  mm_err err = {0};
  model *m = calloc(1, sizeof *m);
  m->p = mm_pages_open(PAGES, SLOTS, POSITIONS, &err);
  assert_non_null(m->p);
  assert_int_equal(mm_pages_per_slot(m->p), PER_SLOT);
  return m;
}

static void close_model(model *m) {
  mm_pages_close(m->p);
  free(m);
}

TEST(random_operations) {
  model *m = open_model();
  run(m, OPERATIONS);
  print_message("%u operations: %u tokens written, %u pages copied, %u steps refused\n", OPERATIONS, m->next, m->copied, m->refused);
  assert_true(m->copied > OPERATIONS / 100 && m->refused > OPERATIONS / 100);
  for (uint32_t i = 0; i < HOLDERS; i++)
    for (uint32_t j = 0; j < m->holder[i].pages; j++) mm_pages_release(m->p, m->holder[i].page[j]);
  for (uint32_t s = 0; s < SLOTS; s++) mm_pages_cut(m->p, s, 0);
  assert_int_equal(mm_pages_free(m->p), PAGES);
  close_model(m);
}

/* A reference too many is a leak, one too few a double free later: the check names the page, wherever it was planted. */
TEST(planted) {
  model *m = open_model();
  for (uint32_t leaks = 0, frees = 0; leaks < 200 || frees < 200;) {
    run(m, 5);
    const uint32_t page = below(PAGES);
    mm_err err = {0};
    if (!mm_pages_references(m->p, page)) continue;
    mm_pages_hold(m->p, page), leaks++;
    assert_false(mm_pages_check(m->p, m->held, &err));
    assert_string_equal(err.code, "E_PAGES");
    mm_pages_release(m->p, page);
    if (mm_pages_references(m->p, page) < 2) continue; /* the last one: below */
    err.status = MM_OK;
    mm_pages_release(m->p, page), frees++;
    assert_false(mm_pages_check(m->p, m->held, &err));
    assert_int_equal(err.status, MM_BUG);
    mm_pages_hold(m->p, page);
    check(m);
  }
  for (uint32_t s = 0; s < SLOTS; s++) { /* the last reference: the page is on the free list, and the slot reads it */
    mm_err err = {0};
    if (!mm_pages_held(m->p, s) || mm_pages_references(m->p, table(m, s)[0]) != 1) continue;
    mm_pages_release(m->p, table(m, s)[0]);
    assert_false(mm_pages_check(m->p, m->held, &err));
    break;
  }
  close_model(m);
}

/* Two slots that share a page in the middle of which both go on: one copy, the other goes on in place; and the page border itself. */
TEST(copies) {
  mm_err err = {0};
  for (uint32_t tokens = MM_PAGE - 1; tokens <= MM_PAGE + 1; tokens++) {
    mm_pages *p = mm_pages_open(5, 2, 4 * MM_PAGE, &err);
    mm_page_copy copy[2];
    uint32_t n;
    assert_true(mm_pages_reserve(p, (mm_page_want[]){{0, 0, tokens}}, 1, copy, &n, &err));
    assert_int_equal(n, 0);
    mm_pages_map(p, 1, mm_pages_table(p), mm_pages_held(p, 0));
    assert_true(mm_pages_reserve(p, (mm_page_want[]){{0, tokens, 1}, {1, tokens, 1}}, 2, copy, &n, &err));
    assert_int_equal(n, tokens != MM_PAGE);
    if (n) assert_int_equal(copy[0].tokens, tokens % MM_PAGE);
    if (n) assert_int_equal(copy[0].from, mm_pages_table(p)[4 + tokens / MM_PAGE]);
    assert_int_not_equal(mm_pages_table(p)[tokens / MM_PAGE], mm_pages_table(p)[4 + tokens / MM_PAGE]);
    assert_int_equal(mm_pages_free(p), tokens < MM_PAGE ? 3 : 2);
    mm_pages_close(p);
  }
  assert_null(mm_pages_open(UINT32_C(1) << 31, 1, 1, &err));
  assert_string_equal(err.code, "E_LIMITS");
}

/* Each group has pages of its own: one that is short refuses the step of all, and no other group's pages help. */
TEST(groups) {
  mm_err err = {0};
  mm_pages *p = mm_pages_open_groups(2, 6, 4, 4 * MM_PAGE, &err);
  mm_page_copy copy[4];
  uint32_t n;
  assert_true(mm_pages_reserve(p, (mm_page_want[]){{0, 0, MM_PAGE}, {1, 0, 3 * MM_PAGE}}, 2, copy, &n, &err));
  assert_int_equal(mm_pages_table(p)[0], 0);
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(mm_pages_group_of(p, mm_pages_table(p)[4 + i]), 1);
  assert_false(mm_pages_reserve(p, (mm_page_want[]){{0, MM_PAGE, 1}, {3, 0, 1}}, 2, copy, &n, &err));
  assert_non_null(strstr(err.text, "found 0 pages free, expected 1 for this step, of 3"));
  assert_true(mm_pages_free_in(p, 0) == 2 && mm_pages_free_in(p, 1) == 0 && mm_pages_free(p) == 2 && mm_pages_held(p, 0) == 1);
  assert_true(mm_pages_check(p, NULL, &err));
  mm_pages_cut(p, 1, MM_PAGE);
  assert_true(mm_pages_reserve(p, (mm_page_want[]){{0, MM_PAGE, 1}, {3, 0, 1}}, 2, copy, &n, &err));
  assert_true(mm_pages_table(p)[1] < 3 && mm_pages_table(p)[12] >= 3 && mm_pages_check(p, NULL, &err));
  mm_pages_close(p);
}

int main(void) { return run_unit_tests(NULL, NULL); }
