/* The runs that make one output, at the same time or one after the other, by what each leaves: a journal next to the staging directory, and
 * files. A whole run holds the staging directory's lock alone and writes into it. Shard I of N holds that lock together with other shards,
 * and writes into a folder "I-N" of the staging directory, whose lock it holds alone.
 *
 * No run waits for another. A run that takes over parts renames them into its own place: a part is in one place at any time, and what any
 * journal claims of it is hashed again there. So a run may die between any two of these renames. The whole run that publishes takes the
 * parts of all shards. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/decode/companion_names.h"
#include "convert/plan/layout_hf.h"
#include "convert/write/writer.h"
#include "formats/system/file.h"

bool mm_runs_writes(const void *ctx, const char *name) {
  const mm_writer *w = ctx;
  return mm_part_named(name) || mm_companions_has(name) || mm_unsharded_has(name) || strcmp(name, MM_MANIFEST) == 0 ||
         strcmp(name, MM_ARCHIVE) == 0 || strcmp(name, MM_DFLASH_FILE) == 0 || (w->o.baked && strcmp(name, w->o.baked) == 0);
}

bool mm_runs_take(mm_writer *w, mm_err *err) {
  const bool ok = mm_staging_take(&w->stage, w->o.shards > 1, err);
  w->dir = w->stage.dir;
  return ok;
}

/* ---- folders of shards ---- */

typedef struct mm_shard_folder {
  const char *name; /* "I-N" */
  unsigned shards;  /* N */
  mm_path path;
  int fd;
} mm_shard_folder;

/* "I-N", as open_own_folder writes it: N; 0 for any other name. */
static unsigned shard_count_of(const char *name) {
  unsigned shard, shards;
  if (sscanf(name, "%9u-%9u", &shard, &shards) != 2) return 0;
  return strcmp(name, MM_FORMATTED(32, "%u-%u", shard, shards)) == 0 ? shards : 0;
}

/* Calls fn for every shard's folder in the staging directory; stops when it returns false. */
static bool each_folder(mm_writer *w, bool (*fn)(mm_writer *w, const mm_shard_folder *f, void *ctx, mm_err *err), void *ctx, mm_err *err) {
  DIR *d = mm_dir_at(w->stage.dir, w->stage.path, "list", err);
  if (!d) return false;
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, w->stage.path, &name, err)) && name) {
    mm_shard_folder f = {.name = name, .shards = shard_count_of(name), .path = mm_path_of(w->stage.path, name)};
    if (f.shards == 0) continue;
    f.fd = openat(w->stage.dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (f.fd < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP)) continue; /* gone, or no folder of ours */
    ok = f.fd >= 0 ? fn(w, &f, ctx, err) : mm_fail_errno(err, mm_at(f.path.text, NULL), "open", errno);
    if (f.fd >= 0) close(f.fd);
    if (!ok) break;
  }
  closedir(d);
  return ok;
}

static bool count_not_empty(mm_writer *w, const mm_shard_folder *f, void *names, mm_err *err) {
  (void)w;
  const char *name = NULL;
  DIR *d = mm_dir_at(f->fd, f->path.text, "list", err);
  const bool ok = d && mm_dir_next(d, f->path.text, &name, err);
  *(size_t *)names += name != NULL;
  if (d) closedir(d);
  return ok;
}

/* *bare: nothing is staged. A shard that died before its journal was there leaves an empty folder. */
static bool is_bare(mm_writer *w, bool *bare, mm_err *err) {
  size_t names = 0;
  if (!each_folder(w, count_not_empty, &names, err)) return false;
  DIR *d = mm_dir_at(w->stage.dir, w->stage.path, "list", err);
  if (!d) return false;
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, w->stage.path, &name, err)) && name) {
    struct stat s;
    const bool folder = shard_count_of(name) && fstatat(w->stage.dir, name, &s, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(s.st_mode);
    names += !folder;
  }
  closedir(d);
  *bare = names == 0;
  return ok;
}

