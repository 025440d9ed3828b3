/* The companion files of an output's weights: the source's tokenizer, licence and code, the config, the model card, the digests. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/decode/companion_names.h"
#include "convert/plan/card.h"
#include "convert/plan/layout_hf.h"
#include "convert/plan/target_format.h"
#include "convert/write/writer.h"
#include "formats/system/file.h"

/* Bytes on the disk that a file of the interrupted run has, which is written anew in its place. */
static uint64_t staged(const mm_writer *w, const char *name) {
  struct stat s;
  const bool kept = name && w->o.leftover == MM_LEFTOVER_RESUME;
  return kept && lstat(mm_path_of(w->staging, name).text, &s) == 0 ? (uint64_t)s.st_blocks * 512 : 0;
}

/* Adds the bytes that the copy takes; a tokenizer's twice, for the image that is made of it. */
static void count_bytes(void *ctx, const char *name, uint64_t size) {
  mm_writer *w = ctx;
  const bool image = strcmp(name, "tokenizer.json") == 0;
  const uint64_t whole = image ? 2 * size : size, have = staged(w, name) + (image ? staged(w, w->o.baked) : 0);
  w->companion_bytes += whole > have ? whole - have : 0;
}

bool mm_writer_companions(mm_writer *w, mm_err *err) { return mm_companions_check(w->plan->hf, &(mm_companion_seen){count_bytes, w}, err); }

/* Writes one companion and lists it in the manifest. */
static bool put_companion(mm_writer *w, const char *name, const void *bytes, size_t n, mm_err *err) {
  mm_pack *pack = &w->plan->pack;
  if (!mm_writer_replace(w, name, bytes, n, err)) return false;
  pack->file[pack->file_count++] = (mm_pack_file){.name = name, .size = n, .sha256 = mm_sha256(bytes, n)};
  return true;
}

/* The model card is not among the digests: it is there to be edited. */
static bool write_texts(mm_writer *w, mm_err *err) {
  for (size_t i = 0; i < MM_PLAN_TEXTS && w->plan->text[i].name; i++) {
    const char *name = w->plan->text[i].name, *text = w->plan->text[i].text;
    bool card = strcmp(name, MM_CARD) == 0;
    if (!(card ? mm_writer_replace(w, name, text, strlen(text), err) : put_companion(w, name, text, strlen(text), err))) return false;
  }
  return true;
}

/* Writes the image that is baked from the tokenizer.json just copied. */
static bool bake_image(mm_writer *w, mm_err *err) {
  const mm_pack *pack = &w->plan->pack;
  const mm_pack_file *source = &pack->file[pack->file_count - 1];
  const mm_path path = mm_path_of(w->staging, source->name);
  uint8_t *image = NULL;
  size_t n = 0;
  bool ok =
      w->o.bake(path.text, pack->model.vocab, &source->sha256, &image, &n, err) && (!image || put_companion(w, w->o.baked, image, n, err));
  free(image);
  return ok;
}

/* A packed source's companions were proven when it was opened; one that has changed since is not copied. */
static bool still_proven(const mm_writer *w, const char *name, const char *path, const char *text, size_t n, mm_err *err) {
  const mm_pack *from = w->plan->hf->manifest;
  const mm_digest d = mm_sha256(text, n);
  const mm_pack_file *file = from ? mm_pack_find_file(from, name) : NULL;
  return !file || mm_digest_equal(&d, &file->sha256) ||
         mm_fail(err, MM_IO, "E_CHANGED", mm_at(path, NULL), "found other contents since the checkpoint was opened");
}

static bool copy_companion(mm_writer *w, const char *name, mm_err *err) {
  size_t n = 0;
  const mm_path path = mm_path_of(w->plan->hf->dir, name);
  char *text = mm_hf_inside(w->plan->hf, path.text, err) ? mm_file_slurp(path.text, MM_COMPANION_MAX, &n, err) : NULL;
  bool ok = text && mm_no_pointer(text, n, path.text, err) && still_proven(w, name, path.text, text, n, err) &&
            put_companion(w, name, text, n, err);
  free(text);
  return ok;
}

static bool copy_code(mm_writer *w, mm_err *err) {
  const char *name[MM_COMPANION_CODE];
  size_t count = 0;
  bool ok = mm_companions_code(w->plan->hf, &w->plan->pack.arena, name, &count, err);
  for (size_t i = 0; ok && i < count; i++) ok = copy_companion(w, name[i], err);
  return ok;
}

static bool copy_companions(mm_writer *w, mm_err *err) {
  mm_pack *pack = &w->plan->pack;
  pack->file_count = 0;
  const size_t most = MM_COMPANION_NAMES + 3 + MM_PLAN_TEXTS + MM_COMPANION_CODE; /* and image, index, draft */
  pack->file = mm_arena_alloc(&pack->arena, most * sizeof *pack->file, err);
  if (!pack->file) return false;
  for (size_t i = 0; i < MM_COMPANION_NAMES; i++) {
    const mm_path path = mm_path_of(w->plan->hf->dir, mm_companion_name[i]);
    if (faccessat(AT_FDCWD, path.text, F_OK, AT_SYMLINK_NOFOLLOW) != 0 || mm_plan_writes(w->plan, mm_companion_name[i])) continue;
    if (!copy_companion(w, mm_companion_name[i], err)) return false;
    if (w->o.bake && w->plan->layout->extras && strcmp(mm_companion_name[i], "tokenizer.json") == 0 && !bake_image(w, err)) return false;
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
  return copy_companions(w, err) && mm_draft_write(w->o.draft, from, &w->plan->draft.digest, w->dir, w->staging, &w->plan->pack, err) &&
         copy_code(w, err) && write_texts(w, err) && write_digests(w, err);
}
