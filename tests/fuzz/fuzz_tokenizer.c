/* tokenizer.json of any bytes; one that is accepted gives ids below the vocabulary's size, whose bytes are those of the text. */
#include <string.h>

#include "runtime/tokenizer.h"
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_err err = {0};
  mm_tokenizer *t = mm_tokenizer_open(given_file(data, size), VOCAB, &err);
  if (!t && err.status == MM_OK) abort();
  if (t) {
    static const char text[] = "In the beginning, 1611 <x> \xc3\xa9\xff it's  \n\n  we'LL see";
    encode(t, text, sizeof text - 1, false);
    encode(t, text, sizeof text - 1, true);
    encode(t, (const char *)data, size < 256 ? size : 256, true);
  }
  mm_tokenizer_close(t);
  return 0;
}
