/* Archives: a packed checkpoint with every part as a file of zstd frames, one frame a 4 MiB block, for transport and cold storage.
 * formats/ARCHIVE.md describes them for readers without this source. */
#ifndef MM_LOADER_ARCHIVE_H
#define MM_LOADER_ARCHIVE_H

#include "formats/frame.h"
#include "formats/pack.h"
#include "loader/companions.h"

#ifdef __cplusplus
extern "C" {
#endif

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
MM_MUST_USE bool mm_archive_open(mm_archive *a, const char *dir, mm_err *err);
/* The table alone, from memory (for fuzzing), once a->pack is read. Other versions are MM_UNSUPPORTED E_VERSION. */
MM_MUST_USE bool mm_archive_parse(mm_archive *a, const char *text, size_t n, mm_err *err);
void mm_archive_close(mm_archive *a); /* accepts a zeroed or half-opened one */

typedef struct mm_archive_totals {
  uint64_t bytes, packed; /* of the parts */
} mm_archive_totals;

/* Threads that pack or unpack an archive, and the end of their work. */
typedef struct mm_archive_work {
  unsigned threads;
  bool (*stopped)(const void *none); /* as that of the lanes; nothing is left then */
} mm_archive_work;

/* Packs the checkpoint in `dir` into the new directory `target`, at zstd level `level`. Its digests are checked on the way. */
MM_MUST_USE bool mm_archive_pack(const char *dir, const char *target, int level, mm_archive_work w, mm_archive_totals *t, mm_err *err);
/* Unpacks the archive in `dir` into the new directory `target`, which then equals the one that was packed. Every block is checked against
 * the manifest before it is written: MM_INTEGRITY (E_FRAME, E_DIGEST) names file and block. */
MM_MUST_USE bool mm_archive_unpack(const char *dir, const char *target, mm_archive_work w, mm_archive_totals *t, mm_err *err);

/* --- a part at a time, for whoever makes the parts (archive_part.c) --- */

/* Scratch for packing and unpacking, one for each thread. */
typedef struct mm_archive_lane {
  mm_frame *coder;
  uint8_t *frame, *block; /* [mm_frame_bound(MM_HASH_BLOCK)], [MM_HASH_BLOCK] */
} mm_archive_lane;
typedef struct mm_archive_lanes {
  unsigned threads;
  mm_archive_lane *lane;
  bool (*stopped)(const void *ctx); /* asked before a block: true ends it with MM_INTERRUPTED. NULL: nobody asks */
  const void *ctx;
  const char *then; /* what the line of that failure says of the next run */
} mm_archive_lanes;
MM_MUST_USE bool mm_archive_lanes_open(mm_archive_lanes *l, unsigned threads, mm_err *err);
void mm_archive_lanes_close(mm_archive_lanes *l); /* accepts a zeroed one */
/* Bytes of one lane that packs at this level. */
size_t mm_archive_lane_bytes(int level);

/* The entry of `part`, with its file's name and room in `arena` for its frames. */
MM_MUST_USE bool mm_archive_part_make(mm_archive_part *p, const mm_part *part, mm_arena *arena, mm_err *err);
/* Packs from_dir/part->file into a new, synced file p->file below the open directory `to`, and fills p's size and frames. Blocks that are
 * not those of the part's digests are MM_INTEGRITY E_DIGEST. */
MM_MUST_USE bool mm_archive_pack_part(mm_archive_part *p, const char *from_dir, int to, const char *to_dir, int level,
                                      const mm_archive_lanes *l, mm_err *err);
/* The reverse: dir/p->file into a new, synced file below `to`. */
MM_MUST_USE bool mm_archive_unpack_part(const mm_archive_part *p, const char *dir, int to, const char *to_dir, const mm_archive_lanes *l,
                                        mm_err *err);
/* Unpacks every block of dir/p->file and compares its digest: MM_INTEGRITY (E_SIZE, E_FRAME, E_DIGEST). */
MM_MUST_USE bool mm_archive_prove_part(const mm_archive_part *p, const char *dir, const mm_archive_lanes *l, mm_err *err);
/* Unpacks n bytes at `at` of the part, whose blocks are proven on the way. Memory: a lane. */
MM_MUST_USE bool mm_archive_read_part(const mm_archive_part *p, const char *dir, uint64_t at, void *to, uint64_t n, mm_err *err);
/* The table, a deterministic function of *a's parts; free() it. */
char *mm_archive_text(const mm_archive *a, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