/* Removes a folder with what conversions wrote in it. name: of the only one to remove; NULL: any. */
static bool remove_folder(mm_writer *w, const mm_shard_folder *f, void *name, mm_err *err) {
  mm_path path = f->path;
  const mm_staging s = {.path = path.text, .dir = f->fd};
  if (name && strcmp(f->name, name) != 0) return true;
  return mm_staging_clear(&s, mm_runs_writes, w, err) && (unlinkat(w->stage.dir, f->name, AT_REMOVEDIR) == 0 || errno == ENOENT ||
                                                          mm_fail_errno(err, mm_at(f->path.text, NULL), "remove", errno));
}

/* Empties the staging directory, which the run has for itself, of what conversions wrote. */
static bool clear(mm_writer *w, mm_err *err) {
  return each_folder(w, remove_folder, NULL, err) && mm_staging_clear(&w->stage, mm_runs_writes, w, err);
}

/* Makes a shard's folder and takes it for this run alone. */
static bool open_own_folder(mm_writer *w, mm_err *err) {
  const char *name = MM_FORMATTED(32, "%u-%u", w->o.shard, w->o.shards);
  w->staging = mm_arena_printf(&w->arena, err, "%s/%s", w->stage.path, name);
  if (!w->staging) return false;
  if (mkdirat(w->stage.dir, name, 0700) != 0 && errno != EEXIST) return mm_fail_errno(err, mm_at(w->staging, NULL), "create", errno);
  w->dir = openat(w->stage.dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (w->dir < 0) return mm_fail_errno(err, mm_at(w->staging, NULL), "open", errno);
  if (flock(w->dir, LOCK_EX | LOCK_NB) == 0 || mm_no_locks(errno))
    return mm_staging_may_exchange(&w->stage, name, err) && mm_fsync(w->stage.dir, w->stage.path, true, err);
  if (errno != EWOULDBLOCK) return mm_fail_errno(err, mm_at(w->staging, NULL), "lock", errno);
  return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(w->staging, NULL), "found another run writing this part of the output");
}

/* ---- journals ---- */

/* The name of a journal of this output behind ".journal", "" or ".I-N"; NULL for other files: "q.partial.journal" may be another output's
 * name. */
static const char *journal_end(const mm_writer *w, const char *name) {
  static const char ending[] = ".journal";
  const size_t n = strlen(w->staging_name);
  if (strncmp(name, w->staging_name, n) != 0 || strncmp(name + n, ending, strlen(ending)) != 0) return NULL;
  const char *end = name + n + strlen(ending);
  return *end == 0 || (*end == '.' && shard_count_of(end + 1)) ? end : NULL;
}

/* N of a shard's journal, 0 of a whole run's. */
static unsigned journal_shards(const mm_writer *w, const char *name) {
  const char *end = journal_end(w, name);
  return *end ? shard_count_of(end + 1) : 0;
}

/* True for the journal of another shard of this run's number. Such shards make other parts and may be at work. */
static bool is_sibling(const mm_writer *w, const char *name) {
  return w->o.shards > 1 && journal_shards(w, name) == w->o.shards && strcmp(name, w->journal_name) != 0;
}

/* Calls fn for every journal of this output, the shards' too; stops when it returns false. */
static bool each_journal(mm_writer *w, bool (*fn)(mm_writer *w, const char *name, mm_err *err), mm_err *err) {
  DIR *d = mm_dir_at(w->parent, w->stage.path, "list the parent of", err);
  if (!d) return false;
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, w->stage.path, &name, err)) && name)
    if (journal_end(w, name) && !(ok = fn(w, name, err))) break;
  closedir(d);
  return ok;
}

static bool refuse_leftover(mm_writer *w, const char *name, mm_err *err) {
  (void)name;
  return mm_fail(err, MM_USAGE, "E_LEFTOVER", mm_at(w->stage.path, NULL),
                 "found an interrupted conversion; --resume continues it, --restart discards it");
}

/* Claims of siblings are of their own parts. */
static bool merge_journal(mm_writer *w, const char *name, mm_err *err) {
  return strcmp(name, w->journal_name) == 0 || is_sibling(w, name) || mm_journal_merge(&w->journal, w->parent, name, w->plan, err);
}

