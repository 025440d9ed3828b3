/* Directories that appear at once. */
#include "formats/system/staging.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "formats/system/file.h"

static void (*listener)(const char *line);

void mm_staging_notes(void (*reported)(const char *line)) { listener = reported; }

void mm_staging_note(const char *path, const char *text) {
  char line[2 * PATH_MAX];
  if (!listener) return;
  snprintf(line, sizeof line, "%s: %s", MM_ESCAPED(PATH_MAX, path), text);
  listener(line);
}

static bool refuse(const mm_staging *s, mm_err *err, const char *what) {
  return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(s->target, NULL), "%s", what);
}

bool mm_staging_name(mm_staging *s, const char *target, const char *word, mm_err *err) {
  char name[PATH_MAX], parent[PATH_MAX];
  s->target = target;
  if (!mm_path_split(target, parent, name, err)) return false;
  if (!mm_base_name_ok(name, strlen(name))) return refuse(s, err, "found no usable directory name, expected that of one to make");
  s->new_name = mm_arena_strndup(&s->arena, name, strlen(name), err);
  s->path = mm_arena_printf(&s->arena, err, "%s/.%s.partial%s%s", parent, name, word ? "-" : "", word ? word : "");
  if (!s->new_name || !s->path) return false;
  s->name = strrchr(s->path, '/') + 1;
  s->list = mm_arena_printf(&s->arena, err, "%s.replaced", s->name);
  s->aside = mm_arena_printf(&s->arena, err, "%s.old", s->name);
  s->mark = mm_arena_printf(&s->arena, err, "%s.mark", s->name);
  if (!s->list || !s->aside || !s->mark) return false;
  s->parent = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return s->parent >= 0 || mm_fail_errno(err, mm_at(parent, NULL), "open", errno);
}

bool mm_has_processes(void) {
  static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const char *n = getenv(names[i]);
    if (n && atoi(n) > 1) return true;
  }
  return false;
}

/* Why processes of one run may be in each other's way. They are no error: srun starts independent ones, too. */
static const char *lack_of_mpi(void) {
#ifdef MM_MPI
  return "";
#else
  return mm_has_processes() ? "; this build has no MPI: processes of mpirun are runs of their own (build with MPI=1, or give each a --part)"
                            : "";
#endif
}

/* ---- refusing a target inside the source or any checkpoint, or around the source ---- */

