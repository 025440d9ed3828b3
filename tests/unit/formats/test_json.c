/* JSON: what is refused and where, exact numbers, required fields, building. */
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/json.h"
#include "tests/unit/unit.h"

static mm_json *parse(const char *text, mm_err *err) {
  *err = (mm_err){0};
  return mm_json_parse(text, strlen(text), "config.json", err);
}

static void refuses_text(const char *text, size_t n, mm_status status, const char *code, const char *what) {
  mm_err err = {0};
  assert_null(mm_json_parse(text, n, "config.json", &err));
  assert_int_equal(err.status, status);
  assert_string_equal(err.code, code);
  assert_non_null(strstr(err.text, "config.json: offset "));
  if (!strstr(err.text, what)) fail_msg("\"%s\" does not say \"%s\"", err.text, what);
}

TEST(test_refused) {
#define REFUSES(text, code, what) refuses_text(text, sizeof(text) - 1, MM_BAD_INPUT, code, what)
  REFUSES("{\"a\": 1\0}", "E_JSON", "offset 7: found \"\\x00\", expected a comma");
  REFUSES("{\"a\": \"b\0c\"}", "E_JSON", "offset 8: found \"\\x00c\\x22\", expected no raw control character");
  REFUSES("{\"a\": \"b\\\0c\"}", "E_JSON", "offset 8: found \"\\x5c\\x00c\\x22\", expected an escape");
  REFUSES("{\"a\": 1}\0", "E_JSON", "offset 8: found \"\\x00\", expected nothing but white space");
  REFUSES("", "E_JSON", "offset 0: found the end, expected an object");
  REFUSES("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "E_JSON",
          "found a Git LFS pointer, the text is not here: run `git lfs pull`; expected an object");
  REFUSES("[version https://git-lfs.github.com/spec/v1\n]", "E_JSON", "offset 1: found \"version\"");
  REFUSES("7", "E_JSON", "offset 0: found \"7\", expected an object");
  REFUSES("{\"a\": 1, \"b\": 2, \"a\": 3}", "E_JSON", "offset 17: found key \"a\" twice");
  REFUSES("[1, {\"a\": 1, \"\\u0061\": 3}]", "E_JSON", "offset 13: found key \"a\" twice");
  REFUSES("{\"a\\u0000\": 1}", "E_JSON", "offset 1: found a key with a NUL character");
  REFUSES("{\"a\": 1} x", "E_JSON", "offset 9: found \"x\", expected nothing but white space");
  REFUSES("{\"a\": 1,}", "E_JSON", "offset 8: found \"}\", expected a key");
  REFUSES("{\"a\": NaN}", "E_JSON", "offset 6: found \"NaN\", expected a value");
  REFUSES("{\"a\": \"\xc0\x80\"}", "E_JSON", "offset 7: found \"\\xc0\\x80\\x22\", expected valid UTF-8");
  REFUSES("{\"a\": \"\\ud800\"}", "E_JSON", "offset 7: found \"\\x5cud800\\x22\", expected an escape");
  REFUSES("\xef\xbb\xbf{}", "E_JSON", "offset 0: found \"\\xef");
  REFUSES("{\"a\": 9223372036854775808}", "E_NUMBER", "offset 6: found \"9223372036854775808\", expected an integer of 64 bits");
  REFUSES("{\"a\": -9223372036854775809}", "E_NUMBER", "offset 6: found \"-9223372036854775809\", expected an integer");
  REFUSES("{\"a\": 1e999}", "E_NUMBER", "offset 6: found \"1e999\", expected a number of double precision");
  REFUSES("{\"a\": 012345678901234567890}", "E_JSON", "offset 7: found \"12345678901234567890\", expected a comma");
}

/* Control bytes of the text never reach the message raw. */
TEST(test_message_is_escaped) {
  mm_err err;
  assert_null(parse("{\"a\": \x1b[31m}", &err));
  assert_non_null(strstr(err.text, "\\x1b"));
  assert_null(strchr(err.text, 0x1b));
}

TEST(test_depth) {
  char text[256];
  for (int depth = 31; depth <= 33; depth++) {
    memset(text, '[', (size_t)depth);
    memset(text + depth, ']', (size_t)depth);
    mm_err err = {0};
    mm_json *j = mm_json_parse(text, 2 * (size_t)depth, "deep.json", &err);
    assert_int_equal(j != NULL, depth <= 32);
    if (!j) assert_non_null(strstr(err.text, "offset 32: found \"["));
    mm_json_free(j);
  }
}

