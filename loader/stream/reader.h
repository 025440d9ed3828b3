/* Bytes of many files read once, by several threads into a ring of the caller's buffers: first the bytes that the caller needs at once,
 * then the rest, in the order of the files or as the caller requests it. The caller decides what to do with the bytes. */
#ifndef MM_LOADER_READER_H
#define MM_LOADER_READER_H

#include "loader/stream/read_log.h"
#include "loader/stream/read_order.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_reader_config {
  const mm_read_file *file; /* [files], borrowed, with what they point to, until close */
  uint32_t files;
  mm_read_want *want; /* [wants], borrowed until close; sorted by file and offset here */
  size_t wants;
  uint8_t *ring; /* [buffers · chunk], aligned to MM_DIRECT */
  uint32_t buffers;
  size_t chunk;      /* bytes of a buffer, a multiple of MM_DIRECT */
  size_t piece;      /* bytes of one read, a multiple of MM_DIRECT: several threads may fill one buffer */
  unsigned threads;  /* ≥ 1 */
  mm_read_path path; /* of every file; PROBE but for measurements and tests */
  mm_read_log *log;  /* or NULL; borrowed until close */
} mm_reader_config;

/* A buffer that has been filled: `bytes` bytes of a file from `offset` on, in whole pages; of a file with digests, whole blocks. */
typedef struct mm_chunk {
  const uint8_t *data; /* NULL: there are no more */
  uint32_t file;
  uint64_t offset;
  size_t bytes;
  size_t first, count; /* config.want[first … first + count): all that have bytes in it are among them */
} mm_chunk;

typedef struct mm_reader mm_reader;
/* Opens all files and starts reading, each page once. MM_IO E_CHANGED for another file than `id`, E_SHORT_READ for one that ends before
 * what is wanted. */
mm_reader *mm_reader_open(const mm_reader_config *c, mm_err *err);
/* Waits for the next chunk. After the last one the digests are waited for and every file is looked at again: E_CHANGED. At most `buffers`
 * may be with the caller at a time (MM_BUG E_BUG). Errors as mm_file_read, with file and offset, and MM_INTEGRITY E_DIGEST, which may come
 * after the damaged chunk did; then reading has ended. */
MM_MUST_USE bool mm_reader_next(mm_reader *r, mm_chunk *out, mm_err *err);
/* The oldest chunk with the caller is used up: its buffer is filled again. */
void mm_reader_release(mm_reader *r);
/* Any thread: these bytes, of wants that come in parts, come before all that was not asked for and is not in the ring already. */
void mm_reader_prefetch(mm_reader *r, uint32_t file, uint64_t offset, uint64_t bytes);
/* Any thread: waits until the digests of all chunks given so far were found right, and looks at every file again. Errors of
 * mm_reader_next. */
MM_MUST_USE bool mm_reader_prove(mm_reader *r, mm_err *err);
/* Ends the threads; what they are reading is waited for. Accepts NULL. */
void mm_reader_close(mm_reader *r);
/* The statistics of one reader from its opening to now. */
mm_read_stats mm_reader_stats(const mm_reader *r);

#ifdef __cplusplus
}
#endif
#endif
