/* Files: opening untrusted ones safely, exact reads and writes. */
#include "formats/system/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "formats/system/hub.h"

#define TRANSFER_MAX ((size_t)1 << 30) /* one call; the kernel's own bound is just below 2 GiB */

static int64_t nanoseconds(struct timespec t) {
  return (int64_t)((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec); /* times from a hostile disk may wrap */
}

bool mm_same_file(const struct stat *a, const struct stat *b) { return a->st_dev == b->st_dev && a->st_ino == b->st_ino; }

mm_file_id mm_file_id_of(const struct stat *s) {
  return (mm_file_id){s->st_dev, s->st_ino, (uint64_t)s->st_size, nanoseconds(s->st_mtim), nanoseconds(s->st_ctim)};
}

static const char *kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFDIR: return "a directory";
    case S_IFIFO: return "a FIFO";
    case S_IFSOCK: return "a socket";
    case S_IFCHR:
    case S_IFBLK: return "a device";
    default: return "of an unknown kind";
  }
}

static bool wrong_type(const char *path, const char *what, mm_err *err) {
  return mm_fail(err, MM_BAD_INPUT, "E_FS_TYPE", mm_at(path, NULL), "it is %s, expected a regular file", what);
}

static bool open_failed(const char *path, int reason, mm_err *err) {
  struct stat s;
  switch (reason) {
    case ENOENT:
    case ENOTDIR: {
      char rest[NAME_MAX + 64];
      if (lstat(path, &s) != 0) return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(path, NULL), "no such file");
      return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(path, NULL), "a symbolic link to nothing%s",
                     mm_hub_rest(path, rest, sizeof rest));
    }
    case ELOOP: return wrong_type(path, "a loop of symbolic links", err);
    case ENXIO: return wrong_type(path, stat(path, &s) == 0 ? kind_of(s.st_mode) : "a device", err); /* sockets do not open */
    default: return mm_fail_errno(err, mm_at(path, NULL), "open", reason);
  }
}

bool mm_file_open(mm_file *f, const char *path, mm_err *err) {
  struct stat s;
  *f = (mm_file)MM_FILE_NONE;
  int fd;
  do fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY); /* a FIFO without a writer must not hang us */
  while (fd < 0 && errno == EINTR);
  if (fd < 0) return open_failed(path, errno, err);
  f->fd = fd;
  if (fstat(fd, &s) != 0) {
    mm_fail_errno(err, mm_at(path, NULL), "fstat", errno);
  } else if (!S_ISREG(s.st_mode)) {
    wrong_type(path, kind_of(s.st_mode), err);
  } else {
    f->id = mm_file_id_of(&s);
    f->size = f->id.size;
    return true;
  }
  mm_file_close(f);
  return false;
}

bool mm_file_listed(const char *path, mm_err *err) {
  mm_err reason = {0};
  mm_file f = MM_FILE_NONE;
  const bool ok = mm_file_open(&f, path, &reason);
  mm_file_close(&f);
  return ok || mm_fail_damaged(err, &reason);
}

void mm_file_close(mm_file *f) {
  if (f->fd >= 0) close(f->fd);
  *f = (mm_file)MM_FILE_NONE;
}

bool mm_file_unchanged(const mm_file *f, const char *path, mm_err *err) {
  struct stat s;
  if (stat(path, &s) != 0) {
    char reason[128];
    return mm_fail(err, MM_IO, "E_CHANGED", mm_at(path, NULL), "changed while it was read: %s", strerror_r(errno, reason, sizeof reason));
  }
  mm_file_id now = mm_file_id_of(&s);
  const mm_file_id *was = &f->id;
  const char *what = now.dev != was->dev || now.ino != was->ino ? "it is another file now"
                     : now.size != was->size                    ? "its size is different"
                     : now.mtime_ns != was->mtime_ns            ? "it was written to"
                     : now.ctime_ns != was->ctime_ns            ? "its inode was changed"
                                                                : NULL;
  return !what || mm_fail(err, MM_IO, "E_CHANGED", mm_at(path, NULL), "changed while it was read: %s", what);
}

mm_dir mm_dir_open(const char *path) { return (mm_dir){open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)}; }

