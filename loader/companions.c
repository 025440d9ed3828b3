/* Checks of a checkpoint's directory (companions.h). */
#include "loader/companions.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "formats/system/hub.h"

bool mm_nothing_else(const char *dir, bool (*listed)(const void *ctx, const char *name), const void *ctx, mm_err *err) {
  DIR *d = opendir(dir);
  if (!d) return mm_fail_errno(err, mm_at(dir, NULL), "list", errno);
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, dir, &name, err)) && name) {
    if (listed(ctx, name)) continue;
    ok = mm_fail(err, MM_INTEGRITY, "E_EXTRA", mm_at(mm_path_of(dir, name).text, NULL),
                 "found a file that the manifest does not list, expected none");
    break;
  }
  closedir(d);
  return ok;
}

static bool in_manifest(const void *ctx, const char *name) {
  const mm_pack *p = ctx;
  if (strcmp(name, MM_MANIFEST) == 0 || strcmp(name, MM_SIGNATURE) == 0 || mm_pack_find_file(p, name)) return true;
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (size_t i = 0; i < p->rank[r].part_count; i++)
      if (strcmp(name, p->rank[r].part[i].file) == 0) return true;
  return false;
}

bool mm_verify_listing(const mm_pack *p, mm_err *err) { return mm_nothing_else(p->dir, in_manifest, p, err); }

static bool check_size(const mm_pack *p, const mm_pack_file *file, mm_err *err) {
  mm_err reason = {0};
  mm_file f = MM_FILE_NONE;
  const mm_path path = mm_path_of(p->dir, file->name);
  const bool ok = mm_file_open(&f, path.text, &reason) && mm_size_is(path.text, f.size, file->size, &reason);
  mm_file_close(&f);
  return ok || mm_fail_damaged(err, &reason);
}

bool mm_companion_sizes(const mm_pack *p, mm_err *err) {
  for (size_t i = 0; i < p->file_count; i++)
    if (!check_size(p, &p->file[i], err)) return false;
  return true;
}

char *mm_manifest_again(const mm_pack *p, size_t *n, mm_err *err) {
  const mm_path path = mm_path_of(p->dir, p->target_format ? MM_DIGESTS : MM_MANIFEST);
  const mm_hex hex = mm_digest_hex(&p->text_digest);
  char ending[sizeof MM_MANIFEST_ENDING + MM_HEX_LEN];
  mm_err reason = {0};
  char *text = mm_file_slurp(path.text, MM_MANIFEST_MAX, n, &reason);
  if (!text) return mm_fail_damaged(err, &reason), NULL;
  const size_t tail = (size_t)snprintf(ending, sizeof ending, MM_MANIFEST_ENDING, hex.text);
  if (*n > tail && memcmp(text + *n - tail, ending, tail) == 0) {
    const mm_digest d = mm_sha256(text, *n - tail);
    if (mm_digest_equal(&d, &p->text_digest)) return text;
  }
  free(text);
  mm_fail(err, MM_IO, "E_CHANGED", mm_at(path.text, NULL), "changed since it was opened: found another text than that of sha256 %s",
          hex.text);
  return NULL;
}

bool mm_manifest_hex(const mm_pack *p, mm_hex *hex, mm_err *err) {
  size_t n;
  char *text = mm_manifest_again(p, &n, err);
  if (!text) return false;
  const mm_digest d = mm_sha256(text, n);
  *hex = mm_digest_hex(&d);
  free(text);
  return true;
}

bool mm_verify_companion(const mm_pack *p, const mm_pack_file *f, char **text, mm_err *err) {
  const mm_path path = mm_path_of(p->dir, f->name);
  size_t n = 0;
  mm_err e = {0};
  *text = check_size(p, f, err) ? mm_file_slurp(path.text, f->size, &n, &e) : NULL;
  const mm_digest d = *text ? mm_sha256(*text, n) : (mm_digest){{0}};
  bool ok = *text;
  if (ok && (n != f->size || !mm_digest_equal(&d, &f->sha256)))
    ok = mm_fail(&e, MM_INTEGRITY, "E_DIGEST", mm_at(path.text, NULL), "found other contents, expected the manifest's sha256 %s",
                 mm_digest_hex(&f->sha256).text);
  if (ok) return true;
  free(*text);
  *text = NULL;
  return mm_fail_damaged(err, &e);
}

bool mm_verify_files(const mm_pack *p, mm_err *err) {
  for (size_t i = 0; i < p->file_count; i++) {
    char *text;
    bool ok = mm_verify_companion(p, &p->file[i], &text, err);
    free(text);
    if (!ok) return false;
  }
  return mm_verify_listing(p, err);
}

bool mm_unpacked_refuse(const char *dir, mm_err *err) {
  static const char *const source[] = {"model.safetensors.index.json", "model.safetensors"};
  struct stat at;
  if (access(mm_path_of(dir, MM_MANIFEST).text, F_OK) == 0) return true;
  const bool there = stat(dir, &at) == 0;
  if (!there && errno == ENOENT) return mm_hub_absent(dir, true, err);
  if (there && !S_ISDIR(at.st_mode))
    return mm_fail(err, MM_BAD_INPUT, "E_FS_TYPE", mm_at(dir, NULL), "found a file, expected the directory of a packed checkpoint");
  for (size_t i = 0; i < sizeof source / sizeof *source; i++) {
    if (access(mm_path_of(dir, source[i]).text, F_OK) == 0)
      return mm_fail(err, MM_BAD_INPUT, "E_KIND", mm_at(dir, NULL),
                     "found a Hugging Face checkpoint, expected a packed one; convert it first (minimax-convert SRC -o DIR)");
  }
  return access(mm_path_of(dir, "snapshots").text, F_OK) != 0 || mm_fail(err, MM_BAD_INPUT, "E_KIND", mm_at(dir, NULL),
                                                                         "found a folder of the Hub's cache, expected a packed checkpoint: "
                                                                         "give a snapshot, or convert one (minimax-convert SRC -o DIR)");
}

bool mm_archive_refuse(const char *dir, mm_err *err) {
  const mm_path path = mm_path_of(dir, MM_ARCHIVE);
  return access(path.text, F_OK) != 0 ||
         mm_fail(err, MM_UNSUPPORTED, "E_ARCHIVE", mm_at(dir, NULL),
                 "found an archive of a packed checkpoint; minimax-archive unpack gives the checkpoint back");
}
