/* Texts that are read in many ways at once: masks are what an exact oracle says. */
#include <string.h>

#include "runtime/constrain/grammar.h"
#include "runtime/constrain/whole_text.h"
#include "tests/unit/runtime/lexicon_of.h"

enum { VOCAB = 2048 };

static int open_all(void **state) {
  (void)state;
  open_lexicon("tests/data/tiny-m2/tokenizer.json", VOCAB);
  return 0;
}

enum { KINDS = 6, TEXTS = 20, TEXT_MAX = 12 };

static uint32_t next_random(uint64_t *seed) {
  return (uint32_t)((*seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407) >> 33);
}

/* A grammar of KINDS * TEXTS texts, each a reading of its own: rules that call themselves behind bytes that no token has are real calls. */
static size_t random_grammar(char *out, size_t size, char text[KINDS][TEXTS][TEXT_MAX], uint64_t *seed) {
  static const char letters[] = "aeinst";
  size_t n = (size_t)snprintf(out, size, "root ::= g0");
  for (int k = 1; k < KINDS; k++) n += (size_t)snprintf(out + n, size - n, " | g%d", k);
  for (int k = 0; k < KINDS; k++) {
    n += (size_t)snprintf(out + n, size - n, "\ng%d ::= \"x\" (t%d_0", k, k);
    for (int i = 1; i < TEXTS; i++) n += (size_t)snprintf(out + n, size - n, " | t%d_%d", k, i);
    n += (size_t)snprintf(out + n, size - n, ") \"%d\" | \"\\x02\" g%d \"y\"", k, k);
    for (int i = 0; i < TEXTS; i++) {
      int length = 0;
      for (int end_at = 2 + (int)(next_random(seed) % 6); length < end_at; length++) text[k][i][length] = letters[next_random(seed) % 6];
      n += (size_t)snprintf(out + n, size - n, "\nt%d_%d ::= \"%.*s\" | \"\\x01\" t%d_%d \"y\"", k, i, length, text[k][i], k, i);
      text[k][i][length] = (char)('0' + k);
      text[k][i][length + 1] = 0;
    }
  }
  return n;
}

/* Readings of `said` and more; with a token's bytes. */
static int readings(char text[KINDS][TEXTS][TEXT_MAX], const char *said, const char *bytes, size_t n) {
  const size_t before = strlen(said);
  int count = 0;
  for (int i = 0; i < KINDS * TEXTS; i++) {
    const char *t = text[i / TEXTS][i % TEXTS];
    count += strncmp(t, said, before) == 0 && strncmp(t + before, bytes, n) == 0;
  }
  return count;
}

/* As long as no more ways than are followed lie between two tokens, a mask is what the texts allow, however many there are within a token.
 */
TEST(masks_of_many_ways_are_exact) {
  static char grammar[32768];
  int looked = 0;
  for (uint64_t seed = 1; seed <= 6; seed++) {
    char text[KINDS][TEXTS][TEXT_MAX];
    uint64_t random = seed;
    mm_arena a = {0};
    mm_err err = {0};
    const mm_form *form = mm_whole_grammar(&a, grammar, random_grammar(grammar, sizeof grammar, text, &random), "grammar", &err);
    if (!form) fail_msg("%s", err.text);
    const mm_section section = {.kind = MM_SECTION_FORM, .form = form};
    for (int run = 0; run < 10; run++) {
      mm_constraint *c = mm_constraint_open(lexicon, &section, 1, &err);
      char said[64] = "";
      assert_non_null(c);
      mm_constraint_chosen(c, mm_tokenizer_find(tokenizer, "x"));
      for (bool first = true; first || readings(text, said, "", 0) <= MM_GRAMMAR_STACKS; first = false) {
        int32_t next = -1;
        uint32_t seen = 0;
        const uint32_t *mask = mm_constraint_allowed(c);
        for (int32_t id = 0; id < VOCAB; id++) {
          size_t n;
          const char *bytes = mm_tokenizer_bytes(tokenizer, id, &n);
          if (!bytes || !n || *bytes < ' ' || mm_tokenizer_is_special(tokenizer, id)) continue;
          const bool fits = readings(text, said, bytes, n);
          if (fits != (mask[id / 32] >> (id % 32) & 1))
            fail_msg("seed %d: token %d, \"%.*s\" behind x%s: fits %d", (int)seed, id, (int)n, bytes, said, fits);
          if (fits && next_random(&random) % ++seen == 0) next = id;
        }
        looked++;
        if (next < 0) break;
        size_t n;
        const char *bytes = mm_tokenizer_bytes(tokenizer, next, &n);
        mm_constraint_chosen(c, next);
        strncat(said, bytes, n);
      }
      mm_constraint_close(c);
    }
    mm_arena_close(&a);
  }
  assert_true(looked > 100);
}

int main(void) { return run_unit_tests(open_all, close_lexicon); }
