/* Signatures: ECDSA on P-256 over SHA-256 (FIPS 186-5, through OpenSSL's EVP), keys as PEM files, and base64 (RFC 4648) to carry them in
 * text. */
#ifndef MM_FORMATS_SIGN_H
#define MM_FORMATS_SIGN_H

#include "formats/hash.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_key mm_key;

/* Reads a PEM file: a private key (not encrypted), or a public one. MM_BAD_INPUT E_KEY when it is none, or a private one of another type or
 * curve. A public one of another type is MM_INTEGRITY E_KEY: no signature made with it can count here. */
mm_key *mm_key_open(const char *path, bool private_key, mm_err *err);
void mm_key_close(mm_key *k); /* accepts NULL */
/* SHA-256 of the PEM text of the public key: names the key in a signature. */
MM_MUST_USE bool mm_key_fingerprint(const mm_key *k, mm_digest *out, mm_err *err);

#define MM_SIGNATURE_BYTES 72 /* at most: two integers of 32 bytes in DER */
MM_MUST_USE bool mm_key_sign(const mm_key *k, const void *data, size_t n, uint8_t signature[MM_SIGNATURE_BYTES], size_t *length,
                             mm_err *err);
/* MM_INTEGRITY E_SIGNATURE at `where` unless it is the key's signature of the data. */
MM_MUST_USE bool mm_key_verify(const mm_key *k, const void *data, size_t n, const uint8_t *signature, size_t length, mm_where where,
                               mm_err *err);

/* NUL-terminated; free() it. */
char *mm_base64(const void *data, size_t n, mm_err *err);
/* The reverse of exactly what mm_base64 writes, NUL-terminated beyond *n: NULL and MM_INTEGRITY E_SIGNATURE for anything else. free() it.
 */
uint8_t *mm_base64_parse(const char *text, size_t *n, mm_where where, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
