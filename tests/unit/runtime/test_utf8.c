/* UTF-8 in pieces: every cut of well-formed text, and the examples of the Unicode Standard for ill-formed text. */
#include <stdio.h>
#include <string.h>

#include "runtime/text/utf8.h"
#include "tests/unit/unit.h"

#define FFFD "\xEF\xBF\xBD"

/* U+0000 … U+10FFFF without surrogates, by the bit layout of the encoding. */
static unsigned put_code(uint32_t c, char *out) {
  unsigned n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  for (unsigned i = n; i-- > 0; c >>= 6) out[i] = (char)(i > 0 ? 0x80 | (c & 0x3F) : n == 1 ? c : (0xF00u >> n & 0xFF) | c);
  return n;
}

TEST(test_every_code_point) {
  for (uint32_t c = 0; c < 0x110000; c++) {
    char s[4], out[16];
    unsigned n = put_code(c, s), len;
    if (c >= 0xD800 && c < 0xE000) {
      assert_int_equal(mm_utf8_scan(s, n, &len), MM_UTF8_BAD);
      continue;
    }
    assert_int_equal(mm_utf8_scan(s, n, &len), MM_UTF8_WHOLE);
    assert_int_equal(len, n);
    mm_utf8_stream stream = {.count = 0};
    for (unsigned i = 0; i + 1 < n; i++) {
      assert_int_equal(mm_utf8_scan(s, i + 1, &len), MM_UTF8_CUT);
      assert_int_equal(mm_utf8_push(&stream, s + i, 1, out), 0);
    }
    assert_int_equal(mm_utf8_push(&stream, s + n - 1, 1, out), n);
    assert_memory_equal(out, s, n);
  }
}

/* Pushes text in two pieces, cut everywhere, and flushes. */
static void check(const char *text, size_t n, const char *want) {
  for (size_t cut = 0; cut <= n; cut++) {
    char out[256];
    mm_utf8_stream s = {.count = 0};
    size_t len = cut ? mm_utf8_push(&s, text, cut, out) : 0;
    if (n > cut) len += mm_utf8_push(&s, text + cut, n - cut, out + len);
    len += mm_utf8_push(&s, "", 0, out + len);
    assert_string_equal(out, want);
    assert_int_equal(len, strlen(want));
    assert_int_equal(mm_utf8_push(&s, "", 0, out), 0);
    assert_string_equal(out, "");
  }
}

TEST(test_ill_formed) {
#define CHECK(text, want) check(text, sizeof(text) - 1, want)
  CHECK("", "");
  CHECK("plain", "plain");
  CHECK("\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80", "\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80");
  /* Unicode 15, tables 3-8 to 3-11 */
  CHECK("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A");
  CHECK("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A");
  CHECK("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B");
  CHECK("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", FFFD FFFD FFFD FFFD "A");
  CHECK("a\xe4\xb8", "a" FFFD);
  CHECK("\xf0\x9f\x98", FFFD);
  CHECK("\xff", FFFD);
}

int main(void) { return run_unit_tests(NULL, NULL); }
