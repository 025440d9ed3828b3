/* runtime/bpe: look-up and merging against the plain definition, over random vocabularies, and what is refused. */
#include "runtime/text/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "tests/unit/unit.h"

static uint64_t seed = 1;
static uint32_t next(uint32_t below) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33) % below;
}

/* A vocabulary of `letters` single bytes and random merges of what is there already. */
static mm_bpe made(uint32_t letters, uint32_t merges) {
  mm_bpe b = {0};
  mm_err err = {0};
  assert_true(mm_bpe_open(&b, letters + merges + 3, &err)); /* three ids without a text */
  memset(b.byte_id, 0xFF, sizeof b.byte_id);
  uint32_t *id = mm_calloc(letters + merges, sizeof *id, &err), count = 0, spare = 0;
  b.merge = mm_calloc(merges, sizeof *b.merge, &err);
  assert_true(id && b.merge);
  for (uint32_t i = 0; i < letters; i++) {
    char c = (char)('a' + i);
    id[count] = letters - 1 - i; /* not in the order of the bytes */
    b.byte_id[(uint8_t)c] = (int32_t)id[count];
    b.token[id[count++]] = (mm_bpe_token){mm_arena_strndup(&b.texts, &c, 1, &err), 1};
  }
  for (uint32_t tries = 0; b.merge_count < merges && tries < 100 * merges; tries++) {
    const uint32_t left = id[next(count)], right = id[next(count)];
    const mm_bpe_token x = b.token[left], y = b.token[right];
    char text[64];
    if (x.n + y.n > sizeof text) continue;
    memcpy(text, x.text, x.n);
    memcpy(text + x.n, y.text, y.n);
    int32_t result = -1;
    bool again = false;
    for (uint32_t i = 0; i < count; i++)
      if (b.token[id[i]].n == x.n + y.n && memcmp(b.token[id[i]].text, text, x.n + y.n) == 0) result = (int32_t)id[i];
    for (size_t i = 0; i < b.merge_count; i++) again |= b.merge[i].left == (int32_t)left && b.merge[i].right == (int32_t)right;
    if (again) continue;
    if (result < 0) {
      result = (int32_t)(letters + b.merge_count + spare);
      if (b.merge_count == merges / 2 && spare == 0) spare = 3, result += 3;
      if (b.token[result].text) fail_msg("id %d twice", result);
      id[count++] = (uint32_t)result;
      b.token[result] = (mm_bpe_token){mm_arena_strndup(&b.texts, text, x.n + y.n, &err), x.n + y.n};
    }
    b.merge[b.merge_count++] = (mm_bpe_merge){(int32_t)left, (int32_t)right, result};
  }
  free(id);
  if (!mm_bpe_index_tokens(&b, "f", &err) || !mm_bpe_index_merges(&b, "f", &err)) fail_msg("%s", err.text);
  return b;
}

/* The definition: again and again the pair of the lowest rank, the leftmost of it. */
static size_t plain(const mm_bpe *b, const char *piece, size_t n, int32_t *id) {
  for (size_t i = 0; i < n; i++) id[i] = b->byte_id[(uint8_t)piece[i]];
  for (;;) {
    size_t best = SIZE_MAX, at = 0;
    for (size_t i = 0; i + 1 < n; i++)
      for (size_t m = 0; m < b->merge_count && m < best; m++)
        if (b->merge[m].left == id[i] && b->merge[m].right == id[i + 1]) best = m, at = i;
    if (best == SIZE_MAX) return n;
    id[at] = b->merge[best].result;
    memmove(id + at + 1, id + at + 2, (n - at - 2) * sizeof *id);
    n--;
  }
}

