/* Single output files. */
#include "formats/system/output.h"

#include <dirent.h>
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

#define MARK_WINDOW 65536

/* True if the file, of `size` bytes, is empty or has one of the marks. */
static bool holds_mark(int fd, uint64_t size, const mm_output_mark *mark, size_t marks) {
  char *first = malloc(2 * MARK_WINDOW), *last = first ? first + MARK_WINDOW : NULL; /* too much for a small stack */
  const ssize_t n = first ? pread(fd, first, MARK_WINDOW, 0) : -1,
                m = first ? pread(fd, last, MARK_WINDOW, size > MARK_WINDOW ? (off_t)(size - MARK_WINDOW) : 0) : -1;
  bool found = size == 0;
  for (size_t i = 0; n > 0 && m > 0 && i < marks && !found; i++) {
    const mm_output_mark *x = &mark[i];
    const size_t head = strlen(x->head), text = x->text ? strlen(x->text) : 0;
    if ((size_t)n < x->at + head || memcmp(first + x->at, x->head, head) != 0) continue;
    found = !text || memmem(first, (size_t)n, x->text, text) || memmem(last, (size_t)m, x->text, text);
  }
  free(first);
  return found;
}

/* True if the file has but beginnings of lines that marks begin, each of a run that could write no more, and, if more, such a line of a
 * later run behind them. A line that ends as an object does is no beginning of one. */
static bool holds_cut_lines(int fd, uint64_t size, const mm_output_mark *mark, size_t marks) {
  char text[8192];
  const ssize_t n = pread(fd, text, sizeof text, 0);
  const char *const all = n > 0 ? text + n : text, *end;
  bool cut = false;
  for (const char *at = text; at < all; at = end + 1) {
    bool begun = false, whole = false;
    end = memchr(at, '\n', (size_t)(all - at));
    if (!end) end = all;
    for (size_t i = 0; i < marks; i++) {
      const size_t head = strlen(mark[i].head), line = (size_t)(end - at);
      if (memcmp(at, mark[i].head, mm_min(head, line)) == 0) begun = line > 0, whole = whole || line >= head;
    }
    if (begun && whole && cut && (end[-1] == '}' || size > sizeof text)) return true;
    if (!begun || end[-1] == '}' || (end == all && size > sizeof text)) return false;
    cut = true;
  }
  return cut;
}

/* ---- the inputs ---- */

/* The name of an entry of the directory `dir` that is, or leads to, the file `st`; "" where none does. */
static bool find_entry(const char *dir, const struct stat *st, char name[NAME_MAX + 1], mm_err *err) {
  DIR *d = opendir(dir);
  if (!d) return errno == ENOENT || mm_fail_errno(err, mm_at(dir, NULL), "list", errno);
  bool ok;
  const char *found;
  *name = 0;
  while ((ok = mm_dir_next(d, dir, &found, err)) && found) {
    struct stat x;
    if (fstatat(dirfd(d), found, &x, 0) != 0 || !mm_same_file(&x, st)) continue;
    snprintf(name, NAME_MAX + 1, "%s", found);
    break;
  }
  closedir(d);
  return ok;
}

/* Refuses a file that is there and is one of the inputs. */
static bool no_input(const mm_output_place *p, const struct stat *st, mm_err *err) {
  for (size_t i = 0; i < p->inputs; i++) {
    struct stat in;
    char name[NAME_MAX + 1] = "";
    const char *input = p->input[i];
    if (!input || stat(input, &in) != 0) continue;
    if (S_ISDIR(in.st_mode) && !find_entry(input, st, name, err)) return false;
    if (!*name && !mm_same_file(&in, st)) continue;
    const mm_path path = mm_path_of(input, name);
    const char *text = *name ? path.text : input;
    return mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(p->path, NULL), "found the file that is read as %s, expected another one to write",
                   MM_ESCAPED(PATH_MAX, text));
  }
  return true;
}

