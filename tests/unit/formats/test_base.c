/* formats/base: the error line, escaping, UTF-8, checked arithmetic, allocation, arenas. */
#include "formats/system/base.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/unit/unit.h"

/* Absurd sizes must reach our own check under the sanitizer too. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

TEST(test_error_line) {
  static const struct {
    mm_where where;
    const char *text;
  } cases[] = {
      {{"a.st", "w", 17}, "E_X: a.st: tensor \"w\": offset 17: found 3, expected 4"},
      {{"a.st", "w", -1}, "E_X: a.st: tensor \"w\": found 3, expected 4"},
      {{"a.st", NULL, 0}, "E_X: a.st: offset 0: found 3, expected 4"},
      {{NULL, "w", -1}, "E_X: tensor \"w\": found 3, expected 4"},
      {{NULL, NULL, -1}, "E_X: found 3, expected 4"},
      {{"a\nb\"c\\\x1b[2J", "\x7f\xc2\x9bπ\xff", 1},
       "E_X: a\\x0ab\\x22c\\x5c\\x1b[2J: tensor \"\\x7f\\xc2\\x9bπ\\xff\": offset 1: found 3, expected 4"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mm_err err = {0};
    assert_false(mm_fail(&err, MM_BAD_INPUT, "E_X", cases[i].where, "found %d, expected %d", 3, 4));
    assert_int_equal(err.status, MM_BAD_INPUT);
    assert_string_equal(err.code, "E_X");
    assert_string_equal(err.text, cases[i].text);
  }
}

TEST(test_first_failure_wins) {
  mm_err err = {0};
  mm_fail(&err, MM_IO, "E_FIRST", mm_at("one", NULL), "1");
  assert_false(mm_fail(&err, MM_BUG, "E_SECOND", mm_at("two", NULL), "2"));
  assert_int_equal(err.status, MM_IO);
  assert_string_equal(err.text, "E_FIRST: one: 1");
}

/* An error that a limit of the process may have caused names it. */
TEST(test_limits) {
  struct rlimit before, few;
  mm_err open = {0}, other = {0}, thread = {0};
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  few = (struct rlimit){77, before.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
  mm_fail_errno(&open, mm_at("f", NULL), "open", EMFILE);
  mm_fail_errno(&other, mm_at("f", NULL), "open", ENOENT);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
  assert_string_equal(open.text, "E_IO: f: open: Too many open files; the limit is 77 descriptors (ulimit -n)");
  assert_string_equal(other.text, "E_IO: f: open: No such file or directory");
  mm_fail_thread(&thread, "start a thread", EAGAIN);
  assert_int_equal(thread.status, MM_LIMIT);
  assert_string_equal(thread.code, "E_THREADS");
  assert_int_equal(getrlimit(RLIMIT_NPROC, &few), 0);
  if (few.rlim_cur != RLIM_INFINITY && getuid() != 0) assert_non_null(strstr(thread.text, " processes and threads (ulimit -u)"));
}

/* Threads that a control group or the kernel refuses: the error names whose limit is reached. Limits that are not are not named, nor for
 * root one that does not hold. */
TEST(test_no_threads) {
  static const struct {
    const char *cgroup, *file[4][2], *expected;
  } rows[] = {
      {"0::/a/b\n",
       {{"a/b/pids.max", "10"}, {"a/b/pids.current", "10"}},
       "; the limit is 10 processes and threads of the control group (pids.max)"},
      {"0::/a/b\n",
       {{"a/pids.max", "7"}, {"a/pids.current", "7"}},
       "; the limit is 7 processes and threads of the control group (pids.max)"},
      {"3:cpu,memory:/x\n2:pids:/a\n",
       {{"pids/a/pids.max", "9"}, {"pids/a/pids.current", "9"}},
       "; the limit is 9 processes and threads of the control group (pids.max)"},
      {"0::/gone\n", {{"pids.max", "5"}, {"pids.current", "6"}}, "; the limit is 5 processes and threads of the control group (pids.max)"},
      {"0::/a\n", {{"a/pids.max", "max"}, {"a/pids.current", "10"}}, ""},
      {"0::/a\n", {{"a/pids.max", "11"}, {"a/pids.current", "10"}}, ""},
      {"0::/a\n",
       {{"sys/kernel/threads-max", "400"}, {"loadavg", "0.1 0.2 0.3 2/400 77"}},
       "; the limit is 400 threads of the system (kernel.threads-max)"},
      {"0::/a\n", {{"sys/kernel/threads-max", "401"}, {"loadavg", "0.1 0.2 0.3 2/400 77"}}, ""},
  };
  char text[MM_LIMITS_TEXT], path[600];
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char root[] = "/tmp/minimax-tasks-XXXXXX";
    assert_non_null(mkdtemp(root));
    snprintf(path, sizeof path, "cd %s && mkdir -p a/b pids/a sys/kernel && printf '%s' > cgroup && printf '%s' > %s && printf '%s' > %s",
             root, rows[i].cgroup, rows[i].file[0][1], rows[i].file[0][0], rows[i].file[1][1], rows[i].file[1][0]);
    assert_int_equal(system(path), 0);
    snprintf(path, sizeof path, "%s/cgroup", root);
    assert_string_equal(mm_tasks_full(text, path, root, root), rows[i].expected);
    snprintf(path, sizeof path, "rm -r %s", root);
    assert_int_equal(system(path), 0);
  }
  mm_err err = {0};
  const struct rlimit few = {1000, 1000};
  struct rlimit before;
  assert_int_equal(getrlimit(RLIMIT_NPROC, &before), 0);
  assert_int_equal(setrlimit(RLIMIT_NPROC, &(struct rlimit){mm_min(few.rlim_cur, before.rlim_max), before.rlim_max}), 0);
  mm_fail_thread(&err, "start a thread", EAGAIN);
  assert_int_equal(setrlimit(RLIMIT_NPROC, &before), 0);
  if (getuid() == 0 && !*mm_tasks_full(text, "/proc/self/cgroup", "/sys/fs/cgroup", "/proc")) assert_null(strstr(err.text, "ulimit -u"));
}

