/* Patterns against the C library's on random ones of the languages' common part, refusals by name, and hostile ones in time. */
#include <fnmatch.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "convert/model/pattern.h"
#include "convert/model/recipe.h"
#include "tests/unit/unit.h"

static uint32_t seed = 1;
static uint32_t any(uint32_t below) {
  seed = seed * 1664525u + 1013904223u;
  return (uint32_t)((uint64_t)seed * below >> 32);
}

/* A pattern of pieces from a list, groups closed. */
static void build(char *out, const char *const *piece, uint32_t count, bool groups) {
  unsigned open = 0;
  *out = 0;
  for (uint32_t i = 1 + any(7); i-- > 0;) {
    out = stpcpy(out, piece[any(count)]);
    if (groups && any(4) == 0) out = stpcpy(stpcpy(out, "("), piece[any(3)]), open++;
    if (open && any(3) == 0) out = stpcpy(stpcpy(out, ")"), any(2) ? "*" : any(2) ? "{1,2}" : ""), open--;
  }
  while (open-- > 0) out = stpcpy(out, ")");
}

static void name_of(char *out) {
  uint32_t n = any(9);
  for (uint32_t i = 0; i < n; i++) out[i] = "ab.1_ "[any(6)];
  out[n] = 0;
}

/* Whether the same names match as for the C library's functions. */
TEST(same_as_the_library) {
  static const char *const globs[] = {"a",     "b",   ".",   "*", "?",    "[ab]", "[!a]",       "[^b1]",
                                      "[a-c]", "\\*", "\\a", "[", "[]a]", "1",    "[[:digit:]]"};
  static const char *const expressions[] = {"a",     "b",           "1", ".",    "a*",     "b+",     "a?",      ".*",  "a{2}", "b{0,2}",
                                            "a{1,}", "^",           "$", "[ab]", "[^a]+",  "|",      "\\.",     "\\w", "\\W",  "\\s",
                                            "a|b",   "[[:alpha:]]", "_", "ab",   ".{2,3}", "[a-b]*", "(a|b1)*", "()",  "(|a)b"};
  unsigned hits = 0, cases = 0;
  for (int i = 0; i < 60000; i++) {
    char text[256] = "re:", name[16];
    bool glob = i % 2;
    if (glob)
      build(text, globs, sizeof globs / sizeof *globs, false);
    else
      build(text + 3, expressions, sizeof expressions / sizeof *expressions, true);
    regex_t re;
    mm_pattern p;
    mm_arena a = {0};
    mm_err err = {0};
    if (!glob && regcomp(&re, text + 3, REG_EXTENDED | REG_NOSUB) != 0) continue;
    if (mm_pattern_compile(&p, text, &a, &err)) {
      for (int k = 0; k < 8; k++, cases++) {
        name_of(name);
        bool got = false, expected = glob ? fnmatch(text, name, 0) == 0 : regexec(&re, name, 0, NULL, 0) == 0;
        hits += expected;
        if (!mm_pattern_match(&p, name, &got, &err)) fail_msg("%s", err.text);
        if (got != expected) fail_msg("\"%s\" and \"%s\": expected %d", text, name, expected);
      }
    } else if (!strstr(err.text, "quantifier does not follow") && !strstr(err.text, "a set without an end")) {
      fail_msg("%s", err.text);
    }
    if (!glob) regfree(&re);
    mm_arena_close(&a);
  }
  printf("%u of %u matched\n", hits, cases);
  assert_true(cases > 200000 && hits > cases / 20);
}

static void refused(const char *text, const char *says) {
  mm_pattern p;
  mm_arena a = {0};
  mm_err err = {0};
  assert_false(mm_pattern_compile(&p, text, &a, &err));
  assert_string_equal(err.code, "E_RECIPE");
  assert_int_equal(err.status, MM_USAGE);
  if (!strstr(err.text, says)) fail_msg("expected %s, found %s", says, err.text);
  mm_arena_close(&a);
}

