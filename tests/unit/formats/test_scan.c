/* formats/scan: what JSON is and is not, integers, escapes, members, messages. */
#include "formats/scan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/unit.h"

/* A scanner over a copy of exactly n bytes, so that the sanitizer sees one byte too many. */
static mm_scan scan_of(const char *text, size_t n) {
  char *copy = malloc(n ? n : 1);
  assert_non_null(copy);
  memcpy(copy, text, n);
  return (mm_scan){.text = copy, .len = n, .file = "t.json", .base = 1000, .status = MM_BAD_INPUT};
}
static void release(mm_scan *s) { free((void *)(uintptr_t)s->text); }

typedef struct sample {
  const char *text;
  size_t n;
} sample;
#define S(text) \
  { text, sizeof text - 1 }

static const sample valid[] = {
    S("null"),
    S("true"),
    S("false"),
    S("0"),
    S("-0"),
    S("-1"),
    S("10"),
    S("1.5"),
    S("-0.25"),
    S("1e3"),
    S("1E+3"),
    S("0e-0"),
    S("123.456e78"),
    S("1e999"),
    S("123456789012345678901234567890"),
    S("\"\""),
    S("\"a\""),
    S("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\""),
    S("\"\\u0041\\uabCD\""),
    S("\"\\ud83d\\ude00\""),
    S("\"\\u0000\""),
    S("\"\\uFFFF\\udbff\\udfff\""),
    S("\"\x7f\""),
    S("\"é€😀\""),
    S("\"\xf4\x8f\xbf\xbf\""),
    S("\"\xe2\x80\xa8\""),
    S("\"// /* not a comment\""),
    S("[]"),
    S("[ ]"),
    S("[1]"),
    S("[1,2,3]"),
    S("[[],[[]],{}]"),
    S("[\"a\",null,true,-1.5]"),
    S("{}"),
    S("{ }"),
    S("{\"a\":1}"),
    S("{\"a\":1,\"a\":2}"),
    S("{\"\":{\"\":[]}}"),
    S(" \t\r\n[ 1 , 2 ] \n"),
    S("{\"a\" : [ { \"b\" : \"c\" } ] }"),
    S("[0,-0,0.0]"),
    S("\"asd \""),
    S("[\"\\\"\",\"]\",\"}\"]"),
    S("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"), /* 32 deep */
};

