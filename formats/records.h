/* A file of checked records that only grows: {u32 length, payload, u64 check}, behind eight bytes that say of what kind. A check is the
 * first eight bytes of the payload's SHA-256. Each record is synced before the call that adds it returns. A torn tail is cut at opening;
 * damage before the last record is MM_INTEGRITY E_DIGEST. */
#ifndef MM_FORMATS_RECORDS_H
#define MM_FORMATS_RECORDS_H

#include "formats/system/file.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_records {
  int fd; /* -1 when closed */
  const char *name;
  uint64_t size;
} mm_records;
#define MM_RECORDS_NONE \
  { -1, NULL, 0 }

/* Takes a record that is there; the payload lives until it returns. False ends the reading as a failure. */
typedef bool mm_record_fn(void *ctx, const uint8_t *payload, size_t n, mm_err *err);

/* Opens parent/name, made where it is absent, and gives each record to fn, in order. `kind` has eight bytes; a file that begins otherwise
 * is MM_USAGE E_RESUME. parent and name are borrowed; the caller sees to it that one run at a time has the file open. */
MM_MUST_USE bool mm_records_open(mm_records *r, int parent, const char *name, const char kind[8], mm_record_fn *fn, void *ctx, mm_err *err);
/* The same without opening it: r->size is 0 where the file is absent, and r is closed. Another run may add meanwhile. */
MM_MUST_USE bool mm_records_read(mm_records *r, int parent, const char *name, const char kind[8], mm_record_fn *fn, void *ctx, mm_err *err);
MM_MUST_USE bool mm_records_add(mm_records *r, const void *payload, size_t n, mm_err *err);
void mm_records_close(mm_records *r); /* accepts MM_RECORDS_NONE */

#ifdef __cplusplus
}
#endif
#endif
