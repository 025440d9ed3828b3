/* Single output files. */
#include "formats/system/output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "formats/system/staging.h"

static bool refuse(const char *path, const char *what, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(path, NULL), "%s", what);
}

/* Renaming over the file that the program's own stdout or stderr goes to would lose what they say. */
static bool is_own_stream(const struct stat *st) {
  struct stat own;
  return (fstat(STDOUT_FILENO, &own) == 0 && mm_same_file(&own, st)) || (fstat(STDERR_FILENO, &own) == 0 && mm_same_file(&own, st));
}

/* *direct: what has the name takes the bytes itself. */
static bool look(const mm_output_place *p, bool *direct, mm_err *err) {
  struct stat st;
  *direct = false;
  if (stat(p->path, &st) != 0) {
    if (errno != ENOENT) return mm_fail_errno(err, mm_at(p->path, NULL), "look at", errno);
    return lstat(p->path, &st) != 0 || refuse(p->path, "found a symbolic link to nothing, expected a file's name", err);
  }
  if (S_ISDIR(st.st_mode)) return refuse(p->path, "found a directory, expected a file's name", err);
  if (S_ISBLK(st.st_mode) || S_ISSOCK(st.st_mode)) return refuse(p->path, "found a device or socket, expected a file's name", err);
  *direct = !S_ISREG(st.st_mode) || is_own_stream(&st);
  return !*direct || p->stream || refuse(p->path, "found a FIFO, a device or the program's own output, expected a file's name", err);
}

/* The file's directory, resolved, and its name there: of what a link leads to, if it is one. */
static bool place(const mm_output_place *p, char *real, const char **name, mm_err *err) {
  char parent[PATH_MAX], base[PATH_MAX];
  if (!realpath(p->path, real)) {
    if (errno != ENOENT) return mm_fail_errno(err, mm_at(p->path, NULL), "resolve the parent of", errno);
    if (!mm_path_split(p->path, parent, base, err)) return false;
    if (!mm_base_name_ok(base, strlen(base))) return refuse(p->path, "found no usable file name", err);
    if (snprintf(real, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, base) >= PATH_MAX)
      return mm_fail_errno(err, mm_at(p->path, NULL), "resolve", ENAMETOOLONG);
  }
  char *slash = strrchr(real, '/');
  *slash = 0;
  *name = slash + 1;
  return true;
}

static bool open_parent(const mm_output_place *p, int *parent, char *real, const char **name, mm_err *err) {
  if (!place(p, real, name, err)) return false;
  *parent = open(*real ? real : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (*parent < 0) return mm_fail_errno(err, mm_at(p->path, NULL), "open the directory of", errno);
  for (const char *const *d = p->apart; d && *d; d++) {
    int inside = mm_lies_in(*parent, *d);
    if (inside == 1) return refuse(p->path, "found an output inside the checkpoint, expected one elsewhere", err);
    if (inside < 0) return mm_fail_errno(err, mm_at(p->path, NULL), "look at the directories above", errno);
  }
  return true;
}

bool mm_output_check(const mm_output_place *p, mm_err *err) {
  char real[PATH_MAX];
  const char *name;
  bool direct;
  int parent = -1;
  if (!look(p, &direct, err)) return false;
  bool ok = direct || open_parent(p, &parent, real, &name, err);
  if (parent >= 0) close(parent);
  return ok;
}

/* Locked, and still what has the name: a run beside this one may have taken it for a killed run's. */
static bool hold(const mm_output *o, mm_err *err) {
  struct stat held, named;
  if (flock(o->fd, LOCK_EX | LOCK_NB) != 0 && !mm_no_locks(errno)) {
    if (errno != EWOULDBLOCK) return mm_fail_errno(err, mm_at(o->path, NULL), "lock", errno);
  } else if (fstat(o->fd, &held) == 0 && fstatat(o->parent, o->staged, &named, AT_SYMLINK_NOFOLLOW) == 0 && mm_same_file(&held, &named)) {
    return true;
  }
  return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(o->path, NULL), "found another run writing this output");
}

