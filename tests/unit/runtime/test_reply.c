/* Replies: their events, the same for every cut; markers by id and by text; odd blocks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/body.h"
#include "runtime/chat/arguments.h"
#include "runtime/chat/reply.h"
#include "tests/unit/unit.h"

#define TOKENIZER "tests/data/tiny-m2/tokenizer.json"
#define VOCAB     (1u << 16)

static const char weather[] =
    "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\", \"$defs\": {\"day\": {\"enum\": [1, "
    "2]}}, "
    "\"properties\": {\"s\": {\"type\": \"string\"}, \"i\": {\"type\": \"integer\"}, \"n\": {\"type\": [\"number\", \"null\"]}, \"b\": "
    "{\"type\": \"boolean\"}, \"o\": {\"type\": \"object\"}, \"l\": {\"type\": \"array\"}, \"m\": {\"anyOf\": [{\"type\": \"string\"}, "
    "{\"type\": \"null\"}]}, \"u\": {\"type\": [\"integer\", \"string\"]}, \"e\": {\"enum\": [\"x\", 1]}, \"r\": {\"$ref\": "
    "\"#/$defs/day\"}, \"a\": {}}}}}";

/* Events as text: a letter for the kind, and what they say, joined. */
typedef struct transcript {
  mm_text text;
  mm_reply_kind last;
  uint32_t call;
} transcript;

static void note(void *user, const mm_reply_event *e) {
  transcript *t = user;
  assert_true(e->n > 0 || e->kind == MM_REPLY_CALL_END);
  if (!t->text.n || e->kind != t->last || e->kind == MM_REPLY_CALL || e->kind == MM_REPLY_CALL_END) {
    const char sign[] = {'\1', "RCTAE"[e->kind], 0};
    mm_text_put(&t->text, sign);
  }
  if (e->kind == MM_REPLY_CALL) assert_int_equal(e->call, t->call++);
  if (e->kind == MM_REPLY_ARGUMENTS || e->kind == MM_REPLY_CALL_END) assert_int_equal(e->call, t->call - 1);
  mm_text_add(&t->text, e->text, e->n);
  t->last = e->kind;
}

typedef struct feeding {
  const char *text;
  size_t n;
  const size_t *cut; /* [cuts] ascending: where pieces end; nowhere: all at once */
  size_t cuts;
  const mm_tokenizer *tokenizer; /* markers come by id */
  const char *format;
  bool in_reasoning, calls, whole, append, as_written;
} feeding;

static const char *const markers[] = {"<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"};

/* The bytes from `at` up to the next marker, cut or end; *id: of a marker that stands there. */
static size_t piece_at(const feeding *f, size_t at, size_t *next_cut, int32_t *id) {
  *id = -1;
  while (*next_cut < f->cuts && f->cut[*next_cut] <= at) ++*next_cut;
  size_t end = *next_cut < f->cuts ? f->cut[*next_cut] : f->n;
  if (!f->cuts) end = f->n;
  for (size_t i = at; f->tokenizer && i < end; i++) {
    for (size_t m = 0; m < 4; m++) {
      const size_t len = strlen(markers[m]);
      if (f->n - i < len || memcmp(f->text + i, markers[m], len) != 0) continue;
      if (i > at) return i - at;
      *id = mm_tokenizer_find_added(f->tokenizer, markers[m]);
      return len;
    }
  }
  return end - at;
}

/* free() it */
static char *transcript_of(const feeding *f) {
  transcript t = {0};
  mm_err err = {0};
  const mm_chat_tool tool = {.json = {weather, sizeof weather - 1}};
  const mm_reply_settings s = {.format = mm_chat_format_find(f->format),
                               .tokenizer = f->tokenizer,
                               .tool = &tool,
                               .tool_count = 1,
                               .calls = f->calls,
                               .in_reasoning = f->in_reasoning,
                               .append_think = f->append,
                               .as_written = f->as_written,
                               .sink = note,
                               .user = &t};
  mm_text_put(&t.text, "");
  mm_reply *r = mm_reply_open(&s, &err);
  assert_non_null(r);
  size_t next = 0;
  for (size_t at = 0, n; at < f->n; at += n) {
    int32_t id;
    n = piece_at(f, at, &next, &id);
    char *copy = malloc(n ? n : 1); /* of its size, so that a reader past it is seen */
    assert_non_null(copy);
    memcpy(copy, f->text + at, n);
    assert_true(mm_reply_push(r, id, copy, n, &err));
    free(copy);
  }
  assert_true(mm_reply_end(r, f->whole, &err));
  mm_reply_close(r);
  return t.text.p;
}

