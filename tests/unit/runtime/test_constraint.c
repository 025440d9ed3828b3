/* Constraints with the tags of the M2 family, which are tokens but no special ones, as in the released tokenizer. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/constrain/call_form.h"
#include "runtime/constrain/schema.h"
#include "runtime/constrain/whole_text.h"
#include "tests/unit/changed_text.h"
#include "tests/unit/put_file.h"
#include "tests/unit/runtime/lexicon_of.h"

#define VOCAB 2056

/* Tokens as large vocabularies have them: the end of a text and what follows. */
#define MORE(id, content)                    \
  "{\"id\": " id ", \"content\": \"" content \
  "\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": false}, "
static const char more_tokens[] = "\"added_tokens\": [" MORE("2048", "\\\",\\\"") MORE("2049", "a\\\"") MORE("2050", "ab\\\",") MORE(
    "2051", "é\\\\n\\\"}") MORE("2052", "\\\": \\\"x") MORE("2053", "</parameter>\\n") MORE("2054", "y</parameter>") MORE("2055", "b </p");

static const char *const tag[] = {"<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"};
static int32_t think, think_end, call, call_end;

static int open_all(void **state) {
  (void)state;
  static char text[1 << 20];
  FILE *f = fopen("tests/data/tiny-m2/tokenizer.json", "rb");
  assert_non_null(f);
  const size_t n = fread(text, 1, sizeof text - 1, f);
  assert_true(fclose(f) == 0 && n < sizeof text - 1);
  char *changed = text;
  for (int i = 0; i < 4; i++) {
    char *next = replaced(changed, tag[i], "\"special\": true", "\"special\": false");
    if (changed != text) free(changed);
    changed = next;
  }
  char *larger = replaced(changed, "", "\"added_tokens\": [", more_tokens);
  free(changed);
  changed = larger;
  const char *dir = getenv("TMPDIR");
  char path[512];
  snprintf(path, sizeof path, "%s/tags.json", dir ? dir : "/tmp");
  put_file(path, changed, strlen(changed));
  free(changed);
  open_lexicon(path, VOCAB);
  think = mm_tokenizer_find_added(tokenizer, tag[0]), think_end = mm_tokenizer_find_added(tokenizer, tag[1]);
  call = mm_tokenizer_find_added(tokenizer, tag[2]), call_end = mm_tokenizer_find_added(tokenizer, tag[3]);
  assert_true(call >= 0 && !mm_tokenizer_is_special(tokenizer, call));
  return 0;
}

static bool allows(mm_constraint *c, int32_t id) {
  const uint32_t *mask = mm_constraint_allowed(c);
  return !mask || mask[id / 32] >> (id % 32) & 1;
}

/* The tokens of a text, each of which must be allowed. */
static void say(mm_constraint *c, const char *text) {
  mm_err err = {0};
  int32_t *id;
  size_t count;
  assert_true(mm_tokenizer_encode(tokenizer, text, strlen(text), true, &id, &count, &err));
  for (size_t i = 0; i < count; i++) {
    if (!allows(c, id[i])) fail_msg("%s: token %zu, %d, is not allowed", text, i, id[i]);
    mm_constraint_chosen(c, id[i]);
  }
  free(id);
}

static mm_literal newline = {.p = "\n", .n = 1}, newlines[] = {{.p = "\n", .n = 1}, {.p = "\n\n", .n = 2}, {.p = "\n\n\n", .n = 3}},
                  name = {.p = "\n<invoke name=\"f\">", .n = 18};
static const mm_form lines = {.kind = MM_FORM_LITERALS, .exact = true, .literal = newlines, .count = 3},
                     opening = {.kind = MM_FORM_LITERALS, .exact = true, .literal = &name, .count = 1};

static mm_constraint *required(void) {
  const mm_section section[] = {{.kind = MM_SECTION_UNTIL, .id = think_end, .call = call, .instead = true},
                                {.kind = MM_SECTION_FORM, .form = &lines},
                                {.kind = MM_SECTION_TOKEN, .id = call},
                                {.kind = MM_SECTION_FORM, .form = &opening},
                                {.kind = MM_SECTION_FREE, .id = -1}};
  mm_err err = {0};
  mm_constraint *c = mm_constraint_open(lexicon, section, 5, &err);
  assert_non_null(c);
  return c;
}

