/* OMS bundles: building the statement, wrapping it, and checking one against a checkpoint. */
#include "loader/archive/signature.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "formats/system/output.h"
#include "formats/system/pool.h"
#include "loader/companions.h"
#include "loader/verify.h"

#define BUNDLE_TYPE    "application/vnd.dev.sigstore.bundle.v0.3+json"
#define BUNDLE_MARK    "application/vnd.dev.sigstore.bundle"
#define PAYLOAD_TYPE   "application/vnd.in-toto+json"
#define STATEMENT_TYPE "https://in-toto.io/Statement/v1"
#define PREDICATE_TYPE "https://model_signing/signature/v1.0"

/* ---- what is signed ---- */

/* A file of the directory. */
typedef struct resource {
  const char *name;
  mm_digest digest;
  bool part; /* its digest is known to the signer only: the manifest has those of its blocks */
} resource;

typedef struct resources {
  resource *item;
  size_t count;
} resources;

/* Everything in the directory but the signature; the parts come last, without their digests. Free r->item. */
MM_OWN_FRAME static bool list_resources(resources *r, const mm_pack *p, mm_err *err) {
  size_t most = 1 + p->file_count;
  for (uint32_t k = 0; k < mm_pack_ranks(p); k++) most += p->rank[k].part_count;
  if (!(r->item = mm_calloc(most, sizeof *r->item, err))) return false;
  r->item[0].name = MM_MANIFEST;
  size_t n;
  char *text = mm_manifest_again(p, &n, err);
  if (!text) return false;
  r->item[0].digest = mm_sha256(text, n);
  free(text);
  r->count = 1;
  for (size_t i = 0; i < p->file_count; i++) r->item[r->count++] = (resource){p->file[i].name, p->file[i].sha256, false};
  for (uint32_t k = 0; k < mm_pack_ranks(p); k++)
    for (size_t i = 0; i < p->rank[k].part_count; i++) r->item[r->count++] = (resource){.name = p->rank[k].part[i].file, .part = true};
  return true;
}

/* The subject: the digest of the resources' digests in the order in which they are listed. */
static mm_digest root_of(const resources *r) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  for (size_t i = 0; i < r->count; i++) mm_sha256_add(&s, r->item[i].digest.byte, sizeof r->item[i].digest.byte);
  return mm_sha256_end(&s);
}

/* DSSE's pre-authentication encoding of a statement: what the signature is over. free() it. */
static char *encoding_of(const char *statement, size_t n, size_t *length, mm_err *err) {
  char head[96];
  size_t k = (size_t)snprintf(head, sizeof head, "DSSEv1 %zu %s %zu ", strlen(PAYLOAD_TYPE), PAYLOAD_TYPE, n);
  char *out = mm_calloc(k + n, 1, err);
  if (!out) return NULL;
  memcpy(out, head, k);
  memcpy(out + k, statement, n);
  *length = k + n;
  return out;
}

/* ---- making ---- */

static char *statement_text(const char *model, const resources *r, mm_err *err) {
  const mm_digest root = root_of(r);
  mm_json *o = MM_JSON_NEW({"_type", mm_json_new_str(STATEMENT_TYPE)});
  mm_json *subject = mm_json_append(mm_json_put_list(o, "subject"), MM_JSON_NEW({"name", mm_json_new_path(model)}));
  mm_json_set(subject, "digest", MM_JSON_NEW({"sha256", mm_json_new_digest(&root)}));
  mm_json_set(o, "predicateType", mm_json_new_str(PREDICATE_TYPE));
  mm_json *predicate = mm_json_set(o, "predicate", mm_json_new_obj());
  mm_json *s = mm_json_set(predicate, "serialization",
                           MM_JSON_NEW({"method", mm_json_new_str("files")}, {"hash_type", mm_json_new_str("sha256")},
                                       {"allow_symlinks", mm_json_new_bool(false)}));
  mm_json_append(mm_json_put_list(s, "ignore_paths"), mm_json_new_str(MM_SIGNATURE));
  mm_json *list = mm_json_put_list(predicate, "resources");
  for (size_t i = 0; i < r->count; i++)
    mm_json_append(list, MM_JSON_NEW({"name", mm_json_new_str(r->item[i].name)}, {"algorithm", mm_json_new_str("sha256")},
                                     {"digest", mm_json_new_digest(&r->item[i].digest)}));
  return mm_json_text(o, false, err);
}