/* Refuses a file that has the name of a journal and is none. */
static bool is_journal(mm_writer *w, const char *name, mm_err *err) {
  return mm_staging_begins(w->parent, name, MM_JOURNAL_HEAD) ||
         mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(name, NULL), "found what no run of this program wrote there; move it away");
}

static bool remove_journal(mm_writer *w, const char *name, mm_err *err) {
  return is_journal(w, name, err) &&
         (unlinkat(w->parent, name, 0) == 0 || errno == ENOENT || mm_fail_errno(err, mm_at(name, NULL), "remove", errno));
}

static bool journal_fits(mm_writer *w, const char *name, mm_err *err) { return mm_journal_fits(w->parent, name, w->plan, w->o.level, err); }

/* True if a run that is at work holds the journal. */
static bool is_held(const mm_writer *w, const char *name) {
  int fd = openat(w->parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  bool held = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (fd >= 0) close(fd);
  return held;
}

/* Once the staging directory has its final name, another run may begin: a locked journal is that run's. */
static bool remove_free_journal(mm_writer *w, const char *name, mm_err *err) {
  return is_held(w, name) || !is_journal(w, name, MM_IGNORED) || remove_journal(w, name, err);
}

bool mm_runs_forget(mm_writer *w, mm_err *err) { return each_journal(w, remove_free_journal, err); }

/* Refuses files in the staging directory that no interrupted run of ours left: each has its journal. */
static bool check_foreign(mm_writer *w, mm_err *err) {
  mm_err leftover = {0};
  bool bare = false;
  if (!is_bare(w, &bare, err)) return false;
  if (bare || (!each_journal(w, refuse_leftover, &leftover) && leftover.status == MM_USAGE)) return true;
  if (leftover.status == MM_OK)
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(w->stage.path, NULL), "found files in it that no interrupted conversion left");
  *err = leftover;
  return false;
}

/* ---- parts that are taken over ---- */

/* A file of a part that this run makes, be it an archive's. */
static bool is_own_part(const void *ctx, const char *name) {
  const mm_writer *w = ctx;
  const mm_plan *p = w->plan;
  unsigned rank = 0, number = 0;
  const char *end = mm_writer_part_end(w, name, &rank, &number);
  if (!end || (*end && strcmp(end, ".zst") != 0)) return false;
  uint32_t part = 0;
  while (p->part[part].stage != rank / p->pack.tp || p->part[part].number != number) part++;
  return part % w->o.shards == w->o.shard;
}

/* Renames the files of another place that which() names into this run's place, or removes them. */
static bool move_files(mm_writer *w, int from, const char *path, bool (*which)(const void *w, const char *name), bool removed,
                       mm_err *err) {
  DIR *d = mm_dir_at(from, path, "list", err);
  if (!d) return false;
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, path, &name, err)) && name) {
    if (!which(w, name) || (removed ? unlinkat(from, name, 0) : renameat(from, name, w->dir, name)) == 0 || errno == ENOENT) continue;
    ok = mm_fail_errno(err, mm_at(mm_path_of(path, name).text, NULL), removed ? "remove" : "take over", errno);
    break;
  }
  closedir(d);
  return ok;
}

/* With --restart the parts are removed. */
static bool take_parts(mm_writer *w, int from, const char *path, mm_err *err) {
  return move_files(w, from, path, is_own_part, w->o.leftover == MM_LEFTOVER_RESTART, err);
}

/* A folder of shards of another number, or for a whole run of any: it is empty then, since all parts are that run's. */
static bool take_folder(mm_writer *w, const mm_shard_folder *f, void *ctx, mm_err *err) {
  (void)ctx;
  if (f->shards == w->o.shards) return true;
  if (!take_parts(w, f->fd, f->path.text, err)) return false;
  return w->o.shards > 1 || (mm_fsync(w->dir, w->staging, true, err) && remove_folder(w, f, NULL, err));
}

/* ---- a shard begins ---- */

/* Refuses a shard if a run of other options left work, unless it has ended and --restart discards that; and while a run is at work of
 * another number of shards, since both make the same parts. */