static const sample invalid[] = {
    S(""),
    S(" "),
    S("\xef\xbb\xbf{}"),
    S("\xff\xfe{\0}\0"),
    S("nul"),
    S("True"),
    S("nulll"),
    S("NaN"),
    S("Infinity"),
    S("-"),
    S("-Infinity"),
    S("+1"),
    S(".5"),
    S("1."),
    S("1.e1"),
    S("01"),
    S("-01"),
    S("00"),
    S("1e"),
    S("1e+"),
    S("1.5.5"),
    S("0x10"),
    S("1_000"),
    S("1 2"),
    S("--1"),
    S("1a"),
    S("１"),
    S("\""),
    S("\"abc"),
    S("'a'"),
    S("\"\\\""),
    S("\"\\"),
    S("\"\\a\""),
    S("\"\\'\""),
    S("\"\\x41\""),
    S("\"\\u12\""),
    S("\"\\u00G0\""),
    S("\"\\U0041\""),
    S("\"\\ud800\""),
    S("\"\\udc00\""),
    S("\"\\ud800\\u0041\""),
    S("\"\\ud800\\ud800\""),
    S("\"\\ud83d\xf0\x9f\x98\x80\""),
    S("\"\\ud83d\\xde00\""),
    S("\"\\ud83dxude00\""),
    S("1\0"
      "5"),
    S("\"\\ud83"),
    S("\"\\ud83d\\ude0\""),
    S("\"a\nb\""),
    S("\"a\tb\""),
    S("\"a\0b\""),
    S("\"\x1f\""),
    S("\"\xff\""),
    S("\"\xc0\xaf\""),
    S("\"\xe0\x80\xaf\""),
    S("\"\xed\xa0\x80\""),
    S("\"\xf4\x90\x80\x80\""),
    S("\"\xf8\x88\x80\x80\x80\""),
    S("\"\xe2\x82\""),
    S("\"\x80\""),
    S("\"é"),
    S("["),
    S("[1"),
    S("[1,"),
    S("[1,]"),
    S("[,1]"),
    S("[1,,2]"),
    S("[1 2]"),
    S("[1}"),
    S("]"),
    S("[[]"),
    S("[]]"),
    S("[a]"),
    S("[\"a\":1]"),
    S("{"),
    S("{\"a\""),
    S("{\"a\":"),
    S("{\"a\":1"),
    S("{\"a\":1,"),
    S("{\"a\":1,}"),
    S("{,\"a\":1}"),
    S("{\"a\" 1}"),
    S("{\"a\",1}"),
    S("{a:1}"),
    S("{1:1}"),
    S("{null:1}"),
    S("{'a':1}"),
    S("{\"a\":1]"),
    S("{\"a\":}"),
    S("{\"a\"::1}"),
    S("{\"a\":1 \"b\":2}"),
    S("{\"a\":1;\"b\":2}"),
    S("{}{}"),
    S("{}x"),
    S("{} null"),
    S("{}\0"),
    S("\0"),
    S("[1]\0"),
    S("1\0"),
    S("// c\n1"),
    S("1 // c"),
    S("/* c */1"),
    S("[1/**/]"),
    S("#1"),
    S("\f1"),
    S("\v1"),
    S("\xc2\xa0"
      "1"),
    S("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"), /* 33 deep */
};

static void check_skip(const sample *t, bool expected) {
  mm_scan s = scan_of(t->text, t->n);
  mm_err err = {0};
  bool ok = mm_scan_skip(&s, &err);
  assert_int_equal(ok, err.status == MM_OK);
  ok = ok && mm_scan_end(&s, &err);
  if (ok != expected) fail_msg("%s: %s", t->text, ok ? "accepted" : err.text);
  if (!ok) {
    assert_string_equal(err.code, "E_JSON");
    assert_int_equal(err.status, MM_BAD_INPUT);
    assert_ptr_equal(strstr(err.text, "E_JSON: t.json: offset 1"), err.text);
    assert_non_null(strstr(err.text, "found "));
  } else {
    assert_int_equal(s.depth, 0);
  }
  release(&s);
}

TEST(test_valid) {
  for (size_t i = 0; i < sizeof valid / sizeof valid[0]; i++) check_skip(&valid[i], true);
}

TEST(test_invalid) {
  for (size_t i = 0; i < sizeof invalid / sizeof invalid[0]; i++) check_skip(&invalid[i], false);
}

/* No beginning of a JSON text that must be closed is itself one. */
TEST(test_every_prefix_is_refused) {
  static const char text[] = "{\"a\\u00e9\\ud83d\\ude00é\":[1.5e-3,{\"b\":[true,false,null,\"\\n\"]}, -0 ],\"c\":{}}";
  for (size_t n = 0; n < sizeof text - 1; n++) check_skip(&(sample){text, n}, false);
  check_skip(&(sample){text, sizeof text - 1}, true);
}

/* A deep text is refused by the scanner's own limit long before the stack is. */
TEST(test_deep_nesting) {
  enum { DEEP = 200000 };
  char *text = malloc(2 * DEEP);
  memset(text, '[', DEEP);
  memset(text + DEEP, ']', DEEP);
  mm_scan s = scan_of(text, 2 * DEEP);
  mm_err err = {0};
  assert_false(mm_scan_skip(&s, &err));
  assert_string_equal(err.text, "E_JSON: t.json: offset 1032: found \"[[[[[[[[[[[[[[[[[[[[[[[[\", expected at most 32 levels of nesting");
  release(&s);
  free(text);
}