TEST(refused_by_name) {
  refused("re:(a)\\1", "reference to non-existent subpattern");
  refused("re:(a", "\"missing closing parenthesis\" at byte 5 of pattern \"re:(a\"");
  refused("re:a)", "unmatched closing parenthesis");
  refused("re:[a", "missing terminating ]");
  refused("re:[z-a]", "range out of order");
  refused("[z-a]", "range out of order");
  refused("re:[[:words:]]", "unknown POSIX class");
  refused("[[:words:]]", "unknown POSIX class");
  refused("re:[[.a.]]", "collating");
  refused("[[.a.]]", "collating");
  refused("[[:alpha:]", "a set without an end");
  refused("re:*a", "quantifier does not follow");
  refused("re:a{2,1}", "numbers out of order");
  refused("re:((a{200}){200}){200}", "too large");
  refused("re:a\\", "\\ at end of pattern");
  refused("re:\\C", "using \\C is disabled");
  refused("re:(*UTF)a", "using UTF is disabled");
  refused("re:", "found nothing");
  refused("", "found nothing");
  char nested[200] = "re:";
  memset(nested + 3, '(', 100);
  refused(nested, "parentheses are too deeply nested");
  char *deep = calloc(1, 100004); /* 100,000 nested groups */
  memset(deep, '(', 100003);
  memcpy(deep, "re:", 3);
  refused(deep, "found a pattern of 100003 bytes, expected at most 512");
  free(deep);
}

static void accepted(const char *text, const char *name) {
  mm_pattern p;
  mm_arena a = {0};
  mm_err err = {0};
  bool hit = false;
  if (!mm_pattern_compile(&p, text, &a, &err) || !mm_pattern_match(&p, name, &hit, &err)) fail_msg("%s", err.text);
  assert_true(hit);
  mm_arena_close(&a);
}

/* The most that each limit allows, and one more. */
TEST(limits) {
  char text[MM_PATTERN_BYTES + 2] = "re:";
  for (unsigned n = MM_PATTERN_NEST; n <= MM_PATTERN_NEST + 1; n++) {
    memset(text + 3, '(', n);
    text[3 + n] = 'a';
    memset(text + 4 + n, ')', n);
    text[4 + 2 * n] = 0;
    if (n == MM_PATTERN_NEST)
      accepted(text, "a");
    else
      refused(text, "parentheses are too deeply nested");
  }
  char ended[5 * (MM_PATTERN_NEST + 8) + 4] = "re:", *end = ended + 3; /* groups that ended do not count */
  for (unsigned n = 0; n < MM_PATTERN_NEST + 8; n++) end = stpcpy(end, "(a)?");
  accepted(ended, "a");
  accepted("re:^model\\.layers\\.\\d+\\.", "model.layers.12.mlp");
  memset(text, '?', MM_PATTERN_BYTES);
  memset(text, '*', MM_PATTERN_BYTES - 1);
  text[MM_PATTERN_BYTES] = 0;
  accepted(text, "a");
  text[MM_PATTERN_BYTES] = '*';
  text[MM_PATTERN_BYTES + 1] = 0;
  refused(text, "found a pattern of 513 bytes, expected at most 512");
}

/* Each of these runs for minutes in an engine that tries one way after the other: an expression ends with an error once it took its steps,
 * a glob takes time in proportion to its length. */
TEST(hostile_in_time) {
  static const struct {
    const char *text;
    bool fails, matches;
  } row[] = {{"re:(a*)*[bc]", true, false},
             {"re:(a|a)*[bc]", true, false},
             {"re:(a|aa)+$", false, true},
             {"re:((a*)*)*[^a]", true, false},
             {"re:(.*.*.*.*.*.*.*.*)[xy]", true, false},
             {"re:(a?){200}a{200}[bc]", true, false},
             {"re:(?:(?=a)(a|a))*[bc]", true, false},
             {"re:(?<all>a?(?&all)?)+[bc]", true, false},
             {"*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*[bc]", false, false},
             {"*a*?*[a-z]*??*a*a*?a*a?*[!b]*a*a*a*", false, true},
             {"re:^(([a-z])+.)+[A-Z]([a-z])+$", true, false}};
  char name[256];
  memset(name, 'a', sizeof name - 1);
  name[255] = 0;
  clock_t start = clock();
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    mm_pattern p;
    mm_arena a = {0};
    mm_err err = {0};
    if (!mm_pattern_compile(&p, row[i].text, &a, &err)) fail_msg("%s", err.text);
    for (int k = 0; k < 10; k++) {
      bool hit = false;
      err = (mm_err){0};
      if (mm_pattern_match(&p, name, &hit, &err) == row[i].fails) fail_msg("%s: hit %d %s", row[i].text, hit, err.text);
      assert_true(hit == row[i].matches);
      if (row[i].fails && !strstr(err.text, "which takes more than 100000 steps")) fail_msg("%s", err.text);
      if (row[i].fails) assert_string_equal(err.code, "E_RECIPE");
    }
    mm_arena_close(&a);
  }
  printf("%.3f s\n", (double)(clock() - start) / CLOCKS_PER_SEC);
  assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 2);
}