static uint32_t random_state = 1;
static uint32_t draw(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % below;
}

/* Every cut in two, every byte alone, some random cuts: all as the whole. */
static void same_for_all_cuts(feeding f, const char *expected) {
  char *whole = transcript_of(&f);
  if (expected && strcmp(whole, expected) != 0) fail_msg("%s\nwant %s\ngot  %s", f.text, expected, whole);
  size_t *cut = malloc((f.n + 1) * sizeof *cut);
  assert_non_null(cut);
  f.cut = cut;
  for (size_t round = 0; round < f.n + 5; round++) {
    f.cuts = 0;
    if (round < f.n) cut[f.cuts++] = round;
    for (size_t i = 1; round >= f.n && i < f.n; i++)
      if (round == f.n || draw(4) == 0) cut[f.cuts++] = i;
    char *got = transcript_of(&f);
    if (strcmp(got, whole) != 0) fail_msg("cut %zu of %s\nwhole %s\ncut   %s", round, f.text, whole, got);
    free(got);
  }
  MM_FREE(cut, whole);
}

/* The text of one kind in a transcript. free() it. */
static char *part_of(const char *said, char kind) {
  mm_text t = {0};
  mm_text_put(&t, "");
  for (const char *p = said, *end; *p; p = end) {
    end = p + 1 + strcspn(p + 1, "\1");
    if (p[1] == kind) mm_text_add(&t, p + 2, (size_t)(end - p - 2));
  }
  return t.p;
}

/* A reply that is cut off anywhere says the beginning of what the whole one says, but for a newline before what may be a tag. */
static void beginning_for_all_ends(feeding f) {
  char *whole = transcript_of(&f);
  f.whole = false;
  for (const size_t n = f.n; f.n-- > 0;) {
    char *cut = transcript_of(&f);
    for (const char *kind = "RC"; *kind; kind++) {
      char *says = part_of(cut, *kind), *all = part_of(whole, *kind);
      const size_t len = strlen(says), kept = len && says[len - 1] == '\n' ? len - 1 : len;
      if (strncmp(says, all, kept) != 0) fail_msg("%zu of %zu bytes of %s\nwhole %s\ncut   %s", f.n, n, f.text, whole, cut);
      MM_FREE(says, all);
    }
    free(cut);
  }
  free(whole);
}

#define R                  "\1R"
#define C                  "\1C"
#define T                  "\1T"
#define A                  "\1A"
#define E                  "\1E"
#define BEGIN              "<minimax:tool_call>\n"
#define END                "\n</minimax:tool_call>"
#define INVOKE(name, body) "<invoke name=\"" name "\">\n" body "</invoke>"
#define P(name, value)     "<parameter name=\"" name "\">" value "</parameter>\n"