/* 1 if `is` holds for the open directory or one above it, 0 if not, -1 if that cannot be found out. Takes over fd. */
static int climb(int fd, bool (*is)(const void *ctx, int fd, const struct stat *st), const void *ctx) {
  for (;;) {
    struct stat at, up;
    int next = openat(fd, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int found = fstat(fd, &at) != 0 ? -1 : is(ctx, fd, &at) ? 1 : next < 0 || fstat(next, &up) != 0 ? -1 : mm_same_file(&at, &up) ? 0 : 2;
    close(fd);
    if (found != 2) {
      if (next >= 0) close(next);
      return found;
    }
    fd = next;
  }
}

static bool is_same(const void *what, int fd, const struct stat *st) {
  (void)fd;
  return mm_same_file(what, st);
}

/* 1 if `what` is the open directory or one that holds it, else as climb. Takes over fd. */
static int holds(const struct stat *what, int fd) { return climb(fd, is_same, what); }

/* True if the directory has a list of files of ours: a packed checkpoint's, an unsharded one's or an archive's. */
static bool is_checkpoint(const void *ctx, int dir, const struct stat *st) {
  static const char *const list[][2] = {
      {"manifest.json", "\"minimax-packed\""}, {"minimax-digests.json", "\"minimax-digests\""}, {"archive.json", "\"minimax-archive\""}};
  (void)ctx;
  (void)st;
  bool found = false;
  for (size_t i = 0; i < sizeof list / sizeof *list && !found; i++) {
    char head[4096];
    const int fd = openat(dir, list[i][0], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    const ssize_t n = fd < 0 ? 0 : pread(fd, head, sizeof head, 0);
    if (fd >= 0) close(fd);
    found = n > 0 && memmem(head, (size_t)n, "\"format\"", 8) && memmem(head, (size_t)n, list[i][1], strlen(list[i][1]));
  }
  return found;
}

int mm_in_checkpoint(int parent) {
  const int self = openat(parent, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
  return self < 0 ? -1 : climb(self, is_checkpoint, NULL);
}

bool mm_holds_weights(int dir) {
  const bool weights = faccessat(dir, "model.safetensors.index.json", F_OK, 0) == 0 || faccessat(dir, "model.safetensors", F_OK, 0) == 0;
  return weights && faccessat(dir, "config.json", F_OK, 0) == 0;
}

#define SOURCE_DEPTH 16

/* 1 if the open directory `parent` is, or lies in, the source or a directory of it, since one of these may be mounted elsewhere. Takes
 * over fd, the source's. */
static int lies_in(int parent, int fd, int depth) {
  struct stat at, sub;
  int self = fstat(fd, &at) == 0 ? openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  int found = self < 0 ? -1 : holds(&at, self);
  DIR *d = found == 0 && depth < SOURCE_DEPTH ? fdopendir(fd) : NULL;
  if (!d) {
    close(fd);
    return found;
  }
  const char *name;
  while (found == 0) {
    if (!mm_dir_next(d, "", &name, MM_IGNORED)) found = -1;
    if (found || !name) break;
    if (fstatat(fd, name, &sub, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(sub.st_mode)) continue;
    int next = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (next >= 0) found = lies_in(parent, next, depth + 1);
  }
  const int reason = errno;
  closedir(d);
  errno = reason;
  return found;
}

int mm_lies_in(int parent, const char *dir) {
  int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return fd < 0 ? -1 : lies_in(parent, fd, 0);
}

bool mm_staging_outside(const mm_staging *s, const char *source, mm_err *err) {
  struct stat target;
  int found = 0;
  const int fd = open(source, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* faccessat may answer wrongly: ACLs, filters of system calls */
  if (fd < 0) return mm_fail_errno(err, mm_at(source, NULL), "list", errno);
  if (fstatat(s->parent, s->new_name, &target, AT_SYMLINK_NOFOLLOW) == 0)
    found = holds(&target, fd); /* what exists may hold the source */
  else
    close(fd);
  if (found == 0) found = mm_lies_in(s->parent, source);
  if (found == 1) return refuse(s, err, "found an output that is, holds or lies in the source, expected one elsewhere");
  if (found == 0) found = mm_holds_weights(s->parent) ? 1 : mm_in_checkpoint(s->parent);
  if (found == 1) return refuse(s, err, "found an output inside a checkpoint, expected one elsewhere");
  return found == 0 || mm_fail_errno(err, mm_at(source, NULL), "look at the directories above", errno);
}

/* ---- the target ---- */

/* A directory of another file system, or one that is mounted, cannot be renamed. */
static bool is_mount(const mm_staging *s, const struct stat *st) {
  struct stat up;
  struct statx x;
  if (fstat(s->parent, &up) == 0 && up.st_dev != st->st_dev) return true;
  return statx(s->parent, s->new_name, AT_SYMLINK_NOFOLLOW, 0, &x) == 0 && (x.stx_attributes & STATX_ATTR_MOUNT_ROOT);
}

static bool list_old(mm_staging *s, DIR *d, mm_err *err) {
  size_t cap = 0;
  for (const char *found;;) {
    struct stat st;
    if (!mm_dir_next(d, s->target, &found, err)) return false;
    if (!found) return true;
    s->found = MM_TARGET_FULL;
    if (fstatat(dirfd(d), found, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) continue;
    if (!MM_GROW(s->old, &cap, s->old_count + 1, err)) return false;
    mm_file_id id = mm_file_id_of(&st);
    const char *name = mm_arena_strndup(&s->arena, found, strlen(found), err);
    if (!name) return false;
    s->old[s->old_count++] = (mm_staged_file){name, id.ino, id.size, id.mtime_ns, id.ctime_ns};
  }
}

bool mm_staging_look(mm_staging *s, mm_err *err) {
  struct stat st;
  s->found = MM_TARGET_ABSENT;
  s->old_count = 0;
  if (fstatat(s->parent, s->new_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT || mm_fail_errno(err, mm_at(s->target, NULL), "look at", errno);
  if (!S_ISDIR(st.st_mode)) return refuse(s, err, "found something that is not a directory, expected a new name");
  if (is_mount(s, &st))
    return refuse(s, err, "found a mount point, which cannot be given to another directory; name a directory inside it");
  int fd = openat(s->parent, s->new_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  if (!d) {
    mm_fail_errno(err, mm_at(s->target, NULL), "list", errno);
    if (fd >= 0) close(fd);
    return false;
  }
  s->found = MM_TARGET_EMPTY;
  s->old_ino = st.st_ino;
  free(s->old);
  s->old = NULL;
  bool ok = list_old(s, d, err);
  closedir(d);
  return ok;
}

/* ---- taking and clearing ---- */

bool mm_staging_begins(int parent, const char *name, const char *text) {
  char head[64] = {0}, none[sizeof head] = {0};
  struct stat st;
  const size_t most = mm_min(strlen(text), sizeof head);
  const int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT;
  const ssize_t n = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? pread(fd, head, most, 0) : -1;
  close(fd);
  return n >= 0 && (memcmp(head, text, (size_t)n) == 0 || memcmp(head, none, (size_t)n) == 0);
}

static bool not_a_directory(const mm_staging *s, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(s->path, NULL), "found something that is no directory; move it away");
}

bool mm_staging_usable(const mm_staging *s, mm_err *err) {
  struct stat st;
  if (fstatat(s->parent, s->name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode)) return not_a_directory(s, err);
  return mm_staging_begins(s->parent, s->list, MM_REPLACED_HEAD) ||
         mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(MM_FORMATTED(PATH_MAX + 16, "%s.replaced", s->path), NULL),
                 "found what no run of this program wrote there; move it away");
}

/* The capability to act as the owner of any file; true where that cannot be found out. */
static bool owns_all(void) {
  struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
  struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {{0}};
  return syscall(SYS_capget, &head, data) != 0 || (data[CAP_TO_INDEX(CAP_FOWNER)].effective & CAP_TO_MASK(CAP_FOWNER));
}

/* The attributes of STATX_ATTR_IMMUTABLE and its like; none where the file system has none. */
static uint64_t attributes_of(int at, const char *name) {
  struct statx x;
  return statx(at, name, AT_SYMLINK_NOFOLLOW, 0, &x) == 0 ? x.stx_attributes : 0;
}

bool mm_may_rename(int parent, const char *name, const char *path, mm_err *err) {
  const uint64_t fixed = STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND;
  struct stat up, old;
  const uid_t self = geteuid();
  if (attributes_of(parent, ".") & fixed)
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path, NULL),
                   "found the folder that it is to lie in immutable or append-only (lsattr -d), where nothing can be renamed");
  if (!name || fstatat(parent, name, &old, AT_SYMLINK_NOFOLLOW) != 0) return true;
  const char *kind = S_ISDIR(old.st_mode) ? "directory" : "file";
  const uint64_t of_old = attributes_of(parent, name);
  if (of_old & fixed)
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path, NULL),
                   "found an immutable or append-only %s (lsattr -d), which cannot be replaced", kind);
  if (of_old & STATX_ATTR_MOUNT_ROOT)
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path, NULL), "found a mounted %s, which cannot be replaced", kind);
  if (fstat(parent, &up) != 0 || !(up.st_mode & S_ISVTX) || up.st_uid == self || old.st_uid == self || owns_all()) return true;
  return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path, NULL),
                 "found a %s of another user (uid %u) in a folder with the sticky bit, where you (uid %u) cannot replace it; expected "
                 "your own or a new name",
                 kind, (unsigned)old.st_uid, (unsigned)self);
}

