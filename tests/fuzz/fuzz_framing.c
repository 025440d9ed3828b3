/* Requests as the server reads them: bytes read at once and divided where the first byte of the input says give the same requests. */
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/framing.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Writes down what is read of bytes[0 … n), `step` bytes at a time. */
static void read_all(const uint8_t *bytes, size_t n, size_t step, mm_text *out) {
  mm_framing f = {.head_max = 2000, .body_max = 1000};
  for (size_t at = 0; at < n && f.state != MM_FRAMING_REFUSED;) {
    const size_t piece = mm_min(step, n - at);
    char *copy = malloc(piece);
    if (!copy) abort();
    memcpy(copy, bytes + at, piece);
    const size_t used = mm_framing_read(&f, copy, piece);
    free(copy);
    if (used > piece || (!used && f.state != MM_FRAMING_REFUSED) || f.body.n > f.body_max) abort();
    at += used;
    if (f.state != MM_FRAMING_DONE) continue;
    mm_text_printf(out, "%s %s %d %d %zu %zu\n", f.method, f.path, f.minor, f.keep, f.body.n, at);
    for (size_t i = 0; i < f.fields; i++) {
      if (strpbrk(f.field[i].value, "\r\n") || mm_framing_find(&f, f.field[i].name, 0) == NULL) abort();
      mm_text_printf(out, "%s=%s\n", f.field[i].name, f.field[i].value);
    }
    mm_text_add(out, f.body.p ? f.body.p : "", f.body.n);
    mm_framing_next(&f);
  }
  mm_text_printf(out, "%d %d", f.state == MM_FRAMING_REFUSED, f.status);
  mm_framing_close(&f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!size) return 0;
  mm_text whole = {0}, parts = {0};
  read_all(data + 1, size - 1, size, &whole);
  read_all(data + 1, size - 1, 1 + data[0] % 16, &parts);
  if (whole.failed || parts.failed || whole.n != parts.n || memcmp(whole.p, parts.p, whole.n) != 0) abort();
  MM_FREE(whole.p, parts.p);
  return 0;
}
