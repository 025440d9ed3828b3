/* Proving a packed checkpoint: what the digests say, what lies in the directory, and whether the numbers are numbers. */
#ifndef MM_LOADER_VERIFY_H
#define MM_LOADER_VERIFY_H

#include "loader/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A manifest may leave ranks out; one that leaves out all of them proves no weight: MM_INTEGRITY E_RANKS. */
MM_MUST_USE bool mm_verify_any_rank(const mm_pack *p, mm_err *err);
/* Every block of every part of the ranks that are open, on `threads` threads. MM_INTEGRITY E_DIGEST: the first
 * block that differs, with file, offset and the tensors inside. */
MM_MUST_USE bool mm_verify_blocks(const mm_shards *s, unsigned threads, mm_err *err);
typedef struct mm_digest_block {
  uint32_t rank, part;
  size_t index;
} mm_digest_block;
/* Chooses at most `count` blocks of every part, one from each of as many equal ranges; `seed` decides which. s: of its open ranks alone, or
 * NULL. Returns their number; out has room for them or is NULL. */
size_t mm_verify_choose(const mm_pack *p, const mm_shards *s, uint32_t count, uint64_t seed, mm_digest_block *out);
/* Verifies the blocks chosen so. */
MM_MUST_USE bool mm_verify_sample(const mm_shards *s, uint32_t count, uint64_t seed, unsigned threads, mm_err *err);

/* Blocks proven when they are first read, each once, from any thread. Borrows the shards. */
typedef struct mm_proof {
  const mm_shards *s;
  size_t *first;        /* [ranks of the pack]: number of its first part */
  _Atomic bool **block; /* [parts of all ranks][blocks]: proven */
} mm_proof;
MM_MUST_USE bool mm_proof_open(mm_proof *p, const mm_shards *s, mm_err *err);
void mm_proof_close(mm_proof *p); /* accepts a zeroed or half-opened one */
/* Proves the blocks of bytes [offset, offset + bytes) of a part's file that were not proven yet. Errors as mm_verify_blocks. */
MM_MUST_USE bool mm_proof_range(const mm_proof *p, uint32_t rank, uint32_t part, uint64_t offset, uint64_t bytes, mm_err *err);

/* Checks the open ranks: every weight is finite (E_NONFINITE), every scale is one that its scheme may have, 0 over padding alone
 * (E_SCALE), and mm_verify_agreement holds. */
MM_MUST_USE bool mm_verify_numbers(const mm_shards *s, unsigned threads, mm_err *err);
/* Checks the rules of the format page for weights beyond their digests: padding is zero bytes (E_PADDING), ranks that hold the same
 * weights hold equal ones, and equal scales where one scale stands over lines of several ranks (E_COPIES), and dead_rows names exactly the
 * rows of lm_head that are zero (E_DEAD_ROWS). */
MM_MUST_USE bool mm_verify_agreement(const mm_shards *s, unsigned threads, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
