/* Proving an unsharded checkpoint (minimax-convert --layout hf) by the digests file in its directory. */
#ifndef MM_LOADER_VERIFY_UNSHARDED_H
#define MM_LOADER_VERIFY_UNSHARDED_H

#include "formats/pack.h"

#ifdef __cplusplus
extern "C" {
#endif

/* p is what mm_digests_open read. Every file is there in its size, with a header that can be read, and nothing else is but a model card
 * (README.md): MM_INTEGRITY E_EXTRA, E_FS_MISSING, E_SIZE. */
MM_MUST_USE bool mm_unsharded_listing(const mm_pack *p, mm_err *err);
/* Hashes the small files and at most `count` blocks of every weight file (UINT32_MAX: all), one from each of as many equal ranges, chosen
 * by `seed`: MM_INTEGRITY E_DIGEST names file, offset, block and the tensors inside it. *seen: how many were hashed. */
MM_MUST_USE bool mm_unsharded_blocks(const mm_pack *p, uint32_t count, uint64_t seed, unsigned threads, size_t *seen, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
