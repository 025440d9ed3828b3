/* Writing the output so that what has the final name is complete: stage, sync, manifest last, rename, sync the parent. */
#include "convert/write/writer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/decode/companion_names.h"
#include "convert/decode/follow.h"
#include "convert/plan/finished.h"
#include "convert/plan/layout_hf.h"
#include "formats/system/file.h"
#include "loader/verify.h"

static bool usage(mm_err *err, const char *path, const char *what) {
  return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path, NULL), "%s", what);
}

/* Sets w->complete when the target, an output of this plan, is proven to be what this run would make. One that is damaged, or of other
 * ranks, is refused unless --force replaces it. A shard leaves the hashing to the run that publishes. */
static bool find_complete(mm_writer *w, bool archived, mm_err *err) {
  mm_err reason = {0};
  w->complete = mm_finished_check(w->plan, w->o.target, archived, w->o.shards == 1, w->o.threads, &reason) &&
                (!w->plan->layout->extras || mm_draft_same(&w->plan->draft.digest, w->o.target, &reason));
  if (!w->complete && w->o.followed) mm_follow_forget(w->o.followed->hf);
  if (w->complete || (w->o.force && (reason.status == MM_INTEGRITY || reason.status == MM_USAGE))) return true;
  *err = reason;
  return false;
}

static bool outside_draft(const mm_writer *w, mm_err *err) {
  const char *dir = w->o.draft ? w->o.draft->dir : NULL;
  const int inside = dir ? mm_lies_in(w->stage.parent, dir) : 0;
  if (inside < 0) return mm_fail_errno(err, mm_at(dir, NULL), "look at the directories above", errno);
  return inside == 0 || usage(err, w->o.target, "found an output that lies in the draft, expected one elsewhere");
}

static bool name_target(mm_writer *w, mm_err *err) {
  mm_staging *s = &w->stage;
  if (!mm_staging_name(s, w->o.target, NULL, err) || !mm_staging_outside(s, w->plan->hf->dir, err) || !outside_draft(w, err)) return false;
  w->staging = s->path;
  w->staging_name = s->name;
  w->parent = s->parent;
  w->journal_name = mm_arena_printf(&w->arena, err, "%s.journal", w->staging_name);
  if (w->o.shards > 1) w->journal_name = mm_arena_printf(&w->arena, err, "%s.journal.%u-%u", w->staging_name, w->o.shard, w->o.shards);
  return w->journal_name;
}

/* Called with what has the target's name recorded before it is judged: what appears later is then known to be somebody else's. It must not
 * be anything that could be lost. compare: also a finished output of this plan with what it should be. */
static bool check_target(mm_writer *w, bool compare, mm_err *err) {
  const char *target = w->o.target;
  if (w->stage.found != MM_TARGET_FULL) return true;
  mm_digest old, mine = w->plan->pack.plan;
  if (w->o.followed && w->o.leftover == MM_LEFTOVER_RESUME && !mm_followed_published(w, &mine, err)) return false;
  mm_err extra = {0};
  bool archived, ours = mm_finished_ours(target, &old, &archived, &extra, err);
  if (err->status != MM_OK) return false;
  bool same = ours && mm_digest_equal(&old, &mine) && archived == (w->o.level > 0);
  const bool resume = w->o.leftover == MM_LEFTOVER_RESUME;
  if (same && resume && !compare) return true;
  if (same && resume && !find_complete(w, archived, err)) return false;
  if (w->complete) return true;
  if (!ours) return usage(err, target, "found a directory that is not empty, expected a converted checkpoint or none");
  if (!w->o.force && resume) return mm_finished_other(w->plan, target, err);
  if (!w->o.force) return usage(err, target, "found a converted checkpoint already there; --force replaces it");
  return extra.status == MM_OK ||
         mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(target, NULL), "found more in it, expected a converted checkpoint alone: %s", extra.text);
}

/* Bytes of the files of a part that no archive of an interrupted run has. */
static uint64_t part_bytes(const mm_writer *w, uint32_t part) {
  uint64_t n = 0;
  for (uint32_t r = 0; r < w->plan->pack.tp; r++)
    if (mm_plan_wants(w->plan, part, r) &&
        faccessat(w->dir, MM_FORMATTED(288, "%s.zst", mm_plan_entry(w->plan, part, r)->file), F_OK, 0) != 0)
      n += w->plan->part[part].file[r].size;
  return n;
}

