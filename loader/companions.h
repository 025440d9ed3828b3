/* Checks of a checkpoint's directory other than those of its parts: companions match their digests, there is no other file, and no archive
 * where a checkpoint was expected. */
#ifndef MM_LOADER_COMPANIONS_H
#define MM_LOADER_COMPANIONS_H

#include "formats/pack.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every companion is there in its size: MM_INTEGRITY E_FS_MISSING, E_FS_TYPE, E_SIZE. */
MM_MUST_USE bool mm_companion_sizes(const mm_pack *p, mm_err *err);
/* The directory holds the manifest's files, perhaps their signature, and nothing else (E_EXTRA). */
MM_MUST_USE bool mm_verify_listing(const mm_pack *p, mm_err *err);
/* The same for any list of names. */
MM_MUST_USE bool mm_nothing_else(const char *dir, bool (*listed)(const void *ctx, const char *name), const void *ctx, mm_err *err);
/* The text of the manifest that p was read from (of an unsharded checkpoint: of its digests), read once more; free() it. NULL: it is
 * another one now, MM_IO E_CHANGED, or cannot be read. */
char *mm_manifest_again(const mm_pack *p, size_t *n, mm_err *err);
/* The SHA-256 of that text in hexadecimal: what a conversion's last words give. */
MM_MUST_USE bool mm_manifest_hex(const mm_pack *p, mm_hex *hex, mm_err *err);
/* Reads a companion file, which has the manifest's size and digest (E_DIGEST): *text is malloc'ed, NULL on failure. */
MM_MUST_USE bool mm_verify_companion(const mm_pack *p, const mm_pack_file *f, char **text, mm_err *err);
/* All of them, and the listing. */
MM_MUST_USE bool mm_verify_files(const mm_pack *p, mm_err *err);
/* No directory at all (E_FS_MISSING), a file (E_FS_TYPE), or a Hugging Face checkpoint (E_KIND, and what to do) at `dir`, where a packed
 * one was expected: MM_BAD_INPUT. True where it is none of these. */
MM_MUST_USE bool mm_unpacked_refuse(const char *dir, mm_err *err);
/* The archive in `dir`, where another kind of checkpoint was expected: MM_UNSUPPORTED E_ARCHIVE, and what to do. True where it is none. */
MM_MUST_USE bool mm_archive_refuse(const char *dir, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
