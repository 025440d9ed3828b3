/* Comparing a finished output with the plan, and hashing it. */
#include "convert/plan/finished.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/decode/companion_names.h"
#include "convert/plan/card.h"
#include "convert/plan/layout_hf.h"
#include "convert/plan/target_format.h"
#include "formats/system/file.h"
#include "loader/archive/archive.h"
#include "loader/verify.h"
#include "loader/verify_unsharded.h"

static bool other(const char *dir, const char *option, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_RESUME", mm_at(dir, NULL), "found a finished conversion with another %s; --force replaces it", option);
}

/* Checks that ranks and parts are the plan's. Within a plan, sizes identify parts: they hold the same tensors in the same order. */
static bool same_parts(const mm_plan *p, const mm_pack *found, const char *dir, mm_err *err) {
  for (uint32_t w = 0; w < mm_pack_ranks(&p->pack); w++)
    if ((p->pack.rank[w].part_count > 0) != (found->rank[w].part_count > 0)) return other(dir, "--ranks", err);
  return mm_pack_same_sizes(&p->pack, found) || other(dir, "--part-size", err);
}

static bool check_companions(const mm_pack *p, mm_err *err) {
  bool ok = true;
  for (size_t i = 0; ok && i < p->file_count; i++) {
    char *text = NULL;
    ok = mm_verify_companion(p, &p->file[i], &text, err);
    free(text);
  }
  return ok;
}

static bool check_packed(const mm_plan *p, const char *dir, bool hash, unsigned threads, mm_err *err) {
  mm_shards s = {0};
  const bool ok = mm_shards_open(&s, dir, err) && same_parts(p, &s.pack, dir, err) &&
                  (!hash || (check_companions(&s.pack, err) && mm_verify_blocks(&s, threads, err)));
  mm_shards_close(&s);
  return ok;
}

static bool read_archived(const void *ctx, const mm_part *part, uint64_t at, void *to, uint64_t n, mm_err *err) {
  const mm_archive *a = ctx;
  for (size_t i = 0; i < a->part_count; i++)
    if (strcmp(a->part[i].part->file, part->file) == 0) return mm_archive_read_part(&a->part[i], a->pack.dir, at, to, n, err);
  return mm_fail(err, MM_INTEGRITY, "E_ARCHIVE", mm_at(a->pack.dir, NULL), "found no %s", part->file);
}

static bool read_file(const void *ctx, const mm_part *part, uint64_t at, void *to, uint64_t n, mm_err *err) {
  const mm_path path = mm_path_of(ctx, part->file);
  mm_file f = MM_FILE_NONE;
  const bool ok = mm_file_open(&f, path.text, err) && mm_file_read(&f, path.text, to, n, at, err);
  mm_file_close(&f);
  return ok;
}

static bool check_archive(const mm_plan *p, const char *dir, bool hash, unsigned threads, mm_err *err) {
  mm_archive a = {0};
  mm_archive_lanes lanes = {0};
  const mm_stored stored = {read_archived, &a};
  bool ok = mm_archive_open(&a, dir, err) && same_parts(p, &a.pack, dir, err) &&
            (!hash || (mm_archive_lanes_open(&lanes, threads, err) && check_companions(&a.pack, err)));
  for (size_t i = 0; ok && hash && i < a.part_count; i++) ok = mm_archive_prove_part(&a.part[i], dir, &lanes, err);
  mm_archive_lanes_close(&lanes);
  ok = ok && (!hash || !p->gives || p->gives(p, dir, &stored, threads, err));
  mm_archive_close(&a);
  return ok;
}

/* The file has these bytes at its start; `size` in all. */
static bool starts_with(const char *dir, const char *name, const void *bytes, size_t n, uint64_t size, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  const mm_path path = mm_path_of(dir, name);
  char *there = mm_calloc(n, 1, err);
  const bool ok = there && mm_file_open(&f, path.text, err) && mm_size_is(path.text, f.size, size, err) &&
                  mm_file_read(&f, path.text, there, n, 0, err) &&
                  (memcmp(there, bytes, n) == 0 || mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at(path.text, NULL),
                                                           "found other bytes than the plan has, expected the same"));
  mm_file_close(&f);
  free(there);
  return ok;
}