#define TIMES8(x)  x x x x x x x x
#define TIMES40(x) TIMES8(x) TIMES8(x) TIMES8(x) TIMES8(x) TIMES8(x)

/* Brackets inside strings do not count, closed ones do not add up, and no string hides its end. */
TEST(test_depth_and_strings) {
  static const char *const shallow[] = {"[\"" TIMES40("[") "\"]", "[\"\\\"" TIMES40("{") "\"]", "[\"\\\\\\\"" TIMES40("[") "\"]",
                                        "[" TIMES40("{},") "1]", "[" TIMES40("[],") "1]"};
  for (size_t i = 0; i < sizeof shallow / sizeof *shallow; i++) {
    mm_err err;
    mm_json *j = parse(shallow[i], &err);
    if (!j) fail_msg("%s: %s", shallow[i], err.text);
    mm_json_free(j);
  }
  REFUSES("[\"\\\\\", " TIMES40("[") TIMES40("]") "]", "E_JSON", "expected at most 32 levels of nesting");
  REFUSES("[\"}\", 1, " TIMES40("[1, \"]]]]\", ") "2" TIMES40("]") "]", "E_JSON", "expected at most 32 levels of nesting");
  REFUSES("[\"}\", 1, " TIMES40("{\"}}\": ") "2" TIMES40("}") "]", "E_JSON", "expected at most 32 levels of nesting");
  REFUSES("][", "E_JSON", "offset 0: found \"][\", expected an object");
  /* A backslash as the last byte of memory. */
  char *last = malloc(3);
  memcpy(last, "[\"\\", 3);
  refuses_text(last, 3, MM_BAD_INPUT, "E_JSON", "offset 2: found \"\\x5c\", expected an escape");
  free(last);
}

TEST(test_value_count) {
  size_t most = (size_t)4 << 20;
  char *text = malloc(2 * most + 8);
  assert_non_null(text);
  for (size_t extra = 0; extra <= 1; extra++) {
    size_t n = 0;
    text[n++] = '[';
    for (size_t i = 0; i < most - 1 + extra; i++) {
      text[n++] = '0';
      text[n++] = ',';
    }
    text[n++] = '0';
    text[n++] = ']';
    mm_err err = {0};
    mm_json *j = extra ? NULL : mm_json_parse(text, n, "config.json", &err);
    if (extra)
      refuses_text(text, n, MM_LIMIT, "E_LIMIT", "more than 4194304 values");
    else
      assert_int_equal(mm_json_size(j), most);
    mm_json_free(j);
  }
  free(text);
}

TEST(test_values) {
  mm_err err;
  mm_json *j = parse(
      "{\"i\": 9007199254740993, \"m\": -9223372036854775808, \"r\": 3.5565588200778455, \"t\": true, \"f\": false, "
      "\"z\": null, \"s\": \"a\\u0000b\", \"l\": [1, 2.5, \"x\"], \"o\": {\"k\": {}}}",
      &err);
  assert_non_null(j);
  assert_true(mm_json_int(mm_json_get(j, "i")) == INT64_C(9007199254740993));
  assert_true(mm_json_int(mm_json_get(j, "m")) == INT64_MIN);
  assert_true(mm_json_number(mm_json_get(j, "r")) == 3.5565588200778455);
  assert_true(mm_json_bool(mm_json_get(j, "t")));
  assert_false(mm_json_bool(mm_json_get(j, "f")));
  assert_null(mm_json_get(j, "absent"));
  assert_int_equal(mm_json_str_len(mm_json_get(j, "s")), 3);
  assert_memory_equal(mm_json_str(mm_json_get(j, "s")), "a\0b", 4);
  static const struct {
    const char *key;
    mm_json_type type;
  } want[] = {{"i", MM_JSON_INT},  {"m", MM_JSON_INT}, {"r", MM_JSON_REAL}, {"t", MM_JSON_BOOL}, {"f", MM_JSON_BOOL},
              {"z", MM_JSON_NULL}, {"s", MM_JSON_STR}, {"l", MM_JSON_ARR},  {"o", MM_JSON_OBJ}};
  void *iter = NULL;
  const char *key;
  const mm_json *value;
  size_t n = 0;
  for (; mm_json_next(j, &iter, &key, &value); n++) {
    assert_string_equal(key, want[n].key);
    assert_int_equal(mm_json_type_of(value), want[n].type);
  }
  assert_int_equal(n, sizeof want / sizeof *want);
  assert_int_equal(mm_json_type_of(NULL), MM_JSON_NULL);
  const mm_json *other = mm_json_get(j, "s"); /* not what it is asked for */
  assert_true(mm_json_int(other) == 0 && mm_json_number(other) == 0 && !mm_json_bool(other) && mm_json_size(other) == 0);
  assert_true(!mm_json_str(mm_json_get(j, "i")) && mm_json_str_len(mm_json_get(j, "l")) == 0 && !mm_json_get(other, "k"));
  assert_true(!mm_json_at(mm_json_get(j, "l"), 3) && !mm_json_at(mm_json_get(j, "o"), 0) && mm_json_number(mm_json_get(j, "m")) == -0x1p63);
  assert_int_equal(mm_json_size(mm_json_get(j, "l")), 3);
  assert_int_equal(mm_json_size(mm_json_get(j, "o")), 1);
  assert_string_equal(mm_json_str(mm_json_at(mm_json_get(j, "l"), 2)), "x");
  mm_json_free(j);
}

