/* SHA-256 (FIPS 180-4, through OpenSSL) and the block tree of packed files: the file is cut into blocks of
 * 4 MiB (the last may be shorter), each block is hashed, and the root is SHA-256 over the concatenated block digests. */
#ifndef MM_FORMATS_HASH_H
#define MM_FORMATS_HASH_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_HASH_BLOCK (UINT64_C(4) << 20)
typedef struct mm_digest {
  uint8_t byte[32];
} mm_digest;

/* None of these can fail, nor do they allocate. One-shot. */
MM_MUST_USE mm_digest mm_sha256(const void *data, size_t n);
/* Streaming; a state that is not ended needs nothing. */
typedef struct mm_sha256_state {
  uint64_t opaque[14];
} mm_sha256_state;
void mm_sha256_begin(mm_sha256_state *s);
void mm_sha256_add(mm_sha256_state *s, const void *data, size_t n);
MM_MUST_USE mm_digest mm_sha256_end(mm_sha256_state *s);

static inline uint64_t mm_hash_blocks(uint64_t size) { return mm_ceil_div(size, MM_HASH_BLOCK); }
/* Root over n block digests (n may be 0). */
MM_MUST_USE mm_digest mm_hash_root(const mm_digest *blocks, size_t n);

bool mm_digest_equal(const mm_digest *a, const mm_digest *b);
#define MM_HEX_LEN 64
typedef struct mm_hex {
  char text[MM_HEX_LEN + 1]; /* lower case */
} mm_hex;
MM_MUST_USE mm_hex mm_digest_hex(const mm_digest *d);
bool mm_digest_parse(const char *hex, size_t n, mm_digest *out); /* exactly 64 lower-case hex digits */

#ifdef __cplusplus
}
#endif
#endif