/* Checks every byte against the digests file in the directory. */
static bool hash_unsharded(const char *dir, unsigned threads, mm_err *err) {
  mm_pack digests = {0};
  size_t seen = 0;
  bool ok = mm_digests_open(&digests, dir, err) && mm_unsharded_blocks(&digests, UINT32_MAX, 0, threads, &seen, err);
  mm_pack_close(&digests);
  return ok;
}

static bool check_unsharded(const mm_plan *p, const char *dir, bool hash, unsigned threads, mm_err *err) {
  char *index = p->layout->finish(p, err);
  bool ok = index && starts_with(dir, MM_INDEX_NAME, index, strlen(index), strlen(index), err);
  free(index);
  for (size_t i = 0; ok && i < MM_PLAN_TEXTS && p->text[i].name; i++)
    ok = strcmp(p->text[i].name, MM_CARD) == 0 ||
         starts_with(dir, p->text[i].name, p->text[i].text, strlen(p->text[i].text), strlen(p->text[i].text), err);
  for (uint32_t i = 0; ok && i < p->part_count; i++) {
    const mm_plan_file *f = &p->part[i].file[0];
    ok = starts_with(dir, mm_plan_entry(p, i, 0)->file, f->header, f->header_bytes, f->size, err);
  }
  return ok && (!hash || hash_unsharded(dir, threads, err));
}

static bool has_manifest(const mm_plan *p) { return strcmp(p->layout->last, MM_MANIFEST) == 0; }

bool mm_finished_check(const mm_plan *p, const char *dir, bool archived, bool hash, unsigned threads, mm_err *err) {
  const mm_stored stored = {read_file, dir};
  bool ok = !has_manifest(p) ? check_unsharded(p, dir, hash, threads, err)
            : archived       ? check_archive(p, dir, hash, threads, err)
                             : check_packed(p, dir, hash, threads, err);
  if (!ok && err->status == MM_BAD_INPUT) err->status = MM_INTEGRITY; /* an output's file that is absent or no file */
  return ok && (archived || !hash || !p->gives || p->gives(p, dir, &stored, threads, err));
}

/* The options of a cut; --attn-tp where it was given. */
static const char *cut_text(const mm_pack *p, char out[128]) {
  char attn[32] = "";
  if (p->attn_tp) snprintf(attn, sizeof attn, " --attn-tp %u", p->attn_tp);
  snprintf(out, 128, "--tp %u%s --ep %u --pp %u --tp-align %s", p->tp, attn, p->ep, p->pp, mm_align_word(p->tp_align));
  return out;
}

bool mm_finished_has_text(const mm_pack *is, const mm_plan_text *t) {
  const mm_pack_file *f = mm_pack_find_file(is, t->name);
  const mm_digest d = mm_sha256(t->text, strlen(t->text));
  return f && mm_digest_equal(&f->sha256, &d);
}

/* Of a finished output and a plan with the same cut and recipe, what differs. */
static const char *what_differs(const mm_pack *is, const mm_plan *p) {
  const mm_pack *own = &p->pack;
  const char *key;
  if (!mm_pack_same_sources(is, own)) return "source";
  if (has_manifest(p) && !mm_model_same(&is->model, &own->model, &key)) return "config.json";
  if (!mm_pack_same_version(is, own)) return "version of this program";
  if (strcmp(is->tool, own->tool) != 0) return "quantization of the source";
  if (!mm_pack_same_places(is, own)) return "--place";
  for (size_t i = 0; i < MM_PLAN_TEXTS && p->text[i].name; i++)
    if (strcmp(p->text[i].name, MM_CARD) != 0 && !mm_finished_has_text(is, &p->text[i])) return "config.json or version of this program";
  return mm_pack_same_sizes(is, own) ? "version of this program" : "--part-size";
}