/* A required call that begins within the reasoning is the call. */
TEST(a_required_call_may_begin_in_the_reasoning) {
  mm_constraint *c = required();
  say(c, "why\n");
  assert_true(allows(c, think_end) && !allows(c, end));
  say(c, "<minimax:tool_call>");
  assert_false(allows(c, call) || allows(c, think_end) || allows(c, end));
  say(c, "\n<invoke name=\"f\">");
  assert_null(mm_constraint_allowed(c)); /* its end is allowed */
  mm_constraint_close(c);
}

/* The call's tag after newlines of which there could be more: its name is held to the tools'. */
TEST(a_required_call_begins_after_newlines) {
  for (size_t n = 1; n <= 3; n++) {
    mm_constraint *c = required();
    say(c, "why\n</think>");
    for (size_t i = 0; i < n; i++) say(c, newline.p);
    say(c, "<minimax:tool_call>");
    assert_non_null(mm_constraint_allowed(c));
    assert_false(allows(c, call) || allows(c, think_end) || allows(c, end));
    say(c, "\n<invoke name=\"f\">");
    assert_null(mm_constraint_allowed(c));
    mm_constraint_close(c);
  }
}

/* Where a form or a call may follow, a call in the reasoning stands for the form; where a form alone may, no call begins. */
TEST(a_form_and_a_call_in_the_reasoning) {
  for (int calls = 0; calls < 2; calls++) {
    const mm_section section[] = {{.kind = MM_SECTION_UNTIL, .id = think_end, .call = call, .instead = calls},
                                  {.kind = MM_SECTION_FORM, .id = call, .form = mm_schema_any_object(), .instead = calls}};
    mm_err err = {0};
    mm_constraint *c = mm_constraint_open(lexicon, section, 2, &err);
    assert_non_null(c);
    say(c, "why");
    assert_int_equal(allows(c, call), calls);
    assert_false(allows(c, think) || allows(c, call_end) || allows(c, end));
    if (calls) {
      mm_constraint_chosen(c, call);
      assert_null(mm_constraint_allowed(c));
    }
    mm_constraint_close(c);
  }
}

/* Tokens of text, none of which is a tag. */
static void reason(mm_constraint *c, int tokens) {
  const int32_t word = mm_tokenizer_find(tokenizer, "a");
  for (int i = 0; i < tokens; i++) {
    assert_true(allows(c, word) && allows(c, think_end));
    mm_constraint_chosen(c, word);
  }
}

static void end_of_budget(mm_constraint *c) {
  assert_false(allows(c, mm_tokenizer_find(tokenizer, "a")) || allows(c, end) || allows(c, call));
  say(c, "</think>");
}

/* After its budget of tokens a reasoning ends: before a form, before calls that are held or free, in a reply that may begin without one.
 * A call within it ends it too. Behind it nothing is counted, nor within another one. */
