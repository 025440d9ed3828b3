/* The companion files of an output's weights: the source's tokenizer, licence and code, the config, the model card, the digests. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/plan/card.h"
#include "convert/plan/layout_hf.h"
#include "convert/plan/target_format.h"
#include "convert/write/writer.h"
#include "formats/system/file.h"

/* Copied byte for byte when the source has them. */
static const char *const companion[] = {
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
#define COMPANION_MAX (UINT64_C(256) << 20)
#define CODE_FILES    64

bool mm_companions_has(const char *name) {
  for (size_t i = 0; i < sizeof companion / sizeof *companion; i++)
    if (strcmp(name, companion[i]) == 0) return true;
  return false;
}

/* The source's code, where its config names some: all of it, since the named file may import the others. Packed checkpoints keep it for a
 * later --layout hf. Names of `arena`, in order. */
static bool list_code(const mm_hf *hf, mm_arena *arena, const char *name[CODE_FILES], size_t *count, mm_err *err) {
  *count = 0;
  if (mm_json_type_of(mm_json_get(hf->config, "auto_map")) == MM_JSON_NULL) return true;
  DIR *d = opendir(hf->dir);
  if (!d) return mm_fail_errno(err, mm_at(hf->dir, NULL), "list", errno);
  bool ok;
  const char *found;
  while ((ok = mm_dir_next(d, hf->dir, &found, err)) && found) {
    if (!mm_code_file(found)) continue;
    ok = *count < CODE_FILES || mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at(hf->dir, NULL), "found more than %d files of code", CODE_FILES);
    if (!ok || !(ok = (name[*count] = mm_arena_strndup(arena, found, strlen(found), err)) != NULL)) break;
    ++*count;
  }
  closedir(d);
  if (ok) qsort(name, *count, sizeof *name, mm_by_text);
  return ok;
}

static bool can_copy(const mm_hf *hf, const char *name, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  const mm_path path = mm_path_of(hf->dir, name);
  if (!mm_hf_inside(hf, path.text, err) || !mm_file_open(&f, path.text, err)) return false;
  const uint64_t size = f.size;
  mm_file_close(&f);
  return size <= COMPANION_MAX || mm_fail(err, MM_BAD_INPUT, "E_LIMIT", mm_at(path.text, NULL), "found %llu bytes, expected at most %llu",
                                          (unsigned long long)size, (unsigned long long)COMPANION_MAX);
}

/* Refuses at the start what could not be copied at the end. */
bool mm_companions_check(mm_writer *w, mm_err *err) {
  const mm_hf *hf = w->plan->hf;
  const char *code[CODE_FILES];
  size_t count = 0;
  mm_arena names = {0};
  bool ok = true;
  for (size_t i = 0; ok && i < sizeof companion / sizeof *companion; i++)
    if (faccessat(AT_FDCWD, mm_path_of(hf->dir, companion[i]).text, F_OK, AT_SYMLINK_NOFOLLOW) == 0) /* a link to nothing is not absent */
      ok = can_copy(hf, companion[i], err);
  ok = ok && list_code(hf, &names, code, &count, err);
  for (size_t i = 0; ok && i < count; i++) ok = can_copy(hf, code[i], err);
  mm_arena_close(&names);
  return ok;
}

static bool is_written(const mm_plan *p, const char *name) {
  for (size_t i = 0; i < MM_PLAN_TEXTS && p->text[i].name; i++)
    if (strcmp(p->text[i].name, name) == 0) return true;
  return false;
}

/* Writes one companion and lists it in the manifest. */
static bool put_companion(mm_writer *w, const char *name, const void *bytes, size_t n, mm_err *err) {
  mm_pack *pack = &w->plan->pack;
  if (!mm_writer_replace(w, name, bytes, n, err)) return false;
  pack->file[pack->file_count++] = (mm_pack_file){.name = name, .size = n, .sha256 = mm_sha256(bytes, n)};
  return true;
}

/* The model card is not among the digests: it is there to be edited. */
static bool write_texts(mm_writer *w, mm_err *err) {
  const mm_plan *p = w->plan;
  for (size_t i = 0; i < MM_PLAN_TEXTS && p->text[i].name; i++) {
    const char *name = p->text[i].name, *text = p->text[i].text;
    bool card = strcmp(name, MM_CARD) == 0;
    if (!(card ? mm_writer_replace(w, name, text, strlen(text), err) : put_companion(w, name, text, strlen(text), err))) return false;
  }
  return true;
}

