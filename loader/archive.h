/* Archives: a packed checkpoint with every part as a file of zstd frames, one frame a 4 MiB block, for transport and cold storage.
 * formats/ARCHIVE.md describes them for readers without this source. */
#ifndef MM_LOADER_ARCHIVE_H
#define MM_LOADER_ARCHIVE_H

#include "formats/pack.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_ARCHIVE         "archive.json"
#define MM_ARCHIVE_FORMAT  "minimax-archive"
#define MM_ARCHIVE_VERSION 1

/* Block b of a part is the frame [at, at + bytes) of the part's file, its elements `stride` bytes wide (formats/frame.h). */
typedef struct mm_archive_frame {
  uint64_t at;
  uint32_t bytes;
  uint32_t stride;
} mm_archive_frame;

typedef struct mm_archive_part {
  const mm_part *part;     /* what it decodes to: in `pack` */
  char *file;              /* the part's name with ".zst" */
  uint64_t size;           /* of that file */
  mm_archive_frame *frame; /* [part->block_count] */
} mm_archive_part;

typedef struct mm_archive {
  mm_pack pack;   /* of the directory that it holds; dir is the archive's own */
  char *manifest; /* its text */
  size_t manifest_bytes;
  size_t part_count; /* over all ranks, by rank and part */
  mm_archive_part *part;
  mm_arena arena;
} mm_archive;

/* Reads and checks DIR's table, its manifest and the sizes of its files, and that there is nothing else in it. MM_INTEGRITY (E_ARCHIVE,
 * E_MANIFEST, E_SIZE, E_EXTRA). Memory is in proportion to the two texts. */
bool mm_archive_open(mm_archive *a, const char *dir, mm_err *err);
/* The table alone, from memory (for fuzzing), once a->pack is read. Other versions are MM_UNSUPPORTED E_VERSION. */
bool mm_archive_parse(mm_archive *a, const char *text, size_t n, mm_err *err);
void mm_archive_close(mm_archive *a); /* accepts a zeroed or half-opened one */

typedef struct mm_archive_totals {
  uint64_t bytes, packed; /* of the parts */
} mm_archive_totals;

/* Packs the checkpoint in `dir` into the new directory `target`, at zstd level `level`. Its digests are checked on the way. */
bool mm_archive_pack(const char *dir, const char *target, int level, unsigned threads, mm_archive_totals *t, mm_err *err);
/* Unpacks the archive in `dir` into the new directory `target`, which then equals the one that was packed. Every block is checked against
 * the manifest before it is written: MM_INTEGRITY (E_FRAME, E_DIGEST) names file and block. */
bool mm_archive_unpack(const char *dir, const char *target, unsigned threads, mm_archive_totals *t, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