TEST(a_reasoning_ends_with_its_budget) {
  mm_err err = {0};
  for (int budget = 0; budget < 4; budget++)
    for (int way = 0; way < 10; way++) {
      const bool form = way<2, strict = way & 1, opened = way> 5, short_of = way == 4 || way == 5 || way > 7;
      const mm_section section[] = {{.kind = form ? MM_SECTION_UNTIL : MM_SECTION_FREE,
                                     .id = think_end,
                                     .call = call,
                                     .instead = !form,
                                     .limited = true,
                                     .most = (uint32_t)budget,
                                     .opened = opened,
                                     .open = think,
                                     .once = true},
                                    {.kind = form ? MM_SECTION_FORM : MM_SECTION_FREE, .id = strict ? call : -1, .form = &lines},
                                    {.kind = MM_SECTION_FORM, .form = &opening},
                                    {.kind = MM_SECTION_TOKEN, .id = call_end, .again = true}};
      mm_constraint *c = mm_constraint_open(lexicon, section, form ? 2 : strict ? 4 : 2, &err);
      assert_non_null(c);
      if (opened && !short_of) {
        assert_null(mm_constraint_allowed(c));
        mm_constraint_chosen(c, think);
      }
      if (!short_of) {
        reason(c, budget);
        end_of_budget(c);
      } else if (budget && !opened) {
        reason(c, budget - 1);
      }
      if (form) {
        say(c, "\n\n\n");
        assert_true(allows(c, end) && !allows(c, call));
      }
      for (int block = 0; !form && block < 2; block++) {
        if (!short_of || opened || block) {
          say(c, "a<think>");
          reason(c, budget + 2);
          assert_null(mm_constraint_allowed(c));
        } else if (!budget) {
          end_of_budget(c);
        }
        say(c, "<minimax:tool_call>");
        if (strict) {
          assert_false(allows(c, end) || allows(c, call_end));
          say(c, "\n<invoke name=\"f\">");
          assert_false(allows(c, end));
          say(c, "</minimax:tool_call>");
        }
        assert_null(mm_constraint_allowed(c));
      }
      mm_constraint_close(c);
    }
}

/* A string may spell a tag, by other tokens: the tag's own token would be taken for the tag. */
TEST(no_tag_stands_in_a_form) {
  const mm_section section[] = {{.kind = MM_SECTION_FORM, .form = mm_schema_any_object()}};
  mm_err err = {0};
  mm_constraint *c = mm_constraint_open(lexicon, section, 1, &err);
  assert_non_null(c);
  say(c, "{\"a\": \"");
  assert_false(allows(c, think) || allows(c, think_end) || allows(c, call) || allows(c, call_end));
  say(c, "<");
  say(c, "think");
  say(c, ">\"}");
  assert_true(allows(c, end));
  mm_constraint_close(c);
}

/* Values that never end: the end alone comes, however often it is passed over. */
TEST(a_form_that_is_stuck_stays_so) {
  static mm_form deep = {.kind = MM_FORM_ARRAY, .least = 1, .most = UINT32_MAX};
  deep.item = &deep;
  const mm_section section[] = {{.kind = MM_SECTION_FORM, .form = &deep}};
  mm_err err = {0};
  mm_constraint *c = mm_constraint_open(lexicon, section, 1, &err);
  assert_non_null(c);
  const int32_t open = mm_tokenizer_find(tokenizer, "["), blank = mm_tokenizer_find(tokenizer, " ");
  for (int i = 0; i < 4 * MM_FORM_DEPTH && !allows(c, end); i++) mm_constraint_chosen(c, allows(c, open) ? open : blank);
  assert_true(allows(c, end) && mm_constraint_stuck(c));
  for (int i = 0; i < 3; i++) {
    mm_constraint_chosen(c, end);
    assert_non_null(mm_constraint_allowed(c));
    assert_true(allows(c, end) && !allows(c, call) && mm_constraint_stuck(c));
  }
  mm_constraint_close(c);
}

static const mm_form *calls_of(mm_arena *a, mm_tools *tools, const char *json, bool one_call) {
  static const bool bound[] = {true};
  mm_err err = {0};
  const mm_chat_tool tool = {.json = {json, strlen(json)}};
  assert_true(mm_tools_open(tools, &tool, 1, &err));
  const mm_call_rules rules = {.family = MM_CHAT_M2, .tools = tools, .bound = bound, .one_call = one_call};
  const mm_form *f = mm_call_form(a, &rules, &err);
  if (!f) fail_msg("%s", err.text);
  return f;
}

#define P(name, value) "<parameter name=\"" name "\">" value "</parameter>\n"

