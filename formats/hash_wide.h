/* Sixteen digests at once; behind mm_sha256_each. */
#ifndef MM_FORMATS_HASH_WIDE_H
#define MM_FORMATS_HASH_WIDE_H

#include "formats/hash.h"

/* Whether this machine can. */
bool mm_sha256_is_wide(void);
/* Digests of 16 messages of n bytes, a multiple of 64. */
void mm_sha256_wide(const uint8_t *const data[16], size_t n, mm_digest out[16]);

#endif
