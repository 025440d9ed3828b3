/* Proving a packed checkpoint: what the digests say, what lies in the directory, and whether the numbers are numbers. */
#ifndef MM_LOADER_VERIFY_H
#define MM_LOADER_VERIFY_H

#include "loader/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every 4 MiB block of every part hashed and compared, on `threads` threads. The first damage found is MM_INTEGRITY E_DIGEST and names
 * file, offset and the tensors inside the block. */
bool mm_verify_blocks(const mm_shards *s, unsigned threads, mm_err *err);
/* Companion files have their digests, and the directory holds nothing else (E_DIGEST, E_EXTRA). */
bool mm_verify_files(const mm_pack *p, mm_err *err);
/* Every weight is finite and every scale positive, outside padding (E_NONFINITE, E_SCALE). */
bool mm_verify_numbers(const mm_shards *s, unsigned threads, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