/* Under auto a call that is begun is held to its tool's schema; behind its block anything may follow, another one too. */
TEST(a_strict_call_is_held_once_it_is_begun) {
  mm_arena a = {0};
  mm_tools tools;
  mm_err err = {0};
  const mm_form *calls =
      calls_of(&a, &tools,
               "{\"name\": \"f\", \"parameters\": {\"type\": \"object\", \"properties\": {\"n\": {\"type\": \"integer\"}, \"s\": "
               "{\"type\": \"string\", \"maxLength\": 3}}, \"required\": [\"s\"]}}",
               false);
  const mm_section section[] = {{.kind = MM_SECTION_FREE, .id = call},
                                {.kind = MM_SECTION_FORM, .form = calls},
                                {.kind = MM_SECTION_TOKEN, .id = call_end, .again = true}};
  mm_constraint *c = mm_constraint_open(lexicon, section, 3, &err);
  assert_non_null(c);
  for (int block = 0; block < 2; block++) {
    say(c, "text <think>");
    assert_null(mm_constraint_allowed(c));
    say(c, "<minimax:tool_call>\n<invoke name=\"f\">\n" P("n", "12") P("s", "a<b") "</invoke>");
    assert_false(allows(c, end) || allows(c, call_end) || allows(c, call));
    say(c, "\n<invoke name=\"f\">\n" P("s", "\xc3\xa9") "</invoke>\n");
    assert_true(allows(c, call_end) && !allows(c, end));
    say(c, "</minimax:tool_call>");
  }
  assert_true(allows(c, end));
  mm_constraint_close(c);
  mm_tools_close(&tools);
  mm_arena_close(&a);
}

/* The text that a parameter may have: how many bytes of `text` may follow the beginning of the element, all or fewer. */
static const struct {
  const char *schema, *text;
  bool good;
} values[] = {
    {"{\"type\": \"string\"}", "null</parameter>", true},
    {"{\"type\": \"string\"}", "a</parameter", true},
    {"{\"type\": \"string\"}", "a</invoke>", false},
    {"{\"type\": \"string\"}", "a<parameter name=", false},
    {"{\"type\": \"string\"}", "<p> </p> </i></parameter>", true},
    {"{\"type\": \"string\", \"minLength\": 2}", "a</parameter>", false},
    {"{\"type\": \"string\", \"maxLength\": 2}", "abc", false},
    {"{\"type\": \"string\", \"minLength\": 3, \"maxLength\": 3}", "ab</", false},
    {"{\"type\": \"integer\"}", "12</parameter>", true},
    {"{\"type\": \"integer\"}", "1.5", false},
    {"{\"type\": \"boolean\"}", "yes", false},
    {"{\"enum\": [\"a\", \"ab\", 7]}", "ab</parameter>", true},
    {"{\"enum\": [\"a\", \"ab\", 7]}", "7</parameter>", true},
    {"{\"enum\": [\"a\", \"ab\", 7]}", "b", false},
    {"{\"enum\": [\"7\", 7, \"x\"]}", "x</parameter>", true},
    {"{\"type\": [\"string\", \"null\"], \"minLength\": 9}", " null </parameter>", true},
    {"{\"type\": [\"string\", \"null\"], \"minLength\": 9}", "nulls</parameter>", false},
    {"{\"anyOf\": [{\"type\": \"string\", \"minLength\": 5}, {\"type\": \"integer\"}]}", "12</parameter>", true},
    {"{\"anyOf\": [{\"type\": \"string\", \"minLength\": 5}, {\"type\": \"integer\"}]}", "12-1</parameter>", false},
    {"{\"anyOf\": [{\"type\": \"string\"}, {\"type\": \"integer\"}]}", "2026-01-02</parameter>", true},
    {"{\"anyOf\": [{\"type\": \"string\"}, {\"type\": \"integer\"}]}", "123456789012345678901234</parameter>", false},
    {"{\"anyOf\": [{\"type\": \"string\"}, {\"type\": \"object\"}]}", "{\"a\": \"</p>\"}</parameter>", true},
    {"{\"anyOf\": [{\"type\": \"string\"}, {\"type\": \"object\"}]}", "{a", false},
    {"{\"type\": \"object\"}", "{\"a\": \"</parameter>", false},
    {"{}", "{a</parameter>", true},
};

