/* The companion files of a checkpoint, compared with those of its source. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/decode/companion_names.h"
#include "convert/decode/draft_source.h"
#include "convert/plan/layout_hf.h"
#include "convert/report/exact.h"
#include "formats/system/file.h"

static bool another(const mm_pack *p, const char *name, const char *what, mm_err *err) {
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(mm_path_of(p->dir, name).text, NULL), "%s", what);
}

static bool same_copy(const mm_hf *hf, const mm_pack *p, const mm_pack_file *f, mm_err *err) {
  mm_err reason = {0};
  size_t n = 0;
  const mm_path path = mm_path_of(hf->dir, f->name);
  char *text = mm_file_slurp(path.text, MM_COMPANION_MAX, &n, &reason);
  if (!text && reason.status != MM_BAD_INPUT) return mm_fail_as(err, &reason);
  if (!text && hf->follow) return true; /* it may still come */
  if (!text) return another(p, f->name, "found a companion that this source does not have", err);
  const mm_digest d = mm_sha256(text, n);
  free(text);
  return mm_digest_equal(&d, &f->sha256) || another(p, f->name, "found another file than this source has of that name", err);
}

static bool same_bake(const mm_pack *p, const mm_pack_file *f, mm_bake_fn *bake, mm_err *err) {
  const mm_pack_file *from = mm_pack_find_file(p, "tokenizer.json");
  uint8_t *image = NULL;
  size_t n = 0;
  if (!from) return another(p, f->name, "found it without the tokenizer.json that it is made of", err);
  const mm_path path = mm_path_of(p->dir, from->name);
  bool ok = bake(path.text, p->model.vocab, &from->sha256, &image, &n, err);
  const mm_digest d = mm_sha256(image ? (const void *)image : "", n);
  if (ok && (n != f->size || !mm_digest_equal(&d, &f->sha256)))
    ok = another(p, f->name, "found other tables than those of the tokenizer.json in its directory", err);
  free(image);
  return ok;
}

/* True for files that the layout makes itself, and for those that the plan writes. */
static bool is_made(const mm_plan *plan, const char *name) {
  for (const char *const *made = plan->layout->made; *made; made++)
    if (strcmp(name, *made) == 0) return true;
  return mm_plan_writes(plan, name) || (plan->layout->extras && strcmp(name, MM_DFLASH_FILE) == 0); /* a draft has a source of its own */
}

static bool is_there(const mm_plan *plan, const mm_pack *p, const char *name, mm_err *err) {
  return is_made(plan, name) || faccessat(AT_FDCWD, mm_path_of(plan->hf->dir, name).text, F_OK, AT_SYMLINK_NOFOLLOW) != 0 ||
         mm_pack_find_file(p, name) || another(p, name, "found no such companion, expected that of this source", err);
}

bool mm_companions_same(const mm_plan *plan, const mm_pack *p, mm_bake_fn *bake, const char *baked, mm_err *err) {
  const char *code[MM_COMPANION_CODE];
  size_t count = 0;
  mm_arena names = {0};
  bool ok = mm_companions_code(plan->hf, &names, code, &count, err);
  for (size_t i = 0; ok && i < p->file_count; i++) {
    const mm_pack_file *f = &p->file[i];
    if (plan->layout->extras && strcmp(f->name, baked) == 0)
      ok = !bake || same_bake(p, f, bake, err);
    else if (!is_made(plan, f->name))
      ok = (mm_companions_has(f->name) || mm_code_file(f->name) || another(p, f->name, "found a file that no conversion writes", err)) &&
           same_copy(plan->hf, p, f, err);
  }
  for (size_t i = 0; ok && i < MM_COMPANION_NAMES; i++) ok = is_there(plan, p, mm_companion_name[i], err);
  for (size_t i = 0; ok && i < count; i++) ok = is_there(plan, p, code[i], err);
  mm_arena_close(&names);
  return ok;
}

/* The scheme that a packed draft's matrices are in. */
static bool quant_of(const mm_pack *p, const mm_scheme **quant, mm_err *err) {
  *quant = NULL;
  if (!mm_pack_find_file(p, MM_DFLASH_FILE)) return true;
  mm_dflash *d = mm_calloc(1, sizeof *d, err);
  const bool ok = d && mm_dflash_open(d, p->dir, &p->model, err);
  if (ok) *quant = d->c.quant;
  if (d) mm_dflash_close(d), free(d);
  return ok;
}

bool mm_exact_draft(const mm_plan *plan, const mm_pack *p, const char *from, bool *compared, mm_err *err) {
  static const mm_digest none;
  const mm_pack_file *own = mm_pack_find_file(p, MM_DFLASH_FILE);
  const mm_pack *source = plan->hf->manifest;
  const bool any = from || (source && mm_pack_find_file(source, MM_DFLASH_FILE));
  const mm_scheme *quant;
  mm_draft_source *s = mm_calloc(1, sizeof *s, err);
  mm_digest wanted;
  bool made = false, ok = s && quant_of(p, &quant, err);
  ok = ok && mm_draft_source_find(s, &made, from, any && quant ? quant->name : NULL, source, &plan->pack.model, err) &&
       mm_draft_digest(made ? s : NULL, plan->recipe.nonfinite_zero, source, &wanted, err);
  if (s) mm_draft_source_close(s), free(s);
  *compared = ok && !mm_digest_equal(&wanted, &none);
  if (!*compared) return ok;
  if (!own) return another(p, MM_DFLASH_FILE, "found no draft, expected that of its source", err);
  return mm_digest_equal(&wanted, &own->sha256) ||
         another(p, MM_DFLASH_FILE, "found another draft than its source has; --draft DIR names the one that was packed instead", err);
}
