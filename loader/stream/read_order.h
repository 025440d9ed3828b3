/* In which order wanted bytes of many files are read, and in what pieces (reader.c): no file is touched here. */
#ifndef MM_LOADER_READ_ORDER_H
#define MM_LOADER_READ_ORDER_H

#include "formats/hash.h"
#include "formats/system/file.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_read_file {
  const char *path;      /* or NULL: */
  const uint8_t *memory; /* [size] bytes that are in memory already */
  uint64_t size;
  const mm_file_id *id; /* which file it must be, or NULL */
  /* [mm_hash_blocks(size of the file)] or NULL: what is read is read by whole blocks, and each is hashed once it is in the ring. Then chunk
   * is a multiple of MM_HASH_BLOCK. */
  const mm_digest *digest;
} mm_read_file;

/* One run of bytes that is wanted. The tag is the caller's. part 0: it is among what comes first. Else it comes afterwards, and each `part`
 * bytes of it may be asked for. */
typedef struct mm_read_want {
  uint32_t file;
  uint64_t offset, bytes, tag, part;
} mm_read_want;

/* All that is wanted. */
typedef struct mm_read_list {
  const mm_read_file *file;
  const uint64_t *size; /* of each file */
  mm_read_want *want;   /* [wants] each ends within its file; sorted by file and offset by mm_read_order_open */
  size_t wants;
  size_t chunk; /* bytes that are read together at most */
} mm_read_list;

/* Bytes of a file that are read together. */
typedef struct mm_read_run {
  uint32_t file;
  uint64_t offset; /* a multiple of MM_DIRECT */
  size_t bytes;
  size_t first, count; /* want[first … first + count): all that have bytes in it are among them */
} mm_read_run;

/* A zeroed one is empty. */
typedef struct mm_read_order {
  mm_read_run *run; /* [runs] those that come first, then the others; of each by file and offset */
  size_t runs, cap, late;
  uint8_t *state; /* [runs] */
  size_t *wanted; /* [runs] those that were asked for, in that order: [wanted_from, wanted_end) are left */
  size_t wanted_from, wanted_end, next;
  size_t left;   /* runs that were not taken */
  size_t most;   /* bytes of what is taken at a time */
  uint64_t sum;  /* bytes of all runs */
  uint64_t hash; /* of those the blocks with digests */
} mm_read_order;

MM_MUST_USE bool mm_read_order_open(mm_read_order *o, const mm_read_list *list, mm_err *err);
void mm_read_order_close(mm_read_order *o);
/* The next bytes to be read, chunk bytes at most: of what was asked for the oldest, else what comes next. False when all was taken. */
bool mm_read_order_take(mm_read_order *o, mm_read_run *out);
/* These bytes come before all others that were not asked for; whatever of them was taken, or comes first anyway, stays as it is. */
void mm_read_order_prefetch(mm_read_order *o, uint32_t file, uint64_t offset, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