static const struct {
  const char *text, *expected;
  bool cut; /* the reply was cut off */
} m2[] = {
    {"", "", false},
    {"thought", R "thought", true},
    {"thought\n</think>\n\nHello", R "thought" C "Hello", false},
    {"thought\n\n</think>\n\n\nHello\n\n", R "thought\n" C "\nHello\n\n", false},
    {"thought</think>Hello", R "thought" C "Hello", false},
    {"\n</think>\n\n", "", false},
    {"</think>  Hi", C "  Hi", false},
    {"<think>\nagain\n</think>\n\nHi", R "again" C "Hi", false},
    {"a</thin</think>b</think>c", R "a</thin" C "b</think>c", false},
    {"t\n</think>\n\nOk\n" BEGIN INVOKE("f", P("s", "x\"y\nz") P("i", " 12 ")) END,
     R "t" C "Ok" T "f" A "{\"s\": \"x\\\"y\\nz\", \"i\": 12}" E, false},
    {"t\n</think>\n\n\n" BEGIN INVOKE("f", "") "\n" INVOKE("g", "") END, R "t" T "f" A "{}" E T "g" A "{}" E, false},
    /* a call ends the reasoning */
    {"t\n" BEGIN INVOKE("f", "") END, R "t" T "f" A "{}" E, false},
    /* so also after a <think> within it */
    {"t <think> u\n" BEGIN INVOKE("f", "") END, R "t <think> u" T "f" A "{}" E, false},
    {"t <think> u\n</think>\n\n" BEGIN INVOKE("f", "") END, R "t <think> u" T "f" A "{}" E, false},
    {"</think>" BEGIN INVOKE("f", "") END "\n\nand more\n" BEGIN INVOKE("g", "") END, T "f" A "{}" E C "\nand more" T "g" A "{}" E, false},
    /* types by the schema, numbers as written */
    {"</think>" BEGIN INVOKE(
         "f", P("s", "12") P("i", "12") P("i", "1.5") P("n", "1e3") P("n", "null") P("n", "1.50") P("b", "True") P("b", "off")) END,
     T "f" A "{\"s\": \"12\", \"i\": 12, \"i\": 1.5, \"n\": 1e3, \"n\": null, \"n\": 1.50, \"b\": true, \"b\": false}" E, false},
    {"</think>" BEGIN INVOKE("f", P("o", "{\"b\":  1.0,\n\"a\": 12345678901234567890}") P("l", "[1, 2]") P("o", "{'a': 1}") P("i", "many"))
         END,
     T "f" A "{\"o\": {\"b\":  1.0,\n\"a\": 12345678901234567890}, \"l\": [1, 2], \"o\": \"{'a': 1}\", \"i\": \"many\"}" E, false},
    {"</think>" BEGIN INVOKE("f", P("s", "null") P("m", "null") P("m", "nul") P("i", "null") P("u", "7") P("u", "7.0") P("u", "seven")
                                      P("u", "null") P("e", "x")) END,
     T "f" A "{\"s\": \"null\", \"m\": null, \"m\": \"nul\", \"i\": null, \"u\": 7, \"u\": \"7.0\", \"u\": \"seven\", \"u\": \"null\", "
       "\"e\": \"x\"}" E,
     false},
    {"</think>" BEGIN INVOKE(
         "f", P("r", "2") P("a", "{\"x\": [true]}") P("a", "NaN") P("a", "\"q\"") P("new", " text ") P("n", "-Infinity")) END,
     T "f" A
       "{\"r\": 2, \"a\": \"{\\\"x\\\": [true]}\", \"a\": \"NaN\", \"a\": \"\\\"q\\\"\", \"new\": \" text \", \"n\": \"-Infinity\"}" E,
     false},
    /* no type, no schema: strings */
    {"</think>" BEGIN INVOKE("unknown", P("q", "5") P("w", "five") P("", "")) END,
     T "unknown" A "{\"q\": \"5\", \"w\": \"five\", \"\": \"\"}" E, false},
    /* a string or null flows once it is not null */
    {"</think>" BEGIN INVOKE("f", P("m", " null\n") P("m", "nullable") P("m", " nul l") P("m", "") P("m", "null null") P("m", "<null>"))
         END,
     T "f" A "{\"m\": null, \"m\": \"nullable\", \"m\": \" nul l\", \"m\": \"\", \"m\": \"null null\", \"m\": \"<null>\"}" E, false},
    /* text as it is: white space, entities, tags */
    {"</think>" BEGIN INVOKE("f", P("s", "\n  a &lt; b </p> <parameter name=\"z\"> </invoke> <think>x</think> \n")) END,
     T "f" A "{\"s\": \"\\n  a &lt; b </p> <parameter name=\\\"z\\\"> </invoke> <think>x</think> \\n\"}" E, false},
    {"</think>" BEGIN INVOKE("f", P("s", "\xc3\xa9\xf0\x9f\x98\x80\x01\xff")) END,
     T "f" A "{\"s\": \"\xc3\xa9\xf0\x9f\x98\x80\\u0001\xef\xbf\xbd\"}" E, false},
    /* names without quotes, in single ones, with spaces */
    {"</think>" BEGIN "<invoke name=f><parameter name='i'>1</parameter></invoke>" END, T "f" A "{\"i\": 1}" E, false},
    {"</think>" BEGIN "<invoke name= \"f\" ><parameter name= i >1</parameter></invoke>" END, T "f" A "{\"i\": 1}" E, false},
    /* tags that are missing */
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one</invoke>\n \t\n<invoke name=\"f\">\n" P("i", "2") "</invoke>" END,
     T "f" A "{\"s\": \"one\"}" E T "f" A "{\"i\": 2}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one</invoke>" END, T "f" A "{\"s\": \"one\"}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n" P("i", "2") END, T "f" A "{\"i\": 2}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n" P("i", "2") "<invoke name=\"g\">\n</invoke>" END, T "f" A "{\"i\": 2}" E T "g" A "{}" E,
     false},
    {"</think>" BEGIN INVOKE("f", P("i", "2")), T "f" A "{\"i\": 2}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n" P("i", "2"), T "f" A "{\"i\": 2}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one</invoke>\n", T "f" A "{\"s\": \"one\"}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one", T "f" A "{\"s\": \"one\"}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"i\">1", T "f" A "{\"i\": 1}" E, false},
    /* cut off: no end of the call, what is there is the beginning of JSON */
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one\n</par", T "f" A "{\"s\": \"one", true},
    {"</think>" BEGIN "<invoke name=\"f\">\n" P("i", "2") "<parameter name=\"i\">1", T "f" A "{\"i\": 2, \"i\": \"1", true},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter na", T "f", true},
    {"</think>" BEGIN "<invoke name=\"f", "", true},
    {"</think>" BEGIN, "", true},
    {"</think>So.\n" BEGIN " <inv", C "So.", true},
    {"</think>" BEGIN INVOKE("f", "") "\n<invoke name=\"ge", T "f" A "{}" E, true},
    {"</think>" BEGIN INVOKE("f", "") "\n<inv", T "f" A "{}" E, true},
    {"</think>" BEGIN "Sure <inv", C BEGIN "Sure ", true},
    /* elements without content */
    {"</think>" BEGIN "<invoke name=\"f\"/>" END, T "f" A "{}" E, false},
    {"</think>" BEGIN "<invoke name=f />\n<invoke name=\"g/\"/></invoke>\n<invoke name='h'>" END,
     T "f" A "{}" E T "g/" A "{}" E T "h" A "{}" E, false},
    {"</think>" BEGIN INVOKE("f", "<parameter name=\"s\"/>" P("m", "x")) END, T "f" A "{\"s\": \"\", \"m\": \"x\"}" E, false},
    /* a parameter that lacks its end, before the next one */
    {"</think>" BEGIN INVOKE("f", "<parameter name=\"s\">one\n" P("i", "2")) END, T "f" A "{\"s\": \"one\", \"i\": 2}" E, false},
    {"</think>" BEGIN INVOKE("f", "<parameter name=\"i\">1<parameter name=\"s\">two\n\n<parameter name=\"m\">three\n") END,
     T "f" A "{\"i\": 1, \"s\": \"two\\n\", \"m\": \"three\"}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one<parameter name=\"i\">2" END, T "f" A "{\"s\": \"one\", \"i\": 2}" E,
     false},
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\">one<parameter name=\"m\">tw", T "f" A "{\"s\": \"one\", \"m\": \"tw",
     true},
    {"</think>" BEGIN INVOKE("free", "<parameter name=\"p\">one\n" P("q", "2")) END, T "free" A "{\"p\": \"one\", \"q\": \"2\"}" E, false},
    /* one that was given, that the tool has not, or whose end is text, is text */
    {"</think>" BEGIN INVOKE("f", P("i", "1") P("s", "a <parameter name=\"i\">2")) END,
     T "f" A "{\"i\": 1, \"s\": \"a <parameter name=\\\"i\\\">2\"}" E, false},
    {"</think>" BEGIN INVOKE("f", P("s", "a\n<parameter name=\"i\">2</parameter>b")) END,
     T "f" A "{\"s\": \"a\\n<parameter name=\\\"i\\\">2</parameter>b\"}" E, false},
    /* an end counts before a tag alone */
    {"</think>" BEGIN "<invoke name=\"f\">\n<parameter name=\"s\"><parameter>x</parameter>\n</parameter></invoke>" END,
     T "f" A "{\"s\": \"<parameter>x</parameter>\\n\"}" E, false},
    {"</think>" BEGIN INVOKE("f", P("s", "<a>\n</parameter> </parameter> \n</a>") P("i", "3")) END,
     T "f" A "{\"s\": \"<a>\\n</parameter> </parameter> \\n</a>\", \"i\": 3}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">" P("s", "a</parameter>") " \t" END, T "f" A "{\"s\": \"a</parameter>\"}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">" P("s", "a</parameter>b") " \t", T "f" A "{\"s\": \"a</parameter>b\"}" E, false},
    {"</think>" BEGIN "<invoke name=\"f\">" P("s", "a</parameter>b") " \t", T "f" A "{\"s\": \"a</parameter>b\"", true},
    /* between parameters nothing is content */
    {"</think>" BEGIN INVOKE("f", "stray" P("i", "1")) END, T "f" A "{\"i\": 1}" E, false},
    {"</think>" BEGIN INVOKE("f", "lost <p> ") "</parameter></invoke>\n" INVOKE("g", "") END, T "f" A "{}" E T "g" A "{}" E, false},
    /* what is no call is content */
    {"</think>" BEGIN "not a call" END, C BEGIN "not a call" END, false},
    {"</think>" BEGIN "Sure:\n" INVOKE("f", "") END, C BEGIN "Sure:\n" T "f" A "{}" E, false},
    {"</think>" BEGIN "<invoke name=\"\">\n</invoke>" END, C BEGIN "<invoke name=\"\">\n</invoke>" END, false},
    {"</think>" BEGIN INVOKE("f", "stray" P("i", "1") "and more") "\nbetween\n" INVOKE("g", "") END,
     T "f" A "{\"i\": 1}" E C "between\n" T "g" A "{}" E, false},
    {"</think>" BEGIN END "x", C "x", false},
    {"</think>" BEGIN INVOKE("f", "") "\n" BEGIN INVOKE("g", "") END, T "f" A "{}" E T "g" A "{}" E, false},
    {"</think>a" END, C "a" END, false},
};

TEST(test_m2) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(TOKENIZER, VOCAB, &err);
  assert_non_null(t);
  for (size_t i = 0; i < sizeof m2 / sizeof *m2; i++) {
    feeding f = {
        .text = m2[i].text, .n = strlen(m2[i].text), .format = "minimax-m2", .in_reasoning = true, .calls = true, .whole = !m2[i].cut};
    same_for_all_cuts(f, m2[i].expected);
    beginning_for_all_ends(f);
    f.tokenizer = t;
    same_for_all_cuts(f, m2[i].expected);
  }
  mm_tokenizer_close(t);
}