TEST(test_need) {
  const mm_json_ctx c = {"config.json", MM_BAD_INPUT, "E_CFG_TYPE"};
  mm_err err;
  int64_t i;
  double d;
  bool b;
  const char *s;
  mm_json *j = parse("{\"i\": 7, \"r\": 1.5, \"b\": true, \"s\": \"word\", \"n\": \"a\\u0000b\", \"q\": \"7\", \"l\": []}", &err);
  assert_true(mm_json_need_int(j, "i", 7, 7, &i, &c, &err) && i == 7);
  assert_true(mm_json_need_number(j, "r", &d, &c, &err) && d == 1.5);
  assert_true(mm_json_need_number(j, "i", &d, &c, &err) && d == 7);
  assert_true(mm_json_need_bool(j, "b", &b, &c, &err) && b);
  assert_true(mm_json_need_str(j, "s", &s, &c, &err) && strcmp(s, "word") == 0);
  assert_non_null(mm_json_need(j, "l", MM_JSON_ARR, &c, &err));
  assert_int_equal(err.status, MM_OK);
#define FAILS(call, line)                   \
  do {                                      \
    err = (mm_err){0};                      \
    assert_false(call);                     \
    assert_string_equal(err.text, line);    \
    assert_int_equal(err.status, c.status); \
  } while (0)
  FAILS(mm_json_need_int(j, "i", 8, 9, &i, &c, &err), "E_CFG_TYPE: config.json: key \"i\": found 7, expected 8 to 9");
  FAILS(mm_json_need_int(j, "i", 5, 6, &i, &c, &err), "E_CFG_TYPE: config.json: key \"i\": found 7, expected 5 to 6");
  FAILS(mm_json_need_int(j, "r", 0, 9, &i, &c, &err), "E_CFG_TYPE: config.json: key \"r\": found a real number, expected an integer");
  FAILS(mm_json_need_int(j, "q", 0, 9, &i, &c, &err), "E_CFG_TYPE: config.json: key \"q\": found a string, expected an integer");
  FAILS(mm_json_need_int(j, "b", 0, 9, &i, &c, &err), "E_CFG_TYPE: config.json: key \"b\": found a boolean, expected an integer");
  FAILS(mm_json_need_int(j, "x", 0, 9, &i, &c, &err), "E_CFG_TYPE: config.json: key \"x\": found nothing, expected an integer");
  FAILS(mm_json_need_number(j, "q", &d, &c, &err), "E_CFG_TYPE: config.json: key \"q\": found a string, expected a number");
  FAILS(mm_json_need_bool(j, "i", &b, &c, &err), "E_CFG_TYPE: config.json: key \"i\": found an integer, expected a boolean");
  FAILS(mm_json_need_str(j, "l", &s, &c, &err), "E_CFG_TYPE: config.json: key \"l\": found an array, expected a string");
  FAILS(mm_json_need_str(j, "n", &s, &c, &err), "E_CFG_TYPE: config.json: key \"n\": found a string with a NUL character, expected text");
  FAILS(mm_json_need(j, "s", MM_JSON_OBJ, &c, &err), "E_CFG_TYPE: config.json: key \"s\": found a string, expected an object");
  static const char *const all[] = {"i", "r", "b", "s", "n", "q", "l", NULL}, *const most[] = {"i", "r", "b", "s", "n", "q", NULL};
  assert_true(mm_json_only_keys(j, all, &c, &err));
  FAILS(mm_json_only_keys(j, most, &c, &err), "E_CFG_TYPE: config.json: found unknown key \"l\", expected none but i, r, b, s, n, q");
  mm_json_free(j);
}

