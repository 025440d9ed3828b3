/* Tokenizer: ids against the package tokenizers (tests/data/tokenizer/make.py), identity on any bytes, hostile files, speed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "formats/json.h"
#include "formats/system/file.h"
#include "runtime/text/tokenizer.h"
#include "tests/unit/put_file.h"
#include "tests/unit/unit.h"

static char temp_path[512];

static const char *temp(void) {
  const char *dir = getenv("TMPDIR");
  snprintf(temp_path, sizeof temp_path, "%s/tokenizer-%d.json", dir ? dir : "/tmp", (int)getpid());
  return temp_path;
}

static int remove_temp(void **state) {
  (void)state;
  unlink(temp());
  return 0;
}

static void write_temp(const char *text, size_t n) { put_file(temp(), text, n); }

static mm_tokenizer *open_ok(const char *path, uint32_t vocab) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(path, vocab, &err);
  if (!t) fail_msg("%s", err.text);
  return t;
}

/* The ids, after checking that their bytes are the text again. free() them. */
static int32_t *encode(const mm_tokenizer *t, const char *text, size_t n, bool added, size_t *count) {
  mm_err err = {0};
  int32_t *ids;
  if (!mm_tokenizer_encode(t, text, n, added, &ids, count, &err)) fail_msg("%s", err.text);
  size_t at = 0;
  for (size_t i = 0; i < *count; i++) {
    size_t len;
    const char *bytes = mm_tokenizer_bytes(t, ids[i], &len);
    assert_non_null(bytes);
    assert_true(len > 0 && len <= n - at);
    assert_memory_equal(bytes, text + at, len);
    at += len;
  }
  assert_int_equal(at, n);
  return ids;
}

static uint64_t next_random(void) {
  static uint64_t x = 88172645463325252u;
  x ^= x << 13;
  x ^= x >> 7;
  return x ^= x << 17;
}

/* ---- Files made from merges ---- */

/* The letter of the byte alphabet, as it stands in a JSON string. */
static void put_letter(FILE *f, unsigned byte) {
  unsigned code = 0x100;
  for (unsigned b = 0; b < byte; b++) code += b < 0x21 || (b > 0x7E && b < 0xA1) || b == 0xAD;
  if ((byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD)) code = byte;
  fprintf(f, "\\u%04x", code);
}

/* Text of the byte alphabet with one space that is left out when `joined`. */
static void put_merge(FILE *f, const char *merge, bool joined) {
  for (; *merge; merge++) {
    if (*merge == '"' || *merge == '\\') fputc('\\', f);
    if (*merge != ' ' || !joined) fputc(*merge, f);
  }
}

/* Writes a tokenizer.json with the ids of the bytes in order, then of the merges. */
static void write_tokenizer(char **merge, size_t count) {
  size_t n;
  mm_err err = {0};
  char *pairs = mm_file_slurp("tests/data/tokenizer/pairs.json", 1 << 20, &n, &err);
  assert_non_null(pairs);
  char *split = strstr(pairs, "\"pre_tokenizer\""), *model = strstr(pairs, "\"model\"");
  assert_true(split && model && split < model);
  FILE *f = fopen(temp(), "w");
  assert_non_null(f);
  fprintf(f, "{\"version\": \"1.0\", \"added_tokens\": [], %.*s\"model\": {\"type\": \"BPE\", \"vocab\": {", (int)(model - split), split);
  for (unsigned b = 0; b < 256; b++) {
    fputs(b ? ", \"" : "\"", f);
    put_letter(f, b);
    fprintf(f, "\": %u", b);
  }
  for (size_t i = 0; i < count; i++) {
    fputs(", \"", f);
    put_merge(f, merge[i], true);
    fprintf(f, "\": %zu", 256 + i);
  }
  fputs("}, \"merges\": [", f);
  for (size_t i = 0; i < count; i++) {
    fputs(i ? ", \"" : "\"", f);
    put_merge(f, merge[i], false);
    fputc('"', f);
  }
  fputs("]}}", f);
  assert_int_equal(fclose(f), 0);
  free(pairs);
}