/* With ids, the same text of other tokens is text. */
TEST(test_ids) {
  transcript t = {0};
  mm_err err = {0};
  mm_tokenizer *tokenizer = mm_tokenizer_open(TOKENIZER, VOCAB, &err);
  assert_non_null(tokenizer);
  const mm_reply_settings s = {
      .format = mm_chat_format_find("minimax-m2"), .tokenizer = tokenizer, .calls = true, .in_reasoning = true, .sink = note, .user = &t};
  const int32_t end = mm_tokenizer_find_added(tokenizer, "</think>");
  assert_true(end > 0);
  mm_reply *r = mm_reply_open(&s, &err);
  assert_non_null(r);
  assert_true(mm_reply_push(r, 1, "a</think>b", 10, &err));
  assert_true(mm_reply_push(r, end, "</think>", 8, &err));
  assert_int_equal(mm_reply_reasoning_tokens(r), 2);
  assert_true(mm_reply_push(r, 2, "<minimax:tool_call><invoke name=\"f\">", 36, &err));
  assert_true(mm_reply_end(r, true, &err));
  assert_int_equal(mm_reply_reasoning_tokens(r), 2);
  assert_string_equal(t.text.p, R "a</think>b" C "<minimax:tool_call><invoke name=\"f\">");
  mm_reply_close(r);
  mm_tokenizer_close(tokenizer);
  free(t.text.p);
}

