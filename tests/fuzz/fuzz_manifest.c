/* The manifest reader on any bytes; what it accepts must survive writing and reading, to the byte. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/pack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The text with the digest of its last line made right, which no mutation finds by chance. */
static char *sealed(const uint8_t *data, size_t size) {
  enum { LINE = sizeof MM_MANIFEST_SEAL - 3 + MM_HEX_LEN };
  char *text = malloc(size + 1), hex[MM_HEX_LEN + 1];
  mm_digest d;
  if (!text) abort();
  if (size) memcpy(text, data, size);
  if (size < LINE) return text;
  if (!mm_sha256(text, size - LINE, &d, NULL)) abort();
  mm_digest_hex(&d, hex);
  snprintf(text + size - LINE, LINE + 1, MM_MANIFEST_SEAL, hex);
  return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_err err = {0};
  mm_pack p, again;
  char *given = sealed(data, size);
  if (mm_pack_parse(&p, "dir", given, size, &err)) {
    char *text = mm_pack_text(&p, &err);
    if (!text || !mm_pack_parse(&again, "dir", text, strlen(text), &err)) abort();
    char *same = mm_pack_text(&again, &err);
    if (!same || strcmp(same, text) != 0) abort();
    free(same);
    free(text);
    mm_pack_close(&again);
  }
  mm_pack_close(&p);
  free(given);
  return 0;
}
