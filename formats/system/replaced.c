/* Replacing a directory: the new one takes the old one's name, and of the old one goes what it held when the run began. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "formats/system/staging.h"

#define LIST_MAX (UINT64_C(64) << 20)
#define KEPT_MAX 1000

static bool no_flags(int reason) { return reason == EINVAL || reason == ENOSYS || reason == EOPNOTSUPP; }

/* ---- the list ---- */

static bool write_list(const mm_staging *s, mm_err *err) {
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  if (!f) return mm_fail_memory(err, n);
  fprintf(f, "%s %" PRIu64 "\n", MM_REPLACED_HEAD, s->old_ino);
  for (size_t i = 0; i < s->old_count; i++) {
    const mm_staged_file *x = &s->old[i];
    fprintf(f, "%" PRIu64 " %" PRIu64 " %" PRId64 " %" PRId64 " %s\n", x->ino, x->size, x->mtime_ns, x->ctime_ns, x->name);
  }
  bool ok = mm_close_text(f, &text) || mm_fail_memory(err, n);
  if (ok) unlinkat(s->parent, s->list, 0);
  ok = ok && mm_write_file_at(s->parent, s->path, s->list, text, n, err) && mm_fsync(s->parent, s->target, true, err);
  free(text);
  return ok;
}

/* A line that cannot be read names nothing that may be removed: it and what follows are left out. */
static bool read_list(mm_staging *s, char *path, mm_err *err) {
  size_t n, cap = 0;
  char *text = mm_file_slurp(path, LIST_MAX, &n, err), *rest = text, *line = text ? strsep(&rest, "\n") : NULL;
  if (!text) return false;
  free(s->old);
  s->old = NULL;
  s->old_count = 0;
  s->old_ino = 0;
  bool ok = line && sscanf(line, MM_REPLACED_HEAD " %" SCNu64, &s->old_ino) == 1;
  while (ok && rest && (line = strsep(&rest, "\n")) && rest) { /* each line ends */
    mm_staged_file x = {0};
    int at = 0;
    if (sscanf(line, "%" SCNu64 " %" SCNu64 " %" SCNd64 " %" SCNd64 " %n", &x.ino, &x.size, &x.mtime_ns, &x.ctime_ns, &at) != 4) break;
    if (!mm_base_name_ok(line + at, strlen(line + at))) break;
    if (!(x.name = mm_arena_strndup(&s->arena, line + at, strlen(line + at), err)) || !MM_GROW(s->old, &cap, s->old_count + 1, err)) {
      free(text);
      return false;
    }
    s->old[s->old_count++] = x;
  }
  free(text);
  return true;
}

/* ---- the old directory ---- */

static bool unchanged(const mm_staged_file *x, const struct stat *st) {
  mm_file_id id = mm_file_id_of(st);
  return S_ISREG(st->st_mode) && id.ino == x->ino && id.size == x->size && id.mtime_ns == x->mtime_ns && id.ctime_ns == x->ctime_ns;
}

/* Renames the old directory to `NAME.kept`, or `NAME.kept-I`, in the target's parent directory. */
static bool keep(const mm_staging *s, const char *name, mm_err *err) {
  char kept[NAME_MAX + 32], text[5 * NAME_MAX];
  for (int i = 1; i < KEPT_MAX; i++) {
    snprintf(kept, sizeof kept, i == 1 ? "%s.kept" : "%s.kept-%d", s->new_name, i);
    int reason = renameat2(s->parent, name, s->parent, kept, RENAME_NOREPLACE) == 0 ? 0 : errno;
    if (no_flags(reason))
      reason = renameat(s->parent, name, s->parent, kept) == 0 ? 0 : errno; /* replaces nothing but an empty directory */
    if (reason == EEXIST || reason == ENOTEMPTY || reason == ENOTDIR) continue;
    if (reason != 0) return mm_fail_errno(err, mm_at(s->target, NULL), "keep what was added to", reason);
    snprintf(text, sizeof text, "what is not of the replaced checkpoint was kept, in \"%s\" next to it", MM_ESCAPED(4 * NAME_MAX, kept));
    mm_staging_note(s->target, text);
    return true;
  }
  return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(s->target, NULL), "found %d directories named .kept next to it", KEPT_MAX - 1);
}