#define LINE(name, arguments) "{\"name\": \"" name "\", \"arguments\": " arguments "}\n"

static const struct {
  const char *text, *expected;
} m1[] = {
    {"Hello\n", C "Hello\n"},
    {"<think>\nthought\n</think>\n\nHello", R "thought" C "Hello"},
    {"\n<think>thought</think>Hello", R "thought" C "Hello"},
    {"<think>\nnever ends", R "never ends"},
    {"a <think> b </think> c", C "a <think> b </think> c"},
    {"Ok\n<tool_calls>\n" LINE("f", "{\"b\": 1.0, \"a\": \"}\\\"}\"}") LINE("g", "{}") "</tool_calls>",
     C "Ok" T "f" A "{\"b\": 1.0, \"a\": \"}\\\"}\"}" E T "g" A "{}" E},
    {"<think>\n<tool_calls>\n" LINE("f", "{}") "</tool_calls>\n</think>\n\nx", R "<tool_calls>\n" LINE("f", "{}") "</tool_calls>" C "x"},
    {"a <think> <tool_calls>" LINE("f", "{}") "</tool_calls></think>", C "a <think> <tool_calls>" LINE("f", "{}") "</tool_calls></think>"},
    /* unterminated, braces too many, several on a line */
    {"<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}}}\n{\"arguments\": {}, \"name\": \"g\"} {\"name\": \"h\", \"arguments\": "
     "{}}",
     T "f" A "{\"a\": 1}" E T "g" A "{}" E T "h" A "{}" E},
    {"<tool_calls>\n{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": [1]}\"}\n</tool_calls>", T "f" A "{\"a\": [1]}" E},
    /* the closing tag inside a string */
    {"<tool_calls>\n" LINE("f", "{\"a\": \"</tool_calls> <think>\"}") "</tool_calls>", T "f" A "{\"a\": \"</tool_calls> <think>\"}" E},
    /* lines that are no calls are content */
    {"<tool_calls>\n" LINE("f", "{}") "not a call\n" LINE("g", "{}") "</tool_calls>", T "f" A "{}" E C "not a call\n" T "g" A "{}" E},
    {"<tool_calls>\nfirst\n  " LINE("g", "{}") "</tool_calls>", C "<tool_calls>\nfirst\n  " T "g" A "{}" E},
    {"<tool_calls>\n{\"name\": \"f\", \"arguments\": {\n" LINE("g", "{}"),
     C "<tool_calls>\n{\"name\": \"f\", \"arguments\": {\n" T "g" A "{}" E},
    {"<tool_calls>\n" LINE(
         "f",
         "[1]") "{\"name\": \"\", \"arguments\": {}}\n{\"name\": \"f\"}\n{\"name\": \"f\", \"arguments\": {\"x\": NaN}}\n</tool_calls>",
     C "<tool_calls>\n" LINE(
         "f",
         "[1]") "{\"name\": \"\", \"arguments\": {}}\n{\"name\": \"f\"}\n{\"name\": \"f\", \"arguments\": {\"x\": NaN}}\n</tool_calls>"},
    {"use `<tool_calls>` tags", C "use `<tool_calls>` tags"},
    {"<tool_calls>\n</tool_calls>x", C "x"},
    {"<tool_calls>\n{\"name\": \"f\", \"arg", C "<tool_calls>\n{\"name\": \"f\", \"arg"},
    /* argument by argument; what follows them is dropped if it is the object's */
    {"<tool_calls>{\"id\": 1, \"name\": \"f\", \"arguments\" : { \"a\" : [1, {\"x\": \"}\"}] , \"b\":{}, \"a\": 1e3 }, \"more\": [{}]}\n",
     T "f" A "{ \"a\" : [1, {\"x\": \"}\"}] , \"b\":{}, \"a\": 1e3 }" E},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1}, odd}x\ny", T "f" A "{\"a\": 1}" E C ", odd}x\ny"},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1}\n" LINE("g", "{}"), T "f" A "{\"a\": 1}" E T "g" A "{}" E},
    {"<tool_calls>{\"x\": {}, \"name\": \"f\", \"arguments\": {\"a\": 1}}", T "f" A "{\"a\": 1}" E},
    /* an argument that is no JSON ends the telling, without an end of the call */
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": NaN, \"c\": 2}}\n" LINE("g", "{}"),
     T "f" A "{\"a\": 1" C ", \"b\": NaN, \"c\": 2}}\n" T "g" A "{}" E},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1,}}\n", T "f" A "{\"a\": 1" C ",}}\n"},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": [\"a\": 1}}\n", C "<tool_calls>{\"name\": \"f\", \"arguments\": [\"a\": 1}}\n"},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1]}\n", C "<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1]}\n"},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": \"tw", T "f" A "{\"a\": 1" C ", \"b\": \"tw"},
};