TEST(test_u64) {
  static const struct {
    const char *text;
    bool ok;
    uint64_t value;
  } cases[] = {
      {"0", true, 0},
      {" 7", true, 7},
      {"42,", true, 42},
      {"18446744073709551615]", true, UINT64_MAX},
      {"9007199254740993", true, UINT64_C(9007199254740993)},
      {"18446744073709551616", false, 0},
      {"99999999999999999999", false, 0},
      {"-1", false, 0},
      {"-0", false, 0},
      {"+1", false, 0},
      {"00", false, 0},
      {"01", false, 0},
      {"1.0", false, 0},
      {"1.", false, 0},
      {"4e0", false, 0},
      {"4E0", false, 0},
      {".5", false, 0},
      {"\"5\"", false, 0},
      {"true", false, 0},
      {"null", false, 0},
      {"[1]", false, 0},
      {"", false, 0},
      {"x", false, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mm_scan s = scan_of(cases[i].text, strlen(cases[i].text));
    mm_err err = {0};
    uint64_t v = 12345;
    bool ok = mm_scan_u64(&s, &v, &err);
    if (ok != cases[i].ok) fail_msg("%s", cases[i].text);
    if (ok) {
      assert_true(v == cases[i].value);
    } else {
      assert_string_equal(err.code, "E_NUMBER");
      assert_non_null(strstr(err.text, "plain non-negative integer"));
      assert_true(v == 12345);
    }
    release(&s);
  }
}

TEST(test_unescape) {
  static const struct {
    sample in, out;
    bool escaped;
  } cases[] = {
      {S("\"plain é\""), S("plain é"), false},
      {S("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\""), S("\"\\/\b\f\n\r\t"), true},
      {S("\"\\u0041\\u00e9\\u20AC\""), S("Aé€"), true},
      {S("\"x\\ud83d\\ude00y\""), S("x😀y"), true},
      {S("\"\\udbff\\udfff\\uffff\""), S("\xf4\x8f\xbf\xbf\xef\xbf\xbf"), true},
      {S("\"\\u007f\\u0080\\u07ff\\u0800\""), S("\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80"), true},
      {S("\"\\ud800\\udc00\\ue000\\ud7ff\""), S("\xf0\x90\x80\x80\xee\x80\x80\xed\x9f\xbf"), true},
      {S("\"a\\u0000b\""), S("a\0b"), true},
      {S("\"\""), S(""), false},
  };
  mm_arena a = {0};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mm_scan s = scan_of(cases[i].in.text, cases[i].in.n);
    mm_err err = {0};
    mm_scan_str str;
    size_t n = 99;
    assert_true(mm_scan_string(&s, &str, &err));
    assert_int_equal(str.escaped, cases[i].escaped);
    assert_int_equal(str.n, cases[i].in.n - 2);
    char *out = mm_scan_unescape(&a, str, &n, &err);
    assert_int_equal(n, cases[i].out.n);
    assert_memory_equal(out, cases[i].out.text, n + 1); /* the terminator too */
    release(&s);
  }
  mm_arena_close(&a);
}