/* The tokenizer of MiniMax-M1, from the released merges: NULL where they are not. */
static mm_tokenizer *open_m1(void) {
  const char *shared = getenv("SHARED"); /* where the released files are */
  const mm_path merges = mm_path_of(shared ? shared : "../shared", "released/minimax-m1/merges.txt");
  if (access(merges.text, R_OK) != 0) return NULL;
  size_t n, count = 0;
  mm_err err = {0};
  char *text = mm_file_slurp(merges.text, 1 << 24, &n, &err), **merge = calloc(n, sizeof *merge), *rest;
  assert_true(text && merge);
  char *line = strtok_r(text, "\n", &rest);
  assert_int_equal(strncmp(line, "#version", 8), 0);
  while ((line = strtok_r(NULL, "\n", &rest))) merge[count++] = line;
  assert_int_equal(count, 199744);
  write_tokenizer(merge, count);
  free(merge);
  free(text);
  return open_ok(temp(), 200064);
}

/* ---- Ids ---- */

static void check_cases(const mm_tokenizer *t, const char *name) {
  mm_err err = {0};
  mm_json *cases = mm_json_load("tests/data/tokenizer/cases.json", 1 << 20, &err);
  assert_non_null(cases);
  assert_true(mm_json_size(cases) > 100);
  for (size_t i = 0; i < mm_json_size(cases); i++) {
    const mm_json *c = mm_json_at(cases, i), *text = mm_json_get(c, "text"), *want = mm_json_get(c, name);
    size_t count;
    int32_t *ids = encode(t, mm_json_str(text), mm_json_str_len(text), mm_json_bool(mm_json_get(c, "added")), &count);
    size_t same = 0;
    while (same < count && same < mm_json_size(want) && ids[same] == mm_json_int(mm_json_at(want, same))) same++;
    if (same != count || same != mm_json_size(want))
      fail_msg("%s, case %zu \"%s\": other ids from the %zuth on", name, i, mm_json_str(text), same);
    free(ids);
  }
  mm_json_free(cases);
}

TEST(test_ids) {
  static const char *const files[][2] = {{"tiny-m1", "tests/data/tiny-m1/tokenizer.json"},
                                         {"tiny-m2", "tests/data/tiny-m2/tokenizer.json"},
                                         {"pairs", "tests/data/tokenizer/pairs.json"}};
  for (size_t i = 0; i < 3; i++) {
    mm_tokenizer *t = open_ok(files[i][1], 2048);
    check_cases(t, files[i][0]);
    mm_tokenizer_close(t);
  }
}

/* 60 chapters, NUL between them; the id of the document separator before each. */
static void check_held_out(const char *model, const char *separator) {
  char path[64];
  mm_err err = {0};
  snprintf(path, sizeof path, "tests/data/%s/tokenizer.json", model);
  mm_tokenizer *t = open_ok(path, 2048);
  snprintf(path, sizeof path, "tests/data/%s/held-out-ids.json", model);
  mm_json *want = mm_json_load(path, 1 << 20, &err);
  size_t n, at = 0, chapters = 0;
  char *text = mm_file_slurp("tests/data/held-out.txt", 1 << 20, &n, &err);
  assert_true(want && text);
  for (char *chapter = text; chapter <= text + n; chapter += strlen(chapter) + 1, chapters++) {
    size_t count;
    int32_t *ids = encode(t, chapter, strlen(chapter), false, &count);
    assert_int_equal(mm_json_int(mm_json_at(want, at++)), mm_tokenizer_find(t, separator));
    for (size_t i = 0; i < count; i++) assert_int_equal(mm_json_int(mm_json_at(want, at++)), ids[i]);
    free(ids);
  }
  assert_int_equal(chapters, 60);
  assert_int_equal(at, mm_json_size(want));
  free(text);
  mm_json_free(want);
  mm_tokenizer_close(t);
}

TEST(test_held_out) {
  check_held_out("tiny-m1", "<begin_of_document>");
  check_held_out("tiny-m2", "]!p~[");
}