/* Cut off. */
static const struct {
  const char *text, *expected;
} m1_cut[] = {
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": \"tw", T "f" A "{\"a\": 1, \"b\": \"tw"},
    {"<tool_calls>{\"name\": \"f\", \"arguments\": {\"a", T "f" A "{\"a"},
    {"So.\n<tool_calls>\n", C "So."},
    {"<tool_calls>\n{\"name\": \"f\", \"arg", ""},
    {"<tool_calls>\n" LINE("f", "{}") "{\"na", T "f" A "{}" E},
    {"<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"x", T "f" A "{\"a\": 1}" E},
    {"<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"a\": NaN, \"b",
     C "<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"a\": NaN, \"b"},
    {"<tool_calls>\nno\n{\"na", C "<tool_calls>\nno\n"},
    {"So.\n<tool_ca", C "So.\n"},
    {"<think>\nthought</thi", R "thought"},
    {"<thi", ""},
    {"a <thi", C "a <thi"},
};

TEST(test_m1) {
  const feeding m = {.format = "minimax-m1", .calls = true, .whole = true};
  for (size_t i = 0; i < sizeof m1 / sizeof *m1; i++) {
    feeding f = m;
    f.text = m1[i].text;
    f.n = strlen(f.text);
    same_for_all_cuts(f, m1[i].expected);
    beginning_for_all_ends(f);
  }
  for (size_t i = 0; i < sizeof m1_cut / sizeof *m1_cut; i++) {
    feeding f = m;
    f.text = m1_cut[i].text;
    f.n = strlen(f.text);
    f.whole = false;
    same_for_all_cuts(f, m1_cut[i].expected);
  }
}

