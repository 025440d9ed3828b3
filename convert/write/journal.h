/* The journal of a conversion, next to the staging directory: which blocks and steps are durable. After a crash it says which work need not
 * be done again; nothing it says is trusted before the bytes have been hashed again.
 *
 * File: a header {magic; digests of the plan, of the ranks that are made, of the source's quantization, of the files' names, sizes and
 * headers; level of --compress; u64 source files; for each of them a u64 check of name, size, times, inode and header}, then records {u32
 * length, payload, u64 check}. A check is the first eight bytes of a SHA-256. A record is appended and synced only after the data it speaks
 * of was synced. A torn or damaged tail is cut. */
#ifndef MM_CONVERT_JOURNAL_H
#define MM_CONVERT_JOURNAL_H

#include "convert/write/blocks.h"

/* A finished step and what it wrote. */
typedef struct mm_step_entry {
  uint32_t step;
  uint64_t zeroed; /* weights of it that were not finite and are 0 */
  size_t put_count;
  mm_put *put;
} mm_step_entry;

/* A block on disk, or its frame, with its digest. */
typedef struct mm_block_entry {
  mm_done at;
  mm_digest digest;
} mm_block_entry;

typedef struct mm_journal {
  int fd; /* of the own file, locked; -1 when closed */
  char *path;
  int level; /* of --compress, 0 without: set before the journal is opened */
  uint64_t size;
  size_t step_count, block_count, step_cap, block_cap;
  mm_step_entry *step; /* read back by mm_journal_resume */
  mm_block_entry *block;
  mm_arena arena;
} mm_journal;

/* Starts a journal for the plan (an old one is replaced), or with NULL one that fits every plan until mm_journal_head writes it. parent is
 * an open descriptor of the directory that holds it. */
MM_MUST_USE bool mm_journal_create(mm_journal *j, int parent, const char *name, const mm_plan *p, mm_err *err);
MM_MUST_USE bool mm_journal_head(mm_journal *j, int parent, const mm_plan *p, mm_err *err);
/* Reads an existing one. Absent: false with *absent set and no error. Another plan, source, tool or option: MM_USAGE E_RESUME, which says
 * what differs; held by another run: MM_LOCKED. */
MM_MUST_USE bool mm_journal_resume(mm_journal *j, int parent, const char *name, const mm_plan *p, bool *absent, mm_err *err);
/* Adds what the journal of another run of the same plan claims (--part i/n wrote it). */
MM_MUST_USE bool mm_journal_merge(mm_journal *j, int parent, const char *name, const mm_plan *p, mm_err *err);
/* Checks that the journal `name` is one of this plan, as mm_journal_resume judges; a journal without a whole header passes (its run has
 * just begun, or died there). */
MM_MUST_USE bool mm_journal_fits(int parent, const char *name, const mm_plan *p, int level, mm_err *err);
/* Appends one record and syncs it. Digests are taken from the plan's parts. */
MM_MUST_USE bool mm_journal_append(mm_journal *j, const mm_plan *p, const mm_step_entry *steps, size_t step_count, const mm_done *done,
                                   size_t done_count, mm_err *err);
void mm_journal_close(mm_journal *j);

/* The records of a journal text[n] whose header, of n bytes or fewer, ends at `at`, into j; *end is where the last good one ends. For
 * fuzzing. */
MM_MUST_USE bool mm_journal_parse(mm_journal *j, const uint8_t *text, size_t at, size_t n, uint64_t *end, mm_err *err);

/* The beginning of every journal, of other versions too. */
#define MM_JOURNAL_HEAD "MMJRNL"

#endif
