/* A packed checkpoint opened for use: manifest read, part headers checked against it, files mapped read-only. Zero copy: tensors
 * point into the mappings. */
#ifndef MM_LOADER_SHARDS_H
#define MM_LOADER_SHARDS_H

#include "formats/pack.h"
#include "formats/system/file.h"
#include "quant/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where one plane of one tensor lies on one rank. */
typedef struct mm_shard_plane {
  uint32_t part;
  uint64_t offset, bytes; /* in that part's file */
  const uint8_t *view;    /* the plane as a run cuts it (mm_shards_regroup), or NULL: all of these bytes */
} mm_shard_plane;

typedef struct mm_shard_rank {
  mm_map *map;           /* [part_count]; data NULL where not mapped */
  mm_shard_plane *plane; /* [tensor_count · MM_PACK_PLANES]; NULL where the rank's files are not in the directory */
} mm_shard_rank;

/* Random weights in place of files: their schemes and their cut. */
typedef struct mm_random_model {
  const mm_scheme *linear;  /* of projections, dense MLPs and shared experts; NULL: there are files */
  const mm_scheme *experts; /* of routed experts */
  const mm_scheme *head;
  uint32_t tp, ep, pp;
  float skew;       /* of routers (mm_random), 0 to below 1 */
  uint32_t attn_tp; /* of mm_pack */
} mm_random_model;

typedef struct mm_shards {
  mm_pack pack;
  mm_shard_rank *rank; /* [pp·tp] */
  mm_random_model random;
  bool regrouped; /* pack's attention is cut as mm_shards_regroup was asked to, not as the files have it */
  void *copied;   /* [copied_bytes]: its memory */
  size_t copied_bytes;
} mm_shards;

/* Opens every rank. Checks: file sizes, part metadata (rank, tp, plan), that the parts of a rank hold exactly the planes of
 * the manifest with dtype and shape, and that every scheme is known. Digests are verify's business. */
MM_MUST_USE bool mm_shards_open(mm_shards *s, const char *dir, mm_err *err);
/* The same of these ranks alone; files of other ranks are not looked at, and may be absent. The manifest's list of their parts is read,
 * but the digests of their blocks are neither stored nor checked against the part's root; the manifest's own digest covers them as it
 * covers every byte. MM_USAGE E_RANKS for a rank that the checkpoint does not have. */
MM_MUST_USE bool mm_shards_open_ranks(mm_shards *s, const char *dir, const uint32_t *rank, uint32_t count, mm_err *err);
/* Every part that is mapped is still the file that was opened, unwritten: MM_IO E_CHANGED names the first that is not. Called when all was
 * read, it makes what was read what lies in the directory. */
MM_MUST_USE bool mm_shards_unchanged(const mm_shards *s, mm_err *err);
/* Cuts attention, embedding and head of an opened checkpoint for `groups` groups of ranks, a divisor of the number that it was made for
 * (mm_pack_groups): from here on pack, mm_shards_tensor and mm_bind are those of a conversion with --attn-tp tp / groups. Rows that lie
 * together in a mapping stay there; others, and columns, are copied to memory of s, with all CPUs. A scale of a block that is cut is
 * repeated, as a conversion does. Nothing happens where there are as many groups already; after a failure only close may follow.
 * MM_UNSUPPORTED E_PARALLEL: no divisor; E_TP: heads that so many ranks cannot share; E_TP_ALIGN: a cut inside codes of one cell, or under
 * --tp-align error inside a scale's block. MM_INTEGRITY E_MISSING: the files of a rank that has the rows are not there. MM_LIMIT. */
MM_MUST_USE bool mm_shards_regroup(mm_shards *s, uint32_t groups, mm_err *err);
/* Distinguishes the weights as this run cuts them from all others: the manifest's digest, or one of it and the cut. */
mm_digest mm_shards_digest(const mm_shards *s);
void mm_shards_close(mm_shards *s);

/* Tensor i of the manifest on one rank of its stage (mm_pack_holds), ready for unpack. Vectors come as n rows of k = 1. The planes are
 * NULL if the rank has no map (mm_bind_planned). */
mm_packed mm_shards_tensor(const mm_shards *s, uint32_t rank, size_t i);

#ifdef __cplusplus
}
#endif
#endif
