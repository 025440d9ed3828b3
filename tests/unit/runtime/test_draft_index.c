/* The index of a sequence and that of replies, against a search through all tokens: few ids, so that matches are many. ROUNDS: rounds. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/draft_index.h"
#include "tests/unit/unit.h"

enum { LONGEST = 3 * MM_GRAM_WINDOW, REPLIES = 40, REPLY = 120 };

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

static uint32_t equal_before(const int32_t *text, uint32_t end, const int32_t *last, uint32_t count) {
  uint32_t n = 0;
  while (n < end && n < count && n < MM_GRAM_MATCH && text[end - 1 - n] == last[count - 1 - n]) n++;
  return n;
}

/* The longest of the latest 4 matches of at least 3 tokens that end within the window, else the latest of 2. */
static uint32_t search(const int32_t *token, uint32_t count, uint32_t size, uint32_t *matched) {
  const uint32_t lowest = count > size ? count - size : 0;
  for (uint32_t gram = 3; gram >= 2; gram--) {
    uint32_t best = 0, found = 0;
    *matched = 0;
    for (uint32_t at = count - gram; at-- > 0 && at + gram >= lowest && found < 4 && *matched < 8;) {
      if (at + gram < 3) break;
      const uint32_t equal = equal_before(token, at + gram, token, count);
      found += equal >= gram;
      if (equal >= gram && equal > *matched) best = at + gram, *matched = equal;
    }
    if (best) return best;
  }
  return *matched = 0;
}

/* A text that goes back to what it said now and then. */
static void more_text(int32_t *token, uint32_t *count, uint32_t end, uint32_t ids) {
  while (*count < end) {
    const uint32_t from = *count && !below(9) ? below(*count) : *count, copied = below(30);
    for (uint32_t i = 0; i < copied && from + i < *count && *count < end; i++, (*count)++) token[*count] = token[from + i];
    if (*count < end) token[(*count)++] = (int32_t)below(ids);
  }
}

TEST(test_sequence) {
  static const uint32_t ids[] = {2, 5, 30, 3000};
  const char *more = getenv("ROUNDS");
  const uint32_t rounds = more ? (uint32_t)strtoul(more, NULL, 10) : 8;
  int32_t *token = malloc(LONGEST * sizeof *token);
  uint32_t found = 0;
  for (uint32_t r = 0; r < rounds; r++) {
    mm_gram_index x = {0};
    uint32_t count = 0, start = r % 4 ? below(900) : MM_GRAM_WINDOW - 50 + below(100);
    if (r % 8 == 7) start = LONGEST - 400; /* the first call is behind the window */
    more_text(token, &count, start, ids[r % 4]);
    for (uint32_t i = 0; i < 300; i++) {
      more_text(token, &count, count + 1 + (below(4) ? 0 : below(3)), ids[r % 4]);
      uint32_t matched, want_matched;
      const uint32_t at = mm_gram_index_find(&x, token, count, &matched);
      const uint32_t want = count > 3 ? search(token, count, x.size ? x.size : count, &want_matched) : (want_matched = 0);
      assert_int_equal(at, want);
      assert_int_equal(matched, want_matched);
      found += at > 0;
    }
    mm_gram_index_close(&x);
  }
  assert_true(found > rounds * 100);
  free(token);
}

/* Near an expected place, compared with all places in the order of their distance. */
TEST(test_copy) {
  enum { MOST = 700 };
  int32_t token[MOST];
  uint32_t found = 0;
  for (uint32_t r = 0; r < 4000; r++) {
    uint32_t count = 0, matched, want = 0, want_matched = 0;
    more_text(token, &count, 3 + below(MOST - 3), 2 + below(20));
    const uint32_t place = 2 + below(count - 2);
    assert_int_equal(mm_copy_match(token, count, place), equal_before(token, place, token, count));
    for (uint32_t i = 0; i < 2 * 64; i++) { /* 64 places from it on, then 64 before it */
      const int64_t at = i < 64 ? (int64_t)place + i : (int64_t)place - 64 + (i - 64);
      if (at < 2 || at >= count) continue;
      const uint32_t equal = equal_before(token, (uint32_t)at, token, count);
      if (equal >= 2 && equal > want_matched) want = (uint32_t)at, want_matched = equal;
    }
    assert_int_equal(mm_copy_find(token, count, place, &matched), want);
    assert_int_equal(matched, want_matched);
    found += want > 0;
  }
  assert_true(found > 1000);
}

/* Replies of three salts: the longest of the latest 4 matches under the own one, and never a token of another. */
TEST(test_replies) {
  mm_err err = {0};
  static int32_t reply[REPLIES][REPLY];
  uint32_t length[REPLIES], hits = 0, before = 0;
  uint64_t salt[REPLIES];
  mm_reply_index *x = mm_reply_index_open(&err);
  assert_non_null(x);
  for (uint32_t round = 0; round < 3; round++) {
    /* The ring is filled, so that old replies are overwritten, places of the first ones last. */
    int32_t filler[5000];
    for (uint32_t i = 0; round && i < MM_REPLY_TOKENS / 5001 + 1; i++) {
      for (uint32_t k = 0; k < 5000; k++) filler[k] = (int32_t)(1000 + below(1u << 20));
      mm_reply_index_add(x, below(3), filler, 5000);
    }
    for (uint32_t r = 0; r < REPLIES; r++) {
      length[r] = 0;
      salt[r] = below(3);
      more_text(reply[r], &length[r], 1 + below(REPLY), 4 + below(3));
      for (uint32_t i = 0; i < length[r]; i++) reply[r][i] += (int32_t)round * 100;
      mm_reply_index_add(x, salt[r], reply[r], length[r]);
    }
    for (uint32_t i = 0; i < 2000; i++) {
      const uint64_t own = below(4);
      const uint32_t of = below(REPLIES), end = 1 + below(length[of]);
      int32_t next[9] = {0}, want_next[9] = {0};
      uint32_t matched, want = 0, want_count = 0, found = 0;
      mm_gram_index seen = {0};
      mm_gram_index_find(&seen, reply[of], end, &matched);
      for (uint32_t r = REPLIES; r-- > 0 && found < 4 && want < 8;)
        for (uint32_t at = salt[r] == own ? length[r] : 0; at-- > 4 && found < 4 && want < 8;) {
          const uint32_t equal = equal_before(reply[r], at, reply[of], end);
          found += equal >= 4;
          if (equal < 4 || equal <= want) continue;
          want = equal, want_count = (uint32_t)mm_min(length[r] - at, 7);
          memcpy(want_next, reply[r] + at, want_count * sizeof *want_next);
        }
      const uint32_t count = mm_reply_index_find(x, own, &seen, reply[of], next, 7, &matched);
      mm_gram_index_close(&seen);
      if (matched == want && count != want_count) fail_msg("%u of %u: found %u, expected %u tokens", i, round, count, want_count);
      assert_int_equal(count, want_count);
      assert_int_equal(matched, want);
      assert_memory_equal(next, want_next, want_count * sizeof *next);
      assert_int_equal(next[count], 0);
      hits += count > 0;
    }
    assert_true(hits > before + 100);
    before = hits;
  }
  mm_reply_index_close(x);
}

int main(void) { return run_unit_tests(NULL, NULL); }