/* E11: encode checks the identity. Bytes that are not UTF-8 are their own tokens and end the pieces around them. */
TEST(test_any_bytes) {
  mm_tokenizer *t = open_ok("tests/data/tokenizer/pairs.json", 854);
  static const char *const parts[] = {"a",    "<a>",      "!A",           " ",    "\n",   "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x98\x80",
                                      "\xc3", "\xe4\xb8", "\xf0\x9f\x98", "\x80", "\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                      "t<"};
  char text[256];
  for (int round = 0; round < ROUNDS(20000); round++) {
    size_t n = 0, want = next_random() % 200, count;
    while (n < want) {
      const char *part = parts[next_random() % (sizeof parts / sizeof *parts)];
      n = (size_t)(stpcpy(text + n, part) - text);
      if (next_random() % 8 == 0) text[n++] = (char)next_random();
    }
    free(encode(t, text, n, round % 2, &count));
  }
  static const int32_t want[] = {'a', 0xC3, 'a', 0xFF, 0xFE, 'a', 0xE4, 0xB8};
  size_t count;
  int32_t *ids = encode(t,
                        "a\xc3"
                        "a\xff\xfe"
                        "a\xe4\xb8",
                        8, false, &count);
  assert_int_equal(count, 8);
  assert_memory_equal(ids, want, sizeof want);
  free(ids);
  mm_tokenizer_close(t);
}

TEST(test_lookup) {
  mm_tokenizer *t = open_ok("tests/data/tiny-m2/tokenizer.json", 2050);
  size_t n;
  assert_int_equal(mm_tokenizer_find(t, "[e~["), 2043);
  assert_int_equal(mm_tokenizer_find(t, " prayer"), 2037);
  assert_int_equal(mm_tokenizer_find(t, "\xc4\xa0prayer"), -1); /* the letters of the file are not the text */
  assert_int_equal(mm_tokenizer_find(t, ""), -1);
  assert_memory_equal(mm_tokenizer_bytes(t, 2037, &n), " prayer", 7);
  assert_int_equal(n, 7);
  assert_true(mm_tokenizer_is_special(t, 2043));
  assert_false(mm_tokenizer_is_special(t, 2037));
  /* E12, and the two ids that no token has */
  static const int32_t absent[] = {-1, INT32_MIN, 2048, 2049, 2050, INT32_MAX};
  for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
    assert_null(mm_tokenizer_bytes(t, absent[i], &n));
    assert_false(mm_tokenizer_is_special(t, absent[i]));
  }
  mm_tokenizer_close(t);
}

/* ---- Hostile files ---- */

static void refuses_file(uint32_t vocab, mm_status status, const char *what) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(temp(), vocab, &err);
  if (t) fail_msg("accepted, expected: %s", what);
  if (err.status != status || !strstr(err.text, what)) fail_msg("found status %d, %s; expected %d, %s", err.status, err.text, status, what);
  assert_non_null(strstr(err.text, temp()));
}