static bool open_staged(mm_output *o, mm_err *err) {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  struct stat st;
  o->fd = openat(o->parent, o->staged, flags, 0666);
  if (o->fd < 0 && errno == EEXIST) {
    o->fd = openat(o->parent, o->staged, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    bool ours = o->fd >= 0 && fstat(o->fd, &st) == 0 && S_ISREG(st.st_mode);
    if (o->fd >= 0 && !ours) return refuse(o->staged, "found something that no run of this program left beside the output", err);
    if (o->fd >= 0 && !hold(o, err)) return false;
    if (o->fd >= 0) {
      unlinkat(o->parent, o->staged, 0);
      close(o->fd);
      o->fd = openat(o->parent, o->staged, flags, 0666);
    }
  }
  if (o->fd < 0) return mm_fail_errno(err, mm_at(o->path, NULL), "create", errno);
  return hold(o, err);
}

bool mm_output_open(mm_output *o, const mm_output_place *p, mm_err *err) {
  char real[PATH_MAX];
  const char *name = "";
  *o = (mm_output)MM_OUTPUT_NONE;
  o->path = p->path;
  if (!look(p, &o->direct, err)) return false;
  if (o->direct) {
    o->fd = open(p->path, O_WRONLY | O_CLOEXEC | O_NOCTTY | O_APPEND);
    return o->fd >= 0 || mm_fail_errno(err, mm_at(p->path, NULL), "open", errno);
  }
  bool ok = open_parent(p, &o->parent, real, &name, err) && (o->name = mm_arena_strndup(&o->arena, name, strlen(name), err)) &&
            (o->staged = mm_arena_printf(&o->arena, err, ".%s.partial-%s", name, program_invocation_short_name)) && open_staged(o, err);
  if (ok) return true;
  if (o->fd >= 0) close(o->fd); /* another run's, maybe: it stays */
  o->fd = -1;
  mm_output_discard(o);
  return false;
}

bool mm_output_open_at(mm_output *o, const char *path, int parent, const char *staged, int into, const char *name, mm_err *err) {
  *o = (mm_output){.fd = -1, .parent = parent, .into = into, .path = path};
  o->name = mm_arena_strndup(&o->arena, name, strlen(name), err);
  o->staged = mm_arena_strndup(&o->arena, staged, strlen(staged), err);
  if (o->name && o->staged && open_staged(o, err)) return true;
  if (o->fd >= 0) close(o->fd);
  o->fd = -1;
  mm_output_discard(o);
  return false;
}

/* Whether nothing has the name, or a file with the mark. */
static bool marked(const mm_output *o, int into) {
  char text[4096];
  const int fd = openat(into, o->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT;
  const ssize_t n = read(fd, text, sizeof text);
  close(fd);
  return n > 0 && memmem(text, (size_t)n, o->mark, strlen(o->mark)) != NULL;
}

static bool take_name(const mm_output *o, mm_err *err) {
  struct stat st;
  int into = o->into >= 0 ? o->into : o->parent;
  if (fstatat(into, o->name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(st.st_mode))
    return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(o->path, NULL), "found what was not there when this run began; move it away");
  if (o->mark) {
    /* A link does not replace a file that came since; where there are no links, one that is not there now is not there. */
    if (linkat(o->parent, o->staged, into, o->name, 0) == 0) {
      unlinkat(o->parent, o->staged, 0);
      return mm_fsync(into, o->path, true, err);
    }
    if (!marked(o, into))
      return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(o->path, NULL), "found a file that holds no \"%s\"; move it away", o->mark);
  }
  if (renameat(o->parent, o->staged, into, o->name) != 0) return mm_fail_errno(err, mm_at(o->path, NULL), "publish", errno);
  return mm_fsync(into, o->path, true, err);
}

bool mm_output_publish(mm_output *o, mm_err *err) {
  bool ok = o->direct || (mm_fsync(o->fd, o->path, false, err) && take_name(o, err));
  if (ok) {
    ok = mm_close(o->fd, o->path, err);
    o->fd = -1;
  }
  mm_output_discard(o);
  return ok;
}

void mm_output_discard(mm_output *o) {
  if (o->fd >= 0) {
    if (!o->direct) unlinkat(o->parent, o->staged, 0);
    close(o->fd);
  }
  if (o->parent >= 0) close(o->parent);
  if (o->into >= 0) close(o->into);
  mm_arena_close(&o->arena);
  *o = (mm_output)MM_OUTPUT_NONE;
}