/* Removes from the directory `name`, open as fd, the files that are listed and have not been altered, then the directory if it is empty;
 * otherwise the directory is kept under another name. */
static bool remove_old(const mm_staging *s, const char *name, int fd, mm_err *err) {
  for (size_t i = 0; i < s->old_count; i++) {
    struct stat st;
    if (fstatat(fd, s->old[i].name, &st, AT_SYMLINK_NOFOLLOW) != 0 || !unchanged(&s->old[i], &st)) continue;
    if (unlinkat(fd, s->old[i].name, 0) != 0 && errno != ENOENT)
      return mm_fail_errno(err, mm_at(name, NULL), "remove the old checkpoint", errno);
  }
  if (!mm_fsync(fd, s->path, true, err)) return false;
  if (unlinkat(s->parent, name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
    if (errno != ENOTEMPTY && errno != EEXIST) return mm_fail_errno(err, mm_at(name, NULL), "remove the old checkpoint", errno);
    if (!keep(s, name, err)) return false;
  }
  if (!mm_fsync(s->parent, s->target, true, err)) return false; /* the list goes once it is not needed */
  if (unlinkat(s->parent, s->list, 0) != 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(s->list, NULL), "remove", errno);
  return mm_fsync(s->parent, s->target, true, err);
}

/* The directory of this name when it is the one that the list is of, locked; -1 with no error when it is not. */
static bool open_old(const mm_staging *s, const char *name, int *fd, mm_err *err) {
  struct stat st;
  *fd = openat(s->parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (*fd < 0) return errno == ENOENT || errno == ENOTDIR || errno == ELOOP || mm_fail_errno(err, mm_at(s->target, NULL), "open", errno);
  bool it = fstat(*fd, &st) == 0 && st.st_ino == s->old_ino, locked = !it || flock(*fd, LOCK_EX | LOCK_NB) == 0;
  int reason = errno;
  if (it && (locked || mm_no_locks(reason))) return true;
  close(*fd);
  *fd = -1;
  return !it || mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(s->target, NULL), "found another run at work on the checkpoint to be replaced");
}

/* Overlay file systems rename no directory of a lower layer, as a container's image has it. */
static bool not_renamed(const mm_staging *s, mm_status status, const char *what, int reason, mm_err *err) {
  if (reason != EXDEV) return mm_fail_errno(err, mm_at(s->target, NULL), what, reason);
  return mm_fail(
      err, status, "E_OUTPUT", mm_at(s->target, NULL),
      "found a directory that its file system (an overlay, with it in a lower layer) cannot rename; move it away, which copies it");
}

/* The reason of a rename of the old directory onto one that is not empty, which an overlay of the kernel refuses in any case: EXDEV where
 * it cannot rename the old one at all. */
static int try_rename(const mm_staging *s, const char *onto) {
  const int reason = renameat(s->parent, s->new_name, s->parent, onto) == 0 ? 0 : errno;
  if (reason == 0) renameat(s->parent, onto, s->parent, s->new_name); /* some user emptied it meanwhile */
  return reason;
}

bool mm_staging_may_exchange(const mm_staging *s, const char *own, mm_err *err) {
  struct statfs fs;
  if (s->found != MM_TARGET_FULL || fstatfs(s->parent, &fs) != 0 || fs.f_type != OVERLAYFS_SUPER_MAGIC) return true;
  if (own) { /* other runs are in the staging directory, too */
    if (try_rename(s, s->name) != EXDEV) return true;
    unlinkat(s->dir, own, AT_REMOVEDIR);
    unlinkat(s->parent, s->name, AT_REMOVEDIR);
    return not_renamed(s, MM_USAGE, "rename", EXDEV, err);
  }
  const char *probe = MM_FORMATTED(NAME_MAX + 16, "%s.probe", s->name), *in = MM_FORMATTED(NAME_MAX + 16, "%s.probe/in", s->name);
  bool ok = true;
  unlinkat(s->parent, in, AT_REMOVEDIR); /* of a run that was killed here: the caller has the lock alone */
  unlinkat(s->parent, probe, AT_REMOVEDIR);
  if (mkdirat(s->parent, probe, 0700) == 0 && mkdirat(s->parent, in, 0700) == 0) {
    ok = try_rename(s, probe) != EXDEV || not_renamed(s, MM_USAGE, "rename", EXDEV, err);
    unlinkat(s->parent, in, AT_REMOVEDIR);
  }
  unlinkat(s->parent, probe, AT_REMOVEDIR);
  return ok;
}

/* *aside: the name that the old directory has now. */
static bool swap(const mm_staging *s, const char **aside, mm_err *err) {
  *aside = s->name;
  if (renameat2(s->parent, s->name, s->parent, s->new_name, RENAME_EXCHANGE) == 0) return true;
  if (!no_flags(errno)) return not_renamed(s, MM_IO, "publish", errno, err);
  *aside = s->aside;
  if (renameat(s->parent, s->new_name, s->parent, s->aside) != 0) return not_renamed(s, MM_IO, "set aside", errno, err);
  if (renameat(s->parent, s->name, s->parent, s->new_name) == 0) return true;
  mm_fail_errno(err, mm_at(s->target, NULL), "publish", errno);
  renameat(s->parent, s->aside, s->parent, s->new_name);
  return false;
}

bool mm_staging_exchange(mm_staging *s, mm_err *err) {
  int old;
  const char *aside;
  if (!open_old(s, s->new_name, &old, err)) return false;
  if (old < 0)
    return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(s->target, NULL), "found another directory than when this run began; move it away");
  bool ok = write_list(s, err);
  bool swapped = ok && swap(s, &aside, err);
  if (ok && !swapped) unlinkat(s->parent, s->list, 0);
  ok = swapped && mm_fsync(s->parent, s->target, true, err) && remove_old(s, aside, old, err);
  close(old);
  return ok;
}

