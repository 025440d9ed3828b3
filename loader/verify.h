/* Proving a packed checkpoint: what the digests say, what lies in the directory, and whether the numbers are numbers. */
#ifndef MM_LOADER_VERIFY_H
#define MM_LOADER_VERIFY_H

#include "loader/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One 4 MiB block of a part hashed and compared. MM_INTEGRITY E_DIGEST names file, offset, block and the tensors inside the block. */
bool mm_verify_block(const mm_shards *s, uint32_t rank, uint32_t part, size_t block, mm_err *err);
/* Every block of every part, on `threads` threads: the first damage found. */
bool mm_verify_blocks(const mm_shards *s, unsigned threads, mm_err *err);
/* At most `count` blocks of every part, one from each of as many equal stretches; `seed` decides which. */
bool mm_verify_sample(const mm_shards *s, uint32_t count, uint64_t seed, unsigned threads, mm_err *err);

/* Every weight is finite and every scale positive, outside padding (E_NONFINITE, E_SCALE). */
bool mm_verify_numbers(const mm_shards *s, unsigned threads, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