/* E02–E06, E08: pairs.json with one thing replaced. */
TEST(test_changed_files) {
#define PATTERN "\"Regex\": \"[^"
  static const struct {
    const char *old, *new;
    mm_status status;
    const char *what;
  } changes[] = {
      {"\"a\": 97,", "\"a\": -1,", MM_BAD_INPUT, "the id of token \"a\" is not an integer below 854"},
      {"\"a\": 97,", "\"a\": 97.0,", MM_BAD_INPUT, "the id of token \"a\" is not an integer"},
      {"\"a\": 97,", "\"a\": \"97\",", MM_BAD_INPUT, "the id of token \"a\" is not an integer"},
      {"\"a\": 97,", "\"a\": 1099511627873,", MM_BAD_INPUT, "the id of token \"a\" is not an integer"},
      {"\"a\": 97,", "\"a\": 854,", MM_BAD_INPUT, "the id of token \"a\" is not an integer below 854"},
      {"\"a\": 97,", "\"a\": 98,", MM_BAD_INPUT, "the id of token \"b\", 98, belongs to another one"},
      {"\"a\": 97,", "\"b\": 97,", MM_BAD_INPUT, "twice"},
      {"\"a\": 97,", "", MM_BAD_INPUT, "the vocabulary has no token for byte 0x61"},
      {"\"a\": 97,", "\"a\": 97, \"\": 1,", MM_BAD_INPUT, "a token is empty"},
      {"\"a\": 97,", "\"a\": 97, \"x y\": 1,", MM_BAD_INPUT, "token \"x y\" is not written in the byte alphabet"},
      {"\"a\": 97,", "\"a\": 97, \"\xc5\x84\": 1,", MM_BAD_INPUT, "is not written in the byte alphabet"},
      {"\"a\": 97,", "\"a\": 97, \"\xe4\xb8\xad\": 1,", MM_BAD_INPUT, "is not written in the byte alphabet"},
      {"\"A A\"", "\"AA\"", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "\"A A A\"", MM_BAD_INPUT, "\"A A\" is not written in the byte alphabet"},
      {"\"A A\"", "\" A\"", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "\"A \"", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "65", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "[\"A\"]", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "[\"A\", \"A\", \"A\"]", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "[\"A\", 65]", MM_BAD_INPUT, "is not a pair of tokens"},
      {"\"A A\"", "\"A a\"", MM_BAD_INPUT, "are of the same pair"},
      {"\"A A\"", "\"xy A\"", MM_BAD_INPUT, "the vocabulary lacks the left part of \"xyA\""},
      {"\"A A\"", "\"A xy\"", MM_BAD_INPUT, "the vocabulary lacks the right part of \"Axy\""},
      {"\"A A\"", "\"A y\"", MM_BAD_INPUT, "the vocabulary lacks the result of \"Ay\""},
      {"\"content\": \"<a>\"", "\"content\": \"\"", MM_BAD_INPUT, "a token is empty"},
      {"\"content\": \"<a>\"", "\"content\": 5", MM_BAD_INPUT, "key \"content\""},
      {"\"content\": \"<a>\"", "\"content\": \"t<a\"", MM_BAD_INPUT, "token \"t<a\" has the ids 848 and 850"},
      {"\"content\": \"<a>\"", "\"content\": \"AA\"", MM_BAD_INPUT, "token \"AA\" has the ids"},
      {"\"id\": 848", "\"id\": 97", MM_BAD_INPUT, "the id of token \"<a>\", 97, belongs to another one"},
      {"\"id\": 848", "\"id\": 849", MM_BAD_INPUT, "the id of token \"<a><t\", 849, belongs to another one"},
      {"\"id\": 848", "\"id\": 854", MM_BAD_INPUT, "the id of token \"<a>\" is not an integer below 854"},
      {"\"id\": 848", "\"id\": null", MM_BAD_INPUT, "the id of token \"<a>\" is not an integer"},
      {"\"added_tokens\": [", "\"added_tokens\": [7, ", MM_BAD_INPUT, "key \"content\""},
      {"\"added_tokens\": [", "\"added_tokens\": [{\"content\": \"x\", \"id\": 1, \"lstrip\": false}, ", MM_BAD_INPUT,
       "key \"single_word\""},
      {"\"added_tokens\": [",
       "\"added_tokens\": [{\"content\": \"x\", \"id\": 1, \"lstrip\": true, \"rstrip\": false, \"single_word\": false, \"normalized\": "
       "false, "
       "\"special\": true}, ",
       MM_UNSUPPORTED, "added token \"x\" has single_word, lstrip or rstrip"},
      {"\"version\": \"1.0\"", "\"version\": \"2.0\"", MM_UNSUPPORTED, "version"},
      {"\"version\": \"1.0\"", "\"version\": \"1.0\", \"chat\": 1", MM_UNSUPPORTED, "unknown key \"chat\""},
      {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", MM_UNSUPPORTED, "normalizer is not null"},
      {"\"truncation\": null", "\"truncation\": {}", MM_UNSUPPORTED, "truncation is not null"},
      {"\"padding\": null", "\"padding\": {}", MM_UNSUPPORTED, "padding is not null"},
      {"\"post_processor\": null", "\"post_processor\": {\"type\": \"TemplateProcessing\"}", MM_UNSUPPORTED,
       "post_processor: found TemplateProcessing, expected ByteLevel"},
      {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", MM_UNSUPPORTED, "model: found Unigram, expected BPE"},
      {"\"type\": \"BPE\"", "\"type\": \"BPE\", \"speed\": 1", MM_UNSUPPORTED, "unknown key \"speed\""},
      {"\"dropout\": null", "\"dropout\": 0.1", MM_UNSUPPORTED, "dropout"},
      {"\"ignore_merges\": false", "\"ignore_merges\": true", MM_UNSUPPORTED, "ignore_merges"},
      {"\"end_of_word_suffix\": null", "\"end_of_word_suffix\": \"</w>\"", MM_UNSUPPORTED, "end_of_word_suffix"},
      {"\"type\": \"Split\"", "\"type\": \"Digits\"", MM_UNSUPPORTED, "pre_tokenizer 1 of 2: found Digits, expected Split"},
      {"\"behavior\": \"Isolated\"", "\"behavior\": \"Removed\"", MM_UNSUPPORTED, "behavior"},
      {"\"invert\": false", "\"invert\": true", MM_UNSUPPORTED, "behavior"},
      {"\"use_regex\": false", "\"use_regex\": true", MM_UNSUPPORTED, "use_regex"},
      {"\"add_prefix_space\": false", "\"add_prefix_space\": true", MM_UNSUPPORTED, "add_prefix_space"},
      {"\"pretokenizers\": [", "\"pretokenizers\": [{\"type\": \"Digits\"},", MM_UNSUPPORTED, "not a list of Split and ByteLevel"},
      {PATTERN, "\"Regex\": \"(a+)+$|[^", MM_UNSUPPORTED, "unknown pattern \"(a+)+$|[^"},
      {PATTERN, "\"Regex\": \" [^", MM_UNSUPPORTED, "unknown pattern \" [^"},
      {"\"Regex\"", "\"String\"", MM_UNSUPPORTED, "pattern is not a Regex"},
      {"\"decoder\"", "\"decoders\"", MM_UNSUPPORTED, "unknown key \"decoders\""},
      {"\"merges\": [", "\"merges\": 7, \"fuse_unk\": [", MM_BAD_INPUT, "twice"},
      {"\"pre_tokenizer\"", "\"model\": 7, \"pre_tokenizer\"", MM_BAD_INPUT, "twice"},
  };
  size_t n;
  mm_err err = {0};
  char *text = mm_file_slurp("tests/data/tokenizer/pairs.json", 1 << 20, &n, &err);
  assert_non_null(text);
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    char *at = strstr(text, changes[i].old);
    if (!at) fail_msg("\"%s\" is not in pairs.json", changes[i].old);
    FILE *f = fopen(temp(), "w");
    assert_non_null(f);
    fprintf(f, "%.*s%s%s", (int)(at - text), text, changes[i].new, at + strlen(changes[i].old));
    assert_int_equal(fclose(f), 0);
    refuses_file(854, changes[i].status, changes[i].what);
  }
  free(text);
}

/* Variations of a file that make no difference. */
TEST(test_equal_files) {
  static const char *const changes[][2] = {
      {"\"post_processor\": null", "\"post_processor\": {\"type\": \"ByteLevel\", \"trim_offsets\": false}"},
      {"\"behavior\": \"Isolated\",\n\"invert\": false", "\"behavior\": \"Removed\", \"invert\": true"},
      {"\"ignore_merges\": false", "\"ignore_merges\": null"},
      {"\"end_of_word_suffix\": null", "\"end_of_word_suffix\": \"\""},
      {"\"a\": 97,", "\"a\": 97, \"<a>\": 848,"}, /* an added token in the vocabulary as well */
      {"\"A A\"", "[\"A\", \"A\"]"},
  };
  size_t n;
  mm_err err = {0};
  char *text = mm_file_slurp("tests/data/tokenizer/pairs.json", 1 << 20, &n, &err);
  assert_non_null(text);
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    char *at = strstr(text, changes[i][0]);
    if (!at) fail_msg("\"%s\" is not in pairs.json", changes[i][0]);
    FILE *f = fopen(temp(), "w");
    assert_non_null(f);
    fprintf(f, "%.*s%s%s", (int)(at - text), text, changes[i][1], at + strlen(changes[i][0]));
    assert_int_equal(fclose(f), 0);
    mm_tokenizer *t = open_ok(temp(), 900);
    check_cases(t, "pairs");
    mm_tokenizer_close(t);
  }
  free(text);
}

