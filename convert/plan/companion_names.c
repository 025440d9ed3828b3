/* Names of companion files. */
#include "convert/plan/companion_names.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "convert/plan/layout_hf.h"
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

bool mm_plan_writes(const mm_plan *p, const char *name) {
  for (size_t i = 0; i < MM_PLAN_TEXTS && p->text[i].name; i++)
    if (strcmp(p->text[i].name, name) == 0) return true;
  return false;
}