static mm_json *bundle_json(const char *payload, const char *signature, const mm_digest *fingerprint) {
  mm_json *hint = MM_JSON_NEW({"hint", mm_json_new_digest(fingerprint)}), *envelope = mm_json_new_obj();
  mm_json_append(mm_json_put_list(envelope, "signatures"), MM_JSON_NEW({"sig", mm_json_new_str(signature)}));
  MM_JSON_PUT(envelope, {"payloadType", mm_json_new_str(PAYLOAD_TYPE)}, {"payload", mm_json_new_str(payload)});
  return MM_JSON_NEW({"mediaType", mm_json_new_str(BUNDLE_TYPE)}, {"verificationMaterial", MM_JSON_NEW({"publicKey", hint})},
                     {"dsseEnvelope", envelope});
}

static char *bundle_text(const char *statement, const mm_key *key, mm_err *err) {
  size_t n, length;
  uint8_t raw[MM_SIGNATURE_BYTES];
  mm_digest fingerprint;
  char *signed_text = encoding_of(statement, strlen(statement), &n, err), *signature = NULL, *payload = NULL, *text = NULL;
  if (signed_text && mm_key_sign(key, signed_text, n, raw, &length, err) && mm_key_fingerprint(key, &fingerprint, err) &&
      (signature = mm_base64(raw, length, err)) && (payload = mm_base64(statement, strlen(statement), err)))
    text = mm_json_text(bundle_json(payload, signature, &fingerprint), false, err);
  MM_FREE(payload, signature, signed_text);
  return text;
}

static bool still_there(const char *dir, const struct stat *then, mm_err *err) {
  struct stat now;
  const bool there = stat(dir, &now) == 0;
  if (there && mm_same_file(&now, then)) return true;
  *err = (mm_err){0};
  return mm_fail(err, MM_IO, "E_CHANGED", mm_at(dir, NULL), "changed while it was signed: it is %s",
                 there ? "another directory now" : "not there any more");
}

/* Writes the signature next to the checkpoint's directory, then renames it into the directory, which never holds half a signature. The
 * caller opened `in` (taken over) before it read the files to sign: a checkpoint that has taken the name since does not get the signature.
 */