/* E01. */
TEST(test_no_file) {
  size_t n;
  mm_err err = {0};
  char *text = mm_file_slurp("tests/data/tokenizer/pairs.json", 1 << 20, &n, &err);
  assert_non_null(text);
  unlink(temp());
  refuses_file(854, MM_BAD_INPUT, "E_FS_MISSING");
  for (size_t cut = 0; cut < n - 2; cut += 97) {
    write_temp(text, cut);
    refuses_file(854, MM_BAD_INPUT, "E_JSON");
  }
  char *quote = strstr(text, "<a>");
  *quote = (char)0xFF;
  write_temp(text, n);
  refuses_file(854, MM_BAD_INPUT, "E_JSON");
  memset(text, '[', 5000);
  write_temp(text, 5000);
  refuses_file(854, MM_BAD_INPUT, "levels");
  write_temp("[]", 2);
  refuses_file(854, MM_BAD_INPUT, "not a JSON object");
  write_temp("{}", 2);
  refuses_file(854, MM_UNSUPPORTED, "version");
  assert_int_equal(truncate(temp(), 1 << 30), 0); /* sparse */
  refuses_file(854, MM_BAD_INPUT, "E_LIMIT");
  free(text);
}

/* ---- Speed ---- */

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* E07: one piece of 1 MB, and texts that make the split backtrack. Quadratic time would take an hour here; the speed of the machine, or of
 * a sanitizer, is not judged. */