/* The calls as a reader makes them: an object of arrays. */
TEST(test_members) {
  static const char text[] = " { \"first\" : [ 3 , 14 ] , \"second\":[], \"third\":[159] } ";
  mm_scan s = scan_of(text, sizeof text - 1);
  mm_err err = {0};
  char log[128] = "";
  bool more, more_numbers;
  assert_true(mm_scan_open(&s, '{', &err));
  for (bool first = true;; first = false) {
    assert_true(mm_scan_more(&s, '}', first, &more, &err));
    if (!more) break;
    mm_scan_str key;
    assert_true(mm_scan_key(&s, &key, &err));
    snprintf(log + strlen(log), sizeof log - strlen(log), "%.*s:", (int)key.n, key.p);
    assert_int_equal(mm_scan_peek(&s), '[');
    assert_true(mm_scan_open(&s, '[', &err));
    assert_int_equal(s.depth, 2);
    for (bool first_number = true;; first_number = false) {
      uint64_t v;
      assert_true(mm_scan_more(&s, ']', first_number, &more_numbers, &err));
      if (!more_numbers) break;
      assert_true(mm_scan_u64(&s, &v, &err));
      snprintf(log + strlen(log), sizeof log - strlen(log), "%d ", (int)v);
    }
  }
  assert_true(mm_scan_end(&s, &err));
  assert_string_equal(log, "first:3 14 second:third:159 ");
  assert_int_equal(s.depth, 0);
  assert_int_equal(mm_scan_peek(&s), 0);
  release(&s);
}

TEST(test_messages) {
  static const struct {
    sample in;
    const char *text;
  } cases[] = {
      {S("{\"a\" 1}"), "E_JSON: t.json: tensor \"w\": offset 1005: found \"1\", expected a colon after the key"},
      {S("[1 2]"), "E_JSON: t.json: tensor \"w\": offset 1003: found \"2\", expected a comma or \"]\""},
      {S("{\"a\":1"), "E_JSON: t.json: tensor \"w\": offset 1006: found the end, expected a comma or \"}\""},
      {S("[\"a\x01\"]"), "E_JSON: t.json: tensor \"w\": offset 1003: found \"\\x01\\x22\", expected no raw control character in a string"},
      {S("[\"a\xff\"]"), "E_JSON: t.json: tensor \"w\": offset 1003: found \"\\xff\\x22\", expected valid UTF-8"},
      {S("[\"\\q\"]"),
       "E_JSON: t.json: tensor \"w\": offset 1002: found \"\\x5cq\\x22\", expected an escape of JSON (surrogates in pairs)"},
      {S("[NaN]"), "E_JSON: t.json: tensor \"w\": offset 1001: found \"NaN\", expected a value"},
      {S("[1]\0"), "E_JSON: t.json: tensor \"w\": offset 1003: found \"\\x00\", expected nothing but white space after the value"},
      {S("\"abc"), "E_JSON: t.json: tensor \"w\": offset 1004: found the end, expected the closing quote of a string"},
      {S("{1:2}"), "E_JSON: t.json: tensor \"w\": offset 1001: found \"1\", expected a key in quotes"},
      {S("[1.x]"), "E_JSON: t.json: tensor \"w\": offset 1003: found \"x\", expected a digit of a number"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mm_scan s = scan_of(cases[i].in.text, cases[i].in.n);
    s.tensor = "w";
    s.status = MM_INTEGRITY;
    mm_err err = {0};
    assert_false(mm_scan_skip(&s, &err) && mm_scan_end(&s, &err));
    assert_int_equal(err.status, MM_INTEGRITY);
    assert_string_equal(err.text, cases[i].text);
    release(&s);
  }
  mm_scan s = scan_of("7", 1);
  mm_err err = {0};
  assert_false(mm_scan_open(&s, '{', &err));
  assert_string_equal(err.text, "E_JSON: t.json: offset 1000: found \"7\", expected an object");
  release(&s);
}

/* The longest piece shown is bounded, whatever its bytes. */
TEST(test_found) {
  char text[300], out[MM_SCAN_FOUND];
  memset(text, 1, sizeof text);
  mm_scan s = scan_of(text, sizeof text);
  assert_ptr_equal(mm_scan_found(&s, out), out);
  assert_int_equal(strlen(out), 24 * 4 + 2);
  s.pos = s.len - 1;
  assert_string_equal(mm_scan_found(&s, out), "\"\\x01\"");
  s.pos = s.len;
  assert_string_equal(mm_scan_found(&s, out), "the end");
  release(&s);
}

int main(void) { return run_unit_tests(NULL, NULL); }