MM_OWN_FRAME static bool put_signature(const char *dir, int in, const char *key, const char *text, mm_err *err) {
  char real[PATH_MAX], parent[PATH_MAX], staged[NAME_MAX + 32];
  struct stat then;
  mm_output out = MM_OUTPUT_NONE;
  const mm_path to = mm_path_of(dir, MM_SIGNATURE);
  bool ok = (fstat(in, &then) == 0 && realpath(dir, real)) || mm_fail_errno(err, mm_at(dir, NULL), "resolve", errno);
  ok = ok && still_there(real, &then, err);
  if (!ok) {
    close(in);
    return false;
  }
  snprintf(parent, sizeof parent, "%s", real);
  snprintf(staged, sizeof staged, ".%.*s.partial-sign", NAME_MAX, basename(real));
  int at = open(dirname(parent), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (at < 0) {
    close(in);
    return mm_fail_errno(err, mm_at(dir, NULL), "open the directory of", errno);
  }
  static const mm_output_mark mark[] = {{.head = "{", .text = BUNDLE_MARK}}; /* an earlier signature is replaced, whoever made it */
  const mm_output_place place = {.path = to.text, MM_OUTPUT_INPUTS(key), MM_OUTPUT_MARKS(mark)};
  ok = mm_output_open_at(&out, &place, at, staged, in, MM_SIGNATURE, err) && mm_pwrite(out.fd, to.text, text, strlen(text), 0, err) &&
       mm_output_publish(&out, err);
  mm_output_discard(&out);
  return ok || err->status == MM_IO ? still_there(real, &then, err) && ok : false;
}

/* The parts in the order of list_resources. */
typedef struct part_hashing {
  const mm_map **map;
  resource *item;
} part_hashing;

static bool hash_part(void *ctx, size_t i, unsigned worker, mm_err *err) {
  (void)worker;
  (void)err;
  const part_hashing *h = ctx;
  mm_pool_at(h->item[i].name);
  h->item[i].digest = mm_sha256(h->map[i]->data, h->map[i]->size);
  return true;
}

static bool hash_parts(resources *r, const mm_shards *s, unsigned threads, mm_err *err) {
  part_hashing h = {.map = mm_calloc(r->count, sizeof *h.map, err), .item = r->item};
  size_t n = 0;
  if (!h.map) return false;
  while (n < r->count && !h.item->part) h.item++, n++;
  n = 0;
  for (uint32_t k = 0; k < mm_pack_ranks(&s->pack); k++)
    for (size_t i = 0; i < s->pack.rank[k].part_count; i++) h.map[n++] = &s->rank[k].map[i];
  bool ok = mm_pool_run(threads, n, hash_part, &h, err);
  free(h.map);
  return ok;
}

bool mm_signature_make(const char *dir, const mm_key *key, const char *key_path, unsigned threads, mm_err *err) {
  mm_shards s = {0};
  resources r = {0};
  char real[PATH_MAX], *statement = NULL, *bundle = NULL;
  int in = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int reason = errno;
  bool ok = mm_shards_open(&s, dir, err) && (in >= 0 || mm_fail_errno(err, mm_at(dir, NULL), "open", reason));
  ok = ok && mm_verify_files(&s.pack, err) && mm_verify_blocks(&s, threads, err) && list_resources(&r, &s.pack, err) &&
       hash_parts(&r, &s, threads, err) && mm_shards_unchanged(&s, err) &&
       (realpath(dir, real) || mm_fail_errno(err, mm_at(dir, NULL), "resolve", errno));
  if (ok) qsort(r.item, r.count, sizeof *r.item, mm_by_text);
  ok = ok && (statement = statement_text(basename(real), &r, err)) && (bundle = bundle_text(statement, key, err));
  if (ok)
    ok = put_signature(dir, in, key_path, bundle, err);
  else if (in >= 0)
    close(in);
  MM_FREE(bundle, statement, r.item);
  mm_shards_close(&s);
  return ok;
}

/* ---- checking ---- */

/* A string member that has one value only. */
static bool is(const mm_json *o, const char *key, const char *expected, const mm_json_ctx *c, mm_err *err) {
  const char *found;
  if (!mm_json_need_str(o, key, &found, c, err)) return false;
  return strcmp(found, expected) == 0 ||
         MM_REFUSE(c, err, "key \"%s\": found \"%s\", expected \"%s\"", key, MM_ESCAPED(128, found), expected);
}

static bool hex_member(const mm_json *o, const char *key, mm_digest *out, const mm_json_ctx *c, mm_err *err) {
  const char *hex;
  if (!mm_json_need_str(o, key, &hex, c, err)) return false;
  return mm_digest_parse(hex, strlen(hex), out) ||
         MM_REFUSE(c, err, "key \"%s\": found \"%s\", expected %d lower-case hexadecimal digits", key, MM_ESCAPED(128, hex), MM_HEX_LEN);
}

/* Nothing may be left out of what is signed but the signature, and what is no part of a model in a git checkout (OMS 6.2). */
static bool check_ignored(const mm_json *list, const mm_json_ctx *c, mm_err *err) {
  static const char *const may[] = {MM_SIGNATURE, ".git", ".gitignore", ".gitattributes", ".github"};
  for (size_t i = 0; i < mm_json_size(list); i++) {
    const mm_json *j = mm_json_at(list, i);
    bool known = false;
    for (size_t k = 0; k < sizeof may / sizeof *may; k++) known |= mm_json_is(j, may[k]);
    if (!known)
      return MM_REFUSE(c, err, "key \"ignore_paths\": entry %zu: found %s, expected none but %s and git's", i, MM_SHOWN_JSON(j),
                       MM_SIGNATURE);
  }
  return true;
}

static bool check_serialization(const mm_json *predicate, const mm_json_ctx *c, mm_err *err) {
  const mm_json *s = mm_json_need(predicate, "serialization", MM_JSON_OBJ, c, err);
  return s && is(s, "method", "files", c, err) && is(s, "hash_type", "sha256", c, err) &&
         check_ignored(mm_json_get(s, "ignore_paths"), c, err);
}

/* The signed list, with names borrowed from the JSON. */
static bool read_resources(resources *r, const mm_json *list, const mm_json_ctx *c, mm_err *err) {
  if (!(r->item = mm_calloc(mm_json_size(list), sizeof *r->item, err))) return false;
  for (; r->count < mm_json_size(list); r->count++) {
    const mm_json *j = mm_json_at(list, r->count);
    if (mm_json_type_of(j) != MM_JSON_OBJ) return MM_REFUSE(c, err, "key \"resources\": found %s, expected an object", MM_SHOWN_JSON(j));
    if (!is(j, "algorithm", "sha256", c, err) || !mm_json_need_str(j, "name", &r->item[r->count].name, c, err) ||
        !hex_member(j, "digest", &r->item[r->count].digest, c, err))
      return false;
  }
  return true;
}

static bool check_subject(const mm_json *statement, const resources *r, const mm_json_ctx *c, mm_err *err) {
  const mm_json *list = mm_json_need(statement, "subject", MM_JSON_ARR, c, err), *digest;
  const mm_digest root = root_of(r);
  mm_digest claimed;
  if (!list) return false;
  if (mm_json_size(list) != 1) return MM_REFUSE(c, err, "found %zu subjects, expected 1", mm_json_size(list));
  if (!(digest = mm_json_need(mm_json_at(list, 0), "digest", MM_JSON_OBJ, c, err)) || !hex_member(digest, "sha256", &claimed, c, err))
    return false;
  return mm_digest_equal(&root, &claimed) || MM_REFUSE(c, err, "found another digest of the subject, expected that of the resources");
}

static bool not_same(const char *name, bool signed_one, const mm_json_ctx *c, mm_err *err) {
  const char *shown = MM_ESCAPED(512, name);
  return signed_one ? MM_REFUSE(c, err, "found \"%s\" signed, expected it in the checkpoint, too", shown)
                    : MM_REFUSE(c, err, "found \"%s\" in the checkpoint, expected it signed, too", shown);
}

/* Both sorted: the first difference is named. */
static bool same_resources(const resources *found, const resources *expected, const mm_json_ctx *c, mm_err *err) {
  size_t n = mm_min(found->count, expected->count);
  for (size_t i = 0; i < n; i++) {
    const resource *x = &found->item[i], *y = &expected->item[i];
    int order = strcmp(x->name, y->name);
    if (order != 0) return not_same(order < 0 ? x->name : y->name, order < 0, c, err);
    if (!y->part && !mm_digest_equal(&x->digest, &y->digest))
      return MM_REFUSE(c, err, "found other contents signed of \"%s\", expected those of the checkpoint", y->name);
  }
  if (found->count > n) return not_same(found->item[n].name, true, c, err);
  return expected->count == n || not_same(expected->item[n].name, false, c, err);
}

static bool check_statement(const mm_pack *p, const mm_json *s, const mm_json_ctx *c, mm_err *err) {
  resources found = {0}, expected = {0};
  const mm_json *predicate, *list;
  bool ok = is(s, "_type", STATEMENT_TYPE, c, err) && is(s, "predicateType", PREDICATE_TYPE, c, err) &&
            (predicate = mm_json_need(s, "predicate", MM_JSON_OBJ, c, err)) && check_serialization(predicate, c, err) &&
            (list = mm_json_need(predicate, "resources", MM_JSON_ARR, c, err)) && read_resources(&found, list, c, err) &&
            check_subject(s, &found, c, err) && list_resources(&expected, p, err);
  if (ok) {
    qsort(found.item, found.count, sizeof *found.item, mm_by_text);
    qsort(expected.item, expected.count, sizeof *expected.item, mm_by_text);
  }
  ok = ok && same_resources(&found, &expected, c, err);
  free(found.item);
  free(expected.item);
  return ok;
}

/* The envelope's payload once its one signature is proven. free() it. */
static char *open_envelope(const mm_json *bundle, const mm_key *key, const mm_json_ctx *c, size_t *n, mm_err *err) {
  const mm_json *envelope = mm_json_need(bundle, "dsseEnvelope", MM_JSON_OBJ, c, err), *list;
  const char *payload, *signature;
  if (!envelope || !is(envelope, "payloadType", PAYLOAD_TYPE, c, err) || !mm_json_need_str(envelope, "payload", &payload, c, err) ||
      !(list = mm_json_need(envelope, "signatures", MM_JSON_ARR, c, err)))
    return NULL;
  if (mm_json_size(list) != 1) return MM_REFUSE(c, err, "found %zu signatures, expected 1", mm_json_size(list)), NULL;
  if (!mm_json_need_str(mm_json_at(list, 0), "sig", &signature, c, err)) return NULL;
  mm_where where = mm_at(c->file, NULL);
  size_t length, k;
  char *encoding = NULL;
  uint8_t *raw = mm_base64_parse(signature, &length, where, err), *statement = raw ? mm_base64_parse(payload, n, where, err) : NULL;
  bool ok = statement && (encoding = encoding_of((const char *)statement, *n, &k, err)) &&
            mm_key_verify(key, encoding, k, raw, length, where, err);
  free(encoding);
  free(raw);
  if (ok) return (char *)statement;
  free(statement);
  return NULL;
}

/* A signature by another key is refused as that, before it is checked. */
static bool check_key(const mm_json *bundle, const mm_key *key, const mm_json_ctx *c, mm_err *err) {
  const mm_json *material = mm_json_need(bundle, "verificationMaterial", MM_JSON_OBJ, c, err), *named;
  mm_digest hint, ours;
  if (!material || !(named = mm_json_need(material, "publicKey", MM_JSON_OBJ, c, err)) || !hex_member(named, "hint", &hint, c, err) ||
      !mm_key_fingerprint(key, &ours, err))
    return false;
  return mm_digest_equal(&hint, &ours) || MM_REFUSE(c, err, "found a signature of another key, expected one of the given key");
}

static bool check_bundle(const mm_pack *p, const mm_key *key, const mm_json *bundle, const mm_json_ctx *c, mm_err *err) {
  if (mm_json_type_of(bundle) != MM_JSON_OBJ) return MM_REFUSE(c, err, "found %s, expected an object", MM_SHOWN_JSON(bundle));
  if (!is(bundle, "mediaType", BUNDLE_TYPE, c, err) || !check_key(bundle, key, c, err)) return false;
  size_t n;
  char *statement = open_envelope(bundle, key, c, &n, err);
  mm_json *s = statement ? mm_json_parse(statement, n, c->file, err) : NULL;
  bool ok = s && check_statement(p, s, c, err);
  mm_json_free(s);
  free(statement);
  return ok;
}

bool mm_signature_parse(const mm_pack *p, const mm_key *key, const char *text, size_t n, mm_err *err) {
  const mm_path path = mm_path_of(p->dir, MM_SIGNATURE);
  mm_json_ctx c = {path.text, MM_INTEGRITY, "E_SIGNATURE"};
  mm_err e = {0};
  mm_json *bundle = mm_json_parse(text, n, path.text, &e);
  bool ok = bundle && check_bundle(p, key, bundle, &c, &e);
  mm_json_free(bundle);
  return ok || mm_fail_damaged(err, &e);
}

char *mm_signature_text(const char *dir, size_t *n, mm_err *err) {
  const mm_path path = mm_path_of(dir, MM_SIGNATURE);
  mm_err reason = {0};
  char *text = mm_file_slurp(path.text, MM_MANIFEST_MAX, n, &reason);
  if (!text) return mm_fail_damaged(err, &reason), NULL;
  mm_json *bundle = mm_json_parse(text, *n, path.text, &reason);
  const mm_json *type = mm_json_type_of(bundle) == MM_JSON_OBJ ? mm_json_get(bundle, "mediaType") : NULL;
  const bool ok = mm_json_is(type, BUNDLE_TYPE);
  mm_json_free(bundle);
  if (ok) return text;
  free(text);
  if (reason.status == MM_LIMIT)
    mm_fail_as(err, &reason);
  else
    mm_fail(err, MM_INTEGRITY, "E_SIGNATURE", mm_at(path.text, NULL),
            "found a file that is no signature, expected a JSON object of mediaType %s", BUNDLE_TYPE);
  return NULL;
}

bool mm_signature_check(const mm_pack *p, const mm_key *key, mm_err *err) {
  size_t n;
  mm_err e = {0};
  const mm_path path = mm_path_of(p->dir, MM_SIGNATURE);
  char *text = mm_file_slurp(path.text, MM_MANIFEST_MAX, &n, &e);
  bool ok = text && mm_signature_parse(p, key, text, n, &e);
  free(text);
  return ok || mm_fail_damaged(err, &e);
}