static mm_json *sample(void) {
  mm_json *o = mm_json_new_obj(), *a = mm_json_new_arr();
  assert_true(mm_json_append(a, mm_json_new_bool(true)) && mm_json_append(a, mm_json_new_real(0.1)));
  assert_true(mm_json_append(a, mm_json_new_real(1e-5)) && mm_json_append(a, mm_json_new_real(2)));
  assert_true(mm_json_set(o, "z", mm_json_new_int(INT64_C(9007199254740993))) && mm_json_set(o, "a", a));
  assert_true(mm_json_set(o, "s", mm_json_new_str("q\"\n…")));
  return o;
}

/* Control characters are escaped in text for people; JSON's own escapes are in both. */
TEST(test_writing) {
  static const char text[] =
      "{\"\\u00e9\\n\":[[],{},-7,1e300,-1.5e-300,100000000000000000000.0,0.0,null,false,\"a\\u0000\\u001f\\/"
      "\\u007f~\\ud83d\\ude00\\uffff\\\\\"]}";
  mm_err err;
  mm_json *j = parse(text, &err);
  char *dump = mm_json_dump(j, false);
  assert_string_equal(dump,
                      "{\"\xc3\xa9\\n\":[[],{},-7,1.0000000000000001e300,-1.5000000000000001e-300,1e20,0.0,null,false,\"a\\u0000\\u001F/"
                      "\x7f~\xf0\x9f\x98\x80\xef\xbf\xbf\\\\\"]}");
  free(dump);
  dump = mm_json_dump(j, true);
  assert_string_equal(dump,
                      "{\n \"\\u00E9\\n\": [\n  [],\n  {},\n  -7,\n  1.0000000000000001e300,\n  -1.5000000000000001e-300,\n  1e20,\n  "
                      "0.0,\n  null,\n  false,\n"
                      "  \"a\\u0000\\u001F/\\u007F~\\uD83D\\uDE00\\uFFFF\\\\\"\n ]\n}");
  free(dump);
  mm_json_free(j);
}

/* Members keep their order while others come, go and change. */
TEST(test_members) {
  mm_json *o = mm_json_new_obj();
  char key[16], text[16 * 40] = "{", *dump;
  for (int i = 0; i < 40; i++) {
    snprintf(key, sizeof key, "k%d", i);
    assert_true(mm_json_set(o, key, mm_json_new_int(i)));
    if (i % 3 == 2) mm_json_remove(o, key);
  }
  assert_true(mm_json_set(o, "k4", mm_json_new_str("new")));
  for (int i = 0; i < 40; i++)
    if (i % 3 != 2) snprintf(text + strlen(text), sizeof text - strlen(text), i == 4 ? "\"k4\":\"new\"," : "\"k%d\":%d,", i, i);
  text[strlen(text) - 1] = '}';
  dump = mm_json_dump(o, false);
  assert_string_equal(dump, text);
  free(dump);
  assert_false(mm_json_set(o, "k5", mm_json_new_str("\xff")));
  assert_false(mm_json_set(o, "\xff", mm_json_new_int(5)));
  assert_null(mm_json_new_real(1 / 0.0));
  assert_null(mm_json_new_str(NULL));
  assert_int_equal(mm_json_size(o), 27);
  mm_json_free(o);
  o = mm_json_new_obj();
  void *iter = NULL;
  const char *of;
  const mm_json *value;
  assert_false(mm_json_next(o, &iter, &of, &value));
  assert_false(mm_json_next(NULL, &iter, &of, &value));
  mm_json_free(o);
}

TEST(test_building) {
  mm_json *o = sample();
  char *text = mm_json_dump(o, false);
  assert_string_equal(text, "{\"z\":9007199254740993,\"a\":[true,0.10000000000000001,1.0000000000000001e-5,2.0],\"s\":\"q\\\"\\n…\"}");
  free(text);
  text = mm_json_dump(mm_json_get(o, "a"), true);
  assert_string_equal(text, "[\n true,\n 0.10000000000000001,\n 1.0000000000000001e-5,\n 2.0\n]");
  free(text);
  assert_false(mm_json_set(o, "n", NULL));
  assert_false(mm_json_set(NULL, "n", mm_json_new_int(1))); /* the leak checker sees whether the value was freed */
  assert_false(mm_json_append(NULL, mm_json_new_int(1)));
  mm_json_remove(o, "a");
  mm_json_remove(o, "absent");
  assert_true(mm_json_size(o) == 2 && mm_json_get(o, "z") && !mm_json_get(o, "a"));
  assert_null(mm_json_get(o, "n"));
  mm_json_free(o);
  mm_json_free(NULL);
}