/* Writes the image that is baked from the tokenizer.json just copied. */
static bool bake_image(mm_writer *w, mm_err *err) {
  const mm_pack *pack = &w->plan->pack;
  const mm_pack_file *source = &pack->file[pack->file_count - 1];
  char *path = NULL;
  uint8_t *image = NULL;
  size_t n = 0;
  if (asprintf(&path, "%s/%s", w->staging, source->name) < 0) return mm_fail_memory(err, 0);
  bool ok = w->o.bake(path, pack->model.vocab, &source->sha256, &image, &n, err) && (!image || put_companion(w, w->o.baked, image, n, err));
  free(path);
  free(image);
  return ok;
}

/* A packed source's companions were proven when it was opened; one that has changed since is not copied. */
static bool still_proven(const mm_writer *w, const char *name, const char *path, const char *text, size_t n, mm_err *err) {
  const mm_pack *from = w->plan->hf->manifest;
  const mm_digest d = mm_sha256(text, n);
  for (size_t i = 0; from && i < from->file_count; i++) {
    if (strcmp(from->file[i].name, name) != 0) continue;
    if (!mm_digest_equal(&d, &from->file[i].sha256))
      return mm_fail(err, MM_IO, "E_CHANGED", mm_at(path, NULL), "found other contents since the checkpoint was opened");
  }
  return true;
}

static bool copy_companion(mm_writer *w, const char *name, mm_err *err) {
  size_t n = 0;
  const mm_path path = mm_path_of(w->plan->hf->dir, name);
  char *text = mm_hf_inside(w->plan->hf, path.text, err) ? mm_file_slurp(path.text, COMPANION_MAX, &n, err) : NULL;
  bool ok = text && still_proven(w, name, path.text, text, n, err) && put_companion(w, name, text, n, err);
  free(text);
  return ok;
}

static bool copy_code(mm_writer *w, mm_err *err) {
  const char *name[CODE_FILES];
  size_t count = 0;
  bool ok = list_code(w->plan->hf, &w->plan->pack.arena, name, &count, err);
  for (size_t i = 0; ok && i < count; i++) ok = copy_companion(w, name[i], err);
  return ok;
}

static bool copy_companions(mm_writer *w, mm_err *err) {
  mm_pack *pack = &w->plan->pack;
  const size_t most = sizeof companion / sizeof *companion;
  pack->file_count = 0;
  pack->file = mm_arena_alloc(&pack->arena, (most + 3 + MM_PLAN_TEXTS + CODE_FILES) * sizeof *pack->file, err); /* image, index, draft */
  if (!pack->file) return false;
  for (size_t i = 0; i < most; i++) {
    const mm_path path = mm_path_of(w->plan->hf->dir, companion[i]);
    if (faccessat(AT_FDCWD, path.text, F_OK, AT_SYMLINK_NOFOLLOW) != 0 || is_written(w->plan, companion[i])) continue;
    if (!copy_companion(w, companion[i], err)) return false;
    if (w->o.bake && w->plan->layout->extras && strcmp(companion[i], "tokenizer.json") == 0 && !bake_image(w, err)) return false;
  }
  return true;
}

/* The digests of all files but themselves and the card, where the layout has a file of them; the index, which comes last, among them. */
static bool write_digests(mm_writer *w, mm_err *err) {
  mm_pack *pack = &w->plan->pack;
  if (!w->plan->layout->digests) return true;
  char *index = w->plan->layout->finish(w->plan, err), *text = NULL;
  mm_pack_file *f = &pack->file[pack->file_count++];
  *f = (mm_pack_file){.name = MM_INDEX_NAME, .size = index ? strlen(index) : 0};
  if (index) f->sha256 = mm_sha256(index, f->size);
  pack->target_format = mm_arena_printf(&pack->arena, err, "%s", mm_target_format_name(w->plan->target_format));
  bool ok = index && pack->target_format && (text = mm_digests_text(pack, err)) &&
            mm_writer_replace(w, w->plan->layout->digests, text, strlen(text), err);
  free(index);
  free(text);
  return ok;
}