bool mm_finished_other(const mm_plan *p, const char *dir, mm_err *err) {
  static const char tail[] = "to find it done; --force replaces it";
  const mm_where at = mm_at(dir, NULL);
  const mm_pack *own = &p->pack;
  const char *format = p->target_format ? mm_target_format_name(p->target_format) : "none";
  char found[128], expected[128];
  mm_pack is = {0};
  const bool packed = mm_pack_open(&is, dir, MM_IGNORED);
  if (packed != has_manifest(p))
    other(dir, "--layout", err);
  else if (!packed && !mm_digests_open(&is, dir, MM_IGNORED))
    other(dir, "version of this program", err);
  else if (packed && mm_digest_equal(&is.plan, &own->plan))
    other(dir, "--compress", err);
  else if (packed && !mm_pack_same_cut(&is, own))
    mm_fail(err, MM_USAGE, "E_RESUME", at, "found a finished conversion with %s, expected %s %s", cut_text(&is, found),
            cut_text(own, expected), tail);
  else if (strcmp(is.quant, own->quant) != 0)
    mm_fail(err, MM_USAGE, "E_RESUME", at, "found a finished conversion with --quant \"%.300s\", expected \"%.300s\" %s", is.quant,
            own->quant, tail);
  else if (!packed && strcmp(is.target_format, format) != 0)
    mm_fail(err, MM_USAGE, "E_RESUME", at, "found a finished conversion with --dialect %s, expected %s %s", is.target_format, format, tail);
  else
    other(dir, what_differs(&is, p), err);
  mm_pack_close(&is);
  return false;
}

/* ---- an output of any plan ---- */

/* A file that an unsharded checkpoint of ours may hold. */
static bool in_unsharded(const void *ctx, const char *name) {
  (void)ctx;
  return mm_companions_has(name) || mm_unsharded_has(name);
}

/* A file that an archive of this checkpoint holds, be it damaged. */
static bool in_archive(const void *ctx, const char *name) {
  const mm_pack *p = ctx;
  size_t n = strlen(name), end = strlen(".zst");
  bool known =
      strcmp(name, MM_ARCHIVE) == 0 || strcmp(name, MM_MANIFEST) == 0 || strcmp(name, MM_SIGNATURE) == 0 || mm_pack_find_file(p, name);
  for (uint32_t r = 0; !known && r < mm_pack_ranks(p); r++)
    for (size_t i = 0; !known && i < p->rank[r].part_count; i++) {
      const char *file = p->rank[r].part[i].file;
      known = n == strlen(file) + end && strncmp(name, file, n - end) == 0 && strcmp(name + n - end, ".zst") == 0;
    }
  return known;
}

bool mm_finished_ours(const char *path, mm_digest *plan, bool *archived, mm_err *extra, mm_err *err) {
  mm_pack pack = {0};
  mm_err reason = {0};
  *archived = !mm_archive_refuse(path, MM_IGNORED);
  const bool packed = access(mm_path_of(path, MM_MANIFEST).text, F_OK) == 0;
  const bool ours = packed ? mm_pack_open(&pack, path, &reason) : mm_unsharded_plan(path, plan, err);
  if (reason.status == MM_LIMIT || reason.status == MM_IO) *err = reason;
  if (ours && packed && !*archived)
    mm_either_way(mm_verify_listing(&pack, extra));
  else if (ours)
    mm_either_way(mm_nothing_else(path, packed ? in_archive : in_unsharded, &pack, extra));
  if (extra->status == MM_LIMIT || extra->status == MM_IO) *err = *extra;
  if (packed) *plan = pack.plan;
  mm_pack_close(&pack);
  return ours;
}

bool mm_finished_digest(const mm_plan *p, const char *dir, mm_digest *out, mm_err *err) {
  size_t n;
  char *text = mm_file_slurp(mm_path_of(dir, p->layout->last).text, MM_MANIFEST_MAX, &n, err);
  if (!text) return false;
  *out = mm_sha256(text, n);
  free(text);
  return true;
}