/* A failure anywhere below a tree, and only such a one, leaves it without a text. */
TEST(test_failures_stay) {
  mm_err err = {0};
  for (int which = 0; which < 6; which++) {
    mm_json *o = MM_JSON_NEW({"a", mm_json_new_int(1)}), *list = mm_json_set(o, "list", mm_json_new_arr());
    mm_json *x = mm_json_append(list, MM_JSON_NEW({"b", mm_json_new_bool(true)}, {"c", which == 0 ? NULL : mm_json_new_str("c")}));
    if (which == 1) mm_json_put_text(x, "d", "\xff");
    if (which == 2) mm_json_append(list, mm_json_new_real(1 / 0.0));
    if (which == 3) assert_null(mm_json_put_int(mm_json_set(x, "\xff", mm_json_new_obj()), "e", 1));
    if (which == 4) mm_json_append(list, MM_JSON_PUT(NULL, {"f", mm_json_new_int(2)}));
    assert_int_equal(mm_json_failed(o), which < 5);
    char *text = mm_json_text(o, false, &err);
    if (which < 5) assert_null(text);
    if (which < 5) assert_string_equal(err.text, "E_MEMORY: cannot allocate 0 bytes");
    if (which == 5) assert_string_equal(text, "{\"a\":1,\"list\":[{\"b\":true,\"c\":\"c\"}]}");
    free(text);
  }
  assert_null(mm_json_dump(NULL, false));
}

static void dumps(const mm_json *j, const char *want) {
  char *text = mm_json_dump(j, false);
  assert_string_equal(text, want);
  free(text);
}

/* A root that was read takes what is built, and goes into what is built; the leak checker sees who frees what. */
TEST(test_changing_what_was_read) {
  mm_err err;
  mm_json *j = parse("{\"a\":{\"x\":[1,\"y\"]},\"b\":\"text\",\"c\":3}", &err), *o = mm_json_new_obj();
  const mm_json *a = mm_json_get(j, "a"), *c = mm_json_get(j, "c");
  mm_json_remove(j, "b");
  mm_json_remove(j, "absent");
  dumps(j, "{\"a\":{\"x\":[1,\"y\"]},\"c\":3}");
  assert_true(mm_json_get(j, "a") == a && mm_json_get(j, "c") == c); /* they lie where they lay */
  assert_true(mm_json_put_text(j, "c", "new") && mm_json_put_int(j, "d", 4) && mm_json_put_int(j, "d", 5));
  assert_int_equal(mm_json_int(c), 3);
  for (uint64_t i = 0; i < 9; i++) assert_true(mm_json_put_int(j, (char[]){(char)('p' + i), 0}, i));
  for (uint64_t i = 0; i < 9; i += 2) mm_json_remove(j, (char[]){(char)('p' + i), 0});
  mm_json *l = parse("[1,[2]]", &err);
  assert_true(mm_json_append(l, mm_json_new_int(3)) && mm_json_append(l, mm_json_new_str("s")) && mm_json_append(l, parse("[]", &err)));
  assert_true(mm_json_set(j, "l", l) && mm_json_set(o, "j", j));
  dumps(o, "{\"j\":{\"a\":{\"x\":[1,\"y\"]},\"c\":\"new\",\"d\":5,\"q\":1,\"s\":3,\"u\":5,\"w\":7,\"l\":[1,[2],3,\"s\",[]]}}");
  /* Values below a root are not changed, by whatever cast. */
  assert_false(mm_json_set((mm_json *)(uintptr_t)a, "z", mm_json_new_int(1)));
  assert_false(mm_json_set((mm_json *)(uintptr_t)a, "x", mm_json_new_int(1)));
  assert_false(mm_json_append((mm_json *)(uintptr_t)mm_json_get(a, "x"), mm_json_new_int(1)));
  mm_json_remove((mm_json *)(uintptr_t)a, "x");
  mm_json_free((mm_json *)(uintptr_t)a);
  assert_int_equal(mm_json_size(mm_json_get(a, "x")), 2);
  assert_false(mm_json_set(j, "n", NULL) || mm_json_set(j, "\xff", mm_json_new_int(1)) || mm_json_append(l, NULL));
  assert_int_equal(mm_json_size(j), 8);
  assert_true(mm_json_failed(o));
  assert_true(mm_json_set(o, "j", mm_json_new_arr()));
  dumps(o, "{\"j\":[]}");
  mm_json_free(o);
  j = parse("{}", &err);
  assert_true(mm_json_put_int(j, "k", 1));
  dumps(j, "{\"k\":1}");
  mm_json_free(j);
}

