/* SHA-256 through OpenSSL's EVP, and the block tree of packed files. */
#include "formats/hash.h"

#include <openssl/evp.h>
#include <string.h>

static bool hash_failed(mm_err *err, const char *what) {
  return mm_fail(err, MM_BUG, "E_HASH", mm_at(NULL, NULL), "SHA-256: %s failed in the crypto library", what);
}

bool mm_sha256(const void *data, size_t n, mm_digest *out, mm_err *err) {
  return EVP_Digest(data, n, out->byte, NULL, EVP_sha256(), NULL) == 1 || hash_failed(err, "digest");
}

/* An mm_sha256_state is OpenSSL's context under our name; it is never looked into here. */
static EVP_MD_CTX *context(mm_sha256_state *s) { return (EVP_MD_CTX *)s; }

mm_sha256_state *mm_sha256_begin(mm_err *err) {
  EVP_MD_CTX *c = EVP_MD_CTX_new();
  if (c && EVP_DigestInit_ex(c, EVP_sha256(), NULL) == 1) return (mm_sha256_state *)c;
  EVP_MD_CTX_free(c);
  hash_failed(err, "begin");
  return NULL;
}

bool mm_sha256_add(mm_sha256_state *s, const void *data, size_t n, mm_err *err) {
  return EVP_DigestUpdate(context(s), data, n) == 1 || hash_failed(err, "add");
}

bool mm_sha256_end(mm_sha256_state *s, mm_digest *out, mm_err *err) {
  bool ok = !out || EVP_DigestFinal_ex(context(s), out->byte, NULL) == 1;
  EVP_MD_CTX_free(context(s));
  return ok || hash_failed(err, "end");
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