TEST(texts_of_parameters) {
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    mm_arena a = {0};
    mm_tools tools;
    mm_err none = {0};
    char *json = mm_arena_printf(&a, &none, "{\"name\": \"f\", \"parameters\": {\"properties\": {\"v\": %s}}}", values[i].schema);
    assert_non_null(json);
    mm_grammar_stack more[MM_GRAMMAR_MORE];
    mm_grammar g = {.more = more};
    mm_grammar_start(&g, calls_of(&a, &tools, json, true));
    for (const char *p = "\n<invoke name=\"f\">\n<parameter name=\"v\">"; *p; p++) assert_true(mm_grammar_step(&g, (uint8_t)*p));
    const char *p = values[i].text;
    while (*p && mm_grammar_step(&g, (uint8_t)*p)) p++;
    if (!*p != values[i].good) fail_msg("%s: %s: up to %s", values[i].schema, values[i].text, p);
    mm_tools_close(&tools);
    mm_arena_close(&a);
  }
}

/* The mask at hand against every token tried alone. */
static void compare_mask(mm_constraint *c, const mm_grammar *g, mm_grammar *try, const char *before) {
  for (int32_t id = 0; id < VOCAB; id++) {
    size_t n, k = 0;
    const char *bytes = mm_tokenizer_bytes(tokenizer, id, &n);
    bool word = bytes && n && !mm_tokenizer_is_special(tokenizer, id);
    for (int i = 0; i < 4; i++) word = word && mm_tokenizer_find_added(tokenizer, tag[i]) != id;
    mm_grammar_copy(try, g);
    while (word && k < n && mm_grammar_step(try, (uint8_t)bytes[k])) k++;
    const bool fits = (word && k == n) || (id == end && mm_grammar_accepts(g));
    if (allows(c, id) != fits) fail_msg("token %d, \"%.*s\", behind %s", id, (int)n, bytes, before);
  }
}

/* A text of the form in pieces of random lengths, so that masks are made in the middle of tokens, characters, escapes and tags. */
static void follow(const mm_form *form, const char *text, uint64_t seed) {
  mm_grammar_stack more[2][MM_GRAMMAR_MORE];
  mm_grammar g = {.more = more[0]}, try = {.more = more[1]};
  const mm_section section[] = {{.kind = MM_SECTION_FORM, .form = form}};
  mm_err err = {0};
  char before[32];
  mm_constraint *c = mm_constraint_open(lexicon, section, 1, &err);
  assert_non_null(c);
  mm_grammar_start(&g, form);
  for (const char *p = text; *p;) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const size_t longest = 1 + (seed >> 33) % 8;
    int32_t best = -1;
    size_t best_n = 0, n;
    snprintf(before, sizeof before, "%.*s", (int)mm_min((size_t)(p - text), sizeof before - 1), p - mm_min((size_t)(p - text), 31));
    compare_mask(c, &g, &try, before);
    for (int32_t id = 0; id < VOCAB; id++) {
      const char *bytes = mm_tokenizer_bytes(tokenizer, id, &n);
      if (!bytes || n <= best_n || n > longest || strncmp(bytes, p, n) != 0 || !allows(c, id)) continue;
      best = id;
      best_n = n;
    }
    if (best < 0) fail_msg("nothing of %s may follow %s", p, before);
    mm_constraint_chosen(c, best);
    for (size_t i = 0; i < best_n; i++) assert_true(mm_grammar_step(&g, (uint8_t)*p++));
  }
  if (!mm_grammar_done(&g)) compare_mask(c, &g, &try, "the end");
  mm_constraint_close(c);
}

