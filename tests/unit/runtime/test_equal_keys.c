/* A key that comes twice in a call: the last value counts, at the place of the first, and no object of the arguments has a key twice. */
#include <stdlib.h>
#include <string.h>

#include "formats/body.h"
#include "runtime/chat/arguments.h"
#include "runtime/chat/reply.h"
#include "tests/unit/unit.h"

static const char tool_text[] =
    "{\"name\": \"f\", \"parameters\": {\"type\": \"object\", \"properties\": {\"o\": {\"type\": \"object\"}, \"l\": {\"type\": "
    "\"array\"}}}}";

/* Events of calls as text: a letter for the kind where it changes, and what they say. */
static void note(void *user, const mm_reply_event *e) {
  mm_text *t = user;
  const char sign[] = {'\1', "RCTAENB"[e->kind], 0};
  const char *last = t->n ? memrchr(t->p, '\1', t->n) : NULL;
  if (!last || last[1] != sign[1]) mm_text_put(t, sign);
  mm_text_add(t, e->text, e->n);
}

/* The events of a reply that comes `step` bytes at a time. */
static char *events_of(const char *format, const char *text, size_t step) {
  mm_text t = {0};
  mm_err err = {0};
  const mm_chat_tool tool = {.json = {tool_text, sizeof tool_text - 1}};
  const mm_reply_settings s = {
      .format = mm_chat_format_find(format), .tool = &tool, .tool_count = 1, .calls = true, .sink = note, .user = &t};
  mm_reply *r = mm_reply_open(&s, &err);
  assert_non_null(r);
  for (size_t at = 0, n = strlen(text); at < n; at += step) assert_true(mm_reply_push(r, -1, text + at, mm_min(step, n - at), &err));
  assert_true(mm_reply_end(r, MM_REPLY_WHOLE, &err));
  mm_reply_close(r);
  return t.p;
}

#define T "\1T"
#define A "\1A"
#define E "\1E"

static void same_for_all_steps(const char *format, const char *text, const char *expected) {
  for (size_t step = strlen(text); step; step = step / 2) {
    char *got = events_of(format, text, step);
    if (strcmp(got, expected) != 0) fail_msg("%s, %zu bytes at a time\nwant %s\ngot  %s", text, step, expected, got);
    free(got);
  }
}

/* Arguments of M1 that are sent one by one. */
TEST(test_within_m1) {
  static const char *const text[][2] = {
      {"{\"name\": \"f\", \"arguments\": {\"b\": {\"x\": 1, \"x\": 2}}}", T "f" A "{\"b\": {\"x\": 2}}" E},
      {"{\"name\": \"f\", \"arguments\": {\"a\": 1.0 , \"b\" : [ {\"x\": 1, \"y\": 0, \"\\u0078\": 2} ] , \"c\": {\"x\" : 1}}}",
       T "f" A "{\"a\": 1.0 , \"b\" : [{\"x\": 2, \"y\": 0}] , \"c\": {\"x\" : 1}}" E},
      {"{\"arguments\": {\"x\": 1, \"o\": {\"y\": 1, \"y\": 2}, \"x\": 2}, \"name\": \"f\"}", T "f" A "{\"x\": 2, \"o\": {\"y\": 2}}" E},
      {"{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1, \\\"x\\\": 2}\"}", T "f" A "{\"x\": 2}" E}};
  for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
    char line[400];
    snprintf(line, sizeof line, "<tool_calls>\n%s\n</tool_calls>", text[i][0]);
    same_for_all_steps("minimax-m1", line, text[i][1]);
  }
}

/* Behind arguments that were sent: a whole reply takes the last ones. */
TEST(test_again_m1) {
  static const char *const text[][2] = {
      {"{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"arguments\": {\"a\": 2, \"a\": 3}}", "\1B{\"a\": 3}"},
      {"{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"arguments\": \"{}\", \"name\": \"g\"}", "\1Ng\1B{}"},
      {"{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"arguments\": {}, \"arguments\": {\"a\": 4}}", "\1B{\"a\": 4}"},
      {"{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": {\"name\": \"g\"}}", ""},
      {"{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"name\": 3, \"arguments\": null}", ""}};
  for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
    char line[400], expected[400];
    snprintf(line, sizeof line, "<tool_calls>\n%s\n</tool_calls>", text[i][0]);
    snprintf(expected, sizeof expected, "%s%s", T "f" A "{\"a\": 1}" E, text[i][1]);
    same_for_all_steps("minimax-m1", line, expected);
  }
}

/* Values of M2 and M3 that are JSON. */
TEST(test_within_others) {
  static const char value[] = "{\"x\": 1, \"y\": [{\"z\": 1, \"z\": 2}], \"x\": {\"u\": 1e3}}",
                    once[] = "{\"x\": {\"u\": 1e3}, \"y\": [{\"z\": 2}]}";
  char text[400], expected[400];
  snprintf(expected, sizeof expected, T "f" A "{\"o\": %s, \"l\": [%s]}" E, once, once);
  snprintf(text, sizeof text,
           "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"o\">%s</parameter>\n<parameter name=\"l\">[%s]</parameter>\n"
           "</invoke>\n</minimax:tool_call>",
           value, value);
  same_for_all_steps("minimax-m2", text, expected);
  snprintf(text, sizeof text,
           MM_CHAT_MARK "<tool_call>" MM_CHAT_MARK "<invoke name=\"f\">" MM_CHAT_MARK "<o>%s" MM_CHAT_MARK "</o>" MM_CHAT_MARK
                        "<l>[%s]" MM_CHAT_MARK "</l>" MM_CHAT_MARK "</invoke>" MM_CHAT_MARK "</tool_call>",
           value, value);
  same_for_all_steps("minimax-m3", text, expected);
}

/* Whole arguments; others stay as written. */
TEST(test_unite) {
  static const char *const text[][2] = {
      {"{\"a\": 1, \"b\": {\"a\": 1, \"a\": 2}, \"a\": [1e3,\":\"]}", "{\"a\": [1e3,\":\"], \"b\": {\"a\": 2}}"},
      {"{\"b\": [[{\"a\":1,\"a\":2}]]}", "{\"b\": [[{\"a\": 2}]]}"},
      {"{ \"a\":1.0 , \"b\\\"\": \"a:\\\\\" }", "{ \"a\":1.0 , \"b\\\"\": \"a:\\\\\" }"},
      {"{\"\\u0061\": 1, \"a\": 2}", "{\"a\": 2}"},
      {"{}", "{}"}};
  for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
    mm_text t = {0};
    mm_text_put(&t, text[i][0]);
    mm_arguments_unite(&t);
    assert_string_equal(t.p, text[i][1]);
    free(t.p);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