/* Objects of many lengths of keys, most of which were met before: each has its own. */
TEST(test_keys_met_before) {
  mm_err err = {0};
  char text[128], key[32];
  for (unsigned i = 0; i < ROUNDS(20000u); i++) {
    const unsigned n = i % 20;
    for (unsigned k = 0; k < n; k++) key[k] = (char)('a' + (i * 2654435761u >> (k + 5)) % 2);
    key[n] = 0;
    snprintf(text, sizeof text, "[{\"%s\":1,\"%sx\":2},{\"%s\":3,\"\":4}]", key, key, n ? key : "y");
    mm_json *j = mm_json_parse(text, strlen(text), "config.json", &err);
    dumps(j, text);
    mm_json_free(j);
  }
  static const char alike[] = "{\"aaaaaaaaa\":1,\"aaaaaaaaaa\":2,\"aaaaaaaab\":3,\"aaaaaaaa\":4,\"b\":[{},[],{\"aaaaaaaab\":5}]}";
  mm_json *j = parse(alike, &err);
  dumps(j, alike);
  mm_json_free(j);
  /* Where the text ends right behind the key's object. */
  j = parse("{\"a\":1}", &err);
  assert_int_equal(mm_json_int(mm_json_get(j, "a")), 1);
  mm_json_free(j);
  /* Many, the same one beyond its 8th and its 16th byte. */
  char many[4096] = "{";
  for (int i = 0; i < 40; i++) snprintf(many + strlen(many), 64, "\"member number %d\":%d,\"m%d\":0,", i, i, i);
  const size_t open = strlen(many);
  snprintf(many + open, 64, "\"z\":0}");
  j = parse(many, &err);
  assert_int_equal(mm_json_int(mm_json_get(j, "member number 39")), 39);
  mm_json_free(j);
  snprintf(many + open, 64, "\"member number 17\":0}");
  char what[96];
  snprintf(what, sizeof what, "offset %zu: found key \"member number 17\" twice", open);
  refuses_text(many, strlen(many), MM_BAD_INPUT, "E_JSON", what);
}

TEST(test_integers) {
  mm_err err;
  mm_json *j = parse("[-0, 0, 9223372036854775807, -9223372036854775808, -1]", &err);
  dumps(j, "[0,0,9223372036854775807,-9223372036854775808,-1]");
  mm_json_free(j);
  REFUSES("[18446744073709551616]", "E_NUMBER", "offset 1: found \"18446744073709551616\", expected an integer of 64 bits");
  REFUSES("[-18446744073709551617]", "E_NUMBER", "offset 1: found \"-18446744073709551617\"");
  REFUSES("[184467440737095516160]", "E_NUMBER", "offset 1: found \"184467440737095516160\"");
}

#define D1 "\"00112233445566778899aabbccddeeff00112233445566778899aabbccddeef1\""
#define D2 "\"ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221102\""