bool mm_staging_take(mm_staging *s, bool shared, mm_err *err) {
  if (!mm_may_rename(s->parent, s->found == MM_TARGET_ABSENT ? NULL : s->new_name, s->target, err)) return false;
  s->made = mkdirat(s->parent, s->name, 0700) == 0;
  if (!s->made && errno != EEXIST) return mm_fail_errno(err, mm_at(s->path, NULL), "create", errno);
  if (!s->made && !mm_may_rename(s->parent, s->name, s->path, err)) return false; /* another user's run left it: it cannot be published */
  int fd = openat(s->parent, s->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return errno == ENOTDIR || errno == ELOOP ? not_a_directory(s, err) : mm_fail_errno(err, mm_at(s->path, NULL), "open", errno);
  struct stat held, named;
  int reason = flock(fd, (shared ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0 ? 0 : errno;
  if (mm_no_locks(reason)) {
    mm_staging_note(s->path, "this file system has no locks: nothing keeps a second run away from this output");
    reason = 0;
  } /* of a run that has just published, the directory has another name now */
  if (reason == 0 &&
      (fstat(fd, &held) != 0 || fstatat(s->parent, s->name, &named, AT_SYMLINK_NOFOLLOW) != 0 || !mm_same_file(&held, &named)))
    reason = EWOULDBLOCK;
  if (reason == 0) {
    s->dir = fd;
    if (shared || mm_staging_may_exchange(s, NULL, err)) return true;
    if (s->made) unlinkat(s->parent, s->name, AT_REMOVEDIR);
    close(fd);
    s->dir = -1;
    return false;
  }
  close(fd);
  if (reason != EWOULDBLOCK) return mm_fail_errno(err, mm_at(s->path, NULL), "lock", reason);
  return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(s->path, NULL), "found another run writing this output%s", lack_of_mpi());
}

static bool remove_ours(const mm_staging *s, const char *name, bool ours, mm_err *err) {
  struct stat st;
  if (fstatat(s->dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
    return errno == ENOENT || mm_fail_errno(err, mm_at(s->path, NULL), "look in", errno);
  const mm_path path = mm_path_of(s->path, name);
  if (!ours || !S_ISREG(st.st_mode))
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path.text, NULL), "found what no run of this program wrote there; move it away");
  return unlinkat(s->dir, name, 0) == 0 || errno == ENOENT || mm_fail_errno(err, mm_at(s->path, NULL), "empty", errno);
}

bool mm_staging_clear(const mm_staging *s, bool (*ours)(const void *ctx, const char *name), const void *ctx, mm_err *err) {
  DIR *d = mm_dir_at(s->dir, s->path, "list", err);
  if (!d) return false;
  bool ok = true, listed;
  const char *name;
  while ((listed = mm_dir_next(d, s->path, &name, err)) && name) ok = remove_ours(s, name, ours(ctx, name), err) && ok;
  ok = ok && listed;
  closedir(d);
  return ok;
}

bool mm_staging_capacity(const mm_staging *s, uint64_t bytes, mm_err *err) {
  struct statvfs v;
  if (fstatvfs(s->dir, &v) != 0) return mm_fail_errno(err, mm_at(s->path, NULL), "ask for free space of", errno);
  uint64_t free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
  if (free_bytes >= bytes) return true;
  return mm_fail(err, MM_IO, "E_SPACE", mm_at(s->target, NULL), "found %llu bytes free, expected %llu", (unsigned long long)free_bytes,
                 (unsigned long long)bytes);
}

/* ---- publishing ---- */

/* Onto an absent name or an empty directory: rename refuses everything else. */
static bool appear(mm_staging *s, mm_err *err) {
  int reason = EINVAL;
  if (s->found == MM_TARGET_ABSENT) reason = renameat2(s->parent, s->name, s->parent, s->new_name, RENAME_NOREPLACE) == 0 ? 0 : errno;
  if (reason == EINVAL || reason == ENOSYS || reason == EOPNOTSUPP)
    reason = renameat(s->parent, s->name, s->parent, s->new_name) == 0 ? 0 : errno;
  if (reason == EEXIST || reason == ENOTEMPTY || reason == ENOTDIR)
    return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(s->target, NULL), "found what was not there when this run began; move it away");
  return reason == 0 || mm_fail_errno(err, mm_at(s->target, NULL), "publish", reason);
}

bool mm_staging_publish(mm_staging *s, mm_err *err) {
  struct stat st;
  mode_t mask = umask(0);
  umask(mask);
  const mode_t group = fstat(s->dir, &st) == 0 ? st.st_mode & S_ISGID : 0; /* as mkdir took it from the parent */
  if (fchmod(s->dir, group | (0777 & ~mask)) != 0) return mm_fail_errno(err, mm_at(s->path, NULL), "set the mode of", errno);
  if (!mm_fsync(s->dir, s->path, true, err)) return false;
  if (s->found == MM_TARGET_FULL) return mm_staging_exchange(s, err);
  return appear(s, err) && mm_fsync(s->parent, s->target, true, err);
}

void mm_staging_close(mm_staging *s) {
  if (s->dir >= 0) close(s->dir);
  if (s->parent >= 0) close(s->parent);
  free(s->old);
  mm_arena_close(&s->arena);
  *s = (mm_staging)MM_STAGING_NONE;
}

/* ---- programs that begin anew each time ---- */

#define MARK_HEAD "The directory of"

/* Clears the files that a killed run left. A directory that is not empty and has no mark belongs to another program and is refused. */
static bool begin_anew(mm_staging *s, bool (*ours)(const void *ctx, const char *name), const void *ctx, mm_err *err) {
  static const char text[] = MARK_HEAD " this name without .mark holds what a run of minimax-archive has not finished.\n";
  if (!mm_staging_begins(s->parent, s->mark, MARK_HEAD))
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(MM_FORMATTED(PATH_MAX + 16, "%s.mark", s->path), NULL),
                   "found what no run of this program wrote there; move it away");
  if (faccessat(s->parent, s->mark, F_OK, AT_SYMLINK_NOFOLLOW) == 0) return mm_staging_clear(s, ours, ctx, err);
  DIR *d = opendir(s->path);
  if (!d) return mm_fail_errno(err, mm_at(s->path, NULL), "list", errno);
  const char *name;
  const bool listed = mm_dir_next(d, s->path, &name, err);
  const bool empty = !name;
  closedir(d);
  if (!listed) return false;
  if (!empty)
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(s->path, NULL), "found files in it that no interrupted run left, expected none");
  return mm_write_file_at(s->parent, s->path, s->mark, text, sizeof text - 1, err);
}