bool mm_companions_write(mm_writer *w, mm_err *err) {
  const mm_pack *from = w->plan->layout->extras ? w->plan->hf->manifest : NULL; /* whose draft is copied, without --draft */
  return copy_companions(w, err) && mm_draft_write(w->o.draft, from, w->dir, w->staging, &w->plan->pack, err) && copy_code(w, err) &&
         write_texts(w, err) && write_digests(w, err);
}

/* ---- a checkpoint that is there, and its source ---- */

static const mm_pack_file *find_file(const mm_pack *p, const char *name) {
  for (size_t i = 0; i < p->file_count; i++)
    if (strcmp(p->file[i].name, name) == 0) return &p->file[i];
  return NULL;
}

static bool another(const mm_pack *p, const char *name, const char *what, mm_err *err) {
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(mm_path_of(p->dir, name).text, NULL), "%s", what);
}

static bool same_copy(const mm_hf *hf, const mm_pack *p, const mm_pack_file *f, mm_err *err) {
  mm_err why = {0};
  size_t n = 0;
  const mm_path path = mm_path_of(hf->dir, f->name);
  char *text = mm_file_slurp(path.text, COMPANION_MAX, &n, &why);
  if (!text && why.status != MM_BAD_INPUT) return mm_fail_as(err, &why);
  if (!text) return another(p, f->name, "found a companion that this source does not have", err);
  const mm_digest d = mm_sha256(text, n);
  free(text);
  return mm_digest_equal(&d, &f->sha256) || another(p, f->name, "found another file than this source has of that name", err);
}

static bool same_bake(const mm_pack *p, const mm_pack_file *f, mm_bake_fn *bake, mm_err *err) {
  const mm_pack_file *from = find_file(p, "tokenizer.json");
  uint8_t *image = NULL;
  size_t n = 0;
  if (!from) return another(p, f->name, "found it without the tokenizer.json that it is made of", err);
  const mm_path path = mm_path_of(p->dir, from->name);
  bool ok = bake(path.text, p->model.vocab, &from->sha256, &image, &n, err);
  const mm_digest d = mm_sha256(image ? (const void *)image : "", n);
  if (ok && (n != f->size || !mm_digest_equal(&d, &f->sha256)))
    ok = another(p, f->name, "found other tables than those of the tokenizer.json beside it", err);
  free(image);
  return ok;
}

/* True for files that the layout makes itself, and for those that the plan writes. */
static bool is_made(const mm_plan *plan, const char *name) {
  for (const char *const *made = plan->layout->made; *made; made++)
    if (strcmp(name, *made) == 0) return true;
  return is_written(plan, name) || (plan->layout->extras && strcmp(name, MM_DFLASH_FILE) == 0); /* a draft has a source of its own */
}

static bool is_there(const mm_plan *plan, const mm_pack *p, const char *name, mm_err *err) {
  return is_made(plan, name) || faccessat(AT_FDCWD, mm_path_of(plan->hf->dir, name).text, F_OK, AT_SYMLINK_NOFOLLOW) != 0 ||
         find_file(p, name) || another(p, name, "found no such companion, expected that of this source", err);
}

bool mm_companions_same(const mm_plan *plan, const mm_pack *p, mm_bake_fn *bake, const char *baked, mm_err *err) {
  const char *code[CODE_FILES];
  size_t count = 0;
  mm_arena names = {0};
  bool ok = list_code(plan->hf, &names, code, &count, err);
  for (size_t i = 0; ok && i < p->file_count; i++) {
    const mm_pack_file *f = &p->file[i];
    if (plan->layout->extras && strcmp(f->name, baked) == 0)
      ok = same_bake(p, f, bake, err);
    else if (!is_made(plan, f->name))
      ok = (mm_companions_has(f->name) || mm_code_file(f->name) || another(p, f->name, "found a file that no conversion writes", err)) &&
           same_copy(plan->hf, p, f, err);
  }
  for (size_t i = 0; ok && i < sizeof companion / sizeof *companion; i++) ok = is_there(plan, p, companion[i], err);
  for (size_t i = 0; ok && i < count; i++) ok = is_there(plan, p, code[i], err);
  mm_arena_close(&names);
  return ok;
}
