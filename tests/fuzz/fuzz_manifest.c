/* The manifest reader on any bytes; what it accepts must survive writing and reading, to the byte. */
#include <stdlib.h>
#include <string.h>

#include "formats/pack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_err err = {0};
  mm_pack p, again;
  if (mm_pack_parse(&p, "dir", (const char *)data, size, &err)) {
    char *text = mm_pack_text(&p, &err);
    if (!text || !mm_pack_parse(&again, "dir", text, strlen(text), &err)) abort();
    char *same = mm_pack_text(&again, &err);
    if (!same || strcmp(same, text) != 0) abort();
    free(same);
    free(text);
    mm_pack_close(&again);
  }
  mm_pack_close(&p);
  return 0;
}
