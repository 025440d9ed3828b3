/* ECDSA through OpenSSL's EVP, and base64. */
#include "formats/sign.h"

#include <limits.h>
#include <openssl/bio.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/obj_mac.h>
#include <openssl/pem.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"

enum { KEY_FILE_MAX = 1 << 16 };

static bool failed(mm_err *err, const char *what) {
  return mm_fail(err, MM_BUG, "E_SIGN", mm_at(NULL, NULL), "%s failed in the crypto library", what);
}

/* An mm_key is OpenSSL's key under our name; it is never looked into here. */
static EVP_PKEY *pkey(const mm_key *k) { return (EVP_PKEY *)(uintptr_t)k; }

static bool right_kind(const EVP_PKEY *k, bool private_key, const char *path, mm_err *err) {
  char group[64] = "";
  size_t n;
  if (EVP_PKEY_is_a(k, "EC") && EVP_PKEY_get_group_name(k, group, sizeof group, &n) == 1 && strcmp(group, SN_X9_62_prime256v1) == 0)
    return true;
  return mm_fail(err, private_key ? MM_BAD_INPUT : MM_INTEGRITY, "E_KEY", mm_at(path, NULL),
                 "found a key of type %s%s%s, expected EC " SN_X9_62_prime256v1, EVP_PKEY_get0_type_name(k), *group ? " " : "", group);
}

/* One key has one fingerprint, however its file writes it: the curve by its name, the point uncompressed, as OMS's tools write keys. */
static bool one_form(EVP_PKEY *k, mm_err *err) {
  return (EVP_PKEY_set_utf8_string_param(k, OSSL_PKEY_PARAM_EC_ENCODING, OSSL_PKEY_EC_ENCODING_GROUP) == 1 &&
          EVP_PKEY_set_utf8_string_param(k, OSSL_PKEY_PARAM_EC_POINT_CONVERSION_FORMAT,
                                         OSSL_PKEY_EC_POINT_CONVERSION_FORMAT_UNCOMPRESSED) == 1) ||
         failed(err, "reading the key");
}

/* A file that is no key of the wanted kind: where it is the other half of a pair, the line says how to get this one. */
static bool other_half(const char *text, bool private_key, const char *path, mm_err *err) {
  const bool holds_private = strstr(text, "PRIVATE KEY-----") != NULL, holds_public = strstr(text, "BEGIN PUBLIC KEY-----") != NULL;
  if (!private_key && holds_private)
    return mm_fail(err, MM_BAD_INPUT, "E_KEY", mm_at(path, NULL),
                   "found a private key, expected its public key, which this writes: openssl pkey -in %s -pubout -out public.pem",
                   MM_ESCAPED(512, path));
  if (private_key && holds_public && !holds_private)
    return mm_fail(err, MM_BAD_INPUT, "E_KEY", mm_at(path, NULL), "found a public key, expected the private key of the pair in PEM");
  return mm_fail(err, MM_BAD_INPUT, "E_KEY", mm_at(path, NULL), "found other text, expected a %s key in PEM",
                 private_key ? "private (and not encrypted)" : "public");
}

mm_key *mm_key_open(const char *path, bool private_key, mm_err *err) {
  size_t n;
  char *text = mm_file_slurp(path, KEY_FILE_MAX, &n, err);
  if (!text) return NULL;
  BIO *b = BIO_new_mem_buf(text, (int)n);
  char empty[] = ""; /* the password: without one OpenSSL would ask at the terminal */
  EVP_PKEY *k = !b ? NULL : private_key ? PEM_read_bio_PrivateKey(b, NULL, NULL, empty) : PEM_read_bio_PUBKEY(b, NULL, NULL, empty);
  if (!k) other_half(text, private_key, path, err);
  if (k && !(right_kind(k, private_key, path, err) && one_form(k, err))) {
    EVP_PKEY_free(k);
    k = NULL;
  }
  BIO_free(b);
  explicit_bzero(text, n);
  free(text);
  return (mm_key *)k;
}

void mm_key_close(mm_key *k) { EVP_PKEY_free(pkey(k)); }

bool mm_key_fingerprint(const mm_key *k, mm_digest *out, mm_err *err) {
  BIO *b = BIO_new(BIO_s_mem());
  char *text;
  bool ok = (b && PEM_write_bio_PUBKEY(b, pkey(k)) == 1) || failed(err, "writing the public key");
  long n = ok ? BIO_get_mem_data(b, &text) : 0;
  if (ok) *out = mm_sha256(text, (size_t)n);
  BIO_free(b);
  return ok;
}

bool mm_key_sign(const mm_key *k, const void *data, size_t n, uint8_t signature[MM_SIGNATURE_BYTES], size_t *length, mm_err *err) {
  EVP_MD_CTX *c = EVP_MD_CTX_new();
  *length = MM_SIGNATURE_BYTES;
  bool ok = c && EVP_DigestSignInit(c, NULL, EVP_sha256(), NULL, pkey(k)) == 1 && EVP_DigestSign(c, signature, length, data, n) == 1;
  EVP_MD_CTX_free(c);
  return ok || failed(err, "signing");
}

bool mm_key_verify(const mm_key *k, const void *data, size_t n, const uint8_t *signature, size_t length, mm_where where, mm_err *err) {
  EVP_MD_CTX *c = EVP_MD_CTX_new();
  bool ready = c && EVP_DigestVerifyInit(c, NULL, EVP_sha256(), NULL, pkey(k)) == 1;
  bool good = ready && EVP_DigestVerify(c, signature, length, data, n) == 1;
  EVP_MD_CTX_free(c);
  if (!ready) return failed(err, "verifying");
  return good ||
         mm_fail(err, MM_INTEGRITY, "E_SIGNATURE", where, "found another signature, expected that of the given key over this statement");
}

char *mm_base64(const void *data, size_t n, mm_err *err) {
  char *text = n > INT_MAX / 2 ? NULL : mm_calloc(n / 3 * 4 + 5, 1, err);
  if (text) EVP_EncodeBlock((unsigned char *)text, data, (int)n);
  return text ? text : (mm_fail_memory(err, n), NULL);
}

uint8_t *mm_base64_parse(const char *text, size_t *n, mm_where where, mm_err *err) {
  size_t length = strlen(text), padding = 0;
  while (padding < 2 && padding < length && text[length - 1 - padding] == '=') padding++;
  uint8_t *data = length > INT_MAX ? NULL : mm_calloc(length / 4 * 3 + 4, 1, err);
  if (!data) return mm_fail_memory(err, length), NULL;
  int got = EVP_DecodeBlock(data, (const unsigned char *)text, (int)length);
  *n = got < 0 ? 0 : (size_t)got - padding;
  data[*n] = 0;
  char *again =
      got < 0 ? NULL : mm_base64(data, *n, err); /* the library takes spaces and stray bits, which would be a second text of one key */
  bool same = again && strcmp(again, text) == 0;
  free(again);
  if (same) return data;
  free(data);
  mm_fail(err, MM_INTEGRITY, "E_SIGNATURE", where, "found other text, expected base64");
  return NULL;
}
