/* Directories that appear at once. */
#include "formats/staging.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "formats/file.h"

static bool name_it(mm_staging *s, const char *target, const char *word, mm_err *err) {
  char copy[PATH_MAX], parent[PATH_MAX];
  snprintf(copy, sizeof copy, "%s", target);
  if (!realpath(dirname(copy), parent)) return mm_fail_errno(err, mm_at(target, NULL), "resolve the parent of", errno);
  snprintf(copy, sizeof copy, "%s", target);
  const char *name = basename(copy);
  if (!mm_base_name_ok(name, strlen(name)))
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(target, NULL), "found no usable directory name");
  s->target = target;
  s->new_name = mm_arena_strndup(&s->arena, name, strlen(name), err);
  s->path = mm_arena_printf(&s->arena, err, "%s/.%s.%s.partial", parent, name, word);
  if (!s->new_name || !s->path) return false;
  s->name = strrchr(s->path, '/') + 1;
  s->parent = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (s->parent < 0) return mm_fail_errno(err, mm_at(parent, NULL), "open", errno);
  struct stat st;
  if (fstatat(s->parent, s->new_name, &st, AT_SYMLINK_NOFOLLOW) == 0)
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(target, NULL), "found something of that name, expected a new one");
  return errno == ENOENT || mm_fail_errno(err, mm_at(target, NULL), "look at", errno);
}

static bool take(mm_staging *s, mm_err *err) {
  if (mkdirat(s->parent, s->name, 0700) != 0 && errno != EEXIST) return mm_fail_errno(err, mm_at(s->path, NULL), "create", errno);
  int fd = openat(s->parent, s->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return mm_fail_errno(err, mm_at(s->path, NULL), "open", errno);
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
    s->dir = fd;
    return true;
  }
  int why = errno;
  close(fd);
  if (why != EWOULDBLOCK) return mm_fail_errno(err, mm_at(s->path, NULL), "lock", why);
  return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(s->path, NULL), "found another run writing this output");
}

/* It holds nothing but files that a run of this kind wrote. */
static bool clear(const mm_staging *s, mm_err *err) {
  int fd = openat(s->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  if (!d) {
    mm_fail_errno(err, mm_at(s->path, NULL), "list", errno);
    if (fd >= 0) close(fd);
    return false;
  }
  bool ok = true;
  for (struct dirent *e; ok && (e = readdir(d));)
    if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlinkat(s->dir, e->d_name, 0) != 0)
      ok = mm_fail_errno(err, mm_at(s->path, NULL), "empty", errno);
  closedir(d);
  return ok;
}

static bool check_space(const mm_staging *s, uint64_t bytes, mm_err *err) {
  struct statvfs v;
  if (fstatvfs(s->dir, &v) != 0) return mm_fail_errno(err, mm_at(s->path, NULL), "ask for free space of", errno);
  uint64_t room = (uint64_t)v.f_bavail * v.f_frsize;
  if (room >= bytes) return true;
  return mm_fail(err, MM_IO, "E_SPACE", mm_at(s->target, NULL), "found %llu bytes free, expected %llu", (unsigned long long)room,
                 (unsigned long long)bytes);
}

bool mm_staging_open(mm_staging *s, const char *target, const char *word, uint64_t bytes, mm_err *err) {
  *s = (mm_staging)MM_STAGING_NONE;
  return name_it(s, target, word, err) && take(s, err) && clear(s, err) && check_space(s, bytes, err);
}

bool mm_staging_publish(mm_staging *s, mm_err *err) {
  mode_t mask = umask(0);
  umask(mask);
  if (fchmod(s->dir, 0777 & ~mask) != 0) return mm_fail_errno(err, mm_at(s->path, NULL), "set the mode of", errno);
  if (!mm_fsync(s->dir, s->path, true, err)) return false;
  if (renameat2(s->parent, s->name, s->parent, s->new_name, RENAME_NOREPLACE) != 0)
    return mm_fail_errno(err, mm_at(s->target, NULL), "publish", errno);
  close(s->dir);
  s->dir = -1;
  return mm_fsync(s->parent, s->target, true, err);
}

void mm_staging_close(mm_staging *s) {
  if (s->dir >= 0) {
    clear(s, NULL);
    unlinkat(s->parent, s->name, AT_REMOVEDIR);
    close(s->dir);
  }
  if (s->parent >= 0) close(s->parent);
  mm_arena_close(&s->arena);
  *s = (mm_staging)MM_STAGING_NONE;
}