TEST(test_settings) {
  static const struct {
    const char *text, *expected, *format;
    bool in_reasoning, calls, append, as_written;
  } one[] = {
      {"t\n" BEGIN INVOKE("f", "") END "\n</think>\n\nx" BEGIN, R "t\n" BEGIN INVOKE("f", "") END C "x" BEGIN, "minimax-m2", true, false,
       false, false},
      {"t\n</think>\n\nHi", C "<think>t\n</think>\n\nHi", "minimax-m2", true, true, true, false},
      {"t" BEGIN INVOKE("f", "") END, C "<think>t\n</think>\n\n" T "f" A "{}" E, "minimax-m2", true, true, true, false},
      {"Hi", C "Hi", "minimax-m2", false, true, true, false},
      {"<think>\nt\n</think>\n\nHi", C "<think>t\n</think>\n\nHi", "minimax-m1", false, true, true, false},
      /* content that is held to a form keeps its white space, and spells what it likes */
      {"t\n</think>\n\nHi\n\n", R "t" C "\n\nHi\n\n", "minimax-m2", true, true, false, true},
      {"t</think>\n", R "t" C "\n", "minimax-m2", true, false, false, true},
      {" \t\n ", C " \t\n ", "minimax-m3", false, true, false, true},
      {"\n<think>\nt\n</think>\n\nHi", C "\n<think>\nt\n</think>\n\nHi", "minimax-m1", false, false, false, true},
  };
  for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
    const feeding f = {.text = one[i].text,
                       .n = strlen(one[i].text),
                       .format = one[i].format,
                       .in_reasoning = one[i].in_reasoning,
                       .calls = one[i].calls,
                       .append = one[i].append,
                       .as_written = one[i].as_written,
                       .whole = true};
    same_for_all_cuts(f, one[i].expected);
  }
}

/* Replies of random pieces of the grammar: every word is in some event, whatever the disorder, and arguments of complete calls are JSON. */
TEST(test_disorder) {
  static const char *const piece[] = {"<think>",
                                      "</think>",
                                      "<minimax:tool_call>",
                                      "</minimax:tool_call>",
                                      "<tool_calls>",
                                      "</tool_calls>",
                                      "<invoke name=\"f\">",
                                      "<invoke name=",
                                      "</invoke>",
                                      "<parameter name=\"s\">",
                                      "<parameter name=\"i\">",
                                      "<parameter name=\"m\"/>",
                                      "<invoke name=\"f\"/>",
                                      "<parameter name=",
                                      "</parameter>",
                                      "\n",
                                      " ",
                                      "\"",
                                      ">",
                                      "<",
                                      "</",
                                      "{\"name\": \"f\", \"arguments\": {",
                                      "}",
                                      "{",
                                      "}}\n",
                                      "\\",
                                      "w",
                                      "\xc3\xa9",
                                      "\xff",
                                      "12"};
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(TOKENIZER, VOCAB, &err);
  assert_non_null(t);
  for (int round = 0; round < 400; round++) {
    mm_text made = {0};
    for (uint32_t i = 0, n = 1 + draw(24); i < n; i++) mm_text_put(&made, piece[draw(sizeof piece / sizeof *piece)]);
    const char *text = made.p;
    feeding f = {.text = text,
                 .n = strlen(text),
                 .format = round % 2 ? "minimax-m2" : "minimax-m1",
                 .in_reasoning = round % 4 == 3,
                 .calls = true,
                 .whole = draw(3) > 0,
                 .append = draw(4) == 0,
                 .tokenizer = draw(2) ? t : NULL};
    same_for_all_cuts(f, NULL);
    char *got = transcript_of(&f);
    size_t words = 0, found = 0;
    for (const char *p = text; (p = strchr(p, 'w')); p++) words++;
    for (const char *p = got; (p = strchr(p, 'w')); p++) found++;
    if (words != found && ((f.format[9] == '1' && f.whole) || found > words)) fail_msg("%s\nwords lost: %s", text, got);
    for (const char *p = got; (p = strstr(p, "\1A")); p++) {
      const char *end = strchr(p + 2, '\1');
      mm_arena arena = {0};
      mm_err wrong = {0};
      if (end && end[1] == 'E' && !mm_body_parse(&arena, p + 2, (size_t)(end - p - 2), &wrong))
        fail_msg("%s\n%s\n%s", text, got, wrong.text);
      mm_arena_close(&arena);
    }
    MM_FREE(got, made.p);
  }
  mm_tokenizer_close(t);
}

