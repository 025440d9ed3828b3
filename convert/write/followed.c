/* Freeing sources after each part, and the last words of a plan that was made before the headers were there. */
#include "convert/write/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/decode/follow.h"
#include "formats/system/file.h"

static mm_path record_name(const mm_writer *w) {
  mm_path p;
  snprintf(p.text, sizeof p.text, "%s.sources", w->staging_name);
  return p;
}

bool mm_followed_usable(const mm_writer *w, mm_err *err) {
  const mm_path name = record_name(w);
  return mm_staging_begins(w->parent, name.text, MM_FOLLOW_HEAD) ||
         mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(name.text, NULL), "found what no run of this program wrote there; move it away");
}

void mm_followed_forget(const mm_writer *w) {
  if (mm_followed_usable(w, MM_IGNORED)) unlinkat(w->parent, record_name(w).text, 0);
}

bool mm_followed_discardable(const mm_writer *w, mm_err *err) {
  return w->o.followed || mm_follow_discardable(w->plan->hf, w->parent, record_name(w).text, err); /* else mm_followed_begin did */
}

bool mm_followed_begin(mm_writer *w, mm_err *err) {
  const char *name = mm_arena_printf(&w->arena, err, "%s", record_name(w).text);
  if (!name || !mm_runs_check(w, err)) return false; /* a run that is refused makes no record */
  if (w->o.leftover == MM_LEFTOVER_REFUSE && faccessat(w->parent, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
    return mm_fail(err, MM_USAGE, "E_LEFTOVER", mm_at(w->staging, NULL),
                   "found an interrupted conversion; --resume continues it, --restart discards it");
  return mm_follow_begin(w->o.followed->hf, w->parent, name, w->o.leftover == MM_LEFTOVER_RESTART, err);
}

/* ---- freeing ---- */

/* Files with tensors of parts behind `part`, and those of the head, whose zero rows a resumed run finds again. */
static void find_needed(const mm_plan *p, uint32_t part, bool *needed) {
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    if (p->tensor[i].part <= part && strcmp(t->name, "lm_head.weight") != 0) continue;
    for (size_t k = 0; k < (size_t)mm_max(1, t->whole_lead) * t->piece_count; k++) {
      const mm_matrix *x = &p->tensor[i].matrix[k];
      needed[x->weight->file] = true;
      for (unsigned c = 0; c < MM_COMPANIONS; c++)
        if (x->part[c].tensor) needed[x->part[c].tensor->file] = true;
    }
  }
}

bool mm_followed_part_done(mm_writer *w, uint32_t part, mm_err *err) {
  const mm_hf *hf = w->plan->hf;
  if (!mm_follow_frees(hf) || !mm_follow_proven(hf)) return true;
  bool *needed = mm_calloc(hf->file_count, sizeof *needed, err), ok = needed;
  ok = ok && mm_fsync(w->dir, w->staging, true, err); /* the parts' names are as durable as their bytes */
  if (ok) find_needed(w->plan, part, needed);
  for (uint32_t i = 0; ok && i < hf->file_count; i++) {
    bool there = false;
    if (needed[i] || hf->file[i].freed) continue;
    ok = mm_follow_look(hf, i, &there, err) && (!there || mm_follow_free(hf, i, err));
  }
  free(needed);
  return ok;
}

bool mm_followed_end(mm_writer *w, mm_err *err) {
  const mm_hf *hf = w->plan->hf;
  bool there = false;
  for (uint32_t i = 0; mm_follow_frees(hf) && i < hf->file_count; i++) {
    if (!hf->file[i].freed && (!mm_follow_look(hf, i, &there, err) || (there && !mm_follow_free(hf, i, err)))) return false;
  }
  mm_followed_forget(w);
  return true;
}

/* ---- the digest of the plan ---- */

static bool same_files(const mm_plan *a, const mm_plan *b, mm_err *err) {
  bool same = a->part_count == b->part_count && a->pack.source_count == b->pack.source_count;
  for (uint32_t i = 0; same && i < a->part_count; i++)
    for (uint32_t r = 0; same && r < a->pack.tp; r++)
      same = a->part[i].file[r].size == b->part[i].file[r].size && a->part[i].file[r].header_bytes == b->part[i].file[r].header_bytes;
  return same || mm_fail(err, MM_BUG, "E_BUG", mm_at(a->hf->dir, NULL), "found another plan with all headers than without them");
}

/* The plan made again with the sources' sizes and digests; what they decide goes into w->plan. */
static bool plan_again(mm_writer *w, mm_plan *full, mm_err *err) {
  mm_plan *p = w->plan;
  mm_plan_options with = *w->o.followed->plan;
  with.load = NULL, with.placed = &p->pack; /* whatever became of the load file */
  if (!mm_plan_build(full, w->o.followed->hf, &with, err) || !same_files(p, full, err)) return false;
  p->pack.plan = full->pack.plan;
  for (size_t i = 0; i < p->pack.source_count; i++) p->pack.source[i] = full->pack.source[i];
  p->pack.left_out_count = full->pack.left_out_count;
  memcpy(p->pack.left_out, full->pack.left_out, sizeof p->pack.left_out);
  return true;
}

/* Block `b` of an open part, which begins with the header of the plan: proven, then with the new header, and its digest. */
static bool renew_block(int fd, const mm_part *part, uint64_t size, const mm_plan_file *with, uint32_t b, uint8_t *buffer, mm_err *err) {
  const uint64_t at = b * MM_HASH_BLOCK, n = mm_min(MM_HASH_BLOCK, size - at), head = mm_min(n, with->header_bytes - at);
  const mm_file f = {.fd = fd, .size = size};
  if (!mm_file_read(&f, part->file, buffer, n, at, err)) return false;
  const mm_digest old = mm_sha256(buffer, n);
  if (!mm_digest_equal(&old, &part->block[b]))
    return mm_fail(err, MM_IO, "E_CHANGED", mm_at_offset(part->file, NULL, at), "found other bytes than were written");
  memcpy(buffer, (const uint8_t *)with->header + at, head);
  part->block[b] = mm_sha256(buffer, n);
  return mm_pwrite(fd, part->file, buffer, head, at, err);
}

static bool renew_header(mm_writer *w, uint32_t part, uint32_t rank, const mm_plan_file *with, uint8_t *buffer, mm_err *err) {
  mm_part *x = mm_plan_entry(w->plan, part, rank);
  int fd = openat(w->dir, x->file, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return mm_fail_errno(err, mm_at(x->file, NULL), "open", errno);
  bool ok = true;
  for (uint32_t b = 0; ok && b * MM_HASH_BLOCK < with->header_bytes; b++) ok = renew_block(fd, x, with->size, with, b, buffer, err);
  ok = ok && mm_fsync(fd, x->file, false, err);
  x->root = mm_hash_root(x->block, x->block_count);
  return mm_close(fd, x->file, ok ? err : MM_IGNORED) && ok;
}

bool mm_followed_finish(mm_writer *w, mm_err *err) {
  mm_plan *p = w->plan, full = {0};
  if (!mm_follow_await_all(p->hf, err)) return false;
  uint8_t *buffer = mm_calloc(MM_HASH_BLOCK, 1, err);
  bool ok = buffer && plan_again(w, &full, err);
  for (uint32_t i = 0; ok && i < p->part_count; i++)
    for (uint32_t r = 0; ok && r < p->pack.tp; r++)
      ok = !mm_plan_wants(p, i, r) || renew_header(w, i, r, &full.part[i].file[r], buffer, err);
  free(buffer);
  mm_plan_close(&full);
  return ok;
}

/* ---- a target that is there ---- */

bool mm_followed_published(mm_writer *w, mm_digest *mine, mm_err *err) {
  mm_pack made = {0};
  mm_plan full = {0};
  mm_hf *hf = w->o.followed->hf;
  bool ok = true;
  if (mm_pack_open(&made, w->o.target, MM_IGNORED) && mm_follow_made_of(hf, &made)) {
    mm_follow_assume(hf, &made);
    const mm_digest before = w->plan->pack.plan;
    ok = plan_again(w, &full, err);
    *mine = w->plan->pack.plan;
    w->plan->pack.plan = before; /* the journal's, until all headers are there */
    const bool other = ok && !mm_digest_equal(&made.plan, mine), same_cut = mm_pack_same_cut(&made, &w->plan->pack);
    if (other && !w->o.force && same_cut && strcmp(made.quant, w->plan->pack.quant) == 0)
      ok = mm_follow_comparable(hf, err); /* types were guessed */
    if (other) mm_follow_forget(hf);
  }
  mm_plan_close(&full);
  mm_pack_close(&made);
  return ok;
}