/* ---- after a crash ---- */

static bool put_back(const mm_staging *s, mm_err *err) {
  if (renameat(s->parent, s->aside, s->parent, s->new_name) != 0) return mm_fail_errno(err, mm_at(s->target, NULL), "put back", errno);
  return (unlinkat(s->parent, s->list, 0) == 0 || mm_fail_errno(err, mm_at(s->list, NULL), "remove", errno)) &&
         mm_fsync(s->parent, s->target, true, err);
}

static bool finish(mm_staging *s, mm_err *err) {
  int fd;
  if (!open_old(s, s->aside, &fd, err)) return false;
  if (fd >= 0) {
    bool absent = faccessat(s->parent, s->new_name, F_OK, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT;
    bool ok = absent ? put_back(s, err) : remove_old(s, s->aside, fd, err);
    close(fd);
    return ok;
  }
  struct stat st;
  if (fstat(s->dir, &st) == 0 && st.st_ino == s->old_ino) return remove_old(s, s->name, s->dir, err);
  return unlinkat(s->parent, s->list, 0) == 0 || errno == ENOENT || mm_fail_errno(err, mm_at(s->list, NULL), "remove", errno);
}

bool mm_staging_recover(mm_staging *s, mm_err *err) {
  char *path = MM_FORMATTED(PATH_MAX + 16, "%s.replaced", s->path);
  if (faccessat(s->parent, s->list, F_OK, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT || mm_fail_errno(err, mm_at(path, NULL), "look at", errno);
  if (!mm_staging_usable(s, err)) return false;
  if (!mm_staging_take(s, false, err)) return false;
  bool ok = read_list(s, path, err) && finish(s, err);
  if (s->made) unlinkat(s->parent, s->name, AT_REMOVEDIR);
  close(s->dir);
  s->dir = -1;
  return ok;
}