TEST(masks_within_texts_are_what_the_automaton_says) {
  mm_arena a = {0};
  mm_tools tools;
  const mm_form *calls = calls_of(
      &a, &tools,
      "{\"name\": \"f\", \"parameters\": {\"properties\": {\"n\": {\"type\": \"integer\"}, \"s\": {\"type\": \"string\", \"minLength\": 2, "
      "\"maxLength\": 9}, \"t\": {\"type\": \"string\"}, \"o\": {\"type\": \"object\"}, \"u\": {\"type\": [\"string\", \"null\"], "
      "\"maxLength\": 12}, \"w\": "
      "{\"type\": [\"string\", \"null\"], \"maxLength\": 2}}}}",
      true);
  mm_err err = {0};
  static const char schema[] =
      "{\"type\": \"object\", \"properties\": {\"p\": {\"type\": \"string\", \"pattern\": \"^[a-m<]+( \\\\S|é)*$\"}, \"s\": {\"type\": "
      "\"string\", \"minLength\": 2, \"maxLength\": 6}}, \"required\": [\"p\", \"s\"], \"additionalProperties\": {\"type\": \"string\"}}";
  const mm_value *v = mm_body_parse(&a, schema, strlen(schema), &err);
  const mm_form *patterns = v ? mm_schema_compile(&a, v, "schema", &err) : NULL;
  if (!patterns) fail_msg("%s", err.text);
  static const char grammar[] =
      "root ::= value\nvalue ::= object | list | text | word # a value\nobject ::= \"{\" (pair (\",\" \" \"? pair)*)? \"}\"\n"
      "pair ::= text \": \" value\nlist ::= \"[\" (value (\",\" value)*)? \"]\"\ntext ::= \"\\\"\" ([^\"\\\\] | \"\\\\\" .)* \"\\\"\"\n"
      "word ::= \"true\" | \"null\" | [0-9]{1,3}";
  static const char pattern[] = "^(\\d{4}-\\d\\d|[a-f ]+é?)(, .*)?$";
  const mm_form *values_of = mm_whole_grammar(&a, grammar, sizeof grammar - 1, "grammar", &err);
  const mm_form *dates = mm_whole_regex(&a, pattern, sizeof pattern - 1, "regex", &err);
  if (!values_of || !dates) fail_msg("%s", err.text);
  for (uint64_t seed = 1; seed < 3; seed++) {
    follow(values_of, "{\"a\": [1,{\"ab\": null},\"x \\\\ \\\"y\"], \"é\": 12}", seed);
    follow(dates, seed == 1 ? "2026-11, é </p" : "bad fadeé", seed);
    follow(mm_schema_any_object(), "\n{\"a\": \"x\\\"y <z>\\u00e9 \xc3\xa9\xe2\x98\x83\", \"b\": [\"\", -1.5e3, {\"c <\": null}]}", seed);
    follow(patterns, "{\"p\": \"a<éé xé y\", \"s\": \"é\\nb\\\"12\", \"pq\": \"abc\", \"x\\\"\": \"\"}", seed);
    follow(calls,
           "\n<invoke name=\"f\">\n" P("n", "-12") P("s", "a<b \xc3\xa9") P("t", "a text, \"<b>\" \xe2\x98\x83 \\ </p\n\t x")
               P("o", "{\"a\": \"x<y \\n\xc3\xa9\", \"b\": [\"word </p\", 1]}") P("u", "nullable <") P("w", "null") "</invoke>\n",
           seed);
  }
  mm_tools_close(&tools);
  mm_arena_close(&a);
}

/* anyOf of so many, the i-th with i put into `each`. */
static const mm_form *any_of(mm_arena *a, const char *each, int count) {
  static char schema[8192];
  mm_err err = {0};
  size_t n = (size_t)snprintf(schema, sizeof schema, "{\"anyOf\": [");
  for (int i = 0; i < count; i++) {
    char one[200];
    int k = 0;
    for (const char *p = each; *p; p++) k += snprintf(one + k, sizeof one - (size_t)k, *p == '@' ? "%d" : "%c", *p == '@' ? 100 + i : *p);
    n += (size_t)snprintf(schema + n, sizeof schema - n, "%s%s", i ? ", " : "", one);
  }
  snprintf(schema + n, sizeof schema - n, "]}");
  const mm_value *v = mm_body_parse(a, schema, strlen(schema), &err);
  const mm_form *f = v ? mm_schema_compile(a, v, "schema", &err) : NULL;
  if (!f) fail_msg("%s", err.text);
  return f;
}

static double cpu_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* CPU time of the fastest of some masks within a string, each of another state. */
static double mask_ms(const mm_form *form) {
  const mm_section section = {.kind = MM_SECTION_FORM, .form = form};
  mm_err err = {0};
  mm_constraint *c = mm_constraint_open(lexicon, &section, 1, &err);
  double best = 1e9;
  assert_non_null(c);
  say(c, "\"");
  for (int i = 0; i < 99; i++) {
    const double began = cpu_ms();
    assert_non_null(mm_constraint_allowed(c));
    if (i >= 95) best = fmin(best, cpu_ms() - began); /* near the end of the shortest text no mask comes again */
    say(c, "x");
  }
  mm_constraint_close(c);
  return best;
}