TEST(test_error_helpers) {
  mm_err io = {0}, memory = {0}, wide = {0}, line = {0};
  assert_false(mm_fail_errno(&io, mm_at("f", NULL), "open", 13));
  assert_int_equal(io.status, MM_IO);
  assert_string_equal(io.text, "E_IO: f: open: Permission denied");
  assert_false(mm_fail_memory(&memory, 12345));
  assert_int_equal(memory.status, MM_LIMIT);
  assert_string_equal(memory.text, "E_MEMORY: cannot allocate 12345 bytes");
  mm_fail(&wide, MM_IO, "E_X", mm_at_offset(NULL, NULL, UINT64_MAX), "far");
  assert_string_equal(wide.text, "E_X: offset 9223372036854775807: far");
  mm_fail(&line, MM_IO, "E_X", mm_at(NULL, NULL), "two\nlines\x1b%s", "\t\x7f");
  assert_string_equal(line.text, "E_X: two\\x0alines\\x1b\\x09\\x7f");
  mm_err any = {0}; /* of a file's bytes that a caller forgot to escape */
  mm_fail(&any, MM_IO, "E_X", mm_at(NULL, NULL), "%s",
          "\"a\\b\" \xc2\x9b"
          "2J \xe2\x80\xaegnp.exe \xef\xbb\xbf\xff \xc3\xa9\xe2\x82\xac");
  assert_string_equal(any.text, "E_X: \"a\\b\" \\xc2\\x9b2J \\xe2\\x80\\xaegnp.exe \\xef\\xbb\\xbf\\xff é€");
}

/* The longest parts that apply together still fit, each name cut at 1,000 bytes; a message too long is cut. */
TEST(test_error_bounds) {
  char name[5000], message[5000];
  memset(name, '\n', sizeof name - 1);
  name[sizeof name - 1] = 0;
  memset(message, 'm', sizeof message - 1);
  message[sizeof message - 1] = 0;
  struct mallinfo2 before = mallinfo2();
  mm_err err = {0};
  mm_fail(&err, MM_IO, "E_CODE", mm_at_offset(name, name, 5), "%s", message);
  assert_int_equal(mallinfo2().uordblks, before.uordblks);
  assert_int_equal(strlen(err.text), sizeof err.text - 1);
  const char *tensor = strstr(err.text, ": tensor \"");
  assert_non_null(tensor);
  size_t file_n = (size_t)(tensor - err.text) - strlen("E_CODE: ");
  assert_in_range(file_n, 990, 1000);
  assert_memory_equal(tensor - 3, "…", 3);
  assert_non_null(strstr(tensor, "…\": offset 5: mmm"));
}