bool mm_dir_close(mm_dir *d, const char *path, bool ok, mm_err *err) {
  struct stat was, now;
  char text[128];
  if (d->fd < 0) return ok;
  const bool there = stat(path, &now) == 0;
  const char *reason = there ? "it is another directory now" : strerror_r(errno, text, sizeof text);
  const bool same = fstat(d->fd, &was) != 0 || (there && mm_same_file(&was, &now));
  close(d->fd);
  d->fd = -1;
  const bool cut = strcmp(err->code, "E_SHORT_READ") == 0;
  const bool blamed = ok || ((err->status == MM_BAD_INPUT || err->status == MM_INTEGRITY || cut) && err->text[0]);
  if (same || !blamed) return ok;
  *err = (mm_err){0};
  return mm_fail(err, MM_IO, "E_CHANGED", mm_at(path, NULL), "changed while it was read: %s", reason);
}

bool mm_file_read(const mm_file *f, const char *path, void *buf, size_t n, uint64_t offset, mm_err *err) {
  for (size_t done = 0; done < n;) {
    size_t want = (size_t)mm_min(n - done, TRANSFER_MAX);
    ssize_t got = pread(f->fd, (char *)buf + done, want, (off_t)(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return mm_fail_errno(err, mm_at_offset(path, NULL, offset + done), "read", errno);
    if (got == 0) {
      return mm_fail(err, MM_IO, "E_SHORT_READ", mm_at_offset(path, NULL, offset + done), "the file ends here, %zu more bytes expected",
                     n - done);
    }
    done += (size_t)got;
  }
  return true;
}

/* Asks cachestat. A read with RWF_NOWAIT would also answer, but makes the kernel read ahead up to 8 MiB, which are then read again past
 * the cache. */
bool mm_file_cached(int fd, uint64_t offset, uint64_t n) {
#ifndef SYS_cachestat
#define SYS_cachestat 451 /* on every machine but Alpha */
#endif
  struct {
    uint64_t offset, bytes;
  } range = {offset, n};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } pages = {0};
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  errno = 0;
  return syscall(SYS_cachestat, fd, &range, &pages, 0) == 0 && pages.cached >= (offset + n - 1) / page - offset / page + 1;
}

bool mm_file_stream(const mm_file *f, int direct, const char *path, uint8_t *buf, size_t n, uint64_t offset, size_t *skew, mm_err *err) {
  *skew = offset % MM_DIRECT;
  size_t done = 0;
  ssize_t got;
  if (direct >= 0 && n > 0 && !mm_file_cached(f->fd, offset, n)) { /* the aligned window; the end of the file may cut its last read short */
    uint64_t at = offset - *skew, end = mm_round_up(offset + n, MM_DIRECT);
    uint8_t *to = buf;
    while (at < offset + n && (got = pread(direct, to, (size_t)mm_min(end - at, TRANSFER_MAX), (off_t)at)) > 0) {
      at += (uint64_t)got;
      to += got;
      if (at % MM_DIRECT != 0) break;
    }
    done = at > offset ? (size_t)mm_min(at - offset, n) : 0;
  }
  return done == n || mm_file_read(f, path, buf + *skew + done, n - done, offset + done, err);
}

char *mm_file_slurp(const char *path, uint64_t max, size_t *n, mm_err *err) {
  mm_file f;
  if (!mm_file_open(&f, path, err)) return NULL;
  char *text = NULL;
  if (f.size > max) {
    mm_fail(err, MM_BAD_INPUT, "E_LIMIT", mm_at(path, NULL), "found %" PRIu64 " bytes, expected at most %" PRIu64, f.size, max);
  } else if (!(text = malloc(f.size + 1))) { /* not zeroed: every byte is read */
    mm_fail_memory(err, f.size + 1);
  } else if (text[f.size] = 0, !mm_file_read(&f, path, text, f.size, 0, err)) {
    free(text);
    text = NULL;
  }
  *n = f.size;
  mm_file_close(&f);
  return text;
}

bool mm_pwrite(int fd, const char *path, const void *buf, size_t n, uint64_t offset, mm_err *err) {
  for (size_t done = 0; done < n;) {
    size_t want = (size_t)mm_min(n - done, TRANSFER_MAX);
    ssize_t put = pwrite(fd, (const char *)buf + done, want, (off_t)(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return mm_fail_errno(err, mm_at_offset(path, NULL, offset + done), "write", put < 0 ? errno : EIO);
    done += (size_t)put;
  }
  return true;
}

mm_path mm_path_of(const char *dir, const char *name) {
  mm_path p;
  snprintf(p.text, sizeof p.text, "%s/%s", dir, name);
  return p;
}

bool mm_path_split(const char *path, char parent[PATH_MAX], char name[PATH_MAX], mm_err *err) {
  char copy[PATH_MAX];
  size_t n = strlen(path) + 1;
  if (n > sizeof copy) return mm_fail_errno(err, mm_at(path, NULL), "resolve the parent of", ENAMETOOLONG);
  if (!realpath(dirname(memcpy(copy, path, n)), parent)) return mm_fail_errno(err, mm_at(path, NULL), "resolve the parent of", errno);
  const char *last = basename(memcpy(copy, path, n));
  memcpy(name, last, strlen(last) + 1);
  return true;
}

int mm_create_at(int dirfd, const char *dir, const char *name, mm_err *err) {
  int fd;
  do fd = openat(dirfd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) mm_fail_errno(err, mm_at(mm_path_of(dir, name).text, NULL), "create", errno);
  return fd;
}

bool mm_write_file_at(int dirfd, const char *dir, const char *name, const void *buf, size_t n, mm_err *err) {
  mm_path path = mm_path_of(dir, name);
  int fd = mm_create_at(dirfd, dir, name, err);
  if (fd < 0) return false;
  bool ok = mm_pwrite(fd, path.text, buf, n, 0, err) && mm_fsync(fd, path.text, false, err);
  ok = mm_close(fd, path.text, err) && ok;
  if (!ok) unlinkat(dirfd, name, 0); /* after a failed write or fsync nothing can be said about its bytes */
  return ok;
}

bool mm_size_is(const char *path, uint64_t found, uint64_t expected, mm_err *err) {
  return found == expected || mm_fail(err, MM_INTEGRITY, "E_SIZE", mm_at(path, NULL), "found %llu bytes, expected %llu",
                                      (unsigned long long)found, (unsigned long long)expected);
}

bool mm_no_pointer(const char *text, size_t n, const char *path, mm_err *err) {
  return n < sizeof MM_LFS_POINTER - 1 || memcmp(text, MM_LFS_POINTER, sizeof MM_LFS_POINTER - 1) != 0 ||
         mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at(path, NULL), "found a Git LFS pointer, expected the text: run `git lfs pull`");
}

bool mm_is_dir(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

DIR *mm_dir_at(int dir, const char *path, const char *what, mm_err *err) {
  int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  if (d) return d;
  mm_fail_errno(err, mm_at(path, NULL), what, errno);
  if (fd >= 0) close(fd);
  return NULL;
}

bool mm_dir_next(DIR *d, const char *path, const char **name, mm_err *err) {
  const struct dirent *e;
  do {
    errno = 0;
    e = readdir(d);
  } while (e && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0));
  *name = e ? e->d_name : NULL;
  return e || errno == 0 || mm_fail_errno(err, mm_at(path, NULL), "list", errno);
}

unsigned mm_file_threads(unsigned n, unsigned each, unsigned shared) {
  enum { OTHERS = 64 }; /* of the program, its libraries and whatever opened it */
  struct rlimit l;
  const rlim_t others = OTHERS + (rlim_t)shared, wanted = others + (rlim_t)n * each;
  if (getrlimit(RLIMIT_NOFILE, &l) != 0 || l.rlim_cur >= wanted) return n;
  const struct rlimit more = {.rlim_cur = mm_min(l.rlim_max, wanted), .rlim_max = l.rlim_max};
  if (more.rlim_cur > l.rlim_cur && setrlimit(RLIMIT_NOFILE, &more) == 0) l = more;
  return l.rlim_cur <= others + each ? 1 : (unsigned)mm_min(n, (l.rlim_cur - others) / each);
}

bool mm_fsync(int fd, const char *path, bool directory, mm_err *err) {
  int r;
  do r = fsync(fd);
  while (r != 0 && errno == EINTR);
  if (r == 0 || (directory && (errno == EINVAL || errno == ENOTSUP))) return true; /* some file systems cannot sync directories */
  return mm_fail_errno(err, mm_at(path, NULL), "fsync", errno);
}

int mm_ftruncate(int fd, uint64_t size) {
  int r;
  do r = ftruncate(fd, (off_t)size);
  while (r != 0 && errno == EINTR);
  return r;
}

bool mm_no_locks(int reason) { return reason == ENOLCK || reason == EOPNOTSUPP || reason == ENOSYS; }

bool mm_close(int fd, const char *path, mm_err *err) {
  if (close(fd) == 0 || errno == EINTR) return true; /* Linux has released the descriptor when it says EINTR */
  return mm_fail_errno(err, mm_at(path, NULL), "close", errno);
}

bool mm_base_name_ok(const char *name, size_t n) {
  if (n == 0 || n > 255 || (n == 1 && name[0] == '.') || (n == 2 && name[0] == '.' && name[1] == '.')) return false;
  for (size_t i = 0; i < n; i++) {
    uint8_t c = (uint8_t)name[i];
    if (c < 0x20 || c == 0x7F || c == '/' || c == '\\') return false;
  }
  return true;
}
