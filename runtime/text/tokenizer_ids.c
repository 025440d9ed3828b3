/* A tokenizer for models that have none (--load-format dummy): ids below 256 are bytes, each other id is its own number, as a word. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer_tables.h"

/* The split that any tokenizer.json must have; without merges it decides nothing. */
static const char head[] =
    "{\"version\":\"1.0\",\"added_tokens\":[],\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
    "\"pattern\":{\"Regex\":%s},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
    "\"use_regex\":false}]},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{";

uint32_t mm_byte_character(uint8_t byte) {
  uint32_t other = 0x100;
  for (uint32_t b = 0; b < 256; b++) {
    const bool printed = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    if (b == byte) return printed ? b : other;
    other += !printed;
  }
  return byte;
}

static bool write_vocab(FILE *f, uint32_t vocab) {
  mm_json *pattern = mm_json_new_str(mm_split_patterns[0]);
  char *quoted = pattern ? mm_json_dump(pattern, false) : NULL;
  mm_json_free(pattern);
  if (!quoted) return false;
  fprintf(f, head, quoted);
  free(quoted);
  for (uint32_t i = 0; i < vocab; i++) {
    if (i) fputc(',', f);
    if (i < 256)
      fprintf(f, "\"\\u%04x\":%u", mm_byte_character((uint8_t)i), i);
    else
      fprintf(f, "\"\\u0120%u\":%u", i, i); /* U+0120: a space */
  }
  fputs("}}}", f);
  return fflush(f) == 0 && !ferror(f);
}

mm_tokenizer *mm_tokenizer_of_ids(uint32_t vocab, mm_err *err) {
  const int fd = memfd_create("tokenizer.json", MFD_CLOEXEC);
  FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  const char *path = MM_FORMATTED(64, "/proc/self/fd/%d", fd);
  mm_tokenizer *t = NULL;
  if (!f || !write_vocab(f, vocab))
    mm_fail_errno(err, mm_at(NULL, NULL), "memfd_create", errno);
  else
    t = mm_tokenizer_open(path, vocab, err);
  if (f) fclose(f);
  if (!f && fd >= 0) close(fd);
  return t;
}