bool mm_staging_open(mm_staging *s, const char *target, const char *word, const char *source, uint64_t bytes,
                     bool (*ours)(const void *ctx, const char *name), const void *ctx, mm_err *err) {
  if (!mm_staging_name(s, target, word, err) || !mm_staging_outside(s, source, err) || !mm_staging_look(s, err)) return false;
  if (s->found == MM_TARGET_FULL) return refuse(s, err, "found something of that name, expected a new one");
  if (!mm_staging_take(s, false, err)) return false;
  if (begin_anew(s, ours, ctx, err) && mm_staging_look(s, err) && /* another run may have published since */
      (s->found != MM_TARGET_FULL || refuse(s, err, "found something of that name, expected a new one")) &&
      mm_staging_capacity(s, bytes, err))
    return true;
  mm_staging_discard(s, ours, ctx);
  return false;
}

void mm_staging_discard(mm_staging *s, bool (*ours)(const void *ctx, const char *name), const void *ctx) {
  struct stat held, named;
  if (s->dir < 0) return;
  bool staged = fstat(s->dir, &held) == 0 && fstatat(s->parent, s->name, &named, AT_SYMLINK_NOFOLLOW) == 0 && mm_same_file(&held, &named);
  bool marked = faccessat(s->parent, s->mark, F_OK, AT_SYMLINK_NOFOLLOW) == 0 && mm_staging_begins(s->parent, s->mark, MARK_HEAD);
  bool empty = !staged || (marked ? mm_staging_clear(s, ours, ctx, MM_IGNORED) : s->made);
  if (empty && marked) unlinkat(s->parent, s->mark, 0);
  if (empty && staged) unlinkat(s->parent, s->name, AT_REMOVEDIR);
  close(s->dir);
  s->dir = -1;
}
