/* GPUs by name (cards.h): any way of writing a name, sizes, and the code that a card's compute capability allows. */
#include "loader/stream/cards.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "tests/unit/unit.h"

TEST(names_in_any_case_without_what_separates_them) {
  const mm_gpu_card *c;
  for (size_t i = 0; (c = mm_gpu_card_at(i)); i++) {
    char plain[32], spaced[32];
    size_t n = 0, at = 0;
    for (const char *p = c->name; *p; p++) {
      spaced[at++] = *p == '-' ? ' ' : (char)toupper((unsigned char)*p);
      if (*p != '-') plain[n++] = (char)tolower((unsigned char)*p);
    }
    plain[n] = spaced[at] = 0;
    for (const char *const *name = (const char *const[]){c->name, plain, spaced, NULL}; *name; name++) {
      mm_gpu_card got = {0};
      mm_err err = {0};
      assert_true(mm_gpu_card_parse(&got, *name, &err));
      assert_ptr_equal(got.name, c->name);
      assert_int_equal(got.bytes, c->bytes);
    }
    assert_int_equal(c->bytes % 1000000000, 0);
    assert_int_equal(c->runs != NULL, c->sm >= 80);                                /* built.h: code for sm_80 and above */
    if (c->runs) assert_int_equal(strstr(c->runs, "sm_90a") != NULL, c->sm == 90); /* of Hopper alone */
    if (c->runs) assert_int_equal(strstr(c->runs, "PTX") != NULL, c->sm > 90);     /* behind the native code */
    if (c->runs) assert_int_equal(strstr(c->tried, "99 KB") != NULL, c->sm > 80 && c->sm != 90 && c->sm != 100);
  }
  assert_true(mm_gpu_card_at(0) != NULL);
}

TEST(docs_have_every_card) {
  static char text[1 << 16];
  FILE *f = fopen("docs/hardware.md", "r");
  assert_non_null(f);
  text[fread(text, 1, sizeof text - 1, f)] = 0;
  fclose(f);
  const mm_gpu_card *c;
  for (size_t i = 0; (c = mm_gpu_card_at(i)); i++)
    if (!strstr(text, c->name)) fail_msg("%s is not in docs/hardware.md", c->name);
}

TEST(sizes_are_no_cards_and_other_words_are_refused) {
  mm_gpu_card got = {"x", 1, 1, "x", "x"};
  mm_err err = {0};
  assert_true(mm_gpu_card_parse(&got, "80GB", &err));
  assert_null(got.name);
  assert_int_equal(got.bytes, UINT64_C(80000000000));
  assert_true(mm_gpu_card_parse(&got, "3K", &err));
  assert_int_equal(got.bytes, 3072);
  for (const char *const *bad = (const char *const[]){"", "0", "-1G", "H101", "H10", "80XB", "RTX", "18446744073709551616", NULL}; *bad;
       bad++) {
    mm_err no = {0};
    assert_false(mm_gpu_card_parse(&got, *bad, &no));
    assert_int_equal(no.status, MM_USAGE);
    assert_non_null(strstr(no.text, "RTX-4090"));
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