static bool check_other(mm_writer *w, const char *name, mm_err *err) {
  mm_err reason = {0};
  const bool fits = journal_fits(w, name, &reason), own = strcmp(name, w->journal_name) == 0;
  if (!fits && (w->o.leftover != MM_LEFTOVER_RESTART || reason.status != MM_USAGE)) return *err = reason, false;
  if (!fits && !journal_shards(w, name) && !mm_followed_discardable(w, err)) return false;
  if (own || !is_held(w, name)) return true;
  if (!fits) return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(name, NULL), "found another run writing this output with other options");
  return is_sibling(w, name) ||
         mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(name, NULL), "found a running --part with another N, expected N = %u", w->o.shards);
}

/* Discards what runs of other options left. Shards that start together with --restart all do this, in any order: nobody writes these files.
 * A sibling's own --restart discards what that sibling left. */
static bool discard_other(mm_writer *w, const char *name, mm_err *err) {
  mm_err reason = {0};
  if (strcmp(name, w->journal_name) == 0 || is_sibling(w, name) || journal_fits(w, name, &reason)) return true;
  if (reason.status != MM_USAGE) return *err = reason, false;
  char *folder = MM_FORMATTED(32, "%s", journal_shards(w, name) ? journal_end(w, name) + 1 : "");
  if (!*folder) mm_followed_forget(w);
  return (*folder ? each_folder(w, remove_folder, folder, err) : move_files(w, w->stage.dir, w->stage.path, mm_runs_writes, true, err)) &&
         remove_journal(w, name, err);
}

/* Opens the shard's own journal: the one that it continues, or a new one; with --restart that has no plan yet, so that after a kill what is
 * not yet discarded can be continued. */
static bool open_own_journal(mm_writer *w, bool absent, mm_err *err) {
  if (w->o.leftover == MM_LEFTOVER_RESUME && !absent) {
    if (mm_journal_resume(&w->journal, w->parent, w->journal_name, w->plan, &absent, err)) return true;
    if (!absent) return false;
    mm_journal_close(&w->journal);
  }
  return mm_journal_create(&w->journal, w->parent, w->journal_name, w->o.leftover == MM_LEFTOVER_RESTART ? NULL : w->plan, err);
}

/* Opens a shard's folder and journal, and adds the parts and claims of other runs of the same options, whole runs or shards of another
 * number: their parts are this one's now. Other runs are looked at before this one's journal is locked and again after: of two that must
 * not meet, one at least sees the other; --restart looks once more when its journal has its plan. */
static bool begin_shard(mm_writer *w, mm_err *err) {
  if (!each_journal(w, check_other, err) || !open_own_folder(w, err)) return false;
  const bool absent = faccessat(w->parent, w->journal_name, F_OK, AT_SYMLINK_NOFOLLOW) != 0, restart = w->o.leftover == MM_LEFTOVER_RESTART;
  if (w->o.leftover == MM_LEFTOVER_REFUSE && !absent) return refuse_leftover(w, NULL, err);
  const mm_staging own = {.path = w->staging, .dir = w->dir};
  if (restart && !mm_staging_clear(&own, mm_runs_writes, w, err)) return false;
  if (!open_own_journal(w, absent, err)) return false;
  bool ok = each_journal(w, check_other, err);
  if (ok && restart)
    ok = each_journal(w, discard_other, err) && mm_journal_head(&w->journal, w->parent, w->plan, err) && each_journal(w, check_other, err);
  if (!ok && absent) remove_journal(w, w->journal_name, MM_IGNORED);
  return ok && (restart || each_journal(w, merge_journal, err)) && take_parts(w, w->stage.dir, w->stage.path, err) &&
         each_folder(w, take_folder, NULL, err);
}

/* ---- a whole run begins ---- */