/* Refuses an output that cannot fit, with its draft and companions. The size of an archive is not known before it is made, and a source may
 * be freed meanwhile: only one part must fit then. */
static bool check_space(mm_writer *w, mm_err *err) {
  const bool alone = w->o.level > 0 || mm_follow_frees(w->plan->hf);
  uint64_t have = 0, whole = alone ? 0 : w->plan->output_bytes + w->plan->draft.bytes;
  for (uint32_t i = 0; alone && i < w->plan->part_count; i++) whole = mm_max(whole, part_bytes(w, i));
  if (!mm_runs_staged(w, &have, err)) return false;
  return mm_staging_capacity(&w->stage, (whole > have ? whole - have : 0) + w->companion_bytes, err);
}

static mm_writer opened(mm_plan *p, const mm_writer_options *o) {
  return (mm_writer){.plan = p, .o = *o, .parent = -1, .dir = -1, .stage = MM_STAGING_NONE, .journal = {.fd = -1, .level = o->level}};
}

bool mm_writer_check(mm_plan *p, const mm_writer_options *o, mm_err *err) {
  mm_writer w = opened(p, o);
  if (!mm_companions_check(p->hf, NULL, err)) return false;
  if (!o->target) return true;
  bool ok = name_target(&w, err) && mm_staging_look(&w.stage, err) && check_target(&w, false, err) && mm_runs_usable(&w, err);
  if (ok) w.stage.dir = openat(w.parent, w.staging_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (p->draft.bytes && o->leftover == MM_LEFTOVER_RESUME) w.o.leftover = MM_LEFTOVER_RESTART; /* its digest is not known */
  ok = ok && mm_runs_check(&w, err) && mm_may_rename(w.parent, w.stage.found == MM_TARGET_ABSENT ? NULL : w.stage.new_name, o->target, err);
  mm_staging_close(&w.stage);
  mm_arena_close(&w.arena);
  return ok;
}

bool mm_writer_open(mm_writer *w, mm_plan *p, const mm_writer_options *o, mm_err *err) {
  *w = opened(p, o);
  pthread_mutex_init(&w->lock, NULL);
  if (!name_target(w, err) || !mm_staging_recover(&w->stage, err) || !mm_staging_look(&w->stage, err) || !check_target(w, true, err))
    return false;
  if (w->complete) return w->o.shards > 1 || mm_runs_remove_done(w, err);
  if (!mm_runs_usable(w, err)) return false;
  w->skip = mm_calloc(p->step_count, sizeof *w->skip, err);
  return w->skip && mm_writer_companions(w, err) && mm_runs_take(w, err) && (!w->o.followed || mm_followed_begin(w, err)) &&
         mm_runs_begin(w, err) && check_space(w, err) && mm_blocks_open(&w->blocks, p, w->dir, w->staging, o->buffers, err) &&
         (o->level == 0 || mm_writer_archive_open(w, err));
}

static void drop_pending(mm_step_entry *e, size_t n) {
  for (size_t i = 0; i < n; i++) free(e[i].put);
  free(e);
}

void mm_writer_close(mm_writer *w, bool keep) {
  bool started = w->journal.fd >= 0;
  mm_blocks_close(&w->blocks);
  mm_journal_close(&w->journal);
  if (!keep && w->dir >= 0 && started && w->o.shards == 1) mm_either_way(mm_runs_remove(w, MM_IGNORED));
  if (w->dir >= 0 && w->dir != w->stage.dir) close(w->dir);
  mm_staging_close(&w->stage);
  drop_pending(w->pending, w->pending_count);
  mm_archive_lanes_close(&w->lanes);
  mm_archive_close(&w->archive);
  free(w->skip);
  free(w->dead);
  pthread_mutex_destroy(&w->lock);
  mm_arena_close(&w->arena);
}

/* Refuses to make a part again whose archive turned out damaged where its plain files do not fit; the archive makes room for them. */
static bool fits_again(mm_writer *w, uint32_t part, mm_err *err) {
  uint64_t have = 0;
  for (uint32_t r = 0; r < w->plan->pack.tp; r++)
    if (mm_plan_wants(w->plan, part, r)) unlinkat(w->dir, MM_FORMATTED(288, "%s.zst", mm_plan_entry(w->plan, part, r)->file), 0);
  const uint64_t whole = part_bytes(w, part);
  return mm_runs_staged(w, &have, err) && mm_staging_capacity(&w->stage, whole > have ? whole - have : 0, err);
}

bool mm_writer_begin_part(mm_writer *w, uint32_t part, bool *finished, mm_err *err) {
  bool resumed = w->journal.step_count + w->journal.block_count > 0;
  *finished = false;
  if (resumed && w->o.level > 0 && !mm_writer_trust_archived(w, part, finished, err)) return false;
  if (*finished) return mm_writer_remove_plain(w, part, err);
  if (resumed && w->o.level > 0 && !fits_again(w, part, err)) return false;
  bool *kept = mm_calloc(w->plan->pack.tp, sizeof *kept, err);
  bool ok = kept && mm_blocks_begin(&w->blocks, part, resumed, kept, err) && (!resumed || mm_writer_trust(w, kept, err));
  free(kept);
  return ok;
}

/* Snapshot, sync the data unless it is, then the record: nothing is journaled before it is durable. */
static bool commit(mm_writer *w, bool synced, mm_err *err) {
  mm_done *done = NULL;
  size_t done_count = 0;
  pthread_mutex_lock(&w->lock);
  mm_step_entry *steps = w->pending;
  size_t count = w->pending_count;
  w->pending = NULL;
  w->pending_count = w->pending_cap = 0;
  w->pending_bytes = 0;
  pthread_mutex_unlock(&w->lock);
  mm_blocks_take_done(&w->blocks, &done, &done_count);
  bool ok = (synced || mm_blocks_sync(&w->blocks, err)) && mm_journal_append(&w->journal, w->plan, steps, count, done, done_count, err);
  free(done);
  drop_pending(steps, count);
  return ok;
}

bool mm_writer_commit(mm_writer *w, mm_err *err) { return w->blocks.plan == NULL || w->pending_count == 0 || commit(w, false, err); }

bool mm_writer_dead_rows(mm_writer *w, const uint32_t *row, size_t count, mm_err *err) {
  pthread_mutex_lock(&w->lock);
  const bool ok = MM_GROW(w->dead, &w->dead_cap, w->dead_count + count, err);
  for (size_t i = 0; ok && i < count; i++) w->dead[w->dead_count++] = row[i];
  pthread_mutex_unlock(&w->lock);
  return ok;
}

bool mm_writer_step_done(mm_writer *w, mm_step_entry *e, uint64_t source_bytes, mm_err *err) {
  pthread_mutex_lock(&w->lock);
  bool ok = MM_GROW(w->pending, &w->pending_cap, w->pending_count + 1, err);
  if (ok) {
    w->pending[w->pending_count++] = *e;
    w->pending_bytes += source_bytes;
  } else {
    free(e->put);
  }
  *e = (mm_step_entry){0};
  bool expected = ok && w->pending_bytes >= w->o.commit_bytes && !w->committing;
  w->committing = w->committing || expected;
  pthread_mutex_unlock(&w->lock);
  if (!expected) return ok;
  ok = commit(w, false, err);
  pthread_mutex_lock(&w->lock);
  w->committing = false;
  pthread_mutex_unlock(&w->lock);
  return ok;
}

bool mm_writer_end_part(mm_writer *w, mm_err *err) {
  return mm_blocks_end(&w->blocks, w->o.threads, err) && commit(w, true, err) &&
         (w->o.level == 0 || mm_writer_archive_part(w, w->blocks.part, err));
}

bool mm_writer_replace(mm_writer *w, const char *name, const void *text, size_t n, mm_err *err) {
  unlinkat(w->dir, name, 0);
  return mm_write_file_at(w->dir, w->staging, name, text, n, err);
}

static bool write_table(mm_writer *w, mm_err *err) {
  if (w->o.level == 0) return true;
  char *text = mm_archive_text(&w->archive, err);
  bool ok = text && mm_writer_replace(w, MM_ARCHIVE, text, strlen(text), err);
  free(text);
  return ok;
}

/* The manifest, or in the unsharded layout the index. */
static bool write_manifest(mm_writer *w, mm_digest *digest, mm_err *err) {
  if (w->dead_count) qsort(w->dead, w->dead_count, sizeof *w->dead, mm_by_u32);
  w->plan->pack.dead_row = w->dead;
  w->plan->pack.dead_rows = w->dead_count;
  char *text = w->plan->layout->finish(w->plan, err);
  if (text) *digest = mm_sha256(text, strlen(text));
  bool ok = text && mm_writer_replace(w, w->plan->layout->last, text, strlen(text), err);
  free(text);
  w->plan->pack.dead_row = NULL;
  w->plan->pack.dead_rows = 0;
  return ok && mm_fsync(w->dir, w->staging, true, err);
}

const char *mm_writer_part_end(const mm_writer *w, const char *name, unsigned *rank, unsigned *number) {
  const mm_pack *p = &w->plan->pack;
  if (!w->plan->layout->part(name, rank, number) || *rank >= mm_pack_ranks(p) || *number >= p->rank[*rank].part_count) return NULL;
  const char *file = p->rank[*rank].part[*number].file;
  return strncmp(name, file, strlen(file)) == 0 ? name + strlen(file) : NULL;
}

/* True for the files of the directory when it gets its name: w->plan->pack has its companions by now. */
static bool is_expected(const void *ctx, const char *name) {
  const mm_writer *w = ctx;
  const mm_plan *p = w->plan;
  unsigned rank = 0, number = 0;
  const char *end = mm_writer_part_end(w, name, &rank, &number);
  bool expected = (end && strcmp(end, w->o.level > 0 ? ".zst" : "") == 0) || strcmp(name, p->layout->last) == 0 ||
                  (w->o.level > 0 && strcmp(name, MM_ARCHIVE) == 0) || (p->layout->digests && strcmp(name, p->layout->digests) == 0) ||
                  mm_pack_find_file(&p->pack, name);
  for (size_t i = 0; !expected && i < MM_PLAN_TEXTS && p->text[i].name; i++) expected = strcmp(name, p->text[i].name) == 0;
  return expected;
}

/* Removes what a run that came this far before wrote and this one does not: the source may have fewer companions now. */
static bool remove_stale(mm_writer *w, mm_err *err) {
  DIR *d = mm_dir_at(w->dir, w->staging, "list", err);
  if (!d) return false;
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, w->staging, &name, err)) && name)
    if (mm_runs_writes(w, name) && !is_expected(w, name) && !(ok = unlinkat(w->dir, name, 0) == 0)) {
      mm_fail_errno(err, mm_at(mm_path_of(w->staging, name).text, NULL), "remove", errno);
      break;
    }
  closedir(d);
  return ok;
}

/* Refuses to publish what somebody else put into the staging directory. */
static bool check_staged(mm_writer *w, mm_err *err) {
  mm_err extra = {0};
  if (mm_nothing_else(w->staging, is_expected, w, &extra)) return true;
  if (extra.status != MM_INTEGRITY) return *err = extra, false;
  return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(w->staging, NULL), "found what this run did not write; move it away, then --resume: %s",
                 extra.text);
}

bool mm_writer_publish(mm_writer *w, mm_digest *manifest, mm_err *err) {
  if (w->o.followed && !mm_followed_finish(w, err)) return false;
  if (!mm_companions_write(w, err) || !write_table(w, err) || !remove_stale(w, err) || !mm_hf_unchanged(w->plan->hf, err) ||
      !write_manifest(w, manifest, err) || !check_staged(w, err))
    return false;
  if (!mm_staging_publish(&w->stage, err)) return false;
  mm_journal_close(&w->journal);
  bool ok = mm_runs_forget(w, err);
  if (ok) { /* it has its name: nothing is staged */
    close(w->dir);
    w->dir = w->stage.dir = -1;
  }
  return ok && (!w->o.followed || mm_followed_end(w, err));
}
