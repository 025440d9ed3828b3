/* Names of companion files. */
#include "convert/decode/companion_names.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/system/file.h"

const char *const mm_companion_name[MM_COMPANION_NAMES] = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "LICENSE-MODEL",
    "LICENSE-CODE",
    "NOTICE",
};

bool mm_companions_has(const char *name) {
  for (size_t i = 0; i < MM_COMPANION_NAMES; i++)
    if (strcmp(name, mm_companion_name[i]) == 0) return true;
  return false;
}

bool mm_code_file(const char *name) {
  size_t n = strlen(name), plain = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
  return n > 3 && n < 128 && plain == n - 3 && strcmp(name + plain, ".py") == 0;
}

bool mm_companions_code(const mm_hf *hf, mm_arena *arena, const char *name[MM_COMPANION_CODE], size_t *count, mm_err *err) {
  *count = 0;
  if (mm_json_type_of(mm_json_get(hf->config, "auto_map")) == MM_JSON_NULL) return true;
  DIR *d = opendir(hf->dir);
  if (!d) return mm_fail_errno(err, mm_at(hf->dir, NULL), "list", errno);
  bool ok;
  const char *found;
  while ((ok = mm_dir_next(d, hf->dir, &found, err)) && found) {
    if (!mm_code_file(found)) continue;
    ok = *count < MM_COMPANION_CODE ||
         mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at(hf->dir, NULL), "found more files of code, expected at most %d", MM_COMPANION_CODE);
    if (!ok || !(ok = (name[*count] = mm_arena_strndup(arena, found, strlen(found), err)) != NULL)) break;
    ++*count;
  }
  closedir(d);
  if (ok) qsort(name, *count, sizeof *name, mm_by_text);
  return ok;
}

static bool can_copy(const mm_hf *hf, const char *name, const mm_companion_seen *seen, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  const mm_path path = mm_path_of(hf->dir, name);
  if (!mm_hf_inside(hf, path.text, err) || !mm_file_open(&f, path.text, err)) return false;
  const uint64_t size = f.size;
  char head[64];
  const size_t n = (size_t)mm_min(size, sizeof head);
  const bool here = mm_file_read(&f, path.text, head, n, 0, err) && mm_no_pointer(head, n, path.text, err);
  mm_file_close(&f);
  if (seen) seen->call(seen->ctx, name, size);
  return here && (size <= MM_COMPANION_MAX ||
                  mm_fail(err, MM_BAD_INPUT, "E_LIMIT", mm_at(path.text, NULL), "found %llu bytes, expected at most %llu",
                          (unsigned long long)size, (unsigned long long)MM_COMPANION_MAX));
}

bool mm_companions_check(const mm_hf *hf, const mm_companion_seen *seen, mm_err *err) {
  const char *code[MM_COMPANION_CODE];
  size_t count = 0;
  mm_arena names = {0};
  bool ok = true;
  for (size_t i = 0; ok && i < MM_COMPANION_NAMES; i++) /* a link to nothing is not absent */
    if (faccessat(AT_FDCWD, mm_path_of(hf->dir, mm_companion_name[i]).text, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
      ok = can_copy(hf, mm_companion_name[i], seen, err);
  ok = ok && mm_companions_code(hf, &names, code, &count, err);
  for (size_t i = 0; ok && i < count; i++) ok = can_copy(hf, code[i], seen, err);
  mm_arena_close(&names);
  return ok;
}