/* By the whole text, where the value that begins at `s` ends: before the first </parameter> that white space and a tag follow, or
 * </invoke> that white space and <invoke name= follow, without the newline before it then. */
static size_t end_by_rule(const char *s) {
  static const char space[] = " \n\r\t";
  for (const char *p = s; *p; p++) {
    const bool parameter = strncmp(p, "</parameter>", 12) == 0, invoke = strncmp(p, "</invoke>", 9) == 0;
    if (!parameter && !invoke) continue;
    const char *q = p + (parameter ? 12 : 9);
    q += strspn(q, space);
    const bool call = strncmp(q, "<invoke name=", 13) == 0;
    if (parameter && (call || !*q || strncmp(q, "</invoke>", 9) == 0 || strncmp(q, "<parameter name=", 16) == 0)) return (size_t)(p - s);
    if (invoke && call) return (size_t)(p - s) - (p > s && p[-1] == '\n');
  }
  return strlen(s);
}

/* The first parameter of a call whose value is random pieces of tags, cut at random, is what the rule says of the whole text. */
TEST(test_values_end_where_a_tag_follows) {
  static const char *const piece[] = {"</parameter>",
                                      "</parameter>",
                                      "</parameter>\n",
                                      "</invoke>",
                                      "<invoke name=\"q\">",
                                      "\n",
                                      " ",
                                      "x",
                                      "<parameter>",
                                      "<parameter name=\"z\">",
                                      "<",
                                      "</",
                                      "\xc3\xa9",
                                      "</param",
                                      "eter>"};
  static const char head[] = "<invoke name=\"f\">\n<parameter name=\"s\">";
  uint32_t shorter = 0;
  for (int round = 0; round < 3000; round++) {
    mm_text made = {0};
    mm_text_put(&made, "</think><minimax:tool_call>");
    mm_text_put(&made, head);
    const size_t from = made.n;
    for (uint32_t i = 0, n = draw(14); i < n; i++) mm_text_put(&made, piece[draw(sizeof piece / sizeof *piece)]);
    mm_text_put(&made, "</parameter>\n</invoke>");
    size_t cut[64], cuts = 0;
    for (size_t i = 1; i < made.n && cuts < 64; i++)
      if (draw(5) == 0) cut[cuts++] = i;
    const feeding f = {
        .text = made.p, .n = made.n, .cut = cut, .cuts = cuts, .format = "minimax-m2", .in_reasoning = true, .calls = true, .whole = true};
    char *got = transcript_of(&f);
    const size_t n = end_by_rule(made.p + from);
    shorter += n + 22 < made.n - from;
    mm_text want = {0};
    mm_text_put(&want, T "f" A "{\"s\": ");
    mm_text_quote(&want, made.p + from, n);
    const char after = strncmp(got, want.p, want.n) == 0 ? got[want.n] : 0;
    if (after != '}' && after != ',') fail_msg("%s\nwant %s\ngot  %s", made.p, want.p, got);
    free(want.p);
    free(made.p);
    free(got);
  }
  assert_true(shorter > 100);
}

/* A tool that is none is refused. */
TEST(test_tools) {
  static const char *const wrong[] = {
      "", "[]", "{}", "{\"function\": {\"name\": 1}}", "{\"function\": {\"name\": \"\"}}", "{\"name\": \"f\""};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const mm_chat_tool tool = {.json = {wrong[i], strlen(wrong[i])}};
    const mm_reply_settings s = {.format = mm_chat_format_find("minimax-m2"), .tool = &tool, .tool_count = 1, .sink = note};
    mm_err err = {0};
    assert_null(mm_reply_open(&s, &err));
    assert_int_equal(err.status, MM_BAD_INPUT);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
