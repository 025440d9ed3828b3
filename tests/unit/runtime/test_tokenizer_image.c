/* tokenizer.bin: the same ids as from tokenizer.json, the same bytes each time, and any other bytes refused or harmless. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/text/tokenizer.h"
#include "tests/unit/put_file.h"
#include "tests/unit/unit.h"

static const mm_digest source = {{7, 6, 5, 4}};

static const struct {
  const char *path;
  uint32_t vocab;
} files[] = {
    {"tests/data/tiny-m1/tokenizer.json", 2048}, {"tests/data/tiny-m2/tokenizer.json", 2048}, {"tests/data/tokenizer/pairs.json", 854}};

static const char *const texts[] = {"",
                                    "In the beginning God created the heaven and the earth.",
                                    "]~!b[]~b]user\nHi[e~[\n]~b]ai\n<think>\nwhy</think>",
                                    "<begin_of_document><a><a><t<a>!A!A!<a>A!<!",
                                    "a  b   c\xff\xfe \xe4\xb8\xad\xe6\x96\x87 12345 we'LL",
                                    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};

static char temp_path[4096];
static const char *put(const uint8_t *bytes, size_t n) {
  snprintf(temp_path, sizeof temp_path, "%s/image", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
  put_file(temp_path, bytes, n);
  return temp_path;
}

static mm_tokenizer *open_json(size_t i) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(files[i].path, files[i].vocab, &err);
  if (!t) fail_msg("%s", err.text);
  return t;
}

static uint8_t *image_of(const mm_tokenizer *t, size_t *n) {
  mm_err err = {0};
  uint8_t *image;
  assert_true(mm_tokenizer_image(t, &source, &image, n, &err));
  return image;
}

static void check_equal(const mm_tokenizer *a, const mm_tokenizer *b, uint32_t vocab) {
  mm_err err = {0};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    for (int added = 0; added < 2; added++) {
      int32_t *x, *y;
      size_t nx, ny;
      assert_true(mm_tokenizer_encode(a, texts[i], strlen(texts[i]), added, &x, &nx, &err));
      assert_true(mm_tokenizer_encode(b, texts[i], strlen(texts[i]), added, &y, &ny, &err));
      assert_int_equal(nx, ny);
      if (nx) assert_memory_equal(x, y, nx * sizeof *x);
      free(x);
      free(y);
    }
  for (int32_t id = -1; id <= (int32_t)vocab; id++) {
    size_t nx = 0, ny = 0;
    const char *x = mm_tokenizer_bytes(a, id, &nx), *y = mm_tokenizer_bytes(b, id, &ny);
    assert_int_equal(x != NULL, y != NULL);
    assert_int_equal(mm_tokenizer_is_special(a, id), mm_tokenizer_is_special(b, id));
    if (x) assert_true(nx == ny && memcmp(x, y, nx) == 0);
  }
}

TEST(test_same_ids) {
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    mm_err err = {0};
    mm_tokenizer *json = open_json(i);
    size_t n, again_n;
    uint8_t *image = image_of(json, &n);
    mm_tokenizer *map = mm_tokenizer_map(put(image, n), files[i].vocab, &source, &err);
    if (!map) fail_msg("%s", err.text);
    check_equal(json, map, files[i].vocab);
    uint8_t *again = image_of(map, &again_n); /* of a mapped one, too */
    assert_int_equal(again_n, n);
    assert_memory_equal(again, image, n);
    free(again);
    free(image);
    mm_tokenizer_close(map);
    mm_tokenizer_close(json);
  }
}

static void refuses(const uint8_t *image, size_t n, uint32_t vocab, const mm_digest *of, mm_status status, const char *what) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_map(put(image, n), vocab, of, &err);
  if (t || err.status != status || !strstr(err.text, what))
    fail_msg("found %d, \"%s\"; expected %d, %s", err.status, err.text, status, what);
}

TEST(test_refused) {
  mm_tokenizer *json = open_json(2);
  const mm_digest other = {{1}};
  size_t n;
  uint8_t *image = image_of(json, &n);
  refuses(image, n, 855, &source, MM_INTEGRITY, "found a vocabulary of 854, expected 855");
  refuses(image, n, 854, &other, MM_INTEGRITY, "the image of another tokenizer.json");
  refuses(image, n - 8, 854, &source, MM_INTEGRITY, "bytes, expected");
  refuses(image, 10, 854, &source, MM_INTEGRITY, "found 10 bytes");
  image[8]++;
  refuses(image, n, 854, &source, MM_UNSUPPORTED, "version 2");
  image[8]--;
  image[0]++;
  refuses(image, n, 854, &source, MM_INTEGRITY, "no tokenizer image");
  free(image);
  mm_tokenizer_close(json);
}

/* Every byte of the header and every third after it, changed: refused, or a tokenizer whose calls stay inside its tables (the sanitizers
 * look). */
TEST(test_changed_bytes) {
  mm_tokenizer *json = open_json(2);
  size_t n, refused = 0, accepted = 0;
  uint8_t *image = image_of(json, &n);
  uint32_t random = 12345;
  for (size_t at = 0; at < n; at += at < 64 ? 1 : 3) {
    const uint8_t was = image[at];
    random = random * 1664525 + 1013904223;
    image[at] = (uint8_t)(was + 1 + (random >> 24) % 255);
    mm_err err = {0};
    mm_tokenizer *t = mm_tokenizer_map(put(image, n), 854, &source, &err);
    image[at] = was;
    refused += !t;
    accepted += t != NULL;
    if (!t && err.status == MM_OK) fail_msg("byte %zu: no error", at);
    for (size_t i = 0; t && i < sizeof texts / sizeof *texts; i++) {
      int32_t *ids;
      size_t count;
      if (mm_tokenizer_encode(t, texts[i], strlen(texts[i]), true, &ids, &count, &err)) free(ids);
    }
    mm_tokenizer_close(t);
  }
  assert_true(refused > 10 * accepted);
  free(image);
  mm_tokenizer_close(json);
}

int main(void) { return run_unit_tests(NULL, NULL); }