/* Where a text can be read in several ways, each takes its own time, and not at each byte of all words the time of all. */
TEST(masks_of_several_ways) {
  static const char grammar[] =
      "root ::= (a | b | c | d) (a | b | c | d) end\na ::= [a-f]* (b | c)\nb ::= [^x]{0,3} (c | d)?\nc ::= [a-z]* d*\n"
      "d ::= \"ab\" | \"a\" \"b\" | \"<b\"\nend ::= \"x\"";
  mm_arena a = {0};
  mm_err err = {0};
  const mm_form *ambiguous = mm_whole_grammar(&a, grammar, sizeof grammar - 1, "grammar", &err);
  if (!ambiguous) fail_msg("%s", err.text);
  for (uint64_t seed = 1; seed < 3; seed++) {
    follow(ambiguous, "abab<babfabx", seed);
    follow(any_of(&a, "{\"type\": \"string\", \"pattern\": \"^[a-z <]*@$\"}", 32), "\"a b<c 117\"", seed);
    follow(any_of(&a,
                  "{\"type\": \"array\", \"items\": {\"anyOf\": [{\"type\": \"string\", \"pattern\": \"^[^@]*$\"}, {\"type\": "
                  "\"integer\"}, {\"type\": \"string\", \"maxLength\": 4}]}}",
                  9),
           "[\"ab\", 12,\"x\"]", seed);
  }
  const double one = mask_ms(any_of(&a, "{\"type\": \"string\", \"maxLength\": @}", 1)),
               all = mask_ms(any_of(&a, "{\"type\": \"string\", \"maxLength\": @}", 32));
  if (all > 400 * one) fail_msg("a mask of 32 ways takes %.4f ms, one of them %.4f", all, one);
  mm_arena_close(&a);
}

/* A word by which one way is read on, and another forks so often that both together are too many: who says it is held to the form. */
TEST(a_word_of_too_many_ways) {
  static const char first[] =
      "root ::= one | two\none ::= \"x\" \"a\" any | \"\\x02\" one \"y\"\nany ::= [^\\x01]+ | \"\\x01\" any \"z\"\n"
      "two ::= \"\\x02\" two \"y\" | \"x\" (\"a\" \"d\"";
  static char grammar[4096];
  mm_arena a = {0};
  mm_err err = {0};
  size_t n = (size_t)snprintf(grammar, sizeof grammar, "%s", first);
  for (int i = 1; i < 32; i++) n += (size_t)snprintf(grammar + n, sizeof grammar - n, " | s%d", i);
  n += (size_t)snprintf(grammar + n, sizeof grammar - n, ")");
  for (int i = 1; i < 32; i++) n += (size_t)snprintf(grammar + n, sizeof grammar - n, "\ns%d ::= \"a\" \"q\"{%d} (s%d \"q\")?", i, i, i);
  const mm_form *form = mm_whole_grammar(&a, grammar, n, "grammar", &err);
  if (!form) fail_msg("%s", err.text);
  const mm_section section = {.kind = MM_SECTION_FORM, .form = form};
  for (int32_t id = 0; id < VOCAB; id++) {
    const char *bytes = mm_tokenizer_bytes(tokenizer, id, &n);
    if (!bytes || !n || *bytes != 'a') continue;
    mm_constraint *c = mm_constraint_open(lexicon, &section, 1, &err);
    assert_non_null(c);
    say(c, "x");
    const bool allowed = allows(c, id);
    if (allowed) mm_constraint_chosen(c, id);
    if (allowed && !mm_constraint_allowed(c)) fail_msg("token %d is allowed, and ends the form", id);
    mm_constraint_close(c);
  }
  mm_arena_close(&a);
}

int main(void) { return run_unit_tests(open_all, close_lexicon); }