/* Random names under random globs of many stars: as fnmatch has it, which tries one way after the other. */
TEST(stars) {
  unsigned hits = 0;
  for (int i = 0; i < 20000; i++) {
    char text[128] = "", name[40];
    size_t at = 0;
    for (uint32_t n = 1 + any(12); n-- > 0;)
      at += (size_t)sprintf(text + at, "%s", (const char *const[]){"*", "*", "a", "b", "?", "[ab]", "[!a]", "a*", "*b"}[any(9)]);
    const uint32_t n = any(30);
    for (uint32_t k = 0; k < n; k++) name[k] = "aabc"[any(4)];
    name[n] = 0;
    mm_pattern p;
    mm_arena a = {0};
    mm_err err = {0};
    bool hit = false;
    if (!mm_pattern_compile(&p, text, &a, &err) || !mm_pattern_match(&p, name, &hit, &err)) fail_msg("%s", err.text);
    if (hit != (fnmatch(text, name, 0) == 0)) fail_msg("\"%s\" and \"%s\": found %d", text, name, hit);
    hits += hit;
    mm_arena_close(&a);
  }
  assert_true(hits > 1000 && hits < 19000);
}

TEST(recipes_have_limits) {
  mm_recipe r;
  mm_err err = {0}, many = {0};
  char *line = calloc(1, 1 << 20);
  memset(line, ' ', (1 << 20) - 1);
  memcpy(line, "none", 4);
  assert_false(mm_recipe_parse(&r, line, &err));
  assert_non_null(strstr(err.text, "E_RECIPE: found a recipe of 1048575 bytes, expected at most 65536"));
  mm_recipe_close(&r);
  stpcpy(line, "none");
  for (int i = 0; i < MM_RECIPE_PATTERNS + 1; i++) stpcpy(line + 4 + 8 * i, "; a=none");
  assert_false(mm_recipe_parse(&r, line, &many));
  assert_string_equal(many.text, "E_RECIPE: found more patterns, expected at most 1024");
  mm_recipe_close(&r);
  free(line);
}

/* The dearest recipe: as many globs of stars as fit, on every name of a large model. */
TEST(dearest_recipe) {
  char *line = calloc(1, MM_RECIPE_BYTES + 1);
  size_t n = (size_t)sprintf(line, "none");
  while (n + 520 < MM_RECIPE_BYTES) {
    n += (size_t)sprintf(line + n, "; ");
    for (int i = 0; i < 250; i++) n += (size_t)sprintf(line + n, "?*");
    n += (size_t)sprintf(line + n, "=none");
  }
  mm_recipe r;
  mm_err err = {0};
  if (!mm_recipe_parse(&r, line, &err)) fail_msg("%s", err.text);
  clock_t start = clock();
  for (int i = 0; i < 100; i++) {
    const mm_scheme *s;
    const char *const names[] = {"model.layers.61.block_sparse_moe.experts.w13_weight",
                                 "model.layers.61.block_sparse_moe.experts.{e}.w1.weight", NULL};
    assert_true(mm_recipe_choose(&r, MM_KIND_LINEAR, names, &s, &err));
  }
  printf("%.2f ms a tensor\n", 10.0 * (double)(clock() - start) / CLOCKS_PER_SEC);
  mm_recipe_close(&r);
  free(line);
}

int main(void) { return run_unit_tests(NULL, NULL); }
