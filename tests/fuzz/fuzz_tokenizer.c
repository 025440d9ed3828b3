/* tokenizer.json of any bytes, or an image of one: what is accepted gives ids below the vocabulary's size, whose bytes are those of the
 * text, and the same ids from its image. An image is changed by the input's own bytes as well: it is refused, or safe. */
#include <string.h>

#include "runtime/text/tokenizer.h"
#include "tests/fuzz/given_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { VOCAB = 400 };

static void encode(const mm_tokenizer *t, const char *text, size_t n, bool added) {
  mm_err err = {0};
  int32_t *ids = NULL;
  size_t count = 0, at = 0;
  if (!mm_tokenizer_encode(t, text, n, added, &ids, &count, &err)) {
    if (err.status == MM_OK) abort();
    return;
  }
  for (size_t i = 0; i < count; i++) {
    size_t length;
    if (ids[i] < 0 || ids[i] >= VOCAB) abort();
    const char *bytes = mm_tokenizer_bytes(t, ids[i], &length);
    if (!bytes || length > n - at || memcmp(bytes, text + at, length) != 0) abort();
    at += length;
  }
  if (at != n) abort();
  free(ids);
}

static const mm_digest source = {{1, 2, 3}};
static const char text[] = "In the beginning, 1611 <x> \xc3\xa9\xff it's  \n\n  we'LL see";

/* The image gives what the file gives. */
static void compare(const mm_tokenizer *t, const uint8_t *image, size_t n) {
  mm_err err = {0};
  mm_tokenizer *m = mm_tokenizer_map(given_file(image, n), VOCAB, &source, &err);
  int32_t *a = NULL, *b = NULL;
  size_t na = 0, nb = 0;
  if (!m) abort();
  if (mm_tokenizer_encode(t, text, sizeof text - 1, true, &a, &na, &err) !=
          mm_tokenizer_encode(m, text, sizeof text - 1, true, &b, &nb, &err) ||
      na != nb || (na && memcmp(a, b, na * sizeof *a) != 0))
    abort();
  free(a);
  free(b);
  mm_tokenizer_close(m);
}

static void map_changed(uint8_t *image, size_t n, const uint8_t *data, size_t size) {
  for (size_t i = 0; i + 4 < size && i < 40; i += 5) {
    uint32_t at;
    memcpy(&at, data + i, sizeof at);
    image[at % n] = data[i + 4];
  }
  mm_err err = {0};
  mm_tokenizer *m = mm_tokenizer_map(given_file(image, n), VOCAB, &source, &err);
  if (!m && err.status == MM_OK) abort();
  if (m) {
    encode(m, text, sizeof text - 1, false);
    encode(m, text, sizeof text - 1, true);
  }
  mm_tokenizer_close(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(given_file(data, size), VOCAB, &err);
  if (!t && err.status == MM_OK) abort();
  if (t) {
    encode(t, text, sizeof text - 1, false);
    encode(t, text, sizeof text - 1, true);
    encode(t, (const char *)data, size < 256 ? size : 256, true);
    uint8_t *image;
    size_t n;
    if (!mm_tokenizer_image(t, &source, &image, &n, &err)) abort();
    compare(t, image, n);
    map_changed(image, n, data + size / 2, size - size / 2);
    free(image);
  }
  mm_tokenizer_close(t);
  return 0;
}
