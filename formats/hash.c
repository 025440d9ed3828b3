/* SHA-256 through OpenSSL, and the block tree of packed files. The low-level interface allocates nothing and loads no provider, so a digest
 * cannot fail; the EVP one dies of a failed allocation while it starts (libcrypto 3.0). OpenSSL calls it deprecated. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "formats/hash.h"

#include <openssl/sha.h>
#include <string.h>

_Static_assert(sizeof(SHA256_CTX) <= sizeof(mm_sha256_state), "a state has room for the library's");

static SHA256_CTX *ctx(mm_sha256_state *s) { return (SHA256_CTX *)(void *)s; }

/* The library's functions return 1, whatever is asked of them. */
void mm_sha256_begin(mm_sha256_state *s) { SHA256_Init(ctx(s)); }

void mm_sha256_add(mm_sha256_state *s, const void *data, size_t n) { SHA256_Update(ctx(s), data, n); }

mm_digest mm_sha256_end(mm_sha256_state *s) {
  mm_digest d;
  SHA256_Final(d.byte, ctx(s));
  return d;
}

mm_digest mm_sha256(const void *data, size_t n) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  mm_sha256_add(&s, data, n);
  return mm_sha256_end(&s);
}

mm_digest mm_hash_root(const mm_digest *blocks, size_t n) { return mm_sha256(blocks, n * sizeof *blocks); }

bool mm_digest_equal(const mm_digest *a, const mm_digest *b) { return memcmp(a->byte, b->byte, sizeof a->byte) == 0; }

static const char hex_digit[] = "0123456789abcdef";

mm_hex mm_digest_hex(const mm_digest *d) {
  mm_hex out = {0};
  for (size_t i = 0; i < sizeof d->byte; i++) {
    out.text[2 * i] = hex_digit[d->byte[i] >> 4];
    out.text[2 * i + 1] = hex_digit[d->byte[i] & 15];
  }
  return out;
}

typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint16_t pairs __attribute__((vector_size(16)));
typedef uint8_t halves __attribute__((vector_size(8)));

bool mm_digest_parse(const char *hex, size_t n, mm_digest *out) {
  if (n != MM_HEX_LEN) return false;
  bytes good = ~(bytes){0};
  for (size_t i = 0; i < MM_HEX_LEN; i += sizeof(bytes)) {
    bytes c;
    memcpy(&c, hex + i, sizeof c);
    const bytes digit = c - '0', letter = c - 'a', is_digit = (bytes)(digit < 10), is_letter = (bytes)(letter < 6);
    good &= is_digit | is_letter;
    const pairs v = (pairs)((is_digit & digit) | (is_letter & (letter + 10))); /* the low byte of a pair came first */
    const halves h = __builtin_convertvector((v << 4 | v >> 8) & 0xFF, halves);
    memcpy(out->byte + i / 2, &h, sizeof h);
  }
  uint64_t all[2];
  memcpy(all, &good, sizeof all);
  return (all[0] & all[1]) == UINT64_MAX;
}