/* A packed array gives what an ordinary one gives; every other is ordinary, and refused as ever. */
TEST(test_packed) {
  static const struct {
    const char *text;
    bool packed;
  } cases[] = {
      {"[[" D1 "]]", true},
      {"[[" D1 "," D2 "," D1 "]]", true},
      {"{\"k\":[" D1 "," D2 "],\"l\":[1]}", true},
      {"[[" D1 ", " D2 "]]", false},
      {"[[ " D1 "]]", false},
      {"[[" D1 " ]]", false},
      {"[[" D1 ",1]]", false},
      {"[[" D1 ",[" D2 "]]]", false},
      {"[[]]", false},
      {"[[\"0\"]]", false},
      {"[[\"\\u0030112233445566778899aabbccddeeff00112233445566778899aabbccdde\"]]", false},
      {"[[\"0011223344556677889 aabbccddeeff00112233445566778899aabbccddeef1\"]]", false},
      {"[[\"00112233445566778899AABBCCDDEEFF00112233445566778899AABBCCDDEEF1\"]]", false},
      {"[[\"00112233445566778899aabbccddeeff00112233445566778899aabbccddeef12\"]]", false},
      {"[" D1 "]", false}, /* the root is always of nodes */
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mm_err err = {0};
    const size_t n = strlen(cases[i].text);
    mm_json *plain = mm_json_parse(cases[i].text, n, "m.json", &err), *j = mm_json_parse_packed(cases[i].text, n, "m.json", &err);
    if (!plain || !j) fail_msg("%s: %s", cases[i].text, err.text);
    char *want = mm_json_dump(plain, true), *found = mm_json_dump(j, true);
    assert_string_equal(found, want);
    free(want);
    free(found);
    const bool keyed = mm_json_type_of(j) == MM_JSON_OBJ;
    const mm_json *a = keyed ? mm_json_get(j, "k") : mm_json_at(j, 0), *b = keyed ? mm_json_get(plain, "k") : mm_json_at(plain, 0);
    assert_int_equal(mm_json_packed(a), cases[i].packed);
    assert_false(mm_json_packed(b));
    assert_int_equal(mm_json_size(a), mm_json_size(b));
    for (size_t k = 0; k <= mm_json_size(b); k++) {
      mm_digest x = {{0}}, y = {{0}};
      assert_int_equal(mm_json_digest(a, k, &x), mm_json_digest(b, k, &y));
      if (cases[i].packed) assert_memory_equal(&x, &y, sizeof x);
      if (cases[i].packed) assert_null(mm_json_at(a, k));
    }
    mm_json_free(plain);
    mm_json_free(j);
  }
  static const char *const bad[] = {"[[" D1 ",]]",
                                    "[[" D1,
                                    "[[" D1 ",",
                                    "[[" D1 "}",
                                    "[[" D1 D2 "]]",
                                    "[[\"00112233",
                                    "[[" D1 "]]]",
                                    "[[" D1 "," D2 "",
                                    "{\"k\":[" D1 "],\"k\":1}",
                                    "[[",
                                    "[[" D1 ",\"\xff\"]]"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    mm_err plain = {0}, err = {0};
    const size_t n = strlen(bad[i]);
    char *exact = malloc(n); /* ends where its memory ends */
    memcpy(exact, bad[i], n);
    assert_null(mm_json_parse(exact, n, "m.json", &plain));
    assert_null(mm_json_parse_packed(exact, n, "m.json", &err));
    assert_string_equal(err.text, plain.text);
    free(exact);
  }
}

static void packed_limit(const char *text, size_t n, bool fits) {
  mm_err plain = {0}, err = {0};
  mm_json *a = mm_json_parse(text, n, "m.json", &plain), *b = mm_json_parse_packed(text, n, "m.json", &err);
  assert_int_equal(a != NULL, fits);
  assert_int_equal(b != NULL, fits);
  assert_string_equal(err.text, plain.text);
  mm_json_free(a);
  mm_json_free(b);
}

/* Digests of a packed array count as values, and the array as a level. */
TEST(test_packed_limits) {
  char deep[512];
  for (int depth = 30; depth <= 32; depth++) {
    memset(deep, '[', sizeof deep);
    int n = depth + snprintf(deep + depth, sizeof deep - 64, "[%s]", D1);
    memset(deep + n, ']', (size_t)depth);
    packed_limit(deep, (size_t)(n + depth), depth < 32);
  }
  const size_t most = (size_t)4 << 20;
  char *text = malloc(2 * most + 512);
  assert_non_null(text);
  for (size_t zeros = most - 4; zeros <= most - 2; zeros++) {
    text[0] = '[';
    for (size_t i = 0; i < zeros; i++) memcpy(text + 1 + 2 * i, "0,", 2);
    const int end = snprintf(text + 1 + 2 * zeros, 256, "[%s,%s]]", D1, D2);
    packed_limit(text, 1 + 2 * zeros + (size_t)end, zeros <= most - 3);
    const int open = snprintf(text, 256, "[[%s,%s]", D1, D2);
    for (size_t i = 0; i < zeros; i++) memcpy(text + open + 2 * i, ",0", 2);
    text[(size_t)open + 2 * zeros] = ']';
    packed_limit(text, (size_t)open + 2 * zeros + 1, zeros <= most - 3);
  }
  free(text);
}

