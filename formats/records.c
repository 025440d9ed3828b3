/* Records that are appended, synced, and read back after a crash. */
#include "formats/records.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/hash.h"

enum { KIND = 8, LENGTH = 4, CHECK = 8 };

static uint64_t check_of(const void *payload, size_t n) {
  const mm_digest d = mm_sha256(payload, n);
  uint64_t v;
  memcpy(&v, d.byte, sizeof v);
  return v;
}

/* Gives the whole records of text[n] to fn; *end is where the last one ends. */
static bool read_all(const char *name, const uint8_t *text, uint64_t n, mm_record_fn *fn, void *ctx, uint64_t *end, mm_err *err) {
  uint64_t at = KIND;
  for (*end = at; n - at >= LENGTH + CHECK; *end = at) {
    uint32_t length;
    uint64_t check;
    memcpy(&length, text + at, LENGTH);
    if (length > n - at - LENGTH - CHECK) break;
    memcpy(&check, text + at + LENGTH + length, CHECK);
    if (check != check_of(text + at + LENGTH, length)) {
      if (at + LENGTH + length + CHECK == n) break; /* torn */
      return mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at_offset(name, NULL, at),
                     "found a damaged record with others behind it, expected whole ones");
    }
    if (!fn(ctx, text + at + LENGTH, length, err)) return false;
    at += LENGTH + (uint64_t)length + CHECK;
  }
  return true;
}

static bool begin(mm_records *r, int parent, const char kind[8], mm_err *err) {
  r->size = KIND;
  return mm_pwrite(r->fd, r->name, kind, KIND, 0, err) && mm_fsync(r->fd, r->name, false, err) && mm_fsync(parent, ".", true, err);
}

/* Reads the file open at r->fd; r->size is what is good of it, 0 where the run that made it died at once. */
static bool read_file(mm_records *r, const char kind[8], mm_record_fn *fn, void *ctx, mm_err *err) {
  struct stat s;
  const char *name = r->name;
  if (fstat(r->fd, &s) != 0) return mm_fail_errno(err, mm_at(name, NULL), "look at", errno);
  if (!S_ISREG(s.st_mode)) return mm_fail(err, MM_USAGE, "E_RESUME", mm_at(name, NULL), "found something that is no file of records");
  const mm_file f = {.fd = r->fd, .size = (uint64_t)s.st_size};
  if (f.size < KIND) return true;
  uint8_t *text = mm_calloc(f.size, 1, err);
  bool ok = text && mm_file_read(&f, name, text, f.size, 0, err);
  if (ok && memcmp(text, kind, KIND) != 0)
    ok = mm_fail(err, MM_USAGE, "E_RESUME", mm_at(name, NULL), "found a file of another kind or version; --restart discards it");
  ok = ok && read_all(name, text, f.size, fn, ctx, &r->size, err);
  free(text);
  return ok;
}

bool mm_records_read(mm_records *r, int parent, const char *name, const char kind[8], mm_record_fn *fn, void *ctx, mm_err *err) {
  *r = (mm_records){.fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), .name = name};
  if (r->fd < 0) return errno == ENOENT || mm_fail_errno(err, mm_at(name, NULL), "open", errno);
  const bool ok = read_file(r, kind, fn, ctx, err);
  close(r->fd);
  r->fd = -1;
  return ok;
}

bool mm_records_open(mm_records *r, int parent, const char *name, const char kind[8], mm_record_fn *fn, void *ctx, mm_err *err) {
  *r = (mm_records){.fd = openat(parent, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), .name = name};
  if (r->fd < 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(name, NULL), "open", errno);
  if (r->fd < 0) return (r->fd = mm_create_at(parent, ".", name, err)) >= 0 && begin(r, parent, kind, err);
  if (!read_file(r, kind, fn, ctx, err)) return false;
  if (r->size == 0) return begin(r, parent, kind, err);
  return (mm_ftruncate(r->fd, r->size) == 0 || mm_fail_errno(err, mm_at(name, NULL), "cut", errno));
}

bool mm_records_add(mm_records *r, const void *payload, size_t n, mm_err *err) {
  const uint32_t length = (uint32_t)n;
  const uint64_t check = check_of(payload, n);
  uint8_t *whole = mm_calloc(LENGTH + n + CHECK, 1, err);
  if (!whole) return false;
  memcpy(whole, &length, LENGTH);
  memcpy(whole + LENGTH, payload, n);
  memcpy(whole + LENGTH + n, &check, CHECK);
  const bool ok = mm_pwrite(r->fd, r->name, whole, LENGTH + n + CHECK, r->size, err) && mm_fsync(r->fd, r->name, false, err);
  if (ok) r->size += LENGTH + n + CHECK;
  free(whole);
  return ok;
}

void mm_records_close(mm_records *r) {
  if (r->fd >= 0) close(r->fd);
  *r = (mm_records)MM_RECORDS_NONE;
}