/* Opens the journal of an interrupted run, adding what the journals of its shards claim, or a new one. */
static bool open_journal(mm_writer *w, mm_err *err) {
  mm_err leftover = {0};
  bool absent = faccessat(w->parent, w->journal_name, F_OK, AT_SYMLINK_NOFOLLOW) != 0, resume = w->o.leftover == MM_LEFTOVER_RESUME;
  const bool none = each_journal(w, refuse_leftover, &leftover);
  w->fresh = !resume || none;
  if (w->o.leftover == MM_LEFTOVER_REFUSE && !none) return *err = leftover, false;
  if (resume && !each_journal(w, journal_fits, err)) return false; /* before there is one of this run */
  if (resume && !absent) {
    w->fresh = false;
    if (mm_journal_resume(&w->journal, w->parent, w->journal_name, w->plan, &absent, err)) return each_journal(w, merge_journal, err);
    if (!absent) return false;
    mm_journal_close(&w->journal);
  }
  if (!resume && !none && !mm_followed_discardable(w, err)) return false;
  if (!resume && (!clear(w, err) || !each_journal(w, remove_journal, err))) return false;
  if (!resume && !w->o.followed) mm_followed_forget(w);
  if (!mm_journal_create(&w->journal, w->parent, w->journal_name, w->plan, err)) return false;
  if (!resume || each_journal(w, merge_journal, err)) return true;
  remove_journal(w, w->journal_name, MM_IGNORED); /* new and empty: the shards can be continued without it */
  mm_journal_close(&w->journal);
  return false;
}

bool mm_runs_usable(mm_writer *w, mm_err *err) {
  return mm_staging_usable(&w->stage, err) && each_journal(w, is_journal, err) && mm_followed_usable(w, err);
}

bool mm_runs_check(mm_writer *w, mm_err *err) {
  return (w->stage.dir < 0 || check_foreign(w, err)) &&
         (w->o.leftover == MM_LEFTOVER_RESTART ||
          each_journal(w, w->o.leftover == MM_LEFTOVER_RESUME ? journal_fits : refuse_leftover, err));
}

bool mm_runs_begin(mm_writer *w, mm_err *err) {
  if (!check_foreign(w, err)) return false;
  return w->o.shards > 1 ? begin_shard(w, err) : open_journal(w, err) && each_folder(w, take_folder, NULL, err);
}

static uint64_t staged_in(const mm_writer *w, int dir) {
  uint64_t n = 0;
  struct stat s;
  for (uint32_t r = 0; r < w->plan->pack.tp; r++)
    for (uint32_t i = 0; i < w->plan->part_count; i++)
      if (mm_plan_wants(w->plan, i, r) && fstatat(dir, mm_plan_entry(w->plan, i, r)->file, &s, AT_SYMLINK_NOFOLLOW) == 0)
        n += (uint64_t)s.st_blocks * 512;
  if (w->o.level == 0 && fstatat(dir, MM_DFLASH_FILE, &s, AT_SYMLINK_NOFOLLOW) == 0) n += (uint64_t)s.st_blocks * 512;
  return n;
}

static bool add_staged(mm_writer *w, const mm_shard_folder *f, void *bytes, mm_err *err) {
  (void)err;
  *(uint64_t *)bytes += staged_in(w, f->fd);
  return true;
}

bool mm_runs_staged(mm_writer *w, uint64_t *bytes, mm_err *err) {
  *bytes = staged_in(w, w->stage.dir);
  return each_folder(w, add_staged, bytes, err);
}

bool mm_runs_remove(mm_writer *w, mm_err *err) {
  if (!clear(w, err) || !each_journal(w, remove_journal, err)) return false;
  mm_followed_forget(w);
  return unlinkat(w->parent, w->staging_name, AT_REMOVEDIR) == 0 || mm_fail_errno(err, mm_at(w->stage.path, NULL), "remove", errno);
}

bool mm_runs_remove_done(mm_writer *w, mm_err *err) {
  mm_err reason = {0};
  if (!mm_runs_usable(w, MM_IGNORED)) return true; /* files of others are not in the way of a finished output */
  bool bare = true, journals = !each_journal(w, refuse_leftover, &reason);
  if (!journals && faccessat(w->parent, w->staging_name, F_OK, AT_SYMLINK_NOFOLLOW) != 0) return true;
  if (!mm_runs_take(w, err)) return false;
  reason = (mm_err){0};
  if (!each_journal(w, journal_fits, &reason)) {
    if (reason.status != MM_USAGE) *err = reason;
    return reason.status == MM_USAGE;
  }
  if (!journals && !is_bare(w, &bare, err)) return false;
  return !bare || mm_runs_remove(w, err);
}
