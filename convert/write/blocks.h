/* The part files being written, as 4 MiB hash blocks. Bytes arrive in any order from many threads. A block that lies wholly inside one
 * tensor's codes is assembled in memory, hashed and written past the page cache when full; the others (headers, scales, small tensors,
 * ends of files) go through the page cache and are hashed when the part ends. Memory is bounded by the buffers given: when none is free,
 * a block takes the second way. Contents and digests are the same on both ways. */
#ifndef MM_CONVERT_BLOCKS_H
#define MM_CONVERT_BLOCKS_H

#include <pthread.h>

#include "convert/plan/plan.h"

/* Bytes that a step wrote: journaled, so that a resumed run knows which steps it may skip. */
typedef struct mm_put {
  uint32_t rank, bytes; /* at most one block */
  uint64_t offset;      /* in the file */
  uint64_t check;       /* first 8 bytes of the SHA-256 of what went through the page cache; 0 for bytes of an assembled block */
} mm_put;

/* The short check of a digest in journals: its first eight bytes, never 0. */
uint64_t mm_digest_check(const mm_digest *d);

typedef struct mm_put_log {
  mm_put *put;
  size_t count, cap;
} mm_put_log;

typedef enum mm_block_state {
  MM_BLOCK_ASSEMBLED, /* gathered in a buffer, written and hashed once it is full */
  MM_BLOCK_CACHED,    /* each put is written to the file at once, through the page cache; also where no buffer is free */
  MM_BLOCK_DONE       /* on disk, digest in the manifest's part */
} mm_block_state;

typedef struct mm_block {
  uint8_t *buffer;           /* while it is being assembled */
  uint32_t filled, expected; /* bytes that are there; bytes that the plan's steps and the header put there */
  mm_block_state state;
} mm_block;

/* A block that became DONE, later its frame in an archive. */
typedef struct mm_done {
  uint32_t rank, part, block;
  uint32_t packed, stride; /* of its frame; 0 while it is plain */
} mm_done;

typedef struct mm_blocks {
  mm_plan *plan;
  int dir; /* staging directory; borrowed */
  const char *dir_name;
  uint32_t part;
  int *fd, *direct; /* [tp]; direct is -1 where the file system has no O_DIRECT */
  mm_block **block; /* [tp][blocks of the part] */
  pthread_mutex_t lock;
  uint8_t **free_buffer;
  size_t free_count, buffer_count;
  uint8_t *memory; /* of all buffers, each aligned to its size */
  bool zeroed;     /* the plan has padding that nobody writes: buffers start as zeros */
  mm_done *done;   /* since the last mm_blocks_take_done */
  size_t done_count, done_cap;
} mm_blocks;

/* `buffers` of MM_HASH_BLOCK bytes. */
MM_MUST_USE bool mm_blocks_open(mm_blocks *b, mm_plan *p, int dir, const char *dir_name, size_t buffers, mm_err *err);
void mm_blocks_close(mm_blocks *b); /* accepts a half-opened one */

/* Gives part `part` of a rank room for its digests, unless it has that. */
MM_MUST_USE bool mm_blocks_digests(mm_plan *p, uint32_t part, uint32_t rank, mm_err *err);
/* Bytes [at, end) of a file. */
typedef struct mm_block_range {
  uint64_t at, end;
} mm_block_range;
/* The byte ranges that steps of the current part put into a rank's file, sorted by their start; a range that several pieces share is
 * listed once for each of them. free() it. NULL: no memory. */
mm_block_range *mm_blocks_ranges(const mm_blocks *b, uint32_t rank, size_t *count, mm_err *err);
/* Starts part `part` on every rank. A plan whose steps leave bytes of it to nobody is MM_BUG E_UNFILLED. New files get their size; with
 * `existing`, files of the right size are kept (others are made anew and kept[tp] says which). All get their header. */
MM_MUST_USE bool mm_blocks_begin(mm_blocks *b, uint32_t part, bool existing, bool *kept, mm_err *err);
/* n bytes at `offset` from the data start. Threads may write disjoint ranges. The written bytes are recorded in log. A block that a
 * journal declared done must hold these bytes already: MM_USAGE E_RESUME. */
MM_MUST_USE bool mm_blocks_put(mm_blocks *b, mm_put_log *log, uint32_t rank, uint64_t offset, const void *bytes, size_t n, mm_err *err);
/* Takes over a step that an interrupted run carried out: the bytes of this put are in the file, verified. */
void mm_blocks_trust_put(mm_blocks *b, const mm_put *put);
/* fdatasync of every file of the part. */
MM_MUST_USE bool mm_blocks_sync(mm_blocks *b, mm_err *err);
/* Moves out the list of blocks that became DONE; free(*list). */
void mm_blocks_take_done(mm_blocks *b, mm_done **list, size_t *count);
/* Writes and hashes what is left, syncs and closes the files; every block is DONE and the parts' roots are set. A block that lacks bytes
 * which the plan puts there, in whatever way it came, is MM_BUG E_UNFILLED: nothing unwritten is ever published. */
MM_MUST_USE bool mm_blocks_end(mm_blocks *b, unsigned threads, mm_err *err);

#endif
