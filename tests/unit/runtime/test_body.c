/* Bodies of requests: what Python's json module reads is read alike. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/body.h"
#include "formats/scan.h"
#include "formats/text.h"
#include "tests/unit/unit.h"

static const mm_value *parse(mm_arena *a, const char *text, mm_err *err) { return mm_body_parse(a, text, strlen(text), err); }

TEST(equal_keys_are_the_last_at_the_first_place) {
  mm_arena a = {0};
  mm_err err = {0};
  const mm_value *v = parse(&a, "{\"b\": 1, \"a\": {\"x\": 2}, \"b\": [3], \"c\": 4, \"a\": null, \"b\": \"last\"}", &err);
  assert_non_null(v);
  const char *const order[] = {"b", "a", "c"};
  size_t i = 0;
  for (const mm_value *m = v->first; m && i < 3; m = m->next, i++) assert_string_equal(m->key, order[i]);
  assert_int_equal(i, 3);
  assert_int_equal(v->count, 3);
  assert_true(mm_value_is(mm_value_get(v, "b"), "last"));
  assert_null(mm_value_get(v, "a"));
  mm_arena_close(&a);
}

TEST(numbers_keep_their_text) {
  static const struct {
    const char *text;
    double real;
    bool whole;
    int64_t value;
  } cases[] = {{"1e3", 1000, true, 1000},
               {"-0", 0, true, 0},
               {"3.0", 3, true, 3},
               {"0.5", 0.5, false, 0},
               {"-5", -5, true, -5},
               {"9223372036854775807", 9223372036854775807.0, true, INT64_MAX},
               {"-9223372036854775808", -9223372036854775808.0, true, INT64_MIN},
               {"9223372036854775808", 9223372036854775808.0, false, 0},
               {"-9223372036854775809", -9223372036854775809.0, false, 0},
               {"18446744073709551616", 18446744073709551616.0, false, 0},
               {"-9007199254740992.0", -9007199254740992.0, true, -INT64_C(9007199254740992)},
               {"9007199254740994.0", 9007199254740994.0, false, 0},
               {"Infinity", INFINITY, false, 0},
               {"-Infinity", -INFINITY, false, 0},
               {"123456789012345678901234567890", 123456789012345678901234567890.0, false, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    int64_t n = 0;
    const mm_value *v = parse(&a, cases[i].text, &err);
    assert_non_null(v);
    assert_int_equal(v->n, strlen(cases[i].text));
    assert_memory_equal(v->text, cases[i].text, v->n);
    assert_true(mm_value_real(v) == cases[i].real);
    assert_int_equal(mm_value_int(v, &n), cases[i].whole);
    if (cases[i].whole) assert_int_equal(n, cases[i].value);
    mm_arena_close(&a);
  }
}

TEST(strings_are_utf8) {
  mm_arena a = {0};
  mm_err err = {0};
  const mm_value *v = parse(&a, "\"\\u00e9\\ud83d\\ude00\\ud800x\\n\\u0000\"", &err);
  static const char want[] = "\xc3\xa9\xf0\x9f\x98\x80\xef\xbf\xbdx\n";
  assert_non_null(v);
  assert_int_equal(v->n, sizeof want); /* and a NUL */
  assert_memory_equal(v->text, want, sizeof want);
  mm_text t = {0};
  mm_text_quote(&t, v->text, v->n);
  assert_string_equal(t.p, "\"\xc3\xa9\xf0\x9f\x98\x80\xef\xbf\xbdx\\n\\u0000\"");
  free(t.p);
  mm_arena_close(&a);
}

TEST(what_is_no_json_is_refused_with_its_place) {
  static const char *const bad[] = {"",   "{",  "[1,]",     "{\"a\":1,}", "{a:1}", "'a'",      "\"a", "\"\n\"", "\"\\x\"", "\"\\u12g4\"",
                                    "01", "+1", ".5",       "1 2",        "nul",   "\"\xff\"", "[1}", "- 5",    "1.",      "1e+",
                                    "-",  "-N", "-Infinit", "tru",        "[NaN"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    if (parse(&a, bad[i], &err)) fail_msg("%s was read", bad[i]);
    assert_string_equal(err.code, "E_JSON");
    assert_non_null(strstr(err.text, "offset"));
    mm_arena_close(&a);
  }
}

TEST(depth_and_count_are_bounded) {
  for (int deep = MM_SCAN_DEPTH_PYTHON - 1; deep <= MM_SCAN_DEPTH_PYTHON + 1; deep++) {
    mm_arena a = {0};
    mm_err err = {0};
    char text[2 * MM_SCAN_DEPTH_PYTHON + 3] = {0};
    memset(text, '[', (size_t)deep);
    memset(text + deep, ']', (size_t)deep);
    assert_int_equal(parse(&a, text, &err) != NULL, deep <= MM_SCAN_DEPTH_PYTHON);
    mm_arena_close(&a);
  }
}

/* A character that ends beyond the text is none, whatever stands there. */
TEST(quoted_ends) {
  static const struct {
    const char *bytes;
    size_t n;
    const char *json;
  } cases[] = {{"a\xc3\xa9", 2, "\"a\xef\xbf\xbd\""},
               {"a\xc3\xa9", 3, "\"a\xc3\xa9\""},
               {"\xe2\x82\xac", 2, "\"\xef\xbf\xbd\xef\xbf\xbd\""},
               {"\xe2\x82\xac", 3, "\"\xe2\x82\xac\""},
               {"x\xf0\x9f\x98\x80", 4, "\"x\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\""},
               {"x\xf0\x9f\x98\x80", 5, "\"x\xf0\x9f\x98\x80\""},
               {"\n\x1f \x7f\"\\", 6, "\"\\n\\u001f \x7f\\\"\\\\\""},
               {"a\0b", 3, "\"a\\u0000b\""},
               {"a", 0, "\"\""},
               {NULL, 0, "\"\""}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mm_text t = {0};
    mm_text_quote(&t, cases[i].bytes, cases[i].n);
    assert_string_equal(t.p, cases[i].json);
    free(t.p);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
