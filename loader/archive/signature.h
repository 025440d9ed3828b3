/* The signature of a packed checkpoint: an OpenSSF Model Signing (OMS v1.0) bundle in the manifest's directory, made and checked with an
 * EC key. Layers, outermost first: a Sigstore bundle (media type v0.3, public key named by its fingerprint), a DSSE v1 envelope, an
 * in-toto Statement v1 whose predicate lists every file with its SHA-256 (serialization "files"). */
#ifndef MM_LOADER_SIGNATURE_H
#define MM_LOADER_SIGNATURE_H

#include "formats/pack.h"
#include "formats/sign.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Proves the directory (files and blocks), then writes DIR/model.sig, replacing an old one at once. */
MM_MUST_USE bool mm_signature_make(const char *dir, const mm_key *key, const char *key_path, unsigned threads, mm_err *err);
/* DIR/model.sig is signed by `key` and lists just the files of p's directory, with the digests of its manifest and companions:
 * MM_INTEGRITY E_SIGNATURE otherwise. Does not read the parts: the manifest, now known to be the signer's, has the digests of their
 * blocks (verify.h). */
MM_MUST_USE bool mm_signature_check(const mm_pack *p, const mm_key *key, mm_err *err);
/* DIR/model.sig as text, which is a bundle's by its media type, whoever signed what: MM_INTEGRITY E_SIGNATURE for anything else, as where
 * the name is a link to another file. free() it. */
char *mm_signature_text(const char *dir, size_t *n, mm_err *err);
/* The same as mm_signature_check on the bundle's text (for fuzzing). */
MM_MUST_USE bool mm_signature_parse(const mm_pack *p, const mm_key *key, const char *text, size_t n, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