/* Refuses a regular file that this program did not make. lines: what is written is appended to it, and may have been cut before. */
static bool may_replace(const mm_output_place *p, const struct stat *st, bool lines, mm_err *err) {
  if (p->force || !p->mark || st->st_size == 0) return true;
  const int fd = open(p->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return mm_fail_errno(err, mm_at(p->path, NULL), "look at", errno);
  const bool ours =
      holds_mark(fd, (uint64_t)st->st_size, p->mark, p->marks) || (lines && holds_cut_lines(fd, (uint64_t)st->st_size, p->mark, p->marks));
  close(fd);
  return ours || refuse(p->path, "found a file that this program did not make, expected none, an empty one or one of its own", err);
}

/* The file that has the target's name, if there is one. */
typedef struct target {
  bool there, direct; /* direct: it takes the bytes itself */
  struct stat st;
} target;

static bool look(const mm_output_place *p, target *t, mm_err *err) {
  *t = (target){0};
  if (stat(p->path, &t->st) != 0) {
    if (errno != ENOENT) return mm_fail_errno(err, mm_at(p->path, NULL), "look at", errno);
    return lstat(p->path, &t->st) != 0 || refuse(p->path, "found a symbolic link to nothing, expected a file's name", err);
  }
  const mode_t mode = t->st.st_mode;
  if (S_ISDIR(mode)) return refuse(p->path, "found a directory, expected a file's name", err);
  if (S_ISBLK(mode) || S_ISSOCK(mode)) return refuse(p->path, "found a device or socket, expected a file's name", err);
  t->there = true;
  t->direct = !S_ISREG(mode) || is_own_stream(&t->st);
  return !t->direct || p->stream || refuse(p->path, "found a FIFO, a device or the program's own output, expected a file's name", err);
}

/* Refuses an input that has the temporary file's name, which this program would take for a killed run's, and a directory where none can be
 * made. */
static bool staged_is_no_input(const mm_output_place *p, int parent, const char *staged, mm_err *err) {
  struct stat st;
  if (fstatat(parent, staged, &st, AT_SYMLINK_NOFOLLOW) == 0) return no_input(p, &st, err);
  return (errno == ENOENT && faccessat(parent, ".", W_OK, AT_EACCESS) == 0) || mm_fail_errno(err, mm_at(p->path, NULL), "create", errno);
}

/* Called after open_parent: a file in an input directory is recognised by its place. */
static bool may_take(const mm_output_place *p, const target *t, bool lines, mm_err *err) {
  return !t->there || (no_input(p, &t->st, err) && (t->direct || may_replace(p, &t->st, lines, err)));
}

/* The file's directory, resolved, and its name there: of what a link leads to, if it is one. */
static bool place(const mm_output_place *p, char *real, const char **name, mm_err *err) {
  char parent[PATH_MAX], base[PATH_MAX];
  if (!realpath(p->path, real)) {
    if (errno != ENOENT) return mm_fail_errno(err, mm_at(p->path, NULL), "resolve the parent of", errno);
    if (!mm_path_split(p->path, parent, base, err)) return false;
    if (!mm_base_name_ok(base, strlen(base))) return refuse(p->path, "found no usable file name, expected one of text", err);
    if (snprintf(real, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, base) >= PATH_MAX)
      return mm_fail_errno(err, mm_at(p->path, NULL), "resolve", ENAMETOOLONG);
  }
  char *slash = strrchr(real, '/');
  *slash = 0;
  *name = slash + 1;
  return true;
}

/* Refuses a file in the open directory `dir` if it is, or lies in, a checkpoint, or is that of Hugging Face's files. */
static bool in_no_checkpoint(const mm_output_place *p, int dir, mm_err *err) {
  const int inside = mm_in_checkpoint(dir);
  if (inside < 0) return mm_fail_errno(err, mm_at(p->path, NULL), "look at the directories above", errno);
  return (inside == 0 && !mm_holds_weights(dir)) || refuse(p->path, "found an output inside a checkpoint, expected one elsewhere", err);
}

/* The same of the directories of the links that the path leads through, as in the Hub's cache: a checkpoint may be one of links. */
static bool links_in_none(const mm_output_place *p, mm_err *err) {
  enum { LINKS = 40 }; /* as the kernel follows */
  char path[PATH_MAX], to[PATH_MAX];
  bool ok = true;
  snprintf(path, sizeof path, "%s", p->path);
  for (int i = 0; ok && i < LINKS; i++) {
    const ssize_t n = readlink(path, to, sizeof to - 1);
    if (n < 0) break;
    to[n] = 0;
    char *slash = strrchr(path, '/'), *const end = slash ? slash + 1 : path;
    const char held = *end;
    *end = 0;
    const int dir = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ok = dir < 0 || in_no_checkpoint(p, dir, err);
    if (dir >= 0) close(dir);
    *end = held;
    if (*to == '/') *path = 0, slash = NULL;
    snprintf(slash ? slash + 1 : path, sizeof path - (size_t)(slash ? slash + 1 - path : 0), "%s", to);
  }
  return ok;
}

static bool open_parent(const mm_output_place *p, int *parent, char *real, const char **name, mm_err *err) {
  if (!place(p, real, name, err)) return false;
  *parent = open(*real ? real : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (*parent < 0) return mm_fail_errno(err, mm_at(p->path, NULL), "open the directory of", errno);
  for (size_t i = 0; i < p->inputs; i++) {
    struct stat st;
    if (!p->input[i] || stat(p->input[i], &st) != 0 || !S_ISDIR(st.st_mode)) continue;
    int inside = mm_lies_in(*parent, p->input[i]);
    if (inside == 1) return refuse(p->path, "found an output inside the checkpoint, expected one elsewhere", err);
    if (inside < 0) return mm_fail_errno(err, mm_at(p->path, NULL), "look at the directories above", errno);
  }
  return in_no_checkpoint(p, *parent, err) && links_in_none(p, err);
}

static char *staged_name(mm_arena *a, const char *name, mm_err *err) {
  return mm_arena_printf(a, err, ".%s.partial-%s", name, program_invocation_short_name);
}

/* renamed: the file appears at once, when it is complete. */
static bool check(const mm_output_place *p, bool renamed, mm_err *err) {
  char real[PATH_MAX];
  const char *name = "";
  target t;
  int parent = -1;
  mm_arena names = {0};
  if (!look(p, &t, err)) return false;
  bool ok = (t.direct || open_parent(p, &parent, real, &name, err)) && may_take(p, &t, !renamed, err);
  const char *staged = ok && !t.direct ? staged_name(&names, name, err) : NULL;
  ok = ok && (t.direct || (staged && staged_is_no_input(p, parent, staged, err)));
  ok = ok && (t.direct || !renamed || mm_may_rename(parent, name, p->path, err));
  mm_arena_close(&names);
  if (parent >= 0) close(parent);
  return ok;
}

bool mm_output_check(const mm_output_place *p, mm_err *err) { return check(p, true, err); }

bool mm_output_outside(const char *path, const char *input, mm_err *err) {
  const mm_output_place p = {.path = path, MM_OUTPUT_INPUTS(input)};
  char real[PATH_MAX];
  const char *name = "";
  int parent = -1;
  const bool ok = open_parent(&p, &parent, real, &name, err);
  if (parent >= 0) close(parent);
  return ok;
}

/* Refuses a file whose place, behind all links, is in the directory. */
static bool not_in(const char *dir, const char *file, mm_err *err) {
  char real[PATH_MAX];
  if (!realpath(file, real)) return true; /* whoever reads it says so */
  char *slash = strrchr(real, '/');
  *slash = 0;
  const int parent = open(*real ? real : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int inside = parent < 0 ? 0 : mm_lies_in(parent, dir);
  if (parent >= 0) close(parent);
  if (inside < 0) return mm_fail_errno(err, mm_at(file, NULL), "look at the directories above", errno);
  return inside == 0 || mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(dir, NULL), "found %s in it, which is read, expected an output elsewhere",
                                MM_ESCAPED(PATH_MAX, file));
}

bool mm_output_dir_check(const char *dir, const char *const *input, size_t inputs, mm_err *err) {
  struct stat st;
  for (size_t i = 0; stat(dir, &st) == 0 && S_ISDIR(st.st_mode) && i < inputs; i++) {
    struct stat in;
    if (!input[i] || stat(input[i], &in) != 0) continue;
    if (S_ISREG(in.st_mode) && !not_in(dir, input[i], err)) return false;
    DIR *d = S_ISDIR(in.st_mode) ? opendir(input[i]) : NULL;
    const char *name = NULL;
    bool ok = true;
    while (d && ok && (ok = mm_dir_next(d, input[i], &name, err)) && name)
      if (fstatat(dirfd(d), name, &in, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(in.st_mode))
        ok = not_in(dir, mm_path_of(input[i], name).text, err);
    if (d) closedir(d);
    if (!ok) return false;
  }
  return true;
}

/* Locks the staged file and checks that it still has its name: another run may have taken it for a killed run's and replaced it. */
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
    if (o->fd >= 0 && !ours)
      return refuse(o->staged, "found something that no run of this program left next to the output, expected nothing or what one left",
                    err);
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

/* For writing as it is. A FIFO is opened once somebody reads it. */
static int open_direct(const mm_output_place *p, int flags, mm_err *err) {
  enum { POLL_US = 50000 };
  struct stat st;
  const int more = O_WRONLY | O_CLOEXEC | O_NOCTTY | O_APPEND | O_NONBLOCK | flags;
  bool said = false;
  int fd;
  while ((fd = open(p->path, more, 0666)) < 0 && errno == ENXIO && stat(p->path, &st) == 0 && S_ISFIFO(st.st_mode)) {
    if (!said) mm_staging_note(p->path, "waiting for a reader of this FIFO");
    said = true;
    if (p->stopped && p->stopped()) {
      mm_fail(err, MM_INTERRUPTED, "E_INTERRUPTED", mm_at(p->path, NULL), "stopped by a signal before anybody read this FIFO");
      return -1;
    }
    usleep(POLL_US);
  }
  if (fd < 0)
    mm_fail_errno(err, mm_at(p->path, NULL), "open", errno);
  else
    fcntl(fd, F_SETFL, O_APPEND); /* writing blocks */
  return fd;
}

bool mm_output_append(int *fd, const mm_output_place *p, mm_err *err) {
  *fd = check(p, false, err) ? open_direct(p, O_CREAT, err) : -1;
  return *fd >= 0;
}

bool mm_output_open(mm_output *o, const mm_output_place *p, mm_err *err) {
  char real[PATH_MAX];
  const char *name = "";
  *o = (mm_output)MM_OUTPUT_NONE;
  o->path = p->path;
  o->mark = p->force ? NULL : p->mark;
  o->marks = p->marks;
  target t;
  if (!look(p, &t, err)) return false;
  o->direct = t.direct;
  if (o->direct) {
    if (!may_take(p, &t, false, err)) return false;
    o->fd = open_direct(p, 0, err);
    return o->fd >= 0;
  }
  bool ok = open_parent(p, &o->parent, real, &name, err) && may_take(p, &t, false, err) &&
            (o->name = mm_arena_strndup(&o->arena, name, strlen(name), err)) && (o->staged = staged_name(&o->arena, name, err)) &&
            staged_is_no_input(p, o->parent, o->staged, err) && mm_may_rename(o->parent, name, p->path, err) && open_staged(o, err);
  if (ok) return true;
  if (o->fd >= 0) close(o->fd); /* another run's, maybe: it stays */
  o->fd = -1;
  mm_output_discard(o);
  return false;
}

bool mm_output_open_at(mm_output *o, const mm_output_place *p, int parent, const char *staged, int into, const char *name, mm_err *err) {
  *o = (mm_output){.fd = -1, .parent = parent, .into = into, .path = p->path, .mark = p->force ? NULL : p->mark, .marks = p->marks};
  o->name = mm_arena_strndup(&o->arena, name, strlen(name), err);
  o->staged = mm_arena_strndup(&o->arena, staged, strlen(staged), err);
  if (o->name && o->staged && staged_is_no_input(p, parent, staged, err) && open_staged(o, err)) return true;
  if (o->fd >= 0) close(o->fd);
  o->fd = -1;
  mm_output_discard(o);
  return false;
}

/* True if no file has the name, or the file that has it bears the mark. */
static bool marked(const mm_output *o, int into) {
  struct stat st;
  const int fd = openat(into, o->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT;
  const bool ours = fstat(fd, &st) == 0 && holds_mark(fd, (uint64_t)st.st_size, o->mark, o->marks);
  close(fd);
  return ours;
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
      return mm_fail(err, MM_IO, "E_OUTPUT", mm_at(o->path, NULL), "found a file that this program did not make; move it away");
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
