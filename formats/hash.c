/* SHA-256 through OpenSSL, and the block tree of packed files. The low-level interface allocates nothing and loads no provider, so a digest
 * cannot fail; the EVP one dies of a failed allocation while it starts (libcrypto 3.0). OpenSSL calls it deprecated. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "formats/hash.h"

#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

struct mm_sha256_state {
  SHA256_CTX c;
};

/* The library's functions return 1, whatever is asked of them. */
bool mm_sha256(const void *data, size_t n, mm_digest *out, mm_err *err) {
  (void)err;
  SHA256_CTX c;
  SHA256_Init(&c);
  SHA256_Update(&c, data, n);
  SHA256_Final(out->byte, &c);
  return true;
}

mm_sha256_state *mm_sha256_begin(mm_err *err) {
  mm_sha256_state *s = mm_calloc(1, sizeof *s, err);
  if (s) SHA256_Init(&s->c);
  return s;
}

bool mm_sha256_add(mm_sha256_state *s, const void *data, size_t n, mm_err *err) {
  (void)err;
  SHA256_Update(&s->c, data, n);
  return true;
}

bool mm_sha256_end(mm_sha256_state *s, mm_digest *out, mm_err *err) {
  (void)err;
  if (out) SHA256_Final(out->byte, &s->c);
  free(s);
  return true;
}

bool mm_hash_root(const mm_digest *blocks, size_t n, mm_digest *out, mm_err *err) {
  return mm_sha256(blocks, n * sizeof *blocks, out, err);
}

bool mm_digest_equal(const mm_digest *a, const mm_digest *b) { return memcmp(a->byte, b->byte, sizeof a->byte) == 0; }

static const char hex_digit[] = "0123456789abcdef";

void mm_digest_hex(const mm_digest *d, char out[MM_HEX_LEN + 1]) {
  for (size_t i = 0; i < sizeof d->byte; i++) {
    out[2 * i] = hex_digit[d->byte[i] >> 4];
    out[2 * i + 1] = hex_digit[d->byte[i] & 15];
  }
  out[MM_HEX_LEN] = 0;
}

bool mm_digest_parse(const char *hex, size_t n, mm_digest *out) {
  if (n != MM_HEX_LEN) return false;
  for (size_t i = 0; i < MM_HEX_LEN; i++) {
    const char *digit = memchr(hex_digit, hex[i], 16);
    if (!digit) return false;
    uint8_t *b = &out->byte[i / 2];
    *b = (uint8_t)(i % 2 ? *b | (digit - hex_digit) : (digit - hex_digit) << 4);
  }
  return true;
}
