/* Arguments of calls that were cut off: every beginning of an object is closed, and nothing else is. */
#include <stdio.h>
#include <string.h>

#include "runtime/chat/cut_arguments.h"
#include "tests/unit/unit.h"

static mm_str closed(mm_arena *a, const char *text, size_t n) {
  mm_str out = {0};
  return mm_arguments_close(a, (mm_str){text, n}, &out, MM_IGNORED) ? out : (mm_str){0};
}

TEST(test_closed) {
  static const struct {
    const char *text, *closed; /* NULL: it is no beginning of an object */
  } row[] = {
      {"{", "{}"},
      {" {\n", " {}"},
      {"{\"a", "{}"},
      {"{\"a\"", "{}"},
      {"{\"a\": ", "{}"},
      {"{\"a\": \"", "{\"a\": \"\"}"},
      {"{\"a\": \"x y", "{\"a\": \"x y\"}"},
      {"{\"a\": \"x\\", "{\"a\": \"x\"}"},
      {"{\"a\": \"x\\\\", "{\"a\": \"x\\\\\"}"},
      {"{\"a\": \"x\\u00e", "{\"a\": \"x\"}"},
      {"{\"a\": \"x\\ud83d", "{\"a\": \"x\"}"},
      {"{\"a\": \"x\\ud83d\\ude0", "{\"a\": \"x\"}"},
      {"{\"a\": \"x\\ud83d\\ude00", "{\"a\": \"x\\ud83d\\ude00\"}"},
      {"{\"a\": \"x\\\\ud83d", "{\"a\": \"x\\\\ud83d\"}"},
      {"{\"a\": \"x\", \"b\": 12", "{\"a\": \"x\"}"},
      {"{\"a\": 12,", "{\"a\": 12}"},
      {"{\"a\": tr", "{}"},
      {"{\"a\": -", "{}"},
      {"{\"a\": [1, 2", "{\"a\": [1]}"},
      {"{\"a\": [1, {\"b\": \"c", "{\"a\": [1, {\"b\": \"c\"}]}"},
      {"{\"a\": [", "{\"a\": []}"},
      {"{\"a\": {\"b\": 1}, \"c\": [[]", "{\"a\": {\"b\": 1}, \"c\": [[]]}"},
      {"", NULL},
      {"[1", NULL},
      {"\"a", NULL},
      {"a", NULL},
      {"{a", NULL},
      {"{\"a\" 1", NULL},
      {"{\"a\": 1 \"b\"", NULL},
      {"{\"a\": }", NULL},
      {"{\"a\": x", NULL},
      {"{\"a\": truth", NULL},
      {"{\"a\": 1]", NULL},
      {"{,", NULL},
      {"{\"a\": 1,,", NULL},
      {"{} {", NULL},
      {"{}x", NULL},
      {"{\"a\": \"b\"c", NULL},
  };
  mm_arena a = {0};
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    const mm_str found = closed(&a, row[i].text, strlen(row[i].text));
    if (!row[i].closed != !found.p || (found.p && strcmp(found.p, row[i].closed) != 0)) fail_msg("%s: %s", row[i].text, found.p);
  }
  mm_arena_close(&a);
}

/* Of a text without a terminator too: the pieces are copied into rooms of their own sizes. */
TEST(test_every_beginning) {
  static const char text[] =
      "{\"path\": \"a\\\\b\\\"\\u20ac\\ud83d\\ude00 \xc3\xa9\", \"n\": [1, -2.5e+10, true, false, null, {}, [], {\"k\": [\"x\", {\"y\": "
      "0}]}], \"\": "
      "{\"deep\": {\"er\": [[[\"end\"]]]}}}";
  size_t before = 0;
  for (size_t n = 1; n < sizeof text - 1; n++) {
    if ((text[n] & 0xc0) == 0x80) continue; /* within a character */
    mm_arena a = {0};
    mm_err err = {0};
    char *piece = mm_arena_alloc(&a, n, &err);
    assert_non_null(piece);
    memcpy(piece, text, n);
    const mm_str found = closed(&a, piece, n);
    const mm_value *v = found.p ? mm_body_parse(&a, found.p, found.n, &err) : NULL;
    if (!v || v->type != MM_VALUE_OBJECT) fail_msg("%.*s: %s", (int)n, piece, found.p);
    assert_true(v->count >= before && v->count <= 3);
    before = v->count;
    mm_arena_close(&a);
  }
}

/* As deep as the reader of requests goes, and no deeper. */
TEST(test_depth) {
  char text[1200];
  for (size_t depth = 250; depth < 260; depth++) {
    mm_arena a = {0};
    size_t n = (size_t)snprintf(text, sizeof text, "{\"a\": ");
    for (size_t i = 1; i < depth; i++) text[n++] = '[';
    const mm_str found = closed(&a, text, n);
    assert_int_equal(found.p != NULL, depth <= 256);
    if (found.p) assert_int_equal(found.n, n + depth);
    mm_arena_close(&a);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
