/* libFuzzer target: what an archive may hold. The first byte says what the rest is: 0: the table of an archive of two parts; 1, 2, 4: a
 * frame of that width, whose content has the length in the next two bytes; else: a signature. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/frame.h"
#include "loader/archive/archive.h"
#include "loader/archive/signature.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds) {
  if (!holds) abort(); /* a finding */
}

static void table(const uint8_t *data, size_t n) {
  static mm_part part[] = {{.file = "a", .size = 9 << 20, .block_count = 3}, {.file = "b", .size = 5, .block_count = 1}};
  static mm_rank_parts rank = {2, part};
  mm_archive a = {.pack = {.dir = "dir", .tp = 1, .pp = 1, .rank = &rank}};
  mm_err err = {0};
  if (mm_archive_parse(&a, (const char *)data, n, &err)) {
    must(a.part_count == 2);
    for (size_t i = 0; i < 2; i++) {
      uint64_t end = 0;
      for (size_t b = 0; b < part[i].block_count; end += a.part[i].frame[b++].bytes) must(a.part[i].frame[b].at == end);
      must(a.part[i].size == end);
    }
  } else {
    must(err.status != MM_OK);
  }
  mm_arena_close(&a.arena);
}

static void frame(const uint8_t *data, size_t n, unsigned stride) {
  static mm_frame *f;
  static uint8_t content[1 << 16], again[1 << 17];
  mm_err err = {0};
  if (n < 2) return;
  size_t length = (size_t)(data[0] | data[1] << 8) + 1, packed;
  if (!f) f = mm_frame_open(&err);
  must(f);
  if (!mm_frame_unpack(f, data + 2, n - 2, stride, content, length, mm_at("x", NULL), &err)) {
    must(err.status == MM_INTEGRITY);
    return;
  }
  must(mm_frame_pack(f, content, length, stride, 1, again, &packed, &err));
}

/* The key named in the saved inputs: without it, nothing behind its name would be read. */
static mm_key *open_key(void) {
  static const char pem[] =
      "-----BEGIN PUBLIC KEY-----\n"
      "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEwKRMRuGCSftxae9xs+QKUPYXEKwk\n"
      "sQmWCBJeaxhkZPqUfRBhK+M6JY1RZe3O6J/rbQOiZ/H5y5yBi7rQUrTZ9w==\n"
      "-----END PUBLIC KEY-----\n";
  char path[64];
  mm_err err = {0};
  int fd = memfd_create("key", MFD_CLOEXEC);
  must(fd >= 0 && write(fd, pem, sizeof pem - 1) == (ssize_t)sizeof pem - 1);
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  mm_key *key = mm_key_open(path, false, &err);
  must(key);
  close(fd);
  return key;
}

static void signature(const uint8_t *data, size_t n) {
  static mm_key *key;
  mm_pack p = {.dir = "nowhere"};
  mm_err err = {0};
  if (!key) key = open_key();
  must(!mm_signature_parse(&p, key, (const char *)data, n, &err) && err.status != MM_OK); /* nothing is there that could have been signed */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  if (n == 0) return 0;
  if (data[0] == 0)
    table(data + 1, n - 1);
  else if (data[0] == 1 || data[0] == 2 || data[0] == 4)
    frame(data + 1, n - 1, data[0]);
  else
    signature(data + 1, n - 1);
  return 0;
}
