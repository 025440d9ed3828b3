/* Bytes of many files read once, in the order of the files, by several threads into a ring of the caller's buffers. What becomes of them is
 * the caller's business. */
#ifndef MM_LOADER_READER_H
#define MM_LOADER_READER_H

#include "formats/file.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a file's bytes are taken from: found out when it is opened, by what it is and by what the page cache holds of it. */
typedef enum mm_read_path {
  MM_READ_PROBE,   /* not a path: find out */
  MM_READ_CACHE,   /* the page cache has all of it (or it is a file in memory): plain reads */
  MM_READ_DIRECT,  /* a local disk: past the page cache, but for what that holds; the cache stays as it was */
  MM_READ_STREAMS, /* a network or FUSE file, or no O_DIRECT there: plain reads, many at a time */
  MM_READ_MEMORY   /* no file */
} mm_read_path;
#define MM_READ_PATHS (MM_READ_MEMORY + 1)
const char *mm_read_path_name(mm_read_path p); /* "page cache", "O_DIRECT", "streams", "memory" */

typedef struct mm_read_file {
  const char *path;      /* or NULL: */
  const uint8_t *memory; /* [size] bytes that are in memory already */
  uint64_t size;
  const mm_file_id *id; /* which file it must be, or NULL */
} mm_read_file;

/* One run of bytes that is wanted. The tag is the caller's. */
typedef struct mm_read_want {
  uint32_t file;
  uint64_t offset, bytes, tag;
} mm_read_want;

typedef struct mm_reader_config {
  const mm_read_file *file; /* [files], borrowed, with what they point to, until close */
  uint32_t files;
  mm_read_want *want; /* [wants], borrowed until close; sorted by file and offset here; what is wanted twice may be read twice */
  size_t wants;
  uint8_t *ring; /* [buffers · chunk], aligned to MM_DIRECT */
  uint32_t buffers;
  size_t chunk;      /* bytes of a buffer, a multiple of MM_DIRECT */
  size_t piece;      /* bytes of one read, a multiple of MM_DIRECT: several threads may fill one buffer */
  unsigned threads;  /* ≥ 1 */
  mm_read_path path; /* of every file; PROBE but for measurements and tests */
} mm_reader_config;

/* A buffer that has been filled: `bytes` bytes of a file from `offset` on, wanted ones and fewer than MM_DIRECT others between them. */
typedef struct mm_chunk {
  const uint8_t *data; /* NULL: there are no more */
  uint32_t file;
  uint64_t offset;
  size_t bytes;
  size_t first, count; /* config.want[first … first + count) have bytes in it */
} mm_chunk;

/* Bytes by path, and seconds from the first reader's opening to the last one's close. */
typedef struct mm_read_stats {
  uint64_t bytes[MM_READ_PATHS];
  double seconds;
} mm_read_stats;

typedef struct mm_reader mm_reader;
/* Opens all files and starts reading. MM_IO E_CHANGED for another file than `id`, E_SHORT_READ for one that ends before what is wanted. */
mm_reader *mm_reader_open(const mm_reader_config *c, mm_err *err);
/* Waits for the next chunk in order of files and offsets. After the last one every file is looked at again: E_CHANGED. At most `buffers`
 * may be with the caller at a time (MM_BUG E_BUG). Errors as mm_file_read, with file and offset; then reading has ended. */
bool mm_reader_next(mm_reader *r, mm_chunk *out, mm_err *err);
/* The oldest chunk with the caller is used up: its buffer is filled again. */
void mm_reader_release(mm_reader *r);
/* Ends the threads; what they are reading is waited for. Accepts NULL. */
void mm_reader_close(mm_reader *r);
/* Of one reader so far, from its opening to now. */
mm_read_stats mm_reader_stats(const mm_reader *r);

/* Of all readers of the process that were closed. */
mm_read_stats mm_reader_total(void);
/* "30.1 GB in 0.58 s, 51.9 GB/s, page cache", with each path's share where there were several; "" where nothing was read. Returns out. */
char *mm_read_text(char *out, size_t cap, const mm_read_stats *s);

#ifdef __cplusplus
}
#endif
#endif