/* 1,000 doubles of every size, written and read back, equal bit for bit. */
TEST(test_reals_round_trip) {
  uint64_t bits = 1;
  for (int i = 0; i < 1000; i++) {
    bits = bits * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    double v, back;
    uint64_t finite = (bits >> 52 & 0x7ff) == 0x7ff ? bits ^ UINT64_C(1) << 60 : bits;
    memcpy(&v, &finite, sizeof v);
    mm_json *a = mm_json_new_arr();
    assert_true(mm_json_append(a, mm_json_new_real(v)));
    char *text = mm_json_dump(a, false);
    mm_json_free(a);
    mm_err err;
    a = parse(text, &err);
    assert_non_null(a);
    back = mm_json_number(mm_json_at(a, 0));
    assert_memory_equal(&back, &v, sizeof v);
    mm_json_free(a);
    free(text);
  }
}

/* A decimal comma in the locale changes neither reading nor writing. */
TEST(test_locale) {
  if (!setlocale(LC_NUMERIC, "de_DE.UTF-8")) skip();
  mm_err err;
  mm_json *j = parse("[1.5]", &err);
  assert_non_null(j);
  assert_true(mm_json_number(mm_json_at(j, 0)) == 1.5);
  char *text = mm_json_dump(j, false);
  assert_string_equal(text, "[1.5]");
  free(text);
  mm_json_free(j);
  setlocale(LC_NUMERIC, "C");
}

TEST(test_load) {
  char path[] = "/tmp/mm_json_XXXXXX";
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, "{\"a\": 41}", 9), 9);
  close(fd);
  mm_err err = {0};
  mm_json *j = mm_json_load(path, 9, &err);
  assert_int_equal(mm_json_int(mm_json_get(j, "a")), 41);
  mm_json_free(j);
  assert_null(mm_json_load(path, 8, &err));
  assert_string_equal(err.code, "E_LIMIT");
  unlink(path);
  err = (mm_err){0};
  assert_null(mm_json_load(path, 9, &err));
  assert_string_equal(err.code, "E_FS_MISSING");
}

/* A value in an error line: as it is where that is short. */
TEST(test_same) {
  static const struct {
    const char *a, *b;
    bool same;
  } row[] = {
      {"{\"a\":1,\"b\":[1,{\"c\":\"x\"}]}", "{\"b\":[1.0,{\"c\":\"x\",\"d\":null}],\"a\":1}", true},
      {"{\"a\":1}", "{\"a\":1,\"b\":2}", false},
      {"{\"a\":1,\"b\":2}", "{\"a\":1}", false},
      {"{\"a\":1,\"b\":null}", "{\"a\":1,\"c\":2}", false},
      {"[9007199254740993]", "[9007199254740992]", false},
      {"[9007199254740992]", "[9007199254740992.0]", true},
      {"[1,2]", "[1]", false},
      {"[1]", "[1,2]", false},
      {"[\"a\\u0000b\"]", "[\"a\\u0000b\"]", true},
      {"[\"a\\u0000b\"]", "[\"a\\u0000c\"]", false},
      {"[\"1\"]", "[1]", false},
      {"[true]", "[false]", false},
      {"[null]", "[null]", true},
      {"{\"a\":{}}", "{\"a\":[]}", false},
  };
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    mm_err err = {0};
    mm_json *a = mm_json_parse(row[i].a, strlen(row[i].a), "a", &err), *b = mm_json_parse(row[i].b, strlen(row[i].b), "b", &err);
    if (!a || !b || mm_json_same(a, b) != row[i].same || mm_json_same(b, a) != row[i].same) fail_msg("%s and %s", row[i].a, row[i].b);
    mm_json_free(a);
    mm_json_free(b);
  }
}

TEST(test_shown) {
  static const char *const row[][2] = {{"1.5", "1.5"},
                                       {"\"a\\u0001\"", "\"a\\u0001\""},
                                       {"null", "null"},
                                       {"[1,\"x\",{}]", "[1,\"x\",{}]"},
                                       {"[1,2,3,4,5,6,7,8,9]", "a list of 9"}};
  char out[MM_JSON_SHOWN], text[256] = "[\"", *end = text + 2;
  mm_err err;
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    char list[64];
    snprintf(list, sizeof list, "[%s]", row[i][0]);
    mm_json *j = parse(list, &err);
    assert_string_equal(mm_json_shown(mm_json_at(j, 0), out), row[i][1]);
    mm_json_free(j);
  }
  while (end < text + 90) *end++ = 'x';
  strcpy(end, "\"]");
  mm_json *j = parse(text, &err);
  assert_string_equal(mm_json_shown(j, out), "a list of 1");
  assert_string_equal(mm_json_shown(mm_json_at(j, 0), out), "a string");
  assert_string_equal(mm_json_shown(NULL, out), "nothing");
  mm_json_free(j);
}

int main(void) { return run_unit_tests(NULL, NULL); }