TEST(test_escape) {
  static const struct {
    const char *in;
    size_t n, cap;
    const char *out;
  } cases[] = {
      {"plain", 5, 64, "plain"},
      {"a\0b", 3, 64, "a\\x00b"},
      {"é€😀", 9, 64, "é€😀"},
      {"\xc3", 1, 64, "\\xc3"},                          /* cut sequence */
      {"\xe2\x82", 2, 64, "\\xe2\\x82"},                 /* cut sequence */
      {"\xc0\xaf", 2, 64, "\\xc0\\xaf"},                 /* overlong */
      {"\xed\xa0\x80", 3, 64, "\\xed\\xa0\\x80"},        /* surrogate */
      {"\xc2\x80\xc2\xa0", 4, 64, "\\xc2\\x80\xc2\xa0"}, /* C1 control, then no-break space */
      {"\"\\", 2, 64, "\\x22\\x5c"},
      {"\xe2\x80\x8b\xe2\x80\x8c", 6, 64, "\\xe2\\x80\\x8b\\xe2\\x80\\x8c"}, /* zero width */
      {"\xe2\x80\x8a\xe2\x80\x90", 6, 64, "\xe2\x80\x8a\xe2\x80\x90"},       /* hair space, hyphen: the neighbours */
      {"\xe2\x80\xae"
       "a",
       4, 64,
       "\\xe2\\x80\\xae"
       "a"},                                                                 /* right-to-left override */
      {"\xe2\x81\xa6\xe2\x81\xa9", 6, 64, "\\xe2\\x81\\xa6\\xe2\\x81\\xa9"}, /* isolates */
      {"\xe2\x80\xa8\xef\xbb\xbf", 6, 64, "\\xe2\\x80\\xa8\\xef\\xbb\\xbf"}, /* line separator, byte order mark */
      {"\xd8\x9c\xc2\xad", 4, 64, "\\xd8\\x9c\\xc2\\xad"},                   /* Arabic letter mark, soft hyphen */
      {"\xf3\xa0\x81\x81", 4, 64, "\\xf3\\xa0\\x81\\x81"},                   /* a tag */
      {"עִברית漢字", 18, 64, "עִברית漢字"},
      {"", 0, 64, ""},
      {"", 0, 1, ""},
      {"abcdefgh", 8, 9, "abcdefgh"},
      {"abcdefgh", 8, 8, "abcd…"},
      {"abcdefgh", 8, 4, "…"},
      {"abcdefgh", 8, 3, "ab"},
      {"ab\n\n", 4, 10, "ab\\x0a…"},
      {"éééé", 8, 8, "éé…"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char *out = malloc(cases[i].cap); /* exactly: the sanitizer sees one byte too many */
    assert_ptr_equal(mm_escape(out, cases[i].cap, cases[i].in, cases[i].n), out);
    assert_string_equal(out, cases[i].out);
    free(out);
  }
  char untouched = 'x';
  mm_escape(&untouched, 0, "abc", 3);
  char shown[32];
  assert_string_equal(mm_show(shown, sizeof shown, "\"re:.*\\.w2\"\x1b[2J"), "\"re:.*\\.w2\"\\x1b[2J");
  char *all = NULL;
  size_t all_n;
  FILE *f = open_memstream(&all, &all_n);
  mm_show_to(f, "a\\\x07\xc2\x90é\xe2\x80");
  fclose(f);
  assert_string_equal(all, "a\\\\x07\\xc2\\x90é\\xe2\\x80");
  free(all);
  assert_int_equal(untouched, 'x');
}

TEST(test_name_list) {
  mm_name_list l = {0};
  char name[101] = "", want[600] = "";
  for (int i = 0; i < 4; i++) {
    snprintf(name, sizeof name, "%d%099d", i, i);
    mm_name_list_add(&l, name);
    snprintf(want + strlen(want), sizeof want - strlen(want), "%s%s", i ? ", " : "", name);
  }
  assert_string_equal(l.text, want);
  for (int i = 0; i < 12; i++) mm_name_list_add(&l, name);
  snprintf(want + strlen(want), sizeof want - strlen(want), ", and 12 more");
  assert_string_equal(l.text, want);
  mm_name_list_add(&l, "x"); /* would fit, but is not the next */
  assert_true(mm_ends_with(l.text, ", and 13 more"));
  char wide[600];
  memset(wide, 'w', sizeof wide - 1);
  wide[sizeof wide - 1] = 0;
  l = (mm_name_list){0};
  mm_name_list_add(&l, wide);
  assert_string_equal(l.text, "1 more");
}

/* Decodes by arithmetic, then asks whether the code point is allowed and needed that many bytes. */
static size_t utf8_by_arithmetic(const uint8_t *s, size_t n) {
  size_t len = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
  if (len == 0 || len > n) return 0;
  uint32_t code = len == 1 ? s[0] : s[0] & (0x7Fu >> len);
  for (size_t i = 1; i < len; i++) {
    if (s[i] >> 6 != 2) return 0;
    code = code << 6 | (s[i] & 63u);
  }
  size_t needed = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  return needed != len || (code >= 0xD800 && code < 0xE000) || code > 0x10FFFF ? 0 : len;
}

TEST(test_utf8) {
  static const uint8_t edge[] = {0x00, 0x7F, 0x80, 0xA5, 0xBF, 0xC0, 0xFF};
  for (unsigned pair = 0; pair < 65536; pair++) {
    for (size_t c = 0; c < sizeof edge; c++) {
      for (size_t d = 0; d < sizeof edge; d++) {
        uint8_t s[4] = {(uint8_t)(pair >> 8), (uint8_t)pair, edge[c], edge[d]};
        for (size_t n = 1; n <= 4; n++) {
          if (mm_utf8_len((const char *)s, n) != utf8_by_arithmetic(s, n))
            fail_msg("%02x %02x %02x %02x, %zu bytes", s[0], s[1], s[2], s[3], n);
        }
      }
    }
  }
}

TEST(test_code_points) {
  for (uint32_t code = 0; code < 0x110000; code++) {
    char s[5] = {0};
    const char *p = s;
    const size_t n = mm_utf8_put(s, code);
    if (code >= 0xD800 && code < 0xE000) continue;
    if (mm_utf8_next(&p, s + n) != code || p != s + n || utf8_by_arithmetic((const uint8_t *)s, n) != n) fail_msg("U+%04X", code);
  }
  for (int c = 0; c < 256; c++) {
    const char *p = (char[]){(char)c, 'x'};
    if (c >= 0x80) assert_true(mm_utf8_next(&p, p + 2) == (uint32_t)c && *p == 'x');
    char *end, digit[2] = {(char)c, 0};
    const long v = strtol(digit, &end, 16);
    assert_int_equal(mm_hex_digit((char)c), c && !*end ? v : -1);
  }
}

TEST(test_arithmetic) {
  uint64_t v;
  assert_true(mm_add(UINT64_MAX - 1, 1, &v));
  assert_true(v == UINT64_MAX);
  assert_false(mm_add(UINT64_MAX, 1, &v));
  assert_true(mm_mul(UINT64_C(1) << 32, UINT64_C(1) << 31, &v));
  assert_true(v == UINT64_C(1) << 63);
  assert_false(mm_mul(UINT64_C(1) << 32, UINT64_C(1) << 32, &v));
  assert_true(mm_ceil_div(7, 4) == 2 && mm_ceil_div(8, 4) == 2 && mm_ceil_div(0, 4) == 0 &&
              mm_ceil_div(UINT64_MAX, 2) == UINT64_C(1) << 63);
  assert_true(mm_round_up(1, 4096) == 4096 && mm_round_up(4096, 4096) == 4096 && mm_round_up(0, 4096) == 0);
  assert_true(mm_min(3, 5) == 3 && mm_min(5, 3) == 3 && mm_max(3, 5) == 5 && mm_max(5, 3) == 5);
  assert_true(mm_gcd(192, 128) == 64 && mm_gcd(128, 192) == 64 && mm_gcd(0, 9) == 9 && mm_gcd(9, 0) == 9 && mm_gcd(17, 5) == 1);
}

TEST(test_allocation) {
  mm_err err = {0};
  char *zeroed = mm_calloc(1000, 3, &err);
  assert_non_null(zeroed);
  for (size_t i = 0; i < 3000; i++) assert_int_equal(zeroed[i], 0);
  free(zeroed);
  void *none = mm_calloc(0, 8, &err);
  assert_non_null(none);
  free(none);
  assert_null(mm_calloc(SIZE_MAX / 2, 4, &err));
  assert_int_equal(err.status, MM_LIMIT);
  assert_string_equal(err.code, "E_MEMORY");
  mm_err exhausted = {0};
  assert_null(mm_calloc((size_t)1 << 60, 1, &exhausted));
  assert_string_equal(exhausted.text, "E_MEMORY: cannot allocate 1152921504606846976 bytes");
}

TEST(test_grow) {
  mm_err err = {0};
  void *array = NULL;
  size_t cap = 0, moves = 0;
  for (size_t i = 0; i < 100000; i++) {
    size_t before = cap;
    assert_true(mm_grow(&array, &cap, i + 1, sizeof i, &err));
    assert_true(cap > i);
    moves += cap != before;
    ((size_t *)array)[i] = i * 7 + 1;
  }
  assert_in_range(moves, 1, 40); /* geometric: pushes cost O(1) each */
  for (size_t i = 0; i < 100000; i++) assert_true(((size_t *)array)[i] == i * 7 + 1);
  size_t held = cap;
  void *same = array;
  assert_false(mm_grow(&array, &cap, SIZE_MAX / 4, sizeof(size_t), &err));
  assert_string_equal(err.code, "E_MEMORY");
  assert_true(cap == held && array == same);
  free(array);
}

static int by_first_byte(const void *a, const void *b) { return *(const uint8_t *)a - *(const uint8_t *)b; }

/* Elements of two bytes, a value and where it was, in every order of five values: each is still whole, and there once. */
TEST(test_sort) {
  mm_sort(NULL, 0, 2, by_first_byte);
  for (unsigned code = 0; code < 3125; code++) {
    uint8_t v[10], given[5];
    unsigned rest = code, seen = 0;
    for (unsigned i = 0; i < 5; i++, rest /= 5) given[i] = v[2 * i] = (uint8_t)(rest % 5), v[2 * i + 1] = (uint8_t)i;
    mm_sort(v, 5, 2, by_first_byte);
    for (unsigned i = 0; i < 5; i++) {
      assert_true(i == 0 || v[2 * i - 2] <= v[2 * i]);
      assert_int_equal(v[2 * i], given[v[2 * i + 1]]);
      seen |= 1u << v[2 * i + 1];
    }
    assert_int_equal(seen, 31);
  }
}

TEST(test_arena) {
  enum { PIECES = 3000 };
  mm_err err = {0};
  mm_arena a = {0};
  static uint8_t *piece[PIECES];
  static size_t size[PIECES];
  for (size_t i = 0; i < PIECES; i++) { /* sizes 0 … 200 KB, large among small */
    size[i] = i % 97 == 5 ? 200000 + i : (i * i) % 700;
    piece[i] = mm_arena_alloc(&a, size[i], &err);
    assert_non_null(piece[i]);
    assert_int_equal((uintptr_t)piece[i] % 16, 0);
    for (size_t j = 0; j < size[i]; j++) {
      if (piece[i][j] != 0) fail_msg("piece %zu is not zeroed", i);
    }
    memset(piece[i], (int)(i % 251 + 1), size[i]);
  }
  for (size_t i = 0; i < PIECES; i++) { /* no piece reaches into another */
    for (size_t j = 0; j < size[i]; j++) {
      if (piece[i][j] != i % 251 + 1) fail_msg("piece %zu was overwritten", i);
    }
  }
  assert_string_equal(mm_arena_strndup(&a, "abcdef", 3, &err), "abc");
  assert_string_equal(mm_arena_strndup(&a, NULL, 0, &err), "");
  assert_string_equal(mm_arena_printf(&a, &err, "%s-%05d", "rank", 42), "rank-00042");
  char *full = mm_arena_printf(&a, &err, "%016d", 77); /* the terminator needs a byte of its own */
  memset(mm_arena_alloc(&a, 16, &err), 'x', 16);
  assert_string_equal(full, "0000000000000077");
  assert_int_equal(err.status, MM_OK);
  assert_null(mm_arena_alloc(&a, SIZE_MAX - 4, &err));
  assert_string_equal(err.code, "E_MEMORY");
  mm_arena_close(&a);
  assert_null(a.chunk);
  mm_arena_close(&a);
}

int main(void) { return run_unit_tests(NULL, NULL); }