TEST(test_encode) {
  for (uint32_t round = 0; round < 40; round++) {
    const uint32_t letters = 1 + round % 4;
    mm_bpe b = made(letters, 2 + next(60));
    mm_bpe_scratch s = {0};
    mm_err err = {0};
    for (int k = 0; k < 60; k++) {
      char piece[80];
      int32_t want[80];
      const size_t n = k == 0 ? 0 : k == 1 ? 1 : next(sizeof piece) + 1, before = s.count;
      for (size_t i = 0; i < n; i++) piece[i] = (char)('a' + next(letters));
      assert_true(mm_bpe_encode(&b, &s, piece, n, &err));
      const size_t count = n ? plain(&b, piece, n, want) : 0;
      assert_int_equal(s.count - before, count); /* appended */
      if (n) assert_memory_equal(s.id + before, want, count * sizeof *want);
    }
    mm_bpe_scratch_close(&s);
    mm_bpe_close(&b, false);
  }
}

TEST(test_find) {
  for (uint32_t round = 0; round < 20; round++) {
    mm_bpe b = made(1 + round % 4, 2 + next(60));
    size_t texts = 0;
    for (uint32_t id = 0; id < b.vocab; id++) {
      const mm_bpe_token t = b.token[id];
      if (!t.text) continue;
      texts++;
      assert_int_equal(mm_bpe_find(&b, t.text, t.n), id);
      char other[80];
      memcpy(other, t.text, t.n);
      other[t.n] = 'z'; /* longer, shorter, and what no token holds */
      assert_int_equal(mm_bpe_find(&b, other, t.n + 1), -1);
      int32_t shorter = -1;
      for (uint32_t i = 0; i < b.vocab; i++)
        if (b.token[i].text && b.token[i].n == t.n - 1 && memcmp(b.token[i].text, t.text, t.n - 1) == 0) shorter = (int32_t)i;
      assert_int_equal(mm_bpe_find(&b, t.text, t.n - 1), shorter);
    }
    assert_int_equal(b.text_count, texts);
    assert_int_equal(mm_bpe_find(&b, "", 0), -1);
    assert_int_equal(mm_bpe_find(&b, "A", 1), -1);
    for (size_t i = 1; i < texts; i++) { /* ascending: what tokenizer.bin stores */
      const mm_bpe_token x = b.token[b.by_text[i - 1]], y = b.token[b.by_text[i]];
      const int order = memcmp(x.text, y.text, x.n < y.n ? x.n : y.n);
      assert_true(order < 0 || (order == 0 && x.n < y.n));
    }
    for (uint32_t id = 0; id < b.vocab; id++)
      for (uint32_t i = 0; i < b.merge_count; i++)
        assert_int_equal(i >= b.first[id] && i < b.first[id + 1], b.merge[b.by_pair[i]].left == (int32_t)id);
    mm_bpe_close(&b, false);
  }
}

TEST(test_refused) {
  mm_err err = {0};
  mm_bpe b = {0};
  assert_true(mm_bpe_open(&b, 3, &err));
  b.token[0] = (mm_bpe_token){"a", 1};
  b.token[2] = (mm_bpe_token){"a", 1};
  assert_false(mm_bpe_index_tokens(&b, "tokenizer.json", &err));
  assert_string_equal(err.text, "E_TOKENIZER: tokenizer.json: token \"a\" has the ids 0 and 2");
  assert_int_equal(err.status, MM_BAD_INPUT);
  mm_bpe_close(&b, false);
  b = (mm_bpe){0};
  err = (mm_err){0};
  assert_true(mm_bpe_open(&b, 3, &err));
  b.merge = mm_calloc(3, sizeof *b.merge, &err);
  assert_non_null(b.merge);
  b.merge_count = 3;
  b.merge[0] = (mm_bpe_merge){0, 1, 2};
  b.merge[1] = (mm_bpe_merge){1, 0, 2};
  b.merge[2] = (mm_bpe_merge){0, 1, 2};
  assert_false(mm_bpe_index_merges(&b, "tokenizer.json", &err));
  assert_non_null(strstr(err.text, "are of the same pair"));
  mm_bpe_close(&b, false);
}

int main(void) { return run_unit_tests(NULL, NULL); }