static void check_speed(const mm_tokenizer *t) {
  static const char *const units[] = {"a",        "A",    " ", "\n", " \n", "0", "!", "/", "'s", "Aa", "\xe4\xb8\xad",
                                      "\xcc\x81", "\xff", "<", "Aa "};
  const size_t n = 1 << 20;
  char *text = malloc(n + 8);
  double most = 0;
  assert_non_null(text);
  for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
    size_t len = 0, count;
    while (len < n) len = (size_t)(stpcpy(text + len, units[i]) - text);
    double start = seconds();
    free(encode(t, text, len, true, &count));
    double took = seconds() - start;
    most = took > most ? took : most;
    if (took > 60) fail_msg("1 MB of \"%s\" took %.2f s", units[i], took);
  }
  print_message("1 MB in %.2f s at most\n", most);
  free(text);
}

/* 200,000 merges: all pairs of printable ASCII characters, then triples of them. */
TEST(test_speed) {
  enum { COUNT = 200000 };
  char **merge = calloc(COUNT, sizeof *merge), *text = malloc(COUNT * 5u);
  assert_true(merge && text);
  for (unsigned i = 0; i < COUNT; i++) {
    merge[i] = text + 5 * i;
    unsigned triple = i - 94 * 94;
    if (i < 94 * 94) {
      snprintf(merge[i], 5, "%c %c", '!' + i / 94, '!' + i % 94);
    } else {
      /* the first character runs from 'a' down so that "aa a" is among them */
      snprintf(merge[i], 5, "%c%c %c", 'a' - triple / (94 * 94), '!' + triple / 94 % 94, '!' + triple % 94);
    }
  }
  write_tokenizer(merge, COUNT);
  mm_tokenizer *t = open_ok(temp(), COUNT + 256);
  check_speed(t);
  mm_tokenizer_close(t);
  free(text);
  free(merge);
}

TEST(test_released_m1) {
  mm_tokenizer *t = open_m1();
  if (!t) {
    print_message("not run: $SHARED/released/minimax-m1/merges.txt is absent\n");
    skip();
  }
  size_t n;
  for (int32_t id = 0; id < 200064; id++) assert_int_equal(mm_tokenizer_bytes(t, id, &n) != NULL, id < 200000);
  check_cases(t, "minimax-m1");
  check_speed(t);
  mm_tokenizer_close(t);
}

int main(void) { return run_unit_tests(NULL, remove_temp); }
