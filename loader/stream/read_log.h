/* Statistics of readers (reader.h): bytes read by each path and of each file, and the speed. */
#ifndef MM_LOADER_READ_LOG_H
#define MM_LOADER_READ_LOG_H

#include "formats/system/base.h"

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

/* Bytes read by path, of all that will be; of those hashed; and seconds from the first reader's opening to the last one's close, or to now
 * while one is open. */
typedef struct mm_read_stats {
  uint64_t bytes[MM_READ_PATHS], wanted, hashed;
  double seconds;
} mm_read_stats;
uint64_t mm_read_bytes(const mm_read_stats *s); /* by all paths */

/* The statistics of all readers with this log, for progress and summaries. Any thread may ask at any time. */
typedef struct mm_read_log mm_read_log;

mm_read_log *mm_read_log_open(mm_err *err);
void mm_read_log_close(mm_read_log *log); /* accepts NULL; no reader has it any more */
mm_read_stats mm_read_log_stats(mm_read_log *log);
/* True if a load with this log has failed after its open had returned; *err is then the first error. */
bool mm_read_log_failed(mm_read_log *log, mm_err *err);
/* The statistics of file i among the files of closed readers, in the order of closing and reading; false after the last. *path lives as
 * long as the log. Seconds are not included, nor are files that are in memory. */
bool mm_read_log_file(mm_read_log *log, size_t i, const char **path, mm_read_stats *s);
/* "30.1 GB in 0.58 s, 51.9 GB/s, page cache", with each path's share where there were several; "" where nothing was read. Returns out. */
char *mm_read_text(char *out, size_t cap, const mm_read_stats *s);

/* "reading from 0.002, arena 0.012, …, waited for reads 0.020": what was noted, in seconds. Returns out. */
char *mm_read_log_times(mm_read_log *log, char *out, size_t cap);

/* ---- the reader's side; all accept NULL ---- */

/* Notes that something happened now, in seconds since the log was opened, or how long something took. `what` is a constant; the first note
 * of each is kept. */
void mm_read_log_mark(mm_read_log *log, const char *what);
void mm_read_log_note(mm_read_log *log, const char *what, double seconds);
/* A reader is open that will read so many bytes. */
void mm_read_log_begin(mm_read_log *log, uint64_t wanted, double now);
void mm_read_log_add(mm_read_log *log, mm_read_path path, uint64_t read, uint64_t hashed);
/* A file of a reader that ends. */
void mm_read_log_keep(mm_read_log *log, const char *path, const mm_read_stats *s);
void mm_read_log_end(mm_read_log *log, double now);
/* Records that the load failed: not everything will be there. */
void mm_read_log_fail(mm_read_log *log, const mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
